//! A broker in memory that keeps the contract, or breaks it in one chosen way: it shows that the checker can fail.
//!
//! Accepted records are durable at once; a task moves them into partitions; acks reach "the disk" with a delay, so
//! that crashes take some back, within the bounds of D16 and D17.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use narad_shards::api::{
    ConsumeError, Delivery, MetaReply, NewTopic, PartitionStats, ProduceError, ReadAt, Settle, SettleMode, SettleStatus,
};
use narad_shards::io::sim::SimDisk;
use narad_shards::io::Slice;
use narad_shards::meta::{Incarnation, ShardId, TopicMeta};
use narad_shards::peer::Take;
use narad_shards::rt::{self, sim::Rng, Instant};

use crate::broker::{Answer, Broker, End, Launcher, Probe};
use crate::message::Content;
use crate::metadata::Metadata;

/// One way to break the contract. Each is done now and then, not always.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    None,
    LoseAccepted,
    LoseAtCrash,
    LeaseTwice,
    ForgetAck,
    ForgetOldAckAtCrash,
    ForgetAckAtStop,
    AcceptLateAck,
    RefuseLiveAck,
    FlipBit,
    StoreRefused,
    DeliverOld,
    ReuseOffset,
    StoreTwice,
    IgnorePin,
    WatermarkBack,
    WatermarkPastDurable,
    FrontierPastWatermark,
    FrontierPastUnacked,
    CheckpointPastUndone,
    CommitTimeBack,
    HoardMemory,
    HoldLapsedLease,
    Latch,
    Poison,
    ForgetName,
    WrongBacklog,
    Leak,
    RefuseStart,
    Unreadable,
    ExpireYoung,
    ExpireUnseen,
    Panic,
    Unseeded,
}

struct Stored {
    content: Content,
    payload: Vec<u8>,
    timestamp_ms: u64,
    lease: Option<(u64, Instant)>,
    /// When it was acked.
    acked: Option<Instant>,
}

#[derive(Default)]
struct Partition {
    records: Vec<Stored>,
    /// First one that retention has not removed.
    oldest: usize,
}

impl Partition {
    fn frontier(&self) -> u64 {
        let settled = self.records[self.oldest..].iter().take_while(|record| record.acked.is_some());
        (self.oldest + settled.count()) as u64
    }
}

struct Store {
    bug: Bug,
    rng: Rng,
    metadata: Metadata,
    partitions: BTreeMap<(Incarnation, u32), Partition>,
    /// Durable, not yet in a partition.
    ingress: VecDeque<(Incarnation, Content)>,
    /// The last ones moved, whose checkpoint may be lost.
    recent: VecDeque<(Incarnation, Content)>,
    rotation: u64,
}

impl Store {
    fn bug(&mut self, bug: Bug, one_in: u64) -> bool {
        self.bug == bug && self.rng.chance(1, one_in)
    }

    fn move_one(&mut self) {
        let Some((incarnation, content)) = self.ingress.pop_front() else { return };
        if self.bug(Bug::LoseAccepted, 50) {
            return;
        }
        let partitions: Vec<u32> =
            self.partitions.keys().filter(|(topic, _)| *topic == incarnation).map(|(_, index)| *index).collect();
        if partitions.is_empty() {
            return;
        }
        self.rotation += 1;
        let drawn = partitions[(self.rotation % partitions.len() as u64) as usize];
        let pinned = content.partition.filter(|_| !self.bug(Bug::IgnorePin, 3));
        let copies = if self.bug(Bug::StoreTwice, 50) { 2 } else { 1 };
        for _ in 0..copies {
            self.store(incarnation, pinned.unwrap_or(drawn), content.clone());
        }
        self.recent.push_back((incarnation, content));
        if self.recent.len() > 8 {
            self.recent.pop_front();
        }
    }

    /// What has been kept for the topic's retention may go, one record at a time.
    fn expire_one(&mut self) {
        let (now_ms, early) = (rt::wall_clock_ms(), self.bug(Bug::ExpireYoung, 20));
        let Store { partitions, metadata, .. } = self;
        let snapshot = metadata.snapshot(1);
        for ((incarnation, _), partition) in partitions.iter_mut() {
            let bound = snapshot.topic_of(*incarnation).map_or(0, |meta| meta.retention_ms);
            let first = partition.records.get(partition.oldest);
            if first.is_some_and(|first| bound > 0 && (early || now_ms > first.timestamp_ms + bound)) {
                partition.oldest += 1;
            }
        }
    }

    fn store(&mut self, incarnation: Incarnation, index: u32, content: Content) {
        let back = if self.bug(Bug::CommitTimeBack, 20) { 5_000 } else { 0 };
        let reuse = self.bug(Bug::ReuseOffset, 20);
        let Some(partition) = self.partitions.get_mut(&(incarnation, index)) else { return };
        let floor = partition.records.last().map_or(0, |record| record.timestamp_ms);
        let timestamp_ms = rt::wall_clock_ms().max(floor) - back;
        let stored = Stored { payload: content.payload(), content, timestamp_ms, lease: None, acked: None };
        match partition.records.last_mut().filter(|record| reuse && record.lease.is_some()) {
            Some(last) => *last = stored,
            None => partition.records.push(stored),
        }
    }
}

pub struct ModelLauncher {
    store: Rc<RefCell<Store>>,
}

impl ModelLauncher {
    pub fn new(seed: u64, bug: Bug) -> ModelLauncher {
        let seed = if bug == Bug::Unseeded { unseeded() } else { seed };
        let store = Store {
            bug,
            rng: Rng::new(seed),
            metadata: Metadata::new(seed),
            partitions: BTreeMap::new(),
            ingress: VecDeque::new(),
            recent: VecDeque::new(),
            rotation: 0,
        };
        ModelLauncher { store: Rc::new(RefCell::new(store)) }
    }
}

/// Different at every call: what a forgotten clock or hash map order would do.
fn unseeded() -> u64 {
    thread_local! {
        static CALLS: Cell<u64> = const { Cell::new(0) };
    }
    CALLS.with(|calls| calls.replace(calls.get() + 1))
}

struct Model {
    store: Rc<RefCell<Store>>,
}

impl Launcher for ModelLauncher {
    fn launch(&self, _node: usize, disk: SimDisk, _shards: ShardId) -> Answer<Result<Rc<dyn Broker>, String>> {
        let store = self.store.clone();
        Box::pin(async move {
            pause(&store, 20_000).await;
            if store.borrow_mut().bug(Bug::Leak, 2) {
                std::mem::forget(disk);
            }
            if store.borrow_mut().bug(Bug::RefuseStart, 5) {
                return Err("planted".to_owned());
            }
            let moving = store.clone();
            rt::spawn(rt::Queue::Foreground, async move {
                loop {
                    pause(&moving, 2_000).await;
                    moving.borrow_mut().move_one();
                    moving.borrow_mut().expire_one();
                }
            });
            let broker: Rc<dyn Broker> = Rc::new(Model { store });
            Ok(broker)
        })
    }

    fn ended(&self, _node: usize, end: End) {
        let mut store = self.store.borrow_mut();
        let store = &mut *store;
        let now = match end {
            End::Graceful => None,
            End::Killed => Some((rt::now(), Duration::from_millis(100))),
            End::PowerCut => Some((rt::now(), Duration::from_millis(1_100))),
        };
        let (forget_old, forget_at_stop) = (store.bug == Bug::ForgetOldAckAtCrash, store.bug == Bug::ForgetAckAtStop);
        for record in store.partitions.values_mut().flat_map(|partition| &mut partition.records) {
            record.lease = None;
            let recent = |at: Instant| match now {
                Some((now, window)) => at + window > now || forget_old,
                None => forget_at_stop,
            };
            if record.acked.is_some_and(recent) && store.rng.chance(1, 2) {
                record.acked = None;
            }
        }
        if end != End::Graceful {
            if store.bug == Bug::LoseAtCrash {
                store.ingress.clear();
            }
            // The checkpoint was behind: some are moved again.
            let again = store.rng.below(store.recent.len() as u64 + 1) as usize;
            let repeated: Vec<_> = store.recent.iter().rev().take(again).cloned().collect();
            repeated.into_iter().for_each(|entry| store.ingress.push_front(entry));
        }
        store.recent.clear();
    }
}

async fn pause(store: &Rc<RefCell<Store>>, micros_max: u64) {
    let micros = store.borrow_mut().rng.range(1, micros_max);
    rt::sleep(Duration::from_micros(micros)).await;
}

fn deliver(meta: &TopicMeta, index: u32, offset: u64, record: &Stored, nonce: u64, flip: bool) -> Delivery {
    let mut body = record.content.key.clone();
    body.extend_from_slice(&record.payload);
    if let (true, Some(last)) = (flip, body.last_mut()) {
        *last ^= 4;
    }
    Delivery {
        topic: meta.name.clone(),
        incarnation: meta.incarnation,
        partition: index,
        offset,
        timestamp_ms: record.timestamp_ms,
        body: Slice::copy_from(&body),
        key_bytes: record.content.key.len() as u32,
        nonce,
    }
}

impl Store {
    fn claim(&mut self, meta: &TopicMeta, pinned: Option<u32>, take: Take) -> Vec<Delivery> {
        let (mut taken, mut bytes) = (Vec::new(), 0);
        let now = rt::now();
        let visibility = Duration::from_millis(meta.visibility_timeout_ms);
        let first = self.rng.below(u64::from(meta.partitions)) as u32;
        for step in 0..meta.partitions {
            let index = pinned.unwrap_or((first + step) % meta.partitions);
            let (twice, flip) = (self.bug(Bug::LeaseTwice, 10), self.bug(Bug::FlipBit, 30));
            let (forget, hold) = (self.bug(Bug::ForgetAck, 20), self.bug == Bug::HoldLapsedLease);
            let unseen = self.bug == Bug::ExpireUnseen && meta.retention_ms > 0;
            let Some(partition) = self.partitions.get_mut(&(meta.incarnation, index)) else { continue };
            let kept = (0..).zip(&mut partition.records).skip(partition.oldest);
            for (offset, record) in kept.filter(|(offset, _)| !unseen || offset % 7 != 3) {
                if taken.len() >= take.max as usize || bytes >= take.bytes_max {
                    return taken;
                }
                let leased = record.lease.is_some_and(|(_, until)| until > now || hold);
                if (leased && !twice) || (record.acked.is_some() && !forget) {
                    continue;
                }
                let nonce = self.rng.next_u64() >> 1 | 1;
                record.lease = Some((nonce, now + visibility));
                bytes += record.payload.len();
                taken.push(deliver(meta, index, offset, record, nonce, flip));
            }
            if pinned.is_some() {
                break;
            }
        }
        taken
    }

    fn settle(&mut self, incarnation: Incarnation, settle: Settle) -> SettleStatus {
        let now = rt::now();
        let (late, refuse) = (self.bug(Bug::AcceptLateAck, 2), self.bug(Bug::RefuseLiveAck, 30));
        let visibility = self.metadata.snapshot(1).topic_of(incarnation).map_or(0, |meta| meta.visibility_timeout_ms);
        let record = self
            .partitions
            .get_mut(&(incarnation, settle.partition))
            .filter(|partition| settle.offset >= partition.oldest as u64)
            .and_then(|partition| partition.records.get_mut(settle.offset as usize));
        let Some(record) = record else { return SettleStatus::LeaseGone };
        let own = record.lease.is_some_and(|(nonce, until)| nonce == settle.nonce && until > now) && !refuse;
        if !own && !late {
            return SettleStatus::LeaseGone;
        }
        match settle.mode {
            SettleMode::Ack => (record.acked, record.lease) = (Some(now), None),
            SettleMode::Extend => {
                record.lease = Some((settle.nonce, now + Duration::from_millis(visibility)));
            }
            _ => record.lease = None,
        }
        SettleStatus::Done
    }
}

impl Broker for Model {
    fn produce(
        &self,
        _shard: ShardId,
        topic: String,
        records: Vec<Content>,
        _batch: bool,
    ) -> Answer<Result<(), ProduceError>> {
        let store = self.store.clone();
        Box::pin(async move {
            pause(&store, 500).await;
            let found = store.borrow().metadata.topic(&topic).cloned();
            let meta = found.ok_or(ProduceError::TopicNotFound)?;
            let refused = store.borrow_mut().rng.chance(1, 40);
            if refused && store.borrow().bug != Bug::StoreRefused {
                return Err(ProduceError::MemoryExhausted);
            }
            let entries = records.into_iter().map(|content| (meta.incarnation, content));
            store.borrow_mut().ingress.extend(entries);
            pause(&store, 500).await;
            if refused {
                return Err(ProduceError::MemoryExhausted);
            }
            Ok(())
        })
    }

    fn consume(
        &self,
        _shard: ShardId,
        topic: String,
        partition: Option<u32>,
        take: Take,
        wait: Duration,
    ) -> Answer<Result<Vec<Delivery>, ConsumeError>> {
        let store = self.store.clone();
        Box::pin(async move {
            let deadline = rt::now() + wait;
            let stale = store.borrow().metadata.topic(&topic).cloned();
            loop {
                pause(&store, 300).await;
                let found = store.borrow().metadata.topic(&topic).cloned();
                let meta = match (found, &stale) {
                    (Some(live), Some(old)) if live.incarnation != old.incarnation => return Ok(Vec::new()),
                    (Some(live), _) => live,
                    (None, _) => return Err(ConsumeError::TopicNotFound),
                };
                let mut taken = store.borrow_mut().claim(&meta, partition, take);
                if store.borrow_mut().bug(Bug::DeliverOld, 5) {
                    if let Some(delivery) = taken.first_mut() {
                        delivery.incarnation = Incarnation(7);
                    }
                }
                if store.borrow_mut().bug(Bug::Panic, 200) {
                    panic!("planted");
                }
                if !taken.is_empty() || rt::now() >= deadline {
                    return Ok(taken);
                }
                rt::sleep(Duration::from_millis(5)).await;
            }
        })
    }

    fn settle(&self, _shard: ShardId, topic: String, settles: Vec<Settle>) -> Answer<Vec<SettleStatus>> {
        let store = self.store.clone();
        Box::pin(async move {
            pause(&store, 300).await;
            let mut store = store.borrow_mut();
            let Some(incarnation) = store.metadata.topic(&topic).map(|meta| meta.incarnation) else {
                return vec![SettleStatus::LeaseGone; settles.len()];
            };
            settles.into_iter().map(|settle| store.settle(incarnation, settle)).collect()
        })
    }

    fn read_at(
        &self,
        _shard: ShardId,
        topic: String,
        partition: u32,
        offset: u64,
    ) -> Answer<Result<ReadAt, ConsumeError>> {
        let store = self.store.clone();
        Box::pin(async move {
            pause(&store, 300).await;
            let mut store = store.borrow_mut();
            if store.bug(Bug::Unreadable, 5) {
                return Ok(ReadAt::Unreadable);
            }
            let meta = store.metadata.topic(&topic).cloned().ok_or(ConsumeError::TopicNotFound)?;
            let partitions = store.partitions.get(&(meta.incarnation, partition));
            let Partition { records, oldest } = partitions.ok_or(ConsumeError::PartitionOutOfRange)?;
            if offset < *oldest as u64 {
                return Ok(ReadAt::AgedOut { oldest: *oldest as u64 });
            }
            Ok(match records.get(offset as usize) {
                Some(record) => ReadAt::Record(deliver(&meta, partition, offset, record, 0, false)),
                None => ReadAt::PastEnd,
            })
        })
    }

    fn create_topic(&self, topic: NewTopic) -> Answer<MetaReply> {
        let store = self.store.clone();
        Box::pin(async move {
            pause(&store, 500).await;
            let mut store = store.borrow_mut();
            let reply = store.metadata.create(&topic, rt::wall_clock_ms());
            if let MetaReply::Created(meta) = &reply {
                for index in 0..meta.partitions {
                    store.partitions.insert((meta.incarnation, index), Partition::default());
                }
            }
            reply
        })
    }

    fn delete_topic(&self, name: String, incarnation: Incarnation) -> Answer<MetaReply> {
        let store = self.store.clone();
        Box::pin(async move {
            pause(&store, 500).await;
            let mut store = store.borrow_mut();
            let reply = store.metadata.delete(&name, incarnation);
            if matches!(reply, MetaReply::Deleted) {
                store.partitions.retain(|(topic, _), _| *topic != incarnation);
            }
            reply
        })
    }

    fn stats(&self, topic: String) -> Answer<Option<(Incarnation, Vec<PartitionStats>)>> {
        let store = self.store.clone();
        Box::pin(async move {
            pause(&store, 300).await;
            let mut store = store.borrow_mut();
            let incarnation = store.metadata.topic(&topic)?.incarnation;
            let (back, ahead) = (store.bug(Bug::WatermarkBack, 5), store.bug(Bug::FrontierPastWatermark, 5));
            let past_unacked = store.bug == Bug::FrontierPastUnacked;
            let own = store.partitions.iter().filter(|((topic, _), _)| *topic == incarnation);
            let stats = own
                .map(|((_, index), partition)| {
                    let end = partition.records.len() as u64;
                    let frontier = if past_unacked { end } else { partition.frontier() + u64::from(ahead) * end };
                    PartitionStats {
                        index: *index,
                        oldest_offset: partition.oldest as u64,
                        next_offset: end,
                        high_watermark: end - u64::from(back && end > 0),
                        frontier,
                        ..PartitionStats::default()
                    }
                })
                .collect();
            Some((incarnation, stats))
        })
    }

    fn probe(&self) -> Answer<Probe> {
        let store = self.store.clone();
        Box::pin(async move {
            let mut store = store.borrow_mut();
            let poisoned = if store.bug(Bug::Poison, 5) { vec!["planted".to_owned()] } else { Vec::new() };
            let unnamed = if store.bug(Bug::ForgetName, 5) { vec!["/planted".to_owned()] } else { Vec::new() };
            Probe {
                checkpoints: vec![(0, if store.bug(Bug::CheckpointPastUndone, 5) { 9 } else { 5 }, 5)],
                backlogs: vec![(0, 3, if store.bug(Bug::WrongBacklog, 5) { 4 } else { 3 })],
                watermarks: vec![(Incarnation(1), 0, if store.bug(Bug::WatermarkPastDurable, 5) { 9 } else { 5 }, 5)],
                memory: vec![(
                    "all".to_owned(),
                    if store.bug(Bug::HoardMemory, 5) { 1 << 40 } else { 1 << 10 },
                    1 << 20,
                )],
                unnamed,
                latched: store.bug(Bug::Latch, 5),
                poisoned,
            }
        })
    }

    fn shutdown(&self) -> Answer<()> {
        let store = self.store.clone();
        Box::pin(async move { pause(&store, 5_000).await })
    }
}
