//! One shard: its state and its tasks.

pub mod topics;
