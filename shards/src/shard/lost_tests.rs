//! Topics whose directories somebody removed while nobody looked.

use std::path::{Path, PathBuf};

use super::retention_tests::{destination, topic, Bench, SECOND};
use super::RetentionOptions;
use crate::api::{ConsumeError, NewRecord};
use crate::io::sim::SimDisk;
use crate::io::Disk;
use crate::log_lines::LogLines;
use crate::metrics::ShardMetrics;
use crate::peer::{Reply, Request, Take};
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
async fn started_without(gone: Option<&str>) -> (Bench, u64) {
    let (device, topics) = (SimDisk::new(1), [topic("orders", 1, 0), topic("users", 2, 0)]);
    let bench = Bench::start(device.clone(), RetentionOptions::default(), &topics).await;
    for topic in &topics {
        bench.produce(&topic.name).await;
    }
    rt::sleep(2 * SECOND).await;
    bench.shard.handle(Request::Quiesce).await;
    bench.shard.handle(Request::Shutdown).await;
    if let Some(gone) = gone {
        Disk::Sim(device.clone()).remove_dir_all(Path::new(gone)).await.expect("simulated");
    }
    let (lines, _guard) = LogLines::of_this_thread();
    let bench = Bench::start(device, RetentionOptions::default(), &topics).await;
    rt::sleep(SECOND).await;
    (bench, lines.count())
}

#[test]
fn s27_a_topic_whose_directory_is_gone_is_not_served_and_never_begun_again_at_offset_0() {
    sim::run(1, async {
        let quiet = started_without(None).await.1;
        let (bench, said) = started_without(Some("/data/topics/orders")).await;
        assert_eq!(refused(&bench.metrics().await), [1], "seen before anybody uses it");
        assert!(said > quiet, "in silence");
        let described = bench.shard.handle(Request::Stats { incarnation: destination(1).incarnation }).await;
        assert!(matches!(described, Reply::Stats(known) if known.is_empty()), "it would be taken for an empty one");
        let Err(ConsumeError::ReadFailed(text)) = consume(&bench, "orders").await else { panic!("served") };
        let mark = "/data/stored/orders.0000000000000001";
        assert!(text.starts_with(mark) && text.contains("/data/topics/orders is gone"), "{text}");
        assert_eq!(consume(&bench, "users").await, Ok(vec![0]), "the others are");
        // What is accepted stays in the WAL until a person has decided.
        bench.produce("orders").await;
        rt::sleep(10 * SECOND).await;
        assert!(Disk::Sim(bench.disk.clone()).list(Path::new("/data/topics/orders")).await.is_err());
        Disk::Sim(bench.disk.clone()).remove_file(&PathBuf::from(mark)).await.expect("simulated");
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
        let marks = Disk::Sim(bench.disk.clone()).list(Path::new("/data/stored")).await.expect("made again");
        assert_eq!(marks.len(), 2);
        assert!(bench.metrics().await.partitions.contains_key(&destination(1)));
    });
}
