//! What a node does without asking any other.

use super::world::{run, text, MS, SECOND};
use crate::rt;

#[test]
fn k1_k2_a_produce_is_answered_and_local_records_are_served_with_every_other_node_out_of_reach() {
    run(21, 3, 2, &[1, 2, 3], |world, nodes| async move {
        // Before any connection exists: not one reply can come from anywhere.
        for (a, b) in [(1, 2), (1, 3), (2, 3)] {
            world.network.cut(a, b);
        }
        for partition in 0..3 {
            let started = rt::now();
            world.produce(&nodes[0], 1, partition, "kept here").await;
            assert!(rt::now() - started < 20 * MS, "as long as the sync of its own log: {:?}", rt::now() - started);
        }
        let delivery = world.consume(&nodes[0], 0, Some(0), SECOND).await.expect("owned here");
        assert_eq!(text(&delivery), "kept here");
    });
}
