//! How often the data path allocates, counted: with each batch and each commit, never with each record.
//!
//! A whole shard runs on the simulated disk, from produce over dispatch and commit to consume and ack. The disk itself
//! allocates three times for each sector of 512 bytes that is written, so the records are tiny: about one sector for
//! six of them. One allocation for each record would double what is found.

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

use narad_shards::api::{NewRecord, Settle, SettleMode, SettleStatus};
use narad_shards::io::sim::SimDisk;
use narad_shards::io::Disk;
use narad_shards::log::LogOptions;
use narad_shards::meta::{Address, Incarnation, Snapshot, TopicMeta};
use narad_shards::peer::{Carrier, LocalBoxFuture, Lost, Reply, Request, Take};
use narad_shards::queue::{CommitterOptions, Consumer};
use narad_shards::rt::{self, sim::Sim, Queue};
use narad_shards::shard::{RetentionOptions, Shard, ShardOptions};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: everything is done by the system's allocator, with what the caller promises for it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// The only shard's calls to itself.
#[derive(Default)]
struct Local {
    shard: std::cell::RefCell<Option<Shard>>,
}

impl Carrier for Local {
    fn call(&self, _to: Address, request: Request) -> LocalBoxFuture<'static, Result<Reply, Lost>> {
        let shard = self.shard.borrow().clone().expect("calls come after the start");
        let handled = rt::spawn(Queue::Foreground, async move { shard.handle(request).await });
        Box::pin(async move { Ok(handled.await) })
    }

    fn send(&self, to: Address, request: Request) {
        drop(self.call(to, request));
    }
}

const TOPIC: &str = "orders";
const PARTITIONS: u32 = 4;

fn snapshot() -> Arc<Snapshot> {
    let meta = Arc::new(TopicMeta {
        name: TOPIC.into(),
        incarnation: Incarnation(7),
        partitions: PARTITIONS,
        retention_ms: 0,
        visibility_timeout_ms: 30_000,
        max_in_flight_per_partition: 100_000,
        max_acked_ahead_per_partition: 100_000,
        created_at_ms: 0,
        owner: None,
    });
    let mut snapshot = Snapshot { version: 1, shards: 1, ..Snapshot::default() };
    snapshot.topics.insert(meta.name.clone(), meta.clone());
    snapshot.placement.insert(meta.incarnation, vec![Address::local(0); PARTITIONS as usize].into());
    snapshot.by_incarnation.insert(meta.incarnation, meta);
    Arc::new(snapshot)
}

async fn start() -> (Shard, Consumer) {
    let disk = SimDisk::new(1);
    let data = Path::new("/data");
    for dir in [data.to_owned(), data.join("ingress"), data.join("topics")] {
        disk.create_dir(&dir).await.expect("an empty disk");
    }
    let carrier = Rc::new(Local::default());
    let options = ShardOptions {
        id: 0,
        disk: Disk::Sim(disk),
        data_dir: PathBuf::from(data),
        store_id: 1,
        memory_bytes: 256 << 20,
        wal_segment_bytes: 16 << 20,
        log: LogOptions::default(),
        positions: CommitterOptions::default(),
        disk_reserve_bytes: 0,
        node_disk: Default::default(),
        retention: RetentionOptions::default(),
        adopt: Vec::new(),
    };
    let shard = Shard::open(options, snapshot(), carrier.clone()).await.expect("an empty disk");
    *carrier.shard.borrow_mut() = Some(shard.clone());
    shard.start();
    let consumer = Consumer::new(shard.queues().clone());
    (shard, consumer)
}

/// Sends `batches` batches through the shard, one after the other; returns the allocations of one.
async fn allocations_of(shard: &Shard, consumer: &Consumer, batches: u64, records: usize) -> u64 {
    let payload = [7; 1];
    let batch = vec![NewRecord { key: b"", payload: &payload, partition: None }; records];
    let mut settles = Vec::with_capacity(records);
    let started = ALLOCATIONS.load(Ordering::Relaxed);
    for _ in 0..batches {
        shard.produce_batch(TOPIC, &batch).await.expect("a disk without faults");
        let mut left = records;
        while left > 0 {
            let take = Take { max: left as u32, bytes_max: 4 << 20 };
            let got = consumer.consume(TOPIC, None, take, Duration::from_secs(5)).await.expect("the topic is there");
            left -= got.len();
            settles.clear();
            settles.extend(got.iter().map(|d| Settle {
                partition: d.partition,
                offset: d.offset,
                nonce: d.nonce,
                mode: SettleMode::Ack,
            }));
            let acked = consumer.settle(TOPIC, settles.clone()).await.expect("the topic is there");
            assert!(acked.iter().all(|status| *status == SettleStatus::Done));
        }
    }
    (ALLOCATIONS.load(Ordering::Relaxed) - started) / batches
}

#[test]
fn allocations_grow_with_batches_and_not_with_records() {
    Sim::new(1).run(async {
        let (shard, consumer) = start().await;
        allocations_of(&shard, &consumer, 20, 1000).await; // buffers grow to their size
        let few = allocations_of(&shard, &consumer, 20, 100).await;
        let many = allocations_of(&shard, &consumer, 20, 1000).await;
        let per_record = many.saturating_sub(few) as f64 / 900.0;
        assert!(per_record < 0.9, "{few} allocations for 100 records, {many} for 1000: {per_record} for each more");
    });
}
