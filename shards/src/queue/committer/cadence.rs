//! When positions are written and when they are synced (C70, C71): the ticking task, the syncing task, and what one
//! leaves to the other.
//!
//! What bounds the age of an ack that a killed process loses (D16): the tick, and, if a sync of the same partition is
//! under way at the tick, the rest of that sync, since the slot that is being synced must not change. The syncs of
//! other partitions, and the first sync of a new one, cost it nothing.

use std::io;
use std::rc::Rc;
use std::time::Duration;

use super::{spread_of, Committer, Tracked};
use crate::meta::Destination;
use crate::rt::{self, Queue};

/// Work of the syncing task.
pub(super) enum Due {
    Sync(Rc<Tracked>),
    /// Bring `consumer.offset` level.
    Level(Destination),
}

impl Committer {
    /// Age of the oldest ack that is not in the page cache yet: what a kill at this moment would take back (D16).
    pub fn oldest_unwritten(&self) -> Duration {
        let now = rt::now();
        let ages = |tracked: &Rc<Tracked>| tracked.unwritten_since.get().map(|since| now.saturating_since(since));
        self.partitions.borrow().values().filter_map(ages).max().unwrap_or_default()
    }

    pub(super) fn arm(self: &Rc<Self>) {
        if self.running.replace(true) {
            self.work.notify_one();
        } else {
            rt::spawn(Queue::Consume, self.clone().run());
        }
    }

    async fn run(self: Rc<Self>) {
        let mut tick_at = rt::now() + self.tick;
        loop {
            let now = rt::now();
            let ticking = !self.dirty.borrow().is_empty() || !self.unsynced.borrow().is_empty();
            if ticking && now >= tick_at {
                self.write_dirty().await;
                self.collect_due();
                tick_at = rt::now().max(tick_at + self.tick);
                if rt::now() - now > self.tick {
                    self.warn(&self.warned_tick, "consumer offset commits cannot keep to their interval");
                }
                continue;
            }
            let level = self.levels.borrow().first().copied();
            match level {
                Some((at, destination)) if at <= now => {
                    self.levels.borrow_mut().remove(&(at, destination));
                    self.owe(Due::Level(destination));
                }
                _ if ticking => rt::sleep_until(tick_at).await,
                Some((at, _)) => {
                    // Nothing but levelling is owed: sleep until then, or until an ack comes.
                    if rt::timeout(at - now, self.work.notified()).await.is_ok() {
                        tick_at = rt::now() + self.tick;
                    }
                }
                None => break,
            }
        }
        self.running.set(false);
    }

    /// Writes every changed position. A partition that is being synced is written by the sync when it is done; one that
    /// was never written needs a sync first (C76) and gets a task of its own.
    async fn write_dirty(self: &Rc<Self>) {
        let dirty = std::mem::take(&mut *self.dirty.borrow_mut());
        for tracked in dirty.into_iter().filter(|tracked| tracked.dirty.get()) {
            if tracked.busy.get() {
                tracked.missed_tick.set(true);
                self.dirty.borrow_mut().push(tracked);
            } else if tracked.slots.get().is_none() {
                self.priming.set(self.priming.get() + 1);
                let committer = self.clone();
                rt::spawn(Queue::Consume, async move {
                    committer.write_or_retry(&tracked).await;
                    committer.priming.set(committer.priming.get() - 1);
                });
            } else {
                self.write_or_retry(&tracked).await;
            }
        }
    }

    async fn write_or_retry(self: &Rc<Self>, tracked: &Rc<Tracked>) {
        let busy = tracked.acquire().await;
        if !tracked.dirty.get() {
            return;
        }
        let written = self.write(tracked).await;
        drop(busy);
        if let Err(error) = written {
            self.report(tracked, "writing", &error);
            self.owe_write(tracked);
        }
        self.arm();
    }

    /// A write that failed is owed to the next tick.
    pub(super) fn owe_write(&self, tracked: &Rc<Tracked>) {
        if tracked.dirty.get() && tracked.writable() {
            self.dirty.borrow_mut().push(tracked.clone());
        }
    }

    /// Hands to the syncing task what this tick is to sync: a share of the partitions by hash, and whatever has waited
    /// a full interval (C71).
    fn collect_due(self: &Rc<Self>) {
        let ticks = self.ticks.replace(self.ticks.get() + 1);
        let spread = (self.options.interval.as_nanos() / self.tick.as_nanos()).max(1) as u64;
        let now = rt::now();
        let mut due = Vec::new();
        self.unsynced.borrow_mut().retain(|tracked| {
            let waited = tracked.unsynced_since.get().map_or(Duration::ZERO, |since| now - since);
            let now_due = waited >= self.options.interval || spread_of(tracked.destination) % spread == ticks % spread;
            if now_due {
                due.push(tracked.clone());
            }
            !now_due
        });
        due.into_iter().for_each(|tracked| self.owe(Due::Sync(tracked)));
    }

    fn owe(self: &Rc<Self>, due: Due) {
        self.due.borrow_mut().push_back(due);
        if !self.syncing.replace(true) {
            rt::spawn(Queue::Consume, self.clone().sync_due());
        }
    }

    /// One sync at a time (C84).
    async fn sync_due(self: Rc<Self>) {
        loop {
            let next = self.due.borrow_mut().pop_front();
            match next {
                Some(Due::Sync(tracked)) => {
                    if let Err(error) = self.sync(&tracked).await {
                        self.report(&tracked, "syncing", &error);
                    }
                }
                Some(Due::Level(destination)) => self.level_scheduled(destination).await,
                None => break,
            }
        }
        self.syncing.set(false);
    }

    async fn sync(self: &Rc<Self>, tracked: &Rc<Tracked>) -> io::Result<()> {
        let waited = tracked.unsynced_since.get().map_or(Duration::ZERO, |since| rt::now() - since);
        if waited > 2 * self.options.interval {
            self.warn(&self.warned_wait, "consumer offsets wait longer than their durability interval");
        }
        {
            let _busy = tracked.acquire().await;
            self.sync_window(tracked).await?;
        }
        if tracked.missed_tick.take() {
            self.write_or_retry(tracked).await;
        }
        let _busy = tracked.acquire().await;
        let ahead = tracked.durable_frontier.get() > tracked.level.get();
        if ahead && rt::now() >= tracked.level_at.get() {
            self.write_level(tracked).await?;
        } else if ahead && tracked.level_scheduled.get().is_none() && tracked.writable() {
            let at = tracked.level_at.get();
            tracked.level_scheduled.set(Some(at));
            self.levels.borrow_mut().insert((at, tracked.destination));
            self.arm();
        }
        Ok(())
    }

    async fn level_scheduled(&self, destination: Destination) {
        let tracked = self.partitions.borrow().get(&destination).cloned();
        let Some(tracked) = tracked else { return };
        tracked.level_scheduled.set(None);
        let _busy = tracked.acquire().await;
        if let Err(error) = self.write_level(&tracked).await {
            self.report(&tracked, "levelling", &error);
        }
    }
}
