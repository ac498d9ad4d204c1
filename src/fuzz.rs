//! Entry points for fuzzers (`fuzz/`) and for the replay of their corpora on stable: every decoder of bytes that come
//! from a socket, a file or a person. Each takes any bytes, must not panic, and checks what has to hold of the outcome.

pub use narad_shards::fuzz::Target;

pub const TARGETS: &[Target] = &[
    ("http_batch", crate::http::fuzz::batch),
    ("http_bodies", crate::http::fuzz::bodies),
    ("http_content_encoding", crate::http::fuzz::content_encoding),
    ("http_duration", crate::http::fuzz::duration),
    ("http_message", crate::http::fuzz::message),
    ("http_query", crate::http::fuzz::query),
    ("http_receipt_handle", crate::http::fuzz::receipt_handle),
    ("config_file", crate::config::fuzz::file),
    ("config_values", crate::config::fuzz::values),
    ("control_join_frame", crate::control::fuzz::join_frame),
    ("control_log_entry", crate::control::fuzz::log_entry),
    ("control_topic_row", crate::control::fuzz::topic_row),
    ("node_cgroup", crate::node::fuzz::cgroup),
    ("node_ids", crate::node::fuzz::ids),
    ("peer_frames", crate::peer::fuzz::frames),
    ("peer_hello", crate::peer::fuzz::hello),
    ("cli_answer", crate::cli::fuzz::answer),
    ("cli_message", crate::cli::fuzz::message),
];

/// Finds a target by its name, in this crate or in the data plane's.
pub fn target(name: &str) -> fn(&[u8]) {
    let all = TARGETS.iter().chain(narad_shards::fuzz::TARGETS);
    all.copied().find(|(known, _)| *known == name).map(|(_, run)| run).unwrap_or_else(|| panic!("no target {name}"))
}
