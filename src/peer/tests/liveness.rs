//! Peers that fall silent, and that come back as another process.

use std::cell::Cell;
use std::future::poll_fn;
use std::sync::mpsc;

use narad_shards::remote::{CallError, Transport};
use narad_shards::rt::Queue;
use narad_shards::wire::Lane;

use super::*;

/// Passes datagrams on between whoever dials it and `to`, while `passes` says so.
fn proxy(handle: &RingHandle, to: SocketAddr, mut passes: impl FnMut() -> bool + 'static) -> SocketAddr {
    let udp = handle.udp(loopback(0), false).expect("a free port");
    let address = udp.local_addr().expect("it is bound");
    rt::spawn(Queue::Foreground, async move {
        let mut dialler = None;
        loop {
            let Ok(mut received) = poll_fn(|cx| udp.poll_receive(cx)).await else { return };
            let target = if received.from == to { dialler } else { Some(to) };
            if received.from != to {
                dialler = Some(received.from);
            }
            for datagram in received.datagrams() {
                if let Some(target) = target.filter(|_| passes()) {
                    udp.send(target, datagram.to_vec(), None);
                    poll_fn(|cx| udp.poll_sent(cx)).await;
                }
            }
        }
    });
    address
}

#[test]
fn k38_a_silent_peer_is_found_by_a_ping_and_a_slow_one_is_not() {
    run(|handle| async move {
        let (one, other) = (Counting::new("one", 1), Counting::new("other", 2));
        let (a, b) = (start(&handle, &one, secret(SECRET)), start(&handle, &other, secret(SECRET)));
        let cut = Rc::new(Cell::new(false));
        let is_cut = cut.clone();
        let through = proxy(&handle, b.local_addr(), move || !is_cut.get());
        ask(&a, through).await.expect("it is answered");
        let connection = a.connection_to(through);
        // E40: its handler hangs, but it answers pings: slow, not dead.
        let hanging = a.call(through, question(HANG, Lane::Produce, b"", 1_500)).await;
        assert!(matches!(hanging, Err(CallError::Unknown(_))));
        let metrics = a.metrics();
        assert!(metrics.pings >= 1 && metrics.silent == 0, "{metrics:?}");
        assert_eq!(a.connection_to(through), connection);
        let hanging = a.call(through, question(HANG, Lane::Produce, b"", 30_000));
        until(|| other.begun.get() == 3).await;
        cut.set(true);
        let lost = hanging.await;
        assert!(matches!(&lost, Err(CallError::Unknown(text)) if text.contains("ping")), "{lost:?}");
        assert_eq!((a.metrics().silent, a.connection_to(through), one.lost.get()), (1, None, 1));
        cut.set(false);
        ask(&a, through).await.expect("the next request dials, at once");
        assert_ne!(a.connection_to(through), connection);
        // Whoever dials again has given up what was before: its handler ends with it.
        until(|| other.dropped.get() == 2 && other.lost.get() == 1).await;
    });
}

#[test]
fn k38_a_silent_peer_is_found_by_one_way_messages_alone() {
    run(|handle| async move {
        let (one, other) = (Counting::new("one", 1), Counting::new("other", 2));
        let (a, b) = (start(&handle, &one, secret(SECRET)), start(&handle, &other, secret(SECRET)));
        let cut = Rc::new(Cell::new(false));
        let is_cut = cut.clone();
        let through = proxy(&handle, b.local_addr(), move || !is_cut.get());
        ask(&a, through).await.expect("it is answered");
        cut.set(true);
        a.send(through, question(ECHO, Lane::Consensus, b"a heartbeat", 0));
        until(|| a.connection_to(through).is_none()).await;
        assert_eq!(a.metrics().silent, 1);
    });
}

#[test]
fn what_a_path_loses_is_sent_again() {
    run(|handle| async move {
        let (one, other) = (Counting::new("one", 1), Counting::new("other", 2));
        let (a, b) = (start(&handle, &one, secret(SECRET)), start(&handle, &other, secret(SECRET)));
        let mut datagrams = 0;
        // The second and the third one too: parts of the handshake.
        let through = proxy(&handle, b.local_addr(), move || {
            datagrams += 1;
            datagrams != 2 && datagrams % 20 != 3
        });
        let mut request = question(ECHO, Lane::Produce, b"commit", 60_000);
        let payload = pattern(300_000);
        request.payload = vec![payload.clone()];
        let reply = a.call(through, request).await.expect("it is answered");
        assert!(reply.payload()[..] == payload[..]);
        assert!(a.metrics().packets_lost > 0, "{:?}", a.metrics());
    });
}

/// An endpoint in a thread of its own, which ends without a word when it is told to.
fn process(boot_id: u64, port: u16) -> (SocketAddr, mpsc::Sender<()>, std::thread::JoinHandle<()>) {
    let (told, address) = mpsc::channel();
    let (kill, killed) = mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        run(move |handle| async move {
            let service = Counting::new("other", boot_id);
            let settings = secret(SECRET);
            let endpoint = PeerEndpoint::start(&handle, loopback(port), service, settings).expect("the port is free");
            told.send(endpoint.local_addr()).expect("the test waits for it");
            rt::blocking(move || killed.recv().is_ok()).await;
        })
    });
    (address.recv().expect("it starts"), kill, thread)
}

#[test]
fn k38_a_peer_that_was_started_again_says_so_at_once() {
    let (address, kill, thread) = process(1, 0);
    run(move |handle| async move {
        let one = Counting::new("one", 9);
        let a = start(&handle, &one, secret(SECRET));
        ask(&a, address).await.expect("it is answered");
        assert_eq!(a.hello_of(address).expect("it is up").boot_id, 1);
        kill.send(()).expect("it waits for that");
        rt::blocking(move || thread.join().expect("it ends")).await;
        let (_, kill, thread) = process(2, address.port());
        let outcome = a.call(address, question(ECHO, Lane::Ack, b"", 20_000)).await;
        assert!(matches!(&outcome, Err(CallError::Unknown(text)) if text.contains("does not know")), "{outcome:?}");
        assert_eq!((a.metrics().silent, one.lost.get()), (0, 1), "no ping was needed for that");
        ask(&a, address).await.expect("the next request dials");
        assert_eq!(a.hello_of(address).expect("it is up").boot_id, 2);
        kill.send(()).expect("it waits for that");
        rt::blocking(move || thread.join().expect("it ends")).await;
    });
}

#[test]
fn control_connections_outlive_silence_and_others_do_not() {
    for keep_alive in [true, false] {
        run(move |handle| async move {
            let (one, other) = (Counting::new("one", 1), Counting::new("other", 2));
            let settings = PeerSettings { keep_alive, idle_timeout: Duration::from_secs(1), ..secret(SECRET) };
            let (a, b) = (start(&handle, &one, settings.clone()), start(&handle, &other, settings));
            ask(&a, b.local_addr()).await.expect("it is answered");
            rt::sleep(Duration::from_millis(2_500)).await;
            assert_eq!(a.connection_to(b.local_addr()).is_some(), keep_alive);
            ask(&a, b.local_addr()).await.expect("it is dialled again where it has to be");
        });
    }
}
