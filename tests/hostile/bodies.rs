//! Batches: bombs, encodings, and the one bad message among a thousand.

use std::io::Write as _;

use crate::support::{error_of, Node, Wire};

fn node(name: &str) -> Node {
    let node = Node::start(name, &[]);
    node.create("t", "");
    node
}

fn stored(node: &Node) -> u64 {
    let details = node.client().get("/v1/topics/t").unwrap().json();
    details["partition_stats"].as_array().unwrap().iter().map(|p| p["high_watermark"].as_u64().unwrap()).sum()
}

fn batch(messages: &[String]) -> Vec<u8> {
    format!("{{\"messages\":[{}]}}", messages.join(",")).into_bytes()
}

fn send(node: &Node, encoding: &str, body: &[u8]) -> (u16, String) {
    let mut wire = Wire::open(node.broker.address);
    let head = format!(
        "POST /v1/topics/t/produce/batch HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Encoding: {encoding}\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    // An answer may come, and the connection end, before all was sent.
    let _ = wire.send(head).and_then(|()| wire.send(body));
    let answer = wire.read().unwrap();
    (answer.status, if answer.status == 202 { answer.text() } else { error_of(&answer) })
}

#[test]
fn the_thousandth_message_being_bad_stores_none() {
    let node = node("bodies-thousandth");
    let good = "{\"payload\":{\"n\":1}}".to_owned();
    let large = format!("{{\"payload\":\"{}\"}}", "x".repeat(1 << 20));
    for (bad, status, text) in [
        ("{\"payload\":\"\",\"payload_encoding\":\"base64\"}", 400, "message 999: message required"),
        ("{\"payload\":1,\"partition\":3}", 400, "message 999: invalid argument: partition out of range"),
        ("{\"payload\":1,\"partition\":-1}", 400, "message 999: "),
        ("{\"payload\":\"%%\",\"payload_encoding\":\"base64\"}", 400, "message 999: "),
        ("{\"payload\":\"aGk\",\"payload_encoding\":\"base64\"}", 400, "message 999: "),
        ("{\"payload\":\"aGk=\",\"payload_encoding\":\"hex\"}", 400, "message 999: "),
        ("{\"payload\":1,\"payload_encoding\":\"base64\"}", 400, "message 999: "),
        ("{\"payload\":1,\"key\":\"!\",\"key_encoding\":\"base64\"}", 400, "message 999: "),
        ("{\"key\":\"k\"}", 400, "message 999: "),
        (&large, 413, "message 999: message too large"),
        ("{\"payload\":1,\"bogus\":2}", 400, "invalid json: json: unknown field \"bogus\""),
        ("{\"payload\":}", 400, "invalid json"),
    ] {
        let mut messages = vec![good.clone(); 999];
        messages.push(bad.to_owned());
        let (got, said) = send(&node, "identity", &batch(&messages));
        let short = &bad[..bad.len().min(60)];
        assert!(got == status && said.starts_with(text), "{short}: {got} {said:?}");
    }
    let (status, text) = send(&node, "", &batch(&vec![good.clone(); 1001]));
    assert_eq!((status, text.as_str()), (400, "too many messages: more than 1000"));
    assert_eq!(stored(&node), 0);
    let (status, text) = send(&node, "identity", &batch(&vec![good; 1000]));
    assert_eq!((status, text.as_str()), (202, "{\"accepted\":1000}\n"));
}

#[test]
fn pass_one_is_over_before_pass_two_answers() {
    let node = node("bodies-passes");
    let messages = ["{\"payload\":1,\"partition\":9}", "{\"payload\":\"\",\"payload_encoding\":\"base64\"}"];
    let (status, text) = send(&node, "", &batch(&messages.map(str::to_owned)));
    assert_eq!((status, text.as_str()), (400, "message 1: message required"));
}

#[test]
fn malformed_batches_are_400_and_store_nothing() {
    let node = node("bodies-malformed");
    for body in [
        "",
        "{",
        "{}",
        "[]",
        "null",
        "{\"messages\":[]}",
        "{\"messages\":null}",
        "{\"messages\":{}}",
        "{\"messages\":[{\"payload\":1}]} {}",
        "{\"messages\":[{\"payload\":1}]}x",
        "{\"messages\":[null]}",
        "{\"messages\":[1]}",
        "{\"messages\":[{\"payload\":1}],\"x\":1}",
        "{\"Messages\":[{\"payload\":1}]}",
        "{\"messages\":[{\"payload\":1},]}",
        "{\"messages\":[{\"payload\":01}]}",
        "{\"messages\":[{\"payload\":\"\u{1}\"}]}",
        "{\"messages\":[{\"payload\":1,\"partition\":1.5}]}",
        "{\"messages\":[{\"payload\":1,\"partition\":\"1\"}]}",
    ] {
        let (status, text) = send(&node, "", body.as_bytes());
        assert!(status == 400 && !text.is_empty(), "{body}: {status} {text}");
    }
    let deep = format!("{{\"messages\":[{{\"payload\":{}{}}}]}}", "[".repeat(100_000), "]".repeat(100_000));
    let (status, _) = send(&node, "", deep.as_bytes());
    assert!(matches!(status, 202 | 400), "{status}");
    let after = stored(&node);
    assert!(after <= 1, "{after}");
    for query in ["?key=a", "?partition=1"] {
        let answer = node
            .client()
            .post(&format!("/v1/topics/t/produce/batch{query}"), b"{\"messages\":[{\"payload\":1}]}")
            .unwrap();
        assert_eq!(answer.status, 400, "{query}");
    }
}

#[test]
fn compression_bombs_are_413_and_damage_is_400() {
    let node = node("bodies-bombs");
    let gzip = |data: &[u8]| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        encoder.write_all(data).unwrap();
        encoder.finish().unwrap()
    };
    let zstd = |data: &[u8]| zstd::bulk::compress(data, 3).unwrap();
    // A gibibyte in a few frames' worth of bytes, without its size in the header.
    let mut bomb = zstd::stream::Encoder::new(Vec::new(), 3).unwrap();
    let zeros = vec![b' '; 1 << 20];
    for _ in 0..256 {
        bomb.write_all(&zeros).unwrap();
    }
    let bomb = bomb.finish().unwrap();
    assert!(bomb.len() < 1 << 20);
    let gzip_bomb = gzip(&vec![b' '; 64 << 20]);
    for (encoding, body) in [("zstd", &bomb), ("gzip", &gzip_bomb)] {
        assert_eq!(send(&node, encoding, body).0, 413, "{encoding}");
    }
    // A frame that declares a window of 2 GiB.
    let window = [0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xa8, 0x01, 0x00, 0x00];
    assert!(matches!(send(&node, "zstd", &window).0, 400 | 413));
    let body = batch(&["{\"payload\":1}".to_owned()]);
    for (encoding, packed) in [("zstd", zstd(&body)), ("gzip", gzip(&body))] {
        for cut in [0, 1, packed.len() / 2, packed.len() - 1] {
            assert_eq!(send(&node, encoding, &packed[..cut]).0, 400, "{encoding} cut at {cut}");
        }
        let mut flipped = packed.clone();
        let middle = flipped.len() / 2;
        flipped[middle] ^= 0xff;
        assert_eq!(send(&node, encoding, &flipped).0, 400, "{encoding} flipped");
        let trailing = [packed.clone(), b"junk".to_vec()].concat();
        assert_eq!(send(&node, encoding, &trailing).0, 400, "{encoding} with junk behind it");
    }
    assert_eq!(stored(&node), 0);
    let wanted = "unsupported Content-Encoding: want zstd, gzip or none";
    for encoding in ["br", "deflate", "gzip, zstd", "x-gzip", "\u{e9}"] {
        assert_eq!(send(&node, encoding, &body), (415, wanted.to_owned()), "{encoding}");
    }
    for (encoding, packed) in [("zstd", zstd(&body)), ("GZIP", gzip(&body)), ("Identity", body.clone()), ("", body)] {
        assert_eq!(send(&node, encoding, &packed), (202, "{\"accepted\":1}\n".to_owned()), "{encoding}");
    }
}

#[test]
fn sixteen_mebibytes_pass_and_one_byte_more_does_not() {
    let node = node("bodies-sixteen");
    let limit = 16 << 20;
    let messages = |total: usize| {
        let filler = "x".repeat((1 << 20) - 2000);
        let mut body = batch(&vec![format!("{{\"payload\":\"{filler}\"}}"); 16]);
        body.resize(total, b' ');
        body
    };
    assert_eq!(send(&node, "", &messages(limit)), (202, "{\"accepted\":16}\n".to_owned()));
    assert_eq!(send(&node, "", &messages(limit + 1)).0, 413);
    let packed = zstd::bulk::compress(&messages(limit + 1), 3).unwrap();
    assert_eq!(send(&node, "zstd", &packed).0, 413);
    assert_eq!(stored_eventually(&node, 16), 16);
}

fn stored_eventually(node: &Node, expected: u64) -> u64 {
    crate::support::eventually("the batch is in its partitions", || stored(node) >= expected);
    stored(node)
}

#[test]
fn a_full_body_budget_is_503_and_comes_back() {
    let node = {
        let node = Node::start("bodies-budget", &["--shards", "1", "--config", &budget_file()]);
        node.create("t", "");
        node
    };
    let head = "POST /v1/topics/t/produce/batch HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 4000000\r\n\r\n";
    let hold = || {
        let mut holder = Wire::open(node.broker.address);
        holder.send(head).unwrap();
        // The holder is refused itself when the other one came first.
        let _ = holder.send(vec![b' '; 3_500_000]);
        std::thread::sleep(std::time::Duration::from_millis(50));
        holder
    };
    let mut holder = hold();
    let body = {
        let mut body = batch(&["{\"payload\":1}".to_owned()]);
        body.resize(3_000_000, b' ');
        body
    };
    crate::support::eventually("the second large body is refused", || {
        let answer =
            node.client().request("POST", "/v1/topics/t/produce/batch", &[("Content-Type", "application/json")], &body);
        let answer = answer.unwrap();
        if answer.status == 202 {
            holder = hold();
            return false;
        }
        assert_eq!(answer.status, 503);
        assert_eq!(answer.header("retry-after"), Some("1"));
        assert_eq!(error_of(&answer), "batch produce bodies in flight on this node are at their limit; retry");
        true
    });
    // A small one never touches the budget.
    assert_eq!(send(&node, "", &batch(&["{\"payload\":1}".to_owned()])).0, 202);
    drop(holder);
    crate::support::eventually("the budget is free again", || send(&node, "", &body).0 == 202);
    let _ = std::fs::remove_file(budget_file());
}

fn budget_file() -> String {
    let path = std::env::temp_dir().join(format!("narad-hostile-budget-{}.json", std::process::id()));
    std::fs::write(&path, "{\"http\":{\"max_batch_body_bytes_in_flight\":4194304}}").unwrap();
    path.to_string_lossy().into_owned()
}
