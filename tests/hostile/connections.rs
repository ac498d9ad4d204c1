//! Many connections, and none too many.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::support::{eventually, Node, Wire, PATIENCE};

/// Raises this process's limit of open files as far as it may; the number that it then has.
fn open_files() -> usize {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    line.split_whitespace().nth(3).and_then(|soft| soft.parse().ok()).unwrap_or(0)
}

#[test]
fn five_thousand_connections_are_served_within_the_cap_and_the_rest_waits() {
    if open_files() < 6_000 {
        eprintln!("skipped: needs 6000 open files, has {}", open_files());
        return;
    }
    let node = Node::start("connections-many", &[]);
    let open = || TcpStream::connect(node.broker.address).unwrap();
    let mut served: Vec<TcpStream> = Vec::new();
    // 4096 is the default cap of the node.
    for _ in 0..4_096 {
        served.push(open());
    }
    let ask = |stream: &mut TcpStream| {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    };
    let answered = |stream: &mut TcpStream| {
        let mut bytes = [0; 512];
        matches!(stream.read(&mut bytes), Ok(n) if bytes[..n].starts_with(b"HTTP/1.1 200"))
    };
    for stream in served.iter_mut() {
        ask(stream);
    }
    for (number, stream) in served.iter_mut().enumerate() {
        assert!(answered(stream), "connection {number}");
    }
    // Beyond it a connection is not refused; it is served once another one leaves.
    let mut waiting: Vec<TcpStream> = (0..904).map(|_| open()).collect();
    for stream in waiting.iter_mut() {
        ask(stream);
    }
    waiting[0].set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    assert!(!answered(&mut waiting[0]), "a connection over the cap was served");
    drop(served);
    for (number, stream) in waiting.iter_mut().enumerate() {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        assert!(answered(stream), "waiting connection {number}");
    }
}

#[test]
fn a_cap_below_the_number_of_shards_starves_nobody() {
    let scratch = crate::support::Scratch::new("connections-one-file");
    let file = scratch.path("narad.json");
    std::fs::write(&file, "{\"http\":{\"max_connections\":1}}").unwrap();
    let node = Node::start("connections-one", &["--shards", "4", "--config", file.to_str().unwrap()]);
    // The kernel spreads connections over the shards' listeners: some go to each.
    for number in 0..32 {
        let mut wire = Wire::open(node.broker.address);
        wire.send("GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").unwrap();
        assert!(wire.read().is_ok_and(|answer| answer.status == 200), "connection {number}");
    }
}

#[test]
fn consumes_in_flight_are_capped_per_client_and_come_back() {
    let node = Node::start("connections-cap", &["--shards", "1"]);
    node.create("t", "");
    let poll = |query: &str| {
        let mut wire = Wire::open(node.broker.address);
        wire.send(format!("GET /v1/topics/t/consume?wait=10s{query} HTTP/1.1\r\nHost: a\r\nX-Narad-Client: a\r\n\r\n"))
            .unwrap();
        wire
    };
    let mut parked: Vec<Wire> = Vec::new();
    let refusal = "too many in-flight consume requests for this identity (limit 1024 per node)";
    eventually("the next consume is over the cap", || {
        parked.clear();
        parked.extend((0..11).map(|_| poll("&max=93")));
        // Were it asked too early, one of the parked would be the one that is refused.
        std::thread::sleep(Duration::from_millis(300));
        let answer = node.client().get("/v1/topics/t/consume?max=2").unwrap();
        answer.status == 429 && answer.json()["error"] == refusal
    });
    drop(parked);
    eventually("the cap is free again", || node.client().get("/v1/topics/t/consume?max=100").unwrap().status == 204);
}
