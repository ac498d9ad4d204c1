//! What the applier tells whoever scrapes: plain numbers, written by the control thread, read by any.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};

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
    /// 0 follower or learner, 1 candidate, 2 leader.
    pub state: AtomicU64,
    pub has_leader: AtomicBool,
    pub last_index: AtomicU64,
    pub commit_index: AtomicU64,
    pub applied_index: AtomicU64,
    /// Highest that a leader has told this process.
    pub leader_commit_index: AtomicU64,
    pub voters: AtomicU64,
    pub learners: AtomicU64,
    /// Snapshots that could not be made.
    pub snapshot_failures: AtomicU64,
}

impl ConsensusWatch {
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
