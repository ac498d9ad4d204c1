//! What befalls whole nodes: whoever leads is deposed, a majority is lost, and files of the past come back.

use std::rc::Rc;
use std::time::Duration;

use narad_shards::rt;

use crate::broker::End;
use crate::nemesis;
use crate::whole::{Old, Whole};
use crate::world::{tag, World};

const MS: Duration = Duration::from_millis(1);

pub async fn act(world: &Rc<World>) {
    let (Some(whole), Some(network)) = (world.whole(), world.network()) else { return };
    match world.draw(12) {
        0 => nemesis::restart(world, End::Killed).await,
        1 => nemesis::restart(world, End::PowerCut).await,
        2 => {
            let (a, b) = (world.any_node(), world.any_node());
            world.fault(&format!("connections between {a} and {b} are reset"));
            network.reset(tag(a), tag(b));
        }
        3 => {
            let (a, b) = (world.any_node(), world.any_node());
            world.fault(&format!("nothing passes between {a} and {b}"));
            network.cut(tag(a), tag(b));
            world.pause(50 * MS, 8_000 * MS).await;
            network.heal(tag(a), tag(b));
            world.note(format!("--- {a} and {b} hear each other again"));
        }
        4 => {
            let node = leader_or_any(world, &whole);
            world.fault(&format!("nothing passes between {node} and all others"));
            let others: Vec<usize> = (0..world.options.nodes).filter(|other| *other != node).collect();
            others.iter().for_each(|other| network.cut(tag(node), tag(*other)));
            world.pause(50 * MS, 8_000 * MS).await;
            others.iter().for_each(|other| network.heal(tag(node), tag(*other)));
            world.note(format!("--- {node} is back"));
        }
        5 => {
            let node = leader_or_any(world, &whole);
            let end = [End::Killed, End::PowerCut, End::Graceful][world.draw(3) as usize];
            down(world, &[node], end, 5_000).await;
        }
        6 | 7 => world.stand_still(leader_or_any(world, &whole), 50 * MS, 9_000 * MS).await,
        8 => {
            // A majority, or all of them.
            let spared = world.any_node();
            let all = world.chance(1, 4);
            let nodes: Vec<usize> = (0..world.options.nodes).filter(|node| all || *node != spared).collect();
            let end = if world.chance(1, 2) { End::Killed } else { End::PowerCut };
            down(world, &nodes, end, 6_000).await;
        }
        9 if world.chance(1, 3) => {
            // So long that it is taken for dead.
            let node = world.any_node();
            down(world, &[node], End::Killed, 50_000).await;
        }
        _ => old_files(world, &whole).await,
    }
    world.fault_over();
}

fn leader_or_any(world: &World, whole: &Whole) -> usize {
    whole.leader().filter(|_| world.chance(3, 4)).unwrap_or_else(|| world.any_node())
}

/// Ends nodes at once, and starts them again after a while, beside each other.
async fn down(world: &Rc<World>, nodes: &[usize], end: End, ms_max: u64) {
    for node in nodes {
        world.stop(*node, end).await;
    }
    world.pause(Duration::ZERO, MS * ms_max as u32).await;
    world.start_all(nodes.iter().copied(), 2_000 * MS).await;
}

/// A copy of a node's metadata is made, comes of age, and takes the place of what the node has then.
async fn old_files(world: &Rc<World>, whole: &Whole) {
    let node = world.any_node();
    whole.copy(node);
    world.note(format!("--- the metadata of node {node} is copied"));
    world.pause(500 * MS, 15_000 * MS).await;
    let which = [Old::State, Old::State, Old::Log, Old::All][world.draw(4) as usize];
    if which != Old::State && !whole.can_spare(node) {
        return;
    }
    world.stop(node, if world.chance(1, 2) { End::Killed } else { End::PowerCut }).await;
    if let Some(what) = whole.put_back(node, which) {
        world.fault(&format!("node {node} comes back with {what}"));
        world.ledger.borrow_mut().counts.old_files += 1;
    }
    rt::sleep(MS * world.draw(3_000) as u32).await;
    world.start_all(std::iter::once(node), MS).await;
}
