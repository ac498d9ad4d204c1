//! `narad-bench ring`.

use argh::FromArgs;

use crate::run::{Failure, Run};
use crate::Common;

/// the ring between two cores: latency and rate
#[derive(FromArgs)]
#[argh(subcommand, name = "ring")]
pub struct Options {}

/// Measures.
pub fn run(_common: &Common, _options: &Options) -> Result<Run, Failure> {
    Err(Failure("ring is not measured yet".into()))
}
