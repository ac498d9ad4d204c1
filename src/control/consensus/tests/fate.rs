//! What a node says of a change whose leader has gone without a word.

use std::time::Duration;

use narad_shards::rt;
use narad_shards::wire::{status, Kind};

use super::world::{create, run, World};
use super::MS;
use crate::control::consensus::codec;
use crate::control::tests_support::arrived;

/// Entries in the log of a node, those that are compacted away too.
fn last_index(world: &World, tag: u32) -> u64 {
    world.node(tag).plate.lock().unwrap().log.as_ref().unwrap().last()
}

fn image_index(world: &World, tag: u32) -> Option<u64> {
    let node = world.node(tag);
    let plate = node.plate.lock().unwrap();
    plate.image.as_ref().map(|image| image.applied_index())
}

/// The change is committed by a leader that dies without having answered, and comes back in an image.
fn comes_back_in_an_image(seed: u64, silence: Duration) {
    run(seed, 5, move |mut world| async move {
        world.snapshot_entries = 10;
        world.start_all().await;
        let leader = world.wait_leader().await;
        world.settle().await;
        let asker = 1 + leader % 5;
        world.network.reply_silence.set(silence);
        world.network.deaf.set(asker);
        let before = last_index(&world, leader);
        let (answer, answered) = rt::sync::oneshot();
        let asked = world.running(asker).unwrap();
        world.sim.spawn_on(asker, async move {
            let _ = answer.send(asked.consensus.decide(create("x", 4711)).await);
        });
        while last_index(&world, leader) == before {
            rt::sleep(Duration::from_micros(50)).await;
        }
        world.cut(asker, leader);
        rt::sleep(MS(50)).await;
        assert!(world.topics(leader).contains_key("x"), "it is committed");
        world.crash(leader);
        // The next leader goes on until it has nothing left of it but in an image, and nothing that is not in the image.
        let next = world.wait_leader().await;
        let node = world.running(next).unwrap();
        let mut id = 0;
        while id < 20 || image_index(&world, next) != Some(last_index(&world, next)) {
            id += 1;
            node.consensus.decide(create(&format!("t{id}"), id)).await.unwrap();
            if id >= 20 {
                rt::sleep(MS(210)).await;
            }
        }
        drop(node);
        world.network.deaf.set(0);
        let outcome = answered.await.unwrap();
        assert_eq!(world.node(asker).plate.lock().unwrap().installs, 1, "seed {seed}");
        let why = outcome.expect_err("nobody can say what became of it");
        assert!(why.underway, "seed {seed}: it is done, and was said not to be: {}", why.why);
    });
}

#[test]
fn e47_a_change_that_came_back_in_an_image_while_its_call_waited_is_not_called_undone() {
    for seed in 0..5 {
        comes_back_in_an_image(seed, Duration::from_secs(8));
    }
}

#[test]
fn e47_a_change_that_comes_back_in_an_image_after_its_call_is_not_called_undone() {
    for seed in 0..5 {
        comes_back_in_an_image(seed, Duration::ZERO);
    }
}

#[test]
fn e47_a_forwarded_change_is_proposed_in_the_term_that_it_was_for_and_in_no_other() {
    run(1, 3, |world| async move {
        world.start_all().await;
        let leader = world.wait_leader().await;
        let node = world.running(leader).unwrap();
        let term = node.consensus.status().term;
        for (name, asked, expected) in [
            ("of-an-earlier-reign", term - 1, status::MISDIRECTED),
            ("of-another", term + 1, status::MISDIRECTED),
            ("of-this-one", term, status::OK),
        ] {
            let id = node.consensus.new_id();
            let frame = codec::propose_frame(Duration::from_secs(5), asked, id, &create(name, asked).encode());
            let reply = node.consensus.handle(&arrived(&frame, Kind::Request)).await.expect("it is a request");
            assert_eq!(reply.status, expected, "{name}");
            assert_eq!(world.topics(leader).contains_key(name), expected == status::OK);
        }
    });
}
