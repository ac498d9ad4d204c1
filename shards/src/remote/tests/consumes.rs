//! Consumers on one node, records on another.

use std::time::Duration;

use super::world::{beside, run, text, LIFE, MS, ONE, SECOND, TOPIC};
use crate::api::{ConsumeError, ReadAt, Settle, SettleMode, SettleStatus};
use crate::meta::{Address, NodeId};
use crate::peer::{Carrier, Reply, Request};
use crate::rt;

#[test]
fn c43_a_parked_consumer_gets_a_record_of_another_node_within_milliseconds() {
    run(11, 3, 2, &[2, 2, 3], |world, nodes| async move {
        let (world_, consumer) = (world.clone(), nodes[0].consumer(0));
        for (round, pause) in [3_300, 10, 700, 40].into_iter().enumerate() {
            let (world, consumer) = (world_.clone(), consumer.clone());
            let parked = beside({
                let work = async move { (consumer.consume(TOPIC, None, ONE, 30 * SECOND).await, rt::now()) };
                let (sender, done) = rt::sync::oneshot();
                world.sim.spawn_on(1, async move {
                    let _ = sender.send(work.await);
                });
                done
            });
            rt::sleep(pause * MS).await;
            let started = rt::now();
            let owner = if round == 2 { 2 } else { 1 };
            world.produce(&nodes[owner], 0, owner as u32, "x").await;
            let (got, at) = parked.await.expect("the node lives");
            assert_eq!(got.expect("served").len(), 1, "round {round}");
            assert!(at - started < 20 * MS, "round {round}: {:?}", at - started);
        }
    });
}

#[test]
fn c41_a_consume_without_a_wait_asks_every_owner() {
    run(12, 3, 2, &[2, 3], |world, nodes| async move {
        assert!(world.consume(&nodes[0], 0, None, Duration::ZERO).await.is_none());
        world.produce(&nodes[2], 1, 1, "x").await;
        rt::sleep(20 * MS).await;
        let delivery = world.consume(&nodes[0], 1, None, Duration::ZERO).await.expect("on node 3");
        assert_eq!(world.settle(&nodes[1], 0, &delivery, SettleMode::Extend).await, SettleStatus::Done);
        assert_eq!(world.settle(&nodes[0], 0, &delivery, SettleMode::Ack).await, SettleStatus::Done);
        assert_eq!(world.settle(&nodes[0], 0, &delivery, SettleMode::Ack).await, SettleStatus::LeaseGone);
    });
}

#[test]
fn a_pinned_long_poll_waits_on_the_owner_and_leaves_with_its_client() {
    run(13, 2, 2, &[2, 1], |world, nodes| async move {
        let started = rt::now();
        assert!(world.consume(&nodes[0], 0, Some(0), 300 * MS).await.is_none());
        assert!(rt::now() - started < 320 * MS, "{:?}", rt::now() - started);
        let consumer = nodes[0].consumer(0);
        let patient = consumer.clone();
        let gone = world.on(&nodes[0], async move {
            rt::timeout(100 * MS, patient.consume(TOPIC, Some(0), ONE, 20 * SECOND)).await.is_err()
        });
        assert!(gone.await);
        rt::sleep(20 * MS).await;
        let parked: u64 = nodes[1].shards.iter().map(|shard| shard.queues().metrics().parked).sum();
        assert_eq!(parked, 0, "the owner has heard that nobody waits");
        let served = {
            let world = world.clone();
            let (sender, done) = rt::sync::oneshot();
            world.sim.spawn_on(1, async move {
                let _ = sender.send((consumer.consume(TOPIC, Some(0), ONE, 20 * SECOND).await, rt::now()));
            });
            done
        };
        rt::sleep(50 * MS).await;
        let started = rt::now();
        world.produce(&nodes[1], 0, 0, "x").await;
        let (got, at) = served.await.expect("the node lives");
        assert_eq!(got.expect("served").len(), 1);
        assert!(at - started < 20 * MS);
    });
}

#[test]
fn c58_what_a_cancel_crosses_goes_back_at_once() {
    run(14, 2, 1, &[2], |world, nodes| async move {
        world.network.set_delay(5 * MS, 6 * MS);
        world.produce(&nodes[1], 0, 0, "x").await;
        rt::sleep(20 * MS).await;
        // The first dials. The others give up at every point of the way.
        assert!(world.consume(&nodes[0], 0, Some(0), Duration::ZERO).await.is_some_and(|d| d.nonce != 0));
        let mut lost = 0;
        for patience in 1..14 {
            world.produce(&nodes[1], 0, 0, "y").await;
            rt::sleep(20 * MS).await;
            let consumer = nodes[0].consumer(0);
            let work = async move {
                let consume = consumer.consume(TOPIC, Some(0), ONE, Duration::ZERO);
                rt::timeout(patience * MS, consume).await.is_err()
            };
            let gave_up = world.on(&nodes[0], work).await;
            rt::sleep(60 * MS).await;
            let again = world.consume(&nodes[1], 0, Some(0), Duration::ZERO).await;
            assert_eq!(again.is_some(), gave_up, "after {patience} ms");
            lost += u32::from(gave_up);
        }
        assert!((5..13).contains(&lost), "{lost}");
    });
}

#[test]
fn c52_a_node_where_nobody_waits_any_more_passes_and_the_next_one_is_told() {
    run(15, 3, 2, &[3], |world, nodes| async move {
        // Node 1 leaves a token and has nobody left to use it.
        assert!(world.consume(&nodes[0], 0, None, 100 * MS).await.is_none());
        let consumer = nodes[1].consumer(1);
        let (sender, served) = rt::sync::oneshot();
        world.sim.spawn_on(2, async move {
            let _ = sender.send((consumer.consume(TOPIC, None, ONE, 20 * SECOND).await, rt::now()));
        });
        rt::sleep(100 * MS).await;
        let started = rt::now();
        world.produce(&nodes[2], 0, 0, "x").await;
        let (got, at) = served.await.expect("the node lives");
        assert_eq!(got.expect("served").len(), 1);
        assert!(at - started < 30 * MS, "{:?}", at - started);
    });
}

#[test]
fn c50_a_lost_notification_costs_seconds_not_the_record() {
    for seed in 0..6 {
        run(20 + seed, 2, 2, &[2], |world, nodes| async move {
            let consumer = nodes[0].consumer(0);
            let (sender, served) = rt::sync::oneshot();
            world.sim.spawn_on(1, async move {
                let _ = sender.send((consumer.consume(TOPIC, None, ONE, 30 * SECOND).await, rt::now()));
            });
            rt::sleep(100 * MS).await;
            world.network.cut(1, 2);
            world.produce(&nodes[1], 0, 0, "x").await;
            rt::sleep(500 * MS).await;
            world.network.heal(1, 2);
            let started = rt::now();
            let (got, at) = served.await.expect("the node lives");
            assert_eq!(got.expect("served").len(), 1);
            assert!(at - started < 8 * SECOND, "{:?}", at - started);
        });
    }
}

#[test]
fn a_hung_owner_delays_nobody_who_could_be_served_here() {
    run(16, 2, 2, &[1, 2], |world, nodes| async move {
        world.network.cut(1, 2);
        // The first one finds out.
        assert!(world.consume(&nodes[0], 0, None, 3 * SECOND).await.is_none());
        for _ in 0..10 {
            let consumer = nodes[0].consumer(0);
            let (sender, served) = rt::sync::oneshot();
            world.sim.spawn_on(1, async move {
                let _ = sender.send((consumer.consume(TOPIC, None, ONE, 20 * SECOND).await, rt::now()));
            });
            rt::sleep(700 * MS).await;
            let started = rt::now();
            world.produce(&nodes[0], 0, 0, "x").await;
            let (got, at) = served.await.expect("the node lives");
            assert_eq!(got.expect("served").len(), 1);
            assert!(at - started < 20 * MS, "{:?}", at - started);
        }
    });
}

#[test]
fn c85_owners_that_are_dead_or_do_not_answer_are_told_apart() {
    run(17, 2, 2, &[2, 1, 0], |world, mut nodes| async move {
        world.produce(&nodes[0], 0, 0, "x").await;
        let delivery = world.consume(&nodes[0], 0, Some(0), 5 * SECOND).await.expect("served");
        let consume = |wait: Duration, partition: u32| {
            let consumer = nodes[0].consumer(0);
            world.on(&nodes[0], async move { consumer.consume(TOPIC, Some(partition), ONE, wait).await.map(drop) })
        };
        assert_eq!(world.settle(&nodes[0], 0, &delivery, SettleMode::Extend).await, SettleStatus::Done);
        world.network.cut(1, 2);
        assert_eq!(world.settle(&nodes[0], 0, &delivery, SettleMode::Ack).await, SettleStatus::Unanswered);
        assert_eq!(consume(Duration::ZERO, 0).await, Err(ConsumeError::Unreachable));
        assert_eq!(consume(Duration::ZERO, 2).await, Err(ConsumeError::OwnerDown), "no owner yet");
        assert_eq!(consume(Duration::ZERO, 3).await, Err(ConsumeError::PartitionOutOfRange));
        world.set_dead(&[2]);
        world.tell(&nodes[0]).await;
        let started = rt::now();
        assert_eq!(consume(5 * SECOND, 0).await, Err(ConsumeError::OwnerDown));
        assert_eq!(world.settle(&nodes[0], 0, &delivery, SettleMode::Ack).await, SettleStatus::OwnerDown);
        assert!(rt::now() - started < 5 * MS, "without asking anybody");
        drop(nodes.pop());
    });
}

#[test]
fn replay_and_statistics_come_from_the_owner() {
    run(18, 2, 3, &[2, 2, 2, 2, 1], |world, nodes| async move {
        for partition in 0..5 {
            world.produce(&nodes[0], 0, partition, "kept").await;
        }
        rt::sleep(100 * MS).await;
        let consumer = nodes[0].consumer(0);
        for partition in 0..5 {
            let consumer = consumer.clone();
            let read = world.on(&nodes[0], async move { consumer.read_at(TOPIC, partition, 0).await }).await;
            match read {
                Ok(ReadAt::Record(record)) => assert_eq!((text(&record), record.nonce), ("kept", 0)),
                other => panic!("partition {partition}: {other:?}"),
            }
        }
        let past = world.on(&nodes[0], async move { consumer.read_at(TOPIC, 0, 1).await }).await;
        assert!(matches!(past, Ok(ReadAt::PastEnd)), "{past:?}");
        let carrier = nodes[0].shards[1].carrier().clone();
        let stats = world.on(&nodes[0], async move {
            carrier.call(Address::remote(NodeId(2)), Request::Stats { incarnation: LIFE }).await
        });
        let Ok(Reply::Stats(stats)) = stats.await else { panic!("statistics") };
        let seen: Vec<(u32, u64)> = stats.iter().map(|one| (one.index, one.high_watermark)).collect();
        assert_eq!(seen, [(0, 1), (1, 1), (2, 1), (3, 1)]);
    });
}

#[test]
fn c86_acks_beyond_128_queue_and_leave_as_batches_each_answered_as_if_it_were_alone() {
    run(21, 2, 1, &[2], |world, nodes| async move {
        for _ in 0..4 {
            world.produce(&nodes[0], 0, 0, "x").await;
        }
        let mut real = Vec::new();
        for _ in 0..4 {
            let delivery = world.consume(&nodes[0], 0, None, SECOND).await.expect("four were accepted");
            real.push(Settle { partition: 0, offset: delivery.offset, nonce: delivery.nonce, mode: SettleMode::Ack });
        }
        world.network.set_delay(5 * MS, 5 * MS);
        let carrier = nodes[0].carriers[0].clone();
        let asked = |settle: Settle| {
            let (carrier, (sender, status)) = (carrier.clone(), rt::sync::oneshot());
            world.sim.spawn_on(1, async move {
                let request = Request::Settle { incarnation: LIFE, settles: vec![settle] };
                let reply = carrier.call(Address::remote(NodeId(2)), request).await;
                let Ok(Reply::Settled(statuses)) = reply else { panic!("{reply:?}") };
                let _ = sender.send(statuses[0]);
            });
            status
        };
        let calls = || {
            let metrics = carrier.metrics();
            let acks = metrics.iter().find(|calls| calls.operation == "ack_batch");
            acks.map_or(0, |calls| calls.outcomes.iter().sum::<u64>())
        };
        let wrong = |nonce| Settle { nonce, ..real[0] };
        // Real ones among those that leave alone, and among those that leave together.
        let all: Vec<(Settle, SettleStatus)> = (0..400)
            .map(|at| match at {
                7 => (real[0], SettleStatus::Done),
                200 => (real[1], SettleStatus::Done),
                399 => (real[2], SettleStatus::Done),
                other => (wrong(other), SettleStatus::LeaseGone),
            })
            .collect();
        let waiting: Vec<_> = all.iter().map(|(settle, expected)| (asked(*settle), *expected)).collect();
        for (at, (status, expected)) in waiting.into_iter().enumerate() {
            assert_eq!(status.await.expect("answered"), expected, "the ack at {at}");
        }
        assert_eq!(calls(), 128 + 5, "272 in batches of 64");

        // One whose client goes while it queues is not sent: its lease is still there.
        let busy: Vec<_> = (0..128).map(|at| asked(wrong(at))).collect();
        rt::sleep(MS).await;
        let (carrier, gone) = (carrier.clone(), real[3]);
        let given_up = world.on(&nodes[0], async move {
            let request = Request::Settle { incarnation: LIFE, settles: vec![gone] };
            rt::timeout(2 * MS, carrier.call(Address::remote(NodeId(2)), request)).await.is_err()
        });
        assert!(given_up.await);
        for status in busy {
            assert_eq!(status.await, Some(SettleStatus::LeaseGone));
        }
        rt::sleep(50 * MS).await;
        assert_eq!(calls(), 128 + 5 + 128);
        assert_eq!(asked(gone).await, Some(SettleStatus::Done));
    });
}

#[test]
fn c85_what_a_long_poll_got_from_another_node_is_acked_there() {
    run(22, 3, 2, &[2, 3], |world, nodes| async move {
        let consumer = nodes[0].consumer(1);
        let (sender, parked) = rt::sync::oneshot();
        world.sim.spawn_on(1, async move {
            let _ = sender.send(consumer.consume(TOPIC, Some(1), ONE, 30 * SECOND).await);
        });
        rt::sleep(300 * MS).await;
        world.produce(&nodes[1], 0, 1, "late").await;
        let got = parked.await.expect("the node lives").expect("served");
        assert_eq!(text(&got[0]), "late");
        assert_eq!(world.settle(&nodes[0], 0, &got[0], SettleMode::Ack).await, SettleStatus::Done);
        assert_eq!(world.settle(&nodes[2], 0, &got[0], SettleMode::Ack).await, SettleStatus::LeaseGone);
    });
}
