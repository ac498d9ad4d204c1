//! One frame: the unit of writing, checking and compressing (storage S19). Pure: bytes and numbers only.
//!
//! ```text
//! magic u32 | head crc u32 | payload crc u32 | codec u8, version u8, reserved u16
//! records u32 | offsets since the commit's first u32 | decoded bytes u32 | stored bytes u32
//! base offset u64 | commit time u64
//! payload, stored bytes long | zeros up to the next multiple of 16
//! ```
//!
//! Little-endian. The head CRC covers every field behind it, the payload's CRC among them, and is seeded with the
//! segment's generation: zeros, a recycled block, and a frame of another segment never parse (S20, S60). Having a CRC
//! of its own, a head can be trusted before its payload was read, so that damage cannot make a scan read far.
//!
//! The decoded payload is a table of `(end of body u32, key bytes u32)` per record, then the bodies, each a key
//! directly followed by its payload. The table is the record envelope of S23; the commit time stands once in the
//! head, because all records of a frame are stamped by the same commit (S24).

use crate::io::Slice;
use crate::le::{get_u32, get_u64};
use crate::peer::Record;

pub const HEAD_BYTES: usize = 48;
/// Frames start on multiples of this, so a resync scan looks at one place in sixteen.
pub const FRAME_ALIGNMENT: usize = 16;
/// Envelope of one record.
pub const ENVELOPE_BYTES: usize = 8;
/// What a frame holds at most, unless a single record is larger: small enough to be checked or compressed well under a
/// millisecond, and to be read whole for a single record.
pub const FRAME_BYTES: usize = 256 << 10;
/// Bound on what a compressed frame may claim to expand to (S21).
pub const DECODED_BYTES_MAX: usize = 64 << 20;

const MAGIC: u32 = u32::from_le_bytes([0xf7, b'N', 0xb5, 0x1e]);
const VERSION: u8 = 1;
/// What every frame starts with.
pub const MAGIC_BYTES: [u8; 4] = MAGIC.to_le_bytes();

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameCodec {
    None,
    Zstd,
}

/// Everything a frame says about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHead {
    pub codec: FrameCodec,
    pub records: u32,
    pub base_offset: u64,
    /// First offset of the commit that wrote the frame: the mark of E8. At most `base_offset`.
    pub commit_first: u64,
    /// Commit time of all its records, ms since the epoch.
    pub time_ms: u64,
    pub decoded_bytes: u32,
    pub stored_bytes: u32,
    pub payload_crc: u32,
}

fn head_crc(head: &[u8], generation: u64) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&generation.to_le_bytes()), &head[8..HEAD_BYTES])
}

/// Makes of a frame what a newer release would have written.
#[cfg(test)]
pub fn make_newer(frame: &mut [u8], generation: u64) {
    frame[13] = VERSION + 1;
    sign_head(frame, generation);
}

/// Writes the checksum that belongs to a head into it, whatever it says: so that a fuzzer gets past it.
pub(super) fn sign_head(head: &mut [u8], generation: u64) {
    let crc = head_crc(head, generation);
    head[4..8].copy_from_slice(&crc.to_le_bytes());
}

impl FrameHead {
    /// Writes the head. `commit_first` must not lie more than `u32::MAX` below `base_offset`.
    pub fn encode(&self, generation: u64, out: &mut [u8]) {
        let since = self.base_offset - self.commit_first;
        debug_assert!(since <= u64::from(u32::MAX) && self.records > 0);
        out[0..4].copy_from_slice(&MAGIC_BYTES);
        out[8..12].copy_from_slice(&self.payload_crc.to_le_bytes());
        out[12..16].copy_from_slice(&[matches!(self.codec, FrameCodec::Zstd) as u8, VERSION, 0, 0]);
        out[16..20].copy_from_slice(&self.records.to_le_bytes());
        out[20..24].copy_from_slice(&(since as u32).to_le_bytes());
        out[24..28].copy_from_slice(&self.decoded_bytes.to_le_bytes());
        out[28..32].copy_from_slice(&self.stored_bytes.to_le_bytes());
        out[32..40].copy_from_slice(&self.base_offset.to_le_bytes());
        out[40..48].copy_from_slice(&self.time_ms.to_le_bytes());
        sign_head(out, generation);
    }

    /// Reads a head that lies `room` bytes before the end of its segment. `None` for anything that a writer of this
    /// generation could not have written there.
    pub fn decode(bytes: &[u8], generation: u64, room: u64) -> Option<FrameHead> {
        if bytes.len() < HEAD_BYTES || bytes[0..4] != MAGIC_BYTES || get_u32(bytes, 4) != head_crc(bytes, generation) {
            return None;
        }
        let codec = match (bytes[12], bytes[13]) {
            (0, VERSION) => FrameCodec::None,
            (1, VERSION) => FrameCodec::Zstd,
            _ => return None,
        };
        let base_offset = get_u64(bytes, 32);
        let head = FrameHead {
            codec,
            records: get_u32(bytes, 16),
            base_offset,
            commit_first: base_offset.checked_sub(u64::from(get_u32(bytes, 20)))?,
            time_ms: get_u64(bytes, 40),
            decoded_bytes: get_u32(bytes, 24),
            stored_bytes: get_u32(bytes, 28),
            payload_crc: get_u32(bytes, 8),
        };
        let decoded = u64::from(head.decoded_bytes);
        let fits = head.stored_bytes as u64 + HEAD_BYTES as u64 <= room;
        let expands = match codec {
            FrameCodec::None => head.decoded_bytes == head.stored_bytes,
            FrameCodec::Zstd => decoded <= DECODED_BYTES_MAX as u64,
        };
        let table = u64::from(head.records) * ENVELOPE_BYTES as u64;
        let counts = head.records > 0 && table <= decoded && base_offset.checked_add(table).is_some();
        (fits && expands && counts).then_some(head)
    }

    /// Whether a head of this generation lies here that only a newer release can read (lesson N58).
    pub fn is_newer(bytes: &[u8], generation: u64) -> bool {
        bytes.len() >= HEAD_BYTES
            && bytes[0..4] == MAGIC_BYTES
            && get_u32(bytes, 4) == head_crc(bytes, generation)
            && !matches!((bytes[12], bytes[13]), (0 | 1, VERSION))
    }

    /// Length on disk without the padding: what must be read to check the frame.
    pub fn checked_bytes(&self) -> usize {
        HEAD_BYTES + self.stored_bytes as usize
    }

    /// Length on disk, padding included.
    pub fn total_bytes(&self) -> usize {
        self.checked_bytes().next_multiple_of(FRAME_ALIGNMENT)
    }

    /// First offset behind the frame.
    pub fn next_offset(&self) -> u64 {
        self.base_offset + u64::from(self.records)
    }

    /// Whether the stored payload is the one that the head was written for.
    pub fn payload_matches(&self, stored: &[u8]) -> bool {
        stored.len() == self.stored_bytes as usize && crc32c::crc32c(stored) == self.payload_crc
    }
}

/// How many records go into a frame, and how long its payload is before compression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FramePlan {
    pub records: u32,
    pub decoded_bytes: usize,
}

impl FramePlan {
    /// Length on disk if it is stored uncompressed, which is also its largest.
    pub fn total_bytes(&self) -> usize {
        (HEAD_BYTES + self.decoded_bytes).next_multiple_of(FRAME_ALIGNMENT)
    }
}

/// Divides a run of records into frames, at record borders (S19): a frame is closed before the record that would carry
/// it past `frame_bytes`.
pub fn plan<'a>(records: impl Iterator<Item = &'a Record>, frame_bytes: usize) -> Vec<FramePlan> {
    let mut frames = Vec::new();
    let mut open = FramePlan { records: 0, decoded_bytes: 0 };
    for record in records {
        let bytes = ENVELOPE_BYTES + record.body.len();
        if open.records > 0 && open.decoded_bytes + bytes > frame_bytes {
            frames.push(open);
            open = FramePlan { records: 0, decoded_bytes: 0 };
        }
        open.records += 1;
        open.decoded_bytes += bytes;
    }
    if open.records > 0 {
        frames.push(open);
    }
    frames
}

/// An upper bound of what `plan` would need on disk for so many records with so many key and payload bytes.
pub fn stored_bytes_max(records: u64, body_bytes: u64, frame_bytes: usize) -> u64 {
    let decoded = records * ENVELOPE_BYTES as u64 + body_bytes;
    // Two neighbouring frames together exceed the bound, so there are at most twice as many as full ones.
    let frames = (2 * decoded / frame_bytes as u64 + 1).min(records.max(1));
    decoded + frames * (HEAD_BYTES + FRAME_ALIGNMENT) as u64
}

/// Writes the decoded payload of one frame: takes exactly `plan.records` records, fills `out`, whose length is
/// `plan.decoded_bytes`.
pub fn encode_payload<'a>(plan: &FramePlan, records: &mut impl Iterator<Item = &'a Record>, out: &mut [u8]) {
    let (table, mut bodies) = out.split_at_mut(plan.records as usize * ENVELOPE_BYTES);
    let mut end = 0u32;
    for (entry, record) in table.chunks_exact_mut(ENVELOPE_BYTES).zip(records) {
        let (body, rest) = std::mem::take(&mut bodies).split_at_mut(record.body.len());
        body.copy_from_slice(&record.body);
        bodies = rest;
        end += record.body.len() as u32;
        entry[0..4].copy_from_slice(&end.to_le_bytes());
        entry[4..8].copy_from_slice(&record.key_bytes.to_le_bytes());
    }
    debug_assert!(bodies.is_empty(), "a plan is made from the same records");
}

/// A decoded payload whose table was checked: every record in it can be handed out without another look.
#[derive(Clone, Debug)]
pub struct Payload {
    bytes: Slice,
    records: u32,
}

impl Payload {
    /// Checks the table of `records` entries at the front of `bytes`. `None` when it does not describe `bytes`.
    pub fn parse(bytes: Slice, records: u32) -> Option<Payload> {
        let table_bytes = records as usize * ENVELOPE_BYTES;
        let bodies_bytes = bytes.len().checked_sub(table_bytes)?;
        let mut start = 0u32;
        for entry in bytes[..table_bytes].chunks_exact(ENVELOPE_BYTES) {
            let (end, key) = (get_u32(entry, 0), get_u32(entry, 4));
            if key > end.checked_sub(start)? {
                return None;
            }
            start = end;
        }
        (start as usize == bodies_bytes).then_some(Payload { bytes, records })
    }

    pub fn records(&self) -> u32 {
        self.records
    }

    pub fn bytes(&self) -> &Slice {
        &self.bytes
    }

    /// Body (key, then payload) and key length of record `index`, which must be below `records`.
    pub fn record(&self, index: u32) -> (Slice, u32) {
        assert!(index < self.records, "record {index} of {}", self.records);
        let table_bytes = self.records as usize * ENVELOPE_BYTES;
        let at = index as usize * ENVELOPE_BYTES;
        let start = if index == 0 { 0 } else { get_u32(&self.bytes, at - ENVELOPE_BYTES) as usize };
        let end = get_u32(&self.bytes, at) as usize;
        (self.bytes.slice(table_bytes + start..table_bytes + end), get_u32(&self.bytes, at + 4))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    pub fn record(key: &str, payload: &str) -> Record {
        Record { body: Slice::copy_from(format!("{key}{payload}").as_bytes()), key_bytes: key.len() as u32 }
    }

    fn frame(records: &[Record], base_offset: u64, generation: u64) -> Vec<u8> {
        let plans = plan(records.iter(), FRAME_BYTES);
        assert_eq!(plans.len(), 1);
        let mut bytes = vec![0; plans[0].total_bytes()];
        let (head_bytes, rest) = bytes.split_at_mut(HEAD_BYTES);
        let stored = &mut rest[..plans[0].decoded_bytes];
        encode_payload(&plans[0], &mut records.iter(), stored);
        let head = FrameHead {
            codec: FrameCodec::None,
            records: plans[0].records,
            base_offset,
            commit_first: base_offset,
            time_ms: 1234,
            decoded_bytes: stored.len() as u32,
            stored_bytes: stored.len() as u32,
            payload_crc: crc32c::crc32c(stored),
        };
        head.encode(generation, head_bytes);
        bytes
    }

    #[test]
    fn s23_key_and_payload_come_back_contiguous() {
        let records = [record("k1", "hello"), record("", "no key"), record("only-key", ""), record("", "")];
        let bytes = frame(&records, 7, 99);
        let head = FrameHead::decode(&bytes, 99, bytes.len() as u64).expect("just encoded");
        assert_eq!((head.base_offset, head.next_offset(), head.time_ms), (7, 11, 1234));
        let stored = Slice::copy_from(&bytes[HEAD_BYTES..head.checked_bytes()]);
        assert!(head.payload_matches(&stored));
        let payload = Payload::parse(stored, head.records).expect("just encoded");
        for (index, expected) in records.iter().enumerate() {
            let (body, key_bytes) = payload.record(index as u32);
            assert_eq!((&body[..], key_bytes), (&expected.body[..], expected.key_bytes));
        }
    }

    #[test]
    fn lesson_d9_zeros_and_another_generation_never_parse() {
        assert_eq!(FrameHead::decode(&[0; 4096], 0, 4096), None);
        let bytes = frame(&[record("k", "v")], 7, 99);
        assert_eq!(FrameHead::decode(&bytes, 98, bytes.len() as u64), None);
        assert!(FrameHead::decode(&bytes, 99, bytes.len() as u64).is_some());
    }

    #[test]
    fn s21_a_length_beyond_the_segment_is_refused() {
        let bytes = frame(&[record("k", "value of some length")], 7, 99);
        let checked = FrameHead::decode(&bytes, 99, 4096).expect("fits").checked_bytes() as u64;
        assert!(FrameHead::decode(&bytes, 99, checked).is_some());
        assert_eq!(FrameHead::decode(&bytes, 99, checked - 1), None);
    }

    #[test]
    fn s19_a_run_is_divided_at_record_borders() {
        let big = Record { body: Slice::copy_from(&vec![1; 200 << 10]), key_bytes: 0 };
        let plans = plan([&big, &big, &big].into_iter(), FRAME_BYTES);
        assert_eq!(plans.iter().map(|p| p.records).collect::<Vec<_>>(), [1, 1, 1]);
        let small = record("", "x");
        let many: Vec<Record> = (0..100_000).map(|_| small.clone()).collect();
        let plans = plan(many.iter(), FRAME_BYTES);
        assert_eq!(plans.iter().map(|p| u64::from(p.records)).sum::<u64>(), 100_000);
        assert!(plans.iter().all(|p| p.decoded_bytes <= FRAME_BYTES));
    }

    #[test]
    fn s20_every_bit_of_a_frame_is_covered() {
        let bytes = frame(&[record("key", "payload")], 42, 5);
        let whole = FrameHead::decode(&bytes, 5, 4096).expect("just encoded");
        for bit in 0..whole.checked_bytes() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let accepted = FrameHead::decode(&damaged, 5, 4096)
                .is_some_and(|head| head.payload_matches(&damaged[HEAD_BYTES..whole.checked_bytes()]));
            assert!(!accepted, "bit {bit} may flip unseen");
        }
    }

    proptest! {
        #[test]
        fn s59_arbitrary_bytes_are_refused_without_a_panic(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..300),
            records in any::<u32>(),
            seal in any::<bool>(),
            generation in any::<u64>(),
        ) {
            if seal && bytes.len() >= HEAD_BYTES {
                // A head that passes its own check, with fields that no writer would choose.
                bytes[0..4].copy_from_slice(&MAGIC_BYTES);
                let crc = head_crc(&bytes, generation);
                bytes[4..8].copy_from_slice(&crc.to_le_bytes());
            }
            if let Some(head) = FrameHead::decode(&bytes, generation, bytes.len() as u64) {
                prop_assert!(head.checked_bytes() <= bytes.len());
                prop_assert!(head.commit_first <= head.base_offset && head.next_offset() > head.base_offset);
                prop_assert!(head.decoded_bytes as usize <= DECODED_BYTES_MAX.max(bytes.len()));
            }
            if let Some(payload) = Payload::parse(Slice::copy_from(&bytes), records % 40) {
                for index in 0..payload.records() {
                    let (body, key_bytes) = payload.record(index);
                    prop_assert!(key_bytes as usize <= body.len());
                }
            }
        }

        #[test]
        fn the_bound_of_the_combiner_holds(sizes in proptest::collection::vec(0usize..300_000, 1..40)) {
            let body = Slice::copy_from(&vec![0; 300_000]);
            let records: Vec<Record> =
                sizes.iter().map(|s| Record { body: body.slice(0..*s), key_bytes: 0 }).collect();
            let exact: u64 = plan(records.iter(), FRAME_BYTES).iter().map(|p| p.total_bytes() as u64).sum();
            let bound = stored_bytes_max(records.len() as u64, sizes.iter().map(|s| *s as u64).sum(), FRAME_BYTES);
            prop_assert!(exact <= bound, "{exact} > {bound}");
        }
    }
}
