//! What the broker should reach: ratios, and a few bounds that any machine of today meets.

use crate::report::human;
use crate::report::stats::Spread;
use crate::run::{Run, Table};

/// A bound.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    /// This or less.
    AtMost(f64),
    /// This or more.
    AtLeast(f64),
}

/// A row of the table: a figure of the suite's result, and its bound.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// What it is, for people.
    pub what: &'static str,
    /// Name of the figure.
    pub figure: &'static str,
    /// What it should be.
    pub bound: Bound,
    /// Unit of the bound.
    pub unit: &'static str,
}

const fn target(what: &'static str, figure: &'static str, bound: Bound, unit: &'static str) -> Target {
    Target { what, figure, bound, unit }
}

use Bound::{AtLeast, AtMost};

/// All of them.
pub const TARGETS: [Target; 25] = [
    target(
        "produce p50, 1 connection, 256 B, over the device's p50; shard spins",
        "produce.spin.c1.p50_over_device",
        AtMost(1.35),
        "ratio",
    ),
    target(
        "produce p50, 1 connection, 256 B, over the device's p50; shard polls while its drive works (default)",
        "produce.c1.p50_over_device",
        AtMost(2.0),
        "ratio",
    ),
    target(
        "produce p50, 1 connection, 256 B, over the device's p50; shard parks",
        "produce.parked.c1.p50_over_device",
        AtMost(2.0),
        "ratio",
    ),
    target("produces/s over the http ceiling, 64 connections", "produce.c64.rate_over_http", AtLeast(0.6), "ratio"),
    target("produces/s over the http ceiling, 256 connections", "produce.c256.rate_over_http", AtLeast(0.8), "ratio"),
    target(
        "produces/s over the device's serial durable writes/s, 8 connections",
        "produce.c8.rate_over_device",
        AtLeast(3.0),
        "ratio",
    ),
    target("the same, 64 connections", "produce.c64.rate_over_device", AtLeast(9.0), "ratio"),
    target("the same, 256 connections", "produce.c256.rate_over_device", AtLeast(11.0), "ratio"),
    target(
        "the whole broker on one CPU, 64 connections, produces/s over the device's",
        "produce.one_cpu.c64.rate_over_device",
        AtLeast(8.0),
        "ratio",
    ),
    target("the same, p99 over p50", "produce.one_cpu.c64.p99_over_p50", AtMost(4.0), "ratio"),
    target("system calls per produce, 64 connections", "produce.c64.syscalls_per_message", AtMost(0.4), "ratio"),
    target("device flushes per produce, 64 connections", "produce.c64.flushes_per_message", AtMost(0.06), "ratio"),
    target("cells of `versus` behind the best durable peer", "versus.cells_behind", AtMost(0.0), "count"),
    target("WAL, instant disk, 64 callers, 256 B, one core, records/s", "wal.instant.c64.rate", AtLeast(2e6), "1/s"),
    target(
        "WAL, real disk, 64 KiB records, bytes/s over the device's at its best block size",
        "wal.large.drive_ratio",
        AtLeast(0.8),
        "ratio",
    ),
    target(
        "batch produce, 1,000 × 256 B, 8 connections, messages/s per broker core",
        "produce.batch.c8.rate_per_broker_core",
        AtLeast(500_000.0),
        "1/s",
    ),
    target("the same, p99 of a batch", "produce.batch.c8.p99", AtMost(15e6), "ns"),
    target(
        "flow, batches of 100, verified, messages/s per broker core",
        "flow.rate_per_broker_core",
        AtLeast(200_000.0),
        "1/s",
    ),
    target(
        "consume+ack while produce is overdriven, over the rate when it is not",
        "fairness.ratio",
        AtLeast(0.8),
        "ratio",
    ),
    target("ring, one way, p50, spinning", "ring.one_way.spin.p50", AtMost(300.0), "ns"),
    target(
        "bytes written to the device per byte accepted, batches",
        "produce.batch.c8.device_bytes_per_byte",
        AtMost(2.3),
        "ratio",
    ),
    target("idle, 2 shards, share of a core", "idle.cpu", AtMost(0.01), "ratio"),
    target("idle, 2 shards, resident memory", "idle.resident", AtMost(80.0 * 1024.0 * 1024.0), "B"),
    target(
        "recovery of a WAL of 1 GiB, over reading it from the device",
        "recover.wal_1g.seconds_ratio",
        AtMost(1.5),
        "ratio",
    ),
    target("recovery of a WAL of 256 MiB, the same", "recover.wal_256m.seconds_ratio", AtMost(1.5), "ratio"),
];

/// Values of a figure, of which there may be one a round.
pub fn spread(run: &Run, figure: &str) -> Option<Spread> {
    let values: Vec<f64> = run.figures.iter().filter(|known| known.name == figure).map(|known| known.value).collect();
    Some(Spread::of(&values)).filter(|spread| spread.count > 0)
}

impl Target {
    fn holds(&self, value: f64) -> bool {
        match self.bound {
            AtMost(bound) => value <= bound,
            AtLeast(bound) => value >= bound,
        }
    }
}

/// Share of the time in which others had the CPU of the thread that samples the drive, above which the drive looks
/// slower than it is, and ratios to it too good.
const CPU_WAIT_MAX: f64 = 0.02;

fn verdict(run: &Run, target: &Target, median: f64) -> &'static str {
    let starved = || spread(run, "device.around_accept.cpu_wait").is_some_and(|wait| wait.high > CPU_WAIT_MAX);
    match target.holds(median) {
        false => "miss",
        // Nothing that is measured here can be negative: the noise is larger than the figure.
        true if median < 0.0 => "doubtful",
        true if target.figure.ends_with("_over_device") && starved() => "doubtful",
        true => "pass",
    }
}

/// The table of targets, filled in: the median decides. Also how many passed and missed.
pub fn table(run: &Run) -> (Table, usize, usize) {
    let (mut passed, mut missed) = (0, 0);
    let rows = TARGETS.iter().map(|target| {
        let bound = match target.bound {
            AtMost(bound) => format!("at most {}", human(bound, target.unit)),
            AtLeast(bound) => format!("at least {}", human(bound, target.unit)),
        };
        let Some(spread) = spread(run, target.figure) else {
            return vec![target.what.to_string(), bound, "-".into(), "-".into(), "not measured".into()];
        };
        let verdict = verdict(run, target, spread.median);
        passed += usize::from(verdict == "pass");
        missed += usize::from(verdict == "miss");
        let range = match spread.count {
            1 => "measured once".into(),
            _ => format!("{} to {}", human(spread.low, target.unit), human(spread.high, target.unit)),
        };
        vec![target.what.to_string(), bound, human(spread.median, target.unit), range, verdict.into()]
    });
    let rows = rows.collect();
    let head = ["figure", "target", "measured", "range of the rounds", "verdict"].map(String::from).to_vec();
    (Table { title: "Targets".into(), head, rows }, passed, missed)
}

#[cfg(test)]
mod tests {
    use super::super::plan::{Place, Step};
    use super::*;
    use crate::run::Better;

    #[test]
    fn the_median_of_the_rounds_decides_and_what_was_not_measured_is_neither() {
        let mut run = Run::new("suite");
        for value in [1.9, 2.5, 1.8] {
            run.figure("produce.c1.p50_over_device", value, "ratio", Better::Lower);
        }
        run.figure("ring.one_way.spin.p50", 301.0, "ns", Better::Lower);
        let (table, passed, missed) = table(&run);
        assert_eq!((table.rows.len(), passed, missed), (TARGETS.len(), 1, 1));
        let verdict = |what: &str| table.rows.iter().find(|row| row[0].contains(what)).map(|row| row[4].clone());
        assert_eq!(verdict("1 connection, 256 B, over the device's p50; shard polls").as_deref(), Some("pass"));
        assert_eq!(verdict("ring, one way").as_deref(), Some("miss"));
        assert_eq!(verdict("idle, 2 shards, share").as_deref(), Some("not measured"));
    }

    #[test]
    fn a_pass_over_a_drive_that_could_not_be_measured_is_doubtful_and_a_miss_stays_a_miss() {
        let mut run = Run::new("suite");
        run.figure("produce.c1.p50_over_device", 1.0, "ratio", Better::Lower);
        run.figure("produce.c8.rate_over_device", 1.0, "ratio", Better::Higher);
        run.figure("recover.wal_256m.seconds_ratio", -0.1, "ratio", Better::Lower);
        run.figure("device.around_accept.cpu_wait", 0.1, "ratio", Better::Neither);
        let (table, passed, missed) = table(&run);
        let verdicts: Vec<&str> =
            table.rows.iter().map(|row| row[4].as_str()).filter(|verdict| *verdict != "not measured").collect();
        assert_eq!((verdicts, passed, missed), (vec!["doubtful", "miss", "doubtful"], 0, 1));
    }

    /// Where the last words of figures' names are written, beside the step's label and its connections.
    const MAKERS: [(&str, &str); 17] = [
        ("p50_over_device", include_str!("gather.rs")),
        ("rate_over_device", include_str!("gather.rs")),
        ("p99_over_p50", include_str!("gather.rs")),
        ("rate_over_http", include_str!("gather.rs")),
        ("syscalls_per_message", include_str!("../load/cost.rs")),
        ("flushes_per_message", include_str!("../load/cost.rs")),
        ("rate_per_broker_core", include_str!("../load/cost.rs")),
        ("device_bytes_per_byte", include_str!("../load/cost.rs")),
        ("p99", include_str!("../run.rs")),
        ("p50", include_str!("../run.rs")),
        ("cells_behind", include_str!("../versus/table.rs")),
        ("rate", include_str!("../wal.rs")),
        ("drive_ratio", include_str!("../wal.rs")),
        ("ratio", include_str!("../fairness.rs")),
        ("cpu", include_str!("../idle.rs")),
        ("resident", include_str!("../idle.rs")),
        ("seconds_ratio", include_str!("../recover/mod.rs")),
    ];

    /// Why nothing of the suite's plan would give this figure.
    fn orphaned(figure: &str) -> Option<String> {
        let place = Place { dir: "/data".into(), binary: None, cpus: vec![0, 1], quick: false };
        let parts = place.parts();
        let steps = parts.iter().flat_map(|part| &part.steps);
        let labelled = steps.filter(|step| figure.strip_prefix(&step.label).is_some_and(|rest| rest.starts_with('.')));
        // `produce.batch.c8` is of `produce.batch`, not of `produce`.
        let longest = labelled.clone().map(|step| step.label.len()).max();
        let steps: Vec<&Step> = labelled.filter(|step| Some(step.label.len()) == longest).collect();
        let Some(first) = steps.first() else { return Some("no step has its label".into()) };
        let words: Vec<&str> = figure[first.label.len() + 1..].split('.').collect();
        let connections = words[0].strip_prefix('c').filter(|count| count.parse::<u32>().is_ok());
        let line = |step: &Step| step.line() + " ";
        let asked = |count: &str| steps.iter().any(|step| line(step).contains(&format!("--connections {count} ")));
        if connections.is_some_and(|count| !asked(count)) {
            return Some("no step has so many connections".into());
        }
        let last = words[words.len() - 1];
        let made = MAKERS.iter().any(|(word, source)| {
            *word == last && [format!("{last}\""), format!("\"{last}")].iter().any(|name| source.contains(name))
        });
        (!made).then(|| format!("nothing makes a figure that ends with {last}"))
    }

    #[test]
    fn every_target_has_a_step_of_the_plan_that_measures_it() {
        for target in TARGETS {
            assert_eq!(orphaned(target.figure), None, "{}", target.figure);
        }
        // The same check finds what nobody measures.
        for figure in ["data_path.payload_copies", "produce.c7.rate_over_device", "idle.pulse"] {
            assert!(orphaned(figure).is_some(), "{figure}");
        }
    }

    #[test]
    fn no_figure_is_bound_twice() {
        let mut names: Vec<&str> = TARGETS.iter().map(|target| target.figure).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), TARGETS.len());
    }
}
