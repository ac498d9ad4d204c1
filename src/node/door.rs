//! What other nodes meet at a shard's endpoint: nobody before the shard is open, and nobody once it stops.

use std::cell::{Cell, OnceCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use narad_shards::peer::LocalBoxFuture;
use narad_shards::remote::{ConnectionId, Hello, RemoteService, Service};
use narad_shards::rt::{self, sync::Notify};
use narad_shards::wire::{status, Incoming, Kind, Outgoing, Refusal};

use crate::peer::NOT_OPEN_YET;

/// A start that takes longer is worth a warning on both sides.
const STARTING: Duration = Duration::from_secs(30);

/// How long requests that are being answered may keep a stop waiting.
const CLOSE_PATIENCE: Duration = Duration::from_secs(2);

/// Stands before the shard's [`RemoteService`].
pub(super) struct Door {
    /// When this process started.
    started: std::time::Instant,
    service: OnceCell<RemoteService>,
    closed: Cell<bool>,
    inside: Rc<Cell<usize>>,
    left: Notify,
}

impl Door {
    pub fn new(started: std::time::Instant) -> Door {
        Door { started, service: OnceCell::new(), closed: Cell::new(false), inside: Rc::default(), left: Notify::new() }
    }

    pub fn open(&self, service: RemoteService) {
        let _ = self.service.set(service);
    }

    /// Answers no new request, and waits for those under way.
    pub async fn close(&self) {
        self.closed.set(true);
        let until = rt::now() + CLOSE_PATIENCE;
        while self.inside.get() > 0 && rt::now() < until {
            let _ = rt::timeout(until - rt::now(), self.left.notified()).await;
        }
    }
}

/// One request inside; also leaves when its future is dropped.
struct Inside(Rc<Cell<usize>>, Notify);

impl Inside {
    fn enter(door: &Door) -> Inside {
        door.inside.set(door.inside.get() + 1);
        Inside(door.inside.clone(), door.left.clone())
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
        self.1.notify_all();
    }
}

/// Peers that come while a node starts are nothing to look at; they come again.
fn not_open(up: Duration) -> String {
    match up < STARTING {
        true => NOT_OPEN_YET.to_owned(),
        false => format!("this shard is not open {} s after its node started: see that node's log", up.as_secs()),
    }
}

impl Service for Door {
    fn hello(&self) -> Hello {
        self.service.get().map(Service::hello).unwrap_or_default()
    }

    fn met(&self, connection: ConnectionId, from: &Hello, address: SocketAddr) -> Result<(), String> {
        match self.service.get() {
            Some(service) => service.met(connection, from, address),
            None => Err(not_open(self.started.elapsed())),
        }
    }

    fn serve(&self, connection: ConnectionId, request: Incoming) -> LocalBoxFuture<'static, Option<Outgoing>> {
        match self.service.get() {
            Some(service) if !self.closed.get() => {
                let inside = Inside::enter(self);
                let answered = service.serve(connection, request);
                Box::pin(async move {
                    let answer = answered.await;
                    drop(inside);
                    answer
                })
            }
            _ => {
                let header = request.header;
                let refusal = Refusal::new(status::UNAVAILABLE, "this shard is not open, or is stopping".to_owned());
                let answer = (header.kind == Kind::Request).then(|| refusal.reply(header.operation, header.lane));
                Box::pin(std::future::ready(answer))
            }
        }
    }

    fn cancelled_late(&self, connection: ConnectionId, request_id: u64) {
        if let Some(service) = self.service.get() {
            service.cancelled_late(connection, request_id);
        }
    }

    fn lost(&self, connection: ConnectionId) {
        if let Some(service) = self.service.get() {
            service.lost(connection);
        }
    }
}
