//! A few threads for what may block: a password hash, listing a directory. Shared by all shards of the process.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

type Job = Box<dyn FnOnce() + Send>;

const THREADS_MAX: usize = 4;
/// A thread without work ends after that long.
const IDLE: Duration = Duration::from_secs(10);

struct Pool {
    state: Mutex<State>,
    work: Condvar,
}

struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

static POOL: Pool =
    Pool { state: Mutex::new(State { jobs: VecDeque::new(), threads: 0, idle: 0 }), work: Condvar::new() };

/// Queues a job. New threads may run on `cpus`, not on the one core of the shard that happens to start them.
pub(super) fn run(job: Job, cpus: &libc::cpu_set_t) {
    let mut state = POOL.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    state.jobs.push_back(job);
    if state.idle >= state.jobs.len() || state.threads >= THREADS_MAX {
        drop(state);
        POOL.work.notify_one();
        return;
    }
    state.threads += 1;
    drop(state);
    let cpus = *cpus;
    let started = std::thread::Builder::new().name("narad-blocking".to_owned()).spawn(move || {
        // SAFETY: plain system call; `cpus` is a valid set of the stated size. Failing leaves the thread where it is.
        unsafe { libc::sched_setaffinity(0, std::mem::size_of::<libc::cpu_set_t>(), &cpus) };
        serve();
    });
    if let Err(error) = started {
        super::ring::die(&format!("cannot start a thread for blocking work: {error}"));
    }
}

fn serve() {
    let mut state = POOL.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    loop {
        if let Some(job) = state.jobs.pop_front() {
            drop(state);
            // Nobody else will ever answer the task that waits for this job.
            if let Err(panic) = std::panic::catch_unwind(AssertUnwindSafe(job)) {
                super::ring::die(&format!("panic in blocking work: {}", super::panic_text(panic.as_ref())));
            }
            state = POOL.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            continue;
        }
        state.idle += 1;
        let (guard, timeout) = POOL.work.wait_timeout(state, IDLE).unwrap_or_else(|poisoned| poisoned.into_inner());
        state = guard;
        state.idle -= 1;
        if timeout.timed_out() && state.jobs.is_empty() {
            state.threads -= 1;
            return;
        }
    }
}
