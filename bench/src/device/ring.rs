//! A bare io_uring with nothing around it: what the drive gives to a program that does nothing else.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use io_uring::{cqueue, opcode, squeue, types, IoUring};

/// Offsets, lengths and memory of direct I/O are multiples of this, in bytes.
pub const ALIGNMENT: usize = 4096;

/// Memory for direct I/O, filled with noise: zeros might be special to the drive, and repeats to one that compresses.
pub struct Memory {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Memory {
    /// `len` bytes of noise.
    pub fn noise(len: usize) -> Memory {
        let mut memory = Memory::zeros(len);
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        for word in memory.slice_mut().chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
        memory
    }

    /// `len` zeros.
    pub fn zeros(len: usize) -> Memory {
        let bytes = vec![0; len + ALIGNMENT];
        let start = bytes.as_ptr().align_offset(ALIGNMENT);
        Memory { bytes, start, len }
    }

    /// All of it.
    pub fn slice(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }

    fn slice_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

/// What one operation consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// One write with `RWF_DSYNC`.
    WriteDsync,
    /// A write and an fdatasync behind it, submitted together (`IOSQE_IO_LINK`).
    WriteLinkedSync,
    /// A write; when it is done, an fdatasync.
    WriteThenSync,
    /// `pwrite` (into the page cache, when the file is buffered); then an fdatasync on the ring.
    CopyThenSync,
    /// One read.
    Read,
    /// One fdatasync.
    Sync,
}

/// Bounds of a run: operations start while there is time and an offset left.
pub struct Bounds<'a> {
    /// Bytes of each operation.
    pub bytes: usize,
    /// Operations in flight.
    pub depth: usize,
    /// How long operations are started.
    pub time: Duration,
    /// Where the next one goes; `None` ends the run.
    pub offsets: &'a mut dyn FnMut() -> Option<u64>,
}

/// A ring and its memory.
pub struct Ring {
    ring: IoUring,
    memory: Memory,
    slot_bytes: usize,
    in_flight: usize,
}

const WRITE: u64 = 0;
const SYNC: u64 = 1;

impl Ring {
    /// A ring for at most `depth` operations of at most `bytes` each.
    pub fn new(depth: usize, bytes: usize) -> io::Result<Ring> {
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build((depth * 2).next_power_of_two().max(4) as u32)
            .map_err(|error| {
                io::Error::new(
                    error.kind(),
                    format!(
                        "io_uring cannot be set up ({error}): a kernel of 6.1 or newer is needed, with io_uring allowed \
                         (sysctl kernel.io_uring_disabled=0, and no seccomp profile that forbids it)"
                    ),
                )
            })?;
        Ok(Ring { ring, memory: Memory::noise(depth * bytes), slot_bytes: bytes, in_flight: 0 })
    }

    /// Runs `operation` on `file` within `bounds`; `done` gets the time that each one took.
    pub fn drive(
        &mut self,
        file: &File,
        operation: Operation,
        bounds: Bounds<'_>,
        done: &mut dyn FnMut(Duration),
    ) -> io::Result<()> {
        let result = self.drive_until(file, operation, bounds, done);
        if result.is_err() {
            self.drain();
        }
        result
    }

    fn drive_until(
        &mut self,
        file: &File,
        operation: Operation,
        bounds: Bounds<'_>,
        done: &mut dyn FnMut(Duration),
    ) -> io::Result<()> {
        let Bounds { bytes, depth, time, offsets } = bounds;
        debug_assert!(bytes <= self.slot_bytes && depth * self.slot_bytes <= self.memory.len);
        let end = Instant::now() + time;
        let mut started = vec![Instant::now(); depth];
        let mut idle: Vec<usize> = (0..depth).rev().collect();
        let mut exhausted = false;
        loop {
            while !exhausted && !idle.is_empty() {
                let now = Instant::now();
                let offset = if now < end { offsets() } else { None };
                let (Some(offset), Some(slot)) = (offset, idle.last().copied()) else {
                    exhausted = true;
                    break;
                };
                idle.pop();
                started[slot] = now;
                self.start(file, operation, slot, offset, bytes)?;
            }
            if self.in_flight == 0 {
                return Ok(());
            }
            self.ring.submit_and_wait(1)?;
            while let Some(entry) = self.reap() {
                self.in_flight -= 1;
                let (slot, part) = ((entry.user_data() >> 1) as usize, entry.user_data() & 1);
                if entry.result() < 0 {
                    return Err(io::Error::from_raw_os_error(-entry.result()));
                }
                if part == WRITE && entry.result() as usize != bytes {
                    let text = format!("{} of {bytes} bytes were transferred", entry.result());
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
                }
                match (operation, part) {
                    (Operation::WriteThenSync, WRITE) => self.push(sync(file, slot), 1)?,
                    (Operation::WriteLinkedSync, WRITE) => {}
                    _ => {
                        done(started[slot].elapsed());
                        idle.push(slot);
                    }
                }
            }
        }
    }

    fn start(&mut self, file: &File, operation: Operation, slot: usize, offset: u64, bytes: usize) -> io::Result<()> {
        let range = slot * self.slot_bytes..slot * self.slot_bytes + bytes;
        let fd = types::Fd(file.as_raw_fd());
        let user_data = (slot as u64) << 1 | WRITE;
        match operation {
            Operation::Read => {
                let into = self.memory.slice_mut()[range].as_mut_ptr();
                self.push([opcode::Read::new(fd, into, bytes as u32).offset(offset).build().user_data(user_data)], 1)
            }
            Operation::Sync => self.push(sync(file, slot), 1),
            Operation::CopyThenSync => {
                file.write_all_at(&self.memory.slice()[range], offset)?;
                self.push(sync(file, slot), 1)
            }
            Operation::WriteDsync | Operation::WriteLinkedSync | Operation::WriteThenSync => {
                let from = self.memory.slice()[range].as_ptr();
                let write = opcode::Write::new(fd, from, bytes as u32).offset(offset);
                match operation {
                    Operation::WriteDsync => {
                        self.push([write.rw_flags(libc::RWF_DSYNC).build().user_data(user_data)], 1)
                    }
                    Operation::WriteLinkedSync => {
                        let linked = write.build().user_data(user_data).flags(squeue::Flags::IO_LINK);
                        let [sync] = sync(file, slot);
                        self.push([linked, sync], 2)
                    }
                    _ => self.push([write.build().user_data(user_data)], 1),
                }
            }
        }
    }

    fn push<const N: usize>(&mut self, entries: [squeue::Entry; N], completions: usize) -> io::Result<()> {
        // SAFETY: the entries name memory of `self.memory`, which moves and goes only with `self`; `drive` returns
        // when no operation is in flight, and `drop` leaks the memory where that could not be reached.
        unsafe { self.ring.submission().push_multiple(&entries) }
            .map_err(|_| io::Error::other("the submission queue is full"))?;
        self.in_flight += completions;
        Ok(())
    }

    fn reap(&mut self) -> Option<cqueue::Entry> {
        self.ring.completion().next()
    }

    /// Waits for what is in flight after an error, so that the next run finds an empty ring.
    fn drain(&mut self) {
        while self.in_flight > 0 && self.ring.submit_and_wait(1).is_ok() {
            self.in_flight -= self.ring.completion().count().min(self.in_flight);
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.drain();
        if self.in_flight > 0 {
            std::mem::forget(std::mem::replace(&mut self.memory, Memory::zeros(0)));
        }
    }
}

fn sync(file: &File, slot: usize) -> [squeue::Entry; 1] {
    let fd: RawFd = file.as_raw_fd();
    let fsync = opcode::Fsync::new(types::Fd(fd)).flags(types::FsyncFlags::DATASYNC);
    [fsync.build().user_data((slot as u64) << 1 | SYNC)]
}
