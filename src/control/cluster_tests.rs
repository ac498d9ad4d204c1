//! The whole control plane of small clusters in the simulator: the raft library on files, controller and membership,
//! over a network that can lose a node.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use narad_shards::api::{NewTopic, NodeStatus};
use narad_shards::io::AlignedBuf;
use narad_shards::meta::{Address, NodeId, Snapshot};
use narad_shards::peer::LocalBoxFuture;
use narad_shards::remote::{CallError, ConnectionId, Hello, Service, Transport};
use narad_shards::rt::{self, sim, Queue};
use narad_shards::wire::{status, Incoming, Kind, Outgoing};

use super::consensus::restart::Mode;
use super::consensus::{self, configuration};
use super::plane::{found_or_join, Door, Identity, NeverConfigured, Part, Plane, ROUND};
use super::tests::Directory;
use super::*;
use crate::config::{LogFormat, LogLevel};
use crate::telemetry::logged;

pub(super) fn address(node: &str) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 7000 + u16::from(node.as_bytes()[0])))
}

pub(super) fn voter(node: &str) -> configuration::Server {
    configuration::Server { name: node.to_owned(), address: address(node).to_string(), voter: true }
}

pub(super) struct Node {
    pub(super) consensus: Rc<consensus::Consensus>,
    pub(super) membership: Rc<Membership>,
    controller: Rc<Controller>,
    pub(super) applier: Rc<Applier>,
    control: Control,
    shards: Rc<SlowShards>,
    pub(super) files: Directory,
}

#[derive(Default)]
pub(super) struct Net {
    doors: RefCell<BTreeMap<SocketAddr, Rc<dyn Service>>>,
    /// Neither heard nor hearing.
    pub(super) lost: RefCell<Vec<SocketAddr>>,
}

struct Link {
    net: Rc<Net>,
    from: SocketAddr,
}

fn arrive(frame: &Outgoing, kind: Kind) -> Incoming {
    let header = frame.header(kind, 1).expect("within the limit");
    let mut body = AlignedBuf::zeroed(header.body_bytes());
    body.truncate(header.body_bytes());
    let mut at = 0;
    for piece in std::iter::once(&frame.archive).chain(&frame.payload) {
        body[at..at + piece.len()].copy_from_slice(piece);
        at += piece.len();
    }
    Incoming::new(header, body)
}

impl Link {
    fn target(&self, to: SocketAddr) -> Option<Rc<dyn Service>> {
        let lost = self.net.lost.borrow();
        let reachable = !lost.contains(&to) && !lost.contains(&self.from);
        self.net.doors.borrow().get(&to).filter(|_| reachable).cloned()
    }
}

impl Transport for Link {
    fn call(&self, to: SocketAddr, request: Outgoing) -> LocalBoxFuture<'static, Result<Incoming, CallError>> {
        let target = self.target(to);
        Box::pin(async move {
            rt::sleep(Duration::from_millis(1)).await;
            let Some(target) = target else { return Err(CallError::NotSent("unreachable".into())) };
            let reply =
                rt::timeout(request.budget, target.serve(ConnectionId(1), arrive(&request, Kind::Request))).await;
            match reply.ok().flatten() {
                Some(reply) => Ok(arrive(&reply, Kind::Reply)),
                None => Err(CallError::Unknown("no reply".into())),
            }
        })
    }

    fn send(&self, to: SocketAddr, message: Outgoing) {
        let Some(target) = self.target(to) else { return };
        rt::spawn(Queue::Foreground, async move {
            rt::sleep(Duration::from_millis(1)).await;
            target.serve(ConnectionId(1), arrive(&message, Kind::OneWay)).await;
        });
    }

    fn hello_of(&self, _: SocketAddr) -> Option<Arc<Hello>> {
        None
    }

    fn connection_to(&self, _: SocketAddr) -> Option<ConnectionId> {
        None
    }
}

/// The shards of a node, which take a snapshot in as long as they like.
#[derive(Default)]
struct SlowShards {
    takes: Cell<Duration>,
    shown: Rc<RefCell<Arc<Snapshot>>>,
}

impl Install for SlowShards {
    fn install(&self, snapshot: Arc<Snapshot>) -> LocalBoxFuture<'static, ()> {
        let (takes, shown) = (self.takes.get(), self.shown.clone());
        Box::pin(async move {
            rt::sleep(takes).await;
            *shown.borrow_mut() = snapshot;
        })
    }
}

fn start(net: &Rc<Net>, node: &str, mode: Mode, peers: &[&str]) -> Rc<Node> {
    let listed = peers.iter().map(|peer| ((*peer).to_owned(), address(peer).to_string())).collect();
    start_at(net, node, address(node), empty(node), mode, &listed)
}

pub(super) fn empty(node: &str) -> Directory {
    Directory::new(&format!("cluster-{node}-{}", rt::random_u64()))
}

/// `listed`: the other nodes by the configuration, id to `host:port`.
pub(super) fn start_at(
    net: &Rc<Net>,
    node: &str,
    at: SocketAddr,
    files: Directory,
    mode: Mode,
    listed: &BTreeMap<String, String>,
) -> Rc<Node> {
    let opened = consensus::files::open(&files.0, &mode, false, rt::random_u64().max(1)).unwrap();
    let me = Identity {
        node: Arc::from(node),
        boot_id: 1,
        disk_id: opened.stored.raft_id,
        peer_address: Arc::from(at.to_string()),
        client_address: Arc::from("127.0.0.1:7942"),
        shard_ports: vec![],
    };
    let metastore = Metastore::over(opened.store, opened.state, Placement::in_cluster(2, node));
    let shards: Rc<SlowShards> = Rc::default();
    let applier = Applier::start(metastore, shards.clone());
    let link: Rc<dyn Transport> = Rc::new(Link { net: net.clone(), from: at });
    let (listing, state) = (listed.clone(), applier.clone());
    let settings = consensus::Settings {
        address_of: Rc::new(move |raft_id, known| {
            find_server(raft_id, known, &listing, &state.state(), |text| text.parse().ok())
        }),
        ..consensus::Settings::new(at.to_string())
    };
    let disk = Rc::new(opened.files);
    let consensus =
        consensus::Consensus::start(settings, opened.stored, disk, applier.clone(), link.clone(), Arc::default())
            .unwrap();
    let part = Part {
        peers: listed.values().cloned().collect(),
        empty_directory: true,
        resolve: Rc::new(|text| {
            let found = text.parse().ok();
            Box::pin(async move { found })
        }),
    };
    let name = node.to_owned();
    let own_status: OwnStatus = Rc::new(move || {
        let node = name.clone();
        Box::pin(async move { NodeStatus { node, dispatch_backlog: 7, ..NodeStatus::default() } })
    });
    let door = Door::new(me, applier.clone(), own_status.clone());
    let Plane { controller, membership } = Plane::start(&door, &consensus, &link, part);
    let (latched, trusted) = (consensus.clone(), applier.clone());
    rt::spawn(Queue::Foreground, async move {
        if latched.latch().await.is_ok() {
            trusted.trust_ownership();
        }
    });
    let control = Control::over(Rc::new(consensus.clone()), applier.clone())
        .with_controller(controller.clone())
        .with_membership(membership.clone())
        .named(node, "127.0.0.1:7942".to_owned())
        .with_status(own_status);
    net.doors.borrow_mut().insert(at, door);
    Rc::new(Node { consensus, membership, controller, applier, control, shards, files })
}

async fn try_create(node: &Node, name: &str, partitions: u32) -> MetaReply {
    let new = NewTopic {
        name: name.to_owned(),
        partitions,
        retention_ms: 0,
        visibility_timeout_ms: 1,
        max_in_flight_per_partition: 1,
        max_acked_ahead_per_partition: 1,
        owner: None,
    };
    node.control.handle(MetaCommand::CreateTopic(new)).await
}

async fn create(node: &Node, name: &str, partitions: u32) -> Arc<TopicMeta> {
    match try_create(node, name, partitions).await {
        MetaReply::Created(topic) => topic,
        other => panic!("{name}: {other:?}"),
    }
}

fn owners(node: &Node, topic: &TopicMeta) -> Vec<u64> {
    let state = node.applier.state();
    state.assignments()[&topic.incarnation].values().map(|owner| owner.0).collect()
}

pub(super) fn seconds(seconds: u64) -> rt::Sleep {
    rt::sleep(Duration::from_secs(seconds))
}

fn start_three(net: &Rc<Net>) -> Vec<Rc<Node>> {
    let voters: Vec<_> = ["a", "b", "c"].map(voter).into();
    let bootstrap = |node: &str| Mode::Bootstrap { me: node.to_owned(), voters: voters.clone() };
    [("a", ["b", "c"]), ("b", ["a", "c"]), ("c", ["a", "b"])]
        .map(|(node, peers)| start(net, node, bootstrap(node), &peers))
        .into()
}

/// Three nodes with their members on record: the leader, then the others.
async fn settled(net: &Rc<Net>) -> [Rc<Node>; 3] {
    let mut nodes = start_three(net);
    create(&nodes[0], "first", 3).await;
    seconds(6).await;
    nodes.sort_by_key(|node| !node.consensus.leads());
    let [leader, one, other] = &nodes[..] else { unreachable!("three were started") };
    assert!(leader.consensus.leads() && !one.consensus.leads());
    [leader.clone(), one.clone(), other.clone()]
}

#[test]
fn three_nodes_form_place_judge_and_let_a_fourth_in() {
    sim::run(11, async {
        let net: Rc<Net> = Rc::default();
        let nodes = start_three(&net);
        // On any node, and at once: it waits until the cluster has its leader, its id and its members.
        let first = create(&nodes[1], "t", 6).await;
        assert!(nodes[1].control.snapshot().topic("t").is_some(), "k10: read on the same node");
        seconds(3).await;
        assert_eq!(owners(&nodes[1], &first).len(), 6);
        let state = nodes[0].applier.state().clone();
        assert_ne!(state.cluster_id(), 0);
        assert_eq!(state.members().len(), 3);
        let second = create(&nodes[2], "u", 6).await;
        let mut spread = owners(&nodes[2], &second);
        spread.sort_unstable();
        assert_eq!(spread, [1, 1, 2, 2, 3, 3]);
        seconds(1).await;
        // Every node sees its own third, and where the rest is.
        for (node, name) in nodes.iter().zip(["a", "b", "c"]) {
            let number = node.applier.state().members()[name].number;
            let snapshot = node.control.snapshot();
            for (at, owner) in snapshot.placement[&second.incarnation].iter().zip(owners(node, &second)) {
                match NodeId(owner) == number {
                    true => assert_eq!(at.node, NodeId::LOCAL),
                    false => assert_eq!(*at, Address::remote(NodeId(owner))),
                }
            }
        }
        // Two leave nothing that decides, and nobody is marked dead (K27); one leaves two, and is (K24, K25).
        let leader = nodes.iter().position(|node| node.consensus.leads()).expect("a leader");
        let lost = ["a", "b", "c"][(leader + 1) % 3];
        net.lost.borrow_mut().push(address(lost));
        seconds(45).await;
        let alive = |node: &Node, name: &str| node.applier.state().members()[name].alive;
        assert!(!alive(&nodes[leader], lost));
        assert_eq!(nodes[leader].consensus.view().failing.len(), 1);
        assert_eq!(owners(&nodes[leader], &second), owners(&nodes[(leader + 2) % 3], &second));
        let third = create(&nodes[leader], "v", 4).await;
        let number = nodes[leader].applier.state().members()[lost].number.0;
        assert!(!owners(&nodes[leader], &third).contains(&number));
        net.lost.borrow_mut().clear();
        seconds(10).await;
        assert!(alive(&nodes[leader], lost), "its next heartbeat");
        assert!(nodes.iter().all(|node| !node.controller.breaker_open()));

        // A newcomer that knows one follower only: learner, then member, then voter.
        let joiner = start(&net, "d", Mode::Join, &[lost]);
        seconds(1).await;
        let voter = |node: &Node| node.consensus.view().server_named("d").map(|server| server.voter);
        assert_eq!(voter(&nodes[leader]), Some(false));
        seconds(20).await;
        assert_eq!(voter(&nodes[leader]), Some(true));
        assert!(joiner.consensus.is_latched());
        assert_eq!(joiner.applier.state().topics().len(), 3);
        assert_eq!(joiner.applier.state().members()["d"].number, NodeId(4));
        let fourth = create(&joiner, "w", 4).await;
        let mut spread = owners(&joiner, &fourth);
        spread.sort_unstable();
        assert_eq!(spread, [1, 2, 3, 4]);
    });
}

#[test]
fn e57_a_lone_node_founds_itself_and_serves_what_it_had() {
    sim::run(12, async {
        let net: Rc<Net> = Rc::default();
        let node = start(&net, "a", Mode::Lone(voter("a")), &[]);
        let topic = create(&node, "t", 3).await;
        assert_eq!(owners(&node, &topic), [1, 1, 1]);
        seconds(1).await;
        let snapshot = node.control.snapshot();
        assert!(snapshot.placement[&topic.incarnation].iter().all(|address| address.node == NodeId::LOCAL));
        // An idle lone node writes nothing: no heartbeat, no pass that proposes.
        let index = node.applier.applied_index();
        seconds(120).await;
        assert_eq!(node.applier.applied_index(), index);
    });
}

#[test]
fn k10_e52_a_node_that_forwarded_a_change_answers_when_its_own_shards_show_it() {
    sim::run(13, async {
        let net: Rc<Net> = Rc::default();
        let [_, follower, slow] = settled(&net).await;
        for node in [&follower, &slow] {
            node.shards.takes.set(Duration::from_millis(700));
        }
        let shown = |name: &str| follower.shards.shown.borrow().topic(name).cloned();
        for name in ["t", "u"] {
            let topic = create(&follower, name, 3).await;
            assert!(shown(name).is_some(), "a produce right after the answer finds the topic");
            let change = TopicChange { retention_ms: Some(3_600_000), ..TopicChange::default() };
            let (name, incarnation) = (name.to_owned(), topic.incarnation);
            let alter = MetaCommand::AlterTopic { name: name.clone(), incarnation, change };
            assert!(matches!(follower.control.handle(alter).await, MetaReply::Altered(_)));
            assert_eq!(shown(&name).map(|topic| topic.retention_ms), Some(3_600_000));
            let delete = MetaCommand::DeleteTopic { name: name.clone(), incarnation };
            assert!(matches!(follower.control.handle(delete).await, MetaReply::Deleted));
            assert!(shown(&name).is_none());
        }
        // Shards that do not get there in five seconds leave the outcome unknown, and the change is made all the same.
        seconds(5).await;
        slow.shards.takes.set(Duration::from_secs(20));
        let started = rt::now();
        assert!(matches!(try_create(&slow, "late", 3).await, MetaReply::Unknown(_)));
        let waited = rt::now() - started;
        assert!((5..7).contains(&waited.as_secs()), "{waited:?}");
        assert!(follower.control.snapshot().topic("late").is_some());
    });
}

#[test]
fn k45_e52_who_is_answered_finds_the_change_on_every_node_that_is_quick() {
    sim::run(17, async {
        let net: Rc<Net> = Rc::default();
        let [leader, follower, slow] = settled(&net).await;
        let nodes = [&leader, &follower, &slow];
        let shown = |node: &Node| node.shards.shown.borrow().topic("t").map(|topic| topic.incarnation);
        slow.shards.takes.set(Duration::from_millis(100));
        for asked in [&leader, &follower, &leader, &follower] {
            let topic = create(asked, "t", 3).await;
            for node in nodes {
                assert_eq!(shown(node), Some(topic.incarnation), "a produce would be told 404");
            }
            let delete = MetaCommand::DeleteTopic { name: "t".to_owned(), incarnation: topic.incarnation };
            assert!(matches!(asked.control.handle(delete).await, MetaReply::Deleted));
            for node in nodes {
                assert_eq!(shown(node), None, "a produce would be taken for a topic that is gone");
            }
        }
        // Nobody is held up by one that is slower.
        slow.shards.takes.set(Duration::from_secs(20));
        let started = rt::now();
        create(&leader, "t", 3).await;
        let waited = rt::now() - started;
        assert!((250..500).contains(&waited.as_millis()), "{waited:?}");
    });
}

#[test]
fn k35_a_leader_that_starts_holds_creates_and_whoever_forwarded_one_waits_75_seconds() {
    sim::run(14, async {
        let net: Rc<Net> = Rc::default();
        let [leader, follower, _] = settled(&net).await;
        leader.consensus.shut_create_gate();
        let asked = rt::now();
        let (waits, opener) = (follower.clone(), leader.clone());
        let created = rt::spawn(Queue::Foreground, async move { try_create(&waits, "t", 3).await });
        seconds(20).await;
        assert!(leader.control.snapshot().topic("t").is_none(), "nothing is made while the gate is shut");
        // Other changes pass.
        let first = leader.control.snapshot().topic("first").expect("made before").incarnation;
        let delete = MetaCommand::DeleteTopic { name: "first".to_owned(), incarnation: first };
        assert!(matches!(follower.control.handle(delete).await, MetaReply::Deleted));
        opener.consensus.open_create_gate();
        assert!(matches!(created.await, MetaReply::Created(_)));
        assert!((20..22).contains(&(rt::now() - asked).as_secs()));

        leader.consensus.shut_create_gate();
        let asked = rt::now();
        let refused = try_create(&follower, "never", 3).await;
        assert!(matches!(&refused, MetaReply::Unavailable(why) if why.contains("still starting")), "{refused:?}");
        assert!((70..=75).contains(&(rt::now() - asked).as_secs()), "{:?}", rt::now() - asked);
        leader.consensus.open_create_gate();
        seconds(10).await;
        assert!(follower.control.snapshot().topic("never").is_none(), "what was refused is not made later");
    });
}

#[test]
fn k35_a_create_that_a_leader_held_until_it_led_no_longer_is_made_by_the_next_one() {
    sim::run(16, async {
        let net: Rc<Net> = Rc::default();
        let [leader, follower, _] = settled(&net).await;
        leader.consensus.shut_create_gate();
        let asked = rt::now();
        let waits = follower.clone();
        let created = rt::spawn(Queue::Foreground, async move { try_create(&waits, "t", 3).await });
        seconds(20).await;
        leader.consensus.transfer(None).await.expect("there are two others");
        let created = created.await;
        assert!(matches!(created, MetaReply::Created(_)), "{created:?}");
        assert!((20..23).contains(&(rt::now() - asked).as_secs()), "{:?}", rt::now() - asked);
        // Where nobody leads, no client waits that long.
        net.lost.borrow_mut().push(address(&follower.control.me.0));
        let asked = rt::now();
        assert!(matches!(try_create(&follower, "never", 3).await, MetaReply::Unavailable(_)));
        assert!((4..9).contains(&(rt::now() - asked).as_secs()), "{:?}", rt::now() - asked);
    });
}

#[test]
fn k20_k21_get_topic_is_the_leaders_word_behind_a_barrier_or_none_at_all() {
    sim::run(15, async {
        let net: Rc<Net> = Rc::default();
        let [leader, follower, other] = settled(&net).await;
        let topic = create(&other, "t", 3).await;
        for node in [&leader, &follower, &other] {
            assert_eq!(node.consensus.ask_live_topic("t").await, Ok(Some(topic.incarnation)));
            assert_eq!(node.consensus.ask_live_topic("none").await, Ok(None));
        }
        // A follower sends the question away; a leader that no quorum confirms any more answers nothing.
        let question = |name: &str| {
            let frame = consensus::topic_question(Duration::from_secs(5), name);
            arrive(&frame, Kind::Request)
        };
        let answered = follower.consensus.handle(&question("t")).await.expect("a reply");
        assert_eq!(answered.status, status::MISDIRECTED);
        let gone = |node: &Rc<Node>, incarnation| {
            let (node, name) = (node.clone(), "t".to_owned());
            async move { node.control.handle(MetaCommand::ConfirmGone { name, incarnation }).await }
        };
        assert!(matches!(gone(&follower, Some(topic.incarnation)).await, MetaReply::NotGone));
        assert!(matches!(gone(&follower, Some(Incarnation(1))).await, MetaReply::Gone));
        let cut_off = [&follower, &other].map(|node| address(&node.control.me.0));
        net.lost.borrow_mut().extend(cut_off);
        let answered = leader.consensus.handle(&question("none")).await.expect("a reply");
        assert_eq!(answered.status, status::MISDIRECTED, "absence that nobody confirms is not told");
        assert!(matches!(gone(&follower, Some(Incarnation(1))).await, MetaReply::Unavailable(_)));
    });
}

#[test]
fn k62_http_api_21_1_members_say_how_they_are_and_one_that_is_cut_off_says_why_not() {
    sim::run(16, async {
        let net: Rc<Net> = Rc::default();
        let [leader, follower, lost] = settled(&net).await;
        let (asked, lost) = (follower.control.me.0.clone(), lost.control.me.0.clone());
        net.lost.borrow_mut().push(address(&lost));
        let started = rt::now();
        let detail = MetaCommand::ListMembers { detail: true };
        let MetaReply::Members(members) = follower.control.handle(detail).await else { panic!("a list of members") };
        assert!(rt::now() - started <= Duration::from_secs(2));
        assert_eq!(members.len(), 3);
        for member in members {
            match member.node_status.expect("it was asked for") {
                Ok(status) => assert_eq!((status.node, status.dispatch_backlog), (member.id, 7)),
                Err(why) => assert!(member.id == lost && why.contains("unreachable"), "{}: {why}", member.id),
            }
        }
        let plain = follower.control.handle(MetaCommand::ListMembers { detail: false }).await;
        let MetaReply::Members(members) = plain else { panic!("a list of members") };
        assert!(members.iter().all(|member| member.node_status.is_none()));
        assert!(asked != lost && leader.consensus.leads());
    });
}

const INITIAL: [&str; 3] = ["a", "b", "c"];

async fn ask_first(net: &Rc<Net>, node: &'static str, between: impl AsyncFn(String)) -> Start {
    let initial = INITIAL;
    let service = NeverConfigured::new(node, &initial.map(str::to_owned));
    net.doors.borrow_mut().insert(address(node), service.clone());
    let join = Join {
        node: node.to_owned(),
        raft_id: 0,
        peer_address: address(node).to_string(),
        empty_directory: true,
        newest_command_type: Command::NEWEST_TYPE,
        probe: true,
        initial_members: initial.map(str::to_owned).into(),
    };
    let others = initial.into_iter().filter(|other| *other != node);
    let peers = others.map(|other| (other.to_owned(), address(other).to_string())).collect();
    let link = Link { net: net.clone(), from: address(node) };
    let resolve: Resolve = Rc::new(|text| {
        let found = text.parse().ok();
        Box::pin(async move { found })
    });
    found_or_join(&link, &resolve, &service, &join, &peers, between).await
}

/// As a process does it: asks around first.
async fn start_first(net: Rc<Net>, node: &'static str) -> Rc<Node> {
    let mode = match ask_first(&net, node, async |_| {}).await {
        Start::Bootstrap => {
            rt::sleep(ROUND / 2).await;
            Mode::Bootstrap { me: node.to_owned(), voters: INITIAL.map(voter).into() }
        }
        _ => Mode::Join,
    };
    let others = INITIAL.into_iter().filter(|other| *other != node);
    start(&net, node, mode, &others.collect::<Vec<_>>())
}

#[test]
fn k29_initial_members_found_one_cluster_however_far_apart_they_start() {
    for (seed, (second, third)) in
        [(0, 0), (700, 1400), (1600, 1600), (1600, 2900), (9000, 9000), (3000, 40_000)].into_iter().enumerate()
    {
        sim::run(seed as u64, async move {
            let net: Rc<Net> = Rc::default();
            let begin = |node, after_ms| {
                let net = net.clone();
                rt::spawn(Queue::Foreground, async move {
                    rt::sleep(Duration::from_millis(after_ms)).await;
                    start_first(net, node).await
                })
            };
            let starting = [begin("a", 0), begin("b", second), begin("c", third)];
            let mut nodes = Vec::new();
            for node in starting {
                nodes.push(node.await);
            }
            seconds(30).await;
            let state = nodes[0].applier.state().clone();
            assert_ne!(state.cluster_id(), 0, "{second} ms, {third} ms: nobody leads");
            assert_eq!(state.members().len(), 3, "{second} ms, {third} ms");
            assert!(nodes.iter().all(|node| node.consensus.is_latched()));
        });
    }
}

#[test]
fn k29_a_first_start_says_at_once_and_every_ten_seconds_for_whom_it_waits() {
    let told: Rc<RefCell<Vec<String>>> = Rc::default();
    let heard = told.clone();
    let lines = logged(LogLevel::Info, LogFormat::Text, || {
        sim::run(31, async move {
            let net: Rc<Net> = Rc::default();
            let asked = ask_first(&net, "a", async |why| heard.borrow_mut().push(why));
            assert!(rt::timeout(Duration::from_secs(25), Box::pin(asked)).await.is_err(), "alone it founds nothing");
        });
    });
    let said: Vec<&String> = lines.iter().filter(|line| line.contains("first start: 2 of the 3")).collect();
    assert_eq!(said.len(), 3, "{lines:?}");
    assert!(said[0].contains("INFO") && said[1].contains("WARN"), "{said:?}");
    let told = told.borrow();
    assert!(told.len() >= 20, "a probe is told after each round: {}", told.len());
    assert!(told.iter().all(|why| why.contains("no answer from b (") && why.contains("c (")), "{told:?}");
}
