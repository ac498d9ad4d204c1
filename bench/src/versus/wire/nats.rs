//! NATS JetStream: publishes to a stream with its acks; pulls by a durable consumer, acks each message, and waits for the
//! server's word on the last ack (they are taken in order).

use std::sync::atomic::{AtomicU64, Ordering};

use super::{Batch, Dialect, Reply};

const STREAM: &str = "bench";
const SUBJECT: &str = "bench.queue";
const CONSUMER: &str = "workers";
/// Longest that a pull waits for messages, nanoseconds.
const EXPIRES_NS: u64 = 500_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Answers to come: of the stream, of the consumer.
    Opening(u32),
    Publishing {
        left: u32,
        of: u32,
    },
    /// Messages that came.
    Pulling(u32),
    Acking(u32),
}

/// One connection.
pub struct Nats {
    inbox: String,
    batch: u32,
    phase: Phase,
    /// Where acks of the messages in hand go.
    acks: Vec<String>,
    refused: Option<String>,
}

struct Delivery<'a> {
    reply: Option<&'a str>,
    /// `NATS/1.0 408 Request Timeout`, if it is a status and not a message.
    status: Option<&'a str>,
    payload: &'a [u8],
    used: usize,
}

impl Nats {
    pub fn new(batch: u32) -> Nats {
        // Of this connection alone: what a pull of an earlier one still brings must not come here.
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let inbox = format!("_INBOX.{}.{number}", std::process::id());
        Nats { inbox, batch, phase: Phase::Opening(0), acks: Vec::new(), refused: None }
    }

    fn publish(&self, out: &mut Vec<u8>, subject: &str, reply: bool, body: &[u8]) {
        let reply = if reply { self.inbox.as_str() } else { "" };
        out.extend_from_slice(format!("PUB {subject} {reply} {}\r\n", body.len()).as_bytes());
        out.extend_from_slice(body);
        out.extend_from_slice(b"\r\n");
    }

    fn ack(&mut self, out: &mut Vec<u8>) {
        let acks = std::mem::take(&mut self.acks);
        for (index, subject) in acks.iter().enumerate() {
            self.publish(out, subject, index + 1 == acks.len(), b"+ACK");
        }
        self.phase = Phase::Acking(acks.len() as u32);
    }

    fn delivered(&mut self, delivery: &Delivery<'_>, out: &mut Vec<u8>, message: &mut dyn FnMut(&[u8])) -> Reply {
        let body = delivery.payload;
        match self.phase {
            Phase::Opening(left) => {
                self.phase = Phase::Opening(left - 1);
                match (refusal(body), left) {
                    (Some(text), _) => Reply::Refused(text),
                    (None, 1) => Reply::Done(0),
                    (None, _) => Reply::More,
                }
            }
            Phase::Publishing { left, of } => {
                self.phase = Phase::Publishing { left: left - 1, of };
                let status = delivery.status.map(str::to_owned);
                self.refused = self.refused.take().or(status).or_else(|| refusal(body));
                match (left, self.refused.is_some()) {
                    (1, false) => Reply::Done(of),
                    (1, true) => Reply::Refused(self.refused.take().unwrap_or_default()),
                    _ => Reply::More,
                }
            }
            Phase::Pulling(_) if delivery.status.is_some() => match self.acks.is_empty() {
                true => Reply::Empty,
                false => {
                    self.ack(out);
                    Reply::More
                }
            },
            Phase::Pulling(came) => {
                // What has no address for an ack is the late answer to something that has ended.
                let Some(reply) = delivery.reply else { return Reply::More };
                message(body);
                self.acks.push(reply.to_owned());
                self.phase = Phase::Pulling(came + 1);
                if came + 1 == self.batch {
                    self.ack(out);
                }
                Reply::More
            }
            // A status of the pull that came late says nothing about the ack.
            Phase::Acking(_) if delivery.status.is_some() => Reply::More,
            Phase::Acking(count) => Reply::Done(count),
        }
    }
}

impl Dialect for Nats {
    fn open(&mut self, out: &mut Vec<u8>) {
        self.phase = Phase::Opening(2);
        self.acks.clear();
        self.refused = None;
        let options = "\"verbose\":false,\"pedantic\":false,\"lang\":\"rust\",\"version\":\"1\",\"protocol\":1";
        let connect =
            format!("CONNECT {{{options},\"headers\":true,\"no_responders\":true}}\r\nSUB {} 1\r\n", self.inbox);
        out.extend_from_slice(connect.as_bytes());
        let stream = serde_json::json!({
            "name": STREAM, "subjects": [SUBJECT], "storage": "file", "retention": "workqueue", "num_replicas": 1,
        });
        self.publish(out, &format!("$JS.API.STREAM.CREATE.{STREAM}"), true, stream.to_string().as_bytes());
        let consumer = serde_json::json!({
            "stream_name": STREAM,
            "config": {"durable_name": CONSUMER, "ack_policy": "explicit", "deliver_policy": "all", "max_ack_pending": -1},
        });
        let subject = format!("$JS.API.CONSUMER.DURABLE.CREATE.{STREAM}.{CONSUMER}");
        self.publish(out, &subject, true, consumer.to_string().as_bytes());
    }

    fn produce(&mut self, batch: &Batch<'_>, out: &mut Vec<u8>) {
        self.phase = Phase::Publishing { left: batch.count, of: batch.count };
        for index in 0..batch.count {
            out.extend_from_slice(format!("PUB {SUBJECT} {} {}\r\n", self.inbox, batch.bytes()).as_bytes());
            batch.write(index, out);
            out.extend_from_slice(b"\r\n");
        }
    }

    fn consume(&mut self, out: &mut Vec<u8>) {
        self.phase = Phase::Pulling(0);
        self.acks.clear();
        let body = format!("{{\"batch\":{},\"expires\":{EXPIRES_NS}}}", self.batch);
        self.publish(out, &format!("$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{CONSUMER}"), true, body.as_bytes());
    }

    fn receive(
        &mut self,
        input: &[u8],
        out: &mut Vec<u8>,
        message: &mut dyn FnMut(&[u8]),
    ) -> Result<(usize, Reply), String> {
        let mut used = 0;
        loop {
            let rest = &input[used..];
            let Some(end) = rest.windows(2).position(|bytes| bytes == b"\r\n") else { return Ok((used, Reply::More)) };
            let line = std::str::from_utf8(&rest[..end]).map_err(|_| "a line of the server that is no text")?;
            let verb = line.split_whitespace().next().unwrap_or_default();
            match verb {
                "MSG" | "HMSG" => {
                    let Some(delivery) = delivery(line, rest, end + 2)? else { return Ok((used, Reply::More)) };
                    used += delivery.used;
                    match self.delivered(&delivery, out, message) {
                        Reply::More => {}
                        reply => return Ok((used, reply)),
                    }
                }
                "PING" => {
                    out.extend_from_slice(b"PONG\r\n");
                    used += end + 2;
                }
                "INFO" | "PONG" | "+OK" => used += end + 2,
                "-ERR" => return Err(format!("the server said {line}")),
                _ => return Err(format!("an answer that is not NATS's: {line}")),
            }
        }
    }
}

/// A whole delivery at the beginning of `input`, whose first line is `line`. `None`: more must come.
fn delivery<'a>(line: &'a str, input: &'a [u8], head_bytes: usize) -> Result<Option<Delivery<'a>>, String> {
    let wrong = || format!("a delivery that makes no sense: {line}");
    // MSG subject sid [reply] bytes; HMSG subject sid [reply] header-bytes bytes.
    let words: Vec<&str> = line.split_whitespace().collect();
    let with_headers = words.first() == Some(&"HMSG");
    let fixed = if with_headers { 5 } else { 4 };
    let number = |back: usize| words.len().checked_sub(back).and_then(|at| words[at].parse::<usize>().ok());
    let bytes = number(1).ok_or_else(wrong)?;
    let header_bytes = if with_headers { number(2).ok_or_else(wrong)? } else { 0 };
    let used = head_bytes + bytes + 2;
    let Some(body) = input.get(head_bytes..used) else { return Ok(None) };
    let payload = body.get(header_bytes..bytes).ok_or_else(wrong)?;
    let headers = std::str::from_utf8(&body[..header_bytes]).map_err(|_| wrong())?;
    let first = headers.split("\r\n").next().unwrap_or_default();
    let status = first.strip_prefix("NATS/1.0 ").filter(|status| !status.is_empty());
    let reply = if words.len() > fixed { Some(words[3]) } else { None };
    Ok(Some(Delivery { reply, status, payload, used }))
}

/// What the server's JSON says went wrong, if anything did.
fn refusal(body: &[u8]) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Error {
        description: String,
    }
    #[derive(serde::Deserialize)]
    struct Answer {
        error: Option<Error>,
    }
    match serde_json::from_slice::<Answer>(body) {
        Ok(answer) => answer.error.map(|error| error.description),
        Err(_) => Some(format!("an answer that is no JSON: {}", String::from_utf8_lossy(body))),
    }
}
