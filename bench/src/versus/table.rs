//! What the rounds say: medians, ratios taken round by round, and in which cells somebody else is ahead.

use super::durability::Proof;
use super::measure::{Cell, Round};
use crate::report::stats::Spread;
use crate::run::{histogram, Better, Run, Table};

const MIB: f64 = (1 << 20) as f64;
/// A load thread that computes for more than this share of the time is itself what limits.
const BUSY: f64 = 0.9;
/// Pairs of rounds that are enough to leave out those in which the drive changed.
const PAIRS_MIN: usize = 3;
/// Verdicts on a cell in which there is nothing to divide.
const NO_FIGURE: &str = "no figure of ours";
const NOBODY: &str = "nobody to compare with";
/// A ratio that near to 1 says nothing.
const NEAR: f64 = 0.05;

/// One broker's rounds in one cell; `None` where one gave nothing.
pub type Rounds = Vec<Option<Round>>;

/// A broker as the tables know it.
#[derive(Clone, Debug)]
pub struct Column {
    pub name: String,
    pub promise: String,
    pub ack_promise: &'static str,
    pub durable: bool,
}

/// One cell, by broker; ours is the first.
pub struct Cells<'a> {
    pub columns: &'a [Column],
    pub cell: Cell,
    pub rounds: Vec<Rounds>,
}

/// Ours over another's.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Ratio {
    rate: Spread,
    p99: Spread,
}

impl Cells<'_> {
    fn spread(&self, column: usize, of: impl Fn(&Round) -> f64) -> Option<Spread> {
        let values: Vec<f64> = self.rounds[column].iter().flatten().map(of).collect();
        (!values.is_empty()).then(|| Spread::of(&values))
    }

    /// Round by round: neighbours in time. Those between which the drive changed its mood do not count, as long as there
    /// are three others.
    fn ratio(&self, column: usize) -> Option<Ratio> {
        let pairs: Vec<(&Round, &Round)> = self.rounds[0]
            .iter()
            .zip(&self.rounds[column])
            .filter_map(|(ours, other)| ours.as_ref().zip(other.as_ref()))
            .collect();
        if pairs.is_empty() {
            return None;
        }
        let steady: Vec<(&Round, &Round)> = pairs.iter().copied().filter(|(ours, other)| alike(ours, other)).collect();
        let pairs = if steady.len() >= PAIRS_MIN { steady } else { pairs };
        let of = |f: &dyn Fn(&Round) -> f64| {
            Spread::of(&pairs.iter().map(|(ours, other)| f(ours) / f(other)).collect::<Vec<f64>>())
        };
        Some(Ratio { rate: of(&|round| round.rate_per_s), p99: of(&|round| quantile(round, 0.99)) })
    }

    /// The durable broker with the best median of something.
    fn best(&self, of: impl Fn(&Round) -> f64 + Copy, lower: bool) -> Option<usize> {
        let durable = (1..self.columns.len()).filter(|column| self.columns[*column].durable);
        let sign = if lower { 1.0 } else { -1.0 };
        let known = durable.filter_map(|column| Some((column, self.spread(column, of)?.median * sign)));
        known.min_by(|one, other| one.1.total_cmp(&other.1)).map(|(column, _)| column)
    }

    /// What a reader wants to know: ahead of the best durable one, level, or behind; and whom that is.
    fn verdict(&self) -> String {
        let by_rate = self.best(|round| round.rate_per_s, false);
        let by_p99 = self.best(|round| quantile(round, 0.99), true);
        let (Some(by_rate), Some(by_p99)) = (by_rate, by_p99) else { return NOBODY.into() };
        if self.spread(0, |round| round.rate_per_s).is_none() {
            return NO_FIGURE.into();
        }
        let (Some(rate), Some(p99)) = (self.ratio(by_rate), self.ratio(by_p99)) else {
            return NOBODY.into();
        };
        let (rate, p99) = (rate.rate, p99.p99);
        let inverse = Spread { median: 1.0 / p99.median, low: 1.0 / p99.high, high: 1.0 / p99.low, count: p99.count };
        let word = |what: &str, of: Spread, shown: f64, column: usize| {
            format!("{} on {what} ({:.2} of {})", place(&of), shown, self.columns[column].name)
        };
        format!("{}; {}", word("rate", rate, rate.median, by_rate), word("p99", inverse, p99.median, by_p99))
    }

    /// Adds the cell's figures, rows and notes.
    fn add(&self, run: &mut Run, ratios: &mut Table, figures: &mut Table) {
        let mut row = vec![self.cell.title()];
        for (column, named) in self.columns.iter().enumerate() {
            let name = format!("versus.{}.{}", self.cell.key(), named.name);
            if column > 0 {
                let ratio = self.ratio(column);
                row.push(
                    ratio.map_or("-".into(), |ratio| {
                        format!("{} / {}", short(ratio.rate.median), short(ratio.p99.median))
                    }),
                );
                if let Some(ratio) = ratio {
                    run.figure(format!("{name}.rate_ratio"), ratio.rate.median, "ratio", Better::Higher);
                    run.figure(format!("{name}.p99_ratio"), ratio.p99.median, "ratio", Better::Lower);
                }
            }
            self.add_figures(run, figures, column, &name);
        }
        row.push(self.verdict());
        ratios.rows.push(row);
    }

    fn add_figures(&self, run: &mut Run, figures: &mut Table, column: usize, name: &str) {
        let cell = self.cell.title();
        let Some(rate) = self.spread(column, |round| round.rate_per_s) else {
            let mut row = vec![cell, self.columns[column].name.clone(), "no figure".into()];
            row.resize(figures.head.len(), "-".into());
            return figures.rows.push(row);
        };
        let median = |of: &dyn Fn(&Round) -> f64| self.spread(column, of).map_or(0.0, |spread| spread.median);
        let (p50, p99) = (median(&|round| quantile(round, 0.5)), median(&|round| quantile(round, 0.99)));
        let over_device = median(&|round| round.rate_per_s / round.device_rate_per_s);
        let p50_over_device = median(&|round| quantile(round, 0.5) / round.device_p50_ns);
        // Costs add up over the rounds.
        let all = || self.rounds[column].iter().flatten();
        let messages: f64 = all().map(|round| round.messages).sum();
        let cpu: Option<f64> = all().map(|round| Some(round.cpu?.as_secs_f64())).sum();
        let flushes: Option<f64> = all().map(|round| round.flushes).sum();
        let peak = all().map(|round| round.memory_peak_bytes).max().flatten().map(|bytes| bytes as f64);
        let cpu = cpu.map(|seconds| seconds * 1e6 / messages);
        let flushes = flushes.map(|flushes| flushes / messages);

        run.figure(format!("{name}.rate"), rate.median, "1/s", Better::Higher);
        run.figure(format!("{name}.rate_over_device"), over_device, "ratio", Better::Higher);
        run.figure(format!("{name}.p50_over_device"), p50_over_device, "ratio", Better::Lower);
        let optional =
            [("cpu_per_million", cpu, "s"), ("memory_peak", peak, "B"), ("flushes_per_message", flushes, "ratio")];
        for (suffix, value, unit) in optional {
            if let Some(value) = value {
                run.figure(format!("{name}.{suffix}"), value, unit, Better::Lower);
            }
        }
        let mut latency = histogram();
        all().for_each(|round| latency += &round.latency);
        run.latency(name, latency, Vec::new());

        let shown = |value: Option<f64>| value.map_or("-".into(), short);
        figures.rows.push(vec![
            cell.clone(),
            self.columns[column].name.clone(),
            match rate.count {
                1 => format!("{:.0}", rate.median),
                _ => format!("{:.0} ({:.0} to {:.0})", rate.median, rate.low, rate.high),
            },
            format!("{:.0}", p50 / 1e3),
            format!("{:.0}", p99 / 1e3),
            short(over_device),
            short(p50_over_device),
            shown(cpu),
            shown(peak.map(|bytes| bytes / MIB)),
            shown(flushes),
        ]);
        let busy = median(&|round| round.load_busy);
        if busy > BUSY && run.settings.get("load_spin").is_none_or(|spin| spin != "true") {
            let name = &self.columns[column].name;
            run.notes.push(format!(
                "{cell}, {name}: the load's own CPU was busy {:.0} % of the time: it may be the limit",
                busy * 100.0
            ));
        }
        if let Some(trouble) = all().find_map(|round| round.troubles.clone()) {
            run.notes.push(format!("{cell}: {trouble}"));
        }
    }
}

fn quantile(round: &Round, quantile: f64) -> f64 {
    round.latency.value_at_quantile(quantile) as f64
}

/// Whether the drive was the same during two rounds, within a factor of two.
fn alike(one: &Round, other: &Round) -> bool {
    let (one_p50, other_p50) = (one.device_p50_ns, other.device_p50_ns);
    one.device_steady && other.device_steady && one_p50.max(other_p50) <= 2.0 * one_p50.min(other_p50)
}

/// Where ours stands, by a ratio that is good when it is high: rounds on both sides of 1, or very near to it, are no
/// difference.
fn place(ratio: &Spread) -> &'static str {
    match ratio {
        _ if ratio.low < 1.0 + NEAR && ratio.high > 1.0 - NEAR => "level",
        _ if ratio.median >= 1.0 => "ahead",
        _ => "BEHIND",
    }
}

/// Three digits that count.
fn short(value: f64) -> String {
    match value {
        _ if value >= 100.0 => format!("{value:.0}"),
        _ if value >= 10.0 => format!("{value:.1}"),
        _ if value >= 0.1 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

fn heads(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// Adds everything about all cells.
pub fn add_cells(run: &mut Run, cells: &[Cells<'_>]) {
    let Some(first) = cells.first() else { return };
    let mut head = vec!["cell".to_owned()];
    head.extend(first.columns[1..].iter().map(|column| {
        let mark = if column.durable { "" } else { " (not synced)" };
        format!("over {}{mark}", column.name)
    }));
    head.push("narad against the best durable one".into());
    let title = "Narad over each: rate / p99 (rate above 1 and p99 below 1: Narad is better)";
    let mut ratios = Table { title: title.into(), head, rows: Vec::new() };
    let mut figures = Table {
        title: "Figures: medians of the rounds; latency is of an operation (a message, or a batch)".into(),
        head: heads(&[
            "cell",
            "broker",
            "messages/s",
            "p50 µs",
            "p99 µs",
            "rate / device",
            "p50 / device",
            "CPU s per million",
            "peak MiB",
            "flushes per message",
        ]),
        rows: Vec::new(),
    };
    for cell in cells {
        cell.add(run, &mut ratios, &mut figures);
    }
    let judged: Vec<(&String, &String)> = ratios
        .rows
        .iter()
        .filter_map(|row| row.first().zip(row.last()))
        .filter(|(_, verdict)| *verdict != NOBODY)
        .collect();
    let behind: Vec<String> = judged
        .iter()
        .filter(|(_, verdict)| verdict.contains("BEHIND") || *verdict == NO_FIGURE)
        .map(|(cell, verdict)| format!("{cell}: {verdict}"))
        .collect();
    let count = judged.len();
    run.figure("versus.cells", count as f64, "count", Better::Neither);
    if count > 0 {
        run.figure("versus.cells_behind", behind.len() as f64, "count", Better::Lower);
    }
    run.notes.push(match behind.len() {
        _ if count == 0 => "There was no durable broker to compare with: no cell was judged.".to_owned(),
        0 => format!("Narad is behind in none of {count} cells."),
        _ => format!("Narad is BEHIND in {} of {count} cells: {}.", behind.len(), behind.join(". ")),
    });
    run.tables.push(ratios);
    run.tables.push(figures);
}

/// Adds what each broker promises and what kill -9 showed.
pub fn add_proofs(run: &mut Run, proofs: &[(Column, Option<Proof>)]) {
    let mut table = Table {
        title: "Durability: kill -9 under load at 8 connections, started again, counted".into(),
        head: heads(&[
            "broker",
            "an answer means",
            "an ack is",
            "acknowledged",
            "missing",
            "stored without answer",
            "twice",
            "wrong",
            "flushes per acknowledged",
            "ready again after s",
        ]),
        rows: Vec::new(),
    };
    for (column, proof) in proofs {
        let mut row = vec![column.name.clone(), column.promise.clone(), column.ack_promise.into()];
        match proof {
            None => row.resize(table.head.len(), "-".into()),
            Some(proof) => {
                let name = format!("versus.kill.{}", column.name);
                let flushes = proof.flushes.map(|flushes| flushes / proof.acknowledged as f64);
                run.figure(format!("{name}.acknowledged"), proof.acknowledged as f64, "count", Better::Neither);
                run.figure(format!("{name}.missing"), proof.missing as f64, "count", Better::Lower);
                run.figure(format!("{name}.ready_after"), proof.ready_after.as_secs_f64(), "s", Better::Lower);
                if let Some(flushes) = flushes {
                    run.figure(format!("{name}.flushes_per_message"), flushes, "ratio", Better::Neither);
                }
                row.extend([
                    proof.acknowledged.to_string(),
                    proof.missing.to_string(),
                    proof.beyond.to_string(),
                    proof.duplicates.to_string(),
                    proof.wrong.to_string(),
                    flushes.map_or("-".into(), short),
                    format!("{:.1}", proof.ready_after.as_secs_f64()),
                ]);
                if proof.missing > 0 || proof.wrong > 0 {
                    run.notes.push(format!(
                        "{} LOST {} of {} acknowledged messages at kill -9, and {} came back wrong.",
                        column.name, proof.missing, proof.acknowledged, proof.wrong
                    ));
                }
            }
        }
        table.rows.push(row);
    }
    run.tables.push(table);
}

/// Memory of one broker over the run.
#[derive(Clone, Debug)]
pub struct Memory {
    pub name: String,
    pub at_start: u64,
    pub at_end: u64,
    /// Messages that it stores at the end.
    pub kept: i64,
}

pub fn add_memory(run: &mut Run, brokers: &[Memory]) {
    let mut table = Table {
        title: "Memory: what a backlog costs (at the end of the pair of cells that left most)".into(),
        head: heads(&[
            "broker",
            "MiB at the start",
            "MiB at the end",
            "messages stored then",
            "MiB per million of them",
        ]),
        rows: Vec::new(),
    };
    for broker in brokers {
        let (start, end) = (broker.at_start as f64 / MIB, broker.at_end as f64 / MIB);
        let mut row = vec![broker.name.clone(), short(start), short(end), broker.kept.to_string()];
        // Of a small backlog nothing can be seen beside everything else.
        let counted = broker.kept >= 10_000;
        let grown = (end - start).max(0.0) * 1e6 / broker.kept.max(1) as f64;
        row.push(if counted { format!("{grown:.0}") } else { "-".into() });
        if counted {
            let name = format!("versus.memory_per_million.{}", broker.name);
            run.figure(name, grown * MIB, "B", Better::Lower);
        }
        table.rows.push(row);
    }
    run.tables.push(table);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::versus::measure::Operation;

    fn round(rate_per_s: f64, p99_ns: u64) -> Option<Round> {
        let mut latency = histogram();
        latency.saturating_record(p99_ns);
        Some(Round {
            rate_per_s,
            latency,
            messages: 1e6,
            cpu: Some(std::time::Duration::from_secs(2)),
            memory_peak_bytes: Some(1 << 20),
            flushes: None,
            load_busy: 0.1,
            device_p50_ns: 1e5,
            device_rate_per_s: 1e4,
            device_steady: true,
            troubles: None,
        })
    }

    fn columns() -> Vec<Column> {
        let column = |name: &str, durable| Column { name: name.into(), promise: "-".into(), ack_promise: "-", durable };
        vec![column("narad", true), column("redis", true), column("nats", false)]
    }

    fn cells(columns: &[Column], ours: Rounds, redis: Rounds, nats: Rounds) -> Cells<'_> {
        let cell = Cell { operation: Operation::Produce, connections: 8, batch: 1 };
        Cells { columns, cell, rounds: vec![ours, redis, nats] }
    }

    #[test]
    fn the_best_durable_one_is_who_counts_and_a_lost_cell_is_said_plainly() {
        let columns = columns();
        let ours = vec![round(100.0, 1000), round(100.0, 1000)];
        let fast = vec![round(900.0, 10), round(900.0, 10)];
        let lost = cells(&columns, ours.clone(), vec![round(200.0, 500), round(200.0, 500)], fast.clone());
        assert_eq!(lost.verdict(), "BEHIND on rate (0.50 of redis); BEHIND on p99 (2.00 of redis)");
        let won = cells(&columns, ours.clone(), vec![round(50.0, 2000), round(50.0, 2000)], fast.clone());
        assert_eq!(won.verdict(), "ahead on rate (2.00 of redis); ahead on p99 (0.50 of redis)");
        let mut run = Run::new("versus");
        add_cells(&mut run, &[lost, won]);
        assert!(run.notes[0].starts_with("Narad is BEHIND in 1 of 2 cells: produce, 8 connections, single: BEHIND"));
        assert_eq!(run.tables[0].rows[0][1], "0.50 / 2.00");
        assert!(run.tables.iter().all(|table| table.rows.iter().all(|row| row.len() == table.head.len())));
        assert_eq!(run.value("versus.produce.c8.b1.narad.cpu_per_million"), Some(2.0));
    }

    #[test]
    fn a_cell_without_a_figure_of_ours_is_lost_and_one_without_a_rival_is_not_judged() {
        let columns = columns();
        let (some, none) = (vec![round(100.0, 1000)], vec![None]);
        let mut run = Run::new("versus");
        let silent = cells(&columns, none.clone(), some.clone(), some.clone());
        add_cells(&mut run, &[silent, cells(&columns, some.clone(), none.clone(), some.clone())]);
        assert_eq!((run.value("versus.cells"), run.value("versus.cells_behind")), (Some(1.0), Some(1.0)));
        let mut run = Run::new("versus");
        add_cells(&mut run, &[cells(&columns, some.clone(), none, some)]);
        assert_eq!(run.value("versus.cells_behind"), None);
        assert!(run.notes[0].contains("no cell was judged"), "{:?}", run.notes);
    }

    #[test]
    fn ratios_are_taken_round_by_round_and_both_sides_of_one_is_level() {
        let columns = columns();
        let ours = vec![round(100.0, 1000), round(10.0, 1000), None];
        let redis = vec![round(80.0, 1000), round(15.0, 1000), round(1.0, 1)];
        let cell = cells(&columns, ours, redis, vec![None, None, None]);
        assert!(cell.verdict().starts_with("level on rate"), "{}", cell.verdict());
        let mut run = Run::new("versus");
        add_cells(&mut run, &[cell]);
        assert_eq!(run.tables[0].rows[0][2], "-");
        assert!(run.tables.iter().all(|table| table.rows.iter().all(|row| row.len() == table.head.len())));
    }

    #[test]
    fn pairs_between_which_the_drive_changed_do_not_count_while_three_others_are_left() {
        let columns = columns();
        let slow_drive = |round: Option<Round>| round.map(|round| Round { device_p50_ns: 1e7, ..round });
        let ours = vec![round(100.0, 1), round(100.0, 1), round(100.0, 1), slow_drive(round(1.0, 1))];
        let redis = vec![round(50.0, 1), round(50.0, 1), round(50.0, 1), round(50.0, 1)];
        let cell = cells(&columns, ours, redis, Vec::new());
        let ratio = cell.ratio(1).unwrap().rate;
        assert_eq!((ratio.low, ratio.high, ratio.count), (2.0, 2.0, 3));
    }

    #[test]
    fn a_broker_that_lost_messages_is_named() {
        let mut run = Run::new("versus");
        let proof = Proof { acknowledged: 100, missing: 3, ..Proof::default() };
        add_proofs(&mut run, &[(columns()[1].clone(), Some(proof)), (columns()[2].clone(), None)]);
        assert!(run.notes[0].contains("redis LOST 3 of 100"));
        assert!(run.tables[0].rows.iter().all(|row| row.len() == run.tables[0].head.len()));
    }
}
