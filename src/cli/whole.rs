//! Whole numbers on the command line: a bad one is told what would have been a good one.

use std::str::FromStr;

/// From `MIN` to `MAX`. The parser of the command line adds the flag and what was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Whole<const MIN: u64, const MAX: u64>(pub u64);

/// Where only the type bounds it.
pub type Any = Whole<0, { u64::MAX }>;
pub type Positive = Whole<1, { u64::MAX }>;
/// Partition directories are numbered with five digits.
pub type Partitions = Whole<0, 99_999>;
pub type Partition = Whole<0, 99_998>;
/// What the API takes for a topic's bounds.
pub type Count32 = Whole<0, { u32::MAX as u64 }>;

impl<const MIN: u64, const MAX: u64> FromStr for Whole<MIN, MAX> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.parse().ok().filter(|number| (MIN..=MAX).contains(number));
        number.map(Whole).ok_or_else(|| format!("is not a whole number from {MIN} to {MAX}"))
    }
}
