//! Accept stage: pick the partition, append to this core's WAL, wait for the group's sync. Touches nothing that
//! another core touches.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::{Inner, Shard};
use crate::api::{NewRecord, ProduceError, DISK_RESERVE, DRAINING};
use crate::meta::{Destination, Incarnation};
use crate::metrics::REJECTIONS;
use crate::peer::{CommitBatch, CommitError, Committed, Record, Reply, Request};
use crate::rt;
use crate::wal::{AppendError, NewWalRecord};

impl Shard {
    /// Returns once the record is durable on this node: the caller may answer `202`. Once staged the outcome is the
    /// true one even if the caller goes away, so a record may be delivered that nobody was told of.
    pub async fn produce(&self, topic: &str, record: NewRecord<'_>) -> Result<(), ProduceError> {
        let topic = self.inner.topics.borrow().get(topic).cloned().ok_or(ProduceError::TopicNotFound)?;
        let partition =
            topic.pick(record.key, record.partition).ok_or(ProduceError::PartitionOutOfRange { index: 0 })?;
        self.admit().await.map_err(|error| self.inner.count_rejection(topic.incarnation, error))?;
        let record = NewWalRecord {
            topic: &topic.name,
            incarnation: topic.incarnation,
            key: record.key,
            partition,
            accepted_at_ms: rt::wall_clock_ms(),
            payload: record.payload,
        };
        let appended = self.inner.wal.append(std::slice::from_ref(&record)).await;
        appended.map(drop).map_err(|error| self.inner.count_rejection(topic.incarnation, produce_error(error)))
    }

    /// All records or none, in order, with consecutive sequence numbers, one accept time and one `202`.
    pub async fn produce_batch(&self, topic: &str, records: &[NewRecord<'_>]) -> Result<(), ProduceError> {
        let topic = self.inner.topics.borrow().get(topic).cloned().ok_or(ProduceError::TopicNotFound)?;
        // Pins are checked before any keyless record moves the rotation: a refused batch changes nothing.
        for (index, record) in records.iter().enumerate() {
            if record.partition.is_some_and(|pinned| pinned >= topic.partitions) {
                return Err(ProduceError::PartitionOutOfRange { index });
            }
        }
        self.admit().await.map_err(|error| self.inner.count_rejection(topic.incarnation, error))?;
        let accepted_at_ms = rt::wall_clock_ms();
        let mut staged = Vec::with_capacity(records.len());
        for (index, record) in records.iter().enumerate() {
            let partition =
                topic.pick(record.key, record.partition).ok_or(ProduceError::PartitionOutOfRange { index })?;
            staged.push(NewWalRecord {
                topic: &topic.name,
                incarnation: topic.incarnation,
                key: record.key,
                partition,
                accepted_at_ms,
                payload: record.payload,
            });
        }
        let appended = self.inner.wal.append(&staged).await;
        appended.map(drop).map_err(|error| self.inner.count_rejection(topic.incarnation, produce_error(error)))
    }

    async fn admit(&self) -> Result<(), ProduceError> {
        // A latched WAL answers 500 whatever the disk has free: the operator must see the failure, not its cause.
        if self.inner.wal.failed().is_some() && !self.inner.draining.get() {
            return Ok(());
        }
        self.inner.admit().await
    }
}

/// Patience of a synchronous produce.
const DIRECT_BUDGET: Duration = Duration::from_secs(5);

impl Inner {
    /// Whether this node takes produce at all, however it comes (E22).
    async fn admit(&self) -> Result<(), ProduceError> {
        let room = self.reserve.has_room().await;
        match room {
            _ if self.draining.get() => Err(ProduceError::Draining),
            true => Ok(()),
            false => Err(ProduceError::DiskReserve),
        }
    }

    /// Synchronous produce (E56): the partition's owner has it when this returns; this node never had. A partition whose
    /// owner is dead is passed over for the next one, unless it was asked for by number.
    pub(super) async fn produce_direct(
        &self,
        name: Arc<str>,
        pinned: Option<u32>,
        record: Record,
    ) -> Result<(u32, Committed), CommitError> {
        let topic = self.topics.borrow().get(&name).cloned().ok_or(CommitError::UnknownTopic)?;
        self.admit().await.map_err(|error| {
            let text = if error == ProduceError::Draining { DRAINING } else { DISK_RESERVE };
            self.count_rejection(topic.incarnation, error);
            CommitError::Unavailable(text.to_owned())
        })?;
        let first = topic.pick(record.key().unwrap_or_default(), pinned);
        let first = first.ok_or_else(|| CommitError::Failed("partition out of range".to_owned()))?;
        let walk = if pinned.is_some() { 1 } else { topic.partitions };
        let snapshot = self.snapshot.borrow().clone();
        let lives = |partition: &u32| {
            let owner = snapshot.address(Destination { incarnation: topic.incarnation, partition: *partition });
            owner.filter(|owner| self.peers.borrow().is_alive(owner.node)).map(|owner| (*partition, owner))
        };
        let found = (0..walk).map(|step| (first + step) % topic.partitions).find_map(|partition| lives(&partition));
        let (partition, owner) = found
            .ok_or_else(|| CommitError::Unavailable("no owner of a partition of the topic is alive".to_owned()))?;
        let destination = Destination { incarnation: topic.incarnation, partition };
        let batch = CommitBatch {
            destination,
            topic: name,
            accepted_under: None,
            records: vec![record],
            budget: DIRECT_BUDGET,
        };
        match self.carrier.call(owner, Request::Commit(batch)).await {
            Ok(Reply::Commit(result)) => result.map(|committed| (partition, committed)),
            Ok(_) => Err(CommitError::Unreachable("the owner answered something else than a commit".to_owned())),
            Err(lost) => Err(CommitError::Unreachable(lost.0)),
        }
    }
}

/// Refused produces of each topic, by [`REJECTIONS`].
pub type Rejections = BTreeMap<Incarnation, [u64; REJECTIONS.len()]>;

impl Shard {
    /// A produce whose body found no room in memory. One to a topic that nobody knows is not counted.
    pub fn note_refused_for_memory(&self, topic: &str) {
        let known = self.snapshot().topic(topic).map(|meta| meta.incarnation);
        if let Some(incarnation) = known {
            let _counted = self.inner.count_rejection(incarnation, ProduceError::MemoryExhausted);
        }
    }
}

impl Inner {
    /// Off the path of a produce that succeeds.
    fn count_rejection(&self, topic: Incarnation, error: ProduceError) -> ProduceError {
        let reason = match &error {
            ProduceError::Draining => "draining",
            ProduceError::DiskReserve => "disk_reserve",
            ProduceError::MemoryExhausted => "memory",
            ProduceError::Unavailable(_) => "no_segment",
            ProduceError::LogFailed(_) => "wal_failed",
            ProduceError::TopicNotFound | ProduceError::PartitionOutOfRange { .. } => return error,
        };
        if let Some(index) = REJECTIONS.iter().position(|known| *known == reason) {
            self.rejections.borrow_mut().entry(topic).or_default()[index] += 1;
        }
        error
    }
}

fn produce_error(error: AppendError) -> ProduceError {
    match error {
        AppendError::LogFailed(cause) => ProduceError::LogFailed(cause),
        // A 503 promises that nothing will be delivered (D13).
        error @ AppendError::StoredInPart(_) => ProduceError::LogFailed(error.to_string()),
        AppendError::Unavailable(cause) => ProduceError::Unavailable(cause),
        AppendError::MemoryExhausted => ProduceError::MemoryExhausted,
        // Sizes are checked before a record gets here; refusing without storing is right all the same.
        AppendError::TooLarge => ProduceError::Unavailable("a record is larger than a WAL segment".to_owned()),
    }
}
