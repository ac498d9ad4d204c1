//! Acks, extends and nacks on their way to one shard of another node (C86): many leave one by one, and what is more than
//! that queues and leaves as batches. Each is answered on its own, with the status that it would have had alone.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::rc::Rc;

use crate::api::{Settle, SettleStatus};
use crate::meta::Incarnation;
use crate::rt::sync::Sender;
use crate::rt::Instant;

/// Calls under way to one shard at a time.
pub(super) const CALLS_MAX: usize = 128;
/// Settles that leave together.
pub(super) const BATCH_MAX: usize = 64;

/// One caller's settles that wait for a slot.
pub(super) struct Queued<E> {
    pub incarnation: Incarnation,
    pub settles: Vec<Settle>,
    /// The end of its caller's patience, the wait here included (C85).
    pub until: Instant,
    pub answer: Sender<Result<Vec<SettleStatus>, E>>,
}

struct Owner<E> {
    calls: usize,
    queue: VecDeque<Queued<E>>,
}

/// What is on its way, by where it goes. `E`: why there is no answer.
pub(super) struct Settles<E> {
    owners: RefCell<BTreeMap<SocketAddr, Owner<E>>>,
}

impl<E> Default for Settles<E> {
    fn default() -> Settles<E> {
        Settles { owners: RefCell::default() }
    }
}

/// A slot for one call; free again when it is dropped.
pub(super) struct Slot<E: 'static> {
    settles: Rc<Settles<E>>,
    to: SocketAddr,
    /// Told when the slot is free.
    freed: Box<dyn Fn(SocketAddr)>,
}

impl<E> Settles<E> {
    /// `None`: all are taken, or others wait for one.
    pub fn slot(self: &Rc<Self>, to: SocketAddr, freed: impl Fn(SocketAddr) + 'static) -> Option<Slot<E>> {
        let mut owners = self.owners.borrow_mut();
        let owner = owners.entry(to).or_insert_with(|| Owner { calls: 0, queue: VecDeque::new() });
        if owner.calls >= CALLS_MAX || !owner.queue.is_empty() {
            return None;
        }
        owner.calls += 1;
        Some(Slot { settles: self.clone(), to, freed: Box::new(freed) })
    }

    pub fn enqueue(&self, to: SocketAddr, queued: Queued<E>) {
        if let Some(owner) = self.owners.borrow_mut().get_mut(&to) {
            owner.queue.push_back(queued);
        }
    }

    /// What leaves next, with a slot for it: settles of one topic, oldest first. Whoever has given up is not among them.
    pub fn next_batch(
        self: &Rc<Self>,
        to: SocketAddr,
        freed: impl Fn(SocketAddr) + 'static,
    ) -> Option<(Slot<E>, Vec<Queued<E>>)> {
        let mut owners = self.owners.borrow_mut();
        let owner = owners.get_mut(&to).filter(|owner| owner.calls < CALLS_MAX)?;
        owner.queue.retain(|queued| !queued.answer.is_closed());
        let first = owner.queue.pop_front()?;
        let (mut count, mut batch) = (first.settles.len(), vec![first]);
        while let Some(next) = owner.queue.front() {
            if count + next.settles.len() > BATCH_MAX || next.incarnation != batch[0].incarnation {
                break;
            }
            count += next.settles.len();
            batch.extend(owner.queue.pop_front());
        }
        owner.calls += 1;
        Some((Slot { settles: self.clone(), to, freed: Box::new(freed) }, batch))
    }
}

impl<E: 'static> Drop for Slot<E> {
    fn drop(&mut self) {
        {
            let mut owners = self.settles.owners.borrow_mut();
            if let Some(owner) = owners.get_mut(&self.to) {
                owner.calls -= 1;
                if owner.calls == 0 && owner.queue.is_empty() {
                    owners.remove(&self.to);
                }
            }
        }
        (self.freed)(self.to);
    }
}

/// Gives each caller its part of what was answered to all.
pub(super) fn hand_out<E: Clone>(batch: Vec<Queued<E>>, answer: Result<Vec<SettleStatus>, E>) {
    let mut at = 0;
    for queued in batch {
        let own = at..at + queued.settles.len();
        at = own.end;
        // A caller may have gone meanwhile.
        let _ = queued.answer.send(match &answer {
            Ok(statuses) => Ok(statuses[own].to_vec()),
            Err(error) => Err(error.clone()),
        });
    }
}
