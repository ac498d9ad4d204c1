//! Logs whose files somebody removed or cut short while nobody looked.

use std::path::Path;

use super::segment;
use super::tests_support::{numbered, Bench};
use super::{LogOptions, OpenError};
use crate::io::sim::SimDisk;
use crate::rt::sim;

fn on_disk<F: std::future::Future<Output = ()> + 'static>(test: impl FnOnce(Bench) -> F + 'static) {
    sim::run(11, async move {
        let bench = Bench::new(SimDisk::new(7), LogOptions::default()).await;
        test(bench).await;
    });
}

/// What a killed process leaves: the boundary file is emptied or absent.
fn killed_then(damage: &'static str, expected: &'static str) {
    on_disk(move |bench: Bench| async move {
        let (dir, away) = (bench.gate.dir.clone(), Path::new("/topics/away"));
        let segment = segment::file_name(0);
        bench.commit_numbered(0, 3, 300).await;
        bench.reopen().await;
        if damage.contains("second life") {
            bench.open().await.close().await.expect("stored");
            bench.commit_numbered(3, 5, 300).await;
        }
        match damage.split(',').next().unwrap_or_default() {
            "no directory" => bench.disk.rename(&dir, away).await.expect("simulated"),
            "no segment" => bench.disk.remove_file(&dir.join(&segment)).await.expect("simulated"),
            "no bytes" => bench.edit(&segment, |image| image.clear()).await,
            "header alone" => bench.edit(&segment, |image| image.truncate(4096)).await,
            other => panic!("{other}"),
        }
        *bench.gate.log.borrow_mut() = None;
        match bench.try_open().await.err() {
            Some(OpenError::Damaged(text)) => assert!(text.contains(expected), "{damage}: {text}"),
            other => panic!("{damage}: {other:?}"),
        }
        let refused = bench.commit(vec![numbered(9, 300)]).await;
        assert!(refused.is_err(), "{damage}: offset 0 is given out again: {refused:?}");
    });
}

#[test]
fn s27_a_killed_partition_whose_files_are_gone_never_gives_its_offsets_out_again() {
    killed_then("no directory", "/topics/p00000.stored proves");
    killed_then("no directory, second life", "/topics/p00000.stored proves");
    killed_then("no segment", "/topics/p00000.stored proves");
    killed_then("no segment, second life", "/topics/p00000/hwm proves");
    killed_then("no bytes", "00000000000000000000.log is empty");
    killed_then("no bytes, second life", "00000000000000000000.log is empty");
    killed_then("header alone, second life", "holds none that can be read");
}

#[test]
fn s56_a_killed_log_that_somebody_cut_short_says_so() {
    for (records, kept) in [(10u64, 4096usize), (10, 5000), (20, 8192), (300, 70_000), (300, 73_728), (300, 0)] {
        on_disk(move |bench: Bench| async move {
            bench.commit_numbered(0, records, 300).await;
            let whole = bench.image(&segment::file_name(0)).await.len();
            let kept = if kept == 0 { whole } else { kept };
            *bench.gate.log.borrow_mut() = None;
            bench.edit(&segment::file_name(0), |image| image.truncate(kept)).await;
            let log = bench.open().await;
            assert_eq!(log.metrics().damage_found, u64::from(kept != whole), "{records} records, {kept} bytes kept");
            assert_eq!(log.next_offset() < records, kept != whole);
        });
    }
}
