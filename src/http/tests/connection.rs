use std::time::Duration;

use super::*;

fn error(text: &str) -> String {
    format!("{{\"error\":\"{text}\"}}\n")
}

const TOO_LARGE: &str = "431 Request Header Fields Too Large\n";

fn small_headers() -> HttpSettings {
    HttpSettings { header_bytes_max: 4096, ..HttpSettings::default() }
}

#[test]
fn e29_a_header_block_over_the_limit_is_answered_in_plain_text() {
    run_with(small_headers(), NodeLimits::new(0, 0), |world| async move {
        let block = |bytes: usize| {
            let frame = "GET /healthz HTTP/1.1\r\nX: \r\n\r\n".len();
            format!("GET /healthz HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(bytes - frame)).into_bytes()
        };
        let mut client = world.connect();
        client.send(&block(4096)).await;
        client.answer().await.expect("an answer").expect(200, "{\"status\":\"ok\"}\n");
        // On a connection that has served before, as on a fresh one, whole or piece by piece, or without an end.
        client.send(&block(4097)).await;
        let answer = client.answer().await.expect("an answer");
        answer.expect(431, TOO_LARGE);
        assert_eq!(answer.header("content-type"), Some("text/plain; charset=utf-8"));
        assert_eq!(answer.header("connection"), Some("close"));
        assert_eq!(client.closed().await, b"");
        let mut client = world.connect();
        for piece in block(100_000).chunks(1000) {
            client.send(piece).await;
            rt::yield_now().await;
        }
        client.answer().await.expect("an answer").expect(431, TOO_LARGE);
        assert_eq!(client.closed().await, b"");
        let refused = "narad_http_requests_total{route=\"unmatched\",method=\"other\",status=\"431\"}";
        assert_eq!(world.metric(refused).await, Some(2.0));
    });
}

#[test]
fn only_the_bytes_of_a_header_block_are_limited_not_its_lines() {
    run(|world| async move {
        // What the handler needs comes last, and the request is the second on its connection, in pieces.
        let produce = |lines: usize, frame: &str| {
            let lines: String = (0..lines).map(|i| format!("h{i:x}:\r\n")).collect();
            format!("POST /v1/topics/t/produce HTTP/1.1\r\n{lines}{frame}Content-Length: 1\r\n\r\n7").into_bytes()
        };
        let mut client = world.connect();
        client.ask("GET", "/healthz", "", b"").await.expect(200, "{\"status\":\"ok\"}\n");
        for lines in [98, 99, 100, 101, 7_000, 0] {
            for piece in produce(lines, JSON).chunks(5_000) {
                client.send(piece).await;
                rt::yield_now().await;
            }
            client.answer().await.expect("an answer").expect(202, "");
        }
        client.send(&produce(200, "")).await;
        assert_eq!(client.answer().await.map(|answer| answer.status), Some(415), "the guard still sees the headers");
        assert_eq!(world.broker().stored.borrow().len(), 6);
        // As many as 64 KiB can hold, of few names.
        let shortest = |lines: usize| format!("GET /healthz HTTP/1.1\r\n{}\r\n", "a:\r\n".repeat(lines)).into_bytes();
        let most = (65_536 - shortest(0).len()) / "a:\r\n".len();
        let mut client = world.connect();
        client.send(&shortest(most)).await;
        client.answer().await.expect("an answer").expect(200, "{\"status\":\"ok\"}\n");
        client.send(&shortest(most + 1)).await;
        client.answer().await.expect("an answer").expect(431, TOO_LARGE);
        assert_eq!(client.closed().await, b"");
        let refused = "narad_http_requests_total{route=\"unmatched\",method=\"other\",status=\"431\"}";
        assert_eq!(world.metric(refused).await, Some(1.0));
        // Of a request that came while another one was answered nobody can say where it begins.
        let mut client = world.connect();
        client.send(&[request("GET", "/healthz", "", b""), shortest(101)].concat()).await;
        client.answer().await.expect("an answer").expect(200, "{\"status\":\"ok\"}\n");
        client.answer().await.expect("an answer").expect(431, TOO_LARGE);
        assert_eq!(client.closed().await, b"");
    });
}

#[test]
fn more_lines_than_a_header_map_holds_are_refused_without_harm() {
    let settings = HttpSettings { header_bytes_max: 1 << 20, ..HttpSettings::default() };
    run_with(settings, NodeLimits::new(0, 0), |world| async move {
        let mut client = world.connect();
        let lines: String = (0..40_000).map(|i| format!("h{i}:\r\n")).collect();
        client.send(format!("GET /healthz HTTP/1.1\r\n{lines}\r\n").as_bytes()).await;
        client.answer().await.expect("an answer").expect(431, TOO_LARGE);
        world.ask("GET", "/healthz", "", b"").await.expect(200, "{\"status\":\"ok\"}\n");
    });
}

#[test]
fn n41_a_content_length_that_is_too_large_or_is_no_number_is_said_to_be_that() {
    run(|world| async move {
        let unclear =
            error("Content-Length must be one number of bytes, in decimal digits, the same wherever it is given");
        let large = error("message too large");
        for (headers, status, text) in [
            ("Content-Length: 18446744073709551615", 413, error("request body too large")),
            ("Content-Length: 18446744073709551614", 413, error("request body too large")),
            ("Content-Length: 18446744073709551613", 413, large.clone()),
            ("Content-Length: 9223372036854775808", 413, large),
            ("Content-Length: 99999999999999999999999", 400, unclear.clone()),
            ("Content-Length: -1", 400, unclear.clone()),
            ("Content-Length: +3", 400, unclear.clone()),
            ("Content-Length: 3, 3", 400, unclear.clone()),
            ("Content-Length: 3\r\nContent-Length: 4", 400, unclear.clone()),
            ("Content-Length:", 400, unclear),
        ] {
            let mut client = world.connect();
            let head = format!("POST /v1/topics/t/produce HTTP/1.1\r\n{JSON}{headers}\r\n\r\n");
            client.send(head.as_bytes()).await;
            client.answer().await.unwrap_or_else(|| panic!("{headers}")).expect(status, &text);
            assert_eq!(client.closed().await, b"", "{headers}");
        }
        assert_eq!(world.broker().stored.borrow().len(), 0);
        // Chunked decides, and nothing more is read from the connection: what follows may be meant as part of the body.
        let mut client = world.connect();
        let both = format!(
            "POST /v1/topics/t/produce HTTP/1.1\r\n{JSON}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n\
             3\r\nabc\r\n0\r\n\r\nGET /healthz HTTP/1.1\r\n\r\n"
        );
        client.send(both.as_bytes()).await;
        client.answer().await.expect("an answer").expect(202, "");
        assert_eq!(client.closed().await, b"");
    });
}

#[test]
fn the_body_behind_a_length_beyond_all_is_never_read_as_a_request() {
    run(|world| async move {
        let mut client = world.connect();
        let hidden = format!("DELETE /v1/topics/t HTTP/1.1\r\nHost: x\r\n{}\r\n", "A: b\r\n".repeat(150));
        let head = "POST /v1/topics/t/produce HTTP/1.1\r\nHost: x\r\nContent-Length: 18446744073709551615\r\n\r\n";
        client.send(format!("{head}{hidden}").as_bytes()).await;
        let answer = client.answer().await.expect("an answer");
        assert!(matches!(answer.status, 413 | 431), "{}", answer.status);
        assert_eq!(client.closed().await, b"");
        assert!(world.broker().changes.borrow().is_empty(), "a request that nobody made");
    });
}

#[test]
fn what_is_not_http_gets_400_and_is_closed() {
    run(|world| async move {
        for junk in
            ["\0\0\0\0", "GET / HTTP/9.9\r\n\r\n", "GET /a b HTTP/1.1\r\n\r\n", "GET / HTTP/1.1\r\nbad header\r\n\r\n"]
        {
            let mut client = world.connect();
            client.send(junk.as_bytes()).await;
            client.answer().await.expect("an answer").expect(400, "400 Bad Request\n");
            assert_eq!(client.closed().await, b"", "{junk:?}");
        }
        let mut client = world.connect();
        client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
        client.closed().await;
    });
}

#[test]
fn e29_deadlines_of_a_connection() {
    run(|world| async move {
        let elapsed = |start| (rt::now() - start).as_millis();
        // Nothing at all, and nothing after an answer.
        let start = rt::now();
        let silent = world.connect();
        assert_eq!(silent.closed().await, b"");
        assert_eq!(elapsed(start), 60_000);
        let mut idle = world.connect();
        rt::sleep(Duration::from_secs(50)).await;
        idle.ask("GET", "/healthz", "", b"").await.expect(200, "{\"status\":\"ok\"}\n");
        let start = rt::now();
        assert_eq!(idle.closed().await, b"");
        assert_eq!(elapsed(start), 60_000);

        // A header block has five seconds from its first byte, however it trickles.
        let mut slow = world.connect();
        rt::sleep(Duration::from_secs(59)).await;
        let start = rt::now();
        for byte in b"GET /" {
            slow.send(&[*byte]).await;
            rt::sleep(Duration::from_millis(900)).await;
        }
        assert_eq!(slow.closed().await, b"");
        assert_eq!(elapsed(start), 5_000);

        // A body has ten from the first byte of its request.
        let mut slow = world.connect();
        let start = rt::now();
        slow.send(b"POST /v1/topics/t/produce HTTP/1.1\r\n").await;
        rt::sleep(Duration::from_secs(4)).await;
        slow.send(format!("{JSON}Content-Length: 5\r\n\r\n1").as_bytes()).await;
        assert_eq!(slow.answer().await.map(|answer| answer.status), Some(408));
        assert_eq!(elapsed(start), 10_000);
    });
}

#[test]
fn requests_follow_each_other_on_one_connection() {
    run(|world| async move {
        let mut client = world.connect();
        let mut pipelined = Vec::new();
        for i in 0..50 {
            pipelined.extend(request("POST", "/v1/topics/t/produce", JSON, format!("{i}").as_bytes()));
        }
        client.send(&pipelined).await;
        for _ in 0..50 {
            client.answer().await.expect("an answer").expect(202, "");
        }
        let stored: Vec<Vec<u8>> = world.broker().stored.borrow().iter().map(|s| s.payload.clone()).collect();
        assert_eq!(stored, (0..50).map(|i| format!("{i}").into_bytes()).collect::<Vec<_>>());
        // A small body that nobody wanted does not cost the connection.
        client.ask("POST", "/nowhere", JSON, b"0123456789").await.expect(404, "404 page not found\n");
        client.ask("GET", "/healthz", "", b"").await.expect(200, "{\"status\":\"ok\"}\n");
        client.ask("GET", "/healthz", "Connection: close\r\n", b"").await.expect(200, "{\"status\":\"ok\"}\n");
        assert_eq!(client.closed().await, b"");
    });
}

#[test]
fn a_client_that_asks_before_sending_is_not_asked_for_a_body_that_is_too_large() {
    run(|world| async move {
        let expecting = |bytes: usize| {
            format!(
                "POST /v1/topics/t/produce HTTP/1.1\r\n{JSON}Expect: 100-continue\r\nContent-Length: {bytes}\r\n\r\n"
            )
        };
        let mut client = world.connect();
        client.send(expecting(2 << 20).as_bytes()).await;
        assert_eq!(client.answer().await.map(|answer| answer.status), Some(413));
        let mut client = world.connect();
        client.send(expecting(2).as_bytes()).await;
        assert_eq!(client.answer().await.map(|answer| answer.status), Some(100));
        client.send(b"ok").await;
        assert_eq!(client.answer().await.map(|answer| answer.status), Some(202));
    });
}

#[test]
fn a_graceful_stop_ends_idle_connections_and_lets_the_others_finish() {
    run(|world| async move {
        let fresh = world.connect();
        let mut idle = world.connect();
        idle.ask("GET", "/healthz", "", b"").await.expect(200, "{\"status\":\"ok\"}\n");
        let mut busy = world.connect();
        busy.send(&request("GET", "/v1/topics/t/consume?wait=3s", "", b"")).await;
        rt::sleep(Duration::from_secs(1)).await;
        let start = rt::now();
        world.ctx.begin_shutdown();
        assert_eq!(fresh.closed().await, b"");
        assert_eq!(idle.closed().await, b"");
        assert_eq!(rt::now() - start, Duration::ZERO);
        assert_eq!(busy.answer().await.map(|answer| answer.status), Some(204));
        assert_eq!(busy.closed().await, b"");
        assert_eq!((rt::now() - start).as_secs(), 2);
        let late = world.connect();
        assert_eq!(late.closed().await, b"");
    });
}

#[test]
fn a_stop_does_not_meet_the_next_request_of_a_busy_connection_half_way() {
    run(|world| async move {
        let [mut busy, mut done] = [world.connect(), world.connect()];
        for client in [&mut busy, &mut done] {
            client.ask("GET", "/healthz", "", b"").await.expect(200, "{\"status\":\"ok\"}\n");
        }
        world.ctx.begin_shutdown();
        let start = rt::now();
        rt::sleep(Duration::from_millis(99)).await;
        let answer = busy.ask("GET", "/healthz", "", b"").await;
        answer.expect(200, "{\"status\":\"ok\"}\n");
        assert_eq!(answer.header("connection"), Some("close"));
        assert_eq!(busy.closed().await, b"");
        assert_eq!(done.closed().await, b"");
        assert_eq!(rt::now() - start, Duration::from_millis(100));
    });
}

#[test]
fn a_drain_still_answers_each_connection_once_and_waits_for_what_had_begun() {
    run(|world| async move {
        let mut idle = world.connect();
        idle.ask("GET", "/healthz", "", b"").await.expect(200, "{\"status\":\"ok\"}\n");
        let mut busy = world.connect();
        busy.send(&request("GET", "/v1/topics/t/consume?wait=3s", "", b"")).await;
        rt::sleep(Duration::from_secs(1)).await;
        let start = rt::now();
        let ctx = world.ctx.clone();
        let drain = rt::spawn(Queue::Foreground, async move { ctx.drain().await });
        rt::yield_now().await;
        // One that comes now is answered, and not waited for.
        let mut late = world.connect();
        late.send(&request("GET", "/v1/topics/t/consume?wait=9s", "", b"")).await;
        rt::sleep(Duration::from_millis(500)).await;
        for client in [&mut idle, &mut world.connect()] {
            let answer = client.ask("GET", "/healthz", "", b"").await;
            answer.expect(200, "{\"status\":\"ok\"}\n");
            assert_eq!(answer.header("connection"), Some("close"));
        }
        assert_eq!(idle.closed().await, b"");
        drain.await;
        assert_eq!((rt::now() - start).as_secs(), 2);
        let answer = busy.answer().await.expect("an answer");
        assert_eq!((answer.status, answer.header("connection")), (204, Some("close")));
        world.ctx.begin_shutdown();
        let answer = late.answer().await.expect("an answer");
        assert_eq!((answer.status, answer.header("connection")), (204, Some("close")));
        assert_eq!((rt::now() - start).as_secs(), 9);
    });
}

#[test]
fn a_stop_answers_a_request_whose_first_bytes_have_come() {
    run(|world| async move {
        let mut client = world.connect();
        client.ask("GET", "/healthz", "", b"").await.expect(200, "{\"status\":\"ok\"}\n");
        client.send(b"GET /heal").await;
        world.ctx.begin_shutdown();
        rt::sleep(Duration::from_millis(100)).await;
        client.send(b"thz HTTP/1.1\r\nHost: x\r\n\r\n").await;
        let answer = client.answer().await.expect("an answer");
        answer.expect(200, "{\"status\":\"ok\"}\n");
        assert_eq!(answer.header("connection"), Some("close"));
        assert_eq!(client.closed().await, b"");
    });
}
