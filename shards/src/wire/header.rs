//! The 32 bytes in front of every frame between nodes (E42). Little-endian, no padding.
//!
//! ```text
//! 0  length u32         of the whole frame, header included
//! 4  operation u16
//! 6  version u8         of that operation's archive
//! 7  flags u8           reply, cancel, one way
//! 8  lane u8
//! 9  zero u8
//! 10 status u16         of a reply, in HTTP's vocabulary; 0 in a request
//! 12 archive_bytes u32  the rest of the frame is raw payload
//! 16 request id u64     chosen by the caller, unique on its connection while the call lasts
//! 24 budget_ms u32      of a request: what is left of its caller's patience
//! 28 credit u32         of a reply of a shard: commit bytes granted by it (E41)
//! ```

/// Bytes of a header.
pub const HEADER_BYTES: usize = 32;
/// A longer frame is neither sent nor read (K39).
pub const FRAME_BYTES_MAX: usize = 16 << 20;

/// Streams of one kind on a connection: bulk on one never delays another. Lower is more urgent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Lane {
    /// Votes, appends, heartbeats of consensus.
    Consensus = 0,
    /// Membership, topic changes, confirmations, tokens.
    Control = 1,
    Ack = 2,
    Consume = 3,
    Produce = 4,
    /// Snapshots, transfers.
    Bulk = 5,
}

impl Lane {
    pub const ALL: [Lane; 6] = [Lane::Consensus, Lane::Control, Lane::Ack, Lane::Consume, Lane::Produce, Lane::Bulk];

    fn of(number: u8) -> Option<Lane> {
        Lane::ALL.get(usize::from(number)).copied()
    }
}

/// What a frame is, beside its operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Request,
    /// A request that is not answered.
    OneWay,
    Reply,
    /// The caller of this request id no longer waits. Has no archive and is not answered.
    Cancel,
}

const REPLY: u8 = 1;
const CANCEL: u8 = 2;
const ONE_WAY: u8 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Of the whole frame, header included.
    pub length: u32,
    pub operation: u16,
    pub version: u8,
    pub kind: Kind,
    pub lane: Lane,
    /// HTTP's vocabulary; 0 in a request.
    pub status: u16,
    pub archive_bytes: u32,
    pub request_id: u64,
    pub budget_ms: u32,
    pub credit_bytes: u32,
}

/// The connection cannot be read any further: what follows has no known beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadHeader {
    /// Longer than [`FRAME_BYTES_MAX`], or shorter than its own parts.
    Length(u32),
    Flags(u8),
    Lane(u8),
    Reserved,
}

impl std::fmt::Display for BadHeader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            BadHeader::Length(bytes) => write!(f, "a frame of {bytes} bytes (at most {FRAME_BYTES_MAX})"),
            BadHeader::Flags(flags) => write!(f, "unknown frame flags {flags:#x}"),
            BadHeader::Lane(lane) => write!(f, "unknown lane {lane}"),
            BadHeader::Reserved => write!(f, "a reserved header byte is not zero"),
        }
    }
}

impl Header {
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let flags = match self.kind {
            Kind::Request => 0,
            Kind::Reply => REPLY,
            Kind::Cancel => CANCEL,
            Kind::OneWay => ONE_WAY,
        };
        bytes[0..4].copy_from_slice(&self.length.to_le_bytes());
        bytes[4..6].copy_from_slice(&self.operation.to_le_bytes());
        bytes[6] = self.version;
        bytes[7] = flags;
        bytes[8] = self.lane as u8;
        bytes[10..12].copy_from_slice(&self.status.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.archive_bytes.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.request_id.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.budget_ms.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.credit_bytes.to_le_bytes());
        bytes
    }

    /// Nothing is allocated for a frame before its header has passed here.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, BadHeader> {
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let (length, archive_bytes) = (u32_at(0), u32_at(12));
        let parts = u64::from(archive_bytes) + HEADER_BYTES as u64;
        if length as usize > FRAME_BYTES_MAX || u64::from(length) < parts {
            return Err(BadHeader::Length(length));
        }
        let kind = match bytes[7] {
            0 => Kind::Request,
            REPLY => Kind::Reply,
            CANCEL => Kind::Cancel,
            ONE_WAY => Kind::OneWay,
            other => return Err(BadHeader::Flags(other)),
        };
        let lane = Lane::of(bytes[8]).ok_or(BadHeader::Lane(bytes[8]))?;
        if bytes[9] != 0 {
            return Err(BadHeader::Reserved);
        }
        let mut id = [0; 8];
        id.copy_from_slice(&bytes[16..24]);
        Ok(Header {
            length,
            operation: u16_at(4),
            version: bytes[6],
            kind,
            lane,
            status: u16_at(10),
            archive_bytes,
            request_id: u64::from_le_bytes(id),
            budget_ms: u32_at(24),
            credit_bytes: u32_at(28),
        })
    }

    /// Bytes behind the header.
    pub fn body_bytes(&self) -> usize {
        self.length as usize - HEADER_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            length: 132,
            operation: 11,
            version: 1,
            kind: Kind::Reply,
            lane: Lane::Produce,
            status: 412,
            archive_bytes: 60,
            request_id: u64::MAX - 3,
            budget_ms: 30_000,
            credit_bytes: 8 << 20,
        }
    }

    #[test]
    fn e42_a_header_comes_back_as_it_went() {
        for kind in [Kind::Request, Kind::OneWay, Kind::Reply, Kind::Cancel] {
            for lane in Lane::ALL {
                let sent = Header { kind, lane, ..header() };
                assert_eq!(Header::decode(&sent.encode()), Ok(sent));
            }
        }
    }

    #[test]
    fn k39_hostile_lengths_are_refused_before_anything_is_allocated() {
        let with = |length, archive_bytes| Header::decode(&Header { length, archive_bytes, ..header() }.encode());
        assert_eq!(with(u32::MAX, 0), Err(BadHeader::Length(u32::MAX)));
        assert_eq!(with(FRAME_BYTES_MAX as u32 + 1, 0), Err(BadHeader::Length(FRAME_BYTES_MAX as u32 + 1)));
        assert_eq!(with(31, 0), Err(BadHeader::Length(31)));
        assert_eq!(with(100, 69), Err(BadHeader::Length(100)));
        assert_eq!(with(100, u32::MAX), Err(BadHeader::Length(100)));
        assert!(with(100, 68).is_ok() && with(32, 0).is_ok() && with(FRAME_BYTES_MAX as u32, 0).is_ok());
    }

    #[test]
    fn e42_what_this_build_does_not_know_is_an_error_not_a_guess() {
        let mut bytes = header().encode();
        bytes[7] = 3;
        assert_eq!(Header::decode(&bytes), Err(BadHeader::Flags(3)));
        let mut bytes = header().encode();
        bytes[8] = 6;
        assert_eq!(Header::decode(&bytes), Err(BadHeader::Lane(6)));
        let mut bytes = header().encode();
        bytes[9] = 1;
        assert_eq!(Header::decode(&bytes), Err(BadHeader::Reserved));
    }
}
