//! What is the matter with the disk of the data directory, for whoever asks whether the node is ready. It is none of the
//! gates: consumers are served, and what the node accepted elsewhere goes on.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::Arc;
use std::time::Duration;

use narad_shards::io::system;
use narad_shards::rt;
use narad_shards::shard::NodeDisk;

use super::broker::NodeState;
use super::shard_thread::disk_reserve_bytes;

/// A disk that hangs must not take the answer with it.
const PATIENCE: Duration = Duration::from_millis(250);

#[derive(Debug, Default)]
pub struct DiskState {
    /// What the shards have found.
    shards: NodeDisk,
    full: AtomicBool,
    /// Somebody looks: one thread at most waits for a disk that hangs.
    looking: AtomicBool,
}

impl DiskState {
    pub fn new(shards: NodeDisk) -> DiskState {
        DiskState { shards, ..DiskState::default() }
    }

    /// Looks how much room there is. If that takes long, what was found before stays.
    pub async fn look(&self, state: &Arc<NodeState>) {
        if self.looking.swap(true, Relaxed) {
            return;
        }
        let state = state.clone();
        let look = rt::blocking(move || {
            state.disk.note(&state.figures.data_root, disk_reserve_bytes(state.shards.into()));
        });
        let _ = rt::timeout(PATIENCE, Box::pin(look)).await;
    }

    fn note(&self, root: &Path, reserve_bytes: u64) {
        if let Ok(facts) = system::file_system(root) {
            self.full.store(facts.available_bytes < reserve_bytes, Relaxed);
        }
        self.looking.store(false, Relaxed);
    }

    /// As clients read it.
    pub fn degraded(&self) -> impl Iterator<Item = &'static str> {
        let full = self.full.load(Relaxed).then_some("disk_space_under_reserve");
        let failed = self.shards.wal_failed().then_some("ingress_wal_failed");
        full.into_iter().chain(failed)
    }
}

#[cfg(test)]
mod tests {
    use narad_shards::rt::sim;

    use super::super::trust::Trust;
    use super::*;
    use crate::http::Readiness;

    #[test]
    fn n9_a_full_disk_and_a_failed_wal_are_named_and_are_no_gate() {
        sim::run(1, async {
            let shards = NodeDisk::default();
            let disk = DiskState::new(shards.clone());
            let state = NodeState { trust: Trust::without_end(), disk, ..NodeState::default() };
            let said = |reserve_bytes| {
                state.disk.note(Path::new("/"), reserve_bytes);
                state.readiness()
            };
            assert_eq!(said(u64::MAX), Readiness::Ready(vec!["disk_space_under_reserve"]));
            assert_eq!(said(0), Readiness::Ready(Vec::new()), "it heals by itself");
            shards.note_wal_failed();
            assert_eq!(said(u64::MAX), Readiness::Ready(vec!["disk_space_under_reserve", "ingress_wal_failed"]));
        });
    }
}
