//! Producers and consumers, well-behaved and otherwise, and a watcher of statistics.

use std::rc::Rc;
use std::time::Duration;

use narad_shards::api::{Delivery, ProduceError, ReadAt, Settle, SettleMode, SettleStatus};
use narad_shards::peer::Take;
use narad_shards::rt;

use crate::broker::Broker;
use crate::ledger::{CopyId, Outcome, Rule};
use crate::message::Content;
use crate::world::{Called, World};

const MS: Duration = Duration::from_millis(1);

pub async fn produce(world: &World, _index: usize) {
    let mut left = world.options.produces / world.options.producers as u64 + 1;
    let hurried = world.chance(1, 2);
    while left > 0 && !world.refused() {
        let Some(topic) = world.any_topic() else {
            world.pause(MS, 20 * MS).await;
            continue;
        };
        left -= 1;
        let batch = world.chance(1, 4);
        let count = if batch { world.draw(world.options.batch_records) + 1 } else { 1 };
        let records: Vec<Content> = (0..count)
            .map(|_| {
                let number = world.next_number();
                Content::draw(number, world.options.partitions, &mut world.rng.borrow_mut())
            })
            .collect();
        let patience = (world.options.impatient && world.chance(1, 10)).then(|| MS * world.draw(4) as u32);
        let node = world.any_node();
        world.ledger.borrow_mut().produce_started(node, &topic.name, &records, rt::now(), rt::wall_clock_ms());
        let (shard, name, sent) = (world.any_shard(), topic.name.clone(), records.clone());
        let called = world.call_on(node, patience, move |broker| broker.produce(shard, name, sent, batch)).await;
        let (outcome, detail) = match called {
            Called::Down => (Outcome::Refused, "no process".to_owned()),
            Called::Lost => (Outcome::Unknown, "no answer".to_owned()),
            Called::Answered(Ok(()), _) => (Outcome::Accepted, String::new()),
            Called::Answered(Err(error @ ProduceError::LogFailed(_)), _) => (Outcome::Unknown, format!("{error:?}")),
            Called::Answered(Err(error), _) => (Outcome::Refused, format!("{error:?}")),
        };
        world.ledger.borrow_mut().produce_answered(&records, rt::now(), outcome, &detail);
        match outcome {
            Outcome::Accepted if hurried && !world.options.whole => rt::yield_now().await,
            Outcome::Accepted => world.pause(Duration::ZERO, world.options.pace).await,
            _ => world.pause(10 * MS, 200 * MS).await,
        }
    }
    world.producing.set(world.producing.get() - 1);
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Habit {
    /// Acks at once.
    Quick,
    /// Acks after up to two visibility timeouts: often too late.
    Slow,
    /// Extends once or twice before it acks.
    Extends,
    /// Gives half of them back.
    Nacks,
    /// Forgets half of them.
    Forgets,
}

pub async fn consume(world: &World, index: usize) {
    let habit = match index {
        0 => Habit::Quick,
        _ => [Habit::Quick, Habit::Slow, Habit::Extends, Habit::Nacks, Habit::Forgets][world.draw(5) as usize],
    };
    let pinned = world.chance(1, 4).then(|| world.draw(u64::from(world.options.partitions)) as u32);
    let batch = world.chance(1, 3);
    while !world.stopping.get() && !world.refused() {
        let drain = world.draining.get();
        let (habit, pinned) = if drain { (Habit::Quick, None) } else { (habit, pinned) };
        let Some(topic) = world.any_topic() else {
            world.pause(MS, 20 * MS).await;
            continue;
        };
        let max = if batch || drain { world.draw(100) as u32 + 1 } else { 1 };
        let wait = match world.draw(3) {
            0 => Duration::ZERO,
            1 => MS * world.draw(200) as u32,
            _ => MS * world.draw(1_000) as u32,
        };
        let patience = (world.options.impatient && !drain && world.chance(1, 10)).then(|| MS * world.draw(300) as u32);
        let asked = rt::now();
        let (shard, take) = (world.any_shard(), Take { max, bytes_max: 4 << 20 });
        let node = world.any_node();
        let consume = move |broker: Rc<dyn Broker>| broker.consume(shard, topic.name, pinned, take, wait);
        let called = world.call_on(node, patience, consume).await;
        match called {
            Called::Down | Called::Lost => world.pause(10 * MS, 100 * MS).await,
            Called::Answered(Err(error), _) => {
                world.note(format!("consumer {index}: {error:?}"));
                world.pause(10 * MS, 100 * MS).await;
            }
            Called::Answered(Ok(deliveries), boots) => {
                let told = rt::now();
                if deliveries.len() > max as usize {
                    world.violate(Rule::Memory, format!("{} records for a max of {max}", deliveries.len()));
                }
                for delivery in &deliveries {
                    world.ledger.borrow_mut().delivered((index, node), delivery, &boots, asked, told);
                }
                work(world, habit, deliveries).await;
            }
        }
        if wait.is_zero() {
            world.pause(MS, 20 * MS).await;
        }
    }
}

async fn work(world: &World, habit: Habit, deliveries: Vec<Delivery>) {
    if deliveries.is_empty() {
        return;
    }
    let visibility = world.options.visibility;
    match habit {
        Habit::Quick => {}
        Habit::Slow => world.pause(Duration::ZERO, visibility * 2).await,
        Habit::Extends => {
            for _ in 0..=world.draw(2) {
                world.pause(Duration::ZERO, visibility * 3 / 4).await;
                settle(world, &deliveries, SettleMode::Extend, 0).await;
            }
        }
        Habit::Nacks if world.chance(1, 2) => {
            settle(world, &deliveries, SettleMode::Nack, 0).await;
            return world.pause(MS, 50 * MS).await;
        }
        Habit::Forgets if world.chance(1, 2) => return,
        Habit::Nacks | Habit::Forgets => world.pause(MS, 20 * MS).await,
    }
    if world.chance(1, 40) {
        // A handle that nobody has been given.
        settle(world, &deliveries, SettleMode::Ack, 0x5555).await;
    }
    let together = world.chance(1, 2);
    let groups = if together { vec![&deliveries[..]] } else { deliveries.chunks(1).collect() };
    for group in groups {
        // C97: again until there is an answer that ends it.
        for _ in 0..4 {
            if settle(world, group, SettleMode::Ack, 0).await {
                break;
            }
            world.pause(20 * MS, 200 * MS).await;
        }
    }
    if world.chance(1, 20) {
        settle(world, &deliveries, SettleMode::Ack, 0).await;
    }
}

/// True when every settle got an answer that ends it. `blur` spoils the nonces.
async fn settle(world: &World, deliveries: &[Delivery], mode: SettleMode, blur: u64) -> bool {
    let mut by_topic: Vec<&Delivery> = deliveries.iter().collect();
    let Some(first) = by_topic.first().copied() else { return true };
    by_topic.retain(|delivery| delivery.topic == first.topic && delivery.incarnation == first.incarnation);
    let asked: Vec<(CopyId, Settle)> = by_topic
        .iter()
        .map(|delivery| {
            let (partition, offset, nonce) = (delivery.partition, delivery.offset, delivery.nonce ^ blur);
            ((delivery.incarnation, partition, offset), Settle { partition, offset, nonce, mode })
        })
        .collect();
    let started = rt::now();
    let boots = world.ledger.borrow().boots();
    let before: Vec<_> = asked
        .iter()
        .map(|(id, one)| {
            let known = blur == 0;
            let mut ledger = world.ledger.borrow_mut();
            known.then(|| ledger.settle_started(*id, one.nonce, mode, started))
        })
        .collect();
    let patience = (world.options.impatient && world.chance(1, 20)).then(|| MS * world.draw(3) as u32);
    let (shard, name) = (world.any_shard(), first.topic.to_string());
    let settles: Vec<Settle> = asked.iter().map(|(_, one)| *one).collect();
    let called = world.call(patience, move |broker| broker.settle(shard, name, settles)).await;
    let down = matches!(called, Called::Down);
    let statuses: Vec<Option<SettleStatus>> = match called {
        Called::Answered(statuses, _) if statuses.len() == asked.len() => statuses.into_iter().map(Some).collect(),
        Called::Answered(statuses, _) => {
            world.violate(Rule::Stalled, format!("{} statuses for {} settles", statuses.len(), asked.len()));
            vec![None; asked.len()]
        }
        Called::Down => vec![Some(SettleStatus::OwnerDown); asked.len()],
        Called::Lost => vec![None; asked.len()],
    };
    let now = rt::now();
    let mut ended = true;
    for (((id, one), before), status) in asked.iter().zip(before).zip(statuses) {
        ended &= matches!(status, Some(SettleStatus::Done | SettleStatus::LeaseGone));
        let mut ledger = world.ledger.borrow_mut();
        match before {
            Some(before) => ledger.settle_answered(
                (*id, one.nonce, mode),
                before,
                &boots,
                started,
                (now, rt::wall_clock_ms()),
                status,
            ),
            None if status == Some(SettleStatus::Done) => {
                ledger.violate(now, Rule::LateSettleAccepted, format!("{id:?}: nonce {:x} was made up", one.nonce));
            }
            None => {}
        }
    }
    ended && !down
}

/// Looks at statistics, inner figures and stored records all the time.
pub async fn watch(world: &World) {
    while !world.stopping.get() && !world.refused() {
        world.pause(20 * MS, 300 * MS).await;
        world.look_at_metadata();
        let Some(topic) = world.any_topic() else { continue };
        let name = topic.name.clone();
        if let Called::Answered(Some((told, stats)), boots) = world.call(None, |broker| broker.stats(name)).await {
            let unchanged =
                world.topics.borrow().iter().any(|now| {
                    now.name == topic.name && now.incarnation.is_some() && now.incarnation == topic.incarnation
                });
            let mut ledger = world.ledger.borrow_mut();
            if let Some(incarnation) =
                topic.incarnation.filter(|known| unchanged && *known == told && ledger.boots() == boots)
            {
                ledger.stats(incarnation, &stats, rt::now(), rt::wall_clock_ms());
            }
        }
        if let Called::Answered(probe, boots) = world.call(None, |broker| broker.probe()).await {
            let mut ledger = world.ledger.borrow_mut();
            if ledger.boots() == boots {
                ledger.probed(&probe, rt::now());
            }
        }
        if world.chance(1, 3) {
            replay(world).await;
        }
    }
}

async fn replay(world: &World) {
    let draw = world.draw(u64::MAX);
    let Some((name, id)) = world.ledger.borrow().pick_copy(draw) else { return };
    let (started, shard, node) = (rt::now(), world.any_shard(), world.any_node());
    let (_, partition, offset) = id;
    let known = world.ledger.borrow().is_known(node, id);
    let called = world.call_on(node, None, move |broker| broker.read_at(shard, name, partition, offset)).await;
    let now = rt::now();
    let mut ledger = world.ledger.borrow_mut();
    match called {
        Called::Answered(Ok(ReadAt::Record(delivery)), _) if delivery.incarnation == id.0 => {
            ledger.replayed(node, &delivery, started, now);
        }
        // Deleted and created again meanwhile.
        Called::Answered(Ok(ReadAt::Record(_)), _) => {}
        Called::Answered(Ok(other), boots) if known && ledger.boots() == boots => {
            ledger.unreadable(id, now, rt::wall_clock_ms(), &format!("replay says {other:?}"));
        }
        Called::Answered(..) | Called::Down | Called::Lost => {}
    }
}
