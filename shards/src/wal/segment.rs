//! Segment files: made, activated, recycled, removed. Every step leaves the directory in a state that recovery
//! understands, and reports whether the state is known (lesson N5).

use std::cell::{Cell, RefCell};
use std::io;
use std::path::{Path, PathBuf};

use super::frame::{generation_seed, BLOCK_BYTES};
use super::header::{Header, State};
use crate::io::{zero_fill, AlignedBuf, Caching, Disk, File, FillBudget, Open};
use crate::rt;

/// Distance of the entries of a segment's index.
const INDEX_STEP_BYTES: u64 = 256 << 10;

/// A directory of segments.
#[derive(Clone)]
pub(crate) struct Folder {
    pub disk: Disk,
    pub dir: PathBuf,
    pub dir_number: u32,
    pub store_id: u64,
}

/// One segment, from the moment it is planned.
pub(crate) struct Segment {
    pub path: PathBuf,
    pub generation: u64,
    pub seed: u32,
    pub bytes: u64,
    pub prepared: bool,
    pub recycled: bool,
    /// Known once the segment is (about to be) active.
    pub first_seq: Cell<u64>,
    /// The header on disk says so.
    pub active: Cell<bool>,
    /// Where the next group goes.
    pub tail: Cell<u64>,
    file: RefCell<Option<File>>,
    /// Sequence number and offset of a frame every now and then, ascending.
    index: RefCell<Vec<(u64, u64)>>,
}

impl Segment {
    pub fn planned(folder: &Folder, number: u64, bytes: u64, prepared: bool) -> Segment {
        Segment {
            path: folder.dir.join(file_name(number)),
            generation: 0,
            seed: 0,
            bytes,
            prepared,
            recycled: false,
            first_seq: Cell::new(0),
            active: Cell::new(false),
            tail: Cell::new(BLOCK_BYTES),
            file: RefCell::new(None),
            index: RefCell::default(),
        }
        .with_generation(rt::random_u64())
    }

    pub fn found(path: PathBuf, file: File, header: &Header) -> Segment {
        Segment {
            path,
            generation: header.generation,
            seed: generation_seed(header.generation),
            bytes: header.segment_bytes,
            prepared: header.prepared,
            recycled: header.recycled,
            first_seq: Cell::new(header.first_seq),
            active: Cell::new(header.state == State::Active),
            tail: Cell::new(BLOCK_BYTES),
            file: RefCell::new(Some(file)),
            index: RefCell::default(),
        }
    }

    /// The same file in its next life.
    pub fn reborn(&self) -> Segment {
        Segment {
            path: self.path.clone(),
            prepared: true,
            recycled: true,
            first_seq: Cell::new(0),
            active: Cell::new(false),
            tail: Cell::new(BLOCK_BYTES),
            file: RefCell::new(self.file()),
            index: RefCell::default(),
            ..*self
        }
        .with_generation(self.generation ^ (rt::random_u64() | 1))
    }

    fn with_generation(self, generation: u64) -> Segment {
        Segment { generation, seed: generation_seed(generation), ..self }
    }

    /// `None` until the file was made.
    pub fn file(&self) -> Option<File> {
        self.file.borrow().clone()
    }

    pub fn open_file(&self) -> io::Result<File> {
        self.file()
            .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("{} has no file", self.path.display())))
    }

    /// Notes where a frame stands, for later reads; `seq` and `offset` only ever grow.
    pub fn note(&self, seq: u64, offset: u64) {
        let mut index = self.index.borrow_mut();
        if index.last().is_none_or(|(_, last)| offset >= last + INDEX_STEP_BYTES) {
            index.push((seq, offset));
        }
    }

    /// The last noted frame at or before `seq`, as sequence number and offset.
    pub fn locate(&self, seq: u64) -> (u64, u64) {
        let index = self.index.borrow();
        let after = index.partition_point(|(noted, _)| *noted <= seq);
        after.checked_sub(1).map_or((self.first_seq.get(), BLOCK_BYTES), |at| index[at])
    }

    fn header(&self, folder: &Folder, state: State, first_seq: u64) -> Header {
        Header {
            state,
            store_id: folder.store_id,
            dir_number: folder.dir_number,
            generation: self.generation,
            first_seq,
            segment_bytes: self.bytes,
            prepared: self.prepared,
            recycled: self.recycled,
        }
    }
}

pub(crate) fn file_name(number: u64) -> String {
    format!("{number:08}.wal")
}

/// The number in a segment's file name.
pub(crate) fn file_number(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(".wal")?;
    let well_formed = digits.len() >= 8 && digits.bytes().all(|byte| byte.is_ascii_digit());
    well_formed.then(|| digits.parse().ok()).flatten()
}

/// How fast a segment may be filled.
pub(crate) trait Pace {
    /// Awaited after each request of `bytes`.
    fn pause(&self, bytes: u64) -> impl std::future::Future<Output = ()>;
}

/// Nobody else needs the disk yet.
pub(crate) struct Unpaced;

impl Pace for Unpaced {
    async fn pause(&self, _bytes: u64) {
        rt::yield_now().await;
    }
}

/// Within the shard's budget, until `hurry` says otherwise.
pub(crate) struct Paced<F: Fn() -> bool> {
    pub budget: FillBudget,
    pub hurry: F,
}

impl<F: Fn() -> bool> Pace for Paced<F> {
    async fn pause(&self, bytes: u64) {
        if !(self.hurry)() {
            rt::sleep_until(self.budget.book(bytes)).await;
        }
    }
}

impl Folder {
    /// Makes the file of a planned segment and leaves it a spare under its final name: filled (or, unprepared, its
    /// space claimed), synced, header written, directory synced (E1). `floor` is a sequence number not yet given out.
    ///
    /// On an error the file is removed again as far as possible; what may be left of it is a blank or a spare.
    pub async fn make(&self, segment: &Segment, floor: u64, pace: &impl Pace) -> io::Result<()> {
        let made = self.try_make(segment, floor, pace).await;
        if made.is_err() {
            // The cause is being reported; what is left behind is recognised at the next start.
            let _ = self.disk.remove_file(&segment.path).await;
        }
        made
    }

    async fn try_make(&self, segment: &Segment, floor: u64, pace: &impl Pace) -> io::Result<()> {
        let file = self.disk.open(&segment.path, Open::New, Caching::Direct).await?;
        // Says at once when the disk is full; a group must not find out (lesson F2).
        file.allocate(0, segment.bytes).await?;
        if segment.prepared {
            zero_fill(&file, 0, segment.bytes, |bytes| pace.pause(bytes)).await?;
        }
        file.sync_data().await?;
        file.write_durable_at(0, segment.header(self, State::Spare, floor).encode()).await?;
        self.disk.sync_dir(&self.dir).await?;
        *segment.file.borrow_mut() = Some(file);
        Ok(())
    }

    /// Makes the segment the active one, durably, before anything in it is answered (E2). After an error the state
    /// on disk is unknown.
    pub async fn activate(&self, segment: &Segment, first_seq: u64) -> io::Result<()> {
        let file = segment.open_file()?;
        file.write_durable_at(0, segment.header(self, State::Active, first_seq).encode()).await?;
        segment.first_seq.set(first_seq);
        segment.active.set(true);
        Ok(())
    }

    /// Gives a segment that nobody needs any more its next life (E3). Not refilled: all its blocks were
    /// written, or all but the last eighth, whose first write has extents to convert once more.
    pub async fn recycle(&self, segment: &Segment, floor: u64) -> io::Result<Segment> {
        let reborn = segment.reborn();
        reborn.open_file()?.write_durable_at(0, reborn.header(self, State::Spare, floor).encode()).await?;
        Ok(reborn)
    }

    /// Begins the segment anew, active, with `first_seq`: one write of its header. What it held is gone.
    pub async fn restart(&self, segment: &Segment, first_seq: u64) -> io::Result<Segment> {
        let again = Segment { prepared: segment.prepared, ..segment.reborn() };
        self.activate(&again, first_seq).await?;
        Ok(again)
    }

    /// Removes a segment for good: it must not come back once a younger one is gone.
    pub async fn remove(&self, path: &Path) -> io::Result<()> {
        match self.disk.remove_file(path).await {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        self.disk.sync_dir(&self.dir).await
    }

    /// Zeroes `from..to` durably; `from` may lie within a block, whose bytes before it stay what they are (E5).
    pub async fn erase(&self, segment: &Segment, from: u64, to: u64) -> io::Result<()> {
        let file = segment.open_file()?;
        let base = from / BLOCK_BYTES * BLOCK_BYTES;
        let mut at = base;
        if from > base {
            let old = file.read_at(base, BLOCK_BYTES as usize).await?;
            let mut block = AlignedBuf::zeroed(BLOCK_BYTES as usize);
            let kept = (from - base) as usize;
            block[..kept].copy_from_slice(&old[..kept]);
            file.write_at(base, block.freeze()).await?;
            at += BLOCK_BYTES;
        }
        if to > at {
            zero_fill(&file, at, to - at, |_| rt::yield_now()).await?;
        }
        file.sync_data().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e1_segment_names() {
        assert_eq!(file_name(7), "00000007.wal");
        assert_eq!(file_number("00000007.wal"), Some(7));
        assert_eq!(file_number(&file_name(123_456_789_012)), Some(123_456_789_012));
        for other in ["7.wal", "00000007.tmp", "checkpoint", "0000000x.wal", "+0000007.wal"] {
            assert_eq!(file_number(other), None, "{other}");
        }
    }
}
