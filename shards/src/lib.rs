//! One core's data plane: what happens to a record from the moment its bytes are there until it is acked and reclaimed.
//! Knows no HTTP, no Raft, no QUIC, no configuration, and makes no topic.
//!
//! The `README.md` of this crate follows a record through it, step by step and file by file. From the bottom up:
//!
//! | modules | what they are |
//! |---|---|
//! | `io`, `rt`, `spsc` | the doors to disk and network, to tasks and time, and to the other cores; each with a simulated twin |
//! | `meta`, `api`, `peer` | the words: topics and addresses, what clients ask, what shards ask each other |
//! | `wal`, `log` | the ingress WAL; a partition's log |
//! | `dispatch`, `queue` | what moves records from the WAL to the logs; what leases them from the logs to consumers |
//! | `shard` | one core's worth of all that |
//! | `wire`, `remote` | shards of other nodes: frames, and who sends and answers them |
//! | `histogram`, `metrics` | what is counted |

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
