//! Partition log: segments, frames, commit with read-back, recovery, reads.

use crate::io::Slice;

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
}
