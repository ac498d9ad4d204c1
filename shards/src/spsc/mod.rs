//! Rings between shards.
