//! `narad topic add|ls|info|rm`.

use std::io::{BufRead, Write};
use std::time::Duration;

use argh::FromArgs;
use serde::Deserialize;
use serde_json::{json, Value};

use crate::config::{format_duration, parse_duration};

use super::client::{Client, Request};
use super::render::{percent, table};
use super::Failure;

/// Create, list, describe and delete topics.
#[derive(FromArgs, Debug)]
#[argh(subcommand, name = "topic")]
pub struct Topic {
    #[argh(subcommand)]
    command: TopicCommand,
}

#[derive(FromArgs, Debug)]
#[argh(subcommand)]
enum TopicCommand {
    Add(Add),
    Ls(Ls),
    Info(Info),
    Rm(Rm),
}

/// Create a topic; what is left out, or 0, is the server's default.
#[derive(FromArgs, Debug)]
#[argh(subcommand, name = "add")]
struct Add {
    #[argh(positional)]
    name: String,
    /// number of partitions
    #[argh(option, default = "0")]
    partitions: u64,
    /// how long records are kept: 12h, 7d, or forever
    #[argh(option)]
    retention: Option<String>,
    /// how long a consumer holds a message before others may have it: 30s
    #[argh(option)]
    visibility: Option<String>,
    /// messages that consumers may hold of one partition
    #[argh(option, default = "0")]
    max_in_flight: u64,
    /// acked messages above the oldest unacked one of a partition
    #[argh(option, default = "0")]
    max_acked_ahead: u64,
}

/// List topics.
#[derive(FromArgs, Debug)]
#[argh(subcommand, name = "ls")]
struct Ls {
    /// print JSON
    #[argh(switch)]
    json: bool,
}

/// Print everything about a topic as JSON.
#[derive(FromArgs, Debug)]
#[argh(subcommand, name = "info")]
struct Info {
    #[argh(positional)]
    name: String,
}

/// Delete a topic and all its data.
#[derive(FromArgs, Debug)]
#[argh(subcommand, name = "rm")]
struct Rm {
    #[argh(positional)]
    name: String,
    /// do not ask
    #[argh(switch, short = 'f')]
    force: bool,
}

pub fn run(
    topic: Topic,
    client: &mut Client,
    input: &mut dyn BufRead,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> Result<(), Failure> {
    match topic.command {
        TopicCommand::Add(add) => create(&add, client, out),
        TopicCommand::Ls(ls) => list(&ls, client, out),
        TopicCommand::Info(info) => {
            let response = client.call(&Request::new("GET", path(&info.name)))?;
            if response.status != 200 {
                return Err(response.failure());
            }
            print_json(&response.json()?, out)
        }
        TopicCommand::Rm(rm) => remove(&rm, client, input, err),
    }
}

pub(super) fn path(name: &str) -> String {
    format!("/v1/topics/{}", percent(name.as_bytes()))
}

fn print_json(value: &Value, out: &mut dyn Write) -> Result<(), Failure> {
    Ok(writeln!(out, "{value:#}")?)
}

/// A duration flag in milliseconds; `None` leaves the field out.
fn milliseconds(flag: &str, text: Option<&str>, forever: bool) -> Result<Option<u64>, Failure> {
    let usage = |why: String| Failure::Usage(format!("{flag}: {why}"));
    match text {
        None => Ok(None),
        Some("forever") if forever => Ok(Some(0)),
        Some(text) => {
            let duration = parse_duration(text).map_err(usage)?;
            if duration.is_zero() {
                return Ok(None);
            }
            let ms = u64::try_from(duration.as_millis()).map_err(|_| usage(format!("{text:?} is too long")))?;
            if Duration::from_millis(ms) != duration {
                return Err(usage(format!("{text:?} is not a whole number of milliseconds")));
            }
            Ok(Some(ms))
        }
    }
}

fn create(add: &Add, client: &mut Client, out: &mut dyn Write) -> Result<(), Failure> {
    let mut body = json!({"name": add.name});
    let mut set = |key: &str, value: Option<u64>| {
        if let Some(value) = value {
            body[key] = json!(value);
        }
    };
    let given = |value: u64| (value != 0).then_some(value);
    set("partitions", given(add.partitions));
    set("retention_ms", milliseconds("--retention", add.retention.as_deref(), true)?);
    set("visibility_timeout_ms", milliseconds("--visibility", add.visibility.as_deref(), false)?);
    set("max_in_flight_per_partition", given(add.max_in_flight));
    set("max_acked_ahead_per_partition", given(add.max_acked_ahead));
    let body = body.to_string();
    let request =
        Request { content_type: Some("application/json"), body: body.as_bytes(), ..Request::new("POST", "/v1/topics") };
    let response = client.call(&request)?;
    if response.status != 201 {
        return Err(response.failure());
    }
    print_json(&response.json()?, out)
}

#[derive(Deserialize)]
struct Page {
    next_page_token: String,
    topics: Vec<Value>,
}

fn list(ls: &Ls, client: &mut Client, out: &mut dyn Write) -> Result<(), Failure> {
    let mut topics = Vec::new();
    let mut token = String::new();
    loop {
        let target = match token.is_empty() {
            true => "/v1/topics".to_owned(),
            false => format!("/v1/topics?page_token={}", percent(token.as_bytes())),
        };
        let response = client.call(&Request::new("GET", target))?;
        if response.status != 200 {
            return Err(response.failure());
        }
        let page: Page = response.json()?;
        topics.extend(page.topics);
        if page.next_page_token.is_empty() {
            break;
        }
        if page.next_page_token <= token {
            return Err(Failure::Request("the server's pages do not end".to_owned()));
        }
        token = page.next_page_token;
    }
    if ls.json {
        return print_json(&Value::Array(topics), out);
    }
    let mut rows = vec![["NAME", "PARTITIONS", "RETENTION", "ROLE"].map(str::to_owned).to_vec()];
    rows.extend(topics.iter().map(row));
    Ok(write!(out, "{}", table(&rows))?)
}

fn row(topic: &Value) -> Vec<String> {
    let text = |key: &str| topic[key].as_str().unwrap_or("").to_owned();
    let retention = match topic["retention_ms"].as_u64() {
        Some(0) => "forever".to_owned(),
        Some(ms) => format_duration(Duration::from_millis(ms)),
        None => String::new(),
    };
    vec![text("name"), topic["partitions"].to_string(), retention, text("role")]
}

fn remove(rm: &Rm, client: &mut Client, input: &mut dyn BufRead, err: &mut dyn Write) -> Result<(), Failure> {
    if !rm.force {
        write!(err, "delete topic \"{}\" and all its data? [y/N] ", rm.name)?;
        err.flush()?;
        let mut answer = String::new();
        input.read_line(&mut answer).map_err(|error| Failure::Request(format!("cannot read the answer: {error}")))?;
        if !matches!(answer.trim(), "y" | "Y" | "yes") {
            return Err(Failure::Request("nothing was deleted".to_owned()));
        }
    }
    let response = client.call(&Request::new("DELETE", path(&rm.name)))?;
    match response.status {
        204 => Ok(()),
        _ => Err(response.failure()),
    }
}
