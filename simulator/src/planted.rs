//! A checker that cannot fail is a defect: every way to break the contract is planted, and must be found.

use std::rc::Rc;
use std::time::Duration;

use narad_shards::rt::sim::Rng;

use crate::ledger::Rule;
use crate::model::{Bug, ModelLauncher};
use crate::options::WorldOptions;
use crate::run::{run_world, run_world_with, Report};

fn worlds(bug: Bug, seeds: u64) -> impl Iterator<Item = Report> {
    (0..seeds).map(move |seed| run_world(seed, 1, false, |seed, _, _| Rc::new(ModelLauncher::new(seed, bug))))
}

/// Fewer and shorter: a planted bug shows early.
fn small_worlds(bug: Bug, seeds: u64) -> impl Iterator<Item = Report> {
    (0..seeds).map(move |seed| {
        let mut options = WorldOptions::draw(&mut Rng::new(seed));
        options.produces = options.produces.min(40);
        options.batch_records = options.batch_records.min(10);
        options.visibility = options.visibility.min(Duration::from_millis(300));
        options.patience = Duration::from_secs(6);
        run_world_with(seed, options, |seed, _, _| Rc::new(ModelLauncher::new(seed, bug)))
    })
}

#[test]
fn a_broker_that_keeps_the_contract_passes() {
    let mut total = crate::ledger::Counts::default();
    for report in worlds(Bug::None, 25) {
        assert!(report.violations.is_empty(), "seed {}: {:?}", report.seed, report.violations);
        total.add(&report.counts);
    }
    assert_eq!(total.missing(false), None);
}

#[test]
fn every_planted_bug_is_found() {
    let planted = [
        (Bug::LoseAccepted, Rule::Lost),
        (Bug::LoseAtCrash, Rule::Lost),
        (Bug::LeaseTwice, Rule::DoubleLease),
        (Bug::ForgetAck, Rule::AckUndone),
        (Bug::ForgetOldAckAtCrash, Rule::AckUndone),
        (Bug::ForgetAckAtStop, Rule::AckUndone),
        (Bug::AcceptLateAck, Rule::LateSettleAccepted),
        (Bug::RefuseLiveAck, Rule::LiveLeaseRefused),
        (Bug::FlipBit, Rule::WrongBytes),
        (Bug::StoreRefused, Rule::RefusedDelivered),
        (Bug::DeliverOld, Rule::OtherIncarnation),
        (Bug::ReuseOffset, Rule::OffsetReused),
        (Bug::StoreTwice, Rule::Duplicate),
        (Bug::IgnorePin, Rule::Misplaced),
        (Bug::WatermarkBack, Rule::Watermark),
        (Bug::WatermarkPastDurable, Rule::Watermark),
        (Bug::FrontierPastWatermark, Rule::Frontier),
        (Bug::FrontierPastUnacked, Rule::Frontier),
        (Bug::CheckpointPastUndone, Rule::Checkpoint),
        (Bug::CommitTimeBack, Rule::CommitTime),
        (Bug::HoardMemory, Rule::Memory),
        (Bug::HoldLapsedLease, Rule::Stuck),
        (Bug::Latch, Rule::Latched),
        (Bug::Poison, Rule::Latched),
        (Bug::ForgetName, Rule::Unnamed),
        (Bug::WrongBacklog, Rule::Backlog),
        (Bug::Leak, Rule::Leak),
        (Bug::RefuseStart, Rule::Refusal),
        (Bug::Unreadable, Rule::Unreadable),
        (Bug::ExpireYoung, Rule::TooYoung),
        (Bug::ExpireUnseen, Rule::Lost),
        (Bug::Panic, Rule::Panic),
    ];
    for (bug, rule) in planted {
        let found =
            small_worlds(bug, 120).position(|report| report.violations.iter().any(|violation| violation.rule == rule));
        assert!(found.is_some(), "{bug:?} is not found as {rule:?}");
    }
}

#[test]
fn one_seed_has_one_history() {
    let hashes = |bug| worlds(bug, 4).map(|report| report.hash).collect::<Vec<_>>();
    assert_eq!(hashes(Bug::None), hashes(Bug::None));
    assert_ne!(hashes(Bug::Unseeded), hashes(Bug::Unseeded));
}
