//! The real binary: exit codes, and one line on standard error for each refusal of a start.

use std::path::PathBuf;
use std::process::{Command, Output};

fn narad(args: &[&str]) -> Output {
    narad_with(&[], args)
}

/// With these variables, and no others of ours.
fn narad_with(environment: &[(&str, &str)], args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_narad"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("NARAD_")) {
        command.env_remove(name);
    }
    command.envs(environment.iter().copied()).args(args).output().unwrap()
}

fn error_text(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn exit_codes_tell_usage_from_refusal_from_no_server() {
    let version = narad(&["version"]);
    assert_eq!(version.status.code(), Some(0));
    assert!(String::from_utf8(version.stdout.clone()).unwrap().starts_with("narad "));
    for same in ["--version", "-V"] {
        let output = narad(&[same]);
        assert_eq!((output.status.code(), output.stdout), (Some(0), version.stdout.clone()), "{same}");
    }
    assert_eq!(narad(&["--help"]).status.code(), Some(0));
    for wrong in
        [&["bogus"][..], &[], &["topic", "add"], &["topic", "edit", "a"], &["pub"], &["-s", "https://a", "topic", "ls"]]
    {
        assert_eq!(narad(wrong).status.code(), Some(2), "{wrong:?}");
    }
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let unreachable = narad(&["topic", "ls", "--server", &free.to_string()]);
    assert_eq!(unreachable.status.code(), Some(3));
    assert!(error_text(&unreachable).starts_with("narad: cannot reach 127.0.0.1:"));
}

#[test]
fn t20_a_refused_start_prints_one_line_and_opens_no_data() {
    let directory: PathBuf = std::env::temp_dir().join(format!("narad-refused-{}", std::process::id()));
    let data = directory.join("data");
    std::fs::create_dir_all(&directory).unwrap();
    let file = directory.join("narad.json");
    std::fs::write(&file, r#"{"storage":{"fsync":"always"}}"#).unwrap();
    let cases: &[(&[&str], &str)] = &[
        (
            &["--config", file.to_str().unwrap()],
            "narad: config: config: load file: storage.fsync is an internal setting and cannot be configured\n",
        ),
        (&["--addr", "0.0.0.0:7942"], "narad: config: http.addr (0.0.0.0:7942)"),
        (&["--memory", "2048"], "narad: config: runtime.memory: "),
        (&["--log-level", "loud"], "narad: config: log.level: "),
        (&["--cpus", "65000"], "narad: config: runtime.cpus names CPU 65000"),
    ];
    for (flags, expected) in cases {
        let mut args = vec!["serve", "--data-dir", data.to_str().unwrap()];
        args.extend(*flags);
        let output = narad(&args);
        let text = error_text(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.starts_with(expected) && text.lines().count() == 1, "{text}");
        assert!(!data.exists());
    }
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn a_context_names_the_server_of_the_commands_to_come() {
    let directory = std::env::temp_dir().join(format!("narad-contexts-{}", std::process::id()));
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let run = |args: &[&str]| narad_with(&[("NARAD_CONFIG_DIR", directory.to_str().unwrap())], args);
    assert_eq!(run(&["ctx", "add", "here", "--server", &free.to_string()]).status.code(), Some(0));
    for args in [&["topic", "ls"][..], &["topic", "ls", "--ctx", "here"]] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(3));
        assert!(error_text(&output).contains(&free.to_string()), "{}", error_text(&output));
    }
    assert_eq!(run(&["topic", "ls", "--ctx", "there"]).status.code(), Some(2));
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn e49_a_hangup_ends_no_node_and_bad_certificate_files_refuse_the_start_by_setting() {
    let directory: PathBuf = std::env::temp_dir().join(format!("narad-hangup-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let binary = std::path::Path::new(env!("CARGO_BIN_EXE_narad"));
    let arguments = ["--shards", "1", "--no-pin", "--memory", "256MiB"];
    let mut broker = narad_harness::process::Broker::start(binary, &directory.join("data"), &arguments).unwrap();
    broker.signal(libc::SIGHUP).unwrap();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while !broker.log_text().contains("SIGHUP: there is nothing to read again") {
        assert!(std::time::Instant::now() < deadline, "{}", broker.log_text());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert_eq!(broker.client().get("/readyz").unwrap().status, 200);
    assert!(broker.stop(std::time::Duration::from_secs(20)).unwrap().success());

    let (file, unused) = (directory.join("node.pem"), directory.join("unused"));
    std::fs::write(&file, "no certificate").unwrap();
    let file = file.to_str().unwrap();
    let variables = ["CERT", "KEY", "CA"].map(|part| format!("NARAD_CLUSTER_TLS_{part}_FILE"));
    let environment: Vec<(&str, &str)> = variables.iter().map(|name| (name.as_str(), file)).collect();
    let output = narad_with(&environment, &["serve", "--data-dir", unused.to_str().unwrap()]);
    let text = error_text(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    let line = text.lines().find(|line| line.starts_with("narad: config: security.cluster_tls_cert_file: ")).unwrap();
    assert!(line.contains(file), "{text}");
    assert!(!unused.exists(), "no data was opened");
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn k29_a_node_that_waits_to_found_its_cluster_tells_its_log_and_whoever_probes_it() {
    let directory: PathBuf = std::env::temp_dir().join(format!("narad-founding-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let port = || std::net::UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (own, file) = (port(), directory.join("narad.json"));
    let settings = format!(
        r#"{{"cluster":{{"node_id":"n1","addr":"{own}","peers":[{{"id":"n1","addr":"{own}"}},{{"id":"n2","addr":"{}"}},
           {{"id":"n3","addr":"{}"}}]}},"security":{{"allow_insecure_cluster":true}}}}"#,
        port(),
        port()
    );
    std::fs::write(&file, settings).unwrap();
    let binary = std::path::Path::new(env!("CARGO_BIN_EXE_narad"));
    let arguments = ["--config", file.to_str().unwrap(), "--shards", "1", "--no-pin", "--memory", "128MiB"];
    let mut broker = narad_harness::process::Broker::spawn(binary, &directory.join("data"), &arguments).unwrap();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    let waits_for =
        "2 of the 3 initial members (n1, n2, n3) must be up and agree to found the cluster; no answer from n2 (";
    let answer = loop {
        match broker.client().get("/readyz") {
            Ok(answer) if answer.text().contains(waits_for) => break answer,
            _ => assert!(std::time::Instant::now() < deadline, "{}", broker.log_text()),
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    };
    assert_eq!(answer.status, 503);
    assert_eq!(broker.client().get("/healthz").unwrap().status, 200);
    assert_eq!(
        broker.client().post("/v1/topics/t/produce", b"{}").unwrap().status,
        503,
        "no client takes it for an answer"
    );
    assert!(broker.log_text().contains(waits_for), "{}", broker.log_text());
    broker.kill().unwrap();
    std::fs::remove_dir_all(&directory).unwrap();
}
