//! Recent frames of all logs of a shard, decoded and checked, in a bounded amount of memory.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use super::frame::{FrameHead, Payload};
use super::LogRecord;

/// A decoded frame.
#[derive(Clone, Debug)]
pub struct CachedFrame {
    base_offset: u64,
    time_ms: u64,
    payload: Payload,
}

impl CachedFrame {
    pub fn new(head: &FrameHead, payload: Payload) -> CachedFrame {
        CachedFrame { base_offset: head.base_offset, time_ms: head.time_ms, payload }
    }

    fn end(&self) -> u64 {
        self.base_offset + u64::from(self.payload.records())
    }
}

/// Neighbouring frames that lie in one allocation: they are kept and dropped together, so that the bound counts what
/// is really held.
#[derive(Debug)]
pub struct Extent {
    /// Ascending, without gaps, never empty.
    frames: Vec<CachedFrame>,
    bytes: usize,
    touched: Cell<bool>,
}

impl Extent {
    /// `bytes` is what the allocations behind the frames take.
    pub fn new(frames: Vec<CachedFrame>, bytes: usize) -> Extent {
        assert!(!frames.is_empty(), "an extent holds at least the frame that was asked for");
        Extent { frames, bytes, touched: Cell::new(false) }
    }

    pub fn first_offset(&self) -> u64 {
        self.frames[0].base_offset
    }

    pub fn end_offset(&self) -> u64 {
        self.frames.last().map_or(0, CachedFrame::end)
    }

    fn holds(&self, offset: u64) -> bool {
        self.first_offset() <= offset && offset < self.end_offset()
    }

    pub fn record(&self, offset: u64) -> Option<LogRecord> {
        let index = self.frames.partition_point(|frame| frame.base_offset <= offset).checked_sub(1)?;
        let frame = &self.frames[index];
        if offset >= frame.end() {
            return None;
        }
        let (body, key_bytes) = frame.payload.record((offset - frame.base_offset) as u32);
        Some(LogRecord { offset, timestamp_ms: frame.time_ms, body, key_bytes })
    }
}

type Key = (u64, u64);

#[derive(Default)]
struct Held {
    /// By log and first offset.
    extents: BTreeMap<Key, Rc<Extent>>,
    /// Eviction order; an extent that was read since it came up last gets a second turn.
    turns: VecDeque<Key>,
    /// What was found last, and of which log: most reads go on where the one before ended.
    last: Option<(u64, Rc<Extent>)>,
    bytes: usize,
}

/// Bounded in bytes, shared by all logs of a shard.
pub struct FrameCache {
    bytes_max: usize,
    held: RefCell<Held>,
}

impl FrameCache {
    pub fn new(bytes_max: usize) -> FrameCache {
        FrameCache { bytes_max, held: RefCell::default() }
    }

    pub fn bytes_max(&self) -> usize {
        self.bytes_max
    }

    pub fn bytes(&self) -> usize {
        self.held.borrow().bytes
    }

    /// The extent of `log` that holds `offset`.
    pub fn get(&self, log: u64, offset: u64) -> Option<Rc<Extent>> {
        let mut held = self.held.borrow_mut();
        if let Some((_, extent)) = held.last.as_ref().filter(|(of, extent)| *of == log && extent.holds(offset)) {
            let extent = extent.clone();
            extent.touched.set(true);
            return Some(extent);
        }
        let found = held.extents.range((log, 0)..=(log, offset)).next_back().map(|(_, extent)| extent.clone());
        let found = found.filter(|extent| extent.holds(offset));
        if let Some(extent) = &found {
            extent.touched.set(true);
            held.last = Some((log, extent.clone()));
        }
        found
    }

    /// Keeps an extent, and lets older ones go until the bound holds. One too large for the cache is not kept.
    pub fn put(&self, log: u64, extent: Rc<Extent>) {
        if extent.bytes > self.bytes_max / 2 {
            return;
        }
        let mut held = self.held.borrow_mut();
        let key = (log, extent.first_offset());
        held.bytes += extent.bytes;
        held.last = None; // it may be among those that go
        match held.extents.insert(key, extent) {
            Some(replaced) => held.bytes -= replaced.bytes,
            None => held.turns.push_back(key),
        }
        while held.bytes > self.bytes_max {
            let Some(key) = held.turns.pop_front() else { return };
            let Some(extent) = held.extents.get(&key) else { continue };
            if extent.touched.replace(false) {
                held.turns.push_back(key);
            } else if let Some(evicted) = held.extents.remove(&key) {
                held.bytes -= evicted.bytes;
            }
        }
    }

    /// Forgets extents of `log` that begin in `first..until`.
    pub fn forget(&self, log: u64, first: u64, until: u64) {
        let mut held = self.held.borrow_mut();
        held.last = None;
        let gone: Vec<Key> = held.extents.range((log, first)..(log, until)).map(|(key, _)| *key).collect();
        for key in &gone {
            if let Some(extent) = held.extents.remove(key) {
                held.bytes -= extent.bytes;
            }
        }
        if !gone.is_empty() {
            held.turns.retain(|key| key.0 != log || key.1 < first || key.1 >= until);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::Slice;
    use crate::log::frame::FrameCodec;

    fn extent(base: u64, bytes: usize) -> Rc<Extent> {
        let mut decoded = vec![0; 9];
        decoded[0] = 1;
        decoded[8] = base as u8;
        let head = FrameHead {
            codec: FrameCodec::None,
            records: 1,
            base_offset: base,
            commit_first: base,
            time_ms: 1,
            decoded_bytes: 9,
            stored_bytes: 9,
            payload_crc: 0,
        };
        let payload = Payload::parse(Slice::copy_from(&decoded), 1).expect("one record of one byte");
        Rc::new(Extent::new(vec![CachedFrame::new(&head, payload)], bytes))
    }

    #[test]
    fn the_bound_counts_bytes_and_spares_what_was_read() {
        let cache = FrameCache::new(1000);
        for base in 0..10 {
            cache.put(1, extent(base, 100));
        }
        assert!(cache.get(1, 0).is_some());
        cache.put(1, extent(10, 100));
        assert_eq!(cache.bytes(), 1000);
        assert!(cache.get(1, 0).is_some(), "read since its last turn");
        assert!(cache.get(1, 1).is_none(), "the oldest that nobody read");
        cache.put(1, extent(99, 501));
        assert!(cache.get(1, 99).is_none(), "larger than half the cache");
    }

    #[test]
    fn lookups_do_not_cross_logs_or_extents() {
        let cache = FrameCache::new(1000);
        cache.put(1, extent(5, 100));
        cache.put(2, extent(7, 100));
        assert!(cache.get(1, 4).is_none() && cache.get(1, 6).is_none() && cache.get(2, 5).is_none());
        assert_eq!(cache.get(1, 5).and_then(|e| e.record(5)).map(|r| r.body[0]), Some(5));
        cache.forget(1, 0, u64::MAX);
        assert!(cache.get(1, 5).is_none() && cache.get(2, 7).is_some());
        assert_eq!(cache.bytes(), 100);
    }

    #[test]
    fn replacing_an_extent_counts_it_once() {
        let cache = FrameCache::new(1000);
        cache.put(1, extent(5, 100));
        cache.put(1, extent(5, 200));
        assert_eq!(cache.bytes(), 200);
    }
}
