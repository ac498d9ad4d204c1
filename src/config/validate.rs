//! Contradictions between the merged settings; the bounds of each by itself are in `settings`. Every message names the
//! keys.

use std::time::Duration;

use super::address::is_loopback;
use super::{format_duration, Config, Warning};

const NODE_ID_CHARACTERS_MAX: usize = 200;
/// Below that, no client across a network gets a request through.
const TIMEOUT_MIN: Duration = Duration::from_millis(100);
const WAIT_MIN: Duration = Duration::from_millis(1);
const TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600);

pub(super) fn validate(config: &mut Config) -> Result<(), String> {
    http(config)?;
    storage(config)?;
    topic(config)?;
    runtime(config)?;
    if let Some(id) = &config.cluster.node_id {
        check_node_id(id).map_err(|error| format!("cluster.node_id: {error}"))?;
    }
    super::cluster::validate(config)?;
    exposure(config)
}

/// Ids appear in logs, paths of commands and peer lists.
pub(crate) fn check_node_id(id: &str) -> Result<(), String> {
    let well_formed = id.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'));
    match id.len() {
        0 => Err("must not be empty".to_owned()),
        n if n > NODE_ID_CHARACTERS_MAX => {
            Err(format!("has {n} characters, at most {NODE_ID_CHARACTERS_MAX} are allowed"))
        }
        _ if well_formed => Ok(()),
        _ => Err(format!("{id:?} holds a character other than A-Z a-z 0-9 . _ -")),
    }
}

fn http(config: &Config) -> Result<(), String> {
    let http = &config.http;
    for (key, timeout, least) in [
        ("http.read_timeout", http.read_timeout, TIMEOUT_MIN),
        ("http.write_timeout", http.write_timeout, TIMEOUT_MIN),
        ("http.idle_timeout", http.idle_timeout, TIMEOUT_MIN),
        ("http.shutdown_grace", http.shutdown_grace, WAIT_MIN),
        ("http.max_consume_wait", http.max_consume_wait, WAIT_MIN),
    ] {
        if !(least..=TIMEOUT_MAX).contains(&timeout) {
            let shown = format_duration;
            let (given, least, most) = (shown(timeout), shown(least), shown(TIMEOUT_MAX));
            return Err(format!("{key} ({given}) must be from {least} to {most}"));
        }
    }
    let shown = format_duration;
    if http.max_consume_wait > http.shutdown_grace {
        return Err(format!(
            "http.max_consume_wait ({}) must be <= http.shutdown_grace ({})",
            shown(http.max_consume_wait),
            shown(http.shutdown_grace)
        ));
    }
    if http.write_timeout <= http.max_consume_wait {
        return Err(format!(
            "http.write_timeout ({}) must be > http.max_consume_wait ({})",
            shown(http.write_timeout),
            shown(http.max_consume_wait)
        ));
    }
    match &http.metrics_addr {
        Some(metrics) if metrics.port != 0 && *metrics == http.addr => {
            Err(format!("http.metrics_addr ({metrics}) must differ from http.addr"))
        }
        _ => Ok(()),
    }
}

fn storage(config: &Config) -> Result<(), String> {
    let storage = &config.storage;
    if storage.data_dir.as_os_str().is_empty() {
        return Err("storage.data_dir must not be empty".to_owned());
    }
    Ok(())
}

fn topic(config: &Config) -> Result<(), String> {
    let topic = &config.topic;
    if !(3..=topic.max_partitions).contains(&topic.default_partitions) {
        return Err(format!(
            "topic.default_partitions ({}) must be between 3 and topic.max_partitions ({})",
            topic.default_partitions, topic.max_partitions
        ));
    }
    let retention_ms = topic.default_retention_age_ms;
    if retention_ms != 0 && topic.default_visibility_timeout_ms > retention_ms {
        return Err(format!(
            "topic.default_visibility_timeout_ms ({}) must be <= topic.default_retention_age_ms ({retention_ms})",
            topic.default_visibility_timeout_ms
        ));
    }
    Ok(())
}

fn runtime(config: &mut Config) -> Result<(), String> {
    let runtime = &mut config.runtime;
    if let (Some(cpus), true) = (&runtime.cpus, runtime.no_pin) {
        return Err(format!("runtime.cpus ({cpus}) pins shards and runtime.no_pin forbids it: drop one of them"));
    }
    if let (Some(cpu), true) = (runtime.control_cpu, runtime.no_pin) {
        return Err(format!(
            "runtime.control_cpu ({cpu}) pins a thread and runtime.no_pin forbids it: drop one of them"
        ));
    }
    if let (Some(cpus), Some(shards)) = (&runtime.cpus, runtime.shards) {
        if cpus.len() != usize::from(shards) {
            return Err(format!(
                "runtime.shards ({shards}) and runtime.cpus ({cpus}, {} CPUs) must agree: drop one of them",
                cpus.len()
            ));
        }
    }
    if runtime.spin_us.is_some_and(|spin| spin > 0) && runtime.no_pin {
        runtime.spin_us = None;
        config.warnings.push(Warning::new(
            "runtime.spin_us is ignored, since only pinned shards may spin and runtime.no_pin is set",
            "drop one of them",
        ));
    }
    Ok(())
}

/// E31: without users to check, nothing but loopback is served unless the operator turned security off in so many
/// words. An address that says otherwise is refused, never quietly changed.
fn exposure(config: &Config) -> Result<(), String> {
    let Some(host) = &config.http.addr.host else { return Ok(()) };
    if is_loopback(host) {
        return Ok(());
    }
    let address = &config.http.addr;
    let reach = if host.is_empty() { "listens on every interface" } else { "is not a loopback address" };
    if config.dev {
        return Err(format!(
            "http.addr ({address}) {reach}, and dev mode serves loopback only: use \"127.0.0.1:{}\"",
            address.port
        ));
    }
    if config.security.enabled {
        return Err(format!(
            "http.addr ({address}) {reach}, security.enabled is true, and this build has no users to check yet: use \
             \"127.0.0.1:{}\" behind a proxy that authenticates, or set security.enabled to false in so many words",
            address.port
        ));
    }
    Ok(())
}
