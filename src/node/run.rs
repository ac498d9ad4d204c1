//! From a prepared node to a served one and back: threads, signals, the order of a stop.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::mpsc;
use std::sync::Arc;
use std::time::Instant;

use narad_shards::io::signals::{self, Heard, StopSignals};
use narad_shards::rt::ring::Options;
use narad_shards::shard::NodeDisk;
use narad_shards::spsc;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::broker::{NodeState, Placed};
use super::certificates::Certificates;
use super::control_thread::{self, ControlPlan};
use super::disk_state::DiskState;
use super::figures::NodeFigures;
use super::notify;
use super::peer_plane::PeerPlane;
use super::shard_thread::{self, ShardPlan};
use super::trust::Trust;
use super::{data_dir, Prepared};
use crate::config::Config;
use crate::http::{HttpMetrics, HttpSettings, NodeLimits, Surface, TopicDefaults};

/// What all threads of the node are built from.
pub struct Common {
    pub config: Config,
    pub state: Arc<NodeState>,
    pub node_id: String,
    pub limits: Arc<NodeLimits>,
    /// One per shard, and last the metrics listener's.
    pub http_metrics: Arc<[Arc<HttpMetrics>]>,
    pub http_addr: SocketAddr,
    pub metrics_addr: Option<SocketAddr>,
    /// One a shard, or none at all.
    pub shard_addrs: Vec<SocketAddr>,
    pub data_root: PathBuf,
    pub direct: bool,
    /// Limit of open files.
    pub descriptors: u64,
    pub started: Instant,
    pub node_disk: NodeDisk,
    /// `None`: a node without peers.
    pub peer_plane: Option<PeerPlane>,
    /// Of this process (E39).
    pub boot_id: u64,
}

impl Common {
    pub fn http_settings(&self, surface: Surface) -> HttpSettings {
        let http = &self.config.http;
        let narrow = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        HttpSettings {
            surface,
            header_bytes_max: usize::try_from(http.max_header_bytes).unwrap_or(usize::MAX),
            read_timeout: http.read_timeout,
            write_timeout: http.write_timeout,
            idle_timeout: http.idle_timeout,
            consume_wait_max: http.max_consume_wait,
            consumes_in_flight_max: narrow(http.max_consume_in_flight_per_identity),
            produces_in_flight_max: narrow(http.max_produce_in_flight_per_identity),
            ..HttpSettings::default()
        }
    }

    /// What one shard may take of the open files: a part of the limit, at most `max` on all shards together.
    pub fn share_of_descriptors(&self, part: u64, max: u64) -> usize {
        let share = (self.descriptors / part).min(max) / u64::from(self.state.shards.max(1));
        usize::try_from(share).unwrap_or(usize::MAX).max(8)
    }

    pub fn topic_defaults(&self) -> TopicDefaults {
        let topic = &self.config.topic;
        TopicDefaults {
            partitions: topic.default_partitions,
            partitions_max: topic.max_partitions,
            retention_ms: topic.default_retention_age_ms,
            visibility_timeout_ms: topic.default_visibility_timeout_ms,
            max_in_flight_per_partition: topic.default_max_in_flight_per_partition.into(),
            max_acked_ahead_per_partition: topic.default_max_acked_ahead_per_partition.into(),
        }
    }
}

/// What a thread of the node, by its name for people, tells the main thread when it ends.
pub type Ended = (String, Result<(), String>);

/// Starts a thread that runs `body` and reports its end, also when it panics. `who` is its name for people.
fn spawn(
    name: String,
    who: String,
    ended: &mpsc::Sender<Ended>,
    body: impl FnOnce() -> Result<(), String> + Send + 'static,
) -> Result<(), String> {
    let ended = ended.clone();
    std::thread::Builder::new()
        .name(name.clone())
        .spawn(move || {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body))
                .unwrap_or_else(|panic| Err(narad_shards::rt::panic_text(&*panic)));
            let _ = ended.send((who, result)); // nobody listens once the process is on its way out
        })
        .map(drop)
        .map_err(|error| format!("cannot start thread {name}: {error}"))
}

/// Serves until the process is told to stop. `Err` is one line: what ended the node.
pub fn run(prepared: Prepared) -> Result<(), String> {
    let started = Instant::now();
    prepared.log_start();
    let shards = prepared.shards();
    let signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).map_err(|error| format!("cannot catch signals: {error}"))?;
    let Prepared {
        config,
        data,
        lock,
        identity,
        cpus,
        memory,
        file_system,
        ingress,
        opened,
        snapshot,
        peer_plane,
        certificates,
        ..
    } = prepared;
    let http_metrics: Arc<[Arc<HttpMetrics>]> = (0..=shards).map(|_| Arc::new(HttpMetrics::default())).collect();
    let http = &config.http;
    let limits =
        NodeLimits::new(u32::try_from(http.max_connections).unwrap_or(u32::MAX), http.max_batch_body_bytes_in_flight)
            .with_body_memory(memory.body_bytes());
    let placed = (0..usize::from(shards)).map(|shard| Placed {
        cpu: cpus.shards.get(shard).copied().flatten(),
        port: prepared.shard_addrs.get(shard).map(SocketAddr::port),
    });
    let placed = placed.collect();
    let node_disk = NodeDisk::default();
    let common = Arc::new(Common {
        state: Arc::new(NodeState {
            shards,
            placed,
            // Without peers it is its own only voter: the restart decision refuses every other directory.
            trust: if peer_plane.is_none() { Trust::without_end() } else { Trust::default() },
            certificates: Certificates::new(certificates),
            disk: DiskState::new(node_disk.clone()),
            figures: NodeFigures::new(data.root.clone(), opened.metastore.watch.clone()),
            ..NodeState::default()
        }),
        node_id: identity.node_id.clone(),
        limits: Arc::new(limits),
        http_metrics,
        http_addr: prepared.http_addr,
        metrics_addr: prepared.metrics_addr,
        shard_addrs: prepared.shard_addrs,
        data_root: data.root.clone(),
        direct: file_system.direct,
        descriptors: prepared.limits.descriptors,
        node_disk,
        peer_plane,
        boot_id: data_dir::random_id().map_err(|error| format!("/dev/urandom: {error}"))?,
        started,
        config,
    });

    let (ended, endings) = mpsc::channel();
    let (stop, stopping) = mpsc::channel();
    let mut endpoints = spsc::mesh(shards);
    let control_endpoint = endpoints.pop().ok_or("the mesh has no end for the control thread")?;
    let helper_cpus: Vec<usize> = cpus.without_shard().iter().map(|cpu| cpu as usize).collect();
    let threads = endpoints.len() + 1;
    for (endpoint, cpu) in endpoints.into_iter().zip(&cpus.shards) {
        let id = endpoint.shard();
        let mut options = Options::new(&format!("shard {id}"));
        options.cpu = cpu.map(|cpu| cpu as usize);
        options.helper_cpus = helper_cpus.clone();
        options.spin = cpus.spin;
        options.sizes.memlock_budget_bytes = memory.registered_per_shard_bytes(prepared.limits.locked_memory_bytes);
        let held: OwnedFd =
            lock.duplicate().map_err(|error| format!("cannot hold the data directory's lock: {error}"))?;
        let plan = ShardPlan {
            id,
            store_id: identity.store_id,
            memory_bytes: usize::try_from(memory.per_shard_bytes).unwrap_or(usize::MAX),
            adopt: ingress.adopted_by(id, shards),
            snapshot: snapshot.clone(),
            lock: held,
        };
        let common = common.clone();
        spawn(format!("narad-shard-{id}"), format!("shard {id}"), &ended, move || {
            shard_thread::run(common, plan, endpoint, options)
        })?;
    }
    let mut options = Options::new("control");
    options.cpu = cpus.control.map(|cpu| cpu as usize);
    options.helper_cpus = helper_cpus;
    let plan = ControlPlan { opened, stopping };
    let for_control = common.clone();
    spawn("narad-control".to_owned(), "the control thread".to_owned(), &ended, move || {
        control_thread::run(for_control, plan, control_endpoint, options)
    })?;

    let handle = signals.handle();
    watch_signals(signals, common.state.clone(), stop)?;

    let result = wait_for_all(&endings, threads, &common.state);
    handle.close();
    drop(lock);
    result
}

/// A thread that hears signals: says `stop` once, and ends the process at the second of them.
fn watch_signals(mut caught: Signals, state: Arc<NodeState>, stop: mpsc::Sender<()>) -> Result<(), String> {
    let watch = move || {
        let seen = StopSignals::new();
        for signal in caught.forever() {
            if signal == SIGHUP {
                match state.certificates.read_again() {
                    true => tracing::info!("SIGHUP: peer certificates are read again"),
                    false => tracing::info!("SIGHUP: there is nothing to read again, no certificate files are set"),
                }
                continue;
            }
            match seen.hear(signal, signals::now_ms()) {
                Heard::Stop => {}
                Heard::Again => continue,
                Heard::AtOnce => {
                    // The operator does not want to wait: everything answered 202 is on disk already.
                    tracing::warn!(signal, "a second signal: ending at once; acks of the last moments may come undone");
                    std::process::exit(128 + signal);
                }
            }
            notify::tell(notify::STOPPING);
            tracing::info!(signal, "stopping: requests in flight are finished first; a second signal ends at once");
            let _ = stop.send(());
        }
    };
    let thread = std::thread::Builder::new().name("narad-signals".to_owned()).spawn(watch);
    thread.map(drop).map_err(|error| format!("cannot start the signal thread: {error}"))
}

/// A thread that ends while nobody stops the node takes the whole node with it (E25, lesson D10.2).
fn wait_for_all(endings: &mpsc::Receiver<Ended>, threads: usize, state: &NodeState) -> Result<(), String> {
    use std::sync::atomic::Ordering;
    for _ in 0..threads {
        let (thread, result) = endings.recv().map_err(|_| "the threads of the node are gone".to_owned())?;
        result.map_err(|cause| format!("{thread}: {cause}"))?;
        if !state.stopping.load(Ordering::Relaxed) {
            return Err(format!("{thread} ended although the node was not told to stop"));
        }
    }
    tracing::info!("stopped");
    Ok(())
}
