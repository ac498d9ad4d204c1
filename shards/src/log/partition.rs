//! The handle of an open log and the state behind it.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use super::retention::{AtClose, Retention};
use super::segment::SparseIndex;
use super::shared::{LogShared, OpenLog};
use super::space::Fill;
use super::{hwm, LogMetrics, LogOptions};
use crate::histogram::coarse_histogram;
use crate::io::{Caching, Disk, File, Open, Slice};
use crate::rt::sync::{Lock, LockGuard};
use crate::rt::{self, Instant, Queue};

/// How often a poisoned log that is asked to commit says so again.
pub(super) const REMIND_EVERY: Duration = Duration::from_secs(60);

/// One partition's log, open. Cheap to clone; all clones are one log.
#[derive(Clone)]
pub struct PartitionLog {
    pub(super) inner: Rc<Inner>,
}

pub(super) struct Inner {
    pub disk: Disk,
    pub dir: PathBuf,
    pub options: LogOptions,
    pub shared: Rc<LogShared>,
    /// Name of this log in the shared cache.
    pub id: u64,
    /// The commit section: commits, rolls and the close take turns, in order of arrival (S82).
    pub section: Lock,
    pub retention: Retention,
    pub state: RefCell<State>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Open,
    /// Its topic is gone: nothing that it holds is worth confirming (S82).
    Retired,
    Closed,
}

pub(super) struct Poison {
    pub cause: Rc<str>,
    /// When it was last said in the log.
    pub told: Instant,
}

pub(super) struct State {
    pub phase: Phase,
    /// Until it is closed.
    pub counted: Option<OpenLog>,
    /// Why appends are refused until the log is reopened (S38).
    pub poison: Option<Poison>,
    /// When space could not be prepared ahead last, and when that was last said.
    pub fill_failed_at: Option<Instant>,
    pub fill_failure_told_at: Option<Instant>,
    /// Ascending, each ending where the next begins (S18).
    pub sealed: VecDeque<Sealed>,
    /// `None` until the first commit makes one.
    pub active: Option<Active>,
    pub next_offset: u64,
    /// A roll was begun and did not end: a file of the next segment may be there, so that whatever went into the old
    /// one from here on would lie behind its end (S18, G24).
    pub roll_owed: bool,
    /// What the log was like when it was closed or retired.
    pub at_close: Option<AtClose>,
    pub high_watermark: u64,
    /// The directory exists, by the listing or by our own making.
    pub dir_exists: bool,
    /// The mark beside the directory says that there was a log ([`super::stored`]).
    pub marked: bool,
    pub hwm_file: HwmFile,
    pub time_floor_ms: u64,
    /// Offsets that are lost for good, half-open, by their start.
    pub gaps: BTreeMap<u64, u64>,
    /// Somebody has read since the last commit (S91).
    pub read_since_commit: bool,
    pub oldest_first_ms: Option<u64>,
    pub on_visible: Option<Rc<dyn Fn()>>,
    /// Moving average of what a commit writes.
    pub commit_bytes: u64,
    pub reads: u64,
    pub metrics: LogMetrics,
    pub trim: Option<rt::Task<()>>,
}

/// What the `hwm` file says, as far as this log knows (S44, S48).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HwmFile {
    Absent,
    /// Found at open, possibly stating a boundary; must be emptied before the first advance.
    Found(Option<u64>),
    Emptied,
}

pub(super) struct Sealed {
    pub base: u64,
    pub bytes: u64,
    /// Commit time of its last record, or a later time (S67); `None` until somebody needs it.
    pub last_ms: Option<u64>,
    /// Descriptor and generation, while it is hot (S86).
    pub opened: Option<(File, u64)>,
    pub index: SparseIndex,
    /// When it was last read, in reads of this log.
    pub read_at: u64,
}

pub(super) struct Active {
    pub base: u64,
    pub generation: u64,
    pub file: File,
    /// Bytes of the file that may be written.
    pub claimed: u64,
    /// Where the next frame goes.
    pub data_end: u64,
    /// The part of the last block that is in use: what a commit rewrites, and what readers get instead of the block
    /// that may be under write (E15).
    pub tail: Rc<[u8]>,
    pub index: SparseIndex,
    pub first_ms: Option<u64>,
    pub last_ms: Option<u64>,
    pub fill: Option<Rc<Fill>>,
}

impl Active {
    /// Start of the last, partly filled block.
    pub fn tail_at(&self) -> u64 {
        self.data_end - self.tail.len() as u64
    }
}

impl State {
    pub fn oldest(&self) -> u64 {
        if let Some(figures) = &self.at_close {
            return figures.oldest;
        }
        let active = self.active.as_ref().map_or(self.next_offset, |active| active.base);
        self.sealed.front().map_or(active, |segment| segment.base)
    }

    fn segments(&self) -> u64 {
        let open = self.sealed.len() as u64 + u64::from(self.active.is_some());
        self.at_close.as_ref().map_or(open, |figures| figures.segments)
    }

    fn bytes(&self) -> u64 {
        let sealed: u64 = self.sealed.iter().map(|segment| segment.bytes).sum();
        let open = sealed + self.active.as_ref().map_or(0, |active| active.data_end);
        self.at_close.as_ref().map_or(open, |figures| figures.bytes)
    }

    fn oldest_ms(&self) -> Option<u64> {
        match (&self.at_close, self.sealed.front()) {
            (Some(figures), _) => figures.oldest_ms,
            (None, Some(_)) => self.oldest_first_ms,
            (None, None) => self.active.as_ref().and_then(|active| active.first_ms),
        }
    }

    /// End of the gap that holds `offset`.
    pub fn gap_end(&self, offset: u64) -> Option<u64> {
        let (_, end) = self.gaps.range(..=offset).next_back()?;
        (offset < *end).then_some(*end)
    }

    /// Notes that `start..end` is lost, merging it with what touches it.
    pub fn add_gap(&mut self, start: u64, end: u64) {
        let (mut from, mut until) = (start, end);
        while let Some((known, known_end)) = self.gaps.range(..=until).next_back().map(|(s, e)| (*s, *e)) {
            if known_end < from {
                break;
            }
            self.gaps.remove(&known);
            from = from.min(known);
            until = until.max(known_end);
        }
        self.gaps.insert(from, until);
    }
}

impl PartitionLog {
    /// Exclusive upper bound of what may be read.
    pub fn high_watermark(&self) -> u64 {
        self.inner.state.borrow().high_watermark
    }

    /// The offset that the next append takes. Above the high watermark only while a hidden tail is waiting (S51).
    pub fn next_offset(&self) -> u64 {
        self.inner.state.borrow().next_offset
    }

    /// Lowest retained offset.
    pub fn oldest(&self) -> u64 {
        self.inner.state.borrow().oldest()
    }

    pub fn segments(&self) -> u64 {
        self.inner.state.borrow().segments()
    }

    /// Bytes of data, headers included; claimed space that is not used yet is not counted.
    pub fn size_bytes(&self) -> u64 {
        self.inner.state.borrow().bytes()
    }

    /// The segment that is appended to, and where its committed bytes end.
    pub fn active_segment(&self) -> Option<(PathBuf, u64)> {
        let state = self.inner.state.borrow();
        let active = state.active.as_ref()?;
        Some((self.inner.dir.join(super::segment::file_name(active.base)), active.data_end))
    }

    /// Commit time of the oldest retained record, ms since the epoch; `None` when there is none or it is unknown.
    pub fn oldest_segment_at(&self) -> Option<u64> {
        self.inner.state.borrow().oldest_ms()
    }

    /// The next offset at or after `offset` that may hold a readable record: steps over retention and known gaps.
    pub fn next_readable(&self, offset: u64) -> u64 {
        let state = self.inner.state.borrow();
        let mut next = offset.max(state.oldest());
        while let Some(end) = state.gap_end(next) {
            next = end;
        }
        next
    }

    /// The first failure, if appends are refused until the log is reopened (S38).
    pub fn is_poisoned(&self) -> Option<String> {
        self.inner.state.borrow().poison.as_ref().map(|poison| poison.cause.to_string())
    }

    pub fn is_closed(&self) -> bool {
        self.inner.state.borrow().phase != Phase::Open
    }

    /// Whether both are handles of one log.
    pub fn is(&self, other: &PartitionLog) -> bool {
        Rc::ptr_eq(&self.inner, &other.inner)
    }

    pub fn dir(&self) -> &Path {
        &self.inner.dir
    }

    pub fn metrics(&self) -> LogMetrics {
        let state = self.inner.state.borrow();
        LogMetrics { poisoned: state.poison.is_some(), ..state.metrics.clone() }
    }

    /// Sets whom to tell that records may have become deliverable, or that the log has closed (S96). Called on the
    /// commit's task, before its callers are answered: it must only take note.
    pub fn set_on_visible(&self, announce: Rc<dyn Fn()>) {
        self.inner.state.borrow_mut().on_visible = Some(announce);
    }

    /// The high watermark once no commit is under way (S105).
    pub async fn settled_high_watermark(&self) -> u64 {
        let _held = self.inner.section.enter().await;
        self.high_watermark()
    }

    /// Waits for the running commit, refuses further ones, and writes the exact boundary (S45, S82). It is closed also if
    /// that could not be written, which is logged: the next open derives it from the records (S47). Goes on when its caller
    /// has gone: a boundary on its way to the disk must not land in a log that is open again.
    pub async fn close(&self) -> Result<(), String> {
        let log = self.clone();
        rt::spawn(Queue::Foreground, async move { log.close_in_turn().await }).await
    }

    async fn close_in_turn(&self) -> Result<(), String> {
        let _pass = self.inner.retention.stop().await;
        let held = self.inner.section.enter().await;
        let phase = self.inner.state.borrow().phase;
        if phase == Phase::Closed {
            return Ok(());
        }
        self.stop_fill().await;
        self.finish_trim().await;
        let written = if phase == Phase::Open { self.write_boundary().await } else { Ok(()) };
        self.leave(Phase::Closed);
        drop(held);
        written.map_err(|error| {
            // Here, for the caller may have gone.
            tracing::warn!(dir = %self.inner.dir.display(), %error,
                "partition log: the exact boundary was not written at close; the next open scans for it");
            format!("exact boundary in {}: {error}", self.inner.dir.display())
        })
    }

    /// Refuses every commit and read from now on, without waiting for anything: the topic is gone. A commit that is
    /// under way ends with an error.
    pub fn retire(&self) {
        if self.inner.state.borrow().phase == Phase::Open {
            self.leave(Phase::Retired);
        }
    }

    fn leave(&self, phase: Phase) {
        let announce = {
            let mut state = self.inner.state.borrow_mut();
            state.phase = phase;
            // A closed log has lost nothing: consumers that still look at it must not take its records for expired
            // and move their position past them (C68).
            state.at_close = Some(AtClose {
                oldest: state.oldest(),
                segments: state.segments(),
                bytes: state.bytes(),
                oldest_ms: state.oldest_ms(),
                front_age: state.at_close.as_ref().map_or_else(|| state.front_age(), |past| past.front_age),
            });
            if phase == Phase::Closed {
                state.active = None;
                state.sealed.clear();
                state.counted = None;
            }
            state.on_visible.clone()
        };
        self.inner.shared.cache.forget(self.inner.id, 0, u64::MAX);
        if let Some(announce) = announce {
            announce();
        }
    }

    async fn write_boundary(&self) -> std::io::Result<()> {
        let (boundary, needed) = {
            let state = self.inner.state.borrow();
            // A log that never had a record needs no boundary, and a boundary file proves that there was one.
            let unused = state.next_offset == 0 && state.poison.is_none() && state.hwm_file == HwmFile::Absent;
            (state.high_watermark, state.dir_exists && !unused)
        };
        if needed {
            self.note_boundary(boundary).await?;
        }
        Ok(())
    }

    /// Makes the boundary file say `boundary`, durably. Only while nothing can advance past it.
    pub(super) async fn note_boundary(&self, boundary: u64) -> std::io::Result<()> {
        let file_state = self.inner.state.borrow().hwm_file;
        let Some(bytes) = hwm::encode(boundary) else { return Ok(()) };
        if file_state == HwmFile::Found(Some(boundary)) {
            return Ok(());
        }
        let (started, path) = (rt::now(), self.inner.dir.join(hwm::FILE_NAME));
        let written = async {
            let file = self.inner.disk.open(&path, Open::Create, Caching::Buffered).await?;
            if file.len().await? > hwm::BYTES as u64 {
                file.set_len(hwm::BYTES as u64).await?;
            }
            file.write_durable_at(0, Slice::copy_from(&bytes)).await?;
            if file_state == HwmFile::Absent {
                self.inner.disk.sync_dir(&self.inner.dir).await?;
            }
            Ok(())
        };
        self.measure_boundary(started, written.await)?;
        self.inner.state.borrow_mut().hwm_file = HwmFile::Found(Some(boundary));
        Ok(())
    }

    pub(super) fn measure_boundary(&self, started: Instant, written: std::io::Result<()>) -> std::io::Result<()> {
        let micros = (rt::now() - started).as_micros() as u64;
        let mut state = self.inner.state.borrow_mut();
        let both = || Box::new([coarse_histogram(), coarse_histogram()]);
        let histograms = state.metrics.boundary_us.get_or_insert_with(both);
        crate::histogram::record(&mut histograms[usize::from(written.is_err())], micros);
        written
    }

    /// Latches the log: appends fail until it is reopened, reads go on (S38, S40).
    pub(super) fn poison(&self, cause: &str) -> Rc<str> {
        let mut state = self.inner.state.borrow_mut();
        let durable_tail = state.high_watermark;
        state.metrics.poisonings += u64::from(state.poison.is_none());
        let poison = state.poison.get_or_insert_with(|| Poison { cause: cause.into(), told: rt::now() });
        let cause = poison.cause.clone();
        tracing::error!(dir = %self.inner.dir.display(), durable_tail, err = %cause,
            "storage: fsync failed; log poisoned until reopened");
        cause
    }

    /// Says again, now and then while commits are refused, what keeps them out and what to do about it.
    pub(super) fn remind_of_poison(&self) {
        let mut state = self.inner.state.borrow_mut();
        let Some(poison) = state.poison.as_mut().filter(|poison| rt::now() >= poison.told + REMIND_EVERY) else {
            return;
        };
        poison.told = rt::now();
        tracing::error!(dir = %self.inner.dir.display(), err = %poison.cause,
            "storage: log still poisoned, its commits are refused and its new records go to sibling partitions. Check \
             the disk (dmesg, smartctl), free or replace it, then restart the broker; nothing answered 202 is lost");
    }

    pub(super) async fn enter(&self) -> LockGuard {
        self.inner.section.enter().await
    }
}
