//! The flusher: submits groups, rolls and rotates segments, prepares the next one.
//!
//! It is woken by an append and runs after the tasks that are runnable by then, so whatever they stage shares its
//! write; no timer is involved (lesson L6). Each group is written by a task of its own, which nobody's dropped
//! future can stop.

use std::io;
use std::rc::Rc;
use std::time::Duration;

use super::frame::BLOCK_BYTES;
use super::segment::{Paced, Segment, Unpaced};
use super::staging::Next;
use super::{AppendError, Inner};
use crate::io::Slice;
use crate::rt::{self, Queue};

/// A fully dispatched active segment is rotated past this much, so that it can be reclaimed (E10).
const ROTATE_BYTES: u64 = 1 << 20;
/// Only after this long without an append.
const ROTATE_AFTER: Duration = Duration::from_secs(1);
const PREPARE_RETRY: Duration = Duration::from_secs(1);
/// A full disk is not asked again for each append.
const ROLL_RETRY: Duration = Duration::from_millis(100);

pub(crate) async fn run(inner: Rc<Inner>) {
    loop {
        let (next, rotate, closing) = {
            let mut state = inner.state.borrow_mut();
            (state.staging.next(), std::mem::take(&mut state.rotate), state.closing)
        };
        match next {
            Next::Submit => inner.submit(),
            Next::Roll(segment) => inner.roll(segment).await,
            Next::Idle if rotate => inner.rotate().await,
            Next::Idle if closing && inner.state.borrow().staging.is_idle() => break,
            Next::Idle | Next::Blocked => inner.wake_flusher.notified().await,
        }
    }
    inner.state.borrow_mut().flusher_ended = true;
    inner.progress.notify_all();
}

impl Inner {
    fn submit(self: &Rc<Inner>) {
        let Some((id, segment, offset, bytes)) = self.state.borrow_mut().staging.submit(rt::now()) else { return };
        let inner = self.clone();
        rt::spawn(Queue::Foreground, async move {
            let written = write_group(&segment, offset, bytes).await;
            if inner.group_written(id, &segment, offset, written) {
                // First the answers, then the dispatcher: its work would hold up the sends of this turn.
                rt::submitted().await;
                inner.durable.notify_one();
            }
        });
    }

    /// Returns whether records have become durable.
    fn group_written(&self, id: u64, segment: &Segment, offset: u64, written: io::Result<()>) -> bool {
        if let Err(error) = written {
            let path = segment.path.display();
            self.fail(format!("ingress WAL write to {path} at byte {offset} failed: {error}"));
            return false;
        }
        {
            let now = rt::now();
            let mut guard = self.state.borrow_mut();
            let state = &mut *guard;
            let metrics = &mut state.metrics;
            let before = state.staging.durable_next;
            state.staging.landed(id, |group| {
                metrics.groups += 1;
                metrics.records += group.records;
                metrics.bytes_written += group.bytes;
                crate::histogram::record(&mut metrics.group_records, group.records);
                let micros = (now - group.submitted_at).as_micros();
                crate::histogram::record(&mut metrics.flush_us, u64::try_from(micros).unwrap_or(u64::MAX));
            });
            if state.staging.durable_next == before {
                return false; // an earlier group is still on its way, or the log has failed
            }
        }
        self.wake_flusher.notify_one();
        self.progress.notify_all();
        true
    }

    /// A write or sync of unknown outcome: nothing more is written, and everything not durable has failed (E11).
    pub(super) fn fail(&self, cause: String) {
        let callbacks = {
            let mut state = self.state.borrow_mut();
            if state.broken {
                return;
            }
            state.broken = true;
            state.latched.get_or_insert_with(|| cause.clone());
            state.staging.fail(&cause);
            state.on_latched.clone()
        };
        if callbacks.is_empty() {
            tracing::error!(cause = %cause, "ingress WAL failed: every produce is refused until the node is restarted");
        }
        self.wake_flusher.notify_one();
        self.progress.notify_all();
        callbacks.iter().for_each(|callback| callback(&cause));
    }

    /// Goes on in `segment`; nothing is in flight (E7). Staged records lie in it already, and wait.
    async fn roll(&self, segment: Rc<Segment>) {
        let first_seq = segment.first_seq.get();
        if segment.file().is_none() {
            if let Err(error) = self.folder.make(&segment, first_seq, &Unpaced).await {
                return self.withdraw_roll(&segment, &error);
            }
            self.state.borrow_mut().metrics.rolls_unprepared += 1;
        }
        self.activate(segment, first_seq).await;
        self.state.borrow_mut().metrics.rolls += 1;
    }

    /// No segment could be made, and the state on disk is known: refuse, and try again with a later append (E9,
    /// lesson N5).
    fn withdraw_roll(&self, segment: &Segment, error: &io::Error) {
        let dir = self.folder.dir.display();
        let text =
            format!("no new ingress WAL segment could be made in {dir}: {error}; trying again while produces come");
        tracing::warn!(error = %error, dir = %dir, "no new ingress WAL segment; produce is refused until one can be made");
        {
            let mut state = self.state.borrow_mut();
            let active = state.chain.back().cloned();
            let error = AppendError::Unavailable(text);
            let spares = state.staging.withdraw(&error, active, segment.first_seq.get());
            state.spares.extend(spares);
            state.hold_off = Some((rt::now() + ROLL_RETRY, error));
            state.metrics.appends_unavailable += 1;
        }
        self.progress.notify_all();
    }

    async fn activate(&self, segment: Rc<Segment>, first_seq: u64) {
        match self.folder.activate(&segment, first_seq).await {
            Ok(()) => self.state.borrow_mut().chain.push_back(segment),
            Err(error) => {
                let path = segment.path.display();
                self.fail(format!("ingress WAL could not make {path} its active segment: {error}"));
            }
        }
    }

    /// E10: an idle segment with more than 1 MiB of dispatched records gives way to a recycled one.
    async fn rotate(self: &Rc<Inner>) {
        let (segment, first_seq) = {
            let mut guard = self.state.borrow_mut();
            let state = &mut *guard;
            if !state.may_rotate() || rt::now() < state.last_append + ROTATE_AFTER {
                return;
            }
            let Some(at) = state.spares.iter().position(|spare| spare.recycled) else { return };
            let Some(segment) = state.spares.remove(at) else { return };
            segment.first_seq.set(state.staging.next_seq);
            state.staging.retarget(Some(segment.clone()));
            state.metrics.rotations += 1;
            (segment, state.staging.next_seq)
        };
        self.activate(segment, first_seq).await;
        self.keep();
    }

    /// Arms one look at the active segment, a second after the last append. Nothing ticks while none is due.
    pub(super) fn arm_rotation(self: &Rc<Inner>) {
        {
            let mut state = self.state.borrow_mut();
            if state.rotation_armed || !state.may_rotate() {
                return;
            }
            state.rotation_armed = true;
        }
        let inner = self.clone();
        rt::spawn(Queue::Background, async move {
            loop {
                let due = {
                    let mut state = inner.state.borrow_mut();
                    let due = state.last_append + ROTATE_AFTER;
                    if !state.may_rotate() || rt::now() >= due {
                        state.rotation_armed = false;
                        state.rotate = state.may_rotate();
                        break;
                    }
                    due
                };
                rt::sleep_until(due).await;
            }
            inner.wake_flusher.notify_one();
        });
    }

    /// Prepares the next segment beside the traffic that will need it; `preparing` is set already.
    pub(super) fn start_preparing(self: &Rc<Inner>) {
        let inner = self.clone();
        rt::spawn(Queue::Background, async move {
            let (segment, floor) = {
                let mut state = inner.state.borrow_mut();
                state.next_number += 1;
                let number = state.next_number - 1;
                let segment = Segment::planned(&inner.folder, number, inner.segment_bytes, true);
                (segment, state.staging.durable_next)
            };
            let pace = Paced { budget: inner.fill.clone(), hurry: || inner.state.borrow().closing };
            let made = inner.folder.make(&segment, floor, &pace).await;
            {
                let mut state = inner.state.borrow_mut();
                state.preparing = false;
                match made {
                    Ok(()) => {
                        state.metrics.segments_prepared += 1;
                        state.spares.push_back(Rc::new(segment));
                    }
                    Err(error) => {
                        state.prepare_not_before = rt::now() + PREPARE_RETRY;
                        tracing::warn!(
                            error = %error,
                            path = %segment.path.display(),
                            "no ingress WAL segment could be prepared; the next roll makes one without, and is slower"
                        );
                    }
                }
            }
            inner.progress.notify_all();
        });
    }
}

impl super::State {
    fn may_rotate(&self) -> bool {
        let Some(active) = self.chain.back() else { return false };
        active.tail.get() - BLOCK_BYTES > ROTATE_BYTES
            && self.staging.is_idle()
            && self.checkpoint.wanted >= self.staging.next_seq
            && self.staging.target().is_some_and(|target| Rc::ptr_eq(target, active))
            && self.spares.iter().any(|spare| spare.recycled)
            && self.latched.is_none()
            && !self.closing
    }
}

async fn write_group(segment: &Segment, offset: u64, bytes: Slice) -> io::Result<()> {
    segment.open_file()?.write_durable_at(offset, bytes).await
}
