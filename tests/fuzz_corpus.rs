//! Replays the corpora of all fuzz targets on the stable compiler: every file as it is, cut short, and with bits
//! flipped. A crash that a fuzzer found becomes a file here, and a test of its own where the decoder lives.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn fuzz_folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz").join(name)
}

fn targets() -> impl Iterator<Item = narad::fuzz::Target> {
    narad::fuzz::TARGETS.iter().chain(narad_shards::fuzz::TARGETS).copied()
}

fn file_names(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

fn stems(folder: &Path) -> BTreeSet<String> {
    file_names(folder).iter().map(|path| path.file_stem().unwrap().to_string_lossy().into_owned()).collect()
}

#[test]
fn every_target_has_a_fuzzer_and_a_corpus() {
    let known: BTreeSet<String> = targets().map(|(name, _)| name.to_owned()).collect();
    assert_eq!(known, stems(&fuzz_folder("fuzz_targets")));
    assert_eq!(known, stems(&fuzz_folder("corpus")));
    for name in &known {
        let inputs = file_names(&fuzz_folder("corpus").join(name)).len();
        assert!((5..=60).contains(&inputs), "{name} has {inputs} inputs");
    }
}

/// Runs one input; a panic names the file that it came from.
fn run(target: fn(&[u8]), data: &[u8], path: &Path, how: &str) {
    let outcome = std::panic::catch_unwind(|| target(data));
    assert!(outcome.is_ok(), "{} {how}: panicked, see above", path.display());
}

#[test]
fn corpora_replay_whole_cut_and_flipped() {
    /// Variants of each file; spread over its length.
    const VARIANTS: usize = 24;
    for (name, target) in targets() {
        for path in file_names(&fuzz_folder("corpus").join(name)) {
            let data = fs::read(&path).unwrap();
            run(target, &data, &path, "whole");
            let step = (data.len() / VARIANTS).max(1);
            for at in (0..data.len()).step_by(step) {
                run(target, &data[..at], &path, &format!("cut at {at}"));
                let mut flipped = data.clone();
                flipped[at] ^= 1 << (at % 8);
                run(target, &flipped, &path, &format!("with a bit of byte {at} flipped"));
            }
        }
    }
}
