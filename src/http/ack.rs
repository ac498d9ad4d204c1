//! `POST /v1/topics/{topic}/ack`: ack, extend, nack; one handle or many.

use hyper::StatusCode;
use narad_shards::api::{Settle, SettleMode, SettleStatus};
use serde::de::{MapAccess, SeqAccess};

use super::body::BodyReader;
use super::config::{ACK_BODY_BYTES_MAX, ACK_HANDLES_MAX};
use super::json::{self, Bounded, Element, Fields, Name};
use super::message::parse_handle;
use super::pipeline::Call;
use super::reply::{self, ApiError, Reply, ACK_UNANSWERED, LEASE_GONE, NOT_OWNER, OWNER_DOWN};
use super::{Broker, TopicNotFound};

const HANDLE_REQUIRED: &str = "receipt_handle required";
const INVALID_HANDLE: &str = "invalid receipt_handle";
const TOO_MANY: &str = "too many receipt_handles: more than 100";

pub(crate) async fn ack<B: Broker>(
    call: &Call<'_, B>,
    topic: &str,
    body: &mut BodyReader<'_>,
) -> Result<Reply, ApiError> {
    let mode = match call.query.first("extend")?.as_deref() {
        None | Some(b"false") => SettleMode::Ack,
        Some(b"true" | b"1") => SettleMode::Extend,
        Some(b"0") => SettleMode::Nack,
        Some(_) => return Err(ApiError::bad_request("query parameter extend must be true, false, 1 or 0")),
    };
    match call.query.first("receipt_handle")? {
        Some(handle) => single(call, topic, &handle, mode).await,
        None => batch(call, topic, body, mode).await,
    }
}

async fn single<B: Broker>(
    call: &Call<'_, B>,
    topic: &str,
    handle: &[u8],
    mode: SettleMode,
) -> Result<Reply, ApiError> {
    if handle.is_empty() {
        return Err(ApiError::bad_request(HANDLE_REQUIRED));
    }
    let settle = parse_handle(handle, mode).ok_or(ApiError::bad_request(INVALID_HANDLE))?;
    let statuses = call.ctx.broker.settle(topic, vec![settle]).await;
    let status = statuses.map_err(|TopicNotFound| ApiError::topic_not_found())?.first().copied();
    match status.unwrap_or(SettleStatus::Unanswered) {
        SettleStatus::Done => Ok(reply::empty(StatusCode::NO_CONTENT)),
        SettleStatus::LeaseGone => Err(ApiError::new(StatusCode::GONE, LEASE_GONE)),
        SettleStatus::NotOwner => Err(ApiError::new(StatusCode::MISDIRECTED_REQUEST, NOT_OWNER)),
        SettleStatus::Unanswered => Err(ApiError::new(StatusCode::BAD_GATEWAY, ACK_UNANSWERED).plain_text()),
        SettleStatus::OwnerDown => Err(ApiError::unavailable(OWNER_DOWN).plain_text()),
    }
}

/// What one handle's entry in the results says.
fn entry(status: SettleStatus) -> (u16, Option<&'static str>) {
    match status {
        SettleStatus::Done => (204, None),
        SettleStatus::LeaseGone => (410, Some(LEASE_GONE)),
        SettleStatus::NotOwner => (421, Some(NOT_OWNER)),
        SettleStatus::Unanswered => (502, Some(ACK_UNANSWERED)),
        SettleStatus::OwnerDown => (503, Some(OWNER_DOWN)),
    }
}

async fn batch<B: Broker>(
    call: &Call<'_, B>,
    topic: &str,
    body: &mut BodyReader<'_>,
    mode: SettleMode,
) -> Result<Reply, ApiError> {
    let body = body.read_all(ACK_BODY_BYTES_MAX).await;
    let body = body.map_err(|failure| reply::body_refusal(failure, "request body too large"))?;
    if body.is_empty() {
        return Err(ApiError::bad_request(HANDLE_REQUIRED));
    }
    let handles = json::parse::<Handles<'_>>(&body)?.handles;
    if handles.is_empty() {
        return Err(ApiError::bad_request("receipt_handles required"));
    }
    let parsed: Vec<Option<Settle>> = handles.iter().map(|handle| parse_handle(handle.0.as_bytes(), mode)).collect();
    let settles: Vec<Settle> = parsed.iter().flatten().copied().collect();
    let statuses = call.ctx.broker.settle(topic, settles).await;
    let mut statuses = statuses.map_err(|TopicNotFound| ApiError::topic_not_found())?.into_iter();

    let mut out = b"{\"results\":[".to_vec();
    for (index, settle) in parsed.iter().enumerate() {
        let (status, error) = match settle {
            None => (400, Some(INVALID_HANDLE)),
            Some(_) => entry(statuses.next().unwrap_or(SettleStatus::Unanswered)),
        };
        if index > 0 {
            out.push(b',');
        }
        out.push(b'{');
        json::write_name(&mut out, "status");
        json::write_number(&mut out, status.into());
        if let Some(error) = error {
            json::write_name(&mut out, "error");
            json::write_string(&mut out, error);
        }
        out.push(b'}');
    }
    out.extend_from_slice(b"]}");
    Ok(reply::json(StatusCode::OK, out))
}

#[derive(Default)]
pub(super) struct Handles<'a> {
    pub handles: Vec<Name<'a>>,
}

impl<'a> Fields<'a> for Handles<'a> {
    fn member<A: MapAccess<'a>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error> {
        match name {
            "receipt_handles" => {
                self.handles = map.next_value_seed(Bounded::new(ACK_HANDLES_MAX, TOO_MANY))?;
                Ok(())
            }
            other => Err(json::unknown_field(other)),
        }
    }
}

impl<'a> Element<'a> for Name<'a> {
    fn read<A: SeqAccess<'a>>(elements: &mut A) -> Result<Option<Self>, A::Error> {
        elements.next_element()
    }
}
