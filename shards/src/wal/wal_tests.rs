//! The WAL's rules, one test each, on the simulated disk.

use std::cell::Cell;
use std::path::Path;
use std::time::Duration;

use super::test_support::*;
use super::*;
use crate::io::sim::{Fault, NthCall, Op, SimDisk, Survival};
use crate::rt::sim::{run, Sim};
use crate::rt::{Queue, Task};

const KIB: u64 = 1024;
const MIB: u64 = 1 << 20;

fn spawn_append(wal: &Wal, ids: Range<u64>, bytes: usize) -> Task<Result<Range<u64>, AppendError>> {
    let wal = wal.clone();
    rt::spawn(Queue::Foreground, async move { append(&wal, ids, bytes).await })
}

/// Tells the WAL that everything is dispatched, and waits until that is on disk.
async fn dispatch_all(wal: &Wal) {
    wal.store_checkpoint(wal.durable_next());
    rt::sleep(Duration::from_millis(300)).await;
}

#[test]
fn e9_first_start_leaves_one_prepared_active_segment() {
    run(1, async {
        let disk = SimDisk::new(1);
        let wal = open(&disk, 64 * KIB).await;
        assert_eq!(disk.files(), [segment_path(1), dir().join("checkpoint")]);
        let header = header_of(&disk, &segment_path(1));
        assert_eq!((header.state, header.prepared, header.recycled), (header::State::Active, true, false));
        assert_eq!((header.store_id, header.dir_number, header.first_seq), (STORE, 0, 1));
        assert_eq!((wal.durable_next(), wal.oldest(), wal.recovered_checkpoint()), (1, 1, 1));
        assert_eq!(disk.peek_durable(&segment_path(1)).map(|bytes| bytes.len() as u64), Some(64 * KIB));
    });
}

#[test]
fn a_batch_takes_consecutive_numbers_and_comes_back_from_memory_and_disk() {
    run(2, async {
        let wal = open(&SimDisk::new(2), 256 * KIB).await;
        assert_eq!(append(&wal, 0..5, 100).await, Ok(1..6));
        assert_eq!(append(&wal, 5..6, 3000).await, Ok(6..7));
        assert_eq!(wal.append(&[]).await, Ok(7..7));
        let disk_read = from_disk(&wal, 1).await;
        let memory = wal.read_memory(1, ALL).expect("just written");
        memory.records.iter().for_each(check);
        assert_eq!(memory.next, 7);
        assert_eq!(seqs(&memory.records), [1, 2, 3, 4, 5, 6]);
        assert_eq!(ids(&disk_read), ids(&memory.records));
        assert_eq!(memory.records[4].accepted_at_ms, 1_700_000_000_004);
        assert!(wal.read_memory(1, ALL).is_none(), "it is handed over once");
        assert_eq!(wal.read_memory(7, ALL).map(|read| read.next), Some(7));
    });
}

#[test]
fn reads_respect_their_limits_and_pass_over_the_unwanted() {
    run(3, async {
        let wal = open(&SimDisk::new(3), 4 * MIB).await;
        append(&wal, 0..300, 5000).await.expect("room");
        let two = ReadLimit { records_max: 2, bytes_max: usize::MAX };
        assert_eq!(seqs(&wal.read_memory(1, two).expect("held").records), [1, 2]);
        let bytes = ReadLimit { records_max: 100, bytes_max: 10_010 };
        assert_eq!(seqs(&wal.read_memory(3, bytes).expect("held").records), [3, 4]);
        let tiny = ReadLimit { records_max: 100, bytes_max: 1 };
        let read = wal.read_disk(10, 400, tiny, &|_| true).await.expect("readable");
        assert_eq!((seqs(&read.records), read.next), (vec![10], 11), "at least one");
        let read = wal.read_disk(10, 200, ALL, &|seq| seq % 50 == 0).await.expect("readable");
        read.records.iter().for_each(check);
        assert_eq!((seqs(&read.records), read.next), (vec![50, 100, 150], 200));
        // A few records out of a large read must not keep all of it in memory (E20).
        let read = wal.read_disk(10, 23, ALL, &|seq| seq >= 20).await.expect("readable");
        assert_eq!(seqs(&read.records), [20, 21, 22]);
        let first = read.records[0].record.body.as_ptr_range();
        assert_eq!(first.end, read.records[1].record.body.as_ptr(), "copied next to each other");
    });
}

#[test]
fn lesson_l6_a_lone_append_costs_one_write_and_waits_for_no_timer() {
    run(27, async {
        let disk = SimDisk::new(27);
        let wal = open(&disk, MIB).await;
        let (before, calls) = (rt::now(), disk.calls());
        append(&wal, 0..1, 50).await.expect("room");
        assert_eq!(disk.calls() - calls, 1);
        assert!(rt::now() - before <= Duration::from_micros(400), "no longer than the disk's slowest call");
    });
}

#[test]
fn e7_concurrent_appends_share_writes() {
    let groups = run(4, async {
        let wal = open(&SimDisk::new(4), MIB).await;
        let tasks: Vec<_> = (0..500).map(|id| spawn_append(&wal, id..id + 1, 50)).collect();
        let mut given: Vec<u64> = Vec::new();
        for task in tasks {
            given.push(task.await.expect("appended").start);
        }
        given.sort_unstable();
        assert_eq!(given, (1..501).collect::<Vec<u64>>());
        assert_eq!(from_disk(&wal, 1).await.len(), 500);
        wal.metrics().groups
    });
    assert!(groups < 60, "{groups} writes for 500 records");
}

#[test]
fn a_dropped_caller_does_not_stop_its_record() {
    run(5, async {
        let wal = open(&SimDisk::new(5), MIB).await;
        let dropped = rt::timeout(Duration::from_nanos(1), append(&wal, 0..3, 50)).await;
        assert_eq!(dropped, Err(rt::Elapsed));
        assert_eq!(append(&wal, 3..4, 50).await, Ok(4..5));
        assert_eq!(ids(&from_disk(&wal, 1).await), [0, 1, 2, 3]);
    });
}

#[test]
fn a_batch_rolls_between_two_records() {
    run(6, async {
        let disk = SimDisk::new(6);
        let wal = open(&disk, 32 * KIB).await;
        assert_eq!(append(&wal, 0..200, 900).await, Ok(1..201));
        assert_eq!(append(&wal, 200..201, 900).await, Ok(201..202));
        assert_eq!(ids(&from_disk(&wal, 1).await), (0..201).collect::<Vec<u64>>());
        assert!(wal.metrics().rolls >= 6, "{}", wal.metrics().rolls);
        wal.close().await;
        let wal = open(&disk, 32 * KIB).await;
        assert_eq!(ids(&from_disk(&wal, 1).await), (0..201).collect::<Vec<u64>>());
        assert_eq!(append(&wal, 201..202, 900).await, Ok(202..203));
    });
}

#[test]
fn a_large_batch_spans_groups_and_chunks() {
    run(7, async {
        let wal = open(&SimDisk::new(7), 14 * MIB).await;
        let given = append(&wal, 0..12, MIB as usize - 1000).await;
        assert_eq!(given, Ok(1..13));
        assert!(wal.metrics().groups >= 6);
        assert_eq!(ids(&from_disk(&wal, 1).await), (0..12).collect::<Vec<u64>>());
        assert_eq!(append(&wal, 0..1, 3 * MIB as usize).await, Err(AppendError::TooLarge));
        assert_eq!(append(&wal, 12..13, 10).await, Ok(13..14), "nothing of the refused one was staged");
    });
}

#[test]
fn e7_answers_come_in_order() {
    run(8, async {
        let disk = SimDisk::new(8);
        let wal = open(&disk, MIB).await;
        disk.inject(NthCall::new(Op::WriteDurable, 1, Fault::Stall(Duration::from_secs(5))));
        let slow = spawn_append(&wal, 0..1, 50);
        rt::sleep(Duration::from_millis(1)).await;
        let fast = spawn_append(&wal, 1..2, 50);
        rt::sleep(Duration::from_secs(1)).await;
        assert_eq!(disk.in_flight(), 1, "the second write has landed");
        assert_eq!(wal.durable_next(), 1, "and is not durable before the first");
        let mut fast = std::pin::pin!(fast);
        assert_eq!(rt::timeout(Duration::from_secs(1), fast.as_mut()).await, Err(rt::Elapsed));
        assert_eq!(slow.await, Ok(1..2));
        assert_eq!(fast.await, Ok(2..3));
    });
}

#[test]
fn e7_a_failed_group_fails_every_later_one() {
    run(9, async {
        let disk = SimDisk::new(9);
        let wal = open(&disk, MIB).await;
        append(&wal, 0..1, 50).await.expect("room");
        disk.inject(NthCall::new(Op::WriteDurable, 1, Fault::Fail).on(".wal"));
        disk.set_slowness(100);
        let first = spawn_append(&wal, 1..2, 50);
        rt::yield_now().await;
        rt::sleep(Duration::from_micros(10)).await;
        let second = spawn_append(&wal, 2..3, 50);
        rt::sleep(Duration::from_micros(10)).await;
        assert_eq!(disk.in_flight(), 2);
        let third = spawn_append(&wal, 3..4, 50);
        for task in [first, second, third] {
            assert!(matches!(task.await, Err(AppendError::LogFailed(_))));
        }
        assert_eq!(wal.durable_next(), 2);
        assert_eq!(ids(&from_disk(&wal, 1).await), [0], "durable records are still dispatched");
        assert!(wal.read_memory(2, ALL).expect("nothing to read").records.is_empty());
    });
}

#[test]
fn e11_n9_a_failed_write_latches_and_a_restart_heals() {
    run(10, async {
        let disk = SimDisk::new(10);
        let wal = open(&disk, MIB).await;
        append(&wal, 0..3, 50).await.expect("room");
        let told: Rc<Cell<u32>> = Rc::default();
        let heard = told.clone();
        wal.on_latched(Box::new(move |cause| {
            assert!(cause.contains("00000001.wal"), "{cause}");
            heard.set(heard.get() + 1);
        }));
        disk.inject(NthCall::new(Op::WriteDurable, 1, Fault::NoSpace).on(".wal"));
        assert!(matches!(append(&wal, 3..4, 50).await, Err(AppendError::LogFailed(_))));
        assert!(matches!(append(&wal, 4..5, 50).await, Err(AppendError::LogFailed(_))), "also once space is back");
        assert_eq!(told.get(), 1);
        assert!(wal.failed().is_some() && wal.metrics().failed);
        wal.store_checkpoint(3);
        wal.close().await;
        let wal = open(&disk, MIB).await;
        assert_eq!((wal.failed(), wal.recovered_checkpoint()), (None, 3));
        assert_eq!(append(&wal, 9..10, 50).await, Ok(4..5));
        assert_eq!(ids(&from_disk(&wal, 3).await), [2, 9]);
    });
}

#[test]
fn e11_several_failed_writes_latch_once() {
    run(29, async {
        let disk = SimDisk::new(29);
        let wal = open(&disk, MIB).await;
        let told: Rc<Cell<u32>> = Rc::default();
        let heard = told.clone();
        wal.on_latched(Box::new(move |_| heard.set(heard.get() + 1)));
        disk.set_slowness(100);
        disk.inject(NthCall::new(Op::WriteDurable, 1, Fault::Fail).on(".wal").times(2));
        let first = spawn_append(&wal, 0..1, 50);
        rt::sleep(Duration::from_micros(10)).await;
        let second = spawn_append(&wal, 1..2, 50);
        assert!(first.await.is_err() && second.await.is_err());
        rt::sleep(Duration::from_secs(1)).await;
        assert_eq!((disk.in_flight(), told.get()), (0, 1));
    });
}

#[test]
fn e11_a_latch_from_outside_lets_staged_records_finish() {
    run(11, async {
        let wal = open(&SimDisk::new(11), MIB).await;
        let staged = spawn_append(&wal, 0..2, 50);
        rt::sleep(Duration::from_nanos(1)).await;
        wal.latch("the WAL of shard 3 failed");
        assert_eq!(append(&wal, 2..3, 50).await, Err(AppendError::LogFailed("the WAL of shard 3 failed".into())));
        assert_eq!(staged.await, Ok(1..3));
        assert_eq!(ids(&from_disk(&wal, 1).await), [0, 1]);
    });
}

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
        wal.close().await;
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
        wal.close().await;
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
        wal.close().await;
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
        wal.close().await;
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
fn an_idle_wal_does_not_tick() {
    let sim = Sim::new(19);
    let handle = sim.clone();
    sim.run(async move {
        let disk = SimDisk::new(19);
        let wal = open(&disk, MIB).await;
        append(&wal, 0..3, 50).await.expect("room");
        dispatch_all(&wal).await;
        rt::sleep(Duration::from_secs(5)).await;
        let calls = disk.calls();
        assert_eq!(handle.tasks_alive(), 2, "this one and the flusher");
        rt::sleep(Duration::from_secs(3600)).await;
        assert_eq!(disk.calls(), calls);
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
        wal.close().await;
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
        wal.close().await;
        let drain = || async { Wal::open(WalOptions { mode: Mode::Drain, ..options(&disk, MIB) }).await };
        let wal = drain().await.expect("opens");
        assert!(matches!(append(&wal, 0..1, 50).await, Err(AppendError::Unavailable(_))));
        assert!(!wal.fully_dispatched() && wal.remove_drained().await.is_err());
        assert_eq!(ids(&from_disk(&wal, wal.recovered_checkpoint()).await), (0..100).collect::<Vec<u64>>());
        wal.store_checkpoint(60);
        wal.close().await;
        // Shard 0 exists again before that: the directory is simply its WAL.
        let wal = open(&disk, 64 * KIB).await;
        assert_eq!((wal.recovered_checkpoint(), append(&wal, 100..101, 50).await), (60, Ok(101..102)));
        wal.close().await;
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

#[test]
fn e20_under_pressure_the_oldest_groups_leave_memory_first() {
    run(23, async {
        let disk = SimDisk::new(23);
        let wal =
            Wal::open(WalOptions { staging_bytes_max: 8 << 20, ..options(&disk, 24 * MIB) }).await.expect("opens");
        assert!(!wal.staging_low());
        for id in 0..40 {
            append(&wal, id..id + 1, MIB as usize / 2).await.expect("dispatch never makes accept fail");
        }
        assert!(wal.staging_low());
        assert!(wal.metrics().groups_dropped > 20);
        assert!(wal.read_memory(1, ALL).is_none(), "read it from disk");
        assert_eq!(ids(&from_disk(&wal, 1).await), (0..40).collect::<Vec<u64>>());
        assert_eq!(wal.read_memory(40, ALL).expect("the newest is there").records.len(), 1);
    });
}

#[test]
fn e22_lent_memory_refuses_produce_until_it_comes_back() {
    run(24, async {
        let disk = SimDisk::new(24);
        let wal = Wal::open(WalOptions { staging_bytes_max: 4 << 20, ..options(&disk, 6 * MIB) }).await.expect("opens");
        let mut lent = Vec::new();
        let refused = loop {
            match append(&wal, lent.len() as u64..lent.len() as u64 + 1, MIB as usize).await {
                Ok(seqs) => lent.extend(wal.read_memory(seqs.start, ALL).expect("held").records),
                Err(error) => break error,
            }
        };
        assert_eq!(refused, AppendError::MemoryExhausted);
        assert!((2..=4).contains(&lent.len()), "{}", lent.len());
        assert_eq!(wal.failed(), None);
        let next = wal.durable_next();
        lent.clear();
        assert_eq!(append(&wal, 50..51, MIB as usize).await, Ok(next..next + 1), "nothing of the refused was staged");
    });
}

#[test]
fn appends_wait_for_writes_of_their_own_to_free_memory() {
    run(25, async {
        let disk = SimDisk::new(25);
        let wal = Wal::open(WalOptions { staging_bytes_max: 4 << 20, ..options(&disk, 6 * MIB) }).await.expect("opens");
        let tasks: Vec<_> = (0..20).map(|id| spawn_append(&wal, id..id + 1, MIB as usize)).collect();
        for task in tasks {
            task.await.expect("staging turns over");
        }
        assert_eq!(wal.durable_next(), 21);
    });
}

#[test]
fn close_waits_for_what_is_staged_and_refuses_the_rest() {
    run(26, async {
        let disk = SimDisk::new(26);
        let wal = open(&disk, MIB).await;
        let staged = spawn_append(&wal, 0..3, 50);
        rt::sleep(Duration::from_nanos(1)).await;
        let closing = wal.clone();
        let closed = rt::spawn(Queue::Foreground, async move { closing.close().await });
        rt::sleep(Duration::from_nanos(1)).await;
        assert!(matches!(append(&wal, 3..4, 50).await, Err(AppendError::Unavailable(_))));
        closed.await;
        assert_eq!(disk.in_flight(), 0);
        assert_eq!(staged.await, Ok(1..4));
        disk.power_cut_as(Survival::Nothing);
        let wal = open(&disk, MIB).await;
        assert_eq!(ids(&from_disk(&wal, 1).await), [0, 1, 2]);
    });
}

#[test]
fn lesson_n27_topic_names_are_kept_once_and_not_for_ever() {
    let mut topics = Topics::default();
    let kept: Rc<str> = topics.name("orders");
    for topic in 0..100_000 {
        topics.name(&format!("topic-{topic}"));
    }
    assert!(Rc::ptr_eq(&kept, &topics.name("orders")));
    assert!(topics.len() < 3000, "{}", topics.len());
}
