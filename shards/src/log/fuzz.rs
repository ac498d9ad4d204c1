//! What fuzzers feed: bytes as a disk may hold them, judged by the same pure parts that an open and a read use.

use super::directory::{parse_partition_name, parse_stale_name, Mark};
use super::frame::{self, FrameCodec, FrameHead, Payload, HEAD_BYTES, MAGIC_BYTES};
use super::hwm;
use super::read::expand;
use super::recovery::{Progress, Recovery, Verdict};
use super::segment::{self, SegmentHeader, DATA_START};
use crate::io::{Slice, ALIGNMENT};
use crate::peer::Record;

const GENERATION: u64 = 7;
/// First offset of every segment under test.
const BASE: u64 = 100;

/// A segment file: one byte of options (1: give every frame valid checksums first), one of offsets known to be synced
/// above the base, block 0, the rest.
pub(crate) fn segment(data: &[u8]) {
    let [options, known, file @ ..] = data else { return };
    let mut file = file.to_vec();
    file.resize(file.len().next_multiple_of(ALIGNMENT).max(2 * ALIGNMENT), 0);
    if let Some(header) = SegmentHeader::decode(&file[..ALIGNMENT]) {
        let mut block = vec![0; ALIGNMENT];
        header.encode(&mut block).expect("what was decoded encodes");
        assert_eq!(SegmentHeader::decode(&block), Some(header));
    }
    if options & 1 != 0 {
        for at in (DATA_START as usize..file.len() - HEAD_BYTES).step_by(frame::FRAME_ALIGNMENT) {
            sign(&mut file[at..]);
        }
    }
    let known_synced = if *known == 0 { 0 } else { BASE + u64::from(*known) };
    let verdict = recover(&file, known_synced, file.len());
    assert_eq!(recover(&file, known_synced, ALIGNMENT), verdict, "the verdict does not depend on the windows");
    check(&verdict, known_synced, file.len() as u64);

    // The cut is made, the node dies, and the next open looks at what is left.
    if let Some((from, until)) = verdict.cut {
        assert_eq!(from, verdict.data_end);
        file[from as usize..until as usize].fill(0);
    }
    let noted = if verdict.proof_cut && known_synced == 0 { verdict.next_offset } else { known_synced };
    let again = recover(&file, noted, file.len());
    assert_eq!(again.cut, None, "S37: what was cut is never found again");
    if !verdict.proof_cut || known_synced == 0 {
        assert_eq!((again.next_offset, again.data_end), (verdict.next_offset, verdict.data_end));
        assert_eq!(again.gaps, verdict.gaps);
    }
}

fn check(verdict: &Verdict, known_synced: u64, end: u64) {
    assert!(verdict.next_offset >= BASE && (DATA_START..=end).contains(&verdict.data_end));
    assert!(verdict.cut.is_none_or(|(from, until)| from < until && until <= end));
    let ends = verdict.gaps.windows(2).map(|pair| (pair[0].1, pair[1].0));
    assert!(ends.into_iter().all(|(end, start)| end <= start), "gaps are disjoint and ascend");
    assert!(verdict.gaps.iter().all(|(start, end)| start < end && *end <= verdict.next_offset));
    assert_eq!(verdict.lost_tail.is_some(), verdict.next_offset < known_synced);
}

fn recover(file: &[u8], known_synced: u64, window_bytes: usize) -> Verdict {
    let mut recovery = Recovery::new(GENERATION, BASE, file.len() as u64, known_synced);
    let (mut at, mut window) = (0, &file[..0]);
    loop {
        match recovery.step(at, window) {
            Progress::Done(verdict) => return verdict,
            Progress::Need { from, bytes } => {
                at = from / ALIGNMENT as u64 * ALIGNMENT as u64;
                let until = (from as usize + bytes).max(at as usize + window_bytes).min(file.len());
                window = &file[at as usize..until];
            }
        }
    }
}

/// Gives what looks like a frame the checksums that belong to it.
fn sign(bytes: &mut [u8]) {
    if bytes.len() < HEAD_BYTES || bytes[..4] != MAGIC_BYTES {
        return;
    }
    let stored_bytes = u32::from_le_bytes([bytes[28], bytes[29], bytes[30], bytes[31]]) as usize;
    if let Some(stored) = bytes[HEAD_BYTES..].get(..stored_bytes) {
        let crc = crc32c::crc32c(stored).to_le_bytes();
        bytes[8..12].copy_from_slice(&crc);
    }
    frame::sign_head(bytes, GENERATION);
}

/// One frame: raw, and with valid checksums; everything that a read takes out of it. Then one made of the bytes.
pub(crate) fn frame(data: &[u8]) {
    let mut raw = data.to_vec();
    for _ in 0..2 {
        let head = FrameHead::decode(&raw, GENERATION, raw.len() as u64);
        let whole = head.filter(|head| head.payload_matches(&raw[HEAD_BYTES..head.checked_bytes()]));
        if let Some(head) = whole {
            let stored = Slice::copy_from(&raw[HEAD_BYTES..head.checked_bytes()]);
            let decoded = match head.codec {
                FrameCodec::None => Some(stored),
                FrameCodec::Zstd => expand(&stored, head.decoded_bytes as usize),
            };
            if let Some(payload) = decoded.and_then(|decoded| Payload::parse(decoded, head.records)) {
                records_lie_inside(&payload);
            }
        }
        sign(&mut raw);
    }
    let records: Vec<Record> = data
        .chunks(1 + data.len() / 3)
        .map(|chunk| Record { body: Slice::copy_from(chunk), key_bytes: u32::from(chunk[0]).min(chunk.len() as u32) })
        .collect();
    let mut rest = records.iter();
    let mut found = Vec::new();
    for plan in frame::plan(records.iter(), 64) {
        let mut out = vec![0xee; plan.decoded_bytes];
        frame::encode_payload(&plan, &mut rest, &mut out);
        let payload = Payload::parse(Slice::copy_from(&out), plan.records).expect("what was encoded parses");
        found.extend((0..payload.records()).map(|index| payload.record(index)));
    }
    let meant = records.iter().map(|record| (record.body.to_vec(), record.key_bytes));
    assert!(meant.eq(found.iter().map(|(body, key_bytes)| (body.to_vec(), *key_bytes))));
}

fn records_lie_inside(payload: &Payload) {
    let bodies: usize = (0..payload.records())
        .map(|index| {
            let (body, key_bytes) = payload.record(index);
            assert!(key_bytes as usize <= body.len());
            body.len()
        })
        .sum();
    assert_eq!(bodies + payload.records() as usize * frame::ENVELOPE_BYTES, payload.bytes().len());
}

/// The boundary file.
pub(crate) fn boundary(data: &[u8]) {
    if let Some(boundary) = hwm::decode(data) {
        assert_eq!(hwm::encode(boundary).map(|bytes| bytes.to_vec()), Some(data.to_vec()));
    }
    let mut word = [0; 8];
    word.iter_mut().zip(data).for_each(|(to, from)| *to = *from);
    let offset = u64::from_le_bytes(word);
    assert_eq!(hwm::encode(offset).and_then(|bytes| hwm::decode(&bytes)), (offset >> 48 == 0).then_some(offset));
}

/// The incarnation marker, and the names of files and directories that mean something.
pub(crate) fn names(data: &[u8]) {
    if let Some(mark) = Mark::decode(data) {
        let written = if mark.checked { Mark::encode(mark.id) } else { format!("{}\n", mark.id) };
        assert_eq!(written.as_bytes(), data);
    }
    let name = String::from_utf8_lossy(data);
    if let Some((topic, incarnation)) = parse_stale_name(&name) {
        assert_eq!(format!("{topic}.stale-{incarnation}"), name);
    }
    if let Some(partition) = parse_partition_name(&name) {
        assert_eq!(format!("p{partition:05}"), name);
    }
    if let Some(base) = segment::parse_file_name(&name) {
        assert_eq!(segment::file_name(base), name);
    }
}
