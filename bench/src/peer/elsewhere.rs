//! `narad-bench elsewhere`: what a produce costs on a node that owns none of the topic's partitions, over what it costs on
//! the node that owns them all.

use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use argh::FromArgs;
use hdrhistogram::Histogram;

use crate::load::broker::{program, Plan};
use crate::load::cost::Cost;
use crate::load::cpu;
use crate::load::narad::PRODUCE_BATCH_MAX;
use crate::load::options::{LoadOptions, Site, CONNECTIONS_MAX, ROUNDS_MAX};
use crate::load::process::Home;
use crate::load::target::Credentials;
use crate::parts::{cores, counts, require, seconds};
use crate::produce;
use crate::report::stats::Spread;
use crate::run::{histogram, Better, Failure, Load, Run, Table};
use crate::Common;

/// single produces on a node that owns no partition and on the one that owns all, in turns, on a cluster started here
#[derive(FromArgs)]
#[argh(subcommand, name = "elsewhere")]
pub struct Options {
    /// where the fresh data directories of both nodes are made (default: the working directory)
    #[argh(option, default = "PathBuf::from(\".\")")]
    dir: PathBuf,
    /// the broker's program (default: narad beside this program)
    #[argh(option)]
    binary: Option<PathBuf>,
    /// CPUs of the owner's and of the other node's only shard, such as 0,1 (default: the first two that this process may use)
    #[argh(option, from_str_fn(cpu::parse))]
    cpus: Option<Vec<usize>>,
    /// CPUs of the load (default: that of the node which is not measured)
    #[argh(option, from_str_fn(cpu::parse))]
    load_cpu: Option<Vec<usize>>,
    /// measure at each of these numbers of connections (default 1,64)
    #[argh(option, default = "\"1,64\".into()")]
    connections: String,
    /// partitions of the topic (default 12)
    #[argh(option, default = "12")]
    partitions: u32,
    /// bytes of a message (default 256)
    #[argh(option, default = "256")]
    payload: usize,
    /// rounds of one measurement on either node (default 5)
    #[argh(option, default = "5")]
    rounds: usize,
    /// seconds of each measurement (default 2)
    #[argh(option, default = "2.0")]
    seconds: f64,
    /// messages per second, at fixed times (open loop): with the nodes and the load on the same CPUs, each connection
    /// sending when its last answer came measures how they share them
    #[argh(option)]
    rate: Option<f64>,
}

const TOPIC: &str = "bench";
/// Owner and other.
const NAMES: [&str; 2] = ["owner", "other"];
/// How long a node may take until it is ready, and until it knows the topic.
const READY: Duration = Duration::from_secs(60);
const WARMUP: Duration = Duration::from_millis(300);
/// How long the commits of one measurement may take before the next one.
const SETTLE: Duration = Duration::from_secs(5);

/// A node, and what was measured on it at one number of connections.
struct Node {
    site: Site,
    rates: Vec<f64>,
    p50s: Vec<f64>,
    latency: Histogram<u64>,
    cost: Option<Cost>,
    messages: u64,
}

impl Node {
    fn clear(&mut self) {
        (self.rates, self.p50s) = (Vec::new(), Vec::new());
        (self.latency, self.cost, self.messages) = (histogram(), None, 0);
    }

    fn measure(&mut self, load: &LoadOptions) -> Result<(), Failure> {
        let measured = produce::once(&self.site, load)?;
        self.site.admin.settle(TOPIC, SETTLE)?;
        self.rates.push(measured.rate_per_s());
        self.p50s.push(measured.p50_ns());
        self.latency.add(&measured.tally.latency)?;
        self.messages += measured.tally.messages;
        match &mut self.cost {
            Some(cost) => cost.merge(&measured.cost),
            None => self.cost = Some(measured.cost),
        }
        Ok(())
    }
}

/// Measures.
pub fn run(_common: &Common, options: &Options) -> Result<Run, Failure> {
    let cpus = cores::choose(options.cpus.as_deref(), NAMES.len())?;
    let duration = seconds("--seconds", options.seconds)?;
    require("--rounds", options.rounds, 1..=ROUNDS_MAX)?;
    let all_connections = counts("--connections", &options.connections, CONNECTIONS_MAX)?;
    let load = load_options(options, duration);
    load.check(PRODUCE_BATCH_MAX)?;
    program(options.binary.as_deref())?;
    let home = Home::below(&options.dir)?;
    let mut nodes = start(options, home.path(), &cpus)?;

    let mut run = Run::new("elsewhere");
    run.load = Some(options.rate.map_or(Load::Closed, |rate_per_s| Load::Open { rate_per_s }));
    run.set("dir", options.dir.display());
    run.set("cpus", cpu::list(&cpus));
    run.set("load_cpu", options.load_cpu.as_deref().map_or("beside the node that is idle".to_owned(), cpu::list));
    run.set("partitions", options.partitions);
    run.set("payload", options.payload);
    run.set("rounds", options.rounds);
    run.set("seconds", options.seconds);
    if let Some(rate) = options.rate {
        run.set("rate", rate);
    }
    let head = ["connections", "node", "messages/s", "p50 µs", "p99 µs", "syscalls/message", "p50 owner / other"];
    let head = head.map(str::to_owned).to_vec();
    run.tables.push(Table { title: "Produce on either node".into(), head, rows: Vec::new() });
    for connections in all_connections {
        nodes.iter_mut().for_each(Node::clear);
        for round in 0..options.rounds {
            // What a round does to the drive concerns both nodes, and neither is always the first.
            for index in if round % 2 == 0 { [0, 1] } else { [1, 0] } {
                let beside = options.load_cpu.clone().unwrap_or_else(|| vec![cpus[1 - index]]);
                nodes[index].measure(&LoadOptions { connections, load_cpu: Some(beside), ..load.clone() })?;
            }
        }
        report(&mut run, connections, &nodes, options.payload);
    }
    run.notes = [
        "Two nodes on this machine, one shard each, and one drive. All partitions are the owner's: the other one joined after \
         the topic was made. What the other accepts goes to its write-ahead log first, and from there to the owner.",
        "Both nodes take turns; a ratio is the median of its rounds. 1 means that it does not matter which node is asked; \
         above 1 the other one answers faster: it has no logs to write.",
        "The load shares a CPU with the node that is not measured, unless --load-cpu says otherwise: on a machine with three \
         CPUs or more, give it one of its own.",
    ]
    .map(String::from)
    .to_vec();
    Ok(run)
}

fn load_options(options: &Options, duration: Duration) -> LoadOptions {
    LoadOptions {
        urls: Vec::new(),
        topic: TOPIC.into(),
        partitions: options.partitions,
        credentials: Credentials::default(),
        connections: 1,
        payload_bytes: options.payload,
        keys: 0,
        batch: 1,
        warmup: WARMUP,
        duration,
        messages: None,
        rate_per_s: options.rate,
        threads: 1,
        load_cpu: options.load_cpu.clone(),
        load_spin: false,
        start: true,
        binary: options.binary.clone(),
        directory: options.dir.clone(),
        broker_cpus: None,
        confine: false,
        broker_args: String::new(),
        broker_pid: None,
    }
}

/// UDP ports for the control endpoint and the shard of each node: free ones, of a moment ago.
fn free_ports() -> Result<[u16; 2], Failure> {
    const TRIES: usize = 100;
    /// Of either node, and one where nobody listens.
    const PORTS: u16 = 5;
    let bind = |port: u16| UdpSocket::bind(SocketAddr::from(([127, 0, 0, 1], port)));
    for _ in 0..TRIES {
        let first = bind(0)?;
        let port = first.local_addr()?.port();
        let behind: Option<Vec<_>> = (1..PORTS).map(|next| bind(port.checked_add(next)?).ok()).collect();
        if behind.is_some() {
            return Ok([port, port + 2]);
        }
    }
    Err(Failure("cannot find five free UDP ports in a row on 127.0.0.1".into()))
}

/// The owner alone, then its topic, then the other node.
fn start(options: &Options, home: &Path, cpus: &[usize]) -> Result<Vec<Node>, Failure> {
    let ports = free_ports()?;
    // A list has at least three. The third one is nobody, and was never a member.
    let listed = NAMES.iter().zip(ports).chain([(&"absent", ports[1] + 2)]);
    let peers: Vec<_> = listed.map(|(name, port)| format!("{name}@127.0.0.1:{port}")).collect();
    let mut nodes = Vec::new();
    for (index, name) in NAMES.iter().enumerate() {
        let plan = Plan {
            binary: options.binary.clone(),
            directory: home.to_owned(),
            cpus: Some(vec![cpus[index]]),
            confine: false,
            arguments: format!("--node-id {name} --cluster-port {}", ports[index]),
            environment: vec![
                ("NARAD_CLUSTER_SECRET", "known to both nodes of this run".to_owned()),
                ("NARAD_CLUSTER_PEERS", peers.join(",")),
                ("NARAD_CLUSTER_INITIAL_MEMBERS", NAMES[0].to_owned()),
                ("NARAD_SECURITY_ALLOW_INSECURE_CLUSTER", "true".to_owned()),
            ],
        };
        let site = Site::of(plan.start_on(&home.join(name), READY)?)?;
        if index == 0 {
            site.admin.ensure_topic(TOPIC, options.partitions)?;
        }
        let (rates, p50s) = (Vec::new(), Vec::new());
        nodes.push(Node { site, rates, p50s, latency: histogram(), cost: None, messages: 0 });
    }
    let expected = BTreeMap::from([(NAMES[0].to_owned(), u64::from(options.partitions)), (NAMES[1].to_owned(), 0)]);
    let deadline = Instant::now() + READY;
    loop {
        let owned = nodes[1].site.admin.owned_partitions()?;
        if owned == expected && nodes[1].site.admin.topic(TOPIC).is_ok() {
            return Ok(nodes);
        }
        if Instant::now() > deadline {
            return Err(Failure(format!(
                "the partitions are with {owned:?}, as the second node sees it: not {expected:?}"
            )));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Adds what was measured at one number of connections.
fn report(run: &mut Run, connections: usize, nodes: &[Node], payload_bytes: usize) {
    let ratios = |of: fn(&Node) -> &[f64], over: fn(f64, f64) -> f64| {
        let pairs = of(&nodes[0]).iter().zip(of(&nodes[1]));
        Spread::of(&pairs.map(|(owner, other)| over(*owner, *other)).collect::<Vec<_>>())
    };
    let p50 = ratios(|node| &node.p50s, |owner, other| owner / other);
    let rate = ratios(|node| &node.rates, |owner, other| other / owner);
    let name = format!("elsewhere.c{connections}");
    run.figure(format!("{name}.p50_owner_over_other"), p50.median, "ratio", Better::Higher);
    run.figure(format!("{name}.rate_other_over_owner"), rate.median, "ratio", Better::Higher);
    for (index, node) in nodes.iter().enumerate() {
        let name = format!("{name}.{}", NAMES[index]);
        let rate = Spread::of(&node.rates).median;
        run.figure(format!("{name}.rate"), rate, "1/s", Better::Higher);
        run.latency(&name, node.latency.clone(), Vec::new());
        let messages = node.messages as f64;
        if let Some(cost) = &node.cost {
            cost.add_to(run, &name, messages, payload_bytes);
        }
        let micros = |quantile| format!("{:.0}", node.latency.value_at_quantile(quantile) as f64 / 1e3);
        let enters = node.cost.as_ref().and_then(|cost| cost.enters);
        let enters = enters.map_or("-".to_owned(), |enters| format!("{:.2}", enters / messages.max(1.0)));
        let ratio = match index {
            0 => String::new(),
            _ => format!("{:.2} ({:.2} to {:.2})", p50.median, p50.low, p50.high),
        };
        let named = NAMES[index].to_owned();
        let row = vec![connections.to_string(), named, format!("{rate:.0}"), micros(0.5), micros(0.99), enters, ratio];
        run.tables[0].rows.push(row);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_nodes_have_ports_of_their_own() {
        let [owner, other] = free_ports().expect("there are free ones");
        assert!(owner > 0 && other == owner + 2, "each has one for control and one for its shard");
    }
}
