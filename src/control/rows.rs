//! Rows of the state file and payloads of log entries: JSON, a few hundred bytes each, legible to whoever repairs a
//! file by hand. A field that a later build adds to a row gets a default here; an unknown one is refused, not dropped.

use std::sync::Arc;

use narad_shards::api::TopicChange;
use narad_shards::meta::{Incarnation, NodeId, TopicMeta};
use serde::{Deserialize, Serialize};

use super::command::{Command, Registration};
use super::state::Member;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TopicRow {
    id: String,
    partitions: u32,
    retention_ms: u64,
    visibility_timeout_ms: u64,
    max_in_flight_per_partition: u64,
    max_acked_ahead_per_partition: u64,
    created_at_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    owner: Option<String>,
}

impl TopicRow {
    pub fn decode(name: &str, row: &[u8]) -> Result<TopicMeta, String> {
        serde_json::from_slice::<TopicRow>(row).map_err(|error| error.to_string())?.into_topic(name)
    }

    pub fn encode(topic: &TopicMeta) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(&TopicRow::of(topic))
    }

    fn of(topic: &TopicMeta) -> TopicRow {
        TopicRow {
            id: topic.incarnation.to_string(),
            partitions: topic.partitions,
            retention_ms: topic.retention_ms,
            visibility_timeout_ms: topic.visibility_timeout_ms,
            max_in_flight_per_partition: topic.max_in_flight_per_partition,
            max_acked_ahead_per_partition: topic.max_acked_ahead_per_partition,
            created_at_ms: topic.created_at_ms,
            owner: topic.owner.as_deref().map(str::to_owned),
        }
    }

    fn into_topic(self, name: &str) -> Result<TopicMeta, String> {
        Ok(TopicMeta {
            name: Arc::from(name),
            incarnation: incarnation(&self.id)?,
            partitions: self.partitions,
            retention_ms: self.retention_ms,
            visibility_timeout_ms: self.visibility_timeout_ms,
            max_in_flight_per_partition: self.max_in_flight_per_partition,
            max_acked_ahead_per_partition: self.max_acked_ahead_per_partition,
            created_at_ms: self.created_at_ms,
            owner: self.owner.map(Arc::from),
        })
    }
}

fn incarnation(id: &str) -> Result<Incarnation, String> {
    Incarnation::parse(id).ok_or_else(|| format!("{id:?} is no topic id"))
}

/// A member's row; its key is the node's name.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MemberRow {
    number: u64,
    raft_id: u64,
    peer_address: String,
    client_address: String,
    build: String,
    newest_command_type: u64,
    heartbeat_ms: u64,
    alive: bool,
    #[serde(default)]
    draining: bool,
}

impl MemberRow {
    pub fn encode(member: &Member) -> serde_json::Result<Vec<u8>> {
        let told = &member.registration;
        serde_json::to_vec(&MemberRow {
            number: member.number.0,
            raft_id: told.raft_id,
            peer_address: told.peer_address.to_string(),
            client_address: told.client_address.to_string(),
            build: told.build.to_string(),
            newest_command_type: told.newest_command_type,
            heartbeat_ms: member.heartbeat_ms,
            alive: member.alive,
            draining: member.draining,
        })
    }

    pub fn decode(node: &str, row: &[u8]) -> Result<Member, String> {
        let row: MemberRow = serde_json::from_slice(row).map_err(|error| error.to_string())?;
        if matches!(NodeId(row.number), NodeId::LOCAL | NodeId::NONE) {
            return Err(format!("{} is no number of a member", row.number));
        }
        Ok(Member {
            number: NodeId(row.number),
            registration: Arc::new(Registration {
                node: Arc::from(node),
                raft_id: row.raft_id,
                peer_address: Arc::from(row.peer_address),
                client_address: Arc::from(row.client_address),
                build: Arc::from(row.build),
                newest_command_type: row.newest_command_type,
            }),
            heartbeat_ms: row.heartbeat_ms,
            alive: row.alive,
            draining: row.draining,
        })
    }
}

/// Owner of a partition; its key is topic id and partition.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AssignmentRow {
    owner: u64,
}

impl AssignmentRow {
    pub fn encode(owner: NodeId) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(&AssignmentRow { owner: owner.0 })
    }

    pub fn decode(row: &[u8]) -> Result<NodeId, String> {
        let row: AssignmentRow = serde_json::from_slice(row).map_err(|error| error.to_string())?;
        Ok(NodeId(row.owner))
    }
}

/// Bytes that are no command which this build applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BadCommand {
    /// Of a newer release: the node stops, for skipping it would make its state another one (K17).
    UnknownType(u64),
    /// Skipped, on every node alike (K17).
    Unreadable(String),
}

impl std::fmt::Display for BadCommand {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            BadCommand::UnknownType(number) => write!(
                f,
                "command type {number} was proposed by a newer Narad release, this build applies up to {}: run the build that the rest of the cluster runs",
                Command::NEWEST_TYPE
            ),
            BadCommand::Unreadable(why) => write!(f, "a log entry does not decode: {why}"),
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CreateEntry {
    name: String,
    topic: TopicRow,
    owners: Vec<u64>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct AlterEntry {
    name: String,
    id: String,
    retention_ms: Option<u64>,
    max_in_flight_per_partition: Option<u64>,
    max_acked_ahead_per_partition: Option<u64>,
    partitions: Option<u32>,
    owners: Vec<u64>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TopicEntry {
    name: String,
    id: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlaceEntry {
    name: String,
    id: String,
    owners: Vec<(u32, u64)>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PruneEntry {
    id: String,
    partition: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RegisterEntry {
    node: String,
    raft_id: u64,
    peer_address: String,
    client_address: String,
    build: String,
    newest_command_type: u64,
    stamp_ms: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeadEntry {
    node: String,
    stamp_ms: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeEntry {
    node: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ClusterEntry {
    cluster_id: u64,
}

impl Command {
    /// The command as a log entry carries it: its type number (u16, little-endian), then JSON.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = (self.type_number() as u16).to_le_bytes().to_vec();
        let payload = match self {
            Command::CreateTopic { topic, owners } => serde_json::to_vec(&CreateEntry {
                name: topic.name.to_string(),
                topic: TopicRow::of(topic),
                owners: owners.iter().map(|owner| owner.0).collect(),
            }),
            Command::DeleteTopic { name, incarnation } => {
                serde_json::to_vec(&TopicEntry { name: name.to_string(), id: incarnation.to_string() })
            }
            Command::AlterTopic { name, incarnation, change, owners } => serde_json::to_vec(&AlterEntry {
                name: name.to_string(),
                id: incarnation.to_string(),
                retention_ms: change.retention_ms,
                max_in_flight_per_partition: change.max_in_flight_per_partition,
                max_acked_ahead_per_partition: change.max_acked_ahead_per_partition,
                partitions: change.partitions,
                owners: owners.iter().map(|owner| owner.0).collect(),
            }),
            Command::PlacePartitions { name, incarnation, owners } => serde_json::to_vec(&PlaceEntry {
                name: name.to_string(),
                id: incarnation.to_string(),
                owners: owners.iter().map(|(partition, owner)| (*partition, owner.0)).collect(),
            }),
            Command::PruneAssignment { incarnation, partition } => {
                serde_json::to_vec(&PruneEntry { id: incarnation.to_string(), partition: *partition })
            }
            Command::RegisterMember { registration, stamp_ms } => serde_json::to_vec(&RegisterEntry {
                node: registration.node.to_string(),
                raft_id: registration.raft_id,
                peer_address: registration.peer_address.to_string(),
                client_address: registration.client_address.to_string(),
                build: registration.build.to_string(),
                newest_command_type: registration.newest_command_type,
                stamp_ms: *stamp_ms,
            }),
            Command::MarkDead { node, stamp_ms } => {
                serde_json::to_vec(&DeadEntry { node: node.to_string(), stamp_ms: *stamp_ms })
            }
            Command::RemoveMember { node } | Command::ClearTombstone { node } => {
                serde_json::to_vec(&NodeEntry { node: node.to_string() })
            }
            Command::SetClusterId(id) => serde_json::to_vec(&ClusterEntry { cluster_id: *id }),
        };
        bytes.extend(payload.expect("names, numbers and lists become JSON"));
        bytes
    }

    pub fn decode(entry: &[u8]) -> Result<Command, BadCommand> {
        let Some((number, payload)) = entry.split_first_chunk::<2>() else {
            return Err(BadCommand::Unreadable(format!("{} bytes hold no command type", entry.len())));
        };
        let number = u64::from(u16::from_le_bytes(*number));
        if number > Command::NEWEST_TYPE {
            return Err(BadCommand::UnknownType(number));
        }
        decode_payload(number, payload).map_err(|why| BadCommand::Unreadable(format!("command type {number}: {why}")))
    }
}

fn decode_payload(number: u64, payload: &[u8]) -> Result<Command, String> {
    fn json<'a, T: Deserialize<'a>>(payload: &'a [u8]) -> Result<T, String> {
        serde_json::from_slice(payload).map_err(|error| error.to_string())
    }
    let owners = |owners: Vec<u64>| owners.into_iter().map(NodeId).collect();
    let node = || json::<NodeEntry>(payload).map(|entry| Arc::from(entry.node));
    Ok(match number {
        1 => {
            let entry: CreateEntry = json(payload)?;
            Command::CreateTopic { topic: Arc::new(entry.topic.into_topic(&entry.name)?), owners: owners(entry.owners) }
        }
        2 => {
            let entry: TopicEntry = json(payload)?;
            Command::DeleteTopic { name: Arc::from(entry.name), incarnation: incarnation(&entry.id)? }
        }
        3 => {
            let entry: AlterEntry = json(payload)?;
            Command::AlterTopic {
                name: Arc::from(entry.name),
                incarnation: incarnation(&entry.id)?,
                change: TopicChange {
                    retention_ms: entry.retention_ms,
                    max_in_flight_per_partition: entry.max_in_flight_per_partition,
                    max_acked_ahead_per_partition: entry.max_acked_ahead_per_partition,
                    partitions: entry.partitions,
                },
                owners: owners(entry.owners),
            }
        }
        4 => {
            let entry: PlaceEntry = json(payload)?;
            Command::PlacePartitions {
                name: Arc::from(entry.name),
                incarnation: incarnation(&entry.id)?,
                owners: entry.owners.into_iter().map(|(partition, owner)| (partition, NodeId(owner))).collect(),
            }
        }
        5 => {
            let entry: PruneEntry = json(payload)?;
            Command::PruneAssignment { incarnation: incarnation(&entry.id)?, partition: entry.partition }
        }
        6 => {
            let entry: RegisterEntry = json(payload)?;
            let registration = Registration {
                node: Arc::from(entry.node),
                raft_id: entry.raft_id,
                peer_address: Arc::from(entry.peer_address),
                client_address: Arc::from(entry.client_address),
                build: Arc::from(entry.build),
                newest_command_type: entry.newest_command_type,
            };
            Command::RegisterMember { registration: Arc::new(registration), stamp_ms: entry.stamp_ms }
        }
        7 => {
            let entry: DeadEntry = json(payload)?;
            Command::MarkDead { node: Arc::from(entry.node), stamp_ms: entry.stamp_ms }
        }
        8 => Command::RemoveMember { node: node()? },
        9 => Command::ClearTombstone { node: node()? },
        10 => Command::SetClusterId(json::<ClusterEntry>(payload)?.cluster_id),
        other => return Err(format!("there is no command type {other}")),
    })
}
