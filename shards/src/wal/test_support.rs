//! What the tests of this module share: records whose content follows from their number, and a dispatcher that only
//! collects.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::*;
use crate::io::sim::SimDisk;

pub(crate) const STORE: u64 = 0x5707e;
pub(crate) const ALL: ReadLimit = ReadLimit { records_max: usize::MAX, bytes_max: usize::MAX };

pub(crate) fn dir() -> PathBuf {
    PathBuf::from("/ingress/0")
}

pub(crate) fn segment_path(number: u64) -> PathBuf {
    dir().join(segment::file_name(number))
}

pub(crate) fn options(disk: &SimDisk, segment_bytes: u64) -> WalOptions {
    let options = WalOptions::new(Disk::Sim(disk.clone()), dir(), 0, STORE);
    WalOptions { segment_bytes, staging_bytes_max: 16 << 20, ..options }
}

pub(crate) async fn open(disk: &SimDisk, segment_bytes: u64) -> Wal {
    Wal::open(options(disk, segment_bytes)).await.unwrap_or_else(|error| panic!("{error}"))
}

pub(crate) async fn open_error(disk: &SimDisk, segment_bytes: u64) -> WalOpenError {
    match Wal::open(options(disk, segment_bytes)).await {
        Ok(_) => panic!("it opened"),
        Err(error) => error,
    }
}

/// The payload of the record that carries `id`: `bytes` long, at least 8.
pub(crate) fn payload(id: u64, bytes: usize) -> Vec<u8> {
    static PATTERN: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
    let pattern = PATTERN.get_or_init(|| (0..4_u32 << 20).map(|at| (at % 251) as u8).collect());
    let mut payload = pattern[id as usize % 251..][..bytes.max(8)].to_vec();
    payload[..8].copy_from_slice(&id.to_le_bytes());
    payload
}

pub(crate) fn id_of(record: &WalRecord) -> u64 {
    crate::le::get_u64(record.record.payload(), 0)
}

/// Panics unless the record is what [`append`] made.
pub(crate) fn check(record: &WalRecord) {
    let id = id_of(record);
    assert_eq!(record.record.payload(), payload(id, record.record.payload().len()), "record {}", record.seq);
    assert_eq!(&*record.topic, if id.is_multiple_of(2) { "orders" } else { "invoices" });
    assert_eq!(record.incarnation, Some(Incarnation(id % 2 + 1)));
    assert_eq!(u64::from(record.partition), id % 7);
    assert_eq!(record.record.key(), id.is_multiple_of(3).then_some(&b"key"[..]));
}

pub(crate) fn new_record(id: u64, payload: &[u8]) -> NewWalRecord<'_> {
    NewWalRecord {
        topic: if id.is_multiple_of(2) { "orders" } else { "invoices" },
        incarnation: Incarnation(id % 2 + 1),
        key: if id.is_multiple_of(3) { b"key" } else { b"" },
        partition: (id % 7) as u32,
        accepted_at_ms: 1_700_000_000_000 + id,
        payload,
    }
}

/// Appends records `ids`, as one batch, each with `bytes` of payload.
pub(crate) async fn append(wal: &Wal, ids: Range<u64>, bytes: usize) -> Result<Range<u64>, AppendError> {
    let payloads: Vec<Vec<u8>> = ids.clone().map(|id| payload(id, bytes)).collect();
    let records: Vec<NewWalRecord<'_>> = ids.zip(&payloads).map(|(id, payload)| new_record(id, payload)).collect();
    wal.append(&records).await
}

/// Tells the WAL that everything is dispatched, and waits until that is on disk.
pub(crate) async fn dispatch_all(wal: &Wal) {
    wal.store_checkpoint(wal.durable_next());
    rt::sleep(Duration::from_millis(300)).await;
}

/// Everything from `from` on, checked, from disk.
pub(crate) async fn from_disk(wal: &Wal, from: u64) -> Vec<WalRecord> {
    let mut records: Vec<WalRecord> = Vec::new();
    let mut next = from;
    while next < wal.durable_next() {
        let read = wal.read_disk(next, u64::MAX, ALL, &|_| true).await.unwrap_or_else(|error| panic!("{error}"));
        assert!(read.next > next, "a read moves on");
        next = read.next;
        records.extend(read.records);
    }
    records.iter().for_each(check);
    records
}

pub(crate) fn seqs(records: &[WalRecord]) -> Vec<u64> {
    records.iter().map(|record| record.seq).collect()
}

pub(crate) fn ids(records: &[WalRecord]) -> Vec<u64> {
    records.iter().map(id_of).collect()
}

pub(crate) fn header_of(disk: &SimDisk, path: &Path) -> header::Header {
    let bytes = disk.peek_durable(path).unwrap_or_else(|| panic!("no file {}", path.display()));
    header::Header::decode(&bytes[..frame::BLOCK_BYTES as usize]).unwrap_or_else(|fault| panic!("{fault:?}"))
}
