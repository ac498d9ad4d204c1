//! The log as a whole, on a simulated disk: commit, open, read, space, damage.

use std::cell::Cell;
use std::rc::Rc;

use super::segment::{self, SegmentHeader, DATA_START};
use super::tests_support::{numbered, read_all, record, Bench};
use super::{closed_boundary, frame, hwm, Codec, LogOptions, OpenError, ReadError};
use crate::io::sim::SimDisk;
use crate::io::ALIGNMENT;
use crate::log::Records;
use crate::peer::Committed;
use crate::rt::sim;

fn small() -> LogOptions {
    LogOptions { segment_bytes: 64 << 10, ..LogOptions::default() }
}

fn on_disk<T: 'static, F: std::future::Future<Output = T> + 'static>(
    options: LogOptions,
    test: impl FnOnce(Bench) -> F + 'static,
) -> T {
    sim::run(11, async move {
        let bench = Bench::new(SimDisk::new(7), options).await;
        test(bench).await
    })
}

const FIRST: &str = "00000000000000000000.log";

#[test]
fn s3_opening_creates_nothing_and_the_first_commit_everything() {
    on_disk(small(), |bench| async move {
        let log = bench.open().await;
        assert_eq!((log.high_watermark(), log.next_offset(), log.oldest(), log.segments()), (0, 0, 0, 0));
        assert!(bench.disk.list(log.dir()).await.is_err());
        log.close().await.expect("stored");
        assert!(bench.disk.list(log.dir()).await.is_err(), "closing an unused log leaves no file");
        bench.commit(vec![record("k", "v")]).await.expect("committed");
        let log = bench.open().await;
        assert_eq!((log.high_watermark(), log.segments()), (1, 1));
    });
}

#[test]
fn committed_records_come_back_with_key_and_time() {
    on_disk(small(), |bench| async move {
        let committed = bench.commit(vec![record("key", "payload"), record("", "no key")]).await;
        assert_eq!(committed, Ok(Committed { base_offset: 0, count: 2 }));
        let log = bench.open().await;
        let records = log.read(0, 10, 1 << 20).await.expect("readable");
        assert_eq!(records.len(), 2);
        assert_eq!((&records[0].body[..], records[0].key_bytes), (&b"keypayload"[..], 3));
        assert_eq!((&records[1].body[..], records[1].key_bytes), (&b"no key"[..], 0));
        assert!(records[0].timestamp_ms > 1_000_000_000_000);
        assert_eq!(log.read(2, 1, 1).await.err(), Some(ReadError::PastEnd));
        assert_eq!(Records::read(&log, 1).await.map(|r| r.offset), Ok(1));
    });
}

#[test]
fn reads_end_with_the_record_that_crosses_the_bound() {
    on_disk(small(), |bench| async move {
        bench.commit((0..10).map(|n| numbered(n, 100)).collect()).await.expect("committed");
        let log = bench.open().await;
        assert_eq!(log.read(0, 3, 1 << 20).await.map(|r| r.len()), Ok(3));
        assert_eq!(log.read(0, 100, 250).await.map(|r| r.len()), Ok(3));
        assert_eq!(log.read(0, 100, 1).await.map(|r| r.len()), Ok(1));
        assert_eq!(log.read(8, 100, 1 << 20).await.map(|r| r.len()), Ok(2));
    });
}

#[test]
fn s46_s48_s51_the_boundary_of_a_clean_close_and_of_a_crash() {
    on_disk(small(), |bench| async move {
        bench.commit_numbered(0, 5, 50).await;
        let dir = bench.gate.dir.clone();
        let log = bench.open().await;
        assert_eq!(closed_boundary(&bench.disk, &dir).await, Ok(None), "s53: absent is not 0");
        log.close().await.expect("stored");
        assert_eq!(closed_boundary(&bench.disk, &dir).await, Ok(Some(5)));
        let before = bench.image(hwm::FILE_NAME).await;
        let log = bench.open().await;
        assert_eq!((log.high_watermark(), log.next_offset()), (5, 5));
        assert_eq!(bench.image(hwm::FILE_NAME).await, before, "s46: opening does not write it");
        bench.commit_numbered(5, 6, 50).await;
        assert_eq!(bench.image(hwm::FILE_NAME).await, hwm::EMPTY, "s48: emptied before the first advance");
        let log = bench.reopen().await;
        assert_eq!(log.high_watermark(), 6, "s47: the boundary is the record tail");
        // S51: a boundary below the tail keeps the tail hidden until the next commit, which appends behind it.
        log.close().await.expect("stored");
        bench.edit(hwm::FILE_NAME, |image| *image = hwm::encode(4).expect("small").to_vec()).await;
        let log = bench.open().await;
        assert_eq!((log.high_watermark(), log.next_offset()), (4, 6));
        assert_eq!(log.read(4, 1, 1).await.err(), Some(ReadError::PastEnd));
        assert_eq!(bench.commit(vec![numbered(6, 50)]).await, Ok(Committed { base_offset: 6, count: 1 }));
        let (records, unreadable) = read_all(&bench.open().await).await;
        assert_eq!((records.len(), unreadable.len()), (7, 0));
    });
}

#[test]
fn a_damaged_boundary_counts_as_none_and_hides_nothing() {
    on_disk(small(), |bench| async move {
        bench.commit_numbered(0, 5, 50).await;
        bench.open().await.close().await.expect("stored");
        for damage in [vec![0u8; 8], vec![1; 8], vec![3], vec![9; 100]] {
            bench.edit(hwm::FILE_NAME, |image| *image = damage.clone()).await;
            let log = bench.open().await;
            assert_eq!(log.high_watermark(), 5, "{damage:?}");
            log.close().await.expect("stored");
            assert_eq!(hwm::decode(&bench.image(hwm::FILE_NAME).await), Some(5), "rewritten exactly");
        }
    });
}

#[test]
fn lesson_d5_1_a_log_never_starts_empty_beside_its_boundary() {
    on_disk(small(), |bench| async move {
        bench.commit_numbered(0, 5, 50).await;
        let log = bench.open().await;
        log.close().await.expect("stored");
        bench.disk.remove_file(&log.dir().join(FIRST)).await.expect("simulated");
        assert!(matches!(bench.try_open().await.err(), Some(OpenError::Damaged(_))));
        // Emptied is as good as gone.
        bench.edit(FIRST, |image| image.clear()).await;
        assert!(matches!(bench.try_open().await.err(), Some(OpenError::Damaged(_))));
        bench.edit(FIRST, |image| image.resize(64 << 10, 0)).await;
        assert!(matches!(bench.try_open().await.err(), Some(OpenError::Damaged(_))));
    });
}

#[test]
fn lesson_n58_what_a_newer_release_wrote_is_neither_cut_nor_overwritten() {
    on_disk(small(), |bench| async move {
        bench.commit_numbered(0, 3, 100).await;
        bench.open().await.close().await.expect("stored");
        let whole = bench.image(FIRST).await;
        let header = SegmentHeader::decode(&whole).expect("written by us");
        let reason = |error: Option<OpenError>| match error {
            Some(OpenError::Damaged(text)) => text,
            other => panic!("{other:?}"),
        };
        // As after a kill: no boundary tells what was there.
        bench.edit(hwm::FILE_NAME, |image| image.clear()).await;
        let last = whole.windows(4).rposition(|four| four == frame::MAGIC_BYTES).expect("a frame");
        let mut newer = whole.clone();
        frame::make_newer(&mut newer[last..], header.generation);
        bench.edit(FIRST, |image| image.clone_from(&newer)).await;
        assert!(reason(bench.try_open().await.err()).contains("newer release"));
        assert_eq!(bench.image(FIRST).await, newer);
        let mut newer = whole.clone();
        SegmentHeader { format: header.format + 1, ..header }.encode(&mut newer).expect("fixed size");
        bench.edit(FIRST, |image| image.clone_from(&newer)).await;
        assert!(reason(bench.try_open().await.err()).contains("segment format 2 was written by a newer release"));
        bench.edit(FIRST, |image| image.clone_from(&whole)).await;
        assert_eq!(bench.open().await.high_watermark(), 3);
    });
}

#[test]
fn e16_s14_what_does_not_fit_the_segment_rolls_first() {
    on_disk(small(), |bench| async move {
        bench.commit_numbered(0, 40, 5_000).await;
        let log = bench.open().await;
        assert!(log.segments() >= 4, "{} segments", log.segments());
        let (records, unreadable) = read_all(&log).await;
        assert_eq!((records.len(), unreadable.len()), (40, 0));
        for (number, record) in records.iter().enumerate() {
            assert_eq!(&record.body[..], &numbered(number as u64, 5_000).body[..]);
        }
        log.close().await.expect("stored");
        let log = bench.open().await;
        assert_eq!(read_all(&log).await.0.len(), 40, "s58: sealed segments are found again");
    });
}

#[test]
fn s21_a_commit_larger_than_a_segment_is_refused_and_leaves_nothing() {
    on_disk(small(), |bench| async move {
        assert!(bench.commit(vec![numbered(0, 70_000)]).await.is_err());
        bench.commit_numbered(0, 1, 10).await;
    });
}

#[test]
fn s18_a_sealed_segment_is_as_long_as_its_data() {
    on_disk(small(), |bench| async move {
        bench.commit_numbered(0, 8, 9_000).await;
        let log = bench.open().await;
        assert_eq!(log.segments(), 2);
        log.close().await.expect("stored");
        let entries = bench.disk.list(log.dir()).await.expect("listed");
        let sealed = entries.iter().find(|entry| entry.name == FIRST).expect("sealed").bytes;
        let data = DATA_START + 6 * (48 + 8 + 9_000u64).next_multiple_of(16);
        assert_eq!(sealed, data.next_multiple_of(ALIGNMENT as u64));
        // A crash before the trimming: the next open makes up for it.
        bench.edit(FIRST, |image| image.resize(64 << 10, 0)).await;
        let log = bench.open().await;
        assert_eq!(bench.image(FIRST).await.len() as u64, sealed);
        assert_eq!(read_all(&log).await.0.len(), 8);
    });
}

#[test]
fn e15_e17_trickle_traffic_costs_at_most_1_3_times_its_records() {
    on_disk(LogOptions { segment_bytes: 512 << 10, ..LogOptions::default() }, |bench| async move {
        let (mut records, payload) = (0u64, 100u64);
        while bench.open().await.segments() < 2 {
            bench.commit(vec![numbered(records, payload as usize)]).await.expect("committed");
            records += 1;
        }
        let log = bench.open().await;
        log.close().await.expect("stored");
        let sealed = bench.image(FIRST).await.len() as u64;
        let stored = (records - 1) * (48 + 8 + payload);
        assert!(sealed * 10 <= stored * 13, "{sealed} bytes on disk for {stored}");
    });
}

#[test]
fn space_is_claimed_in_steps_and_filled_ahead() {
    on_disk(LogOptions::default(), |bench| async move {
        bench.commit_numbered(0, 1, 10).await;
        assert_eq!(bench.image(FIRST).await.len() as u64, segment::FIRST_STEP_BYTES, "a quiet topic holds little");
        for number in 1..200 {
            bench.commit(vec![numbered(number, 10_000)]).await.expect("committed");
            crate::rt::sleep(std::time::Duration::from_millis(20)).await;
        }
        let log = bench.open().await;
        assert_eq!(log.metrics().claims_inline, 0, "the background was always ahead");
        let (claimed, data) = (bench.image(FIRST).await.len() as u64, log.size_bytes());
        assert!(claimed >= data && claimed <= 4 * data, "{claimed} claimed for {data}");
        // A commit far beyond the claimed end claims its own space, also while a fill is under way.
        bench.commit((0..40).map(|n| numbered(n, 200_000)).collect()).await.expect("committed");
        assert!(log.metrics().claims_inline >= 1);
        assert_eq!(read_all(&log).await.0.len(), 240);
    });
}

#[test]
fn space_for_large_commits_is_claimed_and_not_written_twice() {
    on_disk(LogOptions::default(), |bench| async move {
        for number in 0..40 {
            bench.commit(vec![numbered(number, 200_000)]).await.expect("committed");
            crate::rt::sleep(std::time::Duration::from_secs(1)).await;
        }
        let (log, image) = (bench.open().await, bench.image(FIRST).await.len() as u64);
        assert!(log.metrics().claims_inline >= 3, "nobody filled ahead");
        assert!(image <= log.size_bytes() + segment::STEP_BYTES_MAX, "{image} bytes claimed");
        // Trickle traffic on the same partition is filled ahead again.
        let claimed = log.metrics().claims_inline;
        for number in 40..200 {
            bench.commit(vec![numbered(number, 50_000)]).await.expect("committed");
            crate::rt::sleep(std::time::Duration::from_secs(1)).await;
        }
        assert!(log.metrics().claims_inline <= claimed + 1, "the background was ahead");
        assert_eq!(read_all(&log).await.0.len(), 200);
    });
}

#[test]
fn s16_an_aged_segment_rolls_before_the_next_write() {
    on_disk(LogOptions { retention_ms: 3_600_000, ..small() }, |bench| async move {
        bench.commit_numbered(0, 2, 10).await;
        crate::rt::sleep(std::time::Duration::from_secs(3_000)).await;
        bench.commit_numbered(2, 3, 10).await;
        assert_eq!(bench.open().await.segments(), 1);
        crate::rt::sleep(std::time::Duration::from_secs(700)).await;
        bench.commit_numbered(3, 4, 10).await;
        let log = bench.open().await;
        assert_eq!(log.segments(), 2);
        let oldest = log.oldest_segment_at().expect("known");
        log.close().await.expect("stored");
        assert_eq!(bench.open().await.oldest_segment_at(), Some(oldest), "s67: times survive a reopen");
    });
}

#[test]
fn s24_s25_commit_times_never_decrease_also_over_a_restart() {
    sim::run(3, async {
        let bench = Bench::new(SimDisk::new(7), small()).await;
        let sim_clock = |offset: i64| crate::rt::wall_clock_ms().saturating_add_signed(offset);
        bench.commit_numbered(0, 1, 10).await;
        let log = bench.open().await;
        let first = log.read(0, 1, 1).await.expect("readable")[0].timestamp_ms;
        assert!(first <= sim_clock(0) && first > 0);
        // The last record found by recovery is the floor: one from the future stays the newest.
        let generation = segment::SegmentHeader::decode(&bench.image(FIRST).await).expect("intact").generation;
        bench
            .edit(FIRST, |image| {
                let at = DATA_START as usize;
                let mut head = super::frame::FrameHead::decode(&image[at..], generation, 60_000).expect("intact");
                head.time_ms += 1_000_000;
                head.encode(generation, &mut image[at..at + super::frame::HEAD_BYTES]);
            })
            .await;
        bench.reopen().await;
        bench.commit_numbered(1, 2, 10).await;
        let log = bench.open().await;
        let times: Vec<u64> = read_all(&log).await.0.iter().map(|r| r.timestamp_ms).collect();
        assert_eq!(times, [first + 1_000_000, first + 1_000_000]);
    });
}

#[test]
fn s57_s94_damage_in_the_active_segment_is_a_gap_for_good() {
    on_disk(small(), |bench| async move {
        bench.commit_numbered(0, 10, 1_000).await;
        let frame = (48 + 8 + 1_000usize).next_multiple_of(16);
        bench.edit(FIRST, |image| image[DATA_START as usize + 3 * frame + 100] ^= 1).await;
        let log = bench.reopen().await;
        assert_eq!((log.high_watermark(), log.metrics().damage_found), (10, 1));
        assert_eq!((log.next_readable(2), log.next_readable(3), log.next_readable(4)), (2, 4, 4));
        let (records, unreadable) = read_all(&log).await;
        assert_eq!((records.len(), unreadable), (9, vec![3]));
        bench.commit_numbered(10, 11, 10).await;
    });
}

#[test]
fn s58_s88_damage_in_a_sealed_segment_surfaces_at_the_read() {
    for damage in ["payload", "header", "file", "cut"] {
        on_disk(small(), move |bench| async move {
            bench.commit_numbered(0, 14, 9_000).await;
            bench.open().await.close().await.expect("stored");
            match damage {
                "payload" => bench.edit(FIRST, |image| image[9_500] ^= 1).await,
                "header" => bench.edit(FIRST, |image| image[..ALIGNMENT].fill(7)).await,
                "file" => bench.disk.remove_file(&bench.gate.dir.join(FIRST)).await.expect("simulated"),
                _ => bench.edit(FIRST, |image| image.truncate(20_000)).await,
            }
            let log = bench.open().await;
            let (records, unreadable) = read_all(&log).await;
            let expected: Vec<u64> = match damage {
                "payload" => vec![0],
                "header" => (0..6).collect(),
                "file" => vec![], // the log simply begins later
                _ => (1..6).collect(),
            };
            assert_eq!(unreadable, expected, "{damage}");
            for record in &records {
                assert_eq!(&record.body[..], &numbered(record.offset, 9_000).body[..], "{damage}");
            }
            if let Some(first) = expected.first() {
                assert_eq!(log.next_readable(*first), expected.last().expect("not empty") + 1, "{damage}");
                assert!(log.metrics().damage_found >= 1);
            }
            let _ = bench.commit(vec![numbered(14, 10)]).await.expect("the log goes on");
        });
    }
}

#[test]
fn s59_foreign_files_fail_that_partition_alone_with_a_reason() {
    on_disk(small(), |bench| async move {
        bench.commit_numbered(0, 3, 100).await;
        bench.open().await.close().await.expect("stored");
        let whole = bench.image(FIRST).await;
        let reason = |error: Option<OpenError>| match error {
            Some(OpenError::Damaged(text)) => text,
            other => panic!("{other:?}"),
        };
        bench.edit(FIRST, |image| image[..ALIGNMENT].fill(0xcc)).await;
        assert!(reason(bench.try_open().await.err()).contains("header"));
        bench.edit(FIRST, |image| *image = whole.clone()).await;
        bench.edit("backup.log", |image| image.push(1)).await;
        assert!(reason(bench.try_open().await.err()).contains("backup.log"));
        bench.disk.remove_file(&bench.gate.dir.join("backup.log")).await.expect("simulated");
        let renamed = bench.gate.dir.join(segment::file_name(9));
        bench.disk.rename(&bench.gate.dir.join(FIRST), &renamed).await.expect("simulated");
        assert!(reason(bench.try_open().await.err()).contains("renamed"));
        bench.disk.rename(&renamed, &bench.gate.dir.join(FIRST)).await.expect("simulated");
        // Cut at an odd length: what is whole is served, the boundary tells that the rest is gone.
        bench.edit(FIRST, |image| image.truncate(DATA_START as usize + 200)).await;
        let log = bench.open().await;
        assert_eq!((log.high_watermark(), log.metrics().damage_found), (1, 1));
        assert_eq!(&log.read(0, 9, 9_999).await.expect("whole")[0].body[..], &numbered(0, 100).body[..]);
    });
}

#[test]
fn a_segment_that_a_crash_left_unfinished_is_made_again() {
    for left in [vec![], vec![0; 64 << 10], vec![0; 4096], [vec![9; 512], vec![0; 8192 - 512]].concat()] {
        on_disk(small(), move |bench| async move {
            bench.commit_numbered(0, 4, 100).await;
            let name = segment::file_name(4);
            bench.edit(&name, |image| *image = left.clone()).await;
            let log = bench.reopen().await;
            assert_eq!((log.high_watermark(), log.segments()), (4, 1));
            bench.commit_numbered(4, 6, 100).await;
            let log = bench.reopen().await;
            assert_eq!((log.high_watermark(), log.segments()), (6, 2));
            assert_eq!(read_all(&log).await.0.len(), 6);
        });
    }
}

#[test]
fn s83_a_closed_log_answers_closed_and_nothing_else() {
    on_disk(small(), |bench| async move {
        bench.commit_numbered(0, 2, 100).await;
        let log = bench.open().await;
        let announced = Rc::new(Cell::new(0));
        let seen = announced.clone();
        log.set_on_visible(Rc::new(move || seen.set(seen.get() + 1)));
        log.close().await.expect("stored");
        assert_eq!(announced.get(), 1, "s96: a close is announced");
        for offset in [0, 1, 2, 99] {
            assert_eq!(log.read(offset, 1, 1).await.err(), Some(ReadError::Closed));
            assert_eq!(Records::read(&log, offset).await.err(), Some(ReadError::Closed));
        }
        log.close().await.expect("stored");
        bench.commit_numbered(2, 3, 100).await;
    });
}

#[test]
fn s91_a_tail_reader_needs_no_disk_read() {
    on_disk(small(), |bench| async move {
        bench.commit_numbered(0, 1, 3_000).await;
        let log = bench.open().await;
        log.read(0, 1, 1).await.expect("readable");
        let before = log.metrics().disk_reads;
        for number in 1..10 {
            bench.commit_numbered(number, number + 1, 3_000).await;
            let record = Records::read(&log, number).await.expect("readable");
            assert_eq!(&record.body[..], &numbered(number, 3_000).body[..]);
        }
        assert_eq!(log.metrics().disk_reads, before);
    });
}

#[test]
fn the_tail_block_is_read_from_memory() {
    on_disk(small(), |bench| async move {
        bench.commit_numbered(0, 3, 100).await;
        let log = bench.open().await;
        // As after a failed rewrite: the block on disk is not what was committed.
        bench.edit(FIRST, |image| image[DATA_START as usize..][..512].fill(0)).await;
        let (records, unreadable) = read_all(&log).await;
        assert_eq!((records.len(), unreadable.len()), (3, 0));
        assert_eq!(log.metrics().disk_reads, 0);
    });
}

#[test]
fn s22_compressed_and_plain_frames_mix_in_one_log() {
    on_disk(
        LogOptions { codec: Codec::Zstd(1), segment_bytes: 8 << 20, ..LogOptions::default() },
        |bench| async move {
            let text =
                |n: u64, bytes: usize| record("key", &format!("{n} all work and no play ").repeat(bytes / 24 + 1));
            bench.commit((0..50).map(|n| text(n, 2_000)).collect()).await.expect("committed");
            bench.commit(vec![text(50, 900_000)]).await.expect("a frame for the blocking pool");
            let noise: Vec<u8> = (0..3_000u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
            let incompressible = crate::peer::Record { body: crate::io::Slice::copy_from(&noise), key_bytes: 0 };
            bench.commit(vec![incompressible]).await.expect("committed");
            let log = bench.open().await;
            assert!(log.size_bytes() < 30_000, "{}", log.size_bytes());
            log.close().await.expect("stored");
            let log = bench.open().await;
            let (records, unreadable) = read_all(&log).await;
            assert_eq!((records.len(), unreadable.len()), (52, 0));
            for record in &records[..50] {
                assert_eq!(&record.body[..], &text(record.offset, 2_000).body[..]);
            }
            assert_eq!(records[50].body.len(), text(50, 900_000).body.len());
            assert_eq!(&records[51].body[..], &noise[..]);
        },
    );
}

#[test]
fn s89_cold_segments_are_read_at_any_offset() {
    on_disk(LogOptions { segment_bytes: 256 << 10, ..LogOptions::default() }, |bench| async move {
        for first in (0..3_000u64).step_by(20) {
            bench.commit((first..first + 20).map(|n| numbered(n, 300)).collect()).await.expect("committed");
        }
        bench.open().await.close().await.expect("stored");
        let log = bench.open().await;
        assert!(log.segments() >= 4);
        let mut rng = sim::Rng::new(5);
        for _ in 0..200 {
            let offset = rng.below(3_000);
            let record = Records::read(&log, offset).await.expect("readable");
            assert_eq!(&record.body[..], &numbered(offset, 300).body[..]);
        }
        let open = log.inner.state.borrow().sealed.iter().filter(|segment| segment.opened.is_some()).count();
        assert!(open <= 2, "s86: {open} descriptors of sealed segments");
        assert!(log.inner.shared.cache.bytes() <= log.inner.shared.cache.bytes_max());
    });
}

#[test]
fn s38_s40_a_poisoned_log_serves_reads_and_refuses_appends_until_reopened() {
    on_disk(small(), |bench| async move {
        bench.commit_numbered(0, 3, 100).await;
        let log = bench.open().await;
        log.poison("durable write failed: EIO");
        log.poison("a later error");
        let refused = bench.commit(vec![numbered(3, 100)]).await;
        let first = "durable write failed: EIO".to_owned();
        assert_eq!(refused, Err(crate::peer::CommitError::Poisoned(first.clone())));
        assert_eq!((log.is_poisoned(), log.metrics().poisoned), (Some(first), true));
        assert_eq!(read_all(&log).await.0.len(), 3);
        log.close().await.expect("stored");
        assert_eq!(closed_boundary(&bench.disk, &bench.gate.dir).await, Ok(Some(3)), "g12");
        bench.commit_numbered(3, 4, 100).await;
        let log = bench.open().await;
        assert_eq!((log.is_poisoned(), log.metrics().poisoned), (None, false));
    });
}

#[test]
fn s104_the_settled_boundary_waits_for_the_commit_under_way() {
    on_disk(small(), |bench| async move {
        let committing = bench.clone();
        let log = bench.open().await;
        let commit =
            crate::rt::spawn(
                crate::rt::Queue::Foreground,
                async move { committing.commit(vec![numbered(0, 100)]).await },
            );
        while bench.gate.resolves.get() == 0 {
            crate::rt::sleep(std::time::Duration::from_micros(1)).await;
        }
        crate::rt::sleep(std::time::Duration::from_micros(1)).await;
        assert_eq!(log.high_watermark(), 0, "the commit is under way");
        assert_eq!(log.settled_high_watermark().await, 1);
        commit.await.expect("committed");
    });
}

#[test]
fn s57_a_gap_outlives_the_cut_of_the_frames_that_proved_it() {
    on_disk(small(), |bench| async move {
        // One frame each: 0, then 1 2 in one commit, then 3 4 in the last one.
        let big = |number| numbered(number, 200 << 10);
        let bench = Bench::new(bench.device.clone(), LogOptions::default()).await;
        for commit in [vec![big(0)], vec![big(1), big(2)], vec![big(3), big(4)]] {
            bench.commit(commit).await.expect("committed");
        }
        let frame = (48 + 8 + (200usize << 10)).next_multiple_of(16);
        let at = |number: usize| DATA_START as usize + number * frame + 1000;
        bench
            .edit(FIRST, |image| {
                image[at(1)] ^= 1; // rot in a commit that was confirmed
                image[at(3)] ^= 1; // the last commit, as if torn
            })
            .await;
        for opens in 0..3 {
            let log = bench.reopen().await;
            let (records, unreadable) = read_all(&log).await;
            let offsets: Vec<u64> = records.iter().map(|record| record.offset).collect();
            assert_eq!((offsets, unreadable), (vec![0, 2], vec![1]), "open {opens}");
        }
        bench.commit(vec![big(3)]).await.expect("committed");
        let (records, unreadable) = read_all(&bench.reopen().await).await;
        assert_eq!((records.len(), unreadable), (3, vec![1]));
    });
}

#[test]
fn s56_a_torn_tail_is_zeroed_durably_before_the_log_is_served() {
    on_disk(LogOptions { frame_bytes: 1_000, ..small() }, |bench| async move {
        bench.commit_numbered(0, 1, 800).await;
        bench.commit((1..6).map(|n| numbered(n, 800)).collect()).await.expect("committed");
        let frame = (48 + 8 + 800usize).next_multiple_of(16);
        bench.edit(FIRST, |image| image[DATA_START as usize + 2 * frame..][..16].fill(0)).await;
        let log = bench.reopen().await;
        assert_eq!((log.next_offset(), log.metrics().damage_found), (2, 0));
        assert!(log.metrics().torn_bytes_cut > 3 * frame as u64);
        let stable = bench.device.peek_durable(&log.dir().join(FIRST)).expect("there");
        assert!(stable[DATA_START as usize + 2 * frame..].iter().all(|b| *b == 0));
    });
}
