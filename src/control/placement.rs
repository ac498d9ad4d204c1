//! Where every partition is served: which shard of this node, or which other node. In memory only; the control thread
//! alone chooses the shard (E43).

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use narad_shards::meta::{Address, Incarnation, NodeId, ShardId, Snapshot, TopicMeta};

use super::state::{Assignment, State};

/// Placed partitions. A partition of this node never moves while the process runs: its lease table lives on its shard.
#[derive(Clone, Debug)]
pub struct Placement {
    shards: ShardId,
    /// Partitions on each shard.
    load: Vec<u64>,
    placed: BTreeMap<Incarnation, Placed>,
    /// This node's name in the member records, and its number once it has one.
    node: Option<Arc<str>>,
    number: Option<NodeId>,
    trusted: bool,
}

#[derive(Clone, Debug)]
struct Placed {
    /// From what the addresses were made.
    owners: Option<Assignment>,
    addresses: Arc<[Address]>,
}

const UNOWNED: Address = Address { node: NodeId::NONE, shard: Address::ROUTED };

impl Placement {
    /// Of a node that was never in a cluster.
    pub fn new(shards: ShardId) -> Placement {
        assert!(shards > 0, "a node has at least one shard");
        let load = vec![0; usize::from(shards)];
        Placement { shards, load, placed: BTreeMap::new(), node: None, number: None, trusted: true }
    }

    /// Of a node that its cluster knows as `node`. Nobody sees an assignment before [`Placement::trust`] (K22).
    pub fn in_cluster(shards: ShardId, node: &str) -> Placement {
        Placement { node: Some(Arc::from(node)), trusted: false, ..Placement::new(shards) }
    }

    /// The ownership latch: the node has been caught up once, and stays trusted as long as the process runs.
    pub fn trust(&mut self) {
        self.trusted = true;
    }

    /// Forgets partitions that are gone or not this node's, then places new ones: each topic spread over the shards,
    /// the least loaded first.
    pub fn follow(&mut self, state: &State) {
        let number = self.node.as_ref().and_then(|node| state.members().get(node)).map(|member| member.number);
        if std::mem::replace(&mut self.number, number) != number {
            self.placed.values_mut().for_each(|placed| placed.owners = None);
        }
        let Placement { load, placed, .. } = self;
        placed.retain(|incarnation, placed| {
            let keep = state.topic_of(*incarnation).is_some();
            if !keep {
                placed.addresses.iter().for_each(|address| unload(load, address));
            }
            keep
        });
        for topic in state.topics().values() {
            self.place(state, topic);
        }
    }

    fn place(&mut self, state: &State, topic: &TopicMeta) {
        let owners = match state.cluster_id() {
            0 => None, // all its own
            _ => Some(state.assignments().get(&topic.incarnation).cloned().unwrap_or_default()),
        };
        let before = self.placed.get(&topic.incarnation);
        let unchanged = before.is_some_and(|placed| {
            let same_owners = match (&placed.owners, &owners) {
                (Some(before), Some(now)) => Arc::ptr_eq(before, now) || before == now,
                (before, now) => before.is_none() && now.is_none() && self.all_own(&placed.addresses),
            };
            same_owners && placed.addresses.len() >= topic.partitions as usize
        });
        if unchanged {
            return;
        }
        let before: Vec<Address> = before.map(|placed| placed.addresses.to_vec()).unwrap_or_default();
        let mut of_topic = vec![0u64; self.load.len()];
        let own = before.iter().filter(|address| address.node == NodeId::LOCAL);
        own.for_each(|address| of_topic[usize::from(address.shard)] += 1);
        let mut addresses = Vec::with_capacity(topic.partitions as usize);
        for partition in 0..topic.partitions {
            let owner = match &owners {
                None => NodeId::LOCAL,
                Some(owners) => owners.get(&partition).map_or(NodeId::NONE, |owner| self.as_seen_here(*owner)),
            };
            let placed = before.get(partition as usize).copied().filter(|address| address.node == NodeId::LOCAL);
            addresses.push(match (owner, placed) {
                (NodeId::LOCAL, Some(placed)) => placed,
                (NodeId::LOCAL, None) => {
                    let shard = self.least_loaded(&of_topic);
                    of_topic[usize::from(shard)] += 1;
                    self.load[usize::from(shard)] += 1;
                    Address::local(shard)
                }
                (other, placed) => {
                    placed.iter().for_each(|address| unload(&mut self.load, address));
                    match other {
                        NodeId::NONE => UNOWNED,
                        other => Address::remote(other),
                    }
                }
            });
        }
        self.placed.insert(topic.incarnation, Placed { owners, addresses: Arc::from(addresses) });
    }

    fn all_own(&self, addresses: &[Address]) -> bool {
        addresses.iter().all(|address| address.node == NodeId::LOCAL)
    }

    fn as_seen_here(&self, owner: NodeId) -> NodeId {
        match self.number == Some(owner) {
            true => NodeId::LOCAL,
            false => owner,
        }
    }

    fn least_loaded(&self, of_topic: &[u64]) -> ShardId {
        let least = (0..self.shards)
            .min_by_key(|shard| (of_topic[usize::from(*shard)], self.load[usize::from(*shard)], *shard));
        least.unwrap_or(0)
    }

    /// The world as `state` and this placement have it. Its version is the applied index (E52).
    pub fn snapshot(&self, state: &State) -> Snapshot {
        let topics = state.topics().clone();
        let by_incarnation: HashMap<_, _> = topics.values().map(|topic| (topic.incarnation, topic.clone())).collect();
        let placed = self.placed.iter().filter(|_| self.trusted);
        let placement = placed.map(|(incarnation, placed)| (*incarnation, placed.addresses.clone())).collect();
        Snapshot { version: state.applied_index(), shards: self.shards, topics, by_incarnation, placement }
    }
}

fn unload(load: &mut [u64], address: &Address) {
    if address.node == NodeId::LOCAL {
        load[usize::from(address.shard)] -= 1;
    }
}
