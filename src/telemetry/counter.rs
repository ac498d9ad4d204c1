//! Cells that one thread writes and any thread may read: plain loads and stores, no read-modify-write.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// A counter, or a gauge, with a single writer. Two writers would lose increments, nothing worse.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub const fn new() -> Counter {
        Counter(AtomicU64::new(0))
    }

    pub fn add(&self, more: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(more), Relaxed);
    }

    pub fn subtract(&self, less: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_sub(less), Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Durations in fixed buckets.
#[derive(Debug, Default)]
pub struct DurationHistogram {
    buckets: [Counter; DurationHistogram::BOUNDS.len() + 1],
    sum_nanos: Counter,
}

impl DurationHistogram {
    /// Upper bounds, in seconds: fine enough below a millisecond to see a drive's sync.
    pub const BOUNDS: [f64; 17] =
        [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

    pub fn record(&self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        let bucket = Self::BOUNDS.partition_point(|bound| *bound < seconds);
        self.buckets[bucket].add(1);
        self.sum_nanos.add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Counts per bucket, the one above all bounds last, and the sum in seconds.
    pub fn read(&self) -> ([u64; DurationHistogram::BOUNDS.len() + 1], f64) {
        (std::array::from_fn(|i| self.buckets[i].get()), self.sum_nanos.get() as f64 / 1e9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_lands_in_the_first_bucket_that_holds_it() {
        let histogram = DurationHistogram::default();
        for micros in [1, 100, 101, 30_000_000, 30_000_001] {
            histogram.record(Duration::from_micros(micros));
        }
        let (buckets, sum) = histogram.read();
        assert_eq!((buckets[0], buckets[1], buckets[16], buckets[17]), (2, 1, 1, 1));
        assert!((sum - 60.000203).abs() < 1e-6, "{sum}");
    }
}
