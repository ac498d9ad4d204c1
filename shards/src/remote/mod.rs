//! The other nodes as a shard sees them: who they are, and how a frame reaches them. QUIC stands behind
//! [`Transport`] in a process, a simulated network in the simulator; neither is named here.
//!
//! [`RemoteCarrier`] asks other nodes for a shard, [`RemoteService`] answers them for it. What they say to each other are
//! the requests of [`crate::peer`], in the frames of [`crate::wire`].

mod carrier;
mod credit;
mod figures;
mod late;
mod permits;
mod service;
mod settles;
pub mod sim;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::meta::ShardId;
use crate::peer::LocalBoxFuture;
use crate::wire::{Incoming, Outgoing};

pub use carrier::RemoteCarrier;
pub use credit::Credit;
pub use figures::{CallMetrics, OUTCOMES};
pub use service::RemoteService;

/// A connection, as long as it lives; never used twice in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// What both sides tell each other once the secret is proven, and before the first request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hello {
    /// 0: the node has not been in a cluster yet. Two different ids, neither 0, refuse each other (E36).
    pub cluster_id: u64,
    pub node: String,
    pub boot_id: u64,
    /// Identity of the consensus directory (E36). 0 from a shard.
    pub disk_id: u64,
    /// `None`: the control endpoint.
    pub shard: Option<ShardId>,
    /// UDP port of each shard; told by the control endpoint, empty from a shard.
    pub shard_ports: Vec<u16>,
    pub build: String,
    pub newest_command_type: u64,
    /// Operations that this endpoint answers, with the newest version of each.
    pub operations: Vec<(u16, u8)>,
    /// Commit bytes that this shard grants the other side to begin with (E41). 0 from the control endpoint.
    pub commit_credit_bytes: u32,
}

impl Hello {
    /// Refuses a node of another cluster (E36). `address` is where it says so from.
    pub fn same_cluster(&self, from: &Hello, address: SocketAddr) -> Result<(), String> {
        let (ours, theirs) = (self.cluster_id, from.cluster_id);
        match ours != 0 && theirs != 0 && ours != theirs {
            true => Err(format!(
                "{} at {address} belongs to cluster {theirs:016x}, this node to {ours:016x}: check cluster.peers on both",
                from.node
            )),
            false => Ok(()),
        }
    }
}

/// Why a call has no reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallError {
    /// Nothing of it left this node: not applied for certain.
    NotSent(String),
    /// It may have been applied: the connection was lost, or the budget ended before the reply.
    Unknown(String),
}

impl CallError {
    pub fn text(&self) -> &str {
        let (CallError::NotSent(text) | CallError::Unknown(text)) = self;
        text
    }
}

/// Brings frames to other endpoints. Dials on first use, sends requests only on what it dialled (E54), never resends.
pub trait Transport {
    /// Sends a request and resolves with its reply, at the latest when `request.budget` is over. Dropping the future
    /// tells the other side that nobody waits; the connection and its other calls are untouched (K37).
    fn call(&self, to: SocketAddr, request: Outgoing) -> LocalBoxFuture<'static, Result<Incoming, CallError>>;

    /// One way: no reply, and no error when it is lost.
    fn send(&self, to: SocketAddr, message: Outgoing);

    /// The hello of the other side, while a connection that was dialled to it is up.
    fn hello_of(&self, to: SocketAddr) -> Option<Arc<Hello>>;

    /// The connection that requests to `to` take now. Another one than before: whatever the other side had granted or
    /// told on the old one is void (E41, E43).
    fn connection_to(&self, to: SocketAddr) -> Option<ConnectionId>;
}

/// Answers frames that other endpoints send.
pub trait Service {
    /// What this endpoint says of itself on a new connection.
    fn hello(&self) -> Hello;

    /// Somebody has proven the secret and said hello. `Err` ends the connection, with the reason for both logs.
    fn met(&self, connection: ConnectionId, from: &Hello, address: SocketAddr) -> Result<(), String>;

    /// Answers one request; `None` to a one-way message. Dropped when its caller cancels or the connection ends.
    fn serve(&self, connection: ConnectionId, request: Incoming) -> LocalBoxFuture<'static, Option<Outgoing>>;

    /// The caller of this request has given up; its reply had already left, or is on its way (C58).
    fn cancelled_late(&self, connection: ConnectionId, request_id: u64);

    /// The connection has ended, whoever dialled it.
    fn lost(&self, connection: ConnectionId);
}

/// Least time that a call is given, so that a budget of zero is still a question.
pub const CALL_BUDGET_MIN: Duration = Duration::from_millis(1);
