//! What a group of connections did, as numbers.

use std::collections::BTreeMap;
use std::time::Duration;

use hdrhistogram::Histogram;

use super::Nanos;
use crate::run::histogram;

/// Seconds that `--messages` runs are cut into at most: the rest of a longer run falls into the last one.
const SECONDS_MAX: usize = 24 * 3600;

/// End of a measured time that lasts until everything is done.
pub const UNBOUNDED: Nanos = i64::MAX / 2;

/// Counts of the measured time, unless they say otherwise.
#[derive(Clone, Debug)]
pub struct Tally {
    pub name: String,
    /// Of operations that were due in the measured time and succeeded: from the intended start to the answer. In open
    /// loop also those that never ended, with the time they had waited when the run gave up on them.
    pub latency: Histogram<u64>,
    /// Operations that succeeded.
    pub operations: u64,
    /// Messages of operations that ended in the measured time.
    pub messages: u64,
    /// The same, by whole second.
    pub messages_by_second: Vec<u64>,
    /// Messages of operations that ended before it: the warm-up.
    pub messages_before: u64,
    /// Messages of operations that ended later: a drain, or the last ones in flight.
    pub messages_after: u64,
    /// Operations that found nothing, warm-up included.
    pub empty: u64,
    /// What the server refused, by kind, warm-up included: nobody should have to wonder.
    pub refused: BTreeMap<String, u64>,
    /// Connections that were lost, or could not be made again.
    pub lost: u64,
    /// Operations that had no answer when the run gave up on them.
    pub unanswered: u64,
    /// Open loop: operations that were due and never sent.
    pub unsent: u64,
    /// Answers that asked for a pause.
    pub pauses: u64,
    /// The first thing that went wrong, in words.
    pub first_error: Option<String>,
    /// When the last operation succeeded.
    pub last: Nanos,
    /// CPU time of the load's own threads in the measured time.
    pub cpu: Duration,
}

impl Tally {
    pub fn new(name: &str) -> Tally {
        Tally {
            name: name.to_owned(),
            latency: histogram(),
            operations: 0,
            messages: 0,
            messages_by_second: Vec::new(),
            messages_before: 0,
            messages_after: 0,
            empty: 0,
            refused: BTreeMap::new(),
            lost: 0,
            unanswered: 0,
            unsent: 0,
            pauses: 0,
            first_error: None,
            last: 0,
            cpu: Duration::ZERO,
        }
    }

    /// An operation moved `messages`. It should have started at `intended` and ended at `now`; measured is what lies in
    /// `0..end`.
    pub fn succeeded(&mut self, intended: Nanos, now: Nanos, end: Nanos, messages: u32) {
        let messages = u64::from(messages);
        if (0..end).contains(&intended) {
            self.latency.saturating_record((now - intended).max(1) as u64);
            self.operations += 1;
        }
        if now >= end {
            self.messages_after += messages;
        } else if now >= 0 {
            self.messages += messages;
            let second = ((now / 1_000_000_000) as usize).min(SECONDS_MAX);
            if self.messages_by_second.len() <= second {
                self.messages_by_second.resize(second + 1, 0);
            }
            self.messages_by_second[second] += messages;
        } else {
            self.messages_before += messages;
        }
        self.last = self.last.max(now);
    }

    /// Only the first text is kept.
    pub fn error(&mut self, text: impl FnOnce() -> String) {
        if self.first_error.is_none() {
            self.first_error = Some(text());
        }
    }

    /// Adds what another thread's part of the same group did.
    pub fn merge(&mut self, other: &Tally) {
        self.latency += &other.latency;
        self.operations += other.operations;
        self.messages += other.messages;
        if self.messages_by_second.len() < other.messages_by_second.len() {
            self.messages_by_second.resize(other.messages_by_second.len(), 0);
        }
        for (sum, more) in self.messages_by_second.iter_mut().zip(&other.messages_by_second) {
            *sum += more;
        }
        self.messages_before += other.messages_before;
        self.messages_after += other.messages_after;
        self.empty += other.empty;
        for (kind, count) in &other.refused {
            *self.refused.entry(kind.clone()).or_default() += count;
        }
        self.lost += other.lost;
        self.unanswered += other.unanswered;
        self.unsent += other.unsent;
        self.pauses += other.pauses;
        if self.first_error.is_none() {
            self.first_error.clone_from(&other.first_error);
        }
        self.last = self.last.max(other.last);
        self.cpu += other.cpu;
    }

    /// Messages of all operations that succeeded, whenever they ended.
    pub fn messages_in_all(&self) -> u64 {
        self.messages_before + self.messages + self.messages_after
    }

    pub fn refused_total(&self) -> u64 {
        self.refused.values().sum()
    }

    /// The measured time in nanoseconds: what was asked for, or until the last message where a number was asked for.
    pub fn measured(&self, end: Nanos) -> Nanos {
        if end < UNBOUNDED { end } else { self.last }.max(1)
    }

    /// Messages per second of the measured time.
    pub fn rate_per_s(&self, end: Nanos) -> f64 {
        self.messages as f64 * 1e9 / self.measured(end) as f64
    }

    /// Messages of each whole second.
    pub fn rates(&self, end: Nanos) -> Vec<f64> {
        let seconds = (self.measured(end) / 1_000_000_000) as usize;
        let counts = self.messages_by_second.iter().copied().chain(std::iter::repeat(0));
        counts.take(seconds.min(SECONDS_MAX)).map(|count| count as f64).collect()
    }

    /// One sentence on everything that went wrong, if anything did.
    pub fn troubles(&self) -> Option<String> {
        let mut parts: Vec<String> =
            self.refused.iter().map(|(kind, count)| format!("{count} answered {kind}")).collect();
        for (count, what) in [
            (self.lost, "connections lost"),
            (self.unanswered, "operations without an answer"),
            (self.unsent, "operations due and never sent"),
            (self.pauses, "answers that asked to wait (Retry-After)"),
        ] {
            if count > 0 {
                parts.push(format!("{count} {what}"));
            }
        }
        if parts.is_empty() {
            return None;
        }
        let first = self.first_error.as_ref().map(|text| format!("; the first: {text}")).unwrap_or_default();
        Some(format!("{}: {}{first}", self.name, parts.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_warm_up_moved_is_no_part_of_the_rate_but_of_all() {
        let mut tally = Tally::new("t");
        for (now, messages) in [(-1, 1), (0, 10), (99, 100), (100, 1000)] {
            tally.succeeded(now, now, 100, messages);
        }
        assert_eq!((tally.messages_before, tally.messages, tally.messages_after), (1, 110, 1000));
        let mut sum = tally.clone();
        sum.merge(&tally);
        assert_eq!(sum.messages_in_all(), 2 * 1111);
    }
}
