//! What a start asks, in its order, each question for itself.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use narad_shards::io::system::{self, Limit, Resource};
use narad_shards::meta::ShardId;

use super::super::data_dir::{self, DataDir};
use super::super::placement::{self, CpuPlan};
use super::super::{cgroup, filesystem, lock, machine, ports, shard_thread, Allowance, Refusal};
use super::{peers, Check, Machine};
use crate::config::{format_bytes, Config};

/// What the other checks go on from.
#[derive(Default)]
pub(super) struct Found {
    pub plan: Option<CpuPlan>,
    /// The data directory, or the one that it would be made in; `None` when it cannot be used.
    pub directory: Option<PathBuf>,
    pub direct: Option<bool>,
    /// The process that has the data directory, if one has it.
    pub holder: Option<String>,
}

pub(super) fn checks(config: &Config, machine: &Machine, checks: &mut Vec<Check>) -> Found {
    match config.warnings.is_empty() {
        true => checks.push(Check::ok("config", "the settings agree with each other")),
        false => checks.extend(config.warnings.iter().map(|warning| Check::warned("config", warning))),
    }
    let mut found = Found { plan: cpus_and_memory(config, machine, checks), ..Found::default() };
    let shards = found.plan.as_ref().map_or(1, |plan| plan.shards.len());
    kernel(config, machine, shards, checks);
    data_directory(config, shards, &mut found, checks);
    addresses(config, shards, found.holder.as_deref(), checks);
    peers::checks(config, &node_id(config, found.directory.as_deref()), shards, found.holder.as_deref(), checks);
    found
}

fn cpus_and_memory(config: &Config, machine: &Machine, checks: &mut Vec<Check>) -> Option<CpuPlan> {
    let planned = Allowance::of_this_process().and_then(|allowance| {
        let plan = placement::plan_cpus(&config.runtime, &allowance.affinity, &allowance.cgroup)?;
        Ok((allowance, plan))
    });
    let (allowance, plan) = match planned {
        Ok(planned) => planned,
        Err(refusal) => {
            checks.push(Check::refused("cpu.placement", refusal));
            return None;
        }
    };
    if plan.warnings.is_empty() {
        let how = if plan.pinned() { "pinned" } else { "not pinned" };
        checks.push(Check::ok(
            "cpu.placement",
            format!("{} shards, {how}, on {} (`narad cpus` shows more)", plan.shards.len(), plan.allowed),
        ));
    }
    checks.extend(plan.warnings.iter().map(|warning| Check::warned("cpu.placement", warning)));
    let meminfo = machine.proc("meminfo").unwrap_or_default();
    let bytes = cgroup::parse_machine_memory(&meminfo)
        .ok_or_else(|| Refusal::new("cannot read the machine's memory from /proc/meminfo", "mount /proc"));
    let memory =
        bytes.and_then(|bytes| placement::plan_memory(&config.runtime, plan.shards.len(), &allowance.cgroup, bytes));
    checks.push(match memory {
        Ok(memory) => Check::ok(
            "memory.budget",
            format!(
                "{}, {} a shard, of the {}'s {}",
                format_bytes(memory.total_bytes),
                format_bytes(memory.per_shard_bytes),
                if memory.from_cgroup { "control group" } else { "machine" },
                format_bytes(memory.limit_bytes)
            ),
        ),
        Err(refusal) => Check::refused("memory.budget", refusal),
    });
    Some(plan)
}

/// Kernels with a known fault in io_uring (lesson U5): prefix of the release, and what happens.
const DOUBTFUL_KERNELS: [(&str, &str); 2] =
    [("6.1.141", "an oops in io_uring's request cache"), ("6.11.", "lockups in io_uring under load")];
/// What is wanted, as in `kernel-tuning/`: for each shard and the control thread, since the kernel charges whole huge
/// pages, and at least.
pub(super) const LOCKED_BYTES_PER_THREAD: u64 = 16 << 20;
pub(super) const LOCKED_BYTES: u64 = 64 << 20;
/// The same of open files; more when `http.max_connections` asks for more.
pub(super) const DESCRIPTORS: u64 = 65_536;

pub(super) fn judge_kernel(release: &str) -> Check {
    const ID: &str = "kernel.version";
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let doubtful = DOUBTFUL_KERNELS.iter().find(|(prefix, _)| release.starts_with(prefix));
    match doubtful {
        _ if version < (6, 1) => {
            Check::fail(ID, format!("{release} lacks io_uring modes that shards use"), "run Linux 6.1 or newer")
        }
        Some((_, what)) => {
            Check::warn(ID, format!("{release}: reports of {what}"), "run a newer kernel of the same line")
        }
        None => Check::ok(ID, release),
    }
}

fn kernel(config: &Config, machine: &Machine, shards: usize, checks: &mut Vec<Check>) {
    let release = machine::kernel_release();
    checks.push(judge_kernel(&release));
    let mut locked_bytes = u64::MAX;
    checks.push(match system::raise_limit(Resource::LockedMemory) {
        Err(error) => Check::fail("limit.memlock", format!("cannot be read: {error}"), "see prlimit(1)"),
        Ok(limit) => {
            locked_bytes = limit.soft;
            match machine::judge_locked_memory(limit) {
                Err(refusal) => Check::refused("limit.memlock", refusal),
                Ok(()) => judge_registered(limit.soft, shards),
            }
        }
    });
    checks.push(match system::raise_limit(Resource::Descriptors) {
        Err(error) => Check::fail("limit.nofile", format!("cannot be read: {error}"), "see prlimit(1)"),
        Ok(limit) => judge_open_files(limit, config.http.max_connections),
    });
    let ring = system::probe_ring();
    checks.push(judge_io_uring_switch(machine.proc("sys/kernel/io_uring_disabled").as_deref(), ring.is_ok()));
    checks.push(match ring {
        Ok(()) => Check::ok("io_uring", "a ring with the modes of a shard can be made"),
        Err(error) => {
            let context = machine::RingContext::read(&release, locked_bytes);
            Check::refused("io_uring", machine::explain_ring_error(&error, &context))
        }
    });
}

/// The limit is enough to start; is it enough to register every shard's buffers (E26)?
pub(super) fn judge_registered(locked_bytes: u64, shards: usize) -> Check {
    let wanted = LOCKED_BYTES.max(LOCKED_BYTES_PER_THREAD * (shards as u64 + 1));
    let shown = if locked_bytes == u64::MAX { "unlimited".to_owned() } else { format_bytes(locked_bytes) };
    match locked_bytes < wanted {
        false => Check::ok("limit.memlock", shown),
        true => Check::warn(
            "limit.memlock",
            format!(
                "{shown}, and {} is wanted: buffers that do not fit are not registered with the ring",
                format_bytes(wanted)
            ),
            "LimitMEMLOCK=infinity (systemd), --ulimit memlock=-1 (Docker), or memlock in /etc/security/limits.conf",
        ),
    }
}

/// Two bounds: what the start itself warns of, and what leaves room for segment files.
pub(super) fn judge_open_files(limit: Limit, connections_max: u64) -> Check {
    const ID: &str = "limit.nofile";
    match machine::judge_descriptors(limit, connections_max) {
        Some(warning) => Check::warned(ID, &warning),
        None if limit.soft < DESCRIPTORS => Check::warn(
            ID,
            format!(
                "{}, and {DESCRIPTORS} is wanted: each connection and each segment file is a descriptor",
                limit.soft
            ),
            "LimitNOFILE=65536 (systemd), --ulimit nofile=65536 (Docker), or nofile in /etc/security/limits.conf",
        ),
        None => Check::ok(ID, format!("{} (http.max_connections {connections_max})", limit.soft)),
    }
}

pub(super) fn judge_io_uring_switch(disabled: Option<&str>, ring_works: bool) -> Check {
    const ID: &str = "sysctl.kernel.io_uring_disabled";
    const REMEDY: &str =
        "sysctl -w kernel.io_uring_disabled=0, or 1 with kernel.io_uring_group set to the broker's group";
    match (disabled, ring_works) {
        (None, _) => Check::skip(ID, "this kernel has no such switch"),
        (Some("0"), _) => Check::ok(ID, "0: for everybody"),
        (Some(value), true) => Check::ok(
            ID,
            format!("{value}: restricted, and this user (with its groups and capabilities) is let through"),
        ),
        (Some(value), false) => Check::fail(ID, format!("{value}: this user is not let through"), REMEDY),
    }
}

fn data_directory(config: &Config, shards: usize, found: &mut Found, checks: &mut Vec<Check>) {
    const ID: &str = "data_dir";
    let configured = &config.storage.data_dir;
    let (directory, exists) = match existing(configured) {
        Ok(existing) => existing,
        Err(error) => {
            let refusal = data_dir::not_writable(configured, &error);
            return checks.push(Check::refused(ID, refusal));
        }
    };
    match exists {
        true => checks.push(judge_owner(&directory, user_id(Path::new("/proc/self")))),
        false => checks.push(Check::ok(
            ID,
            format!("{} does not exist yet: a start makes it, in {}", configured.display(), directory.display()),
        )),
    }
    if exists {
        match lock::holder_of(&directory) {
            Ok(None) => checks.push(Check::ok("data_dir.lock", "free")),
            Ok(Some(holder)) => {
                checks.push(Check::ok(
                    "data_dir.lock",
                    format!("in use by {holder}: everything here is checked beside it"),
                ));
                found.holder = Some(holder);
            }
            Err(error) => {
                checks.push(Check::refused("data_dir.lock", data_dir::not_writable(&directory, &error)));
            }
        }
        format(config, &directory, checks);
    }
    let mut warnings = Vec::new();
    let trial = format!(".narad-doctor-{}", std::process::id());
    match filesystem::check_file_system_by(&directory, &trial, config.dev, &mut warnings) {
        Err(refusal) => checks.push(Check::refused("data_dir.file_system", refusal)),
        Ok(system) => {
            if warnings.is_empty() {
                let found = format!("{} with O_DIRECT, blocks of {} bytes", system.name, system.block_bytes);
                checks.push(Check::ok("data_dir.file_system", found));
            }
            checks.push(judge_space(system.available_bytes, shard_thread::disk_reserve_bytes(shards as u64)));
            found.direct = Some(system.direct);
            found.directory = Some(directory);
        }
    }
    checks.extend(warnings.iter().map(|warning| Check::warned("data_dir.file_system", warning)));
}

/// The directory itself, or the nearest one above it that exists, and whether it is the former.
fn existing(configured: &Path) -> io::Result<(PathBuf, bool)> {
    let mut exists = true;
    let mut at = if configured.is_absolute() { configured.to_owned() } else { Path::new(".").join(configured) };
    loop {
        match fs::metadata(&at) {
            Ok(metadata) if metadata.is_dir() => return Ok((at.canonicalize()?, exists)),
            Ok(_) => return Err(io::ErrorKind::NotADirectory.into()),
            Err(error) if error.kind() == io::ErrorKind::NotFound && at.pop() => exists = false,
            Err(error) => return Err(error),
        }
    }
}

fn user_id(of: &Path) -> Option<u32> {
    fs::metadata(of).ok().map(|metadata| metadata.uid())
}

fn judge_owner(directory: &Path, me: Option<u32>) -> Check {
    const ID: &str = "data_dir";
    let Ok(metadata) = fs::metadata(directory) else { return Check::skip(ID, "cannot be looked at") };
    let (owner, mode, shown) = (metadata.uid(), metadata.mode() & 0o777, directory.display());
    match me {
        Some(me) if me != owner => Check::warn(
            ID,
            format!("{shown} belongs to user id {owner}, and this is user id {me}: limits and rights are this user's"),
            format!("run the doctor as the broker's user, or chown -R {me} {shown}"),
        ),
        _ if mode & 0o077 != 0 => Check::warn(
            ID,
            format!("{shown} has mode {mode:04o}: others may look at messages"),
            format!("chmod 0700 {shown}"),
        ),
        _ => Check::ok(ID, format!("{shown}, mode {mode:04o}, owned by this user")),
    }
}

/// The name that a start would give this node; the configured one, should the directory not tell.
fn node_id(config: &Config, directory: Option<&Path>) -> String {
    let configured = config.cluster.node_id.as_deref();
    let host_name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let plan = directory.and_then(|root| {
        data_dir::plan_identity(&DataDir { root: root.to_owned() }, configured, host_name.trim()).ok()
    });
    plan.map_or_else(|| configured.unwrap_or(host_name.trim()).to_owned(), |plan| plan.node_id().to_owned())
}

/// Ids and metadata of an existing directory; what its WAL and logs hold is found out by the start's recovery.
fn format(config: &Config, directory: &Path, checks: &mut Vec<Check>) {
    const ID: &str = "data_dir.format";
    let data = DataDir { root: directory.to_owned() };
    let host_name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let identity = data_dir::plan_identity(&data, config.cluster.node_id.as_deref(), host_name.trim());
    checks.push(match identity {
        Ok(plan) if plan.first_start() => Check::ok(ID, "holds nothing yet"),
        Ok(plan) => Check::ok(ID, format!("whole, of node {}", plan.node_id())),
        Err(refusal) => Check::refused(ID, refusal),
    });
    let mut warnings = Vec::new();
    if data.ingress().is_dir() {
        match data_dir::list_ingress(&data, &mut warnings) {
            Ok(_) => {}
            Err(refusal) => checks.push(Check::refused(ID, refusal)),
        }
    }
    checks.extend(warnings.iter().map(|warning| Check::warned(ID, warning)));
}

pub(super) fn judge_space(available_bytes: u64, reserve_bytes: u64) -> Check {
    const ID: &str = "data_dir.space";
    let (shown, reserve) = (format_bytes(available_bytes), format_bytes(reserve_bytes));
    match available_bytes {
        bytes if bytes <= reserve_bytes => Check::fail(
            ID,
            format!("{shown} free, under the reserve of {reserve}: every produce would be answered 503"),
            "free space, or move storage.data_dir",
        ),
        bytes if bytes <= 4 * reserve_bytes => Check::warn(
            ID,
            format!("{shown} free; produce stops at {reserve}"),
            "free space, shorten retention (narad topic edit), and alert on narad_data_dir_available_bytes",
        ),
        _ => Check::ok(ID, format!("{shown} free; produce stops at {reserve}")),
    }
}

fn addresses(config: &Config, shards: usize, holder: Option<&str>, checks: &mut Vec<Check>) {
    let host = config.http_host();
    let mut check = |id: &'static str, tried: Result<std::net::SocketAddr, Refusal>| {
        checks.push(match (tried, holder) {
            (Ok(address), _) => Check::ok(id, format!("{address} is free")),
            (Err(refusal), Some(holder)) if refusal.cause.contains("taken") => {
                Check::ok(id, format!("taken, as it should be while {holder} serves"))
            }
            (Err(refusal), _) => Check::refused(id, refusal),
        });
    };
    check("port.http", ports::try_listen_once("http.addr", host, config.http.addr.port));
    if let Some(address) = &config.http.metrics_addr {
        let host = address.host.as_deref().unwrap_or("");
        check("port.metrics", ports::try_listen_once("http.metrics_addr", host, address.port));
    }
    if let Some(base) = config.runtime.shard_ports {
        let metrics_port = config.http.metrics_addr.as_ref().map_or(0, |address| address.port);
        let taken = [("http.addr", config.http.addr.port), ("http.metrics_addr", metrics_port)];
        match ports::plan_shard_ports(base, ShardId::try_from(shards).unwrap_or(ShardId::MAX), &taken) {
            Err(refusal) => check("port.shards", Err(refusal)),
            Ok(ports) => {
                let tried = ports.map(|port| ports::try_listen_once("runtime.shard_ports (--shard-ports)", host, port));
                // The first that is taken speaks for all.
                let all: Result<Vec<_>, _> = tried.collect();
                check("port.shards", all.map(|addresses| addresses[0]));
            }
        }
    }
    if !config.security.enabled && !config.dev && config.http.addr.host.is_none() {
        checks.push(Check::warn(
            "security",
            "off: whoever reaches the API port may read and write everything",
            "bind loopback (--addr 127.0.0.1:7942) behind a proxy that authenticates, or fence the port",
        ));
    }
}
