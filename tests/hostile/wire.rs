//! HTTP as it should not be sent.

use std::time::{Duration, Instant};

use crate::support::{eventually, Node, Wire, PATIENCE};

const PRODUCE: &str = "POST /v1/topics/t/produce HTTP/1.1\r\nHost: a\r\nContent-Type: application/octet-stream\r\n";

fn node(name: &str) -> Node {
    let node = Node::start(name, &["--shards", "1"]);
    node.create("t", "");
    node
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let node = node("wire-pipelined");
    let mut wire = Wire::open(node.broker.address);
    let mut all = String::new();
    for _ in 0..100 {
        all.push_str(&format!("{PRODUCE}Content-Length: 2\r\n\r\nhi"));
        all.push_str("GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n");
        all.push_str("GET /nowhere HTTP/1.1\r\nHost: a\r\n\r\n");
    }
    wire.send(&all).unwrap();
    for round in 0..100 {
        for expected in [202, 200, 404] {
            assert_eq!(wire.read().unwrap().status, expected, "round {round}");
        }
    }
}

#[test]
fn http_1_0_is_served_and_closed_unless_kept() {
    let node = node("wire-1-0");
    let mut wire = Wire::open(node.broker.address);
    wire.send("GET /healthz HTTP/1.0\r\n\r\n").unwrap();
    let answer = wire.read().unwrap();
    assert_eq!((answer.status, answer.text().as_str()), (200, "{\"status\":\"ok\"}\n"));
    assert!(wire.is_closed());
    let mut wire = Wire::open(node.broker.address);
    for _ in 0..2 {
        wire.send("GET /healthz HTTP/1.0\r\nConnection: keep-alive\r\n\r\n").unwrap();
        assert_eq!(wire.read().unwrap().status, 200);
    }
}

#[test]
fn expect_100_continue_is_answered_only_when_the_body_is_wanted() {
    let node = node("wire-expect");
    let mut wire = Wire::open(node.broker.address);
    wire.send(format!("{PRODUCE}Content-Length: 5\r\nExpect: 100-continue\r\n\r\n")).unwrap();
    let interim = wire.read_head().unwrap();
    assert_eq!(interim.status, 100);
    wire.send("hello").unwrap();
    assert_eq!(wire.read().unwrap().status, 202);
    // Refused by its declared length: no invitation to send it.
    let mut wire = Wire::open(node.broker.address);
    wire.send(format!("{PRODUCE}Content-Length: 2000000\r\nExpect: 100-continue\r\n\r\n")).unwrap();
    assert_eq!(wire.read_head().unwrap().status, 413);
}

#[test]
fn chunked_bodies_are_bodies() {
    let node = node("wire-chunked");
    let mut wire = Wire::open(node.broker.address);
    wire.send(format!("{PRODUCE}Transfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: x\r\n\r\n"))
        .unwrap();
    assert_eq!(wire.read().unwrap().status, 202);
    wire.send(format!("{PRODUCE}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n")).unwrap();
    let empty = wire.read().unwrap();
    assert_eq!((empty.status, empty.json()["error"].as_str()), (400, Some("message required")));
    wire.send("GET /v1/topics/t/consume?wait=5s HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    assert_eq!(wire.read().unwrap().json()["payload"], "abcde");
    // One byte too many, in many chunks.
    let mut wire = Wire::open(node.broker.address);
    wire.send(format!("{PRODUCE}Transfer-Encoding: chunked\r\n\r\n")).unwrap();
    let chunk = format!("{:x}\r\n{}\r\n", 64 << 10, "x".repeat(64 << 10));
    for _ in 0..16 {
        wire.send(&chunk).unwrap();
    }
    let _ = wire.send("1\r\nx\r\n0\r\n\r\n");
    assert_eq!(wire.read().unwrap().status, 413);
    // A size that is none, and one that overflows.
    for size in ["zz", "-1", "ffffffffffffffffff"] {
        let mut wire = Wire::open(node.broker.address);
        wire.send(format!("{PRODUCE}Transfer-Encoding: chunked\r\n\r\n{size}\r\nabc\r\n")).unwrap();
        let answer = wire.read();
        assert!(
            answer.as_ref().is_ok_and(|a| (400..=413).contains(&a.status)) || answer.is_err(),
            "{size}: {answer:?}"
        );
    }
    nothing_left(&node);
}

/// Nothing that was refused was stored.
fn nothing_left(node: &Node) {
    let high: u64 = stored(node);
    let mut client = node.client();
    let mut seen = 0;
    for partition in 0..3 {
        for offset in 0.. {
            let answer = client.get(&format!("/v1/topics/t/consume?partition={partition}&offset={offset}")).unwrap();
            if answer.status == 204 {
                break;
            }
            assert_eq!(answer.status, 200);
            seen += 1;
        }
    }
    assert_eq!((seen, high), (1, 1));
}

fn stored(node: &Node) -> u64 {
    let details = node.client().get("/v1/topics/t").unwrap().json();
    details["partition_stats"].as_array().unwrap().iter().map(|p| p["high_watermark"].as_u64().unwrap()).sum()
}

#[test]
fn a_length_and_chunks_at_once_or_two_lengths_are_refused() {
    let node = node("wire-smuggling");
    for headers in [
        "Content-Length: 3\r\nContent-Length: 4\r\n",
        "Content-Length: -3\r\n",
        "Content-Length: 3x\r\n",
        "Content-Length: 99999999999999999999999\r\n",
        "Transfer-Encoding: gzip\r\n",
        "Transfer-Encoding: chunked, gzip\r\n",
    ] {
        let mut wire = Wire::open(node.broker.address);
        wire.send(format!("{PRODUCE}{headers}\r\nabcd")).unwrap();
        let answer = wire.read().unwrap();
        assert!(matches!(answer.status, 400 | 413 | 501), "{headers:?}: {answer:?}");
        assert!(wire.is_closed(), "{headers:?}");
    }
    // Chunks win over a length (RFC 9112 §6.3); the connection must not be used on.
    let mut wire = Wire::open(node.broker.address);
    wire.send(format!("{PRODUCE}Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"))
        .unwrap();
    assert_eq!(wire.read().unwrap().status, 400);
    assert_eq!(stored(&node), 0);
}

#[test]
fn a_body_that_stops_half_way_stores_nothing() {
    let node = node("wire-half");
    for length in ["10", "70000", "1048576"] {
        let mut wire = Wire::open(node.broker.address);
        wire.send(format!("{PRODUCE}Content-Length: {length}\r\n\r\nfive!")).unwrap();
        wire.stream().shutdown(std::net::Shutdown::Write).unwrap();
        // Answered or not; closed, not stored.
        let _ = wire.read();
        assert!(wire.is_closed());
    }
    assert_eq!(stored(&node), 0);
}

#[test]
fn a_declared_tebibyte_is_refused_at_once_and_costs_no_memory() {
    let node = node("wire-tebibyte");
    let before = resident_kib(node.broker.pid());
    for route in ["produce", "produce/batch", "ack"] {
        let started = Instant::now();
        let mut wire = Wire::open(node.broker.address);
        wire.send(format!(
            "POST /v1/topics/t/{route} HTTP/1.1\r\nHost: a\r\nX-Narad-Client: a\r\nContent-Length: 1099511627776\r\n\r\nabc"
        ))
        .unwrap();
        assert_eq!(wire.read().unwrap().status, 413, "{route}");
        assert!(started.elapsed() < PATIENCE);
    }
    assert!(resident_kib(node.broker.pid()) < before + (64 << 10));
}

fn resident_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn a_header_block_over_64_kib_is_431_in_plain_text_however_many_lines_it_has() {
    let node = node("wire-headers");
    for (lines, value) in [(10_000, "y"), (1, &*"y".repeat(70_000))] {
        let mut wire = Wire::open(node.broker.address);
        let headers: String = (0..lines).map(|i| format!("x-{i}: {value}\r\n")).collect();
        let _ = wire.send(format!("GET /healthz HTTP/1.1\r\nHost: a\r\n{headers}\r\n"));
        let answer = wire.read().unwrap();
        assert_eq!(answer.status, 431, "{lines} lines");
        assert!(answer.header("content-type").unwrap_or_default().starts_with("text/plain"), "{:?}", answer.headers);
        assert!(!answer.body.is_empty());
        assert!(wire.is_closed());
    }
    let mut wire = Wire::open(node.broker.address);
    for (lines, bytes) in [(90, 600), (5_000, 2)] {
        let headers: String = (0..lines).map(|i| format!("x-{i}: {}\r\n", "y".repeat(bytes))).collect();
        wire.send(format!("GET /healthz HTTP/1.1\r\nHost: a\r\n{headers}\r\n")).unwrap();
        assert_eq!(wire.read().unwrap().status, 200, "{lines} lines");
    }
}

#[test]
fn an_answer_after_which_the_connection_ends_says_so() {
    let node = node("wire-close");
    for (target, length) in [("/v1/topics/t/produce", 2 << 20), ("/v1/topics/t/ack", 1 << 20), ("/v1/topics", 2 << 20)]
    {
        let mut wire = Wire::open(node.broker.address);
        let head =
            format!("POST {target} HTTP/1.1\r\nHost: a\r\nX-Narad-Client: a\r\nContent-Length: {length}\r\n\r\n");
        wire.send(head).unwrap();
        wire.send(vec![b'x'; length]).unwrap();
        let answer = wire.read().unwrap();
        assert_eq!((answer.status, answer.header("connection")), (413, Some("close")), "{target}");
        assert!(wire.is_closed());
    }
    // A small body that nobody reads does not cost the connection, whenever it comes.
    let mut wire = Wire::open(node.broker.address);
    for target in ["/nowhere", "/v1/topics/nosuch/produce", "/v1/topics/t/ack?receipt_handle=0:0:1"] {
        wire.send(format!("POST {target} HTTP/1.1\r\nHost: a\r\nX-Narad-Client: a\r\nContent-Length: 5\r\n\r\n"))
            .unwrap();
        std::thread::sleep(Duration::from_millis(20));
        wire.send("hello").unwrap();
        let answer = wire.read().unwrap();
        assert!(matches!(answer.status, 404 | 410) && answer.header("connection").is_none(), "{target}: {answer:?}");
    }
}

#[test]
fn noise_is_answered_400_or_closed_and_harms_nobody() {
    let node = node("wire-noise");
    for noise in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..],
        b"GET\r\n\r\n",
        b"GET /healthz HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\0\0\0\0\0\0\0\0\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nBad Header: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n: x\r\n\r\n",
        b"GET \xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n",
    ] {
        let mut wire = Wire::open(node.broker.address);
        wire.send(noise).unwrap();
        wire.stream().shutdown(std::net::Shutdown::Write).unwrap();
        if let Ok(answer) = wire.read() {
            assert!(matches!(answer.status, 400 | 404 | 505), "{noise:?}: {answer:?}");
        }
        assert!(wire.is_closed(), "{noise:?}");
    }
    assert_eq!(node.client().get("/healthz").unwrap().status, 200);
}

#[test]
fn head_is_get_without_its_body() {
    let node = node("wire-head");
    let mut wire = Wire::open(node.broker.address);
    for target in ["/healthz", "/readyz", "/v1/topics", "/v1/topics/t", "/nowhere", "/v1/topics/nosuch"] {
        wire.send(format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n")).unwrap();
        let got = wire.read().unwrap();
        wire.send(format!("HEAD {target} HTTP/1.1\r\nHost: a\r\n\r\n")).unwrap();
        let head = wire.read_head().unwrap();
        assert_eq!(head.status, got.status, "{target}");
        assert_eq!(head.header("content-length"), got.header("content-length"), "{target}");
    }
    // A HEAD on consume still leases.
    assert_eq!(node.client().post("/v1/topics/t/produce", b"once").unwrap().status, 202);
    wire.send("HEAD /v1/topics/t/consume?wait=5s HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    assert_eq!(wire.read_head().unwrap().status, 200);
    assert_eq!(node.client().get("/v1/topics/t/consume").unwrap().status, 204);
}

#[test]
fn names_and_keys_are_percent_decoded_byte_for_byte() {
    let node = node("wire-percent");
    node.create("a.b-c_D", "");
    let mut client = node.client();
    assert_eq!(client.get("/v1/topics/%61.b%2Dc_%44").unwrap().json()["name"], "a.b-c_D");
    assert_eq!(client.get("/v1/topics/%2e%2e").unwrap().status, 404);
    assert_eq!(client.get("/v1/topics/a%2Fb").unwrap().status, 404);
    assert_eq!(client.get("/v1/topics/%ff%00").unwrap().status, 404);
    assert!(matches!(client.get("/v1/topics/%zz").unwrap().status, 400 | 404));
    for (sent, key, encoding) in [
        ("a%20b+c", "a b c", None),
        ("%00%01%1f%22%5c%7f", "\u{0}\u{1}\u{1f}\"\\\u{7f}", None),
        ("%ff%fe", "//4=", Some("base64")),
        ("%c3%a9", "\u{e9}", None),
        ("%ed%a0%80", "7aCA", Some("base64")),
    ] {
        let target = format!("/v1/topics/t/produce?key={sent}");
        assert_eq!(client.post(&target, b"{\"n\": 1}").unwrap().status, 202, "{sent}");
        let answer = client.get("/v1/topics/t/consume?wait=5s").unwrap();
        let message = answer.json();
        assert_eq!(message["key"], key, "{sent}: {}", answer.text());
        assert_eq!(message["key_encoding"].as_str(), encoding, "{sent}");
        assert!(answer.text().contains("\"payload\":{\"n\": 1}"), "{}", answer.text());
    }
    // An empty key is none.
    assert_eq!(client.post("/v1/topics/t/produce?key=", b"\xff").unwrap().status, 202);
    let message = client.get("/v1/topics/t/consume?wait=5s").unwrap().json();
    assert!(message["key"].is_null());
    assert_eq!((&message["payload"], &message["payload_encoding"]), (&"/w==".into(), &"base64".into()));
}

#[test]
fn an_error_text_that_echoes_the_path_is_still_json() {
    let node = node("wire-echo");
    for name in ["%00%22%5c", "%ff%fe", "%0d%0aX-Injected:%20yes"] {
        for (method, rest) in [("GET", ""), ("GET", "/consume"), ("DELETE", "")] {
            let mut wire = Wire::open(node.broker.address);
            wire.send(format!("{method} /v1/topics/{name}{rest} HTTP/1.1\r\nHost: a\r\n\r\n")).unwrap();
            let answer = wire.read().unwrap();
            assert!(matches!(answer.status, 400 | 404), "{answer:?}");
            assert!(answer.json()["error"].is_string(), "{answer:?}");
            assert!(answer.header("x-injected").is_none());
        }
    }
}

#[test]
fn slow_headers_are_cut_after_five_seconds_and_slow_bodies_after_ten() {
    let node = node("wire-slow");
    let started = Instant::now();
    let mut headers = Wire::open(node.broker.address);
    headers.send("GET /healthz HTTP/1.1\r\n").unwrap();
    let mut body = Wire::open(node.broker.address);
    body.send(format!("{PRODUCE}Content-Length: 1000\r\n\r\n")).unwrap();
    let mut sent_headers = headers.stream().try_clone().unwrap();
    let mut sent_body = body.stream().try_clone().unwrap();
    let dripping = std::thread::spawn(move || {
        use std::io::Write;
        let mut alive = (true, true);
        while (alive.0 || alive.1) && started.elapsed() < Duration::from_secs(30) {
            alive.0 = alive.0 && sent_headers.write_all(b"x: y\r\n").is_ok();
            alive.1 = alive.1 && sent_body.write_all(b"z").is_ok();
            std::thread::sleep(Duration::from_millis(200));
        }
    });
    while headers.read().is_ok() {}
    let headers_ended = started.elapsed();
    let answer = body.read();
    assert!(answer.as_ref().map_or(true, |a| matches!(a.status, 400 | 408)), "{answer:?}");
    assert!(started.elapsed() < Duration::from_secs(25), "the body was not cut");
    assert!(headers_ended < Duration::from_secs(15), "{headers_ended:?}");
    drop((headers, body));
    dripping.join().unwrap();
    assert_eq!(stored(&node), 0);
}

#[test]
fn n37_a_client_that_leaves_mid_poll_passes_the_next_record_on_at_once() {
    let node = node("wire-leaves");
    for round in 0..5 {
        let mut leaver = Wire::open(node.broker.address);
        leaver.send("GET /v1/topics/t/consume?wait=10s HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
        std::thread::sleep(Duration::from_millis(30));
        drop(leaver);
        let mut next = Wire::open(node.broker.address);
        next.send("GET /v1/topics/t/consume?wait=10s HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
        std::thread::sleep(Duration::from_millis(30));
        let started = Instant::now();
        assert_eq!(node.client().post("/v1/topics/t/produce", format!("{round}").as_bytes()).unwrap().status, 202);
        let answer = next.read().unwrap();
        assert_eq!(answer.status, 200, "round {round}");
        // The visibility timeout, 30 s, would be the time of a lease that went to the one who left.
        assert!(started.elapsed() < Duration::from_secs(8), "round {round}: {:?}", started.elapsed());
    }
    eventually("the clients that left are counted as 499", || {
        let metrics = node.client().get("/metrics").unwrap().text();
        metrics.lines().any(|line| line.contains("status=\"499\"") && !line.ends_with(" 0"))
    });
}
