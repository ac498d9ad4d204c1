//! Time as the load counts it.

use std::time::{Duration, Instant};

/// Nanoseconds since the measured time began; negative while warming up.
pub type Nanos = i64;

/// The monotonic clock, counted from the start of the measured time. The same on all threads of a run.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    start: Instant,
}

impl Clock {
    /// `start` may lie ahead: until then the time is negative.
    pub fn new(start: Instant) -> Clock {
        Clock { start }
    }

    pub fn now(&self) -> Nanos {
        let now = Instant::now();
        match now.checked_duration_since(self.start) {
            Some(since) => nanos(since),
            None => -nanos(self.start - now),
        }
    }
}

/// A duration that fits: the longest is 292 years.
pub fn nanos(duration: Duration) -> Nanos {
    i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX)
}
