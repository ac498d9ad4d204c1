//! The failure matrix: what a producer and a consumer see of each failure, and what is lost. A row makes its failure on a
//! running cluster, compares what clients are answered with what they were promised, and leaves the cluster whole.

mod leases;
mod outages;
mod site;

use std::io;
use std::time::{Duration, Instant};

use crate::cluster::Cluster;
use site::Site;

pub struct Row {
    /// For `--only`.
    pub name: &'static str,
    pub event: &'static str,
    how: How,
}

enum How {
    Walked(fn(&mut Site<'_>) -> io::Result<()>),
    /// Walked, and needs a file system for each node.
    OnOwnDisk(fn(&mut Site<'_>) -> io::Result<()>),
    /// Shown by something that can do more to a machine than a test may.
    Elsewhere(&'static str),
    Later(&'static str),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Kept,
    Failed,
    Skipped,
    Elsewhere,
    Later,
}

impl Verdict {
    pub fn word(self) -> &'static str {
        match self {
            Verdict::Kept => "ok",
            Verdict::Failed => "FAILED",
            Verdict::Skipped => "skipped",
            Verdict::Elsewhere => "elsewhere",
            Verdict::Later => "later",
        }
    }
}

pub const ROWS: [Row; 18] = [
    Row { name: "consumer-dies", event: "a consumer dies holding a lease", how: How::Walked(leases::a_consumer_dies) },
    Row {
        name: "lease-outlived",
        event: "a handler outlives its lease",
        how: How::Walked(leases::a_handler_outlives_its_lease),
    },
    Row { name: "ack-503", event: "an ack is answered 503", how: How::Walked(leases::an_ack_is_answered_503) },
    Row { name: "ack-502", event: "an ack is lost, or answered 502", how: How::Walked(leases::an_ack_is_lost) },
    Row { name: "produce-times-out", event: "a produce times out", how: How::Walked(outages::a_produce_times_out) },
    Row { name: "crash", event: "a broker process crashes", how: How::Walked(outages::a_process_crashes) },
    Row {
        name: "power-loss",
        event: "a node loses power, its volume is intact",
        how: How::Elsewhere("scripts/power-cut (a disk that forgets what was not synced), scripts/simulate"),
    },
    Row { name: "node-down", event: "a node stays down", how: How::Walked(outages::a_node_stays_down) },
    Row { name: "volume-lost", event: "a volume is destroyed", how: How::OnOwnDisk(outages::a_volume_is_destroyed) },
    Row { name: "log-fails", event: "an ingress log fails", how: How::Walked(outages::an_ingress_log_fails) },
    Row { name: "disk-full", event: "a disk is full", how: How::OnOwnDisk(outages::a_disk_is_full) },
    Row {
        name: "sync-fails",
        event: "the sync of a partition log fails",
        how: How::Elsewhere("scripts/simulate (faults of the simulated disk); shards/src/log/fault_tests.rs"),
    },
    Row { name: "quorum-lost", event: "the quorum is lost", how: How::Walked(outages::the_quorum_is_lost) },
    Row { name: "move", event: "a partition moves", how: How::Later("moves are not built yet") },
    Row { name: "move-source-dies", event: "the source of a move dies", how: How::Later("moves are not built yet") },
    Row { name: "rolling-restart", event: "a rolling restart", how: How::Walked(outages::a_rolling_restart) },
    Row {
        name: "retention",
        event: "a record outlives its retention",
        how: How::Elsewhere("an hour at least: on the simulated clock, shards/src/shard/retention_tests.rs"),
    },
    Row {
        name: "remote-target",
        event: "the target of a remote is unreachable",
        how: How::Later("remotes are not built yet"),
    },
];

/// Walks `rows` (numbers in [`ROWS`]) and prints what is seen.
pub fn walk(cluster: &Cluster, rows: &[usize], rounds: u32) -> Vec<(usize, Verdict)> {
    let one = |row: &usize| {
        let Row { name, event, how } = &ROWS[*row];
        println!("\n{event}  ({name})");
        let began = Instant::now();
        let verdict = match how {
            How::Elsewhere(place) => {
                println!("    shown elsewhere: {place}");
                Verdict::Elsewhere
            }
            How::Later(why) => {
                println!("    later: {why}");
                Verdict::Later
            }
            How::OnOwnDisk(_) if !cluster.namespaces => {
                println!("    skipped: needs root, for a file system of its own for each node");
                Verdict::Skipped
            }
            How::Walked(row) | How::OnOwnDisk(row) => {
                let mut site = Site::new(cluster, name, rounds);
                let result = row(&mut site).and_then(|()| cluster.wait_all_ready(Duration::from_secs(60)));
                if let Err(error) = result {
                    site.check("the row was walked to its end", false, error);
                }
                println!("    {:.1} s", began.elapsed().as_secs_f64());
                if site.failed {
                    Verdict::Failed
                } else {
                    Verdict::Kept
                }
            }
        };
        (*row, verdict)
    };
    rows.iter().map(one).collect()
}
