//! Discarding records of deleted topics: destruction of what got a `202`, so it takes local absence and the control
//! thread's confirmation (lessons N11, N13, N25).

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::action::{Action, Report, TopicLife};
use super::lane::{Key, LaneId};
use super::marks::Mark;
use super::{Core, UNCONFIRMED_FOR};
use crate::rt::Instant;

/// Confirmed incarnations that are remembered. One that falls out is asked about again.
const CONFIRMED_MAX: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Asking,
    Unconfirmed {
        until: Instant,
    },
    /// An incarnation never comes back, so its end is remembered; a name may, so its absence is believed as long
    /// as its presence would be.
    Confirmed {
        until: Option<Instant>,
    },
}

/// What is known about the end of topic lives: one question for each at a time (lesson N25).
#[derive(Debug, Default)]
pub(crate) struct Verdicts {
    known: BTreeMap<TopicLife, Verdict>,
    confirmed: VecDeque<TopicLife>,
}

impl Verdicts {
    /// `None` when it should be asked.
    pub fn of(&self, life: &TopicLife, now: Instant) -> Option<Verdict> {
        self.known.get(life).copied().filter(|verdict| !verdict.expired(now))
    }

    fn set(&mut self, life: TopicLife, verdict: Verdict) {
        if matches!(verdict, Verdict::Confirmed { until: None }) {
            self.confirmed.push_back(life.clone());
            if self.confirmed.len() > CONFIRMED_MAX {
                let oldest = self.confirmed.pop_front();
                oldest.map(|life| self.known.remove(&life));
            }
        }
        self.known.insert(life, verdict);
    }

    pub fn forget_expired(&mut self, now: Instant) {
        self.known.retain(|_, verdict| !verdict.expired(now));
    }
}

impl Verdict {
    fn expired(&self, now: Instant) -> bool {
        match self {
            Verdict::Asking => false,
            Verdict::Unconfirmed { until } => *until <= now,
            Verdict::Confirmed { until } => until.is_some_and(|until| until <= now),
        }
    }
}

impl Core {
    /// The control thread's answer to [`Action::AskGone`]. `false` also when nobody could say.
    pub fn gone(&mut self, life: TopicLife, gone: bool) {
        let verdict = match (gone, life.incarnation) {
            (false, _) => Verdict::Unconfirmed { until: self.now + UNCONFIRMED_FOR },
            (true, Some(_)) => Verdict::Confirmed { until: None },
            (true, None) => Verdict::Confirmed { until: Some(self.now + UNCONFIRMED_FOR) },
        };
        self.verdicts.set(life.clone(), verdict);
        for id in self.lanes_of(&life) {
            if self.lanes[id].live {
                continue; // the snapshot knows better by now
            }
            if gone {
                self.discard_queue(id);
                self.wanting.insert(id);
            } else {
                self.return_queue(id);
                self.lanes[id].ask_again_at = Some(self.now + UNCONFIRMED_FOR);
            }
            self.refresh(id);
            self.drop_if_done(id);
        }
    }

    fn lanes_of(&self, life: &TopicLife) -> Vec<LaneId> {
        let same = |id: &LaneId| match (&self.lanes[*id].key, life.incarnation) {
            (Key::Of(destination), Some(incarnation)) => destination.incarnation == incarnation,
            (Key::Named(topic, _), None) => **topic == *life.topic,
            _ => false,
        };
        self.lanes.ids().into_iter().filter(same).collect()
    }

    /// Whether this life is confirmed to be over; asks when nobody has yet.
    pub(super) fn is_over(&mut self, life: &TopicLife) -> bool {
        match self.verdicts.of(life, self.now) {
            Some(verdict) => matches!(verdict, Verdict::Confirmed { .. }),
            None => {
                self.verdicts.set(life.clone(), Verdict::Asking);
                self.actions.push_back(Action::AskGone(life.clone()));
                false
            }
        }
    }

    /// The local replica no longer has a lane's topic: what is queued waits for the confirmation.
    pub(super) fn topic_went(&mut self, id: LaneId) {
        let life = self.lanes[id].life();
        self.recall_probe(id);
        self.lanes[id].failing = None;
        self.lanes[id].sibling = None;
        if !self.lanes[id].queue.is_empty() && self.is_over(&life) {
            self.discard_queue(id);
        }
    }

    /// Discards all that is queued on a lane.
    pub(super) fn discard_queue(&mut self, id: LaneId) {
        let queue = self.take_queue(id);
        let mut records = 0;
        for entry in queue {
            self.release(&entry);
            if entry.named {
                self.give_back(entry.home, entry.seq); // its topic is whoever has the name next
                continue;
            }
            records += u64::from(self.marks.get(entry.seq) != Some(Mark::Done));
            self.marks.set(entry.seq, Mark::Done);
            self.unref(entry.home);
        }
        if records > 0 {
            let lane = &self.lanes[id];
            let (life, partition) = (lane.life(), lane.partition());
            self.metrics.records_discarded += records;
            self.report(Report::DiscardedQueue { life, partition, records });
        }
    }

    /// Says that one record is discarded; the caller marks it done.
    pub(super) fn report_discard(&mut self, home: LaneId, seq: u64, error: Option<Arc<str>>) {
        let lane = &self.lanes[home];
        let (life, partition) = (lane.life(), lane.partition());
        let replaced = life.incarnation.is_some() && self.snapshot.topic(&life.topic).is_some();
        let error = error.or_else(|| lane.last_error.clone());
        self.metrics.records_discarded += 1;
        self.report(Report::Discarded { life, partition, seq, replaced, error });
    }
}
