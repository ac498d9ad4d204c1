//! What the log says of commits to other nodes: a line for each change of a node's state, with counts, and none for each
//! partition: a node that dies has many, and all of them fail and recover at once. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::core::Trouble;
use crate::meta::NodeId;
use crate::rt::Instant;

/// From the first partition's trouble to the look at how many have it.
const GATHER: Duration = Duration::from_millis(200);
/// Between two looks, as long as something may come of it.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A node is well again when it has been for that long: one whose probes are taken and refused in turn is not.
const WELL_FOR: Duration = Duration::from_secs(3);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum State {
    Well,
    Hung,
    Failing,
    Rerouting,
}

#[derive(Debug)]
struct Said {
    state: State,
    since: Instant,
    well_since: Option<Instant>,
    /// The most that were in trouble at a time.
    partitions: usize,
}

/// A change of a node's state, as it is logged.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Line {
    pub node: NodeId,
    pub state: State,
    /// In trouble; of a node that is well again: the most that were.
    pub partitions: usize,
    /// What one of them failed with.
    pub error: Option<Arc<str>>,
    /// Since the first of these lines.
    pub after: Duration,
}

/// What was said of the nodes that are not well.
#[derive(Debug, Default)]
pub(super) struct Notices {
    said: BTreeMap<NodeId, Said>,
    look_at: Option<Instant>,
}

impl Notices {
    /// The state of a partition of another node has changed.
    pub fn stir(&mut self, now: Instant) {
        let at = now + GATHER;
        self.look_at = Some(self.look_at.map_or(at, |armed| armed.min(at)));
    }

    /// When to look. `None`: nothing changes by itself.
    pub fn next(&self) -> Option<Instant> {
        self.look_at
    }

    pub fn is_due(&self, now: Instant) -> bool {
        self.look_at.is_some_and(|at| at <= now)
    }

    /// What there is to say of all nodes that are, or were, in trouble.
    pub fn look(&mut self, troubles: &BTreeMap<NodeId, Trouble>, now: Instant) -> Vec<Line> {
        let mut lines = Vec::new();
        for (&node, trouble) in troubles {
            let (state, partitions) = state_of(trouble);
            let said = self.said.entry(node).or_insert(Said {
                state: State::Well,
                since: now,
                well_since: None,
                partitions: 0,
            });
            said.well_since = None;
            said.partitions = said.partitions.max(trouble.hung + trouble.failing);
            // That some of them are better while others are not is no news.
            if state > said.state {
                said.state = state;
                lines.push(Line { node, state, partitions, error: trouble.error.clone(), after: now - said.since });
            }
        }
        self.said.retain(|&node, said| {
            if troubles.contains_key(&node) {
                return true;
            }
            let well = now - *said.well_since.get_or_insert(now) >= WELL_FOR;
            if well {
                let (state, partitions, after) = (State::Well, said.partitions, now - said.since);
                lines.push(Line { node, state, partitions, error: None, after });
            }
            !well
        });
        // A shard at which nothing is to be done has no timers.
        let moves = self.said.keys().any(|node| troubles.get(node).is_none_or(|trouble| trouble.owed));
        self.look_at = moves.then_some(now + LOOK_EVERY);
        lines
    }
}

/// The worst that is the matter, and of how many partitions it is.
fn state_of(trouble: &Trouble) -> (State, usize) {
    match trouble {
        Trouble { rerouting: count @ 1.., .. } => (State::Rerouting, *count),
        Trouble { failing: count @ 1.., .. } => (State::Failing, *count),
        Trouble { hung, .. } => (State::Hung, *hung),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Instant {
        Instant(0) + Duration::from_millis(ms)
    }

    fn trouble(hung: usize, failing: usize, rerouting: usize) -> BTreeMap<NodeId, Trouble> {
        let error = (failing > 0).then(|| Arc::from("connection lost"));
        BTreeMap::from([(NodeId(7), Trouble { hung, failing, rerouting, error, owed: true })])
    }

    fn look(notices: &mut Notices, troubles: &BTreeMap<NodeId, Trouble>, ms: u64) -> Vec<(State, usize, u64)> {
        let lines = notices.look(troubles, at(ms));
        lines.iter().map(|line| (line.state, line.partitions, line.after.as_millis() as u64)).collect()
    }

    #[test]
    fn a_node_that_dies_and_comes_back_is_a_line_for_each_change_however_many_partitions_it_has() {
        let mut notices = Notices::default();
        assert_eq!(notices.next(), None);
        (0..500).for_each(|later| notices.stir(at(1_000) + Duration::from_micros(later)));
        assert!(notices.next() == Some(at(1_200)) && !notices.is_due(at(1_199)) && notices.is_due(at(1_200)));
        assert_eq!(look(&mut notices, &trouble(500, 0, 0), 1_200), [(State::Hung, 500, 0)]);
        assert_eq!(look(&mut notices, &trouble(100, 400, 0), 2_200), [(State::Failing, 400, 1_000)]);
        assert_eq!(look(&mut notices, &trouble(0, 500, 0), 3_200), []);
        assert_eq!(look(&mut notices, &trouble(0, 500, 500), 4_200), [(State::Rerouting, 500, 3_000)]);
        // They come back one after the other.
        assert_eq!(look(&mut notices, &trouble(0, 200, 100), 5_200), []);
        assert_eq!(look(&mut notices, &BTreeMap::new(), 6_200), []);
        assert_eq!(look(&mut notices, &BTreeMap::new(), 9_200), [(State::Well, 500, 8_000)]);
        assert_eq!(notices.next(), None, "nobody looks while all are well");
    }

    #[test]
    fn nobody_looks_at_a_node_that_fails_while_there_is_nothing_for_it() {
        let mut notices = Notices::default();
        notices.stir(at(0));
        let mut troubles = trouble(0, 3, 3);
        assert_eq!(look(&mut notices, &troubles, 200), [(State::Rerouting, 3, 0)]);
        assert_eq!(notices.next(), Some(at(1_200)));
        troubles.values_mut().for_each(|trouble| trouble.owed = false);
        assert_eq!(look(&mut notices, &troubles, 1_200), []);
        assert_eq!(notices.next(), None);
        // Until a record for it is committed.
        notices.stir(at(90_000));
        assert_eq!(look(&mut notices, &BTreeMap::new(), 90_200), []);
        assert_eq!(look(&mut notices, &BTreeMap::new(), 93_200), [(State::Well, 3, 93_000)]);
        assert_eq!(notices.next(), None);
    }

    #[test]
    fn a_node_whose_probes_are_refused_and_taken_in_turn_is_said_to_fail_once() {
        let mut notices = Notices::default();
        notices.stir(at(0));
        assert_eq!(look(&mut notices, &trouble(0, 3, 0), 200), [(State::Failing, 3, 0)]);
        for second in 1..60 {
            let troubles = if second % 3 == 0 { trouble(0, 1, 0) } else { BTreeMap::new() };
            assert_eq!(look(&mut notices, &troubles, 200 + 1_000 * second), []);
        }
    }
}
