//! Addresses to serve on: resolved, and tried before shards bind them with SO_REUSEPORT, which would silently share a
//! port with another broker of the same user.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use crate::config::ListenAddress;

use super::Refusal;

/// The listener of a process that was just killed lives until the kernel has torn its rings down.
const RETRY_FOR: Duration = Duration::from_secs(2);
const RETRY_EVERY: Duration = Duration::from_millis(50);

/// Tries to listen and stops again. Port 0 is replaced by the one that the kernel chose.
pub fn try_listen(key: &str, host: &str, port: u16) -> Result<SocketAddr, Refusal> {
    try_listen_for(key, host, port, RETRY_FOR)
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

#[cfg(test)]
mod tests {
    use super::*;

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
