//! The library's log lines as ours. It reports each vote and message at info: debug here; what an operator needs to
//! know (who leads, since when) the driver says itself.

use slog::{o, Drain, Level, Logger, Never, OwnedKVList, Record};

struct Tracing;

impl Drain for Tracing {
    type Ok = ();
    type Err = Never;

    fn log(&self, record: &Record<'_>, _values: &OwnedKVList) -> Result<(), Never> {
        match record.level() {
            Level::Critical | Level::Error => tracing::error!("raft: {}", record.msg()),
            Level::Warning => tracing::warn!("raft: {}", record.msg()),
            Level::Info | Level::Debug => tracing::debug!("raft: {}", record.msg()),
            Level::Trace => {}
        }
        Ok(())
    }
}

pub fn logger() -> Logger {
    Logger::root(Tracing, o!())
}
