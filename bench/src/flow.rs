//! `narad-bench flow`: produce, consume and ack at once, and proof that every message answered 202 came back.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use argh::FromArgs;

use crate::consume;
use crate::load::ledger::Ledger;
use crate::load::narad::{
    lock, Budget, Client, Consume, Produce, SharedLedger, Wire, CONSUME_BATCH_MAX, PRODUCE_BATCH_MAX,
};
use crate::load::options::{duration, load_options, CONNECTIONS_MAX};
use crate::load::payload::{Payloads, BYTES_MIN};
use crate::load::threads::{drive, Edge};
use crate::load::{cost, Group, Pace, Until};
use crate::parts::require;
use crate::run::{Better, Failure, Run};
use crate::Common;

/// Missing messages that are named.
const NAMED_MAX: usize = 5;

load_options! {
    /// produce, consume and ack, and check that every message answered 202 came back; on a running broker, ours or
    /// another that speaks the same API, or on one started here
    #[derive(FromArgs)]
    #[argh(subcommand, name = "flow")]
    pub struct Options {
        /// consuming connections (default: as many as --connections, which produce)
        #[argh(option)]
        consumers: Option<usize>,
        /// messages that producers may be ahead of consumers (default 10000, or four rounds of batches; 0: no limit)
        #[argh(option)]
        ahead: Option<u64>,
        /// how long a consume waits when there is nothing (default 1s)
        #[argh(option, default = "Duration::from_secs(1)", from_str_fn(duration))]
        wait: Duration,
        /// how long missing messages may take to come back at the end (default 30s)
        #[argh(option, default = "Duration::from_secs(30)", from_str_fn(duration))]
        drain: Duration,
    }
}

/// Measures, and verifies.
pub fn run(_common: &Common, options: &Options) -> Result<Run, Failure> {
    let load = options.load();
    load.check(PRODUCE_BATCH_MAX)?;
    if let Some(consumers) = options.consumers {
        require("--consumers", consumers, 1..=CONNECTIONS_MAX)?;
    }
    if load.payload_bytes < BYTES_MIN {
        let text = format!(
            "--payload {}: flow writes who sent it into each message, which takes {BYTES_MIN} bytes",
            load.payload_bytes
        );
        return Err(Failure(text));
    }
    let site = load.site()?;
    let topic = site.admin.ensure_topic(&load.topic, load.partitions)?;
    let consumer_count = options.consumers.unwrap_or(load.connections);
    let round = load.connections as u64 * u64::from(load.batch);
    let ahead_max = options.ahead.unwrap_or((round * 4).max(10_000));

    let mut run = Run::new("flow");
    load.describe(&mut run);
    run.set("partitions", topic.partitions);
    run.set("consumers", consumer_count);
    run.set("ahead", ahead_max);
    run.set("drain_s", options.drain.as_secs_f64());

    let ledger: SharedLedger = Arc::new(Mutex::new(Ledger::new(load.connections)));
    let payloads = Arc::new(Payloads::new(run_number(), load.payload_bytes));
    let wire = Wire::new(&site.target, &load.topic);
    let what = Produce {
        payloads: payloads.clone(),
        batch: load.batch,
        keys: load.keys,
        budget: Budget::new(load.messages),
        ledger: Some(ledger.clone()),
        ahead_max,
    };
    let how = Consume {
        batch: load.batch.min(CONSUME_BATCH_MAX),
        wait: options.wait,
        ack: true,
        budget: Budget::new(None),
        verify: Some((ledger.clone(), payloads)),
    };
    let addresses = &site.target.addresses;
    let producers = Group {
        name: "produce".into(),
        addresses: addresses.clone(),
        protocols: (0..load.connections).map(|number| Client::producer(&wire, what.clone(), number as u16)).collect(),
        pace: load.pace(),
        until: Until::End,
    };
    let consumers = Group {
        name: "consume".into(),
        addresses: addresses.clone(),
        protocols: (0..consumer_count).map(|_| Client::consumer(&wire, how.clone())).collect(),
        pace: Pace::Closed,
        until: Until::Finished,
    };
    let timing = load.timing(options.drain + options.wait);
    let (mut before, mut after) = (cost::Sample::default(), cost::Sample::default());
    let title = format!("flow, {} + {consumer_count} connections", load.connections);
    let driven = drive(&load.drive(title, timing), vec![producers, consumers], &mut |edge| {
        match edge {
            Edge::Start => before = site.probe.sample(),
            Edge::End => after = site.probe.sample(),
        }
        Ok(())
    })?;
    let (produced, consumed) = (&driven.tallies[0], &driven.tallies[1]);
    let ledger = lock(&ledger);
    verify(&ledger, options.drain)?;
    if ledger.confirmed == 0 || consumed.messages == 0 {
        let why = produced.troubles().or_else(|| consumed.troubles()).unwrap_or_else(|| "no answer came".into());
        return Err(Failure(format!("not one message went through: {why}")));
    }

    let end = timing.end();
    let seen = Client::consumed(&driven.protocols);
    let messages = consumed.messages as f64;
    run.figure("flow.rate", consumed.rate_per_s(end), "1/s", Better::Higher);
    run.latency("flow.delivery", seen.delivery.clone(), consumed.rates(end));
    run.figure("flow.produce.rate", produced.rate_per_s(end), "1/s", Better::Higher);
    run.latency("flow.produce", produced.latency.clone(), produced.rates(end));
    run.notes.extend(produced.troubles());
    consume::add(&mut run, "flow.consume", consumed, &seen, end);
    for (name, count) in [
        ("sent", ledger.sent),
        ("confirmed", ledger.confirmed),
        ("returned", ledger.seen),
        ("duplicates", ledger.duplicates),
        ("foreign", ledger.foreign),
    ] {
        run.figure(format!("flow.{name}"), count as f64, "count", Better::Neither);
    }
    let cpu = produced.cpu + consumed.cpu;
    run.figure("flow.load_cpu_per_message", cpu.as_nanos() as f64 / messages, "ns", Better::Neither);
    after.since(&before).add_to(&mut run, "flow", messages, load.payload_bytes);
    run.notes.push(format!("verified: all {} messages answered 202 came back", ledger.confirmed));
    if ledger.foreign > 0 {
        run.notes.push(format!(
            "{} messages were in the topic before this run; they were consumed and acked too",
            ledger.foreign
        ));
    }
    Ok(run)
}

/// What must never happen, in words.
fn verify(ledger: &Ledger, drain: Duration) -> Result<(), Failure> {
    if ledger.damaged > 0 || ledger.invented > 0 {
        return Err(Failure(format!(
            "{} messages came back with other bytes than were sent, {} under numbers that were never sent",
            ledger.damaged, ledger.invented
        )));
    }
    if ledger.missing > 0 {
        let named: Vec<String> =
            ledger.missing_sample(NAMED_MAX).iter().map(|(producer, number)| format!("{producer}/{number}")).collect();
        return Err(Failure(format!(
            "{} of {} messages answered 202 did not come back within {} s (producer/number: {}); a consumer of somebody else on this topic, or a lease of a run that was cut off, has them, or they are lost",
            ledger.missing,
            ledger.confirmed,
            drain.as_secs(),
            named.join(", ")
        )));
    }
    Ok(())
}

/// Tells this run's messages from those of others in the same topic.
fn run_number() -> u32 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    // Its low bits: they differ between any two runs that could meet.
    (since.as_micros() as u32) ^ std::process::id().rotate_left(16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::payload::Identity;

    #[test]
    fn a_202_that_did_not_come_back_fails_the_run_by_name() {
        let mut ledger = Ledger::new(1);
        ledger.send(0, 3);
        ledger.confirm(0, 0, 3);
        ledger.receive(&Identity { run: 0, producer: 0, sequence: 1, sent: 0 });
        let words = verify(&ledger, Duration::from_secs(7)).unwrap_err().0;
        assert!(
            words.starts_with("2 of 3 messages answered 202 did not come back within 7 s (producer/number: 0/0, 0/2)"),
            "{words}"
        );
        for sequence in [0, 2, 2] {
            ledger.receive(&Identity { run: 0, producer: 0, sequence, sent: 0 });
        }
        assert!(verify(&ledger, Duration::ZERO).is_ok(), "a duplicate is legal");
        ledger.damaged = 1;
        assert!(verify(&ledger, Duration::ZERO).is_err());
    }
}
