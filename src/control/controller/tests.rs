use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use narad_shards::api::TopicChange;
use narad_shards::meta::{Incarnation, NodeId};
use narad_shards::rt::sim::{self, Rng};
use narad_shards::rt::{self, Queue};

use super::plan::{prune, Planner};
use crate::control::tests::topic;
use crate::control::tests_support::*;
use crate::control::*;

fn mark_dead(state: &mut State, node: &str) {
    let stamp_ms = state.members()[node].heartbeat_ms;
    do_one(state, &Command::MarkDead { node: Arc::from(node), stamp_ms });
}

fn drain(state: &mut State, node: &str) {
    let draining = Arc::new(Member { draining: true, ..(*state.members()[node]).clone() });
    state.absorb(state.applied_index() + 1, &[Change::PutMember(draining)]);
}

fn owners(state: &State, id: u64) -> Vec<u64> {
    state.assignments().get(&Incarnation(id)).into_iter().flat_map(|rows| rows.values()).map(|owner| owner.0).collect()
}

fn dead(commands: &[Command]) -> Vec<&str> {
    let named = commands.iter().map(|command| match command {
        Command::MarkDead { node, .. } => &**node,
        other => panic!("{other:?}"),
    });
    named.collect()
}

#[test]
fn k24_placement_goes_round_the_living_and_leaves_owners_alone() {
    let mut state = cluster(&["a", "b", "c", "d", "e"]);
    mark_dead(&mut state, "b");
    drain(&mut state, "d");
    let mut planner = Planner::default();
    let create = |planner: &mut Planner, state: &State, id: u64, partitions: u32| {
        planner.with_owners(state, Command::create(topic(&format!("t{id}"), id, partitions)))
    };
    let command = create(&mut planner, &state, 1, 4);
    do_one(&mut state, &command);
    assert_eq!(owners(&state, 1), [1, 3, 5, 1]);
    // The next topic goes on where the last one ended: small topics spread as well.
    let command = create(&mut planner, &state, 2, 1);
    do_one(&mut state, &command);
    let command = create(&mut planner, &state, 3, 2);
    do_one(&mut state, &command);
    assert_eq!((owners(&state, 2), owners(&state, 3)), (vec![3], vec![5, 1]));
    // Of an increase only what is new is placed.
    let change = TopicChange { partitions: Some(6), ..TopicChange::default() };
    let more =
        Command::AlterTopic { name: Arc::from("t1"), incarnation: Incarnation(1), change, owners: Owners::default() };
    let more = planner.with_owners(&state, more);
    do_one(&mut state, &more);
    assert_eq!(owners(&state, 1), [1, 3, 5, 1, 3, 5]);
    // An owner's death changes nothing; nobody else has the bytes.
    mark_dead(&mut state, "a");
    assert!(planner.place(&state).is_empty());
}

#[test]
fn a_topic_without_owners_is_placed_once_somebody_lives() {
    let mut state = cluster(&["a", "b"]);
    mark_dead(&mut state, "a");
    mark_dead(&mut state, "b");
    let mut planner = Planner::default();
    let create = planner.with_owners(&state, Command::create(topic("t", 1, 3)));
    assert!(matches!(do_one(&mut state, &create), Outcome::Created(_)), "without owners, but created");
    assert!(owners(&state, 1).is_empty() && planner.place(&state).is_empty());
    do_one(&mut state, &register("b", 2));
    for command in planner.place(&state) {
        do_one(&mut state, &command);
    }
    assert_eq!(owners(&state, 1), [2, 2, 2]);
}

#[test]
fn k25_a_new_leader_gives_everybody_thirty_seconds_on_its_own_clock() {
    let mut state = cluster(&["a", "b", "c"]);
    do_one(&mut state, &register("d", 1));
    let view = led(&["a", "b", "c"], &[]);
    // The stamps are ages old, and say nothing.
    let mut planner = Planner::take_over(&state, seconds(1000));
    for (at, expected) in [(1000, vec![]), (1029, vec![]), (1030, vec![]), (1031, vec!["d"])] {
        if at == 1029 {
            do_one(&mut state, &register("b", 2));
            do_one(&mut state, &register("c", 0)); // another leader's clock may be behind
            planner.observe(&state, seconds(at));
        }
        assert_eq!(dead(&planner.judge(&state, &view, seconds(at))), expected, "at {at}");
    }
    // A heartbeat is judged by when it was seen here.
    assert_eq!(dead(&planner.judge(&state, &view, seconds(1059))), ["d"]);
    do_one(&mut state, &register("c", 3));
    planner.observe(&state, seconds(1059));
    assert_eq!(dead(&planner.judge(&state, &view, seconds(1060))), ["b", "d"]);
}

#[test]
fn k26_a_dead_mark_carries_the_heartbeat_that_it_judged() {
    let mut state = cluster(&["a", "b", "c"]);
    do_one(&mut state, &register("b", 44));
    do_one(&mut state, &register("c", 45));
    let view = led(&["a", "b", "c"], &[]);
    let mut planner = Planner::take_over(&state, seconds(0));
    do_one(&mut state, &register("c", 46));
    planner.observe(&state, seconds(20));
    let verdicts = planner.judge(&state, &view, seconds(31));
    assert_eq!(verdicts, [Command::MarkDead { node: Arc::from("b"), stamp_ms: 44 }]);
    do_one(&mut state, &register("b", 45));
    assert_eq!(do_one(&mut state, &verdicts[0]), Outcome::Refused(Refusal::HeardSince));
    // One that this leader has not looked at yet is not judged either.
    do_one(&mut state, &register("c", 47));
    assert_eq!(planner.judge(&state, &view, seconds(90)), []);
}

#[test]
fn k27_the_breaker_refuses_verdicts_that_would_leave_no_quorum_by_table() {
    // (voters, other members, silent ones, who is marked dead, breaker)
    type Case<'a> = (&'a [&'a str], &'a [&'a str], &'a [&'a str], &'a [&'a str], bool);
    let cases: [Case; 7] = [
        (&["a", "b", "c"], &[], &["c"], &["c"], false),
        (&["a", "b", "c"], &[], &["b", "c"], &[], true),
        (&["a", "b", "c"], &["x"], &["b", "c", "x"], &["x"], true),
        (&["a", "b", "c", "d", "e"], &[], &["d", "e"], &["d", "e"], false),
        (&["a", "b", "c", "d", "e"], &["x"], &["c", "d", "e", "x"], &["x"], true),
        (&["a", "b"], &[], &["b"], &[], true),
        (&["a"], &["x", "y"], &["x", "y"], &["x", "y"], false),
    ];
    for (voters, others, silent, expected, open) in cases {
        let all: Vec<&str> = voters.iter().chain(others).copied().collect();
        let mut state = cluster(&all);
        let mut planner = Planner::take_over(&state, seconds(0));
        for node in all.iter().filter(|node| !silent.contains(node)) {
            do_one(&mut state, &register(node, 2));
        }
        planner.observe(&state, seconds(25));
        let commands = planner.judge(&state, &led(voters, others), seconds(31));
        assert_eq!((&dead(&commands)[..], planner.breaker.is_some()), (expected, open), "{voters:?} {silent:?}");
    }
    // The leader counts as alive and is never judged, though its own heartbeats be stuck.
    let state = cluster(&["a", "b", "c"]);
    let mut planner = Planner::take_over(&state, seconds(0));
    assert_eq!(planner.judge(&state, &led(&["a"], &["b", "c"]), seconds(31)).len(), 2);
}

#[test]
fn a_forming_cluster_holds_a_create_for_two_seconds_once() {
    let view = led(&["a", "b", "c"], &[]);
    let mut planner = Planner::default();
    let mut state = cluster(&["a"]);
    assert_eq!(planner.forming_until(&state, &view, seconds(10)), Some(seconds(12)));
    assert_eq!(planner.forming_until(&state, &view, seconds(11)), Some(seconds(12)), "of the same episode");
    assert_eq!(planner.forming_until(&state, &view, seconds(12)), None);
    assert_eq!(planner.forming_until(&state, &view, seconds(50)), None, "once an episode");
    do_one(&mut state, &register("b", 1));
    do_one(&mut state, &register("c", 1));
    assert_eq!(planner.forming_until(&state, &view, seconds(51)), None);
    let grown = led(&["a", "b", "c", "d"], &[]);
    assert_eq!(planner.forming_until(&state, &grown, seconds(60)), Some(seconds(62)), "another episode");
    assert_eq!(planner.forming_until(&cluster(&[]), &view, seconds(70)), None, "nothing to wait for");
}

#[test]
fn arrivals_are_placed_for_when_all_voters_live_or_a_second_after_the_last() {
    let view = led(&["a", "b", "c"], &[]);
    let mut state = cluster(&["a"]);
    let mut planner = Planner::take_over(&state, seconds(0));
    assert!(!planner.arrivals_are_due(&state, &view, seconds(5)), "nobody has arrived since");
    do_one(&mut state, &register("b", 1));
    planner.observe(&state, seconds(10));
    let half = seconds(10) + Duration::from_millis(500);
    assert!(!planner.arrivals_are_due(&state, &view, half));
    assert!(planner.arrivals_are_due(&state, &view, seconds(11)));
    assert!(!planner.arrivals_are_due(&state, &view, seconds(12)), "once");
    do_one(&mut state, &register("c", 1));
    planner.observe(&state, seconds(20));
    assert!(planner.arrivals_are_due(&state, &view, seconds(20)));
    // A heartbeat is no arrival; a return from the dead is.
    do_one(&mut state, &register("c", 2));
    planner.observe(&state, seconds(21));
    assert!(!planner.arrivals_are_due(&state, &view, seconds(30)));
    mark_dead(&mut state, "c");
    planner.observe(&state, seconds(31));
    do_one(&mut state, &register("c", 3));
    planner.observe(&state, seconds(32));
    assert!(planner.arrivals_are_due(&state, &view, seconds(32)));
}

#[test]
fn k7_k24_k27_plans_hold_whatever_happens() {
    let nodes = ["a", "b", "c", "d", "e", "f"];
    for seed in 0..150 {
        let mut rng = Rng::new(seed);
        let voters = 1 + rng.below(5) as usize;
        let view = led(&nodes[..voters], &nodes[voters..]);
        let mut state = cluster(&nodes[..1 + rng.below(6) as usize]);
        let mut now = seconds(100);
        let mut planner = Planner::take_over(&state, now);
        let mut last_heard = BTreeMap::new();
        let taken_over = now;
        for step in 0..100u64 {
            now = now + Duration::from_secs(rng.below(9));
            planner.observe(&state, now);
            let node = nodes[rng.below(6) as usize];
            match rng.below(6) {
                0 | 1 => {
                    do_one(&mut state, &register(node, 2 + step));
                    planner.observe(&state, now);
                    last_heard.insert(node.to_owned(), now);
                }
                2 => {
                    let create =
                        Command::create(topic(&format!("t{}", rng.below(5)), 1 + step, 1 + rng.below(7) as u32));
                    let create = match rng.chance(1, 2) {
                        true => planner.with_owners(&state, create),
                        false => create,
                    };
                    do_one(&mut state, &create);
                }
                3 => {
                    let before = state.clone();
                    for command in planner.place(&state) {
                        assert_eq!(do_one(&mut state, &command), Outcome::Done, "{command:?}");
                    }
                    let receivers = before.members().values().filter(|member| member.receives());
                    let receivers: Vec<NodeId> = receivers.map(|member| member.number).collect();
                    for topic in state.topics().values() {
                        let mut fresh: BTreeMap<NodeId, u32> = receivers.iter().map(|number| (*number, 0)).collect();
                        for partition in 0..topic.partitions {
                            let owner = state.owner(topic.incarnation, partition);
                            assert_eq!(
                                owner.is_some(),
                                before.owner(topic.incarnation, partition).is_some() || !receivers.is_empty()
                            );
                            match before.owner(topic.incarnation, partition) {
                                Some(kept) => assert_eq!(owner, Some(kept), "k7"),
                                None => owner.into_iter().for_each(|o| *fresh.get_mut(&o).expect("a receiver") += 1),
                            }
                        }
                        let (least, most) = (fresh.values().min(), fresh.values().max());
                        assert!(most.unwrap_or(&0) - least.unwrap_or(&0) <= 1, "{fresh:?}");
                    }
                }
                _ => {
                    let alive = |state: &State| {
                        let lives =
                            |node: &Arc<str>| &**node == "a" || state.members().get(node).is_some_and(|m| m.alive);
                        view.voters().filter(|voter| lives(&voter.node)).count()
                    };
                    let before = alive(&state);
                    for command in planner.judge(&state, &view, now) {
                        let Command::MarkDead { node, .. } = &command else { panic!("{command:?}") };
                        let heard = last_heard.get(&**node).copied().unwrap_or(taken_over);
                        assert!(now - heard > Duration::from_secs(30), "k25: {node} was heard");
                        assert_eq!(do_one(&mut state, &command), Outcome::Done);
                    }
                    assert!(alive(&state) >= view.quorum() || alive(&state) == before, "k27");
                }
            }
            assert!(prune(&state).is_empty(), "no command leaves an orphan");
        }
    }
}

fn orphan(state: &mut State) {
    let rows = Change::PutOwners { incarnation: Incarnation(99), owners: vec![(0, NodeId(1)), (4, NodeId(2))] };
    state.absorb(state.applied_index() + 1, &[rows]);
}

#[test]
fn a_leader_founds_prunes_and_places_when_it_takes_over() {
    sim::run(1, async {
        // A lone node of before clusters, with a topic.
        let mut state = State::default();
        do_one(&mut state, &Command::create(topic("t", 7, 3)));
        let node = node("a", state, led(&["a"], &[]));
        rt::spawn(Queue::Foreground, node.controller.clone().run());
        rt::sleep(Duration::from_secs(1)).await;
        let state = node.applier.state().clone();
        assert_ne!(state.cluster_id(), 0);
        assert_eq!(owners(&state, 7), [1, 1, 1]);
        assert!(state.members()["a"].heartbeat_ms > 0, "k4: stamped by the leader");
        assert_eq!(node.log.proposed.borrow().len(), 2, "{:?}", node.log.proposed.borrow());
    });
    sim::run(2, async {
        let mut state = cluster(&["a", "b"]);
        orphan(&mut state);
        do_one(&mut state, &Command::create(topic("t", 7, 3)));
        let node = node("a", state, led(&["a", "b", "c"], &[]));
        rt::spawn(Queue::Foreground, node.controller.clone().run());
        rt::sleep(Duration::from_secs(1)).await;
        assert!(prune(&node.applier.state()).is_empty());
        assert_eq!(owners(&node.applier.state(), 7), [1, 2, 1]);
    });
}

#[test]
fn k23_a_leader_that_has_lost_its_term_proposes_nothing_more() {
    sim::run(3, async {
        let mut state = cluster(&["a", "b"]);
        for id in 1..=3 {
            do_one(&mut state, &Command::create(topic(&format!("t{id}"), id, 2)));
        }
        let node = node("a", state, led(&["a", "b"], &[]));
        let consensus = node.consensus.clone();
        *node.log.before_propose.borrow_mut() = Some(Box::new(move || consensus.view.borrow_mut().leads = false));
        rt::spawn(Queue::Foreground, node.controller.clone().run());
        rt::sleep(Duration::from_secs(60)).await;
        assert_eq!(node.log.proposed.borrow().len(), 1, "the one that was under way when it lost");
        assert_eq!(node.log.barriers.get(), 1);
        // Again the leader, in another term: behind a barrier first.
        *node.log.before_propose.borrow_mut() = None;
        node.consensus.view.replace_with(|view| View { leads: true, term: 2, ..view.clone() });
        rt::sleep(Duration::from_secs(1)).await;
        assert_eq!(node.log.barriers.get(), 2);
        assert_eq!((1..=3).map(|id| owners(&node.applier.state(), id).len()).sum::<usize>(), 6);
    });
    sim::run(4, async {
        // Lost while the barrier was under way: nothing is proposed at all.
        let mut state = cluster(&["a", "b"]);
        do_one(&mut state, &Command::create(topic("t", 1, 2)));
        let node = node("a", state, led(&["a", "b"], &[]));
        node.log.barrier_wait.set(Duration::from_secs(3));
        rt::spawn(Queue::Foreground, node.controller.clone().run());
        rt::sleep(Duration::from_secs(2)).await;
        node.consensus.view.borrow_mut().term = 2;
        rt::sleep(Duration::from_secs(2)).await;
        assert!(node.log.proposed.borrow().is_empty());
    });
}

#[test]
fn k25_k27_the_running_controller_marks_the_silent_and_places_for_the_first_alive() {
    sim::run(5, async {
        let mut state = cluster(&["a", "b", "c"]);
        for name in ["a", "b", "c"] {
            mark_dead(&mut state, name);
        }
        do_one(&mut state, &Command::create(topic("t", 7, 2)));
        let node = node("a", state, led(&["a", "b", "c"], &[]));
        rt::spawn(Queue::Foreground, node.controller.clone().run());
        rt::sleep(Duration::from_secs(5)).await;
        assert!(owners(&node.applier.state(), 7).is_empty());
        node.log.propose(register("b", 0)).await.unwrap();
        rt::sleep(Duration::from_millis(1300)).await;
        assert_eq!(owners(&node.applier.state(), 7), [2, 2], "within a second of the first alive");
        // `b` falls silent: dead within 30 s and a tick. The leader itself must live for that verdict to stand.
        for _ in 0..9 {
            node.log.propose(register("c", 0)).await.unwrap();
            rt::sleep(Duration::from_secs(5)).await;
        }
        let alive = |name: &str| node.applier.state().members()[name].alive;
        assert_eq!((alive("b"), alive("c")), (false, true));
        // Now `c` as well: the leader would be alone of three, so the fault is its own.
        rt::sleep(Duration::from_secs(60)).await;
        assert!(alive("c") && node.controller.breaker_open());
        assert_eq!(owners(&node.applier.state(), 7), [2, 2], "k24");
    });
}

#[test]
fn a_create_waits_for_the_rest_of_a_forming_cluster() {
    sim::run(6, async {
        let node = node("a", cluster(&["a"]), led(&["a", "b", "c"], &[]));
        let control =
            Rc::new(Control::over(node.log.clone(), node.applier.clone()).with_controller(node.controller.clone()));
        let create = |name: &str| {
            let (control, name) = (control.clone(), name.to_owned());
            rt::spawn(Queue::Foreground, async move {
                let new = narad_shards::api::NewTopic {
                    name,
                    partitions: 3,
                    retention_ms: 0,
                    visibility_timeout_ms: 1,
                    max_in_flight_per_partition: 1,
                    max_acked_ahead_per_partition: 1,
                    owner: None,
                };
                match control.handle(MetaCommand::CreateTopic(new)).await {
                    MetaReply::Created(topic) => (topic.incarnation.0, rt::now()),
                    other => panic!("{other:?}"),
                }
            })
        };
        let started = rt::now();
        let first = create("t");
        rt::sleep(Duration::from_millis(700)).await;
        node.log.propose(register("b", 0)).await.unwrap();
        node.log.propose(register("c", 0)).await.unwrap();
        let (id, at) = first.await;
        assert!(at - started < Duration::from_millis(1100), "all are there");
        let mut spread = owners(&node.applier.state(), id);
        spread.sort_unstable();
        assert_eq!(spread, [1, 2, 3]);
        // A fourth voter that never comes costs the first create two seconds, and the next none.
        node.consensus.view.borrow_mut().servers.push(server("d", true));
        for wait in [2000, 0] {
            let started = rt::now();
            let (_, at) = create(&format!("u{wait}")).await;
            let waited = (at - started).as_millis() as u64;
            assert!((wait..wait + 300).contains(&waited), "{waited} ms");
        }
    });
}

#[test]
fn a_cluster_without_its_id_takes_no_topic_and_no_other_member() {
    sim::run(7, async {
        let node = node("a", State::default(), led(&["a", "b"], &[]));
        assert!(node.controller.prepare(Command::create(topic("t", 1, 1))).is_err());
        assert!(node.controller.prepare(register("b", 0)).is_err());
        assert!(node.controller.prepare(register("a", 0)).is_ok());
        assert!(node.controller.prepare(Command::SetClusterId(4)).is_ok());
    });
}
