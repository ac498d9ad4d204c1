//! `narad replay`: prints a range of a partition again. Nothing is leased and no consumer misses anything for it.

use std::io::Write;

use argh::{ArgsInfo, FromArgs};
use narad_shards::io::signals;

use super::client::{Client, Request};
use super::render::Message;
use super::topic::{self, Details};
use super::whole::{Any, Partition, Whole};
use super::Failure;

/// Print messages of one partition again, without taking them from consumers.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "replay")]
pub struct Replay {
    #[argh(positional)]
    topic: String,
    /// partition to read
    #[argh(option)]
    partition: Partition,
    /// first offset; default the oldest that is kept
    #[argh(option)]
    from: Option<Any>,
    /// offset to stop before; default the end as it is now
    #[argh(option)]
    to: Option<Any>,
    /// print payloads only
    #[argh(switch)]
    raw: bool,
}

pub fn run(command: Replay, client: &mut Client, out: &mut dyn Write, err: &mut dyn Write) -> Result<(), Failure> {
    if let (Some(Whole(from)), Some(Whole(to))) = (command.from, command.to) {
        if from > to {
            return Err(Failure::Usage(format!("--from {from} is behind --to {to}: nothing lies between")));
        }
    }
    client.watch_interrupts(signals::catch_interrupts());
    let Whole(partition) = command.partition;
    let stats = match &Details::ask(client, &command.topic, Some(partition))?.partition_stats[..] {
        [stats] if stats.is_known() => stats.clone(),
        other => {
            let why = other.first().map_or("unknown", |stats| stats.liveness());
            return Err(Failure::Request(format!(
                "partition {partition} is not served ({why}): its node is down, or cannot open it, and that node's log \
                 says why; try again"
            )));
        }
    };
    // What is not there (any more, or yet) is no part of the range.
    let from = command.from.map_or(0, |from| from.0).max(stats.oldest_offset);
    let to = command.to.map_or(stats.high_watermark, |to| to.0.min(stats.high_watermark)).max(from);
    let mut session = Session { command: &command, client, out, err, printed: 0, at: from };
    let result = session.range(to);
    let (printed, end) = (session.printed, session.at);
    match result {
        Err(Failure::OutputClosed) => return Err(Failure::OutputClosed),
        Ok(()) | Err(Failure::Interrupted) => {}
        Err(failure) => {
            writeln!(err, "{printed} message(s) replayed from p{partition} [{from}, {end})")?;
            return Err(failure);
        }
    }
    Ok(writeln!(err, "{printed} message(s) replayed from p{partition} [{from}, {end})")?)
}

struct Session<'a> {
    command: &'a Replay,
    client: &'a mut Client,
    out: &'a mut dyn Write,
    err: &'a mut dyn Write,
    printed: u64,
    /// The next offset.
    at: u64,
}

impl Session<'_> {
    fn range(&mut self, to: u64) -> Result<(), Failure> {
        let (path, Whole(partition)) = (topic::path(&self.command.topic), self.command.partition);
        while self.at < to {
            let target = format!("{path}/consume?offset={}&partition={partition}", self.at);
            let response = self.client.call(&Request::new("GET", target))?;
            match response.status {
                200 => {
                    response.json::<Message>()?.print(self.command.raw, self.out)?;
                    self.printed += 1;
                    self.at += 1;
                }
                // The end came nearer: the topic was made anew.
                204 => return Ok(()),
                410 => {
                    let text = response.error_text();
                    let next = topic::after_gap(&text, self.at).min(to);
                    writeln!(self.err, "[p{partition} @{}] left out, up to {next}: {text}", self.at)?;
                    self.at = next;
                }
                _ => return Err(response.failure()),
            }
        }
        Ok(())
    }
}
