//! Every refusal of a start, on the real file system.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use narad_shards::io::system;

use crate::config::{self, Config, Sources};
use crate::control::Store;

use super::data_dir::{list_ingress, plan_identity, DataDir, Identity};
use super::lock::Patience;
use super::*;

/// A directory that goes away with the test.
struct Directory(PathBuf);

impl Directory {
    fn new(test: &str) -> Directory {
        let path = std::env::temp_dir().join(format!("narad-node-{}-{test}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Directory(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn settings(directory: &Path, more: &[(&'static str, &str)]) -> Config {
    let mut flags = vec![
        ("storage.data_dir", directory.display().to_string()),
        ("http.addr", "127.0.0.1:0".to_owned()),
        ("runtime.shards", "2".to_owned()),
        ("runtime.memory", "128MiB".to_owned()),
    ];
    flags.extend(more.iter().map(|(key, value)| (*key, (*value).to_owned())));
    config::load(&Sources { flags, dev: true, ..Sources::default() }).unwrap()
}

fn start(directory: &Path) -> Result<Prepared, Refusal> {
    prepare(settings(directory, &[]), &mut |_| {})
}

/// The text of the refusal; a `Prepared` has no `Debug`.
fn refusal(result: Result<Prepared, Refusal>) -> String {
    match result {
        Ok(_) => panic!("started"),
        Err(refusal) => {
            assert!(!refusal.line().contains('\n'), "one line: {}", refusal.line());
            refusal.line()
        }
    }
}

#[test]
fn a_first_start_makes_a_private_directory_and_the_next_one_finds_it() {
    let directory = Directory::new("first");
    let first = start(&directory.0.join("deep/data")).unwrap();
    assert!(first.identity.first_start);
    assert_ne!(first.identity.store_id, 0);
    assert_ne!(first.http_addr.port(), 0);
    assert_eq!((first.shards(), first.cpus.shards.len()), (2, 2));
    assert!(first.snapshot.topics.is_empty() && first.ingress.numbers.is_empty());
    // T21
    let root = first.data.root.clone();
    let mode = |path: PathBuf| fs::metadata(&path).unwrap().permissions().mode() & 0o777;
    for path in ["", "topics", "ingress", "metastore"] {
        assert_eq!(mode(root.join(path)), 0o700, "{path:?}");
    }
    for path in ["lock", "store-id", "node-id", "metastore/state.redb"] {
        assert_eq!(mode(root.join(path)), 0o600, "{path}");
    }
    let identity = first.identity.clone();
    drop(first);
    let second = start(&root).unwrap();
    assert_eq!(second.identity, Identity { first_start: false, ..identity });
}

#[test]
fn what_was_prepared_can_move_to_the_threads_that_use_it() {
    fn moves<T: Send + 'static>() {}
    moves::<Prepared>();
    // Reading the CPUs and making a trial ring pins nothing: a second start sees the same ones.
    let allowed = system::allowed_cpus().unwrap();
    let directory = Directory::new("unpinned");
    let prepared = start(&directory.0).unwrap();
    assert_eq!(system::allowed_cpus().unwrap(), allowed);
    assert!(prepared.cpus.allowed.iter().all(|cpu| allowed.contains(&cpu)));
}

#[test]
fn e12_two_nodes_never_share_a_directory() {
    let directory = Directory::new("shared");
    let first = start(&directory.0).unwrap();
    let patience = Patience {
        between: std::time::Duration::from_millis(1),
        say_after: std::time::Duration::ZERO,
        give_up_after: std::time::Duration::from_millis(5),
    };
    let second = lock::lock_data_directory(&first.data.root, patience, &mut |_| {});
    assert!(second.err().unwrap().to_string().contains("is in use by process"));
}

#[test]
fn e50_the_stored_node_id_wins_and_a_different_one_is_refused() {
    let directory = Directory::new("nodeid");
    let data = DataDir::create(&directory.0).unwrap();
    data.create_inside().unwrap();
    let plan = |configured, host| plan_identity(&data, configured, host);
    // Nothing is stored: configured, else host name, else a refusal that says what to set.
    assert!(plan(None, "bad host!").unwrap_err().to_string().contains("set cluster.node_id"));
    assert!(plan(None, "").unwrap_err().to_string().contains("set cluster.node_id"));
    plan(Some("n1"), "host-a").unwrap();
    drop(Store::open(&data.metastore()).unwrap());
    let identity = plan(None, "host-a").unwrap().carry_out(&data).unwrap();
    assert_eq!((identity.node_id.as_str(), identity.first_start), ("host-a", true));
    let again = plan(None, "renamed-host").unwrap().carry_out(&data).unwrap();
    assert_eq!((again.node_id.as_str(), again.store_id), ("host-a", identity.store_id));
    assert_eq!(plan(Some("host-a"), "x").unwrap().carry_out(&data).unwrap().node_id, "host-a");
    let text = plan(Some("n2"), "x").unwrap_err().line();
    assert!(text.starts_with("narad: config: cluster.node_id (n2)") && text.contains("(host-a)"), "{text}");
}

#[test]
fn k16_a_directory_that_lost_a_part_is_refused_and_left_alone() {
    type Case<'a> = (&'a str, &'a dyn Fn(&Path), &'a str);
    let cases: &[Case] = &[
        ("notopics", &|root| fs::remove_dir_all(root.join("topics")).unwrap(), "topics is missing"),
        ("noingress", &|root| fs::remove_dir_all(root.join("ingress")).unwrap(), "ingress is missing"),
        ("nostate", &|root| fs::remove_dir_all(root.join("metastore")).unwrap(), "metastore/state.redb is missing"),
        (
            "noid",
            &|root| {
                fs::create_dir(root.join("ingress/0")).unwrap();
                fs::remove_file(root.join("store-id")).unwrap();
            },
            "its store-id file is missing",
        ),
        ("badid", &|root| fs::write(root.join("store-id"), "not an id\n").unwrap(), "does not hold a store id"),
        ("zeroid", &|root| fs::write(root.join("store-id"), "0000000000000000\n").unwrap(), "does not hold a store id"),
        ("badstate", &|root| fs::write(root.join("metastore/state.redb"), vec![7; 4096]).unwrap(), "metastore: "),
    ];
    for (test, damage, expected) in cases {
        let directory = Directory::new(test);
        drop(start(&directory.0).unwrap());
        damage(&directory.0);
        for _ in 0..2 {
            let text = refusal(start(&directory.0));
            assert!(text.starts_with("narad: cannot start: ") && text.contains(expected), "{test}: {text}");
        }
    }
}

#[test]
fn a_first_start_that_died_before_its_store_id_is_repeated() {
    let directory = Directory::new("died");
    drop(start(&directory.0).unwrap());
    fs::remove_file(directory.0.join("store-id")).unwrap();
    fs::write(directory.0.join("store-id.new"), "12").unwrap();
    assert!(start(&directory.0).unwrap().identity.first_start);
}

#[test]
fn data_directories_that_cannot_be_used_are_named() {
    let directory = Directory::new("unusable");
    fs::create_dir_all(&directory.0).unwrap();
    let file = directory.0.join("file");
    fs::write(&file, "x").unwrap();
    for path in [file.clone(), file.join("below")] {
        let text = refusal(start(&path));
        assert!(text.contains("storage.data_dir") && text.contains("no directory"), "{text}");
    }
    let text = refusal(start(Path::new("/proc/narad")));
    assert!(text.contains("storage.data_dir (/proc/narad)"), "{text}");
    for (errno, expected) in [
        (libc::EACCES, "not writable for user id"),
        (libc::EROFS, "read-only"),
        (libc::ENOSPC, "no space left"),
        (libc::EIO, "cannot be used"),
    ] {
        let text = data_dir::not_writable(&directory.0, &std::io::Error::from_raw_os_error(errno)).to_string();
        assert!(text.contains(expected) && text.contains("storage.data_dir"), "{text}");
    }
}

#[test]
fn wal_directories_of_earlier_shard_counts_are_listed() {
    let directory = Directory::new("ingress");
    let data = DataDir::create(&directory.0).unwrap();
    data.create_inside().unwrap();
    for name in ["0", "10", "2", "3.drained", "007", "x", "70000", "-1"] {
        fs::create_dir(data.ingress().join(name)).unwrap();
    }
    let mut warnings = Vec::new();
    let found = list_ingress(&data, &mut warnings).unwrap();
    assert_eq!(found.numbers, [0, 2, 10]);
    assert_eq!(warnings.len(), 4, "{warnings:?}");
}

#[test]
fn settings_that_contradict_the_machine_are_refused_before_the_directory_is_touched() {
    let directory = Directory::new("contradicts");
    let cases: &[(&[(&'static str, &str)], &str)] = &[
        (&[("runtime.shards", "1"), ("runtime.cpus", "65000")], "narad: config: runtime.cpus names CPU 65000"),
        (&[("runtime.control_cpu", "65000")], "narad: config: runtime.control_cpu names CPU 65000"),
        (&[("runtime.memory", "4096GiB")], "narad: config: runtime.memory (4TiB) is above"),
        (&[("runtime.memory", "1MiB")], "narad: config: runtime.memory (1MiB) leaves"),
    ];
    for (more, expected) in cases {
        let text = refusal(prepare(settings(&directory.0, more), &mut |_| {}));
        assert!(text.starts_with(expected), "{text}");
        assert!(!directory.0.exists());
    }
    let holder = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = holder.local_addr().unwrap().to_string();
    let text = refusal(prepare(settings(&directory.0, &[("http.addr", &taken)]), &mut |_| {}));
    assert!(text.contains(&format!("http.addr ({taken}): the port is taken")), "{text}");
    assert!(!directory.0.exists());
}

#[test]
fn the_metrics_port_is_not_the_api_port_by_another_name() {
    let directory = Directory::new("two-names");
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for (api, metrics) in [("127.0.0.1", "localhost"), ("localhost", "127.0.0.1"), ("127.0.0.1", "0.0.0.0")] {
        let [api, metrics] = [api, metrics].map(|host| format!("{host}:{}", free.port()));
        let asked = settings(&directory.0, &[("http.addr", &api), ("http.metrics_addr", &metrics)]);
        let text = refusal(prepare(asked, &mut |_| {}));
        assert!(text.contains("are one address") && !directory.0.exists(), "{metrics}: {text}");
    }
}

#[test]
fn a_refused_start_leaves_nothing_new() {
    let directory = Directory::new("nothing-new");
    let holder = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = holder.local_addr().unwrap().port().to_string();
    let taken = format!("127.0.0.1:{port}");
    let refused = |data: &Path, more: &[(&'static str, &str)]| refusal(prepare(settings(data, more), &mut |_| {}));
    let cases: &[(&'static str, &str)] = &[
        ("http.addr", &taken),
        ("http.metrics_addr", &taken),
        ("runtime.shard_ports", &port),
        ("runtime.shard_ports", "65535"),
    ];
    // Not even the directories above it.
    let data = directory.0.join("deep/er/data");
    for case in cases {
        refused(&data, &[*case]);
        assert!(!directory.0.exists(), "{case:?}");
    }
    // A directory that was there stays, as empty as it was.
    fs::create_dir_all(&data).unwrap();
    refused(&data, &cases[..1]);
    assert_eq!(fs::read_dir(&data).unwrap().count(), 0);
    let names = || {
        let mut names: Vec<_> = fs::read_dir(&data).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    // Refused half-way: what was made by then goes, and what was there before stays.
    fs::write(data.join("ingress"), b"no directory").unwrap();
    assert!(start(&data).is_err());
    assert_eq!(names(), ["ingress"]);
    fs::remove_file(data.join("ingress")).unwrap();
    fs::write(data.join("node-id"), b"n1\n").unwrap();
    let text = refused(&data, &[("cluster.node_id", "n2")]);
    assert!(text.contains("cluster.node_id (n2)"), "{text}");
    assert_eq!(names(), ["node-id"]);
    // What an earlier life left is all there after a refusal, and the next start finds it.
    let first = prepare(settings(&data, &[]), &mut |_| {}).unwrap();
    let (identity, before) = (first.identity.clone(), names());
    drop(first);
    refused(&data, &cases[..1]);
    assert_eq!(names(), before);
    assert_eq!(start(&data).unwrap().identity.store_id, identity.store_id);
}
