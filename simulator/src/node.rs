//! The broker under test: one to four real shards, carried messages between them, and a simulated control thread.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use narad_shards::api::{
    ConsumeError, Delivery, MetaCommand, MetaReply, NewRecord, NewTopic, PartitionStats, ProduceError, ReadAt, Settle,
    SettleStatus,
};
use narad_shards::io::sim::SimDisk;
use narad_shards::io::Disk;
use narad_shards::log::{Codec, LogOptions};
use narad_shards::meta::{Address, Incarnation, ShardId};
use narad_shards::peer::{Carrier, LocalBoxFuture, Lost, Reply, Request, Take};
use narad_shards::queue::{CommitterOptions, Consumer};
use narad_shards::remote::sim::SimNetwork;
use narad_shards::rt::sim::{Rng, Sim};
use narad_shards::rt::sync::{oneshot, Notify, Sender};
use narad_shards::rt::{self, Queue};
use narad_shards::shard::{NodeDisk, RetentionOptions, Shard, ShardOptions};

use crate::broker::{Answer, Broker, End, Launcher, Observer, Probe};
use crate::cluster::Cluster;
use crate::control::ControlPlane;
use crate::ledger::Violation;
use crate::message::Content;
use crate::metadata::Metadata;
use crate::options::WorldOptions;
use crate::whole::Whole;

const DATA: &str = "/data";

/// What nodes keep between their processes, apart from the disks: metadata and the network.
pub struct ShardLauncher {
    control: Rc<dyn ControlPlane>,
    whole: Option<Rc<Whole>>,
    rng: RefCell<Rng>,
    store_id: u64,
    tuning: Tuning,
}

/// Small sizes, so that a short world rolls segments, compacts and runs out of room.
#[derive(Clone, Copy)]
struct Tuning {
    wal_segment_bytes: u64,
    log_segment_bytes: u64,
    memory_bytes: usize,
    codec: Codec,
    reserve_bytes: u64,
    retention: RetentionOptions,
}

impl ShardLauncher {
    pub fn new(seed: u64, options: &WorldOptions, sim: &Sim) -> ShardLauncher {
        let mut rng = Rng::new(seed);
        let wal_segment_bytes = [160 << 10, 256 << 10, 1 << 20][rng.below(3) as usize];
        let tuning = Tuning {
            wal_segment_bytes,
            // A commit must fit a segment. It is at most one destination's queue: an eighth of staging memory, which
            // goes by the size of WAL segments.
            log_segment_bytes: [640 << 10, 1 << 20, 2 << 20][rng.below(3) as usize].max(4 * wal_segment_bytes),
            memory_bytes: 16 << 20,
            codec: if rng.chance(1, 4) { Codec::Zstd(1) } else { Codec::None },
            reserve_bytes: [0, 64 << 10, 512 << 10][rng.below(3) as usize],
            retention: draw_retention(&mut rng),
        };
        let (seed, store_id, nodes) = (rng.next_u64(), rng.next_u64(), options.nodes);
        let network = (nodes > 1).then(|| SimNetwork::new(sim.clone(), rng.next_u64()));
        let (whole, control): (_, Rc<dyn ControlPlane>) = match network {
            Some(network) if options.whole => {
                let whole = Whole::new(options, sim, network, rng.fork());
                (Some(whole.clone()), whole)
            }
            network => {
                let metadata = Rc::new(RefCell::new(Metadata::new(seed)));
                (None, Cluster::new(nodes, metadata, network, rng.fork()))
            }
        };
        ShardLauncher { control, whole, rng: RefCell::new(rng), store_id, tuning }
    }
}

/// Sweeps so often, and logs idle so soon, that a short world sees all of it.
fn draw_retention(rng: &mut Rng) -> RetentionOptions {
    let draw = |rng: &mut Rng, ms: [u64; 3]| Duration::from_millis(ms[rng.below(3) as usize]);
    RetentionOptions {
        sweep_interval: draw(rng, [20, 150, 1_000]),
        idle_after: rng.chance(2, 3).then(|| draw(rng, [30, 200, 2_000])),
        cold_interval: rng.chance(2, 3).then(|| draw(rng, [100, 1_000, 5_000])),
        open_logs_max: [2, 8, 100][rng.below(3) as usize],
        ..RetentionOptions::default()
    }
}

impl Launcher for ShardLauncher {
    fn launch(&self, node: usize, disk: SimDisk, shards: ShardId) -> Answer<Result<Rc<dyn Broker>, String>> {
        let (control, store_id, tuning) = (self.control.clone(), self.store_id, self.tuning);
        let links = Links::new(node, shards, control.clone(), self.rng.borrow_mut().fork());
        Box::pin(async move {
            let numbers = prepare(&disk).await.map_err(|error| format!("data directory: {error}"))?;
            let snapshot = control.begins(node, links.clone()).await?;
            let mut opening = Vec::new();
            let node_disk = NodeDisk::default();
            for id in 0..shards {
                let adopt = numbers.iter().copied().filter(|n| *n >= u32::from(shards));
                let options = ShardOptions {
                    id,
                    disk: Disk::Sim(disk.clone()),
                    data_dir: PathBuf::from(DATA),
                    store_id,
                    memory_bytes: tuning.memory_bytes,
                    wal_segment_bytes: tuning.wal_segment_bytes,
                    log: LogOptions {
                        segment_bytes: tuning.log_segment_bytes,
                        codec: tuning.codec,
                        ..LogOptions::default()
                    },
                    positions: CommitterOptions::default(),
                    retention: tuning.retention,
                    disk_reserve_bytes: tuning.reserve_bytes,
                    node_disk: node_disk.clone(),
                    adopt: adopt.filter(|n| n % u32::from(shards) == u32::from(id)).collect(),
                };
                let snapshot = snapshot.clone();
                let carrier = control.carrier(node, id, links.carrier(id));
                let links = links.clone();
                opening.push(rt::spawn(Queue::Foreground, async move {
                    let shard = Shard::open(options, snapshot, carrier).await.map_err(|error| error.to_string())?;
                    links.serve(shard.clone());
                    Ok::<Shard, String>(shard)
                }));
            }
            let mut opened = Vec::new();
            for shard in opening {
                opened.push(shard.await?);
            }
            control.joins(node, links.clone(), opened.clone()).await;
            opened.iter().for_each(Shard::start);
            let consumers = opened.iter().map(|shard| Consumer::new(shard.queues().clone())).collect();
            let inner = Inner {
                requests: Cell::new(0),
                serving: Cell::new(true),
                finished: Notify::new(),
                disk,
                shards: opened,
                consumers,
                links,
                control,
                node,
            };
            let broker: Rc<dyn Broker> = Rc::new(Node { inner: Rc::new(inner) });
            Ok(broker)
        })
    }

    fn ending(&self, node: usize) {
        self.control.ends(node);
    }

    fn ended(&self, node: usize, end: End) {
        self.control.ended(node, end);
    }

    fn network(&self) -> Option<SimNetwork> {
        self.control.network()
    }

    fn set_alive(&self, node: usize, alive: bool) {
        self.control.set_alive(node, alive);
    }

    fn observe(&self, observer: Rc<dyn Observer>) {
        self.control.observe(observer);
    }

    fn broken(&self) -> Vec<Violation> {
        self.control.broken()
    }

    fn whole(&self) -> Option<Rc<Whole>> {
        self.whole.clone()
    }
}

/// Makes the directories and returns the numbers of the WALs there are.
async fn prepare(disk: &SimDisk) -> std::io::Result<Vec<u32>> {
    // E12: the lock of the data directory is free only once the last call of the killed process has landed.
    while disk.in_flight() > 0 {
        rt::sleep(Duration::from_micros(500)).await;
        disk.files();
    }
    let data = Path::new(DATA);
    disk.create_dir(data).await?;
    disk.sync_dir(Path::new("/")).await?;
    for name in ["ingress", "topics"] {
        disk.create_dir(&data.join(name)).await?;
    }
    disk.sync_dir(data).await?;
    let ingress = data.join("ingress");
    let entries = disk.list(&ingress).await?;
    Ok(entries.into_iter().filter_map(|entry| entry.name.to_str()?.parse().ok()).collect())
}

/// The rings between the shards and the control thread: in order per pair, with a small delay.
pub struct Links {
    node: usize,
    control: Rc<dyn ControlPlane>,
    inboxes: Vec<Rc<Inbox>>,
    rng: RefCell<Rng>,
}

#[derive(Default)]
struct Inbox {
    messages: RefCell<VecDeque<(Request, Option<Sender<Reply>>)>>,
    arrived: Notify,
}

impl Links {
    fn new(node: usize, shards: ShardId, control: Rc<dyn ControlPlane>, rng: Rng) -> Rc<Links> {
        let inboxes = (0..shards).map(|_| Rc::default()).collect();
        Rc::new(Links { node, control, inboxes, rng: RefCell::new(rng) })
    }

    pub fn shards(&self) -> ShardId {
        self.inboxes.len() as ShardId
    }

    /// As seen from one shard, or from the control thread.
    pub fn carrier(self: &Rc<Self>, from: ShardId) -> Rc<dyn Carrier> {
        Rc::new(SimCarrier { links: self.clone(), from })
    }

    /// Starts to answer what was and will be sent to a shard.
    fn serve(self: &Rc<Self>, shard: Shard) {
        let (inbox, links) = (self.inboxes[usize::from(shard.id())].clone(), self.clone());
        rt::spawn(Queue::Foreground, async move {
            loop {
                let arrived = inbox.arrived.notified();
                let next = inbox.messages.borrow_mut().pop_front();
                let Some((request, reply)) = next else {
                    arrived.await;
                    continue;
                };
                links.delay().await;
                let shard = shard.clone();
                // Requests begin in the order of the ring; what has to wait goes on beside the others.
                let mut work: LocalBoxFuture<'static, ()> = Box::pin(async move {
                    let answer = shard.handle(request).await;
                    if let Some(reply) = reply {
                        // The caller may have gone: a late reply is discarded.
                        let _ = reply.send(answer);
                    }
                });
                let begun = std::future::poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await;
                if begun.is_pending() {
                    rt::spawn(Queue::Foreground, work);
                }
            }
        });
    }

    async fn delay(&self) {
        let nanos = self.rng.borrow_mut().below(20_000);
        rt::sleep(Duration::from_nanos(nanos)).await;
    }

    fn push(&self, to: Address, request: Request, reply: Option<Sender<Reply>>) {
        if to == Address::CONTROL {
            self.control(request, reply);
        } else if let Some(inbox) = self.inboxes.get(usize::from(to.shard)) {
            inbox.messages.borrow_mut().push_back((request, reply));
            inbox.arrived.notify_one();
        }
    }

    fn control(&self, request: Request, reply: Option<Sender<Reply>>) {
        let (control, node, wait) = (self.control.clone(), self.node, self.rng.borrow_mut().below(2_000_000));
        rt::spawn(Queue::Foreground, async move {
            rt::sleep(Duration::from_nanos(wait)).await;
            let answer = match request {
                Request::Meta(command) => Reply::Meta(control.answer(node, command).await),
                _ => Reply::Done,
            };
            if let Some(reply) = reply {
                // The caller may have gone.
                let _ = reply.send(answer);
            }
        });
    }

    pub async fn call(self: Rc<Self>, to: Address, request: Request) -> Result<Reply, Lost> {
        let (sender, receiver) = oneshot();
        self.push(to, request, Some(sender));
        receiver.await.ok_or_else(|| Lost(format!("shard {} has gone", to.shard)))
    }
}

struct SimCarrier {
    links: Rc<Links>,
    from: ShardId,
}

impl Carrier for SimCarrier {
    fn call(&self, to: Address, request: Request) -> LocalBoxFuture<'static, Result<Reply, Lost>> {
        // Sent at once, whether or not the future is ever polled.
        let (sender, receiver) = oneshot();
        self.links.push(to, request, Some(sender));
        let from = self.from;
        Box::pin(async move { receiver.await.ok_or_else(|| Lost(format!("{to:?} does not answer shard {from}"))) })
    }

    fn send(&self, to: Address, request: Request) {
        self.links.push(to, request, None);
    }
}

struct Inner {
    /// Client requests under way, and whether new ones are taken: HTTP stops serving before the shards stop.
    requests: Cell<usize>,
    serving: Cell<bool>,
    finished: Notify,
    disk: SimDisk,
    shards: Vec<Shard>,
    consumers: Vec<Consumer>,
    links: Rc<Links>,
    control: Rc<dyn ControlPlane>,
    node: usize,
}

struct Node {
    inner: Rc<Inner>,
}

/// One client request under way.
struct Underway(Rc<Inner>);

impl Drop for Underway {
    fn drop(&mut self) {
        self.0.requests.set(self.0.requests.get() - 1);
        self.0.finished.notify_all();
    }
}

impl Inner {
    /// `None` once the node has stopped serving, and before it begins to (E51).
    fn begin(self: &Rc<Self>) -> Option<Underway> {
        (self.serving.get() && self.control.serves(self.node)).then(|| {
            self.requests.set(self.requests.get() + 1);
            Underway(self.clone())
        })
    }

    fn shard(&self, shard: ShardId) -> Shard {
        self.shards[usize::from(shard) % self.shards.len()].clone()
    }

    fn consumer(&self, shard: ShardId) -> Consumer {
        self.consumers[usize::from(shard) % self.consumers.len()].clone()
    }

    /// Sends one request to every shard and waits for all answers.
    async fn all(&self, request: impl Fn() -> Request) -> Vec<Reply> {
        let calls: Vec<_> = (0..self.shards.len() as ShardId)
            .map(|shard| rt::spawn(Queue::Foreground, self.links.clone().call(Address::local(shard), request())))
            .collect();
        let mut replies = Vec::new();
        for call in calls {
            replies.extend(call.await);
        }
        replies
    }
}

impl Broker for Node {
    fn produce(
        &self,
        shard: ShardId,
        topic: String,
        records: Vec<Content>,
        batch: bool,
    ) -> Answer<Result<(), ProduceError>> {
        let (shard, underway) = (self.inner.shard(shard), self.inner.begin());
        Box::pin(async move {
            let _underway = underway.ok_or(ProduceError::Draining)?;
            let payloads: Vec<Vec<u8>> = records.iter().map(Content::payload).collect();
            let records: Vec<NewRecord<'_>> = records
                .iter()
                .zip(&payloads)
                .map(|(content, payload)| NewRecord { key: &content.key, payload, partition: content.partition })
                .collect();
            match records.first() {
                Some(only) if !batch => shard.produce(&topic, *only).await,
                _ => shard.produce_batch(&topic, &records).await,
            }
        })
    }

    fn consume(
        &self,
        shard: ShardId,
        topic: String,
        partition: Option<u32>,
        take: Take,
        wait: Duration,
    ) -> Answer<Result<Vec<Delivery>, ConsumeError>> {
        let (consumer, underway) = (self.inner.consumer(shard), self.inner.begin());
        Box::pin(async move {
            let _underway = underway.ok_or(ConsumeError::Unreachable)?;
            consumer.consume(&topic, partition, take, wait).await
        })
    }

    fn settle(&self, shard: ShardId, topic: String, settles: Vec<Settle>) -> Answer<Vec<SettleStatus>> {
        let alone = self.inner.control.network().is_none();
        let (consumer, underway) = (self.inner.consumer(shard), self.inner.begin());
        Box::pin(async move {
            let Some(_underway) = underway else { return vec![SettleStatus::OwnerDown; settles.len()] };
            // Among several nodes this one may not have heard of the topic yet.
            let unknown = if alone { SettleStatus::LeaseGone } else { SettleStatus::NotOwner };
            let gone = vec![unknown; settles.len()];
            consumer.settle(&topic, settles).await.unwrap_or(gone)
        })
    }

    fn read_at(
        &self,
        shard: ShardId,
        topic: String,
        partition: u32,
        offset: u64,
    ) -> Answer<Result<ReadAt, ConsumeError>> {
        let (consumer, underway) = (self.inner.consumer(shard), self.inner.begin());
        Box::pin(async move {
            let _underway = underway.ok_or(ConsumeError::Unreachable)?;
            consumer.read_at(&topic, partition, offset).await
        })
    }

    fn create_topic(&self, topic: NewTopic) -> Answer<MetaReply> {
        self.inner.control.change(self.inner.node, MetaCommand::CreateTopic(topic))
    }

    fn delete_topic(&self, name: String, incarnation: Incarnation) -> Answer<MetaReply> {
        self.inner.control.change(self.inner.node, MetaCommand::DeleteTopic { name, incarnation })
    }

    fn stats(&self, topic: String) -> Answer<Option<(Incarnation, Vec<PartitionStats>)>> {
        let (inner, underway) = (self.inner.clone(), self.inner.begin());
        Box::pin(async move {
            let _underway = underway?;
            let incarnation = inner.shard(0).snapshot().topic(&topic)?.incarnation;
            let mut all = Vec::new();
            let mut replies = inner.all(|| Request::Stats { incarnation }).await;
            let carrier = inner.shard(0).carrier().clone();
            for owner in inner.shard(0).snapshot().remote_owners(incarnation) {
                // One that does not answer leaves its partitions out.
                replies.extend(carrier.call(Address::remote(owner), Request::Stats { incarnation }).await);
            }
            for reply in replies {
                if let Reply::Stats(stats) = reply {
                    // A partition whose log is closed says nothing.
                    all.extend(stats.into_iter().filter(|partition| partition.segments > 0));
                }
            }
            all.sort_by_key(|partition| partition.index);
            Some((incarnation, all))
        })
    }

    fn probe(&self) -> Answer<Probe> {
        let inner = self.inner.clone();
        Box::pin(async move { crate::inspect::probe(&inner.disk, &inner.shards) })
    }

    fn shutdown(&self) -> Answer<()> {
        let inner = self.inner.clone();
        Box::pin(async move {
            inner.shards.iter().for_each(Shard::drain);
            // While clients are still served.
            inner.control.hand_over(inner.node).await;
            inner.serving.set(false);
            loop {
                let finished = inner.finished.notified();
                if inner.requests.get() == 0 {
                    break;
                }
                finished.await;
            }
            inner.all(|| Request::Quiesce).await;
            inner.all(|| Request::Shutdown).await;
        })
    }
}
