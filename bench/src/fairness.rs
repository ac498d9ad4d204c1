//! `narad-bench fairness`: what is left of the consume rate while others produce as fast as they can.

use std::sync::Arc;
use std::time::Duration;

use argh::FromArgs;

use crate::consume::{consumers, prefill};
use crate::load::narad::{Budget, Client, Consume, Produce, Wire, CONSUME_BATCH_MAX};
use crate::load::options::{load_options, LoadOptions, Site, CONNECTIONS_MAX, ROUNDS_MAX};
use crate::load::payload::Payloads;
use crate::load::threads::{drive, Drive};
use crate::load::{Group, Pace, Tally, Timing, Until};
use crate::parts::require;
use crate::report::stats::Spread;
use crate::run::{Better, Failure, Run};
use crate::Common;

const GRACE: Duration = Duration::from_secs(10);
/// Where the others produce.
const OVERDRIVEN: &str = "bench-overdriven";
/// Messages of one of their requests: many, so that the broker is at its limit before this program is.
const PRODUCED_AT_ONCE: u32 = 100;

load_options! {
    /// consume and ack from a backlog, alone and beside overdriven produce to another topic, in turns
    #[derive(FromArgs)]
    #[argh(subcommand, name = "fairness")]
    pub struct Options {
        /// producing connections that never pause, with batches of 100 (default 64)
        #[argh(option, default = "64")]
        producers: usize,
        /// rounds of one phase alone and one beside produce; --duration is divided by them (default 3)
        #[argh(option, default = "3")]
        rounds: u32,
        /// messages in the backlog at the start of each phase (default 200000)
        #[argh(option, default = "200000")]
        prefill: u64,
    }
}

struct Phase {
    consumed: Tally,
    produced: Option<Tally>,
    rate_per_s: f64,
}

/// Measures.
pub fn run(_common: &Common, options: &Options) -> Result<Run, Failure> {
    let load = options.load();
    load.check(CONSUME_BATCH_MAX)?;
    if load.messages.is_some() {
        return Err(Failure("fairness compares phases of the same length: leave out --messages".into()));
    }
    require("--rounds", options.rounds, 1..=ROUNDS_MAX as u32)?;
    require("--producers", options.producers, 1..=CONNECTIONS_MAX)?;
    let rounds = options.rounds;
    let phase = load.duration / rounds;
    let site = load.site()?;
    let topic = site.admin.ensure_topic(&load.topic, load.partitions)?;
    site.admin.ensure_topic(OVERDRIVEN, load.partitions)?;
    let mut run = Run::new("fairness");
    load.describe(&mut run);
    run.set("partitions", topic.partitions);
    run.set("producers", options.producers);
    run.set("rounds", rounds);
    run.set("prefill", options.prefill);

    let (mut alone, mut beside) = (Tally::new("alone"), Tally::new("beside produce"));
    let mut produced = Tally::new("produce");
    let (mut rates_alone, mut rates_beside, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    let (mut backlog, mut dry) = (0, 0);
    for round in 0..rounds {
        let mut pair = Vec::new();
        for overdriven in [false, true] {
            prefill(&site, &load, &load.topic, options.prefill.saturating_sub(backlog))?;
            backlog = options.prefill.max(backlog);
            let title = format!(
                "fairness, round {} of {rounds}, {}",
                round + 1,
                if overdriven { "overdriven" } else { "alone" }
            );
            let producers = if overdriven { options.producers } else { 0 };
            let done = measure(&site, &load, producers, phase, title)?;
            let consumed = &done.consumed;
            // Consumers that wait for messages hardly count as empty answers: the messages tell.
            dry += u32::from(consumed.messages_in_all() >= backlog);
            backlog = backlog.saturating_sub(consumed.messages_in_all());
            pair.push(done.rate_per_s);
            match done.produced {
                None => alone.merge(consumed),
                Some(tally) => {
                    beside.merge(consumed);
                    produced.merge(&tally);
                }
            }
        }
        rates_alone.push(pair[0]);
        rates_beside.push(pair[1]);
        ratios.push(pair[1] / pair[0]);
    }

    let seconds = phase.as_secs_f64() * f64::from(rounds);
    run.figure("fairness.ratio", Spread::of(&ratios).median, "ratio", Better::Higher);
    run.figure("fairness.alone.rate", Spread::of(&rates_alone).median, "1/s", Better::Higher);
    run.figure("fairness.beside.rate", Spread::of(&rates_beside).median, "1/s", Better::Higher);
    run.figure("fairness.produce.rate", produced.messages as f64 / seconds, "1/s", Better::Neither);
    run.latency("fairness.alone", alone.latency.clone(), Vec::new());
    run.latency("fairness.beside", beside.latency.clone(), Vec::new());
    run.latency("fairness.produce", produced.latency.clone(), Vec::new());
    for tally in [&alone, &beside, &produced] {
        run.notes.extend(tally.troubles());
    }
    if dry > 0 {
        let phases = 2 * rounds;
        run.notes.push(format!(
            "the backlog was used up in {dry} of {phases} phases: the ratio says nothing; fill it with more (--prefill)"
        ));
    }
    Ok(run)
}

/// One phase: consumers, and beside them `producers` connections on another topic.
fn measure(
    site: &Site,
    load: &LoadOptions,
    producers: usize,
    duration: Duration,
    title: String,
) -> Result<Phase, Failure> {
    let how =
        Consume { batch: load.batch, wait: Duration::from_secs(1), ack: true, budget: Budget::new(None), verify: None };
    let mut groups = vec![consumers(site, load, how)];
    if producers > 0 {
        let what = Produce {
            payloads: Arc::new(Payloads::new(0, load.payload_bytes)),
            batch: PRODUCED_AT_ONCE,
            keys: load.keys,
            budget: Budget::new(None),
            ledger: None,
            ahead_max: 0,
        };
        let wire = Wire::new(&site.target, OVERDRIVEN);
        groups.push(Group {
            name: "produce".into(),
            addresses: site.target.addresses.clone(),
            protocols: (0..producers).map(|number| Client::producer(&wire, what.clone(), number as u16)).collect(),
            pace: Pace::Closed,
            until: Until::End,
        });
    }
    let timing = Timing { warmup: load.warmup.min(Duration::from_secs(1)), duration: Some(duration), grace: GRACE };
    // In threads of their own: otherwise consumers would wait for producers in this program already.
    let options = Drive { apart: true, ..load.drive(title, timing) };
    let driven = drive(&options, groups, &mut |_| Ok(()))?;
    let mut tallies = driven.tallies.into_iter();
    let consumed = tallies.next().ok_or_else(|| Failure("the load had no consumers".into()))?;
    let produced = tallies.next();
    if consumed.messages == 0 {
        let why = consumed.troubles().unwrap_or_else(|| {
            "the backlog was gone when the measured time began; give a larger --prefill or a shorter --warmup".into()
        });
        return Err(Failure(format!("not one message was consumed: {why}")));
    }
    Ok(Phase { rate_per_s: consumed.rate_per_s(timing.end()), consumed, produced })
}
