//! Series of what the shards report. Counters of one partition that several shards
//! have served are added up; its gauges come from the shard that has it now.

use std::collections::BTreeMap;
use std::fmt::Display;

use narad_shards::histogram::Histogram;
use narad_shards::log::{LogLatencies, LogMetrics};
use narad_shards::metrics::ShardMetrics;
use narad_shards::queue::PartitionMetrics;

use super::exposition::{Exposition, Kind};
use super::NodeMetrics;

/// Appends all families of the data plane. `now_ms` is the wall clock, ms since the epoch.
pub fn render_shards(page: &mut Exposition, shards: &[ShardMetrics], now_ms: u64) {
    let mut partitions: BTreeMap<(&str, u32), PartitionMetrics> = BTreeMap::new();
    for (destination, figures) in shards.iter().flat_map(|shard| &shard.partitions) {
        let sum = partitions.entry((&figures.topic, destination.partition)).or_default();
        add(sum, figures);
    }
    render_partitions(page, &partitions, now_ms);
    render_logs(page, &partitions);
    render_topics(page, &partitions);
    render_ingress(page, shards);
    render_dispatch(page, shards);
    render_runtime(page, shards);
}

/// Bounds of histograms that count records, and of those that time the device.
const RECORDS: [f64; 12] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0];
const DEVICE_SECONDS: [f64; 15] =
    [0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0];
const MICROS: f64 = 1e6;

/// A family with one sample for each shard.
fn per_shard(
    page: &mut Exposition,
    shards: &[ShardMetrics],
    name: &'static str,
    kind: Kind,
    help: &'static str,
    value: impl Fn(&ShardMetrics) -> f64,
) {
    page.family(name, kind, help);
    for shard in shards {
        page.sample(&[("shard", &shard.shard)], value(shard));
    }
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
    sum.log.add(&more.log);
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

/// Histograms have twenty lines each: beyond that many partitions they are of topics, and beyond that many topics of all,
/// or a scrape of 16,000 partitions is 120 MB.
const HISTOGRAMS_MAX: usize = 1_000;

/// What histograms are given of: topic, partition, sums.
fn histogram_rows(partitions: &Partitions<'_>) -> Vec<(String, String, LogMetrics)> {
    let mut topics: Vec<&str> = partitions.keys().map(|(topic, _)| *topic).collect();
    topics.dedup();
    let (few_partitions, few_topics) = (partitions.len() <= HISTOGRAMS_MAX, topics.len() <= HISTOGRAMS_MAX);
    let mut rows: Vec<(String, String, LogMetrics)> = Vec::new();
    for ((topic, partition), figures) in partitions {
        let all = || "all".to_owned();
        let topic = if few_topics { (*topic).to_owned() } else { all() };
        let partition = if few_partitions { partition.to_string() } else { all() };
        match rows.last_mut() {
            Some(row) if row.0 == topic && row.1 == partition => row.2.add(&figures.log),
            _ => rows.push((topic, partition, figures.log.clone())),
        }
    }
    rows
}

fn render_logs(page: &mut Exposition, partitions: &Partitions<'_>) {
    let rows = histogram_rows(partitions);
    type Recorded = fn(&LogLatencies) -> &Histogram;
    let families: [(&'static str, &'static str, Recorded); 3] = [
        ("narad_storage_fsync_duration_seconds", "Durable write of one commit: flush and sync in one.", |l| {
            &l.durable_write_us
        }),
        // One operation, under the names of both its halves: a dashboard that knows either finds it.
        ("narad_storage_flush_duration_seconds", "The same write: it is not done before it is durable.", |l| {
            &l.durable_write_us
        }),
        ("narad_storage_read_back_duration_seconds", "Reading a commit back and checking it.", |l| &l.read_back_us),
    ];
    for (name, help, recorded) in families {
        page.family(name, Kind::Histogram, help);
        for (topic, partition, log) in &rows {
            if let Some(latencies) = &log.latencies {
                let labels: [(&str, &dyn Display); 2] = [("topic", topic), ("partition", partition)];
                page.recorded(&labels, &DEVICE_SECONDS, recorded(latencies), MICROS);
            }
        }
    }
    page.family("narad_storage_retention_run_duration_seconds", Kind::Histogram, "One pass of retention over a log.");
    for (topic, partition, log) in &rows {
        if let Some(passes) = &log.retention_us {
            page.recorded(&[("topic", topic), ("partition", partition)], &DEVICE_SECONDS, passes, MICROS);
        }
    }
    let boundary_help = "Writing the file that states the exact end of a closed log.";
    page.family("narad_storage_high_watermark_persist_duration_seconds", Kind::Histogram, boundary_help);
    for (topic, partition, log) in &rows {
        let outcomes = log.boundary_us.iter().flat_map(|both| ["ok", "error"].into_iter().zip(both.iter()));
        for (outcome, times) in outcomes.filter(|(_, times)| !times.is_empty()) {
            let labels: [(&str, &dyn Display); 3] = [("topic", topic), ("partition", partition), ("outcome", &outcome)];
            page.recorded(&labels, &DEVICE_SECONDS, times, MICROS);
        }
    }
    type Removed = fn(&LogMetrics) -> u64;
    let removed: [(&'static str, &'static str, Removed); 2] = [
        ("narad_storage_retention_bytes_deleted_total", "Bytes that retention removed.", |l| l.retention_bytes),
        ("narad_storage_retention_messages_deleted_total", "Messages that retention removed.", |l| l.retention_records),
    ];
    for (name, help, value) in removed {
        page.family(name, Kind::Counter, help);
        for ((topic, partition), figures) in partitions {
            let labels: [(&str, &dyn Display); 3] = [("topic", topic), ("partition", partition), ("reason", &"age")];
            page.sample(&labels, value(&figures.log));
        }
    }
    let mut family = |name, help, value: fn(&LogMetrics) -> u64| {
        page.family(name, Kind::Counter, help);
        for ((topic, partition), figures) in partitions {
            page.sample(&[("topic", topic), ("partition", partition)], value(&figures.log));
        }
    };
    family("narad_storage_flush_bytes_total", "Bytes written by commits, padding included.", |l| l.written_bytes);
    family("narad_storage_commits_total", "Commits.", |l| l.commits);
    family("narad_storage_commits_failed_total", "Commits that failed.", |l| l.commits_failed);
    family("narad_storage_read_back_mismatches_total", "Commits that came back from the device different.", |l| {
        l.read_back_mismatches
    });
    family("narad_storage_damage_found_total", "Places where synced records cannot be read any more.", |l| {
        l.damage_found
    });
    let poisoned_help =
        "1 once a write has failed, or while the log cannot be opened: it takes no commits. The error log says why.";
    page.family("narad_storage_log_poisoned", Kind::Gauge, poisoned_help);
    for ((topic, partition), figures) in partitions {
        page.sample(&[("topic", topic), ("partition", partition)], u8::from(figures.log.poisoned));
    }
}

/// Component, kind and count of errors that the HTTP layer does not count itself.
pub fn other_errors(shards: &[ShardMetrics], node: &NodeMetrics) -> [(&'static str, &'static str, u64); 3] {
    let logs = || shards.iter().flat_map(|shard| shard.partitions.values()).map(|partition| &partition.log);
    [
        ("storage", "fsync_poisoned", logs().map(|log| log.poisonings).sum()),
        ("storage", "retention_unlink", logs().map(|log| log.retention_unlinks_failed).sum()),
        ("metrics", "shard_timeout", node.answers_late),
    ]
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

fn render_ingress(page: &mut Exposition, shards: &[ShardMetrics]) {
    use Kind::{Counter, Gauge};
    let failed = shards.iter().any(|shard| shard.wal.failed);
    let failed_help = "1 once an ingress log has failed: every produce is answered 500 until a restart.";
    page.single("narad_ingress_wal_failed", Gauge, failed_help, u8::from(failed));
    let backlog: u64 = shards.iter().map(|shard| shard.wal.backlog_records).sum();
    let backlog_help = "Records that a restart would replay.";
    page.single("narad_ingress_dispatch_backlog_records", Gauge, backlog_help, backlog);

    page.family("narad_ingress_group_records", Kind::Histogram, "Records made durable by one write.");
    for shard in shards {
        page.recorded(&[("shard", &shard.shard)], &RECORDS, &shard.wal.group_records, 1.0);
    }
    page.family("narad_ingress_sync_seconds", Kind::Histogram, "Durable write of one group.");
    for shard in shards {
        page.recorded(&[("shard", &shard.shard)], &DEVICE_SECONDS, &shard.wal.flush_us, MICROS);
    }
    let mut family = |name, kind, help, value: fn(&ShardMetrics) -> u64| {
        per_shard(page, shards, name, kind, help, |shard| value(shard) as f64);
    };
    family("narad_ingress_records_total", Counter, "Records made durable.", |s| s.wal.records);
    family("narad_ingress_written_bytes_total", Counter, "Bytes written for them.", |s| s.wal.bytes_written);
    family("narad_ingress_rolls_total", Counter, "Segments begun.", |s| s.wal.rolls);
    family("narad_ingress_rolls_unprepared_total", Counter, "Segments begun without preparation.", |s| {
        s.wal.rolls_unprepared
    });
    family(
        "narad_ingress_torn_bytes_cut_total",
        Counter,
        "Bytes behind the last whole record, cut at the start.",
        |s| s.wal.torn_bytes_cut,
    );
    family("narad_ingress_appends_unavailable_total", Counter, "Appends refused for want of a segment.", |s| {
        s.wal.appends_unavailable
    });
    family("narad_ingress_appends_exhausted_total", Counter, "Appends refused for want of staging memory.", |s| {
        s.wal.appends_exhausted
    });
    family("narad_ingress_read_back_records_total", Counter, "Records read back for the dispatcher.", |s| {
        s.wal.records_read_back
    });
    family("narad_ingress_live_bytes", Gauge, "Bytes of segments that compaction has not reclaimed.", |s| {
        s.wal.live_bytes
    });
    family("narad_ingress_segments", Gauge, "Segments that hold records.", |s| s.wal.segments);
    family("narad_ingress_spare_segments", Gauge, "Segments ready for the next roll.", |s| s.wal.spares);
    family("narad_ingress_staging_bytes", Gauge, "Staging memory.", |s| s.wal.staging_bytes);
}

fn render_dispatch(page: &mut Exposition, shards: &[ShardMetrics]) {
    use Kind::{Counter, Gauge};
    page.family("narad_dispatch_batch_records", Kind::Histogram, "Records of one commit.");
    for shard in shards {
        page.recorded(&[("shard", &shard.shard)], &RECORDS, &shard.dispatch.batch_records, 1.0);
    }
    page.family("narad_dispatch_commit_seconds", Kind::Histogram, "A successful commit, until its answer.");
    for shard in shards {
        let latency = &shard.dispatch.commit_latency_us;
        page.recorded(&[("shard", &shard.shard)], &DEVICE_SECONDS, latency, MICROS);
    }
    page.family("narad_dispatch_commits_total", Counter, "Commits sent, by outcome; hung ones are counted twice.");
    for shard in shards {
        let figures = &shard.dispatch;
        for (outcome, count) in [
            ("ok", figures.commit_latency_us.len()),
            ("failed", figures.commits_failed),
            ("refused", figures.commits_refused),
            ("hung", figures.commits_hung),
        ] {
            page.sample(&[("shard", &shard.shard), ("outcome", &outcome)], count);
        }
    }
    let mut family = |name, kind, help, value: fn(&ShardMetrics) -> u64| {
        per_shard(page, shards, name, kind, help, |shard| value(shard) as f64);
    };
    family("narad_dispatch_committed_records_total", Counter, "Records committed.", |s| s.dispatch.records_committed);
    family("narad_dispatch_rerouted_records_total", Counter, "Records sent to a sibling partition.", |s| {
        s.dispatch.records_rerouted
    });
    family("narad_dispatch_discarded_records_total", Counter, "Records of topics that are gone.", |s| {
        s.dispatch.records_discarded
    });
    family("narad_dispatch_read_failures_total", Counter, "Reads of the ingress log that failed.", |s| {
        s.dispatch.read_failures
    });
    let no_room = "Batches that stayed queued because their owner granted no room for them.";
    family("narad_dispatch_no_room_total", Counter, no_room, |s| s.dispatch.commits_starved);
    family("narad_dispatch_commits_in_flight", Gauge, "Commits in flight.", |s| s.dispatch.commits_in_flight);
    family("narad_dispatch_held_records", Gauge, "Records queued or in flight.", |s| s.dispatch.held_records);
    family("narad_dispatch_held_bytes", Gauge, "Bytes of them.", |s| s.dispatch.held_bytes);
    family("narad_dispatch_skipped_records", Gauge, "Records left in the ingress log, to be read again.", |s| {
        s.dispatch.skipped_records
    });
    family("narad_dispatch_destinations", Gauge, "Partitions with records on their way.", |s| s.dispatch.destinations);
    family("narad_dispatch_destinations_failing", Gauge, "Of these, failing.", |s| s.dispatch.destinations_failing);
    family("narad_dispatch_destinations_hung", Gauge, "Of these, with a commit that hangs.", |s| {
        s.dispatch.destinations_hung
    });
}

fn render_runtime(page: &mut Exposition, shards: &[ShardMetrics]) {
    let mut family = |name, kind, help, value: fn(&ShardMetrics) -> f64| {
        per_shard(page, shards, name, kind, help, value);
    };
    use Kind::{Counter, Gauge};
    family("narad_runtime_busy_ratio", Gauge, "Share of the time since start that the core was at work.", |s| {
        let total = s.runtime.busy_nanos + s.runtime.idle_nanos;
        if total == 0 {
            0.0
        } else {
            s.runtime.busy_nanos as f64 / total as f64
        }
    });
    family("narad_runtime_busy_seconds_total", Counter, "Time that the core was at work.", |s| {
        s.runtime.busy_nanos as f64 / 1e9
    });
    family("narad_runtime_idle_seconds_total", Counter, "Time that the core was parked or polled.", |s| {
        s.runtime.idle_nanos as f64 / 1e9
    });
    family(
        "narad_runtime_poll_seconds_total",
        Counter,
        "Of that, time that it polled for its drive or requests.",
        |s| s.runtime.poll_nanos as f64 / 1e9,
    );
    family("narad_runtime_turns_total", Counter, "Turns of the event loop.", |s| s.runtime.turns as f64);
    family("narad_runtime_enters_total", Counter, "System calls into the ring.", |s| s.runtime.enters as f64);
    family("narad_runtime_enter_seconds_total", Counter, "Time spent in those that did not wait.", |s| {
        s.runtime.enter_nanos as f64 / 1e9
    });
    family("narad_consumers_parked", Gauge, "Consumes that wait on this shard.", |s| s.queue.parked as f64);
    family("narad_runtime_submissions_total", Counter, "Operations submitted to the ring.", |s| {
        s.runtime.submissions as f64
    });
    family("narad_runtime_completions_total", Counter, "Operations that the ring completed.", |s| {
        s.runtime.completions as f64
    });
    family("narad_runtime_cq_overflow_total", Counter, "Completions that did not fit the queue.", |s| {
        s.runtime.cq_overflow as f64
    });
    family("narad_runtime_ring_depth", Gauge, "Operations in flight on the ring.", |s| s.runtime.ring_depth as f64);
    family("narad_ingress_staged_bytes", Gauge, "Bytes in staging buffers of the ingress log.", |s| {
        s.wal.staging_bytes as f64
    });
    family("narad_http_connections", Gauge, "Open client connections.", |s| s.runtime.connections as f64);
    let submit_help = "A system call that submitted and did not wait.";
    page.family("narad_runtime_submit_seconds", Kind::Histogram, submit_help);
    for shard in shards {
        if let Some(enter_us) = &shard.enter_us {
            page.recorded(&[("shard", &shard.shard)], &DEVICE_SECONDS, enter_us, MICROS);
        }
    }
}

#[cfg(test)]
mod tests {
    use narad_shards::meta::{Destination, Incarnation};

    use super::*;

    fn latencies(micros: u64) -> Box<LogLatencies> {
        let mut latencies = LogLatencies {
            durable_write_us: narad_shards::histogram::histogram(),
            read_back_us: narad_shards::histogram::histogram(),
        };
        latencies.durable_write_us.record(micros).expect("resizes");
        Box::new(latencies)
    }

    #[test]
    fn a_scrape_of_many_partitions_has_histograms_of_topics_or_of_all() {
        let rendered = |topics: u64, partitions: u32| {
            let mut shard = ShardMetrics::default();
            for topic in 0..topics {
                for partition in 0..partitions {
                    let log = LogMetrics { commits: 1, latencies: Some(latencies(7)), ..LogMetrics::default() };
                    let figures =
                        PartitionMetrics { topic: format!("t{topic:04}"), log, ..PartitionMetrics::default() };
                    shard.partitions.insert(Destination { incarnation: Incarnation(topic), partition }, figures);
                }
            }
            let mut page = Exposition::new();
            render_shards(&mut page, &[shard], 0);
            page.finish()
        };
        for (topics, partitions, labels, samples) in [
            (2, 500, "topic=\"t0001\",partition=\"499\"", 1),
            (2, 501, "topic=\"t0001\",partition=\"all\"", 501),
            (1001, 1, "topic=\"all\",partition=\"all\"", 1001),
        ] {
            let page = rendered(topics, partitions);
            let line = format!("narad_storage_fsync_duration_seconds_count{{{labels}}} {samples}");
            assert!(page.lines().any(|have| have == line), "{line} is missing");
            let counters = page.lines().filter(|line| line.starts_with("narad_storage_commits_total{")).count();
            assert_eq!(counters as u64, topics * u64::from(partitions), "counters are always of partitions");
        }
    }

    #[test]
    fn counters_of_a_moved_partition_add_up_and_gauges_do_not() {
        let figures = |produced, frontier, high_watermark| PartitionMetrics {
            topic: "orders".to_owned(),
            messages_produced: produced,
            frontier,
            high_watermark,
            oldest_unsettled_ms: if high_watermark > 0 { 1_000 } else { 0 },
            nacked: 2,
            log: LogMetrics { written_bytes: produced, latencies: Some(latencies(produced)), ..LogMetrics::default() },
            ..PartitionMetrics::default()
        };
        let mut shards = vec![ShardMetrics::default(), ShardMetrics { shard: 1, ..ShardMetrics::default() }];
        let destination = Destination { incarnation: Incarnation(1), partition: 4 };
        shards[0].partitions.insert(destination, figures(10, 0, 0));
        shards[1].partitions.insert(destination, figures(5, 12, 15));
        shards[1].runtime.busy_nanos = 1;
        shards[1].runtime.idle_nanos = 3;
        shards[0].wal.backlog_records = 2;
        shards[1].wal.backlog_records = 5;
        shards[1].wal.failed = true;
        shards[0].wal.group_records.record_n(3, 2).expect("resizes");
        shards[0].wal.flush_us.record(150).expect("resizes");
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
            "narad_storage_flush_bytes_total{topic=\"orders\",partition=\"4\"} 15",
            "narad_storage_fsync_duration_seconds_count{topic=\"orders\",partition=\"4\"} 2",
            "narad_storage_fsync_duration_seconds_bucket{topic=\"orders\",partition=\"4\",le=\"0.00001\"} 2",
            "narad_storage_flush_duration_seconds_count{topic=\"orders\",partition=\"4\"} 2",
            "narad_ingress_wal_failed 1",
            "narad_ingress_dispatch_backlog_records 7",
            "narad_ingress_group_records_bucket{shard=\"0\",le=\"4\"} 2",
            "narad_ingress_group_records_sum{shard=\"0\"} 6",
            "narad_ingress_sync_seconds_bucket{shard=\"0\",le=\"0.0001\"} 0",
            "narad_ingress_sync_seconds_bucket{shard=\"0\",le=\"0.0002\"} 1",
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
