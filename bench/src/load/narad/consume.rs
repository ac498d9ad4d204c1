//! One connection that consumes and acks.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::{lock, Budget, SharedLedger, Wire, CONSUME_BATCH_MAX};
use crate::load::http::{encode_into, number_into, parse, Response};
use crate::load::payload::Payloads;
use crate::load::protocol::{Begin, Outcome, Progress, Protocol, Step};
use crate::load::Nanos;
use crate::run::histogram;

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

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::load::ledger::Ledger;
    use crate::load::narad::tests::{request, wire};

    #[test]
    fn a_consumer_acks_what_it_got_and_keeps_the_books() {
        let ledger: SharedLedger = Arc::new(Mutex::new(Ledger::new(1)));
        lock(&ledger).send(0, 2);
        lock(&ledger).confirm(0, 0, 2);
        lock(&ledger).producing = 0;
        let payloads = Arc::new(Payloads::new(1, 100));
        let how = Consume {
            batch: 10,
            wait: Duration::from_secs(1),
            ack: true,
            budget: Budget::new(None),
            verify: Some((ledger.clone(), payloads.clone())),
        };
        let mut consumer = Consumer::new(&wire(), how);
        let mut out = Vec::new();
        assert_eq!(consumer.begin(5, &mut out), Begin::Started);
        assert!(out.starts_with(b"GET /v1/topics/a%20b/consume?max=10&wait=1000ms HTTP/1.1\r\n"));
        let mut body = b"{\"messages\":[".to_vec();
        for sequence in 0..2 {
            body.extend_from_slice(b"{\"topic\":\"t\",\"payload\":");
            payloads.write(&mut body, 0, sequence, 3);
            body.extend_from_slice(format!(",\"receipt_handle\":\"0:{sequence}:9\"}},").as_bytes());
        }
        body.pop();
        body.extend_from_slice(b"]}\n");
        let mut answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len()).into_bytes();
        answer.extend_from_slice(&body);
        out.clear();
        let step = consumer.receive(10, &answer, &mut out).unwrap();
        assert_eq!(step, Step { consumed: answer.len(), progress: Progress::More });
        assert_eq!(request(&out).1, b"{\"receipt_handles\":[\"0:0:9\",\"0:1:9\"]}");
        let body = "{\"results\":[{\"status\":204},{\"status\":410,\"error\":\"gone\"}]}\n";
        let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        let step = consumer.receive(20, answer.as_bytes(), &mut Vec::new()).unwrap();
        let one = crate::load::Answer { result: Outcome::Ok { messages: 1 }, close: false, pause: None };
        assert_eq!(step.progress, Progress::Done(one));
        assert_eq!((consumer.seen.ack_refused, consumer.seen.delivery.len(), lock(&ledger).missing), (1, 2, 0));
        assert_eq!(consumer.begin(30, &mut Vec::new()), Begin::Finished);
    }
}
