//! Sockets of the ring against plain std sockets on other threads.

use std::cell::Cell;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::rc::Rc;
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Stream;
use crate::rt::ring::{run_shard_thread, Options, RingHandle};
use crate::rt::ring_tests::run;
use crate::rt::{self, Queue};

const LOCALHOST: &str = "127.0.0.1:0";

async fn recv(stream: &mut Stream, buf: &mut [u8]) -> std::io::Result<usize> {
    std::future::poll_fn(|cx| stream.poll_recv(cx, buf)).await
}

async fn send_all(stream: &mut Stream, mut bytes: &[u8]) -> std::io::Result<()> {
    while !bytes.is_empty() {
        let taken = std::future::poll_fn(|cx| stream.poll_send(cx, bytes)).await?;
        bytes = &bytes[taken..];
    }
    std::future::poll_fn(|cx| stream.poll_flush(cx)).await
}

async fn echo(mut stream: Stream) {
    let mut buf = vec![0; 32 << 10];
    while let Ok(count @ 1..) = recv(&mut stream, &mut buf).await {
        if send_all(&mut stream, &buf[..count]).await.is_err() {
            return;
        }
    }
    let _ = std::future::poll_fn(|cx| stream.poll_shutdown(cx)).await;
}

/// Serves echo to everybody while `client` runs on another thread.
async fn serve_echo<T: Send + 'static>(handle: RingHandle, client: impl FnOnce(SocketAddr) -> T + Send + 'static) -> T {
    let listener = handle.listen(LOCALHOST.parse().expect("an address")).expect("listen");
    let address = listener.local_addr().expect("it is bound");
    rt::spawn(Queue::Foreground, async move {
        loop {
            let stream = listener.accept(|_| {}).await;
            rt::spawn(Queue::Foreground, echo(stream));
        }
    });
    let client = std::thread::spawn(move || client(address));
    join(client).await
}

async fn join<T: Send + 'static>(thread: JoinHandle<T>) -> T {
    rt::blocking(move || thread.join().expect("the client does not panic")).await
}

fn ask(stream: &mut TcpStream, question: &[u8]) -> Vec<u8> {
    stream.write_all(question).expect("send");
    let mut answer = vec![0; question.len()];
    stream.read_exact(&mut answer).expect("receive");
    answer
}

/// Worst answer time of `requests` serial requests on one connection.
fn worst_pause(handle: RingHandle, requests: u32) -> impl std::future::Future<Output = Duration> {
    serve_echo(handle, move |address| {
        let mut stream = TcpStream::connect(address).expect("connect");
        stream.set_nodelay(true).expect("set option");
        // A lost wake-up would last for ever: let it fail instead.
        stream.set_read_timeout(Some(Duration::from_secs(5))).expect("set option");
        let mut worst = Duration::ZERO;
        for _ in 0..requests {
            let start = Instant::now();
            ask(&mut stream, b"GET / HTTP/1.1\r\n\r\n");
            worst = worst.max(start.elapsed());
        }
        worst
    })
}

/// By default short, with a bound that a loaded machine keeps. `NARAD_G11_REQUESTS=50000` runs the whole check on a
/// quiet one: no pause over 100 ms.
#[test]
fn glommio_g11_serial_requests_never_pause() {
    let whole = std::env::var("NARAD_G11_REQUESTS").ok().map(|count| count.parse().expect("a number of requests"));
    let (requests, bound) = match whole {
        Some(requests) => (requests, Duration::from_millis(100)),
        None => (3_000, Duration::from_secs(5)),
    };
    let worst = run(move |handle| worst_pause(handle, requests));
    assert!(worst < bound, "an answer took {worst:?}");
}

#[test]
fn a_megabyte_goes_there_and_back() {
    run(|handle| {
        serve_echo(handle, |address| {
            let stream = TcpStream::connect(address).expect("connect");
            let mut writer = stream.try_clone().expect("clone");
            let bytes: Vec<u8> = (0..3_000_000u32).map(|i| (i * 7 % 251) as u8).collect();
            let sent = bytes.clone();
            let sender = std::thread::spawn(move || {
                writer.write_all(&sent).expect("send");
                writer.shutdown(Shutdown::Write).expect("half-close");
            });
            let mut back = Vec::new();
            (&stream).read_to_end(&mut back).expect("receive");
            sender.join().expect("sender");
            assert!(back == bytes, "{} bytes came back", back.len());
        })
    });
}

#[test]
fn more_connections_than_buffers_all_get_their_answers() {
    let mut options = Options::new("test");
    options.abort_on_panic = false;
    options.sizes.recv_buffers = 8;
    options.sizes.recv_buffer_bytes = 4096;
    let done = run_shard_thread(options, |handle| {
        serve_echo(handle, |address| {
            let clients: Vec<_> = (0..64u8)
                .map(|i| {
                    std::thread::spawn(move || {
                        let mut stream = TcpStream::connect(address).expect("connect");
                        for round in 0..20 {
                            let question = vec![i ^ round; 6000];
                            assert!(ask(&mut stream, &question) == question);
                        }
                    })
                })
                .collect();
            clients.into_iter().map(|c| c.join().expect("client")).count()
        })
    });
    assert_eq!(done.expect("the test machine has io_uring"), 64);
}

/// Accepts one connection and hands it to `main`, with the client's end.
async fn pair(handle: &RingHandle) -> (Stream, TcpStream) {
    let listener = handle.listen(LOCALHOST.parse().expect("an address")).expect("listen");
    let address = listener.local_addr().expect("it is bound");
    let client = std::thread::spawn(move || TcpStream::connect(address).expect("connect"));
    let stream = listener.accept(|error| panic!("accept: {error}")).await;
    (stream, join(client).await)
}

#[test]
fn a_peer_that_goes_is_seen_while_a_handler_waits() {
    run(|handle| async move {
        let (mut stream, client) = pair(&handle).await;
        let gone: Rc<Cell<bool>> = Rc::default();
        let seen = gone.clone();
        let watcher = rt::spawn(Queue::Foreground, async move {
            let count = recv(&mut stream, &mut [0; 16]).await.expect("an orderly end");
            seen.set(true);
            count
        });
        rt::sleep(Duration::from_millis(20)).await;
        assert!(!gone.get());
        drop(client);
        assert_eq!(watcher.await, 0);
    });
}

#[test]
fn an_end_of_stream_leaves_the_other_direction_open() {
    run(|handle| async move {
        let (mut stream, client) = pair(&handle).await;
        client.shutdown(Shutdown::Write).expect("half-close");
        assert_eq!(recv(&mut stream, &mut [0; 16]).await.expect("an orderly end"), 0);
        send_all(&mut stream, b"late answer").await.expect("send");
        std::future::poll_fn(|cx| stream.poll_shutdown(cx)).await.expect("half-close");
        let text = join(std::thread::spawn(move || {
            let mut text = String::new();
            (&client).read_to_string(&mut text).expect("receive");
            text
        }));
        assert_eq!(text.await, "late answer");
    });
}

#[test]
fn writing_to_a_peer_that_has_gone_is_an_error_not_a_signal() {
    run(|handle| async move {
        let (mut stream, client) = pair(&handle).await;
        drop(client);
        let mut failed = false;
        for _ in 0..50 {
            failed |= send_all(&mut stream, &[0; 4096]).await.is_err();
            rt::sleep(Duration::from_millis(1)).await;
        }
        assert!(failed);
    });
}

async fn hand_over(stream: &mut Stream, bytes: &[u8]) -> std::io::Result<()> {
    let taken = std::future::poll_fn(|cx| stream.poll_send(cx, bytes)).await?;
    assert_eq!(taken, bytes.len());
    std::future::poll_fn(|cx| stream.poll_hand_over(cx)).await
}

#[test]
fn what_was_handed_over_arrives_in_order_and_a_shutdown_waits_for_it() {
    run(|handle| async move {
        let (mut stream, mut client) = pair(&handle).await;
        let reader = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            client.read_to_end(&mut bytes).expect("receive");
            bytes
        });
        let mut sent = Vec::new();
        for (round, bytes) in [1usize, 4096, 30, 50_000, 7, 4097, 9].into_iter().enumerate() {
            let piece = vec![round as u8; bytes];
            hand_over(&mut stream, &piece).await.expect("send");
            sent.extend_from_slice(&piece);
        }
        std::future::poll_fn(|cx| stream.poll_shutdown(cx)).await.expect("half-close");
        assert!(join(reader).await == sent);
    });
}

#[test]
fn a_failed_send_that_was_handed_over_wakes_its_task() {
    run(|handle| async move {
        let (mut stream, client) = pair(&handle).await;
        // Unread bytes make the close a reset.
        send_all(&mut stream, b"never read").await.expect("send");
        rt::sleep(Duration::from_millis(5)).await;
        drop(client);
        rt::sleep(Duration::from_millis(5)).await;
        let mut polls = 0;
        let failed = std::future::poll_fn(|cx| {
            polls += 1;
            if polls == 1 {
                assert!(matches!(stream.poll_send(cx, b"late"), Poll::Ready(Ok(4))));
            }
            match stream.poll_hand_over(cx) {
                Poll::Ready(Err(error)) => Poll::Ready(error),
                _ => Poll::Pending,
            }
        });
        let error = rt::timeout(Duration::from_secs(5), failed).await.expect("the failure wakes the task");
        assert!(
            matches!(error.kind(), std::io::ErrorKind::BrokenPipe | std::io::ErrorKind::ConnectionReset),
            "{error}"
        );
        assert!(hand_over(&mut stream, b"later").await.is_err());
    });
}

#[test]
fn a_dropped_stream_closes_although_a_receive_is_under_way() {
    run(|handle| async move {
        let (mut stream, client) = pair(&handle).await;
        std::future::poll_fn(|cx| {
            assert!(stream.poll_recv(cx, &mut [0; 16]).is_pending());
            Poll::Ready(())
        })
        .await;
        assert_eq!(handle.metrics().connections, 1);
        rt::sleep(Duration::from_millis(5)).await;
        drop(stream);
        assert_eq!(handle.metrics().connections, 0);
        let ended = join(std::thread::spawn(move || (&client).read(&mut [0; 16]).map_err(|e| e.kind())));
        assert_eq!(ended.await, Ok(0));
    });
}

#[test]
fn accepted_sockets_send_at_once() {
    run(|handle| async move {
        let (stream, _client) = pair(&handle).await;
        let mut value: libc::c_int = 0;
        let mut bytes = std::mem::size_of_val(&value) as u32;
        // SAFETY: both pointers are valid for the call.
        let result = unsafe {
            libc::getsockopt(stream.fd(), libc::IPPROTO_TCP, libc::TCP_NODELAY, (&raw mut value).cast(), &mut bytes)
        };
        assert_eq!((result, value), (0, 1));
    });
}

#[test]
fn two_listeners_share_an_address() {
    run(|handle| async move {
        let first = handle.listen(LOCALHOST.parse().expect("an address")).expect("listen");
        let address = first.local_addr().expect("it is bound");
        handle.listen(address).expect("a second listener on one address");
        let other: SocketAddr = "203.0.113.1:1".parse().expect("an address");
        let error = handle.listen(other).err().expect("not an address of this machine");
        assert!(error.to_string().contains("203.0.113.1:1"), "{error}");
    });
}
