//! The real runtime: glommio schedules the tasks of one thread, one io_uring does everything else.
//!
//! The pump is a task of glommio's like the others. It sleeps while anything else is runnable; when nothing is, or
//! a slice is over, it submits what was queued, takes completions, timers and messages, and wakes their tasks. Only
//! when that woke nobody it blocks, in one `io_uring_enter` that ends with the first completion, doorbell or timer.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::io::{self, Write as _};
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use glommio::{Latency, LocalExecutorBuilder, Placement, Shares, TaskQueueHandle};
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rand_chacha::ChaCha20Rng;

use super::ring_os::{allowed_cpus, cut_to, monotonic_nanos, os_seed, pin_to};
use super::ring_task::{Local, Shared, Task, TaskWaker, Tasks, LOCAL};
use super::spin::{Patience, Spin};
use super::{Inbox, Instant, LocalFuture, Queue, Runtime, TimerId};
use crate::histogram::Histogram;
use crate::io::ring::{Listener, Ring, RingDisk, RingSizes, Udp};
use crate::io::{ChunkPool, Disk};
use crate::rt::RuntimeMetrics;
use crate::spsc::Doorbell;

/// A queue that still has runnable tasks gives way after that long, so that I/O and the other queues go on.
const SLICE_NANOS: u64 = 200_000;
/// Spins between two looks at the clock: reading it takes longer than looking for work.
const SPINS_PER_LOOK: u32 = 8;
/// A thread that spins gives way that often: the kernel's workers that issue flushes run on this CPU too, and would wait
/// for the end of a time slice while it polls for what they have yet to do.
const SPIN_YIELD_NANOS: u64 = 3_000;

/// How a shard's thread runs.
#[derive(Clone, Debug)]
pub struct Options {
    /// Named in the last line of a process that a panic takes down.
    pub name: String,
    /// The core to pin the thread to; `None` leaves it to the kernel.
    pub cpu: Option<usize>,
    /// Where threads for blocking work run when this one starts them: CPUs that no shard is pinned to, so that a
    /// directory listing takes no time from a shard. Empty: wherever the process may.
    pub helper_cpus: Vec<usize>,
    /// Ignored on a thread that is not pinned.
    pub spin: Spin,
    pub sizes: RingSizes,
    /// A panic in a task aborts the process (E25). Off only where a test wants to see the panic.
    pub abort_on_panic: bool,
}

impl Options {
    pub fn new(name: &str) -> Options {
        Options {
            name: name.to_owned(),
            cpu: None,
            helper_cpus: Vec::new(),
            spin: Spin::Never,
            sizes: RingSizes::default(),
            abort_on_panic: true,
        }
    }
}

/// What a shard gets from its runtime beyond `rt`'s functions.
#[derive(Clone)]
pub struct RingHandle {
    runtime: Rc<RingRuntime>,
}

impl RingHandle {
    /// Files below `root`. `direct: false` (`--dev`) goes through the page cache.
    pub fn disk(&self, root: &Path, direct: bool) -> io::Result<Disk> {
        RingDisk::new(self.runtime.ring.clone(), root, direct).map(Disk::Ring)
    }

    /// A listener of this shard alone on an address that other shards listen on too (`SO_REUSEPORT`).
    pub fn listen(&self, address: std::net::SocketAddr) -> io::Result<Listener> {
        Listener::bind(self.runtime.ring.clone(), address)
    }

    /// A UDP socket of this shard alone. `offload`: the kernel joins datagrams that arrive (E55).
    pub fn udp(&self, address: std::net::SocketAddr, offload: bool) -> io::Result<Udp> {
        Udp::bind(self.runtime.ring.clone(), address, offload)
    }

    /// Registers up to `chunks` of the pool's chunks with the ring, as far as memlock allows; returns how many (E26).
    pub fn register_chunks(&self, pool: &mut ChunkPool, chunks: usize) -> usize {
        self.runtime.ring.register_chunks(pool, chunks)
    }

    /// Bytes registered so far.
    pub fn registered_bytes(&self) -> u64 {
        self.runtime.ring.registered().bytes()
    }

    /// Has the kernel hold the data directory's lock until this ring's last write has landed (E12).
    pub fn hold_lock(&self, lock: std::os::fd::BorrowedFd<'_>) -> io::Result<()> {
        self.runtime.ring.hold(lock)
    }

    /// Connections beyond this many would wait for others to end; the limit for one shard is at most this.
    pub fn connections_max(&self) -> usize {
        self.runtime.ring.connections_max()
    }

    pub fn metrics(&self) -> RuntimeMetrics {
        self.runtime.ring.metrics()
    }

    /// Microseconds of each enter that submitted and did not wait (E30).
    pub fn submit_micros(&self) -> Histogram {
        self.runtime.ring.submit_micros()
    }
}

#[derive(Clone, Copy)]
struct Queues {
    foreground: TaskQueueHandle,
    commit: TaskQueueHandle,
    consume: TaskQueueHandle,
    background: TaskQueueHandle,
}

struct RingRuntime {
    me: Weak<RingRuntime>,
    ring: Rc<Ring>,
    shared: Arc<Shared>,
    queues: Queues,
    name: String,
    abort_on_panic: bool,
    tasks: RefCell<Tasks>,
    timers: RefCell<BTreeMap<(Instant, u64), Waker>>,
    serial: Cell<u64>,
    random: RefCell<ChaCha20Rng>,
    inboxes: RefCell<Vec<Rc<dyn Inbox>>>,
    /// Tasks that go on after the next submission.
    after_submit: RefCell<Vec<Waker>>,
    spin: Spin,
    /// For [`Spin::ForDrive`].
    patience: Patience,
    /// CPUs of threads for blocking work; read before this thread was pinned (lesson P2).
    cpus: libc::cpu_set_t,
    stopping: Cell<bool>,
    /// Index of the task that is being polled.
    polling: Cell<usize>,
    /// The time as the task that is being polled sees it; 0 until it asks.
    clock: Cell<u64>,
    slice_start: Cell<u64>,
    main_done: RefCell<Option<Waker>>,
}

/// Runs `main`, and everything it spawns, on the calling thread until `main` is done; then drops what is left.
///
/// Fails when the kernel refuses a ring; the error says what to change.
pub fn run_shard_thread<T, F>(options: Options, main: impl FnOnce(RingHandle) -> F) -> io::Result<T>
where
    T: 'static,
    F: Future<Output = T> + 'static,
{
    let cpus = allowed_cpus()?;
    if let Some(cpu) = options.cpu {
        pin_to(cpu, &cpus)?;
    }
    let cpus = cut_to(&cpus, &options.helper_cpus);
    // glommio gets no I/O to do: the smallest buffers and rings, a preemption timer that never fires (lesson g11),
    // and no placement: the thread is pinned already, by what the process may use (lessons P1 to P5).
    let executor = LocalExecutorBuilder::new(Placement::Unbound)
        .name(&options.name)
        .io_memory(64 << 10)
        .ring_depth(16)
        .preempt_timer(Duration::from_secs(400 * 24 * 3600))
        .make()
        .map_err(|error| io::Error::other(format!("cannot start the executor of {}: {error}", options.name)))?;
    let ring = Ring::new(&options.sizes)?;
    let seed = os_seed()?;
    executor.run(async move {
        let runtime = Rc::new_cyclic(|me| RingRuntime::new(me.clone(), ring, seed, cpus, &options));
        let _entered = super::enter(runtime.clone());
        let result: Rc<RefCell<Option<T>>> = Rc::default();
        let main = main(RingHandle { runtime: runtime.clone() });
        let (slot, ending) = (result.clone(), runtime.clone());
        runtime.spawn(
            Queue::Foreground,
            Box::pin(async move {
                let value = main.await;
                *slot.borrow_mut() = Some(value);
                ending.stop();
            }),
        );
        runtime.start_pump();
        std::future::poll_fn(|cx| match runtime.stopping.get() {
            true => Poll::Ready(()),
            false => {
                *runtime.main_done.borrow_mut() = Some(cx.waker().clone());
                Poll::Pending
            }
        })
        .await;
        runtime.tear_down();
        let value = result.borrow_mut().take();
        Ok(value.expect("the main task stores its value before it stops the runtime"))
    })
}

impl RingRuntime {
    fn new(
        me: Weak<RingRuntime>,
        ring: Rc<Ring>,
        seed: [u8; 32],
        cpus: libc::cpu_set_t,
        options: &Options,
    ) -> RingRuntime {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        LOCAL.with(|local| local.reset(id));
        let queue = |shares, name: &str| {
            glommio::executor().create_task_queue(Shares::Static(shares), Latency::NotImportant, name)
        };
        let bell = Arc::new(ring.doorbell());
        RingRuntime {
            me,
            ring,
            shared: Arc::new(Shared::new(id, bell)),
            // Connections that produce give way to what drains: accepted messages pile up unseen otherwise. When all are
            // hungry, foreground has a ninth of what the pump leaves.
            queues: Queues {
                foreground: queue(250, "foreground"),
                commit: queue(1000, "commit"),
                consume: queue(1000, "consume"),
                background: queue(25, "background"),
            },
            name: options.name.clone(),
            abort_on_panic: options.abort_on_panic,
            tasks: RefCell::default(),
            timers: RefCell::default(),
            serial: Cell::new(0),
            random: RefCell::new(ChaCha20Rng::from_seed(seed)),
            inboxes: RefCell::default(),
            after_submit: RefCell::default(),
            spin: if options.cpu.is_some() { options.spin } else { Spin::Never },
            patience: Patience::default(),
            cpus,
            stopping: Cell::new(false),
            polling: Cell::new(0),
            clock: Cell::new(0),
            slice_start: Cell::new(monotonic_nanos()),
            main_done: RefCell::default(),
        }
    }

    fn stop(&self) {
        self.stopping.set(true);
        if let Some(waker) = self.main_done.borrow_mut().take() {
            waker.wake();
        }
        LOCAL.with(Local::wake_pump);
    }

    /// Drops every task where it stands, then waits for the kernel.
    fn tear_down(&self) {
        while let Some(task) = { self.tasks.borrow_mut().remove_any() } {
            task.waker.end();
            drop(task);
        }
        let timers = self.timers.take();
        drop(timers);
        let inboxes = self.inboxes.take();
        drop(inboxes);
        self.ring.close();
        LOCAL.with(|local| local.reset(0));
    }

    fn poll_task(&self, index: usize, waker: &Arc<TaskWaker>, as_waker: &Waker, inner: &Waker) -> Poll<()> {
        if self.stopping.get() {
            return Poll::Ready(());
        }
        if !waker.is_woken() {
            return Poll::Pending; // the wake was taken back
        }
        self.polling.set(index);
        let future = self.tasks.borrow_mut().slots[index].as_mut().and_then(|task| task.future.take());
        let mut future = future.expect("a task is in the table until it is done, and polled once at a time");
        waker.begin_poll(inner);
        self.clock.set(0);
        let poll = self.guarded(|| future.as_mut().poll(&mut Context::from_waker(as_waker)));
        match poll {
            Poll::Pending => {
                if let Some(task) = &mut self.tasks.borrow_mut().slots[index] {
                    task.future = Some(future);
                }
            }
            Poll::Ready(()) => {
                drop(future);
                let task = self.tasks.borrow_mut().remove(index);
                drop(task);
                waker.end();
            }
        }
        self.after_poll(waker.queue());
        poll
    }

    /// A panic in the data plane takes the process down, with the reason in the last line (E25).
    fn guarded<T>(&self, act: impl FnOnce() -> T) -> T {
        match std::panic::catch_unwind(AssertUnwindSafe(act)) {
            Ok(value) => value,
            Err(panic) if self.abort_on_panic => {
                die(&format!("panic on shard thread {}: {}", self.name, super::panic_text(panic.as_ref())))
            }
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// Decides whether the pump gets its turn now. It must whenever nothing else would bring it about.
    fn after_poll(&self, queue: Queue) {
        LOCAL.with(|local| {
            if queue == Queue::Background {
                // One slice a turn.
                give_way();
                local.wake_pump();
                return;
            }
            let burst_is_over = queue == Queue::Consume && local.runnable(Queue::Consume) == 0;
            if burst_is_over || !local.anything_urgent() {
                // What consumers were answered goes out before produce has its next slice: they ask for the next
                // message only when they have this one.
                local.wake_pump();
                return;
            }
            // A look at the clock each time: a poll may have parsed a batch of megabytes.
            let now = monotonic_nanos();
            if now.saturating_sub(self.slice_start.get()) > SLICE_NANOS {
                self.slice_start.set(now);
                give_way();
                local.wake_pump();
            }
        });
    }

    fn start_pump(self: &Rc<Self>) {
        let runtime = self.clone();
        let queue = glommio::executor().create_task_queue(Shares::Static(1000), Latency::NotImportant, "pump");
        let pump = std::future::poll_fn(move |cx| {
            while !runtime.stopping.get() {
                LOCAL.with(|local| local.set_pump(cx.waker()));
                runtime.guarded(|| runtime.turn());
                if LOCAL.with(Local::anything_runnable) {
                    return Poll::Pending;
                }
            }
            Poll::Ready(())
        });
        let task = glommio::spawn_local_into(pump, queue).expect("the queue was just made");
        let _runs_on = task.detach();
    }

    /// Submits, takes completions, messages and due timers; blocks when nothing is runnable.
    fn turn(&self) {
        self.clock.set(0);
        self.ring.reap();
        self.take_messages();
        self.expire_timers(monotonic_nanos());
        let mut waiting = self.after_submit.take();
        if LOCAL.with(Local::anything_runnable) || !waiting.is_empty() {
            if self.ring.wants_enter() {
                self.ring.enter(None);
            }
            waiting.drain(..).for_each(Waker::wake);
        } else if !self.spin_for_work() {
            self.block();
        }
        self.after_submit.replace(waiting);
        self.clock.set(0);
        self.ring.reap();
        self.take_messages();
        let now = monotonic_nanos();
        self.expire_timers(now);
        self.slice_start.set(now);
        self.ring.count_turn();
    }

    fn take_messages(&self) {
        if self.shared.has_remote() {
            self.shared.wake_remote();
        }
        let inboxes = self.inboxes.borrow().len();
        for index in 0..inboxes {
            let inbox = self.inboxes.borrow()[index].clone();
            inbox.drain();
        }
    }

    fn has_messages(&self) -> bool {
        self.shared.has_remote() || self.inboxes.borrow().iter().any(|inbox| !inbox.is_empty())
    }

    /// Looks for work without blocking, see [`Spin`]. Returns whether there may be some.
    fn spin_for_work(&self) -> bool {
        let limit = match self.spin {
            Spin::Always(limit) => limit,
            Spin::ForDrive(limit) if self.ring.files_in_flight() && self.patience.lasts(self.ring.files_ended()) => {
                limit
            }
            Spin::ForDrive(_) | Spin::Never => return false,
        };
        if self.ring.wants_enter() {
            self.ring.enter(None);
        }
        let now = Instant(monotonic_nanos());
        let spun = |until: u64| {
            let time = Duration::from_nanos(until - now.0);
            self.ring.count_spin(time);
            self.patience.spun(time, limit);
        };
        let until = self.next_timer().map_or(now + limit, |timer| timer.min(now + limit));
        let (mut at, mut yielded) = (now, now);
        while at < until {
            if at.0 - yielded.0 > SPIN_YIELD_NANOS {
                std::thread::yield_now();
                yielded = at;
            }
            for _ in 0..SPINS_PER_LOOK {
                if self.ring.has_completions() || self.has_messages() {
                    // The last look at the clock is near enough for the account, and one less before the work.
                    spun(at.0);
                    if self.ring.wants_enter() {
                        self.ring.enter(None);
                    }
                    return true;
                }
                std::hint::spin_loop();
            }
            at = Instant(monotonic_nanos());
        }
        spun(at.0);
        false
    }

    fn block(&self) {
        if self.ring.samples_submission() {
            self.ring.enter(None);
            if self.ring.has_completions() {
                return;
            }
        }
        let parking = &self.shared.bell.parking;
        parking.park();
        // The last look: who publishes after it sees the flag and rings (E28).
        if self.has_messages() {
            parking.unpark();
            return;
        }
        let wait = self.next_timer().map(|at| at - Instant(monotonic_nanos()));
        self.ring.enter(Some(wait));
        parking.unpark();
    }

    fn next_timer(&self) -> Option<Instant> {
        self.timers.borrow().first_key_value().map(|(&(at, _), _)| at)
    }

    fn expire_timers(&self, now: u64) {
        loop {
            let due = match self.timers.borrow_mut().first_entry() {
                Some(entry) if entry.key().0 .0 <= now => entry.remove(),
                _ => return,
            };
            due.wake();
        }
    }

    fn next_serial(&self) -> u64 {
        let serial = self.serial.get();
        self.serial.set(serial + 1);
        serial
    }
}

/// Ends the run of the current task queue, so that the others get their share.
fn give_way() {
    let executor = glommio::executor();
    let mut yielding = pin!(executor.yield_task_queue_now());
    // The first poll marks the queue; the wake that it does by itself is not needed here.
    let _ = yielding.as_mut().poll(&mut Context::from_waker(Waker::noop()));
}

impl Runtime for RingRuntime {
    fn spawn(&self, queue: Queue, future: LocalFuture) {
        let Some(runtime) = self.me.upgrade() else { return };
        let waker = TaskWaker::spawned(self.shared.clone(), queue);
        let index = self.tasks.borrow_mut().insert(Task { future: Some(future), waker: waker.clone() });
        let handle = match queue {
            Queue::Foreground => self.queues.foreground,
            Queue::Commit => self.queues.commit,
            Queue::Consume => self.queues.consume,
            Queue::Background => self.queues.background,
        };
        let as_waker = Waker::from(waker.clone());
        let body = std::future::poll_fn(move |cx| runtime.poll_task(index, &waker, &as_waker, cx.waker()));
        let task = glommio::spawn_local_into(body, handle).expect("the runtime's queues live as long as it");
        let _runs_on = task.detach();
    }

    fn now(&self) -> Instant {
        if self.clock.get() == 0 {
            self.clock.set(monotonic_nanos());
        }
        Instant(self.clock.get())
    }

    fn wall_clock_ms(&self) -> u64 {
        let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        since_epoch.map_or(0, |elapsed| elapsed.as_millis() as u64)
    }

    fn add_timer(&self, at: Instant, waker: Waker) -> TimerId {
        let serial = self.next_serial();
        self.timers.borrow_mut().insert((at, serial), waker);
        TimerId { at, serial }
    }

    fn cancel_timer(&self, id: TimerId) {
        let cancelled = self.timers.borrow_mut().remove(&(id.at, id.serial));
        drop(cancelled);
    }

    fn random_u64(&self) -> u64 {
        self.random.borrow_mut().next_u64()
    }

    fn run_blocking(&self, job: Box<dyn FnOnce() + Send>) {
        super::ring_pool::run(job, &self.cpus);
    }

    fn remote_wake(&self) -> Box<dyn Fn(Waker) + Send> {
        Box::new(Waker::wake)
    }

    fn is_woken(&self) -> bool {
        self.tasks.borrow().waker(self.polling.get()).is_none_or(|waker| waker.is_woken())
    }

    fn forget_wake(&self) {
        if let Some(waker) = self.tasks.borrow().waker(self.polling.get()) {
            waker.uncount();
        }
    }

    fn wake_when_submitted(&self, waker: Waker) {
        self.after_submit.borrow_mut().push(waker);
    }

    fn add_inbox(&self, inbox: Rc<dyn Inbox>) -> Option<Arc<Doorbell>> {
        self.inboxes.borrow_mut().push(inbox);
        Some(self.shared.bell.clone())
    }
}

/// The last line of a process that cannot go on (E25).
pub(super) fn die(reason: &str) -> ! {
    // Not by a macro that panics where standard error cannot be written: the process must end here.
    let _ = writeln!(std::io::stderr(), "narad: {reason}; the process stops");
    std::process::abort()
}
