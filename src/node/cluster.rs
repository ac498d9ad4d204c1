//! The control thread's part in the cluster: its endpoint, consensus, membership, controller, and what the shards are
//! told of the other nodes. A node without peers runs consensus with one voter, and nothing else of this.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
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
use super::status;
use crate::control::consensus::disk::Stored;
use crate::control::consensus::files::Files;
use crate::control::consensus::{self, Consensus};
use crate::control::plane::{Book, Door, Identity, Part, Plane};
use crate::control::{self, Applier, Control, Install, Membership, Metastore, Resolve, Store};
use crate::peer::PeerEndpoint;

/// How often is looked whether this node is ready.
const LOOK: Duration = Duration::from_millis(100);
/// A name is looked up again after that time at the earliest.
const ASK_AGAIN: Duration = Duration::from_secs(1);
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
    let applier = Applier::start(metastore, install);
    let own = common.peer_plane.as_ref().map(|plane| plane.control_addr.ip());
    let names = Rc::new(Names { own, ..Names::default() });
    let own_status = status::own(common, links, &applier);
    let settings = consensus_settings(common, &applier, &names);
    let watch = common.state.figures.consensus.clone();
    let client_address = common.http_addr.to_string();
    let begin = |settings, stored, transport: Rc<dyn Transport>| {
        Consensus::start(settings, stored, Rc::new(files), applier.clone(), transport, watch)
    };
    let over = |consensus: &Rc<Consensus>| {
        Control::over(Rc::new(consensus.clone()), applier.clone())
            .named(&common.node_id, client_address.clone())
            .with_status(own_status.clone())
    };
    let (consensus, endpoints, control, member) = match &common.peer_plane {
        None => {
            let consensus = begin(settings, stored, Rc::new(Nobody))?;
            let control = over(&consensus);
            (consensus, Vec::new(), control, None)
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
            let door = Door::new(me, applier.clone(), own_status.clone());
            // The least that works: what comes here is short but for snapshots and what new members are sent.
            let said = peer_settings(&common.config, &common.node_id, 0);
            let endpoint = PeerEndpoint::start(
                handle,
                plane.control_addr,
                door.clone(),
                crate::peer::PeerSettings { keep_alive: true, ..said.clone() },
            )
            .map_err(|error| format!("the peer plane: {error}"))?;
            let any_port = SocketAddr::new(plane.control_addr.ip(), 0);
            let bulk = PeerEndpoint::start(handle, any_port, door.clone(), said)
                .map_err(|error| format!("the peer plane, for snapshots: {error}"))?;
            let transport: Rc<dyn Transport> = endpoint.clone();
            let settings = consensus::Settings { bulk: Some(bulk.clone()), ..settings };
            let consensus = begin(settings, stored, transport.clone())?;
            consensus.shut_create_gate();
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
                for endpoint in [&endpoint, &bulk] {
                    rt::spawn(Queue::Background, certificates::follow(common.clone(), endpoint.clone()));
                }
            }
            let book = Book::new(&door, consensus.clone(), transport, links.clone());
            let state = common.state.clone();
            rt::spawn(Queue::Foreground, book.run(move |id| state.cluster_id.store(id, Relaxed)));
            let control = over(&consensus).with_controller(controller).with_membership(membership.clone());
            (consensus, vec![endpoint, bulk], control, Some(membership))
        }
    };
    rt::spawn(Queue::Foreground, watch_readiness(common.clone(), consensus.clone(), member));
    Ok((control, Cluster { consensus, endpoints }))
}

impl Cluster {
    /// First step of a stop: somebody else leads.
    pub async fn hand_over(&self) {
        let others = self.consensus.status().configuration.servers.len() > 1;
        if !others || !self.consensus.leads() {
            return;
        }
        match self.consensus.transfer().await {
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
    /// Where this node is bound.
    own: Option<IpAddr>,
    known: RefCell<BTreeMap<String, (SocketAddr, Instant)>>,
    asked: RefCell<BTreeMap<String, Instant>>,
    /// Names that could not be looked up, and when that was said.
    said: RefCell<BTreeMap<String, Instant>>,
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
        match look_up(address, self.own).await {
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
async fn watch_readiness(common: Arc<Common>, consensus: Rc<Consensus>, member: Option<Rc<Membership>>) {
    let alone = member.is_none();
    let gate = |consensus: &Consensus| gate(consensus, member.as_deref());
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
    if alone {
        return;
    }
    common.state.trust.begin(rt::now());
    loop {
        if common.state.opened.load(Relaxed) >= common.state.shards {
            consensus.open_create_gate();
        }
        common.state.set_cluster_gate(gate(&consensus));
        common.state.trust.renew(async || consensus.pass_barrier().await.is_ok()).await;
        rt::sleep(LOOK).await;
    }
}

fn gate(consensus: &Consensus, member: Option<&Membership>) -> Option<String> {
    if consensus.leads() {
        return None;
    }
    let contact = consensus.last_contact().map(|at| rt::now() - at);
    unready(consensus.leader().is_some(), contact, member.and_then(Membership::outside))
}

/// Why a node that does not lead is not ready (operations 7). `contact`: how long ago a leader was heard. `outside`: what
/// came of asking to be let in.
fn unready(knows_leader: bool, contact: Option<Duration>, outside: Option<String>) -> Option<String> {
    let said = |what: String| Some(format!("metastore: node is not ready: {what}"));
    match (knows_leader, contact) {
        (false, _) => said(match outside {
            Some(why) => format!("no raft leader known; {why}"),
            None => "no raft leader known".to_owned(),
        }),
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
        let said = |knows_leader, contact: Option<u64>| unready(knows_leader, contact.map(Duration::from_secs), None);
        let named = |what: &str| Some(format!("metastore: node is not ready: {what}"));
        assert_eq!(said(false, None), named("no raft leader known"));
        assert_eq!(said(false, Some(1)), named("no raft leader known"));
        assert_eq!(said(true, None), named("no contact with the raft leader yet"));
        assert_eq!(said(true, Some(6)), named("last raft leader contact 6s ago"));
        assert_eq!(said(true, Some(5)), None);
        // A node on an empty disk waits for its place: it says what the leader says.
        let outside = || Some("b:7943 does not let this node in (id_in_use): in 30 s".to_owned());
        let text = "no raft leader known; b:7943 does not let this node in (id_in_use): in 30 s";
        assert_eq!(unready(false, None, outside()), named(text));
        assert_eq!(unready(true, Some(Duration::ZERO), outside()), None);
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
