//! The control thread's part in a simulated node: topics, incarnations, snapshots. Always durable, never slow.

use std::collections::BTreeMap;
use std::sync::Arc;

use narad_shards::api::{MetaReply, NewTopic};
use narad_shards::meta::{Address, Incarnation, NodeId, ShardId, Snapshot, TopicMeta};
use narad_shards::rt::sim::Rng;

pub struct Metadata {
    topics: BTreeMap<String, Arc<TopicMeta>>,
    version: u64,
    rng: Rng,
}

/// The node, of so many, that owns a partition.
pub fn owner_of(incarnation: Incarnation, partition: u32, nodes: usize) -> usize {
    ((incarnation.0 / 7 % nodes as u64 + u64::from(partition)) % nodes as u64) as usize
}

/// What other nodes call a node.
pub fn number_of(node: usize) -> NodeId {
    NodeId(node as u64 + 1)
}

impl Metadata {
    pub fn new(seed: u64) -> Metadata {
        Metadata { topics: BTreeMap::new(), version: 1, rng: Rng::new(seed) }
    }

    pub fn topic(&self, name: &str) -> Option<&Arc<TopicMeta>> {
        self.topics.get(name)
    }

    pub fn create(&mut self, topic: &NewTopic, now_ms: u64) -> MetaReply {
        if self.topics.contains_key(&topic.name) {
            return MetaReply::Exists;
        }
        let meta = Arc::new(TopicMeta {
            name: Arc::from(topic.name.as_str()),
            incarnation: Incarnation(self.rng.next_u64()),
            partitions: topic.partitions,
            retention_ms: topic.retention_ms,
            visibility_timeout_ms: topic.visibility_timeout_ms,
            max_in_flight_per_partition: topic.max_in_flight_per_partition,
            max_acked_ahead_per_partition: topic.max_acked_ahead_per_partition,
            created_at_ms: now_ms,
            owner: None,
        });
        self.topics.insert(topic.name.clone(), meta.clone());
        self.version += 1;
        MetaReply::Created(meta)
    }

    pub fn delete(&mut self, name: &str, incarnation: Incarnation) -> MetaReply {
        match self.topics.get(name) {
            None => MetaReply::NotFound,
            Some(topic) if topic.incarnation != incarnation => MetaReply::Changed,
            Some(_) => {
                self.topics.remove(name);
                self.version += 1;
                MetaReply::Deleted
            }
        }
    }

    /// What `MetaCommand::ConfirmGone` answers: the one node is its own leader.
    pub fn confirm_gone(&self, name: &str, incarnation: Option<Incarnation>) -> MetaReply {
        match (self.topics.get(name), incarnation) {
            (None, _) => MetaReply::Gone,
            (Some(topic), Some(incarnation)) if topic.incarnation != incarnation => MetaReply::Gone,
            _ => MetaReply::NotGone,
        }
    }

    /// The topics as every shard of a lone node sees them.
    pub fn snapshot(&self, shards: ShardId) -> Arc<Snapshot> {
        self.snapshot_of(0, 1, shards)
    }

    /// The topics as every shard of one node of so many sees them: partitions are dealt out over the nodes in turn, and
    /// over the shards of their node.
    pub fn snapshot_of(&self, node: usize, nodes: usize, shards: ShardId) -> Arc<Snapshot> {
        let mut snapshot = Snapshot { version: self.version, shards, ..Snapshot::default() };
        for topic in self.topics.values() {
            let first = topic.incarnation.0 % u64::from(shards.max(1));
            let placement: Vec<Address> = (0..u64::from(topic.partitions))
                .map(|partition| match owner_of(topic.incarnation, partition as u32, nodes) {
                    owner if owner == node => {
                        Address::local(((first + partition) % u64::from(shards.max(1))) as ShardId)
                    }
                    owner => Address::remote(number_of(owner)),
                })
                .collect();
            snapshot.topics.insert(topic.name.clone(), topic.clone());
            snapshot.by_incarnation.insert(topic.incarnation, topic.clone());
            snapshot.placement.insert(topic.incarnation, Arc::from(placement));
        }
        Arc::new(snapshot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_created_again_is_another_incarnation() {
        let topic = NewTopic {
            name: "t".to_owned(),
            partitions: 3,
            retention_ms: 0,
            visibility_timeout_ms: 1000,
            max_in_flight_per_partition: 10,
            max_acked_ahead_per_partition: 10,
            owner: None,
        };
        let mut metadata = Metadata::new(1);
        let MetaReply::Created(first) = metadata.create(&topic, 0) else { panic!("new") };
        assert!(matches!(metadata.create(&topic, 0), MetaReply::Exists));
        assert!(matches!(metadata.confirm_gone("t", Some(first.incarnation)), MetaReply::NotGone));
        assert!(matches!(metadata.delete("t", first.incarnation), MetaReply::Deleted));
        let MetaReply::Created(second) = metadata.create(&topic, 0) else { panic!("new again") };
        assert_ne!(first.incarnation, second.incarnation);
        assert!(matches!(metadata.delete("t", first.incarnation), MetaReply::Changed));
        assert!(matches!(metadata.confirm_gone("t", Some(first.incarnation)), MetaReply::Gone));
        let snapshot = metadata.snapshot(2);
        let placed: Vec<u16> = snapshot.placement[&second.incarnation].iter().map(|address| address.shard).collect();
        assert!(placed == [0, 1, 0] || placed == [1, 0, 1]);
    }
}
