//! One connection that produces.

use std::sync::Arc;

use super::{lock, Budget, SharedLedger, Wire};
use crate::load::http::{number_into, parse};
use crate::load::payload::Payloads;
use crate::load::protocol::{Begin, Outcome, Progress, Protocol, Step};
use crate::load::Nanos;

const KEY_DIGITS: usize = 6;
/// Keys that [`KEY_DIGITS`] can tell apart.
pub const KEYS_MAX: u32 = 1 << (4 * KEY_DIGITS);

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

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::load::ledger::Ledger;
    use crate::load::narad::tests::{request, wire};
    use crate::load::narad::SharedLedger;

    fn what(batch: u32, keys: u32) -> Produce {
        let (payloads, budget) = (Arc::new(Payloads::new(1, 100)), Budget::new(Some(5)));
        Produce { payloads, batch, keys, budget, ledger: None, ahead_max: 0 }
    }

    #[test]
    fn a_single_produce_carries_key_and_length() {
        let mut out = Vec::new();
        let mut producer = Producer::new(&wire(), what(1, 1000), 0);
        assert_eq!(producer.begin(0, &mut out), Begin::Started);
        out.clear();
        producer.begin(0, &mut out);
        let (head, body) = request(&out);
        assert!(
            head.starts_with("POST /v1/topics/a%20b/produce?key=k000001 HTTP/1.1\r\nHost: 127.0.0.1:1\r\n"),
            "{head}"
        );
        assert_eq!(body.len(), 100);
    }

    #[test]
    fn the_last_batch_is_what_the_budget_leaves() {
        let mut producer = Producer::new(&wire(), what(3, 2), 0);
        let mut sizes = Vec::new();
        loop {
            let mut out = Vec::new();
            if producer.begin(0, &mut out) == Begin::Finished {
                break;
            }
            let body: serde_json::Value = serde_json::from_slice(&request(&out).1).unwrap();
            let messages = body["messages"].as_array().unwrap().clone();
            assert!(messages.iter().all(|message| message["key"].as_str().unwrap().len() == 7));
            sizes.push(messages.len());
        }
        assert_eq!(sizes, [3, 2]);
        assert_eq!(producer.begin(-1, &mut Vec::new()), Begin::Started, "the warm-up is free");
    }

    #[test]
    fn a_producer_with_too_much_outstanding_waits() {
        let ledger: SharedLedger = Arc::new(Mutex::new(Ledger::new(1)));
        let limited = Produce { ledger: Some(ledger.clone()), ahead_max: 2, ..what(2, 0) };
        let mut producer = Producer::new(&wire(), limited, 0);
        assert_eq!(producer.begin(0, &mut Vec::new()), Begin::Started);
        assert_eq!(producer.begin(0, &mut Vec::new()), Begin::NotYet);
        producer.lost();
        assert_eq!(producer.begin(0, &mut Vec::new()), Begin::Started, "what was lost is not waited for");
        let answer = b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n";
        producer.receive(0, answer, &mut Vec::new()).unwrap();
        let ledger = lock(&ledger);
        assert_eq!((ledger.confirmed, ledger.missing), (2, 2));
    }
}
