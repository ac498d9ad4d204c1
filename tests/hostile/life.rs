//! Starts, stops and restarts: ports, locks, signals, and a changing number of shards.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use narad_harness::client::Response;
use narad_harness::process::Broker;

use crate::support::{binary, error_of, eventually, refused, Node, Scratch, Wire, PATIENCE};

#[test]
fn a_taken_port_is_refused_by_name_and_leaves_the_data_alone() {
    let scratch = Scratch::new("life-port");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    // The last --addr wins over the harness's own.
    let output = crate::support::narad_with(
        &["serve", "--addr", &address, "--data-dir", scratch.path("data").to_str().unwrap(), "--shards", "1"],
        &[("NARAD_SECURITY_ENABLED", "false")],
    );
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    let last = text.lines().last().unwrap_or_default();
    assert!(
        last.starts_with("narad: config: http.addr ") && last.contains(&address) && last.contains("taken"),
        "{text}"
    );
}

#[test]
fn e12_a_second_broker_on_one_data_directory_is_refused_and_the_first_goes_on() {
    let node = Node::start("life-second", &["--shards", "1"]);
    node.create("t", "");
    let mut second = Broker::spawn(binary(), &node.data(), &["--shards", "1", "--no-pin"]).unwrap();
    // It waits 10 s for the last writes of somebody killed.
    let status = second.wait_exit(PATIENCE).unwrap();
    let text = second.log_text();
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(text.contains("waiting for the data directory"), "{text}");
    assert!(text.contains(&format!("is in use by process {} (narad)", node.broker.pid())), "{text}");
    assert_eq!(node.client().post("/v1/topics/t/produce", b"x").unwrap().status, 202);
}

#[test]
fn a_directory_without_permission_or_that_is_a_file_is_refused() {
    let scratch = Scratch::new("life-permission");
    std::fs::write(scratch.path("data"), b"a file").unwrap();
    let (code, text) = refused(&scratch.path("data"), &["--shards", "1"]);
    assert!(code == 1 && text.contains("storage.data_dir") && text.lines().count() == 1, "{code} {text}");
    let output = crate::support::narad_with(
        &["serve", "--addr", "127.0.0.1:0", "--data-dir", "/proc/narad", "--shards", "1"],
        &[("NARAD_SECURITY_ENABLED", "false")],
    );
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && text.contains("/proc/narad") && text.lines().count() == 1, "{text}");
}

#[test]
fn sigterm_under_load_exits_0_keeps_every_202_and_answers_parked_consumers_at_once() {
    let mut node = Node::start("life-sigterm", &[]);
    node.create("load", ",\"visibility_timeout_ms\":60000");
    node.create("idle", "");
    let mut parked: Vec<Wire> = (0..20)
        .map(|_| {
            let mut wire = Wire::open(node.broker.address);
            wire.send("GET /v1/topics/idle/consume?wait=10s HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
            wire
        })
        .collect();
    let address = node.broker.address;
    let producers: Vec<_> = (0..4)
        .map(|producer| {
            std::thread::spawn(move || {
                let mut client = narad_harness::client::Client::new(address);
                let (mut accepted, mut unsure) = (BTreeSet::new(), BTreeSet::new());
                for n in 0..100_000 {
                    let body = format!("\"{producer}-{n}\"");
                    match client.post("/v1/topics/load/produce", body.as_bytes()) {
                        Ok(answer) if answer.status == 202 => accepted.insert(body),
                        _ => {
                            unsure.insert(body);
                            break;
                        }
                    };
                }
                (accepted, unsure)
            })
        })
        .collect();
    let consumer = std::thread::spawn(move || {
        let mut client = narad_harness::client::Client::new(address);
        let (mut delivered, mut acked) = (BTreeSet::new(), BTreeSet::new());
        while let Ok(answer) = client.get("/v1/topics/load/consume?wait=1s") {
            if answer.status != 200 {
                continue;
            }
            let message = answer.json();
            let payload = message["payload"].to_string();
            delivered.insert(payload.clone());
            let handle = message["receipt_handle"].as_str().unwrap().to_owned();
            match client.post(&format!("/v1/topics/load/ack?receipt_handle={handle}"), b"") {
                Ok(answer) if answer.status == 204 => acked.insert(payload),
                _ => break,
            };
        }
        (delivered, acked)
    });
    std::thread::sleep(Duration::from_millis(700));
    let told = Instant::now();
    node.broker.signal(15).unwrap();
    for wire in &mut parked {
        let answer = wire.read().unwrap();
        assert!(matches!(answer.status, 204 | 503), "{answer:?}");
    }
    let answered = told.elapsed();
    let status = node.broker.wait_exit(PATIENCE).unwrap();
    assert_eq!(status.code(), Some(0), "{}", node.broker.log_text());
    assert!(told.elapsed() < Duration::from_secs(12), "{:?}", told.elapsed());
    assert!(answered < Duration::from_secs(5), "parked consumers waited {answered:?}");
    let (mut accepted, mut unsure) = (BTreeSet::new(), BTreeSet::new());
    for producer in producers {
        let (yes, perhaps) = producer.join().unwrap();
        accepted.extend(yes);
        unsure.extend(perhaps);
    }
    let (delivered, acked) = consumer.join().unwrap();
    assert!(accepted.len() > 50 && !acked.is_empty(), "{} accepted, {} acked", accepted.len(), acked.len());
    node.restart(&[]);
    // Leases ended with the process: all that was not acked comes, and nothing that was.
    let rest = drain(&node, "load");
    let again: Vec<_> = rest.intersection(&acked).collect();
    assert!(again.is_empty(), "acked, and delivered again after a graceful stop: {again:?}");
    let lost: Vec<_> = accepted.iter().filter(|m| !rest.contains(*m) && !delivered.contains(*m)).collect();
    assert!(lost.is_empty(), "answered 202 and lost: {lost:?}");
    let invented: Vec<_> = rest.iter().filter(|m| !accepted.contains(*m) && !unsure.contains(*m)).collect();
    assert!(invented.is_empty(), "{invented:?}");
}

/// Everything that a topic delivers until it is empty, acked.
fn drain(node: &Node, topic: &str) -> BTreeSet<String> {
    let mut client = node.client();
    let mut all = BTreeSet::new();
    loop {
        let answer = client.get(&format!("/v1/topics/{topic}/consume?max=100&wait=500ms")).unwrap();
        if answer.status == 204 {
            return all;
        }
        assert_eq!(answer.status, 200, "{}", answer.text());
        let messages = answer.json()["messages"].as_array().unwrap().clone();
        let handles: Vec<_> = messages.iter().map(|m| m["receipt_handle"].clone()).collect();
        for message in &messages {
            assert!(all.insert(message["payload"].to_string()), "delivered twice: {message}");
        }
        let body = serde_json::json!({"receipt_handles": handles}).to_string();
        let acks = client.post(&format!("/v1/topics/{topic}/ack"), body.as_bytes()).unwrap();
        assert!(acks.json()["results"].as_array().unwrap().iter().all(|r| r["status"] == 204), "{}", acks.text());
    }
}

#[test]
fn health_says_that_it_is_shutting_down_while_requests_finish() {
    let mut node = Node::start("life-health", &["--shards", "1"]);
    node.create("t", "");
    // A body that is still being sent holds the stop up; probes on a kept connection see it.
    let mut slow = Wire::open(node.broker.address);
    slow.send("POST /v1/topics/t/produce HTTP/1.1\r\nHost: a\r\nX-Narad-Client: a\r\nContent-Length: 5\r\n\r\nhal")
        .unwrap();
    std::thread::sleep(Duration::from_millis(100));
    node.broker.signal(15).unwrap();
    let address = node.broker.address;
    eventually("the stop is under way", || node.broker.log_text().contains("stopping: requests in flight"));
    eventually("the API port says so", || {
        (ask(address, "/healthz").status, ask(address, "/readyz").status) == (503, 503)
    });
    slow.send("f!").unwrap();
    // In flight when the signal came: finished, and said to be the last on this connection.
    let answer = slow.read().unwrap();
    assert_eq!(answer.status, 202);
    assert_eq!(answer.header("connection"), Some("close"));
    assert_eq!(node.broker.wait_exit(PATIENCE).unwrap().code(), Some(0));
    node.restart(&[]);
    assert_eq!(drain(&node, "t"), BTreeSet::from(["\"half!\"".to_owned()]));
}

fn ask(address: SocketAddr, target: &str) -> Response {
    let mut wire = Wire::open(address);
    wire.send(format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n")).unwrap();
    wire.read().unwrap()
}

#[test]
fn a_balancer_that_watches_sees_the_stop_before_connections_are_refused() {
    let mut node = Node::start("life-balancer", &["--shards", "2"]);
    let address = node.broker.address;
    assert_eq!((ask(address, "/readyz").status, ask(address, "/readyz").status), (200, 200));
    let mut kept = Wire::open(address);
    kept.send("GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    assert_eq!(kept.read().unwrap().status, 200);
    node.broker.signal(15).unwrap();
    eventually("the stop is under way", || node.broker.log_text().contains("stopping: requests in flight"));
    eventually("the API port says so", || ask(address, "/healthz").status == 503);
    // Whoever kept a connection is answered on it, and told that it was the last time.
    kept.send("GET /v1/topics HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    let answer = kept.read().unwrap();
    assert_eq!((answer.status, answer.header("connection")), (200, Some("close")));
    for _ in 0..3 {
        let answer = ask(address, "/readyz");
        assert_eq!((answer.status, answer.header("connection")), (503, Some("close")));
        assert_eq!(error_of(&answer), "shutting down");
    }
    // Seen: nothing else holds the stop up.
    let seen = Instant::now();
    assert_eq!(node.broker.wait_exit(PATIENCE).unwrap().code(), Some(0));
    assert!(seen.elapsed() < Duration::from_secs(5), "{:?}", seen.elapsed());
}

#[test]
fn a_stop_that_nobody_watches_waits_for_nobody() {
    let mut node = Node::start("life-unwatched", &["--shards", "2"]);
    let mut idle = Wire::open(node.broker.address);
    idle.send("GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    assert_eq!(idle.read().unwrap().status, 200);
    let told = Instant::now();
    node.stop();
    assert!(told.elapsed() < Duration::from_secs(5), "{:?}", told.elapsed());
    assert!(idle.is_closed());
}

#[test]
fn a_stop_is_no_longer_ready_and_a_second_signal_exits_at_once() {
    for second in [2, 15] {
        // Free a moment ago; nothing else here asks for ports by number.
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let config = std::env::temp_dir().join(format!("narad-life-twice-{}-{second}.json", std::process::id()));
        std::fs::write(&config, format!("{{\"http\":{{\"metrics_addr\":\"{free}\"}}}}")).unwrap();
        let mut node =
            Node::start(&format!("life-twice-{second}"), &["--shards", "1", "--config", config.to_str().unwrap()]);
        node.create("t", "");
        let ask = |target: &str| ask(free, target).status;
        assert_eq!((ask("/healthz"), ask("/readyz")), (200, 200));
        let mut slow = Wire::open(node.broker.address);
        slow.send("POST /v1/topics/t/produce HTTP/1.1\r\nHost: a\r\nX-Narad-Client: a\r\nContent-Length: 5\r\n\r\nhal")
            .unwrap();
        std::thread::sleep(Duration::from_millis(100));
        // Twice, as `timeout` does: to the process, and to its group.
        node.broker.signal(15).unwrap();
        node.broker.signal(15).unwrap();
        eventually("the stop is under way", || node.broker.log_text().contains("stopping: requests in flight"));
        eventually("whoever asks where the metrics are is sent elsewhere", || {
            (ask("/healthz"), ask("/readyz")) == (503, 503)
        });
        if second == 15 {
            std::thread::sleep(Duration::from_millis(1100));
        }
        assert!(!node.broker.log_text().contains("a second signal: ending"), "{}", node.broker.log_text());
        let told = Instant::now();
        node.broker.signal(second).unwrap();
        let status = node.broker.wait_exit(PATIENCE).unwrap();
        assert_eq!(status.code(), Some(128 + second));
        assert!(told.elapsed() < Duration::from_secs(5), "{:?}", told.elapsed());
        assert!(node.broker.log_text().contains("a second signal: ending at once"), "{}", node.broker.log_text());
        std::fs::remove_file(&config).unwrap();
    }
}

#[test]
fn kill_9_and_other_shard_counts_lose_nothing() {
    let mut node = Node::start("life-shards", &["--shards", "1"]);
    node.create("t", ",\"partitions\":7");
    let mut expected = BTreeSet::new();
    for (round, shards) in ["2", "4", "3", "1", "1"].into_iter().enumerate() {
        let mut client = node.client();
        for n in 0..50 {
            let body = format!("\"{round}-{n}\"");
            assert_eq!(client.post("/v1/topics/t/produce", body.as_bytes()).unwrap().status, 202);
            expected.insert(body);
        }
        node.broker.kill().unwrap();
        if round == 4 {
            // What a crash in the middle of a removal leaves.
            let remains = node.data().join("ingress/9.drained");
            std::fs::create_dir(&remains).unwrap();
            std::fs::write(remains.join("00000001.wal"), "dispatched").unwrap();
        }
        node.restart(&["--no-pin", "--memory", "256MiB", "--shards", shards]);
    }
    // A kill between the dispatch and the checkpoint makes duplicates, never a loss.
    let mut client = node.client();
    let mut seen = BTreeSet::new();
    loop {
        let answer = client.get("/v1/topics/t/consume?max=100&wait=1s").unwrap();
        if answer.status == 204 {
            break;
        }
        seen.extend(answer.json()["messages"].as_array().unwrap().iter().map(|m| m["payload"].to_string()));
    }
    assert_eq!(seen, expected);
    // Directories of shards that are no more were drained and removed.
    eventually("foreign WAL directories are gone", || {
        let left = std::fs::read_dir(node.data().join("ingress")).unwrap().count();
        left == 1
    });
}
