//! Leases, frontier, waiters: what consumers see of a partition, and who gets the next record.
//!
//! Pure cores, each with its tests beside it:
//! - `inflight`: leases and frontier of one partition.
//! - `position`: the acked position on disk, its codec and the roles of its slots.
//! - `waiters`, `home`: who waits for what, and which shard or node is asked next.
//! - `tokens`: which other nodes wait for records of this one.
//!
//! Drivers:
//! - `committer`: writes the positions of all partitions of a shard.
//! - `partition`, `topic`: one partition's leases over its records; a topic's partitions on one shard.
//! - `unload`: what is kept of a partition whose log is closed.
//! - `shard_queues`: all of it for one shard, and the requests of the other shards.
//! - `homes`: the topics whose waiters stand on this shard, and what nodes tell each other of them.
//! - `consumer`: what HTTP calls.
//!
//! How a record finds its consumer: a consume first looks at the partitions of its own shard. If they have nothing it
//! parks, at the topic's home shard or, when pinned, at its partition's shard. The home asks the shards that may have
//! records, for one waiter at a time; a shard without any keeps a token, and spends it when a record comes. Another node
//! that owns partitions is asked like a shard, through the topic's home there, and keeps a token like one.

mod committer;
mod consumer;
pub(crate) mod fuzz;
mod held;
mod home;
mod homes;
mod inflight;
mod metrics;
mod partition;
mod position;
mod position_io;
mod shard_queues;
mod sweep;
mod tokens;
mod topic;
mod unload;
mod vitals;
mod waiters;

pub use committer::{Committer, CommitterOptions, Stored};
pub use consumer::Consumer;
pub use metrics::{PartitionMetrics, QueueMetrics};
pub(crate) use partition::busy_text;
pub use position::{Position, Range, AHEAD_FILE, AHEAD_FILE_BYTES};
pub use shard_queues::{ConsumerState, Opened, QueueEnvironment, ShardQueues};
pub use vitals::QueueVitals;

#[cfg(test)]
mod tests;
