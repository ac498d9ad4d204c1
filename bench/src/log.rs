//! `narad-bench log`.

use argh::FromArgs;

use crate::run::{Failure, Run};
use crate::Common;

/// commits to partition logs
#[derive(FromArgs)]
#[argh(subcommand, name = "log")]
pub struct Options {}

/// Measures.
pub fn run(_common: &Common, _options: &Options) -> Result<Run, Failure> {
    Err(Failure("log is not measured yet".into()))
}
