//! What fuzzers feed: bytes as a peer may send them.

use narad_shards::wire::{FRAME_BYTES_MAX, HEADER_BYTES};

use super::frames::{Arrived, FrameReader};
use super::greeting;
use super::intake::Room;

/// One stream of frames, in pieces whose length the first byte chooses.
pub(crate) fn frames(data: &[u8]) {
    let Some((step, mut bytes)) = data.split_first() else { return };
    let mut reader = FrameReader::default();
    while !bytes.is_empty() {
        let space = reader.space();
        assert!(!space.is_empty() && space.len() <= FRAME_BYTES_MAX, "there is always room for more");
        let count = space.len().min(usize::from(*step) + 1).min(bytes.len());
        space[..count].copy_from_slice(&bytes[..count]);
        bytes = &bytes[count..];
        // There is no room for some.
        match reader.advance(count, |bytes| (bytes % 7 != 6).then(Room::default)) {
            Ok(Some(Arrived::Refused(header))) => assert_eq!(header.body_bytes() % 7, 6),
            Ok(Some(Arrived::Frame(frame))) => {
                let whole = HEADER_BYTES + frame.archive().len() + frame.payload().len();
                assert_eq!(whole, frame.header.length as usize);
            }
            Ok(None) => {}
            Err(_) => return,
        }
    }
}

/// A hello: what decodes goes out and comes back the same, but for lists and names that are cut.
pub(crate) fn hello(data: &[u8]) {
    if let Some(hello) = greeting::decode(data) {
        let again = greeting::decode(&greeting::encode(&hello)[4..]);
        assert!(again.is_some_and(|again| again.boot_id == hello.boot_id && again.shard == hello.shard));
    }
}
