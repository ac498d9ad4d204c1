//! Recovery as a table: what lies in the segment, what is made of it.

use proptest::prelude::*;

use super::frame::HEAD_BYTES;
use super::recovery::{recover, Verdict};
use super::scan::{Scanner, Step};
use super::segment::DATA_START;
use super::tests_support::{numbered, Built};

/// Builds a segment by a script and returns the verdict in one line.
///
/// `commit a:2 b:1` one commit of frame `a` with two records and frame `b` with one · `zero a` · `flip a` one payload
/// bit · `flip-head a` · `garbage a` · `shadow a` keeps head, destroys payload · `dirt N` stray bytes N behind the data
/// · `forget` takes the last commit's records back, keeping its bytes (for a shorter retry) · `synced N` boundary of a
/// clean close.
fn run(script: &str) -> String {
    let mut built = Built::new(0, 64 << 10);
    let mut synced = 0;
    for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (verb, rest) = line.split_once(' ').unwrap_or((line, ""));
        match verb {
            "commit" => {
                let frames: Vec<(&str, Vec<_>)> = rest
                    .split(' ')
                    .map(|frame| {
                        let (name, count) = frame.split_once(':').expect("name:records");
                        let count: u64 = count.parse().expect("a number");
                        (name, (0..count).map(|n| numbered(n, 300)).collect())
                    })
                    .collect();
                built.commit(&frames);
            }
            "dirt" => {
                let behind: usize = rest.parse().expect("a number");
                built.bytes[built.data_end + behind] = 0x7f;
            }
            "synced" => synced = rest.parse().expect("a number"),
            "forget" => {
                let frame = built.frames.pop().expect("a frame to forget");
                (built.data_end, built.next_offset) = (frame.1, frame.3);
            }
            damage => {
                let (at, length, _) = built.frame(rest);
                match damage {
                    "zero" => built.bytes[at..at + length].fill(0),
                    "garbage" => built.bytes[at..at + length].fill(0xee),
                    "flip" => built.bytes[at + HEAD_BYTES + 20] ^= 4,
                    "flip-head" => built.bytes[at + 33] ^= 4,
                    "shadow" => built.bytes[at + HEAD_BYTES..at + length].fill(0),
                    other => panic!("unknown verb {other}"),
                }
            }
        }
    }
    describe(&recover(&built.bytes, built.generation, 0, synced), &built)
}

/// Bytes between two frames that held no record lose none: they are passed over, and are no damage to report.
#[test]
fn a_hole_without_records_is_no_gap() {
    let mut built = Built::new(0, 64 << 10);
    built.commit(&[("a", vec![numbered(0, 300)])]);
    built.bytes[built.data_end..built.data_end + 64].fill(0x7f);
    built.data_end += 64;
    built.commit(&[("b", vec![numbered(1, 300)])]);
    built.commit(&[("c", vec![numbered(2, 300)])]);
    let verdict = recover(&built.bytes, built.generation, 0, 0);
    assert_eq!((verdict.next_offset, &verdict.gaps[..], verdict.cut), (3, &[][..], None));
    // What proves that "b" was synced goes with a torn "c": the tail must be noted before the cut.
    let (at, length, _) = built.frame("c");
    built.bytes.copy_within(at..at + length, at + 64);
    built.bytes[at..at + 64].fill(0x7f);
    let verdict = recover(&built.bytes, built.generation, 0, 0);
    assert_eq!((verdict.next_offset, &verdict.gaps[..], verdict.proof_cut), (2, &[][..], true));
}

fn describe(verdict: &Verdict, built: &Built) -> String {
    let behind = built.frames.iter().filter(|frame| (frame.1 as u64) < verdict.data_end).count();
    let mut text = format!("next {}, {behind} frames", verdict.next_offset);
    for (start, end) in &verdict.gaps {
        text += &format!(", gap {start}..{end}");
    }
    if verdict.cut.is_some() {
        text += &format!(", cut {}", verdict.frames_cut);
    }
    if verdict.proof_cut {
        text += ", proof cut";
    }
    if let Some((start, end)) = verdict.lost_tail {
        text += &format!(", lost {start}..{end}");
    }
    text
}

#[test]
fn s55_to_s60_the_recovery_table() {
    let table = [
        ("nothing written", "", "next 0, 0 frames"),
        ("an ordinary log", "commit a:1\ncommit b:2", "next 3, 2 frames"),
        ("s56 torn tail, bytes gone", "commit a:1\ncommit b:2\nzero b", "next 1, 1 frames"),
        ("s56 torn tail, bad check", "commit a:1\ncommit b:2\nflip b", "next 1, 1 frames, cut 0"),
        ("s56 torn tail, half a head", "commit a:1\ncommit b:2\nflip-head b", "next 1, 1 frames, cut 0"),
        ("s57 damage in the middle", "commit a:1\ncommit b:2\ncommit c:1\nflip b", "next 4, 3 frames, gap 1..3"),
        (
            "s57 a hole of zeros that was synced",
            "commit a:1\ncommit b:2\ncommit c:1\nzero b",
            "next 4, 3 frames, gap 1..3",
        ),
        (
            "s57 garbage over two commits",
            "commit a:1\ncommit b:2\ncommit c:1\ngarbage a\ngarbage b",
            "next 4, 3 frames, gap 0..3",
        ),
        (
            "lesson n4 an intact head shadows nothing",
            "commit a:1\ncommit b:2\ncommit c:1\nshadow b",
            "next 4, 3 frames, gap 1..3",
        ),
        (
            "e8 a torn commit of three frames, first one lost",
            "commit a:1\ncommit b:1 c:1 d:1\nzero b",
            "next 1, 1 frames, cut 2",
        ),
        ("e8 a torn commit, middle one lost", "commit a:1\ncommit b:1 c:1 d:1\nzero c", "next 2, 2 frames, cut 1"),
        ("e8 a torn commit, last one lost", "commit a:1\ncommit b:1 c:1 d:1\nzero d", "next 3, 3 frames"),
        ("e8 the first commit torn", "commit a:1 b:1\nzero a", "next 0, 0 frames, cut 1"),
        (
            "e8 rot in an older commit, the last one whole",
            "commit a:1 b:1\ncommit c:1\nflip b",
            "next 3, 3 frames, gap 1..2",
        ),
        (
            "e8 rot and then a tear",
            "commit a:1\ncommit b:1\ncommit c:1 d:1\nflip a\nzero c",
            "next 2, 2 frames, gap 0..1, cut 1",
        ),
        (
            "e8 rot before a torn commit whose rest proves it",
            "commit a:1\ncommit b:1 c:1\nflip a\nflip b",
            "next 3, 3 frames, gap 0..2",
        ),
        (
            "a clean boundary proves the damaged frame synced",
            "commit a:1 b:1\nflip a\nsynced 2",
            "next 2, 2 frames, gap 0..1",
        ),
        (
            "s46 the boundary never exceeds what survived",
            "commit a:1\ncommit b:1\nflip b\nsynced 2",
            "next 1, 1 frames, cut 0, lost 1..2",
        ),
        ("s60 stray bytes behind the data are cut", "commit a:1\ndirt 5000", "next 1, 1 frames, cut 0"),
        (
            "s37 a shorter retry over a frame that was not cut",
            "commit a:1\ncommit old:9\nforget\ncommit b:1",
            "next 2, 2 frames, cut 0",
        ),
    ];
    for (name, script, expected) in table {
        assert_eq!(run(script), expected, "{name}:\n{script}");
    }
}

#[test]
fn s60_a_frame_below_the_expected_offset_is_not_taken() {
    let mut built = Built::new(0, 64 << 10);
    built.commit(&[("a", vec![numbered(0, 100), numbered(1, 100)])]);
    let (at, length, _) = built.frame("a");
    let copy = built.bytes[at..at + length].to_vec();
    built.bytes[built.data_end..built.data_end + length].copy_from_slice(&copy);
    let verdict = recover(&built.bytes, built.generation, 0, 0);
    assert_eq!((verdict.next_offset, verdict.data_end), (2, built.data_end as u64));
    assert_eq!(verdict.cut, Some((built.data_end as u64, (built.data_end + length - 8).next_multiple_of(16) as u64)));
}

/// What a reader finds in the segment after the cut: offset and record bytes.
fn contents(image: &[u8], generation: u64) -> Vec<(u64, Vec<u8>)> {
    let mut scanner = Scanner::new(generation, DATA_START, 0, image.len() as u64);
    let mut found = Vec::new();
    while let Step::Frame { at, head, .. } = scanner.step(0, image) {
        let start = at as usize + HEAD_BYTES;
        let stored = crate::io::Slice::copy_from(&image[start..start + head.stored_bytes as usize]);
        let payload = super::frame::Payload::parse(stored, head.records).expect("checked frames are well formed");
        for index in 0..head.records {
            found.push((head.base_offset + u64::from(index), payload.record(index).0.to_vec()));
        }
    }
    found
}

fn apply_cut(image: &mut [u8], verdict: &Verdict) {
    if let Some((from, until)) = verdict.cut {
        image[from as usize..until as usize].fill(0);
    }
}

fn build(commits: &[Vec<usize>]) -> (Built, Vec<Built>) {
    let mut built = Built::new(0, 128 << 10);
    let mut steps = Vec::new();
    let mut number = 0;
    for sizes in commits {
        let frames: Vec<(String, Vec<_>)> = sizes
            .iter()
            .map(|size| {
                number += 1;
                (format!("f{number}"), vec![numbered(number - 1, *size)])
            })
            .collect();
        let named: Vec<(&str, Vec<_>)> =
            frames.iter().map(|(name, records)| (name.as_str(), records.clone())).collect();
        steps.push(Built { bytes: built.bytes.clone(), frames: built.frames.clone(), ..built });
        built.commit(&named);
    }
    (built, steps)
}

fn commits() -> impl Strategy<Value = Vec<Vec<usize>>> {
    proptest::collection::vec(proptest::collection::vec(0usize..2000, 1..5), 1..8)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn e8_a_torn_last_commit_is_cut_and_never_counted_as_damage(commits in commits(), kept in any::<u64>()) {
        let (whole, steps) = build(&commits);
        let before = steps.last().expect("at least one commit");
        // Any subset of the last write's sectors may have reached the medium.
        let mut torn = before.bytes.clone();
        let sectors = before.data_end / 512..whole.data_end.div_ceil(512);
        for (turn, sector) in sectors.enumerate() {
            if kept >> (turn % 64) & 1 == 1 {
                torn[sector * 512..(sector + 1) * 512].copy_from_slice(&whole.bytes[sector * 512..(sector + 1) * 512]);
            }
        }
        let verdict = recover(&torn, whole.generation, 0, 0);
        prop_assert_eq!(&verdict.gaps, &vec![], "an ordinary power cut is no damage");
        prop_assert!(verdict.next_offset >= before.next_offset && verdict.next_offset <= whole.next_offset);
        apply_cut(&mut torn, &verdict);
        let kept = contents(&torn, whole.generation);
        let truth = contents(&whole.bytes, whole.generation);
        prop_assert_eq!(&kept[..], &truth[..verdict.next_offset as usize]);
        let again = recover(&torn, whole.generation, 0, 0);
        prop_assert_eq!((again.next_offset, again.data_end, again.cut), (verdict.next_offset, verdict.data_end, None));
    }

    #[test]
    fn s59_s63_any_damage_ends_in_a_log_without_a_wrong_byte(
        commits in commits(),
        damage in proptest::collection::vec((DATA_START as usize..120_000, 1usize..3000, any::<u8>()), 1..5),
        synced in 0u64..20,
    ) {
        let (whole, _) = build(&commits);
        let mut damaged = whole.bytes.clone();
        for (at, length, value) in damage {
            let at = at.min(damaged.len() - length);
            damaged[at..at + length].fill(value);
        }
        let verdict = recover(&damaged, whole.generation, 0, synced.min(whole.next_offset));
        apply_cut(&mut damaged, &verdict);
        let truth = contents(&whole.bytes, whole.generation);
        let kept = contents(&damaged, whole.generation);
        for (offset, bytes) in &kept {
            prop_assert_eq!(bytes, &truth[*offset as usize].1);
            prop_assert!(*offset < verdict.next_offset);
        }
        // Every offset below the tail is either there or in a gap.
        let lost: u64 = verdict.gaps.iter().map(|(start, end)| end - start).sum();
        prop_assert_eq!(kept.len() as u64 + lost, verdict.next_offset);
        let noted = if verdict.proof_cut { verdict.next_offset } else { synced.min(whole.next_offset) };
        let again = recover(&damaged, whole.generation, 0, noted);
        prop_assert_eq!((again.next_offset, again.cut, &again.gaps), (verdict.next_offset, None, &verdict.gaps));
        // The first commit after it proves the gaps by its own mark, so the boundary file is not needed any more.
        let gaps = verdict.gaps.clone();
        let mut gone_on = Built { bytes: damaged, data_end: verdict.data_end as usize, next_offset: verdict.next_offset, ..whole };
        gone_on.commit(&[("next", vec![numbered(9, 10)])]);
        prop_assert_eq!(recover(&gone_on.bytes, gone_on.generation, 0, 0).gaps, gaps);
    }

    #[test]
    fn the_window_does_not_matter(commits in commits(), piece in 1usize..40, at in 4096usize..60_000) {
        let (mut whole, _) = build(&commits);
        whole.bytes[at] ^= 0x10;
        let in_one = recover(&whole.bytes, whole.generation, 0, 0);
        let mut recovery = super::recovery::Recovery::new(whole.generation, 0, whole.bytes.len() as u64, 0);
        let (mut from, mut window) = (0, &whole.bytes[..0]);
        let in_pieces = loop {
            match recovery.step(from, window) {
                super::recovery::Progress::Done(verdict) => break verdict,
                super::recovery::Progress::Need { from: start, bytes } => {
                    from = start;
                    let start = start as usize;
                    let end = (start + bytes.max(piece * 64)).min(whole.bytes.len());
                    window = &whole.bytes[start..end];
                }
            }
        };
        prop_assert_eq!(in_one, in_pieces);
    }
}
