//! What an operator has: doctor, cpus, top, the shards' own ports and figures.

use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Command, Stdio};

use narad_harness::client::Client;
use narad_harness::process::Broker;
use serde_json::Value;

use crate::support::{binary, eventually, narad, narad_with, refused, Node, Scratch, PATIENCE};

/// Two ports in a row that were free a moment ago.
fn free_ports() -> u16 {
    for _ in 0..100 {
        let first = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = first.local_addr().unwrap().port();
        if port < u16::MAX && TcpListener::bind(("127.0.0.1", port + 1)).is_ok() {
            return port;
        }
    }
    panic!("no two ports in a row are free");
}

fn json(output: &std::process::Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn shards(client: &mut Client) -> Value {
    let answer = client.get("/v1/node/shards").unwrap();
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

fn entries(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_client_sticks_to_a_shard_by_its_port_and_is_counted_there() {
    let base = free_ports();
    let node = Node::start("shard-ports", &["--shard-ports", &base.to_string()]);
    node.create("t", "");
    let before = shards(&mut node.client());
    let mut clients: Vec<Client> =
        (0..2).map(|shard| Client::new(SocketAddr::from(([127, 0, 0, 1], base + shard)))).collect();
    for (shard, client) in clients.iter_mut().enumerate() {
        for _ in 0..=shard {
            let answer = client.post("/v1/topics/t/produce", b"x").unwrap();
            assert_eq!((answer.status, answer.header("x-narad-shard")), (202, Some(&*shard.to_string())));
        }
    }
    let after = shards(&mut node.client());
    for shard in 0..2 {
        let (before, after) = (&before["shards"][shard], &after["shards"][shard]);
        assert_eq!((&after["shard"], &after["port"]), (&shard.into(), &(base as usize + shard).into()));
        assert!(after["connections"].as_u64().unwrap() >= 1, "{after}");
        assert_eq!(after["produced_records"].as_u64().unwrap(), shard as u64 + 1, "{after}");
        assert!(after["time_us"].as_u64() > before["time_us"].as_u64() && after["answered"] == true);
        assert_eq!((&after["cpu"], &after["pinned"]), (&Value::Null, &false.into()));
    }
    assert_eq!(after["memory_budget_bytes"].as_u64(), Some(256 << 20));
    assert_eq!(node.client().post("/v1/node/shards", b"{}").unwrap().status, 405);
    // The ports are taken now: another node is told which, and by which flag.
    let scratch = Scratch::new("shard-ports-taken");
    let arguments = ["--shards", "1", "--no-pin", "--memory", "128MiB", "--shard-ports", &(base + 1).to_string()];
    let (code, log) = refused(&scratch.path("data"), &arguments);
    let expected = format!("--shard-ports) {}, shard 0 (127.0.0.1:{}): the port is taken", base + 1, base + 1);
    assert!(code == 1 && log.contains(&expected), "{log}");
    assert!(!scratch.path("data").exists(), "a refused start left its directory behind");
}

#[test]
fn the_service_manager_is_told_of_readiness_and_of_the_stop() {
    let scratch = Scratch::new("notify");
    let manager = UnixDatagram::bind(scratch.path("socket")).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut command = Command::new(binary());
    command.env("NOTIFY_SOCKET", scratch.path("socket"));
    // The harness appends to it.
    let arguments = ["--no-pin", "--shards", "2", "--memory", "128MiB"];
    let mut broker = Broker::spawn_by(command, &scratch.path("data"), &arguments).unwrap();
    let told = || {
        let mut bytes = [0; 64];
        let got = manager.recv(&mut bytes).unwrap();
        text(&bytes[..got])
    };
    let mut said = told();
    while said.starts_with("EXTEND_TIMEOUT_USEC=") {
        said = told(); // recovery may take longer than the manager's patience
    }
    assert_eq!(said, "READY=1");
    assert_eq!(broker.client().get("/readyz").unwrap().status, 200);
    broker.stop(PATIENCE).unwrap();
    assert_eq!(told(), "STOPPING=1");
}

#[test]
fn the_doctor_looks_without_touching_before_and_beside_a_broker() {
    let scratch = Scratch::new("doctor");
    let data = scratch.path("deep/data");
    let flags = ["--data-dir", data.to_str().unwrap(), "--shards", "1", "--addr", "127.0.0.1:0", "--json"];
    let examined = narad(&[&["doctor"], &flags[..], &["--no-probe"]].concat(), b"");
    let report = json(&examined);
    let failed = report["worst"] == "fail";
    assert_eq!(examined.status.code(), Some(i32::from(failed)), "{report:#}");
    let find = |report: &Value, id: &str| {
        let checks = report["checks"].as_array().unwrap();
        checks.iter().find(|check| check["id"] == id).cloned().unwrap_or_else(|| panic!("no {id} in {report:#}"))
    };
    assert!(find(&report, "data_dir")["found"].as_str().unwrap().contains("does not exist yet"));
    assert_eq!(find(&report, "probe.durable_write")["status"], "skip");
    assert!(entries(&scratch.path("")).is_empty(), "nothing is made");
    // Every check has an id of its own style, and whatever is not well says what to do.
    for check in report["checks"].as_array().unwrap() {
        let advised = check["run"].is_string();
        assert!(advised || !["fail", "hint"].contains(&check["status"].as_str().unwrap()), "{check}");
    }

    let node = Node::start("doctor-beside", &["--shards", "1"]);
    node.create("t", "");
    let before = entries(&node.data());
    let address = node.broker.address.to_string();
    let flags = ["--data-dir", node.scratch.path("data").to_str().unwrap(), "--addr", &address, "--shards", "1"]
        .map(str::to_owned);
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let report = json(&narad(&[&["doctor", "--json"], &flags[..]].concat(), b""));
    let lock = find(&report, "data_dir.lock");
    assert!(
        lock["status"] == "ok" && lock["found"].as_str().unwrap().contains(&node.broker.pid().to_string()),
        "{lock}"
    );
    assert_eq!(find(&report, "port.http")["status"], "ok");
    assert!(find(&report, "data_dir.format")["found"].as_str().unwrap().starts_with("whole, of node "));
    assert!(report["probe"]["writes"].as_u64().unwrap() > 0, "{report:#}");
    assert_eq!(entries(&node.data()), before, "the probe left something behind");
    assert_eq!(node.client().post("/v1/topics/t/produce", b"x").unwrap().status, 202);
}

#[test]
fn the_doctor_fails_where_a_start_would_and_says_what_to_do() {
    let scratch = Scratch::new("doctor-fails");
    std::fs::write(scratch.path("file"), b"").unwrap();
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = holder.local_addr().unwrap().to_string();
    let (file, data) = (scratch.path("file"), scratch.path("data"));
    let (file, data) = (file.to_str().unwrap(), data.to_str().unwrap());
    for (arguments, id, found) in [
        (&["--data-dir", file][..], "data_dir", "cannot be used"),
        (&["--data-dir", data, "--addr", &taken], "port.http", "the port is taken"),
        (&["--data-dir", data, "--cpus", "65000"], "cpu.placement", "names CPU 65000"),
        (&["--data-dir", data, "--memory", "1MiB"], "memory.budget", "a shard needs 64MiB"),
        (&["--data-dir", data, "--shard-ports", "65535", "--shards", "2"], "port.shards", "need ports up to 65536"),
        (&["--data-dir", data, "--spin-us", "x"], "config", "runtime.spin_us"),
        (&["--data-dir", data, "--addr", "0.0.0.0:1"], "config", "security.enabled"),
    ] {
        let output = narad(&[&["doctor", "--json", "--no-probe"], arguments].concat(), b"");
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        let report = json(&output);
        let checks = report["checks"].as_array().unwrap();
        let check = checks.iter().find(|check| check["id"] == id && check["status"] == "fail");
        let check = check.unwrap_or_else(|| panic!("{arguments:?}: {report:#}"));
        assert!(check["found"].as_str().unwrap().contains(found) && check["run"].is_string(), "{check}");
        assert!(text(&output.stderr).starts_with("narad: doctor: "), "{}", text(&output.stderr));
    }
    assert_eq!(narad(&["doctor", "--no-such-flag"], b"").status.code(), Some(2));
    assert!(text(&narad(&["doctor", "--no-probe", "--data-dir", file], b"").stdout).contains("\n      "));
    assert_eq!(entries(&scratch.path("")), ["file"]);
}

#[test]
fn cpus_shows_the_placement_of_a_start_before_it() {
    let page = json(&narad(&["cpus", "--shards", "1", "--json"], b""));
    let allowed = page["allowed"].as_str().unwrap();
    assert!(!allowed.is_empty() && page["placement"]["shards"].as_array().unwrap().len() == 1, "{page:#}");
    assert_eq!(page["placement"]["pinned"], true);
    let floating = narad_with(&["cpus", "--no-pin"], &[("NARAD_RUNTIME_SHARDS", "3")]);
    assert!(text(&floating.stdout).contains("\n3 shards, floating over "), "{}", text(&floating.stdout));
    let refused = narad(&["cpus", "--cpus", "65000"], b"");
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stdout).contains("RUNS"));
    assert!(
        text(&refused.stderr).contains("narad: config: runtime.cpus names CPU 65000")
            && text(&refused.stderr).contains(allowed)
    );
    assert_eq!(narad(&["cpus", "--cpus", "1", "--no-pin"], b"").status.code(), Some(1));
}

#[test]
fn top_prints_pages_says_when_the_broker_is_gone_and_ends_in_good_order() {
    let mut node = Node::start("top", &[]);
    node.create("t", "");
    let server = node.broker.address.to_string();
    let once = narad(&["-s", &server, "top", "--once", "--interval", "100ms"], b"");
    let page = text(&once.stdout);
    assert!(once.status.success() && page.contains("narad top  ") && page.contains("TOTAL"), "{page}");
    assert_eq!(page.lines().filter(|line| line.contains(" any ")).count(), 2, "{page}");
    assert!(page.lines().all(|line| line.chars().count() <= 80) && !page.contains('\x1b'), "{page}");

    let mut top = Command::new(binary())
        .args(["-s", &server, "top", "--interval", "100ms", "--sort", "shard"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(top.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.contains("TOTAL")));
    // Frozen it still takes connections: that is said, and whoever has seen it before asks again.
    let signal = |name: &str, pid: u32| {
        let sent = Command::new("sh").arg("-c").arg(format!("kill -{name} {pid}")).status().unwrap();
        assert!(sent.success());
    };
    signal("STOP", node.broker.pid());
    let frozen = narad(&["-s", &server, "top", "--once"], b"");
    assert!(lines.any(|line| line.contains("does not answer (waited 2s)")));
    signal("CONT", node.broker.pid());
    let said = text(&frozen.stderr);
    let expected =
        format!("narad: {server} accepts connections and does not answer (waited 2s): the broker is stopped");
    assert!(frozen.status.code() == Some(3) && said.starts_with(&expected), "{said}");
    assert!(lines.any(|line| line.contains("TOTAL")));
    node.broker.kill().unwrap();
    assert!(lines.any(|line| line.contains("trying again every 100ms; last seen")));
    signal("TERM", top.id());
    eventually("top ends when told to", || top.try_wait().unwrap().is_some());
    assert_eq!(top.wait().unwrap().code(), Some(0));

    assert_eq!(narad(&["-s", &server, "top", "--once"], b"").status.code(), Some(3));
    for wrong in [&["top", "--interval", "1"][..], &["top", "--interval", "1ms"], &["top", "--sort", "size"]] {
        let output = narad(wrong, b"");
        assert_eq!(output.status.code(), Some(2), "{wrong:?}");
    }
}
