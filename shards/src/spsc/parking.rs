//! When a shard that sleeps has to be woken, and only then (E28). Checked by loom in `shards/loom`, which compiles
//! this file with loom's atomics.
//!
//! The sender publishes, then looks at the parked flag; the receiver sets the flag, then looks at what was
//! published. With a full fence between the two on both sides at least one of them sees the other.

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
