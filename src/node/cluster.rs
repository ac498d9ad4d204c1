//! The control thread's part in the cluster: its endpoint, consensus, membership, controller, and what the shards are
//! told of the other nodes. A node without peers runs consensus with one voter, and nothing else of this.

use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;
use std::time::Duration;

use narad_shards::meta::Address;
use narad_shards::peer::{Carrier, LocalBoxFuture, Request};
use narad_shards::remote::{CallError, ConnectionId, Hello, PeerBook, Service, Transport};
use narad_shards::rt::ring::RingHandle;
use narad_shards::rt::{self, Instant, Queue};
use narad_shards::wire::{operation, Incoming, Outgoing};

use super::certificates;
use super::founding::{look_up, peer_settings, tls_files};
use super::peer_watch;
use super::run::Common;
use super::status;
use crate::control::consensus::disk::Stored;
use crate::control::consensus::files::Files;
use crate::control::consensus::{self, Consensus};
use crate::control::{
    self, Applier, Command, Control, Controller, Install, Membership, Metastore, OwnStatus, Registration, Store,
};
use crate::peer::PeerEndpoint;

/// How often is looked whether the shards must be told something new, and whether this node is ready.
const LOOK: Duration = Duration::from_millis(100);
/// A peer without a connection is dialled that often.
const DIAL_AGAIN: Duration = Duration::from_secs(1);
/// A name that cannot be looked up is said that often.
const SAY_AGAIN: Duration = Duration::from_secs(60);
/// A name that was looked up is good for that long.
const NAME_GOOD: Duration = Duration::from_secs(30);

/// What the control thread starts with.
pub struct Opened {
    pub metastore: Metastore<Store>,
    pub stored: Stored,
    pub files: Files,
    /// Nothing was in the data directory when the process started (E50).
    pub empty_directory: bool,
}

/// What a stop needs of it.
pub struct Cluster {
    consensus: Rc<Consensus>,
    endpoints: Vec<Rc<PeerEndpoint>>,
}

/// Starts everything on the runtime of the calling thread.
pub fn start(
    common: &Arc<Common>,
    opened: Opened,
    handle: &RingHandle,
    links: &Rc<dyn Carrier>,
    install: Rc<dyn Install>,
) -> Result<(Control, Cluster), String> {
    let Opened { metastore, stored, files, empty_directory } = opened;
    let disk_id = stored.raft_id;
    let applier = Applier::start(metastore, install);
    let own_status = status::own(common, links, &applier);
    let door = Rc::new(Door {
        common: common.clone(),
        applier: applier.clone(),
        disk_id,
        parts: OnceCell::new(),
        own_status: own_status.clone(),
    });
    let endpoint = match &common.peer_plane {
        None => None,
        Some(plane) => {
            let settings =
                crate::peer::PeerSettings { keep_alive: true, ..peer_settings(&common.config, &common.node_id) };
            let started = PeerEndpoint::start(handle, plane.control_addr, door.clone(), settings);
            Some(started.map_err(|error| format!("the peer plane: {error}"))?)
        }
    };
    let bulk = match &common.peer_plane {
        None => None,
        Some(plane) => {
            let address = SocketAddr::new(plane.control_addr.ip(), 0);
            let started =
                PeerEndpoint::start(handle, address, door.clone(), peer_settings(&common.config, &common.node_id));
            Some(started.map_err(|error| format!("the peer plane, for snapshots: {error}"))?)
        }
    };
    let transport: Rc<dyn Transport> = match &endpoint {
        Some(endpoint) => endpoint.clone(),
        None => Rc::new(Nobody),
    };
    let names: Rc<Names> = Rc::default();
    let settings = consensus::Settings {
        bulk: bulk.clone().map(|bulk| bulk as Rc<dyn Transport>),
        ..consensus_settings(common, &applier, &names)
    };
    let watch = common.state.figures.consensus.clone();
    let consensus = Consensus::start(settings, stored, Rc::new(files), applier.clone(), transport.clone(), watch)?;
    if common.peer_plane.is_some() {
        consensus.shut_create_gate();
    }
    let log: Rc<dyn control::Log> = Rc::new(consensus.clone());
    let mut control = Control::over(log.clone(), applier.clone())
        .named(&common.node_id, common.http_addr.to_string())
        .with_status(own_status);
    if let Some(plane) = &common.peer_plane {
        let servers: Rc<dyn control::Consensus> = Rc::new(consensus.clone());
        let me = Arc::new(Registration {
            node: Arc::from(common.node_id.as_str()),
            raft_id: disk_id,
            peer_address: Arc::from(plane.advertised.as_str()),
            client_address: Arc::from(common.http_addr.to_string()),
            build: Arc::from(env!("CARGO_PKG_VERSION")),
            newest_command_type: Command::NEWEST_TYPE,
        });
        let controller = Controller::new(log.clone(), applier.clone(), servers.clone(), me.clone());
        let prepare = controller.clone();
        consensus.prepare_with(Rc::new(move |command| prepare.prepare(command)));
        let resolve = names.clone();
        let membership = Membership::new(
            control::Settings {
                me,
                peers: other_peers(common),
                empty_directory,
                resolve: Rc::new(move |address| {
                    let (names, address) = (resolve.clone(), address.to_owned());
                    Box::pin(async move { names.find(&address).await })
                }),
            },
            log,
            applier.clone(),
            servers,
            transport.clone(),
        );
        let _ = door.parts.set(Parts { consensus: consensus.clone(), membership: membership.clone() });
        if let Some(endpoint) = &endpoint {
            let watched = peer_watch::Watched {
                common: common.clone(),
                endpoint: endpoint.clone(),
                membership: membership.clone(),
                controller: controller.clone(),
            };
            rt::spawn(Queue::Background, watched.run());
            if let Some(files) = tls_files(&common.config) {
                rt::spawn(Queue::Background, certificates::watch(common.clone(), files));
                for endpoint in bulk.iter().chain([endpoint]) {
                    rt::spawn(Queue::Background, certificates::follow(common.clone(), endpoint.clone()));
                }
            }
        }
        let caught_up = consensus.clone();
        rt::spawn(Queue::Foreground, controller.clone().run());
        rt::spawn(Queue::Foreground, membership.clone().run_heartbeats());
        let for_operators = membership.clone();
        rt::spawn(Queue::Foreground, membership.run_join(move || caught_up.caught_up()));
        let book = Rc::new(Book {
            common: common.clone(),
            applier: applier.clone(),
            consensus: consensus.clone(),
            transport,
            links: links.clone(),
            hellos: RefCell::default(),
            dialled: RefCell::default(),
            sent: RefCell::default(),
        });
        rt::spawn(Queue::Foreground, book.run());
        control = control.with_controller(controller).with_membership(for_operators);
    }
    rt::spawn(Queue::Foreground, watch_readiness(common.clone(), consensus.clone()));
    Ok((control, Cluster { consensus, endpoints: endpoint.into_iter().chain(bulk).collect() }))
}

impl Cluster {
    /// First step of a stop: somebody else leads.
    pub async fn hand_over(&self) {
        let others = self.consensus.status().configuration.servers.len() > 1;
        if !others || !self.consensus.leads() {
            return;
        }
        match self.consensus.transfer(None).await {
            Ok(()) => tracing::info!("leadership transferred before shutdown"),
            Err(err) => tracing::warn!(err, "leadership transfer on shutdown failed"),
        }
    }

    /// Last step: peers learn that this node ends.
    pub async fn leave(&self) {
        for endpoint in &self.endpoints {
            endpoint.stop().await;
        }
    }
}

fn other_peers(common: &Common) -> Vec<String> {
    let others = common.config.cluster.peers.iter().filter(|peer| peer.id != common.node_id);
    others.map(|peer| peer.addr.to_string()).collect()
}

fn consensus_settings(common: &Arc<Common>, applier: &Rc<Applier>, names: &Rc<Names>) -> consensus::Settings {
    let cluster = &common.config.cluster;
    let advertised = common.peer_plane.as_ref().map_or(String::new(), |plane| plane.advertised.clone());
    let (applier, names) = (applier.clone(), names.clone());
    let listed = cluster.peers.iter().map(|peer| (peer.id.clone(), peer.addr.to_string())).collect();
    consensus::Settings {
        address_of: Rc::new(move |raft_id, known| {
            control::find_server(raft_id, known, &listed, &applier.state(), |address| names.known(address))
        }),
        snapshot_entries: cluster.raft_snapshot_threshold,
        trailing_entries: cluster.raft_trailing_logs,
        snapshot_check: cluster.raft_snapshot_interval,
        ..consensus::Settings::new(advertised)
    }
}

/// Addresses by `host:port`. Names are looked up on another thread and remembered.
#[derive(Default)]
struct Names {
    known: RefCell<BTreeMap<String, (SocketAddr, Instant)>>,
    asked: RefCell<BTreeMap<String, Instant>>,
    /// Names that could not be looked up, and when that was said.
    said: RefCell<BTreeMap<String, Instant>>,
}

impl Names {
    async fn find(&self, address: &str) -> Option<SocketAddr> {
        match look_up(address).await {
            Ok(found) => {
                self.said.borrow_mut().remove(address);
                self.known.borrow_mut().insert(address.to_owned(), (found, rt::now()));
                Some(found)
            }
            Err(error) => {
                self.say_unknown(address, &error, rt::now());
                None
            }
        }
    }

    /// A name that nobody knows is no node that is down.
    fn say_unknown(&self, address: &str, error: &str, now: Instant) {
        let mut said = self.said.borrow_mut();
        if said.get(address).is_none_or(|at| now.saturating_since(*at) >= SAY_AGAIN) {
            said.insert(address.to_owned(), now);
            tracing::warn!(
                address,
                error,
                "cluster: the address of a peer cannot be looked up: check cluster.peers and DNS"
            );
        }
    }

    /// What is known at the moment; asks anew in the background when that is nothing, or old.
    fn known(self: &Rc<Names>, address: &str) -> Option<SocketAddr> {
        if let Ok(address) = address.parse() {
            return Some(address);
        }
        let known = self.known.borrow().get(address).copied();
        let now = rt::now();
        if known.is_none_or(|(_, at)| now - at > NAME_GOOD) {
            let asked = self.asked.borrow().get(address).copied();
            if asked.is_none_or(|at| now - at > DIAL_AGAIN) {
                self.asked.borrow_mut().insert(address.to_owned(), now);
                let (names, address) = (self.clone(), address.to_owned());
                rt::spawn(Queue::Foreground, async move { names.find(&address).await });
            }
        }
        known.map(|(address, _)| address)
    }
}

/// A node without peers asks nobody.
struct Nobody;

impl Transport for Nobody {
    fn call(&self, _to: SocketAddr, _request: Outgoing) -> LocalBoxFuture<'static, Result<Incoming, CallError>> {
        Box::pin(std::future::ready(Err(CallError::NotSent("this node has no peers".to_owned()))))
    }

    fn send(&self, _to: SocketAddr, _message: Outgoing) {}

    fn hello_of(&self, _to: SocketAddr) -> Option<Arc<Hello>> {
        None
    }

    fn connection_to(&self, _to: SocketAddr) -> Option<ConnectionId> {
        None
    }
}

/// What other control endpoints meet.
struct Door {
    common: Arc<Common>,
    applier: Rc<Applier>,
    disk_id: u64,
    /// Requests that come before are answered "unavailable".
    parts: OnceCell<Parts>,
    own_status: OwnStatus,
}

struct Parts {
    consensus: Rc<Consensus>,
    membership: Rc<Membership>,
}

impl Service for Door {
    fn hello(&self) -> Hello {
        let plane = self.common.peer_plane.as_ref();
        let operations = [
            operation::NODE_STATUS,
            operation::JOIN_CLUSTER,
            operation::FORGET_SERVER,
            operation::CONSENSUS,
            operation::SNAPSHOT,
            operation::PROPOSE,
            operation::APPLIED_INDEX,
            operation::GET_TOPIC,
        ];
        Hello {
            cluster_id: self.applier.state().cluster_id(),
            node: self.common.node_id.clone(),
            boot_id: self.common.boot_id,
            disk_id: self.disk_id,
            shard: None,
            shard_ports: plane.map_or(Vec::new(), |plane| plane.shard_addrs.iter().map(SocketAddr::port).collect()),
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
        let Some(Parts { consensus, membership }) = self.parts.get() else {
            return Box::pin(std::future::ready(control::answer_unconfigured(&request, &[])));
        };
        let (consensus, membership, own_status) = (consensus.clone(), membership.clone(), self.own_status.clone());
        Box::pin(async move {
            if request.header.operation == operation::NODE_STATUS {
                return Some(control::answer_status(own_status().await));
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

/// Keeps a connection to every member, and the shards informed of who they are.
struct Book {
    common: Arc<Common>,
    applier: Rc<Applier>,
    consensus: Rc<Consensus>,
    transport: Rc<dyn Transport>,
    links: Rc<dyn Carrier>,
    /// The last hello of each member: a control connection that is down for a moment does not void its shards' ports.
    hellos: RefCell<BTreeMap<Arc<str>, Arc<Hello>>>,
    dialled: RefCell<BTreeMap<SocketAddr, Instant>>,
    sent: RefCell<Arc<PeerBook>>,
}

impl Book {
    async fn run(self: Rc<Book>) {
        while self.applier.stopped().is_none() {
            let book = self.write();
            self.dial(&book);
            // It is written with the version of the one before.
            if book != **self.sent.borrow() {
                let book = Arc::new(PeerBook { version: book.version + 1, ..book });
                *self.sent.borrow_mut() = book.clone();
                let told = (0..self.common.state.shards)
                    .map(|shard| self.links.call(Address::local(shard), Request::InstallPeers(book.clone())));
                drop(rt::all(told.collect()).await); // a shard that is gone takes the process with it (E25)
            }
            self.common.state.cluster_id.store(self.applier.state().cluster_id(), Relaxed);
            rt::sleep(LOOK).await;
        }
    }

    fn write(&self) -> PeerBook {
        let state = self.applier.state();
        let me: Arc<str> = Arc::from(self.common.node_id.as_str());
        let mut hellos = self.hellos.borrow_mut();
        hellos.retain(|node, _| state.members().contains_key(node));
        control::peer_book(self.sent.borrow().version, &me, self.common.boot_id, &state, |member| {
            let control_addr = self.consensus.address(member.registration.raft_id)?;
            if let Some(hello) = self.transport.hello_of(control_addr).filter(|hello| *hello.node == **member.node()) {
                hellos.insert(member.node().clone(), hello);
            }
            Some(control::Met { control_addr, hello: hellos.get(member.node()).cloned() })
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
            let call = self.transport.call(address, control::ask_status(DIAL_AGAIN));
            rt::spawn(Queue::Foreground, call); // only its connection is of interest
        }
    }
}

/// Tells probes and clients where this node stands (K34, E51).
async fn watch_readiness(common: Arc<Common>, consensus: Rc<Consensus>) {
    let alone = common.peer_plane.is_none();
    let mut latch = std::pin::pin!(consensus.latch());
    loop {
        // Who waits for a leader is told so.
        common.state.set_cluster_gate(if alone { None } else { gate(&consensus) });
        match rt::timeout(LOOK, latch.as_mut()).await {
            Ok(Ok(())) => break,
            Ok(Err(_)) => return, // the node stops
            Err(rt::Elapsed) => {}
        }
    }
    common.state.caught_up.store(true, Relaxed);
    if alone {
        return;
    }
    loop {
        if common.state.opened.load(Relaxed) >= common.state.shards {
            consensus.open_create_gate();
        }
        common.state.set_cluster_gate(gate(&consensus));
        rt::sleep(LOOK).await;
    }
}

fn gate(consensus: &Consensus) -> Option<String> {
    if consensus.leads() {
        return None;
    }
    let contact = consensus.last_contact().map(|at| rt::now() - at);
    unready(consensus.leader().is_some(), contact)
}

/// Why a node that does not lead is not ready (operations 7). `contact`: how long ago a leader was heard.
fn unready(knows_leader: bool, contact: Option<Duration>) -> Option<String> {
    let said = |what: String| Some(format!("metastore: node is not ready: {what}"));
    match (knows_leader, contact) {
        (false, _) => said("no raft leader known".to_owned()),
        (true, None) => said("no contact with the raft leader yet".to_owned()),
        (true, Some(ago)) if ago > consensus::CONTACT_FRESH => {
            said(format!("last raft leader contact {} ago", crate::config::format_duration(ago)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{LogFormat, LogLevel};
    use crate::telemetry::logged;

    #[test]
    fn operations_7_the_first_gate_that_fails_is_named() {
        let said = |knows_leader, contact: Option<u64>| unready(knows_leader, contact.map(Duration::from_secs));
        let named = |what: &str| Some(format!("metastore: node is not ready: {what}"));
        assert_eq!(said(false, None), named("no raft leader known"));
        assert_eq!(said(false, Some(1)), named("no raft leader known"));
        assert_eq!(said(true, None), named("no contact with the raft leader yet"));
        assert_eq!(said(true, Some(6)), named("last raft leader contact 6s ago"));
        assert_eq!(said(true, Some(5)), None);
    }

    #[test]
    fn a_name_that_cannot_be_looked_up_is_said_once_a_minute() {
        let lines = logged(LogLevel::Warn, LogFormat::Text, || {
            let names = Names::default();
            for second in [0, 30, 59, 60, 61] {
                names.say_unknown("no-such-host:7943", "unknown", Instant(0) + Duration::from_secs(second));
            }
            names.say_unknown("other:7943", "unknown", Instant(0) + Duration::from_secs(61));
        });
        let of = |name: &str| lines.iter().filter(|line| line.contains(name)).count();
        assert_eq!((of("no-such-host"), of("other:7943")), (2, 1), "{lines:?}");
    }
}
