use std::io::Write;

use narad_shards::api::ProduceError;

use super::fake::Stored;
use super::*;

const PATH: &str = "/v1/topics/t/produce";
const BATCH: &str = "/v1/topics/t/produce/batch";

fn error(text: &str) -> String {
    format!("{{\"error\":\"{text}\"}}\n")
}

#[test]
fn a_message_is_stored_byte_for_byte() {
    run(|world| async move {
        let body: Vec<u8> = (0..=255).collect();
        let answer = world.ask("POST", "/v1/topics/t/produce?key=a%FF+b&partition=2&x=%zz", JSON, &body).await;
        answer.expect(202, "");
        assert_eq!(answer.header("content-type"), None);
        let stored = Stored { topic: "t".to_owned(), key: b"a\xff b".to_vec(), payload: body, partition: Some(2) };
        assert_eq!(*world.broker().stored.borrow(), [stored]);
        world.broker().stored.borrow_mut().clear();
        world.ask("POST", "/v1/topics/%74/produce?key=&partition=", JSON, b"{").await.expect(202, "");
        let stored = Stored { topic: "t".to_owned(), key: vec![], payload: b"{".to_vec(), partition: None };
        assert_eq!(*world.broker().stored.borrow(), [stored]);
    });
}

#[test]
fn refusals_of_a_single_produce() {
    run(|world| async move {
        let once = |name: &str| error(&format!("query parameter {name} may be given once"));
        let number = error("query parameter partition must be an integer of at least 0");
        for (target, body, status, text) in [
            (PATH, "", 400, error("message required")),
            ("/v1/topics/none/produce", "1", 404, error("topic not found")),
            ("/v1/topics/%ff/produce", "1", 404, error("topic not found")),
            ("/v1/topics/t/produce?partition=3", "1", 400, error("invalid argument: partition out of range")),
            ("/v1/topics/t/produce?partition=-1", "1", 400, error("invalid argument: partition out of range")),
            ("/v1/topics/t/produce?partition=4294967296", "1", 400, error("invalid argument: partition out of range")),
            ("/v1/topics/t/produce?partition=x", "1", 400, number.clone()),
            ("/v1/topics/t/produce?partition=1.5", "1", 400, number),
            ("/v1/topics/t/produce?key=a&key=b", "1", 400, once("key")),
            ("/v1/topics/t/produce?partition=1&partition=1", "1", 400, once("partition")),
            ("/v1/topics/t/produce?key=%4", "1", 400, error("query parameter key is not valid percent-encoding")),
        ] {
            world.ask("POST", target, JSON, body.as_bytes()).await.expect(status, &text);
        }
        assert!(world.broker().stored.borrow().is_empty());
    });
}

#[test]
fn e22_e9_what_the_log_cannot_take() {
    run(|world| async move {
        for (cause, status, text, retry, outcome) in [
            (ProduceError::LogFailed("EIO".to_owned()), 500, "produce failed", None, "unknown"),
            (
                ProduceError::Unavailable("ENOSPC".to_owned()),
                503,
                "the ingress log cannot grow at the moment, retry",
                Some("1"),
                "not-stored",
            ),
            (ProduceError::MemoryExhausted, 503, "memory budget exhausted, retry", Some("1"), "not-stored"),
            (ProduceError::DiskReserve, 503, "free disk space is under the reserve, retry", Some("1"), "not-stored"),
            (
                ProduceError::Draining,
                503,
                "this node is shutting down and takes no new produce, retry",
                Some("1"),
                "not-stored",
            ),
        ] {
            for (target, body) in [(PATH, "1"), (BATCH, "{\"messages\":[{\"payload\":1}]}")] {
                world.broker().produce_error.replace(Some(cause.clone()));
                let answer = world.ask("POST", target, JSON, body.as_bytes()).await;
                answer.expect(status, &error(text));
                assert_eq!(answer.header("retry-after"), retry);
                assert_eq!(answer.header("x-narad-outcome"), Some(outcome));
            }
        }
    });
}

#[test]
fn n41_a_declared_tebibyte_is_refused_at_once() {
    run(|world| async move {
        for (target, text) in [(PATH, "message too large"), (BATCH, "request body too large")] {
            let mut client = world.connect();
            let head = format!("POST {target} HTTP/1.1\r\n{JSON}Content-Length: 1099511627776\r\n\r\nabc");
            client.send(head.as_bytes()).await;
            client.answer().await.expect("an answer").expect(413, &error(text));
            // It goes on sending for a while; the answer must not be lost to a reset.
            client.send(&[0; 10_000]).await;
            assert_eq!(client.closed().await, b"");
        }
    });
}

#[test]
fn limits_of_a_single_message() {
    run(|world| async move {
        let largest = vec![b'x'; 1 << 20];
        world.ask("POST", PATH, JSON, &largest).await.expect(202, "");
        assert_eq!(world.broker().stored.borrow()[0].payload, largest);
        let larger = vec![b'x'; (1 << 20) + 1];
        world.ask("POST", PATH, JSON, &larger).await.expect(413, &error("message too large"));
        // Without a declared length the cap holds all the same.
        let mut client = world.connect();
        client.send(format!("POST {PATH} HTTP/1.1\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n").as_bytes()).await;
        for _ in 0..17 {
            client.send(b"10000\r\n").await;
            client.send(&larger[..0x10000]).await;
            client.send(b"\r\n").await;
        }
        client.answer().await.expect("an answer").expect(413, &error("message too large"));
        let mut client = world.connect();
        let chunked =
            format!("POST {PATH} HTTP/1.1\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n");
        client.send(chunked.as_bytes()).await;
        client.answer().await.expect("an answer").expect(202, "");
        assert_eq!(world.broker().stored.borrow()[1].payload, b"abcde");
        let broken = chunked.replace("2\r\nde", "zz\r\n");
        let mut client = world.connect();
        client.send(broken.as_bytes()).await;
        client.answer().await.expect("an answer").expect(400, &error("invalid chunked request body"));
        assert_eq!(world.broker().stored.borrow().len(), 2);
    });
}

/// RFC 9112, 6.1: what would be stored is not what the client meant.
#[test]
fn a_transfer_coding_that_is_not_undone_stores_nothing_and_ends_the_connection() {
    run(|world| async move {
        let lines = ["gzip, chunked", "identity, chunked", "chunked, chunked", "gzip\r\nTransfer-Encoding: chunked"];
        for coding in lines {
            let mut client = world.connect();
            let request = format!(
                "POST {PATH} HTTP/1.1\r\n{JSON}Transfer-Encoding: {coding}\r\n\r\n3\r\nabc\r\n0\r\n\r\n{}",
                String::from_utf8_lossy(&request("POST", PATH, JSON, b"behind"))
            );
            client.send(request.as_bytes()).await;
            let answer = client.answer().await.expect("an answer");
            assert!(matches!(answer.status, 501 | 400), "{coding}: {}", answer.status);
            assert_eq!(answer.header("connection"), Some("close"), "{coding}");
            assert!(client.answer().await.is_none(), "{coding}");
        }
        assert_eq!(world.broker().stored.borrow().len(), 0);
        let mut client = world.connect();
        let text = format!("POST {PATH} HTTP/1.1\r\n{JSON}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n");
        client.send(text.as_bytes()).await;
        assert_eq!(client.answer().await.expect("an answer").status, 501);
    });
}

#[test]
fn half_bodies_store_nothing() {
    run(|world| async move {
        let half = format!("POST {PATH} HTTP/1.1\r\n{JSON}Content-Length: 10\r\n\r\nhalf");
        let mut gone = world.connect();
        gone.send(half.as_bytes()).await;
        rt::yield_now().await;
        drop(gone.end);
        gone.served.await;
        let mut slow = world.connect();
        let start = rt::now();
        slow.send(half.as_bytes()).await;
        let late = "{\"error\":\"the request body did not arrive in time\"}\n";
        slow.answer().await.expect("an answer").expect(408, late);
        assert_eq!((rt::now() - start).as_secs(), 10);
        assert!(world.broker().stored.borrow().is_empty());
        let left =
            "narad_http_requests_total{route=\"POST /v1/topics/{topic}/produce\",method=\"POST\",status=\"499\"}";
        assert_eq!(world.metric(left).await, Some(1.0));
    });
}

#[test]
fn a_batch_is_stored_whole_and_in_order() {
    run(|world| async move {
        let body = br#"{"messages":[{"payload": {"a": 1} ,"key":"k"},{"payload":"aGk=","payload_encoding":"base64","partition":2}]}"#;
        world.ask("POST", BATCH, JSON, body).await.expect(202, "{\"accepted\":2}\n");
        let stored = world.broker().stored.borrow();
        let summary: Vec<_> = stored.iter().map(|s| (&s.key[..], &s.payload[..], s.partition)).collect();
        assert_eq!(summary, [(&b"k"[..], &b"{\"a\": 1}"[..], None), (b"", b"hi", Some(2))]);
    });
}

#[test]
fn refusals_of_a_batch() {
    run(|world| async move {
        let one = "{\"messages\":[{\"payload\":1}]}";
        for (target, headers, body, status, text) in [
            ("/v1/topics/none/produce/batch", "", one, 404, "topic not found"),
            (
                "/v1/topics/t/produce/batch?key=",
                "",
                one,
                400,
                "query parameter key is not allowed on a batch; set it on the messages",
            ),
            (
                "/v1/topics/t/produce/batch?partition=1",
                "",
                one,
                400,
                "query parameter partition is not allowed on a batch; set it on the messages",
            ),
            (BATCH, "Content-Encoding: br\r\n", one, 415, "unsupported Content-Encoding: want zstd, gzip or none"),
            (
                BATCH,
                "Content-Encoding: gzip, zstd\r\n",
                one,
                415,
                "unsupported Content-Encoding: want zstd, gzip or none",
            ),
            // Two lines are a list like one line with a comma.
            (
                BATCH,
                "Content-Encoding: identity\r\nContent-Encoding: zstd\r\n",
                one,
                415,
                "unsupported Content-Encoding: want zstd, gzip or none",
            ),
            (
                BATCH,
                "Content-Encoding: gzip\r\n",
                one,
                400,
                "the request body does not decode as its Content-Encoding says",
            ),
            (
                BATCH,
                "Content-Encoding: zstd\r\n",
                one,
                400,
                "the request body does not decode as its Content-Encoding says",
            ),
            (BATCH, "", "", 400, "invalid json: EOF while parsing a value"),
            (BATCH, "", "{\"messages\":[]}", 400, "messages required"),
            (
                BATCH,
                "",
                "{\"messages\":[{\"payload\":1},{\"payload\":1,\"partition\":3}]}",
                400,
                "message 1: invalid argument: partition out of range",
            ),
            (
                BATCH,
                "",
                "{\"messages\":[{\"payload\":1,\"nope\":1}]}",
                400,
                "invalid json: json: unknown field \\\"nope\\\"",
            ),
        ] {
            let headers = format!("{JSON}{headers}");
            world.ask("POST", target, &headers, body.as_bytes()).await.expect(status, &error(text));
        }
        world
            .ask("POST", BATCH, &format!("{JSON}Content-Encoding: Identity\r\n"), one.as_bytes())
            .await
            .expect(202, "{\"accepted\":1}\n");
        assert_eq!(world.broker().stored.borrow().len(), 1);
    });
}

fn gzip(data: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(data).expect("into memory");
    encoder.finish().expect("into memory")
}

#[test]
fn n82_compressed_bodies_are_bounded_as_sent_and_decoded() {
    run_with(HttpSettings::default(), NodeLimits::new(0, 64 << 20), |world| async move {
        let messages = |payload_bytes: usize, count: usize| {
            let message = format!("{{\"payload\":\"{}\"}},", "x".repeat(payload_bytes - 2));
            format!("{{\"messages\":[{}]}}", message.repeat(count).trim_end_matches(',')).into_bytes()
        };
        let honest = messages(1_000_000, 16);
        let bomb = vec![b' '; (16 << 20) + 1];
        for (coding, honest, bomb) in [
            ("gzip", gzip(&honest), gzip(&bomb)),
            (
                "zstd",
                zstd::bulk::compress(&honest, 1).expect("memory"),
                zstd::bulk::compress(&bomb, 1).expect("memory"),
            ),
        ] {
            let headers = format!("{JSON}Content-Encoding: {coding}\r\n");
            world.ask("POST", BATCH, &headers, &honest).await.expect(202, "{\"accepted\":16}\n");
            world.ask("POST", BATCH, &headers, &bomb).await.expect(413, &error("request body too large"));
        }
        world.ask("POST", BATCH, JSON, &bomb).await.expect(413, &error("request body too large"));
        world.ask("POST", BATCH, JSON, &honest).await.expect(202, "{\"accepted\":16}\n");
        let stored = world.broker().stored.borrow();
        assert!(stored.len() == 48 && stored.iter().all(|s| s.payload.len() == 1_000_000));
        assert_eq!(world.ctx.node.large_body_bytes_held(), 0);
    });
}

#[test]
fn e20_the_memory_for_bodies_counts_every_route_from_64_kib_on() {
    let limits = NodeLimits::new(0, 0).with_body_memory(256 << 10);
    run_with(HttpSettings::default(), limits, |world| async move {
        world.broker().produce_takes.set(std::time::Duration::from_secs(1));
        let mut first = world.connect();
        first.send(&request("POST", PATH, JSON, &vec![b'1'; 200 << 10])).await;
        rt::sleep(std::time::Duration::from_millis(10)).await;
        assert_eq!(world.ctx.node.body_memory_bytes_held(), 256 << 10, "in steps");
        let batch = format!("{{\"messages\":[{{\"payload\":\"{}\"}}]}}", "x".repeat(70_000));
        for (target, body) in [(PATH, vec![b'1'; 65_537]), (BATCH, batch.into_bytes())] {
            let refused = world.ask("POST", target, JSON, &body).await;
            refused.expect(503, &error("memory budget exhausted, retry"));
            assert_eq!(refused.header("retry-after"), Some("1"));
        }
        world.ask("POST", PATH, JSON, &vec![b'1'; 65_536]).await.expect(202, "");
        assert_eq!(first.answer().await.map(|a| a.status), Some(202));
        world.ask("POST", PATH, JSON, &vec![b'1'; 200 << 10]).await.expect(202, "");
        assert_eq!(world.ctx.node.body_memory_bytes_held(), 0);
        assert_eq!(world.metric("narad_http_body_memory_rejections_total").await, Some(2.0));
        assert_eq!(*world.broker().refused_for_memory.borrow(), ["t", "t"]);
    });
}

#[test]
fn n82_the_memory_for_bodies_bounds_how_many_are_unpacked_at_once() {
    // A buffer of 256 KiB and the decoder are 384 KiB in steps, and twice the body 448: a fifth one does not fit.
    let limits = NodeLimits::new(0, 0).with_body_memory(1700 << 10);
    run_with(HttpSettings::default(), limits, |world| async move {
        let headers = format!("{JSON}Content-Encoding: gzip\r\n");
        let batch = format!("{{\"messages\":[{{\"payload\":{}1}}]}}", " ".repeat(200_000));
        let small = request("POST", BATCH, &headers, &gzip(batch.as_bytes()));
        let (begin, rest) = small.split_at(small.len() - 20);
        let mut clients = Vec::new();
        for _ in 0..5 {
            let mut client = world.connect();
            client.send(begin).await;
            rt::sleep(std::time::Duration::from_millis(10)).await;
            clients.push(client);
        }
        let mut statuses = Vec::new();
        for mut client in clients {
            client.send(rest).await;
            statuses.push(client.answer().await.expect("an answer").status);
        }
        assert_eq!(statuses, [202, 202, 202, 202, 503]);
        assert_eq!(world.ctx.node.body_memory_bytes_held(), 0);
    });
}

#[test]
fn n82_what_unpacks_a_body_is_memory_for_bodies() {
    let limits = NodeLimits::new(0, 0).with_body_memory(1 << 20);
    run_with(HttpSettings::default(), limits, |world| async move {
        // A frame may ask for a window of 16 MiB; what counts is how much of it is used.
        for (spaces, status) in [(100_000, 202), (500_000, 503)] {
            let mut encoder = zstd::stream::Encoder::new(Vec::new(), 1).expect("into memory");
            encoder.set_parameter(zstd::zstd_safe::CParameter::WindowLog(24)).expect("valid");
            encoder.include_contentsize(false).expect("valid");
            let batch = format!("{{\"messages\":[{{\"payload\":{}1}}]}}", " ".repeat(spaces));
            encoder.write_all(batch.as_bytes()).expect("memory");
            let wide = encoder.finish().expect("into memory");
            let headers = format!("{JSON}Content-Encoding: zstd\r\n");
            assert_eq!(world.ask("POST", BATCH, &headers, &wide).await.status, status, "{spaces}");
        }
        // What is decoded from a batch is as large as the batch.
        let batch = format!("{{\"messages\":[{{\"payload\":{}1}}]}}", " ".repeat(600_000));
        world.ask("POST", BATCH, JSON, batch.as_bytes()).await.expect(503, &error("memory budget exhausted, retry"));
        assert_eq!(world.ctx.node.body_memory_bytes_held(), 0);
    });
}

#[test]
fn n82_the_node_wide_budget_for_large_bodies() {
    run_with(HttpSettings::default(), NodeLimits::new(0, 4 << 20), |world| async move {
        let body = |bytes: usize| {
            let message = format!("{{\"payload\":\"{}\"}},", "x".repeat(499_986));
            format!("{{\"messages\":[{}]}}", message.repeat(bytes / 500_000).trim_end_matches(',')).into_bytes()
        };
        world.broker().produce_takes.set(std::time::Duration::from_secs(1));
        let mut first = world.connect();
        first.send(&request("POST", BATCH, JSON, &body(3_000_000))).await;
        rt::sleep(std::time::Duration::from_millis(10)).await;
        assert_eq!(world.ctx.node.large_body_bytes_held(), 3 << 20);
        let refused = world.ask("POST", BATCH, JSON, &body(2_000_000)).await;
        refused.expect(503, &error("batch produce bodies in flight on this node are at their limit; retry"));
        assert_eq!(refused.header("retry-after"), Some("1"));
        world.ask("POST", BATCH, JSON, &body(1_000_000)).await.expect(202, "{\"accepted\":2}\n");
        assert_eq!(first.answer().await.map(|a| a.status), Some(202));
        world.ask("POST", BATCH, JSON, &body(4_000_000)).await.expect(202, "{\"accepted\":8}\n");
        assert_eq!(world.ctx.node.large_body_bytes_held(), 0);
        assert_eq!(world.metric("narad_http_batch_body_budget_rejections_total").await, Some(1.0));
    });
}
