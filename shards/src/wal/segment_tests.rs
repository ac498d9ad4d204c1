//! The WAL's rules for segments and the checkpoint, one test each, on the simulated disk.

use std::path::Path;
use std::time::Duration;

use super::test_support::*;
use super::*;
use crate::io::sim::{Fault, NthCall, Op, SimDisk};
use crate::rt::sim::run;

const KIB: u64 = 1024;
const MIB: u64 = 1 << 20;

#[test]
fn e9_no_spare_takes_an_unprepared_segment() {
    run(12, async {
        let disk = SimDisk::new(12);
        let wal = open(&disk, 64 * KIB).await;
        // The preparation of 00000002.wal fails, so the roll finds no spare.
        disk.inject(NthCall::new(Op::Write, 1, Fault::NoSpace).on("00000002.wal"));
        for id in 0..25 {
            append(&wal, id..id + 1, 2000).await.expect("room");
        }
        assert_eq!(wal.metrics().rolls_unprepared, 1);
        assert!(!header_of(&disk, &segment_path(3)).prepared);
        wal.close().await.expect("stored");
        let wal = open(&disk, 64 * KIB).await;
        assert_eq!(ids(&from_disk(&wal, 1).await), (0..25).collect::<Vec<u64>>());
    });
}

#[test]
fn e9_n5_when_no_segment_can_be_made_produce_is_refused_and_heals() {
    run(13, async {
        let disk = SimDisk::new(13);
        let wal = open(&disk, 64 * KIB).await;
        disk.set_capacity(Some(disk.used_bytes()));
        let mut next = 1;
        let refused = loop {
            match append(&wal, next..next + 1, 5000).await {
                Ok(given) => assert_eq!(given, next..next + 1),
                Err(error) => break error,
            }
            next += 1;
        };
        assert!(matches!(&refused, AppendError::Unavailable(text) if text.contains("/ingress/0")), "{refused:?}");
        assert_eq!(wal.failed(), None, "a clean failure does not latch");
        assert!(matches!(append(&wal, 90..95, 5000).await, Err(AppendError::Unavailable(_))));
        assert_eq!(append(&wal, next..next + 1, 10).await, Ok(next..next + 1), "what still fits is taken");
        disk.set_capacity(None);
        rt::sleep(Duration::from_millis(100)).await;
        assert_eq!(append(&wal, next + 1..next + 4, 2000).await, Ok(next + 1..next + 4), "numbers are given back");
        assert_eq!(ids(&from_disk(&wal, 1).await), (1..next + 4).collect::<Vec<u64>>());
        wal.close().await.expect("stored");
        let wal = open(&disk, 64 * KIB).await;
        assert_eq!(ids(&from_disk(&wal, 1).await), (1..next + 4).collect::<Vec<u64>>());
    });
}

#[test]
fn e1_a_spare_is_usable_only_once_its_directory_was_synced() {
    run(14, async {
        let disk = SimDisk::new(14);
        let wal = open(&disk, 64 * KIB).await;
        disk.inject(NthCall::new(Op::SyncDir, 1, Fault::Stall(Duration::from_secs(60))));
        for id in 0..20 {
            append(&wal, id..id + 1, 2000).await.expect("room");
        }
        rt::sleep(Duration::from_secs(5)).await;
        assert_eq!(wal.metrics().spares, 0, "the directory is not synced yet");
        rt::sleep(Duration::from_secs(60)).await;
        assert_eq!(wal.metrics().spares, 1);
        assert_eq!(header_of(&disk, &segment_path(2)).state, header::State::Spare);
    });
}

#[test]
fn e1_o5_a_spare_is_filled_and_synced_before_its_header_says_so() {
    run(28, async {
        let disk = SimDisk::new(28);
        let wal = open(&disk, 64 * KIB).await;
        let stall = Fault::Stall(Duration::from_secs(60));
        disk.inject(NthCall::new(Op::SyncData, 1, stall).on("00000002.wal"));
        for id in 0..12 {
            append(&wal, id..id + 1, 2000).await.expect("room");
        }
        rt::sleep(Duration::from_secs(5)).await;
        assert!(disk.peek(&segment_path(2)).is_some_and(|bytes| bytes[..64] == [0; 64]), "no header yet");
        rt::sleep(Duration::from_secs(60)).await;
        assert_eq!(wal.metrics().spares, 1);
    });
}

#[test]
fn e3_dispatched_segments_are_recycled_with_a_new_generation() {
    run(15, async {
        let disk = SimDisk::new(15);
        let wal = open(&disk, 64 * KIB).await;
        let first_life = header_of(&disk, &segment_path(1)).generation;
        for id in 0..600 {
            append(&wal, id..id + 1, 2000).await.expect("room");
            if id % 20 == 0 {
                dispatch_all(&wal).await;
            }
        }
        let metrics = wal.metrics();
        assert!(metrics.segments_recycled > 10 && metrics.segments_prepared <= 3, "{metrics:?}");
        assert!(metrics.spares <= 2);
        assert!(disk.files().len() <= 5, "{:?}", disk.files());
        assert_ne!(header_of(&disk, &segment_path(1)).generation, first_life);
        dispatch_all(&wal).await;
        append(&wal, 600..603, 50).await.expect("room");
        wal.close().await.expect("stored");
        let wal = open(&disk, 64 * KIB).await;
        assert_eq!(ids(&from_disk(&wal, wal.recovered_checkpoint()).await), [600, 601, 602]);
    });
}

#[test]
fn e3_spares_beyond_two_are_deleted() {
    run(16, async {
        let disk = SimDisk::new(16);
        let wal = open(&disk, 64 * KIB).await;
        append(&wal, 0..300, 2000).await.expect("room");
        dispatch_all(&wal).await;
        let metrics = wal.metrics();
        assert_eq!((metrics.segments, metrics.spares), (1, 2), "{metrics:?}");
        assert!(metrics.segments_removed >= 5);
        assert_eq!(disk.files().len(), 4, "{:?}", disk.files());
    });
}

#[test]
fn e10_an_idle_dispatched_segment_is_rotated_after_a_second() {
    run(17, async {
        let disk = SimDisk::new(17);
        let wal = open(&disk, 4 * MIB).await;
        append(&wal, 0..5, MIB as usize).await.expect("room"); // rolls: the first segment becomes a recycled spare
        wal.store_checkpoint(wal.durable_next());
        rt::sleep(Duration::from_millis(900)).await;
        assert!(wal.live_bytes() > MIB && wal.metrics().rotations == 0, "not before a second without appends");
        rt::sleep(Duration::from_millis(500)).await;
        assert!(wal.live_bytes() < MIB, "{}", wal.live_bytes());
        assert_eq!(wal.metrics().rotations, 1);
        assert_eq!(append(&wal, 5..6, 50).await, Ok(6..7));
        wal.close().await.expect("stored");
        let wal = open(&disk, 4 * MIB).await;
        assert_eq!(ids(&from_disk(&wal, wal.recovered_checkpoint()).await), [5]);
    });
}

#[test]
fn e10_without_a_recycled_segment_nothing_rotates() {
    run(18, async {
        let wal = open(&SimDisk::new(18), 4 * MIB).await;
        append(&wal, 0..2, MIB as usize).await.expect("room");
        dispatch_all(&wal).await;
        rt::sleep(Duration::from_secs(10)).await;
        assert_eq!(wal.metrics().rotations, 0);
        assert_eq!(wal.metrics().segments, 1);
    });
}

#[test]
fn e6_checkpoints_are_overwritten_at_once_and_synced_once_within_250_ms() {
    run(20, async {
        let disk = SimDisk::new(20);
        let wal = open(&disk, MIB).await;
        append(&wal, 0..50, 50).await.expect("room");
        let durable = |disk: &SimDisk| checkpoint_on(disk, |disk, path| disk.peek_durable(path));
        for seq in 2..=40 {
            wal.store_checkpoint(seq);
            rt::sleep(Duration::from_millis(2)).await;
        }
        assert_eq!(checkpoint_on(&disk, |disk, path| disk.peek(path)), Some(40), "a killed process keeps it");
        assert_eq!(durable(&disk), Some(1), "one sync for all of them");
        rt::sleep(Duration::from_millis(200)).await;
        assert_eq!(durable(&disk), Some(40));
        assert_eq!(wal.backlog_records(), 11);
        wal.store_checkpoint(45);
        wal.close().await.expect("stored");
        assert_eq!(durable(&disk), Some(45), "and at shutdown");
    });
}

fn checkpoint_on(disk: &SimDisk, peek: impl Fn(&SimDisk, &Path) -> Option<Vec<u8>>) -> Option<u64> {
    let bytes = peek(disk, &dir().join("checkpoint"))?;
    checkpoint::Checkpoint::decode(&bytes, STORE, 0).ok().map(|found| found.seq)
}

#[test]
fn e6_compaction_waits_for_the_sync_of_the_checkpoint() {
    run(30, async {
        let disk = SimDisk::new(30);
        let wal = open(&disk, 64 * KIB).await;
        append(&wal, 0..100, 2000).await.expect("room");
        assert_eq!(wal.metrics().spares, 0);
        wal.store_checkpoint(60);
        rt::sleep(Duration::from_millis(100)).await;
        let oldest = wal.oldest();
        assert!((2..=60).contains(&oldest), "{oldest}: no spare, so the sync that gives one came at once");
        assert_eq!(wal.metrics().spares, 2);
        wal.store_checkpoint(90);
        rt::sleep(Duration::from_millis(200)).await;
        assert_eq!((wal.oldest(), wal.backlog_records()), (oldest, 11), "written, not synced");
        rt::sleep(Duration::from_millis(100)).await;
        assert!((61..=90).contains(&wal.oldest()), "{}", wal.oldest());
    });
}

#[test]
fn e6_nothing_is_compacted_behind_an_unsynced_checkpoint() {
    run(21, async {
        let disk = SimDisk::new(21);
        let wal = open(&disk, 64 * KIB).await;
        append(&wal, 0..100, 2000).await.expect("room");
        disk.inject(NthCall::new(Op::SyncData, 1, Fault::Fail).on("checkpoint"));
        wal.store_checkpoint(90);
        rt::sleep(Duration::from_millis(600)).await;
        assert_eq!(wal.oldest(), 1, "the sync failed");
        assert_eq!(wal.failed(), None);
        rt::sleep(Duration::from_secs(2)).await;
        assert!(wal.oldest() > 50, "it was written again and synced");
        assert_eq!(checkpoint_on(&disk, |disk, path| disk.peek_durable(path)), Some(90));
    });
}

#[test]
fn e18_a_foreign_directory_is_drained_and_removed() {
    run(22, async {
        let disk = SimDisk::new(22);
        let wal = open(&disk, 64 * KIB).await;
        append(&wal, 0..100, 2000).await.expect("room");
        wal.close().await.expect("stored");
        let drain = || async { Wal::open(WalOptions { mode: Mode::Drain, ..options(&disk, MIB) }).await };
        let wal = drain().await.expect("opens");
        assert!(matches!(append(&wal, 0..1, 50).await, Err(AppendError::Unavailable(_))));
        assert!(!wal.fully_dispatched() && wal.remove_drained().await.is_err());
        assert_eq!(ids(&from_disk(&wal, wal.recovered_checkpoint()).await), (0..100).collect::<Vec<u64>>());
        wal.store_checkpoint(60);
        wal.close().await.expect("stored");
        // Shard 0 exists again before that: the directory is simply its WAL.
        let wal = open(&disk, 64 * KIB).await;
        assert_eq!((wal.recovered_checkpoint(), append(&wal, 100..101, 50).await), (60, Ok(101..102)));
        wal.close().await.expect("stored");
        let wal = drain().await.expect("opens");
        dispatch_all(&wal).await;
        assert!(wal.fully_dispatched());
        disk.inject(NthCall::new(Op::Remove, 1, Fault::Fail).on(".drained"));
        assert!(wal.remove_drained().await.is_err(), "the removal is interrupted");
        assert!(disk.files().iter().all(|path| path.starts_with("/ingress/0.drained")), "{:?}", disk.files());
        let removed = Wal::remove_drained_remains(&Disk::Sim(disk.clone()), Path::new("/ingress")).await;
        assert_eq!(removed.ok(), Some(1));
        assert!(disk.files().is_empty());
    });
}
