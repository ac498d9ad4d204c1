//! `narad-bench produce`.

use argh::FromArgs;

use crate::run::{Failure, Run};
use crate::Common;

/// produce to a running broker
#[derive(FromArgs)]
#[argh(subcommand, name = "produce")]
pub struct Options {}

/// Measures.
pub fn run(_common: &Common, _options: &Options) -> Result<Run, Failure> {
    Err(Failure("produce is not measured yet".into()))
}
