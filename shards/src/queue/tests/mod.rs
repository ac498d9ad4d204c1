//! Whole shards over simulated logs, a simulated disk, and a carrier that delays and reorders.

mod claims;
mod crash;
mod parking;
mod random;
mod world;
