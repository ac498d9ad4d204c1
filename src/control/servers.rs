//! What controller and membership need of consensus: who takes part, who leads, and changes of who takes part.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use narad_shards::peer::LocalBoxFuture;
use narad_shards::rt::Instant;

/// One server of the consensus configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Of its consensus directory (E36).
    pub raft_id: u64,
    pub node: Arc<str>,
    /// `host:port` that it advertised first.
    pub address: Arc<str>,
    /// Learners replicate and have no vote (K32).
    pub voter: bool,
}

/// Consensus as this node sees it at one instant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// This node's own.
    pub raft_id: u64,
    pub term: u64,
    /// This node leads, and an entry of its own term is committed.
    pub leads: bool,
    /// Since when it leads, or does not.
    pub since: Instant,
    /// Raft id of the leader that was heard lately; this node's own when it leads.
    pub leader: Option<u64>,
    /// Empty: the node has never held a configuration.
    pub servers: Vec<Server>,
    /// Of a leader: servers that do not answer its heartbeats.
    pub failing: BTreeSet<u64>,
    /// Of a leader: servers of whom nothing was heard for as long as it takes to mark a member dead.
    pub gone: BTreeSet<u64>,
    /// `host:port` where each server says that it is, as far as this process has heard of it.
    pub heard_at: BTreeMap<u64, Arc<str>>,
}

impl View {
    pub fn server(&self, raft_id: u64) -> Option<&Server> {
        self.servers.iter().find(|server| server.raft_id == raft_id)
    }

    pub fn server_named(&self, node: &str) -> Option<&Server> {
        self.servers.iter().find(|server| &*server.node == node)
    }

    pub fn voters(&self) -> impl Iterator<Item = &Server> {
        self.servers.iter().filter(|server| server.voter)
    }

    /// Voters that decide.
    pub fn quorum(&self) -> usize {
        self.voters().count() / 2 + 1
    }
}

/// Consensus beside its [`super::Log`]. The changes resolve when they are committed, and only where this node leads.
pub trait Consensus {
    fn view(&self) -> View;
    /// The server of `raft_id` has said, behind the proof of the secret, that it is at `address`: a joiner says nothing
    /// else until its leader reaches it. Certain when a majority has taken its word.
    fn heard_at(&self, _raft_id: u64, _address: &str, _is_certain: bool) {}
    /// Adds a server without a vote, or changes a learner's recorded address.
    fn add_learner(&self, server: &Server) -> LocalBoxFuture<'static, Result<(), String>>;
    /// Gives a learner its vote, or changes a voter's recorded address.
    fn promote(&self, server: &Server) -> LocalBoxFuture<'static, Result<(), String>>;
    fn remove(&self, raft_id: u64) -> LocalBoxFuture<'static, Result<(), String>>;
}
