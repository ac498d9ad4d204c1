//! Retention of one log on a simulated disk: what goes, what stays, and what a crash or a fault in between leaves.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use super::tests_support::{numbered, read_all, Bench};
use super::{FrontAge, LogOptions, ReadError};
use crate::io::sim::{Fault, NthCall, Op, SimDisk, Survival};
use crate::log::Records;
use crate::rt::{self, sim};

const HOUR: Duration = Duration::from_secs(3600);
/// 21 of these fill a segment of 64 KiB.
const BYTES: usize = 2_800;

fn options() -> LogOptions {
    LogOptions { segment_bytes: 64 << 10, retention_ms: HOUR.as_millis() as u64, ..LogOptions::default() }
}

fn run<F: std::future::Future<Output = ()> + 'static>(seed: u64, test: impl FnOnce(Bench) -> F + 'static) {
    sim::run(seed, async move { test(Bench::new(SimDisk::new(seed), options()).await).await });
}

fn segments_on_disk(bench: &Bench) -> usize {
    bench.device.files().iter().filter(|path| path.extension().is_some_and(|kind| kind == "log")).count()
}

#[test]
fn s66_s71_a_segment_goes_when_its_last_record_is_older_than_the_bound_and_not_before() {
    run(1, |bench| async move {
        bench.commit_numbered(0, 10, BYTES).await;
        rt::sleep(HOUR / 2).await;
        bench.commit_numbered(10, 30, BYTES).await; // fills the first segment, begins the second
        let log = bench.open().await;
        assert_eq!(log.segments(), 2);
        rt::sleep(HOUR * 3 / 4).await;
        log.retain().await;
        assert_eq!((log.oldest(), log.segments()), (0, 2), "its first records are old, its last are not");
        rt::sleep(HOUR / 2).await;
        bench.commit_numbered(30, 31, BYTES).await; // rolls: the second segment is older than the bound
        log.retain().await;
        assert_eq!((log.oldest(), log.segments(), segments_on_disk(&bench)), (30, 1, 1));
        assert_eq!(log.read(5, 1, 1).await.err(), Some(ReadError::AgedOut { oldest: 30 }));
        assert_eq!(Records::next_readable(&log, 5), 30);
        let metrics = log.metrics();
        assert_eq!((metrics.retention_records, metrics.damage_found), (30, 0));
        assert!(metrics.retention_bytes > 30 * BYTES as u64);
    });
}

#[test]
fn s66_zero_keeps_records_for_ever_and_a_new_bound_holds_at_once() {
    run(2, |bench| async move {
        bench.commit_numbered(0, 30, BYTES).await;
        let log = bench.open().await;
        log.set_retention_ms(0);
        rt::sleep(HOUR * 1000).await;
        log.retain().await;
        assert_eq!((log.oldest(), log.may_have_expired()), (0, false));
        log.set_retention_ms(HOUR.as_millis() as u64);
        assert!(log.may_have_expired());
        log.retain().await;
        assert_eq!(log.oldest(), 30, "s77: nothing has to be closed for it");
    });
}

#[test]
fn s69_s78_g16_an_idle_log_loses_everything_and_goes_on_with_its_next_offset() {
    run(3, |bench| async move {
        bench.commit_numbered(0, 3, BYTES).await;
        rt::sleep(HOUR + Duration::from_secs(60)).await;
        let log = bench.open().await;
        log.retain().await;
        let figures =
            |log: &super::PartitionLog| (log.oldest(), log.high_watermark(), log.next_offset(), log.segments());
        assert_eq!(figures(&log), (3, 3, 3, 1));
        assert_eq!((log.front_age(), segments_on_disk(&bench)), (FrontAge::Empty, 1));
        log.retain().await;
        assert_eq!(figures(&log), (3, 3, 3, 1), "an empty segment is left alone");
        let log = bench.reopen().await;
        assert_eq!(figures(&log), (3, 3, 3, 1));
        bench.commit_numbered(3, 5, BYTES).await;
        log.close().await.expect("stored");
        let log = bench.open().await;
        assert_eq!(figures(&log), (3, 5, 5, 1));
        assert_eq!(read_all(&log).await.0.len(), 2);
    });
}

#[test]
fn s67_ages_are_known_again_after_a_restart() {
    run(4, |bench| async move {
        bench.commit_numbered(0, 25, BYTES).await;
        rt::sleep(HOUR / 2).await;
        bench.commit_numbered(25, 65, BYTES).await;
        rt::sleep(HOUR * 2 / 3).await;
        let log = bench.reopen().await;
        assert_eq!((log.segments(), log.front_age()), (4, FrontAge::Unknown));
        log.retain().await;
        assert_eq!(log.oldest(), 21, "the second segment ends with a record of the second half hour");
        assert!(matches!(log.front_age(), FrontAge::LastWrite(_)));
        rt::sleep(HOUR / 2).await;
        let log = bench.reopen().await;
        log.retain().await;
        assert_eq!((log.oldest(), segments_on_disk(&bench)), (65, 1));
    });
}

#[test]
fn s71_a_damaged_header_makes_a_segment_stay_longer_never_shorter() {
    run(5, |bench| async move {
        bench.commit_numbered(0, 25, BYTES).await;
        rt::sleep(HOUR * 3 / 4).await;
        bench.commit_numbered(25, 45, BYTES).await;
        let second = bench.device.files().into_iter().filter(|path| path.to_string_lossy().ends_with(".log")).nth(1);
        let second = second.expect("three segments");
        for at in [20, 2048 + 20] {
            assert!(bench.device.flip_bit(&second, at, 1));
        }
        rt::sleep(HOUR / 2).await;
        let log = bench.reopen().await;
        log.retain().await;
        assert_eq!(log.oldest(), 0, "by the next header, the first segment may be as young as the second");
        rt::sleep(HOUR).await;
        log.retain().await;
        assert_eq!((log.oldest(), segments_on_disk(&bench)), (45, 1));
    });
}

#[test]
fn s72_a_tail_that_nobody_was_shown_is_never_sealed_or_removed() {
    run(6, |bench| async move {
        bench.commit_numbered(0, 3, BYTES).await;
        let log = bench.open().await;
        log.close().await.expect("stored");
        // A boundary below the records: what a crash inside a commit leaves after a clean close.
        let hidden = super::hwm::encode(2).expect("small");
        bench.edit(super::hwm::FILE_NAME, move |file| file.copy_from_slice(&hidden)).await;
        let log = bench.open().await;
        assert_eq!((log.high_watermark(), log.next_offset()), (2, 3));
        rt::sleep(HOUR * 3).await;
        log.retain().await;
        assert_eq!((log.oldest(), log.high_watermark(), log.segments()), (0, 2, 1));
    });
}

#[test]
fn s74_what_cannot_be_removed_is_counted_and_removed_later() {
    for op in [Op::Remove, Op::SyncDir] {
        run(7, move |bench| async move {
            bench.commit_numbered(0, 45, BYTES).await;
            rt::sleep(HOUR * 2).await;
            let log = bench.open().await;
            // The first sync of the directory is that of the new, empty segment.
            let nth = if op == Op::SyncDir { 2 } else { 1 };
            bench.device.inject(NthCall::new(op, nth, Fault::Fail));
            log.retain().await;
            assert_eq!(log.oldest(), 45, "readers see them gone");
            assert_eq!(log.metrics().retention_unlinks_failed, 1);
            assert!(segments_on_disk(&bench) > 1 && log.may_have_expired());
            log.retain().await;
            assert_eq!((segments_on_disk(&bench), log.may_have_expired()), (1, false));
            assert_eq!(log.metrics().retention_records, 45, "counted once");
        });
    }
}

#[test]
fn s73_s90_a_reader_of_a_segment_that_goes_finishes_or_hears_that_it_is_gone() {
    for seed in 0..40 {
        run(seed, move |bench| async move {
            bench.commit_numbered(0, 45, BYTES).await;
            rt::sleep(HOUR * 2).await;
            let log = bench.reopen().await;
            let reading = log.clone();
            let reader = rt::spawn(rt::Queue::Consume, async move {
                let mut outcomes = Vec::new();
                for offset in 0..45 {
                    outcomes.push(Records::read(&reading, offset).await);
                }
                outcomes
            });
            rt::sleep(Duration::from_micros(seed * 37)).await;
            log.retain().await;
            for (offset, outcome) in reader.await.into_iter().enumerate() {
                match outcome {
                    Ok(record) => assert_eq!(&record.body[..], &numbered(offset as u64, BYTES).body[..]),
                    Err(ReadError::AgedOut { oldest }) => assert!(oldest > offset as u64),
                    Err(other) => panic!("offset {offset}: {other:?}"),
                }
            }
            assert_eq!(log.metrics().damage_found, 0);
        });
    }
}

/// A pass with every disk call behind the `calls`-th hanging, then a crash. Returns whether the pass came to its end.
fn crash_after(calls: u64, survival: Option<Survival>) -> bool {
    let simulation = sim::Sim::new(9);
    let handle = simulation.clone();
    simulation.run(async move {
        let device = SimDisk::new(9);
        let ended = Rc::new(Cell::new(false));
        let (done, disk) = (ended.clone(), device.clone());
        handle.spawn_on(1, async move {
            let bench = Bench::new(disk.clone(), options()).await;
            bench.commit_numbered(0, 65, BYTES).await;
            rt::sleep(HOUR * 2).await;
            bench.commit_numbered(65, 70, BYTES).await;
            let log = bench.open().await;
            disk.freeze_after(calls);
            log.retain().await;
            done.set(true);
        });
        rt::sleep(HOUR * 3).await;
        handle.kill(1);
        device.clear_faults();
        match survival {
            Some(survival) => device.power_cut_as(survival),
            None => {
                device.process_crash();
                rt::sleep(Duration::from_millis(10)).await;
            }
        }
        let bench = Bench::new(device.clone(), options()).await;
        let log = bench.open().await;
        let (records, unreadable) = read_all(&log).await;
        assert_eq!((unreadable, log.metrics().damage_found), (vec![], 0), "a hole\n{}", device.trace());
        assert_eq!(log.high_watermark(), 70);
        assert!(log.oldest() <= 65);
        let expected: Vec<u64> = (log.oldest()..70).collect();
        assert_eq!(records.iter().map(|record| record.offset).collect::<Vec<_>>(), expected);
        log.retain().await;
        assert_eq!(segments_on_disk(&bench), log.segments() as usize);
        ended.get()
    })
}

#[test]
fn s61_a_crash_in_the_middle_of_a_pass_leaves_no_hole() {
    let outcomes = [Some(Survival::Nothing), Some(Survival::Everything), Some(Survival::Independent), None];
    for survival in outcomes {
        let mut calls = 0;
        while !crash_after(calls, survival) {
            calls += 1;
            assert!(calls < 200, "the pass never ends");
        }
        assert!(calls >= 6, "only {calls} calls: three segments go");
    }
}

#[test]
fn s82_a_pass_and_a_close_exclude_each_other() {
    for seed in 0..40 {
        run(seed, move |bench| async move {
            bench.commit_numbered(0, 65, BYTES).await;
            rt::sleep(HOUR * 2).await;
            let log = bench.open().await;
            let passing = log.clone();
            let pass = rt::spawn(rt::Queue::Background, async move { passing.retain().await });
            rt::sleep(Duration::from_micros(seed * 41)).await;
            log.close().await.expect("stored");
            let log = bench.open().await;
            let found = segments_on_disk(&bench);
            pass.await;
            rt::sleep(Duration::from_secs(1)).await;
            assert_eq!(segments_on_disk(&bench), found, "nothing goes under a log that was opened again");
            assert_eq!(log.segments() as usize, found);
        });
    }
}

#[test]
fn n53_2_s52_a_closed_log_still_tells_its_figures() {
    run(10, |bench| async move {
        bench.commit_numbered(0, 30, BYTES).await;
        let log = bench.open().await;
        let figures = |log: &super::PartitionLog| {
            (
                log.oldest(),
                log.high_watermark(),
                log.segments(),
                log.size_bytes(),
                log.oldest_segment_at(),
                log.front_age(),
            )
        };
        let before = figures(&log);
        log.close().await.expect("stored");
        assert_eq!(figures(&log), before);
        rt::sleep(HOUR * 2).await;
        assert!(log.may_have_expired(), "what it takes to know that the closed log is due");
    });
}
