//! `narad top`: the shards of a running node, live. Reads `GET /v1/node/shards` and nothing else.

mod page;
mod screen;

use std::io::{IsTerminal, Write};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use argh::{ArgsInfo, FromArgs};
use narad_shards::io::signals;

use crate::config::{format_duration, parse_duration};
use crate::telemetry::NodeReport;

use super::client::{Client, Request};
use super::Failure;
use page::{Line, Sort, Style};
use screen::{Key, Screen};

const INTERVAL_MIN: Duration = Duration::from_millis(100);
/// A broker answers within a second even when a shard of it does not.
const PATIENCE: Duration = Duration::from_secs(2);
/// Width of a page that no terminal shows, and the least that the table needs.
const PLAIN_COLUMNS: usize = 80;

/// Watch the shards of a running node.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "top")]
pub struct Top {
    /// time between two looks (default 1s)
    #[argh(option, default = "String::from(\"1s\")")]
    interval: String,
    /// order of the rows: busy (default), shard, produce, sync, backlog or connections
    #[argh(option, default = "Sort::Busy")]
    sort: Sort,
    /// print one page, of one interval, and end
    #[argh(switch)]
    once: bool,
}

pub fn run(top: Top, client: Client, out: &mut dyn Write) -> Result<(), Failure> {
    let interval =
        parse_duration(&top.interval).ok().filter(|interval| *interval >= INTERVAL_MIN).ok_or_else(|| {
            Failure::Usage(format!("--interval {:?}: write a time of at least 100ms, such as \"2s\"", top.interval))
        })?;
    let mut client = client.with_patience(PATIENCE);
    client.watch_interrupts(signals::catch_interrupts());
    let result = match (top.once, std::io::stdout().is_terminal() && std::io::stdin().is_terminal()) {
        (true, _) => once(&mut client, interval, top.sort, out),
        (false, true) => watch(client, interval, top.sort),
        (false, false) => print_on(&mut client, interval, top.sort, out),
    };
    match result {
        Err(Failure::Interrupted) => Ok(()),
        other => other,
    }
}

fn fetch(client: &mut Client) -> Result<NodeReport, Failure> {
    let answer = client.call(&Request::new("GET", "/v1/node/shards"))?;
    match answer.status {
        200 => {
            // Every field of the report may be missing by itself; a broker that says none of these is no broker.
            let report: NodeReport = answer.json()?;
            match report.node.is_empty() || report.version.is_empty() || report.shards.is_empty() {
                true => Err(answer.unknown_shape("no node, no version or no shards")),
                false => Ok(report),
            }
        }
        404 => Err(answer.unknown_shape("it has no /v1/node/shards; an older broker has not either")),
        _ => Err(answer.failure()),
    }
}

/// The last two looks, and what went wrong since.
struct Seen {
    now: NodeReport,
    before: Option<NodeReport>,
    at: Instant,
    trouble: Option<String>,
}

impl Seen {
    fn first(now: NodeReport) -> Seen {
        Seen { now, before: None, at: Instant::now(), trouble: None }
    }

    fn take(&mut self, looked: Result<NodeReport, Failure>) {
        match looked {
            Ok(report) => {
                self.before = Some(std::mem::replace(&mut self.now, report));
                self.at = Instant::now();
                self.trouble = None;
            }
            Err(Failure::Request(why) | Failure::Usage(why) | Failure::Unreachable(why)) => self.trouble = Some(why),
            Err(Failure::OutputClosed | Failure::Interrupted) => {}
        }
    }

    fn lines(&self, sort: Sort, interval: Duration, columns: usize, rows: usize) -> Vec<Line> {
        let mut lines = Vec::new();
        if let Some(why) = &self.trouble {
            let (every, ago) = (format_duration(interval), self.at.elapsed().as_secs());
            lines.push(Line::trouble(why.clone()));
            lines.push(Line::trouble(format!("trying again every {every}; last seen {ago} s ago")));
        }
        let rows = rows.saturating_sub(lines.len());
        lines.extend(page::page(&self.now, self.before.as_ref(), sort, columns, rows));
        lines
    }
}

fn print<'a>(lines: impl IntoIterator<Item = &'a Line>, out: &mut dyn Write) -> Result<(), Failure> {
    for line in lines {
        writeln!(out, "{}", line.text.trim_end())?;
    }
    out.flush()?;
    Ok(())
}

fn once(client: &mut Client, interval: Duration, sort: Sort, out: &mut dyn Write) -> Result<(), Failure> {
    let before = fetch(client)?;
    client.pause(interval)?;
    let now = fetch(client)?;
    print(&page::page(&now, Some(&before), sort, PLAIN_COLUMNS, usize::MAX), out)
}

/// Not a terminal: one page after the other. Who cannot be seen even once is told so, and not asked for ever.
fn print_on(client: &mut Client, interval: Duration, sort: Sort, out: &mut dyn Write) -> Result<(), Failure> {
    let mut seen = Seen::first(fetch(client)?);
    loop {
        // A first look has no rates yet, and a look that failed shows nothing but why.
        client.pause(interval)?;
        seen.take(fetch(client));
        let all = seen.lines(sort, interval, PLAIN_COLUMNS, usize::MAX);
        let shown = all.iter().filter(|line| seen.trouble.is_none() || line.style == Style::Trouble);
        print(shown, out)?;
        writeln!(out)?;
    }
}

/// The server is asked on a thread of its own, so that a broker that hangs does not hold up the keyboard.
fn watch(mut client: Client, interval: Duration, mut sort: Sort) -> Result<(), Failure> {
    let interrupted = signals::catch_interrupts();
    // Before the screen is taken over: what stands in the way is then a line that stays.
    let mut seen = Seen::first(fetch(&mut client)?);
    let (looks, looked) = mpsc::channel();
    let asking = std::thread::Builder::new().name("narad-top".to_owned()).spawn(move || loop {
        if client.pause(interval).is_err() || looks.send(fetch(&mut client)).is_err() {
            return;
        }
    });
    asking.map_err(|error| Failure::Request(format!("cannot start a thread: {error}")))?;
    let mut screen = Screen::open()?;
    while !interrupted.load(std::sync::atomic::Ordering::Relaxed) {
        while let Ok(look) = looked.try_recv() {
            seen.take(look);
        }
        let (columns, rows) = screen.size();
        screen.draw(&seen.lines(sort, interval, columns, rows))?;
        match screen.key(INTERVAL_MIN)? {
            Some(Key::Quit) => break,
            Some(Key::Sort) => sort = sort.next(),
            None => {}
        }
    }
    Ok(())
}
