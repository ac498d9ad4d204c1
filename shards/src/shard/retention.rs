//! Sweeps this shard's logs: old records leave, logs that nobody uses are closed, and closed ones
//! are looked after all the same. One task and one timer for all of them (S65, S85).

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use super::partitions::Partition;
use super::Inner;
use crate::log::PartitionLog;
use crate::metrics::RetentionMetrics;
use crate::rt::sync::{Lock, LockGuard, Notify};
use crate::rt::{self, Queue};

/// A pass that takes longer is left behind: the others go on (S75).
const PASS_PATIENCE: Duration = Duration::from_secs(60);
/// A partition whose pass panicked or hung is left alone for so long (S76).
const REST: Duration = Duration::from_secs(30 * 60);

#[derive(Clone, Copy, Debug)]
pub struct RetentionOptions {
    /// From one sweep to the next.
    pub sweep_interval: Duration,
    /// Logs that nobody has used for so long are closed (S80). `None`: never.
    pub idle_after: Option<Duration>,
    /// From one look at the closed logs to the next (S76). `None`: never.
    pub cold_interval: Option<Duration>,
    /// Logs that may be open: for one more, those that have been unused the longest are closed. Each holds up to three
    /// descriptors (S86) and some 16 KiB of memory.
    pub open_logs_max: usize,
    /// What an operator raises for more of them, in words.
    pub open_logs_bound_by: &'static str,
}

impl Default for RetentionOptions {
    fn default() -> RetentionOptions {
        RetentionOptions {
            sweep_interval: Duration::from_secs(60),
            idle_after: Some(Duration::from_secs(30 * 60)),
            cold_interval: Some(Duration::from_secs(5 * 60)),
            open_logs_max: 8192,
            open_logs_bound_by: "the limit of open files (LimitNOFILE)",
        }
    }
}

/// How a pass over one log ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    Done,
    /// The log rests, or the node stops.
    NotMade,
    Panicked,
    /// Left behind after [`PASS_PATIENCE`].
    Hung,
}

#[derive(Default)]
pub struct Reaper {
    turn: Lock,
    /// The node stops: nobody waits for a pass that hangs.
    stopping: Notify,
    pub(super) metrics: RefCell<RetentionMetrics>,
}

impl Reaper {
    /// No sweep is under way, and none begins, while the guard lives.
    pub async fn turn(&self) -> LockGuard {
        self.turn.enter().await
    }

    pub fn stop(&self) {
        self.stopping.notify_all();
    }

    pub fn metrics(&self) -> RetentionMetrics {
        self.metrics.borrow().clone()
    }
}

impl Inner {
    pub(super) fn start_reaper(&self) {
        let (me, interval) = (self.me.clone(), self.options.retention.sweep_interval);
        rt::spawn(Queue::Background, async move {
            let mut cold_at = rt::now();
            loop {
                rt::sleep(interval).await;
                let Some(inner) = me.upgrade().filter(|inner| !inner.quiesced.get()) else { return };
                let cold = inner.options.retention.cold_interval.filter(|_| rt::now() >= cold_at);
                if let Some(cold) = cold {
                    cold_at = rt::now() + cold;
                }
                let turn = inner.reaper.turn().await;
                inner.sweep(cold.is_some()).await;
                drop(turn);
            }
        });
    }

    async fn sweep(self: &Rc<Self>, cold: bool) {
        for partition in self.partitions.all() {
            if self.quiesced.get() {
                return;
            }
            match partition.usable_log() {
                Some(log) => {
                    self.pass(&partition, &log).await;
                    self.close_if_idle(&partition, &log).await;
                }
                None if cold => self.sweep_closed(&partition).await,
                None => {}
            }
        }
        self.close_surplus().await;
    }

    async fn pass(&self, partition: &Partition, log: &PartitionLog) -> Pass {
        if !log.may_have_expired() {
            return Pass::Done;
        }
        if rt::now() < partition.rests_until.get() {
            return Pass::NotMade;
        }
        let passing = log.clone();
        let pass = rt::spawn(Queue::Background, async move { rt::contain(passing.retain()).await });
        let patience = rt::timeout(PASS_PATIENCE, pass);
        let Ok(outcome) = rt::first_of(patience, self.reaper.stopping.notified()).await else { return Pass::NotMade };
        let (ended, cause) = match outcome {
            Ok(Ok(())) => return Pass::Done,
            Ok(Err(panic)) => (Pass::Panicked, panic),
            Err(rt::Elapsed) => (Pass::Hung, format!("not done after {PASS_PATIENCE:?}; the disk hangs")),
        };
        self.reaper.metrics.borrow_mut().passes_abandoned += 1;
        partition.rests_until.set(rt::now() + REST);
        tracing::error!(dir = %log.dir().display(), %cause,
            "retention: pass over a partition failed; it is left alone for {REST:?}, the others go on");
        ended
    }

    /// Opens a closed log that holds an expired segment, sweeps it once and closes it (S76). What a closed log holds is
    /// known from the time when it was closed: nothing is listed, and what is not served here is not touched (lesson
    /// N85).
    async fn sweep_closed(self: &Rc<Self>, partition: &Rc<Partition>) {
        let expired = partition.known_log().is_some_and(|log| log.is_closed() && log.may_have_expired());
        if !expired || rt::now() < partition.rests_until.get() {
            return;
        }
        let log = match self.log_of(partition, false).await {
            Ok(log) => log,
            Err(error) => {
                partition.rests_until.set(rt::now() + REST);
                tracing::warn!(%error, "retention: a closed partition log could not be opened");
                return;
            }
        };
        let opened_at = log.touched_at();
        match self.pass(partition, &log).await {
            Pass::Done => self.reaper.metrics.borrow_mut().cold_swept += 1,
            Pass::Panicked => self.reaper.metrics.borrow_mut().cold_panics += 1,
            Pass::NotMade | Pass::Hung => {}
        }
        if log.touched_at() == opened_at {
            self.close_unused(partition, &log).await;
        }
    }

    async fn close_if_idle(self: &Rc<Self>, partition: &Rc<Partition>, log: &PartitionLog) {
        let Some(idle_after) = self.options.retention.idle_after else { return };
        // Expired segments go before the close (S80).
        let due = rt::now() - log.touched_at() >= idle_after && !log.may_have_expired();
        if due && self.close_unused(partition, log).await {
            self.reaper.metrics.borrow_mut().idle_logs_evicted += 1;
        }
    }
}
