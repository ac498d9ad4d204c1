//! Answers what other shards, the control thread and this shard's own tasks ask.

use std::rc::Rc;

use super::Inner;
use crate::api::PartitionStats;
use crate::meta::{Address, Destination, Incarnation};
use crate::peer::{CommitBatch, CommitError, Committed, Reply, Request};
use crate::rt::RuntimeMetrics;

impl Inner {
    pub(super) async fn handle(self: &Rc<Self>, request: Request) -> Reply {
        let request = match self.queues().handle(request).await {
            Ok(reply) => return reply,
            Err(other) => other,
        };
        match request {
            Request::Commit(batch) => Reply::Commit(self.commit(batch).await),
            Request::Stats { incarnation } => Reply::Stats(self.stats(incarnation)),
            Request::InstallSnapshot(snapshot) => {
                self.install(snapshot);
                Reply::Done
            }
            Request::InstallPeers(peers) => {
                self.install_peers(peers);
                Reply::Done
            }
            Request::Produce { topic, partition, record } => {
                Reply::Produced(self.produce_direct(topic, partition, record).await)
            }
            Request::Latch { cause } => {
                self.wal.latch(&cause);
                Reply::Done
            }
            Request::PrepareTopic { topic, incarnation } => {
                Reply::Prepared(self.prepare_directory(&topic, incarnation).await)
            }
            Request::CloseTopic { incarnation } => {
                self.close_topic(incarnation).await;
                Reply::Done
            }
            Request::Metrics => Reply::Metrics(Box::new(self.metrics().await)),
            Request::Vitals => Reply::Vitals(Box::new(self.vitals(RuntimeMetrics::default()))),
            Request::Quiesce => {
                self.quiesce().await;
                Reply::Done
            }
            Request::Shutdown => Reply::ShutDown(self.shut_down().await),
            // The queue took its own; questions about metadata go to the control thread and never here.
            other => {
                tracing::error!(?other, "a request reached a shard that does not answer it");
                Reply::Done
            }
        }
    }

    /// Commit stage (seed): what the caller checked is checked here, and by the combiner again at the drain.
    async fn commit(self: &Rc<Self>, batch: CommitBatch) -> Result<Committed, CommitError> {
        let destination = batch.destination;
        {
            let snapshot = self.snapshot.borrow();
            if snapshot.topic_of(destination.incarnation).is_none() {
                return Err(match (snapshot.topic(&batch.topic), batch.accepted_under) {
                    (Some(live), Some(accepted_under)) => {
                        CommitError::IncarnationMismatch { accepted_under, live: live.incarnation }
                    }
                    _ => CommitError::UnknownTopic,
                });
            }
            if snapshot.address(destination) != Some(Address::local(self.options.id)) {
                return Err(CommitError::NotOwner);
            }
        }
        let partition = self.partition(destination).ok_or(CommitError::UnknownTopic)?;
        let (records, bytes) = (batch.records.len() as u64, batch.records.iter().map(|r| r.body.len() as u64).sum());
        let committed = partition.combiner().commit(batch).await?;
        partition.count_produced(records, bytes);
        Ok(committed)
    }

    fn stats(&self, incarnation: Incarnation) -> Vec<PartitionStats> {
        let snapshot = self.snapshot.borrow().clone();
        let describe = |partition| {
            let destination = Destination { incarnation, partition };
            if self.partitions.is_unusable(destination) {
                return None; // it would look like one that is empty
            }
            let mut stats = PartitionStats { index: partition, ..PartitionStats::default() };
            if let Some(log) = self.partitions.known_log(destination) {
                stats.segments = log.segments();
                stats.oldest_offset = log.oldest();
                stats.next_offset = log.next_offset();
                stats.high_watermark = log.high_watermark();
                stats.size_bytes = log.size_bytes();
                stats.oldest_segment_at = log.oldest_segment_at().map(|ms| ms / 1000);
            }
            if let Some(consumers) = self.queues().consumer_state(destination) {
                stats.frontier = consumers.frontier;
                stats.leased = consumers.leased;
                stats.acked_ahead = consumers.acked_ahead;
            }
            Some(stats)
        };
        snapshot.partitions_on(incarnation, self.options.id).filter_map(describe).collect()
    }
}
