//! What the world needs of a broker: one node's process, as its clients and its operator see it.

use std::rc::Rc;
use std::time::Duration;

use narad_shards::api::{
    ConsumeError, Delivery, MetaReply, NewTopic, PartitionStats, ProduceError, ReadAt, Settle, SettleStatus,
};
use narad_shards::io::sim::SimDisk;
use narad_shards::meta::{Incarnation, ShardId, Snapshot};
use narad_shards::peer::{LocalBoxFuture, Take};
use narad_shards::remote::sim::SimNetwork;

use crate::ledger::Violation;
use crate::message::Content;
use crate::whole::Whole;

pub type Answer<T> = LocalBoxFuture<'static, T>;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Asked to stop, and it said that it had.
    Graceful,
    Killed,
    PowerCut,
}

/// Figures from inside the broker that no client sees. Empty where a broker cannot tell.
#[derive(Clone, Debug, Default)]
pub struct Probe {
    /// Per WAL directory: its number, the checkpoint on disk, and the first sequence that is not done.
    pub checkpoints: Vec<(u32, u64, u64)>,
    /// Per WAL directory: its number, the backlog gauge, and the durable end minus the stored checkpoint.
    pub backlogs: Vec<(u32, u64, u64)>,
    /// Per open partition: high watermark, and the end of what is durable.
    pub watermarks: Vec<(Incarnation, u32, u64, u64)>,
    /// What holds bytes, how many, and its bound.
    pub memory: Vec<(String, u64, u64)>,
    /// Files that answers depend on, whose names a power cut may take.
    pub unnamed: Vec<String>,
    /// A WAL failed; only a restart ends that.
    pub latched: bool,
    /// Partition logs that refuse appends until they are opened again.
    pub poisoned: Vec<String>,
}

/// A running node. Every future runs as a task of the node, and is dropped when the client goes away.
pub trait Broker {
    /// `batch` asks for one answer for all records; without it there is exactly one record.
    fn produce(
        &self,
        shard: ShardId,
        topic: String,
        records: Vec<Content>,
        batch: bool,
    ) -> Answer<Result<(), ProduceError>>;

    fn consume(
        &self,
        shard: ShardId,
        topic: String,
        partition: Option<u32>,
        take: Take,
        wait: Duration,
    ) -> Answer<Result<Vec<Delivery>, ConsumeError>>;

    fn settle(&self, shard: ShardId, topic: String, settles: Vec<Settle>) -> Answer<Vec<SettleStatus>>;

    fn read_at(
        &self,
        shard: ShardId,
        topic: String,
        partition: u32,
        offset: u64,
    ) -> Answer<Result<ReadAt, ConsumeError>>;

    fn create_topic(&self, topic: NewTopic) -> Answer<MetaReply>;

    fn delete_topic(&self, name: String, incarnation: Incarnation) -> Answer<MetaReply>;

    /// Statistics of all partitions of a topic, and of which incarnation of it; `None` when the node knows none.
    fn stats(&self, topic: String) -> Answer<Option<(Incarnation, Vec<PartitionStats>)>>;

    fn probe(&self) -> Answer<Probe>;

    /// Drains, makes positions durable and closes. Nothing of the node runs afterwards.
    fn shutdown(&self) -> Answer<()>;
}

/// Starts processes of each node, one after the other, over the same disk.
pub trait Launcher {
    /// Recovers what the disk holds. An error is a refusal to start, with the reason.
    fn launch(&self, node: usize, disk: SimDisk, shards: ShardId) -> Answer<Result<Rc<dyn Broker>, String>>;

    /// Called when a process is about to end, before its tasks are dropped: its peers hear no more of it.
    fn ending(&self, _node: usize) {}

    /// Called when a process has ended, after its tasks are gone and the disk has been told.
    fn ended(&self, node: usize, end: End);

    /// The network between the nodes. `None` for a lone one.
    fn network(&self) -> Option<SimNetwork> {
        None
    }

    /// Membership changes its mind about a node, and everybody hears of it.
    fn set_alive(&self, _node: usize, _alive: bool) {}

    /// Who is told what the shards of each node see, from now on.
    fn observe(&self, _observer: Rc<dyn Observer>) {}

    /// Rules of the metadata that were broken since the last call.
    fn broken(&self) -> Vec<Violation> {
        Vec::new()
    }

    /// The metadata of the nodes, where that is simulated.
    fn whole(&self) -> Option<Rc<Whole>> {
        None
    }
}

/// Looks on as snapshots reach the shards of nodes whose metadata is simulated.
pub trait Observer {
    /// The shards of `node` are about to see `snapshot`.
    fn comes(&self, node: usize, snapshot: &Snapshot);
    /// All of them see it.
    fn seen(&self, node: usize, snapshot: &Snapshot);
}
