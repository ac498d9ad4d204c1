//! Claims, long polls and replay reads, and the records that answer them.

use std::sync::Arc;
use std::time::Duration;

use rkyv::{Archive, Deserialize, Serialize};

use super::archive::{cut, read, reply, request, Pieces, Refusal};
use super::{operation, status, Incoming, Lane, Outgoing};
use crate::api::{ConsumeError, Delivery, ReadAt};
use crate::meta::{Incarnation, NodeId, ShardId};
use crate::peer::{Reply, Request, Take, Token, WaiterId};

/// What one answer may take, whatever was asked for: with the record that crosses it still far below a frame (C90).
const ANSWER_BYTES_MAX: u64 = 4 << 20;
const ANSWER_RECORDS_MAX: u32 = 1000;

/// Pinned with `wait_ms` is a long poll, pinned without it a claim; not pinned it asks the whole node.
#[derive(Archive, Serialize, Deserialize)]
struct ConsumeV1 {
    incarnation: u64,
    bytes_max: u64,
    max: u32,
    partition: Option<u32>,
    wait_ms: Option<u32>,
    token: Option<TokenV1>,
}

#[derive(Archive, Serialize, Deserialize)]
pub(super) struct TokenV1 {
    node: u64,
    boot_id: u64,
}

impl TokenV1 {
    pub fn of(token: &Token) -> TokenV1 {
        TokenV1 { node: token.node.0, boot_id: token.boot_id }
    }

    pub fn token(&self) -> Token {
        Token { node: NodeId(self.node), boot_id: self.boot_id }
    }
}

#[derive(Archive, Serialize, Deserialize)]
struct ReadAtV1 {
    incarnation: u64,
    offset: u64,
    partition: u32,
}

#[derive(Archive, Serialize, Deserialize)]
pub(super) enum FailureV1 {
    TopicNotFound,
    PartitionOutOfRange,
    NotOwner,
    ReadFailed(String),
    Unreachable,
    OwnerDown,
    Busy(String),
}

impl FailureV1 {
    pub fn of(error: &ConsumeError) -> (u16, FailureV1) {
        match error {
            // E52: this node's view may be older than the asker's, so it is never "no such topic".
            ConsumeError::TopicNotFound => (status::UNAVAILABLE, FailureV1::TopicNotFound),
            ConsumeError::PartitionOutOfRange => (status::BAD_REQUEST, FailureV1::PartitionOutOfRange),
            ConsumeError::NotOwner => (status::MISDIRECTED, FailureV1::NotOwner),
            ConsumeError::ReadFailed(cause) => (status::INTERNAL, FailureV1::ReadFailed(cut(cause.clone()))),
            ConsumeError::Unreachable => (status::UNAVAILABLE, FailureV1::Unreachable),
            ConsumeError::OwnerDown => (status::UNAVAILABLE, FailureV1::OwnerDown),
            ConsumeError::Busy(cause) => (status::UNAVAILABLE, FailureV1::Busy(cut(cause.clone()))),
        }
    }

    pub fn error(self) -> ConsumeError {
        match self {
            FailureV1::PartitionOutOfRange => ConsumeError::PartitionOutOfRange,
            FailureV1::NotOwner => ConsumeError::NotOwner,
            FailureV1::ReadFailed(cause) => ConsumeError::ReadFailed(cut(cause)),
            FailureV1::Unreachable => ConsumeError::Unreachable,
            FailureV1::Busy(cause) => ConsumeError::Busy(cut(cause)),
            FailureV1::TopicNotFound | FailureV1::OwnerDown => ConsumeError::OwnerDown,
        }
    }
}

#[derive(Archive, Serialize, Deserialize)]
struct HeadV1 {
    offset: u64,
    timestamp_ms: u64,
    nonce: u64,
    partition: u32,
    key_bytes: u32,
    body_bytes: u32,
}

/// Records of one topic; their bodies are the payload, in order.
#[derive(Archive, Serialize, Deserialize)]
struct RecordsV1 {
    incarnation: u64,
    topic: String,
    records: Vec<HeadV1>,
}

#[derive(Archive, Serialize, Deserialize)]
enum OutcomeV1 {
    Records(RecordsV1),
    PastEnd,
    AgedOut { oldest: u64 },
    Unreadable,
    Failed(FailureV1),
}

#[derive(Archive, Serialize, Deserialize)]
struct ConsumeReplyV1 {
    shard: u16,
    outcome: OutcomeV1,
}

pub(super) fn encode(request_: &Request, budget: Duration) -> Option<Outgoing> {
    let (incarnation, partition, take, wait, token) = match request_ {
        Request::Claim { incarnation, partition: Some(partition), take, .. } => {
            (incarnation, Some(*partition), take, None, None)
        }
        Request::Park { incarnation, partition: Some(partition), take, wait, .. } => {
            (incarnation, Some(*partition), take, Some(*wait), None)
        }
        Request::NodeClaim { incarnation, take, token } => (incarnation, None, take, None, token.as_ref()),
        _ => return None,
    };
    let value = ConsumeV1 {
        incarnation: incarnation.0,
        bytes_max: take.bytes_max as u64,
        max: take.max,
        partition,
        wait_ms: wait.map(|wait| u32::try_from(wait.as_millis()).unwrap_or(u32::MAX)),
        token: token.map(TokenV1::of),
    };
    Some(request(operation::CONSUME, Lane::Consume, budget, &value, Vec::new()))
}

pub(super) fn decode(incoming: &Incoming) -> Result<Request, Refusal> {
    let value: ConsumeV1 = read(incoming)?;
    let incarnation = Incarnation(value.incarnation);
    let bytes_max = value.bytes_max.min(ANSWER_BYTES_MAX) as usize;
    let take = Take { max: value.max.clamp(1, ANSWER_RECORDS_MAX), bytes_max };
    Ok(match (value.partition, value.wait_ms) {
        (Some(partition), Some(wait_ms)) => {
            // Whoever serves it gives the waiter a name of its own.
            let (waiter, wait) = (WaiterId { shard: 0, serial: 0 }, Duration::from_millis(u64::from(wait_ms)));
            Request::Park { waiter, incarnation, partition: Some(partition), take, wait }
        }
        (Some(partition), None) => Request::Claim { incarnation, partition: Some(partition), take, arm: false },
        (None, _) => Request::NodeClaim { incarnation, take, token: value.token.map(|token| token.token()) },
    })
}

pub(super) fn encode_read_at(incarnation: Incarnation, partition: u32, offset: u64, budget: Duration) -> Outgoing {
    let value = ReadAtV1 { incarnation: incarnation.0, offset, partition };
    request(operation::READ_AT, Lane::Consume, budget, &value, Vec::new())
}

pub(super) fn decode_read_at(incoming: &Incoming) -> Result<Request, Refusal> {
    let ReadAtV1 { incarnation, offset, partition } = read(incoming)?;
    Ok(Request::ReadAt { incarnation: Incarnation(incarnation), partition, offset })
}

fn records(deliveries: &[Delivery]) -> OutcomeV1 {
    let head = |delivery: &Delivery| HeadV1 {
        offset: delivery.offset,
        timestamp_ms: delivery.timestamp_ms,
        nonce: delivery.nonce,
        partition: delivery.partition,
        key_bytes: delivery.key_bytes,
        body_bytes: delivery.body.len() as u32,
    };
    // All of one topic: whoever asked, asked for one.
    let (incarnation, topic) =
        deliveries.first().map_or((0, String::new()), |first| (first.incarnation.0, first.topic.to_string()));
    OutcomeV1::Records(RecordsV1 { incarnation, topic, records: deliveries.iter().map(head).collect() })
}

pub(super) fn encode_reply(number: u16, shard: ShardId, reply_: &Reply) -> Option<Outgoing> {
    let failed = |error: &ConsumeError| {
        let (status, failure) = FailureV1::of(error);
        (status, OutcomeV1::Failed(failure), &[][..])
    };
    let (status, outcome, deliveries) = match reply_ {
        Reply::Deliveries(Ok(none)) if none.is_empty() => (status::NOTHING, records(none), &[][..]),
        Reply::Deliveries(Ok(some)) => (status::OK, records(some), &some[..]),
        Reply::Deliveries(Err(error)) | Reply::ReadAt(Err(error)) => failed(error),
        Reply::ReadAt(Ok(ReadAt::Record(record))) => {
            let one = std::slice::from_ref(record);
            (status::OK, records(one), one)
        }
        Reply::ReadAt(Ok(ReadAt::PastEnd)) => (status::NOTHING, OutcomeV1::PastEnd, &[][..]),
        Reply::ReadAt(Ok(ReadAt::AgedOut { oldest })) => {
            (status::GONE, OutcomeV1::AgedOut { oldest: *oldest }, &[][..])
        }
        Reply::ReadAt(Ok(ReadAt::Unreadable)) => (status::GONE, OutcomeV1::Unreadable, &[][..]),
        _ => return None,
    };
    let payload = deliveries.iter().filter(|d| !d.body.is_empty()).map(|d| d.body.clone()).collect();
    Some(reply(number, Lane::Consume, status, &ConsumeReplyV1 { shard, outcome }, payload))
}

pub(super) fn decode_reply(incoming: &Incoming) -> Result<(ShardId, Reply), Refusal> {
    let value: ConsumeReplyV1 = read(incoming)?;
    let replay = incoming.header.operation == operation::READ_AT;
    let reply = match value.outcome {
        OutcomeV1::Records(records) => {
            let mut deliveries = deliveries(incoming, records)?;
            match (replay, deliveries.len()) {
                (false, _) => Reply::Deliveries(Ok(deliveries)),
                (true, 1) => Reply::ReadAt(Ok(ReadAt::Record(deliveries.swap_remove(0)))),
                (true, _) => return Err(Refusal::bad("a replay read of several records")),
            }
        }
        OutcomeV1::Failed(failure) if replay => Reply::ReadAt(Err(failure.error())),
        OutcomeV1::Failed(failure) => Reply::Deliveries(Err(failure.error())),
        OutcomeV1::PastEnd => Reply::ReadAt(Ok(ReadAt::PastEnd)),
        OutcomeV1::AgedOut { oldest } => Reply::ReadAt(Ok(ReadAt::AgedOut { oldest })),
        OutcomeV1::Unreadable => Reply::ReadAt(Ok(ReadAt::Unreadable)),
    };
    match (&reply, replay) {
        (Reply::ReadAt(_), true) | (Reply::Deliveries(_), false) => Ok((value.shard, reply)),
        _ => Err(Refusal::bad("a reply to another operation")),
    }
}

fn deliveries(incoming: &Incoming, records: RecordsV1) -> Result<Vec<Delivery>, Refusal> {
    let topic: Arc<str> = Arc::from(records.topic);
    let mut pieces = Pieces::of(incoming);
    let mut deliveries = Vec::with_capacity(records.records.len());
    for head in records.records {
        let body = pieces.next(head.body_bytes)?;
        if head.key_bytes as usize > body.len() {
            return Err(Refusal::bad("a key that is longer than its record"));
        }
        deliveries.push(Delivery {
            topic: topic.clone(),
            incarnation: Incarnation(records.incarnation),
            partition: head.partition,
            offset: head.offset,
            timestamp_ms: head.timestamp_ms,
            body,
            key_bytes: head.key_bytes,
            nonce: head.nonce,
        });
    }
    pieces.finish()?;
    Ok(deliveries)
}
