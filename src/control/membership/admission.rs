//! What the leader answers to a join and to a forget, and what it does before it answers. Pure.

use std::time::Duration;

use narad_shards::rt::Instant;
use narad_shards::wire::status;

use super::gate;
use crate::control::consensus::heard::SILENCE;
use crate::control::{Command, Server, State, View};

/// A younger leader may not have seen its first failed heartbeat yet: it gives no vote and takes none away.
pub const LEADER_AGE: Duration = Duration::from_secs(12);
/// Of a founded log before its first election.
const FOUNDING_TERM: u64 = 1;
/// Bytes of a `host:port`.
const ADDRESS_BYTES_MAX: usize = 261;

/// What a node says when it asks to be let in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Join {
    pub node: String,
    pub raft_id: u64,
    /// `host:port`.
    pub peer_address: String,
    /// No store id existed at start (E50).
    pub empty_directory: bool,
    pub newest_command_type: u64,
    /// Only asks whether there is a cluster (K29).
    pub probe: bool,
    /// With a probe: the ids of those that may found the cluster, by this node's configuration.
    pub initial_members: Vec<String>,
}

/// One thing that the leader does, in order, each committed before the next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    Propose(Command),
    Remove(u64),
    AddLearner(Server),
    /// Gives a learner its vote; of a voter it changes the recorded address.
    Promote(Server),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// HTTP's vocabulary.
    pub status: u16,
    /// `staged`, `deferred`, `promoted`, `voter`, or the code of a refusal.
    pub word: String,
    pub reason: String,
    /// With 421: whom to ask. Either may be empty.
    pub leader_id: String,
    pub leader_address: String,
    /// Of a node that may found one: the ids of those that may, by its configuration.
    pub initial_members: Vec<String>,
}

impl Answer {
    fn new(status: u16, word: &str, reason: impl Into<String>) -> Answer {
        Answer { status, word: word.to_owned(), reason: reason.into(), ..Answer::default() }
    }
}

/// Whether `text` is a `host:port` that can be asked.
pub fn is_address(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    text.len() <= ADDRESS_BYTES_MAX && !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port != 0)
}

/// Steps and, once they are done, the answer.
pub fn admit(join: &Join, state: &State, view: &View, now: Instant) -> (Vec<Step>, Answer) {
    let only = |answer: Answer| (Vec::new(), answer);
    if join.node.is_empty() || !is_address(&join.peer_address) || (join.raft_id == 0 && !join.probe) {
        let why = "a join needs the node's id, its host:port and the id of its consensus directory";
        return only(Answer::new(status::BAD_REQUEST, "bad_request", why));
    }
    if view.servers.is_empty() {
        return only(Answer::new(status::PRECONDITION_FAILED, "unconfigured", "this node is in no cluster"));
    }
    if join.probe && view.leader.is_none() && view.term <= FOUNDING_TERM {
        // It has voted for nobody and nobody has voted for it: who is asked next may still found the same cluster, and has
        // to, or no majority ever comes together.
        let why = "this node has founded a cluster that has had no leader yet";
        // With the list that it was founded by: whoever asks with another one must not count it among its own.
        let initial_members = view.servers.iter().map(|server| server.node.to_string()).collect();
        return only(Answer { initial_members, ..Answer::new(status::PRECONDITION_FAILED, "founding", why) });
    }
    if !view.leads {
        let leader = view.leader.and_then(|leader| view.server(leader));
        let answer = Answer::new(status::MISDIRECTED, "not_leader", "this node does not lead");
        return only(match leader {
            Some(leader) => {
                Answer { leader_id: leader.node.to_string(), leader_address: reachable(state, view, leader), ..answer }
            }
            None => answer,
        });
    }
    let has_tombstone = state.removed_members().contains_key(join.node.as_str());
    if has_tombstone && !join.empty_directory {
        let why = format!(
            "{:?} was removed from this cluster: scale it away, or empty its data directory to let it in as a new node",
            join.node
        );
        return only(Answer::new(status::CONFLICT, "decommissioned", why));
    }
    if join.probe {
        return only(Answer::new(status::OK, "configured", "this node leads a cluster"));
    }
    let asked = Server {
        raft_id: join.raft_id,
        node: join.node.as_str().into(),
        address: join.peer_address.as_str().into(),
        voter: false,
    };
    if let Some(server) = view.server(join.raft_id) {
        if *server.node != *join.node {
            let why = format!("{:?} has the consensus directory of {:?}: it is a copy", join.node, &*server.node);
            return only(Answer::new(status::CONFLICT, "copied_directory", why));
        }
        return readmit(server, asked, state, view, now);
    }
    let least = gate::least_command_type(state);
    if join.newest_command_type < least {
        let why = format!(
            "the build of {:?} applies command types up to {}, this cluster needs {least}: upgrade it",
            join.node, join.newest_command_type
        );
        return only(Answer::new(status::CONFLICT, "older_release", why));
    }
    let mut steps = Vec::new();
    if has_tombstone {
        steps.push(Step::Propose(Command::ClearTombstone { node: join.node.as_str().into() }));
    }
    // Another directory under a known name: the old one's id goes first, for it may have voted (E36).
    if let Some(former) = view.server_named(&join.node) {
        if !is_gone(former, state, view) {
            let why = format!(
                "the node with the id {:?} answers at {}, or did a moment ago: give each node an id of its own; one that \
                 was stopped and comes back on an empty disk is let in {} s after it was last heard",
                join.node,
                reachable(state, view, former),
                SILENCE.as_secs()
            );
            return only(Answer::new(status::UNAVAILABLE, "id_in_use", why));
        }
        if former.voter {
            if let Err(why) = may_lose_voter(former, view, now) {
                return only(Answer::new(status::UNAVAILABLE, "no_healthy_majority", why));
            }
        }
        steps.push(Step::Remove(former.raft_id));
    }
    steps.push(Step::AddLearner(asked));
    (steps, Answer::new(status::OK, "staged", ""))
}

/// Where a server is: where it was heard, else what its member record says, else what it advertised first (5.5).
pub fn reachable(state: &State, view: &View, server: &Server) -> String {
    let told = state.members().get(&server.node).map(|member| &member.registration.peer_address);
    view.heard_at.get(&server.raft_id).or(told).unwrap_or(&server.address).to_string()
}

/// Whether a server may be taken to be gone, so that another directory or another address takes its place: it does not
/// answer, and that for as long as it takes to mark a member dead. A pause is no proof. One that never became a member
/// holds nothing that a mistake could cost.
fn is_gone(server: &Server, state: &State, view: &View) -> bool {
    let is_member_alive = state.members().get(&server.node).is_some_and(|member| member.alive);
    server.raft_id != view.raft_id
        && view.failing.contains(&server.raft_id)
        && (!is_member_alive || view.gone.contains(&server.raft_id))
}

/// A join may be repeated freely: of a server in the configuration it changes the address and, when everything speaks
/// for it, gives a learner its vote (K31, K32).
fn readmit(server: &Server, asked: Server, state: &State, view: &View, now: Instant) -> (Vec<Step>, Answer) {
    let moved = server.address != asked.address;
    // Who leads is here, whatever is said in its name.
    let is_there = server.raft_id != view.raft_id && view.heard_at.get(&server.raft_id) == Some(&asked.address);
    if moved && !is_there && !is_gone(server, state, view) {
        let why = format!(
            "the data directory of {:?} is in use at {}, and {} has a copy of it: stop one of the two; a node that has \
             moved is let in {} s after it was last heard at its former address",
            &*server.node,
            reachable(state, view, server),
            asked.address,
            SILENCE.as_secs()
        );
        return (Vec::new(), Answer::new(status::CONFLICT, "copied_directory", why));
    }
    if server.voter {
        let steps = moved.then_some(Step::Promote(Server { voter: true, ..asked }));
        return (steps.into_iter().collect(), Answer::new(status::OK, "voter", ""));
    }
    let reason = match state.members().get(&server.node) {
        _ if now.saturating_since(view.since) < LEADER_AGE => Some("the leader is too young to judge"),
        _ if view.failing.contains(&server.raft_id) => Some("the leader's heartbeats to it fail"),
        None => Some("it has no member record yet"),
        Some(member) if !member.alive => Some("its member record says dead"),
        Some(member) if member.draining => Some("it is draining"),
        Some(_) => None,
    };
    match reason {
        Some(reason) => {
            let steps = moved.then_some(Step::AddLearner(asked));
            (steps.into_iter().collect(), Answer::new(status::OK, "deferred", reason))
        }
        None => (vec![Step::Promote(Server { voter: true, ..asked })], Answer::new(status::OK, "promoted", "")),
    }
}

/// Whether the voters that are left without `voter` have a reachable majority.
fn may_lose_voter(voter: &Server, view: &View, now: Instant) -> Result<(), String> {
    if now.saturating_since(view.since) < LEADER_AGE {
        return Err(format!("the leader has led for less than {} s: try again", LEADER_AGE.as_secs()));
    }
    let rest: Vec<&Server> = view.voters().filter(|other| other.raft_id != voter.raft_id).collect();
    let (unreachable, reachable): (Vec<&Server>, Vec<&Server>) =
        rest.iter().partition(|other| other.raft_id != view.raft_id && view.failing.contains(&other.raft_id));
    if reachable.len() > rest.len() / 2 {
        return Ok(());
    }
    let names: Vec<&str> = unreachable.iter().map(|server| &*server.node).collect();
    Err(format!("without it the voters would have no reachable majority; unreachable are: {}", names.join(", ")))
}

/// The server to remove from consensus: one that has no member record (a joiner that never came up). Moves and deletes
/// no data. `Err`: status and reason.
pub fn forget(node: &str, state: &State, view: &View, now: Instant) -> Result<Server, (u16, String)> {
    if !view.leads {
        return Err((status::MISDIRECTED, "this node does not lead".to_owned()));
    }
    let conflict = |why: String| Err((status::CONFLICT, why));
    let Some(server) = view.server_named(node) else {
        return Err((status::NOT_FOUND, format!("there is no server {node:?} in consensus")));
    };
    if server.raft_id == view.raft_id {
        return Err((status::BAD_REQUEST, format!("{node:?} leads: it cannot forget itself")));
    }
    if state.members().contains_key(node) {
        return conflict(format!("{node:?} has a member record: taking a member out is not built yet; bring {node:?} back, on an empty disk if need be"));
    }
    let number = state.removed_members().get(node);
    let owns = |number| state.assignments().values().any(|rows| rows.values().any(|owner| owner == number));
    if number.is_some_and(owns) {
        return conflict(format!("{node:?} owns partitions"));
    }
    if server.voter {
        may_lose_voter(server, view, now).or_else(conflict_of)?;
    }
    Ok(server.clone())
}

fn conflict_of(why: String) -> Result<(), (u16, String)> {
    Err((status::CONFLICT, why))
}
