//! Recovery as a table: what stands in the last segment, what happened to it, what open makes of it.
//!
//! One case a line, commands separated by `;`. Records have 120 bytes of payload, so 192 a frame; a group starts on
//! the next block, the first one at 4096. The segment is 256 KiB and starts with record 1.
//!
//! ```text
//! group N [mark=M]       a group of N records; its mark is its own first record unless given
//! big N                  a group of one record of N bytes
//! tear A                 everything from byte A on never arrived (zeros)
//! hole A B               the bytes A..B never arrived
//! flip A                 one bit of byte A flips
//! stale                  (first) the file is a recycled one, full of frames of its last life
//! unprepared             the segment was made without preparation
//! format N F             record N is rewritten as format F
//! ```

use super::super::frame::tests::{record, sealed, with_format};
use super::super::frame::{generation_seed, BLOCK_BYTES};
use super::*;
use crate::rt::sim::Rng;

const GENERATION: u64 = 1234;
const SEGMENT_BYTES: usize = 256 << 10;

struct Image {
    bytes: Vec<u8>,
    at: usize,
    next_seq: u64,
    prepared: bool,
    /// Offset, length and group mark of each frame.
    frames: Vec<(usize, usize, u64)>,
}

impl Image {
    fn new() -> Image {
        let bytes = vec![0; SEGMENT_BYTES];
        Image { bytes, at: BLOCK_BYTES as usize, next_seq: 1, prepared: true, frames: Vec::new() }
    }

    fn group(&mut self, payloads: &[usize], mark: Option<u64>) {
        let mark = mark.unwrap_or(self.next_seq);
        for payload in payloads {
            let payload = vec![self.next_seq as u8; *payload];
            let frame = sealed(generation_seed(GENERATION), self.next_seq, mark, &record(b"", &payload));
            self.bytes[self.at..self.at + frame.len()].copy_from_slice(&frame);
            self.frames.push((self.at, frame.len(), mark));
            self.at += frame.len();
            self.next_seq += 1;
        }
        let padded = self.at.next_multiple_of(BLOCK_BYTES as usize);
        self.bytes[self.at..padded].fill(0);
        self.at = padded;
    }

    fn stale(&mut self) {
        let seed = generation_seed(GENERATION + 1);
        let mut at = BLOCK_BYTES as usize;
        for seq in 1.. {
            let frame = sealed(seed, seq, seq, &record(b"old", &[7; 60]));
            let Some(place) = self.bytes.get_mut(at..at + frame.len()) else { break };
            place.copy_from_slice(&frame);
            at += frame.len();
        }
    }

    fn apply(&mut self, command: &str) {
        let words: Vec<&str> = command.split_whitespace().collect();
        let number = |index: usize| words[index].parse::<usize>().expect("a number");
        match words[0] {
            "group" => {
                let mark = words.get(2).map(|word| word.trim_start_matches("mark=").parse().expect("a mark"));
                self.group(&vec![120; number(1)], mark);
            }
            "big" => self.group(&[number(1)], None),
            "tear" => self.bytes[number(1)..].fill(0),
            "hole" => self.bytes[number(1)..number(2)].fill(0),
            "flip" => self.bytes[number(1)] ^= 0x10,
            "stale" => self.stale(),
            "unprepared" => self.prepared = false,
            "format" => {
                let (at, length, _) = self.frames[number(1) - 1];
                let frame = self.bytes[at..at + length].to_vec();
                let frame = with_format(frame, generation_seed(GENERATION), number(2) as u8);
                self.bytes[at..at + length].copy_from_slice(&frame);
            }
            other => panic!("unknown command {other}"),
        }
    }

    fn open(&self) -> Verdict {
        self.open_in_windows(SEGMENT_BYTES)
    }

    /// Recovers through windows of `window_bytes`, as the driver does.
    fn open_in_windows(&self, window_bytes: usize) -> Verdict {
        let window = |at: u64| {
            let base = at / BLOCK_BYTES * BLOCK_BYTES;
            let end = (base as usize + window_bytes).min(SEGMENT_BYTES);
            Window { base, bytes: &self.bytes[base as usize..end] }
        };
        let mut walk = Walk::new(GENERATION, SEGMENT_BYTES as u64, BLOCK_BYTES, 1);
        let mut now = window(walk.at);
        loop {
            match walk.step(now, Depth::Whole) {
                Step::Frame { .. } => {}
                Step::More => now = window(walk.at),
                Step::Stop => break,
                Step::UnknownFormat { offset, format } => return Verdict::UnknownFormat { offset, format },
            }
        }
        let mut scan = Scan::new(&walk, self.prepared);
        loop {
            match scan.step(window(scan.at)) {
                Ok(None) => {}
                Ok(Some(tail)) => return Verdict::Tail(tail),
                Err(corruption) => return Verdict::Corrupt { at: corruption.offset, seq: corruption.seq },
            }
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Tail(Tail),
    Corrupt { at: u64, seq: u64 },
    UnknownFormat { offset: u64, format: u8 },
}

impl Verdict {
    fn text(&self) -> String {
        match self {
            Verdict::Tail(Tail { next_seq, cut, erase_to, .. }) if cut == erase_to => {
                format!("{} records, end at {cut}", next_seq - 1)
            }
            Verdict::Tail(Tail { next_seq, cut, erase_to, .. }) => {
                format!("{} records, end at {cut}, erase to {erase_to}", next_seq - 1)
            }
            Verdict::Corrupt { at, seq } => format!("corrupt at {at}, record {seq}"),
            Verdict::UnknownFormat { offset, format } => format!("unknown format {format} at {offset}"),
        }
    }
}

fn table(cases: &str) {
    for line in cases.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (commands, expected) = line.split_once("=>").expect("a case has an expectation");
        let mut image = Image::new();
        commands.split(';').map(str::trim).filter(|command| !command.is_empty()).for_each(|c| image.apply(c));
        assert_eq!(image.open().text(), expected.trim(), "{line}");
    }
}

#[test]
fn undamaged_segments() {
    table(
        "
        => 0 records, end at 4096
        group 3 => 3 records, end at 4672
        group 3; group 1 => 4 records, end at 8384
        group 21; group 1 => 22 records, end at 8384
        group 22; group 1 => 23 records, end at 12480
        stale => 0 records, end at 4096
        stale; group 3; group 2 => 5 records, end at 8576
        big 200000 => 1 records, end at 204176
        group 2; format 1 1; group 1 => 3 records, end at 8384
        ",
    );
}

#[test]
fn e8_torn_tails_are_cut() {
    table(
        "
        group 3; tear 4097 => 0 records, end at 4096
        group 3; tear 4480 => 2 records, end at 4480
        group 3; tear 4481 => 2 records, end at 4480, erase to 8192
        group 3; tear 4544 => 2 records, end at 4480, erase to 8192
        group 2; group 3; tear 8192 => 2 records, end at 4480
        group 2; group 3; hole 8192 8576 => 2 records, end at 4480, erase to 12288
        group 2; group 3; hole 8704 12288 => 4 records, end at 8576, erase to 12288
        group 30; hole 4608 5120 => 2 records, end at 4480, erase to 12288
        group 2; big 20000; hole 12288 16384 => 2 records, end at 4480, erase to 28672
        stale; group 2; group 3; hole 8192 8576 => 2 records, end at 4480, erase to 12288
        ",
    );
}

#[test]
fn e8_pipelined_groups_may_land_in_any_order() {
    table(
        "
        group 2; group 1 mark=3; group 1 mark=3; hole 8192 12288 => 2 records, end at 4480, erase to 16384
        group 2; group 1 mark=3; group 1 mark=3; group 1 mark=3; hole 8192 16384 => 2 records, end at 4480, erase to 20480
        group 2 mark=1; group 1 mark=1; hole 4096 8192 => 0 records, end at 4096, erase to 12288
        ",
    );
}

#[test]
fn e8_damage_to_synced_records_is_corruption() {
    table(
        "
        group 2; group 1; flip 4110 => corrupt at 4096, record 1
        group 2; group 1; flip 4300 => corrupt at 4288, record 2
        group 2; group 1; hole 4096 8192 => corrupt at 4096, record 1
        group 2; group 1; group 1 mark=3; flip 4300 => corrupt at 4288, record 2
        group 1; group 1; group 1; hole 8192 12288 => corrupt at 4288, record 2
        stale; group 2; group 1; flip 4110 => corrupt at 4096, record 1
        group 2; group 1; format 3 3; flip 4110 => corrupt at 4096, record 1
        ",
    );
}

/// A head proves as much as a whole frame: the last group is torn behind its first sector.
#[test]
fn e8_a_head_alone_proves_what_was_synced() {
    table("group 2; big 20000; tear 8704; flip 4300 => corrupt at 4288, record 2");
}

#[test]
fn e7_an_unprepared_segment_has_no_hole_between_groups() {
    table(
        "
        unprepared; group 3; tear 4481 => 2 records, end at 4480, erase to 8192
        unprepared; group 2; group 30; hole 8704 9216 => 4 records, end at 8576, erase to 16384
        unprepared; group 2; group 1 mark=3; group 1 mark=3; hole 8192 12288 => 2 records, end at 4480, erase to 16384
        unprepared; group 1 mark=1; group 1 mark=1; group 1 mark=0; flip 4110 => corrupt at 4096, record 1
        ",
    );
}

#[test]
fn lesson_n58_a_newer_format_refuses() {
    table(
        "
        group 3; format 2 3 => unknown format 3 at 4288
        group 1; group 1; format 2 9 => unknown format 9 at 8192
        ",
    );
}

/// Damage to the last group cannot be told from a tear: the price the seed names.
#[test]
fn lesson_n4_a_bad_last_frame_is_cut() {
    table(
        "
        group 3; flip 4500 => 2 records, end at 4480, erase to 8192
        group 1; group 1; flip 8300 => 1 records, end at 4288, erase to 12288
        ",
    );
}

#[test]
fn lesson_n3_a_hole_beyond_the_write_window_is_corruption() {
    let segment_bytes = WRITE_WINDOW_BYTES + (1 << 20);
    let mut bytes = vec![0; segment_bytes as usize];
    let walk = Walk::new(GENERATION, segment_bytes, BLOCK_BYTES, 5);
    let frame = sealed(generation_seed(GENERATION), 6, 5, &record(b"", b"x"));
    let mut verdict_at = |offset: u64| {
        bytes.fill(0);
        bytes[offset as usize..offset as usize + frame.len()].copy_from_slice(&frame);
        Scan::new(&walk, true).step(Window { base: 0, bytes: &bytes })
    };
    let inside = verdict_at(BLOCK_BYTES + WRITE_WINDOW_BYTES - BLOCK_BYTES).expect("a tear").expect("whole file");
    assert_eq!((inside.next_seq, inside.cut), (5, BLOCK_BYTES));
    let corruption = verdict_at(BLOCK_BYTES + WRITE_WINDOW_BYTES).expect_err("too far behind");
    assert_eq!((corruption.offset, corruption.seq), (BLOCK_BYTES, 5));
}

#[test]
fn the_verdict_does_not_depend_on_the_windows() {
    for commands in
        ["group 30; big 20000; group 3", "stale; group 3; big 9000; hole 8192 12288", "group 2; group 1; flip 4110"]
    {
        let mut image = Image::new();
        commands.split(';').for_each(|command| image.apply(command.trim()));
        for window_bytes in [24 << 10, 32 << 10, 100 << 10] {
            assert_eq!(image.open_in_windows(window_bytes / 4096 * 4096), image.open(), "{commands}, {window_bytes}");
        }
    }
}

/// Random groups, up to four of them in flight when the power fails: whatever subset of their sectors arrives, open
/// finds every synced record, loses no order, and never cries corruption.
#[test]
fn e8_a_power_cut_never_reads_as_corruption() {
    for seed in 0..100 {
        let mut rng = Rng::new(seed);
        let mut image = Image::new();
        if rng.chance(1, 2) {
            image.stale();
        }
        let before = image.bytes.clone();
        image.prepared = rng.chance(3, 4);
        let in_flight_max = if image.prepared { 4 } else { 1 };
        // Groups as (first block, end, first seq, end seq); the durable prefix moves at random.
        let mut groups = Vec::new();
        let mut durable = 0;
        for _ in 0..rng.range(1, 12) {
            while groups.len() - durable >= in_flight_max || (durable < groups.len() && rng.chance(1, 3)) {
                durable += 1;
            }
            let durable_next = groups.get(durable).map_or(image.next_seq, |g: &(usize, usize, u64, u64)| g.2);
            let payloads: Vec<usize> = (0..rng.range(1, 20)).map(|_| rng.below(600) as usize).collect();
            let (from, seq) = (image.at, image.next_seq);
            image.group(&payloads, Some(durable_next));
            groups.push((from, image.at, seq, image.next_seq));
        }
        let durable_next = groups.get(durable).map_or(image.next_seq, |g| g.2);
        for (from, to, ..) in &groups[durable..] {
            for sector in (*from..*to).step_by(512) {
                if rng.chance(1, 2) {
                    image.bytes[sector..sector + 512].copy_from_slice(&before[sector..sector + 512]);
                }
            }
        }
        let Verdict::Tail(tail) = image.open() else { panic!("seed {seed}: {}", image.open().text()) };
        assert!(tail.next_seq >= durable_next, "seed {seed}: {tail:?}, durable to {durable_next}");

        // E5: after the cut nothing that was cut decodes, also when the next group does not arrive whole.
        image.bytes[tail.cut as usize..tail.erase_to as usize].fill(0);
        let Verdict::Tail(again) = image.open() else { panic!("seed {seed}: corrupt after the cut") };
        assert_eq!((again.next_seq, again.cut), (tail.next_seq, tail.cut), "seed {seed}");
        assert_eq!(again.erase_to, again.cut, "seed {seed}: nothing is left to erase");
    }
}

/// A flipped bit in a record below the last durable group is never swallowed.
#[test]
fn e8_rot_below_a_later_group_is_always_seen() {
    for seed in 0..300 {
        let mut rng = Rng::new(seed);
        let mut image = Image::new();
        for _ in 0..rng.range(2, 8) {
            let payloads: Vec<usize> = (0..rng.range(1, 20)).map(|_| rng.below(600) as usize).collect();
            image.group(&payloads, None);
        }
        let last_group = image.frames.last().expect("groups").2;
        let synced: Vec<_> = image.frames.iter().filter(|frame| frame.2 < last_group).copied().collect();
        let (at, length, _) = synced[rng.below(synced.len() as u64) as usize];
        let head = Head::parse(&image.bytes[at..]);
        let byte = at + rng.below(u64::from(head.length).min(length as u64)) as usize;
        image.bytes[byte] ^= 1 << rng.below(8);
        let damaged = image.frames.iter().position(|frame| frame.0 == at).expect("one of them") as u64 + 1;
        let verdict = image.open();
        let seen = matches!(verdict, Verdict::Corrupt { seq, .. } if seq == damaged);
        assert!(seen, "seed {seed}, byte {byte}, record {damaged}: {}", verdict.text());
    }
}

/// D9, N3: no bytes make recovery panic.
#[test]
fn arbitrary_bytes_never_panic() {
    for seed in 0..200 {
        let mut rng = Rng::new(seed);
        let mut image = Image::new();
        image.apply("group 20");
        image.apply("big 9000");
        for _ in 0..rng.range(1, 40) {
            let at = rng.below(40_000) as usize;
            image.bytes[at] = rng.next_u64() as u8;
        }
        let text = image.open().text();
        assert!(!text.is_empty());
    }
}
