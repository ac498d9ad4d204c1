//! The checkpoint's keeper: one task while something is owed, none otherwise. It overwrites the value at once, makes
//! it durable within 250 ms, and compacts behind what is durable.

use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use super::checkpoint::Checkpoint;
use super::segment::Segment;
use super::{Inner, Mode};
use crate::rt::{self, Instant, Queue};

/// How long a stored checkpoint may be written but not yet synced.
const SYNC_DELAY: Duration = Duration::from_millis(250);
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// A spare for the next roll and one for a burst.
const SPARES_MAX: usize = 2;

#[derive(Clone, Copy, Debug)]
pub(crate) struct CheckpointState {
    /// Found at open, clamped and synced.
    pub recovered: u64,
    /// The last one stored by the dispatcher.
    pub wanted: u64,
    pub written: u64,
    pub synced: u64,
    /// A keeper runs.
    pub kept: bool,
}

impl CheckpointState {
    pub fn recovered(seq: u64) -> CheckpointState {
        CheckpointState { recovered: seq, wanted: seq, written: seq, synced: seq, kept: false }
    }
}

impl Inner {
    pub(super) fn store(self: &Rc<Inner>, seq: u64) {
        {
            let mut state = self.state.borrow_mut();
            debug_assert!(seq <= state.staging.durable_next, "checkpoint {seq} names records that are not durable");
            if seq <= state.checkpoint.wanted {
                return;
            }
            state.checkpoint.wanted = seq;
        }
        self.keep();
        self.arm_rotation();
    }

    /// Wakes the keeper, or starts it.
    pub(super) fn keep(self: &Rc<Inner>) {
        if std::mem::replace(&mut self.state.borrow_mut().checkpoint.kept, true) {
            self.wake_keeper.notify_one();
            return;
        }
        let inner = self.clone();
        rt::spawn(Queue::Foreground, async move {
            inner.clone().run_keeper().await;
            inner.progress.notify_all();
            inner.arm_rotation();
        });
    }

    async fn run_keeper(self: Rc<Inner>) {
        let mut due: Option<Instant> = None;
        loop {
            let compactable;
            let (checkpoint, at_once) = {
                let mut state = self.state.borrow_mut();
                let found = state.checkpoint;
                compactable = state.compactable().is_some();
                if found.wanted == found.written && found.written == found.synced && !compactable {
                    state.checkpoint.kept = false;
                    return;
                }
                (found, state.closing || state.wants_sync())
            };
            let stored = if checkpoint.written != checkpoint.wanted {
                due.get_or_insert(rt::now() + SYNC_DELAY);
                self.write_checkpoint(checkpoint.wanted).await
            } else if compactable {
                self.compact().await
            } else {
                let at = *due.get_or_insert(rt::now() + SYNC_DELAY);
                if !at_once && rt::now() < at {
                    // Woken by a newer value, or by the time.
                    let _ = rt::timeout(at - rt::now(), self.wake_keeper.notified()).await;
                    continue;
                }
                due = None;
                self.sync_checkpoint(checkpoint.written).await
            };
            if let Err((path, error)) = stored {
                tracing::warn!(
                    error = %error,
                    path = %path.display(),
                    "the ingress dispatch checkpoint could not be stored, or a segment behind it not reclaimed; \
                     trying again. Nothing is lost, but a restart would deliver more records twice"
                );
                self.state.borrow_mut().checkpoint_failed = Some(error.to_string());
                if self.state.borrow().closing {
                    self.state.borrow_mut().checkpoint.kept = false;
                    return;
                }
                rt::sleep(RETRY_DELAY).await;
            }
        }
    }

    async fn write_checkpoint(&self, seq: u64) -> Result<(), (PathBuf, io::Error)> {
        let (store_id, dir_number) = (self.folder.store_id, self.folder.dir_number);
        let record = Checkpoint { store_id, dir_number, seq }.encode();
        self.checkpoint_file.write_at(0, record).await.map_err(|error| (self.checkpoint_path(), error))?;
        self.state.borrow_mut().checkpoint.written = seq;
        Ok(())
    }

    async fn sync_checkpoint(&self, written: u64) -> Result<(), (PathBuf, io::Error)> {
        let synced = self.checkpoint_file.sync_data().await;
        let mut state = self.state.borrow_mut();
        match synced {
            Ok(()) => {
                state.checkpoint.synced = written;
                Ok(())
            }
            Err(error) => {
                // The kernel may have dropped the page: the next sync proves something only about a new write.
                state.checkpoint.written = state.checkpoint.synced;
                Err((self.checkpoint_path(), error))
            }
        }
    }

    fn checkpoint_path(&self) -> PathBuf {
        self.folder.dir.join("checkpoint")
    }

    /// Reclaims the oldest segment if a synced checkpoint has passed it. Strictly oldest first, each step durable
    /// before the next: what is left on disk is always one unbroken chain.
    async fn compact(&self) -> Result<(), (PathBuf, io::Error)> {
        let (segment, recycle, floor) = {
            let state = self.state.borrow();
            let Some(segment) = state.compactable() else { return Ok(()) };
            let filled = segment.prepared || segment.tail.get() + segment.bytes / 8 >= segment.bytes;
            let recycle = self.mode == Mode::Active
                && state.spares.len() < SPARES_MAX
                && segment.bytes == self.segment_bytes
                && filled;
            (segment, recycle, state.staging.durable_next)
        };
        let reborn = self.reclaim(&segment, recycle, floor).await.map_err(|error| (segment.path.clone(), error))?;
        let mut state = self.state.borrow_mut();
        state.chain.pop_front();
        match reborn {
            Some(spare) => {
                state.spares.push_back(Rc::new(spare));
                state.metrics.segments_recycled += 1;
            }
            None => state.metrics.segments_removed += 1,
        }
        Ok(())
    }

    async fn reclaim(&self, segment: &Segment, recycle: bool, floor: u64) -> io::Result<Option<Segment>> {
        if recycle {
            return self.folder.recycle(segment, floor).await.map(Some);
        }
        self.folder.remove(&segment.path).await.map(|()| None)
    }
}

impl super::State {
    /// The oldest segment, if nothing in it is needed any more. The last one stays: it is the active one, or goes
    /// with its drained directory.
    fn compactable(&self) -> Option<Rc<Segment>> {
        let next = self.chain.get(1)?;
        (next.first_seq.get() <= self.checkpoint.synced).then(|| self.chain[0].clone())
    }

    /// A sync would give a segment its next life while there is no spare: a WAL that writes a segment in less time than
    /// a checkpoint may wait would go through unprepared ones, and throw its own away.
    fn wants_sync(&self) -> bool {
        let passed = self.chain.get(1).is_some_and(|next| next.first_seq.get() <= self.checkpoint.written);
        passed && self.spares.is_empty()
    }
}
