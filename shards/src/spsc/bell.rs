//! What wakes a shard that sleeps; when it has to is decided by `parking`.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex};
use std::task::Waker;

pub(crate) use super::parking::{published, Parking};

enum Kind {
    /// A pump that blocks in its ring: by `MSG_RING` from the sender's own ring where that works, else through the
    /// eventfd that the ring reads.
    Ring { ring_fd: RawFd, event: Arc<OwnedFd>, by_ring: bool },
    /// An inbox task: simulation, and runtimes without a ring.
    Task(Mutex<Option<Waker>>),
}

/// Wakes one receiver. Shared by all its senders.
pub struct Doorbell {
    pub(crate) parking: Parking,
    kind: Kind,
}

impl Doorbell {
    pub(crate) fn of_ring(ring_fd: RawFd, event: Arc<OwnedFd>, by_ring: bool) -> Doorbell {
        Doorbell { parking: Parking::new(), kind: Kind::Ring { ring_fd, event, by_ring } }
    }

    pub(crate) fn of_task() -> Doorbell {
        Doorbell { parking: Parking::new(), kind: Kind::Task(Mutex::new(None)) }
    }

    /// The task to wake, for a bell made by [`Doorbell::of_task`].
    pub(crate) fn set_task(&self, waker: &Waker) {
        if let Kind::Task(slot) = &self.kind {
            *slot.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(waker.clone());
        }
    }

    /// To be called after something was published for the receiver.
    pub fn ring(&self) {
        published();
        self.ring_published();
    }

    /// [`Doorbell::ring`] for a caller that has called [`published`] already.
    pub(crate) fn ring_published(&self) {
        if !self.parking.must_wake() {
            return;
        }
        match &self.kind {
            Kind::Task(slot) => {
                let waker = slot.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
            Kind::Ring { ring_fd, event, by_ring } => {
                let rung = *by_ring && crate::io::ring::current().is_some_and(|ring| ring.ring_other(*ring_fd));
                if !rung {
                    let one: u64 = 1;
                    // SAFETY: writes eight bytes from a live variable to a descriptor that the bell keeps open.
                    unsafe { libc::write(event.as_raw_fd(), (&raw const one).cast(), 8) };
                }
            }
        }
    }
}
