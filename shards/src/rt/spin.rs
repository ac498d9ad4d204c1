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
/// slept through before the next try. What else wakes the thread meanwhile, such as a request, says nothing of the drive.
#[derive(Default)]
pub(crate) struct Patience {
    to_skip: Cell<u32>,
    skipped_last: Cell<u32>,
    /// Operations of the drive that had ended when it was last looked at.
    ended: Cell<u64>,
    /// Time spun since then.
    spun: Cell<Duration>,
    /// The drive has taken longer than the limit since then.
    in_vain: Cell<bool>,
}

impl Patience {
    /// Whether this wait may spin; `ended` counts the drive's operations that have ended.
    pub fn lasts(&self, ended: u64) -> bool {
        if self.ended.replace(ended) != ended {
            if !self.spun.take().is_zero() && !self.in_vain.get() {
                self.skipped_last.set(0);
            }
            self.in_vain.set(false);
        }
        let left = self.to_skip.get();
        self.to_skip.set(left.saturating_sub(1));
        left == 0
    }

    /// A wait was spun through for so long.
    pub fn spun(&self, time: Duration, limit: Duration) {
        self.spun.set(self.spun.get() + time);
        if self.spun.get() < limit {
            return;
        }
        let skip = (self.skipped_last.get() * 2 + 1).min(SKIPPED_MAX);
        self.skipped_last.set(skip);
        self.to_skip.set(skip);
        self.in_vain.set(true);
        self.spun.set(Duration::ZERO);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_micros(200);

    /// Waits that spin, of 10,000, while the drive ends an operation every `waits` waits and each spin ends after `spin`.
    fn spins(patience: &Patience, ended: &mut u64, waits: u64, spin: Duration) -> u64 {
        let mut spins = 0;
        for wait in 0..10_000 {
            *ended += u64::from(wait % waits == 0);
            if patience.lasts(*ended) {
                spins += 1;
                patience.spun(spin, LIMIT);
            }
        }
        spins
    }

    #[test]
    fn a_drive_slower_than_the_spin_is_slept_for_also_when_requests_end_the_spins() {
        let (patience, mut ended) = (Patience::default(), 0);
        let fast = spins(&patience, &mut ended, 2, Duration::from_micros(60));
        assert_eq!(fast, 10_000);
        let alone = spins(&patience, &mut ended, 1, LIMIT);
        assert!((100..400).contains(&alone), "one wait in 64 still tries: {alone}");
        // Each wait ends with a request after 20 us, and the drive needs a hundred of them.
        let busy = spins(&patience, &mut ended, 100, Duration::from_micros(20));
        assert!(busy < 3_000, "{busy}");
        let fast = spins(&patience, &mut ended, 2, Duration::from_micros(60));
        assert!(fast > 9_900, "the first answers in time end it: {fast}");
    }

    #[test]
    fn a_spin_of_no_time_is_none() {
        assert_eq!(Spin::always(Duration::ZERO), Spin::Never);
        assert_eq!(Spin::always(DRIVE_SPIN), Spin::Always(DRIVE_SPIN));
    }
}
