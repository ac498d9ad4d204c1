//! What shards of different nodes say to each other, as frames: the same [`Request`]s and [`Reply`]s that rings carry
//! between shards of one node.

use std::time::Duration;

use super::archive::{expect_version, Refusal};
use super::{commit, consume, operation, settle, status, Incoming, Outgoing};
use crate::meta::ShardId;
use crate::peer::{Reply, Request};

/// Operations that a shard answers, each with the newest version of its archive.
pub const SHARD_OPERATIONS: &[(u16, u8)] = &[
    (operation::PRODUCE, 1),
    (operation::CONSUME, 1),
    (operation::PARTITION_STATS, 1),
    (operation::COMMIT_PRODUCE, 1),
    (operation::COMMIT_PRODUCE_BATCH, 1),
    (operation::TOKEN_REGISTER, 1),
    (operation::TOKEN_NOTIFY, 1),
    (operation::SETTLE, 1),
    (operation::READ_AT, 1),
];

/// The frame of a request. `None`: this request does not leave its node.
pub fn ask(request: &Request, budget: Duration) -> Option<Outgoing> {
    match request {
        Request::Commit(batch) => Some(commit::encode(batch, budget)),
        Request::Produce { topic, partition, record } => {
            Some(commit::encode_produce(topic, *partition, record, budget))
        }
        Request::Claim { .. } | Request::Park { .. } | Request::NodeClaim { .. } => consume::encode(request, budget),
        Request::ReadAt { incarnation, partition, offset } => {
            Some(consume::encode_read_at(*incarnation, *partition, *offset, budget))
        }
        Request::Settle { incarnation, settles } => Some(settle::encode(*incarnation, settles, budget)),
        Request::Stats { incarnation } => Some(settle::encode_stats(*incarnation, budget)),
        Request::Register { incarnation, token } => Some(settle::encode_register(*incarnation, token, budget)),
        Request::NodeAvailable { incarnation, node, boot_id } => {
            Some(settle::encode_notify(*incarnation, *node, Some(*boot_id)))
        }
        Request::Pass { incarnation, node } => Some(settle::encode_notify(*incarnation, *node, None)),
        _ => None,
    }
}

/// What a frame asks for. The records of a commit lie in the frame as it came, and keep it.
pub fn asked(incoming: &Incoming) -> Result<Request, Refusal> {
    let number = incoming.header.operation;
    let known = SHARD_OPERATIONS.iter().any(|(known, _)| *known == number);
    if !known || incoming.header.version == 0 {
        return Err(Refusal::new(status::BAD_REQUEST, format!("unsupported rpc operation {number}")));
    }
    expect_version(incoming)?;
    match number {
        operation::PRODUCE => commit::decode_produce(incoming),
        operation::CONSUME => consume::decode(incoming),
        operation::PARTITION_STATS => settle::decode_stats(incoming),
        operation::COMMIT_PRODUCE | operation::COMMIT_PRODUCE_BATCH => commit::decode(incoming),
        operation::TOKEN_REGISTER => settle::decode_register(incoming),
        operation::TOKEN_NOTIFY => settle::decode_notify(incoming),
        operation::SETTLE => settle::decode(incoming),
        _ => consume::decode_read_at(incoming),
    }
}

/// The frame of a reply to a request of `operation`, served by `shard`. `None`: such a reply does not leave its node.
pub fn answer(operation: u16, shard: ShardId, reply: &Reply) -> Option<Outgoing> {
    let commit = || commit::encode_reply(operation, shard, reply);
    let consume = || consume::encode_reply(operation, shard, reply);
    commit().or_else(consume).or_else(|| settle::encode_reply(operation, shard, reply))
}

/// What a frame answers, and the shard that served it, where that depends on a partition.
pub fn answered(incoming: &Incoming) -> Result<(Option<ShardId>, Reply), Refusal> {
    expect_version(incoming)?;
    let of_a_shard = |(shard, reply)| (Some(shard), reply);
    let of_a_node = |reply| (None, reply);
    match incoming.header.operation {
        operation::PRODUCE => commit::decode_reply(incoming).map(|(_, reply)| of_a_node(reply)),
        operation::COMMIT_PRODUCE | operation::COMMIT_PRODUCE_BATCH => commit::decode_reply(incoming).map(of_a_shard),
        operation::CONSUME | operation::READ_AT => consume::decode_reply(incoming).map(of_a_shard),
        operation::SETTLE => settle::decode_settled(incoming).map(of_a_shard),
        operation::PARTITION_STATS => settle::decode_stats_reply(incoming).map(of_a_node),
        operation::TOKEN_REGISTER => settle::decode_registered(incoming).map(of_a_node),
        other => Err(Refusal::new(status::BAD_REQUEST, format!("a reply of the unknown operation {other}"))),
    }
}
