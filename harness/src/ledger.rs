//! What was promised and what came back: the delivery contract judged from outside.
//!
//! Payloads carry their own id and are otherwise derived from it, so a wrong byte is seen. A stored copy is named by
//! (partition, offset): one produce may have several copies, each leased and acked for itself (D3, D15).

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

use crate::random::Random;

/// What became of one produce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// 202: must be delivered.
    Accepted,
    /// 429 or 503: must never be delivered (D13).
    Refused,
    /// No answer, or 500: may be delivered.
    Unknown,
}

#[derive(Clone, Debug)]
struct Produce {
    outcome: Outcome,
    round: u32,
    /// When it was answered, or first seen.
    at: Instant,
    copies: Vec<Copy>,
}

#[derive(Clone, Debug)]
struct Copy {
    place: (u32, u64),
    /// When each delivery was asked for, and when it arrived: its lease began in between.
    deliveries: Vec<(Instant, Instant)>,
    acked: Option<Instant>,
    /// The round in which this copy was first seen.
    round: u32,
}

/// One kill, and how old an ack may be that it takes back (D16): the broker says how long its oldest ack has been
/// waiting for the page cache; what was looked at shortly before the kill had that much time more to wait.
#[derive(Clone, Copy, Debug)]
struct Kill {
    at: Instant,
    acks_before: Duration,
}

#[derive(Debug, Default)]
pub struct Ledger {
    produces: BTreeMap<u64, Produce>,
    kills: Vec<Kill>,
    /// Graceful stops: they end leases as a kill does, and take no ack back (D18).
    stops: Vec<Instant>,
    /// Spans in which a cluster was broken in some other way, their aftermath included.
    disturbances: Vec<(Instant, Instant)>,
    longest_unwritten: Duration,
    released: BTreeMap<(u32, u64), Instant>,
    acked_again: u64,
    /// Deliveries that arrived after another one of the same copy had been acked, and were asked for before.
    late_answers: u64,
    pub violations: Vec<String>,
}

/// How late an answer may arrive that left before its broker was killed.
const ANSWER_IN_FLIGHT: Duration = Duration::from_millis(200);

/// The verdict of a run, and the evidence that it was one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    pub accepted: u64,
    pub refused: u64,
    pub unknown: u64,
    pub delivered: u64,
    pub acked: u64,
    pub lost: u64,
    /// Further stored copies of a produce, each explained by a kill between accept and second copy (R6, R7, R11).
    pub copies_explained: u64,
    pub copies_unexplained: u64,
    /// Redeliveries of an acked copy inside a kill's window (R3).
    pub acked_again_explained: u64,
    pub late_answers: u64,
    /// Redeliveries of a copy that was not acked (R1, R2, R3).
    pub redelivered: u64,
}

/// The payload of message `id`: 24 bytes that name it, then bytes derived from the id.
pub fn payload(id: u64, bytes: usize) -> Vec<u8> {
    let mut data = format!("{id:016x}:{bytes:06x}:").into_bytes();
    let mut random = Random::new(id);
    while data.len() < bytes {
        data.push(b'a' + (random.draw() % 26) as u8);
    }
    data
}

/// Reads the id back and checks every byte.
pub fn check_payload(data: &[u8]) -> Result<u64, String> {
    let head = data.get(..24).and_then(|h| std::str::from_utf8(h).ok()).ok_or("payload shorter than its head")?;
    let id = u64::from_str_radix(&head[..16], 16).map_err(|e| format!("payload head {head:?}: {e}"))?;
    let bytes = usize::from_str_radix(&head[17..23], 16).map_err(|e| format!("payload head {head:?}: {e}"))?;
    if payload(id, bytes) != data {
        return Err(format!("message {id:x}: payload of {} bytes differs from what was produced", data.len()));
    }
    Ok(id)
}

impl Ledger {
    pub fn produced(&mut self, id: u64, outcome: Outcome, round: u32) {
        self.produces.entry(id).and_modify(|p| p.outcome = outcome).or_insert(Produce {
            outcome,
            round,
            at: Instant::now(),
            copies: Vec::new(),
        });
    }

    /// Nodes were paused, cut off, slowed or stopped: a commit may have been stored without its caller knowing (R4 to
    /// R12), so that another copy may follow.
    pub fn disturbed(&mut self, from: Instant, until: Instant) {
        self.disturbances.push((from, until));
    }

    /// A node was stopped by request, at the latest now.
    pub fn stopped(&mut self, at: Instant) {
        self.stops.push(at);
    }

    /// The broker was killed at `at`. At `asked`, not long before, its oldest unwritten ack was `unwritten` old.
    pub fn killed(&mut self, at: Instant, asked: Instant, unwritten: Duration) {
        self.longest_unwritten = self.longest_unwritten.max(unwritten);
        self.kills.push(Kill { at, acks_before: unwritten + at.duration_since(asked) });
    }

    /// The longest that any ack was seen waiting for the page cache.
    pub fn longest_unwritten(&self) -> Duration {
        self.longest_unwritten
    }

    /// A lease was given back by the client: the copy may come again at once.
    pub fn released(&mut self, place: (u32, u64), at: Instant) {
        self.released.insert(place, at);
    }

    /// A delivery that was asked for at `asked` and arrived at `arrived`.
    pub fn delivered(
        &mut self,
        data: &[u8],
        place: (u32, u64),
        asked: Instant,
        arrived: Instant,
        round: u32,
        visibility: Duration,
    ) {
        let id = match check_payload(data) {
            Ok(id) => id,
            Err(error) => return self.violations.push(format!("p{} @{}: {error}", place.0, place.1)),
        };
        let ended_since =
            |since: Instant| self.kills.iter().map(|kill| &kill.at).chain(&self.stops).any(|ended| *ended >= since);
        let last_release = self.released.get(&place).copied();
        // The answer to a produce may still be on its way to us: it was sent before anything could be delivered.
        let produce = self.produces.entry(id).or_insert(Produce {
            outcome: Outcome::Unknown,
            round,
            at: arrived,
            copies: Vec::new(),
        });
        let Some(copy) = produce.copies.iter_mut().find(|copy| copy.place == place) else {
            produce.copies.push(Copy { place, deliveries: vec![(asked, arrived)], acked: None, round });
            return;
        };
        if let Some(acked) = copy.acked {
            // Leased before the ack, and so long on its way that the lease lapsed and somebody else's was acked.
            if asked <= acked && arrived.duration_since(asked) + Duration::from_millis(50) >= visibility {
                self.late_answers += 1;
                return;
            }
            // An answer that was on its way when the process died arrives after the kill. Several nodes may be killed within
            // milliseconds, and the first one need not be the copy's owner.
            let mut kills = self.kills.iter().filter(|kill| kill.at <= arrived && acked <= kill.at + ANSWER_IN_FLIGHT);
            let kill = kills.clone().next();
            if kills.any(|kill| acked + kill.acks_before >= kill.at) {
                copy.acked = None;
                self.acked_again += 1;
            } else {
                let when = kill.map_or("with no kill since".to_owned(), |kill| {
                    let (before, allowed) = (kill.at.saturating_duration_since(acked), kill.acks_before);
                    format!("which came {before:?} before the next kill; {allowed:?} are allowed")
                });
                self.violations.push(format!(
                    "message {id:x} p{} @{}: delivered again after its confirmed ack, {when}",
                    place.0, place.1
                ));
            }
        } else if let Some((last_asked, last_arrived)) = copy.deliveries.last() {
            // An answer may lie in the socket while its broker is killed, or its lease lapses: what counts is when
            // the lease can have begun at the earliest.
            let lapsed = arrived.duration_since(*last_asked) + Duration::from_millis(50) >= visibility;
            let given_back = last_release.is_some_and(|released| released >= *last_arrived);
            if !lapsed && !given_back && !ended_since(*last_asked) && asked > *last_arrived {
                let ago = |then: Instant| arrived.saturating_duration_since(then);
                let unix = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64();
                self.violations.push(format!(
                    "message {id:x} p{} @{}: leased twice at once: asked for {:?} ago and delivered {:?} ago, asked for \
                     again {:?} ago, at unix time {unix:.3}",
                    place.0,
                    place.1,
                    ago(*last_asked),
                    ago(*last_arrived),
                    ago(asked)
                ));
            }
        }
        copy.deliveries.push((asked, arrived));
    }

    pub fn acked(&mut self, data: &[u8], place: (u32, u64), at: Instant) {
        let Ok(id) = check_payload(data) else { return };
        if let Some(copy) =
            self.produces.get_mut(&id).and_then(|p| p.copies.iter_mut().find(|copy| copy.place == place))
        {
            copy.acked = Some(at);
        }
    }

    /// Number of messages that were accepted and have not come back yet.
    pub fn missing_count(&self) -> usize {
        self.produces.values().filter(|p| p.outcome == Outcome::Accepted && p.copies.is_empty()).count()
    }

    /// Judges the run; findings are appended to `violations`. To be called once everything is at rest.
    pub fn judge(&mut self) -> Verdict {
        let mut verdict =
            Verdict { acked_again_explained: self.acked_again, late_answers: self.late_answers, ..Verdict::default() };
        for (id, produce) in &self.produces {
            match produce.outcome {
                Outcome::Accepted => verdict.accepted += 1,
                Outcome::Refused => verdict.refused += 1,
                Outcome::Unknown => verdict.unknown += 1,
            }
            if produce.outcome == Outcome::Accepted && produce.copies.is_empty() {
                verdict.lost += 1;
                self.violations
                    .push(format!("message {id:x} (round {}): answered 202 and never delivered", produce.round));
            }
            if produce.outcome == Outcome::Refused && !produce.copies.is_empty() {
                self.violations.push(format!("message {id:x}: refused with 429 or 503, and delivered"));
            }
            for copy in &produce.copies {
                verdict.delivered += copy.deliveries.len() as u64;
                verdict.redelivered += copy.deliveries.len() as u64 - 1;
                verdict.acked += u64::from(copy.acked.is_some());
            }
            for copy in produce.copies.iter().skip(1) {
                // Every round ends with a kill: a second copy needs one between the accept and its appearance, or a
                // disturbance.
                let seen = copy.deliveries.first().map_or(produce.at, |(_, arrived)| *arrived);
                let disturbed = self.disturbances.iter().any(|(from, until)| *from <= seen && produce.at <= *until);
                if copy.round > produce.round || disturbed {
                    verdict.copies_explained += 1;
                } else {
                    verdict.copies_unexplained += 1;
                    self.violations
                        .push(format!("message {id:x}: stored twice in round {} with no kill in between", copy.round));
                }
            }
        }
        verdict
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VISIBILITY: Duration = Duration::from_secs(5);

    fn at(base: Instant, ms: u64) -> Instant {
        base + Duration::from_millis(ms)
    }

    #[test]
    fn a_lost_202_is_found() {
        let mut ledger = Ledger::default();
        ledger.produced(1, Outcome::Accepted, 0);
        ledger.produced(2, Outcome::Unknown, 0);
        assert_eq!((ledger.judge().lost, ledger.violations.len()), (1, 1));
    }

    #[test]
    fn a_wrong_byte_is_found() {
        let mut data = payload(7, 300);
        assert_eq!(check_payload(&data), Ok(7));
        data[200] ^= 1;
        assert!(check_payload(&data).is_err());
    }

    #[test]
    fn d5_an_acked_copy_may_come_again_only_around_a_kill() {
        let (base, data) = (Instant::now(), payload(1, 100));
        for (kill_ms, violations) in [(None, 1), (Some(1_100), 0), (Some(1_140), 0), (Some(1_160), 1), (Some(3_000), 1)]
        {
            let mut ledger = Ledger::default();
            ledger.produced(1, Outcome::Accepted, 0);
            ledger.delivered(&data, (0, 0), at(base, 900), at(base, 900), 0, VISIBILITY);
            ledger.acked(&data, (0, 0), at(base, 1_000));
            if let Some(ms) = kill_ms {
                ledger.killed(at(base, ms), at(base, ms - 50), Duration::from_millis(100));
            }
            ledger.delivered(&data, (0, 0), at(base, 9_000), at(base, 9_000), 1, VISIBILITY);
            assert_eq!(ledger.violations.len(), violations, "kill at {kill_ms:?}");
        }
    }

    #[test]
    fn d5_of_nodes_killed_one_after_the_other_each_has_acks_of_its_own() {
        for (second_unwritten_ms, violations) in [(120, 0), (90, 1)] {
            let (base, data) = (Instant::now(), payload(1, 100));
            let mut ledger = Ledger::default();
            ledger.produced(1, Outcome::Accepted, 0);
            ledger.delivered(&data, (0, 0), at(base, 900), at(base, 900), 0, VISIBILITY);
            ledger.acked(&data, (0, 0), at(base, 1_000));
            ledger.killed(at(base, 1_060), at(base, 1_060), Duration::from_millis(45));
            ledger.killed(at(base, 1_110), at(base, 1_110), Duration::from_millis(second_unwritten_ms));
            ledger.delivered(&data, (0, 0), at(base, 3_000), at(base, 3_000), 1, VISIBILITY);
            assert_eq!(ledger.violations.len(), violations, "{second_unwritten_ms}");
        }
    }

    #[test]
    fn an_answer_that_was_longer_on_its_way_than_its_lease_is_no_fault() {
        for (arrived_ms, violations) in [(6_200, 0), (4_000, 1)] {
            let (base, data) = (Instant::now(), payload(1, 100));
            let mut ledger = Ledger::default();
            ledger.produced(1, Outcome::Accepted, 0);
            ledger.delivered(&data, (0, 0), at(base, 5_100), at(base, 5_200), 0, VISIBILITY);
            ledger.acked(&data, (0, 0), at(base, 5_300));
            // Leased first.
            ledger.delivered(&data, (0, 0), base, at(base, arrived_ms), 0, VISIBILITY);
            assert_eq!(ledger.violations.len(), violations, "{arrived_ms}");
        }
    }

    #[test]
    fn d3_two_leases_at_once_are_found() {
        let (base, data) = (Instant::now(), payload(1, 100));
        let mut ledger = Ledger::default();
        ledger.produced(1, Outcome::Accepted, 0);
        ledger.delivered(&data, (0, 0), base, base, 0, VISIBILITY);
        ledger.delivered(&data, (0, 0), at(base, 100), at(base, 101), 0, VISIBILITY);
        assert_eq!(ledger.violations.len(), 1);
    }

    #[test]
    fn d18_a_stopped_node_ends_leases_and_takes_no_ack_back() {
        let (base, data) = (Instant::now(), payload(1, 100));
        for (acked, violations) in [(false, 0), (true, 1)] {
            let mut ledger = Ledger::default();
            ledger.produced(1, Outcome::Accepted, 0);
            ledger.delivered(&data, (0, 0), base, base, 0, VISIBILITY);
            if acked {
                ledger.acked(&data, (0, 0), at(base, 10));
            }
            ledger.stopped(at(base, 50));
            ledger.delivered(&data, (0, 0), at(base, 100), at(base, 101), 0, VISIBILITY);
            assert_eq!(ledger.violations.len(), violations);
        }
    }

    #[test]
    fn a_second_copy_needs_a_kill_in_between() {
        let (base, data) = (Instant::now(), payload(1, 100));
        for (round, explained) in [(0, 0), (1, 1)] {
            let mut ledger = Ledger::default();
            ledger.produced(1, Outcome::Accepted, 0);
            ledger.delivered(&data, (0, 0), base, base, 0, VISIBILITY);
            ledger.delivered(&data, (1, 5), base, base, round, VISIBILITY);
            assert_eq!(ledger.judge().copies_explained, explained);
        }
    }

    #[test]
    fn r12_a_second_copy_after_a_disturbance_is_explained() {
        let (base, data) = (Instant::now(), payload(1, 100));
        for (span, explained) in [((0, 5_000), 1), ((900_000, 901_000), 0)] {
            let mut ledger = Ledger::default();
            ledger.produced(1, Outcome::Accepted, 0);
            ledger.disturbed(at(base, span.0), at(base, span.1));
            ledger.delivered(&data, (0, 0), at(base, 100), at(base, 100), 0, VISIBILITY);
            ledger.delivered(&data, (1, 5), at(base, 200), at(base, 200), 0, VISIBILITY);
            assert_eq!(ledger.judge().copies_explained, explained);
        }
    }

    #[test]
    fn d13_a_refused_message_must_not_be_delivered() {
        let (base, data) = (Instant::now(), payload(1, 100));
        let mut ledger = Ledger::default();
        ledger.produced(1, Outcome::Refused, 0);
        ledger.delivered(&data, (0, 0), base, base, 0, VISIBILITY);
        ledger.judge();
        assert_eq!(ledger.violations.len(), 1);
    }
}
