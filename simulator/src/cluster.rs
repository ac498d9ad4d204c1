//! Several nodes on one network: who runs, what membership says of them, and who is told. Metadata is shared and always
//! durable: of the whole nodes, consensus included, see [`crate::whole`].

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use narad_shards::api::{MetaCommand, MetaReply};
use narad_shards::meta::{Address, Peer, PeerBook, ShardId, Snapshot};
use narad_shards::peer::{Carrier, Request};
use narad_shards::remote::sim::SimNetwork;
use narad_shards::remote::{Hello, RemoteCarrier, RemoteService};
use narad_shards::rt::sim::Rng;
use narad_shards::rt::{self, Queue};
use narad_shards::shard::Shard;

use crate::broker::Answer;
use crate::control::ControlPlane;
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
    metadata: Rc<RefCell<Metadata>>,
    network: Option<SimNetwork>,
    members: RefCell<BTreeMap<usize, Member>>,
    version: RefCell<u64>,
    rng: RefCell<Rng>,
    me: Weak<Cluster>,
}

fn address(node: usize, shard: ShardId) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, node as u8 + 1], 7000 + shard))
}

impl Cluster {
    pub fn new(nodes: usize, metadata: Rc<RefCell<Metadata>>, network: Option<SimNetwork>, rng: Rng) -> Rc<Cluster> {
        Rc::new_cyclic(|me| Cluster {
            nodes,
            metadata,
            network,
            members: RefCell::default(),
            version: RefCell::new(1),
            rng: RefCell::new(rng),
            me: me.clone(),
        })
    }

    fn snapshot(&self, node: usize, shards: ShardId) -> Arc<Snapshot> {
        self.metadata.borrow().snapshot_of(node, self.nodes, shards)
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

    fn tell_everybody(&self) {
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
    async fn install_snapshots(&self) {
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

impl ControlPlane for Cluster {
    fn network(&self) -> Option<SimNetwork> {
        self.network.clone()
    }

    fn begins(&self, node: usize, links: Rc<Links>) -> Answer<Result<Arc<Snapshot>, String>> {
        let boot_id = self.rng.borrow_mut().next_u64();
        let member = Member { boot_id, shards: links.shards(), alive: true, links: None };
        self.members.borrow_mut().insert(node, member);
        Box::pin(std::future::ready(Ok(self.snapshot(node, links.shards()))))
    }

    /// With one node that of its rings.
    fn carrier(&self, node: usize, shard: ShardId, rings: Rc<dyn Carrier>) -> Rc<dyn Carrier> {
        match &self.network {
            Some(network) => Rc::new(RemoteCarrier::new(rings, network.transport(address(node, shard)))),
            None => rings,
        }
    }

    /// It answers its peers, and they hear of it.
    fn joins(&self, node: usize, links: Rc<Links>, shards: Vec<Shard>) -> Answer<()> {
        if let Some(member) = self.members.borrow_mut().get_mut(&node) {
            member.links = Some(links);
        }
        let (Some(network), Some(me)) = (self.network.clone(), self.me.upgrade()) else {
            return Box::pin(std::future::ready(()));
        };
        Box::pin(async move {
            let boot_id = me.members.borrow()[&node].boot_id;
            for shard in &shards {
                let hello = move || Hello { cluster_id: 1, node: name(node), boot_id, ..Hello::default() };
                let service = RemoteService::new(shard.clone(), Box::new(hello));
                network.listen(tag(node), address(node, shard.id()), Rc::new(service));
                // Metadata may have changed while it was being opened.
                let snapshot = me.snapshot(node, shards.len() as ShardId);
                shard.handle(Request::InstallSnapshot(snapshot)).await;
                shard.handle(Request::InstallPeers(me.book(node))).await;
            }
            me.tell_everybody();
        })
    }

    /// Its peers hear of it when membership has noticed.
    fn ends(&self, node: usize) {
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
        let (cluster, after) = (self.me.clone(), self.rng.borrow_mut().below(VERDICT_MAX_MS));
        rt::spawn(Queue::Foreground, async move {
            rt::sleep(Duration::from_millis(after)).await;
            let Some(cluster) = cluster.upgrade() else { return };
            let same = cluster.members.borrow().get(&node).is_some_and(|member| member.boot_id == boot_id);
            if same {
                cluster.set_alive(node, false);
            }
        });
    }

    /// Now and then there is no leader.
    fn answer(&self, _node: usize, command: MetaCommand) -> Answer<MetaReply> {
        let refuse = self.rng.borrow_mut().chance(1, 10);
        let reply = match command {
            MetaCommand::ConfirmGone { name, incarnation } if !refuse => {
                self.metadata.borrow().confirm_gone(&name, incarnation)
            }
            _ => MetaReply::Unavailable("no leader for the moment".to_owned()),
        };
        Box::pin(std::future::ready(reply))
    }

    /// E23: answered after every shard has installed it; here those of the other nodes, too, so that what may lag behind
    /// an answer is known.
    fn change(&self, _node: usize, command: MetaCommand) -> Answer<MetaReply> {
        let reply = match command {
            MetaCommand::CreateTopic(topic) => self.metadata.borrow_mut().create(&topic, rt::wall_clock_ms()),
            MetaCommand::DeleteTopic { name, incarnation } => self.metadata.borrow_mut().delete(&name, incarnation),
            other => MetaReply::Unavailable(format!("not simulated: {other:?}")),
        };
        let me = self.me.upgrade();
        Box::pin(async move {
            if let Some(me) = me {
                me.install_snapshots().await;
            }
            reply
        })
    }

    fn serves(&self, _node: usize) -> bool {
        true
    }

    fn hand_over(&self, _node: usize) -> Answer<()> {
        Box::pin(std::future::ready(()))
    }

    fn set_alive(&self, node: usize, alive: bool) {
        if let Some(member) = self.members.borrow_mut().get_mut(&node) {
            member.alive = alive;
        }
        self.tell_everybody();
    }
}

fn name(node: usize) -> String {
    format!("node-{node}")
}
