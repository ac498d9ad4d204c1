//! A partition's log as its consumers see it. Tests of the queue have their own.

use std::rc::Rc;

use super::{LogRecord, PartitionLog, ReadError};
use crate::peer::LocalBoxFuture;

pub trait Records {
    /// Exclusive upper bound of what may be read.
    fn high_watermark(&self) -> u64;
    /// Lowest retained offset.
    fn oldest(&self) -> u64;
    fn read(&self, offset: u64) -> LocalBoxFuture<'static, Result<LogRecord, ReadError>>;
    /// The answer of `read`, when it takes no disk. Allocates nothing: most deliveries are answered so.
    fn read_cached(&self, _offset: u64) -> Option<Result<LogRecord, ReadError>> {
        None
    }
    /// The next offset at or after `offset` that may hold a readable record: lets a consumer step over a permanent
    /// gap at once instead of offset by offset.
    fn next_readable(&self, offset: u64) -> u64;
    /// A consumer looks at the records: they are not idle (S81).
    fn touch(&self) {}
}

pub type RecordsHandle = Rc<dyn Records>;

impl Records for PartitionLog {
    fn high_watermark(&self) -> u64 {
        PartitionLog::high_watermark(self)
    }

    fn oldest(&self) -> u64 {
        PartitionLog::oldest(self)
    }

    fn read(&self, offset: u64) -> LocalBoxFuture<'static, Result<LogRecord, ReadError>> {
        let log = self.clone();
        Box::pin(async move { log.read_one(offset).await })
    }

    fn read_cached(&self, offset: u64) -> Option<Result<LogRecord, ReadError>> {
        PartitionLog::read_cached(self, offset)
    }

    fn next_readable(&self, offset: u64) -> u64 {
        PartitionLog::next_readable(self, offset)
    }

    fn touch(&self) {
        PartitionLog::touch(self);
    }
}
