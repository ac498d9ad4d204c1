//! A block device whose every write and flush is recorded: a loop device over a file that a FUSE file system in
//! this process serves from memory. The same server can serve a past state: a power cut at any recorded instant.
//!
//! Needs root, loop devices and FUSE. The loop device turns FUA writes into a write and a flush, so the log is
//! complete: a write is durable once a later flush has been answered.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, WriteFlags,
};

use crate::random::Random;

const FILE_NAME: &str = "disk";
const FILE_INODE: INodeNo = INodeNo(2);
pub const SECTOR_BYTES: usize = 512;

/// One thing that the device was told to do, in the order in which it was answered.
#[derive(Clone, Debug)]
pub enum Operation {
    Write { offset: u64, data: Vec<u8> },
    Flush,
}

#[derive(Default)]
struct State {
    image: Vec<u8>,
    log: Vec<Operation>,
    recording: bool,
    write_delay: Duration,
}

/// The device's memory. Clones share it.
#[derive(Clone, Default)]
pub struct Recorder {
    state: Arc<Mutex<State>>,
}

/// What of the writes that no flush had covered survives a cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unflushed {
    Nothing,
    Everything,
    /// Each sector of each write on its own, drawn from the seed.
    Sectors(u64),
}

impl Recorder {
    pub fn new(image: Vec<u8>) -> Recorder {
        let recorder = Recorder::default();
        recorder.state().image = image;
        recorder
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Starts a new log at the present state; returns that state.
    pub fn start_recording(&self) -> Vec<u8> {
        let mut state = self.state();
        state.log.clear();
        state.recording = true;
        state.image.clone()
    }

    /// From now on a write takes this long before it lands.
    pub fn delay_writes(&self, delay: Duration) {
        self.state().write_delay = delay;
    }

    /// Whether these bytes have landed in one write since the recording began.
    pub fn has_landed(&self, bytes: &[u8]) -> bool {
        let holds = |operation: &Operation| match operation {
            Operation::Write { data, .. } => data.windows(bytes.len()).any(|window| window == bytes),
            Operation::Flush => false,
        };
        self.state().log.iter().any(holds)
    }

    /// Number of operations answered so far: the mark of an instant.
    pub fn position(&self) -> usize {
        self.state().log.len()
    }

    /// Stops recording and hands the log over.
    pub fn take_log(&self) -> Vec<Operation> {
        let mut state = self.state();
        state.recording = false;
        std::mem::take(&mut state.log)
    }
}

/// The image after a power cut right before operation `cut` (a flush) was answered.
pub fn image_after_cut(base: &[u8], log: &[Operation], cut: usize, unflushed: Unflushed) -> Vec<u8> {
    let mut image = base.to_vec();
    let last_flush = log[..cut].iter().rposition(|operation| matches!(operation, Operation::Flush)).unwrap_or(0);
    let mut random = Random::new(match unflushed {
        Unflushed::Sectors(seed) => seed ^ cut as u64,
        _ => 1,
    });
    for (index, operation) in log[..cut].iter().enumerate() {
        let Operation::Write { offset, data } = operation else { continue };
        for (number, sector) in data.chunks(SECTOR_BYTES).enumerate() {
            let survives = index < last_flush
                || match unflushed {
                    Unflushed::Nothing => false,
                    Unflushed::Everything => true,
                    Unflushed::Sectors(_) => random.draw().is_multiple_of(2),
                };
            if survives {
                let start = *offset as usize + number * SECTOR_BYTES;
                image[start..start + sector.len()].copy_from_slice(sector);
            }
        }
    }
    image
}

struct DiskFs {
    recorder: Recorder,
}

impl DiskFs {
    fn attributes(&self, inode: INodeNo) -> Option<FileAttr> {
        let (kind, size) = match inode {
            INodeNo::ROOT => (FileType::Directory, 0),
            FILE_INODE => (FileType::RegularFile, self.recorder.state().image.len() as u64),
            _ => return None,
        };
        Some(FileAttr {
            ino: inode,
            size,
            blocks: size / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm: 0o600,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            flags: 0,
            blksize: 4096,
        })
    }
}

const TTL: Duration = Duration::from_secs(3600);

impl Filesystem for DiskFs {
    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.attributes(FILE_INODE) {
            Some(attributes) if parent == INodeNo::ROOT && name == FILE_NAME => {
                reply.entry(&TTL, &attributes, Generation(0))
            }
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _request: &Request, inode: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(inode) {
            Some(attributes) => reply.attr(&TTL, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _request: &Request, _inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        // Past the page cache: what the loop device writes must reach the recorder, in order.
        reply.opened(FileHandle(1), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let state = self.recorder.state();
        let start = (offset as usize).min(state.image.len());
        let end = (start + size as usize).min(state.image.len());
        reply.data(&state.image[start..end]);
    }

    fn write(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let delay = self.recorder.state().write_delay;
        if !delay.is_zero() {
            std::thread::sleep(delay);
        }
        let mut state = self.recorder.state();
        let start = offset as usize;
        let Some(range) = state.image.get_mut(start..start + data.len()) else { return reply.error(Errno::ENOSPC) };
        range.copy_from_slice(data);
        if state.recording {
            state.log.push(Operation::Write { offset, data: data.to_vec() });
        }
        drop(state);
        reply.written(data.len() as u32);
    }

    fn fsync(&self, _request: &Request, _inode: INodeNo, _handle: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        let mut state = self.recorder.state();
        if state.recording {
            state.log.push(Operation::Flush);
        }
        drop(state);
        reply.ok();
    }
}

/// A recorded disk, formatted or not, attached to a loop device and, if asked, mounted. Taken down on drop.
pub struct AttachedDisk {
    loop_device: String,
    mounted_at: Option<PathBuf>,
    folder: PathBuf,
    session: Option<BackgroundSession>,
}

fn run(program: &str, arguments: &[&str]) -> io::Result<String> {
    let output = Command::new(program).args(arguments).output()?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    let errors = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(io::Error::other(format!("{program} {}: {}: {errors}", arguments.join(" "), output.status)))
}

impl AttachedDisk {
    /// Serves `recorder` under `folder` (made if absent) and attaches a loop device to it.
    pub fn attach(recorder: Recorder, folder: &Path) -> io::Result<AttachedDisk> {
        let fuse = folder.join("fuse");
        std::fs::create_dir_all(&fuse)?;
        let session = fuser::spawn_mount(DiskFs { recorder }, &fuse, &Config::default())?;
        let file = fuse.join(FILE_NAME);
        let loop_device = run("losetup", &["--find", "--show", &file.to_string_lossy()])?;
        Ok(AttachedDisk { loop_device, mounted_at: None, folder: folder.to_owned(), session: Some(session) })
    }

    /// `mkfs.ext4` or `mkfs.xfs`, quick.
    pub fn format(&self, file_system: &str) -> io::Result<()> {
        let force = if file_system == "xfs" { "-f" } else { "-F" };
        run(&format!("mkfs.{file_system}"), &["-q", force, &self.loop_device]).map(|_| ())
    }

    /// Mounts the file system; its journal is replayed by the kernel.
    pub fn mount(&mut self) -> io::Result<PathBuf> {
        let at = self.folder.join("mnt");
        std::fs::create_dir_all(&at)?;
        let place = at.to_string_lossy();
        run("mount", &[&self.loop_device, &place]).or_else(|refused| {
            // XFS refuses a second file system of one UUID, and the recorded one may live on in a mount namespace that
            // somebody made meanwhile.
            run("mount", &["-o", "nouuid", &self.loop_device, &place]).map_err(|_| refused)
        })?;
        self.mounted_at = Some(at.clone());
        Ok(at)
    }

    /// Unmounts; tries for 10 s, since the ring of a process that has just ended holds its files a little longer.
    pub fn unmount(&mut self) -> io::Result<()> {
        let Some(at) = self.mounted_at.take() else { return Ok(()) };
        let started = std::time::Instant::now();
        loop {
            match run("umount", &[&at.to_string_lossy()]) {
                Ok(_) => return Ok(()),
                Err(error) if started.elapsed() > Duration::from_secs(10) => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }
}

impl Drop for AttachedDisk {
    fn drop(&mut self) {
        // A killed process keeps the file system busy until the kernel has torn its ring down.
        let mounted = self.mounted_at.clone();
        let freed = (0..50).any(|attempt| {
            if attempt > 0 {
                std::thread::sleep(Duration::from_millis(100));
            }
            self.mounted_at.clone_from(&mounted);
            self.unmount().is_ok()
        });
        if !freed {
            let _ = run("umount", &["-l", &self.folder.join("mnt").to_string_lossy()]);
        }
        let _ = run("losetup", &["--detach", &self.loop_device]);
        drop(self.session.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_keeps_what_was_flushed_and_any_subset_of_the_rest() {
        let write = |offset: usize, byte: u8, sectors: usize| Operation::Write {
            offset: (offset * SECTOR_BYTES) as u64,
            data: vec![byte; sectors * SECTOR_BYTES],
        };
        let base = vec![0; 16 * SECTOR_BYTES];
        let log = [write(0, 1, 2), Operation::Flush, write(1, 2, 8), Operation::Flush];
        let sector = |image: &[u8], index: usize| image[index * SECTOR_BYTES];
        let nothing = image_after_cut(&base, &log, 3, Unflushed::Nothing);
        assert_eq!((sector(&nothing, 0), sector(&nothing, 1), sector(&nothing, 2)), (1, 1, 0));
        let everything = image_after_cut(&base, &log, 3, Unflushed::Everything);
        assert_eq!((sector(&everything, 1), sector(&everything, 8)), (2, 2));
        let some = image_after_cut(&base, &log, 3, Unflushed::Sectors(5));
        let kept = (1..9).filter(|i| sector(&some, *i) == 2).count();
        assert!(sector(&some, 0) == 1 && kept > 0 && kept < 8, "{kept}");
    }
}
