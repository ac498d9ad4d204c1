//! Whether a first start founds a cluster or waits to be let into one (K28, K29). Asked before anything is opened, by an
//! endpoint of its own that also answers those who ask the same.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::{SocketAddr, ToSocketAddrs};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use narad_shards::peer::LocalBoxFuture;
use narad_shards::remote::{ConnectionId, Hello, Service};
use narad_shards::rt::ring::{run_shard_thread, Options, RingHandle};
use narad_shards::rt::{self, Instant};
use narad_shards::wire::{operation, Incoming, Outgoing};

use super::{notify, PeerPlane, Refusal};
use crate::config::Config;
use crate::control::consensus::configuration::Server;
use crate::control::consensus::restart::Mode;
use crate::control::{self, Answer, Join, Start, Unequal};
use crate::peer::{PeerEndpoint, PeerSettings, TlsFiles};

const ROUND: Duration = Duration::from_secs(1);
/// Rounds after which the same trouble is said again.
const SAY_AGAIN: usize = 10;
/// Whoever asks as well is taken into account for so long: it asks every round, and gives each peer 2 s to answer.
const ASKER_COUNTS: Duration = Duration::from_secs(5);

/// How the consensus directory is opened. `has_consensus`: it has been in a cluster, or alone, before.
pub fn mode(
    config: &Config,
    node_id: &str,
    plane: Option<&PeerPlane>,
    has_consensus: bool,
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
    say("first start: asking the other initial members whether there is a cluster already".to_owned());
    let initial: Vec<String> = voters.iter().map(|voter| voter.name.clone()).collect();
    match ask_around(config, node_id, plane, initial)? {
        Start::Bootstrap => Ok(found),
        _ => Ok(Mode::Join),
    }
}

/// The settings of every endpoint of this node.
pub fn peer_settings(config: &Config, node: &str) -> PeerSettings {
    PeerSettings {
        node: node.to_owned(),
        secret: config.cluster.secret.as_ref().map(|secret| Arc::from(secret.0.as_slice())),
        tls: tls_files(config),
        ..PeerSettings::default()
    }
}

pub fn tls_files(config: &Config) -> Option<TlsFiles> {
    config.cluster.tls_files().map(|[certificate, key, authorities]| TlsFiles {
        certificate: certificate.clone(),
        key: key.clone(),
        authorities: authorities.clone(),
    })
}

/// Looks a `host:port` up, off this thread when it is a name.
pub async fn look_up(address: &str) -> Result<SocketAddr, String> {
    if let Ok(address) = address.parse() {
        return Ok(address);
    }
    let name = address.to_owned();
    let found = rt::blocking(move || name.to_socket_addrs().map(|mut found| found.next())).await;
    found.map_err(|error| error.to_string())?.ok_or_else(|| "the name has no address".to_owned())
}

/// Answers other nodes that ask: this one has never been in a cluster.
struct NeverConfigured {
    node: String,
    initial: Vec<String>,
    /// Who has asked lately, with its initial members.
    askers: RefCell<BTreeMap<String, (Vec<String>, Instant)>>,
}

impl NeverConfigured {
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
        if let Some(join) =
            Some(&request).filter(|r| r.header.operation == operation::JOIN_CLUSTER).and_then(control::read_join)
        {
            self.askers.borrow_mut().insert(join.node, (join.initial_members, rt::now()));
        }
        let answer = control::answer_unconfigured(&request, &self.initial);
        Box::pin(std::future::ready(answer))
    }

    fn cancelled_late(&self, _connection: ConnectionId, _request_id: u64) {}

    fn lost(&self, _connection: ConnectionId) {}
}

fn ask_around(config: &Config, node_id: &str, plane: &PeerPlane, initial: Vec<String>) -> Result<Start, Refusal> {
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
        run_shard_thread(Options::new("founding"), move |handle| ask(handle, settings, bind, join, initial))
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
    join: Join,
    initial: Vec<String>,
) -> Result<Start, String> {
    let service =
        Rc::new(NeverConfigured { node: join.node.clone(), initial: initial.clone(), askers: RefCell::default() });
    let endpoint = PeerEndpoint::start(&handle, bind, service.clone(), peer_settings(&config, &join.node))
        .map_err(|error| error.to_string())?;
    let others = config.cluster.peers.iter().filter(|peer| peer.id != join.node);
    let peers: BTreeMap<String, String> = others.map(|peer| (peer.id.clone(), peer.addr.to_string())).collect();
    let resolve: control::Resolve = Rc::new(|address| {
        let address = address.to_owned();
        Box::pin(async move { look_up(&address).await.ok() })
    });
    let mut rounds = 0;
    let mut said: BTreeMap<String, usize> = BTreeMap::new();
    let decided = loop {
        let answers = control::probe(&*endpoint, &resolve, &join, &peers).await;
        rounds += 1;
        let mut lists = service.lists();
        let mut statuses = BTreeMap::new();
        for (node, answer) in &answers {
            if let Ok(answer) = answer {
                lists.insert(node.clone(), answer.initial_members.clone());
            }
            statuses.insert(node.clone(), answer.as_ref().ok().map(|answer| answer.status));
        }
        match control::start(&join.node, &initial, &statuses, &lists, rounds) {
            Start::AskAgain => {
                for unequal in control::unequal(&initial, &lists) {
                    let last = said.get(&unequal.node).copied();
                    if last.is_none_or(|last| rounds - last >= SAY_AGAIN) {
                        said.insert(unequal.node.clone(), rounds);
                        say_unequal(&unequal);
                    }
                }
                if rounds % SAY_AGAIN == 0 {
                    say_silent(&answers);
                }
            }
            decided => break decided,
        }
        // The others may be started by hand, one after the other.
        rt::blocking(|| notify::tell(notify::STILL_STARTING)).await;
        rt::sleep(ROUND).await;
    };
    // Those who are still asking get one more answer from here; then the node's own endpoint takes the port.
    if decided == Start::Bootstrap {
        rt::sleep(ROUND / 2).await;
    }
    endpoint.stop().await;
    Ok(decided)
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

fn say_silent(answers: &BTreeMap<String, Result<Answer, String>>) {
    let why = |(id, answer): (&String, &Result<Answer, String>)| Some(format!("{id}: {}", answer.as_ref().err()?));
    let silent: Vec<String> = answers.iter().filter_map(why).collect();
    tracing::warn!(
        silent = silent.join("; "),
        "a majority of the initial members must be up to found the cluster; still asking"
    );
}
