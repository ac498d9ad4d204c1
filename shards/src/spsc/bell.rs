//! Waking a shard that sleeps, and only one that sleeps (E28).
//!
//! The sender publishes, then looks at the parked flag; the receiver sets the flag, then looks at what was
//! published. With a full fence between the two on both sides at least one of them sees the other.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex};
use std::task::Waker;

#[cfg(loom)]
use loom::sync::atomic::{fence, AtomicBool, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{fence, AtomicBool, Ordering};

/// The handshake by itself, without what wakes.
pub(crate) struct Parking {
    parked: AtomicBool,
}

impl Parking {
    pub fn new() -> Parking {
        Parking { parked: AtomicBool::new(false) }
    }

    /// Receiver: about to sleep. Afterwards it must look at everything that is published before it may.
    pub fn park(&self) {
        self.parked.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Receiver: awake.
    pub fn unpark(&self) {
        self.parked.store(false, Ordering::Relaxed);
    }

    /// Sender, after it has published and [`published`]: whether it is the one that has to wake the receiver.
    pub fn must_wake(&self) -> bool {
        self.parked.load(Ordering::Relaxed) && self.parked.swap(false, Ordering::Relaxed)
    }
}

/// Sender: what it wrote before is seen by a receiver that parks after the sender has looked at the flag.
pub(crate) fn published() {
    fence(Ordering::SeqCst);
}

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

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::atomic::{AtomicUsize, Ordering};
    use loom::sync::{Arc, Condvar, Mutex};

    use super::{published, Parking};

    /// The rings' indices as an atomic of their own (rtrb is not instrumented), the blocking enter as a counter
    /// under a lock: a doorbell that was rung before the receiver blocks ends the block at once, as a completion
    /// does.
    struct Shared {
        index: AtomicUsize,
        parking: Parking,
        rung: Mutex<bool>,
        wake: Condvar,
    }

    fn shared() -> Arc<Shared> {
        Arc::new(Shared {
            index: AtomicUsize::new(0),
            parking: Parking::new(),
            rung: Mutex::new(false),
            wake: Condvar::new(),
        })
    }

    fn send(shared: &Shared) {
        shared.index.fetch_add(1, Ordering::Release);
        published();
        if shared.parking.must_wake() {
            *shared.rung.lock().unwrap() = true;
            shared.wake.notify_one();
        }
    }

    /// Returns once `expected` messages were seen. A lost wake-up blocks for ever, which loom reports.
    fn receive(shared: &Shared, expected: usize) {
        while shared.index.load(Ordering::Acquire) < expected {
            shared.parking.park();
            if shared.index.load(Ordering::Acquire) < expected {
                let mut rung = shared.rung.lock().unwrap();
                while !*rung {
                    rung = shared.wake.wait(rung).unwrap();
                }
                *rung = false;
            }
            shared.parking.unpark();
        }
    }

    #[test]
    fn loom_e28_a_message_wakes_a_receiver_that_parks() {
        loom::model(|| {
            let shared = shared();
            let sender = {
                let shared = shared.clone();
                loom::thread::spawn(move || send(&shared))
            };
            receive(&shared, 1);
            sender.join().unwrap();
        });
    }

    #[test]
    fn loom_e28_two_senders_and_one_receiver() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| {
            let shared = shared();
            let senders: Vec<_> = (0..2)
                .map(|_| {
                    let shared = shared.clone();
                    loom::thread::spawn(move || send(&shared))
                })
                .collect();
            receive(&shared, 2);
            for sender in senders {
                sender.join().unwrap();
            }
        });
    }
}
