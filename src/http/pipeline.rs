//! The order in which a request is judged. The first failure answers.

use std::rc::Rc;
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::header::{
    AUTHORIZATION, CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, TRANSFER_ENCODING,
};
use hyper::http::request::Parts;
use hyper::{Method, Request, Response, StatusCode};
use narad_shards::rt;

use super::body::BodyReader;
use super::limits::{Identity, InFlightSlot, Kind};
use super::metrics::Observed;
use super::query::Query;
use super::reply::{self, ApiError, Reply, ReplyBody, CLIENT_LEFT, HEADER_GUARD, TRANSFER_CODING};
use super::route::{self, Found, Route};
use super::stream::Conn;
use super::{ack, alter, consume, health, members, node, produce, topics, unbuilt, Broker, HttpContext};

const CLIENT: HeaderName = HeaderName::from_static("x-narad-client");
const SHARD: HeaderName = HeaderName::from_static("x-narad-shard");

/// One request, as its handler sees it.
pub(crate) struct Call<'a, B> {
    pub ctx: &'a Rc<HttpContext<B>>,
    pub conn: &'a Rc<Conn>,
    pub head: &'a Parts,
    pub query: Query<'a>,
}

impl<B: Broker> Call<'_, B> {
    /// Step 6: takes the request's share of its identity's cap. `None` when there is no cap.
    pub fn admit(&self, kind: Kind, weight: u32) -> Result<Option<InFlightSlot>, ApiError> {
        let max = self.cap(kind);
        if max == 0 {
            return Ok(None);
        }
        let identity = self.conn.in_flight.get_or_init(|| self.ctx.node.in_flight(Identity::Ip(self.conn.peer)));
        let slot = InFlightSlot::take(Arc::clone(identity), kind, weight, max);
        slot.map(Some).map_err(|_| self.too_many(kind))
    }

    pub fn too_many(&self, kind: Kind) -> ApiError {
        let requests = match kind {
            Kind::Consume => "consume",
            Kind::Produce => "produce",
        };
        let max = self.cap(kind);
        let text = format!("too many in-flight {requests} requests for this identity (limit {max} per node)");
        ApiError::new(StatusCode::TOO_MANY_REQUESTS, text)
    }

    fn cap(&self, kind: Kind) -> u32 {
        match kind {
            Kind::Consume => self.ctx.settings.consumes_in_flight_max,
            Kind::Produce => self.ctx.settings.produces_in_flight_max,
        }
    }

    pub fn has_client_header(&self) -> bool {
        has_client_header(&self.head.headers)
    }
}

fn has_client_header(headers: &HeaderMap) -> bool {
    headers.get(CLIENT).is_some_and(|value| !value.as_bytes().trim_ascii().is_empty())
}

/// A request may wait for long, and its header map goes into the next answer: a map of thousands stays no longer than
/// it takes to read it.
const HEADERS_KEPT_MAX: usize = 100;

/// What this node looks at, each at most twice: two lines say that there is no single value.
fn only_read(headers: &HeaderMap) -> HeaderMap {
    let mut few = HeaderMap::new();
    for name in [AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, CLIENT] {
        for value in headers.get_all(&name).iter().take(2) {
            few.append(name.clone(), value.clone());
        }
    }
    few
}

/// Answers one request; the service of a connection. Dropped when the client leaves, which is recorded as 499.
pub(crate) async fn answer<B: Broker>(
    ctx: Rc<HttpContext<B>>,
    conn: Rc<Conn>,
    request: Request<Incoming>,
) -> Response<ReplyBody> {
    let _underway = ctx.stop.begin();
    let (mut head, body) = request.into_parts();
    // Looked at before the headers are thinned out.
    let coded = has_other_transfer_coding(&head.headers);
    if head.headers.len() > HEADERS_KEPT_MAX {
        head.headers = only_read(&head.headers);
    }
    let found = route::find(&head.method, head.uri.path(), ctx.settings.surface);
    let route = match &found {
        Found::Route { route, .. } => Some(*route),
        _ => None,
    };
    if let Some(route) = route {
        conn.queue.set(route.queue());
    }
    let observed = Observed::start(&ctx.metrics, route, &head.method, content_length(&head.headers));
    let deadline = conn.request_started() + ctx.settings.read_timeout;
    let mut body = BodyReader::new(body, deadline, conn.clone(), &ctx.node);
    let call = Call { ctx: &ctx, conn: &conn, head: &head, query: Query::new(head.uri.query()) };

    let judged = async {
        match coded {
            // Its body is not what it seems: nothing of it may be stored (RFC 9112, 6.1).
            true => Err(ApiError::new(StatusCode::NOT_IMPLEMENTED, TRANSFER_CODING)),
            false => judge(&call, found, &mut body).await,
        }
    };
    let (mut reply, client_left) = match rt::contain(judged).await {
        Ok(Ok(reply)) => (reply, false),
        Ok(Err(error)) => {
            let left = error.client_left;
            (error.into_reply(), left)
        }
        Err(panic) => {
            let label = route.map_or("unmatched", |route| Route::LABELS[route as usize]);
            tracing::error!(route = label, panic = %panic, "http handler panicked; the request was answered 500");
            ctx.metrics.count_panic();
            hand_back(&ctx, &conn).await;
            let error = ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal server panic");
            (error.outcome_unknown().into_reply(), false)
        }
    };
    if body.was_refused_for_memory() {
        ctx.metrics.count_memory_rejection();
    }
    let all_read = client_left || !coded && body.skip_rest(head.headers.contains_key(EXPECT)).await;
    if !all_read || ctx.stop.is_draining() {
        // The rest is not read, so nothing more can be, or the node stops: a client that is not told sends its next
        // request in vain.
        reply.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    if let Some(shard) = ctx.shard_header.as_ref().filter(|_| route.is_some_and(Route::carries_messages)) {
        if reply.headers().is_empty() {
            // hyper parses the next request into the answer's map: with the request's own, one map goes round and round
            // and no request allocates one.
            *reply.headers_mut() = std::mem::take(&mut head.headers);
            reply.headers_mut().clear();
        }
        reply.headers_mut().insert(SHARD, shard.clone());
    }
    let status = if client_left { CLIENT_LEFT } else { reply.status().as_u16() };
    let bytes_out = if head.method == Method::HEAD { 0 } else { reply.body().len() };
    observed.finish(status, bytes_out);
    conn.begin_answer();
    reply.map(|data| ReplyBody::new(data, conn))
}

/// Gives leases back that the answer does not carry after all.
async fn hand_back<B: Broker>(ctx: &HttpContext<B>, conn: &Conn) {
    let leases = conn.leases.take();
    if let Some(leases) = leases {
        // One that fails expires.
        let _ = ctx.broker.settle(&leases.topic, leases.settles).await;
    }
}

/// Steps 3 to 7. Step 1, the size of the headers, is hyper's and `stream`'s. Step 2 has its place here: whoever
/// authenticates a request does it before anything else is said about it, unknown paths included, except for
/// `/healthz` and `/readyz`, and replaces [`Identity::Ip`] by the user.
async fn judge<B: Broker>(call: &Call<'_, B>, found: Found<'_>, body: &mut BodyReader<'_>) -> Result<Reply, ApiError> {
    let state_changing = matches!(call.head.method, Method::POST | Method::PUT | Method::PATCH);
    if state_changing && !passes_guard(&call.head.headers) {
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, HEADER_GUARD));
    }
    let (route, topic) = match found {
        Found::Route { route, topic } => (route, topic),
        Found::Nothing => return Ok(reply::page_not_found()),
        Found::OtherMethods { allow } => return Ok(reply::method_not_allowed(allow)),
        Found::Malformed => return Err(ApiError::bad_request("400 Bad Request").plain_text()),
    };
    if !call.ctx.broker.serves()
        && !matches!(route, Route::Healthz | Route::Readyz | Route::Metrics | Route::NodeShards)
    {
        return Err(ApiError::unavailable("control plane temporarily unavailable"));
    }
    match route {
        Route::Produce | Route::ProduceBatch => {
            let result = match route {
                Route::Produce => produce::single(call, &topic, body).await,
                _ => produce::batch(call, &topic, body).await,
            };
            if body.was_refused_for_memory() {
                call.ctx.broker.refused_for_memory(&topic);
            }
            result
        }
        Route::Consume => consume::consume(call, &topic).await,
        Route::Ack => ack::ack(call, &topic, body).await,
        Route::CreateTopic => topics::create(call, body).await,
        Route::ListTopics => topics::list(call),
        Route::GetTopic => topics::details(call, &topic).await,
        Route::DeleteTopic => topics::delete(call, &topic).await,
        Route::AlterTopic => alter::alter(call, &topic, body).await,
        Route::GetSchema => unbuilt::schema(call, &topic),
        Route::ListChildren => unbuilt::children(call, &topic),
        Route::Detach => unbuilt::detach(call, &topic),
        Route::Attach => unbuilt::attach(call, &topic, body).await,
        Route::Healthz => health::healthz(call),
        Route::Readyz => health::readyz(call).await,
        Route::Metrics => health::metrics(call).await,
        Route::NodeShards => node::shards(call).await,
        Route::ListMembers => members::list(call).await,
        Route::ListMoves => unbuilt::moves(),
        Route::ForgetMember => members::forget(call, &topic).await,
        Route::ChildVerb | Route::Users | Route::Cluster | Route::Remotes => unbuilt::refuse(call, route, body).await,
    }
}

/// A browser can be made to send a form or plain text across sites, but none of these (lesson G5).
fn passes_guard(headers: &HeaderMap) -> bool {
    let essence = headers.get(CONTENT_TYPE).map(|value| {
        let value = value.as_bytes();
        value.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii()
    });
    let accepted = |essence: &[u8]| {
        essence.eq_ignore_ascii_case(b"application/json") || essence.eq_ignore_ascii_case(b"application/octet-stream")
    };
    essence.is_some_and(accepted) || has_client_header(headers)
}

/// Whether the body comes in a transfer coding that is not undone here: anything but `chunked`, alone.
fn has_other_transfer_coding(headers: &HeaderMap) -> bool {
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    let first = codings.next();
    first.is_some_and(|coding| {
        codings.next().is_some() || !coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked")
    })
}

fn content_length(headers: &HeaderMap) -> u64 {
    let value = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok());
    value.and_then(|digits| digits.parse().ok()).unwrap_or(0)
}
