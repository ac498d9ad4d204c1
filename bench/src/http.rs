//! `narad-bench http`.

use argh::FromArgs;

use crate::run::{Failure, Run};
use crate::Common;

/// the HTTP stack answering 202 without storing: the ceiling of produce
#[derive(FromArgs)]
#[argh(subcommand, name = "http")]
pub struct Options {}

/// Measures.
pub fn run(_common: &Common, _options: &Options) -> Result<Run, Failure> {
    Err(Failure("http is not measured yet".into()))
}
