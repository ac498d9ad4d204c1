//! Timers and yielding, on top of whichever runtime the thread has entered.

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use super::{current, Instant, Runtime, TimerId};

/// Completes once the runtime's clock has reached the given instant. Dropping it cancels the timer.
pub struct Sleep {
    at: Instant,
    armed: Option<(Rc<dyn Runtime>, TimerId, Waker)>,
}

pub fn sleep(duration: Duration) -> Sleep {
    sleep_until(current().now() + duration)
}

pub fn sleep_until(at: Instant) -> Sleep {
    Sleep { at, armed: None }
}

impl Future for Sleep {
    type Output = ();
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if let Some((runtime, id, waker)) = self.armed.take() {
            let waits = runtime.now() < self.at;
            if waits && waker.will_wake(cx.waker()) {
                self.armed = Some((runtime, id, waker));
                return Poll::Pending;
            }
            runtime.cancel_timer(id);
        }
        let runtime = current();
        if runtime.now() >= self.at {
            return Poll::Ready(());
        }
        let id = runtime.add_timer(self.at, cx.waker().clone());
        self.armed = Some((runtime, id, cx.waker().clone()));
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some((runtime, id, _)) = self.armed.take() {
            runtime.cancel_timer(id);
        }
    }
}

/// The time given to [`timeout`] passed first.
#[derive(Debug, PartialEq, Eq)]
pub struct Elapsed;

/// Waits for `future`, at most `duration`. The future is dropped when time runs out.
pub async fn timeout<T>(duration: Duration, future: impl Future<Output = T>) -> Result<T, Elapsed> {
    let mut future = std::pin::pin!(future);
    let mut sleep = sleep(duration);
    std::future::poll_fn(move |cx| {
        if let Poll::Ready(value) = future.as_mut().poll(cx) {
            return Poll::Ready(Ok(value));
        }
        Pin::new(&mut sleep).poll(cx).map(|()| Err(Elapsed))
    })
    .await
}

/// Lets every other runnable task have a turn.
pub async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(move |cx| {
        if yielded {
            return Poll::Ready(());
        }
        yielded = true;
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await
}

/// Completes once every task that is runnable now has had a turn, and what they gave the ring is with the kernel: for
/// work that must not delay their answers.
pub async fn submitted() {
    let mut asked = false;
    std::future::poll_fn(move |cx| {
        if asked {
            return Poll::Ready(());
        }
        asked = true;
        current().wake_when_submitted(cx.waker().clone());
        Poll::Pending
    })
    .await
}
