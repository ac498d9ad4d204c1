//! Kills and power cuts at every point of a commit, a roll, a first advance, a close (S61): what was answered is there,
//! what is there is whole, nothing counts as damage, and the log goes on.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use super::tests_support::{numbered, read_all, Bench};
use super::LogOptions;
use crate::io::sim::{SimDisk, Survival};
use crate::peer::Record;
use crate::rt::{self, sim};

const NODE: sim::NodeTag = 1;
/// What a killed process had in flight has landed by then, which the directory's lock waits for (E12).
const LANDED: Duration = Duration::from_millis(6);

/// What the test knows of a log: which bytes every answered offset must hold, and what was ever submitted.
#[derive(Clone, Default)]
struct Ledger {
    serial: Rc<Cell<u64>>,
    answered: Rc<RefCell<BTreeMap<u64, u64>>>,
    submitted: Rc<RefCell<BTreeSet<u64>>>,
}

/// A record that states its serial number, in a few sizes.
fn stamped(serial: u64) -> Record {
    let filler = numbered(serial, 300 + (serial % 7) as usize * 450);
    let body = [&serial.to_le_bytes()[..], &filler.body].concat();
    Record { body: crate::io::Slice::copy_from(&body), key_bytes: 8 }
}

impl Ledger {
    fn next(&self) -> Record {
        let serial = self.serial.get();
        self.serial.set(serial + 1);
        self.submitted.borrow_mut().insert(serial);
        stamped(serial)
    }

    /// Commits `count` records and notes them once they are answered; whether they were.
    async fn commit(&self, bench: &Bench, count: u64) -> bool {
        let first = self.serial.get();
        let records = (0..count).map(|_| self.next()).collect();
        let Ok(committed) = bench.commit(records).await else { return false };
        assert_eq!(committed.count, count);
        for index in 0..count {
            let replaced = self.answered.borrow_mut().insert(committed.base_offset + index, first + index);
            assert_eq!(replaced, None, "s27: offset {} was given out twice", committed.base_offset + index);
        }
        true
    }

    /// Opens the log and compares it with what is known.
    async fn check(&self, bench: &Bench) {
        let log = bench.reopen().await;
        let trace = || bench.device.trace();
        let (records, unreadable) = read_all(&log).await;
        assert_eq!(unreadable, Vec::<u64>::new(), "gaps after a crash\n{}", trace());
        assert_eq!(log.metrics().damage_found, 0, "a crash counted as damage\n{}", trace());
        let found: BTreeMap<u64, &[u8]> = records.iter().map(|record| (record.offset, &record.body[..])).collect();
        for (offset, serial) in self.answered.borrow().iter() {
            let bytes = found.get(offset).copied();
            assert_eq!(bytes, Some(&stamped(*serial).body[..]), "offset {offset} was answered\n{}", trace());
        }
        for (offset, bytes) in found {
            let serial = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
            assert!(self.submitted.borrow().contains(&serial), "offset {offset} holds what nobody sent\n{}", trace());
            assert_eq!(bytes, &stamped(serial).body[..], "offset {offset} holds changed bytes\n{}", trace());
        }
    }
}

/// Small frames, so that a commit has several of them to tear apart.
fn options() -> LogOptions {
    LogOptions { segment_bytes: 64 << 10, frame_bytes: 3_000, ..LogOptions::default() }
}

/// Commits, and now and then closes, until it is killed.
async fn work(ledger: Ledger, device: SimDisk, close: bool) {
    let bench = Bench::new(device, options()).await;
    loop {
        for _ in 0..6 {
            ledger.commit(&bench, 3).await;
        }
        if close {
            bench.open().await.close().await.expect("stored");
        }
    }
}

fn random_crashes(seed: u64, close: bool) {
    let simulation = sim::Sim::new(seed);
    let handle = simulation.clone();
    simulation.run(async move {
        let (device, ledger) = (SimDisk::new(seed), Ledger::default());
        let mut rng = sim::Rng::new(seed ^ 0xdead);
        for _ in 0..6 {
            handle.spawn_on(NODE, work(ledger.clone(), device.clone(), close));
            rt::sleep(Duration::from_nanos(rng.below(25_000_000))).await;
            handle.kill(NODE);
            if rng.chance(1, 2) {
                device.power_cut();
            } else {
                device.process_crash();
                rt::sleep(LANDED).await;
                // A process that died leaves the rest to a later power cut (lesson N2).
                if rng.chance(1, 3) {
                    let bench = Bench::new(device.clone(), options()).await;
                    ledger.check(&bench).await;
                    device.power_cut();
                }
            }
            let bench = Bench::new(device.clone(), options()).await;
            ledger.check(&bench).await;
            // Shorter than what was interrupted: nothing of that may show behind it, now or after the next cut.
            assert!(ledger.commit(&bench, 1).await, "the log goes on");
            device.power_cut_as(Survival::Nothing);
            let bench = Bench::new(device.clone(), options()).await;
            ledger.check(&bench).await;
        }
    });
}

#[test]
fn s61_crashes_at_any_time_without_a_clean_close() {
    (0..15).for_each(|seed| random_crashes(seed, false));
}

#[test]
fn s61_crashes_at_any_time_between_clean_closes() {
    (100..115).for_each(|seed| random_crashes(seed, true));
}

/// First commit, second commit, a roll, a clean close, the first advance of the next open, another roll.
async fn fixed_sequence(ledger: Ledger, device: SimDisk) {
    let bench = Bench::new(device, options()).await;
    ledger.commit(&bench, 1).await;
    ledger.commit(&bench, 20).await;
    ledger.commit(&bench, 30).await;
    bench.open().await.close().await.expect("stored");
    ledger.commit(&bench, 2).await;
    ledger.commit(&bench, 25).await;
}

/// Runs the sequence with every disk call behind the `calls`-th hanging, crashes it, and checks; returns whether the
/// sequence came to its end.
fn stop_after(calls: u64, survival: Option<Survival>, seed: u64) -> bool {
    let simulation = sim::Sim::new(seed);
    let handle = simulation.clone();
    simulation.run(async move {
        let (device, ledger) = (SimDisk::new(seed), Ledger::default());
        let ended = Rc::new(Cell::new(false));
        let (done, known, disk) = (ended.clone(), ledger.clone(), device.clone());
        device.freeze_after(calls);
        handle.spawn_on(NODE, async move {
            fixed_sequence(known, disk).await;
            done.set(true);
        });
        rt::sleep(Duration::from_secs(5)).await;
        handle.kill(NODE);
        device.clear_faults();
        match survival {
            Some(survival) => device.power_cut_as(survival),
            None => {
                device.process_crash();
                rt::sleep(LANDED).await;
            }
        }
        let bench = Bench::new(device.clone(), options()).await;
        ledger.check(&bench).await;
        assert!(ledger.commit(&bench, 1).await, "the log goes on");
        device.power_cut_as(Survival::Nothing);
        let bench = Bench::new(device.clone(), options()).await;
        ledger.check(&bench).await;
        ended.get()
    })
}

#[test]
fn s61_a_power_cut_or_a_kill_after_every_single_disk_call() {
    let outcomes = [Some(Survival::Nothing), Some(Survival::Everything), Some(Survival::Independent), None];
    for (seed, survival) in outcomes.into_iter().enumerate() {
        let mut calls = 0;
        while !stop_after(calls, survival, seed as u64) {
            calls += 1;
            assert!(calls < 500, "the sequence never ends");
        }
        assert!(calls > 40, "only {calls} calls: the sequence does not do what it says");
    }
}
