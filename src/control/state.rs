//! The replicated state and what a command does to it: no I/O, no clock, no randomness.

use std::collections::BTreeMap;
use std::sync::Arc;

use narad_shards::api::TopicChange;
use narad_shards::meta::{Incarnation, TopicMeta};

use super::command::Command;
use super::names::check_topic_name;

/// All topics, and up to where the log is applied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    topics: BTreeMap<Arc<str>, Arc<TopicMeta>>,
    /// Name in lower case to the name as created: two names never differ in letter case only (lesson N75.1).
    folded: BTreeMap<String, Arc<str>>,
    incarnations: BTreeMap<Incarnation, Arc<str>>,
    applied_index: u64,
}

/// One row to write or remove.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    PutTopic(Arc<TopicMeta>),
    RemoveTopic(Arc<str>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Created(Arc<TopicMeta>),
    Deleted(Arc<TopicMeta>),
    Altered(Arc<TopicMeta>),
    Refused(Refusal),
}

/// Why an entry changed nothing. A refusal counts as applied (K5, K14).
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
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    pub outcome: Outcome,
    pub changes: Vec<Change>,
}

/// What `command` does to `state`: the same on every node (K4).
pub fn apply(state: &State, command: &Command) -> Applied {
    match command {
        Command::CreateTopic(topic) => match refuse_create(state, topic) {
            Some(refusal) => refused(refusal),
            None => {
                Applied { outcome: Outcome::Created(topic.clone()), changes: vec![Change::PutTopic(topic.clone())] }
            }
        },
        Command::DeleteTopic { name, incarnation } => match live(state, name, *incarnation) {
            Err(refusal) => refused(refusal),
            Ok(live) => Applied {
                outcome: Outcome::Deleted(live.clone()),
                changes: vec![Change::RemoveTopic(live.name.clone())],
            },
        },
        Command::AlterTopic { name, incarnation, change } => {
            match live(state, name, *incarnation).and_then(|live| alter(live, change)) {
                Err(refusal) => refused(refusal),
                Ok(topic) => {
                    let topic = Arc::new(topic);
                    Applied { outcome: Outcome::Altered(topic.clone()), changes: vec![Change::PutTopic(topic)] }
                }
            }
        }
    }
}

fn live<'s>(state: &'s State, name: &str, incarnation: Incarnation) -> Result<&'s Arc<TopicMeta>, Refusal> {
    let topic = state.topics.get(name).ok_or(Refusal::NotFound)?;
    match topic.incarnation == incarnation {
        true => Ok(topic),
        false => Err(Refusal::Changed),
    }
}

fn alter(live: &TopicMeta, change: &TopicChange) -> Result<TopicMeta, Refusal> {
    let mut topic = live.clone();
    if let Some(partitions) = change.partitions {
        if partitions <= live.partitions {
            return Err(Refusal::NotMore { partitions: live.partitions });
        }
        topic.partitions = partitions;
    }
    topic.retention_ms = change.retention_ms.unwrap_or(live.retention_ms);
    topic.max_in_flight_per_partition = change.max_in_flight_per_partition.unwrap_or(live.max_in_flight_per_partition);
    topic.max_acked_ahead_per_partition =
        change.max_acked_ahead_per_partition.unwrap_or(live.max_acked_ahead_per_partition);
    Ok(topic)
}

fn refused(refusal: Refusal) -> Applied {
    Applied { outcome: Outcome::Refused(refusal), changes: Vec::new() }
}

fn refuse_create(state: &State, topic: &TopicMeta) -> Option<Refusal> {
    if let Err(why) = check_topic_name(&topic.name) {
        return Some(Refusal::Invalid(why));
    }
    if topic.partitions == 0 {
        return Some(Refusal::Invalid("a topic needs a partition".to_owned()));
    }
    match state.folded.get(&topic.name.to_ascii_lowercase()) {
        Some(existing) if **existing == *topic.name => Some(Refusal::Exists),
        Some(existing) => Some(Refusal::CaseCollision { existing: existing.clone() }),
        None if state.incarnations.contains_key(&topic.incarnation) => Some(Refusal::IdTaken),
        None => None,
    }
}

impl State {
    /// The state that a store holds.
    pub fn restore(topics: impl IntoIterator<Item = Arc<TopicMeta>>, applied_index: u64) -> State {
        let mut state = State { applied_index, ..State::default() };
        for topic in topics {
            state.absorb_one(&Change::PutTopic(topic));
        }
        state
    }

    /// Takes over the changes of the entry at `index`. Entries come in log order, each once.
    pub fn absorb(&mut self, index: u64, changes: &[Change]) {
        assert!(index > self.applied_index, "entry {index} after {}: applied twice", self.applied_index);
        self.applied_index = index;
        for change in changes {
            self.absorb_one(change);
        }
        debug_assert_eq!(self.topics.len(), self.folded.len());
        debug_assert_eq!(self.topics.len(), self.incarnations.len());
    }

    fn absorb_one(&mut self, change: &Change) {
        match change {
            Change::PutTopic(topic) => {
                self.folded.insert(topic.name.to_ascii_lowercase(), topic.name.clone());
                self.incarnations.insert(topic.incarnation, topic.name.clone());
                self.topics.insert(topic.name.clone(), topic.clone());
            }
            Change::RemoveTopic(name) => {
                if let Some(removed) = self.topics.remove(name) {
                    self.folded.remove(&name.to_ascii_lowercase());
                    self.incarnations.remove(&removed.incarnation);
                }
            }
        }
    }

    pub fn topics(&self) -> &BTreeMap<Arc<str>, Arc<TopicMeta>> {
        &self.topics
    }

    pub fn applied_index(&self) -> u64 {
        self.applied_index
    }
}
