//! What a restart brings back: nothing after a clean stop, a bounded run of acks after a crash, never a record lost.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use super::world::*;
use crate::api::SettleMode;
use crate::rt::sim::Sim;
use crate::rt::{self, Instant};

const NODE: u32 = 7;

#[derive(Clone, Copy, PartialEq, Debug)]
enum Stop {
    Clean,
    Killed,
    PowerCut,
}

/// Acks records one by one for a while, stops in the given way, and returns the frontier acked in all, the one acked
/// by `window` before the end, and the one found after the restart.
fn restart(seed: u64, stop: Stop, window: Duration) -> (u64, u64, u64) {
    let sim = Sim::new(seed);
    let handle = sim.clone();
    sim.run(async move {
        let world = World::with_topic(seed, 1, 1);
        world.produce(0, 5_000);
        let acks: Rc<std::cell::RefCell<Vec<(Instant, u64)>>> = Rc::default();
        let finished = Rc::new(Cell::new(false));
        let (log, done, node_world) = (acks.clone(), finished.clone(), world.clone());
        handle.spawn_on(NODE, async move {
            let consumer = node_world.consumer(0);
            let stop_at = rt::now() + Duration::from_millis(700 + seed * 131 % 3_000);
            while rt::now() < stop_at {
                let got = consumer.consume(TOPIC, None, take(1), Duration::ZERO).await.expect("served");
                settle(&consumer, &got, SettleMode::Ack).await;
                log.borrow_mut().push((rt::now(), node_world.frontier(0)));
                rt::sleep(Duration::from_millis(3)).await;
            }
            if stop == Stop::Clean {
                node_world.shard(0).shutdown().await.expect("simulated");
            }
            done.set(true);
        });
        while !finished.get() {
            rt::sleep(Duration::from_micros(900)).await;
        }
        let stopped = rt::now();
        handle.kill(NODE);
        match stop {
            Stop::Clean => world.disk_image.power_cut(),
            Stop::Killed => world.disk_image.process_crash(),
            Stop::PowerCut => world.disk_image.power_cut(),
        }
        world.start();
        let again = world.consumer(0).consume(TOPIC, None, take(1), Duration::ZERO).await.expect("served");
        let recovered = world.frontier(0);
        assert_eq!(again[0].offset, recovered);
        let acks = acks.borrow();
        let before = acks.iter().rev().find(|(at, _)| *at + window <= stopped).map_or(0, |(_, frontier)| *frontier);
        (acks.last().map_or(0, |(_, frontier)| *frontier), before, recovered)
    })
}

#[test]
fn d18_a_clean_stop_loses_no_ack_even_if_the_power_goes_right_after() {
    for seed in 0..8 {
        let (acked, _, recovered) = restart(seed, Stop::Clean, Duration::ZERO);
        assert_eq!(recovered, acked, "seed {seed}");
    }
}

#[test]
fn d16_d19_a_kill_brings_back_about_a_tick_of_acks() {
    for seed in 0..25 {
        let (acked, before, recovered) = restart(seed, Stop::Killed, Duration::from_millis(130));
        assert!(recovered <= acked && recovered >= before, "seed {seed}: {before} <= {recovered} <= {acked}");
    }
}

#[test]
fn d17_d19_a_power_cut_brings_back_about_an_interval_of_acks() {
    for seed in 0..25 {
        let (acked, before, recovered) = restart(seed, Stop::PowerCut, Duration::from_millis(1_250));
        assert!(recovered <= acked && recovered >= before, "seed {seed}: {before} <= {recovered} <= {acked}");
    }
}

#[test]
fn g20_d4_a_position_beyond_the_log_does_not_hide_new_records() {
    run(3, async {
        let world = World::with_topic(3, 1, 1);
        world.produce(0, 20);
        let got = world.consumer(0).consume(TOPIC, None, take(20), Duration::ZERO).await.expect("served");
        settle(&world.consumer(0), &got, SettleMode::Ack).await;
        world.shard(0).shutdown().await.expect("simulated");
        // The log's device had lied about the last records, and more than those are written before anybody consumes.
        world.log(0).high_watermark.set(12);
        world.start();
        world.open_logs().await;
        world.produce(0, 13);
        for _ in 0..2 {
            // Also after the next start, which no longer sees how far the log had fallen back.
            world.start();
            world.open_logs().await;
            let got = world.consumer(0).consume(TOPIC, None, take(20), Duration::ZERO).await.expect("served");
            assert_eq!(got.first().map(|delivery| delivery.offset), Some(12));
            assert_eq!(got.len(), 13);
            world.disk_image.power_cut();
        }
    });
}

#[test]
fn n29_acks_above_a_hole_survive_a_restart() {
    run(4, async {
        let world = World::with_topic(4, 1, 1);
        world.produce(0, 8);
        let got = world.consumer(0).consume(TOPIC, None, take(8), Duration::ZERO).await.expect("served");
        settle(&world.consumer(0), &got[2..7], SettleMode::Ack).await;
        world.shard(0).shutdown().await.expect("simulated");
        world.start();
        let again = world.consumer(0).consume(TOPIC, None, take(8), Duration::ZERO).await.expect("served");
        assert_eq!(places(&again), [(0, 0), (0, 1), (0, 7)]);
        let stale = world.consumer(0).settle(TOPIC, vec![settle_of(&got[0], SettleMode::Ack)]).await;
        assert_eq!(stale, Some(vec![crate::api::SettleStatus::LeaseGone]), "C26: old handles are dead");
    });
}
