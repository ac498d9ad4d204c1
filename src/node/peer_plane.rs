//! The addresses of the peer plane, tried before the first thread: one UDP port for the control endpoint, one a shard
//! (E39). A node without peers has none.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};

use narad_shards::meta::ShardId;

use super::Refusal;
use crate::config::{Config, ListenAddress};

/// Where the peer plane of this node is bound, and where others are told to find it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerPlane {
    /// `host:port` as others dial it.
    pub advertised: String,
    pub control_addr: SocketAddr,
    /// One a shard, told to peers by their hello, never computed by them.
    pub shard_addrs: Vec<SocketAddr>,
}

/// Start line: how what nodes say to each other is protected. A node without peers listens to nobody and says so.
pub fn log_transport(config: &Config, plane: Option<&PeerPlane>) {
    let mtls = config.cluster.tls_files().is_some();
    let has_secret = config.cluster.secret.is_some();
    let secret = if has_secret { "shared" } else { "none" };
    let addr = plane.map_or("none".to_owned(), |plane| plane.control_addr.to_string());
    tracing::info!(mtls, secret, addr, "peer transport");
    if let Some(plane) = plane {
        if !has_secret && !mtls {
            tracing::warn!(
                component = "audit",
                addr = %plane.control_addr,
                "node RPC plane is unauthenticated: whoever reaches its ports may read and write everything; fence them, \
                 or set NARAD_CLUSTER_SECRET"
            );
        }
    }
}

/// `None`: no peers are configured, so nobody is listened to.
pub fn plan_peer_plane(config: &Config, node_id: &str, shards: ShardId) -> Result<Option<PeerPlane>, Refusal> {
    let cluster = &config.cluster;
    if !cluster.has_peers() {
        return Ok(None);
    }
    let advertised =
        cluster.advertised(node_id).map_err(|error| Refusal::setting(error, "the same list on every node"))?;
    if let Some(other) = cluster.peers.iter().find(|peer| peer.id != node_id && peer.addr == advertised) {
        return Err(Refusal::setting(
            format!(
                "cluster.advertise_addr: this node ({node_id}) is to be reached at {advertised}, where cluster.peers has {}",
                other.id
            ),
            "correct cluster.node_id, cluster.advertise_addr or cluster.peers: each node has an address of its own",
        ));
    }
    let mut host = cluster.bind_host(&advertised);
    if host.is_empty() {
        host = own_address(&advertised).unwrap_or_default();
    }
    let control_addr = try_udp("cluster.addr", &host, cluster.addr.port)?;
    if control_addr.ip().is_unspecified() && advertised.host.is_none() {
        return Err(Refusal::setting(
            "cluster.addr: local bind address is not advertisable",
            "set cluster.advertise_addr",
        ));
    }
    if let Some(six) = cluster.peers.iter().find(|peer| control_addr.is_ipv4() && is_ipv6(&peer.addr)) {
        return Err(Refusal::setting(
            format!("cluster.addr ({control_addr}) is IPv4, and cluster.peers has {} at {}", six.id, six.addr),
            "write cluster.addr as \"[::]:7943\", or with an IPv6 address of this machine",
        ));
    }
    let base = match cluster.shard_port_base {
        Some(base) => base,
        None => control_addr.port().checked_add(1).unwrap_or(0),
    };
    if base == 0 || base.checked_add(shards.saturating_sub(1)).is_none() {
        return Err(Refusal::setting(
            format!("cluster.shard_port_base: {shards} shards need as many UDP ports above {}", control_addr.port()),
            "choose a lower cluster.addr, or a cluster.shard_port_base that leaves room",
        ));
    }
    let shard_addrs =
        (0..shards).map(|shard| try_shard_udp(&host, base + shard, control_addr)).collect::<Result<_, _>>()?;
    Ok(Some(PeerPlane { advertised: advertised.to_string(), control_addr, shard_addrs }))
}

/// The advertised address, if it is one of this machine. Bound to every interface, a machine with several addresses answers
/// from the one that its routes prefer, and whoever asked at another takes that for a stranger. A name is left alone: to
/// itself a machine often has another address under it than to others.
fn own_address(advertised: &ListenAddress) -> Option<String> {
    let host = advertised.host.as_ref()?;
    let address: IpAddr = host.parse().ok()?;
    UdpSocket::bind((address, 0)).ok().map(|_| host.clone())
}

fn is_ipv6(address: &ListenAddress) -> bool {
    address.host.as_ref().is_some_and(|host| host.parse::<IpAddr>().is_ok_and(|ip| ip.is_ipv6()))
}

/// On loopback, where several nodes of one machine meet, a taken port is replaced by a free one: peers are told.
fn try_shard_udp(host: &str, port: u16, control: SocketAddr) -> Result<SocketAddr, Refusal> {
    match try_udp("cluster.shard_port_base", host, port) {
        Err(_) if control.ip().is_loopback() => try_udp("cluster.shard_port_base", host, 0),
        other => other,
    }
}

/// Binds and lets go again: what has the port now is another process. Port 0 is replaced by a free one.
fn try_udp(key: &str, host: &str, port: u16) -> Result<SocketAddr, Refusal> {
    let address = ListenAddress::resolve(host, port)
        .map_err(|error| Refusal::setting(format!("{key}: {error}"), "write an IP address"))?;
    let error = match UdpSocket::bind(address).and_then(|socket| socket.local_addr()) {
        Ok(bound) => return Ok(bound),
        Err(error) => error,
    };
    let (cause, remedy) = match error.kind() {
        io::ErrorKind::AddrInUse => (
            "the UDP port is taken by another process".to_owned(),
            format!("stop it (`ss -lunp sport = :{port}` shows it) or choose another port"),
        ),
        io::ErrorKind::PermissionDenied => (
            "ports below 1024 need CAP_NET_BIND_SERVICE".to_owned(),
            "choose a higher port, or grant the capability".to_owned(),
        ),
        io::ErrorKind::AddrNotAvailable => {
            ("no interface of this machine has that address".to_owned(), "`ip address` lists them".to_owned())
        }
        _ => (format!("cannot be bound: {error}"), "choose another address".to_owned()),
    };
    Err(Refusal::setting(format!("{key} ({address}): {cause}"), remedy))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{self, Sources};

    fn config(more: &[(&str, &str)]) -> Config {
        let mut environment = vec![
            ("NARAD_CLUSTER_PEERS", "a@127.0.0.1:1,b@127.0.0.1:2,c@127.0.0.1:3"),
            ("NARAD_CLUSTER_SECRET", "0123456789abcdef"),
            ("NARAD_SECURITY_ALLOW_PLAINTEXT_RAFT", "true"),
            ("NARAD_CLUSTER_ADDR", "127.0.0.1:0"),
        ];
        environment.retain(|(name, _)| !more.iter().any(|(other, _)| other == name));
        environment.extend(more);
        let environment = environment.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        config::load(&Sources { environment, ..Sources::default() }).unwrap()
    }

    #[test]
    fn e39_each_shard_has_a_port_of_its_own() {
        let plane = plan_peer_plane(&config(&[]), "b", 3).unwrap().unwrap();
        assert_eq!(plane.advertised, "127.0.0.1:2");
        assert_eq!(plane.shard_addrs.len(), 3);
        assert!(plane.shard_addrs.iter().all(|address| address.port() != 0 && *address != plane.control_addr));
        let lone = config::load(&Sources::default()).unwrap();
        assert_eq!(plan_peer_plane(&lone, "b", 3).unwrap(), None);
    }

    #[test]
    fn t3_the_start_states_how_the_peer_plane_is_protected() {
        use crate::config::{LogFormat, LogLevel};
        let said = |more: &[(&str, &str)]| {
            let config = config(more);
            let plane = plan_peer_plane(&config, "b", 1).unwrap();
            let lines = crate::telemetry::logged(LogLevel::Info, LogFormat::Text, || {
                log_transport(&config, plane.as_ref());
            });
            lines.join("\n")
        };
        let shared = said(&[]);
        assert!(shared.contains("msg=\"peer transport\" mtls=false secret=shared addr=127.0.0.1:"), "{shared}");
        assert!(!shared.contains("unauthenticated"), "{shared}");
        let open = [
            ("NARAD_SECURITY_ENABLED", "false"),
            ("NARAD_SECURITY_ALLOW_INSECURE_CLUSTER", "true"),
            ("NARAD_CLUSTER_SECRET", ""),
        ];
        let open = said(&open);
        assert!(open.contains("mtls=false secret=none"), "{open}");
        assert!(open.contains("level=WARN msg=\"node RPC plane is unauthenticated"), "{open}");
    }

    #[test]
    fn an_advertised_address_of_this_machine_is_the_one_that_answers() {
        let own = |host: &str| own_address(&ListenAddress { host: Some(host.to_owned()), port: 7943 });
        assert_eq!(own("127.0.0.1").as_deref(), Some("127.0.0.1"));
        assert_eq!(own("203.0.113.7"), None, "behind an address translation: every interface");
        assert_eq!(own("localhost"), None, "a name says what others see, not what this machine has");
        assert_eq!(own_address(&ListenAddress { host: None, port: 7943 }), None);
    }

    #[test]
    fn e39_on_loopback_a_taken_shard_port_is_replaced_and_a_taken_control_port_is_not() {
        let holder = UdpSocket::bind("127.0.0.1:0").unwrap();
        let taken = holder.local_addr().unwrap().port();
        let plane = plan_peer_plane(&config(&[("NARAD_CLUSTER_SHARD_PORT_BASE", &taken.to_string())]), "b", 1);
        assert_ne!(plane.unwrap().unwrap().shard_addrs[0].port(), taken);
        let error = plan_peer_plane(&config(&[("NARAD_CLUSTER_ADDR", &format!("127.0.0.1:{taken}"))]), "b", 1);
        let error = error.unwrap_err().line();
        assert!(
            error.starts_with(&format!("narad: config: cluster.addr (127.0.0.1:{taken}): the UDP port is taken")),
            "{error}"
        );
    }

    #[test]
    fn a_node_at_the_address_of_another_one_is_refused() {
        let refused = |more: &[(&str, &str)], node: &str| plan_peer_plane(&config(more), node, 1).unwrap_err().line();
        let at_b = [("NARAD_CLUSTER_ADVERTISE_ADDR", "127.0.0.1:2")];
        let error = refused(&at_b, "c");
        assert!(error.contains("this node (c) is to be reached at 127.0.0.1:2, where cluster.peers has b"), "{error}");
        // What a host name that is no id of the list comes to.
        let error = refused(&at_b, "host-of-b");
        assert!(error.contains("this node (host-of-b) is to be reached at 127.0.0.1:2"), "{error}");
        assert!(plan_peer_plane(&config(&at_b), "b", 1).unwrap().is_some());
    }

    #[test]
    fn peers_that_a_socket_of_ipv4_never_reaches_are_refused() {
        let six = [("NARAD_CLUSTER_PEERS", "a@127.0.0.1:1,b@127.0.0.1:2,c@[2001:db8::1]:3")];
        let error = plan_peer_plane(&config(&six), "b", 1).unwrap_err().line();
        assert!(error.contains("is IPv4, and cluster.peers has c at [2001:db8::1]:3"), "{error}");
        assert!(error.contains("[::]:7943"), "{error}");
    }

    #[test]
    fn a_node_outside_the_list_must_say_where_it_is() {
        let error = plan_peer_plane(&config(&[]), "d", 1).unwrap_err().line();
        assert!(error.contains("cluster.advertise_addr: this node (d) is not in cluster.peers"), "{error}");
    }
}
