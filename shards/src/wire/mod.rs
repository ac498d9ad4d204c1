//! What travels between nodes: frames of a fixed header, an rkyv archive and raw payload (E42).

mod archive;
mod commit;
mod consume;
pub(crate) mod fuzz;
mod header;
mod messages;
mod settle;
#[cfg(test)]
mod tests;

pub use archive::{Refusal, VERSION};
pub use header::{BadHeader, Header, Kind, Lane, FRAME_BYTES_MAX, HEADER_BYTES};
pub use messages::{answer, answered, ask, asked, SHARD_OPERATIONS};

use std::time::Duration;

use crate::io::{AlignedBuf, Slice};

/// Numbers of the operations. Only ever appended.
pub mod operation {
    pub const PRODUCE: u16 = 1;
    pub const CONSUME: u16 = 2;
    pub const CREATE_TOPIC: u16 = 4;
    pub const ALTER_TOPIC: u16 = 5;
    pub const DELETE_TOPIC: u16 = 6;
    pub const PURGE_TOPIC: u16 = 7;
    pub const PARTITION_STATS: u16 = 8;
    pub const REGISTER_MEMBER: u16 = 9;
    pub const COMMIT_PRODUCE: u16 = 10;
    pub const COMMIT_PRODUCE_BATCH: u16 = 11;
    pub const GET_TOPIC: u16 = 20;
    pub const JOIN_CLUSTER: u16 = 21;
    pub const APPLIED_INDEX: u16 = 29;
    pub const TOKEN_REGISTER: u16 = 30;
    pub const TOKEN_NOTIFY: u16 = 31;
    /// Acks, extends and nacks, one or many (3, 18, 19 and 32 of the list).
    pub const SETTLE: u16 = 32;
    pub const NODE_STATUS: u16 = 33;
    pub const FORGET_SERVER: u16 = 34;
    /// One message of consensus, one way.
    pub const CONSENSUS: u16 = 64;
    /// A piece of a metadata snapshot.
    pub const SNAPSHOT: u16 = 65;
    /// A replay read.
    pub const READ_AT: u16 = 66;
    /// A metadata command that a node which does not lead asks the leader to propose (E47).
    pub const PROPOSE: u16 = 67;
    /// Is answered once the receiver shows what was decided up to a log index.
    pub const SHOWN: u16 = 68;
}

/// Statuses of replies: HTTP's numbers, mapped one to one at the HTTP boundary.
pub mod status {
    pub const OK: u16 = 200;
    pub const NOTHING: u16 = 204;
    pub const BAD_REQUEST: u16 = 400;
    pub const NOT_FOUND: u16 = 404;
    pub const CONFLICT: u16 = 409;
    pub const GONE: u16 = 410;
    pub const PRECONDITION_FAILED: u16 = 412;
    /// Not served here; the reply may say where.
    pub const MISDIRECTED: u16 = 421;
    pub const INTERNAL: u16 = 500;
    pub const UNAVAILABLE: u16 = 503;
}

/// A frame to send: the archive, then the payload pieces as they lie in memory.
#[derive(Clone, Debug)]
pub struct Outgoing {
    pub operation: u16,
    pub version: u8,
    pub lane: Lane,
    /// Of a reply; 0 in a request.
    pub status: u16,
    /// Of a request.
    pub budget: Duration,
    /// Of a reply of a shard (E41).
    pub credit_bytes: u32,
    pub archive: Slice,
    pub payload: Vec<Slice>,
}

impl Outgoing {
    /// Bytes of the whole frame.
    pub fn frame_bytes(&self) -> usize {
        HEADER_BYTES + self.archive.len() + self.payload.iter().map(|piece| piece.len()).sum::<usize>()
    }

    /// The header of this frame. `None`: it is longer than a frame may be (K39), so it is never sent.
    pub fn header(&self, kind: Kind, request_id: u64) -> Option<Header> {
        let length = u32::try_from(self.frame_bytes()).ok().filter(|bytes| *bytes as usize <= FRAME_BYTES_MAX)?;
        Some(Header {
            length,
            operation: self.operation,
            version: self.version,
            kind,
            lane: self.lane,
            status: self.status,
            archive_bytes: self.archive.len() as u32,
            request_id,
            budget_ms: u32::try_from(self.budget.as_millis()).unwrap_or(u32::MAX),
            credit_bytes: self.credit_bytes,
        })
    }
}

/// A frame that came in whole. Its body is not yet validated.
#[derive(Clone, Debug)]
pub struct Incoming {
    pub header: Header,
    /// Archive and payload; begins on 16 bytes.
    body: Slice,
}

impl Incoming {
    /// `body` is what followed the header, copied to memory of its own.
    pub fn new(header: Header, body: AlignedBuf) -> Incoming {
        debug_assert_eq!(header.body_bytes(), body.len());
        Incoming { header, body: body.freeze() }
    }

    pub fn archive(&self) -> &[u8] {
        &self.body[..self.header.archive_bytes as usize]
    }

    pub fn payload(&self) -> Slice {
        self.body.slice(self.header.archive_bytes as usize..self.body.len())
    }

    pub fn budget(&self) -> Duration {
        Duration::from_millis(u64::from(self.header.budget_ms))
    }
}
