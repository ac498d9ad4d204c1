//! `narad doctor`: every check of a start and every tuning of the machine, judged one by one instead of up to the first
//! refusal, and a short probe of the disk. Changes nothing, and does no harm to a broker that runs on the same data
//! directory: it takes no lock, and what it writes has no name by the time it is written.
//!
//! `start` asks what [`super::prepare`] asks. `tuning` and `block` read `/proc` and `/sys`, or a test's imitation of
//! them; ids that `kernel-tuning/` also knows are the same there. `probe` measures.

mod block;
mod environment;
mod peers;
mod probe;
mod start;
mod tuning;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::config::{Config, CpuSet, Warning};

use super::topology::Topology;
use super::Refusal;
pub use probe::Figures;

/// What to think of one thing. The order is that of severity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Status {
    /// Does not apply to this machine, or cannot be seen from here.
    Skip,
    Ok,
    /// Worth a thought, by hand.
    Hint,
    /// The broker starts, and is slower or less safe than it could be.
    Warn,
    /// The broker does not start, or must not be trusted.
    Fail,
}

impl Status {
    pub fn name(self) -> &'static str {
        match self {
            Status::Skip => "skip",
            Status::Ok => "ok",
            Status::Hint => "hint",
            Status::Warn => "warn",
            Status::Fail => "fail",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    pub id: &'static str,
    pub status: Status,
    /// What was found.
    pub found: String,
    /// What to run, or to do, about it.
    pub run: Option<String>,
}

impl Check {
    fn ok(id: &'static str, found: impl Into<String>) -> Check {
        Check { id, status: Status::Ok, found: found.into(), run: None }
    }

    fn skip(id: &'static str, found: impl Into<String>) -> Check {
        Check { status: Status::Skip, ..Check::ok(id, found) }
    }

    fn hint(id: &'static str, found: impl Into<String>, run: impl Into<String>) -> Check {
        Check { status: Status::Hint, ..Check::warn(id, found, run) }
    }

    fn warn(id: &'static str, found: impl Into<String>, run: impl Into<String>) -> Check {
        Check { status: Status::Warn, run: Some(run.into()), ..Check::ok(id, found) }
    }

    fn fail(id: &'static str, found: impl Into<String>, run: impl Into<String>) -> Check {
        Check { status: Status::Fail, ..Check::warn(id, found, run) }
    }

    /// What a start would say.
    fn refused(id: &'static str, refusal: Refusal) -> Check {
        Check::fail(id, refusal.cause, refusal.remedy)
    }

    /// What a start would log.
    fn warned(id: &'static str, warning: &Warning) -> Check {
        Check::warn(id, &warning.cause, &warning.remedy)
    }
}

#[derive(Clone, Debug, Default)]
pub struct Report {
    pub checks: Vec<Check>,
    /// Durable writes of one block, one at a time.
    pub probe: Option<Figures>,
}

impl Report {
    /// Of settings that do not even load.
    pub fn of_bad_settings(error: &str) -> Report {
        let found = error.trim_start_matches("narad: config: ");
        Report { checks: vec![Check::fail("config", found, "correct the setting that is named")], probe: None }
    }

    pub fn count(&self, status: Status) -> usize {
        self.checks.iter().filter(|check| check.status == status).count()
    }

    pub fn worst(&self) -> Status {
        self.checks.iter().map(|check| check.status).max().unwrap_or(Status::Ok)
    }
}

/// The kernel's own files, and where container runtimes leave their marks.
struct Machine {
    root: PathBuf,
    proc: PathBuf,
    sys: PathBuf,
}

impl Machine {
    fn this() -> Machine {
        Machine { root: "/".into(), proc: "/proc".into(), sys: "/sys".into() }
    }

    /// Trimmed; `None` when the file is not there or may not be read.
    fn proc(&self, path: impl AsRef<Path>) -> Option<String> {
        Some(std::fs::read_to_string(self.proc.join(path)).ok()?.trim().to_owned())
    }

    fn sys(&self, path: impl AsRef<Path>) -> Option<String> {
        Some(std::fs::read_to_string(self.sys.join(path)).ok()?.trim().to_owned())
    }
}

/// Checks the node that would start with these settings. `probe` is how long to measure the disk, if at all.
pub fn examine(config: &Config, probe: Option<Duration>) -> Report {
    let machine = Machine::this();
    let topology = Topology::read(&machine.sys);
    let mut checks = Vec::new();
    let found = start::checks(config, &machine, &mut checks);
    let shards: CpuSet = match &found.plan {
        Some(plan) if plan.pinned() => plan.shards.iter().flatten().copied().collect(),
        Some(plan) => plan.allowed.clone(),
        None => topology.online(),
    };
    tuning::checks(&machine, &topology, found.plan.as_ref(), &shards, &mut checks);
    block::checks(&machine, found.directory.as_deref(), &mut checks);
    let mut figures = None;
    match (probe, found.directory.as_deref(), found.direct) {
        (None, ..) => checks.push(Check::skip(probe::ID, "not asked for (--no-probe)")),
        (Some(length), Some(directory), Some(direct)) => {
            let measured = probe::durable_writes(directory, direct, length);
            checks.push(probe::judge(&measured, found.holder.is_some()));
            figures = measured.ok();
        }
        _ => checks.push(Check::skip(probe::ID, "the data directory cannot be used, see above")),
    }
    Report { checks, probe: figures }
}
