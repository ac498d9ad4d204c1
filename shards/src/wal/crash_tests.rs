//! A WAL under load, a dispatcher that takes its time, and crashes at any moment. From one seed each.
//!
//! What must hold after every restart: each record that was answered and not yet below the checkpoint is there, in
//! the place it was given, with its content; no number is ever given to two answered records; nothing that was cut
//! comes back; open never refuses.

use std::collections::BTreeMap;
use std::time::Duration;

use super::test_support::*;
use super::*;
use crate::io::sim::{DiskOptions, FaultRates, SimDisk};
use crate::rt::sim::{Rng, Sim};

const NODE: u32 = 1;

/// What the world outside knows.
#[derive(Default)]
struct Ledger {
    next_id: u64,
    /// Number → record, of every answer.
    answered: BTreeMap<u64, u64>,
    /// Records below this were handed to the dispatcher, and it said so.
    dispatched: u64,
    latched: u64,
}

async fn produce(wal: Wal, ledger: Rc<RefCell<Ledger>>, mut rng: Rng) {
    loop {
        let count = if rng.chance(1, 4) { rng.range(2, 40) } else { 1 };
        let bytes = if rng.chance(1, 10) { rng.range(5_000, 30_000) } else { rng.range(8, 900) };
        let first = {
            let mut ledger = ledger.borrow_mut();
            ledger.next_id += count;
            ledger.next_id - count
        };
        match append(&wal, first..first + count, bytes as usize).await {
            Ok(seqs) => {
                assert_eq!(seqs.end - seqs.start, count);
                let mut ledger = ledger.borrow_mut();
                for (seq, id) in seqs.zip(first..) {
                    let before = ledger.answered.insert(seq, id);
                    assert_eq!(before, None, "{seq} was given to two answered records");
                }
            }
            Err(AppendError::LogFailed(_)) => {
                ledger.borrow_mut().latched += 1;
                rt::sleep(Duration::from_millis(50)).await;
            }
            Err(AppendError::Unavailable(_) | AppendError::MemoryExhausted) => {
                rt::sleep(Duration::from_millis(1)).await;
            }
            // Its first records may turn up, as those of an append that nobody has heard of.
            Err(AppendError::StoredInPart(_)) => rt::sleep(Duration::from_millis(1)).await,
            Err(AppendError::TooLarge) => panic!("nothing here is too large"),
        }
        if rng.chance(1, 3) {
            rt::sleep(Duration::from_micros(rng.below(3000))).await;
        }
    }
}

async fn dispatch(wal: Wal, ledger: Rc<RefCell<Ledger>>, mut rng: Rng) {
    let mut next = wal.recovered_checkpoint();
    let limit = ReadLimit { records_max: 200, bytes_max: 1 << 20 };
    loop {
        if next >= wal.durable_next() {
            wal.durable_advanced().notified().await;
            continue;
        }
        let read = match wal.read_memory(next, limit) {
            Some(read) => read,
            None => match wal.read_disk(next, wal.durable_next(), limit, &|_| true).await {
                Ok(read) => read,
                Err(error) => panic!("{error}"),
            },
        };
        for (record, seq) in read.records.iter().zip(next..) {
            check(record);
            assert_eq!(record.seq, seq, "no gap");
            let answered = ledger.borrow().answered.get(&seq).copied();
            assert!(answered.is_none_or(|id| id == id_of(record)), "record {seq} is another one");
        }
        assert!(read.next > next);
        next = read.next;
        rt::sleep(Duration::from_micros(rng.below(20_000))).await;
        ledger.borrow_mut().dispatched = next;
        wal.store_checkpoint(next);
    }
}

/// After a crash: nothing is missing.
async fn audit(wal: &Wal, ledger: &Rc<RefCell<Ledger>>, what: &str) {
    let from = wal.recovered_checkpoint();
    let found: BTreeMap<u64, u64> =
        from_disk(wal, from).await.iter().map(|record| (record.seq, id_of(record))).collect();
    let expected: Vec<u64> = (from..wal.durable_next()).collect();
    assert_eq!(found.keys().copied().collect::<Vec<_>>(), expected, "{what}: a gap");
    let mut ledger = ledger.borrow_mut();
    assert!(from <= ledger.dispatched.max(1), "{what}: the checkpoint passed what was dispatched");
    for (seq, id) in ledger.answered.range(from..) {
        assert_eq!(found.get(seq), Some(id), "{what}: record {id} was answered as {seq}");
    }
    // What was not answered but survived has its number for good, too.
    ledger.answered.extend(found);
}

fn run_seed(seed: u64, faults: FaultRates, shape: impl Fn(&mut Rng, &SimDisk)) -> Rc<RefCell<Ledger>> {
    let sim = Sim::new(seed);
    let handle = sim.clone();
    let ledger: Rc<RefCell<Ledger>> = Rc::default();
    let seen = ledger.clone();
    let mut rng = Rng::new(seed);
    let sector_bytes = if rng.chance(1, 2) { 512 } else { 4096 };
    let disk = SimDisk::with(rng.next_u64(), DiskOptions { sector_bytes, ..DiskOptions::default() });
    shape(&mut rng, &disk);
    let segment_bytes = [64 << 10, 128 << 10, 512 << 10][rng.below(3) as usize];
    sim.run(async move {
        for round in 0..6 {
            let what = format!("seed {seed}, round {round}");
            disk.set_rates(FaultRates::default());
            let wal = match Wal::open(options(&disk, segment_bytes)).await {
                Ok(wal) => wal,
                Err(error) => panic!("{what}: {error}\n{}", disk.trace()),
            };
            audit(&wal, &ledger, &what).await;
            wal.close().await.expect("stored");
            drop(wal);
            disk.set_rates(faults);
            let (disk_of_node, node_ledger, mut node_rng) = (disk.clone(), ledger.clone(), rng.fork());
            let handle_of_node = handle.clone();
            handle.spawn_on(NODE, async move {
                // Opening may meet the faults too: it is tried until it works, as an operator would.
                let wal = loop {
                    match Wal::open(options(&disk_of_node, segment_bytes)).await {
                        Ok(wal) => break wal,
                        Err(WalOpenError::Io { .. }) => rt::sleep(Duration::from_millis(5)).await,
                        Err(error) => panic!("{error}"),
                    }
                };
                for _ in 0..node_rng.range(1, 12) {
                    handle_of_node.spawn_on(NODE, produce(wal.clone(), node_ledger.clone(), node_rng.fork()));
                }
                handle_of_node.spawn_on(NODE, dispatch(wal.clone(), node_ledger.clone(), node_rng.fork()));
            });
            rt::sleep(Duration::from_micros(rng.range(100, 150_000))).await;
            handle.kill(NODE);
            if rng.chance(1, 2) {
                disk.power_cut();
            } else {
                disk.process_crash();
                // The lock of the data directory comes free only after the dead process's last write (E12).
                rt::sleep(Duration::from_secs(1)).await;
            }
        }
    });
    seen
}

fn seeds(name: &str, default: u64) -> std::ops::Range<u64> {
    let count = std::env::var("NARAD_WAL_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(default);
    let base = name.len() as u64 * 1_000_000;
    base..base + count
}

#[test]
fn a_202_survives_every_crash() {
    let mut answered = 0;
    for seed in seeds("crash", 6) {
        answered += run_seed(seed, FaultRates::default(), |_, _| {}).borrow().answered.len();
    }
    assert!(answered > 500, "the runs did something: {answered}");
}

#[test]
fn a_202_survives_failing_writes_and_syncs() {
    let rates = FaultRates { write_fail: 3_000, sync_fail: 3_000, directory_fail: 20_000, ..FaultRates::default() };
    let mut latched = 0;
    for seed in seeds("failing", 5) {
        latched += run_seed(seed, rates, |_, _| {}).borrow().latched;
    }
    assert!(latched > 0, "some writes failed");
}

#[test]
fn a_202_survives_a_full_disk() {
    for seed in seeds("full", 4) {
        run_seed(seed, FaultRates::default(), |rng, disk| {
            disk.set_capacity(Some(rng.range(1 << 20, 3 << 20)));
        });
    }
}

#[test]
fn a_202_survives_a_disk_that_stalls() {
    let rates = FaultRates { stall: 20_000, stall_ms_max: 300, ..FaultRates::default() };
    for seed in seeds("stalls", 6) {
        run_seed(seed, rates, |_, _| {});
    }
}

/// A drive whose syncs lie, or that rots, may cost records; open may refuse. What it never does: hand out a record
/// that is not the one that was accepted under its number (E33).
#[test]
fn e33_a_lying_or_rotting_disk_never_makes_a_wrong_record() {
    let (mut refused, mut lost) = (0, 0);
    for seed in seeds("lying", 12) {
        let sim = Sim::new(seed);
        let handle = sim.clone();
        let (was_refused, missing) = sim.run(async move {
            let mut rng = Rng::new(seed);
            let disk = SimDisk::new(rng.next_u64());
            let ledger: Rc<RefCell<Ledger>> = Rc::default();
            let (disk_of_node, node_ledger, mut node_rng) = (disk.clone(), ledger.clone(), rng.fork());
            let handle_of_node = handle.clone();
            disk.set_rates(FaultRates { lie: 30_000, skip: 3_000, ..FaultRates::default() });
            handle.spawn_on(NODE, async move {
                let Ok(wal) = Wal::open(options(&disk_of_node, 128 << 10)).await else { return };
                for _ in 0..6 {
                    handle_of_node.spawn_on(NODE, produce(wal.clone(), node_ledger.clone(), node_rng.fork()));
                }
            });
            rt::sleep(Duration::from_millis(rng.range(10, 100))).await;
            handle.kill(NODE);
            disk.power_cut();
            disk.clear_faults();
            if rng.chance(1, 2) {
                disk.rot(".wal");
            }
            let Ok(wal) = Wal::open(options(&disk, 128 << 10)).await else { return (1, 0) };
            let (mut next, mut found) = (wal.oldest(), 0);
            while next < wal.durable_next() {
                let Ok(read) = wal.read_disk(next, u64::MAX, ALL, &|_| true).await else { break };
                for record in &read.records {
                    check(record);
                    let answered = ledger.borrow().answered.get(&record.seq).copied();
                    assert!(answered.is_none_or(|id| id == id_of(record)), "seed {seed}: {} is wrong", record.seq);
                    found += 1;
                }
                next = read.next;
            }
            let answered = ledger.borrow().answered.len();
            (0, answered.saturating_sub(found))
        });
        refused += was_refused;
        lost += missing;
    }
    assert!(refused + lost > 0, "the faults were felt");
}
