//! Opening a log: find its segments, recover the last one, settle the boundary.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::frame::FrameHead;
use super::partition::{Active, HwmFile, Inner, PartitionLog, Phase, Sealed, State};
use super::recovery::{Progress, Recovery, Verdict};
use super::retention::Retention;
use super::segment::{self, SegmentHeader, SparseIndex, DATA_START, FIRST_STEP_BYTES};
use super::shared::LogShared;
use super::{hwm, stored, LogMetrics, LogOptions};
use crate::io::{is_shortage, AlignedBuf, Caching, Disk, Entry, File, Open, Slice, ALIGNMENT};
use crate::rt::sync::Lock;
use crate::rt::{self, Queue};

const BLOCK: u64 = ALIGNMENT as u64;
/// How much of the segment one read of the recovery scan takes.
const SCAN_BYTES: u64 = 1 << 20;

/// Why a partition is not served. Concerns that partition alone (S54, S59).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OpenError {
    /// The disk refused; opening again may work.
    Io(String),
    /// No descriptor or memory was left to open it with: it works again when there is.
    Short(String),
    /// The files contradict each other or are not ours: a person has to look.
    Damaged(String),
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OpenError::Io(cause) | OpenError::Short(cause) | OpenError::Damaged(cause) => f.write_str(cause),
        }
    }
}

impl std::error::Error for OpenError {}

fn failed(what: &str, path: &Path, error: &io::Error) -> OpenError {
    let text = format!("cannot {what} {}: {error}", path.display());
    if is_shortage(error) {
        OpenError::Short(text)
    } else {
        OpenError::Io(text)
    }
}

/// To cut or skip what a newer release wrote would destroy it (lesson N58).
fn newer(path: &Path, what: &str) -> OpenError {
    OpenError::Damaged(format!(
        "{}: {what} was written by a newer release and is unknown to this one; run that release. The file was left as \
         it is",
        path.display()
    ))
}

/// What a directory holds of a log.
struct Listing {
    dir_exists: bool,
    /// Base offset and length, ascending.
    segments: Vec<(u64, u64)>,
    hwm: HwmFile,
    /// The boundary file was emptied, which is done before a first record is shown (S48).
    advanced: bool,
    /// [`stored`] says that there was a segment.
    marked: bool,
}

impl Listing {
    /// What proves that records were stored, if anything does but the segments.
    fn proof(&self, dir: &Path) -> Option<PathBuf> {
        match (self.advanced, self.marked) {
            (true, _) => Some(dir.join(hwm::FILE_NAME)),
            (false, true) => Some(stored::path(dir)),
            (false, false) => None,
        }
    }
}

/// Records were stored, and their files are gone: to begin again would give their offsets out a second time (S27).
fn lost(dir: &Path, proof: &Path, what: &str) -> OpenError {
    OpenError::Damaged(format!(
        "{} proves that records were stored, but {what}: they are lost, and their offsets are not given out again. \
         Restore {}; or, to start empty at offset 0, move it and {} away",
        proof.display(),
        dir.display(),
        stored::path(dir).display()
    ))
}

/// The exact boundary of a log that nobody has open, if its directory states one without opening it (S52, S53).
/// `Ok(None)`: open the log to learn it.
pub async fn closed_boundary(disk: &Disk, dir: &Path) -> Result<Option<u64>, OpenError> {
    let listing = list(disk, dir).await?;
    Ok(match listing.hwm {
        HwmFile::Found(boundary) => boundary,
        _ if listing.segments.is_empty() && listing.proof(dir).is_none() => Some(0),
        _ => None,
    })
}

async fn list(disk: &Disk, dir: &Path) -> Result<Listing, OpenError> {
    let marked = stored::is_marked(disk, dir).await.map_err(|e| failed("look for", &stored::path(dir), &e))?;
    let mut listing = Listing { dir_exists: true, segments: Vec::new(), hwm: HwmFile::Absent, advanced: false, marked };
    let entries: Vec<Entry> = match disk.list(dir).await {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            listing.dir_exists = false;
            return Ok(listing);
        }
        Err(error) => return Err(failed("list the partition directory", dir, &error)),
    };
    for entry in entries {
        let name = entry.name.to_string_lossy();
        if let Some(base) = segment::parse_file_name(&name) {
            listing.segments.push((base, entry.bytes));
        } else if name.ends_with(".log") {
            return Err(OpenError::Damaged(format!(
                "{} is not a segment of this log: nothing is ignored here, move the file away",
                dir.join(&entry.name).display()
            )));
        } else if name == hwm::FILE_NAME {
            let (boundary, advanced) = read_hwm(disk, dir, entry.bytes).await?;
            (listing.hwm, listing.advanced) = (HwmFile::Found(boundary), advanced);
        }
    }
    listing.segments.sort_unstable();
    Ok(listing)
}

/// The boundary that the file states, and whether it was emptied.
async fn read_hwm(disk: &Disk, dir: &Path, bytes: u64) -> Result<(Option<u64>, bool), OpenError> {
    if bytes == 0 {
        return Ok((None, false));
    }
    let path = dir.join(hwm::FILE_NAME);
    let boundary = if bytes == hwm::BYTES as u64 {
        let read = async { disk.open(&path, Open::Existing, Caching::Buffered).await?.read_at(0, hwm::BYTES).await };
        let content = read.await.map_err(|e| failed("read", &path, &e))?;
        if content[..] == hwm::EMPTY {
            return Ok((None, true)); // as the first commit after an open leaves it: an ordinary crash, no damage (S48)
        }
        hwm::decode(&content)
    } else {
        None
    };
    if boundary.is_none() {
        tracing::warn!(path = %path.display(), "partition log: boundary file is damaged; deriving it from the records");
    }
    Ok((boundary, false))
}

impl PartitionLog {
    /// Opens the log in `dir`, whose parent must exist once something is committed. A directory without segments, or
    /// none at all, is an empty log: the first commit makes both (S3, E1).
    ///
    /// Fails for this partition alone: `Io` when the disk refuses, `Damaged` when the files are not a log of ours.
    ///
    /// The caller sees to it that the directory's log is not open already. Dropping the future stops nothing: a cut
    /// that is on its way to the disk must have landed before anybody else works there, so opens of one directory take
    /// turns, in tasks of their own.
    pub async fn open(
        disk: &Disk,
        dir: &Path,
        options: LogOptions,
        shared: &Rc<LogShared>,
    ) -> Result<PartitionLog, OpenError> {
        let (disk, dir, shared) = (disk.clone(), dir.to_owned(), shared.clone());
        let opening = async move {
            let _turn = shared.turn_of(&dir).enter().await;
            PartitionLog::open_in_turn(&disk, &dir, options, &shared).await
        };
        rt::spawn(Queue::Background, opening).await
    }

    async fn open_in_turn(
        disk: &Disk,
        dir: &Path,
        options: LogOptions,
        shared: &Rc<LogShared>,
    ) -> Result<PartitionLog, OpenError> {
        let listing = list(disk, dir).await?;
        let mut options = options;
        options.segment_bytes = (options.segment_bytes / BLOCK * BLOCK).max(FIRST_STEP_BYTES);
        options.frame_bytes = options.frame_bytes.max(1);
        let retention = Retention::new(options.retention_ms);
        let log = PartitionLog {
            inner: Rc::new(Inner {
                disk: disk.clone(),
                dir: dir.to_owned(),
                options,
                shared: shared.clone(),
                id: shared.name_log(),
                section: Lock::default(),
                retention,
                state: RefCell::new(State {
                    phase: Phase::Open,
                    counted: Some(shared.count_open()),
                    poison: None,
                    fill_failed_at: None,
                    fill_failure_told_at: None,
                    sealed: VecDeque::new(),
                    active: None,
                    next_offset: 0,
                    roll_owed: false,
                    at_close: None,
                    high_watermark: 0,
                    dir_exists: listing.dir_exists,
                    marked: listing.marked,
                    hwm_file: listing.hwm,
                    time_floor_ms: 0,
                    gaps: BTreeMap::new(),
                    read_since_commit: false,
                    oldest_first_ms: None,
                    on_visible: None,
                    commit_bytes: 0,
                    reads: 0,
                    metrics: LogMetrics::default(),
                    trim: None,
                }),
            }),
        };
        log.recover(&listing).await?;
        Ok(log)
    }

    async fn recover(&self, listing: &Listing) -> Result<(), OpenError> {
        let boundary = match listing.hwm {
            HwmFile::Found(boundary) => boundary,
            HwmFile::Absent | HwmFile::Emptied => None,
        };
        let Some((&(last, _), sealed)) = listing.segments.split_last() else {
            return match boundary {
                Some(lost) if lost > 0 => Err(OpenError::Damaged(format!(
                    "{} says that {lost} records were stored, but there is no segment: the log's files are lost; \
                     restore the whole data directory from one backup; or, to go on without them, move the directory and {} away",
                    self.inner.dir.join(hwm::FILE_NAME).display(),
                    stored::path(&self.inner.dir).display()
                ))),
                _ => match listing.proof(&self.inner.dir) {
                    Some(proof) => Err(lost(&self.inner.dir, &proof, "there is no segment")),
                    None => Ok(()),
                },
            };
        };
        self.adopt_sealed(sealed, last);
        match self.open_last(last).await? {
            Some((file, header)) => self.recover_last(file, header, listing, boundary.unwrap_or(0), sealed).await?,
            None => match boundary {
                Some(boundary) if boundary > last => {
                    return Err(OpenError::Damaged(format!(
                        "{} says that records up to {boundary} were stored, but {} is empty: the records are lost; \
                         restore the file; or, to start empty, move the directory and {} away",
                        self.inner.dir.join(hwm::FILE_NAME).display(),
                        segment::file_name(last),
                        stored::path(&self.inner.dir).display()
                    )));
                }
                _ => {
                    let dir = &self.inner.dir;
                    if let Some(proof) = listing.proof(dir).filter(|_| sealed.is_empty()) {
                        return Err(lost(dir, &proof, &format!("{} is empty", segment::file_name(last))));
                    }
                    if !sealed.is_empty() {
                        tracing::warn!(path = %dir.join(segment::file_name(last)).display(), next_offset = last,
                            "partition log: the newest segment is empty, as a crash leaves one that is being made; if it \
                             held records, they are lost, and their offsets will be used again");
                    }
                    self.inner.state.borrow_mut().next_offset = last;
                }
            },
        }
        {
            let mut state = self.inner.state.borrow_mut();
            state.high_watermark = boundary.map_or(state.next_offset, |boundary| boundary.min(state.next_offset));
        }
        if !listing.marked && self.inner.state.borrow().active.is_some() {
            // Made by a release that made no marks, or by a process that died before it did.
            match stored::mark(&self.inner.disk, &self.inner.dir).await {
                Ok(()) => self.inner.state.borrow_mut().marked = true,
                Err(error) => tracing::warn!(path = %stored::path(&self.inner.dir).display(), %error,
                    "partition log: could not be marked as in use; its loss while the broker is down would not be noticed"),
            }
        }
        self.date_oldest().await;
        Ok(())
    }

    /// Sealed segments are taken as the listing shows them: each ends where the next begins (S18, S58).
    fn adopt_sealed(&self, sealed: &[(u64, u64)], last: u64) {
        let mut state = self.inner.state.borrow_mut();
        for &(base, bytes) in sealed {
            state.sealed.push_back(Sealed {
                base,
                bytes,
                last_ms: None,
                opened: None,
                index: SparseIndex::default(),
                read_at: 0,
            });
        }
        if let Some(&(oldest, _)) = sealed.first() {
            tracing::debug!(dir = %self.inner.dir.display(), oldest, last, "partition log: sealed segments adopted");
        }
    }

    /// The last segment's file and header; `None` for one whose creation a crash interrupted: it never held a record.
    async fn open_last(&self, base: u64) -> Result<Option<(File, SegmentHeader)>, OpenError> {
        let path = self.inner.dir.join(segment::file_name(base));
        let opened = self.inner.disk.open(&path, Open::Existing, Caching::Direct).await;
        let file = opened.map_err(|e| failed("open", &path, &e))?;
        let mut bytes = file.len().await.map_err(|e| failed("measure", &path, &e))?;
        if bytes % BLOCK != 0 {
            // Not ours: we only ever have whole blocks. Completed with zeros, what is there can be read and judged.
            bytes = bytes.next_multiple_of(BLOCK);
            file.set_len(bytes).await.map_err(|e| failed("extend", &path, &e))?;
        }
        let header = match bytes {
            0 => None,
            _ => {
                let block = file.read_at(0, ALIGNMENT).await.map_err(|e| failed("read", &path, &e))?;
                if let Some(format) = SegmentHeader::foreign_format(&block) {
                    return Err(newer(&path, &format!("segment format {format}")));
                }
                SegmentHeader::decode(&block)
            }
        };
        let Some(header) = header else {
            if bytes <= FIRST_STEP_BYTES
                && self.holds_nothing(&file, bytes).await.map_err(|e| failed("read", &path, &e))?
            {
                return Ok(None);
            }
            return Err(OpenError::Damaged(format!(
                "{}: both copies of the segment header are damaged, or this is no segment; its records cannot be \
                 told from garbage. Restore the file, or move the partition directory away",
                path.display()
            )));
        };
        if header.base_offset != base {
            return Err(OpenError::Damaged(format!(
                "{} starts with offset {} by its header: it was renamed or belongs elsewhere; put the right file back",
                path.display(),
                header.base_offset
            )));
        }
        Ok(Some((file, header)))
    }

    async fn holds_nothing(&self, file: &File, bytes: u64) -> io::Result<bool> {
        if bytes <= DATA_START {
            return Ok(true);
        }
        let data = file.read_at(DATA_START, (bytes - DATA_START) as usize).await?;
        Ok(data.iter().all(|b| *b == 0))
    }

    async fn recover_last(
        &self,
        file: File,
        header: SegmentHeader,
        listing: &Listing,
        known_synced: u64,
        sealed: &[(u64, u64)],
    ) -> Result<(), OpenError> {
        let path = self.inner.dir.join(segment::file_name(header.base_offset));
        // Nothing that the scan finds may be taken back by a power cut once it is shown (S47, lesson N2).
        file.sync_data().await.map_err(|e| failed("sync", &path, &e))?;
        let end = file.len().await.map_err(|e| failed("measure", &path, &e))? / BLOCK * BLOCK;
        let verdict = scan(&file, &header, end, known_synced).await.map_err(|e| failed("read", &path, &e))?;
        if let Some(at) = verdict.newer_at {
            return Err(newer(&path, &format!("the record frame at byte {at}")));
        }
        let first_of_all = header.base_offset == 0 && sealed.is_empty();
        if first_of_all && listing.advanced && verdict.next_offset == 0 {
            let proof = self.inner.dir.join(hwm::FILE_NAME);
            let what = format!("{} holds none that can be read", segment::file_name(0));
            return Err(lost(&self.inner.dir, &proof, &what));
        }
        let length = listing.segments.last().map_or(end, |(_, bytes)| *bytes);
        // A boundary says exactly what is missing.
        let short = known_synced == 0 && self.cut_short(length, end, &verdict, sealed.is_empty() && listing.marked);
        let tail_at = verdict.data_end / BLOCK * BLOCK;
        let tail: Rc<[u8]> = if verdict.data_end == tail_at {
            Rc::from([])
        } else {
            let block = file.read_at(tail_at, ALIGNMENT).await.map_err(|e| failed("read", &path, &e))?;
            Rc::from(&block[..(verdict.data_end - tail_at) as usize])
        };
        if verdict.proof_cut && known_synced == 0 {
            // A boundary that was found proves as much; what lies above one was never confirmed.
            self.note_boundary(verdict.next_offset).await.map_err(|e| failed("note the tail of", &path, &e))?;
        }
        if let Some((_, until)) = verdict.cut {
            zero_out(&file, tail_at, &tail, until).await.map_err(|e| failed("cut the torn tail of", &path, &e))?;
        }
        if verdict.data_end == DATA_START {
            // A crash may have come between its making and the syncing of its name, on which no answer may depend (E1).
            let dir = &self.inner.dir;
            self.inner.disk.sync_dir(dir).await.map_err(|e| failed("sync", dir, &e))?;
        }
        self.report(&path, &verdict);
        if short {
            self.inner.state.borrow_mut().metrics.damage_found += 1;
            tracing::error!(path = %path.display(), bytes = length, next_offset = verdict.next_offset,
                "partition log: the newest segment was cut short, not by this broker: records that were stored from this \
                 offset on, if any, are gone, and their offsets will be used again. Check the file system; restore the \
                 file if you can");
        }
        {
            let mut state = self.inner.state.borrow_mut();
            state.next_offset = verdict.next_offset;
            if let Some(sealed) = state.sealed.back_mut() {
                sealed.last_ms = Some(header.time_floor_ms).filter(|ms| *ms > 0);
            }
            state.time_floor_ms = header.time_floor_ms.max(verdict.last_ms.unwrap_or(0));
            for (start, gap_end) in &verdict.gaps {
                state.add_gap(*start, *gap_end);
            }
            state.active = Some(Active {
                base: header.base_offset,
                generation: header.generation,
                file,
                claimed: end.max(DATA_START),
                data_end: verdict.data_end,
                tail,
                index: verdict.index,
                first_ms: verdict.first_ms,
                last_ms: verdict.last_ms,
                fill: None,
            });
        }
        self.trim_predecessor(&header, sealed).await;
        Ok(())
    }

    /// Whether the file is shorter than a log leaves it, also at a power cut. Space is claimed in whole first steps and
    /// ahead of the data, the first one together with the header.
    fn cut_short(&self, length: u64, end: u64, verdict: &Verdict, first_step_durable: bool) -> bool {
        let whole_steps = length.is_multiple_of(FIRST_STEP_BYTES) || length == self.inner.options.segment_bytes;
        if whole_steps {
            return false;
        }
        let used = verdict.cut.map_or(verdict.data_end, |(_, until)| until.max(verdict.data_end));
        let below_first_step = length < FIRST_STEP_BYTES && (used > DATA_START || first_step_durable);
        below_first_step || used + BLOCK >= end
    }

    fn report(&self, path: &Path, verdict: &Verdict) {
        let path = path.display();
        let mut state = self.inner.state.borrow_mut();
        for (start, end) in &verdict.gaps {
            state.metrics.damage_found += 1;
            tracing::error!(%path, first = start, until = end,
                "partition log: records were stored here and cannot be read any more; they are skipped for good");
        }
        if let Some((first, until)) = verdict.lost_tail {
            state.metrics.damage_found += 1;
            tracing::error!(%path, first, until,
                "partition log: the newest records were stored here and are gone; their offsets will be used again");
        }
        if let Some((from, until)) = verdict.cut {
            state.metrics.torn_bytes_cut += until - from;
            tracing::info!(%path, from, until, frames = verdict.frames_cut,
                "partition log: cut what an interrupted commit left");
        }
    }

    /// A crash between a roll and the trimming of the sealed segment left its unused space claimed.
    async fn trim_predecessor(&self, header: &SegmentHeader, sealed: &[(u64, u64)]) {
        let Some(&(base, bytes)) = sealed.last() else { return };
        let data = header.previous_bytes.next_multiple_of(BLOCK);
        if header.previous_base != base || header.previous_bytes < DATA_START || bytes <= data {
            return;
        }
        let path = self.inner.dir.join(segment::file_name(base));
        let trimmed = async {
            let file = self.inner.disk.open(&path, Open::Existing, Caching::Direct).await?;
            file.set_len(data).await?;
            file.sync_data().await
        };
        match trimmed.await {
            Ok(()) => {
                if let Some(segment) = self.inner.state.borrow_mut().sealed.back_mut() {
                    segment.bytes = data;
                }
            }
            Err(error) => tracing::warn!(path = %path.display(), %error,
                "partition log: unused space of a sealed segment stays claimed"),
        }
    }

    /// Reads the first commit time of the oldest segment, if it is a sealed one. Unknown when that is unreadable.
    pub(super) async fn date_oldest(&self) {
        let oldest = self.inner.state.borrow().sealed.front().map(|segment| segment.base);
        let Some(base) = oldest else { return };
        let path = self.inner.dir.join(segment::file_name(base));
        let front = async {
            let file = self.inner.disk.open(&path, Open::Existing, Caching::Direct).await?;
            file.read_at(0, 2 * ALIGNMENT).await
        };
        let first_ms = front.await.ok().and_then(|front| {
            let header = SegmentHeader::decode(&front).filter(|header| header.base_offset == base)?;
            FrameHead::decode(&front[DATA_START as usize..], header.generation, u64::MAX).map(|head| head.time_ms)
        });
        self.inner.state.borrow_mut().oldest_first_ms = first_ms;
    }
}

async fn scan(file: &File, header: &SegmentHeader, end: u64, known_synced: u64) -> io::Result<Verdict> {
    let mut recovery = Recovery::new(header.generation, header.base_offset, end, known_synced);
    let (mut window_at, mut window) = (0, Slice::empty());
    loop {
        match recovery.step(window_at, &window) {
            Progress::Done(verdict) => return Ok(verdict),
            Progress::Need { from, bytes } => {
                window_at = from / BLOCK * BLOCK;
                let until = (from + bytes as u64).next_multiple_of(BLOCK).max(window_at + SCAN_BYTES).min(end);
                window = file.read_at(window_at, (until - window_at) as usize).await?;
            }
        }
    }
}

/// Zeroes everything behind `kept`, which lies at `at`, up to `until`, durably: what was there never parses again
/// (S37, S56).
pub(super) async fn zero_out(file: &File, at: u64, kept: &[u8], until: u64) -> io::Result<()> {
    let (mut from, mut kept) = (at, kept);
    let until = until.next_multiple_of(BLOCK);
    while from < until {
        let bytes = (until - from).min(SCAN_BYTES) as usize;
        let mut zeros = AlignedBuf::zeroed(bytes);
        zeros[..kept.len()].copy_from_slice(kept);
        kept = &[];
        zeros.truncate(bytes);
        file.write_durable_at(from, zeros.freeze()).await?;
        from += bytes as u64;
    }
    Ok(())
}
