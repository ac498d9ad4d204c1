//! What fuzzers feed: position files as a disk may hold them.

use super::position::{self, Position, Slots, AHEAD_FILE_BYTES, OFFSET_RECORD_BYTES, SLOT_BYTES};
use crate::meta::Incarnation;

const INCARNATION: Incarnation = Incarnation(0xabcd);

/// Both position files: `consumer.offset` first, then `consumer.ahead`; each raw, and with valid checksums. And what
/// an open makes of them beside a log that ends anywhere.
pub(crate) fn positions(data: &[u8]) {
    let mut files = data.to_vec();
    files.resize(OFFSET_RECORD_BYTES + AHEAD_FILE_BYTES as usize, 0);
    for _ in 0..2 {
        let (offset, ahead) = files.split_at(OFFSET_RECORD_BYTES);
        let level = position::decode_offset(offset, INCARNATION);
        if let Some(level) = level {
            let again = position::encode_offset(INCARNATION, level);
            assert_eq!(position::decode_offset(&again, INCARNATION), Some(level));
        }
        for slot in ahead.chunks(SLOT_BYTES) {
            if let Some(record) = position::decode_slot(slot, INCARNATION) {
                survives_its_codec(record.sequence, &record.position);
            }
        }
        let (_, found) = Slots::prime(ahead, INCARNATION);
        if let Some(merged) = Position::merge(found, level) {
            is_normal(&merged);
            let mut clamped = merged.clone();
            clamped.clamp(u64::from(data.first().copied().unwrap_or(0)));
            is_normal(&clamped);
        }
        position::sign(&mut files, INCARNATION);
    }
}

fn is_normal(position: &Position) {
    let mut previous = position.frontier;
    for range in &position.acked {
        assert!(range.start > previous && range.end > range.start, "{position:?}");
        previous = range.end;
    }
}

/// A set that was read fits when it is written again, unless it came as more ranges than this build would write.
fn survives_its_codec(sequence: u64, found: &Position) {
    let mut normal = found.clone();
    normal.normalise();
    if normal != *found {
        return;
    }
    let mut slot = vec![0; SLOT_BYTES];
    position::encode_slot(&mut slot, INCARNATION, sequence, found.frontier, &found.acked);
    let again = position::decode_slot(&slot, INCARNATION).expect("what was encoded decodes");
    assert_eq!((again.sequence, &again.position), (sequence, found));
}
