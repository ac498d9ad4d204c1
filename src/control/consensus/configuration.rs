//! Who takes part: voters and learners with the addresses they advertised (cluster membership is the library's; what
//! it does not keep, names and addresses, is kept here).

use std::collections::BTreeMap;

use raft::eraftpb::{ConfChange, ConfChangeType, ConfState};
use serde::{Deserialize, Serialize};

/// One server of the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Server {
    /// The node's name.
    pub name: String,
    /// `host:port` that it advertised when it was added; the member record's address goes before it.
    pub address: String,
    /// Learners replicate and have no vote (K32).
    #[serde(default)]
    pub voter: bool,
}

/// The servers as of one log index, by raft id.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Configuration {
    pub index: u64,
    pub servers: BTreeMap<u64, Server>,
}

/// What to do to one server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    AddLearner {
        raft_id: u64,
        server: Server,
    },
    /// A learner becomes a voter; of a voter the recorded address changes (K31).
    Promote {
        raft_id: u64,
        server: Server,
    },
    Remove {
        raft_id: u64,
    },
}

/// The raft id of an initial voter: the same on every node that has the same list. Serves bootstrap only (E36).
pub fn bootstrap_id(name: &str) -> u64 {
    // FNV-1a: fixed for ever, since every node of a new cluster computes it for all others.
    let hash = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    hash.max(1)
}

impl Configuration {
    /// The first one of a cluster. `Err`: two names have the same id.
    pub fn bootstrap(index: u64, voters: &[Server]) -> Result<Configuration, String> {
        let mut servers = BTreeMap::new();
        for server in voters {
            let server = Server { voter: true, ..server.clone() };
            if let Some(other) = servers.insert(bootstrap_id(&server.name), server.clone()) {
                return Err(format!(
                    "cluster.peers: {:?} and {:?} cannot be told apart: rename one",
                    other.name, server.name
                ));
            }
        }
        Ok(Configuration { index, servers })
    }

    pub fn conf_state(&self) -> ConfState {
        let ids = |voter: bool| {
            let of_kind = self.servers.iter().filter(move |(_, server)| server.voter == voter);
            of_kind.map(|(id, _)| *id).collect::<Vec<u64>>()
        };
        ConfState { voters: ids(true), learners: ids(false), ..ConfState::default() }
    }

    pub fn is_voter(&self, raft_id: u64) -> bool {
        self.servers.get(&raft_id).is_some_and(|server| server.voter)
    }

    pub fn voters(&self) -> usize {
        self.servers.values().filter(|server| server.voter).count()
    }

    /// Takes over the change that the entry at `index` carries, once the library has.
    pub fn follow(&mut self, index: u64, change: &ConfChange, conf_state: &ConfState) {
        self.index = index;
        let id = change.node_id;
        let voter = conf_state.voters.contains(&id);
        if !voter && !conf_state.learners.contains(&id) {
            self.servers.remove(&id);
            return;
        }
        let told = serde_json::from_slice::<Server>(&change.context).ok();
        let known = self.servers.get(&id).cloned();
        let server = told.or(known).unwrap_or_default();
        self.servers.insert(id, Server { voter, ..server });
    }
}

impl Change {
    pub fn raft_id(&self) -> u64 {
        match self {
            Change::AddLearner { raft_id, .. } | Change::Promote { raft_id, .. } | Change::Remove { raft_id } => {
                *raft_id
            }
        }
    }

    pub fn to_entry(&self) -> ConfChange {
        let context = |server: &Server| serde_json::to_vec(server).unwrap_or_default(); // strings and a bool
        let (kind, context) = match self {
            Change::AddLearner { server, .. } => (ConfChangeType::AddLearnerNode, context(server)),
            Change::Promote { server, .. } => (ConfChangeType::AddNode, context(server)),
            Change::Remove { .. } => (ConfChangeType::RemoveNode, Vec::new()),
        };
        ConfChange { change_type: kind as i32, node_id: self.raft_id(), context, id: 0 }
    }
}
