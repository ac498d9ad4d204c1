//! Records on their way to an owner on another node.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::world::{run, text, Node, World, LIFE, MS, SECOND, TOPIC};
use crate::api::{SettleMode, DISK_RESERVE, DRAINING};
use crate::io::Slice;
use crate::meta::{Address, Destination, NodeId};
use crate::peer::{Carrier, CommitBatch, CommitError, Record, Reply, Request};
use crate::rt;

fn batch(partition: u32, payload: &str) -> CommitBatch {
    let destination = Destination { incarnation: LIFE, partition };
    let records = vec![Record { body: Slice::copy_from(payload.as_bytes()), key_bytes: 0 }];
    CommitBatch { destination, topic: Arc::from(TOPIC), accepted_under: Some(LIFE), records, budget: 30 * SECOND }
}

async fn commit(world: &World, node: &Node, to: Address, batch: CommitBatch) -> Result<u64, CommitError> {
    let carrier = node.shards[0].carrier().clone();
    match world.on(node, async move { carrier.call(to, Request::Commit(batch)).await }).await {
        Ok(Reply::Commit(result)) => result.map(|committed| committed.base_offset),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_record_accepted_on_one_node_is_committed_on_its_owner() {
    run(1, 2, 2, &[2, 1, 2], |world, nodes| async move {
        for partition in 0..3 {
            world.produce(&nodes[0], 0, partition, "from-one").await;
            world.produce(&nodes[1], 1, partition, "from-two").await;
        }
        let mut got = Vec::new();
        // Both nodes serve both topics' partitions to whoever asks them.
        for turn in 0..6 {
            let node = &nodes[turn % 2];
            let delivery = world.consume(node, 0, None, 2 * SECOND).await.expect("six were accepted");
            assert_eq!(world.settle(node, 1, &delivery, SettleMode::Ack).await, crate::api::SettleStatus::Done);
            got.push((delivery.partition, text(&delivery).to_owned()));
        }
        got.sort();
        let both = |partition| ["from-one", "from-two"].map(|from| (partition, from.to_owned()));
        assert_eq!(got, [both(0), both(1), both(2)].concat());
        assert!(world.consume(&nodes[0], 0, None, 10 * MS).await.is_none());
    });
}

#[test]
fn k1_k2_a_produce_is_answered_and_local_records_are_served_with_every_other_node_out_of_reach() {
    run(21, 3, 2, &[1, 2, 3], |world, nodes| async move {
        // Before any connection exists: not one reply can come from anywhere.
        for (a, b) in [(1, 2), (1, 3), (2, 3)] {
            world.network.cut(a, b);
        }
        for partition in 0..3 {
            let started = rt::now();
            world.produce(&nodes[0], 1, partition, "kept here").await;
            assert!(rt::now() - started < 20 * MS, "as long as the sync of its own log: {:?}", rt::now() - started);
        }
        let delivery = world.consume(&nodes[0], 0, Some(0), SECOND).await.expect("owned here");
        assert_eq!(text(&delivery), "kept here");
    });
}

#[test]
fn e43_a_wrong_shard_forwards_once_and_its_reply_names_the_right_one() {
    run(2, 2, 3, &[2; 9], |world, nodes| async move {
        let to = Address::remote(NodeId(2));
        let mut forwarded = Vec::new();
        for round in 0..2 {
            let before = world.ring_calls.get();
            for partition in 0..9 {
                assert_eq!(commit(&world, &nodes[0], to, batch(partition, "x")).await, Ok(round));
            }
            forwarded.push(world.ring_calls.get() - before);
        }
        // The shard that serves is known now, and latency is that of the shard (E44): partition * 7 + 2, mod 3.
        let served = |partition| {
            let destination = Destination { incarnation: LIFE, partition };
            nodes[0].carriers[0].served_by(to, destination)
        };
        for partition in 0..9 {
            let shard = ((partition * 7 + 2) % 3) as u16;
            assert_eq!(served(partition), Address { node: NodeId(2), shard });
        }
        assert!(forwarded[0] > 0, "no guess was wrong: {forwarded:?}");
        assert_eq!(forwarded[1], 0, "learnt");
    });
}

#[test]
fn k41_a_node_that_does_not_own_the_partition_says_so_and_stores_nothing() {
    run(3, 3, 2, &[2, 3], |world, nodes| async move {
        let wrong = commit(&world, &nodes[0], Address::remote(NodeId(3)), batch(0, "x")).await;
        assert_eq!(wrong, Err(CommitError::NotOwner));
        let right = commit(&world, &nodes[0], Address::remote(NodeId(2)), batch(0, "x")).await;
        assert_eq!(right, Ok(0));
        let unowned = commit(&world, &nodes[0], Address::remote(NodeId(2)), batch(7, "x")).await;
        assert!(matches!(unowned, Err(CommitError::Unavailable(_))), "{unowned:?}");
        let mut other_life = batch(0, "x");
        other_life.destination.incarnation = crate::meta::Incarnation(9);
        other_life.accepted_under = Some(crate::meta::Incarnation(9));
        let refused = commit(&world, &nodes[0], Address::remote(NodeId(2)), other_life).await;
        assert!(matches!(refused, Err(CommitError::IncarnationMismatch { live: LIFE, .. })), "{refused:?}");
    });
}

#[test]
fn records_of_a_dead_owner_go_to_a_sibling_at_once_and_its_own_come_back_with_it() {
    run(4, 2, 2, &[2, 1], |world, mut nodes| async move {
        world.kill(nodes.pop().expect("two"));
        world.set_dead(&[2]);
        world.tell(&nodes[0]).await;
        let started = rt::now();
        world.produce(&nodes[0], 0, 0, "rerouted").await;
        let delivery = world.consume(&nodes[0], 1, None, 5 * SECOND).await.expect("on the sibling");
        assert_eq!((delivery.partition, text(&delivery)), (1, "rerouted"));
        assert!(rt::now() - started < 50 * MS, "{:?}", rt::now() - started);
        nodes.push(world.start(2).await);
        world.set_dead(&[]);
        world.tell_all(&nodes).await;
        world.start_dispatch(&nodes[1]).await;
        world.produce(&nodes[0], 0, 0, "home").await;
        let delivery = world.consume(&nodes[1], 0, None, 5 * SECOND).await.expect("on its owner");
        assert_eq!((delivery.partition, text(&delivery)), (0, "home"));
    });
}

#[test]
fn e40_records_of_a_silent_owner_are_rerouted_after_seconds_and_none_is_lost() {
    run(5, 2, 2, &[2, 1], |world, nodes| async move {
        world.produce(&nodes[0], 0, 0, "before").await;
        assert!(world.consume(&nodes[1], 0, None, SECOND).await.is_some());
        world.network.cut(1, 2);
        let started = rt::now();
        world.produce(&nodes[0], 0, 0, "one").await;
        world.produce(&nodes[0], 1, 0, "two").await;
        let mut seen = BTreeSet::new();
        while seen.len() < 2 && rt::now() - started < 60 * SECOND {
            if let Some(delivery) = world.consume(&nodes[0], 0, None, SECOND).await {
                assert_eq!(delivery.partition, 1, "the owner cannot be reached");
                seen.insert(text(&delivery).to_owned());
            }
        }
        assert_eq!(seen.len(), 2);
        let took = rt::now() - started;
        assert!(took > SECOND && took < 12 * SECOND, "{took:?}");
        world.network.heal(1, 2);
        rt::sleep(5 * SECOND).await;
        world.produce(&nodes[0], 0, 0, "after").await;
        let mut after = false;
        for _ in 0..4 {
            // The probe that was on its way may have been stored as well (R12).
            let got = world.consume(&nodes[1], 0, Some(0), SECOND).await;
            after |= got.is_some_and(|delivery| text(&delivery) == "after");
        }
        assert!(after, "the owner gets its records again");
    });
}

#[test]
fn e41_more_commits_than_there_is_credit_for_arrive_all_the_same() {
    run(6, 2, 1, &[2], |world, nodes| async move {
        let payload = "z".repeat(200_000);
        let calls: Vec<_> = (0..20)
            .map(|_| {
                let carrier = nodes[0].shards[0].carrier().clone();
                let batch = batch(0, &payload);
                Box::pin(async move { carrier.call(Address::remote(NodeId(2)), Request::Commit(batch)).await })
            })
            .collect();
        let answers = world.on(&nodes[0], rt::all(calls)).await;
        let offsets: BTreeSet<u64> = answers
            .into_iter()
            .map(|answer| match answer {
                Ok(Reply::Commit(Ok(committed))) => committed.base_offset,
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(offsets, (0..20).collect());
    });
}

#[test]
fn e52_an_owner_without_an_owner_yet_is_looked_up_until_there_is_one() {
    run(7, 2, 2, &[0, 0], |world, nodes| async move {
        world.produce(&nodes[0], 0, 1, "early").await;
        rt::sleep(SECOND).await;
        world.set_owners(&[1, 2]);
        world.tell_all(&nodes).await;
        let delivery = world.consume(&nodes[1], 0, Some(1), SECOND).await.expect("committed by now");
        assert_eq!(text(&delivery), "early");
    });
}

#[test]
fn e56_a_synchronous_produce_walks_past_dead_owners_and_is_answered_after_the_commit() {
    run(8, 3, 2, &[2, 3, 1], |world, mut nodes| async move {
        world.kill(nodes.remove(1));
        world.set_dead(&[2]);
        world.tell_all(&nodes).await;
        for pin in [None, Some(1), Some(0)] {
            let record = Record { body: Slice::copy_from(b"sync"), key_bytes: 0 };
            let (topic, carrier) = (Arc::from(TOPIC), nodes[0].shards[0].carrier().clone());
            let request = Request::Produce { topic, partition: pin, record };
            let answer = world.on(&nodes[0], async move { carrier.call(Address::remote(NodeId(3)), request).await });
            match (pin, answer.await) {
                (Some(0), Ok(Reply::Produced(Err(_)))) => {}
                (Some(1), Ok(Reply::Produced(Ok((1, _))))) => {}
                (None, Ok(Reply::Produced(Ok((partition, _))))) => assert_ne!(partition, 0),
                other => panic!("{other:?}"),
            }
        }
        for _ in 0..2 {
            assert!(world.consume(&nodes[0], 0, None, 50 * MS).await.is_some(), "visible already");
        }
    });
}

#[test]
fn e22_a_synchronous_produce_is_refused_as_any_other_where_the_disk_is_nearly_full_or_the_node_stops() {
    run(31, 3, 1, &[3, 2], |world, nodes| async move {
        let produce = async |pin| {
            let record = Record { body: Slice::copy_from(b"sync"), key_bytes: 0 };
            let (topic, carrier) = (Arc::from(TOPIC), nodes[0].shards[0].carrier().clone());
            let request = Request::Produce { topic, partition: Some(pin), record };
            match world.on(&nodes[0], async move { carrier.call(Address::remote(NodeId(2)), request).await }).await {
                Ok(Reply::Produced(result)) => result.map(drop),
                other => panic!("{other:?}"),
            }
        };
        let refused = |why: &str| Err(CommitError::Unavailable(why.to_owned()));
        assert_eq!(
            (produce(0).await, produce(1).await),
            (Ok(()), Ok(())),
            "owned by a third node, and by the one asked"
        );
        world.set_capacity(&nodes[1], Some(0));
        rt::sleep(SECOND).await;
        assert_eq!((produce(0).await, produce(1).await), (refused(DISK_RESERVE), refused(DISK_RESERVE)));
        world.set_capacity(&nodes[1], None);
        world.set_capacity(&nodes[2], Some(0));
        rt::sleep(SECOND).await;
        assert_eq!(produce(1).await, Ok(()), "it heals by itself");
        let owner = produce(0).await.expect_err("its owner's disk is full");
        assert!(matches!(&owner, CommitError::Unavailable(why) if why.contains("nearly full")), "{owner:?}");
        nodes[1].shards[0].drain();
        assert_eq!((produce(0).await, produce(1).await), (refused(DRAINING), refused(DRAINING)));
    });
}

#[test]
fn calls_are_counted_by_operation_and_by_how_they_ended() {
    run(29, 3, 1, &[2, 3], |world, nodes| async move {
        let (two, three) = (Address::remote(NodeId(2)), Address::remote(NodeId(3)));
        assert_eq!(commit(&world, &nodes[0], two, batch(0, "x")).await, Ok(0));
        assert_eq!(commit(&world, &nodes[0], three, batch(0, "x")).await, Err(CommitError::NotOwner));
        assert!(world.consume(&nodes[0], 0, Some(1), MS).await.is_none());
        world.set_dead(&[3]);
        world.tell(&nodes[0]).await;
        let carrier = nodes[0].carriers[0].clone();
        let asked = carrier.clone();
        let dead =
            world.on(&nodes[0], async move { asked.call(three, Request::Stats { incarnation: LIFE }).await }).await;
        assert!(dead.is_err(), "{dead:?}");
        let calls = carrier.metrics();
        let of = |operation| calls.iter().find(|call| call.operation == operation).expect(operation);
        assert_eq!(of("commit").outcomes, [1, 1, 0, 0, 0]);
        assert_eq!(of("commit").round_trip_us.len(), 2);
        assert_eq!(of("stats").outcomes, [0, 0, 1, 0, 0]);
        assert_eq!(of("stats").round_trip_us.len(), 0, "nothing came back");
        assert!(calls.iter().all(|call| call.operation != "ack_batch"), "{calls:?}");
        let former = nodes.into_iter().nth(1).expect("three nodes");
        world.kill(former);
        let late = batch(0, "x");
        let asked = carrier.clone();
        let call = Request::Commit(CommitBatch { budget: SECOND, ..late });
        drop(asked.call(two, call).await);
        let commits = carrier.metrics().into_iter().find(|call| call.operation == "commit").expect("asked");
        assert_eq!(commits.outcomes[3], 1, "a silent peer: {commits:?}");
    });
}
