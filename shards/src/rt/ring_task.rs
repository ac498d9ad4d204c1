//! The tasks of a ring runtime: their table, their wakers, and the count of those that are runnable.
//!
//! glommio decides the order of tasks; whether anything is runnable at all is counted here, exactly: a task counts
//! from its wake to its poll. The pump sleeps while the count is above zero and blocks in the ring only at zero, so
//! nothing depends on which queue glommio runs first (lesson g11).

use std::cell::{Cell, UnsafeCell};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Wake, Waker};

use super::{LocalFuture, Queue};
use crate::spsc::Doorbell;

/// What other threads may touch of a runtime.
pub(super) struct Shared {
    /// Unique in the process, so that a waker recognises its own thread.
    pub id: u64,
    pub bell: Arc<Doorbell>,
    remote: Mutex<Vec<Arc<TaskWaker>>>,
    remote_pending: AtomicBool,
}

/// The thread's own counts. One ring runtime per thread.
pub(super) struct Local {
    pub id: Cell<u64>,
    /// Runnable tasks of each queue.
    foreground: Cell<usize>,
    commit: Cell<usize>,
    consume: Cell<usize>,
    background: Cell<usize>,
    /// glommio's waker of the pump.
    pump: UnsafeCell<Option<Waker>>,
}

thread_local! {
    pub(super) static LOCAL: Local = const {
        Local {
            id: Cell::new(0),
            foreground: Cell::new(0),
            commit: Cell::new(0),
            consume: Cell::new(0),
            background: Cell::new(0),
            pump: UnsafeCell::new(None),
        }
    };
}

impl Local {
    pub fn reset(&self, id: u64) {
        self.id.set(id);
        self.foreground.set(0);
        self.commit.set(0);
        self.consume.set(0);
        self.background.set(0);
        // SAFETY: `Local` is only reached through the thread-local; no reference into the cell is held across calls.
        let old = unsafe { (*self.pump.get()).take() };
        drop(old);
    }

    pub fn set_pump(&self, waker: &Waker) {
        // SAFETY: as in `reset`.
        let slot = unsafe { &mut *self.pump.get() };
        if slot.is_none() {
            *slot = Some(waker.clone());
        }
    }

    /// Lets the pump have a turn. Does nothing when it is about to have one.
    pub fn wake_pump(&self) {
        // SAFETY: as in `reset`; waking glommio's task only queues it, it does not call back here.
        if let Some(pump) = unsafe { &*self.pump.get() } {
            pump.wake_by_ref();
        }
    }

    fn count(&self, queue: Queue) -> &Cell<usize> {
        match queue {
            Queue::Foreground => &self.foreground,
            Queue::Commit => &self.commit,
            Queue::Consume => &self.consume,
            Queue::Background => &self.background,
        }
    }

    pub fn runnable(&self, queue: Queue) -> usize {
        self.count(queue).get()
    }

    /// Whether a task is runnable that no slice of background work may hold up.
    pub fn anything_urgent(&self) -> bool {
        self.foreground.get() + self.commit.get() + self.consume.get() > 0
    }

    pub fn anything_runnable(&self) -> bool {
        self.anything_urgent() || self.background.get() > 0
    }
}

impl Shared {
    pub fn new(id: u64, bell: Arc<Doorbell>) -> Shared {
        Shared { id, bell, remote: Mutex::default(), remote_pending: AtomicBool::new(false) }
    }

    pub fn has_remote(&self) -> bool {
        self.remote_pending.load(Ordering::Acquire)
    }

    /// Wakes what other threads have woken. On the runtime's thread.
    pub fn wake_remote(&self) -> bool {
        if !self.remote_pending.swap(false, Ordering::AcqRel) {
            return false;
        }
        let woken = std::mem::take(&mut *self.remote.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
        woken.into_iter().for_each(|task| task.wake());
        true
    }

    fn push_remote(&self, task: Arc<TaskWaker>) {
        self.remote.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(task);
        self.remote_pending.store(true, Ordering::Release);
        self.bell.ring();
    }
}

/// The waker of one spawned task. May be cloned, woken and dropped on any thread.
pub(super) struct TaskWaker {
    shared: Arc<Shared>,
    queue: Queue,
    /// Woken and not polled since: counted as runnable. Used by the runtime's thread only; an atomic because the
    /// waker is shared.
    woken: AtomicBool,
    /// glommio's waker of the task. Touched by the runtime's thread only; `None` before the first poll and after
    /// the end, so that the last reference may be dropped on any thread.
    inner: UnsafeCell<Option<Waker>>,
}

// SAFETY: `inner` is read and written on the runtime's thread only: `wake` compares the thread's runtime id first,
// `begin_poll` and `end` are called by the task itself. It is `None` whenever the last reference can be dropped
// elsewhere, because the task holds one until `end`.
unsafe impl Send for TaskWaker {}
// SAFETY: as above.
unsafe impl Sync for TaskWaker {}

impl TaskWaker {
    /// A task that is runnable from the start. On the runtime's thread.
    pub fn spawned(shared: Arc<Shared>, queue: Queue) -> Arc<TaskWaker> {
        LOCAL.with(|local| local.count(queue).set(local.count(queue).get() + 1));
        Arc::new(TaskWaker { shared, queue, woken: AtomicBool::new(true), inner: UnsafeCell::new(None) })
    }

    /// The task is being polled: it is not runnable any more, unless it is woken again. On the runtime's thread.
    pub fn begin_poll(&self, inner: &Waker) {
        self.uncount();
        // SAFETY: on the runtime's thread, see above; no other reference into the cell exists.
        let slot = unsafe { &mut *self.inner.get() };
        if slot.is_none() {
            *slot = Some(inner.clone());
        }
    }

    /// Not runnable (any more). On the runtime's thread.
    pub fn uncount(&self) {
        if self.is_woken() {
            self.woken.store(false, Ordering::Relaxed);
            LOCAL.with(|local| {
                let count = local.count(self.queue);
                count.set(count.get().checked_sub(1).expect("a woken task is counted"));
            });
        }
    }

    pub fn queue(&self) -> Queue {
        self.queue
    }

    pub fn is_woken(&self) -> bool {
        self.woken.load(Ordering::Relaxed)
    }

    /// The task is over: wakes have no effect from here on. On the runtime's thread.
    pub fn end(&self) {
        self.uncount();
        // Stays "woken" for ever, uncounted: `wake` returns at once.
        self.woken.store(true, Ordering::Relaxed);
        // SAFETY: on the runtime's thread, see above.
        let inner = unsafe { (*self.inner.get()).take() };
        drop(inner);
    }

    fn wake_local(&self, local: &Local) {
        if self.is_woken() {
            return;
        }
        self.woken.store(true, Ordering::Relaxed);
        let count = local.count(self.queue);
        count.set(count.get() + 1);
        // SAFETY: on the runtime's thread, checked by the caller; glommio only queues the task.
        if let Some(inner) = unsafe { &*self.inner.get() } {
            inner.wake_by_ref();
        }
    }
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let here = LOCAL.try_with(|local| {
            let own = local.id.get() == self.shared.id;
            if own {
                self.wake_local(local);
            }
            own
        });
        if !here.unwrap_or(false) {
            self.shared.push_remote(self.clone());
        }
    }
}

/// One task.
pub(super) struct Task {
    /// Taken out while it is polled.
    pub future: Option<LocalFuture>,
    pub waker: Arc<TaskWaker>,
}

/// Every task that is not over. The futures live here and not in glommio's tasks, so that they can be dropped when
/// the runtime ends.
#[derive(Default)]
pub(super) struct Tasks {
    pub slots: Vec<Option<Task>>,
    free: Vec<usize>,
}

impl Tasks {
    pub fn insert(&mut self, task: Task) -> usize {
        match self.free.pop() {
            Some(index) => {
                self.slots[index] = Some(task);
                index
            }
            None => {
                self.slots.push(Some(task));
                self.slots.len() - 1
            }
        }
    }

    pub fn waker(&self, index: usize) -> Option<&TaskWaker> {
        self.slots.get(index)?.as_ref().map(|task| &*task.waker)
    }

    pub fn remove(&mut self, index: usize) -> Option<Task> {
        let task = self.slots[index].take();
        self.free.extend(task.is_some().then_some(index));
        task
    }

    pub fn remove_any(&mut self) -> Option<Task> {
        let index = self.slots.iter().position(Option::is_some)?;
        self.remove(index)
    }
}
