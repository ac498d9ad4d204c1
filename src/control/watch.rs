//! What the applier tells whoever scrapes: plain numbers, written by the control thread, read by any.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};

use std::time::Duration;

use narad_shards::rt::Instant;

use super::consensus::Status;

#[derive(Debug, Default)]
pub struct MetastoreWatch {
    pub topics: AtomicU64,
    /// Index of the last entry whose effects are stored.
    pub applied_index: AtomicU64,
    /// Writes that the store refused.
    pub write_errors: AtomicU64,
    /// A refused write is being tried again.
    pub stalled: AtomicBool,
    /// Given up for good (K17).
    pub stopped: AtomicBool,
}

/// What consensus tells whoever scrapes.
#[derive(Debug, Default)]
pub struct ConsensusWatch {
    pub term: AtomicU64,
    /// 0 follower or learner, 1 candidate, 2 leader, 3 stopped.
    pub state: AtomicU64,
    pub has_leader: AtomicBool,
    pub last_index: AtomicU64,
    pub commit_index: AtomicU64,
    pub applied_index: AtomicU64,
    /// Highest that a leader has told this process.
    pub leader_commit_index: AtomicU64,
    pub voters: AtomicU64,
    pub learners: AtomicU64,
    /// On the monotonic clock, when a leader was last heard; when consensus began, before that.
    pub contact_nanos: AtomicU64,
    /// Snapshots that could not be made.
    pub snapshot_failures: AtomicU64,
    /// How long the last one took, in microseconds; 0 before there was one.
    pub snapshot_micros: AtomicU64,
    /// The leader's breaker holds verdicts back (K27).
    pub dead_marking_refused: AtomicBool,
    /// Heartbeats in a row that failed, and when one last succeeded, ms since the epoch (0: never).
    pub heartbeat_failures: AtomicU64,
    pub heartbeat_success_ms: AtomicU64,
}

impl ConsensusWatch {
    /// How long ago the leader was heard: nothing where this node leads.
    pub fn since_contact(&self, now: Instant) -> Duration {
        match self.state.load(Relaxed) {
            2 => Duration::ZERO,
            _ => now.saturating_since(Instant(self.contact_nanos.load(Relaxed))),
        }
    }

    pub(super) fn heard(&self, at: Instant) {
        self.contact_nanos.store(at.0, Relaxed);
    }

    pub(super) fn tell(&self, status: &Status) {
        let voters = status.configuration.voters();
        let state = if status.leads { 2 } else { u64::from(status.candidate) };
        self.term.store(status.term, Relaxed);
        self.state.store(state, Relaxed);
        self.has_leader.store(status.leader != 0, Relaxed);
        self.last_index.store(status.last_index, Relaxed);
        self.commit_index.store(status.commit_index, Relaxed);
        self.applied_index.store(status.applied_index, Relaxed);
        self.voters.store(voters as u64, Relaxed);
        self.learners.store((status.configuration.servers.len() - voters) as u64, Relaxed);
    }
}
