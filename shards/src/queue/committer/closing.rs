//! The end of a partition's position: written out in full, or let go.

use std::io;
use std::rc::Rc;

use super::{Committer, Tracked};
use crate::api::NotStored;
use crate::meta::{Destination, Incarnation};

impl Committer {
    /// Writes nothing more for a partition, except for what is under way at this moment (C80).
    pub fn forget(&self, destination: Destination) {
        let tracked = self.partitions.borrow_mut().remove(&destination);
        let Some(tracked) = tracked else { return };
        tracked.forgotten.set(true);
        self.unschedule_level(&tracked);
        self.drop_handle(&tracked);
        let mut leaving = self.leaving.borrow_mut();
        leaving.retain(|left| left.busy.get());
        if tracked.busy.get() {
            leaving.push(tracked);
        }
    }

    /// Resolves when no write for a forgotten partition of the topic is under way any more, so that its directory
    /// may be replaced (C80, lesson N14.2).
    pub async fn forgotten(&self, incarnation: Incarnation) {
        loop {
            let writes = |left: &&Rc<Tracked>| left.destination.incarnation == incarnation && left.busy.get();
            let busy = self.leaving.borrow().iter().find(writes).cloned();
            match busy {
                Some(busy) => busy.idle.notified().await,
                None => return,
            }
        }
    }

    /// Makes both files of a partition exact and durable, then forgets it (D18, C79). The caller has stopped acks.
    pub async fn close(self: &Rc<Self>, destination: Destination) -> io::Result<()> {
        let tracked = self.partitions.borrow().get(&destination).cloned();
        let Some(tracked) = tracked else { return Ok(()) };
        let flushed = self.flush(&tracked).await;
        self.forget(destination);
        flushed
    }

    /// Makes both files of a partition exact and durable, and goes on keeping it.
    pub async fn level(self: &Rc<Self>, destination: Destination) -> io::Result<()> {
        let tracked = self.partitions.borrow().get(&destination).cloned();
        match tracked {
            Some(tracked) => {
                let flushed = self.flush(&tracked).await;
                if flushed.is_err() {
                    self.owe_write(&tracked);
                    self.arm();
                }
                flushed
            }
            None => Ok(()),
        }
    }

    /// Forgets a partition if its files are exact at this moment; `false` if something has changed since.
    pub fn forget_exact(&self, destination: Destination) -> bool {
        let exact = self.partitions.borrow().get(&destination).is_none_or(|tracked| {
            let owed = tracked.dirty.get() || tracked.busy.get() || tracked.unsynced_since.get().is_some();
            let frontier = tracked.source.upgrade().map_or(0, |source| source.position(&mut Vec::new()));
            !owed && tracked.writable() && frontier == tracked.level.get()
        });
        if exact {
            self.forget(destination);
        }
        exact
    }

    /// Closes every partition; goes on after an error.
    pub async fn close_all(self: &Rc<Self>) -> Result<(), NotStored> {
        let all: Vec<Rc<Tracked>> = self.partitions.borrow().values().cloned().collect();
        let mut failed = NotStored::default();
        for tracked in all {
            if let Err(error) = self.close(tracked.destination).await {
                tracing::error!(dir = %tracked.directory.display(), %error,
                    "consumer position: it could not be stored at the stop; acks since the last one that was may come undone");
                let cause = Some(format!("consumer position in {}: {error}", tracked.directory.display()));
                failed.add(NotStored { positions: 1, cause, ..NotStored::default() });
            }
        }
        if failed.is_nothing() {
            Ok(())
        } else {
            Err(failed)
        }
    }

    async fn flush(self: &Rc<Self>, tracked: &Rc<Tracked>) -> io::Result<()> {
        let _busy = tracked.acquire().await;
        let Some(source) = tracked.source.upgrade() else { return Ok(()) };
        let frontier = source.position(&mut Vec::new());
        drop(source);
        if tracked.dirty.get() || (frontier > tracked.level.get() && tracked.slots.get().is_none()) {
            self.write(tracked).await?;
        }
        self.sync_window(tracked).await?;
        self.write_level(tracked).await
    }
}
