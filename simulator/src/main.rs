//! `narad-simulate`: runs worlds from seeds until one breaks a rule. A failing seed is printed with its commit, the
//! options it drew and what happened; the same binary with `--seed` shows it again.

mod broker;
mod clients;
mod cluster;
mod control;
mod inspect;
mod ledger;
mod message;
mod metadata;
mod metadata_files;
mod model;
mod nemesis;
mod nemesis_cluster;
mod node;
mod options;
#[cfg(test)]
mod planted;
mod run;
#[cfg(test)]
mod smoke;
mod trace;
mod whole;
mod world;

use std::process::ExitCode;
use std::rc::Rc;
use std::time::{Duration, Instant};

use argh::FromArgs;
use narad_shards::rt::sim::Sim;

use crate::broker::Launcher;
use crate::ledger::{Counts, Rule, Violation};
use crate::model::{Bug, ModelLauncher};
use crate::node::ShardLauncher;
use crate::run::{run_world, Report};

/// One of so many seeds is run twice: the two histories must be the same.
const REPEAT_ONE_IN: u64 = 50;

/// Simulates Narad nodes with their clients, their disks and their misfortunes, from seeds.
#[derive(FromArgs)]
struct Arguments {
    /// how many seeds to run (default 1000)
    #[argh(option, default = "1_000")]
    seeds: u64,

    /// first seed (default 0)
    #[argh(option, default = "0")]
    from: u64,

    /// run this seed alone, and print everything that happened
    #[argh(option)]
    seed: Option<u64>,

    /// go on after a failing seed, and print one line for each
    #[argh(switch)]
    all: bool,

    /// run the in-memory model instead of the shards: to see what the checker makes of a perfect broker
    #[argh(switch)]
    model: bool,

    /// nodes of each world (default 1). Several are whole nodes, with consensus, controller and membership, that are
    /// killed, cut off, stopped and given old files while the network between them fails, instead of their disks
    #[argh(option, default = "1")]
    nodes: usize,

    /// with several nodes: their shards alone, on metadata that is always there, and a membership that errs at will.
    /// Faster, and harder on what shards do with remote owners
    #[argh(switch)]
    shards_only: bool,

    /// run for so many minutes instead of a number of seeds
    #[argh(option)]
    minutes: Option<u64>,
}

fn run(seed: u64, arguments: &Arguments, twice: bool) -> Report {
    let (nodes, whole, model) = (arguments.nodes, !arguments.shards_only, arguments.model);
    let launcher = |seed, options: &options::WorldOptions, sim: &Sim| -> Rc<dyn Launcher> {
        if model {
            Rc::new(ModelLauncher::new(seed, Bug::None))
        } else {
            Rc::new(ShardLauncher::new(seed, options, sim))
        }
    };
    let mut report = run_world(seed, nodes, whole, launcher);
    if twice {
        let again = run_world(seed, nodes, whole, launcher);
        if again.hash != report.hash {
            let differs = report.events.iter().zip(&again.events).find(|(a, b)| a != b);
            let text = format!("two runs differ: {differs:?}");
            report.violations.push(Violation { rule: Rule::Determinism, text });
        }
    }
    report
}

fn print_failure(report: &Report, whole: bool) {
    let shown = if whole { report.events.len() } else { 200 };
    let skipped = report.events.len().saturating_sub(shown);
    if skipped > 0 {
        println!("... {skipped} earlier events");
    }
    report.events[skipped..].iter().for_each(|event| println!("{event}"));
    println!("\nlast calls of the disk:\n{}", report.disk_trace);
    println!("{:#?}", report.options);
    println!("\nseed {} at commit {}:", report.seed, env!("NARAD_COMMIT"));
    report.violations.iter().take(20).for_each(|violation| println!("  {violation}"));
    let options = &report.options;
    let only = if options.nodes > 1 && !options.whole { " --shards-only" } else { "" };
    println!("\nagain: narad-simulate --nodes {}{only} --seed {}", options.nodes, report.seed);
}

fn main() -> ExitCode {
    let arguments: Arguments = argh::from_env();
    if !(1..=16).contains(&arguments.nodes) || (arguments.model && arguments.nodes > 1) {
        eprintln!("narad-simulate: --nodes takes 1 to 16, and the model is one node");
        return ExitCode::FAILURE;
    }
    if let Some(seed) = arguments.seed {
        // A second subscriber is a defect of this file, and would only cost the log lines.
        let _ = tracing::subscriber::set_global_default(trace::Capture);
        let report = run(seed, &arguments, true);
        print_failure(&report, true);
        println!("{:?}, {:?} simulated, {} disk calls", report.counts, report.virtual_time, report.disk_calls);
        return if report.violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let begin = Instant::now();
    let until = arguments.minutes.map(|minutes| begin + Duration::from_secs(minutes * 60));
    let (mut total, mut done, mut failed, mut refused, mut simulated) = (Counts::default(), 0, 0, 0, Duration::ZERO);
    let mut seed = arguments.from;
    loop {
        let over = until.map_or(done >= arguments.seeds, |until| Instant::now() >= until);
        if over {
            break;
        }
        let report = run(seed, &arguments, seed.is_multiple_of(REPEAT_ONE_IN));
        if let Some(first) = report.violations.first() {
            if !arguments.all {
                print_failure(&report, false);
                return ExitCode::FAILURE;
            }
            failed += 1;
            println!("seed {seed} {:?} ({}): {first}", report.options.profile, report.violations.len());
        }
        total.add(&report.counts);
        refused += u64::from(report.refused);
        simulated += report.virtual_time;
        done += 1;
        seed += 1;
        if done % 500 == 0 {
            println!("{done} seeds, {:.0} s: {total:?}", begin.elapsed().as_secs_f64());
        }
    }
    println!(
        "{done} seeds from {} at commit {} in {:.1} s, {simulated:?} simulated, {refused} damaged nodes refused to start",
        arguments.from,
        env!("NARAD_COMMIT"),
        begin.elapsed().as_secs_f64()
    );
    println!("{total:?}");
    if let Some(missing) = total.missing(arguments.nodes > 1 && !arguments.shards_only) {
        println!("these runs prove nothing: {missing}");
        return ExitCode::FAILURE;
    }
    if failed > 0 {
        println!("{failed} of {done} seeds failed");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
