//! One commit: encode, write durably, read back, check, show.

use std::fmt;
use std::rc::Rc;

use super::cache::{CachedFrame, Extent};
use super::frame::{self, FrameCodec, FrameHead, FramePlan, FRAME_BYTES, HEAD_BYTES};
use super::open::zero_out;
use super::partition::{HwmFile, PartitionLog, Phase};
use super::{hwm, Codec, LogLatencies};
use crate::histogram::coarse_histogram;
use crate::io::{AlignedBuf, Caching, File, Open, Slice, ALIGNMENT};
use crate::peer::Record;
use crate::rt;
use crate::rt::sync::LockGuard;

/// Bytes that may be copied and checked before other tasks get a turn: well under a millisecond.
const TURN_BYTES: usize = 1 << 20;

/// Why nothing of a run was committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AppendError {
    /// The log was closed or retired: resolve it again.
    Closed,
    Poisoned(String),
    /// Left nothing behind; trying again gives the same offsets (S34).
    Failed(String),
}

impl fmt::Display for AppendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AppendError::Closed => f.write_str("the log was closed"),
            AppendError::Poisoned(cause) | AppendError::Failed(cause) => f.write_str(cause),
        }
    }
}

/// A run on its way: where its blocks go, and what must be found there afterwards.
struct Prepared {
    file: File,
    generation: u64,
    /// Position of the first block, and the committed bytes at its start.
    block_at: u64,
    tail: Rc<[u8]>,
    /// The whole buffer; its first `bytes` are written.
    buffer: Slice,
    bytes: usize,
    /// Heads of the new frames, with their positions in the buffer.
    frames: Vec<(usize, FrameHead)>,
    /// Where the last frame ends in the buffer.
    end: usize,
    body_bytes: u64,
}

/// What came back from the device.
#[derive(Debug, PartialEq, Eq)]
enum ReadBack {
    Same,
    /// Only bytes of this commit are wrong: they can be cut.
    NewBytesDiffer(String),
    /// Bytes that were committed before have changed.
    OldBytesDiffer,
}

impl PartitionLog {
    /// Commits the records of `runs`, in order, as one run of contiguous offsets; returns the first. On success they
    /// are durable, were read back from the device and checked, and are visible. Runs to its end in whatever task
    /// awaits it: the combiner's own.
    pub(super) async fn append(&self, _held: &LockGuard, runs: &[&[Record]]) -> Result<u64, AppendError> {
        let result = self.append_checked(runs).await;
        let mut state = self.inner.state.borrow_mut();
        match &result {
            Ok(_) => state.metrics.commits += 1,
            Err(AppendError::Closed) => {}
            Err(_) => state.metrics.commits_failed += 1,
        }
        result
    }

    async fn append_checked(&self, runs: &[&[Record]]) -> Result<u64, AppendError> {
        self.writable()?;
        let plans = frame::plan(runs.iter().flat_map(|run| run.iter()), self.inner.options.frame_bytes);
        let most: usize = plans.iter().map(FramePlan::total_bytes).sum();
        if most == 0 {
            return Err(AppendError::Failed("a commit without records".into()));
        }
        let now_ms = rt::wall_clock_ms();
        self.make_room(most as u64, now_ms).await?;
        let prepared = self.encode(runs, &plans, most, now_ms).await?;
        let started = rt::now();
        if let Err(error) =
            prepared.file.write_durable_at(prepared.block_at, prepared.buffer.slice(0..prepared.bytes)).await
        {
            return Err(AppendError::Poisoned(self.poison(&format!("durable write failed: {error}")).to_string()));
        }
        let written = rt::now();
        let read = prepared.file.read_at(prepared.block_at, prepared.bytes).await;
        let found = match &read {
            Ok(read) => verify(&prepared, read).await,
            Err(error) => ReadBack::NewBytesDiffer(format!("reading it back failed: {error}")),
        };
        self.measure(written - started, rt::now() - written);
        if read.is_ok() && !matches!(found, ReadBack::Same) {
            self.inner.state.borrow_mut().metrics.read_back_mismatches += 1;
        }
        match found {
            ReadBack::Same => {}
            ReadBack::OldBytesDiffer => {
                let cause = format!("committed bytes at {} read back different", prepared.block_at);
                return Err(AppendError::Poisoned(self.poison(&cause).to_string()));
            }
            ReadBack::NewBytesDiffer(why) => return Err(self.discard(prepared, why).await),
        }
        if let Err(error) = self.empty_boundary().await {
            let why = format!("emptying {} failed: {error}", self.inner.dir.join(hwm::FILE_NAME).display());
            return Err(self.discard(prepared, why).await);
        }
        if self.inner.state.borrow().phase != Phase::Open {
            return Err(AppendError::Closed);
        }
        let base = self.advance(&prepared, read.ok());
        self.touch();
        self.fill_ahead();
        Ok(base)
    }

    fn writable(&self) -> Result<(), AppendError> {
        self.remind_of_poison();
        let state = self.inner.state.borrow();
        match (&state.poison, state.phase) {
            (_, Phase::Retired | Phase::Closed) => Err(AppendError::Closed),
            (Some(poison), Phase::Open) => Err(AppendError::Poisoned(poison.cause.to_string())),
            (None, Phase::Open) => Ok(()),
        }
    }

    async fn encode(
        &self,
        runs: &[&[Record]],
        plans: &[FramePlan],
        most: usize,
        now_ms: u64,
    ) -> Result<Prepared, AppendError> {
        let (file, generation, block_at, tail, first, time_ms) = {
            let state = self.inner.state.borrow();
            let active = state.active.as_ref().ok_or(AppendError::Closed)?;
            let time_ms = now_ms.max(state.time_floor_ms);
            (active.file.clone(), active.generation, active.tail_at(), active.tail.clone(), state.next_offset, time_ms)
        };
        let mut buffer = AlignedBuf::reused((tail.len() + most).next_multiple_of(ALIGNMENT));
        buffer[..tail.len()].copy_from_slice(&tail);
        let mut records = runs.iter().flat_map(|run| run.iter());
        let mut frames = Vec::with_capacity(plans.len());
        let (mut at, mut offset, mut since_turn, mut body_bytes) = (tail.len(), first, 0, 0);
        for plan in plans {
            let (head_bytes, rest) = buffer[at..at + plan.total_bytes()].split_at_mut(HEAD_BYTES);
            let stored = &mut rest[..plan.decoded_bytes];
            frame::encode_payload(plan, &mut records, stored);
            let (codec, stored_bytes) = self.compress(stored).await;
            let head = FrameHead {
                codec,
                records: plan.records,
                base_offset: offset,
                commit_first: first,
                time_ms,
                decoded_bytes: plan.decoded_bytes as u32,
                stored_bytes: stored_bytes as u32,
                payload_crc: crc32c::crc32c(&stored[..stored_bytes]),
            };
            head.encode(generation, head_bytes);
            let end = at + head.total_bytes();
            buffer[at + head.checked_bytes()..end].fill(0);
            frames.push((at, head));
            at = end;
            offset = head.next_offset();
            body_bytes += (plan.decoded_bytes - plan.records as usize * frame::ENVELOPE_BYTES) as u64;
            since_turn += plan.decoded_bytes;
            if since_turn >= TURN_BYTES {
                since_turn = 0;
                rt::yield_now().await;
            }
        }
        let bytes = at.next_multiple_of(ALIGNMENT);
        buffer[at..bytes].fill(0);
        Ok(Prepared { file, generation, block_at, tail, buffer: buffer.freeze(), bytes, frames, end: at, body_bytes })
    }

    /// Compresses a payload in place where that makes it shorter. Large ones go to the blocking pool.
    async fn compress(&self, payload: &mut [u8]) -> (FrameCodec, usize) {
        let Codec::Zstd(level) = self.inner.options.codec else { return (FrameCodec::None, payload.len()) };
        let mut decoded = payload.to_vec();
        let shorter = payload.len().saturating_sub(1);
        let compressed = if decoded.len() <= FRAME_BYTES {
            self.inner.shared.compress(level, &decoded, &mut payload[..shorter])
        } else {
            let compressed = rt::blocking(move || {
                let compressed = zstd::bulk::compress(&decoded, level);
                (decoded, compressed)
            });
            let result;
            (decoded, result) = compressed.await;
            result.ok().filter(|bytes| bytes.len() <= shorter).map(|bytes| {
                payload[..bytes.len()].copy_from_slice(&bytes);
                bytes.len()
            })
        };
        match compressed {
            Some(bytes) => (FrameCodec::Zstd, bytes),
            None => {
                payload.copy_from_slice(&decoded); // the attempt may have overwritten it
                (FrameCodec::None, payload.len())
            }
        }
    }

    /// Takes a commit back whose bytes are on the disk but were not confirmed: what it wrote is zeroed durably, so
    /// that no frame of it is ever found again (S33, S37). Where that fails, the log is poisoned (S43).
    async fn discard(&self, prepared: Prepared, why: String) -> AppendError {
        let until = prepared.block_at + prepared.bytes as u64;
        let cut = async {
            zero_out(&prepared.file, prepared.block_at, &prepared.tail, until).await?;
            prepared.file.read_at(prepared.block_at, prepared.bytes).await
        };
        let tail = &prepared.tail;
        match cut.await {
            Ok(read) if read[..tail.len()] == tail[..] && all_zero(&read[tail.len()..]) => {
                tracing::warn!(dir = %self.inner.dir.display(), %why, "partition log: commit taken back");
                AppendError::Failed(format!("{why}; the commit was taken back"))
            }
            Ok(_) => {
                let cause = format!("{why}, and the cut reads back different");
                AppendError::Poisoned(self.poison(&cause).to_string())
            }
            Err(error) => {
                let cause = format!("{why}, and cutting it failed: {error}");
                AppendError::Poisoned(self.poison(&cause).to_string())
            }
        }
    }

    /// Before the first advance of this open: the boundary file must never state less than what is visible (S48).
    async fn empty_boundary(&self) -> std::io::Result<()> {
        if !matches!(self.inner.state.borrow().hwm_file, HwmFile::Found(_)) {
            return Ok(());
        }
        let started = rt::now();
        let path = self.inner.dir.join(hwm::FILE_NAME);
        let emptied = async {
            let file = self.inner.disk.open(&path, Open::Create, Caching::Buffered).await?;
            file.write_durable_at(0, Slice::copy_from(&hwm::EMPTY)).await
        };
        self.measure_boundary(started, emptied.await)?;
        self.inner.state.borrow_mut().hwm_file = HwmFile::Emptied;
        Ok(())
    }

    /// Shows a checked run: moves the high watermark and tells whoever waits (S30, S96).
    fn advance(&self, prepared: &Prepared, read_back: Option<Slice>) -> u64 {
        let base = prepared.frames[0].1.base_offset;
        let records: u64 = prepared.frames.iter().map(|(_, head)| u64::from(head.records)).sum();
        let (announce, admit) = {
            let mut guard = self.inner.state.borrow_mut();
            let state = &mut *guard;
            state.next_offset = base + records;
            state.high_watermark = state.next_offset;
            let time_ms = prepared.frames[0].1.time_ms;
            state.time_floor_ms = time_ms;
            state.metrics.records += records;
            state.metrics.body_bytes += prepared.body_bytes;
            state.metrics.written_bytes += prepared.bytes as u64;
            state.commit_bytes = state.commit_bytes - state.commit_bytes / 8 + prepared.bytes as u64 / 8;
            if let Some(active) = state.active.as_mut() {
                active.data_end = prepared.block_at + prepared.end as u64;
                let tail_from = prepared.end / ALIGNMENT * ALIGNMENT;
                active.tail = Rc::from(&prepared.buffer[tail_from..prepared.end]);
                for (at, head) in &prepared.frames {
                    active.index.note(head.base_offset, prepared.block_at + *at as u64);
                }
                active.first_ms = active.first_ms.or(Some(time_ms));
                active.last_ms = Some(time_ms);
            }
            (state.on_visible.clone(), std::mem::take(&mut state.read_since_commit))
        };
        if let (true, Some(read_back)) = (admit, read_back) {
            self.admit(&prepared.frames, read_back);
        }
        if let Some(announce) = announce {
            announce();
        }
        base
    }

    /// Keeps the frames of a commit for its tail readers, out of the buffer that they were checked in (S91).
    fn admit(&self, frames: &[(usize, FrameHead)], read_back: Slice) {
        let bytes = read_back.allocation_bytes();
        if bytes > self.inner.shared.cache.bytes_max() / 4 {
            return;
        }
        let plain = frames.iter().map_while(|(at, head)| {
            let stored = at + HEAD_BYTES..at + head.checked_bytes();
            let plain = matches!(head.codec, FrameCodec::None);
            plain
                .then(|| frame::Payload::parse(read_back.slice(stored), head.records))?
                .map(|p| CachedFrame::new(head, p))
        });
        let cached: Vec<CachedFrame> = plain.collect();
        if !cached.is_empty() {
            self.inner.shared.cache.put(self.inner.id, Rc::new(Extent::new(cached, bytes)));
        }
    }

    fn measure(&self, write: std::time::Duration, read_back: std::time::Duration) {
        let mut state = self.inner.state.borrow_mut();
        let latencies = state.metrics.latencies.get_or_insert_with(|| {
            Box::new(LogLatencies { durable_write_us: coarse_histogram(), read_back_us: coarse_histogram() })
        });
        crate::histogram::record(&mut latencies.durable_write_us, write.as_micros() as u64);
        crate::histogram::record(&mut latencies.read_back_us, read_back.as_micros() as u64);
    }
}

/// Checks what the device holds against what was meant: the committed bytes of the first block, every CRC, and the
/// zeros behind the last frame.
async fn verify(prepared: &Prepared, read: &[u8]) -> ReadBack {
    if read[..prepared.tail.len()] != prepared.tail[..] {
        return ReadBack::OldBytesDiffer;
    }
    let mut since_turn = 0;
    for (at, meant) in &prepared.frames {
        let found = FrameHead::decode(&read[*at..], prepared.generation, (read.len() - at) as u64);
        let whole =
            found.as_ref() == Some(meant) && meant.payload_matches(&read[at + HEAD_BYTES..at + meant.checked_bytes()]);
        if !whole {
            let position = prepared.block_at + *at as u64;
            return ReadBack::NewBytesDiffer(format!("the frame at {position} read back different"));
        }
        since_turn += meant.checked_bytes();
        if since_turn >= TURN_BYTES {
            since_turn = 0;
            rt::yield_now().await;
        }
    }
    if !all_zero(&read[prepared.end..]) {
        return ReadBack::NewBytesDiffer("the padding read back different".into());
    }
    ReadBack::Same
}

/// By whole blocks, which are compared many bytes at a time: a lone record's padding is most of what is read back.
fn all_zero(bytes: &[u8]) -> bool {
    const ZEROS: [u8; ALIGNMENT] = [0; ALIGNMENT];
    bytes.chunks(ALIGNMENT).all(|chunk| *chunk == ZEROS[..chunk.len()])
}
