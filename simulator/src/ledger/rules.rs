//! What is checked.

use std::fmt;

/// The rule that was broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// D1, D10: answered 202, never acked, never delivered once all was at rest.
    Lost,
    /// D1: a copy that was seen, was not acked and did not come back.
    Stuck,
    /// D3: two live leases on one stored copy.
    DoubleLease,
    /// D5, D16 to D18: an acked copy came back without a crash that explains it.
    AckUndone,
    /// D8: an ack, nack or extend of a lease that had ended was accepted.
    LateSettleAccepted,
    /// C20, C21: a settle of a live lease was refused.
    LiveLeaseRefused,
    /// D9, S63: bytes or times that were never produced, or that changed.
    WrongBytes,
    /// D13: answered 429, 503 or 4xx, and delivered.
    RefusedDelivered,
    /// N13, N14: a record of another incarnation, or of one that was deleted before.
    OtherIncarnation,
    /// S27: one offset, two records.
    OffsetReused,
    /// 1.2: a second stored copy without a fault that explains it.
    Duplicate,
    /// A pinned record on another partition without a fault that explains it.
    Misplaced,
    /// S30, S46: the high watermark went back, or beyond what is durable.
    Watermark,
    /// C4, C5, D19: the frontier beyond the watermark, beyond an unsettled record, or going back without a crash.
    Frontier,
    /// The checkpoint passed a record that was not done.
    Checkpoint,
    /// D10: the backlog gauge is not what a restart would dispatch again.
    Backlog,
    /// E1: an answer depends on a file whose name is not durable.
    Unnamed,
    /// S24: commit times going back along a partition.
    CommitTime,
    /// E20, E22: more memory than allowed.
    Memory,
    /// S59, S63: the node does not start although the disk is in order.
    Refusal,
    /// E11, S38: latched or poisoned although the disk is in order.
    Latched,
    /// S93, S94: a stored record could not be read although the disk is in order.
    Unreadable,
    /// S71: retention took a record that was not old enough.
    TooYoung,
    /// Nothing moved any more.
    Stalled,
    /// A process that has ended still holds memory.
    Leak,
    /// K22: two nodes serve one partition.
    TwoOwners,
    /// Two leaders of one term.
    TwoLeaders,
    /// K14: two replicas differ after the same entry.
    Diverged,
    /// K16, E36: a node goes on from files of the past.
    OldFiles,
    /// Healed, and the cluster does not become whole.
    NotReady,
    /// One seed, two histories.
    Determinism,
    /// The code under test panicked.
    Panic,
}

#[derive(Clone, Debug)]
pub struct Violation {
    pub rule: Rule,
    pub text: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.rule, self.text)
    }
}
