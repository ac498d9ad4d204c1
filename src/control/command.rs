//! Commands on the metadata: only guarded forms exist (K5), and everything random or timed is already in them (K4).

use std::sync::Arc;

use narad_shards::api::TopicChange;
use narad_shards::meta::{Incarnation, NodeId, TopicMeta};

/// Owners that a proposer has chosen, one a partition; [`NodeId::NONE`] leaves one to a later placement.
pub type Owners = Arc<[NodeId]>;

/// What a node says of itself with every heartbeat.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Registration {
    pub node: Arc<str>,
    /// Of its consensus directory (E36).
    pub raft_id: u64,
    /// `host:port` of its control endpoint.
    pub peer_address: Arc<str>,
    /// `host:port` of its HTTP listener.
    pub client_address: Arc<str>,
    pub build: Arc<str>,
    /// Newest command type that it applies (K18).
    pub newest_command_type: u64,
}

/// One change, decided once and applied in the same way everywhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Refused when the name is taken, letter case aside. The owners enter with the record (K6); one that is no member
    /// any more leaves its partition unowned.
    CreateTopic { topic: Arc<TopicMeta>, owners: Owners },
    /// Refused when the live topic of that name is another incarnation.
    DeleteTopic { name: Arc<str>, incarnation: Incarnation },
    /// Refused like a delete, and when the partitions would not become more. Fields that it leaves out keep what the
    /// commands before it made of them (lesson N73.2). `owners` are those of the last partitions.
    AlterTopic { name: Arc<str>, incarnation: Incarnation, change: TopicChange, owners: Owners },
    /// Gives owners to partitions that have none. Refused as a whole when one of them has an owner (K7) or does not
    /// exist, when the topic is another incarnation, or a node is no member.
    PlacePartitions { name: Arc<str>, incarnation: Incarnation, owners: Arc<[(u32, NodeId)]> },
    /// Removes a row that names no partition. Refused when it names one.
    PruneAssignment { incarnation: Incarnation, partition: u32 },
    /// A heartbeat: the member as it describes itself, alive at `stamp_ms` of the leader's clock. Keeps its number and
    /// its draining flag. Refused when the id has a tombstone (K33).
    RegisterMember { registration: Arc<Registration>, stamp_ms: u64 },
    /// Refused when another heartbeat than the one judged is on record (K26).
    MarkDead { node: Arc<str>, stamp_ms: u64 },
    /// Deletes the member and leaves a tombstone. Refused when an assignment names it.
    RemoveMember { node: Arc<str> },
    /// Forgets a tombstone, for a deliberate return.
    ClearTombstone { node: Arc<str> },
    /// Begins a cluster; topics that a lone node had become those of the only member. Refused when the cluster has an
    /// id, and when there are topics but not exactly one member.
    SetClusterId(u64),
}

impl Command {
    /// Newest type that this build applies. A file that has seen a newer one belongs to a newer build (K18).
    pub const NEWEST_TYPE: u64 = 10;

    /// Every release applies the types up to this one.
    pub const FIRST_RELEASE_TYPE: u64 = 10;

    /// A create that leaves the owners to a later placement.
    pub fn create(topic: Arc<TopicMeta>) -> Command {
        Command::CreateTopic { topic, owners: Owners::default() }
    }

    /// The type's name in logs.
    pub fn type_name(&self) -> &'static str {
        match self {
            Command::CreateTopic { .. } => "create_topic",
            Command::DeleteTopic { .. } => "delete_topic",
            Command::AlterTopic { .. } => "alter_topic",
            Command::PlacePartitions { .. } => "place_partitions",
            Command::PruneAssignment { .. } => "prune_assignment",
            Command::RegisterMember { .. } => "register_member",
            Command::MarkDead { .. } => "mark_dead",
            Command::RemoveMember { .. } => "remove_member",
            Command::ClearTombstone { .. } => "clear_tombstone",
            Command::SetClusterId(_) => "set_cluster_id",
        }
    }

    /// The type's number in a log entry; never reused, and its fields never change: a new form is a new type.
    pub fn type_number(&self) -> u64 {
        match self {
            Command::CreateTopic { .. } => 1,
            Command::DeleteTopic { .. } => 2,
            Command::AlterTopic { .. } => 3,
            Command::PlacePartitions { .. } => 4,
            Command::PruneAssignment { .. } => 5,
            Command::RegisterMember { .. } => 6,
            Command::MarkDead { .. } => 7,
            Command::RemoveMember { .. } => 8,
            Command::ClearTombstone { .. } => 9,
            Command::SetClusterId(_) => 10,
        }
    }
}
