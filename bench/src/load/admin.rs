//! The few requests around a load: one at a time, blocking.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::http::{encode_into, parse};
use super::target::Target;
use crate::run::Failure;

const PATIENCE: Duration = Duration::from_secs(10);

/// A status and a body.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub body: Vec<u8>,
}

/// Asks the first node of a target.
#[derive(Clone, Debug)]
pub struct Admin {
    target: Target,
}

#[derive(Deserialize)]
struct Topic {
    partitions: u32,
    #[serde(default)]
    partition_stats: Vec<PartitionStats>,
}

#[derive(Deserialize)]
struct PartitionStats {
    high_watermark: u64,
}

#[derive(Deserialize)]
struct Members {
    members: Vec<Member>,
}

#[derive(Deserialize)]
struct Member {
    id: String,
    owned_partitions: u64,
}

/// What a topic is and holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopicState {
    pub partitions: u32,
    /// Messages ever committed, over all partitions.
    pub committed: u64,
}

impl Admin {
    pub fn new(target: &Target) -> Admin {
        Admin { target: target.clone() }
    }

    /// One request on a connection of its own.
    pub fn request(&self, method: &str, path: &str, body: &str) -> Result<Reply, Failure> {
        let address = self.target.addresses[0];
        let failed = |what: &str, error: &dyn std::fmt::Display| {
            Failure(format!("{method} http://{address}{path}: {what}: {error}"))
        };
        let mut stream = TcpStream::connect_timeout(&address, PATIENCE).map_err(|error| match error.kind() {
            std::io::ErrorKind::ConnectionRefused => Failure(format!(
                "{address}: connection refused: no broker listens there; start one (`narad serve`), name another with --url, or use --start"
            )),
            _ => failed("cannot connect", &error),
        })?;
        let lines = self.target.header_lines();
        let request = format!(
            "{method} {path} HTTP/1.1\r\n{lines}Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.set_read_timeout(Some(PATIENCE)).map_err(|error| failed("cannot set a timeout", &error))?;
        stream.write_all(request.as_bytes()).map_err(|error| failed("sending failed", &error))?;
        let mut received = Vec::new();
        let mut buffer = [0u8; 16 << 10];
        loop {
            if let Some(response) = parse(&received).map_err(|error| failed("no sense in it", &error))? {
                return Ok(Reply { status: response.status, body: response.body.into_owned() });
            }
            match stream.read(&mut buffer) {
                Ok(0) => return Err(failed("no answer", &"the connection was closed")),
                Ok(bytes) => received.extend_from_slice(&buffer[..bytes]),
                Err(error) => return Err(failed("no answer", &error)),
            }
        }
    }

    fn topic_path(&self, topic: &str) -> String {
        let mut path = b"/v1/topics/".to_vec();
        encode_into(&mut path, topic.as_bytes());
        String::from_utf8_lossy(&path).into_owned()
    }

    /// Creates the topic, or finds it. `partitions` is what a new one gets.
    pub fn ensure_topic(&self, topic: &str, partitions: u32) -> Result<TopicState, Failure> {
        let body = serde_json::json!({"name": topic, "partitions": partitions}).to_string();
        let reply = self.request("POST", "/v1/topics", &body)?;
        match reply.status {
            201 | 409 => self.topic(topic),
            401 => Err(refused("creating topic", topic, &reply, "give --user and --password, or --token")),
            403 => Err(refused(
                "creating topic",
                topic,
                &reply,
                "create it as a user who may, or name another with --topic",
            )),
            _ => Err(refused("creating topic", topic, &reply, "see the broker's log")),
        }
    }

    pub fn topic(&self, topic: &str) -> Result<TopicState, Failure> {
        let found = self.details(topic)?;
        let committed = found.partition_stats.iter().map(|partition| partition.high_watermark).sum();
        Ok(TopicState { partitions: found.partitions, committed })
    }

    /// Partitions that each node owns, as this one sees it.
    pub fn owned_partitions(&self) -> Result<BTreeMap<String, u64>, Failure> {
        let reply = self.request("GET", "/v1/cluster/members", "")?;
        let found: Members = serde_json::from_slice(&reply.body).map_err(|error| {
            let status = reply.status;
            Failure(format!("members of the cluster: the broker's answer ({status}) is not what was expected: {error}"))
        })?;
        Ok(found.members.into_iter().map(|member| (member.id, member.owned_partitions)).collect())
    }

    fn details(&self, topic: &str) -> Result<Topic, Failure> {
        let reply = self.request("GET", &self.topic_path(topic), "")?;
        if reply.status != 200 {
            return Err(refused("reading topic", topic, &reply, "see the broker's log"));
        }
        serde_json::from_slice(&reply.body)
            .map_err(|error| Failure(format!("topic {topic}: the broker's answer is not what was expected: {error}")))
    }

    /// Waits until `messages` have been committed to the topic.
    pub fn wait_committed(&self, topic: &str, messages: u64, patience: Duration) -> Result<(), Failure> {
        let deadline = Instant::now() + patience;
        loop {
            let committed = self.topic(topic)?.committed;
            if committed >= messages {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(Failure(format!(
                    "topic {topic}: {committed} of {messages} messages were committed within {} s; is the broker's disk full or very slow?",
                    patience.as_secs()
                )));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until nothing more is being committed to the topic, or for `patience`: what comes next is not disturbed.
    pub fn settle(&self, topic: &str, patience: Duration) -> Result<(), Failure> {
        let deadline = Instant::now() + patience;
        let mut last = self.topic(topic)?.committed;
        loop {
            std::thread::sleep(Duration::from_millis(50));
            let now = self.topic(topic)?.committed;
            if now == last || Instant::now() > deadline {
                return Ok(());
            }
            last = now;
        }
    }

    /// The metrics page; `None` where there is none for us.
    pub fn metrics(&self) -> Option<String> {
        let reply = self.request("GET", "/metrics", "").ok().filter(|reply| reply.status == 200)?;
        String::from_utf8(reply.body).ok()
    }

    pub fn is_ready(&self) -> bool {
        self.request("GET", "/readyz", "").is_ok_and(|reply| reply.status == 200)
    }
}

fn refused(doing: &str, topic: &str, reply: &Reply, advice: &str) -> Failure {
    let text = String::from_utf8_lossy(&reply.body);
    Failure(format!("{doing} {topic}: the broker answered {} {}: {advice}", reply.status, text.trim()))
}
