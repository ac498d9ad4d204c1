//! What the HTTP layer asks of the shard it runs on.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use narad_shards::api::{
    ConsumeError, Delivery, MetaCommand, MetaReply, NewRecord, PartitionReport, ProduceError, ReadAt, Settle,
    SettleStatus,
};
use narad_shards::meta::TopicMeta;
use narad_shards::metrics::ShardMetrics;
use narad_shards::peer::Take;

use crate::telemetry::{NodeMetrics, PeerReport, ShardReport};

/// The topic of a settle is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopicNotFound;

/// Liveness: what `/healthz` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    Ok,
    /// A graceful stop has begun.
    ShuttingDown,
}

/// What `/readyz` says, judged anew at every probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Ready; the list names what is degraded, such as `raft_tls_certificate_expired`.
    Ready(Vec<&'static str>),
    /// The first gate that fails, as the client reads it.
    NotReady(String),
}

/// The shard as handlers see it. Implemented once for the real shard; calls are generic, so none is boxed.
///
/// Every future may be dropped at any point, because its client has left. A dropped `consume` gives back what it had
/// reserved (lesson N37); a dropped `produce` may have stored its record.
pub trait Broker: 'static {
    /// Stores one record durably on this node.
    fn produce<'a>(
        &'a self,
        topic: &'a str,
        record: NewRecord<'a>,
    ) -> impl Future<Output = Result<(), ProduceError>> + 'a;

    /// Stores all records in one durable append, in order, or none.
    fn produce_batch<'a>(
        &'a self,
        topic: &'a str,
        records: &'a [NewRecord<'a>],
    ) -> impl Future<Output = Result<(), ProduceError>> + 'a;

    /// A produce to the topic was refused for want of memory before it came to [`Broker::produce`]. Only counted.
    fn refused_for_memory(&self, _topic: &str) {}

    /// Leases 1 to `take.max` records; empty when there were none within `wait`, or the topic was deleted meanwhile.
    fn consume<'a>(
        &'a self,
        topic: &'a str,
        partition: Option<u32>,
        take: Take,
        wait: Duration,
    ) -> impl Future<Output = Result<Vec<Delivery>, ConsumeError>> + 'a;

    /// Settles leases; one status each, in order. No settles only check that the topic exists.
    fn settle<'a>(
        &'a self,
        topic: &'a str,
        settles: Vec<Settle>,
    ) -> impl Future<Output = Result<Vec<SettleStatus>, TopicNotFound>> + 'a;

    /// Reads one record without a lease.
    fn read_at<'a>(
        &'a self,
        topic: &'a str,
        partition: u32,
        offset: u64,
    ) -> impl Future<Output = Result<ReadAt, ConsumeError>> + 'a;

    fn topic(&self, name: &str) -> Option<Arc<TopicMeta>>;

    /// Up to `limit` topics in name order, the first one behind `after` (exclusive; empty is the start).
    fn topics_after(&self, after: &str, limit: usize) -> Vec<Arc<TopicMeta>>;

    /// Every partition of the topic, or the one asked for, in order, each by the word of its owner; within 2 s.
    fn describe<'a>(
        &'a self,
        topic: &'a TopicMeta,
        only: Option<u32>,
    ) -> impl Future<Output = Vec<PartitionReport>> + 'a;

    /// Creates or deletes a topic; answered once every shard of this node knows (E23).
    fn change(&self, command: MetaCommand) -> impl Future<Output = MetaReply>;

    /// This node was caught up with its cluster once since it started: until then it takes no request (E51).
    fn serves(&self) -> bool {
        true
    }

    fn health(&self) -> Health;

    fn readiness(&self) -> impl Future<Output = Readiness>;

    /// The figures of all shards of this node that answer.
    fn metrics(&self) -> impl Future<Output = Vec<ShardMetrics>>;

    /// A look at every shard of this node.
    fn vitals(&self) -> impl Future<Output = Vec<ShardReport>>;

    /// The other nodes, as the last look at the shards found them.
    fn peers(&self) -> Vec<PeerReport> {
        Vec::new()
    }

    /// The figures that no shard has.
    fn node_metrics(&self) -> impl Future<Output = NodeMetrics>;
}
