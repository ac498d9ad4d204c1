//! `narad top`: the shards of a running node, live. Reads `GET /v1/node/shards` and nothing else.

mod page;
mod screen;

use std::io::{IsTerminal, Write};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use argh::FromArgs;
use narad_shards::io::system;

use crate::config::{format_duration, parse_duration};
use crate::telemetry::NodeReport;

use super::client::{Client, Request};
use super::Failure;
use page::{Line, Sort, Style};
use screen::{Key, Screen};

const INTERVAL_MIN: Duration = Duration::from_millis(100);
/// Width of a page that no terminal shows, and the least that the table needs.
const PLAIN_COLUMNS: usize = 80;

/// Watch the shards of a running node.
#[derive(FromArgs, Debug)]
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

pub fn run(top: Top, mut client: Client, out: &mut dyn Write) -> Result<(), Failure> {
    let interval =
        parse_duration(&top.interval).ok().filter(|interval| *interval >= INTERVAL_MIN).ok_or_else(|| {
            Failure::Usage(format!("--interval {:?}: write a time of at least 100ms, such as \"2s\"", top.interval))
        })?;
    client.watch_interrupts(system::catch_interrupts());
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
        200 => answer.json(),
        404 => Err(Failure::Request(
            "the server has no /v1/node/shards: it is older than this program, or no broker".to_owned(),
        )),
        _ => Err(answer.failure()),
    }
}

/// The last two looks, and what went wrong since.
#[derive(Default)]
struct Seen {
    now: Option<NodeReport>,
    before: Option<NodeReport>,
    at: Option<Instant>,
    trouble: Option<String>,
}

impl Seen {
    fn take(&mut self, looked: Result<NodeReport, Failure>) {
        match looked {
            Ok(report) => {
                self.before = self.now.replace(report);
                self.at = Some(Instant::now());
                self.trouble = None;
            }
            Err(Failure::Request(why) | Failure::Usage(why) | Failure::Unreachable(why)) => self.trouble = Some(why),
            Err(Failure::OutputClosed | Failure::Interrupted) => {}
        }
    }

    fn lines(&self, sort: Sort, interval: Duration, columns: usize, rows: usize) -> Vec<Line> {
        let mut lines = Vec::new();
        if let Some(why) = &self.trouble {
            let last = self.at.map_or(String::new(), |at| format!("; last seen {} s ago", at.elapsed().as_secs()));
            lines.push(Line::trouble(why.clone()));
            lines.push(Line::trouble(format!("trying again every {}{last}", format_duration(interval))));
        }
        match &self.now {
            Some(now) => {
                lines.extend(page::page(now, self.before.as_ref(), sort, columns, rows.saturating_sub(lines.len())));
            }
            None if lines.is_empty() => lines.push(Line::plain("asking the server ...".to_owned())),
            None => {}
        }
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

/// Not a terminal: one page after the other.
fn print_on(client: &mut Client, interval: Duration, sort: Sort, out: &mut dyn Write) -> Result<(), Failure> {
    let mut seen = Seen::default();
    loop {
        seen.take(fetch(client));
        // A first look has no rates yet, and a look that failed shows nothing but why.
        if seen.before.is_some() || seen.trouble.is_some() {
            let all = seen.lines(sort, interval, PLAIN_COLUMNS, usize::MAX);
            let shown = all.iter().filter(|line| seen.trouble.is_none() || line.style == Style::Trouble);
            print(shown, out)?;
            writeln!(out)?;
        }
        client.pause(interval)?;
    }
}

/// The server is asked on a thread of its own, so that a broker that hangs does not hold up the keyboard.
fn watch(mut client: Client, interval: Duration, mut sort: Sort) -> Result<(), Failure> {
    let interrupted = system::catch_interrupts();
    let (looks, looked) = mpsc::channel();
    let asking = std::thread::Builder::new().name("narad-top".to_owned()).spawn(move || loop {
        if looks.send(fetch(&mut client)).is_err() || client.pause(interval).is_err() {
            return;
        }
    });
    asking.map_err(|error| Failure::Request(format!("cannot start a thread: {error}")))?;
    let mut screen = Screen::open()?;
    let mut seen = Seen::default();
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
