//! Tells the service manager how far the node is (sd_notify): a datagram to the socket that `NOTIFY_SOCKET` names.
//! Without that variable nobody wants to know.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// Every shard listens.
pub const READY: &str = "READY=1";
/// Requests in flight are being finished.
pub const STOPPING: &str = "STOPPING=1";

/// A start that waits for others, or has much to recover, takes as long as it takes: while this is said the manager does
/// not give up on it (`TimeoutStartSec=`). Good for longer than whoever says it waits before saying it again.
pub const STILL_STARTING: &str = "EXTEND_TIMEOUT_USEC=60000000";
/// Between two of these.
pub const STILL_STARTING_EVERY: Duration = Duration::from_secs(10);

/// Does not wait. A manager that cannot be told is a warning: it goes by the time it has set.
pub fn tell(state: &str) {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET").filter(|socket| !socket.is_empty()) else { return };
    if let Err(error) = send(&socket, state) {
        tracing::warn!(socket = %socket.display(), state, %error,
            "the service manager cannot be told (NOTIFY_SOCKET): check NotifyAccess= and Type=notify of the unit");
    }
}

/// `@` in front stands for the abstract namespace.
fn send(socket: &OsStr, state: &str) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    let from = UnixDatagram::unbound()?;
    from.set_nonblocking(true)?;
    from.send_to_addr(state.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manager_is_told_by_path_and_by_abstract_name() {
        let path = std::env::temp_dir().join(format!("narad-notify-{}", std::process::id()));
        let name = format!("narad-notify-{}", std::process::id());
        let by_name = SocketAddr::from_abstract_name(&name).unwrap();
        for (manager, socket) in [
            (UnixDatagram::bind(&path).unwrap(), path.clone().into_os_string()),
            (UnixDatagram::bind_addr(&by_name).unwrap(), format!("@{name}").into()),
        ] {
            send(&socket, READY).unwrap();
            let mut bytes = [0; 64];
            let got = manager.recv(&mut bytes).unwrap();
            assert_eq!(&bytes[..got], b"READY=1");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(send(path.as_os_str(), READY).is_err());
    }
}
