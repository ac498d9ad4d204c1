//! Nodes whose addresses change, and those that only look like it, in the simulator.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use narad_shards::rt::{self, sim};

use super::cluster_tests::{address, empty, seconds, start_at, voter, Net, Node};
use super::consensus::restart::Mode;
use super::tests::Directory;
use super::*;
use crate::config::{LogFormat, LogLevel};
use crate::telemetry::logged;

const NAMES: [&str; 3] = ["a", "b", "c"];

fn moved(node: &str) -> SocketAddr {
    SocketAddr::new(address(node).ip(), address(node).port() + 1000)
}

fn others(node: &str, at: impl Fn(&str) -> SocketAddr) -> BTreeMap<String, String> {
    NAMES.iter().filter(|other| **other != node).map(|other| ((*other).to_owned(), at(other).to_string())).collect()
}

fn founders() -> Mode {
    Mode::Bootstrap { me: String::new(), voters: NAMES.map(voter).into() }
}

fn begin(net: &Rc<Net>, node: &str, at: SocketAddr, files: Directory, list: &BTreeMap<String, String>) -> Rc<Node> {
    let Mode::Bootstrap { voters, .. } = founders() else { unreachable!("it founds") };
    start_at(net, node, at, files, Mode::Bootstrap { me: node.to_owned(), voters }, list)
}

async fn three(net: &Rc<Net>) -> Vec<Rc<Node>> {
    let nodes = NAMES.map(|node| begin(net, node, address(node), empty(node), &others(node, address)));
    // Registered, and the leader is old enough to judge anybody.
    seconds(35).await;
    nodes.into()
}

fn copy_of(node: &Node, name: &str) -> Directory {
    let copy = empty(name);
    for file in std::fs::read_dir(&node.files.0).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), copy.0.join(file.file_name())).unwrap();
    }
    copy
}

fn leader(nodes: &[Rc<Node>]) -> usize {
    nodes.iter().position(|node| node.consensus.status().is_established).expect("a leader")
}

fn recorded(node: &Node) -> BTreeSet<String> {
    node.consensus.view().servers.iter().map(|server| server.address.to_string()).collect()
}

fn told(node: &Node) -> BTreeSet<String> {
    node.applier.state().members().values().map(|member| member.registration.peer_address.to_string()).collect()
}

fn all(at: impl Fn(&str) -> SocketAddr) -> BTreeSet<String> {
    NAMES.iter().map(|node| at(node).to_string()).collect()
}

#[test]
fn a_cluster_whose_addresses_all_change_forms_again_at_the_listed_ones() {
    sim::run(21, async {
        let net: Rc<Net> = Rc::default();
        let before = three(&net).await;
        assert_eq!(told(&before[0]), all(address));
        let copies: Vec<_> = before.iter().zip(NAMES).map(|(node, name)| copy_of(node, name)).collect();
        net.lost.borrow_mut().extend(NAMES.map(address));
        let nodes: Vec<_> = copies.into_iter().zip(NAMES).collect();
        let nodes: Vec<_> = nodes
            .into_iter()
            .map(|(files, node)| begin(&net, node, moved(node), files, &others(node, moved)))
            .collect();
        seconds(10).await;
        assert!(nodes.iter().all(|node| node.consensus.caught_up()));
        seconds(20).await;
        for node in &nodes {
            assert_eq!((told(node), recorded(node)), (all(moved), all(moved)));
        }
        assert!(nodes[leader(&nodes)].consensus.view().failing.is_empty());
    });
}

#[test]
fn a_node_whose_address_changed_is_taken_back_and_until_then_does_not_seem_to_answer() {
    sim::run(22, async {
        let net: Rc<Net> = Rc::default();
        let mut nodes = three(&net).await;
        let lead = leader(&nodes);
        let at = (lead + 1) % 3;
        let files = copy_of(&nodes[at], NAMES[at]);
        net.lost.borrow_mut().push(address(NAMES[at]));
        nodes[at] = begin(&net, NAMES[at], moved(NAMES[at]), files, &others(NAMES[at], address));
        let raft_id = nodes[at].consensus.status().raft_id;
        seconds(2).await;
        for _ in 0..100 {
            assert_eq!(nodes[lead].consensus.failing(), [raft_id].into());
            rt::sleep(Duration::from_millis(250)).await;
        }
        seconds(12).await;
        assert!(nodes[lead].consensus.status().leads);
        assert!(nodes[at].consensus.caught_up() && nodes[lead].consensus.failing().is_empty());
        seconds(10).await;
        for node in &nodes {
            assert!(told(node).contains(&moved(NAMES[at]).to_string()), "its next heartbeat");
            assert!(recorded(node).contains(&moved(NAMES[at]).to_string()), "its next join");
        }
    });
}

/// A copy of the directory of the leader, or of the follower that comes `behind` it.
async fn run_a_copy(behind: usize) {
    let net: Rc<Net> = Rc::default();
    let nodes = three(&net).await;
    let lead = leader(&nodes);
    let at = (lead + behind) % 3;
    let files = copy_of(&nodes[at], NAMES[at]);
    let copy = begin(&net, NAMES[at], moved(NAMES[at]), files, &others(NAMES[at], address));
    for _ in 0..60 {
        seconds(1).await;
        assert!(nodes[at].consensus.caught_up() && !copy.consensus.sees_leader());
        assert!(nodes[lead].consensus.status().leads && nodes[lead].consensus.failing().is_empty());
    }
    if at != lead {
        // Nor does it change anything when another one leads: what a follower knows of the others is no less.
        net.lost.borrow_mut().push(address(NAMES[lead]));
        seconds(10).await;
        assert!(nodes[at].consensus.caught_up() && !copy.consensus.sees_leader());
        net.lost.borrow_mut().clear();
        seconds(10).await;
    }
    for node in &nodes {
        assert_eq!((told(node), recorded(node)), (all(address), all(address)));
    }
    assert!(!copy.consensus.sees_leader());
}

#[test]
fn a_copy_of_a_running_nodes_directory_changes_nothing_and_both_sides_say_so() {
    for behind in [0, 1] {
        let lines = logged(LogLevel::Warn, LogFormat::Text, || sim::run(23 + behind as u64 * 10, run_a_copy(behind)));
        for what in ["cluster: refused a join", "cluster join rejected"] {
            let said: Vec<_> = lines.iter().filter(|line| line.contains(what)).collect();
            assert!(!said.is_empty() && said.len() <= 3, "{what}: {lines:?}");
            assert!(said.iter().all(|line| line.contains("a copy of it")), "{said:?}");
        }
    }
}

#[test]
fn a_second_node_under_a_living_id_gets_its_place_only_when_that_was_silent_for_long() {
    sim::run(24, async {
        let net: Rc<Net> = Rc::default();
        let nodes = three(&net).await;
        let lead = leader(&nodes);
        let at = (lead + 1) % 3;
        let former = nodes[at].consensus.status().raft_id;
        let second = start_at(&net, NAMES[at], moved(NAMES[at]), empty("x"), Mode::Join, &others(NAMES[at], address));
        let holder = || nodes[lead].consensus.view().server_named(NAMES[at]).map(|server| server.raft_id);
        seconds(30).await;
        assert_eq!(holder(), Some(former));
        // A pause of some seconds changes nothing.
        net.lost.borrow_mut().push(address(NAMES[at]));
        seconds(25).await;
        assert_eq!(holder(), Some(former));
        net.lost.borrow_mut().clear();
        seconds(25).await;
        assert!(nodes[at].consensus.caught_up() && holder() == Some(former));
        net.lost.borrow_mut().push(address(NAMES[at]));
        seconds(45).await;
        assert_eq!(holder(), Some(second.consensus.status().raft_id));
        assert!(second.consensus.caught_up());
    });
}

#[test]
fn a_server_is_looked_for_where_it_was_heard_then_where_the_list_the_record_and_the_configuration_have_it() {
    let state = tests_support::cluster(&["b"]);
    let raft_id = tests_support::raft_id("b");
    let listed = BTreeMap::from([("b".to_owned(), "listed:1".to_owned())]);
    let known = consensus::Known { node: Some("b"), recorded: Some("recorded:1"), heard: Some("heard:1") };
    let asked = |known, listed: &BTreeMap<String, String>, state: &State, unknown: &[&str]| {
        let mut tried: Vec<Arc<str>> = Vec::new();
        find_server(raft_id, known, listed, state, |text| {
            tried.push(text.into());
            (!unknown.contains(&text)).then(|| address("b"))
        });
        tried.last().map(|text| text.to_string())
    };
    let nobody = BTreeMap::new();
    let unheard = consensus::Known { heard: None, ..known };
    assert_eq!(asked(known, &listed, &state, &[]).as_deref(), Some("heard:1"));
    assert_eq!(asked(unheard, &listed, &state, &[]).as_deref(), Some("listed:1"));
    assert_eq!(asked(unheard, &nobody, &state, &[]).as_deref(), Some("b:7943"));
    assert_eq!(asked(unheard, &nobody, &State::default(), &[]).as_deref(), Some("recorded:1"));
    assert_eq!(asked(known, &listed, &state, &["heard:1", "listed:1"]).as_deref(), Some("b:7943"));
}

#[test]
fn e36_a_node_on_an_empty_disk_says_what_the_leader_answers_until_it_is_let_in() {
    sim::run(33, async {
        let net: Rc<Net> = Rc::default();
        let nodes = three(&net).await;
        let name = NAMES[(leader(&nodes) + 1) % 3];
        let newcomer = start_at(&net, name, moved(name), empty(name), Mode::Join, &others(name, address));
        seconds(5).await;
        let said = newcomer.membership.outside().expect("it is not let in");
        assert!(said.contains("id_in_use") && said.contains("let in 30 s after"), "{said}");
        net.lost.borrow_mut().push(address(name));
        seconds(60).await;
        assert_eq!(newcomer.membership.outside(), None);
        assert!(newcomer.consensus.is_latched());
    });
}
