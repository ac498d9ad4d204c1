//! Ratios of two results, and whether they mean anything.

use super::document::{Document, Figure};
use super::text::human;
use crate::run::Table;

/// What a difference is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Larger than what the repeats of either side spread.
    Better,
    /// As above, to the worse.
    Worse,
    /// Larger than the spread, of a figure that has no good side.
    Changed,
    /// The repeats overlap, or the difference is smaller than their spread.
    WithinNoise,
    /// Both sides are needed twice at least, to know the noise.
    NoEstimate,
}

impl Verdict {
    fn text(self) -> &'static str {
        match self {
            Verdict::Better => "better",
            Verdict::Worse => "WORSE",
            Verdict::Changed => "changed",
            Verdict::WithinNoise => "within noise",
            Verdict::NoEstimate => "noise unknown",
        }
    }
}

/// New over old, the noise of that ratio (0.1: ± 10 %), and the verdict.
pub fn compare(old: &Figure, new: &Figure) -> (f64, Option<f64>, Verdict) {
    let ratio = if old.median == new.median { 1.0 } else { new.median / old.median };
    let (was, is) = (old.spread(), new.spread());
    if was.count < 2 || is.count < 2 {
        return (ratio, None, Verdict::NoEstimate);
    }
    let noise = was.relative() + is.relative();
    let overlap = was.low <= is.high && is.low <= was.high;
    let verdict = match new.better.as_str() {
        _ if overlap || (ratio - 1.0).abs() <= noise => Verdict::WithinNoise,
        "lower" if ratio < 1.0 => Verdict::Better,
        "higher" if ratio > 1.0 => Verdict::Better,
        "lower" | "higher" => Verdict::Worse,
        _ => Verdict::Changed,
    };
    (ratio, Some(noise), verdict)
}

/// The comparison of every figure that both results have, and sentences on what else differs.
pub fn table(old: &Document, new: &Document) -> (Table, Vec<String>) {
    let mut rows = Vec::new();
    for figure in &new.figures {
        let Some(before) = old.figures.iter().find(|before| before.name == figure.name) else { continue };
        let (ratio, noise, verdict) = compare(before, figure);
        rows.push(vec![
            figure.name.clone(),
            human(before.median, &before.unit),
            human(figure.median, &figure.unit),
            human(ratio, "ratio"),
            noise.map_or("-".into(), |noise| format!("± {:.0} %", noise * 100.0)),
            verdict.text().into(),
        ]);
    }
    let head = ["figure", "before", "now", "now / before", "noise", "verdict"].map(String::from).to_vec();
    let title = format!("Compared with an earlier result ({} there, {} here)", times(old.repeats), times(new.repeats));
    (Table { title, head, rows }, differences(old, new))
}

fn times(repeats: usize) -> String {
    if repeats == 1 {
        "measured once".into()
    } else {
        format!("measured {repeats} times")
    }
}

fn differences(old: &Document, new: &Document) -> Vec<String> {
    let mut notes = Vec::new();
    if old.command != new.command {
        notes.push(format!("the earlier result is of {:?}, this one of {:?}", old.command, new.command));
    }
    let (was, is) = (old.machine.lines(), new.machine.lines());
    for ((label, before), (_, now)) in was.iter().zip(&is) {
        if before != now && *label != "load average" {
            notes.push(format!("{label} was {before:?} and is {now:?}"));
        }
    }
    for (name, now) in &new.settings {
        match old.settings.get(name) {
            Some(before) if before != now => notes.push(format!("{name} was {before} and is {now}")),
            None => notes.push(format!("{name} was not set and is {now}")),
            _ => {}
        }
    }
    if old.repeats < 2 || new.repeats < 2 {
        notes.push("without repeats on both sides the noise is unknown: measure with --repeat 5".into());
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(better: &str, values: &[f64]) -> Figure {
        let spread = super::super::stats::Spread::of(values);
        Figure {
            name: "x".into(),
            unit: "ns".into(),
            better: better.into(),
            median: spread.median,
            low: spread.low,
            high: spread.high,
            values: values.to_vec(),
        }
    }

    #[test]
    fn a_difference_counts_when_the_repeats_lie_apart() {
        let old = figure("lower", &[99.0, 100.0, 101.0]);
        assert_eq!(compare(&old, &figure("lower", &[49.0, 50.0, 51.0])).2, Verdict::Better);
        assert_eq!(compare(&old, &figure("lower", &[149.0, 150.0, 151.0])).2, Verdict::Worse);
        assert_eq!(compare(&old, &figure("higher", &[149.0, 150.0, 151.0])).2, Verdict::Better);
        assert_eq!(compare(&old, &figure("neither", &[149.0, 150.0, 151.0])).2, Verdict::Changed);
    }

    #[test]
    fn overlapping_repeats_are_noise() {
        let old = figure("lower", &[80.0, 100.0, 120.0]);
        let (ratio, noise, verdict) = compare(&old, &figure("lower", &[85.0, 110.0, 130.0]));
        assert_eq!(verdict, Verdict::WithinNoise);
        assert!((ratio - 1.1).abs() < 1e-9 && noise.is_some_and(|noise| noise > 0.3));
    }

    #[test]
    fn a_difference_below_the_spread_is_noise_even_when_the_repeats_lie_apart() {
        let old = figure("lower", &[80.0, 100.0, 104.0]);
        assert_eq!(compare(&old, &figure("lower", &[105.0, 110.0, 130.0])).2, Verdict::WithinNoise);
    }

    #[test]
    fn one_run_gives_no_estimate() {
        let old = figure("lower", &[100.0]);
        let (ratio, noise, verdict) = compare(&old, &figure("lower", &[50.0, 50.0]));
        assert_eq!((ratio, noise, verdict), (0.5, None, Verdict::NoEstimate));
        assert_eq!(compare(&figure("lower", &[0.0]), &figure("lower", &[0.0])).0, 1.0);
    }
}
