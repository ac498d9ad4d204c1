//! What all partition logs of one shard share: read cache, compressor, the budget of zero-filling.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::cache::FrameCache;
use crate::io::FillBudget;
use crate::rt::sync::Lock;

/// One per shard, handed to every log at open.
pub struct LogShared {
    pub cache: FrameCache,
    compressor: RefCell<Option<zstd::bulk::Compressor<'static>>>,
    next_log: Cell<u64>,
    open: Cell<usize>,
    /// The shard's, which its WAL fills from too.
    pub fill: FillBudget,
    opening: RefCell<BTreeMap<PathBuf, Lock>>,
}

impl LogShared {
    pub fn new(cache_bytes: usize, fill: FillBudget) -> Rc<LogShared> {
        Rc::new(LogShared {
            cache: FrameCache::new(cache_bytes),
            compressor: RefCell::default(),
            next_log: Cell::new(0),
            open: Cell::new(0),
            fill,
            opening: RefCell::default(),
        })
    }

    /// A name for a log in the cache, never given twice.
    pub(super) fn name_log(&self) -> u64 {
        let id = self.next_log.get();
        self.next_log.set(id + 1);
        id
    }

    /// Logs that hold their files open.
    pub fn open_logs(&self) -> usize {
        self.open.get()
    }

    /// Counts a log as open until what this returns is dropped.
    pub(super) fn count_open(self: &Rc<Self>) -> OpenLog {
        self.open.set(self.open.get() + 1);
        OpenLog(self.clone())
    }

    /// The turn of a directory: one open at a time works on it, even if its caller has given up.
    pub(super) fn turn_of(&self, dir: &Path) -> Lock {
        let mut opening = self.opening.borrow_mut();
        opening.retain(|_, turn| turn.in_use());
        opening.entry(dir.to_owned()).or_default().clone()
    }

    /// Compresses into `out`; `None` when the result would not be shorter than `out`.
    pub(super) fn compress(&self, level: i32, decoded: &[u8], out: &mut [u8]) -> Option<usize> {
        let mut slot = self.compressor.borrow_mut();
        if slot.is_none() {
            *slot = zstd::bulk::Compressor::new(level).ok();
        }
        let compressor = slot.as_mut()?;
        compressor.set_compression_level(level).ok()?;
        compressor.compress_to_buffer(decoded, out).ok()
    }
}

/// One log that counts as open.
pub(super) struct OpenLog(Rc<LogShared>);

impl Drop for OpenLog {
    fn drop(&mut self) {
        self.0.open.set(self.0.open.get() - 1);
    }
}
