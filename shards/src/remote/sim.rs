//! The simulated network (E46): it carries whole frames between endpoints, with delays, out of order across lanes and in
//! order within one, cuts connections with the outcome of their calls unknown, and never brings a frame twice.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::{CallError, ConnectionId, Hello, Service, Transport};
use crate::io::AlignedBuf;
use crate::peer::LocalBoxFuture;
use crate::rt::sim::{NodeTag, Rng, Sim};
use crate::rt::sync::{oneshot, Notify, Sender};
use crate::rt::{self, Instant};
use crate::wire::{Header, Incoming, Kind, Lane, Outgoing, HEADER_BYTES};

/// Owns the frames under way. Never killed.
const NETWORK: NodeTag = NodeTag::MAX - 1;
/// A dial that nobody answers.
const DIAL: Duration = Duration::from_secs(1);
/// After a failed dial calls fail at once for so long.
const DIAL_BACKOFF: Duration = Duration::from_millis(250);
/// A side that has become silent is found out within this time (E40).
const SILENCE_MAX: Duration = Duration::from_millis(2_500);

struct Endpoint {
    node: NodeTag,
    service: Rc<dyn Service>,
}

struct Connection {
    id: ConnectionId,
    nodes: (NodeTag, NodeTag),
    hello: Arc<Hello>,
    /// When the last frame of a lane arrives, by direction.
    lanes: BTreeMap<(Lane, bool), Instant>,
    /// Calls without a reply, on the side that dialled.
    calls: BTreeMap<u64, Sender<Result<Incoming, CallError>>>,
    /// Handlers at work on the other side.
    handlers: BTreeMap<u64, Notify>,
}

type Route = (SocketAddr, SocketAddr);

struct State {
    sim: Sim,
    rng: RefCell<Rng>,
    endpoints: RefCell<BTreeMap<SocketAddr, Endpoint>>,
    connections: RefCell<BTreeMap<Route, Connection>>,
    failed_dials: RefCell<BTreeMap<Route, Instant>>,
    cuts: RefCell<BTreeSet<(NodeTag, NodeTag)>>,
    /// Nodes that stand still: they answer no dial.
    paused: RefCell<BTreeSet<NodeTag>>,
    delay: Cell<(Duration, Duration)>,
    serial: Cell<u64>,
    frames: Cell<u64>,
}

#[derive(Clone)]
pub struct SimNetwork {
    state: Rc<State>,
}

/// What one endpoint sends through.
struct SimTransport {
    network: SimNetwork,
    from: SocketAddr,
}

fn pair(a: NodeTag, b: NodeTag) -> (NodeTag, NodeTag) {
    (a.min(b), a.max(b))
}

impl SimNetwork {
    pub fn new(sim: Sim, seed: u64) -> SimNetwork {
        let state = State {
            sim,
            rng: RefCell::new(Rng::new(seed)),
            endpoints: RefCell::default(),
            connections: RefCell::default(),
            failed_dials: RefCell::default(),
            cuts: RefCell::default(),
            paused: RefCell::default(),
            delay: Cell::new((Duration::from_micros(20), Duration::from_micros(300))),
            serial: Cell::new(0),
            frames: Cell::new(0),
        };
        SimNetwork { state: Rc::new(state) }
    }

    /// What the endpoint at `address` sends through. It can send before it listens.
    pub fn transport(&self, address: SocketAddr) -> Rc<dyn Transport> {
        Rc::new(SimTransport { network: self.clone(), from: address })
    }

    /// From now on the endpoint answers.
    pub fn listen(&self, node: NodeTag, address: SocketAddr, service: Rc<dyn Service>) {
        self.state.endpoints.borrow_mut().insert(address, Endpoint { node, service });
    }

    /// Every frame takes a time between these.
    pub fn set_delay(&self, least: Duration, most: Duration) {
        self.state.delay.set((least, most));
    }

    /// Frames sent so far.
    pub fn frames(&self) -> u64 {
        self.state.frames.get()
    }

    /// The node's process has ended. To be called before its tasks are dropped.
    pub fn crash(&self, node: NodeTag) {
        self.resume(node);
        let gone: Vec<Endpoint> = {
            let mut endpoints = self.state.endpoints.borrow_mut();
            let addresses: Vec<SocketAddr> =
                endpoints.iter().filter(|(_, e)| e.node == node).map(|(a, _)| *a).collect();
            addresses.iter().filter_map(|address| endpoints.remove(address)).collect()
        };
        drop(gone);
        // What it dialled is gone with it; the others find out later.
        let dialled = self.connections_where(|nodes| nodes.0 == node);
        dialled.into_iter().for_each(|route| self.lose(route, None));
        self.lose_silently(self.connections_where(|nodes| nodes.1 == node));
    }

    /// The endpoint at `address` closes: its connections are lost at once.
    pub fn close(&self, address: SocketAddr) {
        let endpoint = self.state.endpoints.borrow_mut().remove(&address);
        drop(endpoint);
        let routes: Vec<Route> = self.state.connections.borrow().keys().copied().collect();
        let own = routes.into_iter().filter(|route| route.0 == address || route.1 == address);
        own.for_each(|route| self.lose(route, None));
    }

    /// Nothing passes between two nodes any more. Their connections are lost once that is noticed.
    pub fn cut(&self, a: NodeTag, b: NodeTag) {
        self.state.cuts.borrow_mut().insert(pair(a, b));
        self.lose_silently(self.connections_where(|nodes| pair(nodes.0, nodes.1) == pair(a, b)));
    }

    pub fn heal(&self, a: NodeTag, b: NodeTag) {
        self.state.cuts.borrow_mut().remove(&pair(a, b));
    }

    /// The node's process stands still (the simulation is told separately): who talks to it finds that out.
    pub fn pause(&self, node: NodeTag) {
        self.state.paused.borrow_mut().insert(node);
        self.lose_silently(self.connections_where(|nodes| nodes.0 == node || nodes.1 == node));
    }

    pub fn resume(&self, node: NodeTag) {
        self.state.paused.borrow_mut().remove(&node);
    }

    /// Resets the connections between two nodes: what was under way has an unknown outcome, the next call dials.
    pub fn reset(&self, a: NodeTag, b: NodeTag) {
        let hit = self.connections_where(|nodes| pair(nodes.0, nodes.1) == pair(a, b));
        hit.into_iter().for_each(|route| self.lose(route, None));
    }

    fn connections_where(&self, fits: impl Fn((NodeTag, NodeTag)) -> bool) -> Vec<Route> {
        self.state.connections.borrow().iter().filter(|(_, c)| fits(c.nodes)).map(|(route, _)| *route).collect()
    }

    fn lose_silently(&self, routes: Vec<Route>) {
        for route in routes {
            let id = self.state.connections.borrow().get(&route).map(|connection| connection.id);
            let (network, after) = (self.clone(), self.draw(SILENCE_MAX));
            self.state.sim.spawn_on(NETWORK, async move {
                rt::sleep(after).await;
                network.lose(route, id);
            });
        }
    }

    /// Ends a connection, if it is still this one.
    fn lose(&self, route: Route, only: Option<ConnectionId>) {
        let lost = {
            let mut connections = self.state.connections.borrow_mut();
            match connections.get(&route) {
                Some(connection) if only.is_none_or(|id| id == connection.id) => connections.remove(&route),
                _ => None,
            }
        };
        let Some(lost) = lost else { return };
        for caller in lost.calls.into_values() {
            // One that has gone asks nothing.
            let _ = caller.send(Err(CallError::Unknown("the connection was lost".to_owned())));
        }
        lost.handlers.values().for_each(Notify::notify_one);
        for side in [route.0, route.1] {
            let service = self.service(side);
            if let Some((_, service)) = service {
                service.lost(lost.id);
            }
        }
    }

    fn service(&self, address: SocketAddr) -> Option<(NodeTag, Rc<dyn Service>)> {
        let endpoints = self.state.endpoints.borrow();
        endpoints.get(&address).map(|endpoint| (endpoint.node, endpoint.service.clone()))
    }

    fn draw(&self, most: Duration) -> Duration {
        Duration::from_nanos(self.state.rng.borrow_mut().below(most.as_nanos().max(1) as u64))
    }

    fn next_serial(&self) -> u64 {
        self.state.serial.set(self.state.serial.get() + 1);
        self.state.serial.get()
    }

    fn is_cut(&self, nodes: (NodeTag, NodeTag)) -> bool {
        self.state.cuts.borrow().contains(&pair(nodes.0, nodes.1))
    }

    fn connection(&self, route: Route) -> Option<ConnectionId> {
        self.state.connections.borrow().get(&route).map(|connection| connection.id)
    }

    async fn connect(&self, route: Route) -> Result<ConnectionId, CallError> {
        let not_sent = |text: &str| Err(CallError::NotSent(format!("{} {text}", route.1)));
        if let Some(id) = self.connection(route) {
            return Ok(id);
        }
        let blocked = self.state.failed_dials.borrow().get(&route).copied();
        if blocked.is_some_and(|until| rt::now() < until) {
            return not_sent("did not answer a moment ago");
        }
        let (least, most) = self.state.delay.get();
        rt::sleep(2 * (least + self.draw(most - least))).await;
        if let Some(id) = self.connection(route) {
            return Ok(id);
        }
        // Nothing of either side is held on to while a dial fails: it may end meanwhile.
        if !self.reaches(route) {
            return self.dial_failed(route).await;
        }
        let (own, other) = (self.service(route.0), self.service(route.1));
        let (Some((from, own)), Some((to, other))) = (own, other) else { return not_sent("has closed") };
        let id = ConnectionId(self.next_serial());
        let met = other.met(id, &own.hello(), route.0).and_then(|()| own.met(id, &other.hello(), route.1));
        if let Err(refusal) = met {
            return not_sent(&refusal);
        }
        let connection = Connection {
            id,
            nodes: (from, to),
            hello: Arc::new(other.hello()),
            lanes: BTreeMap::new(),
            calls: BTreeMap::new(),
            handlers: BTreeMap::new(),
        };
        self.state.connections.borrow_mut().insert(route, connection);
        Ok(id)
    }

    fn reaches(&self, route: Route) -> bool {
        let node = |address| self.state.endpoints.borrow().get(&address).map(|endpoint| endpoint.node);
        let (Some(from), Some(to)) = (node(route.0), node(route.1)) else { return false };
        !self.is_cut((from, to)) && !self.state.paused.borrow().contains(&to)
    }

    async fn dial_failed(&self, route: Route) -> Result<ConnectionId, CallError> {
        rt::sleep(DIAL).await;
        self.state.failed_dials.borrow_mut().insert(route, rt::now() + DIAL_BACKOFF);
        Err(CallError::NotSent(format!("{} does not answer a dial", route.1)))
    }

    /// Sends a frame; what `arrive` does with it happens on the network's time, if the connection is still there.
    fn post(
        &self,
        (route, id): (Route, ConnectionId),
        frame: &Outgoing,
        (kind, request_id): (Kind, u64),
        arrive: impl FnOnce(SimNetwork, Incoming) + 'static,
    ) -> Result<(), CallError> {
        let too_long = || CallError::NotSent("a frame that is longer than frames may be".to_owned());
        let header = frame.header(kind, request_id).ok_or_else(too_long)?;
        let mut bytes = header.encode().to_vec();
        bytes.extend_from_slice(&frame.archive);
        frame.payload.iter().for_each(|piece| bytes.extend_from_slice(piece));
        let back = kind == Kind::Reply;
        let at = {
            let (least, most) = self.state.delay.get();
            let at = rt::now() + least + self.draw(most - least);
            let mut connections = self.state.connections.borrow_mut();
            let connection = connections.get_mut(&route).filter(|connection| connection.id == id);
            let Some(connection) = connection else { return Ok(()) };
            let last = connection.lanes.entry((frame.lane, back)).or_insert(at);
            *last = at.max(*last);
            *last
        };
        self.state.frames.set(self.state.frames.get() + 1);
        let network = self.clone();
        self.state.sim.spawn_on(NETWORK, async move {
            rt::sleep_until(at).await;
            let alive = network.state.connections.borrow().get(&route).filter(|c| c.id == id).map(|c| c.nodes);
            let Some(nodes) = alive else { return };
            if !network.is_cut(nodes) {
                arrive(network, read(&bytes));
            }
        });
        Ok(())
    }

    /// A request has arrived.
    fn handle(&self, route: Route, id: ConnectionId, request: Incoming) {
        let Some((node, service)) = self.service(route.1) else { return };
        let (request_id, lane, kind) = (request.header.request_id, request.header.lane, request.header.kind);
        let cancel = Notify::new();
        if let (Some(connection), Kind::Request) = (self.state.connections.borrow_mut().get_mut(&route), kind) {
            connection.handlers.insert(request_id, cancel.clone());
        }
        let network = self.clone();
        self.state.sim.spawn_on(node, async move {
            let reply = rt::first_of(service.serve(id, request), cancel.notified()).await;
            if let Some(connection) = network.state.connections.borrow_mut().get_mut(&route) {
                connection.handlers.remove(&request_id);
            }
            let Ok(Some(reply)) = reply else { return };
            let reply = Outgoing { lane, ..reply };
            let arrive = move |network: SimNetwork, reply: Incoming| {
                let caller = {
                    let mut connections = network.state.connections.borrow_mut();
                    connections.get_mut(&route).and_then(|connection| connection.calls.remove(&request_id))
                };
                if let Some(caller) = caller {
                    let _ = caller.send(Ok(reply)); // a caller that has gone is on its way to say so
                }
            };
            let sent = network.post((route, id), &reply, (Kind::Reply, request_id), arrive);
            assert_eq!(sent, Ok(()), "a reply that is longer than a frame");
        });
    }

    fn cancel(&self, route: Route, id: ConnectionId, lane: Lane, request_id: u64) {
        if let Some(connection) = self.state.connections.borrow_mut().get_mut(&route).filter(|c| c.id == id) {
            connection.calls.remove(&request_id);
        }
        let frame = Outgoing {
            operation: 0,
            version: 0,
            lane,
            status: 0,
            budget: Duration::ZERO,
            credit_bytes: 0,
            archive: crate::io::Slice::empty(),
            payload: Vec::new(),
        };
        let arrive = move |network: SimNetwork, _| {
            let running = {
                let connections = network.state.connections.borrow();
                connections.get(&route).and_then(|connection| connection.handlers.get(&request_id).cloned())
            };
            match (running, network.service(route.1)) {
                (Some(running), _) => running.notify_one(),
                (None, Some((_, service))) => service.cancelled_late(id, request_id),
                (None, None) => {}
            }
        };
        // Never too long.
        let _ = self.post((route, id), &frame, (Kind::Cancel, request_id), arrive);
    }
}

fn read(bytes: &[u8]) -> Incoming {
    let (header, body) = bytes.split_first_chunk::<HEADER_BYTES>().expect("written with one");
    let header = Header::decode(header).expect("written by encode");
    let mut buf = AlignedBuf::zeroed(body.len());
    buf[..body.len()].copy_from_slice(body);
    buf.truncate(body.len());
    Incoming::new(header, buf)
}

/// Tells the other side that nobody waits any more, unless the answer was taken.
struct Waiting {
    network: SimNetwork,
    route: Route,
    id: ConnectionId,
    lane: Lane,
    request_id: u64,
    answered: bool,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if !self.answered {
            self.network.cancel(self.route, self.id, self.lane, self.request_id);
        }
    }
}

impl Transport for SimTransport {
    fn call(&self, to: SocketAddr, request: Outgoing) -> LocalBoxFuture<'static, Result<Incoming, CallError>> {
        let (network, route) = (self.network.clone(), (self.from, to));
        Box::pin(async move {
            let deadline = rt::now() + request.budget;
            let connected = rt::timeout(request.budget, network.connect(route)).await;
            let id = connected.unwrap_or_else(|_| Err(CallError::NotSent(format!("no connection to {to} in time"))))?;
            let (request_id, lane) = (network.next_serial(), request.lane);
            let (sender, reply) = oneshot();
            {
                let mut connections = network.state.connections.borrow_mut();
                let connection = connections.get_mut(&route).filter(|connection| connection.id == id);
                let Some(connection) = connection else {
                    return Err(CallError::NotSent(format!("the connection to {to} was lost")));
                };
                connection.calls.insert(request_id, sender);
            }
            let arrive = move |network: SimNetwork, request| network.handle(route, id, request);
            network.post((route, id), &request, (Kind::Request, request_id), arrive)?;
            drop(request);
            let mut waiting = Waiting { network, route, id, lane, request_id, answered: false };
            match rt::timeout(deadline - rt::now(), reply).await {
                Ok(answer) => {
                    waiting.answered = true;
                    answer.unwrap_or_else(|| Err(CallError::Unknown("the connection was lost".to_owned())))
                }
                Err(rt::Elapsed) => Err(CallError::Unknown(format!("no reply of {to} in time"))),
            }
        })
    }

    fn send(&self, to: SocketAddr, message: Outgoing) {
        let (network, route) = (self.network.clone(), (self.from, to));
        rt::spawn(rt::Queue::Foreground, async move {
            let Ok(id) = network.connect(route).await else { return };
            let arrive = move |network: SimNetwork, message| network.handle(route, id, message);
            // Too long, or lost: nobody is told.
            let _ = network.post((route, id), &message, (Kind::OneWay, 0), arrive);
        });
    }

    fn hello_of(&self, to: SocketAddr) -> Option<Arc<Hello>> {
        let connections = self.network.state.connections.borrow();
        connections.get(&(self.from, to)).map(|connection| connection.hello.clone())
    }

    fn connection_to(&self, to: SocketAddr) -> Option<ConnectionId> {
        self.network.connection((self.from, to))
    }
}
