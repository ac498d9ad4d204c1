//! One core's data plane. Knows no HTTP, no Raft, no QUIC; see README.md beside this crate's `src` for the tour.

pub mod api;
pub mod dispatch;
pub mod io;
pub mod log;
pub mod meta;
pub mod metrics;
pub mod peer;
pub mod queue;
pub mod rt;
pub mod shard;
pub mod spsc;
pub mod wal;
