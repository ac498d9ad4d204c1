//! The client API: hyper's HTTP/1.1 server on a shard's own connections.
//!
//! A request, in order: `conn` drives hyper over `stream`, which keeps the connection's deadlines and answers what
//! hyper refuses by itself (E29). `pipeline` judges the request in a fixed order: header guard, route,
//! method, in-flight caps, handler. One file per route family talks to the shard through [`Broker`]; `reply` has
//! every text a client can see. Handlers run on the shard's thread and are dropped when their client leaves.
//!
//! Not here: listening and accepting, authentication (the pipeline marks its place), TLS (terminated in front).

mod ack;
mod alter;
mod audit;
mod batch;
mod body;
mod broker;
mod config;
mod conn;
mod consume;
mod decode;
pub(crate) mod fuzz;
mod health;
mod json;
mod limits;
mod members;
mod message;
mod metrics;
mod node;
mod pipeline;
mod produce;
mod query;
mod reply;
mod route;
mod socket;
mod stop;
mod stream;
#[cfg(test)]
mod tests;
mod topics;
mod unbuilt;

pub use broker::{Broker, Health, Readiness, TopicNotFound};
pub use config::{HttpSettings, Surface, TopicDefaults};
pub use conn::serve_connection;
pub use limits::{ConnectionSlot, NodeLimits};
pub use metrics::HttpMetrics;
pub use socket::{Socket, Transport};

use std::sync::Arc;

use hyper::header::HeaderValue;
use stop::Stop;

/// What every connection of one shard shares. One per shard and listener; handlers reach the broker through it.
pub struct HttpContext<B> {
    pub broker: B,
    pub settings: HttpSettings,
    pub topic_defaults: TopicDefaults,
    /// Shown as `owner_node` in partition statistics.
    pub node_id: String,
    /// Limits that hold for the node as a whole (E24).
    pub node: Arc<NodeLimits>,
    /// This shard's own counters; no other shard writes to them.
    pub metrics: Arc<HttpMetrics>,
    /// The counters of all shards, this one's included, for a scrape.
    pub node_metrics: Arc<[Arc<HttpMetrics>]>,
    pub(crate) consumes: metrics::ConsumeDirectory,
    /// Value of `X-Narad-Shard`.
    pub(crate) shard_header: Option<HeaderValue>,
    stop: Stop,
}

impl<B: Broker> HttpContext<B> {
    /// `node_metrics` must contain `metrics`.
    pub fn new(
        broker: B,
        settings: HttpSettings,
        topic_defaults: TopicDefaults,
        node_id: String,
        node: Arc<NodeLimits>,
        metrics: Arc<HttpMetrics>,
        node_metrics: Arc<[Arc<HttpMetrics>]>,
    ) -> HttpContext<B> {
        assert!(node_metrics.iter().any(|m| Arc::ptr_eq(m, &metrics)), "a scrape must see this shard's counters");
        // Never freed, once a shard, so that a clone is a plain copy without a reference count.
        let shard_header = settings.shard.map(|shard| HeaderValue::from_static(shard.to_string().leak()));
        HttpContext {
            shard_header,
            broker,
            settings,
            topic_defaults,
            node_id,
            node,
            metrics,
            node_metrics,
            consumes: metrics::ConsumeDirectory::default(),
            stop: Stop::default(),
        }
    }

    /// The node is about to stop: what the listener still answers, until it closes, is the last answer on its
    /// connection. Resolves when the requests that had begun before are answered.
    pub async fn drain(&self) {
        self.stop.drain().await;
    }

    /// The listener is closed: idle connections close now, the others after the answer they are working on.
    pub fn begin_shutdown(&self) {
        self.stop.close();
    }
}
