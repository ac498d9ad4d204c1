//! The same, over the kernel's sockets on a ring. Nothing here asserts how long something takes.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use narad_shards::rt::ring::{run_shard_thread, Options};

use super::*;
use crate::http::Socket;
use crate::node::serving::Serving;

/// Serves `connections` one after the other on a ring, while `client` runs on a thread of its own.
fn serve(connections: usize, client: impl FnOnce(SocketAddr) + Send + 'static) {
    let mut options = Options::new("http-test");
    options.abort_on_panic = false;
    options.sizes.in_flight_max = 3 * 1024;
    options.sizes.memlock_budget_bytes = 256 << 10;
    let served = run_shard_thread(options, move |handle| async move {
        let world = World::new(HttpSettings::default(), NodeLimits::new(0, 0));
        world.broker().add_topic("t", 3);
        let listener = handle.listen(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let client = std::thread::spawn(move || client(address));
        for _ in 0..connections {
            let stream = listener.accept(|error| panic!("accept: {error}")).await;
            let peer = stream.peer_addr().expect("connected").ip();
            serve_connection(Socket::new(stream), peer, world.ctx.clone(), foreground()).await;
        }
        // Not on this thread: the last socket is closed by the ring, which must go on.
        rt::blocking(move || client.join()).await.expect("the client is content");
        (world.broker().stored.take(), world.broker().parked.get())
    });
    let (stored, parked) = served.expect("the machine has io_uring");
    assert_eq!(parked, 0, "consumes end with their clients");
    assert!(stored.iter().all(|record| record.payload.len() == 700_000));
}

fn read_to_end(mut stream: TcpStream) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("text until the server closes");
    text
}

#[test]
fn requests_over_tcp() {
    serve(1, |address| {
        let mut stream = TcpStream::connect(address).expect("connect");
        let large = vec![b'x'; 700_000];
        stream.write_all(&request("POST", "/v1/topics/t/produce?key=k", JSON, &large)).expect("send");
        stream
            .write_all(&request("GET", "/v1/topics/t/consume?wait=10ms", "Connection: close\r\n", b""))
            .expect("send");
        let answers = read_to_end(stream);
        assert!(answers.starts_with("HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n"), "{answers}");
        assert!(answers.contains("\r\n\r\nHTTP/1.1 204 No Content\r\n"), "{answers}");
    });
}

#[test]
fn n37_a_long_poll_ends_when_its_socket_closes() {
    serve(2, |address| {
        for half in [false, true] {
            let mut stream = TcpStream::connect(address).expect("connect");
            stream.write_all(&request("GET", "/v1/topics/t/consume?wait=10s", "", b"")).expect("send");
            std::thread::sleep(std::time::Duration::from_millis(20));
            if half {
                stream.shutdown(std::net::Shutdown::Write).expect("connected");
                assert_eq!(read_to_end(stream), "", "nothing is sent to a client that left");
            }
        }
    });
}

#[test]
fn an_early_answer_survives_a_client_that_keeps_sending() {
    serve(2, |address| {
        for head in [
            format!("POST /v1/topics/t/produce HTTP/1.1\r\n{JSON}Content-Length: 2000000\r\n\r\n"),
            format!("GET / HTTP/1.1\r\nX: {}\r\n", "x".repeat(70_000)),
        ] {
            let mut stream = TcpStream::connect(address).expect("connect");
            stream.write_all(head.as_bytes()).expect("send");
            stream.write_all(&[b'y'; 2_000_000]).expect("the server reads on");
            stream.shutdown(std::net::Shutdown::Write).expect("connected");
            let answer = read_to_end(stream);
            assert!(answer.starts_with("HTTP/1.1 413 ") || answer.starts_with("HTTP/1.1 431 "), "{answer}");
        }
    });
}

#[test]
fn a_stop_answers_who_has_connected_by_then() {
    let mut options = Options::new("http-test");
    options.abort_on_panic = false;
    options.sizes.in_flight_max = 3 * 1024;
    options.sizes.memlock_budget_bytes = 256 << 10;
    let answers = run_shard_thread(options, move |handle| async move {
        let world = World::new(HttpSettings::default(), NodeLimits::new(0, 0));
        let listener = handle.listen(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let serving = Serving::start(vec![listener], world.ctx.clone());
        // On this thread: nobody accepts meanwhile.
        let clients: Vec<TcpStream> = (0..5)
            .map(|_| {
                let mut stream = TcpStream::connect(address).expect("into the kernel's queue");
                stream.write_all(&request("GET", "/healthz", "", b"")).expect("sent");
                stream
            })
            .collect();
        serving.stop(std::time::Duration::from_secs(10)).await;
        rt::blocking(move || clients.into_iter().map(read_to_end).collect::<Vec<_>>()).await
    });
    for answer in answers.expect("the machine has io_uring") {
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.contains("connection: close"), "{answer}");
    }
}
