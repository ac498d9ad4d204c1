//! The node: everything that is not one core's data plane. The binary `narad` is a thin shell around this library.
//!
//! `config` reads the settings, `node` checks the machine and places the shards, `control` keeps the topics, `http`
//! is what clients talk to, `telemetry` what operators read, `cli` what a person types.

pub mod cli;
pub mod config;
pub mod control;
#[doc(hidden)]
pub mod fuzz;
pub mod http;
mod node;
pub mod peer;
pub mod telemetry;
