//! Which call goes wrong, and how: by count, or by chance.

use std::path::Path;
use std::time::Duration;

use crate::rt::sim::Rng;
use crate::rt::Instant;

/// Kind of a disk call, for matching and for the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Open,
    CreateDir,
    SyncDir,
    Rename,
    Remove,
    List,
    Read,
    Write,
    WriteDurable,
    SyncData,
    Allocate,
    SetLen,
}

impl Op {
    /// Claims, or asks for, durability.
    pub fn is_sync(self) -> bool {
        matches!(self, Op::WriteDurable | Op::SyncData | Op::SyncDir)
    }

    pub fn is_write(self) -> bool {
        matches!(self, Op::Write | Op::WriteDurable)
    }
}

/// What goes wrong with one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// EIO. A write may have landed in any part; a sync drops what it did not write, and the next one says Ok.
    Fail,
    /// ENOSPC, with nothing done.
    NoSpace,
    /// EMFILE, with nothing done.
    NoDescriptor,
    /// A prefix lands, not durably, and the call says so (`WriteZero`).
    Short,
    /// Says Ok; the data is visible, nothing became durable.
    Lie,
    /// Says Ok and does nothing at all.
    Skip,
    /// Done as asked, but only after this time on top.
    Stall(Duration),
    /// Not done until a crash decides about it.
    Hang,
}

/// Makes the n-th matching call from now on go wrong.
#[derive(Clone, Debug)]
pub struct NthCall {
    /// Part of the path; empty matches every path.
    pub path: String,
    /// `None` matches every kind of call.
    pub op: Option<Op>,
    /// 1 is the next matching call.
    pub nth: u64,
    /// How many matching calls in a row from there; `u64::MAX` is for ever.
    pub times: u64,
    pub fault: Fault,
}

impl NthCall {
    pub fn new(op: Op, nth: u64, fault: Fault) -> NthCall {
        NthCall { path: String::new(), op: Some(op), nth, times: 1, fault }
    }

    pub fn on(mut self, path: &str) -> NthCall {
        self.path = path.to_owned();
        self
    }

    pub fn times(mut self, times: u64) -> NthCall {
        self.times = times;
        self
    }

    fn matches(&self, op: Op, path: &Path) -> bool {
        self.op.is_none_or(|wanted| wanted == op)
            && (self.path.is_empty() || path.to_str().is_some_and(|text| text.contains(&self.path)))
    }
}

/// Chances in a million calls of the kind each applies to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultRates {
    pub read_fail: u32,
    pub write_fail: u32,
    pub sync_fail: u32,
    /// Opens, creates, renames, removes.
    pub directory_fail: u32,
    pub short: u32,
    pub lie: u32,
    pub skip: u32,
    pub stall: u32,
    /// Longest stall; 0 is 5 s.
    pub stall_ms_max: u64,
}

#[derive(Default)]
pub(super) struct Faults {
    nth: Vec<NthCall>,
    pub(super) rates: FaultRates,
    /// Calls that may still be started; all later ones hang.
    pub(super) calls_left: Option<u64>,
    pub(super) frozen_at: Option<Instant>,
}

impl Faults {
    pub(super) fn add(&mut self, call: NthCall) {
        self.nth.push(call);
    }

    pub(super) fn clear(&mut self) {
        *self = Faults::default();
    }

    pub(super) fn decide(&mut self, op: Op, path: &Path, now: Instant, rng: &mut Rng) -> Option<Fault> {
        if let Some(left) = &mut self.calls_left {
            if *left == 0 {
                self.frozen_at.get_or_insert(now);
                return Some(Fault::Hang);
            }
            *left -= 1;
        }
        let mut decided = None;
        for call in &mut self.nth {
            if !call.matches(op, path) {
                continue;
            }
            if call.nth > 1 {
                call.nth -= 1;
            } else {
                call.times = call.times.saturating_sub(1);
                decided = decided.or(Some(call.fault));
            }
        }
        self.nth.retain(|call| call.times > 0);
        decided.or_else(|| self.by_chance(op, rng))
    }

    fn by_chance(&self, op: Op, rng: &mut Rng) -> Option<Fault> {
        let rates = self.rates;
        if rates == FaultRates::default() {
            return None;
        }
        let fails = match op {
            Op::Read | Op::List => rates.read_fail,
            Op::Write | Op::WriteDurable | Op::Allocate | Op::SetLen => rates.write_fail,
            Op::SyncData | Op::SyncDir => rates.sync_fail,
            Op::Open | Op::CreateDir | Op::Rename | Op::Remove => rates.directory_fail,
        };
        let only = |applies: bool, chance: u32| if applies { chance } else { 0 };
        let stall_ms = rng.range(1, if rates.stall_ms_max == 0 { 5_000 } else { rates.stall_ms_max } + 1);
        let chances = [
            (fails, Fault::Fail),
            (rates.stall, Fault::Stall(Duration::from_millis(stall_ms))),
            (only(op.is_write(), rates.short), Fault::Short),
            (only(op.is_sync(), rates.lie), Fault::Lie),
            (only(op.is_write(), rates.skip), Fault::Skip),
        ];
        let mut roll = rng.below(1_000_000);
        for (chance, fault) in chances {
            if roll < u64::from(chance) {
                return Some(fault);
            }
            roll -= u64::from(chance);
        }
        None
    }
}
