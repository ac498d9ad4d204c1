//! The API route by route: each refusal with its exact status and text.

use narad_harness::client::Response;

use crate::support::{error_of, Node, Wire};

const GUARD: &str =
    "state-changing requests must send Content-Type: application/json or application/octet-stream, or an X-Narad-Client header";
const GONE: &str = "receipt handle no longer matches an active reservation";

/// What an answer must say: `Json` in the error envelope, `Plain` as text, `Body` byte for byte.
#[derive(Debug)]
enum Says {
    Json(&'static str),
    /// The envelope's text contains this.
    About(&'static str),
    Plain(&'static str),
    Body(&'static str),
    Nothing,
}
use Says::*;

fn objection(head: bool, answer: &Response, status: u16, says: &Says) -> Option<String> {
    if head && answer.status == status && answer.body.is_empty() {
        return None;
    }
    let text = answer.text();
    let content_type = answer.header("content-type").unwrap_or_default();
    let json = content_type == "application/json" && text.ends_with('\n') && text.lines().count() == 1;
    let said = match says {
        Json(expected) => json && error_of(answer) == *expected,
        About(part) => json && error_of(answer).contains(part),
        Plain(expected) => content_type.starts_with("text/plain") && text.trim_end() == *expected,
        Body(expected) => text == *expected,
        Nothing => text.is_empty(),
    };
    let length = match (answer.status, answer.header("content-length")) {
        (204, length) => length.is_none() && answer.header("content-type").is_none(),
        (_, length) => length.is_some_and(|length| length == answer.body.len().to_string()),
    };
    let good = answer.status == status && said && length;
    (!good).then(|| format!("{} {:?} {text:?}", answer.status, answer.headers))
}

type Case<'a> = (&'a str, &'a str, &'a str, &'a [u8], u16, Says);

const OCTETS: &str = "Content-Type: application/octet-stream\r\n";
const CLIENT: &str = "X-Narad-Client: test\r\n";

fn judge(node: &Node, cases: &[Case<'_>]) {
    let mut wrong = Vec::new();
    let mut wire = Wire::open(node.broker.address);
    for (method, target, headers, body, status, says) in cases {
        let head = format!("{method} {target} HTTP/1.1\r\nHost: a\r\n{headers}Content-Length: {}\r\n\r\n", body.len());
        let sent = wire.send(head).and_then(|()| wire.send(body));
        let answer = match (sent, *method) {
            (Err(error), _) => Err(error),
            (Ok(()), "HEAD") => wire.read_head(),
            (Ok(()), _) => wire.read(),
        };
        match answer {
            Ok(answer) => {
                if let Some(objection) = objection(*method == "HEAD", &answer, *status, says) {
                    wrong.push(format!("{method} {target}\n  expected {status} {says:?}\n  answered {objection}"));
                }
                if answer.header("connection") == Some("close") {
                    wire = Wire::open(node.broker.address);
                }
            }
            Err(error) => {
                wrong.push(format!("{method} {target}: no answer: {error}"));
                wire = Wire::open(node.broker.address);
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {} cases:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

#[test]
fn every_refusal_before_the_handler_has_its_status_and_text() {
    let node = Node::start("routes-pipeline", &[]);
    node.create("t", "");
    judge(
        &node,
        &[
            ("POST", "/v1/topics/t/produce", "", b"x", 415, Json(GUARD)),
            ("POST", "/v1/topics/t/produce", "Content-Type: text/plain\r\n", b"x", 415, Json(GUARD)),
            (
                "POST",
                "/v1/topics/t/produce",
                "Content-Type: application/x-www-form-urlencoded\r\n",
                b"x",
                415,
                Json(GUARD),
            ),
            ("POST", "/v1/topics/t/produce", "X-Narad-Client:\r\n", b"x", 415, Json(GUARD)),
            ("POST", "/v1/topics/t/produce", "Content-Type: application/json; charset=utf-8\r\n", b"x", 202, Nothing),
            ("POST", "/v1/topics/t/produce", "Content-Type: Application/JSON\r\n", b"x", 202, Nothing),
            ("POST", "/v1/topics/t/produce", CLIENT, b"x", 202, Nothing),
            ("POST", "/v1/topics/t/ack?receipt_handle=0:0:1", "", b"", 415, Json(GUARD)),
            ("PUT", "/v1/topics/t", "", b"", 415, Json(GUARD)),
            ("PATCH", "/nowhere", "", b"", 415, Json(GUARD)),
            ("POST", "/nowhere", CLIENT, b"", 404, Plain("404 page not found")),
            ("GET", "/nowhere", "", b"", 404, Plain("404 page not found")),
            ("GET", "/v1", "", b"", 404, Plain("404 page not found")),
            ("GET", "/v1/topics/", "", b"", 404, Plain("404 page not found")),
            ("GET", "/v1/topics//consume", "", b"", 404, Plain("404 page not found")),
            ("GET", "/v1/topics/t/consume/", "", b"", 404, Plain("404 page not found")),
            ("OPTIONS", "/v1/topics", "", b"", 405, Plain("Method Not Allowed")),
            ("PUT", "/v1/topics/t", CLIENT, b"", 405, Plain("Method Not Allowed")),
            ("GET", "/v1/topics/t/produce", "", b"", 405, Plain("Method Not Allowed")),
            ("DELETE", "/v1/topics/t/consume", "", b"", 405, Plain("Method Not Allowed")),
            ("BREW", "/healthz", "", b"", 405, Plain("Method Not Allowed")),
            ("GET", "/healthz", "", b"", 200, Body("{\"status\":\"ok\"}\n")),
            ("GET", "/readyz", "", b"", 200, Body("{\"status\":\"ready\"}\n")),
        ],
    );
    let mut wire = Wire::open(node.broker.address);
    for (method, target, allowed) in [
        ("OPTIONS", "/v1/topics", "GET, HEAD, POST"),
        ("GET", "/v1/topics/t/produce", "POST"),
        ("PUT", "/v1/topics/t", "DELETE, GET, HEAD, PATCH"),
    ] {
        wire.send(format!("{method} {target} HTTP/1.1\r\nHost: a\r\n{CLIENT}\r\n")).unwrap();
        let answer = wire.read().unwrap();
        let mut named: Vec<&str> = answer.header("allow").unwrap_or_default().split(", ").collect();
        named.sort_unstable();
        assert_eq!(named.join(", "), allowed, "{method} {target}");
    }
}

#[test]
fn topics_refuse_what_is_not_a_topic() {
    let node = Node::start("routes-topics", &[]);
    node.create("Orders", "");
    let long = "a".repeat(201);
    let long_name: &'static str = Box::leak(format!("{{\"name\":\"{long}\"}}").into_boxed_str());
    let longest: &'static str = Box::leak(format!("{{\"name\":\"{}\"}}", "b".repeat(200)).into_boxed_str());
    let huge: Vec<u8> = [b"{\"name\":\"".to_vec(), vec![b'a'; 1 << 20], b"\"}".to_vec()].concat();
    let create = |body: &'static str, status, says| ("POST", "/v1/topics", CLIENT, body.as_bytes(), status, says);
    let patch =
        |body: &'static str, status, says| ("PATCH", "/v1/topics/Orders", CLIENT, body.as_bytes(), status, says);
    judge(
        &node,
        &[
            create("", 400, About("")),
            create("{", 400, About("invalid json")),
            create("[]", 400, About("invalid json")),
            create("null", 400, About("")),
            create("{}", 400, About("")),
            create("{\"name\":1}", 400, About("invalid json")),
            create("{\"name\":\"\"}", 400, About("")),
            create("{\"name\":\".\"}", 400, About("")),
            create("{\"name\":\"..\"}", 400, About("")),
            create("{\"name\":\"a/b\"}", 400, About("")),
            create("{\"name\":\"a\\u0000b\"}", 400, About("")),
            create("{\"name\":\"\u{e9}\"}", 400, About("")),
            create(long_name, 400, About("")),
            create("{\"name\":\"a\",\"bogus\":1}", 400, Json("invalid json: json: unknown field \"bogus\"")),
            create("{\"Name\":\"a\"}", 400, Json("invalid json: json: unknown field \"Name\"")),
            create("{\"name\":\"a\"} {}", 400, About("")),
            create("{\"name\":\"a\"}x", 400, About("")),
            create("{\"name\":\"a\",\"partitions\":2}", 400, About("")),
            create("{\"name\":\"a\",\"partitions\":109}", 400, About("")),
            create("{\"name\":\"a\",\"partitions\":-1}", 400, About("")),
            create("{\"name\":\"a\",\"partitions\":3.5}", 400, About("")),
            create("{\"name\":\"a\",\"partitions\":\"3\"}", 400, About("")),
            create("{\"name\":\"a\",\"partitions\":99999999999999999999999}", 400, About("")),
            create("{\"name\":\"a\",\"retention_ms\":3599999}", 400, About("")),
            create("{\"name\":\"a\",\"retention_ms\":-1}", 400, About("")),
            create("{\"name\":\"a\",\"visibility_timeout_ms\":-1}", 400, About("")),
            create("{\"name\":\"a\",\"max_in_flight_per_partition\":-1}", 400, About("")),
            create("{\"name\":\"a\",\"max_acked_ahead_per_partition\":-5}", 400, About("")),
            create("{\"name\":\"a\",\"fanout_delay_ms\":5}", 400, About("")),
            create("{\"name\":\"a\",\"schema\":null}", 400, About("")),
            create("{\"name\":\"Orders\"}", 409, About("exists")),
            create("{\"name\":\"orders\"}", 409, About("differs only in letter case")),
            ("POST", "/v1/topics", CLIENT, &huge, 413, About("")),
            patch("", 400, About("invalid json")),
            patch("{}", 400, Json("nothing to change")),
            patch("{\"visibility_timeout_ms\":1}", 400, About("unknown field \"visibility_timeout_ms\"")),
            patch("{\"retention_ms\":1}", 400, About("retention_ms")),
            patch("{\"partitions\":3}", 400, Json("partitions must be more than the topic has, which is 3")),
            patch("{\"schema\":null}", 400, About("schema")),
            patch("{\"schema\":true}", 501, Json("schemas are not available on this node yet")),
            ("PATCH", "/v1/topics/Orders", CLIENT, &huge, 413, About("")),
            ("PATCH", "/v1/topics/nosuch", CLIENT, b"{\"retention_ms\":0}", 404, Json("topic not found")),
            patch("{\"retention_ms\":3600000}", 200, About("")),
            ("GET", "/v1/topics/nosuch", "", b"", 404, Json("topic not found")),
            ("GET", "/v1/topics/orders", "", b"", 404, Json("topic not found")),
            ("GET", "/v1/topics/Orders?partition=3", "", b"", 400, About("")),
            ("GET", "/v1/topics/Orders?partition=-1", "", b"", 400, About("")),
            ("DELETE", "/v1/topics/nosuch", "", b"", 404, Json("topic not found")),
            ("GET", "/v1/topics?limit=0", "", b"", 400, About("")),
            ("GET", "/v1/topics?limit=-1", "", b"", 400, About("")),
            ("GET", "/v1/topics?limit=x", "", b"", 400, About("")),
            ("GET", "/v1/topics?limit=9999", "", b"", 200, About("")),
            ("GET", "/v1/topics?limit=99999999999999999999999", "", b"", 400, About("")),
            create(longest, 201, About("")),
        ],
    );
    // Nothing of what was refused exists.
    let names: Vec<String> = node.client().get("/v1/topics").unwrap().json()["topics"]
        .as_array()
        .unwrap()
        .iter()
        .map(|topic| topic["name"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(names, ["Orders".to_owned(), "b".repeat(200)]);
}

#[test]
fn produce_consume_and_ack_refuse_with_their_texts() {
    let node = Node::start("routes-messages", &[]);
    node.create("t", "");
    let large = vec![b'x'; (1 << 20) + 1];
    let largest = vec![b'x'; 1 << 20];
    let handles = |count: usize| format!("{{\"receipt_handles\":[{}]}}", vec!["\"0:0:1\""; count].join(","));
    let hundred = handles(101);
    let fat = format!("{{\"receipt_handles\":[\"{}\"]}}", "1".repeat(64 << 10));
    let produce = |query: &'static str, body: &'static [u8], status, says| {
        let target: &'static str = Box::leak(format!("/v1/topics/t/produce{query}").into_boxed_str());
        ("POST", target, OCTETS, body, status, says)
    };
    let consume = |query: &'static str, status, says| {
        let target: &'static str = Box::leak(format!("/v1/topics/t/consume{query}").into_boxed_str());
        ("GET", target, CLIENT, &b""[..], status, says)
    };
    let ack = |query: &'static str, body: &'static [u8], status, says| {
        let target: &'static str = Box::leak(format!("/v1/topics/t/ack{query}").into_boxed_str());
        ("POST", target, CLIENT, body, status, says)
    };
    const RANGE: &str = "invalid argument: partition out of range";
    judge(
        &node,
        &[
            produce("", b"", 400, Json("message required")),
            produce("?partition=3", b"x", 400, Json(RANGE)),
            produce("?partition=4294967296", b"x", 400, About("partition")),
            produce("?partition=-1", b"x", 400, About("partition")),
            produce("?partition=1x", b"x", 400, About("partition")),
            produce("?partition=1&partition=1", b"x", 400, About("partition")),
            produce("?key=a&key=b", b"x", 400, About("key")),
            produce("?key=%zz", b"x", 400, About("")),
            ("POST", "/v1/topics/nosuch/produce", OCTETS, b"x", 404, Json("topic not found")),
            ("POST", "/v1/topics/t/produce", OCTETS, &large, 413, About("")),
            // Consume of nothing, before anything is stored.
            consume("", 204, Nothing),
            consume("?wait=0", 204, Nothing),
            consume("?wait=1ms", 204, Nothing),
            consume("?wait=-1s", 400, About("wait")),
            consume("?wait=10", 400, About("wait")),
            consume("?wait=abc", 400, About("wait")),
            consume("?wait=", 204, Nothing),
            consume("?partition=3", 400, Json(RANGE)),
            consume("?partition=x", 400, About("partition")),
            consume("?offset=0", 400, Json("partition required for replay-mode consume")),
            consume("?offset=-1&partition=0", 400, About("offset")),
            consume("?offset=0&partition=3", 400, Json(RANGE)),
            consume("?offset=0&partition=0", 204, Nothing),
            consume("?offset=18446744073709551615&partition=0", 204, Nothing),
            consume("?offset=0&partition=0&max=1", 400, About("max")),
            consume("?max=0", 400, About("max")),
            consume("?max=101", 400, About("max")),
            consume("?max=-1", 400, About("max")),
            consume("?max=ten", 400, About("max")),
            consume("?max=100", 204, Nothing),
            ("GET", "/v1/topics/t/consume?max=1", "", b"", 400, About("X-Narad-Client")),
            ("HEAD", "/v1/topics/t/consume?max=1", "", b"", 400, About("")),
            ("GET", "/v1/topics/nosuch/consume", "", b"", 404, Json("topic not found")),
            ("GET", "/v1/topics/nosuch/consume?wait=5s", "", b"", 404, Json("topic not found")),
            ("POST", "/v1/topics/t/produce", OCTETS, &largest, 202, Nothing),
            ack("", b"", 400, Json("receipt_handle required")),
            ack("?receipt_handle=", b"", 400, Json("receipt_handle required")),
            ack("?receipt_handle=", b"{\"receipt_handles\":[\"0:0:1\"]}", 400, Json("receipt_handle required")),
            ack("?receipt_handle=0:0:1", b"", 410, Json(GONE)),
            ack("?receipt_handle=0:0:1", b"ignored", 410, Json(GONE)),
            ack("?receipt_handle=107:0:1", b"", 410, Json(GONE)),
            ack("?receipt_handle=0:0", b"", 400, About("")),
            ack("?receipt_handle=a:b:c", b"", 400, About("")),
            ack("?receipt_handle=0:0:-1", b"", 400, About("")),
            ack("?receipt_handle=0:0:1&extend=maybe", b"", 400, About("extend")),
            ack("?receipt_handle=0:0:1&extend=true", b"", 410, Json(GONE)),
            ack("?receipt_handle=0:0:1&extend=0", b"", 410, Json(GONE)),
            ("POST", "/v1/topics/nosuch/ack?receipt_handle=0:0:1", CLIENT, b"", 404, Json("topic not found")),
            ("POST", "/v1/topics/nosuch/ack?receipt_handle=zz", CLIENT, b"", 400, About("")),
            ack("", b"{\"receipt_handles\":[]}", 400, About("receipt_handle")),
            ack("", b"{\"receipt_handles\":[\"0:0:1\"],\"x\":1}", 400, Json("invalid json: json: unknown field \"x\"")),
            ack("", b"{\"receipt_handles\":", 400, About("")),
            ack("", b"{\"receipt_handles\":[\"0:0:1\"]} 1", 400, About("")),
            (
                "POST",
                "/v1/topics/t/ack",
                CLIENT,
                hundred.as_bytes(),
                400,
                Json("too many receipt_handles: more than 100"),
            ),
            ("POST", "/v1/topics/t/ack", CLIENT, fat.as_bytes(), 413, About("")),
            ("POST", "/v1/topics/t/ack", CLIENT, b"{\"receipt_handles\":[\"0:0:1\",\"nonsense\"]}", 200, About("")),
            (
                "POST",
                "/v1/topics/nosuch/ack",
                CLIENT,
                b"{\"receipt_handles\":[\"0:0:1\"]}",
                404,
                Json("topic not found"),
            ),
        ],
    );
    let answer = node.client().post("/v1/topics/t/ack", b"{\"receipt_handles\":[\"0:0:1\",\"nonsense\"]}").unwrap();
    let results = answer.json()["results"].clone();
    assert_eq!(results[0]["status"], 410);
    assert_eq!(results[0]["error"], GONE);
    assert_eq!(results[1]["status"], 400);
    let clamped = node.client().get("/v1/topics/t/consume?wait=1h&partition=1").map(|a| a.status);
    // The one record may lie in any partition; a poll that finds it, or waits out its time, says that it was cut.
    assert!(matches!(clamped, Ok(200 | 204)), "{clamped:?}");
}
