//! `narad sub`: consume and ack, or look without touching (`--peek`).

use std::io::Write;
use std::time::Duration;

use argh::{ArgsInfo, FromArgs};
use narad_shards::io::signals;

use super::client::{Client, Request, Response};
use super::render::{percent, Message};
use super::topic::{self, Details};
use super::whole::{Any, Partition, Positive, Whole};
use super::Failure;

/// Receive messages until interrupted.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "sub")]
pub struct Sub {
    #[argh(positional)]
    topic: String,
    /// do not ack: messages come again after the visibility timeout
    #[argh(switch)]
    no_ack: bool,
    /// read along from the current end, without taking messages from consumers
    #[argh(switch)]
    peek: bool,
    /// print payloads only
    #[argh(switch)]
    raw: bool,
    /// stop after this many messages
    #[argh(option)]
    count: Option<Positive>,
    /// this partition only
    #[argh(option)]
    partition: Option<Partition>,
    /// with --peek: first offset to read
    #[argh(option)]
    from: Option<Any>,
}

const WAIT: Duration = Duration::from_secs(10);
const PEEK_EVERY: Duration = Duration::from_millis(500);
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Consecutive refusals that are borne.
const REFUSALS_MAX: u32 = 30;
const ACK_ATTEMPTS: u32 = 5;
const ACK_PAUSE: Duration = Duration::from_millis(100);

pub fn run(command: Sub, client: &mut Client, out: &mut dyn Write, err: &mut dyn Write) -> Result<(), Failure> {
    if command.from.is_some() && !command.peek {
        return Err(Failure::Usage("--from needs --peek: a queue has no offset to start from".to_owned()));
    }
    if command.peek && command.no_ack {
        return Err(Failure::Usage("--no-ack goes without saying with --peek".to_owned()));
    }
    client.watch_interrupts(signals::catch_interrupts());
    let mut session = Session { command: &command, client, out, err, received: 0 };
    let result = match command.peek {
        true => session.peek(),
        false => session.consume(),
    };
    let received = session.received;
    match result {
        Err(Failure::OutputClosed) => return Err(Failure::OutputClosed),
        Ok(()) | Err(Failure::Interrupted) => {}
        Err(failure) => {
            writeln!(err, "{received} message(s) received")?;
            return Err(failure);
        }
    }
    Ok(writeln!(err, "{received} message(s) received")?)
}

struct Session<'a> {
    command: &'a Sub,
    client: &'a mut Client,
    out: &'a mut dyn Write,
    err: &'a mut dyn Write,
    received: u64,
}

impl Session<'_> {
    fn finished(&self) -> bool {
        self.command.count.is_some_and(|count| self.received >= count.0)
    }

    fn consume(&mut self) -> Result<(), Failure> {
        let mut target = format!("{}/consume?wait={}s", topic::path(&self.command.topic), WAIT.as_secs());
        if let Some(Whole(partition)) = self.command.partition {
            target.push_str(&format!("&partition={partition}"));
        }
        while !self.finished() {
            let request = Request { wait: WAIT, ..Request::new("GET", target.clone()) };
            let response = self.call_patiently(&request)?;
            match response.status {
                200 => {
                    let message: Message = response.json()?;
                    self.print(&message)?;
                    if let (Some(handle), false) = (&message.receipt_handle, self.command.no_ack) {
                        self.ack(&message, handle)?;
                    }
                }
                204 => {}
                _ => return Err(response.failure()),
            }
        }
        Ok(())
    }

    /// Bears "not now" for a while, so that a restart of the broker does not end a subscription.
    fn call_patiently(&mut self, request: &Request<'_>) -> Result<Response, Failure> {
        let mut refusals = 0;
        loop {
            if self.client.is_interrupted() {
                return Err(Failure::Interrupted);
            }
            let response = self.client.call(request)?;
            if !matches!(response.status, 421 | 429 | 502 | 503) || refusals == REFUSALS_MAX {
                return Ok(response);
            }
            if refusals == 0 {
                writeln!(self.err, "{} ({}), trying again", response.error_text(), response.status)?;
            }
            refusals += 1;
            self.client.pause(response.retry_after().unwrap_or(RETRY_AFTER))?;
        }
    }

    fn print(&mut self, message: &Message) -> Result<(), Failure> {
        message.print(self.command.raw, self.out)?;
        self.received += 1;
        Ok(())
    }

    /// An ack whose fate is unknown is sent again; a `410` after that most likely means that the first one landed.
    fn ack(&mut self, message: &Message, handle: &str) -> Result<(), Failure> {
        let target = format!("{}/ack?receipt_handle={}", topic::path(&self.command.topic), percent(handle.as_bytes()));
        let request = Request { content_type: Some("application/json"), ..Request::new("POST", target) };
        let mut may_have_landed = false;
        let mut last = String::new();
        for attempt in 0..ACK_ATTEMPTS {
            if attempt > 0 {
                // Not `Client::pause`: what was printed is acked even when a signal has come.
                std::thread::sleep(ACK_PAUSE * (1 << attempt));
            }
            match self.client.call(&request) {
                Ok(response) => match response.status {
                    204 => return Ok(()),
                    410 if may_have_landed => return Ok(()),
                    421 | 429 | 500 | 502 | 503 => {
                        may_have_landed |= matches!(response.status, 500 | 502);
                        last = format!("{} ({})", response.error_text(), response.status);
                    }
                    _ => {
                        last = format!("{} ({})", response.error_text(), response.status);
                        break;
                    }
                },
                Err(Failure::Unreachable(why)) => {
                    may_have_landed = true;
                    last = why;
                }
                // The read was interrupted, not the ack: ask again, once the signal is noted.
                Err(Failure::Interrupted) => may_have_landed = true,
                Err(other) => return Err(other),
            }
        }
        let (partition, offset) = (message.partition, message.offset);
        writeln!(self.err, "[p{partition} @{offset}] is not acked and will come again: {last}")?;
        Ok(())
    }

    fn peek(&mut self) -> Result<(), Failure> {
        let mut cursors = self.peek_cursors()?;
        loop {
            let mut idle = true;
            for (partition, offset) in &mut cursors {
                let target =
                    format!("{}/consume?offset={offset}&partition={partition}", topic::path(&self.command.topic));
                let response = self.call_patiently(&Request::new("GET", target))?;
                match response.status {
                    200 => {
                        self.print(&response.json()?)?;
                        *offset += 1;
                    }
                    204 => continue,
                    410 => *offset = topic::after_gap(&response.error_text(), *offset),
                    _ => return Err(response.failure()),
                }
                idle = false;
                if self.finished() {
                    return Ok(());
                }
            }
            if idle {
                self.client.pause(PEEK_EVERY)?;
            }
        }
    }

    /// Where to begin in each partition.
    fn peek_cursors(&mut self) -> Result<Vec<(u64, u64)>, Failure> {
        if let (Some(Whole(partition)), Some(Whole(from))) = (self.command.partition, self.command.from) {
            return Ok(vec![(partition, from)]);
        }
        let partition = self.command.partition.map(|partition| partition.0);
        let details = Details::ask(self.client, &self.command.topic, partition)?;
        if let Some(down) = details.partition_stats.iter().find(|stats| !stats.is_known()) {
            return Err(Failure::Request(format!(
                "the owner of partition {} does not answer, so its end is unknown: give --partition and --from",
                down.index
            )));
        }
        Ok(details
            .partition_stats
            .iter()
            .map(|stats| (stats.index, self.command.from.map_or(stats.high_watermark, |from| from.0)))
            .collect())
    }
}
