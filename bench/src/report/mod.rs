//! From results to what people and programs read.

pub mod stats;

use crate::run::{Failure, Run};
use crate::Common;

/// Prints the results of one command's repeated runs, and writes them to `--out`.
pub fn finish(_common: &Common, runs: Vec<Run>) -> Result<(), Failure> {
    for figure in runs.iter().flat_map(|run| &run.figures) {
        println!("{:<40} {:>14.1} {}", figure.name, figure.value, figure.unit);
    }
    Ok(())
}
