//! `GET /v1/cluster/members` and `POST /v1/cluster/members/{id}/forget` (21.1, 21.6). For administrators, once there are
//! users to tell.

use hyper::StatusCode;
use narad_shards::api::{MemberStatus, MetaCommand, MetaReply, NodeStatus, Quarantined};
use serde::Serialize;
use serde_json::json;

use super::audit::{self, Audit};
use super::pipeline::Call;
use super::reply::{self, ApiError, Reply};
use super::topics::meta_refusal;
use super::Broker;

/// As this node sees them: it answers without a leader, too.
pub(crate) async fn list<B: Broker>(call: &Call<'_, B>) -> Result<Reply, ApiError> {
    let detail = call.query.flag("detail")?;
    match call.ctx.broker.change(MetaCommand::ListMembers { detail }).await {
        MetaReply::Members(members) => {
            let members: Vec<Shown<'_>> = members.iter().map(shown).collect();
            match serde_json::to_vec(&Members { members }) {
                Ok(body) => Ok(reply::json(StatusCode::OK, body)),
                Err(error) => {
                    tracing::error!(op = "list members", err = %error, "http server error");
                    Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "list members failed"))
                }
            }
        }
        other => Err(meta_refusal("list members", other)),
    }
}

#[derive(Serialize)]
struct Members<'a> {
    members: Vec<Shown<'a>>,
}

/// A member on the wire. The fields keep their order.
#[derive(Serialize)]
struct Shown<'a> {
    id: &'a str,
    addr: &'a str,
    status: &'static str,
    draining: bool,
    owned_partitions: u32,
    outbound_moves: u32,
    voter: bool,
    leader: bool,
    heartbeat_age_seconds: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_status: Option<ShownStatus<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    status_error: Option<&'a str>,
}

#[derive(Serialize)]
struct ShownStatus<'a> {
    node: &'a str,
    draining: bool,
    produce_in_flight: u64,
    dispatch_backlog: u64,
    quarantine: Quarantine<'a>,
    moves: [(); 0],
}

#[derive(Serialize)]
struct Quarantine<'a> {
    copies: u64,
    bytes: u64,
    list: Vec<ShownCopy<'a>>,
}

#[derive(Serialize)]
struct ShownCopy<'a> {
    kind: &'static str,
    topic: &'a str,
    partition: i32,
    dir: &'a str,
    bytes: u64,
    mod_time: u64,
}

fn shown(member: &MemberStatus) -> Shown<'_> {
    Shown {
        id: &member.id,
        addr: &member.address,
        status: if member.alive { "alive" } else { "dead" },
        draining: member.draining,
        owned_partitions: member.owned_partitions,
        outbound_moves: 0,
        voter: member.voter,
        leader: member.leader,
        heartbeat_age_seconds: member.heartbeat_age_seconds,
        node_status: member.node_status.as_ref().and_then(|asked| asked.as_ref().ok()).map(shown_status),
        status_error: member.node_status.as_ref().and_then(|asked| asked.as_ref().err()).map(String::as_str),
    }
}

fn shown_status(status: &NodeStatus) -> ShownStatus<'_> {
    ShownStatus {
        node: &status.node,
        draining: status.draining,
        produce_in_flight: status.produce_in_flight,
        dispatch_backlog: status.dispatch_backlog,
        quarantine: Quarantine {
            copies: status.quarantined_copies,
            bytes: status.quarantined_bytes,
            list: status.quarantined.iter().map(shown_copy).collect(),
        },
        moves: [],
    }
}

fn shown_copy(copy: &Quarantined) -> ShownCopy<'_> {
    ShownCopy {
        kind: "topic_incarnation",
        topic: &copy.topic,
        partition: -1,
        dir: &copy.directory,
        bytes: copy.bytes,
        mod_time: copy.modified_at,
    }
}

/// Removes a consensus server that never became a member.
pub(crate) async fn forget<B: Broker>(call: &Call<'_, B>, id: &str) -> Result<Reply, ApiError> {
    let audit = Audit::begin(audit::CLUSTER_FORGET, id);
    audit.finish(match call.ctx.broker.change(MetaCommand::ForgetServer { node: id.to_owned() }).await {
        MetaReply::Forgotten { voter } => {
            Ok(reply::json(StatusCode::OK, json!({ "id": id, "voter": voter }).to_string().into_bytes()))
        }
        MetaReply::Refused { status, why } => {
            let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            Err(ApiError::new(status, why))
        }
        other => Err(meta_refusal("forget", other)),
    })
}
