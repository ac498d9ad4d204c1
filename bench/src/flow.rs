//! `narad-bench flow`.

use argh::FromArgs;

use crate::run::{Failure, Run};
use crate::Common;

/// produce, consume, ack, and verify that every 202 came back
#[derive(FromArgs)]
#[argh(subcommand, name = "flow")]
pub struct Options {}

/// Measures.
pub fn run(_common: &Common, _options: &Options) -> Result<Run, Failure> {
    Err(Failure("flow is not measured yet".into()))
}
