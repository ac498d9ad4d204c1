use super::*;
use crate::rt::sim::Rng;

const LIFE: Incarnation = Incarnation(0x1234_5678_9abc_def0);

fn ranges(list: &[(u64, u64)]) -> Vec<Range> {
    list.iter().map(|&(start, end)| Range { start, end }).collect()
}

fn slot(sequence: u64, frontier: u64, acked: &[Range]) -> Vec<u8> {
    let mut slot = vec![0; SLOT_BYTES];
    encode_slot(&mut slot, LIFE, sequence, frontier, acked);
    slot
}

fn decoded(frontier: u64, acked: &[Range]) -> Position {
    decode_slot(&slot(7, frontier, acked), LIFE).expect("just encoded").position
}

#[test]
fn g3_the_sum_of_both_caps_fits_one_slot() {
    // The worst case of C12: every other one of 2 x 2048 offsets.
    let scattered: Vec<Range> = (0..2048).map(|i| Range { start: 101 + 2 * i, end: 102 + 2 * i }).collect();
    assert_eq!(decoded(99, &scattered), Position { frontier: 99, acked: scattered });
}

#[test]
fn a_position_at_the_last_offsets_is_written_like_any_other() {
    let acked = [Range { start: u64::MAX - 3, end: u64::MAX - 2 }, Range { start: u64::MAX - 1, end: u64::MAX }];
    let mut slot = vec![0; SLOT_BYTES];
    encode_slot(&mut slot, Incarnation(7), 1, u64::MAX - 5, &acked);
    let found = decode_slot(&slot, Incarnation(7)).expect("whole");
    assert_eq!(found.position, Position { frontier: u64::MAX - 5, acked: acked.to_vec() });
}

#[test]
fn c74_a_set_too_large_keeps_its_lowest_offsets() {
    let scattered: Vec<Range> = (0..40_000).map(|i| Range { start: 10 + 3 * i, end: 11 + 3 * i }).collect();
    let kept = decoded(5, &scattered).acked;
    assert!(kept.len() > 10_000, "{}", kept.len());
    assert_eq!(kept[..], scattered[..kept.len()]);

    let far = ranges(&[(10, 20), (1_000_000, 1_002_000), (u64::MAX - 10, u64::MAX)]);
    assert_eq!(decoded(5, &far).acked, far, "few ranges far apart are kept whole");
}

#[test]
fn c73_anything_but_a_whole_slot_is_no_slot() {
    let whole = slot(3, 8, &ranges(&[(10, 12)]));
    assert!(decode_slot(&whole, LIFE).is_some());
    assert!(decode_slot(&whole, Incarnation(1)).is_none(), "S4: another incarnation's position");
    assert!(decode_slot(&whole[..SLOT_BYTES - 1], LIFE).is_none());
    assert!(decode_slot(&[0; SLOT_BYTES], LIFE).is_none());
    for at in (0..SLOT_BYTES).step_by(13).chain([60, 61, 62, 63]) {
        let mut rotten = whole.clone();
        rotten[at] ^= 0x10;
        assert!(decode_slot(&rotten, LIFE).is_none(), "byte {at}");
    }
}

#[test]
fn arbitrary_bodies_under_a_valid_checksum_never_panic() {
    let mut rng = Rng::new(11);
    for _ in 0..3000 {
        let mut bytes = slot(1, rng.next_u64() >> rng.below(64), &[]);
        let body = rng.below(64) as usize;
        bytes[6] = rng.below(3) as u8;
        bytes[32..36].copy_from_slice(&(rng.below(70) as u32 * 61).to_le_bytes());
        bytes[BODY_AT..BODY_AT + body].iter_mut().for_each(|byte| *byte = rng.next_u64() as u8);
        let crc = slot_crc(&bytes);
        bytes[CRC_AT..BODY_AT].copy_from_slice(&crc.to_le_bytes());
        if let Some(record) = decode_slot(&bytes, LIFE) {
            let mut previous = record.position.frontier;
            for range in &record.position.acked {
                assert!(range.start > previous && range.end > range.start);
                previous = range.end;
            }
        }
    }
}

#[test]
fn random_positions_survive_the_codec() {
    let mut rng = Rng::new(5);
    for _ in 0..300 {
        let frontier = rng.next_u64() >> rng.range(1, 64);
        let spread = 1 << rng.range(1, 12);
        let mut acked = Vec::new();
        let mut at = frontier;
        for _ in 0..rng.below(60) {
            let start = at + 1 + rng.below(spread);
            at = start + 1 + rng.below(spread);
            acked.push(Range { start, end: at });
        }
        assert_eq!(decoded(frontier, &acked), Position { frontier, acked });
    }
}

#[test]
fn c78_the_larger_of_both_files_counts() {
    let ahead = || Some(Position { frontier: 5, acked: ranges(&[(7, 9), (12, 13)]) });
    assert_eq!(Position::merge(None, None), None);
    assert_eq!(Position::merge(ahead(), None), ahead());
    assert_eq!(Position::merge(ahead(), Some(3)), ahead());
    assert_eq!(Position::merge(None, Some(3)), Some(Position { frontier: 3, acked: vec![] }));
    let touching = Position { frontier: 9, acked: ranges(&[(12, 13)]) };
    assert_eq!(Position::merge(ahead(), Some(7)), Some(touching), "the frontier moves over what touches it");
    assert_eq!(Position::merge(ahead(), Some(40)), Some(Position { frontier: 40, acked: vec![] }));
    assert_eq!(decode_offset(&[], LIFE), None, "an empty file means none");
    assert_eq!(decode_offset(&encode_offset(LIFE, 77), LIFE), Some(77));
    assert_eq!(decode_offset(&encode_offset(LIFE, 77), Incarnation(2)), None);
}

#[test]
fn g20_d4_a_position_beyond_the_log_is_cut() {
    let mut position = Position { frontier: 5, acked: ranges(&[(7, 9), (12, 20)]) };
    assert!(position.reaches_beyond(19) && !position.reaches_beyond(20));
    position.clamp(14);
    assert_eq!(position, Position { frontier: 5, acked: ranges(&[(7, 9), (12, 14)]) });
    position.clamp(3);
    assert_eq!(position, Position { frontier: 3, acked: vec![] });
}

/// A file of two slots as a disk sees it: what is durable, and what would be lost or torn by a power cut.
struct TwoSlots {
    durable: Vec<u8>,
    cached: Vec<u8>,
}

impl TwoSlots {
    fn new() -> TwoSlots {
        TwoSlots { durable: vec![0; AHEAD_FILE_BYTES as usize], cached: vec![0; AHEAD_FILE_BYTES as usize] }
    }

    fn write(&mut self, at: u64, slot: &[u8]) {
        self.cached[at as usize..at as usize + SLOT_BYTES].copy_from_slice(slot);
    }

    fn sync(&mut self) {
        self.durable = self.cached.clone();
    }

    /// Any subset of the unsynced sectors reached the disk.
    fn after_power_cut(&self, rng: &mut Rng) -> Vec<u8> {
        let mut image = self.durable.clone();
        for sector in (0..image.len()).step_by(512).filter(|_| rng.chance(1, 2)) {
            image[sector..sector + 512].copy_from_slice(&self.cached[sector..sector + 512]);
        }
        image
    }
}

/// Acks that put something else into every sector of a slot each time, so that a torn one shows.
fn spread(frontier: u64, sequence: u64) -> Vec<Range> {
    let start = |sector: u64| frontier + 2 + sector * 4_096 + sequence % 64 * 3;
    (0..7).map(|sector| Range { start: start(sector), end: start(sector) + 2 }).collect()
}

#[test]
fn d16_d17_d19_a_crash_at_any_step_recovers_no_less_than_promised_and_never_more() {
    for seed in 0..300 {
        let mut rng = Rng::new(seed);
        let mut file = TwoSlots::new();
        let (mut slots, found) = Slots::prime(&file.cached, LIFE);
        assert_eq!(found, None);
        let (mut frontier, mut written, mut durable) = (0, 0, 0);
        // A write torn by one crash may be completed by the same bytes of a later one: acked all the same.
        let mut acked_ever = 0;
        for step in 0..60 {
            match rng.below(5) {
                0..=1 => frontier += rng.below(3),
                2 => {
                    let sequence = slots.take_sequence();
                    let acked = spread(frontier, sequence);
                    file.write(slots.window_at(), &slot(sequence, frontier, &acked));
                    written = frontier;
                    acked_ever = acked_ever.max(frontier);
                }
                3 if written > durable => {
                    // A failed sync may have written any part of the window; the roles stay.
                    if rng.chance(1, 3) {
                        file.durable = file.after_power_cut(&mut rng);
                    } else {
                        file.sync();
                        slots.synced();
                        durable = written;
                    }
                }
                _ => {
                    // The process was killed: the page cache stays.
                    let (_, position) = Slots::prime(&file.cached, LIFE);
                    let recovered = position.map_or(0, |p| p.frontier);
                    assert_eq!(recovered, written, "D16, D19: seed {seed} step {step}");
                    // The power went: some sectors of the window.
                    let image = file.after_power_cut(&mut rng);
                    let (_, position) = Slots::prime(&image, LIFE);
                    let recovered = position.map_or(0, |p| p.frontier);
                    assert!(recovered >= durable && recovered <= acked_ever, "D17, D19: seed {seed} step {step}");
                    if rng.chance(1, 4) {
                        // Go on from there, as the next process does: prime, then sync before the first write.
                        file = TwoSlots { durable: image.clone(), cached: image };
                        let (primed, _) = Slots::prime(&file.cached, LIFE);
                        slots = primed;
                        file.sync();
                        (frontier, written, durable) = (recovered, recovered, recovered);
                    }
                }
            }
        }
    }
}

#[test]
fn c76_without_the_sync_at_priming_the_newest_slot_could_be_lost() {
    // Why priming syncs: slot 1 is newest but only cached; slot 0 becomes the window and is overwritten.
    let mut file = TwoSlots::new();
    file.write(0, &slot(1, 10, &[]));
    file.sync();
    file.write(SLOT_BYTES as u64, &slot(2, 20, &[]));
    let (mut slots, found) = Slots::prime(&file.cached, LIFE);
    assert_eq!((slots.window_at(), found.map(|p| p.frontier)), (0, Some(20)));
    file.sync();
    let sequence = slots.take_sequence();
    file.write(slots.window_at(), &slot(sequence, 30, &ranges(&[(40, 20_000)])));
    let mut torn = file.durable.clone();
    torn[..512].copy_from_slice(&file.cached[..512]);
    let (_, found) = Slots::prime(&torn, LIFE);
    assert_eq!(found.map(|p| p.frontier), Some(20), "the anchor answers for a torn window");
}
