//! What the measurements of the broker's parts (`ring`, `wal`, `log`, `recover`) share: pinned threads with the product's
//! own runtime, disks that stand in for a real one, a place for files.

pub mod cores;
pub mod disks;

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::run::Failure;

/// Nanoseconds since the first call, on one clock for all cores.
pub fn nanos() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// The value of a flag that means seconds.
pub fn seconds(flag: &str, value: f64) -> Result<Duration, Failure> {
    Duration::try_from_secs_f64(value)
        .ok()
        .filter(|duration| !duration.is_zero() && *duration <= Duration::from_secs(3600))
        .ok_or_else(|| Failure(format!("{flag} {value} is no length of time: give seconds, such as 2 or 0.5")))
}

/// Refuses the value of a flag that is not in its range, naming both.
pub fn require<T: PartialOrd + Display>(flag: &str, value: T, range: RangeInclusive<T>) -> Result<(), Failure> {
    match range.contains(&value) {
        true => Ok(()),
        false => Err(Failure(format!("{flag} {value}: give {} to {}", range.start(), range.end()))),
    }
}

/// The value of a flag that is a list of counts, such as `1,8,64`.
pub fn counts(flag: &str, text: &str, max: usize) -> Result<Vec<usize>, Failure> {
    let count = |part: &str| part.trim().parse::<usize>().ok().filter(|count| (1..=max).contains(count));
    let counts: Option<Vec<usize>> = text.split(',').map(count).collect();
    counts.ok_or_else(|| Failure(format!("{flag} {text:?} is no list of numbers from 1 to {max}: write 1,8,64")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_that_makes_no_sense_is_refused_with_a_sentence() {
        for wrong in ["", "0", "1,,2", "x", "1,9"] {
            let Failure(text) = counts("--callers", wrong, 8).expect_err(wrong);
            assert!(text.contains("--callers") && text.contains("1 to 8"), "{text}");
        }
        assert_eq!(counts("--callers", "1, 8", 8).expect("a list"), [1, 8]);
        for wrong in [0.0, -1.0, f64::NAN, 1e9] {
            assert!(seconds("--seconds", wrong).is_err(), "{wrong}");
        }
    }
}
