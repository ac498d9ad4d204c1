//! What the leader has to propose: a pure function of the state, of consensus and of time. No I/O, no clock.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use narad_shards::meta::NodeId;
use narad_shards::rt::Instant;

use crate::control::{Command, Member, Owners, State, View};

/// Silence after which a member is dead, and what a new leader gives every member (K25).
pub const DEAD_AFTER: Duration = Duration::from_secs(30);
/// A create waits that long for voters that have no member record yet, once a forming episode.
pub const FORMING_WAIT: Duration = Duration::from_secs(2);
/// After the last arrival, placement waits that long for the rest of the voters.
pub const SETTLE: Duration = Duration::from_secs(1);

/// Nodes in turn, by their number.
#[derive(Clone, Copy, Debug, Default)]
pub struct RoundRobin {
    last: NodeId,
}

impl RoundRobin {
    fn next(&mut self, receivers: &BTreeSet<NodeId>) -> Option<NodeId> {
        let behind = receivers.range((std::ops::Bound::Excluded(self.last), std::ops::Bound::Unbounded)).next();
        let next = behind.or(receivers.first()).copied()?;
        self.last = next;
        Some(next)
    }
}

fn receivers(state: &State) -> BTreeSet<NodeId> {
    state.members().values().filter(|member| member.receives()).map(|member| member.number).collect()
}

/// Verdicts that would have left too few voters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Breaker {
    pub refused: Vec<Arc<str>>,
    pub alive_voters_after: usize,
    pub quorum: usize,
    pub voters: usize,
}

/// What a leader remembers for as long as it leads.
#[derive(Debug, Default)]
pub struct Planner {
    /// The heartbeat of each member that was seen last, and when on this leader's own monotonic clock.
    heard: BTreeMap<Arc<str>, (u64, Instant)>,
    turn: RoundRobin,
    /// What the breaker refused in the last pass (K27).
    pub breaker: Option<Breaker>,
    /// Members seen alive, and when the last of them came.
    alive: BTreeSet<Arc<str>>,
    arrived: Option<Instant>,
    /// When the present forming episode began for the first create that met it.
    forming_since: Option<Instant>,
}

impl Planner {
    /// Of a leader that has just passed its barrier: every member gets a full [`DEAD_AFTER`] from `now` (K25).
    pub fn take_over(state: &State, now: Instant) -> Planner {
        let mut planner = Planner::default();
        planner.observe(state, now);
        planner.arrived = None; // the pass of the take-over places already
        planner
    }

    /// Takes note of heartbeats and arrivals since the last look.
    pub fn observe(&mut self, state: &State, now: Instant) {
        self.heard.retain(|node, _| state.members().contains_key(node));
        self.alive.retain(|node| state.members().get(node).is_some_and(|member| member.alive));
        for (node, member) in state.members() {
            match self.heard.get_mut(node) {
                Some(heard) if heard.0 == member.heartbeat_ms => {}
                Some(heard) => *heard = (member.heartbeat_ms, now),
                None => drop(self.heard.insert(node.clone(), (member.heartbeat_ms, now))),
            }
            if member.alive && self.alive.insert(node.clone()) {
                self.arrived = Some(now);
            }
        }
    }

    /// Whether members have arrived for whom a placement is due: at once when all voters are alive, else [`SETTLE`]
    /// after the last arrival.
    pub fn arrivals_are_due(&mut self, state: &State, view: &View, now: Instant) -> bool {
        let Some(arrived) = self.arrived else { return false };
        let all_alive = view.voters().all(|voter| state.members().get(&voter.node).is_some_and(|member| member.alive));
        let due = all_alive || now.saturating_since(arrived) >= SETTLE;
        if due {
            self.arrived = None;
        }
        due
    }

    /// Dead marks for members that were silent too long. A pass that would leave fewer voters alive than decide judges
    /// no voter: a leader that still leads hears a quorum, so the fault is its own (K27).
    pub fn judge(&mut self, state: &State, view: &View, now: Instant) -> Vec<Command> {
        let leader = view.server(view.raft_id).map(|server| server.node.clone());
        let is_silent = |member: &Member| {
            let heard = self.heard.get(member.node());
            heard.is_some_and(|(stamp, at)| *stamp == member.heartbeat_ms && now.saturating_since(*at) > DEAD_AFTER)
        };
        let candidates =
            state.members().values().filter(|member| member.alive && Some(member.node()) != leader.as_ref());
        let mut verdicts: Vec<&Arc<Member>> = candidates.filter(|member| is_silent(member)).collect();
        let judged = |node: &str| verdicts.iter().any(|member| &**member.node() == node);
        let is_alive = |node: &Arc<str>| {
            Some(node) == leader.as_ref() || (state.members().get(node).is_some_and(|m| m.alive) && !judged(node))
        };
        let left = view.voters().filter(|voter| is_alive(&voter.node)).count();
        let judges_voters = view.voters().any(|voter| judged(&voter.node));
        let opens = judges_voters && left < view.quorum();
        let is_voter = |member: &Arc<Member>| view.voters().any(|voter| voter.node == *member.node());
        self.breaker = opens.then(|| Breaker {
            refused: verdicts.iter().filter(|member| is_voter(member)).map(|member| member.node().clone()).collect(),
            alive_voters_after: left,
            quorum: view.quorum(),
            voters: view.voters().count(),
        });
        verdicts.retain(|member| !opens || !is_voter(member));
        let dead =
            |member: &Arc<Member>| Command::MarkDead { node: member.node().clone(), stamp_ms: member.heartbeat_ms };
        verdicts.into_iter().map(dead).collect()
    }

    /// Owners for partitions that have none; nothing when nobody can take one. Existing owners stay, dead or not (K7,
    /// K24).
    pub fn place(&mut self, state: &State) -> Vec<Command> {
        let receivers = receivers(state);
        let mut commands = Vec::new();
        for topic in state.topics().values() {
            let unowned = (0..topic.partitions).filter(|p| state.owner(topic.incarnation, *p).is_none());
            let owners: Vec<_> = unowned.map_while(|p| Some((p, self.turn.next(&receivers)?))).collect();
            if !owners.is_empty() {
                let (name, incarnation) = (topic.name.clone(), topic.incarnation);
                commands.push(Command::PlacePartitions { name, incarnation, owners: Arc::from(owners) });
            }
        }
        commands
    }

    /// The command with owners for the partitions that it brings.
    pub fn with_owners(&mut self, state: &State, command: Command) -> Command {
        let receivers = receivers(state);
        let mut owners =
            |count: u32| -> Owners { (0..count).map(|_| self.turn.next(&receivers).unwrap_or(NodeId::NONE)).collect() };
        match command {
            Command::CreateTopic { topic, .. } => {
                let owners = owners(topic.partitions);
                Command::CreateTopic { topic, owners }
            }
            Command::AlterTopic { name, incarnation, change, .. } => {
                let present = state.topic_of(incarnation).map_or(0, |topic| topic.partitions);
                let owners = owners(change.partitions.map_or(0, |partitions| partitions.saturating_sub(present)));
                Command::AlterTopic { name, incarnation, change, owners }
            }
            other => other,
        }
    }

    /// Until when a create waits for the rest of a cluster that is forming: some voters have a member record, some do
    /// not. `None`: it does not wait, because nothing is forming or this episode's wait is over.
    pub fn forming_until(&mut self, state: &State, view: &View, now: Instant) -> Option<Instant> {
        let known = view.voters().filter(|voter| state.members().contains_key(&voter.node)).count();
        if known == 0 || known == view.voters().count() {
            self.forming_since = None;
            return None;
        }
        let since = *self.forming_since.get_or_insert(now);
        let until = since + FORMING_WAIT;
        (now < until).then_some(until)
    }
}

/// Rows that name no partition.
pub fn prune(state: &State) -> Vec<Command> {
    let rows = state.assignments().iter().flat_map(|(id, rows)| rows.keys().map(|partition| (*id, *partition)));
    let is_live = |id, partition| state.topic_of(id).is_some_and(|topic| partition < topic.partitions);
    let orphans = rows.filter(|(id, partition)| !is_live(*id, *partition));
    orphans.map(|(incarnation, partition)| Command::PruneAssignment { incarnation, partition }).collect()
}
