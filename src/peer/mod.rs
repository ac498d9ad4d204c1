//! The peer plane: what carries frames between nodes. QUIC over UDP on the ring of the thread that uses it, one endpoint
//! for each shard and one for the control thread.
//!
//! An endpoint is one socket that both dials and accepts. Whoever dials sends requests, whoever accepts answers them (E54);
//! so two endpoints that ask each other hold two connections. On a connection, stream 0 carries the proof of the cluster
//! secret and the hellos of both sides, and every [lane](narad_shards::wire::Lane) has a stream of its own for frames.
//!
//! | file | what it is |
//! |---|---|
//! | `endpoint` | the socket's task, dialling, and `Transport` |
//! | `link` | one connection: its phases, streams and calls |
//! | `greeter` | stream 0 of a connection: who has said what |
//! | `liveness` | when a peer is asked whether it lives, and when it is dead |
//! | `state` | all connections of an endpoint, and how packets find them |
//! | `closing` | why connections end |
//! | `frames` | from stream bytes to frames |
//! | `intake` | what frames on their way in may take of memory |
//! | `queue` | from frames to streams, lane by lane |
//! | `greeting` | proof and hello as bytes |
//! | `proof` | who knows the secret |
//! | `tls` | certificates and QUIC's parameters |
//! | `certificates` | whether files can be used, and until when |
//! | `admission` | what strangers may cost |
//! | `outbox` | datagrams on their way to the socket |
//! | `ceiling` | what `narad-bench peer` measures against |

mod admission;
mod buffers;
#[doc(hidden)]
pub mod ceiling;
mod certificates;
mod closing;
mod endpoint;
mod frames;
#[doc(hidden)]
pub mod fuzz;
mod greeter;
mod greeting;
mod intake;
mod link;
mod liveness;
mod metrics;
mod outbox;
mod proof;
mod queue;
mod state;
#[cfg(test)]
mod tests;
mod tls;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Why a shard that is still starting turns a peer away: expected, so it is said at debug level.
pub const NOT_OPEN_YET: &str = "this shard is not open yet";

pub use certificates::{check_files, wall_clock, Validity};
pub use endpoint::PeerEndpoint;
pub use metrics::{LinkFigures, PeerMetrics};

/// The shared name in every node's certificate, when there are certificates (E49).
pub const SHARED_NAME: &str = "narad-cluster.local";

/// Payload of a datagram on a network whose packets are 1,500 bytes, over IPv6.
pub const DATAGRAM_BYTES: usize = 1452;
/// Less is no QUIC.
pub const DATAGRAM_BYTES_MIN: usize = 1200;
/// The longest that QUIC packets get here: for loopback, whose packets are 64 KiB.
pub const DATAGRAM_BYTES_MAX: usize = 16_383;

/// Certificate, key and authorities, PEM. With them both sides of every connection show a certificate (E49).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    pub certificate: PathBuf,
    pub key: PathBuf,
    pub authorities: PathBuf,
}

/// How an endpoint behaves.
#[derive(Clone, Debug)]
pub struct PeerSettings {
    /// Whose endpoint it is.
    pub node: String,
    /// Both sides of a connection must know it, or neither has one.
    pub secret: Option<Arc<[u8]>>,
    /// `None`: a certificate that this endpoint makes for itself, and nobody checks.
    pub tls: Option<TlsFiles>,
    /// Connections are kept up when nothing is said on them: for control endpoints.
    pub keep_alive: bool,
    /// A connection on which nothing arrives for that long is over.
    pub idle_timeout: Duration,
    /// Payload of a full datagram, [`DATAGRAM_BYTES_MIN`] to [`DATAGRAM_BYTES_MAX`].
    pub datagram_bytes: usize,
    /// The kernel cuts and joins datagrams (E55). Off where a network breaks that silently.
    pub offload: bool,
    /// Bytes that a stream may have under way to begin with, and at most (E41).
    pub stream_window_bytes: u64,
    pub stream_window_bytes_max: u64,
    /// As above, for a whole connection. The first one is all that somebody unproven can make us hold (E48).
    pub connection_window_bytes: u64,
    pub connection_window_bytes_max: u64,
    /// Bytes that frames on their way in may take before they are whole; one frame of each node always may.
    pub incoming_bytes_max: usize,
}

impl Default for PeerSettings {
    fn default() -> PeerSettings {
        PeerSettings {
            node: String::new(),
            secret: None,
            tls: None,
            keep_alive: false,
            idle_timeout: Duration::from_secs(30),
            datagram_bytes: DATAGRAM_BYTES,
            offload: true,
            stream_window_bytes: 256 << 10,
            stream_window_bytes_max: 4 << 20,
            connection_window_bytes: 256 << 10,
            connection_window_bytes_max: 16 << 20,
            incoming_bytes_max: 64 << 20,
        }
    }
}

impl PeerSettings {
    /// The same within `memory_bytes`, of which an eighth is for frames on their way in; and a thirty-second for what one
    /// connection may have under way, which its peer can make us hold by leaving a gap.
    pub fn within(self, memory_bytes: usize) -> PeerSettings {
        let connection = (memory_bytes as u64 / 32).clamp(2 << 20, self.connection_window_bytes_max);
        PeerSettings {
            connection_window_bytes_max: connection,
            stream_window_bytes_max: self.stream_window_bytes_max.min(connection / 2),
            incoming_bytes_max: (memory_bytes / 8).max(narad_shards::wire::FRAME_BYTES_MAX),
            ..self
        }
    }
}
