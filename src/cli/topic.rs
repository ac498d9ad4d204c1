//! `narad topic add|ls|info|edit|rm`.

use std::io::{BufRead, Write};
use std::time::Duration;

use argh::{ArgsInfo, FromArgs};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{json, Value};

use crate::config::{format_duration, parse_duration};

use super::client::{Client, Request, Response};
use super::render::{indented, percent, table};
use super::whole::{Count32, Partitions, Whole};
use super::Failure;

/// Create, list, describe, alter and delete topics.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "topic")]
pub struct Topic {
    #[argh(subcommand)]
    command: TopicCommand,
}

#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand)]
enum TopicCommand {
    Add(Add),
    Ls(Ls),
    Info(Info),
    Edit(Edit),
    Rm(Rm),
}

/// Create a topic; what is left out, or 0, is the server's default.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "add")]
struct Add {
    #[argh(positional)]
    name: String,
    /// number of partitions
    #[argh(option, default = "Whole(0)")]
    partitions: Partitions,
    /// how long records are kept: 12h, 7d, or forever
    #[argh(option)]
    retention: Option<String>,
    /// how long a consumer holds a message before others may have it: 30s
    #[argh(option)]
    visibility: Option<String>,
    /// messages that consumers may hold of one partition
    #[argh(option, default = "Whole(0)")]
    max_in_flight: Count32,
    /// acked messages above the oldest unacked one of a partition
    #[argh(option, default = "Whole(0)")]
    max_acked_ahead: Count32,
}

/// List topics.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "ls")]
struct Ls {
    /// print JSON
    #[argh(switch)]
    json: bool,
}

/// Print everything about a topic as JSON.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "info")]
struct Info {
    #[argh(positional)]
    name: String,
}

/// Alter a topic; what is left out stays as it is.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "edit")]
struct Edit {
    #[argh(positional)]
    name: String,
    /// how long records are kept: 12h, 7d, or forever
    #[argh(option)]
    retention: Option<String>,
    /// number of partitions; it can only grow
    #[argh(option)]
    partitions: Option<Partitions>,
    /// messages that consumers may hold of one partition; 0 is the server's default
    #[argh(option)]
    max_in_flight: Option<Count32>,
    /// acked messages above the oldest unacked one of a partition; 0 is the server's default
    #[argh(option)]
    max_acked_ahead: Option<Count32>,
    /// refused: the visibility timeout is fixed when a topic is created
    #[argh(option)]
    visibility: Option<String>,
}

/// Delete a topic and all its data.
#[derive(ArgsInfo, FromArgs, Debug)]
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
        TopicCommand::Add(add) => create(&add, client, out, err),
        TopicCommand::Ls(ls) => list(&ls, client, out),
        TopicCommand::Info(info) => {
            let response = client.call(&Request::new("GET", path(&info.name)))?;
            if response.status != 200 {
                return Err(refusal(&response, &info.name));
            }
            print_topic(&response, out)
        }
        TopicCommand::Edit(edit) => alter(&edit, client, out, err),
        TopicCommand::Rm(rm) => remove(&rm, client, input, err),
    }
}

pub(super) fn path(name: &str) -> String {
    format!("/v1/topics/{}", percent(name.as_bytes()))
}

/// What every description of a topic has.
#[derive(Deserialize)]
pub(super) struct Described {
    pub name: String,
    pub partitions: u64,
    #[serde(default)]
    retention_ms: Option<u64>,
    #[serde(default)]
    visibility_timeout_ms: u64,
    #[serde(default)]
    role: String,
}

impl Described {
    /// The server takes any visibility timeout. One behind which retention waits is hardly meant.
    fn outlived_lease(&self) -> Option<String> {
        let retention_ms = self.retention_ms.filter(|ms| (1..self.visibility_timeout_ms).contains(ms))?;
        let shown = |ms| format_duration(Duration::from_millis(ms));
        Some(format!(
            "warning: messages of {} are kept for {}, less than the {} for which one is leased: one whose consumer dies may \
             be gone before it is delivered again. The visibility timeout is fixed: make another topic with a shorter one, \
             or keep messages longer with `narad topic edit {} --retention`",
            self.name,
            shown(retention_ms),
            shown(self.visibility_timeout_ms),
            self.name
        ))
    }

    /// The topic's place in a fan-out. `standalone` is none, and reads like a node that has no cluster.
    pub fn role(&self) -> &str {
        match self.role.as_str() {
            "standalone" | "" => "-",
            role => role,
        }
    }
}

/// A topic's partitions, as its description has them.
#[derive(Deserialize)]
pub(super) struct Details {
    pub partition_stats: Vec<Stats>,
}

#[derive(Clone, Deserialize)]
pub(super) struct Stats {
    pub index: u64,
    pub high_watermark: u64,
    #[serde(default)]
    pub oldest_offset: u64,
    #[serde(default)]
    pub size_bytes: u64,
    #[serde(default)]
    pub owner_node: String,
    #[serde(default)]
    status: String,
    #[serde(default)]
    owner_liveness: String,
}

impl Stats {
    /// Why its numbers mean nothing, in a word.
    pub fn liveness(&self) -> &str {
        match self.owner_liveness.as_str() {
            "" => "unknown",
            word => word,
        }
    }

    /// `false`: its owner did not answer, and the numbers mean nothing.
    pub fn is_known(&self) -> bool {
        matches!(self.status.as_str(), "" | "ok")
    }
}

impl Details {
    /// Of one partition, or of all.
    pub fn ask(client: &mut Client, topic: &str, partition: Option<u64>) -> Result<Details, Failure> {
        let response = client.call(&Details::request(topic, partition))?;
        match response.status {
            200 => response.json(),
            _ => Err(response.failure()),
        }
    }

    /// The same; `None` when there is no such topic.
    pub fn find(client: &mut Client, topic: &str, partition: Option<u64>) -> Result<Option<Details>, Failure> {
        let response = client.call(&Details::request(topic, partition))?;
        match response.status {
            200 => response.json().map(Some),
            404 if response.error_text() == "topic not found" => Ok(None),
            _ => Err(response.failure()),
        }
    }

    fn request(topic: &str, partition: Option<u64>) -> Request<'static> {
        let partition = partition.map(|partition| format!("?partition={partition}")).unwrap_or_default();
        Request::new("GET", path(topic) + &partition)
    }
}

/// The next offset worth asking for after a `410` at this one.
pub(super) fn after_gap(text: &str, offset: u64) -> u64 {
    let oldest = text.rsplit_once("(oldest retained: ").and_then(|(_, rest)| rest.strip_suffix(')')?.parse().ok());
    oldest.unwrap_or(0).max(offset + 1)
}

/// Prints a topic as the server sent it, once it is known to be one.
fn print_topic(response: &Response, out: &mut dyn Write) -> Result<(), Failure> {
    let _: Described = response.json()?;
    let value: Box<RawValue> = response.json()?;
    Ok(writeln!(out, "{}", indented(value.get()))?)
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

fn create(add: &Add, client: &mut Client, out: &mut dyn Write, err: &mut dyn Write) -> Result<(), Failure> {
    let mut body = json!({"name": add.name});
    let given = |value: u64| (value != 0).then_some(value);
    set(
        &mut body,
        [
            ("partitions", given(add.partitions.0)),
            ("retention_ms", milliseconds("--retention", add.retention.as_deref(), true)?),
            ("visibility_timeout_ms", milliseconds("--visibility", add.visibility.as_deref(), false)?),
            ("max_in_flight_per_partition", given(add.max_in_flight.0)),
            ("max_acked_ahead_per_partition", given(add.max_acked_ahead.0)),
        ],
    );
    let request = ("POST", "/v1/topics".to_owned());
    send(client, request, &add.name, &body, 201, (out, err))
}

fn alter(edit: &Edit, client: &mut Client, out: &mut dyn Write, err: &mut dyn Write) -> Result<(), Failure> {
    if edit.visibility.is_some() {
        return Err(Failure::Usage(
            "--visibility: the visibility timeout is fixed when a topic is created: leave it out, or make another topic"
                .to_owned(),
        ));
    }
    let retention_ms = milliseconds("--retention", edit.retention.as_deref(), true)?;
    if let (Some(text), None) = (&edit.retention, retention_ms) {
        let why = format!("--retention {text:?}: write \"forever\" to keep records for ever, or 1h or more");
        return Err(Failure::Usage(why));
    }
    let mut body = json!({});
    set(
        &mut body,
        [
            ("retention_ms", retention_ms),
            ("max_in_flight_per_partition", edit.max_in_flight.map(|count| count.0)),
            ("max_acked_ahead_per_partition", edit.max_acked_ahead.map(|count| count.0)),
            ("partitions", edit.partitions.map(|count| count.0)),
        ],
    );
    if body == json!({}) {
        return Err(Failure::Usage(
            "nothing to change: give --retention, --partitions, --max-in-flight or --max-acked-ahead".to_owned(),
        ));
    }
    send(client, ("PATCH", path(&edit.name)), &edit.name, &body, 200, (out, err))
}

fn set<const N: usize>(body: &mut Value, fields: [(&str, Option<u64>); N]) {
    for (key, value) in fields {
        if let Some(value) = value {
            body[key] = json!(value);
        }
    }
}

/// What the server calls a field: the flag that gives it, and what would have been good.
const FLAGS: [(&str, &str, &str); 5] = [
    ("retention_ms", "--retention", "write forever, or 1h or more"),
    ("visibility_timeout_ms", "--visibility", "write a time such as 30s"),
    ("max_in_flight_per_partition", "--max-in-flight", "write a whole number; 0 is the server's default"),
    ("max_acked_ahead_per_partition", "--max-acked-ahead", "write a whole number; 0 is the server's default"),
    ("partitions", "--partitions", "`narad topic info` says how many a topic has; they can only grow"),
];

/// The server's refusal, in the words of the command line.
fn refusal(response: &Response, name: &str) -> Failure {
    let text = response.error_text();
    match response.status {
        404 if text == "topic not found" => Failure::Request(format!(
            "topic not found: {name:?} (404): `narad topic ls` lists what there is, and letter case counts"
        )),
        400 => match FLAGS.iter().find(|(field, ..)| text.split([' ', ':']).next() == Some(*field)) {
            Some((_, flag, remedy)) => Failure::Request(format!("{flag} is refused: {text} (400): {remedy}")),
            None => response.failure(),
        },
        _ => response.failure(),
    }
}

/// Sends a JSON body and prints the topic that comes back.
fn send(
    client: &mut Client,
    (method, target): (&'static str, String),
    name: &str,
    body: &Value,
    expected: u16,
    (out, err): (&mut dyn Write, &mut dyn Write),
) -> Result<(), Failure> {
    let body = body.to_string();
    let request =
        Request { content_type: Some("application/json"), body: body.as_bytes(), ..Request::new(method, target) };
    let response = client.call(&request)?;
    if response.status != expected {
        return Err(refusal(&response, name));
    }
    let topic: Described = response.json()?;
    if let Some(warning) = topic.outlived_lease() {
        writeln!(err, "{warning}")?;
    }
    print_topic(&response, out)
}

#[derive(Deserialize)]
struct Page {
    next_page_token: String,
    topics: Vec<Box<RawValue>>,
}

/// All topics, by name, each also as the server sent it.
pub(super) fn all(client: &mut Client) -> Result<Vec<(Described, Box<RawValue>)>, Failure> {
    let mut topics: Vec<(Described, Box<RawValue>)> = Vec::new();
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
        for topic in page.topics {
            let described = serde_json::from_str(topic.get());
            topics.push((described.map_err(|error| response.unknown_shape(&error.to_string()))?, topic));
        }
        if page.next_page_token.is_empty() {
            return Ok(topics);
        }
        if page.next_page_token <= token {
            return Err(response.unknown_shape("its pages of topics do not end"));
        }
        token = page.next_page_token;
    }
}

fn list(ls: &Ls, client: &mut Client, out: &mut dyn Write) -> Result<(), Failure> {
    let topics = all(client)?;
    if ls.json {
        let texts: Vec<&str> = topics.iter().map(|(_, topic)| topic.get()).collect();
        return Ok(writeln!(out, "{}", indented(&format!("[{}]", texts.join(","))))?);
    }
    let mut rows = vec![["NAME", "PARTITIONS", "RETENTION", "ROLE"].map(str::to_owned).to_vec()];
    rows.extend(topics.into_iter().map(|(topic, _)| row(topic)));
    Ok(write!(out, "{}", table(&rows))?)
}

fn row(topic: Described) -> Vec<String> {
    let retention = match topic.retention_ms {
        Some(0) => "forever".to_owned(),
        Some(ms) => format_duration(Duration::from_millis(ms)),
        None => String::new(),
    };
    let role = topic.role().to_owned();
    vec![topic.name, topic.partitions.to_string(), retention, role]
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
        _ => Err(refusal(&response, &rm.name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::tests::{answer, failure, narad};

    /// The server speaks of its fields; whoever typed a flag is told of the flag, and of what to write instead.
    #[test]
    fn a_refused_topic_is_told_by_flag_and_with_the_fix() {
        let too_short = r#"{"error":"retention_ms must be 0 (forever) or at least 3600000"}"#;
        let not_more = r#"{"error":"partitions must be more than the topic has, which is 3"}"#;
        let cap = r#"{"error":"max_in_flight_per_partition must not be negative"}"#;
        let none = r#"{"error":"topic not found"}"#;
        for (args, status, body, said) in [
            (
                &["edit", "t", "--retention", "10m"][..],
                "400 Bad Request",
                too_short,
                "--retention is refused: retention_ms must be 0 (forever) or at least 3600000 (400): write forever, or 1h or more",
            ),
            (
                &["edit", "t", "--partitions", "3"],
                "400 Bad Request",
                not_more,
                "--partitions is refused: partitions must be more than the topic has, which is 3 (400): `narad topic info` \
                 says how many a topic has; they can only grow",
            ),
            (
                &["add", "t", "--max-in-flight", "1"],
                "400 Bad Request",
                cap,
                "--max-in-flight is refused: max_in_flight_per_partition must not be negative (400): write a whole number; 0 \
                 is the server's default",
            ),
            (
                &["edit", "t", "--partitions", "9"],
                "404 Not Found",
                none,
                "topic not found: \"t\" (404): `narad topic ls` lists what there is, and letter case counts",
            ),
            (
                &["rm", "t", "-f"],
                "404 Not Found",
                none,
                "topic not found: \"t\" (404): `narad topic ls` lists what there is, and letter case counts",
            ),
        ] {
            let args: Vec<&str> = ["topic"].iter().chain(args).copied().collect();
            assert_eq!(failure(narad(&args, "", vec![answer(status, body)])), said);
        }
        for zero in ["0", "0s"] {
            let refused = narad(&["topic", "edit", "t", "--retention", zero], "", vec![]).result;
            let Err(Failure::Usage(text)) = refused else { panic!("{refused:?}") };
            assert!(text.starts_with(&format!("--retention {zero:?}: write \"forever\"")), "{text}");
        }
    }

    #[test]
    fn reading_goes_on_behind_what_is_gone() {
        assert_eq!(after_gap("offset 3 aged out of retention (oldest retained: 40)", 3), 40);
        assert_eq!(after_gap("record is unreadable", 3), 4);
        assert_eq!(after_gap("aged out of retention (oldest retained: 2)", 3), 4);
    }

    #[test]
    fn gap_4_a_lease_that_outlives_its_message_is_taken_and_warned_of() {
        let warned = |retention_ms: u64, visibility_timeout_ms: u64| {
            let topic = json!({
                "name": "t", "partitions": 3, "retention_ms": retention_ms,
                "visibility_timeout_ms": visibility_timeout_ms
            });
            serde_json::from_value::<Described>(topic).unwrap().outlived_lease()
        };
        let day = 86_400_000;
        assert!(warned(day, 30 * day).is_some_and(|text| text.contains("kept for 24h") && text.contains("720h")));
        assert_eq!(warned(day, day), None);
        assert_eq!(warned(0, 30 * day), None, "kept for ever");
    }
}
