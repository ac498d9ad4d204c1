//! Whole shards of several nodes over a simulated network.

mod commits;
mod consumes;
mod describes;
mod world;
