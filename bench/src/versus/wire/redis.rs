//! Redis Streams over RESP: XADD; XREADGROUP, then XACK. A batch of XADDs goes out as one pipeline.

use super::{Batch, Dialect, Reply};

const STREAM: &str = "bench";
const GROUP: &str = "workers";
/// Deepest nesting of the answers that are read here: streams, entries, fields.
const DEPTH_MAX: usize = 8;

#[derive(Debug, PartialEq)]
enum Value<'a> {
    /// A simple string, or an integer, as text.
    Text(&'a [u8]),
    Error(&'a [u8]),
    Bulk(&'a [u8]),
    Array(Vec<Value<'a>>),
    Nil,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Opening,
    /// Answers to XADD that are still to come, and how many there were to be.
    Adding {
        left: u32,
        of: u32,
    },
    Reading,
    /// An XACK of so many messages.
    Acking(u32),
}

/// One connection.
pub struct Redis {
    consumer: String,
    batch: String,
    phase: Phase,
    refused: Option<String>,
}

impl Redis {
    /// `number` tells consumers apart.
    pub fn new(number: u16, batch: u32) -> Redis {
        Redis { consumer: format!("c{number}"), batch: batch.to_string(), phase: Phase::Opening, refused: None }
    }

    fn entries<'a>(answer: &'a Value<'a>) -> Option<Vec<(&'a [u8], &'a [u8])>> {
        let array = |value: &'a Value<'a>| match value {
            Value::Array(items) => Some(items),
            _ => None,
        };
        let bulk = |value: &'a Value<'a>| match value {
            Value::Bulk(bytes) => Some(*bytes),
            _ => None,
        };
        // [[stream, [[id, [field, payload]], ...]]]
        let entries = array(array(array(answer)?.first()?)?.get(1)?)?;
        entries
            .iter()
            .map(|entry| {
                let entry = array(entry)?;
                Some((bulk(entry.first()?)?, bulk(array(entry.get(1)?)?.get(1)?)?))
            })
            .collect()
    }
}

impl Dialect for Redis {
    fn open(&mut self, out: &mut Vec<u8>) {
        self.phase = Phase::Opening;
        self.refused = None;
        command(out, &["XGROUP", "CREATE", STREAM, GROUP, "0", "MKSTREAM"]);
    }

    fn produce(&mut self, batch: &Batch<'_>, out: &mut Vec<u8>) {
        self.phase = Phase::Adding { left: batch.count, of: batch.count };
        for index in 0..batch.count {
            array_head(out, 5);
            ["XADD", STREAM, "*", "p"].iter().for_each(|word| bulk(out, word.as_bytes()));
            out.extend_from_slice(format!("${}\r\n", batch.bytes()).as_bytes());
            batch.write(index, out);
            out.extend_from_slice(b"\r\n");
        }
    }

    fn consume(&mut self, out: &mut Vec<u8>) {
        self.phase = Phase::Reading;
        let words = ["XREADGROUP", "GROUP", GROUP, &self.consumer, "COUNT", &self.batch, "STREAMS", STREAM, ">"];
        command(out, &words);
    }

    fn receive(
        &mut self,
        input: &[u8],
        out: &mut Vec<u8>,
        message: &mut dyn FnMut(&[u8]),
    ) -> Result<(usize, Reply), String> {
        let Some((value, used)) = parse(input, 0)? else { return Ok((0, Reply::More)) };
        let refusal = match &value {
            Value::Error(text) => Some(String::from_utf8_lossy(text).into_owned()),
            _ => None,
        };
        let reply = match self.phase {
            Phase::Opening => match refusal {
                Some(text) if !text.starts_with("BUSYGROUP") => Reply::Refused(text),
                _ => Reply::Done(0),
            },
            Phase::Adding { left, of } => {
                self.refused = self.refused.take().or(refusal);
                self.phase = Phase::Adding { left: left - 1, of };
                match (left, self.refused.take()) {
                    (1, None) => Reply::Done(of),
                    (1, Some(text)) => Reply::Refused(text),
                    (_, refused) => {
                        self.refused = refused;
                        Reply::More
                    }
                }
            }
            Phase::Reading => match (refusal, &value) {
                (Some(text), _) => Reply::Refused(text),
                (None, Value::Nil) => Reply::Empty,
                (None, value) => {
                    let entries = Redis::entries(value).ok_or("an answer to XREADGROUP that is no list of entries")?;
                    array_head(out, 3 + entries.len());
                    ["XACK", STREAM, GROUP].iter().for_each(|word| bulk(out, word.as_bytes()));
                    for (id, payload) in &entries {
                        message(payload);
                        bulk(out, id);
                    }
                    self.phase = Phase::Acking(entries.len() as u32);
                    Reply::More
                }
            },
            Phase::Acking(count) => match (refusal, &value) {
                (None, Value::Text(acked)) if *acked == count.to_string().as_bytes() => Reply::Done(count),
                (text, _) => Reply::Refused(text.unwrap_or_else(|| format!("XACK of {count} did not take all"))),
            },
        };
        Ok((used, reply))
    }
}

fn command(out: &mut Vec<u8>, words: &[&str]) {
    array_head(out, words.len());
    words.iter().for_each(|word| bulk(out, word.as_bytes()));
}

fn array_head(out: &mut Vec<u8>, items: usize) {
    out.extend_from_slice(format!("*{items}\r\n").as_bytes());
}

fn bulk(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(format!("${}\r\n", bytes.len()).as_bytes());
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
}

/// The first whole value and the bytes that it took. `None`: more must come.
fn parse(input: &[u8], depth: usize) -> Result<Option<(Value<'_>, usize)>, String> {
    let Some(end) = input.windows(2).position(|bytes| bytes == b"\r\n") else { return Ok(None) };
    let (line, mut used) = (&input[1..end.max(1)], end + 2);
    let length = || std::str::from_utf8(line).ok().and_then(|text| text.parse::<i64>().ok());
    let value = match input[0] {
        b'+' | b':' => Value::Text(line),
        b'-' => Value::Error(line),
        b'$' => match length().ok_or("a Redis answer without a length")? {
            ..0 => Value::Nil,
            bytes => {
                let Some(all) = input.get(used..used + bytes as usize + 2) else { return Ok(None) };
                used += all.len();
                Value::Bulk(&all[..all.len() - 2])
            }
        },
        b'*' if depth < DEPTH_MAX => match length().ok_or("a Redis answer without a length")? {
            ..0 => Value::Nil,
            items => {
                let mut array = Vec::new();
                for _ in 0..items {
                    let Some((item, more)) = parse(&input[used..], depth + 1)? else { return Ok(None) };
                    array.push(item);
                    used += more;
                }
                Value::Array(array)
            }
        },
        other => return Err(format!("an answer that is not Redis's: it begins with {:?}", char::from(other))),
    };
    Ok(Some((value, used)))
}
