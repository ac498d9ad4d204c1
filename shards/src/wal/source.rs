//! A WAL as its dispatcher sees it. Tests of the dispatcher have their own.

use std::io;

use super::WalRecord;
use crate::peer::LocalBoxFuture;
use crate::rt::sync::Notify;

/// Bounds of one read.
#[derive(Clone, Copy, Debug)]
pub struct ReadLimit {
    pub records_max: usize,
    pub bytes_max: usize,
}

/// Records in WAL order, and where to go on.
#[derive(Debug, Default)]
pub struct ReadBack {
    pub records: Vec<WalRecord>,
    /// First sequence number that this read did not look at.
    pub next: u64,
}

pub trait Source {
    /// First sequence number that is not durable: the end of what may be read.
    fn durable_next(&self) -> u64;

    /// Oldest sequence number that can still be read: the first one of the oldest segment.
    fn oldest(&self) -> u64;

    /// The checkpoint found at open, already clamped to the oldest segment and synced.
    fn recovered_checkpoint(&self) -> u64;

    /// Notified whenever `durable_next` has moved.
    fn durable_advanced(&self) -> Notify;

    /// Hands over records from `from` on that are still in staging memory; the source forgets its own reference to
    /// them. `None` when `from` is not in memory (any more): read it from disk.
    fn read_memory(&self, from: u64, limit: ReadLimit) -> Option<ReadBack>;

    /// Reads durable records from disk, from `from` up to `until` (exclusive), passing over those that `want`
    /// refuses before decoding them.
    fn read_disk<'a>(
        &'a self,
        from: u64,
        until: u64,
        limit: ReadLimit,
        want: &'a dyn Fn(u64) -> bool,
    ) -> LocalBoxFuture<'a, io::Result<ReadBack>>;

    /// Overwrites the checkpoint at once, makes it durable within 250 ms, then compacts behind it.
    fn store_checkpoint(&self, seq: u64);

    /// Staging memory is nearly used up: held records should be let go and read back later (E20).
    fn staging_low(&self) -> bool;
}
