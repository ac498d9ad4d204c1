//! `narad-bench recover`.

use argh::FromArgs;

use crate::run::{Failure, Run};
use crate::Common;

/// time to ready after a kill, by what there is to read
#[derive(FromArgs)]
#[argh(subcommand, name = "recover")]
pub struct Options {}

/// Measures.
pub fn run(_common: &Common, _options: &Options) -> Result<Run, Failure> {
    Err(Failure("recover is not measured yet".into()))
}
