//! One shard: its state and its tasks.
