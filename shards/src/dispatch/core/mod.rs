//! The dispatcher's state machine: no I/O, no clock, no runtime. Inputs are method calls, outputs are [`Action`]s.
//!
//! Each sequence number from the checkpoint to the read frontier is done, held or skipped (`marks`). Held records
//! wait on the queue of their destination or are in its one commit in flight (`lane`). `place` decides where a
//! record that was read goes and runs the rescans of skipped ones; `settle` sends batches and judges the answers;
//! `gone` discards what belongs to deleted topics; `trouble` sums up what is wrong with other nodes.
//!
//! The driver's turn: `advance` the time, hand over what happened, `pump`, carry out the actions; repeat while there
//! are any; then wait for something to happen or for `next_timer`.

mod action;
mod bounds;
mod gone;
mod lane;
mod marks;
mod place;
mod settle;
mod trouble;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

pub use action::{Action, CommitId, Report, TopicLife};
pub use bounds::*;
pub use trouble::Trouble;

use super::DispatchMetrics;
use crate::meta::{Address, Destination, NodeId, Snapshot};
use crate::peer::Record;
use crate::rt::Instant;
use crate::wal::ReadLimit;
use gone::Verdicts;
use lane::{Key, Lane, LaneId, Lanes, Ready};
use marks::{Mark, Marks};
use place::Pass;

/// Size of a record for every bound in bytes.
fn encoded_bytes(record: &Record) -> usize {
    record.body.len() + RECORD_OVERHEAD
}

fn remote_nodes(snapshot: &Snapshot) -> BTreeSet<NodeId> {
    let addresses = snapshot.placement.values().flat_map(|placement| placement.iter());
    addresses.map(|address| address.node).filter(|node| *node != NodeId::LOCAL && *node != NodeId::NONE).collect()
}

/// Takes room for a commit of so many bytes at its owner; false when there is none now (E41).
pub type Room<'a> = dyn FnMut(Address, Destination, usize) -> bool + 'a;

#[derive(Debug)]
pub struct Core {
    limits: Limits,
    now: Instant,
    snapshot: Arc<Snapshot>,
    /// Other nodes that own partitions, and which of all nodes are dead.
    nodes: BTreeSet<NodeId>,
    dead: BTreeSet<NodeId>,
    /// The process that each node runs as (E43).
    boots: BTreeMap<NodeId, u64>,
    /// Moving average of commit latencies in nanoseconds, by owner (E19, E44).
    latency: BTreeMap<Address, u64>,
    /// When the last commit was answered. A record that was queued before then found the dispatcher at work.
    answered_at: Instant,

    durable_next: u64,
    checkpoint_stored: u64,
    marks: Marks,
    lanes: Lanes,
    verdicts: Verdicts,

    /// Lanes whose batch, or whose probe, waits for nothing but a slot, oldest first. Entries may be stale: the lane's
    /// `ready` decides.
    due: VecDeque<LaneId>,
    probes_due: VecDeque<LaneId>,
    /// Lanes whose batch waits for room at its owner, by owner and by a number that grows: the first waits longest.
    starving: BTreeMap<Address, BTreeMap<u64, LaneId>>,
    /// The largest of those numbers.
    starved_last: u64,
    /// Room came back somewhere, and the starving lanes have not been tried since.
    room_came: bool,
    lingering: BTreeSet<(Instant, LaneId)>,
    timers: BTreeSet<(Instant, LaneId)>,

    /// Queued or in flight, hung and late commits aside.
    held_records: usize,
    held_bytes: usize,
    /// Queued records that lie in staging memory.
    queued_staged: usize,
    /// Bytes that hung and late commits still refer to.
    lent_bytes: usize,
    commits_active: usize,
    probes_active: usize,
    lanes_active: usize,
    serial: u64,

    /// Lanes with skipped records; those among them that want a rescan; the rescan that is running.
    skipping: BTreeSet<LaneId>,
    wanting: BTreeSet<LaneId>,
    pass: Option<Pass>,
    pass_serial: u64,
    rescan_at: Option<Instant>,
    reading_new: bool,
    reading_skipped: bool,
    backoff_until: Option<Instant>,

    /// Lanes that may be dropped.
    doomed: Vec<LaneId>,
    /// Grows whenever a sibling that was fit may no longer be, or the other way round.
    epoch: u64,
    /// `pressed`: staging memory is short. `relieved`: some was let go since the driver last asked.
    pressed: bool,
    relieved: bool,
    stopping: bool,
    actions: VecDeque<Action>,
    metrics: DispatchMetrics,
}

impl Core {
    pub fn new(limits: Limits, checkpoint: u64, snapshot: Arc<Snapshot>, now: Instant) -> Core {
        Core {
            limits,
            now,
            nodes: remote_nodes(&snapshot),
            snapshot,
            dead: BTreeSet::new(),
            boots: BTreeMap::new(),
            latency: BTreeMap::new(),
            answered_at: now,
            durable_next: checkpoint,
            checkpoint_stored: checkpoint,
            marks: Marks::new(checkpoint),
            lanes: Lanes::default(),
            verdicts: Verdicts::default(),
            due: VecDeque::new(),
            probes_due: VecDeque::new(),
            starving: BTreeMap::new(),
            starved_last: 0,
            room_came: false,
            lingering: BTreeSet::new(),
            timers: BTreeSet::new(),
            held_records: 0,
            held_bytes: 0,
            queued_staged: 0,
            lent_bytes: 0,
            commits_active: 0,
            probes_active: 0,
            lanes_active: 0,
            serial: 0,
            skipping: BTreeSet::new(),
            wanting: BTreeSet::new(),
            pass: None,
            pass_serial: 0,
            rescan_at: None,
            reading_new: false,
            reading_skipped: false,
            backoff_until: None,
            doomed: Vec::new(),
            epoch: 0,
            pressed: false,
            relieved: false,
            stopping: false,
            actions: VecDeque::new(),
            metrics: DispatchMetrics::default(),
        }
    }

    // Inputs, beside those in `place`, `settle` and `gone`.

    /// It is `now`: what was due by then happens.
    pub fn advance(&mut self, now: Instant) {
        self.now = self.now.max(now);
        if self.backoff_until.is_some_and(|at| at <= self.now) {
            self.backoff_until = None;
        }
        while let Some(&(at, id)) = self.timers.first().filter(|(at, _)| *at <= self.now) {
            self.timers.remove(&(at, id));
            self.lanes[id].timer = None;
            self.lane_timer(id);
            self.refresh(id);
        }
        if self.rescan_at.is_some_and(|at| at <= self.now) {
            self.rescan_at = None;
            self.verdicts.forget_expired(self.now);
            self.wanting.extend(self.skipping.iter().copied());
        }
    }

    /// Everything below `next` is durable.
    pub fn durable(&mut self, next: u64) {
        self.durable_next = self.durable_next.max(next);
    }

    /// The control thread's latest word on topics and owners. Older snapshots are ignored.
    pub fn install(&mut self, snapshot: Arc<Snapshot>) {
        if snapshot.version < self.snapshot.version || Arc::ptr_eq(&snapshot, &self.snapshot) {
            return;
        }
        self.nodes = remote_nodes(&snapshot);
        self.snapshot = snapshot;
        self.epoch += 1;
        let nodes = &self.nodes;
        self.latency.retain(|address, _| address.node == NodeId::LOCAL || nodes.contains(&address.node));
        self.boots.retain(|node, _| nodes.contains(node));
        for id in self.lanes.ids() {
            self.look_up(id);
            if self.lanes[id].skipped > 0 {
                self.wanting.insert(id);
            }
            self.refresh(id);
            self.drop_if_done(id);
        }
    }

    /// Membership says that a node lives or is dead. This node is always alive to itself.
    pub fn liveness(&mut self, node: NodeId, alive: bool) {
        let changed = if alive { self.dead.remove(&node) } else { node != NodeId::LOCAL && self.dead.insert(node) };
        if !changed {
            return;
        }
        self.epoch += 1;
        if !alive {
            self.latency.retain(|address, _| address.node != node);
        }
        for id in self.lanes.ids() {
            if self.lanes[id].address.is_some_and(|address| address.node == node) {
                self.owner_changed(id, alive);
            }
        }
    }

    /// The process that a node runs as: what was measured of another one is void (E43).
    pub fn boot(&mut self, node: NodeId, boot_id: u64) {
        if self.boots.insert(node, boot_id).is_some_and(|before| before != boot_id) {
            self.latency.retain(|address, _| address.node != node);
        }
    }

    /// Other nodes that serve partitions: those whose liveness matters.
    pub fn nodes(&self) -> &BTreeSet<NodeId> {
        &self.nodes
    }

    /// Staging memory is nearly used up: the next `pump` sends copies and lets go of what it cannot send (E20).
    pub fn staging_low(&mut self) {
        self.pressed = true;
    }

    /// Nothing more is read or sent; commits in flight are awaited while `settling`.
    pub fn stop(&mut self) {
        self.stopping = true;
    }

    /// Whether commits are in flight that have not been hung.
    pub fn settling(&self) -> bool {
        self.commits_active > 0
    }

    // Outputs.

    /// Decides what to send, read and store next.
    pub fn pump(&mut self, room: &mut Room<'_>) {
        while let Some(id) = self.doomed.pop() {
            self.drop_lane(id);
        }
        if !self.stopping {
            self.release_lingering();
            self.send_due(room);
            if std::mem::take(&mut self.pressed) {
                self.relieved |= self.let_go();
            }
            self.read_on();
        }
        if self.skipping.is_empty() {
            self.rescan_at = None;
        } else if self.rescan_at.is_none() {
            self.rescan_at = Some(self.now + RESCAN_EVERY);
        }
        let checkpoint = self.marks.advance();
        if checkpoint > self.checkpoint_stored {
            self.checkpoint_stored = checkpoint;
            self.actions.push_back(Action::StoreCheckpoint(checkpoint));
        }
    }

    /// Whether memory was let go since this was last asked: time to look whether it is still short.
    pub fn take_relieved(&mut self) -> bool {
        std::mem::take(&mut self.relieved)
    }

    pub fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// When `advance` should be called at the latest. `None` when nothing is owed: an idle dispatcher has no timer.
    pub fn next_timer(&self) -> Option<Instant> {
        if self.stopping {
            return self.timers.first().map(|(at, _)| *at);
        }
        let lingering = self.lingering.first().map(|(at, _)| *at);
        let lane = self.timers.first().map(|(at, _)| *at);
        [lingering, lane, self.rescan_at, self.backoff_until].into_iter().flatten().min()
    }

    pub fn checkpoint(&self) -> u64 {
        self.marks.base()
    }

    /// Every durable record is committed or discarded.
    pub fn drained(&self) -> bool {
        self.marks.base() >= self.durable_next
    }

    /// Whether a rescan has to see this record: asked while it reads, before anything is decoded.
    pub fn wants(&self, seq: u64) -> bool {
        self.marks.get(seq) == Some(Mark::Skipped)
    }

    pub fn metrics(&self) -> DispatchMetrics {
        let mut metrics = self.metrics.clone();
        metrics.held_records = self.held_records as u64;
        metrics.held_bytes = (self.held_bytes + self.lent_bytes) as u64;
        metrics.skipped_records = self.marks.skipped() as u64;
        metrics.commits_in_flight = self.commits_active as u64;
        metrics.destinations = self.lanes.len() as u64;
        metrics.destinations_failing = self.lanes.iter().filter(|lane| lane.failing.is_some()).count() as u64;
        metrics.destinations_hung = self.lanes.iter().filter(|lane| lane.hung()).count() as u64;
        metrics.window_records = self.window() as u64;
        metrics.checkpoint = self.marks.base();
        metrics
    }

    /// What is still owed, for the message of a failed test.
    #[cfg(test)]
    pub fn describe(&self) -> String {
        let owing = self.lanes.iter().filter(|lane| !lane.is_empty());
        owing.fold(format!("pass {:?}, rescan at {:?}\n", self.pass, self.rescan_at), |text, lane| {
            let seqs: Vec<u64> = lane.queue.iter().map(|entry| entry.seq).collect();
            let Lane { key, skipped, refs, live, address, ready, timer, failing, flight, .. } = lane;
            text + &format!(
                "{key:?} skipped {skipped} refs {refs} live {live} {address:?} {ready:?} timer {timer:?} queue {seqs:?} \
                 failing {failing:?} flight {flight:?}\n"
            )
        })
    }

    // Bounds.

    /// Records that may be held, by the fan-out of the moment.
    fn window(&self) -> usize {
        (self.lanes_active * BATCH_TARGET).clamp(WINDOW_RECORDS_MIN, WINDOW_RECORDS_MAX)
    }

    fn queue_records_max(&self) -> usize {
        (self.window() / 4).max(QUEUE_RECORDS_MIN)
    }

    fn queue_bytes_max(&self) -> usize {
        self.limits.held_bytes_max / 4
    }

    /// What may still be read into memory, in records and bytes; `None` when full. At least four destinations'
    /// worth, so that one hot destination (a batch in flight and a full queue) never takes more than half.
    fn room(&self) -> Option<ReadLimit> {
        let records_max = self.window().max(4 * self.queue_records_max());
        let lent_over = self.lent_bytes.saturating_sub(self.limits.held_bytes_max);
        let records = records_max.saturating_sub(self.held_records).min(READ_RECORDS_MAX);
        let bytes = self.limits.held_bytes_max.saturating_sub(self.held_bytes + lent_over).min(READ_BYTES_MAX);
        (records > 0 && bytes > 0).then_some(ReadLimit { records_max: records, bytes_max: bytes })
    }

    fn has_room(&self, id: LaneId, bytes: usize) -> bool {
        let lane = &self.lanes[id];
        let fits = lane.queued_bytes + bytes <= self.queue_bytes_max();
        lane.queue.is_empty() || (lane.queue.len() < self.queue_records_max() && fits)
    }

    // Upkeep of lanes.

    /// The lane of a destination, made when it is new.
    fn lane_of(&mut self, destination: crate::meta::Destination, topic: &str) -> LaneId {
        if let Some(id) = self.lanes.of(destination) {
            return id;
        }
        let topic = match self.snapshot.topic_of(destination.incarnation) {
            Some(meta) => meta.name.clone(),
            None => Arc::from(topic),
        };
        let id = self.lanes.insert(Lane::new(Key::Of(destination), topic));
        self.look_up(id);
        id
    }

    /// Takes over what the snapshot says about a lane.
    fn look_up(&mut self, id: LaneId) {
        let Some(destination) = self.lanes[id].destination() else { return };
        let live = self.snapshot.topic_of(destination.incarnation).is_some();
        let address = self.snapshot.address(destination);
        let lane = &mut self.lanes[id];
        let moved = lane.address != address;
        let died = lane.live && !live;
        lane.live = live;
        lane.address = address;
        if moved {
            lane.served = None;
        }
        if let Some(failing) = lane.failing.as_mut().filter(|_| moved) {
            failing.retry_at = self.now; // another owner deserves a try of its own at once
        }
        if moved || died {
            self.unstarve(id);
        }
        if died {
            self.topic_went(id);
        }
    }

    /// A lane's owner was declared dead, or alive again.
    fn owner_changed(&mut self, id: LaneId, alive: bool) {
        if alive {
            if let Some(failing) = &mut self.lanes[id].failing {
                failing.retry_at = self.now;
            }
        } else if self.sibling(id).is_some() {
            self.return_queue(id);
            self.return_probe(id);
        }
        if self.lanes[id].skipped > 0 {
            self.wanting.insert(id);
        }
        self.refresh(id);
    }

    /// What a lane's timer was armed for.
    fn lane_timer(&mut self, id: LaneId) {
        let now = self.now;
        let (hang, expire) = match &self.lanes[id].flight {
            Some(flight) => (!flight.hung && now >= flight.started + HUNG_AFTER, now >= flight.deadline),
            None => (false, false),
        };
        if hang {
            self.hang(id);
        }
        if expire {
            self.expire(id);
        }
        if self.lanes[id].ask_again_at.is_some_and(|at| at <= now) {
            self.lanes[id].ask_again_at = None;
            self.want(id);
        }
        if self.lanes[id].address.is_none() {
            self.look_up(id);
        }
        let lane = &self.lanes[id];
        let Some(failing) = &lane.failing else { return };
        if now >= failing.reroute_at() && !failing.announced {
            self.start_rerouting(id);
        } else if lane.flight.is_none() && failing.probe.is_none() && now >= failing.retry_at && lane.skipped > 0 {
            self.wanting.insert(id);
        }
    }

    /// Brings everything derived from a lane's state up to date: activity, place in the order of sending, timer.
    fn refresh(&mut self, id: LaneId) {
        let now = self.now;
        let Some(lane) = self.lanes.get(id) else { return };
        let active = !lane.queue.is_empty() || lane.probe_waits() || lane.flight.as_ref().is_some_and(|f| !f.hung);
        let ready = self.readiness(id);
        let timer = self.timer_of(id).map(|at| at.max(now));
        if lane.active != active {
            self.lanes_active = if active { self.lanes_active + 1 } else { self.lanes_active - 1 };
        }
        let lane = &mut self.lanes[id];
        lane.active = active;
        let (old_ready, old_timer) = (lane.ready, lane.timer);
        (lane.ready, lane.timer) = (ready, timer);
        if old_ready != ready {
            if let Ready::Linger(at) = old_ready {
                self.lingering.remove(&(at, id));
            }
            match ready {
                Ready::No => {}
                Ready::Linger(at) => {
                    self.lingering.insert((at, id));
                }
                Ready::Due => self.due.push_back(id),
                Ready::Probe => self.probes_due.push_back(id),
            }
        }
        if old_timer != timer {
            if let Some(at) = old_timer {
                self.timers.remove(&(at, id));
            }
            if let Some(at) = timer {
                self.timers.insert((at, id));
            }
        }
    }

    fn timer_of(&self, id: LaneId) -> Option<Instant> {
        let lane = &self.lanes[id];
        let flight = lane.flight.as_ref().map(|flight| match flight.hung {
            false => (flight.started + HUNG_AFTER).min(flight.deadline),
            true => flight.deadline,
        });
        let owed = lane.skipped > 0 || lane.probe_waits();
        let failing = lane.failing.as_ref().filter(|_| owed && lane.live);
        let retry = failing.map(|f| f.retry_at).filter(|at| lane.flight.is_none() && *at > self.now);
        let reroute = failing.filter(|f| !f.announced).map(|f| f.reroute_at());
        let unresolved = lane.live && lane.address.is_none() && (!lane.queue.is_empty() || lane.probe_waits());
        let lookup = unresolved.then_some(self.now + LOOKUP_EVERY);
        // An armed look-up is not pushed back by every record that joins the queue.
        let lookup = lookup.map(|at| lane.timer.filter(|armed| *armed > self.now).map_or(at, |armed| armed.min(at)));
        [flight, retry, reroute, lookup, lane.ask_again_at].into_iter().flatten().min()
    }

    /// A lane whose topic has gone may have become empty.
    fn drop_if_done(&mut self, id: LaneId) {
        if self.lanes.get(id).is_some_and(|lane| !lane.live && lane.is_empty()) {
            self.doomed.push(id);
        }
    }

    /// Forgets a lane whose topic has gone and that nothing refers to any more (lesson N27). Only between inputs,
    /// so that an id stays valid while one is worked on.
    fn drop_lane(&mut self, id: LaneId) {
        let Some(lane) = self.lanes.get(id) else { return };
        if lane.live || !lane.is_empty() {
            return;
        }
        if let Ready::Linger(at) = lane.ready {
            self.lingering.remove(&(at, id));
        }
        if let Some(at) = lane.timer {
            self.timers.remove(&(at, id));
        }
        self.lanes_active -= usize::from(lane.active);
        self.unstarve(id);
        self.skipping.remove(&id);
        self.wanting.remove(&id);
        self.lanes.remove(id);
    }

    fn report(&mut self, report: Report) {
        self.actions.push_back(Action::Report(report));
    }
}
