//! Series of the node as a whole, and those of retention and idle eviction.

use std::collections::BTreeMap;

use narad_shards::metrics::{ShardMetrics, REJECTIONS};

use super::cluster::{render_cluster, ClusterMetrics};
use super::exposition::{Exposition, Kind};

/// What no shard knows. `None`: could not be found out.
#[derive(Clone, Debug, Default)]
pub struct NodeMetrics {
    pub data_dir_bytes: Option<u64>,
    pub data_dir_available_bytes: Option<u64>,
    pub metastore_bytes: Option<u64>,
    pub topics: u64,
    pub metastore_applied_index: u64,
    pub metastore_write_errors: u64,
    pub metastore_stalled: bool,
    pub metastore_stopped: bool,
    /// From the start of the process to the first accepted connection. `None` until then.
    pub boot_seconds: Option<f64>,
    /// What the allocator holds of the kernel's memory, in bytes.
    pub allocator_bytes: u64,
    /// Wall clock of the last scrape that every shard answered, ms since the epoch; the start before the first.
    pub all_answered_ms: u64,
    /// Shards that a scrape did not wait for any longer.
    pub answers_late: u64,
    pub cluster: ClusterMetrics,
}

pub fn render_node(page: &mut Exposition, node: &NodeMetrics, shards: &[ShardMetrics]) {
    use Kind::{Counter, Gauge};
    let mut known = |name, help, value: Option<u64>| {
        if let Some(value) = value {
            page.single(name, Gauge, help, value);
        }
    };
    known("narad_data_dir_size_bytes", "Bytes used under the data directory, at most 30 s old.", node.data_dir_bytes);
    known("narad_data_dir_available_bytes", "Bytes free on its file system.", node.data_dir_available_bytes);
    known("narad_metastore_fsm_bytes", "Size of the metadata file.", node.metastore_bytes);
    known("narad_topics_total", "Topics.", Some(node.topics));
    known(
        "narad_metastore_applied_index",
        "Last metadata change whose effects are stored.",
        Some(node.metastore_applied_index),
    );
    let stalled = "1 while a refused metadata write is tried again.";
    known("narad_metastore_apply_stalled", stalled, Some(node.metastore_stalled.into()));
    let stopped = "1 once metadata writes have stopped for good.";
    known("narad_metastore_apply_stopped", stopped, Some(node.metastore_stopped.into()));
    page.family("narad_metastore_apply_errors_total", Counter, "Metadata writes that failed.");
    page.sample(&[("kind", &"storage")], node.metastore_write_errors);
    if let Some(seconds) = node.boot_seconds {
        page.single("narad_boot_duration_seconds", Gauge, "Start of the process to API listening.", seconds);
    }
    let allocator_help = "Memory that the allocator holds, in use or kept for the next; buffers of the ring are in it.";
    page.single("narad_runtime_allocator_bytes", Gauge, allocator_help, node.allocator_bytes);
    // A scrape takes the figures of both loops at once.
    let answered_help = "Last scrape that all shards answered in 2 s, Unix seconds.";
    page.family("narad_poller_last_success_timestamp_seconds", Gauge, answered_help);
    for figures in ["vitals", "inventory"] {
        page.sample(&[("loop", &figures)], node.all_answered_ms as f64 / 1000.0);
    }
    render_cluster(page, &node.cluster, shards);
    render_retention(page, shards);
    render_rejections(page, shards);
}

fn render_retention(page: &mut Exposition, shards: &[ShardMetrics]) {
    use Kind::{Counter, Gauge};
    let sum = |value: fn(&ShardMetrics) -> u64| shards.iter().map(value).sum::<u64>();
    let open = sum(|s| s.open_logs);
    page.single("narad_open_partition_logs", Gauge, "Open partition logs.", open);
    let evicted = sum(|s| s.retention.idle_logs_evicted);
    page.single("narad_idle_logs_evicted_total", Counter, "Logs closed because nobody used them.", evicted);
    let swept = sum(|s| s.retention.cold_swept);
    let swept_help = "Closed logs that were opened, swept and closed.";
    page.single("narad_cold_retention_swept_total", Counter, swept_help, swept);
    let panics = sum(|s| s.retention.cold_panics);
    let panics_help = "Panics over closed logs that were contained; that partition rests 30 minutes.";
    page.single("narad_cold_retention_panics_total", Counter, panics_help, panics);
    let abandoned = sum(|s| s.retention.passes_abandoned);
    page.single(
        "narad_reaper_restarts",
        Gauge,
        "Retention passes that failed or hung and were left behind.",
        abandoned,
    );
    // Absent until every shard has looked: half of a count would end an alert.
    let found: Option<Vec<_>> = shards.iter().map(|shard| shard.set_aside).collect();
    if let Some(found) = found.filter(|found| !found.is_empty()) {
        let copies: u64 = found.iter().map(|found| found.copies).sum();
        page.single("narad_quarantined_copies", Gauge, "Copies that the start found set aside.", copies);
        let bytes: u64 = found.iter().map(|found| found.bytes).sum();
        page.single("narad_quarantined_bytes", Gauge, "Bytes of them.", bytes);
        let orphans: u64 = found.iter().map(|found| found.orphans).sum();
        page.single("narad_orphan_topic_dirs", Gauge, "Directories of unknown topics that were left.", orphans);
    }
    let ack_help = "Age of the oldest ack that a killed process would lose (D16).";
    page.family("narad_consumer_position_unwritten_seconds", Gauge, ack_help);
    for shard in shards {
        page.sample(&[("shard", &shard.shard)], shard.queue.oldest_unwritten.as_secs_f64());
    }
}

fn render_rejections(page: &mut Exposition, shards: &[ShardMetrics]) {
    let mut topics: BTreeMap<&str, [u64; REJECTIONS.len()]> = BTreeMap::new();
    for (topic, counts) in shards.iter().flat_map(|shard| &shard.rejections) {
        let sums = topics.entry(topic).or_default();
        sums.iter_mut().zip(counts).for_each(|(sum, more)| *sum += more);
    }
    page.family("narad_produce_rejections_total", Kind::Counter, "Produces that were refused, by reason.");
    for (topic, counts) in &topics {
        for (reason, count) in REJECTIONS.iter().zip(counts).filter(|(_, count)| **count > 0) {
            page.sample(&[("topic", topic), ("reason", reason)], count);
        }
    }
}
