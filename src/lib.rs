//! The node: everything that is not one core's data plane. The binary `narad` is a thin shell around this library.
//!
//! | module | what it does |
//! |---|---|
//! | `cli` | what a person types: the commands, and the start of the server |
//! | `config` | the settings, from file, environment and flags |
//! | `node` | the process: checks the machine, starts and stops the threads |
//! | `http` | what clients talk to |
//! | `control` | metadata: topics, members, owners, and their consensus |
//! | `peer` | what carries frames between nodes |
//! | `telemetry` | what operators read: metrics, logs, figures of the shards |

pub mod cli;
pub mod config;
pub mod control;
#[doc(hidden)]
pub mod fuzz;
pub mod http;
mod node;
pub mod peer;
pub mod telemetry;
