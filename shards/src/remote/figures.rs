//! What a shard has asked other nodes, counted where it is asked. Plain numbers of one shard; a scrape adds them up.

use std::time::Duration;

use crate::histogram::{self, Histogram};
use crate::peer::Request;

/// How calls ended, as operators read it.
pub const OUTCOMES: [&str; 5] = ["ok", "rejected", "failed", "timeout", "error"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallOutcome {
    Ok,
    /// The peer refused what it was asked, or was not ready for it.
    Rejected,
    /// Never sent: the peer is dead, unknown or not connected.
    Failed,
    /// Neither sent nor answered within its budget.
    Timeout,
    /// Sent; the connection ended, or the answer was of no use.
    Error,
}

/// Calls of one operation.
#[derive(Clone, Debug)]
pub struct CallMetrics {
    pub operation: &'static str,
    /// By [`OUTCOMES`].
    pub outcomes: [u64; OUTCOMES.len()],
    /// Microseconds until the answer, of those that were answered.
    pub round_trip_us: Histogram,
}

/// Operations that are counted, by the names of their series.
const OPERATIONS: [&str; 10] =
    ["commit", "produce", "claim", "park", "node_claim", "read_at", "ack_batch", "stats", "register", "other"];

fn index_of(request: &Request) -> usize {
    match request {
        Request::Commit(_) => 0,
        Request::Produce { .. } => 1,
        Request::Claim { .. } => 2,
        Request::Park { .. } => 3,
        Request::NodeClaim { .. } => 4,
        Request::ReadAt { .. } => 5,
        Request::Settle { .. } => 6,
        Request::Stats { .. } => 7,
        Request::Register { .. } => 8,
        _ => 9,
    }
}

/// Of one shard, for the operations that it has asked for; the others take no memory.
#[derive(Debug, Default)]
pub(super) struct Calls {
    of: [Option<Box<CallMetrics>>; OPERATIONS.len()],
}

/// Which operation a call is of.
#[derive(Clone, Copy)]
pub(super) struct CallKind(usize);

impl CallKind {
    pub const SETTLE: CallKind = CallKind(6);

    pub fn of(request: &Request) -> CallKind {
        CallKind(index_of(request))
    }
}

impl Calls {
    pub fn count(&mut self, CallKind(index): CallKind, outcome: CallOutcome, took: Duration) {
        let metrics = self.of[index].get_or_insert_with(|| {
            let round_trip_us = histogram::coarse_histogram();
            Box::new(CallMetrics { operation: OPERATIONS[index], outcomes: Default::default(), round_trip_us })
        });
        metrics.outcomes[outcome as usize] += 1;
        if matches!(outcome, CallOutcome::Ok | CallOutcome::Rejected) {
            histogram::record(&mut metrics.round_trip_us, took.as_micros() as u64);
        }
    }

    pub fn read(&self) -> Vec<CallMetrics> {
        self.of.iter().flatten().map(|metrics| (**metrics).clone()).collect()
    }
}
