//! The node's start. [`prepare`] does everything that can be refused, and leaves a refused data directory as it was:
//! CPUs are read before any thread is pinned, the machine is checked before the first executor, the lock is taken before
//! anything is read, ids are written last, and what was made is taken back. [`run`] starts threads on what it returns.

mod balancers;
mod broker;
mod certificates;
mod cgroup;
mod cluster;
mod control_thread;
mod data_dir;
mod disk_state;
mod doctor;
mod figures;
mod filesystem;
mod founding;
pub(crate) mod fuzz;
mod lock;
mod machine;
mod notify;
mod peer_plane;
mod peer_reports;
mod peer_watch;
mod placement;
mod ports;
mod run;
mod serving;
mod shard_thread;
mod status;
mod stopping;
mod topology;
mod traces;

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) mod tests_support;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use narad_shards::io::system;
use narad_shards::meta::{ShardId, Snapshot};

use crate::config::{format_bytes, Config, CpuSet, Warning};
use crate::control::{consensus, Metastore, Placement};
use crate::peer::{self, Validity};

pub use cgroup::Limits as CgroupLimits;
pub use data_dir::{DataDir, Identity, IngressDirectories};
pub use doctor::{examine, Check, Report, Status};
pub use filesystem::FileSystem;
pub use lock::{DataLock, Patience};
pub use machine::ProcessLimits;
pub use peer_plane::PeerPlane;
pub use placement::{plan_cpus, CpuPlan, MemoryPlan, SHARD_MEMORY_BYTES_MIN};
pub use run::run;
pub use topology::{remarks, Topology};
use traces::Traces;

/// Why the node does not start: cause and remedy, one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    cause: String,
    remedy: String,
    of_a_setting: bool,
}

impl Refusal {
    pub fn new(cause: impl Into<String>, remedy: impl Into<String>) -> Refusal {
        Refusal { cause: cause.into(), remedy: remedy.into(), of_a_setting: false }
    }

    /// A setting that contradicts the machine; `cause` names its key.
    pub fn setting(cause: impl Into<String>, remedy: impl Into<String>) -> Refusal {
        Refusal { of_a_setting: true, ..Refusal::new(cause, remedy) }
    }

    /// The line for standard error.
    pub fn line(&self) -> String {
        match self.of_a_setting {
            true => format!("narad: config: {self}"),
            false => format!("narad: cannot start: {self}"),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.cause, self.remedy)
    }
}

impl std::error::Error for Refusal {}

/// A node that passed every check and holds its data directory, before the first thread.
pub struct Prepared {
    pub config: Config,
    pub data: DataDir,
    /// Keep it for the life of the process, and register it in every shard's ring (E12).
    pub lock: DataLock,
    pub identity: Identity,
    pub cpus: CpuPlan,
    pub memory: MemoryPlan,
    pub limits: ProcessLimits,
    pub file_system: FileSystem,
    /// The client API; a port of 0 has been replaced.
    pub http_addr: SocketAddr,
    pub metrics_addr: Option<SocketAddr>,
    /// One a shard, or none at all (`runtime.shard_ports`).
    pub shard_addrs: Vec<SocketAddr>,
    /// `None`: a node without peers.
    pub peer_plane: Option<PeerPlane>,
    /// Until when the peer plane's certificates are good; `None` without files.
    pub certificates: Option<Validity>,
    pub ingress: IngressDirectories,
    /// Metadata and consensus, which fit each other.
    pub opened: cluster::Opened,
    /// What every shard starts with.
    pub snapshot: Arc<Snapshot>,
    pub kernel: String,
    pub warnings: Vec<Warning>,
}

impl Prepared {
    pub fn shards(&self) -> ShardId {
        self.snapshot.shards
    }
}

/// What this process may use of the machine.
#[derive(Clone, Debug)]
pub struct Allowance {
    pub affinity: CpuSet,
    pub cgroup: CgroupLimits,
}

impl Allowance {
    /// Ask before any thread is pinned (lesson P2).
    pub fn of_this_process() -> Result<Allowance, Refusal> {
        let affinity = system::allowed_cpus().map_err(|error| {
            Refusal::new(format!("cannot ask which CPUs this process may use: {error}"), "see taskset(1)")
        })?;
        Ok(Allowance { affinity: affinity.into_iter().collect(), cgroup: cgroup::Cgroups::of_this_process().limits() })
    }

    /// Affinity, cut down to the control group.
    pub fn cpus(&self) -> CpuSet {
        placement::allowed_cpus(&self.affinity, &self.cgroup)
    }
}

/// Checks the machine and the settings against each other, and opens what must be open before the first thread. `say`
/// gets at most a sentence or two while the start waits for somebody else.
pub fn prepare(config: Config, say: &mut dyn FnMut(String)) -> Result<Prepared, Refusal> {
    let mut warnings = config.warnings.clone();
    let Allowance { affinity, cgroup } = Allowance::of_this_process()?;
    let mut cpus = placement::plan_cpus(&config.runtime, &affinity, &cgroup)?;
    warnings.append(&mut cpus.warnings);
    let shards = ShardId::try_from(cpus.shards.len()).map_err(|_| {
        Refusal::setting("runtime.shards is not set and this machine has too many CPUs", "set runtime.shards")
    })?;
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let machine_bytes = cgroup::parse_machine_memory(&meminfo)
        .ok_or_else(|| Refusal::new("cannot read the machine's memory from /proc/meminfo", "mount /proc"))?;
    let memory = placement::plan_memory(&config.runtime, cpus.shards.len(), &cgroup, machine_bytes)?;

    let kernel = machine::kernel_release();
    let limits = machine::check_machine(&kernel, config.http.max_connections, &mut warnings)?;

    let tls = founding::tls_files(&config);
    let certificates = tls.map(|files| peer::check_files(&files)).transpose().map_err(|error| {
        Refusal::setting(
            error,
            "every node's certificate is signed by the same authorities; `openssl verify` tells more",
        )
    })?;

    // Declared in this order, since they go in the other one: files while the lock is held, then the lock, then the
    // directories, which a start that comes meanwhile may have begun to fill.
    let directories = Traces::of_directory(&config.storage.data_dir);
    let data = DataDir::create(&config.storage.data_dir)?;
    let lock = lock::lock_data_directory(&data.root, Patience::START, say)?;
    let files = Traces::of(data.made_by_a_start());
    let lock_file = lock.trace();
    let http_addr = ports::try_listen("http.addr", config.http_host(), config.http.addr.port)?;
    let metrics_addr = match &config.http.metrics_addr {
        None => None,
        Some(address) => {
            let host = address.host.as_deref().unwrap_or("");
            let listens = ports::try_listen("http.metrics_addr", host, address.port)?;
            // Both would be allowed to listen, and the kernel would deal connections out to either.
            let same_host =
                listens.ip() == http_addr.ip() || listens.ip().is_unspecified() || http_addr.ip().is_unspecified();
            if same_host && listens.port() == http_addr.port() && address.port != 0 {
                return Err(Refusal::setting(
                    format!("http.metrics_addr ({address}) and http.addr ({http_addr}) are one address"),
                    "give them different ports, or drop http.metrics_addr: /metrics is on http.addr then",
                ));
            }
            Some(listens)
        }
    };
    let shard_addrs = match config.runtime.shard_ports {
        None => Vec::new(),
        Some(base) => ports::try_shard_ports(
            base,
            shards,
            config.http_host(),
            &[("http.addr", http_addr.port()), ("http.metrics_addr", metrics_addr.map_or(0, |address| address.port()))],
        )?,
    };
    let file_system = filesystem::check_file_system(&data.root, config.dev, &mut warnings)?;

    let host_name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let plan = data_dir::plan_identity(&data, config.cluster.node_id.as_deref(), host_name.trim())?;
    let peer_plane = peer_plane::plan_peer_plane(&config, plan.node_id(), shards)?;
    data.create_inside()?;
    let (node_id, empty_directory) = (plan.node_id().to_owned(), plan.first_start());
    let has_consensus = consensus::files::exists(&data.metastore());
    let doors = founding::Doors { http: http_addr, metrics: metrics_addr };
    let mode = founding::mode(&config, &node_id, peer_plane.as_ref(), has_consensus, doors, say)?;
    let drawn = data_dir::random_id().map_err(|error| Refusal::new(format!("/dev/urandom: {error}"), "mount /dev"))?;
    let consensus::files::Opened { store, state, stored, files: consensus_files } =
        consensus::files::open(&data.metastore(), &mode, config.restored, drawn)
            .map_err(|error| Refusal::new(error, "the file was left as it is"))?;
    let placement = match &peer_plane {
        None => Placement::new(shards),
        Some(_) => Placement::in_cluster(shards, &node_id),
    };
    let metastore = Metastore::over(store, state, placement);
    let identity = plan.carry_out(&data)?;
    let ingress = data_dir::list_ingress(&data, &mut warnings)?;
    let snapshot = metastore.snapshot();
    files.keep();
    lock_file.keep();
    directories.keep();
    Ok(Prepared {
        config,
        data,
        lock,
        identity,
        cpus,
        memory,
        limits,
        file_system,
        http_addr,
        metrics_addr,
        shard_addrs,
        peer_plane,
        certificates,
        ingress,
        opened: cluster::Opened { metastore, stored, files: consensus_files, empty_directory },
        snapshot,
        kernel,
        warnings,
    })
}

impl Prepared {
    /// Writes the start line and the warnings; call it once logging works.
    pub fn log_start(&self) {
        let placed = |cpu: &Option<u32>| cpu.map_or("any".to_owned(), |cpu| cpu.to_string());
        let shard_cpus: Vec<String> = self.cpus.shards.iter().map(placed).collect();
        let security = match (self.config.security.enabled, self.http_addr.ip().is_loopback()) {
            (true, _) => "on; users are not checked yet, so only loopback is served",
            (false, true) => "off; loopback only",
            (false, false) => "OFF: whoever reaches this address may read and write everything",
        };
        tracing::info!(
            version = env!("CARGO_PKG_VERSION"),
            node = %self.identity.node_id,
            data_dir = %self.data.root.display(),
            shards = self.cpus.shards.len(),
            cpus = %self.cpus.allowed,
            pinned = %if self.cpus.pinned() { shard_cpus.join(",") } else { "none".to_owned() },
            control_cpu = %placed(&self.cpus.control),
            shard_ports = %match self.shard_addrs[..] {
                [first, .., last] => format!("{}-{}", first.port(), last.port()),
                [only] => only.port().to_string(),
                [] => "none".to_owned(),
            },
            spin = self.cpus.spin_words(),
            memory = %format_bytes(self.memory.total_bytes),
            memory_per_shard = %format_bytes(self.memory.per_shard_bytes),
            memory_limit = %format_bytes(self.memory.limit_bytes),
            memory_limit_from = if self.memory.from_cgroup { "cgroup" } else { "machine" },
            locked_memory = %if self.limits.locked_memory_bytes == u64::MAX { "unlimited".to_owned() } else { format_bytes(self.limits.locked_memory_bytes) },
            descriptors = self.limits.descriptors,
            file_system = %self.file_system.name,
            block_bytes = self.file_system.block_bytes,
            direct_io = self.file_system.direct,
            disk_available = %format_bytes(self.file_system.available_bytes),
            kernel = %self.kernel,
            security,
            "narad serve starting"
        );
        peer_plane::log_transport(&self.config, self.peer_plane.as_ref());
        for warning in &self.warnings {
            tracing::warn!("{warning}");
        }
    }
}
