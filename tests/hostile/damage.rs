//! Truncated, flipped, foreign, missing and newer files in the data directory. A start either refuses, naming the file
//! and what to do, or recovers by the rule of that file; a wrong byte is never served, and nothing vanishes silently.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

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
            let target = format!("/v1/topics/t/consume?partition={partition}&max=100&wait=300ms");
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
    let complained = text.lines().any(|line| line.contains("\"level\":\"ERROR\""));
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
    let mut wrong = Vec::new();
    for (pattern, damages) in cases {
        for damage in *damages {
            let scratch = Scratch::new(&format!("{name}-case"));
            let data = past.copy(&scratch);
            let path = find(&data, pattern);
            damage.apply(&path);
            let file = path.strip_prefix(&data).unwrap().to_string_lossy().into_owned();
            match judge(&past, &data, &file) {
                Ok(outcome) => println!("{file} {damage:?}: {outcome}"),
                Err(fault) => wrong.push(format!("{file} {damage:?}: {fault}")),
            }
        }
    }
    assert!(wrong.is_empty(), "{} faults:\n{}", wrong.len(), wrong.join("\n\n"));
}

use Damage::*;

const MATRIX: &[Damage] = &[Delete, Empty, Half, Flip(0), Flip(300), Flip(600), Flip(1000), Foreign, Directory];

#[test]
fn after_a_clean_stop() {
    run(
        "damage-clean",
        false,
        &[
            ("topics/t/p00000/*", MATRIX),
            ("topics/t/p00000/hwm", MATRIX),
            ("topics/t/p00000/consumer.offset", MATRIX),
            ("topics/t/p00000/consumer.ahead", MATRIX),
            ("topics/t/incarnation", MATRIX),
        ],
    );
}

#[test]
fn ids_and_metadata() {
    run(
        "damage-ids",
        false,
        &[
            ("store-id", MATRIX),
            ("node-id", MATRIX),
            ("metastore/state.redb", MATRIX),
            ("ingress/0/*", MATRIX),
            ("ingress/0/checkpoint", MATRIX),
        ],
    );
}

#[test]
fn after_a_kill() {
    run(
        "damage-killed",
        true,
        &[
            ("ingress/0/*", MATRIX),
            ("ingress/0/checkpoint", MATRIX),
            ("topics/t/p00001/*", MATRIX),
            ("topics/t/p00001/consumer.offset", MATRIX),
            ("topics/t/p00001/consumer.ahead", MATRIX),
        ],
    );
}
