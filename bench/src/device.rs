//! `narad-bench device`.

use argh::FromArgs;

use crate::run::{Failure, Run};
use crate::Common;

/// what the drive can do: durable writes, reads, flushes
#[derive(FromArgs)]
#[argh(subcommand, name = "device")]
pub struct Options {}

/// Measures.
pub fn run(_common: &Common, _options: &Options) -> Result<Run, Failure> {
    Err(Failure("device is not measured yet".into()))
}
