//! Group borders, submission rules and memory, without a disk.

use std::time::Duration;

use super::*;
use crate::io::sim::SimDisk;
use crate::io::Disk;
use crate::meta::Incarnation;
use crate::rt::sim::{run, Rng};
use crate::wal::header::{Header, State};
use crate::wal::recovery::{Depth, Step, Walk, Window};
use crate::wal::segment::Folder;

const SEGMENT_BYTES: u64 = 256 << 10;

fn folder() -> Folder {
    Folder { disk: Disk::Sim(SimDisk::new(1)), dir: "/ingress/0".into(), dir_number: 0, store_id: 1 }
}

fn segment(number: u64, prepared: bool) -> Rc<Segment> {
    Rc::new(Segment::planned(&folder(), number, SEGMENT_BYTES, prepared))
}

fn active(prepared: bool) -> Rc<Segment> {
    let segment = segment(1, prepared);
    segment.first_seq.set(1);
    segment.active.set(true);
    segment
}

fn record(payload: &[u8]) -> NewWalRecord<'_> {
    NewWalRecord { topic: "t", incarnation: Incarnation(1), key: b"", partition: 0, accepted_at_ms: 0, payload }
}

/// Stages `count` records of `bytes` each; rolls go to segments 2, 3, ...
fn stage(staging: &mut Staging, count: usize, bytes: usize) -> Result<Rc<Outcome>, AppendError> {
    let payload = vec![5; bytes];
    let records = vec![record(&payload); count];
    let plan = staging.plan(&records, SEGMENT_BYTES)?;
    match staging.stage(plan, &records, SEGMENT_BYTES, &mut || segment(2, true))? {
        Staged::Yes { outcome, .. } => Ok(outcome),
        Staged::NoRoomYet => Err(AppendError::MemoryExhausted),
    }
}

fn next(staging: &Staging) -> &'static str {
    match staging.next() {
        Next::Idle => "idle",
        Next::Blocked => "blocked",
        Next::Roll(_) => "roll",
        Next::Submit => "submit",
    }
}

fn submit(staging: &mut Staging) -> u64 {
    assert_eq!(next(staging), "submit");
    staging.submit(Instant(0)).expect("a group").0
}

#[test]
fn e7_a_second_group_starts_only_while_few_records_are_in_flight() {
    run(1, async {
        let mut staging = Staging::new(16 << 20, Some(active(true)), 1);
        assert_eq!(next(&staging), "idle");
        stage(&mut staging, 15, 10).expect("room");
        submit(&mut staging);
        stage(&mut staging, 1, 10).expect("room");
        submit(&mut staging);
        stage(&mut staging, 1, 10).expect("room");
        assert_eq!(next(&staging), "blocked", "two are in flight");

        let mut staging = Staging::new(16 << 20, Some(active(true)), 1);
        stage(&mut staging, 16, 10).expect("room");
        let first = submit(&mut staging);
        stage(&mut staging, 1, 10).expect("room");
        assert_eq!(next(&staging), "blocked", "many callers wait: gather");
        staging.landed(first, |_| {});
        submit(&mut staging);
    });
}

#[test]
fn e7_an_unprepared_segment_has_one_group_in_flight() {
    run(2, async {
        let mut staging = Staging::new(16 << 20, Some(active(false)), 1);
        stage(&mut staging, 1, 10).expect("room");
        let first = submit(&mut staging);
        stage(&mut staging, 1, 10).expect("room");
        assert_eq!(next(&staging), "blocked");
        staging.landed(first, |_| {});
        submit(&mut staging);
    });
}

#[test]
fn e7_a_roll_waits_for_every_group_in_flight() {
    run(3, async {
        let mut staging = Staging::new(16 << 20, Some(active(true)), 1);
        stage(&mut staging, 3, 60_000).expect("room");
        let first = submit(&mut staging);
        stage(&mut staging, 3, 60_000).expect("room"); // one more fits, then the segment is full
        let second = submit(&mut staging);
        assert_eq!(next(&staging), "blocked");
        staging.landed(second, |_| {});
        assert_eq!((next(&staging), staging.durable_next), ("blocked", 1));
        staging.landed(first, |_| {});
        assert_eq!((next(&staging), staging.durable_next), ("roll", 5));
    });
}

#[test]
fn e7_full_chunks_go_at_once_but_never_more_than_four() {
    run(4, async {
        let segment = active(true);
        let folder = folder();
        let big = Rc::new(Segment::planned(&folder, 9, 64 << 20, true));
        big.active.set(true);
        big.first_seq.set(1);
        drop(segment);
        let mut staging = Staging::new(32 << 20, Some(big), 1);
        let payload = vec![1; 1_000_000];
        let records = vec![record(&payload); 12];
        let plan = staging.plan(&records, 64 << 20).expect("fits");
        let staged = staging.stage(plan, &records, 64 << 20, &mut || unreachable!("it fits the segment"));
        assert!(staged.is_ok());
        let ids: Vec<u64> = (0..4).map(|_| submit(&mut staging)).collect();
        assert_eq!(next(&staging), "blocked");
        staging.landed(ids[0], |_| {});
        submit(&mut staging);
        assert_eq!(next(&staging), "blocked");
    });
}

#[test]
fn e7_durable_is_the_contiguous_prefix_and_a_failure_takes_the_rest() {
    run(5, async {
        let mut staging = Staging::new(16 << 20, Some(active(true)), 1);
        let first = stage(&mut staging, 2, 10).expect("room");
        let first_id = submit(&mut staging);
        let second = stage(&mut staging, 2, 10).expect("room");
        let second_id = submit(&mut staging);
        let third = stage(&mut staging, 1, 10).expect("room");
        staging.landed(second_id, |_| panic!("nothing is durable yet"));
        assert_eq!(staging.durable_next, 1);
        staging.landed(first_id, |_| {});
        assert_eq!(staging.durable_next, 5);
        assert_eq!((first.wait().await, second.wait().await), (Ok(()), Ok(())));
        staging.fail("EIO");
        assert_eq!(third.wait().await, Err(AppendError::LogFailed("EIO".into())));
        assert!(staging.is_idle());
        let mut seen = Vec::new();
        let end = staging.take_held(1, |head, _, _| {
            seen.push(head.seq);
            true
        });
        assert_eq!((end, seen), (Some(5), vec![1, 2, 3, 4]), "what is durable is still handed out");
    });
}

#[test]
fn e9_a_withdrawn_roll_gives_everything_back() {
    run(6, async {
        let first = active(true);
        let mut staging = Staging::new(16 << 20, Some(first.clone()), 1);
        let before = stage(&mut staging, 3, 60_000).expect("room");
        let group = submit(&mut staging);
        staging.landed(group, |_| {});
        let spanning = stage(&mut staging, 3, 60_000).expect("room");
        let group = submit(&mut staging);
        staging.landed(group, |_| {});
        let Next::Roll(second) = staging.next() else { panic!("the segment is full") };
        assert_eq!(second.first_seq.get(), 5);
        let error = AppendError::Unavailable("no space".into());
        staging.withdraw(&error, Some(first), 5);
        assert_eq!((before.wait().await, spanning.wait().await), (Ok(()), Err(error)));
        assert_eq!((staging.next_seq, staging.durable_next), (5, 5));
        stage(&mut staging, 1, 100).expect("a small one still fits");
        let (_, segment, offset, _) = staging.submit(Instant(0)).expect("a group");
        assert!(segment.active.get() && offset + BLOCK_BYTES <= SEGMENT_BYTES);
    });
}

#[test]
fn a_batch_that_cannot_be_staged_changes_nothing() {
    run(7, async {
        let mut staging = Staging::new(4 << 20, Some(active(true)), 1);
        stage(&mut staging, 2, 10).expect("room");
        assert_eq!(stage(&mut staging, 2, SEGMENT_BYTES as usize).err(), Some(AppendError::TooLarge));
        assert_eq!(stage(&mut staging, 30, 200_000).err(), Some(AppendError::MemoryExhausted));
        assert_eq!(staging.next_seq, 3);
        let (_, _, offset, bytes) = staging.submit(Instant(0)).expect("a group");
        assert_eq!((offset, bytes.len() as u64), (BLOCK_BYTES, BLOCK_BYTES));
    });
}

/// Random appends: what is submitted is, segment by segment, exactly what a walk finds again; groups start on
/// blocks, never touch one another, and no frame spans two segments.
#[test]
fn submitted_groups_are_what_recovery_reads() {
    for seed in 0..60 {
        run(seed, async move {
            let mut rng = Rng::new(seed);
            let mut staging = Staging::new(4 << 20, Some(active(true)), 1);
            let mut images: Vec<(Rc<Segment>, Vec<u8>, u64)> = Vec::new();
            let mut in_flight = Vec::new();
            let mut taken = 1;
            for _ in 0..200 {
                if rng.chance(2, 3) {
                    let (count, bytes) = (rng.range(1, 9) as usize, rng.range(1, 12_000) as usize);
                    stage(&mut staging, count, bytes).expect("it turns over");
                }
                while let Next::Roll(segment) = staging.next() {
                    segment.active.set(true);
                }
                if next(&staging) == "submit" {
                    let (id, segment, offset, bytes) = staging.submit(Instant(0)).expect("a group");
                    assert_eq!((offset % BLOCK_BYTES, bytes.len() as u64 % BLOCK_BYTES), (0, 0));
                    if images.last().is_none_or(|last| !Rc::ptr_eq(&last.0, &segment)) {
                        images.push((segment.clone(), vec![0xcd; SEGMENT_BYTES as usize], BLOCK_BYTES));
                    }
                    let mut end = 0;
                    while end < bytes.len() && crate::le::get_u32(&bytes, end) != 0 {
                        end += Head::parse(&bytes[end..]).padded();
                    }
                    assert!(bytes[end..].iter().all(|byte| *byte == 0), "a group ends in zeros");
                    let image = images.last_mut().expect("just made");
                    assert_eq!(offset, image.2, "groups follow each other");
                    image.1[offset as usize..offset as usize + bytes.len()].copy_from_slice(&bytes);
                    image.2 += bytes.len() as u64;
                    in_flight.push(id);
                }
                if !in_flight.is_empty() && rng.chance(1, 2) {
                    let at = rng.below(in_flight.len() as u64) as usize;
                    staging.landed(in_flight.swap_remove(at), |_| {});
                    staging.take_held(taken, |_, _, _| true); // chunks are used again, with old bytes in them
                    taken = staging.durable_next;
                }
            }
            let mut expected = 1;
            for (segment, bytes, _) in &images {
                assert_eq!(segment.first_seq.get(), expected);
                let mut walk = Walk::new(segment.generation, SEGMENT_BYTES, BLOCK_BYTES, expected);
                while let Step::Frame { head, .. } = walk.step(Window { base: 0, bytes }, Depth::Whole) {
                    assert!(head.group_mark <= head.seq, "a mark never lies ahead of its own frame");
                }
                expected = walk.next_seq;
            }
            assert!(expected >= staging.durable_next && images.len() > 3, "seed {seed}: {expected}");
        });
    }
}

#[test]
fn a_group_is_timed_from_its_submission() {
    run(8, async {
        let mut staging = Staging::new(16 << 20, Some(active(true)), 1);
        stage(&mut staging, 2, 10).expect("room");
        let (id, ..) = staging.submit(Instant(7)).expect("a group");
        let mut seen = None;
        staging.landed(id, |landed| seen = Some((landed.records, landed.bytes, landed.submitted_at)));
        assert_eq!(seen, Some((2, BLOCK_BYTES, Instant(0) + Duration::from_nanos(7))));
    });
}

#[test]
fn e2_a_planned_segment_states_its_generation() {
    run(9, async {
        let planned = segment(4, true);
        let header = Header {
            state: State::Spare,
            store_id: 1,
            dir_number: 0,
            generation: planned.generation,
            first_seq: 1,
            segment_bytes: planned.bytes,
            prepared: true,
            recycled: false,
        };
        let reborn = planned.reborn();
        assert_eq!(Header::decode(&header.encode()).map(|found| found.generation), Ok(planned.generation));
        assert_ne!(reborn.generation, planned.generation);
        assert_ne!(reborn.seed, planned.seed);
    });
}
