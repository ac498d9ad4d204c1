//! A simulated byte-stream network: seeded delay, arbitrary fragmentation, half-close, and cuts after which neither
//! end knows what the other has received. Order and content are kept, as TCP keeps them.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::rc::{Rc, Weak};
use std::time::Duration;

use crate::io::Slice;
use crate::rt;
use crate::rt::sim::Rng;
use crate::rt::sync::Notify;
use crate::rt::Instant;

/// How the network treats what it carries.
#[derive(Clone, Copy, Debug)]
pub struct NetOptions {
    /// Bounds of one segment's delay.
    pub delay: (Duration, Duration),
    /// Bytes on their way or unread in one direction before a sender waits.
    pub window_bytes: usize,
    /// Largest piece that a receive or a send handles at once; smaller ones come up all the same.
    pub piece_bytes_max: usize,
}

impl Default for NetOptions {
    fn default() -> NetOptions {
        let delay = (Duration::from_micros(20), Duration::from_micros(500));
        NetOptions { delay, window_bytes: 256 << 10, piece_bytes_max: 64 << 10 }
    }
}

/// One direction of a connection.
#[derive(Default)]
struct Pipe {
    /// Segments with the time at which each arrives, in order.
    transit: VecDeque<(Instant, VecDeque<u8>)>,
    bytes: usize,
    last_arrival: Instant,
    /// The sender has closed; the reader sees the end behind the last segment.
    ended: bool,
    /// The connection is gone; what still lies here may be read, nothing comes after it.
    cut: bool,
    changed: Notify,
}

struct State {
    rng: Rng,
    options: NetOptions,
    listeners: BTreeMap<String, Rc<Backlog>>,
    links: Vec<Weak<Link>>,
}

struct Link {
    /// Written by end 0 and by end 1.
    pipes: [RefCell<Pipe>; 2],
}

#[derive(Default)]
struct Backlog {
    waiting: RefCell<VecDeque<SimStream>>,
    changed: Notify,
}

/// The network between all simulated processes. Clones share it.
#[derive(Clone)]
pub struct SimNet {
    state: Rc<RefCell<State>>,
}

/// One end of a connection. Dropping it closes it: cleanly, or with a reset when unread bytes were waiting.
pub struct SimStream {
    net: SimNet,
    link: Rc<Link>,
    end: usize,
}

/// Accepts connections under a name until dropped.
pub struct SimListener {
    net: SimNet,
    name: String,
    backlog: Rc<Backlog>,
}

fn reset() -> io::Error {
    io::ErrorKind::ConnectionReset.into()
}

impl SimNet {
    pub fn new(seed: u64) -> SimNet {
        SimNet::with(seed, NetOptions::default())
    }

    pub fn with(seed: u64, options: NetOptions) -> SimNet {
        let state = State { rng: Rng::new(seed), options, listeners: BTreeMap::new(), links: Vec::new() };
        SimNet { state: Rc::new(RefCell::new(state)) }
    }

    /// Two ends of a new connection.
    pub fn pair(&self) -> (SimStream, SimStream) {
        let link = Rc::new(Link { pipes: [RefCell::default(), RefCell::default()] });
        let mut state = self.state.borrow_mut();
        state.links.retain(|link| link.strong_count() > 0);
        state.links.push(Rc::downgrade(&link));
        let end = |end| SimStream { net: self.clone(), link: link.clone(), end };
        (end(0), end(1))
    }

    /// Listens under a name; an earlier listener of that name hears nothing any more.
    pub fn listen(&self, name: &str) -> SimListener {
        let backlog: Rc<Backlog> = Rc::default();
        self.state.borrow_mut().listeners.insert(name.to_owned(), backlog.clone());
        SimListener { net: self.clone(), name: name.to_owned(), backlog }
    }

    pub async fn connect(&self, name: &str) -> io::Result<SimStream> {
        rt::sleep(self.delay()).await;
        let found = self.state.borrow().listeners.get(name).cloned();
        let backlog = found.ok_or(io::ErrorKind::ConnectionRefused)?;
        let (ours, theirs) = self.pair();
        backlog.waiting.borrow_mut().push_back(theirs);
        backlog.changed.notify_one();
        Ok(ours)
    }

    /// Cuts every open connection, each at a random point of what is on its way.
    pub fn cut_all(&self) {
        let links: Vec<Rc<Link>> = self.state.borrow().links.iter().filter_map(Weak::upgrade).collect();
        links.iter().for_each(|link| self.cut_link(link));
    }

    /// Changes the delay of what is sent from now on.
    pub fn set_delay(&self, low: Duration, high: Duration) {
        self.state.borrow_mut().options.delay = (low, high);
    }

    fn delay(&self) -> Duration {
        let mut state = self.state.borrow_mut();
        let (low, high) = state.options.delay;
        let spread = (high.saturating_sub(low).as_nanos() as u64).max(1);
        low + Duration::from_nanos(state.rng.below(spread))
    }

    /// Uniform in `1..=most`, for `most` of at least 1.
    fn piece(&self, most: usize) -> usize {
        let mut state = self.state.borrow_mut();
        let most = most.min(state.options.piece_bytes_max).max(1);
        // Mostly whole, as on a quiet network; the rest at any byte.
        if state.rng.chance(1, 2) {
            most
        } else {
            state.rng.below(most as u64) as usize + 1
        }
    }

    fn cut_link(&self, link: &Link) {
        for pipe in &link.pipes {
            let mut pipe = pipe.borrow_mut();
            if pipe.cut {
                continue;
            }
            pipe.cut = true;
            let keep = self.state.borrow_mut().rng.below(pipe.bytes as u64 + 1) as usize;
            while pipe.bytes > keep {
                let excess = pipe.bytes - keep;
                let Some((at, mut segment)) = pipe.transit.pop_back() else { break };
                let removed = excess.min(segment.len());
                segment.truncate(segment.len() - removed);
                pipe.bytes -= removed;
                if !segment.is_empty() {
                    pipe.transit.push_back((at, segment));
                }
            }
            pipe.changed.notify_all();
        }
    }
}

impl SimStream {
    fn outgoing(&self) -> &RefCell<Pipe> {
        &self.link.pipes[self.end]
    }

    fn incoming(&self) -> &RefCell<Pipe> {
        &self.link.pipes[1 - self.end]
    }

    /// Receives 1 to `buf.len()` bytes; 0 when the other end has closed. A cut is `ConnectionReset`, after the bytes
    /// that arrived before it.
    pub async fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            let (changed, next) = {
                let mut pipe = self.incoming().borrow_mut();
                let pipe = &mut *pipe;
                match pipe.transit.front_mut() {
                    Some((at, segment)) if *at <= rt::now() => {
                        let count = self.net.piece(segment.len().min(buf.len())).min(buf.len());
                        for (into, byte) in buf.iter_mut().zip(segment.drain(..count)) {
                            *into = byte;
                        }
                        if segment.is_empty() {
                            pipe.transit.pop_front();
                        }
                        pipe.bytes -= count;
                        pipe.changed.notify_all();
                        return Ok(count);
                    }
                    Some((at, _)) => (pipe.changed.notified(), Some(*at)),
                    None if pipe.cut => return Err(reset()),
                    None if pipe.ended => return Ok(0),
                    None => (pipe.changed.notified(), None),
                }
            };
            match next {
                Some(at) => drop(rt::timeout(at - rt::now(), changed).await),
                None => changed.await,
            }
        }
    }

    /// Sends a part of `data`, at least one byte, and returns its length; waits while the window is full. `Ok` says
    /// nothing about what the other end has received.
    pub async fn send(&self, data: Slice) -> io::Result<usize> {
        if data.is_empty() {
            return Ok(0);
        }
        loop {
            let changed = {
                let window = self.net.state.borrow().options.window_bytes;
                let mut pipe = self.outgoing().borrow_mut();
                if pipe.cut {
                    return Err(reset());
                }
                if pipe.ended {
                    return Err(io::ErrorKind::BrokenPipe.into());
                }
                if pipe.bytes < window {
                    let count = self.net.piece(data.len().min(window - pipe.bytes));
                    let at = pipe.last_arrival.max(rt::now() + self.net.delay());
                    pipe.last_arrival = at;
                    pipe.bytes += count;
                    pipe.transit.push_back((at, data[..count].iter().copied().collect()));
                    pipe.changed.notify_all();
                    return Ok(count);
                }
                pipe.changed.notified()
            };
            changed.await;
        }
    }

    /// Sends all of `data`.
    pub async fn send_all(&self, mut data: Slice) -> io::Result<()> {
        while !data.is_empty() {
            let sent = self.send(data.clone()).await?;
            data = data.slice(sent..data.len());
        }
        Ok(())
    }

    /// Half-close: nothing more is sent, receiving goes on.
    pub fn shutdown_write(&self) {
        let mut pipe = self.outgoing().borrow_mut();
        pipe.ended = true;
        pipe.changed.notify_all();
    }

    /// Cuts the connection at a random point of what is on its way, in both directions.
    pub fn cut(&self) {
        self.net.cut_link(&self.link);
    }
}

impl Drop for SimStream {
    fn drop(&mut self) {
        let unread = self.incoming().borrow().bytes > 0;
        if unread && rt::sim::now_in_simulation().is_some() {
            self.cut();
        } else {
            self.shutdown_write();
            let mut incoming = self.incoming().borrow_mut();
            incoming.cut = true;
            incoming.changed.notify_all();
        }
    }
}

impl SimListener {
    pub async fn accept(&self) -> io::Result<SimStream> {
        loop {
            let changed = {
                let next = self.backlog.waiting.borrow_mut().pop_front();
                match next {
                    Some(stream) => return Ok(stream),
                    None => self.backlog.changed.notified(),
                }
            };
            changed.await;
        }
    }
}

impl Drop for SimListener {
    fn drop(&mut self) {
        let mut state = self.net.state.borrow_mut();
        if state.listeners.get(&self.name).is_some_and(|current| Rc::ptr_eq(current, &self.backlog)) {
            state.listeners.remove(&self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rt::sim::run;
    use crate::rt::Queue;
    use std::collections::BTreeSet;

    fn text(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|i| (i % 251) as u8).collect()
    }

    async fn read_to_end(stream: &SimStream) -> (Vec<u8>, usize, io::Result<()>) {
        let (mut all, mut reads, mut buf) = (Vec::new(), 0, [0; 700]);
        loop {
            match stream.recv(&mut buf).await {
                Ok(0) => return (all, reads, Ok(())),
                Ok(count) => all.extend_from_slice(&buf[..count]),
                Err(error) => return (all, reads, Err(error)),
            }
            reads += 1;
        }
    }

    #[test]
    fn bytes_arrive_in_order_in_any_pieces_and_end_with_the_half_close() {
        let mut counts = BTreeSet::new();
        for seed in 0..40 {
            counts.insert(run(seed, async move {
                let net = SimNet::with(seed, NetOptions { window_bytes: 1000, ..Default::default() });
                let (a, b) = net.pair();
                let sender = rt::spawn(Queue::Foreground, async move {
                    a.send_all(Slice::copy_from(&text(20_000))).await.expect("not cut");
                    a.shutdown_write();
                    assert!(a.send(Slice::copy_from(b"x")).await.is_err());
                    let (back, _, end) = read_to_end(&a).await;
                    assert!(end.is_ok());
                    back
                });
                let start = rt::now();
                let (all, reads, end) = read_to_end(&b).await;
                assert!(end.is_ok() && all == text(20_000) && rt::now() > start);
                b.send_all(Slice::copy_from(b"answer")).await.expect("the other direction is open");
                drop(b);
                assert_eq!(sender.await, b"answer");
                reads
            }));
        }
        assert!(counts.len() > 10, "{counts:?}");
    }

    #[test]
    fn after_a_cut_any_prefix_has_arrived_and_both_ends_see_a_reset() {
        let mut arrived = BTreeSet::new();
        for seed in 0..60 {
            arrived.insert(run(seed, async move {
                let net = SimNet::new(seed);
                let (a, b) = net.pair();
                a.send_all(Slice::copy_from(&text(5_000))).await.expect("open");
                net.cut_all();
                assert_eq!(
                    a.send(Slice::copy_from(b"x")).await.expect_err("cut").kind(),
                    io::ErrorKind::ConnectionReset
                );
                let (all, _, end) = read_to_end(&b).await;
                assert!(end.is_err() && all == text(5_000)[..all.len()]);
                all.len()
            }));
        }
        assert!(arrived.len() > 20 && *arrived.last().expect("60 runs") > 4_000);
    }

    #[test]
    fn a_cut_wakes_whoever_waits() {
        run(1, async {
            let net = SimNet::new(1);
            let (a, b) = net.pair();
            let reader = rt::spawn(Queue::Foreground, async move { read_to_end(&b).await.2.is_err() });
            rt::sleep(Duration::from_secs(1)).await;
            a.cut();
            assert!(reader.await);
        });
    }

    #[test]
    fn a_listener_accepts_until_it_is_dropped() {
        run(2, async {
            let net = SimNet::new(2);
            assert!(net.connect("api").await.is_err());
            let listener = net.listen("api");
            let client = net.connect("api").await.expect("listening");
            let server = listener.accept().await.expect("one waits");
            client.send_all(Slice::copy_from(b"hi")).await.expect("open");
            let mut buf = [0; 2];
            let mut got = 0;
            while got < 2 {
                got += server.recv(&mut buf[got..]).await.expect("open");
            }
            assert_eq!(&buf, b"hi");
            drop(listener);
            assert_eq!(net.connect("api").await.err().map(|e| e.kind()), Some(io::ErrorKind::ConnectionRefused));
            drop(server);
            assert_eq!(client.recv(&mut buf).await.expect("closed cleanly"), 0);
        });
    }
}
