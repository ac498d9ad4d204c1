//! `narad-bench fairness`.

use argh::FromArgs;

use crate::run::{Failure, Run};
use crate::Common;

/// consume rate while produce is overdriven
#[derive(FromArgs)]
#[argh(subcommand, name = "fairness")]
pub struct Options {}

/// Measures.
pub fn run(_common: &Common, _options: &Options) -> Result<Run, Failure> {
    Err(Failure("fairness is not measured yet".into()))
}
