//! The replicated state: topics, members, and which member owns which partition. No I/O, no clock, no randomness.

use std::collections::BTreeMap;
use std::sync::Arc;

use narad_shards::meta::{Incarnation, NodeId, TopicMeta};

use super::command::Registration;

/// A node of the cluster as the metadata knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Given at its first registration, from 1, and never to another one.
    pub number: NodeId,
    pub registration: Arc<Registration>,
    /// Of its last heartbeat, on the clock of the leader that proposed it. Names the heartbeat; its age says nothing.
    pub heartbeat_ms: u64,
    /// Routing's verdict, no more: a dead member keeps its partitions (K24).
    pub alive: bool,
    pub draining: bool,
}

impl Member {
    pub fn node(&self) -> &Arc<str> {
        &self.registration.node
    }

    /// May get partitions.
    pub fn receives(&self) -> bool {
        self.alive && !self.draining
    }
}

/// Owners of a topic's partitions. A partition that is not in it has none.
pub type Assignment = Arc<BTreeMap<u32, NodeId>>;

/// Everything that is replicated, and up to where the log is applied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    topics: BTreeMap<Arc<str>, Arc<TopicMeta>>,
    /// Name in lower case to the name as created: two names never differ in letter case only (lesson N75.1).
    folded: BTreeMap<String, Arc<str>>,
    incarnations: BTreeMap<Incarnation, Arc<str>>,
    members: BTreeMap<Arc<str>, Arc<Member>>,
    numbers: BTreeMap<NodeId, Arc<str>>,
    newest_number: u64,
    newest_command_type: u64,
    removed_members: BTreeMap<Arc<str>, NodeId>,
    assignments: BTreeMap<Incarnation, Assignment>,
    cluster_id: u64,
    applied_index: u64,
}

/// Rows to write or remove.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    PutTopic(Arc<TopicMeta>),
    RemoveTopic(Arc<str>),
    PutMember(Arc<Member>),
    RemoveMember(Arc<str>),
    PutTombstone {
        node: Arc<str>,
        number: NodeId,
    },
    RemoveTombstone(Arc<str>),
    PutOwners {
        incarnation: Incarnation,
        owners: Vec<(u32, NodeId)>,
    },
    /// All rows of one topic.
    RemoveOwners(Incarnation),
    RemoveOwner {
        incarnation: Incarnation,
        partition: u32,
    },
    SetClusterId(u64),
    /// The newest number given to a member.
    SetNewestNumber(u64),
    /// The newest command type applied so far; refused ones count.
    SetNewestCommandType(u64),
}

impl Change {
    /// Whether a snapshot made after it may differ from one made before. A heartbeat does not; a member's first one
    /// does, for it brings its number.
    pub fn shows_in_snapshot(&self) -> bool {
        !matches!(
            self,
            Change::PutMember(_)
                | Change::PutTombstone { .. }
                | Change::RemoveTombstone(_)
                | Change::SetNewestCommandType(_)
        )
    }
}

impl State {
    /// The state of a store that holds topics alone.
    pub fn restore(topics: impl IntoIterator<Item = Arc<TopicMeta>>, applied_index: u64) -> State {
        State::from_rows(topics.into_iter().map(Change::PutTopic), applied_index)
    }

    /// The state that a store holds.
    pub fn from_rows(rows: impl IntoIterator<Item = Change>, applied_index: u64) -> State {
        let mut state = State { applied_index, ..State::default() };
        for row in rows {
            state.absorb_one(&row);
        }
        state
    }

    /// Every row: [`State::from_rows`] of them is this state.
    pub fn rows(&self) -> Vec<Change> {
        let mut rows: Vec<Change> = self.topics.values().cloned().map(Change::PutTopic).collect();
        rows.extend(self.members.values().cloned().map(Change::PutMember));
        let tombstones = self.removed_members.iter();
        rows.extend(tombstones.map(|(node, number)| Change::PutTombstone { node: node.clone(), number: *number }));
        rows.extend(self.assignments.iter().map(|(incarnation, owners)| Change::PutOwners {
            incarnation: *incarnation,
            owners: owners.iter().map(|(partition, owner)| (*partition, *owner)).collect(),
        }));
        rows.push(Change::SetClusterId(self.cluster_id));
        rows.push(Change::SetNewestNumber(self.newest_number));
        rows.push(Change::SetNewestCommandType(self.newest_command_type));
        rows
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
        debug_assert_eq!(self.members.len(), self.numbers.len());
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
            Change::PutMember(member) => {
                self.numbers.insert(member.number, member.node().clone());
                self.members.insert(member.node().clone(), member.clone());
            }
            Change::RemoveMember(node) => {
                if let Some(removed) = self.members.remove(node) {
                    self.numbers.remove(&removed.number);
                }
            }
            Change::PutTombstone { node, number } => drop(self.removed_members.insert(node.clone(), *number)),
            Change::RemoveTombstone(node) => drop(self.removed_members.remove(node)),
            Change::PutOwners { incarnation, owners } => {
                let rows = Arc::make_mut(self.assignments.entry(*incarnation).or_default());
                rows.extend(owners.iter().copied());
            }
            Change::RemoveOwners(incarnation) => drop(self.assignments.remove(incarnation)),
            Change::RemoveOwner { incarnation, partition } => {
                if let Some(rows) = self.assignments.get_mut(incarnation) {
                    Arc::make_mut(rows).remove(partition);
                    if rows.is_empty() {
                        self.assignments.remove(incarnation);
                    }
                }
            }
            Change::SetClusterId(id) => self.cluster_id = *id,
            Change::SetNewestNumber(number) => self.newest_number = *number,
            Change::SetNewestCommandType(number) => self.newest_command_type = *number,
        }
    }

    pub fn topics(&self) -> &BTreeMap<Arc<str>, Arc<TopicMeta>> {
        &self.topics
    }

    /// The name of a topic that differs from `name` in letter case at most.
    pub fn name_like(&self, name: &str) -> Option<&Arc<str>> {
        self.folded.get(&name.to_ascii_lowercase())
    }

    pub fn topic_of(&self, incarnation: Incarnation) -> Option<&Arc<TopicMeta>> {
        self.topics.get(self.incarnations.get(&incarnation)?)
    }

    pub fn members(&self) -> &BTreeMap<Arc<str>, Arc<Member>> {
        &self.members
    }

    pub fn member_of(&self, number: NodeId) -> Option<&Arc<Member>> {
        self.members.get(self.numbers.get(&number)?)
    }

    /// Names that were removed, with the number that each had.
    pub fn removed_members(&self) -> &BTreeMap<Arc<str>, NodeId> {
        &self.removed_members
    }

    pub fn newest_number(&self) -> u64 {
        self.newest_number
    }

    /// Whoever applies fewer types cannot run on this state (K18).
    pub fn newest_command_type(&self) -> u64 {
        self.newest_command_type
    }

    /// Rows of topics that are gone may be among them, until they are pruned.
    pub fn assignments(&self) -> &BTreeMap<Incarnation, Assignment> {
        &self.assignments
    }

    pub fn owner(&self, incarnation: Incarnation, partition: u32) -> Option<NodeId> {
        self.assignments.get(&incarnation)?.get(&partition).copied()
    }

    /// 0: a node that was never in a cluster; all its topics are its own.
    pub fn cluster_id(&self) -> u64 {
        self.cluster_id
    }

    pub fn applied_index(&self) -> u64 {
        self.applied_index
    }
}
