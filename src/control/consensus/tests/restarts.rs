use std::net::SocketAddr;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use narad_shards::io::Slice;
use narad_shards::meta::Snapshot;
use narad_shards::peer::LocalBoxFuture;
use narad_shards::remote::{CallError, ConnectionId, Hello, Transport};
use narad_shards::rt::{self, sim};
use narad_shards::wire::{Incoming, Outgoing};
use raft::eraftpb::{Entry, HardState};

use super::world::{create, server};
use crate::control::consensus::configuration::{bootstrap_id, Configuration};
use crate::control::consensus::disk::{Changes, Disk, Position};
use crate::control::consensus::files::{open, Files, Opened};
use crate::control::consensus::restart::*;
use crate::control::consensus::{Consensus, Settings};
use crate::control::{apply, Applier, Batch, Change, Command, Install, Metastore, State, Storage, Store};

fn state(applied_index: u64) -> Option<FoundState> {
    Some(FoundState { applied_index, is_replicated: true, is_empty: false })
}

fn log(start_index: u64, last_index: u64) -> Option<FoundLog> {
    Some(FoundLog { start_index, last_index, is_voter: true })
}

fn lone() -> Mode {
    Mode::Lone(server(1))
}

fn bootstrap() -> Mode {
    Mode::Bootstrap { me: server(1).name, voters: (1..=3).map(server).collect() }
}

fn decided(mode: Mode, found: Found) -> Decision {
    decide(&mode, false, &found)
}

fn refuses(decision: Decision, word: &str) {
    match decision {
        Decision::Refuse(why) => assert!(why.contains(word) && why.contains("--restored"), "{why}"),
        other => panic!("{other:?}"),
    }
}

const BOTH_ASIDE: Decision = Decision::JoinEmpty { set_state_aside: true, set_log_aside: true };

#[test]
fn restart_row_1_metadata_without_a_log_is_never_the_base_of_a_new_cluster() {
    let found = || Found { state: state(90), ..Found::default() };
    refuses(decided(bootstrap(), found()), "found a new cluster");
    refuses(decided(lone(), found()), "missing");
    let aside = Decision::JoinEmpty { set_state_aside: true, set_log_aside: false };
    assert_eq!(decided(Mode::Join, found()), aside);
    // Metadata from before there was consensus: a lone node takes it over, nobody else does.
    let plain = FoundState { applied_index: 90, is_replicated: false, is_empty: false };
    let found = || Found { state: Some(plain.clone()), ..Found::default() };
    assert_eq!(decided(lone(), found()), Decision::FoundCluster { start_index: 90 });
    refuses(decided(bootstrap(), found()), "found a new cluster");
}

#[test]
fn restart_row_2_a_log_older_than_the_metadata_is_not_run() {
    let found = || Found { state: state(90), log: log(10, 80), ..Found::default() };
    refuses(decided(bootstrap(), found()), "80");
    refuses(decided(lone(), found()), "older");
    assert_eq!(decided(Mode::Join, found()), BOTH_ASIDE);
}

#[test]
fn restart_row_3_metadata_inside_the_log_is_kept() {
    for applied in [10, 50, 80] {
        let found = Found { state: state(applied), log: log(10, 80), received: Some(80), ..Found::default() };
        for mode in [lone(), bootstrap(), Mode::Join] {
            assert_eq!(decided(mode, found.clone()), Decision::Keep);
        }
    }
}

#[test]
fn restart_row_4_metadata_behind_the_log_is_restored_from_the_snapshot() {
    let found = Found { state: state(5), log: log(10, 80), received: Some(10), made: Some(40), ..Found::default() };
    assert_eq!(decided(lone(), found.clone()), Decision::Restore(Image::Received));
    let found = Found { received: Some(9), ..found };
    assert_eq!(decided(lone(), found.clone()), Decision::Restore(Image::Made));
    let found = Found { made: None, ..found };
    refuses(decided(lone(), found.clone()), "lacks");
    assert_eq!(decided(Mode::Join, found), BOTH_ASIDE);
}

#[test]
fn restart_row_5_missing_metadata_is_restored_from_the_snapshot() {
    let found = Found { log: log(10, 80), made: Some(40), ..Found::default() };
    for mode in [lone(), bootstrap(), Mode::Join] {
        assert_eq!(decided(mode, found.clone()), Decision::Restore(Image::Made));
    }
}

#[test]
fn restart_row_6_missing_metadata_is_made_again_from_a_whole_log() {
    let found = Found { log: log(FIRST_START, 80), ..Found::default() };
    for mode in [lone(), bootstrap(), Mode::Join] {
        assert_eq!(decided(mode, found.clone()), Decision::Rebuild);
    }
}

#[test]
fn restart_row_7_missing_metadata_behind_a_compacted_log_is_not_made_up() {
    let found = Found { log: log(10, 80), ..Found::default() };
    refuses(decided(bootstrap(), found.clone()), "lacks");
    assert_eq!(decided(Mode::Join, found), BOTH_ASIDE);
}

#[test]
fn e36_a_restored_directory_never_votes_by_its_old_log() {
    let found = Found { state: state(50), log: log(10, 80), ..Found::default() };
    for mode in [bootstrap(), Mode::Join] {
        assert_eq!(decide(&mode, true, &found), BOTH_ASIDE);
    }
    assert_eq!(decide(&lone(), true, &found), Decision::FoundCluster { start_index: 50 });
    // An empty one has nothing to give up.
    let nothing = Decision::JoinEmpty { set_state_aside: false, set_log_aside: false };
    assert_eq!(decide(&Mode::Join, false, &Found::default()), nothing);
    assert_eq!(decide(&bootstrap(), false, &Found::default()), Decision::FoundCluster { start_index: FIRST_START });
}

#[test]
fn a_node_without_peers_does_not_run_on_the_directory_of_a_cluster() {
    let nodes = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let cluster = Found { state: state(50), log: log(10, 80), nodes: nodes(&["b", "c", "node-1"]), ..Found::default() };
    for restored in [false, true] {
        let Decision::Refuse(why) = decide(&lone(), restored, &cluster) else { panic!("it runs") };
        assert!(why.contains("b, c, node-1") && why.contains("set cluster.peers (NARAD_CLUSTER_PEERS)"), "{why}");
    }
    assert_eq!(decided(bootstrap(), cluster.clone()), Decision::Keep);
    // Its log is lost, and its metadata still knows the others.
    let metadata = Found { log: None, ..cluster };
    assert!(matches!(decide(&lone(), true, &metadata), Decision::Refuse(_)));
    // One that was never let in, or has another directory's id; one that is alone, or was grown and has only itself yet.
    let own = Found { state: state(50), log: log(10, 80), nodes: nodes(&["node-1"]), ..Found::default() };
    let log = Some(FoundLog { is_voter: false, ..own.log.unwrap() });
    let outside = Found { log, ..own.clone() };
    let Decision::Refuse(why) = decided(lone(), outside.clone()) else { panic!("it runs") };
    assert!(why.contains("waits to be let into a cluster") && why.contains("cluster.peers"), "{why}");
    assert_eq!(decide(&lone(), true, &outside), Decision::FoundCluster { start_index: 50 });
    assert_eq!(decided(lone(), own), Decision::Keep);
}

struct Directory(PathBuf);

impl Directory {
    fn new(test: &str) -> Directory {
        let path = std::env::temp_dir().join(format!("narad-consensus-{test}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Directory(path)
    }

    fn open(&self, mode: &Mode) -> Result<Opened, String> {
        open(&self.0, mode, false, 4711)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn put(store: &mut Store, state: &mut State, index: u64) {
    let applied = apply(state, &create(&format!("t{index}"), index));
    store.commit(&Batch { applied_index: index, changes: applied.changes.clone() }).unwrap();
    state.absorb(index, &applied.changes);
}

fn entries(range: std::ops::RangeInclusive<u64>) -> Vec<Entry> {
    range.map(|index| Entry { index, term: 2, data: vec![index as u8; 5], ..Entry::default() }).collect()
}

async fn write(files: &Files, changes: Changes) {
    files.write(Arc::new(changes)).await.unwrap();
}

#[test]
fn the_log_file_gives_back_what_was_written_and_a_truncated_end_is_gone() {
    sim::run(1, async {
        let directory = Directory::new("log");
        let opened = directory.open(&bootstrap()).unwrap();
        assert_eq!(opened.stored.raft_id, bootstrap_id(&server(1).name));
        assert_eq!(opened.stored.configuration.voters(), 3);
        assert_eq!((opened.stored.start, opened.state.applied_index()), (Position { index: 1, term: 1 }, 1));
        let hard_state = HardState { term: 3, vote: 9, commit: 4 };
        write(&opened.files, Changes { entries: entries(2..=9), ..Changes::default() }).await;
        let entries_again = entries(5..=6);
        write(
            &opened.files,
            Changes { entries: entries_again, hard_state: Some(hard_state.clone()), ..Changes::default() },
        )
        .await;
        let configuration = Configuration { index: 5, ..opened.stored.configuration.clone() };
        let start = Some(Position { index: 3, term: 2 });
        write(&opened.files, Changes { start, configuration: Some(configuration.clone()), ..Changes::default() }).await;
        drop(opened);
        // The state has entry 1 only: what the log dropped is missing there.
        let why = directory.open(&bootstrap()).err().unwrap();
        assert!(why.contains("consensus.redb") && why.contains("lacks"), "{why}");
        let (mut store, mut state) = Store::open(&directory.0).unwrap();
        put(&mut store, &mut state, 4);
        drop(store);
        let opened = directory.open(&bootstrap()).unwrap();
        assert_eq!(opened.stored.entries, entries(4..=6));
        assert_eq!(opened.stored.hard_state, hard_state);
        assert_eq!(opened.stored.configuration, configuration);
        // An install leaves the snapshot's position and nothing else.
        let start = Some(Position { index: 50, term: 7 });
        write(&opened.files, Changes { clear: true, start, ..Changes::default() }).await;
        drop(opened);
        assert!(directory.open(&bootstrap()).is_err());
    });
}

#[test]
fn metadata_from_before_consensus_opens_as_a_cluster_of_one_and_never_without_its_log_again() {
    let directory = Directory::new("adopt");
    let (mut store, mut state) = Store::open(&directory.0).unwrap();
    put(&mut store, &mut state, 7);
    drop(store);
    assert!(directory.open(&bootstrap()).is_err());
    let opened = directory.open(&lone()).unwrap();
    assert_eq!((opened.stored.start.index, opened.stored.raft_id), (7, 4711));
    assert_eq!(opened.state, state);
    drop(opened);
    assert_eq!(directory.open(&lone()).unwrap().state, state);
    std::fs::remove_file(directory.0.join("consensus.redb")).unwrap();
    let why = directory.open(&lone()).err().unwrap();
    assert!(why.contains("missing"), "{why}");
    assert!(!directory.0.join("consensus.redb").exists(), "nothing is touched");
    let opened = open(&directory.0, &lone(), true, 5).unwrap();
    assert_eq!((opened.state, opened.stored.raft_id), (state, 5));
}

#[test]
fn a_directory_that_was_founded_by_three_is_left_alone_by_a_start_without_peers() {
    let directory = Directory::new("of-three");
    drop(directory.open(&bootstrap()).unwrap());
    let why = directory.open(&lone()).err().unwrap();
    assert!(why.contains("node-1, node-2, node-3") && why.contains("cluster.peers"), "{why}");
    assert_eq!(directory.open(&bootstrap()).unwrap().stored.configuration.voters(), 3);
    // A joiner that nobody has let in.
    let directory = Directory::new("of-none");
    drop(directory.open(&Mode::Join).unwrap());
    let why = directory.open(&lone()).err().unwrap();
    assert!(why.contains("waits to be let into a cluster"), "{why}");
}

struct Nobody;

impl Transport for Nobody {
    fn call(&self, _to: SocketAddr, _request: Outgoing) -> LocalBoxFuture<'static, Result<Incoming, CallError>> {
        Box::pin(async { Err(CallError::NotSent("there is nobody".to_owned())) })
    }

    fn send(&self, _to: SocketAddr, _message: Outgoing) {}

    fn hello_of(&self, _to: SocketAddr) -> Option<Arc<Hello>> {
        None
    }

    fn connection_to(&self, _to: SocketAddr) -> Option<ConnectionId> {
        None
    }
}

struct NoShards;

impl Install for NoShards {
    fn install(&self, _snapshot: Arc<Snapshot>) -> LocalBoxFuture<'static, ()> {
        Box::pin(async {})
    }
}

#[test]
fn a_lone_node_on_its_files_compacts_its_log_moves_its_address_and_comes_back_with_everything() {
    let directory = Directory::new("lone");
    for life in 0..4u64 {
        let opened = directory.open(&lone()).unwrap();
        assert_eq!(opened.state.topics().len() as u64, life * 30);
        if life == 2 {
            assert!(opened.stored.start.index > 1, "compacted");
        }
        sim::run(life, async move {
            let Opened { store, state, stored, files } = opened;
            let applier = Applier::start(Metastore::new(store, state, 1), Rc::new(NoShards));
            let mut settings = Settings::new(format!("10.0.0.{life}:7943"));
            (settings.snapshot_entries, settings.trailing_entries) = (10, 3);
            settings.snapshot_check = std::time::Duration::from_millis(1);
            let disk = Rc::new(files);
            let consensus =
                Consensus::start(settings, stored, disk, applier.clone(), Rc::new(Nobody), Arc::default()).unwrap();
            consensus.latch().await.unwrap();
            for number in 0..30 {
                let id = 1 + life * 30 + number;
                consensus.decide(create(&format!("t{id}"), id)).await.unwrap();
                rt::sleep(std::time::Duration::from_millis(2)).await;
            }
            let status = consensus.status();
            // E57: the sole voter records the address that it advertises now.
            assert_eq!(status.configuration.servers[&status.raft_id].address, format!("10.0.0.{life}:7943"));
        });
    }
}

#[test]
fn e37_k15_an_image_is_a_whole_state_and_takes_the_place_of_another() {
    sim::run(2, async {
        let (from, to) = (Directory::new("image-from"), Directory::new("image-to"));
        let (mut leader, mut follower) = (from.open(&lone()).unwrap(), to.open(&Mode::Join).unwrap());
        for index in 2..40 {
            put(&mut leader.store, &mut leader.state, index);
        }
        let (imaged, copy) = (leader.state.clone(), leader.store.begin_image().unwrap());
        put(&mut leader.store, &mut leader.state, 40); // not in it
        copy().unwrap();
        let disk: Rc<dyn Disk> = Rc::new(follower.files.clone());
        let mut offset = 0;
        loop {
            let (piece, length) = leader.files.read_image(offset, 4096).await.unwrap();
            disk.receive(offset, Slice::copy_from(&piece)).await.unwrap();
            offset += piece.len() as u64;
            if offset == length {
                break;
            }
        }
        assert!(disk.receive(1, Slice::copy_from(b"x")).await.is_err(), "a hole");
        assert_eq!(disk.finish_receiving().await.unwrap(), 39);
        // Half an image is none.
        disk.receive(0, Slice::copy_from(&vec![7; 8192])).await.unwrap();
        assert!(disk.finish_receiving().await.is_err());
        // The log says so first; a crash before the image is in place is made up for at the start.
        let start = Some(Position { index: 39, term: 2 });
        let hard_state = Some(HardState { term: 2, vote: 0, commit: 39 });
        write(&follower.files, Changes { clear: true, start, hard_state, ..Changes::default() }).await;
        drop(disk);
        let Opened { store, files, .. } = follower;
        drop((store, files));
        follower = to.open(&Mode::Join).unwrap();
        assert_eq!(follower.state, imaged);
        assert!(!to.0.join("received.redb").exists());
        assert!(follower.store.is_replicated().unwrap());
        // And while it runs.
        std::fs::copy(from.0.join("snapshot.redb"), to.0.join("received.redb")).unwrap();
        assert_eq!(follower.store.install_image().unwrap(), imaged);
    });
}

#[test]
fn restart_row_8_metadata_of_a_newer_release_is_refused_wherever_it_lies_and_left_untouched() {
    sim::run(3, async {
        let newer = |store: &mut Store, index| {
            let changes = vec![Change::SetNewestCommandType(Command::NEWEST_TYPE + 1)];
            store.commit(&Batch { applied_index: index, changes }).unwrap();
        };
        // The state itself, and a snapshot that was received and is not in its place yet.
        for in_image in [false, true] {
            let (directory, leader) = (Directory::new("newer"), Directory::new("newer-leader"));
            let mut opened = directory.open(&Mode::Join).unwrap();
            if in_image {
                let mut sender = leader.open(&lone()).unwrap();
                newer(&mut sender.store, 39);
                sender.store.begin_image().unwrap()().unwrap();
                std::fs::copy(leader.0.join("snapshot.redb"), directory.0.join("received.redb")).unwrap();
                let start = Some(Position { index: 39, term: 2 });
                write(&opened.files, Changes { clear: true, start, ..Changes::default() }).await;
            } else {
                newer(&mut opened.store, 2);
            }
            drop(opened);
            let contents = || {
                let entries = std::fs::read_dir(&directory.0).unwrap().map(|entry| entry.unwrap());
                let read = entries.map(|entry| (entry.file_name(), std::fs::read(entry.path()).unwrap()));
                let read = read.filter(|(name, _)| name.to_string_lossy().ends_with(".redb")); // not the ballast
                                                                                               // redb writes as it opens what it may open.
                let looked = read.map(|(name, bytes)| {
                    let is_refused = name == "state.redb" && !in_image;
                    (name, is_refused.then_some(bytes))
                });
                looked.collect::<std::collections::BTreeMap<_, _>>()
            };
            let before = contents();
            for mode in [Mode::Join, bootstrap(), lone()] {
                let why = directory.open(&mode).err().expect("refused");
                assert!(why.contains("newer Narad release") && why.contains("command type 11"), "{mode:?}: {why}");
                assert!(contents() == before, "{mode:?}, in an image: {in_image}");
            }
        }
    });
}
