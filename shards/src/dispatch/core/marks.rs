//! One byte per sequence number between the checkpoint and the read frontier.

use std::collections::VecDeque;

/// What became of a sequence number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// Committed or discarded.
    Done,
    /// Queued or in flight.
    Held,
    /// Left in the WAL; read again later.
    Skipped,
}

/// The marks from the checkpoint (`base`) up to the first sequence number that was never read (`end`).
#[derive(Debug)]
pub(crate) struct Marks {
    base: u64,
    ring: VecDeque<Mark>,
    skipped: usize,
}

impl Marks {
    pub fn new(checkpoint: u64) -> Marks {
        Marks { base: checkpoint, ring: VecDeque::new(), skipped: 0 }
    }

    /// The checkpoint as of the last `advance`: no sequence number below it is undone.
    pub fn base(&self) -> u64 {
        self.base
    }

    pub fn end(&self) -> u64 {
        self.base + self.ring.len() as u64
    }

    pub fn skipped(&self) -> usize {
        self.skipped
    }

    /// `None` for what was never read.
    pub fn get(&self, seq: u64) -> Option<Mark> {
        if seq < self.base {
            return Some(Mark::Done);
        }
        self.ring.get((seq - self.base) as usize).copied()
    }

    pub fn push(&mut self, mark: Mark) {
        self.skipped += usize::from(mark == Mark::Skipped);
        self.ring.push_back(mark);
    }

    /// Changes the mark of a sequence number that was read. What is done stays done.
    pub fn set(&mut self, seq: u64, mark: Mark) {
        debug_assert!(seq < self.end(), "sequence {seq} was never read");
        let Some(slot) = seq.checked_sub(self.base).and_then(|at| self.ring.get_mut(at as usize)) else { return };
        if *slot == Mark::Done {
            return;
        }
        self.skipped -= usize::from(*slot == Mark::Skipped);
        self.skipped += usize::from(mark == Mark::Skipped);
        *slot = mark;
    }

    /// Moves the base to the first sequence number that is not done, and returns it.
    pub fn advance(&mut self) -> u64 {
        while self.ring.front() == Some(&Mark::Done) {
            self.ring.pop_front();
            self.base += 1;
        }
        self.base
    }

    /// The first skipped sequence number at or after `from`.
    pub fn next_skipped(&self, from: u64) -> Option<u64> {
        if self.skipped == 0 {
            return None;
        }
        let start = (from.max(self.base) - self.base) as usize;
        if start >= self.ring.len() {
            return None;
        }
        let found = self.ring.range(start..).position(|mark| *mark == Mark::Skipped)?;
        Some(self.base + (start + found) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checkpoint_is_the_first_sequence_number_that_is_not_done() {
        let mut marks = Marks::new(10);
        for mark in [Mark::Held, Mark::Skipped, Mark::Held, Mark::Done] {
            marks.push(mark);
        }
        assert_eq!((marks.advance(), marks.end(), marks.skipped()), (10, 14, 1));
        marks.set(12, Mark::Done);
        assert_eq!(marks.advance(), 10, "a later one does not move it");
        marks.set(10, Mark::Done);
        assert_eq!(marks.advance(), 11);
        marks.set(11, Mark::Held);
        assert_eq!((marks.advance(), marks.skipped()), (11, 0));
        marks.set(11, Mark::Done);
        assert_eq!(marks.advance(), 14);
        assert_eq!((marks.get(3), marks.get(14)), (Some(Mark::Done), None));
    }

    #[test]
    fn done_is_final() {
        let mut marks = Marks::new(0);
        marks.push(Mark::Done);
        marks.set(0, Mark::Skipped);
        assert_eq!((marks.get(0), marks.skipped()), (Some(Mark::Done), 0));
    }

    #[test]
    fn skipped_ones_are_found_in_order() {
        let mut marks = Marks::new(5);
        for mark in [Mark::Skipped, Mark::Held, Mark::Done, Mark::Skipped] {
            marks.push(mark);
        }
        assert_eq!([0, 5, 6, 8].map(|from| marks.next_skipped(from)), [Some(5), Some(5), Some(8), Some(8)]);
        assert_eq!((marks.next_skipped(9), marks.next_skipped(99)), (None, None));
    }
}
