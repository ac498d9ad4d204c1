//! Commands on the metadata: only guarded forms exist (K5), and everything random or timed is already in them (K4).

use std::sync::Arc;

use narad_shards::api::TopicChange;
use narad_shards::meta::{Incarnation, TopicMeta};

/// One change, decided once and applied in the same way everywhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Refused when the name is taken, letter case aside.
    CreateTopic(Arc<TopicMeta>),
    /// Refused when the live topic of that name is another incarnation.
    DeleteTopic { name: Arc<str>, incarnation: Incarnation },
    /// Refused like a delete, and when the partitions would not become more. Fields that it leaves out keep what the
    /// commands before it made of them (lesson N73.2).
    AlterTopic { name: Arc<str>, incarnation: Incarnation, change: TopicChange },
}

impl Command {
    /// Newest type that this build applies. A file that has seen a newer one belongs to a newer build (K18).
    pub const NEWEST_TYPE: u64 = 3;

    /// The type's number in a log entry; never reused.
    pub fn type_number(&self) -> u64 {
        match self {
            Command::CreateTopic(_) => 1,
            Command::DeleteTopic { .. } => 2,
            Command::AlterTopic { .. } => 3,
        }
    }
}
