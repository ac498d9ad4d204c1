//! The table of settings: key in the file, variable, and where the value goes.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use super::cluster::{parse_dialled, parse_ids, parse_peers};
use super::value::Raw;
use super::{Codec, CompressionLevel, Config, LogFormat, LogLevel, Secret};

pub(super) struct Setting {
    /// `section.name`; every message names a setting by it.
    pub key: &'static str,
    pub environment: Option<&'static str>,
    pub apply: fn(&mut Config, Raw<'_>) -> Result<(), String>,
}

impl Setting {
    pub fn section(&self) -> &'static str {
        self.key.split_once('.').map_or("", |(section, _)| section)
    }

    /// The flag of `narad serve` that sets it, where there is one.
    pub fn flag(&self) -> String {
        let name = match self.key.split_once('.') {
            Some((section, name)) if section != "log" => name,
            _ => self.key,
        };
        format!("--{}", name.replace(['.', '_'], "-"))
    }

    pub fn is(&self, section: &str, name: &str) -> bool {
        self.key.split_once('.') == Some((section, name))
    }
}

/// Keys of `storage` that exist inside but that nobody may set: they are part of the durability promise.
pub(super) const INTERNAL_STORAGE_KEYS: [&str; 16] = [
    "fsync",
    "fsync_mode",
    "fsync_interval",
    "fsync_interval_ms",
    "sync_interval",
    "sync_interval_ms",
    "flush_interval",
    "flush_interval_ms",
    "flush_bytes",
    "segment_bytes",
    "segment_size",
    "segment_size_bytes",
    "max_segment_bytes",
    "index_interval_bytes",
    "block_bytes",
    "write_window_bytes",
];

const WAL_PREALLOC_REFUSED: &str =
    "false is refused: a WAL segment is always prepared ahead of use, since first writes into unprepared blocks wait for the file system's journal";

const fn setting(
    key: &'static str,
    environment: &'static str,
    apply: fn(&mut Config, Raw<'_>) -> Result<(), String>,
) -> Setting {
    Setting { key, environment: if environment.is_empty() { None } else { Some(environment) }, apply }
}

/// Assigns a parsed value to a field.
macro_rules! into {
    ($($field:ident).+, $kind:ident) => {
        |config, value| value.$kind().map(|value| config.$($field).+ = value)
    };
    ($($field:ident).+, some $kind:ident) => {
        |config, value| value.$kind().map(|value| config.$($field).+ = Some(value))
    };
    ($($field:ident).+, in $range:expr) => {
        |config, value| value.whole($range).map(|value| config.$($field).+ = value)
    };
    ($($field:ident).+, some in $range:expr) => {
        |config, value| value.whole($range).map(|value| config.$($field).+ = Some(value))
    };
    ($($field:ident).+, zero $zero:literal or $range:expr) => {
        |config, value| value.whole_or_zero($zero, $range).map(|value| config.$($field).+ = value)
    };
}

/// Bounds that a setting has by itself; those between settings are in `validate`.
const ANY: RangeInclusive<u64> = 0..=u64::MAX;
const FROM_ONE_U32: RangeInclusive<u64> = 1..=u32::MAX as u64;
const A_MINUTE_MS: RangeInclusive<u64> = 60_000..=u64::MAX;
const RETENTION_MS: RangeInclusive<u64> = 3_600_000..=u64::MAX;
const PARTITIONS: RangeInclusive<u64> = 3..=crate::control::PARTITIONS_MAX as u64;
const CPUS: RangeInclusive<u64> = 0..=65_535;

pub(super) const SETTINGS: &[Setting] = &[
    setting("http.addr", "NARAD_HTTP_ADDR", into!(http.addr, address)),
    setting("http.read_timeout", "NARAD_HTTP_READ_TIMEOUT", into!(http.read_timeout, duration)),
    setting("http.write_timeout", "NARAD_HTTP_WRITE_TIMEOUT", into!(http.write_timeout, duration)),
    setting("http.idle_timeout", "NARAD_HTTP_IDLE_TIMEOUT", into!(http.idle_timeout, duration)),
    setting("http.shutdown_grace", "NARAD_HTTP_SHUTDOWN_GRACE", into!(http.shutdown_grace, duration)),
    setting("http.max_consume_wait", "NARAD_HTTP_MAX_CONSUME_WAIT", into!(http.max_consume_wait, duration)),
    setting("http.max_header_bytes", "NARAD_HTTP_MAX_HEADER_BYTES", into!(http.max_header_bytes, in 4096..=u64::MAX)),
    setting("http.max_connections", "NARAD_HTTP_MAX_CONNECTIONS", into!(http.max_connections, in ANY)),
    setting(
        "http.max_consume_in_flight_per_identity",
        "NARAD_HTTP_MAX_CONSUME_IN_FLIGHT_PER_IDENTITY",
        into!(http.max_consume_in_flight_per_identity, in ANY),
    ),
    setting(
        "http.max_produce_in_flight_per_identity",
        "NARAD_HTTP_MAX_PRODUCE_IN_FLIGHT_PER_IDENTITY",
        into!(http.max_produce_in_flight_per_identity, in ANY),
    ),
    setting(
        "http.max_batch_body_bytes_in_flight",
        "NARAD_HTTP_MAX_BATCH_BODY_BYTES_IN_FLIGHT",
        into!(http.max_batch_body_bytes_in_flight, in ANY),
    ),
    setting("http.metrics_addr", "NARAD_HTTP_METRICS_ADDR", |config, value| {
        let text = value.text()?;
        config.http.metrics_addr = if text.is_empty() { None } else { Some(value.address()?) };
        Ok(())
    }),
    setting(
        "http.metrics_unauthenticated",
        "NARAD_HTTP_METRICS_UNAUTHENTICATED",
        into!(http.metrics_unauthenticated, boolean),
    ),
    setting("cluster.node_id", "NARAD_NODE_ID", into!(cluster.node_id, some text)),
    setting("cluster.addr", "NARAD_CLUSTER_ADDR", into!(cluster.addr, address)),
    setting("cluster.peers", "NARAD_CLUSTER_PEERS", |config, value| {
        config.cluster.peers = parse_peers(value)?;
        Ok(())
    }),
    setting("cluster.advertise_addr", "NARAD_CLUSTER_ADVERTISE_ADDR", |config, value| {
        let text = value.text()?;
        config.cluster.advertise_addr = if text.is_empty() { None } else { Some(parse_dialled(&text)?) };
        Ok(())
    }),
    setting("cluster.initial_members", "NARAD_CLUSTER_INITIAL_MEMBERS", |config, value| {
        config.cluster.initial_members = parse_ids(value)?;
        Ok(())
    }),
    setting(
        "cluster.shard_port_base",
        "NARAD_CLUSTER_SHARD_PORT_BASE",
        into!(cluster.shard_port_base, some in 1..=65_535),
    ),
    setting(
        "cluster.raft_snapshot_threshold",
        "NARAD_CLUSTER_RAFT_SNAPSHOT_THRESHOLD",
        into!(cluster.raft_snapshot_threshold, in 1..=u64::MAX),
    ),
    setting("cluster.raft_snapshot_interval", "NARAD_CLUSTER_RAFT_SNAPSHOT_INTERVAL", |config, value| {
        let interval = value.duration()?;
        if interval < Duration::from_millis(5) {
            return Err(format!("{value} is less than 5ms"));
        }
        config.cluster.raft_snapshot_interval = interval;
        Ok(())
    }),
    setting(
        "cluster.raft_trailing_logs",
        "NARAD_CLUSTER_RAFT_TRAILING_LOGS",
        into!(cluster.raft_trailing_logs, in ANY),
    ),
    // Only the environment has it: files and process lists are read by too many.
    setting("NARAD_CLUSTER_SECRET", "NARAD_CLUSTER_SECRET", |config, value| {
        config.cluster.secret = Some(Secret::parse(&value.text()?)?);
        Ok(())
    }),
    setting("security.cluster_tls_cert_file", "NARAD_CLUSTER_TLS_CERT_FILE", into!(cluster.tls_cert_file, some path)),
    setting("security.cluster_tls_key_file", "NARAD_CLUSTER_TLS_KEY_FILE", into!(cluster.tls_key_file, some path)),
    setting("security.cluster_tls_ca_file", "NARAD_CLUSTER_TLS_CA_FILE", into!(cluster.tls_ca_file, some path)),
    setting(
        "security.allow_plaintext_raft",
        "NARAD_SECURITY_ALLOW_PLAINTEXT_RAFT",
        into!(cluster.allow_plaintext_raft, boolean),
    ),
    setting(
        "security.allow_insecure_cluster",
        "NARAD_SECURITY_ALLOW_INSECURE_CLUSTER",
        into!(cluster.allow_insecure_cluster, boolean),
    ),
    setting("security.allow_legacy_cluster_auth", "NARAD_SECURITY_ALLOW_LEGACY_CLUSTER_AUTH", |_, value| {
        match value.boolean()? {
            false => Ok(()),
            true => Err("true is refused: every peer of this broker proves the secret by TLS exporter".to_owned()),
        }
    }),
    setting("storage.data_dir", "NARAD_DATA_DIR", |config, value| {
        config.storage.data_dir = PathBuf::from(value.text()?);
        Ok(())
    }),
    setting("storage.codec", "", |config, value| {
        config.storage.codec = value.choice(&[("none", Codec::None), ("zstd", Codec::Zstd)])?;
        Ok(())
    }),
    setting("storage.compression_level", "", |config, value| {
        config.storage.compression_level = value.choice(&[
            ("fastest", CompressionLevel::Fastest),
            ("default", CompressionLevel::Default),
            ("better", CompressionLevel::Better),
            ("best", CompressionLevel::Best),
        ])?;
        Ok(())
    }),
    setting("storage.idle_log_eviction_ms", "", into!(storage.idle_log_eviction_ms, zero "off" or A_MINUTE_MS)),
    setting("storage.cold_retention_walk_ms", "", into!(storage.cold_retention_walk_ms, zero "off" or A_MINUTE_MS)),
    setting(
        "storage.consumer_offset_commit_interval_ms",
        "",
        into!(storage.consumer_offset_commit_interval_ms, in 10..=60_000),
    ),
    setting("storage.ingress_wal_prealloc", "", |_, value| match value.boolean()? {
        true => Ok(()),
        false => Err(WAL_PREALLOC_REFUSED.to_owned()),
    }),
    setting(
        "topic.default_partitions",
        "NARAD_TOPIC_DEFAULT_PARTITIONS",
        into!(topic.default_partitions, in PARTITIONS),
    ),
    setting("topic.max_partitions", "NARAD_TOPIC_MAX_PARTITIONS", into!(topic.max_partitions, in PARTITIONS)),
    setting(
        "topic.default_retention_age_ms",
        "NARAD_TOPIC_DEFAULT_RETENTION_AGE_MS",
        into!(topic.default_retention_age_ms, zero "forever" or RETENTION_MS),
    ),
    setting(
        "topic.default_visibility_timeout_ms",
        "NARAD_TOPIC_DEFAULT_VISIBILITY_TIMEOUT_MS",
        into!(topic.default_visibility_timeout_ms, in 1..=u64::MAX),
    ),
    setting(
        "topic.default_max_in_flight_per_partition",
        "NARAD_TOPIC_DEFAULT_MAX_IN_FLIGHT_PER_PARTITION",
        into!(topic.default_max_in_flight_per_partition, in FROM_ONE_U32),
    ),
    setting(
        "topic.default_max_acked_ahead_per_partition",
        "NARAD_TOPIC_DEFAULT_MAX_ACKED_AHEAD_PER_PARTITION",
        into!(topic.default_max_acked_ahead_per_partition, in FROM_ONE_U32),
    ),
    setting("log.level", "NARAD_LOG_LEVEL", |config, value| {
        config.log.level = value.choice(&[
            ("debug", LogLevel::Debug),
            ("info", LogLevel::Info),
            ("warn", LogLevel::Warn),
            ("error", LogLevel::Error),
        ])?;
        Ok(())
    }),
    setting("log.format", "NARAD_LOG_FORMAT", |config, value| {
        config.log.format = value.choice(&[("json", LogFormat::Json), ("text", LogFormat::Text)])?;
        Ok(())
    }),
    setting("security.enabled", "NARAD_SECURITY_ENABLED", into!(security.enabled, boolean)),
    setting("runtime.shards", "NARAD_RUNTIME_SHARDS", into!(runtime.shards, some in 1..=1024)),
    setting("runtime.cpus", "NARAD_RUNTIME_CPUS", into!(runtime.cpus, some cpus)),
    setting("runtime.no_pin", "NARAD_RUNTIME_NO_PIN", into!(runtime.no_pin, boolean)),
    setting("runtime.control_cpu", "NARAD_RUNTIME_CONTROL_CPU", into!(runtime.control_cpu, some in CPUS)),
    setting("runtime.spin_us", "NARAD_RUNTIME_SPIN_US", into!(runtime.spin_us, some in 0..=1_000_000)),
    setting("runtime.shard_ports", "NARAD_RUNTIME_SHARD_PORTS", into!(runtime.shard_ports, some in 1..=65_535)),
    setting("runtime.memory", "NARAD_RUNTIME_MEMORY", into!(runtime.memory_bytes, some bytes)),
];
