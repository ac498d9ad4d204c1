//! `narad-bench idle`: what a broker takes that has nothing to do.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use argh::FromArgs;

use crate::load::broker::Plan;
use crate::load::cost::Probe;
use crate::load::options::duration;
use crate::report::Progress;
use crate::run::{Better, Failure, Run};
use crate::Common;

/// CPU time and memory of a broker that is started here and left alone
#[derive(FromArgs)]
#[argh(subcommand, name = "idle")]
pub struct Options {
    /// the broker's program (default: narad beside this program)
    #[argh(option)]
    binary: Option<PathBuf>,
    /// where the fresh data directory is made (default .)
    #[argh(option, default = "PathBuf::from(\".\")")]
    dir: PathBuf,
    /// more arguments of the broker, separated by spaces (default --shards 2)
    #[argh(option, default = "String::from(\"--shards 2\")")]
    broker_args: String,
    /// time before anything counts, in which the broker prepares its files (default 5s)
    #[argh(option, default = "Duration::from_secs(5)", from_str_fn(duration))]
    warmup: Duration,
    /// measured time (default 5s)
    #[argh(option, default = "Duration::from_secs(5)", from_str_fn(duration))]
    duration: Duration,
}

/// Measures.
pub fn run(_common: &Common, options: &Options) -> Result<Run, Failure> {
    if options.duration.is_zero() {
        return Err(Failure("--duration must be more than 0".into()));
    }
    let plan = Plan {
        binary: options.binary.clone(),
        directory: options.dir.clone(),
        cpus: None,
        confine: false,
        arguments: options.broker_args.clone(),
        environment: Vec::new(),
    };
    let mut run = Run::new("idle");
    run.set("dir", options.dir.display());
    run.set("broker", format!("started here, {}", options.broker_args));
    run.set("warmup_s", options.warmup.as_secs_f64());
    run.set("duration_s", options.duration.as_secs_f64());
    let progress = Progress::new();
    progress.show("idle: waiting");
    let broker = plan.start()?;
    // Its own counters are not asked for: that would be work.
    let probe = Probe { pid: Some(broker.pid()), admin: None, directory: None };
    std::thread::sleep(options.warmup);
    let (start, before) = (Instant::now(), probe.sample());
    std::thread::sleep(options.duration);
    let (elapsed, after) = (start.elapsed(), probe.sample());
    let (Some(before), Some(after), Some(resident)) = (before.cpu, after.cpu, after.resident_bytes) else {
        return Err(Failure(format!("cannot read CPU time and memory of process {} from /proc", broker.pid())));
    };
    let cpu = after.saturating_sub(before).as_secs_f64() / elapsed.as_secs_f64();
    run.figure("idle.cpu", cpu, "ratio", Better::Lower);
    run.figure("idle.resident", resident as f64, "B", Better::Lower);
    run.notes.push("idle.cpu is the share of one core that all threads of the broker took together".into());
    Ok(run)
}
