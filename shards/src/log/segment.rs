//! A segment file: its header block, its name, and the sparse index over its frames. Pure.
//!
//! Block 0 holds the header, twice, in different sectors: one rotten sector costs nothing. Frames follow from
//! [`DATA_START`] without gaps. The file is longer than its data while it is active (claimed space reads as zeros or
//! as whatever never parses) and exactly as long as its data, rounded up to a block, once it is sealed.

use rkyv::rancor;

use crate::io::ALIGNMENT;

/// Where the first frame lies.
pub const DATA_START: u64 = ALIGNMENT as u64;
/// Space claimed with a new segment; later steps double.
pub const FIRST_STEP_BYTES: u64 = 64 << 10;
/// No step claims more.
pub const STEP_BYTES_MAX: u64 = 8 << 20;

const MAGIC: [u8; 8] = *b"NRDSEGM\xb2";
const FORMAT: u32 = 1;
const COPIES_AT: [usize; 2] = [0, 2048];
const ARCHIVE_AT: usize = 16;
const ARCHIVE_BYTES: usize = size_of::<ArchivedSegmentHeader>();

/// Written once, durably, before the first frame (E1), never changed.
#[derive(Clone, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
pub struct SegmentHeader {
    pub format: u32,
    /// Random; seeds the CRC of every frame in the file (S60).
    pub generation: u64,
    /// Offset of the first record, and the name of the file.
    pub base_offset: u64,
    /// Newest commit time in the segments before this one: the time of their last write (S67) and the floor for
    /// commit times here (S24, S25). 0 when unknown.
    pub time_floor_ms: u64,
    /// The segment that this one sealed, and where its data ends: what it may be trimmed to. 0 bytes when unknown.
    pub previous_base: u64,
    pub previous_bytes: u64,
}

impl SegmentHeader {
    pub fn new(generation: u64, base_offset: u64, time_floor_ms: u64, previous: Option<(u64, u64)>) -> SegmentHeader {
        let (previous_base, previous_bytes) = previous.unwrap_or((0, 0));
        SegmentHeader { format: FORMAT, generation, base_offset, time_floor_ms, previous_base, previous_bytes }
    }

    /// Writes both copies into the header block.
    pub fn encode(&self, block: &mut [u8]) -> Result<(), String> {
        let archive = rkyv::to_bytes::<rancor::Error>(self).map_err(|e| format!("segment header: {e}"))?;
        if archive.len() != ARCHIVE_BYTES {
            return Err(format!("segment header takes {} bytes instead of {ARCHIVE_BYTES}", archive.len()));
        }
        for at in COPIES_AT {
            let copy = &mut block[at..at + ARCHIVE_AT + ARCHIVE_BYTES];
            copy[0..8].copy_from_slice(&MAGIC);
            copy[ARCHIVE_AT..].copy_from_slice(&archive);
            copy[8..12].copy_from_slice(&crc32c::crc32c(&archive).to_le_bytes());
        }
        Ok(())
    }

    /// Reads the first intact copy. `None` when there is none: an unfinished segment, a foreign file, or damage.
    pub fn decode(block: &[u8]) -> Option<SegmentHeader> {
        COPIES_AT.iter().find_map(|at| SegmentHeader::decode_copy(block.get(*at..at + ARCHIVE_AT + ARCHIVE_BYTES)?))
    }

    /// The format of an intact header that this release does not know.
    pub fn foreign_format(block: &[u8]) -> Option<u32> {
        let copies = COPIES_AT.iter().filter_map(|at| block.get(*at..at + ARCHIVE_AT + ARCHIVE_BYTES));
        copies.filter_map(SegmentHeader::read_copy).map(|header| header.format).find(|format| *format != FORMAT)
    }

    fn decode_copy(copy: &[u8]) -> Option<SegmentHeader> {
        SegmentHeader::read_copy(copy).filter(|header| header.format == FORMAT)
    }

    /// An intact copy of any format.
    fn read_copy(copy: &[u8]) -> Option<SegmentHeader> {
        let crc = crc32c::crc32c(&copy[ARCHIVE_AT..]).to_le_bytes();
        if copy[0..8] != MAGIC || copy[8..12] != crc {
            return None;
        }
        let mut archive = rkyv::util::AlignedVec::<16>::with_capacity(ARCHIVE_BYTES);
        archive.extend_from_slice(&copy[ARCHIVE_AT..]);
        rkyv::from_bytes::<SegmentHeader, rancor::Error>(&archive).ok()
    }
}

/// Name of the segment that starts with `base`.
pub fn file_name(base: u64) -> String {
    format!("{base:020}.log")
}

/// The base offset that a segment's name states. `None` for every other file.
pub fn parse_file_name(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(".log")?;
    let well_formed = digits.len() == 20 && digits.bytes().all(|b| b.is_ascii_digit());
    well_formed.then(|| digits.parse().ok()).flatten()
}

/// The next space to claim, with `claimed` bytes claimed so far: doubles the file, by at most [`STEP_BYTES_MAX`].
pub fn next_step_bytes(claimed: u64) -> u64 {
    claimed.clamp(FIRST_STEP_BYTES, STEP_BYTES_MAX)
}

/// Offsets and file positions of some frames (S89): at least one in every [`SparseIndex::STRIDE_BYTES`] of the part
/// that was looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SparseIndex {
    /// Ascending in both: (base offset of a frame, its position).
    entries: Vec<(u64, u64)>,
}

impl SparseIndex {
    const STRIDE_BYTES: u64 = 32 << 10;

    /// Notes a frame. Frames before the last noted one, and close behind it, are left out.
    pub fn note(&mut self, offset: u64, at: u64) {
        let worthwhile =
            self.entries.last().is_none_or(|(last, last_at)| offset > *last && at >= last_at + Self::STRIDE_BYTES);
        if worthwhile {
            self.entries.push((offset, at));
        }
    }

    /// The nearest noted frame at or before `offset`, if there is one.
    pub fn floor(&self, offset: u64) -> Option<(u64, u64)> {
        let behind = self.entries.partition_point(|(noted, _)| *noted <= offset);
        behind.checked_sub(1).map(|index| self.entries[index])
    }

    /// Forgets frames from `offset` on.
    pub fn cut(&mut self, offset: u64) {
        self.entries.retain(|(noted, _)| *noted < offset);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(header: &SegmentHeader) -> Vec<u8> {
        let mut block = vec![0; ALIGNMENT];
        header.encode(&mut block).expect("fixed size");
        block
    }

    #[test]
    fn a_header_survives_the_loss_of_any_one_sector() {
        let header = SegmentHeader::new(0xfeed, 77, 1_700_000_000_000, Some((3, 8192)));
        for sector in 0..8 {
            let mut block = block(&header);
            block[sector * 512..(sector + 1) * 512].fill(0xa5);
            assert_eq!(SegmentHeader::decode(&block), Some(header.clone()), "sector {sector}");
        }
    }

    #[test]
    fn zeros_short_blocks_and_two_bad_copies_are_no_header() {
        assert_eq!(SegmentHeader::decode(&[0; ALIGNMENT]), None);
        assert_eq!(SegmentHeader::decode(&[]), None);
        let mut block = block(&SegmentHeader::new(1, 2, 3, None));
        block[20] ^= 1;
        assert!(SegmentHeader::decode(&block).is_some());
        block[2048 + 20] ^= 1;
        assert_eq!(SegmentHeader::decode(&block), None);
    }

    #[test]
    fn s4_only_the_canonical_name_is_a_segment() {
        assert_eq!(parse_file_name(&file_name(0)), Some(0));
        assert_eq!(parse_file_name(&file_name(u64::MAX)), Some(u64::MAX));
        for name in ["1.log", "00000000000000000001.tmp", "+0000000000000000001.log", "99999999999999999999.log", "hwm"]
        {
            assert_eq!(parse_file_name(name), None, "{name}");
        }
    }

    #[test]
    fn steps_double_up_to_eight_mebibytes() {
        let mut claimed = FIRST_STEP_BYTES;
        let mut steps = Vec::new();
        while claimed < 64 << 20 {
            steps.push(next_step_bytes(claimed) >> 10);
            claimed += next_step_bytes(claimed);
        }
        assert_eq!(steps[..8], [64, 128, 256, 512, 1024, 2048, 4096, 8192]);
        assert!(steps[8..].iter().all(|s| *s == 8192));
    }

    #[test]
    fn s89_the_index_finds_the_frame_before_an_offset() {
        let mut index = SparseIndex::default();
        assert_eq!(index.floor(5), None);
        for frame in 0..100u64 {
            index.note(10 + frame, 4096 + frame * 10_000);
        }
        assert_eq!(index.floor(9), None);
        assert_eq!(index.floor(10), Some((10, 4096)));
        let (offset, at) = index.floor(60).expect("indexed");
        assert!(offset <= 60 && at + SparseIndex::STRIDE_BYTES + 10_000 > 4096 + 50 * 10_000);
        index.cut(10);
        assert_eq!(index.floor(60), None);
    }
}
