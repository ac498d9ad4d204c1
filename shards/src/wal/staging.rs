//! Group commit without I/O: records are staged into groups, groups are submitted, complete in order, and stay in
//! memory for the dispatcher. The driver writes what [`Staging::submit`] hands out and reports back.
//!
//! A group is a contiguous, block-aligned range of a chunk of staging memory, and of one segment.

use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;

use super::frame::{self, round_up_to_block, Head, NewWalRecord, BLOCK_BYTES, CHUNK_BYTES, WRITE_WINDOW_BYTES};
use super::outcome::Outcome;
use super::segment::Segment;
use super::AppendError;
use crate::io::{AlignedBuf, ChunkPool, Slice};
use crate::rt::Instant;

/// Never more writes in flight than this.
const FLIGHTS_MAX: usize = 4;
/// Below this many records in flight few callers wait, and a second group may start (E7).
const FEW_RECORDS: u64 = 16;

/// Where the next frame would go: the one place that decides about group borders.
#[derive(Clone, Copy)]
struct Cursor {
    /// Left of the chunk, counted from the start of the open group.
    chunk_left: usize,
    /// Bytes of the open group.
    used: usize,
    /// Offset of the open group in its segment.
    offset: u64,
    segment_bytes: u64,
}

#[derive(Clone, Copy, Default)]
struct Placement {
    new_segment: bool,
    new_chunk: bool,
}

impl Cursor {
    fn fits_segment(&self, padded: usize) -> bool {
        self.offset + round_up_to_block((self.used + padded) as u64) <= self.segment_bytes
    }

    fn close(&mut self) {
        let taken = self.used.next_multiple_of(BLOCK_BYTES as usize);
        self.offset += taken as u64;
        self.chunk_left -= taken;
        self.used = 0;
    }

    fn roll(&mut self, segment_bytes: u64) {
        self.close();
        self.offset = BLOCK_BYTES;
        self.segment_bytes = segment_bytes;
    }

    /// Makes room for a frame; `segment_bytes` is the size of the segment that a roll would go to.
    fn place(&mut self, padded: usize, segment_bytes: u64) -> Placement {
        let mut placement = Placement::default();
        if !self.fits_segment(padded) {
            self.roll(segment_bytes);
            placement.new_segment = true;
        }
        if self.used + padded > self.chunk_left {
            self.close();
            self.chunk_left = CHUNK_BYTES;
            placement.new_chunk = true;
            // The block that the closed group is padded with may have been the last one.
            if !self.fits_segment(padded) {
                self.roll(segment_bytes);
                placement.new_segment = true;
            }
        }
        self.used += padded;
        placement
    }
}

struct Group {
    segment: Rc<Segment>,
    offset: u64,
    /// While the group is open: all that is left of the chunk.
    buf: AlignedBuf,
    used: usize,
    first_seq: u64,
    end_seq: u64,
    outcome: Rc<Outcome>,
}

/// A group on its way to the disk.
pub(crate) struct Flight {
    pub id: u64,
    pub segment: Rc<Segment>,
    pub offset: u64,
    pub bytes: Slice,
    pub first_seq: u64,
    pub end_seq: u64,
    pub submitted_at: Instant,
    outcome: Rc<Outcome>,
    landed: bool,
}

/// A durable group that the dispatcher has not taken yet.
pub(crate) struct Held {
    pub next_seq: u64,
    pub end_seq: u64,
    /// Offset of the frame of `next_seq` in `bytes`.
    pub at: usize,
    pub bytes: Slice,
}

/// What the flusher should do now.
pub(crate) enum Next {
    /// Nothing is staged.
    Idle,
    /// Something is, and waits for a write in flight.
    Blocked,
    /// The next group lies in a segment that is not active yet.
    Roll(Rc<Segment>),
    Submit,
}

/// What an append will take.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub chunks: usize,
    /// Segments to roll to.
    pub rolls: usize,
}

/// What staging made of an append.
pub(crate) enum Staged {
    Yes {
        seqs: Range<u64>,
        /// Of the last record's group, and of the first one's: groups end in order.
        outcome: Rc<Outcome>,
        first: Rc<Outcome>,
    },
    /// No memory now, but writes of our own are under way and will free some.
    NoRoomYet,
}

/// A group that became durable, for the metrics.
pub(crate) struct Landed {
    pub records: u64,
    pub bytes: u64,
    pub submitted_at: Instant,
}

pub(crate) struct Staging {
    pool: ChunkPool,
    chunks_max: usize,
    cursor: Cursor,
    /// What is left of the current chunk while no group is open.
    rest: Option<AlignedBuf>,
    open: Option<Group>,
    closed: VecDeque<Group>,
    flights: VecDeque<Flight>,
    held: VecDeque<Held>,
    /// Segment of the next group. `None` where nothing is appended (E18).
    target: Option<Rc<Segment>>,
    pub next_seq: u64,
    pub durable_next: u64,
    next_flight: u64,
    pub groups_dropped: u64,
}

impl Staging {
    pub fn new(bytes_max: usize, target: Option<Rc<Segment>>, next_seq: u64) -> Staging {
        let chunks_max = (bytes_max / CHUNK_BYTES).max(2);
        let (offset, segment_bytes) = target.as_ref().map_or((0, 0), |segment| (segment.tail.get(), segment.bytes));
        Staging {
            pool: ChunkPool::new(CHUNK_BYTES, chunks_max),
            chunks_max,
            cursor: Cursor { chunk_left: 0, used: 0, offset, segment_bytes },
            rest: None,
            open: None,
            closed: VecDeque::new(),
            flights: VecDeque::new(),
            held: VecDeque::new(),
            target,
            next_seq,
            durable_next: next_seq,
            next_flight: 0,
            groups_dropped: 0,
        }
    }

    /// What `records` would take, or why they can never be staged.
    pub fn plan(&self, records: &[NewWalRecord<'_>], segment_bytes: u64) -> Result<Plan, AppendError> {
        let mut cursor = self.cursor;
        let mut plan = Plan { chunks: 0, rolls: 0 };
        for record in records {
            let padded = frame::padded_bytes(record).ok_or(AppendError::TooLarge)?;
            if BLOCK_BYTES + round_up_to_block(padded as u64) > segment_bytes {
                return Err(AppendError::TooLarge);
            }
            let placement = cursor.place(padded, segment_bytes);
            plan.chunks += usize::from(placement.new_chunk);
            plan.rolls += usize::from(placement.new_segment);
        }
        if plan.chunks > self.chunks_max {
            return Err(AppendError::MemoryExhausted);
        }
        Ok(plan)
    }

    /// Stages all of `records`, with consecutive sequence numbers, or none: everything that can fail is known before
    /// the first byte is copied. `next_segment` names the segment to roll to, which is `segment_bytes` long.
    pub fn stage(
        &mut self,
        plan: Plan,
        records: &[NewWalRecord<'_>],
        segment_bytes: u64,
        next_segment: &mut dyn FnMut() -> Rc<Segment>,
    ) -> Result<Staged, AppendError> {
        if plan.chunks > 0 && !self.make_room(plan.chunks) {
            return if self.is_idle() { Err(AppendError::MemoryExhausted) } else { Ok(Staged::NoRoomYet) };
        }
        let first_seq = self.next_seq;
        let mut first = None;
        for record in records {
            let padded = frame::padded_bytes(record).ok_or(AppendError::TooLarge)?;
            let placement = self.cursor.place(padded, segment_bytes);
            if placement.new_segment || placement.new_chunk {
                self.close();
            }
            if placement.new_chunk {
                self.rest = self.pool.take();
            }
            if placement.new_segment {
                let segment = next_segment();
                segment.first_seq.set(self.next_seq);
                self.target = Some(segment);
            }
            self.put(record, padded);
            if first.is_none() {
                first = self.open.as_ref().map(|group| group.outcome.clone());
            }
        }
        let open = self.open.as_ref().expect("the last record lies in the open group");
        let outcome = open.outcome.clone();
        let first = first.unwrap_or_else(|| outcome.clone());
        Ok(Staged::Yes { seqs: first_seq..self.next_seq, outcome, first })
    }

    fn put(&mut self, record: &NewWalRecord<'_>, padded: usize) {
        let group = match &mut self.open {
            Some(group) => group,
            None => self.open.insert(Group {
                segment: self.target.clone().expect("an appending log has a segment"),
                offset: self.cursor.offset,
                buf: self.rest.take().expect("the chunks were counted before"),
                used: 0,
                first_seq: self.next_seq,
                end_seq: self.next_seq,
                outcome: Outcome::pending(),
            }),
        };
        frame::encode(&mut group.buf[group.used..group.used + padded], group.segment.seed, self.next_seq, record);
        group.used += padded;
        self.next_seq += 1;
        group.end_seq = self.next_seq;
    }

    /// Ends the open group; the rest of its chunk is free for the next one.
    fn close(&mut self) {
        let Some(mut group) = self.open.take() else { return };
        let bytes = group.used.next_multiple_of(BLOCK_BYTES as usize);
        let mut front = group.buf.split_to(bytes);
        front[group.used..].fill(0);
        self.rest = (!group.buf.is_empty()).then_some(group.buf);
        group.segment.tail.set(group.offset + bytes as u64);
        self.closed.push_back(Group { buf: front, ..group });
    }

    /// Frees chunks by dropping the oldest groups that the dispatcher has not taken: it reads them back (E20).
    fn make_room(&mut self, chunks: usize) -> bool {
        loop {
            if self.pool.free() >= chunks {
                return true;
            }
            let Some(mut dropped) = self.held.pop_front() else { return false };
            self.groups_dropped += 1;
            // One chunk at a time: groups that lie next to each other go together.
            while self.held.front().is_some_and(|next| next.bytes.as_ptr() == dropped.bytes.as_ptr_range().end) {
                let Some(next) = self.held.pop_front() else { break };
                dropped = next;
                self.groups_dropped += 1;
            }
        }
    }

    /// Nothing staged or in flight.
    pub fn is_idle(&self) -> bool {
        self.open.is_none() && self.closed.is_empty() && self.flights.is_empty()
    }

    pub fn next(&self) -> Next {
        let Some(group) = self.closed.front().or(self.open.as_ref()) else { return Next::Idle };
        let Some(last) = self.flights.back() else {
            return if group.segment.active.get() { Next::Submit } else { Next::Roll(group.segment.clone()) };
        };
        // A roll waits for all groups in flight, and an unprepared segment has one (E7).
        if !Rc::ptr_eq(&group.segment, &last.segment) || !group.segment.prepared || self.flights.len() >= FLIGHTS_MAX {
            return Next::Blocked;
        }
        let span = group.offset + group.used as u64 - self.flights.front().map_or(group.offset, |first| first.offset);
        if span + BLOCK_BYTES > WRITE_WINDOW_BYTES {
            return Next::Blocked;
        }
        // Waiting gathers more records for the open group only; a full one may go at once.
        let records: u64 = self.flights.iter().map(|flight| flight.end_seq - flight.first_seq).sum();
        if self.closed.is_empty() && (self.flights.len() > 1 || records >= FEW_RECORDS) {
            return Next::Blocked;
        }
        Next::Submit
    }

    /// Seals the next group and counts it as in flight. To be called when [`Staging::next`] says so.
    pub fn submit(&mut self, now: Instant) -> Option<(u64, Rc<Segment>, u64, Slice)> {
        if self.closed.is_empty() {
            self.cursor.close();
            self.close();
        }
        let mut group = self.closed.pop_front()?;
        frame::seal(&mut group.buf[..group.used], group.segment.seed, self.durable_next);
        group.segment.note(group.first_seq, group.offset);
        let id = self.next_flight;
        self.next_flight += 1;
        let flight = Flight {
            id,
            segment: group.segment,
            offset: group.offset,
            bytes: group.buf.freeze(),
            first_seq: group.first_seq,
            end_seq: group.end_seq,
            submitted_at: now,
            outcome: group.outcome,
            landed: false,
        };
        let ticket = (id, flight.segment.clone(), flight.offset, flight.bytes.clone());
        self.flights.push_back(flight);
        Some(ticket)
    }

    /// A write landed. Everything that is durable without a gap is answered, in order.
    pub fn landed(&mut self, id: u64, mut durable: impl FnMut(Landed)) {
        if let Some(flight) = self.flights.iter_mut().find(|flight| flight.id == id) {
            flight.landed = true;
        }
        while self.flights.front().is_some_and(|flight| flight.landed) {
            let Some(flight) = self.flights.pop_front() else { return };
            self.durable_next = flight.end_seq;
            durable(Landed {
                records: flight.end_seq - flight.first_seq,
                bytes: flight.bytes.len() as u64,
                submitted_at: flight.submitted_at,
            });
            self.held.push_back(Held {
                next_seq: flight.first_seq,
                end_seq: flight.end_seq,
                at: 0,
                bytes: flight.bytes,
            });
            flight.outcome.resolve(Ok(()));
        }
    }

    /// A write failed: so does everything that is not durable yet, whether its own write lands or not (E7, E11).
    pub fn fail(&mut self, cause: &str) {
        let flights = self.flights.drain(..).map(|flight| flight.outcome);
        let staged = self.closed.drain(..).chain(self.open.take()).map(|group| group.outcome);
        flights.chain(staged).for_each(|outcome| outcome.resolve(Err(AppendError::LogFailed(cause.to_owned()))));
        self.rest = None;
        self.cursor.chunk_left = 0;
        self.cursor.used = 0;
    }

    /// The segment that everything staged lies in could not be made, and nothing was written: the sequence numbers
    /// are given back, and the log stands where it stood before the roll (E9).
    ///
    /// Returns the spares that the withdrawn records would have gone to.
    pub fn withdraw(&mut self, error: &AppendError, active: Option<Rc<Segment>>, first_seq: u64) -> Vec<Rc<Segment>> {
        debug_assert!(self.flights.is_empty());
        let mut spares: Vec<Rc<Segment>> = Vec::new();
        for group in self.closed.drain(..).chain(self.open.take()) {
            group.outcome.resolve(Err(error.clone()));
            if group.segment.file().is_some() && !spares.iter().any(|spare| Rc::ptr_eq(spare, &group.segment)) {
                group.segment.tail.set(BLOCK_BYTES);
                spares.push(group.segment);
            }
        }
        self.next_seq = first_seq;
        self.rest = None;
        self.retarget(active);
        spares
    }

    /// Sends the next group to `segment`. Nothing is staged or in flight.
    pub fn retarget(&mut self, segment: Option<Rc<Segment>>) {
        debug_assert!(self.is_idle());
        let chunk_left = self.rest.as_ref().map_or(0, |rest| rest.len());
        let (offset, segment_bytes) = segment.as_ref().map_or((0, 0), |segment| (segment.tail.get(), segment.bytes));
        self.cursor = Cursor { chunk_left, used: 0, offset, segment_bytes };
        self.target = segment;
    }

    pub fn target(&self) -> Option<&Rc<Segment>> {
        self.target.as_ref()
    }

    /// Bytes of the target segment that are taken, staged ones included.
    pub fn target_bytes(&self) -> u64 {
        self.cursor.offset + self.cursor.used as u64
    }

    pub fn pool(&mut self) -> &mut ChunkPool {
        &mut self.pool
    }

    pub fn memory_low(&mut self) -> bool {
        self.pool.free() * 4 < self.chunks_max
    }

    pub fn bytes_allocated(&self) -> usize {
        self.pool.bytes_allocated()
    }

    pub fn chunks_free(&mut self) -> usize {
        self.pool.free()
    }

    /// Hands over held records from `from` on. `take` gets the head and where the record's body lies in the group's
    /// bytes, and says whether it takes it. `None` when `from` is not in memory (any more).
    pub fn take_held(&mut self, from: u64, mut take: impl FnMut(&Head, &Slice, usize) -> bool) -> Option<u64> {
        if from >= self.durable_next {
            return Some(self.durable_next);
        }
        while self.held.front().is_some_and(|group| group.end_seq <= from) {
            self.held.pop_front();
        }
        if self.held.front().is_none_or(|group| group.next_seq > from) {
            return None;
        }
        while let Some(group) = self.held.front_mut() {
            while group.next_seq < group.end_seq {
                let head = Head::parse(&group.bytes[group.at..]);
                if group.next_seq >= from && !take(&head, &group.bytes, group.at) {
                    return Some(group.next_seq);
                }
                group.next_seq += 1;
                group.at += head.padded();
            }
            self.held.pop_front();
        }
        Some(self.durable_next)
    }
}

#[cfg(test)]
#[path = "staging_tests.rs"]
mod tests;
