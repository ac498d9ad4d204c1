use std::time::Duration;

use narad_shards::api::{ConsumeError, ReadAt, SettleMode};
use narad_shards::peer::Take;

use super::fake::delivery;
use super::*;

const CLIENT: &str = "X-Narad-Client: test\r\n";

fn error(text: &str) -> String {
    format!("{{\"error\":\"{text}\"}}\n")
}

fn message(offset: u64, payload: &str) -> String {
    format!(
        "{{\"topic\":\"t\",\"partition\":1,\"offset\":{offset},\"payload\":{payload},\"timestamp\":1700000000,\
         \"receipt_handle\":\"1:{offset}:{}\"}}",
        1000 + offset
    )
}

#[test]
fn one_message() {
    run(|world| async move {
        world.broker().ready.borrow_mut().push_back(vec![delivery(7, b"", b"{\"a\": 1}")]);
        let answer = world.ask("GET", "/v1/topics/t/consume?wait=10s&partition=2", "", b"").await;
        answer.expect(200, &format!("{}\n", message(7, "{\"a\": 1}")));
        assert_eq!(answer.header("x-narad-wait-clamped"), None);
        let take = Take { max: 1, bytes_max: 4 << 20 };
        assert_eq!(*world.broker().consumes.borrow(), [(Some(2), take, Duration::from_secs(10))]);
        assert!(world.broker().settled.borrow().is_empty(), "a delivered lease stays with its consumer");
    });
}

#[test]
fn waiting_ends_empty_and_long_waits_are_cut() {
    run(|world| async move {
        let start = rt::now();
        world.ask("GET", "/v1/topics/t/consume", "", b"").await.expect(204, "");
        assert_eq!((rt::now() - start).as_millis(), 0);
        let answer = world.ask("GET", "/v1/topics/t/consume?wait=1m30s", "", b"").await;
        answer.expect(204, "");
        assert_eq!(answer.header("x-narad-wait-clamped"), Some("10s"));
        assert_eq!((rt::now() - start).as_secs(), 10);
        world.broker().ready.borrow_mut().push_back(vec![delivery(1, b"", b"1")]);
        let answer = world.ask("GET", "/v1/topics/t/consume?wait=11s", "", b"").await;
        assert_eq!((answer.status, answer.header("x-narad-wait-clamped")), (200, Some("10s")));
        for (outcome, count) in [("hit", 1.0), ("timeout", 1.0), ("no_wait", 1.0)] {
            let series = format!("narad_consume_wait_seconds_count{{topic=\"t\",outcome=\"{outcome}\"}}");
            assert_eq!(world.metric(&series).await, Some(count), "{outcome}");
        }
        assert_eq!(world.metric("narad_consume_empty_total{topic=\"t\"}").await, Some(2.0));
    });
}

#[test]
fn refusals() {
    run(|world| async move {
        let wait = error("query parameter wait must be a duration of at least 0, such as 10s");
        let max = error("query parameter max must be between 1 and 100");
        let number = |name| error(&format!("query parameter {name} must be an integer of at least 0"));
        for (query, headers, status, text) in [
            ("wait=ten", "", 400, wait.clone()),
            ("wait=-1s", "", 400, wait.clone()),
            ("wait=10", "", 400, wait),
            ("max=0", CLIENT, 400, max.clone()),
            ("max=101", CLIENT, 400, max.clone()),
            ("max=", CLIENT, 400, max),
            ("max=x", CLIENT, 400, number("max")),
            ("max=1", "", 400, error("a consume with max must send an X-Narad-Client header")),
            ("max=1", "X-Narad-Client:\r\n", 400, error("a consume with max must send an X-Narad-Client header")),
            ("max=1&offset=1&partition=0", CLIENT, 400, error("query parameters max and offset exclude each other")),
            ("offset=1", "", 400, error("partition required for replay-mode consume")),
            ("offset=-1&partition=0", "", 400, number("offset")),
            ("partition=x", "", 400, number("partition")),
            ("partition=-7", "", 400, error("invalid argument: partition out of range")),
        ] {
            world.ask("GET", &format!("/v1/topics/t/consume?{query}"), headers, b"").await.expect(status, &text);
        }
        let head = world.ask("HEAD", "/v1/topics/t/consume?max=1", "", b"").await;
        assert_eq!(head.status, 400, "a HEAD reserves too");
        world.ask("GET", "/v1/topics/none/consume?wait=5s", "", b"").await.expect(404, &error("topic not found"));
        assert_eq!(world.broker().consumes.borrow().len(), 1);

        for (cause, status, text, plain) in [
            (ConsumeError::PartitionOutOfRange, 400, "invalid argument: partition out of range", false),
            (ConsumeError::NotOwner, 421, "this node does not own the requested partition", false),
            (ConsumeError::ReadFailed("EIO".to_owned()), 500, "consume failed", false),
            (ConsumeError::Busy("raise the limit".to_owned()), 503, "raise the limit", false),
            (ConsumeError::Unreachable, 502, "the partition owner did not answer; retry", true),
        ] {
            world.broker().consume_error.replace(Some(cause));
            let answer = world.ask("GET", "/v1/topics/t/consume?partition=9", "", b"").await;
            answer.expect(status, &if plain { format!("{text}\n") } else { error(text) });
        }
    });
}

#[test]
fn a_batch_has_its_own_shape_even_for_one() {
    run(|world| async move {
        world.broker().ready.borrow_mut().push_back(vec![delivery(1, b"", b"1")]);
        let answer = world.ask("GET", "/v1/topics/t/consume?max=1", CLIENT, b"").await;
        answer.expect(200, &format!("{{\"messages\":[{}]}}\n", message(1, "1")));
        world.broker().ready.borrow_mut().push_back(vec![delivery(1, b"", b"1"), delivery(2, b"", b"x")]);
        let answer = world.ask("GET", "/v1/topics/t/consume?max=100&max=x", CLIENT, b"").await;
        answer.expect(200, &format!("{{\"messages\":[{},{}]}}\n", message(1, "1"), message(2, "\"x\"")));
        world.ask("GET", "/v1/topics/t/consume?max=5", CLIENT, b"").await.expect(204, "");
        let takes: Vec<u32> = world.broker().consumes.borrow().iter().map(|(_, take, _)| take.max).collect();
        assert_eq!(takes, [1, 100, 5]);
    });
}

#[test]
fn what_does_not_fit_eight_mebibytes_is_handed_back_at_once() {
    run(|world| async move {
        // Control characters take six bytes each in JSON, so four of these are about 12 MiB.
        let payload = vec![1u8; 500_000];
        let batch: Vec<_> = (0..4).map(|offset| delivery(offset, b"", &payload)).collect();
        world.broker().ready.borrow_mut().push_back(batch);
        let answer = world.ask("GET", "/v1/topics/t/consume?max=4", CLIENT, b"").await;
        assert!(answer.status == 200 && answer.body.len() <= 8 << 20, "{} bytes", answer.body.len());
        let value: serde_json::Value = serde_json::from_slice(&answer.body).expect("valid");
        assert_eq!(value["messages"].as_array().map(Vec::len), Some(2));
        let nacked: Vec<_> = world.broker().settled.borrow().iter().map(|s| (s.offset, s.nonce, s.mode)).collect();
        assert_eq!(nacked, [(2, 1002, SettleMode::Nack), (3, 1003, SettleMode::Nack)]);
    });
}

#[test]
fn e25_leases_of_a_handler_that_panics_are_handed_back() {
    run(|world| async move {
        let payload = vec![1u8; 1_000_000];
        let batch = (0..3).map(|offset| delivery(offset, b"", &payload)).collect();
        world.broker().ready.borrow_mut().push_back(batch);
        world.broker().settle_panics.set(true);
        let answer = world.ask("GET", "/v1/topics/t/consume?max=3", CLIENT, b"").await;
        answer.expect(500, &error("internal server panic"));
        // The panic came while the rest was handed back; what was to be sent goes back all the same.
        let nacked: Vec<_> = world.broker().settled.borrow().iter().map(|s| (s.offset, s.mode)).collect();
        assert_eq!(nacked, [(0, SettleMode::Nack)]);
    });
}

#[test]
fn replay() {
    run(|world| async move {
        let target = "/v1/topics/t/consume?partition=1&offset=5&wait=10s";
        world.ask("GET", target, "", b"").await.expect(204, "");
        let leased = delivery(5, b"k", b"1");
        world.broker().read_at.replace(Some(Ok(ReadAt::Record(leased))));
        let message =
            "{\"topic\":\"t\",\"partition\":1,\"offset\":5,\"key\":\"k\",\"payload\":1,\"timestamp\":1700000000}\n";
        world.ask("GET", target, "", b"").await.expect(200, message);
        world.broker().read_at.replace(Some(Ok(ReadAt::AgedOut { oldest: 90 })));
        let aged = error("offset 5 aged out of retention (oldest retained: 90)");
        world.ask("GET", target, "", b"").await.expect(410, &aged);
        world.broker().read_at.replace(Some(Ok(ReadAt::Unreadable)));
        world.ask("GET", target, "", b"").await.expect(410, &error("offset 5 cannot be read"));
        world.broker().read_at.replace(Some(Err(ConsumeError::PartitionOutOfRange)));
        let range = error("invalid argument: partition out of range");
        world.ask("GET", target, "", b"").await.expect(400, &range);
        let none = "/v1/topics/none/consume?partition=1&offset=5";
        world.ask("GET", none, "", b"").await.expect(404, &error("topic not found"));
        assert!(world.broker().consumes.borrow().is_empty() && world.broker().settled.borrow().is_empty());
    });
}

#[test]
fn n37_a_parked_consume_ends_when_its_client_leaves() {
    for half_closed in [false, true] {
        run(move |world| async move {
            let mut client = world.connect();
            client.send(&request("GET", "/v1/topics/t/consume?wait=10s", "", b"")).await;
            rt::sleep(Duration::from_secs(1)).await;
            assert_eq!(world.broker().parked.get(), 1);
            let start = rt::now();
            if half_closed {
                client.end.shut_down_sending();
                client.served.await;
            } else {
                drop(client.end);
                client.served.await;
            }
            assert_eq!((world.broker().parked.get(), rt::now() - start), (0, Duration::ZERO));
            let left =
                "narad_http_requests_total{route=\"GET /v1/topics/{topic}/consume\",method=\"GET\",status=\"499\"}";
            assert_eq!(world.metric(left).await, Some(1.0));
            let cancelled = "narad_consume_wait_seconds_count{topic=\"t\",outcome=\"cancelled\"}";
            assert_eq!(world.metric(cancelled).await, Some(1.0));
        });
    }
}

#[test]
fn n37_leases_of_a_client_that_has_its_answer_and_goes_stay_with_it() {
    for headers in [CLIENT, &format!("{CLIENT}Connection: close\r\n")] {
        let headers = headers.to_owned();
        run(move |world| async move {
            world.broker().ready.borrow_mut().push_back(vec![delivery(1, b"", b"1")]);
            let (end, server) = pipe(usize::MAX);
            let mut client = world.serve(end, server.with_slow_flush(Duration::from_millis(10)));
            client.send(&request("GET", "/v1/topics/t/consume", &headers, b"")).await;
            assert_eq!(client.answer().await.map(|answer| answer.status), Some(200));
            drop(client.end);
            client.served.await;
            assert!(world.broker().settled.borrow().is_empty(), "it comes again, and its ack is refused");
        });
    }
}

#[test]
fn n37_leases_whose_answer_cannot_leave_are_handed_back() {
    run(|world| async move {
        let payload = vec![b'x'; 100_000];
        // The client goes with the answer half sent.
        world.broker().ready.borrow_mut().push_back(vec![delivery(1, b"", &payload), delivery(2, b"", b"1")]);
        let mut client = world.connect_through(4096);
        client.send(&request("GET", "/v1/topics/t/consume?max=2", CLIENT, b"")).await;
        rt::sleep(Duration::from_millis(1)).await;
        client.fill().await;
        assert!(world.broker().settled.borrow().is_empty());
        drop(client.end);
        client.served.await;
        let nacked: Vec<_> = world.broker().settled.borrow().iter().map(|s| (s.offset, s.mode)).collect();
        assert_eq!(nacked, [(1, SettleMode::Nack), (2, SettleMode::Nack)]);

        // The client stays and does not read: the write timeout ends it.
        world.broker().settled.borrow_mut().clear();
        world.broker().ready.borrow_mut().push_back(vec![delivery(3, b"", &payload)]);
        let mut client = world.connect_through(4096);
        let start = rt::now();
        client.send(&request("GET", "/v1/topics/t/consume", "", b"")).await;
        client.served.await;
        assert_eq!((rt::now() - start).as_secs(), 30);
        assert_eq!(world.broker().settled.borrow()[0].offset, 3);
    });
}
