//! What the queues of a runtime owe each other. Counts are compared, no times.

use std::cell::Cell;
use std::rc::Rc;

use super::ring_os::cut_to;
use super::ring_tests::run;
use super::sim;
use super::sync::Notify;
use crate::rt::{self, Queue};

const ANSWERS: u64 = 100;

/// Polls of others that go by while a task that began in `from` and went to `to` waits, [`ANSWERS`] times, for what it
/// has queued to be submitted.
fn polls_until_submitted(from: Queue, to: Queue) -> u64 {
    run(move |_| async move {
        let (polls, waited) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(None)));
        for _ in 0..8 {
            let (polls, waited) = (polls.clone(), waited.clone());
            rt::spawn(Queue::Foreground, async move {
                while waited.get().is_none() {
                    polls.set(polls.get() + 1);
                    rt::yield_now().await;
                }
            });
        }
        let queue = Rc::new(Cell::new(from));
        let (moves, sum) = (queue.clone(), waited.clone());
        let answers = async move {
            moves.set(to);
            rt::yield_now().await;
            let mut passed = 0;
            for _ in 0..ANSWERS {
                let before = polls.get();
                rt::submitted().await;
                passed += polls.get() - before;
            }
            sum.set(Some(passed));
        };
        rt::spawn_following(queue, Box::pin(answers));
        loop {
            match waited.get() {
                Some(passed) => return passed,
                None => rt::yield_now().await,
            }
        }
    })
}

#[test]
fn consumers_are_answered_before_produce_has_its_next_slice() {
    let consume = polls_until_submitted(Queue::Foreground, Queue::Consume);
    let produce = polls_until_submitted(Queue::Consume, Queue::Foreground);
    assert!(produce > 10 * ANSWERS, "the others are not busy enough for this test: {produce} polls");
    assert!(
        consume * 2 < produce,
        "{consume} polls of others while answers to consumers waited, {produce} for those to producers"
    );
}

/// A task that goes from queue to queue, and is woken by another at every point of it: no wake is lost on the way.
async fn wanders() {
    const STEPS: u32 = 300;
    let (queue, bell, at) = (Rc::new(Cell::new(Queue::Foreground)), Rc::new(Notify::new()), Rc::new(Cell::new(0)));
    let wanderer = {
        let (queue, bell, at) = (queue.clone(), bell.clone(), at.clone());
        async move {
            for step in 0..STEPS {
                queue.set([Queue::Foreground, Queue::Consume, Queue::Background][step as usize % 3]);
                if step % 4 == 0 {
                    rt::yield_now().await;
                }
                bell.notified().await;
                at.set(step + 1);
            }
        }
    };
    rt::spawn_following(queue, Box::pin(wanderer));
    let mut turn = 0_u32;
    while at.get() < STEPS {
        let before = at.get();
        for _ in 0..turn % 5 {
            rt::yield_now().await; // it is woken while it moves, while it waits, and before
        }
        bell.notify_one();
        while at.get() == before {
            rt::yield_now().await;
        }
        turn += 1;
    }
}

#[test]
fn a_task_that_changes_its_queue_loses_no_wake() {
    run(|_| wanders());
    for seed in 0..20 {
        sim::run(seed, wanders());
    }
}

/// Polls of one task in `queue` beside 200 in the foreground that are always runnable, for each poll of one of those.
fn polls_beside_a_flood(queue: Queue) -> f64 {
    const FLOOD: u64 = 200;
    const POLLS: u64 = 200_000;
    run(move |_| async move {
        let (flood, own) = (Rc::new(Cell::new(0_u64)), Rc::new(Cell::new(0_u64)));
        for _ in 0..FLOOD {
            let flood = flood.clone();
            rt::spawn(Queue::Foreground, async move {
                while flood.get() < POLLS {
                    flood.set(flood.get() + 1);
                    rt::yield_now().await;
                }
            });
        }
        let (others, mine) = (flood.clone(), own.clone());
        rt::spawn(queue, async move {
            while others.get() < POLLS {
                mine.set(mine.get() + 1);
                rt::yield_now().await;
            }
        })
        .await;
        own.get() as f64 * FLOOD as f64 / flood.get() as f64
    })
}

#[test]
fn commits_and_consumers_have_a_share_that_a_flood_of_connections_does_not_shrink() {
    let among = polls_beside_a_flood(Queue::Foreground);
    assert!(among < 5.0, "one among the flood has its turn with the others: {among} polls for each of theirs");
    for queue in [Queue::Commit, Queue::Consume] {
        let beside = polls_beside_a_flood(queue);
        assert!(beside > 20.0, "{queue:?}: {beside} polls for each of the flood's tasks, about 1 without a share");
    }
}

#[test]
fn a_flood_of_commits_and_consumers_leaves_connections_their_share() {
    const POLLS: u64 = 100_000;
    let polled = run(|_| async {
        let (flood, own) = (Rc::new(Cell::new(0_u64)), Rc::new(Cell::new(0_u64)));
        for number in 0..200 {
            let flood = flood.clone();
            rt::spawn([Queue::Commit, Queue::Consume][number % 2], async move {
                while flood.get() < POLLS {
                    flood.set(flood.get() + 1);
                    rt::yield_now().await;
                }
            });
        }
        let (others, mine) = (flood.clone(), own.clone());
        rt::spawn(Queue::Foreground, async move {
            while others.get() < POLLS {
                mine.set(mine.get() + 1);
                rt::yield_now().await;
            }
        })
        .await;
        own.get()
    });
    assert!(polled * 40 > POLLS, "{polled} polls beside {POLLS} of commits and consumers");
}

#[test]
fn lesson_p2_blocking_work_keeps_to_the_cpus_it_was_given_as_far_as_they_are_allowed() {
    let set = |cpus: &[usize]| {
        // SAFETY: zeroed is the empty set, and the CPUs here are inside it.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            cpus.iter().for_each(|cpu| libc::CPU_SET(*cpu, &mut set));
            set
        }
    };
    for (given, kept) in [
        (&[][..], &[1, 2, 3][..]),
        (&[2][..], &[2][..]),
        (&[0, 3, 9][..], &[3][..]),
        (&[7][..], &[1, 2, 3][..]),
        (&[usize::MAX, 1][..], &[1][..]),
    ] {
        // SAFETY: compares two valid sets.
        let same = unsafe { libc::CPU_EQUAL(&cut_to(&set(&[1, 2, 3]), given), &set(kept)) };
        assert!(same, "{given:?} should leave {kept:?}");
    }
}
