//! Peers that know the secret and take more than their share.

use narad_shards::wire::{Header, FRAME_BYTES_MAX, HEADER_BYTES};

use super::raw::Raw;
use super::*;
use crate::peer::queue::stream_of;

fn settings(incoming_bytes_max: usize) -> PeerSettings {
    PeerSettings { incoming_bytes_max, ..secret(SECRET) }
}

fn hello(node: &str) -> Hello {
    Hello { node: node.to_owned(), boot_id: 9, shard: Some(0), ..Hello::default() }
}

/// A request of `bytes` altogether.
fn request(operation: u16, lane: Lane, request_id: u64, bytes: usize) -> Vec<u8> {
    let header = Header {
        length: bytes as u32,
        operation,
        version: 1,
        kind: Kind::Request,
        lane,
        status: 0,
        archive_bytes: 0,
        request_id,
        budget_ms: 5_000,
        credit_bytes: 0,
    };
    let mut frame = vec![0; bytes];
    frame[..HEADER_BYTES].copy_from_slice(&header.encode());
    frame
}

#[test]
fn e48_many_long_frames_begun_by_one_peer_are_refused_beyond_the_budget_and_short_ones_and_other_peers_pass() {
    run(|handle| async move {
        let (one, other) = (Counting::new("one", 1), Counting::new("other", 2));
        let b = start(&handle, &other, settings(300_000));
        // No two requests of a connection have the same id.
        let first = |lane: Lane| 10 * (1 + lane as u64);
        let mut greedy = Vec::new();
        for number in 0..4 {
            let mut peer = Raw::dial(&handle, b.local_addr());
            assert!(peer.introduce(SECRET, &hello("greedy")).await, "connection {number}");
            for lane in [Lane::Produce, Lane::Bulk] {
                // All but the last byte.
                let frame = request(SWALLOW, lane, first(lane), 100_000);
                assert_eq!(peer.pour(stream_of(lane), &frame[..frame.len() - 1]).await, frame.len() - 1);
            }
            greedy.push(peer);
        }
        until(|| b.metrics().incoming_bytes > 200_000).await;
        let held = b.metrics().incoming_bytes;
        assert!((200_000..=300_000).contains(&held), "{held} bytes are held for frames that may never be whole");
        for (number, peer) in greedy.iter_mut().enumerate() {
            // What is short passes beside them; what was refused is answered once it has all come.
            peer.say(stream_of(Lane::Ack), &request(SWALLOW, Lane::Ack, first(Lane::Ack), 1000));
            let statuses: Vec<u16> = peer.replies(stream_of(Lane::Ack), 1).await.iter().map(|r| r.status).collect();
            assert_eq!(statuses, [status::OK], "connection {number}");
            for lane in [Lane::Produce, Lane::Bulk] {
                peer.say(stream_of(lane), &[0]);
                peer.say(stream_of(lane), &request(SWALLOW, lane, first(lane) + 1, 1000));
            }
        }
        let a = start(&handle, &one, secret(SECRET));
        let long = Outgoing { payload: vec![pattern(1 << 20)], ..question(SWALLOW, Lane::Produce, b"x", 20_000) };
        let reply = a.call(b.local_addr(), long).await.expect("another node has room for one, whatever is held");
        assert_eq!(reply.header.status, status::OK);
        let mut answers = Vec::new();
        for peer in &mut greedy {
            for lane in [Lane::Produce, Lane::Bulk] {
                let replies = peer.replies(stream_of(lane), 2).await;
                assert_eq!(
                    replies.last().map(|reply| (reply.request_id, reply.status)),
                    Some((first(lane) + 1, status::OK))
                );
                answers
                    .extend(replies.iter().filter(|reply| reply.request_id == first(lane)).map(|reply| reply.status));
            }
        }
        let refused = answers.iter().filter(|status| **status == status::UNAVAILABLE).count() as u64;
        assert_eq!((answers.len(), refused), (8, b.metrics().frames_refused), "{answers:?}");
        assert!(refused >= 5, "{answers:?}");
        assert_eq!(b.metrics().incoming_bytes, 0);
    });
}

#[test]
fn e48_the_longest_frame_passes_however_small_the_budget_and_its_room_comes_back_with_the_connection() {
    run(|handle| async move {
        let (one, other) = (Counting::new("one", 1), Counting::new("other", 2));
        let (a, b) = (start(&handle, &one, settings(1)), start(&handle, &other, settings(1)));
        let archive = b"archive";
        let payload = FRAME_BYTES_MAX - HEADER_BYTES - archive.len();
        let long = Outgoing { payload: vec![pattern(payload)], ..question(ECHO, Lane::Bulk, archive, 20_000) };
        let echoed = a.call(b.local_addr(), long).await.expect("in both directions");
        assert_eq!(echoed.payload().len(), payload);
        let mut peer = Raw::dial(&handle, b.local_addr());
        assert!(peer.introduce(SECRET, &hello("one")).await);
        let frame = request(SWALLOW, Lane::Produce, 1, 100_000);
        peer.pour(stream_of(Lane::Produce), &frame[..frame.len() - 1]).await;
        until(|| b.metrics().incoming_bytes as usize == frame.len() - HEADER_BYTES).await;
        let long = || Outgoing { payload: vec![pattern(100_000)], ..question(SWALLOW, Lane::Bulk, b"x", 5_000) };
        let refused = a.call(b.local_addr(), long()).await.expect("it is answered");
        assert_eq!(refused.header.status, status::UNAVAILABLE);
        peer.quic.close(true, 0, b"").expect("it was open");
        peer.pump(|_| b.metrics().incoming_bytes == 0).await;
        assert_eq!(a.call(b.local_addr(), long()).await.map(|reply| reply.header.status), Ok(status::OK));
    });
}

#[test]
fn e48_a_connection_that_ends_gives_its_room_back_at_once() {
    run(|handle| async move {
        let other = Counting::new("other", 2);
        let b = start(&handle, &other, settings(1));
        let mut peer = Raw::dial(&handle, b.local_addr());
        assert!(peer.introduce(SECRET, &hello("one")).await);
        let frame = request(SWALLOW, Lane::Produce, 1, 100_000);
        peer.pour(stream_of(Lane::Produce), &frame[..frame.len() - 1]).await;
        until(|| b.metrics().incoming_bytes > 0).await;
        // Nothing it says on another lane makes sense.
        peer.pour(stream_of(Lane::Bulk), &[0xff; HEADER_BYTES]).await;
        // Looked at often: QUIC itself goes on for some milliseconds, to drain.
        for _ in 0..100_000 {
            if b.metrics().connections_accepted == 0 {
                break;
            }
            rt::sleep(Duration::from_micros(100)).await;
        }
        let metrics = b.metrics();
        assert_eq!((metrics.connections_accepted, metrics.incoming_bytes), (0, 0));
    });
}

#[test]
fn c58_a_reply_without_room_fails_its_call_alone_and_is_handed_back() {
    run(|handle| async move {
        let (one, other) = (Counting::new("one", 1), Counting::new("other", 2));
        let (a, b) = (start(&handle, &one, settings(1)), start(&handle, &other, secret(SECRET)));
        let mut peer = Raw::dial(&handle, a.local_addr());
        assert!(peer.introduce(SECRET, &hello("other")).await);
        let frame = request(SWALLOW, Lane::Produce, 1, 100_000);
        peer.pour(stream_of(Lane::Produce), &frame[..frame.len() - 1]).await;
        until(|| a.metrics().incoming_bytes > 0).await;
        let long = Outgoing { payload: vec![pattern(100_000)], ..question(ECHO, Lane::Consume, b"x", 5_000) };
        match a.call(b.local_addr(), long).await {
            Err(CallError::Unknown(text)) => assert!(text.contains("too much else"), "{text}"),
            other => panic!("there was no room for the reply: {other:?}"),
        }
        until(|| other.late.borrow().len() == 1).await;
        ask(&a, b.local_addr()).await.expect("the connection goes on");
    });
}

#[test]
fn e48_the_newest_connections_of_one_shard_of_a_peer_stay_and_others_are_ended() {
    run(|handle| async move {
        let other = Counting::new("other", 2);
        let b = start(&handle, &other, secret(SECRET));
        let mut peers = Vec::new();
        for number in 0..7 {
            let mut peer = Raw::dial(&handle, b.local_addr());
            // Whatever its process: a former one of that name is gone, or should be.
            assert!(peer.introduce(SECRET, &Hello { boot_id: number, ..hello("one") }).await);
            peers.push(peer);
        }
        let mut sibling = Raw::dial(&handle, b.local_addr());
        assert!(sibling.introduce(SECRET, &Hello { shard: Some(1), ..hello("one") }).await);
        assert_eq!(b.metrics().connections_accepted, 5);
        for peer in &mut peers[..3] {
            assert!(peer.reason().await.is_some_and(|reason| reason.contains("dialled again")));
        }
        for peer in peers[3..].iter_mut().chain([&mut sibling]) {
            peer.say(stream_of(Lane::Ack), &request(SWALLOW, Lane::Ack, 1, 100));
            assert_eq!(peer.replies(stream_of(Lane::Ack), 1).await.len(), 1);
        }
    });
}
