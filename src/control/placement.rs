//! Which shard of this node serves which partition. In memory only, chosen by the control thread alone (E43).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use narad_shards::meta::{Address, Incarnation, ShardId, Snapshot};

use super::state::State;

/// Placed partitions. A placed partition never moves while the process runs: its lease table lives on its shard.
#[derive(Clone, Debug)]
pub struct Placement {
    shards: ShardId,
    /// Partitions on each shard.
    load: Vec<u64>,
    placed: BTreeMap<Incarnation, Arc<[Address]>>,
}

impl Placement {
    pub fn new(shards: ShardId) -> Placement {
        assert!(shards > 0, "a node has at least one shard");
        Placement { shards, load: vec![0; usize::from(shards)], placed: BTreeMap::new() }
    }

    /// Forgets partitions of topics that are gone, then places new ones: each topic spread over the shards, the least
    /// loaded first.
    pub fn follow(&mut self, state: &State) {
        let live: BTreeSet<Incarnation> = state.topics().values().map(|topic| topic.incarnation).collect();
        let Placement { load, placed, .. } = self;
        placed.retain(|incarnation, addresses| {
            let keep = live.contains(incarnation);
            if !keep {
                addresses.iter().for_each(|address| load[usize::from(address.shard)] -= 1);
            }
            keep
        });
        for topic in state.topics().values() {
            self.place(topic.incarnation, topic.partitions);
        }
    }

    fn place(&mut self, incarnation: Incarnation, partitions: u32) {
        let before = self.placed.get(&incarnation);
        if before.is_some_and(|addresses| addresses.len() >= partitions as usize) {
            return;
        }
        let mut addresses: Vec<Address> = before.map(|addresses| addresses.to_vec()).unwrap_or_default();
        let mut of_topic = vec![0u64; self.load.len()];
        addresses.iter().for_each(|address| of_topic[usize::from(address.shard)] += 1);
        while addresses.len() < partitions as usize {
            let least = (0..self.shards)
                .min_by_key(|shard| (of_topic[usize::from(*shard)], self.load[usize::from(*shard)], *shard));
            let shard = least.unwrap_or(0);
            of_topic[usize::from(shard)] += 1;
            self.load[usize::from(shard)] += 1;
            addresses.push(Address::local(shard));
        }
        self.placed.insert(incarnation, Arc::from(addresses));
    }

    /// The world as `state` and this placement have it. Its version is the applied index (E52).
    pub fn snapshot(&self, state: &State) -> Snapshot {
        let topics = state.topics().clone();
        let by_incarnation: HashMap<_, _> = topics.values().map(|topic| (topic.incarnation, topic.clone())).collect();
        let placement: HashMap<_, _> = self.placed.iter().map(|(id, addresses)| (*id, addresses.clone())).collect();
        Snapshot { version: state.applied_index(), shards: self.shards, topics, by_incarnation, placement }
    }
}
