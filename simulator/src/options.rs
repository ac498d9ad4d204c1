//! What kind of world a seed makes.

use std::time::Duration;

use narad_shards::io::sim::DiskOptions;
use narad_shards::rt::sim::Rng;

use crate::ledger::Allowances;

/// Which faults come up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// None, graceful restarts aside: strict, no duplicate, no ack undone.
    Calm,
    Kills,
    PowerCuts,
    /// EIO, short writes and stalls, with kills and power cuts.
    DiskErrors,
    /// Space runs out and comes back.
    FullDisk,
    /// Syncs that say Ok, then power cuts (E33).
    Lies,
    /// Flipped bits at rest, then restarts (E33).
    Rot,
    /// Of several nodes: connections cut and reset, membership that errs, and kills.
    Network,
    /// Of whole nodes: whoever leads is killed, cut off or stopped, a majority goes down, and old files come back.
    Cluster,
    /// Under load, from one number of shards to the next: 1, 2, 4, 3, 1. Ends of every honest kind in between.
    Resize,
}

/// One way to break the rules of the metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// A replica skips a change now and then.
    SkipChange,
    /// A node confirms by its own state that a topic is gone, without the leader's word (K21).
    OwnWord,
    /// Old files of a voter come back without `--restored` (E36).
    OldVoter,
}

#[derive(Clone, Debug)]
pub struct WorldOptions {
    pub profile: Profile,
    pub nodes: usize,
    /// The nodes run their control planes too, on one metadata.
    pub whole: bool,
    /// What is wrong with the control planes, so that it is found.
    pub planted: Option<Planted>,
    pub shards: u16,
    pub topics: usize,
    pub partitions: u32,
    pub visibility: Duration,
    pub max_in_flight: u64,
    pub max_acked_ahead: u64,
    pub producers: usize,
    pub consumers: usize,
    /// Produce requests over all producers.
    pub produces: u64,
    /// Longest pause of a producer between two of them.
    pub pace: Duration,
    /// Records of one batch at most.
    pub batch_records: u64,
    /// How long what is owed may take once everything is healed.
    pub patience: Duration,
    /// Clients that give up in the middle of a request.
    pub impatient: bool,
    /// Topics are deleted and created again.
    pub churn: bool,
    /// The wall clock steps while the node runs. Only here: a real process cannot be given a clock of its own (a time
    /// namespace leaves the wall clock alone), and stepping the machine's would disturb whoever else runs on it.
    pub clock_steps: bool,
    /// Of every topic. `None`: for ever.
    pub retention: Option<Duration>,
    pub disk: DiskOptions,
}

impl WorldOptions {
    pub fn draw(rng: &mut Rng) -> WorldOptions {
        let profile = match rng.below(24) {
            0..=3 => Profile::Calm,
            4..=7 => Profile::Kills,
            8..=12 => Profile::PowerCuts,
            13..=15 => Profile::DiskErrors,
            16..=18 => Profile::FullDisk,
            19 => Profile::Lies,
            20..=21 => Profile::Rot,
            _ => Profile::Resize,
        };
        let sector_bytes = if rng.chance(1, 4) { 4096 } else { 512 };
        let call_ns = if rng.chance(1, 8) { (500_000, 20_000_000) } else { (5_000, 400_000) };
        let drawn_shards = rng.range(1, 5) as u16;
        // Large batches cross segments and chunks and run staging memory short: fewer of them say as much.
        let large = rng.chance(1, 6);
        let produces = if large { rng.range(10, 60) } else { rng.range(20, 150) };
        // So short that records expire while others are produced, so long that none may; and in between.
        let retention =
            [None, None, None, Some(2), Some(15), Some(900)][rng.below(6) as usize].map(Duration::from_secs);
        WorldOptions {
            profile,
            nodes: 1,
            whole: false,
            planted: None,
            shards: if profile == Profile::Resize { 1 } else { drawn_shards },
            topics: rng.range(1, 4) as usize,
            partitions: rng.range(1, 5) as u32,
            visibility: Duration::from_millis([300, 1_000, 5_000][rng.below(3) as usize]),
            max_in_flight: [4, 64, 1024][rng.below(3) as usize],
            max_acked_ahead: [2, 64, 1024][rng.below(3) as usize],
            producers: rng.range(1, 5) as usize,
            consumers: rng.range(2, 7) as usize,
            produces: if profile == Profile::Resize { produces * 2 } else { produces },
            pace: Duration::from_millis(50),
            batch_records: if large { 250 } else { 20 },
            patience: Duration::from_secs(120),
            impatient: rng.chance(1, 3),
            churn: rng.chance(1, 3),
            // Ages go by the wall clock: where it steps, nothing could be said about them.
            clock_steps: rng.chance(1, 4) && retention.is_none(),
            retention,
            disk: DiskOptions { sector_bytes, call_ns, ..DiskOptions::default() },
        }
    }

    /// The same world with so many nodes, `whole` or their shards alone. Their disks are sound: what disks do to one node
    /// is drawn with one.
    pub fn with_nodes(self, nodes: usize, whole: bool, rng: &mut Rng) -> WorldOptions {
        if nodes == 1 {
            return self;
        }
        use Profile::{Calm, Cluster, Kills, Network, PowerCuts};
        let profiles = match whole {
            true => [Calm, PowerCuts, Cluster, Cluster, Cluster, Cluster],
            false => [Calm, Kills, PowerCuts, Network, Network, Network],
        };
        let several = WorldOptions {
            profile: profiles[rng.below(profiles.len() as u64) as usize],
            nodes,
            whole,
            shards: rng.range(1, 4) as u16,
            partitions: self.partitions.max(nodes as u32),
            // Each node reads its own clock, and only one of them would be stepped.
            clock_steps: false,
            ..self
        };
        if !whole {
            return several;
        }
        // Long enough for elections and for what membership makes of silence, and few records on the way.
        WorldOptions {
            produces: rng.range(10, 40),
            pace: Duration::from_millis(rng.range(200, 1_500)),
            batch_records: several.batch_records.min(60),
            churn: rng.chance(1, 2),
            ..several
        }
    }

    pub fn allowances(&self) -> Allowances {
        // One write tick, one durability interval, and the time that the writes themselves take on this disk.
        let calls = Duration::from_nanos(self.disk.call_ns.1) * 4 * self.topics as u32 * self.partitions;
        Allowances {
            honest: !matches!(self.profile, Profile::Lies | Profile::Rot),
            disk_errors: matches!(self.profile, Profile::DiskErrors | Profile::FullDisk),
            killed_acks: Duration::from_millis(110) + calls,
            power_cut_acks: Duration::from_millis(1_210) + calls * 2,
        }
    }
}
