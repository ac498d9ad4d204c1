//! Tests of the core by scripts and by a model, and of the driver in simulation.

mod driver;
mod model;
mod rules;
mod script;

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use crate::io::{AlignedBuf, Slice};
use crate::meta::{Address, Incarnation, Snapshot, TopicMeta};
use crate::peer::Record;
use crate::wal::{ReadBack, ReadLimit, WalRecord};

const SLOT_BYTES: usize = 8;
const SEQS_MAX: usize = 300_000;

/// A record's body that tells its sequence number. All bodies share one buffer, so that tests can afford many.
fn body(seq: u64, bytes: usize) -> Slice {
    thread_local! {
        static SLOTS: OnceCell<Slice> = const { OnceCell::new() };
    }
    let slots = SLOTS.with(|slots| {
        let slots = slots.get_or_init(|| {
            let mut buf = AlignedBuf::zeroed(SEQS_MAX * SLOT_BYTES + (20 << 20));
            for seq in 0..SEQS_MAX {
                buf[seq * SLOT_BYTES..][..SLOT_BYTES].copy_from_slice(&(seq as u64).to_le_bytes());
            }
            buf.freeze()
        });
        slots.clone()
    });
    let start = seq as usize * SLOT_BYTES;
    slots.slice(start..start + bytes.max(SLOT_BYTES))
}

fn seq_of(record: &Record) -> u64 {
    let mut slot = [0; SLOT_BYTES];
    slot.copy_from_slice(&record.body[..SLOT_BYTES]);
    u64::from_le_bytes(slot)
}

fn wal_record(seq: u64, topic: &str, incarnation: Option<u64>, partition: u32, bytes: usize) -> WalRecord {
    let record = Record { body: body(seq, bytes), key_bytes: 0 };
    let incarnation = incarnation.map(Incarnation);
    WalRecord { seq, topic: Rc::from(topic), incarnation, partition, accepted_at_ms: 0, record }
}

/// Topics by name: id, partitions, and the addresses of as many of them as are resolved.
#[derive(Clone, Debug, Default)]
struct Topics(BTreeMap<String, (u64, u32, Vec<Address>)>);

impl Topics {
    fn snapshot(&self, version: u64) -> Arc<Snapshot> {
        let mut snapshot = Snapshot { version, shards: 4, ..Snapshot::default() };
        for (name, (id, partitions, addresses)) in &self.0 {
            let meta = Arc::new(TopicMeta {
                name: name.as_str().into(),
                incarnation: Incarnation(*id),
                partitions: *partitions,
                retention_ms: 0,
                visibility_timeout_ms: 30_000,
                max_in_flight_per_partition: 1,
                max_acked_ahead_per_partition: 1,
                created_at_ms: 0,
                owner: None,
            });
            snapshot.topics.insert(meta.name.clone(), meta.clone());
            snapshot.by_incarnation.insert(meta.incarnation, meta.clone());
            snapshot.placement.insert(meta.incarnation, addresses.as_slice().into());
        }
        Arc::new(snapshot)
    }
}

/// A WAL that is a list: record `n` has sequence number `first + n`.
#[derive(Debug, Default)]
struct MockWal {
    first: u64,
    records: Vec<WalRecord>,
}

impl MockWal {
    fn next(&self) -> u64 {
        self.first + self.records.len() as u64
    }

    fn read(&self, from: u64, until: u64, limit: ReadLimit, want: &dyn Fn(u64) -> bool) -> ReadBack {
        let mut read = ReadBack { records: Vec::new(), next: from };
        let mut bytes = 0;
        for seq in from..until.min(self.next()) {
            if want(seq) {
                let record = &self.records[(seq - self.first) as usize];
                let full =
                    read.records.len() >= limit.records_max || bytes + record.record.body.len() > limit.bytes_max;
                if full && !read.records.is_empty() {
                    break;
                }
                bytes += record.record.body.len();
                read.records.push(record.clone());
            }
            read.next = seq + 1;
        }
        read
    }
}
