//! Bytes of one record in a WAL segment: the frame. Hand-packed little-endian; no archive, so that a payload can lie
//! in place behind its head and be lent out as it is.
//!
//! ```text
//!  0 magic        u32    16 seq            u64    48 incarnation  u64, 0 in format 1
//!  4 head crc     u32    24 group mark     u64    56 body crc     u32
//!  8 length       u32    32 accepted at    u64    60 reserved     u32, 0
//! 12 format       u8     40 partition      u32    64 topic, key, payload
//! 13 flags        u8, 0  44 key bytes      u32
//! 14 topic bytes  u16
//! ```
//!
//! Both checksums are CRC-32C seeded with the segment's generation: zeros, and bytes that an earlier life of a
//! recycled segment left behind, never decode (lesson D9). The head has a checksum of its own, because the group
//! mark is known only when the group is submitted, and so that a reader may pass over a record by its head alone.

use crate::le::{get_u16, get_u32, get_u64, put_u32, put_u64};
use crate::meta::Incarnation;

/// Unit of every write, read and group start, in bytes.
pub(crate) const BLOCK_BYTES: u64 = crate::io::ALIGNMENT as u64;
/// Frames start on multiples of this.
pub(crate) const FRAME_ALIGNMENT: usize = 16;
pub(crate) const HEAD_BYTES: usize = 64;
/// A group lies in one chunk of staging memory, hence a frame too.
pub(crate) const CHUNK_BYTES: usize = 2 << 20;
/// Groups in flight span at most this much of a segment: recovery accepts a hole only inside it (lesson N3).
pub(crate) const WRITE_WINDOW_BYTES: u64 = 16 << 20;

const MAGIC: u32 = u32::from_le_bytes(*b"NwFr");
/// Names a topic only. Decoded, never written (E13).
pub(crate) const FORMAT_NAMED: u8 = 1;
/// Carries the incarnation of the topic that the record was accepted under.
pub(crate) const FORMAT_INCARNATION: u8 = 2;

/// A record to append. `topic` is at most 200 bytes by the API's rules; an empty `key` means none.
#[derive(Clone, Copy, Debug)]
pub struct NewWalRecord<'a> {
    pub topic: &'a str,
    pub incarnation: Incarnation,
    pub key: &'a [u8],
    pub partition: u32,
    /// Wall clock at accept, ms since the epoch.
    pub accepted_at_ms: u64,
    pub payload: &'a [u8],
}

/// A frame's head, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    /// Bytes from the frame's start to the payload's end.
    pub length: u32,
    pub format: u8,
    pub topic_bytes: u16,
    pub seq: u64,
    /// First sequence number that was not durable when this frame's group was submitted (E8).
    pub group_mark: u64,
    pub accepted_at_ms: u64,
    pub partition: u32,
    pub key_bytes: u32,
    pub incarnation: u64,
    pub body_crc: u32,
}

/// Why bytes are not a frame's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeadFault {
    /// No magic, a wrong checksum, or impossible lengths.
    Invalid,
    /// The head verifies, but a newer release wrote it (lesson N58).
    UnknownFormat { format: u8, seq: u64, group_mark: u64, length: u32 },
}

/// Initial state of both checksums of every frame in a segment of this generation.
pub(crate) fn generation_seed(generation: u64) -> u32 {
    crc32c::crc32c(&generation.to_le_bytes())
}

pub(crate) fn round_up_to_block(bytes: u64) -> u64 {
    bytes.next_multiple_of(BLOCK_BYTES)
}

/// Bytes that a record takes in a group, its padding included; `None` when a length does not fit its field or the
/// frame no chunk.
pub(crate) fn padded_bytes(record: &NewWalRecord<'_>) -> Option<usize> {
    let topic = usize::from(u16::try_from(record.topic.len()).ok()?);
    let length = HEAD_BYTES.checked_add(topic)?.checked_add(record.key.len())?.checked_add(record.payload.len())?;
    let padded = length.checked_next_multiple_of(FRAME_ALIGNMENT)?;
    (padded <= CHUNK_BYTES).then_some(padded)
}

/// Writes `record` into `frame`, which is exactly [`padded_bytes`] long, all but what [`seal`] adds.
pub(crate) fn encode(frame: &mut [u8], seed: u32, seq: u64, record: &NewWalRecord<'_>) {
    let topic_end = HEAD_BYTES + record.topic.len();
    let key_end = topic_end + record.key.len();
    let length = key_end + record.payload.len();
    assert_eq!(frame.len(), length.next_multiple_of(FRAME_ALIGNMENT), "the frame was measured before");
    frame[HEAD_BYTES..topic_end].copy_from_slice(record.topic.as_bytes());
    frame[topic_end..key_end].copy_from_slice(record.key);
    frame[key_end..length].copy_from_slice(record.payload);
    frame[length..].fill(0);
    let body_crc = crc32c::crc32c_append(seed, &frame[HEAD_BYTES..length]);
    let head = Head {
        length: length as u32,
        format: FORMAT_INCARNATION,
        topic_bytes: record.topic.len() as u16,
        seq,
        group_mark: 0,
        accepted_at_ms: record.accepted_at_ms,
        partition: record.partition,
        key_bytes: record.key.len() as u32,
        incarnation: record.incarnation.0,
        body_crc,
    };
    head.write(frame);
}

/// Completes every frame of a group when it is submitted: group mark and head checksum.
pub(crate) fn seal(group: &mut [u8], seed: u32, group_mark: u64) {
    let mut at = 0;
    while at < group.len() {
        let frame = &mut group[at..];
        put_u64(frame, 24, group_mark);
        let crc = head_crc(seed, frame);
        put_u32(frame, 4, crc);
        at += Head::parse(frame).padded();
    }
}

/// Gives the frame at the front of `bytes`, if it looks like one, the checksums that belong to it: so that a fuzzer gets
/// past them.
pub(super) fn sign(bytes: &mut [u8], seed: u32) {
    if bytes.len() < HEAD_BYTES || get_u32(bytes, 0) != MAGIC {
        return;
    }
    if let Some(body) = bytes.get(HEAD_BYTES..get_u32(bytes, 8) as usize) {
        let crc = crc32c::crc32c_append(seed, body);
        put_u32(bytes, 56, crc);
    }
    let crc = head_crc(seed, bytes);
    put_u32(bytes, 4, crc);
}

impl Head {
    /// Reads a head that is known to be good: one that this process staged.
    pub fn parse(bytes: &[u8]) -> Head {
        Head {
            length: get_u32(bytes, 8),
            format: bytes[12],
            topic_bytes: get_u16(bytes, 14),
            seq: get_u64(bytes, 16),
            group_mark: get_u64(bytes, 24),
            accepted_at_ms: get_u64(bytes, 32),
            partition: get_u32(bytes, 40),
            key_bytes: get_u32(bytes, 44),
            incarnation: get_u64(bytes, 48),
            body_crc: get_u32(bytes, 56),
        }
    }

    /// Reads and checks a head that comes from a disk. `bytes` is at least [`HEAD_BYTES`] long.
    pub fn decode(seed: u32, bytes: &[u8]) -> Result<Head, HeadFault> {
        if get_u32(bytes, 0) != MAGIC || get_u32(bytes, 4) != head_crc(seed, bytes) {
            return Err(HeadFault::Invalid);
        }
        let head = Head::parse(bytes);
        if head.format != FORMAT_NAMED && head.format != FORMAT_INCARNATION {
            let Head { format, seq, group_mark, length, .. } = head;
            return Err(HeadFault::UnknownFormat { format, seq, group_mark, length });
        }
        let body_from = HEAD_BYTES as u64 + u64::from(head.topic_bytes) + u64::from(head.key_bytes);
        // No record has the last number: there is always a next one.
        if body_from > u64::from(head.length) || head.length as usize > CHUNK_BYTES || head.seq == u64::MAX {
            return Err(HeadFault::Invalid);
        }
        Ok(head)
    }

    /// Whether the body of `frame` is the one that was written.
    pub fn body_matches(&self, seed: u32, frame: &[u8]) -> bool {
        crc32c::crc32c_append(seed, &frame[HEAD_BYTES..self.length as usize]) == self.body_crc
    }

    pub fn padded(&self) -> usize {
        (self.length as usize).next_multiple_of(FRAME_ALIGNMENT)
    }

    /// Where the key starts, in bytes from the frame's start; the payload follows it.
    pub fn key_from(&self) -> usize {
        HEAD_BYTES + usize::from(self.topic_bytes)
    }

    pub fn incarnation(&self) -> Option<Incarnation> {
        (self.format == FORMAT_INCARNATION).then_some(Incarnation(self.incarnation))
    }

    fn write(&self, frame: &mut [u8]) {
        put_u32(frame, 0, MAGIC);
        put_u32(frame, 4, 0);
        put_u32(frame, 8, self.length);
        frame[12] = self.format;
        frame[13] = 0;
        frame[14..16].copy_from_slice(&self.topic_bytes.to_le_bytes());
        put_u64(frame, 16, self.seq);
        put_u64(frame, 24, self.group_mark);
        put_u64(frame, 32, self.accepted_at_ms);
        put_u32(frame, 40, self.partition);
        put_u32(frame, 44, self.key_bytes);
        put_u64(frame, 48, self.incarnation);
        put_u32(frame, 56, self.body_crc);
        put_u32(frame, 60, 0);
    }
}

fn head_crc(seed: u32, frame: &[u8]) -> u32 {
    crc32c::crc32c_append(seed, &frame[8..HEAD_BYTES])
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn record<'a>(key: &'a [u8], payload: &'a [u8]) -> NewWalRecord<'a> {
        let incarnation = Incarnation(0xabcd);
        NewWalRecord { topic: "orders", incarnation, key, partition: 3, accepted_at_ms: 1_700_000_000_123, payload }
    }

    /// One sealed frame, padding included.
    pub(crate) fn sealed(seed: u32, seq: u64, group_mark: u64, record: &NewWalRecord<'_>) -> Vec<u8> {
        let mut frame = vec![0xee; padded_bytes(record).expect("small")];
        encode(&mut frame, seed, seq, record);
        seal(&mut frame, seed, group_mark);
        frame
    }

    /// Turns a sealed frame into what an older (1) or a newer release would have written.
    pub(crate) fn with_format(mut frame: Vec<u8>, seed: u32, format: u8) -> Vec<u8> {
        frame[12] = format;
        if format == FORMAT_NAMED {
            put_u64(&mut frame, 48, 0);
        }
        let crc = head_crc(seed, &frame);
        put_u32(&mut frame, 4, crc);
        frame
    }

    #[test]
    fn e13_both_formats_come_back_as_written() {
        let seed = generation_seed(7);
        let frame = sealed(seed, 42, 40, &record(b"k1", b"payload"));
        assert_eq!(frame.len() % FRAME_ALIGNMENT, 0);
        let head = Head::decode(seed, &frame).expect("sealed");
        assert_eq!((head.seq, head.group_mark, head.partition, head.key_bytes), (42, 40, 3, 2));
        assert_eq!(head.accepted_at_ms, 1_700_000_000_123);
        assert_eq!(head.incarnation(), Some(Incarnation(0xabcd)));
        assert!(head.body_matches(seed, &frame));
        assert_eq!(&frame[HEAD_BYTES..head.key_from()], b"orders");
        assert_eq!(&frame[head.key_from()..head.length as usize], b"k1payload");

        let named = with_format(frame, seed, FORMAT_NAMED);
        let head = Head::decode(seed, &named).expect("format 1 is still read");
        assert_eq!(head.incarnation(), None);
        assert!(head.body_matches(seed, &named));
    }

    #[test]
    fn lesson_n58_a_newer_format_is_told_from_damage() {
        let seed = generation_seed(7);
        let frame = with_format(sealed(seed, 42, 40, &record(b"", b"x")), seed, 3);
        let fault = Head::decode(seed, &frame).expect_err("format 3");
        assert!(matches!(fault, HeadFault::UnknownFormat { format: 3, seq: 42, .. }), "{fault:?}");
    }

    #[test]
    fn lesson_d9_zeros_and_other_generations_never_decode() {
        assert_eq!(Head::decode(generation_seed(0), &[0; HEAD_BYTES]), Err(HeadFault::Invalid));
        let frame = sealed(generation_seed(1), 5, 5, &record(b"k", b"v"));
        assert_eq!(Head::decode(generation_seed(2), &frame), Err(HeadFault::Invalid));
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let seed = generation_seed(9);
        let frame = sealed(seed, 1, 1, &record(b"key", b"some payload"));
        let length = Head::parse(&frame).length as usize;
        for bit in 0..length * 8 {
            let mut damaged = frame.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let good = Head::decode(seed, &damaged).is_ok_and(|head| head.body_matches(seed, &damaged));
            assert!(!good, "bit {bit} passed");
        }
    }

    #[test]
    fn a_frame_beyond_a_chunk_is_refused() {
        let payload = vec![0; CHUNK_BYTES - HEAD_BYTES - "orders".len() + 1];
        assert_eq!(padded_bytes(&record(b"", &payload)), None);
        assert_eq!(padded_bytes(&record(b"", &payload[1..])), Some(CHUNK_BYTES));
    }
}
