//! Room for the next commit: making segments, rolling, claiming space in steps, zero-filling ahead.

use std::cell::Cell;
use std::io;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use super::append::AppendError;
use super::frame;
use super::partition::{Active, PartitionLog, Sealed, REMIND_EVERY};
use super::read::cool;
use super::segment::{self, SegmentHeader, SparseIndex, DATA_START, FIRST_STEP_BYTES, STEP_BYTES_MAX};
use crate::io::{zero_fill, AlignedBuf, Caching, Open, ALIGNMENT};
use crate::rt::sync::Notify;
use crate::rt::{self, Queue};

const BLOCK: u64 = ALIGNMENT as u64;
const FILL_PIECE_BYTES: u64 = 1 << 20;
/// A segment that filled up within this time has a successor worth preparing in one go.
const BUSY_SEGMENT_MS: u64 = 60_000;
/// Commits that are larger on average go to space that was claimed, not filled.
const FILL_COMMIT_BYTES_MAX: u64 = 64 << 10;
/// After an attempt that failed.
const FILL_AGAIN_AFTER: Duration = Duration::from_secs(5);

/// Zero-filling of the active segment's next step, on a background task. It owns the bytes from the claimed end on
/// until it is done: nobody else may write there.
#[derive(Default)]
pub(super) struct Fill {
    stop: Cell<bool>,
    stopped: Notify,
    done: Cell<bool>,
    finished: Notify,
}

fn failed(what: &str, path: &Path, error: &io::Error) -> AppendError {
    AppendError::Failed(format!(
        "cannot {what} {}: {error}; nothing was stored, and nothing is left behind",
        path.display()
    ))
}

impl PartitionLog {
    /// Bytes of frames that the next commit may have without rolling first.
    pub(super) fn room_bytes(&self) -> u64 {
        let state = self.inner.state.borrow();
        match &state.active {
            Some(active) => self.inner.options.segment_bytes.saturating_sub(active.data_end),
            None => self.segment_room_bytes(),
        }
    }

    /// What so many records, with so many bytes of keys and payloads, take in frames at most.
    pub(super) fn stored_bytes_max(&self, records: u64, body_bytes: u64) -> u64 {
        frame::stored_bytes_max(records, body_bytes, self.inner.options.frame_bytes)
    }

    /// Bytes of frames that an empty segment takes.
    pub(super) fn segment_room_bytes(&self) -> u64 {
        self.inner.options.segment_bytes - DATA_START
    }

    /// Makes the active segment able to take `bytes` more of frames. Every failure is a clean one: committed data, the
    /// next offset and what the next attempt finds are as before (S33).
    pub(super) async fn make_room(&self, bytes: u64, now_ms: u64) -> Result<(), AppendError> {
        if bytes > self.segment_room_bytes() {
            return Err(AppendError::Failed(format!(
                "a commit of {bytes} bytes does not fit a segment of {}; nothing was stored",
                self.inner.options.segment_bytes
            )));
        }
        let (exists, full, aged, owed) = {
            let state = self.inner.state.borrow();
            let active = state.active.as_ref();
            let age = self.inner.retention.bound_ms();
            let aged =
                active.and_then(|a| a.first_ms).is_some_and(|first| age > 0 && now_ms > first.saturating_add(age));
            let full = active.is_some_and(|a| a.data_end + bytes > self.inner.options.segment_bytes);
            (active.is_some(), full, aged, state.roll_owed)
        };
        if !exists {
            self.make_first_segment().await?;
        } else if full || aged || owed {
            self.roll().await?;
        }
        self.claim(bytes).await
    }

    async fn make_first_segment(&self) -> Result<(), AppendError> {
        let (dir, base) = (&self.inner.dir, self.inner.state.borrow().next_offset);
        // Also for a directory that is there: a crash may have come before its parent was synced (E1).
        let made = async {
            self.inner.disk.create_dir(dir).await?;
            self.inner.disk.sync_dir(dir.parent().unwrap_or(dir)).await
        };
        made.await.map_err(|e| failed("create the partition directory", dir, &e))?;
        self.inner.state.borrow_mut().dir_exists = true;
        if let Some((name, bytes)) = self.inner.options.companion {
            let path = dir.join(name);
            self.make_companion(&path, bytes).await.map_err(|e| failed("create", &path, &e))?;
        }
        let active = self.make_segment(base, None).await?;
        if !self.inner.state.borrow().marked {
            let marked = super::stored::mark(&self.inner.disk, dir).await;
            marked.map_err(|e| failed("make", &super::stored::path(dir), &e))?;
            self.inner.state.borrow_mut().marked = true;
        }
        self.inner.state.borrow_mut().active = Some(active);
        Ok(())
    }

    /// What is there already is kept. The name becomes durable with that of the first segment.
    async fn make_companion(&self, path: &Path, bytes: u64) -> io::Result<()> {
        match self.inner.disk.open(path, Open::New, Caching::Direct).await {
            // What a full disk, or a crash, has kept from getting its blocks gets them now.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let file = self.inner.disk.open(path, Open::Existing, Caching::Direct).await?;
                match file.len().await? {
                    has if has < bytes && has.is_multiple_of(BLOCK) => {
                        file.write_durable_at(has, AlignedBuf::zeroed((bytes - has) as usize).freeze()).await
                    }
                    _ => Ok(()),
                }
            }
            Err(error) => Err(error),
            Ok(file) => file.write_durable_at(0, AlignedBuf::zeroed(bytes as usize).freeze()).await,
        }
    }

    /// Makes a segment: its header and first step of zeros in one durable write, then its name (E1). What an earlier
    /// attempt or a crash left under the name holds no record and is overwritten.
    async fn make_segment(&self, base: u64, previous: Option<(u64, u64)>) -> Result<Active, AppendError> {
        let path = self.inner.dir.join(segment::file_name(base));
        let generation = rt::random_u64();
        let header = SegmentHeader::new(generation, base, self.inner.state.borrow().time_floor_ms, previous);
        let mut front = AlignedBuf::zeroed(FIRST_STEP_BYTES as usize);
        header.encode(&mut front[..ALIGNMENT]).map_err(AppendError::Failed)?;
        let made = async {
            let file = self.inner.disk.open(&path, Open::Create, Caching::Direct).await?;
            if file.len().await? > 0 {
                file.set_len(0).await?;
            }
            file.write_durable_at(0, front.freeze()).await?;
            self.inner.disk.sync_dir(&self.inner.dir).await?;
            Ok(file)
        };
        let file = made.await.map_err(|e| failed("create the segment", &path, &e))?;
        Ok(Active {
            base,
            generation,
            file,
            claimed: FIRST_STEP_BYTES,
            data_end: DATA_START,
            tail: Rc::from([]),
            index: SparseIndex::default(),
            first_ms: None,
            last_ms: None,
            fill: None,
        })
    }

    /// Seals the active segment and goes on in a new one. All its frames are synced already, so the order of S18
    /// needs no sync of its own.
    pub(super) async fn roll(&self) -> Result<(), AppendError> {
        self.stop_fill().await;
        self.finish_trim().await;
        let (base, previous) = {
            let state = self.inner.state.borrow();
            (state.next_offset, state.active.as_ref().map(|active| (active.base, active.data_end)))
        };
        assert!(previous.is_some_and(|(sealed, _)| sealed < base), "an empty segment is never sealed");
        self.inner.state.borrow_mut().roll_owed = true;
        let next = self.make_segment(base, previous).await?;
        let trim = {
            let mut state = self.inner.state.borrow_mut();
            state.roll_owed = false;
            let Some(old) = state.active.replace(next) else { return Ok(()) };
            let bytes = old.data_end.next_multiple_of(BLOCK);
            let busy = old.first_ms.zip(old.last_ms).is_some_and(|(first, last)| last - first < BUSY_SEGMENT_MS)
                && state.commit_bytes < FILL_COMMIT_BYTES_MAX;
            if state.sealed.is_empty() {
                state.oldest_first_ms = old.first_ms;
            }
            state.metrics.rolls += 1;
            state.reads += 1;
            let reads = state.reads;
            let last_ms = Some(state.time_floor_ms).filter(|ms| *ms > 0);
            state.sealed.push_back(Sealed {
                base: old.base,
                bytes,
                last_ms,
                opened: Some((old.file.clone(), old.generation)),
                index: old.index,
                read_at: reads,
            });
            cool(&mut state);
            (old.claimed > bytes, old.file, bytes, busy)
        };
        let (needed, file, bytes, busy) = trim;
        if needed {
            self.spawn_trim(file, bytes);
        }
        if busy {
            self.start_fill(STEP_BYTES_MAX - FIRST_STEP_BYTES);
        }
        Ok(())
    }

    /// Gives the unused space of a sealed segment back, off the commit's path.
    fn spawn_trim(&self, file: crate::io::File, bytes: u64) {
        let dir = self.inner.dir.clone();
        let task = rt::spawn(Queue::Background, async move {
            let trimmed = async {
                file.set_len(bytes).await?;
                file.sync_data().await
            };
            if let Err(error) = trimmed.await {
                tracing::warn!(dir = %dir.display(), %error,
                    "partition log: unused space of a sealed segment stays claimed until the next open");
            }
        });
        self.inner.state.borrow_mut().trim = Some(task);
    }

    pub(super) async fn finish_trim(&self) {
        let task = self.inner.state.borrow_mut().trim.take();
        if let Some(task) = task {
            task.await;
        }
    }

    /// Claims space for `bytes` more, if the background has not done it in time.
    async fn claim(&self, bytes: u64) -> Result<(), AppendError> {
        if self.lacking(bytes) == 0 {
            return Ok(());
        }
        self.stop_fill().await;
        let lacking = self.lacking(bytes);
        if lacking == 0 {
            return Ok(());
        }
        let Some((file, claimed)) = self.inner.state.borrow().active.as_ref().map(|a| (a.file.clone(), a.claimed))
        else {
            return Ok(());
        };
        let most = self.inner.options.segment_bytes.saturating_sub(claimed);
        // To a whole number of first steps: a file of any other length was cut short by somebody else (S56).
        let step = lacking.max(segment::next_step_bytes(claimed));
        let step = ((claimed + step).next_multiple_of(FIRST_STEP_BYTES) - claimed).min(most);
        file.allocate(claimed, step).await.map_err(|e| failed("claim space for a segment in", &self.inner.dir, &e))?;
        let mut state = self.inner.state.borrow_mut();
        state.metrics.claims_inline += 1;
        if let Some(active) = state.active.as_mut() {
            active.claimed = claimed + step;
        }
        Ok(())
    }

    fn lacking(&self, bytes: u64) -> u64 {
        let state = self.inner.state.borrow();
        state.active.as_ref().map_or(0, |active| (active.data_end + bytes).saturating_sub(active.claimed))
    }

    /// Starts to prepare the next step once less than half a step is left, unless commits are so large that writing
    /// their blocks twice costs more than the journal commit that it saves.
    pub(super) fn fill_ahead(&self) {
        let step = {
            let state = self.inner.state.borrow();
            // On a full disk each commit would try again.
            if state.fill_failed_at.is_some_and(|at| rt::now() < at + FILL_AGAIN_AFTER) {
                return;
            }
            let Some(active) = state.active.as_ref().filter(|_| state.commit_bytes < FILL_COMMIT_BYTES_MAX) else {
                return;
            };
            let step = segment::next_step_bytes(active.claimed);
            (active.claimed - active.data_end.min(active.claimed) < step / 2).then_some(step)
        };
        if let Some(step) = step {
            self.start_fill(step);
        }
    }

    fn start_fill(&self, bytes: u64) {
        let fill: Rc<Fill> = Rc::default();
        let (file, from, until) = {
            let mut state = self.inner.state.borrow_mut();
            let Some(active) = state.active.as_mut() else { return };
            let until = (active.claimed + bytes).min(self.inner.options.segment_bytes);
            if active.fill.is_some() || until <= active.claimed {
                return;
            }
            active.fill = Some(fill.clone());
            (active.file.clone(), active.claimed, until)
        };
        let (inner, shared) = (Rc::downgrade(&self.inner), self.inner.shared.clone());
        drop(rt::spawn(Queue::Background, async move {
            let filled = async {
                let mut at = from;
                while at < until {
                    let piece = FILL_PIECE_BYTES.min(until - at);
                    let wait = shared.fill.book(piece).saturating_since(rt::now());
                    if !wait.is_zero() && !fill.stop.get() {
                        let _ = rt::timeout(wait, fill.stopped.notified()).await;
                        // whichever comes first
                    }
                    if fill.stop.get() {
                        break;
                    }
                    zero_fill(&file, at, piece, |_| std::future::ready(())).await?;
                    at += piece;
                }
                file.sync_data().await?;
                Ok::<u64, io::Error>(at)
            };
            let filled = filled.await;
            if let Some(inner) = inner.upgrade() {
                let mut state = inner.state.borrow_mut();
                let mut failed = None;
                if let Some(active) = state.active.as_mut() {
                    if active.fill.as_ref().is_some_and(|own| Rc::ptr_eq(own, &fill)) {
                        active.fill = None;
                        match filled {
                            Ok(reached) => active.claimed = reached,
                            Err(error) => failed = Some(error),
                        }
                    }
                }
                if let Some(error) = failed {
                    let now = rt::now();
                    state.fill_failed_at = Some(now);
                    if state.fill_failure_told_at.is_none_or(|told| now >= told + REMIND_EVERY) {
                        state.fill_failure_told_at = Some(now);
                        tracing::warn!(dir = %inner.dir.display(), %error,
                            "partition log: could not prepare space ahead; commits claim their own");
                    }
                }
            }
            fill.done.set(true);
            fill.finished.notify_all();
        }));
    }

    /// Ends a fill after its current piece and waits for it, so that the space behind the claimed end is free.
    pub(super) async fn stop_fill(&self) {
        let fill = self.inner.state.borrow().active.as_ref().and_then(|active| active.fill.clone());
        let Some(fill) = fill else { return };
        fill.stop.set(true);
        fill.stopped.notify_one();
        while !fill.done.get() {
            fill.finished.notified().await;
        }
    }
}
