//! Who belongs to the cluster, as its operators read it (http-api 21.1). Pure.

use std::collections::BTreeMap;

use narad_shards::api::MemberStatus;
use narad_shards::meta::NodeId;

use super::{State, View};

/// All members in the order of their ids. Ages are by the wall clocks of this node and of the leader that took the
/// heartbeat: as exact as these agree.
pub fn members(state: &State, view: &View, now_ms: u64) -> Vec<MemberStatus> {
    let mut owned: BTreeMap<NodeId, u32> = BTreeMap::new();
    for owner in state.assignments().values().flat_map(|rows| rows.values()) {
        *owned.entry(*owner).or_default() += 1;
    }
    let status = |member: &std::sync::Arc<super::Member>| MemberStatus {
        id: member.node().to_string(),
        address: member.registration.client_address.to_string(),
        alive: member.alive,
        draining: member.draining,
        owned_partitions: owned.get(&member.number).copied().unwrap_or(0),
        voter: view.server(member.registration.raft_id).is_some_and(|server| server.voter),
        leader: view.leader == Some(member.registration.raft_id),
        heartbeat_age_seconds: now_ms.saturating_sub(member.heartbeat_ms) / 1000,
        node_status: None,
    };
    state.members().values().map(status).collect()
}

/// The only one of a node without peers: it votes for itself and owns everything.
pub fn alone(node: &str, address: &str, state: &State) -> MemberStatus {
    let owned = state.topics().values().map(|topic| topic.partitions).sum();
    MemberStatus {
        id: node.to_owned(),
        address: address.to_owned(),
        alive: true,
        draining: false,
        owned_partitions: owned,
        voter: true,
        leader: true,
        heartbeat_age_seconds: 0,
        node_status: None,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::control::{apply, Command, Registration, Server};

    #[test]
    fn http_api_21_1_a_member_is_shown_with_what_it_owns_and_what_it_is_in_consensus() {
        let mut state = State::default();
        for (raft_id, node) in [(11, "b"), (12, "a")] {
            let registration = Arc::new(Registration {
                node: node.into(),
                raft_id,
                peer_address: format!("{node}:7943").into(),
                client_address: format!("{node}:7942").into(),
                ..Registration::default()
            });
            let applied = apply(&state, &Command::RegisterMember { registration, stamp_ms: 5_000 });
            state.absorb(raft_id, &applied.changes);
        }
        let voter = Server { raft_id: 11, node: "b".into(), address: "b:7943".into(), voter: true };
        let view = View { leader: Some(11), servers: vec![voter], ..View::default() };
        let found = members(&state, &view, 8_999);
        let ids: Vec<&str> = found.iter().map(|member| member.id.as_str()).collect();
        assert_eq!(ids, ["a", "b"], "in the order of their ids");
        let (a, b) = (&found[0], &found[1]);
        assert!(b.voter && b.leader && b.alive && !b.draining);
        assert!(!a.voter && !a.leader, "it is not in the configuration");
        assert_eq!((b.address.as_str(), b.heartbeat_age_seconds, b.owned_partitions), ("b:7942", 3, 0));
        let lone = alone("me", "127.0.0.1:1", &state);
        assert!(lone.leader && lone.voter && lone.alive);
    }
}
