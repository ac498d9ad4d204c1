//! Endpoints against each other, and against peers that misbehave, on real sockets.

mod calls;
mod hostile;
mod intake;
mod liveness;
mod raw;
mod tls;

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use narad_shards::io::{AlignedBuf, Slice};
use narad_shards::peer::LocalBoxFuture;
use narad_shards::remote::{CallError, ConnectionId, Hello, Service, Transport};
use narad_shards::rt::ring::{run_shard_thread, Options, RingHandle};
use narad_shards::rt::{self};
use narad_shards::wire::{status, Incoming, Kind, Lane, Outgoing};

use super::{PeerEndpoint, PeerSettings};

const SECRET: &[u8] = b"what only nodes know";

/// Runs `main` on a ring of its own; panics reach the test.
fn run<T: 'static, F: std::future::Future<Output = T> + 'static>(main: impl FnOnce(RingHandle) -> F) -> T {
    let mut options = Options::new("test");
    options.abort_on_panic = false;
    options.sizes.in_flight_max = 3 * 1024;
    options.sizes.memlock_budget_bytes = 256 << 10;
    run_shard_thread(options, main).expect("the test machine has io_uring")
}

/// Sends archive and payload back.
const ECHO: u16 = 100;
/// Never answers.
const HANG: u16 = 101;
/// Answers without a payload.
const SWALLOW: u16 = 102;

/// A service that counts what happens to it.
#[derive(Default)]
struct Counting {
    hello: Hello,
    refuse: Option<String>,
    met: RefCell<Vec<Hello>>,
    lost: Cell<u32>,
    one_way: RefCell<Vec<Vec<u8>>>,
    begun: Cell<u32>,
    /// Handlers that were dropped before they had answered.
    dropped: Rc<Cell<u32>>,
    late: RefCell<Vec<u64>>,
}

impl Counting {
    fn new(node: &str, boot_id: u64) -> Rc<Counting> {
        let hello = Hello { node: node.to_owned(), boot_id, shard: Some(1), ..Hello::default() };
        Rc::new(Counting { hello, ..Counting::default() })
    }
}

struct Dropped(Rc<Cell<u32>>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.set(self.0.get() + 1);
    }
}

impl Service for Counting {
    fn hello(&self) -> Hello {
        self.hello.clone()
    }

    fn met(&self, _: ConnectionId, from: &Hello, _: SocketAddr) -> Result<(), String> {
        self.met.borrow_mut().push(from.clone());
        self.refuse.clone().map_or(Ok(()), Err)
    }

    fn serve(&self, _: ConnectionId, request: Incoming) -> LocalBoxFuture<'static, Option<Outgoing>> {
        self.begun.set(self.begun.get() + 1);
        let header = request.header;
        if header.kind == Kind::OneWay {
            self.one_way.borrow_mut().push(request.archive().to_vec());
            return Box::pin(async { None });
        }
        let reply = move |archive: &[u8], payload: Slice| Outgoing {
            operation: header.operation,
            version: 1,
            lane: header.lane,
            status: status::OK,
            budget: Duration::ZERO,
            credit_bytes: 77,
            archive: Slice::copy_from(archive),
            payload: vec![payload],
        };
        let dropped = Dropped(self.dropped.clone());
        Box::pin(async move {
            let answer = match header.operation {
                ECHO => reply(request.archive(), request.payload()),
                SWALLOW => reply(b"", Slice::empty()),
                _ => std::future::pending().await,
            };
            std::mem::forget(dropped);
            Some(answer)
        })
    }

    fn cancelled_late(&self, _: ConnectionId, request_id: u64) {
        self.late.borrow_mut().push(request_id);
    }

    fn lost(&self, _: ConnectionId) {
        self.lost.set(self.lost.get() + 1);
    }
}

fn secret(secret: &[u8]) -> PeerSettings {
    PeerSettings { secret: Some(secret.into()), ..PeerSettings::default() }
}

fn loopback(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

fn start(handle: &RingHandle, service: &Rc<Counting>, settings: PeerSettings) -> Rc<PeerEndpoint> {
    PeerEndpoint::start(handle, loopback(0), service.clone(), settings).expect("a free port on loopback")
}

fn question(operation: u16, lane: Lane, archive: &[u8], budget_ms: u64) -> Outgoing {
    Outgoing {
        operation,
        version: 1,
        lane,
        status: 0,
        budget: Duration::from_millis(budget_ms),
        credit_bytes: 0,
        archive: Slice::copy_from(archive),
        payload: Vec::new(),
    }
}

/// A payload whose bytes tell their place.
fn pattern(bytes: usize) -> Slice {
    let mut buf = AlignedBuf::zeroed(bytes);
    buf.truncate(bytes);
    for (index, byte) in buf.iter_mut().enumerate() {
        *byte = (index / 251) as u8 ^ index as u8;
    }
    buf.freeze()
}

async fn ask(from: &PeerEndpoint, to: SocketAddr) -> Result<Incoming, CallError> {
    from.call(to, question(ECHO, Lane::Ack, b"are you there", 5_000)).await
}

/// Waits until `holds`, for as long as a slow machine may need.
async fn until(mut holds: impl FnMut() -> bool) {
    for _ in 0..2_000 {
        if holds() {
            return;
        }
        rt::sleep(Duration::from_millis(5)).await;
    }
    panic!("it never came about");
}
