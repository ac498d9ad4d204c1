//! Calls that wait for their reply, by request id.

use crate::peer::{Lost, Reply};
use crate::rt::sync::{self, Receiver, Sender};

pub(super) type Answer = Result<Reply, Lost>;

/// Pending calls of one link. Ids are never used twice for different calls that could be confused: a slot's
/// generation is part of the id.
#[derive(Default)]
pub(super) struct Calls {
    slots: Vec<Slot>,
    free: Vec<u32>,
    pending: usize,
}

struct Slot {
    generation: u32,
    waiting: Option<Sender<Answer>>,
}

impl Calls {
    pub fn begin(&mut self) -> (u64, Receiver<Answer>) {
        let (sender, receiver) = sync::oneshot();
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                self.slots.push(Slot { generation: 0, waiting: None });
                (self.slots.len() - 1) as u32
            }
        };
        let slot = &mut self.slots[index as usize];
        slot.generation = slot.generation.wrapping_add(1);
        slot.waiting = Some(sender);
        self.pending += 1;
        (u64::from(slot.generation) << 32 | u64::from(index), receiver)
    }

    /// Who waits for this call. `None`: an id that is over, or never was.
    pub fn end(&mut self, id: u64) -> Option<Sender<Answer>> {
        let (index, generation) = (id as u32, (id >> 32) as u32);
        let slot = self.slots.get_mut(index as usize).filter(|slot| slot.generation == generation)?;
        let waiting = slot.waiting.take()?;
        self.free.push(index);
        self.pending -= 1;
        Some(waiting)
    }

    /// The other side has gone: everybody who waits.
    pub fn end_all(&mut self) -> Vec<Sender<Answer>> {
        self.pending = 0;
        let waiting: Vec<_> = self.slots.iter_mut().filter_map(|slot| slot.waiting.take()).collect();
        self.free = (0..self.slots.len() as u32).collect();
        waiting
    }

    pub fn pending(&self) -> usize {
        self.pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_answers_its_own_call_once() {
        let mut calls = Calls::default();
        let (first, _a) = calls.begin();
        assert!(calls.end(first).is_some());
        let (second, _b) = calls.begin();
        assert_ne!(first, second);
        assert!(calls.end(first).is_none(), "the slot belongs to another call by now");
        assert!(calls.end(second).is_some() && calls.end(second).is_none());
        assert_eq!(calls.pending(), 0);
    }
}
