//! Truncated, flipped, foreign, missing and newer files in the data directory. A start either refuses, naming the file
//! and what to do, or recovers by the rule of that file; a wrong byte is never served, and nothing vanishes silently.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::Mutex;

use narad_harness::process::Broker;

use crate::support::{binary, Node, Scratch, PATIENCE};

const ARGUMENTS: [&str; 5] = ["--no-pin", "--memory", "256MiB", "--shards", "1"];
const MESSAGES: usize = 30;

/// A data directory with messages in it, some acked, left by a clean stop or a kill.
struct Past {
    scratch: Scratch,
    /// Payload, and whether it was acked.
    messages: BTreeMap<String, bool>,
}

fn past(name: &str, killed: bool) -> Past {
    let mut node = Node::start(name, &["--shards", "1"]);
    node.create("t", "");
    let mut client = node.client();
    let mut messages = BTreeMap::new();
    for n in 0..MESSAGES {
        let body = format!("\"{n}-{}\"", "abc".repeat(n * 20));
        assert_eq!(client.post("/v1/topics/t/produce", body.as_bytes()).unwrap().status, 202);
        messages.insert(body, false);
    }
    for _ in 0..MESSAGES / 3 {
        let message = client.get("/v1/topics/t/consume?wait=5s").unwrap().json();
        let handle = message["receipt_handle"].as_str().unwrap();
        assert_eq!(client.post(&format!("/v1/topics/t/ack?receipt_handle={handle}"), b"").unwrap().status, 204);
        messages.insert(message["payload"].to_string(), true);
    }
    if killed {
        // Past the interval of the position writes.
        std::thread::sleep(std::time::Duration::from_millis(1300));
        node.broker.kill().unwrap();
    } else {
        node.stop();
    }
    Past { scratch: node.scratch, messages }
}

impl Past {
    fn copy(&self, into: &Scratch) -> PathBuf {
        let data = into.path("data");
        let copied = Command::new("cp")
            .args(["-r", "--sparse=always", "--reflink=auto"])
            .arg(self.scratch.path("data"))
            .arg(&data)
            .status()
            .unwrap();
        assert!(copied.success());
        data
    }
}

#[derive(Clone, Copy, Debug)]
enum Damage {
    Delete,
    Empty,
    Half,
    /// The byte at this many thousandths of what the file holds, one bit of it.
    Flip(u64),
    Foreign,
    /// Something that no file is expected to be.
    Directory,
}

/// End of the last byte that is not zero.
fn used_bytes(path: &Path) -> u64 {
    let bytes = fs::read(path).unwrap();
    bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last as u64 + 1)
}

impl Damage {
    fn apply(self, path: &Path) {
        let used = used_bytes(path);
        let file = fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
        match self {
            Damage::Delete => fs::remove_file(path).unwrap(),
            Damage::Empty => file.set_len(0).unwrap(),
            Damage::Half => file.set_len(used / 2).unwrap(),
            Damage::Flip(thousandths) => {
                let at = (used * thousandths / 1000).min(used.saturating_sub(1));
                let mut byte = [0];
                file.read_exact_at(&mut byte, at).unwrap();
                file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
            }
            Damage::Foreign => {
                let mut random = narad_harness::random::Random::new(7);
                let noise: Vec<u8> = (0..used.clamp(16, 64 << 10)).map(|_| random.draw() as u8).collect();
                file.write_all_at(&noise, 0).unwrap();
            }
            Damage::Directory => {
                fs::remove_file(path).unwrap();
                fs::create_dir(path).unwrap();
            }
        }
    }
}

/// Starts on damaged data and judges. `Err` says what is wrong with what happened.
fn judge(past: &Past, data: &Path, file: &str) -> Result<String, String> {
    let log = data.with_extension("log");
    let _ = fs::remove_file(&log);
    let mut broker = Broker::spawn(binary(), data, &ARGUMENTS).unwrap();
    if broker.wait_ready(PATIENCE).is_err() {
        let status = broker.wait_exit(PATIENCE).map_err(|e| format!("neither ready nor gone: {e}"))?;
        let text = broker.log_text();
        let last = text.lines().last().unwrap_or_default().to_owned();
        if text.contains("panicked") {
            return Err(format!("somebody else's panic is what the operator reads:\n{text}"));
        }
        let name = file.rsplit('/').next().unwrap();
        if status.code() != Some(1) || !last.starts_with("narad: ") {
            return Err(format!("{status}, no refusal in one line:\n{text}"));
        }
        if !last.contains(name) && !last.contains(file) {
            return Err(format!("the refusal does not name the file: {last}"));
        }
        return Ok(format!("refused: {last}"));
    }
    let mut client = broker.client();
    let mut seen = BTreeMap::new();
    let mut unreadable = false;
    for partition in 0..3 {
        loop {
            // What a kill left in the WAL may still be on its way at first.
            let wait_ms = if partition == 0 { 400 } else { 20 };
            let target = format!("/v1/topics/t/consume?partition={partition}&max=100&wait={wait_ms}ms");
            let answer = client.get(&target).map_err(|e| format!("{e}:\n{}", broker.log_text()))?;
            match answer.status {
                200 => {}
                204 => break,
                500 | 503 => {
                    unreadable = true;
                    break;
                }
                404 => return Err("the topic is gone".to_owned()),
                other => return Err(format!("{other} {}", answer.text())),
            }
            for message in answer.json()["messages"].as_array().unwrap() {
                let payload = message["payload"].to_string();
                if !past.messages.contains_key(&payload) {
                    return Err(format!("a wrong byte: {payload}"));
                }
                *seen.entry(payload).or_insert(0) += 1;
            }
        }
    }
    let missing = past.messages.iter().filter(|(payload, acked)| !**acked && !seen.contains_key(*payload)).count();
    let text = broker.log_text();
    let complained = text.lines().any(|line| line.contains("\"level\":\"ERROR\"") || line.contains("the log has lost"));
    if missing > 0 && !complained {
        return Err(format!("{missing} messages vanished without an error:\n{text}"));
    }
    // Whatever was found, the broker is a broker.
    let produced = client.post("/v1/topics/t/produce", b"\"0-\"").map_err(|e| e.to_string())?.status;
    if produced != 202 {
        return Err(format!("produce answers {produced}"));
    }
    let status = broker.stop(PATIENCE).map_err(|e| format!("{e}:\n{text}"))?;
    if status.code() != Some(0) {
        return Err(format!("the stop exits with {status}:\n{}", broker.log_text()));
    }
    let warned = text.lines().filter(|l| l.contains("\"WARN\"") || l.contains("\"ERROR\"")).count();
    Ok(format!("started: {} seen, {missing} missing, unreadable {unreadable}, {warned} warnings", seen.len()))
}

fn find(data: &Path, pattern: &str) -> PathBuf {
    match pattern.strip_suffix("*") {
        None => data.join(pattern),
        Some(folder) => {
            let mut entries: Vec<PathBuf> =
                fs::read_dir(data.join(folder)).unwrap().map(|entry| entry.unwrap().path()).collect();
            entries.retain(|path| path.extension().is_some_and(|e| e == "log" || e == "wal"));
            entries.sort();
            entries.pop().unwrap()
        }
    }
}

fn run(name: &str, killed: bool, cases: &[(&str, &[Damage])]) {
    let past = past(name, killed);
    let all: Vec<(&str, Damage)> =
        cases.iter().flat_map(|(pattern, damages)| damages.iter().map(|damage| (*pattern, *damage))).collect();
    let (next, wrong) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    // Most of a case is waiting for the disk.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| loop {
                let index = next.fetch_add(1, Relaxed);
                let Some((pattern, damage)) = all.get(index) else { return };
                let scratch = Scratch::new(&format!("{name}-case-{index}"));
                let data = past.copy(&scratch);
                let path = find(&data, pattern);
                damage.apply(&path);
                let file = path.strip_prefix(&data).unwrap().to_string_lossy().into_owned();
                match judge(&past, &data, &file) {
                    Ok(outcome) => println!("{file} {damage:?}: {outcome}"),
                    Err(fault) => wrong.lock().unwrap().push(format!("{file} {damage:?}: {fault}")),
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{} faults:\n{}", wrong.len(), wrong.join("\n\n"));
}

use Damage::*;

/// All that can happen to one file, and the two that differ most.
const ALL: &[Damage] = &[Delete, Empty, Half, Flip(0), Flip(400), Flip(1000), Foreign, Directory];
const SOME: &[Damage] = &[Flip(500), Foreign];

#[test]
fn s46_s57_a_damaged_partition_log_is_mended_or_refused_alone() {
    run("damage-log", false, &[("topics/t/p00000/*", ALL)]);
}

#[test]
fn s27_s56_a_killed_log_that_somebody_removed_emptied_or_cut_is_said_aloud() {
    run("damage-killed-log", true, &[("topics/t/p00000/*", &[Delete, Empty, Half])]);
}

#[test]
fn e6_e8_a_damaged_wal_refuses_the_start_and_a_damaged_checkpoint_counts_as_none() {
    run(
        "damage-wal",
        true,
        &[("ingress/0/*", ALL), ("ingress/0/checkpoint", &[Delete, Half, Flip(500), Foreign, Directory])],
    );
}

#[test]
fn s47_c78_small_files_of_a_partition_never_hide_a_message() {
    run(
        "damage-small",
        false,
        &[
            ("topics/t/p00000/hwm", SOME),
            ("topics/t/p00000/consumer.offset", SOME),
            ("topics/t/p00000/consumer.ahead", &[Delete, Half, Flip(20), Foreign, Directory]),
            ("topics/t/incarnation", &[Delete, Flip(500)]),
        ],
    );
}

#[test]
fn k16_ids_and_metadata_are_never_guessed() {
    run(
        "damage-ids",
        false,
        &[
            ("store-id", &[Delete, Empty, Flip(0)]),
            ("node-id", &[Empty, Foreign]),
            ("metastore/state.redb", &[Delete, Empty, Half, Flip(0), Flip(400), Foreign]),
        ],
    );
}

/// A bit of a topic's row: nothing else in the file would notice.
#[test]
fn a_flipped_bit_in_a_topics_row_is_refused() {
    let past = past("damage-row", false);
    let scratch = Scratch::new("damage-row-case");
    let data = past.copy(&scratch);
    let path = data.join("metastore/state.redb");
    let mut bytes = fs::read(&path).unwrap();
    let row = b"\"retention_ms\":604800000";
    let places: Vec<usize> = bytes.windows(row.len()).enumerate().filter(|(_, w)| w == row).map(|(at, _)| at).collect();
    assert!(!places.is_empty());
    for at in places {
        bytes[at + row.len() - 9] ^= 1;
    }
    fs::write(&path, &bytes).unwrap();
    let outcome = judge(&past, &data, "state.redb").unwrap();
    assert!(outcome.starts_with("refused") && outcome.contains("restore the whole data directory"), "{outcome}");
}

/// Writes `format` into a block and its checksum behind it, as a newer release would.
fn reformat(path: &Path, at: u64, format: u32, crc_at: u64) {
    let file = fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    file.write_all_at(&format.to_le_bytes(), at).unwrap();
    let mut covered = vec![0; crc_at as usize];
    file.read_exact_at(&mut covered, 0).unwrap();
    file.write_all_at(&crc32c::crc32c(&covered).to_le_bytes(), crc_at).unwrap();
}

#[test]
fn n58_what_a_newer_release_wrote_is_left_to_it() {
    let past = past("damage-newer", true);
    // A checkpoint may be doubted at no loss: everything in the WAL is dispatched again.
    let scratch = Scratch::new("damage-newer-checkpoint");
    let data = past.copy(&scratch);
    reformat(&data.join("ingress/0/checkpoint"), 8, 2, 44);
    let outcome = judge(&past, &data, "checkpoint").unwrap();
    assert!(outcome.starts_with("started: 30 seen"), "{outcome}");
    let log = fs::read_to_string(data.with_extension("log")).unwrap();
    assert!(log.contains("a newer release wrote it"), "{log}");
    // A segment may not.
    let scratch = Scratch::new("damage-newer-wal");
    let data = past.copy(&scratch);
    let segment = find(&data, "ingress/0/*");
    reformat(&segment, 8, 2, 60);
    let before = fs::metadata(&segment).unwrap().modified().unwrap();
    let outcome = judge(&past, &data, "00000001.wal").unwrap();
    assert!(
        outcome.contains("holds format 2 at byte 0, which this release does not know; start the newer release"),
        "{outcome}"
    );
    assert_eq!(fs::metadata(&segment).unwrap().modified().unwrap(), before);
}
