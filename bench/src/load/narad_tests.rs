//! The client of the API, byte by byte.

use super::*;
use crate::load::Answer;

fn wire() -> Wire {
    let url = ["http://127.0.0.1:1".to_owned()];
    Wire::new(&Target::parse(&url, &Default::default()).unwrap(), "a b")
}

fn what(batch: u32, keys: u32) -> Produce {
    let (payloads, budget) = (Arc::new(Payloads::new(1, 100)), Budget::new(Some(5)));
    Produce { payloads, batch, keys, budget, ledger: None, ahead_max: 0 }
}

/// Head and body of the one request in `out`, whose length must be what it says.
fn request(out: &[u8]) -> (String, Vec<u8>) {
    let end = out.windows(4).position(|bytes| bytes == b"\r\n\r\n").unwrap() + 4;
    let head = String::from_utf8(out[..end].to_vec()).unwrap();
    let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: ")).unwrap();
    assert_eq!(length.parse(), Ok(out.len() - end));
    (head, out[end..].to_vec())
}

#[test]
fn a_single_produce_carries_key_and_length() {
    let mut out = Vec::new();
    let mut producer = Producer::new(&wire(), what(1, 1000), 0);
    assert_eq!(producer.begin(0, &mut out), Begin::Started);
    out.clear();
    producer.begin(0, &mut out);
    let (head, body) = request(&out);
    assert!(head.starts_with("POST /v1/topics/a%20b/produce?key=k000001 HTTP/1.1\r\nHost: 127.0.0.1:1\r\n"), "{head}");
    assert_eq!(body.len(), 100);
}

#[test]
fn the_last_batch_is_what_the_budget_leaves() {
    let mut producer = Producer::new(&wire(), what(3, 2), 0);
    let mut sizes = Vec::new();
    loop {
        let mut out = Vec::new();
        if producer.begin(0, &mut out) == Begin::Finished {
            break;
        }
        let body: serde_json::Value = serde_json::from_slice(&request(&out).1).unwrap();
        let messages = body["messages"].as_array().unwrap().clone();
        assert!(messages.iter().all(|message| message["key"].as_str().unwrap().len() == 7));
        sizes.push(messages.len());
    }
    assert_eq!(sizes, [3, 2]);
    assert_eq!(producer.begin(-1, &mut Vec::new()), Begin::Started, "the warm-up is free");
}

#[test]
fn a_producer_with_too_much_outstanding_waits() {
    let ledger: SharedLedger = Arc::new(Mutex::new(Ledger::new(1)));
    let limited = Produce { ledger: Some(ledger.clone()), ahead_max: 2, ..what(2, 0) };
    let mut producer = Producer::new(&wire(), limited, 0);
    assert_eq!(producer.begin(0, &mut Vec::new()), Begin::Started);
    assert_eq!(producer.begin(0, &mut Vec::new()), Begin::NotYet);
    producer.lost();
    assert_eq!(producer.begin(0, &mut Vec::new()), Begin::Started, "what was lost is not waited for");
    let answer = b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n";
    producer.receive(0, answer, &mut Vec::new()).unwrap();
    let ledger = lock(&ledger);
    assert_eq!((ledger.confirmed, ledger.missing), (2, 2));
}

#[test]
fn a_consumer_acks_what_it_got_and_keeps_the_books() {
    let ledger: SharedLedger = Arc::new(Mutex::new(Ledger::new(1)));
    lock(&ledger).send(0, 2);
    lock(&ledger).confirm(0, 0, 2);
    lock(&ledger).producing = 0;
    let payloads = Arc::new(Payloads::new(1, 100));
    let how = Consume {
        batch: 10,
        wait: Duration::from_secs(1),
        ack: true,
        budget: Budget::new(None),
        verify: Some((ledger.clone(), payloads.clone())),
    };
    let mut consumer = Consumer::new(&wire(), how);
    let mut out = Vec::new();
    assert_eq!(consumer.begin(5, &mut out), Begin::Started);
    assert!(out.starts_with(b"GET /v1/topics/a%20b/consume?max=10&wait=1000ms HTTP/1.1\r\n"));
    let mut body = b"{\"messages\":[".to_vec();
    for sequence in 0..2 {
        body.extend_from_slice(b"{\"topic\":\"t\",\"payload\":");
        payloads.write(&mut body, 0, sequence, 3);
        body.extend_from_slice(format!(",\"receipt_handle\":\"0:{sequence}:9\"}},").as_bytes());
    }
    body.pop();
    body.extend_from_slice(b"]}\n");
    let mut answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len()).into_bytes();
    answer.extend_from_slice(&body);
    out.clear();
    let step = consumer.receive(10, &answer, &mut out).unwrap();
    assert_eq!(step, Step { consumed: answer.len(), progress: Progress::More });
    assert_eq!(request(&out).1, b"{\"receipt_handles\":[\"0:0:9\",\"0:1:9\"]}");
    let body = "{\"results\":[{\"status\":204},{\"status\":410,\"error\":\"gone\"}]}\n";
    let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let step = consumer.receive(20, answer.as_bytes(), &mut Vec::new()).unwrap();
    let one = Answer { result: Outcome::Ok { messages: 1 }, close: false, pause: None };
    assert_eq!(step.progress, Progress::Done(one));
    assert_eq!((consumer.seen.ack_refused, consumer.seen.delivery.len(), lock(&ledger).missing), (1, 2, 0));
    assert_eq!(consumer.begin(30, &mut Vec::new()), Begin::Finished);
}
