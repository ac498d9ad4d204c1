//! `narad-bench wal`: appends to the ingress WAL by several callers on one core.

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use argh::FromArgs;
use hdrhistogram::Histogram;
use narad_shards::io::{AlignedBuf, Caching, Disk, Open};
use narad_shards::meta::Incarnation;
use narad_shards::rt::ring::RingHandle;
use narad_shards::rt::{self, Queue};
use narad_shards::wal::{NewWalRecord, Wal, WalMetrics, WalOptions};
use narad_shards::wal::{ReadLimit, Source};

use crate::load::cpu;
use crate::load::process::Home;
use crate::parts::disks::InstantDisk;
use crate::parts::{cores, counts, nanos, seconds};
use crate::run::{histogram, Better, Failure, Load, Run, Table};
use crate::Common;

/// appends to the ingress WAL, on the real disk and on an instant one
#[derive(FromArgs)]
#[argh(subcommand, name = "wal")]
pub struct Options {
    /// directory on the drive to measure (default: the working directory)
    #[argh(option, default = "PathBuf::from(\".\")")]
    dir: PathBuf,
    /// the CPU of the shard (default: the first that this process may use)
    #[argh(option, from_str_fn(cpu::parse))]
    cpus: Option<Vec<usize>>,
    /// callers that append one record at a time (default 1,8,64,256)
    #[argh(option, default = "\"1,8,64,256\".into()")]
    callers: String,
    /// bytes of a record's payload (default 256)
    #[argh(option, default = "256")]
    payload: usize,
    /// bytes of the large records that are measured against the drive's bandwidth (default 65536)
    #[argh(option, default = "65536")]
    large_payload: usize,
    /// seconds of each measurement (default 2)
    #[argh(option, default = "2.0")]
    seconds: f64,
    /// microseconds that the shard looks for work before it sleeps (default 0)
    #[argh(option, default = "0")]
    spin_us: u64,
}

const CALLERS_MAX: usize = 4096;
/// A record takes at most a chunk of 2 MiB with its head and topic.
const PAYLOAD_BYTES_MAX: usize = (2 << 20) - 4096;
const TOPIC: &str = "bench";
/// Callers of large records: of 64 KiB each they fill two groups, one that is written while the other is staged.
const LARGE_CALLERS: usize = 64;
/// Times that the drive's bandwidth and the WAL take turns.
const ROUNDS: usize = 3;
/// Block sizes tried for the drive's bandwidth.
const BLOCKS: [usize; 5] = [64 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20];
/// Records of a measurement at least: it goes on until there are so many.
const COUNT_MIN: u64 = 16;
/// Bytes that the bandwidth measurement writes over and over.
const BAND_BYTES: u64 = 64 << 20;

/// What one measurement gave.
struct Sample {
    records: u64,
    nanos: u64,
    /// Nanoseconds that the core worked for it.
    busy_nanos: u64,
    /// Of the measured time alone, where they are counters.
    groups: u64,
    bytes_written: u64,
    /// Segments begun, and those of them that were not prepared.
    rolls: u64,
    rolls_unprepared: u64,
    flush_us: Histogram<u64>,
    latency: Histogram<u64>,
    rate_per_s: Vec<f64>,
}

impl Sample {
    /// What the core would do if nothing else ran on it and nothing had to be waited for.
    fn core_rate(&self) -> f64 {
        self.records as f64 * 1e9 / self.busy_nanos.max(1) as f64
    }

    fn rate(&self) -> f64 {
        self.records as f64 * 1e9 / self.nanos.max(1) as f64
    }

    fn records_per_group(&self) -> f64 {
        self.records as f64 / self.groups.max(1) as f64
    }
}

/// Measures.
pub fn run(_common: &Common, options: &Options) -> Result<Run, Failure> {
    let cpu = cores::choose(options.cpus.as_deref(), 1)?[0];
    let callers = counts("--callers", &options.callers, CALLERS_MAX)?;
    let each = seconds("--seconds", options.seconds)?;
    for (flag, bytes) in [("--payload", options.payload), ("--large-payload", options.large_payload)] {
        if bytes == 0 || bytes > PAYLOAD_BYTES_MAX {
            return Err(Failure(format!("{flag} {bytes}: a record's payload is 1 to {PAYLOAD_BYTES_MAX} bytes")));
        }
    }
    let home = Home::below(&options.dir)?;
    let mut run = Run::new("wal");
    run.load = Some(Load::Closed);
    for (name, value) in [
        ("dir", options.dir.display().to_string()),
        ("cpus", cpu.to_string()),
        ("callers", options.callers.clone()),
        ("payload", options.payload.to_string()),
        ("large_payload", options.large_payload.to_string()),
        ("seconds", options.seconds.to_string()),
        ("spin_us", options.spin_us.to_string()),
        ("durability", "each record durable (RWF_DSYNC) before its caller goes on; instant: none".to_string()),
    ] {
        run.set(name, value);
    }
    let spin = Duration::from_micros(options.spin_us);
    let (root, payload, large) = (home.path().to_owned(), options.payload, options.large_payload);
    let thread = cores::start("wal", cpu, spin, move |handle| async move {
        let device = handle.disk(&root, true)?;
        measure_all(run, &handle, device, &root, &callers, [payload, large], each).await
    });
    cores::join(thread)
}

async fn measure_all(
    mut run: Run,
    core: &RingHandle,
    device: Disk,
    root: &Path,
    callers: &[usize],
    [payload, large]: [usize; 2],
    each: Duration,
) -> Result<Run, Failure> {
    let head = [
        "disk",
        "callers",
        "records/s",
        "per busy core-s",
        "p50 µs",
        "p99 µs",
        "records/group",
        "sync p50 µs",
        "written/stored",
    ];
    let mut table = Table {
        title: format!("Appends of {payload} B by so many callers"),
        head: head.map(String::from).to_vec(),
        rows: Vec::new(),
    };
    for kind in ["instant", "device"] {
        for callers in callers {
            let (disk, dir) = match kind {
                "device" => (device.clone(), root.join(format!("c{callers}"))),
                _ => (InstantDisk::disk(), PathBuf::from("/ingress/0")),
            };
            let sample = appends(core, disk, &dir, *callers, payload, each).await?;
            record(&mut run, &mut table, kind, *callers, payload, sample);
        }
    }
    run.tables.push(table);
    bandwidth(&mut run, core, device, root, large, each).await?;
    run.notes.extend(
        [
            "Closed loop: each caller appends its next record when the last one is durable.",
            "`instant` is a disk that takes no time and keeps nothing: what is left is the processor's part of an append \
             (staging, checksums, group, wake-up) with nothing else on the core.",
            "`core_rate` is records per second that the thread was on its CPU, spinning left out: on a machine with other \
             load `rate` is what was left of it.",
            "A stand-in for the dispatcher takes the records from memory each millisecond and moves the checkpoint each \
             10 ms, so that segments are recycled; the checkpoint's writes and syncs are part of `device`.",
            "`written/stored` counts bytes of groups over bytes of payloads.",
            "Wrong if the core has other work, or if other programs use the drive.",
        ]
        .map(String::from),
    );
    Ok(run)
}

fn record(run: &mut Run, table: &mut Table, kind: &str, callers: usize, payload: usize, sample: Sample) {
    let name = format!("wal.{kind}.c{callers}");
    let per_group = sample.records_per_group();
    let written = sample.bytes_written as f64 / (sample.records as f64 * payload as f64).max(1.0);
    let micros = |quantile| sample.latency.value_at_quantile(quantile) as f64 / 1000.0;
    let sync = sample.flush_us.value_at_quantile(0.5);
    table.rows.push(vec![
        kind.into(),
        callers.to_string(),
        format!("{:.0}", sample.rate()),
        format!("{:.0}", sample.core_rate()),
        format!("{:.1}", micros(0.5)),
        format!("{:.1}", micros(0.99)),
        format!("{per_group:.1}"),
        sync.to_string(),
        format!("{written:.2}"),
    ]);
    run.figure(format!("{name}.rate"), sample.rate(), "1/s", Better::Higher);
    run.figure(format!("{name}.core_rate"), sample.core_rate(), "1/s", Better::Higher);
    run.figure(format!("{name}.records_per_group"), per_group, "count", Better::Neither);
    run.figure(format!("{name}.written_per_stored"), written, "ratio", Better::Lower);
    if kind == "device" {
        run.figure(format!("{name}.sync.p50"), sync as f64 * 1000.0, "ns", Better::Lower);
    }
    run.latency(&name, sample.latency, sample.rate_per_s);
}

/// Appends by `callers` on an own WAL in `dir`, for `each` after a warm-up.
async fn appends(
    core: &RingHandle,
    disk: Disk,
    dir: &Path,
    callers: usize,
    payload: usize,
    each: Duration,
) -> Result<Sample, Failure> {
    let wal = Wal::open(WalOptions::new(disk, dir.to_owned(), 0, 1)).await?;
    let driver = Rc::new(Driver {
        wal: wal.clone(),
        payload: vec![0x61; payload],
        stop: Cell::new(false),
        done: Cell::new(0),
        latency: RefCell::new(histogram()),
    });
    let dispatcher = rt::spawn(Queue::Foreground, driver.clone().stand_in());
    let tasks: Vec<_> = (0..callers).map(|_| rt::spawn(Queue::Foreground, driver.clone().caller())).collect();
    // Until the first segments were recycled, at least: then none is being filled beside the traffic.
    rt::sleep(each / 4).await;
    let before = driver.begin();
    let (start, busy) = (nanos(), core.metrics().busy_nanos);
    let mut rate_per_s = Vec::new();
    let mut left = each;
    while !left.is_zero() {
        let step = left.min(Duration::from_secs(1));
        let done = driver.done.get();
        rt::sleep(step).await;
        if step == Duration::from_secs(1) {
            rate_per_s.push((driver.done.get() - done) as f64);
        }
        left -= step;
    }
    // However slow the drive is: a rate of a handful says nothing.
    while driver.done.get() < COUNT_MIN {
        rt::sleep(Duration::from_millis(1)).await;
    }
    let (records, took) = (driver.done.get(), nanos() - start);
    let busy_nanos = core.metrics().busy_nanos - busy;
    let after = wal.metrics();
    let latency = driver.latency.replace(histogram());
    driver.stop.set(true);
    for task in tasks {
        task.await?;
    }
    dispatcher.await;
    wal.close().await.map_err(Failure)?;
    let mut flush_us = after.flush_us.clone();
    flush_us.subtract(&before.flush_us).map_err(|error| Failure(format!("two counts of one WAL differ: {error}")))?;
    Ok(Sample {
        records,
        nanos: took,
        busy_nanos,
        groups: after.groups - before.groups,
        bytes_written: after.bytes_written - before.bytes_written,
        rolls: after.rolls - before.rolls,
        rolls_unprepared: after.rolls_unprepared - before.rolls_unprepared,
        flush_us,
        latency,
        rate_per_s,
    })
}

struct Driver {
    wal: Wal,
    payload: Vec<u8>,
    stop: Cell<bool>,
    /// Records since the measured time began.
    done: Cell<u64>,
    latency: RefCell<Histogram<u64>>,
}

impl Driver {
    /// Counts from zero.
    fn begin(&self) -> WalMetrics {
        self.done.set(0);
        self.latency.borrow_mut().reset();
        self.wal.metrics()
    }

    async fn caller(self: Rc<Driver>) -> Result<(), Failure> {
        let record = NewWalRecord {
            topic: TOPIC,
            incarnation: Incarnation(1),
            key: b"",
            partition: 0,
            accepted_at_ms: 1_700_000_000_000,
            payload: &self.payload,
        };
        while !self.stop.get() {
            // One in eight is timed: two readings of the clock would be a tenth of an append's cost.
            let timed = self.done.get().is_multiple_of(8).then(nanos);
            self.wal.append(&[record]).await?;
            self.done.set(self.done.get() + 1);
            if let Some(sent) = timed {
                self.latency.borrow_mut().saturating_record(nanos() - sent);
            }
        }
        Ok(())
    }

    /// What a dispatcher that keeps up does to the WAL.
    async fn stand_in(self: Rc<Driver>) {
        const LAST: ReadLimit = ReadLimit { records_max: 1, bytes_max: usize::MAX };
        let mut turn = 0u32;
        while !self.stop.get() {
            let next = self.wal.durable_next();
            self.wal.read_memory(next.saturating_sub(1), LAST);
            if turn.is_multiple_of(10) {
                self.wal.store_checkpoint(next);
            }
            turn = turn.wrapping_add(1);
            rt::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// Large records against what the drive takes, in turns.
async fn bandwidth(
    run: &mut Run,
    core: &RingHandle,
    device: Disk,
    root: &Path,
    large: usize,
    each: Duration,
) -> Result<(), Failure> {
    let file = device.open(&root.join("band"), Open::New, Caching::Direct).await?;
    file.allocate(0, BAND_BYTES).await?;
    narad_shards::io::zero_fill(&file, 0, BAND_BYTES, |_| rt::yield_now()).await?;
    file.sync_data().await?;
    let (mut best, mut samples) = ([0.0f64; BLOCKS.len()], Vec::new());
    for round in 0..ROUNDS {
        for (block, best) in BLOCKS.iter().zip(&mut best) {
            *best += durable_bytes_per_s(&file, *block, each / 10).await? / ROUNDS as f64;
        }
        let dir = root.join(format!("large{round}"));
        samples.push(appends(core, device.clone(), &dir, LARGE_CALLERS, large, each).await?);
        device.remove_dir_all(&dir).await?;
    }
    let instant = appends(core, InstantDisk::disk(), Path::new("/large/0"), LARGE_CALLERS, large, each / 2).await?;
    let mean = |of: &dyn Fn(&Sample) -> f64| samples.iter().map(of).sum::<f64>() / samples.len() as f64;
    let wal = mean(&|sample| sample.rate() * large as f64);
    let (drive, block) = best.iter().zip(BLOCKS).fold((0.0, 0), |most, (rate, block)| match *rate > most.0 {
        true => (*rate, block),
        false => most,
    });
    let core_rate = mean(&|sample| sample.core_rate() * large as f64);
    let instant = instant.core_rate() * large as f64;
    let per_group = mean(&Sample::records_per_group);
    let sync = mean(&|sample| sample.flush_us.value_at_quantile(0.5) as f64 * 1000.0);
    let rolls: u64 = samples.iter().map(|sample| sample.rolls).sum();
    let unprepared: u64 = samples.iter().map(|sample| sample.rolls_unprepared).sum();
    run.figure("wal.drive.bytes_per_s", drive, "B/s", Better::Neither);
    run.figure("wal.drive.best_block", block as f64, "B", Better::Neither);
    run.figure("wal.large.bytes_per_s", wal, "B/s", Better::Higher);
    run.figure("wal.large.drive_ratio", wal / drive, "ratio", Better::Higher);
    run.figure("wal.large.core_rate", core_rate, "B/s", Better::Higher);
    run.figure("wal.large.instant.core_rate", instant, "B/s", Better::Higher);
    run.figure("wal.large.records_per_group", per_group, "count", Better::Neither);
    run.figure("wal.large.sync.p50", sync, "ns", Better::Lower);
    run.figure("wal.large.unprepared", unprepared as f64 / rolls.max(1) as f64, "ratio", Better::Lower);
    let rows = BLOCKS.iter().zip(best).map(|(block, rate)| (format!("drive, {} KiB writes", block >> 10), rate));
    let rows = rows.chain([
        (format!("WAL, {LARGE_CALLERS} callers of {large} B payloads"), wal),
        ("the same, per busy core-second".into(), core_rate),
        ("the same on the instant disk".into(), instant),
    ]);
    run.tables.push(Table {
        title: "Durable bytes".into(),
        head: ["", "MB/s", "of the drive"].map(String::from).to_vec(),
        rows: rows
            .map(|(name, rate)| vec![name, format!("{:.0}", rate / 1e6), format!("{:.2}", rate / drive)])
            .collect(),
    });
    run.notes.push(format!(
        "The WAL of large records: {per_group:.1} records a group, sync p50 {:.0} µs, {rolls} segments begun, \
         {unprepared} of them unprepared.",
        sync / 1000.0
    ));
    run.notes.push(format!(
        "The drive's bandwidth is one durable write (RWF_DSYNC) after the other over {} MiB of blocks that were written \
         before, at its best block size; it and the WAL took {ROUNDS} turns. The ratio counts payload bytes only, and \
         the WAL has up to four writes in flight: it can be above 1.",
        BAND_BYTES >> 20
    ));
    Ok(())
}

/// One durable write of `block` bytes after the other.
async fn durable_bytes_per_s(file: &narad_shards::io::File, block: usize, length: Duration) -> Result<f64, Failure> {
    let mut data = AlignedBuf::zeroed(block);
    data.fill(0x5a);
    let data = data.freeze();
    let (start, mut at, mut bytes) = (nanos(), 0, 0u64);
    while bytes == 0 || nanos() - start < length.as_nanos() as u64 {
        file.write_durable_at(at, data.clone()).await?;
        bytes += block as u64;
        at = (at + block as u64) % BAND_BYTES;
    }
    Ok(bytes as f64 * 1e9 / (nanos() - start) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> Options {
        Options {
            dir: std::env::temp_dir(),
            cpus: None,
            callers: "1,4".into(),
            payload: 100,
            large_payload: 60_000,
            seconds: 0.02,
            spin_us: 0,
        }
    }

    #[test]
    fn both_disks_give_figures_and_nothing_stays_behind() {
        let dir = std::env::temp_dir().join(format!("narad-bench-test-wal-{}", std::process::id()));
        std::fs::create_dir(&dir).expect("a place");
        let common = Common { out: None, compare: None, repeat: 1 };
        let run = run(&common, &Options { dir: dir.clone(), ..options() }).expect("measured");
        let value = |name: &str| run.value(name).unwrap_or_else(|| panic!("no figure {name}"));
        assert!(value("wal.instant.c4.rate") > 0.0 && value("wal.device.c1.rate") > 0.0);
        // A lone record of 100 bytes fills a block of 4096 by itself; the first of sixteen was perhaps written just before.
        assert!(value("wal.device.c1.written_per_stored") > 38.0);
        // Of sixteen records; four groups more may be under way.
        assert!(value("wal.instant.c4.records_per_group") >= 0.8);
        assert!(value("wal.large.drive_ratio") > 0.0);
        std::fs::remove_dir(&dir).expect("it is empty");
    }

    #[test]
    fn a_record_that_no_group_holds_is_refused() {
        let common = Common { out: None, compare: None, repeat: 1 };
        let Failure(text) = run(&common, &Options { payload: 4 << 20, ..options() }).expect_err("too large");
        assert!(text.contains("--payload 4194304"), "{text}");
    }
}
