//! What a command does to the state: a pure function, the same on every node (K4). A refusal counts as applied (K5).

use std::sync::Arc;

use narad_shards::api::TopicChange;
use narad_shards::meta::{Incarnation, NodeId, TopicMeta};

use super::command::{Command, Registration};
use super::names::{check_topic_name, PARTITIONS_MAX};
use super::state::{Change, Member, State};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Created(Arc<TopicMeta>),
    Deleted(Arc<TopicMeta>),
    Altered(Arc<TopicMeta>),
    Registered(Arc<Member>),
    /// A command of the cluster's own housekeeping holds now.
    Done,
    Refused(Refusal),
}

/// Why an entry changed nothing (K5, K14).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    Exists,
    CaseCollision {
        existing: Arc<str>,
    },
    NotFound,
    /// The live topic is another incarnation than the one that was checked.
    Changed,
    /// The topic has that many partitions already.
    NotMore {
        partitions: u32,
    },
    /// The proposer drew an incarnation id that a live topic has.
    IdTaken,
    Invalid(String),
    /// The partition has an owner (K7).
    Owned {
        partition: u32,
    },
    OutOfRange {
        partition: u32,
    },
    /// The assignment row names a live partition.
    Live,
    NoSuchMember,
    /// The id was removed from the cluster (K33).
    Tombstoned,
    /// The member has sent another heartbeat than the one that was judged (K26).
    HeardSince,
    OwnsPartitions,
    HasClusterId(u64),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    pub outcome: Outcome,
    pub changes: Vec<Change>,
}

/// What `command` does to `state`.
pub fn apply(state: &State, command: &Command) -> Applied {
    decide(state, command).unwrap_or_else(|refusal| Applied { outcome: Outcome::Refused(refusal), changes: Vec::new() })
}

fn decide(state: &State, command: &Command) -> Result<Applied, Refusal> {
    match command {
        Command::CreateTopic { topic, owners } => create(state, topic, owners),
        Command::DeleteTopic { name, incarnation } => {
            let live = live(state, name, *incarnation)?;
            let changes = vec![Change::RemoveTopic(live.name.clone()), Change::RemoveOwners(*incarnation)];
            Ok(Applied { outcome: Outcome::Deleted(live.clone()), changes })
        }
        Command::AlterTopic { name, incarnation, change, owners } => {
            let live = live(state, name, *incarnation)?;
            let topic = Arc::new(alter(live, change)?);
            let mut changes = vec![Change::PutTopic(topic.clone())];
            // Chosen for the last partitions: a change in between may have brought some of them, with owners.
            let first = topic.partitions.saturating_sub(owners.len() as u32);
            let new = (first..topic.partitions).zip(owners.iter().copied());
            changes.extend(put_owners(state, *incarnation, new.filter(|(partition, _)| *partition >= live.partitions)));
            Ok(Applied { outcome: Outcome::Altered(topic), changes })
        }
        Command::PlacePartitions { name, incarnation, owners } => place(state, name, *incarnation, owners),
        Command::PruneAssignment { incarnation, partition } => {
            if state.topic_of(*incarnation).is_some_and(|topic| *partition < topic.partitions) {
                return Err(Refusal::Live);
            }
            let exists = state.owner(*incarnation, *partition).is_some();
            let row = Change::RemoveOwner { incarnation: *incarnation, partition: *partition };
            Ok(done(exists.then_some(row)))
        }
        Command::RegisterMember { registration, stamp_ms } => register(state, registration, *stamp_ms),
        Command::MarkDead { node, stamp_ms } => {
            let member = state.members().get(node).ok_or(Refusal::NoSuchMember)?;
            if member.heartbeat_ms != *stamp_ms {
                return Err(Refusal::HeardSince);
            }
            let dead = Arc::new(Member { alive: false, ..(**member).clone() });
            Ok(done(member.alive.then_some(Change::PutMember(dead))))
        }
        Command::RemoveMember { node } => {
            let member = state.members().get(node).ok_or(Refusal::NoSuchMember)?;
            if state.assignments().values().any(|owners| owners.values().any(|owner| *owner == member.number)) {
                return Err(Refusal::OwnsPartitions);
            }
            let tombstone = Change::PutTombstone { node: node.clone(), number: member.number };
            Ok(done([Change::RemoveMember(node.clone()), tombstone]))
        }
        Command::ClearTombstone { node } => {
            let exists = state.removed_members().contains_key(node);
            Ok(done(exists.then(|| Change::RemoveTombstone(node.clone()))))
        }
        Command::SetClusterId(id) => found(state, *id),
    }
}

fn done(changes: impl IntoIterator<Item = Change>) -> Applied {
    Applied { outcome: Outcome::Done, changes: changes.into_iter().collect() }
}

fn live<'s>(state: &'s State, name: &str, incarnation: Incarnation) -> Result<&'s Arc<TopicMeta>, Refusal> {
    let topic = state.topics().get(name).ok_or(Refusal::NotFound)?;
    match topic.incarnation == incarnation {
        true => Ok(topic),
        false => Err(Refusal::Changed),
    }
}

fn create(state: &State, topic: &Arc<TopicMeta>, owners: &[NodeId]) -> Result<Applied, Refusal> {
    check_topic_name(&topic.name).map_err(Refusal::Invalid)?;
    check_partitions(topic.partitions)?;
    match state.name_like(&topic.name) {
        Some(existing) if **existing == *topic.name => return Err(Refusal::Exists),
        Some(existing) => return Err(Refusal::CaseCollision { existing: existing.clone() }),
        None if state.topic_of(topic.incarnation).is_some() => return Err(Refusal::IdTaken),
        None => {}
    }
    let mut changes = vec![Change::PutTopic(topic.clone())];
    if state.assignments().contains_key(&topic.incarnation) {
        changes.push(Change::RemoveOwners(topic.incarnation)); // residue of another topic's rows
    }
    changes.extend(put_owners(state, topic.incarnation, (0..topic.partitions).zip(owners.iter().copied())));
    Ok(Applied { outcome: Outcome::Created(topic.clone()), changes })
}

/// Whatever the proposer has checked: what is decided every node has to hold in memory, at each start anew.
fn check_partitions(partitions: u32) -> Result<(), Refusal> {
    match partitions {
        0 => Err(Refusal::Invalid("a topic needs a partition".to_owned())),
        1..=PARTITIONS_MAX => Ok(()),
        _ => Err(Refusal::Invalid(format!("a topic has at most {PARTITIONS_MAX} partitions, not {partitions}"))),
    }
}

/// Rows for those of `owners` that are members.
fn put_owners(state: &State, incarnation: Incarnation, owners: impl Iterator<Item = (u32, NodeId)>) -> Option<Change> {
    let owners: Vec<_> = owners.filter(|(_, owner)| state.member_of(*owner).is_some()).collect();
    (!owners.is_empty()).then_some(Change::PutOwners { incarnation, owners })
}

fn alter(live: &TopicMeta, change: &TopicChange) -> Result<TopicMeta, Refusal> {
    let mut topic = live.clone();
    if let Some(partitions) = change.partitions {
        if partitions <= live.partitions {
            return Err(Refusal::NotMore { partitions: live.partitions });
        }
        check_partitions(partitions)?;
        topic.partitions = partitions;
    }
    topic.retention_ms = change.retention_ms.unwrap_or(live.retention_ms);
    topic.max_in_flight_per_partition = change.max_in_flight_per_partition.unwrap_or(live.max_in_flight_per_partition);
    topic.max_acked_ahead_per_partition =
        change.max_acked_ahead_per_partition.unwrap_or(live.max_acked_ahead_per_partition);
    Ok(topic)
}

fn place(state: &State, name: &str, incarnation: Incarnation, owners: &[(u32, NodeId)]) -> Result<Applied, Refusal> {
    let topic = live(state, name, incarnation)?;
    if owners.is_empty() {
        return Err(Refusal::Invalid("nothing is to be placed".to_owned()));
    }
    for (partition, owner) in owners.iter().copied() {
        if partition >= topic.partitions {
            return Err(Refusal::OutOfRange { partition });
        }
        if state.owner(incarnation, partition).is_some() {
            return Err(Refusal::Owned { partition });
        }
        if state.member_of(owner).is_none() {
            return Err(Refusal::NoSuchMember);
        }
    }
    Ok(done([Change::PutOwners { incarnation, owners: owners.to_vec() }]))
}

fn register(state: &State, registration: &Arc<Registration>, stamp_ms: u64) -> Result<Applied, Refusal> {
    let node = &registration.node;
    if node.is_empty() {
        return Err(Refusal::Invalid("a member needs an id".to_owned()));
    }
    if state.removed_members().contains_key(node) {
        return Err(Refusal::Tombstoned);
    }
    let mut changes = Vec::new();
    let known = state.members().get(node);
    let number = known.map_or(NodeId(state.newest_number() + 1), |member| member.number);
    if known.is_none() {
        changes.push(Change::SetNewestNumber(number.0));
    }
    let member = Arc::new(Member {
        number,
        registration: registration.clone(),
        heartbeat_ms: stamp_ms,
        alive: true,
        draining: known.is_some_and(|member| member.draining),
    });
    changes.push(Change::PutMember(member.clone()));
    Ok(Applied { outcome: Outcome::Registered(member), changes })
}

/// Begins a cluster. What a lone node has served until now lies on its own disk: it becomes the owner in this entry, and
/// no placement can come between.
fn found(state: &State, id: u64) -> Result<Applied, Refusal> {
    match state.cluster_id() {
        0 if id == 0 => return Err(Refusal::Invalid("0 is no cluster id".to_owned())),
        0 => {}
        existing => return Err(Refusal::HasClusterId(existing)),
    }
    let mut changes = vec![Change::SetClusterId(id)];
    if !state.topics().is_empty() {
        let mut members = state.members().values();
        let (Some(heir), None) = (members.next(), members.next()) else { return Err(Refusal::NoSuchMember) };
        changes.extend(state.topics().values().map(|topic| Change::PutOwners {
            incarnation: topic.incarnation,
            owners: (0..topic.partitions).map(|partition| (partition, heir.number)).collect(),
        }));
    }
    Ok(Applied { outcome: Outcome::Done, changes })
}
