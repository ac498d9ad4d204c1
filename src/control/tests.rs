use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use narad_shards::meta::Address;
use narad_shards::peer::LocalBoxFuture;
use narad_shards::rt::sim;
use narad_shards::rt::sim::Rng;

use super::tests_support::Alone;
use super::*;

pub(super) fn topic(name: &str, incarnation: u64, partitions: u32) -> Arc<TopicMeta> {
    Arc::new(TopicMeta {
        name: Arc::from(name),
        incarnation: Incarnation(incarnation),
        partitions,
        retention_ms: 0,
        visibility_timeout_ms: 30_000,
        max_in_flight_per_partition: 1 << 40, // wider than 32 bits, also in the store
        max_acked_ahead_per_partition: 1024,
        created_at_ms: 1,
        owner: None,
    })
}

fn new_topic(name: &str) -> NewTopic {
    NewTopic {
        name: name.to_owned(),
        partitions: 3,
        retention_ms: 0,
        visibility_timeout_ms: 30_000,
        max_in_flight_per_partition: 10,
        max_acked_ahead_per_partition: 10,
        owner: None,
    }
}

/// A store in memory that refuses when told to; shared, so that a test can look at it and "restart" on it.
#[derive(Clone, Default)]
pub(super) struct Shelf(Arc<Mutex<ShelfContent>>);

#[derive(Default)]
pub(super) struct ShelfContent {
    batches: Vec<Batch>,
    refuse: u32,
}

impl Shelf {
    pub(super) fn state(&self) -> State {
        let content = self.0.lock().unwrap();
        let changes = content.batches.iter().flat_map(|batch| &batch.changes).cloned();
        State::from_rows(changes, content.batches.last().map_or(0, |batch| batch.applied_index))
    }
}

impl Storage for Shelf {
    fn commit(&mut self, batch: &Batch) -> Result<(), String> {
        let mut content = self.0.lock().unwrap();
        if content.refuse > 0 {
            content.refuse -= 1;
            return Err("no space left on device".to_owned());
        }
        content.batches.push(batch.clone());
        Ok(())
    }

    fn begin_image(&mut self) -> Result<CopyImage, String> {
        Err("this store has no images".to_owned())
    }

    fn install_image(&mut self) -> Result<State, String> {
        Err("this store has no images".to_owned())
    }
}

/// Shards that install after a while, and a record of what they have installed and when it was stored.
#[derive(Clone)]
pub(super) struct Shards {
    pub(super) shelf: Shelf,
    pub(super) installed: Installed,
}

impl Install for Shards {
    fn install(&self, snapshot: Arc<Snapshot>) -> LocalBoxFuture<'static, ()> {
        let shards = self.clone();
        Box::pin(async move {
            rt::sleep(std::time::Duration::from_millis(5)).await;
            let stored = shards.shelf.state();
            assert!(stored.applied_index() >= snapshot.version, "shown before it was stored");
            shards.installed.borrow_mut().push(snapshot);
        })
    }
}

pub(super) type Installed = Rc<RefCell<Vec<Arc<Snapshot>>>>;

fn start(shelf: &Shelf, shards: ShardId) -> (Rc<Control>, Installed) {
    let installed = Rc::new(RefCell::new(Vec::new()));
    let install = Rc::new(Shards { shelf: shelf.clone(), installed: installed.clone() });
    let applier = Applier::start(Metastore::new(shelf.clone(), shelf.state(), shards), install);
    let control = Control::over(Rc::new(Alone::new(applier.clone())), applier);
    (Rc::new(control), installed)
}

fn delete(name: &str, incarnation: Incarnation) -> MetaCommand {
    MetaCommand::DeleteTopic { name: name.to_owned(), incarnation }
}

fn gone(name: &str, incarnation: Option<Incarnation>) -> MetaCommand {
    MetaCommand::ConfirmGone { name: name.to_owned(), incarnation }
}

async fn create(control: &Control, name: &str) -> Arc<TopicMeta> {
    match control.handle(MetaCommand::CreateTopic(new_topic(name))).await {
        MetaReply::Created(topic) => topic,
        other => panic!("{name}: {other:?}"),
    }
}

#[test]
fn k5_guarded_commands_are_refused_by_table() {
    let mut state = State::default();
    state.absorb(1, &apply(&state, &Command::create(topic("Orders", 7, 3))).changes);
    let create = |name: &str, id: u64| Command::create(topic(name, id, 3));
    let delete = |name: &str, id: u64| Command::DeleteTopic { name: Arc::from(name), incarnation: Incarnation(id) };
    let collision = Refusal::CaseCollision { existing: Arc::from("Orders") };
    let cases = [
        (create("Orders", 8), Some(Refusal::Exists)),
        (create("orders", 8), Some(collision.clone())),
        (create("ORDERS", 8), Some(collision)),
        (create("orders2", 7), Some(Refusal::IdTaken)),
        (create("orders2", 8), None),
        (delete("Orders", 8), Some(Refusal::Changed)),
        (delete("orders", 7), Some(Refusal::NotFound)),
        (delete("Orders", 7), None),
    ];
    for (command, expected) in cases {
        let applied = apply(&state, &command);
        let refused = match &applied.outcome {
            Outcome::Refused(refusal) => Some(refusal.clone()),
            _ => None,
        };
        assert_eq!(refused, expected, "{command:?}");
        assert_eq!(applied.changes.is_empty(), expected.is_some(), "{command:?}");
    }
    for (name, partitions) in [("../x", 3), ("", 3), ("a", 0), ("a", 100_000), ("a", u32::MAX)] {
        let applied = apply(&state, &Command::create(topic(name, 9, partitions)));
        assert!(matches!(applied.outcome, Outcome::Refused(Refusal::Invalid(_))), "{name:?}");
    }
    let grown = |partitions| Command::AlterTopic {
        name: Arc::from("Orders"),
        incarnation: Incarnation(7),
        change: TopicChange { partitions: Some(partitions), ..TopicChange::default() },
        owners: Owners::default(),
    };
    assert!(matches!(apply(&state, &grown(u32::MAX)).outcome, Outcome::Refused(Refusal::Invalid(_))));
    assert!(matches!(apply(&state, &grown(PARTITIONS_MAX)).outcome, Outcome::Altered(_)));
}

#[test]
fn k4_two_replicas_that_apply_the_same_commands_are_equal() {
    for seed in 0..200 {
        let mut rng = Rng::new(seed);
        let names = ["a", "A", "b", "c-1", "C-1"];
        let (mut one, mut two) = (State::default(), State::default());
        for index in 1..60u64 {
            let name = names[rng.below(names.len() as u64) as usize];
            let id = 1 + rng.below(6);
            let command = match rng.chance(1, 2) {
                true => Command::create(topic(name, id, 3)),
                false => Command::DeleteTopic { name: Arc::from(name), incarnation: Incarnation(id) },
            };
            let (first, second) = (apply(&one, &command), apply(&two, &command));
            assert_eq!(first, second);
            one.absorb(index, &first.changes);
            two.absorb(index, &second.changes);
            // Restoring from rows gives the very same state, and no two names share a folded form.
            assert_eq!(State::restore(one.topics().values().cloned(), index), one);
            let folded: std::collections::BTreeSet<_> = one.topics().keys().map(|n| n.to_ascii_lowercase()).collect();
            assert_eq!(folded.len(), one.topics().len());
        }
        assert_eq!(one, two);
    }
}

#[test]
#[should_panic(expected = "applied twice")]
fn k14_an_entry_is_never_applied_twice() {
    let mut state = State::default();
    state.absorb(4, &[]);
    state.absorb(4, &[]);
}

#[test]
fn e43_partitions_spread_over_the_shards_least_loaded_first() {
    let mut state = State::default();
    let mut placement = Placement::new(4);
    let shards = |placement: &Placement, state: &State, id: u64| -> Vec<u16> {
        placement.snapshot(state).placement[&Incarnation(id)].iter().map(|a| a.shard).collect()
    };
    state.absorb(1, &[Change::PutTopic(topic("a", 1, 3))]);
    placement.follow(&state);
    assert_eq!(shards(&placement, &state, 1), [0, 1, 2]);
    // The idle shard comes first, then each shard once before any twice.
    state.absorb(2, &[Change::PutTopic(topic("b", 2, 6))]);
    placement.follow(&state);
    let of_b = shards(&placement, &state, 2);
    assert_eq!(of_b, [3, 0, 1, 2, 3, 0]);
    // What is placed stays; what is deleted gives its load back.
    state.absorb(3, &[Change::RemoveTopic(Arc::from("a"))]);
    state.absorb(4, &[Change::PutTopic(topic("c", 3, 4))]);
    placement.follow(&state);
    assert_eq!(shards(&placement, &state, 2), of_b);
    assert_eq!(shards(&placement, &state, 3), [1, 2, 0, 3]);
    assert!(!placement.snapshot(&state).placement.contains_key(&Incarnation(1)));
    // More partitions of a topic keep the old ones where they are.
    state.absorb(5, &[Change::PutTopic(topic("b", 2, 8))]);
    placement.follow(&state);
    assert_eq!(shards(&placement, &state, 2)[..6], of_b[..]);
    assert_eq!(shards(&placement, &state, 2).len(), 8);
}

#[test]
fn e43_every_partition_has_one_address_whatever_happens() {
    for seed in 0..100 {
        let mut rng = Rng::new(seed);
        let shards = 1 + rng.below(5) as u16;
        let (mut state, mut placement) = (State::default(), Placement::new(shards));
        for index in 1..80u64 {
            let name = format!("t{}", rng.below(6));
            let change = match state.topics().get(name.as_str()) {
                Some(_) => Change::RemoveTopic(Arc::from(name)),
                None => Change::PutTopic(topic(&name, index, 1 + rng.below(9) as u32)),
            };
            state.absorb(index, &[change]);
            placement.follow(&state);
            let snapshot = placement.snapshot(&state);
            assert_eq!(snapshot.placement.len(), snapshot.topics.len());
            for topic in snapshot.topics.values() {
                let addresses = &snapshot.placement[&topic.incarnation];
                assert_eq!(addresses.len(), topic.partitions as usize);
                let counts: Vec<usize> = (0..shards)
                    .map(|shard| addresses.iter().filter(|a| **a == Address::local(shard)).count())
                    .collect();
                assert_eq!(counts.iter().sum::<usize>(), addresses.len());
                assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1, "{counts:?}");
            }
        }
    }
}

#[test]
fn e23_a_change_is_answered_after_every_shard_has_it() {
    sim::run(1, async {
        let (control, installed) = start(&Shelf::default(), 2);
        let created = create(&control, "orders").await;
        {
            let installed = installed.borrow();
            let last = installed.last().unwrap();
            assert_eq!(last.topic("orders"), Some(&created));
            assert_eq!(last.topic_of(created.incarnation), Some(&created));
            assert_eq!(last.placement[&created.incarnation].len(), 3);
        }
        assert!(matches!(control.handle(delete("orders", created.incarnation)).await, MetaReply::Deleted));
        let installed = installed.borrow();
        assert!(installed.last().unwrap().topics.is_empty());
        assert!(installed.windows(2).all(|pair| pair[0].version < pair[1].version));
    });
}

#[test]
fn a_topic_goes_through_its_lives_with_the_answers_of_the_contract() {
    sim::run(2, async {
        let (control, installed) = start(&Shelf::default(), 1);
        let first = create(&control, "Orders").await;
        assert!(matches!(control.handle(MetaCommand::CreateTopic(new_topic("Orders"))).await, MetaReply::Exists));
        match control.handle(MetaCommand::CreateTopic(new_topic("orders"))).await {
            MetaReply::CaseCollision { existing } => assert_eq!(existing, "Orders"),
            other => panic!("{other:?}"),
        }
        let unchanged = installed.borrow().len();
        assert_eq!(unchanged, 1, "a refusal shows nothing new");
        assert!(matches!(control.handle(gone("Orders", Some(first.incarnation))).await, MetaReply::NotGone));
        assert!(matches!(control.handle(gone("Orders", None)).await, MetaReply::NotGone));
        assert!(matches!(control.handle(delete("Orders", first.incarnation)).await, MetaReply::Deleted));
        assert!(matches!(control.handle(delete("Orders", first.incarnation)).await, MetaReply::NotFound));
        assert!(matches!(control.handle(gone("Orders", Some(first.incarnation))).await, MetaReply::Gone));
        assert!(matches!(control.handle(gone("Orders", None)).await, MetaReply::Gone));
        let second = create(&control, "orders").await;
        assert_ne!(first.incarnation, second.incarnation);
        assert!(matches!(control.handle(delete("orders", first.incarnation)).await, MetaReply::Changed));
        assert!(matches!(control.handle(gone("orders", Some(first.incarnation))).await, MetaReply::Gone));
        assert!(matches!(control.handle(gone("orders", Some(second.incarnation))).await, MetaReply::NotGone));
        let refused = control.handle(MetaCommand::CreateTopic(new_topic("../etc"))).await;
        assert!(matches!(refused, MetaReply::Unavailable(why) if why.contains("topic name")));
    });
}

/// A leader that cannot confirm that it still is one.
struct Doubtful(Alone);

impl Log for Doubtful {
    fn propose(&self, command: Command) -> LocalBoxFuture<'static, Result<Outcome, Stopped>> {
        self.0.propose(command)
    }

    fn barrier(&self) -> LocalBoxFuture<'static, Result<(), Stopped>> {
        Box::pin(async { Err(Stopped::refused("no quorum confirmed the leader in time".to_owned())) })
    }

    fn live_topic(&self, _name: &str) -> LocalBoxFuture<'static, Result<Option<Incarnation>, Stopped>> {
        Box::pin(async { Err(Stopped::refused("no quorum confirmed the leader in time".to_owned())) })
    }
}

#[test]
fn k20_k21_without_a_barrier_nothing_is_said_to_be_gone() {
    sim::run(2, async {
        let shelf = Shelf::default();
        let install = Rc::new(Shards { shelf: shelf.clone(), installed: Rc::default() });
        let applier = Applier::start(Metastore::new(shelf.clone(), shelf.state(), 1), install);
        let control = Control::over(Rc::new(Doubtful(Alone::new(applier.clone()))), applier);
        let answer = control.handle(gone("orders", Some(Incarnation(1)))).await;
        assert!(matches!(answer, MetaReply::Unavailable(_)), "its own state has no such topic: {answer:?}");
    });
}

#[test]
fn lesson_n70_a_write_that_the_disk_refuses_is_tried_again_and_shown_only_once_stored() {
    sim::run(3, async {
        let shelf = Shelf::default();
        let (control, installed) = start(&shelf, 1);
        let first = create(&control, "a").await.incarnation;
        shelf.0.lock().unwrap().refuse = 5;
        let started = rt::now();
        let deleting = {
            let control = control.clone();
            rt::spawn(rt::Queue::Foreground, async move { control.handle(delete("a", first)).await })
        };
        rt::sleep(std::time::Duration::from_secs(1)).await;
        // On its way to the disk, a delete is no ground for destroying anything.
        assert!(matches!(control.handle(gone("a", Some(first))).await, MetaReply::NotGone));
        assert_eq!(installed.borrow().len(), 1);
        assert!(matches!(deleting.await, MetaReply::Deleted));
        assert!(rt::now() - started >= std::time::Duration::from_millis(3_100)); // 0.1 + 0.2 + 0.4 + 0.8 + 1.6
        assert!(matches!(control.handle(gone("a", Some(first))).await, MetaReply::Gone));
    });
}

#[test]
fn k17_a_disk_that_goes_on_refusing_stops_metadata_and_skips_nothing() {
    sim::run(4, async {
        let shelf = Shelf::default();
        let (control, _) = start(&shelf, 1);
        create(&control, "a").await;
        let stored = shelf.state();
        shelf.0.lock().unwrap().refuse = u32::MAX;
        let started = rt::now();
        let answer = control.handle(MetaCommand::CreateTopic(new_topic("b"))).await;
        assert!(matches!(answer, MetaReply::Unknown(_)), "it may be stored all the same (K11): {answer:?}");
        let waited = rt::now() - started;
        assert!((20..=30).contains(&waited.as_secs()), "{waited:?}");
        assert!(control.stopped().await.why.starts_with("no space left on device; "));
        shelf.0.lock().unwrap().refuse = 0;
        for command in [MetaCommand::CreateTopic(new_topic("c")), gone("zzz", None)] {
            assert!(matches!(control.handle(command).await, MetaReply::Unavailable(_)));
        }
        assert_eq!(shelf.state(), stored, "nothing behind the entry that failed");
        assert!(control.snapshot().topic("b").is_none());
    });
}

#[test]
fn changes_that_arrive_together_share_a_transaction_and_keep_their_order() {
    for seed in 0..20 {
        sim::run(seed, async move {
            let shelf = Shelf::default();
            let (control, installed) = start(&shelf, 3);
            let tasks: Vec<_> = (0..50)
                .map(|n| {
                    let control = control.clone();
                    rt::spawn(rt::Queue::Foreground, async move {
                        let name = format!("t{}", n % 25); // each name is asked for twice
                        let reply = control.handle(MetaCommand::CreateTopic(new_topic(&name))).await;
                        (name, reply)
                    })
                })
                .collect();
            let mut created = BTreeMap::new();
            let mut refused = 0;
            for task in tasks {
                match task.await {
                    (name, MetaReply::Created(topic)) => assert!(created.insert(name, topic).is_none()),
                    (_, MetaReply::Exists) => refused += 1,
                    (name, other) => panic!("{name}: {other:?}"),
                }
            }
            assert_eq!((created.len(), refused), (25, 25));
            assert!(shelf.0.lock().unwrap().batches.len() < 50);
            assert!(installed.borrow().len() < 25);
            assert_eq!(shelf.state().applied_index(), 50, "refused entries count");
            // A restart on the same rows goes on behind the last index.
            let (again, _) = start(&shelf, 1);
            assert_eq!(again.snapshot().topics.len(), 25);
            create(&again, "later").await;
            assert_eq!(shelf.state().applied_index(), 51);
        });
    }
}

/// A directory that goes away with the test.
pub(super) struct Directory(pub(super) PathBuf);

impl Directory {
    pub(super) fn new(test: &str) -> Directory {
        let path = std::env::temp_dir().join(format!("narad-control-{}-{test}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Directory(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn put(index: u64, topics: &[Arc<TopicMeta>]) -> Batch {
    let changes = topics.iter().cloned().map(Change::PutTopic).collect();
    Batch { applied_index: index, changes }
}

#[test]
fn k14_effects_and_index_come_back_together_after_a_restart() {
    let directory = Directory::new("reopen");
    let (mut store, state) = Store::open(&directory.0).unwrap();
    assert_eq!(state, State::default());
    let mut owned = (*topic("b", 2, 108)).clone();
    owned.owner = Some(Arc::from("ana"));
    store.commit(&put(5, &[topic("a", u64::MAX, 3), Arc::new(owned.clone())])).unwrap();
    store.commit(&Batch { applied_index: 6, changes: vec![Change::RemoveTopic(Arc::from("a"))] }).unwrap();
    store.commit(&put(9, &[])).unwrap(); // refused entries leave their index only
    drop(store);
    let (_store, state) = Store::open(&directory.0).unwrap();
    assert_eq!(state, State::restore([Arc::new(owned)], 9));
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &std::fs::metadata(directory.0.join("state.redb")).unwrap().permissions(),
    );
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn a_file_of_a_newer_release_is_refused_with_what_to_do() {
    let table: redb::TableDefinition<&str, u64> = redb::TableDefinition::new("fsm_meta");
    for (key, value, expected) in
        [("format", FORMAT + 1, "format 3"), ("newest_command_type", Command::NEWEST_TYPE + 1, "command type 11")]
    {
        let directory = Directory::new(key);
        let (mut store, _) = Store::open(&directory.0).unwrap();
        store.commit(&put(1, &[topic("a", 1, 3)])).unwrap();
        drop(store);
        let path = directory.0.join("state.redb");
        let database = redb::Database::open(&path).unwrap();
        let transaction = database.begin_write().unwrap();
        transaction.open_table(table).unwrap().insert(key, value).unwrap();
        transaction.commit().unwrap();
        drop(database);
        let error = Store::open(&directory.0).err().unwrap();
        assert!(error.contains("written by a newer Narad release") && error.contains(expected), "{error}");
        assert!(error.contains("run that release") && error.contains("state.redb"), "{error}");
        // Refused twice in the same words: the first refusal changed nothing.
        assert_eq!(Store::open(&directory.0).err().unwrap(), error);
    }
}

#[test]
fn k16_a_metadata_file_that_is_refused_stays_as_it_was_found() {
    let directory = Directory::new("refused");
    let path = directory.0.join("state.redb");
    drop(Store::open(&directory.0).unwrap());
    let whole = std::fs::read(&path).unwrap();
    let mut flipped = whole.clone();
    flipped[3] ^= 0x10;
    let kinds = [
        Vec::new(),
        whole[..300].to_vec(),
        whole[..4096].to_vec(),
        whole[..whole.len() / 2].to_vec(),
        vec![0x5a; 8192],
        flipped,
    ];
    for damaged in kinds {
        std::fs::write(&path, &damaged).unwrap();
        let error = Store::open(&directory.0).err().unwrap_or_else(|| panic!("{} bytes were taken", damaged.len()));
        assert!(error.contains("state.redb") && !error.contains('\n'), "{error}");
        assert!(std::fs::read(&path).unwrap() == damaged, "{} bytes were changed: {error}", damaged.len());
    }
}

#[test]
fn a_damaged_file_is_refused_in_one_line_that_names_it() {
    let directory = Directory::new("damaged");
    std::fs::write(directory.0.join("state.redb"), vec![0x5a; 8192]).unwrap();
    let error = Store::open(&directory.0).err().unwrap();
    assert!(error.contains("state.redb") && !error.contains('\n'), "{error}");
}

#[test]
fn a_start_that_died_while_making_the_file_is_made_up_for() {
    let directory = Directory::new("halfmade");
    std::fs::write(directory.0.join("state.redb.new"), b"half").unwrap();
    let (_store, state) = Store::open(&directory.0).unwrap();
    assert_eq!(state, State::default());
    assert!(!directory.0.join("state.redb.new").exists());
}

#[test]
fn a_store_whose_file_came_back_goes_on() {
    let directory = Directory::new("heals");
    let (mut store, _) = Store::open(&directory.0).unwrap();
    let path = directory.0.join("state.redb");
    let aside = directory.0.join("aside");
    // Losing the open file is the nearest to a failing disk that a test can do without one.
    store.commit(&put(1, &[topic("a", 1, 3)])).unwrap();
    store.forget_database();
    std::fs::rename(&path, &aside).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert!(store.commit(&put(2, &[topic("b", 2, 3)])).unwrap_err().contains("state.redb"));
    std::fs::remove_dir(&path).unwrap();
    // Nor does it come back empty because somebody removed it (lesson D8.2).
    assert!(store.commit(&put(2, &[topic("b", 2, 3)])).unwrap_err().contains("state.redb"));
    assert!(!path.exists());
    std::fs::rename(&aside, &path).unwrap();
    store.commit(&put(2, &[topic("b", 2, 3)])).unwrap();
    drop(store);
    let (_store, state) = Store::open(&directory.0).unwrap();
    assert_eq!((state.topics().len(), state.applied_index()), (2, 2));
}

#[test]
fn lesson_n73_2_changes_of_different_fields_do_not_undo_each_other() {
    sim::run(31, async {
        let (control, installed) = start(&Shelf::default(), 2);
        let topic = create(&control, "orders").await;
        let alter = |change: TopicChange| {
            let (control, name, incarnation) = (control.clone(), "orders".to_owned(), topic.incarnation);
            rt::spawn(rt::Queue::Foreground, async move {
                control.handle(MetaCommand::AlterTopic { name, incarnation, change }).await
            })
        };
        let changes = [
            TopicChange { retention_ms: Some(3_600_000), ..TopicChange::default() },
            TopicChange { max_in_flight_per_partition: Some(5), ..TopicChange::default() },
            TopicChange { partitions: Some(7), ..TopicChange::default() },
        ];
        for reply in rt::all(changes.map(alter).into_iter().collect()).await {
            assert!(matches!(reply, MetaReply::Altered(_)), "{reply:?}");
        }
        let snapshot = control.snapshot();
        let now = snapshot.topic("orders").expect("it exists");
        let shown = (now.retention_ms, now.max_in_flight_per_partition, now.partitions, now.visibility_timeout_ms);
        assert_eq!((shown, now.incarnation), ((3_600_000, 5, 7, 30_000), topic.incarnation));
        assert_eq!(snapshot.placement[&topic.incarnation].len(), 7);
        assert_eq!(installed.borrow().last().map(|shown| shown.version), Some(snapshot.version), "e23");

        let less = TopicChange { partitions: Some(7), ..TopicChange::default() };
        assert!(matches!(alter(less).await, MetaReply::NotMore { partitions: 7 }));
        let other = MetaCommand::AlterTopic { name: "orders".into(), incarnation: Incarnation(1), change: changes[0] };
        assert!(matches!(control.handle(other).await, MetaReply::Changed));
        let other = MetaCommand::AlterTopic { name: "x".into(), incarnation: Incarnation(1), change: changes[0] };
        assert!(matches!(control.handle(other).await, MetaReply::NotFound));
    });
}
