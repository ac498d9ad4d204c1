//! The product's HTTP API as conversations: produce, and consume with ack, single or in batches.

mod consume;
mod produce;

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use consume::{Consume, Consumed, Consumer};
pub use produce::{Produce, Producer, KEYS_MAX};

use super::http::encode_into;
use super::ledger::Ledger;
use super::protocol::{Begin, Protocol, Step};
use super::target::Target;
use super::Nanos;

/// Most messages of one batch produce, and of one batch consume or ack.
pub const PRODUCE_BATCH_MAX: u32 = 1000;
pub const CONSUME_BATCH_MAX: u32 = 100;

/// A ledger that several connections, perhaps on several threads, keep.
pub type SharedLedger = Arc<Mutex<Ledger>>;

pub fn lock(ledger: &Mutex<Ledger>) -> MutexGuard<'_, Ledger> {
    ledger.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Messages that are still to be moved, of a number that all connections share.
#[derive(Clone, Debug)]
pub struct Budget(Option<Arc<AtomicI64>>);

impl Budget {
    /// `None` is without end.
    pub fn new(messages: Option<u64>) -> Budget {
        Budget(messages.map(|messages| Arc::new(AtomicI64::new(i64::try_from(messages).unwrap_or(i64::MAX)))))
    }

    /// Up to `count` messages; 0 when all are taken. The warm-up takes nothing away.
    fn take(&self, now: Nanos, count: u32) -> u32 {
        match &self.0 {
            Some(left) if now >= 0 => {
                left.fetch_sub(i64::from(count), Ordering::Relaxed).clamp(0, i64::from(count)) as u32
            }
            _ => count,
        }
    }

    fn is_spent(&self) -> bool {
        self.0.as_ref().is_some_and(|left| left.load(Ordering::Relaxed) <= 0)
    }
}

/// Where requests go: what all of them have in common.
#[derive(Clone, Debug)]
pub struct Wire {
    /// `/v1/topics/<topic>`.
    path: String,
    lines: String,
}

impl Wire {
    pub fn new(target: &Target, topic: &str) -> Wire {
        let mut escaped = Vec::new();
        encode_into(&mut escaped, topic.as_bytes());
        let escaped = String::from_utf8_lossy(&escaped).into_owned();
        Wire { path: format!("/v1/topics/{escaped}"), lines: target.header_lines() }
    }

    /// A POST up to, not including, the number of its body's bytes.
    fn post(&self, route: &str) -> Vec<u8> {
        let (path, lines) = (&self.path, &self.lines);
        format!("POST {path}/{route} HTTP/1.1\r\n{lines}Content-Type: application/json\r\nContent-Length: ")
            .into_bytes()
    }
}

/// One connection of a run that does both.
pub enum Client {
    Producer(Box<Producer>),
    Consumer(Box<Consumer>),
}

impl Client {
    pub fn producer(wire: &Wire, what: Produce, number: u16) -> Client {
        Client::Producer(Box::new(Producer::new(wire, what, number)))
    }

    pub fn consumer(wire: &Wire, how: Consume) -> Client {
        Client::Consumer(Box::new(Consumer::new(wire, how)))
    }

    /// What all consumers among `clients` saw.
    pub fn consumed(clients: &[Client]) -> Consumed {
        let mut sum = Consumed::new();
        for client in clients {
            if let Client::Consumer(consumer) = client {
                sum.merge(&consumer.seen);
            }
        }
        sum
    }
}

impl Protocol for Client {
    fn begin(&mut self, now: Nanos, out: &mut Vec<u8>) -> Begin {
        match self {
            Client::Producer(producer) => producer.begin(now, out),
            Client::Consumer(consumer) => consumer.begin(now, out),
        }
    }

    fn receive(&mut self, now: Nanos, input: &[u8], out: &mut Vec<u8>) -> Result<Step, String> {
        match self {
            Client::Producer(producer) => producer.receive(now, input, out),
            Client::Consumer(consumer) => consumer.receive(now, input, out),
        }
    }

    fn lost(&mut self) {
        match self {
            Client::Producer(producer) => producer.lost(),
            Client::Consumer(consumer) => consumer.lost(),
        }
    }

    fn over(&mut self) {
        match self {
            Client::Producer(producer) => producer.over(),
            Client::Consumer(consumer) => consumer.over(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub fn wire() -> Wire {
        let url = ["http://127.0.0.1:1".to_owned()];
        Wire::new(&Target::parse(&url, &Default::default()).unwrap(), "a b")
    }

    /// Head and body of the one request in `out`, whose length must be what it says.
    pub fn request(out: &[u8]) -> (String, Vec<u8>) {
        let end = out.windows(4).position(|bytes| bytes == b"\r\n\r\n").unwrap() + 4;
        let head = String::from_utf8(out[..end].to_vec()).unwrap();
        let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: ")).unwrap();
        assert_eq!(length.parse(), Ok(out.len() - end));
        (head, out[end..].to_vec())
    }
}
