//! `narad-bench produce`: how fast a broker accepts messages.

use std::sync::Arc;
use std::time::Duration;

use argh::FromArgs;

use crate::load::narad::{Budget, Client, Produce, Wire, PRODUCE_BATCH_MAX};
use crate::load::options::{counts, load_options, LoadOptions, Site};
use crate::load::payload::Payloads;
use crate::load::threads::{drive, Edge};
use crate::load::{cost, Group, Nanos, Tally, Until};
use crate::run::{Better, Failure, Run};
use crate::Common;

/// How long answers in flight may take when the measured time is over.
const GRACE: Duration = Duration::from_secs(10);

load_options! {
    /// produce to a running broker, ours or another that speaks the same API, or to one started here
    #[derive(FromArgs)]
    #[argh(subcommand, name = "produce")]
    pub struct Options {
        /// measure at each of these numbers of connections, such as 1,8,64,256, instead of --connections
        #[argh(option, from_str_fn(counts))]
        sweep: Option<Vec<usize>>,
    }
}

/// One measured load.
pub struct Measured {
    pub tally: Tally,
    pub end: Nanos,
    pub before: cost::Sample,
    pub after: cost::Sample,
}

impl Measured {
    pub fn rate_per_s(&self) -> f64 {
        self.tally.rate_per_s(self.end)
    }
}

/// Measures.
pub fn run(_common: &Common, options: &Options) -> Result<Run, Failure> {
    let load = options.load();
    load.check(PRODUCE_BATCH_MAX)?;
    let site = load.site()?;
    let topic = site.admin.ensure_topic(&load.topic, load.partitions)?;
    let mut run = Run::new("produce");
    load.describe(&mut run);
    run.set("partitions", topic.partitions);
    let sweep = options.sweep.clone().unwrap_or_else(|| vec![load.connections]);
    for connections in sweep {
        let load = LoadOptions { connections, ..load.clone() };
        let measured = measure(&site, &load)?;
        add(&mut run, &format!("produce.c{connections}"), &load, measured)?;
    }
    Ok(run)
}

/// Produces once, with `load.connections` connections.
pub fn measure(site: &Site, load: &LoadOptions) -> Result<Measured, Failure> {
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
    Ok(Measured { tally, end: timing.end(), before, after })
}

/// Adds a load's figures to a result, under `name`.
pub fn add(run: &mut Run, name: &str, load: &LoadOptions, measured: Measured) -> Result<(), Failure> {
    let Measured { tally, end, before, after } = measured;
    run.figure(format!("{name}.rate"), tally.rate_per_s(end), "1/s", Better::Higher);
    run.figure(format!("{name}.messages"), tally.messages as f64, "count", Better::Neither);
    run.latency(name, tally.latency.clone(), tally.rates(end));
    run.figure(format!("{name}.refused"), tally.refused_total() as f64, "count", Better::Lower);
    let messages = tally.messages as f64;
    run.figure(format!("{name}.load_cpu_per_message"), tally.cpu.as_nanos() as f64 / messages, "ns", Better::Neither);
    cost::report(run, name, &before, &after, messages, load.payload_bytes);
    run.notes.extend(tally.troubles());
    Ok(())
}
