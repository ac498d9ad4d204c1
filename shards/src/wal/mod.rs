//! Ingress WAL of one shard (or of an adopted directory, E18): group commit, prepared segments, recovery,
//! checkpoint, compaction. It does not know who dispatches its records, nor what a topic is.
//!
//! A record's way, with the module that has it: staged with its checksum (`staging`, `frame`), sealed into a group
//! and written durably (`flush`), answered, handed to the dispatcher from memory or read back (`read`), covered by
//! the checkpoint, its segment recycled (`keeper`). After a crash: `open`, which asks `recovery` what it sees.

mod ahead;
mod checkpoint;
mod error;
mod flush;
mod frame;
pub(crate) mod fuzz;
mod header;
mod keeper;
mod metrics;
mod open;
mod outcome;
mod read;
mod recovery;
mod segment;
mod source;
mod staging;

#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod open_tests;
#[cfg(test)]
mod ring_tests;
#[cfg(test)]
mod segment_tests;
#[cfg(test)]
mod test_support;
#[cfg(test)]
mod wal_tests;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::rc::Rc;

pub use error::{AppendError, WalOpenError};
pub use frame::NewWalRecord;
pub use metrics::WalMetrics;
pub use source::{ReadBack, ReadLimit, Source};

use crate::io::{ChunkPool, Disk, File, FillBudget};
use crate::meta::Incarnation;
use crate::peer::Record;
use crate::rt::sync::Notify;
use crate::rt::{self, Instant};
use keeper::CheckpointState;
use outcome::Outcome;
use read::Topics;
use segment::{Folder, Segment};
use staging::{Staged, Staging};

/// An accepted record as the dispatcher gets it: from the staging buffer right after its group became durable, or
/// read back from disk.
#[derive(Clone, Debug)]
pub struct WalRecord {
    pub seq: u64,
    pub topic: Rc<str>,
    /// `None` for format 1 records, which name a topic only.
    pub incarnation: Option<Incarnation>,
    pub partition: u32,
    /// Wall clock at accept, ms since the epoch.
    pub accepted_at_ms: u64,
    pub record: Record,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Active,
    /// An adopted directory that no shard of its own has: dispatched, never appended to, then removed (E18).
    Drain,
}

/// How a WAL is opened.
#[derive(Clone)]
pub struct WalOptions {
    pub disk: Disk,
    /// `ingress/<n>` in the data directory.
    pub dir: PathBuf,
    pub dir_number: u32,
    /// Random, made at first start, kept in the data directory (E2).
    pub store_id: u64,
    /// A multiple of 4096, at least 8192.
    pub segment_bytes: u64,
    /// Bound of staging memory; at least 4 MiB are used.
    pub staging_bytes_max: usize,
    /// What the preparation of segments may take of the device.
    pub fill: FillBudget,
    pub mode: Mode,
}

impl WalOptions {
    pub fn new(disk: Disk, dir: PathBuf, dir_number: u32, store_id: u64) -> WalOptions {
        let (segment_bytes, staging_bytes_max) = (64 << 20, 64 << 20);
        let fill = FillBudget::of_shard(1);
        WalOptions { disk, dir, dir_number, store_id, segment_bytes, staging_bytes_max, fill, mode: Mode::Active }
    }
}

/// One ingress WAL. A cheap handle; its tasks go on until [`Wal::close`].
#[derive(Clone)]
pub struct Wal {
    inner: Rc<Inner>,
}

impl std::fmt::Debug for Wal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Wal({})", self.inner.folder.dir.display())
    }
}

pub(crate) struct Inner {
    folder: Folder,
    mode: Mode,
    segment_bytes: u64,
    fill: FillBudget,
    checkpoint_file: File,
    state: RefCell<State>,
    /// Something was staged, or a write came back.
    wake_flusher: Notify,
    /// A checkpoint was stored, or the log closes.
    wake_keeper: Notify,
    /// `durable_next` moved.
    durable: Notify,
    /// Anything that somebody may wait for has happened: a group landed or failed, a task ended.
    progress: Notify,
}

pub(crate) struct State {
    staging: Staging,
    /// Segments that hold records, oldest first; the last one is active.
    chain: VecDeque<Rc<Segment>>,
    spares: VecDeque<Rc<Segment>>,
    next_number: u64,
    preparing: bool,
    /// A failed preparation is not tried again before.
    prepare_not_before: Instant,
    /// No segment could be made: until when the same answer is given without trying.
    hold_off: Option<(Instant, AppendError)>,
    /// Why every append is refused.
    latched: Option<String>,
    /// Our own write failed: nothing is written any more. A latch from outside lets what is staged finish (E11).
    broken: bool,
    closing: bool,
    flusher_ended: bool,
    rotate: bool,
    rotation_armed: bool,
    last_append: Instant,
    checkpoint: CheckpointState,
    /// Why the checkpoint was not stored when that failed last.
    checkpoint_failed: Option<String>,
    on_latched: Vec<Listener>,
    topics: Topics,
    metrics: WalMetrics,
}

impl Wal {
    /// Recovers the directory and makes it ready: E4, E5, E6. A new one gets its first segment prepared (E9).
    /// Takes as long as reading the undispatched segments takes.
    pub async fn open(options: WalOptions) -> Result<Wal, WalOpenError> {
        open::open(options).await
    }

    /// Appends `records` with consecutive sequence numbers and waits until the last of them is durable.
    ///
    /// They are staged together at the first poll, or not at all. From there on the outcome is the true one, and it
    /// comes about even if this future is dropped: a record may be delivered although nobody heard of it.
    pub async fn append(&self, records: &[NewWalRecord<'_>]) -> Result<Range<u64>, AppendError> {
        /// Far more turns of staging memory than the largest batch needs, should others keep taking it first.
        const TURNS_MAX: usize = 64;
        if records.is_empty() {
            let next = self.inner.state.borrow().staging.next_seq;
            return Ok(next..next);
        }
        for _ in 0..TURNS_MAX {
            match self.inner.stage(records)? {
                Some((seqs, outcome, first)) => {
                    return match outcome.wait().await {
                        Ok(()) => Ok(seqs),
                        Err(AppendError::Unavailable(cause)) if first.is_ok() => Err(AppendError::StoredInPart(cause)),
                        Err(error) => Err(error),
                    }
                }
                None => self.inner.progress.notified().await,
            }
        }
        self.inner.state.borrow_mut().metrics.appends_exhausted += 1;
        Err(AppendError::MemoryExhausted)
    }

    /// Lets the owner of the ring register chunks of the staging memory with it, before the first append.
    pub fn with_staging_pool<T>(&self, act: impl FnOnce(&mut ChunkPool) -> T) -> T {
        act(self.inner.state.borrow_mut().staging.pool())
    }

    /// Refuses every append from now on, for good: a write or sync of unknown outcome happened somewhere on this
    /// node (E11). What is staged is still written and truthfully answered.
    pub fn latch(&self, cause: &str) {
        self.inner.state.borrow_mut().latched.get_or_insert_with(|| cause.to_owned());
    }

    /// The segment that is written to, if somebody has removed its file: what goes there now is lost at the exit.
    pub async fn removed_segment(&self) -> Option<PathBuf> {
        let active = self.inner.state.borrow().chain.back().cloned()?;
        let named = active.file()?.is_named().await;
        // A status that cannot be read proves nothing.
        (matches!(named, Ok(false)) && active.active.get()).then(|| active.path.clone())
    }

    /// Why appends are refused, once latched.
    pub fn failed(&self) -> Option<String> {
        self.inner.state.borrow().latched.clone()
    }

    /// Calls `f` with the cause when a write of this WAL latches it, to latch the node's other WALs and to say so.
    pub fn on_latched(&self, f: Box<dyn Fn(&str)>) {
        self.inner.state.borrow_mut().on_latched.push(Rc::from(f));
    }

    /// Where its files lie.
    pub fn directory(&self) -> &Path {
        &self.inner.folder.dir
    }

    /// Refuses new appends, waits until everything staged has its outcome, the checkpoint is synced and nothing of
    /// this WAL is being written any more. Fails if the checkpoint could not be stored; it is closed all the same.
    pub async fn close(&self) -> Result<(), String> {
        self.inner.state.borrow_mut().closing = true;
        self.inner.wake_flusher.notify_one();
        self.inner.wake_keeper.notify_one();
        loop {
            let progress = self.inner.progress.notified();
            let done = {
                let state = self.inner.state.borrow();
                state.staging.is_idle() && state.flusher_ended && !state.preparing && !state.checkpoint.kept
            };
            if done {
                let state = self.inner.state.borrow();
                if state.checkpoint.synced == state.checkpoint.wanted {
                    return Ok(());
                }
                let why = state.checkpoint_failed.as_deref().unwrap_or("it was not stored");
                return Err(format!("dispatch checkpoint in {}: {why}", self.directory().display()));
            }
            progress.await;
        }
    }

    /// Removes a drained directory (E18): it gets another name first, so that it is never found half there.
    /// Refused unless everything is dispatched. The handle is of no use afterwards.
    pub async fn remove_drained(&self) -> io::Result<()> {
        if self.inner.mode != Mode::Drain || !self.fully_dispatched() {
            let text = format!("{} is not a drained WAL directory", self.inner.folder.dir.display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let _ = self.close().await; // its checkpoint goes with it
        let Folder { disk, dir, dir_number, .. } = &self.inner.folder;
        let ingress = dir.parent().unwrap_or(dir);
        open::remove_drained_remains(disk, ingress).await?;
        disk.rename(dir, &ingress.join(format!("{dir_number}.drained"))).await?;
        disk.sync_dir(ingress).await?;
        open::remove_drained_remains(disk, ingress).await.map(|_| ())
    }

    /// Finishes removals of drained directories that a crash interrupted. Shard 0 calls it at start, with `ingress/`.
    pub async fn remove_drained_remains(disk: &Disk, ingress: &Path) -> io::Result<usize> {
        open::remove_drained_remains(disk, ingress).await
    }

    pub fn metrics(&self) -> WalMetrics {
        let (backlog_records, live_bytes) = (self.backlog_records(), self.live_bytes());
        let mut state = self.inner.state.borrow_mut();
        let mut metrics = state.metrics.clone();
        metrics.groups_dropped = state.staging.groups_dropped;
        metrics.failed = state.latched.is_some();
        metrics.backlog_records = backlog_records;
        metrics.staged_records = state.staging.next_seq.saturating_sub(state.staging.durable_next);
        metrics.live_bytes = live_bytes;
        metrics.segments = state.chain.len() as u64;
        metrics.spares = state.spares.len() as u64;
        metrics.staging_bytes = state.staging.bytes_allocated() as u64;
        metrics.staging_chunks_free = state.staging.chunks_free() as u64;
        metrics
    }

    /// Records that a restart would dispatch: the durable end minus the stored checkpoint.
    pub fn backlog_records(&self) -> u64 {
        let state = self.inner.state.borrow();
        state.staging.durable_next.saturating_sub(state.checkpoint.written)
    }

    /// The checkpoint as it was last written, synced or not.
    pub fn checkpoint_written(&self) -> u64 {
        self.inner.state.borrow().checkpoint.written
    }

    /// The value in the bytes of this WAL's checkpoint file; `None` where they do not verify (E6).
    pub fn decode_checkpoint(&self, file: &[u8]) -> Option<u64> {
        let Folder { store_id, dir_number, .. } = &self.inner.folder;
        checkpoint::Checkpoint::decode(file, *store_id, *dir_number).ok().map(|checkpoint| checkpoint.seq)
    }

    /// The checkpoint file, then the segments with records that a restart would need, oldest first.
    pub fn files(&self) -> Vec<PathBuf> {
        let state = self.inner.state.borrow();
        let ends = state.chain.iter().skip(1).map(|next| next.first_seq.get());
        let spent = ends.take_while(|end| *end <= state.checkpoint.synced).count();
        let segments = state.chain.iter().skip(spent).map(|segment| segment.path.clone());
        std::iter::once(self.inner.folder.dir.join("checkpoint")).chain(segments).collect()
    }

    /// Bytes of the segments that hold records and were not reclaimed; an idle WAL comes down to less than 1 MiB.
    pub fn live_bytes(&self) -> u64 {
        let state = self.inner.state.borrow();
        state.chain.iter().map(|segment| segment.tail.get() - frame::BLOCK_BYTES).sum()
    }

    /// Everything in the directory is dispatched, and the checkpoint that says so is on disk.
    pub fn fully_dispatched(&self) -> bool {
        let state = self.inner.state.borrow();
        state.staging.is_idle() && state.checkpoint.synced >= state.staging.durable_next
    }
}

/// Told the cause when a write of this WAL latches it.
type Listener = Rc<dyn Fn(&str)>;

/// Sequence numbers of an append, and what will become of its last group and of its first.
type StagedSeqs = (Range<u64>, Rc<Outcome>, Rc<Outcome>);

impl Inner {
    /// Stages an append; `None` when memory is short for the moment.
    fn stage(self: &Rc<Inner>, records: &[NewWalRecord<'_>]) -> Result<Option<StagedSeqs>, AppendError> {
        let mut guard = self.state.borrow_mut();
        let state = &mut *guard;
        if let Some(cause) = &state.latched {
            return Err(AppendError::LogFailed(cause.clone()));
        }
        if state.closing || self.mode == Mode::Drain {
            let dir = self.folder.dir.display();
            return Err(AppendError::Unavailable(format!("ingress WAL {dir} takes no records: it is being closed")));
        }
        let plan = state.staging.plan(records, self.segment_bytes)?;
        if let Some((until, error)) = state.hold_off.as_ref().filter(|_| plan.rolls > state.spares.len()) {
            if rt::now() < *until {
                return Err(error.clone());
            }
        }
        let State { staging, spares, next_number, .. } = state;
        let staged = staging.stage(plan, records, self.segment_bytes, &mut || {
            spares.pop_front().unwrap_or_else(|| {
                // No spare: the flusher makes this one without preparing it (E9).
                *next_number += 1;
                Rc::new(Segment::planned(&self.folder, *next_number - 1, self.segment_bytes, false))
            })
        });
        match staged {
            Ok(Staged::Yes { seqs, outcome, first }) => {
                state.last_append = rt::now();
                self.wake_flusher.notify_one();
                let wants_spare = state.staging.target_bytes() > self.segment_bytes / 2
                    && state.spares.is_empty()
                    && !state.preparing
                    && state.last_append >= state.prepare_not_before;
                state.preparing |= wants_spare;
                drop(guard);
                if wants_spare {
                    self.start_preparing();
                }
                Ok(Some((seqs, outcome, first)))
            }
            Ok(Staged::NoRoomYet) => Ok(None),
            Err(error) => {
                state.metrics.appends_exhausted += u64::from(error == AppendError::MemoryExhausted);
                Err(error)
            }
        }
    }
}
