//! The control thread's part in the cluster: its endpoint, consensus, membership, controller, and what the shards are
//! told of the other nodes. A node without peers runs consensus with one voter, and nothing else of this.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;
use std::time::Duration;

use narad_shards::peer::{Carrier, LocalBoxFuture};
use narad_shards::remote::{CallError, ConnectionId, Hello, Transport};
use narad_shards::rt::ring::RingHandle;
use narad_shards::rt::{self, Instant, Queue};
use narad_shards::wire::{Incoming, Outgoing};

use super::certificates;
use super::founding::{look_up, peer_settings, tls_files};
use super::peer_watch;
use super::run::Common;
use crate::control::consensus::disk::Stored;
use crate::control::consensus::files::Files;
use crate::control::consensus::{self, Consensus};
use crate::control::plane::{Book, Door, Identity, Part, Plane};
use crate::control::{Applier, Control, Install, Metastore, Resolve, Store};
use crate::peer::PeerEndpoint;

/// How often is looked whether this node is ready.
const LOOK: Duration = Duration::from_millis(100);
/// A name is looked up again after that time at the earliest.
const ASK_AGAIN: Duration = Duration::from_secs(1);
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
    endpoint: Option<Rc<PeerEndpoint>>,
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
    let applier = Applier::start(metastore, install);
    let names: Rc<Names> = Rc::default();
    let settings = consensus_settings(common, &applier, &names);
    let watch = common.state.figures.consensus.clone();
    let client_address = common.http_addr.to_string();
    let begin = |stored, transport: Rc<dyn Transport>| {
        Consensus::start(settings, stored, Rc::new(files), applier.clone(), transport, watch)
    };
    let over = |consensus: &Rc<Consensus>| {
        Control::over(Rc::new(consensus.clone()), applier.clone()).named(&common.node_id, client_address.clone())
    };
    let (consensus, endpoint, control) = match &common.peer_plane {
        None => {
            let consensus = begin(stored, Rc::new(Nobody))?;
            let control = over(&consensus);
            (consensus, None, control)
        }
        Some(plane) => {
            let me = Identity {
                node: Arc::from(common.node_id.as_str()),
                boot_id: common.boot_id,
                disk_id: stored.raft_id,
                peer_address: Arc::from(plane.advertised.as_str()),
                client_address: Arc::from(client_address.as_str()),
                shard_ports: plane.shard_addrs.iter().map(SocketAddr::port).collect(),
            };
            let door = Door::new(me, applier.clone());
            let settings =
                crate::peer::PeerSettings { keep_alive: true, ..peer_settings(&common.config, &common.node_id) };
            let endpoint = PeerEndpoint::start(handle, plane.control_addr, door.clone(), settings)
                .map_err(|error| format!("the peer plane: {error}"))?;
            let transport: Rc<dyn Transport> = endpoint.clone();
            let consensus = begin(stored, transport.clone())?;
            let part = Part { peers: other_peers(common), empty_directory, resolve: names.resolve() };
            let Plane { controller, membership } = Plane::start(&door, &consensus, &transport, part);
            let watched = peer_watch::Watched {
                common: common.clone(),
                endpoint: endpoint.clone(),
                membership: membership.clone(),
                controller: controller.clone(),
            };
            rt::spawn(Queue::Background, watched.run());
            if let Some(files) = tls_files(&common.config) {
                rt::spawn(Queue::Background, certificates::watch(common.clone(), files));
                rt::spawn(Queue::Background, certificates::follow(common.clone(), endpoint.clone()));
            }
            let known = names.clone();
            let book = Book::new(&door, transport, Rc::new(move |address| known.known(address)), links.clone());
            let state = common.state.clone();
            rt::spawn(Queue::Foreground, book.run(move |id| state.cluster_id.store(id, Relaxed)));
            let control = over(&consensus).with_controller(controller).with_membership(membership);
            (consensus, Some(endpoint), control)
        }
    };
    rt::spawn(Queue::Foreground, watch_readiness(common.clone(), consensus.clone()));
    Ok((control, Cluster { consensus, endpoint }))
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
        if let Some(endpoint) = &self.endpoint {
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
    consensus::Settings {
        // Where a member says that it is comes before where it once was (5.5).
        address_of: Rc::new(move |raft_id, recorded| {
            let state = applier.state();
            let member = state.members().values().find(|member| member.registration.raft_id == raft_id);
            names.known(member.map_or(recorded?, |member| &member.registration.peer_address))
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
}

impl Names {
    fn resolve(self: &Rc<Names>) -> Resolve {
        let names = self.clone();
        Rc::new(move |address| {
            let (names, address) = (names.clone(), address.to_owned());
            Box::pin(async move { names.find(&address).await })
        })
    }

    async fn find(&self, address: &str) -> Option<SocketAddr> {
        let found = look_up(address).await?;
        self.known.borrow_mut().insert(address.to_owned(), (found, rt::now()));
        Some(found)
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
            if asked.is_none_or(|at| now - at > ASK_AGAIN) {
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

/// Tells probes and clients where this node stands (K34, E51).
async fn watch_readiness(common: Arc<Common>, consensus: Rc<Consensus>) {
    let alone = common.peer_plane.is_none();
    if consensus.latch().await.is_err() {
        return; // the node stops
    }
    common.state.caught_up.store(true, Relaxed);
    if alone {
        common.state.set_cluster_gate(None);
        return;
    }
    loop {
        common.state.set_cluster_gate(gate(&consensus));
        rt::sleep(LOOK).await;
    }
}

fn gate(consensus: &Consensus) -> Option<String> {
    let said = |what: String| Some(format!("metastore: node is not ready: {what}"));
    if consensus.leads() {
        return None;
    }
    match (consensus.leader(), consensus.last_contact()) {
        (None, _) => said("no raft leader known".to_owned()),
        (Some(_), None) => said("no contact with the raft leader yet".to_owned()),
        (Some(_), Some(at)) if rt::now() - at > consensus::CONTACT_FRESH => {
            said(format!("last raft leader contact {} ago", crate::config::format_duration(rt::now() - at)))
        }
        _ => None,
    }
}
