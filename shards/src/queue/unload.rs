//! Partitions whose log is open but whose consumer state is not, or neither: their figures, and how a partition gets
//! there. Nothing of it changes while no log is open, so the figures stay exact without a look at the disk (S52, C67).

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;

use super::partition::PartitionQueue;
use super::shard_queues::{ConsumerState, ShardQueues};
use super::PartitionMetrics;
use crate::meta::{Destination, ShardId, Snapshot};

#[derive(Default)]
pub(super) struct Unloaded {
    figures: RefCell<BTreeMap<Destination, PartitionMetrics>>,
}

impl Unloaded {
    /// Lets go of partitions that have gone or are served elsewhere; returns the deliveries there were from them.
    pub fn follow(&self, snapshot: &Snapshot, shard: ShardId) -> u64 {
        let here = crate::meta::Address::local(shard);
        let before = self.delivered();
        self.figures.borrow_mut().retain(|destination, _| snapshot.address(*destination) == Some(here));
        before - self.delivered()
    }

    pub fn delivered(&self) -> u64 {
        self.figures.borrow().values().map(|figures| figures.messages_consumed).sum()
    }

    /// A log was opened; its files state this position.
    pub fn note_frontier(&self, destination: Destination, frontier: u64) {
        self.figures.borrow_mut().entry(destination).or_default().frontier = frontier;
    }

    pub fn consumer_state(&self, destination: Destination) -> Option<ConsumerState> {
        let figures = self.figures.borrow();
        let known = figures.get(&destination)?;
        Some(ConsumerState { frontier: known.frontier, leased: 0, acked_ahead: known.acked_ahead })
    }

    pub fn figures(&self) -> BTreeMap<Destination, PartitionMetrics> {
        self.figures.borrow().clone()
    }
}

impl ShardQueues {
    /// What a partition's files state whose consumer state is not in memory.
    pub(super) fn unloaded(&self, destination: Destination) -> Option<ConsumerState> {
        self.unloaded.consumer_state(destination)
    }

    /// A partition's state has come to life: it goes on where its figures stopped.
    pub(super) fn loaded(&self, partition: &PartitionQueue) {
        let figures = self.unloaded.figures.borrow_mut().remove(&partition.destination);
        if let Some(figures) = figures {
            partition.carry_on(&figures);
        }
    }

    /// Before an idle log is closed: makes the partition's position durable and drops its consumer state. `false`, and
    /// nothing dropped, while leases, pinned waiters or acks of this moment need it; after an error too.
    pub async fn unload(&self, destination: Destination) -> io::Result<bool> {
        let Some(partition) = self.open_partition(destination) else { return Ok(true) };
        let needed = |partition: &Rc<PartitionQueue>| {
            partition.parked() > 0 || partition.consumer_state().leased > 0 || partition.is_retired()
        };
        if needed(&partition) {
            return Ok(false);
        }
        self.committer.level(destination).await?;
        let figures = partition.metrics().await;
        // No other turn from here on: what a claim finds is either this state or what it left on disk.
        let Some(topic) = self.topic(destination.incarnation) else { return Ok(true) };
        if needed(&partition) || !self.committer.forget_exact(destination) {
            return Ok(false);
        }
        self.unloaded.figures.borrow_mut().insert(destination, figures);
        drop(topic.begin_close(&partition));
        Ok(true)
    }
}
