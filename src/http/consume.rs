//! `GET /v1/topics/{topic}/consume`: single, batch and replay.

use std::time::Duration;

use hyper::header::{HeaderName, HeaderValue};
use hyper::StatusCode;
use narad_shards::api::{Delivery, ReadAt};
use narad_shards::peer::Take;
use narad_shards::rt;

use super::config::{CONSUME_BYTES_MAX, CONSUME_MAX, CONSUME_REPLY_BYTES_MAX};
use super::limits::Kind;
use super::message::{nack, write_message, MESSAGE_OVERHEAD_BYTES};
use super::metrics::{ConsumeOutcome, ConsumeTimer};
use super::pipeline::Call;
use super::produce::partition_number;
use super::query::{format_duration, parse_duration, unsigned};
use super::reply::{self, ApiError, Reply};
use super::stream::Leases;
use super::Broker;

const WAIT_CLAMPED: HeaderName = HeaderName::from_static("x-narad-wait-clamped");
/// Encoded bytes after which others have a turn.
const SLICE_BYTES: usize = 256 << 10;

pub(crate) async fn consume<B: Broker>(call: &Call<'_, B>, topic: &str) -> Result<Reply, ApiError> {
    let query = call.query;
    let max = query.first("max")?;
    let max_number = max.as_deref().map(|digits| unsigned::<u32>("max", Some(digits)));
    let weight = match &max_number {
        Some(Ok(Some(number @ 1..=CONSUME_MAX))) => *number,
        _ => 1,
    };
    let _slot = call.admit(Kind::Consume, weight)?;

    let max = match max_number {
        None => None,
        Some(number) => match number? {
            Some(number @ 1..=CONSUME_MAX) => Some(number),
            _ => return Err(ApiError::bad_request("query parameter max must be between 1 and 100")),
        },
    };
    let partition = query.first("partition")?;
    let partition = partition_number(partition.as_deref())?;
    let offset = unsigned::<u64>("offset", query.first("offset")?.as_deref())?;
    let wait = match query.first("wait")?.as_deref() {
        None | Some(b"") => Duration::ZERO,
        Some(text) => parse_duration(text)
            .ok_or(ApiError::bad_request("query parameter wait must be a duration of at least 0, such as 10s"))?,
    };

    if let Some(offset) = offset {
        if max.is_some() {
            return Err(ApiError::bad_request("query parameters max and offset exclude each other"));
        }
        let Some(partition) = partition else {
            return Err(ApiError::bad_request("partition required for replay-mode consume"));
        };
        return replay(call, topic, partition, offset).await;
    }
    if max.is_some() && !call.has_client_header() {
        return Err(ApiError::bad_request("a consume with max must send an X-Narad-Client header"));
    }

    let clamped = wait.min(call.ctx.settings.consume_wait_max);
    let mut reply = queue(call, topic, partition, max, clamped).await?;
    if clamped < wait {
        // As bytes: Go writes microseconds with a letter outside ASCII.
        let value = HeaderValue::from_bytes(format_duration(clamped).as_bytes());
        let value = value.expect("digits, a point and letters are a valid header value");
        reply.headers_mut().insert(WAIT_CLAMPED, value);
    }
    Ok(reply)
}

async fn queue<B: Broker>(
    call: &Call<'_, B>,
    topic: &str,
    partition: Option<u32>,
    max: Option<u32>,
    wait: Duration,
) -> Result<Reply, ApiError> {
    let take = Take { max: max.unwrap_or(1), bytes_max: CONSUME_BYTES_MAX };
    let timer = ConsumeTimer::start(call.ctx, topic);
    let result = call.ctx.broker.consume(topic, partition, take, wait).await;
    match &result {
        Err(error) => timer.refused(error),
        Ok(deliveries) if !deliveries.is_empty() => timer.finish(ConsumeOutcome::Hit),
        Ok(_) if wait.is_zero() => timer.finish(ConsumeOutcome::NoWait),
        Ok(_) => timer.finish(ConsumeOutcome::Timeout),
    }
    let deliveries = result?;
    let Some(first) = deliveries.first() else { return Ok(reply::empty(StatusCode::NO_CONTENT)) };

    // From here on the leases are in the connection's care: they go back unless the whole answer leaves.
    let settles = deliveries.iter().map(nack).collect();
    call.conn.leases.replace(Some(Leases { topic: topic.to_owned(), settles }));

    if max.is_none() {
        return Ok(reply::json(StatusCode::OK, encode(Vec::new(), first).await));
    }
    let (body, sent) = write_batch(&deliveries).await;
    if sent < deliveries.len() {
        let rest = {
            let mut leases = call.conn.leases.borrow_mut();
            leases.as_mut().map(|leases| leases.settles.split_off(sent)).unwrap_or_default()
        };
        // A failure leaves them to their visibility timeout, as if the client had been slow.
        let _ = call.ctx.broker.settle(topic, rest).await;
    }
    Ok(reply::json(StatusCode::OK, body))
}

/// Encodes as many messages as fit the reply, at least one, and says how many.
async fn write_batch(deliveries: &[Delivery]) -> (Vec<u8>, usize) {
    const END: &[u8] = b"]}";
    let room = CONSUME_REPLY_BYTES_MAX - END.len() - b"\n".len();
    let likely = deliveries.iter().map(|delivery| delivery.body.len() + MESSAGE_OVERHEAD_BYTES).sum::<usize>();
    let mut body = Vec::with_capacity(likely.min(CONSUME_REPLY_BYTES_MAX));
    body.extend_from_slice(b"{\"messages\":[");
    let (mut sent, mut slice_start) = (0, 0);
    for delivery in deliveries {
        let before = body.len();
        if sent > 0 {
            body.push(b',');
        }
        body = encode(body, delivery).await;
        if sent > 0 && body.len() > room {
            body.truncate(before);
            break;
        }
        sent += 1;
        if body.len() - slice_start >= SLICE_BYTES {
            slice_start = body.len();
            rt::yield_now().await;
        }
    }
    body.extend_from_slice(END);
    (body, sent)
}

/// Appends a message; off the shard when checking and escaping its payload would take longer than it may.
async fn encode(mut body: Vec<u8>, delivery: &Delivery) -> Vec<u8> {
    if delivery.payload().len() < SLICE_BYTES {
        write_message(&mut body, delivery);
        return body;
    }
    let delivery = delivery.clone();
    let encoded = rt::blocking(move || {
        write_message(&mut body, &delivery);
        body
    });
    encoded.await
}

async fn replay<B: Broker>(call: &Call<'_, B>, topic: &str, partition: u32, offset: u64) -> Result<Reply, ApiError> {
    match call.ctx.broker.read_at(topic, partition, offset).await? {
        ReadAt::Record(mut delivery) => {
            // No lease, so no handle, whatever the record was read with.
            delivery.nonce = 0;
            Ok(reply::json(StatusCode::OK, encode(Vec::new(), &delivery).await))
        }
        ReadAt::PastEnd => Ok(reply::empty(StatusCode::NO_CONTENT)),
        ReadAt::AgedOut { oldest } => {
            let text = format!("offset {offset} aged out of retention (oldest retained: {oldest})");
            Err(ApiError::new(StatusCode::GONE, text))
        }
        ReadAt::Unreadable => Err(ApiError::new(StatusCode::GONE, format!("offset {offset} cannot be read"))),
    }
}
