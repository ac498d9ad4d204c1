//! Settles, statistics and tokens: what has no payload.

use std::time::Duration;

use rkyv::{Archive, Deserialize, Serialize};

use super::archive::{read, reply, request, Refusal};
use super::consume::{FailureV1, TokenV1};
use super::{operation, status, Incoming, Lane, Outgoing};
use crate::api::{PartitionStats, Settle, SettleMode, SettleStatus};
use crate::meta::{Incarnation, NodeId, ShardId};
use crate::peer::{Reply, Request, Token};

#[derive(Archive, Serialize, Deserialize)]
enum ModeV1 {
    Ack,
    Extend,
    Nack,
    Release,
}

#[derive(Archive, Serialize, Deserialize)]
struct SettleV1 {
    offset: u64,
    nonce: u64,
    partition: u32,
    mode: ModeV1,
}

#[derive(Archive, Serialize, Deserialize)]
struct SettlesV1 {
    incarnation: u64,
    settles: Vec<SettleV1>,
}

#[derive(Archive, Serialize, Deserialize)]
enum StatusV1 {
    Done,
    LeaseGone,
    NotOwner,
    Unanswered,
    OwnerDown,
}

/// `shard` served the first of them.
#[derive(Archive, Serialize, Deserialize)]
struct SettledV1 {
    shard: u16,
    statuses: Vec<StatusV1>,
}

#[derive(Archive, Serialize, Deserialize)]
struct StatsV1 {
    incarnation: u64,
}

#[derive(Archive, Serialize, Deserialize)]
struct PartitionV1 {
    segments: u64,
    oldest_offset: u64,
    next_offset: u64,
    high_watermark: u64,
    size_bytes: u64,
    oldest_segment_at: Option<u64>,
    frontier: u64,
    leased: u64,
    acked_ahead: u64,
    index: u32,
}

#[derive(Archive, Serialize, Deserialize)]
struct RegisterV1 {
    incarnation: u64,
    token: TokenV1,
}

#[derive(Archive, Serialize, Deserialize)]
enum RegisteredV1 {
    Kept,
    Ready,
    Failed(FailureV1),
}

/// One way: records may be at `node`, for the process `boot_id`; or, without it, nobody waits at `node`.
#[derive(Archive, Serialize, Deserialize)]
struct NotifyV1 {
    incarnation: u64,
    node: u64,
    boot_id: Option<u64>,
}

pub(super) fn encode(incarnation: Incarnation, settles: &[Settle], budget: Duration) -> Outgoing {
    let one = |settle: &Settle| SettleV1 {
        offset: settle.offset,
        nonce: settle.nonce,
        partition: settle.partition,
        mode: match settle.mode {
            SettleMode::Ack => ModeV1::Ack,
            SettleMode::Extend => ModeV1::Extend,
            SettleMode::Nack => ModeV1::Nack,
            SettleMode::Release => ModeV1::Release,
        },
    };
    let value = SettlesV1 { incarnation: incarnation.0, settles: settles.iter().map(one).collect() };
    request(operation::SETTLE, Lane::Ack, budget, &value, Vec::new())
}

pub(super) fn decode(incoming: &Incoming) -> Result<Request, Refusal> {
    let value: SettlesV1 = read(incoming)?;
    let one = |settle: SettleV1| Settle {
        partition: settle.partition,
        offset: settle.offset,
        nonce: settle.nonce,
        mode: match settle.mode {
            ModeV1::Ack => SettleMode::Ack,
            ModeV1::Extend => SettleMode::Extend,
            ModeV1::Nack => SettleMode::Nack,
            ModeV1::Release => SettleMode::Release,
        },
    };
    let settles = value.settles.into_iter().map(one).collect();
    Ok(Request::Settle { incarnation: Incarnation(value.incarnation), settles })
}

pub(super) fn encode_stats(incarnation: Incarnation, budget: Duration) -> Outgoing {
    let value = StatsV1 { incarnation: incarnation.0 };
    request(operation::PARTITION_STATS, Lane::Control, budget, &value, Vec::new())
}

pub(super) fn decode_stats(incoming: &Incoming) -> Result<Request, Refusal> {
    let StatsV1 { incarnation } = read(incoming)?;
    Ok(Request::Stats { incarnation: Incarnation(incarnation) })
}

pub(super) fn encode_register(incarnation: Incarnation, token: &Token, budget: Duration) -> Outgoing {
    let value = RegisterV1 { incarnation: incarnation.0, token: TokenV1::of(token) };
    request(operation::TOKEN_REGISTER, Lane::Control, budget, &value, Vec::new())
}

pub(super) fn decode_register(incoming: &Incoming) -> Result<Request, Refusal> {
    let RegisterV1 { incarnation, token } = read(incoming)?;
    Ok(Request::Register { incarnation: Incarnation(incarnation), token: token.token() })
}

pub(super) fn encode_notify(incarnation: Incarnation, node: NodeId, boot_id: Option<u64>) -> Outgoing {
    let value = NotifyV1 { incarnation: incarnation.0, node: node.0, boot_id };
    request(operation::TOKEN_NOTIFY, Lane::Control, Duration::ZERO, &value, Vec::new())
}

pub(super) fn decode_notify(incoming: &Incoming) -> Result<Request, Refusal> {
    let NotifyV1 { incarnation, node, boot_id } = read(incoming)?;
    let (incarnation, node) = (Incarnation(incarnation), NodeId(node));
    Ok(match boot_id {
        Some(boot_id) => Request::NodeAvailable { incarnation, node, boot_id },
        None => Request::Pass { incarnation, node },
    })
}

pub(super) fn encode_reply(number: u16, shard: ShardId, reply_: &Reply) -> Option<Outgoing> {
    match reply_ {
        Reply::Settled(statuses) => {
            let one = |status: &SettleStatus| match status {
                SettleStatus::Done => StatusV1::Done,
                SettleStatus::LeaseGone => StatusV1::LeaseGone,
                SettleStatus::NotOwner => StatusV1::NotOwner,
                SettleStatus::Unanswered => StatusV1::Unanswered,
                SettleStatus::OwnerDown => StatusV1::OwnerDown,
            };
            let value = SettledV1 { shard, statuses: statuses.iter().map(one).collect() };
            Some(reply(number, Lane::Ack, status::OK, &value, Vec::new()))
        }
        Reply::Stats(partitions) => {
            let one = |p: &PartitionStats| PartitionV1 {
                segments: p.segments,
                oldest_offset: p.oldest_offset,
                next_offset: p.next_offset,
                high_watermark: p.high_watermark,
                size_bytes: p.size_bytes,
                oldest_segment_at: p.oldest_segment_at,
                frontier: p.frontier,
                leased: p.leased,
                acked_ahead: p.acked_ahead,
                index: p.index,
            };
            let value: Vec<PartitionV1> = partitions.iter().map(one).collect();
            Some(reply(number, Lane::Control, status::OK, &value, Vec::new()))
        }
        Reply::Registered(registered) => {
            let (status, value) = match registered {
                Ok(true) => (status::OK, RegisteredV1::Ready),
                Ok(false) => (status::NOTHING, RegisteredV1::Kept),
                Err(error) => {
                    let (status, failure) = FailureV1::of(error);
                    (status, RegisteredV1::Failed(failure))
                }
            };
            Some(reply(number, Lane::Control, status, &value, Vec::new()))
        }
        _ => None,
    }
}

pub(super) fn decode_settled(incoming: &Incoming) -> Result<(ShardId, Reply), Refusal> {
    let value: SettledV1 = read(incoming)?;
    let one = |status: StatusV1| match status {
        StatusV1::Done => SettleStatus::Done,
        StatusV1::LeaseGone => SettleStatus::LeaseGone,
        StatusV1::NotOwner => SettleStatus::NotOwner,
        StatusV1::Unanswered => SettleStatus::Unanswered,
        StatusV1::OwnerDown => SettleStatus::OwnerDown,
    };
    Ok((value.shard, Reply::Settled(value.statuses.into_iter().map(one).collect())))
}

pub(super) fn decode_stats_reply(incoming: &Incoming) -> Result<Reply, Refusal> {
    let partitions: Vec<PartitionV1> = read(incoming)?;
    let one = |p: PartitionV1| PartitionStats {
        index: p.index,
        segments: p.segments,
        oldest_offset: p.oldest_offset,
        next_offset: p.next_offset,
        high_watermark: p.high_watermark,
        size_bytes: p.size_bytes,
        oldest_segment_at: p.oldest_segment_at,
        frontier: p.frontier,
        leased: p.leased,
        acked_ahead: p.acked_ahead,
    };
    Ok(Reply::Stats(partitions.into_iter().map(one).collect()))
}

pub(super) fn decode_registered(incoming: &Incoming) -> Result<Reply, Refusal> {
    let value: RegisteredV1 = read(incoming)?;
    Ok(Reply::Registered(match value {
        RegisteredV1::Ready => Ok(true),
        RegisteredV1::Kept => Ok(false),
        RegisteredV1::Failed(failure) => Err(failure.error()),
    }))
}
