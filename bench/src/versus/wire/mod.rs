//! What the other brokers speak, as conversations of the load engine: one operation outstanding on each connection, on the
//! load's own thread, by the load's own clock. Each is the handful of messages that a client of that broker sends to
//! produce, and to consume and ack; that they mean what they should is shown by reading every message back.
//!
//! A [`Dialect`] knows a broker's bytes and nothing else. [`Talk`] knows what is sent, and keeps the ledger.

mod amqp;
mod nats;
mod postgres;
mod redis;

use std::sync::Arc;

pub use amqp::{Amqp, Feed};
pub use nats::Nats;
pub use postgres::Postgres;
pub use redis::Redis;

use crate::load::ledger::Received;
use crate::load::narad::{lock, SharedLedger};
use crate::load::payload::Payloads;
use crate::load::protocol::{Begin, Outcome, Progress, Protocol, Step};
use crate::load::{Answer, Nanos};

/// Messages of one produce.
pub struct Batch<'a> {
    payloads: &'a Payloads,
    producer: u16,
    first: u64,
    now: Nanos,
    pub count: u32,
}

impl Batch<'_> {
    /// Bytes of each message.
    pub fn bytes(&self) -> usize {
        self.payloads.bytes()
    }

    /// Appends message `index`.
    pub fn write(&self, index: u32, out: &mut Vec<u8>) {
        self.payloads.write(out, self.producer, self.first + u64::from(index), self.now);
    }
}

/// What a dialect made of its input.
#[derive(Debug, PartialEq)]
pub enum Reply {
    /// More must come.
    More,
    /// The opening, or an operation of so many messages, has ended.
    Done(u32),
    /// A consume found nothing.
    Empty,
    /// The broker said no.
    Refused(String),
}

/// One broker's protocol: bytes in, bytes out.
pub trait Dialect: Send {
    /// Opens a conversation on a new connection; whatever was before is forgotten.
    fn open(&mut self, out: &mut Vec<u8>);

    /// Appends a produce. Done once each of its messages is acknowledged.
    fn produce(&mut self, batch: &Batch<'_>, out: &mut Vec<u8>);

    /// Appends a consume. Done once messages came and their acks were sent, and answered where the protocol has answers.
    fn consume(&mut self, out: &mut Vec<u8>);

    /// Looks at everything received and not yet consumed; says how much of it need not be shown again. `message` is called
    /// once with each message that was delivered.
    fn receive(
        &mut self,
        input: &[u8],
        out: &mut Vec<u8>,
        message: &mut dyn FnMut(&[u8]),
    ) -> Result<(usize, Reply), String>;
}

/// What a connection does.
#[derive(Clone)]
pub enum Task {
    Produce {
        payloads: Arc<Payloads>,
        /// Messages of one operation.
        batch: u32,
        ledger: Option<SharedLedger>,
    },
    Consume {
        verify: Option<(SharedLedger, Arc<Payloads>)>,
    },
}

/// A dialect that does a task.
pub struct Talk {
    dialect: Box<dyn Dialect>,
    task: Task,
    number: u16,
    sequence: u64,
    /// First number and count of the produce in flight.
    in_flight: Option<(u64, u32)>,
}

impl Talk {
    pub fn new(dialect: Box<dyn Dialect>, task: Task, number: u16) -> Talk {
        Talk { dialect, task, number, sequence: 0, in_flight: None }
    }

    /// The produce in flight has ended.
    fn settle(&mut self, accepted: bool) {
        let (Some((first, count)), Task::Produce { ledger, .. }) = (self.in_flight.take(), &self.task) else { return };
        let Some(ledger) = ledger else { return };
        match accepted {
            true => lock(ledger).confirm(self.number, first, u64::from(count)),
            false => lock(ledger).write_off(u64::from(count)),
        }
    }
}

fn delivered(verify: &(SharedLedger, Arc<Payloads>), message: &[u8]) {
    let (ledger, payloads) = verify;
    let mut ledger = lock(ledger);
    match payloads.read(message) {
        Ok(Some(identity)) => {
            let _: Received = ledger.receive(&identity);
        }
        Ok(None) => ledger.foreign += 1,
        Err(()) => ledger.damaged += 1,
    }
}

impl Protocol for Talk {
    fn open(&mut self, out: &mut Vec<u8>) -> bool {
        self.dialect.open(out);
        true
    }

    fn begin(&mut self, now: Nanos, out: &mut Vec<u8>) -> Begin {
        match &self.task {
            Task::Produce { payloads, batch, ledger } => {
                let count = (*batch).max(1);
                let first = match ledger {
                    Some(ledger) => lock(ledger).send(self.number, u64::from(count)),
                    None => self.sequence,
                };
                self.sequence = first + u64::from(count);
                self.in_flight = Some((first, count));
                self.dialect.produce(&Batch { payloads, producer: self.number, first, now, count }, out);
            }
            Task::Consume { .. } => self.dialect.consume(out),
        }
        Begin::Started
    }

    fn receive(&mut self, _now: Nanos, input: &[u8], out: &mut Vec<u8>) -> Result<Step, String> {
        let verify = match &self.task {
            Task::Consume { verify: Some(verify) } => Some(verify),
            _ => None,
        };
        let mut message = |bytes: &[u8]| verify.into_iter().for_each(|verify| delivered(verify, bytes));
        let (consumed, reply) = self.dialect.receive(input, out, &mut message)?;
        let result = match reply {
            Reply::More => return Ok(Step { consumed, progress: Progress::More }),
            Reply::Done(messages) => Outcome::Ok { messages },
            Reply::Empty => Outcome::Empty,
            Reply::Refused(text) => Outcome::Refused { kind: "refused".into(), text },
        };
        self.settle(matches!(result, Outcome::Ok { .. }));
        Ok(Step { consumed, progress: Progress::Done(Answer { result, close: false, pause: None }) })
    }

    fn lost(&mut self) {
        self.settle(false);
    }
}

#[cfg(test)]
mod tests;
