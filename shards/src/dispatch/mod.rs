//! Dispatcher of one WAL directory: a pure core and its driver.

mod source;

pub use source::{ReadBack, ReadLimit, Source};

/// Figures of one dispatcher since the process started.
#[derive(Clone, Debug, Default)]
pub struct DispatchMetrics {}
