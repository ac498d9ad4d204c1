//! Dispatcher of one WAL directory: commits its records to their partitions, in the background, until all are done.
//!
//! [`core`] decides and does nothing else; [`Dispatcher`] is its driver. Seed: "Dispatch stage"; E16 to E21, E44.

pub mod core;
mod driver;
mod logging;
mod notices;

#[cfg(test)]
mod tests;

pub use self::core::Limits;
pub use driver::{Dispatcher, Environment};

use crate::histogram::{histogram, Histogram};

/// Figures of one dispatcher since the process started. The backlog is the WAL's to tell: durable next sequence
/// number minus stored checkpoint.
#[derive(Clone, Debug)]
pub struct DispatchMetrics {
    /// Commits sent, and how they ended. A refused one met another incarnation (`412`).
    pub commits: u64,
    pub commits_failed: u64,
    pub commits_refused: u64,
    /// Commits that were not answered within a second, whatever became of them.
    pub commits_hung: u64,
    /// Batches that began to wait for room at their owner (E41).
    pub commits_starved: u64,
    pub records_committed: u64,
    pub records_rerouted: u64,
    pub records_discarded: u64,
    pub rescans: u64,
    pub read_failures: u64,
    /// Records per commit.
    pub batch_records: Histogram,
    /// Time of a successful commit, from sending to its answer.
    pub commit_latency_us: Histogram,

    // Gauges.
    pub commits_in_flight: u64,
    /// Queued or in flight, hung commits aside.
    pub held_records: u64,
    /// Bytes of held records and of those lent to hung commits.
    pub held_bytes: u64,
    /// Left in the WAL, to be read again.
    pub skipped_records: u64,
    pub destinations: u64,
    pub destinations_failing: u64,
    pub destinations_hung: u64,
    pub window_records: u64,
    /// First sequence number that is not done.
    pub checkpoint: u64,
}

impl Default for DispatchMetrics {
    fn default() -> DispatchMetrics {
        DispatchMetrics {
            commits: 0,
            commits_failed: 0,
            commits_refused: 0,
            commits_hung: 0,
            commits_starved: 0,
            records_committed: 0,
            records_rerouted: 0,
            records_discarded: 0,
            rescans: 0,
            read_failures: 0,
            batch_records: histogram(),
            commit_latency_us: histogram(),
            commits_in_flight: 0,
            held_records: 0,
            held_bytes: 0,
            skipped_records: 0,
            destinations: 0,
            destinations_failing: 0,
            destinations_hung: 0,
            window_records: 0,
            checkpoint: 0,
        }
    }
}
