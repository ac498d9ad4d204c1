//! Loom's model of `shards/src/spsc/parking.rs`: every interleaving of senders and a receiver that goes to sleep.

#[cfg(test)]
#[path = "../../src/spsc/parking.rs"]
mod parking;
