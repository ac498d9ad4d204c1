//! Opening a WAL directory: look, judge, mend, and only then go on. What is judged is decided by the pure parts
//! (`recovery`, `checkpoint`); this file reads for them and carries out their verdicts.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::ahead::Ahead;
use super::checkpoint::{self, Checkpoint, Note, Start, CHECKPOINT_BYTES};
use super::frame::{round_up_to_block, BLOCK_BYTES};
use super::header::{Header, HeaderFault, State as SegmentState};
use super::keeper::CheckpointState;
use super::recovery::{Depth, Scan, Step, Tail, Walk, Window};
use super::segment::{file_name, file_number, Folder, Segment, Unpaced};
use super::staging::Staging;
use super::{flush, Inner, Mode, State, Wal, WalMetrics, WalOpenError, WalOptions};
use crate::io::{Caching, Entry, File, Open, Slice};
use crate::rt::{self, Instant, Queue};

struct Found {
    /// Active segments, by first sequence number.
    chain: VecDeque<Rc<Segment>>,
    spares: VecDeque<Rc<Segment>>,
    /// Files without a header: preparations that never ended, or what somebody emptied.
    blanks: Vec<Blank>,
    next_number: u64,
    /// The largest sequence number that a spare's header says was not yet given out.
    floor: u64,
}

struct Blank {
    path: PathBuf,
    number: u64,
}

impl Found {
    /// A file without a header that is no interrupted preparation, which always has the highest number.
    fn emptied(&self) -> Option<&Blank> {
        self.blanks.iter().find(|blank| blank.number + 1 < self.next_number)
    }
}

pub(super) async fn open(options: WalOptions) -> Result<Wal, WalOpenError> {
    let WalOptions { disk, dir, dir_number, store_id, segment_bytes, staging_bytes_max, fill, mode } = options;
    let folder = Folder { disk, dir, dir_number, store_id };
    if mode == Mode::Active {
        make_dir(&folder).await?;
    }
    let mut found = look(&folder).await?;
    let (checkpoint_file, stored) = open_checkpoint(&folder).await?;

    let oldest = found.chain.front().map_or(found.floor, |segment| segment.first_seq.get());
    let (end, torn_bytes_cut) = recover(&folder, &found, stored.unwrap_or(oldest)).await?;
    let start = begin(&folder, &found, stored, oldest, end)?;
    for blank in std::mem::take(&mut found.blanks) {
        tracing::info!(path = %blank.path.display(), "removing a WAL segment file without content, as an interrupted preparation leaves it");
        folder.remove(&blank.path).await.map_err(WalOpenError::io(&blank.path, "remove"))?;
    }
    if stored != Some(start.dispatch_from) {
        write_checkpoint(&folder, &checkpoint_file, start.dispatch_from).await?;
    }
    if mode == Mode::Active {
        settle(&folder, &mut found, segment_bytes, start).await?;
    }

    let target = if mode == Mode::Active { found.chain.back().cloned() } else { None };
    let inner = Rc::new(Inner {
        folder,
        mode,
        segment_bytes,
        fill,
        checkpoint_file,
        state: RefCell::new(State {
            staging: Staging::new(staging_bytes_max, target, start.next_seq),
            chain: found.chain,
            spares: found.spares,
            next_number: found.next_number,
            preparing: false,
            prepare_not_before: Instant::default(),
            hold_off: None,
            latched: None,
            broken: false,
            closing: false,
            flusher_ended: mode == Mode::Drain,
            rotate: false,
            rotation_armed: false,
            last_append: rt::now(),
            checkpoint: CheckpointState::recovered(start.dispatch_from),
            checkpoint_failed: None,
            on_latched: Vec::new(),
            topics: Default::default(),
            metrics: WalMetrics { torn_bytes_cut, ..WalMetrics::default() },
        }),
        wake_flusher: Default::default(),
        wake_keeper: Default::default(),
        durable: Default::default(),
        progress: Default::default(),
    });
    if mode == Mode::Active {
        rt::spawn(Queue::Foreground, flush::run(inner.clone()));
    }
    inner.keep();
    Ok(Wal { inner })
}

async fn make_dir(folder: &Folder) -> Result<(), WalOpenError> {
    let dir = folder.dir.as_path();
    // E1: outermost first, each name durable before anything is built in it.
    for made in [dir.parent(), Some(dir)].into_iter().flatten() {
        folder.disk.create_dir(made).await.map_err(WalOpenError::io(made, "create"))?;
        if let Some(parent) = made.parent() {
            folder.disk.sync_dir(parent).await.map_err(WalOpenError::io(parent, "sync"))?;
        }
    }
    Ok(())
}

/// Reads every segment's header. Changes nothing.
async fn look(folder: &Folder) -> Result<Found, WalOpenError> {
    let Folder { disk, dir, .. } = folder;
    // What we see must stay: names that a dead process made may not be durable yet.
    disk.sync_dir(dir).await.map_err(WalOpenError::io(dir, "sync"))?;
    let mut found =
        Found { chain: VecDeque::new(), spares: VecDeque::new(), blanks: Vec::new(), next_number: 1, floor: 1 };
    let mut chain: Vec<Rc<Segment>> = Vec::new();
    for entry in disk.list(dir).await.map_err(WalOpenError::io(dir, "list"))? {
        let path = dir.join(&entry.name);
        let Some(number) = entry.name.to_str().filter(|_| !entry.directory).and_then(file_number) else {
            if entry.name != "checkpoint" {
                tracing::warn!(path = %path.display(), "the ingress WAL directory holds something that is no part of it");
            }
            continue;
        };
        found.next_number = found.next_number.max(number + 1);
        let file = disk.open(&path, Open::Existing, Caching::Direct).await.map_err(WalOpenError::io(&path, "open"))?;
        let Some(header) = read_header(folder, &path, &file, &entry).await? else {
            found.blanks.push(Blank { path, number });
            continue;
        };
        let segment = Rc::new(Segment::found(path, file, &header));
        match header.state {
            SegmentState::Active => chain.push(segment),
            SegmentState::Spare => {
                found.floor = found.floor.max(header.first_seq);
                found.spares.push_back(segment);
            }
        }
    }
    chain.sort_by_key(|segment| segment.first_seq.get());
    for pair in chain.windows(2) {
        if pair[0].first_seq == pair[1].first_seq {
            let why = format!("it begins with the same record as {}", pair[0].path.display());
            return Err(corrupt(&pair[1], 0, Some(pair[1].first_seq.get()), why));
        }
    }
    found.chain = chain.into();
    Ok(found)
}

async fn read_header(folder: &Folder, path: &Path, file: &File, entry: &Entry) -> Result<Option<Header>, WalOpenError> {
    let damaged =
        |why: &str| WalOpenError::Corrupt { path: path.to_owned(), offset: 0, seq: None, why: why.to_owned() };
    if entry.bytes < BLOCK_BYTES {
        return Ok(None);
    }
    let read = |at: u64| async move {
        file.read_at(at, BLOCK_BYTES as usize).await.map_err(WalOpenError::io(path, "read the header of"))
    };
    match Header::decode(&read(0).await?) {
        Ok(header) if header.store_id != folder.store_id => Err(WalOpenError::Foreign {
            path: path.to_owned(),
            why: "another data directory's store id is in it".into(),
        }),
        Ok(header) if header.dir_number != folder.dir_number => Err(WalOpenError::Foreign {
            path: path.to_owned(),
            why: format!("it belongs to WAL directory {}", header.dir_number),
        }),
        Ok(header) if entry.bytes < header.segment_bytes => Err(damaged("the file is shorter than its header says")),
        Ok(header) => Ok(Some(header)),
        Err(HeaderFault::Blank) => {
            // Were it a segment whose header was lost, its first record would stand here.
            if entry.bytes >= 2 * BLOCK_BYTES && read(BLOCK_BYTES).await?.iter().any(|byte| *byte != 0) {
                return Err(damaged("its header is all zeros although there are records behind it"));
            }
            Ok(None)
        }
        Err(HeaderFault::Invalid) => Err(damaged("its header does not verify")),
        Err(HeaderFault::UnknownFormat(format)) => {
            Err(WalOpenError::UnknownFormat { path: path.to_owned(), offset: 0, format })
        }
    }
}

/// The checkpoint's file, and its value if it has one that verifies, synced before anything is compacted behind it.
async fn open_checkpoint(folder: &Folder) -> Result<(File, Option<u64>), WalOpenError> {
    let path = folder.dir.join("checkpoint");
    let file = folder.disk.open(&path, Open::Create, Caching::Buffered).await;
    let file = file.map_err(WalOpenError::io(&path, "open"))?;
    file.sync_data().await.map_err(WalOpenError::io(&path, "sync"))?;
    let bytes = file.len().await.map_err(WalOpenError::io(&path, "measure"))?;
    if bytes == 0 {
        return Ok((file, None));
    }
    let record = if bytes < CHECKPOINT_BYTES as u64 {
        Slice::empty()
    } else {
        file.read_at(0, CHECKPOINT_BYTES).await.map_err(WalOpenError::io(&path, "read"))?
    };
    match Checkpoint::decode(&record, folder.store_id, folder.dir_number) {
        Ok(checkpoint) => Ok((file, Some(checkpoint.seq))),
        Err(why) => {
            tracing::warn!(path = %path.display(), why, "the ingress dispatch checkpoint does not verify and counts as none");
            Ok((file, None))
        }
    }
}

async fn write_checkpoint(folder: &Folder, file: &File, seq: u64) -> Result<(), WalOpenError> {
    let path = folder.dir.join("checkpoint");
    let record = Checkpoint { store_id: folder.store_id, dir_number: folder.dir_number, seq }.encode();
    file.write_at(0, record).await.map_err(WalOpenError::io(&path, "write"))?;
    file.sync_data().await.map_err(WalOpenError::io(&path, "sync"))?;
    folder.disk.sync_dir(&folder.dir).await.map_err(WalOpenError::io(&folder.dir, "sync"))
}

/// Verifies every segment that dispatch still needs, cuts the torn tail of the last one, and returns the sequence
/// number behind the last record, and the bytes that were cut.
async fn recover(folder: &Folder, found: &Found, dispatch_from: u64) -> Result<(u64, u64), WalOpenError> {
    let chain = &found.chain;
    let Some(last) = chain.back() else { return Ok((1, 0)) };
    for (segment, successor) in chain.iter().zip(chain.iter().skip(1)) {
        let end = successor.first_seq.get();
        if end <= dispatch_from {
            segment.tail.set(segment.bytes); // dispatched: its content no longer matters
            continue;
        }
        let walk = follow(segment, end).await?;
        if walk.next_seq < end {
            let mut why = format!("it must hold every record up to {}, where its successor begins", end - 1);
            if let Some(blank) = found.emptied() {
                why += &format!("; {} has no content, and may have held what is missing", blank.path.display());
            }
            return Err(corrupt(segment, walk.at, Some(walk.next_seq), why));
        }
        segment.tail.set(round_up_to_block(walk.at));
    }
    // N2: nothing may be dispatched that the dead process wrote but a power cut would still take.
    let file = last.open_file().map_err(WalOpenError::io(&last.path, "open"))?;
    file.sync_data().await.map_err(WalOpenError::io(&last.path, "sync"))?;
    let walk = follow(last, u64::MAX).await?;
    let tail = judge(last, &walk).await?;
    if tail.erase_to > tail.cut {
        tracing::warn!(
            path = %last.path.display(),
            offset = tail.cut,
            next_seq = tail.next_seq,
            bytes = tail.erase_to - tail.cut,
            records_behind = tail.heads_behind,
            "cutting the tail of the ingress WAL behind its last whole record, as writes in flight leave it when a node \
             dies. If the drive lost or changed a write that it had confirmed, answered records of the last writes were \
             among these bytes, and are lost"
        );
        folder.erase(last, tail.cut, tail.erase_to).await.map_err(WalOpenError::io(&last.path, "cut"))?;
    }
    last.tail.set(round_up_to_block(tail.cut));
    Ok((tail.next_seq, tail.erase_to - tail.cut))
}

/// Walks a segment to record `end` or as far as it goes.
async fn follow(segment: &Segment, end: u64) -> Result<Walk, WalOpenError> {
    let mut walk = Walk::new(segment.generation, segment.bytes, BLOCK_BYTES, segment.first_seq.get());
    let mut ahead = Ahead::new(segment, walk.at)?;
    let mut piece = ahead.window(walk.at).await?;
    while walk.next_seq < end {
        let window = Window { base: piece.0, bytes: &piece.1 };
        match walk.step(window, Depth::Whole) {
            Step::Frame { offset, head } => segment.note(head.seq, offset),
            Step::More => piece = ahead.window(walk.at).await?,
            Step::Stop => break,
            Step::UnknownFormat { offset, format } => {
                return Err(WalOpenError::UnknownFormat { path: segment.path.clone(), offset, format: format.into() });
            }
        }
    }
    Ok(walk)
}

async fn judge(segment: &Segment, walk: &Walk) -> Result<Tail, WalOpenError> {
    let mut scan = Scan::new(walk, segment.prepared);
    let mut ahead = Ahead::new(segment, scan.at)?;
    loop {
        let (base, bytes) = ahead.window(scan.at).await?;
        match scan.step(Window { base, bytes: &bytes }) {
            Ok(None) => {}
            Ok(Some(tail)) => return Ok(tail),
            Err(damage) => return Err(corrupt(segment, damage.offset, Some(damage.seq), damage.why)),
        }
    }
}

/// Where dispatch starts and the next record goes; says so when that is not where one would expect, and refuses where
/// segments with records are missing.
fn begin(folder: &Folder, found: &Found, stored: Option<u64>, oldest: u64, end: u64) -> Result<Start, WalOpenError> {
    if found.chain.is_empty() {
        let next_seq = stored.unwrap_or(1).max(found.floor);
        if next_seq > 1 {
            // A directory of another life than its first always has an active segment.
            return Err(missing(folder, found, next_seq));
        }
        return Ok(Start { dispatch_from: next_seq, next_seq, note: Note::Plain });
    }
    let start = checkpoint::start(stored, oldest, end);
    let dir = folder.dir.display();
    match start.note {
        Note::Plain => {}
        Note::Absent => tracing::warn!(
            dir = %dir,
            oldest_segment = oldest,
            "no ingress dispatch checkpoint; dispatch starts at the oldest WAL segment, and delivers again what was \
             already delivered from there on"
        ),
        Note::Clamped { checkpoint } if found.emptied().is_some() => return Err(missing(folder, found, checkpoint)),
        Note::Clamped { checkpoint } => tracing::error!(
            dir = %dir,
            checkpoint,
            oldest_segment = oldest,
            "ingress dispatch checkpoint was below the oldest WAL segment; dispatch starts at that segment. If the drive \
             lost the checkpoint's last writes, nothing else is lost; if a segment was removed, so are its accepted \
             records, from the checkpoint up to the oldest segment"
        ),
        Note::Ahead { recovered_end } => tracing::warn!(
            dir = %dir,
            checkpoint = start.next_seq,
            recovered_end,
            "the ingress WAL ends below its dispatch checkpoint: the drive lost records that were dispatched \
             already; going on in a new segment at the checkpoint"
        ),
    }
    Ok(start)
}

/// Segments that must hold records from `seq` on are gone, or have no content.
fn missing(folder: &Folder, found: &Found, seq: u64) -> WalOpenError {
    let first = folder.dir.join(file_name(1));
    match found.emptied().or(found.blanks.last()) {
        Some(blank) => WalOpenError::Missing {
            path: blank.path.clone(),
            why: format!(
                "it has no content, although the directory has held records up to {} and more may follow",
                seq - 1
            ),
        },
        None => WalOpenError::Missing {
            path: folder.dir.clone(),
            why: format!(
                "it has held records up to {}, and there is no segment any more ({} or one of a higher number)",
                seq - 1,
                first.display()
            ),
        },
    }
}

/// Leaves an active segment that takes the next record, and only spares that can be used.
async fn settle(folder: &Folder, found: &mut Found, segment_bytes: u64, start: Start) -> Result<(), WalOpenError> {
    if matches!(start.note, Note::Ahead { .. }) {
        // Everything in them was dispatched. They go oldest first: beside a segment that begins above their end they
        // would look like a chain with a gap. The last one begins again, in one write: there is a segment at any time.
        while found.chain.len() > 1 {
            let Some(segment) = found.chain.pop_front() else { break };
            tracing::info!(path = %segment.path.display(), "removing a WAL segment whose records were all dispatched");
            folder.remove(&segment.path).await.map_err(WalOpenError::io(&segment.path, "remove"))?;
        }
        if let Some(last) = found.chain.pop_front() {
            let again = folder.restart(&last, start.next_seq).await.map_err(WalOpenError::io(&last.path, "restart"))?;
            found.chain.push_back(Rc::new(again));
        }
    }
    let (kept, odd) = std::mem::take(&mut found.spares).into_iter().partition(|spare| spare.bytes == segment_bytes);
    found.spares = kept;
    let mut odd: VecDeque<Rc<Segment>> = odd;
    odd.extend(found.spares.drain(found.spares.len().min(2)..));
    for spare in odd {
        tracing::info!(path = %spare.path.display(), "removing a spare WAL segment that is not needed");
        folder.remove(&spare.path).await.map_err(WalOpenError::io(&spare.path, "remove"))?;
    }
    if found.chain.is_empty() {
        let segment = match found.spares.pop_front() {
            Some(spare) => spare,
            None => {
                let segment = Rc::new(Segment::planned(folder, found.next_number, segment_bytes, true));
                found.next_number += 1;
                let made = folder.make(&segment, start.next_seq, &Unpaced).await;
                made.map_err(WalOpenError::io(&segment.path, "prepare"))?;
                segment
            }
        };
        let activated = folder.activate(&segment, start.next_seq).await;
        activated.map_err(WalOpenError::io(&segment.path, "activate"))?;
        found.chain.push_back(segment);
    }
    Ok(())
}

fn corrupt(segment: &Segment, offset: u64, seq: Option<u64>, why: String) -> WalOpenError {
    WalOpenError::Corrupt { path: segment.path.clone(), offset, seq, why }
}

/// Drained directories whose removal a crash interrupted: `<n>.drained` below `ingress`. Returns how many it removed.
pub(super) async fn remove_drained_remains(disk: &crate::io::Disk, ingress: &Path) -> io::Result<usize> {
    let mut removed = 0;
    let entries = match disk.list(ingress).await {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        entries => entries?,
    };
    for entry in entries.into_iter().filter(|entry| entry.directory) {
        if Path::new(&entry.name).extension().is_some_and(|extension| extension == "drained") {
            let path = ingress.join(&entry.name);
            tracing::info!(path = %path.display(), "removing a WAL directory whose records were all dispatched");
            match disk.remove_dir_all(&path).await {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {} // another shard was faster
                done => done?,
            }
            removed += 1;
        }
    }
    if removed > 0 {
        disk.sync_dir(ingress).await?;
    }
    Ok(removed)
}
