//! The control plane of one node in a cluster, put together: what other control endpoints meet, who lets nodes in and
//! who judges them, and what the shards are told of their peers. A process brings QUIC, the simulator its own network.

use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use narad_shards::meta::{Address, ShardId};
use narad_shards::peer::{Carrier, LocalBoxFuture, Request};
use narad_shards::remote::{ConnectionId, Hello, PeerBook, Service, Transport};
use narad_shards::rt::{self, Instant, Queue};
use narad_shards::wire::{operation, Incoming, Outgoing};

use super::consensus;
use super::{
    answer_status, answer_unconfigured, ask_status, peer_book, probe, read_join, start, unequal, Answer, Applier,
    Command, Consensus, Controller, Join, Log, Membership, Met, OwnStatus, Registration, Resolve, Settings, Start,
    Unequal,
};

/// How often is looked whether the shards must be told something new.
const LOOK: Duration = Duration::from_millis(100);
/// How long the shards are waited for when they are told.
const TELL_WITHIN: Duration = Duration::from_secs(1);
/// A peer without a connection is dialled that often.
const DIAL_AGAIN: Duration = Duration::from_secs(1);

/// Between two rounds of asking whether there is a cluster already.
pub const ROUND: Duration = Duration::from_secs(1);
/// The same trouble is said again after that time.
const SAY_AGAIN: Duration = Duration::from_secs(10);
/// Whoever asks as well is taken into account for so long: it asks every round, and gives each peer 2 s to answer.
const ASKER_COUNTS: Duration = Duration::from_secs(5);

/// What a node says of itself to its peers.
#[derive(Clone, Debug)]
pub struct Identity {
    pub node: Arc<str>,
    /// Of this process (E39).
    pub boot_id: u64,
    /// Of the consensus directory (E36).
    pub disk_id: u64,
    /// `host:port` of the control endpoint, as peers dial it.
    pub peer_address: Arc<str>,
    pub client_address: Arc<str>,
    /// UDP port of each shard.
    pub shard_ports: Vec<u16>,
}

/// What other control endpoints meet.
pub struct Door {
    me: Identity,
    applier: Rc<Applier>,
    own_status: OwnStatus,
    /// Requests that come before are answered as by a node that is in no cluster.
    parts: OnceCell<(Rc<consensus::Consensus>, Rc<Membership>)>,
}

/// Who acts for the node.
pub struct Plane {
    pub controller: Rc<Controller>,
    pub membership: Rc<Membership>,
}

/// How a node takes part: the configured peers (`host:port`, without itself), whether nothing was in its data directory
/// when the process started (E50), and how names are looked up.
pub struct Part {
    pub peers: Vec<String>,
    pub empty_directory: bool,
    pub resolve: Resolve,
}

impl Plane {
    /// Starts controller and membership on the runtime of the calling thread, and opens the door.
    pub fn start(
        door: &Door,
        consensus: &Rc<consensus::Consensus>,
        transport: &Rc<dyn Transport>,
        part: Part,
    ) -> Plane {
        let log: Rc<dyn Log> = Rc::new(consensus.clone());
        let servers: Rc<dyn Consensus> = Rc::new(consensus.clone());
        let me = Arc::new(Registration {
            node: door.me.node.clone(),
            raft_id: door.me.disk_id,
            peer_address: door.me.peer_address.clone(),
            client_address: door.me.client_address.clone(),
            build: Arc::from(env!("CARGO_PKG_VERSION")),
            newest_command_type: Command::NEWEST_TYPE,
        });
        let controller = Controller::new(log.clone(), door.applier.clone(), servers.clone(), me.clone());
        // The controller holds consensus: the other way round there must be nothing to hold on to.
        let prepare = Rc::downgrade(&controller);
        consensus.prepare_with(Rc::new(move |command| match prepare.upgrade() {
            Some(controller) => controller.prepare(command),
            None => Err("this node stops".to_owned()),
        }));
        let Part { peers, empty_directory, resolve } = part;
        let settings = Settings { me, peers, empty_directory, resolve };
        let membership = Membership::new(settings, log, door.applier.clone(), servers, transport.clone());
        let _ = door.parts.set((consensus.clone(), membership.clone()));
        let caught_up = consensus.clone();
        rt::spawn(Queue::Foreground, controller.clone().run());
        rt::spawn(Queue::Foreground, membership.clone().run_heartbeats());
        rt::spawn(Queue::Foreground, membership.clone().run_join(move || caught_up.caught_up()));
        Plane { controller, membership }
    }
}

impl Door {
    /// `own_status`: what this node says of itself to whoever asks.
    pub fn new(me: Identity, applier: Rc<Applier>, own_status: OwnStatus) -> Rc<Door> {
        Rc::new(Door { me, applier, own_status, parts: OnceCell::new() })
    }
}

impl Service for Door {
    fn hello(&self) -> Hello {
        let operations = [
            operation::NODE_STATUS,
            operation::JOIN_CLUSTER,
            operation::FORGET_SERVER,
            operation::CONSENSUS,
            operation::SNAPSHOT,
            operation::PROPOSE,
            operation::APPLIED_INDEX,
            operation::GET_TOPIC,
            operation::SHOWN,
        ];
        Hello {
            cluster_id: self.applier.state().cluster_id(),
            node: self.me.node.to_string(),
            boot_id: self.me.boot_id,
            disk_id: self.me.disk_id,
            shard: None,
            shard_ports: self.me.shard_ports.clone(),
            build: env!("CARGO_PKG_VERSION").to_owned(),
            newest_command_type: Command::NEWEST_TYPE,
            operations: operations.map(|number| (number, 1)).to_vec(),
            commit_credit_bytes: 0,
        }
    }

    fn met(&self, _connection: ConnectionId, from: &Hello, address: SocketAddr) -> Result<(), String> {
        self.hello().same_cluster(from, address)
    }

    fn serve(&self, _connection: ConnectionId, request: Incoming) -> LocalBoxFuture<'static, Option<Outgoing>> {
        let Some((consensus, membership)) = self.parts.get().cloned() else {
            return Box::pin(std::future::ready(answer_unconfigured(&request, &[])));
        };
        let own_status = self.own_status.clone();
        Box::pin(async move {
            if request.header.operation == operation::NODE_STATUS {
                return Some(answer_status(own_status().await));
            }
            match membership.serve(&request).await {
                Some(answer) => Some(answer),
                None => consensus.handle(&request).await,
            }
        })
    }

    fn cancelled_late(&self, _connection: ConnectionId, _request_id: u64) {}

    fn lost(&self, _connection: ConnectionId) {}
}

/// Answers other nodes that ask: this one has never been in a cluster.
pub struct NeverConfigured {
    node: String,
    initial: Vec<String>,
    /// Who has asked lately, with its initial members.
    askers: RefCell<BTreeMap<String, (Vec<String>, Instant)>>,
}

impl NeverConfigured {
    pub fn new(node: &str, initial: &[String]) -> Rc<NeverConfigured> {
        let (node, initial) = (node.to_owned(), initial.to_vec());
        Rc::new(NeverConfigured { node, initial, askers: RefCell::default() })
    }

    /// The initial members of those who ask as well, by their configurations.
    fn lists(&self) -> BTreeMap<String, Vec<String>> {
        let mut askers = self.askers.borrow_mut();
        let now = rt::now();
        askers.retain(|_, (_, at)| now.saturating_since(*at) <= ASKER_COUNTS);
        askers.iter().map(|(node, (list, _))| (node.clone(), list.clone())).collect()
    }
}

impl Service for NeverConfigured {
    fn hello(&self) -> Hello {
        Hello { node: self.node.clone(), build: env!("CARGO_PKG_VERSION").to_owned(), ..Hello::default() }
    }

    fn met(&self, _connection: ConnectionId, _from: &Hello, _address: SocketAddr) -> Result<(), String> {
        Ok(())
    }

    fn serve(&self, _connection: ConnectionId, request: Incoming) -> LocalBoxFuture<'static, Option<Outgoing>> {
        if let Some(join) = Some(&request).filter(|r| r.header.operation == operation::JOIN_CLUSTER).and_then(read_join)
        {
            self.askers.borrow_mut().insert(join.node, (join.initial_members, rt::now()));
        }
        let answer = answer_unconfigured(&request, &self.initial);
        Box::pin(std::future::ready(answer))
    }

    fn cancelled_late(&self, _connection: ConnectionId, _request_id: u64) {}

    fn lost(&self, _connection: ConnectionId) {}
}

/// Asks the configured peers (id to `host:port`) round after round, until it is clear whether this node, which has never
/// been in a cluster, founds one with the other initial members or waits to be let into theirs (K28, K29). `service`
/// answers those who ask the same; `between` runs after each round that decided nothing, and is told what for.
pub async fn found_or_join(
    transport: &dyn Transport,
    resolve: &Resolve,
    service: &NeverConfigured,
    join: &Join,
    peers: &BTreeMap<String, String>,
    between: impl AsyncFn(String),
) -> Start {
    let initial = &service.initial;
    let mut rounds = 0;
    let mut said: BTreeMap<String, Instant> = BTreeMap::new();
    let mut said_waiting = None;
    loop {
        let answers = probe(transport, resolve, join, peers).await;
        rounds += 1;
        let mut lists = service.lists();
        let mut statuses = BTreeMap::new();
        for (node, answer) in &answers {
            if let Some(answer) = answer.as_ref().ok().filter(|answer| !answer.initial_members.is_empty()) {
                lists.insert(node.clone(), answer.initial_members.clone());
            }
            statuses.insert(node.clone(), answer.as_ref().ok().map(|answer| answer.status));
        }
        let decided = start(&join.node, initial, &statuses, &lists, rounds);
        if decided != Start::AskAgain {
            return decided;
        }
        let (unequal, now) = (unequal(initial, &lists), rt::now());
        let again = |last: Instant| now.saturating_since(last) >= SAY_AGAIN;
        for unequal in &unequal {
            if said.get(&unequal.node).is_none_or(|last| again(*last)) {
                said.insert(unequal.node.clone(), now);
                say_unequal(unequal);
            }
        }
        let waiting = waits_for(&join.node, initial, &answers, &unequal);
        match said_waiting {
            // At once: whoever starts the first of several nodes looks at its log and must not take it for stuck.
            None => tracing::info!("{waiting}"),
            Some(last) if again(last) => tracing::warn!("{waiting}"),
            Some(_) => {}
        }
        if said_waiting.is_none_or(again) {
            said_waiting = Some(now);
        }
        // The others may be started by hand, one after the other.
        between(waiting).await;
        rt::sleep(ROUND).await;
    }
}

fn say_unequal(unequal: &Unequal) {
    let Unequal { node: peer, here, there } = unequal;
    tracing::error!(
        peer,
        here,
        there,
        "no cluster is founded: cluster.peers or cluster.initial_members name other nodes here than there; make them equal \
         and restart"
    );
}

/// What a first start waits for, and for whom.
fn waits_for(
    me: &str,
    initial: &[String],
    answers: &BTreeMap<String, Result<Answer, String>>,
    unequal: &[Unequal],
) -> String {
    let of = initial.len();
    let mut text = format!(
        "first start: {} of the {of} initial members ({}) must be up and agree to found the cluster",
        of / 2 + 1,
        initial.join(", ")
    );
    let silent = initial.iter().filter(|member| *member != me).filter_map(|member| match answers.get(member) {
        Some(Ok(_)) => None,
        Some(Err(why)) => Some(format!("{member} ({why})")),
        None => Some(format!("{member} (cluster.peers has no address of it)")),
    });
    let silent: Vec<String> = silent.collect();
    if !silent.is_empty() {
        text.push_str(&format!("; no answer from {}", silent.join(", ")));
    }
    if !unequal.is_empty() {
        let nodes: Vec<&str> = unequal.iter().map(|one| one.node.as_str()).collect();
        text.push_str(&format!("; other initial members than here are configured at {}", nodes.join(", ")));
    }
    text + "; still asking"
}

/// Keeps a connection to every member, and the shards informed of who they are.
pub struct Book {
    me: Identity,
    applier: Rc<Applier>,
    consensus: Rc<consensus::Consensus>,
    transport: Rc<dyn Transport>,
    links: Rc<dyn Carrier>,
    /// The last hello of each member: a control connection that is down for a moment does not void its shards' ports.
    hellos: RefCell<BTreeMap<Arc<str>, Arc<Hello>>>,
    dialled: RefCell<BTreeMap<SocketAddr, Instant>>,
    sent: RefCell<Arc<PeerBook>>,
}

impl Book {
    /// `links` reaches the shards of this node.
    pub fn new(
        door: &Door,
        consensus: Rc<consensus::Consensus>,
        transport: Rc<dyn Transport>,
        links: Rc<dyn Carrier>,
    ) -> Book {
        let (me, applier) = (door.me.clone(), door.applier.clone());
        let (hellos, dialled, sent) = Default::default();
        Book { me, applier, consensus, transport, links, hellos, dialled, sent }
    }

    /// Runs as long as metadata can be stored. `tell` gets the cluster's id, 0 before it has one.
    pub async fn run(self, tell: impl Fn(u64)) {
        while self.applier.stopped().is_none() {
            let book = self.write();
            self.dial(&book);
            // It is written with the version of the one before.
            if book != **self.sent.borrow() {
                let book = Arc::new(PeerBook { version: book.version + 1, ..book });
                *self.sent.borrow_mut() = book.clone();
                let told = (0..self.me.shard_ports.len() as ShardId)
                    .map(|shard| self.links.call(Address::local(shard), Request::InstallPeers(book.clone())));
                // In order, so that the newest is the last. One that is long about it (it may be recovering) must not keep
                // the others from hearing who has died since; a shard that is gone takes the process with it (E25).
                drop(rt::timeout(TELL_WITHIN, Box::pin(rt::all(told.collect()))).await);
            }
            tell(self.applier.state().cluster_id());
            rt::sleep(LOOK).await;
        }
    }

    fn write(&self) -> PeerBook {
        let state = self.applier.state();
        let mut hellos = self.hellos.borrow_mut();
        hellos.retain(|node, _| state.members().contains_key(node));
        peer_book(self.sent.borrow().version, &self.me.node, self.me.boot_id, &state, |member| {
            let control_addr = self.consensus.address(member.registration.raft_id)?;
            if let Some(hello) = self.transport.hello_of(control_addr).filter(|hello| *hello.node == **member.node()) {
                hellos.insert(member.node().clone(), hello);
            }
            Some(Met { control_addr, hello: hellos.get(member.node()).cloned() })
        })
    }

    /// Members that nobody talks to are asked how they are: their hello says where their shards listen.
    fn dial(&self, book: &PeerBook) {
        let now = rt::now();
        for peer in book.peers.values() {
            let address = peer.control_addr;
            if self.transport.connection_to(address).is_some() {
                continue;
            }
            let mut dialled = self.dialled.borrow_mut();
            if dialled.get(&address).is_some_and(|at| now - *at < DIAL_AGAIN) {
                continue;
            }
            dialled.insert(address, now);
            let call = self.transport.call(address, ask_status(DIAL_AGAIN));
            rt::spawn(Queue::Foreground, call); // only its connection is of interest
        }
    }
}
