//! `/healthz`, `/readyz`, `/metrics`.

use bytes::Bytes;
use hyper::header::{HeaderValue, CONTENT_TYPE};
use hyper::{Response, StatusCode};
use narad_shards::rt;

use super::json::write_string;
use super::pipeline::Call;
use super::reply::{self, ApiError, Reply};
use super::{Broker, Health, Readiness, Surface};
use crate::telemetry::{self, Exposition};

pub(crate) fn healthz<B: Broker>(call: &Call<'_, B>) -> Result<Reply, ApiError> {
    match call.ctx.broker.health() {
        Health::Ok => Ok(reply::json(StatusCode::OK, b"{\"status\":\"ok\"}".to_vec())),
        Health::ShuttingDown => Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "shutting down")),
    }
}

pub(crate) async fn readyz<B: Broker>(call: &Call<'_, B>) -> Result<Reply, ApiError> {
    let degraded = match call.ctx.broker.readiness().await {
        Readiness::Ready(degraded) => degraded,
        Readiness::NotReady(gate) => return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, gate)),
    };
    let mut body = b"{\"status\":\"ready\"".to_vec();
    for (index, reason) in degraded.iter().enumerate() {
        body.extend_from_slice(if index == 0 { b",\"degraded\":[" } else { b"," });
        write_string(&mut body, reason);
    }
    body.extend_from_slice(if degraded.is_empty() { b"}" } else { b"]}" });
    Ok(reply::json(StatusCode::OK, body))
}

/// The figures of the whole node. Rendering thousands of series takes longer than a shard may be held.
pub(crate) async fn metrics<B: Broker>(call: &Call<'_, B>) -> Result<Reply, ApiError> {
    let (shards, node) = (call.ctx.broker.metrics().await, call.ctx.broker.node_metrics().await);
    let http = call.ctx.node_metrics.clone();
    if call.ctx.settings.surface != Surface::Probes {
        http.iter().for_each(|metrics| metrics.retire_topics(|name| call.ctx.broker.topic(name).is_some()));
    }
    let now_ms = rt::wall_clock_ms();
    let text = rt::blocking(move || {
        let mut page = Exposition::new();
        telemetry::render_shards(&mut page, &shards, now_ms);
        telemetry::render_node(&mut page, &node, &shards);
        super::metrics::render(&mut page, &http, &telemetry::other_errors(&shards, &node));
        telemetry::render_process(&mut page);
        page.finish()
    });
    let text = text.await;
    let mut reply = Response::new(Bytes::from(text));
    let content_type = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    reply.headers_mut().insert(CONTENT_TYPE, content_type);
    Ok(reply)
}
