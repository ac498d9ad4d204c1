//! The engine against a server that misbehaves.

mod fake_server;

use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

use super::narad::{Budget, Client, Consume, Produce, Wire};
use super::payload::Payloads;
use super::target::Target;
use super::threads::{drive, Drive, Edge};
use super::{Group, Pace, Tally, Timing, Until};
use crate::run::Failure;
use fake_server::{FakeServer, Reaction, ACCEPTED};

const MS: fn(u64) -> Duration = Duration::from_millis;

fn produce(messages: u64, batch: u32) -> Produce {
    let (payloads, budget) = (Arc::new(Payloads::new(1, 100)), Budget::new(Some(messages)));
    Produce { payloads, batch, keys: 0, budget, ledger: None, ahead_max: 0 }
}

fn group(server: &FakeServer, connections: u16, what: &Produce) -> Group<Client> {
    let target = Target::of(server.address, &Default::default()).unwrap();
    let wire = Wire::new(&target, "t");
    Group {
        name: "produce".into(),
        addresses: target.addresses,
        protocols: (0..connections).map(|number| Client::producer(&wire, what.clone(), number)).collect(),
        pace: Pace::Closed,
        until: Until::End,
    }
}

fn options(timing: Timing, threads: usize) -> Drive {
    Drive { timing, threads, apart: false, cpus: None, spin: false, title: "test".into() }
}

fn until_done() -> Timing {
    Timing { warmup: Duration::ZERO, duration: None, grace: Duration::from_secs(20) }
}

fn run(group: Group<Client>, timing: Timing) -> Tally {
    drive(&options(timing, 1), vec![group], &mut |_| Ok(())).unwrap().tallies.remove(0)
}

#[test]
fn every_message_is_sent_once_over_all_connections_and_threads() {
    let server = FakeServer::start(|_| Reaction::Say(ACCEPTED.to_vec()));
    let mut edges = Vec::new();
    let what = produce(1000, 1);
    let driven = drive(&options(until_done(), 2), vec![group(&server, 5, &what)], &mut |edge| {
        edges.push(edge);
        Ok(())
    })
    .unwrap();
    let tally = &driven.tallies[0];
    assert_eq!((tally.messages, tally.operations, tally.latency.len()), (1000, 1000, 1000));
    assert_eq!(server.requests.load(Ordering::SeqCst), 1000);
    assert_eq!(server.connections.load(Ordering::SeqCst), 5);
    assert_eq!((driven.protocols.len(), edges), (5, vec![Edge::Start, Edge::End]));
    assert_eq!(tally.troubles(), None);
}

#[test]
fn answers_in_single_bytes_and_in_chunks_are_understood() {
    let chunked = b"HTTP/1.1 202 Accepted\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{\"acc\r\n3\r\n:2}\r\n0\r\n\r\n";
    let server = FakeServer::start(move |number| match number % 2 {
        0 => Reaction::Dribble(ACCEPTED.to_vec()),
        _ => Reaction::Dribble(chunked.to_vec()),
    });
    let tally = run(group(&server, 2, &produce(20, 2)), until_done());
    assert_eq!((tally.messages, tally.operations, tally.lost), (20, 10, 0));
}

#[test]
fn refusals_are_counted_by_status_and_the_first_is_quoted() {
    let server = FakeServer::start(|number| {
        let (status, body) =
            [("202 Accepted", ""), ("404 Not Found", "{\"error\":\"topic not found\"}"), ("500 No", "x")][number % 3];
        Reaction::Say(format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes())
    });
    let tally = run(group(&server, 1, &produce(9, 1)), until_done());
    assert_eq!((tally.messages, tally.refused_total()), (3, 6));
    let words = tally.troubles().unwrap();
    assert_eq!(words, "produce: 3 answered 404, 3 answered 500; the first: 404 {\"error\":\"topic not found\"}");
}

#[test]
fn a_503_with_retry_after_pauses_its_connection() {
    let server = FakeServer::start(|number| match number {
        0 => Reaction::Say(b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n".to_vec()),
        _ => Reaction::Say(ACCEPTED.to_vec()),
    });
    let tally = run(group(&server, 1, &produce(2, 1)), until_done());
    assert_eq!((tally.messages, tally.pauses, tally.refused["503"]), (1, 1, 1));
    assert!(tally.last >= 1_000_000_000, "the second message waited as long as it was told");
}

#[test]
fn a_lost_connection_costs_its_operation_and_is_made_again() {
    let server = FakeServer::start(|number| match number {
        1 => Reaction::Cut(ACCEPTED[..20].to_vec()),
        3 => Reaction::Cut(Vec::new()),
        5 => Reaction::Say(b"HTTP/1.1 202 Accepted\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".to_vec()),
        7 => Reaction::Say(b"HELLO\r\n\r\n".to_vec()),
        _ => Reaction::Say(ACCEPTED.to_vec()),
    });
    let tally = run(group(&server, 1, &produce(10, 1)), until_done());
    assert_eq!((tally.messages, tally.lost), (7, 3), "{:?}", tally.first_error);
    assert_eq!(server.connections.load(Ordering::SeqCst), 5);
    assert!(tally.first_error.unwrap().contains("the server closed the connection"));
}

#[test]
fn nobody_there_is_a_sentence() {
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let what = produce(1, 1);
    let target = Target::of(address, &Default::default()).unwrap();
    let nobody = Group {
        name: "produce".into(),
        addresses: target.addresses.clone(),
        protocols: vec![Client::producer(&Wire::new(&target, "t"), what, 0)],
        pace: Pace::Closed,
        until: Until::End,
    };
    let refused = drive(&options(until_done(), 1), vec![nobody], &mut |_| Ok(()));
    let Err(Failure(words)) = refused else { panic!("connected to nobody") };
    assert!(words.contains("Connection refused") && words.contains("is a server listening there?"), "{words}");
}

/// A server that answers at once, except that it does nothing for 300 ms in the middle. One connection, so that all
/// else has to wait.
fn stalling() -> FakeServer {
    FakeServer::start(|number| match number {
        50 => Reaction::Later(MS(300), ACCEPTED.to_vec()),
        _ => Reaction::Say(ACCEPTED.to_vec()),
    })
}

#[test]
fn in_open_loop_a_stall_counts_for_all_that_was_due_meanwhile() {
    let server = stalling();
    let timing = Timing { warmup: Duration::ZERO, duration: Some(MS(500)), grace: Duration::from_secs(20) };
    let open = Group { pace: Pace::Open { interval: 1e6 }, ..group(&server, 1, &produce(1 << 40, 1)) };
    let tally = run(open, timing);
    assert_eq!((tally.operations, tally.unsent), (500, 0), "everything that was due is sent, if late");
    let stalled = tally.latency.count_between(100_000_000, u64::MAX);
    assert!(stalled >= 190, "of 300 operations due in the stall, 200 waited 100 ms or more: {stalled}");
    assert!(tally.latency.value_at_quantile(0.99) >= 250_000_000);
}

#[test]
fn in_closed_loop_a_stall_counts_once() {
    let server = stalling();
    let tally = run(group(&server, 1, &produce(500, 1)), until_done());
    assert_eq!(tally.latency.count_between(290_000_000, u64::MAX), 1);
}

#[test]
fn what_a_dead_server_never_answers_is_counted_and_not_hidden() {
    let server = FakeServer::start(|number| match number {
        0..10 => Reaction::Say(ACCEPTED.to_vec()),
        _ => Reaction::Later(Duration::from_secs(3600), Vec::new()),
    });
    let timing = Timing { warmup: Duration::ZERO, duration: Some(MS(200)), grace: MS(100) };
    let open = Group { pace: Pace::Open { interval: 1e6 }, ..group(&server, 2, &produce(1 << 40, 1)) };
    let tally = run(open, timing);
    assert_eq!((tally.operations, tally.unanswered), (10, 2));
    assert_eq!(tally.unsent, 200 - 10 - 2);
    assert_eq!(tally.latency.len(), 200, "each of them has a latency: what it had waited at the end");
    assert!(tally.latency.value_at_quantile(0.5) >= 150_000_000);
}

#[test]
fn the_warm_up_is_not_counted() {
    let server = FakeServer::start(|_| Reaction::Say(ACCEPTED.to_vec()));
    let timing = Timing { warmup: MS(50), duration: Some(MS(50)), grace: Duration::from_secs(20) };
    let open = Group { pace: Pace::Open { interval: 1e6 }, ..group(&server, 4, &produce(1 << 40, 1)) };
    let tally = run(open, timing);
    assert_eq!(tally.operations, 50);
    assert_eq!(server.requests.load(Ordering::SeqCst), 100);
}

#[test]
fn a_consumer_waits_out_an_empty_topic_and_acks_what_comes() {
    let message = "{\"topic\":\"t\",\"payload\":{\"a\":1},\"receipt_handle\":\"0:1:2\"}\n";
    let server = FakeServer::start(move |number| match number {
        0 => Reaction::Say(b"HTTP/1.1 204 No Content\r\n\r\n".to_vec()),
        1 => {
            Reaction::Say(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{message}", message.len()).into_bytes())
        }
        _ => Reaction::Say(b"HTTP/1.1 204 No Content\r\n\r\n".to_vec()),
    });
    let target = Target::of(server.address, &Default::default()).unwrap();
    let how = Consume { batch: 1, wait: MS(10), ack: true, budget: Budget::new(Some(1)), verify: None };
    let consumers = Group {
        name: "consume".into(),
        addresses: target.addresses.clone(),
        protocols: vec![Client::consumer(&Wire::new(&target, "t"), how)],
        pace: Pace::Closed,
        until: Until::End,
    };
    let driven = drive(&options(until_done(), 1), vec![consumers], &mut |_| Ok(())).unwrap();
    let tally = &driven.tallies[0];
    assert_eq!((tally.messages, tally.empty, server.requests.load(Ordering::SeqCst)), (1, 1, 3));
    assert_eq!(Client::consumed(&driven.protocols).ack.len(), 1);
}
