//! What the control thread knows of the other nodes, put where a scrape finds it, and said when a peer falls silent.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;
use std::time::Duration;

use narad_shards::rt;

use super::run::Common;
use crate::control::{Controller, Membership};
use crate::peer::PeerEndpoint;

/// What a scrape shows is at most that old: it must answer while the control thread is stuck.
const TELL: Duration = Duration::from_secs(1);

pub struct Watched {
    pub common: Arc<Common>,
    pub endpoint: Rc<PeerEndpoint>,
    pub membership: Rc<Membership>,
    pub controller: Rc<Controller>,
}

impl Watched {
    pub async fn run(self) {
        let figures = &self.common.state.figures;
        let mut silent = BTreeSet::new();
        loop {
            figures.note_peers("control", self.endpoint.metrics());
            figures.peer_reports.note_links("control", self.endpoint.links());
            let (failures, success_ms) = self.membership.heartbeats();
            figures.consensus.heartbeat_failures.store(failures, Relaxed);
            figures.consensus.heartbeat_success_ms.store(success_ms, Relaxed);
            figures.consensus.dead_marking_refused.store(self.controller.breaker_open(), Relaxed);
            let view = self.controller.view();
            let failing = view.servers.iter().filter(|server| view.failing.contains(&server.raft_id));
            let failing = failing.map(|server| (server.node.to_string(), server.address.to_string())).collect();
            say_silent(&mut silent, failing, view.leads);
            rt::sleep(TELL).await;
        }
    }
}

/// Nodes that do not answer the leader, by name and recorded address.
type Silent = BTreeSet<(String, String)>;

/// Once when a server falls silent, once when it answers again; a node that leads no longer judges nobody.
fn say_silent(said: &mut Silent, failing: Silent, leads: bool) {
    for (peer, address) in failing.difference(said) {
        let error = "no answer: it is down, cannot be reached, or does not trust this node";
        tracing::error!(peer, address, error, "raft: failed to heartbeat to a peer");
    }
    for (peer, address) in said.difference(&failing).filter(|_| leads) {
        tracing::info!(peer, address, "raft: a peer answers heartbeats again, or was removed");
    }
    *said = failing;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{LogFormat, LogLevel};
    use crate::telemetry::logged;

    #[test]
    fn operations_6_a_silent_peer_is_said_once_and_so_is_its_return() {
        let peer = |name: &str| (name.to_owned(), format!("{name}:1"));
        let lines = logged(LogLevel::Info, LogFormat::Text, || {
            let mut said = Silent::new();
            say_silent(&mut said, Silent::new(), true);
            say_silent(&mut said, [peer("b")].into(), true);
            say_silent(&mut said, [peer("b"), peer("c")].into(), true);
            say_silent(&mut said, [peer("c")].into(), true);
            say_silent(&mut said, Silent::new(), false);
        });
        let heads = lines.iter().map(|line| {
            let (_, rest) = line.split_once("level=").unwrap();
            let (level, rest) = rest.split_once(" msg=").unwrap();
            (level, rest.contains("failed to heartbeat to"), rest.contains("peer=b"))
        });
        let expected = [("ERROR", true, true), ("ERROR", true, false), ("INFO", false, true)];
        assert_eq!(heads.collect::<Vec<_>>(), expected, "{lines:?}");
    }
}
