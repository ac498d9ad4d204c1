//! Walks the frames of a segment through a window of bytes that the caller supplies. Pure: recovery and reads share it.

use super::frame::{FrameHead, FRAME_ALIGNMENT, HEAD_BYTES, MAGIC_BYTES};

/// Bytes that hold no valid frame, with one behind them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hole {
    /// Position of its first byte: the end of the last frame before it.
    pub from: u64,
    /// Offset that was due there.
    pub expected: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Call again with a window that covers these bytes.
    Need { from: u64, bytes: usize },
    /// A frame whose checks hold. `hole` is what had to be passed over to find it.
    Frame { at: u64, head: FrameHead, hole: Option<Hole> },
    /// No further frame. `from` is the end of the last one; bytes other than zero lie between it and `dirty_until`.
    End { from: u64, dirty_until: u64 },
}

/// Position of a walk. Accepts a frame only if it is of the segment's generation, begins at or above the offset that
/// is due (S60a), and passes both its CRCs. After bytes that are no frame it looks for the next one on every sixteenth
/// byte (S57), also inside what a damaged head claims as its payload: a head may never shadow frames (lesson N4).
#[derive(Debug)]
pub struct Scanner {
    generation: u64,
    at: u64,
    end: u64,
    expected: u64,
    hole: Option<Hole>,
    dirty_until: u64,
    newer_at: Option<u64>,
}

impl Scanner {
    /// Walks from position `at`, where offset `expected` is due, to position `end`.
    pub fn new(generation: u64, at: u64, expected: u64, end: u64) -> Scanner {
        debug_assert!(at.is_multiple_of(FRAME_ALIGNMENT as u64));
        Scanner { generation, at, end, expected, hole: None, dirty_until: at, newer_at: None }
    }

    /// First offset that no frame passed so far holds.
    pub fn expected(&self) -> u64 {
        self.expected
    }

    /// Where the first frame lies that only a newer release can read, among what was passed over.
    pub fn newer_at(&self) -> Option<u64> {
        self.newer_at
    }

    /// Takes one step through `window`, whose first byte lies at `window_at`.
    pub fn step(&mut self, window_at: u64, window: &[u8]) -> Step {
        loop {
            let left = self.end.saturating_sub(self.at);
            if left == 0 {
                let from = self.hole.map_or(self.at, |hole| hole.from);
                return Step::End { from, dirty_until: self.dirty_until };
            }
            let look = left.min(HEAD_BYTES as u64) as usize;
            let Some(bytes) = slice_at(window_at, window, self.at, look) else {
                return Step::Need { from: self.at, bytes: look };
            };
            if bytes.starts_with(&MAGIC_BYTES) {
                match self.frame_at(window_at, window, bytes, left) {
                    Found::Frame(head) => return self.accept(head),
                    Found::Need(bytes) => return Step::Need { from: self.at, bytes },
                    Found::Nothing if FrameHead::is_newer(bytes, self.generation) => {
                        self.newer_at.get_or_insert(self.at);
                    }
                    Found::Nothing => {}
                }
            }
            self.pass_over(window_at, window);
        }
    }

    fn frame_at(&self, window_at: u64, window: &[u8], bytes: &[u8], left: u64) -> Found {
        match FrameHead::decode(bytes, self.generation, left) {
            Some(head) if head.base_offset >= self.expected => {
                let Some(whole) = slice_at(window_at, window, self.at, head.checked_bytes()) else {
                    return Found::Need(head.checked_bytes());
                };
                if head.payload_matches(&whole[HEAD_BYTES..]) {
                    Found::Frame(head)
                } else {
                    Found::Nothing
                }
            }
            _ => Found::Nothing,
        }
    }

    fn accept(&mut self, head: FrameHead) -> Step {
        let at = self.at;
        let skipped = head.base_offset > self.expected;
        let hole = self.hole.take().or(skipped.then_some(Hole { from: at, expected: self.expected }));
        self.at = (at + head.total_bytes() as u64).min(self.end);
        self.expected = head.next_offset();
        self.dirty_until = self.at;
        Step::Frame { at, head, hole }
    }

    /// Moves to the next place in the window where a frame may start.
    fn pass_over(&mut self, window_at: u64, window: &[u8]) {
        self.hole.get_or_insert(Hole { from: self.at, expected: self.expected });
        let window_end = window_at + window.len() as u64;
        loop {
            let step = (self.end - self.at).min(FRAME_ALIGNMENT as u64);
            let chunk = slice_at(window_at, window, self.at, step as usize).unwrap_or(&[]);
            let zeros = match <[u8; FRAME_ALIGNMENT]>::try_from(chunk) {
                Ok(whole) => u128::from_ne_bytes(whole) == 0,
                Err(_) => chunk.iter().all(|b| *b == 0),
            };
            if !zeros {
                self.dirty_until = self.at + step;
            }
            self.at += step;
            if self.at >= self.end || self.at + FRAME_ALIGNMENT as u64 > window_end {
                return;
            }
            if slice_at(window_at, window, self.at, MAGIC_BYTES.len()) == Some(&MAGIC_BYTES) {
                return;
            }
        }
    }
}

enum Found {
    Frame(FrameHead),
    Need(usize),
    Nothing,
}

fn slice_at(window_at: u64, window: &[u8], at: u64, bytes: usize) -> Option<&[u8]> {
    let start = usize::try_from(at.checked_sub(window_at)?).ok()?;
    window.get(start..start.checked_add(bytes)?)
}
