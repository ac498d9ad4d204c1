//! The other nodes as an operator watches them: each endpoint of this node tells its part, and the parts of one node
//! belong together.

use std::collections::BTreeMap;
use std::sync::Mutex;

use narad_shards::meta::{Peer, PeerBook};

use crate::peer::LinkFigures;
use crate::telemetry::PeerReport;

/// By endpoint, as each last said.
#[derive(Debug, Default)]
pub struct PeerReports {
    parts: Mutex<BTreeMap<String, Part>>,
}

/// What one endpoint knows.
#[derive(Clone, Debug, Default)]
struct Part {
    links: Vec<LinkFigures>,
    /// Name, whether membership says that it lives, credit in use and granted. Of a shard alone.
    members: Vec<(String, bool, u64, u64)>,
}

impl PeerReports {
    /// What the endpoint of the control thread sees.
    pub fn note_links(&self, endpoint: impl ToString, links: Vec<LinkFigures>) {
        self.put(endpoint, Part { links, members: Vec::new() });
    }

    /// What a shard sees; `credit` tells bytes in use and granted.
    pub fn note_shard(
        &self,
        shard: impl ToString,
        book: &PeerBook,
        links: Vec<LinkFigures>,
        credit: impl Fn(&Peer) -> (u64, u64),
    ) {
        let member = |peer: &Peer| {
            let (used, granted) = credit(peer);
            (peer.name.to_string(), peer.alive, used, granted)
        };
        self.put(shard, Part { links, members: book.peers.values().map(member).collect() });
    }

    fn put(&self, endpoint: impl ToString, part: Part) {
        let mut parts = self.parts.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        parts.insert(endpoint.to_string(), part);
    }

    /// Every member but this node, by name.
    pub fn read(&self) -> Vec<PeerReport> {
        let parts = self.parts.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut reports: BTreeMap<&str, PeerReport> = BTreeMap::new();
        for (node, alive, used, granted) in parts.values().flat_map(|part| &part.members) {
            let first = PeerReport { node: node.clone(), alive: true, ..PeerReport::default() };
            let report = reports.entry(node).or_insert(first);
            // A shard that was told of a death believes it first.
            report.alive &= alive;
            report.credit_used_bytes += used;
            report.credit_bytes += granted;
        }
        for link in parts.values().flat_map(|part| &part.links) {
            let Some(report) = reports.get_mut(link.node.as_str()) else { continue };
            report.connections += 1;
            report.queued_bytes += link.queued_bytes;
            report.rtt_us = report.rtt_us.max(Some(link.rtt_us));
        }
        reports.into_values().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::Arc;

    use narad_shards::meta::NodeId;

    use super::*;

    #[test]
    fn what_the_endpoints_say_of_a_node_adds_up() {
        let address = SocketAddr::from(([127, 0, 0, 1], 1));
        let peer = |name: &str, alive| Peer {
            name: Arc::from(name),
            alive,
            boot_id: 1,
            control_addr: address,
            shard_addrs: Arc::from([address]),
        };
        let book = PeerBook {
            peers: [(NodeId(2), peer("b", true)), (NodeId(3), peer("c", false))].into(),
            ..PeerBook::default()
        };
        let link = |node: &str, rtt_us, queued_bytes| LinkFigures { node: node.to_owned(), rtt_us, queued_bytes };
        let reports = PeerReports::default();
        assert!(reports.read().is_empty());
        reports.note_links("control", vec![link("b", 300, 1), link("stranger", 1, 1)]);
        for shard in 0..2 {
            reports.note_shard(shard, &book, vec![link("b", 200 + shard * 200, 10)], |peer| match &*peer.name {
                "b" => (5, 100),
                _ => (0, 0),
            });
        }
        let b = PeerReport {
            node: "b".to_owned(),
            alive: true,
            connections: 3,
            rtt_us: Some(400),
            queued_bytes: 21,
            credit_used_bytes: 10,
            credit_bytes: 200,
        };
        assert_eq!(reports.read(), [b, PeerReport { node: "c".to_owned(), ..PeerReport::default() }]);
    }
}
