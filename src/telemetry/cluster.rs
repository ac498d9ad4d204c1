//! Series of consensus, of the peer plane, and of what shards ask other nodes. A node without peers leads itself; the
//! families of the peer plane are announced there and hold nothing.

use std::collections::BTreeMap;

use narad_shards::histogram::Histogram;
use narad_shards::metrics::ShardMetrics;
use narad_shards::remote::OUTCOMES;

use super::exposition::{Exposition, Kind};
use crate::peer::{PeerMetrics, Validity};

/// States of `narad_raft_state`; a learner counts as a follower.
const STATES: [&str; 4] = ["follower", "candidate", "leader", "shutdown"];
const ROUND_TRIP_SECONDS: [f64; 14] =
    [0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0];

/// What the control thread last said of consensus and of its peers.
#[derive(Clone, Debug, Default)]
pub struct ClusterMetrics {
    /// Index into the states: follower, candidate, leader, shutdown.
    pub state: u64,
    pub term: u64,
    pub last_log_index: u64,
    pub commit_index: u64,
    pub applied_index: u64,
    pub has_leader: bool,
    /// 0 on the leader; since the start when a leader was never heard.
    pub last_contact_seconds: f64,
    pub voters: u64,
    pub nonvoters: u64,
    /// The breaker holds verdicts back. `None` where this node does not lead.
    pub dead_marking_refused: Option<bool>,
    pub snapshot_failures: u64,
    /// Of the last snapshot that was made, if any was.
    pub snapshot_seconds: Option<f64>,
    /// Heartbeats in a row that failed, and when one last succeeded, ms since the epoch (0: never). `None` without peers.
    pub heartbeats: Option<(u64, u64)>,
    /// By endpoint: a shard's number, or `control`.
    pub peers: Vec<(String, PeerMetrics)>,
    /// `None`: no files are set.
    pub certificates: Option<Validity>,
}

pub fn render_cluster(page: &mut Exposition, cluster: &ClusterMetrics, shards: &[ShardMetrics]) {
    use Kind::{Counter, Gauge};
    page.family("narad_raft_state", Gauge, "1 for the state that this node is in.");
    for (index, state) in (0..).zip(STATES) {
        page.sample(&[("state", &state)], u8::from(cluster.state == index));
    }
    let mut gauge = |name, help, value: u64| page.single(name, Gauge, help, value);
    gauge("narad_raft_term", "Term.", cluster.term);
    gauge("narad_raft_last_log_index", "End of the log.", cluster.last_log_index);
    gauge("narad_raft_commit_index", "Known to be committed.", cluster.commit_index);
    gauge("narad_raft_applied_index", "Applied to the metadata.", cluster.applied_index);
    let pending = cluster.commit_index.saturating_sub(cluster.applied_index);
    gauge("narad_raft_fsm_pending", "Committed entries that wait to be applied.", pending);
    gauge("narad_raft_has_leader", "1 while a leader is known.", cluster.has_leader.into());
    gauge("narad_raft_voters", "Voters of the configuration.", cluster.voters);
    gauge("narad_raft_nonvoters", "Servers without a vote.", cluster.nonvoters);
    let contact = "Since the leader was heard; 0 on the leader.";
    page.single("narad_raft_last_contact_seconds", Gauge, contact, cluster.last_contact_seconds);
    let failed = "Metadata snapshots that could not be made.";
    page.single("narad_metastore_snapshot_failures_total", Counter, failed, cluster.snapshot_failures);
    page.family("narad_metastore_snapshot_duration_seconds", Gauge, "How long the last metadata snapshot took.");
    if let Some(seconds) = cluster.snapshot_seconds {
        page.sample(&[], seconds);
    }
    page.family("narad_dead_marking_refused", Gauge, "1 while the leader refuses to mark voters dead. Leader only.");
    if let Some(refused) = cluster.dead_marking_refused {
        page.sample(&[], u8::from(refused));
    }
    page.family("narad_member_heartbeat_failures", Gauge, "Heartbeats to the leader that failed in a row.");
    if let Some((failures, _)) = cluster.heartbeats {
        page.sample(&[], failures);
    }
    let success = "Last heartbeat that the leader took, Unix seconds; 0 before the first.";
    page.family("narad_member_heartbeat_last_success_timestamp_seconds", Gauge, success);
    if let Some((_, at_ms)) = cluster.heartbeats {
        page.sample(&[], at_ms as f64 / 1000.0);
    }
    let ends_help = "When the peer plane's certificates end, Unix seconds; of the authorities the first.";
    page.family("narad_raft_tls_cert_not_after_seconds", Gauge, ends_help);
    if let Some(Validity { leaf, authorities }) = cluster.certificates {
        page.sample(&[("kind", &"leaf")], leaf);
        page.sample(&[("kind", &"ca")], authorities);
    }
    render_calls(page, shards);
    render_peers(page, &cluster.peers);
}

fn render_calls(page: &mut Exposition, shards: &[ShardMetrics]) {
    let mut operations: BTreeMap<&str, ([u64; OUTCOMES.len()], Histogram)> = BTreeMap::new();
    for call in shards.iter().flat_map(|shard| &shard.calls) {
        let (sums, round_trip) = operations
            .entry(call.operation)
            .or_insert_with(|| (Default::default(), narad_shards::histogram::coarse_histogram()));
        sums.iter_mut().zip(call.outcomes).for_each(|(sum, more)| *sum += more);
        // Fails only where a table of that range cannot be addressed.
        let _ = round_trip.add(&call.round_trip_us);
    }
    page.family("narad_cluster_rpc_requests_total", Kind::Counter, "Requests of shards to other nodes, by outcome.");
    for (operation, (counts, _)) in &operations {
        for (outcome, count) in OUTCOMES.iter().zip(counts) {
            page.sample(&[("op", operation), ("outcome", outcome)], count);
        }
    }
    let round_trip_help = "Until the answer, of those that were answered; what a long poll waits is in it.";
    page.family("narad_cluster_rpc_request_seconds", Kind::Histogram, round_trip_help);
    for (operation, (_, round_trip)) in &operations {
        page.recorded(&[("op", operation)], &ROUND_TRIP_SECONDS, round_trip, 1e6);
    }
}

fn render_peers(page: &mut Exposition, peers: &[(String, PeerMetrics)]) {
    use Kind::{Counter, Gauge};
    page.family("narad_peer_connections", Gauge, "Connections to other nodes that are up, by who dialled.");
    for (endpoint, peer) in peers {
        for (by, count) in [("us", peer.connections_dialled), ("them", peer.connections_accepted)] {
            page.sample(&[("endpoint", endpoint), ("dialled_by", &by)], count);
        }
    }
    page.family("narad_peer_refused_total", Counter, "Strangers turned away: wrong secret, no room, or no answer yet.");
    for (endpoint, peer) in peers {
        for (reason, count) in [("proof", peer.proofs_refused), ("room", peer.strangers_refused)] {
            page.sample(&[("endpoint", endpoint), ("reason", &reason)], count);
        }
    }
    let mut family = |name, help, value: fn(&PeerMetrics) -> u64| {
        page.family(name, Counter, help);
        for (endpoint, peer) in peers {
            page.sample(&[("endpoint", endpoint)], value(peer));
        }
    };
    family("narad_peer_dials_total", "Connections begun from here.", |peer| peer.dials);
    family("narad_peer_dials_failed_total", "Of these, those that came to nothing.", |peer| peer.dials_failed);
    family("narad_peer_accepts_total", "Connections begun by others.", |peer| peer.accepts);
    family("narad_peer_address_checks_total", "Strangers that were asked to prove their address.", |peer| peer.retries);
    family("narad_peer_pings_total", "Silent peers that were asked whether they live.", |peer| peer.pings);
    family("narad_peer_silent_total", "Connections ended because nothing answered.", |peer| peer.silent);
    family("narad_peer_resets_total", "Resets sent for connections that nobody here knows.", |peer| peer.resets_sent);
    family("narad_peer_calls_total", "Requests sent.", |peer| peer.calls);
    family("narad_peer_calls_timed_out_total", "Of these, not answered in time.", |peer| peer.calls_timed_out);
    family("narad_peer_requests_served_total", "Requests taken.", |peer| peer.requests_served);
    family("narad_peer_frames_refused_total", "Frames that found no room: too many were on their way.", |peer| {
        peer.frames_refused
    });
    family("narad_peer_received_bytes_total", "Bytes of datagrams that came.", |peer| peer.bytes_received);
    family("narad_peer_sent_bytes_total", "Bytes of datagrams that left.", |peer| peer.bytes_sent);
    family("narad_peer_datagrams_received_total", "Datagrams that came.", |peer| peer.datagrams_received);
    family("narad_peer_datagrams_sent_total", "Datagrams that left.", |peer| peer.datagrams_sent);
    family("narad_peer_packets_lost_total", "Packets that were taken for lost and sent again.", |peer| {
        peer.packets_lost
    });
    family("narad_peer_receive_errors_total", "Times that the socket would not receive.", |peer| peer.receive_errors);
    family("narad_peer_send_errors_total", "Times that the socket would not send.", |peer| peer.send_errors);
    family("narad_peer_offload_refused_total", "Peers for whom the kernel does not cut datagrams.", |peer| {
        peer.offload_refused
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leader_and_a_follower_tell_each_what_is_theirs() {
        let rendered = |cluster: &ClusterMetrics| {
            let mut page = Exposition::new();
            render_cluster(&mut page, cluster, &[]);
            page.finish()
        };
        let leader = ClusterMetrics {
            state: 2,
            commit_index: 9,
            applied_index: 7,
            dead_marking_refused: Some(true),
            ..ClusterMetrics::default()
        };
        let text = rendered(&leader);
        for line in [
            "narad_raft_state{state=\"leader\"} 1",
            "narad_raft_state{state=\"follower\"} 0",
            "narad_raft_fsm_pending 2",
            "narad_dead_marking_refused 1",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} is missing in\n{text}");
        }
        let follower = rendered(&ClusterMetrics { heartbeats: Some((3, 1_500)), ..ClusterMetrics::default() });
        assert!(!follower.contains("narad_dead_marking_refused 0"), "{follower}");
        assert!(follower.contains("narad_member_heartbeat_failures 3\n"), "{follower}");
        assert!(follower.contains("narad_member_heartbeat_last_success_timestamp_seconds 1.5\n"), "{follower}");
    }

    #[test]
    fn calls_of_all_shards_add_up_by_operation() {
        let calls = |micros| {
            let mut round_trip_us = narad_shards::histogram::coarse_histogram();
            narad_shards::histogram::record(&mut round_trip_us, micros);
            let outcomes = [1, 0, 2, 0, 0];
            vec![narad_shards::remote::CallMetrics { operation: "commit", outcomes, round_trip_us }]
        };
        let shards = [150, 700].map(|micros| ShardMetrics { calls: calls(micros), ..ShardMetrics::default() });
        let peer = PeerMetrics { connections_dialled: 3, silent: 4, ..PeerMetrics::default() };
        let cluster = ClusterMetrics { peers: vec![("control".to_owned(), peer)], ..ClusterMetrics::default() };
        let mut page = Exposition::new();
        render_cluster(&mut page, &cluster, &shards);
        let text = page.finish();
        for line in [
            "narad_cluster_rpc_requests_total{op=\"commit\",outcome=\"ok\"} 2",
            "narad_cluster_rpc_requests_total{op=\"commit\",outcome=\"failed\"} 4",
            "narad_cluster_rpc_request_seconds_bucket{op=\"commit\",le=\"0.0002\"} 1",
            "narad_cluster_rpc_request_seconds_count{op=\"commit\"} 2",
            "narad_peer_connections{endpoint=\"control\",dialled_by=\"us\"} 3",
            "narad_peer_silent_total{endpoint=\"control\"} 4",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} is missing in\n{text}");
        }
    }
}
