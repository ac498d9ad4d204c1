//! What fuzzers feed: rows as a damaged or foreign metadata file may hold them.

use super::rows::TopicRow;
use super::{check_topic_name, State};

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
