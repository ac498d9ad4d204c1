//! A simulated disk: what was written, and what would survive a power cut right now. Clones of a [`SimDisk`] share
//! it; it outlives the processes that use it.
//!
//! A call takes seeded virtual time and has its effect at the end of it, whether or not its future still exists: the
//! kernel does not take a submitted write back. Until then the call is in flight, and a crash decides about it.
//! Unsynced sectors survive a power cut in any combination of the contents they had (`image`), directory entries in
//! any subset that respects the order per entry (`tree`). `faults` says which call goes wrong.

mod crash;
mod disk;
mod faults;
mod image;
mod net;
#[cfg(test)]
mod tests;
mod tree;

use std::cell::RefCell;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use disk::{Action, Done, State};
pub use disk::{DiskOptions, Incident};
pub use faults::{Fault, FaultRates, NthCall, Op};
pub use image::Survival;
pub use net::{NetOptions, SimListener, SimNet, SimStream};

use super::{Caching, Entry, Open, Slice};
use crate::rt::{self, Instant};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    Cached,
    Synced,
}

/// One node's disk.
#[derive(Clone)]
pub struct SimDisk {
    state: Rc<RefCell<State>>,
}

pub struct SimFile {
    disk: SimDisk,
    inode: u64,
    path: Rc<Path>,
    caching: Caching,
    /// Crashes that the disk had seen when the file was opened: a handle dies with its process.
    boot: u64,
}

/// A call in flight. Dropping it gives up the answer, not the effect.
struct Pending {
    disk: SimDisk,
    call: u64,
    answered: bool,
}

impl SimDisk {
    /// 512-byte sectors, 4096-byte blocks, no bound, no faults.
    pub fn new(seed: u64) -> SimDisk {
        SimDisk::with(seed, DiskOptions::default())
    }

    pub fn with(seed: u64, options: DiskOptions) -> SimDisk {
        SimDisk { state: Rc::new(RefCell::new(State::new(seed, options))) }
    }

    /// Makes the n-th matching call go wrong.
    pub fn inject(&self, call: NthCall) {
        self.state.borrow_mut().faults.add(call);
    }

    /// Makes calls go wrong by chance from now on.
    pub fn set_rates(&self, rates: FaultRates) {
        self.state.borrow_mut().faults.rates = rates;
    }

    /// No more faults, by count or by chance; the capacity stays.
    pub fn clear_faults(&self) {
        self.state.borrow_mut().faults.clear();
    }

    /// Lets `calls` more calls start; every later one hangs until a crash. To crash at each step of a sequence.
    pub fn freeze_after(&self, calls: u64) {
        self.state.borrow_mut().faults.calls_left = Some(calls);
    }

    /// When the first call hung that [`freeze_after`](Self::freeze_after) did not let through: as far as the disk can
    /// tell, the process was gone from then on.
    pub fn frozen_at(&self) -> Option<Instant> {
        self.state.borrow().faults.frozen_at
    }

    /// Handles and calls that hold this disk, this one included: 1 once nothing of any process is left.
    pub fn holders(&self) -> usize {
        Rc::strong_count(&self.state)
    }

    /// Bounds the claimed bytes; `None` is no bound. Space claimed already stays claimed.
    pub fn set_capacity(&self, bytes: Option<u64>) {
        self.state.borrow_mut().options.capacity_bytes = bytes;
    }

    /// Multiplies the time of every call.
    pub fn set_slowness(&self, factor: u64) {
        self.state.borrow_mut().options.slowness = factor.max(1);
    }

    /// The process was killed: completed writes stay visible, each one in flight lands wholly, in part, not at all,
    /// or a little later. Kill its tasks first.
    pub fn process_crash(&self) {
        self.state.borrow_mut().process_crash(rt::sim::now_in_simulation());
    }

    /// The power failed, or the kernel: of everything that no sync has covered any part may be gone.
    pub fn power_cut(&self) {
        self.state.borrow_mut().power_cut(None);
    }

    /// A power cut with a given outcome, for tests that enumerate.
    pub fn power_cut_as(&self, survival: Survival) {
        self.state.borrow_mut().power_cut(Some(survival));
    }

    /// Flips one bit of a file at rest, durably. False when there is no such byte.
    pub fn flip_bit(&self, path: &Path, offset: u64, bit: u8) -> bool {
        self.state.borrow_mut().flip_bit(path, offset, bit)
    }

    /// Flips one random bit of a random file whose path contains `part` and that is not empty.
    pub fn rot(&self, part: &str) -> Option<(PathBuf, u64)> {
        self.state.borrow_mut().rot(part)
    }

    /// What a reader would see now, without time or faults. `None` when there is no such file.
    pub fn peek(&self, path: &Path) -> Option<Vec<u8>> {
        self.state.borrow_mut().peek(path, |image| image.visible().to_vec())
    }

    /// The content that the worst power cut would leave. The file's directory entry may be gone all the same.
    pub fn peek_durable(&self, path: &Path) -> Option<Vec<u8>> {
        self.state.borrow_mut().peek(path, |image| image.durable())
    }

    /// Whether the path leads to the same file after any power cut (E1).
    pub fn is_name_durable(&self, path: &Path) -> bool {
        self.state.borrow_mut().is_name_durable(path)
    }

    /// Overwrites bytes at rest, durably, to prepare damage. Bytes behind the end are ignored.
    pub fn poke(&self, path: &Path, offset: u64, bytes: &[u8]) {
        self.state.borrow_mut().poke(path, offset, bytes);
    }

    /// All files, in path order.
    pub fn files(&self) -> Vec<PathBuf> {
        self.state.borrow_mut().files()
    }

    /// Bytes claimed on the device.
    pub fn used_bytes(&self) -> u64 {
        self.state.borrow().used_bytes()
    }

    /// Calls started since the disk was made.
    pub fn calls(&self) -> u64 {
        self.state.borrow().calls()
    }

    /// Calls whose effect is still to come.
    pub fn in_flight(&self) -> usize {
        self.state.borrow().in_flight()
    }

    /// What the disk did that an honest one would not, and when, in order.
    pub fn incidents(&self) -> Vec<(Instant, Incident)> {
        self.state.borrow().incidents.clone()
    }

    /// The last calls, for a failure report.
    pub fn trace(&self) -> String {
        self.state.borrow().trace_text()
    }

    async fn call(&self, op: Op, path: &Path, action: Action) -> io::Result<Done> {
        self.call_on(op, Rc::from(path), action).await
    }

    async fn call_on(&self, op: Op, path: Rc<Path>, action: Action) -> io::Result<Done> {
        let (call, due) = self.state.borrow_mut().submit(op, path, action, rt::now())?;
        let mut pending = Pending { disk: self.clone(), call, answered: false };
        match due {
            Some(due) => rt::sleep_until(due).await,
            None => std::future::pending::<()>().await,
        }
        pending.answered = true;
        let mut state = self.state.borrow_mut();
        state.settle(rt::now());
        state.answer(call)
    }

    pub fn block_bytes(&self) -> usize {
        self.state.borrow().options.block_bytes
    }

    pub async fn open(&self, path: &Path, how: Open, caching: Caching) -> io::Result<SimFile> {
        let path: Rc<Path> = Rc::from(path);
        let inode = match self.call_on(Op::Open, path.clone(), Action::Open { how }).await? {
            Done::Inode(inode) => inode,
            _ => return Err(io::ErrorKind::Other.into()),
        };
        let mut state = self.state.borrow_mut();
        state.opened(inode);
        Ok(SimFile { disk: self.clone(), inode, path, caching, boot: state.boot })
    }

    pub async fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.call(Op::CreateDir, path, Action::CreateDir).await.map(drop)
    }

    pub async fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.call(Op::SyncDir, path, Action::SyncDir).await.map(drop)
    }

    pub async fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.call(Op::Rename, from, Action::Rename { to: to.to_owned() }).await.map(drop)
    }

    pub async fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.call(Op::Remove, path, Action::Remove { directory: false }).await.map(drop)
    }

    /// Not one step: a crash may leave any part of it.
    pub async fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        let mut open = vec![path.to_owned()];
        while let Some(directory) = open.last().cloned() {
            let below = open.len();
            for entry in self.list(&directory).await? {
                let path = directory.join(&entry.name);
                if entry.directory {
                    open.push(path);
                } else {
                    self.call(Op::Remove, &path, Action::Remove { directory: false }).await?;
                }
            }
            if open.len() == below {
                self.call(Op::Remove, &directory, Action::Remove { directory: true }).await?;
                open.pop();
            }
        }
        Ok(())
    }

    pub async fn list(&self, path: &Path) -> io::Result<Vec<Entry>> {
        match self.call(Op::List, path, Action::List).await? {
            Done::Entries(entries) => Ok(entries),
            _ => Err(io::ErrorKind::Other.into()),
        }
    }

    pub async fn available_bytes(&self) -> io::Result<u64> {
        rt::sleep(Duration::from_micros(1)).await;
        let mut state = self.state.borrow_mut();
        state.settle(rt::now());
        Ok(state.available_bytes())
    }
}

impl SimFile {
    async fn call(&self, op: Op, action: Action) -> io::Result<Done> {
        if self.boot != self.disk.state.borrow().boot {
            return Err(io::Error::other(format!("{}: the process that opened it has crashed", self.path.display())));
        }
        self.disk.call_on(op, self.path.clone(), action).await
    }

    /// What the kernel refuses on an `O_DIRECT` file.
    fn check_aligned(&self, offset: u64, bytes: usize, address: usize) -> io::Result<()> {
        let block = self.disk.block_bytes();
        let aligned =
            offset.is_multiple_of(block as u64) && bytes.is_multiple_of(block) && address.is_multiple_of(block);
        if self.caching == Caching::Direct && !aligned {
            let text = format!(
                "{}: direct access of {bytes} bytes at {offset} from address {address:#x} is not aligned to {block}",
                self.path.display()
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok(())
    }

    pub async fn read_at(&self, offset: u64, bytes: usize) -> io::Result<Slice> {
        self.check_aligned(offset, bytes, 0)?;
        match self.call(Op::Read, Action::Read { inode: self.inode, offset, bytes }).await? {
            Done::Read(slice) => Ok(slice),
            _ => Err(io::ErrorKind::Other.into()),
        }
    }

    pub async fn write_at(&self, offset: u64, data: Slice, durability: Durability) -> io::Result<()> {
        self.check_aligned(offset, data.len(), data.as_ptr() as usize)?;
        let op = if durability == Durability::Synced { Op::WriteDurable } else { Op::Write };
        self.call(op, Action::Write { inode: self.inode, offset, data, durability }).await.map(drop)
    }

    pub async fn sync_data(&self) -> io::Result<()> {
        let cached = self.caching == Caching::Buffered;
        self.call(Op::SyncData, Action::SyncData { inode: self.inode, cached, upto: 0 }).await.map(drop)
    }

    pub async fn len(&self) -> io::Result<u64> {
        let mut state = self.disk.state.borrow_mut();
        state.settle(rt::now());
        state.file_bytes(self.inode)
    }

    pub fn is_named(&self) -> io::Result<bool> {
        let mut state = self.disk.state.borrow_mut();
        state.settle(rt::now());
        state.is_named(self.inode)
    }

    pub async fn allocate(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.call(Op::Allocate, Action::Allocate { inode: self.inode, offset, bytes }).await.map(drop)
    }

    pub async fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.call(Op::SetLen, Action::SetLen { inode: self.inode, bytes }).await.map(drop)
    }
}

impl Drop for SimFile {
    fn drop(&mut self) {
        let mut state = self.disk.state.borrow_mut();
        if state.boot == self.boot {
            state.closed(self.inode);
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if self.answered {
            return;
        }
        let Some(due) = self.disk.state.borrow_mut().abandon(self.call) else { return };
        // Nobody waits any more, but the effect, and the end of the hold on the memory, come when they were due.
        let disk = self.disk.clone();
        rt::sim::spawn_device(async move {
            rt::sleep_until(due).await;
            disk.state.borrow_mut().settle(rt::now());
        });
    }
}
