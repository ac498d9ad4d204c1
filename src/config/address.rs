//! Addresses to listen on: `host:port` or `:port`.

use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

/// An address as it was written. `host` is `None` when nobody named one, empty for every interface (`:7942`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenAddress {
    pub host: Option<String>,
    pub port: u16,
}

impl ListenAddress {
    /// Parses `127.0.0.1:7942`, `[::1]:7942`, `name:7942`, `:7942`.
    pub fn parse(text: &str) -> Result<ListenAddress, String> {
        let wrong = || format!("{text:?} is not an address: write \"host:port\", \"[ipv6]:port\" or \":port\"");
        let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
        let port: u16 = port.parse().map_err(|_| wrong())?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host = match bare {
            Some(inner) => inner.parse::<std::net::Ipv6Addr>().map_err(|_| wrong())?.to_string(),
            None if host.contains([':', '/', ' ', '[', ']']) => return Err(wrong()),
            None => host.to_owned(),
        };
        Ok(ListenAddress { host: Some(host), port })
    }

    /// Turns a host (empty: every IPv4 interface) and this port into an address to bind.
    pub fn resolve(host: &str, port: u16) -> Result<SocketAddr, String> {
        if host.is_empty() {
            return Ok(SocketAddr::from(([0, 0, 0, 0], port)));
        }
        let mut found = (host, port).to_socket_addrs().map_err(|error| format!("cannot resolve {host:?}: {error}"))?;
        found.next().ok_or_else(|| format!("{host:?} has no address"))
    }
}

/// Does this host reach no further than this machine? A name is resolved; of those that do not resolve only
/// `localhost` is known to (RFC 6761; a bare system may have no `/etc/hosts`).
pub(super) fn is_loopback(host: &str) -> bool {
    match host.parse::<IpAddr>() {
        Ok(ip) => ip.is_loopback(),
        Err(_) if host.is_empty() => false,
        Err(_) => match (host, 0u16).to_socket_addrs() {
            Ok(found) => {
                let found: Vec<SocketAddr> = found.collect();
                !found.is_empty() && found.iter().all(|address| address.ip().is_loopback())
            }
            Err(_) => host.eq_ignore_ascii_case("localhost"),
        },
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = self.host.as_deref().unwrap_or("");
        match host.contains(':') {
            true => write!(f, "[{host}]:{}", self.port),
            false => write!(f, "{host}:{}", self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written_back() {
        for text in ["127.0.0.1:7942", ":7942", "[::1]:7942", "localhost:0", "broker-1.example:80"] {
            assert_eq!(ListenAddress::parse(text).unwrap().to_string(), text);
        }
        for text in ["", "7942", "localhost", "::1:7942", "a:70000", "a:", "http://a:80", "[x]:1", "a b:1"] {
            assert!(ListenAddress::parse(text).is_err(), "{text:?} was accepted");
        }
    }

    #[test]
    fn e31_loopback_is_known_from_the_rest() {
        for (host, loopback) in [
            ("127.0.0.1", true),
            ("127.9.9.9", true),
            ("::1", true),
            ("localhost", true),
            ("", false),
            ("0.0.0.0", false),
            ("::", false),
            ("10.1.2.3", false),
        ] {
            assert_eq!(is_loopback(host), loopback, "{host:?}");
        }
    }
}
