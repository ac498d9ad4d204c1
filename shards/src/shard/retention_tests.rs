//! Retention and idle eviction of one whole shard, on a simulated disk.

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::{RetentionOptions, Shard, ShardOptions};
use crate::api::{Delivery, MetaCommand, MetaReply, NewRecord, Settle, SettleMode, SettleStatus};
use crate::io::sim::{Fault, NthCall, Op, SimDisk};
use crate::io::Disk;
use crate::log::LogOptions;
use crate::meta::{Address, Destination, Incarnation, Snapshot, TopicMeta};
use crate::metrics::ShardMetrics;
use crate::peer::{Carrier, LocalBoxFuture, Lost, Reply, Request, Take};
use crate::queue::{CommitterOptions, Consumer};
use crate::rt::{self, sim};

pub(super) const SECOND: Duration = Duration::from_secs(1);
pub(super) const HOUR: Duration = Duration::from_secs(3600);

/// Carries what the shard sends to itself.
#[derive(Default)]
struct Loop(OnceCell<Shard>);

impl Carrier for Loop {
    fn call(&self, to: Address, request: Request) -> LocalBoxFuture<'static, Result<Reply, Lost>> {
        let shard = self.0.get().cloned();
        Box::pin(async move {
            match (request, shard) {
                (Request::Meta(MetaCommand::ConfirmGone { incarnation: Some(asked), .. }), Some(shard))
                    if shard.snapshot().topic_of(asked).is_none() =>
                {
                    Ok(Reply::Meta(MetaReply::Gone))
                }
                (Request::Meta(MetaCommand::ConfirmGone { .. }), _) => Ok(Reply::Meta(MetaReply::NotGone)),
                (request, Some(shard)) if to == Address::local(0) => Ok(shard.handle(request).await),
                _ => Err(Lost("nobody else is there".to_owned())),
            }
        })
    }

    fn send(&self, to: Address, request: Request) {
        drop(rt::spawn(rt::Queue::Foreground, self.call(to, request)));
    }
}

pub(super) struct Bench {
    pub(super) shard: Shard,
    pub(super) disk: SimDisk,
    pub(super) consumer: Consumer,
}

pub(super) fn topic(name: &str, incarnation: u64, retention_ms: u64) -> Arc<TopicMeta> {
    Arc::new(TopicMeta {
        name: Arc::from(name),
        incarnation: Incarnation(incarnation),
        partitions: 1,
        retention_ms,
        visibility_timeout_ms: 20_000,
        max_in_flight_per_partition: 10,
        max_acked_ahead_per_partition: 10,
        created_at_ms: 0,
        owner: None,
    })
}

pub(super) fn snapshot(version: u64, topics: &[Arc<TopicMeta>]) -> Arc<Snapshot> {
    let mut snapshot = Snapshot { version, shards: 1, ..Snapshot::default() };
    for topic in topics {
        snapshot.topics.insert(topic.name.clone(), topic.clone());
        snapshot.by_incarnation.insert(topic.incarnation, topic.clone());
        let placement = vec![Address::local(0); topic.partitions as usize];
        snapshot.placement.insert(topic.incarnation, Arc::from(placement));
    }
    Arc::new(snapshot)
}

pub(super) fn destination(incarnation: u64) -> Destination {
    Destination { incarnation: Incarnation(incarnation), partition: 0 }
}

impl Bench {
    pub(super) async fn start(disk: SimDisk, retention: RetentionOptions, topics: &[Arc<TopicMeta>]) -> Bench {
        Bench::start_with(disk, retention, snapshot(1, topics)).await
    }

    pub(super) async fn start_with(disk: SimDisk, retention: RetentionOptions, snapshot: Arc<Snapshot>) -> Bench {
        let data = Path::new("/data");
        for path in [data, Path::new("/data/ingress"), Path::new("/data/topics")] {
            disk.create_dir(path).await.expect("simulated");
        }
        disk.sync_dir(data).await.expect("simulated");
        disk.sync_dir(Path::new("/")).await.expect("simulated");
        let options = ShardOptions {
            id: 0,
            disk: Disk::Sim(disk.clone()),
            data_dir: data.to_owned(),
            store_id: 7,
            memory_bytes: 16 << 20,
            wal_segment_bytes: 256 << 10,
            log: LogOptions { segment_bytes: 1 << 20, ..LogOptions::default() },
            positions: CommitterOptions::default(),
            retention,
            disk_reserve_bytes: 0,
            node_disk: Default::default(),
            adopt: Vec::new(),
        };
        let carrier = Rc::new(Loop::default());
        let shard = Shard::open(options, snapshot, carrier.clone()).await.expect("opens");
        assert!(carrier.0.set(shard.clone()).is_ok());
        shard.start();
        Bench { consumer: Consumer::new(shard.queues().clone()), shard, disk }
    }

    pub(super) async fn produce(&self, topic: &str) {
        let record = NewRecord { key: b"", payload: b"hello", partition: None };
        self.shard.produce(topic, record).await.expect("accepted");
    }

    pub(super) async fn consume(&self, topic: &str) -> Delivery {
        let take = Take { max: 1, bytes_max: 1 << 20 };
        let mut taken = self.consumer.consume(topic, None, take, 5 * SECOND).await.expect("served");
        taken.pop().expect("there is a record")
    }

    pub(super) async fn ack(&self, delivery: &Delivery) {
        let Delivery { partition, offset, nonce, .. } = *delivery;
        let settle = Settle { partition, offset, nonce, mode: SettleMode::Ack };
        let statuses = self.consumer.settle(&delivery.topic, vec![settle]).await;
        assert_eq!(statuses, Some(vec![SettleStatus::Done]));
    }

    pub(super) async fn metrics(&self) -> ShardMetrics {
        self.shard.metrics().await
    }
}

pub(super) fn sweeping(idle_after: Option<Duration>, cold_interval: Option<Duration>) -> RetentionOptions {
    RetentionOptions { sweep_interval: SECOND, idle_after, cold_interval, ..RetentionOptions::default() }
}

#[test]
fn n53_1_s80_an_idle_log_is_closed_and_opened_by_the_next_use() {
    sim::run(1, async {
        let topics = [topic("orders", 1, 0)];
        let bench = Bench::start(SimDisk::new(1), sweeping(Some(10 * SECOND), None), &topics).await;
        bench.produce("orders").await;
        let first = bench.consume("orders").await;
        rt::sleep(15 * SECOND).await;
        assert_eq!(bench.metrics().await.open_logs, 1, "a lease is out");
        bench.ack(&first).await;
        rt::sleep(2 * SECOND).await;
        let metrics = bench.metrics().await;
        assert_eq!((metrics.open_logs, metrics.retention.idle_logs_evicted), (0, 1));
        let figures = |metrics: &ShardMetrics| {
            let known = &metrics.partitions[&destination(1)];
            let log = (known.high_watermark, known.segments, known.log.commits);
            (log, known.frontier, known.messages_consumed, known.messages_produced)
        };
        assert_eq!(figures(&metrics), ((1, 1, 1), 1, 1, 1), "n53_2: nothing has vanished");
        let Reply::Stats(stats) = bench.shard.handle(Request::Stats { incarnation: Incarnation(1) }).await else {
            panic!("asked for statistics")
        };
        assert_eq!((stats[0].high_watermark, stats[0].frontier, stats[0].segments), (1, 1, 1));
        assert_eq!(bench.metrics().await.open_logs, 0, "s81: figures and statistics open nothing");
        bench.produce("orders").await;
        let second = bench.consume("orders").await;
        assert_eq!(second.offset, 1, "the acked one does not come again");
        bench.ack(&second).await;
        rt::sleep(SECOND / 100).await; // a commit is counted when it has been answered, which is after it can be consumed
        assert_eq!(figures(&bench.metrics().await), ((2, 1, 2), 2, 2, 2), "counters go on");
    });
}

#[test]
fn k22_what_a_node_owns_is_open_as_soon_as_it_knows_that_it_owns_it() {
    sim::run(5, async {
        let topics = [topic("orders", 1, 0)];
        let disk = SimDisk::new(5);
        let bench = Bench::start(disk.clone(), sweeping(None, None), &topics).await;
        bench.produce("orders").await;
        bench.consume("orders").await;
        bench.shard.handle(Request::Shutdown).await;
        // A member of a cluster starts with nothing of its own, until it has caught up.
        let unaware = Snapshot { placement: Default::default(), ..(*snapshot(2, &topics)).clone() };
        let bench = Bench::start_with(disk, sweeping(None, None), Arc::new(unaware)).await;
        assert_eq!(bench.metrics().await.open_logs, 0);
        bench.shard.install(snapshot(3, &topics));
        rt::sleep(SECOND).await;
        let metrics = bench.metrics().await;
        assert_eq!((metrics.open_logs, metrics.partitions[&destination(1)].high_watermark), (1, 1));
    });
}

#[test]
fn s81_a_consumer_that_polls_keeps_its_log_open_and_a_close_forgets_no_waiter() {
    sim::run(2, async {
        let topics = [topic("orders", 1, 0)];
        let bench = Bench::start(SimDisk::new(2), sweeping(Some(10 * SECOND), None), &topics).await;
        bench.produce("orders").await;
        let delivery = bench.consume("orders").await;
        bench.ack(&delivery).await;
        let take = Take { max: 1, bytes_max: 1 << 20 };
        for _ in 0..5 {
            rt::sleep(6 * SECOND).await;
            let none = bench.consumer.consume("orders", None, take, Duration::ZERO).await.expect("served");
            assert!(none.is_empty());
        }
        assert_eq!(bench.metrics().await.retention.idle_logs_evicted, 0);
        // Parked for so long that the log is closed under it: the next record finds it all the same (S96).
        let parked = bench.consumer.clone();
        let waiting = rt::spawn(rt::Queue::Consume, async move {
            parked.consume("orders", None, take, 60 * SECOND).await.map(|taken| taken.len())
        });
        rt::sleep(20 * SECOND).await;
        assert!(bench.metrics().await.retention.idle_logs_evicted > 0);
        bench.produce("orders").await;
        assert_eq!(rt::timeout(SECOND, waiting).await, Ok(Ok(1)));
    });
}

#[test]
fn n54_2_s76_a_closed_log_is_swept_and_closed_again() {
    sim::run(4, async {
        let topics = [topic("orders", 1, HOUR.as_millis() as u64)];
        let retention = sweeping(Some(10 * SECOND), Some(60 * SECOND));
        let bench = Bench::start(SimDisk::new(4), retention, &topics).await;
        bench.produce("orders").await;
        rt::sleep(60 * SECOND).await;
        let metrics = bench.metrics().await;
        assert_eq!((metrics.open_logs, metrics.retention.cold_swept), (0, 0));
        rt::sleep(HOUR + 120 * SECOND).await;
        let metrics = bench.metrics().await;
        let known = &metrics.partitions[&destination(1)];
        assert_eq!((metrics.open_logs, metrics.retention.cold_swept), (0, 1));
        assert_eq!((known.oldest_offset, known.high_watermark, known.log.retention_records), (1, 1, 1));
        rt::sleep(HOUR).await;
        assert_eq!(bench.metrics().await.retention.cold_swept, 1, "there is nothing left to expire");
        bench.produce("orders").await;
        assert_eq!(bench.consume("orders").await.offset, 1, "c59: the frontier has passed what is gone");
    });
}

#[test]
fn n54_3_s75_a_pass_that_hangs_stops_nobody_else() {
    sim::run(5, async {
        let topics: Vec<_> = (1..=3).map(|n| topic(&format!("t{n}"), n, HOUR.as_millis() as u64)).collect();
        let bench = Bench::start(SimDisk::new(5), sweeping(None, None), &topics).await;
        for topic in &topics {
            bench.produce(&topic.name).await;
        }
        rt::sleep(HOUR - 10 * SECOND).await;
        bench.disk.inject(NthCall::new(Op::Remove, 1, Fault::Stall(HOUR)).on("t1/"));
        rt::sleep(120 * SECOND).await;
        let metrics = bench.metrics().await;
        let gone: BTreeSet<u64> = metrics
            .partitions
            .iter()
            .filter(|(_, known)| known.log.retention_us.is_some() && known.oldest_offset == 1)
            .map(|(destination, _)| destination.incarnation.0)
            .collect();
        assert_eq!(gone, BTreeSet::from([2, 3]), "the first one's file is still being removed");
        assert_eq!(metrics.retention.passes_abandoned, 1);
        // Commits and consumers of that partition do not wait for it either.
        bench.produce("t1").await;
        assert_eq!(bench.consume("t1").await.offset, 1);
    });
}

#[test]
fn s76_a_pass_over_a_closed_log_that_hangs_is_no_panic() {
    sim::run(8, async {
        let topics = [topic("orders", 1, HOUR.as_millis() as u64)];
        let retention = sweeping(Some(10 * SECOND), Some(60 * SECOND));
        let bench = Bench::start(SimDisk::new(8), retention, &topics).await;
        bench.produce("orders").await;
        rt::sleep(HOUR - 10 * SECOND).await;
        bench.disk.inject(NthCall::new(Op::Remove, 1, Fault::Stall(HOUR)).on("orders/"));
        rt::sleep(300 * SECOND).await;
        let metrics = bench.metrics().await.retention;
        assert_eq!((metrics.passes_abandoned, metrics.cold_panics, metrics.cold_swept), (1, 0, 0));
    });
}

#[test]
fn s77_a_changed_retention_reaches_every_open_log() {
    sim::run(6, async {
        let bench = Bench::start(SimDisk::new(6), sweeping(None, None), &[topic("orders", 1, 0)]).await;
        bench.produce("orders").await;
        rt::sleep(3 * HOUR).await;
        assert_eq!(bench.metrics().await.partitions[&destination(1)].oldest_offset, 0);
        bench.shard.install(snapshot(2, &[topic("orders", 1, HOUR.as_millis() as u64)]));
        rt::sleep(3 * SECOND).await;
        assert_eq!(bench.metrics().await.partitions[&destination(1)].oldest_offset, 1);
    });
}

#[test]
fn n27_refusals_of_a_deleted_topic_are_forgotten() {
    sim::run(7, async {
        let topics = [topic("orders", 1, 0)];
        let bench = Bench::start(SimDisk::new(7), sweeping(None, None), &topics).await;
        bench.shard.drain();
        let record = NewRecord { key: b"", payload: b"x", partition: None };
        assert!(bench.shard.produce("orders", record).await.is_err());
        let metrics = bench.metrics().await;
        assert_eq!(metrics.rejections["orders"].iter().sum::<u64>(), 1);
        bench.shard.install(snapshot(2, &[]));
        bench.shard.install(snapshot(3, &topics));
        assert!(bench.metrics().await.rejections.is_empty());
    });
}

#[test]
fn c100_what_nobody_consumes_has_an_age_even_when_its_log_has_been_closed() {
    sim::run(11, async {
        let topics = [topic("orders", 1, 0)];
        let bench = Bench::start(SimDisk::new(11), sweeping(Some(10 * SECOND), None), &topics).await;
        let since = |metrics: &ShardMetrics| metrics.partitions[&destination(1)].oldest_unsettled_ms;
        rt::sleep(HOUR).await;
        bench.produce("orders").await;
        rt::sleep(SECOND).await;
        let stored_at = since(&bench.metrics().await);
        assert!(stored_at >= HOUR.as_millis() as u64 && stored_at < rt::wall_clock_ms(), "{stored_at}");
        rt::sleep(30 * SECOND).await;
        let later = bench.metrics().await;
        assert_eq!((later.open_logs, since(&later)), (0, stored_at), "s81: figures keep no log open");
        bench.produce("orders").await;
        rt::sleep(SECOND).await;
        let first = bench.consume("orders").await;
        bench.ack(&first).await;
        let next = since(&bench.metrics().await);
        assert!(next > stored_at, "{next}");
        let second = bench.consume("orders").await;
        bench.ack(&second).await;
        assert_eq!(since(&bench.metrics().await), 0, "caught up");
    });
}

/// What the sweep of a start leaves of a directory under the name of the live topic 1, by what its marker says.
fn swept(marker: &'static str) -> (bool, u64) {
    sim::run(1, async move {
        let disk = SimDisk::new(1);
        let door = Disk::Sim(disk.clone());
        for dir in ["/data", "/data/topics", "/data/topics/orders", "/data/topics/orders/p00000"] {
            door.create_dir(Path::new(dir)).await.expect("simulated");
        }
        let path = Path::new("/data/topics/orders/incarnation");
        let file = door.open(path, crate::io::Open::New, crate::io::Caching::Buffered).await.expect("simulated");
        file.write_durable_at(0, crate::io::Slice::copy_from(marker.as_bytes())).await.expect("simulated");
        let bench = Bench::start(disk, RetentionOptions::default(), &[topic("orders", 1, 0)]).await;
        rt::sleep(SECOND).await;
        let kept = door.list(Path::new("/data/topics/orders/p00000")).await.is_ok();
        (kept, bench.metrics().await.set_aside.map_or(0, |found| found.orphans))
    })
}

#[test]
fn s10_k21_the_sweep_keeps_a_live_topics_directory_whose_marker_proves_nothing() {
    assert_eq!(swept("0000000000000003\n"), (true, 1), "one flipped bit, written by an older release");
    assert_eq!(swept("0000000000000003 00000000\n"), (true, 1), "one flipped bit, with a checksum");
    assert_eq!(swept("0000000000000001\n"), (true, 0), "its own");
    let former = crate::log::Mark::encode(Incarnation(3));
    assert_eq!(swept(former.leak()), (false, 0), "a former incarnation, proven, confirmed gone");
}

#[test]
fn k48_a_directory_is_prepared_for_the_live_incarnation_alone() {
    sim::run(1, async {
        let bench = Bench::start(SimDisk::new(1), RetentionOptions::default(), &[topic("orders", 2, 0)]).await;
        bench.produce("orders").await;
        for asked in [1, 3] {
            let request = Request::PrepareTopic { topic: Arc::from("orders"), incarnation: Incarnation(asked) };
            let Reply::Prepared(Err(why)) = bench.shard.handle(request).await else { panic!("{asked} is not live") };
            assert!(why.to_string().contains("is not the live one"), "{why}");
        }
        let delivery = bench.consume("orders").await;
        assert_eq!(delivery.payload(), b"hello", "the live directory was not set aside");
    });
}

#[test]
fn k45_k46_k47_a_purge_takes_the_deleted_life_alone_however_it_meets_its_successor() {
    for seed in 0..40 {
        sim::run(seed, async move {
            let disk = SimDisk::new(seed);
            let lives: Vec<_> = (1..=4).map(|life| topic("orders", life, 0)).collect();
            let bench = Bench::start(disk, RetentionOptions::default(), &lives[..1]).await;
            for (version, live) in (2..).zip(&lives[1..]) {
                bench.produce("orders").await;
                let turns = rt::random_u64() % 40;
                rt::sleep(Duration::from_micros(turns * 100)).await;
                bench.shard.install(snapshot(version, std::slice::from_ref(live)));
            }
            bench.produce("orders").await;
            let delivery = bench.consume("orders").await;
            assert_eq!((delivery.incarnation, delivery.offset), (Incarnation(4), 0), "seed {seed}");
            bench.ack(&delivery).await;
            rt::sleep(5 * SECOND).await;
            let take = Take { max: 10, bytes_max: 1 << 20 };
            let more = bench.consumer.consume("orders", None, take, Duration::ZERO).await.expect("served");
            assert!(more.is_empty(), "seed {seed}: records of a former life: {more:?}");
            let door = Disk::Sim(bench.disk.clone());
            let left = door.list(Path::new("/data/topics")).await.expect("simulated");
            let left: Vec<String> = left.iter().map(|entry| entry.name.to_string_lossy().into_owned()).collect();
            assert_eq!(left, ["orders"], "seed {seed}");
            let marks = door.list(Path::new("/data/stored")).await.expect("simulated");
            let marks: Vec<String> = marks.iter().map(|entry| entry.name.to_string_lossy().into_owned()).collect();
            assert_eq!(marks, ["orders.0000000000000004"], "seed {seed}");
        });
    }
}

#[test]
fn e11_a_wal_whose_file_was_removed_under_the_running_node_takes_no_record() {
    sim::run(1, async {
        let disk = SimDisk::new(1);
        let bench = Bench::start(disk, RetentionOptions::default(), &[topic("orders", 1, 0)]).await;
        bench.produce("orders").await;
        Disk::Sim(bench.disk.clone()).remove_dir_all(Path::new("/data/ingress")).await.expect("simulated");
        rt::sleep(SECOND).await;
        let refused = bench.shard.produce("orders", NewRecord { key: b"", payload: b"lost", partition: None }).await;
        let text = format!("{:?}", refused.expect_err("it would be lost at the exit"));
        assert!(bench.shard.inner.options.node_disk.wal_failed(), "whoever asks whether the node is ready is told");
        assert!(text.contains("/data/ingress/0/00000001.wal was removed while the broker runs"), "{text}");
    });
}

#[test]
fn d18_s45_a_stop_tells_what_the_disk_did_not_take() {
    sim::run(1, async {
        let bench = Bench::start(SimDisk::new(1), RetentionOptions::default(), &[topic("orders", 1, 0)]).await;
        bench.produce("orders").await;
        let delivery = bench.consume("orders").await;
        bench.ack(&delivery).await;
        bench.shard.handle(Request::Quiesce).await;
        for file in ["consumer.", "hwm", "checkpoint"] {
            for op in [Op::Write, Op::WriteDurable, Op::SyncData] {
                bench.disk.inject(NthCall::new(op, 1, Fault::Fail).on(file).times(u64::MAX));
            }
        }
        let Reply::ShutDown(failed) = bench.shard.handle(Request::Shutdown).await else { panic!("another reply") };
        assert_eq!((failed.positions, failed.boundaries, failed.checkpoints), (1, 1, 1), "{failed:?}");
        assert!(failed.cause.expect("the first").contains("/data/topics/orders/p00000"));
    });
}

#[test]
fn e22_d16_acks_of_a_full_disk_are_kept() {
    for (seed, acked_before) in [(1, false), (2, true)] {
        sim::run(seed, async move {
            let (disk, topics) = (SimDisk::new(seed), [topic("orders", 1, 0)]);
            let bench = Bench::start(disk.clone(), RetentionOptions::default(), &topics).await;
            for _ in 0..3 {
                bench.produce("orders").await;
            }
            rt::sleep(SECOND).await; // committed
            if acked_before {
                let first = bench.consume("orders").await;
                bench.ack(&first).await;
                rt::sleep(2 * SECOND).await;
            }
            disk.set_capacity(Some(disk.used_bytes()));
            let last = bench.consume("orders").await;
            bench.ack(&last).await;
            // Longer than an ack stays in memory, and than it stays in the page cache (D17).
            rt::sleep(3 * SECOND).await;
            disk.power_cut();
            disk.set_capacity(None);
            let bench = Bench::start(disk, RetentionOptions::default(), &topics).await;
            let next = bench.consume("orders").await;
            assert_eq!(next.offset, last.offset + 1, "acked before: {acked_before}");
        });
    }
}
