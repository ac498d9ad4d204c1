//! The homes of topics on their shard: who waits here, whom to ask for records, and who of the other nodes waits.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::held::Held;
use super::home::{Brought, Claim, HomeTopic, Source};
use super::shard_queues::{answer_all, Home, ShardQueues};
use super::tokens::HOLD;
use super::topic::{pause_for_snapshot, serving_shards};
use crate::api::ConsumeError;
use crate::meta::{Address, Destination, Incarnation, NodeId, PeerBook, ShardId, Snapshot};
use crate::peer::{Reply, Request, Take, Token, WaiterId};
use crate::rt::sync::oneshot;
use crate::rt::{self, Queue};

/// How often the tokens that other nodes keep for waiters of this one are looked after (C50).
const KEEPER_INTERVAL: Duration = Duration::from_millis(500);
/// How long another node's claim may stand in line here (C54).
const NODE_CLAIM_PATIENCE: Duration = Duration::from_millis(400);

fn sources(snapshot: &Snapshot, peers: &PeerBook, incarnation: Incarnation) -> Vec<Source> {
    let shards = serving_shards(snapshot, incarnation).map(Source::Shard);
    let nodes = live_owners(snapshot, peers, incarnation).map(Source::Node);
    shards.chain(nodes).collect()
}

fn live_owners<'a>(
    snapshot: &Snapshot,
    peers: &'a PeerBook,
    incarnation: Incarnation,
) -> impl Iterator<Item = NodeId> + 'a {
    snapshot.remote_owners(incarnation).into_iter().filter(|node| peers.is_alive(*node))
}

impl ShardQueues {
    pub(super) async fn park(
        self: &Rc<Self>,
        waiter: WaiterId,
        incarnation: Incarnation,
        partition: Option<u32>,
        take: Take,
    ) -> Result<Held, ConsumeError> {
        let (reply, served) = oneshot();
        if self.stopping.get() {
            return Ok(Held::new(self.clone()));
        }
        match partition {
            Some(partition) => {
                let topic = self.topic(incarnation).ok_or(ConsumeError::TopicNotFound)?;
                let partition = topic.partition(partition).await?;
                if !self.stopping.get() {
                    partition.park(waiter, take, reply);
                }
            }
            None => {
                let home = self.home(incarnation).ok_or(ConsumeError::TopicNotFound)?;
                home.borrow_mut().park(waiter, take, reply, rt::now());
                self.run_home(incarnation, &home);
                self.keep_tokens(incarnation, &home);
            }
        }
        // An answer without content means that the waiter was let go by a stop.
        served.await.unwrap_or_else(|| Ok(Held::new(self.clone())))
    }

    pub(super) fn unpark(&self, waiter: WaiterId, incarnation: Incarnation, partition: Option<u32>) {
        let reply = match partition {
            Some(partition) => self
                .open_partition(Destination { incarnation, partition })
                .and_then(|partition| partition.unpark(waiter)),
            None => {
                let home = self.homes.borrow().get(&incarnation).cloned();
                home.and_then(|home| {
                    let reply = home.borrow_mut().unpark(waiter);
                    reply
                })
            }
        };
        answer_all(reply, Ok(()));
    }

    fn home(&self, incarnation: Incarnation) -> Option<Home> {
        if let Some(home) = self.homes.borrow().get(&incarnation) {
            return Some(home.clone());
        }
        let sources = self.with_snapshot(|snapshot| {
            snapshot.topic_of(incarnation)?;
            Some(sources(snapshot, &self.peers.borrow(), incarnation))
        })?;
        let home = Rc::new(RefCell::new(HomeTopic::new(sources)));
        self.homes.borrow_mut().insert(incarnation, home.clone());
        Some(home)
    }

    /// Waiters of topics that have gone are answered; the others are tried wherever the topic is served now.
    pub(super) fn follow_homes(&self, snapshot: &Snapshot) {
        let homes: Vec<(Incarnation, Home)> = self.homes.borrow().iter().map(|(i, h)| (*i, h.clone())).collect();
        for (incarnation, home) in homes {
            if snapshot.topic_of(incarnation).is_some() {
                home.borrow_mut().set_sources(sources(snapshot, &self.peers.borrow(), incarnation));
                self.run_home(incarnation, &home);
                self.keep_tokens(incarnation, &home);
            } else {
                self.homes.borrow_mut().remove(&incarnation);
                let waiters = home.borrow_mut().close();
                answer_all(waiters, Err(ConsumeError::TopicNotFound));
            }
        }
    }

    /// Sees the other nodes as this book does from now on.
    pub fn on_peers(&self, peers: Arc<PeerBook>) {
        self.peers.replace(peers);
        let snapshot = self.snapshot();
        self.follow_homes(&snapshot);
    }

    /// Other nodes that serve partitions of a topic and are alive.
    pub(super) fn live_owners(&self, incarnation: Incarnation) -> Vec<NodeId> {
        self.with_snapshot(|snapshot| live_owners(snapshot, &self.peers.borrow(), incarnation).collect())
    }

    /// Whether this shard is the topic's home and knows that `shard` has nothing.
    pub(super) fn is_known_empty(&self, incarnation: Incarnation, shard: ShardId) -> bool {
        self.homes.borrow().get(&incarnation).is_some_and(|home| home.borrow().is_armed(shard))
    }

    pub(super) fn available(&self, incarnation: Incarnation, source: Source) {
        let home = self.homes.borrow().get(&incarnation).cloned();
        if let Some(home) = home {
            home.borrow_mut().available(source);
            self.run_home(incarnation, &home);
        }
    }

    /// Spends this shard's token for the topic.
    pub(super) fn announce_to_home(&self, incarnation: Incarnation) {
        let home = self.with_snapshot(|snapshot| snapshot.home(incarnation));
        self.send(Address::local(home), Request::Available { incarnation, shard: self.shard() });
    }

    /// Starts every claim that the home's state calls for, lets probes go that have nothing left to try, and tells
    /// another node of what nobody here wants.
    fn run_home(&self, incarnation: Incarnation, home: &Home) {
        loop {
            let claim = home.borrow_mut().next_claim();
            let Some(claim) = claim else { break };
            rt::spawn(Queue::Consume, self.strong().claim_for(incarnation, home.clone(), claim));
        }
        let spent = home.borrow_mut().spent_probes();
        answer_all(spent, Ok(()));
        let told = {
            let peers = self.peers.borrow();
            home.borrow_mut().tell(rt::now(), |node| peers.is_alive(node))
        };
        if let Some(told) = told {
            let (node, boot_id, me) = (told.token.node, told.token.boot_id, self.peers.borrow().number);
            self.send(Address::remote(node), Request::NodeAvailable { incarnation, node: me, boot_id });
            let (this, home) = (self.strong(), home.clone());
            rt::spawn(Queue::Consume, async move {
                rt::sleep(HOLD).await;
                home.borrow_mut().told_lapsed(told.serial);
                this.run_home(incarnation, &home);
            });
        }
    }

    /// One claim on behalf of the waiter at the head.
    async fn claim_for(self: Rc<Self>, incarnation: Incarnation, home: Home, claim: Claim) {
        let result = loop {
            let call = match claim.source {
                Source::Shard(shard) => {
                    let request = Request::Claim { incarnation, partition: None, take: claim.take, arm: true };
                    self.call(Address::local(shard), request)
                }
                Source::Node(node) => {
                    let request = Request::NodeClaim { incarnation, take: claim.take, token: Some(self.token()) };
                    self.call(Address::remote(node), request)
                }
            };
            let result = self.deliveries_of(call).await;
            // The shard may not have the snapshot yet that this one has (E23 holds only for answered creates).
            let early = matches!(result, Err(ConsumeError::TopicNotFound)) && self.knows(incarnation);
            if !early || !home.borrow().wants(claim.waiter) {
                break result;
            }
            pause_for_snapshot().await;
        };
        let brought = match &result {
            Ok(held) if held.is_empty() => Brought::Nothing,
            Ok(held) if held.len() >= claim.take.max as usize => Brought::Full,
            Ok(_) => Brought::Short,
            Err(_) => Brought::Failed,
        };
        let reply = home.borrow_mut().claimed(&claim, brought, rt::now());
        match (reply, result) {
            // One that wanted to leave while a node did not answer goes with nothing.
            (Some(reply), Err(_)) if matches!(claim.source, Source::Node(_)) => answer_all([reply], Ok(())),
            // A receiver that has gone gives the deliveries back by dropping them.
            (Some(reply), result) => drop(reply.send(result)),
            (None, _) => {}
        }
        self.run_home(incarnation, &home);
    }

    // Waiters of this node, tokens on others.

    fn token(&self) -> Token {
        let peers = self.peers.borrow();
        Token { node: peers.number, boot_id: peers.boot_id }
    }

    /// While somebody waits, other owners hold a token of this node, or are asked to (C50).
    fn keep_tokens(&self, incarnation: Incarnation, home: &Home) {
        if !home.borrow_mut().start_keeping() {
            return;
        }
        let (this, home) = (self.strong(), home.clone());
        rt::spawn(Queue::Consume, async move {
            while home.borrow_mut().go_on_keeping() {
                let due = home.borrow_mut().due_registrations(rt::now());
                for node in due {
                    rt::spawn(Queue::Consume, this.clone().register_at(node, incarnation, home.clone()));
                }
                rt::sleep(KEEPER_INTERVAL).await;
            }
        });
    }

    async fn register_at(self: Rc<Self>, node: NodeId, incarnation: Incarnation, home: Home) {
        let seen = home.borrow().announcements(node);
        let request = Request::Register { incarnation, token: self.token() };
        let answer = match self.call(Address::remote(node), request).await {
            Ok(Reply::Registered(Ok(ready))) => Some(ready),
            _ => None,
        };
        home.borrow_mut().registered(node, answer, seen, rt::now());
        self.run_home(incarnation, &home);
    }

    /// A node where this one had left a token may have records.
    pub(super) fn node_available(&self, incarnation: Incarnation, node: NodeId, boot_id: u64) {
        if boot_id != self.peers.borrow().boot_id {
            return; // meant for a process that has gone
        }
        self.available(incarnation, Source::Node(node));
        let home = self.homes.borrow().get(&incarnation).cloned();
        if !home.is_some_and(|home| home.borrow().is_claiming(Source::Node(node))) {
            let me = self.peers.borrow().number;
            self.send(Address::remote(node), Request::Pass { incarnation, node: me });
        }
    }

    // Tokens of other nodes.

    /// What is ready on this node's shards, for another node; keeps its token if that is less than it asked for.
    pub(super) async fn claim_for_node(
        self: &Rc<Self>,
        incarnation: Incarnation,
        take: Take,
        token: Option<Token>,
    ) -> Result<Held, ConsumeError> {
        let home = self.home(incarnation).ok_or(ConsumeError::TopicNotFound)?;
        if self.stopping.get() {
            return Ok(Held::new(self.clone()));
        }
        if let Some(token) = token {
            home.borrow_mut().told_node_answered(token.node);
        }
        let (reply, mut served) = oneshot();
        let place = ProbePlace { home: home.clone(), waiter: self.next_waiter() };
        home.borrow_mut().park_probe(place.waiter, take, reply);
        self.run_home(incarnation, &home);
        let outcome = match rt::timeout(NODE_CLAIM_PATIENCE, &mut served).await {
            Ok(outcome) => outcome,
            Err(rt::Elapsed) => {
                drop(place);
                served.await
            }
        };
        // Without content: nothing is left to try, or its time was up.
        let held = outcome.unwrap_or_else(|| Ok(Held::new(self.clone())))?;
        if let Some(token) = token.filter(|_| held.len() < take.max as usize) {
            home.borrow_mut().register(token, rt::now());
            self.run_home(incarnation, &home);
        }
        Ok(held)
    }

    /// Keeps a token, unless there is something to come for.
    pub(super) fn register(&self, incarnation: Incarnation, token: Token) -> Result<bool, ConsumeError> {
        let home = self.home(incarnation).ok_or(ConsumeError::TopicNotFound)?;
        home.borrow_mut().told_node_answered(token.node);
        let ready = home.borrow().is_ready();
        if !ready {
            home.borrow_mut().register(token, rt::now());
        }
        Ok(ready)
    }

    pub(super) fn passed(&self, incarnation: Incarnation, node: NodeId) {
        let home = self.homes.borrow().get(&incarnation).cloned();
        if let Some(home) = home {
            home.borrow_mut().told_node_answered(node);
            self.run_home(incarnation, &home);
        }
    }
}

/// The place of another node's claim in a home's queue; left when the claim is cancelled.
struct ProbePlace {
    home: Home,
    waiter: WaiterId,
}

impl Drop for ProbePlace {
    fn drop(&mut self) {
        let reply = self.home.borrow_mut().unpark(self.waiter);
        answer_all(reply, Ok(()));
    }
}
