//! The file system under the data directory: what it is, and whether direct I/O works on it. Believed is what a real
//! aligned write, sync and read say (lesson O3.1); the name only decides what to warn of.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use narad_shards::io::system::{self, FileSystemFacts};
use narad_shards::io::{AlignedBuf, ALIGNMENT};

use super::Refusal;
use crate::config::Warning;

/// What to think of a kind of file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Local,
    CopyOnWrite,
    Network,
    /// Gone at the next boot.
    Memory,
    /// A container's own layer: slow, and gone with the container.
    Overlay,
    Unknown,
}

/// `f_type` of statfs(2).
const MAGICS: [(u64, &str, Kind); 25] = [
    (0xef53, "ext4", Kind::Local),
    (0x5846_5342, "xfs", Kind::Local),
    (0xf2f5_2010, "f2fs", Kind::Local),
    (0x3153_464a, "jfs", Kind::Local),
    (0x9123_683e, "btrfs", Kind::CopyOnWrite),
    (0x2fc1_2fc1, "zfs", Kind::CopyOnWrite),
    (0xca45_1a4e, "bcachefs", Kind::CopyOnWrite),
    (0x6969, "nfs", Kind::Network),
    (0x517b, "smb", Kind::Network),
    (0xff53_4d42, "cifs", Kind::Network),
    (0xfe53_4d42, "smb2", Kind::Network),
    (0x00c3_6400, "ceph", Kind::Network),
    (0x0102_1997, "9p", Kind::Network),
    (0x5346_414f, "afs", Kind::Network),
    (0x0bd0_0bd0, "lustre", Kind::Network),
    (0x4750_4653, "gpfs", Kind::Network),
    (0x0116_1970, "gfs2", Kind::Network),
    (0x7461_636f, "ocfs2", Kind::Network),
    (0x6573_5546, "fuse", Kind::Network),
    (0x786f_4256, "vboxsf", Kind::Network),
    (0x0102_1994, "tmpfs", Kind::Memory),
    (0x8584_58f6, "ramfs", Kind::Memory),
    (0x794c_7630, "overlay", Kind::Overlay),
    (0x6175_6673, "aufs", Kind::Overlay),
    (0xf15f, "ecryptfs", Kind::Overlay),
];

fn classify(magic: u64) -> (String, Kind) {
    match MAGICS.iter().find(|(known, ..)| *known == magic) {
        Some((_, name, kind)) => ((*name).to_owned(), *kind),
        None => (format!("0x{magic:x}"), Kind::Unknown),
    }
}

fn warning(name: &str, kind: Kind) -> Option<Warning> {
    let (what, remedy) = match kind {
        Kind::Local => return None,
        Kind::CopyOnWrite => (
            "copy-on-write: durable writes take a multiple of the time, and prepared WAL segments gain nothing",
            "use ext4 or XFS",
        ),
        Kind::Network => (
            "not a local disk: a 202 is worth what the far end's sync is worth, and latency is the network's",
            "use ext4 or XFS on a local drive",
        ),
        Kind::Memory => {
            ("memory: everything is lost at the next boot, 202 or not", "use it for benchmarks only; else ext4 or XFS")
        }
        Kind::Overlay => ("a container's own layer: slow to sync and gone with the container", "mount a volume"),
        Kind::Unknown => ("unknown to this build and untested", "use ext4 or XFS, which are tested"),
    };
    Some(Warning::new(format!("the data directory is on {name}, which is {what}"), remedy))
}

/// The file system of the data directory, after the trial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSystem {
    pub name: String,
    pub block_bytes: usize,
    /// `false` only in dev mode: files go through the page cache.
    pub direct: bool,
    pub available_bytes: u64,
}

/// Judges the file system of an existing, writable directory.
pub fn check_file_system(directory: &Path, dev: bool, warnings: &mut Vec<Warning>) -> Result<FileSystem, Refusal> {
    check_file_system_by(directory, ".direct-io-trial", dev, warnings)
}

/// The same with a trial file of that name, for whoever must not get in the way of a start.
pub(super) fn check_file_system_by(
    directory: &Path,
    trial: &str,
    dev: bool,
    warnings: &mut Vec<Warning>,
) -> Result<FileSystem, Refusal> {
    let facts = system::file_system(directory).map_err(|error| {
        Refusal::new(format!("cannot examine the file system of {}: {error}", directory.display()), "check the mount")
    })?;
    let (name, kind) = classify(facts.magic);
    warnings.extend(warning(&name, kind));
    let block_bytes = block_bytes(&facts);
    let direct = match try_direct_io(&directory.join(trial), block_bytes) {
        Ok(()) => true,
        Err(failure) => {
            warnings.push(judge_failure(failure, directory, &name, dev)?);
            false
        }
    };
    Ok(FileSystem { name, block_bytes, direct, available_bytes: facts.available_bytes })
}

/// The file system's block, as far as our buffers are aligned for it. ZFS reports 128 KiB and more.
fn block_bytes(facts: &FileSystemFacts) -> usize {
    match usize::try_from(facts.block_bytes) {
        Ok(bytes) if bytes.is_power_of_two() && (512..=ALIGNMENT).contains(&bytes) => bytes,
        _ => ALIGNMENT,
    }
}

#[derive(Debug)]
enum TrialFailure {
    /// Files cannot be opened with O_DIRECT here.
    NoDirectIo,
    Io(&'static str, io::Error),
    /// The bytes read back are not the bytes written.
    Differs,
}

/// Dev mode goes on buffered where O_DIRECT is missing; everything else is a refusal.
fn judge_failure(failure: TrialFailure, directory: &Path, name: &str, dev: bool) -> Result<Warning, Refusal> {
    let at = directory;
    let directory = directory.display();
    match failure {
        TrialFailure::NoDirectIo if dev => {
            let cause = format!("{name} at {directory} has no O_DIRECT: files are buffered, which only dev mode accepts");
            Ok(Warning::new(cause, "use ext4 or XFS for anything but a laptop"))
        }
        TrialFailure::NoDirectIo => Err(Refusal::new(
            format!("{name} at {directory} has no O_DIRECT, without which reads cannot check the drive"),
            "put storage.data_dir on ext4 or XFS (in a container: on a volume), or use `narad server start --dev` on a laptop",
        )),
        TrialFailure::Io(step, error) if error.raw_os_error() == Some(libc::ENOSPC) => Err(Refusal::new(
            format!("{directory} has no space left (a trial {step} failed: {error})"),
            "free space, then start again",
        )),
        TrialFailure::Io(_, error)
            if matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EROFS)) =>
        {
            Err(super::data_dir::not_writable(at, &error))
        }
        TrialFailure::Io(step, error) => Err(Refusal::new(
            format!("a trial {step} of one block on {name} at {directory} failed: {error}"),
            "check the disk and the kernel log, or put storage.data_dir on ext4 or XFS",
        )),
        TrialFailure::Differs => Err(Refusal::new(
            format!("{name} at {directory} gave back other bytes than a trial write had put there"),
            "do not use this disk",
        )),
    }
}

fn try_direct_io(path: &Path, block_bytes: usize) -> Result<(), TrialFailure> {
    let _ = fs::remove_file(path); // of a start that died here
    let result = trial(path, block_bytes);
    let _ = fs::remove_file(path);
    result
}

fn trial(path: &Path, block_bytes: usize) -> Result<(), TrialFailure> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).mode(0o600).custom_flags(libc::O_DIRECT | libc::O_CLOEXEC);
    let file = options.open(path).map_err(|error| match error.raw_os_error() {
        Some(libc::EINVAL | libc::EOPNOTSUPP) => TrialFailure::NoDirectIo,
        _ => TrialFailure::Io("open", error),
    })?;
    let unsupported = |step| {
        move |error: io::Error| match error.raw_os_error() {
            Some(libc::EINVAL | libc::EOPNOTSUPP) => TrialFailure::NoDirectIo,
            _ => TrialFailure::Io(step, error),
        }
    };
    let mut written = AlignedBuf::zeroed(block_bytes);
    written.truncate(block_bytes);
    written.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at % 251) as u8);
    let whole_write = |file: &File| match file.write_at(&written, 0)? {
        n if n == block_bytes => Ok(()),
        _ => Err(io::Error::from(io::ErrorKind::WriteZero)),
    };
    whole_write(&file).map_err(unsupported("write"))?;
    file.sync_data().map_err(|error| TrialFailure::Io("sync", error))?;
    let mut read = AlignedBuf::zeroed(block_bytes);
    read.truncate(block_bytes);
    file.read_exact_at(&mut read, 0).map_err(unsupported("read"))?;
    if written[..] != read[..] {
        return Err(TrialFailure::Differs);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lessons_o4_o6_l5_doubtful_file_systems_are_named() {
        let cases = [
            (0xef53u64, None),
            (0x5846_5342, None),
            (0x9123_683e, Some("btrfs, which is copy-on-write")),
            (0x2fc1_2fc1, Some("zfs, which is copy-on-write")),
            (0x6969, Some("nfs, which is not a local disk")),
            (0x0102_1994, Some("tmpfs, which is memory")),
            (0x794c_7630, Some("overlay, which is a container's own layer")),
            (0x1234, Some("0x1234, which is unknown")),
        ];
        for (magic, expected) in cases {
            let (name, kind) = classify(magic);
            match (warning(&name, kind), expected) {
                (None, None) => {}
                (Some(warning), Some(part)) => assert!(warning.cause.contains(part), "{warning}"),
                (got, wanted) => panic!("{magic:x}: {got:?}, wanted {wanted:?}"),
            }
        }
    }

    #[test]
    fn block_size_stays_within_what_buffers_are_aligned_for() {
        let facts = |block_bytes| FileSystemFacts { magic: 0, block_bytes, total_bytes: 0, available_bytes: 0 };
        for (reported, used) in [(4096, 4096), (512, 512), (1024, 1024), (131_072, 4096), (0, 4096), (3000, 4096)] {
            assert_eq!(block_bytes(&facts(reported)), used, "{reported}");
        }
    }

    #[test]
    fn lesson_o4_without_o_direct_only_dev_mode_goes_on() {
        let judge = |failure, dev| judge_failure(failure, Path::new("/srv/narad"), "tmpfs", dev);
        let warning = judge(TrialFailure::NoDirectIo, true).unwrap().to_string();
        assert!(warning.contains("buffered") && warning.contains("/srv/narad"));
        let text = judge(TrialFailure::NoDirectIo, false).unwrap_err().to_string();
        assert!(text.contains("tmpfs at /srv/narad has no O_DIRECT") && text.contains("--dev"), "{text}");
        for dev in [false, true] {
            let full = TrialFailure::Io("write", io::Error::from_raw_os_error(libc::ENOSPC));
            assert!(judge(full, dev).unwrap_err().to_string().contains("no space left"));
            let forbidden = TrialFailure::Io("open", io::Error::from_raw_os_error(libc::EACCES));
            let text = judge(forbidden, dev).unwrap_err().to_string();
            assert!(text.contains("not writable for user id") && text.contains("chown or chmod"), "{text}");
            let broken = TrialFailure::Io("sync", io::Error::from_raw_os_error(libc::EIO));
            assert!(judge(broken, dev).unwrap_err().to_string().contains("a trial sync of one block"));
            assert!(judge(TrialFailure::Differs, dev).unwrap_err().to_string().contains("do not use this disk"));
        }
    }

    #[test]
    fn lesson_o3_1_the_trial_leaves_nothing_behind() {
        let directory = std::env::temp_dir().join(format!("narad-trial-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join(".direct-io-trial"), b"of a start that died").unwrap();
        let mut warnings = Vec::new();
        let found = check_file_system(&directory, true, &mut warnings).unwrap();
        assert!(found.block_bytes.is_power_of_two() && !found.name.is_empty());
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
        fs::remove_dir_all(&directory).unwrap();
    }
}
