//! Nodes (mostly one), their disks, their clients and their misfortunes, all from one seed.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use narad_shards::api::{MetaReply, NewTopic};
use narad_shards::io::sim::{Incident, Op, SimDisk};
use narad_shards::meta::{Incarnation, ShardId};
use narad_shards::remote::sim::SimNetwork;
use narad_shards::rt::sim::{NodeTag, Rng, Sim};
use narad_shards::rt::sync::{oneshot, Receiver};
use narad_shards::rt::{self, Instant};

use crate::broker::{Answer, Broker, End, Launcher};
use crate::clients;
use crate::ledger::{Boots, Ledger, Rule, Violation};
use crate::nemesis;
use crate::options::{Profile, WorldOptions};
use crate::whole::{Onlooker, Whole};

/// The first node's process.
pub const NODE: NodeTag = 1;
/// Of several nodes: how long what a fault has begun may go on once it is over (probes, silent connections, reroutes).
const CLUSTER_GRACE: Duration = Duration::from_secs(12);

/// What a process that stood still had not made durable is durable so long after it went on.
const STILL_MATTERS: Duration = Duration::from_secs(3);
/// How often is looked whether the nodes are a cluster.
const LOOK: Duration = Duration::from_millis(100);
/// A healed cluster is whole and ready within this time: an election, a join, and the age at which a leader gives votes.
const READY_MAX: Duration = Duration::from_secs(60);

/// A call that takes longer than this will never be answered.
const ANSWER_MAX: Duration = Duration::from_secs(300);

/// What a client got from the node.
pub enum Called<T> {
    /// No process was there: nothing was sent.
    Down,
    /// Sent, and the process died or the client gave up.
    Lost,
    /// With the numbers of the processes that there were when it was sent.
    Answered(T, Boots),
}

#[derive(Clone)]
pub struct TopicHandle {
    pub name: String,
    /// `None` while it does not exist, or nobody knows.
    pub incarnation: Option<Incarnation>,
}

pub struct World {
    pub sim: Sim,
    /// One a node.
    pub disks: Vec<SimDisk>,
    pub options: WorldOptions,
    pub ledger: RefCell<Ledger>,
    pub topics: RefCell<Vec<TopicHandle>>,
    pub rng: RefCell<Rng>,
    /// Producers that are not done yet.
    pub producing: Cell<usize>,
    /// Consumers ack all they get, at once.
    pub draining: Cell<bool>,
    pub stopping: Cell<bool>,
    numbers: Cell<u64>,
    launcher: Rc<dyn Launcher>,
    /// One a node that runs.
    brokers: RefCell<Vec<Option<Rc<dyn Broker>>>>,
    /// Faults of the network and ends of processes so far.
    faults: Cell<u64>,
    /// When each node last began to stand still and went on.
    stood_still: RefCell<BTreeMap<usize, (Instant, Instant)>>,
    /// The node refuses to start, which damage explains.
    refused: Cell<bool>,
}

impl World {
    pub fn new(
        options: WorldOptions,
        sim: &Sim,
        mut rng: Rng,
        launcher: impl FnOnce(u64, &WorldOptions, &Sim) -> Rc<dyn Launcher>,
    ) -> Rc<World> {
        let world = Rc::new(World {
            sim: sim.clone(),
            disks: (0..options.nodes).map(|_| SimDisk::with(rng.next_u64(), options.disk)).collect(),
            ledger: RefCell::new(Ledger::new(options.allowances(), options.nodes, options.whole)),
            topics: RefCell::default(),
            producing: Cell::new(0),
            draining: Cell::new(false),
            stopping: Cell::new(false),
            numbers: Cell::new(0),
            launcher: launcher(rng.next_u64(), &options, sim),
            brokers: RefCell::new(vec![None; options.nodes]),
            faults: Cell::new(0),
            stood_still: RefCell::default(),
            refused: Cell::new(false),
            rng: RefCell::new(rng),
            options,
        });
        world.launcher.observe(Rc::new(Onlooker::of(&world)));
        world
    }

    pub fn draw(&self, bound: u64) -> u64 {
        self.rng.borrow_mut().below(bound)
    }

    pub fn chance(&self, numerator: u64, denominator: u64) -> bool {
        self.rng.borrow_mut().chance(numerator, denominator)
    }

    pub async fn pause(&self, low: Duration, high: Duration) {
        let spread = (high.saturating_sub(low).as_nanos() as u64).max(1);
        let extra = Duration::from_nanos(self.draw(spread));
        rt::sleep(low + extra).await;
    }

    pub fn next_number(&self) -> u64 {
        self.numbers.set(self.numbers.get() + 1);
        self.numbers.get()
    }

    pub fn any_shard(&self) -> ShardId {
        // More than there are is taken modulo by the node: a client knows no shards.
        self.draw(64) as ShardId
    }

    pub fn violate(&self, rule: Rule, text: String) {
        self.ledger.borrow_mut().violate(rt::now(), rule, text);
    }

    pub fn note(&self, text: String) {
        self.ledger.borrow_mut().note(rt::now(), text);
    }

    /// A topic that exists as far as anybody knows.
    pub fn any_topic(&self) -> Option<TopicHandle> {
        let topics = self.topics.borrow();
        let live: Vec<&TopicHandle> = topics.iter().filter(|topic| topic.incarnation.is_some()).collect();
        (!live.is_empty()).then(|| live[self.draw(live.len() as u64) as usize].clone())
    }

    /// The disk of the first node: the only one where there is one.
    pub fn disk(&self) -> &SimDisk {
        &self.disks[0]
    }

    pub fn any_node(&self) -> usize {
        match self.options.nodes {
            1 => 0,
            nodes => self.draw(nodes as u64) as usize,
        }
    }

    pub fn network(&self) -> Option<SimNetwork> {
        self.launcher.network()
    }

    pub fn whole(&self) -> Option<Rc<Whole>> {
        self.launcher.whole()
    }

    /// Reports what was found broken behind the shards.
    pub fn look_at_metadata(&self) {
        for Violation { rule, text } in self.launcher.broken() {
            self.violate(rule, text);
        }
    }

    pub fn set_alive(&self, node: usize, alive: bool) {
        self.launcher.set_alive(node, alive);
    }

    /// A fault that explains what comes of it.
    pub fn fault(&self, text: &str) {
        self.faults.set(self.faults.get() + 1);
        self.ledger.borrow_mut().fault(rt::now(), text);
    }

    /// All faults so far are over; among several nodes, once their consequences are as well.
    pub fn fault_over(self: &Rc<Self>) {
        if self.options.nodes == 1 {
            return self.ledger.borrow_mut().fault_over(rt::now());
        }
        let (world, faults) = (Rc::downgrade(self), self.faults.get());
        rt::spawn(rt::Queue::Foreground, async move {
            // What lacks a leader, or a node that knows its own partitions, is not over.
            while let Some(whole) = world.upgrade().and_then(|world| world.whole()) {
                if whole.unready().is_none() {
                    break;
                }
                rt::sleep(LOOK).await;
            }
            rt::sleep(CLUSTER_GRACE).await;
            let Some(world) = world.upgrade().filter(|world| world.faults.get() == faults) else { return };
            world.ledger.borrow_mut().fault_over(rt::now());
        });
    }

    /// Runs a request on any node. With `patience`, the client goes away after that time, and the request with it.
    pub async fn call<T: 'static>(
        &self,
        patience: Option<Duration>,
        make: impl FnOnce(Rc<dyn Broker>) -> Answer<T> + 'static,
    ) -> Called<T> {
        self.call_on(self.any_node(), patience, make).await
    }

    pub async fn call_on<T: 'static>(
        &self,
        node: usize,
        patience: Option<Duration>,
        make: impl FnOnce(Rc<dyn Broker>) -> Answer<T> + 'static,
    ) -> Called<T> {
        let Some(broker) = self.brokers.borrow()[node].clone() else { return Called::Down };
        let boots = self.ledger.borrow().boots();
        let (answer, receiver) = oneshot();
        let (connected, gone) = oneshot::<()>();
        self.sim.spawn_on(tag(node), async move {
            if let Some(value) = unless_gone(make(broker), gone).await {
                // The client may have gone in this very moment.
                let _ = answer.send(value);
            }
        });
        let answered = rt::timeout(patience.unwrap_or(ANSWER_MAX), receiver).await;
        drop(connected);
        match answered {
            Ok(Some(value)) => Called::Answered(value, boots),
            Ok(None) => Called::Lost,
            Err(rt::Elapsed) => {
                if patience.is_none() && self.ledger.borrow().boots() == boots {
                    self.violate(Rule::Stalled, format!("no answer in {ANSWER_MAX:?}"));
                }
                Called::Lost
            }
        }
    }

    /// The node's process stands still for a while.
    pub async fn stand_still(&self, node: usize, low: Duration, high: Duration) {
        let Some(network) = self.network() else { return };
        self.fault(&format!("node {node} stands still"));
        let since = rt::now();
        network.pause(tag(node));
        self.sim.pause(tag(node));
        self.pause(low, high).await;
        network.resume(tag(node));
        self.sim.resume(tag(node));
        self.stood_still.borrow_mut().insert(node, (since, rt::now()));
        self.note(format!("--- node {node} goes on"));
    }

    /// Ends the process.
    pub async fn stop(&self, node: usize, end: End) {
        let mut end = end;
        if self.options.nodes > 1 {
            // Also a graceful one: what others had under way to it has an unknown outcome (R12).
            self.fault(&format!("node {node} ends"));
        }
        if end == End::Graceful {
            let stopped = self.call_on(node, Some(ANSWER_MAX), |broker| broker.shutdown()).await;
            if matches!(stopped, Called::Lost) {
                if self.options.allowances().honest && !self.options.allowances().disk_errors {
                    self.violate(Rule::Stalled, "a graceful stop that did not end".to_owned());
                }
                end = End::Killed;
            }
        }
        if end != End::Graceful {
            self.ledger.borrow_mut().fault(rt::now(), &format!("{end:?}"));
        }
        self.brokers.borrow_mut()[node] = None;
        self.launcher.ending(node);
        self.sim.kill(tag(node));
        // A process that went on while its disk stood still could promise nothing any more: none does that, and what it
        // answered from then on counts as never having had the time to reach the disk.
        let disk = &self.disks[node];
        let still = self.stood_still.borrow().get(&node).copied();
        let still = still.filter(|(_, until)| rt::now() - *until < STILL_MATTERS).map(|(since, _)| since);
        let judged = disk.frozen_at().or(still).unwrap_or(rt::now());
        match end {
            End::PowerCut => disk.power_cut(),
            End::Graceful | End::Killed => disk.process_crash(),
        }
        self.launcher.ended(node, end);
        self.ledger.borrow_mut().ended(rt::now(), judged, node, end);
    }

    /// Starts a node; tries again, in the end on a disk without faults. False when it refuses for good.
    pub async fn start(&self, node: usize, shards: ShardId) -> bool {
        for attempt in 0..6 {
            if attempt == 3 {
                self.disks[node].clear_faults();
                self.disks[node].set_capacity(None);
            }
            let (answer, receiver) = oneshot();
            let launch = self.launcher.launch(node, self.disks[node].clone(), shards);
            self.sim.spawn_on(tag(node), async move {
                // Nobody else waits for it.
                let _ = answer.send(launch.await);
            });
            match rt::timeout(ANSWER_MAX, receiver).await {
                Ok(Some(Ok(broker))) => {
                    self.ledger.borrow_mut().started(rt::now(), node, shards);
                    self.brokers.borrow_mut()[node] = Some(broker);
                    return true;
                }
                Ok(Some(Err(why))) => {
                    self.note(format!("=== refused to start: {why}"));
                    let allowances = self.options.allowances();
                    if allowances.honest && (attempt >= 3 || !allowances.disk_errors) {
                        self.violate(Rule::Refusal, format!("on a disk in order: {why}"));
                    }
                }
                Ok(None) | Err(rt::Elapsed) => self.note("=== start did not end".to_owned()),
            }
            self.stop(node, End::Killed).await;
            rt::sleep(Duration::from_millis(100)).await;
        }
        self.refused.set(true);
        false
    }

    pub fn refused(&self) -> bool {
        self.refused.get()
    }

    pub async fn create_topic(&self, name: &str) {
        let topic = NewTopic {
            name: name.to_owned(),
            partitions: self.options.partitions,
            retention_ms: self.options.retention.map_or(0, |age| age.as_millis() as u64),
            visibility_timeout_ms: self.options.visibility.as_millis() as u64,
            max_in_flight_per_partition: self.options.max_in_flight,
            max_acked_ahead_per_partition: self.options.max_acked_ahead,
            owner: None,
        };
        let started = rt::now();
        loop {
            let wanted = topic.clone();
            match self.call(None, |broker| broker.create_topic(wanted)).await {
                Called::Answered(MetaReply::Created(meta), _) => {
                    let mut ledger = self.ledger.borrow_mut();
                    ledger.topic_created(&meta, started);
                    drop(ledger);
                    return self.put_handle(name, Some(meta.incarnation));
                }
                // An attempt whose outcome was unknown.
                Called::Answered(MetaReply::Exists, _) if self.options.whole => {
                    let incarnation = self.ledger.borrow().live(name);
                    self.note(format!("{name} was created all the same: {incarnation:?}"));
                    if incarnation.is_some() {
                        return self.put_handle(name, incarnation);
                    }
                }
                // Answered for certain in the end: with an incarnation that nobody has told us, nothing can be checked.
                Called::Answered(other, _) => self.note(format!("create {name}: {other:?}")),
                Called::Down | Called::Lost => {}
            }
            if self.refused() || self.stopping.get() {
                return;
            }
            rt::sleep(Duration::from_millis(50)).await;
        }
    }

    fn put_handle(&self, name: &str, incarnation: Option<Incarnation>) {
        let mut topics = self.topics.borrow_mut();
        topics.retain(|other| other.name != name);
        topics.push(TopicHandle { name: name.to_owned(), incarnation });
    }

    /// Starts nodes beside each other, at most so far apart: those of a cluster found it together.
    pub async fn start_all(self: &Rc<Self>, nodes: impl Iterator<Item = usize>, apart: Duration) -> bool {
        let begin = |node| {
            let world = self.clone();
            rt::spawn(rt::Queue::Foreground, async move {
                world.pause(Duration::ZERO, apart).await;
                world.start(node, world.options.shards).await
            })
        };
        let starting: Vec<_> = nodes.map(begin).collect();
        let mut all = true;
        for started in starting {
            all &= started.await;
        }
        all
    }

    pub async fn live(self: Rc<World>) {
        let apart = if self.options.whole { [0, 500, 5_000, 20_000][self.draw(4) as usize] } else { 0 };
        if !self.start_all(0..self.options.nodes, Duration::from_millis(apart)).await {
            return;
        }
        if self.options.whole {
            // Whoever comes late to the founding waits for its vote, and its partitions for it.
            self.fault("the cluster forms");
            self.fault_over();
        }
        for index in 0..self.options.topics {
            self.create_topic(&format!("topic-{index}")).await;
        }
        self.producing.set(self.options.producers);
        for index in 0..self.options.producers {
            let world = self.clone();
            rt::spawn(rt::Queue::Foreground, async move { clients::produce(&world, index).await });
        }
        for index in 0..self.options.consumers {
            let world = self.clone();
            rt::spawn(rt::Queue::Foreground, async move { clients::consume(&world, index).await });
        }
        let world = self.clone();
        rt::spawn(rt::Queue::Foreground, async move { clients::watch(&world).await });
        nemesis::run(&self).await;
        if !self.refused() {
            self.settle_down().await;
        }
        self.stopping.set(true);
        for node in 0..self.options.nodes {
            self.brokers.borrow_mut()[node] = None;
            self.launcher.ending(node);
            self.sim.kill(tag(node));
        }
    }

    /// Heals everything, and waits until nothing is owed and nothing comes back.
    async fn settle_down(self: &Rc<Self>) {
        for disk in &self.disks {
            disk.clear_faults();
            disk.set_capacity(None);
            disk.set_slowness(1);
        }
        use Profile::{Calm, Cluster, Kills, Network, PowerCuts, Resize};
        let sound = matches!(self.options.profile, Calm | Kills | PowerCuts | Network | Cluster | Resize);
        // Now and then without a restart: leases that nobody will end have to lapse.
        if !sound || self.chance(2, 3) {
            let graceful = self.options.profile == Profile::Calm || self.chance(1, 2);
            for node in 0..self.options.nodes {
                self.stop(node, if graceful { End::Graceful } else { End::Killed }).await;
                if !self.start(node, self.options.shards).await {
                    return;
                }
            }
        }
        if let Some(whole) = self.whole() {
            self.become_whole(&whole).await;
        }
        self.ledger.borrow_mut().fault_over(rt::now());
        self.draining.set(true);
        self.note("=== healed, draining".to_owned());
        let deadline = rt::now() + self.options.patience + self.options.visibility * 4;
        loop {
            while rt::now() < deadline && self.ledger.borrow().owes(rt::wall_clock_ms()) {
                rt::sleep(Duration::from_millis(50)).await;
            }
            rt::sleep(self.options.visibility * 2 + Duration::from_secs(2)).await;
            // A second copy may have come meanwhile, and be with a consumer at this moment.
            if rt::now() >= deadline || !self.ledger.borrow().owes(rt::wall_clock_ms()) {
                break;
            }
        }
        self.look_at_metadata();
        let incidents = self.disk().incidents();
        let honest = self.options.allowances().honest;
        let excuse = |started: Instant, cuts: &[Instant]| !honest && explains(&incidents, started, cuts);
        self.ledger.borrow_mut().finish(rt::now(), rt::wall_clock_ms(), excuse);
    }
}

impl World {
    async fn become_whole(&self, whole: &Whole) {
        let healed = rt::now();
        self.ledger.borrow_mut().counts.terms = whole.terms();
        while let Some(why) = whole.unready() {
            if rt::now() > healed + READY_MAX {
                return self.violate(Rule::NotReady, format!("{READY_MAX:?} after all was healed: {why}"));
            }
            rt::sleep(LOOK).await;
        }
        self.look_at_metadata();
    }
}

/// The tag of a node's tasks.
pub fn tag(node: usize) -> NodeTag {
    NODE + node as NodeTag
}

/// E33: whether a fault took a record whose produce started then. A lie takes what it covered, at the next power cut:
/// what was there by then, and, where it was about a name, a header or all of a file, what came into that file later.
fn explains(incidents: &[(Instant, Incident)], started: Instant, cuts: &[Instant]) -> bool {
    incidents.iter().any(|(at, incident)| match incident {
        Incident::Rotted { .. } => true,
        Incident::Skipped { offset, .. } => *at >= started || *offset == 0,
        Incident::Dropped { .. } => *at >= started && cuts.iter().any(|cut| cut >= at),
        Incident::Lied { op, offset, .. } => {
            let beneath = matches!(op, Op::SyncDir | Op::SyncData) || *offset == 0;
            let cut = cuts.iter().find(|cut| *cut >= at);
            cut.is_some_and(|cut| *at >= started || (beneath && started <= *cut))
        }
    })
}

/// Runs `work` until it is done, or until the other end of `gone` is dropped.
async fn unless_gone<T>(mut work: Answer<T>, mut gone: Receiver<()>) -> Option<T> {
    std::future::poll_fn(move |cx| {
        if let Poll::Ready(value) = work.as_mut().poll(cx) {
            return Poll::Ready(Some(value));
        }
        Pin::new(&mut gone).poll(cx).map(|_| None)
    })
    .await
}
