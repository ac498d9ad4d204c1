//! What was confirmed and what came back. No I/O: it is told.

use super::payload::Identity;

/// A set of sequence numbers, dense from 0.
#[derive(Clone, Debug, Default)]
struct Numbers {
    words: Vec<u64>,
}

impl Numbers {
    /// Returns whether it was new.
    fn insert(&mut self, number: u64) -> bool {
        let (word, bit) = ((number / 64) as usize, 1u64 << (number % 64));
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        let new = self.words[word] & bit == 0;
        self.words[word] |= bit;
        new
    }

    fn contains(&self, number: u64) -> bool {
        self.words.get((number / 64) as usize).is_some_and(|word| word & 1 << (number % 64) != 0)
    }

    fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        let in_word = |(index, word): (usize, &u64)| {
            let word = *word;
            (0..64).filter(move |bit| word & 1 << bit != 0).map(move |bit| index as u64 * 64 + bit)
        };
        self.words.iter().enumerate().flat_map(in_word)
    }
}

#[derive(Clone, Debug, Default)]
struct Producer {
    sent: u64,
    confirmed: Numbers,
    seen: Numbers,
}

/// What a message that came back was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// For the first time.
    First,
    /// Again: legal, and counted.
    Again,
    /// Under a number that was never sent: never legal.
    Invented,
}

/// The accounts of all producers of one run.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    producers: Vec<Producer>,
    /// Messages sent, whatever became of them.
    pub sent: u64,
    /// Of these, answered 202.
    pub confirmed: u64,
    /// Different messages that came back, whether confirmed or not.
    pub seen: u64,
    /// Confirmed and not come back yet.
    pub missing: u64,
    pub duplicates: u64,
    pub invented: u64,
    /// Messages of this run whose bytes had changed.
    pub damaged: u64,
    /// Messages of others, in the topic before this run.
    pub foreign: u64,
    /// Messages that were refused, or whose answer never came: nobody waits for them.
    written_off: u64,
    /// Producers whose operations may still be confirmed.
    pub producing: usize,
}

impl Ledger {
    pub fn new(producers: usize) -> Ledger {
        Ledger { producers: vec![Producer::default(); producers], producing: producers, ..Ledger::default() }
    }

    /// Numbers for `count` messages that are about to be sent; the first one.
    pub fn send(&mut self, producer: u16, count: u64) -> u64 {
        let producer = &mut self.producers[usize::from(producer)];
        let first = producer.sent;
        producer.sent += count;
        self.sent += count;
        first
    }

    /// `count` messages from `first` on were answered 202.
    pub fn confirm(&mut self, producer: u16, first: u64, count: u64) {
        let producer = &mut self.producers[usize::from(producer)];
        for number in first..first + count {
            if producer.confirmed.insert(number) {
                self.confirmed += 1;
                self.missing += u64::from(!producer.seen.contains(number));
            }
        }
    }

    pub fn receive(&mut self, identity: &Identity) -> Received {
        let known = self.producers.get_mut(usize::from(identity.producer)).filter(|p| identity.sequence < p.sent);
        let Some(producer) = known else {
            self.invented += 1;
            return Received::Invented;
        };
        if !producer.seen.insert(identity.sequence) {
            self.duplicates += 1;
            return Received::Again;
        }
        self.seen += 1;
        self.missing -= u64::from(producer.confirmed.contains(identity.sequence));
        Received::First
    }

    /// `count` messages were refused, or their answer never came (they may come back all the same).
    pub fn write_off(&mut self, count: u64) {
        self.written_off += count;
    }

    /// Messages sent that ought to come back and have not yet.
    pub fn outstanding(&self) -> u64 {
        (self.sent - self.seen).saturating_sub(self.written_off)
    }

    /// Nothing more can be confirmed, and everything confirmed came back.
    pub fn is_complete(&self) -> bool {
        self.producing == 0 && self.missing == 0
    }

    /// Some of the messages that were confirmed and did not come back: (producer, number).
    pub fn missing_sample(&self, count: usize) -> Vec<(usize, u64)> {
        let producers = self.producers.iter().enumerate();
        let missing = producers.flat_map(|(index, producer)| {
            producer
                .confirmed
                .iter()
                .filter(|number| !producer.seen.contains(*number))
                .map(move |number| (index, number))
        });
        missing.take(count).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(producer: u16, sequence: u64) -> Identity {
        Identity { run: 1, producer, sequence, sent: 0 }
    }

    #[test]
    fn what_was_confirmed_is_missing_until_it_came_back() {
        let mut ledger = Ledger::new(2);
        assert_eq!((ledger.send(0, 3), ledger.send(0, 100), ledger.send(1, 1)), (0, 3, 0));
        ledger.confirm(0, 0, 3);
        assert_eq!((ledger.confirmed, ledger.missing, ledger.outstanding()), (3, 3, 104));
        assert_eq!(ledger.receive(&id(0, 1)), Received::First);
        assert_eq!(ledger.missing, 2);
        assert_eq!(ledger.missing_sample(9), [(0, 0), (0, 2)]);
    }

    #[test]
    fn a_message_may_come_back_before_its_202() {
        let mut ledger = Ledger::new(1);
        ledger.send(0, 1);
        assert_eq!(ledger.receive(&id(0, 0)), Received::First);
        ledger.confirm(0, 0, 1);
        ledger.confirm(0, 0, 1);
        assert_eq!((ledger.confirmed, ledger.missing, ledger.seen), (1, 0, 1));
    }

    #[test]
    fn duplicates_are_counted_and_inventions_too() {
        let mut ledger = Ledger::new(1);
        ledger.send(0, 1);
        ledger.receive(&id(0, 0));
        assert_eq!(ledger.receive(&id(0, 0)), Received::Again);
        assert_eq!(ledger.receive(&id(0, 1)), Received::Invented);
        assert_eq!(ledger.receive(&id(1, 0)), Received::Invented);
        assert_eq!((ledger.duplicates, ledger.invented, ledger.seen), (1, 2, 1));
    }

    #[test]
    fn it_is_complete_only_when_no_producer_is_left() {
        let mut ledger = Ledger::new(1);
        assert!(!ledger.is_complete());
        ledger.send(0, 1);
        ledger.write_off(1);
        assert_eq!(ledger.outstanding(), 0);
        ledger.producing = 0;
        assert!(ledger.is_complete(), "sent and refused is not owed");
        ledger.confirm(0, 0, 1);
        assert!(!ledger.is_complete());
        ledger.receive(&id(0, 0));
        assert!(ledger.is_complete());
    }
}
