//! The load: one thread drives many connections over whatever protocol a [`Protocol`] speaks, in closed or open loop.
//!
//! `engine` owns sockets and time and knows no protocol; a `Protocol` is one connection's conversation and owns neither.
//! `narad` speaks the product's HTTP API, `ledger` checks that what was confirmed came back, `broker` starts a broker to
//! measure, `cost` reads what it cost.

pub mod admin;
pub mod broker;
pub mod clock;
mod connection;
pub mod cost;
pub mod cpu;
pub mod engine;
pub mod http;
pub mod ledger;
pub mod narad;
pub mod options;
pub mod payload;
pub mod process;
pub mod protocol;
pub mod tally;
pub mod target;
pub mod threads;

#[cfg(test)]
mod tests;

pub use clock::{Clock, Nanos};
pub use engine::{Group, Pace, Timing, Until};
pub use protocol::{Answer, Protocol};
pub use tally::Tally;
