//! Disk calls that go wrong, one at a time (S64): which failures are clean, which poison, what is left behind.

use std::time::Duration;

use super::tests_support::{numbered, read_all, Bench};
use super::{hwm, LogOptions, ReadError};
use crate::io::sim::{Fault, NthCall, Op, SimDisk, Survival};
use crate::log_lines::LogLines;
use crate::peer::{CommitError, Committed};
use crate::rt::{self, sim};

const SEGMENT: &str = ".log";

fn options() -> LogOptions {
    LogOptions { segment_bytes: 64 << 10, ..LogOptions::default() }
}

fn run<F: std::future::Future<Output = ()> + 'static>(seed: u64, test: impl FnOnce(Bench) -> F + 'static) {
    sim::run(seed, async move { test(Bench::new(SimDisk::new(seed), options()).await).await });
}

fn is_clean(outcome: &Result<Committed, CommitError>) -> bool {
    matches!(outcome, Err(CommitError::Failed(_)))
}

fn is_poison(outcome: &Result<Committed, CommitError>) -> bool {
    matches!(outcome, Err(CommitError::Poisoned(_)))
}

/// The records `0..count`, each once, and nothing else.
async fn holds_exactly(bench: &Bench, count: u64) {
    let log = bench.open().await;
    let (records, unreadable) = read_all(&log).await;
    assert_eq!((records.len() as u64, unreadable), (count, vec![]));
    for record in records {
        assert_eq!(&record.body[..], &numbered(record.offset, 500).body[..]);
    }
}

#[test]
fn s33_s34_a_clean_failure_leaves_nothing_and_the_retry_gets_the_same_offset() {
    let read_back = |fault| NthCall::new(Op::Read, 1, fault).on(SEGMENT);
    let cases: Vec<(&str, u64, NthCall)> = vec![
        ("the device did nothing", 3, NthCall::new(Op::WriteDurable, 1, Fault::Skip).on(SEGMENT)),
        ("reading back fails", 3, read_back(Fault::Fail)),
        ("the directory cannot be made", 0, NthCall::new(Op::CreateDir, 1, Fault::NoSpace)),
        ("its parent cannot be synced", 0, NthCall::new(Op::SyncDir, 1, Fault::Fail)),
        ("the segment cannot be made", 0, NthCall::new(Op::Open, 1, Fault::NoSpace).on(SEGMENT)),
        ("its header cannot be written", 0, NthCall::new(Op::WriteDurable, 1, Fault::Fail).on(SEGMENT)),
        ("its header is written in part", 0, NthCall::new(Op::WriteDurable, 1, Fault::Short).on(SEGMENT)),
        ("its name cannot be synced", 0, NthCall::new(Op::SyncDir, 2, Fault::Fail)),
    ];
    for (name, before, fault) in cases {
        for seed in 0..5 {
            let fault = fault.clone();
            run(seed, move |bench| async move {
                for number in 0..before {
                    assert!(bench.commit(vec![numbered(number, 500)]).await.is_ok());
                }
                bench.open().await;
                bench.device.inject(fault);
                let failed = bench.commit(vec![numbered(77, 9_000), numbered(78, 500)]).await;
                assert!(is_clean(&failed), "{name}: {failed:?}");
                // What is tried again is shorter: nothing of the failed attempt may show behind it (S37).
                let again = bench.commit(vec![numbered(before, 500)]).await;
                assert_eq!(again, Ok(Committed { base_offset: before, count: 1 }), "{name}");
                holds_exactly(&bench, before + 1).await;
                bench.device.power_cut();
                bench.reopen().await;
                holds_exactly(&bench, before + 1).await;
                assert_eq!(bench.open().await.metrics().damage_found, 0, "{name}");
            });
        }
    }
}

#[test]
fn e14_any_error_of_a_submitted_durable_write_poisons() {
    for fault in [Fault::Fail, Fault::NoSpace, Fault::Short] {
        for seed in 0..10 {
            run(seed, move |bench| async move {
                for number in 0..5 {
                    assert!(bench.commit(vec![numbered(number, 500)]).await.is_ok());
                }
                bench.device.inject(NthCall::new(Op::WriteDurable, 1, fault).on(SEGMENT));
                let failed = bench.commit((5..9).map(|n| numbered(n, 500)).collect()).await;
                assert!(is_poison(&failed), "{fault:?}: {failed:?}");
                // S40, E15: what is visible stays readable, the tail block whatever the failed write did to it.
                holds_exactly(&bench, 5).await;
                assert!(is_poison(&bench.commit(vec![numbered(5, 500)]).await), "s38: latched");
                assert_eq!(bench.open().await.next_offset(), 5);
                // S41: a close and an open with a full scan clear it; what the write left may surface (R11).
                bench.open().await.close().await.expect("stored");
                let log = bench.open().await;
                assert_eq!((log.is_poisoned(), log.high_watermark()), (None, 5), "s51: still hidden");
                let next = log.next_offset();
                assert!((5..=9).contains(&next));
                let again = bench.commit(vec![numbered(next, 500)]).await;
                assert_eq!(again, Ok(Committed { base_offset: next, count: 1 }));
                holds_exactly(&bench, next + 1).await;
            });
        }
    }
}

#[test]
fn s43_a_cut_that_fails_poisons() {
    for seed in 0..10 {
        run(seed, |bench| async move {
            assert!(bench.commit(vec![numbered(0, 500)]).await.is_ok());
            // The write does nothing, so the read-back differs; then the zeroing fails.
            bench.device.inject(NthCall::new(Op::WriteDurable, 1, Fault::Skip).on(SEGMENT));
            bench.device.inject(NthCall::new(Op::WriteDurable, 2, Fault::Fail).on(SEGMENT));
            let failed = bench.commit(vec![numbered(1, 500)]).await;
            assert!(is_poison(&failed), "{failed:?}");
            holds_exactly(&bench, 1).await;
        });
    }
}

#[test]
fn e14_changed_committed_bytes_poison() {
    run(1, |bench| async move {
        bench.commit_numbered(0, 2, 500).await;
        let path = bench.gate.dir.join("00000000000000000000.log");
        // A device that takes a write back some time later: the rewritten block holds older bytes.
        let before = bench.device.peek(&path).expect("there");
        bench.device.inject(NthCall::new(Op::Read, 1, Fault::Stall(Duration::from_millis(50))).on(SEGMENT));
        let (device, changed) = (bench.device.clone(), path.clone());
        rt::spawn(rt::Queue::Foreground, async move {
            rt::sleep(Duration::from_millis(20)).await;
            device.poke(&changed, 4096, &[0xee; 64]);
        });
        let failed = bench.commit(vec![numbered(2, 500)]).await;
        assert!(is_poison(&failed), "{failed:?}");
        holds_exactly(&bench, 2).await;
        drop(before);
    });
}

#[test]
fn s32_rot_between_write_and_read_back_is_caught_and_taken_back() {
    // In the new frame's payload, right behind it in the padding, and in the padding's last byte.
    for rotten in [2 * 560 + 100, 3 * 560, 4095] {
        run(2, move |bench| async move {
            bench.commit_numbered(0, 2, 500).await;
            let path = bench.gate.dir.join("00000000000000000000.log");
            bench.device.inject(NthCall::new(Op::Read, 1, Fault::Stall(Duration::from_millis(50))).on(SEGMENT));
            let device = bench.device.clone();
            rt::spawn(rt::Queue::Foreground, async move {
                rt::sleep(Duration::from_millis(20)).await;
                device.flip_bit(&path, 4096 + rotten, 3);
            });
            let failed = bench.commit(vec![numbered(2, 500)]).await;
            assert!(is_clean(&failed), "{rotten}: {failed:?}");
            bench.commit_numbered(2, 3, 500).await;
            holds_exactly(&bench, 3).await;
            assert_eq!(bench.open().await.metrics().read_back_mismatches, 1, "{rotten}");
        });
    }
}

#[test]
fn g18_a_boundary_that_cannot_be_emptied_fails_the_commit_and_is_tried_again() {
    for fault in [Fault::Fail, Fault::NoSpace, Fault::Short] {
        for seed in 0..10 {
            run(seed, move |bench| async move {
                bench.commit_numbered(0, 3, 500).await;
                bench.open().await.close().await.expect("stored");
                bench.open().await;
                bench.device.inject(NthCall::new(Op::WriteDurable, 1, fault).on(hwm::FILE_NAME));
                let failed = bench.commit(vec![numbered(3, 500)]).await;
                assert!(is_clean(&failed), "{fault:?}: {failed:?}");
                bench.commit_numbered(3, 5, 500).await;
                // S48: whatever the failed attempt did, no boundary below the visible records survives.
                bench.device.power_cut_as(Survival::Nothing);
                bench.reopen().await;
                holds_exactly(&bench, 5).await;
            });
        }
    }
}

#[test]
fn g24_a_failed_roll_fails_the_next_commit_only_and_heals() {
    for fault in [Fault::NoSpace, Fault::Fail] {
        run(3, move |bench| async move {
            bench.commit_numbered(0, 6, 9_000).await;
            bench.device.inject(NthCall::new(Op::Open, 1, fault).on(SEGMENT));
            let failed = bench.commit(vec![numbered(6, 9_000)]).await;
            assert!(is_clean(&failed), "{failed:?}");
            bench.commit_numbered(6, 8, 9_000).await;
            assert_eq!(bench.open().await.segments(), 2);
            let log = bench.reopen().await;
            assert_eq!(read_all(&log).await.0.len(), 8);
        });
    }
}

#[test]
fn n5_a_full_disk_fails_cleanly_and_heals_when_space_returns() {
    sim::run(4, async {
        let bench = Bench::new(SimDisk::new(4), LogOptions::default()).await;
        bench.commit_numbered(0, 3, 500).await;
        bench.device.set_capacity(Some(bench.device.used_bytes()));
        let failed = bench.commit(vec![numbered(3, 200_000)]).await;
        assert!(is_clean(&failed), "{failed:?}");
        bench.commit_numbered(3, 5, 500).await; // fits what is claimed
        bench.device.set_capacity(None);
        bench.commit(vec![numbered(5, 200_000)]).await.expect("space is back");
        assert_eq!(read_all(&bench.reopen().await).await.0.len(), 6);
    });
}

#[test]
fn a_fill_ahead_that_fails_or_stalls_costs_nothing_but_time() {
    for fault in [Fault::NoSpace, Fault::Fail, Fault::Stall(Duration::from_secs(3))] {
        sim::run(5, async move {
            let bench = Bench::new(SimDisk::new(5), LogOptions::default()).await;
            for op in [Op::Write, Op::SyncData] {
                bench.device.inject(NthCall::new(op, 1, fault).on(SEGMENT).times(3));
            }
            for number in 0..60 {
                assert!(bench.commit(vec![numbered(number, 500), numbered(number, 9_000)]).await.is_ok());
            }
            bench.device.clear_faults();
            rt::sleep(Duration::from_secs(10)).await; // what was stalled has landed
            let (records, unreadable) = read_all(&bench.reopen().await).await;
            assert_eq!((records.len(), unreadable.len()), (120, 0));
        });
    }
}

#[test]
fn s93_a_failing_read_is_transient() {
    run(6, |bench| async move {
        bench.commit_numbered(0, 10, 5_000).await;
        let log = bench.reopen().await;
        bench.device.inject(NthCall::new(Op::Read, 1, Fault::Fail).on(SEGMENT));
        assert!(matches!(log.read(0, 1, 1).await, Err(ReadError::Io(_))));
        assert_eq!(log.read(0, 1, 1).await.map(|r| r.len()), Ok(1));
        assert_eq!(log.metrics().damage_found, 0);
    });
}

#[test]
fn a_boundary_that_fails_after_whoever_closed_the_log_has_gone_is_said_all_the_same() {
    run(7, |bench| async move {
        bench.commit_numbered(0, 3, 500).await;
        let log = bench.open().await;
        let (lines, _guard) = LogLines::of_this_thread();
        bench.device.inject(NthCall::new(Op::Open, 1, Fault::Stall(Duration::from_secs(5))).on(hwm::FILE_NAME));
        bench.device.inject(NthCall::new(Op::WriteDurable, 1, Fault::NoSpace).on(hwm::FILE_NAME));
        assert!(rt::timeout(Duration::from_secs(1), Box::pin(log.close())).await.is_err(), "it hangs");
        assert!(!lines.any_with(&["exact boundary"]));
        rt::sleep(Duration::from_secs(10)).await;
        assert!(log.is_closed());
        assert!(lines.any_with(&["WARN", "exact boundary", "No space left"]));
    });
}

#[test]
fn a_closed_log_whose_boundary_could_not_be_written_opens_all_the_same() {
    for fault in [Fault::Fail, Fault::Short, Fault::NoSpace] {
        for op in [Op::Open, Op::WriteDurable, Op::SyncDir] {
            run(7, move |bench| async move {
                bench.commit_numbered(0, 3, 500).await;
                let path = if op == Op::SyncDir { "" } else { hwm::FILE_NAME };
                bench.device.inject(NthCall::new(op, 1, fault).on(path));
                let _ = bench.open().await.close().await;
                bench.device.clear_faults();
                bench.open().await;
                holds_exactly(&bench, 3).await;
            });
        }
    }
}

#[test]
fn s47_an_open_that_cannot_sync_or_cut_fails_and_works_later() {
    for (op, fault) in [(Op::SyncData, Fault::Fail), (Op::Read, Fault::Fail), (Op::List, Fault::Fail)] {
        run(8, move |bench| async move {
            bench.commit_numbered(0, 3, 500).await;
            *bench.gate.log.borrow_mut() = None;
            bench.device.inject(NthCall::new(op, 1, fault));
            assert!(matches!(bench.try_open().await.err(), Some(super::OpenError::Io(_))), "{op:?}");
            holds_exactly(&bench, 3).await;
        });
    }
}

#[test]
fn s62_s63_a_lying_sync_loses_at_most_what_it_lied_about() {
    for seed in 0..30 {
        run(seed, move |bench| async move {
            bench.commit_numbered(0, 4, 500).await;
            bench.device.inject(NthCall::new(Op::WriteDurable, 1, Fault::Lie).on(SEGMENT));
            bench.commit_numbered(4, 5, 500).await;
            bench.device.power_cut();
            let log = bench.reopen().await;
            let high = log.high_watermark();
            assert!(high == 4 || high == 5, "{high}");
            holds_exactly(&bench, high).await;
            bench.commit_numbered(high, high + 1, 500).await;
            bench.reopen().await;
            holds_exactly(&bench, high + 1).await;
        });
    }
}

#[test]
fn a_slow_disk_only_takes_longer() {
    run(9, |bench| async move {
        bench.device.set_slowness(1_000);
        for number in 0..5 {
            assert!(bench.commit(vec![numbered(number, 500)]).await.is_ok());
        }
        holds_exactly(&bench, 5).await;
    });
}

#[test]
fn a_close_waits_for_the_fill_under_way() {
    sim::run(10, async {
        let bench = Bench::new(SimDisk::new(10), LogOptions::default()).await;
        bench.device.inject(NthCall::new(Op::Write, 1, Fault::Stall(Duration::from_secs(3))).on(SEGMENT));
        for number in 0..4 {
            bench.commit(vec![numbered(number, 9_000)]).await.expect("committed");
        }
        bench.open().await.close().await.expect("stored");
        // The zeros on their way then would land in the middle of these.
        for number in 4..14 {
            bench.commit(vec![numbered(number, 9_000)]).await.expect("committed");
        }
        rt::sleep(Duration::from_secs(10)).await;
        let (records, unreadable) = read_all(&bench.reopen().await).await;
        assert_eq!((records.len(), unreadable.len()), (14, 0));
    });
}

#[test]
fn g24_a_roll_that_failed_comes_before_anything_else_is_appended() {
    for (seed, op, fault) in [
        (12, Op::SyncDir, Fault::Fail),
        // Lands in part, as on a disk that runs full under the write.
        (13, Op::WriteDurable, Fault::Fail),
        (14, Op::WriteDurable, Fault::Short),
    ] {
        sim::run(seed, async move {
            let bench = Bench::new(SimDisk::new(seed), options()).await;
            bench.commit(vec![numbered(0, 40_000)]).await.expect("committed");
            bench.device.inject(NthCall::new(op, 1, fault).on(if op == Op::SyncDir { "" } else { SEGMENT }));
            let outcome = bench.commit(vec![numbered(1, 40_000)]).await;
            assert!(is_clean(&outcome), "no segment to go on in: {outcome:?}");
            // It would fit behind the first record, where no later open looks for it once the next segment is there.
            bench.commit(vec![numbered(1, 1_000)]).await.expect("committed");
            bench.commit(vec![numbered(2, 1_000)]).await.expect("committed");
            let (records, unreadable) = read_all(&bench.reopen().await).await;
            assert_eq!((records.len(), unreadable), (3, vec![]), "{op:?} {fault:?}");
            assert_eq!(&records[2].body[..], &numbered(2, 1_000).body[..]);
        });
    }
}

#[test]
fn s94_a_medium_that_errs_once_costs_no_record() {
    run(11, |bench| async move {
        bench.commit_numbered(0, 5, 5_000).await;
        let log = bench.reopen().await;
        let path = bench.gate.dir.join("00000000000000000000.log");
        bench.device.flip_bit(&path, 4096 + 100, 1);
        bench.device.inject(NthCall::new(Op::Read, 2, Fault::Stall(Duration::from_millis(50))).on(SEGMENT));
        let device = bench.device.clone();
        rt::spawn(rt::Queue::Foreground, async move {
            rt::sleep(Duration::from_millis(20)).await;
            device.flip_bit(&path, 4096 + 100, 1);
        });
        assert_eq!(log.read(0, 1, 1).await.map(|r| r.len()), Ok(1));
        assert_eq!((log.next_readable(0), log.metrics().damage_found), (0, 0));
    });
}
