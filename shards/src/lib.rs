//! One core's data plane: what happens to a record from the moment its bytes are there until it is acked and reclaimed.
//! Knows no HTTP, no Raft, no QUIC, no configuration, and makes no topic.
//!
//! The tour, step by step and file by file, is the `README.md` of this crate.

pub mod api;
pub mod dispatch;
#[doc(hidden)]
pub mod fuzz;
pub mod histogram;
pub mod io;
mod le;
pub mod log;
#[cfg(test)]
mod log_lines;
pub mod meta;
pub mod metrics;
pub mod peer;
pub mod queue;
pub mod remote;
pub mod rt;
pub mod shard;
pub mod spsc;
pub mod wal;
pub mod wire;
