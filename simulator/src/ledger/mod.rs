//! The account of what clients asked, what they were answered, and what was done to the node; and the rules that
//! all of it must obey. Pure: no clock, no broker. What cannot be decided from outside is never a violation.

mod consume;
mod counts;
mod inside;
mod rules;
mod topics;

use std::collections::BTreeMap;
use std::time::Duration;

use narad_shards::meta::Incarnation;
use narad_shards::rt::Instant;

use crate::broker::End;
use crate::message::Content;

pub use counts::Counts;
pub use rules::{Rule, Violation};
use topics::{Owners, Topic};

/// What the seed allows.
#[derive(Clone, Copy, Debug)]
pub struct Allowances {
    /// The disk never lies, skips or rots: without this, E33 applies.
    pub honest: bool,
    /// Calls of the disk fail, stall or find no space now and then.
    pub disk_errors: bool,
    /// Acks that a killed process may lose (D16) and that a power cut may take (D17).
    pub killed_acks: Duration,
    pub power_cut_acks: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Pending,
    /// `202`
    Accepted,
    /// Nothing was stored.
    Refused,
    /// `500`, or no answer.
    Unknown,
}

struct Message {
    content: Content,
    topic: String,
    /// It was produced through this node.
    node: usize,
    started: Instant,
    /// Wall clock then, ms since the epoch: no commit of it can be older.
    started_ms: u64,
    answered: Option<Instant>,
    outcome: Outcome,
    copies: Vec<CopyId>,
}

pub type CopyId = (Incarnation, u32, u64);

/// A lease that a client has been told of.
struct Lease {
    nonce: u64,
    /// It was granted between these two.
    asked: Instant,
    told: Instant,
    /// It was certainly live before this instant, unless ended.
    until: Instant,
    /// Acks and nacks of it that were sent.
    endings: u32,
    /// One of them was confirmed.
    ended: bool,
    /// Process that granted it.
    boot: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Settled {
    No,
    /// An ack by this lease was sent then and not answered, or confirmed then and its effect may have been lost in a
    /// crash.
    Maybe(Instant, u64),
    /// Confirmed then.
    Acked(Instant),
}

struct Copy {
    number: u64,
    timestamp_ms: u64,
    leases: Vec<Lease>,
    settled: Settled,
    /// Acked shortly before a kill: the position may be in the page cache alone until the next process has opened the
    /// log (D17).
    exposed: bool,
}

#[derive(Clone, Copy, Default)]
struct PartitionSeen {
    high_watermark: u64,
    frontier: u64,
    /// Process in which the frontier was seen.
    boot: u64,
}

/// The processes of all nodes at one moment, by number.
pub type Boots = Vec<u64>;

/// Of a lease whose owner may have been restarted while it was asked for: nothing is said about its end.
const UNSURE: u64 = u64::MAX;

pub struct Ledger {
    allowances: Allowances,
    topics: BTreeMap<Incarnation, Topic>,
    messages: BTreeMap<u64, Message>,
    copies: BTreeMap<CopyId, Copy>,
    partitions: BTreeMap<(Incarnation, u32), PartitionSeen>,
    /// Ends of the faults so far; `None` while one goes on.
    fault_ends: Vec<Option<Instant>>,
    power_cuts: Vec<Instant>,
    /// Processes of each node that have ended.
    boots: Boots,
    owners: Owners,
    pub violations: Vec<Violation>,
    pub events: Vec<String>,
    pub counts: Counts,
}

impl Ledger {
    /// `whole`: nodes hear of topics and owners from their own metadata, see [`Ledger::comes`] and [`Ledger::seen_by`].
    pub fn new(allowances: Allowances, nodes: usize, whole: bool) -> Ledger {
        Ledger {
            allowances,
            topics: BTreeMap::new(),
            messages: BTreeMap::new(),
            copies: BTreeMap::new(),
            partitions: BTreeMap::new(),
            fault_ends: Vec::new(),
            power_cuts: Vec::new(),
            boots: vec![0; nodes],
            owners: if whole { Owners::Told(BTreeMap::new()) } else { Owners::Dealt(nodes) },
            violations: Vec::new(),
            events: Vec::new(),
            counts: Counts::default(),
        }
    }

    pub fn note(&mut self, at: Instant, text: String) {
        self.events.extend(crate::trace::take());
        self.events.push(format!("{:>10.6} {text}", at.0 as f64 / 1e9));
    }

    pub fn violate(&mut self, at: Instant, rule: Rule, text: String) {
        self.note(at, format!("!!! {rule:?}: {text}"));
        self.violations.push(Violation { rule, text });
    }

    /// Faults begin: duplicates and detours are explained until `fault_over`, and for what was produced before.
    pub fn fault(&mut self, at: Instant, text: &str) {
        self.note(at, format!("--- {text}"));
        self.fault_ends.push(None);
    }

    pub fn fault_over(&mut self, at: Instant) {
        self.fault_ends.iter_mut().filter(|end| end.is_none()).for_each(|end| *end = Some(at));
    }

    /// The process serves: its logs are open, and the positions that it found are durable.
    pub fn started(&mut self, at: Instant, node: usize, shards: u16) {
        self.note(at, format!("=== node {node} started with {shards} shards"));
        // A whole node opens its logs later, when it may trust that they are its own.
        if self.is_whole() {
            return;
        }
        let own = self.copies.iter_mut().filter(|(id, _)| self.owners.of(**id) == node);
        own.for_each(|(_, copy)| copy.exposed = false);
    }

    /// The node that owns a copy, and the process of it that answered a call which began in these processes.
    fn boot_of(&self, id: CopyId, boots: &Boots) -> u64 {
        let owner = self.owners.of(id);
        match self.boots.len() > 1 && boots[owner] != self.boots[owner] {
            true => UNSURE,
            false => boots[owner],
        }
    }

    fn boot_now(&self, id: CopyId) -> u64 {
        self.boots[self.owners.of(id)]
    }

    /// The process has ended. Its leases are gone; acks that were not yet durable by `judged` may be.
    pub fn ended(&mut self, at: Instant, judged: Instant, node: usize, end: End) {
        self.note(at, format!("=== node {node}: {end:?}"));
        self.counts.ends += 1;
        self.boots[node] += 1;
        if end == End::PowerCut {
            self.power_cuts.push(at);
        }
        let Allowances { killed_acks, power_cut_acks, disk_errors, honest } = self.allowances;
        let own = self.copies.iter_mut().filter(|(id, _)| self.owners.of(**id) == node);
        for (_, copy) in own {
            let Settled::Acked(answered) = copy.settled else { continue };
            let unsynced = answered + power_cut_acks >= judged;
            let taken = match end {
                _ if disk_errors || !honest => true,
                End::Graceful => false,
                End::Killed => answered + killed_acks >= judged,
                End::PowerCut => copy.exposed || unsynced,
            };
            if taken {
                copy.settled = Settled::Maybe(answered, 0);
            }
            copy.exposed |= end == End::Killed && unsynced;
        }
    }

    // ---- what producers did ----

    pub fn produce_started(&mut self, node: usize, topic: &str, records: &[Content], at: Instant, at_ms: u64) {
        for content in records {
            let message = Message {
                content: content.clone(),
                topic: topic.to_owned(),
                node,
                started: at,
                started_ms: at_ms,
                answered: None,
                outcome: Outcome::Pending,
                copies: Vec::new(),
            };
            self.messages.insert(content.number, message);
        }
    }

    pub fn produce_answered(&mut self, records: &[Content], at: Instant, outcome: Outcome, detail: &str) {
        if let Some(first) = records.first() {
            let topic = self.messages.get(&first.number).map_or("", |message| &message.topic).to_owned();
            let text = format!("produce {topic} #{}..+{}: {outcome:?} {detail}", first.number, records.len());
            self.note(at, text);
        }
        let counter = match outcome {
            Outcome::Accepted => &mut self.counts.accepted,
            Outcome::Refused => &mut self.counts.refused,
            Outcome::Pending | Outcome::Unknown => &mut self.counts.unknown,
        };
        *counter += records.len() as u64;
        for content in records {
            let Some(message) = self.messages.get_mut(&content.number) else { continue };
            message.answered = Some(at);
            message.outcome = outcome;
            // Delivered before its own produce was answered: the rule can be checked only now.
            if outcome == Outcome::Refused && !message.copies.is_empty() {
                let text = format!("#{} was refused ({detail}) and is stored all the same", content.number);
                self.violate(at, Rule::RefusedDelivered, text);
            }
        }
    }

    // ---- the end ----

    /// What is still owed at this time of the wall clock: 202 and not acked, or seen and not acked.
    pub fn outstanding(&self, now_ms: u64) -> Vec<(Rule, u64, String)> {
        let lost = self.undelivered(now_ms).map(|(number, message)| {
            (Rule::Lost, *number, format!("#{number} to {}: 202, never delivered", message.topic))
        });
        let stuck = self
            .unacked(now_ms)
            .map(|(id, copy)| (Rule::Stuck, copy.number, format!("{}: delivered, never acked", self.name(*id))));
        lost.chain(stuck).collect()
    }

    pub fn owes(&self, now_ms: u64) -> bool {
        self.undelivered(now_ms).next().is_some() || self.unacked(now_ms).next().is_some()
    }

    fn undelivered(&self, now_ms: u64) -> impl Iterator<Item = (&u64, &Message)> {
        let owed = |message: &Message| message.outcome == Outcome::Accepted && message.copies.is_empty();
        self.messages.iter().filter(move |(_, message)| owed(message) && !self.may_be_gone(message, now_ms))
    }

    fn unacked(&self, now_ms: u64) -> impl Iterator<Item = (&CopyId, &Copy)> {
        let live = |id: &CopyId| self.topics.get(&id.0).is_some_and(|topic| topic.delete_started.is_none());
        let owed =
            move |id: &CopyId, copy: &Copy| copy.settled == Settled::No && live(id) && !self.expired(*id, now_ms);
        self.copies.iter().filter(move |(id, copy)| owed(id, copy))
    }

    /// Whether retention may have taken a copy that was seen (S71).
    pub(super) fn expired(&self, id: CopyId, now_ms: u64) -> bool {
        let bound = self.topics.get(&id.0).map_or(0, |topic| topic.retention_ms);
        let written = self.copies.get(&id).map_or(u64::MAX, |copy| copy.timestamp_ms);
        bound > 0 && now_ms > written.saturating_add(bound)
    }

    /// Whether an incarnation that may have taken the message has been deleted, or may have let it expire.
    fn may_be_gone(&self, message: &Message, now_ms: u64) -> bool {
        let until = message.answered.unwrap_or(Instant(u64::MAX));
        let took = |topic: &&Topic| {
            topic.name == message.topic
                && topic.created <= until
                && topic.gone[message.node].is_none_or(|gone| gone >= message.started)
        };
        let expired = |topic: &Topic| topic.retention_ms > 0 && now_ms > message.started_ms + topic.retention_ms;
        self.topics.values().filter(took).any(|topic| topic.delete_started.is_some() || expired(topic))
    }

    /// All is at rest. `excuse` tells whether a fault of the disk explains that a record, whose produce started then,
    /// is missing (E33); it also gets the power cuts of the run.
    pub fn finish(&mut self, at: Instant, now_ms: u64, excuse: impl Fn(Instant, &[Instant]) -> bool) {
        for (rule, number, text) in self.outstanding(now_ms) {
            let started = self.messages.get(&number).map_or(at, |message| message.started);
            if excuse(started, &self.power_cuts) {
                self.counts.excused += 1;
            } else {
                self.violate(at, rule, text);
            }
        }
        let mut newest: Option<(CopyId, u64)> = None;
        let mut broken = Vec::new();
        for (id, copy) in &self.copies {
            match newest {
                Some((before, time)) if (before.0, before.1) == (id.0, id.1) && time > copy.timestamp_ms => {
                    broken.push(format!("{}: {} follows {time}", self.name(*id), copy.timestamp_ms));
                }
                _ => {}
            }
            newest = Some((*id, copy.timestamp_ms));
        }
        for text in broken.into_iter().filter(|_| self.allowances.honest).collect::<Vec<_>>() {
            self.violate(at, Rule::CommitTime, text);
        }
    }

    /// Numbers of processes that have ended: an answer of an earlier one arrived too late to hold a lease.
    pub fn boots(&self) -> Boots {
        self.boots.clone()
    }
}
