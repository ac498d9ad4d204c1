//! The core against a random world: answers of every kind in any order, deaths, moves, deletes and recreates seen
//! late, reads that fail or take their time, memory pressure. Then everything heals, and nothing may be missing.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::{seq_of, wal_record, MockWal, Topics};
use crate::dispatch::core::{
    Action, CommitId, Core, Limits, Report, TopicLife, COMMITS_MAX, COMMIT_BYTES_MAX, HUNG_AFTER,
};
use crate::meta::{Address, Destination, Incarnation, NodeId};
use crate::peer::{CommitBatch, CommitError, Committed};
use crate::rt::sim::Rng;
use crate::rt::Instant;
use crate::wal::ReadBack;

const NODES: [u64; 3] = [0, 7, 8];
const NAMES: [&str; 4] = ["orders", "clicks", "mail", "audit"];
const HELD_BYTES_MAX: usize = 1 << 20;

struct Open {
    id: CommitId,
    to: Address,
    destination: Destination,
    topic: String,
    seqs: Vec<u64>,
    sent: Instant,
    budget: Duration,
}

struct World {
    rng: Rng,
    /// Nothing fails from here on; and whether that was so from the beginning.
    calm: bool,
    always_calm: bool,
    core: Core,
    now: Instant,
    version: u64,
    /// Every id ever given out, the name it was for and its partitions.
    ids: BTreeMap<u64, (&'static str, u32)>,
    /// What is so, and what the core's node knows of it.
    truth: Topics,
    known: Topics,
    dead_ids: BTreeSet<u64>,
    absent_names_told: BTreeSet<String>,
    dead_nodes: BTreeSet<u64>,
    wal: MockWal,
    open: Vec<Open>,
    questions: Vec<TopicLife>,
    /// Reads on their way: new or skipped, and what was read; `None` fails.
    reads: VecDeque<(bool, Option<ReadBack>)>,
    /// What owners stored, in order.
    stored: BTreeMap<Destination, Vec<u64>>,
    done: BTreeSet<u64>,
    checkpoint: u64,
    failed_once: BTreeSet<Destination>,
    /// Other nodes that have no room for commits (E41).
    full: BTreeSet<u64>,
}

impl World {
    fn new(seed: u64, calm: bool) -> World {
        let now = Instant(1_000_000_000);
        let known = Topics::default();
        World {
            rng: Rng::new(seed),
            calm,
            always_calm: calm,
            core: Core::new(Limits { held_bytes_max: HELD_BYTES_MAX }, 1, known.snapshot(0), now),
            now,
            version: 0,
            ids: BTreeMap::new(),
            truth: Topics::default(),
            known,
            dead_ids: BTreeSet::new(),
            absent_names_told: BTreeSet::new(),
            dead_nodes: BTreeSet::new(),
            wal: MockWal { first: 1, records: Vec::new() },
            open: Vec::new(),
            questions: Vec::new(),
            reads: VecDeque::new(),
            stored: BTreeMap::new(),
            done: BTreeSet::new(),
            checkpoint: 1,
            failed_once: BTreeSet::new(),
            full: BTreeSet::new(),
        }
    }

    fn step(&mut self) {
        match self.rng.below(100) {
            0..=29 => self.append(),
            30..=59 => self.answer(),
            60..=71 => self.pass_time(),
            72..=81 => self.deliver_read(),
            82..=86 => self.answer_question(),
            87..=90 => self.learn(),
            91..=92 if self.rng.chance(1, 4) => self.change_topics(),
            93..=94 if !self.calm => self.change_membership(),
            95..=96 if !self.calm => self.core.staging_low(),
            97 if self.rng.chance(1, 2) => self.change_room(),
            _ => {}
        }
        self.settle();
    }

    fn append(&mut self) {
        let name = NAMES[self.rng.below(NAMES.len() as u64) as usize];
        let Some((mut id, mut partitions, _)) = self.known.0.get(name).cloned() else { return };
        if !self.calm && self.rng.chance(1, 20) {
            // Another view of the metadata was older.
            let former: Vec<u64> = self.ids.iter().filter(|(_, of)| of.0 == name).map(|(id, _)| *id).collect();
            id = former[self.rng.below(former.len() as u64) as usize];
            partitions = self.ids[&id].1;
        }
        let by_name = !self.calm && self.rng.chance(1, 30);
        let partition = self.rng.below(u64::from(partitions)) as u32;
        let count = if self.rng.chance(1, 15) { self.rng.range(50, 400) } else { self.rng.range(1, 6) };
        for _ in 0..count {
            let bytes = if self.rng.chance(1, 50) { self.rng.range(8, 100_000) } else { self.rng.range(8, 200) };
            let incarnation = (!by_name).then_some(id);
            self.wal.records.push(wal_record(self.wal.next(), name, incarnation, partition, bytes as usize));
        }
        self.core.durable(self.wal.next());
    }

    fn answer(&mut self) {
        if self.open.is_empty() {
            return;
        }
        let open = self.open.swap_remove(self.rng.below(self.open.len() as u64) as usize);
        let live = self.truth.0.get(&open.topic).map(|(id, ..)| *id);
        let fails = !self.calm && self.rng.chance(1, 5);
        let result = match live {
            None => Err(CommitError::UnknownTopic),
            Some(live) if live != open.destination.incarnation.0 => Err(CommitError::IncarnationMismatch {
                accepted_under: open.destination.incarnation,
                live: Incarnation(live),
            }),
            Some(_) if fails => match self.rng.below(3) {
                0 => Err(CommitError::Failed("no space".into())),
                1 => Err(CommitError::Unreachable("cut".into())),
                _ => {
                    self.store(&open); // stored, and the answer lost
                    Err(CommitError::Unreachable("cut".into()))
                }
            },
            Some(_) => {
                self.store(&open);
                Ok(Committed { base_offset: 0, count: open.seqs.len() as u64 })
            }
        };
        match &result {
            Ok(_) => self.done.extend(&open.seqs),
            Err(_) => drop(self.failed_once.insert(open.destination)),
        }
        self.core.landed(open.id, open.to, result);
    }

    fn store(&mut self, open: &Open) {
        self.stored.entry(open.destination).or_default().extend(&open.seqs);
    }

    fn pass_time(&mut self) {
        let most = if self.calm {
            3_000_000
        } else {
            *[100_000, 20_000_000, 1_500_000_000, 12_000_000_000].get(self.rng.below(4) as usize).unwrap_or(&100_000)
        };
        self.now = self.now + Duration::from_nanos(self.rng.below(most));
        self.core.advance(self.now);
    }

    fn deliver_read(&mut self) {
        match self.reads.pop_front() {
            None => {}
            Some((true, Some(read))) => self.core.new_records(read, false),
            Some((false, Some(read))) => self.core.skipped_records(read),
            Some((new, None)) => self.core.read_failed(new),
        }
    }

    fn answer_question(&mut self) {
        let Some(life) = self.questions.pop() else { return };
        let live = self.truth.0.get(&*life.topic).map(|(id, ..)| Incarnation(*id));
        let gone = live.is_none() || life.incarnation.is_some() && live != life.incarnation;
        let tells = gone && !self.rng.chance(1, 4);
        if tells && life.incarnation.is_none() {
            self.absent_names_told.insert(life.topic.to_string());
        }
        self.core.gone(life, tells);
    }

    /// The node's replica catches up.
    fn learn(&mut self) {
        self.known = self.truth.clone();
        self.version += 1;
        self.core.install(self.known.snapshot(self.version));
    }

    fn change_topics(&mut self) {
        let slot = self.rng.below(NAMES.len() as u64);
        let name = NAMES[slot as usize].to_owned();
        let exists = self.truth.0.contains_key(&name);
        if exists && self.calm {
            return;
        }
        if exists && self.rng.chance(1, 2) {
            // A move, and sometimes a partition without an owner.
            let partitions = self.truth.0[&name].1;
            let addresses = self.addresses(partitions);
            self.truth.0.entry(name).and_modify(|topic| topic.2 = addresses);
            return;
        }
        if let Some((id, ..)) = self.truth.0.remove(&name) {
            self.dead_ids.insert(id);
            if self.rng.chance(1, 2) {
                return;
            }
        }
        let partitions = self.rng.range(1, 6) as u32;
        let addresses = self.addresses(partitions);
        let id = self.ids.len() as u64 + 1;
        self.ids.insert(id, (NAMES[slot as usize], partitions));
        self.truth.0.insert(name, (id, partitions, addresses));
        if self.calm {
            self.learn();
        }
    }

    fn addresses(&mut self, partitions: u32) -> Vec<Address> {
        let resolved = if self.calm || self.rng.chance(3, 4) { partitions } else { partitions - 1 };
        let one = |rng: &mut Rng| Address {
            node: NodeId(NODES[rng.below(NODES.len() as u64) as usize]),
            shard: rng.below(2) as u16,
        };
        (0..resolved).map(|_| one(&mut self.rng)).collect()
    }

    fn change_membership(&mut self) {
        let node = NODES[self.rng.range(1, NODES.len() as u64) as usize];
        if !self.dead_nodes.remove(&node) {
            self.dead_nodes.insert(node);
        }
        self.core.liveness(NodeId(node), !self.dead_nodes.contains(&node));
    }

    fn change_room(&mut self) {
        let node = NODES[self.rng.range(1, NODES.len() as u64) as usize];
        if !self.full.insert(node) {
            self.full.remove(&node);
            self.core.room_freed();
        }
    }

    fn settle(&mut self) {
        self.core.pump(&mut |to, _, bytes| bytes > 0 && !self.full.contains(&to.node.0));
        let mut turns = 0;
        while let Some(action) = self.core.next_action() {
            turns += 1;
            assert!(turns < 50_000, "the core never comes to rest");
            self.act(action);
            self.core.pump(&mut |to, _, bytes| bytes > 0 && !self.full.contains(&to.node.0));
        }
        let metrics = self.core.metrics();
        let bound = 2 * HELD_BYTES_MAX + COMMITS_MAX * (100_000 + HELD_BYTES_MAX / 4);
        assert!(metrics.held_bytes <= bound as u64, "memory: {} bytes", metrics.held_bytes);
        if metrics.skipped_records + metrics.held_records == 0 && self.reads.is_empty() && self.open.is_empty() {
            assert!(self.core.next_timer().is_none() || !self.core.drained(), "an idle dispatcher has a timer");
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::ReadNew { from, until, limit } => {
                assert!(from >= self.checkpoint && until <= self.wal.next() && limit.records_max > 0);
                if !self.calm && self.rng.chance(1, 100) {
                    return self.reads.push_back((true, None));
                }
                let read = self.wal.read(from, until, limit, &|_| true);
                if self.calm || self.rng.chance(2, 3) {
                    self.core.new_records(read, true);
                } else {
                    self.reads.push_back((true, Some(read)));
                }
            }
            Action::ReadSkipped { from, until, limit } => {
                let fails = !self.calm && self.rng.chance(1, 50);
                let read = (!fails).then(|| self.wal.read(from, until, limit, &|seq| self.core.wants(seq)));
                self.reads.push_back((false, read));
            }
            Action::Commit { id, to, batch } => self.sent(id, to, batch),
            Action::StoreCheckpoint(seq) => {
                assert!(seq > self.checkpoint && seq <= self.wal.next());
                for passed in self.checkpoint..seq {
                    assert!(self.done.contains(&passed), "the checkpoint passed {passed}, which is undone");
                }
                self.checkpoint = seq;
            }
            Action::AskGone(life) => {
                assert!(!self.questions.contains(&life), "N25: asked twice at once: {life:?}");
                self.questions.push(life);
            }
            Action::Report(report) => self.reported(report),
        }
    }

    fn reported(&mut self, report: Report) {
        match report {
            Report::Discarded { life, seq, .. } => {
                self.check_gone(&life);
                self.done.insert(seq);
            }
            Report::DiscardedQueue { life, partition, records } => {
                self.check_gone(&life);
                // The report does not name them: all that was accepted for it counts, of which it is a part.
                let of_it: Vec<u64> = (self.wal.records.iter())
                    .filter(|r| {
                        r.incarnation == life.incarnation && *r.topic == *life.topic && r.seq >= self.checkpoint
                    })
                    .map(|r| r.seq)
                    .collect();
                assert!(of_it.len() as u64 >= records, "{records} discarded of {partition}");
                self.done.extend(of_it);
            }
            Report::Missing { seq } => panic!("nothing is missing at {seq}"),
            Report::Failing { .. } | Report::Rerouting { .. } => assert!(!self.always_calm),
            _ => {}
        }
    }

    fn check_gone(&self, life: &TopicLife) {
        match life.incarnation {
            Some(id) => assert!(self.dead_ids.contains(&id.0), "N11: a record of a living topic was discarded"),
            None => assert!(self.absent_names_told.contains(&*life.topic)),
        }
    }

    fn sent(&mut self, id: CommitId, to: Address, batch: CommitBatch) {
        let destination = batch.destination;
        let seqs: Vec<u64> = batch.records.iter().map(seq_of).collect();
        assert_eq!(Some(to), self.known_address(destination), "sent to whom the snapshot names");
        assert!(!seqs.is_empty());
        assert!(!self.full.contains(&to.node.0), "E41: sent without room");
        let bytes: usize = batch.records.iter().map(|record| record.body.len()).sum();
        assert!(seqs.len() == 1 || bytes <= COMMIT_BYTES_MAX);

        let waiting = |open: &&Open| self.now < open.sent + open.budget;
        let counting = self.open.iter().filter(|open| self.now < open.sent + HUNG_AFTER).count();
        assert!(counting < COMMITS_MAX, "{counting} commits in flight already");
        for open in self.open.iter().filter(waiting) {
            assert_ne!(open.destination, destination, "one commit in flight per destination");
            assert!(!open.seqs.iter().any(|seq| seqs.contains(seq)), "sent again while in flight: {seqs:?}");
        }
        let mut last: BTreeMap<u32, u64> = BTreeMap::new();
        for seq in &seqs {
            let record = &self.wal.records[(seq - 1) as usize];
            assert_eq!(record.incarnation, batch.accepted_under, "N13: every record under its own incarnation");
            assert!(record.incarnation.is_none_or(|id| id == destination.incarnation));
            assert!(record.topic[..] == batch.topic[..]);
            let previous = last.insert(record.partition, *seq);
            assert!(destination.partition < self.known_partitions(destination), "partition of the live topic");
            if self.always_calm {
                assert!(previous.is_none_or(|previous| previous < *seq), "WAL order within a batch: {seqs:?}");
                assert_eq!(record.partition, destination.partition, "nothing is rerouted while nothing fails");
            }
        }
        let topic = batch.topic.to_string();
        self.open.push(Open { id, to, destination, topic, seqs, sent: self.now, budget: batch.budget });
    }

    fn known_partitions(&self, destination: Destination) -> u32 {
        let topic = self.known.0.values().find(|(id, ..)| *id == destination.incarnation.0);
        topic.map_or(0, |(_, partitions, _)| *partitions)
    }

    fn known_address(&self, destination: Destination) -> Option<Address> {
        let topic = self.known.0.values().find(|(id, ..)| *id == destination.incarnation.0)?;
        topic.2.get(destination.partition as usize).copied()
    }

    /// Nothing fails any more, and time passes until all is done.
    fn heal(&mut self) {
        self.calm = true;
        self.full.clear();
        self.core.room_freed();
        for node in std::mem::take(&mut self.dead_nodes) {
            self.core.liveness(NodeId(node), true);
        }
        for (_, partitions, addresses) in self.truth.0.values_mut() {
            addresses.resize(*partitions as usize, Address::local(0));
        }
        self.learn();
        for _ in 0..2000 {
            while !self.open.is_empty() || !self.reads.is_empty() || !self.questions.is_empty() {
                self.answer();
                self.deliver_read();
                self.answer_question();
                self.settle();
            }
            if self.core.drained() {
                break;
            }
            self.now = self.core.next_timer().unwrap_or(self.now).max(self.now);
            self.core.advance(self.now);
            self.settle();
        }
        let metrics = self.core.metrics();
        assert!(self.core.drained(), "{} of {} done: {}", self.checkpoint, self.wal.next(), self.core.describe());
        assert_eq!((metrics.held_records, metrics.skipped_records, metrics.held_bytes), (0, 0, 0));
        let live: u64 = self.truth.0.values().map(|(_, partitions, _)| u64::from(*partitions)).sum();
        assert!(metrics.destinations <= live, "N27: {} lanes for {live} partitions", metrics.destinations);
        for record in &self.wal.records {
            let dead = match record.incarnation {
                Some(id) => self.dead_ids.contains(&id.0),
                None => self.absent_names_told.contains(&*record.topic),
            };
            let stored = self.stored.values().any(|seqs| seqs.binary_search(&record.seq).is_ok());
            assert!(dead || stored || self.is_stored(record.seq), "record {} is lost", record.seq);
        }
    }

    fn is_stored(&self, seq: u64) -> bool {
        self.stored.values().any(|seqs| seqs.contains(&seq))
    }
}

fn run(seed: u64, calm: bool, steps: u32) -> World {
    let mut world = World::new(seed, calm);
    for _ in 0..6 {
        world.change_topics();
    }
    for _ in 0..steps {
        world.step();
    }
    world.heal();
    world
}

#[test]
fn every_record_is_committed_or_confirmed_as_discarded() {
    let (mut rerouted, mut discarded, mut refused, mut hung, mut late, mut starved) = (0, 0, 0, 0, 0, 0);
    for seed in 0..60 {
        let world = run(seed, false, 1500);
        let metrics = world.core.metrics();
        rerouted += metrics.records_rerouted;
        discarded += metrics.records_discarded;
        refused += metrics.commits_refused;
        hung += metrics.commits_hung;
        starved += metrics.commits_starved;
        let all: Vec<&u64> = world.stored.values().flatten().collect();
        late += (all.len() - all.iter().collect::<BTreeSet<_>>().len()) as u64;
    }
    // A world in which none of this happens tests nothing.
    for (what, count) in [
        ("rerouted", rerouted),
        ("discarded", discarded),
        ("refused", refused),
        ("hung", hung),
        ("twice", late),
        ("without room", starved),
    ] {
        assert!(count > 20, "{what}: {count}");
    }
}

#[test]
fn while_nothing_fails_each_partition_gets_its_records_once_and_in_wal_order() {
    for seed in 0..30 {
        let world = run(1000 + seed, true, 1500);
        assert!(world.failed_once.is_empty());
        let mut stored = 0;
        for (destination, seqs) in &world.stored {
            assert!(seqs.windows(2).all(|pair| pair[0] < pair[1]), "seed {seed}: {destination:?}");
            stored += seqs.len();
        }
        assert_eq!(stored, world.wal.records.len());
    }
}
