//! Log lines: one JSON object or one `key=value` line an event, on standard error.
//!
//! `time`, `level` and `msg` come first, the event's fields follow flat. The texts that operators match on are at the
//! call sites.

use std::fmt::{self, Write as _};
use std::time::{SystemTime, UNIX_EPOCH};

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;

use super::fold::Folding;
use crate::config::{format_time, LogFormat, LogLevel};

/// Sends every event of the process from `level` up to standard error, of a kind that comes in masses a few and their
/// count. Once per process; a second call is an error.
pub fn install_logging(level: LogLevel, format: LogFormat) -> Result<(), String> {
    tracing::subscriber::set_global_default(subscriber(level, format, std::io::stderr).with(Folding::start()?))
        .map_err(|cause| format!("logging was already set up: {cause}"))
}

fn subscriber<W>(
    level: LogLevel,
    format: LogFormat,
    writer: W,
) -> impl Subscriber + for<'a> LookupSpan<'a> + Send + Sync
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let level = match level {
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Error => LevelFilter::ERROR,
    };
    // A line that cannot be written is lost. To say so on standard error, which is where it was to go, panics: a log on a
    // full disk took the broker down.
    let lines =
        tracing_subscriber::fmt::layer().event_format(Lines { format }).with_writer(writer).log_internal_errors(false);
    tracing_subscriber::registry().with(level).with(lines)
}

struct Lines {
    format: LogFormat,
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _ctx: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut fields = Fields { format: self.format, msg: String::new(), rest: String::new() };
        event.record(&mut fields);
        let time = timestamp(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros());
        let level = match *event.metadata().level() {
            Level::ERROR => "ERROR",
            Level::WARN => "WARN",
            Level::INFO => "INFO",
            Level::DEBUG | Level::TRACE => "DEBUG",
        };
        let msg = if fields.msg.is_empty() { quoted(self.format, "") } else { fields.msg };
        match self.format {
            LogFormat::Json => {
                writeln!(writer, "{{\"time\":\"{time}\",\"level\":\"{level}\",\"msg\":{msg}{}}}", fields.rest)
            }
            LogFormat::Text => writeln!(writer, "time={time} level={level} msg={msg}{}", fields.rest),
        }
    }
}

/// A string as the format writes it.
fn quoted(format: LogFormat, value: &str) -> String {
    let bare = |c: char| c.is_ascii_graphic() && !matches!(c, '"' | '=' | '\\');
    match format {
        LogFormat::Text if !value.is_empty() && value.chars().all(bare) => value.to_owned(),
        _ => serde_json::to_string(value).unwrap_or_default(),
    }
}

/// Collects an event's fields, already in the words of the format.
struct Fields {
    format: LogFormat,
    msg: String,
    rest: String,
}

impl Fields {
    /// `value` is a number or boolean, or was made by [`quoted`].
    fn put(&mut self, field: &Field, value: &str) {
        let written = match (field.name(), self.format) {
            ("message", _) => {
                self.msg = value.to_owned();
                Ok(())
            }
            (name, LogFormat::Json) => write!(self.rest, ",{}:{value}", quoted(LogFormat::Json, name)),
            (name, LogFormat::Text) => write!(self.rest, " {name}={value}"),
        };
        debug_assert!(written.is_ok(), "writing into memory cannot fail");
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = quoted(self.format, &format!("{value:?}"));
        self.put(field, &text);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        let text = quoted(self.format, value);
        self.put(field, &text);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, &value.to_string());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, &value.to_string());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, &value.to_string());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        // JSON has no infinity and no NaN.
        let text = if value.is_finite() { value.to_string() } else { quoted(self.format, &value.to_string()) };
        self.put(field, &text);
    }
}

/// RFC 3339 in UTC, with microseconds.
fn timestamp(micros: u128) -> String {
    let seconds = u64::try_from(micros / 1_000_000).unwrap_or(u64::MAX);
    format!("{}.{:06}Z", format_time(seconds), micros % 1_000_000)
}

/// What is logged on this thread while `emit` runs, line by line.
#[cfg(test)]
pub(crate) fn lines(level: LogLevel, format: LogFormat, emit: impl FnOnce()) -> Vec<String> {
    use std::io;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Page(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Page {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("one thread").extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    let page = Page::default();
    let writer = page.clone();
    tracing::subscriber::with_default(subscriber(level, format, move || writer.clone()), emit);
    let text = page.0.lock().expect("one thread").clone();
    String::from_utf8(text).expect("UTF-8").lines().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn emit() {
        tracing::info!(addr = ":7942", shards = 4u64, ratio = 0.5, ok = true, err = %"disk \"x\"\n", "http listening");
        tracing::debug!(odd = f64::NAN, "detail");
        tracing::error!(cause = ?Some(1));
    }

    #[test]
    fn json_lines_are_flat_objects() {
        let lines = lines(LogLevel::Info, LogFormat::Json, emit);
        assert_eq!(lines.len(), 2, "debug is below the level: {lines:?}");
        let (head, tail) = lines[0].split_at("{\"time\":\"2026-01-01T00:00:00.000000Z\"".len());
        assert!(head.starts_with("{\"time\":\"20") && head.ends_with("Z\""), "{head}");
        assert_eq!(
            tail,
            ",\"level\":\"INFO\",\"msg\":\"http listening\",\"addr\":\":7942\",\"shards\":4,\"ratio\":0.5,\"ok\":true,\
             \"err\":\"disk \\\"x\\\"\\n\"}"
        );
        assert!(lines[1].ends_with(",\"level\":\"ERROR\",\"msg\":\"\",\"cause\":\"Some(1)\"}"), "{}", lines[1]);
        for line in &lines {
            serde_json::from_str::<serde_json::Value>(line).expect("valid JSON");
        }
    }

    #[test]
    fn text_lines_quote_what_needs_it() {
        let lines = lines(LogLevel::Debug, LogFormat::Text, emit);
        let tail = lines[0].split_once(' ').expect("a time").1;
        assert_eq!(
            tail,
            "level=INFO msg=\"http listening\" addr=:7942 shards=4 ratio=0.5 ok=true err=\"disk \\\"x\\\"\\n\""
        );
        assert!(lines[1].ends_with("level=DEBUG msg=detail odd=NaN"), "{}", lines[1]);
    }

    #[test]
    fn dates() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000000Z"),
            (951_782_400, "2000-02-29T00:00:00.000000Z"),
            (1_700_000_000, "2023-11-14T22:13:20.000000Z"),
            (4_107_542_399, "2100-02-28T23:59:59.000000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000000Z"),
        ] {
            assert_eq!(timestamp(seconds * 1_000_000), text);
        }
    }
}
