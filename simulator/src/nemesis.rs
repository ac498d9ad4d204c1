//! What befalls the node: ends and restarts, faults of the disk, clock steps, topics deleted and created again.

use std::rc::Rc;
use std::time::Duration;

use narad_shards::api::MetaReply;
use narad_shards::io::sim::{Fault, FaultRates, NthCall, Op};
use narad_shards::meta::Incarnation;
use narad_shards::rt;

use crate::broker::End;
use crate::nemesis_cluster;
use crate::options::Profile;
use crate::world::{tag, Called, TopicHandle, World, NODE};

const MS: Duration = Duration::from_millis(1);

/// Numbers of shards that a node goes through (changing it must be free).
const SIZES: [u16; 5] = [1, 2, 4, 3, 1];

/// Acts until the producers are done, at least once.
pub async fn run(world: &Rc<World>) {
    let mut acted = false;
    let deadline = rt::now() + Duration::from_secs(600);
    if world.options.profile == Profile::Resize {
        resize(world).await;
        acted = true;
    }
    while (world.producing.get() > 0 || !acted) && !world.refused() && rt::now() < deadline {
        world.pause(20 * MS, 1_500 * MS).await;
        match world.draw(8) {
            0 if world.options.churn => delete_and_create(world).await,
            1 if world.options.clock_steps => step_clock(world),
            2 => restart(world, End::Graceful).await,
            _ => {
                acted = true;
                misfortune(world).await;
            }
        }
    }
}

async fn misfortune(world: &Rc<World>) {
    match world.options.profile {
        Profile::Calm => {}
        Profile::Network => network(world).await,
        Profile::Cluster => nemesis_cluster::act(world).await,
        Profile::Kills | Profile::Resize => restart(world, End::Killed).await,
        Profile::PowerCuts => {
            let end = if world.chance(1, 4) { End::Killed } else { End::PowerCut };
            restart(world, end).await;
        }
        Profile::DiskErrors => disk_errors(world).await,
        Profile::FullDisk => full_disk(world).await,
        Profile::Lies => lies(world).await,
        Profile::Rot => rot(world).await,
    }
}

/// Something between two nodes, or what membership makes of a node.
async fn network(world: &Rc<World>) {
    let Some(network) = world.network() else { return };
    let (a, b) = (world.any_node(), world.any_node());
    match world.draw(4) {
        0 => restart(world, End::Killed).await,
        1 => {
            world.fault(&format!("connections between {a} and {b} are reset"));
            network.reset(tag(a), tag(b));
        }
        2 => {
            // Wrongly: the node lives, and whoever reaches it is served.
            world.fault(&format!("node {a} is taken for dead"));
            world.set_alive(a, false);
            world.pause(MS, 6_000 * MS).await;
            world.set_alive(a, true);
        }
        _ => {
            world.fault(&format!("nothing passes between {a} and {b}"));
            network.cut(tag(a), tag(b));
            world.pause(50 * MS, 8_000 * MS).await;
            network.heal(tag(a), tag(b));
            world.note(format!("--- {a} and {b} hear each other again"));
        }
    }
    world.fault_over();
}

async fn resize(world: &Rc<World>) {
    for shards in SIZES {
        world.pause(5 * MS, 400 * MS).await;
        let end = [End::Graceful, End::Killed, End::PowerCut][world.draw(3) as usize];
        restart_as(world, end, shards).await;
        if world.refused() {
            return;
        }
    }
}

/// Ends the process and starts it again, sometimes with another number of shards.
pub async fn restart(world: &Rc<World>, end: End) {
    let shards = if world.chance(1, 3) { world.draw(4) as u16 + 1 } else { world.options.shards };
    restart_as(world, end, shards).await;
}

async fn restart_as(world: &Rc<World>, end: End, shards: u16) {
    let node = world.any_node();
    let disk = &world.disks[node];
    if end != End::Graceful && world.chance(1, 3) {
        // In the middle of whatever the next calls of the disk are.
        disk.freeze_after(world.draw(20));
        world.pause(MS, 30 * MS).await;
        world.stop(node, end).await;
        disk.clear_faults();
    } else {
        world.stop(node, end).await;
    }
    world.pause(Duration::ZERO, 1_000 * MS).await;
    // A crash in the middle of recovery, now and then.
    if end != End::Graceful && world.chance(1, 5) {
        disk.freeze_after(world.draw(30));
        let started = rt::timeout(2_000 * MS, world.start(node, shards)).await;
        // A call that hangs does so until the process has ended, whether or not the start needed it.
        if started != Ok(true) || disk.frozen_at().is_some() {
            world.stop(node, end).await;
            disk.clear_faults();
            world.start(node, shards).await;
        }
        disk.clear_faults();
    } else {
        world.start(node, shards).await;
    }
    world.fault_over();
}

async fn disk_errors(world: &World) {
    world.ledger.borrow_mut().fault(rt::now(), "disk errors");
    if world.chance(1, 2) {
        let ops =
            [Op::Open, Op::SyncDir, Op::Read, Op::Write, Op::WriteDurable, Op::SyncData, Op::Allocate, Op::Rename];
        let op = ops[world.draw(ops.len() as u64) as usize];
        let fault = match world.draw(4) {
            0 if op.is_write() => Fault::Short,
            1 => Fault::Stall(MS * world.draw(8_000) as u32),
            _ => Fault::Fail,
        };
        world.disk().inject(NthCall::new(op, world.draw(6) + 1, fault).times(world.draw(2) + 1));
    } else {
        let rate = [1_000, 10_000, 50_000][world.draw(3) as usize];
        world.disk().set_rates(FaultRates {
            read_fail: rate,
            write_fail: rate / 2,
            sync_fail: rate,
            directory_fail: rate,
            short: rate / 2,
            stall: rate,
            ..FaultRates::default()
        });
    }
    world.pause(100 * MS, 3_000 * MS).await;
    if world.chance(3, 4) {
        let end = [End::Killed, End::PowerCut, End::Graceful][world.draw(3) as usize];
        world.stop(0, end).await;
        if world.chance(1, 2) {
            world.disk().clear_faults();
        }
        world.start(0, world.options.shards).await;
    }
    world.disk().clear_faults();
    // Not over yet: a log that was poisoned, or a WAL that latched, stays so until the next restart.
}

async fn full_disk(world: &Rc<World>) {
    world.ledger.borrow_mut().fault(rt::now(), "the disk fills up");
    let room = world.draw(64) * 4096;
    world.disk().set_capacity(Some(world.disk().used_bytes() + room));
    world.pause(100 * MS, 3_000 * MS).await;
    if world.chance(1, 3) {
        restart(world, End::Killed).await;
    }
    world.disk().set_capacity(None);
    if world.chance(1, 2) {
        restart(world, End::Graceful).await;
    }
}

async fn lies(world: &Rc<World>) {
    world.ledger.borrow_mut().fault(rt::now(), "the disk lies");
    if world.chance(1, 2) {
        let op = if world.chance(1, 2) { Op::WriteDurable } else { Op::SyncData };
        world.disk().inject(NthCall::new(op, world.draw(10) + 1, Fault::Lie).times(world.draw(3) + 1));
    } else {
        world.disk().set_rates(FaultRates { lie: 300_000, skip: 2_000, ..FaultRates::default() });
    }
    world.pause(50 * MS, 1_500 * MS).await;
    world.disk().clear_faults();
    restart(world, End::PowerCut).await;
}

async fn rot(world: &Rc<World>) {
    world.ledger.borrow_mut().fault(rt::now(), "bits rot");
    let parts = ["", "topics", "ingress", ".log", "consumer", "checkpoint"];
    for _ in 0..=world.draw(3) {
        let part = parts[world.draw(parts.len() as u64) as usize];
        if let Some((path, offset)) = world.disk().rot(part) {
            world.note(format!("--- a bit of {} at {offset}", path.display()));
        }
    }
    if world.chance(2, 3) {
        let end = [End::Killed, End::PowerCut, End::Graceful][world.draw(3) as usize];
        restart(world, end).await;
    }
}

fn step_clock(world: &World) {
    let step = match world.draw(4) {
        0 => -3_600_000,
        1 => 3_600_000,
        _ => world.draw(10_000) as i64 - 5_000,
    };
    world.note(format!("--- wall clock steps by {step} ms"));
    world.sim.step_wall_clock(NODE, step);
}

async fn delete_and_create(world: &World) {
    let Some(topic) = world.any_topic() else { return };
    let Some(incarnation) = topic.incarnation else { return };
    world.ledger.borrow_mut().delete_started(incarnation, rt::now());
    // Whole nodes say now and then that they do not know what has become of it: asked until it is certain.
    while !delete(world, &topic, incarnation).await {
        if !world.options.whole || world.refused() {
            return;
        }
        world.pause(20 * MS, 200 * MS).await;
    }
    world.ledger.borrow_mut().delete_answered(incarnation, rt::now());
    for other in world.topics.borrow_mut().iter_mut().filter(|other| other.name == topic.name) {
        other.incarnation = None;
    }
    world.pause(Duration::ZERO, 200 * MS).await;
    world.create_topic(&topic.name).await;
}

/// Whether it is gone for certain.
async fn delete(world: &World, topic: &TopicHandle, incarnation: Incarnation) -> bool {
    let name = topic.name.clone();
    match world.call(None, move |broker| broker.delete_topic(name, incarnation)).await {
        Called::Answered(MetaReply::Deleted, _) => true,
        // Done by an attempt whose outcome was unknown.
        Called::Answered(MetaReply::NotFound | MetaReply::Changed, _) if world.options.whole => true,
        Called::Answered(other, _) => {
            world.note(format!("delete {}: {other:?}", topic.name));
            false
        }
        Called::Down | Called::Lost => false,
    }
}
