//! Files through the ring: positioned, whole, owned by the operation until its completion.
//!
//! Reads of any length are plain operations of this ring, which the kernel splits for the device; a ring that polls for
//! completions hangs on one that is larger than the device takes (lesson O2).
//!
//! What has no opcode (listing, removing a tree, free space) runs on the blocking pool.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use io_uring::{opcode, types};

use super::{Class, Completion, Descriptor, Keep, Memory, Op, Ring};
use crate::io::{system, AlignedBuf, Caching, Entry, Open, Slice, ALIGNMENT};
use crate::rt;

const FILE_MODE: libc::mode_t = 0o600;
const DIRECTORY_MODE: libc::mode_t = 0o700;
const CWD: types::Fd = types::Fd(libc::AT_FDCWD);

/// A shard's access to the file system of the data directory, through its own ring.
#[derive(Clone)]
pub struct RingDisk {
    ring: Rc<Ring>,
    root: Rc<Path>,
    direct: bool,
    block_bytes: usize,
}

/// An open file of a [`RingDisk`].
pub struct RingFile {
    ring: Rc<Ring>,
    descriptor: Rc<Descriptor>,
    path: Box<Path>,
    /// Block of direct I/O, or 1 when the file goes through the page cache.
    block_bytes: usize,
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, format!("path with a zero byte: {path:?}")))
}

/// The kind stays what the kernel said, so that callers can tell a missing file from a full disk.
fn failed(what: &str, path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what} {}: {error}", path.display()))
}

fn outcome(result: i32, what: &str, path: &Path) -> io::Result<u32> {
    if result < 0 {
        return Err(failed(what, path, io::Error::from_raw_os_error(-result)));
    }
    Ok(result as u32)
}

impl RingDisk {
    /// `direct: false` (`--dev`) opens every file through the page cache.
    pub(crate) fn new(ring: Rc<Ring>, root: &Path, direct: bool) -> io::Result<RingDisk> {
        let path = c_path(root)?;
        // SAFETY: zeroed is a valid value of this plain C struct.
        let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
        // SAFETY: both pointers are valid for the call.
        if unsafe { libc::statvfs(path.as_ptr(), &mut stat) } != 0 {
            return Err(failed("cannot look at the file system of", root, io::Error::last_os_error()));
        }
        // The file system's block, not the sector: direct writes below it are serialised.
        let block_bytes = (stat.f_bsize as usize).clamp(512, ALIGNMENT).next_power_of_two();
        Ok(RingDisk { ring, root: root.into(), direct, block_bytes })
    }

    async fn path_op(&self, entry: io_uring::squeue::Entry, keep: Keep, what: &str, path: &Path) -> io::Result<u32> {
        // SAFETY: callers build `entry` from the paths that `keep` owns.
        let op = unsafe { Op::start(&self.ring, Class::File, entry, keep) };
        let Completion { result, .. } = op.await;
        outcome(result, what, path)
    }

    async fn open_fd(&self, path: &Path, flags: i32) -> io::Result<Rc<Descriptor>> {
        let name = c_path(path)?;
        let entry = opcode::OpenAt::new(CWD, name.as_ptr()).flags(flags | libc::O_CLOEXEC).mode(FILE_MODE).build();
        let fd = self.path_op(entry, Keep::open(name), "cannot open", path).await?;
        Ok(Rc::new(Descriptor::new(self.ring.clone(), fd as i32)))
    }

    pub async fn open(&self, path: &Path, how: Open, caching: Caching) -> io::Result<RingFile> {
        let create = match how {
            Open::Existing => 0,
            Open::New => libc::O_CREAT | libc::O_EXCL,
            Open::Create => libc::O_CREAT,
        };
        let direct = self.direct && caching == Caching::Direct;
        let flags = libc::O_RDWR | create | if direct { libc::O_DIRECT } else { 0 };
        let descriptor = self.open_fd(path, flags).await.map_err(|error| match direct {
            true if error.kind() == io::ErrorKind::InvalidInput => io::Error::new(
                error.kind(),
                format!("{error}: this file system has no O_DIRECT; move the data directory, or start with --dev"),
            ),
            _ => error,
        })?;
        let block_bytes = if direct { self.block_bytes } else { 1 };
        Ok(RingFile { ring: self.ring.clone(), descriptor, path: path.into(), block_bytes })
    }

    pub async fn create_dir(&self, path: &Path) -> io::Result<()> {
        let name = c_path(path)?;
        let entry = opcode::MkDirAt::new(CWD, name.as_ptr()).mode(DIRECTORY_MODE).build();
        match self.path_op(entry, Keep::path(name), "cannot create directory", path).await {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other.map(drop),
        }
    }

    pub async fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let descriptor = self.open_fd(path, libc::O_RDONLY | libc::O_DIRECTORY).await?;
        let entry = opcode::Fsync::new(descriptor.get()).build();
        self.path_op(entry, Keep::on(&descriptor, Memory::Nothing), "cannot sync directory", path).await.map(drop)
    }

    pub async fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let (old, new) = (c_path(from)?, c_path(to)?);
        let entry = opcode::RenameAt::new(CWD, old.as_ptr(), CWD, new.as_ptr()).build();
        self.path_op(entry, Keep::paths(old, new), "cannot rename", from).await.map(drop)
    }

    pub async fn remove_file(&self, path: &Path) -> io::Result<()> {
        let name = c_path(path)?;
        let entry = opcode::UnlinkAt::new(CWD, name.as_ptr()).build();
        self.path_op(entry, Keep::path(name), "cannot remove", path).await.map(drop)
    }

    pub async fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        let path = path.to_owned();
        rt::blocking(move || match std::fs::remove_dir_all(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other.map_err(|error| failed("cannot remove directory", &path, error)),
        })
        .await
    }

    pub async fn list(&self, path: &Path) -> io::Result<Vec<Entry>> {
        let path = path.to_owned();
        rt::blocking(move || list_blocking(&path).map_err(|error| failed("cannot list", &path, error))).await
    }

    pub async fn available_bytes(&self) -> io::Result<u64> {
        let root: PathBuf = self.root.to_path_buf();
        rt::blocking(move || {
            let facts = system::file_system(&root);
            let facts = facts.map_err(|error| failed("cannot read the free space of", &root, error))?;
            Ok(facts.available_bytes)
        })
        .await
    }

    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }
}

fn list_blocking(path: &Path) -> io::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        let metadata = match entry.metadata() {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue, // removed meanwhile
            Err(error) => return Err(error),
        };
        let directory = metadata.is_dir();
        entries.push(Entry { name: entry.file_name(), directory, bytes: if directory { 0 } else { metadata.len() } });
    }
    entries.sort();
    Ok(entries)
}

impl RingFile {
    async fn op(&self, entry: io_uring::squeue::Entry, keep: Keep) -> Completion {
        // SAFETY: callers build `entry` from memory that `keep` owns; `keep` holds the descriptor as well.
        unsafe { Op::start(&self.ring, Class::File, entry, keep) }.await
    }

    fn check_aligned(&self, what: &str, offset: u64, bytes: usize) -> io::Result<()> {
        let block = self.block_bytes as u64;
        if offset.is_multiple_of(block) && (bytes as u64).is_multiple_of(block) {
            return Ok(());
        }
        let text = format!("{what} {}: {bytes} bytes at {offset} are not whole blocks", self.path.display());
        Err(io::Error::new(io::ErrorKind::InvalidInput, text))
    }

    pub async fn read_at(&self, offset: u64, bytes: usize) -> io::Result<Slice> {
        const WHAT: &str = "cannot read";
        self.check_aligned(WHAT, offset, bytes)?;
        let mut buf = AlignedBuf::reused(bytes); // the device fills all that is handed out
        let mut done = 0;
        while done < bytes {
            let at = offset + done as u64;
            let target = buf[done..bytes].as_mut_ptr();
            let entry = opcode::Read::new(self.descriptor.get(), target, (bytes - done) as u32).offset(at).build();
            let completion = self.op(entry, Keep::on(&self.descriptor, Memory::Buf(buf))).await;
            let Memory::Buf(returned) = completion.keep.memory else { unreachable!("a read keeps its buffer") };
            buf = returned;
            match completion.result {
                result if result == -libc::EINTR || result == -libc::EAGAIN => continue,
                result => {
                    let count = outcome(result, WHAT, &self.path)? as usize;
                    done += count;
                    // A direct read stops inside a block at the end of the file only.
                    if count == 0 || (done < bytes && !done.is_multiple_of(self.block_bytes)) {
                        let text = format!(
                            "{WHAT} {}: the file ends at {}, {bytes} bytes at {offset} were asked for",
                            self.path.display(),
                            offset + done as u64
                        );
                        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
                    }
                }
            }
        }
        buf.truncate(bytes);
        Ok(buf.freeze())
    }

    pub async fn write_at(&self, offset: u64, data: Slice) -> io::Result<()> {
        self.write(offset, data, 0, "cannot write").await
    }

    pub async fn write_durable_at(&self, offset: u64, data: Slice) -> io::Result<()> {
        self.write(offset, data, libc::RWF_DSYNC, "cannot write durably").await
    }

    async fn write(&self, offset: u64, data: Slice, rw_flags: i32, what: &str) -> io::Result<()> {
        self.check_aligned(what, offset, data.len())?;
        if data.is_empty() {
            return Ok(());
        }
        let (fd, source, bytes) = (self.descriptor.get(), data.as_ptr(), data.len() as u32);
        let entry = match self.ring.registered().index_of(&data) {
            Some(index) => opcode::WriteFixed::new(fd, source, bytes, index).offset(offset).rw_flags(rw_flags).build(),
            None => opcode::Write::new(fd, source, bytes).offset(offset).rw_flags(rw_flags).build(),
        };
        let completion = self.op(entry, Keep::on(&self.descriptor, Memory::Slice { _data: data })).await;
        let written = outcome(completion.result, what, &self.path)?;
        if written != bytes {
            // Never completed by a second write: what the first one left behind is unknown (E14).
            let text = format!("{what} {}: {written} of {bytes} bytes at {offset}", self.path.display());
            return Err(io::Error::new(io::ErrorKind::WriteZero, text));
        }
        Ok(())
    }

    pub async fn sync_data(&self) -> io::Result<()> {
        let entry = opcode::Fsync::new(self.descriptor.get()).flags(types::FsyncFlags::DATASYNC).build();
        let completion = self.op(entry, Keep::on(&self.descriptor, Memory::Nothing)).await;
        outcome(completion.result, "cannot sync", &self.path).map(drop)
    }

    pub async fn len(&self) -> io::Result<u64> {
        Ok(self.status(libc::STATX_SIZE).await?.stx_size)
    }

    pub async fn is_named(&self) -> io::Result<bool> {
        Ok(self.status(libc::STATX_NLINK).await?.stx_nlink > 0)
    }

    async fn status(&self, mask: u32) -> io::Result<Box<libc::statx>> {
        // SAFETY: zeroed is a valid value of this plain C struct.
        let mut stat: Box<libc::statx> = Box::new(unsafe { std::mem::zeroed() });
        let entry = opcode::Statx::new(self.descriptor.get(), c"".as_ptr(), (&raw mut *stat).cast())
            .flags(libc::AT_EMPTY_PATH)
            .mask(mask)
            .build();
        let completion = self.op(entry, Keep::on(&self.descriptor, Memory::Statx(stat))).await;
        outcome(completion.result, "cannot read the status of", &self.path)?;
        match completion.keep.memory {
            Memory::Statx(stat) => Ok(stat),
            _ => unreachable!("statx keeps its buffer"),
        }
    }

    pub async fn allocate(&self, offset: u64, bytes: u64) -> io::Result<()> {
        let entry = opcode::Fallocate::new(self.descriptor.get(), bytes).offset(offset).build();
        let completion = self.op(entry, Keep::on(&self.descriptor, Memory::Nothing)).await;
        outcome(completion.result, "cannot claim space for", &self.path).map(drop)
    }

    pub async fn set_len(&self, bytes: u64) -> io::Result<()> {
        const WHAT: &str = "cannot set the length of";
        if self.ring.has_ftruncate {
            let entry = opcode::Ftruncate::new(self.descriptor.get(), bytes).build();
            let completion = self.op(entry, Keep::on(&self.descriptor, Memory::Nothing)).await;
            return outcome(completion.result, WHAT, &self.path).map(drop);
        }
        // Before Linux 6.9 the ring has no ftruncate: a duplicate keeps the file open for the other thread.
        // SAFETY: plain system call on a descriptor that we hold.
        let copy = unsafe { libc::fcntl(self.descriptor.get().0, libc::F_DUPFD_CLOEXEC, 0) };
        if copy < 0 {
            return Err(failed(WHAT, &self.path, io::Error::last_os_error()));
        }
        // SAFETY: `copy` was just made and is owned by nobody else.
        let file = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(copy) });
        let path = self.path.to_path_buf();
        rt::blocking(move || file.set_len(bytes).map_err(|error| failed(WHAT, &path, error))).await
    }
}

impl Ring {
    /// Registers the lock's descriptor, so that the kernel holds the lock until the last write of this ring has
    /// landed, also after a kill (E12).
    pub(crate) fn hold(&self, lock: BorrowedFd<'_>) -> io::Result<()> {
        self.with_uring(|uring| uring.submitter().register_files(&[lock.as_raw_fd()]))
    }
}
