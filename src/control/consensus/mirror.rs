//! The log in memory, as the library reads it. Holds what is on disk, no more and no less: written after every durable
//! write, so that nothing unsynced is ever read back. Bounded by compaction: the trailing entries and one threshold.

use std::cell::Cell;
use std::collections::VecDeque;

use raft::eraftpb::{Entry, Snapshot, SnapshotMetadata};
use raft::{GetEntriesContext, RaftState, StorageError};

use super::configuration::Configuration;
use super::disk::{Changes, Position, Stored};

/// What an image is of: the state as of `index`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label {
    pub position: Position,
    pub configuration: Configuration,
}

impl Label {
    pub fn snapshot(&self) -> Snapshot {
        let metadata = SnapshotMetadata {
            conf_state: Some(self.configuration.conf_state()),
            index: self.position.index,
            term: self.position.term,
        };
        let data = serde_json::to_vec(&self.configuration).unwrap_or_default(); // a map of plain values
        Snapshot { data, metadata: Some(metadata) }
    }
}

pub struct Mirror {
    stored: Stored,
    entries: VecDeque<Entry>,
    /// Of the image that this process has made.
    image: Option<Label>,
    /// Somebody needs a snapshot that there is not.
    wanted: Cell<bool>,
}

impl Mirror {
    pub fn new(mut stored: Stored) -> Mirror {
        let entries = std::mem::take(&mut stored.entries).into();
        Mirror { stored, entries, image: None, wanted: Cell::new(false) }
    }

    pub fn start(&self) -> Position {
        self.stored.start
    }

    pub fn last(&self) -> u64 {
        self.stored.start.index + self.entries.len() as u64
    }

    pub fn configuration(&self) -> &Configuration {
        &self.stored.configuration
    }

    pub fn image(&self) -> Option<&Label> {
        self.image.as_ref()
    }

    pub fn term_at(&self, index: u64) -> Option<u64> {
        if index == self.stored.start.index {
            return Some(self.stored.start.term);
        }
        self.entry(index).map(|entry| entry.term)
    }

    fn entry(&self, index: u64) -> Option<&Entry> {
        let at = index.checked_sub(self.stored.start.index + 1)?;
        self.entries.get(usize::try_from(at).ok()?)
    }

    pub fn set_image(&mut self, label: Label) {
        self.image = Some(label);
    }

    /// Whether a snapshot was asked for since the last call.
    pub fn take_wanted(&self) -> bool {
        self.wanted.take()
    }

    /// Follows what has become durable.
    pub fn follow(&mut self, changes: &Changes) {
        if changes.clear {
            self.entries.clear();
        }
        if let Some(start) = changes.start {
            while self.entries.front().is_some_and(|entry| entry.index <= start.index) {
                self.entries.pop_front();
            }
            self.stored.start = start;
        }
        if let Some(first) = changes.entries.first() {
            let keep = first.index.saturating_sub(self.stored.start.index + 1);
            self.entries.truncate(keep as usize);
            self.entries.extend(changes.entries.iter().cloned());
        }
        if let Some(hard_state) = &changes.hard_state {
            self.stored.hard_state = hard_state.clone();
        }
        if let Some(configuration) = &changes.configuration {
            self.stored.configuration = configuration.clone();
        }
        debug_assert!(self
            .entries
            .iter()
            .zip(self.stored.start.index + 1..)
            .all(|(entry, index)| entry.index == index));
    }
}

impl raft::Storage for Mirror {
    fn initial_state(&self) -> raft::Result<RaftState> {
        Ok(RaftState::new(self.stored.hard_state.clone(), self.stored.configuration.conf_state()))
    }

    fn entries(
        &self,
        low: u64,
        high: u64,
        max_size: impl Into<Option<u64>>,
        _context: GetEntriesContext,
    ) -> raft::Result<Vec<Entry>> {
        if low <= self.stored.start.index {
            return Err(raft::Error::Store(StorageError::Compacted));
        }
        if high > self.last() + 1 {
            return Err(raft::Error::Store(StorageError::Unavailable));
        }
        let at = |index: u64| (index - self.stored.start.index - 1) as usize;
        let mut entries: Vec<Entry> = self.entries.range(at(low)..at(high)).cloned().collect();
        raft::util::limit_size(&mut entries, max_size.into());
        Ok(entries)
    }

    fn term(&self, index: u64) -> raft::Result<u64> {
        match self.term_at(index) {
            Some(term) => Ok(term),
            None if index < self.stored.start.index => Err(raft::Error::Store(StorageError::Compacted)),
            None => Err(raft::Error::Store(StorageError::Unavailable)),
        }
    }

    fn first_index(&self) -> raft::Result<u64> {
        Ok(self.stored.start.index + 1)
    }

    fn last_index(&self) -> raft::Result<u64> {
        Ok(self.last())
    }

    /// Only one that the follower can go on from, and that knows it: an image from before it was added would be
    /// refused by it for ever.
    fn snapshot(&self, request_index: u64, to: u64) -> raft::Result<Snapshot> {
        match self.image() {
            Some(label)
                if label.position.index >= request_index.max(self.stored.start.index)
                    && label.configuration.servers.contains_key(&to) =>
            {
                Ok(label.snapshot())
            }
            _ => {
                self.wanted.set(true);
                Err(raft::Error::Store(StorageError::SnapshotTemporarilyUnavailable))
            }
        }
    }
}

#[cfg(test)]
impl Mirror {
    /// What a restart would read.
    pub fn to_stored(&self) -> Stored {
        Stored { entries: self.entries.iter().cloned().collect(), ..self.stored.clone() }
    }
}
