//! The simulated runtime: one thread, one seed, virtual time. Tasks belong to a node; a crash drops them all.
//!
//! The next task to run is drawn from the seed among all runnable ones, so that every legal interleaving of
//! `!Send` futures can come up. Time moves only when nothing is runnable.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use super::{enter, Instant, LocalFuture, Queue, Runtime, TimerId};

/// A simulated process: the unit that crashes.
pub type NodeTag = u32;

/// Owns what devices still do after the process that asked for it has gone. Never killed.
const DEVICES: NodeTag = NodeTag::MAX;

/// Steps without any time passing after which a simulation counts as a busy loop.
const STEPS_AT_ONE_INSTANT_MAX: u64 = 20_000_000;

thread_local! {
    static RUNNING: RefCell<Weak<SimState>> = const { RefCell::new(Weak::new()) };
}

/// Small, fast, seedable: splitmix64. Good enough to draw schedules and faults from.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed ^ 0x6a09_e667_f3bc_c909)
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `0..bound`; `bound` must not be 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "an empty range has no member to draw");
        self.next_u64() % bound
    }

    pub fn range(&mut self, low: u64, high_exclusive: u64) -> u64 {
        low + self.below(high_exclusive - low)
    }

    /// True in `numerator` of `denominator` draws.
    pub fn chance(&mut self, numerator: u64, denominator: u64) -> bool {
        self.below(denominator) < numerator
    }

    /// A generator of its own, so that one consumer's draws do not shift another's.
    pub fn fork(&mut self) -> Rng {
        Rng::new(self.next_u64())
    }
}

struct SimTask {
    node: NodeTag,
    future: Option<LocalFuture>,
    waker: Waker,
}

struct TaskWaker {
    id: u64,
    /// In `runnable` already.
    queued: AtomicBool,
    runnable: Arc<Mutex<Vec<Arc<TaskWaker>>>>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        if !self.queued.swap(true, Ordering::Relaxed) {
            let runnable = self.runnable.clone();
            runnable.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(self);
        }
    }
}

struct SimState {
    tasks: RefCell<HashMap<u64, SimTask>>,
    runnable: Arc<Mutex<Vec<Arc<TaskWaker>>>>,
    timers: RefCell<BTreeMap<(Instant, u64), Waker>>,
    serial: Cell<u64>,
    now: Cell<Instant>,
    wall_base_ms: u64,
    wall_offset_ms: RefCell<HashMap<NodeTag, i64>>,
    node: Cell<NodeTag>,
    steps_at_now: Cell<u64>,
    schedule: RefCell<Rng>,
    random: RefCell<Rng>,
    /// Nodes that stand still, with those of their tasks that would run.
    paused: RefCell<BTreeMap<NodeTag, Vec<Arc<TaskWaker>>>>,
    blocking_max: Cell<Duration>,
}

/// Handle to a simulation; clone it into the tasks that steer it.
#[derive(Clone)]
pub struct Sim {
    state: Rc<SimState>,
}

struct SimRuntime(Rc<SimState>);

/// Puts the outer simulation, usually none, back; also when a task panics.
struct Running(Weak<SimState>);

impl Drop for Running {
    fn drop(&mut self) {
        RUNNING.with(|running| running.replace(std::mem::take(&mut self.0)));
    }
}

impl Sim {
    pub fn new(seed: u64) -> Sim {
        let mut rng = Rng::new(seed);
        Sim {
            state: Rc::new(SimState {
                tasks: RefCell::default(),
                runnable: Arc::default(),
                timers: RefCell::default(),
                serial: Cell::new(0),
                now: Cell::new(Instant(1_000_000_000)),
                wall_base_ms: 1_700_000_000_000,
                wall_offset_ms: RefCell::default(),
                node: Cell::new(0),
                steps_at_now: Cell::new(0),
                schedule: RefCell::new(rng.fork()),
                random: RefCell::new(rng.fork()),
                paused: RefCell::default(),
                blocking_max: Cell::new(Duration::ZERO),
            }),
        }
    }

    /// Runs `main` (as node 0) and everything it spawns until `main` is done.
    ///
    /// Panics when nothing is runnable, no timer is armed and `main` still waits: a lost wake-up.
    pub fn run<T: 'static>(&self, main: impl Future<Output = T> + 'static) -> T {
        let result: Rc<RefCell<Option<T>>> = Rc::default();
        let slot = result.clone();
        let _entered = enter(Rc::new(SimRuntime(self.state.clone())));
        let outer = RUNNING.with(|running| running.replace(Rc::downgrade(&self.state)));
        let _running = Running(outer);
        self.spawn_on(0, async move {
            let value = main.await;
            *slot.borrow_mut() = Some(value);
        });
        loop {
            if let Some(value) = result.borrow_mut().take() {
                self.drop_all();
                return value;
            }
            assert!(self.step(), "simulation stalled at {:?}: nothing runnable, no timer armed", self.state.now.get());
        }
    }

    /// Starts a task that belongs to `node`; what it spawns belongs to the same node.
    pub fn spawn_on(&self, node: NodeTag, future: impl Future<Output = ()> + 'static) {
        let previous = self.state.node.replace(node);
        self.state.spawn(Box::pin(future));
        self.state.node.set(previous);
    }

    /// Drops every task of `node` where it stands: a kill -9. Its disk is told separately.
    pub fn kill(&self, node: NodeTag) {
        let doomed: Vec<u64> =
            self.state.tasks.borrow().iter().filter(|(_, t)| t.node == node).map(|(id, _)| *id).collect();
        let mut doomed = doomed;
        doomed.sort_unstable();
        for id in doomed {
            let task = self.state.tasks.borrow_mut().remove(&id);
            drop(task);
        }
        self.resume(node);
    }

    /// Nothing of `node` runs until [`Sim::resume`], while time goes on: a SIGSTOP.
    pub fn pause(&self, node: NodeTag) {
        self.state.paused.borrow_mut().entry(node).or_default();
    }

    pub fn resume(&self, node: NodeTag) {
        let waiting = self.state.paused.borrow_mut().remove(&node).unwrap_or_default();
        self.state.runnable.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).extend(waiting);
    }

    /// From now on [`super::blocking`] takes a drawn time below `max`, at whose end the work is done: a node that is
    /// killed until then has not begun it.
    pub fn set_blocking(&self, max: Duration) {
        self.state.blocking_max.set(max);
    }

    /// Moves the wall clock of a node by `ms` (either way); its monotonic clock does not move.
    pub fn step_wall_clock(&self, node: NodeTag, ms: i64) {
        *self.state.wall_offset_ms.borrow_mut().entry(node).or_insert(0) += ms;
    }

    pub fn now(&self) -> Instant {
        self.state.now.get()
    }

    pub fn tasks_alive(&self) -> usize {
        self.state.tasks.borrow().len()
    }

    /// Drops every task where it stands, with what they start while they are dropped. For a simulation that ended in
    /// a panic: its tasks hold the simulation, which holds them.
    pub fn abandon(&self) {
        let _entered = enter(Rc::new(SimRuntime(self.state.clone())));
        self.drop_all();
    }

    fn drop_all(&self) {
        loop {
            // In the order in which they were started: what they do while they are dropped must not depend on more.
            let tasks: BTreeMap<u64, SimTask> = self.state.tasks.borrow_mut().drain().collect();
            if tasks.is_empty() {
                break;
            }
            drop(tasks);
        }
        let timers = std::mem::take(&mut *self.state.timers.borrow_mut());
        drop(timers);
        let runnable =
            std::mem::take(&mut *self.state.runnable.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
        drop(runnable);
    }

    fn step(&self) -> bool {
        let next = {
            let mut runnable = self.state.runnable.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            match runnable.len() {
                0 => None,
                count => {
                    let index = self.state.schedule.borrow_mut().below(count as u64) as usize;
                    Some(runnable.swap_remove(index))
                }
            }
        };
        let Some(next) = next else { return self.advance() };
        let id = next.id;
        if !self.state.paused.borrow().is_empty() {
            let node = self.state.tasks.borrow().get(&id).map(|task| task.node);
            let mut paused = self.state.paused.borrow_mut();
            if let Some(waiting) = node.and_then(|node| paused.get_mut(&node)) {
                waiting.push(next);
                return true;
            }
        }
        next.queued.store(false, Ordering::Relaxed);
        let steps = self.state.steps_at_now.get() + 1;
        assert!(steps < STEPS_AT_ONE_INSTANT_MAX, "busy loop at {:?}: tasks run, time does not", self.now());
        self.state.steps_at_now.set(steps);
        let taken = {
            let mut tasks = self.state.tasks.borrow_mut();
            tasks.get_mut(&id).and_then(|task| task.future.take().map(|future| (future, task.waker.clone(), task.node)))
        };
        let Some((mut future, waker, node)) = taken else { return true };
        self.state.node.set(node);
        let poll = future.as_mut().poll(&mut Context::from_waker(&waker));
        self.state.node.set(0);
        match poll {
            Poll::Ready(()) => {
                let done = self.state.tasks.borrow_mut().remove(&id);
                drop(done);
            }
            Poll::Pending => {
                // A task that was killed while it ran is not put back.
                if let Some(task) = self.state.tasks.borrow_mut().get_mut(&id) {
                    task.future = Some(future);
                }
            }
        }
        true
    }

    fn advance(&self) -> bool {
        let due: Vec<Waker> = {
            let mut timers = self.state.timers.borrow_mut();
            let Some((&(at, _), _)) = timers.iter().next() else { return false };
            self.state.now.set(self.state.now.get().max(at));
            self.state.steps_at_now.set(0);
            let later = timers.split_off(&(Instant(at.0 + 1), 0));
            std::mem::replace(&mut *timers, later).into_values().collect()
        };
        due.into_iter().for_each(Waker::wake);
        true
    }
}

impl SimState {
    fn spawn(&self, future: LocalFuture) {
        let id = self.serial.get();
        self.serial.set(id + 1);
        let task_waker = TaskWaker { id, queued: AtomicBool::new(false), runnable: self.runnable.clone() };
        let waker = Waker::from(Arc::new(task_waker));
        self.tasks
            .borrow_mut()
            .insert(id, SimTask { node: self.node.get(), future: Some(future), waker: waker.clone() });
        waker.wake();
    }
}

impl Runtime for SimRuntime {
    fn spawn(&self, _queue: Queue, task: LocalFuture) {
        self.0.spawn(task);
    }

    fn now(&self) -> Instant {
        self.0.now.get()
    }

    fn wall_clock_ms(&self) -> u64 {
        let offset = self.0.wall_offset_ms.borrow().get(&self.0.node.get()).copied().unwrap_or(0);
        (self.0.wall_base_ms + self.0.now.get().0 / 1_000_000).saturating_add_signed(offset)
    }

    fn add_timer(&self, at: Instant, waker: Waker) -> TimerId {
        let serial = self.0.serial.get();
        self.0.serial.set(serial + 1);
        self.0.timers.borrow_mut().insert((at, serial), waker);
        TimerId { at, serial }
    }

    fn cancel_timer(&self, id: TimerId) {
        let cancelled = self.0.timers.borrow_mut().remove(&(id.at, id.serial));
        drop(cancelled);
    }

    fn random_u64(&self) -> u64 {
        self.0.random.borrow_mut().next_u64()
    }

    fn run_blocking(&self, job: Box<dyn FnOnce() + Send>) {
        let max = self.0.blocking_max.get();
        if max.is_zero() {
            return job();
        }
        let wait = Duration::from_nanos(self.0.random.borrow_mut().below(max.as_nanos() as u64));
        self.0.spawn(Box::pin(async move {
            super::sleep(wait).await;
            job();
        }));
    }

    fn remote_wake(&self) -> Box<dyn Fn(Waker) + Send> {
        Box::new(Waker::wake)
    }
}

/// The virtual time, if the calling thread is inside a simulation.
pub fn now_in_simulation() -> Option<Instant> {
    RUNNING.with(|running| running.borrow().upgrade()).map(|state| state.now.get())
}

/// Starts a task that no kill ends: a device that finishes what it was given. Outside a simulation it is dropped.
pub(crate) fn spawn_device(future: impl Future<Output = ()> + 'static) {
    if let Some(state) = RUNNING.with(|running| running.borrow().upgrade()) {
        Sim { state }.spawn_on(DEVICES, future);
    }
}

/// Runs one future in a fresh simulation.
pub fn run<T: 'static>(seed: u64, main: impl Future<Output = T> + 'static) -> T {
    Sim::new(seed).run(main)
}

/// Sleeps a random time below `max` (virtual), so that tasks of equal length do not stay in step.
pub async fn jitter(rng: &mut Rng, max: Duration) {
    let nanos = rng.below(max.as_nanos().max(1) as u64);
    super::sleep(Duration::from_nanos(nanos)).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rt;

    #[test]
    fn virtual_time_moves_only_when_nothing_runs() {
        let elapsed = run(7, async {
            let start = rt::now();
            let a = rt::spawn(Queue::Foreground, async { rt::sleep(Duration::from_secs(3600)).await });
            a.await;
            rt::now() - start
        });
        assert_eq!(elapsed, Duration::from_secs(3600));
    }

    #[test]
    fn one_seed_gives_one_schedule() {
        let order = |seed| {
            run(seed, async {
                let log: Rc<RefCell<Vec<u32>>> = Rc::default();
                let tasks: Vec<_> = (0..20)
                    .map(|i| {
                        let log = log.clone();
                        rt::spawn(Queue::Foreground, async move {
                            rt::yield_now().await;
                            log.borrow_mut().push(i);
                        })
                    })
                    .collect();
                for task in tasks {
                    task.await;
                }
                let order = log.borrow().clone();
                order
            })
        };
        assert_eq!(order(1), order(1));
        assert_ne!(order(1), order(2));
    }

    #[test]
    fn a_killed_node_never_runs_again() {
        let sim = Sim::new(3);
        let steps: Rc<Cell<u32>> = Rc::default();
        let (seen, handle) = (steps.clone(), sim.clone());
        sim.run(async move {
            handle.spawn_on(9, async move {
                loop {
                    seen.set(seen.get() + 1);
                    rt::sleep(Duration::from_millis(1)).await;
                }
            });
            rt::sleep(Duration::from_millis(5)).await;
            handle.kill(9);
            rt::sleep(Duration::from_secs(1)).await;
        });
        assert!(steps.get() >= 4 && steps.get() <= 7, "{}", steps.get());
    }

    #[test]
    fn timeout_drops_the_slow_future() {
        let result = run(1, async { rt::timeout(Duration::from_millis(10), std::future::pending::<()>()).await });
        assert_eq!(result, Err(rt::Elapsed));
    }
}
