//! Commits and synchronous produces, and their outcomes.

use std::sync::Arc;
use std::time::Duration;

use rkyv::{Archive, Deserialize, Serialize};

use super::archive::{cut, read, reply, request, Pieces, Refusal};
use super::{operation, status, Incoming, Lane, Outgoing};
use crate::io::Slice;
use crate::meta::{Destination, Incarnation, ShardId};
use crate::peer::{CommitBatch, CommitError, Committed, Record, Reply, Request};

/// Bodies of one commit, unless it is a single record (K39, E16).
const COMMIT_BYTES_MAX: usize = 8 << 20;
/// Records of one commit: as many as the dispatcher's bound in bytes lets through.
const COMMIT_RECORDS_MAX: usize = 1 << 17;
/// Far above what a topic may be called.
const TOPIC_BYTES_MAX: usize = 1024;

#[derive(Archive, Serialize, Deserialize)]
struct Lengths {
    body_bytes: u32,
    key_bytes: u32,
}

#[derive(Archive, Serialize, Deserialize)]
struct CommitV1 {
    incarnation: u64,
    partition: u32,
    accepted_under: Option<u64>,
    topic: String,
    records: Vec<Lengths>,
}

#[derive(Archive, Serialize, Deserialize)]
struct ProduceV1 {
    topic: String,
    partition: Option<u32>,
    key_bytes: u32,
}

#[derive(Archive, Serialize, Deserialize)]
enum OutcomeV1 {
    Committed { base_offset: u64, count: u64 },
    NotOwner,
    Frozen,
    UnknownTopic,
    Mismatch { accepted_under: u64, live: u64 },
    Spent,
    Poisoned(String),
    Failed(String),
    Unreachable(String),
    Unavailable(String),
}

/// `partition` is the one that a synchronous produce has picked.
#[derive(Archive, Serialize, Deserialize)]
struct CommitReplyV1 {
    shard: u16,
    partition: u32,
    outcome: OutcomeV1,
}

/// The same archive under two numbers: one record that commits by name (operation 10), or a batch (operation 11).
pub(super) fn encode(batch: &CommitBatch, budget: Duration) -> Outgoing {
    let single = batch.records.len() == 1 && batch.accepted_under.is_none();
    let number = if single { operation::COMMIT_PRODUCE } else { operation::COMMIT_PRODUCE_BATCH };
    let lengths = |record: &Record| Lengths { body_bytes: record.body.len() as u32, key_bytes: record.key_bytes };
    let value = CommitV1 {
        incarnation: batch.destination.incarnation.0,
        partition: batch.destination.partition,
        accepted_under: batch.accepted_under.map(|incarnation| incarnation.0),
        topic: batch.topic.to_string(),
        records: batch.records.iter().map(lengths).collect(),
    };
    let payload = batch.records.iter().filter(|record| !record.body.is_empty()).map(|record| record.body.clone());
    request(number, Lane::Produce, budget, &value, payload.collect())
}

pub(super) fn decode(incoming: &Incoming) -> Result<Request, Refusal> {
    let value: CommitV1 = read(incoming)?;
    let payload_bytes = incoming.payload().len();
    let few = !value.records.is_empty() && value.records.len() <= COMMIT_RECORDS_MAX;
    if !few || (value.records.len() > 1 && payload_bytes > COMMIT_BYTES_MAX) || value.topic.len() > TOPIC_BYTES_MAX {
        return Err(Refusal::bad("a commit of no record, or of too many"));
    }
    let mut pieces = Pieces::of(incoming);
    let mut records = Vec::with_capacity(value.records.len());
    for Lengths { body_bytes, key_bytes } in value.records {
        records.push(record(pieces.next(body_bytes)?, key_bytes)?);
    }
    pieces.finish()?;
    Ok(Request::Commit(CommitBatch {
        destination: Destination { incarnation: Incarnation(value.incarnation), partition: value.partition },
        topic: Arc::from(value.topic),
        accepted_under: value.accepted_under.map(Incarnation),
        records,
        budget: incoming.budget(),
    }))
}

fn record(body: Slice, key_bytes: u32) -> Result<Record, Refusal> {
    if key_bytes as usize > body.len() {
        return Err(Refusal::bad("a key that is longer than its record"));
    }
    Ok(Record { body, key_bytes })
}

pub(super) fn encode_produce(topic: &str, partition: Option<u32>, record: &Record, budget: Duration) -> Outgoing {
    let value = ProduceV1 { topic: topic.to_owned(), partition, key_bytes: record.key_bytes };
    request(operation::PRODUCE, Lane::Produce, budget, &value, vec![record.body.clone()])
}

pub(super) fn decode_produce(incoming: &Incoming) -> Result<Request, Refusal> {
    let value: ProduceV1 = read(incoming)?;
    if value.topic.len() > TOPIC_BYTES_MAX || incoming.payload().len() > COMMIT_BYTES_MAX {
        return Err(Refusal::bad("a record that is too long"));
    }
    let record = record(incoming.payload(), value.key_bytes)?;
    Ok(Request::Produce { topic: Arc::from(value.topic), partition: value.partition, record })
}

pub(super) fn encode_reply(number: u16, shard: ShardId, reply_: &Reply) -> Option<Outgoing> {
    let (partition, result) = match reply_ {
        Reply::Commit(result) => (0, result.clone()),
        Reply::Produced(Ok((partition, committed))) => (*partition, Ok(*committed)),
        Reply::Produced(Err(error)) => (0, Err(error.clone())),
        _ => return None,
    };
    let (status, outcome) = match result {
        Ok(Committed { base_offset, count }) => (status::OK, OutcomeV1::Committed { base_offset, count }),
        Err(CommitError::NotOwner) => (status::MISDIRECTED, OutcomeV1::NotOwner),
        Err(CommitError::Frozen) => (status::UNAVAILABLE, OutcomeV1::Frozen),
        Err(CommitError::UnknownTopic) => (status::UNAVAILABLE, OutcomeV1::UnknownTopic),
        Err(CommitError::IncarnationMismatch { accepted_under, live }) => {
            let outcome = OutcomeV1::Mismatch { accepted_under: accepted_under.0, live: live.0 };
            (status::PRECONDITION_FAILED, outcome)
        }
        Err(CommitError::Spent) => (status::UNAVAILABLE, OutcomeV1::Spent),
        Err(CommitError::Poisoned(cause)) => (status::INTERNAL, OutcomeV1::Poisoned(cut(cause))),
        Err(CommitError::Unavailable(cause)) => (status::UNAVAILABLE, OutcomeV1::Unavailable(cut(cause))),
        Err(CommitError::Failed(cause)) => (status::INTERNAL, OutcomeV1::Failed(cut(cause))),
        Err(CommitError::Unreachable(cause)) => (status::INTERNAL, OutcomeV1::Unreachable(cut(cause))),
    };
    Some(reply(number, Lane::Produce, status, &CommitReplyV1 { shard, partition, outcome }, Vec::new()))
}

pub(super) fn decode_reply(incoming: &Incoming) -> Result<(ShardId, Reply), Refusal> {
    let value: CommitReplyV1 = read(incoming)?;
    let result = match value.outcome {
        OutcomeV1::Committed { base_offset, count } => Ok(Committed { base_offset, count }),
        OutcomeV1::NotOwner => Err(CommitError::NotOwner),
        OutcomeV1::Frozen => Err(CommitError::Frozen),
        OutcomeV1::UnknownTopic => Err(CommitError::UnknownTopic),
        OutcomeV1::Mismatch { accepted_under, live } => Err(CommitError::IncarnationMismatch {
            accepted_under: Incarnation(accepted_under),
            live: Incarnation(live),
        }),
        OutcomeV1::Spent => Err(CommitError::Spent),
        OutcomeV1::Poisoned(cause) => Err(CommitError::Poisoned(cut(cause))),
        OutcomeV1::Failed(cause) => Err(CommitError::Failed(cut(cause))),
        OutcomeV1::Unavailable(cause) => Err(CommitError::Unavailable(cut(cause))),
        OutcomeV1::Unreachable(cause) => Err(CommitError::Unreachable(cut(cause))),
    };
    let reply = match incoming.header.operation {
        operation::PRODUCE => Reply::Produced(result.map(|committed| (value.partition, committed))),
        _ => Reply::Commit(result),
    };
    Ok((value.shard, reply))
}
