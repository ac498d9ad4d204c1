//! Waiting: who is woken, by how many messages, and how a wait ends.

use std::time::Duration;

use super::world::*;
use crate::api::{ConsumeError, SettleMode};
use crate::meta::Incarnation;
use crate::rt::{self, sim::Sim};

const LONG: Duration = Duration::from_secs(10);

#[test]
fn c27_a_wait_without_a_record_ends_on_time_and_empty() {
    run(1, async {
        let world = World::with_topic(1, 3, 3);
        for (shard, pin) in [(0, None), (1, None), (2, Some(1)), (1, Some(1))] {
            let started = rt::now();
            let wait = Duration::from_millis(300);
            let none = world.consumer(shard).consume(TOPIC, pin, take(1), wait).await;
            assert_eq!(none.map(|d| d.len()), Ok(0));
            let waited = rt::now() - started;
            assert!(waited >= wait && waited < wait + Duration::from_millis(5), "{waited:?}");
        }
        assert_eq!(world.parked(), 0);
    });
}

#[test]
fn c40_a_record_on_any_shard_wakes_a_consumer_on_any_other() {
    for seed in 0..30 {
        run(seed, async move {
            let world = World::with_topic(seed, 3, 3);
            for partition in [0, 2, 1, 1, 0] {
                let parked = consume_on(&world, (seed % 3) as u16, None, 1, LONG);
                settle_down().await;
                let produced = rt::now();
                world.produce(partition, 1);
                let got = parked.await.expect("served");
                assert!(rt::now() - produced < Duration::from_millis(5));
                assert_eq!(got.len(), 1);
                settle(&world.consumer(0), &got, SettleMode::Ack).await;
            }
        });
    }
}

#[test]
fn c29_a_record_wakes_one_waiter_at_a_cost_that_does_not_depend_on_their_number() {
    let cost = |consumers: usize| {
        run(3, async move {
            let world = World::with_topic(3, 4, 4);
            let parked: Vec<_> = (0..consumers).map(|i| consume_on(&world, (i % 4) as u16, None, 1, LONG)).collect();
            settle_down().await;
            assert_eq!(world.parked(), consumers as u64);
            let before = world.messages();
            rt::sleep(Duration::from_secs(1)).await;
            assert_eq!(world.messages(), before, "C28: nobody polls");
            world.produce(world.partitions() - 1, 1);
            settle_down().await;
            assert_eq!(world.parked(), consumers as u64 - 1);
            let cost = world.messages() - before;
            drop(parked);
            cost
        })
    };
    let few = cost(8);
    assert_eq!(cost(400), few);
    assert!(few <= 6, "{few} messages for one record");
}

#[test]
fn s97_a_commit_without_waiters_sends_nothing() {
    run(4, async {
        let world = World::with_topic(4, 2, 2);
        let none = world.consumer(0).consume(TOPIC, None, take(1), Duration::from_millis(10)).await;
        assert_eq!(none.map(|d| d.len()), Ok(0));
        let before = world.messages();
        (0..100).for_each(|_| world.produce(0, 1));
        (0..100).for_each(|_| world.produce(1, 1));
        settle_down().await;
        assert!(world.messages() - before <= 2, "each shard spends its token once");
    });
}

#[test]
fn c33_n32_pinned_waiters_come_first_and_block_nobody() {
    run(5, async {
        let world = World::with_topic(5, 2, 2);
        let unpinned = consume_on(&world, 0, None, 1, LONG);
        let pinned: Vec<_> = (0..3).map(|i| consume_on(&world, i % 2, Some(1), 1, LONG)).collect();
        settle_down().await;
        world.produce(1, 3);
        for task in pinned {
            assert_eq!(task.await.expect("served").len(), 1);
        }
        assert_eq!(world.parked(), 1, "the unpinned one waits on: the pinned took everything");
        let blocked = consume_on(&world, 1, Some(1), 1, LONG);
        settle_down().await;
        world.produce(0, 1);
        assert_eq!(places(&unpinned.await.expect("served")), [(0, 0)]);
        world.produce(1, 1);
        assert_eq!(places(&blocked.await.expect("served")), [(1, 3)]);
    });
}

#[test]
fn c33_what_pinned_waiters_leave_goes_to_the_topics_queue() {
    run(6, async {
        let world = World::with_topic(6, 2, 2);
        let unpinned: Vec<_> = (0..2).map(|_| consume_on(&world, 0, None, 1, LONG)).collect();
        let pinned = consume_on(&world, 1, Some(1), 1, LONG);
        settle_down().await;
        let produced = rt::now();
        world.produce(1, 3);
        assert_eq!(pinned.await.expect("served").len(), 1);
        for task in unpinned {
            assert_eq!(task.await.expect("served").len(), 1);
        }
        assert!(rt::now() - produced < Duration::from_millis(5));
    });
}

#[test]
fn s98_a_record_that_comes_during_the_scan_is_found_by_it_or_announced() {
    for turn in 0..2 {
        run(21, async move {
            let world = World::with_topic(21, 2, 4);
            // Consumers at the home, which asks no shard that says it is empty; both partitions on the other shard.
            let (home, other) = (world.home(), u32::from(1 - world.home()));
            let (slow, late) = if turn == 0 { (other, other + 2) } else { (other + 2, other) };
            let batch = consume_on(&world, home, None, 5, LONG);
            settle_down().await;
            let single = consume_on(&world, home, None, 1, LONG);
            settle_down().await;
            // While one partition is read, the other gets its record.
            world.log(slow).read_delay.set(Duration::from_millis(5));
            world.produce(slow, 1);
            rt::sleep(Duration::from_micros(150)).await;
            world.produce(late, 2);
            let (produced, batch) = (rt::now(), batch.await.expect("served"));
            if batch.len() < 3 {
                assert_eq!(single.await.expect("served").len(), 1);
            }
            assert!(rt::now() - produced < Duration::from_millis(20));
        });
    }
}

#[test]
fn c15_c40_a_cancelled_read_wakes_the_next_waiter_at_once() {
    run(22, async {
        let world = World::with_topic(22, 2, 2);
        world.log(1).read_delay.set(Duration::from_millis(800));
        world.produce(1, 1);
        let consumer = world.consumer(1);
        let slow = rt::timeout(Duration::from_millis(30), consumer.consume(TOPIC, None, take(1), Duration::ZERO));
        let parking = world.clone();
        let parked = rt::spawn(rt::Queue::Consume, async move {
            rt::sleep(Duration::from_millis(10)).await;
            parking.log(1).read_delay.set(Duration::ZERO);
            parking.consumer(0).consume(TOPIC, None, take(1), LONG).await
        });
        assert!(slow.await.is_err(), "the client left while its record was read");
        let left = rt::now();
        assert_eq!(places(&parked.await.expect("served")), [(1, 0)]);
        assert!(rt::now() - left < Duration::from_millis(5));
    });
}

#[test]
fn c11_c60_a_skipped_hole_wakes_whoever_found_nothing_because_of_it() {
    run(23, async {
        let world = World::with_topic(23, 2, 2);
        world.alter(10, 1);
        world.produce(1, 4);
        let got = world.consumer(0).consume(TOPIC, Some(1), take(2), Duration::ZERO).await.expect("served");
        settle(&world.consumer(0), &got[1..], SettleMode::Ack).await;
        settle(&world.consumer(0), &got[..1], SettleMode::Nack).await;
        // The ahead set is full: only the hole may be handed out. While it is read, another consumer finds nothing.
        world.log(1).unreadable.borrow_mut().insert(0);
        world.log(1).read_delay.set(Duration::from_millis(30));
        let reading = consume_on(&world, 1, Some(1), 1, Duration::ZERO);
        rt::sleep(Duration::from_micros(100)).await;
        let parked = consume_on(&world, 0, None, 1, LONG);
        let started = rt::now();
        let mut offsets = places(&reading.await.expect("served"));
        offsets.extend(places(&parked.await.expect("served")));
        assert_eq!(offsets, [(1, 2), (1, 3)]);
        assert!(rt::now() - started < Duration::from_millis(200));
    });
}

#[test]
fn c90_what_the_byte_bound_left_behind_wakes_the_next_waiter() {
    run(24, async {
        let world = World::with_topic(24, 2, 2);
        let bounded = crate::peer::Take { max: 5, bytes_max: 10 };
        let parked: Vec<_> = (0..3)
            .map(|_| {
                let consumer = world.consumer(0);
                rt::spawn(rt::Queue::Consume, async move { consumer.consume(TOPIC, None, bounded, LONG).await })
            })
            .collect();
        settle_down().await;
        let produced = rt::now();
        world.produce(1, 3);
        for task in parked {
            assert_eq!(task.await.expect("served").len(), 1);
        }
        assert!(rt::now() - produced < Duration::from_millis(5));
    });
}

#[test]
fn d7_leases_taken_at_different_times_all_lapse_without_a_touch() {
    run(25, async {
        let world = World::with_topic(25, 1, 1);
        world.produce(0, 3);
        for _ in 0..3 {
            let got = world.consumer(0).consume(TOPIC, None, take(1), Duration::ZERO).await.expect("served");
            assert_eq!(got.len(), 1);
            rt::sleep(Duration::from_millis(600)).await;
        }
        assert_eq!(world.leased(0), 3);
        rt::sleep(VISIBILITY).await;
        assert_eq!(world.leased(0), 0);
    });
}

#[test]
fn c22_a_nack_wakes_a_parked_consumer_at_once() {
    run(7, async {
        let world = World::with_topic(7, 2, 2);
        world.produce(1, 1);
        let first = world.consumer(0).consume(TOPIC, None, take(1), Duration::ZERO).await.expect("served");
        let parked = consume_on(&world, 0, None, 1, LONG);
        settle_down().await;
        settle(&world.consumer(0), &first, SettleMode::Nack).await;
        let second = parked.await.expect("served");
        assert_eq!(places(&second), [(1, 0)]);
        assert_ne!(second[0].nonce, first[0].nonce);
    });
}

#[test]
fn c20_an_ack_that_frees_a_cap_slot_wakes_a_parked_consumer() {
    run(8, async {
        let world = World::with_topic(8, 2, 2);
        world.alter(1, 10);
        world.produce(1, 2);
        let first = world.consumer(0).consume(TOPIC, None, take(5), Duration::ZERO).await.expect("served");
        assert_eq!(first.len(), 1, "C10");
        let parked = consume_on(&world, 0, None, 1, LONG);
        settle_down().await;
        settle(&world.consumer(0), &first, SettleMode::Ack).await;
        assert_eq!(places(&parked.await.expect("served")), [(1, 1)]);
    });
}

#[test]
fn c13_a_raised_cap_wakes_a_parked_consumer() {
    run(9, async {
        let world = World::with_topic(9, 2, 2);
        world.alter(1, 10);
        world.produce(1, 2);
        let _first = world.consumer(0).consume(TOPIC, None, take(1), Duration::ZERO).await.expect("served");
        let parked = consume_on(&world, 0, None, 1, LONG);
        settle_down().await;
        world.alter(2, 10);
        assert_eq!(places(&parked.await.expect("served")), [(1, 1)]);
    });
}

#[test]
fn c24_d7_a_lapse_wakes_a_parked_consumer_within_a_second() {
    run(10, async {
        let world = World::with_topic(10, 2, 2);
        world.produce(1, 1);
        let _lost = world.consumer(0).consume(TOPIC, None, take(1), Duration::ZERO).await.expect("served");
        let leased = rt::now();
        let again = world.consumer(0).consume(TOPIC, None, take(1), LONG).await.expect("served");
        assert_eq!(places(&again), [(1, 0)]);
        let waited = rt::now() - leased;
        assert!(waited + Duration::from_millis(5) >= VISIBILITY && waited <= VISIBILITY + Duration::from_secs(1));
    });
}

#[test]
fn n53_3_timers_exist_only_while_leases_or_waiters_do() {
    let sim = Sim::new(11);
    let handle = sim.clone();
    sim.run(async move {
        let world = World::with_topic(11, 2, 2);
        let idle = handle.tasks_alive();
        let parked = consume_on(&world, 0, None, 1, Duration::from_secs(600));
        settle_down().await;
        drop(parked);
        world.produce(1, 1);
        let got = world.consumer(0).consume(TOPIC, None, take(1), LONG).await.expect("served");
        assert!(got.len() <= 1);
        rt::sleep(VISIBILITY * 2).await;
        world.produce(1, 1);
        let got = world.consumer(0).consume(TOPIC, None, take(9), LONG).await.expect("served");
        settle(&world.consumer(0), &got, SettleMode::Ack).await;
        rt::sleep(Duration::from_secs(120)).await;
        assert_eq!(handle.tasks_alive(), idle, "no task is left, hence no timer");
    });
}

#[test]
fn c15_n37_a_client_that_goes_gives_everything_back_at_once() {
    for seed in 0..200 {
        run(seed, async move {
            let world = World::with_topic(seed, 3, 3);
            (0..3).for_each(|partition| world.log(partition).read_delay.set(Duration::from_micros(80)));
            let pin = (seed % 3 == 0).then_some(1);
            let consumer = world.consumer((seed % 2) as u16);
            let wait = if seed % 5 == 0 { Duration::ZERO } else { LONG };
            let produced = world.clone();
            rt::spawn(rt::Queue::Foreground, async move {
                rt::sleep(Duration::from_micros(seed % 7 * 40)).await;
                produced.produce(1, 4);
            });
            let patience = Duration::from_micros(1 + seed * 3);
            let gone = rt::timeout(patience, consumer.consume(TOPIC, pin, take(3), wait)).await;
            let kept = gone.map_or(0, |outcome| outcome.map_or(0, |d| d.len())) as u64;
            settle_down().await;
            assert_eq!((world.leased(1), world.parked()), (kept, 0), "seed {seed}");
            let all = world.consumer(2).consume(TOPIC, Some(1), take(9), Duration::ZERO).await.expect("served");
            assert_eq!(all.len() as u64, 4 - kept, "seed {seed}");
            let figures = &world.owner(1).partition_metrics().await[&destination(1)];
            assert_eq!(figures.nacked, 0, "a release is not a nack");
        });
    }
}

#[test]
fn n36_c37_a_deleted_topic_lets_its_waiters_go() {
    for seed in 0..20 {
        run(seed, async move {
            let world = World::with_topic(seed, 3, 3);
            let started = rt::now();
            let parked: Vec<_> =
                (0..9).map(|i| consume_on(&world, i % 3, (i % 2 == 0).then_some(u32::from(i % 3)), 1, LONG)).collect();
            settle_down().await;
            world.delete(TOPIC);
            // Shards learn it at different times.
            for shard in [(seed % 3) as u16, ((seed + 1) % 3) as u16, ((seed + 2) % 3) as u16] {
                world.install_on(shard);
                rt::sleep(Duration::from_micros(seed * 20)).await;
            }
            for task in parked {
                let outcome = task.await;
                assert!(matches!(outcome, Err(ConsumeError::TopicNotFound)), "{outcome:?}");
            }
            assert!(rt::now() - started < Duration::from_millis(100));
            assert_eq!(world.parked(), 0);
            assert!(world.shards().iter().all(|queues| queues.topics_held() == (0, 0)));
        });
    }
}

#[test]
fn e23_a_topic_that_a_peer_does_not_know_yet_is_waited_for() {
    run(12, async {
        let world = World::with_topic(12, 2, 2);
        let other = Incarnation(5);
        world.create("events", other, 2);
        // A third topic reaches shard 0 only.
        world.create("late", Incarnation(6), 2);
        let consumer = world.consumer(0);
        let parked = rt::spawn(rt::Queue::Consume, async move {
            consumer.consume("late", Some(1), take(1), Duration::from_millis(200)).await
        });
        assert_eq!(parked.await.map(|d| d.len()), Ok(0));
    });
}

#[test]
fn c37_memory_is_flat_under_create_and_delete_churn() {
    let sim = Sim::new(13);
    let handle = sim.clone();
    sim.run(async move {
        let world = World::new(13, 2);
        let idle = handle.tasks_alive();
        for life in 1..60 {
            world.create(TOPIC, Incarnation(life), 2);
            let parked = consume_on(&world, (life % 2) as u16, None, 1, LONG);
            let pinned = consume_on(&world, 0, Some(1), 1, LONG);
            settle_down().await;
            world.delete(TOPIC);
            world.install();
            assert!(parked.await.is_err() && pinned.await.is_err());
            world.shard(0).topic_removed(Incarnation(life)).await;
        }
        rt::sleep(Duration::from_secs(60)).await;
        assert!(world.shards().iter().all(|queues| queues.topics_held() == (0, 0)));
        assert_eq!(handle.tasks_alive(), idle);
    });
}

#[test]
fn d18_a_stop_answers_everybody_who_waits() {
    run(14, async {
        let world = World::with_topic(14, 2, 2);
        let parked: Vec<_> = (0..6).map(|i| consume_on(&world, i % 2, (i > 3).then_some(1), 1, LONG)).collect();
        settle_down().await;
        let started = rt::now();
        for queues in world.shards() {
            queues.shutdown().await.expect("simulated");
        }
        for task in parked {
            assert_eq!(task.await.map(|d| d.len()), Ok(0));
        }
        assert!(rt::now() - started < Duration::from_secs(1));
    });
}

#[test]
fn d18_a_poll_that_comes_in_a_drain_gets_what_is_there_and_waits_for_nothing() {
    run(24, async {
        let world = World::with_topic(24, 2, 2);
        for queues in world.shards() {
            queues.release_waiters();
        }
        for partition in [0, 1] {
            world.produce(partition, 1);
            let got = world.consumer(0).consume(TOPIC, None, take(1), LONG).await.expect("served");
            assert_eq!(places(&got), [(partition, 0)]);
        }
        world.produce(1, 1);
        let got = world.consumer(0).consume(TOPIC, Some(1), take(1), LONG).await.expect("served");
        assert_eq!(places(&got), [(1, 1)]);
        let started = rt::now();
        assert!(world.consumer(1).consume(TOPIC, None, take(1), LONG).await.expect("served").is_empty());
        assert!(rt::now() - started < Duration::from_secs(1));
    });
}
