//! Settings of one node. Four layers, later wins: defaults, the JSON file of `--config`, environment, flags of
//! `narad serve`. The merged result is validated as a whole; whatever is wrong is named by its key
//! in the file. Settings of mechanisms that are not built yet are unknown here, so that nobody believes them.

mod address;
mod cluster;
mod cpus;
pub(crate) mod fuzz;
mod json;
mod settings;
mod units;
mod validate;
mod value;
mod warning;

#[cfg(test)]
mod cluster_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_support;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

pub use address::ListenAddress;
pub use cluster::{Cluster, PeerEntry, Secret};
pub use cpus::CpuSet;
pub use units::{duration_nanos, format_bytes, format_duration, format_time, parse_bytes, parse_duration};

pub use warning::Warning;

pub(crate) use validate::check_node_id;

use settings::{Setting, INTERNAL_STORAGE_KEYS, SETTINGS};
use value::Raw;

/// Prefix of every environment variable of the server and the command line.
pub const ENVIRONMENT_PREFIX: &str = "NARAD_";

/// Everything that one node can be told, validated.
#[derive(Clone, Debug)]
pub struct Config {
    pub http: Http,
    pub cluster: Cluster,
    pub storage: Storage,
    pub topic: TopicDefaults,
    pub log: Log,
    pub security: Security,
    pub runtime: Runtime,
    /// Laptop mode: loopback only, security off, buffered files where O_DIRECT is missing.
    pub dev: bool,
    /// This start follows a restore of the data directory: its consensus files are set aside (E36).
    pub restored: bool,
    /// What an operator should know but what does not stop the node.
    pub warnings: Vec<Warning>,
}

#[derive(Clone, Debug)]
pub struct Http {
    pub addr: ListenAddress,
    pub read_timeout: Duration,
    pub write_timeout: Duration,
    pub idle_timeout: Duration,
    pub shutdown_grace: Duration,
    pub max_consume_wait: Duration,
    pub max_header_bytes: u64,
    /// `0`: no cap.
    pub max_connections: u64,
    /// `0`: no cap.
    pub max_consume_in_flight_per_identity: u64,
    /// `0`: no cap.
    pub max_produce_in_flight_per_identity: u64,
    /// `0`: no budget.
    pub max_batch_body_bytes_in_flight: u64,
    pub metrics_addr: Option<ListenAddress>,
    pub metrics_unauthenticated: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    None,
    Zstd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompressionLevel {
    Fastest,
    Default,
    Better,
    Best,
}

#[derive(Clone, Debug)]
pub struct Storage {
    pub data_dir: PathBuf,
    pub codec: Codec,
    pub compression_level: CompressionLevel,
    /// `0`: never.
    pub idle_log_eviction_ms: u64,
    /// `0`: never.
    pub cold_retention_walk_ms: u64,
    pub consumer_offset_commit_interval_ms: u64,
}

/// What a create that leaves a field out gets.
#[derive(Clone, Debug)]
pub struct TopicDefaults {
    pub default_partitions: u32,
    pub max_partitions: u32,
    /// `0`: forever.
    pub default_retention_age_ms: u64,
    pub default_visibility_timeout_ms: u64,
    pub default_max_in_flight_per_partition: u32,
    pub default_max_acked_ahead_per_partition: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLevel {
    Debug,
    Info,
    Warn,
    Error,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    Json,
    Text,
}

#[derive(Clone, Debug)]
pub struct Log {
    pub level: LogLevel,
    pub format: LogFormat,
}

#[derive(Clone, Debug)]
pub struct Security {
    pub enabled: bool,
}

/// Cores and memory; ours, with no counterpart in the reference.
#[derive(Clone, Debug, Default)]
pub struct Runtime {
    /// `None`: one per CPU that the process may use.
    pub shards: Option<u16>,
    /// CPUs of the shards, in order. `None`: chosen from the allowed ones.
    pub cpus: Option<CpuSet>,
    pub no_pin: bool,
    /// `None`: the control thread floats over the allowed CPUs.
    pub control_cpu: Option<u32>,
    /// Before each sleep of a shard. `None`: only while its drive works.
    pub spin_us: Option<u64>,
    /// Shard `i` also listens on this port plus `i`, by itself. `None`: only on the common port.
    pub shard_ports: Option<u16>,
    /// Of all shards together. `None`: half of the limit.
    pub memory_bytes: Option<u64>,
}

impl Config {
    fn defaults(dev: bool) -> Config {
        Config {
            http: Http {
                addr: ListenAddress { host: None, port: 7942 },
                read_timeout: Duration::from_secs(10),
                write_timeout: Duration::from_secs(30),
                idle_timeout: Duration::from_secs(60),
                shutdown_grace: Duration::from_secs(10),
                max_consume_wait: Duration::from_secs(10),
                max_header_bytes: 65_536,
                max_connections: 4096,
                max_consume_in_flight_per_identity: 1024,
                max_produce_in_flight_per_identity: 0,
                max_batch_body_bytes_in_flight: 256 << 20,
                metrics_addr: None,
                metrics_unauthenticated: false,
            },
            cluster: Cluster::default(),
            storage: Storage {
                data_dir: PathBuf::from("data"),
                codec: Codec::None,
                compression_level: CompressionLevel::Fastest,
                idle_log_eviction_ms: 1_800_000,
                cold_retention_walk_ms: 300_000,
                consumer_offset_commit_interval_ms: 1000,
            },
            topic: TopicDefaults {
                default_partitions: 3,
                max_partitions: 108,
                default_retention_age_ms: 604_800_000,
                default_visibility_timeout_ms: 30_000,
                default_max_in_flight_per_partition: 1024,
                default_max_acked_ahead_per_partition: 1024,
            },
            log: Log { level: LogLevel::Info, format: if dev { LogFormat::Text } else { LogFormat::Json } },
            security: Security { enabled: !dev },
            runtime: Runtime::default(),
            dev,
            restored: false,
            warnings: Vec::new(),
        }
    }

    /// The address to serve on. Without a host of its own the address is loopback as long as security is on: there
    /// are no users yet to check (E31).
    pub fn http_host(&self) -> &str {
        match &self.http.addr.host {
            None if self.security.enabled || self.dev => "127.0.0.1",
            None => "",
            Some(host) => host,
        }
    }
}

/// Where the layers come from; plain data, so that tests need no process.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    pub file: Option<PathBuf>,
    pub environment: Vec<(String, String)>,
    /// Key in the file and value, one for each flag given.
    pub flags: Vec<(&'static str, String)>,
    /// `--port`: changes the port of the address and leaves its host alone.
    pub port: Option<u16>,
    /// `--cluster-port`: the same for the peer plane.
    pub cluster_port: Option<u16>,
    pub restored: bool,
    pub dev: bool,
    /// Data directory of laptop mode, where nothing else names one.
    pub dev_data_dir: Option<PathBuf>,
}

/// Why the node does not start: one line, without the prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError(pub String);

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "narad: config: {}", self.0)
    }
}

impl std::error::Error for ConfigError {}

/// A file of all settings takes a few KiB.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Merges the layers and validates the result.
pub fn load(sources: &Sources) -> Result<Config, ConfigError> {
    let mut config = Config::defaults(sources.dev);
    if let Some(directory) = &sources.dev_data_dir {
        config.storage.data_dir = directory.clone();
    }
    if let Some(path) = &sources.file {
        // Only --config names the file, so an absent one is an error as well (lesson O3.2).
        let text = read_file(path)?;
        let wrong = |error: String| ConfigError(format!("config: load file: {error}"));
        let root = json::parse(&text).map_err(|error| wrong(format!("{}: {error}", path.display())))?;
        apply_file(&mut config, root).map_err(wrong)?;
    }
    apply_environment(&mut config, &sources.environment)?;
    for (key, value) in &sources.flags {
        let setting = SETTINGS.iter().find(|setting| setting.key == *key);
        let setting = setting.ok_or_else(|| ConfigError(format!("{key} is not a setting")))?;
        apply(&mut config, setting, Raw::Text(value), &format!(" (from {})", setting.flag()))?;
    }
    if let Some(port) = sources.port {
        config.http.addr.port = port;
    }
    if let Some(port) = sources.cluster_port {
        config.cluster.addr.port = port;
    }
    config.restored = sources.restored;
    validate::validate(&mut config).map_err(ConfigError)?;
    Ok(config)
}

/// Bounded: a device may never end.
fn read_file(path: &std::path::Path) -> Result<String, ConfigError> {
    use std::io::Read;

    let refused = |why: &str| Err(ConfigError(format!("config: load file: {}: {why}", path.display())));
    let mut text = String::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text));
    let bytes = read.map_err(|error| ConfigError(cannot_read(path, &error)))?;
    if bytes as u64 > FILE_BYTES_MAX {
        return refused("larger than 1 MiB: --config names a JSON file of settings");
    }
    if text.starts_with('\u{feff}') {
        return refused("starts with a byte order mark: save it as UTF-8 without one");
    }
    Ok(text)
}

fn cannot_read(path: &std::path::Path, error: &std::io::Error) -> String {
    let remedy = match error.kind() {
        std::io::ErrorKind::NotFound => "check the path behind --config",
        std::io::ErrorKind::PermissionDenied => "make it, and the directories above it, readable for the broker's user",
        _ => "--config names a JSON file",
    };
    format!("config: load file: open {}: {error}: {remedy}", path.display())
}

fn apply(config: &mut Config, setting: &Setting, value: Raw<'_>, origin: &str) -> Result<(), ConfigError> {
    (setting.apply)(config, value).map_err(|error| ConfigError(format!("{}: {error}{origin}", setting.key)))
}

fn apply_file(config: &mut Config, root: Value) -> Result<(), String> {
    let Value::Object(sections) = root else { return Err("json: the file must hold one object".to_owned()) };
    for (section, fields) in &sections {
        if !SETTINGS.iter().any(|setting| setting.section() == section) {
            return Err(format!("json: unknown field \"{section}\""));
        }
        let Value::Object(fields) = fields else { return Err(format!("{section}: must be an object")) };
        for (name, value) in fields {
            if section == "storage" && INTERNAL_STORAGE_KEYS.contains(&name.as_str()) {
                return Err(format!("storage.{name} is an internal setting and cannot be configured"));
            }
            let setting = SETTINGS.iter().find(|setting| setting.is(section, name));
            let setting = setting.ok_or_else(|| format!("json: unknown field \"{name}\" in \"{section}\""))?;
            apply(config, setting, Raw::Json(value), "").map_err(|error| error.0)?;
        }
    }
    Ok(())
}

fn apply_environment(config: &mut Config, environment: &[(String, String)]) -> Result<(), ConfigError> {
    /// Read by the command line, never by the server.
    const CLIENT: [&str; 4] = ["NARAD_ADDR", "NARAD_USER", "NARAD_PASS", "NARAD_CONFIG_DIR"];
    for (name, value) in environment {
        // An empty variable is how compose files say "not set".
        if !name.starts_with(ENVIRONMENT_PREFIX) || value.is_empty() || CLIENT.contains(&name.as_str()) {
            continue;
        }
        match SETTINGS.iter().find(|setting| setting.environment == Some(name)) {
            Some(setting) => apply(config, setting, Raw::Text(value), &format!(" (from {name})"))?,
            // Ignored, so that an older build tolerates newer variables; but not in silence.
            None => config.warnings.push(Warning::new(
                format!("environment variable {name} is not known to this build and is ignored"),
                "unset it, or correct its name",
            )),
        }
    }
    Ok(())
}
