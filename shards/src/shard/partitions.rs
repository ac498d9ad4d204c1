//! The partitions that this shard serves: opened at first use, closed when their topic has gone.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use super::inspect::LogInspection;
use super::open_logs::Turns;
use super::{Inner, KeyedLocks, QueueSide};
use crate::api::ConsumeError;
use crate::io::is_shortage;
use crate::log::{
    Combiner, CommitGate, DirectoryError, LogMetrics, LogShared, Marker, OpenError, PartitionLog, Resolved, Standing,
    TopicKind,
};
use crate::meta::{Address, Destination, Incarnation, ShardId, Snapshot};
use crate::peer::{Carrier, CommitError, LocalBoxFuture, NoLog};
use crate::queue::{busy_text, Opened, PartitionMetrics, QueueEnvironment, AHEAD_FILE, AHEAD_FILE_BYTES};
use crate::rt::{self, Instant};

/// At a start: one log's recovery is a handful of small calls, each of which waits for the drive or a thread.
const OPENED_AT_ONCE: usize = 16;

impl From<NoLog> for ConsumeError {
    fn from(error: NoLog) -> ConsumeError {
        match error {
            NoLog::Busy(text) => ConsumeError::Busy(text),
            NoLog::Failed(cause) => ConsumeError::ReadFailed(cause),
        }
    }
}

impl From<NoLog> for CommitError {
    fn from(error: NoLog) -> CommitError {
        match error {
            NoLog::Busy(text) => CommitError::Unavailable(text),
            NoLog::Failed(cause) => CommitError::Failed(cause),
        }
    }
}

impl From<OpenError> for NoLog {
    fn from(error: OpenError) -> NoLog {
        match error {
            OpenError::Short(cause) => NoLog::Busy(busy_text(&cause)),
            OpenError::Io(cause) | OpenError::Damaged(cause) => NoLog::Failed(cause),
        }
    }
}

impl From<DirectoryError> for NoLog {
    fn from(error: DirectoryError) -> NoLog {
        match error {
            DirectoryError::Short(cause) => NoLog::Busy(busy_text(&cause)),
            other => NoLog::Failed(other.to_string()),
        }
    }
}

/// One partition placed on this shard.
pub struct Partition {
    destination: Destination,
    topic: Arc<str>,
    shard: Weak<Inner>,
    /// Open, or as it was when it was closed.
    log: RefCell<Option<PartitionLog>>,
    /// What its logs counted that were closed before.
    past: RefCell<LogMetrics>,
    /// After a pass of retention that panicked or hung, the next one waits until then.
    pub(super) rests_until: Cell<Instant>,
    /// It could not be opened when that was tried last.
    pub(super) unusable: Cell<bool>,
    /// After a close that hung.
    pub(super) closes_not_before: Cell<Instant>,
    combiner: OnceCell<Combiner>,
    produced: Cell<(u64, u64)>,
    /// Offset of the oldest unsettled record and its time, as last read for the figures.
    unsettled: Cell<Option<(u64, u64)>>,
}

impl Partition {
    pub fn combiner(&self) -> &Combiner {
        self.combiner.get().expect("set before the partition is handed out")
    }

    pub fn count_produced(&self, records: u64, bytes: u64) {
        let (all_records, all_bytes) = self.produced.get();
        self.produced.set((all_records + records, all_bytes + bytes));
    }

    pub(super) fn destination(&self) -> Destination {
        self.destination
    }

    /// The log, for its figures: also when it is closed (S52).
    pub(super) fn known_log(&self) -> Option<PartitionLog> {
        self.log.borrow().clone()
    }

    pub(super) fn usable_log(&self) -> Option<PartitionLog> {
        self.log.borrow().as_ref().filter(|log| !log.is_closed()).cloned()
    }

    /// Notes whether the log can be had, for the figures. A shortage says nothing about that.
    fn note(&self, had: Result<PartitionLog, NoLog>) -> Result<PartitionLog, NoLog> {
        match &had {
            Ok(_) => self.unusable.set(false),
            Err(NoLog::Failed(_)) => self.unusable.set(true),
            Err(NoLog::Busy(_)) => {}
        }
        had
    }
}

pub struct Partitions {
    shared: Rc<LogShared>,
    slots: RefCell<BTreeMap<Destination, Rc<Partition>>>,
    pub(super) opening: KeyedLocks<Destination>,
    pub(super) turns: Turns,
    /// Logs of topics that have gone, until nothing of them is under way.
    leaving: RefCell<Vec<(Incarnation, PartitionLog)>>,
}

impl Partitions {
    pub fn new(shared: Rc<LogShared>, open_logs_max: usize) -> Partitions {
        let opening = KeyedLocks { locks: RefCell::default() };
        Partitions {
            shared,
            slots: RefCell::default(),
            opening,
            turns: Turns::new(open_logs_max),
            leaving: RefCell::default(),
        }
    }

    pub fn known_log(&self, destination: Destination) -> Option<PartitionLog> {
        self.slots.borrow().get(&destination)?.known_log()
    }

    /// It could not be opened when that was tried last.
    pub fn is_unusable(&self, destination: Destination) -> bool {
        self.slots.borrow().get(&destination).is_some_and(|partition| partition.unusable.get())
    }

    pub(super) fn all(&self) -> Vec<Rc<Partition>> {
        self.slots.borrow().values().cloned().collect()
    }

    pub fn open_logs(&self) -> Vec<PartitionLog> {
        self.slots.borrow().values().filter_map(|partition| partition.usable_log()).collect()
    }

    /// Lets go of every partition whose topic the snapshot does not have: its log refuses everything from here on. The
    /// others follow their topic's retention (S77).
    pub fn follow(&self, snapshot: &Snapshot) {
        self.slots.borrow_mut().retain(|destination, partition| {
            let topic = snapshot.topic_of(destination.incarnation);
            if let Some(log) = partition.log.borrow().as_ref() {
                match topic {
                    Some(topic) => log.set_retention_ms(topic.retention_ms),
                    None => {
                        log.retire();
                        self.leaving.borrow_mut().push((destination.incarnation, log.clone()));
                    }
                }
            }
            if topic.is_none() {
                self.opening.forget(destination);
            }
            topic.is_some()
        });
    }

    /// Resolves when nothing of an incarnation that has gone names a file any more.
    pub async fn left(&self, incarnation: Incarnation) {
        loop {
            let next = self.leaving.borrow().iter().find(|(gone, _)| *gone == incarnation).map(|(_, log)| log.clone());
            let Some(log) = next else { return };
            log.at_rest().await;
            self.leaving.borrow_mut().retain(|(_, other)| !other.is(&log));
        }
    }

    pub fn shared(&self) -> &LogShared {
        &self.shared
    }

    pub fn inspect(&self) -> Vec<LogInspection> {
        let open = |(destination, partition): (&Destination, &Rc<Partition>)| {
            let log = partition.usable_log()?;
            Some(LogInspection {
                destination: *destination,
                high_watermark: log.high_watermark(),
                next_offset: log.next_offset(),
                poisoned: log.is_poisoned(),
                active: log.active_segment(),
            })
        };
        self.slots.borrow().iter().filter_map(open).collect()
    }

    pub fn add_metrics(&self, all: &mut BTreeMap<Destination, PartitionMetrics>) {
        for (destination, partition) in self.slots.borrow().iter() {
            let metrics = all.entry(*destination).or_default();
            metrics.topic = partition.topic.to_string();
            (metrics.messages_produced, metrics.bytes_produced) = partition.produced.get();
            metrics.log = partition.past.borrow().clone();
            if let Some(log) = partition.known_log() {
                metrics.high_watermark = log.high_watermark();
                metrics.oldest_offset = log.oldest();
                metrics.size_bytes = log.size_bytes();
                metrics.segments = log.segments();
                metrics.log.add(&log.metrics());
            }
            // For whoever waits for its records it is the same: only the error log says why.
            metrics.log.poisoned |= partition.unusable.get();
        }
    }

    /// The age of what nobody consumes: a partition without a consumer since the start has no consumer state that knows
    /// it, and is the one an alert is for (C100). Reads a record once; of a closed log what was known stays.
    pub async fn add_unsettled(&self, all: &mut BTreeMap<Destination, PartitionMetrics>) {
        for partition in self.all() {
            let Some(metrics) = all.get_mut(&partition.destination) else { continue };
            let oldest = metrics.frontier.max(metrics.oldest_offset);
            if metrics.oldest_unsettled_ms != 0 || oldest >= metrics.high_watermark {
                continue;
            }
            if partition.unsettled.get().is_none_or(|(offset, _)| offset != oldest) {
                let Some(log) = partition.usable_log() else { continue };
                // What cannot be read now is tried again the next time.
                let read = log.read(oldest, 1, 1).await.unwrap_or_default();
                partition.unsettled.set(read.first().map(|record| (oldest, record.timestamp_ms)));
            }
            metrics.oldest_unsettled_ms = partition.unsettled.get().map_or(0, |(_, since_ms)| since_ms);
        }
    }
}

impl Inner {
    /// The partition, if the snapshot places it on this shard. Opens nothing.
    pub(super) fn partition(self: &Rc<Self>, destination: Destination) -> Option<Rc<Partition>> {
        if let Some(partition) = self.partitions.slots.borrow().get(&destination) {
            return Some(partition.clone());
        }
        let snapshot = self.snapshot.borrow();
        let topic = snapshot.topic_of(destination.incarnation)?.name.clone();
        if snapshot.address(destination)? != Address::local(self.options.id) {
            return None;
        }
        let partition = Rc::new(Partition {
            destination,
            topic,
            shard: self.me.clone(),
            log: RefCell::default(),
            past: RefCell::default(),
            rests_until: Cell::default(),
            unusable: Cell::default(),
            closes_not_before: Cell::default(),
            combiner: OnceCell::new(),
            produced: Cell::default(),
            unsettled: Cell::default(),
        });
        let _ = partition.combiner.set(Combiner::new(Rc::new(Gate(Rc::downgrade(&partition)))));
        self.partitions.slots.borrow_mut().insert(destination, partition.clone());
        Some(partition)
    }

    /// The partition's open log. Reads what is there and creates nothing (S3); `for_commit` makes sure that the
    /// topic's directory is there and is the live incarnation's.
    pub(super) async fn log_of(
        self: &Rc<Self>,
        partition: &Rc<Partition>,
        for_commit: bool,
    ) -> Result<PartitionLog, NoLog> {
        if for_commit {
            let ensured = self.ensure_directory(&partition.topic, partition.destination.incarnation).await;
            match (ensured, partition.usable_log()) {
                (Ok(()), _) => {}
                // What is open is still read from.
                (Err(error), Some(_)) => return Err(error),
                (Err(error), None) => return partition.note(Err(error)),
            }
        }
        if let Some(log) = partition.usable_log() {
            return Ok(log);
        }
        let _turn = self.turn_to_open().await?;
        let _opening = self.partitions.opening.of(&partition.destination).enter().await;
        if let Some(log) = partition.usable_log() {
            return Ok(log);
        }
        let opened = match self.claim_directory(partition).await {
            Ok(()) => self.open_log(partition).await,
            Err(error) => Err(error),
        };
        partition.note(opened)
    }

    /// Makes sure that what lies under the topic's name, if anything does, is the live incarnation's.
    async fn claim_directory(self: &Rc<Self>, partition: &Partition) -> Result<(), NoLog> {
        let incarnation = partition.destination.incarnation;
        match self.directories.topics().marker(&partition.topic, incarnation).await? {
            Marker::Matches | Marker::Absent => Ok(()),
            // Somebody else's directory under our name is set aside before anything of it is read (S6).
            Marker::Different(_) => self.ensure_directory(&partition.topic, incarnation).await,
        }
    }

    /// Opens the log, which is not open, of a partition whose directory is known to be the live incarnation's.
    async fn open_log(self: &Rc<Self>, partition: &Rc<Partition>) -> Result<PartitionLog, NoLog> {
        let incarnation = partition.destination.incarnation;
        let dir = self.partition_dir(partition).map_err(NoLog::Failed)?;
        let log =
            PartitionLog::open(&self.options.disk, &dir, self.log_options(partition), &self.partitions.shared).await?;
        // The topic may have gone while its files were being read.
        if self.snapshot.borrow().topic_of(incarnation).is_none() {
            log.retire();
            return Err(NoLog::Failed(format!("topic {} was deleted", partition.topic)));
        }
        let (shard, destination) = (self.me.clone(), partition.destination);
        // Before the first append: later nothing would tell that records below a too high position are new (G20).
        self.queues().log_opened(destination, &dir, log.high_watermark()).await.map_err(|error| {
            let text = format!("the consumer position in {} cannot be read: {error}", dir.display());
            if is_shortage(&error) {
                NoLog::Busy(busy_text(&text))
            } else {
                NoLog::Failed(text)
            }
        })?;
        log.set_on_visible(Rc::new(move || {
            if let Some(inner) = shard.upgrade() {
                inner.queues().on_visible(destination);
            }
        }));
        if let Some(closed) = partition.log.borrow_mut().replace(log.clone()) {
            partition.past.borrow_mut().add(&closed.metrics());
        }
        self.queues().partition_opened(destination, Rc::new(log.clone()));
        Ok(log)
    }

    fn log_options(&self, partition: &Partition) -> crate::log::LogOptions {
        let mut options = self.options.log.clone();
        options.companion = Some((AHEAD_FILE, AHEAD_FILE_BYTES));
        if let Some(topic) = self.snapshot.borrow().topic_of(partition.destination.incarnation) {
            options.retention_ms = topic.retention_ms;
        }
        options
    }

    fn partition_dir(&self, partition: &Partition) -> Result<PathBuf, String> {
        let directories = self.directories.topics();
        directories.partition_dir(&partition.topic, partition.destination.partition).map_err(|error| error.to_string())
    }

    /// Opens every partition of this shard that has a directory, before the node is ready (S54, G19). One that fails
    /// is skipped with a warning: the others are served. A member of a cluster learns what it owns only when it has
    /// caught up (K22): then the same is done beside what is served already.
    pub(super) async fn open_present_partitions(self: &Rc<Self>, at_start: bool) {
        let snapshot = self.snapshot.borrow().clone();
        let entries = match self.directories.topics().inventory().await {
            Ok(entries) => entries,
            Err(error) => {
                tracing::warn!(%error, "the topic directories could not be listed; partitions open at first use");
                return;
            }
        };
        self.notice_lost_topics(&snapshot, &entries).await;
        let mut found = Vec::new();
        for entry in entries {
            let TopicKind::Marked(marked) = entry.kind else { continue };
            // Under another name it was moved away, which is no reason to serve its partitions as empty ones.
            let Some(meta) = snapshot.topic_of(marked).filter(|meta| *meta.name == *entry.topic) else { continue };
            let destinations = entry
                .partitions
                .iter()
                .map(|partition| Destination { incarnation: meta.incarnation, partition: *partition });
            found.extend(destinations.filter_map(|destination| self.partition(destination)));
        }
        for some in found.chunks(OPENED_AT_ONCE) {
            let open = |partition| Box::pin(self.open_present(partition, at_start));
            rt::all(some.iter().map(open).collect()).await;
            self.close_surplus().await;
        }
    }

    /// Opens a partition whose marker was just read with those of all others: at a start nobody changes it meanwhile.
    async fn open_present(self: &Rc<Self>, partition: &Rc<Partition>, at_start: bool) {
        let opened = match at_start {
            false => self.log_of(partition, false).await,
            true => {
                let _opening = self.partitions.opening.of(&partition.destination).enter().await;
                if partition.usable_log().is_some() {
                    return; // somebody has asked for it already
                }
                partition.note(self.open_log(partition).await)
            }
        };
        if let Err(error) = opened {
            tracing::error!(topic = %partition.topic, partition = partition.destination.partition, %error,
                "a partition could not be opened and is not served; the others are");
        }
    }
}

/// What the combiner asks of the shard (seed, "Commit combining").
struct Gate(Weak<Partition>);

impl Gate {
    fn partition_and_shard(&self) -> Option<(Rc<Partition>, Rc<Inner>)> {
        let partition = self.0.upgrade()?;
        let shard = partition.shard.upgrade()?;
        Some((partition, shard))
    }
}

impl CommitGate for Gate {
    fn standing(&self) -> Standing {
        let Some((partition, shard)) = self.partition_and_shard() else { return Standing::UnknownTopic };
        let (destination, snapshot) = (partition.destination, shard.snapshot.borrow());
        if snapshot.topic_of(destination.incarnation).is_none() {
            return Standing::UnknownTopic;
        }
        if snapshot.address(destination) != Some(Address::local(shard.options.id)) {
            return Standing::NotOwner;
        }
        // A log belongs to one incarnation for good: there is no version to outgrow.
        Standing::Live { incarnation: destination.incarnation, version: 0 }
    }

    fn resolve(&self) -> LocalBoxFuture<'static, Result<Resolved, CommitError>> {
        let found = self.partition_and_shard();
        Box::pin(async move {
            let (partition, shard) = found.ok_or(CommitError::UnknownTopic)?;
            let log = shard.log_of(&partition, true).await?;
            Ok(Resolved { log, incarnation: partition.destination.incarnation, version: 0 })
        })
    }
}

impl QueueEnvironment for QueueSide {
    fn shard(&self) -> ShardId {
        self.0.upgrade().map_or(0, |inner| inner.options.id)
    }

    fn carrier(&self) -> Rc<dyn Carrier> {
        self.0.upgrade().expect("queues live no longer than their shard").carrier.clone()
    }

    fn known_end(&self, destination: Destination) -> Option<u64> {
        self.0.upgrade()?.partitions.known_log(destination).map(|log| log.high_watermark())
    }

    fn open(&self, destination: Destination) -> LocalBoxFuture<'static, Result<Opened, ConsumeError>> {
        let inner = self.0.upgrade();
        Box::pin(async move {
            let inner = inner.ok_or(ConsumeError::NotOwner)?;
            if inner.snapshot.borrow().topic_of(destination.incarnation).is_none() {
                return Err(ConsumeError::TopicNotFound);
            }
            let partition = inner.partition(destination).ok_or(ConsumeError::NotOwner)?;
            let log = inner.log_of(&partition, false).await?;
            let directory = inner.partition_dir(&partition).map_err(ConsumeError::ReadFailed)?;
            Ok(Opened { records: Rc::new(log), directory })
        })
    }
}
