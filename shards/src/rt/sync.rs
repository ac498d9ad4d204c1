//! Waiting between tasks of one thread: `oneshot` and `Notify`. Neither is `Send`; threads talk through `spsc`.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

struct OneshotState<T> {
    value: Option<T>,
    waker: Option<Waker>,
    sender_gone: bool,
    receiver_gone: bool,
}

/// A single value from one task to another.
pub fn oneshot<T>() -> (Sender<T>, Receiver<T>) {
    let state =
        Rc::new(RefCell::new(OneshotState { value: None, waker: None, sender_gone: false, receiver_gone: false }));
    (Sender { state: state.clone() }, Receiver { state })
}

pub struct Sender<T> {
    state: Rc<RefCell<OneshotState<T>>>,
}

impl<T> Sender<T> {
    /// Hands the value over; gives it back when nobody waits any more.
    pub fn send(self, value: T) -> Result<(), T> {
        let mut state = self.state.borrow_mut();
        if state.receiver_gone {
            return Err(value);
        }
        state.value = Some(value);
        if let Some(waker) = state.waker.take() {
            waker.wake();
        }
        Ok(())
    }

    /// Whether the receiver was dropped: its caller has gone.
    pub fn is_closed(&self) -> bool {
        self.state.borrow().receiver_gone
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        let mut state = self.state.borrow_mut();
        state.sender_gone = true;
        if let Some(waker) = state.waker.take() {
            waker.wake();
        }
    }
}

/// Resolves to the value, or to `None` when the sender was dropped without sending.
pub struct Receiver<T> {
    state: Rc<RefCell<OneshotState<T>>>,
}

impl<T> Future for Receiver<T> {
    type Output = Option<T>;
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        let mut state = self.state.borrow_mut();
        if let Some(value) = state.value.take() {
            return Poll::Ready(Some(value));
        }
        if state.sender_gone {
            return Poll::Ready(None);
        }
        state.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        self.state.borrow_mut().receiver_gone = true;
    }
}

#[derive(Default)]
struct NotifyState {
    permit: bool,
    generation: u64,
    next_waiter: u64,
    waiters: VecDeque<(u64, Waker)>,
}

/// Wakes waiting tasks. A notification without a waiter is kept (once) for the next one, so none is lost.
#[derive(Clone, Default)]
pub struct Notify {
    state: Rc<RefCell<NotifyState>>,
}

impl Notify {
    pub fn new() -> Notify {
        Notify::default()
    }

    /// Wakes one waiter, or lets the next one pass at once.
    pub fn notify_one(&self) {
        let mut state = self.state.borrow_mut();
        state.permit = true;
        if let Some((_, waker)) = state.waiters.pop_front() {
            waker.wake();
        }
    }

    /// Wakes everybody who waits now; leaves no permit.
    pub fn notify_all(&self) {
        let mut state = self.state.borrow_mut();
        state.generation += 1;
        for (_, waker) in state.waiters.drain(..) {
            waker.wake();
        }
    }

    pub fn notified(&self) -> Notified {
        let generation = self.state.borrow().generation;
        Notified { state: self.state.clone(), generation, waiter: None }
    }
}

pub struct Notified {
    state: Rc<RefCell<NotifyState>>,
    generation: u64,
    waiter: Option<u64>,
}

impl Future for Notified {
    type Output = ();
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        let mut state = this.state.borrow_mut();
        if let Some(id) = this.waiter.take() {
            state.waiters.retain(|(waiter, _)| *waiter != id);
        }
        if state.generation != this.generation || std::mem::take(&mut state.permit) {
            return Poll::Ready(());
        }
        let id = state.next_waiter;
        state.next_waiter += 1;
        state.waiters.push_back((id, cx.waker().clone()));
        this.waiter = Some(id);
        Poll::Pending
    }
}

impl Drop for Notified {
    fn drop(&mut self) {
        if let Some(id) = self.waiter.take() {
            let mut state = self.state.borrow_mut();
            let before = state.waiters.len();
            state.waiters.retain(|(waiter, _)| *waiter != id);
            // It had been woken for a permit and never took it: pass the wake on (lesson N33.2).
            if before == state.waiters.len() && state.permit {
                if let Some((_, waker)) = state.waiters.pop_front() {
                    waker.wake();
                }
            }
        }
    }
}

/// Mutual exclusion between tasks, held across awaits; first come, first served. By default one at a time.
#[derive(Clone, Default)]
pub struct Lock {
    state: Rc<RefCell<LockState>>,
}

#[derive(Default)]
struct LockState {
    held: usize,
    /// Beside the first one.
    others_max: usize,
    waiting: VecDeque<Sender<LockGuard>>,
}

/// Holds a [`Lock`] until dropped.
pub struct LockGuard {
    state: Option<Rc<RefCell<LockState>>>,
}

impl Lock {
    /// One that up to `count` hold at a time, at least one.
    pub fn of_several(count: usize) -> Lock {
        let state = LockState { others_max: count.saturating_sub(1), ..LockState::default() };
        Lock { state: Rc::new(RefCell::new(state)) }
    }

    /// Whether anybody holds it, waits for it, or has another clone of it.
    pub fn in_use(&self) -> bool {
        Rc::strong_count(&self.state) > 1
    }

    /// Whether the next one to enter would have to wait.
    pub fn is_held(&self) -> bool {
        let state = self.state.borrow();
        state.held > state.others_max
    }

    pub async fn enter(&self) -> LockGuard {
        let waiting = {
            let mut state = self.state.borrow_mut();
            if state.held <= state.others_max {
                state.held += 1;
                return LockGuard { state: Some(self.state.clone()) };
            }
            let (sender, receiver) = oneshot();
            state.waiting.push_back(sender);
            receiver
        };
        match waiting.await {
            Some(guard) => guard,
            // The runtime is being torn down: nobody will hand the lock on any more.
            None => std::future::pending().await,
        }
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        let Some(lock) = self.state.take() else { return };
        loop {
            let next = lock.borrow_mut().waiting.pop_front();
            let Some(next) = next else {
                lock.borrow_mut().held -= 1;
                return;
            };
            match next.send(LockGuard { state: Some(lock.clone()) }) {
                Ok(()) => return,
                // Its waiter has gone: the next one gets it.
                Err(mut guard) => guard.state = None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rt::{self, sim, Queue};
    use std::cell::Cell;
    use std::time::Duration;

    #[test]
    fn a_lock_is_exclusive_and_handed_over_in_order() {
        for seed in 0..20 {
            sim::run(seed, async {
                let lock = Lock::default();
                let inside: Rc<Cell<bool>> = Rc::default();
                let order: Rc<RefCell<Vec<u32>>> = Rc::default();
                let first = lock.enter().await;
                let mut tasks = Vec::new();
                for name in 0..5 {
                    let (lock, inside, order) = (lock.clone(), inside.clone(), order.clone());
                    tasks.push(rt::spawn(Queue::Foreground, async move {
                        let _held = lock.enter().await;
                        assert!(!inside.replace(true));
                        rt::sleep(Duration::from_millis(1)).await;
                        inside.set(false);
                        order.borrow_mut().push(name);
                    }));
                    rt::sleep(Duration::from_millis(1)).await;
                }
                drop(first);
                for task in tasks {
                    task.await;
                }
                assert_eq!(*order.borrow(), [0, 1, 2, 3, 4]);
            });
        }
    }

    #[test]
    fn a_lock_of_several_lets_so_many_in_at_once() {
        for seed in 0..20 {
            sim::run(seed, async {
                let lock = Lock::of_several(3);
                let (inside, most): (Rc<Cell<u32>>, Rc<Cell<u32>>) = Default::default();
                let tasks = (0..10).map(|_| {
                    let (lock, inside, most) = (lock.clone(), inside.clone(), most.clone());
                    rt::spawn(Queue::Foreground, async move {
                        let _held = lock.enter().await;
                        inside.set(inside.get() + 1);
                        most.set(most.get().max(inside.get()));
                        rt::sleep(Duration::from_millis(1)).await;
                        inside.set(inside.get() - 1);
                    })
                });
                for task in tasks.collect::<Vec<_>>() {
                    task.await;
                }
                assert_eq!((inside.get(), most.get()), (0, 3));
            });
        }
    }

    #[test]
    fn a_waiter_that_gave_up_does_not_keep_the_lock() {
        sim::run(1, async {
            let lock = Lock::default();
            let held = lock.enter().await;
            let gave_up = rt::timeout(Duration::from_millis(1), lock.enter()).await;
            assert!(gave_up.is_err());
            drop(held);
            drop(lock.enter().await);
            // Handed over, but dropped before it was polled again.
            let held = lock.enter().await;
            let mut waiting = Box::pin(lock.enter());
            let polled = rt::timeout(Duration::ZERO, &mut waiting).await;
            assert!(polled.is_err());
            drop(held);
            drop(waiting);
            drop(lock.enter().await);
        });
    }
}
