//! The world that the queue tests run in.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::api::{ConsumeError, Delivery, Settle, SettleMode, SettleStatus};
use crate::io::{Disk, Slice};
use crate::log::{LogRecord, ReadError};
use crate::log::{Records, RecordsHandle};
use crate::meta::{Address, Destination, Incarnation, ShardId, Snapshot, TopicMeta};
use crate::peer::{Carrier, LocalBoxFuture, Lost, Reply, Request, Take};
use crate::queue::{Committer, CommitterOptions, Consumer, Opened, QueueEnvironment, ShardQueues};
use crate::rt::sim::{Rng, Sim};
use crate::rt::{self, Queue};

pub const TOPIC: &str = "orders";
pub const LIFE: Incarnation = Incarnation(0xabc);
pub const VISIBILITY: Duration = Duration::from_secs(2);

pub fn take(max: u32) -> Take {
    Take { max, bytes_max: 4 << 20 }
}

pub fn destination(partition: u32) -> Destination {
    Destination { incarnation: LIFE, partition }
}

/// A partition log reduced to what consumers see of it.
pub struct MockLog {
    pub high_watermark: Cell<u64>,
    pub oldest: Cell<u64>,
    pub unreadable: RefCell<BTreeSet<u64>>,
    /// The next reads fail with an I/O error.
    pub failing: Cell<u32>,
    pub record_bytes: Cell<usize>,
    /// Longest time that a read takes.
    pub read_delay: Cell<Duration>,
    rng: RefCell<Rng>,
}

/// One opening of a log; closing it does not touch the log.
pub struct MockHandle {
    log: Rc<MockLog>,
    closed: Rc<Cell<bool>>,
}

impl Records for MockHandle {
    fn high_watermark(&self) -> u64 {
        self.log.high_watermark.get()
    }

    fn oldest(&self) -> u64 {
        self.log.oldest.get()
    }

    fn read(&self, offset: u64) -> LocalBoxFuture<'static, Result<LogRecord, ReadError>> {
        let (log, closed) = (self.log.clone(), self.closed.clone());
        Box::pin(async move {
            if !log.read_delay.get().is_zero() {
                let mut rng = log.rng.borrow_mut().fork();
                rt::sim::jitter(&mut rng, log.read_delay.get()).await;
            }
            if closed.get() {
                return Err(ReadError::Closed);
            }
            if log.failing.get() > 0 {
                log.failing.set(log.failing.get() - 1);
                return Err(ReadError::Io("simulated".to_owned()));
            }
            if offset >= log.high_watermark.get() {
                return Err(ReadError::PastEnd);
            }
            if offset < log.oldest.get() {
                return Err(ReadError::AgedOut { oldest: log.oldest.get() });
            }
            if log.unreadable.borrow().contains(&offset) {
                return Err(ReadError::Unreadable);
            }
            let body = Slice::copy_from(&vec![offset as u8; log.record_bytes.get()]);
            Ok(LogRecord { offset, timestamp_ms: 1_000 + offset, body, key_bytes: 0 })
        })
    }

    fn next_readable(&self, offset: u64) -> u64 {
        let unreadable = self.log.unreadable.borrow();
        (offset..).find(|o| !unreadable.contains(o)).unwrap_or(u64::MAX)
    }
}

struct NeverWritten;

impl Records for NeverWritten {
    fn high_watermark(&self) -> u64 {
        0
    }

    fn oldest(&self) -> u64 {
        0
    }

    fn read(&self, _offset: u64) -> LocalBoxFuture<'static, Result<LogRecord, ReadError>> {
        Box::pin(std::future::ready(Err(ReadError::PastEnd)))
    }

    fn next_readable(&self, offset: u64) -> u64 {
        offset
    }
}

struct Ring {
    shards: RefCell<BTreeMap<ShardId, Rc<ShardQueues>>>,
    rng: RefCell<Rng>,
    delay: Cell<Duration>,
    messages: Cell<u64>,
}

impl Ring {
    fn delay(&self) -> Duration {
        let nanos = self.rng.borrow_mut().below(self.delay.get().as_nanos().max(1) as u64);
        Duration::from_nanos(nanos)
    }

    fn target(&self, to: Address) -> Result<Rc<ShardQueues>, Lost> {
        self.shards.borrow().get(&to.shard).cloned().ok_or_else(|| Lost("no such shard".to_owned()))
    }
}

/// Carries messages with random delays, so they overtake each other. A call runs to its end whatever its caller does.
#[derive(Clone)]
struct DelayedCarrier(Rc<Ring>);

impl Carrier for DelayedCarrier {
    fn call(&self, to: Address, request: Request) -> LocalBoxFuture<'static, Result<Reply, Lost>> {
        let ring = self.0.clone();
        ring.messages.set(ring.messages.get() + 1);
        let task = rt::spawn(Queue::Consume, async move {
            rt::sleep(ring.delay()).await;
            let target = ring.target(to)?;
            let reply = target.handle(request).await.map_err(|_| Lost("not for the queue".to_owned()));
            ring.messages.set(ring.messages.get() + 1);
            rt::sleep(ring.delay()).await;
            reply
        });
        Box::pin(task)
    }

    fn send(&self, to: Address, request: Request) {
        let ring = self.0.clone();
        ring.messages.set(ring.messages.get() + 1);
        rt::spawn(Queue::Consume, async move {
            rt::sleep(ring.delay()).await;
            if let Ok(target) = ring.target(to) {
                let _ = target.handle(request).await;
            }
        });
    }
}

struct Environment {
    shard: ShardId,
    carrier: DelayedCarrier,
    logs: Rc<Logs>,
    disk: Disk,
}

#[derive(Default)]
struct Logs {
    by_destination: RefCell<BTreeMap<Destination, Rc<MockLog>>>,
    handles: RefCell<BTreeMap<Destination, Rc<Cell<bool>>>>,
    seed: Cell<u64>,
    opens: Cell<u64>,
}

impl Logs {
    fn log(&self, destination: Destination) -> Rc<MockLog> {
        let mut logs = self.by_destination.borrow_mut();
        let made = || {
            Rc::new(MockLog {
                high_watermark: Cell::new(0),
                oldest: Cell::new(0),
                unreadable: RefCell::default(),
                failing: Cell::new(0),
                record_bytes: Cell::new(16),
                read_delay: Cell::new(Duration::ZERO),
                rng: RefCell::new(Rng::new(self.seed.get() ^ u64::from(destination.partition))),
            })
        };
        logs.entry(destination).or_insert_with(made).clone()
    }

    /// What the shard gives the queue: nothing is opened for a partition that was never written (S3).
    fn handle_for_queue(&self, destination: Destination) -> RecordsHandle {
        match self.log(destination).high_watermark.get() {
            0 => Rc::new(NeverWritten),
            _ => self.handle(destination),
        }
    }

    /// A handle on the log that is not closed.
    fn handle(&self, destination: Destination) -> RecordsHandle {
        let mut handles = self.handles.borrow_mut();
        let closed = handles.entry(destination).or_default();
        if closed.get() {
            *closed = Rc::default();
        }
        Rc::new(MockHandle { log: self.log(destination), closed: closed.clone() })
    }
}

pub fn directory(destination: Destination) -> PathBuf {
    PathBuf::from(format!("/{}-{}", destination.incarnation, destination.partition))
}

impl QueueEnvironment for Environment {
    fn shard(&self) -> ShardId {
        self.shard
    }

    fn carrier(&self) -> Rc<dyn Carrier> {
        Rc::new(self.carrier.clone())
    }

    fn known_end(&self, _: Destination) -> Option<u64> {
        None
    }

    fn open(&self, destination: Destination) -> LocalBoxFuture<'static, Result<Opened, ConsumeError>> {
        let (logs, disk) = (self.logs.clone(), self.disk.clone());
        Box::pin(async move {
            logs.opens.set(logs.opens.get() + 1);
            let directory = directory(destination);
            disk.create_dir(&directory).await.expect("simulated");
            disk.sync_dir(&PathBuf::from("/")).await.expect("simulated");
            let records = logs.handle_for_queue(destination);
            rt::yield_now().await;
            Ok(Opened { records, directory })
        })
    }
}

/// Shards of one node, their logs and their disk.
#[derive(Clone)]
pub struct World {
    pub disk: Disk,
    pub disk_image: crate::io::sim::SimDisk,
    ring: Rc<Ring>,
    logs: Rc<Logs>,
    snapshot: Rc<RefCell<Snapshot>>,
    shards: ShardId,
}

impl World {
    pub fn new(seed: u64, shards: ShardId) -> World {
        let disk_image = crate::io::sim::SimDisk::new(seed);
        let logs = Logs::default();
        logs.seed.set(seed);
        let world = World {
            disk: Disk::Sim(disk_image.clone()),
            disk_image,
            ring: Rc::new(Ring {
                shards: RefCell::default(),
                rng: RefCell::new(Rng::new(seed ^ 0x51)),
                delay: Cell::new(Duration::from_micros(50)),
                messages: Cell::new(0),
            }),
            logs: Rc::new(logs),
            snapshot: Rc::new(RefCell::new(Snapshot { version: 1, shards, ..Snapshot::default() })),
            shards,
        };
        world.start();
        world
    }

    /// Starts all shards anew over the same logs and disk, as after a restart of the process.
    pub fn start(&self) {
        self.ring.shards.borrow_mut().clear();
        for shard in 0..self.shards {
            let environment = Environment {
                shard,
                carrier: DelayedCarrier(self.ring.clone()),
                logs: self.logs.clone(),
                disk: self.disk.clone(),
            };
            let committer = Committer::new(self.disk.clone(), CommitterOptions::default());
            let queues = ShardQueues::new(Rc::new(environment), committer);
            queues.on_snapshot(Arc::new(self.snapshot.borrow().clone()));
            self.ring.shards.borrow_mut().insert(shard, queues);
        }
    }

    /// One topic of so many partitions, spread over the shards in turn.
    pub fn with_topic(seed: u64, shards: ShardId, partitions: u32) -> World {
        let world = World::new(seed, shards);
        world.create(TOPIC, LIFE, partitions);
        world
    }

    pub fn create(&self, name: &str, incarnation: Incarnation, partitions: u32) {
        let meta = TopicMeta {
            name: Arc::from(name),
            incarnation,
            partitions,
            retention_ms: 0,
            visibility_timeout_ms: VISIBILITY.as_millis() as u64,
            max_in_flight_per_partition: 1024,
            max_acked_ahead_per_partition: 1024,
            created_at_ms: 0,
            owner: None,
        };
        let shards = self.shards;
        self.change(|snapshot| {
            let placement = (0..partitions).map(|p| Address::local((p % u32::from(shards)) as ShardId)).collect();
            snapshot.placement.insert(incarnation, placement);
            insert(snapshot, meta);
        });
        self.install();
    }

    pub fn alter(&self, in_flight_max: u64, acked_ahead_max: u64) {
        self.change(|snapshot| {
            let mut meta = (**snapshot.topic(TOPIC).expect("created")).clone();
            meta.max_in_flight_per_partition = in_flight_max;
            meta.max_acked_ahead_per_partition = acked_ahead_max;
            insert(snapshot, meta);
        });
        self.install();
    }

    /// Takes the topic out of the snapshot; shards learn it from `install` or `install_on`.
    pub fn delete(&self, name: &str) {
        self.change(|snapshot| {
            if let Some(meta) = snapshot.topics.remove(name) {
                snapshot.by_incarnation.remove(&meta.incarnation);
                snapshot.placement.remove(&meta.incarnation);
            }
        });
    }

    fn change(&self, change: impl FnOnce(&mut Snapshot)) {
        let mut snapshot = self.snapshot.borrow_mut();
        change(&mut snapshot);
        snapshot.version += 1;
    }

    pub fn install(&self) {
        (0..self.shards).for_each(|shard| self.install_on(shard));
    }

    pub fn install_on(&self, shard: ShardId) {
        let snapshot = Arc::new(self.snapshot.borrow().clone());
        self.shard(shard).on_snapshot(snapshot);
    }

    pub fn shard(&self, shard: ShardId) -> Rc<ShardQueues> {
        self.ring.shards.borrow()[&shard].clone()
    }

    pub fn shards(&self) -> Vec<Rc<ShardQueues>> {
        self.ring.shards.borrow().values().cloned().collect()
    }

    pub fn consumer(&self, shard: ShardId) -> Consumer {
        Consumer::new(self.shard(shard))
    }

    /// Opens the logs as a starting shard does: the position is cut to what the log has before anything is appended.
    pub async fn open_logs(&self) {
        for partition in 0..self.partitions() {
            let (destination, high_watermark) = (destination(partition), self.log(partition).high_watermark.get());
            let queues = self.owner(partition);
            queues.log_opened(destination, &directory(destination), high_watermark).await.expect("simulated");
        }
    }

    pub fn home(&self) -> ShardId {
        self.snapshot.borrow().home(LIFE)
    }

    pub fn owner(&self, partition: u32) -> Rc<ShardQueues> {
        self.shard((partition % u32::from(self.shards)) as ShardId)
    }

    pub fn log(&self, partition: u32) -> Rc<MockLog> {
        self.logs.log(destination(partition))
    }

    pub fn partitions(&self) -> u32 {
        self.snapshot.borrow().topic(TOPIC).map_or(0, |meta| meta.partitions)
    }

    /// Commits records to a partition.
    pub fn produce(&self, partition: u32, count: u64) {
        let log = self.log(partition);
        let first = log.high_watermark.get() == 0;
        log.high_watermark.set(log.high_watermark.get() + count);
        if first {
            let records = self.logs.handle(destination(partition));
            self.owner(partition).partition_opened(destination(partition), records);
        }
        self.owner(partition).on_visible(destination(partition));
    }

    /// Closes the log of a partition under its readers.
    pub fn close_log(&self, partition: u32) {
        if let Some(closed) = self.logs.handles.borrow().get(&destination(partition)) {
            closed.set(true);
        }
    }

    pub fn opens(&self) -> u64 {
        self.logs.opens.get()
    }

    pub fn set_delay(&self, delay: Duration) {
        self.ring.delay.set(delay);
    }

    /// Messages between shards so far, replies included.
    pub fn messages(&self) -> u64 {
        self.ring.messages.get()
    }

    pub fn parked(&self) -> u64 {
        self.shards().iter().map(|queues| queues.metrics().parked).sum()
    }

    pub fn leased(&self, partition: u32) -> u64 {
        self.owner(partition).consumer_state(destination(partition)).unwrap_or_default().leased
    }

    pub fn frontier(&self, partition: u32) -> u64 {
        self.owner(partition).consumer_state(destination(partition)).unwrap_or_default().frontier
    }

    pub fn check(&self) {
        self.shards().iter().for_each(|queues| queues.check());
    }
}

fn insert(snapshot: &mut Snapshot, meta: TopicMeta) {
    let meta = Arc::new(meta);
    snapshot.topics.insert(meta.name.clone(), meta.clone());
    snapshot.by_incarnation.insert(meta.incarnation, meta);
}

pub fn settle_of(delivery: &Delivery, mode: SettleMode) -> Settle {
    Settle { partition: delivery.partition, offset: delivery.offset, nonce: delivery.nonce, mode }
}

/// Settles deliveries through a shard and expects all of them to hold.
pub async fn settle(consumer: &Consumer, deliveries: &[Delivery], mode: SettleMode) {
    let settles = deliveries.iter().map(|delivery| settle_of(delivery, mode)).collect();
    let statuses = consumer.settle(TOPIC, settles).await.expect("the topic is known");
    assert!(statuses.iter().all(|status| *status == SettleStatus::Done), "{statuses:?}");
}

pub fn places(deliveries: &[Delivery]) -> Vec<(u32, u64)> {
    deliveries.iter().map(|delivery| (delivery.partition, delivery.offset)).collect()
}

/// A consume as a task of its own.
pub fn consume_on(
    world: &World,
    shard: ShardId,
    partition: Option<u32>,
    max: u32,
    wait: Duration,
) -> rt::Task<Result<Vec<Delivery>, ConsumeError>> {
    let consumer = world.consumer(shard);
    rt::spawn(Queue::Consume, async move { consumer.consume(TOPIC, partition, take(max), wait).await })
}

/// Lets everything run that needs no more than a few milliseconds.
pub async fn settle_down() {
    rt::sleep(Duration::from_millis(5)).await;
}

pub fn run<T: 'static>(seed: u64, main: impl std::future::Future<Output = T> + 'static) -> T {
    Sim::new(seed).run(main)
}

/// Who holds what, as clients know it: judges each delivery (D3, D5).
#[derive(Default)]
pub struct Auditor {
    copies: RefCell<HashMap<(u32, u64), Copy>>,
    pub delivered: Cell<u64>,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Copy {
    /// The lease ends on its own no earlier than a visibility timeout after this.
    Leased {
        nonce: u64,
        since: rt::Instant,
    },
    Free,
    Acked,
}

impl Auditor {
    /// A client got a record from a request that it had made at `asked`.
    pub fn deliver(&self, delivery: &Delivery, asked: rt::Instant) {
        let key = (delivery.partition, delivery.offset);
        self.delivered.set(self.delivered.get() + 1);
        let previous = self.copies.borrow_mut().insert(key, Copy::Leased { nonce: delivery.nonce, since: asked });
        match previous {
            Some(Copy::Acked) => panic!("D5: {key:?} was delivered after its ack"),
            Some(Copy::Leased { since, .. }) => {
                assert!(rt::now() - since >= VISIBILITY, "D3: {key:?} is leased twice");
            }
            Some(Copy::Free) | None => {}
        }
    }

    /// A client is about to settle: a nack may take effect at any time from here on.
    pub fn settling(&self, settle: &Settle) {
        if settle.mode == SettleMode::Nack {
            let mut copies = self.copies.borrow_mut();
            let copy = copies.get_mut(&(settle.partition, settle.offset)).expect("only delivered records are settled");
            if matches!(copy, Copy::Leased { nonce, .. } if *nonce == settle.nonce) {
                *copy = Copy::Free;
            }
        }
    }

    /// The answer to a settle that was made at `asked`.
    pub fn settled(&self, settle: &Settle, asked: rt::Instant, status: SettleStatus) {
        let key = (settle.partition, settle.offset);
        let mut copies = self.copies.borrow_mut();
        let copy = copies.get_mut(&key).expect("only delivered records are settled");
        let ours = matches!(copy, Copy::Leased { nonce, .. } if *nonce == settle.nonce);
        match (status, settle.mode) {
            (SettleStatus::Done, SettleMode::Ack) => {
                assert!(ours, "D3: {key:?} was acked under a handle that is not the last one");
                *copy = Copy::Acked;
            }
            (SettleStatus::Done, SettleMode::Extend) if ours => {
                *copy = Copy::Leased { nonce: settle.nonce, since: asked };
            }
            _ => {}
        }
    }

    pub fn acked(&self) -> usize {
        self.copies.borrow().values().filter(|copy| **copy == Copy::Acked).count()
    }

    /// Leases that clients hold: those that cannot have lapsed yet, and those that the clients have not settled.
    pub fn held(&self, partition: u32) -> (u64, u64) {
        let copies = self.copies.borrow();
        let of_partition = copies.iter().filter(|(key, _)| key.0 == partition);
        let leased = of_partition.filter_map(|(_, copy)| match copy {
            Copy::Leased { since, .. } => Some(rt::now() - *since),
            Copy::Free | Copy::Acked => None,
        });
        let ages: Vec<Duration> = leased.collect();
        (ages.iter().filter(|age| **age < VISIBILITY).count() as u64, ages.len() as u64)
    }
}
