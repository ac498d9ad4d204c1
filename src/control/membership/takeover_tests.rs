//! Who may take the place of a server, under its id or with its directory, and whose lists found a cluster.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::admission::{admit, Step};
use super::join::{start, unequal, Start};
use super::tests::{asks, membership};
use super::*;
use crate::config::{LogFormat, LogLevel};
use crate::control::tests_support::*;
use crate::control::*;
use crate::telemetry::logged;

fn view_with(failing: &[&str], gone: &[&str]) -> View {
    let ids = |nodes: &[&str]| nodes.iter().map(|node| raft_id(node)).collect();
    View { failing: ids(failing), gone: ids(gone), ..led(&["a", "b", "c"], &["d"]) }
}

#[test]
fn e36_another_directory_takes_the_place_of_a_member_only_when_that_is_dead_or_as_long_silent() {
    let members = cluster(&["a", "b", "c", "d"]);
    let mut marked = members.clone();
    do_one(&mut marked, &Command::MarkDead { node: Arc::from("b"), stamp_ms: 1 });
    let unknown = cluster(&["a", "c", "d"]);
    let cases = [
        (view_with(&[], &[]), &members, "id_in_use"),
        // A second of silence is a pause, or a slow disk.
        (view_with(&["b"], &[]), &members, "id_in_use"),
        (view_with(&["b"], &["b"]), &members, "staged"),
        (view_with(&["b"], &[]), &marked, "staged"),
        // Its heartbeats do not arrive, but it answers.
        (view_with(&[], &[]), &marked, "id_in_use"),
        // It never became a member: nothing is lost with it.
        (view_with(&["b"], &[]), &unknown, "staged"),
        (view_with(&[], &[]), &unknown, "id_in_use"),
    ];
    for (view, state, word) in cases {
        let (steps, answer) = admit(&Join { raft_id: 5, ..asks("b") }, state, &view, seconds(100));
        assert_eq!(answer.word, word, "{:?} {:?}", view.failing, view.gone);
        assert_eq!(steps.contains(&Step::Remove(raft_id("b"))), word == "staged");
    }
}

#[test]
fn a_replaced_server_is_on_record_with_both_addresses_and_so_is_one_that_is_refused() {
    let lines = logged(LogLevel::Warn, LogFormat::Text, || {
        rt::sim::run(1, async {
            let leader = node("a", cluster(&["a", "b", "c", "d"]), view_with(&["b"], &[]));
            leader.consensus.view.borrow_mut().since = rt::now();
            rt::sleep(Duration::from_secs(20)).await;
            let admitting = membership(&Rc::default(), "a", &[], &leader);
            let join = Join { raft_id: 5, peer_address: "elsewhere:1".into(), ..asks("b") };
            assert_eq!(admitting.admit(&join).await.word, "id_in_use");
            leader.consensus.view.borrow_mut().gone = [raft_id("b")].into();
            assert_eq!(admitting.admit(&join).await.word, "staged");
        });
    });
    let [refused, removed, added] = &lines[..] else { panic!("{lines:?}") };
    assert!(refused.contains("refused a join") && refused.contains("b:7943"), "{refused}");
    for (line, what) in [(removed, "cluster: removed"), (added, "cluster: added")] {
        let is_whole = ["component=audit", "id=b", "address=elsewhere:1", "former_address=b:7943", what];
        assert!(is_whole.iter().all(|part| line.contains(part)), "{line}");
    }
}

#[test]
fn a_copy_of_a_directory_never_gets_the_recorded_address_while_the_original_answers() {
    let members = cluster(&["a", "b", "c", "d"]);
    let mut marked = members.clone();
    do_one(&mut marked, &Command::MarkDead { node: Arc::from("b"), stamp_ms: 1 });
    let elsewhere = |node: &str| Join { peer_address: "elsewhere:1".into(), ..asks(node) };
    let heard = |node: &str, address: &str| View {
        heard_at: [(raft_id(node), Arc::from(address))].into(),
        ..view_with(&[], &[])
    };
    let cases = [
        ("b", heard("b", "b:7943"), &members, "copied_directory"),
        ("d", heard("d", "d:7943"), &members, "copied_directory"),
        ("b", view_with(&["b"], &[]), &members, "copied_directory"),
        ("b", view_with(&["b"], &["b"]), &members, "voter"),
        ("b", view_with(&["b"], &[]), &marked, "voter"),
        // It is there that the leader hears it.
        ("b", heard("b", "elsewhere:1"), &members, "voter"),
        ("d", heard("d", "elsewhere:1"), &members, "promoted"),
    ];
    for (node, view, state, word) in cases {
        let (steps, answer) = admit(&elsewhere(node), state, &view, seconds(100));
        assert_eq!(answer.word, word, "{node} {view:?}");
        assert_eq!(steps.len(), usize::from(word != "copied_directory"));
        if steps.is_empty() {
            assert!(answer.status == 409 && answer.reason.contains(&format!("{node}:7943")), "{}", answer.reason);
            assert!(answer.reason.contains("elsewhere:1"), "{}", answer.reason);
        }
    }
    // The leader itself is where it is, whatever was heard.
    for view in [view_with(&["a"], &["a"]), heard("a", "elsewhere:1")] {
        let (steps, answer) = admit(&elsewhere("a"), &members, &view, seconds(100));
        assert_eq!((steps.len(), &*answer.word), (0, "copied_directory"));
    }
}

#[test]
fn nobody_founds_a_cluster_while_two_lists_of_initial_members_differ() {
    let list = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<Vec<String>>();
    let ours = list(&["a", "b", "c"]);
    let answers: BTreeMap<String, Option<u16>> = [("b".to_owned(), Some(412)), ("c".to_owned(), Some(412))].into();
    let lists = |theirs: &[(&str, &[&str])]| -> BTreeMap<String, Vec<String>> {
        theirs.iter().map(|(node, ids)| ((*node).to_owned(), list(ids))).collect()
    };
    // Order means nothing, and a node that names none has nothing to say.
    let same = lists(&[("b", &["c", "b", "a"]), ("c", &[])]);
    assert_eq!(start("a", &ours, &answers, &same, 3), Start::Bootstrap);
    assert!(unequal(&ours, &same).is_empty());
    // Whether it has answered or asked, and however many agree.
    for node in ["b", "x"] {
        let differing = lists(&[("c", &["a", "b", "c"]), (node, &["a", "b", "d"])]);
        assert_eq!(start("a", &ours, &answers, &differing, 30), Start::AskAgain);
        let found = unequal(&ours, &differing);
        let expected = Unequal { node: node.into(), here: "a,b,c".into(), there: "a,b,d".into() };
        assert_eq!(found, [expected]);
        // Who has a cluster already decides it all the same.
        let configured = [("c".to_owned(), Some(421))].into();
        assert_eq!(start("a", &ours, &configured, &differing, 1), Start::JoinOnly);
    }
    let many: Vec<String> = (0..40).map(|number| format!("n{number}")).collect();
    let other = BTreeMap::from([("n1".to_owned(), [&many[1..], &list(&["typo"])].concat())]);
    let found = unequal(&many, &other);
    assert_eq!((&*found[0].here, &*found[0].there), ("40 ids, only there: n0", "40 ids, only there: typo"));
}
