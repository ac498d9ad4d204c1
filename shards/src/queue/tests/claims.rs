//! What one consume gets: order, bounds, damage, closed logs, caps.

use std::time::Duration;

use super::world::*;
use crate::api::{ConsumeError, ReadAt, SettleMode, SettleStatus};
use crate::peer::Take;
use crate::rt;

const NO_WAIT: Duration = Duration::ZERO;

#[test]
fn c27_no_wait_finds_a_record_on_any_shard() {
    run(1, async {
        let world = World::with_topic(1, 3, 3);
        world.produce(2, 1);
        for _ in 0..2 {
            let got = world.consumer(0).consume(TOPIC, None, take(1), NO_WAIT).await.expect("served");
            assert_eq!(places(&got), [(2, 0)]);
            assert!(got[0].nonce > 0 && got[0].nonce < 1 << 63, "C19");
            let none = world.consumer(1).consume(TOPIC, None, take(1), NO_WAIT).await.expect("served");
            assert!(none.is_empty());
            settle(&world.consumer(1), &got, SettleMode::Nack).await;
        }
    });
}

#[test]
fn s3_a_partition_never_written_is_opened_once_and_merely_armed() {
    run(2, async {
        let world = World::with_topic(2, 2, 2);
        for _ in 0..3 {
            let none = world.consumer(0).consume(TOPIC, None, take(1), Duration::from_millis(20)).await;
            assert_eq!(none.map(|d| d.len()), Ok(0));
        }
        assert_eq!(world.opens(), 2);
        assert!(world.disk_image.files().is_empty(), "nothing acked, nothing written");
    });
}

#[test]
fn c18_to_c26_settling_through_any_shard() {
    run(3, async {
        let world = World::with_topic(3, 3, 3);
        world.produce(1, 3);
        let got = world.consumer(0).consume(TOPIC, Some(1), take(3), NO_WAIT).await.expect("served");
        assert_eq!(places(&got), [(1, 0), (1, 1), (1, 2)]);
        let ack = settle_of(&got[0], SettleMode::Ack);
        let foreign = crate::api::Settle { partition: 0, ..ack };
        let lacking = crate::api::Settle { partition: 9, ..ack };
        let extend = settle_of(&got[2], SettleMode::Extend);
        let nack = settle_of(&got[1], SettleMode::Nack);
        let statuses = world.consumer(2).settle(TOPIC, vec![ack, foreign, extend, lacking, nack, ack]).await;
        use SettleStatus::{Done, LeaseGone};
        assert_eq!(statuses, Some(vec![Done, LeaseGone, Done, LeaseGone, Done, LeaseGone]));
        assert_eq!(world.consumer(2).settle("unknown", vec![ack]).await, None);
        assert_eq!((world.frontier(1), world.leased(1)), (1, 1));
        let figures = &world.owner(1).partition_metrics().await[&destination(1)];
        assert_eq!((figures.nacked, figures.extended, figures.ack_rejected), (1, 1, 1));
        assert_eq!((figures.messages_consumed, figures.oldest_unsettled_ms), (3, 1_001));
    });
}

#[test]
fn c89_c91_a_batch_takes_what_is_ready_on_all_shards() {
    run(4, async {
        let world = World::with_topic(4, 3, 6);
        (0..6).for_each(|partition| world.produce(partition, 2));
        let got = world.consumer(1).consume(TOPIC, None, take(100), NO_WAIT).await.expect("served");
        let mut all = places(&got);
        assert_eq!(got.len(), 12);
        assert!(all.windows(2).all(|pair| pair[0].0 != pair[1].0 || pair[0].1 < pair[1].1), "offset order: {all:?}");
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 12);
    });
}

#[test]
fn c89_a_batch_goes_on_to_the_next_partition_until_it_is_full() {
    run(16, async {
        let world = World::with_topic(16, 1, 4);
        (0..4).for_each(|partition| world.produce(partition, 2));
        for expected in [3, 3, 2] {
            let got = world.consumer(0).consume(TOPIC, None, take(3), NO_WAIT).await.expect("served");
            assert_eq!(got.len(), expected);
        }
    });
}

#[test]
fn c89_a_parked_batch_is_topped_up_but_does_not_wait_to_fill() {
    run(5, async {
        let world = World::with_topic(5, 2, 2);
        let started = rt::now();
        let parked = consume_on(&world, 0, None, 10, Duration::from_secs(5));
        settle_down().await;
        world.log(0).read_delay.set(Duration::from_millis(3));
        world.produce(0, 1);
        rt::sleep(Duration::from_micros(10)).await;
        world.produce(1, 2);
        let got = parked.await.expect("served");
        assert!(rt::now() - started < Duration::from_millis(50));
        assert_eq!(got.len(), 3, "{:?}", places(&got));
    });
}

#[test]
fn c90_the_record_that_crosses_the_byte_bound_is_the_last() {
    run(6, async {
        let world = World::with_topic(6, 2, 4);
        (0..4).for_each(|partition| world.log(partition).record_bytes.set(100));
        (0..4).for_each(|partition| world.produce(partition, 3));
        let bounded = Take { max: 100, bytes_max: 450 };
        let got = world.consumer(0).consume(TOPIC, None, bounded, NO_WAIT).await.expect("served");
        assert_eq!(got.len(), 5);
        let huge = Take { max: 100, bytes_max: 1 };
        let got = world.consumer(0).consume(TOPIC, None, huge, NO_WAIT).await.expect("served");
        assert_eq!(got.len(), 1, "the first record always counts");
        let rest: u64 = (0..4).map(|partition| world.leased(partition)).sum();
        assert_eq!(rest, 6, "nothing was reserved that was not handed over");
    });
}

#[test]
fn g14_every_partition_of_a_shard_has_its_turn() {
    run(7, async {
        let world = World::with_topic(7, 1, 3);
        (0..3).for_each(|partition| world.produce(partition, 100));
        let mut seen = [0; 3];
        for _ in 0..9 {
            let got = world.consumer(0).consume(TOPIC, None, take(1), NO_WAIT).await.expect("served");
            seen[got[0].partition as usize] += 1;
        }
        assert_eq!(seen, [3, 3, 3]);
    });
}

#[test]
fn c60_unreadable_records_are_skipped_and_counted() {
    run(8, async {
        let world = World::with_topic(8, 1, 1);
        world.log(0).unreadable.borrow_mut().extend([0, 1, 2, 5]);
        world.produce(0, 7);
        let got = world.consumer(0).consume(TOPIC, None, take(10), NO_WAIT).await.expect("served");
        assert_eq!(places(&got), [(0, 3), (0, 4), (0, 6)]);
        settle(&world.consumer(0), &got, SettleMode::Ack).await;
        assert_eq!(world.frontier(0), 7);
        let figures = &world.shard(0).partition_metrics().await[&destination(0)];
        assert_eq!((figures.corrupt_skipped, figures.oldest_unsettled_ms), (4, 0));
    });
}

#[test]
fn c62_s93_a_disk_error_returns_the_reservation_and_skips_nothing() {
    run(10, async {
        let world = World::with_topic(10, 2, 2);
        world.produce(1, 1);
        world.log(1).failing.set(1);
        let failed = world.consumer(1).consume(TOPIC, None, take(1), NO_WAIT).await;
        assert_eq!(failed.map(|d| d.len()), Err(ConsumeError::ReadFailed("simulated".to_owned())));
        assert_eq!(world.leased(1), 0);
        let got = world.consumer(1).consume(TOPIC, None, take(1), NO_WAIT).await.expect("served");
        assert_eq!(places(&got), [(1, 0)]);
    });
}

#[test]
fn c35_an_error_counts_only_if_nothing_else_was_found() {
    run(11, async {
        let world = World::with_topic(11, 1, 2);
        world.produce(0, 1);
        world.produce(1, 1);
        world.log(0).failing.set(1);
        let got = world.consumer(0).consume(TOPIC, None, take(2), NO_WAIT).await.expect("served");
        assert_eq!(places(&got), [(1, 0)]);
    });
}

#[test]
fn c68_s83_a_closed_log_is_opened_again_and_nothing_is_lost_or_skipped() {
    run(12, async {
        let world = World::with_topic(12, 2, 2);
        world.produce(1, 2);
        let got = world.consumer(0).consume(TOPIC, Some(1), take(1), NO_WAIT).await.expect("served");
        world.close_log(1);
        let more = world.consumer(0).consume(TOPIC, Some(1), take(1), NO_WAIT).await.expect("served");
        assert_eq!((places(&got), places(&more)), (vec![(1, 0)], vec![(1, 1)]));
        world.close_log(1);
        let read = world.consumer(0).read_at(TOPIC, 1, 0).await;
        assert!(matches!(read, Ok(ReadAt::Record(delivery)) if delivery.nonce == 0 && delivery.offset == 0));
        settle(&world.consumer(0), &got, SettleMode::Ack).await;
        assert_eq!((world.frontier(1), world.leased(1)), (1, 1), "leases live on while the log is closed and opened");
    });
}

#[test]
fn c59_n35_a_consume_that_loses_the_race_against_retention_reserves_again() {
    run(13, async {
        let world = World::with_topic(13, 1, 1);
        world.produce(0, 10);
        world.log(0).read_delay.set(Duration::from_millis(4));
        let racing: Vec<_> = (0..3).map(|_| consume_on(&world, 0, None, 1, NO_WAIT)).collect();
        rt::sleep(Duration::from_micros(10)).await;
        world.log(0).oldest.set(6);
        let mut offsets = Vec::new();
        for task in racing {
            offsets.extend(places(&task.await.expect("never an error")));
        }
        offsets.sort_unstable();
        offsets.retain(|(_, offset)| *offset >= 6);
        assert_eq!(offsets, [(0, 6), (0, 7), (0, 8)], "whoever read below reserves again above");
        assert_eq!(world.frontier(0), 6);
    });
}

#[test]
fn c92_to_c95_replay_changes_nothing() {
    run(14, async {
        let world = World::with_topic(14, 2, 2);
        world.produce(1, 5);
        world.log(1).oldest.set(1);
        world.log(1).unreadable.borrow_mut().insert(3);
        let read = |offset| {
            let consumer = world.consumer(0);
            async move { consumer.read_at(TOPIC, 1, offset).await.expect("answered") }
        };
        assert!(matches!(read(0).await, ReadAt::AgedOut { oldest: 1 }));
        assert!(matches!(read(2).await, ReadAt::Record(delivery) if delivery.offset == 2));
        assert!(matches!(read(3).await, ReadAt::Unreadable));
        assert!(matches!(read(5).await, ReadAt::PastEnd));
        assert_eq!(world.leased(1), 0);
        let lacking = world.consumer(0).read_at(TOPIC, 2, 0).await.map(|_| ());
        assert_eq!(lacking, Err(ConsumeError::PartitionOutOfRange));
        let pinned = world.consumer(0).consume(TOPIC, Some(2), take(1), NO_WAIT).await.map(|_| ());
        assert_eq!(pinned, Err(ConsumeError::PartitionOutOfRange));
    });
}

#[test]
fn n53_1_an_idle_partition_is_unloaded_and_loads_its_position_again() {
    run(15, async {
        let world = World::with_topic(15, 1, 1);
        world.produce(0, 3);
        let got = world.consumer(0).consume(TOPIC, None, take(2), NO_WAIT).await.expect("served");
        assert_eq!(world.shard(0).unload(destination(0)).await.ok(), Some(false), "leases are out");
        settle(&world.consumer(0), &got, SettleMode::Ack).await;
        let unloading = world.shard(0);
        let unloaded = rt::spawn(rt::Queue::Consume, async move { unloading.unload(destination(0)).await });
        rt::yield_now().await;
        let got = world.consumer(0).consume(TOPIC, None, take(5), NO_WAIT).await.expect("served");
        assert!(unloaded.await.is_ok());
        assert_eq!(places(&got), [(0, 2)], "a consume in between waits for the position to be on disk");
    });
}

#[test]
fn c80_a_topic_deleted_under_a_claim_leases_nothing_more() {
    run(17, async {
        let world = World::with_topic(17, 1, 1);
        world.produce(0, 5);
        world.log(0).read_delay.set(Duration::from_millis(2));
        let batch = consume_on(&world, 0, Some(0), 5, NO_WAIT);
        rt::sleep(Duration::from_micros(1_500)).await;
        world.delete(TOPIC);
        world.install();
        let figures = batch.await;
        assert!(!matches!(&figures, Ok(all) if all.len() > 3), "{figures:?}");
    });
}

#[test]
fn c80_a_topic_deleted_while_its_partition_is_opened_comes_to_no_life() {
    let opening = std::rc::Rc::new(std::cell::Cell::new(0));
    for seed in 0..20 {
        let gone = opening.clone();
        run(seed, async move {
            let world = World::with_topic(seed, 1, 1);
            let batch = consume_on(&world, 0, Some(0), 5, NO_WAIT);
            rt::sleep(Duration::from_micros(seed * 40)).await;
            world.delete(TOPIC);
            world.install();
            // Opening takes at least two calls of the disk, 10 us each; whoever is faster sees the topic go.
            let outcome = batch.await.map(|deliveries| deliveries.len());
            assert!(seed > 0 || outcome == Err(ConsumeError::TopicNotFound), "{outcome:?}");
            gone.set(gone.get() + u32::from(outcome == Err(ConsumeError::TopicNotFound)));
        });
    }
    assert!(opening.get() > 10, "only {} of 20 were still being opened", opening.get());
}
