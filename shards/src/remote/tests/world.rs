//! Nodes of real shards over simulated disks and rings, on one simulated network.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::api::{Delivery, MetaCommand, MetaReply, NewRecord, Settle, SettleMode, SettleStatus};
use crate::io::sim::SimDisk;
use crate::io::Disk;
use crate::log::LogOptions;
use crate::meta::{Address, Incarnation, NodeId, Peer, PeerBook, ShardId, Snapshot, TopicMeta};
use crate::peer::{LocalBoxFuture, Reply, Request, Take};
use crate::queue::{CommitterOptions, Consumer};
use crate::remote::sim::SimNetwork;
use crate::remote::{ConnectionId, Hello, RemoteCarrier, RemoteService, Service};
use crate::rt::sim::Sim;
use crate::rt::sync::oneshot;
use crate::rt::{self, Queue};
use crate::shard::{RetentionOptions, Shard, ShardOptions};
use crate::spsc::{mesh, Handler, Links};
use crate::wire::{Incoming, Outgoing};

pub const TOPIC: &str = "orders";
pub const LIFE: Incarnation = Incarnation(0xabc);
pub const ONE: Take = Take { max: 1, bytes_max: 4 << 20 };
pub const MS: Duration = Duration::from_millis(1);
pub const SECOND: Duration = Duration::from_secs(1);

/// A node of the world; its number in the metadata is also its tag.
pub struct Node {
    pub number: u64,
    pub shards: Vec<Shard>,
    /// What each shard asks other nodes with.
    pub carriers: Vec<RemoteCarrier>,
    /// Kept: a link that is dropped is closed.
    _links: Vec<Rc<Links>>,
}

impl Node {
    pub fn consumer(&self, shard: usize) -> Consumer {
        Consumer::new(self.shards[shard].queues().clone())
    }
}

pub struct World {
    pub sim: Sim,
    pub network: SimNetwork,
    shards: ShardId,
    disks: RefCell<BTreeMap<u64, SimDisk>>,
    boots: RefCell<BTreeMap<u64, u64>>,
    dead: RefCell<Vec<u64>>,
    /// Owner of each partition.
    owners: RefCell<Vec<u64>>,
    versions: Cell<u64>,
    /// Commits that a shard got over a ring.
    pub ring_calls: Rc<Cell<u64>>,
    /// Shards whose thread hangs: neither siblings nor peers get an answer.
    pub stuck: Rc<RefCell<BTreeSet<(u64, ShardId)>>>,
}

/// What peers meet of a shard.
struct Door {
    service: RemoteService,
    me: (u64, ShardId),
    stuck: Rc<RefCell<BTreeSet<(u64, ShardId)>>>,
}

impl Service for Door {
    fn hello(&self) -> Hello {
        self.service.hello()
    }

    fn met(&self, connection: ConnectionId, from: &Hello, address: SocketAddr) -> Result<(), String> {
        self.service.met(connection, from, address)
    }

    fn serve(&self, connection: ConnectionId, request: Incoming) -> LocalBoxFuture<'static, Option<Outgoing>> {
        match self.stuck.borrow().contains(&self.me) {
            true => Box::pin(std::future::pending()),
            false => self.service.serve(connection, request),
        }
    }

    fn cancelled_late(&self, connection: ConnectionId, request_id: u64) {
        self.service.cancelled_late(connection, request_id);
    }

    fn lost(&self, connection: ConnectionId) {
        self.service.lost(connection);
    }
}

/// What every node keeps free of its disk; without a capacity it is always there.
pub const RESERVE_BYTES: u64 = 1 << 20;

fn address(node: u64, shard: ShardId) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, node as u8], 7000 + shard))
}

/// Runs `test` in a world of `nodes` nodes of `shards` shards, with one topic whose partitions have these owners.
pub fn run<F: Future<Output = ()>>(
    seed: u64,
    nodes: u64,
    shards: ShardId,
    owners: &[u64],
    test: impl FnOnce(Rc<World>, Vec<Node>) -> F + 'static,
) {
    let sim = Sim::new(seed);
    let world = Rc::new(World {
        network: SimNetwork::new(sim.clone(), seed ^ 0x77),
        sim: sim.clone(),
        shards,
        disks: RefCell::default(),
        boots: RefCell::default(),
        dead: RefCell::default(),
        owners: RefCell::new(owners.to_vec()),
        versions: Cell::new(1),
        ring_calls: Rc::default(),
        stuck: Rc::default(),
    });
    sim.run(async move {
        let mut started = Vec::new();
        for number in 1..=nodes {
            started.push(world.start(number).await);
        }
        world.tell_all(&started).await;
        for node in &started {
            world.start_dispatch(node).await;
        }
        test(world.clone(), started).await;
        (1..=nodes).for_each(|number| world.network.crash(number as u32));
    });
}

impl World {
    fn snapshot(&self, node: u64) -> Arc<Snapshot> {
        let version = self.versions.get();
        let mut snapshot = Snapshot { version, shards: self.shards, ..Snapshot::default() };
        let owners = self.owners.borrow();
        let meta = Arc::new(TopicMeta {
            name: Arc::from(TOPIC),
            incarnation: LIFE,
            partitions: owners.len() as u32,
            retention_ms: 0,
            visibility_timeout_ms: 20_000,
            max_in_flight_per_partition: 1000,
            max_acked_ahead_per_partition: 1000,
            created_at_ms: 0,
            owner: None,
        });
        let place = |(owner, partition): (&u64, u32)| match *owner {
            0 => Address { node: NodeId::NONE, shard: 0 },
            // Not where a peer guesses it to be.
            owner if owner == node => Address::local(((partition * 7 + 2) % u32::from(self.shards)) as ShardId),
            owner => Address::remote(NodeId(owner)),
        };
        snapshot.placement.insert(LIFE, owners.iter().zip(0..).map(place).collect());
        snapshot.by_incarnation.insert(LIFE, meta.clone());
        snapshot.topics.insert(meta.name.clone(), meta);
        Arc::new(snapshot)
    }

    fn book(&self, node: u64) -> Arc<PeerBook> {
        let boots = self.boots.borrow();
        let peers = boots.iter().filter(|(other, _)| **other != node).map(|(other, boot_id)| {
            let peer = Peer {
                name: Arc::from(format!("node-{other}")),
                alive: !self.dead.borrow().contains(other),
                boot_id: *boot_id,
                control_addr: address(*other, 999),
                shard_addrs: (0..self.shards).map(|shard| address(*other, shard)).collect(),
            };
            (NodeId(*other), peer)
        });
        Arc::new(PeerBook {
            version: self.versions.get(),
            me: Arc::from(format!("node-{node}")),
            boot_id: boots[&node],
            number: NodeId(node),
            peers: peers.collect(),
        })
    }

    /// Opens a node over what its disk holds.
    pub async fn start(self: &Rc<World>, number: u64) -> Node {
        let disk = self.disks.borrow_mut().entry(number).or_insert_with(|| SimDisk::new(number)).clone();
        self.boots.borrow_mut().insert(number, rt::random_u64());
        let (sender, opened) = oneshot();
        let world = self.clone();
        self.sim.spawn_on(number as u32, async move {
            for directory in ["/data", "/data/ingress", "/data/topics"] {
                disk.create_dir(Path::new(directory)).await.expect("simulated");
            }
            let _ = sender.send(world.open(number, Disk::Sim(disk)).await);
        });
        opened.await.expect("a node that opens")
    }

    async fn open(&self, number: u64, disk: Disk) -> Node {
        let mut ends = mesh(self.shards);
        let control = ends.pop().expect("the control thread's end");
        let answer: Handler = Rc::new(|_, request| {
            let reply = match request {
                Request::Meta(MetaCommand::ConfirmGone { .. }) => Reply::Meta(MetaReply::NotGone),
                _ => Reply::Done,
            };
            Box::pin(std::future::ready(reply))
        });
        let mut links = vec![control.attach(answer)];
        let (mut shards, mut carriers) = (Vec::new(), Vec::new());
        for (id, end) in (0..).zip(ends) {
            let slot: Rc<OnceCell<Shard>> = Rc::default();
            let (own, calls) = (slot.clone(), self.ring_calls.clone());
            let stuck = self.stuck.clone();
            let handler: Handler = Rc::new(move |_, request| {
                if stuck.borrow().contains(&(number, id)) {
                    return Box::pin(std::future::pending());
                }
                calls.set(calls.get() + u64::from(matches!(request, Request::Commit(_))));
                let shard = own.get().cloned();
                Box::pin(async move {
                    match shard {
                        Some(shard) => shard.handle(request).await,
                        None => Reply::Done,
                    }
                })
            });
            let ring = end.attach(handler);
            links.push(ring.clone());
            let carrier = RemoteCarrier::new(ring, self.network.transport(address(number, id)));
            carriers.push(carrier.clone());
            let options = ShardOptions {
                id,
                disk: disk.clone(),
                data_dir: "/data".into(),
                store_id: number,
                memory_bytes: 16 << 20,
                wal_segment_bytes: 1 << 20,
                log: LogOptions { segment_bytes: 1 << 20, ..LogOptions::default() },
                positions: CommitterOptions::default(),
                retention: RetentionOptions {
                    sweep_interval: Duration::from_secs(60),
                    idle_after: None,
                    cold_interval: None,
                    open_logs_max: 100,
                    ..RetentionOptions::default()
                },
                disk_reserve_bytes: RESERVE_BYTES,
                node_disk: Default::default(),
                adopt: Vec::new(),
            };
            let shard = Shard::open(options, self.snapshot(number), Rc::new(carrier)).await.expect("opens");
            assert!(slot.set(shard.clone()).is_ok());
            let boot_id = self.boots.borrow()[&number];
            let hello = move || Hello { cluster_id: 5, node: format!("node-{number}"), boot_id, ..Hello::default() };
            let service = RemoteService::new(shard.clone(), Box::new(hello));
            let door: Rc<dyn Service> = Rc::new(Door { service, me: (number, id), stuck: self.stuck.clone() });
            self.network.listen(number as u32, address(number, id), door);
            shards.push(shard);
        }
        Node { number, shards, carriers, _links: links }
    }

    /// Everybody sees the world as it is now.
    pub async fn tell_all(&self, nodes: &[Node]) {
        for node in nodes {
            self.tell(node).await;
        }
    }

    pub async fn start_dispatch(&self, node: &Node) {
        let shards = node.shards.clone();
        self.on(node, async move { shards.iter().for_each(Shard::start) }).await;
    }

    pub async fn tell(&self, node: &Node) {
        let (snapshot, book) = (self.snapshot(node.number), self.book(node.number));
        for shard in &node.shards {
            let shard = shard.clone();
            let (snapshot, book) = (snapshot.clone(), book.clone());
            self.on(node, async move {
                shard.handle(Request::InstallPeers(book)).await;
                shard.handle(Request::InstallSnapshot(snapshot)).await;
            })
            .await;
        }
    }

    pub fn set_owners(&self, owners: &[u64]) {
        self.versions.set(self.versions.get() + 1);
        *self.owners.borrow_mut() = owners.to_vec();
    }

    pub fn set_dead(&self, dead: &[u64]) {
        self.versions.set(self.versions.get() + 1);
        *self.dead.borrow_mut() = dead.to_vec();
    }

    /// Leaves a node's disk `bytes` in all.
    pub fn set_capacity(&self, node: &Node, bytes: Option<u64>) {
        self.disks.borrow()[&node.number].set_capacity(bytes);
    }

    pub fn kill(&self, node: Node) {
        self.network.crash(node.number as u32);
        self.sim.kill(node.number as u32);
        self.disks.borrow()[&node.number].process_crash();
    }

    /// Runs something as a task of a node.
    pub async fn on<T: 'static>(&self, node: &Node, work: impl Future<Output = T> + 'static) -> T {
        let (sender, done) = oneshot();
        self.sim.spawn_on(node.number as u32, async move {
            let _ = sender.send(work.await);
        });
        done.await.expect("the node lives")
    }

    pub async fn produce(&self, node: &Node, shard: usize, partition: u32, payload: &'static str) {
        let shard = node.shards[shard].clone();
        self.on(node, async move {
            let record = NewRecord { key: b"", payload: payload.as_bytes(), partition: Some(partition) };
            shard.produce(TOPIC, record).await.expect("accepted");
        })
        .await;
    }

    pub async fn consume(&self, node: &Node, shard: usize, pin: Option<u32>, wait: Duration) -> Option<Delivery> {
        let consumer = node.consumer(shard);
        let mut got = self
            .on(node, async move { consumer.consume(TOPIC, pin, ONE, wait).await })
            .await
            .unwrap_or_else(|error| panic!("consume on node {}: {error:?}", node.number));
        assert!(got.len() <= 1);
        got.pop()
    }

    pub async fn settle(&self, node: &Node, shard: usize, delivery: &Delivery, mode: SettleMode) -> SettleStatus {
        let Delivery { partition, offset, nonce, .. } = *delivery;
        let settles = vec![Settle { partition, offset, nonce, mode }];
        let consumer = node.consumer(shard);
        let statuses = self.on(node, async move { consumer.settle(TOPIC, settles).await }).await;
        statuses.expect("the topic is known")[0]
    }
}

/// A task that goes on while the test does something else.
pub fn beside<T: 'static>(work: impl Future<Output = T> + 'static) -> rt::Task<T> {
    rt::spawn(Queue::Foreground, work)
}

pub fn text(delivery: &Delivery) -> &str {
    std::str::from_utf8(delivery.payload()).expect("text")
}
