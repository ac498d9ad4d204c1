//! Listeners at work: they accept, each connection is served in a task of its own, and they stop in good order.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

use narad_shards::io::Listener;
use narad_shards::rt::sync::Notify;
use narad_shards::rt::{self, Queue};

use crate::http::{serve_connection, Broker, HttpContext, Socket};

/// How often a listener that is at its cap looks whether a place is free again, should another shard have freed it.
const FULL_INTERVAL: Duration = Duration::from_millis(20);
/// A stop takes who has connected by then: the kernel would reset them, with their requests. So long nobody more may have
/// come for it to be over, and so long it may take at most.
const LAST_ACCEPT: Duration = Duration::from_millis(5);
const LAST_ACCEPTS: Duration = Duration::from_millis(100);

pub struct Serving<B> {
    context: Rc<HttpContext<B>>,
    /// Connections, and listeners that still accept.
    open: Cell<usize>,
    changed: Notify,
    stopping: Cell<bool>,
}

impl<B: Broker> Serving<B> {
    /// Starts accepting on all of them.
    pub fn start(listeners: Vec<Listener>, context: Rc<HttpContext<B>>) -> Rc<Serving<B>> {
        let serving =
            Rc::new(Serving { context, open: Cell::new(0), changed: Notify::new(), stopping: Cell::new(false) });
        for listener in listeners {
            serving.begin();
            let serving = serving.clone();
            rt::spawn(Queue::Foreground, async move {
                accept(&serving, listener).await;
                serving.end();
            });
        }
        serving
    }

    fn begin(&self) {
        self.open.set(self.open.get() + 1);
    }

    fn end(&self) {
        self.open.set(self.open.get() - 1);
        if self.stopping.get() {
            self.changed.notify_all();
        }
    }

    /// Goes on accepting, and answers each connection once. Resolves when the requests that had begun before are
    /// answered, after `within` at the latest.
    pub async fn drain(&self, within: Duration) {
        let _ = rt::timeout(within, self.context.drain()).await; // what is left finds its end in `stop`
    }

    /// Accepts who has connected by now and nobody more, and lets requests in flight finish, at most `within`.
    pub async fn stop(&self, within: Duration) {
        self.stopping.set(true);
        self.changed.notify_all();
        self.context.begin_shutdown();
        let finished = async {
            loop {
                let changed = self.changed.notified();
                if self.open.get() == 0 {
                    return;
                }
                changed.await;
            }
        };
        if rt::timeout(within, finished).await.is_err() {
            tracing::warn!(connections = self.open.get(), "connections were still busy when the shutdown grace ended");
        }
    }
}

/// Errors of accept never end a listener; they are logged once a second at most.
async fn accept<B: Broker>(serving: &Rc<Serving<B>>, listener: Listener) {
    let reported: Arc<AtomicU64> = Arc::default();
    let mut last_until = None;
    loop {
        let next = listener.accept(|error| {
            let now = rt::wall_clock_ms();
            if now.saturating_sub(reported.swap(now, Ordering::Relaxed)) > 1_000 {
                tracing::warn!(%error, "accepting a connection failed; the listener goes on");
            }
        });
        // Listening for a stop starts before looking: one that comes in between is heard.
        let stopped = serving.changed.notified();
        let stream = if serving.stopping.get() {
            let until = *last_until.get_or_insert_with(|| rt::now() + LAST_ACCEPTS);
            if rt::now() >= until {
                return;
            }
            let Ok(stream) = rt::timeout(LAST_ACCEPT, next).await else { return };
            stream
        } else {
            let Ok(stream) = rt::first_of(next, stopped).await else { continue };
            stream
        };
        // Beyond the cap a connection waits, it is not refused. A slot is taken only for somebody who
        // is there: one held ahead of the accept would be one that another shard's clients can never have.
        let slot = loop {
            match serving.context.node.connection() {
                Some(slot) => break slot,
                None if serving.stopping.get() => return,
                None => rt::sleep(FULL_INTERVAL).await,
            }
        };
        let Ok(peer) = stream.peer_addr() else { continue };
        serving.begin();
        let serving = serving.clone();
        let queue = Rc::new(Cell::new(Queue::Foreground));
        let wanted = queue.clone();
        let serve = async move {
            serve_connection(Socket::new(stream), peer.ip(), serving.context.clone(), wanted).await;
            drop(slot);
            serving.end();
        };
        rt::spawn_following(queue, Box::pin(serve));
    }
}
