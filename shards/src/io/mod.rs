//! The only door to files and sockets. `ring` is one io_uring per shard; `sim` is a disk that tears, forgets,
//! rots, fills up and lies, and a network that cuts.
//!
//! All file I/O of the data plane is positioned, block-aligned and whole: a short count is an error (E14).

mod buf;
mod fill;
mod huge;
mod other;
pub mod ring;
pub mod signals;
pub mod sim;
pub mod system;

use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::rc::Rc;

pub use buf::{AlignedBuf, ChunkPool, Slice, ALIGNMENT};
pub use fill::{zero_fill, FillBudget};
pub use other::{Call, OtherDisk, OtherFile, SharedDisk, SharedFile};
pub use ring::{Listener, Stream};

/// How a file is opened. Files are created with mode 0600, directories with 0700 (storage S2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Open {
    /// Must exist.
    Existing,
    /// Must not exist (`O_EXCL`).
    New,
    /// Created when absent.
    Create,
}

/// Whether reads and writes pass the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caching {
    /// `O_DIRECT`: offsets, lengths and memory aligned to the block. Falls back to buffered where `--dev` said so.
    Direct,
    /// Small files: checkpoints, positions, markers. Any offset and length.
    Buffered,
}

/// An entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    pub name: OsString,
    pub directory: bool,
    /// Length of a file in bytes, 0 for a directory.
    pub bytes: u64,
}

/// The machine was short of descriptors or memory when the call came: nothing is wrong with the disk or its files, and the
/// same call may work a moment later.
pub fn is_shortage(error: &io::Error) -> bool {
    let number = error.raw_os_error();
    matches!(number, Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS | libc::EAGAIN))
}

/// A shard's access to the file system that holds the data directory. Cheap to clone.
#[derive(Clone)]
pub enum Disk {
    Ring(ring::RingDisk),
    Sim(sim::SimDisk),
    Other(SharedDisk),
}

/// An open file. Closed when the last clone is gone and no operation is in flight on it.
#[derive(Clone)]
pub enum File {
    Ring(Rc<ring::RingFile>),
    Sim(Rc<sim::SimFile>),
    Other(SharedFile),
}

impl Disk {
    /// Opens a file. A created one is durable only after its directory was synced (E1).
    pub async fn open(&self, path: &Path, how: Open, caching: Caching) -> io::Result<File> {
        match self {
            Disk::Ring(disk) => disk.open(path, how, caching).await.map(|f| File::Ring(Rc::new(f))),
            Disk::Sim(disk) => disk.open(path, how, caching).await.map(|f| File::Sim(Rc::new(f))),
            Disk::Other(disk) => disk.open(path, how, caching).await,
        }
    }

    /// Creates one directory; an existing one is not an error. Durable after its parent was synced.
    pub async fn create_dir(&self, path: &Path) -> io::Result<()> {
        match self {
            Disk::Ring(disk) => disk.create_dir(path).await,
            Disk::Sim(disk) => disk.create_dir(path).await,
            Disk::Other(disk) => disk.create_dir(path).await,
        }
    }

    /// Makes the entries of a directory durable.
    pub async fn sync_dir(&self, path: &Path) -> io::Result<()> {
        match self {
            Disk::Ring(disk) => disk.sync_dir(path).await,
            Disk::Sim(disk) => disk.sync_dir(path).await,
            Disk::Other(disk) => disk.sync_dir(path).await,
        }
    }

    pub async fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        match self {
            Disk::Ring(disk) => disk.rename(from, to).await,
            Disk::Sim(disk) => disk.rename(from, to).await,
            Disk::Other(disk) => disk.rename(from, to).await,
        }
    }

    pub async fn remove_file(&self, path: &Path) -> io::Result<()> {
        match self {
            Disk::Ring(disk) => disk.remove_file(path).await,
            Disk::Sim(disk) => disk.remove_file(path).await,
            Disk::Other(disk) => disk.remove_file(path).await,
        }
    }

    /// Removes a directory and everything below it.
    pub async fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        match self {
            Disk::Ring(disk) => disk.remove_dir_all(path).await,
            Disk::Sim(disk) => disk.remove_dir_all(path).await,
            Disk::Other(disk) => disk.remove_dir_all(path).await,
        }
    }

    /// Entries in name order. A missing directory is `NotFound`.
    pub async fn list(&self, path: &Path) -> io::Result<Vec<Entry>> {
        match self {
            Disk::Ring(disk) => disk.list(path).await,
            Disk::Sim(disk) => disk.list(path).await,
            Disk::Other(disk) => disk.list(path).await,
        }
    }

    /// Bytes that may still be written to the file system.
    pub async fn available_bytes(&self) -> io::Result<u64> {
        match self {
            Disk::Ring(disk) => disk.available_bytes().await,
            Disk::Sim(disk) => disk.available_bytes().await,
            Disk::Other(disk) => disk.available_bytes().await,
        }
    }

    /// Unit of direct I/O, in bytes: offsets, lengths and addresses are multiples of it. A power of two, at most
    /// [`ALIGNMENT`].
    pub fn block_bytes(&self) -> usize {
        match self {
            Disk::Ring(disk) => disk.block_bytes(),
            Disk::Sim(disk) => disk.block_bytes(),
            Disk::Other(disk) => disk.block_bytes(),
        }
    }
}

impl File {
    /// Reads exactly `bytes` at `offset`; the end of the file before that is `UnexpectedEof`. On a direct file both
    /// are block multiples, and the bytes come from the device, not from a cache.
    pub async fn read_at(&self, offset: u64, bytes: usize) -> io::Result<Slice> {
        match self {
            File::Ring(file) => file.read_at(offset, bytes).await,
            File::Sim(file) => file.read_at(offset, bytes).await,
            File::Other(file) => file.read_at(offset, bytes).await,
        }
    }

    /// Writes all of `data` at `offset`, not durably. The memory stays referenced until the kernel is done with it,
    /// also when this future is dropped.
    pub async fn write_at(&self, offset: u64, data: Slice) -> io::Result<()> {
        match self {
            File::Ring(file) => file.write_at(offset, data).await,
            File::Sim(file) => file.write_at(offset, data, sim::Durability::Cached).await,
            File::Other(file) => file.write_at(offset, data).await,
        }
    }

    /// Writes all of `data` at `offset`, durably (`RWF_DSYNC`): `Ok` means that it is on stable storage. After an
    /// error, or a short count, nothing is known of the range (E14).
    pub async fn write_durable_at(&self, offset: u64, data: Slice) -> io::Result<()> {
        match self {
            File::Ring(file) => file.write_durable_at(offset, data).await,
            File::Sim(file) => file.write_at(offset, data, sim::Durability::Synced).await,
            File::Other(file) => file.write_durable_at(offset, data).await,
        }
    }

    /// Makes all completed writes of this file durable (`fdatasync`).
    pub async fn sync_data(&self) -> io::Result<()> {
        match self {
            File::Ring(file) => file.sync_data().await,
            File::Sim(file) => file.sync_data().await,
            File::Other(file) => file.sync_data().await,
        }
    }

    /// Length in bytes.
    pub async fn len(&self) -> io::Result<u64> {
        match self {
            File::Ring(file) => file.len().await,
            File::Sim(file) => file.len().await,
            File::Other(file) => file.len_bytes().await,
        }
    }

    /// Whether the file has a name in some directory. What is written into one without is gone once it is closed.
    pub async fn is_named(&self) -> io::Result<bool> {
        match self {
            File::Ring(file) => file.is_named().await,
            File::Sim(file) => file.is_named(),
            File::Other(file) => file.is_named().await,
        }
    }

    /// Claims blocks for `offset..offset + bytes` and extends the length over them; they read as zeros. Says at
    /// once when the disk is full. First writes into claimed blocks cost the journal: zero-fill what must be fast.
    pub async fn allocate(&self, offset: u64, bytes: u64) -> io::Result<()> {
        match self {
            File::Ring(file) => file.allocate(offset, bytes).await,
            File::Sim(file) => file.allocate(offset, bytes).await,
            File::Other(file) => file.allocate(offset, bytes).await,
        }
    }

    /// Cuts or extends the length.
    pub async fn set_len(&self, bytes: u64) -> io::Result<()> {
        match self {
            File::Ring(file) => file.set_len(bytes).await,
            File::Sim(file) => file.set_len(bytes).await,
            File::Other(file) => file.set_len(bytes).await,
        }
    }
}
