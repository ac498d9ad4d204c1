//! Which drive a directory is on, and what the kernel says of it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Where a directory is stored.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mount {
    /// `ext4`, `xfs`, ...
    pub file_system: String,
    /// Options of the mount and of the file system.
    pub options: String,
    /// What is mounted: `/dev/nvme0n1p2`.
    pub source: String,
    /// Where.
    pub point: String,
    /// Major and minor number; major 0 where the file system spans devices (btrfs, overlay) or has none (tmpfs).
    pub device: (u32, u32),
}

/// The mount that holds `dir`, if it can be found.
pub fn mount_of(dir: &Path) -> Option<Mount> {
    let dir = fs::canonicalize(dir).ok()?;
    mount_in(&fs::read_to_string("/proc/self/mountinfo").ok()?, &dir)
}

fn mount_in(mountinfo: &str, dir: &Path) -> Option<Mount> {
    // Later lines cover earlier ones: of equally long mount points the last counts.
    let mounts = mountinfo.lines().filter_map(parse_mount);
    mounts
        .filter(|mount| dir.starts_with(&mount.point))
        .max_by_key(|mount| Path::new(&mount.point).components().count())
}

/// A line such as `36 35 98:0 / /mnt rw,noatime shared:1 - ext4 /dev/sda1 rw,errors=continue`.
fn parse_mount(line: &str) -> Option<Mount> {
    let (left, right) = line.split_once(" - ")?;
    let left: Vec<&str> = left.split(' ').collect();
    let right: Vec<&str> = right.split(' ').collect();
    let (major, minor) = left.get(2)?.split_once(':')?;
    Some(Mount {
        file_system: right.first()?.to_string(),
        options: format!("{},{}", left.get(5)?, right.get(2)?),
        source: unescape(right.get(1)?),
        point: unescape(left.get(4)?),
        device: (major.parse().ok()?, minor.parse().ok()?),
    })
}

/// The kernel writes blanks in paths as `\040`.
fn unescape(text: &str) -> String {
    text.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
}

/// The sysfs directory of the whole drive (not the partition) below a mount.
pub fn drive_of(mount: &Mount) -> Option<PathBuf> {
    let (major, minor) = match mount.device {
        (0, _) => {
            let device = fs::metadata(&mount.source).ok()?.rdev();
            (rustix::fs::major(device), rustix::fs::minor(device))
        }
        device => device,
    };
    let path = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    Some(if path.join("partition").exists() { path.parent()?.to_owned() } else { path })
}

/// The first line of a file under the drive's directory.
pub fn attribute(drive: &Path, name: &str) -> Option<String> {
    let text = fs::read_to_string(drive.join(name)).ok()?;
    let line = text.lines().next()?.trim().to_string();
    (!line.is_empty()).then_some(line)
}

/// Names of the drives that a composed one (device mapper, RAID) lies on.
pub fn below(drive: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(drive.join("slaves"))
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// What a drive has done since the machine started; by all programs, not only this one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes written.
    pub written_bytes: u64,
    /// Flushes of the write cache, which Linux counts from 5.5 on.
    pub flushes: Option<u64>,
}

/// The counters of the drive under `dir`.
pub fn counters(dir: &Path) -> Option<Counters> {
    let drive = drive_of(&mount_of(dir)?)?;
    parse_stat(&fs::read_to_string(drive.join("stat")).ok()?)
}

fn parse_stat(stat: &str) -> Option<Counters> {
    let fields: Vec<u64> = stat.split_whitespace().filter_map(|field| field.parse().ok()).collect();
    Some(Counters { written_bytes: fields.get(6)? * 512, flushes: fields.get(15).copied() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
30 22 0:25 / /tmp rw,nosuid - tmpfs tmpfs rw,size=1024k
31 22 8:17 / /data\\040two rw,noatime - xfs /dev/sdb1 rw,attr2";

    #[test]
    fn the_longest_mount_point_holds_the_directory() {
        let of = |path: &str| mount_in(MOUNTS, Path::new(path)).unwrap();
        assert_eq!(of("/home/x").source, "/dev/vda");
        assert_eq!(of("/tmp/x").file_system, "tmpfs");
        assert_eq!(of("/tmpfile").file_system, "ext4");
        let data = of("/data two/narad");
        assert_eq!((data.device, data.options.as_str()), ((8, 17), "rw,noatime,rw,attr2"));
    }

    #[test]
    fn flushes_are_the_sixteenth_field() {
        let stat = "  1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17";
        assert_eq!(parse_stat(stat), Some(Counters { written_bytes: 7 * 512, flushes: Some(16) }));
        assert_eq!(parse_stat("1 2 3 4 5 6 7 8 9 10 11").and_then(|counters| counters.flushes), None);
        assert_eq!(parse_stat("1 2 3"), None);
    }
}
