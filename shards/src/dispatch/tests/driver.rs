//! The driver in simulation, between a mock WAL and a mock owner.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::{seq_of, wal_record, MockWal, Topics};
use crate::api::{MetaCommand, MetaReply};
use crate::dispatch::{Dispatcher, Environment, Limits};
use crate::io::Slice;
use crate::log_lines::LogLines;
use crate::meta::{Address, Destination, Incarnation, NodeId, Snapshot};
use crate::peer::{Carrier, CommitBatch, CommitError, Committed, LocalBoxFuture, Lost, Reply, Request};
use crate::rt::sim::{run, Rng};
use crate::rt::sync::Notify;
use crate::rt::{self, Queue};
use crate::wal::{ReadBack, ReadLimit, Source};

const CONTROL: Address = Address { node: NodeId::LOCAL, shard: u16::MAX };

/// What the owners do with the next commit.
#[derive(Clone, Copy, PartialEq)]
enum Mood {
    Store,
    Refuse,
    /// Answer after that long.
    Slow(Duration),
    /// Gone without an answer.
    Lose,
    /// Anything, drawn from the seed.
    Random,
}

type Topic<'a> = (&'a str, u64, &'a [(u64, u16)]);

struct World {
    wal: RefCell<MockWal>,
    /// Records below this are no longer in memory.
    in_memory_from: Cell<u64>,
    staging_low: Cell<bool>,
    fail_reads: Cell<u32>,
    reads_from_disk: Cell<u32>,
    advanced: Notify,
    checkpoint: Cell<u64>,
    snapshot: RefCell<Arc<Snapshot>>,
    changed: Notify,
    dead: RefCell<BTreeSet<u64>>,
    mood: Cell<Mood>,
    rng: RefCell<Rng>,
    stored: RefCell<BTreeMap<Destination, Vec<u64>>>,
    /// Commits that hold lent buffers right now.
    lent: Cell<u32>,
    turns: Cell<u32>,
    commits: Cell<u32>,
    questions: Cell<u32>,
    gone: Cell<bool>,
}

impl World {
    fn new(seed: u64) -> Rc<World> {
        Rc::new(World {
            wal: RefCell::new(MockWal { first: 1, records: Vec::new() }),
            in_memory_from: Cell::new(0),
            staging_low: Cell::new(false),
            fail_reads: Cell::new(0),
            reads_from_disk: Cell::new(0),
            advanced: Notify::new(),
            checkpoint: Cell::new(1),
            snapshot: RefCell::default(),
            changed: Notify::new(),
            dead: RefCell::default(),
            mood: Cell::new(Mood::Store),
            rng: RefCell::new(Rng::new(seed)),
            stored: RefCell::default(),
            lent: Cell::new(0),
            turns: Cell::new(0),
            commits: Cell::new(0),
            questions: Cell::new(0),
            gone: Cell::new(true),
        })
    }

    /// Name, id, and node and shard of each partition.
    fn topics(&self, topics: &[Topic]) {
        let mut all = Topics::default();
        for (name, id, addresses) in topics {
            let addresses: Vec<Address> =
                addresses.iter().map(|(node, shard)| Address { node: NodeId(*node), shard: *shard }).collect();
            all.0.insert((*name).into(), (*id, addresses.len() as u32, addresses));
        }
        let version = self.snapshot.borrow().version + 1;
        *self.snapshot.borrow_mut() = all.snapshot(version);
        self.changed.notify_all();
    }

    fn append(&self, topic: &str, id: u64, partition: u32, count: u64) {
        let mut wal = self.wal.borrow_mut();
        for _ in 0..count {
            let record = wal_record(wal.next(), topic, Some(id), partition, 20);
            wal.records.push(record);
        }
        self.advanced.notify_one();
    }

    fn start(self: &Rc<World>) -> Dispatcher {
        Dispatcher::start(self.clone(), Rc::new(Shard(self.clone())), Limits::default())
    }

    fn stored(&self, id: u64, partition: u32) -> Vec<u64> {
        let destination = Destination { incarnation: Incarnation(id), partition };
        self.stored.borrow().get(&destination).cloned().unwrap_or_default()
    }
}

impl Source for World {
    fn durable_next(&self) -> u64 {
        self.wal.borrow().next()
    }

    fn oldest(&self) -> u64 {
        1
    }

    fn recovered_checkpoint(&self) -> u64 {
        self.checkpoint.get()
    }

    fn durable_advanced(&self) -> Notify {
        self.advanced.clone()
    }

    fn read_memory(&self, from: u64, limit: ReadLimit) -> Option<ReadBack> {
        if from < self.in_memory_from.get() {
            return None;
        }
        let wal = self.wal.borrow();
        Some(wal.read(from, wal.next(), limit, &|_| true))
    }

    fn read_disk<'a>(
        &'a self,
        from: u64,
        until: u64,
        limit: ReadLimit,
        want: &'a dyn Fn(u64) -> bool,
    ) -> LocalBoxFuture<'a, io::Result<ReadBack>> {
        Box::pin(async move {
            self.reads_from_disk.set(self.reads_from_disk.get() + 1);
            rt::sleep(Duration::from_micros(80)).await;
            if self.fail_reads.get() > 0 {
                self.fail_reads.set(self.fail_reads.get() - 1);
                return Err(io::Error::from_raw_os_error(5));
            }
            let read = self.wal.borrow().read(from, until, limit, want);
            rt::sleep(Duration::from_micros(20)).await;
            Ok(read)
        })
    }

    fn store_checkpoint(&self, seq: u64) {
        assert!(seq > self.checkpoint.get());
        self.checkpoint.set(seq);
    }

    fn staging_low(&self) -> bool {
        self.staging_low.get()
    }
}

/// The world as the dispatcher's shard sees it, and the way to the owners.
#[derive(Clone)]
struct Shard(Rc<World>);

impl Environment for Shard {
    fn snapshot(&self) -> Arc<Snapshot> {
        self.0.turns.set(self.0.turns.get() + 1);
        self.0.snapshot.borrow().clone()
    }

    fn changed(&self) -> Notify {
        self.0.changed.clone()
    }

    fn carrier(&self) -> Rc<dyn Carrier> {
        Rc::new(self.clone())
    }

    fn control(&self) -> Address {
        CONTROL
    }

    fn alive(&self, node: NodeId) -> bool {
        !self.0.dead.borrow().contains(&node.0)
    }
}

/// Counts the calls whose caller did not stay for the reply.
struct Loan(Rc<World>);

impl Drop for Loan {
    fn drop(&mut self) {
        self.0.lent.set(self.0.lent.get() - 1);
    }
}

impl Carrier for Shard {
    fn call(&self, to: Address, request: Request) -> LocalBoxFuture<'static, Result<Reply, Lost>> {
        let world = self.0.clone();
        Box::pin(async move {
            match request {
                Request::Commit(batch) => {
                    world.lent.set(world.lent.get() + 1);
                    let loan = Loan(world.clone());
                    let result = world.commit(&batch).await;
                    drop(loan);
                    result.map(Reply::Commit)
                }
                Request::Meta(MetaCommand::ConfirmGone { .. }) => {
                    assert_eq!(to, CONTROL);
                    world.questions.set(world.questions.get() + 1);
                    rt::sleep(Duration::from_millis(3)).await;
                    Ok(Reply::Meta(if world.gone.get() { MetaReply::Gone } else { MetaReply::NotGone }))
                }
                other => panic!("the dispatcher has no business with {other:?}"),
            }
        })
    }

    fn send(&self, _to: Address, request: Request) {
        panic!("the dispatcher sends nothing one way: {request:?}");
    }
}

impl World {
    async fn commit(&self, batch: &CommitBatch) -> Result<Result<Committed, CommitError>, Lost> {
        self.commits.set(self.commits.get() + 1);
        let mood = match self.mood.get() {
            Mood::Random => match self.rng.borrow_mut().below(12) {
                0 => Mood::Refuse,
                1 => Mood::Lose,
                2 => Mood::Slow(Duration::from_secs(40)),
                3 => Mood::Slow(Duration::from_secs(2)),
                _ => Mood::Store,
            },
            mood => mood,
        };
        let took = self.rng.borrow_mut().range(50, 400);
        rt::sleep(Duration::from_micros(took)).await;
        match mood {
            Mood::Refuse => return Ok(Err(CommitError::Failed("no space".into()))),
            Mood::Lose => return Err(Lost("the ring is closed".into())),
            Mood::Slow(time) => rt::sleep(time).await,
            Mood::Store | Mood::Random => {}
        }
        let seqs = batch.records.iter().map(seq_of);
        let mut stored = self.stored.borrow_mut();
        let partition = stored.entry(batch.destination).or_default();
        let base_offset = partition.len() as u64;
        partition.extend(seqs);
        Ok(Ok(Committed { base_offset, count: batch.records.len() as u64 }))
    }
}

#[test]
fn records_flow_from_memory_to_their_partitions() {
    run(1, async {
        let world = World::new(1);
        world.topics(&[("orders", 1, &[(0, 0), (0, 1)])]);
        let dispatcher = world.start();
        for _ in 0..50 {
            world.append("orders", 1, 0, 3);
            world.append("orders", 1, 1, 1);
            rt::sleep(Duration::from_micros(100)).await;
        }
        dispatcher.drained().await;
        assert_eq!((world.checkpoint.get(), dispatcher.checkpoint()), (201, 201));
        let zero: Vec<u64> = (1..=200).filter(|seq| seq % 4 != 0).collect();
        let one: Vec<u64> = (1..=200).filter(|seq| seq % 4 == 0).collect();
        assert_eq!((world.stored(1, 0), world.stored(1, 1)), (zero, one));
        assert_eq!(world.reads_from_disk.get(), 0);
        let metrics = dispatcher.metrics();
        assert_eq!((metrics.records_committed, metrics.commits), (200, u64::from(world.commits.get())));
        assert!(metrics.commits < 100, "small batches linger: {}", metrics.commits);
    });
}

#[test]
fn e19_an_idle_dispatcher_does_not_run() {
    run(2, async {
        let world = World::new(2);
        world.topics(&[("orders", 1, &[(0, 0)])]);
        let dispatcher = world.start();
        world.append("orders", 1, 0, 1);
        dispatcher.drained().await;
        rt::sleep(Duration::from_secs(1)).await;
        let turns = world.turns.get();
        rt::sleep(Duration::from_secs(3600)).await;
        assert_eq!(world.turns.get(), turns);
        world.append("orders", 1, 0, 1);
        dispatcher.drained().await;
        assert_eq!(world.stored(1, 0), [1, 2]);
    });
}

#[test]
fn what_is_no_longer_in_memory_is_read_from_disk() {
    run(3, async {
        let world = World::new(3);
        world.topics(&[("orders", 1, &[(0, 0)])]);
        world.append("orders", 1, 0, 5000);
        world.in_memory_from.set(4000);
        let dispatcher = world.start();
        dispatcher.drained().await;
        assert_eq!(world.stored(1, 0), (1..=5000).collect::<Vec<_>>());
        assert!(world.reads_from_disk.get() > 0);
    });
}

#[test]
fn a_restart_goes_on_at_the_checkpoint() {
    run(4, async {
        let world = World::new(4);
        world.topics(&[("orders", 1, &[(0, 0), (0, 1)])]);
        let dispatcher = world.start();
        world.append("orders", 1, 0, 10);
        dispatcher.drained().await;
        world.mood.set(Mood::Slow(Duration::from_millis(200)));
        world.append("orders", 1, 0, 10);
        rt::sleep(Duration::from_millis(20)).await;
        world.append("orders", 1, 1, 10);
        let stopped_at = rt::now();
        dispatcher.stop().await;
        // The commit in flight landed and counts; what queued or came later was not sent.
        assert!(rt::now() - stopped_at < Duration::from_secs(1));
        assert_eq!((world.checkpoint.get(), world.lent.get()), (21, 0));
        let commits = world.commits.get();
        rt::sleep(Duration::from_secs(5)).await;
        assert_eq!(world.commits.get(), commits);
        let dispatcher = world.start();
        dispatcher.drained().await;
        assert_eq!(world.stored(1, 0), (1..=20).collect::<Vec<_>>());
        assert_eq!(world.stored(1, 1), (21..=30).collect::<Vec<_>>());
    });
}

#[test]
fn a_stop_does_not_wait_for_a_hung_commit() {
    run(5, async {
        let world = World::new(5);
        world.topics(&[("orders", 1, &[(0, 0)])]);
        let dispatcher = world.start();
        world.mood.set(Mood::Slow(Duration::from_secs(25)));
        world.append("orders", 1, 0, 10);
        rt::sleep(Duration::from_millis(20)).await;
        let stopped_at = rt::now();
        dispatcher.stop().await;
        assert!(rt::now() - stopped_at <= Duration::from_secs(1));
        assert_eq!(world.checkpoint.get(), 1);
    });
}

#[test]
fn e21_buffers_are_lent_until_the_reply_even_after_the_budget() {
    run(6, async {
        let world = World::new(6);
        world.topics(&[("orders", 1, &[(0, 0)])]);
        let dispatcher = world.start();
        world.mood.set(Mood::Slow(Duration::from_secs(100)));
        world.append("orders", 1, 0, 3);
        rt::sleep(Duration::from_secs(1)).await;
        world.mood.set(Mood::Refuse);
        rt::sleep(Duration::from_secs(60)).await;
        // The budget ran out at 30 s and the destination has been probed since; the loan goes on.
        let metrics = dispatcher.metrics();
        assert!(metrics.commits_failed > 20, "{}", metrics.commits_failed);
        assert_eq!((world.lent.get(), metrics.destinations_failing), (1, 1));
        assert!(metrics.held_bytes > 0);
        // The reply at last: a success is believed, nothing has to be sent again.
        rt::sleep(Duration::from_secs(45)).await;
        assert_eq!((world.lent.get(), world.checkpoint.get()), (0, 4));
        assert_eq!(world.stored(1, 0), [1, 2, 3]);
        assert_eq!(dispatcher.metrics().held_bytes, 0);
    });
}

#[test]
fn read_errors_make_the_dispatcher_rest_for_a_second() {
    run(7, async {
        let world = World::new(7);
        world.topics(&[("orders", 1, &[(0, 0)])]);
        world.in_memory_from.set(u64::MAX);
        world.fail_reads.set(3);
        let dispatcher = world.start();
        let started = rt::now();
        world.append("orders", 1, 0, 3);
        dispatcher.drained().await;
        let took = rt::now() - started;
        assert!(took >= Duration::from_secs(3) && took < Duration::from_millis(3100), "{took:?}");
        assert_eq!(dispatcher.metrics().read_failures, 3);
    });
}

#[test]
fn lesson_n25_a_deleted_topics_backlog_costs_one_question() {
    run(8, async {
        let world = World::new(8);
        world.append("gone", 9, 0, 3000);
        world.append("gone", 9, 1, 3000);
        let dispatcher = world.start();
        dispatcher.drained().await;
        assert_eq!((world.questions.get(), world.commits.get()), (1, 0));
        assert_eq!(dispatcher.metrics().records_discarded, 6000);
        assert_eq!(dispatcher.metrics().destinations, 0);
    });
}

#[test]
fn lesson_n11_an_unanswered_question_discards_nothing() {
    run(9, async {
        let world = World::new(9);
        world.gone.set(false);
        world.append("late", 9, 0, 10);
        let dispatcher = world.start();
        rt::sleep(Duration::from_secs(10)).await;
        assert!((8..=11).contains(&world.questions.get()), "once a second: {}", world.questions.get());
        assert_eq!(dispatcher.metrics().records_discarded, 0);
        world.topics(&[("late", 9, &[(0, 0)])]);
        dispatcher.drained().await;
        assert_eq!(world.stored(9, 0), (1..=10).collect::<Vec<_>>());
    });
}

#[test]
fn a_death_is_acted_on_when_it_is_announced() {
    run(10, async {
        let world = World::new(10);
        world.topics(&[("orders", 1, &[(7, 0), (0, 0)])]);
        let dispatcher = world.start();
        world.mood.set(Mood::Slow(Duration::from_secs(20)));
        world.append("orders", 1, 0, 1);
        rt::sleep(Duration::from_millis(10)).await;
        world.mood.set(Mood::Store);
        world.append("orders", 1, 0, 5);
        rt::sleep(Duration::from_millis(10)).await;
        assert_eq!(world.stored(1, 1), [0u64; 0]);
        world.dead.borrow_mut().insert(7);
        world.changed.notify_all();
        rt::sleep(Duration::from_millis(10)).await;
        assert_eq!(world.stored(1, 1), [2, 3, 4, 5, 6]);
        drop(dispatcher);
    });
}

#[test]
fn e20_memory_pressure_lets_go_and_nothing_is_lost() {
    run(11, async {
        let world = World::new(11);
        world.topics(&[("orders", 1, &[(0, 0)])]);
        let dispatcher = world.start();
        world.mood.set(Mood::Slow(Duration::from_millis(300)));
        world.append("orders", 1, 0, 1);
        rt::sleep(Duration::from_millis(1)).await;
        world.append("orders", 1, 0, 1000);
        rt::sleep(Duration::from_millis(1)).await;
        assert_eq!(dispatcher.metrics().held_records, 1001);
        world.staging_low.set(true);
        world.advanced.notify_one();
        rt::sleep(Duration::from_millis(1)).await;
        let metrics = dispatcher.metrics();
        assert_eq!((metrics.held_records, metrics.skipped_records), (1, 1000));
        world.staging_low.set(false);
        dispatcher.drained().await;
        assert_eq!(world.stored(1, 0), (1..=1001).collect::<Vec<_>>());
    });
}

#[test]
fn e20_under_pressure_a_commit_does_not_pin_staging_memory() {
    run(12, async {
        let world = World::new(12);
        world.topics(&[("orders", 1, &[(0, 0)])]);
        world.staging_low.set(true);
        world.mood.set(Mood::Slow(Duration::from_secs(20)));
        let dispatcher = world.start();
        // A WAL whose records lie in memory of their own, so that it can be seen who still refers to it.
        let staging = Slice::copy_from(b"0123456789abcdef");
        for at in [0, 8] {
            let mut wal = world.wal.borrow_mut();
            let mut record = wal_record(wal.next(), "orders", Some(1), 0, 8);
            record.record.body = staging.slice(at..at + 8);
            wal.records.push(record);
        }
        world.advanced.notify_one();
        rt::sleep(Duration::from_millis(1)).await;
        assert_eq!(world.lent.get(), 1);
        world.wal.borrow_mut().records.iter_mut().for_each(|record| record.record.body = Slice::empty());
        assert!(staging.try_into_mut().is_ok(), "the commit in flight refers to staging memory");
        drop(dispatcher);
    });
}

#[test]
fn every_record_arrives_whatever_the_owners_do() {
    for seed in 100..115 {
        run(seed, async move {
            let world = World::new(seed);
            world.topics(&[("orders", 1, &[(0, 0), (0, 1), (7, 0)]), ("mail", 2, &[(0, 1), (7, 1)])]);
            world.mood.set(Mood::Random);
            let dispatcher = world.start();
            let feed = world.clone();
            let fed = rt::spawn(Queue::Foreground, async move {
                let mut rng = Rng::new(seed);
                for _ in 0..300 {
                    let (topic, id, partitions) = if rng.chance(1, 3) { ("mail", 2, 2) } else { ("orders", 1, 3) };
                    feed.append(topic, id, rng.below(partitions) as u32, rng.range(1, 20));
                    feed.in_memory_from.set(feed.wal.borrow().next().saturating_sub(rng.below(200)));
                    if rng.chance(1, 40) {
                        feed.fail_reads.set(1);
                    }
                    feed.staging_low.set(rng.chance(1, 10));
                    rt::sleep(Duration::from_millis(rng.below(30))).await;
                }
            });
            fed.await;
            world.staging_low.set(false);
            world.mood.set(Mood::Store);
            dispatcher.drained().await;
            let stored: BTreeSet<u64> = world.stored.borrow().values().flatten().copied().collect();
            let all = world.wal.borrow().next();
            assert!((1..all).all(|seq| stored.contains(&seq)), "seed {seed}: {} of {}", stored.len(), all - 1);
            assert_eq!(world.checkpoint.get(), all);
        });
    }
}

#[test]
fn a_node_that_fails_and_recovers_is_a_line_for_each_change_not_for_each_partition() {
    let (lines, _guard) = LogLines::of_this_thread();
    run(1, async move {
        let world = World::new(1);
        let partitions = [(7, 0); 40];
        world.topics(&[("orders", 1, &partitions)]);
        let dispatcher = world.start();
        world.mood.set(Mood::Lose);
        (0..40).for_each(|partition| world.append("orders", 1, partition, 3));
        rt::sleep(Duration::from_secs(2)).await;
        assert_eq!(lines.count(), 1, "they fail");
        rt::sleep(Duration::from_secs(4)).await;
        assert_eq!(lines.count(), 2, "their records go elsewhere");
        world.mood.set(Mood::Store);
        dispatcher.drained().await;
        rt::sleep(Duration::from_secs(10)).await;
        assert_eq!(lines.count(), 3, "they are well again");
    });
}
