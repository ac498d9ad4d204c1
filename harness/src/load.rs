//! Producers and consumers that keep a ledger, against one broker or any node of a cluster, while somebody else breaks
//! things.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::client::{Client, Response};
use crate::ledger::{payload, Ledger, Outcome};
use crate::random::Random;

pub const VISIBILITY_MS: u64 = 4_000;
/// Producers wait while more messages than this have not come back: consumers that never catch up prove little.
const OWED_MAX: usize = 20_000;
const UNWRITTEN: &str = "narad_consumer_position_unwritten_seconds";

/// What producers and consumers share.
pub struct Run {
    topic: String,
    ledger: Mutex<Ledger>,
    /// Where requests may go now; empty while nobody answers.
    addresses: Mutex<Vec<SocketAddr>>,
    round: AtomicU32,
    next_id: AtomicU64,
    producing: AtomicBool,
    /// Messages accepted and not yet delivered, looked at between two kills.
    owed: AtomicUsize,
    consuming: AtomicBool,
}

impl Run {
    pub fn new(topic: &str) -> Run {
        Run {
            topic: topic.to_owned(),
            ledger: Mutex::default(),
            addresses: Mutex::default(),
            round: AtomicU32::new(0),
            next_id: AtomicU64::new(1),
            producing: AtomicBool::new(true),
            owed: AtomicUsize::new(0),
            consuming: AtomicBool::new(true),
        }
    }

    pub fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// One of the brokers that run now; waits a moment when there is none.
    fn address(&self, random: &mut Random) -> Option<SocketAddr> {
        let address = {
            let addresses = self.addresses.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            match addresses.len() {
                0 => None,
                n => addresses.get(random.draw() as usize % n).copied(),
            }
        };
        if address.is_none() {
            thread::sleep(Duration::from_millis(2));
        }
        address
    }

    pub fn set_addresses(&self, addresses: Vec<SocketAddr>) {
        *self.addresses.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = addresses;
    }

    pub fn set_round(&self, round: u32) {
        self.round.store(round, Ordering::Relaxed);
    }

    /// Looks at how far the consumers are behind; producers wait accordingly.
    pub fn count_owed(&self) {
        let missing = self.ledger().missing_count();
        self.owed.store(missing, Ordering::Relaxed);
    }

    /// Starts four producers and four consumers, half of which take batches.
    pub fn start(self: &Arc<Run>, random: &mut Random) -> Vec<JoinHandle<()>> {
        let mut workers = Vec::new();
        for worker in 0..4 {
            let (run, random) = (self.clone(), Random::new(random.draw() ^ worker));
            workers.push(thread::spawn(move || produce(&run, random)));
        }
        for worker in 0..4 {
            let (run, random) = (self.clone(), Random::new(random.draw() ^ (100 + worker)));
            workers.push(thread::spawn(move || consume(&run, random, worker % 2 == 0)));
        }
        workers
    }

    /// No more produces; waits until what was accepted has come back, then lets the consumers go.
    pub fn finish(&self, patience: Duration) {
        self.producing.store(false, Ordering::Relaxed);
        drain(self, patience);
        self.consuming.store(false, Ordering::Relaxed);
        self.set_addresses(Vec::new());
    }
}

/// A client that goes to a broker and stays with it for a while, as a client of several nodes does.
#[derive(Default)]
struct Sticky {
    client: Option<(SocketAddr, Client)>,
    calls: u32,
}

impl Sticky {
    fn client(&mut self, run: &Run, random: &mut Random) -> Option<&mut Client> {
        self.calls += 1;
        if self.client.is_none() || self.calls.is_multiple_of(50) || !run.serves(self.client.as_ref()?.0) {
            let address = run.address(random)?;
            if self.client.as_ref().is_none_or(|(known, _)| *known != address) {
                self.client = Some((address, Client::new(address).with_timeout(Duration::from_secs(15))));
            }
        }
        self.client.as_mut().map(|(_, client)| client)
    }

    /// The broker did not answer: another one is asked next.
    fn failed(&mut self) {
        self.client = None;
    }
}

impl Run {
    fn serves(&self, address: SocketAddr) -> bool {
        self.addresses.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).contains(&address)
    }
}

/// Mostly small; now and then up to 64 KiB.
fn draw_size(random: &mut Random) -> usize {
    let largest = if random.range(0, 8) == 0 { 65_536 } else { 1_024 };
    random.range(256, largest) as usize
}

fn outcome_of(answer: &io::Result<Response>) -> Outcome {
    match answer.as_ref().map(|a| a.status) {
        Ok(202) => Outcome::Accepted,
        Ok(429 | 503) => Outcome::Refused,
        _ => Outcome::Unknown,
    }
}

fn produce(run: &Run, mut random: Random) {
    let (topic, mut sticky) = (&run.topic, Sticky::default());
    while run.producing.load(Ordering::Relaxed) {
        let Some(client) = sticky.client(run, &mut random) else { continue };
        if run.owed.load(Ordering::Relaxed) > OWED_MAX {
            thread::sleep(Duration::from_millis(5));
            continue;
        }
        let round = run.round.load(Ordering::Relaxed);
        let count = if random.range(0, 3) == 0 { random.range(2, 60) } else { 1 };
        let first = run.next_id.fetch_add(count, Ordering::Relaxed);
        let sizes: Vec<usize> = (0..count).map(|_| draw_size(&mut random)).collect();
        let answer = if count == 1 {
            let key = if random.range(0, 2) == 0 { format!("?key=k{}", first % 50) } else { String::new() };
            client.post(&format!("/v1/topics/{topic}/produce{key}"), &payload(first, sizes[0]))
        } else {
            let messages: Vec<_> = (first..first + count)
                .zip(&sizes)
                .map(|(id, size)| {
                    let text = String::from_utf8_lossy(&payload(id, *size)).into_owned();
                    serde_json::json!({"payload": text, "key": format!("k{}", id % 50)})
                })
                .collect();
            client.produce_batch(topic, messages)
        };
        let outcome = outcome_of(&answer);
        let mut ledger = run.ledger();
        for id in first..first + count {
            ledger.produced(id, outcome, round);
        }
        drop(ledger);
        match outcome {
            Outcome::Accepted => {}
            // A client that is told to come back later does; one that does not measures how fast a broker says no.
            Outcome::Refused => thread::sleep(Duration::from_millis(20)),
            Outcome::Unknown => {
                sticky.failed();
                thread::sleep(Duration::from_millis(2));
            }
        }
    }
}

/// A delivered message as the API shows it: its place, its bytes, its handle.
struct Delivered {
    place: (u32, u64),
    data: Vec<u8>,
    handle: String,
}

fn parse(message: &serde_json::Value) -> Option<Delivered> {
    let place = (message["partition"].as_u64()? as u32, message["offset"].as_u64()?);
    let handle = message["receipt_handle"].as_str()?.to_owned();
    let shown = message["payload"].as_str()?;
    // A batch stores the JSON value's own bytes, so a string keeps its quotes; singles are stored as sent.
    Some(Delivered { place, data: shown.as_bytes().to_vec(), handle })
}

fn consume(run: &Run, mut random: Random, batch: bool) {
    let (topic, mut sticky) = (&run.topic, Sticky::default());
    while run.consuming.load(Ordering::Relaxed) {
        let Some(client) = sticky.client(run, &mut random) else { continue };
        let target = format!("/v1/topics/{topic}/consume?wait=500ms{}", if batch { "&max=50" } else { "" });
        let asked = Instant::now();
        let Ok(answer) = client.get(&target) else {
            sticky.failed();
            continue;
        };
        let (arrived, round) = (Instant::now(), run.round.load(Ordering::Relaxed));
        if answer.status != 200 {
            continue;
        }
        let json = answer.json();
        let listed = json["messages"].as_array().cloned().unwrap_or_else(|| vec![json]);
        let delivered: Vec<Delivered> = listed.iter().filter_map(parse).collect();
        let mut ledger = run.ledger();
        if delivered.len() != listed.len() {
            ledger.violations.push(format!("a delivery could not be read: {}", answer.text()));
        }
        for one in &delivered {
            let visibility = Duration::from_millis(VISIBILITY_MS);
            ledger.delivered(&one.data, one.place, asked, arrived, round, visibility);
        }
        drop(ledger);
        settle(run, client, &delivered, &mut random);
    }
}

fn settle(run: &Run, client: &mut Client, delivered: &[Delivered], random: &mut Random) {
    let topic = &run.topic;
    // Now and then a consumer walks away, or gives a message back.
    match random.range(0, 40) {
        0 => return,
        1 => {
            for one in delivered {
                // The record may come again before our own answer arrives: release first.
                run.ledger().released(one.place, Instant::now());
                let _ = client.post(&format!("/v1/topics/{topic}/ack?extend=0&receipt_handle={}", one.handle), b"");
            }
            return;
        }
        _ => {}
    }
    if delivered.len() == 1 {
        let answer = client.post(&format!("/v1/topics/{topic}/ack?receipt_handle={}", delivered[0].handle), b"");
        if answer.is_ok_and(|a| a.status == 204) {
            run.ledger().acked(&delivered[0].data, delivered[0].place, Instant::now());
        }
        return;
    }
    let handles: Vec<&str> = delivered.iter().map(|one| one.handle.as_str()).collect();
    let body = serde_json::json!({ "receipt_handles": handles }).to_string();
    let answer = client.request(
        "POST",
        &format!("/v1/topics/{topic}/ack"),
        &[("Content-Type", "application/json")],
        body.as_bytes(),
    );
    let Ok(answer) = answer else { return };
    let json = answer.json();
    let mut ledger = run.ledger();
    for (one, result) in delivered.iter().zip(json["results"].as_array().into_iter().flatten()) {
        if result["status"] == 204 {
            ledger.acked(&one.data, one.place, Instant::now());
        }
    }
}

/// Creates the topic of a run, unless it is there.
pub fn create_topic(address: SocketAddr, topic: &str) -> io::Result<()> {
    let body = format!("{{\"name\":\"{topic}\",\"partitions\":6,\"visibility_timeout_ms\":{VISIBILITY_MS}}}");
    let answer =
        Client::new(address).request("POST", "/v1/topics", &[("Content-Type", "application/json")], body.as_bytes())?;
    match answer.status {
        201 | 409 => Ok(()),
        status => Err(io::Error::other(format!("create answered {status}: {}", answer.text()))),
    }
}

/// How old the oldest ack is that a kill would take back (D16), by the broker's own word, and when it was asked.
pub fn oldest_unwritten(mut client: Client) -> io::Result<(Instant, Duration)> {
    let asked = Instant::now();
    let page = client.get("/metrics")?.text();
    let values = page.lines().filter(|line| line.starts_with(UNWRITTEN)).filter_map(|line| line.rsplit(' ').next());
    let seconds: Vec<f64> = values.filter_map(|value| value.parse().ok()).collect();
    match seconds.iter().copied().reduce(f64::max) {
        Some(oldest) => Ok((asked, Duration::from_secs_f64(oldest))),
        None => Err(io::Error::other(format!("the broker does not export {UNWRITTEN}"))),
    }
}

/// Waits until every accepted message has come back, or for `patience` none has; and a visibility timeout more for what was
/// leased.
fn drain(run: &Run, patience: Duration) {
    let (mut fewest, mut since) = (usize::MAX, Instant::now());
    while since.elapsed() < patience {
        let missing = run.ledger().missing_count();
        if missing == 0 {
            break;
        }
        if missing < fewest {
            (fewest, since) = (missing, Instant::now());
        }
        thread::sleep(Duration::from_millis(200));
    }
    thread::sleep(Duration::from_millis(2 * VISIBILITY_MS + 1_000));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::check_payload;

    #[test]
    fn batch_payloads_are_checked_like_singles() {
        let data = payload(9, 400);
        let shown = serde_json::json!({"partition": 1, "offset": 2, "receipt_handle": "h", "payload": String::from_utf8_lossy(&data)});
        let one = parse(&shown).expect("a complete message");
        assert_eq!(check_payload(&one.data), Ok(9));
    }
}
