//! `narad-bench consume`: how fast a broker hands messages out and settles them.

use std::sync::Arc;
use std::time::Duration;

use argh::FromArgs;

use crate::load::narad::{Budget, Client, Consume, Consumed, Produce, Wire, CONSUME_BATCH_MAX, PRODUCE_BATCH_MAX};
use crate::load::options::{duration, load_options, LoadOptions, Site};
use crate::load::payload::Payloads;
use crate::load::threads::{drive, Edge};
use crate::load::{cost, Group, Nanos, Pace, Tally, Timing, Until};
use crate::run::{Better, Failure, Run};
use crate::Common;

/// How long answers in flight may take when the measured time is over, beyond the longest wait.
const GRACE: Duration = Duration::from_secs(10);
const PREFILL_CONNECTIONS: usize = 4;
const PREFILL_PATIENCE: Duration = Duration::from_secs(120);
/// Bytes of one request of a prefill; the routes take 16 MiB.
const PREFILL_BYTES_MAX: usize = 4 << 20;

load_options! {
    /// consume and ack from a running broker, ours or another that speaks the same API, or from one started here
    #[derive(FromArgs)]
    #[argh(subcommand, name = "consume")]
    pub struct Options {
        /// messages to produce first, so that there is something to consume (default 200000 with --start, else 0)
        #[argh(option)]
        prefill: Option<u64>,
        /// how long the broker waits when it has nothing (default 1s)
        #[argh(option, default = "Duration::from_secs(1)", from_str_fn(duration))]
        wait: Duration,
        /// do not ack: messages come again when their lease lapses
        #[argh(switch)]
        no_ack: bool,
    }
}

/// Measures.
pub fn run(_common: &Common, options: &Options) -> Result<Run, Failure> {
    let load = options.load();
    load.check(CONSUME_BATCH_MAX)?;
    let site = load.site()?;
    let topic = site.admin.ensure_topic(&load.topic, load.partitions)?;
    let mut run = Run::new("consume");
    load.describe(&mut run);
    let prefilled = options.prefill.unwrap_or(if load.start { 200_000 } else { 0 });
    run.set("partitions", topic.partitions);
    run.set("prefill", prefilled);
    run.set("wait_ms", options.wait.as_millis());
    run.set("ack", !options.no_ack);
    prefill(&site, &load, &load.topic, prefilled)?;

    let timing = load.timing(GRACE + options.wait);
    let (mut before, mut after) = (cost::Sample::default(), cost::Sample::default());
    let how = Consume {
        batch: load.batch,
        wait: options.wait,
        ack: !options.no_ack,
        budget: Budget::new(load.messages),
        verify: None,
    };
    let group = consumers(&site, &load, how);
    let title = format!("consume, {} connections", load.connections);
    let driven = drive(&load.drive(title, timing), vec![group], &mut |edge| {
        match edge {
            Edge::Start => before = site.probe.sample(),
            Edge::End => after = site.probe.sample(),
        }
        Ok(())
    })?;
    let tally = &driven.tallies[0];
    if tally.messages == 0 {
        let why = tally.troubles().unwrap_or_else(|| {
            "the topic was empty when the measured time began; fill it with --prefill, or shorten --warmup".into()
        });
        return Err(Failure(format!("not one message was consumed: {why}")));
    }
    let name = format!("consume.c{}", load.connections);
    add(&mut run, &name, tally, &Client::consumed(&driven.protocols), timing.end());
    let messages = tally.messages as f64;
    run.figure(format!("{name}.load_cpu_per_message"), tally.cpu.as_nanos() as f64 / messages, "ns", Better::Neither);
    after.since(&before).add_to(&mut run, &name, messages, load.payload_bytes);
    if let Some(note) = ran_dry(tally) {
        run.notes.push(note);
    }
    Ok(run)
}

/// The consuming connections of a load.
pub fn consumers(site: &Site, load: &LoadOptions, how: Consume) -> Group<Client> {
    let wire = Wire::new(&site.target, &load.topic);
    Group {
        name: "consume".into(),
        addresses: site.target.addresses.clone(),
        protocols: (0..load.connections).map(|_| Client::consumer(&wire, how.clone())).collect(),
        pace: load.pace(),
        until: Until::End,
    }
}

/// Adds the figures of consumers to a result, under `name`.
pub fn add(run: &mut Run, name: &str, tally: &Tally, seen: &Consumed, end: Nanos) {
    run.figure(format!("{name}.rate"), tally.rate_per_s(end), "1/s", Better::Higher);
    run.figure(format!("{name}.messages"), tally.messages as f64, "count", Better::Neither);
    run.latency(name, tally.latency.clone(), tally.rates(end));
    if !seen.ack.is_empty() {
        run.latency(&format!("{name}.ack"), seen.ack.clone(), Vec::new());
    }
    run.figure(format!("{name}.empty"), tally.empty as f64, "count", Better::Neither);
    run.figure(format!("{name}.ack_refused"), seen.ack_refused as f64, "count", Better::Lower);
    run.notes.extend(tally.troubles());
}

/// A sentence where consumers found nothing: then the producer was measured, or an empty topic.
fn ran_dry(tally: &Tally) -> Option<String> {
    let share = tally.empty as f64 / (tally.empty + tally.operations).max(1) as f64;
    (share > 0.01).then(|| {
        format!(
            "{:.0} % of the consumes found nothing: the backlog ran dry; fill it with more (--prefill)",
            share * 100.0
        )
    })
}

/// Produces `messages` to a topic as fast as it goes, and waits until they can be consumed.
pub fn prefill(site: &Site, load: &LoadOptions, topic: &str, messages: u64) -> Result<(), Failure> {
    if messages == 0 {
        return Ok(());
    }
    let committed = site.admin.topic(topic)?.committed;
    let batch = (PREFILL_BYTES_MAX / (load.payload_bytes + 64)).clamp(1, PRODUCE_BATCH_MAX as usize) as u32;
    let what = Produce {
        payloads: Arc::new(Payloads::new(0, load.payload_bytes)),
        batch,
        keys: load.keys,
        budget: Budget::new(Some(messages)),
        ledger: None,
        ahead_max: 0,
    };
    let wire = Wire::new(&site.target, topic);
    let group = Group {
        name: "prefill".into(),
        addresses: site.target.addresses.clone(),
        protocols: (0..PREFILL_CONNECTIONS).map(|n| Client::producer(&wire, what.clone(), n as u16)).collect(),
        pace: Pace::Closed,
        until: Until::Finished,
    };
    let timing = Timing { warmup: Duration::ZERO, duration: None, grace: PREFILL_PATIENCE };
    let driven = drive(&load.drive(format!("filling topic {topic}"), timing), vec![group], &mut |_| Ok(()))?;
    let tally = &driven.tallies[0];
    if tally.messages < messages {
        let why = tally.troubles().unwrap_or_else(|| format!("it took longer than {} s", PREFILL_PATIENCE.as_secs()));
        return Err(Failure(format!(
            "topic {topic}: {} of {messages} messages could be produced: {why}",
            tally.messages
        )));
    }
    site.admin.wait_committed(topic, committed + messages, PREFILL_PATIENCE)
}
