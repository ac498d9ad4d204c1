//! The carrier of a shard of a cluster: what is for this node goes over the rings as before, what is for another one
//! goes there as a frame.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::credit::{Credit, Credits};
use super::figures::{CallKind, CallMetrics, CallOutcome, Calls};
use super::settles::{hand_out, Queued, Settles, Slot};
use super::{CallError, Transport, CALL_BUDGET_MIN};
use crate::api::{ConsumeError, Settle, SettleStatus};
use crate::meta::{guessed_shard, home_shard, Address, Destination, Incarnation, NodeId, Peer, PeerBook, ShardId};
use crate::peer::{Carrier, CommitBatch, CommitError, LocalBoxFuture, Lost, Reply, Request, Room};
use crate::rt::sync::{oneshot, Notify};
use crate::rt::{self, Instant, Queue};
use crate::wire::{self, status, Incoming, Kind, Outgoing};

/// Budgets of calls. A commit brings its own.
pub const CLAIM_BUDGET: Duration = Duration::from_millis(500);
pub const SETTLE_BUDGET: Duration = Duration::from_secs(2);
pub const STATS_BUDGET: Duration = Duration::from_secs(2);
pub const DEFAULT_BUDGET: Duration = Duration::from_secs(5);
/// What a long poll may take beyond its wait.
pub const PARK_MARGIN: Duration = Duration::from_secs(2);

/// Routes that are remembered: those whose shard is not the one that is guessed. Beyond it they are learnt again.
const ROUTES_MAX: usize = 16_384;

/// Wraps the carrier of one shard. Cheap to clone.
#[derive(Clone)]
pub struct RemoteCarrier {
    shared: Rc<Shared>,
}

struct Shared {
    inner: Rc<dyn Carrier>,
    transport: Rc<dyn Transport>,
    peers: RefCell<Arc<PeerBook>>,
    routes: RefCell<BTreeMap<(NodeId, Destination), ShardId>>,
    credits: Credits,
    settles: Rc<Settles<Failure>>,
    calls: RefCell<Calls>,
}

/// Why there is no answer.
#[derive(Clone)]
enum Failure {
    /// Membership says that the node is dead, or knows no such node: nothing was tried.
    Dead,
    NotSent(String),
    Unknown(String),
}

impl RemoteCarrier {
    pub fn new(inner: Rc<dyn Carrier>, transport: Rc<dyn Transport>) -> RemoteCarrier {
        let shared = Shared {
            inner,
            transport,
            peers: RefCell::default(),
            routes: RefCell::default(),
            credits: Credits::default(),
            settles: Rc::default(),
            calls: RefCell::default(),
        };
        RemoteCarrier { shared: Rc::new(shared) }
    }

    /// Bytes of commits under way to a node, and what its shards take at a time (E41).
    pub fn credit_of(&self, peer: &Peer) -> (u64, u64) {
        let windows = peer.shard_addrs.iter().map(|address| self.shared.credits.measure(*address));
        windows.fold((0, 0), |(used, granted), (more, of)| (used + more, granted + of))
    }

    /// Calls of this shard to other nodes. Messages that nobody answers are not among them.
    pub fn metrics(&self) -> Vec<CallMetrics> {
        self.shared.calls.borrow().read()
    }
}

impl Carrier for RemoteCarrier {
    fn call(&self, to: Address, request: Request) -> LocalBoxFuture<'static, Result<Reply, Lost>> {
        if to.node == NodeId::LOCAL {
            return self.shared.inner.call(to, request);
        }
        let shared = self.shared.clone();
        Box::pin(async move { shared.ask(to.node, request, None).await })
    }

    fn room(&self, to: Address, destination: Destination, bytes: u64) -> Option<Room> {
        if to.node == NodeId::LOCAL {
            return Some(Room(None));
        }
        // Where nobody can be asked for room, the commit itself is to say so.
        let Some((_, Some(address))) = self.shared.shard_of(to.node, destination) else { return Some(Room(None)) };
        self.shared.look_at_connection(address);
        Some(Room(Some(self.shared.credits.take_now(address, bytes)?)))
    }

    fn room_freed(&self) -> Notify {
        self.shared.credits.freed()
    }

    fn commit(&self, to: Address, batch: CommitBatch, room: Room) -> LocalBoxFuture<'static, Result<Reply, Lost>> {
        if to.node == NodeId::LOCAL {
            return self.shared.inner.commit(to, batch, room);
        }
        let shared = self.shared.clone();
        Box::pin(async move { shared.ask(to.node, Request::Commit(batch), room.0).await })
    }

    fn served_by(&self, to: Address, destination: Destination) -> Address {
        let known = (to.node != NodeId::LOCAL).then(|| self.shared.shard_of(to.node, destination)).flatten();
        known.map_or(to, |(shard, _)| Address { node: to.node, shard })
    }

    fn send(&self, to: Address, request: Request) {
        if to.node == NodeId::LOCAL {
            return self.shared.inner.send(to, request);
        }
        let shared = self.shared.clone();
        if let Request::Settle { .. } = request {
            // Its answer helps nobody, but a frame that needs none would not be tried again on a fresh connection.
            rt::spawn(Queue::Consume, async move { drop(shared.ask(to.node, request, None).await) });
            return;
        }
        let Ok((_, address)) = shared.address_of(to.node, &request) else { return };
        if let Some(frame) = wire::ask(&request, Duration::ZERO) {
            shared.transport.send(address, frame);
        }
    }

    fn install_peers(&self, peers: Arc<PeerBook>) {
        let previous = self.shared.peers.replace(peers.clone());
        // Another process may have placed its partitions otherwise (E43).
        let same = |node: &NodeId| match (previous.peers.get(node), peers.peers.get(node)) {
            (Some(before), Some(now)) => before.boot_id == now.boot_id,
            _ => false,
        };
        self.shared.routes.borrow_mut().retain(|(node, _), _| same(node));
        self.shared.inner.install_peers(peers);
    }
}

/// The partition that a request is about, if it is about one: then its shard is worth remembering.
fn partition_of(request: &Request) -> Option<Destination> {
    let of = |incarnation: &Incarnation, partition: u32| Destination { incarnation: *incarnation, partition };
    match request {
        Request::Commit(batch) => Some(batch.destination),
        Request::Claim { incarnation, partition: Some(partition), .. }
        | Request::Park { incarnation, partition: Some(partition), .. }
        | Request::ReadAt { incarnation, partition, .. } => Some(of(incarnation, *partition)),
        Request::Settle { incarnation, settles } => Some(of(incarnation, settles.first()?.partition)),
        _ => None,
    }
}

/// The topic whose home shard a request goes to, if it is about no partition.
fn topic_of(request: &Request) -> Option<Incarnation> {
    match request {
        Request::NodeClaim { incarnation, .. }
        | Request::Register { incarnation, .. }
        | Request::NodeAvailable { incarnation, .. }
        | Request::Pass { incarnation, .. }
        | Request::Stats { incarnation } => Some(*incarnation),
        _ => None,
    }
}

fn budget_of(request: &Request) -> Duration {
    match request {
        Request::Commit(batch) => batch.budget,
        Request::Claim { .. } | Request::NodeClaim { .. } | Request::Register { .. } => CLAIM_BUDGET,
        Request::Park { wait, .. } => *wait + PARK_MARGIN,
        Request::Settle { .. } => SETTLE_BUDGET,
        Request::Stats { .. } => STATS_BUDGET,
        _ => DEFAULT_BUDGET,
    }
}

impl Shared {
    /// The shard that serves a partition, as far as it is known, and where it listens. `None`: no such node is known, or
    /// none of its shards.
    fn shard_of(&self, node: NodeId, destination: Destination) -> Option<(ShardId, Option<SocketAddr>)> {
        let peers = self.peers.borrow();
        let addresses = &peers.peers.get(&node).filter(|peer| !peer.shard_addrs.is_empty())?.shard_addrs;
        let shards = addresses.len() as ShardId;
        let known = self.routes.borrow().get(&(node, destination)).copied().filter(|shard| *shard < shards);
        let shard = known.unwrap_or_else(|| guessed_shard(destination, shards));
        Some((shard, addresses.get(usize::from(shard)).copied()))
    }

    /// The shard to ask, and where it listens.
    fn address_of(&self, node: NodeId, request: &Request) -> Result<(ShardId, SocketAddr), Failure> {
        let peers = self.peers.borrow();
        let peer = peers.peers.get(&node).ok_or(Failure::Dead)?;
        // Only a commit is worth a try against membership's word: it has nowhere else to go.
        if !peer.alive && !matches!(request, Request::Commit(_)) {
            return Err(Failure::Dead);
        }
        let shards = peer.shard_addrs.len() as ShardId;
        let shard = match (partition_of(request), topic_of(request)) {
            (Some(destination), _) => self.shard_of(node, destination).map_or(0, |(shard, _)| shard),
            (None, Some(incarnation)) => home_shard(incarnation, shards),
            (None, None) => 0,
        };
        let address = peer.shard_addrs.get(usize::from(shard)).copied();
        let unknown = || Failure::NotSent(format!("node {} has not told the addresses of its shards yet", peer.name));
        address.map(|address| (shard, address)).ok_or_else(unknown)
    }

    async fn ask(self: Rc<Self>, node: NodeId, request: Request, room: Option<Credit>) -> Result<Reply, Lost> {
        let (failed, kind) = (failure_reply(&request), CallKind::of(&request));
        let answered = match request {
            Request::Settle { incarnation, settles } => self.settle(node, incarnation, settles).await,
            Request::Stats { incarnation } => self.stats(node, incarnation, kind).await,
            other => {
                let budget = budget_of(&other);
                self.exchange(node, other, kind, budget, room).await
            }
        };
        match answered {
            Ok(reply) => Ok(reply),
            Err(failure) => failed(failure),
        }
    }

    /// Any shard of a node can say how all of them are: one that does not answer is passed over.
    async fn stats(&self, node: NodeId, incarnation: Incarnation, kind: CallKind) -> Result<Reply, Failure> {
        let request = || Request::Stats { incarnation };
        let found = self.address_of(node, &request());
        let first = found.as_ref().map_or(0, |(shard, _)| *shard);
        let asked = self.exchange_at(node, found, request(), kind, STATS_BUDGET / 2, None).await;
        let Err(Failure::NotSent(_) | Failure::Unknown(_)) = &asked else { return asked };
        match self.sibling_of(node, first) {
            Some(next) => self.exchange_at(node, Ok(next), request(), kind, STATS_BUDGET / 2, None).await,
            None => asked,
        }
    }

    /// Another shard of the same node.
    fn sibling_of(&self, node: NodeId, shard: ShardId) -> Option<(ShardId, SocketAddr)> {
        let peers = self.peers.borrow();
        let addresses = &peers.peers.get(&node)?.shard_addrs;
        let next = (usize::from(shard) + 1) % addresses.len().max(1);
        addresses.get(next).filter(|_| next != usize::from(shard)).map(|address| (next as ShardId, *address))
    }

    /// Acks leave one by one as long as few are under way, else together (C86).
    async fn settle(
        self: &Rc<Self>,
        node: NodeId,
        incarnation: Incarnation,
        settles: Vec<Settle>,
    ) -> Result<Reply, Failure> {
        let until = rt::now() + SETTLE_BUDGET;
        let request = Request::Settle { incarnation, settles };
        let Ok((_, to)) = self.address_of(node, &request) else {
            return self.exchange(node, request, CallKind::SETTLE, SETTLE_BUDGET, None).await;
        };
        let slot = self.settles.slot(to, self.when_freed(node));
        let Request::Settle { settles, .. } = request else { unreachable!("made above") };
        if let Some(slot) = slot {
            return self.settle_now(node, incarnation, settles, until, slot).await.map(Reply::Settled);
        }
        let (answer, answered) = oneshot();
        self.settles.enqueue(to, Queued { incarnation, settles, until, answer });
        // It has left, or it has not: whoever acked is told that it may have been done (R12's like for acks).
        let late = || Err(Failure::Unknown("the owner did not answer in time".to_owned()));
        let statuses = rt::timeout(SETTLE_BUDGET, answered).await.ok().flatten().unwrap_or_else(late)?;
        Ok(Reply::Settled(statuses))
    }

    async fn settle_now(
        &self,
        node: NodeId,
        incarnation: Incarnation,
        settles: Vec<Settle>,
        until: Instant,
        slot: Slot<Failure>,
    ) -> Result<Vec<SettleStatus>, Failure> {
        let count = settles.len();
        let request = Request::Settle { incarnation, settles };
        let answered = self.exchange(node, request, CallKind::SETTLE, until - rt::now(), None).await;
        drop(slot);
        match answered? {
            Reply::Settled(statuses) if statuses.len() == count => Ok(statuses),
            other => Err(Failure::Unknown(format!("{other:?} to {count} settles"))),
        }
    }

    fn when_freed(self: &Rc<Self>, node: NodeId) -> impl Fn(SocketAddr) + 'static {
        let me = Rc::downgrade(self);
        move |to| {
            let Some(shared) = me.upgrade() else { return };
            let freed = shared.when_freed(node);
            let Some((slot, batch)) = shared.settles.next_batch(to, freed) else { return };
            rt::spawn(Queue::Consume, async move {
                let settles = batch.iter().flat_map(|queued| queued.settles.iter().copied()).collect();
                let until = batch.iter().map(|queued| queued.until).max().unwrap_or_default();
                let answer = shared.settle_now(node, batch[0].incarnation, settles, until, slot).await;
                hand_out(batch, answer);
            });
        }
    }

    async fn exchange(
        &self,
        node: NodeId,
        request: Request,
        kind: CallKind,
        budget: Duration,
        room: Option<Credit>,
    ) -> Result<Reply, Failure> {
        let found = self.address_of(node, &request);
        self.exchange_at(node, found, request, kind, budget, room).await
    }

    async fn exchange_at(
        &self,
        node: NodeId,
        found: Result<(ShardId, SocketAddr), Failure>,
        request: Request,
        kind: CallKind,
        budget: Duration,
        room: Option<Credit>,
    ) -> Result<Reply, Failure> {
        let started = rt::now();
        let count = |outcome| self.calls.borrow_mut().count(kind, outcome, rt::now() - started);
        let (shard, address) = found.inspect_err(|_| count(CallOutcome::Failed))?;
        let (destination, budget) = (partition_of(&request), budget.max(CALL_BUDGET_MIN));
        let settles = if let Request::Settle { settles, .. } = &request { settles.len() } else { 0 };
        let frame = wire::ask(&request, budget);
        let frame = frame.ok_or_else(|| Failure::NotSent(format!("{request:?} does not leave its node")))?;
        let commit = matches!(request, Request::Commit(_));
        // The frame holds on to the records of a commit.
        drop(request);
        let answered = match commit {
            true => self.commit(address, frame, budget, room).await,
            false => self.transport.call(address, frame).await,
        };
        let in_time = rt::now() - started < budget;
        match answered {
            Ok(incoming) => {
                count(outcome_of(&incoming));
                self.answered(node, (shard, destination, settles), &incoming)
            }
            Err(CallError::NotSent(text)) => {
                count(if in_time { CallOutcome::Failed } else { CallOutcome::Timeout });
                // Whoever comes back there may have other shards (E43).
                self.routes.borrow_mut().retain(|(other, _), _| *other != node);
                Err(Failure::NotSent(text))
            }
            Err(CallError::Unknown(text)) => {
                count(if in_time { CallOutcome::Error } else { CallOutcome::Timeout });
                Err(Failure::Unknown(text))
            }
        }
    }

    /// A commit goes on credit. What was taken at another shard, before its route changed, is no use here.
    async fn commit(
        &self,
        to: SocketAddr,
        frame: Outgoing,
        budget: Duration,
        room: Option<Credit>,
    ) -> Result<Incoming, CallError> {
        let deadline = rt::now() + budget;
        self.look_at_connection(to);
        let credit = match room.filter(|credit| credit.is_for(to)) {
            Some(credit) => Some(credit),
            None => self.credits.take(to, frame.frame_bytes() as u64, budget).await,
        };
        let Some(_credit) = credit else {
            return Err(CallError::NotSent("the owner granted no room for the commit in time".to_owned()));
        };
        let budget = (deadline - rt::now()).max(CALL_BUDGET_MIN);
        let answered = self.transport.call(to, Outgoing { budget, ..frame }).await;
        self.look_at_connection(to);
        if let Some(granted) = answered.as_ref().ok().map(|reply| reply.header.credit_bytes).filter(|bytes| *bytes > 0)
        {
            self.credits.granted(to, u64::from(granted));
        }
        answered
    }

    fn look_at_connection(&self, to: SocketAddr) {
        let granted = self.transport.hello_of(to).map_or(0, |hello| hello.commit_credit_bytes);
        self.credits.connected(to, self.transport.connection_to(to), u64::from(granted));
    }

    fn answered(
        &self,
        node: NodeId,
        (asked, destination, settles): (ShardId, Option<Destination>, usize),
        incoming: &Incoming,
    ) -> Result<Reply, Failure> {
        debug_assert_eq!(incoming.header.kind, Kind::Reply);
        match wire::answered(incoming) {
            Ok((served, reply)) => {
                if let (Some(destination), Some(served)) = (destination, served) {
                    self.learn(node, destination, asked, served, incoming.header.status);
                }
                match &reply {
                    Reply::Settled(statuses) if statuses.len() != settles => {
                        Err(Failure::Unknown(format!("{} answers to {settles} settles", statuses.len())))
                    }
                    _ => Ok(reply),
                }
            }
            // 503: the handler never began.
            Err(refusal) if refusal.status == status::UNAVAILABLE => Err(Failure::NotSent(refusal.to_string())),
            Err(refusal) => Err(Failure::Unknown(refusal.to_string())),
        }
    }

    fn learn(&self, node: NodeId, destination: Destination, asked: ShardId, served: ShardId, status: u16) {
        let mut routes = self.routes.borrow_mut();
        if status == status::MISDIRECTED {
            routes.remove(&(node, destination));
        } else if served != asked {
            if routes.len() >= ROUTES_MAX {
                routes.clear();
            }
            routes.insert((node, destination), served);
        }
    }
}

/// How a call ended that was answered.
fn outcome_of(incoming: &Incoming) -> CallOutcome {
    match incoming.header.status {
        status::OK | status::NOTHING => CallOutcome::Ok,
        _ => CallOutcome::Rejected,
    }
}

/// What a caller is told when there is no answer, in the terms of its own request.
fn failure_reply(request: &Request) -> impl FnOnce(Failure) -> Result<Reply, Lost> {
    enum Of {
        Commit,
        Produce,
        Consume,
        ReadAt,
        Register,
        Settle(usize),
        Other,
    }
    let of = match request {
        Request::Commit(_) => Of::Commit,
        Request::Produce { .. } => Of::Produce,
        Request::Claim { .. } | Request::Park { .. } | Request::NodeClaim { .. } => Of::Consume,
        Request::ReadAt { .. } => Of::ReadAt,
        Request::Register { .. } => Of::Register,
        Request::Settle { settles, .. } => Of::Settle(settles.len()),
        _ => Of::Other,
    };
    move |failure| {
        let consume = match failure {
            Failure::Dead => ConsumeError::OwnerDown,
            Failure::NotSent(_) | Failure::Unknown(_) => ConsumeError::Unreachable,
        };
        let settle = match failure {
            Failure::Dead | Failure::NotSent(_) => SettleStatus::OwnerDown,
            Failure::Unknown(_) => SettleStatus::Unanswered,
        };
        let text = match failure {
            Failure::Dead => "the node is dead, or not known here".to_owned(),
            Failure::NotSent(text) | Failure::Unknown(text) => text,
        };
        match of {
            Of::Commit => Ok(Reply::Commit(Err(CommitError::Unreachable(text)))),
            Of::Produce => Ok(Reply::Produced(Err(CommitError::Unreachable(text)))),
            Of::Consume => Ok(Reply::Deliveries(Err(consume))),
            Of::ReadAt => Ok(Reply::ReadAt(Err(consume))),
            Of::Register => Ok(Reply::Registered(Err(consume))),
            Of::Settle(count) => Ok(Reply::Settled(vec![settle; count])),
            Of::Other => Err(Lost(text)),
        }
    }
}
