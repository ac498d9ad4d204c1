use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use narad_shards::meta::{Incarnation, NodeId};
use narad_shards::peer::LocalBoxFuture;
use narad_shards::remote::{CallError, ConnectionId, Hello, Transport};
use narad_shards::rt::{self, sim, Queue};
use narad_shards::wire::{operation, Incoming, Kind, Outgoing};

use super::admission::{admit, forget, is_address, Step};
use super::join::{start, Attempt, JoinTargets, Next, Start};
use super::*;
use crate::config::{LogFormat, LogLevel};
use crate::control::tests_support::*;
use crate::control::*;
use crate::telemetry::logged;

pub(super) fn asks(node: &str) -> Join {
    Join {
        node: node.to_owned(),
        raft_id: raft_id(node),
        peer_address: format!("{node}:7943"),
        empty_directory: false,
        newest_command_type: Command::NEWEST_TYPE,
        probe: false,
        initial_members: Vec::new(),
    }
}

fn removed(state: &mut State, node: &str) {
    do_one(state, &register(node, 1));
    assert_eq!(do_one(state, &Command::RemoveMember { node: Arc::from(node) }), Outcome::Done);
}

fn follower(view: View) -> View {
    View { leads: false, raft_id: raft_id("b"), ..view }
}

#[test]
fn k31_k32_k33_a_join_is_answered_by_table() {
    let view = led(&["a", "b", "c"], &["d"]);
    let members = cluster(&["a", "b", "c", "d"]);
    let mut with_tombstone = members.clone();
    removed(&mut with_tombstone, "x");
    let empty = |join: Join| Join { empty_directory: true, ..join };
    let at = |join: Join, address: &str| Join { peer_address: address.to_owned(), ..join };
    let disk = |join: Join, raft_id: u64| Join { raft_id, ..join };
    let old = |join: Join| Join { newest_command_type: Command::NEWEST_TYPE - 1, ..join };
    let probe = |join: Join| Join { probe: true, raft_id: 0, ..join };
    let gone = |nodes: &[&str]| {
        let ids: BTreeSet<u64> = nodes.iter().map(|n| raft_id(n)).collect();
        View { failing: ids.clone(), gone: ids, ..view.clone() }
    };
    let empty_state = State::default();
    let founded = View { leader: None, ..follower(led(&["a", "b", "c"], &[])) };
    let add = |node: &str, raft_id: u64| Step::AddLearner(Server { raft_id, ..server(node, false) });
    let moved = Server { address: Arc::from("elsewhere:1"), ..server("b", true) };
    // (who asks, whose word, state, status, word, steps)
    type Case<'a> = (Join, View, &'a State, u16, &'a str, Vec<Step>);
    let cases: Vec<Case> = vec![
        (Join { node: String::new(), ..asks("x") }, view.clone(), &members, 400, "bad_request", vec![]),
        (at(asks("x"), "x:0"), view.clone(), &members, 400, "bad_request", vec![]),
        (disk(asks("x"), 0), view.clone(), &members, 400, "bad_request", vec![]),
        (asks("x"), View::default(), &members, 412, "unconfigured", vec![]),
        (probe(asks("x")), View::default(), &members, 412, "unconfigured", vec![]),
        (asks("x"), follower(view.clone()), &members, 421, "not_leader", vec![]),
        (probe(asks("x")), view.clone(), &members, 200, "configured", vec![]),
        // Founded, and no election yet: whoever is late founds the same. A join as such is told who does not lead.
        (probe(asks("b")), founded.clone(), &empty_state, 412, "founding", vec![]),
        (probe(asks("b")), View { term: 2, ..founded.clone() }, &empty_state, 421, "not_leader", vec![]),
        (asks("b"), founded.clone(), &empty_state, 421, "not_leader", vec![]),
        (asks("x"), view.clone(), &members, 200, "staged", vec![add("x", raft_id("x"))]),
        (asks("x"), view.clone(), &with_tombstone, 409, "decommissioned", vec![]),
        (
            empty(asks("x")),
            view.clone(),
            &with_tombstone,
            200,
            "staged",
            vec![Step::Propose(Command::ClearTombstone { node: Arc::from("x") }), add("x", raft_id("x"))],
        ),
        (old(asks("x")), view.clone(), &members, 409, "older_release", vec![]),
        // A server of the configuration is never too old, and a repeated join changes its address alone.
        (old(asks("b")), view.clone(), &members, 200, "voter", vec![]),
        (asks("b"), view.clone(), &members, 200, "voter", vec![]),
        (at(asks("b"), "elsewhere:1"), gone(&["b"]), &members, 200, "voter", vec![Step::Promote(moved)]),
        (asks("d"), view.clone(), &members, 200, "promoted", vec![Step::Promote(server("d", true))]),
        // A new directory under a known name: the old id goes first, once it answers no longer (E36).
        (disk(asks("b"), 5), gone(&["b"]), &members, 200, "staged", vec![Step::Remove(raft_id("b")), add("b", 5)]),
        (disk(asks("b"), 5), view.clone(), &members, 503, "id_in_use", vec![]),
        (disk(asks("a"), 5), view.clone(), &members, 503, "id_in_use", vec![]),
        (disk(asks("b"), 5), gone(&["b", "c"]), &members, 503, "no_healthy_majority", vec![]),
        (disk(asks("d"), 5), gone(&["d", "c"]), &members, 200, "staged", vec![Step::Remove(raft_id("d")), add("d", 5)]),
        (disk(asks("x"), raft_id("b")), view.clone(), &members, 409, "copied_directory", vec![]),
    ];
    for (join, view, state, status, word, expected) in cases {
        let (steps, answer) = admit(&join, state, &view, seconds(100));
        assert_eq!((answer.status, &*answer.word), (status, word), "{join:?}: {}", answer.reason);
        assert_eq!(steps, expected, "{join:?}");
    }
    // Whoever would found a cluster by another list must see that it is another one.
    let (_, answer) = admit(&probe(asks("b")), &empty_state, &founded, seconds(100));
    assert_eq!(answer.initial_members, ["a", "b", "c"]);
    let (_, answer) = admit(&asks("x"), &members, &follower(view.clone()), seconds(100));
    assert_eq!((&*answer.leader_id, &*answer.leader_address), ("a", "a:7943"));
    let leaderless = View { leader: None, ..follower(view) };
    assert_eq!(admit(&asks("x"), &members, &leaderless, seconds(100)).1.leader_address, "");
}

#[test]
fn k32_a_learner_gets_its_vote_only_when_everything_speaks_for_it() {
    let view = led(&["a", "b", "c"], &["d"]);
    let members = cluster(&["a", "b", "c", "d"]);
    let mut dead = members.clone();
    do_one(&mut dead, &Command::MarkDead { node: Arc::from("d"), stamp_ms: 1 });
    let mut draining = members.clone();
    let member = Arc::new(Member { draining: true, ..(*members.members()["d"]).clone() });
    draining.absorb(99, &[Change::PutMember(member)]);
    let failing = View { failing: [raft_id("d")].into(), ..view.clone() };
    let cases = [
        (&members, &view, 11, "young"),
        (&members, &failing, 100, "heartbeats"),
        (&cluster(&["a", "b", "c"]), &view, 100, "no member record"),
        (&dead, &view, 100, "dead"),
        (&draining, &view, 100, "draining"),
    ];
    for (state, view, at, reason) in cases {
        let (steps, answer) = admit(&asks("d"), state, view, seconds(at));
        assert_eq!((answer.status, &*answer.word, steps), (200, "deferred", vec![]));
        assert!(answer.reason.contains(reason), "{}", answer.reason);
    }
    assert_eq!(admit(&asks("d"), &members, &view, seconds(12)).1.word, "promoted");
}

#[test]
fn forget_removes_only_what_nobody_needs() {
    let view = led(&["a", "b", "c"], &["d"]);
    let state = cluster(&["a", "b"]);
    let failing = |nodes: &[&str]| View { failing: nodes.iter().map(|n| raft_id(n)).collect(), ..view.clone() };
    let mut owning = state.clone();
    removed(&mut owning, "c");
    owning.absorb(99, &[Change::PutOwners { incarnation: Incarnation(1), owners: vec![(0, NodeId(3))] }]);
    let cases = [
        ("c", &state, failing(&["c"]), 100, Ok(true), ""),
        ("d", &state, view.clone(), 100, Ok(false), ""),
        ("x", &state, view.clone(), 100, Err(404), "no server"),
        ("a", &state, view.clone(), 100, Err(400), "leads"),
        ("b", &state, view.clone(), 100, Err(409), "member record"),
        ("c", &owning, view.clone(), 100, Err(409), "owns partitions"),
        ("c", &state, failing(&["b", "c"]), 100, Err(409), "unreachable are: b"),
        ("c", &state, view.clone(), 11, Err(409), "12 s"),
        // A learner decides nothing: none of the quorum checks.
        ("d", &state, failing(&["b", "c"]), 1, Ok(false), ""),
        ("c", &state, follower(view.clone()), 100, Err(421), "not lead"),
    ];
    for (node, state, view, at, expected, why) in cases {
        match (forget(node, state, &view, seconds(at)), expected) {
            (Ok(server), Ok(voter)) => assert_eq!((&*server.node, server.voter), (node, voter)),
            (Err((status, reason)), Err(expected)) => {
                assert_eq!(status, expected, "{node}: {reason}");
                assert!(reason.contains(why), "{node}: {reason}");
            }
            (other, _) => panic!("{node}: {other:?}, expected {expected:?}"),
        }
    }
}

#[test]
fn k18_a_type_is_proposed_only_when_every_server_and_member_applies_it() {
    let newer = Command::FIRST_RELEASE_TYPE + 1;
    let reports = |types: &[(&str, u64)]| {
        let mut state = cluster(&[]);
        for (node, newest_command_type) in types {
            let told = Registration { newest_command_type: *newest_command_type, ..(*told(node)).clone() };
            do_one(&mut state, &Command::RegisterMember { registration: Arc::new(told), stamp_ms: 1 });
        }
        state
    };
    let view = led(&["a", "b"], &["c"]);
    let all = reports(&[("a", newer), ("b", newer), ("c", newer)]);
    assert_eq!(gate::held_back_by(&all, &view, newer), None);
    assert!(gate::held_back_by(&all, &view, newer + 1).unwrap().contains("\"a\""));
    // A learner, a server that never reported, a member that is no server and dead: each holds it back.
    let old_learner = reports(&[("a", newer), ("b", newer), ("c", newer - 1)]);
    assert!(gate::held_back_by(&old_learner, &view, newer).unwrap().contains("\"c\" (build 0.1.0)"));
    let silent = reports(&[("a", newer), ("b", newer)]);
    assert!(gate::held_back_by(&silent, &view, newer).unwrap().contains("\"c\" has not reported"));
    let mut dead = reports(&[("a", newer), ("b", newer), ("c", newer), ("z", newer - 1)]);
    do_one(&mut dead, &Command::MarkDead { node: Arc::from("z"), stamp_ms: 1 });
    assert!(gate::held_back_by(&dead, &view, newer).unwrap().contains("\"z\""));
    do_one(&mut dead, &Command::RemoveMember { node: Arc::from("z") });
    assert_eq!(gate::held_back_by(&dead, &view, newer), None, "until it is removed");
    // What every release applies needs no report: without it nobody could report.
    assert_eq!(gate::held_back_by(&silent, &view, newer - 1), None);

    assert_eq!(gate::least_command_type(&all), newer);
    assert_eq!(gate::least_command_type(&old_learner), newer - 1, "somebody applies no more than that");
}

#[test]
fn k18_a_joiner_that_lacks_a_type_which_the_metadata_has_applied_is_an_older_release() {
    // Its peers could all have been rolled back meanwhile: the state file remembers.
    let mut state = cluster(&["a", "b"]);
    let applied = |newest| Change::SetNewestCommandType(newest);
    state.absorb(state.applied_index() + 1, &[applied(Command::NEWEST_TYPE + 1)]);
    let (view, now) = (led(&["a", "b"], &[]), seconds(100));
    let (steps, answer) = admit(&asks("c"), &state, &view, now);
    assert_eq!((steps.len(), answer.status, answer.word.as_str()), (0, 409, "older_release"));
    assert!(answer.reason.contains("up to 10, this cluster needs 11"), "{}", answer.reason);
    let newer = Join { newest_command_type: Command::NEWEST_TYPE + 1, ..asks("c") };
    assert_eq!(admit(&newer, &state, &view, now).1.word, "staged");
    // A server of the configuration is never refused this way.
    let known = led(&["a", "b"], &["c"]);
    assert_ne!(admit(&asks("c"), &state, &known, now).1.word, "older_release");
}

#[test]
fn k18_what_holds_a_type_back_is_said_once_a_minute_and_its_first_use_once() {
    let lines = logged(LogLevel::Info, LogFormat::Text, || {
        let mut log = gate::GateLog::default();
        let mut state = cluster(&["a"]);
        for at in [0, 59, 60, 61] {
            log.held_back(11, "member a", seconds(at));
            log.held_back(12, "member b", seconds(at));
        }
        log.used(&state, 11, "new_thing");
        log.used(&state, 11, "new_thing");
        state.absorb(state.applied_index() + 1, &[Change::SetNewestCommandType(12)]);
        log.used(&state, 12, "used_by_another_leader");
        log.used(&state, 10, "old_thing");
    });
    let count = |text: &str| lines.iter().filter(|line| line.contains(text)).count();
    assert_eq!((count("not using a new raft entry type yet"), count("reason=\"member b\"")), (4, 2), "{lines:?}");
    assert_eq!(count("every member applies raft entry type"), 1, "{lines:?}");
    assert_eq!(count("type=11 name=new_thing"), 1, "{lines:?}");
}

#[test]
fn a_join_follows_four_hints_and_remembers_eight_leaders() {
    let hint = |address: &str| Answer { status: 421, leader_address: address.to_owned(), ..Answer::default() };
    let mut targets = JoinTargets::new(vec!["p:1".into(), "q:1".into()]);
    let mut attempt = Attempt::at("p:1");
    for n in 1..=4 {
        let address = format!("l{n}:7943");
        assert_eq!(attempt.follow(&mut targets, hint(&address)), Next::Ask(address));
    }
    assert_eq!(attempt.follow(&mut targets, hint("l5:7943")), Next::Elsewhere, "a fifth hint");
    assert_eq!(Attempt::at("p:1").follow(&mut targets, hint("p:1")), Next::Elsewhere, "in a circle");
    for bad in ["", "host", "host:0", ":7943", "host:70000", &format!("{}:1", "h".repeat(260))] {
        assert_eq!(Attempt::at("p:1").follow(&mut targets, hint(bad)), Next::Elsewhere, "{bad}");
        assert!(!is_address(bad));
    }
    assert!(is_address(&format!("{}:1", "h".repeat(259))) && is_address("[::1]:7943"));
    for n in 5..=12 {
        Attempt::at("p:1").follow(&mut targets, hint(&format!("l{n}:7943")));
    }
    Attempt::at("p:1").follow(&mut targets, hint("l7:7943"));
    let newest = ["l7", "l12", "l11", "l10", "l9", "l8", "l6", "l5"].map(|leader| format!("{leader}:7943"));
    assert_eq!(targets.sweep(), [&newest[..], &["p:1".to_owned(), "q:1".to_owned()]].concat());
    // Who has answered as a leader is remembered, and asked once though it is a peer as well.
    let answer = |status| Answer { status, ..Answer::default() };
    assert_eq!(Attempt::at("q:1").follow(&mut targets, answer(200)), Next::Accepted(answer(200)));
    assert_eq!(targets.sweep().iter().filter(|target| *target == "q:1").count(), 1);
    assert_eq!(targets.sweep()[0], "q:1");
    assert_eq!(Attempt::at("q:1").follow(&mut targets, answer(409)), Next::Refused(answer(409)));
    assert_eq!(Attempt::at("q:1").follow(&mut targets, answer(412)), Next::Elsewhere);
    assert_eq!(Attempt::at("q:1").follow(&mut targets, answer(503)), Next::Refused(answer(503)));
}

#[test]
fn k28_k29_who_begins_a_cluster_by_table() {
    let members: Vec<String> = ["a", "b", "c"].map(String::from).into();
    let answers = |list: &[(&str, Option<u16>)]| -> BTreeMap<String, Option<u16>> {
        list.iter().map(|(node, status)| ((*node).to_owned(), *status)).collect()
    };
    let cases = [
        ("a", answers(&[("b", Some(412)), ("c", None)]), 3, Start::Bootstrap),
        ("a", answers(&[("b", Some(412)), ("c", Some(412))]), 3, Start::Bootstrap),
        ("a", answers(&[("b", Some(412)), ("c", Some(412))]), 2, Start::AskAgain),
        ("a", answers(&[("b", None), ("c", None)]), 3, Start::AskAgain),
        ("a", answers(&[("b", Some(503)), ("c", None)]), 9, Start::AskAgain),
        // One configured answer is enough, whoever gives it and however early.
        ("a", answers(&[("b", Some(412)), ("c", Some(200))]), 1, Start::JoinOnly),
        ("a", answers(&[("b", Some(421)), ("c", None)]), 1, Start::JoinOnly),
        ("a", answers(&[("b", Some(409)), ("c", Some(412))]), 3, Start::JoinOnly),
        ("a", answers(&[("x", Some(421))]), 3, Start::JoinOnly),
        // Peers that may not begin one do not count, and none of them begins one.
        ("a", answers(&[("x", Some(412)), ("y", Some(412))]), 3, Start::AskAgain),
        ("x", answers(&[("a", Some(412)), ("b", Some(412)), ("c", Some(412))]), 9, Start::JoinOnly),
    ];
    for (me, answers, rounds, expected) in cases {
        let began = start(me, &members, &answers, &BTreeMap::new(), rounds);
        assert_eq!(began, expected, "{me} {answers:?} after {rounds}");
    }
    assert_eq!(start("a", &["a".to_owned()], &BTreeMap::new(), &BTreeMap::new(), 3), Start::Bootstrap);
}

#[test]
fn e42_membership_frames_come_back_as_they_went_and_damage_is_refused() {
    let initial_members = vec!["x".to_owned(), "y".to_owned()];
    let join = Join { empty_directory: true, probe: true, initial_members: initial_members.clone(), ..asks("x") };
    let frame = crate::control::wire::join_request(&join, Duration::from_secs(1));
    assert_eq!(crate::control::wire::read_join(&arrived(&frame, Kind::Request)), Some(join));
    let answer = Answer {
        status: 421,
        word: "not_leader".into(),
        reason: "why".into(),
        leader_id: "a".into(),
        leader_address: "a:1".into(),
        initial_members,
    };
    let frame = crate::control::wire::answer(operation::JOIN_CLUSTER, &answer);
    assert_eq!(crate::control::wire::read_answer(&arrived(&frame, Kind::Reply)), answer);
    let forget = crate::control::wire::forget_request("x", Duration::from_secs(1));
    assert_eq!(crate::control::wire::read_forget(&arrived(&forget, Kind::Request)).as_deref(), Some("x"));
    for length in [0, 1, 7, 40] {
        let mut damaged = crate::control::wire::forget_request(&"\u{1}".repeat(length + 1), Duration::ZERO);
        damaged.operation = operation::JOIN_CLUSTER;
        assert_eq!(crate::control::wire::read_join(&arrived(&damaged, Kind::Request)), None);
    }
}

/// Endpoints by address, in process; one that is not there cannot be reached.
#[derive(Default)]
pub(super) struct Net {
    endpoints: RefCell<BTreeMap<SocketAddr, Rc<Membership>>>,
    calls: RefCell<Vec<SocketAddr>>,
}

impl Transport for Net {
    fn call(&self, to: SocketAddr, request: Outgoing) -> LocalBoxFuture<'static, Result<Incoming, CallError>> {
        self.calls.borrow_mut().push(to);
        let endpoint = self.endpoints.borrow().get(&to).cloned();
        Box::pin(async move {
            rt::sleep(Duration::from_millis(2)).await;
            let Some(endpoint) = endpoint else { return Err(CallError::NotSent("nobody there".into())) };
            match endpoint.serve(&arrived(&request, Kind::Request)).await {
                Some(reply) => Ok(arrived(&reply, Kind::Reply)),
                None => Err(CallError::Unknown("no such operation".into())),
            }
        })
    }

    fn send(&self, _: SocketAddr, _: Outgoing) {}

    fn hello_of(&self, _: SocketAddr) -> Option<Arc<Hello>> {
        None
    }

    fn connection_to(&self, _: SocketAddr) -> Option<ConnectionId> {
        None
    }
}

fn address(node: &str) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], u16::from(node.as_bytes()[0])))
}

fn resolve() -> Resolve {
    Rc::new(|text| {
        let found = address(text);
        Box::pin(async move { Some(found) })
    })
}

pub(super) fn membership(net: &Rc<Net>, me: &str, peers: &[&str], node: &Node) -> Rc<Membership> {
    let settings = Settings {
        me: told(me),
        peers: peers.iter().map(|peer| format!("{peer}:7943")).collect(),
        empty_directory: true,
        resolve: resolve(),
    };
    let made = Membership::new(settings, node.log.clone(), node.applier.clone(), node.consensus.clone(), net.clone());
    net.endpoints.borrow_mut().insert(address(me), made.clone());
    made
}

#[test]
fn k30_k32_a_newcomer_is_staged_at_once_and_promoted_when_its_record_is_there() {
    sim::run(1, async {
        let net: Rc<Net> = Rc::default();
        let state = cluster(&["a", "b"]);
        let leader = node("a", state.clone(), View { since: rt::now(), ..led(&["a", "b"], &[]) });
        let other = node("b", state, follower(led(&["a", "b"], &[])));
        let joiner = node("x", State::default(), View { raft_id: raft_id("x"), ..View::default() });
        let _leading = membership(&net, "a", &["b"], &leader);
        let _following = membership(&net, "b", &["a"], &other);
        let joining = membership(&net, "x", &["z", "b"], &joiner);
        rt::spawn(Queue::Foreground, joining.run_join(|| true));
        rt::sleep(Duration::from_secs(1)).await;
        // By way of the follower's hint.
        assert_eq!(*net.calls.borrow(), ["z", "b", "a"].map(address));
        let voter = || leader.consensus.view().server_named("x").map(|server| server.voter);
        assert_eq!(voter(), Some(false));
        // It sees the leader now, and goes on asking for its vote: that comes with age and record.
        joiner.consensus.view.replace(View { leads: false, raft_id: raft_id("x"), ..leader.consensus.view() });
        rt::sleep(Duration::from_secs(20)).await;
        assert_eq!(voter(), Some(false), "no member record");
        leader.log.propose(register("x", 0)).await.unwrap();
        rt::sleep(Duration::from_secs(3)).await;
        assert_eq!(voter(), Some(true));
        joiner.consensus.view.replace(View { leads: false, raft_id: raft_id("x"), ..leader.consensus.view() });
        let calls = net.calls.borrow().len();
        rt::sleep(Duration::from_secs(60)).await;
        assert_eq!(net.calls.borrow().len(), calls, "a voter with a leader asks nobody");
        // Leaderless for 15 s, it asks again (5.4).
        joiner.consensus.view.borrow_mut().leader = None;
        rt::sleep(Duration::from_secs(14)).await;
        assert_eq!(net.calls.borrow().len(), calls);
        rt::sleep(Duration::from_secs(5)).await;
        assert!(net.calls.borrow().len() > calls);
    });
}

#[test]
fn a_heartbeat_is_tried_every_quarter_second_until_it_succeeds_and_then_every_five() {
    sim::run(2, async {
        let node = node("a", State::default(), led(&["a", "b"], &[]));
        let net: Rc<Net> = Rc::default();
        // Before the cluster has its id the leader lets nobody but itself register.
        let other = Membership::new(
            Settings {
                me: told("b"),
                peers: vec![],
                empty_directory: false,
                resolve: Rc::new(|_| Box::pin(async { None })),
            },
            node.log.clone(),
            node.applier.clone(),
            node.consensus.clone(),
            net,
        );
        rt::spawn(Queue::Foreground, other.run_heartbeats());
        rt::sleep(Duration::from_secs(3)).await;
        assert!(node.log.proposed.borrow().is_empty());
        node.log.propose(Command::SetClusterId(9)).await.unwrap();
        rt::sleep(Duration::from_millis(300)).await;
        let stamp = || node.applier.state().members().get("b").map(|member| member.heartbeat_ms);
        let first = stamp().expect("registered within a retry");
        rt::sleep(Duration::from_millis(10_100)).await;
        assert_eq!(node.log.proposed.borrow().len(), 1 + 3);
        assert!(stamp().unwrap() > first, "stamped by the leader's clock");
    });
    sim::run(3, async {
        // A lone node that has registered has nobody to tell.
        let node = node("a", cluster(&["a"]), led(&["a"], &[]));
        let alone = membership(&Rc::default(), "a", &[], &node);
        rt::spawn(Queue::Foreground, alone.clone().run_heartbeats());
        rt::spawn(Queue::Foreground, alone.run_join(|| true));
        rt::sleep(Duration::from_secs(60)).await;
        assert!(node.log.proposed.borrow().is_empty());
    });
}

#[test]
fn k29_a_probe_admits_nobody_and_k33_a_return_on_an_empty_disk_is_new() {
    sim::run(4, async {
        let net: Rc<Net> = Rc::default();
        let mut state = cluster(&["a"]);
        removed(&mut state, "x");
        let leader = node("a", state, led(&["a"], &[]));
        let admitting = membership(&net, "a", &[], &leader);
        let fresh = node("n", State::default(), View::default());
        let _asked = membership(&net, "n", &["a"], &fresh);
        let peers = [("a", "a:1"), ("m", "m:1"), ("n", "n:1")].map(|(id, address)| (id.to_owned(), address.to_owned()));
        let join = Join { raft_id: 0, probe: true, ..asks("n") };
        let answers = probe(&*net, &resolve(), &join, &peers.into()).await;
        let status = |node: &str| answers[node].as_ref().map(|answer| answer.status).map_err(String::as_str);
        assert_eq!((status("a"), status("m"), status("n")), (Ok(200), Err("nobody there"), Ok(412)));
        assert_eq!(leader.consensus.view().servers.len(), 1);

        let refused = admitting.admit(&asks("x")).await;
        assert_eq!((refused.status, &*refused.word), (409, "decommissioned"));
        assert_eq!(leader.log.propose(register("x", 0)).await.unwrap(), Outcome::Refused(Refusal::Tombstoned));
        let taken = admitting.admit(&Join { empty_directory: true, ..asks("x") }).await;
        assert_eq!((taken.status, &*taken.word), (200, "staged"));
        assert!(leader.applier.state().removed_members().is_empty());
        assert!(matches!(leader.log.propose(register("x", 0)).await.unwrap(), Outcome::Registered(_)));
    });
}

#[test]
fn a_forget_on_any_node_is_decided_by_the_leader() {
    sim::run(5, async {
        let net: Rc<Net> = Rc::default();
        let leader = node("a", cluster(&["a", "b"]), led(&["a", "b"], &["x"]));
        let other = node("b", cluster(&["a", "b"]), follower(led(&["a", "b"], &["x"])));
        let _leading = membership(&net, "a", &["b"], &leader);
        let asking = membership(&net, "b", &["a"], &other);
        let answer = asking.forget_by_leader("x").await;
        assert_eq!((answer.status, &*answer.word), (200, "learner"));
        assert!(leader.consensus.view().server_named("x").is_none());
        assert_eq!(asking.forget_by_leader("x").await.status, 404);
        other.consensus.view.borrow_mut().leader = None;
        assert_eq!(asking.forget_by_leader("a").await.status, 503);
    });
}

#[test]
fn e39_the_peer_book_holds_what_members_say_and_hellos_add() {
    let mut state = cluster(&["a", "b", "c", "d"]);
    do_one(&mut state, &Command::MarkDead { node: Arc::from("c"), stamp_ms: 1 });
    let hello = |node: &str, ports: &[u16]| {
        Some(Arc::new(Hello { node: node.into(), boot_id: 44, shard_ports: ports.into(), ..Hello::default() }))
    };
    let book = peer_book(3, &Arc::from("a"), 9, &state, |member| match &**member.node() {
        "b" => Some(Met { control_addr: address("b"), hello: hello("b", &[8001, 8002]) }),
        "c" => Some(Met { control_addr: address("c"), hello: hello("b", &[8003]) }), // another node's word
        _ => None,
    });
    assert_eq!((book.version, book.boot_id, book.number), (3, 9, NodeId(1)));
    assert_eq!(book.peers.keys().map(|number| number.0).collect::<Vec<_>>(), [2, 3]);
    let (b, c) = (&book.peers[&NodeId(2)], &book.peers[&NodeId(3)]);
    let ports: Vec<u16> = b.shard_addrs.iter().map(|address| address.port()).collect();
    assert_eq!((b.alive, b.boot_id, ports), (true, 44, vec![8001, 8002]));
    assert_eq!((c.alive, c.boot_id, c.shard_addrs.len()), (false, 0, 0));
}

#[test]
fn k21_a_replica_that_lacks_a_topic_destroys_nothing_without_the_leaders_word() {
    sim::run(7, async {
        // Its state file came back from the past: everything it has agrees with itself.
        let node = node("a", cluster(&["a"]), led(&["a"], &[]));
        let control = Control::over(node.log.clone(), node.applier.clone());
        let (lost, unsure) = (Incarnation(9), Err(Stopped::refused("no leader")));
        for (said, asked, gone) in [
            (Ok(Some(lost)), Some(lost), "NotGone"),
            (Ok(Some(lost)), None, "NotGone"),
            (Ok(Some(Incarnation(8))), Some(lost), "Gone"),
            (Ok(None), Some(lost), "Gone"),
            (Ok(None), None, "Gone"),
            (unsure, Some(lost), "Unavailable(\"no leader\")"),
        ] {
            *node.log.leader_says.borrow_mut() = Some(said.clone());
            let question = MetaCommand::ConfirmGone { name: "t".to_owned(), incarnation: asked };
            let reply = control.handle(question).await;
            assert_eq!(format!("{reply:?}"), gone, "{said:?} {asked:?}");
        }
        assert!(node.log.barriers.get() >= 6, "and only behind a barrier of its own");
    });
}
