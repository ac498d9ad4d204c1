//! What fuzzers feed: bytes as a disk may hold them, judged by the same pure parts that a start uses.

use super::checkpoint::{self, Checkpoint};
use super::frame::{self, Head, BLOCK_BYTES, CHUNK_BYTES, FRAME_ALIGNMENT, HEAD_BYTES};
use super::header::Header;
use super::recovery::{Corruption, Depth, Scan, Step, Tail, Walk, Window};
use super::NewWalRecord;
use crate::meta::Incarnation;

const GENERATION: u64 = 7;
const STORE_ID: u64 = 0x5708_e1d0;
const DIR_NUMBER: u32 = 2;
/// First sequence number of every segment under test.
const FIRST_SEQ: u64 = 100;

/// A segment file: one byte of options (1: give every frame valid checksums first, 2: prepared), block 0, the rest.
pub(crate) fn segment(data: &[u8]) {
    let Some((options, file)) = data.split_first() else { return };
    let mut file = file.to_vec();
    file.resize(file.len().next_multiple_of(BLOCK_BYTES as usize).max(2 * BLOCK_BYTES as usize), 0);
    if let Ok(header) = Header::decode(&file[..BLOCK_BYTES as usize]) {
        assert_eq!(Header::decode(&header.encode()), Ok(header), "a header survives its codec");
    }
    if options & 1 != 0 {
        sign_frames(&mut file[BLOCK_BYTES as usize..]);
    }
    let prepared = options & 2 != 0;
    let found = recover(&file, prepared, file.len());
    // Two blocks: a head may begin in one and end in the next.
    assert_eq!(recover(&file, prepared, 2 * BLOCK_BYTES as usize), found, "the verdict does not depend on the windows");
    let Found::Tail(tail) = found else { return };
    assert!(tail.next_seq >= FIRST_SEQ && tail.cut <= tail.erase_to && tail.erase_to <= file.len() as u64);
    file[tail.cut as usize..tail.erase_to as usize].fill(0);
    let again = recover(&file, prepared, file.len());
    assert_eq!(
        again,
        Found::Tail(Tail { erase_to: tail.cut, heads_behind: 0, ..tail }),
        "E5: what was cut never comes back"
    );
}

#[derive(Debug, PartialEq, Eq)]
enum Found {
    Tail(Tail),
    Corrupt(Corruption),
    UnknownFormat(u64),
}

/// What `open` does with the last segment, in windows of at least `window_bytes`.
fn recover(file: &[u8], prepared: bool, window_bytes: usize) -> Found {
    let window = |at: u64, bytes: usize| {
        let base = at / BLOCK_BYTES * BLOCK_BYTES;
        let rest = &file[(base as usize).min(file.len())..];
        Window { base, bytes: &rest[..rest.len().min(bytes)] }
    };
    let mut walk = Walk::new(GENERATION, file.len() as u64, BLOCK_BYTES, FIRST_SEQ);
    let mut piece = window(walk.at, window_bytes);
    loop {
        match walk.step(piece, Depth::Whole) {
            Step::Frame { offset, head } => look_at(&head, &file[offset as usize..]),
            Step::More => {
                let next = window(walk.at, window_bytes);
                let stuck = next.base == piece.base && next.bytes.len() == piece.bytes.len();
                piece = if stuck { window(walk.at, 2 * CHUNK_BYTES) } else { next };
            }
            Step::Stop => break,
            Step::UnknownFormat { offset, .. } => return Found::UnknownFormat(offset),
        }
    }
    let mut scan = Scan::new(&walk, prepared);
    loop {
        match scan.step(window(scan.at, window_bytes)) {
            Ok(None) => {}
            Ok(Some(tail)) => return Found::Tail(tail),
            Err(damage) => return Found::Corrupt(damage),
        }
    }
}

/// The parts of a record that recovery has let pass lie inside its frame.
fn look_at(head: &Head, frame: &[u8]) {
    let body = &frame[head.key_from()..head.length as usize];
    let _ = (&body[..head.key_bytes as usize], std::str::from_utf8(&frame[HEAD_BYTES..head.key_from()]));
}

fn sign_frames(bytes: &mut [u8]) {
    let seed = frame::generation_seed(GENERATION);
    for at in (0..bytes.len().saturating_sub(HEAD_BYTES)).step_by(FRAME_ALIGNMENT) {
        frame::sign(&mut bytes[at..], seed);
    }
}

/// A record's frame: raw, with valid checksums, and one made of the bytes as key and payload.
pub(crate) fn record(data: &[u8]) {
    let seed = frame::generation_seed(GENERATION);
    let mut raw = data.to_vec();
    raw.resize(raw.len().max(HEAD_BYTES), 0);
    for _ in 0..2 {
        if let Ok(head) = Head::decode(seed, &raw) {
            if head.length as usize <= raw.len() && head.body_matches(seed, &raw) {
                look_at(&head, &raw);
            }
        }
        frame::sign(&mut raw, seed);
    }
    let (key, payload) = data.split_at(data.first().map_or(0, |first| usize::from(*first).min(data.len())));
    let incarnation = Incarnation(u64::MAX - data.len() as u64);
    let record = NewWalRecord { topic: "orders", incarnation, key, partition: 3, accepted_at_ms: 5, payload };
    let Some(bytes) = frame::padded_bytes(&record) else { return };
    let mut encoded = vec![0xee; bytes];
    frame::encode(&mut encoded, seed, FIRST_SEQ, &record);
    frame::seal(&mut encoded, seed, FIRST_SEQ);
    let head = Head::decode(seed, &encoded).expect("what was encoded decodes");
    assert!(head.body_matches(seed, &encoded));
    assert_eq!((head.seq, head.incarnation(), head.partition), (FIRST_SEQ, Some(incarnation), 3));
    let (found_key, found_payload) = encoded[head.key_from()..head.length as usize].split_at(head.key_bytes as usize);
    assert_eq!((found_key, found_payload), (key, payload));
}

/// A checkpoint file, and what its value would mean beside segments that begin and end anywhere.
pub(crate) fn checkpoint(data: &[u8]) {
    let mut record = data.to_vec();
    for _ in 0..2 {
        if let Ok(found) = Checkpoint::decode(&record, STORE_ID, DIR_NUMBER) {
            assert_eq!(Checkpoint::decode(&found.encode(), STORE_ID, DIR_NUMBER), Ok(found));
            let (oldest, end) = (u64::from(data[0]), u64::from(data[0]) + u64::from(data[1]));
            let start = checkpoint::start(Some(found.seq), oldest, end);
            assert!(start.dispatch_from >= oldest && start.dispatch_from <= start.next_seq);
            assert!(start.next_seq >= end && start.next_seq >= found.seq, "E4: no number is given out twice");
        }
        Checkpoint::sign(&mut record, STORE_ID, DIR_NUMBER);
    }
}
