//! Seeded histories of many consumers over several shards, judged by what clients see.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use super::world::*;
use crate::api::{Delivery, Settle, SettleMode};
use crate::meta::ShardId;
use crate::rt::{self, sim::Rng, Queue};

/// One client for a while: consumes, settles, leaves, forgets.
async fn client(world: World, auditor: Rc<Auditor>, mut rng: Rng, shards: u64, requests: u64) {
    for _ in 0..requests {
        let consumer = world.consumer(rng.below(shards) as ShardId);
        let partitions = u64::from(world.partitions());
        let pin = rng.chance(1, 4).then(|| rng.below(partitions) as u32);
        let wait = Duration::from_micros(if rng.chance(1, 4) { 0 } else { rng.below(60_000) });
        let max = if rng.chance(1, 2) { 1 } else { rng.range(1, 6) as u32 };
        let patience = Duration::from_micros(if rng.chance(1, 5) { rng.below(2_000) } else { 1_000_000 });
        let asked = rt::now();
        let Ok(outcome) = rt::timeout(patience, consumer.consume(TOPIC, pin, take(max), wait)).await else {
            continue;
        };
        let deliveries = outcome.expect("nothing fails here");
        assert!(deliveries.len() <= max as usize);
        deliveries.iter().for_each(|delivery| auditor.deliver(delivery, asked));
        for delivery in deliveries {
            if rng.chance(1, 2) {
                rt::sim::jitter(&mut rng, Duration::from_millis(3)).await;
            }
            let consumer = world.consumer(rng.below(shards) as ShardId);
            match rng.below(12) {
                0 => {} // forgotten: it lapses
                1 => settle_one(&consumer, &auditor, &delivery, SettleMode::Nack).await,
                2 => {
                    settle_one(&consumer, &auditor, &delivery, SettleMode::Extend).await;
                    settle_one(&consumer, &auditor, &delivery, SettleMode::Ack).await;
                }
                _ => settle_one(&consumer, &auditor, &delivery, SettleMode::Ack).await,
            }
        }
    }
}

async fn settle_one(consumer: &crate::queue::Consumer, auditor: &Auditor, delivery: &Delivery, mode: SettleMode) {
    let settle: Settle = settle_of(delivery, mode);
    let asked = rt::now();
    auditor.settling(&settle);
    let statuses = consumer.settle(TOPIC, vec![settle]).await.expect("the topic is known");
    auditor.settled(&settle, asked, statuses[0]);
}

async fn producer(world: World, mut rng: Rng, batches: u64, produced: Rc<Cell<u64>>) {
    for _ in 0..batches {
        rt::sim::jitter(&mut rng, Duration::from_millis(8)).await;
        let (partition, count) = (rng.below(u64::from(world.partitions())) as u32, rng.range(1, 5));
        world.produce(partition, count);
        produced.set(produced.get() + count);
        if rng.chance(1, 10) {
            world.close_log(partition);
        }
    }
}

/// No waiter sleeps while a record is there for it (S98, C30, C31), once nothing is under way any more.
async fn nobody_sleeps_beside_a_record(world: &World, auditor: &Auditor, label: &str) {
    loop {
        let delivered = auditor.delivered.get();
        settle_down().await;
        let Some(finding) = sleeping_beside_a_record(world) else { return };
        assert!(auditor.delivered.get() > delivered, "{label}: {finding}");
    }
}

fn sleeping_beside_a_record(world: &World) -> Option<String> {
    let pinned: u64 = (0..world.partitions()).map(|partition| pinned_at(world, partition)).sum();
    let shared = world.parked() - pinned;
    let asleep = |partition: u32| {
        let open = world.owner(partition).open_partition(destination(partition))?;
        let waiting = shared + open.parked() as u64;
        let finding = format!("{waiting} waiters sleep beside a record of partition {partition}");
        (waiting > 0 && open.is_available()).then_some(finding)
    };
    (0..world.partitions()).find_map(asleep)
}

fn pinned_at(world: &World, partition: u32) -> u64 {
    world.owner(partition).open_partition(destination(partition)).map_or(0, |open| open.parked() as u64)
}

fn history(seed: u64) {
    run(seed, async move {
        let mut rng = Rng::new(seed);
        let shards = rng.range(1, 5) as ShardId;
        let world = World::with_topic(seed, shards, rng.range(1, 7) as u32);
        world.set_delay(Duration::from_micros(rng.range(1, 400)));
        for partition in 0..world.partitions() {
            world.log(partition).read_delay.set(Duration::from_micros(rng.below(300)));
        }
        if rng.chance(1, 2) {
            world.alter(rng.range(1, 6), rng.range(1, 6));
        }
        let auditor: Rc<Auditor> = Rc::default();
        let produced: Rc<Cell<u64>> = Rc::default();
        let clients: Vec<_> = (0..rng.range(3, 16))
            .map(|_| {
                let client = client(world.clone(), auditor.clone(), rng.fork(), u64::from(shards), 25);
                rt::spawn(Queue::Foreground, client)
            })
            .collect();
        let producing = producer(world.clone(), rng.fork(), 30, produced.clone());
        rt::spawn(Queue::Foreground, producing).await;
        for client in clients {
            client.await;
        }
        // A wish to leave that overtook its park is repeated after a second.
        rt::sleep(Duration::from_millis(1_100)).await;
        world.check();
        assert_eq!(world.parked(), 0, "seed {seed}: everybody has gone");
        for partition in 0..world.partitions() {
            let (leased, (at_least, at_most)) = (world.leased(partition), auditor.held(partition));
            assert!(leased >= at_least && leased <= at_most, "seed {seed}: {leased} leases, clients hold {at_most}");
        }
        // Everybody waits; every record still to come reaches exactly one of them.
        rt::sleep(VISIBILITY + Duration::from_millis(500)).await;
        (0..world.partitions()).for_each(|p| assert_eq!(world.leased(p), 0, "seed {seed}: a lease leaked"));
        let producing = Rc::new(Cell::new(true));
        let drainers: Vec<_> = (0..6)
            .map(|i| {
                let (world, auditor, produced) = (world.clone(), auditor.clone(), produced.clone());
                let producing = producing.clone();
                rt::spawn(Queue::Foreground, async move {
                    while producing.get() || (auditor.acked() as u64) < produced.get() {
                        let consumer = world.consumer(i % shards);
                        let asked = rt::now();
                        let pin = (i == 5).then(|| world.partitions() - 1);
                        let got = consumer.consume(TOPIC, pin, take(2), Duration::from_secs(1)).await;
                        for delivery in got.expect("nothing fails here") {
                            auditor.deliver(&delivery, asked);
                            settle_one(&consumer, &auditor, &delivery, SettleMode::Ack).await;
                        }
                    }
                })
            })
            .collect();
        for _ in 0..10 {
            rt::sim::jitter(&mut rng, Duration::from_millis(20)).await;
            for _ in 0..rng.range(1, 5) {
                let partition = rng.below(u64::from(world.partitions())) as u32;
                world.produce(partition, 1);
                produced.set(produced.get() + 1);
                rt::sim::jitter(&mut rng, Duration::from_micros(300)).await;
            }
            nobody_sleeps_beside_a_record(&world, &auditor, &format!("seed {seed}")).await;
        }
        producing.set(false);
        let drained = async {
            for drainer in drainers {
                drainer.await;
            }
        };
        let stuck = rt::timeout(Duration::from_secs(60), drained).await;
        let acked = auditor.acked() as u64;
        assert!(stuck.is_ok(), "seed {seed}: {acked} of {} records were acked", produced.get());
        let behind = |p: u32| world.log(p).high_watermark.get() - world.frontier(p);
        assert_eq!((0..world.partitions()).map(behind).sum::<u64>(), 0, "seed {seed}");
        world.check();
    });
}

#[test]
fn d3_d5_s98_c40_every_record_reaches_one_consumer_and_no_waiter_is_forgotten() {
    (0..80).for_each(history);
}
