//! What an event loop counts of itself.

/// Of one event loop, since it started.
#[derive(Clone, Debug, Default)]
pub struct RuntimeMetrics {
    pub turns: u64,
    pub enters: u64,
    pub submissions: u64,
    pub completions: u64,
    pub cq_overflow: u64,
    pub busy_nanos: u64,
    /// The rest of its life: asleep, or polling.
    pub idle_nanos: u64,
    /// Of that, polling.
    pub poll_nanos: u64,
    pub ring_depth: u64,
    pub enter_nanos: u64,
    pub connections: u64,
}
