//! Real brokers under test: processes, a blocking HTTP client, and the ledger that judges what they did.
//!
//! Knows the broker only from outside: its command line, its HTTP API, its log lines.

pub mod callgrind;
pub mod client;
pub mod cluster;
pub mod disk;
pub mod ledger;
pub mod load;
pub mod matrix;
pub mod process;
pub mod random;
pub mod retry;
pub mod rolling;
