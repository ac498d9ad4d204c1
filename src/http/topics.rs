//! Topic routes: create, list, details, delete.
//!
//! Schemas and fan-out come with their mechanisms; until then a create that asks for a schema or a parent
//! is refused with `501` after its fields were checked, rather than made without them.

use std::sync::Arc;

use hyper::StatusCode;
use narad_shards::api::{MetaCommand, MetaReply, NewTopic, PartitionStats};
use narad_shards::meta::TopicMeta;
use narad_shards::rt;
use serde::de::MapAccess;
use serde_json::value::RawValue;

use super::audit::{self, Audit};
use super::body::BodyReader;
use super::config::{
    TopicDefaults, FANOUT_DELAY_MS_MAX, JSON_BYTES_MAX, LIST_LIMIT_DEFAULT, LIST_LIMIT_MAX, PARTITIONS_MIN,
    RETENTION_MS_MIN, STATS_WAIT,
};
use super::json::{self, write_name, write_number, write_string, Fields};
use super::pipeline::Call;
use super::query::unsigned;
use super::reply::{self, ApiError, Reply, PARTITION_OUT_OF_RANGE};
use super::route::Route;
use super::Broker;
use crate::control::check_topic_name;

/// What is said of a schema until there are any.
pub(super) const SCHEMAS_NOT_BUILT: &str = Route::GetSchema.not_built();
const MAYBE_APPLIED: &str =
    "control plane temporarily unavailable: the change may still be applied, read it back before \
     retrying";
pub(super) const CHANGED: &str = "topic changed since it was read";

pub(crate) async fn create<B: Broker>(call: &Call<'_, B>, body: &mut BodyReader<'_>) -> Result<Reply, ApiError> {
    let body = body.read_all(JSON_BYTES_MAX).await;
    let body = body.map_err(|failure| reply::body_refusal(failure, "request body too large"))?;
    let has_topic = |name: &str| call.ctx.broker.topic(name).is_some();
    let topic = json::parse::<CreateTopic<'_>>(&body)?.check(&call.ctx.topic_defaults, has_topic)?;
    let name = topic.name.clone();
    let audit = Audit::begin(audit::TOPIC_CREATE, &name);
    audit.finish(try_create(call, topic, &name).await)
}

async fn try_create<B: Broker>(call: &Call<'_, B>, topic: NewTopic, name: &str) -> Result<Reply, ApiError> {
    match call.ctx.broker.change(MetaCommand::CreateTopic(topic)).await {
        MetaReply::Created(meta) => Ok(topic_reply(StatusCode::CREATED, &meta, None)),
        MetaReply::Exists => Err(conflict(format!("topic \"{name}\" already exists"))),
        MetaReply::CaseCollision { existing } => Err(conflict(format!(
            "topic name \"{name}\" differs only in letter case from existing topic \"{existing}\""
        ))),
        other => Err(meta_refusal("create topic", other)),
    }
}

pub(crate) fn list<B: Broker>(call: &Call<'_, B>) -> Result<Reply, ApiError> {
    let limit = call.query.first("limit")?;
    let limit = match unsigned::<u64>("limit", limit.as_deref())? {
        None if limit.is_none() => LIST_LIMIT_DEFAULT,
        None | Some(0) => return Err(ApiError::bad_request("query parameter limit must be at least 1")),
        Some(limit) => usize::try_from(limit).unwrap_or(usize::MAX).min(LIST_LIMIT_MAX),
    };
    let token = call.query.first("page_token")?.unwrap_or_default();
    let after = String::from_utf8_lossy(&token);
    // One more than the page holds tells whether another page follows.
    let mut topics = call.ctx.broker.topics_after(&after, limit + 1);
    let more = topics.len() > limit;
    topics.truncate(limit);
    let next = topics.last().filter(|_| more).map_or("", |last| &*last.name);

    let mut out = b"{\"next_page_token\":".to_vec();
    write_string(&mut out, next);
    out.extend_from_slice(b",\"topics\":[");
    for (index, meta) in topics.iter().enumerate() {
        out.extend_from_slice(if index == 0 { b"{" } else { b",{" });
        write_topic(&mut out, meta, Some("standalone"));
        out.push(b'}');
    }
    out.extend_from_slice(b"]}");
    Ok(reply::json(StatusCode::OK, out))
}

pub(crate) async fn details<B: Broker>(call: &Call<'_, B>, topic: &str) -> Result<Reply, ApiError> {
    let partition = call.query.first("partition")?;
    let partition = super::produce::partition_number(partition.as_deref())?;
    let meta = call.ctx.broker.topic(topic).ok_or_else(ApiError::topic_not_found)?;
    if partition.is_some_and(|number| number >= meta.partitions) {
        return Err(ApiError::bad_request(PARTITION_OUT_OF_RANGE));
    }
    // An owner that is down is not an error: its partitions are shown as placeholders.
    let mut stats = rt::timeout(STATS_WAIT, call.ctx.broker.stats(&meta)).await.unwrap_or_default();
    stats.sort_unstable_by_key(|entry| entry.index);

    let mut out = b"{".to_vec();
    write_topic(&mut out, &meta, Some("standalone"));
    out.extend_from_slice(b",\"schema_version\":0,\"partition_stats\":[");
    let mut partial = false;
    let shown = partition.map_or(0..meta.partitions, |only| only..only + 1);
    for index in shown.clone() {
        if index > shown.start {
            out.push(b',');
        }
        let known = stats.binary_search_by_key(&index, |entry| entry.index).ok().map(|at| &stats[at]);
        partial |= known.is_none();
        write_stats(&mut out, index, known, &call.ctx.node_id);
    }
    out.push(b']');
    if partial {
        out.extend_from_slice(b",\"partial\":true");
    }
    out.push(b'}');
    Ok(reply::json(StatusCode::OK, out))
}

pub(crate) async fn delete<B: Broker>(call: &Call<'_, B>, topic: &str) -> Result<Reply, ApiError> {
    // Means something for remote children only.
    call.query.flag("force")?;
    let mut audit = Audit::begin(audit::TOPIC_DELETE, topic);
    let result = try_delete(call, topic, &mut audit).await;
    audit.finish(result)
}

async fn try_delete<B: Broker>(call: &Call<'_, B>, topic: &str, audit: &mut Audit<'_>) -> Result<Reply, ApiError> {
    // A topic that was recreated under the request is read again, once.
    for _ in 0..2 {
        let meta = call.ctx.broker.topic(topic).ok_or_else(ApiError::topic_not_found)?;
        audit.of_incarnation(meta.incarnation);
        let command = MetaCommand::DeleteTopic { name: topic.to_owned(), incarnation: meta.incarnation };
        match call.ctx.broker.change(command).await {
            MetaReply::Deleted => return Ok(reply::empty(StatusCode::NO_CONTENT)),
            MetaReply::NotFound => return Err(ApiError::topic_not_found()),
            MetaReply::Changed => {}
            other => return Err(meta_refusal("delete topic", other)),
        }
    }
    Err(conflict(CHANGED))
}

pub(super) fn conflict(text: impl Into<std::borrow::Cow<'static, str>>) -> ApiError {
    ApiError::new(StatusCode::CONFLICT, text)
}

pub(super) fn meta_refusal(operation: &'static str, reply: MetaReply) -> ApiError {
    match reply {
        MetaReply::Unavailable(cause) => {
            tracing::warn!(op = operation, err = %cause, "metadata change refused; nothing is known to have changed");
            ApiError::unavailable("control plane temporarily unavailable")
        }
        MetaReply::Unknown(cause) => {
            tracing::warn!(op = operation, err = %cause, "the outcome of a metadata change is unknown");
            let text = format!("{MAYBE_APPLIED}: {cause}");
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, text).outcome_unknown()
        }
        MetaReply::Changed => conflict(CHANGED),
        MetaReply::NotFound => ApiError::topic_not_found(),
        unexpected => {
            tracing::error!(op = operation, reply = ?unexpected, "http server error");
            ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, format!("{operation} failed"))
        }
    }
}

pub(super) fn topic_reply(status: StatusCode, meta: &Arc<TopicMeta>, role: Option<&str>) -> Reply {
    let mut out = b"{".to_vec();
    write_topic(&mut out, meta, role);
    out.push(b'}');
    reply::json(status, out)
}

/// Appends the members of a Topic object, without its braces.
fn write_topic(out: &mut Vec<u8>, meta: &Arc<TopicMeta>, role: Option<&str>) {
    write_name(out, "name");
    write_string(out, &meta.name);
    write_name(out, "id");
    write_string(out, &meta.incarnation.to_string());
    for (name, number) in [
        ("partitions", meta.partitions.into()),
        ("retention_ms", meta.retention_ms),
        ("visibility_timeout_ms", meta.visibility_timeout_ms),
        ("max_in_flight_per_partition", meta.max_in_flight_per_partition),
        ("max_acked_ahead_per_partition", meta.max_acked_ahead_per_partition),
        ("created_at", meta.created_at_ms / 1000),
    ] {
        write_name(out, name);
        write_number(out, number);
    }
    for (name, text) in [("owner", meta.owner.as_deref()), ("role", role)] {
        if let Some(text) = text {
            write_name(out, name);
            write_string(out, text);
        }
    }
}

/// Appends one entry of `partition_stats`; a placeholder when its owner gave no answer.
fn write_stats(out: &mut Vec<u8>, index: u32, known: Option<&PartitionStats>, node_id: &str) {
    let unknown = PartitionStats::default();
    let stats = known.unwrap_or(&unknown);
    out.push(b'{');
    for (name, number) in [
        ("index", index.into()),
        ("segments", stats.segments),
        ("oldest_offset", stats.oldest_offset),
        ("next_offset", stats.next_offset),
        ("high_watermark", stats.high_watermark),
        ("size_bytes", stats.size_bytes),
    ] {
        write_name(out, name);
        write_number(out, number);
    }
    if let Some(seconds) = stats.oldest_segment_at {
        write_name(out, "oldest_segment_at");
        write_number(out, seconds);
    }
    write_name(out, "owner_node");
    write_string(out, node_id);
    write_name(out, "status");
    match known {
        Some(_) => out.extend_from_slice(b"\"ok\"}"),
        None => out.extend_from_slice(b"\"owner_unavailable\",\"owner_liveness\":\"unreachable\"}"),
    }
}

/// Body of a create; `null` counts as absent, except as a schema.
#[derive(Default)]
pub(super) struct CreateTopic<'a> {
    name: Option<String>,
    partitions: Option<i64>,
    retention_ms: Option<i64>,
    visibility_timeout_ms: Option<i64>,
    max_in_flight_per_partition: Option<i64>,
    max_acked_ahead_per_partition: Option<i64>,
    schema: Option<&'a RawValue>,
    parent: Option<String>,
    fanout_delay_ms: Option<i64>,
}

impl<'a> Fields<'a> for CreateTopic<'a> {
    fn member<A: MapAccess<'a>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error> {
        match name {
            "name" => self.name = map.next_value()?,
            "partitions" => self.partitions = map.next_value()?,
            "retention_ms" => self.retention_ms = map.next_value()?,
            "visibility_timeout_ms" => self.visibility_timeout_ms = map.next_value()?,
            "max_in_flight_per_partition" => self.max_in_flight_per_partition = map.next_value()?,
            "max_acked_ahead_per_partition" => self.max_acked_ahead_per_partition = map.next_value()?,
            "schema" => self.schema = Some(map.next_value()?),
            "parent" => self.parent = map.next_value()?,
            "fanout_delay_ms" => self.fanout_delay_ms = map.next_value()?,
            // The owner is who authenticated, whatever the body says.
            "owner" => drop(map.next_value::<Option<String>>()?),
            other => return Err(json::unknown_field(other)),
        }
        Ok(())
    }
}

impl CreateTopic<'_> {
    pub fn check(self, defaults: &TopicDefaults, has_topic: impl Fn(&str) -> bool) -> Result<NewTopic, ApiError> {
        let name = self.name.filter(|name| !name.is_empty()).ok_or(ApiError::bad_request("name required"))?;
        check_topic_name(&name).map_err(ApiError::bad_request)?;
        let partitions = match at_least_0("partitions", self.partitions)?.unwrap_or(0) {
            0 => defaults.partitions,
            number => partitions_in_range(number, defaults)?,
        };
        let retention_ms = retention(self.retention_ms)?.unwrap_or(defaults.retention_ms);
        let visibility_timeout_ms = match at_least_0("visibility_timeout_ms", self.visibility_timeout_ms)? {
            None | Some(0) => defaults.visibility_timeout_ms,
            Some(timeout_ms) => timeout_ms,
        };
        let (in_flight, acked_ahead) = (defaults.max_in_flight_per_partition, defaults.max_acked_ahead_per_partition);
        let max_in_flight_per_partition =
            cap("max_in_flight_per_partition", self.max_in_flight_per_partition, in_flight)?.unwrap_or(in_flight);
        let max_acked_ahead_per_partition =
            cap("max_acked_ahead_per_partition", self.max_acked_ahead_per_partition, acked_ahead)?
                .unwrap_or(acked_ahead);
        let delay_ms = at_least_0("fanout_delay_ms", self.fanout_delay_ms)?.unwrap_or(0);
        if delay_ms > FANOUT_DELAY_MS_MAX {
            return Err(ApiError::bad_request(format!("fanout_delay_ms must be at most {FANOUT_DELAY_MS_MAX}")));
        }
        let parent = self.parent.filter(|parent| !parent.is_empty());
        if parent.is_none() && self.fanout_delay_ms.is_some() {
            return Err(ApiError::bad_request("fanout_delay_ms needs a parent"));
        }
        if parent.as_ref() == Some(&name) {
            return Err(ApiError::bad_request("a topic cannot be its own parent"));
        }
        if let Some(schema) = self.schema {
            if !is_schema(schema) {
                return Err(ApiError::bad_request("schema must be a JSON object or true"));
            }
            return Err(ApiError::not_built(SCHEMAS_NOT_BUILT));
        }
        if let Some(parent) = parent {
            if !has_topic(&parent) {
                return Err(ApiError::topic_not_found());
            }
            return Err(ApiError::not_built("fan-out children are not available on this node yet"));
        }
        Ok(NewTopic {
            name,
            partitions,
            retention_ms,
            visibility_timeout_ms,
            max_in_flight_per_partition,
            max_acked_ahead_per_partition,
            owner: None,
        })
    }
}

pub(super) fn is_schema(schema: &RawValue) -> bool {
    schema.get().starts_with('{') || schema.get() == "true"
}

pub(super) fn partitions_in_range(number: u64, defaults: &TopicDefaults) -> Result<u32, ApiError> {
    let max = defaults.partitions_max;
    let number = u32::try_from(number).ok().filter(|number| (PARTITIONS_MIN..=max).contains(number));
    number.ok_or_else(|| ApiError::bad_request(format!("partitions must be between {PARTITIONS_MIN} and {max}")))
}

pub(super) fn retention(number: Option<i64>) -> Result<Option<u64>, ApiError> {
    match at_least_0("retention_ms", number)? {
        Some(1..RETENTION_MS_MIN) => {
            let text = format!("retention_ms must be 0 (forever) or at least {RETENTION_MS_MIN}");
            Err(ApiError::bad_request(text))
        }
        retention_ms => Ok(retention_ms),
    }
}

pub(super) fn at_least_0(name: &str, number: Option<i64>) -> Result<Option<u64>, ApiError> {
    let refused = || ApiError::bad_request(format!("{name} must not be negative"));
    number.map(|number| u64::try_from(number).map_err(|_| refused())).transpose()
}

/// `0` is the default; absent is `None`. There is no upper bound: a cap that nothing reaches is no cap.
pub(super) fn cap(name: &str, number: Option<i64>, default: u64) -> Result<Option<u64>, ApiError> {
    Ok(at_least_0(name, number)?.map(|number| if number == 0 { default } else { number }))
}
