//! `GET /v1/cluster/members` and `POST /v1/cluster/members/{id}/forget` (21.1, 21.6). For administrators, once there are
//! users to tell.

use hyper::StatusCode;
use narad_shards::api::{MemberStatus, MetaCommand, MetaReply, NodeStatus, Quarantined};
use serde_json::{json, Value};

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
            let members: Vec<Value> = members.iter().map(shown).collect();
            Ok(reply::json(StatusCode::OK, json!({ "members": members }).to_string().into_bytes()))
        }
        other => Err(meta_refusal("list members", other)),
    }
}

fn shown(member: &MemberStatus) -> Value {
    let mut value = json!({
        "id": member.id,
        "addr": member.address,
        "status": if member.alive { "alive" } else { "dead" },
        "draining": member.draining,
        "owned_partitions": member.owned_partitions,
        "outbound_moves": 0,
        "voter": member.voter,
        "leader": member.leader,
        "heartbeat_age_seconds": member.heartbeat_age_seconds,
    });
    match &member.node_status {
        Some(Ok(status)) => value["node_status"] = shown_status(status),
        Some(Err(why)) => value["status_error"] = json!(why),
        None => {}
    }
    value
}

fn shown_status(status: &NodeStatus) -> Value {
    let copies: Vec<Value> = status.quarantined.iter().map(shown_copy).collect();
    json!({
        "node": status.node,
        "draining": status.draining,
        "produce_in_flight": status.produce_in_flight,
        "dispatch_backlog": status.dispatch_backlog,
        "quarantine": {
            "copies": status.quarantined_copies,
            "bytes": status.quarantined_bytes,
            "list": copies,
        },
        "moves": [],
    })
}

fn shown_copy(copy: &Quarantined) -> Value {
    json!({
        "kind": "topic_incarnation",
        "topic": copy.topic,
        "partition": -1,
        "dir": copy.directory,
        "bytes": copy.bytes,
        "mod_time": copy.modified_at,
    })
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
