//! The bound on open partition logs, on a simulated disk.

use std::sync::Arc;

use super::retention_tests::{destination, sweeping, topic, Bench, HOUR, SECOND};
use super::RetentionOptions;
use crate::api::{ConsumeError, NewRecord};
use crate::io::is_shortage;
use crate::io::sim::{Fault, NthCall, Op, SimDisk};
use crate::log::OpenError;
use crate::metrics::ShardMetrics;
use crate::peer::NoLog;
use crate::peer::{Request, Take};
use crate::rt::{self, sim};

#[test]
fn s86_open_logs_stay_within_their_bound() {
    sim::run(3, async {
        let topics: Vec<_> = (1..=9).map(|number| topic(&format!("t{number}"), number, 0)).collect();
        let few = RetentionOptions { open_logs_max: 3, ..sweeping(None, None) };
        let device = SimDisk::new(3);
        let bench = Bench::start(device.clone(), few, &topics).await;
        for topic in &topics {
            bench.produce(&topic.name).await;
            rt::sleep(SECOND / 20).await;
        }
        rt::sleep(2 * SECOND).await;
        let metrics = bench.metrics().await;
        assert_eq!((metrics.open_logs, metrics.partitions.len()), (3, 9));
        for topic in &topics {
            assert_eq!(bench.consume(&topic.name).await.offset, 0);
        }
        // At start every log is opened once, and no more stay open than may.
        bench.shard.handle(Request::Quiesce).await;
        bench.shard.handle(Request::Shutdown).await;
        let bench = Bench::start(device, few, &topics).await;
        let metrics = bench.metrics().await;
        assert_eq!(metrics.open_logs, 3);
        assert!(metrics.partitions.values().all(|known| known.high_watermark == 1), "s54");
    });
}

#[test]
fn s86_more_partitions_than_may_be_open_are_committed_and_consumed_within_the_bound() {
    sim::run(6, async {
        let topics: Vec<_> = (1..=150).map(|number| topic(&format!("t{number}"), number, 0)).collect();
        let few = RetentionOptions { open_logs_max: 20, sweep_interval: HOUR, ..sweeping(None, None) };
        let bench = Bench::start(SimDisk::new(6), few, &topics).await;
        let most_open = |metrics: ShardMetrics| assert!(metrics.open_logs <= 25, "{} are open", metrics.open_logs);
        for _ in 0..2 {
            for topic in &topics {
                bench.produce(&topic.name).await;
                most_open(bench.metrics().await);
            }
            for _ in 0..20 {
                rt::sleep(SECOND / 10).await;
                most_open(bench.metrics().await);
            }
        }
        let metrics = bench.metrics().await;
        assert!(metrics.partitions.values().all(|known| known.high_watermark == 2 && known.log.commits_failed == 0));
        for offset in 0..2 {
            for topic in &topics {
                let delivery = bench.consume(&topic.name).await;
                assert_eq!(delivery.offset, offset);
                bench.ack(&delivery).await;
                most_open(bench.metrics().await);
            }
        }
    });
}

#[test]
fn a_partition_that_cannot_be_opened_is_seen_in_the_figures() {
    sim::run(10, async {
        let topics = [topic("t1", 1, 0), topic("t2", 2, 0)];
        let device = SimDisk::new(10);
        let bench = Bench::start(device.clone(), sweeping(None, None), &topics).await;
        for topic in &topics {
            bench.produce(&topic.name).await;
        }
        rt::sleep(SECOND).await;
        bench.shard.handle(Request::Quiesce).await;
        bench.shard.handle(Request::Shutdown).await;
        device.inject(NthCall::new(Op::List, 1, Fault::Fail).on("t1/p"));
        let bench = Bench::start(device, sweeping(None, None), &topics).await;
        let unusable = |metrics: ShardMetrics| {
            let all = metrics.partitions.into_iter();
            all.filter(|(_, known)| known.log.poisoned).map(|(destination, _)| destination).collect::<Vec<_>>()
        };
        assert_eq!(unusable(bench.metrics().await), [destination(1)]);
        bench.produce("t1").await;
        rt::sleep(2 * SECOND).await;
        assert_eq!(unusable(bench.metrics().await), [], "it has been opened since");
    });
}

#[test]
fn a_consumer_that_waits_for_more_partitions_than_may_be_open_has_none_opened_in_vain() {
    sim::run(7, async {
        let mut wide = (*topic("orders", 1, 0)).clone();
        wide.partitions = 30;
        let few = RetentionOptions { open_logs_max: 8, ..sweeping(None, None) };
        let bench = Bench::start(SimDisk::new(7), few, &[Arc::new(wide)]).await;
        for partition in 0..30 {
            let record = NewRecord { key: b"", payload: b"hello", partition: Some(partition) };
            bench.shard.produce("orders", record).await.expect("accepted");
        }
        for _ in 0..30 {
            let delivery = bench.consume("orders").await;
            bench.ack(&delivery).await;
        }
        rt::sleep(10 * SECOND).await;
        let parked = bench.consumer.clone();
        let waiting = rt::spawn(rt::Queue::Consume, async move {
            let take = Take { max: 1, bytes_max: 1 << 20 };
            parked.consume("orders", None, take, 60 * SECOND).await.map(|taken| taken.len())
        });
        rt::sleep(SECOND).await;
        let before = bench.metrics().await.retention.idle_logs_evicted;
        rt::sleep(20 * SECOND).await;
        assert_eq!(bench.metrics().await.retention.idle_logs_evicted, before, "logs are opened and closed in turns");
        let record = NewRecord { key: b"", payload: b"hello", partition: Some(3) };
        bench.shard.produce("orders", record).await.expect("accepted");
        assert_eq!(rt::timeout(SECOND, waiting).await, Ok(Ok(1)), "it is found all the same");
    });
}

#[test]
fn logs_that_are_needed_do_not_keep_others_from_being_closed() {
    sim::run(8, async {
        let topics: Vec<_> = (1..=40).map(|number| topic(&format!("t{number}"), number, 0)).collect();
        let few = RetentionOptions { open_logs_max: 10, sweep_interval: HOUR, ..sweeping(None, None) };
        let bench = Bench::start(SimDisk::new(8), few, &topics).await;
        // The oldest ones: leased, not acked.
        let mut leases = Vec::new();
        for topic in &topics[..6] {
            bench.produce(&topic.name).await;
            leases.push(bench.consume(&topic.name).await);
        }
        for topic in &topics[6..] {
            bench.produce(&topic.name).await;
            rt::sleep(SECOND / 100).await;
            let open = bench.metrics().await.open_logs;
            assert!(open <= 12, "{open} are open");
        }
        for lease in &leases {
            bench.ack(lease).await;
        }
    });
}

#[test]
fn a_log_that_does_not_close_keeps_no_other_from_being_opened() {
    sim::run(9, async {
        let topics: Vec<_> = (1..=60).map(|number| topic(&format!("t{number}"), number, 0)).collect();
        let few = RetentionOptions { open_logs_max: 10, sweep_interval: HOUR, ..sweeping(None, None) };
        let bench = Bench::start(SimDisk::new(9), few, &topics).await;
        bench.produce("t1").await;
        rt::sleep(SECOND).await;
        bench.disk.inject(NthCall::new(Op::Write, 1, Fault::Stall(HOUR)).on("t1/"));
        for topic in &topics[1..] {
            bench.produce(&topic.name).await;
        }
        rt::sleep(10 * SECOND).await;
        let metrics = bench.metrics().await;
        assert_eq!(metrics.partitions.values().filter(|known| known.high_watermark == 1).count(), 60);
        assert!(metrics.open_logs <= 12, "{} are open", metrics.open_logs);
    });
}

#[test]
fn leases_on_more_partitions_than_may_be_open_stop_at_twice_the_bound_and_nothing_is_lost() {
    sim::run(11, async {
        let topics: Vec<_> = (1..=60).map(|number| topic(&format!("t{number}"), number, 0)).collect();
        let few = RetentionOptions { open_logs_max: 10, sweep_interval: HOUR, ..sweeping(None, None) };
        let bench = Bench::start(SimDisk::new(11), few, &topics).await;
        let (mut leases, mut refused) = (Vec::new(), 0);
        for topic in &topics {
            bench.produce(&topic.name).await;
            let take = Take { max: 1, bytes_max: 1 << 20 };
            match bench.consumer.consume(&topic.name, None, take, SECOND / 10).await {
                Ok(leased) => leases.extend(leased),
                // Not a failure of the node: it passes, and says what would have it pass sooner.
                Err(ConsumeError::Busy(text)) => {
                    refused += 1;
                    let named = RetentionOptions::default().open_logs_bound_by;
                    assert!(text.contains("retry") && text.contains(named), "{text}");
                }
                Err(other) => panic!("{other:?}"),
            }
            let open = bench.metrics().await.open_logs;
            assert!(open <= 38, "{open} are open");
        }
        assert!((30..60).contains(&leases.len()), "{} are leased", leases.len());
        assert!(refused > 0);
        for lease in &leases {
            bench.ack(lease).await;
        }
        rt::sleep(20 * SECOND).await;
        let metrics = bench.metrics().await;
        assert!(metrics.partitions.values().all(|known| known.high_watermark == 1) && metrics.open_logs <= 12);
        assert_eq!(metrics.partitions.len(), 60);
    });
}

#[test]
fn s93_what_the_machine_is_short_of_is_asked_for_again_and_is_no_failed_read() {
    for number in [libc::EMFILE, libc::ENFILE, libc::ENOMEM] {
        let error = std::io::Error::from_raw_os_error(number);
        assert!(is_shortage(&error), "{error}");
    }
    for number in [libc::EIO, libc::ENOENT, libc::ENOSPC] {
        assert!(!is_shortage(&std::io::Error::from_raw_os_error(number)));
    }
    let refused = ConsumeError::from(NoLog::from(OpenError::Short("cannot open x: Too many open files".to_owned())));
    let ConsumeError::Busy(text) = refused else { panic!("{refused:?}") };
    assert!(text.contains("LimitNOFILE") && text.ends_with("cannot open x: Too many open files"), "{text}");
    let refused = ConsumeError::from(NoLog::from(OpenError::Io("EIO".to_owned())));
    assert_eq!(refused, ConsumeError::ReadFailed("EIO".to_owned()));
}
