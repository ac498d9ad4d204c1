//! `narad-bench recover`: how long a start takes after a kill, by what there is to read.

mod prepare;

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use argh::FromArgs;
use narad::config::parse_bytes;
use narad_shards::io::{Caching, Disk, Open};
use narad_shards::rt;

use crate::load::broker::{program, Broker, Plan};
use crate::load::cost::Probe;
use crate::load::cpu;
use crate::load::process::{require_directory, Home};
use crate::parts::{cores, nanos, require};
use crate::run::{Better, Failure, Run, Table};
use crate::Common;

/// time to ready after a kill, by what there is to read
#[derive(FromArgs)]
#[argh(subcommand, name = "recover")]
pub struct Options {
    /// directory on the drive to measure (default: the working directory)
    #[argh(option, default = "PathBuf::from(\".\")")]
    dir: PathBuf,
    /// the broker's program (default: narad beside this program)
    #[argh(option)]
    binary: Option<PathBuf>,
    /// the CPU of the broker's shard (default: the first that this process may use)
    #[argh(option, from_str_fn(cpu::parse))]
    cpus: Option<Vec<usize>>,
    /// sizes of WALs of which nothing was dispatched (default 64MiB,256MiB,1GiB)
    #[argh(option, default = "\"64MiB,256MiB,1GiB\".into()")]
    wal: String,
    /// partitions and the size of each one's log, as 64x1MiB (default 64x1MiB,512x64KiB)
    #[argh(option, default = "\"64x1MiB,512x64KiB\".into()")]
    partitions: String,
    /// bytes of a record's payload (default 256)
    #[argh(option, default = "256")]
    payload: usize,
    /// starts of each kind; the median counts (default 3)
    #[argh(option, default = "3")]
    rounds: usize,
}

/// More than any segment's data, so that a log is one recovery scan.
const LOG_BYTES_MAX: u64 = 60 << 20;
const WAL_BYTES_MAX: u64 = 64 << 30;
const PARTITIONS_MAX: u32 = 4096;
/// One read of the yardstick, and how many are under way: what a sequential reader that wants the drive's best does.
const READ_BYTES: u64 = 1 << 20;
const READERS: u64 = 4;
const ROUNDS_MAX: usize = 1000;
/// How long a broker may take to recover.
const PATIENCE: Duration = Duration::from_secs(300);

/// What a broker is started on.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Empty,
    Wal { bytes: u64 },
    Logs { partitions: u32, bytes: u64 },
}

impl Kind {
    fn name(&self) -> String {
        match self {
            Kind::Empty => "empty".into(),
            Kind::Wal { bytes } => format!("wal_{}", short(*bytes)),
            Kind::Logs { partitions, bytes } => format!("p{partitions}x{}", short(*bytes)),
        }
    }

    fn describe(&self) -> String {
        match self {
            Kind::Empty => "nothing to read".into(),
            Kind::Wal { bytes } => format!("WAL of {}, nothing dispatched", short(*bytes)),
            Kind::Logs { partitions, bytes } => format!("{partitions} partitions of {}", short(*bytes)),
        }
    }
}

/// `1073741824` as `1g`.
fn short(bytes: u64) -> String {
    let units = [(1 << 30, "g"), (1 << 20, "m"), (1 << 10, "k")];
    let unit = units.iter().find(|(unit, _)| bytes.is_multiple_of(*unit));
    unit.map_or_else(|| bytes.to_string(), |(unit, name)| format!("{}{name}", bytes / unit))
}

fn kinds(options: &Options) -> Result<Vec<Kind>, Failure> {
    let mut kinds = vec![Kind::Empty];
    let words =
        |text: &str| text.split(',').map(str::trim).filter(|word| !word.is_empty()).map(str::to_owned).collect();
    let wals: Vec<String> = words(&options.wal);
    for word in wals {
        let bytes = parse_bytes(&word).ok().filter(|bytes| (1 << 20..=WAL_BYTES_MAX).contains(bytes));
        let bytes =
            bytes.ok_or_else(|| Failure(format!("--wal {word}: give sizes from 1MiB to 64GiB, such as 64MiB,1GiB")))?;
        kinds.push(Kind::Wal { bytes });
    }
    let logs: Vec<String> = words(&options.partitions);
    for word in logs {
        let parsed = word.split_once('x').and_then(|(partitions, bytes)| {
            let partitions = partitions.parse().ok().filter(|count| (1..=PARTITIONS_MAX).contains(count))?;
            let bytes = parse_bytes(bytes).ok().filter(|bytes| (1..=LOG_BYTES_MAX).contains(bytes))?;
            Some(Kind::Logs { partitions, bytes })
        });
        kinds.push(parsed.ok_or_else(|| {
            Failure(format!(
                "--partitions {word}: give up to {PARTITIONS_MAX} logs of up to 60MiB each, such as 64x1MiB"
            ))
        })?);
    }
    Ok(kinds)
}

/// One start.
#[derive(Clone, Copy)]
struct Start {
    seconds: f64,
    cpu_seconds: f64,
    /// Reading the same files one after the other, just before.
    read_seconds: f64,
    bytes: u64,
}

/// Measures.
pub fn run(_common: &Common, options: &Options) -> Result<Run, Failure> {
    let kinds = kinds(options)?;
    let cpu = cores::choose(options.cpus.as_deref(), 1)?[0];
    require("--rounds", options.rounds, 1..=ROUNDS_MAX)?;
    require("--payload", options.payload, 1..=1 << 20)?;
    require_directory(&options.dir)?;
    let narad = program(options.binary.as_deref())?;
    let plan = Plan {
        binary: Some(narad.clone()),
        directory: options.dir.clone(),
        cpus: Some(vec![cpu]),
        confine: false,
        arguments: String::new(),
        environment: vec![("NARAD_TOPIC_MAX_PARTITIONS", PARTITIONS_MAX.to_string())],
    };
    let home = Home::below(&options.dir)?;
    let mut run = Run::new("recover");
    for (name, value) in [
        ("dir", options.dir.display().to_string()),
        ("binary", narad.display().to_string()),
        ("cpus", cpu.to_string()),
        ("wal", options.wal.clone()),
        ("partitions", options.partitions.clone()),
        ("payload", options.payload.to_string()),
        ("rounds", options.rounds.to_string()),
    ] {
        run.set(name, value);
    }
    let mut table = Table {
        title: "From the start of the process to the first 200 of /readyz (medians)".into(),
        head: ["", "seconds", "on a CPU", "above empty", "read of the files", "ratio"].map(String::from).to_vec(),
        rows: Vec::new(),
    };
    let (mut empty, mut cold) = (0.0, true);
    for kind in &kinds {
        let mut starts = Vec::new();
        for round in 0..options.rounds {
            let data = home.path().join(format!("{}-{round}", kind.name()));
            prepare::directory(&plan, &data, cpu, kind, options.payload)?;
            cold &= drop_caches().is_ok();
            let (bytes, read_seconds) = read_files(&data, kind, cpu)?;
            cold &= drop_caches().is_ok();
            let broker = plan.start_on(&data, PATIENCE)?;
            let (seconds, cpu_seconds) = (broker.ready_after.as_secs_f64(), cpu_seconds(&broker));
            broker.kill();
            starts.push(Start { seconds, cpu_seconds, read_seconds, bytes });
            std::fs::remove_dir_all(&data)?;
        }
        starts.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let median = starts[starts.len() / 2];
        let read = starts.iter().map(|start| start.read_seconds).sum::<f64>() / starts.len() as f64;
        if *kind == Kind::Empty {
            // The fastest: one that the drive held up would make everything else look quick.
            empty = starts[0].seconds;
        }
        report(&mut run, &mut table, kind, median, read, empty);
    }
    run.tables.push(table);
    run.notes.extend(
        [
            "The broker is the real program with one shard, started on a directory that a process left without closing \
             anything, as kill -9 does: WAL records of which none was dispatched, or logs without a boundary.",
            "`seconds_ratio` is the time above that of the fastest empty start over reading the same files (direct, 1 MiB at a \
             time, four under way), just before: recovery reads and checks them, it need not be slower than the drive.",
            "WAL and logs are read past the page cache, by the broker and by the yardstick. /readyz is asked each \
             millisecond.",
            "Wrong if other programs use the drive or the CPU, or if the drive answers its second reader of a block \
             from a cache of its own.",
        ]
        .map(String::from),
    );
    if !cold {
        run.notes.push(
            "The page cache could not be dropped (that needs root): directories and small files came from memory."
                .into(),
        );
    }
    Ok(run)
}

fn report(run: &mut Run, table: &mut Table, kind: &Kind, median: Start, read: f64, empty: f64) {
    let name = format!("recover.{}", kind.name());
    run.figure(format!("{name}.seconds"), median.seconds, "s", Better::Lower);
    run.figure(format!("{name}.cpu_seconds"), median.cpu_seconds, "s", Better::Lower);
    let mut row = vec![kind.describe(), format!("{:.3}", median.seconds), format!("{:.2}", median.cpu_seconds)];
    if *kind == Kind::Empty {
        row.extend(["", "", ""].map(String::from));
    } else {
        let above = median.seconds - empty;
        run.figure(format!("{name}.read_seconds"), read, "s", Better::Neither);
        run.figure(format!("{name}.bytes"), median.bytes as f64, "B", Better::Neither);
        run.figure(format!("{name}.seconds_ratio"), above / read, "ratio", Better::Lower);
        row.extend([format!("{above:.3}"), format!("{read:.3}"), format!("{:.2}", above / read)]);
    }
    table.rows.push(row);
}

/// Seconds that the process has been on a CPU so far; 0 where /proc does not say.
fn cpu_seconds(broker: &Broker) -> f64 {
    let probe = Probe { pid: Some(broker.pid()), ..Probe::default() };
    probe.sample().cpu.map_or(0.0, |cpu| cpu.as_secs_f64())
}

fn drop_caches() -> std::io::Result<()> {
    OpenOptions::new().write(true).open("/proc/sys/vm/drop_caches")?.write_all(b"3")
}

/// What recovery has to read, read as fast as the drive gives it: bytes and seconds.
fn read_files(data: &Path, kind: &Kind, cpu: usize) -> Result<(u64, f64), Failure> {
    let (below, ending) = match kind {
        Kind::Empty => return Ok((0, 0.0)),
        Kind::Wal { .. } => (data.join("ingress"), "wal"),
        Kind::Logs { .. } => (data.join("topics"), "log"),
    };
    let mut files = Vec::new();
    list(&below, ending, &mut files)?;
    if ending == "wal" {
        // Recovery reads the header of a spare, and no more.
        files = files
            .into_iter()
            .filter_map(|path| is_active(&path).map(|yes| yes.then_some(path)).transpose())
            .collect::<std::io::Result<_>>()?;
    }
    let data = data.to_owned();
    cores::join(cores::start("read", cpu, Duration::ZERO, move |handle| async move {
        let disk = handle.disk(&data, true)?;
        let start = nanos();
        let mut bytes = 0;
        for file in files {
            bytes += read_file(&disk, &file).await?;
        }
        Ok((bytes, (nanos() - start) as f64 / 1e9))
    }))
}

fn list(below: &Path, ending: &str, files: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(below)? {
        let path = entry?.path();
        if path.is_dir() {
            list(&path, ending, files)?;
        } else if path.extension().is_some_and(|extension| extension == ending) {
            files.push(path);
        }
    }
    files.sort();
    Ok(())
}

/// Whether a WAL segment holds records, by its header.
fn is_active(path: &Path) -> std::io::Result<bool> {
    let mut front = [0; 16];
    std::fs::File::open(path)?.read_exact(&mut front)?;
    Ok(front.starts_with(b"NARADWAL") && front[12..] == 2u32.to_le_bytes())
}

async fn read_file(disk: &Disk, path: &Path) -> Result<u64, Failure> {
    let file = disk.open(path, Open::Existing, Caching::Direct).await?;
    let bytes = file.len().await? / 4096 * 4096;
    let readers: Vec<_> = (0..READERS)
        .map(|reader| {
            let file = file.clone();
            Box::pin(async move {
                let mut at = reader * READ_BYTES;
                while at < bytes {
                    file.read_at(at, READ_BYTES.min(bytes - at) as usize).await?;
                    at += READERS * READ_BYTES;
                }
                Ok::<(), std::io::Error>(())
            })
        })
        .collect();
    for read in rt::all(readers).await {
        read?;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(wal: &str, partitions: &str) -> Options {
        Options {
            dir: std::env::temp_dir(),
            binary: None,
            cpus: None,
            wal: wal.into(),
            partitions: partitions.into(),
            payload: 256,
            rounds: 1,
        }
    }

    #[test]
    fn sizes_are_read_and_named_shortly() {
        let kinds = kinds(&options("64MiB,1GiB", "8x32MiB")).expect("good flags");
        let names: Vec<String> = kinds.iter().map(Kind::name).collect();
        assert_eq!(names, ["empty", "wal_64m", "wal_1g", "p8x32m"]);
    }

    #[test]
    fn a_size_that_makes_no_sense_is_refused_with_a_sentence() {
        for (wal, partitions, flag) in [("1", "", "--wal 1"), ("x", "", "--wal x"), ("", "8", "--partitions 8")] {
            let Failure(text) = kinds(&options(wal, partitions)).expect_err("refused");
            assert!(text.contains(flag) && text.contains("such as"), "{text}");
        }
        assert!(kinds(&options("", "9999x1MiB")).is_err() && kinds(&options("", "8x1GiB")).is_err());
    }
}
