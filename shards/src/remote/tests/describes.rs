//! A topic's partitions by the word of their owners (http-api 9.2).

use std::rc::Rc;

use super::world::{run, Node, World, MS, SECOND, TOPIC};
use crate::api::OwnerLiveness::{Dead, Unassigned, Unknown, Unreachable};
use crate::api::{OwnerLiveness, PartitionReport};
use crate::rt;

async fn describe(world: &Rc<World>, node: &Node, only: Option<u32>) -> Vec<PartitionReport> {
    let shard = node.shards[0].clone();
    let topic = shard.snapshot().topic(TOPIC).expect("the topic of the world").clone();
    world.on(node, async move { shard.describe(&topic, only).await }).await
}

/// Owner and high watermark, or what is wrong with the owner.
fn shown(reports: &[PartitionReport]) -> Vec<(u32, Option<&str>, Result<u64, OwnerLiveness>)> {
    let of = |report: &PartitionReport| report.stats.as_ref().map(|stats| stats.high_watermark).map_err(|why| *why);
    reports.iter().map(|report| (report.index, report.owner_node.as_deref(), of(report))).collect()
}

#[test]
fn http_api_9_2_every_partition_is_described_by_its_owner_and_one_that_is_silent_hides_no_other() {
    run(31, 4, 2, &[1, 2, 3, 0, 4], |world, nodes| async move {
        let last = |owner, result| (4, owner, result);
        for partition in [0, 1, 2, 4] {
            world.produce(&nodes[0], 0, partition, "x").await;
        }
        rt::sleep(500 * MS).await;
        let (two, three, four) = (Some("node-2"), Some("node-3"), Some("node-4"));
        let fine = [(0, None, Ok(1)), (1, two, Ok(1)), (2, three, Ok(1)), (3, Some(""), Err(Unassigned))];
        let all = describe(&world, &nodes[0], None).await;
        assert_eq!(shown(&all), [&fine[..], &[last(four, Ok(1))]].concat());

        // It hangs: two seconds, and only its own partitions are missing.
        world.network.cut(1, 4);
        let started = rt::now();
        let all = describe(&world, &nodes[0], None).await;
        assert_eq!(shown(&all), [&fine[..], &[last(four, Err(Unreachable))]].concat());
        assert!(rt::now() - started < 2 * SECOND + 50 * MS, "{:?}", rt::now() - started);
        let started = rt::now();
        assert_eq!(shown(&describe(&world, &nodes[0], Some(2)).await), [(2, three, Ok(1))]);
        assert!(rt::now() - started < 100 * MS, "nobody else is waited for");

        world.set_dead(&[4]);
        world.tell_all(&nodes).await;
        let started = rt::now();
        let all = describe(&world, &nodes[0], None).await;
        assert_eq!(shown(&all), [&fine[..], &[last(four, Err(Dead))]].concat());
        assert!(rt::now() - started < 100 * MS, "membership's word is enough");

        world.set_owners(&[1, 2, 3, 0, 9]);
        world.tell_all(&nodes).await;
        let all = describe(&world, &nodes[0], None).await;
        assert_eq!(shown(&all), [&fine[..], &[last(Some(""), Err(Unknown))]].concat());
    });
}

#[test]
fn http_api_9_2_a_shard_that_hangs_hides_its_own_partitions_and_no_others_of_its_node() {
    run(32, 2, 3, &[2; 6], |world, nodes| async move {
        for partition in 0..6 {
            world.produce(&nodes[0], 0, partition, "x").await;
        }
        rt::sleep(500 * MS).await;
        for hangs in 0..3 {
            // One of the three is the one that is asked first.
            *world.stuck.borrow_mut() = [(2, hangs)].into();
            let started = rt::now();
            let all = describe(&world, &nodes[0], None).await;
            let seen: Vec<_> =
                all.iter().map(|report| report.stats.as_ref().is_ok_and(|s| s.high_watermark == 1)).collect();
            // Partition p is on shard 7p + 2 mod 3.
            let expected: Vec<_> = (0..6).map(|partition| (partition + 2) % 3 != hangs).collect();
            assert_eq!(seen, expected, "shard {hangs} hangs");
            assert!(rt::now() - started < 2 * SECOND, "{:?}", rt::now() - started);
        }
    });
}
