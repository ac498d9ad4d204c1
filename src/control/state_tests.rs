//! Members, assignments and the cluster id in the state, in the store and in what shards see.

use std::sync::Arc;

use narad_shards::api::TopicChange;
use narad_shards::meta::{Address, Incarnation, NodeId, TopicMeta};
use narad_shards::rt::sim::{self, Rng};

use super::tests::{topic, Directory, Shards, Shelf};
use super::*;

fn told(node: &str) -> Arc<Registration> {
    Arc::new(Registration {
        node: Arc::from(node),
        raft_id: 77,
        peer_address: Arc::from(format!("{node}:7943")),
        client_address: Arc::from(format!("{node}:7942")),
        build: Arc::from("0.1.0"),
        newest_command_type: Command::NEWEST_TYPE,
    })
}

fn register(node: &str, stamp_ms: u64) -> Command {
    Command::RegisterMember { registration: told(node), stamp_ms }
}

fn create(topic: Arc<TopicMeta>, owners: &[u64]) -> Command {
    Command::CreateTopic { topic, owners: owners.iter().copied().map(NodeId).collect() }
}

fn place(name: &str, id: u64, owners: &[(u32, u64)]) -> Command {
    let owners = owners.iter().map(|(partition, owner)| (*partition, NodeId(*owner))).collect();
    Command::PlacePartitions { name: Arc::from(name), incarnation: Incarnation(id), owners }
}

fn prune(id: u64, partition: u32) -> Command {
    Command::PruneAssignment { incarnation: Incarnation(id), partition }
}

fn more(name: &str, id: u64, partitions: u32, owners: &[u64]) -> Command {
    Command::AlterTopic {
        name: Arc::from(name),
        incarnation: Incarnation(id),
        change: TopicChange { partitions: Some(partitions), ..TopicChange::default() },
        owners: owners.iter().copied().map(NodeId).collect(),
    }
}

fn do_one(state: &mut State, command: &Command) -> Outcome {
    let applied = apply(state, command);
    state.absorb(state.applied_index() + 1, &applied.changes);
    applied.outcome
}

fn after(commands: &[Command]) -> State {
    let mut state = State::default();
    for command in commands {
        let outcome = do_one(&mut state, command);
        assert!(!matches!(outcome, Outcome::Refused(_)), "{command:?}: {outcome:?}");
    }
    state
}

/// A cluster of `a` (1) and `b` (2) with the topic `t` (incarnation 7) of three partitions, the last one unowned.
fn two() -> State {
    after(&[
        register("a", 10),
        Command::SetClusterId(5),
        register("b", 20),
        create(topic("t", 7, 3), &[1, 2, NodeId::NONE.0]),
    ])
}

fn owners(state: &State, id: u64) -> Vec<(u32, u64)> {
    let rows = state.assignments().get(&Incarnation(id));
    rows.into_iter().flat_map(|rows| rows.iter()).map(|(partition, owner)| (*partition, owner.0)).collect()
}

#[test]
fn k5_k7_k26_k33_guards_of_the_cluster_by_table() {
    let node = |name: &str| -> Arc<str> { Arc::from(name) };
    let mut with_tombstone = two();
    for command in [register("c", 30), Command::RemoveMember { node: node("c") }] {
        do_one(&mut with_tombstone, &command);
    }
    let mut with_orphan = two();
    let orphan = [Change::PutOwners { incarnation: Incarnation(99), owners: vec![(0, NodeId(1))] }];
    with_orphan.absorb(50, &orphan);
    let with_shrunk = {
        let mut state = two();
        state.absorb(50, &[Change::PutOwners { incarnation: Incarnation(7), owners: vec![(3, NodeId(1))] }]);
        state
    };
    let cases = [
        (two(), place("t", 7, &[(2, 2)]), None),
        (two(), place("t", 7, &[(1, 1)]), Some(Refusal::Owned { partition: 1 })),
        // As a whole or not at all.
        (two(), place("t", 7, &[(2, 1), (0, 1)]), Some(Refusal::Owned { partition: 0 })),
        (two(), place("t", 7, &[(3, 1)]), Some(Refusal::OutOfRange { partition: 3 })),
        (two(), place("t", 8, &[(2, 1)]), Some(Refusal::Changed)),
        (two(), place("u", 7, &[(2, 1)]), Some(Refusal::NotFound)),
        (with_tombstone.clone(), place("t", 7, &[(2, 3)]), Some(Refusal::NoSuchMember)),
        (two(), place("t", 7, &[]), Some(Refusal::Invalid("nothing is to be placed".into()))),
        (two(), prune(7, 1), Some(Refusal::Live)),
        (with_orphan, prune(99, 0), None),
        (with_shrunk, prune(7, 3), None),
        (with_tombstone.clone(), register("c", 31), Some(Refusal::Tombstoned)),
        (two(), register("", 31), Some(Refusal::Invalid("a member needs an id".into()))),
        (two(), Command::MarkDead { node: node("b"), stamp_ms: 20 }, None),
        (two(), Command::MarkDead { node: node("b"), stamp_ms: 19 }, Some(Refusal::HeardSince)),
        (two(), Command::MarkDead { node: node("b"), stamp_ms: 21 }, Some(Refusal::HeardSince)),
        (two(), Command::MarkDead { node: node("x"), stamp_ms: 20 }, Some(Refusal::NoSuchMember)),
        (two(), Command::RemoveMember { node: node("b") }, Some(Refusal::OwnsPartitions)),
        (two(), Command::RemoveMember { node: node("x") }, Some(Refusal::NoSuchMember)),
        (with_tombstone, Command::ClearTombstone { node: node("c") }, None),
        (two(), Command::SetClusterId(6), Some(Refusal::HasClusterId(5))),
        (State::default(), Command::SetClusterId(0), Some(Refusal::Invalid("0 is no cluster id".into()))),
        (after(&[create(topic("t", 7, 3), &[])]), Command::SetClusterId(6), Some(Refusal::NoSuchMember)),
    ];
    for (state, command, expected) in cases {
        let applied = apply(&state, &command);
        let refused = match &applied.outcome {
            Outcome::Refused(refusal) => Some(refusal.clone()),
            _ => None,
        };
        assert_eq!(refused, expected, "{command:?}");
        assert_eq!(applied.changes.is_empty(), expected.is_some(), "{command:?}");
    }
}

#[test]
fn k6_owners_enter_with_the_record_and_only_members_own() {
    let mut state = two();
    assert_eq!(owners(&state, 7), [(0, 1), (1, 2)]);
    do_one(&mut state, &create(topic("u", 8, 3), &[9, 2, 1]));
    assert_eq!(owners(&state, 8), [(1, 2), (2, 1)], "a node that was never a member owns nothing");
    // Of an increase, the owners are those of the last partitions; one that exists by now keeps what it has (K7).
    do_one(&mut state, &more("t", 7, 5, &[1, 2]));
    assert_eq!(owners(&state, 7), [(0, 1), (1, 2), (3, 1), (4, 2)]);
    do_one(&mut state, &more("t", 7, 6, &[2, 2, 1]));
    assert_eq!(owners(&state, 7), [(0, 1), (1, 2), (3, 1), (4, 2), (5, 1)]);
    do_one(&mut state, &Command::DeleteTopic { name: Arc::from("t"), incarnation: Incarnation(7) });
    assert_eq!(owners(&state, 7), []);
    // Residue of rows under a drawn id is not inherited.
    state
        .absorb(90, &[Change::PutOwners { incarnation: Incarnation(9), owners: vec![(0, NodeId(1)), (8, NodeId(2))] }]);
    do_one(&mut state, &create(topic("v", 9, 2), &[2, 2]));
    assert_eq!(owners(&state, 9), [(0, 2), (1, 2)]);
}

#[test]
fn a_number_belongs_to_one_member_for_ever_and_flags_outlive_heartbeats() {
    let mut state = two();
    let number = |state: &State, node: &str| state.members().get(node).map(|member| member.number.0);
    do_one(&mut state, &register("c", 30));
    do_one(&mut state, &Command::RemoveMember { node: Arc::from("c") });
    do_one(&mut state, &register("d", 30));
    assert_eq!((number(&state, "c"), number(&state, "d")), (None, Some(4)));
    do_one(&mut state, &Command::ClearTombstone { node: Arc::from("c") });
    do_one(&mut state, &register("c", 31));
    assert_eq!(number(&state, "c"), Some(5), "a deliberate return is a new member");

    let draining = Arc::new(Member { draining: true, alive: false, ..(*state.members()["b"]).clone() });
    state.absorb(80, &[Change::PutMember(draining)]);
    let mut newer = (*told("b")).clone();
    newer.build = Arc::from("0.2.0");
    do_one(&mut state, &Command::RegisterMember { registration: Arc::new(newer), stamp_ms: 40 });
    let member = &state.members()["b"];
    assert_eq!((member.number.0, member.draining, member.alive, member.heartbeat_ms), (2, true, true, 40));
    assert_eq!(&*member.registration.build, "0.2.0");
    // A dead mark moves nothing (K24).
    let before = state.assignments().clone();
    do_one(&mut state, &Command::MarkDead { node: Arc::from("b"), stamp_ms: 40 });
    assert!(!state.members()["b"].alive);
    assert_eq!(state.assignments(), &before);
}

fn random_command(rng: &mut Rng) -> Command {
    let nodes = ["a", "b", "c", "d"];
    let names = ["t", "T", "u"];
    let node: Arc<str> = Arc::from(nodes[rng.below(4) as usize]);
    let name = names[rng.below(3) as usize];
    let id = 1 + rng.below(4);
    let mut owner = || rng.below(6);
    let owners = [owner(), owner(), owner()];
    match rng.below(12) {
        0 | 1 => create(topic(name, id, 3), &owners),
        2 => Command::DeleteTopic { name: Arc::from(name), incarnation: Incarnation(id) },
        3 => more(name, id, 1 + rng.below(8) as u32, &owners[..rng.below(4) as usize]),
        4 | 5 => place(name, id, &[(rng.below(5) as u32, owners[0]), (rng.below(5) as u32, owners[1])]),
        6 => prune(id, rng.below(5) as u32),
        7 | 8 => Command::RegisterMember { registration: told(&node), stamp_ms: rng.below(3) },
        9 => Command::MarkDead { node, stamp_ms: rng.below(3) },
        10 => match rng.chance(1, 2) {
            true => Command::RemoveMember { node },
            false => Command::ClearTombstone { node },
        },
        _ => Command::SetClusterId(rng.below(2)),
    }
}

#[test]
fn k4_replicas_rows_and_log_entries_agree_on_random_commands() {
    for seed in 0..150 {
        let mut rng = Rng::new(seed);
        let (mut one, mut two) = (State::default(), State::default());
        let mut numbers = std::collections::BTreeMap::new();
        for index in 1..120u64 {
            let command = random_command(&mut rng);
            let read = Command::decode(&command.encode()).expect("what was encoded");
            assert_eq!(read, command);
            let owned_before = two.assignments().clone();
            let (first, second) = (apply(&one, &command), apply(&two, &read));
            assert_eq!(first, second);
            one.absorb(index, &first.changes);
            two.absorb(index, &second.changes);
            assert_eq!(State::from_rows(one.rows(), index), one);
            // K7: whoever owned a live partition owns it still.
            for (incarnation, before) in owned_before {
                let Some(live) = one.topic_of(incarnation) else { continue };
                for (partition, owner) in before.iter().filter(|(partition, _)| **partition < live.partitions) {
                    assert_eq!(one.owner(incarnation, *partition), Some(*owner), "{command:?}");
                }
            }
            for member in one.members().values() {
                let first = numbers.entry(member.number).or_insert_with(|| member.node().clone());
                assert_eq!(first, member.node(), "a number changed hands");
                assert!(!one.removed_members().contains_key(member.node()), "k33");
            }
            let live = one.assignments().values().flat_map(|rows| rows.values());
            live.for_each(|owner| assert!(one.member_of(*owner).is_some(), "an owner that is no member"));
        }
        assert_eq!(one, two);
    }
}

#[test]
fn k17_an_entry_of_an_unknown_type_is_an_error_that_names_it() {
    let newer = (Command::NEWEST_TYPE as u16 + 1).to_le_bytes();
    let error = Command::decode(&newer).unwrap_err();
    assert_eq!(error, BadCommand::UnknownType(11));
    assert!(error.to_string().contains("command type 11"), "{error}");
    let readable = register("a", 1).encode();
    for damaged in [&[][..], &[1], &[0, 0], &[6, 0, b'{'], &readable[..readable.len() - 1]] {
        assert!(matches!(Command::decode(damaged), Err(BadCommand::Unreadable(_))), "{damaged:?}");
    }
}

#[test]
fn e37_every_table_comes_back_after_a_restart() {
    let directory = Directory::new("cluster-rows");
    let (mut store, mut state) = Store::open(&directory.0).unwrap();
    let commands = [
        register("a", 1),
        Command::SetClusterId(u64::MAX - 1),
        register("b", 2),
        create(topic("t", u64::MAX, 200), &[1; 200]),
        create(topic("u", 3, 2), &[2, 1]),
        register("c", 3),
        Command::RemoveMember { node: Arc::from("c") },
        Command::MarkDead { node: Arc::from("b"), stamp_ms: 2 },
        Command::DeleteTopic { name: Arc::from("u"), incarnation: Incarnation(3) },
    ];
    for command in &commands {
        let applied = apply(&state, command);
        let index = state.applied_index() + 1;
        state.absorb(index, &applied.changes);
        store.commit(&Batch { applied_index: index, changes: applied.changes }).unwrap();
    }
    drop(store);
    let (_store, again) = Store::open(&directory.0).unwrap();
    assert_eq!(again, state);
    assert_eq!((again.assignments().len(), again.removed_members().len(), again.newest_number()), (1, 1, 3));
}

#[test]
fn a_file_of_format_1_opens_and_is_of_this_format_from_its_first_change_on() {
    let directory = Directory::new("format-1");
    let topics: redb::TableDefinition<&str, &[u8]> = redb::TableDefinition::new("topics");
    let meta: redb::TableDefinition<&str, u64> = redb::TableDefinition::new("fsm_meta");
    let row = r#"{"id":"0000000000000007","partitions":3,"retention_ms":0,"visibility_timeout_ms":30000,"max_in_flight_per_partition":1099511627776,"max_acked_ahead_per_partition":1024,"created_at_ms":1}"#;
    let path = directory.0.join("state.redb");
    {
        let database = redb::Database::create(&path).unwrap();
        let transaction = database.begin_write().unwrap();
        transaction.open_table(topics).unwrap().insert("t", row.as_bytes()).unwrap();
        for (key, value) in [("format", 1), ("applied_index", 41), ("newest_command_type", 3)] {
            transaction.open_table(meta).unwrap().insert(key, value).unwrap();
        }
        transaction.commit().unwrap();
    }
    let (mut store, state) = Store::open(&directory.0).unwrap();
    let rows = [Change::PutTopic(topic("t", 7, 3)), Change::SetNewestCommandType(3)];
    assert_eq!(state, State::from_rows(rows, 41));
    store.commit(&Batch { applied_index: 42, changes: vec![Change::SetClusterId(5)] }).unwrap();
    drop(store);
    let (store, state) = Store::open(&directory.0).unwrap();
    assert_eq!((state.applied_index(), state.cluster_id(), state.topics().len()), (42, 5, 1));
    drop(store);
    use redb::ReadableTable;
    let database = redb::Database::open(&path).unwrap();
    let table = database.begin_write().unwrap();
    assert_eq!(table.open_table(meta).unwrap().get("format").unwrap().unwrap().value(), FORMAT);
}

fn shown(placement: &Placement, state: &State, id: u64) -> Vec<Address> {
    placement.snapshot(state).placement[&Incarnation(id)].to_vec()
}

#[test]
fn e43_own_partitions_are_on_shards_others_at_their_node_unowned_nowhere() {
    let mut state = two();
    let mut placement = Placement::in_cluster(2, "a");
    placement.follow(&state);
    assert!(placement.snapshot(&state).placement.is_empty(), "k22: nothing before the latch");
    placement.trust();
    let remote = Address::remote(NodeId(2));
    let unowned = Address { node: NodeId::NONE, shard: Address::ROUTED };
    assert_eq!(shown(&placement, &state, 7), [Address::local(0), remote, unowned]);
    let snapshot = placement.snapshot(&state);
    let at = |partition| snapshot.address(narad_shards::meta::Destination { incarnation: Incarnation(7), partition });
    assert_eq!((at(1), at(2)), (Some(remote), None));
    // The same state seen by the other node, and by one that is no member yet.
    let seen_by = |node: &str| {
        let mut placement = Placement::in_cluster(1, node);
        placement.trust();
        placement.follow(&state);
        shown(&placement, &state, 7)
    };
    assert_eq!(seen_by("b"), [Address::remote(NodeId(1)), Address::local(0), unowned]);
    assert_eq!(seen_by("c"), [Address::remote(NodeId(1)), remote, unowned]);
    // A placement brings an owner, on the least loaded shard.
    do_one(&mut state, &place("t", 7, &[(2, 1)]));
    placement.follow(&state);
    assert_eq!(shown(&placement, &state, 7), [Address::local(0), remote, Address::local(1)]);
}

#[test]
fn e57_a_lone_node_keeps_every_partition_where_it_is_when_it_becomes_a_cluster() {
    let mut state = after(&[create(topic("t", 7, 5), &[]), create(topic("u", 8, 2), &[])]);
    let mut placement = Placement::in_cluster(3, "a");
    placement.trust();
    placement.follow(&state);
    let before = (shown(&placement, &state, 7), shown(&placement, &state, 8));
    assert!(before.0.iter().chain(&before.1).all(|address| address.node == NodeId::LOCAL));
    for command in [register("a", 1), Command::SetClusterId(5), register("b", 2)] {
        do_one(&mut state, &command);
        placement.follow(&state);
        assert_eq!((shown(&placement, &state, 7), shown(&placement, &state, 8)), before, "{command:?}");
    }
    assert_eq!(owners(&state, 8), [(0, 1), (1, 1)]);
    // The files of a cluster, opened without one, serve nobody else's partitions.
    let mut alone = Placement::new(3);
    alone.follow(&state);
    assert!(shown(&alone, &state, 7).iter().all(|address| address.node != NodeId::LOCAL));
}

#[test]
fn k22_the_latch_shows_ownership_to_every_shard_without_a_new_entry() {
    sim::run(5, async {
        let shelf = Shelf::default();
        let installed = Rc::default();
        let install = Rc::new(Shards { shelf: shelf.clone(), installed: Rc::clone(&installed) });
        let state = two();
        let version = state.applied_index();
        shelf.clone().commit(&Batch { applied_index: version, changes: state.rows() }).unwrap();
        let applier = Applier::start(Metastore::over(shelf, state, Placement::in_cluster(2, "b")), install);
        assert!(applier.snapshot().placement.is_empty());
        // A heartbeat is stored, and shows nothing new.
        applier.submit(version + 1, register("b", 21)).await.unwrap();
        assert_eq!(applier.state().members()["b"].heartbeat_ms, 21);
        assert!(installed.borrow().is_empty());
        applier.trust_ownership();
        rt::sleep(std::time::Duration::from_millis(50)).await;
        assert_eq!(installed.borrow().len(), 1);
        assert_eq!(installed.borrow()[0].placement[&Incarnation(7)][1], Address::local(0));
        assert_eq!(applier.snapshot().version, version + 1);
    });
}
