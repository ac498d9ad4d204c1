//! Whom a node asks to be let in, and what it makes of the answers. Pure.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use narad_shards::wire::status;

use super::admission::{is_address, Answer};

/// Hints that one attempt follows.
const HINTS_MAX: usize = 4;
/// Leader addresses that are remembered, newest first.
const REMEMBERED_MAX: usize = 8;
/// Rounds of the probe for an existing cluster.
pub const PROBE_ROUNDS: usize = 3;
/// Ids of one list that a log line shows.
const SHOWN_MAX: usize = 9;

/// Addresses to ask: those of the configuration, and leaders that were named before.
#[derive(Clone, Debug, Default)]
pub struct JoinTargets {
    peers: Vec<String>,
    leaders: VecDeque<String>,
}

impl JoinTargets {
    pub fn new(peers: Vec<String>) -> JoinTargets {
        JoinTargets { peers, leaders: VecDeque::new() }
    }

    /// Leaders first, each address once.
    pub fn sweep(&self) -> Vec<String> {
        let mut targets: Vec<String> = Vec::new();
        for address in self.leaders.iter().chain(&self.peers) {
            if !targets.contains(address) {
                targets.push(address.clone());
            }
        }
        targets
    }

    fn remember(&mut self, leader: &str) {
        self.leaders.retain(|known| known != leader);
        self.leaders.push_front(leader.to_owned());
        self.leaders.truncate(REMEMBERED_MAX);
    }
}

/// One attempt: an address, then the hints that it leads to.
#[derive(Debug)]
pub struct Attempt {
    asked: Vec<String>,
}

/// What follows from an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Ask this address in the same attempt.
    Ask(String),
    /// A leader has taken the node in or knows it. Only its own consensus proves admission (K30).
    Accepted(Answer),
    /// The leader will not have it; the node keeps asking, and says why once.
    Refused(Answer),
    /// Nothing to be learned here.
    Elsewhere,
}

impl Attempt {
    pub fn at(address: &str) -> Attempt {
        Attempt { asked: vec![address.to_owned()] }
    }

    pub fn follow(&mut self, targets: &mut JoinTargets, answer: Answer) -> Next {
        match answer.status {
            status::OK => {
                if let Some(leader) = self.asked.last() {
                    targets.remember(leader);
                }
                Next::Accepted(answer)
            }
            status::MISDIRECTED => {
                let hint = answer.leader_address;
                if !is_address(&hint) || self.asked.contains(&hint) || self.asked.len() > HINTS_MAX {
                    return Next::Elsewhere;
                }
                targets.remember(&hint);
                self.asked.push(hint.clone());
                Next::Ask(hint)
            }
            status::CONFLICT | status::BAD_REQUEST | status::UNAVAILABLE => Next::Refused(answer),
            _ => Next::Elsewhere,
        }
    }
}

/// What an initial member with an empty directory does (K29, E36).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// There is a cluster, or the node is none of those that may begin one.
    JoinOnly,
    /// A majority of the initial members, this one included, has never held a configuration.
    Bootstrap,
    /// Too few have answered to know.
    AskAgain,
}

/// Folds the statuses that the other initial members (and other peers) have answered by now; `None` means that one has
/// not answered. `lists`: the initial members by the configuration of others. As long as one differs nobody founds: two
/// lists are two sets of voters under the same ids.
pub fn start(
    me: &str,
    initial_members: &[String],
    answers: &BTreeMap<String, Option<u16>>,
    lists: &BTreeMap<String, Vec<String>>,
    rounds: usize,
) -> Start {
    let is_configured = |status: &u16| matches!(*status, status::OK | status::MISDIRECTED | status::CONFLICT);
    if !initial_members.iter().any(|member| member == me) || answers.values().flatten().any(is_configured) {
        return Start::JoinOnly;
    }
    let declared =
        |member: &&String| member.as_str() == me || answers.get(*member) == Some(&Some(status::PRECONDITION_FAILED));
    let declared = initial_members.iter().filter(declared).count();
    let is_agreed = unequal(initial_members, lists).is_empty();
    match declared > initial_members.len() / 2 && rounds >= PROBE_ROUNDS && is_agreed {
        true => Start::Bootstrap,
        false => Start::AskAgain,
    }
}

/// Who has other initial members, with both lists in words: all of them when they are few, else those that only one side
/// has. The order does not matter. A node that names none says nothing.
pub fn unequal(initial_members: &[String], lists: &BTreeMap<String, Vec<String>>) -> Vec<Unequal> {
    let ours: BTreeSet<&str> = initial_members.iter().map(String::as_str).collect();
    let compared = lists.iter().filter(|(_, list)| !list.is_empty()).filter_map(|(node, list)| {
        let theirs: BTreeSet<&str> = list.iter().map(String::as_str).collect();
        (ours != theirs).then(|| Unequal {
            node: node.clone(),
            here: shown(&ours, &theirs),
            there: shown(&theirs, &ours),
        })
    });
    compared.collect()
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unequal {
    pub node: String,
    pub here: String,
    pub there: String,
}

fn shown(list: &BTreeSet<&str>, other: &BTreeSet<&str>) -> String {
    if list.len() <= SHOWN_MAX {
        return list.iter().copied().collect::<Vec<_>>().join(",");
    }
    let only: Vec<&str> = list.difference(other).copied().take(SHOWN_MAX).collect();
    format!("{} ids, only there: {}", list.len(), if only.is_empty() { "none".to_owned() } else { only.join(",") })
}
