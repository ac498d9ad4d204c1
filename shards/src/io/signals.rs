//! Signals to stop: which of them means what, and the handler of client commands. Nothing here runs on a shard.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::Relaxed};

/// `timeout(1)` and some shells send one signal to the process and to its group: the same one twice, at once.
const ONE_SIGNAL_MS: u64 = 1000;

/// What to make of one more signal to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// The first.
    Stop,
    /// The first one once more.
    Again,
    /// Somebody does not want to wait.
    AtOnce,
}

/// The signals to stop that a process has got. May be told of them in a signal handler.
#[derive(Debug, Default)]
pub struct StopSignals {
    /// The number of the first; 0 before.
    first: AtomicI32,
    first_at_ms: AtomicU64,
}

impl StopSignals {
    pub const fn new() -> StopSignals {
        StopSignals { first: AtomicI32::new(0), first_at_ms: AtomicU64::new(0) }
    }

    /// `now_ms` is of the monotonic clock.
    pub fn hear(&self, signal: i32, now_ms: u64) -> Heard {
        match self.first.load(Relaxed) {
            0 => {
                self.first_at_ms.store(now_ms, Relaxed);
                self.first.store(signal, Relaxed);
                Heard::Stop
            }
            first if first == signal && now_ms.saturating_sub(self.first_at_ms.load(Relaxed)) < ONE_SIGNAL_MS => {
                Heard::Again
            }
            _ => Heard::AtOnce,
        }
    }
}

/// Milliseconds of the monotonic clock. Safe in a signal handler.
pub fn now_ms() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a timespec of ours; clock_gettime is safe in a signal handler.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
static INTERRUPTS: StopSignals = StopSignals::new();

extern "C" fn note_interrupt(signal: libc::c_int) {
    match INTERRUPTS.hear(signal, now_ms()) {
        Heard::Stop => INTERRUPTED.store(true, Relaxed),
        Heard::Again => {}
        // SAFETY: both are safe in a signal handler; the signal is blocked here and ends the process when this returns.
        Heard::AtOnce => unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        },
    }
}

/// For client commands: from now on SIGINT and SIGTERM only set the returned flag and interrupt blocking calls; a
/// second one ends the process as usual, unless it is the first one once more within a second.
pub fn catch_interrupts() -> &'static AtomicBool {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: zeroed is a valid `sigaction` (empty mask); the handler uses atomics and what is safe
        // in a signal handler. Without SA_RESTART blocking reads return EINTR.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = note_interrupt as *const () as usize;
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
    &INTERRUPTED
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_signal_within_a_second_is_one_and_any_other_ends_at_once() {
        let (int, term) = (2, 15);
        let signals = StopSignals::new();
        let heard = [(term, 5_000), (term, 5_000), (term, 5_999), (term, 6_000), (term, 6_001)];
        let heard = heard.map(|(signal, ms)| signals.hear(signal, ms));
        assert_eq!(heard, [Heard::Stop, Heard::Again, Heard::Again, Heard::AtOnce, Heard::AtOnce]);
        let signals = StopSignals::new();
        assert_eq!([int, term].map(|signal| signals.hear(signal, 5_000)), [Heard::Stop, Heard::AtOnce]);
    }
}
