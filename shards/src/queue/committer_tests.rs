use super::*;
use crate::rt::sim::{Rng, Sim};

const LIFE: Incarnation = Incarnation(77);

/// A partition's state, reduced to what the committer sees of it.
#[derive(Default)]
struct Acks {
    frontier: Cell<u64>,
    acked: RefCell<Vec<Range>>,
}

impl PositionSource for Acks {
    fn position(&self, acked: &mut Vec<Range>) -> u64 {
        acked.clone_from(&self.acked.borrow());
        self.frontier.get()
    }
}

struct Bench {
    sim: Sim,
    disk: Disk,
}

impl Bench {
    fn new(seed: u64) -> Bench {
        Bench { sim: Sim::new(seed), disk: Disk::Sim(crate::io::sim::SimDisk::new(seed)) }
    }

    fn committer(&self) -> Rc<Committer> {
        Committer::new(self.disk.clone(), CommitterOptions::default())
    }
}

fn destination(partition: u32) -> Destination {
    Destination { incarnation: LIFE, partition }
}

fn directory(partition: u32) -> PathBuf {
    PathBuf::from(format!("/p{partition:05}"))
}

async fn track(committer: &Rc<Committer>, disk: &Disk, partition: u32) -> (Rc<Acks>, Rc<Tracked>) {
    disk.create_dir(&directory(partition)).await.expect("simulated");
    let acks = Rc::new(Acks::default());
    let source: Rc<dyn PositionSource> = acks.clone();
    let tracked = committer.track(destination(partition), directory(partition), Rc::downgrade(&source), 0);
    (acks, tracked)
}

fn at(frontier: u64) -> Option<Position> {
    Some(Position { frontier, acked: vec![] })
}

async fn stored(committer: &Rc<Committer>, partition: u32) -> Stored {
    committer.load(&directory(partition), LIFE).await.expect("simulated")
}

#[test]
fn d16_an_ack_reaches_the_file_within_a_tick() {
    let bench = Bench::new(1);
    let (committer, disk) = (bench.committer(), bench.disk.clone());
    bench.sim.run(async move {
        let (acks, tracked) = track(&committer, &disk, 0).await;
        acks.frontier.set(4);
        acks.acked.borrow_mut().push(Range { start: 6, end: 9 });
        committer.mark_dirty(&tracked);
        rt::sleep(TICK + Duration::from_millis(10)).await;
        let position = Position { frontier: 4, acked: vec![Range { start: 6, end: 9 }] };
        assert_eq!(stored(&committer, 0).await, Stored { position: Some(position), level: 0 });
    });
}

#[test]
fn lesson_n53_3_nothing_owed_means_no_task_and_no_timer() {
    let bench = Bench::new(2);
    let (committer, disk, sim) = (bench.committer(), bench.disk.clone(), bench.sim.clone());
    bench.sim.run(async move {
        let idle = sim.tasks_alive();
        let (acks, tracked) = track(&committer, &disk, 0).await;
        assert!(committer.is_idle());
        acks.frontier.set(1);
        committer.mark_dirty(&tracked);
        assert_eq!(sim.tasks_alive(), idle + 1);
        rt::sleep(Duration::from_secs(40)).await;
        assert!(committer.is_idle());
        assert_eq!(sim.tasks_alive(), idle);
        assert_eq!(stored(&committer, 0).await, Stored { position: at(1), level: 1 }, "C77: levelled after 30 s");
    });
}

#[test]
fn d17_every_partition_is_synced_within_an_interval_and_a_tick() {
    let bench = Bench::new(3);
    let (committer, disk) = (bench.committer(), bench.disk.clone());
    bench.sim.run(async move {
        let mut all = Vec::new();
        for partition in 0..50 {
            all.push(track(&committer, &disk, partition).await);
        }
        let mut rng = Rng::new(9);
        for _ in 0..200 {
            let (acks, tracked) = &all[rng.below(50) as usize];
            acks.frontier.set(acks.frontier.get() + 1);
            committer.mark_dirty(tracked);
            rt::sleep(Duration::from_millis(rng.below(40))).await;
            let waited = |t: &Tracked| t.unsynced_since.get().map_or(Duration::ZERO, |since| rt::now() - since);
            let longest = all.iter().map(|(_, tracked)| waited(tracked)).max();
            assert!(longest <= Some(Duration::from_millis(1250)), "{longest:?}");
        }
        rt::sleep(Duration::from_millis(1300)).await;
        for (acks, tracked) in &all {
            assert_eq!(tracked.durable_frontier.get(), acks.frontier.get());
        }
    });
}

#[test]
fn d17_what_a_killed_process_left_in_the_page_cache_is_durable_once_the_log_is_open() {
    use crate::io::sim::{SimDisk, Survival};
    let (sim, image) = (Sim::new(12), SimDisk::new(12));
    let disk = Disk::Sim(image.clone());
    sim.run(async move {
        disk.create_dir(&directory(0)).await.expect("simulated");
        disk.sync_dir(Path::new("/")).await.expect("simulated");
        let first = Committer::new(disk.clone(), CommitterOptions::default());
        let (acks, tracked) = track(&first, &disk, 0).await;
        acks.frontier.set(4);
        first.mark_dirty(&tracked);
        while tracked.window_frontier.get() < 4 {
            rt::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(tracked.durable_frontier.get(), 0, "written, and not synced yet");
        image.process_crash();
        // Nobody consumes from the partition in this life: its log is opened, and that is all.
        let second = Committer::new(disk.clone(), CommitterOptions::default());
        let found = second.clamp(&directory(0), LIFE, 100).await.expect("simulated");
        assert_eq!(found.frontier, 4, "nothing to cut back");
        image.power_cut_as(Survival::Nothing);
        let third = Committer::new(disk.clone(), CommitterOptions::default());
        assert_eq!(stored(&third, 0).await.position, at(4));
    });
}

#[test]
fn e1_a_position_file_whose_name_could_not_be_synced_is_named_before_it_counts() {
    use crate::io::sim::{Fault, NthCall, Op, SimDisk, Survival};
    let (sim, image) = (Sim::new(13), SimDisk::new(13));
    let disk = Disk::Sim(image.clone());
    sim.run(async move {
        disk.create_dir(&directory(0)).await.expect("simulated");
        disk.sync_dir(Path::new("/")).await.expect("simulated");
        let committer = Committer::new(disk.clone(), CommitterOptions::default());
        let (acks, tracked) = track(&committer, &disk, 0).await;
        image.inject(NthCall::new(Op::SyncDir, 1, Fault::Fail));
        acks.frontier.set(4);
        committer.mark_dirty(&tracked);
        while tracked.durable_frontier.get() < 4 {
            rt::sleep(Duration::from_millis(1)).await;
        }
        image.power_cut_as(Survival::Nothing);
        let second = Committer::new(disk.clone(), CommitterOptions::default());
        assert_eq!(stored(&second, 0).await.position, at(4));
    });
}

#[test]
fn d18_c79_close_makes_both_files_exact() {
    let bench = Bench::new(4);
    let (committer, disk) = (bench.committer(), bench.disk.clone());
    bench.sim.run(async move {
        let (acks, tracked) = track(&committer, &disk, 0).await;
        let (_untouched, _) = track(&committer, &disk, 1).await;
        for frontier in 1..30 {
            acks.frontier.set(frontier);
            committer.mark_dirty(&tracked);
            rt::sleep(Duration::from_millis(37)).await;
        }
        acks.frontier.set(30);
        committer.mark_dirty(&tracked);
        committer.close_all().await.expect("simulated");
        assert_eq!(stored(&committer, 0).await, Stored { position: at(30), level: 30 });
        assert_eq!(stored(&committer, 1).await, Stored::default(), "nothing acked, nothing written");
        rt::sleep(Duration::from_secs(60)).await;
        assert!(committer.is_idle());
    });
}

#[test]
fn c79_a_position_loaded_but_not_moved_is_levelled_at_close() {
    let bench = Bench::new(5);
    let (first, second, disk) = (bench.committer(), bench.committer(), bench.disk.clone());
    bench.sim.run(async move {
        let (acks, tracked) = track(&first, &disk, 0).await;
        acks.frontier.set(3);
        first.mark_dirty(&tracked);
        rt::sleep(Duration::from_millis(150)).await;
        // The process is killed here: `consumer.offset` never came into being.
        drop(acks);
        let (acks, _) = track(&second, &disk, 0).await;
        acks.frontier.set(3);
        second.close_all().await.expect("simulated");
        assert_eq!(stored(&second, 0).await, Stored { position: at(3), level: 3 });
    });
}

#[test]
fn lesson_n30_neither_file_ever_moves_backwards() {
    let bench = Bench::new(6);
    let (committer, disk) = (bench.committer(), bench.disk.clone());
    bench.sim.run(async move {
        let (acks, tracked) = track(&committer, &disk, 0).await;
        let (mut seen, mut level) = (0, 0);
        for step in 1..400 {
            acks.frontier.set(step);
            committer.mark_dirty(&tracked);
            rt::sleep(Duration::from_millis(step % 7 * 60)).await;
            let now = stored(&committer, 0).await;
            let frontier = now.position.map_or(0, |p| p.frontier);
            assert!(frontier >= seen && frontier <= step && now.level >= level, "step {step}");
            (seen, level) = (frontier, now.level);
        }
        assert!(level > 0, "levelled on the way");
    });
}

#[test]
fn n14_2_c80_a_forgotten_partition_is_never_written_again() {
    for seed in 0..20 {
        let bench = Bench::new(seed);
        let (committer, disk) = (bench.committer(), bench.disk.clone());
        bench.sim.run(async move {
            let (acks, tracked) = track(&committer, &disk, 0).await;
            acks.frontier.set(9);
            committer.mark_dirty(&tracked);
            rt::sleep(TICK + Duration::from_micros(seed * 60)).await;
            committer.forget(destination(0));
            committer.forgotten(LIFE).await;
            disk.remove_dir_all(&directory(0)).await.expect("simulated");
            // The topic is created again under its old name and directory.
            let (successor, _) = track(&committer, &disk, 0).await;
            acks.frontier.set(12);
            committer.mark_dirty(&tracked);
            rt::sleep(Duration::from_secs(35)).await;
            assert_eq!(stored(&committer, 0).await, Stored::default(), "seed {seed}");
            drop(successor);
        });
    }
}

#[test]
fn c81_a_vanished_directory_strands_its_partition_alone() {
    let bench = Bench::new(8);
    let (committer, disk) = (bench.committer(), bench.disk.clone());
    bench.sim.run(async move {
        let (gone, gone_tracked) = track(&committer, &disk, 0).await;
        let (kept, kept_tracked) = track(&committer, &disk, 1).await;
        disk.remove_dir_all(&directory(0)).await.expect("simulated");
        gone.frontier.set(5);
        kept.frontier.set(6);
        committer.mark_dirty(&gone_tracked);
        committer.mark_dirty(&kept_tracked);
        rt::sleep(Duration::from_secs(40)).await;
        assert!(committer.is_idle(), "nothing is retried for the stranded one");
        assert_eq!(stored(&committer, 1).await.position, at(6));
        assert!(gone_tracked.stranded.get());
    });
}

#[test]
fn c82_more_partitions_than_handles_are_all_written() {
    let bench = Bench::new(9);
    let disk = bench.disk.clone();
    let options = CommitterOptions { handles_max: 3, ..CommitterOptions::default() };
    let committer = Committer::new(disk.clone(), options);
    bench.sim.run(async move {
        let mut all = Vec::new();
        for partition in 0..12 {
            all.push(track(&committer, &disk, partition).await);
        }
        for round in 1..20 {
            for (acks, tracked) in &all {
                acks.frontier.set(round);
                committer.mark_dirty(tracked);
            }
            rt::sleep(Duration::from_millis(150)).await;
            assert!(committer.handles.borrow().len() <= 3);
        }
        rt::sleep(Duration::from_secs(2)).await;
        for (partition, (_, tracked)) in (0..).zip(&all) {
            assert_eq!(stored(&committer, partition).await.position, at(19));
            assert_eq!(tracked.durable_frontier.get(), 19);
        }
    });
}

/// Acks that put something else into every sector of a slot each time, so that a torn one shows.
fn spread(frontier: u64) -> Vec<Range> {
    let start = |sector: u64| frontier + 2 + sector * 4_096 + frontier % 64 * 3;
    (0..7).map(|sector| Range { start: start(sector), end: start(sector) + 2 }).collect()
}

/// What the living process shows to the test.
type Shared = Rc<RefCell<Option<(Rc<Acks>, Rc<Tracked>)>>>;

#[test]
fn c72_d17_d19_power_cuts_between_failing_writes_and_failing_and_slow_syncs_never_lose_what_was_durable() {
    use crate::io::sim::{Fault, NthCall, Op, SimDisk};
    for seed in 0..150 {
        let (sim, image) = (Sim::new(seed), SimDisk::new(seed));
        let (handle, disk) = (sim.clone(), Disk::Sim(image.clone()));
        sim.run(async move {
            let mut rng = Rng::new(seed);
            disk.create_dir(&directory(0)).await.expect("simulated");
            disk.sync_dir(Path::new("/")).await.expect("simulated");
            let mut at_least = 0;
            for life in 1..5 {
                // Each life is a process of its own; the last sync before a crash may be slow or fail.
                let shared: Shared = Rc::default();
                let (disk, node_shared, mut node_rng) = (disk.clone(), shared.clone(), rng.fork());
                handle.spawn_on(life, async move {
                    let committer = Committer::new(disk.clone(), CommitterOptions::default());
                    let found = stored(&committer, 0).await.position.map_or(0, |p| p.frontier);
                    assert!(found >= at_least, "seed {seed} life {life}: {found} was found, {at_least} was durable");
                    let acks = Rc::new(Acks::default());
                    let source: Rc<dyn PositionSource> = acks.clone();
                    let tracked = committer.track(destination(0), directory(0), Rc::downgrade(&source), 0);
                    acks.frontier.set(found);
                    *node_shared.borrow_mut() = Some((acks.clone(), tracked.clone()));
                    loop {
                        acks.frontier.set(acks.frontier.get() + 1);
                        *acks.acked.borrow_mut() = spread(acks.frontier.get());
                        committer.mark_dirty(&tracked);
                        rt::sleep(Duration::from_millis(node_rng.below(250))).await;
                    }
                });
                match rng.below(4) {
                    0 => image.inject(NthCall::new(Op::SyncData, rng.range(1, 5), Fault::Fail)),
                    3 => image.inject(NthCall::new(Op::Write, rng.range(2, 20), Fault::Fail)),
                    1 => image.inject(NthCall::new(
                        Op::SyncData,
                        rng.range(1, 5),
                        Fault::Stall(Duration::from_millis(rng.below(900))),
                    )),
                    _ => {}
                }
                rt::sleep(Duration::from_millis(rng.below(5_000))).await;
                let last = shared.borrow().as_ref().map(|(acks, t)| (t.durable_frontier.get(), acks.frontier.get()));
                handle.kill(life);
                match rng.chance(1, 3) {
                    true => image.process_crash(),
                    false => image.power_cut(),
                }
                image.clear_faults();
                let (durable, acked) = last.unwrap_or((0, u64::MAX));
                at_least = durable.max(at_least);
                let after = Committer::new(Disk::Sim(image.clone()), CommitterOptions::default());
                let found = stored(&after, 0).await.position.map_or(0, |p| p.frontier);
                assert!(found >= at_least && found <= acked, "seed {seed}: {at_least} <= {found} <= {acked}");
            }
        });
    }
}

/// Two partitions that have both been written and synced once.
async fn two_settled(committer: &Rc<Committer>, disk: &Disk) -> [(Rc<Acks>, Rc<Tracked>); 2] {
    let both = [track(committer, disk, 0).await, track(committer, disk, 1).await];
    for (acks, tracked) in &both {
        acks.frontier.set(1);
        committer.mark_dirty(tracked);
    }
    rt::sleep(Duration::from_millis(1500)).await;
    both.iter().for_each(|(_, tracked)| assert_eq!(tracked.durable_frontier.get(), 1));
    both
}

#[test]
fn d16_a_slow_sync_keeps_only_its_own_partition_out_of_the_page_cache_and_only_until_it_ends() {
    use crate::io::sim::{Fault, NthCall, Op, SimDisk};
    let (sim, image) = (Sim::new(21), SimDisk::new(21));
    let disk = Disk::Sim(image.clone());
    sim.run(async move {
        let committer = Committer::new(disk.clone(), CommitterOptions::default());
        let [slow, other] = two_settled(&committer, &disk).await;
        const STALL: Duration = Duration::from_secs(3);
        image.inject(NthCall::new(Op::SyncData, 1, Fault::Stall(STALL)).on("p00000"));
        slow.0.frontier.set(2);
        committer.mark_dirty(&slow.1);
        while !slow.1.busy.get() || slow.1.window_frontier.get() < 2 {
            rt::sleep(Duration::from_millis(1)).await;
        }
        let stalled = rt::now();
        for frontier in 3..20 {
            for (acks, tracked) in [&slow, &other] {
                acks.frontier.set(frontier);
                committer.mark_dirty(tracked);
            }
            rt::sleep(TICK + Duration::from_millis(10)).await;
            assert_eq!(stored(&committer, 1).await.position, at(frontier), "the other one is written each tick");
            assert_eq!(stored(&committer, 0).await.position, at(2), "the slot under sync does not change");
        }
        let waited = committer.oldest_unwritten();
        assert!(waited > 10 * TICK && waited <= rt::now() - stalled, "{waited:?}");
        while slow.1.busy.get() {
            rt::sleep(Duration::from_micros(100)).await;
        }
        rt::sleep(Duration::from_millis(5)).await;
        assert_eq!(stored(&committer, 0).await.position, at(19), "written at once, not at the next tick");
        assert_eq!(committer.oldest_unwritten(), Duration::ZERO);
    });
}

#[test]
fn d16_the_first_sync_of_a_new_partition_delays_nobody_else() {
    use crate::io::sim::{Fault, NthCall, Op, SimDisk};
    let (sim, image) = (Sim::new(22), SimDisk::new(22));
    let disk = Disk::Sim(image.clone());
    sim.run(async move {
        let committer = Committer::new(disk.clone(), CommitterOptions::default());
        let [other, _] = two_settled(&committer, &disk).await;
        let fresh = track(&committer, &disk, 2).await;
        image.inject(NthCall::new(Op::SyncData, 1, Fault::Stall(Duration::from_secs(2))).on("p00002"));
        for (acks, tracked) in [&fresh, &other] {
            acks.frontier.set(7);
            committer.mark_dirty(tracked);
        }
        rt::sleep(TICK + Duration::from_millis(10)).await;
        assert_eq!(stored(&committer, 0).await.position, at(7));
        assert_eq!(stored(&committer, 2).await.position, None, "its first sync is still under way (C76)");
        rt::sleep(Duration::from_secs(2)).await;
        assert_eq!(stored(&committer, 2).await.position, at(7));
    });
}

#[test]
fn d18_each_position_that_a_stop_could_not_store_is_a_line_of_its_own() {
    use crate::io::sim::{Fault, NthCall, Op, SimDisk};
    let (sim, image) = (Sim::new(24), SimDisk::new(24));
    let disk = Disk::Sim(image.clone());
    sim.run(async move {
        let committer = Committer::new(disk.clone(), CommitterOptions::default());
        let settled = two_settled(&committer, &disk).await;
        for (acks, tracked) in &settled {
            acks.frontier.set(5);
            committer.mark_dirty(tracked);
        }
        let mut broken = NthCall::new(Op::Write, 1, Fault::NoSpace);
        broken.times = u64::MAX;
        image.inject(broken);
        let (lines, _guard) = crate::log_lines::LogLines::of_this_thread();
        let failed = committer.close_all().await.expect_err("nothing can be written");
        assert_eq!(failed.positions, 2);
        for (_, tracked) in &settled {
            let dir = tracked.directory.display().to_string();
            assert!(lines.any_with(&["ERROR", "consumer position", &dir, "No space left"]), "{dir}");
        }
    });
}

#[test]
fn c80_a_position_whose_write_failed_is_not_let_go_until_it_is_on_disk() {
    use crate::io::sim::{Fault, NthCall, Op, SimDisk};
    for op in [Op::Write, Op::SyncData, Op::WriteDurable] {
        let (sim, image) = (Sim::new(23), SimDisk::new(23));
        let disk = Disk::Sim(image.clone());
        sim.run(async move {
            let committer = Committer::new(disk.clone(), CommitterOptions::default());
            let [(acks, tracked), _] = two_settled(&committer, &disk).await;
            committer.level(destination(0)).await.expect("simulated");
            let fault = if op == Op::SyncData { Fault::Fail } else { Fault::NoSpace };
            image.inject(NthCall::new(op, 1, fault).on("p00000"));
            acks.frontier.set(5);
            committer.mark_dirty(&tracked);
            assert!(committer.level(destination(0)).await.is_err(), "{op:?}");
            assert!(!committer.forget_exact(destination(0)), "{op:?}: it is not on disk");
            rt::sleep(3 * TICK).await;
            assert_eq!(stored(&committer, 0).await.position, at(5), "{op:?}: written by a later tick");
            committer.level(destination(0)).await.expect("simulated");
            assert!(committer.forget_exact(destination(0)));
            assert_eq!(stored(&committer, 0).await, Stored { position: at(5), level: 5 });
        });
    }
}
