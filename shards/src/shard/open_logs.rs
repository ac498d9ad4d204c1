//! Keeps the number of open logs within its bound, however many partitions are in use (S86). Without it, more partitions
//! than the process may have files fail each other's commits, and the WAL's next segment may find no descriptor.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use super::partitions::Partition;
use super::Inner;
use crate::api::NotStored;
use crate::log::PartitionLog;
use crate::peer::NoLog;
use crate::rt::sync::{Lock, LockGuard, Notify};
use crate::rt::{self, Instant, Queue};

/// An open needs descriptors of its own while it lasts: a listing, the boundary, the consumer position.
const OPENED_AT_ONCE_MAX: usize = 64;
/// What a close writes is synced together with the others'.
const CLOSED_AT_ONCE: usize = 16;
/// Closing waits for commits and the disk. One log that hangs must not keep all others from being opened or closed.
const CLOSE_PATIENCE: Duration = Duration::from_secs(1);
/// A partition whose log would not close in time is passed over for so long.
const REST: Duration = Duration::from_secs(60);
/// When a look at all logs found none to close, all being in use: the next look is that much later.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// Beyond twice the bound, for bounds of almost nothing.
const IN_USE_MORE: usize = 16;
/// A disk that takes no positions has every look at every log fail.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// Who may open a log now.
pub struct Turns {
    opening: Lock,
    /// Somebody is closing logs.
    closing: Cell<bool>,
    look_again: Cell<Instant>,
    warned: Cell<Instant>,
    warned_full: Cell<Instant>,
    /// Some were closed, or there was nothing to close.
    room: Notify,
}

impl Turns {
    pub fn new(open_logs_max: usize) -> Turns {
        // Those that are being opened are not counted yet.
        let at_once = (open_logs_max / 4).min(OPENED_AT_ONCE_MAX);
        let (closing, look_again, warned, warned_full) = Default::default();
        Turns { opening: Lock::of_several(at_once), closing, look_again, warned, warned_full, room: Notify::new() }
    }
}

impl Inner {
    /// Waits for a turn to open a log, and for others to be closed if too many are open. When all of them are in use, or
    /// the disk hangs, the bound gives way once over; from there on the open is refused for the moment, with words for a
    /// person: what closes a log, and the next WAL segment, need descriptors too.
    pub(super) async fn turn_to_open(self: &Rc<Self>) -> Result<LockGuard, NoLog> {
        // Before any partition's own lock: whoever makes room waits for those of the logs that it closes.
        let turns = &self.partitions.turns;
        let turn = turns.opening.enter().await;
        let until = rt::now() + CLOSE_PATIENCE;
        while self.is_crowded() && rt::now() < until {
            if !turns.closing.get() {
                if rt::now() < turns.look_again.get() {
                    break;
                }
                // Some for the next ones as well: each look at all logs costs.
                let max = self.options.retention.open_logs_max;
                let (inner, keep) = (self.clone(), max.saturating_sub(max / 8 + 1));
                turns.closing.set(true);
                drop(rt::spawn(Queue::Commit, async move { inner.close_all_but(keep).await }));
            }
            let _ = rt::timeout(until - rt::now(), turns.room.notified()).await;
        }
        let (open, max) = (self.partitions.shared().open_logs(), self.options.retention.open_logs_max);
        if open >= max.saturating_mul(2).saturating_add(IN_USE_MORE) {
            let bound_by = self.options.retention.open_logs_bound_by;
            let text = format!(
                "{open} partition logs of this shard are open, which is as many as may be, and none can be closed: their \
                 messages are leased, they are written to, or the disk hangs. Settle messages and retry, or have {bound_by} \
                 raised"
            );
            let now = rt::now();
            if now >= turns.warned_full.get() {
                turns.warned_full.set(now + WARN_EVERY);
                tracing::warn!(open, "consume and produce to other partitions are put off or answered 503: {text}");
            }
            return Err(NoLog::Busy(text));
        }
        Ok(turn)
    }

    fn is_crowded(&self) -> bool {
        self.partitions.shared().open_logs() >= self.options.retention.open_logs_max
    }

    /// Closes those that have been unused the longest, as far as they are not needed. One at a time does this.
    async fn close_all_but(self: &Rc<Self>, keep: usize) {
        let mut open: Vec<(Instant, Rc<Partition>, PartitionLog)> = Vec::new();
        for partition in self.partitions.all() {
            let rests = rt::now() < partition.closes_not_before.get();
            if let Some(log) = partition.usable_log().filter(|_| !rests) {
                open.push((log.touched_at(), partition, log));
            }
        }
        open.sort_by_key(|(touched, partition, _)| (*touched, partition.destination()));
        let turns = &self.partitions.turns;
        let (mut left, mut all_closed) = (&open[..], 0);
        while self.partitions.shared().open_logs() > keep && !left.is_empty() && !self.quiesced.get() {
            let surplus = self.partitions.shared().open_logs() - keep;
            let (some, rest) = left.split_at(surplus.min(CLOSED_AT_ONCE).min(left.len()));
            left = rest;
            let close = some.iter().map(|(_, partition, log)| Box::pin(self.close_in_time(partition, log)));
            let closed = rt::all(close.collect()).await.into_iter().filter(|closed| *closed).count();
            all_closed += closed;
            if closed > 0 {
                turns.room.notify_all();
            }
        }
        self.reaper.metrics.borrow_mut().idle_logs_evicted += all_closed as u64;
        if all_closed == 0 {
            turns.look_again.set(rt::now() + LOOK_AGAIN);
        }
        turns.closing.set(false);
        turns.room.notify_all();
    }

    async fn close_in_time(self: &Rc<Self>, partition: &Rc<Partition>, log: &PartitionLog) -> bool {
        let closed = rt::timeout(CLOSE_PATIENCE, Box::pin(self.close_unused(partition, log))).await;
        if closed.is_err() {
            // What it had begun goes on by itself.
            partition.closes_not_before.set(rt::now() + REST);
            tracing::warn!(dir = %log.dir().display(), "a partition log did not close within {CLOSE_PATIENCE:?}, its disk hangs: others are closed in its place");
        }
        closed.unwrap_or(false)
    }

    /// At start, where every partition is opened once (S54), and at each sweep: what was in use when it was one too many
    /// may not be any more.
    pub(super) async fn close_surplus(self: &Rc<Self>) {
        let max = self.options.retention.open_logs_max;
        let turns = &self.partitions.turns;
        if self.partitions.shared().open_logs() > max && !turns.closing.replace(true) {
            self.close_all_but(max).await;
        }
    }

    /// At a stop.
    pub(super) async fn close_all_logs(&self) -> NotStored {
        let mut failed = NotStored::default();
        for some in self.partitions.open_logs().chunks(CLOSED_AT_ONCE) {
            let closed = rt::all(some.iter().map(|log| Box::pin(log.close())).collect()).await;
            for cause in closed.into_iter().filter_map(Result::err) {
                failed.add(NotStored { boundaries: 1, cause: Some(cause), ..NotStored::default() });
            }
        }
        failed
    }

    /// Closes a log, unless consumers or commits turn out to need it: position first, then the exact boundary. Whoever
    /// comes meanwhile opens it again once it is closed. Returns whether it was closed.
    pub(super) async fn close_unused(self: &Rc<Self>, partition: &Rc<Partition>, log: &PartitionLog) -> bool {
        let touched_at = log.touched_at();
        let opening = self.partitions.opening.of(&partition.destination());
        if opening.is_held() {
            return false; // somebody wants it, or closes it already
        }
        let _opening = opening.enter().await;
        if !partition.usable_log().is_some_and(|usable| usable.is(log)) {
            return false;
        }
        match self.queues().unload(partition.destination()).await {
            Ok(true) => {}
            Ok(false) => return false,
            Err(error) => {
                let (now, warned) = (rt::now(), &self.partitions.turns.warned);
                if now >= warned.get() {
                    warned.set(now + WARN_EVERY);
                    tracing::warn!(dir = %log.dir().display(), %error,
                        "idle partition logs stay open: the consumer position of this one could not be made durable");
                }
                return false;
            }
        }
        if log.touched_at() != touched_at {
            return false;
        }
        // It is closed all the same, and has said what failed.
        let _ = log.close().await;
        true
    }
}
