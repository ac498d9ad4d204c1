//! The file that the drive is measured with: its blocks brought into the asked state, gone when the program is.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{fallocate, fstatfs, statvfs, FallocateFlags};

use super::ring::Memory;
use crate::load::process::NamedFile;
use crate::run::Failure;

/// What stood in a block before it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Blocks {
    /// Allocated, never written (`fallocate`): the first write converts the extent, which costs the journal.
    Unwritten,
    /// Zeros were written once.
    ZeroFilled,
    /// Data of an earlier use.
    Recycled,
}

impl Blocks {
    /// Name in figures.
    pub fn name(self) -> &'static str {
        match self {
            Blocks::Unwritten => "unwritten",
            Blocks::ZeroFilled => "zeroed",
            Blocks::Recycled => "recycled",
        }
    }
}

static NEXT: AtomicUsize = AtomicUsize::new(0);
const PREFIX: &str = ".narad-bench-scratch-";
const FILL_BYTES: usize = 1 << 20;
const BTRFS_SUPER_MAGIC: rustix::fs::FsWord = libc::BTRFS_SUPER_MAGIC as rustix::fs::FsWord;
/// What stays free for others.
const SPARE_BYTES: u64 = 64 << 20;

/// An open scratch file.
pub struct Scratch {
    /// The file.
    pub file: Rc<File>,
    blocks: Blocks,
    bytes: u64,
    cursor: u64,
    path: PathBuf,
    /// Where it keeps its name.
    _named: Option<NamedFile>,
}

impl Scratch {
    /// A file of `bytes` in `dir`, past the page cache when `direct`, with all of its blocks in state `blocks`.
    pub fn new(dir: &Path, bytes: u64, blocks: Blocks, direct: bool) -> Result<Scratch, Failure> {
        remove_leftovers(dir);
        let path = dir.join(format!("{PREFIX}{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
        let flags = if direct { libc::O_DIRECT } else { 0 };
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600).custom_flags(flags);
        let (file, named) = NamedFile::create(&path, |path| options.open(path))
            .map_err(|error| cannot_create(&path, direct, &error))?;
        // A file without a name goes with the process, however that ends. btrfs, though, skips the log tree for such a
        // file, and would look faster than it is: there it keeps its name, and a killed run's file goes with the next.
        let keeps_name = fstatfs(&file).is_ok_and(|fs| fs.f_type == BTRFS_SUPER_MAGIC);
        let named = Some(named).filter(|_| keeps_name);
        let mut scratch = Scratch { file: Rc::new(file), blocks, bytes, cursor: bytes, path, _named: named };
        scratch.ready(1)?;
        Ok(scratch)
    }

    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where the next `bytes` go; `None` when every block was used and a new round of preparing is due.
    pub fn next(&mut self, bytes: u64) -> Option<u64> {
        if self.cursor + bytes > self.bytes {
            if self.blocks != Blocks::Recycled {
                return None;
            }
            self.cursor = 0;
        }
        self.cursor += bytes;
        Some(self.cursor - bytes)
    }

    /// Makes sure that at least `bytes` can be handed out (at most the whole file). Not to be timed.
    pub fn ready(&mut self, bytes: u64) -> Result<(), Failure> {
        if self.bytes - self.cursor >= bytes.min(self.bytes) || (self.blocks == Blocks::Recycled && self.filled()) {
            return Ok(());
        }
        self.prepare().map_err(|error| failed("fill", &self.path, &error))?;
        self.cursor = 0;
        Ok(())
    }

    fn filled(&self) -> bool {
        self.file.metadata().is_ok_and(|meta| meta.len() == self.bytes)
    }

    fn prepare(&mut self) -> io::Result<()> {
        if self.blocks == Blocks::Unwritten {
            self.file.set_len(0)?;
            fallocate(&*self.file, FallocateFlags::empty(), 0, self.bytes)?;
            return self.file.sync_all();
        }
        let fill =
            if self.blocks == Blocks::ZeroFilled { Memory::zeros(FILL_BYTES) } else { Memory::noise(FILL_BYTES) };
        let mut offset = 0;
        while offset < self.bytes {
            let bytes = (self.bytes - offset).min(FILL_BYTES as u64);
            self.file.write_all_at(&fill.slice()[..bytes as usize], offset)?;
            offset += bytes;
        }
        self.file.sync_all()
    }
}

/// Refuses early where `bytes` do not fit.
pub fn require_space(dir: &Path, bytes: u64) -> Result<(), Failure> {
    let stat = statvfs(dir).map_err(|error| {
        Failure(format!(
            "cannot ask {} for its free space: {}: choose an existing directory",
            dir.display(),
            io::Error::from(error)
        ))
    })?;
    let free = stat.f_bavail * stat.f_frsize;
    if free < bytes + SPARE_BYTES {
        return Err(Failure(format!(
            "{} has {} MiB free, and {} MiB are needed: free some, or name another directory",
            dir.display(),
            free >> 20,
            (bytes + SPARE_BYTES) >> 20
        )));
    }
    Ok(())
}

/// Files of runs that were killed where files keep their name.
fn remove_leftovers(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(owner) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) else { continue };
        let pid = owner.split('-').next().unwrap_or_default();
        if !Path::new("/proc").join(pid).exists() {
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn cannot_create(path: &Path, direct: bool, error: &io::Error) -> Failure {
    if direct && error.raw_os_error() == Some(libc::EINVAL) {
        let _ = fs::remove_file(path);
        return Failure(format!(
            "{}: this file system has no direct I/O (O_DIRECT): name a directory on the drive that is to be measured",
            path.parent().unwrap_or(path).display()
        ));
    }
    failed("create", path, error)
}

fn failed(what: &str, path: &Path, error: &io::Error) -> Failure {
    let advice = match error.kind() {
        io::ErrorKind::PermissionDenied => ": name a directory that may be written",
        io::ErrorKind::StorageFull => ": free some space, or name another directory",
        _ => "",
    };
    Failure(format!("cannot {what} the scratch file {}: {error}{advice}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fresh_blocks_are_handed_out_once_and_recycled_ones_again() {
        let dir = std::env::temp_dir();
        let mut zeroed = Scratch::new(&dir, 64 << 10, Blocks::ZeroFilled, false).unwrap();
        assert_eq!(zeroed.next(32 << 10), Some(0));
        assert_eq!(zeroed.next(32 << 10), Some(32 << 10));
        assert_eq!(zeroed.next(4096), None);
        zeroed.ready(4096).unwrap();
        assert_eq!(zeroed.next(4096), Some(0));

        let mut recycled = Scratch::new(&dir, 64 << 10, Blocks::Recycled, false).unwrap();
        for _ in 0..3 {
            assert!(recycled.next(48 << 10).is_some());
        }
        assert_eq!(recycled.file.metadata().unwrap().len(), 64 << 10);
    }

    #[test]
    fn too_little_space_and_a_missing_directory_are_sentences() {
        let Failure(text) = require_space(&std::env::temp_dir(), 1 << 60).unwrap_err();
        assert!(text.contains("MiB are needed"), "{text}");
        let Failure(text) = require_space(Path::new("/nowhere/at/all"), 1).unwrap_err();
        assert!(text.contains("/nowhere/at/all"), "{text}");
    }
}
