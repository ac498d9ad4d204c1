//! Operations as futures, and the descriptors that they hold open.

use std::future::Future;
use std::os::fd::RawFd;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use io_uring::{squeue, types};

use super::{Class, Completion, Keep, OpId, Ring};

/// An operation as a future of its completion. Dropping it abandons the operation.
pub(crate) struct Op {
    ring: Rc<Ring>,
    id: Option<OpId>,
}

impl Op {
    /// # Safety
    /// As for [`Ring::start`].
    pub unsafe fn start(ring: &Rc<Ring>, class: Class, entry: squeue::Entry, keep: Keep) -> Op {
        // SAFETY: the caller's promise.
        let id = unsafe { ring.start(class, entry, keep) };
        Op { ring: ring.clone(), id: Some(id) }
    }
}

impl Future for Op {
    type Output = Completion;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Completion> {
        let id = self.id.expect("an operation is not polled after its completion");
        let completion = std::task::ready!(self.ring.poll_op(id, cx));
        self.id = None;
        Poll::Ready(completion)
    }
}

impl Drop for Op {
    fn drop(&mut self) {
        if let Some(id) = self.id.take() {
            self.ring.abandon(id);
        }
    }
}

/// A descriptor that is closed through the ring when the last holder, user or operation, has gone.
pub(crate) struct Descriptor {
    ring: Rc<Ring>,
    fd: RawFd,
}

impl Descriptor {
    pub fn new(ring: Rc<Ring>, fd: RawFd) -> Descriptor {
        Descriptor { ring, fd }
    }

    pub fn get(&self) -> types::Fd {
        types::Fd(self.fd)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        self.ring.close_fd(self.fd);
    }
}
