//! All figures of one shard, gathered when somebody asks: each mechanism counts its own in plain numbers, no atomics.

use std::collections::BTreeMap;

use crate::dispatch::DispatchMetrics;
use crate::histogram::Histogram;
use crate::meta::Destination;
use crate::queue::{PartitionMetrics, QueueMetrics};
use crate::remote::CallMetrics;
use crate::rt::RuntimeMetrics;
use crate::wal::WalMetrics;

/// One shard's figures at one instant.
#[derive(Clone, Debug, Default)]
pub struct ShardMetrics {
    pub shard: u16,
    pub wal: WalMetrics,
    pub dispatch: DispatchMetrics,
    pub queue: QueueMetrics,
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
    pub calls: Vec<CallMetrics>,
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
