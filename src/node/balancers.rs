//! Whether a load balancer watches the API port, and whether a stop has been seen by it.
//!
//! Only who has been told sends its clients elsewhere, and only who asks can be told. So the port of a node that is
//! being asked stays open for a while after the node is no longer ready, and that of a node that nobody asks closes at
//! once. Asked means twice: whoever starts a node asks until the first yes, and never again.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use narad_shards::rt::Instant;

/// Balancers ask every 1 to 10 s: two questions fall into this with the slowest of them, and one lost.
const WATCHED_WITHIN: Duration = Duration::from_secs(30);
/// Answers after which the common balancers take a server out.
const TOLD: u32 = 3;

/// Times are of the monotonic clock, which all threads share. Exact enough under races: it decides about waiting.
#[derive(Debug, Default)]
pub struct Balancers {
    /// Of the last two questions that were answered with yes, ns; 0 for none.
    last: AtomicU64,
    last_but_one: AtomicU64,
    told: AtomicU32,
}

impl Balancers {
    /// `/readyz` is answered on the API port.
    pub fn note(&self, ready: bool, now: Instant) {
        if ready {
            self.last_but_one.store(self.last.swap(now.0, Relaxed), Relaxed);
        } else {
            self.told.fetch_add(1, Relaxed);
        }
    }

    /// From when on refusals count as told: those before, while the node started, were about something else.
    pub fn begin_stop(&self) {
        self.told.store(0, Relaxed);
    }

    /// Whether somebody is left who should see that the node is not ready.
    pub fn wait_for(&self, stopped_at: Instant) -> bool {
        let last_but_one = Instant(self.last_but_one.load(Relaxed));
        let watched = last_but_one.0 > 0 && stopped_at.saturating_since(last_but_one) <= WATCHED_WITHIN;
        watched && self.told.load(Relaxed) < TOLD
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Instant {
        Instant(0) + Duration::from_secs(seconds)
    }

    #[test]
    fn a_stop_waits_for_a_balancer_until_it_has_seen_it_and_for_nobody_else() {
        let nobody = Balancers::default();
        assert!(!nobody.wait_for(at(100)));
        // Waits for the start, and never asks again.
        let starter = Balancers::default();
        starter.note(false, at(99));
        starter.note(true, at(100));
        assert!(!starter.wait_for(at(101)));

        let watched = Balancers::default();
        for second in [0, 10, 20, 30] {
            watched.note(second > 0, at(100 + second));
        }
        assert!(!watched.wait_for(at(151)), "it has gone");
        watched.begin_stop();
        for _ in 0..3 {
            assert!(watched.wait_for(at(140)));
            watched.note(false, at(141));
        }
        assert!(!watched.wait_for(at(140)), "told three times");
    }
}
