//! Limits of the API, and settings of one listener and of topics, validated before they get here.

use std::time::Duration;

/// Largest message, and largest JSON body of a management route, in bytes.
pub(crate) const MESSAGE_BYTES_MAX: usize = 1 << 20;
pub(crate) const JSON_BYTES_MAX: usize = 1 << 20;
/// Largest batch produce body, as sent and after decoding.
pub(crate) const BATCH_BYTES_MAX: usize = 16 << 20;
pub(crate) const BATCH_MESSAGES_MAX: usize = 1000;
/// A longer key could not have been sent singly either.
pub(crate) const BATCH_KEY_BYTES_MAX: usize = 64 << 10;
pub(crate) const ACK_BODY_BYTES_MAX: usize = 64 << 10;
pub(crate) const ACK_HANDLES_MAX: usize = 100;
pub(crate) const CONSUME_MAX: u32 = 100;
/// Keys plus payloads after which a batch consume takes no more (the record that crosses is kept).
pub(crate) const CONSUME_BYTES_MAX: usize = 4 << 20;
/// Encoded batch consume answer; what does not fit is handed back.
pub(crate) const CONSUME_REPLY_BYTES_MAX: usize = 8 << 20;
pub(crate) const LIST_LIMIT_DEFAULT: usize = 100;
pub(crate) const LIST_LIMIT_MAX: usize = 1000;
pub(crate) const PARTITIONS_MIN: u32 = 3;
pub(crate) const RETENTION_MS_MIN: u64 = 3_600_000;
pub(crate) const FANOUT_DELAY_MS_MAX: u64 = 31_536_000_000;

/// Which routes a listener serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Surface {
    /// The API port; `metrics: false` when `/metrics` has moved to a listener of its own.
    Api { metrics: bool },
    /// The metrics listener: `/metrics`, `/healthz`, `/readyz`, no credentials.
    Probes,
}

#[derive(Clone, Debug)]
pub struct HttpSettings {
    pub surface: Surface,
    /// The shard that serves, told to clients in `X-Narad-Shard` on data routes. `None` without one.
    pub shard: Option<u16>,
    /// At least 4096 (`http.max_header_bytes`).
    pub header_bytes_max: usize,
    /// From the first byte of a request to the end of its headers.
    pub header_timeout: Duration,
    /// From the first byte of a request to the end of its body.
    pub read_timeout: Duration,
    /// From the moment an answer is known until its last byte is with the kernel.
    pub write_timeout: Duration,
    /// From an answer, or the accept, to the first byte of the next request.
    pub idle_timeout: Duration,
    /// Longest `wait` of a consume.
    pub consume_wait_max: Duration,
    /// Per identity and node; 0 is no cap.
    pub consumes_in_flight_max: u32,
    pub produces_in_flight_max: u32,
}

impl Default for HttpSettings {
    fn default() -> HttpSettings {
        HttpSettings {
            surface: Surface::Api { metrics: true },
            shard: None,
            header_bytes_max: 65_536,
            header_timeout: Duration::from_secs(5),
            read_timeout: Duration::from_secs(10),
            write_timeout: Duration::from_secs(30),
            idle_timeout: Duration::from_secs(60),
            consume_wait_max: Duration::from_secs(10),
            consumes_in_flight_max: 1024,
            produces_in_flight_max: 0,
        }
    }
}

/// What a create fills in for fields that are absent or 0, and its bound.
#[derive(Clone, Debug)]
pub struct TopicDefaults {
    pub partitions: u32,
    pub partitions_max: u32,
    pub retention_ms: u64,
    pub visibility_timeout_ms: u64,
    pub max_in_flight_per_partition: u64,
    pub max_acked_ahead_per_partition: u64,
}

impl Default for TopicDefaults {
    fn default() -> TopicDefaults {
        TopicDefaults {
            partitions: 3,
            partitions_max: 108,
            retention_ms: 604_800_000,
            visibility_timeout_ms: 30_000,
            max_in_flight_per_partition: 1024,
            max_acked_ahead_per_partition: 1024,
        }
    }
}
