//! Graceful stop in two halves, so that no shard closes its logs while another still commits to them.

use std::rc::Rc;
use std::time::Duration;

use super::{Directory, Inner};
use crate::api::NotStored;
use crate::rt;

/// How long a stop waits for the backlog. A destination that fails keeps its records in the WAL beyond that.
const BACKLOG_PATIENCE: Duration = Duration::from_secs(3);

impl Inner {
    /// Takes no produce and starts no commit; waits for what is under way, at most until it counts as hung.
    pub(super) async fn quiesce(&self) {
        self.draining.set(true);
        if let Some(dispatcher) = self.own.get() {
            // What waits behind a stuck record is dispatched first: whatever is committed above the checkpoint comes
            // again after the start.
            let _ = rt::timeout(BACKLOG_PATIENCE, dispatcher.drained()).await;
            dispatcher.stop().await;
        }
        let adopted: Vec<Rc<Directory>> = self.adopted.borrow().clone();
        for directory in adopted {
            directory.dispatcher.stop().await;
        }
        self.quiesced.set(true);
        self.reaper.stop();
    }

    /// Makes every confirmed ack, every boundary and the checkpoint durable (D18, S45).
    /// Goes on after a failure, and tells what it was.
    pub(super) async fn shut_down(&self) -> NotStored {
        let mut failed = self.queues().shutdown().await.err().unwrap_or_default();
        let _sweep = self.reaper.turn().await;
        failed.add(self.close_all_logs().await);
        let adopted: Vec<Rc<Directory>> = self.adopted.borrow().clone();
        let wals = [&self.wal].into_iter().chain(adopted.iter().map(|directory| &directory.wal));
        for wal in wals {
            if let Err(cause) = wal.close().await {
                failed.add(NotStored { checkpoints: 1, cause: Some(cause), ..NotStored::default() });
            }
        }
        failed
    }
}
