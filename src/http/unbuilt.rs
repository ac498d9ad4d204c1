//! Routes of mechanisms that this node does not have yet. What is true without the mechanism is answered: no topic has
//! a schema or a child, and no partition moves. Everything else is judged like any other request as far as its form goes, and then refused by
//! name with `501`.

use hyper::{Method, StatusCode};
use serde::de::MapAccess;

use super::body::BodyReader;
use super::config::{FANOUT_DELAY_MS_MAX, JSON_BYTES_MAX};
use super::json::{self, write_name, write_number, write_string, Fields};
use super::pipeline::Call;
use super::reply::{self, ApiError, Reply};
use super::route::Route;
use super::topics::at_least_0;
use super::Broker;

/// A topic without a schema: version 0 and no history.
pub(crate) fn schema<B: Broker>(call: &Call<'_, B>, topic: &str) -> Result<Reply, ApiError> {
    let meta = call.ctx.broker.topic(topic).ok_or_else(ApiError::topic_not_found)?;
    let mut out = b"{".to_vec();
    write_name(&mut out, "topic");
    write_string(&mut out, &meta.name);
    write_name(&mut out, "version");
    write_number(&mut out, 0);
    out.extend_from_slice(b",\"versions\":[]}");
    Ok(reply::json(StatusCode::OK, out))
}

/// A topic without children.
pub(crate) fn children<B: Broker>(call: &Call<'_, B>, topic: &str) -> Result<Reply, ApiError> {
    call.query.flag("partitions")?;
    let meta = call.ctx.broker.topic(topic).ok_or_else(ApiError::topic_not_found)?;
    let mut out = b"{".to_vec();
    write_name(&mut out, "parent");
    write_string(&mut out, &meta.name);
    write_name(&mut out, "parent_id");
    write_string(&mut out, &meta.incarnation.to_string());
    out.extend_from_slice(b",\"children\":[]}");
    Ok(reply::json(StatusCode::OK, out))
}

/// No partition is on its way to another node.
pub(crate) fn moves() -> Result<Reply, ApiError> {
    Ok(reply::json(StatusCode::OK, b"{\"moves\":[]}".to_vec()))
}

/// Nothing is linked, so nothing can be unlinked.
pub(crate) fn detach<B: Broker>(call: &Call<'_, B>, topic: &str) -> Result<Reply, ApiError> {
    call.query.flag("force")?;
    let found = call.ctx.broker.topic(topic).is_some();
    Err(match found {
        true => ApiError::new(StatusCode::NOT_FOUND, "the topics are not linked"),
        false => ApiError::topic_not_found(),
    })
}

pub(crate) async fn attach<B: Broker>(
    call: &Call<'_, B>,
    topic: &str,
    body: &mut BodyReader<'_>,
) -> Result<Reply, ApiError> {
    let body = body.read_all(JSON_BYTES_MAX).await;
    let body = body.map_err(reply::body_refusal_400)?;
    let attach = json::parse::<Attach>(&body)?;
    if attach.remote.is_some_and(|remote| !remote.is_empty()) {
        return Err(ApiError::not_built(Route::ChildVerb.not_built()));
    }
    if attach.needs_remote {
        return Err(ApiError::bad_request("remote_topic, from, lanes and dry_run need a remote"));
    }
    let child = attach.child.filter(|child| !child.is_empty()).ok_or(ApiError::bad_request("child required"))?;
    if child == topic {
        return Err(ApiError::bad_request("a topic cannot be its own parent"));
    }
    if at_least_0("delay_ms", attach.delay_ms)?.is_some_and(|delay_ms| delay_ms > FANOUT_DELAY_MS_MAX) {
        return Err(ApiError::bad_request(format!("delay_ms must be at most {FANOUT_DELAY_MS_MAX}")));
    }
    for name in [topic, &child] {
        call.ctx.broker.topic(name).ok_or_else(ApiError::topic_not_found)?;
    }
    Err(ApiError::not_built(Route::Attach.not_built()))
}

#[derive(Default)]
struct Attach {
    child: Option<String>,
    delay_ms: Option<i64>,
    remote: Option<String>,
    /// A field was given that means something for remote children only.
    needs_remote: bool,
}

impl<'a> Fields<'a> for Attach {
    fn member<A: MapAccess<'a>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error> {
        match name {
            "child" => self.child = map.next_value()?,
            "delay_ms" => self.delay_ms = map.next_value()?,
            "remote" => self.remote = map.next_value()?,
            "remote_topic" | "from" => self.needs_remote |= map.next_value::<Option<String>>()?.is_some(),
            "lanes" => self.needs_remote |= map.next_value::<Option<i64>>()?.is_some(),
            "dry_run" => self.needs_remote |= map.next_value::<Option<bool>>()?.is_some(),
            other => return Err(json::unknown_field(other)),
        }
        Ok(())
    }
}

/// Users, cluster, remotes: a body must be one JSON text of bearable size.
pub(crate) async fn refuse<B: Broker>(
    call: &Call<'_, B>,
    route: Route,
    body: &mut BodyReader<'_>,
) -> Result<Reply, ApiError> {
    if matches!(call.head.method, Method::POST | Method::PUT | Method::PATCH) {
        let body = body.read_all(JSON_BYTES_MAX).await;
        let body = body.map_err(reply::body_refusal_400)?;
        let text = std::str::from_utf8(&body).map_err(|_| ApiError::bad_request("invalid json: not UTF-8"))?;
        if !text.is_empty() && !json::is_json(text) {
            return Err(ApiError::bad_request("invalid json: the body is not one JSON value"));
        }
    }
    Err(ApiError::not_built(route.not_built()))
}
