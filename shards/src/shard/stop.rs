//! Graceful stop in two halves, so that no shard closes its logs while another still commits to them.

use std::rc::Rc;
use std::time::Duration;

use super::{Directory, Inner};
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
    pub(super) async fn shut_down(&self) {
        if let Err(error) = self.queues().shutdown().await {
            tracing::error!(%error, "consumer positions were not made durable at stop: acks may be redelivered");
        }
        let _sweep = self.reaper.turn().await;
        self.close_all_logs().await;
        self.wal.close().await;
        let adopted: Vec<Rc<Directory>> = self.adopted.borrow().clone();
        for directory in adopted {
            directory.wal.close().await;
        }
    }
}
