//! Topics and owners: what the operator did, and which node knows of it.

use std::collections::BTreeMap;
use std::time::Duration;

use narad_shards::meta::{Incarnation, NodeId, Snapshot, TopicMeta};
use narad_shards::rt::Instant;

use super::{CopyId, Ledger, Rule};
use crate::metadata::owner_of;

pub(super) struct Topic {
    pub(super) name: String,
    pub(super) visibility: Duration,
    /// 0: for ever.
    pub(super) retention_ms: u64,
    pub(super) created: Instant,
    /// From the first attempt to delete it on, nothing of it is owed.
    pub(super) delete_started: Option<Instant>,
    /// By node: from then on it knows that the topic is gone.
    pub(super) gone: Vec<Option<Instant>>,
    /// By node: it has known the topic.
    pub(super) known: Vec<bool>,
    /// Version of the first snapshot that had it.
    pub(super) version: u64,
}

/// Which node owns a partition.
pub(super) enum Owners {
    /// As [`owner_of`] deals them out over so many.
    Dealt(usize),
    /// As the nodes say themselves.
    Told(BTreeMap<(Incarnation, u32), usize>),
}

impl Owners {
    pub(super) fn of(&self, id: CopyId) -> usize {
        match self {
            Owners::Dealt(nodes) => owner_of(id.0, id.1, *nodes),
            // Nobody has seen a record of a partition before its owner knew that it is its own.
            Owners::Told(told) => told.get(&(id.0, id.1)).copied().unwrap_or(0),
        }
    }
}

impl Ledger {
    pub fn topic_created(&mut self, meta: &TopicMeta, started: Instant) {
        if self.topics.contains_key(&meta.incarnation) {
            return;
        }
        let (name, incarnation, retention_ms) = (&meta.name, meta.incarnation, meta.retention_ms);
        let visibility = Duration::from_millis(meta.visibility_timeout_ms);
        let text =
            format!("topic {name} created as {incarnation}, visibility {visibility:?}, retention {retention_ms} ms");
        self.note(started, text);
        let nodes = self.boots.len();
        let topic = Topic {
            name: name.to_string(),
            visibility,
            retention_ms,
            created: started,
            delete_started: None,
            gone: vec![None; nodes],
            known: vec![!self.is_whole(); nodes],
            version: u64::MAX,
        };
        self.topics.insert(incarnation, topic);
    }

    pub(super) fn is_whole(&self) -> bool {
        matches!(self.owners, Owners::Told(_))
    }

    pub fn delete_started(&mut self, incarnation: Incarnation, at: Instant) {
        self.note(at, format!("delete {incarnation}"));
        if let Some(topic) = self.topics.get_mut(&incarnation) {
            topic.delete_started.get_or_insert(at);
        }
    }

    pub fn delete_answered(&mut self, incarnation: Incarnation, at: Instant) {
        self.note(at, format!("deleted {incarnation}"));
        let told_all = !self.is_whole();
        if let Some(topic) = self.topics.get_mut(&incarnation).filter(|_| told_all) {
            for gone in &mut topic.gone {
                gone.get_or_insert(at);
            }
        }
    }

    /// The shards of a whole node are about to see this.
    pub fn comes(&mut self, node: usize, snapshot: &Snapshot, at: Instant) {
        let mut topics: Vec<_> = snapshot.topics.values().cloned().collect();
        topics.sort_unstable_by_key(|topic| topic.incarnation);
        for meta in topics {
            self.topic_created(&meta, at);
            if let Some(topic) = self.topics.get_mut(&meta.incarnation) {
                topic.known[node] = true;
                topic.version = topic.version.min(snapshot.version);
            }
            let own = snapshot.placement.get(&meta.incarnation).into_iter().flat_map(|places| (0..).zip(places.iter()));
            for (partition, _) in own.filter(|(_, address)| address.node == NodeId::LOCAL) {
                let Owners::Told(told) = &mut self.owners else { return };
                let owner = *told.entry((meta.incarnation, partition)).or_insert(node);
                if owner != node {
                    let text = format!("{}/{partition}: node {node}, and node {owner} before", meta.name);
                    self.violate(at, Rule::TwoOwners, text);
                }
            }
        }
    }

    /// All shards of a whole node see this.
    pub fn seen_by(&mut self, node: usize, snapshot: &Snapshot, at: Instant) {
        for (incarnation, topic) in &mut self.topics {
            let has = snapshot.by_incarnation.contains_key(incarnation);
            if !has && snapshot.version >= topic.version {
                topic.gone[node].get_or_insert(at);
            }
        }
    }

    /// The live incarnation of a name, as far as any node has said.
    pub fn live(&self, name: &str) -> Option<Incarnation> {
        let live = |topic: &Topic| topic.name == name && topic.delete_started.is_none();
        self.topics.iter().find(|(_, topic)| live(topic)).map(|(incarnation, _)| *incarnation)
    }
}
