//! What `GET /v1/node/shards` says: one definition for the node that writes it and for `narad top`, which reads it.
//! Fields are added, never renamed or given another meaning; docs/operating.md has the table.

use narad_shards::metrics::{Latency, ShardVitals};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeReport {
    pub node: String,
    pub version: String,
    /// Wall clock, ms since the epoch.
    pub time_ms: u64,
    pub connections: u32,
    /// `0`: no cap.
    pub connections_max: u32,
    pub large_body_bytes: u64,
    pub body_memory_bytes: u64,
    pub memory_budget_bytes: u64,
    pub memory_resident_bytes: Option<u64>,
    pub shards: Vec<ShardReport>,
    /// The other nodes, by their names; empty on a node without peers.
    pub peers: Vec<PeerReport>,
}

/// Another node, as this one sees it. Connections are those that were dialled from here.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerReport {
    pub node: String,
    /// Membership's word.
    pub alive: bool,
    pub connections: u64,
    /// Of the slowest of them; nothing without one.
    pub rtt_us: Option<u64>,
    pub queued_bytes: u64,
    pub credit_used_bytes: u64,
    pub credit_bytes: u64,
}

/// One shard. Counters never fall while the process lives; rates are differences over differences of `time_us`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ShardReport {
    pub shard: u16,
    pub cpu: Option<u32>,
    pub pinned: bool,
    pub port: Option<u16>,
    /// `false`: the shard was too busy, or stuck, to answer in a second. What follows is 0 then.
    pub answered: bool,
    pub time_us: u64,
    pub busy_us: u64,
    pub idle_us: u64,

    pub produced_records: u64,
    pub produced_groups: u64,
    pub written_bytes: u64,
    pub committed_records: u64,
    pub commits: u64,
    pub delivered_records: u64,

    pub window_us: u64,
    pub busy_ratio: f64,
    pub sync_p50_us: Option<u64>,
    pub sync_p99_us: Option<u64>,
    pub syncs: u64,
    pub syncs_in_flight: f64,
    pub commit_p50_us: Option<u64>,
    pub commit_p99_us: Option<u64>,

    pub connections: u64,
    pub ring_depth: u64,
    pub backlog_records: u64,
    pub destinations_failing: u64,
    pub wal_failed: bool,
    pub wal_live_bytes: u64,
    pub partitions: u64,
    pub leases: u64,
    pub consumers_parked: u64,
    pub memory_budget_bytes: u64,
    pub staging_bytes: u64,
    pub staging_bytes_max: u64,
    pub cache_bytes: u64,
    pub cache_bytes_max: u64,
}

impl ShardReport {
    pub fn new(cpu: Option<u32>, port: Option<u16>, vitals: &ShardVitals) -> ShardReport {
        let (Latency { count: syncs, in_flight, .. }, rounded) = (vitals.sync, |x: f64| (x * 1e4).round() / 1e4);
        ShardReport {
            shard: vitals.shard,
            cpu,
            pinned: cpu.is_some(),
            port,
            answered: true,
            time_us: vitals.at_us,
            busy_us: vitals.runtime.busy_nanos / 1000,
            idle_us: vitals.runtime.idle_nanos / 1000,
            produced_records: vitals.produced_records,
            produced_groups: vitals.produced_groups,
            written_bytes: vitals.written_bytes,
            committed_records: vitals.committed_records,
            commits: vitals.commits,
            delivered_records: vitals.delivered_records,
            window_us: vitals.window_us,
            busy_ratio: rounded(vitals.busy_ratio),
            sync_p50_us: vitals.sync.p50_us,
            sync_p99_us: vitals.sync.p99_us,
            syncs,
            syncs_in_flight: rounded(in_flight),
            commit_p50_us: vitals.commit.p50_us,
            commit_p99_us: vitals.commit.p99_us,
            connections: vitals.runtime.connections,
            ring_depth: vitals.runtime.ring_depth,
            backlog_records: vitals.backlog_records,
            destinations_failing: vitals.destinations_failing,
            wal_failed: vitals.wal_failed,
            wal_live_bytes: vitals.wal_live_bytes,
            partitions: vitals.partitions,
            leases: vitals.leases,
            consumers_parked: vitals.consumers_parked,
            memory_budget_bytes: vitals.memory_budget_bytes,
            staging_bytes: vitals.staging_bytes,
            staging_bytes_max: vitals.staging_bytes_max,
            cache_bytes: vitals.cache_bytes,
            cache_bytes_max: vitals.cache_bytes_max,
        }
    }

    /// Of the memory that the budget is about: staging and read cache.
    pub fn memory_bytes(&self) -> u64 {
        self.staging_bytes + self.cache_bytes
    }
}
