//! `narad-bench versus`.

use argh::FromArgs;

use crate::run::{Failure, Run};
use crate::Common;

/// the same load against other durable queues, side by side
#[derive(FromArgs)]
#[argh(subcommand, name = "versus")]
pub struct Options {}

/// Measures.
pub fn run(_common: &Common, _options: &Options) -> Result<Run, Failure> {
    Err(Failure("versus is not measured yet".into()))
}
