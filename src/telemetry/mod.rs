//! What the node tells of itself: log lines and metrics.
//!
//! Counters live where they are counted, one writer each; this module has the cells they are made of, the text format,
//! and the rendering of what shards and process report. Each series is rendered in one place only.

mod cluster;
mod counter;
mod exposition;
mod fold;
mod logging;
mod node;
mod process;
mod shards;
mod vitals;

pub use cluster::ClusterMetrics;
pub use counter::{Counter, DurationHistogram};
pub use exposition::{Exposition, Kind};
pub use fold::say_the_rest;
pub use logging::install_logging;
#[cfg(test)]
pub(crate) use logging::lines as logged;
pub use node::{render_node, NodeMetrics};
pub use process::{render_process, resident_bytes};
pub use shards::{other_errors, render_shards};
pub use vitals::{NodeReport, PeerReport, ShardReport};
