//! Opening what a crash, a failing drive or a rollback left: the driver's side of recovery.

use std::time::Duration;

use super::test_support::*;
use super::*;
use crate::io::sim::{Fault, NthCall, Op, SimDisk, Survival};
use crate::io::{Caching, Open, Slice};
use crate::rt::sim::{run, Sim};

const KIB: u64 = 1024;
const BLOCK: u64 = frame::BLOCK_BYTES;

/// Opens a WAL, appends `groups` groups of one record each, closes it: record `n` stands at block `n`.
async fn filled(disk: &SimDisk, groups: u64) {
    let wal = open(disk, 256 * KIB).await;
    for id in 1..=groups {
        assert_eq!(append(&wal, id..id + 1, 100).await, Ok(id..id + 1));
    }
    wal.close().await.expect("stored");
}

fn zero(disk: &SimDisk, number: u64, from: u64, to: u64) {
    disk.poke(&segment_path(number), from, &vec![0; (to - from) as usize]);
}

fn put_checkpoint(disk: &SimDisk, seq: u64) {
    let record = checkpoint::Checkpoint { store_id: STORE, dir_number: 0, seq }.encode();
    disk.poke(&dir().join("checkpoint"), 0, &record);
}

#[test]
fn e1_a_new_checkpoint_file_is_durable() {
    run(16, async {
        let disk = SimDisk::new(16);
        filled(&disk, 10).await;
        let door = Disk::Sim(disk.clone());
        door.remove_file(&dir().join("checkpoint")).await.expect("there");
        door.sync_dir(&dir()).await.expect("synced");
        let wal = open(&disk, 256 * KIB).await;
        wal.store_checkpoint(8);
        rt::sleep(Duration::from_millis(300)).await;
        disk.power_cut_as(Survival::Nothing);
        assert_eq!(open(&disk, 256 * KIB).await.recovered_checkpoint(), 8);
    });
}

/// N1 at its worst: the drive lost the checkpoint's last write, the power failed while segments were being
/// reclaimed, and whatever was not synced of that came back. What is left must still be one chain.
#[test]
fn lesson_n1_reclaiming_never_leaves_a_gap() {
    for seed in 0..30 {
        run(seed, async move {
            let disk = SimDisk::new(seed);
            let wal = open(&disk, 64 * KIB).await;
            append(&wal, 0..150, 2000).await.expect("room");
            wal.store_checkpoint(140);
            rt::sleep(Duration::from_millis(250) + Duration::from_micros(seed * 100)).await;
            disk.power_cut_as(Survival::Independent);
            put_checkpoint(&disk, 1);
            let wal = open(&disk, 64 * KIB).await;
            let from = wal.recovered_checkpoint();
            assert_eq!(from_disk(&wal, from).await.len() as u64, 151 - from);
        });
    }
}

#[test]
fn e4_no_sequence_is_given_out_twice() {
    run(1, async {
        let disk = SimDisk::new(1);
        filled(&disk, 10).await;
        put_checkpoint(&disk, 9);
        zero(&disk, 1, 6 * BLOCK, 11 * BLOCK); // the drive lost 6 to 10, and 6 to 8 were dispatched
        let wal = open(&disk, 256 * KIB).await;
        assert_eq!((wal.recovered_checkpoint(), wal.durable_next(), wal.oldest()), (9, 9, 9));
        assert_eq!(append(&wal, 50..51, 100).await, Ok(9..10));
        assert_eq!(ids(&from_disk(&wal, 9).await), [50]);
        wal.close().await.expect("stored");
        let wal = open(&disk, 256 * KIB).await;
        assert_eq!((wal.recovered_checkpoint(), wal.durable_next()), (9, 10));
        assert_eq!(ids(&from_disk(&wal, 9).await), [50]);
    });
}

/// The crash falls at every step of the replacement, and the checkpoint is lost as well where it may be.
#[test]
fn e4_the_roll_to_the_checkpoint_survives_a_crash_at_every_step() {
    for calls in 0..40 {
        let sim = Sim::new(calls);
        let handle = sim.clone();
        let done = sim.run(async move {
            let disk = SimDisk::new(calls);
            filled(&disk, 10).await;
            put_checkpoint(&disk, 9);
            zero(&disk, 1, 6 * BLOCK, 11 * BLOCK);
            disk.freeze_after(calls);
            let opening = disk.clone();
            let opened: Rc<std::cell::Cell<bool>> = Rc::default();
            let seen = opened.clone();
            handle.spawn_on(1, async move {
                let _wal = open(&opening, 256 * KIB).await;
                seen.set(true);
            });
            rt::sleep(Duration::from_secs(5)).await;
            handle.kill(1);
            disk.power_cut();
            disk.clear_faults();
            let wal = open(&disk, 256 * KIB).await;
            assert_eq!((wal.recovered_checkpoint(), wal.durable_next()), (9, 9), "crash after {calls} calls");
            assert_eq!(append(&wal, 50..51, 100).await, Ok(9..10));
            opened.get()
        });
        if done {
            return assert!(calls > 10, "the open itself takes more calls than {calls}");
        }
    }
    panic!("the open never finished");
}

#[test]
fn lesson_n1_a_checkpoint_below_the_oldest_segment_is_clamped() {
    run(2, async {
        let disk = SimDisk::new(2);
        let wal = open(&disk, 64 * KIB).await;
        append(&wal, 0..100, 2000).await.expect("room");
        wal.store_checkpoint(80);
        rt::sleep(Duration::from_secs(1)).await;
        let oldest = wal.oldest();
        assert!(oldest > 50);
        wal.close().await.expect("stored");
        put_checkpoint(&disk, 3);
        let wal = open(&disk, 64 * KIB).await;
        assert_eq!((wal.oldest(), wal.recovered_checkpoint()), (oldest, oldest));
        assert_eq!(from_disk(&wal, oldest).await.len() as u64, 101 - oldest);
    });
}

#[test]
fn e6_without_a_checkpoint_dispatch_starts_at_the_oldest_segment() {
    for damage in 0..3 {
        run(3 + damage, async move {
            let disk = SimDisk::new(3);
            let wal = open(&disk, 256 * KIB).await;
            append(&wal, 0..10, 100).await.expect("room");
            wal.store_checkpoint(8);
            wal.close().await.expect("stored");
            let path = dir().join("checkpoint");
            match damage {
                0 => assert!(disk.flip_bit(&path, 30, 2)),
                1 => disk.poke(&path, 0, &[0; 48]),
                _ => Disk::Sim(disk.clone()).remove_file(&path).await.expect("there"),
            }
            let wal = open(&disk, 256 * KIB).await;
            assert_eq!((wal.recovered_checkpoint(), wal.durable_next()), (1, 11));
            wal.close().await.expect("stored");
            let wal = open(&disk, 256 * KIB).await;
            assert_eq!(wal.recovered_checkpoint(), 1, "and it is stored again");
        });
    }
}

#[test]
fn e5_a_cut_frame_never_comes_back() {
    run(4, async {
        let disk = SimDisk::new(4);
        let wal = open(&disk, 256 * KIB).await;
        // One group of six records that fill a block each; the third one never arrived.
        append(&wal, 1..7, 4015).await.expect("room");
        wal.close().await.expect("stored");
        zero(&disk, 1, 3 * BLOCK, 4 * BLOCK);
        let wal = open(&disk, 256 * KIB).await;
        assert_eq!(wal.durable_next(), 3);
        // A new third record takes exactly the place of the old one, and the node dies at once.
        assert_eq!(append(&wal, 70..71, 4015).await, Ok(3..4));
        disk.power_cut_as(Survival::Nothing);
        let wal = open(&disk, 256 * KIB).await;
        assert_eq!(ids(&from_disk(&wal, 1).await), [1, 2, 70], "4 to 6 stood right behind it");
    });
}

/// The cut lies within a block: what stands before it in the block stays.
#[test]
fn e5_the_cut_keeps_the_good_frames_of_its_block() {
    run(15, async {
        let disk = SimDisk::new(15);
        let wal = open(&disk, 256 * KIB).await;
        append(&wal, 1..9, 200).await.expect("room");
        wal.close().await.expect("stored");
        zero(&disk, 1, BLOCK + 512, BLOCK + 1024);
        let wal = open(&disk, 256 * KIB).await;
        assert_eq!(ids(&from_disk(&wal, 1).await), [1]);
        disk.power_cut_as(Survival::Nothing);
        let wal = open(&disk, 256 * KIB).await;
        assert_eq!(ids(&from_disk(&wal, 1).await), [1]);
        let block = disk.peek_durable(&segment_path(1)).expect("there")[BLOCK as usize..2 * BLOCK as usize].to_vec();
        assert!(block[512..].iter().all(|byte| *byte == 0), "nothing of the cut ones is left");
    });
}

#[test]
fn lesson_n2_what_open_trusts_is_synced() {
    run(5, async {
        let disk = SimDisk::new(5);
        let wal = open(&disk, 256 * KIB).await;
        // The write says Ok and is visible, but a power cut would take it: a dead process's page cache.
        disk.inject(NthCall::new(Op::WriteDurable, 1, Fault::Lie).on(".wal").times(3));
        for id in 0..3 {
            append(&wal, id..id + 1, 100).await.expect("room");
        }
        disk.process_crash();
        let wal = open(&disk, 256 * KIB).await;
        assert_eq!(ids(&from_disk(&wal, 1).await), [0, 1, 2]);
        disk.power_cut_as(Survival::Nothing);
        let wal = open(&disk, 256 * KIB).await;
        assert_eq!(ids(&from_disk(&wal, 1).await), [0, 1, 2], "dispatched records are still there");
    });
}

#[test]
fn e8_damage_below_synced_records_refuses_and_touches_nothing() {
    run(6, async {
        let disk = SimDisk::new(6);
        filled(&disk, 10).await;
        assert!(disk.flip_bit(&segment_path(1), 4 * BLOCK + 90, 3));
        let before = disk.peek(&segment_path(1));
        let error = open_error(&disk, 256 * KIB).await;
        assert!(matches!(error, WalOpenError::Corrupt { seq: Some(4), .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("/ingress/0/00000001.wal") && text.contains("record 4 "), "{text}");
        assert!(text.contains("move its directory out"), "it says what to do: {text}");
        assert_eq!(disk.peek(&segment_path(1)), before);
    });
}

#[test]
fn e3_a_sealed_segment_that_ends_short_is_corruption_unless_it_is_dispatched() {
    run(7, async {
        let disk = SimDisk::new(7);
        let wal = open(&disk, 64 * KIB).await;
        append(&wal, 0..30, 4000).await.expect("room");
        wal.close().await.expect("stored");
        let second = header_of(&disk, &segment_path(2)).first_seq;
        zero(&disk, 1, 48 * KIB, 64 * KIB);
        let error = open_error(&disk, 64 * KIB).await;
        assert!(matches!(&error, WalOpenError::Corrupt { seq: Some(seq), .. } if *seq < second), "{error}");
        put_checkpoint(&disk, second);
        let wal = open(&disk, 64 * KIB).await;
        assert_eq!(from_disk(&wal, second).await.len() as u64, 31 - second);
    });
}

#[test]
fn e3_bytes_behind_a_sealed_segments_end_are_ignored() {
    run(8, async {
        let disk = SimDisk::new(8);
        let wal = open(&disk, 64 * KIB).await;
        append(&wal, 0..14, 4000).await.expect("room");
        append(&wal, 14..16, 8000).await.expect("room"); // leaves the last block of the first segment unused
        wal.close().await.expect("stored");
        disk.poke(&segment_path(1), 60 * KIB, &[0xab; 4096]);
        let wal = open(&disk, 64 * KIB).await;
        assert_eq!(ids(&from_disk(&wal, 1).await), (0..16).collect::<Vec<u64>>());
    });
}

#[test]
fn lesson_d10_1_a_missing_segment_is_a_hole_and_refuses() {
    run(13, async {
        let disk = SimDisk::new(13);
        let wal = open(&disk, 64 * KIB).await;
        append(&wal, 0..60, 4000).await.expect("room");
        wal.close().await.expect("stored");
        let missing = disk.files().into_iter().find(|path| path.ends_with("00000003.wal")).expect("four segments");
        Disk::Sim(disk.clone()).remove_file(&missing).await.expect("there");
        let error = open_error(&disk, 64 * KIB).await;
        assert!(matches!(error, WalOpenError::Corrupt { .. }), "{error}");
    });
}

/// Worse than a cut segment, and never milder: an empty or missing one where the checkpoint says that there were records.
#[test]
fn lesson_d10_1_a_wal_that_has_lost_all_its_segments_refuses() {
    for emptied in [false, true] {
        run(15, async move {
            let disk = SimDisk::new(15);
            filled(&disk, 10).await;
            put_checkpoint(&disk, 9);
            let door = Disk::Sim(disk.clone());
            let files = disk.files().into_iter().filter(|path| path.extension().is_some_and(|e| e == "wal"));
            let files: Vec<_> = files.collect();
            for path in &files {
                match emptied {
                    true => {
                        let file = door.open(path, Open::Existing, Caching::Direct).await.expect("there");
                        file.set_len(0).await.expect("simulated");
                    }
                    false => door.remove_file(path).await.expect("there"),
                }
            }
            let text = open_error(&disk, 256 * KIB).await.to_string();
            assert!(text.contains("records up to 8"), "{text}");
            assert_eq!(text.contains("it has no content"), emptied, "{text}");
            assert!(!text.contains("removed"), "{text}");
            let left = disk.files().iter().filter(|path| files.contains(path)).count();
            assert_eq!(left, if emptied { files.len() } else { 0 }, "nothing was changed");
        });
    }
}

#[test]
fn lesson_d10_1_an_emptied_segment_below_the_others_refuses_and_stays() {
    for number in [1, 3] {
        run(16, async move {
            let disk = SimDisk::new(16);
            let wal = open(&disk, 64 * KIB).await;
            append(&wal, 0..60, 4000).await.expect("room");
            wal.close().await.expect("stored");
            let path = segment_path(number);
            let file = Disk::Sim(disk.clone()).open(&path, Open::Existing, Caching::Direct).await.expect("there");
            file.set_len(0).await.expect("simulated");
            let text = open_error(&disk, 64 * KIB).await.to_string();
            assert!(text.contains(&path.display().to_string()) && text.contains("no content"), "{text}");
            assert!(disk.files().contains(&path), "what may be restored is not removed");
        });
    }
}

#[test]
fn lesson_d10_1_two_segments_never_begin_with_the_same_record() {
    run(14, async {
        let disk = SimDisk::new(14);
        filled(&disk, 3).await;
        let bytes = disk.peek(&segment_path(1)).expect("there");
        let (door, path) = (Disk::Sim(disk.clone()), segment_path(2));
        let copy = door.open(&path, Open::New, Caching::Direct).await.expect("a new file");
        copy.write_at(0, Slice::copy_from(&bytes)).await.expect("written");
        let error = open_error(&disk, 256 * KIB).await;
        assert!(error.to_string().contains("same record as /ingress/0/00000001.wal"), "{error}");
    });
}

#[test]
fn e2_foreign_and_damaged_headers_refuse() {
    run(9, async {
        let disk = SimDisk::new(9);
        filled(&disk, 3).await;
        let foreign = WalOptions { store_id: STORE + 1, ..options(&disk, 256 * KIB) };
        assert!(matches!(Wal::open(foreign).await.err(), Some(WalOpenError::Foreign { .. })));
        let other = WalOptions { dir_number: 1, ..options(&disk, 256 * KIB) };
        assert!(matches!(Wal::open(other).await.err(), Some(WalOpenError::Foreign { .. })));
        let good = disk.peek(&segment_path(1)).expect("there");
        assert!(disk.flip_bit(&segment_path(1), 33, 1));
        assert!(matches!(open_error(&disk, 256 * KIB).await, WalOpenError::Corrupt { seq: None, .. }));
        zero(&disk, 1, 0, BLOCK);
        let error = open_error(&disk, 256 * KIB).await;
        assert!(matches!(error, WalOpenError::Corrupt { seq: None, .. }), "records lie behind it: {error}");
        disk.poke(&segment_path(1), 0, &good);
        let wal = open(&disk, 256 * KIB).await;
        assert_eq!(ids(&from_disk(&wal, 1).await), [1, 2, 3]);
    });
}

#[test]
fn e1_an_interrupted_preparation_is_removed() {
    for calls in 0..60 {
        let sim = Sim::new(calls);
        let handle = sim.clone();
        sim.run(async move {
            let disk = SimDisk::new(calls);
            filled(&disk, 3).await;
            disk.freeze_after(calls);
            let filling = disk.clone();
            handle.spawn_on(1, async move {
                let wal = open(&filling, 256 * KIB).await;
                for id in 4..60 {
                    append(&wal, id..id + 1, 100).await.expect("room");
                }
            });
            rt::sleep(Duration::from_secs(10)).await;
            handle.kill(1);
            disk.power_cut();
            disk.clear_faults();
            let wal = open(&disk, 256 * KIB).await;
            let found = ids(&from_disk(&wal, 1).await);
            assert_eq!(found, (1..=found.len() as u64).collect::<Vec<u64>>());
            assert_eq!(wal.metrics().segments + wal.metrics().spares, disk.files().len() as u64 - 1, "no other file");
        });
    }
}

#[test]
fn lesson_n58_a_newer_record_format_refuses_the_start() {
    run(10, async {
        let disk = SimDisk::new(10);
        filled(&disk, 3).await;
        let bytes = disk.peek(&segment_path(1)).expect("there");
        let seed = frame::generation_seed(header_of(&disk, &segment_path(1)).generation);
        let at = 2 * BLOCK as usize;
        let head = frame::Head::decode(seed, &bytes[at..]).expect("a frame");
        let newer = frame::tests::with_format(bytes[at..at + head.padded()].to_vec(), seed, 3);
        disk.poke(&segment_path(1), at as u64, &newer);
        let error = open_error(&disk, 256 * KIB).await;
        assert!(matches!(error, WalOpenError::UnknownFormat { format: 3, .. }), "{error:?}");
        assert!(error.to_string().contains("narad_ingress_dispatch_backlog_records"));
        let older = frame::tests::with_format(bytes[at..at + head.padded()].to_vec(), seed, 1);
        disk.poke(&segment_path(1), at as u64, &older);
        let wal = open(&disk, 256 * KIB).await;
        let read = wal.read_disk(1, 4, ALL, &|_| true).await.expect("format 1 is still read");
        let incarnations: Vec<bool> = read.records.iter().map(|record| record.incarnation.is_some()).collect();
        assert_eq!(incarnations, [true, false, true]);
    });
}

#[test]
fn a_changed_segment_size_keeps_old_segments_readable() {
    run(11, async {
        let disk = SimDisk::new(11);
        let wal = open(&disk, 64 * KIB).await;
        append(&wal, 0..60, 2000).await.expect("room");
        wal.close().await.expect("stored");
        let wal = open(&disk, 128 * KIB).await;
        append(&wal, 60..120, 2000).await.expect("room");
        assert_eq!(ids(&from_disk(&wal, 1).await), (0..120).collect::<Vec<u64>>());
        wal.store_checkpoint(121);
        rt::sleep(Duration::from_secs(1)).await;
        wal.close().await.expect("stored");
        for path in disk.files().iter().filter(|path| path.extension().is_some()) {
            assert_eq!(header_of(&disk, path).segment_bytes, 128 * KIB, "{}", path.display());
        }
    });
}

#[test]
fn a_rotten_record_fails_its_read_and_names_the_place() {
    run(12, async {
        let disk = SimDisk::new(12);
        let wal = open(&disk, 256 * KIB).await;
        for id in 1..=5 {
            append(&wal, id..id + 1, 100).await.expect("room");
        }
        assert!(disk.flip_bit(&segment_path(1), 3 * BLOCK + 80, 0));
        let error = wal.read_disk(1, 6, ALL, &|_| true).await.expect_err("record 3 is damaged");
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidData);
        assert!(error.to_string().contains("record 3 in /ingress/0/00000001.wal"), "{error}");
        let read = wal.read_disk(4, 6, ALL, &|_| true).await.expect("its head is whole: those behind are reached");
        assert_eq!(ids(&read.records), [4, 5]);
    });
}

#[test]
fn d13_a_batch_whose_first_records_are_stored_is_not_answered_as_if_none_were() {
    run(14, async {
        let disk = SimDisk::new(14);
        let wal = open(&disk, 64 << 10).await;
        disk.set_capacity(Some(disk.used_bytes()));
        append(&wal, 1..11, 5000).await.expect("fits the prepared segment");
        let in_part = append(&wal, 11..16, 5000).await.expect_err("there is no room for all of it");
        assert!(matches!(in_part, AppendError::StoredInPart(_)), "{in_part:?}");
        let stored = ids(&from_disk(&wal, 1).await);
        assert!(stored.len() > 10 && stored.len() < 15, "{stored:?}");
        let refused = append(&wal, 20..25, 5000).await.expect_err("still no room");
        assert!(matches!(refused, AppendError::Unavailable(_)), "{refused:?}");
        assert_eq!(ids(&from_disk(&wal, 1).await), stored, "nothing of it");
        assert_eq!(wal.failed(), None);
    });
}
