//! One seed, from its world's beginning to its end.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::panic::AssertUnwindSafe;
use std::rc::Rc;
use std::time::Duration;

use narad_shards::io::sim::SimDisk;
use narad_shards::rt::panic_text;
use narad_shards::rt::sim::{Rng, Sim};

use crate::broker::Launcher;
use crate::ledger::{Counts, Rule, Violation};
use crate::options::WorldOptions;
use crate::world::World;

/// What became of one seed.
pub struct Report {
    pub seed: u64,
    pub options: WorldOptions,
    pub violations: Vec<Violation>,
    pub events: Vec<String>,
    pub disk_trace: String,
    pub counts: Counts,
    pub refused: bool,
    pub virtual_time: Duration,
    pub disk_calls: u64,
    /// Of all events: two runs of one seed have the same.
    pub hash: u64,
}

/// Runs the world of a seed to its end.
pub fn run_world(
    seed: u64,
    nodes: usize,
    whole: bool,
    launcher: impl FnOnce(u64, &WorldOptions, &Sim) -> Rc<dyn Launcher>,
) -> Report {
    let mut rng = Rng::new(seed);
    let options = WorldOptions::draw(&mut rng).with_nodes(nodes, whole, &mut rng);
    run_world_with(seed, options, launcher)
}

pub fn run_world_with(
    seed: u64,
    options: WorldOptions,
    launcher: impl FnOnce(u64, &WorldOptions, &Sim) -> Rc<dyn Launcher>,
) -> Report {
    drop(crate::trace::take()); // what was left of another world
    let mut rng = Rng::new(!seed);
    let sim = Sim::new(rng.next_u64());
    let world = World::new(options, &sim, rng, launcher);
    let start = sim.now();
    let main = world.clone();
    let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| sim.run(main.live())));
    let end = sim.now();
    // A panic may have left the ledger borrowed for ever: what it held until then is lost, the panic is not.
    let (mut violations, events, counts) = match world.ledger.try_borrow() {
        Ok(ledger) => (ledger.violations.clone(), ledger.events.clone(), ledger.counts),
        Err(_) => (Vec::new(), Vec::new(), Counts::default()),
    };
    match outcome {
        Ok(()) => {
            let (worlds, disks) = (Rc::strong_count(&world), world.disks.len());
            let holders: usize = world.disks.iter().map(SimDisk::holders).sum();
            if (worlds, holders) != (1, disks) {
                let holders = holders - disks;
                let text = format!("{} references to the world and {holders} to its disks are left", worlds - 1);
                violations.push(Violation { rule: Rule::Leak, text });
            }
        }
        Err(panic) => {
            violations.push(Violation { rule: Rule::Panic, text: panic_text(panic.as_ref()) });
            // What it left behind may panic again on its way out: that says nothing new.
            let _ = std::panic::catch_unwind(AssertUnwindSafe(|| sim.abandon()));
        }
    }
    let mut hasher = DefaultHasher::new();
    events.hash(&mut hasher);
    Report {
        seed,
        options: world.options.clone(),
        violations,
        events,
        disk_trace: world.disks.iter().map(SimDisk::trace).collect::<Vec<_>>().join("\n"),
        counts,
        refused: world.refused(),
        virtual_time: end - start,
        disk_calls: world.disks.iter().map(SimDisk::calls).sum(),
        hash: hasher.finish(),
    }
}
