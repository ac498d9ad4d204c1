//! A server for tests that answers as it is told: one thread for each connection.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::Duration;

pub const ACCEPTED: &[u8] = b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n";

/// What to do about one request.
pub enum Reaction {
    /// These bytes.
    Say(Vec<u8>),
    /// These bytes, one in each packet.
    Dribble(Vec<u8>),
    /// A pause, then these bytes.
    Later(Duration, Vec<u8>),
    /// These bytes, perhaps half an answer, and the end of the connection.
    Cut(Vec<u8>),
}

/// Serves until the test's process ends; `react` is asked with the number of the request, over all connections.
pub struct FakeServer {
    pub address: SocketAddr,
    pub connections: Arc<AtomicUsize>,
    pub requests: Arc<AtomicUsize>,
}

impl FakeServer {
    pub fn start(react: impl Fn(usize) -> Reaction + Send + Sync + 'static) -> FakeServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (connections, requests): (Arc<AtomicUsize>, Arc<AtomicUsize>) = Default::default();
        let react = Arc::new(react);
        let (connected, requested) = (connections.clone(), requests.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                connected.fetch_add(1, Ordering::SeqCst);
                let (react, requested) = (react.clone(), requested.clone());
                std::thread::spawn(move || serve(stream, &*react, &requested));
            }
        });
        FakeServer { address, connections, requests }
    }
}

fn serve(
    mut stream: TcpStream,
    react: &(impl Fn(usize) -> Reaction + ?Sized),
    requested: &AtomicUsize,
) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut received = Vec::new();
    loop {
        let Some(bytes) = request_bytes(&received) else {
            let mut buffer = [0u8; 4096];
            match stream.read(&mut buffer)? {
                0 => return Ok(()),
                bytes => received.extend_from_slice(&buffer[..bytes]),
            }
            continue;
        };
        received.drain(..bytes);
        match react(requested.fetch_add(1, Ordering::SeqCst)) {
            Reaction::Say(bytes) => stream.write_all(&bytes)?,
            Reaction::Dribble(bytes) => {
                for byte in bytes {
                    stream.write_all(&[byte])?;
                    std::thread::sleep(Duration::from_micros(100));
                }
            }
            Reaction::Later(pause, bytes) => {
                std::thread::sleep(pause);
                stream.write_all(&bytes)?;
            }
            Reaction::Cut(bytes) => return stream.write_all(&bytes),
        }
    }
}

/// Length of the whole request at the start of `received`, if there is one.
fn request_bytes(received: &[u8]) -> Option<usize> {
    let head = received.windows(4).position(|bytes| bytes == b"\r\n\r\n")? + 4;
    let text = std::str::from_utf8(&received[..head]).unwrap();
    let length = text.lines().find_map(|line| line.strip_prefix("Content-Length: "));
    let total = head + length.map_or(0, |length| length.parse::<usize>().unwrap());
    (received.len() >= total).then_some(total)
}
