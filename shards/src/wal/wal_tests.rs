//! The WAL's rules for appends, groups and memory, one test each, on the simulated disk.

use std::cell::Cell;
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
        wal.close().await.expect("stored");
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
        wal.close().await.expect("stored");
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
fn d18_a_checkpoint_that_a_close_could_not_store_says_what_it_failed_with() {
    run(27, async {
        let disk = SimDisk::new(27);
        let wal = open(&disk, MIB).await;
        assert_eq!(append(&wal, 0..3, 50).await, Ok(1..4));
        let mut broken = NthCall::new(Op::Write, 1, Fault::NoSpace).on("checkpoint");
        broken.times = u64::MAX;
        disk.inject(broken);
        wal.store_checkpoint(3);
        let why = wal.close().await.expect_err("the file system is full");
        assert!(why.contains("dispatch checkpoint") && why.contains("No space left"), "{why}");
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
        closed.await.expect("stored");
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
