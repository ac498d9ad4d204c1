//! One shard: everything of one core. Its mechanisms (WAL, dispatcher, logs, queues) know only what they need; this
//! module introduces them to each other.

mod describe;
mod directories;
pub mod inspect;
#[cfg(test)]
mod lost_tests;
mod open_logs;
#[cfg(test)]
mod open_logs_tests;
mod partitions;
mod produce;
mod reserve;
mod retention;
#[cfg(test)]
mod retention_tests;
mod serve;
mod stop;
pub mod topics;
mod vitals;

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use crate::dispatch::{Dispatcher, Environment, Limits};
use crate::io::{Disk, FillBudget};
use crate::log::{LogOptions, LogShared, TopicDirectories};
use crate::meta::{Address, NodeId, PeerBook, ShardId, Snapshot};
use crate::metrics::{ShardMetrics, ShardVitals};
use crate::peer::{Carrier, Reply, Request};
use crate::queue::{Committer, CommitterOptions, ShardQueues};
use crate::rt::sync::{Lock, Notify};
use crate::rt::RuntimeMetrics;
use crate::rt::{self, Queue};
use crate::wal::{Mode, Wal, WalOptions};

use directories::DirectoryKeeper;
use partitions::Partitions;
use produce::Rejections;
use reserve::DiskReserve;
pub use reserve::NodeDisk;
use retention::Reaper;
pub use retention::RetentionOptions;
use topics::TopicTable;

const STAGING_BYTES_MIN: usize = 48 << 20;
const COMMIT_CREDIT_BYTES_MIN: usize = 256 << 10;
/// Two of the largest commits.
const COMMIT_CREDIT_BYTES_MAX: usize = 16 << 20;

/// How a shard is opened.
#[derive(Clone)]
pub struct ShardOptions {
    pub id: ShardId,
    pub disk: Disk,
    /// Exists, with `ingress` and `topics` in it, both durable.
    pub data_dir: PathBuf,
    /// Random id of the data directory (E2).
    pub store_id: u64,
    /// Bound of everything that this shard holds in memory for records, in bytes.
    pub memory_bytes: usize,
    pub wal_segment_bytes: u64,
    pub log: LogOptions,
    pub positions: CommitterOptions,
    pub retention: RetentionOptions,
    /// Produce is refused while less space is free (E22).
    pub disk_reserve_bytes: u64,
    /// The same one for all shards of a node.
    pub node_disk: NodeDisk,
    /// WAL directories without a shard of their own that this shard drains (E18).
    pub adopt: Vec<u32>,
}

/// A WAL directory and the dispatcher that drains it (E18).
struct Directory {
    number: u32,
    wal: Wal,
    dispatcher: Dispatcher,
}

/// One core's data plane. A cheap handle.
#[derive(Clone)]
pub struct Shard {
    inner: Rc<Inner>,
}

struct Inner {
    me: Weak<Inner>,
    options: ShardOptions,
    carrier: Rc<dyn Carrier>,
    snapshot: RefCell<Arc<Snapshot>>,
    peers: RefCell<Arc<PeerBook>>,
    changed: Notify,
    topics: RefCell<TopicTable>,
    wal: Wal,
    own: OnceCell<Dispatcher>,
    adopted: RefCell<Vec<Rc<Directory>>>,
    partitions: Partitions,
    directories: DirectoryKeeper,
    queues: OnceCell<Rc<ShardQueues>>,
    reserve: DiskReserve,
    reaper: Reaper,
    rejections: RefCell<Rejections>,
    /// Produce is refused: the node is stopping.
    draining: Cell<bool>,
    quiesced: Cell<bool>,
    /// The partitions of this shard were known once.
    knows_own: Cell<bool>,
    window: RefCell<vitals::Window>,
}

/// Why a shard could not be opened: the process must not serve.
#[derive(Debug)]
pub struct ShardOpenError(pub String);

impl std::fmt::Display for ShardOpenError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ShardOpenError {}

impl Shard {
    /// Recovers the shard's WAL and those it adopts, and every partition placed on it that has a directory (S54).
    /// Nothing is dispatched before [`Shard::start`].
    pub async fn open(
        options: ShardOptions,
        snapshot: Arc<Snapshot>,
        carrier: Rc<dyn Carrier>,
    ) -> Result<Shard, ShardOpenError> {
        let fill = FillBudget::of_shard(u64::from(snapshot.shards));
        let wal = open_wal(&options, u32::from(options.id), Mode::Active, &fill).await?;
        let mut adopted = Vec::new();
        for number in &options.adopt {
            adopted.push((*number, open_wal(&options, *number, Mode::Drain, &fill).await?));
        }
        let committer = Committer::new(options.disk.clone(), options.positions);
        let topics = TopicDirectories::new(options.disk.clone(), options.data_dir.join("topics"));
        let inner = Rc::new_cyclic(|me: &Weak<Inner>| Inner {
            me: me.clone(),
            carrier,
            snapshot: RefCell::new(snapshot.clone()),
            peers: RefCell::default(),
            changed: Notify::new(),
            topics: RefCell::default(),
            wal,
            own: OnceCell::new(),
            adopted: RefCell::default(),
            partitions: Partitions::new(
                LogShared::new(options.memory_bytes / 8, fill),
                options.retention.open_logs_max,
            ),
            directories: DirectoryKeeper::new(topics),
            queues: OnceCell::new(),
            reserve: DiskReserve::new(options.disk.clone(), options.disk_reserve_bytes, options.node_disk.clone()),
            reaper: Reaper::default(),
            rejections: RefCell::default(),
            draining: Cell::new(false),
            quiesced: Cell::new(false),
            knows_own: Cell::new(!snapshot.placement.is_empty()),
            window: RefCell::default(),
            options,
        });
        let queues = ShardQueues::new(Rc::new(QueueSide(Rc::downgrade(&inner))), committer);
        let _ = inner.queues.set(queues);
        let shard = Shard { inner };
        shard.install(snapshot);
        shard.inner.reserve.refresh().await;
        shard.inner.latch_together();
        shard.inner.watch_for_removal();
        shard.inner.open_present_partitions(true).await;
        shard.inner.remove_drained_remains().await;
        for (number, wal) in adopted {
            shard.inner.adopt(number, wal);
        }
        Ok(shard)
    }

    /// Starts to dispatch. To be called once every shard of the node answers requests.
    pub fn start(&self) {
        let inner = &self.inner;
        let dispatcher = inner.dispatcher_for(inner.wal.clone());
        assert!(inner.own.set(dispatcher).is_ok(), "a shard is started once");
        inner.sweep_directories();
        inner.start_reaper();
    }

    pub fn id(&self) -> ShardId {
        self.inner.options.id
    }

    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.inner.snapshot.borrow().clone()
    }

    pub fn carrier(&self) -> &Rc<dyn Carrier> {
        &self.inner.carrier
    }

    /// The consumer side: consume, settle and replay.
    pub fn queues(&self) -> &Rc<ShardQueues> {
        self.inner.queues()
    }

    /// Sees the world as `snapshot` from now on; older ones are ignored (E23).
    pub fn install(&self, snapshot: Arc<Snapshot>) {
        self.inner.install(snapshot);
    }

    /// The first failure of this shard's WAL, or of a sibling's (E11).
    pub fn wal_failed(&self) -> Option<String> {
        self.inner.wal.failed()
    }

    /// This shard's own WAL, for those who look at it from outside: tests, the simulator, figures.
    pub fn wal(&self) -> &Wal {
        &self.inner.wal
    }

    /// The other nodes, as this shard was last told.
    pub fn peers(&self) -> Arc<PeerBook> {
        self.inner.peers.borrow().clone()
    }

    /// Takes no more produce: the node is about to stop.
    pub fn drain(&self) {
        self.inner.draining.set(true);
    }

    /// Whether the disk has room for what other nodes have accepted (E22).
    pub(crate) async fn has_room_for_peers(&self) -> bool {
        self.inner.reserve.has_room_for_peers().await
    }

    /// Whether the first half of a graceful stop is over: logs are about to be closed.
    pub(crate) fn is_quiesced(&self) -> bool {
        self.inner.quiesced.get()
    }

    /// Gathers the shard's figures.
    pub async fn metrics(&self) -> ShardMetrics {
        self.inner.metrics().await
    }

    /// A few figures for whoever watches; `runtime` is the event loop's part of them.
    pub fn vitals(&self, runtime: RuntimeMetrics) -> ShardVitals {
        self.inner.vitals(runtime)
    }

    /// Answers a request of another shard, of the control thread, or of this shard.
    pub async fn handle(&self, request: Request) -> Reply {
        self.inner.handle(request).await
    }

    /// Asks a shard of this node, which may be this one. `None`: it has gone.
    pub(crate) async fn ask(&self, shard: ShardId, request: Request) -> Option<Reply> {
        match shard == self.inner.options.id {
            true => Some(self.handle(request).await),
            false => self.inner.carrier.call(Address::local(shard), request).await.ok(),
        }
    }

    /// Commit bytes that this shard takes at a time from each shard of each other node (E41): a sixteenth of its memory
    /// shared among them, and always enough for a commit worth its sync.
    pub(crate) fn commit_credit_bytes(&self) -> u32 {
        let inner = &self.inner;
        let senders: usize = inner.peers.borrow().peers.values().map(|peer| peer.shard_addrs.len()).sum();
        let share = inner.options.memory_bytes / 16 / senders.max(1);
        share.clamp(COMMIT_CREDIT_BYTES_MIN, COMMIT_CREDIT_BYTES_MAX) as u32
    }
}

/// A quarter of the shard's memory, but always enough for the largest batch: 16 payloads of 1 MiB each need a chunk
/// of their own, and some must be left for what is in flight. Where segments are small, so are the largest records.
fn staging_bytes(options: &ShardOptions) -> usize {
    let largest_batch = STAGING_BYTES_MIN.min(24 * options.wal_segment_bytes as usize);
    (options.memory_bytes / 4).max(largest_batch)
}

async fn open_wal(options: &ShardOptions, number: u32, mode: Mode, fill: &FillBudget) -> Result<Wal, ShardOpenError> {
    let dir = options.data_dir.join("ingress").join(number.to_string());
    let mut wal = WalOptions::new(options.disk.clone(), dir, number, options.store_id);
    wal.segment_bytes = options.wal_segment_bytes;
    wal.staging_bytes_max = staging_bytes(options);
    wal.fill = fill.clone();
    wal.mode = mode;
    Wal::open(wal).await.map_err(|error| ShardOpenError(error.to_string()))
}

impl Inner {
    /// What a crash left of WAL directories that were adopted and drained, one shard for the whole node.
    async fn remove_drained_remains(&self) {
        if self.options.id != 0 {
            return;
        }
        let ingress = self.options.data_dir.join("ingress");
        if let Err(error) = Wal::remove_drained_remains(&self.options.disk, &ingress).await {
            tracing::warn!(dir = %ingress.display(), %error,
                "drained WAL directories could not be removed; they hold nothing, and the next start tries again");
        }
    }

    fn strong(&self) -> Rc<Inner> {
        self.me.upgrade().expect("called on a live object")
    }

    fn queues(&self) -> &Rc<ShardQueues> {
        self.queues.get().expect("set before the shard is handed out")
    }

    fn siblings(&self) -> impl Iterator<Item = Address> + use<> {
        let (me, shards) = (self.options.id, self.snapshot.borrow().shards);
        (0..shards).filter(move |shard| *shard != me).map(Address::local)
    }

    fn install(&self, snapshot: Arc<Snapshot>) {
        if snapshot.version < self.snapshot.borrow().version {
            return;
        }
        let previous = self.snapshot.replace(snapshot.clone());
        self.topics.borrow_mut().install(&snapshot, rt::random_u64);
        // The queue first: it drops what it knows of a deleted topic while the topic's log still answers "closed".
        self.queues().on_snapshot(snapshot.clone());
        self.partitions.follow(&snapshot);
        // Topics that come and go leave nothing behind (lesson N27).
        self.rejections.borrow_mut().retain(|incarnation, _| snapshot.topic_of(*incarnation).is_some());
        self.changed.notify_all();
        self.purge_deleted(&previous, &snapshot);
        if !snapshot.placement.is_empty() && !self.knows_own.replace(true) {
            // Closed until somebody touches them they would look empty to whoever counts.
            let inner = self.strong();
            rt::spawn(Queue::Background, async move { inner.open_present_partitions(false).await });
        }
    }

    /// The other nodes, from now on.
    fn install_peers(&self, peers: Arc<PeerBook>) {
        if peers.version < self.peers.borrow().version {
            return;
        }
        self.peers.replace(peers.clone());
        self.carrier.install_peers(peers.clone());
        self.queues().on_peers(peers);
        // The dispatchers ask who lives.
        self.changed.notify_all();
    }

    /// A failed write of one WAL latches every WAL of the node (E11).
    fn latch_together(&self) {
        let me = self.me.clone();
        self.wal.on_latched(Box::new(move |cause| {
            let Some(inner) = me.upgrade() else { return };
            inner.options.node_disk.note_wal_failed();
            tracing::error!(
                shard = inner.options.id,
                cause,
                "ingress WAL failed: every produce of this node is refused until it is restarted. Free or replace the \
                 disk, then restart; everything answered 202 is kept"
            );
            for sibling in inner.siblings() {
                inner.carrier.send(sibling, Request::Latch { cause: cause.to_owned() });
            }
        }));
    }

    fn dispatcher_for(&self, wal: Wal) -> Dispatcher {
        let environment = Rc::new(DispatchSide(self.me.clone()));
        // What a dispatcher holds lies in the WAL's staging memory: half of it, the rest is for accepting (E20).
        let limits = Limits { held_bytes_max: staging_bytes(&self.options) / 2 };
        Dispatcher::start(Rc::new(wal), environment, limits)
    }

    /// Drains a directory that has no shard of its own, then removes it (E18).
    fn adopt(self: &Rc<Self>, number: u32, wal: Wal) {
        let directory = Rc::new(Directory { number, wal: wal.clone(), dispatcher: self.dispatcher_for(wal) });
        self.adopted.borrow_mut().push(directory.clone());
        let inner = self.clone();
        rt::spawn(Queue::Background, async move {
            directory.dispatcher.drained().await;
            directory.dispatcher.stop().await;
            // The checkpoint that says so becomes durable within 250 ms.
            while !directory.wal.fully_dispatched() {
                if inner.quiesced.get() {
                    return;
                }
                rt::sleep(Duration::from_millis(50)).await;
            }
            match directory.wal.remove_drained().await {
                Ok(()) => tracing::info!(directory = directory.number, "adopted WAL directory drained and removed"),
                Err(error) => tracing::warn!(directory = directory.number, %error,
                    "an adopted WAL directory is drained but could not be removed; the next start tries again"),
            }
            inner.adopted.borrow_mut().retain(|other| other.number != directory.number);
        });
    }

    async fn metrics(&self) -> ShardMetrics {
        let mut metrics = ShardMetrics { shard: self.options.id, wal: self.wal.metrics(), ..ShardMetrics::default() };
        if let Some(dispatcher) = self.own.get() {
            metrics.dispatch = dispatcher.metrics();
        }
        for directory in self.adopted.borrow().iter() {
            metrics.wal.backlog_records += directory.wal.backlog_records();
        }
        metrics.queue = self.queues().metrics();
        metrics.partitions = self.queues().partition_metrics().await;
        self.partitions.add_metrics(&mut metrics.partitions);
        self.partitions.add_unsettled(&mut metrics.partitions).await;
        let snapshot = self.snapshot.borrow().clone();
        metrics.rejections = self
            .rejections
            .borrow()
            .iter()
            .filter_map(|(incarnation, counts)| Some((snapshot.topic_of(*incarnation)?.name.to_string(), *counts)))
            .collect();
        metrics.set_aside = self.directories.set_aside();
        metrics.retention = self.reaper.metrics();
        metrics.open_logs = self.partitions.shared().open_logs() as u64;
        metrics
    }
}

/// What the dispatcher sees of its shard.
struct DispatchSide(Weak<Inner>);

impl DispatchSide {
    fn shard(&self) -> Rc<Inner> {
        self.0.upgrade().expect("a dispatcher runs no longer than its shard")
    }
}

impl Environment for DispatchSide {
    fn snapshot(&self) -> Arc<Snapshot> {
        self.shard().snapshot.borrow().clone()
    }

    fn changed(&self) -> Notify {
        self.shard().changed.clone()
    }

    fn carrier(&self) -> Rc<dyn Carrier> {
        self.shard().carrier.clone()
    }

    fn control(&self) -> Address {
        Address::CONTROL
    }

    fn alive(&self, node: NodeId) -> bool {
        self.shard().peers.borrow().is_alive(node)
    }

    fn boot_id(&self, node: NodeId) -> u64 {
        self.shard().peers.borrow().peers.get(&node).map_or(0, |peer| peer.boot_id)
    }

    fn name_of(&self, node: NodeId) -> Option<Arc<str>> {
        self.shard().peers.borrow().peers.get(&node).map(|peer| peer.name.clone())
    }
}

/// What the queues see of their shard.
struct QueueSide(Weak<Inner>);

/// A lock per key, so that one topic's file operations never delay another topic's (S79).
#[derive(Default)]
struct KeyedLocks<K> {
    locks: RefCell<BTreeMap<K, Lock>>,
}

impl<K: Ord + Clone> KeyedLocks<K> {
    fn of(&self, key: &K) -> Lock {
        self.locks.borrow_mut().entry(key.clone()).or_default().clone()
    }

    fn forget(&self, key: &K) {
        self.locks.borrow_mut().remove(key);
    }
}
