//! The numbers of the dispatcher: sizes of batches and windows, slots, times.

use std::time::Duration;

/// A smaller batch lingers under load; the window aims for this many per destination.
pub const BATCH_TARGET: usize = 64;
/// A batch of fewer encoded bytes lingers, too. Each commit pads its last block and writes the block again that it begins
/// in, 4 KiB together: a fifth of 64 records of 256 bytes, but a sixteenth of this.
pub const BATCH_BYTES_TARGET: usize = 64 << 10;
/// Records held in memory: the window grows with the number of destinations, within these bounds.
pub const WINDOW_RECORDS_MIN: usize = 4096;
pub const WINDOW_RECORDS_MAX: usize = 65_536;
/// A destination's queue may always hold this many, however small the window.
pub const QUEUE_RECORDS_MIN: usize = 4096;
/// How many windows past the checkpoint records are read.
pub const LOOKAHEAD_WINDOWS: usize = 16;
/// Commits in flight, hung ones aside.
pub const COMMITS_MAX: usize = 16;
/// How many of those may be probes: half. Probes go first, and one that nobody answers keeps its slot for [`HUNG_AFTER`].
/// Without a bound, 16 destinations that hang would take every slot, second after second, from those that are well. The
/// other 8 slots carry thousands of commits a second, since one to a healthy destination takes milliseconds. The price:
/// when n destinations hang, 8 are asked a second, and it takes up to n / 8 seconds to find that one is well again. A
/// destination that fails at once gives its slot back at once.
pub const PROBES_MAX: usize = 8;
/// Encoded bytes of one commit, unless it is a single record (E16, lesson N24).
pub const COMMIT_BYTES_MAX: usize = 8 << 20;
/// Longest that a small batch waits for more.
pub const LINGER_MAX: Duration = Duration::from_millis(50);
/// A commit that is not answered for so long is hung: its slot is given to another.
pub const HUNG_AFTER: Duration = Duration::from_secs(1);
/// How long an owner may take for a commit, and for a probe of one that failed.
pub const COMMIT_BUDGET: Duration = Duration::from_secs(30);
pub const PROBE_BUDGET: Duration = Duration::from_secs(5);
/// From one probe of a failing destination to the next.
pub const RETRY_AFTER: Duration = Duration::from_secs(1);
/// From the start of the first commit that failed until the records go to a sibling partition.
pub const REROUTE_AFTER: Duration = Duration::from_secs(3);
/// At least so often, records that were left in the WAL are read again.
pub const RESCAN_EVERY: Duration = Duration::from_secs(1);
/// How often an owner that does not resolve is looked up.
pub const LOOKUP_EVERY: Duration = Duration::from_millis(10);
/// How long "not confirmed as deleted" is believed.
pub const UNCONFIRMED_FOR: Duration = Duration::from_secs(1);
/// Rest after the WAL could not be read.
pub const BACKOFF: Duration = Duration::from_secs(1);
/// One read's bounds: what can be placed in well under a millisecond.
pub(super) const READ_RECORDS_MAX: usize = 2048;
pub(super) const READ_BYTES_MAX: usize = 4 << 20;
/// Counted for each record on top of key and payload: what the owner's frame and the wire add, rounded up.
pub(super) const RECORD_OVERHEAD: usize = 64;

/// What a deployment may choose.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Encoded bytes of records held in memory (E20). A destination's queue gets a quarter of it. Hung and late
    /// commits may borrow as much again before they count against it.
    pub held_bytes_max: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { held_bytes_max: 64 << 20 }
    }
}
