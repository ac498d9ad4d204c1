//! What a measurement hands over: figures, latency histograms, rates over time. Everything that writes, draws or compares
//! reads this and nothing else.

use std::collections::BTreeMap;

use hdrhistogram::Histogram;

/// How the load was offered. It decides what a latency means, so it is printed with every result.
#[derive(Clone, Debug, PartialEq)]
pub enum Load {
    /// The next operation starts when the last one ended: a stall hides the operations that were not sent meanwhile.
    Closed,
    /// Operations start at fixed times, whatever the last ones do; latency counts from the intended time.
    Open {
        /// Operations per second over all connections.
        rate_per_s: f64,
    },
}

/// Which way a figure is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// Latencies, costs.
    Lower,
    /// Rates.
    Higher,
    /// Neither: a count that explains the others.
    Neither,
}

/// One number of a result.
#[derive(Clone, Debug)]
pub struct Figure {
    /// Stable name, in snake case, unit last where it is not `unit`: `produce.c64.rate`, `device.write_4k.p50`.
    pub name: String,
    /// The value.
    pub value: f64,
    /// `ns`, `1/s`, `B/s`, `ratio`, `count`, `B`.
    pub unit: &'static str,
    /// Which way it is good.
    pub better: Better,
}

/// Latencies and rates of one phase of a run.
#[derive(Clone, Debug)]
pub struct Series {
    /// Name in the picture's legend.
    pub name: String,
    /// Nanoseconds, 3 significant digits.
    pub latency: Histogram<u64>,
    /// Operations (messages, where the operation is a batch) finished in each whole second of the measured time.
    pub rate_per_s: Vec<f64>,
}

/// A table for people; its numbers are figures as well.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// Caption.
    pub title: String,
    /// Column heads.
    pub head: Vec<String>,
    /// Rows, as long as `head`.
    pub rows: Vec<Vec<String>>,
}

/// One finished measurement.
#[derive(Clone, Debug)]
pub struct Run {
    /// The subcommand: `device`, `produce`, ...
    pub command: &'static str,
    /// Closed or open loop; `None` where nothing is sent (ring, recover).
    pub load: Option<Load>,
    /// What was asked for: payload bytes, batch, connections, seconds, durability, ... in the words of the flags.
    pub settings: BTreeMap<String, String>,
    /// The numbers.
    pub figures: Vec<Figure>,
    /// Histograms and rates, for the percentile files and the picture.
    pub series: Vec<Series>,
    /// Tables for people.
    pub tables: Vec<Table>,
    /// What the reader must know to read the numbers rightly (one sentence each).
    pub notes: Vec<String>,
    /// Parts that gave no result, one sentence each; everything else is reported, and then the command fails.
    pub failures: Vec<String>,
}

impl Run {
    /// An empty result of `command`.
    pub fn new(command: &'static str) -> Run {
        Run {
            command,
            load: None,
            settings: BTreeMap::new(),
            figures: Vec::new(),
            series: Vec::new(),
            tables: Vec::new(),
            notes: Vec::new(),
            failures: Vec::new(),
        }
    }

    /// Records what was asked for.
    pub fn set(&mut self, name: &str, value: impl ToString) {
        self.settings.insert(name.to_string(), value.to_string());
    }

    /// Adds a number.
    pub fn figure(&mut self, name: impl Into<String>, value: f64, unit: &'static str, better: Better) {
        self.figures.push(Figure { name: name.into(), value, unit, better });
    }

    /// Adds p50, p99, p99.9, max of a histogram as figures `<name>.p50` and so on, and the histogram itself.
    pub fn latency(&mut self, name: &str, latency: Histogram<u64>, rate_per_s: Vec<f64>) {
        for (suffix, quantile) in [("p50", 0.50), ("p99", 0.99), ("p999", 0.999), ("max", 1.0)] {
            let value = latency.value_at_quantile(quantile) as f64;
            self.figure(format!("{name}.{suffix}"), value, "ns", Better::Lower);
        }
        self.series.push(Series { name: name.to_string(), latency, rate_per_s });
    }

    /// A figure by its name.
    pub fn value(&self, name: &str) -> Option<f64> {
        self.figures.iter().find(|figure| figure.name == name).map(|figure| figure.value)
    }
}

/// An empty histogram as every part of this program uses it: 1 ns to 100 s, 3 significant digits.
pub fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 100_000_000_000, 3).expect("constant bounds are valid")
}

/// Why a run gave no result: one sentence that says what failed, on what, and what to do.
#[derive(Debug)]
pub struct Failure(pub String);

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure(error.to_string())
    }
}
