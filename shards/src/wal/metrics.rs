//! Figures of one WAL, and its state at the moment of the copy.

use crate::histogram::{histogram, Histogram};

/// Figures of one WAL directory since the process started. Gauges are as of the copy.
#[derive(Clone, Debug)]
pub struct WalMetrics {
    /// Records made durable.
    pub records: u64,
    /// Bytes written for them, heads and padding included.
    pub bytes_written: u64,
    pub groups: u64,
    /// Records per group.
    pub group_records: Histogram,
    /// From submission of a group to its completion, µs.
    pub flush_us: Histogram,
    /// Segments begun.
    pub rolls: u64,
    /// Of these, into a segment without preparation (E9): the preparation fell behind or failed.
    pub rolls_unprepared: u64,
    /// Rotations of an idle, fully dispatched segment (E10).
    pub rotations: u64,
    pub segments_prepared: u64,
    pub segments_recycled: u64,
    pub segments_removed: u64,
    /// Appends refused because no segment could be made (E9).
    pub appends_unavailable: u64,
    /// Appends refused because staging could not turn over (E22).
    pub appends_exhausted: u64,
    /// Groups dropped from memory before the dispatcher took them (E20): it reads them back.
    pub groups_dropped: u64,
    /// Records read back from disk.
    pub records_read_back: u64,
    /// Bytes behind the last whole record that the open has cut.
    pub torn_bytes_cut: u64,
    /// Gauge: 1 once latched (lesson N9).
    pub failed: bool,
    /// Gauge: records a restart would replay.
    pub backlog_records: u64,
    /// Gauge: records taken that are not durable yet, so not answered.
    pub staged_records: u64,
    /// Gauge: bytes of segments that compaction has not reclaimed.
    pub live_bytes: u64,
    /// Gauge: segments that hold records, and spares.
    pub segments: u64,
    pub spares: u64,
    /// Gauge: staging memory.
    pub staging_bytes: u64,
    pub staging_chunks_free: u64,
}

impl Default for WalMetrics {
    fn default() -> WalMetrics {
        WalMetrics {
            records: 0,
            bytes_written: 0,
            groups: 0,
            group_records: histogram(),
            flush_us: histogram(),
            rolls: 0,
            rolls_unprepared: 0,
            rotations: 0,
            segments_prepared: 0,
            segments_recycled: 0,
            segments_removed: 0,
            appends_unavailable: 0,
            appends_exhausted: 0,
            groups_dropped: 0,
            records_read_back: 0,
            torn_bytes_cut: 0,
            failed: false,
            backlog_records: 0,
            staged_records: 0,
            live_bytes: 0,
            segments: 0,
            spares: 0,
            staging_bytes: 0,
            staging_chunks_free: 0,
        }
    }
}
