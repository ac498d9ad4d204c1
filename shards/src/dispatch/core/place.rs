//! Where a record that was read goes: onto a queue, back to the WAL, or away with its topic. And the rescans that
//! bring skipped records back in WAL order.

use super::action::{Action, Report};
use super::gone::Verdict;
use super::lane::{Entry, Key, Lane, LaneId};
use super::marks::Mark;
use super::{encoded_bytes, Core, Ready, BACKOFF, LOOKAHEAD_WINDOWS, RESCAN_EVERY};
use crate::meta::Destination;
use crate::rt::Instant;
use crate::wal::{ReadBack, ReadLimit, WalRecord};

/// One walk over the skipped records, in WAL order.
#[derive(Debug)]
pub(crate) struct Pass {
    serial: u64,
    position: u64,
    /// Lanes that it may still place records of. When none is left, the pass is over.
    open: usize,
    started: Instant,
}

impl Core {
    /// Answer to [`Action::ReadNew`]. `staged`: the records lie in staging memory.
    pub fn new_records(&mut self, read: ReadBack, staged: bool) {
        self.reading_new = false;
        let from = self.marks.end();
        for record in read.records {
            // A hole in what is durable would be lost records: never step over one.
            if record.seq != self.marks.end() {
                return self.missing();
            }
            let (seq, home) = (record.seq, self.home_of(&record));
            let blocked = self.lanes[home].skipped > 0;
            let mark = self.place(record, home, staged, blocked);
            self.marks.push(mark);
            if mark == Mark::Skipped {
                self.note_skipped(home, seq);
            }
            self.drop_if_done(home);
        }
        if self.marks.end() == from || self.marks.end() != read.next {
            self.missing();
        }
    }

    /// Answer to [`Action::ReadSkipped`].
    pub fn skipped_records(&mut self, read: ReadBack) {
        self.reading_skipped = false;
        let before = self.pass.as_ref().map(|pass| pass.position);
        for record in read.records {
            if self.pass.is_none() {
                return; // every lane is blocked again: the rest would only be refused
            }
            if !self.wants(record.seq) {
                continue;
            }
            let (seq, home) = (record.seq, self.home_of(&record));
            let blocked = !self.in_pass(home);
            match self.place(record, home, false, blocked) {
                Mark::Skipped if blocked => {}
                Mark::Skipped => {
                    self.lanes[home].first_skipped = seq; // all before it have been placed
                    self.leave_pass(home);
                }
                mark => self.note_placed(home, seq, mark),
            }
        }
        let Some(pass) = &mut self.pass else { return };
        if before.is_some_and(|before| read.next <= before) {
            return self.missing();
        }
        pass.position = read.next;
    }

    /// A read failed; the dispatcher as a whole rests.
    pub fn read_failed(&mut self, new: bool) {
        if new {
            self.reading_new = false;
        } else {
            self.reading_skipped = false;
            self.end_pass();
        }
        self.metrics.read_failures += 1;
        self.backoff_until = Some(self.now + BACKOFF);
    }

    fn missing(&mut self) {
        let seq = self.marks.end();
        self.report(Report::Missing { seq });
        self.metrics.read_failures += 1;
        self.backoff_until = Some(self.now + BACKOFF);
    }

    /// Lets go of queued records that lie in staging memory, to be read back later (E20). Those that cannot leave
    /// soon go first, then the longest queues, until half of them are gone. False when there were none.
    pub(super) fn let_go(&mut self) -> bool {
        if self.queued_staged == 0 {
            return false;
        }
        let staged = |lane: &Lane| {
            let probe = lane.failing.as_ref().and_then(|failing| failing.probe.as_ref());
            lane.queue.iter().chain(probe).filter(|entry| entry.staged).count()
        };
        let stuck = |lane: &Lane| {
            lane.failing.is_some() || lane.flight.is_some() || lane.address.is_none() || lane.starved.is_some()
        };
        let mut lanes: Vec<(bool, usize, LaneId)> = self.lanes.ids().into_iter().fold(Vec::new(), |mut all, id| {
            let lane = &self.lanes[id];
            match staged(lane) {
                0 => {}
                count => all.push((stuck(lane), count, id)),
            }
            all
        });
        lanes.sort_unstable_by(|a, b| b.cmp(a));
        let enough = self.queued_staged / 2;
        for (_, _, id) in lanes {
            self.return_queue(id);
            self.return_probe(id);
            self.refresh(id);
            if self.queued_staged <= enough {
                break;
            }
        }
        true
    }

    // Placing.

    fn home_of(&mut self, record: &WalRecord) -> LaneId {
        match record.incarnation {
            Some(incarnation) => self.lane_of(Destination { incarnation, partition: record.partition }, &record.topic),
            None => self.lanes.named(&record.topic, record.partition).unwrap_or_else(|| {
                let key = Key::Named(record.topic.clone(), record.partition);
                self.lanes.insert(Lane::new(key, (&*record.topic).into()))
            }),
        }
    }

    /// The lane that records of `home` are meant for: itself, or for format 1 whoever has the name now. `None` when
    /// the local replica does not know the topic.
    fn meant_for(&mut self, home: LaneId) -> Option<LaneId> {
        let lane = &self.lanes[home];
        match &lane.key {
            Key::Of(_) => lane.live.then_some(home),
            Key::Named(topic, partition) => {
                let (topic, partition) = (topic.clone(), *partition);
                let meta = self.snapshot.topic(&topic)?;
                let incarnation = meta.incarnation;
                // The name may have come back with fewer partitions; the record must not wait for one for ever.
                let partition = partition % meta.partitions.max(1);
                Some(self.lane_of(Destination { incarnation, partition }, &topic))
            }
        }
    }

    /// Queues a record, discards it, or leaves it. `blocked`: an earlier one of the same partition was left.
    fn place(&mut self, record: WalRecord, home: LaneId, staged: bool, blocked: bool) -> Mark {
        let Some(meant) = self.meant_for(home) else {
            let life = self.lanes[home].life();
            if self.is_over(&life) {
                self.report_discard(home, record.seq, None);
                return Mark::Done;
            }
            return Mark::Skipped;
        };
        if blocked {
            return Mark::Skipped;
        }
        let bytes = encoded_bytes(&record.record);
        let Some(target) = self.choose(meant, bytes) else { return Mark::Skipped };
        if target != meant {
            self.metrics.records_rerouted += 1;
        }
        let (seq, named) = (record.seq, record.incarnation.is_none());
        let entry = Entry { seq, queued_at: self.now, record: record.record, bytes, home, named, staged };
        self.lanes[home].refs += 1;
        self.enqueue(target, entry);
        Mark::Held
    }

    /// The lane that takes a record meant for `id` now; `None` when it has to wait in the WAL.
    fn choose(&mut self, id: LaneId, bytes: usize) -> Option<LaneId> {
        let dead = self.owner_dead(id);
        let lane = &self.lanes[id];
        if let Some(failing) = &lane.failing {
            let wants_probe = failing.probe.is_none() && lane.flight.is_none();
            if wants_probe && !dead && failing.retry_at <= self.now {
                return Some(id);
            }
            if dead || failing.reroute_at() <= self.now {
                if let Some(sibling) = self.sibling(id) {
                    return self.roomy(sibling, bytes);
                }
            }
            return wants_probe.then_some(id);
        }
        if dead {
            if let Some(sibling) = self.sibling(id) {
                return self.roomy(sibling, bytes);
            }
        }
        if self.lanes[id].hung() {
            return None;
        }
        self.has_room(id, bytes).then_some(id)
    }

    fn roomy(&mut self, sibling: LaneId, bytes: usize) -> Option<LaneId> {
        let fits = self.has_room(sibling, bytes);
        self.lanes[sibling].overflowed |= !fits;
        fits.then_some(sibling)
    }

    pub(super) fn owner_dead(&self, id: LaneId) -> bool {
        self.lanes[id].address.is_some_and(|address| self.dead.contains(&address.node))
    }

    /// The next partition of the same topic, counting up and wrapping around, whose owner is alive and whose own
    /// commits neither fail nor hang.
    pub(super) fn sibling(&mut self, id: LaneId) -> Option<LaneId> {
        if let Some((_, known)) = self.lanes[id].sibling.filter(|(epoch, _)| *epoch == self.epoch) {
            return known;
        }
        let found = self.find_sibling(id);
        self.lanes[id].sibling = Some((self.epoch, found));
        found
    }

    fn find_sibling(&mut self, id: LaneId) -> Option<LaneId> {
        let own = self.lanes[id].destination()?;
        let partitions = self.snapshot.topic_of(own.incarnation)?.partitions;
        for step in 1..partitions {
            let partition = ((u64::from(own.partition) + u64::from(step)) % u64::from(partitions)) as u32;
            let next = Destination { incarnation: own.incarnation, partition };
            let alive = self.snapshot.address(next).is_some_and(|address| !self.dead.contains(&address.node));
            let lane = self.lanes.of(next).map(|id| &self.lanes[id]);
            if alive && lane.is_none_or(|lane| lane.failing.is_none() && !lane.hung()) {
                return Some(self.lane_of(next, ""));
            }
        }
        None
    }

    /// Puts a record on a lane's queue, or makes it the probe of a failing one.
    pub(super) fn enqueue(&mut self, id: LaneId, entry: Entry) {
        self.held_records += 1;
        self.held_bytes += entry.bytes;
        self.queued_staged += usize::from(entry.staged);
        let lane = &mut self.lanes[id];
        if let Some(failing) = &mut lane.failing {
            debug_assert!(failing.probe.is_none(), "a failing destination keeps one record");
            failing.probe = Some(entry);
            return self.refresh(id);
        }
        lane.queued_bytes += entry.bytes;
        lane.queue.push_back(entry);
        if lane.queue.len() == 1 || lane.has_full_batch() && matches!(lane.ready, Ready::Linger(_)) {
            self.refresh(id);
        }
    }

    // Skipping.

    /// A record that was read for the first time is left in the WAL, or one that was held goes back to it.
    fn note_skipped(&mut self, home: LaneId, seq: u64) {
        let lane = &mut self.lanes[home];
        lane.first_skipped = if lane.skipped == 0 { seq } else { lane.first_skipped.min(seq) };
        lane.skipped += 1;
        if lane.skipped == 1 {
            self.skipping.insert(home);
            self.refresh(home);
        }
    }

    /// A skipped record was placed or is done with.
    pub(super) fn note_placed(&mut self, home: LaneId, seq: u64, mark: Mark) {
        self.marks.set(seq, mark);
        let in_pass = self.in_pass(home);
        let lane = &mut self.lanes[home];
        lane.skipped -= 1;
        if in_pass {
            lane.first_skipped = seq + 1; // in WAL order, so the ones before it are placed
        }
        if lane.skipped == 0 {
            self.skipping.remove(&home);
            self.wanting.remove(&home);
            self.leave_pass(home);
            self.refresh(home);
            self.drop_if_done(home);
        }
    }

    /// Gives a held record back to the WAL. A pass may be past it already: its later ones wait for another.
    pub(super) fn give_back(&mut self, home: LaneId, seq: u64) {
        if self.marks.get(seq) != Some(Mark::Done) {
            self.marks.set(seq, Mark::Skipped);
            self.note_skipped(home, seq);
            self.leave_pass(home);
        }
        self.unref(home);
    }

    /// Empties a lane's queue without deciding about its records.
    pub(super) fn take_queue(&mut self, id: LaneId) -> std::collections::VecDeque<Entry> {
        self.unstarve(id); // whatever comes next has not waited yet
        let lane = &mut self.lanes[id];
        lane.queued_bytes = 0;
        std::mem::take(&mut lane.queue)
    }

    /// What left a queue no longer counts as held.
    pub(super) fn release(&mut self, entry: &Entry) {
        self.held_records -= 1;
        self.held_bytes -= entry.bytes;
        self.queued_staged -= usize::from(entry.staged);
    }

    pub(super) fn return_queue(&mut self, id: LaneId) {
        for entry in self.take_queue(id) {
            self.release(&entry);
            self.give_back(entry.home, entry.seq);
        }
    }

    /// Gives a waiting probe back to the WAL; the next record that is placed takes its part.
    pub(super) fn return_probe(&mut self, id: LaneId) {
        let Some(entry) = self.lanes[id].failing.as_mut().and_then(|failing| failing.probe.take()) else { return };
        self.unstarve(id);
        self.release(&entry);
        self.give_back(entry.home, entry.seq);
    }

    /// A waiting probe becomes the head of the queue again.
    pub(super) fn recall_probe(&mut self, id: LaneId) {
        let lane = &mut self.lanes[id];
        if let Some(entry) = lane.failing.as_mut().and_then(|failing| failing.probe.take()) {
            lane.queued_bytes += entry.bytes;
            lane.queue.push_front(entry);
        }
    }

    pub(super) fn unref(&mut self, home: LaneId) {
        self.lanes[home].refs -= 1;
        if self.lanes[home].refs == 0 {
            self.drop_if_done(home);
        }
    }

    // Rescans.

    fn in_pass(&self, home: LaneId) -> bool {
        self.pass.as_ref().is_some_and(|pass| self.lanes[home].pass == pass.serial)
    }

    fn leave_pass(&mut self, home: LaneId) {
        if !self.in_pass(home) {
            return;
        }
        self.lanes[home].pass = 0;
        if let Some(pass) = &mut self.pass {
            pass.open -= 1;
            if pass.open == 0 {
                self.pass = None;
            }
        }
    }

    fn end_pass(&mut self) {
        self.pass = None;
    }

    /// Whether the first skipped record of a lane would find a place.
    fn could_place(&mut self, home: LaneId) -> bool {
        match self.meant_for(home) {
            Some(meant) => self.choose(meant, 0).is_some(),
            None => match self.verdicts.of(&self.lanes[home].life(), self.now) {
                Some(verdict) => matches!(verdict, Verdict::Confirmed { .. }),
                None => true, // it would be asked
            },
        }
    }

    /// Starts or continues reading, as far as there is room.
    pub(super) fn read_on(&mut self) {
        if self.backoff_until.is_some() {
            return;
        }
        let Some(limit) = self.room() else { return };
        let from = self.marks.end();
        let horizon = self.marks.base() + (LOOKAHEAD_WINDOWS * self.window()) as u64;
        let until = self.durable_next.min(horizon);
        if !self.reading_new && until > from {
            self.reading_new = true;
            let records_max = limit.records_max.min((until - from) as usize);
            let limit = ReadLimit { records_max, ..limit };
            self.actions.push_back(Action::ReadNew { from, until, limit });
        }
        if !self.reading_skipped {
            self.rescan(limit);
        }
    }

    fn rescan(&mut self, limit: ReadLimit) {
        if self.pass.is_none() || self.overdue() {
            self.start_pass();
        }
        let Some(position) = self.pass.as_ref().map(|pass| pass.position) else { return };
        let Some(from) = self.marks.next_skipped(position) else {
            // Lanes that are still open have records which the WAL passed over in silence.
            let seq = position;
            self.report(Report::Missing { seq });
            return self.end_pass();
        };
        self.reading_skipped = true;
        if let Some(pass) = &mut self.pass {
            pass.position = from;
        }
        self.actions.push_back(Action::ReadSkipped { from, until: self.marks.end(), limit });
    }

    /// A lane that drains as fast as it is filled could keep a pass going for ever while others want one.
    fn overdue(&mut self) -> bool {
        let overdue = self.pass.as_ref().is_some_and(|pass| self.now >= pass.started + RESCAN_EVERY);
        if !overdue || self.wanting.is_empty() {
            return false;
        }
        let open: Vec<LaneId> = self.skipping.iter().copied().filter(|id| self.in_pass(*id)).collect();
        self.wanting.extend(open);
        self.end_pass();
        true
    }

    fn start_pass(&mut self) {
        if self.wanting.is_empty() {
            return;
        }
        let wanting = std::mem::take(&mut self.wanting);
        self.pass_serial += 1;
        let mut pass = Pass { serial: self.pass_serial, position: u64::MAX, open: 0, started: self.now };
        for id in wanting {
            if self.lanes.get(id).is_none_or(|lane| lane.skipped == 0) || !self.could_place(id) {
                continue;
            }
            let lane = &mut self.lanes[id];
            lane.pass = pass.serial;
            pass.position = pass.position.min(lane.first_skipped);
            pass.open += 1;
        }
        if pass.open > 0 {
            self.metrics.rescans += 1;
            self.pass = Some(pass);
        }
    }
}
