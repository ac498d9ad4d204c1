//! One open partition: its leases over its records, its position, and the waiters pinned to it.

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;

use super::committer::{PositionSource, Tracked};
use super::held::Held;
use super::inflight::{Bounds, InFlight, Limits};
use super::position::{Position, Range};
use super::shard_queues::{ConsumerState, ParkReply};
use super::topic::TopicQueue;
use super::waiters::Waiters;
use super::PartitionMetrics;
use crate::api::{ConsumeError, Delivery, ReadAt, Settle, SettleMode, SettleStatus};
use crate::log::RecordsHandle;
use crate::log::{LogRecord, ReadError};
use crate::meta::Destination;
use crate::peer::{Take, WaiterId};
use crate::rt::{self, Instant, Queue};

/// Why a read or a claim stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ClaimError {
    /// The log was closed: transient, nothing has changed (C68). To be opened again.
    Closed,
    /// The disk refused (C62).
    Disk(String),
    /// No descriptor or memory was left: transient.
    Short(String),
}

#[derive(Default)]
struct Counters {
    consumed: Cell<u64>,
    consumed_bytes: Cell<u64>,
    extended: Cell<u64>,
    nacked: Cell<u64>,
    ack_rejected: Cell<u64>,
    corrupt_skipped: Cell<u64>,
}

fn count(counter: &Cell<u64>, by: u64) {
    counter.set(counter.get() + by);
}

/// Consumer side of one partition (C1). All of it runs on the shard that serves the partition (C6).
pub(super) struct PartitionQueue {
    pub destination: Destination,
    topic: Rc<TopicQueue>,
    records: RefCell<RecordsHandle>,
    state: RefCell<InFlight>,
    tracked: OnceCell<Rc<Tracked>>,
    pinned: RefCell<Waiters<ParkReply>>,
    /// A task serves the pinned waiters.
    pumping: Cell<bool>,
    /// Key under which the sweeper knows this partition; none without leases.
    sweep_at: Cell<Option<Instant>>,
    counters: Counters,
    /// Dropped by its topic: nothing is leased any more, so that a successor is alone (D3).
    retired: Cell<bool>,
    /// Offset and commit time of the last record looked at on the frontier.
    oldest_unsettled: Cell<(u64, u64)>,
}

impl PositionSource for PartitionQueue {
    fn position(&self, acked: &mut Vec<Range>) -> u64 {
        self.state.borrow().position(acked)
    }
}

/// A lease whose record is being read. Given back when dropped, whatever the reason (C14, C15).
struct Reservation<'a> {
    partition: &'a Rc<PartitionQueue>,
    offset: u64,
    nonce: u64,
}

impl Reservation<'_> {
    fn deliver(self, record: LogRecord) -> Delivery {
        let partition = self.partition;
        let nonce = self.nonce;
        std::mem::forget(self);
        if record.offset == partition.state.borrow().frontier() {
            partition.oldest_unsettled.set((record.offset, record.timestamp_ms));
        }
        count(&partition.counters.consumed, 1);
        count(&partition.counters.consumed_bytes, record.body.len() as u64);
        partition.delivery(record, nonce)
    }

    /// Settles the record, and the gap it begins, as unreadable (C60).
    fn skip(self, next_readable: u64, high_watermark: u64) {
        let partition = self.partition;
        let until = next_readable.clamp(self.offset + 1, high_watermark.max(self.offset + 1));
        let skipped = partition.state.borrow_mut().skip(self.offset, self.nonce, until);
        if skipped > 0 {
            count(&partition.counters.corrupt_skipped, skipped);
            tracing::warn!(topic = %partition.topic.name, partition = partition.destination.partition,
                offset = self.offset, records = skipped,
                "unreadable records skipped: they will not be delivered. Check the disk and the log's warnings");
            partition.mark_dirty();
            // The frontier may have moved: what a full ahead set held back is free for whoever had found nothing.
            partition.announce();
        }
        std::mem::forget(self);
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        let ended = self.partition.state.borrow_mut().nack(rt::now(), self.offset, self.nonce);
        if ended.is_ok() {
            self.partition.announce();
        }
    }
}

impl PartitionQueue {
    /// `position` was already clamped to the log. The partition is tracked by the committer from
    /// [`set_tracked`](Self::set_tracked) on.
    pub fn new(
        destination: Destination,
        topic: Rc<TopicQueue>,
        records: RecordsHandle,
        limits: Limits,
        position: &Position,
    ) -> Rc<PartitionQueue> {
        Rc::new(PartitionQueue {
            destination,
            topic,
            records: RefCell::new(records),
            state: RefCell::new(InFlight::restore(limits, position)),
            tracked: OnceCell::new(),
            pinned: RefCell::default(),
            pumping: Cell::new(false),
            sweep_at: Cell::new(None),
            counters: Counters::default(),
            retired: Cell::new(false),
            oldest_unsettled: Cell::new((u64::MAX, 0)),
        })
    }

    pub fn set_tracked(&self, tracked: Rc<Tracked>) {
        let first = self.tracked.set(tracked);
        debug_assert!(first.is_ok(), "a partition is tracked once");
    }

    /// The log was opened again. It has not fallen behind this state: see `ShardQueues::log_opened`.
    pub fn replace_records(self: &Rc<Self>, records: RecordsHandle) {
        debug_assert!(!self.reaches_beyond(records.high_watermark()), "log_opened comes first");
        *self.records.borrow_mut() = records;
    }

    /// Whether anything at or above the high watermark was handed out or settled.
    pub fn reaches_beyond(&self, high_watermark: u64) -> bool {
        self.state.borrow().reaches_beyond(high_watermark)
    }

    /// Altered caps apply to the next reserve (C13).
    pub fn set_limits(self: &Rc<Self>, limits: Limits) {
        if self.state.borrow().limits() != limits {
            self.state.borrow_mut().set_limits(limits);
            self.announce();
        }
    }

    fn bounds(&self) -> Bounds {
        let records = self.records.borrow();
        Bounds { oldest: records.oldest(), high_watermark: records.high_watermark() }
    }

    /// Whether a claim would find something. Cheap: a scan asks every partition.
    pub fn is_available(self: &Rc<Self>) -> bool {
        self.records.borrow().touch();
        let bounds = self.touch(rt::now());
        self.state.borrow().available(bounds).is_ok()
    }

    /// Leases and reads what is ready, into `held`, until that has all of `take` or nothing is left. Cancel-safe:
    /// a lease whose record was not read yet goes back.
    pub async fn claim(self: &Rc<Self>, take: Take, held: &mut Held) -> Result<(), ClaimError> {
        while held.rest_of(take).is_some() {
            if self.retired.get() {
                return Err(ClaimError::Closed);
            }
            let Some(reservation) = self.reserve() else { break };
            let records = self.records.borrow().clone();
            records.touch();
            let read = match records.read_cached(reservation.offset) {
                Some(read) => read,
                None => records.read(reservation.offset).await,
            };
            match read {
                Ok(record) => held.push(reservation.deliver(record)),
                Err(ReadError::Unreadable) => {
                    let next = records.next_readable(reservation.offset + 1);
                    reservation.skip(next, records.high_watermark());
                }
                // Lost the race against retention: reserve again above it (C59).
                Err(ReadError::AgedOut { oldest }) if oldest > reservation.offset => self.retire_below(oldest),
                Err(ReadError::AgedOut { .. } | ReadError::Closed | ReadError::PastEnd) => {
                    return Err(ClaimError::Closed)
                }
                Err(ReadError::Io(cause)) => return Err(ClaimError::Disk(cause)),
                Err(ReadError::Short(cause)) => return Err(ClaimError::Short(cause)),
            }
        }
        Ok(())
    }

    /// Leases the next record (C7). Any touch notices lapsed leases and removed records first (D7, C59).
    fn reserve(self: &Rc<Self>) -> Option<Reservation<'_>> {
        let now = rt::now();
        let bounds = self.touch(now);
        let mut state = self.state.borrow_mut();
        state.available(bounds).ok()?;
        let nonce = (rt::random_u64() >> 1).max(1);
        let offset = state.reserve(now, bounds, nonce).ok()?;
        drop(state);
        self.schedule_sweep();
        Some(Reservation { partition: self, offset, nonce })
    }

    fn touch(self: &Rc<Self>, now: Instant) -> Bounds {
        let bounds = self.bounds();
        let lapsed = self.state.borrow_mut().expire(now);
        self.retire_below(bounds.oldest);
        if lapsed > 0 {
            self.announce();
        }
        bounds
    }

    fn retire_below(self: &Rc<Self>, oldest: u64) {
        let overtaken = self.state.borrow_mut().retire_below(oldest);
        if let Some(overtaken) = overtaken {
            if overtaken.unsettled > 0 {
                tracing::warn!(topic = %self.topic.name, partition = self.destination.partition,
                    from = overtaken.from, to = overtaken.to, skipped = overtaken.unsettled,
                    "consumer frontier fell behind retention: these records were removed before anybody acked them; consumers are \
                    too slow or absent");
            }
            self.mark_dirty();
            self.announce();
        }
    }

    /// Ack, extend, nack or release one lease, as of `now`.
    pub fn settle(self: &Rc<Self>, settle: &Settle, now: Instant) -> SettleStatus {
        let bounds = self.touch(now);
        let mut state = self.state.borrow_mut();
        let blocked = state.available(bounds).is_err();
        let settled = match settle.mode {
            SettleMode::Ack => state.ack(now, settle.offset, settle.nonce),
            SettleMode::Extend => state.extend(now, settle.offset, settle.nonce),
            SettleMode::Nack | SettleMode::Release => state.nack(now, settle.offset, settle.nonce),
        };
        // An ack makes something available only where a cap held it back (S96).
        let freed = blocked && state.available(bounds).is_ok();
        drop(state);
        if settled.is_err() {
            if settle.mode == SettleMode::Ack {
                count(&self.counters.ack_rejected, 1);
            }
            return SettleStatus::LeaseGone;
        }
        match settle.mode {
            SettleMode::Ack => self.mark_dirty(),
            SettleMode::Extend => count(&self.counters.extended, 1),
            SettleMode::Nack => count(&self.counters.nacked, 1),
            SettleMode::Release => {}
        }
        if freed || matches!(settle.mode, SettleMode::Nack | SettleMode::Release) {
            self.announce();
        }
        SettleStatus::Done
    }

    /// Reads one record without a lease (C92-C95).
    pub async fn read_at(&self, offset: u64) -> Result<ReadAt, ClaimError> {
        let records = self.records.borrow().clone();
        records.touch();
        match records.read(offset).await {
            Ok(record) => Ok(ReadAt::Record(self.delivery(record, 0))),
            Err(ReadError::PastEnd) => Ok(ReadAt::PastEnd),
            Err(ReadError::AgedOut { oldest }) => Ok(ReadAt::AgedOut { oldest }),
            Err(ReadError::Unreadable) => Ok(ReadAt::Unreadable),
            Err(ReadError::Closed) => Err(ClaimError::Closed),
            Err(ReadError::Io(cause)) => Err(ClaimError::Disk(cause)),
            Err(ReadError::Short(cause)) => Err(ClaimError::Short(cause)),
        }
    }

    fn delivery(&self, record: LogRecord, nonce: u64) -> Delivery {
        Delivery {
            topic: self.topic.name.clone(),
            incarnation: self.destination.incarnation,
            partition: self.destination.partition,
            offset: record.offset,
            timestamp_ms: record.timestamp_ms,
            body: record.body,
            key_bytes: record.key_bytes,
            nonce,
        }
    }

    /// Records may have become available (S96): the partition's own waiters come first (C33), then the topic's. Looks
    /// at nothing and reads nothing, so the log may call it from inside its commit.
    pub fn announce(self: &Rc<Self>) {
        self.topic.bump();
        if self.pinned.borrow().is_empty() {
            self.topic.fire();
        } else {
            self.start_pump();
        }
    }

    /// Lets a pinned waiter queue for this partition alone (lesson N32).
    pub fn park(self: &Rc<Self>, waiter: WaiterId, take: Take, reply: ParkReply) {
        self.pinned.borrow_mut().push(waiter, take, reply);
        self.start_pump();
    }

    /// The waiter has timed out or gone: returns it if it is to be answered now.
    pub fn unpark(&self, waiter: WaiterId) -> Option<ParkReply> {
        self.pinned.borrow_mut().leave(waiter)
    }

    /// Takes out all pinned waiters that are not being served at this moment.
    pub fn drain_pinned(&self) -> Vec<ParkReply> {
        self.pinned.borrow_mut().drain_idle()
    }

    pub fn parked(&self) -> usize {
        self.pinned.borrow().len()
    }

    fn start_pump(self: &Rc<Self>) {
        if !self.pumping.replace(true) {
            let partition = self.clone();
            rt::spawn(Queue::Consume, async move { partition.run_pump().await });
        }
    }

    /// Serves pinned waiters in turn until they or the records run out (C30). Its last look at both and its end are
    /// one turn, so an announcement during the run needs no trace (C31).
    async fn run_pump(self: Rc<Self>) {
        self.serve_pinned().await;
        self.pumping.set(false);
        if self.pinned.borrow().is_empty() && self.is_available() {
            self.topic.fire();
        }
    }

    async fn serve_pinned(self: &Rc<Self>) {
        while let Some(queues) = self.topic.queues() {
            let picked = self.pinned.borrow_mut().pick();
            let Some((waiter, take)) = picked else { return };
            let mut held = Held::new(queues);
            let outcome = self.topic.claim_from(self, take, &mut held).await;
            let nothing = outcome.is_ok() && held.is_empty();
            let reply = match nothing {
                true => self.pinned.borrow_mut().put_back(waiter),
                false => self.pinned.borrow_mut().served(waiter),
            };
            let Some(reply) = reply else { return };
            let answer = match outcome {
                Err(error) if held.is_empty() => Err(error),
                _ => Ok(held),
            };
            // A receiver that has gone gives the deliveries back by dropping them.
            let _ = reply.send(answer);
        }
    }

    fn schedule_sweep(&self) {
        if self.sweep_at.get().is_none() {
            let expiry = self.state.borrow_mut().next_expiry();
            self.sweep_at.set(expiry.and_then(|expiry| self.topic.schedule_sweep(expiry, self.destination)));
        }
    }

    /// Called by the sweeper at the time of the oldest lease.
    pub fn sweep(self: &Rc<Self>) {
        self.sweep_at.set(None);
        self.touch(rt::now());
        self.schedule_sweep();
    }

    /// The topic drops this partition: claims find it closed from here on.
    pub fn retire(&self) {
        self.retired.set(true);
        if let Some(at) = self.sweep_at.take() {
            self.topic.cancel_sweep(at, self.destination);
        }
    }

    pub fn is_retired(&self) -> bool {
        self.retired.get()
    }

    /// Goes on counting where an earlier life of the partition stopped.
    pub fn carry_on(&self, figures: &PartitionMetrics) {
        let counters = &self.counters;
        count(&counters.consumed, figures.messages_consumed);
        count(&counters.consumed_bytes, figures.bytes_consumed);
        count(&counters.extended, figures.extended);
        count(&counters.nacked, figures.nacked);
        count(&counters.ack_rejected, figures.ack_rejected);
        count(&counters.corrupt_skipped, figures.corrupt_skipped);
    }

    fn mark_dirty(&self) {
        if let Some(tracked) = self.tracked.get() {
            self.topic.mark_dirty(tracked);
        }
    }

    /// Deliveries so far, redeliveries included.
    pub fn delivered(&self) -> u64 {
        self.counters.consumed.get()
    }

    pub fn consumer_state(&self) -> ConsumerState {
        let state = self.state.borrow();
        ConsumerState { frontier: state.frontier(), leased: state.leased(), acked_ahead: state.acked_ahead() }
    }

    /// The consumer side of the partition's figures (C100). Reads the oldest unsettled record if its time is not
    /// known yet; what cannot be read counts as unknown (0).
    pub async fn metrics(&self) -> PartitionMetrics {
        let bounds = self.bounds();
        let ConsumerState { frontier, leased, acked_ahead } = self.consumer_state();
        let oldest = frontier.max(bounds.oldest);
        let caught_up = oldest >= bounds.high_watermark;
        if !caught_up && self.oldest_unsettled.get().0 != oldest {
            let records = self.records.borrow().clone();
            match records.read(oldest).await {
                Ok(record) => self.oldest_unsettled.set((oldest, record.timestamp_ms)),
                Err(_) => self.oldest_unsettled.set((u64::MAX, 0)), // read again the next time
            }
        }
        PartitionMetrics {
            topic: self.topic.name.to_string(),
            messages_consumed: self.counters.consumed.get(),
            bytes_consumed: self.counters.consumed_bytes.get(),
            extended: self.counters.extended.get(),
            nacked: self.counters.nacked.get(),
            ack_rejected: self.counters.ack_rejected.get(),
            corrupt_skipped: self.counters.corrupt_skipped.get(),
            frontier,
            high_watermark: bounds.high_watermark,
            oldest_offset: bounds.oldest,
            leased,
            acked_ahead,
            oldest_unsettled_ms: if caught_up { 0 } else { self.oldest_unsettled.get().1 },
            ..PartitionMetrics::default()
        }
    }

    /// Checks the invariants of the lease table (C5). For tests and simulation.
    pub fn check(&self) {
        self.state.borrow().check(self.bounds());
    }
}

impl PartitionQueue {
    /// What a claim's failure looks like to a client.
    pub fn error_of(error: ClaimError) -> ConsumeError {
        match error {
            // Once and again: the node stops, or more logs are wanted at once than may be open.
            ClaimError::Closed => ConsumeError::Busy("the partition's log was closed meanwhile, retry".to_owned()),
            ClaimError::Disk(cause) => ConsumeError::ReadFailed(cause),
            ClaimError::Short(cause) => ConsumeError::Busy(busy_text(&cause)),
        }
    }
}

/// To be told to a client: what the machine was short of, and who can do something about it.
pub(crate) fn busy_text(cause: &str) -> String {
    format!(
        "the broker is short of open files or memory, retry; its operator can raise the limit of open files \
         (LimitNOFILE): {cause}"
    )
}
