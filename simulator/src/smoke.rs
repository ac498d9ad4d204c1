//! A few short worlds of the real shards, so that a change that breaks the simulation shows without running thousands.

use std::rc::Rc;
use std::time::Duration;

use narad_shards::rt::sim::{Rng, Sim};

use crate::broker::Launcher;
use crate::ledger::Counts;
use crate::node::ShardLauncher;
use crate::options::{Planted, Profile, WorldOptions};
use crate::run::run_world_with;

#[test]
fn real_shards_keep_the_contract_and_leave_nothing_behind() {
    let profiles = [
        Profile::Calm,
        Profile::Kills,
        Profile::PowerCuts,
        Profile::DiskErrors,
        Profile::FullDisk,
        Profile::Lies,
        Profile::Rot,
        Profile::Resize,
    ];
    let mut total = Counts::default();
    for (seed, profile) in (0..).zip(profiles) {
        let drawn = WorldOptions::draw(&mut Rng::new(seed));
        let retention = [None, Some(Duration::from_secs(2)), Some(Duration::from_secs(900))][seed as usize % 3];
        let options = WorldOptions {
            profile,
            retention,
            clock_steps: drawn.clock_steps && retention.is_none(),
            produces: drawn.produces.min(25),
            batch_records: 10,
            visibility: Duration::from_millis(300),
            ..drawn
        };
        let report =
            run_world_with(seed, options, |seed, options, sim| Rc::new(ShardLauncher::new(seed, options, sim)));
        assert!(report.violations.is_empty(), "seed {seed}, {profile:?}: {:?}", report.violations);
        total.add(&report.counts);
    }
    assert_eq!(total.missing(false), None);
}

#[test]
fn several_nodes_keep_the_contract_and_leave_nothing_behind() {
    let mut total = Counts::default();
    for (seed, profile) in (40..).zip([Profile::Calm, Profile::Kills, Profile::PowerCuts, Profile::Network]) {
        let mut rng = Rng::new(seed);
        let drawn = WorldOptions::draw(&mut rng).with_nodes(2 + seed as usize % 2, false, &mut rng);
        let options = WorldOptions {
            profile,
            retention: None,
            produces: drawn.produces.min(25),
            batch_records: 10,
            visibility: Duration::from_millis(300),
            ..drawn
        };
        let launcher = |seed, options: &WorldOptions, sim: &Sim| -> Rc<dyn Launcher> {
            Rc::new(ShardLauncher::new(seed, options, sim))
        };
        let report = run_world_with(seed, options, launcher);
        assert!(report.violations.is_empty(), "seed {seed}, {profile:?}: {:?}", report.violations);
        total.add(&report.counts);
    }
    assert_eq!(total.missing(false), None);
}

#[test]
fn whole_nodes_keep_the_contract_and_leave_nothing_behind() {
    let mut total = Counts::default();
    // As many as it takes until everything has happened once.
    for seed in 0..50 {
        let report = run_world_with(seed, whole_options(seed), launch);
        assert!(report.violations.is_empty(), "seed {seed}: {:?}", report.violations);
        let again = run_world_with(seed, whole_options(seed), launch);
        assert_eq!(report.hash, again.hash, "seed {seed} has two histories");
        total.add(&report.counts);
        if seed > 1 && total.missing(true).is_none() {
            break;
        }
    }
    assert_eq!(total.missing(true), None);
}

#[test]
fn what_is_planted_in_the_metadata_is_found() {
    for (planted, seeds) in [(Planted::SkipChange, 3), (Planted::OwnWord, 100), (Planted::OldVoter, 100)] {
        let found = (0..seeds).position(|seed| {
            let options = WorldOptions { planted: Some(planted), churn: true, ..whole_options(seed) };
            !run_world_with(seed, options, launch).violations.is_empty()
        });
        assert!(found.is_some(), "{planted:?} is not found");
    }
}

fn whole_options(seed: u64) -> WorldOptions {
    let mut rng = Rng::new(seed);
    let drawn = WorldOptions::draw(&mut rng).with_nodes(3, true, &mut rng);
    WorldOptions {
        profile: Profile::Cluster,
        retention: None,
        produces: drawn.produces.min(20),
        batch_records: 10,
        visibility: Duration::from_millis(300),
        ..drawn
    }
}

fn launch(seed: u64, options: &WorldOptions, sim: &Sim) -> Rc<dyn Launcher> {
    Rc::new(ShardLauncher::new(seed, options, sim))
}
