//! Several nodes on one network: who runs, what membership says of them, and who is told. Metadata is shared and always
//! durable; consensus is not simulated here.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use narad_shards::meta::{Address, ShardId, Snapshot};
use narad_shards::peer::{Carrier, Request};
use narad_shards::remote::sim::SimNetwork;
use narad_shards::remote::{Hello, Peer, PeerBook, RemoteCarrier, RemoteService};
use narad_shards::rt::sim::Rng;
use narad_shards::rt::{self, Queue};
use narad_shards::shard::Shard;

use crate::metadata::{number_of, Metadata};
use crate::node::Links;
use crate::world::tag;

/// Membership notices a dead node after at most so long.
const VERDICT_MAX_MS: u64 = 6_000;

#[derive(Clone)]
struct Member {
    boot_id: u64,
    shards: ShardId,
    alive: bool,
    /// While the process runs.
    links: Option<Rc<Links>>,
}

pub struct Cluster {
    nodes: usize,
    pub metadata: Rc<RefCell<Metadata>>,
    network: Option<SimNetwork>,
    members: RefCell<BTreeMap<usize, Member>>,
    version: RefCell<u64>,
    pub rng: RefCell<Rng>,
}

fn address(node: usize, shard: ShardId) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, node as u8 + 1], 7000 + shard))
}

impl Cluster {
    pub fn new(nodes: usize, metadata: Rc<RefCell<Metadata>>, network: Option<SimNetwork>, rng: Rng) -> Cluster {
        Cluster {
            nodes,
            metadata,
            network,
            members: RefCell::default(),
            version: RefCell::new(1),
            rng: RefCell::new(rng),
        }
    }

    pub fn network(&self) -> Option<SimNetwork> {
        self.network.clone()
    }

    pub fn snapshot(&self, node: usize, shards: ShardId) -> Arc<Snapshot> {
        self.metadata.borrow().snapshot_of(node, self.nodes, shards)
    }

    /// The carrier of one shard: with one node that of its rings.
    pub fn carrier(&self, node: usize, shard: ShardId, rings: Rc<dyn Carrier>) -> Rc<dyn Carrier> {
        match &self.network {
            Some(network) => Rc::new(RemoteCarrier::new(rings, network.transport(address(node, shard)))),
            None => rings,
        }
    }

    /// A process begins.
    pub fn boots(&self, node: usize, shards: ShardId) {
        let boot_id = self.rng.borrow_mut().next_u64();
        let member = Member { boot_id, shards, alive: true, links: None };
        self.members.borrow_mut().insert(node, member);
    }

    /// A process has opened its shards: it answers its peers, and they hear of it.
    pub async fn joins(self: &Rc<Self>, node: usize, links: &Rc<Links>, shards: &[Shard]) {
        if let Some(member) = self.members.borrow_mut().get_mut(&node) {
            member.links = Some(links.clone());
        }
        let Some(network) = &self.network else { return };
        let boot_id = self.members.borrow()[&node].boot_id;
        for shard in shards {
            let hello = move || Hello { cluster_id: 1, node: name(node), boot_id, ..Hello::default() };
            let service = RemoteService::new(shard.clone(), Box::new(hello));
            network.listen(tag(node), address(node, shard.id()), Rc::new(service));
            // Metadata may have changed while it was being opened.
            let snapshot = self.snapshot(node, shards.len() as ShardId);
            shard.handle(Request::InstallSnapshot(snapshot)).await;
            shard.handle(Request::InstallPeers(self.book(node))).await;
        }
        self.tell_everybody();
    }

    /// A process ends. Its peers hear of it when membership has noticed.
    pub fn leaves(self: &Rc<Self>, node: usize) {
        let Some(network) = &self.network else {
            self.members.borrow_mut().remove(&node);
            return;
        };
        network.crash(tag(node));
        let boot_id = match self.members.borrow_mut().get_mut(&node) {
            Some(member) => {
                member.links = None;
                member.boot_id
            }
            None => return,
        };
        let (cluster, after) = (Rc::downgrade(self), self.rng.borrow_mut().below(VERDICT_MAX_MS));
        rt::spawn(Queue::Foreground, async move {
            rt::sleep(Duration::from_millis(after)).await;
            let Some(cluster) = cluster.upgrade() else { return };
            let same = cluster.members.borrow().get(&node).is_some_and(|member| member.boot_id == boot_id);
            if same {
                cluster.set_alive(node, false);
            }
        });
    }

    pub fn set_alive(self: &Rc<Self>, node: usize, alive: bool) {
        if let Some(member) = self.members.borrow_mut().get_mut(&node) {
            member.alive = alive;
        }
        self.tell_everybody();
    }

    fn book(&self, node: usize) -> Arc<PeerBook> {
        let members = self.members.borrow();
        let peers = members.iter().filter(|(other, _)| **other != node).map(|(other, member)| {
            let peer = Peer {
                name: Arc::from(name(*other)),
                alive: member.alive,
                boot_id: member.boot_id,
                control_addr: address(*other, 900),
                shard_addrs: (0..member.shards).map(|shard| address(*other, shard)).collect(),
            };
            (number_of(*other), peer)
        });
        Arc::new(PeerBook {
            version: *self.version.borrow(),
            me: Arc::from(name(node)),
            boot_id: members.get(&node).map_or(0, |member| member.boot_id),
            number: number_of(node),
            peers: peers.collect(),
        })
    }

    fn running(&self) -> Vec<(usize, Rc<Links>, ShardId)> {
        let members = self.members.borrow();
        members.iter().filter_map(|(node, m)| Some((*node, m.links.clone()?, m.shards))).collect()
    }

    fn tell_everybody(self: &Rc<Self>) {
        *self.version.borrow_mut() += 1;
        for (node, links, shards) in self.running() {
            let book = self.book(node);
            for shard in 0..shards {
                let told = links.clone().call(Address::local(shard), Request::InstallPeers(book.clone()));
                // A node that ends meanwhile reads the book of its next process.
                rt::spawn(Queue::Foreground, async move { drop(told.await) });
            }
        }
    }

    /// Every running shard sees the topics as they are now.
    pub async fn install_snapshots(&self) {
        let mut told = Vec::new();
        for (node, links, shards) in self.running() {
            let snapshot = self.snapshot(node, shards);
            for shard in 0..shards {
                let request = Request::InstallSnapshot(snapshot.clone());
                told.push(rt::spawn(Queue::Foreground, links.clone().call(Address::local(shard), request)));
            }
        }
        for one in told {
            drop(one.await);
        }
    }
}

fn name(node: usize) -> String {
    format!("node-{node}")
}
