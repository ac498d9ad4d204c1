//! `narad-bench device`: what the drive can do, and the yardstick that other figures are divided by.

mod measure;
mod ring;
mod scratch;
mod yardstick;

use std::path::PathBuf;
use std::time::Duration;

use argh::FromArgs;

pub use measure::Sample;
pub use yardstick::{paired, yardstick, Paired, Probe, Round, Yardstick, SAMPLE_TIME};

use crate::run::{Failure, Run};
use crate::Common;

/// what the drive can do: durable writes, reads, flushes
#[derive(FromArgs)]
#[argh(subcommand, name = "device")]
pub struct Options {
    /// directory on the drive to measure (default: the current one)
    #[argh(option, default = "PathBuf::from(\".\")")]
    pub dir: PathBuf,
    /// only the few figures that others are divided by
    #[argh(switch)]
    pub quick: bool,
    /// seconds that --quick takes, about (default 3)
    #[argh(option, default = "3.0")]
    pub seconds: f64,
}

/// Measures.
pub fn run(_common: &Common, options: &Options) -> Result<Run, Failure> {
    let mut run = Run::new("device");
    run.set("dir", options.dir.display());
    yardstick(&options.dir, Duration::from_secs_f64(options.seconds))?.add_to(&mut run);
    Ok(run)
}
