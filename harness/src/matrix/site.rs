//! What the rows have in common: topics, messages at known places, and answers compared with promises.

use std::fmt::Display;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

use crate::client::{Client, Response};
use crate::cluster::Cluster;

pub struct Site<'a> {
    pub cluster: &'a Cluster,
    /// Rounds of the rolling restart.
    pub rounds: u32,
    pub topic: String,
    /// Who owns each partition of the topic, from 0.
    owners: Vec<usize>,
    pub failed: bool,
}

/// A message that was handed out.
#[derive(Clone, Debug)]
pub struct Message {
    pub place: (u64, u64),
    pub payload: String,
    pub handle: String,
}

/// An answer as it is shown and compared: `0` is none.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    pub text: String,
    pub took: Duration,
    response: Option<Response>,
}

impl Answer {
    pub fn of(began: Instant, result: io::Result<Response>) -> Answer {
        let took = began.elapsed();
        match result {
            Ok(response) => Answer {
                status: response.status,
                text: response.text().trim().to_owned(),
                took,
                response: Some(response),
            },
            Err(error) => Answer { status: 0, text: error.to_string(), took, response: None },
        }
    }

    pub fn message(&self) -> Option<Message> {
        let json = self.response.as_ref().filter(|answer| answer.status == 200)?.json();
        let place = (json["partition"].as_u64()?, json["offset"].as_u64()?);
        let text = |name: &str| json[name].as_str().map(str::to_owned);
        Some(Message { place, payload: text("payload")?, handle: text("receipt_handle")? })
    }

    pub fn retry_after(&self) -> Option<&str> {
        self.response.as_ref().and_then(|answer| answer.header("retry-after"))
    }
}

impl Display for Answer {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text: String = self.text.chars().take(100).collect();
        match self.status {
            0 => write!(out, "no answer ({text}), after {:.2?}", self.took),
            status => write!(out, "{status} {text}, after {:.2?}", self.took),
        }
    }
}

impl<'a> Site<'a> {
    pub fn new(cluster: &'a Cluster, name: &str, rounds: u32) -> Site<'a> {
        Site { cluster, rounds, topic: format!("row-{name}"), owners: Vec::new(), failed: false }
    }

    /// One line of the row: what was promised, and what was seen.
    pub fn check(&mut self, promise: &str, kept: bool, seen: impl Display) {
        println!("    {} {promise}: {seen}", if kept { "ok    " } else { "FAILED" });
        self.failed |= !kept;
    }

    /// Makes the row's topic, with six partitions, and waits until all of them have owners.
    pub fn make_topic(&mut self, visibility_ms: u64) -> io::Result<()> {
        let topic = &self.topic;
        create(self.cluster, topic, visibility_ms)?;
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            // Each node must know it: a client may go to any of them.
            let owners: Vec<_> = (0..self.cluster.addresses.len()).map(|node| self.owners_by(node)).collect();
            if owners.iter().all(|owners| owners.as_ref().is_some_and(|owners| owners.len() == 6)) {
                self.owners = owners.into_iter().flatten().next().unwrap_or_default();
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(io::Error::other(format!("topic {topic}: not every partition has an owner: {owners:?}")));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// A topic beside the row's.
    pub fn make_another(&self, name: &str) -> io::Result<()> {
        create(self.cluster, &format!("{}-{name}", self.topic), 10_000)
    }

    fn owners_by(&self, node: usize) -> Option<Vec<usize>> {
        let stats = self.cluster.client(node).get(&format!("/v1/topics/{}", self.topic)).ok()?.json();
        let number = |one: &serde_json::Value| one["owner_node"].as_str()?.strip_prefix('n')?.parse::<usize>().ok();
        let owners: Option<Vec<usize>> = stats["partition_stats"].as_array()?.iter().map(number).collect();
        Some(owners?.into_iter().map(|number| number - 1).collect())
    }

    /// The first partition that `node` owns.
    pub fn partition_of(&self, node: usize) -> io::Result<usize> {
        let found = self.owners.iter().position(|owner| *owner == node);
        found.ok_or_else(|| io::Error::other(format!("node {} owns no partition: {:?}", node + 1, self.owners)))
    }

    pub fn nodes(&self) -> usize {
        self.cluster.addresses.len()
    }

    pub fn client(&self, node: usize, timeout: Duration) -> Client {
        Client::new(self.cluster.addresses[node]).with_timeout(timeout)
    }

    /// Asks `node` to take one message, for `partition` if one is named.
    pub fn produce(&self, node: usize, partition: Option<usize>, payload: &str) -> Answer {
        let pinned = partition.map(|number| format!("?partition={number}")).unwrap_or_default();
        let (topic, began) = (&self.topic, Instant::now());
        let mut client = self.client(node, Duration::from_secs(5));
        Answer::of(began, client.post(&format!("/v1/topics/{topic}/produce{pinned}"), payload.as_bytes()))
    }

    /// Produces through `node` until it is in its partition.
    pub fn store(&self, node: usize, partition: usize, payload: &str) -> io::Result<()> {
        let before = self.committed(partition)?;
        let answer = self.produce(node, Some(partition), payload);
        if answer.status != 202 {
            return Err(io::Error::other(format!("produce through node {}: {answer}", node + 1)));
        }
        let deadline = Instant::now() + Duration::from_secs(10);
        while self.committed(partition)? <= before {
            if Instant::now() > deadline {
                return Err(io::Error::other(format!("a message for partition {partition} was not committed in 10 s")));
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Records in a partition, as its owner says.
    pub fn committed(&self, partition: usize) -> io::Result<u64> {
        let stats = self.cluster.client(self.owners[partition]).get(&format!("/v1/topics/{}", self.topic))?.json();
        let found = stats["partition_stats"][partition]["high_watermark"].as_u64();
        found.ok_or_else(|| io::Error::other(format!("no figures of partition {partition}: {stats}")))
    }

    /// Asks `node` for a message, of `partition` if one is named.
    pub fn consume(&self, node: usize, partition: Option<usize>, wait: Duration) -> Answer {
        let pinned = partition.map(|number| format!("&partition={number}")).unwrap_or_default();
        let (topic, began, wait_ms) = (&self.topic, Instant::now(), wait.as_millis());
        let mut client = self.client(node, wait + Duration::from_secs(10));
        Answer::of(began, client.get(&format!("/v1/topics/{topic}/consume?wait={wait_ms}ms{pinned}")))
    }

    /// As [`Site::consume`]; it must have a message.
    pub fn take(&self, node: usize, partition: Option<usize>, wait: Duration) -> io::Result<Message> {
        let answer = self.consume(node, partition, wait);
        answer.message().ok_or_else(|| io::Error::other(format!("no message from node {}: {answer}", node + 1)))
    }

    /// Settles a message through `node`; `more` is `&extend=..` or nothing.
    pub fn ack(&self, node: usize, message: &Message, more: &str) -> Answer {
        let (topic, began) = (&self.topic, Instant::now());
        let mut client = self.client(node, Duration::from_secs(10));
        let target = format!("/v1/topics/{topic}/ack?receipt_handle={}{more}", message.handle);
        Answer::of(began, client.post(&target, b""))
    }

    /// Takes and acks through `node` until nothing has come for `quiet`. Returns the payloads in the order in which they
    /// came.
    pub fn drain(&self, node: usize, quiet: Duration) -> Vec<String> {
        self.drain_until(node, quiet, |_| false)
    }

    /// As [`Site::drain`], and not longer than until `enough` came.
    pub fn drain_until(&self, node: usize, quiet: Duration, enough: impl Fn(&[String]) -> bool) -> Vec<String> {
        let mut came = Vec::new();
        let mut last = Instant::now();
        while last.elapsed() < quiet && !enough(&came) {
            let answer = self.consume(node, None, Duration::from_millis(500));
            let Some(message) = answer.message() else {
                if answer.status != 204 {
                    thread::sleep(Duration::from_millis(50));
                }
                continue;
            };
            // It came, whatever becomes of its ack.
            let acked = self.ack(node, &message, "");
            if acked.status != 204 {
                println!("           the ack of {:?} at {:?}: {acked}", message.payload, message.place);
            }
            came.push(message.payload);
            last = Instant::now();
        }
        came
    }
}

fn create(cluster: &Cluster, topic: &str, visibility_ms: u64) -> io::Result<()> {
    let body = format!("{{\"name\":\"{topic}\",\"partitions\":6,\"visibility_timeout_ms\":{visibility_ms}}}");
    let json = [("Content-Type", "application/json")];
    let made = cluster.client(0).request("POST", "/v1/topics", &json, body.as_bytes())?;
    match made.status {
        201 => Ok(()),
        status => Err(io::Error::other(format!("topic {topic}: {status} {}", made.text()))),
    }
}
