//! UDP sockets of the ring against each other.

use std::future::poll_fn;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::{Route, Sent, Udp};
use crate::rt::ring::RingHandle;
use crate::rt::ring_tests::run;
use crate::rt::{self, Queue};

fn socket(handle: &RingHandle, offload: bool) -> (Udp, SocketAddr) {
    let udp = handle.udp("127.0.0.1:0".parse().expect("an address"), offload).expect("a free port");
    let address = udp.local_addr().expect("it is bound");
    (udp, address)
}

async fn send(udp: &Udp, to: SocketAddr, data: Vec<u8>, segment_bytes: Option<u16>) -> Sent {
    udp.send(to, data, segment_bytes);
    poll_fn(|cx| udp.poll_sent(cx)).await.expect("it was being sent")
}

/// Datagrams until `count` have come.
async fn receive(udp: &Udp, count: usize, from: SocketAddr) -> Vec<Vec<u8>> {
    let mut got = Vec::new();
    while got.len() < count {
        let mut received = poll_fn(|cx| udp.poll_receive(cx)).await.expect("loopback works");
        assert_eq!(received.from, from);
        got.extend(received.datagrams().map(|datagram| datagram.to_vec()));
    }
    got
}

#[test]
fn e55_datagrams_come_in_the_order_they_were_sent_cut_or_not() {
    for offload in [true, false] {
        run(move |handle| async move {
            let (one, one_address) = socket(&handle, offload);
            let (other, other_address) = socket(&handle, offload);
            assert!(one.buffer_bytes().0 >= 64 << 10, "{:?}", one.buffer_bytes());
            let receiver = rt::spawn(Queue::Foreground, async move { receive(&other, 400, one_address).await });
            for round in 0..40_u8 {
                // Nine whole segments and a shorter one, or ten sends.
                let segment =
                    |index: u8| vec![round.wrapping_mul(10).wrapping_add(index); if index == 9 { 7 } else { 1200 }];
                if offload {
                    let sent = send(&one, other_address, (0..10).flat_map(segment).collect(), Some(1200)).await;
                    assert!(sent.result.is_ok(), "{:?}", sent.result);
                } else {
                    for index in 0..10 {
                        assert!(send(&one, other_address, segment(index), None).await.result.is_ok());
                    }
                }
                rt::yield_now().await;
            }
            let got = receiver.await;
            for (index, datagram) in got.iter().enumerate() {
                assert_eq!(datagram.len(), if index % 10 == 9 { 7 } else { 1200 }, "datagram {index}");
                assert!(datagram.iter().all(|byte| *byte == index as u8), "datagram {index} is {}", datagram[0]);
            }
        });
    }
}

#[test]
fn e55_a_send_that_the_path_cannot_take_says_so_and_the_socket_goes_on() {
    run(|handle| async move {
        let (one, one_address) = socket(&handle, true);
        let (other, other_address) = socket(&handle, true);
        let too_long = send(&one, other_address, vec![1; 65_508], None).await;
        assert_eq!(too_long.result.err().and_then(|error| error.raw_os_error()), Some(libc::EMSGSIZE));
        assert_eq!(too_long.data.len(), 65_508, "the caller has it back and can send it in pieces");
        assert!(send(&one, other_address, vec![2; 16_383 * 3], Some(16_383)).await.result.is_ok());
        let got = receive(&other, 3, one_address).await;
        assert!(got.iter().all(|datagram| *datagram == vec![2; 16_383]));
    });
}

#[test]
fn a_socket_for_both_kinds_of_addresses_calls_each_by_its_own_name() {
    run(|handle| async move {
        let both = handle.udp("[::]:0".parse().expect("an address"), true).expect("a free port");
        let port = both.local_addr().expect("it is bound").port();
        let (four, four_address) = socket(&handle, true);
        assert!(send(&four, SocketAddr::from(([127, 0, 0, 1], port)), vec![1; 5], None).await.result.is_ok());
        assert_eq!(receive(&both, 1, four_address).await, [vec![1; 5]]);
        assert!(send(&both, four_address, vec![2; 5], None).await.result.is_ok());
        assert_eq!(receive(&four, 1, SocketAddr::from(([127, 0, 0, 1], port))).await, [vec![2; 5]]);
    });
}

#[test]
fn lesson_u7_a_socket_that_waits_can_be_dropped() {
    run(|handle| async move {
        let (idle, _) = socket(&handle, true);
        let waited = rt::timeout(Duration::from_millis(1), poll_fn(|cx| idle.poll_receive(cx))).await;
        assert!(waited.is_err());
        drop(idle);
    });
}

#[test]
fn a_socket_bound_to_every_address_tells_which_one_was_asked_and_answers_from_it() {
    for (everywhere, asked) in [("0.0.0.0:0", "127.0.0.2"), ("[::]:0", "::ffff:127.0.0.3")] {
        run(move |handle| async move {
            let wide = handle.udp(everywhere.parse().expect("an address"), true).expect("a free port");
            let port = wide.local_addr().expect("it is bound").port();
            let (four, four_address) = socket(&handle, true);
            let ip: IpAddr = asked.parse().expect("an address");
            let target = SocketAddr::from((ip.to_canonical(), port));
            assert!(send(&four, target, vec![1; 5], None).await.result.is_ok());
            let received = poll_fn(|cx| wide.poll_receive(cx)).await.expect("loopback works");
            assert_eq!((received.from, received.to), (four_address, Some(ip)));
            for segment_bytes in [None, Some(2)] {
                let route = Route { to: four_address, from: received.to };
                wide.send(route, vec![2; 5], segment_bytes);
                let sent = poll_fn(|cx| wide.poll_sent(cx)).await.expect("it was being sent");
                assert!(sent.result.is_ok(), "{:?}", sent.result);
                let count = if segment_bytes.is_some() { 3 } else { 1 };
                assert_eq!(receive(&four, count, target).await.concat(), [2; 5]);
            }
        });
    }
}
