//! Ends leases whose time has come although nobody touches their partition (C24, D7).

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Weak;
use std::time::Duration;

use super::shard_queues::ShardQueues;
use crate::meta::Destination;
use crate::rt::sync::Notify;
use crate::rt::{self, Instant, Queue};

/// Lapses are noticed in steps of this, so that leases taken one by one share a timer. D7 allows a second.
const STEP: Duration = Duration::from_millis(250);

/// One timer for all leases of a shard; none without leases.
#[derive(Default)]
pub(super) struct Sweeper {
    due: RefCell<BTreeSet<(Instant, Destination)>>,
    running: Cell<bool>,
    earlier: Notify,
}

impl Sweeper {
    /// Sweeps the partition once `expiry` has passed. Returns the key to cancel with; a partition has one at a time.
    pub fn schedule(&self, queues: &Weak<ShardQueues>, expiry: Instant, destination: Destination) -> Instant {
        let at = step_after(expiry);
        let mut due = self.due.borrow_mut();
        let first = due.first().is_none_or(|(first, _)| at < *first);
        due.insert((at, destination));
        drop(due);
        if !self.running.replace(true) {
            rt::spawn(Queue::Consume, run(queues.clone()));
        } else if first {
            self.earlier.notify_one();
        }
        at
    }

    pub fn cancel(&self, at: Instant, destination: Destination) {
        self.due.borrow_mut().remove(&(at, destination));
        if self.due.borrow().is_empty() {
            self.earlier.notify_one();
        }
    }

    fn first(&self) -> Option<(Instant, Destination)> {
        self.due.borrow().first().copied()
    }
}

/// The end of the step that `expiry` is in. A lease without an end in sight has none: rounded past the last instant it
/// would be due at once, for ever.
fn step_after(expiry: Instant) -> Instant {
    Instant(expiry.0.checked_next_multiple_of(STEP.as_nanos() as u64).unwrap_or(u64::MAX))
}

async fn run(queues: Weak<ShardQueues>) {
    while let Some(strong) = queues.upgrade() {
        let Some((at, destination)) = strong.sweeper.first() else {
            strong.sweeper.running.set(false);
            return;
        };
        let now = rt::now();
        if at <= now {
            strong.sweeper.due.borrow_mut().remove(&(at, destination));
            if let Some(partition) = strong.open_partition(destination) {
                partition.sweep();
            }
            continue;
        }
        let earlier = strong.sweeper.earlier.notified();
        drop(strong);
        // Elapsed or an earlier deadline: either way the first entry is looked at again.
        let _ = rt::timeout(at - now, earlier).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c21_a_lease_of_centuries_is_not_due_now() {
        let step = STEP.as_nanos() as u64;
        for (expiry, at) in [(0, 0), (1, step), (step, step), (u64::MAX - 1, u64::MAX), (u64::MAX, u64::MAX)] {
            assert_eq!(step_after(Instant(expiry)), Instant(at), "{expiry}");
        }
    }
}
