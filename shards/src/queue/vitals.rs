//! The consumer side of a shard in three numbers.

use super::ShardQueues;

/// Sums over the partitions that have consumer state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueVitals {
    /// Deliveries to queue consumers since the shard was opened, redeliveries included. Never falls.
    pub delivered: u64,
    pub leased: u64,
    /// Consumers that wait on this shard.
    pub parked: u64,
}

impl ShardQueues {
    /// Reads memory alone: a look that may be taken at any time.
    pub fn vitals(&self) -> QueueVitals {
        let delivered = self.metrics.borrow().delivered_before + self.unloaded.delivered();
        let mut vitals = QueueVitals { delivered, ..QueueVitals::default() };
        for partition in self.all_partitions() {
            vitals.delivered += partition.delivered();
            vitals.leased += partition.consumer_state().leased;
        }
        vitals.parked = self.parked();
        vitals
    }
}
