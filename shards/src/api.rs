//! What the layer above (HTTP, CLI tests, the simulator) asks of a shard, in types that know no wire format.

use std::sync::Arc;

use crate::io::Slice;
use crate::meta::{Incarnation, TopicMeta};

/// One message of a produce, single or batch, already validated for size.
#[derive(Clone, Copy, Debug)]
pub struct NewRecord<'a> {
    /// Empty means no key.
    pub key: &'a [u8],
    pub payload: &'a [u8],
    /// Wins over the key.
    pub partition: Option<u32>,
}

/// Why a produce was not answered `202`. All but `LogFailed` stored nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProduceError {
    TopicNotFound,
    /// `index` is the offending message's place in the batch.
    PartitionOutOfRange {
        index: usize,
    },
    /// `500`: the write or sync failed, now or earlier (latched), or a batch is stored in part because no segment
    /// could be made for the rest. The records may be delivered all the same (D13).
    LogFailed(String),
    /// `503`, not latched, heals by itself: no segment could be made (E9).
    Unavailable(String),
    /// `503`, E22: staging cannot turn over.
    MemoryExhausted,
    /// `503`, E22: free space is under the reserve.
    DiskReserve,
    /// `503`: the node is stopping.
    Draining,
}

/// What clients and peers are told of [`ProduceError::DiskReserve`] and [`ProduceError::Draining`], which concern every
/// produce alike.
pub const DISK_RESERVE: &str = "free disk space is under the reserve, retry";
/// Right for a node that has no others, too.
pub const DRAINING: &str = "this node is shutting down and takes no new produce, retry";

/// A record handed to a consumer, under a lease (or without one, on replay).
#[derive(Clone, Debug)]
pub struct Delivery {
    pub topic: Arc<str>,
    pub incarnation: Incarnation,
    pub partition: u32,
    pub offset: u64,
    /// Commit time, ms since the epoch.
    pub timestamp_ms: u64,
    /// Key bytes followed by payload bytes.
    pub body: Slice,
    pub key_bytes: u32,
    /// Receipt nonce, `1..2^63`; 0 on replay.
    pub nonce: u64,
}

impl Delivery {
    pub fn key(&self) -> Option<&[u8]> {
        (self.key_bytes > 0).then(|| &self.body[..self.key_bytes as usize])
    }

    pub fn payload(&self) -> &[u8] {
        &self.body[self.key_bytes as usize..]
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConsumeError {
    TopicNotFound,
    PartitionOutOfRange,
    /// `421`: the partition is not served where the message went.
    NotOwner,
    /// `500`: the disk refused a read.
    ReadFailed(String),
    /// `502`: asked, and no answer came.
    Unreachable,
    /// `503`: nobody serves the partition for the moment: its owner is dead, or it has none that this node knows of.
    OwnerDown,
    /// `503`: the owner is short of something for the moment. The text is for the client, and names what to raise.
    Busy(String),
}

/// One lease to settle: the parts of a receipt handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settle {
    pub partition: u32,
    pub offset: u64,
    pub nonce: u64,
    pub mode: SettleMode,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SettleMode {
    Ack,
    /// Renew the lease to a full visibility timeout from now.
    Extend,
    /// Give the record back at once.
    Nack,
    /// Give back a record that never reached its client (C15): as a nack, but not counted as one.
    Release,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SettleStatus {
    /// `204`
    Done,
    /// `410`
    LeaseGone,
    /// `421`
    NotOwner,
    /// `502`: may have been applied.
    Unanswered,
    /// `503`: not applied for certain.
    OwnerDown,
}

/// Outcome of a replay read.
#[derive(Clone, Debug)]
pub enum ReadAt {
    Record(Delivery),
    /// At or past the high watermark: `204`.
    PastEnd,
    /// `410`
    AgedOut {
        oldest: u64,
    },
    /// `410`: damaged, or in a gap.
    Unreadable,
}

/// One entry of `partition_stats`.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct PartitionStats {
    pub index: u32,
    pub segments: u64,
    pub oldest_offset: u64,
    pub next_offset: u64,
    pub high_watermark: u64,
    pub size_bytes: u64,
    /// Unix seconds; `None` when unknown.
    pub oldest_segment_at: Option<u64>,
    /// Consumer state, for gauges: frontier (exclusive), leases out, acked above the frontier.
    pub frontier: u64,
    pub leased: u64,
    pub acked_ahead: u64,
}

/// Why a partition's owner says nothing of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerLiveness {
    /// Membership says so.
    Dead,
    /// Alive, but no answer in time.
    Unreachable,
    /// The owner is no member with an address.
    Unknown,
    /// There is no owner yet.
    Unassigned,
}

impl OwnerLiveness {
    /// As clients read it.
    pub fn word(self) -> &'static str {
        match self {
            OwnerLiveness::Dead => "dead",
            OwnerLiveness::Unreachable => "unreachable",
            OwnerLiveness::Unknown => "unknown",
            OwnerLiveness::Unassigned => "unassigned",
        }
    }
}

/// A partition as it is shown to clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionReport {
    pub index: u32,
    /// `None`: this node. Empty: nobody, or a node whose name is not known here.
    pub owner_node: Option<Arc<str>>,
    pub stats: Result<PartitionStats, OwnerLiveness>,
}

/// A topic to create; every default is already filled in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewTopic {
    pub name: String,
    pub partitions: u32,
    pub retention_ms: u64,
    pub visibility_timeout_ms: u64,
    pub max_in_flight_per_partition: u64,
    pub max_acked_ahead_per_partition: u64,
    pub owner: Option<String>,
}

/// Settings of a topic to change; `None` keeps the present value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TopicChange {
    /// `0` keeps records for ever.
    pub retention_ms: Option<u64>,
    pub max_in_flight_per_partition: Option<u64>,
    pub max_acked_ahead_per_partition: Option<u64>,
    /// More than there are.
    pub partitions: Option<u32>,
}

/// A node of the cluster, as its operators see it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemberStatus {
    pub id: String,
    /// `host:port` of its API.
    pub address: String,
    pub alive: bool,
    pub draining: bool,
    pub owned_partitions: u32,
    pub voter: bool,
    pub leader: bool,
    pub heartbeat_age_seconds: u64,
    /// Where it was asked for: what the node says of itself, or why it says nothing.
    pub node_status: Option<Result<NodeStatus, String>>,
}

/// How a node is, by its own word.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeStatus {
    pub node: String,
    /// As its own replica says.
    pub draining: bool,
    /// Records that it has taken and not answered yet.
    pub produce_in_flight: u64,
    /// Records that it has answered and not brought to their partitions yet.
    pub dispatch_backlog: u64,
    /// Copies that it has set aside, and their bytes; the first [`NodeStatus::COPIES_MAX`] of them.
    pub quarantined_copies: u64,
    pub quarantined_bytes: u64,
    pub quarantined: Vec<Quarantined>,
}

impl NodeStatus {
    pub const COPIES_MAX: usize = 100;
}

/// A directory that is kept and never served.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quarantined {
    pub topic: String,
    /// Below the data directory.
    pub directory: String,
    pub bytes: u64,
    /// Unix seconds.
    pub modified_at: u64,
}

/// What a graceful stop could not make durable. Nothing answered `202` is among it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NotStored {
    /// Partitions whose newest acks may come undone.
    pub positions: u64,
    /// Partition logs whose end the next start has to find by reading them.
    pub boundaries: u64,
    /// WAL directories of which records that are in their partitions may be brought there again.
    pub checkpoints: u64,
    /// What the first of these failed with.
    pub cause: Option<String>,
}

impl NotStored {
    pub fn is_nothing(&self) -> bool {
        self.positions + self.boundaries + self.checkpoints == 0
    }

    pub fn add(&mut self, other: NotStored) {
        self.positions += other.positions;
        self.boundaries += other.boundaries;
        self.checkpoints += other.checkpoints;
        self.cause = self.cause.take().or(other.cause);
    }
}

/// What shards ask of the control thread.
#[derive(Clone, Debug)]
pub enum MetaCommand {
    CreateTopic(NewTopic),
    DeleteTopic {
        name: String,
        incarnation: Incarnation,
    },
    AlterTopic {
        name: String,
        incarnation: Incarnation,
        change: TopicChange,
    },
    /// Is this incarnation gone for certain (name absent, or another id), by the leader's word? Discards and
    /// directory removals ask this (S10, seed "Discarding records").
    ConfirmGone {
        name: String,
        incarnation: Option<Incarnation>,
    },
    /// Who belongs to the cluster, as this node sees it; with `detail` each is asked how it is.
    ListMembers {
        detail: bool,
    },
    /// Removes a server that votes or replicates and never became a member.
    ForgetServer {
        node: String,
    },
}

#[derive(Clone, Debug)]
pub enum MetaReply {
    Created(Arc<TopicMeta>),
    Deleted,
    Altered(Arc<TopicMeta>),
    /// A topic's partitions only grow; it has this many already.
    NotMore {
        partitions: u32,
    },
    /// The topic exists already under exactly this name.
    Exists,
    /// Another topic's name differs only in letter case.
    CaseCollision {
        existing: String,
    },
    NotFound,
    /// The topic was deleted and created again since it was read.
    Changed,
    Gone,
    NotGone,
    /// In the order of their ids.
    Members(Vec<MemberStatus>),
    Forgotten {
        voter: bool,
    },
    /// Nothing changed, for a reason that is the caller's to read; `status` is one of [`crate::wire::status`].
    Refused {
        status: u16,
        why: String,
    },
    /// No leader, or the metadata store refused: retriable, nothing known to have changed.
    Unavailable(String),
    /// It was under way when whoever decides it was lost, or the store gave up: it may still be applied (K11).
    Unknown(String),
}
