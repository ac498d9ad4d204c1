//! Rounds of load: one cell (operation, connections, batch) on one broker for some seconds, with what it cost.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hdrhistogram::Histogram;

use super::peer::{Peer, Role};
use super::worker::{Stop, Worker};
use crate::device::{Probe, Sample};
use crate::load::payload::Payloads;
use crate::load::threads::{drive, Drive, Edge};
use crate::load::{cost, Group, Tally, Timing};
use crate::run::Failure;

/// How long operations in flight may take when the time is over.
const GRACE: Duration = Duration::from_secs(3);
/// How long a queue may take to be filled.
const FILL_PATIENCE: Duration = Duration::from_secs(20);
const FILL_CONNECTIONS: usize = 16;
pub const BATCH_MAX: u32 = 100;
/// Most messages that are produced in one round: it is over earlier then. What is produced must be stored.
pub const ROUND_MAX: i64 = 1_000_000;
/// Length of one sample of the drive.
const SAMPLE: Duration = Duration::from_millis(100);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Produce,
    /// Consume and ack.
    Consume,
}

impl Operation {
    pub fn name(self) -> &'static str {
        match self {
            Operation::Produce => "produce",
            Operation::Consume => "consume",
        }
    }
}

/// What is measured at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    pub operation: Operation,
    pub connections: usize,
    pub batch: u32,
}

impl Cell {
    pub fn title(&self) -> String {
        let what = match self.operation {
            Operation::Produce => "produce",
            Operation::Consume => "consume+ack",
        };
        let batch = match self.batch {
            1 => "single".to_owned(),
            batch => format!("batches of {batch}"),
        };
        let s = if self.connections == 1 { "" } else { "s" };
        format!("{what}, {} connection{s}, {batch}", self.connections)
    }

    /// Messages that all connections together may have taken and not acked.
    pub fn in_flight_max(&self) -> i64 {
        self.connections as i64 * i64::from(self.batch)
    }

    /// `produce.c8.b100`.
    pub fn key(&self) -> String {
        format!("{}.c{}.b{}", self.operation.name(), self.connections, self.batch)
    }
}

/// How rounds are run.
#[derive(Clone, Debug)]
pub struct Settings {
    pub payload_bytes: usize,
    pub warmup: Duration,
    pub duration: Duration,
    pub load_cpu: Option<Vec<usize>>,
    pub spin: bool,
    /// On the drive that the brokers write to.
    pub directory: PathBuf,
}

/// What one round gave.
#[derive(Clone, Debug)]
pub struct Round {
    pub rate_per_s: f64,
    /// Of operations: messages, or batches.
    pub latency: Histogram<u64>,
    /// Messages that the costs are for.
    pub messages: f64,
    /// CPU time of the server's processes, until what was accepted can be consumed.
    pub cpu: Option<Duration>,
    pub memory_peak_bytes: Option<u64>,
    /// Of the device: everybody's.
    pub flushes: Option<f64>,
    /// Share of the measured time in which the load's thread was computing.
    pub load_busy: f64,
    /// The drive around this round.
    pub device_p50_ns: f64,
    pub device_rate_per_s: f64,
    /// It was the same before and after, within a factor of two.
    pub device_steady: bool,
    pub troubles: Option<String>,
}

/// The load's side, and the drive.
pub struct Bench {
    pub settings: Settings,
    payloads: Arc<Payloads>,
    probe: Probe,
    counters: cost::Probe,
    before: Option<Sample>,
}

impl Bench {
    pub fn new(settings: Settings) -> Result<Bench, Failure> {
        let payloads = Arc::new(Payloads::new(std::process::id(), settings.payload_bytes));
        let probe = Probe::open(&settings.directory)?;
        let counters = cost::Probe { directory: Some(settings.directory.clone()), ..cost::Probe::default() };
        Ok(Bench { settings, payloads, probe, counters, before: None })
    }

    /// How the drive is written to for its samples.
    pub fn device_method(&self) -> &'static str {
        self.probe.method.title()
    }

    /// The device's flushes so far, everybody's.
    pub fn flushes(&self) -> Option<u64> {
        flushes(&self.counters)
    }

    /// Reads the same on another thread.
    pub fn flush_counter(&self) -> impl Fn() -> Option<u64> + Send {
        let counters = self.counters.clone();
        move || flushes(&counters)
    }

    pub fn payloads(&self) -> &Arc<Payloads> {
        &self.payloads
    }

    /// Drives one group and tells what it did.
    pub fn load(
        &self,
        group: Group<Worker>,
        timing: Timing,
        title: String,
        observe: &mut dyn FnMut(Edge),
    ) -> Result<Tally, Failure> {
        let (cpus, spin) = (self.settings.load_cpu.clone(), self.settings.spin);
        let plan = Drive { timing, threads: 1, apart: false, cpus, spin, title };
        let driven = drive(&plan, vec![group], &mut |edge| {
            observe(edge);
            Ok(())
        })?;
        driven.tallies.into_iter().next().ok_or_else(|| Failure("the load had no connections".into()))
    }

    /// Fills the queue up to `goal` messages; less where the broker is slow.
    pub fn fill(&mut self, peer: &Peer, goal: i64) -> Result<(), Failure> {
        if peer.stock.left() >= goal {
            return Ok(());
        }
        // The drive's last sample is not from just before the next round any more.
        self.before = None;
        let role = Role::Produce { ledger: None };
        let group = peer.group(&role, FILL_CONNECTIONS, BATCH_MAX, &self.payloads, &Stop::Filled(goal));
        let timing = Timing { warmup: Duration::ZERO, duration: Some(FILL_PATIENCE), grace: Duration::ZERO };
        let tally = self.load(group, timing, format!("filling {}", peer.name), &mut |_| {})?;
        if tally.messages == 0 {
            let why = tally.troubles().unwrap_or_else(|| "no answer came".into());
            return Err(Failure(format!("{}: its queue cannot be filled: {why}", peer.name)));
        }
        peer.settle()
    }

    /// One round.
    pub fn round(&mut self, peer: &Peer, cell: &Cell, title: String) -> Result<Round, Failure> {
        let before = match self.before.take() {
            Some(sample) => sample,
            None => self.probe.sample(SAMPLE)?,
        };
        let measured = self.measured(peer, cell, title);
        let after = self.probe.sample(SAMPLE)?;
        self.before = Some(after.clone());
        let mut round = measured?;
        let (p50_before, p50_after) = (before.quantile_ns(0.5), after.quantile_ns(0.5));
        round.device_p50_ns = (p50_before + p50_after) / 2.0;
        round.device_steady = p50_before.max(p50_after) <= 2.0 * p50_before.min(p50_after);
        round.device_rate_per_s = (before.rate_per_s() + after.rate_per_s()) / 2.0;
        Ok(round)
    }

    fn measured(&self, peer: &Peer, cell: &Cell, title: String) -> Result<Round, Failure> {
        let (role, stop) = match cell.operation {
            Operation::Produce => (Role::Produce { ledger: None }, Stop::Filled(peer.stock.left() + ROUND_MAX)),
            Operation::Consume => (Role::Consume, Stop::Consumed(cell.in_flight_max())),
        };
        let group = peer.group(&role, cell.connections, cell.batch, &self.payloads, &stop);
        let timing = Timing { warmup: self.settings.warmup, duration: Some(self.settings.duration), grace: GRACE };
        let processes = peer.server.as_ref().map(|server| server.processes());
        let cpu = || processes.map(|processes| processes.cpu());
        let (mut cpu_before, mut flushes_before) = (None, None);
        let mut observe = |edge| {
            if edge == Edge::Start {
                (cpu_before, flushes_before) = (cpu(), self.flushes());
            }
        };
        let work = || -> Result<_, Failure> {
            let tally = self.load(group, timing, title, &mut observe)?;
            peer.settle()?;
            Ok(tally)
        };
        let (tally, memory_peak_bytes) = match processes {
            Some(processes) => {
                let (tally, peak) = processes.peak_memory(work);
                (tally?, Some(peak))
            }
            None => (work()?, None),
        };
        let spent = cpu().zip(cpu_before).map(|(after, before)| after.saturating_sub(before));
        let flushes = self.flushes().zip(flushes_before).map(|(after, before)| (after - before) as f64);
        if tally.messages == 0 {
            let why = tally.troubles().unwrap_or_else(|| "no answer came".into());
            return Err(Failure(format!("{}: {}: not one message: {why}", peer.name, cell.title())));
        }
        // Where enough was produced, or everything was consumed, it is over before the time is.
        let measured_ns = timing.end().min(tally.last.max(1));
        let busy = tally.cpu.as_nanos() as f64 / measured_ns as f64;
        Ok(Round {
            rate_per_s: tally.messages as f64 * 1e9 / measured_ns as f64,
            messages: (tally.messages + tally.messages_after) as f64,
            cpu: spent,
            memory_peak_bytes,
            flushes,
            load_busy: busy,
            device_p50_ns: 0.0,
            device_rate_per_s: 0.0,
            device_steady: false,
            troubles: tally.troubles(),
            latency: tally.latency,
        })
    }
}

fn flushes(counters: &cost::Probe) -> Option<u64> {
    counters.sample().device?.flushes
}
