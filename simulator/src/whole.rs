//! Whole nodes: behind the shards stands the control plane of the real node, with consensus and state machine on their
//! files, controller and membership, on the simulated network. A process that is killed leaves its files as redb had
//! synced them; an operator may put older copies of them back.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use narad::control::consensus::configuration::Server;
use narad::control::consensus::restart::Mode;
use narad::control::consensus::{self, Consensus};
use narad::control::plane::{self, Book, Door, Identity, Part, Plane};
use narad::control::{Applier, Command, Control, Install, Join, Metastore, Placement, Resolve, Start};
use narad_shards::api::{MetaCommand, MetaReply, NodeStatus};
use narad_shards::meta::{Address, ShardId, Snapshot};
use narad_shards::peer::{Carrier, LocalBoxFuture, Request};
use narad_shards::remote::sim::SimNetwork;
use narad_shards::remote::{Hello, RemoteCarrier, RemoteService, Transport};
use narad_shards::rt::sim::{Rng, Sim};
use narad_shards::rt::{self, Queue};
use narad_shards::shard::Shard;

use crate::broker::{Answer, End, Observer};
use crate::control::ControlPlane;
use crate::ledger::{Rule, Violation};
use crate::metadata_files::{Checked, History, MetadataFiles};
use crate::node::Links;
use crate::options::{Planted, WorldOptions};
use crate::world::{tag, World};

const CONTROL_PORT: u16 = 7900;
const SHARD_PORT: u16 = 7000;
/// A transaction on the metadata takes at most so long.
const COMMIT_MAX: Duration = Duration::from_millis(4);

pub struct Whole {
    nodes: usize,
    network: SimNetwork,
    files: MetadataFiles,
    planted: Option<Planted>,
    tuning: Tuning,
    rng: RefCell<Rng>,
    /// Processes that run.
    running: RefCell<BTreeMap<usize, Process>>,
    /// Nodes whose next start says `--restored`.
    restored: RefCell<Vec<usize>>,
    /// Who led in which term.
    leaders: RefCell<BTreeMap<u64, u64>>,
    history: History,
    observer: RefCell<Option<Rc<dyn Observer>>>,
    me: Weak<Whole>,
}

/// So small that a short world compacts its log and sends images.
#[derive(Clone, Copy, Debug)]
struct Tuning {
    snapshot_entries: u64,
    trailing_entries: u64,
    snapshot_check: Duration,
}

#[derive(Clone)]
struct Process {
    consensus: Rc<Consensus>,
    applier: Rc<Applier>,
    control: Rc<Control>,
    boot_id: u64,
    serves: Rc<Cell<bool>>,
}

pub fn name(node: usize) -> String {
    format!("node-{node}")
}

fn address(node: usize, port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, node as u8 + 1], port))
}

fn control_address(node: usize) -> String {
    address(node, CONTROL_PORT).to_string()
}

impl Whole {
    pub fn new(options: &WorldOptions, sim: &Sim, network: SimNetwork, mut rng: Rng) -> Rc<Whole> {
        let (nodes, planted) = (options.nodes, options.planted);
        sim.set_blocking(COMMIT_MAX);
        if rng.chance(1, 4) {
            network.set_delay(Duration::from_micros(200), Duration::from_millis(rng.range(2, 40)));
        }
        let tuning = match rng.below(3) {
            0 => Tuning { snapshot_entries: 8192, trailing_entries: 10_240, snapshot_check: Duration::from_secs(120) },
            _ => Tuning {
                snapshot_entries: rng.range(5, 40),
                trailing_entries: rng.range(1, 20),
                snapshot_check: Duration::from_millis(rng.range(200, 5_000)),
            },
        };
        Rc::new_cyclic(|me| Whole {
            nodes,
            network,
            files: MetadataFiles::new(nodes),
            planted,
            tuning,
            rng: RefCell::new(rng),
            running: RefCell::default(),
            restored: RefCell::default(),
            leaders: RefCell::default(),
            history: History::default(),
            observer: RefCell::default(),
            me: me.clone(),
        })
    }

    fn process(&self, node: usize) -> Option<Process> {
        self.running.borrow().get(&node).cloned()
    }

    /// The node that leads and knows it.
    pub fn leader(&self) -> Option<usize> {
        let running = self.running.borrow();
        let leading = running.iter().filter(|(_, process)| process.consensus.status().is_established);
        leading.max_by_key(|(_, process)| process.consensus.status().term).map(|(node, _)| *node)
    }

    /// Terms that somebody has led.
    pub fn terms(&self) -> u64 {
        self.leaders.borrow().len() as u64
    }

    /// Why the cluster is not whole and ready, if it is not: every node caught up with one leader that all hear, with a
    /// vote, and believed alive.
    pub fn unready(&self) -> Option<String> {
        let Some(leader) = self.leader() else { return Some("nobody leads".to_owned()) };
        let status = self.process(leader)?.consensus.status();
        let voters = status.configuration.servers.values().filter(|server| server.voter).count();
        if voters != self.nodes || status.configuration.servers.len() != self.nodes {
            return Some(format!("the servers are {:?}", status.configuration.servers));
        }
        for node in 0..self.nodes {
            let Some(process) = self.process(node) else { return Some(format!("{} does not run", name(node))) };
            let own = process.consensus.status();
            if !process.serves.get() || !process.consensus.sees_leader() || own.leader != status.raft_id {
                return Some(format!("{} is not ready: {own:?}", name(node)));
            }
            if process.applier.applied_index() < status.commit_index {
                return Some(format!("{} has applied less than {}", name(node), status.commit_index));
            }
            let state = process.applier.state();
            if state.members().len() != self.nodes || state.members().values().any(|member| !member.alive) {
                return Some(format!("{} knows the members {:?}", name(node), state.members()));
            }
        }
        None
    }

    /// Whether the cluster can do without the disk of a node: all others are voters with a leader among themselves who
    /// hears each of them, and have all that was ever decided.
    pub fn can_spare(&self, node: usize) -> bool {
        self.unready().is_none() && self.leader() != Some(node)
    }

    /// Keeps a copy of the metadata files of a node as they are now.
    pub fn copy(&self, node: usize) {
        if let Some(process) = self.process(node) {
            let last = process.consensus.status().last_index;
            self.files.copy(node, process.applier.applied_index(), last);
        }
    }

    /// Puts files of the copy in the place of those of a node that does not run. What was put back, if anything.
    pub fn put_back(&self, node: usize, which: Old) -> Option<String> {
        match which {
            Old::State => {
                let what = self.files.put_back_state(node)?;
                // Healed, or refused: then the operator takes it back.
                match consensus::files::open(&self.files.of(node), &self.mode(node), false, 1) {
                    Ok(_) => Some(what),
                    Err(why) => {
                        self.files.take_state_back(node);
                        if !why.contains("the metadata lacks") {
                            self.history.broke(Rule::OldFiles, format!("{} with {what}: {why}", name(node)));
                        }
                        Some(format!("{what}, which is refused: {why}"))
                    }
                }
            }
            Old::Log => {
                let why = self.files.put_back_log(node)?;
                // What the node must say to that, before an operator has it start all the same.
                let refused = consensus::files::open(&self.files.of(node), &self.mode(node), false, 1);
                if refused.is_ok() {
                    self.history.broke(Rule::OldFiles, format!("{} starts with {why}", name(node)));
                }
                self.restored.borrow_mut().push(node);
                Some(why)
            }
            Old::All => {
                self.restored.borrow_mut().push(node);
                self.files.put_back_all(node)
            }
        }
    }

    fn mode(&self, node: usize) -> Mode {
        let voter = |node| Server { name: name(node), address: control_address(node), voter: true };
        Mode::Bootstrap { me: name(node), voters: (0..self.nodes).map(voter).collect() }
    }

    /// Before the first start has made anything: whether to found a cluster (K29).
    async fn first_mode(&self, node: usize) -> Mode {
        let at = address(node, CONTROL_PORT);
        let initial: Vec<String> = (0..self.nodes).map(name).collect();
        let service = plane::NeverConfigured::new(&name(node), &initial);
        self.network.listen(tag(node), at, service.clone());
        let join = Join {
            node: name(node),
            raft_id: 0,
            peer_address: control_address(node),
            empty_directory: true,
            newest_command_type: Command::NEWEST_TYPE,
            probe: true,
            initial_members: initial,
        };
        let others = (0..self.nodes).filter(|other| *other != node);
        let peers = others.map(|other| (name(other), control_address(other))).collect();
        let transport = self.network.transport(at);
        let decided = plane::found_or_join(&*transport, &resolve(), &service, &join, &peers, async |_| {}).await;
        if decided == Start::Bootstrap {
            rt::sleep(plane::ROUND / 2).await;
        }
        self.network.close(at);
        match decided {
            Start::Bootstrap => self.mode(node),
            _ => Mode::Join,
        }
    }

    async fn begin(self: Rc<Self>, node: usize, links: Rc<Links>) -> Result<Arc<Snapshot>, String> {
        let directory = self.files.of(node);
        let is_first = !consensus::files::exists(&directory);
        let mode = match is_first {
            true => self.first_mode(node).await,
            false => self.mode(node),
        };
        let restored = {
            let mut asked = self.restored.borrow_mut();
            let before = asked.len();
            asked.retain(|other| *other != node);
            asked.len() < before && self.planted != Some(Planted::OldVoter)
        };
        let [drawn, boot_id] = [(); 2].map(|()| self.rng.borrow_mut().next_u64());
        let consensus::files::Opened { store, state, stored, files } =
            consensus::files::open(&directory, &mode, restored, drawn)?;
        let placement = Placement::in_cluster(links.shards(), &name(node));
        let skips = (self.planted == Some(Planted::SkipChange)).then(|| self.rng.borrow_mut().fork());
        let store = Checked::new(store, state.clone(), self.history.clone(), skips);
        let metastore = Metastore::over(store, state, placement);
        let first = metastore.snapshot();
        let install = InstallOnShards { node, links: links.clone(), observer: self.observer.borrow().clone() };
        let applier = Applier::start(metastore, Rc::new(install));
        let door = Door::new(
            Identity {
                node: Arc::from(name(node)),
                boot_id,
                disk_id: stored.raft_id,
                peer_address: Arc::from(control_address(node)),
                client_address: Arc::from(address(node, 80).to_string()),
                shard_ports: (0..links.shards()).map(|shard| SHARD_PORT + shard).collect(),
            },
            applier.clone(),
            Rc::new(|| Box::pin(async { NodeStatus::default() })),
        );
        let at = address(node, CONTROL_PORT);
        self.network.listen(tag(node), at, door.clone());
        let transport: Rc<dyn Transport> = self.network.transport(at);
        let settings = consensus::Settings {
            snapshot_entries: self.tuning.snapshot_entries,
            trailing_entries: self.tuning.trailing_entries,
            snapshot_check: self.tuning.snapshot_check,
            piece_bytes: 64 << 10,
            ..consensus::Settings::new(control_address(node))
        };
        let disk = Rc::new(files);
        let consensus = Consensus::start(settings, stored, disk, applier.clone(), transport.clone(), Arc::default())?;
        let others = (0..self.nodes).filter(|other| *other != node);
        let part = Part { peers: others.map(control_address).collect(), empty_directory: is_first, resolve: resolve() };
        let Plane { controller, membership } = Plane::start(&door, &consensus, &transport, part);
        let book = Book::new(&door, consensus.clone(), transport, links.carrier(Address::CONTROL.shard));
        rt::spawn(Queue::Foreground, book.run(|_| ()));
        let control = Control::over(Rc::new(consensus.clone()), applier.clone())
            .with_controller(controller)
            .with_membership(membership);
        let process =
            Process { consensus, applier, control: Rc::new(control), boot_id, serves: Rc::new(Cell::new(false)) };
        self.running.borrow_mut().insert(node, process.clone());
        rt::spawn(Queue::Background, self.clone().watch(node, process.clone()));
        rt::spawn(Queue::Foreground, async move {
            if process.consensus.latch().await.is_ok() {
                process.serves.set(true);
            }
        });
        Ok(first)
    }

    /// Two leaders of one term, and a node that takes part no longer.
    async fn watch(self: Rc<Self>, node: usize, process: Process) {
        loop {
            let changed = process.consensus.changed();
            let status = process.consensus.status();
            if status.leads {
                let other = self.leaders.borrow_mut().insert(status.term, status.raft_id);
                if other.is_some_and(|other| other != status.raft_id) {
                    self.history.broke(Rule::TwoLeaders, format!("{} and another in term {}", name(node), status.term));
                }
            }
            if rt::first_of(changed, process.applier.wait_stopped()).await.is_err() {
                let why = process.applier.stopped().map_or(String::new(), |stopped| stopped.why);
                return self.history.broke(Rule::Latched, format!("{}: metadata stopped: {why}", name(node)));
            }
        }
    }
}

/// Which files of a node are put back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Old {
    /// The state alone: it is brought up to date by the log, by an image, or by the leader.
    State,
    /// The log alone, where the state is newer: refused, then started with `--restored`.
    Log,
    /// Everything, started with `--restored` as the operator must (E36).
    All,
}

fn resolve() -> Resolve {
    Rc::new(|text| {
        let found = text.parse().ok();
        Box::pin(async move { found })
    })
}

struct InstallOnShards {
    node: usize,
    links: Rc<Links>,
    observer: Option<Rc<dyn Observer>>,
}

impl Install for InstallOnShards {
    fn install(&self, snapshot: Arc<Snapshot>) -> LocalBoxFuture<'static, ()> {
        let (node, links, observer) = (self.node, self.links.clone(), self.observer.clone());
        Box::pin(async move {
            if let Some(observer) = &observer {
                observer.comes(node, &snapshot);
            }
            let told = (0..links.shards()).map(|shard| {
                let request = Request::InstallSnapshot(snapshot.clone());
                Box::pin(links.clone().call(Address::local(shard), request))
            });
            drop(rt::all(told.collect()).await); // they end together
            if let Some(observer) = &observer {
                observer.seen(node, &snapshot);
            }
        })
    }
}

impl ControlPlane for Whole {
    fn network(&self) -> Option<SimNetwork> {
        Some(self.network.clone())
    }

    fn begins(&self, node: usize, links: Rc<Links>) -> Answer<Result<Arc<Snapshot>, String>> {
        let me = self.me.upgrade();
        Box::pin(async move {
            match me {
                Some(me) => me.begin(node, links).await,
                None => Err("the world has ended".to_owned()),
            }
        })
    }

    fn carrier(&self, node: usize, shard: ShardId, rings: Rc<dyn Carrier>) -> Rc<dyn Carrier> {
        Rc::new(RemoteCarrier::new(rings, self.network.transport(address(node, SHARD_PORT + shard))))
    }

    fn joins(&self, node: usize, _links: Rc<Links>, shards: Vec<Shard>) -> Answer<()> {
        if let Some(Process { applier, boot_id, .. }) = self.process(node) {
            for shard in shards {
                let applier = applier.clone();
                let hello = move || {
                    let cluster_id = applier.state().cluster_id();
                    Hello { cluster_id, node: name(node), boot_id, ..Hello::default() }
                };
                let at = address(node, SHARD_PORT + shard.id());
                let service = RemoteService::new(shard, Box::new(hello));
                self.network.listen(tag(node), at, Rc::new(service));
            }
        }
        Box::pin(std::future::ready(()))
    }

    fn ends(&self, node: usize) {
        self.files.before_end(node);
        self.network.crash(tag(node));
        self.running.borrow_mut().remove(&node);
    }

    fn ended(&self, node: usize, end: End) {
        if end != End::Graceful {
            self.files.after_kill(node);
        }
    }

    fn answer(&self, node: usize, command: MetaCommand) -> Answer<MetaReply> {
        let (process, own_word) = (self.process(node), self.planted == Some(Planted::OwnWord));
        Box::pin(async move {
            match (process, command) {
                (Some(process), MetaCommand::ConfirmGone { incarnation: Some(incarnation), .. }) if own_word => {
                    match process.applier.state().topic_of(incarnation) {
                        Some(_) => MetaReply::NotGone,
                        None => MetaReply::Gone,
                    }
                }
                (Some(process), command) => process.control.handle(command).await,
                (None, _) => MetaReply::Unavailable("the node has ended".to_owned()),
            }
        })
    }

    fn change(&self, node: usize, command: MetaCommand) -> Answer<MetaReply> {
        match self.serves(node) {
            true => self.answer(node, command),
            false => Box::pin(std::future::ready(MetaReply::Unavailable("not ready".to_owned()))),
        }
    }

    fn serves(&self, node: usize) -> bool {
        self.running.borrow().get(&node).is_some_and(|process| process.serves.get())
    }

    fn hand_over(&self, node: usize) -> Answer<()> {
        let process = self.process(node);
        Box::pin(async move {
            if let Some(process) = process.filter(|process| process.consensus.leads()) {
                // Nobody may be there to take it.
                let _ = process.consensus.transfer().await;
            }
        })
    }

    fn observe(&self, observer: Rc<dyn Observer>) {
        *self.observer.borrow_mut() = Some(observer);
    }

    fn broken(&self) -> Vec<Violation> {
        self.history.take_broken()
    }
}

/// Tells the ledger what shards are told.
pub struct Onlooker(Weak<World>);

impl Onlooker {
    pub fn of(world: &Rc<World>) -> Onlooker {
        Onlooker(Rc::downgrade(world))
    }
}

impl Observer for Onlooker {
    fn comes(&self, node: usize, snapshot: &Snapshot) {
        if let Some(world) = self.0.upgrade() {
            world.ledger.borrow_mut().comes(node, snapshot, rt::now());
        }
    }

    fn seen(&self, node: usize, snapshot: &Snapshot) {
        if let Some(world) = self.0.upgrade() {
            world.ledger.borrow_mut().seen_by(node, snapshot, rt::now());
        }
    }
}
