//! Writes the consumer positions of all partitions of one shard (storage C69-C84, lessons N30, N31).
//!
//! Acks settle in memory and are not delayed by this. Two cadences follow them: every tick the changed positions go
//! to the page cache, which survives a killed process (D16); once per interval each of them is synced, which survives
//! a power cut (D17), spread over the ticks so that a flush never comes as one burst. Two tasks do it: one writes, one
//! syncs (`cadence`), so that a slow sync of one partition does not keep the acks of the others out of the page cache.
//! Both exist only while something is owed (lesson N53.3).

mod cadence;
mod closing;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};
use std::time::Duration;

use super::position::{self, Position, Range, Slots, AHEAD_FILE, AHEAD_FILE_BYTES, OFFSET_FILE};
use super::position_io::{prime, read_up_to, slot_of};
use crate::io::{Caching, Disk, File, Open, Slice};
use crate::meta::{Destination, Incarnation};
use crate::rt::sync::Notify;
use crate::rt::{self, Instant};
use cadence::Due;

const TICK: Duration = Duration::from_millis(100);
const LEVEL_INTERVAL: Duration = Duration::from_secs(30);
const WARNING_INTERVAL: Duration = Duration::from_secs(60);
/// Handles looked at before a write goes through a temporary one.
const EVICTION_TRIES: usize = 16;

#[derive(Clone, Copy, Debug)]
pub struct CommitterOptions {
    /// Longest time that a position waits for stable storage, 10 ms to 60 s (C71).
    pub interval: Duration,
    /// Position files held open (C82): at most 4096, and a quarter of the descriptor limit.
    pub handles_max: usize,
}

impl Default for CommitterOptions {
    fn default() -> Self {
        CommitterOptions { interval: Duration::from_secs(1), handles_max: 1024 }
    }
}

/// Where the committer reads a partition's live position: settled values only (C75).
pub trait PositionSource {
    /// Fills `acked` with the settled ranges above the frontier, ascending; returns the frontier.
    fn position(&self, acked: &mut Vec<Range>) -> u64;
}

/// What the files of a partition say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// The larger of both files (C78); `None` when neither says anything.
    pub position: Option<Position>,
    /// What `consumer.offset` alone says.
    pub level: u64,
}

/// A partition whose position is kept. The owner of the partition's state marks it when that state has changed.
pub struct Tracked {
    destination: Destination,
    directory: PathBuf,
    source: Weak<dyn PositionSource>,
    slots: Cell<Option<Slots>>,
    file: RefCell<Option<File>>,
    /// Changed since the last window write.
    dirty: Cell<bool>,
    /// When the oldest settled change came that is not in the page cache yet.
    unwritten_since: Cell<Option<Instant>>,
    /// Was busy when its change should have been written.
    missed_tick: Cell<bool>,
    unsynced_since: Cell<Option<Instant>>,
    /// Frontier in the window, and in the anchor.
    window_frontier: Cell<u64>,
    durable_frontier: Cell<u64>,
    /// Frontier in `consumer.offset`.
    level: Cell<u64>,
    level_at: Cell<Instant>,
    level_scheduled: Cell<Option<Instant>>,
    /// An operation on the files is in progress.
    busy: Cell<bool>,
    idle: Notify,
    forgotten: Cell<bool>,
    /// The directory vanished: nothing is written until the partition is dropped (C81).
    stranded: Cell<bool>,
}

struct Busy<'a>(&'a Tracked);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.busy.set(false);
        self.0.idle.notify_all();
    }
}

impl Tracked {
    async fn acquire(&self) -> Busy<'_> {
        while self.busy.get() {
            self.idle.notified().await;
        }
        self.busy.set(true);
        Busy(self)
    }

    fn note_change(&self) {
        if self.unwritten_since.get().is_none() {
            self.unwritten_since.set(Some(rt::now()));
        }
    }

    fn writable(&self) -> bool {
        !self.forgotten.get() && !self.stranded.get()
    }
}

/// One shard's position writer.
pub struct Committer {
    disk: Disk,
    options: CommitterOptions,
    tick: Duration,
    partitions: RefCell<BTreeMap<Destination, Rc<Tracked>>>,
    dirty: RefCell<Vec<Rc<Tracked>>>,
    unsynced: RefCell<Vec<Rc<Tracked>>>,
    due: RefCell<VecDeque<Due>>,
    /// A task takes what is due.
    syncing: Cell<bool>,
    /// First writes of partitions, under way.
    priming: Cell<usize>,
    levels: RefCell<BTreeSet<(Instant, Destination)>>,
    /// Forgotten while an operation on their files was under way.
    leaving: RefCell<Vec<Rc<Tracked>>>,
    /// Partitions with an open file, in the order of opening.
    handles: RefCell<VecDeque<Rc<Tracked>>>,
    /// Files that were created and whose names are not known to be durable.
    unnamed: RefCell<BTreeSet<PathBuf>>,
    running: Cell<bool>,
    work: Notify,
    ticks: Cell<u64>,
    warned_tick: Cell<Instant>,
    warned_wait: Cell<Instant>,
    warned_error: Cell<Instant>,
}

impl Committer {
    pub fn new(disk: Disk, options: CommitterOptions) -> Rc<Committer> {
        Rc::new(Committer {
            disk,
            options,
            tick: TICK.min(options.interval),
            partitions: RefCell::default(),
            dirty: RefCell::default(),
            unsynced: RefCell::default(),
            due: RefCell::default(),
            syncing: Cell::new(false),
            priming: Cell::new(0),
            levels: RefCell::default(),
            leaving: RefCell::default(),
            handles: RefCell::default(),
            unnamed: RefCell::default(),
            running: Cell::new(false),
            work: Notify::new(),
            ticks: Cell::new(0),
            warned_tick: Cell::default(),
            warned_wait: Cell::default(),
            warned_error: Cell::default(),
        })
    }

    /// Reads what the files of a partition say, without keeping anything. A missing directory or file says nothing;
    /// an error means that the position is unknown, and the partition must not be served from a guess.
    pub async fn load(&self, directory: &Path, incarnation: Incarnation) -> io::Result<Stored> {
        let ahead = read_up_to(&self.disk, &directory.join(AHEAD_FILE), AHEAD_FILE_BYTES).await?;
        let offset = read_up_to(&self.disk, &directory.join(OFFSET_FILE), position::OFFSET_RECORD_BYTES as u64).await?;
        let (_, ahead) = Slots::prime(&ahead, incarnation);
        let level = position::decode_offset(&offset, incarnation);
        Ok(Stored { position: Position::merge(ahead, level), level: level.unwrap_or(0) })
    }

    /// Cuts a stored position back to the end of the log it belongs to, durably in both files (G20, lesson D4).
    /// Returns what the files say now. To be awaited whenever a log was opened, before the first append:
    /// later the high watermark no longer tells that records below the position are new.
    pub async fn clamp(&self, directory: &Path, incarnation: Incarnation, high_watermark: u64) -> io::Result<Position> {
        let found = self.load(directory, incarnation).await?.position;
        // Most say nothing: a sync for each partition of a start would be thousands.
        let Some(mut position) = found.clone() else { return Ok(Position::default()) };
        self.settle_found(directory).await?;
        position.clamp(high_watermark);
        if found.as_ref() == Some(&position) {
            return Ok(position);
        }
        tracing::warn!(directory = %directory.display(), frontier = found.map(|p| p.frontier), high_watermark,
            "consumer position lies beyond the end of the log and is cut back: the log has lost records, or its files \
            come from different times; records may be delivered twice");
        let file = self.open_or_create(directory, AHEAD_FILE).await?;
        let mut slots = prime(&file, incarnation).await?;
        let sequence = slots.take_sequence();
        file.write_at(slots.window_at(), slot_of(incarnation, sequence, position.frontier, &position.acked)).await?;
        file.sync_data().await?;
        let level = self.open_or_create(directory, OFFSET_FILE).await?;
        let record = position::encode_offset(incarnation, position.frontier);
        level.write_durable_at(0, Slice::copy_from(&record)).await?;
        Ok(position)
    }

    /// Makes durable what an earlier process left in the page cache: from here on it counts as stored, and while the
    /// partition stays quiet nobody would write it again (D17). Its name may be as young as its content (E1).
    async fn settle_found(&self, directory: &Path) -> io::Result<()> {
        match self.disk.open(&directory.join(AHEAD_FILE), Open::Existing, Caching::Buffered).await {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
            Ok(file) => {
                file.sync_data().await?;
                self.disk.sync_dir(directory).await
            }
        }
    }

    /// Keeps the position of a partition from now on. `level` is what `load` found in `consumer.offset`.
    pub fn track(
        &self,
        destination: Destination,
        directory: PathBuf,
        source: Weak<dyn PositionSource>,
        level: u64,
    ) -> Rc<Tracked> {
        let tracked = Rc::new(Tracked {
            destination,
            directory,
            source,
            slots: Cell::new(None),
            file: RefCell::new(None),
            dirty: Cell::new(false),
            unwritten_since: Cell::new(None),
            missed_tick: Cell::new(false),
            unsynced_since: Cell::new(None),
            window_frontier: Cell::new(0),
            durable_frontier: Cell::new(0),
            level: Cell::new(level),
            level_at: Cell::new(rt::now() + LEVEL_INTERVAL),
            level_scheduled: Cell::new(None),
            busy: Cell::new(false),
            idle: Notify::new(),
            forgotten: Cell::new(false),
            stranded: Cell::new(false),
        });
        let replaced = self.partitions.borrow_mut().insert(destination, tracked.clone());
        debug_assert!(replaced.is_none(), "a partition's old state is dropped before it is opened again (C80)");
        tracked
    }

    /// The partition's settled state has changed: it is on its way to disk within a tick.
    pub fn mark_dirty(self: &Rc<Self>, tracked: &Rc<Tracked>) {
        if tracked.dirty.get() || !tracked.writable() {
            return;
        }
        tracked.dirty.set(true);
        tracked.note_change();
        self.dirty.borrow_mut().push(tracked.clone());
        self.arm();
    }

    /// Whether anything is owed to any file.
    pub fn is_idle(&self) -> bool {
        !self.running.get() && !self.syncing.get() && self.priming.get() == 0
    }

    /// Writes the window slot. The caller holds the partition busy.
    async fn write(&self, tracked: &Rc<Tracked>) -> io::Result<()> {
        if !tracked.writable() {
            return Ok(());
        }
        let file = self.file(tracked).await?;
        if tracked.slots.get().is_none() {
            tracked.slots.set(Some(prime(&file, tracked.destination.incarnation).await?));
        }
        let (Some(mut slots), Some(source)) = (tracked.slots.get(), tracked.source.upgrade()) else { return Ok(()) };
        // From here to the write there is no other turn: what is acked later marks the partition anew.
        tracked.dirty.set(false);
        let mut acked = Vec::new();
        let frontier = source.position(&mut acked);
        drop(source);
        let sequence = slots.take_sequence();
        tracked.slots.set(Some(slots));
        let slot = slot_of(tracked.destination.incarnation, sequence, frontier, &acked);
        let oldest = tracked.unwritten_since.take();
        if let Err(error) = file.write_at(slots.window_at(), slot).await {
            tracked.unwritten_since.set(oldest.or(tracked.unwritten_since.get()));
            tracked.dirty.set(true);
            // An earlier write that still waits for its sync was in the same window, which may be torn now: synced, it
            // would become the anchor, and the good anchor what is written next.
            tracked.unsynced_since.set(None);
            return Err(error);
        }
        tracked.window_frontier.set(frontier);
        if tracked.unsynced_since.get().is_none() {
            tracked.unsynced_since.set(Some(rt::now()));
            self.unsynced.borrow_mut().push(tracked.clone());
        }
        Ok(())
    }

    /// Syncs the window and swaps the roles. The caller holds the partition busy: a window write during the sync
    /// would leave the new anchor half old and half new.
    async fn sync_window(self: &Rc<Self>, tracked: &Rc<Tracked>) -> io::Result<()> {
        if tracked.unsynced_since.get().is_none() || !tracked.writable() {
            return Ok(());
        }
        let synced = match self.file(tracked).await {
            Ok(file) => file.sync_data().await,
            Err(error) => Err(error),
        };
        if let Err(error) = synced {
            // The anchor stays. A failed sync may have dropped the window's pages: write it again in full (C72).
            tracked.unsynced_since.set(None);
            self.mark_dirty(tracked);
            return Err(error);
        }
        if let Some(mut slots) = tracked.slots.get() {
            slots.synced();
            tracked.slots.set(Some(slots));
        }
        tracked.unsynced_since.set(None);
        tracked.durable_frontier.set(tracked.window_frontier.get());
        Ok(())
    }

    fn unschedule_level(&self, tracked: &Tracked) {
        if let Some(at) = tracked.level_scheduled.take() {
            self.levels.borrow_mut().remove(&(at, tracked.destination));
        }
    }

    /// Brings `consumer.offset` level with the durable frontier (C77). Never writes a lower value (lesson N30).
    async fn write_level(&self, tracked: &Tracked) -> io::Result<()> {
        self.unschedule_level(tracked);
        let frontier = tracked.durable_frontier.get();
        if frontier <= tracked.level.get() || !tracked.writable() {
            return Ok(());
        }
        tracked.level_at.set(rt::now() + LEVEL_INTERVAL);
        let file = self.open_or_create(&tracked.directory, OFFSET_FILE).await?;
        let record = position::encode_offset(tracked.destination.incarnation, frontier);
        file.write_durable_at(0, Slice::copy_from(&record)).await?;
        tracked.level.set(frontier);
        Ok(())
    }

    /// The partition's open `consumer.ahead`; kept open while there is room for its handle (C82).
    async fn file(&self, tracked: &Rc<Tracked>) -> io::Result<File> {
        let held = tracked.file.borrow().clone();
        if let Some(file) = held {
            return Ok(file);
        }
        let file = match self.open_or_create(&tracked.directory, AHEAD_FILE).await {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                tracked.stranded.set(true);
                return Err(error);
            }
            other => other?,
        };
        if self.make_room() {
            *tracked.file.borrow_mut() = Some(file.clone());
            self.handles.borrow_mut().push_back(tracked.clone());
        }
        Ok(file)
    }

    fn make_room(&self) -> bool {
        let mut handles = self.handles.borrow_mut();
        for _ in 0..EVICTION_TRIES {
            if handles.len() < self.options.handles_max {
                return true;
            }
            let Some(oldest) = handles.pop_front() else { return true };
            if oldest.busy.get() || oldest.unsynced_since.get().is_some() {
                handles.push_back(oldest);
            } else {
                oldest.file.borrow_mut().take();
            }
        }
        false
    }

    fn drop_handle(&self, tracked: &Rc<Tracked>) {
        if tracked.file.borrow_mut().take().is_some() {
            self.handles.borrow_mut().retain(|held| !Rc::ptr_eq(held, tracked));
        }
    }

    /// Opens a file of a partition directory, made durable by name if it is new. Creates no directory (C80).
    async fn open_or_create(&self, directory: &Path, name: &str) -> io::Result<File> {
        let path = directory.join(name);
        let file = match self.disk.open(&path, Open::Existing, Caching::Buffered).await {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.unnamed.borrow_mut().insert(path.clone());
                self.disk.open(&path, Open::New, Caching::Buffered).await?
            }
            other => other?,
        };
        // A sync of the name that failed is owed by whoever opens the file next (E1).
        if self.unnamed.borrow().contains(&path) {
            self.disk.sync_dir(directory).await?;
            self.unnamed.borrow_mut().remove(&path);
        }
        Ok(file)
    }

    fn report(&self, tracked: &Tracked, action: &str, error: &io::Error) {
        let directory = tracked.directory.display();
        if tracked.stranded.get() {
            tracing::error!(%directory, "partition directory vanished: its consumer position is no longer persisted");
        } else if self.may_warn(&self.warned_error) {
            tracing::warn!(%directory, %error, "{action} the consumer position failed and is retried; acks may come \
                back after a crash until it succeeds. Check the disk");
        }
    }

    fn warn(&self, last: &Cell<Instant>, text: &str) {
        if self.may_warn(last) {
            tracing::warn!(partitions = self.partitions.borrow().len(), "{text}: the disk is slow or overloaded");
        }
    }

    fn may_warn(&self, last: &Cell<Instant>) -> bool {
        let now = rt::now();
        let may = last.get() == Instant::default() || now - last.get() >= WARNING_INTERVAL;
        if may {
            last.set(now);
        }
        may
    }
}

fn spread_of(destination: Destination) -> u64 {
    let mixed = (destination.incarnation.0 ^ u64::from(destination.partition)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed >> 32
}

#[cfg(test)]
#[path = "committer_tests.rs"]
mod tests;
