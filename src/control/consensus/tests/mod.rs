mod fate;
mod hostile;
mod restarts;
mod rule;
mod world;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use narad_shards::meta::Incarnation;
use narad_shards::rt::{self, Queue};

use super::configuration::Configuration;
use super::disk::Stored;
use crate::control::{Command, Controller, Log, Outcome, Registration};
use world::{create, name, run, server, World};

const MS: fn(u64) -> Duration = Duration::from_millis;

#[test]
fn a_lone_node_leads_within_milliseconds_and_keeps_what_it_answered() {
    for seed in 0..50 {
        run(seed, 1, |world| async move {
            let node = world.start(1).await;
            let started = rt::now();
            while !node.consensus.leads() {
                rt::sleep(MS(1)).await;
            }
            assert!(rt::now() - started < MS(20));
            node.consensus.latch().await.unwrap();
            for id in 1..=20 {
                let outcome = node.consensus.decide(create(&format!("t{id}"), id)).await.unwrap();
                assert!(matches!(outcome, Outcome::Created(_)));
            }
            let (before, applied) = (world.topics(1), node.applier.applied_index());
            world.crash(1);
            let node = world.start(1).await;
            node.consensus.latch().await.unwrap();
            assert_eq!(world.topics(1), before);
            assert!(node.applier.applied_index() > applied, "the new term's own entry moves the index (K14)");
            assert!(matches!(node.consensus.decide(create("more", 99)).await, Ok(Outcome::Created(_))));
        });
    }
}

#[test]
fn three_nodes_elect_one_and_each_of_them_can_have_a_change_decided() {
    for seed in 0..50 {
        run(seed, 3, |world| async move {
            world.start_all().await;
            let started = rt::now();
            world.wait_leader().await;
            assert!(rt::now() - started < MS(2500));
            for tag in 1..=3 {
                let node = world.running(tag).unwrap();
                let topic = format!("from-{tag}");
                let outcome = node.consensus.decide(create(&topic, u64::from(tag))).await.unwrap();
                assert!(matches!(outcome, Outcome::Created(_)));
                // E52: it sees its own write.
                assert!(node.applier.snapshot().topic(&topic).is_some());
                // A refusal is an answer, on a follower too.
                let again = node.consensus.decide(create(&topic, 77)).await.unwrap();
                assert!(matches!(again, Outcome::Refused(_)));
            }
            world.settle().await;
            assert_eq!(world.topics(1).len(), 3);
            assert!((2..=3).all(|tag| world.topics(tag) == world.topics(1)));
        });
    }
}

/// What clients were told.
#[derive(Default)]
struct Told {
    created: BTreeMap<String, u64>,
    /// Ids of creates that must not exist.
    not_done: Vec<u64>,
    unknown: u32,
}

/// Proposes through random nodes until `until`.
async fn client(world: World, number: u64, until: rt::Instant, told: Rc<RefCell<Told>>) {
    let mut count = 0;
    while rt::now() < until {
        let (tag, wait) = {
            let mut rng = world.rng.borrow_mut();
            (1 + rng.below(3) as u32, rng.range(1, 120))
        };
        rt::sleep(MS(wait)).await;
        let Some(node) = world.running(tag) else { continue };
        count += 1;
        let (topic, id) = (format!("c{number}-{count}"), number * 1_000_000 + count);
        // On the node, so that a crash takes it away.
        let (answer, answered) = rt::sync::oneshot();
        let command = create(&topic, id);
        let asked = node.clone();
        world.sim.spawn_on(tag, async move {
            let _ = answer.send(asked.consensus.decide(command).await);
        });
        drop(node);
        let outcome = answered.await;
        let mut told = told.borrow_mut();
        match outcome {
            Some(Ok(Outcome::Created(_))) => {
                if let Some(node) = world.running(tag) {
                    // E52, unless it was another life of the node that answered.
                    let seen = node.applier.snapshot().topic(&topic).is_some() || node.applier.applied_index() < 2;
                    assert!(
                        seen || world.node(tag).plate.lock().unwrap().state.topics().contains_key(topic.as_str()),
                        "{topic} answered and not seen"
                    );
                }
                told.created.insert(topic, id);
            }
            Some(Ok(other)) => panic!("{topic}: {other:?}"),
            Some(Err(why)) if !why.underway => told.not_done.push(id),
            Some(Err(_)) | None => told.unknown += 1,
        }
    }
}

/// Everything that a cluster must keep to, whatever happens to it.
fn torture(seed: u64, snapshot_entries: u64) -> (usize, u32, u32) {
    let counts: Rc<RefCell<(usize, u32, u32)>> = Rc::default();
    let result = counts.clone();
    run(seed, 3, move |mut world| async move {
        world.snapshot_entries = snapshot_entries;
        let told: Rc<RefCell<Told>> = Rc::default();
        world.start_all().await;
        let until = rt::now() + Duration::from_secs(8);
        let clients: Vec<_> = (1..=3)
            .map(|number| rt::spawn(Queue::Foreground, client(world.clone(), number, until, told.clone())))
            .collect();
        while rt::now() < until {
            let (event, tag, wait) = {
                let mut rng = world.rng.borrow_mut();
                (rng.below(8), 1 + rng.below(3) as u32, rng.range(50, 1200))
            };
            match event {
                0 => {
                    world.crash(tag);
                    rt::sleep(MS(wait)).await;
                    world.start(tag).await;
                }
                1 => world.isolate(tag),
                2 => world.cut(tag, 1 + tag % 3),
                3 => world.network.loss_percent.set(10),
                4 => {
                    if let Some(leader) = world.leader().and_then(|tag| world.running(tag)) {
                        let _ = leader.consensus.transfer().await;
                    }
                }
                5 => {
                    for tag in 1..=3 {
                        world.crash(tag);
                    }
                    rt::sleep(MS(wait)).await;
                    world.start_all().await;
                }
                _ => {
                    world.heal();
                    world.network.loss_percent.set(0);
                }
            }
            rt::sleep(MS(wait)).await;
        }
        world.heal();
        world.network.loss_percent.set(0);
        for task in clients {
            task.await;
        }
        world.settle().await;
        rt::sleep(MS(200)).await;
        world.settle().await;
        let topics = world.topics(1);
        assert!((2..=3).all(|tag| world.topics(tag) == topics), "replicas differ");
        let told = told.borrow();
        for (topic, id) in &told.created {
            let live = topics.get(topic.as_str()).unwrap_or_else(|| panic!("{topic} was answered and is lost"));
            assert_eq!(live.incarnation.0, *id);
        }
        for id in &told.not_done {
            assert!(topics.values().all(|topic| topic.incarnation.0 != *id), "{id} was denied and is there");
        }
        let installs = (1..=3).map(|tag| world.node(tag).plate.lock().unwrap().installs).sum();
        *result.borrow_mut() = (told.created.len(), told.unknown, installs);
    });
    let counts = *counts.borrow();
    counts
}

#[test]
fn k14_e47_e52_what_was_answered_is_there_once_and_what_was_denied_is_not_whatever_breaks() {
    let (mut created, mut unknown, mut installs) = (0, 0, 0);
    for seed in 0..60 {
        // Every other cluster compacts its log all the time, so that those who were away need snapshots.
        let (c, u, i) = torture(seed, if seed % 2 == 0 { 10 } else { 8192 });
        (created, unknown, installs) = (created + c, unknown + u, installs + i);
    }
    // The scenario reaches what it is about.
    assert!(
        created > 1_500 && unknown > 50 && installs > 10,
        "{created} created, {unknown} unknown, {installs} installs"
    );
}

#[test]
fn k11_a_change_that_was_handed_to_a_leader_that_dies_is_done_by_the_next_one_and_done_once() {
    for seed in 0..60 {
        run(seed, 3, |world| async move {
            world.start_all().await;
            let leader = world.wait_leader().await;
            world.settle().await;
            let tag = if leader == 1 { 2 } else { 1 };
            let follower = world.running(tag).unwrap();
            for (name, id) in [("kept", 1), ("gone", 2)] {
                follower.consensus.decide(create(name, id)).await.unwrap();
            }
            let begin = |command| {
                let (answer, answered) = rt::sync::oneshot();
                let asked = follower.clone();
                world.sim.spawn_on(tag, async move {
                    let _ = answer.send(asked.consensus.decide(command).await);
                });
                answered
            };
            let created = begin(create("new", 3));
            let deleted = begin(Command::DeleteTopic { name: Arc::from("gone"), incarnation: Incarnation(2) });
            // Nothing of it has arrived, or all but the answer, or anything in between.
            rt::sleep(Duration::from_micros(seed * 400)).await;
            let asked = rt::now();
            world.crash(leader);
            assert!(matches!(created.await, Some(Ok(Outcome::Created(_)))), "seed {seed}");
            assert!(matches!(deleted.await, Some(Ok(Outcome::Deleted(_)))), "seed {seed}");
            assert!(rt::now() - asked < Duration::from_secs(5));
            assert!(follower.applier.snapshot().topic("new").is_some(), "E52");
            world.start(leader).await;
            world.settle().await;
            for tag in 1..=3 {
                let topics: Vec<_> = world.topics(tag).values().map(|topic| topic.incarnation.0).collect();
                assert_eq!(topics, [1, 3], "seed {seed}, node {tag}");
            }
        });
    }
}

#[test]
fn e47_loss_of_leadership_ends_a_proposal_early_as_unknown_and_a_barrier_with_it() {
    for seed in 0..20 {
        run(seed, 3, |world| async move {
            world.start_all().await;
            let leader = world.wait_leader().await;
            let node = world.running(leader).unwrap();
            world.isolate(leader);
            let started = rt::now();
            let log: Rc<dyn Log> = Rc::new(node.consensus.clone());
            let barrier = log.barrier();
            let why = log.propose(create("a", 1)).await.unwrap_err();
            assert!(why.underway, "{}", why.why);
            assert!(rt::now() - started < Duration::from_secs(4), "ended by check-quorum, not by the deadline");
            assert!(barrier.await.is_err(), "a leader that is cut off is nobody's word");
            world.heal();
        });
    }
}

#[test]
fn k19_a_follower_that_hears_nothing_is_not_caught_up_and_a_barrier_brings_it_level() {
    for seed in 0..20 {
        run(seed, 3, |world| async move {
            world.start_all().await;
            let leader = world.wait_leader().await;
            world.settle().await;
            rt::sleep(MS(300)).await;
            let follower = if leader == 1 { 2 } else { 1 };
            let node = world.running(follower).unwrap();
            assert!(node.consensus.caught_up() && node.consensus.sees_leader());
            world.crash(follower);
            world.running(leader).unwrap().consensus.decide(create("while-away", 5)).await.unwrap();
            world.isolate(follower);
            let node = world.start(follower).await;
            rt::sleep(MS(500)).await;
            assert!(!node.consensus.caught_up(), "all its local indexes agree, and nobody has told it anything");
            assert!(!node.consensus.is_latched());
            world.heal();
            node.consensus.latch().await.unwrap();
            assert!(node.applier.snapshot().topic("while-away").is_some());
            world.isolate(follower);
            rt::sleep(MS(5_200)).await;
            assert!(!node.consensus.sees_leader() && !node.consensus.caught_up());
            assert!(node.consensus.is_latched(), "for the life of the process");
        });
    }
}

#[test]
fn a_node_that_comes_back_to_an_idle_cluster_learns_that_it_is_level() {
    for seed in 0..20 {
        run(seed, 3, |world| async move {
            world.start_all().await;
            let leader = world.wait_leader().await;
            world.settle().await;
            rt::sleep(MS(300)).await;
            let follower = if leader == 1 { 2 } else { 1 };
            world.crash(follower);
            let node = world.start(follower).await;
            rt::timeout(Duration::from_secs(1), node.consensus.latch()).await.unwrap().unwrap();
            assert!(node.consensus.caught_up());
        });
    }
}

#[test]
fn a_hand_over_is_quick_and_loses_nothing() {
    for seed in 0..20 {
        run(seed, 3, |world| async move {
            world.start_all().await;
            let leader = world.wait_leader().await;
            world.settle().await;
            let started = rt::now();
            world.running(leader).unwrap().consensus.transfer().await.unwrap();
            let next = world.wait_leader().await;
            assert_ne!(next, leader);
            assert!(rt::now() - started < MS(300));
        });
    }
}

#[test]
fn k32_e54_a_newcomer_learns_by_snapshot_then_votes_and_a_lone_node_grows_to_three() {
    for seed in 0..20 {
        run(seed, 1, |mut world| async move {
            world.snapshot_entries = 10;
            let first = world.start(1).await;
            first.consensus.latch().await.unwrap();
            for id in 1..=40 {
                first.consensus.decide(create(&format!("t{id}"), id)).await.unwrap();
            }
            for tag in 2..=3u32 {
                let raft_id = 1000 + u64::from(tag);
                world.add(tag, Stored { raft_id, ..Stored::default() }, 0);
                let node = world.start(tag).await;
                let (who, at) = (name(tag), server(tag).address);
                first.consensus.add_learner(raft_id, &who, &at).await.unwrap();
                assert!(!first.consensus.status().configuration.is_voter(raft_id));
                node.consensus.latch().await.unwrap();
                assert_eq!(world.topics(tag), world.topics(1));
                assert_eq!(world.node(tag).plate.lock().unwrap().installs, 1);
                first.consensus.promote(raft_id, &who, &at).await.unwrap();
            }
            assert_eq!(first.consensus.status().configuration.voters(), 3);
            assert!(first.consensus.remove(first.consensus.status().raft_id).await.is_err());
            assert!(world.network.pieces.get() >= 2 * 3, "the snapshots came over connections of their own");
            // The founder may go now.
            world.settle().await;
            world.crash(1);
            let leader = world.wait_leader().await;
            let node = world.running(leader).unwrap();
            node.consensus.decide(create("after", 77)).await.unwrap();
            assert_eq!(world.topics(leader).len(), 41);
            // And is taken out of the configuration.
            let founder = world.node(1).plate.lock().unwrap().raft_id;
            node.consensus.remove(founder).await.unwrap();
            let configuration: Configuration = node.consensus.status().configuration;
            assert_eq!(configuration.voters(), 2);
        });
    }
}

#[test]
fn the_controller_of_whoever_leads_founds_the_cluster_and_gives_partitions_their_owners() {
    for seed in 0..10 {
        run(seed, 3, |world| async move {
            for tag in 1..=3 {
                let node = world.start(tag).await;
                world.sim.spawn_on(tag, async move {
                    let me = Arc::new(Registration {
                        node: Arc::from(name(tag)),
                        raft_id: node.consensus.status().raft_id,
                        peer_address: Arc::from(server(tag).address),
                        newest_command_type: Command::NEWEST_TYPE,
                        ..Registration::default()
                    });
                    let (log, servers) = (Rc::new(node.consensus.clone()), Rc::new(node.consensus.clone()));
                    let controller = Controller::new(log, node.applier.clone(), servers, me.clone());
                    let prepare = controller.clone();
                    node.consensus.prepare_with(Rc::new(move |command| prepare.prepare(command)));
                    rt::spawn(Queue::Background, controller.run());
                    loop {
                        let _ = node
                            .consensus
                            .decide(Command::RegisterMember { registration: me.clone(), stamp_ms: 0 })
                            .await;
                        rt::sleep(Duration::from_secs(5)).await;
                    }
                });
            }
            let leader = world.wait_leader().await;
            rt::sleep(Duration::from_secs(6)).await;
            // Through one that does not lead: the leader chooses the owners.
            let other = world.running(if leader == 1 { 2 } else { 1 }).unwrap();
            assert!(matches!(other.consensus.decide(create("t", 9)).await, Ok(Outcome::Created(_))));
            world.settle().await;
            for tag in 1..=3 {
                let state = world.node(tag).plate.lock().unwrap().state.clone();
                assert_ne!(state.cluster_id(), 0);
                assert_eq!(state.members().len(), 3);
                assert!(state.members().values().all(|member| member.heartbeat_ms > 0), "stamped by the leader (K4)");
                let mut owners: Vec<_> =
                    (0..3).filter_map(|partition| state.owner(Incarnation(9), partition)).collect();
                owners.sort_unstable();
                owners.dedup();
                assert_eq!(owners.len(), 3, "one partition each");
            }
        });
    }
}

#[test]
fn a_leader_knows_which_servers_do_not_answer() {
    run(7, 3, |world| async move {
        world.start_all().await;
        let leader = world.wait_leader().await;
        let node = world.running(leader).unwrap();
        rt::sleep(Duration::from_secs(3)).await;
        assert!(node.consensus.failing().is_empty());
        let silent = if leader == 1 { 2 } else { 1 };
        world.isolate(silent);
        rt::sleep(MS(1_300)).await;
        let id = world.node(silent).plate.lock().unwrap().raft_id;
        assert_eq!(node.consensus.failing().into_iter().collect::<Vec<_>>(), [id]);
        world.heal();
        rt::sleep(MS(500)).await;
        assert!(node.consensus.failing().is_empty());
    });
}

#[test]
fn k17_a_log_that_cannot_be_written_ends_the_part_of_this_node_only() {
    run(5, 3, |world| async move {
        world.start_all().await;
        let leader = world.wait_leader().await;
        let node = world.running(leader).unwrap();
        node.consensus.decide(create("a", 1)).await.unwrap();
        world.node(leader).plate.lock().unwrap().refuse = true;
        let why = node.consensus.decide(create("b", 2)).await.unwrap_err();
        assert!(why.underway, "{}", why.why);
        rt::sleep(Duration::from_secs(40)).await;
        assert!(node.consensus.stopped().is_some() && node.applier.stopped().is_some());
        assert!(!node.consensus.leads());
        assert!(node.consensus.decide(create("c", 3)).await.is_err());
        let next = world.wait_leader().await;
        assert_ne!(next, leader);
        world.running(next).unwrap().consensus.decide(create("d", 4)).await.unwrap();
    });
}

#[test]
fn k17_an_entry_of_a_newer_release_stops_the_node_before_it_is_applied() {
    run(6, 1, |world| async move {
        let node = world.start(1).await;
        node.consensus.latch().await.unwrap();
        let applied = node.applier.applied_index();
        let id = node.consensus.new_id();
        let data = [4711u16.to_le_bytes().as_slice(), b"{}"].concat();
        node.consensus.request(super::driver::Request::Propose { id, data, term: None });
        let stopped = node.applier.wait_stopped().await;
        assert!(stopped.why.contains("4711"), "{}", stopped.why);
        assert_eq!(node.applier.applied_index(), applied, "a restart tries it again");
    });
}
