//! One shard's thread: its ring, its disk, its shard, its listener.

use std::cell::{OnceCell, RefCell};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

use narad_shards::io::Disk;
use narad_shards::log::{Codec, LogOptions};
use narad_shards::meta::{Address, Peer, ShardId, Snapshot};
use narad_shards::peer::{Carrier, Reply, Request};
use narad_shards::queue::CommitterOptions;
use narad_shards::remote::{Hello, RemoteCarrier, RemoteService};
use narad_shards::rt::ring::{run_shard_thread, Options, RingHandle};
use narad_shards::rt::{self, sync::Notify, Queue};
use narad_shards::shard::{RetentionOptions, Shard, ShardOptions};
use narad_shards::spsc::{Endpoint, Handler};

use super::broker::ShardBroker;
use super::certificates;
use super::door::Door;
use super::founding::peer_settings;
use super::notify;
use super::run::Common;
use super::serving::Serving;
use crate::config::{self, CompressionLevel};
use crate::control::Command;
use crate::http::{HttpContext, HttpSettings, Surface};
use crate::peer::PeerEndpoint;

const WAL_SEGMENT_BYTES: u64 = 64 << 20;
/// Least of what is kept free: the disk still has room for everything else when produce is refused (E22).
const DISK_RESERVE_BYTES_MIN: u64 = 256 << 20;
/// As many as a busy shard has in flight; memlock may allow fewer (E26). They stay resident, idle or not.
const STAGING_CHUNKS_REGISTERED: usize = 4;
/// Of registered buffers more than these are of no use to a shard: that many chunks of 2 MiB.
pub const REGISTERED_BYTES_USEFUL: u64 = STAGING_CHUNKS_REGISTERED as u64 * (2 << 20);
/// Lets the last reply leave before the ring is torn down.
const LAST_REPLY: Duration = Duration::from_millis(20);

pub struct ShardPlan {
    pub id: ShardId,
    pub store_id: u64,
    pub memory_bytes: usize,
    pub adopt: Vec<u32>,
    pub snapshot: Arc<Snapshot>,
    /// The data directory's lock, for the ring to hold (E12).
    pub lock: OwnedFd,
}

/// What requests reach before the shard is open: they wait.
#[derive(Default)]
struct Slot {
    shard: OnceCell<Shard>,
    opened: Notify,
    serving: RefCell<Option<Rc<Serving<ShardBroker>>>>,
    /// Of a shard in a cluster: where other nodes come in, its endpoint, and what it asks them with.
    door: OnceCell<Rc<Door>>,
    peers: OnceCell<(Rc<PeerEndpoint>, RemoteCarrier)>,
    /// The shutdown was answered.
    finished: Notify,
}

impl Slot {
    async fn shard(&self) -> Shard {
        loop {
            let opened = self.opened.notified();
            if let Some(shard) = self.shard.get() {
                return shard.clone();
            }
            opened.await;
        }
    }

    async fn answer(&self, common: &Common, handle: &RingHandle, request: Request) -> Reply {
        let shard = self.shard().await;
        match request {
            Request::BeginDrain { within } => {
                shard.queues().release_waiters();
                let serving = self.serving.borrow().clone();
                if let Some(serving) = serving {
                    serving.drain(within).await;
                }
                Reply::Done
            }
            Request::StopServing { within } => {
                let serving = self.serving.borrow_mut().take();
                if let Some(serving) = serving {
                    serving.stop(within).await;
                }
                Reply::Done
            }
            Request::Metrics => {
                let mut metrics = shard.metrics().await;
                metrics.runtime = handle.metrics();
                metrics.enter_us = Some(handle.submit_micros());
                if let Some((endpoint, carrier)) = self.peers.get() {
                    metrics.calls = carrier.metrics();
                    common.state.figures.note_peers(metrics.shard, endpoint.metrics());
                }
                Reply::Metrics(Box::new(metrics))
            }
            Request::Vitals => {
                if let Some((endpoint, carrier)) = self.peers.get() {
                    let credit = |peer: &Peer| carrier.credit_of(peer);
                    common.state.figures.peer_reports.note_shard(shard.id(), &shard.peers(), endpoint.links(), credit);
                }
                Reply::Vitals(Box::new(shard.vitals(handle.metrics())))
            }
            Request::Quiesce => {
                let reply = shard.handle(Request::Quiesce).await;
                if let (Some(door), Some((endpoint, _))) = (self.door.get(), self.peers.get()) {
                    // Before any shard writes its last positions: an ack of another node's client that came after
                    // them would be answered and lost.
                    shard.queues().release_waiters();
                    door.close().await;
                    endpoint.stop().await;
                }
                reply
            }
            Request::Shutdown => {
                let reply = shard.handle(Request::Shutdown).await;
                self.finished.notify_one();
                reply
            }
            other => shard.handle(other).await,
        }
    }
}

/// Runs until the shard has been shut down. `Err` takes the node down.
pub fn run(common: Arc<Common>, plan: ShardPlan, endpoint: Endpoint, options: Options) -> Result<(), String> {
    run_shard_thread(options, move |handle| main(common, plan, endpoint, handle)).map_err(|error| error.to_string())?
}

async fn main(common: Arc<Common>, plan: ShardPlan, endpoint: Endpoint, handle: RingHandle) -> Result<(), String> {
    let id = plan.id;
    handle.hold_lock(plan.lock.as_fd()).map_err(|error| format!("cannot hold the data directory's lock: {error}"))?;
    let disk = handle.disk(&common.data_root, common.direct).map_err(|error| error.to_string())?;
    let slot: Rc<Slot> = Rc::default();
    let handler: Handler = {
        let (common, slot, handle) = (common.clone(), slot.clone(), handle.clone());
        Rc::new(move |_from, request| {
            let (common, slot, handle) = (common.clone(), slot.clone(), handle.clone());
            Box::pin(async move { slot.answer(&common, &handle, request).await })
        })
    };
    let links: Rc<dyn Carrier> = endpoint.attach(handler);
    let door = Rc::new(Door::new(common.started));
    let _ = slot.door.set(door.clone());
    let carrier = start_peers(&common, &plan, &handle, &slot, &links)?;

    let options = shard_options(&common, &plan, disk);
    let shard = Shard::open(options, plan.snapshot, carrier).await.map_err(|error| error.to_string())?;
    let registered = shard.wal().with_staging_pool(|pool| handle.register_chunks(pool, STAGING_CHUNKS_REGISTERED));
    tracing::info!(
        shard = id,
        staging_chunks = registered,
        bytes = handle.registered_bytes(),
        "buffers registered with the ring"
    );
    let _ = slot.shard.set(shard.clone());
    if common.peer_plane.is_some() {
        let (common, shard) = (common.clone(), shard.clone());
        door.open(RemoteService::new(shard, Box::new(move || hello(&common))));
    }
    slot.opened.notify_all();
    common.state.opened.fetch_add(1, Ordering::Relaxed);
    links.call(Address::CONTROL, Request::Opened).await.map_err(|lost| format!("the control thread: {}", lost.0))?;

    shard.start();
    *slot.serving.borrow_mut() = Some(listen(&common, &handle, shard)?);
    if id == 0 {
        let took_ms = common.started.elapsed().as_millis() as u64;
        common.state.figures.boot_ms.store(took_ms.max(1), Ordering::Relaxed);
        tracing::info!(addr = %common.http_addr, took_ms, "http listening");
    }
    if common.state.listening.fetch_add(1, Ordering::Relaxed) + 1 == common.state.shards {
        rt::blocking(|| notify::tell(notify::READY)).await;
    }
    slot.finished.notified().await;
    rt::sleep(LAST_REPLY).await;
    Ok(())
}

/// The shard's end of the peer plane, if the node has one. Returns what the shard sends through: to this node's other
/// shards alone, or to other nodes as well.
fn start_peers(
    common: &Arc<Common>,
    plan: &ShardPlan,
    handle: &RingHandle,
    slot: &Slot,
    links: &Rc<dyn Carrier>,
) -> Result<Rc<dyn Carrier>, String> {
    let (Some(plane), Some(door)) = (&common.peer_plane, slot.door.get()) else { return Ok(links.clone()) };
    let address = plane.shard_addrs[usize::from(plan.id)];
    let settings = peer_settings(&common.config, &common.node_id, plan.memory_bytes);
    let peers = PeerEndpoint::start(handle, address, door.clone(), settings);
    let peers = peers.map_err(|error| format!("the peer plane: {error}"))?;
    let carrier = RemoteCarrier::new(links.clone(), peers.clone());
    let _ = slot.peers.set((peers.clone(), carrier.clone()));
    if common.state.certificates.validity().is_some() {
        rt::spawn(Queue::Background, certificates::follow(common.clone(), peers));
    }
    Ok(Rc::new(carrier))
}

fn shard_options(common: &Common, plan: &ShardPlan, disk: Disk) -> ShardOptions {
    ShardOptions {
        id: plan.id,
        disk,
        data_dir: common.data_root.clone(),
        store_id: plan.store_id,
        memory_bytes: plan.memory_bytes,
        wal_segment_bytes: WAL_SEGMENT_BYTES,
        log: LogOptions { codec: codec(&common.config.storage), ..LogOptions::default() },
        positions: CommitterOptions {
            interval: Duration::from_millis(common.config.storage.consumer_offset_commit_interval_ms),
            handles_max: common.share_of_descriptors(4, 4096),
        },
        retention: retention(common, plan.memory_bytes),
        disk_reserve_bytes: disk_reserve_bytes(common.state.shards.into()),
        node_disk: common.node_disk.clone(),
        adopt: plan.adopt.clone(),
    }
}

/// Serves HTTP: on the node's port, and on the shard's own if it has one.
fn listen(common: &Common, handle: &RingHandle, shard: Shard) -> Result<Rc<Serving<ShardBroker>>, String> {
    let id = shard.id();
    let context = HttpContext::new(
        ShardBroker::new(shard, common.state.clone()),
        HttpSettings {
            shard: Some(id),
            ..common.http_settings(Surface::Api { metrics: common.metrics_addr.is_none() })
        },
        common.topic_defaults(),
        common.node_id.clone(),
        common.limits.clone(),
        common.http_metrics[usize::from(id)].clone(),
        common.http_metrics.clone(),
    );
    let addresses = [Some(&common.http_addr), common.shard_addrs.get(usize::from(id))];
    let listen = |address: &SocketAddr| handle.listen(*address).map_err(|error| error.to_string());
    let listeners = addresses.into_iter().flatten().map(listen).collect::<Result<Vec<_>, _>>()?;
    Ok(Serving::start(listeners, Rc::new(context)))
}

/// Who this node is, to whoever connects to one of its shards.
fn hello(common: &Common) -> Hello {
    Hello {
        cluster_id: common.state.cluster_id.load(Ordering::Relaxed),
        node: common.node_id.clone(),
        boot_id: common.boot_id,
        build: env!("CARGO_PKG_VERSION").to_owned(),
        newest_command_type: Command::NEWEST_TYPE,
        ..Hello::default()
    }
}

/// Free space under which produce is refused (E22).
pub fn disk_reserve_bytes(shards: u64) -> u64 {
    (2 * WAL_SEGMENT_BYTES * shards).max(DISK_RESERVE_BYTES_MIN)
}

/// What an open log with its consumer state takes, roughly.
const OPEN_LOG_BYTES: usize = 16 << 10;

/// `0` in these settings means off.
fn retention(common: &Common, memory_bytes: usize) -> RetentionOptions {
    let storage = &common.config.storage;
    let unless_off = |ms: u64| (ms > 0).then(|| Duration::from_millis(ms));
    let (by_descriptors, by_memory) = (common.share_of_descriptors(8, 100_000), memory_bytes / 8 / OPEN_LOG_BYTES);
    RetentionOptions {
        idle_after: unless_off(storage.idle_log_eviction_ms),
        cold_interval: unless_off(storage.cold_retention_walk_ms),
        // Up to three descriptors each, and memory.
        open_logs_max: by_descriptors.min(by_memory).max(8),
        open_logs_bound_by: if by_memory < by_descriptors {
            "runtime.memory (--memory)"
        } else {
            "the limit of open files (LimitNOFILE)"
        },
        ..RetentionOptions::default()
    }
}

fn codec(storage: &config::Storage) -> Codec {
    match storage.codec {
        config::Codec::None => Codec::None,
        config::Codec::Zstd => Codec::Zstd(match storage.compression_level {
            CompressionLevel::Fastest => 1,
            CompressionLevel::Default => 3,
            CompressionLevel::Better => 7,
            CompressionLevel::Best => 11,
        }),
    }
}
