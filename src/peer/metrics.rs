//! What an endpoint counts.

/// A connection that was dialled from here and is up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkFigures {
    /// Who is at its other end.
    pub node: String,
    pub rtt_us: u64,
    /// Of frames that QUIC has not taken yet.
    pub queued_bytes: u64,
}

/// Counters since the endpoint was started, and gauges of now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerMetrics {
    /// Connections that are up, by who dialled.
    pub connections_dialled: u64,
    pub connections_accepted: u64,
    pub dials: u64,
    pub dials_failed: u64,
    pub accepts: u64,
    /// Peers that did not know the secret, and those that were not heard for want of room or address proof (E48).
    pub proofs_refused: u64,
    pub strangers_refused: u64,
    pub retries: u64,
    /// Connections ended because nothing answered a ping.
    pub silent: u64,
    pub pings: u64,
    pub calls: u64,
    pub calls_timed_out: u64,
    pub requests_served: u64,
    /// Frames for which there was no room, and bytes of long ones that are not whole yet.
    pub frames_refused: u64,
    pub incoming_bytes: u64,
    /// What the kernel has granted for the socket's buffers.
    pub socket_receive_bytes: u64,
    pub socket_send_bytes: u64,
    pub datagrams_received: u64,
    pub datagrams_sent: u64,
    pub bytes_received: u64,
    pub bytes_sent: u64,
    pub sends: u64,
    pub receive_errors: u64,
    pub send_errors: u64,
    /// Peers for whom the kernel refused to cut datagrams (E55).
    pub offload_refused: u64,
    pub resets_sent: u64,
    /// Of connections that have ended and of those that are up.
    pub packets_lost: u64,
    pub data_blocked: u64,
    pub stream_data_blocked: u64,
}

/// What one connection has seen since its endpoint counted it last.
#[derive(Default)]
pub(super) struct Tally {
    pub proofs_refused: u64,
    pub frames_refused: u64,
    pub pings: u64,
    pub silent: u64,
}
