//! Leases, frontier, waiters: what consumers see of a partition, and who gets the next record.
//!
//! - [`inflight`]: leases and frontier of one partition, pure.
//! - [`position`], [`committer`]: the acked position on disk; codec and slot roles, then the driver of all files.

mod committer;
mod inflight;
mod position;
mod waiters;

use std::rc::Rc;

use crate::log::{LogRecord, ReadError};
use crate::peer::LocalBoxFuture;

/// What the queue needs of a partition's log. `log` implements it; tests have their own.
pub trait Records {
    /// Exclusive upper bound of what may be read.
    fn high_watermark(&self) -> u64;
    /// Lowest retained offset.
    fn oldest(&self) -> u64;
    fn read(&self, offset: u64) -> LocalBoxFuture<'static, Result<LogRecord, ReadError>>;
    /// The next offset at or after `offset` that may hold a readable record: lets a consumer step over a permanent
    /// gap at once instead of offset by offset.
    fn next_readable(&self, offset: u64) -> u64;
}

pub type RecordsHandle = Rc<dyn Records>;
