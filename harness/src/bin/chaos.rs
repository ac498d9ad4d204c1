//! A cluster under produce, consume and ack while its nodes are killed, paused, cut off, slowed and filled up, leaders
//! deposed and quorums lost: no `202` lost, nothing acked comes back outside the allowed window, every duplicate explained
//! by a disturbance. A run in which too little happened fails.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use argh::FromArgs;
use narad_harness::cluster::{Cluster, Plan};
use narad_harness::load::{create_topic, oldest_unwritten, Run};
use narad_harness::random::Random;

const TOPIC: &str = "chaos";
/// After a disturbance a commit may still be stored whose caller had given up: its budget is 30 s (R12).
const AFTERMATH: Duration = Duration::from_secs(35);

/// Break a local cluster under load and check the delivery contract.
#[derive(FromArgs)]
struct Arguments {
    /// the script that starts and breaks it (default scripts/cluster)
    #[argh(option, default = "PathBuf::from(\"scripts/cluster\")")]
    cluster: PathBuf,
    /// broker binary (default target/release/narad)
    #[argh(option, default = "PathBuf::from(\"target/release/narad\")")]
    binary: PathBuf,
    /// minutes of disturbances (default 10)
    #[argh(option, default = "10")]
    minutes: u64,
    /// nodes (default 3)
    #[argh(option, default = "3")]
    nodes: u32,
    /// shards of each node (default 1)
    #[argh(option, default = "1")]
    shards: u32,
    /// seed of what is broken, and when (default: from the clock)
    #[argh(option)]
    seed: Option<u64>,
    /// only these disturbances, separated by commas (default: all that this machine permits)
    #[argh(option)]
    only: Option<String>,
    /// where data and logs go; kept on failure (default: a new directory under the temporary one)
    #[argh(option)]
    dir: Option<PathBuf>,
}

/// What is done to the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Disturbance {
    Kill,
    KillLeader,
    Restart,
    Pause,
    PauseLeader,
    Partition,
    PartitionLeader,
    Slow,
    DiskFull,
    QuorumLost,
    AllKilled,
}

impl Disturbance {
    const ALL: [(&str, Disturbance); 11] = [
        ("kill", Disturbance::Kill),
        ("kill-leader", Disturbance::KillLeader),
        ("restart", Disturbance::Restart),
        ("pause", Disturbance::Pause),
        ("pause-leader", Disturbance::PauseLeader),
        ("partition", Disturbance::Partition),
        ("partition-leader", Disturbance::PartitionLeader),
        ("slow", Disturbance::Slow),
        ("disk-full", Disturbance::DiskFull),
        ("quorum-lost", Disturbance::QuorumLost),
        ("all-killed", Disturbance::AllKilled),
    ];

    fn name(self) -> &'static str {
        Disturbance::ALL.iter().find(|(_, one)| *one == self).map_or("?", |(name, _)| name)
    }

    /// Needs network namespaces, or a file system for each node.
    fn needs_root(self) -> bool {
        use Disturbance::{DiskFull, Partition, PartitionLeader, Slow};
        matches!(self, Partition | PartitionLeader | Slow | DiskFull)
    }
}

struct Chaos<'a> {
    cluster: &'a Cluster,
    run: &'a Arc<Run>,
    random: Random,
    started: Instant,
    done: BTreeMap<Disturbance, u32>,
}

impl Chaos<'_> {
    fn say(&self, text: &str) {
        println!("{:>8.2}s {text}", self.started.elapsed().as_secs_f64());
    }

    fn serve_without(&self, nodes: &BTreeSet<usize>) {
        let all = self.cluster.addresses.iter().enumerate();
        self.run.set_addresses(all.filter(|(node, _)| !nodes.contains(node)).map(|(_, a)| *a).collect());
    }

    fn hold(&mut self, ms: std::ops::Range<u64>) {
        thread::sleep(Duration::from_millis(self.random.range(ms.start, ms.end)));
    }

    fn kill(&self, node: usize) -> io::Result<()> {
        // A node that cannot answer (its disk is full, it is cut off) has nothing to say of its acks.
        let (asked, unwritten) =
            oldest_unwritten(self.cluster.client(node)).unwrap_or((Instant::now(), Duration::from_millis(400)));
        self.cluster.act("kill", node)?;
        self.run.ledger().killed(Instant::now(), asked, unwritten);
        Ok(())
    }

    fn disturb(&mut self, what: Disturbance) -> io::Result<()> {
        use Disturbance::*;
        let nodes = self.cluster.addresses.len();
        let mut victim = self.random.draw() as usize % nodes;
        if matches!(what, KillLeader | PauseLeader | PartitionLeader) {
            match self.cluster.leader() {
                Some(leader) => victim = leader,
                None => {
                    self.say("no leader to disturb");
                    return Ok(());
                }
            }
        }
        self.say(&format!("{} of node {}", what.name(), victim + 1));
        let began = Instant::now();
        match what {
            Kill | KillLeader => {
                self.serve_without(&BTreeSet::from([victim]));
                self.kill(victim)?;
                self.hold(200..9_000);
                self.cluster.act("start", victim)?;
            }
            Restart => {
                self.serve_without(&BTreeSet::from([victim]));
                self.cluster.stop(victim)?;
                self.run.ledger().stopped(Instant::now());
                self.hold(0..2_000);
                self.cluster.act("start", victim)?;
            }
            Pause | PauseLeader => {
                self.serve_without(&BTreeSet::from([victim]));
                self.cluster.act("pause", victim)?;
                self.hold(500..12_000);
                self.cluster.act("resume", victim)?;
            }
            Partition | PartitionLeader => {
                // Clients still reach it: what it accepts now must arrive later.
                self.cluster.act("partition", victim)?;
                self.hold(1_000..15_000);
                self.cluster.act("heal", victim)?;
            }
            Slow => {
                self.cluster.act("slow", victim)?;
                self.hold(2_000..12_000);
                self.cluster.act("heal", victim)?;
            }
            DiskFull => {
                self.cluster.act("fill", victim)?;
                self.hold(2_000..20_000);
                self.cluster.act("unfill", victim)?;
                // A node that could not store metadata for 30 s stops, and is started again like by any supervisor.
                if self.cluster.act("alive", victim).is_err() {
                    self.serve_without(&BTreeSet::from([victim]));
                    self.run.ledger().stopped(Instant::now());
                    self.cluster.act("start", victim)?;
                }
            }
            QuorumLost => {
                let majority: BTreeSet<usize> = (0..nodes / 2 + 1).map(|n| (victim + n) % nodes).collect();
                self.serve_without(&majority);
                for node in &majority {
                    self.kill(*node)?;
                }
                self.hold(1_000..12_000);
                self.cluster.spawn_all(majority)?;
            }
            AllKilled => {
                let all: BTreeSet<usize> = (0..nodes).collect();
                self.serve_without(&all);
                for node in &all {
                    self.kill(*node)?;
                }
                self.hold(0..2_000);
                self.cluster.spawn_all(all)?;
            }
        }
        let took = self.cluster.wait_all_ready(Duration::from_secs(90))?;
        self.run.ledger().disturbed(began, Instant::now() + AFTERMATH);
        self.serve_without(&BTreeSet::new());
        self.run.count_owed();
        self.say(&format!("all nodes ready, {took:.2?} after the end of it"));
        *self.done.entry(what).or_default() += 1;
        Ok(())
    }
}

fn chosen(arguments: &Arguments, namespaces: bool) -> Result<Vec<Disturbance>, String> {
    let Some(only) = &arguments.only else {
        return Ok(Disturbance::ALL
            .iter()
            .map(|(_, one)| *one)
            .filter(|one| namespaces || !one.needs_root())
            .collect());
    };
    let find = |name: &str| {
        let found = Disturbance::ALL.iter().find(|(known, _)| *known == name).map(|(_, one)| *one);
        let names: Vec<&str> = Disturbance::ALL.iter().map(|(name, _)| *name).collect();
        found.ok_or_else(|| format!("--only {name:?} is none of {}", names.join(", ")))
    };
    only.split(',').map(find).collect()
}

/// Waits until nothing is on its way any more.
fn settle(cluster: &Cluster) -> io::Result<()> {
    let deadline = Instant::now() + Duration::from_secs(120);
    while cluster.backlog() != Some(0) {
        if Instant::now() > deadline {
            return Err(io::Error::other(format!(
                "records were still undispatched at the end: {:?}",
                cluster.backlog()
            )));
        }
        thread::sleep(Duration::from_millis(200));
    }
    Ok(())
}

fn chaos(
    arguments: &Arguments,
    cluster: &Cluster,
    run: &Arc<Run>,
    seed: u64,
) -> io::Result<BTreeMap<Disturbance, u32>> {
    let kinds = chosen(arguments, cluster.namespaces).map_err(io::Error::other)?;
    create_topic(cluster.addresses[0], TOPIC)?;
    run.set_addresses(cluster.addresses.clone());
    let mut random = Random::new(seed);
    let workers = run.start(&mut random);
    let mut chaos = Chaos { cluster, run, random, started: Instant::now(), done: BTreeMap::new() };
    let until = Instant::now() + Duration::from_secs(60 * arguments.minutes);
    let mut order: Vec<Disturbance> = Vec::new();
    let mut result = Ok(());
    let mut round = 0;
    while Instant::now() < until && result.is_ok() {
        if order.is_empty() {
            // Each kind once before any comes again: a short run is a run of all of them.
            order = kinds.clone();
            for last in (1..order.len()).rev() {
                order.swap(last, chaos.random.draw() as usize % (last + 1));
            }
        }
        chaos.hold(500..4_000);
        round += 1;
        run.set_round(round);
        if let Some(what) = order.pop() {
            result = chaos.disturb(what);
        }
    }
    let done = std::mem::take(&mut chaos.done);
    result?;
    chaos.say("no more disturbances; everything that was accepted must come now");
    run.finish(Duration::from_secs(90));
    for worker in workers {
        worker.join().map_err(|_| io::Error::other("a worker of this program panicked"))?;
    }
    settle(cluster)?;
    Ok(done)
}

fn main() -> ExitCode {
    let arguments: Arguments = argh::from_env();
    if let Err(error) = chosen(&arguments, true) {
        eprintln!("chaos: {error}");
        return ExitCode::from(2);
    }
    let seed = arguments.seed.unwrap_or_else(|| {
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(1, |d| d.as_nanos() as u64)
    });
    let dir = arguments
        .dir
        .clone()
        .unwrap_or_else(|| std::env::temp_dir().join(format!("narad-chaos-{}", std::process::id())));
    println!("chaos: {} minutes, {} nodes, seed {seed}, {}", arguments.minutes, arguments.nodes, dir.display());
    let run = Arc::new(Run::new(TOPIC));
    let plan = Plan {
        script: &arguments.cluster,
        binary: &arguments.binary,
        dir: &dir,
        nodes: arguments.nodes as usize,
        shards: arguments.shards,
        // Sparse files: what counts is what is written. A disk that is full for good ends its node, and the run.
        disk_mb: 4096 + 128 * arguments.minutes,
    };
    let cluster = match Cluster::up(&plan) {
        Ok(cluster) => cluster,
        Err(error) => {
            eprintln!("chaos: the cluster did not start: {error}");
            return ExitCode::FAILURE;
        }
    };
    let finished = chaos(&arguments, &cluster, &run, seed);
    let mut ledger = run.ledger();
    let done = finished.unwrap_or_else(|error| {
        ledger.violations.push(format!("the run stopped: {error}"));
        BTreeMap::new()
    });
    let verdict = ledger.judge();
    println!("{verdict:#?}");
    for (what, times) in &done {
        println!("{times:>5} x {}", what.name());
    }
    // A run in which nothing happened proves nothing.
    let floor = arguments.minutes * 500;
    if verdict.accepted < floor || verdict.acked < floor / 2 {
        let text = format!("too little evidence: {} accepted, {} acked, want {floor}", verdict.accepted, verdict.acked);
        ledger.violations.push(text);
    }
    let kinds = chosen(&arguments, cluster.namespaces).unwrap_or_default();
    if arguments.minutes >= 8 && kinds.iter().any(|kind| !done.contains_key(kind)) {
        ledger.violations.push("too little evidence: not every kind of disturbance has happened".to_owned());
    }
    for violation in ledger.violations.iter().take(50) {
        println!("VIOLATION: {violation}");
    }
    let failed = !ledger.violations.is_empty();
    if let Err(error) = cluster.down(failed) {
        println!("the cluster could not be taken down: {error}");
    }
    if failed {
        println!("FAILED with {} violations; data and logs kept in {}", ledger.violations.len(), dir.display());
        return ExitCode::FAILURE;
    }
    println!("ok");
    ExitCode::SUCCESS
}
