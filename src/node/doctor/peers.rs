//! The peer plane of a node in a cluster: its UDP ports, its certificates, and whether the other nodes can be found.

use std::net::ToSocketAddrs;

use narad_shards::meta::ShardId;

use super::super::{founding, peer_plane};
use super::Check;
use crate::config::{format_time, Config};
use crate::peer::{self, wall_clock, Validity};

/// Under that much certificates are worth a warning, as in the log of a node that runs.
const EXPIRES_SOON: i64 = 30 * 86_400;

/// Nothing for a node without peers, but for its certificates, which a start looks at all the same.
pub(super) fn checks(config: &Config, node_id: &str, shards: usize, holder: Option<&str>, checks: &mut Vec<Check>) {
    if let Some(files) = founding::tls_files(config) {
        checks.push(judge_certificates(peer::check_files(&files), wall_clock()));
    }
    if !config.cluster.has_peers() {
        return;
    }
    let shards = ShardId::try_from(shards).unwrap_or(ShardId::MAX);
    const PORT: &str = "port.cluster";
    checks.push(match (peer_plane::plan_peer_plane(config, node_id, shards), holder) {
        (Ok(Some(plane)), _) => Check::ok(
            PORT,
            format!("UDP {} is free, and one port a shard; peers dial {}", plane.control_addr, plane.advertised),
        ),
        (Ok(None), _) => Check::skip(PORT, "no peers are set"),
        (Err(refusal), Some(holder)) if refusal.cause.contains("taken") => {
            Check::ok(PORT, format!("taken, as it should be while {holder} serves"))
        }
        (Err(refusal), _) => Check::refused(PORT, refusal),
    });
    let others = config.cluster.peers.iter().filter(|peer| peer.id != node_id);
    let others = others.map(|peer| (peer.id.clone(), peer.addr.to_string()));
    checks.push(judge_names(others, |address| address.to_socket_addrs().map_err(|error| error.to_string()).map(drop)));
}

/// Peers by id and `host:port`.
fn judge_names(peers: impl Iterator<Item = (String, String)>, resolve: impl Fn(&str) -> Result<(), String>) -> Check {
    const ID: &str = "cluster.peers";
    let mut known = 0;
    let mut unknown = Vec::new();
    for (id, address) in peers {
        match resolve(&address) {
            Ok(()) => known += 1,
            Err(error) => unknown.push(format!("{id} ({address}: {error})")),
        }
    }
    match unknown.is_empty() {
        true => Check::ok(ID, format!("the addresses of {known} other nodes are known")),
        false => Check::warn(
            ID,
            format!("no address is known for {}", unknown.join(", ")),
            "correct cluster.peers, or the name service that this machine asks",
        ),
    }
}

fn judge_certificates(checked: Result<Validity, String>, now: i64) -> Check {
    const ID: &str = "cluster.certificates";
    const RENEW: &str = "replace the files; a node that runs reads them again by itself, and at once on SIGHUP";
    let validity = match checked {
        Ok(validity) => validity,
        Err(error) => return Check::fail(ID, error, "correct the file that is named; `openssl verify` tells more"),
    };
    let ends = validity.leaf.min(validity.authorities);
    let shown = format!("{}Z", format_time(u64::try_from(ends).unwrap_or(0)));
    match ends - now {
        ..=0 => Check::warn(ID, format!("expired at {shown}: peers refuse new connections"), RENEW),
        left if left < EXPIRES_SOON => Check::warn(ID, format!("expire at {shown}"), RENEW),
        _ => Check::ok(ID, format!("good until {shown}")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;
    use crate::config::{load, Sources};

    #[test]
    fn a_peer_without_an_address_and_certificates_that_end_are_worth_a_warning() {
        let peers = || ["a", "b"].map(|id| (id.to_owned(), format!("{id}.example:7943"))).into_iter();
        assert_eq!(judge_names(peers(), |_| Ok(())).status, Status::Ok);
        let lost = judge_names(peers(), |address| match address.starts_with('b') {
            true => Err("no such name".to_owned()),
            false => Ok(()),
        });
        assert_eq!(
            (lost.status, lost.found.as_str()),
            (Status::Warn, "no address is known for b (b.example:7943: no such name)")
        );
        let ends = |leaf| judge_certificates(Ok(Validity { leaf, authorities: i64::MAX }), 1_000);
        assert_eq!(ends(1_000).status, Status::Warn);
        assert!(ends(1_000).found.contains("expired"), "{:?}", ends(1_000));
        assert_eq!(ends(1_001).status, Status::Warn);
        assert_eq!(ends(1_000 + EXPIRES_SOON).status, Status::Ok);
        assert_eq!(judge_certificates(Err("x".to_owned()), 0).status, Status::Fail);
    }

    #[test]
    fn the_udp_port_of_the_peer_plane_is_tried_as_the_start_tries_it() {
        let taken = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().to_string();
        let examined = |address: &str, holder| {
            let peers = format!("a@{address},b@127.0.0.1:2,c@127.0.0.1:3");
            let environment = [
                ("NARAD_CLUSTER_PEERS", peers.as_str()),
                ("NARAD_CLUSTER_SECRET", "0123456789abcdef"),
                ("NARAD_SECURITY_ALLOW_PLAINTEXT_RAFT", "true"),
                ("NARAD_CLUSTER_ADDR", address),
            ];
            let environment =
                environment.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
            let config = load(&Sources { environment, ..Sources::default() }).unwrap();
            let mut found = Vec::new();
            checks(&config, "a", 1, holder, &mut found);
            found.into_iter().find(|check| check.id == "port.cluster").unwrap()
        };
        let refused = examined(&port, None);
        assert_eq!(refused.status, Status::Fail);
        assert!(refused.found.contains("cluster.addr"), "{refused:?}");
        assert_eq!(examined(&port, Some("process 7")).status, Status::Ok, "this very node has it");
        drop(taken);
        assert_eq!(examined(&port, None).status, Status::Ok);
        let mut none = Vec::new();
        checks(&load(&Sources::default()).unwrap(), "a", 1, None, &mut none);
        assert!(none.is_empty(), "a node without peers has no peer plane");
    }
}
