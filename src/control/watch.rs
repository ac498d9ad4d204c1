//! What the applier tells whoever scrapes: plain numbers, written by the control thread, read by any.

use std::sync::atomic::{AtomicBool, AtomicU64};

#[derive(Debug, Default)]
pub struct MetastoreWatch {
    pub topics: AtomicU64,
    /// Index of the last entry whose effects are stored.
    pub applied_index: AtomicU64,
    /// Writes that the store refused.
    pub write_errors: AtomicU64,
    /// A refused write is being tried again.
    pub stalled: AtomicBool,
    /// Given up for good (K17).
    pub stopped: AtomicBool,
}
