//! `narad-bench log`: commits to partition logs on one core.

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use argh::FromArgs;
use hdrhistogram::Histogram;
use narad_shards::io::{Disk, FillBudget, Slice};
use narad_shards::log::{Combiner, CommitGate, LogOptions, LogShared, PartitionLog, Resolved, Standing};
use narad_shards::meta::{Destination, Incarnation};
use narad_shards::peer::{CommitBatch, CommitError, LocalBoxFuture, Record};
use narad_shards::rt::{self, Queue};

use crate::load::cpu;
use crate::load::process::Home;
use crate::parts::disks::{EchoDisk, InstantDisk};
use crate::parts::{cores, counts, nanos, seconds};
use crate::run::{histogram, Better, Failure, Load, Run, Table};
use crate::Common;

/// commits to partition logs
#[derive(FromArgs)]
#[argh(subcommand, name = "log")]
pub struct Options {
    /// directory on the drive to measure (default: the working directory)
    #[argh(option, default = "PathBuf::from(\".\")")]
    dir: PathBuf,
    /// the CPU of the shard (default: the first that this process may use)
    #[argh(option, from_str_fn(cpu::parse))]
    cpus: Option<Vec<usize>>,
    /// partitions, each with one commit under way (default 1,8,64)
    #[argh(option, default = "\"1,8,64\".into()")]
    partitions: String,
    /// records of a commit (default 1,64,1000)
    #[argh(option, default = "\"1,64,1000\".into()")]
    batch: String,
    /// bytes of a record's payload (default 256)
    #[argh(option, default = "256")]
    payload: usize,
    /// seconds of each measurement (default 1)
    #[argh(option, default = "1.0")]
    seconds: f64,
}

const PARTITIONS_MAX: usize = 1024;
const BATCH_MAX: usize = 10_000;
/// A batch is at most 8 MiB.
const BATCH_BYTES_MAX: usize = 8 << 20;
/// Commits of a measurement at least: it goes on until there are so many.
const COUNT_MIN: u64 = 16;
const LIVE: Incarnation = Incarnation(1);

/// The three disks that each combination is measured on.
const KINDS: [&str; 3] = ["device", "no_read_back", "instant"];

struct Sample {
    commits: u64,
    nanos: u64,
    written_bytes: u64,
    body_bytes: u64,
    latency: Histogram<u64>,
}

/// Measures.
pub fn run(_common: &Common, options: &Options) -> Result<Run, Failure> {
    let cpu = cores::choose(options.cpus.as_deref(), 1)?[0];
    let partitions = counts("--partitions", &options.partitions, PARTITIONS_MAX)?;
    let batches = counts("--batch", &options.batch, BATCH_MAX)?;
    let each = seconds("--seconds", options.seconds)?;
    let (payload, most) = (options.payload, batches.iter().max().copied().unwrap_or(1));
    if payload == 0 || payload.saturating_mul(most) > BATCH_BYTES_MAX {
        return Err(Failure(format!(
            "--payload {payload} with --batch {most}: a commit holds 1 byte to {BATCH_BYTES_MAX} bytes of payloads"
        )));
    }
    let home = Home::below(&options.dir)?;
    let mut run = Run::new("log");
    run.load = Some(Load::Closed);
    for (name, value) in [
        ("dir", options.dir.display().to_string()),
        ("cpus", cpu.to_string()),
        ("partitions", options.partitions.clone()),
        ("batch", options.batch.clone()),
        ("payload", payload.to_string()),
        ("seconds", options.seconds.to_string()),
        ("durability", "each commit durable (RWF_DSYNC), read back and checked before the next".to_string()),
    ] {
        run.set(name, value);
    }
    let root = home.path().to_owned();
    let thread = cores::start("log", cpu, Duration::ZERO, move |handle| async move {
        let device = handle.disk(&root, true)?;
        for partitions in &partitions {
            for batch in &batches {
                measure(&mut run, &device, &root, *partitions, *batch, payload, each).await?;
            }
        }
        Ok(run)
    });
    let mut run = cores::join(thread)?;
    run.notes.extend(
        [
            "Closed loop: each partition commits its next batch when the last one is visible.",
            "`device` is the product as it is: durable write, read from the device, checks. `no_read_back` answers the \
             read-back from memory (a disk of this program's, no setting of the broker): the checks still run. `instant` \
             is a disk that takes no time: the processor's part.",
            "`read_back_cost` is the rate without over the rate with: what reading from the device costs.",
            "The three take turns in one run, each on logs of its own; a quarter of the time is warm-up. Zero-filling \
             of the segments ahead (at most 100 MiB/s) runs beside the commits, as it does in a broker.",
            "Wrong if the core has other work, or if other programs use the drive.",
        ]
        .map(String::from),
    );
    Ok(run)
}

async fn measure(
    run: &mut Run,
    device: &Disk,
    root: &Path,
    partitions: usize,
    batch: usize,
    payload: usize,
    each: Duration,
) -> Result<(), Failure> {
    let mut rates = Vec::new();
    for kind in KINDS {
        let dir = root.join(format!("p{partitions}b{batch}{kind}"));
        let disk = match kind {
            "device" => device.clone(),
            "no_read_back" => EchoDisk::over(device.clone()),
            _ => InstantDisk::disk(),
        };
        disk.create_dir(&dir).await?;
        let sample = commits(&disk, &dir, partitions, batch, payload, each).await?;
        disk.remove_dir_all(&dir).await?;
        let rate = sample.commits as f64 * batch as f64 * 1e9 / sample.nanos.max(1) as f64;
        let name = match kind {
            "device" => format!("log.p{partitions}.b{batch}"),
            kind => format!("log.p{partitions}.b{batch}.{kind}"),
        };
        run.figure(format!("{name}.rate"), rate, "1/s", Better::Higher);
        if kind == "device" {
            let written = sample.written_bytes as f64 / sample.body_bytes.max(1) as f64;
            run.figure(format!("{name}.written_per_stored"), written, "ratio", Better::Lower);
        }
        rates.push((kind, rate, sample));
        run.latency(&name, rates[rates.len() - 1].2.latency.clone(), Vec::new());
    }
    let [(_, with, _), (_, without, _), _] = &rates[..] else { unreachable!("three kinds were measured") };
    run.figure(format!("log.p{partitions}.b{batch}.read_back_cost"), without / with, "ratio", Better::Lower);
    if run.tables.is_empty() {
        let head = ["partitions", "batch", "disk", "records/s", "commits/s", "p50 µs", "p99 µs", "written/stored"];
        run.tables.push(Table {
            title: format!("Commits of {payload} B records"),
            head: head.map(String::from).to_vec(),
            rows: Vec::new(),
        });
    }
    for (kind, rate, sample) in &rates {
        let micros = |quantile| format!("{:.0}", sample.latency.value_at_quantile(quantile) as f64 / 1000.0);
        run.tables[0].rows.push(vec![
            partitions.to_string(),
            batch.to_string(),
            kind.to_string(),
            format!("{rate:.0}"),
            format!("{:.0}", rate / batch as f64),
            micros(0.5),
            micros(0.99),
            format!("{:.2}", sample.written_bytes as f64 / sample.body_bytes.max(1) as f64),
        ]);
    }
    Ok(())
}

/// One partition that is always there and ours.
pub struct OwnGate {
    log: PartitionLog,
}

impl CommitGate for OwnGate {
    fn standing(&self) -> Standing {
        Standing::Live { incarnation: LIVE, version: 0 }
    }

    fn resolve(&self) -> LocalBoxFuture<'static, Result<Resolved, CommitError>> {
        let resolved = Resolved { log: self.log.clone(), incarnation: LIVE, version: 0 };
        Box::pin(std::future::ready(Ok(resolved)))
    }
}

/// A log in `dir`, and the queue in front of it.
pub async fn open(disk: &Disk, dir: &Path, shared: &Rc<LogShared>) -> Result<(PartitionLog, Combiner), Failure> {
    let log = PartitionLog::open(disk, dir, LogOptions::default(), shared).await?;
    let combiner = Combiner::new(Rc::new(OwnGate { log: log.clone() }));
    Ok((log, combiner))
}

/// A commit of `records` bodies, all of which lie in `body`.
pub fn batch_of(body: &Slice, records: usize, partition: usize) -> CommitBatch {
    CommitBatch {
        destination: Destination { incarnation: LIVE, partition: partition as u32 },
        topic: Arc::from("bench"),
        accepted_under: Some(LIVE),
        records: (0..records).map(|_| Record { body: body.clone(), key_bytes: 0 }).collect(),
        budget: Duration::from_secs(30),
    }
}

async fn commits(
    disk: &Disk,
    dir: &Path,
    partitions: usize,
    batch: usize,
    payload: usize,
    each: Duration,
) -> Result<Sample, Failure> {
    let shared = LogShared::new(64 << 20, FillBudget::of_shard(1));
    let body = Slice::copy_from(&vec![0x61; payload]);
    let stop: Rc<Cell<bool>> = Rc::default();
    let count: Rc<Cell<u64>> = Rc::default();
    let latency = Rc::new(RefCell::new(histogram()));
    let (mut logs, mut tasks) = (Vec::new(), Vec::new());
    for partition in 0..partitions {
        let (log, combiner) = open(disk, &dir.join(format!("p{partition:05}")), &shared).await?;
        logs.push(log);
        let (body, stop, count, latency) = (body.clone(), stop.clone(), count.clone(), latency.clone());
        tasks.push(rt::spawn(Queue::Foreground, async move {
            while !stop.get() {
                let sent = nanos();
                let committed = combiner.commit(batch_of(&body, batch, partition)).await;
                committed.map_err(|error| Failure(format!("a commit failed: {error}")))?;
                latency.borrow_mut().saturating_record(nanos() - sent);
                count.set(count.get() + 1);
            }
            Ok::<(), Failure>(())
        }));
    }
    rt::sleep(each / 4).await;
    let written = |logs: &[PartitionLog]| {
        logs.iter().map(PartitionLog::metrics).fold((0, 0), |(w, b), m| (w + m.written_bytes, b + m.body_bytes))
    };
    let before = written(&logs);
    latency.borrow_mut().reset();
    count.set(0);
    let start = nanos();
    rt::sleep(each).await;
    // However slow the drive is: a rate of a handful says nothing.
    while count.get() < COUNT_MIN {
        rt::sleep(Duration::from_millis(1)).await;
    }
    let (commits, took) = (count.get(), nanos() - start);
    let after = written(&logs);
    let measured = latency.borrow().clone();
    stop.set(true);
    for task in tasks {
        task.await?;
    }
    for log in logs {
        log.close().await.map_err(Failure)?;
    }
    Ok(Sample {
        commits,
        nanos: took,
        written_bytes: after.0 - before.0,
        body_bytes: after.1 - before.1,
        latency: measured,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_combination_gives_a_rate_with_and_without_read_back() {
        let common = Common { out: None, compare: None, repeat: 1 };
        let options = Options {
            dir: std::env::temp_dir(),
            cpus: None,
            partitions: "1,3".into(),
            batch: "1,20".into(),
            payload: 64,
            seconds: 0.02,
        };
        let run = run(&common, &options).expect("measured");
        for name in ["log.p1.b1.rate", "log.p3.b20.no_read_back.rate", "log.p3.b1.instant.rate"] {
            assert!(run.value(name).is_some_and(|value| value > 0.0), "{name}");
        }
        assert!(run.value("log.p1.b20.written_per_stored").is_some_and(|ratio| ratio > 1.0));
    }

    #[test]
    fn a_batch_beyond_what_a_commit_holds_is_refused() {
        let common = Common { out: None, compare: None, repeat: 1 };
        let options = Options {
            dir: std::env::temp_dir(),
            cpus: None,
            partitions: "1".into(),
            batch: "1000".into(),
            payload: 1 << 20,
            seconds: 0.02,
        };
        let Failure(text) = run(&common, &options).expect_err("8 MiB at most");
        assert!(text.contains("--batch 1000"), "{text}");
    }
}
