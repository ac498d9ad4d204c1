//! A topic's partitions by the word of their owners (http-api 9.2): whoever does not answer is shown as such, and holds up
//! nobody else's figures.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::Shard;
use crate::api::{OwnerLiveness, PartitionReport, PartitionStats};
use crate::meta::{Address, Destination, NodeId, PeerBook, TopicMeta};
use crate::peer::{Reply, Request};
use crate::rt;

/// How long an owner is waited for.
pub const DESCRIBE_WAIT: Duration = Duration::from_secs(2);

impl Shard {
    /// One report for each partition, or for the single one asked for, in their order. Takes [`DESCRIBE_WAIT`] at most.
    pub async fn describe(&self, topic: &TopicMeta, only: Option<u32>) -> Vec<PartitionReport> {
        let (snapshot, incarnation) = (self.snapshot(), topic.incarnation);
        let shown = only.map_or(0..topic.partitions, |only| only..only.saturating_add(1));
        let owner = |partition| snapshot.address(Destination { incarnation, partition });
        let owners: BTreeSet<Address> = shown.clone().filter_map(owner).collect();
        let asked = owners.iter().map(|owner| {
            Box::pin(rt::timeout(DESCRIBE_WAIT, self.carrier().call(*owner, Request::Stats { incarnation })))
        });
        let mut known: Vec<PartitionStats> = Vec::new();
        for answer in rt::all(asked.collect()).await {
            if let Ok(Ok(Reply::Stats(stats))) = answer {
                known.extend(stats);
            }
        }
        known.sort_unstable_by_key(|stats| stats.index);
        let peers = self.inner.peers.borrow().clone();
        let report = |index| {
            let found = known.binary_search_by_key(&index, |stats| stats.index).ok().map(|at| known[at].clone());
            report(index, owner(index), found, &peers)
        };
        shown.map(report).collect()
    }
}

fn report(index: u32, owner: Option<Address>, found: Option<PartitionStats>, peers: &PeerBook) -> PartitionReport {
    let nobody = || Some(Arc::from(""));
    let (owner_node, liveness) = match owner {
        None => (nobody(), OwnerLiveness::Unassigned),
        Some(Address { node: NodeId::LOCAL, .. }) => (None, OwnerLiveness::Unreachable),
        Some(Address { node, .. }) => match peers.peers.get(&node) {
            None => (nobody(), OwnerLiveness::Unknown),
            Some(peer) if !peer.alive => (Some(peer.name.clone()), OwnerLiveness::Dead),
            Some(peer) => (Some(peer.name.clone()), OwnerLiveness::Unreachable),
        },
    };
    PartitionReport { index, owner_node, stats: found.ok_or(liveness) }
}
