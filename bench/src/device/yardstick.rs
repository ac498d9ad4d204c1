//! What other figures are divided by. The latency of a drive, a virtual one above all, moves by a factor of ten within
//! seconds: a ratio means something only where both sides were measured next to each other. So [`paired`] samples the
//! drive before and after each round of load, divides pair by pair, and the median of the ratios counts.

use std::path::Path;
use std::time::Duration;

use super::measure::{reads, writes, Method, Sample};
use super::ring::Ring;
use super::scratch::{require_space, Blocks, Scratch};
use crate::report::stats::Spread;
use crate::run::{Better, Failure, Run};

const BLOCK_BYTES: usize = 4096;
const PROBE_FILE_BYTES: u64 = 32 << 20;
const BANDWIDTH_FILE_BYTES: u64 = 128 << 20;
const BANDWIDTH_BLOCKS: [usize; 3] = [64 << 10, 256 << 10, 1 << 20];
/// Length of one sample of the drive in [`paired`].
pub const SAMPLE_TIME: Duration = Duration::from_millis(200);

/// The few numbers that all others are divided by.
#[derive(Clone, Debug)]
pub struct Yardstick {
    /// The durable-write method with the lower p50.
    pub method: Method,
    /// Serial durable 4 KiB writes on recycled blocks.
    pub durable_4k: Sample,
    /// Bytes per second of durable writes, one at a time, at `durable_block_bytes`.
    pub durable_bytes_per_s: f64,
    /// Block size with the highest durable bandwidth.
    pub durable_block_bytes: usize,
    /// Bytes per second of sequential direct reads, 1 MiB, four in flight.
    pub read_bytes_per_s: f64,
}

impl Yardstick {
    /// Serial durable 4 KiB writes per second.
    pub fn durable_4k_rate_per_s(&self) -> f64 {
        self.durable_4k.rate_per_s()
    }

    /// Adds the yardstick to a result, as `device.…` figures.
    pub fn add_to(&self, run: &mut Run) {
        run.figure("device.durable_4k.rate", self.durable_4k_rate_per_s(), "1/s", Better::Higher);
        run.latency("device.durable_4k", self.durable_4k.latency.clone(), Vec::new());
        run.figure("device.durable_bandwidth", self.durable_bytes_per_s, "B/s", Better::Higher);
        run.figure("device.durable_bandwidth.block", self.durable_block_bytes as f64, "B", Better::Neither);
        run.figure("device.read_bandwidth", self.read_bytes_per_s, "B/s", Better::Higher);
        run.figure("device.durable_4k.cpu_wait", self.durable_4k.cpu_wait(), "ratio", Better::Neither);
        run.set("device.method", self.method.title());
        run.notes.extend(cpu_wait_note(&self.durable_4k));
    }
}

/// Measures the yardstick in `dir`, in about `duration`. The scratch file is gone afterwards.
pub fn yardstick(dir: &Path, duration: Duration) -> Result<Yardstick, Failure> {
    let mut probe = Probe::open(dir)?;
    let mut durable_4k = Sample::empty(BLOCK_BYTES);
    for _ in 0..4 {
        durable_4k.merge(&probe.sample(duration / 8)?);
    }
    require_space(dir, BANDWIDTH_FILE_BYTES)?;
    let mut ring = ring(4, 1 << 20)?;
    let mut scratch = Scratch::new(dir, BANDWIDTH_FILE_BYTES, Blocks::Recycled, true)?;
    let mut bandwidth = BANDWIDTH_BLOCKS.map(Sample::empty);
    for _ in 0..2 {
        for sample in &mut bandwidth {
            sample.merge(&writes(&mut ring, &mut scratch, probe.method, sample.bytes, 1, duration / 24)?);
        }
    }
    let best = bandwidth.iter().max_by(|a, b| a.bytes_per_s().total_cmp(&b.bytes_per_s()));
    let (durable_bytes_per_s, durable_block_bytes) = best.map_or((0.0, 0), |best| (best.bytes_per_s(), best.bytes));
    let read = reads(&mut ring, &scratch, 1 << 20, 4, false, duration / 4)?;
    Ok(Yardstick {
        method: probe.method,
        durable_4k,
        durable_bytes_per_s,
        durable_block_bytes,
        read_bytes_per_s: read.bytes_per_s(),
    })
}

/// A sentence where other programs kept the measuring thread from its CPU.
fn cpu_wait_note(sample: &Sample) -> Option<String> {
    // Without the number, which is a figure: the same sentence from many rounds is then one.
    (sample.cpu_wait() > 0.02).then(|| {
        "while the drive was sampled, other programs had the sampling thread's CPU for more than 2 % of the time: the \
         drive looks slower than it is, and ratios to it better"
            .into()
    })
}

pub(super) fn ring(depth: usize, bytes: usize) -> Result<Ring, Failure> {
    Ring::new(depth, bytes).map_err(|error| Failure(error.to_string()))
}

/// An open scratch file, ready to take a sample of the drive at any moment.
pub struct Probe {
    ring: Ring,
    scratch: Scratch,
    /// The method that `sample` uses: the faster of `RWF_DSYNC` and a linked fdatasync at the time of opening.
    pub method: Method,
}

impl Probe {
    /// Prepares a file of 32 MiB in `dir`, and finds the faster method.
    pub fn open(dir: &Path) -> Result<Probe, Failure> {
        require_space(dir, PROBE_FILE_BYTES)?;
        let scratch = Scratch::new(dir, PROBE_FILE_BYTES, Blocks::Recycled, true)?;
        let mut probe = Probe { ring: ring(1, BLOCK_BYTES)?, scratch, method: Method::Dsync };
        let (mut dsync, mut linked) = (Sample::empty(BLOCK_BYTES), Sample::empty(BLOCK_BYTES));
        for _ in 0..4 {
            for (method, sum) in [(Method::Dsync, &mut dsync), (Method::Linked, &mut linked)] {
                probe.method = method;
                sum.merge(&probe.sample(Duration::from_millis(15))?);
            }
        }
        probe.method = if linked.quantile_ns(0.5) < dsync.quantile_ns(0.5) { Method::Linked } else { Method::Dsync };
        Ok(probe)
    }

    /// Serial durable 4 KiB writes for `time`; at least one.
    pub fn sample(&mut self, time: Duration) -> Result<Sample, Failure> {
        writes(&mut self.ring, &mut self.scratch, self.method, BLOCK_BYTES, 1, time.max(Duration::from_micros(100)))
    }
}

/// A round of load, between two samples of the drive.
#[derive(Clone, Debug)]
pub struct Round<T> {
    /// The drive just before.
    pub before: Sample,
    /// What the load gave.
    pub load: T,
    /// The drive just after.
    pub after: Sample,
}

impl<T> Round<T> {
    /// p50 of a serial durable 4 KiB write around this round, nanoseconds.
    pub fn device_p50_ns(&self) -> f64 {
        (self.before.quantile_ns(0.5) + self.after.quantile_ns(0.5)) / 2.0
    }

    /// Serial durable 4 KiB writes per second around this round.
    pub fn device_rate_per_s(&self) -> f64 {
        let elapsed = self.before.elapsed + self.after.elapsed;
        (self.before.latency.len() + self.after.latency.len()) as f64 / elapsed.as_secs_f64().max(1e-9)
    }

    /// Whether the drive was the same before and after, within a factor of two: elsewhere the ratio is a guess.
    pub fn steady(&self) -> bool {
        let (before, after) = (self.before.quantile_ns(0.5), self.after.quantile_ns(0.5));
        before.max(after) <= 2.0 * before.min(after)
    }
}

/// Rounds of load with the drive's samples around each.
#[derive(Clone, Debug)]
pub struct Paired<T> {
    /// In the order they ran.
    pub rounds: Vec<Round<T>>,
}

impl<T> Paired<T> {
    /// Median and spread of a ratio, taken round by round; rounds in which the drive changed its mood do not count, as
    /// long as there are three others.
    pub fn ratio(&self, of: impl Fn(&Round<T>) -> f64) -> Spread {
        let steady: Vec<f64> = self.rounds.iter().filter(|round| round.steady()).map(&of).collect();
        if steady.len() >= 3 {
            return Spread::of(&steady);
        }
        Spread::of(&self.rounds.iter().map(of).collect::<Vec<f64>>())
    }

    /// All samples of the drive in one.
    pub fn device(&self) -> Sample {
        let mut all = Sample::empty(BLOCK_BYTES);
        for (index, round) in self.rounds.iter().enumerate() {
            if index == 0 {
                all.merge(&round.before);
            }
            all.merge(&round.after);
        }
        all
    }

    /// A sentence for the result where the drive moved while it was measured, or could not be measured well.
    pub fn note(&self) -> Option<String> {
        let unsteady = self.rounds.iter().filter(|round| !round.steady()).count();
        let moved = (unsteady > 0).then(|| {
            format!(
                "the drive's own p50 changed by more than a factor of two during {unsteady} of {} rounds",
                self.rounds.len()
            )
        });
        let sentences: Vec<String> = moved.into_iter().chain(cpu_wait_note(&self.device())).collect();
        (!sentences.is_empty()).then(|| sentences.join("; "))
    }
}

/// Runs `load` for `rounds` rounds, with a sample of the drive under `dir` before, between and after them.
pub fn paired<T>(
    dir: &Path,
    rounds: usize,
    mut load: impl FnMut(usize) -> Result<T, Failure>,
) -> Result<Paired<T>, Failure> {
    let mut probe = Probe::open(dir)?;
    let mut before = probe.sample(SAMPLE_TIME)?;
    let mut done = Vec::with_capacity(rounds);
    for round in 0..rounds {
        let load = load(round)?;
        let after = probe.sample(SAMPLE_TIME)?;
        done.push(Round { before, load, after: after.clone() });
        before = after;
    }
    Ok(Paired { rounds: done })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(ns: u64) -> Sample {
        let mut sample = Sample::empty(BLOCK_BYTES);
        for _ in 0..10 {
            sample.latency.saturating_record(ns);
        }
        sample.elapsed = Duration::from_nanos(ns * 10);
        sample
    }

    #[test]
    fn a_ratio_leaves_out_rounds_in_which_the_drive_changed() {
        let round = |before, load, after| Round { before: sample(before), load, after: sample(after) };
        let rounds = vec![
            round(100_000, 200_000.0, 100_000),
            round(100_000, 2_000_000.0, 4_000_000),
            round(1_000_000, 2_000_000.0, 1_000_000),
            round(100_000, 210_000.0, 100_000),
        ];
        let paired = Paired { rounds };
        let ratio = paired.ratio(|round| round.load / round.device_p50_ns());
        assert_eq!(ratio.count, 3);
        assert!((ratio.median - 2.0).abs() < 0.05, "{ratio:?}");
        assert!(paired.note().is_some_and(|note| note.contains("1 of 4")));
        assert!((paired.rounds[0].device_rate_per_s() - 10_000.0).abs() < 1.0);
    }
}
