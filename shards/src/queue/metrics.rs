//! What the queue side of a shard counts.

use std::time::Duration;

use crate::histogram::{histogram, Histogram};
use crate::log::LogMetrics;

/// How consumes of this shard's clients ended (C100); times in microseconds.
#[derive(Clone, Debug)]
pub struct QueueMetrics {
    pub consumes_empty: u64,
    /// Waiters parked on this shard: as the topic's home, or pinned to its partitions.
    pub parked: u64,
    /// Age of the oldest ack that is not in the page cache yet (D16).
    pub oldest_unwritten: Duration,
    pub wait_hit: Histogram,
    pub wait_timeout: Histogram,
    /// Deliveries of partitions that are no longer served here.
    pub delivered_before: u64,
}

impl Default for QueueMetrics {
    fn default() -> Self {
        QueueMetrics {
            consumes_empty: 0,
            parked: 0,
            oldest_unwritten: Duration::ZERO,
            wait_hit: histogram(),
            wait_timeout: histogram(),
            delivered_before: 0,
        }
    }
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
    pub log: LogMetrics,
}
