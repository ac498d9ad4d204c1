//! Counts and keeps log lines, for tests.

use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};

#[derive(Clone, Default)]
pub(crate) struct LogLines(Arc<Mutex<Vec<String>>>);

impl LogLines {
    /// From here on those of this thread, until the guard is dropped.
    pub fn of_this_thread() -> (LogLines, tracing::subscriber::DefaultGuard) {
        let lines = LogLines::default();
        (lines.clone(), tracing::subscriber::set_default(lines))
    }

    pub fn count(&self) -> u64 {
        self.0.lock().expect("one thread").len() as u64
    }

    /// Whether one of them has all of these in its text or its fields.
    pub fn any_with(&self, texts: &[&str]) -> bool {
        self.0.lock().expect("one thread").iter().any(|line| texts.iter().all(|text| line.contains(text)))
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
    fn event(&self, event: &tracing::Event<'_>) {
        let mut line = Line(event.metadata().level().to_string());
        event.record(&mut line);
        self.0.lock().expect("one thread").push(line.0);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0 += &format!(" {field}={value:?}");
    }
}
