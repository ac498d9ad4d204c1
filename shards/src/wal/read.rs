//! What the dispatcher reads: from staging memory while it is there, from the segments otherwise.

use std::collections::HashSet;
use std::io;
use std::rc::Rc;

use super::frame::{Head, BLOCK_BYTES, CHUNK_BYTES, HEAD_BYTES};
use super::recovery::{Depth, Step, Walk, Window};
use super::segment::Segment;
use super::{Inner, ReadBack, ReadLimit, Source, Wal, WalRecord};
use crate::io::Slice;
use crate::peer::{copy_out, LocalBoxFuture, Record};
use crate::rt::sync::Notify;

const READ_BYTES_MIN: u64 = 256 << 10;
const READ_BYTES_MAX: u64 = 1 << 20;
/// Names kept before unused ones are looked for (lesson N27).
const TOPICS_KEPT: usize = 1024;

/// One allocation per topic, not per record.
#[derive(Default)]
pub(crate) struct Topics {
    names: HashSet<Rc<str>>,
    /// The one asked for last: neighbours in the log often share it.
    last: Option<Rc<str>>,
    sweep_at: usize,
}

impl Topics {
    pub fn name(&mut self, name: &str) -> Rc<str> {
        if let Some(last) = self.last.as_ref().filter(|last| &***last == name) {
            return last.clone();
        }
        let name = self.look_up(name);
        self.last = Some(name.clone());
        name
    }

    fn look_up(&mut self, name: &str) -> Rc<str> {
        if let Some(known) = self.names.get(name) {
            return known.clone();
        }
        if self.names.len() >= self.sweep_at.max(TOPICS_KEPT) {
            self.names.retain(|name| Rc::strong_count(name) > 1);
            self.sweep_at = self.names.len() * 2;
        }
        let name: Rc<str> = Rc::from(name);
        self.names.insert(name.clone());
        name
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.names.len()
    }
}

/// A record whose frame starts at `at` in `bytes`; `None` when its topic is not text.
fn record_at(topics: &mut Topics, head: &Head, bytes: &Slice, at: usize) -> Option<WalRecord> {
    let topic = std::str::from_utf8(&bytes[at + HEAD_BYTES..at + head.key_from()]).ok()?;
    Some(WalRecord {
        seq: head.seq,
        topic: topics.name(topic),
        incarnation: head.incarnation(),
        partition: head.partition,
        accepted_at_ms: head.accepted_at_ms,
        record: Record {
            body: bytes.slice(at + head.key_from()..at + head.length as usize),
            key_bytes: head.key_bytes,
        },
    })
}

/// Whether one more record of `bytes` goes beyond the limit. The first one never does.
fn is_full(records: &[WalRecord], bytes_taken: usize, bytes: usize, limit: ReadLimit) -> bool {
    !records.is_empty() && (records.len() >= limit.records_max || bytes_taken + bytes > limit.bytes_max)
}

impl Source for Wal {
    fn durable_next(&self) -> u64 {
        self.inner.state.borrow().staging.durable_next
    }

    fn oldest(&self) -> u64 {
        let state = self.inner.state.borrow();
        state.chain.front().map_or(state.staging.durable_next, |segment| segment.first_seq.get())
    }

    fn recovered_checkpoint(&self) -> u64 {
        self.inner.state.borrow().checkpoint.recovered
    }

    fn durable_advanced(&self) -> Notify {
        self.inner.durable.clone()
    }

    fn read_memory(&self, from: u64, limit: ReadLimit) -> Option<ReadBack> {
        let mut guard = self.inner.state.borrow_mut();
        let state = &mut *guard;
        let (staging, topics) = (&mut state.staging, &mut state.topics);
        let likely = staging.durable_next.saturating_sub(from).min(limit.records_max as u64) as usize;
        let (mut records, mut bytes_taken) = (Vec::with_capacity(likely), 0);
        let next = staging.take_held(from, |head, bytes, at| {
            let body_bytes = head.length as usize - head.key_from();
            if is_full(&records, bytes_taken, body_bytes, limit) {
                return false;
            }
            bytes_taken += body_bytes;
            let record = record_at(topics, head, bytes, at);
            records.push(record.expect("the topic was text when it was staged"));
            true
        })?;
        Some(ReadBack { records, next })
    }

    fn read_disk<'a>(
        &'a self,
        from: u64,
        until: u64,
        limit: ReadLimit,
        want: &'a dyn Fn(u64) -> bool,
    ) -> LocalBoxFuture<'a, io::Result<ReadBack>> {
        Box::pin(self.inner.read_disk(from, until, limit, want))
    }

    fn store_checkpoint(&self, seq: u64) {
        self.inner.store(seq);
    }

    fn staging_low(&self) -> bool {
        self.inner.state.borrow_mut().staging.memory_low()
    }
}

impl Inner {
    async fn read_disk(
        &self,
        from: u64,
        until: u64,
        limit: ReadLimit,
        want: &dyn Fn(u64) -> bool,
    ) -> io::Result<ReadBack> {
        let (segments, until) = {
            let state = self.state.borrow();
            (state.chain.iter().cloned().collect::<Vec<_>>(), until.min(state.staging.durable_next))
        };
        let oldest = segments.first().map_or(until, |segment| segment.first_seq.get());
        let mut reading = Reading { records: Vec::new(), bytes_taken: 0, next: from.max(oldest), limit };
        for (index, segment) in segments.iter().enumerate() {
            let end = segments.get(index + 1).map_or(until, |successor| successor.first_seq.get().min(until));
            if reading.next < end && !self.read_segment(segment, end, want, &mut reading).await? {
                break;
            }
        }
        self.state.borrow_mut().metrics.records_read_back += reading.records.len() as u64;
        Ok(ReadBack { records: reading.records, next: reading.next })
    }

    /// Reads up to `end`; false when the limit was reached first.
    async fn read_segment(
        &self,
        segment: &Segment,
        end: u64,
        want: &dyn Fn(u64) -> bool,
        reading: &mut Reading,
    ) -> io::Result<bool> {
        let file = segment.open_file()?;
        let (seq, at) = segment.locate(reading.next);
        let mut walk = Walk::new(segment.generation, segment.bytes, at, seq);
        let mut piece_bytes = READ_BYTES_MIN;
        let mut last_at = walk.at;
        while walk.next_seq < end {
            let base = walk.at / BLOCK_BYTES * BLOCK_BYTES;
            if base >= segment.bytes {
                return Err(unreadable(segment, &walk));
            }
            let piece = file.read_at(base, piece_bytes.min(segment.bytes - base) as usize).await?;
            let window = Window { base, bytes: &piece };
            let first_of_piece = reading.records.len();
            let mut full = false;
            while walk.next_seq < end {
                let wanted = walk.next_seq >= reading.next && want(walk.next_seq);
                let before = walk.clone();
                match walk.step(window, if wanted { Depth::Whole } else { Depth::Head }) {
                    Step::Frame { offset, head } if wanted => {
                        let body_bytes = head.length as usize - head.key_from();
                        if is_full(&reading.records, reading.bytes_taken, body_bytes, reading.limit) {
                            walk = before;
                            full = true;
                            break;
                        }
                        let at = (offset - base) as usize;
                        let record = record_at(&mut self.state.borrow_mut().topics, &head, &piece, at);
                        reading.records.push(record.ok_or_else(|| unreadable(segment, &before))?);
                        reading.bytes_taken += body_bytes;
                    }
                    Step::Frame { .. } => {}
                    Step::More => break,
                    Step::Stop | Step::UnknownFormat { .. } => return Err(unreadable(segment, &walk)),
                }
            }
            reading.next = reading.next.max(walk.next_seq);
            unpin(&mut reading.records[first_of_piece..], piece.len());
            if full {
                return Ok(false);
            }
            piece_bytes = (piece_bytes * 2).min(READ_BYTES_MAX);
            if std::mem::replace(&mut last_at, walk.at) == walk.at {
                piece_bytes = 2 * CHUNK_BYTES as u64; // the frame is longer than the piece was
            }
        }
        Ok(true)
    }
}

struct Reading {
    records: Vec<WalRecord>,
    bytes_taken: usize,
    /// First sequence number not looked at.
    next: u64,
    limit: ReadLimit,
}

/// Moves records into memory of their own when they are a small part of the piece that they would keep alive (E20).
fn unpin(records: &mut [WalRecord], piece_bytes: usize) {
    let bytes: usize = records.iter().map(|record| record.record.body.len()).sum();
    if bytes == 0 || bytes * 4 >= piece_bytes {
        return;
    }
    copy_out(records.iter_mut().map(|record| &mut record.record));
}

fn unreadable(segment: &Segment, walk: &Walk) -> io::Error {
    let path = segment.path.display();
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!(
            "ingress WAL record {} in {path}, near byte {}, no longer verifies: check the drive",
            walk.next_seq, walk.at
        ),
    )
}
