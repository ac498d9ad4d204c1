//! Peers that are none.

use std::net::UdpSocket;

use narad_shards::remote::CallError;
use narad_shards::wire::{Header, Kind, Lane, FRAME_BYTES_MAX};

use super::raw::Raw;
use super::*;
use crate::peer::greeting;
use crate::peer::proof::PROOF_BYTES;
use crate::peer::queue::stream_of;

fn refused(outcome: Result<Incoming, CallError>) -> String {
    match outcome {
        Err(CallError::NotSent(text)) => text,
        other => panic!("nothing of it may have been sent: {other:?}"),
    }
}

#[test]
fn k42_whoever_does_not_know_the_secret_is_refused_and_not_asked_again_for_a_while() {
    let open = PeerSettings::default();
    let pairs = [(secret(SECRET), secret(b"another")), (open.clone(), secret(SECRET)), (secret(SECRET), open)];
    for (mine, theirs) in pairs {
        run(move |handle| async move {
            let (one, other) = (Counting::new("one", 1), Counting::new("other", 2));
            let (a, b) = (start(&handle, &one, mine), start(&handle, &other, theirs));
            let text = refused(ask(&a, b.local_addr()).await);
            assert!(text.contains("invalid auth"), "{text}");
            let text = refused(ask(&a, b.local_addr()).await);
            assert!(text.contains("a moment ago"), "{text}");
            assert_eq!((b.metrics().proofs_refused, b.metrics().accepts), (1, 1));
            assert!(other.met.borrow().is_empty() && other.begun.get() == 0, "no request reached a handler");
            assert!(a.hello_of(b.local_addr()).is_none());
        });
    }
}

#[test]
fn k43_an_impostor_learns_nothing_and_gets_no_request() {
    run(|handle| async move {
        // It listens where a peer should, without the secret.
        let (one, impostor) = (Counting::new("one", 1), Counting::new("impostor", 2));
        let (a, b) = (start(&handle, &one, secret(SECRET)), start(&handle, &impostor, secret(b"guessed")));
        refused(ask(&a, b.local_addr()).await);
        assert!(one.met.borrow().is_empty() && impostor.met.borrow().is_empty());
    });
}

#[test]
fn no_secret_on_both_sides_is_an_open_plane() {
    run(|handle| async move {
        let (one, other) = (Counting::new("one", 1), Counting::new("other", 2));
        let settings = PeerSettings::default();
        let (a, b) = (start(&handle, &one, settings.clone()), start(&handle, &other, settings));
        ask(&a, b.local_addr()).await.expect("it is answered");
    });
}

#[test]
fn e36_a_service_that_does_not_want_to_know_a_peer_ends_it_before_any_request() {
    run(|handle| async move {
        let one = Counting::new("one", 1);
        let reason = "it belongs to another cluster".to_owned();
        let other = Rc::new(Counting { refuse: Some(reason), ..Counting::default() });
        let (a, b) = (start(&handle, &one, secret(SECRET)), start(&handle, &other, secret(SECRET)));
        let text = refused(ask(&a, b.local_addr()).await);
        assert!(text.contains("another cluster"), "{text}");
        assert_eq!((other.begun.get(), other.lost.get()), (0, 0));
    });
}

#[test]
fn k43_a_proof_of_one_session_is_worth_nothing_on_another() {
    run(|handle| async move {
        let other = Counting::new("other", 2);
        let b = start(&handle, &other, secret(SECRET));
        let mut first = Raw::dial(&handle, b.local_addr());
        first.handshake().await;
        let captured = first.proof(SECRET);
        first.say(0, &captured);
        assert_eq!(first.heard(PROOF_BYTES).await.len(), PROOF_BYTES, "there it is accepted");
        let mut second = Raw::dial(&handle, b.local_addr());
        second.handshake().await;
        second.say(0, &captured);
        assert!(second.reason().await.is_some_and(|reason| reason.contains("invalid auth")));
        assert_eq!(b.metrics().proofs_refused, 1);
    });
}

#[test]
fn e48_before_the_proof_nothing_is_answered_and_little_is_held() {
    run(|handle| async move {
        let other = Counting::new("other", 2);
        let b = start(&handle, &other, secret(SECRET));
        let mut stranger = Raw::dial(&handle, b.local_addr());
        stranger.handshake().await;
        let mut taken = 0;
        stranger
            .pump(|quic| {
                // As much as it may, on every stream but the first.
                for lane in Lane::ALL {
                    taken += quic.stream_send(stream_of(lane), &[0xff; 64 << 10], false).unwrap_or(0);
                }
                taken >= 200 << 10
            })
            .await;
        for _ in 0..20 {
            stranger
                .pump(|quic| {
                    taken += quic.stream_send(4, &[0xff; 64 << 10], false).unwrap_or(0);
                    true
                })
                .await;
        }
        assert!(taken <= 256 << 10, "{taken} bytes were taken from somebody unproven");
        assert!(stranger.quic.peer_error().is_none());
        assert_eq!((other.begun.get(), other.met.borrow().len()), (0, 0));
        // He has three seconds.
        stranger.reason().await;
        let reason = stranger.reason().await.expect("he is sent away");
        assert!(reason.contains("took too long"), "{reason}");
    });
}

#[test]
fn e48_random_bytes_and_many_strangers_cost_little_and_a_peer_still_gets_in() {
    run(|handle| async move {
        let (one, other) = (Counting::new("one", 1), Counting::new("other", 2));
        let b = start(&handle, &other, secret(SECRET));
        let noise = UdpSocket::bind(loopback(0)).expect("a free port");
        let mut state = 7_u64;
        for round in 0..300 {
            let bytes: Vec<u8> = (0..1 + round * 4)
                .map(|_| {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    (state >> 56) as u8
                })
                .collect();
            noise.send_to(&bytes, b.local_addr()).expect("loopback takes it");
            if round % 50 == 0 {
                rt::yield_now().await;
            }
        }
        until(|| b.metrics().datagrams_received >= 100).await;
        assert!(b.metrics().accepts <= 1, "noise is no peer: {:?}", b.metrics());
        let mut strangers = Vec::new();
        for _ in 0..17 {
            let mut stranger = Raw::dial(&handle, b.local_addr());
            stranger.handshake().await;
            strangers.push(stranger);
        }
        assert!(b.metrics().retries >= 1, "addresses are verified from 16 on: {:?}", b.metrics());
        let a = start(&handle, &one, secret(SECRET));
        ask(&a, b.local_addr()).await.expect("a peer is let in after a Retry");
    });
}

#[test]
fn k39_a_proven_peer_with_a_hostile_length_loses_its_connection_only() {
    run(|handle| async move {
        let (one, other) = (Counting::new("one", 1), Counting::new("other", 2));
        let (a, b) = (start(&handle, &one, secret(SECRET)), start(&handle, &other, secret(SECRET)));
        let mut peer = Raw::dial(&handle, b.local_addr());
        peer.handshake().await;
        let proof = peer.proof(SECRET);
        peer.say(0, &proof);
        assert_eq!(peer.heard(PROOF_BYTES).await.len(), PROOF_BYTES);
        peer.say(0, &greeting::encode(&Hello::default()));
        assert!(!peer.heard(10).await.is_empty(), "its hello is answered");
        let header = Header {
            length: FRAME_BYTES_MAX as u32 + 1,
            operation: ECHO,
            version: 1,
            kind: Kind::Request,
            lane: Lane::Ack,
            status: 0,
            archive_bytes: 0,
            request_id: 1,
            budget_ms: 1,
            credit_bytes: 0,
        };
        peer.say(stream_of(Lane::Ack), &header.encode());
        assert!(peer.reason().await.is_some_and(|reason| reason.contains("a frame of 16777217 bytes")));
        until(|| other.lost.get() == 1).await;
        assert_eq!(other.begun.get(), 0);
        ask(&a, b.local_addr()).await.expect("others are not affected");
    });
}
