//! One connection: how it is greeted, what arrives on its streams, what it owes and is owed, whether it lives.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use narad_shards::io::ring::{Route, UDP_SEGMENTS_MAX, UDP_SEND_BYTES_MAX};
use narad_shards::meta::ShardId;
use narad_shards::remote::{CallError, ConnectionId, Hello};
use narad_shards::rt::sync::{oneshot, Receiver, Sender};
use narad_shards::rt::Instant;
use narad_shards::wire::{status, Header, Incoming, Kind, Lane, Outgoing, Refusal, HEADER_BYTES};

use super::admission::PROVE_WITHIN;
use super::buffers::Quic;
use super::closing::{why_closed, LATE, MALFORMED, NO_ROOM, REFUSED, SILENT, STOPPED};
use super::frames::{Arrived, FrameReader};
use super::greeter::Greeter;
use super::intake::Intake;
use super::liveness::{Due, Liveness};
use super::metrics::Tally;
use super::outbox::Outbox;
use super::proof::Role;
use super::queue::{lane_of, stream_of, Recalled, SendQueue};
use super::NOT_OPEN_YET;

/// A dial that is not done by then has failed.
pub(super) const DIAL_WITHIN: Duration = Duration::from_secs(1);
/// Operation of a ping: answered here, by no handler, so that it waits for no disk.
pub(super) const PING: u16 = 0;
/// What a packet holds beside a stream's bytes, at most.
const PACKET_OVERHEAD_BYTES: usize = 60;

/// What the endpoint has to do for a connection, outside of all borrows, in this order.
pub(super) enum Event {
    /// It needs to know what this endpoint says of itself.
    Greet(ConnectionId),
    Met(ConnectionId, Arc<Hello>, SocketAddr),
    Request(ConnectionId, Lane, Incoming),
    Cancel(ConnectionId, u64),
    Lost(ConnectionId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Handshake,
    AwaitingProof,
    AwaitingHello,
    /// The service is being asked whether it wants to know the other side.
    Introducing,
    Open,
    Ended,
}

struct Call {
    lane: Lane,
    since: Instant,
    reply: Sender<Result<Incoming, CallError>>,
}

pub(super) struct Link {
    pub id: ConnectionId,
    pub peer: SocketAddr,
    /// The address of this machine that the peer has dialled, where that is known: what it hears comes from there.
    source: Option<IpAddr>,
    role: Role,
    pub quic: Quic,
    /// Ids under which packets for it come in.
    pub cids: Vec<Vec<u8>>,
    phase: Phase,
    greeter: Greeter,
    hello: Option<Arc<Hello>>,
    met: bool,
    /// To be open by then.
    open_by: Instant,
    /// Its node, for what it may take of the room.
    node: Arc<str>,
    intake: Intake,
    readers: [FrameReader; Lane::ALL.len()],
    /// Lanes whose stream has its rank.
    ordered: [bool; Lane::ALL.len()],
    pub queue: SendQueue,
    calls: BTreeMap<u64, Call>,
    next_request: u64,
    /// Requests that are being answered; dropping one tells its handler that nobody waits.
    pub serving: BTreeMap<u64, Sender<()>>,
    quic_timer: Option<Instant>,
    liveness: Liveness,
    keep_alive: Option<Duration>,
    next_keep_alive: Instant,
    pub ended_because: String,
    pub events: Vec<Event>,
    pub tally: Tally,
}

impl Link {
    pub fn new(
        id: ConnectionId,
        route: Route,
        dialled: bool,
        quic: Quic,
        secret: Option<Arc<[u8]>>,
        intake: Intake,
        keep_alive: Option<Duration>,
        now: Instant,
    ) -> Link {
        let (role, within) = if dialled { (Role::Dialler, DIAL_WITHIN) } else { (Role::Acceptor, PROVE_WITHIN) };
        Link {
            id,
            peer: route.to,
            source: route.from,
            role,
            quic,
            cids: Vec::new(),
            phase: Phase::Handshake,
            greeter: Greeter::new(role, secret),
            hello: None,
            met: false,
            open_by: now + within,
            node: Arc::from(""),
            intake,
            readers: Default::default(),
            ordered: [false; Lane::ALL.len()],
            queue: SendQueue::default(),
            calls: BTreeMap::new(),
            next_request: 1,
            serving: BTreeMap::new(),
            quic_timer: None,
            liveness: Liveness::new(now),
            keep_alive: keep_alive.filter(|_| dialled),
            next_keep_alive: now,
            ended_because: String::new(),
            events: Vec::new(),
            tally: Tally::default(),
        }
    }

    pub fn is_dialled(&self) -> bool {
        self.role == Role::Dialler
    }

    pub fn is_open(&self) -> bool {
        self.phase == Phase::Open
    }

    /// It was up at some time.
    pub fn was_open(&self) -> bool {
        self.met
    }

    pub fn has_ended(&self) -> bool {
        self.phase == Phase::Ended
    }

    /// Its other side has not proven the secret and said who it is.
    pub fn is_unproven(&self) -> bool {
        !self.is_dialled() && !self.met
    }

    /// Which part of which node is at its other end.
    pub fn speaker(&self) -> Option<(Arc<str>, Option<ShardId>)> {
        self.hello.as_ref().map(|hello| (self.node.clone(), hello.shard))
    }

    pub fn hello(&self) -> Option<Arc<Hello>> {
        self.hello.clone().filter(|_| self.is_open())
    }

    // What this side sends.

    /// Queues a request. Its reply comes to the receiver.
    pub fn request(
        &mut self,
        request: Outgoing,
        now: Instant,
    ) -> Result<(u64, Receiver<Result<Incoming, CallError>>), CallError> {
        let (lane, request_id) = (request.lane, self.queue_request(Kind::Request, request)?);
        let (reply, receiver) = oneshot();
        self.calls.insert(request_id, Call { lane, since: now, reply });
        Ok((request_id, receiver))
    }

    pub fn queue_request(&mut self, kind: Kind, request: Outgoing) -> Result<u64, CallError> {
        let (lane, request_id) = (request.lane, self.next_request);
        let Some(header) = request.header(kind, request_id) else {
            let bytes = request.frame_bytes();
            return Err(CallError::NotSent(format!("a frame of {bytes} bytes is longer than a frame may be")));
        };
        if self.queue.is_full(lane) {
            return Err(CallError::NotSent(format!("too much waits to be sent to {}", self.peer)));
        }
        self.next_request += 1;
        self.queue.push(lane, &header, request);
        if kind == Kind::OneWay {
            // Nobody waits for an answer, so nobody's deadline would ever ask whether the other side lives; and a peer
            // that came back is not found before a datagram reaches it, which may take as long as it was away.
            self.liveness.doubt();
        }
        Ok(request_id)
    }

    /// A reply goes where its request came from. One that is too long is replaced by an error.
    pub fn reply(&mut self, lane: Lane, request: &Header, reply: Outgoing) {
        match reply.header(Kind::Reply, request.request_id) {
            Some(header) => self.queue.push(lane, &Header { lane, ..header }, reply),
            None => {
                tracing::error!(peer = %self.peer, operation = request.operation, bytes = reply.frame_bytes(),
                    "a reply is longer than a frame may be; its caller gets an error");
                self.answer(lane, request, status::INTERNAL);
            }
        }
    }

    fn answer(&mut self, lane: Lane, request: &Header, status: u16) {
        let length = HEADER_BYTES as u32;
        self.queue.push_bare(
            lane,
            &Header { length, kind: Kind::Reply, lane, status, archive_bytes: 0, credit_bytes: 0, ..*request },
        );
    }

    fn bare(&mut self, kind: Kind, lane: Lane, request_id: u64) {
        let header = Header {
            length: HEADER_BYTES as u32,
            operation: PING,
            version: 0,
            kind,
            lane,
            status: 0,
            archive_bytes: 0,
            request_id,
            budget_ms: 0,
            credit_bytes: 0,
        };
        self.queue.push_bare(lane, &header);
    }

    /// Nobody waits for a call any more. The connection and its other calls are untouched (K37). The other side is told
    /// also when its reply is here already: nobody has taken it (C58).
    pub fn give_up(&mut self, lane: Lane, request_id: u64, timed_out: bool) -> Recalled {
        if timed_out {
            self.liveness.doubt();
        }
        self.calls.remove(&request_id);
        let recalled = self.queue.recall(lane, request_id);
        if recalled == Recalled::Begun && !self.has_ended() {
            self.bare(Kind::Cancel, lane, request_id);
        }
        recalled
    }

    // What the other side sends.

    /// Looks at what has arrived, and at whether the connection still is.
    pub fn advance(&mut self, now: Instant) {
        loop {
            let before = self.phase;
            match self.phase {
                Phase::Handshake => self.begin_greeting(),
                Phase::AwaitingProof => self.take_proof(),
                Phase::AwaitingHello => self.take_hello(),
                Phase::Open => self.read_lanes(now),
                Phase::Introducing | Phase::Ended => {}
            }
            if self.phase == before {
                break;
            }
        }
        if (self.quic.is_closed() || self.quic.is_draining()) && !self.has_ended() {
            let reason = why_closed(&self.quic);
            self.end(STOPPED, &reason);
        }
    }

    fn begin_greeting(&mut self) {
        if !self.quic.is_established() {
            return;
        }
        self.phase = Phase::AwaitingProof;
        self.greeter.established(&mut self.quic);
        if self.is_dialled() {
            self.say_proof();
        }
    }

    fn say_proof(&mut self) {
        if let Err(reason) = self.greeter.say_proof() {
            self.end(REFUSED, reason);
        }
    }

    fn take_proof(&mut self) {
        match self.greeter.hear_proof(&mut self.quic) {
            None => {}
            Some(false) => {
                self.tally.proofs_refused += 1;
                self.end(REFUSED, "invalid auth: the cluster secrets of the two nodes differ");
            }
            Some(true) => {
                self.phase = Phase::AwaitingHello;
                match self.is_dialled() {
                    true => self.events.push(Event::Greet(self.id)),
                    // The acceptor says who it is once it wants to know the dialler: whoever has its hello is welcome.
                    false => self.say_proof(),
                }
            }
        }
    }

    /// What this endpoint says of itself.
    pub fn greet(&mut self, hello: &Hello) {
        self.greeter.say_hello(hello);
    }

    fn take_hello(&mut self) {
        match self.greeter.hear_hello(&mut self.quic) {
            None => {}
            Some(Err(reason)) => self.end(MALFORMED, reason),
            Some(Ok(hello)) => {
                let hello = Arc::new(hello);
                self.node = Arc::from(hello.node.as_str());
                self.hello = Some(hello.clone());
                self.phase = Phase::Introducing;
                self.events.push(Event::Met(self.id, hello, self.peer));
            }
        }
    }

    /// The service has said whether it wants to know the other side.
    pub fn introduced(&mut self, verdict: Result<(), String>, now: Instant) {
        if self.phase != Phase::Introducing {
            return;
        }
        match verdict {
            Ok(()) => {
                self.phase = Phase::Open;
                self.met = true;
                self.liveness.heard(now);
                match self.is_dialled() {
                    true => Lane::ALL.into_iter().for_each(|lane| self.order(lane)),
                    false => self.events.push(Event::Greet(self.id)),
                }
                self.next_keep_alive = self.keep_alive.map_or(now, |every| now + every);
            }
            Err(reason) => {
                match reason == NOT_OPEN_YET {
                    true => tracing::debug!(peer = %self.peer, reason, "a peer is refused"),
                    false => tracing::warn!(peer = %self.peer, reason, "a peer is refused"),
                }
                self.end(REFUSED, &reason);
            }
        }
    }

    fn read_lanes(&mut self, now: Instant) {
        for stream in self.quic.readable() {
            let Some(lane) = lane_of(stream) else {
                self.end(MALFORMED, "something came on a stream that has no meaning");
                return;
            };
            self.order(lane);
            // Always to the end: what is not read would hold up everything behind it.
            while self.phase == Phase::Open {
                let reader = &mut self.readers[lane as usize];
                match self.quic.stream_recv(stream, reader.space()) {
                    Ok((count, ended)) => {
                        self.liveness.heard(now);
                        match reader.advance(count, |bytes| self.intake.take(&self.node, bytes)) {
                            Ok(Some(Arrived::Frame(frame))) => self.take_frame(lane, frame),
                            Ok(Some(Arrived::Refused(header))) => self.refuse_frame(lane, &header),
                            Ok(None) => {}
                            Err(bad) => self.end(MALFORMED, &format!("{bad} arrived")),
                        }
                        if ended {
                            self.end(MALFORMED, "a lane was ended");
                        }
                    }
                    Err(quiche::Error::Done) => break,
                    Err(error) => self.end(MALFORMED, &format!("a lane cannot be read: {error:?}")),
                }
            }
        }
    }

    /// Tells quiche, once, which stream goes first of what it holds already.
    fn order(&mut self, lane: Lane) {
        if !std::mem::replace(&mut self.ordered[lane as usize], true) {
            // Refused only for a stream that has ended.
            let _ = self.quic.stream_priority(stream_of(lane), 1 + lane as u8, true);
        }
    }

    fn take_frame(&mut self, lane: Lane, frame: Incoming) {
        let header = frame.header;
        match header.kind {
            Kind::Reply => {
                // None: given up meanwhile, or the answer to a ping, which has been heard by being read.
                if let Some(call) = self.calls.remove(&header.request_id) {
                    let _ = call.reply.send(Ok(frame));
                }
            }
            _ if self.is_dialled() => self.end(MALFORMED, "a request came on a connection that we dialled"),
            Kind::Request if header.operation == PING => self.answer(lane, &header, status::OK),
            Kind::Request | Kind::OneWay => self.events.push(Event::Request(self.id, lane, frame)),
            Kind::Cancel => self.events.push(Event::Cancel(self.id, header.request_id)),
        }
    }

    /// A frame had no room here. Whoever waits for something is told; a message of which nobody waits is lost, as it may be.
    fn refuse_frame(&mut self, lane: Lane, header: &Header) {
        self.tally.frames_refused += 1;
        match header.kind {
            Kind::Reply => {
                let Some(call) = self.calls.remove(&header.request_id) else { return };
                // What was reserved for us is handed back (C58).
                self.bare(Kind::Cancel, lane, header.request_id);
                let _ = call.reply.send(Err(CallError::Unknown(format!("the reply of {}: {NO_ROOM}", self.peer))));
            }
            _ if self.is_dialled() => self.end(MALFORMED, "a request came on a connection that we dialled"),
            Kind::Request => {
                let refusal = Refusal::new(status::UNAVAILABLE, NO_ROOM).reply(header.operation, lane);
                self.reply(lane, header, refusal);
            }
            Kind::OneWay | Kind::Cancel => {}
        }
    }

    // Time.

    /// What is due.
    pub fn tick(&mut self, now: Instant) -> bool {
        if self.next_timer().is_none_or(|at| at > now) {
            return false;
        }
        if self.quic_timer.is_some_and(|at| at <= now) {
            self.quic_timer = None;
            self.quic.on_timeout();
        }
        if !matches!(self.phase, Phase::Open | Phase::Ended) && self.open_by <= now {
            self.end(LATE, "the handshake took too long");
        }
        if self.is_open() {
            self.watch(now);
        }
        true
    }

    fn watch(&mut self, now: Instant) {
        if self.keep_alive.is_some() && self.next_keep_alive <= now {
            self.next_keep_alive = self.keep_alive.map_or(now, |every| now + every);
            // Refused only where the connection is ending anyway.
            let _ = self.quic.send_ack_eliciting();
        }
        if self.queue.is_stalled(now) {
            self.end(LATE, "it takes nothing of what is to be sent to it");
            return;
        }
        match self.liveness.due(now, self.waiting()) {
            Due::Nothing => {}
            Due::Ping => {
                self.tally.pings += 1;
                let request_id = self.next_request;
                self.next_request += 1;
                // On the most urgent lane, or bulk of our own on its way would look like silence of the peer.
                self.bare(Kind::Request, Lane::Consensus, request_id);
            }
            Due::Dead => {
                self.tally.silent += 1;
                tracing::warn!(peer = %self.peer,
                    "a peer has said nothing for a second after a ping: its connection is dropped");
                self.end(SILENT, "no answer to a ping within one second");
            }
        }
    }

    /// Since when the oldest call is without a reply.
    fn waiting(&self) -> Option<Instant> {
        self.calls.first_key_value().map(|(_, call)| call.since)
    }

    pub fn next_timer(&self) -> Option<Instant> {
        let opening = (!matches!(self.phase, Phase::Open | Phase::Ended)).then_some(self.open_by);
        let mut timers = [self.quic_timer, opening, None, None, None];
        if self.is_open() {
            timers[2] = self.keep_alive.map(|_| self.next_keep_alive);
            timers[3] = self.liveness.next(self.waiting());
            timers[4] = self.queue.next_look();
        }
        timers.into_iter().flatten().min()
    }

    // Packets.

    /// Makes packets of what is to be said, as many as one send takes. Returns whether there may be more right away.
    pub fn transmit(&mut self, outbox: &mut Outbox, now: Instant) -> bool {
        if !self.has_ended() {
            if let Err(error) = self.greeter.transmit(&mut self.quic) {
                self.end(MALFORMED, &format!("the greeting cannot be written: {error:?}"));
            }
        }
        let bytes_max = self.quic.max_send_udp_payload_size().max(super::DATAGRAM_BYTES_MIN);
        let mut more = false;
        if self.is_open() && !self.queue.is_empty() {
            // No more than these packets hold: what quiche has taken is not overtaken any more.
            let packets = UDP_SEGMENTS_MAX.min(UDP_SEND_BYTES_MAX / bytes_max);
            let quantum = packets * (bytes_max - PACKET_OVERHEAD_BYTES);
            match self.queue.feed(&mut self.quic, quantum, now) {
                Ok(taken) => more = taken == quantum,
                Err(error) => self.end(MALFORMED, &format!("a lane cannot be written: {error:?}")),
            }
        }
        let (mut sent, route) = (0, Route { to: self.peer, from: self.source });
        let drained = loop {
            if sent >= UDP_SEND_BYTES_MAX {
                break false;
            }
            match outbox.add(route, bytes_max, |space| self.quic.send(space).map(|(bytes, _)| bytes)) {
                Ok(bytes) => sent += bytes,
                Err(quiche::Error::Done) => break true,
                Err(error) => {
                    self.end(MALFORMED, &format!("QUIC failed: {error:?}"));
                    break true;
                }
            }
        };
        self.quic_timer = self.quic.timeout().map(|after| now + after);
        !drained || (more && sent > 0)
    }

    // The end.

    pub fn stop(&mut self) {
        self.end(STOPPED, "the node is stopping");
    }

    /// The same peer has a newer connection to us.
    pub fn replace(&mut self) {
        self.end(STOPPED, "the peer has dialled again");
    }

    fn end(&mut self, code: u64, reason: &str) {
        if self.has_ended() {
            return;
        }
        self.phase = Phase::Ended;
        self.ended_because = reason.to_owned();
        // It may have been closed by the other side.
        let _ = self.quic.close(true, code, reason.as_bytes());
        self.serving.clear();
        for (request_id, call) in std::mem::take(&mut self.calls) {
            let error = match self.queue.recall(call.lane, request_id) {
                Recalled::Unsent => CallError::NotSent(format!("{}: {reason}", self.peer)),
                Recalled::Begun => CallError::Unknown(format!("the connection to {} was lost: {reason}", self.peer)),
            };
            let _ = call.reply.send(Err(error));
        }
        self.queue = SendQueue::default();
        // Frames half in never become whole: their room is for others, now and not after QUIC has drained.
        self.readers = Default::default();
        if self.met {
            self.events.push(Event::Lost(self.id));
        }
    }
}
