//! Counters of one shard: plain numbers, no atomics, copied out when somebody scrapes.

use std::collections::BTreeMap;

use crate::meta::Destination;

/// Latency histograms count microseconds, three significant digits.
pub type Histogram = hdrhistogram::Histogram<u64>;

/// For series that every partition has, 6 % apart: 2 KiB where [`histogram`] takes 128. There may be 10,000 partitions.
pub fn coarse_histogram() -> Histogram {
    Histogram::new(1).expect("1 significant digit is a valid precision")
}

/// Starts small and grows with its values; fill it with [`record`].
pub fn histogram() -> Histogram {
    Histogram::new(3).expect("3 significant digits is a valid precision")
}

/// Counts a value; one above an hour in microseconds counts as that. The histogram grows for it: its own
/// `saturating_record` would not, and would count what is above its present range, at first 2047, as 2.
pub fn record(histogram: &mut Histogram, value: u64) {
    const MOST: u64 = 3_600_000_000;
    // Fails only where a table of that range cannot be addressed.
    let _ = histogram.record(value.min(MOST));
}

/// One shard's figures at one instant.
#[derive(Clone, Debug, Default)]
pub struct ShardMetrics {
    pub shard: u16,
    pub wal: crate::wal::WalMetrics,
    pub dispatch: crate::dispatch::DispatchMetrics,
    pub queue: crate::queue::QueueMetrics,
    pub partitions: BTreeMap<Destination, PartitionMetrics>,
    pub retention: RetentionMetrics,
    /// Partition logs that are open.
    pub open_logs: u64,
    /// Produces of each topic that were refused before anything was stored, by [`REJECTIONS`].
    pub rejections: BTreeMap<String, [u64; REJECTIONS.len()]>,
    /// `None` before the directories were looked through.
    pub set_aside: Option<SetAside>,
    pub runtime: RuntimeMetrics,
    /// Calls to other nodes, by operation.
    pub calls: Vec<crate::remote::CallMetrics>,
    /// Microseconds of each kernel entry that submitted and did not wait (E30).
    pub enter_us: Option<Histogram>,
}

/// Why a produce was refused.
pub const REJECTIONS: [&str; 5] = ["draining", "disk_reserve", "memory", "no_segment", "wal_failed"];

/// What the start found under `topics` that nobody serves (S12, S13), of the names that this shard looks after.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAside {
    pub copies: u64,
    pub bytes: u64,
    /// Directories of unknown topics that were left in place.
    pub orphans: u64,
}

/// Retention and idle eviction of one shard.
#[derive(Clone, Debug, Default)]
pub struct RetentionMetrics {
    pub idle_logs_evicted: u64,
    /// Closed logs that were opened, swept and closed.
    pub cold_swept: u64,
    /// Passes over closed logs that panicked; one that hangs counts in `passes_abandoned` alone.
    pub cold_panics: u64,
    /// Passes that panicked or hung, and were left behind.
    pub passes_abandoned: u64,
}

/// What happened to one partition since the process started.
#[derive(Clone, Debug, Default)]
pub struct PartitionMetrics {
    pub topic: String,
    pub messages_produced: u64,
    pub bytes_produced: u64,
    pub messages_consumed: u64,
    pub bytes_consumed: u64,
    pub extended: u64,
    pub nacked: u64,
    pub ack_rejected: u64,
    pub corrupt_skipped: u64,
    pub frontier: u64,
    pub high_watermark: u64,
    pub oldest_offset: u64,
    pub leased: u64,
    pub acked_ahead: u64,
    pub size_bytes: u64,
    pub segments: u64,
    /// Commit time of the oldest unsettled record, ms; 0 when caught up.
    pub oldest_unsettled_ms: u64,
    pub log: crate::log::LogMetrics,
}

/// The event loop's own figures.
#[derive(Clone, Debug, Default)]
pub struct RuntimeMetrics {
    pub turns: u64,
    pub enters: u64,
    pub submissions: u64,
    pub completions: u64,
    pub cq_overflow: u64,
    pub busy_nanos: u64,
    /// The rest of its life: asleep, or polling.
    pub idle_nanos: u64,
    /// Of that, polling.
    pub poll_nanos: u64,
    pub ring_depth: u64,
    pub enter_nanos: u64,
    pub connections: u64,
}

/// One shard as an operator watches it. Counters count since the shard was opened and never fall.
#[derive(Clone, Debug, Default)]
pub struct ShardVitals {
    pub shard: u16,
    /// When it was taken: the machine's monotonic clock, in microseconds. Rates come from two of these.
    pub at_us: u64,
    pub runtime: RuntimeMetrics,

    // Counters.
    /// Records made durable in this shard's ingress log, the writes that did it, and their bytes.
    pub produced_records: u64,
    pub produced_groups: u64,
    pub written_bytes: u64,
    /// Records of this shard's ingress log committed to their partitions, and commits sent for them.
    pub committed_records: u64,
    pub commits: u64,
    /// Deliveries to queue consumers from partitions of this shard, redeliveries included.
    pub delivered_records: u64,

    // The last whole window, a second or longer; 0 before there was one.
    pub window_us: u64,
    pub busy_ratio: f64,
    /// Durable writes of the ingress log.
    pub sync: Latency,
    /// Commits, until their answer.
    pub commit: Latency,

    // Gauges.
    pub backlog_records: u64,
    /// Taken and not durable yet.
    pub staged_records: u64,
    pub destinations_failing: u64,
    pub wal_failed: bool,
    pub wal_live_bytes: u64,
    /// Partitions with an open log.
    pub partitions: u64,
    pub leases: u64,
    pub consumers_parked: u64,
    pub memory_budget_bytes: u64,
    pub staging_bytes: u64,
    pub staging_bytes_max: u64,
    pub cache_bytes: u64,
    pub cache_bytes_max: u64,
}

/// What a window saw of one kind of operation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Latency {
    pub count: u64,
    /// `None` when there was none.
    pub p50_us: Option<u64>,
    pub p99_us: Option<u64>,
    /// Operations in flight on average.
    pub in_flight: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_above_the_first_range_is_counted_as_what_it_is() {
        for (mut histogram, parts) in [(histogram(), 1000), (coarse_histogram(), 16)] {
            record(&mut histogram, 5_000_000);
            assert!(histogram.max().abs_diff(5_000_000) < 5_000_000 / parts, "{}", histogram.max());
            record(&mut histogram, u64::MAX);
            assert!(histogram.max().abs_diff(3_600_000_000) < 3_600_000_000 / parts, "{}", histogram.max());
            assert_eq!(histogram.len(), 2);
        }
    }
}
