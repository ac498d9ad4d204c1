//! The disk behind the calls: files, space, calls in flight and what crashes make of them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use super::faults::{Fault, Faults, Op};
use super::image::Image;
use super::tree::{Inode, Tree, ROOT};
use super::Durability;
use crate::io::{AlignedBuf, Entry, Open, Slice};
use crate::rt::sim::Rng;
use crate::rt::Instant;

const TRACE_CALLS: usize = 200;
/// Unit of space.
pub(super) const CLAIM_BYTES: u64 = 4096;

/// What kind of device it is.
#[derive(Clone, Copy, Debug)]
pub struct DiskOptions {
    /// What a power cut keeps or loses as a whole (E15): 512 or 4096.
    pub sector_bytes: usize,
    /// Unit of direct I/O.
    pub block_bytes: usize,
    pub capacity_bytes: Option<u64>,
    /// Bounds of one call's time, before slowness.
    pub call_ns: (u64, u64),
    pub slowness: u64,
}

impl Default for DiskOptions {
    fn default() -> DiskOptions {
        DiskOptions {
            sector_bytes: 512,
            block_bytes: 4096,
            capacity_bytes: None,
            call_ns: (5_000, 400_000),
            slowness: 1,
        }
    }
}

/// Something that an honest disk would not have done: the account of seeds that rot or lie (E33).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Incident {
    /// Said that this is durable, which it was not.
    Lied {
        path: PathBuf,
        op: Op,
        offset: u64,
        bytes: u64,
    },
    /// Said that this was written, which it was not.
    Skipped {
        path: PathBuf,
        offset: u64,
        bytes: u64,
    },
    /// A failed sync dropped what was written since the last one.
    Dropped {
        path: PathBuf,
    },
    Rotted {
        path: PathBuf,
        offset: u64,
        bit: u8,
    },
}

pub(super) enum Action {
    Open { how: Open },
    CreateDir,
    SyncDir,
    Rename { to: PathBuf },
    Remove { directory: bool },
    List,
    Read { inode: Inode, offset: u64, bytes: usize },
    Write { inode: Inode, offset: u64, data: Slice, durability: Durability },
    SyncData { inode: Inode, cached: bool, upto: u64 },
    Allocate { inode: Inode, offset: u64, bytes: u64 },
    SetLen { inode: Inode, bytes: u64 },
}

pub(super) enum Done {
    Nothing,
    Inode(Inode),
    Entries(Vec<Entry>),
    Read(Slice),
}

pub(super) struct Flight {
    op: Op,
    path: Rc<Path>,
    pub(super) action: Action,
    fault: Option<Fault>,
    /// Sectors of a write that have reached the file already.
    landed: BTreeSet<usize>,
    /// Newest serial when the call started: what a sync covers.
    started: u64,
    pub(super) abandoned: bool,
}

pub(super) struct FileNode {
    pub(super) image: Image,
    pub(super) claimed: BTreeSet<u64>,
    pub(super) opens: u32,
    /// No visible entry names it any more.
    pub(super) unlinked: bool,
}

pub(super) struct State {
    pub(super) rng: Rng,
    pub(super) options: DiskOptions,
    pub(super) faults: Faults,
    pub(super) incidents: Vec<(Instant, Incident)>,
    pub(super) boot: u64,
    pub(super) tree: Tree,
    pub(super) files: BTreeMap<Inode, FileNode>,
    pub(super) flights: BTreeMap<(Instant, u64), Flight>,
    pub(super) due: BTreeMap<u64, Instant>,
    pub(super) answers: BTreeMap<u64, io::Result<Done>>,
    trace: VecDeque<(Instant, Op, Rc<Path>, String)>,
    pub(super) next_call: u64,
    next_inode: Inode,
    pub(super) serial: u64,
    pub(super) claimed_blocks: u64,
    pub(super) now: Instant,
}

fn eio() -> io::Error {
    io::Error::from_raw_os_error(libc::EIO)
}

fn no_space() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOSPC)
}

impl State {
    pub(super) fn new(seed: u64, options: DiskOptions) -> State {
        let block = options.block_bytes;
        assert!(block.is_power_of_two() && options.sector_bytes.is_power_of_two() && options.sector_bytes <= block);
        State {
            rng: Rng::new(seed),
            options,
            faults: Faults::default(),
            incidents: Vec::new(),
            boot: 0,
            tree: Tree::new(),
            files: BTreeMap::new(),
            flights: BTreeMap::new(),
            due: BTreeMap::new(),
            answers: BTreeMap::new(),
            trace: VecDeque::new(),
            next_call: 1,
            next_inode: ROOT + 1,
            serial: 0,
            claimed_blocks: 0,
            now: Instant(0),
        }
    }

    /// Puts a call in flight; returns its number and when it ends (`None`: never).
    pub(super) fn submit(
        &mut self,
        op: Op,
        path: Rc<Path>,
        mut action: Action,
        now: Instant,
    ) -> io::Result<(u64, Option<Instant>)> {
        self.settle(now);
        let call = self.next_call;
        self.next_call += 1;
        let fault = self.faults.decide(op, &path, now, &mut self.rng);
        if let Action::SyncData { upto, .. } = &mut action {
            *upto = self.serial;
        }
        let (low, high) = self.options.call_ns;
        let base = Duration::from_nanos(self.rng.range(low, high.max(low + 1)) * self.options.slowness);
        let due = match fault {
            Some(Fault::Hang) => Instant(u64::MAX),
            Some(Fault::Stall(extra)) => now + base + extra,
            _ => now + base,
        };
        let started = self.serial;
        let flight = Flight { op, path, action, fault, landed: BTreeSet::new(), started, abandoned: false };
        self.flights.insert((due, call), flight);
        self.due.insert(call, due);
        Ok((call, (due.0 < u64::MAX).then_some(due)))
    }

    /// Lets every call that was due by `now` have its effect, in that order.
    pub(super) fn settle(&mut self, now: Instant) {
        if now < self.now {
            // The disk moved into another simulation, whose clock starts again: nothing is in flight any more there.
            self.drain_flights();
        }
        self.now = now;
        while let Some((&(due, call), _)) = self.flights.first_key_value() {
            if due > now {
                break;
            }
            self.land(due, call);
        }
    }

    fn drain_flights(&mut self) {
        while let Some((&(due, call), _)) = self.flights.first_key_value() {
            if due.0 == u64::MAX {
                break;
            }
            self.land(due, call);
        }
    }

    fn land(&mut self, due: Instant, call: u64) {
        let Some(mut flight) = self.flights.remove(&(due, call)) else { return };
        self.due.remove(&call);
        let result = self.apply(&mut flight);
        self.note(due, &flight, &result);
        if !flight.abandoned {
            self.answers.insert(call, result);
        }
    }

    pub(super) fn answer(&mut self, call: u64) -> io::Result<Done> {
        let crashed = || Err(io::Error::other("the process that made this call has crashed"));
        self.answers.remove(&call).unwrap_or_else(crashed)
    }

    /// The caller has gone. Returns when the call ends, if it is still to come.
    pub(super) fn abandon(&mut self, call: u64) -> Option<Instant> {
        self.answers.remove(&call);
        let due = *self.due.get(&call)?;
        if let Some(flight) = self.flights.get_mut(&(due, call)) {
            flight.abandoned = true;
        }
        (due.0 < u64::MAX).then_some(due)
    }

    pub(super) fn incident(&mut self, incident: Incident) {
        self.incidents.push((self.now, incident));
    }

    fn note(&mut self, at: Instant, flight: &Flight, result: &io::Result<Done>) {
        let mut text = match &flight.action {
            Action::Read { offset, bytes, .. } => format!("{offset}+{bytes}"),
            Action::Write { offset, data, .. } => format!("{offset}+{}", data.len()),
            Action::Allocate { offset, bytes, .. } => format!("{offset}+{bytes}"),
            Action::SetLen { bytes, .. } => format!("{bytes}"),
            Action::Rename { to } => format!("to {}", to.display()),
            Action::Open { how } => format!("{how:?}"),
            _ => String::new(),
        };
        if let Some(fault) = flight.fault {
            let _ = write!(text, " [{fault:?}]"); // writing to a String cannot fail
        }
        if let Err(error) = result {
            let _ = write!(text, " -> {error}");
        }
        self.say(at, flight.op, flight.path.clone(), text);
    }

    pub(super) fn say(&mut self, at: Instant, op: Op, path: Rc<Path>, text: String) {
        if self.trace.len() >= TRACE_CALLS {
            self.trace.pop_front();
        }
        self.trace.push_back((at, op, path, text));
    }

    pub(super) fn trace_text(&self) -> String {
        let mut text = String::new();
        for (at, op, path, what) in &self.trace {
            let micros = at.0 / 1_000;
            let _ =
                writeln!(text, "{:>9}.{:06} {op:?} {} {what}", micros / 1_000_000, micros % 1_000_000, path.display());
        }
        text
    }

    pub(super) fn apply(&mut self, flight: &mut Flight) -> io::Result<Done> {
        let (op, path, fault, started) = (flight.op, flight.path.clone(), flight.fault, flight.started);
        match (&flight.action, fault) {
            (Action::Write { .. } | Action::SyncData { .. }, Some(Fault::Fail)) => {}
            (_, Some(Fault::Fail)) => return Err(eio()),
            (_, Some(Fault::NoSpace)) => return Err(no_space()),
            (_, Some(Fault::NoDescriptor)) => return Err(io::Error::from_raw_os_error(libc::EMFILE)),
            _ => {}
        }
        self.serial += 1;
        let serial = self.serial;
        match &flight.action {
            Action::Open { how } => self.open(&path, *how, serial).map(Done::Inode),
            Action::CreateDir => match self.tree.find(&path) {
                Some(found) if self.tree.is_directory(found) => Ok(Done::Nothing),
                Some(_) => Err(io::ErrorKind::AlreadyExists.into()),
                None => {
                    let inode = self.next_inode;
                    self.next_inode += 1;
                    self.tree.make_directory(&path, inode, serial).map(|()| Done::Nothing)
                }
            },
            Action::SyncDir => {
                let directory = self.tree.directory(&path)?;
                if matches!(fault, Some(Fault::Lie | Fault::Skip)) {
                    self.incident(Incident::Lied { path: path.to_path_buf(), op, offset: 0, bytes: 0 });
                } else {
                    self.tree.sync(directory, started);
                    self.collect();
                }
                Ok(Done::Nothing)
            }
            Action::Rename { to } => {
                if let Some(replaced) = self.tree.rename(&path, to, serial)? {
                    self.release_unlinked(replaced);
                }
                Ok(Done::Nothing)
            }
            Action::Remove { directory } => {
                let found = self.tree.find(&path).ok_or(io::ErrorKind::NotFound)?;
                match (self.tree.is_directory(found), directory) {
                    (true, false) => return Err(io::ErrorKind::IsADirectory.into()),
                    (false, true) => return Err(io::ErrorKind::NotADirectory.into()),
                    _ => {}
                }
                self.tree.unlink(&path, serial)?;
                self.release_unlinked(found);
                Ok(Done::Nothing)
            }
            Action::List => self.list(&path).map(Done::Entries),
            Action::Read { inode, offset, bytes } => self.read(*inode, *offset, *bytes).map(Done::Read),
            Action::Write { .. } => self.write(flight, serial),
            Action::SyncData { inode, cached, upto } => {
                let file = self.files.get_mut(inode).ok_or(io::ErrorKind::NotFound)?;
                match fault {
                    Some(Fault::Fail) => {
                        file.image.fail_sync(*upto, *cached, &mut self.rng);
                        self.incident(Incident::Dropped { path: path.to_path_buf() });
                        return Err(eio());
                    }
                    Some(Fault::Lie | Fault::Skip) => {
                        let bytes = file.image.bytes();
                        self.incident(Incident::Lied { path: path.to_path_buf(), op, offset: 0, bytes });
                    }
                    _ => file.image.sync(*upto),
                }
                Ok(Done::Nothing)
            }
            Action::Allocate { inode, offset, bytes } => {
                let (inode, offset, end) = (*inode, *offset, *offset + *bytes);
                let wanted = self.unclaimed(inode, offset, end);
                if wanted.len() as u64 * CLAIM_BYTES > self.available_bytes() {
                    return Err(no_space());
                }
                self.claim(inode, wanted);
                let file = self.files.get_mut(&inode).ok_or(io::ErrorKind::NotFound)?;
                file.image.set_bytes(end.max(file.image.bytes()), serial);
                Ok(Done::Nothing)
            }
            Action::SetLen { inode, bytes } => {
                let file = self.files.get_mut(inode).ok_or(io::ErrorKind::NotFound)?;
                file.image.set_bytes(*bytes, serial);
                let gone = file.claimed.split_off(&bytes.div_ceil(CLAIM_BYTES));
                self.claimed_blocks -= gone.len() as u64;
                Ok(Done::Nothing)
            }
        }
    }

    fn open(&mut self, path: &Path, how: Open, serial: u64) -> io::Result<Inode> {
        match (self.tree.find(path), how) {
            (Some(_), Open::New) => Err(io::ErrorKind::AlreadyExists.into()),
            (Some(inode), _) if self.tree.is_directory(inode) => Err(io::ErrorKind::IsADirectory.into()),
            (Some(inode), _) => Ok(inode),
            (None, Open::Existing) => Err(io::ErrorKind::NotFound.into()),
            (None, _) if self.available_bytes() == 0 => Err(no_space()),
            (None, _) => {
                let inode = self.next_inode;
                self.tree.link(path, inode, serial)?;
                self.next_inode += 1;
                let image = Image::new(self.options.sector_bytes);
                self.files.insert(inode, FileNode { image, claimed: BTreeSet::new(), opens: 0, unlinked: false });
                Ok(inode)
            }
        }
    }

    fn list(&self, path: &Path) -> io::Result<Vec<Entry>> {
        let directory = self.tree.directory(path)?;
        let entry = |(name, inode): (&std::ffi::OsString, Inode)| Entry {
            name: name.clone(),
            directory: self.tree.is_directory(inode),
            bytes: self.files.get(&inode).map_or(0, |file| file.image.bytes()),
        };
        Ok(self.tree.entries(directory).map(entry).collect())
    }

    fn read(&mut self, inode: Inode, offset: u64, bytes: usize) -> io::Result<Slice> {
        self.land_racing_writes(inode, offset, bytes);
        let file = self.files.get(&inode).ok_or(io::ErrorKind::NotFound)?;
        let visible = file.image.visible();
        let end = offset.checked_add(bytes as u64).filter(|end| *end <= visible.len() as u64);
        let Some(end) = end else { return Err(io::ErrorKind::UnexpectedEof.into()) };
        let mut buf = AlignedBuf::zeroed(bytes);
        buf[..bytes].copy_from_slice(&visible[offset as usize..end as usize]);
        buf.truncate(bytes);
        Ok(buf.freeze())
    }

    /// A read that races a write sees any mixture of old and new sectors.
    fn land_racing_writes(&mut self, inode: Inode, offset: u64, bytes: usize) {
        let racing = |flight: &Flight| match &flight.action {
            Action::Write { inode: other, offset: at, data, .. } => {
                *other == inode && *at < offset + bytes as u64 && offset < *at + data.len() as u64
            }
            _ => false,
        };
        let keys: Vec<(Instant, u64)> = self.flights.iter().filter(|(_, f)| racing(f)).map(|(key, _)| *key).collect();
        for key in keys {
            if let Some(mut flight) = self.flights.remove(&key) {
                self.land_some(&mut flight);
                self.flights.insert(key, flight);
            }
        }
    }

    /// Lets a random subset of a write's sectors reach the file.
    pub(super) fn land_some(&mut self, flight: &mut Flight) {
        let Action::Write { inode, offset, data, .. } = &flight.action else { return };
        if matches!(flight.fault, Some(Fault::Skip | Fault::NoSpace | Fault::NoDescriptor)) {
            return;
        }
        let (inode, offset, data) = (*inode, *offset, data.clone());
        let count = self.files.get(&inode).map_or(0, |file| file.image.sectors_in(offset, data.len()));
        let rng = &mut self.rng;
        let picked: BTreeSet<usize> =
            (0..count).filter(|index| !flight.landed.contains(index) && rng.chance(1, 2)).collect();
        flight.landed.extend(&picked);
        self.land_sectors(inode, offset, &data, |index| picked.contains(&index));
    }

    /// Claims the space that a write needs, as far as there is any, and lets the chosen sectors reach the file.
    fn land_sectors(&mut self, inode: Inode, offset: u64, data: &[u8], lands: impl Fn(usize) -> bool) {
        let wanted = self.unclaimed(inode, offset, offset + data.len() as u64);
        let fits = (self.available_bytes() / CLAIM_BYTES) as usize;
        let end = wanted.get(fits).map_or(u64::MAX, |block| block * CLAIM_BYTES);
        self.claim(inode, wanted.into_iter().take(fits).collect());
        self.serial += 1;
        let (serial, sector) = (self.serial, self.options.sector_bytes as u64);
        if let Some(file) = self.files.get_mut(&inode) {
            let first = offset / sector;
            file.image.land(offset, data, serial, |index| (first + index as u64) * sector < end && lands(index));
        }
    }

    fn write(&mut self, flight: &mut Flight, serial: u64) -> io::Result<Done> {
        let fault = flight.fault;
        if fault == Some(Fault::Fail) {
            return self.fail_write(flight);
        }
        let Action::Write { inode, offset, data, durability } = &flight.action else { return Ok(Done::Nothing) };
        let (inode, offset, data, durability) = (*inode, *offset, data.clone(), *durability);
        let path = || flight.path.to_path_buf();
        let bytes = data.len() as u64;
        if fault == Some(Fault::Skip) {
            self.incident(Incident::Skipped { path: path(), offset, bytes });
            return Ok(Done::Nothing);
        }
        let fits = self.unclaimed(inode, offset, offset + bytes).len() as u64 * CLAIM_BYTES <= self.available_bytes();
        if !fits && self.rng.chance(1, 2) {
            return Err(no_space());
        }
        let count = self.files.get(&inode).ok_or(io::ErrorKind::NotFound)?.image.sectors_in(offset, data.len());
        let prefix = if fault == Some(Fault::Short) { self.rng.below(count.max(1) as u64) as usize } else { count };
        self.land_sectors(inode, offset, &data, |index| index < prefix);
        if !fits {
            return Err(no_space());
        }
        if fault == Some(Fault::Short) {
            let done = (prefix * self.options.sector_bytes).min(data.len());
            let text = format!("{}: short write, {done} of {bytes} bytes at {offset}", flight.path.display());
            return Err(io::Error::new(io::ErrorKind::WriteZero, text));
        }
        if durability == Durability::Synced {
            if fault == Some(Fault::Lie) {
                self.incident(Incident::Lied { path: path(), op: flight.op, offset, bytes });
            } else if let Some(file) = self.files.get_mut(&inode) {
                file.image.sync_range(offset, data.len(), serial.max(self.serial));
            }
        }
        Ok(Done::Nothing)
    }

    /// EIO: nothing, everything or any part has landed, and any of that may be durable.
    fn fail_write(&mut self, flight: &mut Flight) -> io::Result<Done> {
        let Action::Write { inode, offset, data, durability } = &flight.action else { return Ok(Done::Nothing) };
        let (inode, offset, data, durability) = (*inode, *offset, data.clone(), *durability);
        match self.rng.below(3) {
            0 => {}
            1 => self.land_sectors(inode, offset, &data, |_| true),
            _ => self.land_some(flight),
        }
        if durability == Durability::Synced && self.rng.chance(1, 2) {
            let serial = self.serial;
            if let Some(file) = self.files.get_mut(&inode) {
                file.image.sync_range(offset, data.len(), serial);
            }
        }
        Err(eio())
    }

    fn unclaimed(&self, inode: Inode, from: u64, to: u64) -> Vec<u64> {
        let Some(file) = self.files.get(&inode) else { return Vec::new() };
        (from / CLAIM_BYTES..to.div_ceil(CLAIM_BYTES)).filter(|block| !file.claimed.contains(block)).collect()
    }

    fn claim(&mut self, inode: Inode, blocks: Vec<u64>) {
        if let Some(file) = self.files.get_mut(&inode) {
            self.claimed_blocks += blocks.len() as u64;
            file.claimed.extend(blocks);
        }
    }

    pub(super) fn used_bytes(&self) -> u64 {
        self.claimed_blocks * CLAIM_BYTES
    }

    pub(super) fn available_bytes(&self) -> u64 {
        self.options.capacity_bytes.map_or(1 << 40, |capacity| capacity.saturating_sub(self.used_bytes()))
    }

    pub(super) fn opened(&mut self, inode: Inode) {
        if let Some(file) = self.files.get_mut(&inode) {
            file.opens += 1;
        }
    }

    pub(super) fn closed(&mut self, inode: Inode) {
        if let Some(file) = self.files.get_mut(&inode) {
            file.opens = file.opens.saturating_sub(1);
            if file.unlinked {
                self.release_unlinked(inode);
                self.collect();
            }
        }
    }

    pub(super) fn file_bytes(&self, inode: Inode) -> io::Result<u64> {
        self.files.get(&inode).map(|file| file.image.bytes()).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    pub(super) fn is_named(&self, inode: Inode) -> io::Result<bool> {
        self.files.get(&inode).map(|file| !file.unlinked).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Gives the space of a removed file back; its content stays until no power cut can bring the entry back.
    fn release_unlinked(&mut self, inode: Inode) {
        let Some(file) = self.files.get_mut(&inode) else { return };
        file.unlinked = true;
        if file.opens == 0 {
            self.claimed_blocks -= file.claimed.len() as u64;
            file.claimed.clear();
        }
    }

    pub(super) fn collect(&mut self) {
        let reached = self.tree.collect();
        let mut freed = 0;
        self.files.retain(|inode, file| {
            let stays = reached.contains(inode) || file.opens > 0;
            if !stays {
                freed += file.claimed.len() as u64;
            }
            stays
        });
        self.claimed_blocks -= freed;
    }
}
