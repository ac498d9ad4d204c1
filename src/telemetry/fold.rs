//! A thing that goes wrong for a thousand partitions at once is a few lines of the log and a count, not a thousand lines:
//! of each kind of line so many are written within a second, and what more there was is one line when it is over.

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

const WINDOW: Duration = Duration::from_secs(1);

/// Lines of one kind that are written within a second.
fn lines_max(level: Level) -> u64 {
    match level {
        Level::ERROR | Level::WARN => 20,
        // A start has some of these for each shard.
        _ => 200,
    }
}

/// What is said of lines that were left out.
#[derive(Debug, PartialEq, Eq)]
struct LeftOut {
    level: Level,
    /// Of the first one.
    message: String,
    lines: u64,
}

/// What becomes of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line {
    Written,
    /// As the first one since such lines were last counted: whoever has it tells its text.
    LeftOutFirst,
    LeftOut,
}

struct Window {
    began: Instant,
    written: u64,
    left_out: Option<LeftOut>,
}

/// Pure.
struct Folds<K> {
    windows: HashMap<K, Window>,
}

impl<K: Clone + Eq + Hash> Folds<K> {
    fn judge(&mut self, kind: K, level: Level, now: Instant) -> Line {
        let window = self.windows.entry(kind).or_insert(Window { began: now, written: 0, left_out: None });
        // One that has something to say stays until that was said.
        if now.duration_since(window.began) >= WINDOW && window.left_out.is_none() {
            (window.began, window.written) = (now, 0);
        }
        if window.written < lines_max(level) {
            window.written += 1;
            return Line::Written;
        }
        let is_first = window.left_out.is_none();
        window.left_out.get_or_insert_with(|| LeftOut { level, message: String::new(), lines: 0 }).lines += 1;
        if is_first {
            Line::LeftOutFirst
        } else {
            Line::LeftOut
        }
    }

    fn tell(&mut self, kind: &K, message: String) {
        if let Some(left_out) = self.windows.get_mut(kind).and_then(|window| window.left_out.as_mut()) {
            left_out.message = message;
        }
    }

    /// What is to be said now, and when the next look is due if there is more.
    fn take(&mut self, now: Instant) -> (Vec<LeftOut>, Option<Instant>) {
        let over = |window: &Window| now.duration_since(window.began) >= WINDOW;
        let due = self.windows.values_mut().filter(|window| over(window)).filter_map(|window| {
            (window.began, window.written) = (now, 0);
            window.left_out.take()
        });
        let due = due.collect();
        let next = self.windows.values().filter(|window| window.left_out.is_some()).map(|window| window.began + WINDOW);
        (due, next.min())
    }
}

/// Of the process.
static SHARED: OnceLock<Arc<Shared>> = OnceLock::new();

/// Says what was left out lately: the process ends, and that may be why.
pub fn say_the_rest() {
    if let Some(shared) = SHARED.get() {
        let (due, _) = shared.lock().take(Instant::now() + WINDOW);
        due.iter().for_each(say);
    }
}

#[derive(Default)]
struct Shared {
    folds: Mutex<Folds<Identifier>>,
    something_left_out: Condvar,
}

impl<K> Default for Folds<K> {
    fn default() -> Folds<K> {
        Folds { windows: HashMap::new() }
    }
}

/// Decides for every line of the process. What is said for the record (`component`) is never left out.
pub(super) struct Folding(Arc<Shared>);

impl Folding {
    /// With a thread that says what was left out; it sleeps while nothing is.
    pub fn start() -> Result<Folding, String> {
        let shared = SHARED.get_or_init(Arc::default).clone();
        let tell = shared.clone();
        let thread =
            std::thread::Builder::new().name("narad-log".to_owned()).spawn(move || tell.say_what_was_left_out());
        thread.map_err(|error| format!("cannot start the thread of the log: {error}"))?;
        Ok(Folding(shared))
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Folds<Identifier>> {
        self.folds.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn say_what_was_left_out(&self) {
        let mut folds = self.lock();
        loop {
            let (due, next) = folds.take(Instant::now());
            if !due.is_empty() {
                drop(folds); // a line takes the lock
                due.iter().for_each(say);
                folds = self.lock();
                continue;
            }
            folds = match next {
                None => self.something_left_out.wait(folds).unwrap_or_else(|poisoned| poisoned.into_inner()),
                Some(at) => {
                    let wait = at.saturating_duration_since(Instant::now());
                    self.something_left_out.wait_timeout(folds, wait).unwrap_or_else(|poisoned| poisoned.into_inner()).0
                }
            };
        }
    }
}

fn say(left_out: &LeftOut) {
    let LeftOut { level, message, lines } = left_out;
    match *level {
        Level::ERROR => tracing::error!(left_out = lines, "{message}"),
        Level::WARN => tracing::warn!(left_out = lines, "{message}"),
        _ => tracing::info!(left_out = lines, "{message}"),
    }
}

impl<S: Subscriber> Layer<S> for Folding {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let metadata = event.metadata();
        let fields = metadata.fields();
        if *metadata.level() > Level::INFO || fields.field("component").is_some() || fields.field("left_out").is_some()
        {
            return true;
        }
        let line = self.0.lock().judge(metadata.callsite(), *metadata.level(), Instant::now());
        if line == Line::LeftOutFirst {
            // Not under the lock: what formats itself may log.
            let mut message = Message(String::new());
            event.record(&mut message);
            self.0.lock().tell(&metadata.callsite(), message.0);
            self.0.something_left_out.notify_one();
        }
        line == Line::Written
    }
}

struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thousand_lines_of_a_kind_in_a_second_are_twenty_and_one_that_counts_the_others() {
        let (began, mut folds) = (Instant::now(), Folds::default());
        let at = |ms| began + Duration::from_millis(ms);
        let mut written = 0;
        for line in 0..1_000 {
            let judged = folds.judge("poisoned", Level::ERROR, at(line / 2));
            assert_eq!(judged == Line::LeftOutFirst, line == 20);
            written += u64::from(judged == Line::Written);
        }
        folds.tell(&"poisoned", "log poisoned".to_owned());
        assert_eq!(folds.judge("another", Level::WARN, at(600)), Line::Written, "each kind by itself");
        assert_eq!((written, folds.take(at(999))), (20, (Vec::new(), Some(at(1_000)))));
        let left_out = LeftOut { level: Level::ERROR, message: "log poisoned".to_owned(), lines: 980 };
        assert_eq!(folds.take(at(1_000)), (vec![left_out], None));
        assert_eq!(folds.judge("poisoned", Level::ERROR, at(1_001)), Line::Written, "a new second");
    }

    #[test]
    fn what_is_left_out_is_counted_until_it_was_said_and_a_few_lines_never_are() {
        let (began, mut folds) = (Instant::now(), Folds::default());
        for second in 0..10 {
            for _ in 0..20 {
                assert_eq!(folds.judge(1, Level::WARN, began + second * WINDOW), Line::Written);
            }
        }
        assert_eq!(folds.take(began + 9 * WINDOW), (Vec::new(), None));
        // Whoever says it comes late.
        assert!((0..5).all(|late| folds.judge(1, Level::WARN, began + (9 + late) * WINDOW) != Line::Written));
        assert_eq!(folds.take(began + 20 * WINDOW).0[0].lines, 5);
    }

    /// Logs while it is formatted.
    struct Talks;

    impl fmt::Display for Talks {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            tracing::warn!("formatted");
            f.write_str("talks")
        }
    }

    #[test]
    fn what_logs_while_it_is_formatted_stops_nobody() {
        let folding = Folding(Arc::default());
        let shared = folding.0.clone();
        let subscriber = tracing_subscriber::layer::SubscriberExt::with(tracing_subscriber::registry(), folding);
        tracing::subscriber::with_default(subscriber, || {
            for _ in 0..30 {
                tracing::warn!("{Talks}");
            }
        });
        let (said, _) = shared.lock().take(Instant::now() + WINDOW);
        assert_eq!(said.iter().map(|said| (&*said.message, said.lines)).collect::<Vec<_>>(), [("talks", 10)]);
    }

    #[test]
    fn what_is_said_for_the_record_is_never_left_out() {
        let folding = Folding(Arc::default());
        let shared = folding.0.clone();
        let subscriber = tracing_subscriber::layer::SubscriberExt::with(tracing_subscriber::registry(), folding);
        tracing::subscriber::with_default(subscriber, || {
            for _ in 0..50 {
                tracing::warn!(component = "audit", "denied");
                tracing::warn!("it hangs");
            }
        });
        let (said, _) = shared.lock().take(Instant::now() + WINDOW);
        assert_eq!(said, [LeftOut { level: Level::WARN, message: "it hangs".to_owned(), lines: 30 }]);
    }
}
