//! What a partition's consumer position looks like on disk: a pure codec and the roles of its slots.
//!
//! `consumer.ahead` holds two 4 KiB slots with frontier and ahead set. At any time one of them, the anchor, holds the
//! newest record known to be on stable storage and is never written; the other, the window, is what ticks overwrite.
//! A sync that succeeds swaps the roles (C72). A power cut can tear the window and nothing else, and the anchor then
//! answers (C73). `consumer.offset` holds the frontier alone and may trail (C77); readers take the larger (C78).

use crate::le::{get_u16, get_u32, get_u64};
use crate::meta::Incarnation;

pub const AHEAD_FILE: &str = "consumer.ahead";
pub const OFFSET_FILE: &str = "consumer.offset";

pub const SLOT_BYTES: usize = 4096;
pub const AHEAD_FILE_BYTES: u64 = 2 * SLOT_BYTES as u64;
/// Within one sector, so that a write lands whole or not at all.
pub const OFFSET_RECORD_BYTES: usize = 32;

const SLOT_MAGIC: u32 = u32::from_le_bytes(*b"Npos");
const OFFSET_MAGIC: u32 = u32::from_le_bytes(*b"Noff");
const VERSION: u16 = 1;

// Slot header, little endian: magic 0..4, version 4..6, encoding 6..8, sequence 8..16, incarnation 16..24,
// frontier 24..32, body length 32..36, zeros 36..60, CRC-32C of everything else 60..64. The body follows.
const CRC_AT: usize = 60;
const BODY_AT: usize = 64;
const BODY_BYTES_MAX: usize = SLOT_BYTES - BODY_AT;

/// Offsets above the frontier that a bitmap can name.
const BITMAP_SPAN: u64 = BODY_BYTES_MAX as u64 * 8;

const ENCODING_BITMAP: u16 = 0;
const ENCODING_RANGES: u16 = 1;

/// A half-open range of offsets, `start < end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub start: u64,
    pub end: u64,
}

impl Range {
    pub fn count(&self) -> u64 {
        self.end - self.start
    }
}

/// Frontier and acked ranges above it: ascending, disjoint, none touching the frontier or its neighbour.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Position {
    pub frontier: u64,
    pub acked: Vec<Range>,
}

impl Position {
    /// Makes a position whose parts come from different files hold together: drops what lies below the frontier and
    /// moves it over what touches it.
    pub fn normalise(&mut self) {
        self.acked.retain_mut(|range| {
            range.start = range.start.max(self.frontier);
            if range.start < range.end && range.start == self.frontier {
                self.frontier = range.end;
            }
            range.start < range.end && range.start > self.frontier
        });
    }

    /// Whether anything at or above the high watermark counts as settled.
    pub fn reaches_beyond(&self, high_watermark: u64) -> bool {
        self.frontier > high_watermark || self.acked.last().is_some_and(|range| range.end > high_watermark)
    }

    /// Cuts everything at and above the high watermark (G20, lesson D4): records written there later must be
    /// delivered.
    pub fn clamp(&mut self, high_watermark: u64) {
        self.frontier = self.frontier.min(high_watermark);
        self.acked.retain_mut(|range| {
            range.end = range.end.min(high_watermark);
            range.start < range.end
        });
        self.normalise();
    }

    /// The larger of what the two files say (C78).
    pub fn merge(ahead: Option<Position>, offset: Option<u64>) -> Option<Position> {
        let mut position = match (ahead, offset) {
            (None, None) => return None,
            (Some(position), None) => position,
            (None, Some(frontier)) => Position { frontier, acked: Vec::new() },
            (Some(position), Some(frontier)) => Position { frontier: position.frontier.max(frontier), ..position },
        };
        position.normalise();
        Some(position)
    }
}

/// A slot that verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotRecord {
    /// Grows with every write of the partition; 1 is the first.
    pub sequence: u64,
    pub position: Position,
}

/// Encodes one slot. A set that does not fit keeps its lowest offsets (C74); the others are delivered again after a
/// crash. `into` must be zeroed.
pub fn encode_slot(into: &mut [u8], incarnation: Incarnation, sequence: u64, frontier: u64, acked: &[Range]) {
    assert_eq!(into.len(), SLOT_BYTES);
    debug_assert!(acked.first().is_none_or(|range| range.start > frontier), "the frontier is never acked");
    let (header, body) = into.split_at_mut(BODY_AT);
    let (encoding, body_bytes) = encode_acked(body, frontier, acked);
    header[0..4].copy_from_slice(&SLOT_MAGIC.to_le_bytes());
    header[4..6].copy_from_slice(&VERSION.to_le_bytes());
    header[6..8].copy_from_slice(&encoding.to_le_bytes());
    header[8..16].copy_from_slice(&sequence.to_le_bytes());
    header[16..24].copy_from_slice(&incarnation.0.to_le_bytes());
    header[24..32].copy_from_slice(&frontier.to_le_bytes());
    header[32..36].copy_from_slice(&(body_bytes as u32).to_le_bytes());
    let crc = slot_crc(into);
    into[CRC_AT..BODY_AT].copy_from_slice(&crc.to_le_bytes());
}

/// Decodes one slot; `None` for anything that is not a whole slot of this incarnation (S4, C73).
pub fn decode_slot(slot: &[u8], incarnation: Incarnation) -> Option<SlotRecord> {
    if slot.len() != SLOT_BYTES || get_u32(slot, 0) != SLOT_MAGIC || get_u16(slot, 4) != VERSION {
        return None;
    }
    if get_u32(slot, CRC_AT) != slot_crc(slot) || get_u64(slot, 16) != incarnation.0 {
        return None;
    }
    let frontier = get_u64(slot, 24);
    let body = slot[BODY_AT..].get(..get_u32(slot, 32) as usize)?;
    let acked = match get_u16(slot, 6) {
        ENCODING_BITMAP => decode_bitmap(body, frontier)?,
        ENCODING_RANGES => decode_ranges(body, frontier)?,
        _ => return None,
    };
    Some(SlotRecord { sequence: get_u64(slot, 8), position: Position { frontier, acked } })
}

/// Encodes the content of `consumer.offset`.
pub fn encode_offset(incarnation: Incarnation, frontier: u64) -> [u8; OFFSET_RECORD_BYTES] {
    let mut record = [0; OFFSET_RECORD_BYTES];
    record[0..4].copy_from_slice(&OFFSET_MAGIC.to_le_bytes());
    record[4..6].copy_from_slice(&VERSION.to_le_bytes());
    record[8..16].copy_from_slice(&incarnation.0.to_le_bytes());
    record[16..24].copy_from_slice(&frontier.to_le_bytes());
    let crc = crc32c::crc32c(&record[..28]);
    record[28..].copy_from_slice(&crc.to_le_bytes());
    record
}

/// Decodes `consumer.offset`; an empty, foreign or damaged file says nothing (C78).
pub fn decode_offset(record: &[u8], incarnation: Incarnation) -> Option<u64> {
    let record = record.get(..OFFSET_RECORD_BYTES)?;
    let whole = get_u32(record, 0) == OFFSET_MAGIC
        && get_u16(record, 4) == VERSION
        && get_u32(record, 28) == crc32c::crc32c(&record[..28])
        && get_u64(record, 8) == incarnation.0;
    whole.then(|| get_u64(record, 16))
}

/// Which slot is the anchor and which the window. Small enough to be copied around a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots {
    window: usize,
    sequence: u64,
}

impl Slots {
    /// Roles after both slots were read, and **before** the file was synced: the newest valid slot becomes the
    /// anchor, and the caller syncs the file before the first window write, because that slot may so far exist in a
    /// volatile cache only (C76).
    pub fn prime(file: &[u8], incarnation: Incarnation) -> (Slots, Option<Position>) {
        let slot = |index: usize| {
            file.get(index * SLOT_BYTES..(index + 1) * SLOT_BYTES).and_then(|slot| decode_slot(slot, incarnation))
        };
        let newest = match (slot(0), slot(1)) {
            (Some(zero), Some(one)) if one.sequence > zero.sequence => Some((1, one)),
            (Some(zero), _) => Some((0, zero)),
            (None, Some(one)) => Some((1, one)),
            (None, None) => None,
        };
        match newest {
            Some((anchor, record)) => (Slots { window: 1 - anchor, sequence: record.sequence }, Some(record.position)),
            None => (Slots { window: 0, sequence: 0 }, None),
        }
    }

    /// File offset of the slot that the next write goes to.
    pub fn window_at(&self) -> u64 {
        (self.window * SLOT_BYTES) as u64
    }

    /// Sequence of the next write. A failed write uses it up.
    pub fn take_sequence(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }

    /// The window's last write is on stable storage: it is the anchor from here on. After a failed sync nothing of
    /// the sort is called: the anchor stays, and the window is written again in full.
    pub fn synced(&mut self) {
        self.window = 1 - self.window;
    }
}

fn encode_acked(body: &mut [u8], frontier: u64, acked: &[Range]) -> (u16, usize) {
    let Some(last) = acked.last() else { return (ENCODING_BITMAP, 0) };
    if last.end - (frontier + 1) <= BITMAP_SPAN {
        return (ENCODING_BITMAP, encode_bitmap(body, frontier, acked));
    }
    let by_bitmap: u64 = acked.iter().map(|range| clipped(range, frontier).map_or(0, |r| r.count())).sum();
    let (bytes, by_ranges) = encode_ranges(body, frontier, acked);
    if by_ranges >= by_bitmap {
        return (ENCODING_RANGES, bytes);
    }
    body.fill(0);
    (ENCODING_BITMAP, encode_bitmap(body, frontier, acked))
}

/// The part of a range that a bitmap can name.
fn clipped(range: &Range, frontier: u64) -> Option<Range> {
    let end = range.end.min(frontier.saturating_add(1 + BITMAP_SPAN));
    (range.start < end).then_some(Range { start: range.start, end })
}

/// Bit `i` is offset `frontier + 1 + i`: the frontier itself is never acked.
fn encode_bitmap(body: &mut [u8], frontier: u64, acked: &[Range]) -> usize {
    let mut bits = 0;
    for range in acked.iter().map_while(|range| clipped(range, frontier)) {
        for bit in range.start - frontier - 1..range.end - frontier - 1 {
            body[(bit / 8) as usize] |= 1 << (bit % 8);
        }
        bits = range.end - frontier - 1;
    }
    bits.div_ceil(8) as usize
}

fn decode_bitmap(body: &[u8], frontier: u64) -> Option<Vec<Range>> {
    let mut acked: Vec<Range> = Vec::new();
    for (byte, index) in body.iter().zip(0u64..).filter(|(byte, _)| **byte != 0) {
        for bit in (0..8).filter(|bit| byte >> bit & 1 == 1) {
            let offset = frontier.checked_add(1 + index * 8 + bit)?;
            match acked.last_mut() {
                Some(last) if last.end == offset => last.end = offset.checked_add(1)?,
                _ => acked.push(Range { start: offset, end: offset.checked_add(1)? }),
            }
        }
    }
    Some(acked)
}

/// Pairs of varints: distance from the previous range's end (first: from the frontier), length. Both are at least 1.
/// Returns bytes and offsets kept.
fn encode_ranges(body: &mut [u8], frontier: u64, acked: &[Range]) -> (usize, u64) {
    let (mut at, mut kept, mut previous) = (0, 0, frontier);
    for range in acked {
        let mut pair = [0; 20];
        let first = put_varint(&mut pair, range.start - previous);
        let bytes = first + put_varint(&mut pair[first..], range.count());
        if at + bytes > body.len() {
            break;
        }
        body[at..at + bytes].copy_from_slice(&pair[..bytes]);
        at += bytes;
        kept += range.count();
        previous = range.end;
    }
    (at, kept)
}

fn decode_ranges(mut body: &[u8], frontier: u64) -> Option<Vec<Range>> {
    let (mut acked, mut previous) = (Vec::new(), frontier);
    while !body.is_empty() {
        let distance = take_varint(&mut body)?;
        let count = take_varint(&mut body)?;
        let start = previous.checked_add(distance)?;
        let end = start.checked_add(count)?;
        if distance == 0 || count == 0 {
            return None;
        }
        acked.push(Range { start, end });
        previous = end;
    }
    Some(acked)
}

fn put_varint(into: &mut [u8], mut value: u64) -> usize {
    let mut at = 0;
    while value >= 0x80 {
        into[at] = value as u8 | 0x80;
        value >>= 7;
        at += 1;
    }
    into[at] = value as u8;
    at + 1
}

fn take_varint(from: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = from.split_first()?;
        *from = rest;
        let bits = u64::from(byte & 0x7f);
        if shift == 63 && bits > 1 {
            return None;
        }
        value |= bits << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

fn slot_crc(slot: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&slot[..CRC_AT]), &slot[BODY_AT..])
}

/// Gives a `consumer.offset` and a `consumer.ahead` that lie behind each other magic, version, incarnation and checksums,
/// whatever else they say: so that a fuzzer gets past them.
pub(super) fn sign(files: &mut [u8], incarnation: Incarnation) {
    let (offset, ahead) = files.split_at_mut(OFFSET_RECORD_BYTES);
    offset[0..4].copy_from_slice(&OFFSET_MAGIC.to_le_bytes());
    offset[4..6].copy_from_slice(&VERSION.to_le_bytes());
    offset[8..16].copy_from_slice(&incarnation.0.to_le_bytes());
    let crc = crc32c::crc32c(&offset[..28]);
    offset[28..].copy_from_slice(&crc.to_le_bytes());
    for slot in ahead.chunks_exact_mut(SLOT_BYTES) {
        slot[0..4].copy_from_slice(&SLOT_MAGIC.to_le_bytes());
        slot[4..6].copy_from_slice(&VERSION.to_le_bytes());
        slot[16..24].copy_from_slice(&incarnation.0.to_le_bytes());
        let crc = slot_crc(slot);
        slot[CRC_AT..BODY_AT].copy_from_slice(&crc.to_le_bytes());
    }
}

#[cfg(test)]
#[path = "position_tests.rs"]
mod tests;
