//! The dispatch checkpoint's record: 48 bytes within one sector, overwritten in place (E6). Hand-packed
//! little-endian, CRC-32C.
//!
//! And what the recovered value means beside the segments that were found (E4, lesson N1).

use crate::io::{AlignedBuf, Slice};
use crate::le::{get_u32, get_u64, put_u32, put_u64};

pub(crate) const CHECKPOINT_BYTES: usize = 48;
const MAGIC: [u8; 8] = *b"NARADCKP";
const FORMAT: u32 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Checkpoint {
    pub store_id: u64,
    pub dir_number: u32,
    /// First sequence number that is not done.
    pub seq: u64,
}

impl Checkpoint {
    pub fn encode(&self) -> Slice {
        let mut record = AlignedBuf::reused(CHECKPOINT_BYTES);
        record.truncate(CHECKPOINT_BYTES);
        record.fill(0);
        record[..8].copy_from_slice(&MAGIC);
        put_u32(&mut record, 8, FORMAT);
        put_u32(&mut record, 12, self.dir_number);
        put_u64(&mut record, 16, self.store_id);
        put_u64(&mut record, 24, self.seq);
        let crc = crc32c::crc32c(&record[..CHECKPOINT_BYTES - 4]);
        put_u32(&mut record, CHECKPOINT_BYTES - 4, crc);
        record.freeze()
    }

    /// `Err` says why the record counts as none.
    pub fn decode(bytes: &[u8], store_id: u64, dir_number: u32) -> Result<Checkpoint, &'static str> {
        let Some(record) = bytes.get(..CHECKPOINT_BYTES) else { return Err("it is too short") };
        if record[..8] != MAGIC {
            return Err("it has no checkpoint's mark");
        }
        if get_u32(record, CHECKPOINT_BYTES - 4) != crc32c::crc32c(&record[..CHECKPOINT_BYTES - 4]) {
            return Err("its checksum does not verify");
        }
        if get_u32(record, 8) != FORMAT {
            return Err("a newer release wrote it");
        }
        let found =
            Checkpoint { dir_number: get_u32(record, 12), store_id: get_u64(record, 16), seq: get_u64(record, 24) };
        if found.store_id != store_id || found.dir_number != dir_number {
            return Err("it belongs to another data directory or WAL");
        }
        Ok(found)
    }
}

impl Checkpoint {
    /// Makes a record of any bytes that are long enough, for fuzzers: with mark, owner and checksum.
    pub(super) fn sign(record: &mut [u8], store_id: u64, dir_number: u32) {
        let Some(record) = record.get_mut(..CHECKPOINT_BYTES) else { return };
        record[..8].copy_from_slice(&MAGIC);
        put_u32(record, 8, FORMAT);
        put_u32(record, 12, dir_number);
        put_u64(record, 16, store_id);
        let crc = crc32c::crc32c(&record[..CHECKPOINT_BYTES - 4]);
        put_u32(record, CHECKPOINT_BYTES - 4, crc);
    }
}

/// Where dispatch starts and the next record goes, once checkpoint and segments are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Start {
    pub dispatch_from: u64,
    /// The larger of the recovered end and the checkpoint (E4).
    pub next_seq: u64,
    pub note: Note,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Note {
    Plain,
    /// None was found beside existing segments: everything that is left is dispatched, some of it again (E6).
    Absent,
    /// It lay below the oldest segment (lesson N1): dispatch starts at that segment.
    Clamped {
        checkpoint: u64,
    },
    /// It lay above the recovered end: the WAL goes on there, in a segment that begins there (E4).
    Ahead {
        recovered_end: u64,
    },
}

/// `oldest` and `end` are the first sequence number of the oldest segment and the one behind the last record.
pub(crate) fn start(checkpoint: Option<u64>, oldest: u64, end: u64) -> Start {
    match checkpoint {
        None => Start { dispatch_from: oldest, next_seq: end, note: Note::Absent },
        Some(checkpoint) if checkpoint < oldest => {
            Start { dispatch_from: oldest, next_seq: end, note: Note::Clamped { checkpoint } }
        }
        Some(checkpoint) if checkpoint > end => {
            Start { dispatch_from: checkpoint, next_seq: checkpoint, note: Note::Ahead { recovered_end: end } }
        }
        Some(checkpoint) => Start { dispatch_from: checkpoint, next_seq: end, note: Note::Plain },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e6_a_checkpoint_that_does_not_verify_counts_as_none() {
        let value = Checkpoint { store_id: 77, dir_number: 2, seq: 123_456 };
        let good = value.encode();
        assert!(good.len() <= 512, "one sector");
        assert_eq!(Checkpoint::decode(&good, 77, 2), Ok(value));
        for bit in 0..CHECKPOINT_BYTES * 8 {
            let mut damaged = good.to_vec();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(Checkpoint::decode(&damaged, 77, 2).is_err(), "bit {bit}");
        }
        assert!(Checkpoint::decode(&good[..20], 77, 2).is_err());
        assert!(Checkpoint::decode(&[0; 512], 77, 2).is_err());
        assert!(Checkpoint::decode(&good, 78, 2).is_err(), "another store");
        assert!(Checkpoint::decode(&good, 77, 3).is_err(), "another directory");
    }

    #[test]
    fn e4_n1_start_table() {
        let start = |checkpoint, oldest, end| {
            let s = super::start(checkpoint, oldest, end);
            (s.dispatch_from, s.next_seq, s.note)
        };
        assert_eq!(start(Some(7), 1, 10), (7, 10, Note::Plain));
        assert_eq!(start(Some(1), 1, 1), (1, 1, Note::Plain));
        assert_eq!(start(Some(10), 1, 10), (10, 10, Note::Plain));
        assert_eq!(start(None, 4, 10), (4, 10, Note::Absent));
        assert_eq!(start(Some(3), 4, 10), (4, 10, Note::Clamped { checkpoint: 3 }));
        assert_eq!(start(Some(12), 4, 10), (12, 12, Note::Ahead { recovered_end: 10 }));
    }
}
