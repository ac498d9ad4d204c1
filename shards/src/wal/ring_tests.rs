//! The WAL on a real file system, through the real ring: what the simulated disk cannot know about the kernel.

use std::time::Duration;

use super::test_support::*;
use super::*;
use crate::rt::ring_tests::{run, scratch};
use crate::rt::Queue;

#[test]
fn a_wal_rolls_recycles_and_recovers_on_a_real_file_system() {
    let root = scratch("wal");
    let path = root.clone();
    run(move |handle| async move {
        let disk = handle.disk(&path, true).expect("statvfs works");
        let options = WalOptions::new(disk, path.join("ingress").join("0"), 0, STORE);
        let options = WalOptions { segment_bytes: 1 << 20, staging_bytes_max: 16 << 20, ..options };
        let wal = Wal::open(options.clone()).await.expect("a new WAL");
        wal.with_staging_pool(|pool| handle.register_chunks(pool, 1));
        for round in 0..6 {
            let tasks: Vec<_> = (0..100)
                .map(|id| {
                    let wal = wal.clone();
                    let id = round * 1000 + id * 10;
                    rt::spawn(Queue::Foreground, async move { append(&wal, id..id + 10, 700).await })
                })
                .collect();
            for task in tasks {
                task.await.expect("appended");
            }
            wal.store_checkpoint(wal.durable_next() - 500);
            rt::sleep(Duration::from_millis(300)).await;
        }
        let (next, metrics) = (wal.durable_next(), wal.metrics());
        assert_eq!(next, 6001);
        assert!(metrics.segments_recycled > 0 && metrics.rolls > 2, "{metrics:?}");
        assert!(metrics.groups < 300, "{} groups for 600 appends", metrics.groups);
        wal.close().await.expect("stored");
        drop(wal);
        let wal = Wal::open(options).await.expect("recovers");
        assert_eq!((wal.recovered_checkpoint(), wal.durable_next()), (next - 500, next));
        assert_eq!(from_disk(&wal, next - 500).await.len(), 500);
        assert_eq!(append(&wal, 0..1, 50).await, Ok(next..next + 1));
        wal.close().await.expect("stored");
    });
    std::fs::remove_dir_all(&root).expect("scratch can be removed");
}
