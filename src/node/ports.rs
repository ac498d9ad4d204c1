//! Addresses to serve on: resolved, and tried before shards bind them with SO_REUSEPORT, which would silently share a
//! port with another broker of the same user.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use narad_shards::meta::ShardId;

use crate::config::ListenAddress;

use super::Refusal;

/// The listener of a process that was just killed lives until the kernel has torn its rings down.
const RETRY_FOR: Duration = Duration::from_secs(2);
const RETRY_EVERY: Duration = Duration::from_millis(50);

/// Tries to listen and stops again. Port 0 is replaced by the one that the kernel chose.
pub fn try_listen(key: &str, host: &str, port: u16) -> Result<SocketAddr, Refusal> {
    try_listen_for(key, host, port, RETRY_FOR)
}

/// The same without patience, for whoever only wants to know.
pub fn try_listen_once(key: &str, host: &str, port: u16) -> Result<SocketAddr, Refusal> {
    try_listen_for(key, host, port, Duration::ZERO)
}

fn try_listen_for(key: &str, host: &str, port: u16, patience: Duration) -> Result<SocketAddr, Refusal> {
    let address = ListenAddress::resolve(host, port)
        .map_err(|error| Refusal::setting(format!("{key}: {error}"), "write an IP address"))?;
    let started = Instant::now();
    loop {
        let error = match TcpListener::bind(address).and_then(|listener| listener.local_addr()) {
            Ok(bound) => return Ok(bound),
            Err(error) => error,
        };
        match error.kind() {
            io::ErrorKind::AddrInUse if started.elapsed() < patience => std::thread::sleep(RETRY_EVERY),
            io::ErrorKind::AddrInUse => {
                return Err(Refusal::setting(
                    format!("{key} ({address}): the port is taken by another process"),
                    format!("stop it (`ss -ltnp sport = :{port}` shows it) or choose another port"),
                ));
            }
            io::ErrorKind::PermissionDenied => {
                return Err(Refusal::setting(
                    format!("{key} ({address}): ports below 1024 need CAP_NET_BIND_SERVICE"),
                    "choose a higher port, or grant the capability",
                ));
            }
            io::ErrorKind::AddrNotAvailable => {
                return Err(Refusal::setting(
                    format!("{key} ({address}): no interface of this machine has that address"),
                    "`ip address` lists them",
                ));
            }
            _ => {
                return Err(Refusal::setting(
                    format!("{key} ({address}): cannot listen: {error}"),
                    "choose another address",
                ))
            }
        }
    }
}

/// The addresses of shards that have one of their own: `base` plus the shard's number, each tried. `taken` are ports
/// of this node that must not be among them, with their keys.
pub fn try_shard_ports(
    base: u16,
    shards: ShardId,
    host: &str,
    taken: &[(&str, u16)],
) -> Result<Vec<SocketAddr>, Refusal> {
    plan_shard_ports(base, shards, taken)?
        .enumerate()
        .map(|(shard, port)| try_listen(&format!("{SHARD_PORTS} {base}, shard {shard}"), host, port))
        .collect()
}

/// Both names, since it is the flag that most people know it by.
const SHARD_PORTS: &str = "runtime.shard_ports (--shard-ports)";

pub fn plan_shard_ports(
    base: u16,
    shards: ShardId,
    taken: &[(&str, u16)],
) -> Result<std::ops::RangeInclusive<u16>, Refusal> {
    let Some(last) = base.checked_add(shards.saturating_sub(1)) else {
        return Err(Refusal::setting(
            format!(
                "{SHARD_PORTS} {base} and {shards} shards need ports up to {}",
                u32::from(base) + u32::from(shards) - 1
            ),
            format!("choose a base of at most {}", u16::MAX - (shards - 1)),
        ));
    };
    match taken.iter().find(|(_, port)| (base..=last).contains(port)) {
        Some((key, port)) => Err(Refusal::setting(
            format!("{SHARD_PORTS} {base} gives shard {} port {port}, which is {key}'s", port - base),
            format!(
                "choose a base above {port}, or below {}",
                (u32::from(*port) + 1).saturating_sub(u32::from(shards))
            ),
        )),
        None => Ok(base..=last),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard_ports_that_cannot_all_be_had_are_refused_by_flag_and_port() {
        let taken = [("http.addr", 7942), ("http.metrics_addr", 0)];
        assert_eq!(plan_shard_ports(7943, 4, &taken).unwrap(), 7943..=7946);
        assert_eq!(plan_shard_ports(65_535, 1, &taken).unwrap(), 65_535..=65_535);
        let text = |base, shards| plan_shard_ports(base, shards, &taken).unwrap_err().to_string();
        let overlap = text(7940, 4);
        assert!(overlap.contains("(--shard-ports) 7940 gives shard 2 port 7942, which is http.addr's"), "{overlap}");
        assert!(overlap.contains("above 7942, or below 7939"), "{overlap}");
        let beyond = text(65_530, 8);
        assert!(beyond.contains("need ports up to 65537: choose a base of at most 65528"), "{beyond}");
        let holder = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = holder.local_addr().unwrap().port();
        let key = format!("{SHARD_PORTS} {port}, shard 0");
        let error = try_listen_for(&key, "127.0.0.1", port, Duration::ZERO).unwrap_err().line();
        assert!(
            error.contains("--shard-ports") && error.contains(&format!("127.0.0.1:{port}): the port is taken")),
            "{error}"
        );
    }

    #[test]
    fn a_taken_port_is_refused_by_key_and_port_zero_is_replaced() {
        let free = try_listen("http.addr", "127.0.0.1", 0).unwrap();
        assert_ne!(free.port(), 0);
        let holder = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = holder.local_addr().unwrap().port();
        let error = try_listen_for("http.addr", "127.0.0.1", port, Duration::ZERO).unwrap_err().line();
        assert!(
            error.starts_with(&format!("narad: config: http.addr (127.0.0.1:{port}): the port is taken")),
            "{error}"
        );
        let error = try_listen_for("http.metrics_addr", "192.0.2.1", 0, Duration::ZERO).unwrap_err().to_string();
        assert!(error.contains("http.metrics_addr (192.0.2.1:0): no interface"), "{error}");
    }
}
