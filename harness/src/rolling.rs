//! A rolling restart under load: every node is told to stop, and started again, one after the other, while clients that
//! know all of them produce, consume and ack.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::cluster::Cluster;
use crate::ledger::{check_payload, payload};
use crate::retry::{Done, Nodes};

const WORKERS: u64 = 3;
/// Between two calls of a producer: the point is the restarts, not the load.
const PAUSE: Duration = Duration::from_millis(10);
/// How long every node has been ready before the next one is stopped, as docs/cluster.md tells operators. A client leaves
/// a node that failed it five times in a row alone for 2 s, also once it is back: with shorter pauses the last node is
/// stopped while it is the only one that some clients still ask.
const SETTLED: Duration = Duration::from_secs(5);
/// How long that may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long everything may take to arrive after the last restart.
const DRAIN: Duration = Duration::from_secs(30);

/// What clients saw.
#[derive(Debug, Default)]
pub struct Seen {
    pub produces: u64,
    pub consumes: u64,
    pub acks: u64,
    /// Attempts beyond the first: without any, nobody noticed a restart.
    pub retries: u64,
    /// Calls that failed for their caller after all attempts.
    pub failed: Vec<String>,
    /// Acks answered `410` or `503` to the end, because the node that had leased the message has restarted since: the
    /// message comes again.
    pub leases_returned: u64,
    /// Those of them that were answered `503`.
    pub owners_away: u64,
    pub accepted: BTreeSet<u64>,
    pub received: BTreeSet<u64>,
    /// When the ack of a copy was confirmed.
    acked: BTreeMap<(u64, u64), Instant>,
    pub came_back_after_ack: u64,
    pub damaged: u64,
}

/// One restart.
#[derive(Clone, Copy, Debug)]
pub struct Restart {
    pub node: usize,
    /// From SIGTERM to the end of the process.
    pub stop: Duration,
    /// From its start until it was ready.
    pub start: Duration,
    /// Calls that ended well while it was away.
    pub calls: u64,
}

struct Load {
    topic: String,
    seen: Mutex<Seen>,
    calls: AtomicU64,
    next_id: AtomicU64,
    producing: AtomicBool,
    consuming: AtomicBool,
    /// Since when the node that is restarted now is away.
    away: Mutex<Vec<(Instant, Option<Instant>)>>,
}

impl Load {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn note(&self, what: &str, done: &Done) -> bool {
        let ok = done.is_success();
        let mut seen = self.seen();
        seen.retries += u64::from(done.attempts - 1);
        if ok {
            self.calls.fetch_add(1, Ordering::Relaxed);
        } else {
            seen.failed.push(format!("{what}: {} after {} attempts", done.text(), done.attempts));
        }
        ok
    }

    /// Whether a node was away at any time since `since`.
    fn was_away_since(&self, since: Instant) -> bool {
        let away = self.away.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        away.iter().any(|(_, back)| back.is_none_or(|back| back >= since))
    }
}

fn produce(load: &Load, mut nodes: Nodes) {
    let target = format!("/v1/topics/{}/produce", load.topic);
    while load.producing.load(Ordering::Relaxed) {
        let id = load.next_id.fetch_add(1, Ordering::Relaxed);
        let headers = [("Content-Type", "application/octet-stream")];
        let done = nodes.call("POST", &target, &headers, &payload(id, 200 + (id % 800) as usize));
        load.seen().produces += 1;
        if load.note("produce", &done) {
            load.seen().accepted.insert(id);
        }
        thread::sleep(PAUSE);
    }
}

fn consume(load: &Load, mut nodes: Nodes) {
    let target = format!("/v1/topics/{}/consume?wait=500ms", load.topic);
    while load.consuming.load(Ordering::Relaxed) {
        let asked = Instant::now();
        let done = nodes.call("GET", &target, &[("X-Narad-Client", "harness")], b"");
        load.seen().consumes += 1;
        if !load.note("consume", &done) {
            thread::sleep(PAUSE);
            continue;
        }
        let Some(answer) = done.last.as_ref().ok().filter(|answer| answer.status == 200) else { continue };
        let message = answer.json();
        let place = (message["partition"].as_u64().unwrap_or(u64::MAX), message["offset"].as_u64().unwrap_or(u64::MAX));
        {
            let mut seen = load.seen();
            match check_payload(message["payload"].as_str().unwrap_or_default().as_bytes()) {
                Ok(id) => drop(seen.received.insert(id)),
                Err(_) => seen.damaged += 1,
            }
            if seen.acked.get(&place).is_some_and(|acked| *acked < asked) {
                seen.came_back_after_ack += 1;
            }
        }
        ack(load, &mut nodes, message["receipt_handle"].as_str().unwrap_or_default(), place, asked);
    }
}

fn ack(load: &Load, nodes: &mut Nodes, handle: &str, place: (u64, u64), leased: Instant) {
    let target = format!("/v1/topics/{}/ack?receipt_handle={handle}", load.topic);
    let done = nodes.call("POST", &target, &[("Content-Type", "application/json")], b"");
    let mut seen = load.seen();
    seen.acks += 1;
    if done.status() == 204 {
        seen.acked.insert(place, Instant::now());
    }
    // A lease lives in its node's memory. Whoever held one over the restart is told so, and gets the message again.
    if matches!(done.status(), 410 | 503) && !done.is_success() && load.was_away_since(leased) {
        seen.leases_returned += 1;
        seen.owners_away += u64::from(done.status() == 503);
        seen.retries += u64::from(done.attempts - 1);
        return;
    }
    drop(seen);
    load.note("ack", &done);
}

fn start(load: &Arc<Load>, cluster: &Cluster) -> Vec<JoinHandle<()>> {
    let mut workers = Vec::new();
    for worker in 0..WORKERS {
        let nodes = |seed| Nodes::new(&cluster.addresses, Duration::from_secs(10), seed);
        let (produces, consumes) = (nodes(worker + 1), nodes(worker + 100));
        let (one, other) = (load.clone(), load.clone());
        workers.push(thread::spawn(move || produce(&one, produces)));
        workers.push(thread::spawn(move || consume(&other, consumes)));
    }
    workers
}

fn restart(cluster: &Cluster, load: &Load, node: usize) -> io::Result<Restart> {
    let (began, before) = (Instant::now(), load.calls.load(Ordering::Relaxed));
    load.away.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push((began, None));
    cluster.stop(node)?;
    let stop = began.elapsed();
    cluster.act("start", node)?;
    let ended = Instant::now();
    if let Some(last) = load.away.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).last_mut() {
        last.1 = Some(ended);
    }
    let calls = load.calls.load(Ordering::Relaxed) - before;
    cluster.wait_settled(SETTLED, PATIENCE)?;
    Ok(Restart { node, stop, start: ended - began - stop, calls })
}

/// Restarts every node in turn, `rounds` times, the next when all have been ready for a while. Every node knows the topic.
pub fn roll(cluster: &Cluster, topic: &str, rounds: u32) -> io::Result<(Seen, Vec<Restart>)> {
    let load = Arc::new(Load {
        topic: topic.to_owned(),
        seen: Mutex::default(),
        calls: AtomicU64::new(0),
        next_id: AtomicU64::new(1),
        producing: AtomicBool::new(true),
        consuming: AtomicBool::new(true),
        away: Mutex::default(),
    });
    let workers = start(&load, cluster);
    thread::sleep(Duration::from_secs(1));
    let turns = (0..rounds).flat_map(|_| 0..cluster.addresses.len());
    let restarts: io::Result<Vec<Restart>> = turns.map(|node| restart(cluster, &load, node)).collect();
    thread::sleep(Duration::from_secs(1));
    load.producing.store(false, Ordering::Relaxed);
    let deadline = Instant::now() + DRAIN;
    while Instant::now() < deadline && restarts.is_ok() && !load.seen().is_complete() {
        thread::sleep(Duration::from_millis(50));
    }
    load.consuming.store(false, Ordering::Relaxed);
    for worker in workers {
        worker.join().map_err(|_| io::Error::other("a worker of this program panicked"))?;
    }
    let seen = std::mem::take(&mut *load.seen());
    Ok((seen, restarts?))
}

impl Seen {
    fn is_complete(&self) -> bool {
        self.accepted.is_subset(&self.received)
    }

    /// Accepted, and never received.
    pub fn lost(&self) -> usize {
        self.accepted.difference(&self.received).count()
    }
}
