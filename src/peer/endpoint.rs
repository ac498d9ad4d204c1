//! An endpoint: one socket, one task that drives everything on it, and the door for requests.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use narad_shards::io::ring::Udp;
use narad_shards::peer::LocalBoxFuture;
use narad_shards::remote::{CallError, ConnectionId, Hello, Service, Transport, CALL_BUDGET_MIN};
use narad_shards::rt::ring::RingHandle;
use narad_shards::rt::sync::{oneshot, Receiver};
use narad_shards::rt::{self, Instant, Queue, Sleep};
use narad_shards::wire::{Incoming, Kind, Lane, Outgoing};

use super::link::{Event, Link};
use super::metrics::{LinkFigures, PeerMetrics};
use super::queue::Recalled;
use super::state::State;
use super::tls::Tls;
use super::PeerSettings;

/// Rounds of one poll, and bytes that one takes from the socket: other tasks of the thread have their turn in between.
const ROUNDS_MAX: usize = 32;
const RECEIVE_BYTES_MAX: usize = 256 << 10;
/// What a receive counts for at least.
const RECEIVE_BYTES_MIN: usize = 4 << 10;
/// Polls that may leave something in the socket before what is due is looked at: together they empty its buffer.
const UNDRAINED_MAX: u32 = 16;
/// How long an endpoint that stops waits for its farewells to leave.
const FAREWELL: Duration = Duration::from_millis(200);
/// Pause after the socket would not receive.
const RECEIVE_BACKOFF: Duration = Duration::from_millis(100);

struct Inner {
    udp: Udp,
    service: Rc<dyn Service>,
    state: RefCell<State>,
    driver: RefCell<Option<Waker>>,
    stopping: Cell<bool>,
    /// Until then the socket is not asked.
    receive_again: Cell<Instant>,
    /// Polls in a row that left something in the socket.
    undrained: Cell<u32>,
    /// It was said that datagrams are too long.
    told_size: Cell<bool>,
}

/// Carries frames to and from other endpoints. All of it runs on the thread that started it.
pub struct PeerEndpoint {
    inner: Rc<Inner>,
    ended: RefCell<Option<rt::Task<()>>>,
    local: SocketAddr,
}

impl PeerEndpoint {
    /// Binds `bind` and serves from then on. Errors say which address or file is at fault.
    pub fn start(
        handle: &RingHandle,
        bind: SocketAddr,
        service: Rc<dyn Service>,
        settings: PeerSettings,
    ) -> io::Result<Rc<PeerEndpoint>> {
        let udp = handle.udp(bind, settings.offload)?;
        let local = udp.local_addr()?;
        let (receive, send) = udp.buffer_bytes();
        let mut state = State::new(settings, local).map_err(io::Error::other)?;
        (state.metrics.socket_receive_bytes, state.metrics.socket_send_bytes) = (receive as u64, send as u64);
        tracing::info!(address = %local, receive_bytes = receive, send_bytes = send, "the peer plane listens");
        let inner = Rc::new(Inner {
            udp,
            service,
            state: RefCell::new(state),
            driver: RefCell::default(),
            stopping: Cell::new(false),
            receive_again: Cell::new(Instant(0)),
            undrained: Cell::new(0),
            told_size: Cell::new(false),
        });
        let driven = inner.clone();
        // A share of its own: what peers wait for must not queue behind every connection that produces.
        let task = rt::spawn(Queue::Commit, async move {
            let mut timer = None;
            std::future::poll_fn(|cx| driven.drive(cx, &mut timer)).await;
        });
        Ok(Rc::new(PeerEndpoint { inner, ended: RefCell::new(Some(task)), local }))
    }

    /// Where it listens; tells the port when 0 was asked for.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Connections that were dialled from here and are up.
    pub fn links(&self) -> Vec<LinkFigures> {
        self.inner.state.borrow().links()
    }

    pub fn metrics(&self) -> PeerMetrics {
        self.inner.state.borrow().measure()
    }

    /// Reads the certificates again, for new connections. A set that cannot be used leaves the former one in place.
    pub fn reload(&self) -> Result<(), String> {
        let mut state = self.inner.state.borrow_mut();
        state.tls = Tls::new(&state.settings)?;
        Ok(())
    }

    /// Tells every peer that this endpoint ends, and fails what waits. Nothing is carried afterwards.
    pub async fn stop(&self) {
        self.inner.stopping.set(true);
        self.inner.wake();
        let task = self.ended.borrow_mut().take();
        if let Some(task) = task {
            // Should a peer's path be stuck, it will find out by itself.
            let _ = rt::timeout(FAREWELL, task).await;
        }
    }
}

impl Drop for PeerEndpoint {
    fn drop(&mut self) {
        self.inner.stopping.set(true);
        self.inner.wake();
    }
}

impl Transport for PeerEndpoint {
    fn call(&self, to: SocketAddr, request: Outgoing) -> LocalBoxFuture<'static, Result<Incoming, CallError>> {
        let budget = request.budget.max(CALL_BUDGET_MIN);
        // Queued now, so that calls leave in the order in which they were made.
        let call = self.inner.begin_call(to, request);
        Box::pin(async move {
            let mut call = call?;
            match rt::timeout(budget, &mut call.reply).await {
                Ok(Some(result)) => {
                    call.over = true;
                    result
                }
                Ok(None) => Err(CallError::Unknown("the peer plane has stopped".to_owned())),
                Err(rt::Elapsed) => Err(call.timed_out(to, budget)),
            }
        })
    }

    fn send(&self, to: SocketAddr, message: Outgoing) {
        let mut state = self.inner.state.borrow_mut();
        if !self.inner.stopping.get() {
            if let Ok(link) = state.link_to(to) {
                // Lost when there is no room: nobody is told, as for any other loss.
                let _ = link.queue_request(Kind::OneWay, message);
            }
        }
        drop(state);
        self.inner.wake();
    }

    fn hello_of(&self, to: SocketAddr) -> Option<Arc<Hello>> {
        self.inner.state.borrow().open_to(to)?.hello()
    }

    fn connection_to(&self, to: SocketAddr) -> Option<ConnectionId> {
        self.inner.state.borrow().open_to(to).map(|link| link.id)
    }
}

/// Somebody waits for a reply. Dropped, nobody does any more.
struct Waiting {
    inner: Rc<Inner>,
    link: ConnectionId,
    lane: Lane,
    request_id: u64,
    reply: Receiver<Result<Incoming, CallError>>,
    over: bool,
}

impl Waiting {
    fn give_up(&mut self, timed_out: bool) -> Recalled {
        self.over = true;
        let mut state = self.inner.state.borrow_mut();
        state.metrics.calls_timed_out += u64::from(timed_out);
        let give_up = |link: &mut Link| link.give_up(self.lane, self.request_id, timed_out);
        let recalled = state.link(self.link).map_or(Recalled::Begun, give_up);
        drop(state);
        self.inner.wake();
        recalled
    }

    fn timed_out(&mut self, to: SocketAddr, budget: Duration) -> CallError {
        let budget = budget.as_millis();
        match self.give_up(true) {
            Recalled::Unsent => CallError::NotSent(format!("nothing could be sent to {to} within {budget} ms")),
            Recalled::Begun => CallError::Unknown(format!("{to} has not answered within {budget} ms")),
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if !self.over {
            self.give_up(false);
        }
    }
}

impl Inner {
    fn wake(&self) {
        let driver = self.driver.borrow();
        if let Some(waker) = driver.as_ref() {
            waker.wake_by_ref();
        }
    }

    fn begin_call(self: &Rc<Self>, to: SocketAddr, request: Outgoing) -> Result<Waiting, CallError> {
        if self.stopping.get() {
            return Err(CallError::NotSent("the node is stopping".to_owned()));
        }
        let mut state = self.state.borrow_mut();
        state.metrics.calls += 1;
        let (lane, link) = (request.lane, state.link_to(to)?);
        let (link, queued) = (link.id, link.request(request, rt::now()));
        drop(state);
        self.wake();
        let (request_id, reply) = queued?;
        Ok(Waiting { inner: self.clone(), link, lane, request_id, reply, over: false })
    }

    /// One poll of the endpoint's task: takes what is there, does what is due, sends what can be sent.
    fn drive(self: &Rc<Self>, cx: &mut Context<'_>, timer: &mut Option<Sleep>) -> Poll<()> {
        *self.driver.borrow_mut() = Some(cx.waker().clone());
        let now = rt::now();
        let stopping = self.stopping.get();
        if stopping {
            self.state.borrow_mut().stop();
        }
        let mut events = Vec::new();
        let mut received = 0;
        for round in 0.. {
            let mut progress = false;
            while received < RECEIVE_BYTES_MAX {
                let Some(bytes) = self.receive(cx, now) else { break };
                (progress, received) = (true, received + bytes.max(RECEIVE_BYTES_MIN));
            }
            // Time is looked at after what has come: what a pause of this process held up must not look like silence.
            let drained = received < RECEIVE_BYTES_MAX;
            let undrained = if drained { 0 } else { self.undrained.get() + u32::from(round == 0) };
            let look = drained || undrained >= UNDRAINED_MAX;
            self.undrained.set(if look { 0 } else { undrained });
            progress |= self.state.borrow_mut().advance(now, look, &mut events);
            for event in events.drain(..) {
                self.act(event, now);
            }
            progress |= self.send(cx, now);
            if !progress {
                break;
            }
            if round == ROUNDS_MAX || !drained {
                cx.waker().wake_by_ref();
                break;
            }
        }
        if stopping && !self.udp.is_sending() && self.state.borrow().outbox.is_empty() {
            return Poll::Ready(());
        }
        self.arm(cx, timer)
    }

    fn arm(&self, cx: &mut Context<'_>, timer: &mut Option<Sleep>) -> Poll<()> {
        let again = Some(self.receive_again.get()).filter(|at| *at > Instant(0));
        let next = self.state.borrow().next_timer().into_iter().chain(again).min();
        *timer = next.map(rt::sleep_until);
        if timer.as_mut().is_some_and(|timer| Pin::new(timer).poll(cx).is_ready()) {
            // Due already: time stands still during a poll.
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }

    /// Takes one lot from the socket; how many bytes it was.
    fn receive(&self, cx: &mut Context<'_>, now: Instant) -> Option<usize> {
        if self.receive_again.get() > now {
            return None;
        }
        self.receive_again.set(Instant(0));
        match self.udp.poll_receive(cx) {
            Poll::Pending => None,
            Poll::Ready(Ok(mut received)) => {
                let mut state = self.state.borrow_mut();
                let (from, at, mut bytes) = (received.from, received.to, 0);
                for datagram in received.datagrams() {
                    bytes += datagram.len();
                    state.receive(from, at, datagram, now);
                }
                Some(bytes)
            }
            Poll::Ready(Err(error)) => {
                self.state.borrow_mut().metrics.receive_errors += 1;
                tracing::warn!(%error, "the peer plane's socket does not receive; it is tried again");
                self.receive_again.set(now + RECEIVE_BACKOFF);
                None
            }
        }
    }

    fn send(&self, cx: &mut Context<'_>, now: Instant) -> bool {
        match self.udp.poll_sent(cx) {
            Poll::Pending => return false,
            Poll::Ready(None) => {}
            Poll::Ready(Some(sent)) => {
                let mut state = self.state.borrow_mut();
                let to = sent.route.to;
                if let Err(error) = &sent.result {
                    state.metrics.send_errors += 1;
                    let whole = sent.segment_bytes.is_none();
                    if whole && error.raw_os_error() == Some(libc::EMSGSIZE) && !self.told_size.replace(true) {
                        tracing::warn!(peer = %to, bytes = sent.data.len(), "a datagram is longer than the path to this \
                            peer takes: set a smaller datagram size, or a larger MTU");
                    }
                }
                if state.outbox.sent(sent) {
                    state.metrics.offload_refused += 1;
                    tracing::warn!(peer = %to, "the kernel does not cut datagrams for this peer; they go one by one");
                }
            }
        }
        let batch = self.state.borrow_mut().next_batch(now);
        match batch {
            Some(batch) => {
                self.udp.send(batch.route, batch.data, batch.segment_bytes);
                true
            }
            None => false,
        }
    }

    /// Calls the service, which may call back.
    fn act(self: &Rc<Self>, event: Event, now: Instant) {
        match event {
            Event::Greet(id) => {
                let hello = self.service.hello();
                if let Some(link) = self.state.borrow_mut().link(id) {
                    link.greet(&hello);
                }
            }
            Event::Met(id, hello, address) => {
                let verdict = self.service.met(id, &hello, address);
                self.state.borrow_mut().introduced(id, verdict, now);
            }
            Event::Request(id, lane, request) => self.serve(id, lane, request),
            Event::Cancel(id, request_id) => {
                let served = self.state.borrow_mut().link(id).map(|link| link.serving.remove(&request_id));
                if matches!(served, Some(None)) {
                    self.service.cancelled_late(id, request_id);
                }
            }
            Event::Lost(id) => self.service.lost(id),
        }
    }

    fn serve(self: &Rc<Self>, id: ConnectionId, lane: Lane, request: Incoming) {
        let header = request.header;
        let (wanted, unwanted) = oneshot();
        {
            let mut state = self.state.borrow_mut();
            state.metrics.requests_served += 1;
            let Some(link) = state.link(id).filter(|link| link.is_open()) else { return };
            link.serving.insert(header.request_id, wanted);
        }
        let answer = self.service.serve(id, request);
        let inner = self.clone();
        let queue = match lane {
            Lane::Consensus | Lane::Control => Queue::Foreground,
            Lane::Ack | Lane::Consume => Queue::Consume,
            Lane::Produce => Queue::Commit,
            Lane::Bulk => Queue::Background,
        };
        rt::spawn(queue, async move {
            // The sender is only ever dropped: nobody waits for the answer.
            let Err(reply) = rt::first_of(unwanted, answer).await else { return };
            let mut state = inner.state.borrow_mut();
            let Some(link) = state.link(id) else { return };
            link.serving.remove(&header.request_id);
            if let (Some(reply), Kind::Request) = (reply, header.kind) {
                link.reply(lane, &header, reply);
            }
            drop(state);
            inner.wake();
        });
    }
}
