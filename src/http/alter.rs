//! `PATCH /v1/topics/{t}`.
//!
//! The whole body is checked before anything is changed. Then its groups are applied one after the other, in the order
//! retention, caps, partitions: the first that fails answers, and what came before it stays.

use std::sync::Arc;

use hyper::StatusCode;
use narad_shards::api::{MetaCommand, MetaReply, TopicChange};
use narad_shards::meta::TopicMeta;
use serde::de::MapAccess;
use serde_json::value::RawValue;

use super::audit::{self, Audit};
use super::body::BodyReader;
use super::config::{TopicDefaults, JSON_BYTES_MAX};
use super::json::{self, Fields};
use super::pipeline::Call;
use super::reply::{self, ApiError, Reply};
use super::topics::{at_least_0, cap, conflict, is_schema, meta_refusal, partitions_in_range, retention, CHANGED};
use super::topics::{topic_reply, SCHEMAS_NOT_BUILT};
use super::Broker;

pub(crate) async fn alter<B: Broker>(
    call: &Call<'_, B>,
    topic: &str,
    body: &mut BodyReader<'_>,
) -> Result<Reply, ApiError> {
    let body = body.read_all(JSON_BYTES_MAX).await;
    let body = body.map_err(|failure| reply::body_refusal(failure, "request body too large"))?;
    let groups = json::parse::<AlterTopic<'_>>(&body)?
        .check(&call.ctx.topic_defaults, || call.ctx.broker.topic(topic).is_some())?;
    let mut audit = Audit::begin(audit::TOPIC_ALTER, topic);
    let result = try_alter(call, topic, groups, &mut audit).await;
    audit.finish(result)
}

async fn try_alter<B: Broker>(
    call: &Call<'_, B>,
    topic: &str,
    groups: Vec<TopicChange>,
    audit: &mut Audit<'_>,
) -> Result<Reply, ApiError> {
    let Some(mut meta) = call.ctx.broker.topic(topic) else {
        audit.fields(groups.iter().flat_map(fields).collect());
        return Err(ApiError::topic_not_found());
    };
    for change in groups {
        audit.fields(fields(&change));
        meta = apply(call, meta, change).await?;
    }
    Ok(topic_reply(StatusCode::OK, &meta, Some("standalone")))
}

/// What a change changes, as the body names it.
fn fields(change: &TopicChange) -> Vec<&'static str> {
    let all = [
        ("retention_ms", change.retention_ms.is_some()),
        ("max_in_flight_per_partition", change.max_in_flight_per_partition.is_some()),
        ("max_acked_ahead_per_partition", change.max_acked_ahead_per_partition.is_some()),
        ("partitions", change.partitions.is_some()),
    ];
    all.into_iter().filter(|(_, given)| *given).map(|(name, _)| name).collect()
}

/// Applies one group. A topic that was recreated under the request is read again, once.
async fn apply<B: Broker>(
    call: &Call<'_, B>,
    read: Arc<TopicMeta>,
    change: TopicChange,
) -> Result<Arc<TopicMeta>, ApiError> {
    let name = read.name.to_string();
    let mut incarnation = read.incarnation;
    for _ in 0..2 {
        let command = MetaCommand::AlterTopic { name: name.clone(), incarnation, change };
        match call.ctx.broker.change(command).await {
            MetaReply::Altered(meta) => return Ok(meta),
            MetaReply::NotMore { partitions } => {
                let text = format!("partitions must be more than the topic has, which is {partitions}");
                return Err(ApiError::bad_request(text));
            }
            MetaReply::Changed => {
                incarnation = call.ctx.broker.topic(&name).ok_or_else(ApiError::topic_not_found)?.incarnation;
            }
            other => return Err(meta_refusal("alter topic", other)),
        }
    }
    Err(conflict(CHANGED))
}

/// Body of an alter; `null` counts as absent, except as a schema.
#[derive(Default)]
struct AlterTopic<'a> {
    retention_ms: Option<i64>,
    max_in_flight_per_partition: Option<i64>,
    max_acked_ahead_per_partition: Option<i64>,
    partitions: Option<i64>,
    schema: Option<&'a RawValue>,
    schema_base_version: Option<i64>,
}

impl<'a> Fields<'a> for AlterTopic<'a> {
    fn member<A: MapAccess<'a>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error> {
        match name {
            "retention_ms" => self.retention_ms = map.next_value()?,
            "max_in_flight_per_partition" => self.max_in_flight_per_partition = map.next_value()?,
            "max_acked_ahead_per_partition" => self.max_acked_ahead_per_partition = map.next_value()?,
            "partitions" => self.partitions = map.next_value()?,
            "schema" => self.schema = Some(map.next_value()?),
            "schema_base_version" => self.schema_base_version = map.next_value()?,
            other => return Err(json::unknown_field(other)),
        }
        Ok(())
    }
}

impl AlterTopic<'_> {
    /// The groups to apply, in order; at least one.
    fn check(self, defaults: &TopicDefaults, has_topic: impl Fn() -> bool) -> Result<Vec<TopicChange>, ApiError> {
        let caps = TopicChange {
            max_in_flight_per_partition: cap(
                "max_in_flight_per_partition",
                self.max_in_flight_per_partition,
                defaults.max_in_flight_per_partition,
            )?,
            max_acked_ahead_per_partition: cap(
                "max_acked_ahead_per_partition",
                self.max_acked_ahead_per_partition,
                defaults.max_acked_ahead_per_partition,
            )?,
            ..TopicChange::default()
        };
        let partitions = match at_least_0("partitions", self.partitions)? {
            None => None,
            Some(number) => Some(partitions_in_range(number, defaults)?),
        };
        let groups = [
            TopicChange { retention_ms: retention(self.retention_ms)?, ..TopicChange::default() },
            caps,
            TopicChange { partitions, ..TopicChange::default() },
        ];
        at_least_0("schema_base_version", self.schema_base_version)?;
        match self.schema {
            Some(schema) if !is_schema(schema) => {
                return Err(ApiError::bad_request("schema must be a JSON object or true"))
            }
            Some(_) if !has_topic() => return Err(ApiError::topic_not_found()),
            // Before anything is applied: half of such a request is nothing that anybody asked for.
            Some(_) => return Err(ApiError::not_built(SCHEMAS_NOT_BUILT)),
            None if self.schema_base_version.is_some() => {
                return Err(ApiError::bad_request("schema_base_version needs a schema"))
            }
            None => {}
        }
        let groups: Vec<TopicChange> = groups.into_iter().filter(|change| *change != TopicChange::default()).collect();
        match groups.is_empty() {
            true => Err(ApiError::bad_request("nothing to change")),
            false => Ok(groups),
        }
    }
}
