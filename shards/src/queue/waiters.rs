//! A FIFO of parked consumes that can be left at any time in O(1) amortised (C28, C32, C36). Pure.
//!
//! A waiter that is being tried stays in its place and is only marked: one that got nothing is at the head again
//! without being moved, and one that leaves meanwhile is answered by the outcome of the try.

use std::collections::{HashMap, VecDeque};

use crate::peer::{Take, WaiterId};

struct Entry<R> {
    id: WaiterId,
    waiter: Option<Waiter<R>>,
}

struct Waiter<R> {
    take: Take,
    reply: R,
    /// A claim on its behalf is under way.
    trying: bool,
    /// Timed out or gone while it was tried: it is answered when the try ends, whatever it brings.
    leaving: bool,
    /// Stands here for another node.
    probe: bool,
}

/// `R` is what a waiter is answered through.
pub struct Waiters<R> {
    entries: VecDeque<Entry<R>>,
    /// Position of each live waiter, counted from the first entry ever.
    positions: HashMap<WaiterId, u64>,
    /// Position of the first entry.
    base: u64,
    trying: usize,
    /// Probes, and those of them that are being tried.
    probes: usize,
    probes_trying: usize,
}

impl<R> Default for Waiters<R> {
    fn default() -> Self {
        Waiters { entries: VecDeque::new(), positions: HashMap::new(), base: 0, trying: 0, probes: 0, probes_trying: 0 }
    }
}

impl<R> Waiters<R> {
    /// Waiters in the queue, being tried or not.
    pub fn len(&self) -> usize {
        self.positions.len()
    }

    pub fn is_empty(&self) -> bool {
        self.positions.is_empty()
    }

    /// Whether anybody waits who is not being tried already.
    pub fn has_idle(&self) -> bool {
        self.positions.len() > self.trying
    }

    /// As [`has_idle`](Self::has_idle), probes aside.
    pub fn has_idle_beside_probes(&self) -> bool {
        self.positions.len() - self.probes > self.trying - self.probes_trying
    }

    /// Probes in the queue, being tried or not.
    pub fn probes(&self) -> usize {
        self.probes
    }

    pub fn push(&mut self, id: WaiterId, take: Take, reply: R) {
        self.push_as(id, Waiter { take, reply, trying: false, leaving: false, probe: false });
    }

    pub fn push_probe(&mut self, id: WaiterId, take: Take, reply: R) {
        self.probes += 1;
        self.push_as(id, Waiter { take, reply, trying: false, leaving: false, probe: true });
    }

    fn push_as(&mut self, id: WaiterId, waiter: Waiter<R>) {
        debug_assert!(!self.positions.contains_key(&id), "waiter ids are used once");
        self.positions.insert(id, self.base + self.entries.len() as u64);
        self.entries.push_back(Entry { id, waiter: Some(waiter) });
    }

    /// Marks the first waiter that is not being tried, and returns it.
    pub fn pick(&mut self) -> Option<(WaiterId, Take)> {
        match self.has_idle() {
            true => self.pick_first(|waiter| !waiter.trying),
            false => None,
        }
    }

    /// As [`pick`](Self::pick), probes aside.
    pub fn pick_beside_probes(&mut self) -> Option<(WaiterId, Take)> {
        match self.has_idle_beside_probes() {
            true => self.pick_first(|waiter| !waiter.trying && !waiter.probe),
            false => None,
        }
    }

    fn pick_first(&mut self, fits: impl Fn(&Waiter<R>) -> bool) -> Option<(WaiterId, Take)> {
        let entry = self.entries.iter_mut().find(|entry| entry.waiter.as_ref().is_some_and(&fits))?;
        let waiter = entry.waiter.as_mut()?;
        waiter.trying = true;
        self.trying += 1;
        self.probes_trying += usize::from(waiter.probe);
        Some((entry.id, waiter.take))
    }

    /// The try brought something (or failed for good): takes the waiter out, to be answered.
    pub fn served(&mut self, id: WaiterId) -> Option<R> {
        self.remove(id).map(|waiter| waiter.reply)
    }

    /// The try brought nothing: the waiter waits on in its place, unless it wanted to leave and is to be answered.
    pub fn put_back(&mut self, id: WaiterId) -> Option<R> {
        let waiter = self.find(id)?;
        if waiter.leaving {
            return self.served(id);
        }
        waiter.trying = false;
        let probe = waiter.probe;
        self.trying -= 1;
        self.probes_trying -= usize::from(probe);
        None
    }

    /// The waiter has timed out or gone. Returned when it can be answered now; one that is being tried is answered
    /// when the try ends, an unknown one never.
    pub fn leave(&mut self, id: WaiterId) -> Option<R> {
        let waiter = self.find(id)?;
        if waiter.trying {
            waiter.leaving = true;
            return None;
        }
        self.served(id)
    }

    /// Whether the waiter still waits for what a try may bring.
    pub fn wants(&self, id: WaiterId) -> bool {
        let position = self.positions.get(&id);
        let entry = position.and_then(|position| self.entries.get((position - self.base) as usize));
        entry.and_then(|entry| entry.waiter.as_ref()).is_some_and(|waiter| !waiter.leaving)
    }

    /// Takes out everybody who is not being tried, in order.
    pub fn drain_idle(&mut self) -> Vec<R> {
        self.drain(|waiter| !waiter.trying)
    }

    /// Takes out the probes that are not being tried, in order.
    pub fn drain_idle_probes(&mut self) -> Vec<R> {
        self.drain(|waiter| !waiter.trying && waiter.probe)
    }

    fn drain(&mut self, fits: impl Fn(&Waiter<R>) -> bool) -> Vec<R> {
        let idle = |entry: &Entry<R>| entry.waiter.as_ref().is_some_and(&fits).then_some(entry.id);
        let ids: Vec<WaiterId> = self.entries.iter().filter_map(idle).collect();
        ids.into_iter().filter_map(|id| self.served(id)).collect()
    }

    fn find(&mut self, id: WaiterId) -> Option<&mut Waiter<R>> {
        let position = *self.positions.get(&id)?;
        self.entries.get_mut((position - self.base) as usize)?.waiter.as_mut()
    }

    fn remove(&mut self, id: WaiterId) -> Option<Waiter<R>> {
        let position = self.positions.remove(&id)?;
        let waiter = self.entries.get_mut((position - self.base) as usize)?.waiter.take()?;
        self.trying -= usize::from(waiter.trying);
        self.probes -= usize::from(waiter.probe);
        self.probes_trying -= usize::from(waiter.probe && waiter.trying);
        while self.entries.front().is_some_and(|entry| entry.waiter.is_none()) {
            self.entries.pop_front();
            self.base += 1;
        }
        if self.entries.len() > 2 * self.positions.len() + 32 {
            self.sweep();
        }
        Some(waiter)
    }

    /// Drops the places of those who left, once they outnumber those who wait.
    fn sweep(&mut self) {
        self.entries.retain(|entry| entry.waiter.is_some());
        for (entry, position) in self.entries.iter().zip(self.base..) {
            self.positions.insert(entry.id, position);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rt::sim::Rng;

    const ONE: Take = Take { max: 1, bytes_max: 1 };

    fn id(serial: u64) -> WaiterId {
        WaiterId { shard: 0, serial }
    }

    #[test]
    fn c32_a_waiter_that_got_nothing_is_at_the_head_again() {
        let mut waiters = Waiters::default();
        (0..3).for_each(|n| waiters.push(id(n), ONE, n));
        assert_eq!(waiters.pick(), Some((id(0), ONE)));
        assert_eq!(waiters.pick(), Some((id(1), ONE)));
        assert_eq!(waiters.put_back(id(1)), None);
        assert_eq!(waiters.put_back(id(0)), None);
        assert_eq!(waiters.pick(), Some((id(0), ONE)));
        assert_eq!(waiters.served(id(0)), Some(0));
        assert_eq!(waiters.pick(), Some((id(1), ONE)));
    }

    #[test]
    fn one_that_leaves_while_it_is_tried_is_answered_by_the_outcome() {
        let mut waiters = Waiters::default();
        (0..2).for_each(|n| waiters.push(id(n), ONE, n));
        waiters.pick();
        assert!(waiters.wants(id(0)));
        assert_eq!(waiters.leave(id(0)), None);
        assert!(!waiters.wants(id(0)));
        assert_eq!(waiters.put_back(id(0)), Some(0), "nothing came: it is let go");
        assert_eq!(waiters.leave(id(1)), Some(1));
        assert_eq!(waiters.leave(id(1)), None, "answered once");
        assert!(waiters.is_empty());
    }

    #[test]
    fn c36_places_of_those_who_left_do_not_pile_up() {
        let mut waiters = Waiters::default();
        let mut rng = Rng::new(1);
        let mut live: Vec<u64> = Vec::new();
        waiters.push(id(u64::MAX), ONE, 0);
        for serial in 0..5_000 {
            waiters.push(id(serial), ONE, serial);
            live.push(serial);
            while live.len() as u64 > rng.below(60) {
                let leaver = live.remove(rng.below(live.len() as u64) as usize);
                assert_eq!(waiters.leave(id(leaver)), Some(leaver));
            }
            assert!(waiters.entries.len() <= 2 * (live.len() + 1) + 32);
        }
        assert_eq!(waiters.pick(), Some((id(u64::MAX), ONE)));
        for expected in live {
            assert_eq!(waiters.pick(), Some((id(expected), ONE)));
        }
    }
}
