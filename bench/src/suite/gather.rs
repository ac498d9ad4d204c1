//! From the results of many commands to one: names that tell them apart, ratios to the drive taken round by round.

use super::plan::Step;
use crate::device::Round;
use crate::run::{Better, Run, Table};

/// A step's result in one round, between two samples of the drive; `None` where it failed.
pub type Measured = Round<Option<Run>>;

/// A figure's name in the suite: the step's label in the place of the command's name.
pub fn rename(step: &Step, name: &str) -> String {
    let command = step.command();
    match name.strip_prefix(command) {
        Some(rest) if rest.is_empty() || rest.starts_with('.') => format!("{}{rest}", step.label),
        _ => format!("{}.{name}", step.label),
    }
}

/// Adds what a step gave in one round.
pub fn add(suite: &mut Run, step: &Step, run: &Run) {
    for figure in &run.figures {
        suite.figure(rename(step, &figure.name), figure.value, figure.unit, figure.better);
    }
    for series in &run.series {
        let mut series = series.clone();
        series.name = rename(step, &series.name);
        suite.series.push(series);
    }
    for note in &run.notes {
        if !suite.notes.contains(note) {
            suite.notes.push(note.clone());
        }
    }
    suite.failures.extend(run.failures.iter().map(|failure| format!("{}: {failure}", step.label)));
}

/// Adds the tables of a step that ran once.
pub fn add_tables(suite: &mut Run, step: &Step, run: &Run) {
    suite.tables.extend(run.tables.iter().map(|table| {
        let title = match table.title.is_empty() {
            true => step.label.clone(),
            false => format!("{}: {}", step.label, table.title),
        };
        Table { title, ..table.clone() }
    }));
}

/// Adds the ratios of a round: latencies over the drive's p50, rates over its serial durable writes a second, the p99
/// over the p50. Commands that sampled the drive themselves, even closer to their load, have the first two already.
pub fn add_ratios(suite: &mut Run, step: &Step, round: &Measured) {
    let Some(run) = &round.load else { return };
    if run.command == "http" {
        // It stores nothing: the drive has no part in it.
        return;
    }
    for figure in &run.figures {
        let name = rename(step, &figure.name);
        if figure.unit == "ns" && name.ends_with(".p50") {
            if run.value(&format!("{}_over_device", figure.name)).is_none() {
                let ratio = figure.value / round.device_p50_ns();
                suite.figure(format!("{name}_over_device"), ratio, "ratio", Better::Lower);
            }
            let base = figure.name.trim_end_matches("p50");
            if let Some(p99) = run.value(&format!("{base}p99")) {
                let name = rename(step, &format!("{base}p99_over_p50"));
                suite.figure(name, p99 / figure.value, "ratio", Better::Lower);
            }
        }
        let known = run.value(&format!("{}_over_device", figure.name)).is_some();
        if figure.unit == "1/s" && name.ends_with(".rate") && !known {
            let ratio = figure.value / round.device_rate_per_s();
            suite.figure(format!("{name}_over_device"), ratio, "ratio", Better::Higher);
        }
    }
}

/// Adds the ratios of produces to answers without storing, of the same round and number of connections.
pub fn add_ceiling(suite: &mut Run, step: &Step, run: &Run, others: &[(&Step, &Run)]) {
    for figure in &run.figures {
        let Some(load) = figure.name.strip_prefix("produce.").filter(|load| load.ends_with(".rate")) else { continue };
        let ceiling = others.iter().find_map(|(_, other)| other.value(&format!("http.{load}")));
        if let Some(ceiling) = ceiling {
            let name = rename(step, &format!("{}_over_http", figure.name));
            suite.figure(name, figure.value / ceiling, "ratio", Better::Higher);
        }
    }
}

/// Whether ratios of this round count: those where the drive stayed the same, unless they are fewer than half.
pub fn counts(rounds: &[&Measured]) -> Vec<bool> {
    let steady: Vec<bool> = rounds.iter().map(|round| round.steady()).collect();
    if steady.iter().filter(|steady| **steady).count() * 2 >= rounds.len() {
        return steady;
    }
    vec![true; rounds.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::measure::Sample;
    use std::time::Duration;

    fn sample(ns: u64) -> Sample {
        let mut sample = Sample::empty(4096);
        sample.latency.saturating_record(ns);
        sample.elapsed = Duration::from_nanos(ns);
        sample
    }

    fn step(label: &str, command: &str) -> Step {
        Step { label: label.into(), words: vec![command.into()] }
    }

    fn produced(rate: f64, p50: f64, p99: f64) -> Run {
        let mut run = Run::new("produce");
        run.figure("produce.c64.rate", rate, "1/s", Better::Higher);
        run.figure("produce.c64.p50", p50, "ns", Better::Lower);
        run.figure("produce.c64.p99", p99, "ns", Better::Lower);
        run
    }

    #[test]
    fn labels_take_the_place_of_the_command() {
        let spin = step("produce.spin", "produce");
        assert_eq!(rename(&spin, "produce.c1.p50"), "produce.spin.c1.p50");
        assert_eq!(rename(&spin, "producers"), "produce.spin.producers");
        assert_eq!(rename(&step("wal", "wal"), "device.x"), "wal.device.x");
        assert_eq!(rename(&step("wal", "wal"), "wal.instant.c1.rate"), "wal.instant.c1.rate");
    }

    #[test]
    fn ratios_are_of_the_same_round() {
        let mut suite = Run::new("suite");
        let load = Some(produced(50_000.0, 1_000_000.0, 3_000_000.0));
        let round = Round { before: sample(100_000), load, after: sample(100_000) };
        let one = step("produce.one_cpu", "produce");
        add_ratios(&mut suite, &one, &round);
        let near = |name: &str, value: f64| {
            let found = suite.value(name).unwrap_or(f64::NAN);
            assert!((found / value - 1.0).abs() < 0.01, "{name}: {found}");
        };
        near("produce.one_cpu.c64.rate_over_device", 5.0);
        near("produce.one_cpu.c64.p50_over_device", 10.0);
        near("produce.one_cpu.c64.p99_over_p50", 3.0);

        let mut http = Run::new("http");
        http.figure("http.c64.rate", 100_000.0, "1/s", Better::Higher);
        let produce = step("produce", "produce");
        add_ceiling(&mut suite, &produce, &produced(50_000.0, 1.0, 1.0), &[(&step("http", "http"), &http)]);
        assert_eq!(suite.value("produce.c64.rate_over_http"), Some(0.5));
    }

    #[test]
    fn rounds_of_a_moving_drive_count_only_where_no_others_are() {
        let round = |before, after| Round { before: sample(before), load: None, after: sample(after) };
        let (calm, moving) = (round(100_000, 110_000), round(100_000, 900_000));
        assert_eq!(counts(&[&calm, &moving, &calm]), [true, false, true]);
        assert_eq!(counts(&[&calm, &moving, &moving]), [true, true, true]);
    }
}
