//! `narad pub`: one message, one message many times, or each line of standard input.

use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use argh::{ArgsInfo, FromArgs};
use base64::engine::general_purpose::STANDARD;
use base64::Engine as _;
use serde::{Deserialize, Serialize};

use super::client::{Client, Request};
use super::render::percent;
use super::whole::{Partition, Positive, Whole};
use super::{topic, Failure};

/// Send messages: the argument, a file, or each line of standard input.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "pub")]
pub struct Pub {
    #[argh(positional)]
    topic: String,
    #[argh(positional)]
    message: Option<String>,
    /// key of every message: same key, same partition
    #[argh(option, short = 'k')]
    key: Option<String>,
    /// partition of every message, whatever the key
    #[argh(option)]
    partition: Option<Partition>,
    /// send the contents of this file as one message
    #[argh(option, short = 'f')]
    file: Option<PathBuf>,
    /// send the message this many times
    #[argh(option)]
    count: Option<Positive>,
    /// at most this many messages a second
    #[argh(option)]
    rate: Option<Positive>,
    /// send up to this many messages in one request (at most 1000)
    #[argh(option)]
    batch: Option<Batch>,
}

type Batch = Whole<1, 1000>;
/// Keeps the encoded request well under the 16 MiB that the server takes.
const BATCH_PAYLOAD_BYTES_MAX: usize = 8 << 20;

#[derive(Serialize)]
struct BatchBody {
    messages: Vec<BatchMessage>,
}

#[derive(Serialize)]
struct BatchMessage {
    payload: String,
    payload_encoding: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    partition: Option<u64>,
}

#[derive(Deserialize)]
struct Accepted {
    accepted: u64,
}

struct Publisher<'a> {
    command: &'a Pub,
    client: &'a mut Client,
    started: Instant,
    accepted: u64,
    bytes: u64,
}

pub fn run(command: Pub, client: &mut Client, input: &mut dyn BufRead, err: &mut dyn Write) -> Result<(), Failure> {
    let usage = |text: &str| Err(Failure::Usage(text.to_owned()));
    match (&command.message, &command.file) {
        (Some(_), Some(_)) => return usage("give the message as an argument or as --file, not both"),
        (None, None) if command.count.is_some() => {
            return usage("--count needs a message: standard input is sent line by line, once")
        }
        _ => {}
    }
    let once = match (&command.message, &command.file) {
        (Some(message), _) => Some(message.clone().into_bytes()),
        (None, Some(path)) => {
            let read = std::fs::read(path);
            Some(read.map_err(|error| Failure::Usage(format!("cannot read {}: {error}", path.display())))?)
        }
        (None, None) => None,
    };
    let mut publisher = Publisher { command: &command, client, started: Instant::now(), accepted: 0, bytes: 0 };
    let result = match once {
        Some(message) => publisher.repeat(&message, command.count.map_or(1, |count| count.0)),
        None => publisher.lines(input),
    };
    publisher.report(result.is_err(), err)?;
    result
}

impl Publisher<'_> {
    fn repeat(&mut self, message: &[u8], count: u64) -> Result<(), Failure> {
        let Some(Whole(batch)) = self.command.batch else {
            for _ in 0..count {
                self.one(message)?;
            }
            return Ok(());
        };
        let fits = (BATCH_PAYLOAD_BYTES_MAX / message.len().max(1)).max(1);
        let mut left = count;
        while left > 0 {
            let take = left.min(batch).min(fits as u64);
            self.many(&vec![message.to_vec(); take as usize])?;
            left -= take;
        }
        Ok(())
    }

    fn lines(&mut self, input: &mut dyn BufRead) -> Result<(), Failure> {
        let mut batch: Vec<Vec<u8>> = Vec::new();
        let mut batch_bytes = 0;
        loop {
            let mut line = Vec::new();
            let read = input.read_until(b'\n', &mut line);
            let end = read.map_err(|error| Failure::Request(format!("cannot read standard input: {error}")))? == 0;
            while matches!(line.last(), Some(b'\n' | b'\r')) {
                line.pop();
            }
            if !line.is_empty() && self.command.batch.is_none() {
                self.one(&line)?;
            } else if !line.is_empty() {
                batch_bytes += line.len();
                batch.push(line);
            }
            let full = self.command.batch.is_some_and(|full| batch.len() as u64 == full.0)
                || batch_bytes >= BATCH_PAYLOAD_BYTES_MAX;
            if !batch.is_empty() && (end || full) {
                self.many(&batch)?;
                batch.clear();
                batch_bytes = 0;
            }
            if end {
                return Ok(());
            }
        }
    }

    fn one(&mut self, message: &[u8]) -> Result<(), Failure> {
        self.keep_pace();
        let mut query = Vec::new();
        if let Some(key) = &self.command.key {
            query.push(format!("key={}", percent(key.as_bytes())));
        }
        if let Some(Whole(partition)) = self.command.partition {
            query.push(format!("partition={partition}"));
        }
        let separator = if query.is_empty() { "" } else { "?" };
        let target = format!("{}/produce{separator}{}", topic::path(&self.command.topic), query.join("&"));
        let request =
            Request { content_type: Some("application/octet-stream"), body: message, ..Request::new("POST", target) };
        let response = self.client.call(&request)?;
        if response.status != 202 {
            return Err(response.failure());
        }
        // The answer says nothing but the status, and others answer 202 to whatever they are sent.
        if response.header("x-narad-shard").is_none() || !response.body.is_empty() {
            return Err(response.unknown_shape("status 202, and not as for a message that is stored"));
        }
        self.accepted += 1;
        self.bytes += message.len() as u64;
        Ok(())
    }

    fn many(&mut self, messages: &[Vec<u8>]) -> Result<(), Failure> {
        self.keep_pace();
        let encode = |message: &Vec<u8>| BatchMessage {
            payload: STANDARD.encode(message),
            payload_encoding: "base64",
            key: self.command.key.clone(),
            partition: self.command.partition.map(|partition| partition.0),
        };
        let body = serde_json::to_vec(&BatchBody { messages: messages.iter().map(encode).collect() })
            .map_err(|error| Failure::Request(error.to_string()))?;
        let target = format!("{}/produce/batch", topic::path(&self.command.topic));
        let request = Request { content_type: Some("application/json"), body: &body, ..Request::new("POST", target) };
        let response = self.client.call(&request)?;
        if response.status != 202 {
            return Err(response.failure());
        }
        let Accepted { accepted } = response.json()?;
        if accepted != messages.len() as u64 {
            return Err(Failure::Request(format!("the server accepted {accepted} of {} messages", messages.len())));
        }
        self.accepted += accepted;
        self.bytes += messages.iter().map(|message| message.len() as u64).sum::<u64>();
        Ok(())
    }

    /// Waits until the messages sent so far have used up their time.
    fn keep_pace(&self) {
        if let Some(Whole(rate)) = self.command.rate {
            let due = self.started + Duration::from_secs_f64(self.accepted as f64 / rate as f64);
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
        }
    }

    fn report(&self, failed: bool, err: &mut dyn Write) -> Result<(), Failure> {
        match self.accepted {
            0 => {}
            1 if !failed => writeln!(err, "accepted ({} bytes)", self.bytes)?,
            accepted => {
                let seconds = self.started.elapsed().as_secs_f64().max(1e-9);
                writeln!(
                    err,
                    "accepted {accepted} messages in {seconds:.2}s ({:.0} msg/s)",
                    accepted as f64 / seconds
                )?;
            }
        }
        Ok(())
    }
}
