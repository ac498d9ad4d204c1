//! A local cluster, started and broken by `scripts/cluster`; nodes count from 0 here and from 1 there.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::client::Client;

/// How long a node may take from SIGTERM to its end.
const STOP: Duration = Duration::from_secs(30);

/// What to start.
pub struct Plan<'a> {
    /// The script that starts and breaks it.
    pub script: &'a Path,
    /// Broker binary.
    pub binary: &'a Path,
    /// Where data and logs go.
    pub dir: &'a Path,
    pub nodes: usize,
    /// Shards of each node.
    pub shards: u32,
    /// Size of each node's own file system, in MiB, where that is permitted.
    pub disk_mb: u64,
}

pub struct Cluster {
    script: PathBuf,
    pub dir: PathBuf,
    pub addresses: Vec<SocketAddr>,
    /// Each node has a network namespace, and a file system of its own.
    pub namespaces: bool,
}

impl Cluster {
    /// Starts one and waits until every node is ready.
    pub fn up(plan: &Plan<'_>) -> io::Result<Cluster> {
        let (script, dir) = (plan.script.to_owned(), plan.dir.to_owned());
        let mut cluster = Cluster { script, dir, addresses: Vec::new(), namespaces: false };
        let (nodes, shards, disk) = (plan.nodes.to_string(), plan.shards.to_string(), plan.disk_mb.to_string());
        let binary = plan.binary.display().to_string();
        cluster.run(&["up", "--nodes", &nodes, "--shards", &shards, "--binary", &binary, "--disk-mb", &disk])?;
        let urls = cluster.run(&["urls"])?;
        let parse = |line: &str| line.strip_prefix("http://").and_then(|address| address.parse().ok());
        cluster.addresses = urls.lines().filter_map(parse).collect();
        cluster.namespaces = cluster.addresses.iter().all(|address| !address.ip().is_loopback());
        match cluster.addresses.len() == plan.nodes {
            true => Ok(cluster),
            false => Err(io::Error::other(format!("the cluster has not the nodes that were asked for: {urls}"))),
        }
    }

    /// Stops every node; data and logs stay if `keep` says so.
    pub fn down(&self, keep: bool) -> io::Result<()> {
        let down: &[&str] = if keep { &["down", "--keep"] } else { &["down"] };
        self.run(down).map(drop)
    }

    fn run(&self, arguments: &[&str]) -> io::Result<String> {
        let output = Command::new(&self.script).args(arguments).arg("--dir").arg(&self.dir).output()?;
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            false => Err(io::Error::other(format!(
                "{} {}: {}",
                self.script.display(),
                arguments.join(" "),
                String::from_utf8_lossy(&output.stderr)
            ))),
        }
    }

    /// One of the script's verbs on one node.
    pub fn act(&self, verb: &str, node: usize) -> io::Result<()> {
        self.run(&[verb, &(node + 1).to_string()]).map(drop)
    }

    /// Nodes that need each other to become ready are started together.
    pub fn spawn_all(&self, nodes: impl IntoIterator<Item = usize>) -> io::Result<()> {
        nodes.into_iter().try_for_each(|node| self.act("spawn", node))
    }

    /// SIGTERM, and waits for the end. Meanwhile the node is asked whether it is ready, as a balancer does: it stops
    /// when it has been seen not to be.
    pub fn stop(&self, node: usize) -> io::Result<()> {
        self.act("terminate", node)?;
        let deadline = Instant::now() + STOP;
        while self.act("alive", node).is_ok() {
            if Instant::now() > deadline {
                return Err(io::Error::other(format!("node {} had not stopped {STOP:?} after SIGTERM", node + 1)));
            }
            self.is_ready(node);
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    pub fn data(&self, node: usize) -> PathBuf {
        self.dir.join((node + 1).to_string()).join("data")
    }

    pub fn client(&self, node: usize) -> Client {
        Client::new(self.addresses[node]).with_timeout(Duration::from_secs(2))
    }

    pub fn leader(&self) -> Option<usize> {
        (0..self.addresses.len()).find(|node| {
            let page = self.client(*node).get("/metrics").map(|answer| answer.text()).unwrap_or_default();
            page.lines().any(|line| line == "narad_raft_state{state=\"leader\"} 1")
        })
    }

    pub fn is_ready(&self, node: usize) -> bool {
        self.client(node).get("/readyz").is_ok_and(|answer| answer.status == 200)
    }

    pub fn wait_all_ready(&self, patience: Duration) -> io::Result<Duration> {
        let started = Instant::now();
        for node in 0..self.addresses.len() {
            while !self.is_ready(node) {
                if started.elapsed() > patience {
                    return Err(io::Error::other(format!("node {} was not ready again after {patience:?}", node + 1)));
                }
                thread::sleep(Duration::from_millis(50));
            }
        }
        Ok(started.elapsed())
    }

    /// Waits until every node has been ready for as long as `long`, without a break.
    pub fn wait_settled(&self, long: Duration, patience: Duration) -> io::Result<()> {
        let started = Instant::now();
        let mut since = started;
        while since.elapsed() < long {
            if let Some(node) = (0..self.addresses.len()).find(|node| !self.is_ready(*node)) {
                if started.elapsed() > patience {
                    let why = format!("node {} is not ready, or not for {long:?}, after {patience:?}", node + 1);
                    return Err(io::Error::other(why));
                }
                since = Instant::now();
            }
            thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Accepted and not yet dispatched, on all nodes. `None`: a node does not say.
    pub fn backlog(&self) -> Option<u64> {
        let mut sum = 0;
        for node in 0..self.addresses.len() {
            let page = self.client(node).get("/metrics").ok()?.text();
            let line = page.lines().find(|line| line.starts_with("narad_ingress_dispatch_backlog_records "))?;
            sum += line.rsplit(' ').next()?.parse::<f64>().ok()? as u64;
        }
        Some(sum)
    }
}
