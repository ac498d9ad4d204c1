//! Topics whose directories somebody removed while nobody looked.

use std::future::Future;
use std::path::{Path, PathBuf};

use super::retention_tests::{destination, topic, Bench, SECOND};
use super::RetentionOptions;
use crate::api::{ConsumeError, NewRecord};
use crate::io::sim::{Fault, NthCall, Op, SimDisk};
use crate::io::{Caching, Disk, Open, Slice};
use crate::log::Mark;
use crate::log_lines::LogLines;
use crate::meta::Incarnation;
use crate::metrics::ShardMetrics;
use crate::peer::{CommitError, NoLog, Record, Reply, Request, Take};
use crate::rt::{self, sim};

fn refused(metrics: &ShardMetrics) -> Vec<u64> {
    let all = metrics.partitions.iter();
    all.filter(|(_, known)| known.log.poisoned).map(|(destination, _)| destination.incarnation.0).collect()
}

async fn consume(bench: &Bench, topic: &str) -> Result<Vec<u64>, ConsumeError> {
    let take = Take { max: 10, bytes_max: 1 << 20 };
    let taken = bench.consumer.consume(topic, None, take, SECOND).await?;
    Ok(taken.iter().map(|delivery| delivery.offset).collect())
}

/// Two topics of which each has a record; then the broker is stopped and `gone` removed.
async fn started_without(gone: Option<&'static str>) -> (Bench, LogLines) {
    started_after(|disk| async move {
        if let Some(gone) = gone {
            disk.remove_dir_all(Path::new(gone)).await.expect("simulated");
        }
    })
    .await
}

/// Two topics of which each has a record; then the broker is stopped, and something done to its disk.
async fn started_after<F: Future<Output = ()>>(damage: impl FnOnce(Disk) -> F) -> (Bench, LogLines) {
    let (device, topics) = (SimDisk::new(1), [topic("orders", 1, 0), topic("users", 2, 0)]);
    let bench = Bench::start(device.clone(), RetentionOptions::default(), &topics).await;
    for topic in &topics {
        bench.produce(&topic.name).await;
    }
    rt::sleep(2 * SECOND).await;
    bench.shard.handle(Request::Quiesce).await;
    bench.shard.handle(Request::Shutdown).await;
    damage(Disk::Sim(device.clone())).await;
    let (lines, _guard) = LogLines::of_this_thread();
    let bench = Bench::start(device, RetentionOptions::default(), &topics).await;
    rt::sleep(SECOND).await;
    (bench, lines)
}

#[test]
fn s27_a_topic_whose_directory_is_gone_is_not_served_and_never_begun_again_at_offset_0() {
    sim::run(1, async {
        assert!(!started_without(None).await.1.any_with(&["are gone"]));
        let (bench, lines) = started_without(Some("/data/topics/orders")).await;
        assert_eq!(refused(&bench.metrics().await), [1], "seen before anybody uses it");
        let said = ["ERROR", "the files of a topic are gone", "topic=\"orders\"", "/data/stored/orders."];
        assert!(lines.any_with(&said), "in silence");
        let described = bench.shard.handle(Request::Stats { incarnation: destination(1).incarnation }).await;
        assert!(matches!(described, Reply::Stats(known) if known.is_empty()), "it would be taken for an empty one");
        let Err(ConsumeError::ReadFailed(text)) = consume(&bench, "orders").await else { panic!("served") };
        let proof = "/data/stored/orders.0000000000000001";
        assert!(text.starts_with(proof) && text.contains("/data/topics/orders is gone"), "{text}");
        assert_eq!(consume(&bench, "users").await, Ok(vec![0]), "the others are");
        // What is accepted stays in the WAL until a person has decided.
        bench.produce("orders").await;
        rt::sleep(10 * SECOND).await;
        assert!(Disk::Sim(bench.disk.clone()).list(Path::new("/data/topics/orders")).await.is_err());
        Disk::Sim(bench.disk.clone()).remove_file(&PathBuf::from(proof)).await.expect("simulated");
        rt::sleep(10 * SECOND).await;
        assert_eq!(consume(&bench, "orders").await, Ok(vec![0]), "it starts empty, as asked for");
        assert!(refused(&bench.metrics().await).is_empty());
    });
}

#[test]
fn s27_a_node_without_any_topic_directory_serves_none_that_it_had() {
    sim::run(1, async {
        let (bench, _) = started_without(Some("/data/topics")).await;
        assert_eq!(refused(&bench.metrics().await), [1, 2]);
    });
}

#[test]
fn s3_s27_a_topic_that_never_stored_anything_is_none_that_is_lost() {
    sim::run(1, async {
        let (device, topics) = (SimDisk::new(1), [topic("orders", 1, 0)]);
        for _ in 0..2 {
            let bench = Bench::start(device.clone(), RetentionOptions::default(), &topics).await;
            assert_eq!(consume(&bench, "orders").await, Ok(vec![]));
            bench.shard.handle(Request::Quiesce).await;
            bench.shard.handle(Request::Shutdown).await;
        }
        let bench = Bench::start(device, RetentionOptions::default(), &topics).await;
        bench.shard.produce("orders", NewRecord { key: b"", payload: b"1", partition: None }).await.expect("accepted");
        assert_eq!(consume(&bench, "orders").await, Ok(vec![0]));
    });
}

#[test]
fn s27_topics_of_an_older_release_are_marked_at_a_start() {
    sim::run(1, async {
        let (bench, _) = started_without(Some("/data/stored")).await;
        assert!(refused(&bench.metrics().await).is_empty());
        let proofs = Disk::Sim(bench.disk.clone()).list(Path::new("/data/stored")).await.expect("made again");
        assert_eq!(proofs.len(), 2);
        assert!(bench.metrics().await.partitions.contains_key(&destination(1)));
    });
}

#[test]
fn s27_a_backup_of_the_deleted_topic_is_not_served_and_seen_at_the_start() {
    sim::run(1, async {
        let restored = |disk: Disk| async move {
            let marker = Path::new("/data/topics/orders/incarnation");
            let file = disk.open(marker, Open::Existing, Caching::Buffered).await.expect("simulated");
            let former = Mark::encode(Incarnation(9));
            file.write_durable_at(0, Slice::copy_from(former.as_bytes())).await.expect("simulated");
        };
        let (bench, lines) = started_after(restored).await;
        assert!(lines.any_with(&["the files of a topic are gone", "topic=\"orders\""]));
        assert_eq!(refused(&bench.metrics().await), [1]);
        bench.produce("orders").await;
        rt::sleep(5 * SECOND).await;
        let Err(ConsumeError::ReadFailed(_)) = consume(&bench, "orders").await else { panic!("served") };
    });
}

#[test]
fn s27_a_topic_whose_directory_got_another_name_is_not_served_as_an_empty_one() {
    sim::run(1, async {
        let renamed = |disk: Disk| async move {
            let (from, to) = (Path::new("/data/topics/orders"), Path::new("/data/topics/orders.bak"));
            disk.rename(from, to).await.expect("simulated");
        };
        let (bench, lines) = started_after(renamed).await;
        assert!(lines.any_with(&["the files of a topic are gone", "topic=\"orders\""]));
        assert_eq!(refused(&bench.metrics().await), [1]);
        // Its name again: it is picked up while the broker runs.
        renamed_back(&bench).await;
        assert_eq!(consume(&bench, "orders").await, Ok(vec![0]));
        assert!(refused(&bench.metrics().await).is_empty());
    });
}

async fn renamed_back(bench: &Bench) {
    let (from, to) = (Path::new("/data/topics/orders.bak"), Path::new("/data/topics/orders"));
    Disk::Sim(bench.disk.clone()).rename(from, to).await.expect("simulated");
}

/// As [`Bench`] tells it: in the metrics, and in a topic's description.
async fn seems_unusable(bench: &Bench) -> bool {
    let described = bench.shard.handle(Request::Stats { incarnation: destination(1).incarnation }).await;
    let Reply::Stats(described) = described else { panic!("{described:?}") };
    let poisoned = refused(&bench.metrics().await) == [1];
    assert_eq!(poisoned, described.is_empty());
    poisoned
}

#[test]
fn a_topic_that_is_found_lost_while_running_is_seen_in_the_figures() {
    sim::run(1, async {
        let bench = Bench::start(SimDisk::new(1), RetentionOptions::default(), &[topic("orders", 1, 0)]).await;
        let disk = Disk::Sim(bench.disk.clone());
        let stored = Path::new("/data/stored");
        disk.create_dir(stored).await.expect("simulated");
        let proof = stored.join("orders.0000000000000001");
        disk.open(&proof, Open::Create, Caching::Buffered).await.expect("simulated");
        assert!(!seems_unusable(&bench).await);
        let Err(ConsumeError::ReadFailed(_)) = consume(&bench, "orders").await else { panic!("served") };
        assert!(seems_unusable(&bench).await);
    });
}

#[test]
fn a_shortage_makes_no_partition_unusable_and_none_that_is_healthy() {
    sim::run(1, async {
        let short = |on: &str| NthCall::new(Op::List, 1, Fault::NoDescriptor).on(on);
        let (bench, _) = started_without(Some("/data/topics/orders")).await;
        for _ in 0..2 {
            bench.disk.inject(short("topics/orders"));
            let Err(ConsumeError::Busy(text)) = consume(&bench, "orders").await else { panic!("no shortage") };
            assert!(text.contains("LimitNOFILE"), "{text}");
            assert!(seems_unusable(&bench).await);
        }
        // And at a start: not known is not gone.
        let device = SimDisk::new(2);
        let lives = [topic("orders", 1, 0)];
        let bench = Bench::start(device.clone(), RetentionOptions::default(), &lives).await;
        bench.produce("orders").await;
        rt::sleep(SECOND).await;
        bench.shard.handle(Request::Quiesce).await;
        bench.shard.handle(Request::Shutdown).await;
        Disk::Sim(device.clone()).remove_dir_all(Path::new("/data/topics/orders")).await.expect("simulated");
        device.inject(short("topics/orders"));
        let (lines, _guard) = LogLines::of_this_thread();
        let bench = Bench::start(device, RetentionOptions::default(), &lives).await;
        assert!(!lines.any_with(&["it is not served"]));
        assert!(lines.any_with(&["could not be looked up", "Too many open files"]));
        assert!(!seems_unusable(&bench).await);
    });
}

#[test]
fn s93_a_shortage_at_a_topics_first_commit_is_no_failure_of_its_partition() {
    sim::run(1, async {
        let bench = Bench::start(SimDisk::new(1), RetentionOptions::default(), &[topic("orders", 1, 0)]).await;
        bench.disk.inject(NthCall::new(Op::CreateDir, 1, Fault::NoDescriptor).on("topics/orders"));
        let request = Request::PrepareTopic { topic: "orders".into(), incarnation: Incarnation(1) };
        let answer = bench.shard.handle(request).await;
        let Reply::Prepared(Err(NoLog::Busy(text))) = answer else { panic!("{answer:?}") };
        assert!(text.contains("LimitNOFILE") && text.contains("/data/topics/orders"), "{text}");
        bench.disk.inject(NthCall::new(Op::CreateDir, 1, Fault::NoDescriptor).on("topics/orders"));
        let record = Record { body: Slice::copy_from(b"1"), key_bytes: 0 };
        let answer = bench.shard.handle(Request::Produce { topic: "orders".into(), partition: Some(0), record }).await;
        let Reply::Produced(Err(CommitError::Unavailable(text))) = answer else { panic!("{answer:?}") };
        assert!(text.contains("LimitNOFILE"), "{text}");
    });
}
