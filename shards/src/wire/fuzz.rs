//! What fuzzers feed: frames as a peer may send them, with a valid header around anything.

use super::{answer, answered, ask, asked, Header, Incoming, Kind, Lane, Outgoing, HEADER_BYTES, SHARD_OPERATIONS};
use crate::io::AlignedBuf;

/// Operation, version and length of the archive from the first bytes, the rest as the body: read as a request and as
/// a reply. What can be read can be sent on, and reads the same again.
pub(crate) fn frame(data: &[u8]) {
    let Some((&[which, version, low, high], body)) = data.split_first_chunk::<4>() else { return };
    let (operation, _) = SHARD_OPERATIONS[usize::from(which) % SHARD_OPERATIONS.len()];
    let archive_bytes = usize::from(u16::from_le_bytes([low, high])).min(body.len());
    let incoming = incoming(operation, version, archive_bytes, body);
    if let Ok(request) = asked(&incoming) {
        let again = ask(&request, incoming.budget()).expect("what came from a node can go to one");
        let again = asked(&arrived(&again)).expect("just encoded");
        assert_eq!(format!("{again:?}"), format!("{request:?}"));
    }
    if let Ok((shard, reply)) = answered(&incoming) {
        let again = answer(operation, shard.unwrap_or(0), &reply).expect("what came from a node can go to one");
        let (_, again) = answered(&arrived(&again)).expect("just encoded");
        assert_eq!(format!("{again:?}"), format!("{reply:?}"));
    }
}

fn incoming(operation: u16, version: u8, archive_bytes: usize, body: &[u8]) -> Incoming {
    let header = Header {
        length: (HEADER_BYTES + body.len()) as u32,
        operation,
        version,
        kind: Kind::Request,
        lane: Lane::Produce,
        status: 200,
        archive_bytes: archive_bytes as u32,
        request_id: 1,
        budget_ms: 1000,
        credit_bytes: 0,
    };
    let mut buf = AlignedBuf::zeroed(body.len());
    buf[..body.len()].copy_from_slice(body);
    buf.truncate(body.len());
    Incoming::new(header, buf)
}

/// A frame as the other side gets it.
pub(crate) fn arrived(sent: &Outgoing) -> Incoming {
    sent.arrived(Kind::Request, 1).expect("within the limit")
}
