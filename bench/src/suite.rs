//! `narad-bench suite`.

use argh::FromArgs;

use crate::run::{Failure, Run};
use crate::Common;

/// everything, in ten minutes, on one report page
#[derive(FromArgs)]
#[argh(subcommand, name = "suite")]
pub struct Options {}

/// Measures.
pub fn run(_common: &Common, _options: &Options) -> Result<Run, Failure> {
    Err(Failure("suite is not measured yet".into()))
}
