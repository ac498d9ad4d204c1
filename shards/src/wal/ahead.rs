//! A segment read from front to back, ahead of whoever looks at it: while one piece is being checked, the drive is at
//! the next ones.

use std::collections::VecDeque;
use std::io;

use super::frame::BLOCK_BYTES;
use super::segment::Segment;
use super::WalOpenError;
use crate::io::{AlignedBuf, File, Slice};
use crate::rt::{self, Queue};

/// One read. Larger ones gain nothing with several under way, and their memory is touched for the first time.
const PIECE_BYTES: u64 = 1 << 20;
const READS_MAX: usize = 4;
/// How far the first window over a border reaches into the next piece: enough for a small record. Grows as needed.
const JOIN_BYTES: u64 = 64 << 10;

/// Pieces of one segment, in order.
pub(super) struct Ahead<'a> {
    segment: &'a Segment,
    file: File,
    reading: VecDeque<(u64, rt::Task<io::Result<Slice>>)>,
    /// Where the next read starts.
    next: u64,
    /// Read, without gaps.
    pieces: VecDeque<(u64, Slice)>,
    /// The piece that was handed out as a whole last.
    handed_out: Option<u64>,
    join_bytes: u64,
}

impl<'a> Ahead<'a> {
    /// Starts at the block of `from`.
    pub fn new(segment: &'a Segment, from: u64) -> Result<Ahead<'a>, WalOpenError> {
        Ok(Ahead {
            segment,
            file: segment.open_file().map_err(WalOpenError::io(&segment.path, "open"))?,
            reading: VecDeque::new(),
            next: block_of(from),
            pieces: VecDeque::new(),
            handed_out: None,
            join_bytes: JOIN_BYTES,
        })
    }

    /// The next window for somebody who stands at `at`, and its offset, at or before the block of `at`. Asked again for
    /// what the window before did not hold to its end, it reaches farther. `at` never goes back.
    pub async fn window(&mut self, at: u64) -> Result<(u64, Slice), WalOpenError> {
        let from = block_of(at);
        if from >= self.segment.bytes {
            return Ok((self.segment.bytes, Slice::empty()));
        }
        let (base, piece) = loop {
            match self.pieces.front() {
                Some((base, piece)) if base + piece.len() as u64 <= from => drop(self.pieces.pop_front()),
                Some((base, piece)) => break (*base, piece.clone()),
                None => self.load().await?,
            }
        };
        if self.handed_out != Some(base) {
            self.handed_out = Some(base);
            self.join_bytes = JOIN_BYTES;
            return Ok((base, piece));
        }
        // Something goes over the end of the piece.
        let end = (base + piece.len() as u64 + self.join_bytes).min(self.segment.bytes);
        self.join_bytes *= 4;
        while self.pieces.back().is_some_and(|(base, piece)| base + (piece.len() as u64) < end) {
            self.load().await?;
        }
        Ok((from, self.join(from, end)))
    }

    /// Copies `from..end` out of the pieces.
    fn join(&self, from: u64, end: u64) -> Slice {
        let mut joined = AlignedBuf::zeroed((end - from) as usize);
        joined.truncate((end - from) as usize);
        for (base, piece) in &self.pieces {
            let (first, last) = (from.max(*base), end.min(base + piece.len() as u64));
            if first < last {
                let part = &piece[(first - base) as usize..(last - base) as usize];
                joined[(first - from) as usize..(last - from) as usize].copy_from_slice(part);
            }
        }
        joined.freeze()
    }

    /// Takes one more piece, and has the drive start on later ones.
    async fn load(&mut self) -> Result<(), WalOpenError> {
        self.read_on();
        if let Some((base, read)) = self.reading.pop_front() {
            let piece = read.await.map_err(WalOpenError::io(&self.segment.path, "read"))?;
            self.pieces.push_back((base, piece));
        }
        self.read_on();
        // What was just begun leaves before the piece is looked at.
        rt::yield_now().await;
        Ok(())
    }

    fn read_on(&mut self) {
        while self.reading.len() < READS_MAX && self.next < self.segment.bytes {
            let (file, at) = (self.file.clone(), self.next);
            let bytes = PIECE_BYTES.min(self.segment.bytes - at);
            let read = async move { file.read_at(at, bytes as usize).await };
            self.reading.push_back((at, rt::spawn(Queue::Foreground, read)));
            self.next += bytes;
        }
    }
}

fn block_of(at: u64) -> u64 {
    at / BLOCK_BYTES * BLOCK_BYTES
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::rc::Rc;

    use super::super::header::{Header, State};
    use super::super::test_support::*;
    use super::*;
    use crate::io::sim::SimDisk;
    use crate::io::{Caching, Disk, Open};
    use crate::rt::sim::{self, Rng};

    const SEGMENT_BYTES: u64 = (5 << 20) + 3 * BLOCK_BYTES;

    async fn segment(disk: &SimDisk) -> (Rc<Segment>, Vec<u8>) {
        let path = PathBuf::from("/segment");
        let file = Disk::Sim(disk.clone()).open(&path, Open::New, Caching::Direct).await.expect("made");
        let content: Vec<u8> = (0..SEGMENT_BYTES as u32 / 4).flat_map(u32::to_le_bytes).collect();
        let mut data = AlignedBuf::zeroed(content.len());
        data.copy_from_slice(&content);
        file.write_at(0, data.freeze()).await.expect("written");
        let header = Header {
            state: State::Active,
            store_id: 1,
            dir_number: 0,
            generation: 1,
            first_seq: 1,
            segment_bytes: SEGMENT_BYTES,
            prepared: true,
            recycled: false,
        };
        (Rc::new(Segment::found(path, file, &header)), content)
    }

    #[test]
    fn every_window_is_what_the_file_holds_there_and_reaches_farther_when_asked_again() {
        for seed in 0..20 {
            sim::run(seed, async move {
                let mut random = Rng::new(seed);
                let (segment, content) = segment(&SimDisk::new(seed)).await;
                let mut at = random.below(SEGMENT_BYTES);
                let mut ahead = Ahead::new(&segment, at).expect("open");
                while at < SEGMENT_BYTES {
                    let mut reached = 0;
                    loop {
                        let (base, bytes) = ahead.window(at).await.expect("the disk is sound");
                        let end = base + bytes.len() as u64;
                        assert!(base <= block_of(at) && end > at && base.is_multiple_of(BLOCK_BYTES));
                        assert_eq!(&bytes[..], &content[base as usize..end as usize]);
                        assert!(end > reached || end == SEGMENT_BYTES, "asked again at {at}, it still ends at {end}");
                        reached = end;
                        // A record is at most 2 MiB long.
                        if end == SEGMENT_BYTES || end - at >= 2 << 20 || random.below(3) == 0 {
                            break;
                        }
                    }
                    at = if random.below(4) == 0 { reached } else { at + random.below(reached - at) + 1 };
                }
                let (base, rest) = ahead.window(SEGMENT_BYTES).await.expect("the end");
                assert_eq!((base, rest.len()), (SEGMENT_BYTES, 0));
            });
        }
    }

    #[test]
    fn records_across_the_borders_of_reads_are_recovered() {
        sim::run(3, async {
            let (disk, mut random) = (SimDisk::new(3), Rng::new(3));
            let wal = open(&disk, 16 << 20).await;
            let mut id = 0;
            for bytes in [2_000_000, 900_000, 300_000, 70_000, 1_000, 100].into_iter().cycle().take(60) {
                let count = if bytes > 10_000 { 1 } else { 50 };
                append(&wal, id..id + count, bytes - random.below(90) as usize).await.expect("room");
                id += count;
            }
            drop(wal);
            disk.power_cut();
            let again = open(&disk, 16 << 20).await;
            let records = from_disk(&again, 1).await;
            assert_eq!(ids(&records), (0..id).collect::<Vec<_>>());
        });
    }
}
