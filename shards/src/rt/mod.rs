//! The only door to the executor: spawning, time, randomness, waiting. Two runtimes stand behind it:
//! `ring` (glommio as scheduler, one io_uring per shard) and `sim` (seeded, virtual time).
//!
//! A runtime is entered once per thread; every function here acts on the runtime of the calling thread.
//! Nothing in this crate uses another executor, timer, channel or clock.

mod metrics;
#[cfg(test)]
mod queue_tests;
pub mod ring;
mod ring_os;
mod ring_pool;
mod ring_task;
#[cfg(test)]
pub(crate) mod ring_tests;
mod several;
pub mod sim;
mod sleep;
mod spin;
pub mod sync;

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::ops::{Add, Sub};
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use crate::spsc::Doorbell;

pub use metrics::RuntimeMetrics;
pub use several::{all, first_of};
pub use sleep::{sleep, sleep_until, submitted, timeout, yield_now, Elapsed, Sleep};
pub use spin::{Spin, DRIVE_SPIN};

pub(crate) type LocalFuture = Pin<Box<dyn Future<Output = ()>>>;

/// Which share of the core a task runs in: an overdriven produce must not starve consume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Queue {
    /// WAL, and connections whose last request was neither consume nor ack: first come, first served.
    Foreground,
    /// Dispatch and commit: a share of its own, so that what was accepted becomes visible however many connections
    /// produce more. A record passes many polls on its way, and each would wait for a round of all connections.
    Commit,
    /// Consume: a share of its own, so that an overdriven produce cannot starve it.
    Consume,
    /// Retention, zero-fill, recovery scans: one bounded slice a turn while there is other work.
    Background,
}

/// A point of the runtime's monotonic clock, in nanoseconds. Drives leases, waits and ticks (storage G21).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Instant(pub u64);

impl Instant {
    pub fn saturating_since(self, earlier: Instant) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Instant {
    type Output = Instant;
    fn add(self, rhs: Duration) -> Instant {
        Instant(self.0.saturating_add(u64::try_from(rhs.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl Sub<Instant> for Instant {
    type Output = Duration;
    fn sub(self, rhs: Instant) -> Duration {
        self.saturating_since(rhs)
    }
}

/// What a runtime offers. Object-safe, so that shard code names no runtime.
pub(crate) trait Runtime {
    fn spawn(&self, queue: Queue, task: LocalFuture);
    fn now(&self) -> Instant;
    /// Wall clock, ms since the epoch. May step in either direction.
    fn wall_clock_ms(&self) -> u64;
    fn add_timer(&self, at: Instant, waker: Waker) -> TimerId;
    fn cancel_timer(&self, id: TimerId);
    /// Cryptographic quality on the ring runtime (receipt nonces, C19); from the seed in simulation.
    fn random_u64(&self) -> u64;
    /// Runs `job` off the shard's thread; in simulation in place, at once.
    fn run_blocking(&self, job: Box<dyn FnOnce() + Send>);
    /// Wakes a task of this runtime from another thread: see `blocking`.
    fn remote_wake(&self) -> Box<dyn Fn(Waker) + Send>;
    /// See [`is_woken`].
    fn is_woken(&self) -> bool {
        true
    }
    /// See [`forget_wake`].
    fn forget_wake(&self) {}
    /// See [`submitted`]: wakes the task when that is so.
    fn wake_when_submitted(&self, waker: Waker) {
        waker.wake();
    }
    /// Has the runtime poll `inbox` each turn, and returns the bell that its senders ring. `None`: the runtime has
    /// no loop of its own for that; a task must do it.
    fn add_inbox(&self, _inbox: Rc<dyn Inbox>) -> Option<Arc<Doorbell>> {
        None
    }
}

/// Messages from other threads, looked at each turn of the loop and once more before it sleeps.
pub(crate) trait Inbox {
    /// Takes what is there. Returns whether there was anything.
    fn drain(&self) -> bool;
    /// Whether something is there, without taking it.
    fn is_empty(&self) -> bool;
}

/// See [`Runtime::add_inbox`].
pub(crate) fn add_inbox(inbox: Rc<dyn Inbox>) -> Option<Arc<Doorbell>> {
    current().add_inbox(inbox)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TimerId {
    pub at: Instant,
    pub serial: u64,
}

thread_local! {
    static CURRENT: RefCell<Option<Rc<dyn Runtime>>> = const { RefCell::new(None) };
}

const OUTSIDE: &str = "called outside a runtime: rt functions work on shard threads and in simulation only";

fn current() -> Rc<dyn Runtime> {
    CURRENT.with(|c| c.borrow().clone()).expect(OUTSIDE)
}

/// For what comes back at once and enters nothing.
fn with_current<T>(act: impl FnOnce(&dyn Runtime) -> T) -> T {
    CURRENT.with(|c| act(&**c.borrow().as_ref().expect(OUTSIDE)))
}

/// Makes `runtime` the thread's runtime until the returned guard is dropped.
pub(crate) fn enter(runtime: Rc<dyn Runtime>) -> Entered {
    let previous = CURRENT.with(|c| c.borrow_mut().replace(runtime));
    Entered { previous }
}

pub(crate) struct Entered {
    previous: Option<Rc<dyn Runtime>>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.with(|c| *c.borrow_mut() = self.previous.take());
    }
}

/// Starts a task. The handle may be dropped: the task goes on. A panic in it takes the process down (E25).
pub fn spawn<T: 'static>(queue: Queue, future: impl Future<Output = T> + 'static) -> Task<T> {
    let (sender, receiver) = sync::oneshot();
    current().spawn(
        queue,
        Box::pin(async move {
            let value = future.await;
            let _ = sender.send(value); // nobody has to wait for it
        }),
    );
    Task { receiver }
}

/// Runs `future` in the queue that `queue` names. When a poll has changed that, the rest of it runs in the other queue:
/// work whose kind is known only once it has begun takes its share from the right one.
pub fn spawn_following(queue: Rc<Cell<Queue>>, mut future: Pin<Box<dyn Future<Output = ()>>>) {
    let here = queue.get();
    spawn(here, async move {
        let ended = std::future::poll_fn(|cx| match future.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(true),
            Poll::Pending if queue.get() != here => Poll::Ready(false),
            Poll::Pending => Poll::Pending,
        });
        if !ended.await {
            // Polled there at once: what has happened since the poll above is found by it.
            spawn_following(queue, future);
        }
    });
}

/// Result of a spawned task, to be awaited or dropped.
pub struct Task<T> {
    receiver: sync::Receiver<T>,
}

impl<T> Future for Task<T> {
    type Output = T;
    fn poll(mut self: Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> std::task::Poll<T> {
        match Pin::new(&mut self.receiver).poll(cx) {
            std::task::Poll::Ready(Some(value)) => std::task::Poll::Ready(value),
            // The runtime is being torn down and dropped the task: its waiter goes with it.
            std::task::Poll::Ready(None) | std::task::Poll::Pending => std::task::Poll::Pending,
        }
    }
}

/// The time. It stands still while a task is being polled, in simulation as on a real clock: one look serves the whole
/// poll.
pub fn now() -> Instant {
    with_current(|runtime| runtime.now())
}

pub fn wall_clock_ms() -> u64 {
    with_current(|runtime| runtime.wall_clock_ms())
}

pub fn random_u64() -> u64 {
    with_current(|runtime| runtime.random_u64())
}

/// Whether the task that is being polled has been woken since this poll began, as far as the runtime can tell.
pub fn is_woken() -> bool {
    with_current(|runtime| runtime.is_woken())
}

/// Takes the wake of the task that is being polled back: for one that something in this very poll has caused, and that
/// is known to be for nothing. To be called only where [`is_woken`] was false right before it.
pub fn forget_wake() {
    with_current(|runtime| runtime.forget_wake());
}

/// Runs a closure that may block (a password hash, a large frame's decompression) off the shard.
pub async fn blocking<T: Send + 'static>(job: impl FnOnce() -> T + Send + 'static) -> T {
    use std::sync::Mutex;
    let runtime = current();
    let slot: Arc<Mutex<(Option<T>, Option<Waker>)>> = Arc::new(Mutex::new((None, None)));
    let filled = slot.clone();
    let wake = runtime.remote_wake();
    runtime.run_blocking(Box::new(move || {
        let value = job();
        let mut slot = filled.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        slot.0 = Some(value);
        if let Some(waker) = slot.1.take() {
            wake(waker);
        }
    }));
    std::future::poll_fn(move |cx| {
        let mut slot = slot.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match slot.0.take() {
            Some(value) => std::task::Poll::Ready(value),
            None => {
                slot.1 = Some(cx.waker().clone());
                std::task::Poll::Pending
            }
        }
    })
    .await
}

/// Runs a future and turns its panic into an error: for HTTP handlers and background sweeps only (E25).
pub async fn contain<T>(future: impl Future<Output = T>) -> Result<T, String> {
    let mut future = std::pin::pin!(future);
    std::future::poll_fn(move |cx| match std::panic::catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
        Ok(poll) => poll.map(Ok),
        Err(panic) => std::task::Poll::Ready(Err(panic_text(panic.as_ref()))),
    })
    .await
}

/// The text of a panic, as far as it has one.
pub fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (None, Some(text)) => text.clone(),
        (None, None) => "panic without a text".to_owned(),
    }
}
