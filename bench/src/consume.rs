//! `narad-bench consume`.

use argh::FromArgs;

use crate::run::{Failure, Run};
use crate::Common;

/// consume and ack from a running broker
#[derive(FromArgs)]
#[argh(subcommand, name = "consume")]
pub struct Options {}

/// Measures.
pub fn run(_common: &Common, _options: &Options) -> Result<Run, Failure> {
    Err(Failure("consume is not measured yet".into()))
}
