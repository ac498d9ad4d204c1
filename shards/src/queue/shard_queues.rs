//! All queues of one shard: its topics, the homes of topics that wait here, and the requests of other shards.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use super::committer::Committer;
use super::held::Held;
use super::home::{HomeTopic, Source};
use super::partition::PartitionQueue;
use super::sweep::Sweeper;
use super::topic::TopicQueue;
use super::unload::Unloaded;
use super::{PartitionMetrics, QueueMetrics};
use crate::api::{ConsumeError, Delivery, NotStored, Settle, SettleMode, SettleStatus};
use crate::log::RecordsHandle;
use crate::meta::{Address, Destination, Incarnation, PeerBook, ShardId, Snapshot};
use crate::peer::{Carrier, LocalBoxFuture, Lost, Reply, Request, Take, WaiterId};
use crate::rt;
use crate::rt::sync::Sender;

/// What a parked consume is answered through.
pub(super) type ParkReply = Sender<Result<Held, ConsumeError>>;

/// An open partition log as the shard hands it over.
pub struct Opened {
    /// Of a partition that was never written: empty, and nothing is open behind it.
    pub records: RecordsHandle,
    /// Where the position files live. Need not exist before the first record does; the queue never creates it.
    pub directory: PathBuf,
}

/// What the queues need of their shard.
pub trait QueueEnvironment {
    fn shard(&self) -> ShardId;
    fn carrier(&self) -> Rc<dyn Carrier>;
    /// Opens the log of a partition that the snapshot gives this shard, or returns the open one. Called again when a
    /// handle has answered "closed".
    fn open(&self, destination: Destination) -> LocalBoxFuture<'static, Result<Opened, ConsumeError>>;
    /// The high watermark, if it is known without opening anything.
    fn known_end(&self, destination: Destination) -> Option<u64>;
}

/// A partition's consumer state, for statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConsumerState {
    pub frontier: u64,
    pub leased: u64,
    pub acked_ahead: u64,
}

pub(super) type Home = Rc<RefCell<HomeTopic<ParkReply>>>;

/// The queue side of one shard. Lives as long as the shard; shared by its tasks.
pub struct ShardQueues {
    me: Weak<ShardQueues>,
    pub(super) environment: Rc<dyn QueueEnvironment>,
    pub(super) committer: Rc<Committer>,
    pub(super) sweeper: Sweeper,
    shard: ShardId,
    snapshot: RefCell<Arc<Snapshot>>,
    pub(super) peers: RefCell<Arc<PeerBook>>,
    topics: RefCell<BTreeMap<Incarnation, Rc<TopicQueue>>>,
    pub(super) homes: RefCell<BTreeMap<Incarnation, Home>>,
    pub(super) unloaded: Unloaded,
    waiters_made: Cell<u64>,
    pub(super) stopping: Cell<bool>,
    /// Positions have been made durable for good.
    closed: Cell<bool>,
    pub(super) metrics: RefCell<QueueMetrics>,
}

impl ShardQueues {
    pub fn new(environment: Rc<dyn QueueEnvironment>, committer: Rc<Committer>) -> Rc<ShardQueues> {
        Rc::new_cyclic(|me| ShardQueues {
            me: me.clone(),
            shard: environment.shard(),
            environment,
            committer,
            sweeper: Sweeper::default(),
            snapshot: RefCell::default(),
            peers: RefCell::default(),
            topics: RefCell::default(),
            homes: RefCell::default(),
            unloaded: Unloaded::default(),
            waiters_made: Cell::new(0),
            stopping: Cell::new(false),
            closed: Cell::new(false),
            metrics: RefCell::default(),
        })
    }

    pub(super) fn strong(&self) -> Rc<ShardQueues> {
        self.me.upgrade().expect("called on a live object")
    }

    pub fn shard(&self) -> ShardId {
        self.shard
    }

    pub(super) fn snapshot(&self) -> Arc<Snapshot> {
        self.snapshot.borrow().clone()
    }

    pub(super) fn with_snapshot<T>(&self, look: impl FnOnce(&Snapshot) -> T) -> T {
        look(&self.snapshot.borrow())
    }

    pub(super) fn knows(&self, incarnation: Incarnation) -> bool {
        self.with_snapshot(|snapshot| snapshot.topic_of(incarnation).is_some())
    }

    pub(super) fn next_waiter(&self) -> WaiterId {
        let serial = self.waiters_made.get();
        self.waiters_made.set(serial + 1);
        WaiterId { shard: self.shard, serial }
    }

    /// The topic as this shard serves it; `None` when the snapshot does not have it.
    pub(super) fn topic(&self, incarnation: Incarnation) -> Option<Rc<TopicQueue>> {
        if let Some(topic) = self.topics.borrow().get(&incarnation) {
            return Some(topic.clone());
        }
        let snapshot = self.snapshot.borrow();
        let topic = TopicQueue::new(self.me.clone(), snapshot.topic_of(incarnation)?, &snapshot, self.shard);
        self.topics.borrow_mut().insert(incarnation, topic.clone());
        Some(topic)
    }

    pub(super) fn open_partition(&self, destination: Destination) -> Option<Rc<PartitionQueue>> {
        self.topics.borrow().get(&destination.incarnation)?.open_partition(destination.partition)
    }

    /// Sees the world as this snapshot from now on. Waiters of topics that have gone are answered, their state is
    /// dropped (N36, C37); before the directory of a dropped topic is touched, await
    /// [`topic_removed`](Self::topic_removed).
    pub fn on_snapshot(&self, snapshot: Arc<Snapshot>) {
        if snapshot.version < self.snapshot.borrow().version {
            return;
        }
        *self.snapshot.borrow_mut() = snapshot.clone();
        self.metrics.borrow_mut().delivered_before += self.unloaded.follow(&snapshot, self.shard);
        let topics: Vec<Rc<TopicQueue>> = self.topics.borrow().values().cloned().collect();
        for topic in topics {
            match snapshot.topic_of(topic.incarnation) {
                Some(meta) => {
                    let lost = topic.follow(meta, &snapshot, self.shard);
                    lost.into_iter().for_each(|partition| self.drop_partition(&partition, Err(ConsumeError::NotOwner)));
                }
                None => {
                    let open = topic.retire();
                    open.iter().for_each(|partition| self.drop_partition(partition, Err(ConsumeError::TopicNotFound)));
                    self.topics.borrow_mut().remove(&topic.incarnation);
                }
            }
        }
        self.follow_homes(&snapshot);
    }

    fn drop_partition(&self, partition: &Rc<PartitionQueue>, answer: Result<(), ConsumeError>) {
        partition.retire();
        self.metrics.borrow_mut().delivered_before += partition.delivered();
        self.committer.forget(partition.destination);
        answer_all(partition.drain_pinned(), answer);
    }

    /// Resolves when nothing of a dropped topic can be written any more: its directory may be renamed or removed
    /// (C80, lesson N14.2).
    pub async fn topic_removed(&self, incarnation: Incarnation) {
        self.committer.forgotten(incarnation).await;
    }

    /// To be awaited whenever the shard has opened the log of a partition, before its first append: cuts a stored
    /// position back that reaches beyond the log, since later nothing would tell that records below it are new (G20,
    /// lesson D4). Costs two look-ups of small files.
    pub async fn log_opened(
        &self,
        destination: Destination,
        directory: &Path,
        high_watermark: u64,
    ) -> std::io::Result<()> {
        let open = self.open_partition(destination);
        let topic = self.topics.borrow().get(&destination.incarnation).cloned();
        let (Some(partition), Some(topic)) = (open, topic) else {
            return self.cut_back(destination, directory, high_watermark).await;
        };
        if !partition.reaches_beyond(high_watermark) {
            return Ok(());
        }
        // State of a log that has lost records is worth nothing: start over from the files, cut back.
        let _closing = topic.begin_close(&partition);
        self.drop_partition(&partition, Ok(()));
        self.committer.forgotten(destination.incarnation).await;
        self.cut_back(destination, directory, high_watermark).await
    }

    async fn cut_back(&self, destination: Destination, directory: &Path, end: u64) -> std::io::Result<()> {
        let found = self.committer.clamp(directory, destination.incarnation, end).await?;
        self.unloaded.note_frontier(destination, found.frontier);
        Ok(())
    }

    /// The shard has opened, or opened again, the log of a partition: this is its handle from now on.
    pub fn partition_opened(&self, destination: Destination, records: RecordsHandle) {
        let topic = self.topics.borrow().get(&destination.incarnation).cloned();
        if let Some(topic) = topic {
            topic.log_opened(destination.partition, records);
            self.on_visible(destination);
        }
    }

    /// The partition's high watermark has moved (S96). Costs two look-ups and a flag test when nobody waits, reads
    /// nothing of the log, and may be called from inside its commit.
    pub fn on_visible(&self, destination: Destination) {
        let topic = self.topics.borrow().get(&destination.incarnation).cloned();
        let Some(topic) = topic else { return };
        match topic.open_partition(destination.partition) {
            Some(partition) => partition.announce(),
            None => {
                topic.bump();
                topic.fire();
            }
        }
    }

    /// Answers everybody who waits, then makes all positions exact and durable (D18). Requests must have been
    /// answered before: an ack that comes later is refused.
    pub async fn shutdown(&self) -> Result<(), NotStored> {
        self.release_waiters();
        self.closed.set(true);
        self.committer.close_all().await
    }

    /// Answers everybody who waits, and whoever would wait from now on: a stop does not sit out long polls.
    pub fn release_waiters(&self) {
        self.stopping.set(true);
        let homes: Vec<Home> = self.homes.borrow().values().cloned().collect();
        for home in homes {
            let waiters = home.borrow_mut().close();
            answer_all(waiters, Ok(()));
        }
        for partition in self.all_partitions() {
            answer_all(partition.drain_pinned(), Ok(()));
        }
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.get()
    }

    pub(super) fn all_partitions(&self) -> Vec<Rc<PartitionQueue>> {
        self.topics.borrow().values().flat_map(|topic| topic.open_partitions()).collect()
    }

    pub fn consumer_state(&self, destination: Destination) -> Option<ConsumerState> {
        let open = self.open_partition(destination).map(|partition| partition.consumer_state());
        open.or_else(|| self.unloaded.consumer_state(destination))
    }

    /// The consumer side of the figures of every partition whose log was opened in this process; the others' frontier
    /// is in their files (C102).
    pub async fn partition_metrics(&self) -> BTreeMap<Destination, PartitionMetrics> {
        let mut all = self.unloaded.figures();
        for partition in self.all_partitions() {
            all.insert(partition.destination, partition.metrics().await);
        }
        all
    }

    pub fn metrics(&self) -> QueueMetrics {
        let oldest_unwritten = self.committer.oldest_unwritten();
        QueueMetrics { parked: self.parked(), oldest_unwritten, ..self.metrics.borrow().clone() }
    }

    pub(super) fn parked(&self) -> u64 {
        let home: usize = self.homes.borrow().values().map(|home| home.borrow().parked()).sum();
        let pinned: usize = self.all_partitions().iter().map(|partition| partition.parked()).sum();
        (home + pinned) as u64
    }

    /// Topics and homes held in memory: flat under create and delete (C37).
    pub fn topics_held(&self) -> (usize, usize) {
        (self.topics.borrow().len(), self.homes.borrow().len())
    }

    /// Checks the invariants of every open partition. For tests and simulation.
    pub fn check(&self) {
        self.all_partitions().iter().for_each(|partition| partition.check());
    }

    /// Answers a request of another shard, or of this one. Requests that are not the queue's come back.
    pub async fn handle(self: &Rc<Self>, request: Request) -> Result<Reply, Request> {
        match request {
            Request::Claim { incarnation, partition, take, arm } => {
                let claimed = self.claim(incarnation, partition, take, arm).await;
                Ok(Reply::Deliveries(claimed.map(Held::into_deliveries)))
            }
            Request::NodeClaim { incarnation, take, token } => {
                let claimed = self.claim_for_node(incarnation, take, token).await;
                Ok(Reply::Deliveries(claimed.map(Held::into_deliveries)))
            }
            Request::Park { waiter, incarnation, partition, take, .. } => {
                let served = self.park(waiter, incarnation, partition, take).await;
                Ok(Reply::Deliveries(served.map(Held::into_deliveries)))
            }
            Request::ReadAt { incarnation, partition, offset } => match self.topic(incarnation) {
                Some(topic) => Ok(Reply::ReadAt(topic.read_at(partition, offset).await)),
                None => Ok(Reply::ReadAt(Err(ConsumeError::TopicNotFound))),
            },
            other => self.handle_now(other),
        }
    }

    /// Requests that are answered without waiting: `Unpark`, `Available` and the like, `Settle`.
    pub fn handle_now(&self, request: Request) -> Result<Reply, Request> {
        match request {
            Request::Unpark { waiter, incarnation, partition } => {
                self.unpark(waiter, incarnation, partition);
                Ok(Reply::Done)
            }
            Request::Available { incarnation, shard } => {
                self.available(incarnation, Source::Shard(shard));
                Ok(Reply::Done)
            }
            Request::NodeAvailable { incarnation, node, boot_id } => {
                self.node_available(incarnation, node, boot_id);
                Ok(Reply::Done)
            }
            Request::Pass { incarnation, node } => {
                self.passed(incarnation, node);
                Ok(Reply::Done)
            }
            Request::Register { incarnation, token } => Ok(Reply::Registered(self.register(incarnation, token))),
            Request::Settle { incarnation, settles } => Ok(Reply::Settled(self.settle_here(incarnation, &settles))),
            other => Err(other),
        }
    }

    pub(super) fn address(&self) -> Address {
        Address::local(self.shard)
    }

    /// A call to any shard; to this one it is a function call.
    pub(super) fn call(&self, to: Address, request: Request) -> LocalBoxFuture<'static, Result<Reply, Lost>> {
        if to != self.address() {
            return self.environment.carrier().call(to, request);
        }
        let me = self.strong();
        Box::pin(async move {
            me.handle(request).await.map_err(|_| Lost("the queue does not answer this request".to_owned()))
        })
    }

    pub(super) fn send(&self, to: Address, request: Request) {
        if to != self.address() {
            self.environment.carrier().send(to, request);
            return;
        }
        let handled = self.handle_now(request);
        debug_assert!(handled.is_ok(), "only requests that need no answer are sent one way");
    }

    async fn claim(
        self: &Rc<Self>,
        incarnation: Incarnation,
        partition: Option<u32>,
        take: Take,
        arm: bool,
    ) -> Result<Held, ConsumeError> {
        let topic = self.topic(incarnation).ok_or(ConsumeError::TopicNotFound)?;
        let mut held = Held::new(self.clone());
        let outcome = match partition {
            Some(partition) => {
                let partition = topic.partition(partition).await?;
                topic.claim_from(&partition, take, &mut held).await
            }
            None if arm => topic.claim_or_arm(take, &mut held).await,
            None => topic.claim(take, &mut held).await,
        };
        match outcome {
            Err(error) if held.is_empty() => Err(error),
            _ => Ok(held),
        }
    }

    /// Claims from this shard's own partitions.
    pub(super) async fn claim_here(self: &Rc<Self>, topic: Incarnation, take: Take) -> Result<Held, ConsumeError> {
        self.claim(topic, None, take, false).await
    }

    /// The outcome of a call whose reply carries deliveries: from here on they go back if they are dropped.
    pub(super) async fn deliveries_of(
        self: &Rc<Self>,
        call: LocalBoxFuture<'static, Result<Reply, Lost>>,
    ) -> Result<Held, ConsumeError> {
        match call.await {
            Ok(Reply::Deliveries(Ok(deliveries))) => {
                let mut held = Held::new(self.clone());
                held.extend(deliveries);
                Ok(held)
            }
            Ok(Reply::Deliveries(Err(error))) => Err(error),
            Ok(_) | Err(Lost(_)) => Err(ConsumeError::Unreachable),
        }
    }

    /// Settles leases of partitions that this shard serves. What is not open here has no leases (C26).
    pub(super) fn settle_here(&self, incarnation: Incarnation, settles: &[Settle]) -> Vec<SettleStatus> {
        if self.closed.get() {
            // Positions are written for the last time: an ack taken now would be confirmed and forgotten (D18).
            return vec![SettleStatus::OwnerDown; settles.len()];
        }
        let (topic, now) = (self.topic(incarnation), rt::now());
        let settle = |settle: &Settle| match &topic {
            None => SettleStatus::LeaseGone,
            Some(topic) => match topic.open_partition(settle.partition) {
                Some(partition) => partition.settle(settle, now),
                None if topic.serves(settle.partition) => SettleStatus::LeaseGone,
                None => SettleStatus::NotOwner,
            },
        };
        settles.iter().map(settle).collect()
    }

    /// Gives leases back that reached nobody (C15, C40): at once, each on its own shard, counted against nobody.
    pub fn release(&self, deliveries: Vec<Delivery>) {
        let mut by_owner: BTreeMap<(Address, Incarnation), Vec<Settle>> = BTreeMap::new();
        for delivery in &deliveries {
            let destination = Destination { incarnation: delivery.incarnation, partition: delivery.partition };
            let address = self.with_snapshot(|snapshot| snapshot.address(destination));
            // Without an address the topic has gone, and its leases with it.
            let Some(address) = address else { continue };
            by_owner.entry((address, delivery.incarnation)).or_default().push(Settle {
                partition: delivery.partition,
                offset: delivery.offset,
                nonce: delivery.nonce,
                mode: SettleMode::Release,
            });
        }
        for ((owner, incarnation), settles) in by_owner {
            self.send(owner, Request::Settle { incarnation, settles });
        }
    }

    pub(super) fn record_wait(&self, waited: Duration, hit: bool) {
        let mut metrics = self.metrics.borrow_mut();
        metrics.consumes_empty += u64::from(!hit);
        let waits = if hit { &mut metrics.wait_hit } else { &mut metrics.wait_timeout };
        crate::histogram::record(waits, u64::try_from(waited.as_micros()).unwrap_or(u64::MAX));
    }
}

impl Drop for ShardQueues {
    fn drop(&mut self) {
        // A topic and its open partitions know each other: nobody else would let go of them.
        self.topics.get_mut().values().for_each(|topic| drop(topic.retire()));
    }
}

/// Answers waiters that get nothing.
pub(super) fn answer_all(waiters: impl IntoIterator<Item = ParkReply>, answer: Result<(), ConsumeError>) {
    for reply in waiters {
        match &answer {
            // Dropped unanswered: the handler of the park makes an empty answer of it.
            Ok(()) => drop(reply),
            Err(error) => drop(reply.send(Err(error.clone()))),
        }
    }
}
