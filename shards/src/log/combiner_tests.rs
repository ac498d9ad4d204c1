//! Commit combining: who takes part, who is refused, what a vanished caller changes.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use super::tests_support::{batch, numbered, read_all, Bench, LIVE};
use super::{LogOptions, Standing};
use crate::io::sim::SimDisk;
use crate::meta::Incarnation;
use crate::peer::{CommitBatch, CommitError, Committed};
use crate::rt::{self, sim, Queue};

fn run<F: std::future::Future<Output = ()> + 'static>(seed: u64, test: impl FnOnce(Bench) -> F + 'static) {
    sim::run(seed, async move {
        let bench =
            Bench::new(SimDisk::new(seed), LogOptions { segment_bytes: 1 << 20, ..LogOptions::default() }).await;
        bench.open().await;
        test(bench).await
    });
}

fn start(bench: &Bench, batch: CommitBatch) -> rt::Task<Result<Committed, CommitError>> {
    let combiner = bench.combiner.clone();
    rt::spawn(Queue::Foreground, async move { combiner.commit(batch).await })
}

/// Starts a commit and waits until its cycle has drained the queue.
async fn occupy(bench: &Bench, number: u64) -> rt::Task<Result<Committed, CommitError>> {
    let task = start(bench, batch(vec![numbered(number, 10)]));
    let before = bench.gate.resolves.get();
    while bench.gate.resolves.get() == before || bench.combiner.queued() > 0 {
        rt::sleep(Duration::from_micros(1)).await;
    }
    task
}

async fn settle() {
    rt::sleep(Duration::from_micros(1)).await;
}

#[test]
fn batches_that_queue_together_share_one_write() {
    for seed in 0..10 {
        run(seed, |bench| async move {
            let leader = occupy(&bench, 0).await;
            let followers: Vec<_> =
                (1..20).map(|n| start(&bench, batch(vec![numbered(n, 100), numbered(n, 50)]))).collect();
            assert!(leader.await.is_ok());
            let mut offsets = Vec::new();
            for follower in followers {
                let committed = follower.await.expect("committed");
                assert_eq!(committed.count, 2);
                offsets.extend(committed.base_offset..committed.base_offset + committed.count);
            }
            offsets.sort_unstable();
            assert_eq!(offsets, (1..39).collect::<Vec<u64>>(), "contiguous, each once");
            let metrics = bench.open().await.metrics();
            assert_eq!((metrics.commits, metrics.records), (2, 39));
        });
    }
}

#[test]
fn s28_the_answer_comes_after_the_records_are_visible() {
    run(1, |bench| async move {
        let log = bench.open().await;
        let announced = Rc::new(Cell::new(0));
        let (seen, watched) = (announced.clone(), log.clone());
        log.set_on_visible(Rc::new(move || seen.set(watched.high_watermark())));
        let committed = bench.commit(vec![numbered(0, 10), numbered(1, 10)]).await;
        assert_eq!(committed, Ok(Committed { base_offset: 0, count: 2 }));
        assert_eq!((announced.get(), log.high_watermark()), (2, 2));
    });
}

#[test]
fn the_incarnation_is_checked_for_each_batch_alone() {
    run(2, |bench| async move {
        let leader = occupy(&bench, 0).await;
        let dead = Incarnation(0xdead);
        let stale = start(&bench, CommitBatch { accepted_under: Some(dead), ..batch(vec![numbered(1, 10)]) });
        let by_name = start(&bench, CommitBatch { accepted_under: None, ..batch(vec![numbered(2, 10)]) });
        let live = start(&bench, batch(vec![numbered(3, 10)]));
        assert!(leader.await.is_ok());
        assert_eq!(stale.await, Err(CommitError::IncarnationMismatch { accepted_under: dead, live: LIVE }));
        assert!(by_name.await.is_ok() && live.await.is_ok());
        assert_eq!(read_all(&bench.open().await).await.0.len(), 3);
    });
}

#[test]
fn e21_a_spent_batch_is_left_out_at_the_drain() {
    run(3, |bench| async move {
        let leader = occupy(&bench, 0).await;
        let spent = start(&bench, CommitBatch { budget: Duration::from_micros(1), ..batch(vec![numbered(1, 10)]) });
        let patient = start(&bench, batch(vec![numbered(2, 10)]));
        assert!(leader.await.is_ok());
        assert_eq!(spent.await, Err(CommitError::Spent));
        assert_eq!(patient.await.map(|c| c.base_offset), Ok(1));
    });
}

#[test]
fn a_caller_that_gave_up_in_the_queue_is_left_out() {
    run(4, |bench| async move {
        let leader = occupy(&bench, 0).await;
        let combiner = bench.combiner.clone();
        let gave_up = rt::timeout(Duration::from_nanos(1), combiner.commit(batch(vec![numbered(1, 10)]))).await;
        assert!(gave_up.is_err());
        assert!(leader.await.is_ok());
        assert_eq!(bench.commit(vec![numbered(2, 10)]).await.map(|c| c.base_offset), Ok(1));
    });
}

#[test]
fn a_caller_dropped_in_the_middle_of_a_cycle_changes_nothing() {
    for seed in 0..40 {
        run(seed, move |bench| async move {
            let mut rng = sim::Rng::new(seed);
            for number in 0..10 {
                let patience = Duration::from_nanos(rng.below(2_000_000));
                let commit = bench.combiner.commit(batch(vec![numbered(number, 200)]));
                let _ = rt::timeout(patience, commit).await; // dropped wherever it stands
            }
            let last = bench.commit(vec![numbered(99, 10)]).await.expect("the combiner goes on");
            let log = bench.open().await;
            assert_eq!(log.high_watermark(), last.base_offset + 1);
            let (records, unreadable) = read_all(&log).await;
            assert_eq!((records.len() as u64, unreadable.len()), (last.base_offset + 1, 0));
            let log = bench.reopen().await;
            assert_eq!(log.high_watermark(), last.base_offset + 1, "and the same after a crash");
        });
    }
}

#[test]
fn ownership_and_freeze_are_checked_in_the_section() {
    run(5, |bench| async move {
        for (standing, error) in [
            (Standing::NotOwner, CommitError::NotOwner),
            (Standing::Frozen, CommitError::Frozen),
            (Standing::UnknownTopic, CommitError::UnknownTopic),
        ] {
            let live = bench.gate.standing.get();
            let gate = bench.gate.clone();
            // It changes between looking the log up and the section.
            *bench.gate.on_resolve.borrow_mut() = Some(Box::new(move || gate.standing.set(standing)));
            assert_eq!(bench.commit(vec![numbered(0, 10)]).await, Err(error));
            *bench.gate.on_resolve.borrow_mut() = None;
            bench.gate.standing.set(live);
        }
        assert_eq!(bench.open().await.next_offset(), 0, "nothing appended");
        assert!(bench.commit(vec![numbered(0, 10)]).await.is_ok());
    });
}

#[test]
fn a_topic_record_that_keeps_moving_ends_after_three_tries() {
    run(6, |bench| async move {
        let gate = bench.gate.clone();
        let version = Rc::new(Cell::new(1u64));
        let (moving, moves) = (version.clone(), Rc::new(Cell::new(u32::MAX)));
        let left = moves.clone();
        *bench.gate.on_resolve.borrow_mut() = Some(Box::new(move || {
            if left.get() > 0 {
                left.set(left.get() - 1);
                moving.set(moving.get() + 1);
                gate.standing.set(Standing::Live { incarnation: LIVE, version: moving.get() });
            }
        }));
        let before = bench.gate.resolves.get();
        assert_eq!(bench.commit(vec![numbered(0, 10)]).await, Err(CommitError::NotOwner));
        assert_eq!(bench.gate.resolves.get() - before, 3);
        assert_eq!(bench.open().await.next_offset(), 0, "nothing appended");
        // Moving twice is survived.
        moves.set(2);
        assert!(bench.commit(vec![numbered(0, 10)]).await.is_ok());
    });
}

#[test]
fn s82_lesson_n10_a_close_never_cuts_into_a_cycle() {
    for seed in 0..40 {
        run(seed, move |bench| async move {
            let mut rng = sim::Rng::new(seed);
            for number in 0..6 {
                let task = start(&bench, batch(vec![numbered(number, 300)]));
                rt::sleep(Duration::from_nanos(rng.below(1_500_000))).await;
                let log = bench.gate.log.borrow().clone();
                if let Some(log) = log {
                    log.close().await.expect("stored");
                }
                // A log closed between two cycles is resolved again: the caller never sees it.
                assert_eq!(task.await, Ok(Committed { base_offset: number, count: 1 }));
            }
            assert_eq!(read_all(&bench.open().await).await.0.len(), 6);
        });
    }
}

#[test]
fn s82_a_retired_log_confirms_nothing() {
    for seed in 0..40 {
        run(seed, move |bench| async move {
            bench.commit_numbered(0, 1, 10).await;
            let log = bench.open().await;
            let task = start(&bench, batch(vec![numbered(1, 300)]));
            rt::sleep(Duration::from_nanos(sim::Rng::new(seed).below(1_500_000))).await;
            let visible = log.high_watermark();
            log.retire();
            let outcome = task.await;
            assert_eq!(log.high_watermark(), visible, "nothing becomes visible in a retired log");
            // The test's gate opens the directory again, where the real one would open a fresh one.
            assert!(outcome.is_ok(), "{outcome:?}");
        });
    }
}

#[test]
fn e16_a_cycle_takes_8_mib_at_most() {
    let options = LogOptions { segment_bytes: 64 << 20, ..LogOptions::default() };
    sim::run(7, async move {
        let bench = Bench::new(SimDisk::new(7), options).await;
        bench.open().await;
        let leader = occupy(&bench, 0).await;
        let followers: Vec<_> =
            (1..=10).map(|n| start(&bench, batch((0..3).map(|_| numbered(n, 1 << 20)).collect()))).collect();
        settle().await;
        assert!(leader.await.is_ok());
        for follower in followers {
            assert!(follower.await.is_ok());
        }
        assert_eq!(bench.open().await.metrics().commits, 1 + 5, "two batches of 3 MiB at a time");
    });
}

#[test]
fn e16_a_cycle_takes_what_fits_the_segment_and_the_rest_rolls() {
    run(8, |bench| async move {
        let leader = occupy(&bench, 0).await;
        let followers: Vec<_> =
            (1..=5).map(|n| start(&bench, batch((0..3).map(|_| numbered(n, 100 << 10)).collect()))).collect();
        assert!(leader.await.is_ok());
        for follower in followers {
            assert!(follower.await.is_ok());
        }
        let log = bench.open().await;
        assert_eq!((log.segments(), log.metrics().commits), (2, 3));
        assert_eq!(read_all(&log).await.0.len(), 16);
    });
}

#[test]
fn s36_a_failed_cycle_fails_everybody_with_one_error() {
    run(9, |bench| async move {
        let log = bench.open().await;
        let leader = occupy(&bench, 0).await;
        let followers: Vec<_> = (1..4).map(|n| start(&bench, batch(vec![numbered(n, 10)]))).collect();
        settle().await;
        log.poison("cause");
        assert!(leader.await.is_ok(), "written before");
        for follower in followers {
            assert_eq!(follower.await, Err(CommitError::Poisoned("cause".into())));
        }
    });
}
