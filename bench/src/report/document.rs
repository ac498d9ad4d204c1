//! The JSON form of a result. Its fields are stable: they may grow, and whoever changes the meaning of one changes
//! [`SCHEMA`]. `bench/README.md` documents them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::machine::Machine;
use super::stats::Spread;
use crate::run::{Better, Failure, Load, Run};

/// Name and version of the schema.
pub const SCHEMA: &str = "narad-bench/1";

/// A result: one command, measured once or several times.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Document {
    /// [`SCHEMA`].
    pub schema: String,
    /// Subcommand.
    pub command: String,
    /// When it ended, seconds since 1970.
    pub ended_unix_s: u64,
    /// Release of this program.
    pub version: String,
    /// What it ran on.
    pub machine: Machine,
    /// `closed`, `open` or `none`.
    pub load: String,
    /// Operations per second that an open loop offered.
    pub offered_rate_per_s: Option<f64>,
    /// What was asked for.
    pub settings: BTreeMap<String, String>,
    /// How often it was measured.
    pub repeats: usize,
    /// The numbers.
    pub figures: Vec<Figure>,
    /// Distributions.
    pub series: Vec<Series>,
    /// Tables, of the last repeat.
    pub tables: Vec<Table>,
    /// What the reader must know.
    pub notes: Vec<String>,
    /// Parts that gave no result, with the reason.
    pub failures: Vec<String>,
}

/// One number.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Figure {
    /// Stable name.
    pub name: String,
    /// `ns`, `1/s`, `B/s`, `ratio`, `count`, `B`.
    pub unit: String,
    /// `lower`, `higher` or `neither`.
    pub better: String,
    /// Middle of `values`.
    pub median: f64,
    /// Lowest of `values`.
    pub low: f64,
    /// Highest of `values`.
    pub high: f64,
    /// One of each repeat.
    pub values: Vec<f64>,
}

impl Figure {
    /// Median and extent.
    pub fn spread(&self) -> Spread {
        Spread { median: self.median, low: self.low, high: self.high, count: self.values.len() }
    }
}

/// One distribution, all repeats together. The whole of it is in the percentile file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Series {
    /// Name.
    pub name: String,
    /// Observations.
    pub count: u64,
    /// Nanoseconds by quantile: `min`, `p50`, `p90`, `p99`, `p99.9`, `p99.99`, `max`, `mean`.
    pub latency_ns: BTreeMap<String, f64>,
    /// Operations in each whole second, of the last repeat.
    pub rate_per_s: Vec<f64>,
    /// Name of the percentile file beside this one.
    pub percentile_file: String,
}

/// A table for people.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Table {
    /// Caption.
    pub title: String,
    /// Column heads.
    pub head: Vec<String>,
    /// Rows.
    pub rows: Vec<Vec<String>>,
}

impl Document {
    /// Of the repeated runs of one command; `runs` is not empty.
    pub fn of(runs: &[Run], machine: Machine) -> Document {
        let last = &runs[runs.len() - 1];
        let mut figures: Vec<Figure> = Vec::new();
        for figure in runs.iter().flat_map(|run| &run.figures) {
            if figures.iter().any(|known| known.name == figure.name) {
                continue;
            }
            // A run that measured in rounds has a figure of that name for each.
            let same = runs.iter().flat_map(|run| &run.figures).filter(|other| other.name == figure.name);
            let values: Vec<f64> = same.map(|other| other.value).collect();
            let Spread { median, low, high, .. } = Spread::of(&values);
            let better = match figure.better {
                Better::Lower => "lower",
                Better::Higher => "higher",
                Better::Neither => "neither",
            };
            let (name, unit, better) = (figure.name.clone(), figure.unit.into(), better.into());
            figures.push(Figure { name, unit, better, median, low, high, values });
        }
        let tables = last.tables.iter().map(|table| Table {
            title: table.title.clone(),
            head: table.head.clone(),
            rows: table.rows.clone(),
        });
        let mut notes = machine.doubts();
        let mut failures: Vec<String> = Vec::new();
        for run in runs {
            notes.extend(run.notes.iter().filter(|note| !notes.contains(note)).cloned().collect::<Vec<_>>());
            failures.extend(run.failures.iter().filter(|text| !failures.contains(text)).cloned().collect::<Vec<_>>());
        }
        Document {
            schema: SCHEMA.into(),
            command: last.command.into(),
            ended_unix_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            version: env!("CARGO_PKG_VERSION").into(),
            machine,
            load: match last.load {
                None => "none",
                Some(Load::Closed) => "closed",
                Some(Load::Open { .. }) => "open",
            }
            .into(),
            offered_rate_per_s: match last.load {
                Some(Load::Open { rate_per_s }) => Some(rate_per_s),
                _ => None,
            },
            settings: last.settings.clone(),
            repeats: runs.len(),
            figures,
            series: merged(runs).iter().map(|series| Series::of(last.command, series)).collect(),
            tables: tables.collect(),
            notes,
            failures,
        }
    }

    /// Reads an earlier result.
    pub fn read(path: &Path) -> Result<Document, Failure> {
        let shown = path.display();
        let text = fs::read_to_string(path)
            .map_err(|error| {
            Failure(format!(
                "--compare {shown}: cannot read it: {error}; name a JSON file that an earlier run wrote with --out, such as \
                 results/produce.json"
            ))
        })?;
        let document: Document = serde_json::from_str(&text).map_err(|error| {
            Failure(format!(
                "--compare {shown}: that is no result of narad-bench ({error}); name a JSON file that --out wrote"
            ))
        })?;
        if document.schema != SCHEMA {
            let schema = &document.schema;
            return Err(Failure(format!(
                "{shown} has schema {schema:?}, and this program compares with {SCHEMA:?} only"
            )));
        }
        Ok(document)
    }
}

/// The distributions of all repeats: those of one name added up, rates over time of the last.
pub fn merged(runs: &[Run]) -> Vec<crate::run::Series> {
    let mut all: Vec<crate::run::Series> = Vec::new();
    for series in runs.iter().flat_map(|run| &run.series) {
        match all.iter_mut().find(|known| known.name == series.name) {
            // Every histogram has the bounds of `histogram()`, so that adding cannot fail.
            Some(known) => {
                let _ = known.latency.add(&series.latency);
                known.rate_per_s.clone_from(&series.rate_per_s);
            }
            None => all.push(series.clone()),
        }
    }
    all
}

impl Series {
    fn of(command: &str, series: &crate::run::Series) -> Series {
        let at = |quantile: f64| series.latency.value_at_quantile(quantile) as f64;
        let latency_ns = [
            ("min", if series.latency.is_empty() { 0.0 } else { series.latency.min() as f64 }),
            ("p50", at(0.5)),
            ("p90", at(0.9)),
            ("p99", at(0.99)),
            ("p99.9", at(0.999)),
            ("p99.99", at(0.9999)),
            ("max", at(1.0)),
            ("mean", if series.latency.is_empty() { 0.0 } else { series.latency.mean() }),
        ];
        Series {
            name: series.name.clone(),
            count: series.latency.len(),
            latency_ns: latency_ns.into_iter().map(|(name, value)| (name.to_string(), value)).collect(),
            rate_per_s: series.rate_per_s.clone(),
            percentile_file: percentile_file(command, &series.name),
        }
    }
}

/// Name of the percentile file of a series; whatever a file system might not like becomes `_`.
pub fn percentile_file(command: &str, series: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    let name: String = series.chars().map(safe).collect();
    if name == command || name.starts_with(&format!("{command}.")) {
        return format!("{name}.hgrm");
    }
    format!("{command}.{name}.hgrm")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::histogram;

    fn run(rate: f64) -> Run {
        let mut run = Run::new("produce");
        run.figure("produce.rate", rate, "1/s", Better::Higher);
        let mut latency = histogram();
        latency.saturating_record(1000);
        run.latency("produce.c1", latency, vec![rate]);
        run.notes.push("once".into());
        run
    }

    #[test]
    fn repeats_give_medians_and_one_distribution() {
        let document = Document::of(&[run(10.0), run(30.0), run(20.0)], Machine::default());
        let rate = &document.figures[0];
        assert_eq!((rate.median, rate.low, rate.high, rate.values.len()), (20.0, 10.0, 30.0, 3));
        assert_eq!((document.series.len(), document.series[0].count, document.repeats), (1, 3, 3));
        assert_eq!(document.notes, vec!["once"]);
    }

    #[test]
    fn a_document_survives_its_file_and_others_are_refused_by_name() {
        let path = std::env::temp_dir().join(format!("narad-bench-document-{}.json", std::process::id()));
        let mut document = Document::of(&[run(10.0)], Machine::default());
        fs::write(&path, serde_json::to_string(&document).unwrap()).unwrap();
        assert_eq!(Document::read(&path).unwrap().figures[0].median, 10.0);
        document.schema = "narad-bench/0".into();
        fs::write(&path, serde_json::to_string(&document).unwrap()).unwrap();
        let Failure(text) = Document::read(&path).unwrap_err();
        assert!(text.contains("narad-bench/0"), "{text}");
        fs::write(&path, "{}").unwrap();
        let Failure(text) = Document::read(&path).unwrap_err();
        assert!(text.contains("no result of narad-bench"), "{text}");
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn names_of_files_hold_no_surprises() {
        assert_eq!(percentile_file("produce", "produce.c1"), "produce.c1.hgrm");
        assert_eq!(percentile_file("versus", "redis 7/../x"), "versus.redis_7_.._x.hgrm");
    }
}
