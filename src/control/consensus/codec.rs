//! Bytes of consensus: log entries, and frames between control endpoints (E42). A message of the library is its own
//! prost encoding, a command its entry, the rest JSON or plain numbers; none of these frames has an rkyv archive.
//!
//! ```text
//! CONSENSUS      one way   archive: the sender's host:port        payload: message
//! SNAPSHOT       request   archive: JSON, see Piece               payload: message (with the last piece), piece
//! PROPOSE        request   archive: the leader's term u64         payload: id (16 bytes), command
//!                                                                 reply 200: log index u64
//! APPLIED_INDEX  request   nothing; behind a barrier              reply 200: log index u64
//! GET_TOPIC      request   payload: name; behind a barrier        reply 200: incarnation u64; 404: there is none
//! ```
//!
//! A reply of 421 says that nothing was done here, for certain; one of 503 that nobody knows. Its payload is the
//! reason.

use std::collections::BTreeSet;
use std::time::Duration;

use narad_shards::io::Slice;
use narad_shards::wire::{operation, status, Incoming, Lane, Outgoing};
use prost::Message as _;
use raft::eraftpb::{ConfState, EntryType, Message, MessageType};
use serde::{Deserialize, Serialize};

use super::configuration::Configuration;

/// Version of the frames above.
pub const VERSION: u8 = 1;

/// Distinguishes every proposal of every process: drawn number of the process, then a count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProposalId(pub u128);

impl ProposalId {
    pub fn new(process: u64, count: u64) -> ProposalId {
        ProposalId(u128::from(process) << 64 | u128::from(count))
    }

    pub fn to_bytes(self) -> Vec<u8> {
        self.0.to_le_bytes().to_vec()
    }

    /// `None`: an entry without one.
    pub fn of(context: &[u8]) -> Option<ProposalId> {
        Some(ProposalId(u128::from_le_bytes(context.try_into().ok()?)))
    }
}

/// What goes before a piece of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    pub offset: u64,
    pub image_bytes: u64,
    /// Of the library's message in front of the last piece; 0 before.
    pub message_bytes: usize,
}

fn frame(operation: u16, lane: Lane, budget: Duration, archive: &[u8], payload: Vec<Slice>) -> Outgoing {
    Outgoing {
        operation,
        version: VERSION,
        lane,
        status: 0,
        budget,
        credit_bytes: 0,
        archive: if archive.is_empty() { Slice::empty() } else { Slice::copy_from(archive) },
        payload,
    }
}

fn piece_of(bytes: &[u8]) -> Vec<Slice> {
    if bytes.is_empty() {
        return Vec::new();
    }
    vec![Slice::copy_from(bytes)]
}

pub fn message_frame(from: &str, message: &Message) -> Outgoing {
    let payload = piece_of(&message.encode_to_vec());
    frame(operation::CONSENSUS, Lane::Consensus, Duration::ZERO, from.as_bytes(), payload)
}

pub fn snapshot_frame(budget: Duration, piece: &Piece, message: &[u8], bytes: &[u8]) -> Outgoing {
    let archive = serde_json::to_vec(piece).unwrap_or_default(); // three numbers
    let payload = piece_of(message).into_iter().chain(piece_of(bytes)).collect();
    frame(operation::SNAPSHOT, Lane::Bulk, budget, &archive, payload)
}

/// `term`: of the leader that it is for.
pub fn propose_frame(budget: Duration, term: u64, id: ProposalId, command: &[u8]) -> Outgoing {
    let payload = vec![Slice::copy_from(&id.0.to_le_bytes()), Slice::copy_from(command)];
    frame(operation::PROPOSE, Lane::Control, budget, &term.to_le_bytes(), payload)
}

/// The only term in which a forwarded proposal may be made; `None`: its sender does not say.
pub fn proposal_term(incoming: &Incoming) -> Option<u64> {
    Some(u64::from_le_bytes(incoming.archive().try_into().ok()?))
}

pub fn read_frame(budget: Duration) -> Outgoing {
    frame(operation::APPLIED_INDEX, Lane::Control, budget, &[], Vec::new())
}

pub fn topic_frame(budget: Duration, name: &str) -> Outgoing {
    frame(operation::GET_TOPIC, Lane::Control, budget, &[], piece_of(name.as_bytes()))
}

fn reply(to: &Incoming, status: u16, payload: &[u8]) -> Outgoing {
    Outgoing { status, ..frame(to.header.operation, to.header.lane, Duration::ZERO, &[], piece_of(payload)) }
}

/// A log index, or an incarnation.
pub fn number_reply(to: &Incoming, number: u64) -> Outgoing {
    reply(to, status::OK, &number.to_le_bytes())
}

pub fn refusal(to: &Incoming, status: u16, why: &str) -> Outgoing {
    reply(to, status, why.as_bytes())
}

pub fn reply_number(reply: &Incoming) -> Option<u64> {
    Some(u64::from_le_bytes(reply.payload().as_ref().try_into().ok()?))
}

pub fn reply_text(reply: &Incoming) -> String {
    String::from_utf8_lossy(&reply.payload()).into_owned()
}

/// What has been counted up to lies below. Beyond it one step more would overflow in the library, and a term that one
/// node was told is every node's within a second.
const NUMBER_MAX: u64 = u64::MAX / 2;

/// The library panics on numbers that name nothing and believes all others, so they end here. What only a node's own log
/// can tell ends in [`super::core::Core::step`].
pub fn decode_message(bytes: &[u8]) -> Result<Message, String> {
    let message = Message::decode(bytes).map_err(|error| error.to_string())?;
    if MessageType::from_i32(message.msg_type).is_none() {
        return Err(format!("message type {}", message.msg_type));
    }
    if message.from == 0 || message.to == 0 || message.term == 0 {
        return Err("a message without sender, receiver or term".to_owned());
    }
    let Message { term, log_term, index, commit, commit_term, reject_hint, request_snapshot, .. } = message;
    let highest = [term, log_term, index, commit, commit_term, reject_hint, request_snapshot].into_iter().max();
    if highest > Some(NUMBER_MAX) {
        return Err("a term or an index that nobody has counted up to".to_owned());
    }
    // Of an entry that the log does not have the library knows term 0: it would take what follows on nothing.
    if (index == 0) != (log_term == 0) && message.msg_type == MessageType::MsgAppend as i32 {
        return Err(format!("what follows on entry {index} of term {log_term}"));
    }
    check_entries(&message)?;
    if is_snapshot(&message) {
        check_snapshot(&message)?;
    }
    Ok(message)
}

/// The log is one sequence, in which terms only rise, up to the sender's.
fn check_entries(message: &Message) -> Result<(), String> {
    let mut before = (message.index, message.log_term);
    for entry in &message.entries {
        if EntryType::from_i32(entry.entry_type).is_none() {
            return Err(format!("entry type {}", entry.entry_type));
        }
        let (index, term) = (entry.index, entry.term);
        if index != before.0 + 1 || !(before.1..=message.term).contains(&term) {
            return Err(format!(
                "entry {index} of term {term} behind {} of term {} in a message of term {}",
                before.0, before.1, message.term
            ));
        }
        before = (index, term);
    }
    Ok(())
}

/// The servers that the library takes over and those that this node keeps are the same, the receiver among them.
fn check_snapshot(message: &Message) -> Result<(), String> {
    let metadata = message.get_snapshot().get_metadata();
    if !(1..=NUMBER_MAX).contains(&metadata.index) || !(1..=message.term).contains(&metadata.term) {
        return Err(format!("a snapshot of entry {} of term {}", metadata.index, metadata.term));
    }
    let kept: Configuration = serde_json::from_slice(&message.get_snapshot().data)
        .map_err(|error| format!("a snapshot without its servers: {error}"))?;
    let sorted = |ids: &[u64]| ids.iter().copied().collect::<BTreeSet<u64>>().into_iter().collect::<Vec<u64>>();
    let told = metadata.get_conf_state();
    let told = ConfState { voters: sorted(&told.voters), learners: sorted(&told.learners), ..told.clone() };
    if told != kept.conf_state() || kept.voters() == 0 || !kept.servers.contains_key(&message.to) {
        return Err(format!("a snapshot whose servers are contradictory: {told:?}, kept {:?}", kept.conf_state()));
    }
    Ok(())
}

/// What peers may say to each other: their proposals and reads go other ways (E47), and the rest the library says to
/// itself.
pub fn is_between_peers(message: &Message) -> bool {
    matches!(
        MessageType::from_i32(message.msg_type),
        Some(
            MessageType::MsgAppend
                | MessageType::MsgAppendResponse
                | MessageType::MsgRequestVote
                | MessageType::MsgRequestVoteResponse
                | MessageType::MsgRequestPreVote
                | MessageType::MsgRequestPreVoteResponse
                | MessageType::MsgHeartbeat
                | MessageType::MsgHeartbeatResponse
                | MessageType::MsgTimeoutNow
        )
    )
}

pub fn is_from_leader(message: &Message) -> bool {
    matches!(
        MessageType::from_i32(message.msg_type),
        Some(MessageType::MsgAppend | MessageType::MsgHeartbeat | MessageType::MsgSnapshot)
    )
}

/// An answer to a leader: who sends it takes the leader's messages. One that asks for votes may take none.
pub fn is_answer(message: &Message) -> bool {
    matches!(
        MessageType::from_i32(message.msg_type),
        Some(MessageType::MsgAppendResponse | MessageType::MsgHeartbeatResponse)
    )
}

pub fn is_snapshot(message: &Message) -> bool {
    message.msg_type == MessageType::MsgSnapshot as i32
}

/// The commit index that a leader tells in full. A heartbeat's is cut to what the follower has acknowledged.
pub fn leader_commit(message: &Message) -> Option<u64> {
    match MessageType::from_i32(message.msg_type)? {
        MessageType::MsgAppend => Some(message.commit),
        MessageType::MsgSnapshot => Some(message.get_snapshot().get_metadata().index),
        _ => None,
    }
}
