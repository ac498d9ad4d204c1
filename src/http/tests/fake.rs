//! A shard that answers by script and remembers what it was asked.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use narad_shards::api::{
    ConsumeError, Delivery, MemberStatus, MetaCommand, MetaReply, NewRecord, PartitionReport, ProduceError, ReadAt,
    Settle, SettleStatus,
};
use narad_shards::io::Slice;
use narad_shards::meta::{Incarnation, TopicMeta};
use narad_shards::metrics::ShardMetrics;
use narad_shards::peer::Take;
use narad_shards::rt;

use crate::http::{Broker, Health, Readiness, TopicNotFound};
use crate::telemetry::{NodeMetrics, ShardReport};

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Stored {
    pub topic: String,
    pub key: Vec<u8>,
    pub payload: Vec<u8>,
    pub partition: Option<u32>,
}

#[derive(Default)]
pub(super) struct FakeBroker {
    pub topics: RefCell<BTreeMap<String, Arc<TopicMeta>>>,
    pub stored: RefCell<Vec<Stored>>,
    /// What the next produce answers instead of storing.
    pub produce_error: RefCell<Option<ProduceError>>,
    /// How long a produce takes.
    pub produce_takes: Cell<Duration>,
    /// Topics of produces that were refused for want of memory.
    pub refused_for_memory: RefCell<Vec<String>>,
    pub panics: Cell<bool>,
    /// Batches that consumes get, one each; without one they wait.
    pub ready: RefCell<VecDeque<Vec<Delivery>>>,
    pub consume_error: RefCell<Option<ConsumeError>>,
    pub consumes: RefCell<Vec<(Option<u32>, Take, Duration)>>,
    pub parked: Cell<u32>,
    pub read_at: RefCell<Option<Result<ReadAt, ConsumeError>>>,
    pub settled: RefCell<Vec<Settle>>,
    /// The next settle panics.
    pub settle_panics: Cell<bool>,
    /// Answers of settles in order; `Done` when it has run out.
    pub statuses: RefCell<VecDeque<SettleStatus>>,
    pub changes: RefCell<Vec<String>>,
    /// How long a change takes.
    pub change_takes: Cell<Duration>,
    pub change_replies: RefCell<VecDeque<MetaReply>>,
    pub reports: RefCell<Vec<PartitionReport>>,
    pub shutting_down: Cell<bool>,
    /// It has not been caught up with its cluster yet.
    pub behind: Cell<bool>,
    pub readiness: RefCell<Option<Readiness>>,
}

impl FakeBroker {
    pub fn add_topic(&self, name: &str, partitions: u32) -> Arc<TopicMeta> {
        let meta = Arc::new(TopicMeta {
            name: Arc::from(name),
            incarnation: Incarnation(0xabc),
            partitions,
            retention_ms: 604_800_000,
            visibility_timeout_ms: 30_000,
            max_in_flight_per_partition: 1024,
            max_acked_ahead_per_partition: 1024,
            created_at_ms: 1_700_000_000_999,
            owner: None,
        });
        self.topics.borrow_mut().insert(name.to_owned(), meta.clone());
        meta
    }

    fn check(&self, topic: &str, records: &[NewRecord<'_>]) -> Result<(), ProduceError> {
        assert!(!self.panics.get(), "the handler was told to panic");
        let partitions = self.topic(topic).ok_or(ProduceError::TopicNotFound)?.partitions;
        if let Some(error) = self.produce_error.borrow_mut().take() {
            return Err(error);
        }
        match records.iter().position(|record| record.partition.is_some_and(|p| p >= partitions)) {
            Some(index) => Err(ProduceError::PartitionOutOfRange { index }),
            None => Ok(()),
        }
    }
}

/// Counts a parked consume until it is answered or dropped.
struct Parked<'a>(&'a Cell<u32>);

impl Drop for Parked<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

pub(super) fn delivery(offset: u64, key: &[u8], payload: &[u8]) -> Delivery {
    Delivery {
        topic: Arc::from("t"),
        incarnation: Incarnation(0xabc),
        partition: 1,
        offset,
        timestamp_ms: 1_700_000_000_999,
        body: Slice::copy_from(&[key, payload].concat()),
        key_bytes: key.len() as u32,
        nonce: 1000 + offset,
    }
}

impl Broker for FakeBroker {
    fn refused_for_memory(&self, topic: &str) {
        self.refused_for_memory.borrow_mut().push(topic.to_owned());
    }

    async fn produce<'a>(&'a self, topic: &'a str, record: NewRecord<'a>) -> Result<(), ProduceError> {
        self.produce_batch(topic, &[record]).await
    }

    async fn produce_batch<'a>(&'a self, topic: &'a str, records: &'a [NewRecord<'a>]) -> Result<(), ProduceError> {
        self.check(topic, records)?;
        rt::sleep(self.produce_takes.get()).await;
        let stored = records.iter().map(|record| Stored {
            topic: topic.to_owned(),
            key: record.key.to_vec(),
            payload: record.payload.to_vec(),
            partition: record.partition,
        });
        self.stored.borrow_mut().extend(stored);
        Ok(())
    }

    async fn consume<'a>(
        &'a self,
        topic: &'a str,
        partition: Option<u32>,
        take: Take,
        wait: Duration,
    ) -> Result<Vec<Delivery>, ConsumeError> {
        assert!(!self.panics.get(), "the handler was told to panic");
        self.consumes.borrow_mut().push((partition, take, wait));
        self.topic(topic).ok_or(ConsumeError::TopicNotFound)?;
        if let Some(error) = self.consume_error.borrow_mut().take() {
            return Err(error);
        }
        let next = self.ready.borrow_mut().pop_front();
        if let Some(batch) = next {
            return Ok(batch);
        }
        self.parked.set(self.parked.get() + 1);
        let _parked = Parked(&self.parked);
        rt::sleep(wait).await;
        Ok(Vec::new())
    }

    async fn settle<'a>(&'a self, topic: &'a str, settles: Vec<Settle>) -> Result<Vec<SettleStatus>, TopicNotFound> {
        assert!(!self.settle_panics.take(), "the settle was told to panic");
        self.topic(topic).ok_or(TopicNotFound)?;
        let statuses = settles.iter().map(|_| self.statuses.borrow_mut().pop_front().unwrap_or(SettleStatus::Done));
        let statuses = statuses.collect();
        self.settled.borrow_mut().extend(settles);
        Ok(statuses)
    }

    async fn read_at<'a>(&'a self, topic: &'a str, _partition: u32, _offset: u64) -> Result<ReadAt, ConsumeError> {
        self.topic(topic).ok_or(ConsumeError::TopicNotFound)?;
        self.read_at.borrow_mut().take().unwrap_or(Ok(ReadAt::PastEnd))
    }

    fn topic(&self, name: &str) -> Option<Arc<TopicMeta>> {
        self.topics.borrow().get(name).cloned()
    }

    fn topics_after(&self, after: &str, limit: usize) -> Vec<Arc<TopicMeta>> {
        self.topics.borrow().values().filter(|meta| &*meta.name > after).take(limit).cloned().collect()
    }

    async fn describe<'a>(&'a self, _topic: &'a TopicMeta, only: Option<u32>) -> Vec<PartitionReport> {
        let reports = self.reports.borrow();
        reports.iter().filter(|report| only.is_none_or(|only| only == report.index)).cloned().collect()
    }

    async fn change(&self, command: MetaCommand) -> MetaReply {
        self.changes.borrow_mut().push(format!("{command:?}"));
        rt::sleep(self.change_takes.get()).await;
        let scripted = self.change_replies.borrow_mut().pop_front();
        match (scripted, command) {
            (Some(reply), _) => reply,
            (None, MetaCommand::CreateTopic(new)) => {
                let meta = TopicMeta {
                    name: Arc::from(&*new.name),
                    incarnation: Incarnation(0xabc),
                    partitions: new.partitions,
                    retention_ms: new.retention_ms,
                    visibility_timeout_ms: new.visibility_timeout_ms,
                    max_in_flight_per_partition: new.max_in_flight_per_partition,
                    max_acked_ahead_per_partition: new.max_acked_ahead_per_partition,
                    created_at_ms: 1_700_000_000_999,
                    owner: new.owner.map(Arc::from),
                };
                MetaReply::Created(Arc::new(meta))
            }
            (None, MetaCommand::DeleteTopic { .. }) => MetaReply::Deleted,
            (None, MetaCommand::AlterTopic { name, change, .. }) => {
                let mut topics = self.topics.borrow_mut();
                let Some(topic) = topics.get_mut(&name) else { return MetaReply::NotFound };
                let mut meta = TopicMeta::clone(topic);
                if change.partitions.is_some_and(|partitions| partitions <= meta.partitions) {
                    return MetaReply::NotMore { partitions: meta.partitions };
                }
                meta.partitions = change.partitions.unwrap_or(meta.partitions);
                meta.retention_ms = change.retention_ms.unwrap_or(meta.retention_ms);
                let (in_flight, ahead) = (change.max_in_flight_per_partition, change.max_acked_ahead_per_partition);
                meta.max_in_flight_per_partition = in_flight.unwrap_or(meta.max_in_flight_per_partition);
                meta.max_acked_ahead_per_partition = ahead.unwrap_or(meta.max_acked_ahead_per_partition);
                *topic = Arc::new(meta);
                MetaReply::Altered(topic.clone())
            }
            (None, MetaCommand::ConfirmGone { .. }) => MetaReply::NotGone,
            (None, MetaCommand::ListMembers { .. }) => MetaReply::Members(vec![MemberStatus::default()]),
            (None, MetaCommand::ForgetServer { .. }) => MetaReply::Forgotten { voter: true },
        }
    }

    fn serves(&self) -> bool {
        !self.behind.get()
    }

    fn health(&self) -> Health {
        if self.shutting_down.get() {
            Health::ShuttingDown
        } else {
            Health::Ok
        }
    }

    async fn readiness(&self) -> Readiness {
        self.readiness.borrow().clone().unwrap_or(Readiness::Ready(Vec::new()))
    }

    async fn metrics(&self) -> Vec<ShardMetrics> {
        vec![ShardMetrics::default()]
    }

    async fn vitals(&self) -> Vec<ShardReport> {
        vec![ShardReport { cpu: Some(3), pinned: true, ..ShardReport::default() }]
    }

    async fn node_metrics(&self) -> NodeMetrics {
        NodeMetrics::default()
    }
}
