//! Recovery of a segment: bytes in, verdict out. No I/O; the driver hands over windows of the file.
//!
//! A [`Walk`] follows the frames from the front. Where it stops in the last segment, a [`Scan`] looks at everything
//! behind and judges whether a power cut explains what is there (E8): a torn tail is cut, anything else is
//! corruption, which the operator must see.

use super::frame::{generation_seed, round_up_to_block, Head, HeadFault, BLOCK_BYTES, FRAME_ALIGNMENT, HEAD_BYTES};
use super::frame::{CHUNK_BYTES, WRITE_WINDOW_BYTES};

/// A stretch of the segment file.
#[derive(Clone, Copy)]
pub(crate) struct Window<'a> {
    /// Offset of `bytes` in the file, a multiple of the block.
    pub base: u64,
    pub bytes: &'a [u8],
}

impl<'a> Window<'a> {
    fn end(&self) -> u64 {
        self.base + self.bytes.len() as u64
    }

    /// What the window holds from `at` on, if that is at least `bytes` long.
    fn at_least(&self, at: u64, bytes: usize) -> Option<&'a [u8]> {
        let from = usize::try_from(at.checked_sub(self.base)?).ok()?;
        self.bytes.get(from..).filter(|rest| rest.len() >= bytes)
    }
}

/// What of a frame has to be there and right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Depth {
    /// The head alone: the record is passed over.
    Head,
    Whole,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Frame {
        offset: u64,
        head: Head,
    },
    /// The window ends first; go on with one that starts at or before the block of [`Walk::at`].
    More,
    /// No frame with the next sequence number stands here.
    Stop,
    /// It does, but a newer release wrote it.
    UnknownFormat {
        offset: u64,
        format: u8,
    },
}

/// Follows the frames of one segment in sequence.
#[derive(Clone, Debug)]
pub(crate) struct Walk {
    seed: u32,
    segment_bytes: u64,
    pub at: u64,
    pub next_seq: u64,
}

impl Walk {
    /// `at` is where the frame of `next_seq` starts, or the end of the frame before it.
    pub fn new(generation: u64, segment_bytes: u64, at: u64, next_seq: u64) -> Walk {
        Walk { seed: generation_seed(generation), segment_bytes, at, next_seq }
    }

    pub fn step(&mut self, window: Window<'_>, depth: Depth) -> Step {
        let step = self.try_at(self.at, window, depth);
        if step != Step::Stop || self.at.is_multiple_of(BLOCK_BYTES) {
            return step;
        }
        // The group ended before the block did: the next one starts on a block.
        self.try_at(round_up_to_block(self.at), window, depth)
    }

    fn try_at(&mut self, at: u64, window: Window<'_>, depth: Depth) -> Step {
        if at + HEAD_BYTES as u64 > self.segment_bytes {
            return Step::Stop;
        }
        let more = || if window.end() < self.segment_bytes { Step::More } else { Step::Stop };
        let Some(frame) = window.at_least(at, HEAD_BYTES) else { return more() };
        let head = match Head::decode(self.seed, frame) {
            Ok(head) if head.seq == self.next_seq => head,
            Err(HeadFault::UnknownFormat { format, seq, .. }) if seq == self.next_seq => {
                return Step::UnknownFormat { offset: at, format };
            }
            _ => return Step::Stop,
        };
        if at + u64::from(head.length) > self.segment_bytes {
            return Step::Stop;
        }
        if depth == Depth::Whole {
            let Some(frame) = window.at_least(at, head.length as usize) else { return more() };
            if !head.body_matches(self.seed, frame) {
                return Step::Stop;
            }
        }
        self.at = at + head.padded() as u64;
        self.next_seq += 1;
        Step::Frame { offset: at, head }
    }
}

/// Damage that no power cut explains. Recovery refuses, and changes nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Corruption {
    /// Where the damaged record is, or should be.
    pub offset: u64,
    pub seq: u64,
    pub why: String,
}

/// What the last segment holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tail {
    pub next_seq: u64,
    /// End of the last good frame.
    pub cut: u64,
    /// Everything from `cut` to here is to be zeroed durably before the next append (E5); `cut` when nothing is.
    pub erase_to: u64,
    /// Heads of records that verify behind the cut.
    pub heads_behind: u64,
}

/// Judges everything behind the place where a walk of the last segment stopped.
#[derive(Clone, Debug)]
pub(crate) struct Scan {
    seed: u32,
    segment_bytes: u64,
    prepared: bool,
    cut: u64,
    damaged_seq: u64,
    pub at: u64,
    found_to: u64,
    heads_behind: u64,
    group_mark: Option<u64>,
    torn_block: bool,
}

impl Scan {
    pub fn new(walk: &Walk, prepared: bool) -> Scan {
        Scan {
            seed: walk.seed,
            segment_bytes: walk.segment_bytes,
            prepared,
            cut: walk.at,
            damaged_seq: walk.next_seq,
            at: walk.at,
            found_to: walk.at,
            heads_behind: 0,
            group_mark: None,
            torn_block: false,
        }
    }

    /// Looks at the next stretch, from `at` on. `Ok(None)`: go on with a window that starts at the block of `at`.
    pub fn step(&mut self, window: Window<'_>) -> Result<Option<Tail>, Corruption> {
        let block_end = round_up_to_block(self.cut);
        while self.at + HEAD_BYTES as u64 <= self.segment_bytes {
            let Some(frame) = window.at_least(self.at, HEAD_BYTES) else {
                return if window.end() < self.segment_bytes { Ok(None) } else { Ok(Some(self.verdict())) };
            };
            self.torn_block |= self.at < block_end && frame[..FRAME_ALIGNMENT].iter().any(|byte| *byte != 0);
            let (seq, group_mark, length) = match Head::decode(self.seed, frame) {
                Ok(head) => (head.seq, head.group_mark, head.length),
                Err(HeadFault::UnknownFormat { seq, group_mark, length, .. }) => (seq, group_mark, length),
                Err(HeadFault::Invalid) => {
                    self.at += FRAME_ALIGNMENT as u64;
                    continue;
                }
            };
            if seq >= self.damaged_seq {
                self.judge(seq, group_mark)?;
                self.heads_behind += 1;
                let length = u64::from(length).clamp(HEAD_BYTES as u64, CHUNK_BYTES as u64);
                self.found_to = self.found_to.max(self.at + length).min(self.segment_bytes);
            }
            self.at += FRAME_ALIGNMENT as u64;
        }
        Ok(Some(self.verdict()))
    }

    /// A head that verifies stands at `self.at`, behind the damage or at it.
    fn judge(&mut self, seq: u64, group_mark: u64) -> Result<(), Corruption> {
        let corruption = |why| Err(Corruption { offset: self.cut, seq: self.damaged_seq, why });
        if group_mark > self.damaged_seq {
            return corruption(format!(
                "record {seq} at byte {} was written when everything below {group_mark} was already synced",
                self.at
            ));
        }
        if self.at >= self.cut + WRITE_WINDOW_BYTES {
            return corruption(format!(
                "record {seq} at byte {} verifies, farther behind than writes in flight reach ({} MiB)",
                self.at,
                WRITE_WINDOW_BYTES >> 20
            ));
        }
        // One group in flight (E7): only the damaged record's own group can stand behind it.
        if !self.prepared && self.group_mark.is_some_and(|mark| mark != group_mark) {
            return corruption(format!(
                "record {seq} at byte {} belongs to a later group, and this segment has one write at a time",
                self.at
            ));
        }
        self.group_mark = Some(group_mark);
        Ok(())
    }

    fn verdict(&self) -> Tail {
        let torn = self.found_to > self.cut || self.torn_block;
        let erase_to = if torn { round_up_to_block(self.found_to.max(self.cut + 1)) } else { self.cut };
        Tail {
            next_seq: self.damaged_seq,
            cut: self.cut,
            erase_to: erase_to.min(self.segment_bytes),
            heads_behind: self.heads_behind,
        }
    }
}

#[cfg(test)]
#[path = "recovery_tests.rs"]
mod tests;
