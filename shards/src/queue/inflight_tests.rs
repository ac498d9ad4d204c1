use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::rt::sim::Rng;

const TIMEOUT: Duration = Duration::from_secs(30);

fn limits(in_flight_max: u64, acked_ahead_max: u64) -> Limits {
    Limits { visibility_timeout: TIMEOUT, in_flight_max, acked_ahead_max }
}

fn fresh(in_flight_max: u64, acked_ahead_max: u64) -> InFlight {
    InFlight::restore(limits(in_flight_max, acked_ahead_max), &Position::default())
}

fn up_to(high_watermark: u64) -> Bounds {
    Bounds { oldest: 0, high_watermark }
}

fn at(seconds: u64) -> Instant {
    Instant(seconds * 1_000_000_000)
}

fn acked(state: &InFlight) -> Vec<(u64, u64)> {
    let mut ranges = Vec::new();
    state.position(&mut ranges);
    ranges.iter().map(|r| (r.start, r.end)).collect()
}

#[test]
fn c7_the_lowest_available_offset_is_leased() {
    let mut state = fresh(10, 10);
    assert_eq!(state.reserve(at(0), up_to(3), 1), Ok(0));
    assert_eq!(state.reserve(at(0), up_to(3), 2), Ok(1));
    assert_eq!(state.nack(at(0), 0, 1), Ok(()));
    assert_eq!(state.reserve(at(0), up_to(3), 3), Ok(0));
    assert_eq!(state.reserve(at(0), up_to(3), 4), Ok(2));
    assert_eq!(state.reserve(at(0), up_to(3), 5), Err(Refusal::AllReserved));
}

#[test]
fn c9_an_empty_partition_says_so() {
    let mut state = fresh(10, 10);
    assert_eq!(state.reserve(at(0), up_to(0), 1), Err(Refusal::Empty));
    assert_eq!(state.reserve(at(0), up_to(1), 1), Ok(0));
    assert_eq!(state.ack(at(0), 0, 1), Ok(()));
    assert_eq!(state.reserve(at(0), up_to(1), 2), Err(Refusal::Empty));
    assert_eq!(state.frontier(), 1);
}

#[test]
fn c10_at_the_in_flight_cap_nothing_is_handed_out() {
    let mut state = fresh(2, 10);
    assert_eq!(state.reserve(at(0), up_to(9), 1), Ok(0));
    assert_eq!(state.reserve(at(0), up_to(9), 2), Ok(1));
    assert_eq!(state.reserve(at(0), up_to(9), 3), Err(Refusal::InFlightCap));
    assert_eq!(state.ack(at(0), 1, 2), Ok(()));
    assert_eq!(state.reserve(at(0), up_to(9), 4), Ok(2));
}

#[test]
fn c11_n28_at_the_ahead_cap_only_the_hole_is_handed_out() {
    let mut state = fresh(10, 2);
    for nonce in 1..=4 {
        assert_eq!(state.reserve(at(0), up_to(9), nonce), Ok(nonce - 1));
    }
    assert_eq!(state.ack(at(0), 1, 2), Ok(()));
    assert_eq!(state.ack(at(0), 2, 3), Ok(()));
    assert_eq!(state.reserve(at(0), up_to(9), 5), Err(Refusal::AheadCap), "the hole is leased");
    assert_eq!(state.nack(at(0), 3, 4), Ok(()));
    assert_eq!(state.reserve(at(0), up_to(9), 5), Err(Refusal::AheadCap), "3 came back but is not the hole");
    assert_eq!(state.nack(at(0), 0, 1), Ok(()));
    assert_eq!(state.reserve(at(0), up_to(9), 6), Ok(0));
    assert_eq!(state.reserve(at(0), up_to(9), 7), Err(Refusal::AheadCap));
    assert_eq!(state.ack(at(0), 0, 6), Ok(()));
    assert_eq!((state.frontier(), state.acked_ahead()), (3, 0));
    assert_eq!(state.reserve(at(0), up_to(9), 8), Ok(3));
}

#[test]
fn c12_n28_2_acks_count_whatever_the_size_of_the_ahead_set() {
    let mut state = fresh(5, 1);
    for nonce in 1..=5 {
        state.reserve(at(0), up_to(9), nonce).expect("below the cap");
    }
    for nonce in 2..=5 {
        assert_eq!(state.ack(at(0), nonce - 1, nonce), Ok(()));
    }
    assert_eq!(state.acked_ahead(), 4);
    assert_eq!(acked(&state), [(1, 5)]);
}

#[test]
fn c13_altered_caps_apply_to_the_next_reserve() {
    let mut state = fresh(1, 10);
    assert_eq!(state.reserve(at(0), up_to(9), 1), Ok(0));
    assert_eq!(state.reserve(at(0), up_to(9), 2), Err(Refusal::InFlightCap));
    state.set_limits(limits(2, 10));
    assert_eq!(state.reserve(at(0), up_to(9), 2), Ok(1));
}

#[test]
fn c20_c25_an_ack_counts_once_and_in_any_order() {
    let mut state = fresh(10, 10);
    for nonce in 1..=3 {
        state.reserve(at(0), up_to(3), nonce).expect("available");
    }
    assert_eq!(state.ack(at(0), 2, 3), Ok(()));
    assert_eq!(state.ack(at(0), 2, 3), Err(LeaseGone));
    assert_eq!(state.ack(at(0), 1, 3), Err(LeaseGone), "another record's nonce");
    assert_eq!(state.ack(at(0), 0, 1), Ok(()));
    assert_eq!((state.frontier(), state.acked_ahead()), (1, 1));
    assert_eq!(state.ack(at(0), 1, 2), Ok(()));
    assert_eq!((state.frontier(), state.acked_ahead()), (3, 0));
    assert_eq!(state.ack(at(0), 0, 1), Err(LeaseGone), "below the frontier");
    assert_eq!(state.ack(at(0), 77, 1), Err(LeaseGone), "never handed out");
}

#[test]
fn c21_c24_an_extended_lease_outlives_its_first_deadline() {
    let mut state = fresh(10, 10);
    state.reserve(at(0), up_to(1), 1).expect("available");
    assert_eq!(state.next_expiry(), Some(at(30)));
    assert_eq!(state.extend(at(20), 0, 1), Ok(()));
    assert_eq!(state.expire(at(31)), 0, "the replaced deadline has no effect");
    assert_eq!(state.next_expiry(), Some(at(50)));
    assert_eq!(state.ack(at(49), 0, 1), Ok(()));
    assert_eq!(state.next_expiry(), None, "no lease, no timer");
}

#[test]
fn c22_a_nacked_record_is_available_at_once_under_a_new_nonce() {
    let mut state = fresh(10, 10);
    state.reserve(at(0), up_to(1), 1).expect("available");
    assert_eq!(state.nack(at(0), 0, 1), Ok(()));
    assert_eq!(state.nack(at(0), 0, 1), Err(LeaseGone));
    assert_eq!(state.reserve(at(0), up_to(1), 2), Ok(0));
    assert_eq!(state.ack(at(0), 0, 1), Err(LeaseGone), "D8: the old handle is dead");
    assert_eq!(state.ack(at(0), 0, 2), Ok(()));
}

#[test]
fn d7_any_touch_notices_a_lapse() {
    let mut state = fresh(10, 10);
    state.reserve(at(0), up_to(1), 1).expect("available");
    assert_eq!(state.ack(at(30), 0, 1), Err(LeaseGone), "lapsed exactly at its timeout");
    assert_eq!(state.leased(), 0);
    assert_eq!(state.available(up_to(1)), Ok(()));
}

#[test]
fn c59_the_frontier_jumps_over_what_retention_removed() {
    let mut state = fresh(10, 10);
    for nonce in 1..=4 {
        state.reserve(at(0), up_to(20), nonce).expect("available");
    }
    state.ack(at(0), 1, 2).expect("leased");
    state.ack(at(0), 3, 4).expect("leased");
    let overtaken = state.retire_below(3);
    assert_eq!(overtaken, Some(Overtaken { from: 0, to: 4, unsettled: 2 }), "3 is acked: passed as well");
    assert_eq!((state.leased(), state.acked_ahead()), (0, 0));
    assert_eq!(state.ack(at(0), 0, 1), Err(LeaseGone));
    assert_eq!(state.retire_below(4), None);
    assert_eq!(state.retire_below(10), Some(Overtaken { from: 4, to: 10, unsettled: 6 }));
    assert_eq!(state.reserve(at(0), Bounds { oldest: 10, high_watermark: 20 }, 9), Ok(10));
    state.check(Bounds { oldest: 10, high_watermark: 20 });
}

#[test]
fn g16_everything_expired_then_produced_again() {
    let mut state = fresh(10, 10);
    assert_eq!(state.retire_below(7), Some(Overtaken { from: 0, to: 7, unsettled: 7 }));
    let bounds = Bounds { oldest: 7, high_watermark: 7 };
    assert_eq!(state.reserve(at(0), bounds, 1), Err(Refusal::Empty));
    assert_eq!(state.reserve(at(0), Bounds { high_watermark: 8, ..bounds }, 1), Ok(7));
}

#[test]
fn c60_a_gap_is_stepped_over_in_one_go() {
    let mut state = fresh(10, 10);
    let bounds = up_to(2_000_000);
    state.reserve(at(0), bounds, 1).expect("available");
    state.reserve(at(0), bounds, 2).expect("available");
    assert_eq!(state.skip(1, 2, 1_000_000), 999_999);
    assert_eq!(state.slots.len(), 2, "a range costs no slots");
    assert_eq!(state.reserve(at(0), bounds, 3), Ok(1_000_000));
    assert_eq!(state.ack(at(0), 1_000_000, 3), Ok(()));
    assert_eq!(acked(&state), [(1_000_000, 1_000_001)], "skipped offsets are not persisted as acked (C2)");
    state.check(bounds);
    assert_eq!(state.ack(at(0), 0, 1), Ok(()));
    assert_eq!((state.frontier(), state.acked_ahead()), (1_000_001, 0));
    state.check(bounds);
}

#[test]
fn c60_a_skip_after_the_lease_ended_changes_nothing() {
    let mut state = fresh(10, 10);
    state.reserve(at(0), up_to(5), 1).expect("available");
    state.nack(at(0), 0, 1).expect("leased");
    assert_eq!(state.skip(0, 1, 5), 0);
    assert_eq!(state.reserve(at(0), up_to(5), 2), Ok(0));
}

#[test]
fn n29_a_restored_ahead_set_is_never_handed_out_again() {
    let position =
        Position { frontier: 3, acked: vec![Range { start: 5, end: 8 }, Range { start: 1_000_000, end: 1_000_010 }] };
    let mut state = InFlight::restore(limits(10, 100), &position);
    assert_eq!(state.acked_ahead(), 13);
    let bounds = up_to(2_000_000);
    let handed: Vec<u64> = (1..=4).map(|n| state.reserve(at(0), bounds, n).expect("available")).collect();
    assert_eq!(handed, [3, 4, 8, 9]);
    assert_eq!(acked(&state), [(5, 8), (1_000_000, 1_000_010)]);
    state.ack(at(0), 3, 1).expect("leased");
    state.ack(at(0), 4, 2).expect("leased");
    assert_eq!((state.frontier(), state.acked_ahead()), (8, 10));
    state.check(bounds);
    // A gap that reaches across a restored range leaves it settled and counts only what nobody had acked.
    assert_eq!(state.skip(8, 3, 1_000_020), 1 + (1_000_000 - 10) + 10);
    assert_eq!(state.acked_ahead(), 10);
    assert_eq!(state.ack(at(0), 9, 4), Ok(()));
    assert_eq!((state.frontier(), state.acked_ahead()), (1_000_020, 0));
    state.check(bounds);
}

#[test]
fn c59_retention_passes_restored_ranges() {
    let position = Position { frontier: 3, acked: vec![Range { start: 5, end: 8 }, Range { start: 20, end: 30 }] };
    let mut state = InFlight::restore(limits(10, 100), &position);
    assert_eq!(state.retire_below(25), Some(Overtaken { from: 3, to: 30, unsettled: 2 + 12 }));
    assert_eq!(state.acked_ahead(), 0);
    state.check(up_to(40));
}

#[test]
fn n83_steady_state_neither_allocates_nor_grows() {
    let mut state = fresh(64, 64);
    let mut capacity = None;
    let mut offset = 0;
    for round in 0..2_000u64 {
        for _ in 0..64 {
            state.reserve(at(round), up_to(u64::MAX / 2), offset + 1).expect("below the cap");
            offset += 1;
        }
        for acked in (offset - 64..offset).rev() {
            if acked % 5 == 0 {
                state.extend(at(round), acked, acked + 1).expect("leased");
            }
            state.ack(at(round), acked, acked + 1).expect("leased");
        }
        let now = (state.slots.capacity(), state.deadlines.capacity(), state.returned.capacity());
        if round > 10 {
            assert_eq!(*capacity.get_or_insert(now), now);
        }
    }
    assert_eq!((state.frontier(), state.leased()), (offset, 0));
}

/// The same rules, written down naively.
#[derive(Default)]
struct Model {
    frontier: u64,
    leases: BTreeMap<u64, (u64, Instant)>,
    acked: BTreeSet<u64>,
    skipped: BTreeSet<u64>,
    /// Every offset ever acked: never to be handed out again (D5).
    acked_ever: BTreeSet<u64>,
}

impl Model {
    fn advance(&mut self) {
        while self.acked.remove(&self.frontier) || self.skipped.remove(&self.frontier) {
            self.frontier += 1;
        }
    }

    fn expire(&mut self, now: Instant) {
        self.leases.retain(|_, (_, expires)| *expires > now);
    }

    fn retire(&mut self, oldest: u64) {
        self.frontier = self.frontier.max(oldest);
        self.leases = self.leases.split_off(&self.frontier);
        self.acked = self.acked.split_off(&self.frontier);
        self.skipped = self.skipped.split_off(&self.frontier);
        self.advance();
    }

    fn reserve(&mut self, limits: &Limits, now: Instant, bounds: Bounds, nonce: u64) -> Result<u64, Refusal> {
        if self.frontier >= bounds.high_watermark {
            return Err(Refusal::Empty);
        }
        if self.leases.len() >= limits.in_flight_max as usize {
            return Err(Refusal::InFlightCap);
        }
        let taken = |o: &u64| self.leases.contains_key(o) || self.acked.contains(o) || self.skipped.contains(o);
        let pick = (self.frontier..bounds.high_watermark).find(|o| !taken(o));
        let pick = if self.acked.len() >= limits.acked_ahead_max as usize {
            pick.filter(|o| *o == self.frontier).ok_or(Refusal::AheadCap)?
        } else {
            pick.ok_or(Refusal::AllReserved)?
        };
        self.leases.insert(pick, (nonce, now + limits.visibility_timeout));
        Ok(pick)
    }

    fn holds(&self, offset: u64, nonce: u64) -> bool {
        self.leases.get(&offset).is_some_and(|(held, _)| *held == nonce)
    }
}

#[test]
fn d3_c5_random_histories_agree_with_a_naive_model() {
    for seed in 0..200 {
        agree(seed);
    }
}

fn agree(seed: u64) {
    let mut rng = Rng::new(seed);
    let mut limits = limits(rng.range(1, 12), rng.below(12));
    let mut state = InFlight::restore(limits, &Position::default());
    let mut model = Model::default();
    let mut bounds = up_to(0);
    let mut now = at(1);
    let mut handles: Vec<(u64, u64)> = Vec::new();
    for step in 1..400u64 {
        let handle = |rng: &mut Rng, handles: &Vec<(u64, u64)>| match handles.len() {
            0 => (rng.below(10), 1),
            n => handles[rng.below(n as u64) as usize],
        };
        match rng.below(20) {
            0..=2 => bounds.high_watermark += rng.below(5),
            3..=9 => {
                state.expire(now);
                model.expire(now);
                state.retire_below(bounds.oldest);
                model.retire(bounds.oldest);
                let expected = model.reserve(&limits, now, bounds, step);
                assert_eq!(state.available(bounds), expected.map(|_| ()), "seed {seed} step {step}");
                let got = state.reserve(now, bounds, step);
                assert_eq!(got, expected, "seed {seed} step {step}");
                if let Ok(offset) = got {
                    assert!(!model.acked_ever.contains(&offset), "D5: seed {seed} step {step}");
                    handles.push((offset, step));
                }
            }
            10..=13 => {
                let (offset, nonce) = handle(&mut rng, &handles);
                model.expire(now);
                let expected = model.holds(offset, nonce);
                assert_eq!(state.ack(now, offset, nonce).is_ok(), expected, "seed {seed} step {step}");
                if expected {
                    model.leases.remove(&offset);
                    model.acked.insert(offset);
                    model.acked_ever.insert(offset);
                    model.advance();
                }
            }
            14 => {
                let (offset, nonce) = handle(&mut rng, &handles);
                model.expire(now);
                let expected = model.holds(offset, nonce);
                assert_eq!(state.nack(now, offset, nonce).is_ok(), expected, "seed {seed} step {step}");
                if expected {
                    model.leases.remove(&offset);
                }
            }
            15 => {
                let (offset, nonce) = handle(&mut rng, &handles);
                model.expire(now);
                let expected = model.holds(offset, nonce);
                assert_eq!(state.extend(now, offset, nonce).is_ok(), expected, "seed {seed} step {step}");
                if expected {
                    model.leases.insert(offset, (nonce, now + limits.visibility_timeout));
                }
            }
            16 => {
                let (offset, nonce) = handle(&mut rng, &handles);
                let until = (offset + 1 + rng.below(6)).min(bounds.high_watermark);
                let next = state.next;
                if model.holds(offset, nonce) {
                    model.leases.remove(&offset);
                    model.skipped.insert(offset);
                    model.skipped.extend(next..until.max(next));
                    model.advance();
                }
                state.skip(offset, nonce, until);
            }
            17 => bounds.oldest = (bounds.oldest + rng.below(4)).min(bounds.high_watermark),
            18 => now = now + Duration::from_secs(rng.below(25)),
            _ => {
                if rng.chance(1, 4) {
                    limits = self::limits(rng.range(1, 12), rng.below(12));
                    state.set_limits(limits);
                } else {
                    // A restart: leases and skips are forgotten, acked offsets are not (C2).
                    let mut acked = Vec::new();
                    let frontier = state.position(&mut acked);
                    state = InFlight::restore(limits, &Position { frontier, acked });
                    model.leases.clear();
                    model.skipped.clear();
                }
            }
        }
        state.check(bounds);
        assert_eq!(state.frontier(), model.frontier, "seed {seed} step {step}");
        assert_eq!(state.acked_ahead(), model.acked.len() as u64, "seed {seed} step {step}");
        let mut ranges = Vec::new();
        state.position(&mut ranges);
        let persisted: BTreeSet<u64> = ranges.iter().flat_map(|r| r.start..r.end).collect();
        assert_eq!(persisted, model.acked, "C75: seed {seed} step {step}");
        if let Some(at) = state.next_expiry() {
            assert_eq!(Some(at), model.leases.values().map(|(_, at)| *at).min(), "seed {seed} step {step}");
        }
    }
}
