//! Counts log lines, for tests.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::Arc;

#[derive(Clone, Default)]
pub(crate) struct LogLines(Arc<AtomicU64>);

impl LogLines {
    /// From here on those of this thread, until the guard is dropped.
    pub fn of_this_thread() -> (LogLines, tracing::subscriber::DefaultGuard) {
        let lines = LogLines::default();
        (lines.clone(), tracing::subscriber::set_default(lines))
    }

    pub fn count(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

impl tracing::Subscriber for LogLines {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, Relaxed);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}
