//! The header of a WAL segment: block 0, its first sector. Hand-packed little-endian, 64 bytes, CRC-32C (E2).
//!
//! A write of the header changes one sector, which a power cut leaves old or new, never mixed.

use super::frame::BLOCK_BYTES;
use crate::io::{AlignedBuf, Slice};
use crate::le::{get_u32, get_u64, put_u32, put_u64};

const MAGIC: [u8; 8] = *b"NARADWAL";
const FORMAT: u32 = 1;
const HEADER_BYTES: usize = 64;
const FLAG_PREPARED: u32 = 1;
const FLAG_RECYCLED: u32 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Holds no record.
    Spare,
    Active,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub state: State,
    /// Made at first start and kept in the data directory. Never a host or node name: a container started again
    /// must find its own WAL.
    pub store_id: u64,
    pub dir_number: u32,
    /// Random, new for each life of the file.
    pub generation: u64,
    /// First sequence number in the segment. Of a spare: one that was not yet given out when it became spare.
    pub first_seq: u64,
    pub segment_bytes: u64,
    /// Every block was written before (zero-filled, or by an earlier life, which may have left up to an eighth): several groups may be in flight in it,
    /// and a power cut may leave a hole (E7, lesson N3).
    pub prepared: bool,
    /// Had an earlier life; a rotation takes only such a one (E10).
    pub recycled: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeaderFault {
    /// All zeros: its preparation never came to an end, and nothing depends on it (E1).
    Blank,
    Invalid,
    UnknownFormat(u32),
}

impl Header {
    /// The whole block.
    pub fn encode(&self) -> Slice {
        let mut block = AlignedBuf::zeroed(BLOCK_BYTES as usize);
        block[..8].copy_from_slice(&MAGIC);
        put_u32(&mut block, 8, FORMAT);
        put_u32(&mut block, 12, if self.state == State::Active { 2 } else { 1 });
        put_u64(&mut block, 16, self.store_id);
        put_u64(&mut block, 24, self.generation);
        put_u64(&mut block, 32, self.first_seq);
        put_u64(&mut block, 40, self.segment_bytes);
        put_u32(&mut block, 48, self.dir_number);
        let flags = if self.prepared { FLAG_PREPARED } else { 0 } | if self.recycled { FLAG_RECYCLED } else { 0 };
        put_u32(&mut block, 52, flags);
        let crc = crc32c::crc32c(&block[..HEADER_BYTES - 4]);
        put_u32(&mut block, HEADER_BYTES - 4, crc);
        block.freeze()
    }

    pub fn decode(block: &[u8]) -> Result<Header, HeaderFault> {
        let header = block.get(..HEADER_BYTES).ok_or(HeaderFault::Invalid)?;
        if block.iter().all(|byte| *byte == 0) {
            return Err(HeaderFault::Blank);
        }
        if header[..8] != MAGIC || get_u32(header, HEADER_BYTES - 4) != crc32c::crc32c(&header[..HEADER_BYTES - 4]) {
            return Err(HeaderFault::Invalid);
        }
        let format = get_u32(header, 8);
        if format != FORMAT {
            return Err(HeaderFault::UnknownFormat(format));
        }
        let state = match get_u32(header, 12) {
            1 => State::Spare,
            2 => State::Active,
            _ => return Err(HeaderFault::Invalid),
        };
        let (first_seq, segment_bytes) = (get_u64(header, 32), get_u64(header, 40));
        // What no build writes: a segment without room for a record, or one behind the last number.
        if segment_bytes < 2 * BLOCK_BYTES || !segment_bytes.is_multiple_of(BLOCK_BYTES) || first_seq == u64::MAX {
            return Err(HeaderFault::Invalid);
        }
        let flags = get_u32(header, 52);
        Ok(Header {
            state,
            store_id: get_u64(header, 16),
            generation: get_u64(header, 24),
            first_seq,
            segment_bytes,
            dir_number: get_u32(header, 48),
            prepared: flags & FLAG_PREPARED != 0,
            recycled: flags & FLAG_RECYCLED != 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            state: State::Active,
            store_id: 0x1122_3344_5566_7788,
            dir_number: 5,
            generation: 99,
            first_seq: 1001,
            segment_bytes: 64 << 20,
            prepared: true,
            recycled: false,
        }
    }

    #[test]
    fn e2_the_header_is_one_block_and_comes_back_as_written() {
        let block = header().encode();
        assert_eq!(block.len() as u64, BLOCK_BYTES);
        assert_eq!(Header::decode(&block), Ok(header()));
        let spare = Header { state: State::Spare, prepared: false, recycled: true, ..header() };
        assert_eq!(Header::decode(&spare.encode()), Ok(spare));
    }

    #[test]
    fn e2_damage_blankness_and_newer_formats_are_told_apart() {
        let good = header().encode();
        for bit in 0..HEADER_BYTES * 8 {
            let mut block = good.to_vec();
            block[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Header::decode(&block), Err(HeaderFault::Invalid), "bit {bit}");
        }
        assert_eq!(Header::decode(&[0; 4096]), Err(HeaderFault::Blank));
        assert_eq!(Header::decode(&good[..63]), Err(HeaderFault::Invalid));
        let mut newer = good.to_vec();
        put_u32(&mut newer, 8, 2);
        let crc = crc32c::crc32c(&newer[..HEADER_BYTES - 4]);
        put_u32(&mut newer, HEADER_BYTES - 4, crc);
        assert_eq!(Header::decode(&newer), Err(HeaderFault::UnknownFormat(2)));
    }

    #[test]
    fn what_no_build_writes_is_no_header() {
        let bad = [
            Header { segment_bytes: 0, ..header() },
            Header { segment_bytes: BLOCK_BYTES, ..header() },
            Header { segment_bytes: 3 * BLOCK_BYTES + 16, ..header() },
            Header { first_seq: u64::MAX, ..header() },
        ];
        for header in bad {
            assert_eq!(Header::decode(&header.encode()), Err(HeaderFault::Invalid), "{header:?}");
        }
    }
}
