//! The sending half of one link: a bounded ring and, when that is full, a local queue.
//!
//! A sender never waits for space, and a receiver takes everything in each turn whatever its own senders do: so two
//! full rings cannot block each other. Requests may fill the ring only up to a reserve that belongs to replies: a
//! slot is the credit of a request, given back when the receiver takes it. Requests stay in order among
//! themselves, and so do replies; a reply may overtake a request.

use std::collections::VecDeque;
use std::sync::Arc;

use rtrb::Producer;

use super::bell::Parking;

pub(super) struct Outbox<M> {
    ring: Producer<M>,
    /// Slots that were free at the last look, less those filled since. A look fetches a cache line that the receiver
    /// writes: no push pays for one while there is room enough.
    free: usize,
    /// "Parked" while messages wait for room: the receiver then tells when it has made some.
    hungry: Arc<Parking>,
    /// We have set it: the receiver reads the line, so it is not written for nothing.
    is_hungry: bool,
    reserve: usize,
    requests: VecDeque<M>,
    replies: VecDeque<M>,
}

impl<M> Outbox<M> {
    pub fn new(ring: Producer<M>, hungry: Arc<Parking>) -> Outbox<M> {
        let (free, reserve) = (ring.slots(), ring.buffer().capacity() / 2);
        let (requests, replies) = (VecDeque::new(), VecDeque::new());
        Outbox { ring, free, hungry, is_hungry: false, reserve, requests, replies }
    }

    pub fn push_request(&mut self, message: M) {
        if self.requests.is_empty() && self.leaves(self.reserve) {
            return self.put(message);
        }
        self.requests.push_back(message);
        self.flush();
    }

    pub fn push_reply(&mut self, message: M) {
        if self.replies.is_empty() && self.leaves(0) {
            return self.put(message);
        }
        self.replies.push_back(message);
        self.flush();
    }

    /// Whether more than `reserve` slots are free.
    fn leaves(&mut self, reserve: usize) -> bool {
        if self.free <= reserve {
            self.free = self.ring.slots();
        }
        self.free > reserve
    }

    fn put(&mut self, message: M) {
        let pushed = self.ring.push(message);
        assert!(pushed.is_ok(), "only this side fills the ring, and a slot was free");
        self.free -= 1;
    }

    /// Moves waiting messages into the ring. Returns whether any went.
    pub fn flush(&mut self) -> bool {
        if self.waiting() == 0 {
            return false;
        }
        if std::mem::take(&mut self.is_hungry) {
            self.hungry.unpark();
        }
        let mut moved = self.fill();
        if self.waiting() > 0 {
            self.is_hungry = true;
            self.hungry.park();
            // The last look: a receiver that makes room after it sees the flag.
            moved |= self.fill();
        }
        moved
    }

    fn fill(&mut self) -> bool {
        self.free = self.ring.slots();
        let mut moved = false;
        while self.free > 0 {
            let next = match self.replies.pop_front() {
                Some(reply) => reply,
                None if self.free > self.reserve => match self.requests.pop_front() {
                    Some(request) => request,
                    None => break,
                },
                None => break,
            };
            self.put(next);
            moved = true;
        }
        moved
    }

    /// Whether a message that waits would find room now.
    pub fn has_room(&self) -> bool {
        self.waiting() > 0 && {
            let slots = self.ring.slots();
            slots > self.reserve || (slots > 0 && !self.replies.is_empty())
        }
    }

    /// Messages that found no room yet.
    pub fn waiting(&self) -> usize {
        self.requests.len() + self.replies.len()
    }

    /// The receiver has gone: nothing will be taken any more.
    pub fn is_abandoned(&self) -> bool {
        self.ring.is_abandoned()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn requests_leave_room_for_replies() {
        let (producer, mut consumer) = rtrb::RingBuffer::new(8);
        let mut outbox = Outbox::new(producer, Arc::new(Parking::new()));
        for i in 0..10 {
            outbox.push_request(i);
        }
        assert_eq!((consumer.slots(), outbox.waiting()), (4, 6));
        for i in 100..106 {
            outbox.push_reply(i);
        }
        assert_eq!((consumer.slots(), outbox.waiting()), (8, 8));
        let mut seen = Vec::new();
        while let Ok(message) = consumer.pop() {
            seen.push(message);
            outbox.flush();
        }
        assert_eq!(outbox.waiting(), 0);
        assert_eq!(seen.iter().copied().filter(|m| *m < 100).collect::<Vec<_>>(), (0..10).collect::<Vec<_>>());
        assert_eq!(seen.iter().copied().filter(|m| *m >= 100).collect::<Vec<_>>(), (100..106).collect::<Vec<_>>());
    }

    proptest! {
        /// Any order of pushes and takes: nothing is lost, doubled or reordered within its kind.
        #[test]
        fn every_message_arrives_once_and_in_order(steps in proptest::collection::vec(0u8..4, 1..300)) {
            let (producer, mut consumer) = rtrb::RingBuffer::new(4);
            let mut outbox = Outbox::new(producer, Arc::new(Parking::new()));
            let (mut requests, mut replies) = (0u32, 1_000_000u32);
            let mut seen = Vec::new();
            for step in steps {
                match step {
                    0 => { outbox.push_request(requests); requests += 1; }
                    1 => { outbox.push_reply(replies); replies += 1; }
                    2 => { outbox.flush(); }
                    _ => seen.extend(consumer.pop().ok()),
                }
            }
            while outbox.waiting() > 0 || !consumer.is_empty() {
                seen.extend(consumer.pop().ok());
                outbox.flush();
            }
            let (low, high): (Vec<u32>, Vec<u32>) = seen.into_iter().partition(|m| *m < 1_000_000);
            prop_assert_eq!(low, (0..requests).collect::<Vec<_>>());
            prop_assert_eq!(high, (1_000_000..replies).collect::<Vec<_>>());
        }
    }
}
