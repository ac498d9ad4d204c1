//! `GET /v1/node/shards`: the node's shards as an operator watches them. Ours, with no counterpart in the reference; the
//! fields are described in docs/operating.md and keep their meaning. For administrators, once there are users to tell.

use hyper::StatusCode;
use narad_shards::rt;

use super::pipeline::Call;
use super::reply::{self, ApiError, Reply};
use super::Broker;
use crate::telemetry::{resident_bytes, NodeReport};

pub(crate) async fn shards<B: Broker>(call: &Call<'_, B>) -> Result<Reply, ApiError> {
    let shards = call.ctx.broker.vitals().await;
    let limits = &call.ctx.node;
    let report = NodeReport {
        node: call.ctx.node_id.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        time_ms: rt::wall_clock_ms(),
        connections: limits.connections_open(),
        connections_max: limits.connections_max(),
        large_body_bytes: limits.large_body_bytes_held(),
        body_memory_bytes: limits.body_memory_bytes_held(),
        memory_budget_bytes: shards.iter().map(|shard| shard.memory_budget_bytes).sum(),
        memory_resident_bytes: rt::blocking(resident_bytes).await,
        shards,
        peers: call.ctx.broker.peers(),
    };
    let body = serde_json::to_vec(&report).map_err(|error| {
        tracing::error!(op = "node shards", err = %error, "http server error");
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the figures could not be written")
    })?;
    Ok(reply::json(StatusCode::OK, body))
}
