//! `narad-bench device`: what the drive can do, and the yardstick that other figures are divided by.

pub mod measure;
mod ring;
mod scratch;
mod table;
mod yardstick;

use std::path::PathBuf;
use std::time::Duration;

use argh::FromArgs;

pub use measure::Sample;
pub use scratch::require_space;
pub use yardstick::{paired, yardstick, Probe, Round};

use crate::load::process::require_directory;
use crate::run::{Failure, Run};
use crate::Common;

/// what the drive can do: durable writes by method, size, depth and state of the blocks; reads; flushes
#[derive(FromArgs)]
#[argh(subcommand, name = "device")]
pub struct Options {
    /// directory on the drive to measure; a scratch file of up to 768 MiB lives there meanwhile (default: the current)
    #[argh(option, default = "PathBuf::from(\".\")")]
    pub dir: PathBuf,
    /// only the few figures that others are divided by
    #[argh(switch)]
    pub quick: bool,
    /// every method on every kind of block at every size and depth (some minutes)
    #[argh(switch)]
    pub full: bool,
    /// seconds that --quick takes, about (default 3)
    #[argh(option, default = "3.0")]
    pub seconds: f64,
    /// seconds of measuring in each cell of the tables (default 0.4)
    #[argh(option, default = "0.4")]
    pub cell_seconds: f64,
}

/// Measures.
pub fn run(_common: &Common, options: &Options) -> Result<Run, Failure> {
    let seconds = |flag: &str, value: f64| {
        if value > 0.0 && value <= 3600.0 {
            return Ok(Duration::from_secs_f64(value));
        }
        Err(Failure(format!("{flag} {value}: give seconds above 0 and up to 3600")))
    };
    require_directory(&options.dir)?;
    let mut run = Run::new("device");
    run.set("dir", options.dir.display());
    run.set("durability", "each write durable before the next starts in its place");
    if options.quick {
        yardstick(&options.dir, seconds("--seconds", options.seconds)?)?.add_to(&mut run);
        return Ok(run);
    }
    let cell = seconds("--cell-seconds", options.cell_seconds)?;
    yardstick(&options.dir, Duration::from_secs(3))?.add_to(&mut run);
    table::measure(&mut run, &options.dir, cell, options.full)?;
    Ok(run)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quick_figures_are_there_and_nothing_stays_behind() {
        let dir = std::env::temp_dir().join(format!("narad-bench-device-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let common = Common { out: None, compare: None, repeat: 1 };
        let options = Options { dir: dir.clone(), quick: true, full: false, seconds: 0.2, cell_seconds: 0.4 };
        let run = run(&common, &options).map_err(|Failure(reason)| reason).unwrap();
        for name in [
            "device.durable_4k.p50",
            "device.durable_4k.rate",
            "device.durable_bandwidth",
            "device.durable_bandwidth.block",
            "device.read_bandwidth",
        ] {
            assert!(run.value(name).is_some_and(|value| value > 0.0), "{name}: {:?}", run.value(name));
        }
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
        std::fs::remove_dir(&dir).unwrap();
    }

    #[test]
    fn flags_without_sense_are_sentences() {
        let common = Common { out: None, compare: None, repeat: 1 };
        let options =
            |dir: &str, seconds| Options { dir: dir.into(), quick: true, full: false, seconds, cell_seconds: 0.4 };
        let Failure(text) = run(&common, &options("/nowhere/at/all", 1.0)).unwrap_err();
        assert!(text.contains("--dir /nowhere/at/all"), "{text}");
        let Failure(text) = run(&common, &options("/", f64::NAN)).unwrap_err();
        assert!(text.contains("--seconds"), "{text}");
    }
}
