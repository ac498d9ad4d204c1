//! A look at the inside of a shard at one instant, for simulation: what must hold at every step is checked on it.

use std::path::PathBuf;

use super::{staging_bytes, Inner, Shard};
use crate::dispatch::Dispatcher;
use crate::meta::Destination;
use crate::wal::Source;
use crate::wal::Wal;

/// One WAL directory and its dispatcher.
#[derive(Clone, Debug)]
pub struct WalInspection {
    pub number: u32,
    /// Drained, and then removed (E18).
    pub adopted: bool,
    pub wal: Wal,
    /// First sequence number that is not done, as the dispatcher knows.
    pub undone: u64,
    pub durable_next: u64,
    pub staging_bytes: u64,
    pub staging_bytes_max: u64,
    /// Bytes that the dispatcher holds or has lent, and what it should not hold.
    pub held_bytes: u64,
    pub held_bytes_max: u64,
}

/// One open partition log.
#[derive(Clone, Debug)]
pub struct LogInspection {
    pub destination: Destination,
    pub high_watermark: u64,
    pub next_offset: u64,
    pub poisoned: Option<String>,
    /// The active segment, and where its committed bytes end.
    pub active: Option<(PathBuf, u64)>,
}

#[derive(Clone, Debug)]
pub struct Inspection {
    pub wals: Vec<WalInspection>,
    pub logs: Vec<LogInspection>,
    /// Bytes in the read cache of all logs, and their bound.
    pub cache_bytes: u64,
    pub cache_bytes_max: u64,
}

impl Shard {
    /// Taken in one turn: all of it belongs together.
    pub fn inspect(&self) -> Inspection {
        let inner = &self.inner;
        let own = inner.own.get().map(|dispatcher| inner.inspect_wal(inner.options.id.into(), &inner.wal, dispatcher));
        let adopted: Vec<WalInspection> = inner
            .adopted
            .borrow()
            .iter()
            .map(|directory| inner.inspect_wal(directory.number, &directory.wal, &directory.dispatcher))
            .collect();
        let cache = &inner.partitions.shared().cache;
        Inspection {
            wals: own.into_iter().chain(adopted).collect(),
            logs: inner.partitions.inspect(),
            cache_bytes: cache.bytes() as u64,
            cache_bytes_max: cache.bytes_max() as u64,
        }
    }
}

impl Inner {
    fn inspect_wal(&self, number: u32, wal: &Wal, dispatcher: &Dispatcher) -> WalInspection {
        WalInspection {
            number,
            adopted: number != u32::from(self.options.id),
            wal: wal.clone(),
            undone: dispatcher.checkpoint(),
            durable_next: wal.durable_next(),
            staging_bytes: wal.metrics().staging_bytes,
            staging_bytes_max: staging_bytes(&self.options) as u64,
            held_bytes: dispatcher.metrics().held_bytes,
            held_bytes_max: (staging_bytes(&self.options) / 2) as u64,
        }
    }
}
