//! The command line against a real broker.

use std::process::Output;

use crate::support::{narad, Node};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn checked(arguments: &[&str], input: &[u8], code: i32) -> Output {
    let output = narad(arguments, input);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}\n{}\n{}", text(&output.stdout), text(&output.stderr));
    output
}

#[test]
fn topics_from_making_to_removing() {
    let node = Node::start("cli-topics", &["--shards", "1"]);
    let server = node.broker.address.to_string();
    let run = |arguments: &[&str], input: &[u8], code| checked(&[&["-s", &server], arguments].concat(), input, code);
    let made =
        run(&["topic", "add", "orders", "--partitions", "5", "--retention", "forever", "--visibility", "1m"], b"", 0);
    let made: serde_json::Value = serde_json::from_slice(&made.stdout).unwrap();
    assert_eq!(
        (&made["partitions"], &made["retention_ms"], &made["visibility_timeout_ms"]),
        (&5.into(), &0.into(), &60_000.into())
    );
    let twice = run(&["topic", "add", "orders"], b"", 1);
    assert!(
        text(&twice.stderr).starts_with("narad: ") && text(&twice.stderr).contains("(409)"),
        "{}",
        text(&twice.stderr)
    );
    run(&["topic", "add", "bad/name"], b"", 1);
    run(&["topic", "add", "x", "--partitions", "2"], b"", 1);
    run(&["topic", "add", "x", "--partitions", "many"], b"", 2);
    run(&["topic", "add", "x", "--retention", "soon"], b"", 2);
    run(&["topic", "add", "x", "--no-such-flag"], b"", 2);
    let listed = text(&run(&["topic", "ls"], b"", 0).stdout);
    let lines: Vec<Vec<&str>> = listed.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines, [vec!["NAME", "PARTITIONS", "RETENTION", "ROLE"], vec!["orders", "5", "forever", "-"]]);
    let json: serde_json::Value = serde_json::from_slice(&run(&["topics", "ls", "--json"], b"", 0).stdout).unwrap();
    assert_eq!(json[0]["name"], "orders");
    let info: serde_json::Value = serde_json::from_slice(&run(&["topic", "info", "orders"], b"", 0).stdout).unwrap();
    assert_eq!(info["partition_stats"].as_array().unwrap().len(), 5);
    assert!(text(&run(&["topic", "info", "nosuch"], b"", 1).stderr).contains("topic not found"));
    let kept = run(&["topic", "rm", "orders"], b"n\n", 1);
    assert!(text(&kept.stderr).contains("delete topic \"orders\" and all its data? [y/N]"));
    run(&["topic", "rm", "orders"], b"", 1);
    run(&["topic", "rm", "orders"], b"y\n", 0);
    run(&["topic", "rm", "orders", "-f"], b"", 1);
}

#[test]
fn pub_and_sub_carry_every_byte() {
    let node = Node::start("cli-pub-sub", &["--shards", "1"]);
    let server = node.broker.address.to_string();
    let run = |arguments: &[&str], input: &[u8], code| checked(&[&["-s", &server], arguments].concat(), input, code);
    run(&["topic", "add", "t"], b"", 0);
    // One argument.
    assert_eq!(text(&run(&["pub", "t", "hello", "-k", "key 1"], b"", 0).stderr), "accepted (5 bytes)\n");
    let line = text(&run(&["sub", "t", "--count", "1"], b"", 0).stdout);
    assert!(line.starts_with("[p") && line.contains(" key=key 1 ") && line.ends_with(" hello\n"), "{line}");
    // A file, byte for byte.
    let blob: Vec<u8> = (0..=255).collect();
    std::fs::write(node.scratch.path("blob"), &blob).unwrap();
    run(&["pub", "t", "-f", node.scratch.path("blob").to_str().unwrap()], b"", 0);
    let raw = run(&["sub", "t", "--count", "1", "--raw"], b"", 0).stdout;
    assert_eq!(raw, [blob.as_slice(), b"\n"].concat());
    // Standard input, line by line; empty lines are no messages.
    run(&["pub", "t"], b"a\n\nb\r\nc", 0);
    let mut lines: Vec<String> =
        text(&run(&["sub", "t", "--count", "3", "--raw"], b"", 0).stdout).lines().map(str::to_owned).collect();
    lines.sort();
    assert_eq!(lines, ["a", "b", "c"]);
    // Batches, and a rate that holds.
    let input: String = (0..2_500).map(|n| format!("line {n}\n")).collect();
    let sent = text(&run(&["pub", "t", "--batch", "1000"], input.as_bytes(), 0).stderr);
    assert!(sent.starts_with("accepted 2500 messages in "), "{sent}");
    let got = text(&run(&["sub", "t", "--count", "2500", "--raw"], b"", 0).stdout);
    assert_eq!(got.lines().collect::<std::collections::BTreeSet<_>>().len(), 2_500);
    let started = std::time::Instant::now();
    run(&["pub", "t", "x", "--count", "20", "--rate", "100"], b"", 0);
    assert!(started.elapsed() >= std::time::Duration::from_millis(150), "{:?}", started.elapsed());
    // Peek takes nothing; --no-ack leases.
    let peeked = text(&run(&["sub", "t", "--peek", "--partition", "0", "--from", "0", "--count", "1"], b"", 0).stdout);
    assert!(peeked.starts_with("[p0 @0]"), "{peeked}");
    run(&["sub", "t", "--count", "20", "--no-ack", "--raw"], b"", 0);
    assert_eq!(node.client().get("/v1/topics/t/consume").unwrap().status, 204);
    // Refusals.
    for wrong in [
        &["pub", "t", "m", "-f", "x"][..],
        &["pub", "t", "--count", "2"],
        &["pub", "t", "m", "--rate", "0"],
        &["pub", "t", "--batch", "1001"],
        &["pub", "t", "-f", "/nonexistent"],
        &["sub", "t", "--from", "3"],
        &["sub", "t", "--peek", "--no-ack"],
        &["sub"],
        &["pub", "t", "m", "--partition", "-1"],
    ] {
        run(wrong, b"", 2);
    }
    for failing in [
        &["pub", "nosuch", "m"][..],
        &["pub", "t", "m", "--partition", "99"],
        &["pub", "t", ""],
        &["sub", "nosuch", "--count", "1"],
    ] {
        let output = run(failing, b"", 1);
        assert!(text(&output.stderr).lines().last().unwrap().starts_with("narad: "), "{failing:?}");
    }
}

#[test]
fn a_server_that_is_down_is_exit_code_3_for_every_command() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    for command in [
        &["topic", "ls"][..],
        &["topic", "add", "t"],
        &["topic", "info", "t"],
        &["topic", "rm", "t", "-f"],
        &["pub", "t", "m"],
        &["sub", "t", "--count", "1"],
        &["sub", "t", "--peek"],
    ] {
        let output = checked(&[&["-s", &free], command].concat(), b"", 3);
        assert!(text(&output.stderr).contains("cannot reach"), "{command:?}: {}", text(&output.stderr));
    }
}
