//! The HTTP layer's view of a shard, and of the control thread on the metrics listener.

use std::cell::OnceCell;
use std::future::Future;
use std::ops::Bound;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use narad_shards::api::{
    ConsumeError, Delivery, MetaCommand, MetaReply, NewRecord, PartitionReport, ProduceError, ReadAt, Settle,
    SettleStatus,
};
use narad_shards::meta::{Address, ShardId, TopicMeta};
use narad_shards::metrics::ShardMetrics;
use narad_shards::peer::{Carrier, Reply, Request, Take};
use narad_shards::queue::Consumer;
use narad_shards::rt;
use narad_shards::shard::Shard;

use super::balancers::Balancers;
use super::certificates::Certificates;
use super::disk_state::DiskState;
use super::figures::{self, NodeFigures};
use super::trust::Trust;
use crate::http::{Broker, Health, Readiness, TopicNotFound};
use crate::peer::wall_clock;
use crate::telemetry::{NodeMetrics, PeerReport, ShardReport};

/// What every thread of the node may look at: flags and a count, off the path of a request (E24).
#[derive(Debug, Default)]
pub struct NodeState {
    pub shards: ShardId,
    /// What was decided for each shard at the start.
    pub placed: Vec<Placed>,
    pub figures: NodeFigures,
    pub certificates: Certificates,
    pub disk: DiskState,
    pub opened: AtomicU16,
    /// Shards that take connections.
    pub listening: AtomicU16,
    pub stopping: AtomicBool,
    /// Begins when this node was caught up with its cluster once since it started: before that it takes no request
    /// (E51), and none while it does not hold.
    pub trust: Trust,
    /// Why this node is not ready as a member of its cluster; nothing on a node without peers.
    pub cluster_gate: Mutex<Option<String>>,
    /// 0: none yet.
    pub cluster_id: AtomicU64,
    /// Who asks the API port whether the node is ready.
    pub balancers: Balancers,
}

/// Where a shard runs and listens.
#[derive(Clone, Copy, Debug, Default)]
pub struct Placed {
    pub cpu: Option<u32>,
    /// Of its own, beside the common one.
    pub port: Option<u16>,
}

impl NodeState {
    fn health(&self) -> Health {
        match self.stopping.load(Ordering::Relaxed) {
            true => Health::ShuttingDown,
            false => Health::Ok,
        }
    }

    /// A node without peers is caught up with itself.
    pub fn set_cluster_gate(&self, why: Option<String>) {
        *self.cluster_gate.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = why;
    }

    pub(super) fn readiness(&self) -> Readiness {
        if self.figures.metastore.stopped.load(Ordering::Relaxed) {
            return Readiness::NotReady("metastore: node is not ready: metadata can no longer be stored".to_owned());
        }
        if self.stopping.load(Ordering::Relaxed) {
            // The listener of metrics answers until the end: a balancer that asks there must not send more.
            return Readiness::NotReady("shutting down".to_owned());
        }
        if self.opened.load(Ordering::Relaxed) < self.shards {
            return Readiness::NotReady("not ready".to_owned());
        }
        let gate = self.cluster_gate.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(why) = &*gate {
            return Readiness::NotReady(why.clone());
        }
        let why = match (self.trust.has_begun(), self.trust.holds()) {
            (true, true) => {
                let mut degraded = self.certificates.degraded(wall_clock());
                degraded.extend(self.disk.degraded());
                return Readiness::Ready(degraded);
            }
            (true, false) => "it stood still, and asks the leader what has changed",
            (false, _) => "replica has not caught up with the leader since start",
        };
        Readiness::NotReady(format!("metastore: node is not ready: {why}"))
    }
}

/// How long a scrape waits for a shard: one that hangs must not take the figures of the others with it.
const METRICS_WAIT: Duration = Duration::from_secs(2);

/// Figures of all shards that answer in time.
async fn metrics_of(state: &NodeState, carrier: &dyn Carrier) -> Vec<ShardMetrics> {
    let ask = |shard| Box::pin(rt::timeout(METRICS_WAIT, carrier.call(Address::local(shard), Request::Metrics)));
    let answered = rt::all((0..state.shards).map(ask).collect()).await;
    let late = answered.iter().filter(|answer| answer.is_err()).count() as u64;
    state.figures.answers_late.fetch_add(late, Ordering::Relaxed);
    let figures: Vec<ShardMetrics> = answered
        .into_iter()
        .filter_map(|answer| match answer {
            Ok(Ok(Reply::Metrics(metrics))) => Some(*metrics),
            _ => None,
        })
        .collect();
    if figures.len() == usize::from(state.shards) {
        state.figures.all_answered_ms.store(rt::wall_clock_ms(), Ordering::Relaxed);
    }
    figures
}

/// How long a shard may take to say how it is.
const VITALS_WAIT: Duration = Duration::from_secs(1);

/// A look at all shards. One that does not answer in time is in the list all the same: it is the one to look at.
async fn vitals_of(state: &NodeState, carrier: &dyn Carrier) -> Vec<ShardReport> {
    let ask = |shard| Box::pin(rt::timeout(VITALS_WAIT, carrier.call(Address::local(shard), Request::Vitals)));
    let answered = rt::all((0..state.shards).map(ask).collect()).await;
    let report = |(shard, answer)| {
        let Placed { cpu, port } = state.placed.get(usize::from(shard)).copied().unwrap_or_default();
        match answer {
            Ok(Ok(Reply::Vitals(vitals))) => ShardReport::new(cpu, port, &vitals),
            _ => ShardReport { shard, cpu, pinned: cpu.is_some(), port, ..ShardReport::default() },
        }
    };
    (0..state.shards).zip(answered).map(report).collect()
}

/// One shard's broker.
pub struct ShardBroker {
    shard: Shard,
    consumer: Consumer,
    state: Arc<NodeState>,
}

impl ShardBroker {
    pub fn new(shard: Shard, state: Arc<NodeState>) -> ShardBroker {
        let consumer = Consumer::new(shard.queues().clone());
        ShardBroker { shard, consumer, state }
    }
}

impl Broker for ShardBroker {
    fn produce<'a>(
        &'a self,
        topic: &'a str,
        record: NewRecord<'a>,
    ) -> impl Future<Output = Result<(), ProduceError>> + 'a {
        self.shard.produce(topic, record)
    }

    fn produce_batch<'a>(
        &'a self,
        topic: &'a str,
        records: &'a [NewRecord<'a>],
    ) -> impl Future<Output = Result<(), ProduceError>> + 'a {
        self.shard.produce_batch(topic, records)
    }

    fn refused_for_memory(&self, topic: &str) {
        self.shard.note_refused_for_memory(topic);
    }

    async fn consume<'a>(
        &'a self,
        topic: &'a str,
        partition: Option<u32>,
        take: Take,
        wait: Duration,
    ) -> Result<Vec<Delivery>, ConsumeError> {
        self.consumer.consume(topic, partition, take, wait).await
    }

    async fn settle<'a>(&'a self, topic: &'a str, settles: Vec<Settle>) -> Result<Vec<SettleStatus>, TopicNotFound> {
        self.consumer.settle(topic, settles).await.ok_or(TopicNotFound)
    }

    async fn read_at<'a>(&'a self, topic: &'a str, partition: u32, offset: u64) -> Result<ReadAt, ConsumeError> {
        self.consumer.read_at(topic, partition, offset).await
    }

    fn topic(&self, name: &str) -> Option<Arc<TopicMeta>> {
        self.shard.snapshot().topic(name).cloned()
    }

    fn topics_after(&self, after: &str, limit: usize) -> Vec<Arc<TopicMeta>> {
        let snapshot = self.shard.snapshot();
        let behind = (Bound::Excluded(after), Bound::Unbounded);
        snapshot.topics.range::<str, _>(behind).take(limit).map(|(_, topic)| topic.clone()).collect()
    }

    async fn describe<'a>(&'a self, topic: &'a TopicMeta, only: Option<u32>) -> Vec<PartitionReport> {
        self.shard.describe(topic, only).await
    }

    async fn change(&self, command: MetaCommand) -> MetaReply {
        match self.shard.carrier().call(Address::CONTROL, Request::Meta(command)).await {
            Ok(Reply::Meta(reply)) => reply,
            Ok(_) | Err(_) => MetaReply::Unknown("the control thread did not answer".to_owned()),
        }
    }

    fn serves(&self) -> bool {
        self.state.trust.holds()
    }

    fn health(&self) -> Health {
        self.state.health()
    }

    async fn readiness(&self) -> Readiness {
        self.state.disk.look(&self.state).await;
        let readiness = self.state.readiness();
        self.state.balancers.note(matches!(readiness, Readiness::Ready(_)), rt::now());
        readiness
    }

    async fn metrics(&self) -> Vec<ShardMetrics> {
        metrics_of(&self.state, &**self.shard.carrier()).await
    }

    async fn vitals(&self) -> Vec<ShardReport> {
        vitals_of(&self.state, &**self.shard.carrier()).await
    }

    fn peers(&self) -> Vec<PeerReport> {
        self.state.figures.peer_reports.read()
    }

    async fn node_metrics(&self) -> NodeMetrics {
        figures::gather(&self.state).await
    }
}

/// What the metrics listener serves, and every listener of a node that waits to found its cluster: it has no shard, so
/// that load on the shards cannot fail a probe (lesson N51).
pub struct ProbeBroker {
    pub state: Arc<NodeState>,
    pub carrier: Rc<OnceCell<Rc<dyn Carrier>>>,
}

impl Broker for ProbeBroker {
    async fn produce<'a>(&'a self, _topic: &'a str, _record: NewRecord<'a>) -> Result<(), ProduceError> {
        Err(ProduceError::TopicNotFound)
    }

    async fn produce_batch<'a>(&'a self, _topic: &'a str, _records: &'a [NewRecord<'a>]) -> Result<(), ProduceError> {
        Err(ProduceError::TopicNotFound)
    }

    async fn consume<'a>(
        &'a self,
        _topic: &'a str,
        _partition: Option<u32>,
        _take: Take,
        _wait: Duration,
    ) -> Result<Vec<Delivery>, ConsumeError> {
        Err(ConsumeError::TopicNotFound)
    }

    async fn settle<'a>(&'a self, _topic: &'a str, _settles: Vec<Settle>) -> Result<Vec<SettleStatus>, TopicNotFound> {
        Err(TopicNotFound)
    }

    async fn read_at<'a>(&'a self, _topic: &'a str, _partition: u32, _offset: u64) -> Result<ReadAt, ConsumeError> {
        Err(ConsumeError::TopicNotFound)
    }

    fn topic(&self, _name: &str) -> Option<Arc<TopicMeta>> {
        None
    }

    fn topics_after(&self, _after: &str, _limit: usize) -> Vec<Arc<TopicMeta>> {
        Vec::new()
    }

    async fn describe<'a>(&'a self, _topic: &'a TopicMeta, _only: Option<u32>) -> Vec<PartitionReport> {
        Vec::new()
    }

    async fn change(&self, _command: MetaCommand) -> MetaReply {
        MetaReply::NotFound
    }

    fn serves(&self) -> bool {
        false
    }

    fn health(&self) -> Health {
        self.state.health()
    }

    async fn readiness(&self) -> Readiness {
        self.state.disk.look(&self.state).await;
        self.state.readiness()
    }

    async fn metrics(&self) -> Vec<ShardMetrics> {
        match self.carrier.get() {
            Some(carrier) => metrics_of(&self.state, &**carrier).await,
            None => Vec::new(),
        }
    }

    async fn vitals(&self) -> Vec<ShardReport> {
        Vec::new() // not on this listener
    }

    async fn node_metrics(&self) -> NodeMetrics {
        figures::gather(&self.state).await
    }
}

#[cfg(test)]
mod tests {
    use narad_shards::peer::{LocalBoxFuture, Lost};
    use narad_shards::rt::sim;

    use super::*;

    #[test]
    fn k34_e51_ready_means_all_shards_open_a_leader_in_view_and_caught_up_once() {
        sim::run(1, async { ready_means_all_that().await });
    }

    async fn ready_means_all_that() {
        let state = NodeState { shards: 2, ..NodeState::default() };
        let why = |state: &NodeState| match state.readiness() {
            Readiness::Ready(degraded) => format!("ready {degraded:?}"),
            Readiness::NotReady(why) => why,
        };
        assert_eq!(why(&state), "not ready");
        state.opened.store(2, Ordering::Relaxed);
        state.set_cluster_gate(Some("no raft leader known".to_owned()));
        assert_eq!(why(&state), "no raft leader known");
        state.set_cluster_gate(None);
        assert!(why(&state).ends_with("replica has not caught up with the leader since start"), "{}", why(&state));
        state.trust.begin(rt::now());
        assert_eq!(why(&state), "ready []");
        rt::sleep(Duration::from_secs(3)).await;
        assert!(why(&state).ends_with("it stood still, and asks the leader what has changed"), "{}", why(&state));
        state.trust.renew(|| std::future::ready(true)).await;
        assert_eq!(why(&state), "ready []");
        // The leader can be lost again; what was caught up with stays so.
        state.set_cluster_gate(Some("last raft leader contact 6s ago".to_owned()));
        assert_eq!(why(&state), "last raft leader contact 6s ago");
        state.set_cluster_gate(None);
        state.stopping.store(true, Ordering::Relaxed);
        assert_eq!(why(&state), "shutting down");
        state.figures.metastore.stopped.store(true, Ordering::Relaxed);
        assert!(why(&state).ends_with("metadata can no longer be stored"), "{}", why(&state));
    }

    /// Shard 1 hangs until it is let go.
    struct Hanging(Rc<std::cell::Cell<bool>>);

    impl Carrier for Hanging {
        fn call(&self, to: Address, _request: Request) -> LocalBoxFuture<'static, Result<Reply, Lost>> {
            let hangs = to == Address::local(1) && self.0.get();
            Box::pin(async move {
                if hangs {
                    std::future::pending::<()>().await;
                }
                Ok(Reply::Metrics(Box::default()))
            })
        }

        fn send(&self, _to: Address, _request: Request) {}
    }

    #[test]
    fn a_shard_that_hangs_does_not_take_the_figures_of_the_others_with_it() {
        sim::run(1, async {
            let state = NodeState { shards: 3, ..NodeState::default() };
            let hangs = Rc::new(std::cell::Cell::new(false));
            let carrier = Hanging(hangs.clone());
            let look = || {
                let figures = &state.figures;
                (figures.all_answered_ms.load(Ordering::Relaxed), figures.answers_late.load(Ordering::Relaxed))
            };
            assert_eq!(metrics_of(&state, &carrier).await.len(), 3);
            let (whole, late) = look();
            assert!(whole > 0 && late == 0, "{whole} {late}");
            hangs.set(true);
            let before = rt::now();
            assert_eq!(metrics_of(&state, &carrier).await.len(), 2);
            assert_eq!(rt::now() - before, METRICS_WAIT);
            assert_eq!(look(), (whole, 1), "an alert on the age of the last whole scrape fires");
            hangs.set(false);
            assert_eq!(metrics_of(&state, &carrier).await.len(), 3);
            assert!(look().0 > whole && look().1 == 1, "{:?}", look());
        });
    }
}
