//! `narad-bench versus`: the same load against what a user would pick instead, side by side in one run.
//!
//! For each pair of connections and batch (for a few cells together, with `--quick`) all brokers are started afresh. They run at the same time, on the same CPUs and
//! the same drive, and only one of them at a time may do anything: the others are stopped (SIGSTOP), so that what one still
//! has to tidy up is not paid by the next. Rounds of a second or two go round the brokers, and each begins with another one.

mod durability;
mod measure;
mod peer;
mod server;
mod table;
mod wire;
mod worker;

use std::path::{Path, PathBuf};
use std::time::Duration;

use argh::FromArgs;

use crate::device::require_space;
use crate::load::cpu;
use crate::load::options::{counts, duration, ROUNDS_MAX};
use crate::load::process::require_directory;
use crate::load::target::Credentials;
use crate::parts::require;
use crate::run::{Better, Failure, Load, Run};
use crate::Common;
use measure::{Bench, Cell, Operation, Settings, BATCH_MAX};
use peer::{Kind, Peer, Place};
use table::{Cells, Column, Memory, Rounds};

const ACKS: &str = "an ack that Narad has answered reaches the drive within 1.1 s, by design: after a crash before that the \
    message comes again. Redis, PostgreSQL and RabbitMQ sync each: consume cells compare what a consumer waits for, not the \
    same promise";
/// Most messages that are put into a queue to be consumed in one round.
const BACKLOG_MAX: f64 = 600_000.0;

/// the same load against other durable queues, started here from Debian packages, in turns; needs no running broker
#[derive(FromArgs)]
#[argh(subcommand, name = "versus")]
pub struct Options {
    /// which ones: redis,rabbitmq,postgres,nats, or none (default: all that are installed)
    #[argh(option, from_str_fn(Kind::parse_list))]
    peers: Option<Vec<Kind>>,
    /// a broker that runs and speaks Narad's API (a Go Narad, another version); may be given several times
    #[argh(option)]
    narad_url: Vec<String>,
    /// user of --narad-url
    #[argh(option)]
    user: Option<String>,
    /// its password (or NARAD_PASSWORD in the environment)
    #[argh(option)]
    password: Option<String>,
    /// bearer token for --narad-url
    #[argh(option)]
    token: Option<String>,
    /// numbers of connections, each with one operation outstanding (default 1,8,64)
    #[argh(option, from_str_fn(counts))]
    connections: Option<Vec<usize>>,
    /// messages of one operation (default 1,100)
    #[argh(option, from_str_fn(counts))]
    batches: Option<Vec<usize>>,
    /// bytes of a message (default 256)
    #[argh(option, default = "256")]
    payload: usize,
    /// rounds of each broker in each cell (default 5; 2 with --quick)
    #[argh(option)]
    rounds: Option<usize>,
    /// length of a round (default 1.5s; 1s with --quick)
    #[argh(option, from_str_fn(duration))]
    duration: Option<Duration>,
    /// few and short rounds, and only some of the cells unless --connections or --batches say which (about four minutes)
    #[argh(switch)]
    quick: bool,
    /// where fresh data directories are made, and the drive is measured (default .)
    #[argh(option, default = "PathBuf::from(\".\")")]
    dir: PathBuf,
    /// CPUs of every broker, all processes and threads of it (default 0)
    #[argh(option, from_str_fn(cpu::parse))]
    broker_cpus: Option<Vec<usize>>,
    /// CPU of the load (default 1)
    #[argh(option, from_str_fn(cpu::parse))]
    load_cpu: Option<Vec<usize>>,
    /// the load polls instead of sleeping
    #[argh(switch)]
    load_spin: bool,
    /// our broker's program (default: narad beside this program)
    #[argh(option)]
    binary: Option<PathBuf>,
    /// more arguments of our broker, separated by spaces
    #[argh(option, default = "String::new()")]
    broker_args: String,
    /// directory of the scripts that start the others (default: bench/peers)
    #[argh(option)]
    scripts: Option<PathBuf>,
}

impl Options {
    fn connections(&self) -> Vec<usize> {
        self.connections.clone().unwrap_or_else(|| vec![1, 8, 64])
    }

    fn batches(&self) -> Vec<usize> {
        self.batches.clone().unwrap_or_else(|| vec![1, BATCH_MAX as usize])
    }

    fn broker_cpus(&self) -> Vec<usize> {
        self.broker_cpus.clone().unwrap_or_else(|| vec![0])
    }

    fn load_cpu(&self) -> Vec<usize> {
        self.load_cpu.clone().unwrap_or_else(|| vec![1])
    }

    fn check(&self) -> Result<(), Failure> {
        let wrong = |text: String| Err(Failure(text));
        if let Some(batch) = self.batches().into_iter().find(|batch| *batch > BATCH_MAX as usize) {
            return wrong(format!("--batches {batch}: give 1 to {BATCH_MAX}, the most that one consume may bring"));
        }
        if !(crate::load::payload::BYTES_MIN..=1 << 20).contains(&self.payload) {
            let least = crate::load::payload::BYTES_MIN;
            return wrong(format!(
                "--payload {}: give {least} to 1048576 bytes: a message says who sent it",
                self.payload
            ));
        }
        if let Some(rounds) = self.rounds {
            require("--rounds", rounds, 1..=ROUNDS_MAX)?;
        }
        if self.duration.is_some_and(|duration| duration.is_zero()) {
            return wrong("--duration: give more than 0".into());
        }
        require_directory(&self.dir)?;
        let (load, server) = (self.load_cpu(), self.broker_cpus());
        if load.iter().any(|cpu| server.contains(cpu)) {
            return wrong(format!(
                "--load-cpu {} is one of --broker-cpus {}: the load would take time from the brokers that it measures",
                cpu::list(&load),
                cpu::list(&server)
            ));
        }
        Ok(())
    }

    fn place(&self) -> Result<Place, Failure> {
        let beside = std::env::current_exe()?.with_file_name("narad");
        Ok(Place {
            scripts: self.scripts()?,
            directory: self.dir.clone(),
            cpus: Some(self.broker_cpus()),
            binary: self.binary.clone().unwrap_or(beside),
            arguments: self.broker_args.clone(),
            credentials: Credentials {
                user: self.user.clone(),
                password: self.password.clone(),
                token: self.token.clone(),
            },
        })
    }

    fn scripts(&self) -> Result<PathBuf, Failure> {
        let places = match &self.scripts {
            Some(given) => vec![given.clone()],
            None => vec![PathBuf::from("bench/peers"), Path::new(env!("CARGO_MANIFEST_DIR")).join("peers")],
        };
        let found = places.iter().find(|place| place.join("lib.sh").is_file());
        found.cloned().ok_or_else(|| {
            let first = places[0].display();
            Failure(format!(
                "{first}: the scripts that start brokers are not there; name their directory with --scripts"
            ))
        })
    }

    /// What is measured on brokers that were started for it, one after the other.
    fn groups(&self) -> Vec<Vec<Cell>> {
        use Operation::{Consume, Produce};
        let cell = |operation, connections, batch| Cell { operation, connections, batch };
        if self.quick && self.connections.is_none() && self.batches.is_none() {
            // Starting them all costs more than a cell.
            return vec![
                vec![cell(Produce, 1, 1), cell(Produce, 8, 1), cell(Produce, 64, 1), cell(Consume, 8, 1)],
                vec![cell(Produce, 8, BATCH_MAX)],
            ];
        }
        let (connections, batches) = (self.connections(), self.batches());
        let pairs = batches.into_iter().flat_map(|batch| connections.iter().map(move |count| (*count, batch as u32)));
        pairs.map(|(count, batch)| [Produce, Consume].map(|operation| cell(operation, count, batch)).to_vec()).collect()
    }

    fn describe(&self, run: &mut Run, rounds: usize, settings: &Settings) {
        run.load = Some(Load::Closed);
        let list = |numbers: &[usize]| numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        run.set("dir", self.dir.display());
        run.set("payload", self.payload);
        let of_all = |of: fn(&Cell) -> usize| {
            let mut all: Vec<usize> = self.groups().iter().flatten().map(of).collect();
            all.sort_unstable();
            all.dedup();
            list(&all)
        };
        run.set("batch", of_all(|cell| cell.batch as usize));
        run.set("connections", format!("{}, each with one operation outstanding", of_all(|cell| cell.connections)));
        run.set("rounds", rounds);
        run.set("duration_s", settings.duration.as_secs_f64());
        run.set("warmup_s", settings.warmup.as_secs_f64());
        run.set(
            "broker_cpus",
            format!("{}, all processes and threads of every broker", cpu::list(&self.broker_cpus())),
        );
        run.set("load_cpu", format!("{}, one thread", cpu::list(&self.load_cpu())));
        run.set("load_spin", self.load_spin);
        run.set("broker_args", &self.broker_args);
    }
}

/// Measures, on a thread of its own: it is pinned.
pub fn run(_common: &Common, options: &Options) -> Result<Run, Failure> {
    let thread = std::thread::scope(|scope| scope.spawn(|| measure(options)).join());
    thread.unwrap_or_else(|_| Err(Failure("the thread that measures panicked".into())))
}

fn measure(options: &Options) -> Result<Run, Failure> {
    options.check()?;
    let place = options.place()?;
    let mut kinds = vec![Kind::Narad];
    kinds.extend(options.narad_url.iter().map(|url| Kind::Url(url.clone())));
    let mut absent = Vec::new();
    match &options.peers {
        Some(peers) => kinds.extend(peers.iter().cloned()),
        None => {
            let (there, missing) = place.installed(&Kind::OTHERS);
            kinds.extend(there);
            absent = missing;
        }
    }
    place.check(&kinds)?;
    // Everything that is not a broker stays off the brokers' CPUs, what looks at memory included.
    cpu::pin(&options.load_cpu(), "--load-cpu")?;

    let rounds = options.rounds.unwrap_or(if options.quick { 2 } else { 5 });
    let default = Duration::from_millis(if options.quick { 1000 } else { 1500 });
    let settings = Settings {
        payload_bytes: options.payload,
        warmup: Duration::from_millis(300),
        duration: options.duration.unwrap_or(default),
        load_cpu: Some(options.load_cpu()),
        spin: options.load_spin,
        directory: options.dir.clone(),
    };
    let mut run = Run::new("versus");
    options.describe(&mut run, rounds, &settings);
    let mut bench = Bench::new(settings)?;
    run.set("device_method", bench.device_method());

    let mut proofs = Vec::new();
    let mut able = Vec::new();
    for kind in kinds {
        let proved = place.start(&kind).and_then(|mut peer| {
            let proof = durability::prove(&bench, &mut peer)?;
            Ok((column(&peer), proof))
        });
        match proved {
            Ok(proof) => {
                proofs.push(proof);
                able.push(kind);
            }
            // Without ours there is nothing to compare; without one of the others there is.
            Err(failure) if kind == Kind::Narad => return Err(failure),
            Err(Failure(text)) => run.failures.push(format!("{}: left out: {text}", kind.name())),
        }
    }
    let kinds = able;
    run.notes.extend(absent.into_iter().map(|Failure(text)| format!("left out: {text}")));
    table::add_proofs(&mut run, &proofs);
    let columns: Vec<Column> = proofs.into_iter().map(|(column, _)| column).collect();
    run.set("durability", promises(&columns));

    let (mut done, mut memories) = (Vec::new(), Vec::new());
    let groups = options.groups();
    for (number, cells) in groups.iter().enumerate() {
        let title = format!("part {} of {}", number + 1, groups.len());
        let together = Together { cells, rounds, title };
        match together.measure(&mut bench, &mut run, &place, &kinds, &columns) {
            Ok((cells, memory)) => {
                done.extend(cells);
                memories.extend(memory);
            }
            Err(Failure(text)) => {
                let titles: Vec<String> = cells.iter().map(Cell::title).collect();
                run.failures.push(format!("{}: {text}", titles.join("; ")));
            }
        }
    }
    table::add_cells(&mut run, &done);
    add_device(&mut run, &done);
    table::add_memory(&mut run, &largest(&columns, memories));
    Ok(run)
}

/// Cells that are measured on the same brokers, which were started for them: they find nothing that others have left.
struct Together<'a> {
    cells: &'a [Cell],
    rounds: usize,
    title: String,
}

impl Together<'_> {
    fn measure<'a>(
        &self,
        bench: &mut Bench,
        run: &mut Run,
        place: &Place,
        kinds: &[Kind],
        columns: &'a [Column],
    ) -> Result<(Vec<Cells<'a>>, Vec<Memory>), Failure> {
        require_space(&place.directory, self.space_bytes(bench) * kinds.len() as u64)?;
        let (mut peers, mut at_start) = (Vec::new(), Vec::new());
        for kind in kinds {
            let peer = place.start(kind)?;
            at_start.push(memory(&peer));
            pause(&peer);
            peers.push(peer);
        }
        let mut done: Vec<Cells<'a>> = Vec::new();
        for cell in self.cells {
            // As fast as they were with the same connections and batch.
            let alike = |known: &&Cells| known.cell.connections == cell.connections && known.cell.batch == cell.batch;
            let produced = done.iter().rev().find(alike);
            let expected: Vec<f64> = (0..peers.len())
                .map(|index| produced.and_then(|produced| rate(&produced.rounds[index])).unwrap_or(1000.0))
                .collect();
            let rounds = one_cell(bench, run, &peers, cell, self.rounds, expected, &self.title);
            done.push(Cells { columns, cell: *cell, rounds });
        }
        let memories = peers.iter().zip(at_start).filter_map(|(peer, at_start)| {
            let (at_end, kept) = (memory(peer)?, peer.kept());
            Some(Memory { name: peer.name.clone(), at_start: at_start?, at_end, kept })
        });
        Ok((done, memories.collect()))
    }

    /// What a fast broker may write: each message twice.
    fn space_bytes(&self, bench: &Bench) -> u64 {
        let settings = &bench.settings;
        let messages = |cell: &Cell| {
            let rate_per_s = if cell.batch == 1 { 50_000.0 } else { 400_000.0 };
            let round = (settings.warmup + settings.duration).as_secs_f64() * rate_per_s;
            round.min(measure::ROUND_MAX as f64) * self.rounds as f64
        };
        let produced = self.cells.iter().filter(|cell| cell.operation == Operation::Produce);
        produced.map(messages).sum::<f64>() as u64 * settings.payload_bytes as u64 * 2
    }
}

/// Of each broker the moment at which it stored most.
fn largest(columns: &[Column], mut memories: Vec<Memory>) -> Vec<Memory> {
    memories.sort_by_key(|memory| std::cmp::Reverse(memory.kept));
    columns.iter().filter_map(|column| memories.iter().find(|memory| memory.name == column.name).cloned()).collect()
}

/// All rounds of one cell, by broker. What fails is a note; the others go on.
fn one_cell(
    bench: &mut Bench,
    run: &mut Run,
    peers: &[Peer],
    cell: &Cell,
    rounds: usize,
    mut expected: Vec<f64>,
    title: &str,
) -> Vec<Rounds> {
    let mut results: Vec<Rounds> = vec![Vec::new(); peers.len()];
    for number in 0..rounds {
        for turn in 0..peers.len() {
            let index = (number + turn) % peers.len();
            let peer = &peers[index];
            if let Some(server) = &peer.server {
                server.resume();
            }
            let title = format!("{title}: {}, {}, round {} of {rounds}", cell.title(), peer.name, number + 1);
            let goal = backlog(bench, cell, expected[index]);
            let filled = match cell.operation {
                Operation::Produce => Ok(()),
                Operation::Consume => bench.fill(peer, goal),
            };
            let result = filled.and_then(|()| bench.round(peer, cell, title));
            pause(peer);
            match result {
                Ok(round) => {
                    expected[index] = round.rate_per_s;
                    results[index].push(Some(round));
                }
                Err(Failure(text)) => {
                    results[index].push(None);
                    run.failures.push(text);
                }
            }
        }
    }
    results
}

/// Messages that must wait in the queue so that consumers find some for a whole round, at half as much again as expected.
fn backlog(bench: &Bench, cell: &Cell, expected_per_s: f64) -> i64 {
    let time = bench.settings.warmup + bench.settings.duration;
    let taken = expected_per_s * 1.5 * time.as_secs_f64();
    let spare = (4 * cell.in_flight_max()) as f64;
    (taken.min(BACKLOG_MAX) + spare) as i64
}

fn rate(rounds: &Rounds) -> Option<f64> {
    rounds.iter().flatten().map(|round| round.rate_per_s).max_by(f64::total_cmp)
}

fn pause(peer: &Peer) {
    if let Some(server) = &peer.server {
        server.pause();
    }
}

fn memory(peer: &Peer) -> Option<u64> {
    Some(peer.server.as_ref()?.processes().memory_bytes())
}

fn column(peer: &Peer) -> Column {
    let (name, promise) = (peer.name.clone(), peer.promise.clone());
    Column { name, promise, ack_promise: peer.ack_promise, durable: peer.durable }
}

fn promises(columns: &[Column]) -> String {
    columns.iter().map(|column| format!("{}: {}", column.name, column.promise)).collect::<Vec<_>>().join("; ")
}

fn add_device(run: &mut Run, done: &[Cells<'_>]) {
    let all = || done.iter().flat_map(|cells| cells.rounds.iter().flatten().flatten());
    let p50: Vec<f64> = all().map(|round| round.device_p50_ns).collect();
    let rates: Vec<f64> = all().map(|round| round.device_rate_per_s).collect();
    let (p50, rate) = (crate::report::stats::Spread::of(&p50), crate::report::stats::Spread::of(&rates));
    run.figure("device.durable_4k.p50", p50.median, "ns", Better::Lower);
    run.figure("device.durable_4k.rate", rate.median, "1/s", Better::Higher);
    run.notes.push(format!(
        "the drive's p50 of a durable 4 KiB write was {:.0} to {:.0} µs over the run, {:.0} in the middle",
        p50.low / 1e3,
        p50.high / 1e3,
        p50.median / 1e3
    ));
    run.notes.push(ACKS.into());
    run.notes.push(
        "flushes are the whole device's, whoever asked for them; on a drive with FUA a write may be durable without one".into(),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cells(line: &str) -> Vec<Vec<String>> {
        let words: Vec<&str> = line.split(' ').collect();
        let options = Options::from_args(&["narad-bench", "versus"], &words).expect("a good line");
        options.groups().iter().map(|group| group.iter().map(Cell::key).collect()).collect()
    }

    #[test]
    fn quick_measures_some_cells_unless_it_is_told_which() {
        let some = [vec!["produce.c1.b1", "produce.c8.b1", "produce.c64.b1", "consume.c8.b1"], vec!["produce.c8.b100"]];
        assert_eq!(cells("--quick"), some);
        assert_eq!(cells("--quick --connections 2 --batches 3"), [["produce.c2.b3", "consume.c2.b3"]]);
        assert_eq!(cells("--rounds 1").len(), 6, "each number of connections with each batch");
    }
}
