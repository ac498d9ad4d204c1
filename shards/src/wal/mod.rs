//! Ingress WAL of one shard (or of an adopted directory, E18): group commit, prepared segments, recovery,
//! checkpoint, compaction.

use std::rc::Rc;

use crate::meta::Incarnation;
use crate::peer::Record;

/// An accepted record as the dispatcher gets it: from the staging buffer right after its group became durable, or
/// read back from disk.
#[derive(Clone, Debug)]
pub struct WalRecord {
    pub seq: u64,
    pub topic: Rc<str>,
    /// `None` for format 1 records, which name a topic only.
    pub incarnation: Option<Incarnation>,
    pub partition: u32,
    /// Wall clock at accept, ms since the epoch.
    pub accepted_at_ms: u64,
    pub record: Record,
}

/// Figures of one WAL since the process started.
#[derive(Clone, Debug, Default)]
pub struct WalMetrics {}
