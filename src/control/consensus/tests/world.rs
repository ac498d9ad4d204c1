//! A cluster in the simulator: nodes that crash and come back with what they had synced, over a network that delays,
//! drops and cuts.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use narad_shards::io::Slice;
use narad_shards::meta::{Incarnation, Snapshot, TopicMeta};
use narad_shards::peer::LocalBoxFuture;
use narad_shards::remote::{CallError, ConnectionId, Hello, Transport};
use narad_shards::rt::sim::{Rng, Sim};
use narad_shards::rt::{self, Queue};
use narad_shards::wire::{operation, Incoming, Kind, Outgoing};

use crate::control::consensus::configuration::{bootstrap_id, Configuration, Server};
use crate::control::consensus::disk::{Changes, Disk, Position, Stored};
use crate::control::consensus::mirror::Mirror;
use crate::control::consensus::{Consensus, Settings};
use crate::control::tests_support::arrived;
use crate::control::{Applier, Batch, Command, ConsensusWatch, CopyImage, Install, Metastore, State, Storage};

/// What of a node survives a crash.
#[derive(Default)]
pub struct Platter {
    pub raft_id: u64,
    pub log: Option<Mirror>,
    pub state: State,
    pub image: Option<State>,
    receiving: Vec<u8>,
    received: Option<State>,
    pub refuse: bool,
    pub installs: u32,
}

/// Length of a simulated image: some pieces.
const IMAGE_BYTES: u64 = 9 * 1024 + 17;

pub type Plate = Arc<Mutex<Platter>>;

#[derive(Clone)]
pub struct SimStore(pub Plate);

impl Storage for SimStore {
    fn commit(&mut self, batch: &Batch) -> Result<(), String> {
        let mut plate = self.0.lock().unwrap();
        if plate.refuse {
            return Err("no space left on device".to_owned());
        }
        plate.state.absorb(batch.applied_index, &batch.changes); // panics on an entry that comes twice
        Ok(())
    }

    fn begin_image(&mut self) -> Result<CopyImage, String> {
        let plate = self.0.clone();
        let image = plate.lock().unwrap().state.clone();
        Ok(Box::new(move || {
            plate.lock().unwrap().image = Some(image);
            Ok(())
        }))
    }

    fn install_image(&mut self) -> Result<State, String> {
        let mut plate = self.0.lock().unwrap();
        let image = plate.received.take().ok_or("nothing was received")?;
        assert!(image.applied_index() > plate.state.applied_index(), "a snapshot took the state back");
        plate.state = image.clone();
        plate.installs += 1;
        Ok(image)
    }
}

/// A write takes a while; a crash in that time leaves it written or not.
pub struct SimDisk {
    plate: Plate,
    images: Rc<RefCell<BTreeMap<u64, State>>>,
    rng: RefCell<Rng>,
}

impl Disk for SimDisk {
    fn write(&self, changes: Arc<Changes>) -> LocalBoxFuture<'static, Result<(), String>> {
        let plate = self.plate.clone();
        let (early, micros) = {
            let mut rng = self.rng.borrow_mut();
            (rng.chance(1, 2), rng.range(50, 4_000))
        };
        Box::pin(async move {
            let write = || {
                let mut plate = plate.lock().unwrap();
                if plate.refuse {
                    return Err("no space left on device".to_owned());
                }
                plate.log.as_mut().unwrap().follow(&changes);
                Ok(())
            };
            if early {
                write()?;
                rt::sleep(Duration::from_micros(micros)).await;
                Ok(())
            } else {
                rt::sleep(Duration::from_micros(micros)).await;
                write()
            }
        })
    }

    fn read_image(&self, offset: u64, bytes: usize) -> LocalBoxFuture<'static, Result<(Vec<u8>, u64), String>> {
        let image = self.plate.lock().unwrap().image.clone();
        let images = self.images.clone();
        Box::pin(async move {
            let image = image.ok_or("there is no image")?;
            let count = (IMAGE_BYTES - offset).min(bytes as u64) as usize;
            let mut piece = vec![0u8; count];
            if offset == 0 {
                piece[..8].copy_from_slice(&image.applied_index().to_le_bytes());
                images.borrow_mut().insert(image.applied_index(), image);
            }
            Ok((piece, IMAGE_BYTES))
        })
    }

    fn receive(&self, offset: u64, piece: Slice) -> LocalBoxFuture<'static, Result<(), String>> {
        let plate = self.plate.clone();
        Box::pin(async move {
            let mut plate = plate.lock().unwrap();
            if offset == 0 {
                plate.receiving.clear();
            }
            if plate.receiving.len() as u64 != offset {
                return Err("another transfer".to_owned());
            }
            plate.receiving.extend_from_slice(&piece);
            Ok(())
        })
    }

    fn finish_receiving(&self) -> LocalBoxFuture<'static, Result<u64, String>> {
        let (plate, images) = (self.plate.clone(), self.images.clone());
        Box::pin(async move {
            let mut plate = plate.lock().unwrap();
            assert_eq!(plate.receiving.len() as u64, IMAGE_BYTES, "a snapshot with a hole was finished");
            let applied = u64::from_le_bytes(plate.receiving[..8].try_into().unwrap());
            plate.received = images.borrow().get(&applied).cloned();
            Ok(applied)
        })
    }
}

#[derive(Default)]
struct NoShards;

impl Install for NoShards {
    fn install(&self, _snapshot: Arc<Snapshot>) -> LocalBoxFuture<'static, ()> {
        Box::pin(rt::sleep(Duration::from_micros(200)))
    }
}

#[derive(Clone)]
pub struct Node {
    pub plate: Plate,
    pub running: Rc<RefCell<Option<Running>>>,
}

#[derive(Clone)]
pub struct Running {
    pub consensus: Rc<Consensus>,
    pub applier: Rc<Applier>,
}

pub struct Network {
    sim: Sim,
    rng: RefCell<Rng>,
    nodes: RefCell<BTreeMap<u32, Node>>,
    cut: RefCell<Vec<(u32, u32)>>,
    pub loss_percent: Cell<u64>,
    /// Of snapshots, sent so far.
    pub pieces: Cell<u64>,
    pub delay_ms_max: Cell<u64>,
    /// Messages of consensus do not reach this node; calls do, in both directions. 0: none.
    pub deaf: Cell<u32>,
    /// How long a caller waits for a reply that is lost.
    pub reply_silence: Cell<Duration>,
}

/// After that a connection is given up on which nothing answers.
const SILENCE: Duration = Duration::from_secs(2);

fn address(tag: u32) -> SocketAddr {
    format!("10.0.0.{tag}:7943").parse().unwrap()
}

fn tag_of(address: SocketAddr) -> u32 {
    let SocketAddr::V4(address) = address else { unreachable!("the simulated network has IPv4 addresses") };
    u32::from(address.ip().octets()[3])
}

impl Network {
    fn delay(&self) -> Duration {
        Duration::from_micros(self.rng.borrow_mut().range(100, self.delay_ms_max.get() * 1000))
    }

    fn loses(&self, from: u32, to: u32) -> bool {
        let is_cut = self.cut.borrow().iter().any(|pair| *pair == (from, to) || *pair == (to, from));
        is_cut || self.rng.borrow_mut().chance(self.loss_percent.get(), 100)
    }

    fn target(&self, tag: u32) -> Option<Rc<Consensus>> {
        let node = self.nodes.borrow().get(&tag).cloned()?;
        let running = node.running.borrow();
        running.as_ref().map(|running| running.consensus.clone())
    }
}

/// The network as one node sees it.
struct Link {
    from: u32,
    /// For snapshots alone.
    bulk: bool,
    network: Rc<Network>,
}

impl Transport for Link {
    fn call(&self, to: SocketAddr, request: Outgoing) -> LocalBoxFuture<'static, Result<Incoming, CallError>> {
        let (network, from, to) = (self.network.clone(), self.from, tag_of(to));
        let is_snapshot = request.operation == operation::SNAPSHOT;
        assert_eq!(is_snapshot, self.bulk, "E54: snapshots have connections of their own, and nothing else has them");
        network.pieces.set(network.pieces.get() + u64::from(is_snapshot));
        Box::pin(async move {
            let budget = request.budget;
            let carried = async {
                rt::sleep(network.delay()).await;
                let target = network.target(to).filter(|_| !network.loses(from, to));
                let Some(target) = target else {
                    // Half of them are told so; the others find out that nobody is there (E40).
                    if network.rng.borrow_mut().chance(1, 2) {
                        return Err(CallError::NotSent("cut".to_owned()));
                    }
                    rt::sleep(SILENCE).await;
                    return Err(CallError::Unknown("nothing answers".to_owned()));
                };
                let (reply, replied) = rt::sync::oneshot();
                network.sim.spawn_on(to, async move {
                    let _ = reply.send(target.handle(&arrived(&request, Kind::Request)).await);
                });
                let reply = replied.await.flatten();
                rt::sleep(network.delay()).await;
                match reply {
                    Some(reply) if !network.loses(from, to) => Ok(arrived(&reply, Kind::Reply)),
                    _ => {
                        rt::sleep(network.reply_silence.get()).await;
                        Err(CallError::Unknown("connection lost".to_owned()))
                    }
                }
            };
            rt::timeout(budget, carried).await.unwrap_or_else(|_| Err(CallError::Unknown("budget over".to_owned())))
        })
    }

    fn send(&self, to: SocketAddr, message: Outgoing) {
        let (network, from, to) = (self.network.clone(), self.from, tag_of(to));
        assert!(!self.bulk, "E54: a message of consensus behind a snapshot");
        let sim = network.sim.clone();
        // On its way it belongs to nobody.
        sim.spawn_on(0, async move {
            rt::sleep(network.delay()).await;
            if network.loses(from, to) || to == network.deaf.get() {
                return;
            }
            if let Some(target) = network.target(to) {
                let sim = network.sim.clone();
                sim.spawn_on(to, async move {
                    assert!(target.handle(&arrived(&message, Kind::OneWay)).await.is_none());
                });
            }
        });
    }

    fn hello_of(&self, _to: SocketAddr) -> Option<Arc<Hello>> {
        None
    }

    fn connection_to(&self, _to: SocketAddr) -> Option<ConnectionId> {
        None
    }
}

#[derive(Clone)]
pub struct World {
    pub sim: Sim,
    pub network: Rc<Network>,
    pub rng: Rc<RefCell<Rng>>,
    images: Rc<RefCell<BTreeMap<u64, State>>>,
    pub snapshot_entries: u64,
    /// Who led in which term, as seen by anybody.
    pub leaders: Rc<RefCell<BTreeMap<u64, u64>>>,
}

pub fn name(tag: u32) -> String {
    format!("node-{tag}")
}

pub fn server(tag: u32) -> Server {
    Server { name: name(tag), address: address(tag).to_string(), voter: true }
}

impl World {
    /// Nodes 1 to `voters`, none of them running.
    pub fn new(sim: Sim, seed: u64, voters: u32) -> World {
        let mut rng = Rng::new(seed);
        let network = Rc::new(Network {
            sim: sim.clone(),
            rng: RefCell::new(rng.fork()),
            nodes: RefCell::default(),
            cut: RefCell::default(),
            loss_percent: Cell::new(0),
            pieces: Cell::new(0),
            delay_ms_max: Cell::new(5),
            deaf: Cell::new(0),
            reply_silence: Cell::new(Duration::ZERO),
        });
        let world = World {
            sim,
            network,
            rng: Rc::new(RefCell::new(rng)),
            images: Rc::default(),
            snapshot_entries: 8192,
            leaders: Rc::default(),
        };
        let servers: Vec<Server> = (1..=voters).map(server).collect();
        for tag in 1..=voters {
            let stored = Stored {
                raft_id: bootstrap_id(&name(tag)),
                start: Position { index: 1, term: 1 },
                hard_state: raft::eraftpb::HardState { term: 1, vote: 0, commit: 1 },
                configuration: Configuration::bootstrap(1, &servers).unwrap(),
                entries: Vec::new(),
            };
            world.add(tag, stored, 1);
        }
        world
    }

    pub fn add(&self, tag: u32, stored: Stored, applied: u64) {
        let raft_id = stored.raft_id;
        let mut state = State::default();
        if applied > 0 {
            state.absorb(applied, &[]);
        }
        let platter = Platter { raft_id, log: Some(Mirror::new(stored)), state, ..Platter::default() };
        let node = Node { plate: Arc::new(Mutex::new(platter)), running: Rc::default() };
        self.network.nodes.borrow_mut().insert(tag, node);
    }

    pub fn node(&self, tag: u32) -> Node {
        self.network.nodes.borrow()[&tag].clone()
    }

    pub fn tags(&self) -> Vec<u32> {
        self.network.nodes.borrow().keys().copied().collect()
    }

    /// Starts a node from its platter.
    pub async fn start(&self, tag: u32) -> Running {
        let node = self.node(tag);
        let (world, slot) = (self.clone(), node.running.clone());
        let (started, is_started) = rt::sync::oneshot();
        self.sim.spawn_on(tag, async move {
            let (stored, state) = {
                let plate = node.plate.lock().unwrap();
                let stored = plate.log.as_ref().unwrap().to_stored();
                (stored, plate.state.clone())
            };
            let store = SimStore(node.plate.clone());
            let applier = Applier::start(Metastore::new(store, state, 1), Rc::new(NoShards));
            let disk = SimDisk {
                plate: node.plate.clone(),
                images: world.images.clone(),
                rng: RefCell::new(world.rng.borrow_mut().fork()),
            };
            let mut settings = Settings::new(address(tag).to_string());
            settings.snapshot_entries = world.snapshot_entries;
            settings.trailing_entries = 5;
            settings.piece_bytes = 4096;
            settings.snapshot_check = Duration::from_millis(if world.snapshot_entries < 8192 { 200 } else { 120_000 });
            let link = |bulk| Rc::new(Link { from: tag, bulk, network: world.network.clone() });
            settings.bulk = Some(link(true));
            let link = link(false);
            let watch: Arc<ConsensusWatch> = Arc::default();
            let consensus = Consensus::start(settings, stored, Rc::new(disk), applier.clone(), link, watch).unwrap();
            let watched = consensus.clone();
            let leaders = world.leaders.clone();
            rt::spawn(Queue::Background, async move {
                loop {
                    let changed = watched.changed();
                    let status = watched.status();
                    if status.leads {
                        let other = leaders.borrow_mut().insert(status.term, status.raft_id);
                        assert!(
                            other.is_none_or(|other| other == status.raft_id),
                            "two leaders in term {}",
                            status.term
                        );
                    }
                    changed.await;
                }
            });
            let running = Running { consensus, applier };
            *node.running.borrow_mut() = Some(running.clone());
            let _ = started.send(running);
        });
        let running = is_started.await.unwrap();
        *slot.borrow_mut() = Some(running.clone());
        running
    }

    pub async fn start_all(&self) {
        for tag in self.tags() {
            self.start(tag).await;
        }
    }

    /// kill -9: what was not synced is gone.
    pub fn crash(&self, tag: u32) {
        self.sim.kill(tag);
        *self.node(tag).running.borrow_mut() = None;
    }

    pub fn running(&self, tag: u32) -> Option<Running> {
        self.node(tag).running.borrow().clone()
    }

    pub fn cut(&self, a: u32, b: u32) {
        self.network.cut.borrow_mut().push((a, b));
    }

    /// One node from all others.
    pub fn isolate(&self, tag: u32) {
        for other in self.tags().into_iter().filter(|other| *other != tag) {
            self.cut(tag, other);
        }
    }

    pub fn heal(&self) {
        self.network.cut.borrow_mut().clear();
    }

    pub fn leader(&self) -> Option<u32> {
        let leads = |tag: &u32| self.running(*tag).is_some_and(|running| running.consensus.status().is_established);
        self.tags().into_iter().filter(leads).max_by_key(|tag| self.running(*tag).unwrap().consensus.status().term)
    }

    pub async fn wait_leader(&self) -> u32 {
        let until = rt::now() + Duration::from_secs(30);
        loop {
            if let Some(leader) = self.leader() {
                return leader;
            }
            assert!(rt::now() < until, "no leader within 30 s");
            rt::sleep(Duration::from_millis(5)).await;
        }
    }

    /// All running nodes have applied what the leader has committed.
    pub async fn settle(&self) {
        let until = rt::now() + Duration::from_secs(60);
        loop {
            let leader = self.wait_leader().await;
            let commit = self.running(leader).unwrap().consensus.status().commit_index;
            let applied = |tag: u32| self.running(tag).is_none_or(|running| running.applier.applied_index() >= commit);
            if self.tags().into_iter().all(applied) {
                return;
            }
            assert!(rt::now() < until, "not all nodes have caught up within 60 s");
            rt::sleep(Duration::from_millis(20)).await;
        }
    }

    pub fn topics(&self, tag: u32) -> BTreeMap<Arc<str>, Arc<TopicMeta>> {
        self.node(tag).plate.lock().unwrap().state.topics().clone()
    }
}

pub fn create(name: &str, id: u64) -> Command {
    Command::create(Arc::new(TopicMeta {
        name: Arc::from(name),
        incarnation: Incarnation(id),
        partitions: 3,
        retention_ms: 0,
        visibility_timeout_ms: 30_000,
        max_in_flight_per_partition: 1024,
        max_acked_ahead_per_partition: 1024,
        created_at_ms: 1,
        owner: None,
    }))
}

/// Runs a scenario in a world of `voters`.
pub fn run<F: std::future::Future<Output = ()> + 'static>(seed: u64, voters: u32, scenario: impl FnOnce(World) -> F) {
    let sim = Sim::new(seed);
    let world = World::new(sim.clone(), seed, voters);
    sim.run(scenario(world));
}
