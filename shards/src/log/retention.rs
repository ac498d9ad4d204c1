//! Retention of one log: whole segments leave from the front once their last record is older than the bound, never by
//! size, and never the active one.
//!
//! A pass has three steps. An active segment whose last write has expired is sealed (S69). Expired segments are
//! detached in memory, in one turn (S73): from then on the oldest retained offset is behind them. Their files are
//! removed one by one, from the front, each removal durable before the next begins, so that no crash leaves a hole in
//! the row of segments. A pass and the close exclude each other: what a log that was opened again has found in its
//! directory stays there.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;

use super::partition::{PartitionLog, Phase, State};
use super::segment::{self, SegmentHeader, DATA_START};
use crate::histogram::coarse_histogram;
use crate::io::{Caching, Open, ALIGNMENT};
use crate::rt::sync::Lock;
use crate::rt::{self, Instant};

/// What a log keeps for its retention and its idle eviction.
pub(super) struct Retention {
    /// Age in ms after which a record may go, and a segment is rolled (S68). 0: never.
    bound_ms: Cell<u64>,
    /// Held during a pass. Entered before the commit section, by whoever needs both.
    turn: Lock,
    /// The log is about to be closed: a pass ends after the file that it is at.
    closing: Cell<bool>,
    /// Base offsets of detached segments whose files are still there, from the front.
    detached: RefCell<VecDeque<u64>>,
    touched: Cell<Instant>,
}

/// Figures of a log that outlive its closing (S52).
#[derive(Clone, Copy, Debug)]
pub(super) struct AtClose {
    pub oldest: u64,
    pub segments: u64,
    pub bytes: u64,
    pub oldest_ms: Option<u64>,
    pub front_age: FrontAge,
}

/// When the segment that goes next was written last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrontAge {
    /// There is no record.
    Empty,
    /// Commit time of its last record, ms since the epoch.
    LastWrite(u64),
    /// It takes a read to know.
    Unknown,
}

impl Retention {
    pub fn new(bound_ms: u64) -> Retention {
        Retention {
            bound_ms: Cell::new(bound_ms),
            turn: Lock::default(),
            closing: Cell::new(false),
            detached: RefCell::default(),
            touched: Cell::new(rt::now()),
        }
    }

    pub fn bound_ms(&self) -> u64 {
        self.bound_ms.get()
    }

    /// Ends the pass that is under way, and lets no other begin while the guard lives.
    pub async fn stop(&self) -> crate::rt::sync::LockGuard {
        self.closing.set(true);
        self.turn.enter().await
    }

    fn expired(&self, last_ms: u64, now_ms: u64) -> bool {
        let bound_ms = self.bound_ms.get();
        bound_ms > 0 && now_ms > last_ms.saturating_add(bound_ms)
    }
}

impl State {
    pub(super) fn front_age(&self) -> FrontAge {
        match (self.sealed.front(), &self.active) {
            (Some(front), _) => front.last_ms.map_or(FrontAge::Unknown, FrontAge::LastWrite),
            (None, Some(active)) if active.data_end > DATA_START => {
                active.last_ms.map_or(FrontAge::Unknown, FrontAge::LastWrite)
            }
            (None, _) => FrontAge::Empty,
        }
    }
}

impl PartitionLog {
    /// Sets how old a record may get, in ms; 0 keeps records for ever. Holds from the next commit and the next pass
    /// on: nothing has to be closed for it (S77).
    pub fn set_retention_ms(&self, retention_ms: u64) {
        self.inner.retention.bound_ms.set(retention_ms);
    }

    /// Somebody used the log: it is not idle (S81). A commit, a claim and a replay do; figures and passes do not.
    pub fn touch(&self) {
        self.inner.retention.touched.set(rt::now());
    }

    pub fn touched_at(&self) -> Instant {
        self.inner.retention.touched.get()
    }

    /// When the segment that goes next was written last. Of a closed log: as it was when it was closed.
    pub fn front_age(&self) -> FrontAge {
        let state = self.inner.state.borrow();
        state.at_close.as_ref().map_or_else(|| state.front_age(), |figures| figures.front_age)
    }

    /// Resolves when nothing is under way any more that names a file of this log, which has been retired or closed:
    /// its directory may be renamed or replaced.
    pub async fn at_rest(&self) {
        let _pass = self.inner.retention.stop().await;
        let _commit = self.inner.section.enter().await;
        self.stop_fill().await;
        self.finish_trim().await;
    }

    /// Whether a pass would find something to do, as far as memory tells.
    pub fn may_have_expired(&self) -> bool {
        let retention = &self.inner.retention;
        let expired = match self.front_age() {
            FrontAge::Empty => false,
            FrontAge::LastWrite(last_ms) => retention.expired(last_ms, rt::wall_clock_ms()),
            FrontAge::Unknown => retention.bound_ms() > 0,
        };
        expired || !retention.detached.borrow().is_empty()
    }

    /// One pass. Not to be dropped half-way: a removal that is under way must be over before the log is closed.
    /// What fails is logged, counted, and tried again by the next pass.
    pub async fn retain(&self) {
        let retention = &self.inner.retention;
        let _turn = retention.turn.enter().await;
        if self.stopped() || retention.bound_ms() == 0 {
            return;
        }
        let started = rt::now();
        self.seal_expired().await;
        if let Err(error) = self.detach_expired().await {
            tracing::warn!(dir = %self.inner.dir.display(), %error,
                "retention: the age of the oldest segment could not be read; the next pass tries again");
        }
        let mut removed = false;
        while let Some(base) = self.next_detached() {
            if let Err(error) = self.remove_segment(base).await {
                self.inner.state.borrow_mut().metrics.retention_unlinks_failed += 1;
                tracing::warn!(dir = %self.inner.dir.display(), segment = segment::file_name(base), %error,
                    "retention: an expired segment could not be removed; the next pass tries again");
                break;
            }
            retention.detached.borrow_mut().pop_front();
            removed = true;
        }
        if removed && !self.stopped() {
            self.date_oldest().await;
        }
        let mut state = self.inner.state.borrow_mut();
        let passes = state.metrics.retention_us.get_or_insert_with(|| Box::new(coarse_histogram()));
        crate::histogram::record(passes, (rt::now() - started).as_micros() as u64);
    }

    fn stopped(&self) -> bool {
        self.inner.retention.closing.get() || self.inner.state.borrow().phase != Phase::Open
    }

    fn next_detached(&self) -> Option<u64> {
        let next = self.inner.retention.detached.borrow().front().copied();
        next.filter(|_| !self.stopped())
    }

    /// Seals an active segment whose last write has expired, so that the same pass removes it (S69). Only when all in
    /// it is committed (S72), and not on a poisoned log, whose tail only a recovery may judge.
    async fn seal_expired(&self) {
        if !self.active_expired() {
            return;
        }
        let _commit = self.inner.section.enter().await;
        if !self.active_expired() {
            return;
        }
        if let Err(error) = self.roll().await {
            tracing::warn!(dir = %self.inner.dir.display(), %error,
                "retention: the idle segment could not be sealed; the next pass tries again");
        }
    }

    fn active_expired(&self) -> bool {
        let state = self.inner.state.borrow();
        let settled = state.phase == Phase::Open && state.poison.is_none() && state.high_watermark == state.next_offset;
        let written = state.active.as_ref().filter(|active| active.data_end > DATA_START);
        let last_ms = written.and_then(|active| active.last_ms);
        settled && last_ms.is_some_and(|last_ms| self.inner.retention.expired(last_ms, rt::wall_clock_ms()))
    }

    /// Takes expired segments out of the log. Readers that are in one of them keep its file open and finish.
    async fn detach_expired(&self) -> io::Result<()> {
        loop {
            let age = {
                let state = self.inner.state.borrow();
                match state.sealed.is_empty() {
                    true => return Ok(()),
                    false => state.front_age(),
                }
            };
            let last_ms = match age {
                FrontAge::Empty => return Ok(()),
                FrontAge::LastWrite(last_ms) => last_ms,
                FrontAge::Unknown => match self.learn_front_age().await? {
                    Some(last_ms) => last_ms,
                    None => return Ok(()),
                },
            };
            let expired = self.inner.retention.expired(last_ms, rt::wall_clock_ms());
            if self.stopped() || !expired || !self.detach_front() {
                return Ok(());
            }
        }
    }

    /// `false` when the front holds what nobody was shown yet.
    fn detach_front(&self) -> bool {
        let (base, end) = {
            let mut guard = self.inner.state.borrow_mut();
            let state = &mut *guard;
            let after = state.active.as_ref().map_or(state.next_offset, |active| active.base);
            let end = state.sealed.get(1).map_or(after, |next| next.base);
            // One whose successor a crash left unfinished stays: an empty segment alone is a sign of loss.
            let last = state.active.is_none() && state.sealed.len() == 1;
            if last || end > state.high_watermark {
                return false;
            }
            let Some(front) = state.sealed.pop_front() else { return false };
            state.gaps.retain(|_, gap_end| *gap_end > end);
            state.oldest_first_ms = None;
            state.metrics.retention_bytes += front.bytes;
            state.metrics.retention_records += end - front.base;
            (front.base, end)
        };
        self.inner.shared.cache.forget(self.inner.id, base, end);
        self.inner.retention.detached.borrow_mut().push_back(base);
        tracing::info!(dir = %self.inner.dir.display(), first = base, until = end, "retention: expired segment taken out of the log; its file is removed next");
        true
    }

    /// The last write of the front segment, by what its successor's header says of the time before it (S67). Where
    /// that header is damaged the next one answers: later than the truth, never earlier (S71).
    async fn learn_front_age(&self) -> io::Result<Option<u64>> {
        let (successors, newest_ms) = {
            let state = self.inner.state.borrow();
            let sealed = state.sealed.iter().skip(1).map(|segment| segment.base);
            let successors: Vec<u64> = sealed.chain(state.active.as_ref().map(|active| active.base)).collect();
            (successors, state.time_floor_ms)
        };
        let mut learnt = None;
        for base in successors {
            let path = self.inner.dir.join(segment::file_name(base));
            let file = self.inner.disk.open(&path, Open::Existing, Caching::Direct).await?;
            let header = SegmentHeader::decode(&file.read_at(0, ALIGNMENT).await?);
            learnt = header.filter(|header| header.base_offset == base).map(|header| header.time_floor_ms);
            learnt = learnt.filter(|ms| *ms > 0);
            if learnt.is_some() {
                break;
            }
        }
        let learnt = learnt.or(Some(newest_ms).filter(|ms| *ms > 0));
        if let Some(front) = self.inner.state.borrow_mut().sealed.front_mut() {
            front.last_ms = learnt;
        }
        Ok(learnt)
    }

    async fn remove_segment(&self, base: u64) -> io::Result<()> {
        let (disk, dir) = (&self.inner.disk, &self.inner.dir);
        match disk.remove_file(&dir.join(segment::file_name(base))).await {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            // Gone already: an earlier pass removed it and could not make that durable.
            _ => {}
        }
        disk.sync_dir(dir).await
    }
}
