//! What goes over the wire comes back as it was; anything else is refused and never panics.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::fuzz::{arrived, frame};
use super::{answer, answered, ask, asked, operation, status, Outgoing, Refusal, SHARD_OPERATIONS};
use crate::api::{ConsumeError, Delivery, PartitionStats, ReadAt, Settle, SettleMode, SettleStatus};
use crate::io::Slice;
use crate::meta::{Destination, Incarnation, NodeId};
use crate::peer::{CommitBatch, CommitError, Committed, Record, Reply, Request, Take, Token, WaiterId};

const LIFE: Incarnation = Incarnation(7);
const BUDGET: Duration = Duration::from_millis(1000);

/// A frame as bytes that the fuzzers' entry point takes.
fn seed(sent: &Outgoing) -> Vec<u8> {
    let which = SHARD_OPERATIONS.iter().position(|(known, _)| *known == sent.operation).unwrap_or(0) as u8;
    let [low, high] = (sent.archive.len() as u16).to_le_bytes();
    let mut bytes = vec![which, sent.version, low, high];
    bytes.extend_from_slice(&sent.archive);
    sent.payload.iter().for_each(|piece| bytes.extend_from_slice(piece));
    bytes
}

fn record(key: &str, payload: &str) -> Record {
    Record { body: Slice::copy_from(format!("{key}{payload}").as_bytes()), key_bytes: key.len() as u32 }
}

fn commit(records: Vec<Record>) -> Request {
    let destination = Destination { incarnation: LIFE, partition: 3 };
    let topic = Arc::from("orders");
    Request::Commit(CommitBatch { destination, topic, accepted_under: Some(LIFE), records, budget: BUDGET })
}

fn requests() -> Vec<Request> {
    let (take, token) = (Take { max: 10, bytes_max: 1 << 20 }, Token { node: NodeId(2), boot_id: 99 });
    let waiter = WaiterId { shard: 0, serial: 0 };
    let settle = |mode| Settle { partition: 1, offset: 5, nonce: 77, mode };
    vec![
        commit(vec![record("k", "payload"), record("", "x"), record("", "")]),
        Request::Produce { topic: Arc::from("orders"), partition: Some(1), record: record("key", "value") },
        Request::Claim { incarnation: LIFE, partition: Some(4), take, arm: false },
        Request::Park { waiter, incarnation: LIFE, partition: Some(4), take, wait: Duration::from_millis(1500) },
        Request::NodeClaim { incarnation: LIFE, take, token: Some(token) },
        Request::NodeClaim { incarnation: LIFE, take, token: None },
        Request::Register { incarnation: LIFE, token },
        Request::NodeAvailable { incarnation: LIFE, node: NodeId(3), boot_id: 8 },
        Request::Pass { incarnation: LIFE, node: NodeId(3) },
        Request::Settle {
            incarnation: LIFE,
            settles: [SettleMode::Ack, SettleMode::Extend, SettleMode::Nack, SettleMode::Release].map(settle).to_vec(),
        },
        Request::ReadAt { incarnation: LIFE, partition: 2, offset: 1 << 40 },
        Request::Stats { incarnation: LIFE },
    ]
}

fn delivery(offset: u64, record: &Record) -> Delivery {
    Delivery {
        topic: Arc::from("orders"),
        incarnation: LIFE,
        partition: 2,
        offset,
        timestamp_ms: 1_700_000_000_000,
        body: record.body.clone(),
        key_bytes: record.key_bytes,
        nonce: offset + 1,
    }
}

fn replies() -> Vec<(u16, Reply)> {
    use operation::{
        COMMIT_PRODUCE_BATCH as COMMIT, CONSUME, PARTITION_STATS, PRODUCE, READ_AT, SETTLE, TOKEN_REGISTER,
    };
    let committed = Committed { base_offset: 12, count: 3 };
    let mismatch = CommitError::IncarnationMismatch { accepted_under: LIFE, live: Incarnation(8) };
    let deliveries = vec![delivery(5, &record("k", "one")), delivery(6, &record("", ""))];
    vec![
        (COMMIT, Reply::Commit(Ok(committed))),
        (COMMIT, Reply::Commit(Err(CommitError::NotOwner))),
        (COMMIT, Reply::Commit(Err(CommitError::Frozen))),
        (COMMIT, Reply::Commit(Err(CommitError::UnknownTopic))),
        (COMMIT, Reply::Commit(Err(mismatch))),
        (COMMIT, Reply::Commit(Err(CommitError::Spent))),
        (COMMIT, Reply::Commit(Err(CommitError::Poisoned("EIO".to_owned())))),
        (COMMIT, Reply::Commit(Err(CommitError::Failed("no space".to_owned())))),
        (COMMIT, Reply::Commit(Err(CommitError::Unavailable("it stops".to_owned())))),
        (PRODUCE, Reply::Produced(Ok((4, committed)))),
        (CONSUME, Reply::Deliveries(Ok(deliveries))),
        (CONSUME, Reply::Deliveries(Ok(Vec::new()))),
        (CONSUME, Reply::Deliveries(Err(ConsumeError::NotOwner))),
        (CONSUME, Reply::Deliveries(Err(ConsumeError::OwnerDown))),
        (CONSUME, Reply::Deliveries(Err(ConsumeError::ReadFailed("EIO".to_owned())))),
        (CONSUME, Reply::Deliveries(Err(ConsumeError::Busy("raise it".to_owned())))),
        (READ_AT, Reply::ReadAt(Ok(ReadAt::Record(delivery(9, &record("k", "v")))))),
        (READ_AT, Reply::ReadAt(Ok(ReadAt::PastEnd))),
        (READ_AT, Reply::ReadAt(Ok(ReadAt::AgedOut { oldest: 44 }))),
        (READ_AT, Reply::ReadAt(Ok(ReadAt::Unreadable))),
        (READ_AT, Reply::ReadAt(Err(ConsumeError::PartitionOutOfRange))),
        (SETTLE, Reply::Settled(vec![SettleStatus::Done, SettleStatus::LeaseGone, SettleStatus::NotOwner])),
        (SETTLE, Reply::Settled(vec![SettleStatus::Unanswered, SettleStatus::OwnerDown])),
        (TOKEN_REGISTER, Reply::Registered(Ok(true))),
        (TOKEN_REGISTER, Reply::Registered(Ok(false))),
        (TOKEN_REGISTER, Reply::Registered(Err(ConsumeError::OwnerDown))),
        (
            PARTITION_STATS,
            Reply::Stats(vec![
                PartitionStats { index: 1, high_watermark: 9, oldest_segment_at: Some(3), ..PartitionStats::default() },
                PartitionStats::default(),
            ]),
        ),
    ]
}

#[test]
fn e42_requests_arrive_as_they_were_sent() {
    for request in requests() {
        let sent = ask(&request, BUDGET).expect("goes to other nodes");
        let got = asked(&arrived(&sent)).unwrap_or_else(|refusal| panic!("{request:?}: {refusal}"));
        assert_eq!(format!("{got:?}"), format!("{request:?}"));
        if let (Request::Commit(before), Request::Commit(after)) = (&request, &got) {
            for (before, after) in before.records.iter().zip(&after.records) {
                assert_eq!((before.key(), before.payload()), (after.key(), after.payload()));
            }
        }
    }
}

#[test]
fn e42_replies_arrive_as_they_were_sent_with_the_shard_that_served() {
    for (operation, reply) in replies() {
        let sent = answer(operation, 5, &reply).expect("goes to other nodes");
        let (shard, got) = answered(&arrived(&sent)).unwrap_or_else(|refusal| panic!("{reply:?}: {refusal}"));
        assert_eq!(format!("{got:?}"), format!("{reply:?}"));
        assert!(shard.is_none_or(|shard| shard == 5));
    }
}

#[test]
fn e52_an_owner_that_does_not_know_the_topic_is_not_believed_that_there_is_none() {
    let reply = Reply::Deliveries(Err(ConsumeError::TopicNotFound));
    let sent = answer(operation::CONSUME, 0, &reply).expect("goes to other nodes");
    assert_eq!(sent.status, status::UNAVAILABLE);
    let (_, got) = answered(&arrived(&sent)).expect("well-formed");
    assert!(matches!(got, Reply::Deliveries(Err(ConsumeError::OwnerDown))), "{got:?}");
    for (error, status) in [
        (CommitError::UnknownTopic, 503),
        (CommitError::Unavailable("it stops".to_owned()), 503),
        (CommitError::NotOwner, 421),
    ] {
        let sent = answer(operation::COMMIT_PRODUCE_BATCH, 0, &Reply::Commit(Err(error)));
        assert_eq!(sent.map(|frame| frame.status), Some(status));
    }
}

#[test]
fn e42_records_lie_in_the_received_frame() {
    let sent = ask(&commit(vec![record("k", "payload"), record("", "x")]), BUDGET).expect("a commit");
    let incoming = arrived(&sent);
    let payload = incoming.payload();
    let Ok(Request::Commit(batch)) = asked(&incoming) else { panic!("a commit") };
    assert_eq!(batch.records[0].body.as_ptr(), payload.as_ptr());
    assert_eq!(batch.records[1].body.as_ptr(), payload[8..].as_ptr());
}

#[test]
fn k39_a_commit_is_at_most_8_mib_or_one_record() {
    let large = |bytes: usize| Record { body: Slice::copy_from(&vec![1; bytes]), key_bytes: 0 };
    let sent = |records| asked(&arrived(&ask(&commit(records), BUDGET).expect("a commit")));
    assert!(sent(vec![large(4 << 20), large(4 << 20)]).is_ok());
    assert!(sent(vec![large(9 << 20)]).is_ok());
    assert!(sent(vec![large(4 << 20), large(5 << 20)]).is_err());
    assert!(sent(Vec::new()).is_err());
}

#[test]
fn e42_what_this_build_does_not_know_is_400() {
    let refusal = |change: fn(&mut Outgoing)| {
        let mut sent = ask(&commit(vec![record("k", "v")]), BUDGET).expect("a commit");
        change(&mut sent);
        asked(&arrived(&sent)).map(drop).map_err(|refusal| refusal.status)
    };
    assert_eq!(refusal(|_| {}), Ok(()));
    assert_eq!(refusal(|sent| sent.operation = 999), Err(400));
    assert_eq!(refusal(|sent| sent.version = 2), Err(400));
    assert_eq!(refusal(|sent| sent.version = 0), Err(400));
    assert_eq!(refusal(|sent| sent.payload.clear()), Err(400));
    assert_eq!(refusal(|sent| sent.payload.push(Slice::copy_from(b"more"))), Err(400));
    let refused = Refusal::new(503, "x".repeat(5000));
    let got = answered(&arrived(&refused.reply(operation::CONSUME, super::Lane::Consume)));
    assert_eq!(got.map(drop), Err(Refusal::new(503, "x".repeat(1024))));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn hostile_frames_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        frame(&bytes);
    }

    #[test]
    fn frames_with_a_few_wrong_bytes_never_panic(
        which in 0usize..100,
        wrong in proptest::collection::vec((any::<u16>(), any::<u8>()), 1..6),
    ) {
        let mut all: Vec<Vec<u8>> = requests().iter().map(|r| seed(&ask(r, BUDGET).expect("a frame"))).collect();
        all.extend(replies().iter().map(|(number, r)| seed(&answer(*number, 1, r).expect("a frame"))));
        let mut bytes = all.swap_remove(which % all.len());
        frame(&bytes);
        for (at, byte) in wrong {
            // The operation stays: another one's archive is seldom readable.
            let at = 1 + usize::from(at) % (bytes.len() - 1);
            bytes[at] = byte;
        }
        frame(&bytes);
    }
}
