use std::sync::Mutex;

use super::*;
use crate::load::ledger::Ledger;

fn payloads() -> Arc<Payloads> {
    Arc::new(Payloads::new(1, 100))
}

fn batch(payloads: &Payloads, count: u32) -> Batch<'_> {
    Batch { payloads, producer: 3, first: 7, now: 0, count }
}

fn payload(sequence: u64) -> Vec<u8> {
    let mut out = Vec::new();
    payloads().write(&mut out, 3, sequence, 0);
    out
}

/// Feeds `answer` byte by byte, as the slowest network would. What was said, the messages, the reply.
fn feed(dialect: &mut dyn Dialect, answer: &[u8]) -> (Vec<u8>, Vec<Vec<u8>>, Reply) {
    let (mut out, mut messages, mut start) = (Vec::new(), Vec::new(), 0);
    for end in 1..=answer.len() {
        loop {
            let input = &answer[start..end];
            let message = &mut |bytes: &[u8]| messages.push(bytes.to_vec());
            let (used, reply) = dialect.receive(input, &mut out, message).unwrap();
            start += used;
            if reply != Reply::More {
                assert_eq!(start, answer.len(), "{reply:?} came before the end of the answer");
                return (out, messages, reply);
            }
            if used == 0 || start == end {
                break;
            }
        }
    }
    (out, messages, Reply::More)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn redis_counts_each_answer_of_a_pipeline() {
    let (mut redis, mut out) = (Redis::new(0, 2), Vec::new());
    redis.open(&mut out);
    assert_eq!(feed(&mut redis, b"-BUSYGROUP exists\r\n").2, Reply::Done(0), "another connection made the group");
    out.clear();
    redis.produce(&batch(&payloads(), 2), &mut out);
    assert!(text(&out).starts_with("*5\r\n$4\r\nXADD\r\n$5\r\nbench\r\n$1\r\n*\r\n$1\r\np\r\n$100\r\n{\"id\""));
    assert_eq!(feed(&mut redis, b"$3\r\n1-0\r\n").2, Reply::More);
    assert_eq!(feed(&mut redis, b"$3\r\n2-0\r\n").2, Reply::Done(2));
    redis.produce(&batch(&payloads(), 2), &mut out);
    assert_eq!(feed(&mut redis, b"-OOM\r\n$3\r\n2-0\r\n").2, Reply::Refused("OOM".into()), "half a batch is none");
}

#[test]
fn redis_acks_what_it_read() {
    let (mut redis, mut out) = (Redis::new(5, 2), Vec::new());
    redis.consume(&mut out);
    assert!(text(&out).contains("workers\r\n$2\r\nc5\r\n$5\r\nCOUNT\r\n$1\r\n2\r\n"));
    let answer = b"*1\r\n*2\r\n$5\r\nbench\r\n*2\r\n\
        *2\r\n$3\r\n1-0\r\n*2\r\n$1\r\np\r\n$1\r\nx\r\n*2\r\n$3\r\n2-0\r\n*2\r\n$1\r\np\r\n$1\r\ny\r\n";
    let (sent, messages, reply) = feed(&mut redis, answer);
    assert_eq!((messages, reply), (vec![b"x".to_vec(), b"y".to_vec()], Reply::More));
    assert!(text(&sent).starts_with("*5\r\n$4\r\nXACK\r\n") && text(&sent).ends_with("$3\r\n1-0\r\n$3\r\n2-0\r\n"));
    assert_eq!(feed(&mut redis, b":2\r\n").2, Reply::Done(2));
    redis.consume(&mut out);
    assert_eq!(feed(&mut redis, b"*-1\r\n").2, Reply::Empty);
}

#[test]
fn nats_acks_each_message_and_waits_for_the_last() {
    let (mut nats, mut out) = (Nats::new(2), Vec::new());
    nats.open(&mut out);
    let created = b"INFO {}\r\nMSG _INBOX.1.0 1 2\r\n{}\r\nMSG _INBOX.1.0 1 2\r\n{}\r\n";
    assert_eq!(feed(&mut nats, created).2, Reply::Done(0));
    nats.consume(&mut out);
    let two =
        b"MSG bench.queue 1 $JS.ACK.a 1\r\nx\r\nPING\r\nHMSG bench.queue 1 $JS.ACK.b 12 13\r\nNATS/1.0\r\n\r\ny\r\n";
    let (sent, messages, reply) = feed(&mut nats, two);
    assert_eq!((messages, reply), (vec![b"x".to_vec(), b"y".to_vec()], Reply::More));
    let opening = text(&out);
    let inbox = opening.split_once("SUB ").and_then(|(_, rest)| rest.split_once(' ')).unwrap().0;
    assert_eq!(text(&sent), format!("PONG\r\nPUB $JS.ACK.a  4\r\n+ACK\r\nPUB $JS.ACK.b {inbox} 4\r\n+ACK\r\n"));
    assert_eq!(feed(&mut nats, b"MSG _INBOX.1.0 1 0\r\n\r\n").2, Reply::Done(2));
}

#[test]
fn nats_tells_a_status_from_a_message() {
    let (mut nats, mut out) = (Nats::new(1), Vec::new());
    let timeout = b"HMSG _INBOX.1.0 1 28 28\r\nNATS/1.0 408 No Messages\r\n\r\n\r\n";
    nats.consume(&mut out);
    assert_eq!(feed(&mut nats, timeout).2, Reply::Empty);
    nats.produce(&batch(&payloads(), 1), &mut out);
    let full = b"MSG _INBOX.1.0 1 36\r\n{\"error\":{\"description\":\"no space\"}}\r\n";
    assert_eq!(feed(&mut nats, full).2, Reply::Refused("no space".into()));
}

/// A frame of the server.
fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
    let mut out = vec![kind, 0, 1];
    out.extend_from_slice(&(payload.len() as u32).to_be_bytes());
    out.extend_from_slice(payload);
    out.push(0xce);
    out
}

fn confirm(kind: u8, tag: u8, multiple: u8) -> Vec<u8> {
    frame(1, &[0, 60, 0, kind, 0, 0, 0, 0, 0, 0, 0, tag, multiple])
}

fn deliver(tag: u8, body: &[u8]) -> Vec<u8> {
    let mut method = vec![0, 60, 0, 60, 1, b'c', 0, 0, 0, 0, 0, 0, 0, tag, 0, 0, 5];
    method.extend_from_slice(b"bench");
    let header = [0, 60, 0, 0, 0, 0, 0, 0, 0, 0, 0, body.len() as u8, 0, 0];
    let (first, second) = body.split_at(1);
    [frame(1, &method), frame(2, &header), frame(3, first), frame(3, second)].concat()
}

#[test]
fn amqp_is_done_when_every_publish_is_confirmed() {
    let (mut amqp, mut out) = (Amqp::new(3, Feed::Push), Vec::new());
    amqp.produce(&batch(&payloads(), 3), &mut out);
    assert_eq!(out.iter().filter(|byte| **byte == 0xce).count(), 9, "method, header and body of each");
    assert_eq!(feed(&mut amqp, &confirm(80, 3, 0)).2, Reply::More);
    assert_eq!(feed(&mut amqp, &confirm(80, 2, 1)).2, Reply::Done(3));
    amqp.produce(&batch(&payloads(), 2), &mut out);
    assert_eq!(feed(&mut amqp, &confirm(120, 4, 0)).2, Reply::More);
    assert!(matches!(feed(&mut amqp, &confirm(80, 5, 0)).2, Reply::Refused(_)), "a nack is no confirm");
}

#[test]
fn amqp_acks_the_last_messages_when_it_asks_for_more() {
    let (mut amqp, mut out) = (Amqp::new(2, Feed::Push), Vec::new());
    amqp.consume(&mut out);
    assert!(out.windows(4).any(|bytes| bytes == [0, 60, 0, 20]), "consume");
    let (sent, messages, reply) = feed(&mut amqp, &[deliver(1, b"one"), deliver(2, b"two")].concat());
    assert_eq!((sent.len(), messages, reply), (0, vec![b"one".to_vec(), b"two".to_vec()], Reply::Done(2)));
    out.clear();
    amqp.consume(&mut out);
    assert_eq!(out, confirm(80, 2, 1));
    let (mut puller, mut out) = (Amqp::new(2, Feed::Pull), Vec::new());
    puller.consume(&mut out);
    assert_eq!(feed(&mut puller, &frame(1, &[0, 60, 0, 72, 0])).2, Reply::Empty);
}

#[test]
fn amqp_says_in_words_why_a_server_closed() {
    let mut amqp = Amqp::new(1, Feed::Push);
    let mut method = vec![0, 20, 0, 40, 1, 0x96, 4];
    method.extend_from_slice(b"nope");
    let error = amqp.receive(&frame(1, &method), &mut Vec::new(), &mut |_| {}).unwrap_err();
    assert!(error.contains("406 nope"), "{error}");
}

fn postgres_message(tag: u8, body: &[u8]) -> Vec<u8> {
    let mut out = vec![tag];
    out.extend_from_slice(&(body.len() as u32 + 4).to_be_bytes());
    out.extend_from_slice(body);
    out
}

#[test]
fn postgres_commits_after_the_rows_came() {
    let (mut postgres, mut out) = (Postgres::new(2), Vec::new());
    postgres.consume(&mut out);
    let row = |byte| postgres_message(b'D', &[0, 1, 0, 0, 0, 1, byte]);
    let ready = |state| postgres_message(b'Z', &[state]);
    let (sent, messages, reply) = feed(&mut postgres, &[row(b'x'), row(b'y'), ready(b'T')].concat());
    assert_eq!((messages, reply), (vec![b"x".to_vec(), b"y".to_vec()], Reply::More));
    assert!(text(&sent).contains("commit"));
    assert_eq!(feed(&mut postgres, &ready(b'I')).2, Reply::Done(2));
    postgres.consume(&mut out);
    feed(&mut postgres, &ready(b'T'));
    assert_eq!(feed(&mut postgres, &ready(b'I')).2, Reply::Empty);
    postgres.produce(&batch(&payloads(), 1), &mut out);
    let failed = [postgres_message(b'E', b"SERROR\0Mdisk full\0\0"), ready(b'I')].concat();
    assert_eq!(feed(&mut postgres, &failed).2, Reply::Refused("disk full".into()));
}

#[test]
fn a_conversation_keeps_the_ledger() {
    let ledger: SharedLedger = Arc::new(Mutex::new(Ledger::new(4)));
    let task = Task::Produce { payloads: payloads(), batch: 1, ledger: Some(ledger.clone()) };
    let mut producer = Talk::new(Box::new(Redis::new(3, 1)), task, 3);
    let mut out = Vec::new();
    producer.begin(0, &mut out);
    producer.receive(0, b"$3\r\n1-0\r\n", &mut out).unwrap();
    producer.begin(0, &mut out);
    producer.lost();
    let counts = |ledger: &Ledger| (ledger.sent, ledger.confirmed, ledger.outstanding());
    assert_eq!(counts(&lock(&ledger)), (2, 1, 1));
    let task = Task::Consume { verify: Some((ledger.clone(), payloads())) };
    let mut consumer = Talk::new(Box::new(Redis::new(0, 1)), task, 0);
    consumer.begin(0, &mut out);
    let mut answer = b"*1\r\n*2\r\n$5\r\nbench\r\n*1\r\n*2\r\n$3\r\n1-0\r\n*2\r\n$1\r\np\r\n$100\r\n".to_vec();
    answer.extend_from_slice(&payload(0));
    answer.extend_from_slice(b"\r\n");
    consumer.receive(0, &answer, &mut out).unwrap();
    let counts = |ledger: &Ledger| (ledger.seen, ledger.missing, ledger.damaged);
    assert_eq!(counts(&lock(&ledger)), (1, 0, 0));
}
