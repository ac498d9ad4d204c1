//! One topic on one shard: the partitions that the shard serves, and the token its home has left here.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use super::committer::{Stored, Tracked};
use super::held::Held;
use super::inflight::Limits;
use super::partition::{busy_text, ClaimError, PartitionQueue};
use super::shard_queues::{Opened, ShardQueues};
use crate::api::{ConsumeError, ReadAt};
use crate::io::is_shortage;
use crate::log::RecordsHandle;
use crate::meta::{Destination, Incarnation, ShardId, Snapshot, TopicMeta};
use crate::peer::Take;
use crate::rt::sync::Notify;
use crate::rt::{self, Instant};

/// Scans of a claim before it leaves the rest to the home: announcements keep coming in between.
const SCANS_MAX: usize = 3;
/// Times that a closed log is opened again for one claim.
const REOPENS_MAX: usize = 3;

/// What this shard knows and serves of one topic incarnation.
pub(super) struct TopicQueue {
    pub incarnation: Incarnation,
    /// A copy of its own, so that handing out a record touches no reference count that other cores touch.
    pub name: Arc<str>,
    queues: Weak<ShardQueues>,
    limits: Cell<Limits>,
    /// Partitions that this shard serves, ascending.
    local: RefCell<Rc<[u32]>>,
    /// Other shards of this node that serve partitions of the topic, ascending.
    others: RefCell<Rc<[ShardId]>>,
    open: RefCell<BTreeMap<u32, Rc<PartitionQueue>>>,
    opening: RefCell<BTreeMap<u32, OpeningState>>,
    /// The home wants one `Available` when records may have come (C43, C46).
    armed: Cell<bool>,
    /// Counts announcements: a scan that found nothing is current only if none came meanwhile.
    announcements: Cell<u64>,
    /// Where the next scan starts, so that no partition starves (G14).
    start: Cell<usize>,
    gone: Cell<bool>,
}

#[derive(Default)]
struct OpeningState {
    done: Notify,
    /// The shard has opened the log meanwhile: newer than the handle that the opening began with.
    records: Option<RecordsHandle>,
}

/// Marks a partition as being opened or closed; whoever else needs it waits until this is dropped.
pub(super) struct Opening<'a> {
    topic: &'a TopicQueue,
    partition: u32,
}

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        let opening = self.topic.opening.borrow_mut().remove(&self.partition);
        if let Some(opening) = opening {
            opening.done.notify_all();
        }
    }
}

fn limits_of(meta: &TopicMeta) -> Limits {
    Limits {
        visibility_timeout: Duration::from_millis(meta.visibility_timeout_ms),
        in_flight_max: meta.max_in_flight_per_partition,
        acked_ahead_max: meta.max_acked_ahead_per_partition,
    }
}

impl TopicQueue {
    pub fn new(queues: Weak<ShardQueues>, meta: &TopicMeta, snapshot: &Snapshot, shard: ShardId) -> Rc<TopicQueue> {
        let topic = Rc::new(TopicQueue {
            incarnation: meta.incarnation,
            name: Arc::from(&*meta.name),
            queues,
            limits: Cell::new(limits_of(meta)),
            local: RefCell::new(Rc::from([])),
            others: RefCell::new(Rc::from([])),
            open: RefCell::default(),
            opening: RefCell::default(),
            armed: Cell::new(false),
            announcements: Cell::new(0),
            start: Cell::new(0),
            gone: Cell::new(false),
        });
        topic.place(snapshot, shard);
        topic
    }

    /// Follows the topic's newer metadata and placement (C13, C34). Returns partitions that are served elsewhere now.
    pub fn follow(&self, meta: &TopicMeta, snapshot: &Snapshot, shard: ShardId) -> Vec<Rc<PartitionQueue>> {
        self.place(snapshot, shard);
        let limits = limits_of(meta);
        self.limits.set(limits);
        let local = self.local.borrow().clone();
        let mut open = self.open.borrow_mut();
        let lost: Vec<u32> = open.keys().filter(|p| local.binary_search(p).is_err()).copied().collect();
        let lost = lost.into_iter().filter_map(|p| open.remove(&p)).collect();
        let kept: Vec<Rc<PartitionQueue>> = open.values().cloned().collect();
        drop(open);
        kept.iter().for_each(|partition| partition.set_limits(limits));
        lost
    }

    fn place(&self, snapshot: &Snapshot, shard: ShardId) {
        *self.local.borrow_mut() = snapshot.partitions_on(self.incarnation, shard).collect();
        *self.others.borrow_mut() = serving_shards(snapshot, self.incarnation).filter(|s| *s != shard).collect();
    }

    /// The other shards that serve the topic, starting with another one each time (G14).
    pub fn others_in_turn(&self) -> impl Iterator<Item = ShardId> {
        let others = self.others.borrow().clone();
        let (count, start) = (others.len(), self.start.get());
        (0..count).map(move |index| others[(start + index) % count])
    }

    /// The shard's queues; `None` once the shard has been dropped, when nothing matters any more.
    pub fn queues(&self) -> Option<Rc<ShardQueues>> {
        self.queues.upgrade()
    }

    pub fn open_partition(&self, partition: u32) -> Option<Rc<PartitionQueue>> {
        self.open.borrow().get(&partition).cloned()
    }

    pub fn open_partitions(&self) -> Vec<Rc<PartitionQueue>> {
        self.open.borrow().values().cloned().collect()
    }

    pub fn serves(&self, partition: u32) -> bool {
        self.local.borrow().binary_search(&partition).is_ok()
    }

    /// The shard has opened the log of a partition: the handle to use from now on.
    pub fn log_opened(&self, partition: u32, records: RecordsHandle) {
        if let Some(open) = self.open_partition(partition) {
            open.replace_records(records);
        } else if let Some(opening) = self.opening.borrow_mut().get_mut(&partition) {
            opening.records = Some(records);
        }
    }

    /// The partition, opened and its position loaded on first touch (C3).
    pub async fn partition(self: &Rc<Self>, partition: u32) -> Result<Rc<PartitionQueue>, ConsumeError> {
        loop {
            if self.gone.get() {
                return Err(ConsumeError::TopicNotFound);
            }
            if !self.serves(partition) {
                return Err(ConsumeError::NotOwner);
            }
            if let Some(open) = self.open_partition(partition) {
                return Ok(open);
            }
            let done = self.opening.borrow().get(&partition).map(|opening| opening.done.notified());
            match done {
                Some(done) => done.await,
                None => return self.open(partition).await,
            }
        }
    }

    async fn open(self: &Rc<Self>, partition: u32) -> Result<Rc<PartitionQueue>, ConsumeError> {
        self.opening.borrow_mut().insert(partition, OpeningState::default());
        let _opening = Opening { topic: self, partition };
        let queues = self.queues().ok_or(ConsumeError::Unreachable)?;
        let destination = Destination { incarnation: self.incarnation, partition };
        let opened = queues.environment.open(destination).await?;
        let stored = self.load_position(&queues, &opened).await.map_err(|error| {
            let directory = opened.directory.display();
            tracing::error!(%directory, %error, "consumer position cannot be read: partition is not served");
            let text = format!("consumer position in {directory}: {error}");
            if is_shortage(&error) {
                ConsumeError::Busy(busy_text(&text))
            } else {
                ConsumeError::ReadFailed(text)
            }
        })?;
        if self.gone.get() || !self.serves(partition) {
            // Dropped while it was being opened: no state may come to life (C80).
            return Err(if self.gone.get() { ConsumeError::TopicNotFound } else { ConsumeError::NotOwner });
        }
        let position = stored.position.unwrap_or_default();
        let newer = self.opening.borrow_mut().get_mut(&partition).and_then(|opening| opening.records.take());
        let records = newer.unwrap_or(opened.records);
        let queue = PartitionQueue::new(destination, self.clone(), records, self.limits.get(), &position);
        let source: Weak<PartitionQueue> = Rc::downgrade(&queue);
        queue.set_tracked(queues.committer.track(destination, opened.directory, source, stored.level));
        queues.loaded(&queue);
        self.open.borrow_mut().insert(partition, queue.clone());
        Ok(queue)
    }

    async fn load_position(&self, queues: &ShardQueues, opened: &Opened) -> std::io::Result<Stored> {
        let stored = queues.committer.load(&opened.directory, self.incarnation).await?;
        let high_watermark = opened.records.high_watermark();
        if !stored.position.as_ref().is_some_and(|position| position.reaches_beyond(high_watermark)) {
            return Ok(stored);
        }
        queues.committer.clamp(&opened.directory, self.incarnation, high_watermark).await?;
        queues.committer.load(&opened.directory, self.incarnation).await
    }

    /// Claims from one partition, opening its log again if that was closed meanwhile (C68).
    pub async fn claim_from(
        self: &Rc<Self>,
        partition: &Rc<PartitionQueue>,
        take: Take,
        held: &mut Held,
    ) -> Result<(), ConsumeError> {
        let mut partition = partition.clone();
        for _ in 0..REOPENS_MAX {
            match partition.claim(take, held).await {
                Ok(()) => return Ok(()),
                Err(error @ (ClaimError::Disk(_) | ClaimError::Short(_))) => {
                    return Err(PartitionQueue::error_of(error))
                }
                Err(ClaimError::Closed) => partition = self.reopen(&partition).await?,
            }
        }
        Err(PartitionQueue::error_of(ClaimError::Closed))
    }

    pub async fn read_at(self: &Rc<Self>, partition: u32, offset: u64) -> Result<ReadAt, ConsumeError> {
        let mut partition = self.partition(partition).await?;
        for _ in 0..REOPENS_MAX {
            match partition.read_at(offset).await {
                Ok(read) => return Ok(read),
                Err(error @ (ClaimError::Disk(_) | ClaimError::Short(_))) => {
                    return Err(PartitionQueue::error_of(error))
                }
                Err(ClaimError::Closed) => partition = self.reopen(&partition).await?,
            }
        }
        Err(PartitionQueue::error_of(ClaimError::Closed))
    }

    /// The partition with its log open again, or its successor if its state was dropped as well.
    async fn reopen(self: &Rc<Self>, partition: &Rc<PartitionQueue>) -> Result<Rc<PartitionQueue>, ConsumeError> {
        if !partition.is_retired() {
            let queues = self.queues().ok_or(ConsumeError::Unreachable)?;
            let opened = queues.environment.open(partition.destination).await?;
            partition.replace_records(opened.records);
        }
        self.partition(partition.destination.partition).await
    }

    /// Scans all partitions of this shard once, from a start that moves on, staying on each until it is dry or capped
    /// (C35, C89). An error counts only if nothing was found: records of other partitions are still served.
    pub async fn claim(self: &Rc<Self>, take: Take, held: &mut Held) -> Result<(), ConsumeError> {
        let local = self.local.borrow().clone();
        if local.is_empty() {
            return Ok(());
        }
        let start = self.start.get() % local.len();
        self.start.set(start + 1);
        let mut outcome = Ok(());
        for number in local[start..].iter().chain(&local[..start]) {
            if held.rest_of(take).is_none() {
                break;
            }
            if self.is_used_up(*number) {
                continue;
            }
            let claimed = match self.partition(*number).await {
                Ok(partition) if !partition.is_available() => Ok(()),
                Ok(partition) => self.claim_from(&partition, take, held).await,
                Err(error) => Err(error),
            };
            match claimed {
                Err(ConsumeError::TopicNotFound) => return Err(ConsumeError::TopicNotFound),
                Err(error @ (ConsumeError::ReadFailed(_) | ConsumeError::Busy(_))) if outcome.is_ok() => {
                    outcome = Err(error)
                }
                // A partition that is served elsewhere by now is none of this scan's (C65, C66).
                _ => {}
            }
        }
        outcome
    }

    /// A partition without consumer state here whose records are all settled. To open it for a look would announce it,
    /// and have it closed again for the next one where more partitions are waited for than may be open: for ever.
    fn is_used_up(&self, number: u32) -> bool {
        let destination = Destination { incarnation: self.incarnation, partition: number };
        let known = || {
            let queues = self.queues()?;
            let (state, end) = (queues.unloaded(destination)?, queues.environment.known_end(destination)?);
            Some(state.frontier >= end)
        };
        self.open_partition(number).is_none() && known().unwrap_or(false)
    }

    /// As [`claim`](Self::claim), for the topic's home: an answer with less than `take.max` records leaves the token
    /// here, in the same turn in which nothing was left to find (S98, C31).
    pub async fn claim_or_arm(self: &Rc<Self>, take: Take, held: &mut Held) -> Result<(), ConsumeError> {
        for _ in 0..SCANS_MAX {
            let before = self.announcements.get();
            let outcome = self.claim(take, held).await;
            if held.len() >= take.max as usize {
                return Ok(());
            }
            if held.is_empty() {
                outcome.clone()?;
            }
            if held.rest_of(take).is_none() || outcome.is_err() {
                break;
            }
            if self.announcements.get() == before {
                self.armed.set(!self.gone.get());
                return Ok(());
            }
        }
        // Short, and yet there may be more: arm, and let the home come back at once.
        self.armed.set(!self.gone.get());
        self.fire();
        Ok(())
    }

    /// An announcement: what a running scan has seen is outdated.
    pub fn bump(&self) {
        self.announcements.set(self.announcements.get() + 1);
    }

    /// Spends the token, if it is here: one flag test when nobody waits (S97).
    pub fn fire(&self) {
        if self.armed.replace(false) {
            if let Some(queues) = self.queues() {
                queues.announce_to_home(self.incarnation);
            }
        }
    }

    pub fn mark_dirty(&self, tracked: &Rc<Tracked>) {
        if let Some(queues) = self.queues() {
            queues.committer.mark_dirty(tracked);
        }
    }

    pub fn schedule_sweep(&self, expiry: Instant, destination: Destination) -> Option<Instant> {
        Some(self.queues()?.sweeper.schedule(&self.queues, expiry, destination))
    }

    pub fn cancel_sweep(&self, at: Instant, destination: Destination) {
        if let Some(queues) = self.queues() {
            queues.sweeper.cancel(at, destination);
        }
    }

    /// The topic has gone: nothing opens from here on. Returns what was open.
    pub fn retire(&self) -> Vec<Rc<PartitionQueue>> {
        self.gone.set(true);
        self.armed.set(false);
        std::mem::take(&mut *self.open.borrow_mut()).into_values().collect()
    }

    /// Takes an open partition out; until the guard is dropped, whoever needs it waits.
    pub fn begin_close(&self, partition: &Rc<PartitionQueue>) -> Opening<'_> {
        let number = partition.destination.partition;
        partition.retire();
        self.opening.borrow_mut().insert(number, OpeningState::default());
        self.open.borrow_mut().remove(&number);
        Opening { topic: self, partition: number }
    }
}

/// Shards of this node that serve partitions of the topic, ascending.
pub(super) fn serving_shards(snapshot: &Snapshot, incarnation: Incarnation) -> impl Iterator<Item = ShardId> {
    let addresses = snapshot.placement.get(&incarnation).map(|a| &a[..]).unwrap_or(&[]);
    let here = addresses.iter().filter(|address| address.node == crate::meta::NodeId::LOCAL);
    let mut shards: Vec<ShardId> = here.map(|address| address.shard).collect();
    shards.sort_unstable();
    shards.dedup();
    shards.into_iter()
}

/// How long a request waits for a snapshot that its peer does not have yet.
pub(super) async fn pause_for_snapshot() {
    rt::sleep(Duration::from_millis(10)).await;
}
