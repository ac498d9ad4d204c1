//! Commit combining: one append and one durable write for every batch that is queued on a partition (seed, "Commit
//! combining").

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use super::append::AppendError;
use super::partition::PartitionLog;
use crate::meta::Incarnation;
use crate::peer::{CommitBatch, CommitError, Committed, LocalBoxFuture, Record};
use crate::rt::sync::{oneshot, Sender};
use crate::rt::{self, Instant, Queue};

/// A cycle takes no more, unless a single batch is larger (E16).
const CYCLE_BYTES_MAX: u64 = 8 << 20;
/// How often a cycle looks its log up again because the topic's record has moved.
const RESOLVE_TRIES: u32 = 3;

/// What the live metadata says about a partition at one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Served here. `version` differs whenever the topic's record may have changed.
    Live {
        incarnation: Incarnation,
        version: u64,
    },
    NotOwner,
    Frozen,
    UnknownTopic,
}

/// The log of a partition, and what it was checked against.
#[derive(Clone)]
pub struct Resolved {
    pub log: PartitionLog,
    pub incarnation: Incarnation,
    /// `version` of the standing that it was checked under.
    pub version: u64,
}

/// What the combiner asks of the shard that it serves on.
pub trait CommitGate {
    /// Answers from memory: it is asked with the commit section held.
    fn standing(&self) -> Standing;
    /// Hands out the partition's log, opening it and retiring a dead incarnation's as needed (S5 to S8).
    fn resolve(&self) -> LocalBoxFuture<'static, Result<Resolved, CommitError>>;
}

type Outcome = Result<Committed, CommitError>;

struct Queued {
    batch: CommitBatch,
    deadline: Instant,
    caller: Sender<Outcome>,
}

/// The queue in front of one partition's log. Cheap to clone; all clones are one queue.
#[derive(Clone)]
pub struct Combiner {
    inner: Rc<Inner>,
}

struct Inner {
    gate: Rc<dyn CommitGate>,
    queue: RefCell<VecDeque<Queued>>,
    running: Cell<bool>,
}

impl Combiner {
    pub fn new(gate: Rc<dyn CommitGate>) -> Combiner {
        Combiner { inner: Rc::new(Inner { gate, queue: RefCell::default(), running: Cell::new(false) }) }
    }

    /// Commits a batch together with whatever else is queued. Dropping the future takes the batch out of the queue if
    /// no cycle has drained it yet, and changes nothing after that: cycles run in a task of their own.
    pub async fn commit(&self, batch: CommitBatch) -> Outcome {
        if batch.records.is_empty() {
            return Err(CommitError::Failed("a commit without records".into()));
        }
        let deadline = rt::now() + batch.budget;
        let (caller, outcome) = oneshot();
        self.inner.queue.borrow_mut().push_back(Queued { batch, deadline, caller });
        if !self.inner.running.replace(true) {
            let inner = self.inner.clone();
            drop(rt::spawn(Queue::Commit, async move { inner.run().await }));
        }
        outcome.await.unwrap_or_else(|| Err(CommitError::Unreachable("the shard is going down".into())))
    }

    /// Batches that wait for a cycle.
    pub fn queued(&self) -> usize {
        self.inner.queue.borrow().len()
    }
}

fn answer(queued: Queued, outcome: Outcome) {
    let _ = queued.caller.send(outcome); // a caller that has gone learns nothing, and needs nothing
}

fn body_bytes(batch: &CommitBatch) -> u64 {
    batch.records.iter().map(|record| record.body.len() as u64).sum()
}

impl Inner {
    async fn run(&self) {
        while !self.queue.borrow().is_empty() {
            self.cycle().await;
        }
        self.running.set(false);
    }

    /// One cycle, from looking the log up to answering everybody who took part.
    async fn cycle(&self) {
        for _ in 0..RESOLVE_TRIES {
            let resolved = match self.gate.resolve().await {
                Ok(resolved) => resolved,
                Err(error) => return self.refuse_all(&error),
            };
            let held = resolved.log.enter().await;
            let refused = match self.gate.standing() {
                Standing::Live { incarnation, version } => {
                    if version != resolved.version || incarnation != resolved.incarnation || resolved.log.is_closed() {
                        continue; // the section is let go: resolving may have to close this log
                    }
                    None
                }
                Standing::NotOwner => Some(CommitError::NotOwner),
                Standing::Frozen => Some(CommitError::Frozen),
                Standing::UnknownTopic => Some(CommitError::UnknownTopic),
            };
            if let Some(error) = refused {
                return self.refuse_all(&error);
            }
            let drained = self.drain(&resolved);
            if drained.is_empty() {
                return;
            }
            let runs: Vec<&[Record]> = drained.iter().map(|queued| &queued.batch.records[..]).collect();
            match resolved.log.append(&held, &runs).await {
                Ok(base) => return share(drained, base),
                Err(AppendError::Closed) => {
                    let mut queue = self.queue.borrow_mut();
                    drained.into_iter().rev().for_each(|queued| queue.push_front(queued));
                }
                Err(AppendError::Poisoned(cause)) => return fail(drained, &CommitError::Poisoned(cause)),
                Err(AppendError::Failed(cause)) => return fail(drained, &CommitError::Failed(cause)),
            }
        }
        self.refuse_all(&CommitError::NotOwner);
    }

    /// Takes the batches of this cycle: those still worth committing, in order, as many as fit.
    fn drain(&self, resolved: &Resolved) -> Vec<Queued> {
        let mut queue = self.queue.borrow_mut();
        let mut room = resolved.log.room_bytes();
        let (now, mut drained, mut records, mut bytes) = (rt::now(), Vec::new(), 0, 0);
        while let Some(queued) = queue.pop_front() {
            if queued.caller.is_closed() {
                continue;
            }
            if now >= queued.deadline {
                answer(queued, Err(CommitError::Spent));
                continue;
            }
            match queued.batch.accepted_under {
                Some(accepted_under) if accepted_under != resolved.incarnation => {
                    let live = resolved.incarnation;
                    answer(queued, Err(CommitError::IncarnationMismatch { accepted_under, live }));
                    continue;
                }
                _ => {}
            }
            let (more_records, more_bytes) = (queued.batch.records.len() as u64, body_bytes(&queued.batch));
            if drained.is_empty() && resolved.log.stored_bytes_max(more_records, more_bytes) > room {
                room = resolved.log.segment_room_bytes(); // this one makes the log roll
            }
            let fits = bytes + more_bytes <= CYCLE_BYTES_MAX
                && resolved.log.stored_bytes_max(records + more_records, bytes + more_bytes) <= room;
            if !fits && !drained.is_empty() {
                queue.push_front(queued);
                break;
            }
            records += more_records;
            bytes += more_bytes;
            drained.push(queued);
        }
        drained
    }

    fn refuse_all(&self, error: &CommitError) {
        let drained: Vec<Queued> = self.queue.borrow_mut().drain(..).collect();
        fail(drained, error);
    }
}

fn share(drained: Vec<Queued>, base: u64) {
    let mut base_offset = base;
    for queued in drained {
        let count = queued.batch.records.len() as u64;
        answer(queued, Ok(Committed { base_offset, count }));
        base_offset += count;
    }
}

fn fail(drained: Vec<Queued>, error: &CommitError) {
    for queued in drained {
        answer(queued, Err(error.clone()));
    }
}
