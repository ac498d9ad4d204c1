//! The shared queue of one topic's unpinned waiters on this node (E53, C28-C32, C40): a pure state machine.
//!
//! It lives on the topic's home shard and never looks into a partition. Its sources are the shards of this node that
//! serve partitions of the topic, and the other nodes that own some. Of each it knows one thing: *ready* ones may have
//! records, *armed* ones had none and will say so once when that changes. A claim is made for one waiter at a time, the
//! first that is not being tried elsewhere, so a record is never reserved without somebody to take it (C14), and a
//! commit costs the same however many consumers are parked (C29). Shards are asked before nodes (C41).
//!
//! No wake is lost: a shard arms in the same turn in which it finds itself empty, and an announcement that overtakes
//! the answer of a claim is remembered (lesson N33.1). Announcements of a node may be lost with a connection, and what it
//! keeps for us ends by time: so it is asked again while anybody waits ([`HomeTopic::due_registrations`]). A node that does not
//! answer rests: no waiter is tried on it before it has answered such a question (a hung owner delays nobody).
//!
//! The other side of the same: nodes that wait for records of this one. A probe of theirs stands in the queue like a
//! waiter, but is tried on shards only, and let go as soon as all of them have armed; then their token is kept
//! ([`super::tokens`]). Waiters of this node come first (G13).

use std::collections::{BTreeMap, VecDeque};

use super::tokens::{Tokens, Told, TOKEN_TTL};
use super::waiters::Waiters;
use crate::meta::{NodeId, ShardId};
use crate::peer::{Take, Token, WaiterId};
use crate::rt::Instant;

/// Claims that may be under way on one node: one round trip each, so that many waiters need not stand in line for it.
const NODE_CLAIMS_MAX: u32 = 32;
/// A token of ours is renewed when it has less than this left: what was announced and lost is found by then.
const RENEW_BEFORE: std::time::Duration = std::time::Duration::from_secs(1);
const FOR_EVER: Instant = Instant(u64::MAX);

/// Where records may come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    Shard(ShardId),
    Node(NodeId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Ready,
    /// A shard keeps our token until it is spent, a node until then.
    Armed {
        until: Instant,
    },
    /// A node that did not answer.
    Resting,
}

#[derive(Clone, Copy, Debug)]
struct State {
    phase: Phase,
    /// Under way, and how many may be: one until an answer was full, then more and more (nodes only).
    claims: u32,
    claims_max: u32,
    announcements: u64,
    /// In a queue of ready sources.
    listed: bool,
    registering: bool,
}

/// Ask `source` on behalf of `waiter`, and let it arm if it has less than `take`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    pub source: Source,
    pub waiter: WaiterId,
    pub take: Take,
    /// Announcements of the source until then: a later one may be newer than the answer.
    seen: u64,
}

/// What a claim came back with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Brought {
    /// As much as was asked for: the source may have more, and has not armed.
    Full,
    /// Less than was asked for: the source has armed.
    Short,
    /// Nothing: the source has armed.
    Nothing,
    /// No answer, or an error: the source has not armed.
    Failed,
}

/// `R` is what a waiter is answered through.
pub struct HomeTopic<R> {
    waiters: Waiters<R>,
    sources: BTreeMap<Source, State>,
    /// Ready sources in the order in which they are asked: who was asked goes to the end (G14). May hold sources that
    /// are no longer ready.
    ready_shards: VecDeque<Source>,
    ready_nodes: VecDeque<Source>,
    nodes: usize,
    /// What other nodes have left here.
    tokens: Tokens,
    keeping: bool,
    closed: bool,
}

impl<R> HomeTopic<R> {
    /// Nothing is known of the sources yet, so all count as ready.
    pub fn new(sources: impl IntoIterator<Item = Source>) -> HomeTopic<R> {
        let mut home = HomeTopic {
            waiters: Waiters::default(),
            sources: BTreeMap::new(),
            ready_shards: VecDeque::new(),
            ready_nodes: VecDeque::new(),
            nodes: 0,
            tokens: Tokens::default(),
            keeping: false,
            closed: false,
        };
        home.set_sources(sources);
        home
    }

    /// Parked waiters of this node, those being tried included.
    pub fn parked(&self) -> usize {
        self.waiters.len() - self.waiters.probes()
    }

    /// Follows a new placement, or membership (C34).
    pub fn set_sources(&mut self, sources: impl IntoIterator<Item = Source>) {
        let mut previous = std::mem::take(&mut self.sources);
        self.nodes = 0;
        for source in sources {
            self.nodes += usize::from(matches!(source, Source::Node(_)));
            match previous.remove(&source) {
                Some(state) => drop(self.sources.insert(source, state)),
                None => {
                    let (claims, claims_max, announcements) = (0, 1, 0);
                    let (phase, listed, registering) = (Phase::Ready, false, false);
                    let state = State { phase, claims, claims_max, announcements, listed, registering };
                    self.sources.insert(source, state);
                    self.list(source);
                }
            }
        }
    }

    fn list(&mut self, source: Source) {
        let Some(state) = self.sources.get_mut(&source) else { return };
        if !std::mem::replace(&mut state.listed, true) {
            match source {
                Source::Shard(_) => self.ready_shards.push_back(source),
                Source::Node(_) => self.ready_nodes.push_back(source),
            }
        }
    }

    pub fn park(&mut self, waiter: WaiterId, take: Take, reply: R, now: Instant) {
        self.waiters.push(waiter, take, reply);
        if self.nodes == 0 {
            return;
        }
        // What a node kept for us while nobody waited here is gone by now.
        let lapsed = |state: &State| matches!(state.phase, Phase::Armed { until } if until <= now);
        let lapsed: Vec<Source> = self.sources.iter().filter(|(_, s)| lapsed(s)).map(|(source, _)| *source).collect();
        lapsed.into_iter().for_each(|source| self.make_ready(source));
    }

    /// Another node asks what there is here.
    pub fn park_probe(&mut self, waiter: WaiterId, take: Take, reply: R) {
        self.waiters.push_probe(waiter, take, reply);
    }

    /// The waiter has timed out or gone; returned when it is to be answered now.
    pub fn unpark(&mut self, waiter: WaiterId) -> Option<R> {
        self.waiters.leave(waiter)
    }

    /// Whether a claim for this waiter is still worth its while.
    pub fn wants(&self, waiter: WaiterId) -> bool {
        !self.closed && self.waiters.wants(waiter)
    }

    /// Whether the shard has said that it has nothing, and not taken it back.
    pub fn is_armed(&self, shard: ShardId) -> bool {
        let state = self.sources.get(&Source::Shard(shard));
        state.is_some_and(|state| state.claims == 0 && matches!(state.phase, Phase::Armed { .. }))
    }

    fn make_ready(&mut self, source: Source) {
        if let Some(state) = self.sources.get_mut(&source) {
            state.phase = Phase::Ready;
            self.list(source);
        }
    }

    /// The source has spent our token: it may have records.
    pub fn available(&mut self, source: Source) {
        let Some(state) = self.sources.get_mut(&source) else { return };
        state.announcements += 1;
        // While a claim is under way its answer says more, unless this is newer: then the count tells.
        if state.phase != Phase::Ready && state.claims == 0 {
            self.make_ready(source);
        }
    }

    /// The next claim to make, if there is a waiter and a source for it. To be called until it returns `None` after
    /// every other input.
    pub fn next_claim(&mut self) -> Option<Claim> {
        if self.closed || !self.waiters.has_idle() {
            return None;
        }
        let (source, (waiter, take)) = match Self::take_up(&mut self.ready_shards, &mut self.sources) {
            Some(shard) => (shard, self.waiters.pick()?),
            None if !self.waiters.has_idle_beside_probes() => return None,
            None => {
                let node = Self::take_up(&mut self.ready_nodes, &mut self.sources)?;
                (node, self.waiters.pick_beside_probes()?)
            }
        };
        let state = self.sources.get_mut(&source)?;
        state.claims += 1;
        let (seen, more) = (state.announcements, state.claims < state.claims_max);
        if more {
            self.list(source);
        }
        Some(Claim { source, waiter, take, seen })
    }

    fn take_up(ready: &mut VecDeque<Source>, sources: &mut BTreeMap<Source, State>) -> Option<Source> {
        while let Some(source) = ready.pop_front() {
            let Some(state) = sources.get_mut(&source) else { continue };
            state.listed = false;
            if state.phase == Phase::Ready && state.claims < state.claims_max {
                return Some(source);
            }
        }
        None
    }

    /// A claim has ended. Returns the waiter if it is to be answered with what the claim brought; otherwise it waits
    /// on at its place (C32).
    pub fn claimed(&mut self, claim: &Claim, brought: Brought, now: Instant) -> Option<R> {
        let far = matches!(claim.source, Source::Node(_));
        if let Some(state) = self.sources.get_mut(&claim.source) {
            state.claims = state.claims.saturating_sub(1);
            state.claims_max = match brought {
                Brought::Full if far => (2 * state.claims_max).min(NODE_CLAIMS_MAX),
                _ => 1,
            };
            let announced = state.announcements > claim.seen;
            let until = if far { now + TOKEN_TTL } else { FOR_EVER };
            state.phase = match brought {
                Brought::Failed if far => Phase::Resting,
                Brought::Short | Brought::Nothing if !announced => Phase::Armed { until },
                _ => Phase::Ready,
            };
            if state.phase == Phase::Ready {
                self.list(claim.source);
            }
        }
        match brought {
            Brought::Nothing => self.waiters.put_back(claim.waiter),
            // The waiter may still be served by another source.
            Brought::Failed if far => self.waiters.put_back(claim.waiter),
            Brought::Full | Brought::Short | Brought::Failed => self.waiters.served(claim.waiter),
        }
    }

    /// Whether a claim of this source is under way.
    pub fn is_claiming(&self, source: Source) -> bool {
        self.sources.get(&source).is_some_and(|state| state.claims > 0)
    }

    // What other nodes keep for us.

    /// Whether somebody has to look after our tokens from now on, who has not yet. To be called after `park`.
    pub fn start_keeping(&mut self) -> bool {
        let needed = self.nodes > 0 && self.parked() > 0 && !self.closed;
        needed && !std::mem::replace(&mut self.keeping, true)
    }

    /// Whether to go on with it: as long as somebody waits here.
    pub fn go_on_keeping(&mut self) -> bool {
        self.keeping = self.nodes > 0 && self.parked() > 0 && !self.closed;
        self.keeping
    }

    /// Nodes that have to be asked to keep our token, again or at last: answer each with [`registered`](Self::registered).
    pub fn due_registrations(&mut self, now: Instant) -> Vec<NodeId> {
        let due = |state: &State| match state.phase {
            Phase::Ready => false,
            Phase::Armed { until } => until <= now + RENEW_BEFORE,
            Phase::Resting => true,
        };
        let mut nodes = Vec::new();
        for (source, state) in &mut self.sources {
            let Source::Node(node) = source else { continue };
            if state.claims == 0 && due(state) && !std::mem::replace(&mut state.registering, true) {
                nodes.push(*node);
            }
        }
        nodes
    }

    /// `Some(true)`: records may be there. `Some(false)`: the token is kept. `None`: no answer.
    pub fn registered(&mut self, node: NodeId, answer: Option<bool>, seen: u64, now: Instant) {
        let source = Source::Node(node);
        let Some(state) = self.sources.get_mut(&source) else { return };
        state.registering = false;
        if state.claims > 0 || state.phase == Phase::Ready {
            return; // a claim says more
        }
        match answer {
            Some(false) if state.announcements == seen => state.phase = Phase::Armed { until: now + TOKEN_TTL },
            Some(_) => self.make_ready(source),
            None => state.phase = Phase::Resting,
        }
    }

    /// Announcements of a node so far.
    pub fn announcements(&self, node: NodeId) -> u64 {
        self.sources.get(&Source::Node(node)).map_or(0, |state| state.announcements)
    }

    // What we keep for other nodes.

    /// Probes that nothing is left for: every shard has said that it has nothing.
    pub fn spent_probes(&mut self) -> Vec<R> {
        let asked = |(source, state): (&Source, &State)| match source {
            Source::Shard(_) => state.claims == 0 && matches!(state.phase, Phase::Armed { .. }),
            Source::Node(_) => true,
        };
        match self.waiters.probes() > 0 && self.sources.iter().all(asked) {
            true => self.waiters.drain_idle_probes(),
            false => Vec::new(),
        }
    }

    /// Whether a shard may have records that nobody is being tried on.
    pub fn is_ready(&self) -> bool {
        let ready = |(source, state): (&Source, &State)| {
            matches!(source, Source::Shard(_)) && state.phase == Phase::Ready && state.claims == 0
        };
        self.sources.iter().any(ready)
    }

    pub fn register(&mut self, token: Token, now: Instant) {
        self.tokens.register(token, now);
    }

    /// The node has come, or nobody waits there any more.
    pub fn told_node_answered(&mut self, node: NodeId) {
        self.tokens.answered(node);
    }

    pub fn told_lapsed(&mut self, serial: u64) {
        self.tokens.lapsed(serial);
    }

    /// Whom to tell that records may be here: nobody while somebody of this node wants them.
    pub fn tell(&mut self, now: Instant, alive: impl Fn(NodeId) -> bool) -> Option<Told> {
        if self.tokens.is_empty() || self.closed || self.waiters.has_idle() || !self.is_ready() {
            return None;
        }
        self.tokens.tell(now, alive)
    }

    /// The topic has gone or the shard stops: no more claims. Returns whom to answer now; those being tried are
    /// answered when their claims end (N36, C37).
    pub fn close(&mut self) -> Vec<R> {
        self.closed = true;
        self.waiters.drain_idle()
    }
}

#[cfg(test)]
#[path = "home_tests.rs"]
mod tests;
