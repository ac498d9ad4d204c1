//! `narad-bench suite`: all of it in one command and one result, each load as a ratio to the drive or to the ceiling
//! measured beside it, and the table of targets.

mod gather;
mod plan;
mod targets;

use std::path::PathBuf;

use argh::FromArgs;
use narad_shards::io::system;

use crate::device::paired;
use crate::load::process::require_directory;
use crate::report::{human, Progress};
use crate::run::{Better, Failure, Load, Run, Table};
use crate::Common;
use gather::Measured;
use plan::{Part, Place, Step};

/// everything, in about ten minutes, on one report page (name a directory for it with --out)
#[derive(FromArgs)]
#[argh(subcommand, name = "suite")]
pub struct Options {
    /// directory on the drive to measure; brokers keep their data there (default: the current)
    #[argh(option, default = "PathBuf::from(\".\")")]
    pub dir: PathBuf,
    /// the broker's program (default: narad beside this program)
    #[argh(option)]
    pub binary: Option<PathBuf>,
    /// only these parts: a list of device, ring, wal, log, accept, batch, fairness, recover, idle, versus
    #[argh(option)]
    pub only: Option<String>,
    /// everything shorter, to see that it works
    #[argh(switch)]
    pub quick: bool,
}

/// Measures. A part that fails is reported as failed; the others go on.
pub fn run(common: &Common, options: &Options) -> Result<Run, Failure> {
    require_directory(&options.dir)?;
    let place =
        Place { dir: options.dir.clone(), binary: options.binary.clone(), cpus: allowed_cpus(), quick: options.quick };
    let parts = chosen(place.parts(), options.only.as_deref())?;
    let common = Common { out: None, compare: None, ..common.clone() };
    let mut suite = Run::new("suite");
    suite.load = Some(Load::Closed);
    if options.quick {
        suite.notes.push("with --quick everything is too short to mean anything".into());
    }
    suite.set("dir", options.dir.display());
    suite.set("cpus", format!("{:?}", place.cpus));
    let mut states = Vec::new();
    let progress = Progress::new();
    for (index, part) in parts.iter().enumerate() {
        let title = format!("part {} of {}: {}", index + 1, parts.len(), part.name);
        let before = suite.failures.len();
        let outcome = run_part(&mut suite, &common, &place, part, &|text| progress.show(&format!("{title}, {text}")));
        if let Err(Failure(reason)) = outcome {
            suite.failures.push(format!("{}: {reason}", part.name));
        }
        let state = if suite.failures.len() > before { "failed" } else { "done" };
        let reasons = suite.failures[before..].join("; ");
        states.push(vec![part.name.to_string(), state.to_string(), reasons]);
    }
    let (table, passed, missed) = targets::table(&suite);
    suite.notes.push(format!("{passed} targets passed and {missed} missed; the median of the rounds decides"));
    let head = ["part", "state", "reason"].map(String::from).to_vec();
    let states = Table { title: "Parts".into(), head, rows: states };
    let loads = loads(&suite, &parts);
    suite.tables.splice(0..0, [table, states, loads]);
    Ok(suite)
}

fn chosen(parts: Vec<Part>, only: Option<&str>) -> Result<Vec<Part>, Failure> {
    let Some(only) = only else { return Ok(parts) };
    let names: Vec<&str> = only.split(',').map(str::trim).collect();
    if let Some(unknown) = names.iter().find(|name| parts.iter().all(|part| part.name != **name)) {
        let known: Vec<&str> = parts.iter().map(|part| part.name).collect();
        return Err(Failure(format!("--only {unknown}: there is no such part here; there are {}", known.join(", "))));
    }
    Ok(parts.into_iter().filter(|part| names.contains(&part.name)).collect())
}

fn allowed_cpus() -> Vec<usize> {
    system::allowed_cpus().map_or_else(|_| Vec::new(), |cpus| cpus.into_iter().map(|cpu| cpu as usize).collect())
}

fn run_part(suite: &mut Run, common: &Common, place: &Place, part: &Part, show: &dyn Fn(&str)) -> Result<(), Failure> {
    for step in &part.steps {
        suite.set(&format!("line {}", step_name(step)), step.line());
    }
    if !part.paired {
        for step in &part.steps {
            show(&step_name(step));
            let run = crate::measure(&step.words, common)?;
            gather::add(suite, step, &run);
            gather::add_tables(suite, step, &run);
        }
        return Ok(());
    }
    let count = part.steps.len();
    let mut failed = vec![None; count];
    let measured = paired(&place.dir, part.rounds * count, |index| {
        let (round, at) = (index / count, index % count);
        let step = &part.steps[at];
        if failed[at].is_some() {
            return Ok(None);
        }
        show(&format!("round {} of {}, {}", round + 1, part.rounds, step_name(step)));
        match crate::measure(&step.words, common) {
            Ok(run) => Ok(Some(run)),
            Err(Failure(reason)) => {
                failed[at] = Some(reason);
                Ok(None)
            }
        }
    })?;
    suite.notes.extend(measured.note());
    let (name, device) = (format!("device.around_{}", part.name), measured.device());
    suite.figure(format!("{name}.cpu_wait"), device.cpu_wait(), "ratio", Better::Neither);
    suite.latency(&name, device.latency, Vec::new());
    for (at, step) in part.steps.iter().enumerate() {
        let rounds: Vec<&Measured> = measured.rounds.iter().skip(at).step_by(count).collect();
        for (round, counts) in rounds.iter().zip(gather::counts(&rounds)) {
            if let Some(run) = &round.load {
                gather::add(suite, step, run);
                if counts {
                    gather::add_ratios(suite, step, round);
                }
            }
        }
    }
    for turn in measured.rounds.chunks(count) {
        let runs: Vec<(&Step, &Run)> =
            part.steps.iter().zip(turn).filter_map(|(step, round)| Some((step, round.load.as_ref()?))).collect();
        for (step, run) in &runs {
            gather::add_ceiling(suite, step, run, &runs);
        }
    }
    let reasons = part.steps.iter().zip(failed).filter_map(|(step, reason)| Some((step, reason?)));
    suite.failures.extend(reasons.map(|(step, reason)| format!("{}: {reason}", step_name(step))));
    Ok(())
}

/// The label, with the connections where there are some.
fn step_name(step: &Step) -> String {
    let connections = step.words.iter().position(|word| word == "--connections").and_then(|at| step.words.get(at + 1));
    connections.map_or(step.label.clone(), |connections| format!("{}.c{connections}", step.label))
}

/// The loads, each with its ratios.
fn loads(suite: &Run, parts: &[Part]) -> Table {
    let rows = parts.iter().filter(|part| part.paired).flat_map(|part| &part.steps).map(|step| {
        let name = step_name(step);
        // Not every command names its figures by the connections.
        let show = |figure: &str, unit: &str| {
            let spread =
                [&name, &step.label].iter().find_map(|name| targets::spread(suite, &format!("{name}.{figure}")));
            spread.map_or("-".into(), |spread| human(spread.median, unit))
        };
        vec![
            name.clone(),
            show("rate", "1/s"),
            show("rate_over_device", "ratio"),
            show("rate_over_http", "ratio"),
            show("p50", "ns"),
            show("p50_over_device", "ratio"),
            show("p99", "ns"),
            show("rate_per_broker_core", "1/s"),
        ]
    });
    let head = ["load", "rate", "over device", "over http", "p50", "over device", "p99", "per broker core"];
    Table {
        title:
            "Loads: medians of the rounds; ratios of each round to the device's serial durable 4 KiB write and to the \
                http ceiling measured beside it"
                .into(),
        head: head.map(String::from).to_vec(),
        rows: rows.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn common() -> Common {
        Common { out: None, compare: None, repeat: 1 }
    }

    #[test]
    fn a_part_that_fails_is_reported_and_the_others_go_on() {
        let dir = std::env::temp_dir();
        let options =
            Options { dir, binary: Some("/nowhere/narad".into()), only: Some("device,fairness".into()), quick: true };
        let run = run(&common(), &options).map_err(|Failure(reason)| reason).unwrap();
        assert!(run.value("device.durable_4k.p50").is_some_and(|p50| p50 > 0.0));
        assert_eq!(run.failures.len(), 1);
        let states: Vec<&str> = run.tables[1].rows.iter().map(|row| row[1].as_str()).collect();
        assert_eq!(states, ["done", "failed"]);
        assert!(run.failures[0].starts_with("fairness: "), "{:?}", run.failures);
    }

    #[test]
    fn an_unknown_part_is_a_sentence_that_names_the_known_ones() {
        let options = Options { dir: ".".into(), binary: None, only: Some("device,sing".into()), quick: true };
        let Failure(text) = run(&common(), &options).unwrap_err();
        assert!(text.contains("--only sing") && text.contains("device, "), "{text}");
    }
}
