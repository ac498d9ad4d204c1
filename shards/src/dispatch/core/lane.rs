//! Lanes: what the dispatcher knows of one partition, as the place records were accepted for (the home of skipped
//! ones) and as a destination of commits. Lanes go with their topic (lesson N27).

use std::collections::{HashMap, VecDeque};
use std::ops::{Index, IndexMut};
use std::rc::Rc;
use std::sync::Arc;

use crate::meta::{Address, Destination, DestinationMap};
use crate::peer::Record;
use crate::rt::Instant;

use super::action::TopicLife;
use super::{BATCH_BYTES_TARGET, BATCH_TARGET, COMMIT_BYTES_MAX, REROUTE_AFTER};

pub(crate) type LaneId = u32;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Key {
    Of(Destination),
    /// Home of format 1 records, which know their topic by name only. Never a destination: its records queue on
    /// the lane of whatever incarnation has the name. So their order is kept among themselves, not against
    /// format 2 records of the same partition.
    Named(Rc<str>, u32),
}

/// A record in memory, on the queue of the lane that it will be committed to.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub seq: u64,
    pub queued_at: Instant,
    pub record: Record,
    /// Encoded size, for every bound in bytes.
    pub bytes: usize,
    /// The lane that it was accepted for: not the one it is queued on after a reroute.
    pub home: LaneId,
    /// Format 1: commits by name.
    pub named: bool,
    /// Its bytes lie in the WAL's staging memory.
    pub staged: bool,
}

/// A commit that has not been answered.
#[derive(Debug)]
pub(crate) struct Flight {
    pub serial: u64,
    pub address: Address,
    pub started: Instant,
    pub deadline: Instant,
    pub hung: bool,
    pub probe: bool,
    pub bytes: usize,
    /// Sequence numbers and homes, in WAL order.
    pub seqs: Vec<(u64, LaneId)>,
    /// The oldest record, kept to become the probe if the commit fails.
    pub first: Entry,
}

#[derive(Debug)]
pub(crate) struct Failing {
    /// Start of the first failed attempt: the reroute grace is counted from here.
    pub since: Instant,
    pub retry_at: Instant,
    /// The one record that is kept; it is in the flight while that is on its way.
    pub probe: Option<Entry>,
    /// The reroute has been announced.
    pub announced: bool,
}

impl Failing {
    pub fn reroute_at(&self) -> Instant {
        self.since + REROUTE_AFTER
    }
}

/// Where a lane stands in the order of what leaves next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ready {
    No,
    /// A small batch that waits for more until then.
    Linger(Instant),
    Due,
    Probe,
}

#[derive(Debug)]
pub(crate) struct Lane {
    pub key: Key,
    pub topic: Arc<str>,

    /// Records accepted for this partition that wait in the WAL; the first of them is not below `first_skipped`.
    pub skipped: u32,
    pub first_skipped: u64,
    /// The rescan that may place records of this lane.
    pub pass: u64,
    /// Entries and flights, of whichever lane, that name this one as home.
    pub refs: usize,

    /// The snapshot has this incarnation.
    pub live: bool,
    pub address: Option<Address>,
    /// The shard of the owner that answered last: of another node it is known only then.
    pub served: Option<Address>,
    /// Its batch waits for room at this owner, with this number in the line there (E41).
    pub starved: Option<(Address, u64)>,
    pub queue: VecDeque<Entry>,
    pub queued_bytes: usize,
    pub flight: Option<Flight>,
    /// Commits that ran out of their budget; their buffers are lent until the reply (E21).
    pub late: Vec<Flight>,
    pub failing: Option<Failing>,
    pub ready: Ready,
    pub timer: Option<Instant>,
    pub active: bool,
    /// Sibling that takes this lane's records, as of an epoch.
    pub sibling: Option<(u64, Option<LaneId>)>,
    /// Refused a rerouted record because it was full.
    pub overflowed: bool,
    pub last_error: Option<Arc<str>>,
    /// The end of its topic was not confirmed.
    pub ask_again_at: Option<Instant>,
}

impl Lane {
    pub fn new(key: Key, topic: Arc<str>) -> Lane {
        Lane {
            key,
            topic,
            skipped: 0,
            first_skipped: 0,
            pass: 0,
            refs: 0,
            live: false,
            address: None,
            served: None,
            starved: None,
            queue: VecDeque::new(),
            queued_bytes: 0,
            flight: None,
            late: Vec::new(),
            failing: None,
            ready: Ready::No,
            timer: None,
            active: false,
            sibling: None,
            overflowed: false,
            last_error: None,
            ask_again_at: None,
        }
    }

    pub fn destination(&self) -> Option<Destination> {
        match self.key {
            Key::Of(destination) => Some(destination),
            Key::Named(..) => None,
        }
    }

    pub fn partition(&self) -> u32 {
        match self.key {
            Key::Of(destination) => destination.partition,
            Key::Named(_, partition) => partition,
        }
    }

    pub fn life(&self) -> TopicLife {
        TopicLife { topic: self.topic.clone(), incarnation: self.destination().map(|d| d.incarnation) }
    }

    /// Whose latency this lane's is.
    pub fn measured_at(&self) -> Option<Address> {
        self.served.or(self.address)
    }

    /// Encoded bytes of what would leave next.
    pub fn next_batch_bytes(&self) -> usize {
        if let Some(failing) = &self.failing {
            return failing.probe.as_ref().map_or(0, |entry| entry.bytes);
        }
        let mut bytes = 0;
        for entry in &self.queue {
            if bytes > 0 && bytes + entry.bytes > COMMIT_BYTES_MAX {
                break;
            }
            bytes += entry.bytes;
        }
        bytes
    }

    pub fn hung(&self) -> bool {
        self.flight.as_ref().is_some_and(|flight| flight.hung)
    }

    pub fn probe_waits(&self) -> bool {
        self.failing.as_ref().is_some_and(|failing| failing.probe.is_some())
    }

    /// What is queued is worth a commit of its own.
    pub fn has_full_batch(&self) -> bool {
        let enough = self.queue.len() >= BATCH_TARGET && self.queued_bytes >= BATCH_BYTES_TARGET;
        enough || self.queued_bytes >= COMMIT_BYTES_MAX
    }

    /// Nothing refers to the lane and it refers to nothing.
    pub fn is_empty(&self) -> bool {
        self.skipped == 0
            && self.refs == 0
            && self.queue.is_empty()
            && self.flight.is_none()
            && self.late.is_empty()
            && !self.probe_waits()
    }
}

/// All lanes, by a small number that stays valid while the lane is not empty.
#[derive(Debug, Default)]
pub(crate) struct Lanes {
    slots: Vec<Option<Box<Lane>>>,
    free: Vec<LaneId>,
    by_destination: DestinationMap<LaneId>,
    by_name: HashMap<(Rc<str>, u32), LaneId>,
}

impl Lanes {
    pub fn of(&self, destination: Destination) -> Option<LaneId> {
        self.by_destination.get(&destination).copied()
    }

    pub fn named(&self, topic: &Rc<str>, partition: u32) -> Option<LaneId> {
        self.by_name.get(&(topic.clone(), partition)).copied()
    }

    pub fn get(&self, id: LaneId) -> Option<&Lane> {
        self.slots.get(id as usize)?.as_deref()
    }

    pub fn get_mut(&mut self, id: LaneId) -> Option<&mut Lane> {
        self.slots.get_mut(id as usize)?.as_deref_mut()
    }

    pub fn insert(&mut self, lane: Lane) -> LaneId {
        let id = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            (self.slots.len() - 1) as LaneId
        });
        match &lane.key {
            Key::Of(destination) => self.by_destination.insert(*destination, id),
            Key::Named(topic, partition) => self.by_name.insert((topic.clone(), *partition), id),
        };
        self.slots[id as usize] = Some(Box::new(lane));
        id
    }

    pub fn remove(&mut self, id: LaneId) {
        let Some(lane) = self.slots[id as usize].take() else { return };
        match &lane.key {
            Key::Of(destination) => self.by_destination.remove(destination),
            Key::Named(topic, partition) => self.by_name.remove(&(topic.clone(), *partition)),
        };
        self.free.push(id);
    }

    /// Ids of all lanes, ascending.
    pub fn ids(&self) -> Vec<LaneId> {
        (0..self.slots.len() as LaneId).filter(|id| self.slots[*id as usize].is_some()).collect()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Lane> {
        self.slots.iter().flatten().map(|lane| &**lane)
    }

    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

impl Index<LaneId> for Lanes {
    type Output = Lane;
    fn index(&self, id: LaneId) -> &Lane {
        self.get(id).expect("a lane that something refers to is never removed")
    }
}

impl IndexMut<LaneId> for Lanes {
    fn index_mut(&mut self, id: LaneId) -> &mut Lane {
        self.get_mut(id).expect("a lane that something refers to is never removed")
    }
}
