//! A command as a log entry: a type number, then JSON, as legible as the rows (K17, K18).

use std::sync::Arc;

use narad_shards::api::TopicChange;
use narad_shards::meta::Incarnation;
use serde::{Deserialize, Serialize};

use crate::control::store::TopicRow;
use crate::control::Command;

/// Bytes that are no command which this build applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BadCommand {
    /// Of a newer release: the node stops, for skipping it would make its state another one (K17).
    UnknownType(u64),
    /// Skipped, on every node alike (K17).
    Unreadable(String),
}

#[derive(Serialize, Deserialize)]
struct Row {
    #[serde(rename = "type")]
    kind: u64,
    name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    topic: Option<serde_json::Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    change: Option<Alter>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Alter {
    partitions: Option<u32>,
    retention_ms: Option<u64>,
    max_in_flight_per_partition: Option<u64>,
    max_acked_ahead_per_partition: Option<u64>,
}

#[derive(Deserialize)]
struct Kind {
    #[serde(rename = "type")]
    kind: u64,
}

impl Command {
    pub fn encode(&self) -> Vec<u8> {
        let kind = self.type_number();
        let row = match self {
            Command::CreateTopic(topic) => {
                let row = TopicRow::encode(topic).and_then(|row| serde_json::from_slice(&row));
                Row { kind, name: topic.name.to_string(), topic: row.ok(), id: None, change: None }
            }
            Command::DeleteTopic { name, incarnation } => {
                Row { kind, name: name.to_string(), topic: None, id: Some(incarnation.to_string()), change: None }
            }
            Command::AlterTopic { name, incarnation, change } => {
                let alter = Alter {
                    partitions: change.partitions,
                    retention_ms: change.retention_ms,
                    max_in_flight_per_partition: change.max_in_flight_per_partition,
                    max_acked_ahead_per_partition: change.max_acked_ahead_per_partition,
                };
                let id = Some(incarnation.to_string());
                Row { kind, name: name.to_string(), topic: None, id, change: Some(alter) }
            }
        };
        serde_json::to_vec(&row).unwrap_or_default() // strings and numbers
    }

    pub fn decode(entry: &[u8]) -> Result<Command, BadCommand> {
        let unreadable = |error: &dyn std::fmt::Display| BadCommand::Unreadable(error.to_string());
        let Kind { kind } = serde_json::from_slice(entry).map_err(|error| unreadable(&error))?;
        if kind > Command::NEWEST_TYPE {
            return Err(BadCommand::UnknownType(kind));
        }
        let row: Row = serde_json::from_slice(entry).map_err(|error| unreadable(&error))?;
        let id = row.id.as_deref().and_then(Incarnation::parse);
        let name: Arc<str> = Arc::from(row.name);
        match (kind, row.topic, id, row.change) {
            (1, Some(topic), _, _) => TopicRow::decode(&name, topic.to_string().as_bytes())
                .map(|topic| Command::CreateTopic(Arc::new(topic)))
                .map_err(|error| unreadable(&error)),
            (2, _, Some(incarnation), _) => Ok(Command::DeleteTopic { name, incarnation }),
            (3, _, Some(incarnation), Some(alter)) => {
                let change = TopicChange {
                    partitions: alter.partitions,
                    retention_ms: alter.retention_ms,
                    max_in_flight_per_partition: alter.max_in_flight_per_partition,
                    max_acked_ahead_per_partition: alter.max_acked_ahead_per_partition,
                };
                Ok(Command::AlterTopic { name, incarnation, change })
            }
            _ => Err(BadCommand::Unreadable(format!("an entry of type {kind} lacks a part"))),
        }
    }
}
