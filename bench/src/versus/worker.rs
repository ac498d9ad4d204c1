//! One connection of a load on any of the brokers: its conversation, and the count of what is left in the queue.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

use super::wire::Talk;
use crate::load::clock::nanos;
use crate::load::narad::{lock, Client, SharedLedger};
use crate::load::protocol::{Begin, Outcome, Progress, Protocol, Step};
use crate::load::Nanos;

/// A drain is over when nothing came for that long.
const DRAINED_AFTER: Duration = Duration::from_secs(4);

/// Messages in a queue, as far as answers told. It may hold more: what was stored and not answered.
#[derive(Debug, Default)]
pub struct Stock {
    left: AtomicI64,
    ever: AtomicU64,
}

impl Stock {
    /// Waiting to be consumed.
    pub fn left(&self) -> i64 {
        self.left.load(Ordering::Relaxed)
    }

    /// Produced since the beginning.
    pub fn ever(&self) -> u64 {
        self.ever.load(Ordering::Relaxed)
    }

    /// Nothing is left.
    pub fn empty(&self) {
        self.left.store(0, Ordering::Relaxed);
    }

    fn add(&self, messages: u32) {
        self.left.fetch_add(i64::from(messages), Ordering::Relaxed);
        self.ever.fetch_add(u64::from(messages), Ordering::Relaxed);
    }

    /// Sets `messages` aside, if as many and `spare` more are there.
    fn take(&self, messages: i64, spare: i64) -> bool {
        let enough = self.left.fetch_sub(messages, Ordering::Relaxed) >= messages + spare;
        if !enough {
            self.give_back(messages);
        }
        enough
    }

    fn give_back(&self, messages: i64) {
        self.left.fetch_add(messages, Ordering::Relaxed);
    }
}

/// When a connection stops by itself.
#[derive(Clone)]
pub enum Stop {
    /// Not before the time is over.
    Never,
    /// Producers: when the stock has grown to this.
    Filled(i64),
    /// Consumers: when so many messages are left. The last ones of a queue are not measured: consumers compete for them.
    Consumed(i64),
    /// Consumers: when all confirmed messages came back, or none did for a while (since the time in the second part).
    Drained(SharedLedger, Arc<AtomicI64>),
}

/// What it speaks.
pub enum Conversation {
    Narad(Client),
    Other(Talk),
}

macro_rules! conversation {
    ($self:ident, $inner:ident => $call:expr) => {
        match &mut $self.conversation {
            Conversation::Narad($inner) => $call,
            Conversation::Other($inner) => $call,
        }
    };
}

/// One connection.
pub struct Worker {
    conversation: Conversation,
    produces: bool,
    batch: u32,
    stock: Arc<Stock>,
    stop: Stop,
    /// Taken from the stock for the consume in flight.
    reserved: i64,
}

impl Worker {
    pub fn new(conversation: Conversation, produces: bool, batch: u32, stock: Arc<Stock>, stop: Stop) -> Worker {
        Worker { conversation, produces, batch, stock, stop, reserved: 0 }
    }

    fn is_finished(&mut self, now: Nanos) -> bool {
        match &self.stop {
            Stop::Never => false,
            Stop::Filled(goal) => self.stock.left() >= *goal,
            Stop::Consumed(spare) => {
                let batch = i64::from(self.batch);
                let enough = self.stock.take(batch, *spare);
                self.reserved = if enough { batch } else { 0 };
                !enough
            }
            Stop::Drained(ledger, last) => {
                lock(ledger).is_complete() || now - last.load(Ordering::Relaxed) > nanos(DRAINED_AFTER)
            }
        }
    }

    /// The consume in flight brought so many messages.
    fn give_back(&mut self, came: u32) {
        let reserved = std::mem::take(&mut self.reserved);
        if reserved > 0 {
            self.stock.give_back(reserved - i64::from(came));
        }
    }
}

impl Protocol for Worker {
    fn open(&mut self, out: &mut Vec<u8>) -> bool {
        conversation!(self, inner => inner.open(out))
    }

    fn begin(&mut self, now: Nanos, out: &mut Vec<u8>) -> Begin {
        if self.is_finished(now) {
            return Begin::Finished;
        }
        let begin = conversation!(self, inner => inner.begin(now, out));
        if begin != Begin::Started {
            self.give_back(0);
        }
        begin
    }

    fn receive(&mut self, now: Nanos, input: &[u8], out: &mut Vec<u8>) -> Result<Step, String> {
        let step = conversation!(self, inner => inner.receive(now, input, out))?;
        if let Progress::Done(answer) = &step.progress {
            let messages = match answer.result {
                Outcome::Ok { messages } => messages,
                Outcome::Empty | Outcome::Refused { .. } => 0,
            };
            if self.produces {
                self.stock.add(messages);
            } else {
                self.give_back(messages);
            }
            if let (Stop::Drained(_, last), 1..) = (&self.stop, messages) {
                last.store(now, Ordering::Relaxed);
            }
        }
        Ok(step)
    }

    fn lost(&mut self) {
        self.give_back(0);
        conversation!(self, inner => inner.lost());
    }

    fn over(&mut self) {
        conversation!(self, inner => inner.over());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::payload::Payloads;
    use crate::versus::wire::{Redis, Task};

    fn worker(produces: bool, batch: u32, stock: &Arc<Stock>, stop: Stop) -> Worker {
        let task = match produces {
            true => Task::Produce { payloads: Arc::new(Payloads::new(1, 64)), batch, ledger: None },
            false => Task::Consume { verify: None },
        };
        let talk = Talk::new(Box::new(Redis::new(0, batch)), task, 0);
        Worker::new(Conversation::Other(talk), produces, batch, stock.clone(), stop)
    }

    fn answer(worker: &mut Worker, text: &[u8]) {
        let mut rest = text;
        while !rest.is_empty() {
            let step = worker.receive(0, rest, &mut Vec::new()).unwrap();
            rest = &rest[step.consumed..];
        }
    }

    #[test]
    fn producers_fill_the_stock_to_its_goal() {
        let stock = Arc::new(Stock::default());
        let mut producer = worker(true, 2, &stock, Stop::Filled(2));
        assert_eq!(producer.begin(0, &mut Vec::new()), Begin::Started);
        answer(&mut producer, b"$1\r\n1\r\n$1\r\n2\r\n");
        assert_eq!((stock.left(), stock.ever()), (2, 2));
        assert_eq!(producer.begin(0, &mut Vec::new()), Begin::Finished);
    }

    #[test]
    fn consumers_take_no_more_than_there_is_and_give_back_what_did_not_come() {
        let stock = Arc::new(Stock::default());
        stock.add(3);
        let mut consumer = worker(false, 2, &stock, Stop::Consumed(1));
        assert_eq!(consumer.begin(0, &mut Vec::new()), Begin::Started);
        assert_eq!(worker(false, 2, &stock, Stop::Consumed(0)).begin(0, &mut Vec::new()), Begin::Finished);
        answer(&mut consumer, b"*-1\r\n");
        assert_eq!(stock.left(), 3, "nothing came");
        consumer.begin(0, &mut Vec::new());
        consumer.lost();
        assert_eq!(stock.left(), 3, "the connection was lost");
    }
}
