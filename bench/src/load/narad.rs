//! The product's HTTP API as conversations: produce, and consume with ack, single or in batches (http-api.md §13 to §19).

use std::borrow::Cow;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::http::{encode_into, number_into, parse, Response};
use super::ledger::Ledger;
use super::payload::Payloads;
use super::protocol::{Begin, Outcome, Progress, Protocol, Step};
use super::target::Target;
use super::Nanos;
use crate::run::histogram;

/// Most messages of one batch produce, and of one batch consume or ack.
pub const PRODUCE_BATCH_MAX: u32 = 1000;
pub const CONSUME_BATCH_MAX: u32 = 100;
const KEY_DIGITS: usize = 6;
/// Keys that [`KEY_DIGITS`] can tell apart.
pub const KEYS_MAX: u32 = 1 << (4 * KEY_DIGITS);

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

/// What a producer sends.
#[derive(Clone, Debug)]
pub struct Produce {
    pub payloads: Arc<Payloads>,
    /// Messages of one request; above 1 the batch route is used.
    pub batch: u32,
    /// Different keys; 0 sends none.
    pub keys: u32,
    pub budget: Budget,
    pub ledger: Option<SharedLedger>,
    /// With a ledger: messages that may be sent before as many came back; 0 is no limit.
    pub ahead_max: u64,
}

/// One connection that produces.
pub struct Producer {
    what: Produce,
    number: u16,
    head: Vec<u8>,
    /// Where the key's digits stand in `head` (single produce with keys).
    key_at: Option<usize>,
    body: Vec<u8>,
    sequence: u64,
    /// First number and count of the operation in flight.
    in_flight: Option<(u64, u32)>,
    over: bool,
}

impl Producer {
    pub fn new(wire: &Wire, what: Produce, number: u16) -> Producer {
        let single = what.batch <= 1;
        let (head, key_at) = match (single, what.keys) {
            (false, _) => (wire.post("produce/batch"), None),
            (true, 0) => (wire.post("produce"), None),
            (true, _) => {
                let digits = "0".repeat(KEY_DIGITS);
                let key_at = format!("POST {}/produce?key=k", wire.path).len();
                (wire.post(&format!("produce?key=k{digits}")), Some(key_at))
            }
        };
        Producer { what, number, head, key_at, body: Vec::new(), sequence: 0, in_flight: None, over: false }
    }

    fn key(&self, sequence: u64) -> [u8; KEY_DIGITS] {
        let mut digits = [b'0'; KEY_DIGITS];
        // Producers start at different keys.
        let mut key = (sequence + u64::from(self.number) * 7919) % u64::from(self.what.keys.max(1));
        for digit in digits.iter_mut().rev() {
            *digit = b"0123456789abcdef"[(key & 15) as usize];
            key >>= 4;
        }
        digits
    }

    fn write_single(&mut self, first: u64, now: Nanos, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&self.head);
        if let Some(at) = self.key_at {
            out[start + at..][..KEY_DIGITS].copy_from_slice(&self.key(first));
        }
        number_into(out, self.what.payloads.bytes() as u64);
        out.extend_from_slice(b"\r\n\r\n");
        self.what.payloads.write(out, self.number, first, now);
    }

    fn write_batch(&mut self, first: u64, count: u32, now: Nanos, out: &mut Vec<u8>) {
        let mut body = std::mem::take(&mut self.body);
        body.clear();
        body.extend_from_slice(b"{\"messages\":[");
        for sequence in first..first + u64::from(count) {
            if sequence > first {
                body.push(b',');
            }
            body.extend_from_slice(b"{\"payload\":");
            self.what.payloads.write(&mut body, self.number, sequence, now);
            if self.what.keys > 0 {
                body.extend_from_slice(b",\"key\":\"k");
                body.extend_from_slice(&self.key(sequence));
                body.push(b'"');
            }
            body.push(b'}');
        }
        body.extend_from_slice(b"]}");
        out.extend_from_slice(&self.head);
        number_into(out, body.len() as u64);
        out.extend_from_slice(b"\r\n\r\n");
        out.extend_from_slice(&body);
        self.body = body;
    }
}

impl Protocol for Producer {
    fn begin(&mut self, now: Nanos, out: &mut Vec<u8>) -> Begin {
        let limited = self.what.ahead_max > 0;
        if let Some(ledger) = self.what.ledger.as_ref().filter(|_| limited) {
            if lock(ledger).outstanding() >= self.what.ahead_max {
                return Begin::NotYet;
            }
        }
        let count = self.what.budget.take(now, self.what.batch.max(1));
        if count == 0 {
            return Begin::Finished;
        }
        let first = match &self.what.ledger {
            Some(ledger) => lock(ledger).send(self.number, u64::from(count)),
            None => self.sequence,
        };
        self.sequence = first + u64::from(count);
        self.in_flight = Some((first, count));
        match self.what.batch {
            0 | 1 => self.write_single(first, now, out),
            _ => self.write_batch(first, count, now, out),
        }
        Begin::Started
    }

    fn receive(&mut self, _now: Nanos, input: &[u8], _out: &mut Vec<u8>) -> Result<Step, String> {
        let Some(response) = parse(input)? else { return Ok(Step { consumed: 0, progress: Progress::More }) };
        let (first, count) = self.in_flight.take().ok_or("an answer that nobody asked for")?;
        let accepted = response.status == 202;
        if let Some(ledger) = &self.what.ledger {
            match accepted {
                true => lock(ledger).confirm(self.number, first, u64::from(count)),
                false => lock(ledger).write_off(u64::from(count)),
            }
        }
        let answer = match accepted {
            true => response.answer(Outcome::Ok { messages: count }),
            false => response.refusal(),
        };
        Ok(Step { consumed: response.consumed, progress: Progress::Done(answer) })
    }

    fn lost(&mut self) {
        if let (Some((_, count)), Some(ledger)) = (self.in_flight.take(), &self.what.ledger) {
            lock(ledger).write_off(u64::from(count));
        }
    }

    fn over(&mut self) {
        if let (false, Some(ledger)) = (self.over, &self.what.ledger) {
            lock(ledger).producing -= 1;
        }
        self.over = true;
    }
}

/// How a consumer asks.
#[derive(Clone, Debug)]
pub struct Consume {
    /// Most messages of one answer; above 1 the batch routes are used.
    pub batch: u32,
    /// How long the server waits for messages when there are none.
    pub wait: Duration,
    /// Without: messages are leased and left to lapse.
    pub ack: bool,
    pub budget: Budget,
    /// With it: until everything confirmed came back.
    pub verify: Option<(SharedLedger, Arc<Payloads>)>,
}

/// What a consumer saw in the measured time, beyond the operations themselves.
#[derive(Clone, Debug)]
pub struct Consumed {
    /// From the ack's request to its answer.
    pub ack: Histogram<u64>,
    /// From the send of a produce to the arrival of its message here.
    pub delivery: Histogram<u64>,
    /// Acks that were refused, warm-up included.
    pub ack_refused: u64,
}

impl Consumed {
    pub fn new() -> Consumed {
        Consumed { ack: histogram(), delivery: histogram(), ack_refused: 0 }
    }

    pub fn merge(&mut self, other: &Consumed) {
        self.ack += &other.ack;
        self.delivery += &other.delivery;
        self.ack_refused += other.ack_refused;
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Consuming,
    /// So many messages.
    Acking {
        messages: u32,
        sent: Nanos,
    },
}

/// One connection that consumes and acks.
pub struct Consumer {
    how: Consume,
    request: Vec<u8>,
    ack_head: Vec<u8>,
    ack_head_single: Vec<u8>,
    ack_tail_single: Vec<u8>,
    body: Vec<u8>,
    phase: Phase,
    pub seen: Consumed,
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow)]
    payload: &'a RawValue,
    #[serde(borrow)]
    receipt_handle: Cow<'a, str>,
}

#[derive(Deserialize)]
struct Messages<'a> {
    #[serde(borrow)]
    messages: Vec<Message<'a>>,
}

#[derive(Deserialize)]
struct AckResult {
    status: u16,
}

#[derive(Deserialize)]
struct AckResults {
    results: Vec<AckResult>,
}

impl Consumer {
    pub fn new(wire: &Wire, how: Consume) -> Consumer {
        let mut query = format!("wait={}ms", how.wait.as_millis());
        if how.batch > 1 {
            query = format!("max={}&{query}", how.batch.min(CONSUME_BATCH_MAX));
        }
        let request = format!("GET {}/consume?{query} HTTP/1.1\r\n{}\r\n", wire.path, wire.lines).into_bytes();
        let content = "Content-Type: application/json\r\nContent-Length: 0\r\n\r\n";
        Consumer {
            how,
            request,
            ack_head: wire.post("ack"),
            ack_head_single: format!("POST {}/ack?receipt_handle=", wire.path).into_bytes(),
            ack_tail_single: format!(" HTTP/1.1\r\n{}{content}", wire.lines).into_bytes(),
            body: Vec::new(),
            phase: Phase::Consuming,
            seen: Consumed::new(),
        }
    }

    fn consumed(&mut self, now: Nanos, response: &Response<'_>, out: &mut Vec<u8>) -> Result<Progress, String> {
        match response.status {
            200 => {}
            204 => return Ok(Progress::Done(response.answer(Outcome::Empty))),
            _ => return Ok(Progress::Done(response.refusal())),
        }
        let unreadable = |error| format!("a consume's answer is not what was expected: {error}");
        let messages = match self.how.batch {
            0 | 1 => vec![serde_json::from_slice::<Message>(&response.body).map_err(unreadable)?],
            _ => serde_json::from_slice::<Messages>(&response.body).map_err(unreadable)?.messages,
        };
        self.verify(now, &messages);
        let count = messages.len() as u32;
        if !self.how.ack {
            self.how.budget.take(now, count);
            return Ok(Progress::Done(response.answer(Outcome::Ok { messages: count })));
        }
        self.phase = Phase::Acking { messages: count, sent: now };
        if self.how.batch <= 1 {
            out.extend_from_slice(&self.ack_head_single);
            encode_into(out, messages[0].receipt_handle.as_bytes());
            out.extend_from_slice(&self.ack_tail_single);
            return Ok(Progress::More);
        }
        let body = &mut self.body;
        body.clear();
        body.extend_from_slice(b"{\"receipt_handles\":[");
        for (index, message) in messages.iter().enumerate() {
            if index > 0 {
                body.push(b',');
            }
            body.push(b'"');
            body.extend_from_slice(message.receipt_handle.as_bytes());
            body.push(b'"');
        }
        body.extend_from_slice(b"]}");
        out.extend_from_slice(&self.ack_head);
        number_into(out, body.len() as u64);
        out.extend_from_slice(b"\r\n\r\n");
        out.extend_from_slice(body);
        Ok(Progress::More)
    }

    fn verify(&mut self, now: Nanos, messages: &[Message<'_>]) {
        let Some((ledger, payloads)) = &self.how.verify else { return };
        let mut ledger = lock(ledger);
        for message in messages {
            match payloads.read(message.payload.get().as_bytes()) {
                Ok(Some(identity)) => {
                    ledger.receive(&identity);
                    if identity.sent >= 0 {
                        self.seen.delivery.saturating_record((now - identity.sent).max(1) as u64);
                    }
                }
                Ok(None) => ledger.foreign += 1,
                Err(()) => ledger.damaged += 1,
            }
        }
    }

    fn acked(&mut self, now: Nanos, response: &Response<'_>, messages: u32, sent: Nanos) -> Result<Progress, String> {
        let settled = match response.status {
            204 => messages,
            200 => {
                let results: AckResults = serde_json::from_slice(&response.body)
                    .map_err(|error| format!("a batch ack's answer is not what was expected: {error}"))?;
                results.results.iter().filter(|result| result.status == 204).count() as u32
            }
            _ => 0,
        };
        self.seen.ack_refused += u64::from(messages - settled.min(messages));
        if sent >= 0 {
            self.seen.ack.saturating_record((now - sent).max(1) as u64);
        }
        self.how.budget.take(now, settled);
        Ok(Progress::Done(match settled {
            0 => response.refusal(),
            messages => response.answer(Outcome::Ok { messages }),
        }))
    }
}

impl Protocol for Consumer {
    fn begin(&mut self, _now: Nanos, out: &mut Vec<u8>) -> Begin {
        let complete = self.how.verify.as_ref().is_some_and(|(ledger, _)| lock(ledger).is_complete());
        if complete || self.how.budget.is_spent() {
            return Begin::Finished;
        }
        self.phase = Phase::Consuming;
        out.extend_from_slice(&self.request);
        Begin::Started
    }

    fn receive(&mut self, now: Nanos, input: &[u8], out: &mut Vec<u8>) -> Result<Step, String> {
        let Some(response) = parse(input)? else { return Ok(Step { consumed: 0, progress: Progress::More }) };
        let progress = match self.phase {
            Phase::Consuming => self.consumed(now, &response, out)?,
            Phase::Acking { messages, sent } => self.acked(now, &response, messages, sent)?,
        };
        Ok(Step { consumed: response.consumed, progress })
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
#[path = "narad_tests.rs"]
mod tests;
