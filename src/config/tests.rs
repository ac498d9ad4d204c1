use std::path::PathBuf;
use std::time::Duration;

use super::tests_support::{from_environment, from_file, Temporary};
use super::*;

fn from_flags(pairs: &[(&'static str, &str)]) -> Result<Config, String> {
    let flags = pairs.iter().map(|(key, value)| (*key, (*value).to_owned())).collect();
    load(&Sources { flags, ..Sources::default() }).map_err(|error| error.to_string())
}

#[test]
fn later_layers_win() {
    let file = Temporary::file("layers", r#"{"http":{"read_timeout":"1s","idle_timeout":"2s","max_connections":7}}"#);
    let config = load(&Sources {
        file: Some(file.0.clone()),
        environment: vec![
            ("NARAD_HTTP_IDLE_TIMEOUT".into(), "3s".into()),
            ("NARAD_LOG_LEVEL".into(), "warn".into()),
            ("NARAD_HTTP_READ_TIMEOUT".into(), String::new()), // empty is not set
        ],
        flags: vec![("log.level", "error".into()), ("storage.data_dir", "/srv/narad".into())],
        ..Sources::default()
    })
    .unwrap();
    assert_eq!(config.http.read_timeout, Duration::from_secs(1));
    assert_eq!(config.http.idle_timeout, Duration::from_secs(3));
    assert_eq!(config.http.max_connections, 7);
    assert_eq!(config.http.write_timeout, Duration::from_secs(30));
    assert_eq!(config.log.level, LogLevel::Error);
    assert_eq!(config.storage.data_dir, PathBuf::from("/srv/narad"));
}

#[test]
fn every_setting_has_a_key_of_its_own() {
    for (index, setting) in SETTINGS.iter().enumerate() {
        for other in &SETTINGS[..index] {
            assert_ne!(setting.key, other.key);
            assert!(setting.environment.is_none() || setting.environment != other.environment, "{}", setting.key);
        }
        assert!(setting.environment.is_none_or(|name| name.starts_with(ENVIRONMENT_PREFIX)));
        assert!(!INTERNAL_STORAGE_KEYS.iter().any(|name| setting.is("storage", name)));
    }
}

#[test]
fn t20_unknown_and_internal_keys_stop_the_start() {
    let cases = [
        (
            r#"{"storage":{"fsync":true}}"#,
            "narad: config: config: load file: storage.fsync is an internal setting and cannot be configured",
        ),
        (
            r#"{"storage":{"segment_bytes":1}}"#,
            "narad: config: config: load file: storage.segment_bytes is an internal setting and cannot be configured",
        ),
        (r#"{"htp":{}}"#, "json: unknown field \"htp\""),
        (r#"{"http":{"adr":":1"}}"#, "json: unknown field \"adr\" in \"http\""),
        (r#"{"cluster":{"secret":"x"}}"#, "json: unknown field \"secret\""),
        (r#"{"NARAD_CLUSTER_SECRET":{}}"#, "json: unknown field \"NARAD_CLUSTER_SECRET\""),
        (r#"{"fanout":{"linger_ms":1}}"#, "json: unknown field \"fanout\""),
        (r#"{"remotes":{}}"#, "json: unknown field \"remotes\""),
        (r#"{"security":{"cluster_secret":"x"}}"#, "json: unknown field \"cluster_secret\""),
        (r#"{"http":{"pprof_addr":":1"}}"#, "json: unknown field \"pprof_addr\""),
        (r#"{"http":7}"#, "http: must be an object"),
        (r#"{"http":{}} trailing"#, "json: "),
        ("{\"http\":{} // why\n}", "json: "),
        ("[]", "one object"),
        ("", "json: "),
    ];
    for (text, expected) in cases {
        let error = from_file("unknown", text).unwrap_err();
        assert!(error.starts_with("narad: config: config: load file: ") && error.contains(expected), "{text}: {error}");
        assert!(!error.contains('\n'), "one line: {error}");
    }
}

#[test]
fn t20_a_key_given_twice_stops_the_start_and_names_the_file() {
    let text = r#"{"security":{"enabled":true},"http":{"addr":":1"},"security":{"enabled":false}}"#;
    let error = from_file("twice", text).unwrap_err();
    let file = std::env::temp_dir().join(format!("narad-config-{}-twice.json", std::process::id()));
    let expected = format!(
        "narad: config: config: load file: {}: json: security is given twice: keep one of the two at line 1",
        file.display()
    );
    assert!(error.starts_with(&expected), "{error}");
    let error = from_file("twice-within", r#"{"http":{"addr":":1","addr":":2"}}"#).unwrap_err();
    assert!(error.contains("json: http.addr is given twice"), "{error}");
    // Letter case counts: another spelling is another key, and no setting.
    let error = from_file("twice-case", r#"{"http":{"addr":":1","Addr":":2"}}"#).unwrap_err();
    assert!(error.contains("json: unknown field \"Addr\" in \"http\""), "{error}");
}

#[test]
fn t20_values_of_the_wrong_kind_are_named_by_key() {
    let cases = [
        (r#"{"http":{"read_timeout":10}}"#, "http.read_timeout: 10 has no unit"),
        (r#"{"http":{"read_timeout":"10"}}"#, "http.read_timeout: \"10\" has no unit"),
        (r#"{"http":{"max_connections":"7"}}"#, "http.max_connections: \"7\" is not a whole number from 0 to"),
        (r#"{"http":{"max_connections":-1}}"#, "http.max_connections: -1 is not a whole number"),
        (r#"{"http":{"max_connections":1.5}}"#, "http.max_connections: 1.5 is not a whole number"),
        (r#"{"security":{"enabled":"true"}}"#, "security.enabled: \"true\" is neither"),
        (r#"{"http":{"addr":7942}}"#, "http.addr: 7942 is not a string"),
        (r#"{"log":{"level":"loud"}}"#, "log.level: \"loud\" is none of \"debug\""),
        (r#"{"storage":{"codec":"lz4"}}"#, "storage.codec: \"lz4\" is none of \"none\", \"zstd\""),
        (r#"{"storage":{"ingress_wal_prealloc":false}}"#, "storage.ingress_wal_prealloc: false is refused"),
        (r#"{"runtime":{"memory":2048}}"#, "runtime.memory: 2048 has no unit"),
        (r#"{"runtime":{"cpus":"5-2"}}"#, "runtime.cpus: \"5-2\" is not a list of CPUs"),
        (r#"{"runtime":{"cpus":""}}"#, "runtime.cpus: names no CPU"),
        (
            r#"{"topic":{"max_partitions":5000000000}}"#,
            "topic.max_partitions: 5000000000 is not a whole number from 3 to 99999",
        ),
    ];
    for (text, expected) in cases {
        let error = from_file("kind", text).unwrap_err();
        assert!(error.contains(expected), "{text}: {error}");
    }
    let error = from_environment(&[("NARAD_HTTP_READ_TIMEOUT", "soon")]).unwrap_err();
    assert!(error.starts_with("narad: config: http.read_timeout: \"soon\""), "{error}");
    assert!(error.ends_with("(from NARAD_HTTP_READ_TIMEOUT)"), "{error}");
    assert!(from_flags(&[("runtime.spin_us", "x")]).unwrap_err().contains("runtime.spin_us: \"x\""));
}

#[test]
fn t20_each_bound_stops_the_start_and_names_its_keys() {
    let cases: &[(&[(&'static str, &str)], &str)] = &[
        (&[("http.max_consume_wait", "20s")], "http.max_consume_wait (20s) must be <= http.shutdown_grace (10s)"),
        (&[("http.write_timeout", "10s")], "http.write_timeout (10s) must be > http.max_consume_wait (10s)"),
        (&[("http.max_consume_wait", "0s")], "http.max_consume_wait (0s) must be from 1ms to 24h"),
        (&[("http.read_timeout", "0")], "http.read_timeout (0s) must be from 100ms to 24h"),
        (&[("http.read_timeout", "1ns")], "http.read_timeout (1ns) must be from 100ms to 24h"),
        (&[("http.idle_timeout", "99ms")], "http.idle_timeout (99ms) must be from 100ms to 24h"),
        (&[("http.idle_timeout", "25h")], "http.idle_timeout (25h"),
        (&[("http.max_header_bytes", "4095")], "http.max_header_bytes: \"4095\" is not a whole number from 4096 to"),
        (
            &[("http.addr", "127.0.0.1:80"), ("http.metrics_addr", "127.0.0.1:80")],
            "http.metrics_addr (127.0.0.1:80) must differ",
        ),
        (&[("storage.data_dir", "")], "storage.data_dir must not be empty"),
        (
            &[("storage.idle_log_eviction_ms", "59999")],
            "storage.idle_log_eviction_ms: \"59999\" is neither 0 (off) nor a whole number from 60000 to",
        ),
        (&[("storage.cold_retention_walk_ms", "1")], "storage.cold_retention_walk_ms: \"1\" is neither 0"),
        (
            &[("storage.consumer_offset_commit_interval_ms", "9")],
            "storage.consumer_offset_commit_interval_ms: \"9\" is not a whole number from 10 to 60000",
        ),
        (
            &[("storage.consumer_offset_commit_interval_ms", "60001")],
            "storage.consumer_offset_commit_interval_ms: \"60001\"",
        ),
        (&[("topic.default_partitions", "2")], "topic.default_partitions: \"2\" is not a whole number from 3 to 99999"),
        (
            &[("topic.default_partitions", "109")],
            "topic.default_partitions (109) must be between 3 and topic.max_partitions (108)",
        ),
        (&[("topic.max_partitions", "2")], "topic.max_partitions: \"2\" is not a whole number from 3 to"),
        (
            &[("topic.default_retention_age_ms", "3599999")],
            "topic.default_retention_age_ms: \"3599999\" is neither 0 (forever) nor a whole number from 3600000 to",
        ),
        (
            &[("topic.default_visibility_timeout_ms", "0")],
            "topic.default_visibility_timeout_ms: \"0\" is not a whole number from 1 to",
        ),
        (
            &[("topic.default_visibility_timeout_ms", "604800001")],
            "topic.default_visibility_timeout_ms (604800001) must be <=",
        ),
        (&[("topic.default_max_in_flight_per_partition", "0")], "topic.default_max_in_flight_per_partition: \"0\""),
        (&[("topic.default_max_acked_ahead_per_partition", "0")], "topic.default_max_acked_ahead_per_partition: \"0\""),
        (&[("cluster.node_id", "a b")], "cluster.node_id: \"a b\" holds a character"),
        (&[("cluster.node_id", "")], "cluster.node_id: must not be empty"),
        (&[("runtime.shards", "0")], "runtime.shards: \"0\" is not a whole number from 1 to 1024 (from --shards)"),
        (&[("runtime.shards", "70000")], "runtime.shards: \"70000\" is not a whole number from 1 to 1024"),
        (
            &[("runtime.shards", "3"), ("runtime.cpus", "0-1")],
            "runtime.shards (3) and runtime.cpus (0-1, 2 CPUs) must agree",
        ),
        (
            &[("runtime.cpus", "1"), ("runtime.no_pin", "true")],
            "runtime.cpus (1) pins shards and runtime.no_pin forbids it",
        ),
        (&[("runtime.control_cpu", "1"), ("runtime.no_pin", "true")], "runtime.control_cpu (1)"),
        (
            &[("runtime.shard_ports", "0")],
            "runtime.shard_ports: \"0\" is not a whole number from 1 to 65535 (from --shard-ports)",
        ),
        (&[("runtime.shard_ports", "65536")], "runtime.shard_ports: \"65536\" is not a whole number from 1 to 65535"),
        (
            &[("runtime.spin_us", "1000001")],
            "runtime.spin_us: \"1000001\" is not a whole number from 0 to 1000000 (from --spin-us)",
        ),
    ];
    for (flags, expected) in cases {
        let error = from_flags(flags).expect_err(expected);
        assert!(error.starts_with("narad: config: ") && error.contains(expected), "{flags:?}: {error}");
    }
    // The bounds themselves are allowed.
    let edge: &[&[(&'static str, &str)]] = &[
        &[("http.max_consume_wait", "10s"), ("http.shutdown_grace", "10s")],
        &[("storage.idle_log_eviction_ms", "0"), ("storage.cold_retention_walk_ms", "60000")],
        &[("topic.default_retention_age_ms", "0"), ("topic.default_visibility_timeout_ms", "604800001")],
        &[("topic.default_partitions", "108"), ("runtime.spin_us", "0"), ("runtime.shards", "1")],
    ];
    for flags in edge {
        from_flags(flags).unwrap();
    }
}

#[test]
fn e31_an_open_address_needs_security_off_in_so_many_words() {
    for address in [":7942", "0.0.0.0:7942", "[::]:7942", "10.0.0.7:7942"] {
        let error = from_flags(&[("http.addr", address)]).unwrap_err();
        assert!(error.contains("http.addr") && error.contains("security.enabled"), "{error}");
        assert!(from_environment(&[("NARAD_HTTP_ADDR", address)]).is_err());
        let open = from_flags(&[("http.addr", address), ("security.enabled", "false")]).unwrap();
        assert_eq!(open.http.addr.to_string(), address);
    }
    // Nobody named a host: loopback while security is on, every interface when it is off; --port names no host.
    assert_eq!(from_flags(&[]).unwrap().http_host(), "127.0.0.1");
    assert_eq!(from_flags(&[("security.enabled", "false")]).unwrap().http_host(), "");
    let moved = load(&Sources { port: Some(8000), ..Sources::default() }).unwrap();
    assert_eq!((moved.http_host(), moved.http.addr.port), ("127.0.0.1", 8000));
    let loopback = from_flags(&[("http.addr", "[::1]:1")]).unwrap();
    assert_eq!(loopback.http_host(), "::1");
}

#[test]
fn dev_mode_is_loopback_without_security_and_logs_text() {
    let dev = |flags: Vec<(&'static str, String)>| {
        load(&Sources { flags, dev: true, dev_data_dir: Some("/home/a/.narad/data".into()), ..Sources::default() })
    };
    let config = dev(vec![]).unwrap();
    assert_eq!((config.http_host(), config.security.enabled, config.log.format), ("127.0.0.1", false, LogFormat::Text));
    assert_eq!(config.storage.data_dir, PathBuf::from("/home/a/.narad/data"));
    let moved = dev(vec![("storage.data_dir", "/tmp/x".into()), ("log.format", "json".into())]).unwrap();
    assert_eq!((moved.storage.data_dir, moved.log.format), (PathBuf::from("/tmp/x"), LogFormat::Json));
    assert!(dev(vec![("http.addr", ":7942".into())]).unwrap_err().0.contains("dev mode serves loopback only"));
}

/// Every number of every layer: the key, what was given, where from, and what would have been good.
#[test]
fn t20_no_number_is_refused_without_its_range() {
    let mut numbers = 0;
    for setting in SETTINGS {
        for bad in ["-1", "x", "1.5", "99999999999999999999"] {
            let applied = (setting.apply)(&mut Config::defaults(false), Raw::Text(bad));
            let Err(error) = applied else { continue };
            let ours =
                ["is not", "is neither", "has no unit", "is none of", "false is refused", "at least 16 are needed"];
            assert!(ours.iter().any(|part| error.contains(part)), "{}: {error}", setting.key);
            numbers += u32::from(error.contains("a whole number from "));
        }
    }
    assert!(numbers > 4 * 15, "{numbers}");
    let error = from_environment(&[("NARAD_RUNTIME_SPIN_US", "-1")]).unwrap_err();
    let expected =
        "narad: config: runtime.spin_us: \"-1\" is not a whole number from 0 to 1000000 (from NARAD_RUNTIME_SPIN_US)";
    assert_eq!(error, expected);
    let error = from_file("range", r#"{"runtime":{"shards":0}}"#).unwrap_err();
    assert!(error.ends_with("runtime.shards: 0 is not a whole number from 1 to 1024"), "{error}");
}

#[test]
fn unknown_variables_are_ignored_with_a_warning() {
    let config = from_environment(&[
        ("NARAD_FANOUT_LINGER_MS", "5"),
        ("NARAD_ADDR", "http://elsewhere:1"),
        ("PATH", "/bin"),
        ("NARAD_TOPIC_DEFAULT_PARTITIONS", "6"),
    ])
    .unwrap();
    assert_eq!(config.topic.default_partitions, 6);
    assert_eq!(config.warnings.len(), 1, "{:?}", config.warnings);
    assert!(config.warnings[0].cause.contains("NARAD_FANOUT_LINGER_MS"));
}

#[test]
fn s3_spinning_without_pinning_is_ignored_with_a_warning() {
    let config = from_flags(&[("runtime.spin_us", "50"), ("runtime.no_pin", "true")]).unwrap();
    assert_eq!(config.runtime.spin_us, None);
    assert!(config.warnings[0].cause.contains("runtime.spin_us is ignored"));
}

#[test]
fn a_file_that_is_no_text_of_settings_is_refused_by_what_it_is() {
    let path = std::env::temp_dir().join(format!("narad-config-{}.json", std::process::id()));
    let refusal = |path: &std::path::Path| {
        load(&Sources { file: Some(path.to_owned()), ..Sources::default() }).unwrap_err().to_string()
    };
    std::fs::write(&path, "\u{feff}{}").unwrap();
    assert!(refusal(&path).contains("starts with a byte order mark: save it"), "{}", refusal(&path));
    std::fs::write(&path, "{}".to_owned() + &" ".repeat(1 << 20)).unwrap();
    assert!(refusal(&path).contains("larger than 1 MiB"), "{}", refusal(&path));
    std::fs::remove_file(&path).unwrap();
    assert!(refusal("/dev/zero".as_ref()).contains("/dev/zero: larger than 1 MiB"));
}

#[test]
fn a_missing_file_is_an_error_and_says_which() {
    let error = load(&Sources { file: Some("/nonexistent/narad.json".into()), ..Sources::default() }).unwrap_err();
    assert!(
        error.to_string().starts_with("narad: config: config: load file: open /nonexistent/narad.json: "),
        "{error}"
    );
}
