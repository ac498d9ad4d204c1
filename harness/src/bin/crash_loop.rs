//! Kills a broker with SIGKILL under load, again and again, and counts: no `202` lost, nothing acked comes back
//! outside the allowed window, every duplicate explained by a kill.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use argh::FromArgs;
use narad_harness::client::{Client, Response};
use narad_harness::ledger::{payload, Ledger, Outcome, Verdict};
use narad_harness::process::Broker;
use narad_harness::random::Random;

const TOPIC: &str = "crash-loop";
const VISIBILITY_MS: u64 = 4_000;
/// Producers wait while more messages than this have not come back: consumers that never catch up prove little.
const OWED_MAX: usize = 20_000;
const UNWRITTEN: &str = "narad_consumer_position_unwritten_seconds";

/// Kill -9 a broker under load for a number of rounds and check the delivery contract.
#[derive(FromArgs)]
struct Arguments {
    /// broker binary (default target/release/narad)
    #[argh(option, default = "PathBuf::from(\"target/release/narad\")")]
    binary: PathBuf,
    /// kills (default 100)
    #[argh(option, default = "100")]
    rounds: u32,
    /// shards per round, used in turn, for example 1,2,4,3,1 (default 2)
    #[argh(option, default = "String::from(\"2\")")]
    shards: String,
    /// seed of sizes and kill times (default: from the clock)
    #[argh(option)]
    seed: Option<u64>,
    /// data directory, kept (default: a new one under the temporary directory, removed on success)
    #[argh(option)]
    data_dir: Option<PathBuf>,
    /// longest time between two kills in ms (default 1500)
    #[argh(option, default = "1500")]
    round_ms_max: u64,
}

/// What producers and consumers share.
struct Run {
    ledger: Mutex<Ledger>,
    address: Mutex<Option<SocketAddr>>,
    round: AtomicU32,
    next_id: AtomicU64,
    producing: AtomicBool,
    /// Messages accepted and not yet delivered, looked at between two kills.
    owed: AtomicUsize,
    consuming: AtomicBool,
}

impl Run {
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Address of the broker that runs now; waits while it is down.
    fn address(&self) -> Option<SocketAddr> {
        let address = *self.address.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if address.is_none() {
            thread::sleep(Duration::from_millis(2));
        }
        address
    }

    fn set_address(&self, address: Option<SocketAddr>) {
        *self.address.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = address;
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
    let mut client: Option<(SocketAddr, Client)> = None;
    while run.producing.load(Ordering::Relaxed) {
        let Some(address) = run.address() else { continue };
        if client.as_ref().is_none_or(|(known, _)| *known != address) {
            client = Some((address, Client::new(address)));
        }
        let Some((_, client)) = client.as_mut() else { continue };
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
            client.post(&format!("/v1/topics/{TOPIC}/produce{key}"), &payload(first, sizes[0]))
        } else {
            let messages: Vec<_> = (first..first + count)
                .zip(&sizes)
                .map(|(id, size)| {
                    let text = String::from_utf8_lossy(&payload(id, *size)).into_owned();
                    serde_json::json!({"payload": text, "key": format!("k{}", id % 50)})
                })
                .collect();
            client.produce_batch(TOPIC, messages)
        };
        let outcome = outcome_of(&answer);
        let mut ledger = run.ledger();
        for id in first..first + count {
            ledger.produced(id, outcome, round);
        }
        drop(ledger);
        if answer.is_err() {
            thread::sleep(Duration::from_millis(2));
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
    let mut client: Option<(SocketAddr, Client)> = None;
    while run.consuming.load(Ordering::Relaxed) {
        let Some(address) = run.address() else { continue };
        if client.as_ref().is_none_or(|(known, _)| *known != address) {
            client = Some((address, Client::new(address)));
        }
        let Some((_, client)) = client.as_mut() else { continue };
        let target = format!("/v1/topics/{TOPIC}/consume?wait=500ms{}", if batch { "&max=50" } else { "" });
        let asked = Instant::now();
        let Ok(answer) = client.get(&target) else { continue };
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
    // Now and then a consumer walks away, or gives a message back.
    match random.range(0, 40) {
        0 => return,
        1 => {
            for one in delivered {
                // The record may come again before our own answer arrives: release first.
                run.ledger().released(one.place, Instant::now());
                let _ = client.post(&format!("/v1/topics/{TOPIC}/ack?extend=0&receipt_handle={}", one.handle), b"");
            }
            return;
        }
        _ => {}
    }
    if delivered.len() == 1 {
        let answer = client.post(&format!("/v1/topics/{TOPIC}/ack?receipt_handle={}", delivered[0].handle), b"");
        if answer.is_ok_and(|a| a.status == 204) {
            run.ledger().acked(&delivered[0].data, delivered[0].place, Instant::now());
        }
        return;
    }
    let handles: Vec<&str> = delivered.iter().map(|one| one.handle.as_str()).collect();
    let body = serde_json::json!({ "receipt_handles": handles }).to_string();
    let answer = client.request(
        "POST",
        &format!("/v1/topics/{TOPIC}/ack"),
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

fn create_topic(address: SocketAddr) -> io::Result<()> {
    let body = format!("{{\"name\":\"{TOPIC}\",\"partitions\":6,\"visibility_timeout_ms\":{VISIBILITY_MS}}}");
    let answer =
        Client::new(address).request("POST", "/v1/topics", &[("Content-Type", "application/json")], body.as_bytes())?;
    match answer.status {
        201 | 409 => Ok(()),
        status => Err(io::Error::other(format!("create answered {status}: {}", answer.text()))),
    }
}

fn rounds(arguments: &Arguments, run: &Arc<Run>, data: &std::path::Path, random: &mut Random) -> io::Result<()> {
    let shards: Vec<&str> = arguments.shards.split(',').collect();
    let mut spawned = Vec::new();
    for round in 0..=arguments.rounds {
        run.round.store(round, Ordering::Relaxed);
        let count = shards[round as usize % shards.len()];
        let mut broker =
            Broker::start(&arguments.binary, data, &["--shards", count, "--no-pin", "--memory", "512MiB"])?;
        if round == 0 {
            create_topic(broker.address)?;
            for worker in 0..4 {
                let (run, random) = (run.clone(), Random::new(random.draw() ^ worker));
                spawned.push(thread::spawn(move || produce(&run, random)));
            }
            for worker in 0..4 {
                let (run, random) = (run.clone(), Random::new(random.draw() ^ (100 + worker)));
                spawned.push(thread::spawn(move || consume(&run, random, worker % 2 == 0)));
            }
        }
        run.set_address(Some(broker.address));
        if round == arguments.rounds {
            run.producing.store(false, Ordering::Relaxed);
            drain(run);
            run.consuming.store(false, Ordering::Relaxed);
            run.set_address(None);
            let status = broker.stop(Duration::from_secs(30))?;
            if !status.success() {
                run.ledger().violations.push(format!("the last broker exited with {status} after SIGTERM"));
            }
            break;
        }
        thread::sleep(Duration::from_millis(random.range(20, arguments.round_ms_max)));
        let (asked, unwritten) = oldest_unwritten(&broker)?;
        run.set_address(None);
        broker.kill()?;
        let mut ledger = run.ledger();
        ledger.killed(Instant::now(), asked, unwritten);
        run.owed.store(ledger.missing_count(), Ordering::Relaxed);
    }
    for worker in spawned {
        if worker.join().is_err() {
            return Err(io::Error::other("a worker of this program panicked"));
        }
    }
    Ok(())
}

/// How old the oldest ack is that a kill would take back (D16), by the broker's own word, and when it was asked.
fn oldest_unwritten(broker: &Broker) -> io::Result<(Instant, Duration)> {
    let asked = Instant::now();
    let page = broker.client().get("/metrics")?.text();
    let values = page.lines().filter(|line| line.starts_with(UNWRITTEN)).filter_map(|line| line.rsplit(' ').next());
    let seconds: Vec<f64> = values.filter_map(|value| value.parse().ok()).collect();
    match seconds.iter().copied().reduce(f64::max) {
        Some(oldest) => Ok((asked, Duration::from_secs_f64(oldest))),
        None => Err(io::Error::other(format!("the broker does not export {UNWRITTEN}"))),
    }
}

/// Waits until every accepted message has come back, or for 30 s none has; and a visibility timeout more for what was
/// leased.
fn drain(run: &Run) {
    let (mut fewest, mut since) = (usize::MAX, Instant::now());
    while since.elapsed() < Duration::from_secs(30) {
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

fn main() -> ExitCode {
    let arguments: Arguments = argh::from_env();
    let seed = arguments.seed.unwrap_or_else(|| {
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(1, |d| d.as_nanos() as u64)
    });
    let data = arguments
        .data_dir
        .clone()
        .unwrap_or_else(|| std::env::temp_dir().join(format!("narad-crash-loop-{}", std::process::id())));
    println!(
        "crash-loop: {} rounds, shards {}, seed {seed}, data {}",
        arguments.rounds,
        arguments.shards,
        data.display()
    );
    let run = Arc::new(Run {
        ledger: Mutex::default(),
        address: Mutex::new(None),
        round: AtomicU32::new(0),
        next_id: AtomicU64::new(1),
        producing: AtomicBool::new(true),
        owed: AtomicUsize::new(0),
        consuming: AtomicBool::new(true),
    });
    let finished =
        std::fs::create_dir_all(&data).and_then(|()| rounds(&arguments, &run, &data, &mut Random::new(seed)));
    let mut ledger = run.ledger();
    if let Err(error) = finished {
        ledger.violations.push(format!("the run stopped: {error}"));
    }
    let verdict = ledger.judge();
    println!("{verdict:#?}");
    println!("longest wait of an ack for the page cache, as seen before a kill: {:?}", ledger.longest_unwritten());
    // A run in which nothing happened proves nothing.
    let floor = u64::from(arguments.rounds) * 20;
    if verdict.accepted < floor || verdict.acked < floor / 2 {
        let text = format!(
            "too little evidence: {} accepted, {} acked, want {floor} and {}",
            verdict.accepted,
            verdict.acked,
            floor / 2
        );
        ledger.violations.push(text);
    }
    for violation in ledger.violations.iter().take(50) {
        println!("VIOLATION: {violation}");
    }
    if verdict == Verdict::default() || !ledger.violations.is_empty() {
        println!("FAILED with {} violations; data and log kept in {}", ledger.violations.len(), data.display());
        return ExitCode::FAILURE;
    }
    if arguments.data_dir.is_none() {
        let _ = std::fs::remove_dir_all(&data);
    }
    println!("ok");
    ExitCode::SUCCESS
}

#[cfg(test)]
mod tests {
    use super::*;
    use narad_harness::ledger::check_payload;

    #[test]
    fn batch_payloads_are_checked_like_singles() {
        let data = payload(9, 400);
        let shown = serde_json::json!({"partition": 1, "offset": 2, "receipt_handle": "h", "payload": String::from_utf8_lossy(&data)});
        let one = parse(&shown).expect("a complete message");
        assert_eq!(check_payload(&one.data), Ok(9));
    }
}
