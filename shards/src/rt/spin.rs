//! When a shard's thread looks for work without sleeping, and when it gives that up.
//!
//! To sleep and be woken costs more than a fast drive's whole sync: 30 to 60 µs on a virtual machine, of a durable write
//! of 100. Nobody gains from a thread that sleeps through the end of a sync which a client waits for.

use std::cell::Cell;
use std::time::Duration;

/// How long a drive's answer is waited for without sleeping, unless an operator says otherwise: twice what a drive with
/// a protected or virtual cache needs for a durable write. A slower one is left alone, see [`Patience`].
pub const DRIVE_SPIN: Duration = Duration::from_micros(200);

/// Whether the pump looks at the completion queue before it blocks, and for how long. Time spent so is not "busy".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spin {
    /// Blocks at once.
    Never,
    /// While an operation on a file is under way. An idle shard uses no CPU.
    ForDrive(Duration),
    /// Before each time it blocks, to find the next request as well.
    Always(Duration),
}

impl Spin {
    /// That long before each block; zero is never.
    pub fn always(limit: Duration) -> Spin {
        match limit.is_zero() {
            true => Spin::Never,
            false => Spin::Always(limit),
        }
    }
}

/// Most waits that are slept through after one in vain.
const SKIPPED_MAX: u32 = 63;

/// Keeps a thread from spinning for a drive that takes longer than that: each time in vain doubles the waits that are
/// slept through before the next try.
#[derive(Default)]
pub(crate) struct Patience {
    to_skip: Cell<u32>,
    skipped_last: Cell<u32>,
}

impl Patience {
    /// Whether this wait may spin.
    pub fn lasts(&self) -> bool {
        let left = self.to_skip.get();
        self.to_skip.set(left.saturating_sub(1));
        left == 0
    }

    pub fn rewarded(&self) {
        self.skipped_last.set(0);
    }

    pub fn disappointed(&self) {
        let skip = (self.skipped_last.get() * 2 + 1).min(SKIPPED_MAX);
        self.skipped_last.set(skip);
        self.to_skip.set(skip);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drive_slower_than_the_spin_is_slept_for() {
        let patience = Patience::default();
        let mut spins = 0;
        for _ in 0..10_000 {
            if patience.lasts() {
                spins += 1;
                patience.disappointed();
            }
        }
        assert!((100..200).contains(&spins), "one wait in 64 still tries: {spins}");
        // The first answer in time ends it.
        while !patience.lasts() {}
        patience.rewarded();
        assert!((0..100).all(|_| patience.lasts()));
        patience.disappointed();
        assert!(!patience.lasts() && patience.lasts(), "one in vain costs one wait");
    }

    #[test]
    fn a_spin_of_no_time_is_none() {
        assert_eq!(Spin::always(Duration::ZERO), Spin::Never);
        assert_eq!(Spin::always(DRIVE_SPIN), Spin::Always(DRIVE_SPIN));
    }
}
