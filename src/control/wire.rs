//! Bodies of the membership operations between control endpoints (E42): JOIN_CLUSTER, FORGET_SERVER, SHOWN and NODE_STATUS. A
//! heartbeat has none: it travels as a proposed command.

use std::time::Duration;

use narad_shards::api::{NodeStatus, Quarantined};
use narad_shards::io::Slice;
use narad_shards::wire::{operation, status, Incoming, Lane, Outgoing};
use rkyv::rancor;

use super::membership::{Answer, Join};

/// Version of these archives.
pub const VERSION: u8 = 1;

#[derive(rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
struct JoinBody {
    node: String,
    raft_id: u64,
    peer_address: String,
    empty_directory: bool,
    newest_command_type: u64,
    probe: bool,
    initial_members: Vec<String>,
}

#[derive(rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
struct AnswerBody {
    word: String,
    reason: String,
    leader_id: String,
    leader_address: String,
    initial_members: Vec<String>,
}

fn frame(operation: u16, status: u16, budget: Duration, archive: &[u8]) -> Outgoing {
    let archive = Slice::copy_from(archive);
    let payload = Vec::new();
    Outgoing { operation, version: VERSION, lane: Lane::Control, status, budget, credit_bytes: 0, archive, payload }
}

const IN_MEMORY: &str = "an archive of strings and numbers in memory has no way to fail";

pub fn join_request(join: &Join, budget: Duration) -> Outgoing {
    let body = JoinBody {
        node: join.node.clone(),
        raft_id: join.raft_id,
        peer_address: join.peer_address.clone(),
        empty_directory: join.empty_directory,
        newest_command_type: join.newest_command_type,
        probe: join.probe,
        initial_members: join.initial_members.clone(),
    };
    frame(operation::JOIN_CLUSTER, 0, budget, &rkyv::to_bytes::<rancor::Error>(&body).expect(IN_MEMORY))
}

/// `None`: unreadable, to be answered with 400.
pub fn read_join(request: &Incoming) -> Option<Join> {
    let body = rkyv::from_bytes::<JoinBody, rancor::Error>(request.archive()).ok()?;
    Some(Join {
        node: body.node,
        raft_id: body.raft_id,
        peer_address: body.peer_address,
        empty_directory: body.empty_directory,
        newest_command_type: body.newest_command_type,
        probe: body.probe,
        initial_members: body.initial_members,
    })
}

/// The answer to a join or a forget.
pub fn answer(operation: u16, answer: &Answer) -> Outgoing {
    let body = AnswerBody {
        word: answer.word.clone(),
        reason: answer.reason.clone(),
        leader_id: answer.leader_id.clone(),
        leader_address: answer.leader_address.clone(),
        initial_members: answer.initial_members.clone(),
    };
    frame(operation, answer.status, Duration::ZERO, &rkyv::to_bytes::<rancor::Error>(&body).expect(IN_MEMORY))
}

pub fn read_answer(reply: &Incoming) -> Answer {
    let body = rkyv::from_bytes::<AnswerBody, rancor::Error>(reply.archive()).ok();
    let status = reply.header.status;
    match body {
        Some(body) => Answer {
            status,
            word: body.word,
            reason: body.reason,
            leader_id: body.leader_id,
            leader_address: body.leader_address,
            initial_members: body.initial_members,
        },
        None => Answer { status, ..Answer::default() },
    }
}

/// Asks the leader to forget a server; the archive is the node's name.
pub fn forget_request(node: &str, budget: Duration) -> Outgoing {
    frame(operation::FORGET_SERVER, 0, budget, node.as_bytes())
}

pub fn read_forget(request: &Incoming) -> Option<String> {
    String::from_utf8(request.archive().to_vec()).ok()
}

/// Asks to be answered once the log index that is the archive is shown.
pub fn shown_request(index: u64, budget: Duration) -> Outgoing {
    frame(operation::SHOWN, 0, budget, &index.to_le_bytes())
}

pub fn read_shown(request: &Incoming) -> Option<u64> {
    Some(u64::from_le_bytes(request.archive().try_into().ok()?))
}

#[derive(rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
struct StatusBody {
    node: String,
    draining: bool,
    produce_in_flight: u64,
    dispatch_backlog: u64,
    quarantined_copies: u64,
    quarantined_bytes: u64,
    quarantined: Vec<CopyBody>,
}

#[derive(rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
struct CopyBody {
    topic: String,
    directory: String,
    bytes: u64,
    modified_at: u64,
}

/// How is a node? There is nothing in the question.
pub fn ask_status(budget: Duration) -> Outgoing {
    frame(operation::NODE_STATUS, 0, budget, &[])
}

pub fn answer_status(status: NodeStatus) -> Outgoing {
    let copy = |copy: Quarantined| CopyBody {
        topic: copy.topic,
        directory: copy.directory,
        bytes: copy.bytes,
        modified_at: copy.modified_at,
    };
    let body = StatusBody {
        node: status.node,
        draining: status.draining,
        produce_in_flight: status.produce_in_flight,
        dispatch_backlog: status.dispatch_backlog,
        quarantined_copies: status.quarantined_copies,
        quarantined_bytes: status.quarantined_bytes,
        quarantined: status.quarantined.into_iter().map(copy).collect(),
    };
    let archive = rkyv::to_bytes::<rancor::Error>(&body).expect(IN_MEMORY);
    frame(operation::NODE_STATUS, status::OK, Duration::ZERO, &archive)
}

/// `Err`: what the node answered instead.
pub fn read_status(reply: &Incoming) -> Result<NodeStatus, String> {
    if reply.header.status != status::OK {
        return Err(format!("it answered {} {}", reply.header.status, read_answer(reply).reason));
    }
    let body =
        rkyv::from_bytes::<StatusBody, rancor::Error>(reply.archive()).map_err(|_| "its answer is unreadable")?;
    let copy = |copy: CopyBody| Quarantined {
        topic: copy.topic,
        directory: copy.directory,
        bytes: copy.bytes,
        modified_at: copy.modified_at,
    };
    Ok(NodeStatus {
        node: body.node,
        draining: body.draining,
        produce_in_flight: body.produce_in_flight,
        dispatch_backlog: body.dispatch_backlog,
        quarantined_copies: body.quarantined_copies,
        quarantined_bytes: body.quarantined_bytes,
        quarantined: body.quarantined.into_iter().map(copy).collect(),
    })
}
