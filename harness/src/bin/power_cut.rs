//! Records every write and flush that a real broker makes on a real file system, then cuts the power at many
//! flushes and counts: every message answered `202` before the cut comes back.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use argh::FromArgs;
use narad_harness::client::Client;
use narad_harness::disk::{image_after_cut, AttachedDisk, Operation, Recorder, Unflushed};
use narad_harness::ledger::{check_payload, payload};
use narad_harness::process::Broker;
use narad_harness::random::Random;

const TOPIC: &str = "power-cut";
const IMAGE_BYTES: usize = 1280 << 20;

/// Cut the power of a recorded disk at many flushes and check that no accepted message is lost.
#[derive(FromArgs)]
struct Arguments {
    /// broker binary (default target/release/narad)
    #[argh(option, default = "PathBuf::from(\"target/release/narad\")")]
    binary: PathBuf,
    /// file systems to test, comma separated (default ext4,xfs)
    #[argh(option, default = "String::from(\"ext4,xfs\")")]
    file_systems: String,
    /// flushes to cut at, each with none, all and two random subsets of the unflushed writes (default 100)
    #[argh(option, default = "100")]
    cuts: usize,
    /// seconds of load to record (default 6)
    #[argh(option, default = "6")]
    seconds: u64,
    /// shards (default 2)
    #[argh(option, default = "2")]
    shards: u32,
    /// seed of cuts and subsets (default 1)
    #[argh(option, default = "1")]
    seed: u64,
}

/// When each message was accepted and acked, as positions in the device's log.
#[derive(Default)]
struct Marks {
    accepted: BTreeMap<u64, usize>,
    /// Position at which its first ack was sent: it may be settled from here on.
    acking: BTreeMap<u64, usize>,
}

struct Run {
    recorder: Recorder,
    marks: Mutex<Marks>,
    next_id: AtomicU64,
    going: AtomicBool,
}

impl Run {
    fn marks(&self) -> MutexGuard<'_, Marks> {
        self.marks.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

fn shard_arguments(shards: u32) -> [String; 5] {
    ["--shards".into(), shards.to_string(), "--no-pin".into(), "--memory".into(), "512MiB".into()]
}

fn start(arguments: &Arguments, data: &Path) -> io::Result<Broker> {
    let list = shard_arguments(arguments.shards);
    Broker::start(&arguments.binary, data, &list.iter().map(String::as_str).collect::<Vec<_>>())
}

fn produce(run: &Run, mut client: Client, mut random: Random) {
    while run.going.load(Ordering::Relaxed) {
        let count = if random.range(0, 4) == 0 { random.range(2, 40) } else { 1 };
        let first = run.next_id.fetch_add(count, Ordering::Relaxed);
        let mut draw_size = || random.range(64, 4_096) as usize;
        let answer = if count == 1 {
            client.post(&format!("/v1/topics/{TOPIC}/produce"), &payload(first, draw_size()))
        } else {
            let messages: Vec<_> = (first..first + count)
                .map(|id| serde_json::json!({"payload": String::from_utf8_lossy(&payload(id, draw_size()))}))
                .collect();
            client.produce_batch(TOPIC, messages)
        };
        if answer.is_ok_and(|a| a.status == 202) {
            // Everything that made it durable is in the log by now: the answer came after it.
            let position = run.recorder.position();
            let mut marks = run.marks();
            (first..first + count).for_each(|id| {
                marks.accepted.insert(id, position);
            });
        }
    }
}

/// Takes what is ready and acks those that `acks` chooses; the ids seen. `acks` is asked before the ack is sent.
fn consume_some(client: &mut Client, mut acks: impl FnMut(u64) -> bool) -> io::Result<Vec<u64>> {
    let answer = client.get(&format!("/v1/topics/{TOPIC}/consume?wait=100ms&max=100"))?;
    let json = answer.json();
    let mut ids = Vec::new();
    let mut handles = Vec::new();
    for message in json["messages"].as_array().into_iter().flatten() {
        let text = message["payload"].as_str().unwrap_or_default();
        let id = check_payload(text.as_bytes()).map_err(io::Error::other)?;
        ids.push(id);
        if acks(id) {
            handles.push(message["receipt_handle"].as_str().unwrap_or_default().to_owned());
        }
    }
    if !handles.is_empty() {
        let body = serde_json::json!({ "receipt_handles": handles }).to_string();
        client.request(
            "POST",
            &format!("/v1/topics/{TOPIC}/ack"),
            &[("Content-Type", "application/json")],
            body.as_bytes(),
        )?;
    }
    Ok(ids)
}

struct Recording {
    base: Vec<u8>,
    log: Vec<Operation>,
    marks: Marks,
}

/// Runs a broker under load on a fresh file system and records what its device saw.
fn record(arguments: &Arguments, file_system: &str, folder: &Path) -> io::Result<Recording> {
    let recorder = Recorder::new(vec![0; IMAGE_BYTES]);
    let mut disk = AttachedDisk::attach(recorder.clone(), folder)?;
    disk.format(file_system)?;
    let data = disk.mount()?.join("data");
    std::fs::create_dir_all(&data)?;
    let mut broker = start(arguments, &data)?;
    let body = format!("{{\"name\":\"{TOPIC}\",\"partitions\":4}}");
    broker.client().request("POST", "/v1/topics", &[("Content-Type", "application/json")], body.as_bytes())?;
    let run = Arc::new(Run {
        recorder: recorder.clone(),
        marks: Mutex::default(),
        next_id: AtomicU64::new(1),
        going: AtomicBool::new(true),
    });
    let base = recorder.start_recording();
    let mut workers: Vec<_> = (0..3)
        .map(|worker| {
            let (run, client) = (run.clone(), broker.client());
            let random = Random::new(arguments.seed * 31 + worker);
            thread::spawn(move || produce(&run, client, random))
        })
        .collect();
    let (consumer, mut client) = (run.clone(), broker.client());
    workers.push(thread::spawn(move || {
        while consumer.going.load(Ordering::Relaxed) {
            let position = consumer.recorder.position();
            // One in four is acked; the others stay owed, whenever the power goes.
            let consumed = consume_some(&mut client, |id| {
                let acks = id % 4 == 0;
                if acks {
                    consumer.marks().acking.entry(id).or_insert(position);
                }
                acks
            });
            if let Err(error) = consumed {
                eprintln!("consumer: {error}");
                thread::sleep(Duration::from_millis(50));
            }
        }
    }));
    thread::sleep(Duration::from_secs(arguments.seconds));
    run.going.store(false, Ordering::Relaxed);
    for worker in workers {
        worker.join().map_err(|_| io::Error::other("a worker of this program panicked"))?;
    }
    let log = recorder.take_log();
    broker.kill()?;
    drop(broker);
    let marks = std::mem::take(&mut *run.marks());
    Ok(Recording { base, log, marks })
}

/// Serves the disk as a cut at `cut` would have left it, starts a broker on it and counts what comes back.
fn check_cut(
    arguments: &Arguments,
    recording: &Recording,
    cut: usize,
    unflushed: Unflushed,
    folder: &Path,
) -> io::Result<Vec<String>> {
    let image = image_after_cut(&recording.base, &recording.log, cut, unflushed);
    let mut disk = AttachedDisk::attach(Recorder::new(image), folder)?;
    let data = disk.mount()?.join("data");
    let mut broker = match start(arguments, &data) {
        Ok(broker) => broker,
        Err(error) => return Ok(vec![format!("the broker did not start: {error}")]),
    };
    let owed = |id: &u64| recording.marks.acking.get(id).is_none_or(|acking| *acking >= cut);
    let mut missing: std::collections::BTreeSet<u64> =
        recording.marks.accepted.iter().filter(|(id, mark)| **mark <= cut && owed(id)).map(|(id, _)| *id).collect();
    let (expected, deadline) = (missing.len(), Instant::now() + Duration::from_secs(20));
    let mut client = broker.client();
    while !missing.is_empty() && Instant::now() < deadline {
        for id in consume_some(&mut client, |_| true)? {
            missing.remove(&id);
        }
    }
    broker.stop(Duration::from_secs(20))?;
    let log = broker.log_text();
    drop(broker);
    disk.unmount()?;
    let mut findings = Vec::new();
    if !missing.is_empty() {
        let some: Vec<_> = missing.iter().take(5).collect();
        findings.push(format!(
            "{} of {expected} messages accepted before the cut are gone, for example {some:?}",
            missing.len()
        ));
    }
    if log.contains("corrupt") {
        findings.push("an ordinary power cut was reported as corruption (E8)".to_owned());
    }
    Ok(findings)
}

fn test_file_system(arguments: &Arguments, file_system: &str, folder: &Path) -> io::Result<usize> {
    let recording = record(arguments, file_system, &folder.join("record"))?;
    let flushes: Vec<usize> = recording
        .log
        .iter()
        .enumerate()
        .filter(|(_, o)| matches!(o, Operation::Flush))
        .map(|(index, _)| index)
        .collect();
    println!(
        "{file_system}: recorded {} operations, {} flushes, {} accepted, {} acked",
        recording.log.len(),
        flushes.len(),
        recording.marks.accepted.len(),
        recording.marks.acking.len()
    );
    if flushes.len() < arguments.cuts.min(50) || recording.marks.accepted.len() < 200 {
        return Err(io::Error::other("too little happened while recording: this would prove nothing"));
    }
    let mut random = Random::new(arguments.seed);
    let mut failures = 0;
    for number in 0..arguments.cuts {
        let cut = flushes[random.range(0, flushes.len() as u64) as usize];
        let kinds = [
            Unflushed::Nothing,
            Unflushed::Everything,
            Unflushed::Sectors(arguments.seed),
            Unflushed::Sectors(arguments.seed + 1),
        ];
        for unflushed in kinds {
            let findings = check_cut(arguments, &recording, cut, unflushed, &folder.join("replay"))?;
            failures += findings.len();
            for finding in findings {
                println!("VIOLATION: {file_system}, cut at operation {cut}, unflushed {unflushed:?}: {finding}");
            }
        }
        println!("{file_system}: {} of {} cuts done, {failures} violations", number + 1, arguments.cuts);
    }
    Ok(failures)
}

fn main() -> ExitCode {
    let arguments: Arguments = argh::from_env();
    let folder = std::env::temp_dir().join(format!("narad-power-cut-{}", std::process::id()));
    println!("power-cut: seed {}, {} cuts on {}", arguments.seed, arguments.cuts, arguments.file_systems);
    let mut failures = 0;
    for file_system in arguments.file_systems.split(',') {
        match test_file_system(&arguments, file_system, &folder.join(file_system)) {
            Ok(found) => failures += found,
            Err(error) => {
                println!("{file_system}: the test could not be run: {error}");
                return ExitCode::from(2);
            }
        }
    }
    let _ = std::fs::remove_dir_all(&folder);
    if failures > 0 {
        println!("FAILED: {failures} violations");
        return ExitCode::FAILURE;
    }
    println!("ok");
    ExitCode::SUCCESS
}
