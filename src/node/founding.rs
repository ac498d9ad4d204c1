//! Whether a first start founds a cluster or waits to be let into one (K28, K29). Asked before anything is opened, by an
//! endpoint of its own that also answers those who ask the same. Meanwhile `/readyz` says what is waited for.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use narad_shards::rt;
use narad_shards::rt::ring::{run_shard_thread, Options, RingHandle};

use super::broker::{NodeState, ProbeBroker};
use super::peer_plane::PeerPlane;
use super::serving::Serving;
use super::{notify, Refusal};
use crate::config::Config;
use crate::control::consensus::configuration::Server;
use crate::control::consensus::restart::Mode;
use crate::control::{self, plane, Join, Start};
use crate::http::{HttpContext, HttpMetrics, HttpSettings, NodeLimits, Surface, TopicDefaults};
use crate::peer::{PeerEndpoint, PeerSettings, TlsFiles};

/// Connections of those who ask whether the node is ready while it waits.
const CONNECTIONS_MAX: u32 = 256;
/// How long their answers may take once it goes on.
const PROBES_END: Duration = Duration::from_millis(100);

/// Where clients and probes ask.
#[derive(Clone, Copy)]
pub struct Doors {
    pub http: SocketAddr,
    pub metrics: Option<SocketAddr>,
}

/// How the consensus directory is opened. `has_consensus`: it has been in a cluster, or alone, before.
pub fn mode(
    config: &Config,
    node_id: &str,
    plane: Option<&PeerPlane>,
    has_consensus: bool,
    doors: Doors,
    say: &mut dyn FnMut(String),
) -> Result<Mode, Refusal> {
    let cluster = &config.cluster;
    let Some(plane) = plane else {
        return Ok(Mode::Lone(Server { name: node_id.to_owned(), address: String::new(), voter: true }));
    };
    let listed = cluster
        .peers
        .iter()
        .filter(|peer| cluster.initial_members.is_empty() || cluster.initial_members.contains(&peer.id));
    let voters: Vec<Server> =
        listed.map(|peer| Server { name: peer.id.clone(), address: peer.addr.to_string(), voter: true }).collect();
    let found = Mode::Bootstrap { me: node_id.to_owned(), voters: voters.clone() };
    if has_consensus {
        // What is on the disk decides; the mode only says what a node that lost it may do.
        return Ok(if cluster.may_bootstrap(node_id) { found } else { Mode::Join });
    }
    if !cluster.may_bootstrap(node_id) {
        return Ok(Mode::Join);
    }
    if voters.len() == 1 {
        return Ok(found);
    }
    let initial: Vec<String> = voters.iter().map(|voter| voter.name.clone()).collect();
    say(asking(node_id, &voters));
    match ask_around(config, node_id, plane, doors, initial)? {
        Start::Bootstrap => Ok(found),
        _ => Ok(Mode::Join),
    }
}

/// The settings of every endpoint of this node; `memory_bytes` is what its thread has.
pub fn peer_settings(config: &Config, node: &str, memory_bytes: usize) -> PeerSettings {
    let settings = PeerSettings {
        node: node.to_owned(),
        secret: config.cluster.secret.as_ref().map(|secret| Arc::from(secret.0.as_slice())),
        tls: tls_files(config),
        ..PeerSettings::default()
    };
    settings.within(memory_bytes)
}

pub fn tls_files(config: &Config) -> Option<TlsFiles> {
    config.cluster.tls_files().map(|[certificate, key, authorities]| TlsFiles {
        certificate: certificate.clone(),
        key: key.clone(),
        authorities: authorities.clone(),
    })
}

/// Looks a `host:port` up, off this thread when it is a name. `own`: where this node's control endpoint is bound.
pub async fn look_up(address: &str, own: Option<IpAddr>) -> Result<SocketAddr, String> {
    if let Ok(address) = address.parse() {
        return Ok(address);
    }
    let name = address.to_owned();
    let found = rt::blocking(move || name.to_socket_addrs().map(Vec::from_iter)).await;
    first_reached(own, &found.map_err(|error| error.to_string())?)
}

/// The first address of a name that can be dialled at all: a socket of IPv4 reaches no IPv6.
fn first_reached(own: Option<IpAddr>, found: &[SocketAddr]) -> Result<SocketAddr, String> {
    // One that is bound to all of IPv6 reaches IPv4 as well; one bound to an address reaches its own kind.
    let reaches = |address: &&SocketAddr| match own {
        Some(own) if !(own.is_ipv6() && own.is_unspecified()) => own.is_ipv4() == address.is_ipv4(),
        _ => true,
    };
    match (found.iter().find(reaches), found) {
        (Some(address), _) => Ok(*address),
        (None, []) => Err("the name has no address".to_owned()),
        (None, _) => Err("the name has addresses of the other kind alone (IPv4, IPv6) than cluster.addr".to_owned()),
    }
}

fn asking(me: &str, voters: &[Server]) -> String {
    let others = voters.iter().filter(|voter| voter.name != me);
    let others: Vec<String> = others.map(|voter| format!("{} at {}", voter.name, voter.address)).collect();
    format!(
        "first start: asking the other initial members whether there is a cluster already: {}; to found one, {} of {} must be up",
        others.join(", "),
        voters.len() / 2 + 1,
        voters.len()
    )
}

fn ask_around(
    config: &Config,
    node_id: &str,
    plane: &PeerPlane,
    doors: Doors,
    initial: Vec<String>,
) -> Result<Start, Refusal> {
    let (settings, bind) = (config.clone(), plane.control_addr);
    let join = Join {
        node: node_id.to_owned(),
        raft_id: 0,
        peer_address: plane.advertised.clone(),
        empty_directory: true,
        newest_command_type: control::Command::NEWEST_TYPE,
        probe: true,
        initial_members: initial.clone(),
    };
    let thread = std::thread::Builder::new().name("narad-founding".to_owned()).spawn(move || {
        run_shard_thread(Options::new("founding"), move |handle| ask(handle, settings, bind, doors, join, initial))
    });
    let failed = |error: String| Refusal::new(format!("the peers cannot be asked: {error}"), "see the log");
    let ended = thread.map_err(|error| failed(error.to_string()))?.join();
    match ended {
        Ok(Ok(asked)) => asked.map_err(failed),
        Ok(Err(error)) => Err(failed(error.to_string())),
        Err(panic) => Err(failed(rt::panic_text(&*panic))),
    }
}

async fn ask(
    handle: RingHandle,
    config: Config,
    bind: SocketAddr,
    doors: Doors,
    join: Join,
    initial: Vec<String>,
) -> Result<Start, String> {
    let state = Arc::new(NodeState::default());
    let not_ready = |why: &str| state.set_cluster_gate(Some(format!("metastore: node is not ready: {why}")));
    not_ready("first start: asking the other initial members whether there is a cluster already");
    let waiting = answer_probes(&handle, doors, &state, &join.node)?;
    let service = plane::NeverConfigured::new(&join.node, &initial);
    let endpoint = PeerEndpoint::start(&handle, bind, service.clone(), peer_settings(&config, &join.node, 0))
        .map_err(|error| error.to_string())?;
    let others = config.cluster.peers.iter().filter(|peer| peer.id != join.node);
    let peers: BTreeMap<String, String> = others.map(|peer| (peer.id.clone(), peer.addr.to_string())).collect();
    let resolve: control::Resolve = Rc::new(move |address| {
        let address = address.to_owned();
        Box::pin(async move { look_up(&address, Some(bind.ip())).await.ok() })
    });
    let still_starting = async |why: String| {
        not_ready(&why);
        rt::blocking(|| notify::tell(notify::STILL_STARTING)).await;
    };
    let decided = plane::found_or_join(&*endpoint, &resolve, &service, &join, &peers, still_starting).await;
    // Those who are still asking get one more answer from here; then the node's own endpoint takes the port.
    if decided == Start::Bootstrap {
        rt::sleep(plane::ROUND / 2).await;
    }
    endpoint.stop().await;
    for listeners in waiting {
        listeners.stop(PROBES_END).await;
    }
    Ok(decided)
}

/// Whoever asks whether the node is ready is told what it waits for; everything else is answered `503`.
fn answer_probes(
    handle: &RingHandle,
    doors: Doors,
    state: &Arc<NodeState>,
    node: &str,
) -> Result<Vec<Rc<Serving<ProbeBroker>>>, String> {
    let limits = Arc::new(NodeLimits::new(CONNECTIONS_MAX, 0));
    let api = (doors.http, Surface::Api { metrics: doors.metrics.is_none() });
    let probes = doors.metrics.map(|address| (address, Surface::Probes));
    let serve = |(address, surface): (SocketAddr, Surface)| {
        let metrics = Arc::new(HttpMetrics::default());
        let context = HttpContext::new(
            ProbeBroker { state: state.clone(), carrier: Rc::new(OnceCell::new()) },
            HttpSettings { surface, ..HttpSettings::default() },
            TopicDefaults::default(),
            node.to_owned(),
            limits.clone(),
            metrics.clone(),
            Arc::new([metrics]),
        );
        let listener = handle.listen(address).map_err(|error| format!("{address}: {error}"))?;
        Ok(Serving::start(vec![listener], Rc::new(context)))
    };
    std::iter::once(api).chain(probes).map(serve).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_first_start_says_whom_it_asks_and_how_many_it_needs() {
        let voter = |name: &str| Server { name: name.to_owned(), address: format!("{name}:7943"), voter: true };
        let said = asking("n1", &[voter("n1"), voter("n2"), voter("n3")]);
        assert!(said.contains("n2 at n2:7943, n3 at n3:7943; to found one, 2 of 3 must be up"), "{said}");
    }

    #[test]
    fn of_a_name_with_several_addresses_one_is_dialled_that_this_node_can_reach() {
        let [four, six] = ["192.0.2.1:7943", "[2001:db8::1]:7943"].map(|text| text.parse::<SocketAddr>().unwrap());
        let own = |text: &str| Some(text.parse::<IpAddr>().unwrap());
        assert_eq!(first_reached(own("0.0.0.0"), &[six, four]), Ok(four));
        assert_eq!(first_reached(own("::"), &[six, four]), Ok(six));
        assert_eq!(first_reached(own("::"), &[four]), Ok(four));
        assert!(first_reached(own("0.0.0.0"), &[six]).unwrap_err().contains("of the other kind alone"));
        assert_eq!(
            first_reached(own("fd00::1"), &[four, six]),
            Ok(six),
            "a socket of one IPv6 address reaches no IPv4"
        );
        assert!(first_reached(None, &[]).unwrap_err().contains("no address"));
    }
}
