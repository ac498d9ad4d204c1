//! A shard as an operator watches it: figures that are at hand, copied in one turn. Nothing is read from the disk, no
//! task is waited for, and the data path counts nothing for it that it did not count before.

use std::time::Duration;

use super::{staging_bytes, Inner};
use crate::histogram::{histogram, Histogram};
use crate::metrics::{Latency, ShardVitals};
use crate::rt::RuntimeMetrics;
use crate::rt::{self, Instant};

/// Whoever asks sooner gets the figures of the window before: however many watch, all see the same ones.
const WINDOW_MIN: Duration = Duration::from_secs(1);

/// Where the current window began, and what the last one came to.
pub(super) struct Window {
    since: Instant,
    busy_nanos: u64,
    sync_us: Histogram,
    commit_us: Histogram,
    last: ShardVitals,
}

impl Default for Window {
    fn default() -> Window {
        Window {
            since: rt::now(),
            busy_nanos: 0,
            sync_us: histogram(),
            commit_us: histogram(),
            last: ShardVitals::default(),
        }
    }
}

impl Window {
    /// Ends the window if it is long enough, and puts the figures of the last whole one into `vitals`.
    fn close(&mut self, vitals: &mut ShardVitals, sync_us: Histogram, commit_us: Histogram) {
        let now = rt::now();
        let elapsed = now - self.since;
        if elapsed >= WINDOW_MIN {
            let nanos = elapsed.as_nanos() as f64;
            let busy = vitals.runtime.busy_nanos.saturating_sub(self.busy_nanos);
            self.last.window_us = elapsed.as_micros() as u64;
            self.last.busy_ratio = (busy as f64 / nanos).min(1.0);
            self.last.sync = gained(&sync_us, &self.sync_us, elapsed);
            self.last.commit = gained(&commit_us, &self.commit_us, elapsed);
            self.since = now;
            self.busy_nanos = vitals.runtime.busy_nanos;
            (self.sync_us, self.commit_us) = (sync_us, commit_us);
        }
        vitals.window_us = self.last.window_us;
        vitals.busy_ratio = self.last.busy_ratio;
        vitals.sync = self.last.sync;
        vitals.commit = self.last.commit;
    }
}

/// What `now` holds more than `before`, of which it is a later state.
fn gained(now: &Histogram, before: &Histogram, elapsed: Duration) -> Latency {
    let mut more = now.clone();
    if more.subtract(before).is_err() || more.is_empty() {
        return Latency::default();
    }
    Latency {
        count: more.len(),
        p50_us: Some(more.value_at_quantile(0.5)),
        p99_us: Some(more.value_at_quantile(0.99)),
        in_flight: more.mean() * more.len() as f64 / elapsed.as_micros().max(1) as f64,
    }
}

impl Inner {
    /// `runtime` comes from whoever runs the shard's event loop.
    pub(super) fn vitals(&self, runtime: RuntimeMetrics) -> ShardVitals {
        let wal = self.wal.metrics();
        let dispatch = self.own.get().map(|dispatcher| dispatcher.metrics()).unwrap_or_default();
        let queue = self.queues().vitals();
        let cache = &self.partitions.shared().cache;
        let adopted: u64 = self.adopted.borrow().iter().map(|directory| directory.wal.backlog_records()).sum();
        let mut vitals = ShardVitals {
            shard: self.options.id,
            at_us: rt::now().0 / 1000,
            produced_records: wal.records,
            produced_groups: wal.groups,
            written_bytes: wal.bytes_written,
            committed_records: dispatch.records_committed,
            commits: dispatch.commits,
            delivered_records: queue.delivered,
            backlog_records: wal.backlog_records + adopted,
            staged_records: wal.staged_records,
            destinations_failing: dispatch.destinations_failing,
            wal_failed: wal.failed,
            wal_live_bytes: wal.live_bytes,
            partitions: self.partitions.shared().open_logs() as u64,
            leases: queue.leased,
            consumers_parked: queue.parked,
            memory_budget_bytes: self.options.memory_bytes as u64,
            staging_bytes: wal.staging_bytes,
            staging_bytes_max: staging_bytes(&self.options) as u64,
            cache_bytes: cache.bytes() as u64,
            cache_bytes_max: cache.bytes_max() as u64,
            runtime,
            ..ShardVitals::default()
        };
        self.window.borrow_mut().close(&mut vitals, wal.flush_us, dispatch.commit_latency_us);
        vitals
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_shows_what_it_gained_to_everybody_who_asks_within_the_next() {
        rt::sim::run(1, async {
            let mut window = Window::default();
            let mut all = histogram();
            let mut busy_nanos = 0;
            let mut look = |window: &mut Window, all: &Histogram, busy_ms: u64| {
                busy_nanos += busy_ms * 1_000_000;
                let mut vitals = ShardVitals::default();
                vitals.runtime.busy_nanos = busy_nanos;
                window.close(&mut vitals, all.clone(), histogram());
                vitals
            };
            all.record_n(100, 50).unwrap();
            let early = look(&mut window, &all, 0);
            assert_eq!((early.window_us, early.sync), (0, Latency::default()), "no window is over yet");
            rt::sleep(Duration::from_secs(2)).await;
            let first = look(&mut window, &all, 500);
            assert!((first.busy_ratio - 0.25).abs() < 0.001 && first.window_us >= 2_000_000, "{first:?}");
            assert_eq!((first.sync.count, first.sync.p50_us, first.sync.p99_us), (50, Some(100), Some(100)));
            assert!((first.sync.in_flight - 0.0025).abs() < 0.0001, "{first:?}");
            all.record_n(9_000, 10).unwrap();
            rt::sleep(Duration::from_millis(10)).await;
            assert_eq!(look(&mut window, &all, 10).sync, first.sync, "a second watcher takes nothing from the first");
            rt::sleep(Duration::from_millis(990)).await;
            let second = look(&mut window, &all, 0);
            assert_eq!(
                (second.sync.count, second.sync.p50_us.map(|us| us / 100)),
                (10, Some(90)),
                "the old ones are out"
            );
            rt::sleep(Duration::from_secs(1)).await;
            let idle = look(&mut window, &all, 0);
            assert_eq!((idle.sync, idle.busy_ratio), (Latency::default(), 0.0));
        });
    }
}
