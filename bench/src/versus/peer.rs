//! One of the brokers that are compared: how it is started, what it promises, and connections to it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::server::{Recipe, Server};
use super::wire::{Amqp, Dialect, Feed, Nats, Postgres, Redis, Talk, Task};
use super::worker::{Conversation, Stock, Stop, Worker};
use crate::load::admin::Admin;
use crate::load::narad::{Budget, Client, Consume, Produce, SharedLedger, Wire};
use crate::load::payload::Payloads;
use crate::load::target::{Credentials, Target};
use crate::load::{Group, Pace, Until};
use crate::run::Failure;

const TOPIC: &str = "bench-versus";
const PARTITIONS: u32 = 12;
/// How long a Narad consumer waits on an empty topic.
const WAIT: Duration = Duration::from_millis(500);
/// How long accepted messages may take to be committed.
const SETTLE: Duration = Duration::from_secs(10);

/// Which broker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Ours.
    Narad,
    /// One that runs somewhere and speaks the same API.
    Url(String),
    Redis,
    Rabbitmq,
    Postgres,
    Nats,
}

impl Kind {
    /// What a user would pick instead.
    pub const OTHERS: [Kind; 4] = [Kind::Redis, Kind::Rabbitmq, Kind::Postgres, Kind::Nats];

    /// `redis,postgres`; `none`.
    pub fn parse_list(text: &str) -> Result<Vec<Kind>, String> {
        if text == "none" {
            return Ok(Vec::new());
        }
        let mut kinds = Vec::new();
        for name in text.split(',').map(str::trim) {
            let kind = Kind::OTHERS.into_iter().find(|kind| kind.name() == name);
            let names: Vec<String> = Kind::OTHERS.iter().map(Kind::name).collect();
            let kind = kind.ok_or_else(|| format!("{name:?} is not one of {}, or none", names.join(",")))?;
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
        Ok(kinds)
    }

    /// In tables and figures, and the script's name.
    pub fn name(&self) -> String {
        match self {
            Kind::Narad => "narad".into(),
            Kind::Url(url) => url.trim_start_matches("http://").trim_end_matches('/').into(),
            Kind::Redis => "redis".into(),
            Kind::Rabbitmq => "rabbitmq".into(),
            Kind::Postgres => "postgres".into(),
            Kind::Nats => "nats".into(),
        }
    }
}

/// How a connection is used.
#[derive(Clone)]
pub enum Role {
    Produce {
        ledger: Option<SharedLedger>,
    },
    Consume,
    /// Consume one by one until all came back.
    Drain(SharedLedger),
}

/// A broker, ready.
pub struct Peer {
    pub kind: Kind,
    pub name: String,
    /// What an acknowledgement means, for people.
    pub promise: String,
    /// What an ack means.
    pub ack_promise: &'static str,
    /// An acknowledged message is on the device.
    pub durable: bool,
    /// `None`: somebody else's.
    pub server: Option<Server>,
    pub stock: Arc<Stock>,
    target: Target,
    admin: Option<Admin>,
}

/// Where and how brokers are started.
#[derive(Clone, Debug)]
pub struct Place {
    pub scripts: PathBuf,
    pub directory: PathBuf,
    pub cpus: Option<Vec<usize>>,
    /// Ours.
    pub binary: PathBuf,
    pub arguments: String,
    pub credentials: Credentials,
}

impl Place {
    fn recipe(&self, kind: &Kind) -> Recipe {
        let environment = match kind {
            Kind::Narad => {
                vec![("NARAD_BINARY", self.binary.display().to_string()), ("NARAD_ARGS", self.arguments.clone())]
            }
            _ => Vec::new(),
        };
        Recipe {
            script: self.scripts.join(kind.name()),
            directory: self.directory.clone(),
            cpus: self.cpus.clone(),
            environment,
        }
    }

    /// Which of these can be run here, and what is missing for the others.
    pub fn installed(&self, kinds: &[Kind]) -> (Vec<Kind>, Vec<Failure>) {
        let (mut there, mut missing) = (Vec::new(), Vec::new());
        for kind in kinds {
            match self.recipe(kind).check() {
                Ok(()) => there.push(kind.clone()),
                Err(failure) => missing.push(failure),
            }
        }
        (there, missing)
    }

    /// Fails with everything that is missing to run these, all at once.
    pub fn check(&self, kinds: &[Kind]) -> Result<(), Failure> {
        let ours: Vec<Kind> = kinds.iter().filter(|kind| !matches!(kind, Kind::Url(_))).cloned().collect();
        let missing: Vec<String> = self.installed(&ours).1.into_iter().map(|Failure(text)| text).collect();
        match missing.is_empty() {
            true => Ok(()),
            false => Err(Failure(format!("{}\nor leave them out: --peers with the others", missing.join("\n")))),
        }
    }

    /// Starts a broker, or finds it, and makes its queue.
    pub fn start(&self, kind: &Kind) -> Result<Peer, Failure> {
        let (server, target) = match kind {
            Kind::Url(url) => (None, Target::parse(std::slice::from_ref(url), &self.credentials)?),
            _ => {
                let server = self.recipe(kind).start()?;
                let target = Target::of(server.address, &Credentials::default())?;
                (Some(server), target)
            }
        };
        let admin = matches!(kind, Kind::Narad | Kind::Url(_)).then(|| Admin::new(&target));
        if let Some(admin) = &admin {
            admin.ensure_topic(TOPIC, PARTITIONS)?;
        }
        let (promise, durable) = match kind {
            Kind::Narad => ("202, synced".to_owned(), true),
            Kind::Url(_) => ("202, whatever that broker means by it".to_owned(), true),
            Kind::Redis => ("appendfsync always".to_owned(), true),
            Kind::Rabbitmq => ("quorum queue, publisher confirms".to_owned(), true),
            Kind::Postgres => ("synchronous_commit=on".to_owned(), true),
            Kind::Nats => {
                let file = server.as_ref().map(|server| server.home().join("synced"));
                let synced = file.and_then(|file| std::fs::read_to_string(file).ok()).unwrap_or_default();
                match synced.trim() {
                    "" => ("NOT SYNCED: every two minutes".to_owned(), false),
                    setting => (setting.to_owned(), true),
                }
            }
        };
        let ack_promise = match kind {
            Kind::Narad => "answered, synced within 1.1 s",
            Kind::Url(_) => "answered",
            Kind::Redis | Kind::Postgres => "answered, synced",
            Kind::Rabbitmq => "not answered; synced before more comes",
            Kind::Nats => "answered, not synced",
        };
        let (name, stock) = (kind.name(), Arc::default());
        Ok(Peer { kind: kind.clone(), name, promise, ack_promise, durable, server, stock, target, admin })
    }
}

impl Peer {
    fn worker(&self, number: u16, role: &Role, batch: u32, payloads: &Arc<Payloads>, stop: &Stop) -> Worker {
        let produces = matches!(role, Role::Produce { .. });
        let conversation = match self.kind {
            Kind::Narad | Kind::Url(_) => Conversation::Narad(self.narad(number, role, batch, payloads)),
            _ => Conversation::Other(self.talk(number, role, batch, payloads)),
        };
        Worker::new(conversation, produces, batch, self.stock.clone(), stop.clone())
    }

    fn narad(&self, number: u16, role: &Role, batch: u32, payloads: &Arc<Payloads>) -> Client {
        let wire = Wire::new(&self.target, TOPIC);
        let budget = Budget::new(None);
        let consume = |verify| Consume { batch, wait: WAIT, ack: true, budget: Budget::new(None), verify };
        match role {
            Role::Produce { ledger } => {
                let (payloads, ledger) = (payloads.clone(), ledger.clone());
                Client::producer(&wire, Produce { payloads, batch, keys: 0, budget, ledger, ahead_max: 0 }, number)
            }
            Role::Consume => Client::consumer(&wire, consume(None)),
            Role::Drain(ledger) => Client::consumer(&wire, consume(Some((ledger.clone(), payloads.clone())))),
        }
    }

    fn talk(&self, number: u16, role: &Role, batch: u32, payloads: &Arc<Payloads>) -> Talk {
        let payloads = payloads.clone();
        let (feed, task) = match role {
            Role::Produce { ledger } => (Feed::Push, Task::Produce { payloads, batch, ledger: ledger.clone() }),
            Role::Consume => (Feed::Push, Task::Consume { verify: None }),
            Role::Drain(ledger) => (Feed::Pull, Task::Consume { verify: Some((ledger.clone(), payloads)) }),
        };
        let dialect: Box<dyn Dialect> = match self.kind {
            Kind::Rabbitmq => Box::new(Amqp::new(batch, feed)),
            Kind::Postgres => Box::new(Postgres::new(batch)),
            Kind::Nats => Box::new(Nats::new(batch)),
            _ => Box::new(Redis::new(number, batch)),
        };
        Talk::new(dialect, task, number)
    }

    /// Connections that do the same in a closed loop.
    pub fn group(
        &self,
        role: &Role,
        connections: usize,
        batch: u32,
        payloads: &Arc<Payloads>,
        stop: &Stop,
    ) -> Group<Worker> {
        let until = match stop {
            Stop::Never | Stop::Filled(_) | Stop::Consumed(_) => Until::End,
            Stop::Drained(..) => Until::Finished,
        };
        let worker = |number| self.worker(number as u16, role, batch, payloads, stop);
        Group {
            name: self.name.clone(),
            addresses: self.target.addresses.clone(),
            protocols: (0..connections).map(worker).collect(),
            pace: Pace::Closed,
            until,
        }
    }

    /// Messages that it stores: Redis keeps those that were acked, until somebody trims the stream.
    pub fn kept(&self) -> i64 {
        match self.kind {
            Kind::Redis => i64::try_from(self.stock.ever()).unwrap_or(i64::MAX),
            _ => self.stock.left(),
        }
    }

    /// Waits until what was acknowledged can be consumed: the others do that before they answer.
    pub fn settle(&self) -> Result<(), Failure> {
        self.admin.as_ref().map_or(Ok(()), |admin| admin.settle(TOPIC, SETTLE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_named_or_the_names_are_told() {
        assert_eq!(Kind::parse_list("postgres, redis,redis"), Ok(vec![Kind::Postgres, Kind::Redis]));
        assert_eq!(Kind::parse_list("none"), Ok(Vec::new()));
        assert!(Kind::parse_list("kafka").unwrap_err().contains("redis,rabbitmq,postgres,nats"));
    }
}
