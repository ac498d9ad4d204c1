//! Answers other nodes for one shard. A request for another shard of this node is forwarded once, over a ring, and the
//! reply names that shard (E43); one for another node is answered `421`, never forwarded.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use super::late::LateCancels;
use super::permits::Permits;
use super::{ConnectionId, Hello, Service};
use crate::api::{ConsumeError, Settle, SettleStatus};
use crate::meta::{Address, Destination, Incarnation, NodeId, ShardId};
use crate::peer::{CommitBatch, CommitError, LocalBoxFuture, Reply, Request};
use crate::queue::Consumer;
use crate::rt;
use crate::shard::Shard;
use crate::wire::{self, operation, status, Incoming, Kind, Outgoing, Refusal, SHARD_OPERATIONS};

/// Handlers at a time, commits (bounded by their bytes) and long polls aside (E45).
const HANDLERS_MAX: usize = 64;

/// How long one shard is waited for that is to say how its partitions are. Less than what is given to the whole answer.
const STATS_WAIT: Duration = Duration::from_millis(500);

/// The door of one shard. Cheap to clone.
#[derive(Clone)]
pub struct RemoteService {
    inner: Rc<Inner>,
}

struct Inner {
    shard: Shard,
    consumer: Consumer,
    hello: Box<dyn Fn() -> Hello>,
    permits: Permits,
    sent: LateCancels,
}

/// Who serves a partition, as this node sees it.
enum Place {
    Here,
    Sibling(ShardId),
    Elsewhere,
    /// The topic is not known here (yet), the partition has no owner, or ownership may not be trusted yet (K22).
    Unknown,
}

impl RemoteService {
    /// `hello` says who this node is at the moment; what the shard answers and grants is added here.
    pub fn new(shard: Shard, hello: Box<dyn Fn() -> Hello>) -> RemoteService {
        let consumer = Consumer::new(shard.queues().clone());
        let (permits, sent) = (Permits::new(HANDLERS_MAX), LateCancels::default());
        RemoteService { inner: Rc::new(Inner { shard, consumer, hello, permits, sent }) }
    }
}

impl Service for RemoteService {
    fn hello(&self) -> Hello {
        let shard = &self.inner.shard;
        Hello {
            shard: Some(shard.id()),
            operations: SHARD_OPERATIONS.to_vec(),
            commit_credit_bytes: shard.commit_credit_bytes(),
            ..(self.inner.hello)()
        }
    }

    fn met(&self, _connection: ConnectionId, from: &Hello, address: SocketAddr) -> Result<(), String> {
        (self.inner.hello)().same_cluster(from, address)
    }

    fn serve(&self, connection: ConnectionId, request: Incoming) -> LocalBoxFuture<'static, Option<Outgoing>> {
        let inner = self.inner.clone();
        Box::pin(async move { inner.serve(connection, request).await })
    }

    fn cancelled_late(&self, connection: ConnectionId, request_id: u64) {
        self.inner.consumer.settle_unheard(self.inner.sent.take(connection, request_id));
    }

    fn lost(&self, connection: ConnectionId) {
        self.inner.sent.lost(connection);
    }
}

impl Inner {
    async fn serve(self: Rc<Self>, connection: ConnectionId, incoming: Incoming) -> Option<Outgoing> {
        let header = incoming.header;
        let asked = wire::asked(&incoming);
        // From here on only the records of a commit keep the frame.
        drop(incoming);
        if header.kind != Kind::Request {
            self.take_message(asked);
            return None;
        }
        let answered = match asked {
            Ok(request) => self.answer(request).await,
            Err(refusal) => return Some(refusal.reply(header.operation, header.lane)),
        };
        let (shard, reply) = answered;
        if let Reply::Deliveries(Ok(deliveries)) = &reply {
            self.sent.remember(connection, header.request_id, deliveries);
        }
        let Some(mut frame) = wire::answer(header.operation, shard, &reply) else {
            let text = format!("operation {} was answered by something else", header.operation);
            return Some(Refusal::new(status::INTERNAL, text).reply(header.operation, header.lane));
        };
        if matches!(header.operation, operation::COMMIT_PRODUCE | operation::COMMIT_PRODUCE_BATCH) {
            frame.credit_bytes = self.shard.commit_credit_bytes();
        }
        Some(frame)
    }

    /// One-way messages concern the topic's home.
    fn take_message(&self, asked: Result<Request, Refusal>) {
        let Ok(request @ (Request::NodeAvailable { incarnation, .. } | Request::Pass { incarnation, .. })) = asked
        else {
            return; // nobody waits to be told what is wrong with it
        };
        self.consumer.send_home(incarnation, request);
    }

    fn place(&self, destination: Destination) -> Place {
        match self.shard.snapshot().address(destination) {
            None => Place::Unknown,
            Some(Address { node: NodeId::LOCAL, shard }) if shard == self.shard.id() => Place::Here,
            Some(Address { node: NodeId::LOCAL, shard }) => Place::Sibling(shard),
            Some(_) => Place::Elsewhere,
        }
    }

    /// The shard that served, and what it says.
    async fn answer(&self, request: Request) -> (ShardId, Reply) {
        let here = self.shard.id();
        match request {
            Request::Commit(batch) => self.commit(batch).await,
            Request::Park { incarnation, partition: Some(partition), take, wait, .. } => {
                let served = self.serving(incarnation, partition);
                let deliveries = match &served {
                    Ok(_) => self.consumer.poll_partition(incarnation, partition, take, wait).await,
                    Err(error) => Err(error.clone()),
                };
                (served.unwrap_or(here), Reply::Deliveries(deliveries))
            }
            bounded => {
                let _permit = self.permits.take().await;
                self.answer_bounded(bounded).await
            }
        }
    }

    async fn answer_bounded(&self, request: Request) -> (ShardId, Reply) {
        let here = self.shard.id();
        match request {
            Request::Claim { incarnation, partition: Some(partition), take, .. } => {
                let served = self.serving(incarnation, partition);
                let deliveries = match &served {
                    Ok(_) => self.consumer.poll_partition(incarnation, partition, take, Default::default()).await,
                    Err(error) => Err(error.clone()),
                };
                (served.unwrap_or(here), Reply::Deliveries(deliveries))
            }
            Request::NodeClaim { incarnation, take, token } => {
                (here, Reply::Deliveries(self.consumer.claim_for_node(incarnation, take, token).await))
            }
            Request::Register { incarnation, token } => {
                (here, Reply::Registered(self.consumer.register_node(incarnation, token).await))
            }
            Request::Settle { incarnation, settles } => {
                let first = settles.first().map(|settle| self.serving(incarnation, settle.partition));
                let statuses = self.settle(incarnation, settles).await;
                (first.and_then(Result::ok).unwrap_or(here), Reply::Settled(statuses))
            }
            Request::ReadAt { incarnation, partition, offset } => match self.serving(incarnation, partition) {
                Ok(shard) => {
                    let request = Request::ReadAt { incarnation, partition, offset };
                    let read = match self.shard.ask(shard, request).await {
                        Some(Reply::ReadAt(read)) => read,
                        _ => Err(ConsumeError::OwnerDown),
                    };
                    (shard, Reply::ReadAt(read))
                }
                Err(error) => (here, Reply::ReadAt(Err(error))),
            },
            Request::Stats { incarnation } => {
                let shards = 0..self.shard.snapshot().shards;
                let ask = |shard| rt::timeout(STATS_WAIT, self.shard.ask(shard, Request::Stats { incarnation }));
                let mut all = Vec::new();
                // A shard that is stuck hides its own partitions only.
                for answer in rt::all(shards.map(|shard| Box::pin(ask(shard))).collect()).await {
                    if let Ok(Some(Reply::Stats(stats))) = answer {
                        all.extend(stats);
                    }
                }
                all.sort_by_key(|partition| partition.index);
                (here, Reply::Stats(all))
            }
            produce @ Request::Produce { .. } => match self.shard.ask(here, produce).await {
                Some(reply) => (here, reply),
                None => (here, Reply::Produced(Err(CommitError::Unavailable("the shard stops".to_owned())))),
            },
            other => {
                tracing::error!(?other, "a frame was read as a request that no peer sends");
                (here, Reply::Done)
            }
        }
    }

    /// The shard of this node that serves a partition.
    fn serving(&self, incarnation: Incarnation, partition: u32) -> Result<ShardId, ConsumeError> {
        match self.place(Destination { incarnation, partition }) {
            Place::Here => Ok(self.shard.id()),
            Place::Sibling(shard) => Ok(shard),
            Place::Elsewhere => Err(ConsumeError::NotOwner),
            Place::Unknown => Err(ConsumeError::OwnerDown),
        }
    }

    async fn commit(&self, batch: CommitBatch) -> (ShardId, Reply) {
        let here = self.shard.id();
        if self.shard.is_quiesced() {
            let text = "the owner is stopping".to_owned();
            return (here, Reply::Commit(Err(CommitError::Unavailable(text))));
        }
        if !self.shard.has_room_for_peers().await {
            let text = "the owner's disk is nearly full: less than half of its reserve is free".to_owned();
            return (here, Reply::Commit(Err(CommitError::Unavailable(text))));
        }
        let known = self.shard.snapshot().topic_of(batch.destination.incarnation).is_some();
        let serving = match self.place(batch.destination) {
            Place::Sibling(shard) => shard,
            Place::Elsewhere => return (here, Reply::Commit(Err(CommitError::NotOwner))),
            Place::Unknown if known => {
                let text = "the owner does not know yet what it owns".to_owned();
                return (here, Reply::Commit(Err(CommitError::Unavailable(text))));
            }
            // Of a topic that is not known here the shard says what it makes of it (412, or try again).
            Place::Here | Place::Unknown => here,
        };
        match self.shard.ask(serving, Request::Commit(batch)).await {
            Some(reply) => (serving, reply),
            None => {
                let text = format!("shard {serving} of the owner stops");
                (here, Reply::Commit(Err(CommitError::Unreachable(text))))
            }
        }
    }

    /// One status each, in order. Every partition's shard is asked at once.
    async fn settle(&self, incarnation: Incarnation, settles: Vec<Settle>) -> Vec<SettleStatus> {
        let mut statuses = vec![SettleStatus::OwnerDown; settles.len()];
        let mut by_shard: BTreeMap<ShardId, Vec<usize>> = BTreeMap::new();
        for (index, settle) in settles.iter().enumerate() {
            match self.serving(incarnation, settle.partition) {
                Ok(shard) => by_shard.entry(shard).or_default().push(index),
                Err(ConsumeError::NotOwner) => statuses[index] = SettleStatus::NotOwner,
                Err(_) => {}
            }
        }
        let asked = by_shard.iter().map(|(shard, indices)| {
            let group = indices.iter().map(|index| settles[*index]).collect();
            Box::pin(self.shard.ask(*shard, Request::Settle { incarnation, settles: group }))
        });
        let answers = rt::all(asked.collect()).await;
        for (indices, answer) in by_shard.values().zip(answers) {
            let settled = match answer {
                Some(Reply::Settled(settled)) if settled.len() == indices.len() => settled,
                _ => vec![SettleStatus::Unanswered; indices.len()],
            };
            indices.iter().zip(settled).for_each(|(index, status)| statuses[*index] = status);
        }
        statuses
    }
}
