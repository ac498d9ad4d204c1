//! Counters of one shard: plain numbers, no atomics, copied out when somebody scrapes.

use std::collections::BTreeMap;

use crate::meta::Destination;

/// Latency histograms count microseconds, three significant digits.
pub type Histogram = hdrhistogram::Histogram<u64>;

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
    pub runtime: RuntimeMetrics,
    /// Microseconds of each kernel entry that submitted and did not wait (E30).
    pub enter_us: Option<Histogram>,
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
