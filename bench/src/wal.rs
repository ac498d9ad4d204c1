//! `narad-bench wal`.

use argh::FromArgs;

use crate::run::{Failure, Run};
use crate::Common;

/// appends to the ingress WAL, on the real disk and on an instant one
#[derive(FromArgs)]
#[argh(subcommand, name = "wal")]
pub struct Options {}

/// Measures.
pub fn run(_common: &Common, _options: &Options) -> Result<Run, Failure> {
    Err(Failure("wal is not measured yet".into()))
}
