//! Reading: cache, then the frame on disk, checked on every load.

use std::io;
use std::rc::Rc;

use super::cache::{CachedFrame, Extent};
use super::frame::{FrameCodec, FrameHead, Payload, FRAME_BYTES, HEAD_BYTES};
use super::partition::{PartitionLog, Phase, State};
use super::scan::{Scanner, Step};
use super::segment::{self, SegmentHeader, DATA_START};
use super::{LogRecord, ReadError};
use crate::io::{is_shortage, AlignedBuf, Caching, File, Open, Slice, ALIGNMENT};
use crate::rt;

const BLOCK: u64 = ALIGNMENT as u64;
/// What one read takes, unless a single frame needs more.
const READ_BYTES: u64 = 128 << 10;
/// Sealed segments that keep their descriptor and index (S86).
const HOT_SEGMENTS: usize = 2;

/// The part of a segment to walk for an offset.
struct Source {
    base: u64,
    file: File,
    generation: u64,
    /// A frame at or before the offset, and the offset that it begins with.
    from: u64,
    expected: u64,
    /// Where the committed data ends, and the offset that is due there.
    end: u64,
    end_offset: u64,
    /// Last, partly filled block of the active segment: taken from memory, since the block on disk may be under write
    /// or torn by a failed one (E15).
    tail: Option<(u64, Rc<[u8]>)>,
}

struct Window {
    at: u64,
    bytes: Slice,
}

/// Where a read goes.
enum Place {
    Open(Source),
    /// A sealed segment whose file is not open.
    Cold {
        base: u64,
        end_offset: u64,
    },
}

/// What a walk found.
enum Found {
    Extent(Rc<Extent>),
    /// No valid frame holds the offset: what is lost around it.
    Gap(u64, u64),
}

impl PartitionLog {
    /// Reads up to `max` records from `offset` on, ended by the record that crosses `bytes_max` (C90), by the high
    /// watermark, or by a record that cannot be read. At least one record, or the reason why there is none.
    pub async fn read(&self, offset: u64, max: usize, bytes_max: usize) -> Result<Vec<LogRecord>, ReadError> {
        let mut records = Vec::new();
        let (mut next, mut bytes) = (offset, 0);
        while records.len() < max.max(1) && bytes < bytes_max.max(1) {
            let extent = match self.extent(next).await {
                Ok(extent) => extent,
                Err(error) if records.is_empty() => return Err(error),
                Err(_) => break,
            };
            let until = extent.end_offset().min(self.high_watermark());
            while next < until && records.len() < max.max(1) && bytes < bytes_max.max(1) {
                let Some(record) = extent.record(next) else { break };
                bytes += record.body.len();
                records.push(record);
                next += 1;
            }
        }
        Ok(records)
    }

    pub(super) async fn read_one(&self, offset: u64) -> Result<LogRecord, ReadError> {
        self.extent(offset).await?.record(offset).ok_or(ReadError::Unreadable)
    }

    /// The answer, when it takes no disk read.
    pub(super) fn read_cached(&self, offset: u64) -> Option<Result<LogRecord, ReadError>> {
        match self.look_up(offset) {
            Ok(Some(extent)) => extent.record(offset).map(Ok),
            Ok(None) => None,
            Err(error) => Some(Err(error)),
        }
    }

    async fn extent(&self, offset: u64) -> Result<Rc<Extent>, ReadError> {
        let mut damaged_once = false;
        loop {
            if let Some(extent) = self.look_up(offset)? {
                return Ok(extent);
            }
            let found = match self.place(offset)? {
                Place::Open(source) => self.walk(&source, offset).await,
                Place::Cold { base, end_offset } => match self.warm(base).await {
                    Ok(true) => continue,
                    Ok(false) => Ok(Found::Gap(base, end_offset)),
                    Err(error) => Err(error),
                },
            };
            if self.inner.state.borrow().phase != Phase::Open {
                return Err(ReadError::Closed);
            }
            match found {
                Ok(Found::Extent(extent)) => {
                    self.inner.shared.cache.put(self.inner.id, extent.clone());
                    return Ok(extent);
                }
                // A second look: the medium may have erred once, and giving records up is for good.
                Ok(Found::Gap(..)) if !damaged_once => damaged_once = true,
                Ok(Found::Gap(start, end)) => {
                    self.lose(start, end, offset);
                    return Err(ReadError::Unreadable);
                }
                Err(error) => {
                    let (dir, text) = (self.inner.dir.display(), error.to_string());
                    tracing::warn!(%dir, offset, error = %text, "partition log: read failed");
                    let text = format!("reading offset {offset} in {dir} failed: {text}");
                    return Err(if is_shortage(&error) { ReadError::Short(text) } else { ReadError::Io(text) });
                }
            }
        }
    }

    fn look_up(&self, offset: u64) -> Result<Option<Rc<Extent>>, ReadError> {
        let mut state = self.inner.state.borrow_mut();
        state.read_since_commit = true;
        readable(&state, offset)?;
        Ok(self.inner.shared.cache.get(self.inner.id, offset))
    }

    fn place(&self, offset: u64) -> Result<Place, ReadError> {
        let mut guard = self.inner.state.borrow_mut();
        let state = &mut *guard;
        readable(state, offset)?;
        state.reads += 1;
        if let Some(active) = state.active.as_ref().filter(|active| active.base <= offset) {
            let (expected, from) = active.index.floor(offset).unwrap_or((active.base, DATA_START));
            return Ok(Place::Open(Source {
                base: active.base,
                file: active.file.clone(),
                generation: active.generation,
                from,
                expected,
                end: active.data_end,
                end_offset: state.next_offset,
                tail: (!active.tail.is_empty()).then(|| (active.tail_at(), active.tail.clone())),
            }));
        }
        let index = state.sealed.partition_point(|segment| segment.base <= offset) - 1;
        let after = state.active.as_ref().map_or(state.next_offset, |active| active.base);
        let end_offset = state.sealed.get(index + 1).map_or(after, |next| next.base);
        let reads = state.reads;
        let segment = &mut state.sealed[index];
        segment.read_at = reads;
        let base = segment.base;
        let Some((file, generation)) = segment.opened.clone() else { return Ok(Place::Cold { base, end_offset }) };
        let (expected, from) = segment.index.floor(offset).unwrap_or((base, DATA_START));
        let end = segment.bytes / BLOCK * BLOCK;
        Ok(Place::Open(Source { base, file, generation, from, expected, end, end_offset, tail: None }))
    }

    /// Opens a sealed segment; `false` when it can never be read: its header is damaged, or the file is gone.
    async fn warm(&self, base: u64) -> io::Result<bool> {
        let path = self.inner.dir.join(segment::file_name(base));
        let file = match self.inner.disk.open(&path, Open::Existing, Caching::Direct).await {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            opened => opened?,
        };
        let bytes = file.len().await?;
        if bytes < DATA_START {
            return Ok(false);
        }
        let block = file.read_at(0, ALIGNMENT).await?;
        let header = SegmentHeader::decode(&block).filter(|header| header.base_offset == base);
        let Some(header) = header else { return Ok(false) };
        let mut state = self.inner.state.borrow_mut();
        let found = state.sealed.binary_search_by_key(&base, |segment| segment.base);
        if let Ok(index) = found {
            state.sealed[index].opened = Some((file, header.generation));
            state.sealed[index].bytes = bytes;
            cool(&mut state);
        }
        Ok(true)
    }

    /// Notes for good that records are lost, so that consumers step over them at once.
    fn lose(&self, start: u64, end: u64, offset: u64) {
        let mut state = self.inner.state.borrow_mut();
        state.metrics.damage_found += 1;
        state.add_gap(start.min(offset), end.max(offset + 1));
        tracing::error!(dir = %self.inner.dir.display(), first = start, until = end,
            "partition log: records cannot be read any more; they are skipped for good");
    }

    /// Walks from the nearest known frame to the one that holds `offset`, and takes its neighbours in the same read
    /// along.
    async fn walk(&self, source: &Source, offset: u64) -> io::Result<Found> {
        let mut scanner = Scanner::new(source.generation, source.from, source.expected, source.end);
        let mut window = Window { at: 0, bytes: Slice::empty() };
        let mut noted = Vec::new();
        let found = loop {
            let expected = scanner.expected();
            match scanner.step(window.at, &window.bytes) {
                Step::Need { from, bytes } => window = self.window(source, from, bytes).await?,
                Step::End { .. } => break Found::Gap(expected, source.end_offset),
                Step::Frame { head, .. } if head.base_offset > offset => {
                    break Found::Gap(expected, head.base_offset.min(source.end_offset))
                }
                Step::Frame { at, head, .. } => {
                    noted.push((head.base_offset, at));
                    if offset < head.next_offset() {
                        match self.take(source, &mut scanner, &window, (at, head), &mut noted).await {
                            Some(extent) => break Found::Extent(Rc::new(extent)),
                            None => break Found::Gap(head.base_offset, head.next_offset()),
                        }
                    }
                }
            }
        };
        let mut state = self.inner.state.borrow_mut();
        let index = match state.active.as_mut() {
            Some(active) if active.base == source.base => Some(&mut active.index),
            _ => {
                let at = state.sealed.binary_search_by_key(&source.base, |segment| segment.base);
                at.ok().and_then(|at| state.sealed.get_mut(at)).map(|segment| &mut segment.index)
            }
        };
        if let Some(index) = index {
            noted.iter().for_each(|(offset, at)| index.note(*offset, *at));
        }
        Ok(found)
    }

    /// The frame at `at`, and those behind it that the window holds whole, as long as they need no decoding.
    async fn take(
        &self,
        source: &Source,
        scanner: &mut Scanner,
        window: &Window,
        (at, head): (u64, FrameHead),
        noted: &mut Vec<(u64, u64)>,
    ) -> Option<Extent> {
        if head.codec == FrameCodec::Zstd {
            let decoded = decompress(stored(window, at, &head), head.decoded_bytes as usize).await?;
            let bytes = decoded.allocation_bytes();
            return Some(Extent::new(vec![CachedFrame::new(&head, Payload::parse(decoded, head.records)?)], bytes));
        }
        let mut frames = vec![CachedFrame::new(&head, Payload::parse(stored(window, at, &head), head.records)?)];
        while let Step::Frame { at, head, hole: None } = scanner.step(window.at, &window.bytes) {
            if head.codec == FrameCodec::Zstd || head.base_offset >= source.end_offset {
                break;
            }
            let Some(payload) = Payload::parse(stored(window, at, &head), head.records) else { break };
            noted.push((head.base_offset, at));
            frames.push(CachedFrame::new(&head, payload));
        }
        Some(Extent::new(frames, window.bytes.allocation_bytes()))
    }

    async fn window(&self, source: &Source, from: u64, bytes: usize) -> io::Result<Window> {
        let at = from / BLOCK * BLOCK;
        let end = source.end.next_multiple_of(BLOCK);
        let until = (from + bytes as u64).next_multiple_of(BLOCK).max(at + READ_BYTES).min(end);
        let length = (until - at) as usize;
        let tail = source.tail.as_ref().filter(|(tail_at, _)| *tail_at < until);
        let read = match tail {
            Some((tail_at, _)) if *tail_at <= at => AlignedBuf::zeroed(length).freeze(),
            _ => {
                self.inner.state.borrow_mut().metrics.disk_reads += 1;
                source.file.read_at(at, length).await?
            }
        };
        let Some((tail_at, tail)) = tail else { return Ok(Window { at, bytes: read }) };
        let mut whole = read.try_into_mut().unwrap_or_else(|shared| {
            let mut copy = AlignedBuf::reused(shared.len());
            copy[..shared.len()].copy_from_slice(&shared);
            copy.truncate(shared.len());
            copy
        });
        let start = (tail_at - at) as usize;
        whole[start..start + tail.len()].copy_from_slice(tail);
        Ok(Window { at, bytes: whole.freeze() })
    }
}

fn readable(state: &State, offset: u64) -> Result<(), ReadError> {
    let oldest = state.oldest();
    if state.phase != Phase::Open {
        Err(ReadError::Closed)
    } else if offset >= state.high_watermark {
        Err(ReadError::PastEnd)
    } else if offset < oldest {
        Err(ReadError::AgedOut { oldest })
    } else if state.gap_end(offset).is_some() {
        Err(ReadError::Unreadable)
    } else {
        Ok(())
    }
}

/// Takes descriptor and index from all sealed segments but the most recently read ones.
pub(super) fn cool(state: &mut State) {
    let mut hot: Vec<u64> = state.sealed.iter().filter(|s| s.opened.is_some()).map(|s| s.read_at).collect();
    if hot.len() <= HOT_SEGMENTS {
        return;
    }
    hot.sort_unstable_by(|a, b| b.cmp(a));
    let bound = hot[HOT_SEGMENTS - 1];
    for segment in state.sealed.iter_mut().filter(|segment| segment.read_at < bound) {
        segment.opened = None;
        segment.index = segment::SparseIndex::default();
    }
}

fn stored(window: &Window, at: u64, head: &FrameHead) -> Slice {
    let start = (at - window.at) as usize;
    window.bytes.slice(start + HEAD_BYTES..start + head.checked_bytes())
}

/// `None` when the frame's checked bytes do not expand to what its head says.
async fn decompress(stored: Slice, decoded_bytes: usize) -> Option<Slice> {
    if decoded_bytes <= FRAME_BYTES {
        expand(&stored, decoded_bytes)
    } else {
        rt::blocking(move || expand(&stored, decoded_bytes)).await
    }
}

pub(super) fn expand(stored: &[u8], decoded_bytes: usize) -> Option<Slice> {
    let mut decoded = AlignedBuf::reused(decoded_bytes);
    let bytes = zstd::bulk::decompress_to_buffer(stored, &mut decoded[..decoded_bytes]).ok()?;
    decoded.truncate(decoded_bytes);
    (bytes == decoded_bytes).then(|| decoded.freeze())
}
