//! Links on real rings and in simulation: the same code, the same promises.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use super::{mesh, mesh_with, Endpoint, Handler, Links, CONTROL};
use crate::io::Slice;
use crate::meta::{Address, Destination, Incarnation, ShardId};
use crate::peer::{Carrier, CommitBatch, Committed, Lost, Record, Reply, Request, WaiterId};
use crate::rt::ring::{run_shard_thread, Options};
use crate::rt::sim::{self, Sim};
use crate::rt::sync::Notify;
use crate::rt::{self, Queue};

fn commit(partition: u32, body: &[u8]) -> Request {
    Request::Commit(CommitBatch {
        destination: Destination { incarnation: Incarnation(1), partition },
        topic: "orders".into(),
        accepted_under: Some(Incarnation(1)),
        records: vec![Record { body: Slice::copy_from(body), key_bytes: 0 }],
        budget: Duration::from_secs(1),
    })
}

/// Answers a commit with its partition as the offset and the sum of its bytes as the count.
fn summing() -> Handler {
    Rc::new(|_from, request| {
        Box::pin(async move {
            let Request::Commit(batch) = request else { return Reply::Done };
            let count = batch.records.iter().flat_map(|r| r.body.iter()).map(|b| u64::from(*b)).sum();
            if batch.destination.partition % 3 == 0 {
                rt::yield_now().await;
            }
            Reply::Commit(Ok(Committed { base_offset: u64::from(batch.destination.partition), count }))
        })
    })
}

fn committed(answer: Result<Reply, Lost>) -> Committed {
    match answer {
        Ok(Reply::Commit(Ok(committed))) => committed,
        other => panic!("{other:?}"),
    }
}

/// Calls every other end `calls` times, all at once, and checks that each call gets its own answer.
async fn call_everybody(links: Rc<Links>, shards: ShardId, calls: u32) {
    let mut tasks = Vec::new();
    for to in (0..shards).chain([CONTROL]) {
        for i in 0..calls {
            let links = links.clone();
            tasks.push(rt::spawn(Queue::Foreground, async move {
                let answer = links.call(Address::local(to), commit(i, &[i as u8, 1])).await;
                let expected = Committed { base_offset: u64::from(i), count: u64::from(i as u8) + 1 };
                assert_eq!(committed(answer), expected);
            }));
        }
    }
    for task in tasks {
        task.await;
    }
}

#[test]
fn every_call_gets_its_own_answer_in_simulation() {
    for seed in 0..20 {
        let sim = Sim::new(seed);
        sim.run(async {
            let ends: Vec<Rc<Links>> = mesh_with(2, 4).into_iter().map(|end| end.attach(summing())).collect();
            let tasks: Vec<_> =
                ends.iter().map(|links| rt::spawn(Queue::Foreground, call_everybody(links.clone(), 2, 50))).collect();
            for task in tasks {
                task.await;
            }
            assert!(ends.iter().all(|links| links.depth() == (0, 0)));
        });
    }
}

fn on_a_ring<F: std::future::Future<Output = ()> + 'static>(
    end: Endpoint,
    main: impl FnOnce(Rc<Links>) -> F + Send + 'static,
) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        let mut options = Options::new("test");
        options.abort_on_panic = false;
        options.sizes.in_flight_max = 3 * 1024;
        options.sizes.recv_buffers = 8;
        run_shard_thread(options, |_| async move { main(end.attach(summing())).await })
            .expect("the test machine has io_uring");
    })
}

#[test]
fn every_call_gets_its_own_answer_between_threads() {
    let done = std::sync::Arc::new(std::sync::Barrier::new(3));
    let threads: Vec<_> = mesh_with(2, 8)
        .into_iter()
        .map(|end| {
            let done = done.clone();
            on_a_ring(end, move |links| async move {
                call_everybody(links.clone(), 2, 2_000).await;
                // Nobody leaves before everybody has its answers; the others are served meanwhile.
                rt::blocking(move || done.wait()).await;
                drop(links);
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("no end panics");
    }
}

#[test]
fn e28_no_wake_is_lost_between_shards_that_sleep_after_each_message() {
    let mut ends = mesh(1).into_iter();
    let (shard, control) = (ends.next().expect("shard"), ends.next().expect("control"));
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let server = on_a_ring(shard, move |links| async move {
        rt::blocking(move || stopped.recv()).await.expect("told to stop");
        drop(links);
    });
    let client = on_a_ring(control, move |links| async move {
        for i in 0..3_000 {
            let answer = rt::timeout(Duration::from_secs(5), links.call(Address::local(0), commit(i, &[1]))).await;
            committed(answer.expect("a lost wake-up would last for ever"));
        }
        stop.send(()).expect("the server waits");
    });
    client.join().expect("the client does not panic");
    server.join().expect("the server does not panic");
}

#[test]
fn a_peer_that_has_gone_answers_lost() {
    sim::run(5, async {
        let mut ends = mesh(1).into_iter();
        let never: Handler = Rc::new(|_, _| Box::pin(std::future::pending()));
        let shard = ends.next().expect("shard").attach(never);
        let control = ends.next().expect("control").attach(summing());
        let waiting = rt::spawn(Queue::Foreground, control.call(Address::local(0), Request::Metrics));
        rt::sleep(Duration::from_millis(1)).await;
        drop(shard);
        assert_eq!(waiting.await.err(), Some(Lost("shard 0 has stopped".to_owned())));
        let later = control.call(Address::local(0), Request::Metrics).await;
        assert!(later.is_err());
        assert!(control.call(Address::local(7), Request::Metrics).await.is_err(), "no such shard");
    });
}

#[test]
fn a_call_whose_caller_has_gone_runs_to_its_end() {
    sim::run(6, async {
        let begun: Rc<Cell<u32>> = Rc::default();
        let seen = begun.clone();
        let slow: Handler = Rc::new(move |_, _| {
            let seen = seen.clone();
            Box::pin(async move {
                rt::sleep(Duration::from_millis(3)).await;
                seen.set(seen.get() + 1);
                Reply::Done
            })
        });
        let mut ends = mesh(1).into_iter().map(|end| end.attach(slow.clone()));
        let (_shard, control) = (ends.next().expect("shard"), ends.next().expect("control"));
        drop(control.call(Address::local(0), Request::Metrics));
        drop(control.call(Address::CONTROL, Request::Metrics));
        rt::sleep(Duration::from_millis(10)).await;
        assert_eq!(begun.get(), 2);
        assert_eq!(control.depth(), (0, 0));
    });
}

#[test]
fn requests_of_one_sender_begin_in_order_to_others_and_to_itself() {
    for seed in 0..20 {
        sim::run(seed, async {
            let log: Rc<RefCell<Vec<u64>>> = Rc::default();
            let seen = log.clone();
            let parking: Handler = Rc::new(move |_, request| {
                let seen = seen.clone();
                Box::pin(async move {
                    match request {
                        Request::Park { waiter, .. } => {
                            seen.borrow_mut().push(waiter.serial);
                            std::future::pending().await
                        }
                        Request::Unpark { waiter, .. } => seen.borrow_mut().push(waiter.serial),
                        _ => {}
                    }
                    Reply::Done
                })
            });
            let mut ends = mesh_with(1, 4).into_iter().map(|end| end.attach(parking.clone()));
            let (_shard, control) = (ends.next().expect("shard"), ends.next().expect("control"));
            for to in [Address::local(0), Address::CONTROL] {
                for serial in (0..20).step_by(2) {
                    let (waiter, next) = (WaiterId { shard: 9, serial }, WaiterId { shard: 9, serial: serial + 1 });
                    let (incarnation, partition) = (Incarnation(1), None);
                    let take = crate::peer::Take { max: 1, bytes_max: 1 };
                    drop(
                        control.call(to, Request::Park { waiter, incarnation, partition, take, wait: Duration::ZERO }),
                    );
                    control.send(to, Request::Unpark { waiter: next, incarnation, partition });
                }
                rt::sleep(Duration::from_millis(1)).await;
                assert_eq!(log.take(), (0..20).collect::<Vec<_>>());
            }
        });
    }
}

#[test]
fn two_full_rings_never_block_each_other() {
    sim::run(11, async {
        // Each handler calls back before it answers: with tiny rings both directions are full all the time.
        let ends: Rc<RefCell<Vec<Rc<Links>>>> = Rc::default();
        let answered: Rc<Cell<u32>> = Rc::default();
        let all = Notify::new();
        for (me, end) in mesh_with(1, 2).into_iter().enumerate() {
            let ends_again = ends.clone();
            let handler: Handler = Rc::new(move |from, request| {
                let ends = ends_again.clone();
                Box::pin(async move {
                    if matches!(request, Request::Shutdown) {
                        let links = ends.borrow()[me].clone();
                        links.call(from, Request::Metrics).await.expect("the other end lives");
                    }
                    Reply::Done
                })
            });
            ends.borrow_mut().push(end.attach(handler));
        }
        let (a, b) = (ends.borrow()[0].clone(), ends.borrow()[1].clone());
        for _ in 0..200 {
            for (links, to) in [(&a, Address::CONTROL), (&b, Address::local(0))] {
                let (call, answered, all) = (links.call(to, Request::Shutdown), answered.clone(), all.clone());
                rt::spawn(Queue::Foreground, async move {
                    call.await.expect("the other end lives");
                    answered.set(answered.get() + 1);
                    all.notify_one();
                });
            }
        }
        while answered.get() < 400 {
            all.notified().await;
        }
        ends.borrow_mut().clear();
    });
}
