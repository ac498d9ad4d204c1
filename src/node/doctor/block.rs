//! The drive under the data directory: found through partitions, device mapper and stripes, judged one by one.

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::tuning::chosen;
use super::{Check, Machine};

pub(super) fn checks(machine: &Machine, directory: Option<&Path>, checks: &mut Vec<Check>) {
    let device = directory.and_then(|directory| fs::metadata(directory).ok()).map(|metadata| metadata.dev());
    let number = device.map(|device| (libc::major(device), libc::minor(device)));
    let Some((major, minor)) = number else { return };
    checks.push(mount(machine, directory.and_then(mount_id), (major, minor)));
    let drives = drives(machine, major, minor);
    if drives.is_empty() {
        let why = format!("no block device is known for {major}:{minor}");
        return checks.extend(["block.scheduler", "block.write_cache"].map(|id| Check::skip(id, why.clone())));
    }
    for drive in &drives {
        checks.push(scheduler(machine, drive));
        checks.push(write_cache(machine, drive));
    }
}

/// Names in `/sys/block` of what the device number stands on at last.
pub(super) fn drives(machine: &Machine, major: u32, minor: u32) -> Vec<String> {
    let mut found = Vec::new();
    let mut open: Vec<PathBuf> =
        machine.sys.join(format!("dev/block/{major}:{minor}")).canonicalize().into_iter().collect();
    while let Some(mut device) = open.pop() {
        if device.join("partition").exists() {
            device.pop();
        }
        let below: Vec<PathBuf> = fs::read_dir(device.join("slaves"))
            .map(|entries| entries.filter_map(|entry| entry.ok()?.path().canonicalize().ok()).collect())
            .unwrap_or_default();
        match device.file_name().and_then(|name| name.to_str()) {
            Some(name) if below.is_empty() => found.push(name.to_owned()),
            _ => open.extend(below),
        }
    }
    found.sort();
    found.dedup();
    found
}

pub(super) fn scheduler(machine: &Machine, drive: &str) -> Check {
    const ID: &str = "block.scheduler";
    let text = machine.sys(format!("block/{drive}/queue/scheduler"));
    match text.as_deref().and_then(chosen) {
        None => Check::skip(ID, format!("{drive} has no scheduler to choose")),
        Some("none") => Check::ok(ID, format!("{drive}: none")),
        Some(now) if !drive.starts_with("nvme") => {
            Check::skip(ID, format!("{drive}: {now}; it is no NVMe drive: measure both with narad-bench device"))
        }
        Some(now) => Check::warn(
            ID,
            format!("{drive}: {now} costs a lock and reorders the ingress log for nothing"),
            format!("echo none > /sys/block/{drive}/queue/scheduler"),
        ),
    }
}

/// Nothing to change, and much to know: what a durable write has to wait for.
pub(super) fn write_cache(machine: &Machine, drive: &str) -> Check {
    const ID: &str = "block.write_cache";
    let read = |name: &str| machine.sys(format!("block/{drive}/queue/{name}"));
    let (cache, fua) = (read("write_cache"), read("fua"));
    let spins = read("rotational").as_deref() == Some("1") && !drive.starts_with("vd") && !drive.starts_with("xvd");
    match (cache.as_deref(), fua.as_deref()) {
        _ if spins => Check::warn(
            ID,
            format!("{drive} has platters: a durable write waits for a turn of them"),
            "use a local NVMe drive",
        ),
        (None, _) => Check::skip(ID, format!("{drive} does not say")),
        (Some("write through"), _) => Check::ok(ID, format!("{drive}: write through, a durable write needs no flush")),
        (Some(cache), Some("1")) => Check::ok(ID, format!("{drive}: {cache} with FUA, one command a durable write")),
        (Some(cache), _) => {
            Check::ok(ID, format!("{drive}: {cache} without FUA, a durable write is a write and a flush of the cache"))
        }
    }
}

/// The mount that a path is reached by. The device alone does not tell: a bind mount has options of its own.
pub(super) fn mount_id(directory: &Path) -> Option<String> {
    let file = fs::File::open(directory).ok()?;
    let facts = fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd())).ok()?;
    facts.lines().find_map(|line| Some(line.strip_prefix("mnt_id:")?.trim().to_owned()))
}

/// `id`: of the mount. A kernel that does not tell it leaves the last mount of the device.
pub(super) fn mount(machine: &Machine, id: Option<String>, device: (u32, u32)) -> Check {
    const ID: &str = "mount.options";
    let table = machine.proc("self/mountinfo").unwrap_or_default();
    let number = format!("{}:{}", device.0, device.1);
    // <mount id> 23 0:28 <root> <mount point> <options> ... - <type> <source> <super options>
    let mounts = table.lines().rev().filter_map(|line| {
        let (front, back) = line.split_once(" - ")?;
        Some((front.split(' ').collect::<Vec<_>>(), back.split(' ').collect::<Vec<_>>()))
    });
    let mounts: Vec<_> = mounts.collect();
    let of_id = mounts.iter().find(|(front, _)| id.is_some() && front.first().copied() == id.as_deref());
    let found = of_id.or_else(|| mounts.iter().find(|(front, _)| front.get(2) == Some(&number.as_str())));
    let Some((front, back)) = found else { return Check::skip(ID, format!("no mount is known for {number}")) };
    let (point, options, more) = (front.get(4).unwrap_or(&""), front.get(5).unwrap_or(&""), back.get(2).unwrap_or(&""));
    let has = |wanted: &str| options.split(',').chain(more.split(',')).any(|option| option == wanted);
    match ["nobarrier", "barrier=0"].into_iter().find(|option| has(option)) {
        Some(option) => Check::fail(
            ID,
            format!("{point} is mounted with {option}: a synced write may be lost in a power cut"),
            format!("mount -o remount,barrier {point}, and correct /etc/fstab"),
        ),
        None if has("lazytime") => Check::ok(ID, format!("{point}: {options},{more}")),
        None => Check::hint(
            ID,
            format!("{point}: {options}: keeping a file's times may wait for the journal while a shard submits"),
            format!("mount -o remount,lazytime {point}; see narad_runtime_enter_seconds_total before and after"),
        ),
    }
}
