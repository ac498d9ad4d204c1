//! Sending batches and judging the answers: done, failing, hung, late, refused.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::action::{Action, CommitId, Report};
use super::lane::{Failing, Flight, LaneId, Ready};
use super::marks::Mark;
use super::{
    Core, Room, COMMITS_MAX, COMMIT_BUDGET, COMMIT_BYTES_MAX, LINGER_MAX, PROBES_MAX, PROBE_BUDGET, RETRY_AFTER,
};
use crate::meta::{Address, NodeId};
use crate::peer::{copy_out, CommitBatch, CommitError, Committed};
use crate::rt::Instant;

impl Core {
    // Sending.

    /// Small batches stop waiting when their time is up, or when what they wait for cannot come because memory is short
    /// or the window full. All that wait for the same node leave with the first of them: what a drive gets at once it
    /// makes durable with one flush or two, what it gets one after the other with a flush each.
    pub(super) fn release_lingering(&mut self) {
        let all = self.pressed || self.room().is_none();
        if !all && self.lingering.first().is_none_or(|(at, _)| *at > self.now) {
            return;
        }
        let node_of = |core: &Core, id: LaneId| core.lanes[id].address.map(|address| address.node);
        let over = self.lingering.iter().take_while(|(at, _)| all || *at <= self.now);
        let nodes: BTreeSet<_> = over.map(|(_, id)| node_of(self, *id)).collect();
        let leaving = self.lingering.iter().filter(|(_, id)| nodes.contains(&node_of(self, *id)));
        let leaving: Vec<_> = leaving.copied().collect();
        for (at, id) in leaving {
            self.lingering.remove(&(at, id));
            self.lanes[id].ready = Ready::Due;
            self.due.push_back(id);
        }
    }

    /// There may be room again where there was none: the next `pump` asks.
    pub fn room_freed(&mut self) {
        self.room_came = true;
    }

    /// Where a lane stands in the order of what leaves next.
    pub(super) fn readiness(&self, id: LaneId) -> Ready {
        let lane = &self.lanes[id];
        let may_leave = lane.live && lane.flight.is_none() && lane.starved.is_none();
        let Some(address) = lane.measured_at().filter(|_| may_leave && lane.address.is_some()) else {
            return Ready::No;
        };
        if let Some(failing) = &lane.failing {
            return if failing.probe.is_some() && failing.retry_at <= self.now { Ready::Probe } else { Ready::No };
        }
        let Some(oldest) = lane.queue.front() else { return Ready::No };
        let at_once = lane.has_full_batch() || lane.ready == Ready::Due || self.idle_at(oldest.queued_at);
        let Some(&latency) = self.latency.get(&address).filter(|_| !at_once) else { return Ready::Due };
        match oldest.queued_at + Duration::from_nanos(latency.saturating_mul(2)).min(LINGER_MAX) {
            until if until <= self.now => Ready::Due,
            until => Ready::Linger(until),
        }
    }

    /// Whether a record queued then has the dispatcher for itself: nothing in flight, also not when it came, and nothing
    /// that waits. Such a record is committed at once. That others have landed since does not end the wait of one that
    /// came while they were in flight: under a steady load there is always a moment with nothing in flight, and each
    /// would send a handful of records on their way, at the cost of a flush on the drive that the next 202 waits for.
    fn idle_at(&self, queued_at: Instant) -> bool {
        self.commits_active == 0 && self.lingering.is_empty() && queued_at > self.answered_at
    }

    /// Fills the free slots, probes first: they are few, and a failing destination must not wait for ever. Then those who
    /// have waited for room.
    pub(super) fn send_due(&mut self, room: &mut Room<'_>) {
        while self.commits_active < COMMITS_MAX && self.probes_active < PROBES_MAX {
            let Some(id) = self.probes_due.pop_front() else { break };
            if self.lanes.get(id).is_some_and(|lane| lane.ready == Ready::Probe) {
                self.send_or_starve(id, room);
            }
        }
        self.send_starving(room);
        while self.commits_active < COMMITS_MAX {
            let Some(id) = self.due.pop_front() else { break };
            if self.lanes.get(id).is_some_and(|lane| lane.ready == Ready::Due) {
                self.send_or_starve(id, room);
            }
        }
    }

    /// Once room may have come back: at each owner those who wait, in the order in which they came, until it has none.
    /// That costs a question for each owner and for each batch that leaves, however many wait. A probe that has no slot
    /// either is passed over and keeps its place.
    fn send_starving(&mut self, room: &mut Room<'_>) {
        if !self.room_came {
            return;
        }
        let owners: Vec<Address> = self.starving.keys().copied().collect();
        for owner in owners {
            let mut from = 0;
            while let Some((&number, &id)) = self.starving.get(&owner).and_then(|line| line.range(from..).next()) {
                if self.commits_active >= COMMITS_MAX {
                    return;
                }
                if self.leaves_to_siblings(id) {
                    self.unstarve(id);
                    self.refresh(id);
                } else if self.lacks_probe_slot(id) {
                    from = number + 1;
                } else if self.finds_room(id, room) {
                    self.unstarve(id);
                    self.send(id);
                } else {
                    break;
                }
            }
        }
        self.room_came = false;
    }

    fn lacks_probe_slot(&self, id: LaneId) -> bool {
        self.probes_active >= PROBES_MAX && self.lanes[id].failing.is_some()
    }

    fn send_or_starve(&mut self, id: LaneId, room: &mut Room<'_>) {
        if self.leaves_to_siblings(id) {
            return self.refresh(id);
        }
        // Where somebody waits for room nobody else gets any before it: small batches that fit would keep a large one
        // from its turn for ever.
        let line = self.lanes[id].measured_at().and_then(|owner| self.starving.get(&owner));
        let waited_for = line.is_some_and(|line| line.values().any(|id| !self.lacks_probe_slot(*id)));
        match !waited_for && self.finds_room(id, room) {
            true => self.send(id),
            false => self.starve(id),
        }
    }

    /// The owner is dead and somebody can take its place: what was to be sent to it goes back to be placed anew.
    fn leaves_to_siblings(&mut self, id: LaneId) -> bool {
        let leaves = self.owner_dead(id) && self.sibling(id).is_some();
        if leaves {
            self.return_queue(id);
            self.return_probe(id);
            self.want(id);
        }
        leaves
    }

    /// Sends what a lane has, up to the commit budget in bytes.
    fn send(&mut self, id: LaneId) {
        let probe = self.lanes[id].failing.is_some();
        if probe {
            self.recall_probe(id);
        }
        let mut records = Vec::with_capacity(self.lanes[id].queue.len().min(4096));
        let mut seqs = Vec::with_capacity(records.capacity());
        let mut bytes = 0;
        let mut first = None;
        let mut staged = false;
        while let Some(next) = self.lanes[id].queue.front() {
            let of_a_kind = first.as_ref().is_none_or(|first: &super::lane::Entry| first.named == next.named);
            if !records.is_empty() && (!of_a_kind || bytes + next.bytes > COMMIT_BYTES_MAX) {
                break;
            }
            let lane = &mut self.lanes[id];
            let Some(entry) = lane.queue.pop_front() else { break };
            lane.queued_bytes -= entry.bytes;
            if self.marks.get(entry.seq) == Some(Mark::Done) {
                self.release(&entry); // a late answer settled it meanwhile
                self.unref(entry.home);
                continue;
            }
            self.queued_staged -= usize::from(entry.staged);
            staged |= entry.staged;
            bytes += entry.bytes;
            seqs.push((entry.seq, entry.home));
            if first.is_none() {
                first = Some(entry.clone());
            }
            records.push(entry.record);
        }
        let lane = &mut self.lanes[id];
        if lane.queue.is_empty() && lane.queue.capacity() > 512 {
            lane.queue = Default::default(); // a burst's memory is not kept for every partition that ever had one
        }
        if staged && self.pressed {
            // A commit that hangs would pin staging memory for as long as its owner likes.
            copy_out(records.iter_mut());
        }
        let (Some(mut first), Some(address), Some(destination)) = (first, lane.address, lane.destination()) else {
            return self.refresh(id);
        };
        if let Some(record) = records.first().filter(|_| self.pressed) {
            first.record = record.clone();
            first.staged = false;
        }
        let budget = if probe { PROBE_BUDGET } else { COMMIT_BUDGET };
        let accepted_under = (!first.named).then_some(destination.incarnation);
        let batch = CommitBatch { destination, topic: lane.topic.clone(), accepted_under, records, budget };
        self.serial += 1;
        let serial = self.serial;
        let (started, deadline) = (self.now, self.now + budget);
        crate::histogram::record(&mut self.metrics.batch_records, seqs.len() as u64);
        self.metrics.commits += 1;
        self.commits_active += 1;
        self.probes_active += usize::from(probe);
        lane.flight = Some(Flight { serial, address, started, deadline, hung: false, probe, bytes, seqs, first });
        self.actions.push_back(Action::Commit { id: CommitId { lane: id, serial }, to: address, batch });
        self.refresh(id);
        self.drained_below_half(id);
    }

    /// Whether the owner takes the next batch now. Shards of this node always do: their memory is this process's.
    fn finds_room(&self, id: LaneId, room: &mut Room<'_>) -> bool {
        let lane = &self.lanes[id];
        let (Some(address), Some(destination)) = (lane.address, lane.destination()) else { return true };
        address.node == NodeId::LOCAL || room(address, destination, lane.next_batch_bytes())
    }

    /// Its records stay queued: they have no slot, no budget that runs out, and do not hang (E41).
    fn starve(&mut self, id: LaneId) {
        let Some(owner) = self.lanes[id].measured_at() else { return };
        self.starved_last += 1;
        self.starving.entry(owner).or_default().insert(self.starved_last, id);
        self.lanes[id].starved = Some((owner, self.starved_last));
        self.metrics.commits_starved += 1;
        self.refresh(id);
    }

    /// A lane no longer waits for room. Whoever is behind it may have had enough all the time.
    pub(super) fn unstarve(&mut self, id: LaneId) {
        let Some((owner, number)) = self.lanes[id].starved.take() else { return };
        self.room_came = true;
        let Some(line) = self.starving.get_mut(&owner) else { return };
        line.remove(&number);
        if line.is_empty() {
            self.starving.remove(&owner);
        }
    }

    /// A queue that has drained takes back what it had no room for.
    fn drained_below_half(&mut self, id: LaneId) {
        let lane = &self.lanes[id];
        let low = lane.queue.len() <= self.queue_records_max() / 2 && lane.queued_bytes <= self.queue_bytes_max() / 2;
        if !low {
            return;
        }
        self.want(id);
        if std::mem::take(&mut self.lanes[id].overflowed) {
            let rerouted = |id: &LaneId| self.lanes[*id].failing.is_some() || self.owner_dead(*id);
            let rerouted: Vec<LaneId> = self.skipping.iter().copied().filter(rerouted).collect();
            self.wanting.extend(rerouted);
        }
    }

    pub(super) fn want(&mut self, id: LaneId) {
        if self.lanes[id].skipped > 0 {
            self.wanting.insert(id);
        }
    }

    // Answers.

    /// A commit's answer has come: the loan of its buffers is over.
    /// `served`: the shard that answered, as far as it is known.
    pub fn landed(&mut self, id: CommitId, served: Address, result: Result<Committed, CommitError>) {
        self.answered_at = self.now;
        let Some(lane) = self.lanes.get_mut(id.lane) else { return };
        if result.is_ok() && lane.address.is_some_and(|address| address.node == served.node) {
            lane.served = Some(served);
        }
        if lane.flight.as_ref().is_some_and(|flight| flight.serial == id.serial) {
            if let Some(flight) = lane.flight.take() {
                self.settle(id.lane, flight, served, result);
            }
        } else if let Some(at) = lane.late.iter().position(|flight| flight.serial == id.serial) {
            let flight = lane.late.swap_remove(at);
            self.settle_late(id.lane, flight, result);
        }
        self.refresh(id.lane);
        self.drop_if_done(id.lane);
    }

    fn settle(&mut self, id: LaneId, flight: Flight, served: Address, result: Result<Committed, CommitError>) {
        if flight.hung {
            self.lent_bytes -= flight.bytes;
            self.epoch += 1; // it may serve as a sibling again
        } else {
            self.leave_flight(&flight);
        }
        match complete(result, flight.seqs.len()) {
            Ok(()) => self.succeed(id, flight, served),
            Err(CommitError::IncarnationMismatch { .. }) if !self.lanes[id].live => {
                self.fail(id, flight, "the owner has another incarnation of the topic".into());
            }
            Err(error @ CommitError::IncarnationMismatch { .. }) => self.refuse(id, flight, error.to_string()),
            Err(error) => self.fail(id, flight, error.to_string()),
        }
    }

    /// A flight that was not hung no longer counts.
    fn leave_flight(&mut self, flight: &Flight) {
        self.commits_active -= 1;
        self.probes_active -= usize::from(flight.probe);
        self.room_came |= flight.probe; // for those that were passed over for want of a slot
        self.held_records -= flight.seqs.len();
        self.held_bytes -= flight.bytes;
    }

    fn succeed(&mut self, id: LaneId, flight: Flight, served: Address) {
        let took = self.now - flight.started;
        let sample = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let average = self.latency.entry(served).or_insert(sample);
        *average = *average - *average / 8 + sample / 8;
        crate::histogram::record(&mut self.metrics.commit_latency_us, sample / 1000);
        self.metrics.records_committed += flight.seqs.len() as u64;
        for (seq, home) in flight.seqs {
            self.marks.set(seq, Mark::Done);
            self.unref(home);
        }
        self.lanes[id].last_error = None;
        if self.lanes[id].failing.is_some() {
            self.recover(id);
        }
        self.want(id);
    }

    fn recover(&mut self, id: LaneId) {
        self.recall_probe(id);
        self.lanes[id].failing = None;
        self.epoch += 1;
        let lane = &self.lanes[id];
        if let Some(destination) = lane.destination() {
            let address = lane.address;
            self.report(Report::Recovered { topic: lane.topic.clone(), destination, address });
        }
        self.want(id);
    }

    /// `412`: whose topic it is has to be looked at again. Nothing is wrong with the destination.
    fn refuse(&mut self, id: LaneId, flight: Flight, error: String) {
        self.metrics.commits_refused += 1;
        let lane = &self.lanes[id];
        let records = (flight.seqs.len() + lane.queue.len()) as u64;
        if let Some(destination) = lane.destination() {
            self.report(Report::Refused { topic: lane.topic.clone(), destination, records, error });
        }
        for (seq, home) in flight.seqs {
            self.give_back(home, seq);
        }
        self.return_queue(id);
        if self.lanes[id].failing.take().is_some() {
            self.epoch += 1; // the owner did answer
        }
    }

    fn fail(&mut self, id: LaneId, flight: Flight, error: String) {
        self.metrics.commits_failed += 1;
        if !self.lanes[id].live {
            return self.fail_without_topic(id, flight, error.into());
        }
        let newly = self.lanes[id].failing.is_none();
        let retry_at = self.now + RETRY_AFTER;
        let fresh = Failing { since: flight.started, retry_at, probe: None, announced: false };
        self.lanes[id].failing.get_or_insert(fresh).retry_at = retry_at;
        self.lanes[id].last_error = Some(error.as_str().into());
        let Flight { seqs, first, address, .. } = flight;
        let keep = self.marks.get(first.seq) != Some(Mark::Done);
        let rest = if keep { &seqs[1..] } else { &seqs[..] };
        if keep {
            self.enqueue(id, super::lane::Entry { queued_at: self.now, ..first });
        }
        for (seq, home) in rest {
            self.give_back(*home, *seq);
        }
        self.return_queue(id);
        if newly {
            self.epoch += 1;
            let lane = &self.lanes[id];
            if let Some(destination) = lane.destination() {
                self.report(Report::Failing { topic: lane.topic.clone(), destination, address, error });
            }
        }
        self.start_rerouting(id);
        self.reroute_probe(id);
    }

    /// The commit failed and the local replica no longer has the topic: no use to probe.
    fn fail_without_topic(&mut self, id: LaneId, flight: Flight, error: Arc<str>) {
        let life = self.lanes[id].life();
        self.lanes[id].failing = None;
        self.lanes[id].last_error = Some(error.clone());
        let over = !flight.first.named && self.is_over(&life);
        for (seq, home) in flight.seqs {
            if !over {
                self.give_back(home, seq);
                continue;
            }
            if self.marks.get(seq) != Some(Mark::Done) {
                self.report_discard(home, seq, Some(error.clone()));
                self.marks.set(seq, Mark::Done);
            }
            self.unref(home);
        }
        if self.is_over(&life) {
            self.discard_queue(id);
        } else {
            self.return_queue(id);
        }
    }

    fn rerouting(&self, id: LaneId) -> bool {
        let past_grace = |failing: &Failing| failing.reroute_at() <= self.now;
        self.owner_dead(id) || self.lanes[id].failing.as_ref().is_some_and(past_grace)
    }

    /// From here on the records of a destination that keeps failing go to a sibling.
    pub(super) fn start_rerouting(&mut self, id: LaneId) {
        if !self.rerouting(id) {
            return;
        }
        self.want(id);
        let lane = &mut self.lanes[id];
        let Some(destination) = lane.destination() else { return };
        let Some(failing) = lane.failing.as_mut().filter(|failing| !failing.announced) else { return };
        failing.announced = true;
        let (topic, address) = (lane.topic.clone(), lane.address);
        self.report(Report::Rerouting { topic, destination, address });
    }

    /// A probe that failed past the grace goes to the sibling like the other records; the next record of the
    /// partition is the next probe. A probe kept for as long as its owner is away would pin the checkpoint, and
    /// with it first the WAL's disk space and then, at the end of the lookahead, everybody's dispatch.
    fn reroute_probe(&mut self, id: LaneId) {
        if !self.rerouting(id) {
            return;
        }
        let Some(sibling) = self.sibling(id) else { return };
        let Some(bytes) = self.lanes[id].failing.as_ref().and_then(|f| f.probe.as_ref()).map(|entry| entry.bytes)
        else {
            return;
        };
        if !self.has_room(sibling, bytes) {
            return;
        }
        if let Some(entry) = self.lanes[id].failing.as_mut().and_then(|failing| failing.probe.take()) {
            self.unstarve(id);
            self.release(&entry);
            self.metrics.records_rerouted += 1;
            self.enqueue(sibling, entry);
        }
    }

    /// A commit that has not been answered for a second: counts for nothing until it is, and holds nothing back.
    pub(super) fn hang(&mut self, id: LaneId) {
        let Some(mut flight) = self.lanes[id].flight.take() else { return };
        self.leave_flight(&flight);
        self.lent_bytes += flight.bytes;
        flight.hung = true;
        self.metrics.commits_hung += 1;
        self.epoch += 1;
        let (address, records, probe) = (flight.address, flight.seqs.len() as u64, flight.probe);
        self.lanes[id].flight = Some(flight);
        self.return_queue(id);
        let lane = &self.lanes[id];
        // That a destination fails has been reported: each of its probes would say it again.
        if let Some(destination) = lane.destination().filter(|_| !probe) {
            self.report(Report::Hung { topic: lane.topic.clone(), destination, address, records });
        }
    }

    /// The budget is spent: a failure of unknown outcome. The buffers stay lent until the reply (E21), so the
    /// flight is kept aside, and an answer that still comes is believed.
    pub(super) fn expire(&mut self, id: LaneId) {
        let Some(flight) = self.lanes[id].flight.take() else { return };
        for (_, home) in &flight.seqs {
            self.lanes[*home].refs += 1; // one for the records that are tried again, one for the late answer
        }
        let waited: Duration = self.now - flight.started;
        let again = Flight { seqs: flight.seqs.clone(), first: flight.first.clone(), ..flight };
        self.lanes[id].late.push(flight);
        self.epoch += 1;
        self.fail(id, again, format!("no answer within {} s", waited.as_secs()));
    }

    /// An answer after the budget: a success spares the records that have not been sent again since.
    fn settle_late(&mut self, id: LaneId, flight: Flight, result: Result<Committed, CommitError>) {
        self.lent_bytes -= flight.bytes;
        let stored = complete(result, flight.seqs.len()).is_ok();
        for (seq, home) in flight.seqs {
            self.metrics.records_committed += u64::from(stored && self.marks.get(seq) != Some(Mark::Done));
            match self.marks.get(seq) {
                Some(Mark::Skipped) if stored => self.note_placed(home, seq, Mark::Done),
                _ if stored => self.marks.set(seq, Mark::Done),
                _ => {}
            }
            self.unref(home);
        }
        let idle = self.lanes[id].flight.is_none();
        if stored && idle && self.lanes[id].failing.is_some() {
            self.recover(id);
        }
    }
}

/// Only a commit of every record counts as one.
fn complete(result: Result<Committed, CommitError>, records: usize) -> Result<(), CommitError> {
    match result {
        Ok(committed) if committed.count == records as u64 => Ok(()),
        Ok(committed) => {
            Err(CommitError::Failed(format!("the owner committed {} of {records} records", committed.count)))
        }
        Err(error) => Err(error),
    }
}
