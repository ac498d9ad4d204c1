//! The consensus directory: `consensus.redb` beside `state.redb` (E37), and the images that travel. One transaction
//! per write; `Ok` means durable. Behind a trait, so that a simulation can lose what was not synced.

use std::sync::Arc;

use narad_shards::io::Slice;
use narad_shards::peer::LocalBoxFuture;
use raft::eraftpb::{Entry, HardState};
use serde::{Deserialize, Serialize};

use super::configuration::Configuration;

/// An entry's place in the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    pub index: u64,
    pub term: u64,
}

/// Everything that the file holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stored {
    /// Identity of this directory, drawn when it was made, 0 never (E36).
    pub raft_id: u64,
    /// The entry before the first one that is kept.
    pub start: Position,
    pub hard_state: HardState,
    pub configuration: Configuration,
    pub entries: Vec<Entry>,
}

impl Stored {
    pub fn last(&self) -> u64 {
        self.start.index + self.entries.len() as u64
    }
}

/// One durable step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Changes {
    /// A snapshot takes the place of the whole log.
    pub clear: bool,
    /// Entries up to this one are dropped.
    pub start: Option<Position>,
    /// Take the place of everything from the first one's index on.
    pub entries: Vec<Entry>,
    pub hard_state: Option<HardState>,
    pub configuration: Option<Configuration>,
}

impl Changes {
    pub fn is_empty(&self) -> bool {
        *self == Changes::default()
    }
}

pub trait Disk {
    /// Writes and syncs. One at a time. After an error the same changes may be tried again.
    fn write(&self, changes: Arc<Changes>) -> LocalBoxFuture<'static, Result<(), String>>;

    /// Reads of the image that this node has made: up to `bytes` from `offset`, and the image's length.
    fn read_image(&self, offset: u64, bytes: usize) -> LocalBoxFuture<'static, Result<(Vec<u8>, u64), String>>;

    /// Adds a piece to the image that is being received; the one at 0 begins it anew. `Err`: it does not fit.
    fn receive(&self, offset: u64, piece: Slice) -> LocalBoxFuture<'static, Result<(), String>>;

    /// Syncs and verifies the received image and gives it its name. Resolves with its applied index.
    fn finish_receiving(&self) -> LocalBoxFuture<'static, Result<u64, String>>;
}
