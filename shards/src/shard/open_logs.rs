//! Keeps the number of open logs within its bound, however many partitions are in use (S86). Without it, more partitions
//! than the process may have files fail each other's commits, and the WAL's next segment may find no descriptor.

use std::rc::Rc;
use std::time::Duration;

use super::partitions::Partition;
use super::Inner;
use crate::log::PartitionLog;
use crate::rt::sync::{Lock, LockGuard};
use crate::rt::{self, Instant, Queue};

/// An open needs descriptors of its own while it lasts: a listing, the boundary, the consumer position.
const OPENED_AT_ONCE_MAX: usize = 64;
/// What a close writes is synced together with the others'.
const CLOSED_AT_ONCE: usize = 16;
/// Closing waits for commits and the disk. One log that hangs must not keep all others from being opened.
const ROOM_PATIENCE: Duration = Duration::from_secs(1);

/// Who may open a log now.
pub struct Turns {
    opening: Lock,
    making_room: Lock,
}

impl Turns {
    pub fn new(open_logs_max: usize) -> Turns {
        // Those that are being opened are not counted yet.
        let at_once = (open_logs_max / 4).min(OPENED_AT_ONCE_MAX);
        Turns { opening: Lock::of_several(at_once), making_room: Lock::default() }
    }
}

impl Inner {
    /// Waits for a turn to open a log, and closes others for it if too many are open. When all of them are in use the
    /// bound gives way: consumers and commits are not refused for it.
    pub(super) async fn turn_to_open(self: &Rc<Self>) -> LockGuard {
        // Before any partition's own lock: whoever makes room waits for those of the logs that it closes.
        let turn = self.partitions.turns.opening.enter().await;
        if self.is_crowded() {
            let _making_room = self.partitions.turns.making_room.enter().await;
            if self.is_crowded() {
                // Some for the next ones as well: each look at all logs costs.
                let max = self.options.retention.open_logs_max;
                let (inner, keep) = (self.clone(), max.saturating_sub(max / 8 + 1));
                let closing = rt::spawn(Queue::Commit, async move { inner.close_all_but(keep).await });
                let _ = rt::timeout(ROOM_PATIENCE, closing).await;
            }
        }
        turn
    }

    fn is_crowded(&self) -> bool {
        self.partitions.shared().open_logs() >= self.options.retention.open_logs_max
    }

    /// Closes those that have been unused the longest.
    async fn close_all_but(self: &Rc<Self>, keep: usize) {
        let mut open: Vec<(Instant, Rc<Partition>, PartitionLog)> = Vec::new();
        for partition in self.partitions.all() {
            if let Some(log) = partition.usable_log() {
                open.push((log.touched_at(), partition, log));
            }
        }
        let surplus = open.len().saturating_sub(keep);
        open.sort_by_key(|(touched, partition, _)| (*touched, partition.destination()));
        open.truncate(surplus);
        for some in open.chunks(CLOSED_AT_ONCE) {
            if self.quiesced.get() {
                return;
            }
            let close = some.iter().map(|(_, partition, log)| Box::pin(self.close_unused(partition, log)));
            let evicted = rt::all(close.collect()).await.into_iter().filter(|closed| *closed).count();
            self.reaper.metrics.borrow_mut().idle_logs_evicted += evicted as u64;
        }
    }

    /// At start, where every partition is opened once (S54), and at each sweep: what was in use when it was one too many
    /// may not be any more.
    pub(super) async fn close_surplus(self: &Rc<Self>) {
        let max = self.options.retention.open_logs_max;
        if self.partitions.shared().open_logs() > max {
            self.close_all_but(max).await;
        }
    }

    /// At a stop.
    pub(super) async fn close_all_logs(&self) {
        for some in self.partitions.open_logs().chunks(CLOSED_AT_ONCE) {
            rt::all(some.iter().map(|log| Box::pin(log.close())).collect()).await;
        }
    }

    /// Closes a log, unless consumers or commits turn out to need it: position first, then the exact boundary. Whoever
    /// comes meanwhile opens it again once it is closed. Returns whether it was closed.
    pub(super) async fn close_unused(self: &Rc<Self>, partition: &Rc<Partition>, log: &PartitionLog) -> bool {
        let touched_at = log.touched_at();
        let _opening = self.partitions.opening.of(&partition.destination()).enter().await;
        match self.queues().unload(partition.destination()).await {
            Ok(true) => {}
            Ok(false) => return false,
            Err(error) => {
                tracing::warn!(dir = %log.dir().display(), %error,
                    "an idle partition log stays open: its consumer position could not be made durable");
                return false;
            }
        }
        if log.touched_at() != touched_at {
            return false;
        }
        log.close().await;
        true
    }
}
