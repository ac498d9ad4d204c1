//! Partition log: segments, frames, commit with read-back, recovery, reads.
//!
//! Pure parts: `frame` and `segment` (what lies on disk), `scan` and `recovery` (what is found there), `hwm`, `cache`.
//! Drivers over them: [`PartitionLog`] (`open`, `append`, `space`, `read`, `retention`), [`Combiner`] in front of it, and
//! [`TopicDirectories`], which decides whether a directory belongs to the live topic at all.
//!
//! A record's way: `Combiner::commit` queues its batch; one cycle at a time drains the queue, checks that the
//! partition, the topic and the callers are still there, and hands the run to `append`, which encodes it, writes it
//! durably, reads it back from the device, checks it, and moves the high watermark. Nothing else makes a record visible.

mod append;
mod cache;
mod combiner;
mod directory;
mod frame;
pub(crate) mod fuzz;
mod hwm;
mod open;
mod partition;
mod read;
mod records;
mod recovery;
mod retention;
mod scan;
mod segment;
mod shared;
mod space;
mod stored;
mod stored_proof;

#[cfg(test)]
mod combiner_tests;
#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod directory_tests;
#[cfg(test)]
mod fault_tests;
#[cfg(test)]
mod lost_tests;
#[cfg(test)]
mod partition_tests;
#[cfg(test)]
mod recovery_tests;
#[cfg(test)]
mod retention_tests;
#[cfg(test)]
mod tests_support;

use crate::histogram::{coarse_histogram, Histogram};
use crate::io::Slice;

pub use cache::FrameCache;
pub use combiner::{Combiner, CommitGate, Resolved, Standing};
pub use directory::{DirectoryError, Mark, Marker, Retire, TopicDirectories, TopicEntry, TopicKind};
pub use open::{closed_boundary, OpenError};
pub use partition::PartitionLog;
pub use records::{Records, RecordsHandle};
pub use retention::FrontAge;
pub use shared::LogShared;

/// A committed record.
#[derive(Clone, Debug)]
pub struct LogRecord {
    pub offset: u64,
    /// Commit time, ms since the epoch; never decreases along a partition (S24).
    pub timestamp_ms: u64,
    /// Key bytes followed by payload bytes.
    pub body: Slice,
    pub key_bytes: u32,
}

/// Why a record below the high watermark was not returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadError {
    /// The log was closed meanwhile: transient, changes nothing (S83, C68).
    Closed,
    /// At or past the high watermark.
    PastEnd,
    /// Below the oldest retained offset.
    AgedOut { oldest: u64 },
    /// Damaged, or in a permanent gap: this record will never be readable (S94).
    Unreadable,
    /// The disk refused: transient (S93).
    Io(String),
    /// No descriptor or memory was left to read it with: transient, and no fault of the disk.
    Short(String),
}

/// How frames are stored. Read per frame, so a log may mix them (S22).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    None,
    /// zstd at this level; a frame that does not get shorter is stored as it is.
    Zstd(i32),
}

#[derive(Clone, Debug)]
pub struct LogOptions {
    /// Cap of a segment, header included; rounded down to a block, at least 64 KiB (S14).
    pub segment_bytes: u64,
    pub codec: Codec,
    /// What a frame holds at most before compression, unless a single record is larger.
    pub frame_bytes: usize,
    /// How old a record may get, at least (S66). A segment whose oldest record is older is rolled before the next write
    /// (S16, S68). 0: for ever. [`PartitionLog::set_retention_ms`] changes it.
    pub retention_ms: u64,
    /// Name and bytes (whole blocks) of a file of zeros that is made beside the first segment: who keeps something there
    /// later finds its blocks also on a disk that is full by then.
    pub companion: Option<(&'static str, u64)>,
}

impl Default for LogOptions {
    fn default() -> LogOptions {
        LogOptions {
            segment_bytes: 64 << 20,
            codec: Codec::None,
            frame_bytes: frame::FRAME_BYTES,
            retention_ms: 0,
            companion: None,
        }
    }
}

/// Durations of one log's writes, in microseconds.
#[derive(Clone, Debug)]
pub struct LogLatencies {
    /// The durable write of a commit: flush and sync are one operation.
    pub durable_write_us: Histogram,
    /// Reading the blocks back and checking them.
    pub read_back_us: Histogram,
}

/// What happened to one log since it was opened.
#[derive(Clone, Debug, Default)]
pub struct LogMetrics {
    /// `None` before the first commit.
    pub latencies: Option<Box<LogLatencies>>,
    pub commits: u64,
    pub commits_failed: u64,
    pub records: u64,
    /// Keys and payloads.
    pub body_bytes: u64,
    /// Bytes sent to the device by commits, rewritten tail blocks and padding included.
    pub written_bytes: u64,
    pub rolls: u64,
    /// Commits that had to claim space themselves because the background had not yet.
    pub claims_inline: u64,
    /// Commits whose blocks came back from the device different (E14).
    pub read_back_mismatches: u64,
    /// Places where records that were once synced could not be read any more (S57, S94). Never raised by a power cut.
    pub damage_found: u64,
    /// Bytes of an interrupted commit that were cut at open.
    pub torn_bytes_cut: u64,
    pub disk_reads: u64,
    /// What retention removed (S74).
    pub retention_bytes: u64,
    pub retention_records: u64,
    pub retention_unlinks_failed: u64,
    /// Microseconds of each pass that found something to do. `None` before the first.
    pub retention_us: Option<Box<Histogram>>,
    /// Microseconds of each write of the boundary file that ended well, and of those that failed (S45, S48).
    pub boundary_us: Option<Box<[Histogram; 2]>>,
    /// Failures that closed the log for appends (S39).
    pub poisonings: u64,
    /// A write of unknown outcome: commits are refused until the log is reopened (S38).
    pub poisoned: bool,
}

impl LogMetrics {
    /// Adds the counters of another time, or of another owner, of the same partition.
    pub fn add(&mut self, more: &LogMetrics) {
        self.commits += more.commits;
        self.commits_failed += more.commits_failed;
        self.records += more.records;
        self.body_bytes += more.body_bytes;
        self.written_bytes += more.written_bytes;
        self.rolls += more.rolls;
        self.claims_inline += more.claims_inline;
        self.read_back_mismatches += more.read_back_mismatches;
        self.damage_found += more.damage_found;
        self.torn_bytes_cut += more.torn_bytes_cut;
        self.disk_reads += more.disk_reads;
        self.retention_bytes += more.retention_bytes;
        self.retention_records += more.retention_records;
        self.retention_unlinks_failed += more.retention_unlinks_failed;
        self.poisonings += more.poisonings;
        self.poisoned |= more.poisoned;
        if let Some(more) = &more.retention_us {
            add_histogram(self.retention_us.get_or_insert_with(|| Box::new(coarse_histogram())), more);
        }
        if let Some(more) = &more.boundary_us {
            let sums = self.boundary_us.get_or_insert_with(|| Box::new([coarse_histogram(), coarse_histogram()]));
            sums.iter_mut().zip(more.iter()).for_each(|(sum, more)| add_histogram(sum, more));
        }
        match (&mut self.latencies, &more.latencies) {
            (Some(sum), Some(more)) => {
                add_histogram(&mut sum.durable_write_us, &more.durable_write_us);
                add_histogram(&mut sum.read_back_us, &more.read_back_us);
            }
            (sum @ None, Some(more)) => *sum = Some(more.clone()),
            (_, None) => {}
        }
    }
}

fn add_histogram(sum: &mut Histogram, more: &Histogram) {
    let added = sum.add(more);
    debug_assert!(added.is_ok(), "histograms that resize take every value");
}
