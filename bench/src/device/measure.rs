//! One slice of measuring: an operation, a size, a depth, a short time.

use std::fs::File;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use super::ring::{Bounds, Operation, Ring};
use super::scratch::Scratch;
use crate::run::{histogram, Failure};

/// How a write is made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Method {
    /// Direct write with `RWF_DSYNC`.
    Dsync,
    /// Direct write linked to an fdatasync.
    Linked,
    /// Direct write, then fdatasync.
    WriteThenSync,
    /// Write into the page cache, then fdatasync.
    Buffered,
}

impl Method {
    /// All of them.
    pub const ALL: [Method; 4] = [Method::Dsync, Method::Linked, Method::WriteThenSync, Method::Buffered];

    /// Name in figures.
    pub fn name(self) -> &'static str {
        match self {
            Method::Dsync => "dsync",
            Method::Linked => "linked",
            Method::WriteThenSync => "write_sync",
            Method::Buffered => "buffered",
        }
    }

    /// Name for people.
    pub fn title(self) -> &'static str {
        match self {
            Method::Dsync => "RWF_DSYNC",
            Method::Linked => "linked write+fdatasync",
            Method::WriteThenSync => "write then fdatasync",
            Method::Buffered => "buffered+fdatasync",
        }
    }

    /// Whether it passes the page cache.
    pub fn direct(self) -> bool {
        self != Method::Buffered
    }

    fn operation(self) -> Operation {
        match self {
            Method::Dsync => Operation::WriteDsync,
            Method::Linked => Operation::WriteLinkedSync,
            Method::WriteThenSync => Operation::WriteThenSync,
            Method::Buffered => Operation::CopyThenSync,
        }
    }
}

/// What a slice (or several, merged) gave.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Nanoseconds of each operation.
    pub latency: Histogram<u64>,
    /// Bytes of each operation.
    pub bytes: usize,
    /// Time that the operations took together.
    pub elapsed: Duration,
    /// Of that, time in which the measuring thread could have run, and other programs had its CPU.
    pub waited_for_cpu: Duration,
}

impl Sample {
    /// Nothing yet, for operations of `bytes`.
    pub fn empty(bytes: usize) -> Sample {
        Sample { latency: histogram(), bytes, elapsed: Duration::ZERO, waited_for_cpu: Duration::ZERO }
    }

    /// Adds what another slice gave.
    pub fn merge(&mut self, other: &Sample) {
        // Both have the bounds of `histogram()`; saturating values were recorded in both.
        let _ = self.latency.add(&other.latency);
        self.elapsed += other.elapsed;
        self.waited_for_cpu += other.waited_for_cpu;
    }

    /// Nanoseconds at a quantile.
    pub fn quantile_ns(&self, quantile: f64) -> f64 {
        self.latency.value_at_quantile(quantile) as f64
    }

    /// Operations per second.
    pub fn rate_per_s(&self) -> f64 {
        self.latency.len() as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// Share of the time in which the measuring thread waited for a CPU: what it measured then is not the drive.
    pub fn cpu_wait(&self) -> f64 {
        self.waited_for_cpu.as_secs_f64() / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// Bytes per second.
    pub fn bytes_per_s(&self) -> f64 {
        self.rate_per_s() * self.bytes as f64
    }
}

fn slice(ring: &mut Ring, file: &File, operation: Operation, bounds: Bounds<'_>) -> Result<Sample, Failure> {
    let bytes = bounds.bytes;
    let mut sample = Sample::empty(bytes);
    let (begin, waited) = (Instant::now(), waited_for_cpu());
    ring.drive(file, operation, bounds, &mut |took| {
        sample.latency.saturating_record(took.as_nanos().min(u64::MAX as u128) as u64);
    })
    .map_err(|error| Failure(format!("{operation:?} of {bytes} bytes on the scratch file failed: {error}")))?;
    sample.elapsed = begin.elapsed();
    sample.waited_for_cpu = waited_for_cpu().saturating_sub(waited);
    Ok(sample)
}

/// Time since its start that this thread was runnable without running; zero where the kernel does not count it.
fn waited_for_cpu() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(text.split_whitespace().nth(1).and_then(|nanos| nanos.parse().ok()).unwrap_or(0))
}

/// Durable writes, one after the other through the file, `depth` in flight. Ends early where the fresh blocks do.
pub fn writes(
    ring: &mut Ring,
    scratch: &mut Scratch,
    method: Method,
    bytes: usize,
    depth: usize,
    time: Duration,
) -> Result<Sample, Failure> {
    scratch.ready((scratch.bytes() / 2).max((bytes * depth) as u64))?;
    let file = scratch.file.clone();
    let offsets = &mut || scratch.next(bytes as u64);
    slice(ring, &file, method.operation(), Bounds { bytes, depth, time, offsets })
}

/// Flushes with nothing to write back before them.
pub fn flushes(ring: &mut Ring, scratch: &Scratch, time: Duration) -> Result<Sample, Failure> {
    slice(ring, &scratch.file, Operation::Sync, Bounds { bytes: 0, depth: 1, time, offsets: &mut || Some(0) })
}

/// Reads of the file from its begin to its end and again, or (`random`) all over it.
pub fn reads(
    ring: &mut Ring,
    scratch: &Scratch,
    bytes: usize,
    depth: usize,
    random: bool,
    time: Duration,
) -> Result<Sample, Failure> {
    let blocks = scratch.bytes() / bytes as u64;
    let (mut next, mut state) = (0_u64, 0x2545_f491_4f6c_dd1d_u64);
    let mut offsets = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let block = if random { (state >> 33) % blocks } else { next % blocks };
        next += 1;
        Some(block * bytes as u64)
    };
    slice(ring, &scratch.file, Operation::Read, Bounds { bytes, depth, time, offsets: &mut offsets })
}
