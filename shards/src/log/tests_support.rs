//! What the tests of the log share: records, segments built in memory, a gate whose answers the test sets.

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::frame::{self, FrameCodec, FrameHead, HEAD_BYTES};
use super::segment::{SegmentHeader, DATA_START};
use super::{Combiner, CommitGate, LogOptions, LogRecord, LogShared, PartitionLog, ReadError, Resolved, Standing};
use crate::io::sim::SimDisk;
use crate::io::{Caching, Disk, File, FillBudget, Open, Slice, ALIGNMENT};
use crate::meta::{Destination, Incarnation};
use crate::peer::{CommitBatch, CommitError, Committed, LocalBoxFuture, Record};

pub const LIVE: Incarnation = Incarnation(0xa11ce);

pub fn record(key: &str, payload: &str) -> Record {
    Record { body: Slice::copy_from(format!("{key}{payload}").as_bytes()), key_bytes: key.len() as u32 }
}

/// A record whose bytes follow from its number.
pub fn numbered(number: u64, bytes: usize) -> Record {
    let words =
        (1..8u64).map(|word| (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_mul(2 * word + 1).to_le_bytes());
    let mut body = words.flatten().collect::<Vec<u8>>().repeat(bytes / 56 + 1);
    body.truncate(bytes);
    Record { body: Slice::copy_from(&body), key_bytes: 0 }
}

pub fn batch(records: Vec<Record>) -> CommitBatch {
    CommitBatch {
        destination: Destination { incarnation: LIVE, partition: 0 },
        topic: Arc::from("orders"),
        accepted_under: Some(LIVE),
        records,
        budget: Duration::from_secs(30),
    }
}

/// A segment as a log would have written it, and where each frame lies.
pub struct Built {
    pub bytes: Vec<u8>,
    pub generation: u64,
    pub next_offset: u64,
    pub data_end: usize,
    /// Name, position, length, base offset.
    pub frames: Vec<(String, usize, usize, u64)>,
}

impl Built {
    pub fn new(base: u64, bytes: usize) -> Built {
        let generation = 0x5eed;
        let mut image = vec![0; bytes];
        SegmentHeader::new(generation, base, 0, None).encode(&mut image[..ALIGNMENT]).expect("fixed size");
        Built { bytes: image, generation, next_offset: base, data_end: DATA_START as usize, frames: Vec::new() }
    }

    /// Appends one commit of several frames, each with its name and records.
    pub fn commit(&mut self, frames: &[(&str, Vec<Record>)]) {
        let first = self.next_offset;
        for (name, records) in frames {
            let plans = frame::plan(records.iter(), frame::FRAME_BYTES);
            assert_eq!(plans.len(), 1, "one frame each");
            let plan = plans[0];
            let at = self.data_end;
            let (head_bytes, rest) = self.bytes[at..at + plan.total_bytes()].split_at_mut(HEAD_BYTES);
            let stored = &mut rest[..plan.decoded_bytes];
            frame::encode_payload(&plan, &mut records.iter(), stored);
            let head = FrameHead {
                codec: FrameCodec::None,
                records: plan.records,
                base_offset: self.next_offset,
                commit_first: first,
                time_ms: 1_000 + self.next_offset,
                decoded_bytes: plan.decoded_bytes as u32,
                stored_bytes: plan.decoded_bytes as u32,
                payload_crc: crc32c::crc32c(stored),
            };
            head.encode(self.generation, head_bytes);
            self.frames.push(((*name).to_owned(), at, plan.total_bytes(), self.next_offset));
            self.data_end += plan.total_bytes();
            self.next_offset = head.next_offset();
        }
    }

    pub fn frame(&self, name: &str) -> (usize, usize, u64) {
        let found = self.frames.iter().find(|frame| frame.0 == name);
        found.map(|frame| (frame.1, frame.2, frame.3)).unwrap_or_else(|| panic!("no frame {name}"))
    }
}

/// Answers as the test says.
pub struct TestGate {
    pub disk: Disk,
    pub dir: PathBuf,
    pub options: LogOptions,
    pub shared: Rc<LogShared>,
    pub standing: Cell<Standing>,
    pub log: RefCell<Option<PartitionLog>>,
    pub resolves: Cell<u32>,
    /// Runs at every resolve, before the answer.
    pub on_resolve: RefCell<Option<Box<dyn Fn()>>>,
}

impl CommitGate for Rc<TestGate> {
    fn standing(&self) -> Standing {
        self.standing.get()
    }

    fn resolve(&self) -> LocalBoxFuture<'static, Result<Resolved, CommitError>> {
        let gate = self.clone();
        Box::pin(async move {
            gate.resolves.set(gate.resolves.get() + 1);
            let Standing::Live { incarnation, version } = gate.standing.get() else {
                return Err(CommitError::NotOwner);
            };
            let open = gate.log.borrow().clone().filter(|log| !log.is_closed());
            let log = match open {
                Some(log) => log,
                None => PartitionLog::open(&gate.disk, &gate.dir, gate.options.clone(), &gate.shared)
                    .await
                    .map_err(|e| CommitError::Failed(e.to_string()))?,
            };
            *gate.log.borrow_mut() = Some(log.clone());
            if let Some(act) = &*gate.on_resolve.borrow() {
                act();
            }
            Ok(Resolved { log, incarnation, version })
        })
    }
}

/// One partition on a simulated disk.
#[derive(Clone)]
pub struct Bench {
    pub disk: Disk,
    pub device: SimDisk,
    pub gate: Rc<TestGate>,
    pub combiner: Combiner,
}

impl Bench {
    pub async fn new(device: SimDisk, options: LogOptions) -> Bench {
        let disk = Disk::Sim(device.clone());
        let made = async {
            disk.create_dir(Path::new("/topics")).await?;
            disk.sync_dir(Path::new("/")).await
        };
        made.await.unwrap_or_else(|e| panic!("making /topics: {e}"));
        let gate = Rc::new(TestGate {
            disk: disk.clone(),
            dir: PathBuf::from("/topics/p00000"),
            options,
            shared: LogShared::new(1 << 20, FillBudget::of_shard(1)),
            standing: Cell::new(Standing::Live { incarnation: LIVE, version: 1 }),
            log: RefCell::default(),
            resolves: Cell::new(0),
            on_resolve: RefCell::default(),
        });
        let combiner = Combiner::new(Rc::new(gate.clone()));
        Bench { disk, device, gate, combiner }
    }

    pub async fn open(&self) -> PartitionLog {
        let open = self.gate.log.borrow().clone().filter(|log| !log.is_closed());
        match open {
            Some(log) => log,
            None => {
                let log = self.try_open().await.unwrap_or_else(|e| panic!("{e}"));
                *self.gate.log.borrow_mut() = Some(log.clone());
                log
            }
        }
    }

    pub async fn try_open(&self) -> Result<PartitionLog, super::OpenError> {
        PartitionLog::open(&self.disk, &self.gate.dir, self.gate.options.clone(), &self.gate.shared).await
    }

    /// Forgets the open log without closing it, as a killed process would, and opens it again.
    pub async fn reopen(&self) -> PartitionLog {
        *self.gate.log.borrow_mut() = None;
        self.open().await
    }

    pub async fn commit(&self, records: Vec<Record>) -> Result<Committed, CommitError> {
        self.combiner.commit(batch(records)).await
    }

    /// Commits records `from..until`, numbered, one commit each.
    pub async fn commit_numbered(&self, from: u64, until: u64, bytes: usize) {
        for number in from..until {
            let committed = self.commit(vec![numbered(number, bytes)]).await;
            assert_eq!(committed, Ok(Committed { base_offset: number, count: 1 }));
        }
    }

    /// Changes bytes of a file behind the log's back.
    pub async fn edit(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let file = self.file(name).await;
        let bytes = file.len().await.expect("simulated") as usize;
        let mut image = file.read_at(0, bytes).await.expect("simulated").to_vec();
        change(&mut image);
        file.set_len(image.len() as u64).await.expect("simulated");
        file.write_durable_at(0, Slice::copy_from(&image)).await.expect("simulated");
    }

    pub async fn file(&self, name: &str) -> File {
        let path = self.gate.dir.join(name);
        self.disk.open(&path, Open::Create, Caching::Buffered).await.unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    pub async fn image(&self, name: &str) -> Vec<u8> {
        let file = self.file(name).await;
        let bytes = file.len().await.expect("simulated") as usize;
        file.read_at(0, bytes).await.expect("simulated").to_vec()
    }
}

/// Everything readable, in order, with the offsets that are not.
pub async fn read_all(log: &PartitionLog) -> (Vec<LogRecord>, Vec<u64>) {
    let (mut records, mut unreadable) = (Vec::new(), Vec::new());
    let mut next = log.oldest();
    while next < log.high_watermark() {
        match log.read(next, 7, 1 << 20).await {
            Ok(some) => {
                assert_eq!(some.first().map(|r| r.offset), Some(next));
                next += some.len() as u64;
                records.extend(some);
            }
            Err(ReadError::Unreadable) => {
                unreadable.push(next);
                next += 1;
            }
            Err(other) => panic!("reading {next}: {other:?}"),
        }
    }
    (records, unreadable)
}
