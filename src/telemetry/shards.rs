//! Series of what the shards report (operations.md §4.1, §4.3, §4.5). Counters of one partition that several shards
//! have served are added up; its gauges come from the shard that has it now.

use std::collections::BTreeMap;

use narad_shards::metrics::{PartitionMetrics, ShardMetrics};

use super::exposition::{Exposition, Kind};

/// Appends all families of the data plane. `now_ms` is the wall clock, ms since the epoch.
pub fn render_shards(page: &mut Exposition, shards: &[ShardMetrics], now_ms: u64) {
    let mut partitions: BTreeMap<(&str, u32), PartitionMetrics> = BTreeMap::new();
    for (destination, figures) in shards.iter().flat_map(|shard| &shard.partitions) {
        let sum = partitions.entry((&figures.topic, destination.partition)).or_default();
        add(sum, figures);
    }
    render_partitions(page, &partitions, now_ms);
    render_topics(page, &partitions);
    render_runtime(page, shards);
}

/// Counters add up. A gauge is 0 where the partition is not served, so the largest is the live one.
fn add(sum: &mut PartitionMetrics, more: &PartitionMetrics) {
    sum.messages_produced += more.messages_produced;
    sum.bytes_produced += more.bytes_produced;
    sum.messages_consumed += more.messages_consumed;
    sum.bytes_consumed += more.bytes_consumed;
    sum.extended += more.extended;
    sum.nacked += more.nacked;
    sum.ack_rejected += more.ack_rejected;
    sum.corrupt_skipped += more.corrupt_skipped;
    sum.frontier = sum.frontier.max(more.frontier);
    sum.high_watermark = sum.high_watermark.max(more.high_watermark);
    sum.oldest_offset = sum.oldest_offset.max(more.oldest_offset);
    sum.leased = sum.leased.max(more.leased);
    sum.acked_ahead = sum.acked_ahead.max(more.acked_ahead);
    sum.size_bytes = sum.size_bytes.max(more.size_bytes);
    sum.segments = sum.segments.max(more.segments);
    sum.oldest_unsettled_ms = sum.oldest_unsettled_ms.max(more.oldest_unsettled_ms);
}

type Partitions<'a> = BTreeMap<(&'a str, u32), PartitionMetrics>;

fn render_partitions(page: &mut Exposition, partitions: &Partitions<'_>, now_ms: u64) {
    let mut family = |name, kind, help, value: &dyn Fn(&PartitionMetrics) -> f64| {
        page.family(name, kind, help);
        for ((topic, partition), figures) in partitions {
            page.sample(&[("topic", topic), ("partition", partition)], value(figures));
        }
    };
    use Kind::{Counter, Gauge};
    family("narad_messages_produced_total", Counter, "Messages appended, on the owner.", &|p| {
        p.messages_produced as f64
    });
    family("narad_bytes_produced_total", Counter, "Payload bytes appended.", &|p| p.bytes_produced as f64);
    family("narad_messages_consumed_total", Counter, "Deliveries to queue consumers, redeliveries included.", &|p| {
        p.messages_consumed as f64
    });
    family("narad_bytes_consumed_total", Counter, "Payload bytes of deliveries.", &|p| p.bytes_consumed as f64);
    family("narad_consumer_lag_messages", Gauge, "High watermark minus committed frontier.", &|p| {
        p.high_watermark.saturating_sub(p.frontier) as f64
    });
    family("narad_oldest_unconsumed_message_age_seconds", Gauge, "Age of the oldest unacked message.", &|p| match p
        .oldest_unsettled_ms
    {
        0 => 0.0,
        since => now_ms.saturating_sub(since) as f64 / 1000.0,
    });
    family("narad_consumer_dropped_messages", Gauge, "Messages that retention deleted before their ack.", &|p| {
        p.oldest_offset.saturating_sub(p.frontier) as f64
    });
    family("narad_inflight_size", Gauge, "Leases out.", &|p| p.leased as f64);
    family("narad_acked_ahead_size", Gauge, "Acks above the oldest unacked message.", &|p| p.acked_ahead as f64);
    family("narad_consumer_corrupt_skipped_total", Counter, "Unreadable records skipped; each is lost.", &|p| {
        p.corrupt_skipped as f64
    });
    family("narad_partition_size_bytes", Gauge, "Bytes of the partition's segments.", &|p| p.size_bytes as f64);
    family("narad_segments", Gauge, "Segment files.", &|p| p.segments as f64);
}

fn render_topics(page: &mut Exposition, partitions: &Partitions<'_>) {
    let mut topics: BTreeMap<&str, [u64; 3]> = BTreeMap::new();
    for ((topic, _), figures) in partitions {
        let sums = topics.entry(topic).or_default();
        for (sum, more) in sums.iter_mut().zip([figures.extended, figures.nacked, figures.size_bytes]) {
            *sum += more;
        }
    }
    for (index, name, kind, help) in [
        (0, "narad_ack_extended_total", Kind::Counter, "Leases extended."),
        (1, "narad_nack_total", Kind::Counter, "Messages handed back, those that a batch left out included."),
        (2, "narad_topic_bytes", Kind::Gauge, "Bytes of the topic on this node."),
    ] {
        page.family(name, kind, help);
        for (topic, sums) in &topics {
            page.sample(&[("topic", topic)], sums[index]);
        }
    }
    let rejected: u64 = partitions.values().map(|figures| figures.ack_rejected).sum();
    page.family("narad_ack_rejected_total", Kind::Counter, "Acks refused.");
    page.sample(&[("reason", &"no_lease")], rejected);
    page.single("narad_partitions_total", Kind::Gauge, "Partitions owned by this node.", partitions.len());
}

fn render_runtime(page: &mut Exposition, shards: &[ShardMetrics]) {
    let mut family = |name, kind, help, value: &dyn Fn(&ShardMetrics) -> f64| {
        page.family(name, kind, help);
        for shard in shards {
            page.sample(&[("shard", &shard.shard)], value(shard));
        }
    };
    use Kind::{Counter, Gauge};
    family("narad_runtime_busy_ratio", Gauge, "Share of the time since start that the core was at work.", &|s| {
        let total = s.runtime.busy_nanos + s.runtime.idle_nanos;
        if total == 0 {
            0.0
        } else {
            s.runtime.busy_nanos as f64 / total as f64
        }
    });
    family("narad_runtime_busy_seconds_total", Counter, "Time that the core was at work.", &|s| {
        s.runtime.busy_nanos as f64 / 1e9
    });
    family("narad_runtime_idle_seconds_total", Counter, "Time that the core was parked.", &|s| {
        s.runtime.idle_nanos as f64 / 1e9
    });
    family("narad_runtime_turns_total", Counter, "Turns of the event loop.", &|s| s.runtime.turns as f64);
    family("narad_runtime_enters_total", Counter, "System calls into the ring.", &|s| s.runtime.enters as f64);
    family("narad_runtime_enter_seconds_total", Counter, "Time spent in them.", &|s| {
        s.runtime.enter_nanos as f64 / 1e9
    });
    family("narad_runtime_submissions_total", Counter, "Operations submitted to the ring.", &|s| {
        s.runtime.submissions as f64
    });
    family("narad_runtime_completions_total", Counter, "Operations that the ring completed.", &|s| {
        s.runtime.completions as f64
    });
    family("narad_runtime_cq_overflow_total", Counter, "Completions that did not fit the queue.", &|s| {
        s.runtime.cq_overflow as f64
    });
    family("narad_runtime_ring_depth", Gauge, "Operations in flight on the ring.", &|s| s.runtime.ring_depth as f64);
    family("narad_ingress_staged_bytes", Gauge, "Bytes in staging buffers of the ingress log.", &|s| {
        s.runtime.staged_bytes as f64
    });
    family("narad_http_connections", Gauge, "Open client connections.", &|s| s.runtime.connections as f64);
}

#[cfg(test)]
mod tests {
    use narad_shards::meta::{Destination, Incarnation};

    use super::*;

    #[test]
    fn counters_of_a_moved_partition_add_up_and_gauges_do_not() {
        let figures = |produced, frontier, high_watermark| PartitionMetrics {
            topic: "orders".to_owned(),
            messages_produced: produced,
            frontier,
            high_watermark,
            oldest_unsettled_ms: if high_watermark > 0 { 1_000 } else { 0 },
            nacked: 2,
            ..PartitionMetrics::default()
        };
        let mut shards = vec![ShardMetrics::default(), ShardMetrics { shard: 1, ..ShardMetrics::default() }];
        let destination = Destination { incarnation: Incarnation(1), partition: 4 };
        shards[0].partitions.insert(destination, figures(10, 0, 0));
        shards[1].partitions.insert(destination, figures(5, 12, 15));
        shards[1].runtime.busy_nanos = 1;
        shards[1].runtime.idle_nanos = 3;
        let mut page = Exposition::new();
        render_shards(&mut page, &shards, 3_500);
        let text = page.finish();
        for line in [
            "narad_messages_produced_total{topic=\"orders\",partition=\"4\"} 15",
            "narad_consumer_lag_messages{topic=\"orders\",partition=\"4\"} 3",
            "narad_oldest_unconsumed_message_age_seconds{topic=\"orders\",partition=\"4\"} 2.5",
            "narad_nack_total{topic=\"orders\"} 4",
            "narad_ack_rejected_total{reason=\"no_lease\"} 0",
            "narad_partitions_total 1",
            "narad_runtime_busy_ratio{shard=\"1\"} 0.25",
            "narad_runtime_busy_ratio{shard=\"0\"} 0",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} is missing in\n{text}");
        }
        let mut names: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
        let families = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), families, "a family is rendered in one place");
    }
}
