//! Whether the other side of a connection lives. Pure.

use std::time::Duration;

use narad_shards::rt::Instant;

/// A peer that says nothing for that long after a ping is dead. Also the least time between two pings, and how long a
/// call may be without a reply while nothing else is heard before the peer is asked whether it lives (E40).
const SILENCE: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    Nothing,
    Ping,
    /// It has not answered a ping.
    Dead,
}

pub(super) struct Liveness {
    heard: Instant,
    /// Asked, and not answered yet as far as was looked.
    pinged: Option<Instant>,
    last_ping: Option<Instant>,
    doubted: bool,
}

impl Liveness {
    pub fn new(now: Instant) -> Liveness {
        Liveness { heard: now, pinged: None, last_ping: None, doubted: false }
    }

    /// Bytes of a stream have come, whichever it is: that vetoes a verdict (K38).
    pub fn heard(&mut self, now: Instant) {
        self.heard = now;
    }

    /// A call has ended by its deadline.
    pub fn doubt(&mut self) {
        self.doubted = true;
    }

    /// `waiting`: since when the oldest call is without a reply.
    pub fn due(&mut self, now: Instant, waiting: Option<Instant>) -> Due {
        if let Some(at) = self.pinged {
            if self.heard <= at {
                return if now >= at + SILENCE { Due::Dead } else { Due::Nothing };
            }
            self.pinged = None;
        }
        if self.ask_at(waiting).is_none_or(|at| at > now) {
            return Due::Nothing;
        }
        self.doubted = false;
        (self.pinged, self.last_ping) = (Some(now), Some(now));
        Due::Ping
    }

    fn ask_at(&self, waiting: Option<Instant>) -> Option<Instant> {
        let patience = waiting.map(|since| since.max(self.heard) + SILENCE);
        let at = if self.doubted { Some(Instant(0)) } else { patience }?;
        Some(self.last_ping.map_or(at, |last| at.max(last + SILENCE)))
    }

    /// When [`due`](Self::due) may have something to say.
    pub fn next(&self, waiting: Option<Instant>) -> Option<Instant> {
        self.pinged.map(|at| at + SILENCE).or_else(|| self.ask_at(waiting))
    }
}

/// Whether the other side takes what is to be sent. One that lives but does not read must not make us hold replies for
/// ever; a slow path always moves something in that time.
#[derive(Default)]
pub(super) struct Progress {
    /// When the next second without any is over.
    next: Option<Instant>,
    seconds: u32,
}

/// Seconds without progress after which a peer is given up.
const STALL_SECONDS: u32 = 5;
const SECOND: Duration = Duration::from_secs(1);

impl Progress {
    /// `taken` bytes have left the queue, and `waiting` says whether it holds more.
    pub fn note(&mut self, taken: usize, waiting: bool, now: Instant) {
        match (waiting, self.next) {
            (false, _) => *self = Progress::default(),
            (true, Some(_)) if taken == 0 => {}
            (true, _) => *self = Progress { next: Some(now + SECOND), seconds: 0 },
        }
    }

    /// Whether it has taken nothing for too long. However late the look comes, one second has passed since the last: a
    /// pause of this process or machine is not the peer's.
    pub fn is_over(&mut self, now: Instant) -> bool {
        if self.next.is_some_and(|at| at <= now) {
            self.seconds += 1;
            self.next = Some(now + SECOND);
        }
        self.seconds >= STALL_SECONDS
    }

    /// When to look again.
    pub fn next(&self) -> Option<Instant> {
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_takes_nothing_is_given_up_and_one_that_takes_little_is_not() {
        let mut progress = Progress::default();
        progress.note(100, false, at(0));
        assert_eq!(progress.next(), None);
        progress.note(0, true, at(10));
        for second in 1..=4 {
            progress.note(0, true, at(1_000 * second));
            assert_eq!(progress.next(), Some(at(1_000 * second + 10)));
            assert!(!progress.is_over(at(1_000 * second + 10)), "after {second} s");
        }
        progress.note(1, true, at(4_900));
        assert!(!progress.is_over(at(5_010)), "it has taken a byte");
        assert!((1..5).all(|second| !progress.is_over(at(4_900 + 1_000 * second))));
        assert!(progress.is_over(at(9_900)));
        progress.note(7, false, at(9_901));
        assert!(!progress.is_over(at(60_000)) && progress.next().is_none());
    }

    #[test]
    fn a_pause_of_this_process_is_not_held_against_the_peer() {
        let mut progress = Progress::default();
        progress.note(0, true, at(0));
        assert!(!progress.is_over(at(60_000)), "nobody has looked meanwhile");
        assert_eq!(progress.next(), Some(at(61_000)), "and the peer has the time that is left to it");
    }

    fn at(ms: u64) -> Instant {
        Instant(0) + Duration::from_millis(ms)
    }

    #[test]
    fn k38_a_deadline_asks_and_silence_for_a_second_is_the_verdict() {
        let mut peer = Liveness::new(at(0));
        assert_eq!((peer.due(at(5_000), None), peer.next(None)), (Due::Nothing, None));
        peer.doubt();
        assert_eq!(peer.due(at(5_000), None), Due::Ping);
        assert_eq!((peer.due(at(5_999), None), peer.next(None)), (Due::Nothing, Some(at(6_000))));
        assert_eq!(peer.due(at(6_000), None), Due::Dead);
    }

    #[test]
    fn k38_anything_heard_vetoes_the_verdict_and_pings_are_a_second_apart() {
        let mut peer = Liveness::new(at(0));
        peer.doubt();
        assert_eq!(peer.due(at(10), None), Due::Ping);
        peer.doubt();
        peer.heard(at(500));
        assert_eq!((peer.due(at(900), None), peer.next(None)), (Due::Nothing, Some(at(1_010))));
        assert_eq!(peer.due(at(1_010), None), Due::Ping);
        peer.heard(at(2_009));
        assert_eq!((peer.due(at(2_010), None), peer.next(None)), (Due::Nothing, None));
    }

    #[test]
    fn e40_a_call_without_a_reply_asks_after_a_second_of_silence() {
        let mut peer = Liveness::new(at(0));
        let waiting = Some(at(100));
        assert_eq!((peer.due(at(1_099), waiting), peer.next(waiting)), (Due::Nothing, Some(at(1_100))));
        peer.heard(at(600));
        assert_eq!((peer.due(at(1_100), waiting), peer.next(waiting)), (Due::Nothing, Some(at(1_600))));
        assert_eq!(peer.due(at(1_600), waiting), Due::Ping);
    }
}
