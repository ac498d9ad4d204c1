//! `POST /v1/topics/{topic}/produce` and `/produce/batch`.

use hyper::header::CONTENT_ENCODING;
use hyper::StatusCode;
use narad_shards::api::{NewRecord, ProduceError, DISK_RESERVE, DRAINING};
use narad_shards::rt;

use super::batch::Batch;
use super::body::{BodyFailure, BodyReader};
use super::config::{BATCH_BYTES_MAX, MESSAGE_BYTES_MAX};
use super::decode::Coding;
use super::limits::{BodyReservation, Kind};
use super::pipeline::Call;
use super::query::unsigned;
use super::reply::{
    self, ApiError, Reply, BODY_TOO_LARGE, MEMORY_EXHAUSTED, MESSAGE_REQUIRED, MESSAGE_TOO_LARGE,
    PARTITION_OUT_OF_RANGE,
};
use super::Broker;

/// Bodies up to this size are parsed where they are; larger ones would hold the core for more than a millisecond.
const PARSE_IN_PLACE_BYTES: usize = 256 << 10;

pub(crate) async fn single<B: Broker>(
    call: &Call<'_, B>,
    topic: &str,
    body: &mut BodyReader<'_>,
) -> Result<Reply, ApiError> {
    let _slot = call.admit(Kind::Produce, 1)?;
    let key = call.query.only("key")?;
    let partition = call.query.only("partition")?;
    let partition = partition_number(partition.as_deref())?;
    let payload =
        body.read_all(MESSAGE_BYTES_MAX).await.map_err(|failure| reply::body_refusal(failure, MESSAGE_TOO_LARGE))?;
    if payload.is_empty() {
        return Err(ApiError::bad_request(MESSAGE_REQUIRED));
    }
    let record = NewRecord { key: key.as_deref().unwrap_or_default(), payload: &payload, partition };
    match call.ctx.broker.produce(topic, record).await {
        Ok(()) => Ok(reply::empty(StatusCode::ACCEPTED)),
        Err(error) => Err(refusal(error).0),
    }
}

pub(crate) async fn batch<B: Broker>(
    call: &Call<'_, B>,
    topic: &str,
    body: &mut BodyReader<'_>,
) -> Result<Reply, ApiError> {
    let mut slot = call.admit(Kind::Produce, 1)?;
    for name in ["key", "partition"] {
        if call.query.has(name) {
            let text = format!("query parameter {name} is not allowed on a batch; set it on the messages");
            return Err(ApiError::bad_request(text));
        }
    }
    let codings = call.head.headers.get_all(CONTENT_ENCODING).iter().map(|value| value.as_bytes());
    let coding = Coding::parse(codings).ok_or(ApiError::new(
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        "unsupported Content-Encoding: want zstd, gzip or none",
    ))?;
    // Held until the answer: it stands for the memory of the body and of what was decoded from it.
    let mut reservation = BodyReservation::of_large_bodies(&call.ctx.node);
    let refused = |failure| {
        if failure == BodyFailure::NoBudget {
            call.ctx.metrics.count_budget_rejection();
        }
        reply::body_refusal(failure, BODY_TOO_LARGE)
    };
    let bytes = body.read_decoded(coding, BATCH_BYTES_MAX, &mut reservation).await.map_err(refused)?;
    body.hold_twice(&bytes).map_err(refused)?;
    let batch = if bytes.len() <= PARSE_IN_PLACE_BYTES {
        Batch::parse(bytes)?
    } else {
        rt::blocking(move || Batch::parse(bytes)).await?
    };
    body.let_go(batch.memory_bytes());
    if let Some(slot) = &mut slot {
        let messages = u32::try_from(batch.len()).unwrap_or(u32::MAX);
        slot.grow_to(messages).map_err(|_| call.too_many(Kind::Produce))?;
    }
    let records = batch.records();
    match call.ctx.broker.produce_batch(topic, &records).await {
        Ok(()) => Ok(reply::json(StatusCode::ACCEPTED, format!("{{\"accepted\":{}}}", records.len()).into_bytes())),
        Err(error) => Err(match refusal(error) {
            (error, Some(index)) => error.of_message(index),
            (error, None) => error,
        }),
    }
}

/// A pinned partition. One that no topic can have is left to the range check of the topic.
pub(crate) fn partition_number(value: Option<&[u8]>) -> Result<Option<u32>, ApiError> {
    let negative = value.is_some_and(|v| v.len() > 1 && v[0] == b'-' && v[1..].iter().all(u8::is_ascii_digit));
    if negative {
        return Err(ApiError::bad_request(PARTITION_OUT_OF_RANGE));
    }
    let number = unsigned::<u64>("partition", value)?;
    Ok(number.map(|number| u32::try_from(number).unwrap_or(u32::MAX)))
}

/// The answer to a produce that failed, and the place of the message that caused it, when one did.
fn refusal(error: ProduceError) -> (ApiError, Option<usize>) {
    let error = match error {
        ProduceError::TopicNotFound => ApiError::topic_not_found(),
        ProduceError::PartitionOutOfRange { index } => {
            return (ApiError::bad_request(PARTITION_OUT_OF_RANGE), Some(index));
        }
        ProduceError::LogFailed(cause) => {
            tracing::error!(op = "produce", err = %cause, "http server error");
            ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "produce failed").outcome_unknown()
        }
        // E9: it heals by itself, so a client is asked to come back.
        ProduceError::Unavailable(cause) => {
            tracing::warn!(op = "produce", err = %cause, "the ingress log cannot take records at the moment; produce answers 503 until it can");
            ApiError::unavailable("the ingress log cannot grow at the moment, retry").not_stored()
        }
        ProduceError::MemoryExhausted => ApiError::unavailable(MEMORY_EXHAUSTED).not_stored(),
        ProduceError::DiskReserve => ApiError::unavailable(DISK_RESERVE).not_stored(),
        ProduceError::Draining => ApiError::unavailable(DRAINING).not_stored(),
    };
    (error, None)
}
