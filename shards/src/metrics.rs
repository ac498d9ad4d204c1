//! Counters of one shard: plain numbers, no atomics, copied out when somebody scrapes.

use std::collections::BTreeMap;

use crate::meta::Destination;

/// Latency histograms count microseconds, three significant digits.
pub type Histogram = hdrhistogram::Histogram<u64>;

/// For series that every partition has: two significant digits, an eighth of the memory.
pub fn coarse_histogram() -> Histogram {
    Histogram::new(2).expect("2 significant digits is a valid precision")
}

pub fn histogram() -> Histogram {
    Histogram::new(3).expect("3 significant digits is a valid precision")
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
    /// Passes over closed logs that panicked.
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
    pub idle_nanos: u64,
    pub ring_depth: u64,
    pub enter_nanos: u64,
    pub connections: u64,
}
