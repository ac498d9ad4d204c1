//! Runs scripts against the core. A script is a transcript: each command is followed by what it must bring about.
//!
//! ```text
//! topic NAME ID PARTITIONS on NODE/SHARD,...   create, recreate or move; partitions without an address are unresolved
//! drop NAME                                    the local replica no longer has the topic
//! append FIRST-LAST NAME/PARTITION [bytes=N] [id=N|v1]   records become durable (v1: without an incarnation id)
//! ok|fail|mismatch|unreachable NAME/PARTITION [late]   answer to the newest (late: the oldest) commit to it;
//!                                              `#ID/PARTITION` names one of a topic that is no longer live
//! gone|not-gone NAME ID                        the control thread's answer (ID `-`: by name)
//! dead|alive NODE                              membership
//! full|room NODE/SHARD                         the owner has no room for commits | has some again (E41)
//! freed NODE/SHARD                             it has less than before in use, but not enough for what waits
//! fits NODE/SHARD                              it has no room for what waits, but would have for less
//! served NAME/PARTITION NODE/SHARD             who answers for it from here on
//! tick TIME                                    time passes, timer by timer
//! disk | memory                                where new records are read from here on
//! read-error | hole                            the next read fails | leaves out its first record
//! staging-low | stop
//! state                                        > checkpoint C held H skipped S lanes L timer yes|no
//! ```
//! Outcomes: `commit DEST [SEQS] to ADDRESS (BUDGET)`, `checkpoint N`, `ask NAME ID`, `rescan FROM`, `disk FROM`,
//! and what is logged.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::{seq_of, wal_record, MockWal, Topics};
use crate::dispatch::core::{Action, CommitId, Core, Limits, Report, TopicLife};
use crate::meta::{Address, Destination, Incarnation, NodeId};
use crate::peer::{CommitBatch, CommitError, Committed};
use crate::rt::Instant;

pub struct Script {
    pub core: Core,
    now: Instant,
    wal: MockWal,
    topics: Topics,
    version: u64,
    open: Vec<(Destination, CommitId, u64, Address)>,
    /// Owners that have no room for commits.
    full: BTreeSet<Address>,
    /// Where partitions are served, where that is not where they were sent.
    served: BTreeMap<Destination, Address>,
    from_memory: bool,
    fail_read: bool,
    leave_hole: bool,
    output: Vec<String>,
    quiet: bool,
}

/// Runs a transcript from checkpoint 1 on and compares.
pub fn run(transcript: &str) -> Script {
    let mut script = Script::new(Limits::default());
    script.check(transcript);
    script
}

impl Script {
    pub fn new(limits: Limits) -> Script {
        let now = Instant(1_000_000_000);
        let topics = Topics::default();
        Script {
            core: Core::new(limits, 1, topics.snapshot(0), now),
            now,
            wal: MockWal { first: 1, records: Vec::new() },
            topics,
            version: 0,
            open: Vec::new(),
            full: BTreeSet::new(),
            served: BTreeMap::new(),
            from_memory: true,
            fail_read: false,
            leave_hole: false,
            output: Vec::new(),
            quiet: false,
        }
    }

    pub fn check(&mut self, transcript: &str) {
        let expected: Vec<&str> = transcript.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        let mut actual = Vec::new();
        for line in expected.iter().filter(|line| !line.starts_with('>')) {
            actual.push((*line).to_owned());
            actual.extend(self.command(line));
        }
        let expected = expected.join("\n");
        let actual = actual.join("\n");
        assert!(expected == actual, "the transcript differs.\n--- expected\n{expected}\n--- actual\n{actual}\n");
    }

    /// Runs one command and returns what it brought about.
    pub fn command(&mut self, line: &str) -> Vec<String> {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [] => {}
            [first, ..] if first.starts_with('#') => {}
            ["topic", name, id, partitions, "on", addresses] => {
                let addresses = addresses.split(',').map(address).collect();
                self.topics.0.insert(name.into(), (number(id), number(partitions) as u32, addresses));
                self.install();
            }
            ["drop", name] => {
                self.topics.0.remove(name);
                self.install();
            }
            ["append", range, partition, ref options @ ..] => self.append(range, partition, options),
            [verb @ ("ok" | "fail" | "mismatch" | "unreachable"), partition, ref which @ ..] => {
                self.answer(verb, partition, which == ["late"]);
            }
            [verb @ ("gone" | "not-gone"), name, id] => {
                let incarnation = (id != "-").then(|| Incarnation(number(id)));
                self.core.gone(TopicLife { topic: name.into(), incarnation }, verb == "gone");
            }
            ["dead", node] => self.core.liveness(NodeId(number(node)), false),
            ["alive", node] => self.core.liveness(NodeId(number(node)), true),
            ["full", owner] => drop(self.full.insert(address(owner))),
            ["fits", owner] => drop(self.full.remove(&address(owner))),
            ["room", owner] => {
                self.full.remove(&address(owner));
                self.core.room_freed();
            }
            ["freed", owner] => {
                assert!(self.full.contains(&address(owner)));
                self.core.room_freed();
            }
            ["served", partition, owner] => {
                let destination = self.destination(partition);
                self.served.insert(destination, address(owner));
            }
            ["tick", time] => self.tick(time),
            ["disk"] => self.from_memory = false,
            ["memory"] => self.from_memory = true,
            ["read-error"] => self.fail_read = true,
            ["hole"] => self.leave_hole = true,
            ["staging-low"] => self.core.staging_low(),
            ["stop"] => self.core.stop(),
            ["state"] => self.state(),
            _ => panic!("no such command: {line}"),
        }
        self.settle();
        std::mem::take(&mut self.output)
    }

    /// Only commands whose outcome a test looks at itself.
    pub fn quietly(&mut self, commands: &str) {
        self.quiet = true;
        for line in commands.lines().map(str::trim) {
            self.command(line);
        }
        self.quiet = false;
    }

    /// The open commits will be answered as one record shorter than they are.
    pub fn miscount(&mut self) {
        self.open.iter_mut().for_each(|(_, _, count, _)| *count -= 1);
    }

    fn install(&mut self) {
        self.version += 1;
        self.core.install(self.topics.snapshot(self.version));
    }

    fn append(&mut self, range: &str, partition: &str, options: &[&str]) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (topic, partition) = partition.split_once('/').expect("NAME/PARTITION");
        assert_eq!(number(first), self.wal.next(), "sequence numbers are consecutive");
        let option = |name: &str| options.iter().find_map(|option| option.strip_prefix(name));
        let bytes = option("bytes=").map_or(8, number) as usize;
        let live = self.topics.0.get(topic).map(|(id, _, _)| *id);
        let id = option("id=").map(number).or(live).filter(|_| option("v1").is_none());
        for seq in number(first)..=number(last) {
            self.wal.records.push(wal_record(seq, topic, id, number(partition) as u32, bytes));
        }
        self.core.durable(self.wal.next());
    }

    fn answer(&mut self, verb: &str, partition: &str, late: bool) {
        let to = self.destination(partition);
        let mut answered = self.open.iter().enumerate().filter(|(_, (open, ..))| *open == to);
        let found = if late { answered.next() } else { answered.next_back() };
        let at = found.unwrap_or_else(|| panic!("no commit to {partition} is open")).0;
        let (_, id, count, to_owner) = self.open.remove(at);
        let served = self.served.get(&to).copied().unwrap_or(to_owner);
        let result = match verb {
            "ok" => Ok(Committed { base_offset: 0, count }),
            "fail" => Err(CommitError::Failed("no space".into())),
            "unreachable" => Err(CommitError::Unreachable("connection lost".into())),
            _ => Err(CommitError::IncarnationMismatch { accepted_under: Incarnation(1), live: Incarnation(2) }),
        };
        self.core.landed(id, served, result);
    }

    fn tick(&mut self, time: &str) {
        let nanos = match (time.strip_suffix("us"), time.strip_suffix("ms"), time.strip_suffix('s')) {
            (Some(us), _, _) => number(us) * 1_000,
            (_, Some(ms), _) => number(ms) * 1_000_000,
            (_, _, Some(s)) => number(s) * 1_000_000_000,
            _ => panic!("no such time: {time}"),
        };
        let until = self.now + Duration::from_nanos(nanos);
        while let Some(at) = self.core.next_timer().filter(|at| *at <= until) {
            let before = self.now;
            self.now = self.now.max(at);
            self.core.advance(self.now);
            self.settle();
            let again = self.core.next_timer();
            assert!(again != Some(at) || self.now > before, "the timer at {at:?} is armed again at once");
        }
        self.now = until;
        self.core.advance(self.now);
    }

    fn state(&mut self) {
        let metrics = self.core.metrics();
        let timer = if self.core.next_timer().is_some() { "yes" } else { "no" };
        self.output.push(format!(
            "> checkpoint {} held {} skipped {} lanes {} timer {timer}",
            metrics.checkpoint, metrics.held_records, metrics.skipped_records, metrics.destinations
        ));
    }

    /// Pumps until nothing happens any more.
    fn settle(&mut self) {
        self.core.pump(&mut |to, _, _| !self.full.contains(&to));
        let mut turns = 0;
        while let Some(action) = self.core.next_action() {
            turns += 1;
            assert!(turns < 100_000, "the core never comes to rest");
            self.act(action);
            self.core.pump(&mut |to, _, _| !self.full.contains(&to));
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::ReadNew { from, until, limit } => {
                if !self.from_memory {
                    self.say(format!("disk {from}"));
                }
                if std::mem::take(&mut self.fail_read) {
                    return self.core.read_failed(true);
                }
                let mut read = self.wal.read(from, until, limit, &|_| true);
                if std::mem::take(&mut self.leave_hole) {
                    read.records.remove(0);
                }
                self.core.new_records(read, self.from_memory);
            }
            Action::ReadSkipped { from, until, limit } => {
                self.say(format!("rescan {from}"));
                if std::mem::take(&mut self.fail_read) {
                    return self.core.read_failed(false);
                }
                let read = self.wal.read(from, until, limit, &|seq| self.core.wants(seq));
                self.core.skipped_records(read);
            }
            Action::Commit { id, to, batch } => {
                let partition = self.name(batch.destination);
                self.check_batch(&batch);
                let seqs: Vec<u64> = batch.records.iter().map(seq_of).collect();
                let by_name = if batch.accepted_under.is_none() { " by name" } else { "" };
                let (node, shard, budget) = (to.node.0, to.shard, batch.budget.as_secs());
                self.say(format!("commit {partition} {} to {node}/{shard} ({budget}s){by_name}", ranges(&seqs)));
                self.open.push((batch.destination, id, seqs.len() as u64, to));
            }
            Action::StoreCheckpoint(seq) => self.say(format!("checkpoint {seq}")),
            Action::AskGone(life) => self.say(format!("ask {}", show(&life))),
            Action::Report(report) => {
                let text = self.report(report);
                self.say(text);
            }
        }
    }

    fn check_batch(&self, batch: &CommitBatch) {
        let bytes: usize = batch.records.iter().map(|record| record.body.len()).sum();
        assert!(batch.records.len() == 1 || bytes <= 8 << 20, "E16: {bytes} bytes in one commit");
        assert!(batch.accepted_under.is_none_or(|id| id == batch.destination.incarnation));
    }

    fn report(&self, report: Report) -> String {
        match report {
            Report::Discarded { life, partition, seq, replaced, error } => {
                let why = if replaced { "replaced" } else { "deleted" };
                let error = error.map(|error| format!(" after: {error}")).unwrap_or_default();
                format!("discarded {}/{partition} seq {seq} {why}{error}", show(&life))
            }
            Report::DiscardedQueue { life, partition, records } => {
                format!("discarded {}/{partition} queue of {records}", show(&life))
            }
            Report::Refused { destination, records, .. } => format!("refused {} {records}", self.name(destination)),
            Report::Failing { destination, error, .. } => format!("failing {} {error}", self.name(destination)),
            Report::Rerouting { destination, .. } => format!("rerouting {}", self.name(destination)),
            Report::Recovered { destination, .. } => format!("recovered {}", self.name(destination)),
            Report::Hung { destination, records, .. } => format!("hung {} {records}", self.name(destination)),
            Report::Missing { seq } => format!("missing {seq}"),
        }
    }

    fn name(&self, destination: Destination) -> String {
        let id = destination.incarnation.0;
        let live = self.topics.0.iter().find(|(_, (live, ..))| *live == id).map(|(name, _)| name.clone());
        format!("{}/{}", live.unwrap_or_else(|| format!("#{id}")), destination.partition)
    }

    /// `NAME/PARTITION` of the live topic, `#ID/PARTITION` of another.
    fn destination(&self, partition: &str) -> Destination {
        let (topic, partition) = partition.split_once('/').expect("NAME/PARTITION");
        let id = match topic.strip_prefix('#') {
            Some(id) => number(id),
            None => self.topics.0.get(topic).unwrap_or_else(|| panic!("no topic {topic}")).0,
        };
        Destination { incarnation: Incarnation(id), partition: number(partition) as u32 }
    }

    fn say(&mut self, outcome: String) {
        if !self.quiet {
            self.output.push(format!("> {outcome}"));
        }
    }
}

fn show(life: &TopicLife) -> String {
    format!("{} {}", life.topic, life.incarnation.map_or("-".into(), |id| id.0.to_string()))
}

fn number(text: &str) -> u64 {
    text.parse().unwrap_or_else(|_| panic!("not a number: {text}"))
}

fn address(text: &str) -> Address {
    let (node, shard) = text.split_once('/').expect("NODE/SHARD");
    Address { node: NodeId(number(node)), shard: number(shard) as u16 }
}

/// `[1-3 7]`
fn ranges(seqs: &[u64]) -> String {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for &seq in seqs {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == seq => *last = seq,
            _ => runs.push((seq, seq)),
        }
    }
    let show = |(first, last): &(u64, u64)| if first == last { format!("{first}") } else { format!("{first}-{last}") };
    format!("[{}]", runs.iter().map(show).collect::<Vec<_>>().join(" "))
}
