//! What a client's request asks of the queues, on the shard that the client reached.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use super::held::Held;
use super::shard_queues::ShardQueues;
use super::topic::pause_for_snapshot;
use crate::api::{ConsumeError, Delivery, ReadAt, Settle, SettleStatus};
use crate::meta::{Address, Destination, Incarnation, NodeId};
use crate::peer::{LocalBoxFuture, Lost, Reply, Request, Take, Token};
use crate::rt::sync::{oneshot, Notify, Sender};
use crate::rt::{self, Instant, Queue};

/// How often a waiter that wants to leave says so again, until it is answered.
const LEAVE_AGAIN: Duration = Duration::from_secs(1);

/// The entry point for requests. Cheap to clone. Every future may be dropped at any await: what it had leased goes
/// back at once, and its place in a queue is given up (C15, C36, lesson N37).
#[derive(Clone)]
pub struct Consumer {
    queues: Rc<ShardQueues>,
}

impl Consumer {
    pub fn new(queues: Rc<ShardQueues>) -> Consumer {
        Consumer { queues }
    }

    /// Leases 1 to `take.max` records of a topic; none when nothing came within `wait`. Takes what is ready on this
    /// node and never waits to fill (C89).
    pub async fn consume(
        &self,
        topic: &str,
        partition: Option<u32>,
        take: Take,
        wait: Duration,
    ) -> Result<Vec<Delivery>, ConsumeError> {
        let started = rt::now();
        let take = Take { max: take.max.max(1), ..take };
        let incarnation = self.incarnation(topic)?;
        // A stop sits out no long poll; what is there is handed out as before.
        let deadline = if self.queues.is_stopping() { started } else { started + wait };
        let held = match partition {
            Some(partition) => self.consume_pinned(incarnation, partition, take, deadline).await?,
            None => self.consume_shared(incarnation, take, deadline).await?,
        };
        self.queues.record_wait(rt::now() - started, !held.is_empty());
        Ok(held.into_deliveries())
    }

    /// Acks, extends or nacks leases of a topic: one status each, in order. Owners are asked in parallel (C87).
    /// `None` when the topic is not known.
    pub async fn settle(&self, topic: &str, settles: Vec<Settle>) -> Option<Vec<SettleStatus>> {
        let incarnation = self.incarnation(topic).ok()?;
        let mut statuses = vec![SettleStatus::LeaseGone; settles.len()];
        let mut by_owner: BTreeMap<Address, Vec<usize>> = BTreeMap::new();
        for (index, settle) in settles.iter().enumerate() {
            match self.owner(incarnation, settle.partition) {
                Ok(owner) => by_owner.entry(owner).or_default().push(index),
                Err(ConsumeError::OwnerDown) => statuses[index] = SettleStatus::OwnerDown,
                // A partition that the topic lacks has no lease: gone, not misrouted (C23).
                Err(_) => {}
            }
        }
        let mut calls = Vec::new();
        for (owner, indices) in by_owner {
            let group: Vec<Settle> = indices.iter().map(|index| settles[*index]).collect();
            if owner == self.queues.address() {
                fill_in(&mut statuses, &indices, self.queues.settle_here(incarnation, &group));
                continue;
            }
            let call = self.queues.call(owner, Request::Settle { incarnation, settles: group });
            calls.push((indices, call));
        }
        let (indices, calls): (Vec<_>, Vec<_>) = calls.into_iter().unzip();
        for (indices, reply) in indices.iter().zip(rt::all(calls).await) {
            let settled = match reply {
                Ok(Reply::Settled(settled)) if settled.len() == indices.len() => settled,
                _ => vec![SettleStatus::Unanswered; indices.len()],
            };
            fill_in(&mut statuses, indices, settled);
        }
        Some(statuses)
    }

    /// Reads one record without a lease (C92).
    pub async fn read_at(&self, topic: &str, partition: u32, offset: u64) -> Result<ReadAt, ConsumeError> {
        let incarnation = self.incarnation(topic)?;
        let owner = self.owner(incarnation, partition)?;
        match self.queues.call(owner, Request::ReadAt { incarnation, partition, offset }).await {
            Ok(Reply::ReadAt(read)) => read,
            Ok(_) | Err(Lost(_)) => Err(ConsumeError::Unreachable),
        }
    }

    // For other nodes: what the shard's door needs of the queues.

    /// A claim (no wait) or long poll of one partition, on whatever shard of this node serves it.
    pub(crate) async fn poll_partition(
        &self,
        incarnation: Incarnation,
        partition: u32,
        take: Take,
        wait: Duration,
    ) -> Result<Vec<Delivery>, ConsumeError> {
        let held = self.consume_pinned(incarnation, partition, take, rt::now() + wait).await?;
        Ok(held.into_deliveries())
    }

    /// What any shard of this node has ready, asked at the topic's home.
    pub(crate) async fn claim_for_node(
        &self,
        incarnation: Incarnation,
        take: Take,
        token: Option<Token>,
    ) -> Result<Vec<Delivery>, ConsumeError> {
        let request = Request::NodeClaim { incarnation, take, token };
        Ok(self.claim_by(self.home(incarnation), request).await?.into_deliveries())
    }

    pub(crate) async fn register_node(&self, incarnation: Incarnation, token: Token) -> Result<bool, ConsumeError> {
        match self.queues.call(self.home(incarnation), Request::Register { incarnation, token }).await {
            Ok(Reply::Registered(registered)) => registered,
            Ok(_) | Err(Lost(_)) => Err(ConsumeError::Unreachable),
        }
    }

    pub(crate) fn send_home(&self, incarnation: Incarnation, request: Request) {
        self.queues.send(self.home(incarnation), request);
    }

    /// Gives back leases that have left for another node, where nobody waits for them any more (C58).
    pub(crate) fn settle_unheard(&self, leases: Vec<(Incarnation, Settle)>) {
        for (incarnation, settle) in leases {
            if let Ok(owner) = self.owner(incarnation, settle.partition) {
                self.queues.send(owner, Request::Settle { incarnation, settles: vec![settle] });
            }
        }
    }

    fn home(&self, incarnation: Incarnation) -> Address {
        Address::local(self.queues.with_snapshot(|snapshot| snapshot.home(incarnation)))
    }

    /// Gives back leases that did not reach their client after all (C15), or did not fit its answer.
    pub fn release(&self, deliveries: Vec<Delivery>) {
        self.queues.release(deliveries);
    }

    fn incarnation(&self, topic: &str) -> Result<Incarnation, ConsumeError> {
        let found = self.queues.with_snapshot(|snapshot| snapshot.topic(topic).map(|meta| meta.incarnation));
        found.ok_or(ConsumeError::TopicNotFound)
    }

    /// Who serves a partition. One that exists and has no owner (yet) is a matter of time.
    fn owner(&self, incarnation: Incarnation, partition: u32) -> Result<Address, ConsumeError> {
        self.queues.with_snapshot(|snapshot| match snapshot.address(Destination { incarnation, partition }) {
            Some(owner) => Ok(owner),
            None if snapshot.topic_of(incarnation).is_some_and(|topic| partition < topic.partitions) => {
                Err(ConsumeError::OwnerDown)
            }
            None => Err(ConsumeError::PartitionOutOfRange),
        })
    }

    async fn consume_pinned(
        &self,
        incarnation: Incarnation,
        partition: u32,
        take: Take,
        deadline: Instant,
    ) -> Result<Held, ConsumeError> {
        let owner = self.owner(incarnation, partition)?;
        if rt::now() >= deadline {
            return self.claim_at(owner, incarnation, Some(partition), take).await;
        }
        self.park(owner, incarnation, Some(partition), take, deadline).await
    }

    async fn consume_shared(
        &self,
        incarnation: Incarnation,
        take: Take,
        deadline: Instant,
    ) -> Result<Held, ConsumeError> {
        let mut held = self.queues.claim_here(incarnation, take).await?;
        let mut scanned = true;
        if held.is_empty() && rt::now() < deadline {
            held = self.park(self.home(incarnation), incarnation, None, take, deadline).await?;
            if held.is_empty() {
                return Ok(held);
            }
            scanned = false;
        }
        self.fill(incarnation, take, &mut held, scanned).await?;
        if held.is_empty() && scanned {
            return self.probe_nodes(incarnation, take).await;
        }
        Ok(held)
    }

    /// One claim to each other node that serves the topic, until one has something: a batch is never gathered over the
    /// network (C41, C91). One that does not answer is passed over.
    async fn probe_nodes(&self, incarnation: Incarnation, take: Take) -> Result<Held, ConsumeError> {
        for node in self.queues.live_owners(incarnation) {
            let request = Request::NodeClaim { incarnation, take, token: None };
            if let Ok(held) = self.claim_by(Address::remote(node), request).await {
                if !held.is_empty() {
                    return Ok(held);
                }
            }
        }
        Ok(Held::new(self.queues.clone()))
    }

    /// Adds what is ready elsewhere on this node: own partitions unless they were just scanned, then one claim to
    /// each other shard that may have some (C91). An error counts only if there is nothing to hand out.
    async fn fill(
        &self,
        incarnation: Incarnation,
        take: Take,
        held: &mut Held,
        scanned: bool,
    ) -> Result<(), ConsumeError> {
        let Some(topic) = self.queues.topic(incarnation) else { return Ok(()) };
        if let (false, Some(rest)) = (scanned, held.rest_of(take)) {
            if let Ok(own) = self.queues.claim_here(incarnation, rest).await {
                held.extend(own.into_deliveries());
            }
        }
        let mut outcome = Ok(());
        for shard in topic.others_in_turn() {
            let Some(rest) = held.rest_of(take) else { break };
            if self.queues.is_known_empty(incarnation, shard) {
                continue;
            }
            match self.claim_at(Address::local(shard), incarnation, None, rest).await {
                Ok(more) => held.extend(more.into_deliveries()),
                Err(error @ (ConsumeError::ReadFailed(_) | ConsumeError::Busy(_))) => outcome = Err(error),
                // Not there or not known there: another shard may have something.
                Err(_) => {}
            }
        }
        if held.is_empty() {
            outcome
        } else {
            Ok(())
        }
    }

    /// Claims what is ready on one shard.
    async fn claim_at(
        &self,
        owner: Address,
        incarnation: Incarnation,
        partition: Option<u32>,
        take: Take,
    ) -> Result<Held, ConsumeError> {
        self.claim_by(owner, Request::Claim { incarnation, partition, take, arm: false }).await
    }

    async fn claim_by(&self, owner: Address, request: Request) -> Result<Held, ConsumeError> {
        let call = self.queues.call(owner, request);
        if owner == self.queues.address() {
            // A call to this shard is part of this future, and gives back what it holds when that is dropped.
            return self.queues.deliveries_of(call).await;
        }
        // A late reply of a dropped call would be lost, and its leases with it: a task of its own waits for it.
        let queues = self.queues.clone();
        let claim = rt::spawn(Queue::Consume, async move { queues.deliveries_of(call).await });
        claim.await
    }

    /// Waits in a queue until served or out of time.
    async fn park(
        &self,
        at: Address,
        incarnation: Incarnation,
        partition: Option<u32>,
        take: Take,
        deadline: Instant,
    ) -> Result<Held, ConsumeError> {
        loop {
            match self.park_once(at, incarnation, partition, take, deadline).await {
                // The other shard may not have the snapshot yet that this one has.
                Err(ConsumeError::TopicNotFound) if self.queues.knows(incarnation) => {
                    if rt::now() >= deadline {
                        return Ok(Held::new(self.queues.clone()));
                    }
                    pause_for_snapshot().await;
                }
                outcome => return outcome,
            }
        }
    }

    async fn park_once(
        &self,
        at: Address,
        incarnation: Incarnation,
        partition: Option<u32>,
        take: Take,
        deadline: Instant,
    ) -> Result<Held, ConsumeError> {
        let waiter = self.queues.next_waiter();
        let wait = deadline - rt::now();
        let call = self.queues.call(at, Request::Park { waiter, incarnation, partition, take, wait });
        let leave = Leave { notify: Notify::new() };
        if at.node != NodeId::LOCAL {
            // A long poll of another node: it ends there by itself, and earlier when its client leaves.
            let (sender, served) = oneshot();
            rt::spawn(Queue::Consume, keep_far(self.queues.clone(), call, leave.notify.clone(), sender));
            return served.await.unwrap_or(Err(ConsumeError::Unreachable));
        }
        let place = Place {
            queues: self.queues.clone(),
            at,
            unpark: Box::new(move || Request::Unpark { waiter, incarnation, partition }),
            leave: leave.notify.clone(),
        };
        let (sender, mut served) = oneshot();
        rt::spawn(Queue::Consume, place.keep(call, sender));
        // The only timer of a parked consume (C28).
        let outcome = match rt::timeout(deadline - rt::now(), &mut served).await {
            Ok(outcome) => outcome,
            Err(rt::Elapsed) => {
                leave.notify.notify_one();
                served.await
            }
        };
        outcome.unwrap_or(Err(ConsumeError::Unreachable))
    }
}

/// Tells the task that keeps a place in a queue to give it up, also by being dropped with its client's future.
struct Leave {
    notify: Notify,
}

impl Drop for Leave {
    fn drop(&mut self) {
        self.notify.notify_one();
    }
}

/// A place in the queue of another shard, or of this one. Kept until it is answered, since the answer may carry
/// leases.
struct Place {
    queues: Rc<ShardQueues>,
    at: Address,
    unpark: Box<dyn Fn() -> Request>,
    leave: Notify,
}

impl Place {
    async fn keep(
        self,
        mut call: LocalBoxFuture<'static, Result<Reply, Lost>>,
        served: Sender<Result<Held, ConsumeError>>,
    ) {
        let mut answered = rt::first_of(&mut call, self.leave.notified()).await.ok();
        while answered.is_none() {
            self.queues.send(self.at, (self.unpark)());
            // Said again in case it overtook the park itself and was ignored.
            answered = rt::timeout(LEAVE_AGAIN, &mut call).await.ok();
        }
        let Some(reply) = answered else { return };
        let outcome = self.queues.deliveries_of(Box::pin(std::future::ready(reply))).await;
        // A client that has gone gives the deliveries back by not being there to receive them.
        let _ = served.send(outcome);
    }
}

/// A place in the queue of a partition on another node: dropping the call gives it up there.
async fn keep_far(
    queues: Rc<ShardQueues>,
    call: LocalBoxFuture<'static, Result<Reply, Lost>>,
    leave: Notify,
    served: Sender<Result<Held, ConsumeError>>,
) {
    // The answer first: leases that are here already must not be dropped with the call.
    if let Ok(outcome) = rt::first_of(queues.deliveries_of(call), leave.notified()).await {
        // A client that has gone gives the deliveries back by not being there to receive them.
        let _ = served.send(outcome);
    }
}

fn fill_in(statuses: &mut [SettleStatus], indices: &[usize], settled: Vec<SettleStatus>) {
    indices.iter().zip(settled).for_each(|(index, status)| statuses[*index] = status);
}
