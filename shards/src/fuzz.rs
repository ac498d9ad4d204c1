//! Entry points for fuzzers (`fuzz/` beside this crate) and for the replay of their corpora on stable: every decoder of
//! bytes that come from a disk or from another node. Each takes any bytes, must not panic, and checks what has to hold of the outcome.
//! Most try the bytes as they are and once more with the checksums that belong to them.

/// Name of a fuzz target, which is that of its corpus, and what it runs.
pub type Target = (&'static str, fn(&[u8]));

pub const TARGETS: &[Target] = &[
    ("wal_segment", crate::wal::fuzz::segment),
    ("wal_record", crate::wal::fuzz::record),
    ("wal_checkpoint", crate::wal::fuzz::checkpoint),
    ("log_segment", crate::log::fuzz::segment),
    ("log_frame", crate::log::fuzz::frame),
    ("log_boundary", crate::log::fuzz::boundary),
    ("log_names", crate::log::fuzz::names),
    ("queue_positions", crate::queue::fuzz::positions),
    ("wire_frame", crate::wire::fuzz::frame),
];
