//! `narad-bench parked`: how long a consumer that waits takes to get a new message, on the node that owns its partition and
//! on another one.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use argh::FromArgs;
use hdrhistogram::Histogram;
use serde_json::Value;

use crate::load::admin::Admin;
use crate::load::http::parse;
use crate::load::options::duration;
use crate::load::target::{Credentials, Target};
use crate::parts::require;
use crate::report::Progress;
use crate::run::{histogram, Better, Failure, Run};
use crate::Common;

const PARTITIONS: u32 = 6;
/// How long a consumer waits, and somewhat more than what a node may take to answer.
const WAIT: Duration = Duration::from_secs(10);
const PATIENCE: Duration = Duration::from_secs(20);
const PAYLOAD: &str = "a message for whoever waits";

/// time from the 202 of a produce until a parked consumer has the message, on the owner and on another node, in turns; on
/// a running cluster
#[derive(FromArgs)]
#[argh(subcommand, name = "parked")]
pub struct Options {
    /// the node that takes the messages and owns their partition, http://host:port
    #[argh(option)]
    url: String,
    /// the other node, where the second consumer waits, http://host:port
    #[argh(option)]
    other_url: String,
    /// topic, made if it is not there (default bench-parked)
    #[argh(option, default = "String::from(\"bench-parked\")")]
    topic: String,
    /// partition that gets the messages (default: the first one that the node of --url owns)
    #[argh(option)]
    partition: Option<u32>,
    /// measured messages for each of the two consumers (default 500)
    #[argh(option, default = "500")]
    messages: u32,
    /// how long a consumer is parked at least before its message is sent; up to twice that (default 20ms)
    #[argh(option, default = "Duration::from_millis(20)", from_str_fn(duration))]
    pause: Duration,
}

/// Measures.
pub fn run(_common: &Common, options: &Options) -> Result<Run, Failure> {
    require("--messages", options.messages, 1..=1_000_000)?;
    let target = |url: &str| Target::parse(&[url.to_owned()], &Credentials::default());
    let (owner, other) = (target(&options.url)?, target(&options.other_url)?);
    let mut run = Run::new("parked");
    let partition = pick_partition(options, &owner, &other, &mut run)?;
    run.set("topic", &options.topic);
    run.set("partition", partition);
    run.set("messages", options.messages);
    run.set("pause_s", options.pause.as_secs_f64());

    let mut producer = Line::connect(&owner)?;
    let mut consumers = [Line::connect(&owner)?, Line::connect(&other)?];
    let mut settlers = [Line::connect(&owner)?, Line::connect(&other)?];
    let mut seen = [Seen::new(), Seen::new()];
    let progress = Progress::new();
    let topic = &options.topic;
    let leftovers = drain(&mut settlers[0], topic)?;
    // The first of each opens connections between the nodes and finds its way.
    for number in 0..=options.messages {
        progress.show(&format!("parked: message {number} of {}", options.messages));
        for at in 0..2 {
            let consume = format!("GET /v1/topics/{topic}/consume?wait={}s", WAIT.as_secs());
            consumers[at].send(&consume, "")?;
            // Not in step with anything that happens every so many milliseconds.
            let jitter = options.pause.mul_f64(f64::from(number * 7919 % 1000) / 1000.0);
            std::thread::sleep(options.pause + jitter);
            let sent = Instant::now();
            producer.send(&format!("POST /v1/topics/{topic}/produce?partition={partition}"), PAYLOAD)?;
            let (status, body) = producer.receive()?;
            let accepted = sent.elapsed();
            if status != 202 {
                return Err(Failure(format!("produce through {}: {status} {body}", options.url)));
            }
            let (status, body) = consumers[at].receive()?;
            let delivered = sent.elapsed();
            if status != 200 {
                return Err(Failure(format!("the consumer got {status} {body} within {} s", WAIT.as_secs())));
            }
            let message: Value = serde_json::from_str(&body)?;
            let handle = message["receipt_handle"].as_str().unwrap_or_default();
            settlers[at].send(&format!("POST /v1/topics/{topic}/ack?receipt_handle={handle}"), "")?;
            let (status, body) = settlers[at].receive()?;
            if status != 204 {
                return Err(Failure(format!("ack: {status} {body}")));
            }
            if message["payload"] != PAYLOAD {
                return Err(Failure(format!("the topic {topic} is used by somebody else too: {body}")));
            }
            if number > 0 {
                seen[at].note(accepted, delivered);
            }
        }
    }
    let [on_owner, on_other] = seen;
    run.figure("parked.late_ratio", on_other.after_p99() / on_owner.after_p99(), "ratio", Better::Lower);
    for (name, one) in [("parked.owner", on_owner), ("parked.other", on_other)] {
        run.latency(&format!("{name}.after_202"), one.after, Vec::new());
        run.latency(&format!("{name}.whole"), one.whole, Vec::new());
    }
    run.notes
        .push("after_202: from the 202 until the consumer has the message; the commit is in it, with its sync".into());
    run.notes.push("whole: from the start of the produce".into());
    if leftovers > 0 {
        run.notes.push(format!("{leftovers} messages that were in the topic before were consumed and acked first"));
    }
    Ok(run)
}

struct Seen {
    after: Histogram<u64>,
    whole: Histogram<u64>,
}

impl Seen {
    fn new() -> Seen {
        Seen { after: histogram(), whole: histogram() }
    }

    fn note(&mut self, accepted: Duration, delivered: Duration) {
        // The delivery may overtake the 202: then it took no time after it.
        self.after.saturating_record(delivered.saturating_sub(accepted).as_nanos().max(1) as u64);
        self.whole.saturating_record(delivered.as_nanos() as u64);
    }

    fn after_p99(&self) -> f64 {
        self.after.value_at_quantile(0.99) as f64
    }
}

/// The partition that gets the messages: the node of `--url` owns it.
fn pick_partition(options: &Options, owner: &Target, other: &Target, run: &mut Run) -> Result<u32, Failure> {
    let (admin, topic) = (Admin::new(owner), &options.topic);
    admin.ensure_topic(topic, PARTITIONS)?;
    let deadline = Instant::now() + PATIENCE;
    while Admin::new(other).topic(topic).is_err() {
        if Instant::now() > deadline {
            return Err(Failure(format!(
                "{} does not know the topic {topic}: are they one cluster?",
                options.other_url
            )));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    if let Some(partition) = options.partition {
        return Ok(partition);
    }
    let ask = |admin: &Admin, path: &str| -> Result<Value, Failure> {
        let reply = admin.request("GET", path, "")?;
        Ok(serde_json::from_slice(&reply.body)?)
    };
    let node =
        |url: &Target| ask(&Admin::new(url), "/v1/node/shards").map(|page| page["node"].as_str().map(str::to_owned));
    let (here, there) = (node(owner)?, node(other)?);
    if here.is_none() || here == there {
        return Err(Failure("--url and --other-url are the same node: name two nodes of a cluster".into()));
    }
    run.set("owner", here.as_deref().unwrap_or_default());
    run.set("other", there.as_deref().unwrap_or_default());
    let details = ask(&admin, &format!("/v1/topics/{topic}"))?;
    let partitions = details["partition_stats"].as_array().cloned().unwrap_or_default();
    let owned = partitions.iter().position(|one| one["owner_node"].as_str() == here.as_deref());
    let none = || Failure(format!("{} owns no partition of {topic}: name the node that does", options.url));
    owned.map(|at| at as u32).ok_or_else(none)
}

/// Takes what an earlier run has left.
fn drain(line: &mut Line, topic: &str) -> Result<u64, Failure> {
    for taken in 0.. {
        line.send(&format!("GET /v1/topics/{topic}/consume"), "")?;
        let (status, body) = line.receive()?;
        if status != 200 {
            return Ok(taken);
        }
        let message: Value = serde_json::from_str(&body)?;
        let handle = message["receipt_handle"].as_str().unwrap_or_default();
        line.send(&format!("POST /v1/topics/{topic}/ack?receipt_handle={handle}"), "")?;
        line.receive()?;
    }
    Ok(0)
}

/// One kept connection, on which a request can be sent long before its answer is read.
struct Line {
    stream: TcpStream,
    received: Vec<u8>,
    headers: String,
}

impl Line {
    fn connect(target: &Target) -> Result<Line, Failure> {
        let address = target.addresses[0];
        let stream = TcpStream::connect_timeout(&address, PATIENCE)
            .map_err(|error| Failure(format!("{address}: {error}; is a broker running there?")))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Line { stream, received: Vec::new(), headers: target.header_lines() })
    }

    /// `request` is method and path.
    fn send(&mut self, request: &str, body: &str) -> Result<(), Failure> {
        let head = format!(
            "{request} HTTP/1.1\r\n{}Content-Type: application/octet-stream\r\nContent-Length: {}\r\n\r\n{body}",
            self.headers,
            body.len()
        );
        Ok(self.stream.write_all(head.as_bytes())?)
    }

    fn receive(&mut self) -> Result<(u16, String), Failure> {
        let mut buffer = [0u8; 4096];
        loop {
            if let Some(answer) = parse(&self.received).map_err(Failure)? {
                let found = (answer.status, String::from_utf8_lossy(&answer.body).into_owned());
                let consumed = answer.consumed;
                self.received.drain(..consumed);
                return Ok(found);
            }
            match self.stream.read(&mut buffer)? {
                0 => return Err(Failure("a node closed the connection".into())),
                bytes => self.received.extend_from_slice(&buffer[..bytes]),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_delivery_that_overtakes_the_202_counts_as_no_time() {
        let mut seen = Seen::new();
        seen.note(Duration::from_millis(3), Duration::from_millis(2));
        seen.note(Duration::from_millis(1), Duration::from_millis(5));
        assert_eq!((seen.after.min(), seen.whole.len()), (1, 2));
        assert!((seen.after_p99() - 4e6).abs() < 1e4, "{}", seen.after_p99());
    }
}
