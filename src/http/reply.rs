//! Answers, and every text a client can see that belongs to no single route.

use std::borrow::Cow;
use std::convert::Infallible;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use hyper::header::{HeaderName, HeaderValue, ALLOW, CONTENT_TYPE, RETRY_AFTER};
use hyper::{Response, StatusCode};
use narad_shards::api::ConsumeError;

use super::body::BodyFailure;
use super::stream::Conn;

/// Recorded for a request whose client left before the answer; never sent.
pub(crate) const CLIENT_LEFT: u16 = 499;

pub(crate) const TOPIC_NOT_FOUND: &str = "topic not found";
pub(crate) const PARTITION_OUT_OF_RANGE: &str = "invalid argument: partition out of range";
pub(crate) const MESSAGE_REQUIRED: &str = "message required";
pub(crate) const MESSAGE_TOO_LARGE: &str = "message too large";
pub(crate) const MEMORY_EXHAUSTED: &str = "memory budget exhausted, retry";
pub(crate) const NOT_OWNER: &str = "this node does not own the requested partition";
pub(crate) const OWNER_DOWN: &str = "partition owner is down; retry later";
pub(crate) const LEASE_GONE: &str = "receipt handle no longer matches an active reservation";
pub(crate) const ACK_UNANSWERED: &str = "the partition owner did not answer; the ack may have been applied; retry";
pub(crate) const HEADER_GUARD: &str = "state-changing requests must send Content-Type: application/json or \
     application/octet-stream, or an X-Narad-Client header";

pub(crate) const TRANSFER_CODING: &str = "unsupported transfer coding: only chunked is undone; send Content-Encoding \
     for compression";

pub(crate) const BODY_TOO_LARGE: &str = "request body too large";
pub(crate) const CONTENT_LENGTH: &str = "Content-Length must be one number of bytes, in decimal digits, the same \
     wherever it is given";

/// On a 5xx of a produce: `not-stored` is safe to send again anywhere, `unknown` may have been stored (lesson G2).
const OUTCOME: HeaderName = HeaderName::from_static("x-narad-outcome");

const UNKNOWN: &str = "unknown";

pub(crate) type Reply = Response<Bytes>;

pub(crate) fn empty(status: StatusCode) -> Reply {
    let mut reply = Response::new(Bytes::new());
    *reply.status_mut() = status;
    reply
}

/// `body` is one JSON text; the newline that ends every answer is added here.
pub(crate) fn json(status: StatusCode, mut body: Vec<u8>) -> Reply {
    body.push(b'\n');
    let mut reply = Response::new(Bytes::from(body));
    *reply.status_mut() = status;
    reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    reply
}

pub(crate) fn plain(status: StatusCode, text: &str) -> Reply {
    let mut reply = Response::new(Bytes::from(format!("{text}\n")));
    *reply.status_mut() = status;
    reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    reply
}

pub(crate) fn page_not_found() -> Reply {
    plain(StatusCode::NOT_FOUND, "404 page not found")
}

pub(crate) fn method_not_allowed(allow: &'static str) -> Reply {
    let mut reply = plain(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed");
    reply.headers_mut().insert(ALLOW, HeaderValue::from_static(allow));
    reply
}

/// A whole HTTP response for a request that hyper refused before the service saw it. `why`: what is wrong with it, where
/// the status alone does not say.
pub(crate) fn refusal(status: u16, why: Option<&str>) -> Vec<u8> {
    let reason = StatusCode::from_u16(status).ok().and_then(|s| s.canonical_reason()).unwrap_or("Bad Request");
    let (kind, body) = match why {
        Some(why) => ("application/json", format!("{{\"error\":\"{why}\"}}\n")),
        None => ("text/plain; charset=utf-8", format!("{status} {reason}\n")),
    };
    format!(
        "HTTP/1.1 {status} {reason}\r\ncontent-type: {kind}\r\nconnection: close\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// A refused request. `Display` texts are the ones on the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ApiError {
    pub status: StatusCode,
    pub text: Cow<'static, str>,
    /// Answers of the forwarding layer carry no JSON.
    plain: bool,
    retry_after: bool,
    outcome: Option<&'static str>,
    /// Nobody is there to read the answer: recorded as 499.
    pub client_left: bool,
}

impl ApiError {
    pub fn new(status: StatusCode, text: impl Into<Cow<'static, str>>) -> ApiError {
        ApiError { status, text: text.into(), plain: false, retry_after: false, outcome: None, client_left: false }
    }

    pub fn bad_request(text: impl Into<Cow<'static, str>>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, text)
    }

    pub fn topic_not_found() -> ApiError {
        ApiError::new(StatusCode::NOT_FOUND, TOPIC_NOT_FOUND)
    }

    pub fn too_large(text: &'static str) -> ApiError {
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, text)
    }

    /// `503` with `Retry-After: 1`.
    pub fn unavailable(text: impl Into<Cow<'static, str>>) -> ApiError {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, text).retry_after()
    }

    /// A part of the API that this node does not have yet.
    pub fn not_built(text: &'static str) -> ApiError {
        ApiError::new(StatusCode::NOT_IMPLEMENTED, text)
    }

    pub fn retry_after(mut self) -> ApiError {
        self.retry_after = true;
        self
    }

    pub fn plain_text(mut self) -> ApiError {
        self.plain = true;
        self
    }

    pub fn not_stored(mut self) -> ApiError {
        self.outcome = Some("not-stored");
        self
    }

    pub fn is_outcome_unknown(&self) -> bool {
        self.outcome == Some(UNKNOWN)
    }

    pub fn outcome_unknown(mut self) -> ApiError {
        self.outcome = Some(UNKNOWN);
        self
    }

    /// The same refusal, of one message of a batch.
    pub fn of_message(mut self, index: usize) -> ApiError {
        self.text = format!("message {index}: {}", self.text).into();
        self
    }

    pub fn into_reply(self) -> Reply {
        let mut reply = if self.plain { plain(self.status, &self.text) } else { json(self.status, self.json_body()) };
        if self.retry_after {
            reply.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if let Some(outcome) = self.outcome {
            reply.headers_mut().insert(OUTCOME, HeaderValue::from_static(outcome));
        }
        reply
    }

    fn json_body(&self) -> Vec<u8> {
        let mut body = b"{\"error\":".to_vec();
        super::json::write_string(&mut body, &self.text);
        body.push(b'}');
        body
    }
}

/// The part of a body's failure that is the same on every route; `too_large` is the route's own text.
pub(crate) fn body_refusal(failure: BodyFailure, too_large: &'static str) -> ApiError {
    match failure {
        BodyFailure::TooLarge => ApiError::too_large(too_large),
        BodyFailure::Left => {
            let mut error = ApiError::bad_request("the request body ended early");
            error.client_left = true;
            error
        }
        BodyFailure::Slow => ApiError::new(StatusCode::REQUEST_TIMEOUT, "the request body did not arrive in time"),
        BodyFailure::Malformed => ApiError::bad_request("invalid chunked request body"),
        BodyFailure::Undecodable => {
            ApiError::bad_request("the request body does not decode as its Content-Encoding says")
        }
        BodyFailure::NoMemory => ApiError::unavailable(MEMORY_EXHAUSTED).not_stored(),
        BodyFailure::NoBudget => {
            ApiError::unavailable("batch produce bodies in flight on this node are at their limit; retry").not_stored()
        }
    }
}

/// The same on the routes whose bodies are refused with `400` for their size.
pub(crate) fn body_refusal_400(failure: BodyFailure) -> ApiError {
    const TOO_LARGE: &str = "request body too large";
    match failure {
        BodyFailure::TooLarge => ApiError::bad_request(TOO_LARGE),
        other => body_refusal(other, TOO_LARGE),
    }
}

impl From<ConsumeError> for ApiError {
    fn from(error: ConsumeError) -> ApiError {
        match error {
            ConsumeError::TopicNotFound => ApiError::topic_not_found(),
            ConsumeError::PartitionOutOfRange => ApiError::bad_request(PARTITION_OUT_OF_RANGE),
            ConsumeError::NotOwner => ApiError::new(StatusCode::MISDIRECTED_REQUEST, NOT_OWNER),
            ConsumeError::ReadFailed(cause) => {
                tracing::error!(op = "consume", err = %cause, "http server error");
                ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "consume failed")
            }
            ConsumeError::Unreachable => {
                ApiError::new(StatusCode::BAD_GATEWAY, "the partition owner did not answer; retry").plain_text()
            }
            ConsumeError::OwnerDown => ApiError::unavailable(OWNER_DOWN).plain_text(),
            ConsumeError::Busy(text) => ApiError::unavailable(text),
        }
    }
}

/// An answer's body, in one piece. Its drop tells the connection that hyper has taken all of it.
pub(crate) struct ReplyBody {
    data: Option<Bytes>,
    conn: Rc<Conn>,
}

impl ReplyBody {
    pub fn new(data: Bytes, conn: Rc<Conn>) -> ReplyBody {
        ReplyBody { data: (!data.is_empty()).then_some(data), conn }
    }
}

impl Drop for ReplyBody {
    fn drop(&mut self) {
        self.conn.answer_taken();
    }
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.data.take().map(|data| Ok(Frame::data(data))))
    }

    fn is_end_stream(&self) -> bool {
        self.data.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.data.as_ref().map_or(0, |data| data.len() as u64))
    }
}
