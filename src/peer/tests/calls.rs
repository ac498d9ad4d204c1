//! Calls between two endpoints that get along.

use std::cell::Cell;
use std::rc::Rc;

use narad_shards::remote::{CallError, Transport};
use narad_shards::rt::{self, Queue};
use narad_shards::wire::{status, Lane};

use super::*;
use crate::peer::{DATAGRAM_BYTES, DATAGRAM_BYTES_MAX};

#[test]
fn k42_two_endpoints_that_know_the_secret_exchange_calls() {
    run(|handle| async move {
        let (one, other) = (Counting::new("one", 11), Counting::new("other", 22));
        let (a, b) = (start(&handle, &one, secret(SECRET)), start(&handle, &other, secret(SECRET)));
        let to = b.local_addr();
        assert!(a.hello_of(to).is_none() && a.connection_to(to).is_none(), "nobody was dialled yet");
        let reply = ask(&a, to).await.expect("it is answered");
        assert_eq!((reply.archive(), reply.header.status), (&b"are you there"[..], status::OK));
        assert_eq!(reply.header.credit_bytes, 77);
        assert_eq!(a.hello_of(to).expect("it is up").boot_id, 22);
        assert_eq!(other.met.borrow()[0].node, "one");
        let connection = a.connection_to(to);
        assert!(connection.is_some());

        a.send(to, question(ECHO, Lane::Consensus, b"one way", 0));
        until(|| *other.one_way.borrow() == [b"one way"]).await;
        assert_eq!(a.connection_to(to), connection, "one connection serves all");

        // E54: who accepted does not ask on that connection; it dials one of its own.
        ask(&b, a.local_addr()).await.expect("it is answered");
        let (mine, theirs) = (a.metrics(), b.metrics());
        assert_eq!((mine.dials, mine.accepts, theirs.dials, theirs.accepts), (1, 1, 1, 1));
        assert_eq!((mine.connections_dialled, mine.connections_accepted), (1, 1));
        a.stop().await;
        until(|| other.lost.get() == 2).await;
        assert!(matches!(ask(&a, to).await, Err(CallError::NotSent(_))));
    });
}

#[test]
fn k39_eight_mebibytes_come_back_as_they_went_at_both_datagram_sizes() {
    for (datagram_bytes, offload) in [(DATAGRAM_BYTES, true), (DATAGRAM_BYTES, false), (DATAGRAM_BYTES_MAX, true)] {
        run(move |handle| async move {
            let (one, other) = (Counting::new("one", 1), Counting::new("other", 2));
            let settings = PeerSettings { datagram_bytes, offload, ..secret(SECRET) };
            let (a, b) = (start(&handle, &one, settings.clone()), start(&handle, &other, settings));
            let payload = pattern(8 << 20);
            let mut request = question(ECHO, Lane::Produce, b"commit", 60_000);
            // Pieces as a batch has them, of odd lengths.
            request.payload = vec![payload.slice(0..1), payload.slice(1..70_001), payload.slice(70_001..8 << 20)];
            let reply = a.call(b.local_addr(), request).await.expect("it is answered");
            assert!(reply.archive() == b"commit" && reply.payload()[..] == payload[..]);
            let metrics = a.metrics();
            let joins = offload && datagram_bytes == DATAGRAM_BYTES;
            assert!(!joins || metrics.sends * 4 < metrics.datagrams_sent, "{metrics:?}");
            assert_eq!(metrics.offload_refused, 0);
        });
    }
}

#[test]
fn k39_a_frame_that_is_too_long_is_never_sent() {
    run(|handle| async move {
        let (one, other) = (Counting::new("one", 1), Counting::new("other", 2));
        let (a, b) = (start(&handle, &one, secret(SECRET)), start(&handle, &other, secret(SECRET)));
        let mut request = question(ECHO, Lane::Produce, b"", 60_000);
        request.payload = vec![pattern(16 << 20)];
        assert!(matches!(a.call(b.local_addr(), request).await, Err(CallError::NotSent(_))));
        ask(&a, b.local_addr()).await.expect("others are not affected");
    });
}

#[test]
fn k37_a_caller_that_leaves_takes_its_handler_along_and_nothing_else() {
    run(|handle| async move {
        let (one, other) = (Counting::new("one", 1), Counting::new("other", 2));
        let (a, b) = (start(&handle, &one, secret(SECRET)), start(&handle, &other, secret(SECRET)));
        let to = b.local_addr();
        ask(&a, to).await.expect("it is answered");
        let connection = a.connection_to(to);
        let hanging = a.call(to, question(HANG, Lane::Consume, b"", 60_000));
        until(|| other.begun.get() == 2).await;
        assert_eq!(other.dropped.get(), 0);
        drop(hanging);
        until(|| other.dropped.get() == 1).await;
        ask(&a, to).await.expect("others are not affected");
        assert_eq!((a.connection_to(to), other.late.borrow().len()), (connection, 0));

        // Given up after the answer was on its way: the service hears of it (C58).
        let answered = a.call(to, question(SWALLOW, Lane::Consume, b"", 60_000));
        until(|| other.begun.get() == 4).await;
        drop(answered);
        until(|| other.late.borrow().len() + other.dropped.get() as usize == 2).await;
    });
}

#[test]
fn a_budget_that_is_over_ends_the_call_and_says_whether_it_may_have_been_served() {
    run(|handle| async move {
        let (one, other) = (Counting::new("one", 1), Counting::new("other", 2));
        let (a, b) = (start(&handle, &one, secret(SECRET)), start(&handle, &other, secret(SECRET)));
        ask(&a, b.local_addr()).await.expect("it is answered");
        let outcome = a.call(b.local_addr(), question(HANG, Lane::Ack, b"", 30)).await;
        assert!(matches!(outcome, Err(CallError::Unknown(_))), "{outcome:?}");
        until(|| other.dropped.get() == 1).await;
        // Nobody listens there: it was never sent, for certain.
        let nobody = loopback(1);
        let outcome = a.call(nobody, question(ECHO, Lane::Ack, b"", 30)).await;
        assert!(matches!(outcome, Err(CallError::NotSent(_))), "{outcome:?}");
        assert_eq!(a.metrics().calls_timed_out, 2);
    });
}

#[test]
fn a_dial_that_failed_is_remembered_and_requests_fail_at_once() {
    run(|handle| async move {
        let one = Counting::new("one", 1);
        let a = start(&handle, &one, secret(SECRET));
        let nobody = loopback(1);
        let before = rt::now();
        let outcome = ask(&a, nobody).await;
        assert!(matches!(&outcome, Err(CallError::NotSent(text)) if text.contains("took too long")), "{outcome:?}");
        assert!(rt::now() - before >= Duration::from_millis(900));
        let again = a.call(nobody, question(ECHO, Lane::Ack, b"", 5_000)).await;
        assert!(matches!(&again, Err(CallError::NotSent(text)) if text.contains("a moment ago")), "{again:?}");
        assert_eq!((a.metrics().dials, a.metrics().dials_failed), (1, 1));
    });
}

#[test]
fn e41_an_ack_passes_commits_that_fill_the_connection() {
    run(|handle| async move {
        let (one, other) = (Counting::new("one", 1), Counting::new("other", 2));
        let (a, b) = (start(&handle, &one, secret(SECRET)), start(&handle, &other, secret(SECRET)));
        let to = b.local_addr();
        ask(&a, to).await.expect("it is answered");
        let (stored, payload) = (Rc::new(Cell::new(0)), pattern(8 << 20));
        for _ in 0..4 {
            let mut commit = question(SWALLOW, Lane::Produce, b"", 60_000);
            commit.payload = vec![payload.clone()];
            let (call, stored) = (a.call(to, commit), stored.clone());
            rt::spawn(Queue::Foreground, async move {
                call.await.expect("it is stored");
                stored.set(stored.get() + 1);
            });
        }
        let began = a.metrics().bytes_sent;
        until(|| a.metrics().bytes_sent > began + (1 << 20)).await;
        ask(&a, to).await.expect("it is answered");
        let sent = a.metrics().bytes_sent - began;
        assert!(stored.get() < 4 && sent < 24 << 20, "{} commits and {sent} bytes went before the ack", stored.get());
        until(|| stored.get() == 4).await;
    });
}

#[test]
fn an_endpoint_bound_to_every_address_answers_from_the_one_that_was_dialled() {
    run(|handle| async move {
        let (one, other) = (Counting::new("one", 1), Counting::new("other", 2));
        let everywhere = SocketAddr::from(([0, 0, 0, 0], 0));
        let b = PeerEndpoint::start(&handle, everywhere, other.clone(), secret(SECRET)).expect("a free port");
        let a = start(&handle, &one, secret(SECRET));
        // Not the one that the kernel would choose for the way back.
        for ip in [[127, 0, 0, 2], [127, 0, 0, 3]] {
            ask(&a, SocketAddr::from((ip, b.local_addr().port()))).await.expect("it is answered");
        }
        // And dials from there as any other.
        ask(&b, a.local_addr()).await.expect("it is answered");
    });
}
