//! What fuzzers feed: rows as a damaged or foreign metadata file may hold them, log entries, and frames of peers.

use narad_shards::io::AlignedBuf;
use narad_shards::wire::{operation, Header, Incoming, Kind, Lane, HEADER_BYTES};

use super::rows::{AssignmentRow, MemberRow, TopicRow};
use super::{check_topic_name, wire, Command, State};

/// The row of a topic: the name up to the first zero byte, the row behind it.
pub(crate) fn topic_row(data: &[u8]) {
    let end = data.iter().position(|byte| *byte == 0).unwrap_or(data.len());
    let name = String::from_utf8_lossy(&data[..end]);
    let _ = check_topic_name(&name);
    let Some(row) = data.get(end + 1..) else { return };
    if let Ok(topic) = TopicRow::decode(&name, row) {
        let again = TopicRow::encode(&topic).expect("what was decoded encodes");
        assert_eq!(TopicRow::decode(&name, &again).as_ref(), Ok(&topic));
        let state = State::restore([std::sync::Arc::new(topic)], 1);
        assert_eq!(state.topics().len(), 1);
    }
}

/// A log entry, and the rows of the cluster's tables.
pub(crate) fn log_entry(data: &[u8]) {
    if let Ok(command) = Command::decode(data) {
        assert_eq!(Command::decode(&command.encode()).as_ref(), Ok(&command));
    }
    if let Ok(member) = MemberRow::decode("a", data) {
        let again = MemberRow::encode(&member).expect("what was decoded encodes");
        assert_eq!(MemberRow::decode("a", &again).as_ref(), Ok(&member));
    }
    let _ = AssignmentRow::decode(data);
}

/// The body of a join, of its answer, and of a forget.
pub(crate) fn join_frame(data: &[u8]) {
    let header = Header {
        length: (HEADER_BYTES + data.len()) as u32,
        operation: operation::JOIN_CLUSTER,
        version: wire::VERSION,
        kind: Kind::Request,
        lane: Lane::Control,
        status: 200,
        archive_bytes: data.len() as u32,
        request_id: 1,
        budget_ms: 1,
        credit_bytes: 0,
    };
    let mut body = AlignedBuf::zeroed(data.len());
    body.truncate(data.len());
    body.copy_from_slice(data);
    let frame = Incoming::new(header, body);
    let _ = wire::read_join(&frame);
    let _ = wire::read_forget(&frame);
    assert_eq!(wire::read_answer(&frame).status, 200);
}
