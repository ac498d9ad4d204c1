//! Kills at every point of a commit, a roll, a first advance, a close (S61): what was answered is there, what is there
//! is whole, and the log goes on.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use super::testing::{numbered, read_all, Bench};
use super::LogOptions;
use crate::io::sim::SimDisk;
use crate::rt::{self, sim};

const NODE: sim::NodeTag = 1;

/// Commits numbered records until it is killed after `life`; returns how many were answered. Every record's bytes
/// follow from its offset, so a duplicate or a foreign record would show.
async fn live_and_die(handle: &sim::Sim, disk: &SimDisk, options: &LogOptions, life: Duration, close: bool) -> u64 {
    let answered: Rc<RefCell<u64>> = Rc::default();
    let (count, disk, options) = (answered.clone(), disk.clone(), options.clone());
    handle.spawn_on(NODE, async move {
        let bench = Bench::new(disk, options).await;
        let mut next = bench.open().await.next_offset();
        loop {
            for _ in 0..8 {
                let records = (next..next + 3).map(|n| numbered(n, 700 + (n % 5) as usize * 900)).collect();
                let committed = bench.commit(records).await.expect("a perfect disk");
                assert_eq!((committed.base_offset, committed.count), (next, 3));
                next += 3;
                *count.borrow_mut() = next;
            }
            if close {
                bench.open().await.close().await;
            }
        }
    });
    rt::sleep(life).await;
    handle.kill(NODE);
    let answered = *answered.borrow();
    answered
}

fn crash(seed: u64, close: bool) {
    let simulation = sim::Sim::new(seed);
    let handle = simulation.clone();
    simulation.run(async move {
        let disk = SimDisk::new(seed);
        let options = LogOptions { segment_bytes: 64 << 10, ..LogOptions::default() };
        let mut rng = sim::Rng::new(seed ^ 0xdead);
        let mut answered = 0;
        for _ in 0..6 {
            let life = Duration::from_nanos(rng.below(30_000_000));
            answered = live_and_die(&handle, &disk, &options, life, close).await.max(answered);
            let bench = Bench::new(disk.clone(), options.clone()).await;
            let log = bench.open().await;
            assert!(log.next_offset() >= answered, "{} stored of {answered} answered", log.next_offset());
            assert!(log.high_watermark() >= answered, "{} visible of {answered} answered", log.high_watermark());
            let (records, unreadable) = read_all(&log).await;
            assert_eq!(unreadable, Vec::<u64>::new());
            for (offset, record) in records.iter().enumerate() {
                let expected = numbered(offset as u64, 700 + offset % 5 * 900);
                assert_eq!((record.offset, &record.body[..]), (offset as u64, &expected.body[..]));
            }
            assert_eq!(log.metrics().damage_found, 0, "a crash is no damage");
            answered = log.high_watermark();
        }
    });
}

#[test]
fn s61_killed_anywhere_without_a_clean_close() {
    (0..60).for_each(|seed| crash(seed, false));
}

#[test]
fn s61_killed_anywhere_between_clean_closes() {
    (100..160).for_each(|seed| crash(seed, true));
}
