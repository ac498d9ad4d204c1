//! What the core asks of its driver.

use std::sync::Arc;

use crate::meta::{Address, Destination, Incarnation, NodeId};
use crate::peer::CommitBatch;
use crate::wal::ReadLimit;

/// Names one commit; never used twice in the life of a core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommitId {
    pub(crate) lane: u32,
    pub(crate) serial: u64,
}

/// The life of a topic name that records were accepted under; without an id for format 1 records.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TopicLife {
    pub topic: Arc<str>,
    pub incarnation: Option<Incarnation>,
}

#[derive(Debug)]
pub enum Action {
    /// Read records that were never read, from memory or else from disk; answer with `new_records` or
    /// `read_failed`. One at a time.
    ReadNew { from: u64, until: u64, limit: ReadLimit },
    /// Read from disk what `wants` accepts; answer with `skipped_records` or `read_failed`. One at a time.
    ReadSkipped { from: u64, until: u64, limit: ReadLimit },
    /// Commit; answer with `landed`, however late. The batch's buffers are lent until then (E21).
    Commit { id: CommitId, to: Address, batch: CommitBatch },
    /// Everything below is committed or discarded.
    StoreCheckpoint(u64),
    /// Ask the control thread whether this life of the topic is over; answer with `gone`, always.
    AskGone(TopicLife),
    /// Say it in the log.
    Report(Report),
}

/// Something that an operator should be able to find in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    /// One record went with its topic.
    Discarded {
        life: TopicLife,
        partition: u32,
        seq: u64,
        replaced: bool,
        error: Option<Arc<str>>,
    },
    /// A destination's whole queue went with its topic.
    DiscardedQueue {
        life: TopicLife,
        partition: u32,
        records: u64,
    },
    /// `412`: the records wait in the WAL to be checked again.
    Refused {
        topic: Arc<str>,
        destination: Destination,
        records: u64,
        error: String,
    },
    /// The first failure of a destination that was well.
    Failing {
        topic: Arc<str>,
        destination: Destination,
        address: Address,
        error: String,
    },
    /// Three seconds of failures: its records go to a sibling from here on.
    Rerouting {
        topic: Arc<str>,
        destination: Destination,
        address: Option<Address>,
    },
    Recovered {
        topic: Arc<str>,
        destination: Destination,
        address: Option<Address>,
    },
    /// No answer for a second.
    Hung {
        topic: Arc<str>,
        destination: Destination,
        address: Address,
        records: u64,
    },
    /// The WAL did not hand over a record that must be there.
    Missing {
        seq: u64,
    },
}

impl Report {
    /// The other node whose trouble this is, if it is one's.
    pub fn peer(&self) -> Option<NodeId> {
        let address = match self {
            Report::Failing { address, .. } | Report::Hung { address, .. } => *address,
            Report::Rerouting { address, .. } | Report::Recovered { address, .. } => (*address)?,
            _ => return None,
        };
        Some(address.node).filter(|node| *node != NodeId::LOCAL)
    }
}
