//! `narad-bench produce`: how fast a broker accepts messages, and what that is to its drive.

use std::sync::Arc;
use std::time::Duration;

use argh::FromArgs;

use crate::device::paired;
use crate::load::narad::{Budget, Client, Produce, Wire, PRODUCE_BATCH_MAX};
use crate::load::options::{counts, load_options, LoadOptions, Site, ROUNDS_MAX};
use crate::load::payload::Payloads;
use crate::load::threads::{drive, Edge};
use crate::load::{cost, Group, Nanos, Tally, Until};
use crate::parts::require;
use crate::report::stats::Spread;
use crate::run::{Better, Failure, Run, Table};
use crate::Common;

/// How long answers in flight may take when the measured time is over.
const GRACE: Duration = Duration::from_secs(10);
/// Warm-up of the second and later rounds at one number of connections.
const WARM_AGAIN: Duration = Duration::from_millis(300);
/// How long the commits of a round may take before the drive is sampled.
const SETTLE: Duration = Duration::from_secs(5);

load_options! {
    /// produce to a running broker, ours or another that speaks the same API, or to one started here
    #[derive(FromArgs)]
    #[argh(subcommand, name = "produce")]
    pub struct Options {
        /// measure at each of these numbers of connections, such as 1,8,64,256, instead of --connections
        #[argh(option, from_str_fn(counts))]
        sweep: Option<Vec<usize>>,
        /// with --start: rounds that --duration is divided into, with a sample of the drive between them (default 5)
        #[argh(option, default = "5")]
        rounds: usize,
    }
}

/// One measured load, or several like it.
pub struct Measured {
    pub tally: Tally,
    pub end: Nanos,
    pub cost: cost::Cost,
}

impl Measured {
    pub fn rate_per_s(&self) -> f64 {
        self.tally.rate_per_s(self.end)
    }

    pub fn p50_ns(&self) -> f64 {
        self.tally.latency.value_at_quantile(0.5) as f64
    }
}

/// Measures.
pub fn run(_common: &Common, options: &Options) -> Result<Run, Failure> {
    let load = options.load();
    let sweep = options.sweep.clone().unwrap_or_else(|| vec![load.connections]);
    measure(&load, &sweep, options.rounds)
}

/// Produces at each number of connections; on a broker that was started for it in `rounds` rounds, next to the drive.
pub fn measure(load: &LoadOptions, sweep: &[usize], rounds: usize) -> Result<Run, Failure> {
    require("--rounds", rounds, 1..=ROUNDS_MAX)?;
    // The largest number of connections is the one that all threads have some of.
    let most = sweep.iter().max().copied().unwrap_or(load.connections);
    LoadOptions { connections: most, ..load.clone() }.check(PRODUCE_BATCH_MAX)?;
    let site = load.site()?;
    let topic = site.admin.ensure_topic(&load.topic, load.partitions)?;
    let mut run = Run::new("produce");
    load.describe(&mut run);
    run.set("connections", sweep.iter().map(usize::to_string).collect::<Vec<_>>().join(","));
    run.set("partitions", topic.partitions);
    let head = ["connections", "messages/s", "p50 µs", "p99 µs", "rate / device", "p50 / device"];
    run.tables.push(Table { title: "Produce".into(), head: head.map(str::to_owned).to_vec(), rows: Vec::new() });
    for &connections in sweep {
        let load = LoadOptions { connections, ..load.clone() };
        if load.start && load.messages.is_none() {
            beside_the_drive(&mut run, &site, &load, rounds)?;
        } else {
            let measured = once(&site, &load)?;
            let rate = measured.rate_per_s();
            add(&mut run, &load, measured, rate, None);
        }
    }
    Ok(run)
}

/// Rounds of produce with samples of the drive between them.
fn beside_the_drive(run: &mut Run, site: &Site, load: &LoadOptions, rounds: usize) -> Result<(), Failure> {
    run.set("rounds", rounds);
    let duration = load.duration / rounds as u32;
    let paired = paired(&load.directory, rounds, |round| {
        let warmup = if round == 0 { load.warmup } else { load.warmup.min(WARM_AGAIN) };
        let measured = once(site, &LoadOptions { warmup, duration, ..load.clone() })?;
        site.admin.settle(&load.topic, SETTLE)?;
        Ok(measured)
    })?;
    let over_rate = paired.ratio(|round| round.load.rate_per_s() / round.device_rate_per_s());
    let over_p50 = paired.ratio(|round| round.load.p50_ns() / round.device_p50_ns());
    let device = paired.device();
    let name = format!("produce.c{}", load.connections);
    run.figure(format!("{name}.device.p50"), device.quantile_ns(0.5), "ns", Better::Neither);
    run.figure(format!("{name}.device.rate"), device.rate_per_s(), "1/s", Better::Neither);
    run.notes.extend(paired.note().map(|note| format!("{} connections: {note}", load.connections)));
    let rates: Vec<f64> = paired.rounds.iter().map(|round| round.load.rate_per_s()).collect();
    let mut all = paired.rounds.into_iter().map(|round| round.load);
    let mut sum = all.next().ok_or_else(|| Failure("no round was measured".into()))?;
    for measured in all {
        let seconds = sum.tally.rates(sum.end);
        sum.tally.merge(&measured.tally);
        // One after the other, not at once: their seconds follow each other.
        sum.tally.messages_by_second = seconds.iter().map(|count| *count as u64).collect();
        sum.tally.messages_by_second.extend(measured.tally.rates(measured.end).iter().map(|count| *count as u64));
        sum.end += measured.end;
        sum.cost.merge(&measured.cost);
    }
    add(run, load, sum, Spread::of(&rates).median, Some((over_rate, over_p50)));
    Ok(())
}

/// Produces once, with `load.connections` connections.
pub fn once(site: &Site, load: &LoadOptions) -> Result<Measured, Failure> {
    let wire = Wire::new(&site.target, &load.topic);
    let what = Produce {
        payloads: Arc::new(Payloads::new(std::process::id(), load.payload_bytes)),
        batch: load.batch,
        keys: load.keys,
        budget: Budget::new(load.messages),
        ledger: None,
        ahead_max: 0,
    };
    let group = Group {
        name: "produce".into(),
        addresses: site.target.addresses.clone(),
        protocols: (0..load.connections).map(|number| Client::producer(&wire, what.clone(), number as u16)).collect(),
        pace: load.pace(),
        until: Until::End,
    };
    let timing = load.timing(GRACE);
    let title = format!("produce, {} connections", load.connections);
    let (mut before, mut after) = (cost::Sample::default(), cost::Sample::default());
    let driven = drive(&load.drive(title, timing), vec![group], &mut |edge| {
        match edge {
            Edge::Start => before = site.probe.sample(),
            Edge::End => after = site.probe.sample(),
        }
        Ok(())
    })?;
    let tally = driven.tallies.into_iter().next().ok_or_else(|| Failure("the load had no connections".into()))?;
    if tally.messages == 0 {
        let why = tally.troubles().unwrap_or_else(|| "no answer came at all; is the broker stuck?".into());
        return Err(Failure(format!("not one message was accepted: {why}")));
    }
    Ok(Measured { tally, end: timing.end(), cost: after.since(&before) })
}

/// Adds the figures of one number of connections to a result, and its row.
fn add(run: &mut Run, load: &LoadOptions, measured: Measured, rate: f64, ratios: Option<(Spread, Spread)>) {
    let Measured { tally, end, cost } = measured;
    let name = format!("produce.c{}", load.connections);
    let messages = tally.messages as f64;
    run.figure(format!("{name}.rate"), rate, "1/s", Better::Higher);
    run.latency(&name, tally.latency.clone(), tally.rates(end));
    if let Some((over_rate, over_p50)) = &ratios {
        run.figure(format!("{name}.rate_over_device"), over_rate.median, "ratio", Better::Higher);
        run.figure(format!("{name}.p50_over_device"), over_p50.median, "ratio", Better::Lower);
    }
    run.figure(format!("{name}.messages"), messages, "count", Better::Neither);
    run.figure(format!("{name}.refused"), tally.refused_total() as f64, "count", Better::Lower);
    run.figure(format!("{name}.load_cpu_per_message"), tally.cpu.as_nanos() as f64 / messages, "ns", Better::Neither);
    cost.add_to(run, &name, messages, load.payload_bytes);
    run.notes.extend(tally.troubles());
    let us = |quantile| format!("{:.0}", tally.latency.value_at_quantile(quantile) as f64 / 1e3);
    let ratio = |spread: Option<&Spread>| match spread {
        None => "-".to_owned(),
        Some(spread) => format!("{:.2} ({:.2} to {:.2})", spread.median, spread.low, spread.high),
    };
    let (over_rate, over_p50) = (ratios.as_ref().map(|both| &both.0), ratios.as_ref().map(|both| &both.1));
    let row =
        vec![load.connections.to_string(), format!("{rate:.0}"), us(0.5), us(0.99), ratio(over_rate), ratio(over_p50)];
    run.tables[0].rows.push(row);
}
