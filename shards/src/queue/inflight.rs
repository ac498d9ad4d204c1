//! Leases and frontier of one partition (storage C4-C15, C18-C26, C59-C61): a plain state machine.
//!
//! Every offset from the frontier up to `next` is in exactly one state. Offsets that were handed out one by one have
//! a slot each; ranges that settle as a whole (a permanent gap, acks restored from disk) are one [`Run`], so that a
//! gap of a million offsets costs what one record costs. All operations are O(1) amortised, except that records that
//! come back (nack, lapse) pass a heap; nothing allocates once the buffers have grown to the partition's caps.
//!
//! Knows no clock, no log and no consumer: callers pass the time, the log's bounds and the random nonce in.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use super::position::{Position, Range};
use crate::rt::Instant;

/// What a topic allows per partition. The caps may change at any time (C13), the timeout never does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub visibility_timeout: Duration,
    /// Leases out at once (C10).
    pub in_flight_max: u64,
    /// Acks above the frontier before only the hole is handed out (C11).
    pub acked_ahead_max: u64,
}

/// The log's readable range, `[oldest, high_watermark)`, at the instant of the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    pub oldest: u64,
    pub high_watermark: u64,
}

/// Why nothing was reserved (C9). To a client they all look like "nothing there".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Everything visible is settled.
    Empty,
    /// Everything visible is leased or settled.
    AllReserved,
    /// As many leases are out as the partition may have.
    InFlightCap,
    /// Too much is acked above a hole that is itself leased.
    AheadCap,
}

/// The lease is not (or no longer) held under this nonce: `410` (C23).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseGone;

/// Retention overtook the frontier (C59).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overtaken {
    pub from: u64,
    pub to: u64,
    /// Offsets passed over that nobody had settled: data no consumer will see (C61).
    pub unsettled: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    /// Came back without an ack, or never left although later offsets did.
    Free,
    Leased {
        nonce: u64,
        expires: Instant,
    },
    Acked,
    Skipped,
}

/// Offsets between the frontier and `next` that settled as one range and have no slots.
#[derive(Clone, Copy, Debug)]
struct Run {
    range: Range,
    acked: bool,
    /// Offsets in all runs ever absorbed, this one included: turns an offset into a slot index.
    through: u64,
}

#[derive(Clone, Copy, Debug)]
struct Deadline {
    at: Instant,
    offset: u64,
    nonce: u64,
}

/// Consumer state of one partition.
#[derive(Debug)]
pub struct InFlight {
    limits: Limits,
    /// Lowest offset that is not settled.
    frontier: u64,
    /// Lowest offset that was neither handed out nor passed over.
    next: u64,
    /// One per offset of `frontier..next` that lies in no run.
    slots: VecDeque<Slot>,
    /// Ascending, inside `frontier..next`; none begins at the frontier.
    runs: VecDeque<Run>,
    /// Offsets in runs that the frontier has passed.
    runs_passed: u64,
    /// Acked ranges above `next`, ascending: restored from disk, absorbed when `next` reaches them.
    restored: VecDeque<Range>,
    /// Offsets of all `Slot::Free`, each once.
    returned: BinaryHeap<Reverse<u64>>,
    /// Ascending: the timeout is fixed and the clock monotonic. Entries of ended or extended leases stay until they
    /// come up or outnumber the live ones.
    deadlines: VecDeque<Deadline>,
    leased: u64,
    acked_ahead: u64,
}

impl InFlight {
    /// Starts from a position that was already clamped to the log (G20).
    pub fn restore(limits: Limits, position: &Position) -> InFlight {
        let mut state = InFlight {
            limits,
            frontier: position.frontier,
            next: position.frontier,
            slots: VecDeque::new(),
            runs: VecDeque::new(),
            runs_passed: 0,
            restored: position.acked.iter().copied().collect(),
            returned: BinaryHeap::new(),
            deadlines: VecDeque::new(),
            leased: 0,
            acked_ahead: position.acked.iter().map(Range::count).sum(),
        };
        state.absorb_restored();
        state.advance();
        state
    }

    /// Lowest offset that is not settled (exclusive form, G1).
    pub fn frontier(&self) -> u64 {
        self.frontier
    }

    pub fn leased(&self) -> u64 {
        self.leased
    }

    /// Whether anything at or above the high watermark was handed out or settled.
    pub fn reaches_beyond(&self, high_watermark: u64) -> bool {
        self.next > high_watermark || self.restored.back().is_some_and(|range| range.end > high_watermark)
    }

    /// Acked offsets above the frontier.
    pub fn acked_ahead(&self) -> u64 {
        self.acked_ahead
    }

    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Applies altered caps to the next reserve (C13).
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// Whether `reserve` would hand something out, leases that have lapsed but were not purged aside.
    pub fn available(&self, bounds: Bounds) -> Result<(), Refusal> {
        let frontier = self.frontier.max(bounds.oldest);
        if frontier >= bounds.high_watermark {
            return Err(Refusal::Empty);
        }
        if self.leased >= self.limits.in_flight_max {
            return Err(Refusal::InFlightCap);
        }
        if self.acked_ahead >= self.limits.acked_ahead_max {
            // C11: only the hole at the frontier, whatever else has come back or is new.
            return match self.slots.front() {
                Some(Slot::Leased { .. }) => Err(Refusal::AheadCap),
                _ => Ok(()),
            };
        }
        if !self.returned.is_empty() || self.next < bounds.high_watermark {
            return Ok(());
        }
        Err(Refusal::AllReserved)
    }

    /// Leases the lowest offset that may be handed out (C7, C8, D22). The caller purges and retires beforehand with
    /// [`expire`](Self::expire) and [`retire_below`](Self::retire_below), and reads the record only afterwards.
    /// `nonce` is random, in `1..2^63`.
    pub fn reserve(&mut self, now: Instant, bounds: Bounds, nonce: u64) -> Result<u64, Refusal> {
        debug_assert!(nonce > 0 && nonce < 1 << 63, "receipt nonces lie in 1..2^63");
        debug_assert!(self.frontier >= bounds.oldest, "retire_below comes first");
        self.available(bounds)?;
        let expires = now + self.limits.visibility_timeout;
        let leased = Slot::Leased { nonce, expires };
        let offset = match self.returned.pop() {
            Some(Reverse(offset)) => {
                let index = self.index(offset).expect("returned offsets have slots");
                debug_assert_eq!(self.slots[index], Slot::Free);
                self.slots[index] = leased;
                offset
            }
            None => {
                let offset = self.next;
                self.slots.push_back(leased);
                self.next += 1;
                self.absorb_restored();
                offset
            }
        };
        self.leased += 1;
        self.push_deadline(Deadline { at: expires, offset, nonce });
        Ok(offset)
    }

    /// Settles a leased record (C20, C12): whatever the caps say, a valid ack counts.
    pub fn ack(&mut self, now: Instant, offset: u64, nonce: u64) -> Result<(), LeaseGone> {
        let index = self.live_lease(now, offset, nonce)?;
        self.slots[index] = Slot::Acked;
        self.leased -= 1;
        self.acked_ahead += 1;
        self.advance();
        Ok(())
    }

    /// Renews a lease to a full visibility timeout from now (C21).
    pub fn extend(&mut self, now: Instant, offset: u64, nonce: u64) -> Result<(), LeaseGone> {
        let index = self.live_lease(now, offset, nonce)?;
        let expires = now + self.limits.visibility_timeout;
        self.slots[index] = Slot::Leased { nonce, expires };
        self.push_deadline(Deadline { at: expires, offset, nonce });
        Ok(())
    }

    /// Ends a lease and makes the record available at once (C22, C15).
    pub fn nack(&mut self, now: Instant, offset: u64, nonce: u64) -> Result<(), LeaseGone> {
        let index = self.live_lease(now, offset, nonce)?;
        self.free(index, offset);
        Ok(())
    }

    /// Settles a leased record that turned out unreadable, and with it everything up to `until` that was never
    /// handed out (C60). Returns how many offsets were skipped; 0 when the lease has meanwhile ended, since whoever
    /// holds the record then will find out the same.
    pub fn skip(&mut self, offset: u64, nonce: u64, until: u64) -> u64 {
        let Some(index) = self.index(offset) else { return 0 };
        match self.slots[index] {
            Slot::Leased { nonce: held, .. } if held == nonce => {}
            _ => return 0,
        }
        self.slots[index] = Slot::Skipped;
        self.leased -= 1;
        let mut skipped = 1;
        while self.next < until {
            let end = self.restored.front().map_or(until, |r| r.start.min(until));
            skipped += end - self.next;
            self.push_run(Range { start: self.next, end }, false);
            self.absorb_restored();
        }
        self.advance();
        skipped
    }

    /// Ends every lease whose time has come (C24); returns how many.
    pub fn expire(&mut self, now: Instant) -> usize {
        let mut lapsed = 0;
        while let Some(&deadline) = self.deadlines.front() {
            if deadline.at > now {
                break;
            }
            self.deadlines.pop_front();
            if let Some(index) = self.index_of_deadline(&deadline) {
                self.free(index, deadline.offset);
                lapsed += 1;
            }
        }
        lapsed
    }

    /// When the oldest lease lapses; `None` without leases. A timer needs to run only until then.
    pub fn next_expiry(&mut self) -> Option<Instant> {
        while let Some(&deadline) = self.deadlines.front() {
            if self.index_of_deadline(&deadline).is_some() {
                return Some(deadline.at);
            }
            self.deadlines.pop_front();
        }
        None
    }

    /// Moves the frontier over everything that retention removed, in one step (C59).
    pub fn retire_below(&mut self, oldest: u64) -> Option<Overtaken> {
        if oldest <= self.frontier {
            return None;
        }
        let from = self.frontier;
        let mut unsettled = 0;
        while self.frontier < oldest && self.frontier < self.next {
            if self.pass_run() {
                continue;
            }
            match self.slots.pop_front() {
                Some(Slot::Leased { .. }) => {
                    self.leased -= 1;
                    unsettled += 1;
                }
                Some(Slot::Free) => unsettled += 1,
                Some(Slot::Acked) => self.acked_ahead -= 1,
                Some(Slot::Skipped) => {}
                None => unreachable!("every offset below `next` has a slot or lies in a run"),
            }
            self.frontier += 1;
        }
        while self.next < oldest {
            let end = self.restored.front().map_or(oldest, |r| r.start.min(oldest));
            unsettled += end - self.next;
            self.next = end;
            self.frontier = end;
            self.absorb_restored();
            while self.pass_run() {}
        }
        while self.returned.peek().is_some_and(|Reverse(offset)| *offset < self.frontier) {
            self.returned.pop();
        }
        self.advance();
        Some(Overtaken { from, to: self.frontier, unsettled })
    }

    /// Fills `into` with the acked ranges above the frontier, ascending, neighbours joined; returns the frontier.
    /// Contains settled values only (C75): leases are no part of it.
    pub fn position(&self, into: &mut Vec<Range>) -> u64 {
        into.clear();
        let mut add = |range: Range| match into.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => into.push(range),
        };
        let mut runs = self.runs.iter().peekable();
        let mut offset = self.frontier;
        let mut slots = self.slots.iter();
        loop {
            if let Some(run) = runs.next_if(|run| run.range.start == offset) {
                if run.acked {
                    add(run.range);
                }
                offset = run.range.end;
                continue;
            }
            let Some(slot) = slots.next() else { break };
            if *slot == Slot::Acked {
                add(Range { start: offset, end: offset + 1 });
            }
            offset += 1;
        }
        self.restored.iter().for_each(|range| add(*range));
        self.frontier
    }

    fn live_lease(&mut self, now: Instant, offset: u64, nonce: u64) -> Result<usize, LeaseGone> {
        self.expire(now);
        let index = self.index(offset).ok_or(LeaseGone)?;
        match self.slots[index] {
            Slot::Leased { nonce: held, .. } if held == nonce => Ok(index),
            _ => Err(LeaseGone),
        }
    }

    fn free(&mut self, index: usize, offset: u64) {
        self.slots[index] = Slot::Free;
        self.leased -= 1;
        self.returned.push(Reverse(offset));
    }

    /// Slot of an offset; `None` outside `frontier..next` and inside runs.
    fn index(&self, offset: u64) -> Option<usize> {
        if offset < self.frontier || offset >= self.next {
            return None;
        }
        let mut hidden = 0;
        if !self.runs.is_empty() {
            let behind = self.runs.partition_point(|run| run.range.end <= offset);
            if self.runs.get(behind).is_some_and(|run| run.range.start <= offset) {
                return None;
            }
            if behind > 0 {
                hidden = self.runs[behind - 1].through - self.runs_passed;
            }
        }
        Some((offset - self.frontier - hidden) as usize)
    }

    /// The live lease that a deadline belongs to, unless it ended or was extended (C24).
    fn index_of_deadline(&self, deadline: &Deadline) -> Option<usize> {
        let index = self.index(deadline.offset)?;
        let live = Slot::Leased { nonce: deadline.nonce, expires: deadline.at };
        (self.slots[index] == live).then_some(index)
    }

    fn push_deadline(&mut self, deadline: Deadline) {
        debug_assert!(self.deadlines.back().is_none_or(|last| last.at <= deadline.at), "time went backwards");
        self.deadlines.push_back(deadline);
        if self.deadlines.len() as u64 > 2 * self.leased + 64 {
            let mut deadlines = std::mem::take(&mut self.deadlines);
            deadlines.retain(|deadline| self.index_of_deadline(deadline).is_some());
            self.deadlines = deadlines;
        }
    }

    fn push_run(&mut self, range: Range, acked: bool) {
        debug_assert_eq!(range.start, self.next);
        let before = self.runs.back().map_or(self.runs_passed, |run| run.through);
        self.runs.push_back(Run { range, acked, through: before + range.count() });
        self.next = range.end;
    }

    fn absorb_restored(&mut self) {
        while self.restored.front().is_some_and(|range| range.start <= self.next) {
            let range = self.restored.pop_front().expect("just seen");
            debug_assert_eq!(range.start, self.next, "restored ranges are passed in order");
            self.push_run(range, true);
        }
    }

    /// Moves the frontier over a run that begins at it.
    fn pass_run(&mut self) -> bool {
        let Some(run) = self.runs.front().copied().filter(|run| run.range.start == self.frontier) else {
            return false;
        };
        self.runs.pop_front();
        self.runs_passed = run.through;
        self.frontier = run.range.end;
        if run.acked {
            self.acked_ahead -= run.range.count();
        }
        true
    }

    /// Moves the frontier over the contiguous settled offsets (C4).
    fn advance(&mut self) {
        loop {
            if self.pass_run() {
                continue;
            }
            match self.slots.front() {
                Some(Slot::Acked) => self.acked_ahead -= 1,
                Some(Slot::Skipped) => {}
                _ => break,
            }
            self.slots.pop_front();
            self.frontier += 1;
        }
    }

    /// Checks C5 and the structure in full. For tests and simulation: costs O(window).
    pub fn check(&self, bounds: Bounds) {
        assert!(self.frontier <= bounds.high_watermark && self.next <= bounds.high_watermark, "C5: {self:?}");
        let hidden: u64 = self.runs.iter().map(|run| run.range.count()).sum();
        assert_eq!(self.slots.len() as u64 + hidden, self.next - self.frontier, "every offset has one state");
        let leased = self.slots.iter().filter(|s| matches!(s, Slot::Leased { .. })).count() as u64;
        let free = self.slots.iter().filter(|s| **s == Slot::Free).count();
        let acked = self.slots.iter().filter(|s| **s == Slot::Acked).count() as u64;
        let acked_runs: u64 = self.runs.iter().filter(|r| r.acked).map(|r| r.range.count()).sum();
        let restored: u64 = self.restored.iter().map(Range::count).sum();
        assert_eq!(leased, self.leased);
        assert_eq!(free, self.returned.len());
        assert_eq!(acked + acked_runs + restored, self.acked_ahead);
        assert!(!matches!(self.slots.front(), Some(Slot::Acked | Slot::Skipped)), "C4: settled at the frontier");
        let leases_max = self.leased.max(self.limits.in_flight_max);
        assert!(
            self.deadlines.len() as u64 <= leases_max.saturating_mul(2).saturating_add(65),
            "deadlines outnumber what leases there can be"
        );
    }
}

#[cfg(test)]
#[path = "inflight_tests.rs"]
mod tests;
