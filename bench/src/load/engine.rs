//! One thread, many connections, one epoll: starts operations when they are due, and counts how they end.
//!
//! A turn of the loop: timers, operations that are due (open loop) or were put off, then whatever the sockets have. An
//! answer is handled at once and the next operation of its connection starts in the same step, so a request costs one
//! write, one read and its share of a wait.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use mio::{Events, Poll, Token};

use super::clock::nanos;
use super::connection::{Connection, State};
use super::cpu::thread_cpu;
use super::protocol::{Begin, Outcome, Progress, Protocol};
use super::tally::{Tally, UNBOUNDED};
use super::{Answer, Clock, Nanos};
use crate::run::Failure;

/// How long the first connections may take.
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);
const RECONNECT_MIN: Nanos = 10_000_000;
const RECONNECT_MAX: Nanos = 1_000_000_000;
/// A server may ask for more; a measurement does not wait that long.
const PAUSE_MAX: Nanos = 1_000_000_000;
/// Longest sleep with nothing to do.
const IDLE: Nanos = 100_000_000;
/// How soon an operation that was put off is offered again.
const PUT_OFF: Nanos = 1_000_000;

/// How a group's operations are started.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pace {
    /// As soon as the connection's last one has ended.
    Closed,
    /// At fixed times, `interval` nanoseconds apart over all connections, from the start of the warm-up. An operation
    /// that finds no free connection waits for one, and its latency counts from when it was due.
    Open { interval: f64 },
}

/// When a group starts no more operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// With the measured time.
    End,
    /// When its protocols say that they are finished (at the latest when the run gives up).
    Finished,
}

/// Connections that do the same.
pub struct Group<P> {
    pub name: String,
    /// Used in turn.
    pub addresses: Vec<SocketAddr>,
    /// One for each connection.
    pub protocols: Vec<P>,
    pub pace: Pace,
    pub until: Until,
}

/// When a run begins to count and when it ends.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    pub warmup: Duration,
    /// `None`: until every protocol is finished.
    pub duration: Option<Duration>,
    /// How much longer operations in flight, a backlog of due ones, or a drain may take.
    pub grace: Duration,
}

impl Timing {
    /// End of the measured time.
    pub fn end(&self) -> Nanos {
        self.duration.map_or(UNBOUNDED, nanos)
    }
}

struct GroupState {
    pace: Pace,
    until: Until,
    tally: Tally,
    connections: usize,
    busy: usize,
    finished: usize,
    /// Free connections, longest free first (open loop).
    free: VecDeque<usize>,
    /// Operations that were due so far.
    released: u64,
    /// Its protocols were told that it has stopped.
    over: bool,
}

impl GroupState {
    /// When the next operation is due.
    fn next_due(&self, start: Nanos) -> Option<Nanos> {
        match self.pace {
            Pace::Closed => None,
            Pace::Open { interval } => Some(start + (self.released as f64 * interval) as Nanos),
        }
    }
}

/// The connections of one thread.
pub struct Engine<P> {
    poll: Poll,
    clock: Clock,
    start: Nanos,
    end: Nanos,
    give_up: Nanos,
    groups: Vec<GroupState>,
    connections: Vec<Connection<P>>,
    timers: BinaryHeap<Reverse<(Nanos, usize)>>,
    put_off: Vec<usize>,
    /// Poll without sleeping.
    spin: bool,
    running: bool,
}

impl<P: Protocol> Engine<P> {
    /// Opens all connections and waits until they can be used. Fails when none can.
    pub fn connect(groups: Vec<Group<P>>, spin: bool) -> Result<Engine<P>, Failure> {
        let poll = Poll::new().map_err(|error| Failure(format!("cannot make an epoll descriptor: {error}")))?;
        let mut engine = Engine {
            poll,
            clock: Clock::new(Instant::now()),
            start: 0,
            end: 0,
            give_up: 0,
            groups: Vec::new(),
            connections: Vec::new(),
            timers: BinaryHeap::new(),
            put_off: Vec::new(),
            spin,
            running: false,
        };
        for group in groups {
            let index = engine.groups.len();
            engine.groups.push(GroupState {
                pace: group.pace,
                until: group.until,
                tally: Tally::new(&group.name),
                connections: group.protocols.len(),
                busy: 0,
                finished: 0,
                free: VecDeque::new(),
                released: 0,
                over: false,
            });
            for (number, protocol) in group.protocols.into_iter().enumerate() {
                let address = group.addresses[number % group.addresses.len()];
                engine.connections.push(Connection::new(index, address, protocol));
            }
        }
        for index in 0..engine.connections.len() {
            engine.reconnect(index, 0);
        }
        let mut events = Events::with_capacity(1024);
        let patience = nanos(CONNECT_PATIENCE);
        while engine.connections.iter().any(|connection| connection.state != State::Idle) {
            let now = engine.clock.now();
            if now > patience {
                break;
            }
            let hopeless = engine.connections.iter().all(|c| matches!(c.state, State::Lost { .. }) && c.failures > 1);
            if hopeless {
                break;
            }
            engine.fire_timers(now);
            engine.wait(&mut events, 10_000_000);
        }
        let usable = engine.connections.iter().filter(|connection| connection.state == State::Idle).count();
        if usable == 0 {
            let first = engine.groups.iter_mut().find_map(|group| group.tally.first_error.take());
            let reason = first.unwrap_or_else(|| "no connection within 5 s".to_owned());
            return Err(Failure(format!("{reason}; is a server listening there? Start it, or name another address")));
        }
        Ok(engine)
    }

    /// Drives the load. `clock` is 0 at the start of the measured time.
    pub fn run(mut self, clock: Clock, timing: &Timing) -> (Vec<Tally>, Vec<P>) {
        self.clock = clock;
        self.start = -nanos(timing.warmup);
        self.end = timing.end();
        self.give_up = self.end.saturating_add(nanos(timing.grace)).min(UNBOUNDED);
        if self.end == UNBOUNDED {
            self.give_up = nanos(timing.grace);
        }
        self.running = true;
        self.timers.clear();
        for index in 0..self.connections.len() {
            match self.connections[index].state {
                State::Idle => self.next(index, self.start.max(self.clock.now())),
                State::Lost { .. } => self.timers.push(Reverse((self.clock.now() + RECONNECT_MIN, index))),
                _ => {}
            }
        }
        let mut events = Events::with_capacity(1024);
        let (mut cpu_at_start, mut cpu_at_end) = (None, None);
        loop {
            let now = self.clock.now();
            if now >= 0 && cpu_at_start.is_none() {
                cpu_at_start = Some(thread_cpu());
            }
            if now >= self.end && cpu_at_end.is_none() {
                cpu_at_end = Some(thread_cpu());
            }
            self.fire_timers(now);
            for index in std::mem::take(&mut self.put_off) {
                self.next(index, now);
            }
            (0..self.groups.len()).for_each(|group| self.release(group, now));
            (0..self.groups.len()).for_each(|group| self.notice_over(group, now));
            if now >= self.give_up || self.groups.iter().all(|group| group.over) {
                break;
            }
            let sleep = self.sleep(now);
            self.wait(&mut events, sleep);
        }
        let cpu = cpu_at_end.unwrap_or_else(thread_cpu).saturating_sub(cpu_at_start.unwrap_or_else(thread_cpu));
        self.abandon();
        // The thread is one; its time goes to the first group, so that a sum over groups is right.
        if let Some(group) = self.groups.first_mut() {
            group.tally.cpu = cpu;
        }
        let tallies = self.groups.into_iter().map(|group| group.tally).collect();
        (tallies, self.connections.into_iter().map(|connection| connection.protocol).collect())
    }

    /// Counts what was still open when the run gave up.
    fn abandon(&mut self) {
        let now = self.clock.now();
        for connection in &self.connections {
            let group = &mut self.groups[connection.group];
            if connection.state == State::Busy {
                let address = connection.address;
                group.tally.unanswered += 1;
                group.tally.error(|| format!("{address}: no answer before the run ended"));
                if group.pace != Pace::Closed && (0..self.end).contains(&connection.intended) {
                    group.tally.latency.saturating_record((now - connection.intended).max(1) as u64);
                }
            }
        }
        for group in &mut self.groups {
            while let Some(due) = group.next_due(self.start).filter(|due| *due < self.end.min(now)) {
                group.released += 1;
                if due >= 0 {
                    group.tally.unsent += 1;
                    group.tally.latency.saturating_record((now - due).max(1) as u64);
                }
            }
        }
    }

    fn notice_over(&mut self, index: usize, now: Nanos) {
        let group = &mut self.groups[index];
        let all_finished = group.finished == group.connections;
        let stopped = group.until == Until::End
            && now >= self.end
            && group.busy == 0
            && group.next_due(self.start).is_none_or(|due| due >= self.end);
        if !group.over && (all_finished || stopped) {
            group.over = true;
            self.connections.iter_mut().filter(|c| c.group == index).for_each(|c| c.protocol.over());
        }
    }

    /// Nanoseconds that the thread may sleep.
    fn sleep(&self, now: Nanos) -> Nanos {
        let mut until = now + IDLE;
        for edge in [0, self.end, self.give_up] {
            if edge > now {
                until = until.min(edge);
            }
        }
        if let Some(Reverse((at, _))) = self.timers.peek() {
            until = until.min(*at);
        }
        if !self.put_off.is_empty() {
            until = until.min(now + PUT_OFF);
        }
        for group in self.groups.iter().filter(|group| !group.free.is_empty()) {
            until = until.min(group.next_due(self.start).filter(|due| *due < self.end).unwrap_or(until));
        }
        until - now
    }

    fn wait(&mut self, events: &mut Events, sleep: Nanos) {
        // epoll counts milliseconds and rounds up; a part of one is spent polling, so that nothing starts late.
        let whole_ms = if self.spin { 0 } else { sleep.max(0) as u64 / 1_000_000 };
        match self.poll.poll(events, Some(Duration::from_millis(whole_ms))) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return,
            Err(error) => {
                self.groups[0].tally.error(|| format!("epoll failed: {error}"));
                self.give_up = i64::MIN;
            }
        }
        if self.spin && events.is_empty() {
            // The kernel's workers that issue the broker's flushes may be on this CPU, and would wait for its time slice.
            std::thread::yield_now();
        }
        for event in events.iter() {
            let Token(index) = event.token();
            if event.is_writable() || event.is_error() || event.is_write_closed() {
                self.writable(index);
            }
            if event.is_readable() || event.is_read_closed() || event.is_error() {
                self.readable(index, event.is_read_closed() || event.is_error());
            }
        }
    }

    fn fire_timers(&mut self, now: Nanos) {
        while let Some(Reverse((at, index))) = self.timers.peek().copied() {
            if at > now {
                return;
            }
            self.timers.pop();
            match self.connections[index].state {
                State::Lost { until } if until <= now => self.reconnect(index, now),
                State::Paused => {
                    self.connections[index].state = State::Idle;
                    self.next(index, now);
                }
                _ => {}
            }
        }
    }

    fn reconnect(&mut self, index: usize, now: Nanos) {
        if self.running && now >= self.end && self.groups[self.connections[index].group].until == Until::End {
            return;
        }
        let registry = self.poll.registry();
        if let Err(error) = self.connections[index].connect(registry, Token(index)) {
            self.failed(index, now, &cannot_connect(&error));
        }
    }

    /// Open loop: starts what is due, as far as connections are free.
    fn release(&mut self, group: usize, now: Nanos) {
        while let Some(due) = self.groups[group].next_due(self.start) {
            if due > now || due >= self.end {
                return;
            }
            let Some(index) = self.groups[group].free.pop_front() else { return };
            if self.start_operation(index, due) {
                self.groups[group].released += 1;
            }
        }
    }

    /// The connection is free: in closed loop its next operation starts.
    fn next(&mut self, index: usize, now: Nanos) {
        if !self.running {
            return;
        }
        let group = self.connections[index].group;
        if self.groups[group].pace != Pace::Closed {
            self.groups[group].free.push_back(index);
            return self.release(group, now);
        }
        if now >= self.end && self.groups[group].until == Until::End {
            return;
        }
        self.start_operation(index, now);
    }

    /// Returns whether one was started.
    fn start_operation(&mut self, index: usize, intended: Nanos) -> bool {
        let now = self.clock.now();
        let connection = &mut self.connections[index];
        let group = &mut self.groups[connection.group];
        match connection.protocol.begin(now, &mut connection.output) {
            Begin::Started => {
                connection.state = State::Busy;
                // In closed loop nothing was intended earlier than it happened.
                connection.intended = if group.pace == Pace::Closed { now } else { intended };
                group.busy += 1;
                self.flush(index);
                true
            }
            Begin::NotYet => {
                self.put_off.push(index);
                false
            }
            Begin::Finished => {
                connection.state = State::Finished;
                group.finished += 1;
                false
            }
        }
    }

    fn writable(&mut self, index: usize) {
        let connection = &mut self.connections[index];
        if connection.state == State::Connecting {
            match connection.connected() {
                Ok(false) => return,
                Ok(true) => {
                    if connection.protocol.open(&mut connection.output) {
                        connection.state = State::Opening;
                    } else {
                        self.ready(index);
                    }
                }
                Err(error) => return self.failed(index, self.clock.now(), &cannot_connect(&error)),
            }
        }
        self.flush(index);
    }

    fn ready(&mut self, index: usize) {
        let connection = &mut self.connections[index];
        connection.failures = 0;
        connection.state = State::Idle;
        self.next(index, self.clock.now());
    }

    fn flush(&mut self, index: usize) {
        if let Err(error) = self.connections[index].flush() {
            self.failed(index, self.clock.now(), &format!("sending failed: {error}"));
        }
    }

    /// `ending`: the server has closed its side, or there is an error to be fetched.
    fn readable(&mut self, index: usize, ending: bool) {
        if matches!(self.connections[index].state, State::Connecting | State::Lost { .. }) {
            return;
        }
        let closed = match self.connections[index].fill(ending) {
            Ok(closed) => closed,
            Err(error) => return self.failed(index, self.clock.now(), &format!("receiving failed: {error}")),
        };
        if self.digest(index) && closed {
            self.failed(index, self.clock.now(), "the server closed the connection");
        }
    }

    /// Hands over what was received. Returns whether the connection is still the same one.
    fn digest(&mut self, index: usize) -> bool {
        loop {
            let connection = &mut self.connections[index];
            if connection.received().is_empty() || !matches!(connection.state, State::Busy | State::Opening) {
                return true;
            }
            let now = self.clock.now();
            match connection.receive(now) {
                Err(text) => {
                    self.failed(index, now, &text);
                    return false;
                }
                Ok(step) => match step.progress {
                    Progress::More => {
                        self.flush(index);
                        if step.consumed == 0 {
                            return true;
                        }
                    }
                    Progress::Done(answer) => {
                        if !self.done(index, now, answer) {
                            return false;
                        }
                    }
                },
            }
        }
    }

    /// Returns whether the connection is still the same one.
    fn done(&mut self, index: usize, now: Nanos, answer: Answer) -> bool {
        let connection = &mut self.connections[index];
        let opening = connection.state == State::Opening;
        let tally = &mut self.groups[connection.group].tally;
        let refused = matches!(answer.result, Outcome::Refused { .. });
        match answer.result {
            Outcome::Ok { messages } if !opening => tally.succeeded(connection.intended, now, self.end, messages),
            Outcome::Ok { .. } => {}
            Outcome::Empty => tally.empty += 1,
            Outcome::Refused { kind, text } => {
                *tally.refused.entry(kind).or_default() += 1;
                tally.error(|| text);
            }
        }
        if opening {
            if refused {
                self.failed(index, now, "the server refused to open a conversation");
                return false;
            }
            self.ready(index);
            return true;
        }
        self.groups[connection.group].busy -= 1;
        connection.state = State::Idle;
        if answer.close {
            connection.close(self.poll.registry());
            connection.state = State::Lost { until: now };
            self.reconnect(index, now);
            return false;
        }
        match answer.pause {
            Some(pause) => {
                self.groups[connection.group].tally.pauses += 1;
                connection.state = State::Paused;
                self.timers.push(Reverse((now + nanos(pause).min(PAUSE_MAX), index)));
            }
            None => self.next(index, now),
        }
        true
    }

    /// The connection broke, or could not be made: it is made again after a while.
    fn failed(&mut self, index: usize, now: Nanos, text: &str) {
        let connection = &mut self.connections[index];
        let group = &mut self.groups[connection.group];
        match connection.state {
            State::Busy => group.busy -= 1,
            // It is not free any more.
            State::Idle => group.free.retain(|free| *free != index),
            State::Finished => return connection.close(self.poll.registry()),
            State::Lost { .. } => return,
            State::Connecting | State::Opening | State::Paused => {}
        }
        // A server may close what is idle; nothing was asked of it then.
        if !matches!(connection.state, State::Idle | State::Paused) {
            group.tally.lost += 1;
            let address = connection.address;
            group.tally.error(|| format!("{address}: {text}"));
        }
        self.put_off.retain(|waiting| *waiting != index);
        connection.protocol.lost();
        connection.close(self.poll.registry());
        let pause = match connection.failures {
            0 => 0,
            failures => (RECONNECT_MIN << failures.min(10)).min(RECONNECT_MAX),
        };
        connection.failures += 1;
        connection.state = State::Lost { until: now + pause };
        self.timers.push(Reverse((now + pause, index)));
    }
}

fn cannot_connect(error: &io::Error) -> String {
    let advice = match error.kind() {
        io::ErrorKind::ConnectionRefused => ": nothing listens there (any more): see the server's log",
        _ => "",
    };
    format!("cannot connect: {error}{advice}")
}
