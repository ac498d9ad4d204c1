//! Settings of a node among others: who they are, where it is reached, and what proves that it belongs to them.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

use super::address::is_loopback;
use super::value::Raw;
use super::{check_node_id, Config, ListenAddress, Warning};

/// Votes need a majority that survives a loss.
const PEERS_MIN: usize = 3;
const SECRET_BYTES_MIN: usize = 16;

#[derive(Clone, Debug)]
pub struct Cluster {
    /// `None`: the id stored in the data directory, or else the host name (E50).
    pub node_id: Option<String>,
    /// UDP, of the control endpoint; shard `i` uses this port plus one plus `i` unless `shard_port_base` says otherwise.
    pub addr: ListenAddress,
    /// Bootstrap voters. Empty: a node without peers, whose peer plane stays closed.
    pub peers: Vec<PeerEntry>,
    pub advertise_addr: Option<ListenAddress>,
    /// Ids that may bootstrap. Empty: all of `peers`.
    pub initial_members: Vec<String>,
    pub shard_port_base: Option<u16>,
    pub raft_snapshot_threshold: u64,
    pub raft_snapshot_interval: Duration,
    pub raft_trailing_logs: u64,
    pub secret: Option<Secret>,
    pub tls_cert_file: Option<PathBuf>,
    pub tls_key_file: Option<PathBuf>,
    pub tls_ca_file: Option<PathBuf>,
    pub allow_plaintext_raft: bool,
    pub allow_insecure_cluster: bool,
}

impl Default for Cluster {
    fn default() -> Cluster {
        Cluster {
            node_id: None,
            addr: ListenAddress { host: None, port: 7943 },
            peers: Vec::new(),
            advertise_addr: None,
            initial_members: Vec::new(),
            shard_port_base: None,
            raft_snapshot_threshold: 8192,
            raft_snapshot_interval: Duration::from_secs(120),
            raft_trailing_logs: 10_240,
            secret: None,
            tls_cert_file: None,
            tls_key_file: None,
            tls_ca_file: None,
            allow_plaintext_raft: false,
            allow_insecure_cluster: false,
        }
    }
}

/// One bootstrap voter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerEntry {
    pub id: String,
    /// Has a host and a port.
    pub addr: ListenAddress,
}

/// Proves to peers that a node belongs to them. Never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub Vec<u8>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret({} bytes)", self.0.len())
    }
}

impl Secret {
    /// Nothing of `text` may appear in the error.
    pub fn parse(text: &str) -> Result<Secret, String> {
        match text.len() {
            n if n < SECRET_BYTES_MIN => Err(format!(
                "has {n} bytes, at least {SECRET_BYTES_MIN} are needed: `openssl rand -hex 32` makes a good one"
            )),
            _ => Ok(Secret(text.as_bytes().to_vec())),
        }
    }
}

impl Cluster {
    pub fn has_peers(&self) -> bool {
        !self.peers.is_empty()
    }

    /// The three files, when they are given.
    pub fn tls_files(&self) -> Option<[&PathBuf; 3]> {
        Some([self.tls_cert_file.as_ref()?, self.tls_key_file.as_ref()?, self.tls_ca_file.as_ref()?])
    }

    /// May this node start a cluster of its own accord (K28)?
    pub fn may_bootstrap(&self, node_id: &str) -> bool {
        match self.initial_members.is_empty() {
            true => self.peers.is_empty() || self.peers.iter().any(|peer| peer.id == node_id),
            false => self.initial_members.iter().any(|id| id == node_id),
        }
    }

    /// The address that others dial: the setting, else this node's own entry in the peer list, with the port that the
    /// peer plane listens on where the setting has none. `Err` names the setting.
    pub fn advertised(&self, node_id: &str) -> Result<ListenAddress, String> {
        if let Some(address) = &self.advertise_addr {
            return Ok(address.clone());
        }
        if let Some(own) = self.peers.iter().find(|peer| peer.id == node_id) {
            return Ok(own.addr.clone());
        }
        match self.has_peers() {
            true => Err(format!(
                "cluster.advertise_addr: this node ({node_id}) is not in cluster.peers, so it must say where others \
                 reach it: set it to \"host:port\", or cluster.node_id to an id of the list"
            )),
            false => Err("cluster.addr: local bind address is not advertisable".to_owned()),
        }
    }

    /// The host to bind: what was written, else loopback for a node that is only known there, else every interface.
    pub fn bind_host(&self, advertised: &ListenAddress) -> String {
        match (&self.addr.host, &advertised.host) {
            (Some(host), _) => host.clone(),
            (None, Some(host)) if is_loopback(host) => host.clone(),
            (None, _) => String::new(),
        }
    }
}

/// `id@host:port,...` of the environment, or the list of `{"id","addr"}` of the file.
pub(super) fn parse_peers(value: Raw<'_>) -> Result<Vec<PeerEntry>, String> {
    match value {
        Raw::Text(text) => text.split(',').map(|entry| parse_entry(entry.trim())).collect(),
        Raw::Json(Value::Array(entries)) => entries.iter().map(parse_object).collect(),
        Raw::Json(other) => Err(format!("{other} is not a list of {{\"id\",\"addr\"}}")),
    }
}

fn parse_entry(entry: &str) -> Result<PeerEntry, String> {
    let (id, address) = entry.split_once('@').ok_or_else(|| format!("{entry:?} is not id@host:port"))?;
    peer(id, address)
}

fn parse_object(entry: &Value) -> Result<PeerEntry, String> {
    let wrong = || format!("{entry} is not an object of \"id\" and \"addr\", both strings");
    let fields = entry.as_object().filter(|fields| fields.len() == 2).ok_or_else(wrong)?;
    let text = |name: &str| fields.get(name).and_then(Value::as_str).ok_or_else(wrong);
    peer(text("id")?, text("addr")?)
}

fn peer(id: &str, address: &str) -> Result<PeerEntry, String> {
    check_node_id(id).map_err(|error| format!("id {id:?} {error}"))?;
    Ok(PeerEntry { id: id.to_owned(), addr: parse_dialled(address)? })
}

/// An address that others dial: with a host that is somebody's, and a port.
pub(super) fn parse_dialled(text: &str) -> Result<ListenAddress, String> {
    let address = ListenAddress::parse(text)?;
    let host = address.host.as_deref().unwrap_or("");
    let is_nobody = |ip: IpAddr| {
        let ip = ip.to_canonical();
        ip.is_unspecified() || ip.is_multicast() || ip == IpAddr::V4(Ipv4Addr::BROADCAST)
    };
    if host.is_empty() || host.parse().is_ok_and(is_nobody) || address.port == 0 {
        return Err(format!("{text:?} is not an address that can be dialled: it needs a host and a port above 0"));
    }
    Ok(address)
}

/// A list of ids, separated by commas, or a JSON list.
pub(super) fn parse_ids(value: Raw<'_>) -> Result<Vec<String>, String> {
    let ids: Vec<String> = match value {
        Raw::Text(text) => text.split(',').map(|id| id.trim().to_owned()).collect(),
        Raw::Json(Value::Array(ids)) => {
            let text = |id: &Value| id.as_str().map(str::to_owned).ok_or_else(|| format!("{id} is not a string"));
            ids.iter().map(text).collect::<Result<_, _>>()?
        }
        Raw::Json(Value::String(text)) => text.split(',').map(|id| id.trim().to_owned()).collect(),
        Raw::Json(other) => return Err(format!("{other} is not a list of node ids")),
    };
    ids.iter().try_for_each(|id| check_node_id(id).map_err(|error| format!("id {id:?} {error}")))?;
    Ok(ids)
}

/// What the settings say of each other. Whether this node is in the list is judged once its id is
/// known.
pub(super) fn validate(config: &mut Config) -> Result<(), String> {
    let cluster = &config.cluster;
    if cluster.addr.port != 0 && cluster.addr == config.http.addr {
        return Err(format!("cluster.addr ({}) must differ from http.addr", cluster.addr));
    }
    let given = [&cluster.tls_cert_file, &cluster.tls_key_file, &cluster.tls_ca_file].into_iter().flatten().count();
    if !matches!(given, 0 | 3) {
        return Err(format!(
            "security.cluster_tls_cert_file, security.cluster_tls_key_file and security.cluster_tls_ca_file belong \
             together: {given} of 3 are set, set all three or none"
        ));
    }
    if !cluster.has_peers() {
        return match cluster.initial_members.is_empty() {
            true => Ok(()),
            false => Err("cluster.initial_members is set and cluster.peers is not: set both or none".to_owned()),
        };
    }
    if cluster.peers.len() < PEERS_MIN {
        return Err(format!(
            "cluster.peers has {} entries, at least {PEERS_MIN} are needed: the same list on every node, or none on a \
             node without peers",
            cluster.peers.len()
        ));
    }
    let (mut ids, mut addresses) = (BTreeSet::new(), BTreeSet::new());
    for peer in &cluster.peers {
        if !ids.insert(peer.id.as_str()) {
            return Err(format!("cluster.peers names {:?} twice", peer.id));
        }
        if !addresses.insert(peer.addr.to_string()) {
            return Err(format!("cluster.peers has the address {} twice", peer.addr));
        }
    }
    if let Some(stranger) = cluster.initial_members.iter().find(|id| !ids.contains(id.as_str())) {
        return Err(format!("cluster.initial_members names {stranger:?}, which is not in cluster.peers"));
    }
    match (config.security.enabled, &cluster.secret) {
        (true, None) => Err("NARAD_CLUSTER_SECRET is not set, and security.enabled with cluster.peers needs it: the \
                             same secret on every node"
            .to_owned()),
        (true, Some(_)) if given == 0 && !cluster.allow_plaintext_raft => {
            Err("security.cluster_tls_cert_file, _key_file and _ca_file are not set: name the three files, or set \
             security.allow_plaintext_raft to true to run the peer plane without certificates of your own (it is \
             encrypted and proves the cluster secret all the same)"
                .to_owned())
        }
        (false, _) if !cluster.allow_insecure_cluster => {
            Err("security.allow_insecure_cluster must be true to run a cluster with security.enabled false".to_owned())
        }
        (false, None) => {
            config.warnings.push(Warning::new(
                "the peer plane is open: whoever reaches its ports is taken for a node of this cluster",
                "set NARAD_CLUSTER_SECRET on every node, and fence the ports",
            ));
            Ok(())
        }
        _ => Ok(()),
    }
}
