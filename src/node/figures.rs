//! Figures of the node that no shard has: what the data directory holds, what the metadata is at, how long the start
//! took. Gathered when somebody scrapes, off the shards' threads.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use narad_shards::io::system;
use narad_shards::rt;

use super::broker::NodeState;
use super::peer_reports::PeerReports;
use crate::control::{ConsensusWatch, MetastoreWatch};
use crate::peer::{PeerMetrics, Validity};
use crate::telemetry::{ClusterMetrics, NodeMetrics};

/// Walking a large data directory takes a while: how old its size may be.
const SIZE_AGE_MAX: Duration = Duration::from_secs(30);

#[derive(Debug, Default)]
pub struct NodeFigures {
    pub data_root: PathBuf,
    pub metastore: Arc<MetastoreWatch>,
    pub consensus: Arc<ConsensusWatch>,
    /// By endpoint of the peer plane, as each last said; empty on a node without peers.
    peers: Mutex<BTreeMap<String, PeerMetrics>>,
    pub peer_reports: PeerReports,
    /// From the start of the process to the first accepted connection, ms; 0 until then.
    pub boot_ms: AtomicU64,
    /// Wall clock of the last scrape that all shards answered, ms since the epoch; of the start before the first.
    pub all_answered_ms: AtomicU64,
    /// Shards that a scrape did not wait for any longer.
    pub answers_late: AtomicU64,
    size: Mutex<Option<(Instant, u64)>>,
}

impl NodeFigures {
    pub fn new(data_root: PathBuf, metastore: Arc<MetastoreWatch>) -> NodeFigures {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let all_answered_ms = AtomicU64::new(u64::try_from(now.as_millis()).unwrap_or(u64::MAX));
        NodeFigures { data_root, metastore, all_answered_ms, ..NodeFigures::default() }
    }

    /// `None` while somebody else is walking for the first time.
    fn size(&self) -> Option<u64> {
        let mut size = self.size.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some((at, bytes)) = *size {
            if at.elapsed() < SIZE_AGE_MAX {
                return Some(bytes);
            }
        }
        let bytes = used_bytes(&self.data_root);
        *size = Some((Instant::now(), bytes));
        Some(bytes)
    }

    /// What an endpoint of the peer plane has counted: a shard's, by its number, or `control`.
    pub fn note_peers(&self, endpoint: impl ToString, metrics: PeerMetrics) {
        let mut peers = self.peers.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        peers.insert(endpoint.to_string(), metrics);
    }

    fn cluster(&self, now: rt::Instant, certificates: Option<Validity>) -> ClusterMetrics {
        let watch = &self.consensus;
        let peers = self.peers.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
        let (state, snapshot_micros) = (watch.state.load(Relaxed), watch.snapshot_micros.load(Relaxed));
        let heartbeats = (watch.heartbeat_failures.load(Relaxed), watch.heartbeat_success_ms.load(Relaxed));
        ClusterMetrics {
            state,
            term: watch.term.load(Relaxed),
            last_log_index: watch.last_index.load(Relaxed),
            commit_index: watch.commit_index.load(Relaxed),
            applied_index: watch.applied_index.load(Relaxed),
            has_leader: watch.has_leader.load(Relaxed),
            last_contact_seconds: watch.since_contact(now).as_secs_f64(),
            voters: watch.voters.load(Relaxed),
            nonvoters: watch.learners.load(Relaxed),
            dead_marking_refused: (state == 2).then(|| watch.dead_marking_refused.load(Relaxed)),
            snapshot_failures: watch.snapshot_failures.load(Relaxed),
            snapshot_seconds: (snapshot_micros > 0).then(|| snapshot_micros as f64 / 1e6),
            heartbeats: (!peers.is_empty()).then_some(heartbeats),
            peers: peers.into_iter().collect(),
            certificates,
        }
    }

    fn read(&self, now: rt::Instant, certificates: Option<Validity>) -> NodeMetrics {
        let watch = &self.metastore;
        let boot_ms = self.boot_ms.load(Relaxed);
        NodeMetrics {
            data_dir_bytes: self.size(),
            data_dir_available_bytes: system::file_system(&self.data_root).ok().map(|facts| facts.available_bytes),
            metastore_bytes: fs::metadata(self.data_root.join("metastore/state.redb")).ok().map(|file| file.len()),
            topics: watch.topics.load(Relaxed),
            metastore_applied_index: watch.applied_index.load(Relaxed),
            metastore_write_errors: watch.write_errors.load(Relaxed),
            metastore_stalled: watch.stalled.load(Relaxed),
            metastore_stopped: watch.stopped.load(Relaxed),
            boot_seconds: (boot_ms > 0).then(|| boot_ms as f64 / 1000.0),
            allocator_bytes: system::allocator_bytes(),
            all_answered_ms: self.all_answered_ms.load(Relaxed),
            answers_late: self.answers_late.load(Relaxed),
            cluster: self.cluster(now, certificates),
        }
    }
}

pub async fn gather(state: &Arc<NodeState>) -> NodeMetrics {
    let state = state.clone();
    let now = rt::now();
    rt::blocking(move || state.figures.read(now, state.certificates.validity())).await
}

/// Blocks that files under `directory` take. What goes while it is walked counts as gone.
pub(super) fn used_bytes(directory: &Path) -> u64 {
    const BLOCK_BYTES: u64 = 512;
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let bytes = entries.map(|entry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => used_bytes(&entry.path()),
        Ok(metadata) => metadata.blocks() * BLOCK_BYTES,
        Err(_) => 0,
    });
    bytes.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_measured_with_everything_below_it() {
        let root = std::env::temp_dir().join(format!("narad-figures-{}", std::process::id()));
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::write(root.join("a/b/file"), vec![7; 100_000]).unwrap();
        fs::write(root.join("file"), vec![7; 10_000]).unwrap();
        let bytes = used_bytes(&root);
        fs::remove_dir_all(&root).unwrap();
        assert!((110_000..200_000).contains(&bytes), "{bytes}");
        assert_eq!(used_bytes(&root), 0, "gone is nothing, not an error");
    }
}
