//! Verdict on the last segment of a log. Pure: bytes in, verdict out.
//!
//! Tear or rot (E8): bytes that hold no frame, with valid frames behind them, are a torn tail unless something proves
//! that they were once synced. A frame's mark names the first offset of its commit, and a log has one commit in flight:
//! a mark above the damaged offset belongs to a commit that was started after the damaged one had been synced. A
//! boundary that was written at a clean close proves the same of everything below it. What is proven synced stays, as
//! a permanent gap with the frames behind it (S57); the rest is cut (S56). A cut may take the proof of an earlier gap
//! away, and then says so.

use super::scan::{Hole, Scanner, Step};
use super::segment::{SparseIndex, DATA_START};

/// What is to be made of a segment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// The record tail: the offset that the next append takes.
    pub next_offset: u64,
    /// Where it is written.
    pub data_end: u64,
    /// Bytes that must be zeroed durably before anything is appended.
    pub cut: Option<(u64, u64)>,
    /// A frame that a newer release wrote: nothing may be cut or appended.
    pub newer_at: Option<u64>,
    /// Whether the cut holds whole frames, or bytes of some: the mark of an interrupted commit.
    pub frames_cut: u64,
    /// Offsets, half-open, whose records are lost for good.
    pub gaps: Vec<(u64, u64)>,
    /// The frames that proved a gap are among those cut: the next scan would take the gap for a tear and cut what lies
    /// behind it. The tail must be noted elsewhere, durably, before the cut.
    pub proof_cut: bool,
    /// Records that were once synced and lie behind the tail: lost, and their offsets will be given out again (S46).
    pub lost_tail: Option<(u64, u64)>,
    pub index: SparseIndex,
    /// Commit times of the first and the last frame that stay.
    pub first_ms: Option<u64>,
    pub last_ms: Option<u64>,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Progress {
    /// Call again with a window that covers these bytes.
    Need {
        from: u64,
        bytes: usize,
    },
    Done(Verdict),
}

/// What has to be forgotten when the log is cut at a hole.
#[derive(Debug)]
struct Doubt {
    hole: Hole,
    /// First offset behind the hole.
    resumes: u64,
    last_ms_before: Option<u64>,
    frames_before: u64,
    mark_before: u64,
}

impl Doubt {
    /// The offsets that are lost in the hole; none when its bytes held no record.
    fn gap(&self) -> Option<(u64, u64)> {
        (self.hole.expected < self.resumes).then_some((self.hole.expected, self.resumes))
    }
}

/// The scan of one segment, frame by frame.
pub struct Recovery {
    scanner: Scanner,
    /// Every offset below was synced at some time, by other evidence than the frames.
    known_synced: u64,
    doubts: Vec<Doubt>,
    index: SparseIndex,
    frames: u64,
    frames_end: u64,
    newest_mark: u64,
    first_ms: Option<u64>,
    last_ms: Option<u64>,
}

impl Recovery {
    /// Scans a segment that begins with offset `base` and is `end` bytes long.
    pub fn new(generation: u64, base: u64, end: u64, known_synced: u64) -> Recovery {
        Recovery {
            scanner: Scanner::new(generation, DATA_START, base, end),
            known_synced,
            doubts: Vec::new(),
            index: SparseIndex::default(),
            frames: 0,
            frames_end: DATA_START,
            newest_mark: 0,
            first_ms: None,
            last_ms: None,
        }
    }

    /// Goes on through `window`, whose first byte lies at `window_at`, until it needs another one.
    pub fn step(&mut self, window_at: u64, window: &[u8]) -> Progress {
        loop {
            match self.scanner.step(window_at, window) {
                Step::Need { from, bytes } => return Progress::Need { from, bytes },
                Step::Frame { at, head, hole } => {
                    if let Some(hole) = hole {
                        self.doubts.push(Doubt {
                            hole,
                            resumes: head.base_offset,
                            last_ms_before: self.last_ms,
                            frames_before: self.frames,
                            mark_before: self.newest_mark,
                        });
                    }
                    self.index.note(head.base_offset, at);
                    self.frames += 1;
                    self.frames_end = at + head.total_bytes() as u64;
                    self.newest_mark = self.newest_mark.max(head.commit_first);
                    self.first_ms = self.first_ms.or(Some(head.time_ms));
                    self.last_ms = Some(head.time_ms);
                }
                Step::End { from, dirty_until } => return Progress::Done(self.verdict(from, dirty_until)),
            }
        }
    }

    fn verdict(&mut self, end: u64, dirty_until: u64) -> Verdict {
        let synced = self.newest_mark.max(self.known_synced);
        // Marks and offsets both ascend, so behind the first unproven hole nothing is proven either.
        let proven = self.doubts.partition_point(|doubt| doubt.hole.expected < synced);
        let mut verdict = Verdict {
            next_offset: self.scanner.expected(),
            data_end: end,
            cut: (dirty_until > end).then_some((end, dirty_until)),
            newer_at: self.scanner.newer_at(),
            index: std::mem::take(&mut self.index),
            first_ms: self.first_ms,
            last_ms: self.last_ms,
            gaps: self.doubts[..proven].iter().filter_map(Doubt::gap).collect(),
            ..Verdict::default()
        };
        if let Some(torn) = self.doubts.get(proven) {
            verdict.next_offset = torn.hole.expected;
            verdict.data_end = torn.hole.from;
            verdict.cut = Some((torn.hole.from, self.frames_end.max(dirty_until)));
            verdict.frames_cut = self.frames - torn.frames_before;
            verdict.index.cut(torn.hole.expected);
            let still_proven = torn.mark_before.max(self.known_synced);
            // Also where no offset is lost: without its proof the hole would be taken for a tear.
            verdict.proof_cut = self.doubts[..proven].iter().any(|doubt| doubt.hole.expected >= still_proven);
            verdict.last_ms = torn.last_ms_before;
            verdict.first_ms = verdict.first_ms.filter(|_| torn.frames_before > 0);
        }
        let lost = (verdict.next_offset, self.known_synced);
        verdict.lost_tail = (lost.0 < lost.1).then_some(lost);
        verdict
    }
}

/// Scans a whole segment that lies in memory.
#[cfg(test)]
pub fn recover(segment: &[u8], generation: u64, base: u64, known_synced: u64) -> Verdict {
    let mut recovery = Recovery::new(generation, base, segment.len() as u64, known_synced);
    match recovery.step(0, segment) {
        Progress::Done(verdict) => verdict,
        Progress::Need { from, bytes } => panic!("the whole segment was given, still needs {bytes} bytes at {from}"),
    }
}
