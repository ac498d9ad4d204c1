//! What the dispatcher says in the log, and how.

use std::io;

use super::core::{Report, TopicLife};
use super::driver::Environment;
use super::notices::{Line, State};
use crate::meta::{Address, NodeId};

pub(super) fn log_read_error(error: &io::Error) {
    tracing::error!(%error, "ingress WAL cannot be read back; dispatch tries again in 1 s, records stay in the WAL");
}

/// What people call it: a number of the metadata's, taken for a node's, has the wrong one restarted.
fn name_of(node: NodeId, environment: &dyn Environment) -> String {
    environment.name_of(node).map_or_else(|| format!("member {}", node.0), |name| name.to_string())
}

/// A change of another node's state.
pub(super) fn log_line(line: &Line, environment: &dyn Environment) {
    let Line { node, state, partitions, error, after } = line;
    let (owner, after_ms) = (name_of(*node, environment), after.as_millis() as u64);
    match state {
        State::Hung => tracing::warn!(
            owner,
            partitions,
            "produce commits to a node have not been answered for 1 s; its partitions take no new records until they are"
        ),
        State::Failing => tracing::warn!(
            owner, partitions, error = error.as_deref(),
            "produce commits to a node fail; each of its partitions is tried again once a second with one record"
        ),
        State::Rerouting => tracing::warn!(
            owner, partitions, error = error.as_deref(), after_ms,
            "produce commits to a node keep failing; records go to sibling partitions until one succeeds"
        ),
        State::Well => tracing::info!(owner, partitions, after_ms, "produce commits to a node succeed again"),
    }
}

/// Reports of this node's own partitions, and of records.
pub(super) fn log(report: &Report, environment: &dyn Environment) {
    let owner = |address: &Address| match address.node {
        NodeId::LOCAL => format!("shard {} of this node", address.shard),
        node => name_of(node, environment),
    };
    let id = |life: &TopicLife| life.incarnation.map(|id| id.to_string()).unwrap_or_default();
    match report {
        Report::Discarded { life, partition, seq, replaced: true, error: None } => tracing::warn!(
            topic = &*life.topic,
            topic_id = id(life),
            partition,
            seq,
            "discarding undispatched record of a deleted topic incarnation"
        ),
        Report::Discarded { life, partition, seq, error, .. } => tracing::warn!(
            topic = &*life.topic,
            topic_id = id(life),
            partition,
            seq,
            error = error.as_deref(),
            "discarding undispatched record for deleted topic"
        ),
        Report::DiscardedQueue { life, partition, records } => tracing::warn!(
            topic = &*life.topic,
            topic_id = id(life),
            partition,
            records,
            "discarding undispatched produce records for deleted topic"
        ),
        Report::Refused { topic, destination, records, error } => tracing::warn!(
            topic = &**topic, topic_id = %destination.incarnation, partition = destination.partition, records, %error,
            "owner refused produce records accepted for another topic incarnation; checking them again"
        ),
        Report::Failing { topic, destination, address, error } => tracing::warn!(
            topic = &**topic, partition = destination.partition, owner = owner(address), %error,
            "produce commit failed; the partition is tried again once a second with one record"
        ),
        Report::Rerouting { topic, destination, .. } => tracing::warn!(
            topic = &**topic,
            partition = destination.partition,
            "produce commits keep failing; records go to a sibling partition until one succeeds"
        ),
        Report::Recovered { topic, destination, .. } => {
            tracing::info!(topic = &**topic, partition = destination.partition, "produce commits succeed again")
        }
        Report::Hung { topic, destination, address, records } => tracing::warn!(
            topic = &**topic,
            partition = destination.partition,
            owner = owner(address),
            records,
            "produce commit has not been answered for 1 s; the partition takes no new records until it is"
        ),
        Report::Missing { seq } => tracing::error!(
            seq,
            "ingress WAL did not hand over a durable record; dispatch cannot pass it and tries again in 1 s"
        ),
    }
}
