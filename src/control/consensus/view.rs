//! Consensus as controller and membership see it.

use std::rc::Rc;
use std::sync::Arc;

use narad_shards::peer::LocalBoxFuture;

use super::heard::Word;
use super::Consensus;
use crate::control::{Consensus as Servers, Server, Stopped, View};

impl Servers for Rc<Consensus> {
    fn view(&self) -> View {
        let status = self.status();
        let servers = status.configuration.servers.into_iter().map(|(raft_id, server)| Server {
            raft_id,
            node: Arc::from(server.name),
            address: Arc::from(server.address),
            voter: server.voter,
        });
        View {
            raft_id: status.raft_id,
            term: status.term,
            leads: status.is_established,
            since: status.since,
            leader: self.sees_leader().then_some(status.leader),
            servers: servers.collect(),
            failing: self.failing(),
            gone: self.gone(),
            heard_at: self.addresses(),
        }
    }

    fn heard_at(&self, raft_id: u64, address: &str, is_certain: bool) {
        self.note_address(raft_id, address, if is_certain { Word::Certain } else { Word::Other });
    }

    fn add_learner(&self, server: &Server) -> LocalBoxFuture<'static, Result<(), String>> {
        let (consensus, server) = (self.clone(), server.clone());
        Box::pin(async move {
            said(Consensus::add_learner(&consensus, server.raft_id, &server.node, &server.address).await)
        })
    }

    fn promote(&self, server: &Server) -> LocalBoxFuture<'static, Result<(), String>> {
        let (consensus, server) = (self.clone(), server.clone());
        Box::pin(
            async move { said(Consensus::promote(&consensus, server.raft_id, &server.node, &server.address).await) },
        )
    }

    fn remove(&self, raft_id: u64) -> LocalBoxFuture<'static, Result<(), String>> {
        let consensus = self.clone();
        Box::pin(async move { said(Consensus::remove(&consensus, raft_id).await) })
    }
}

fn said(result: Result<(), Stopped>) -> Result<(), String> {
    result.map_err(|stopped| stopped.why)
}
