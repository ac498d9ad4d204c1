//! Datagrams on their way to the socket: packets of one size for one peer are joined, for the kernel to cut (E55). Pure.

use std::collections::{BTreeSet, VecDeque};
use std::net::IpAddr;

use narad_shards::io::ring::{Route, Sent, UDP_SEGMENTS_MAX, UDP_SEND_BYTES_MAX};

/// Answers to strangers that may wait, and after how many batches of our own one of them goes first: nobody can make
/// this endpoint owe more than that, and what it owes never holds up what it has to say to peers (E48).
const ANSWERS_MAX: usize = 64;
const BATCHES_PER_ANSWER: usize = 16;

pub(super) struct Batch {
    pub route: Route,
    pub data: Vec<u8>,
    /// When there is more than one datagram in it.
    pub segment_bytes: Option<u16>,
}

pub(super) struct Outbox {
    batches: VecDeque<Batch>,
    /// What is being joined; `data` may be longer than what is in use.
    open: Option<Open>,
    spares: Vec<Vec<u8>>,
    /// For those without a connection: Retry packets and stateless resets.
    answers: VecDeque<Batch>,
    since_answer: usize,
    offload: bool,
    refused: BTreeSet<IpAddr>,
}

struct Open {
    route: Route,
    data: Vec<u8>,
    used: usize,
    segment_bytes: usize,
}

impl Open {
    fn is_full(&self) -> bool {
        let segments = self.used.div_ceil(self.segment_bytes);
        let short = !self.used.is_multiple_of(self.segment_bytes);
        short || segments == UDP_SEGMENTS_MAX || self.used + self.segment_bytes > UDP_SEND_BYTES_MAX
    }
}

impl Outbox {
    pub fn new(offload: bool) -> Outbox {
        Outbox {
            batches: VecDeque::new(),
            open: None,
            spares: Vec::new(),
            answers: VecDeque::new(),
            since_answer: 0,
            offload,
            refused: BTreeSet::new(),
        }
    }

    /// Whether one more stranger can be answered: asked before any work is done for him.
    pub fn may_answer(&self) -> bool {
        self.answers.len() < ANSWERS_MAX
    }

    /// A packet for somebody without a connection.
    pub fn answer(&mut self, route: Route, packet: Vec<u8>) {
        if self.may_answer() {
            self.answers.push_back(Batch { route, data: packet, segment_bytes: None });
        }
    }

    /// The answer whose turn it is; `idle` when there is nothing else to send.
    pub fn next_answer(&mut self, idle: bool) -> Option<Batch> {
        if !idle && self.since_answer < BATCHES_PER_ANSWER {
            return None;
        }
        self.since_answer = 0;
        self.answers.pop_front()
    }

    /// Adds the packet that `write` makes: it is given room for a datagram of `bytes_max` and returns how long it is.
    /// Passes on whatever ends without a packet.
    pub fn add<E>(
        &mut self,
        route: Route,
        bytes_max: usize,
        write: impl FnOnce(&mut [u8]) -> Result<usize, E>,
    ) -> Result<usize, E> {
        if self.open.as_ref().is_some_and(|open| open.route != route || open.is_full() || !self.joins(route)) {
            self.close();
        }
        let mut open = self.open.take().unwrap_or_else(|| {
            let data = self.spares.pop().unwrap_or_default();
            Open { route, data, used: 0, segment_bytes: 0 }
        });
        let end = open.used + bytes_max;
        if open.data.len() < end {
            open.data.resize(end, 0);
        }
        let written = write(&mut open.data[open.used..end]);
        let bytes = match &written {
            Ok(bytes) => *bytes,
            Err(_) => {
                match open.used {
                    0 => self.spares.push(open.data),
                    _ => self.open = Some(open),
                }
                return written;
            }
        };
        if open.used == 0 {
            open.segment_bytes = bytes.max(1);
            open.used = bytes;
        } else if bytes <= open.segment_bytes {
            open.used += bytes;
        } else {
            // Longer than the ones before it: it begins a batch of its own.
            let mut data = self.spares.pop().unwrap_or_default();
            data.resize(bytes_max.max(bytes), 0);
            data[..bytes].copy_from_slice(&open.data[open.used..open.used + bytes]);
            let next = Open { route, data, used: bytes, segment_bytes: bytes };
            self.open = Some(std::mem::replace(&mut open, next));
            self.close();
        }
        self.open = Some(open);
        written
    }

    fn joins(&self, route: Route) -> bool {
        self.offload && !self.refused.contains(&route.to.ip())
    }

    fn close(&mut self) {
        let Some(mut open) = self.open.take() else { return };
        open.data.truncate(open.used);
        let segment_bytes = (open.used > open.segment_bytes).then_some(open.segment_bytes as u16);
        self.batches.push_back(Batch { route: open.route, data: open.data, segment_bytes });
    }

    pub fn is_empty(&self) -> bool {
        self.batches.is_empty() && self.open.is_none()
    }

    /// What is to be sent next.
    pub fn next(&mut self) -> Option<Batch> {
        if self.batches.is_empty() {
            self.close();
        }
        self.since_answer += 1;
        self.batches.pop_front()
    }

    /// Takes the memory of a send back. When the kernel would not cut its data, no more is joined for that peer, and
    /// this data goes again, datagram by datagram; returns whether that is so. When it may be that the address of this
    /// machine is gone that it was to leave from, it goes again from whichever the kernel takes.
    pub fn sent(&mut self, sent: Sent) -> bool {
        let refused = sent.result.as_ref().err().and_then(|error| error.raw_os_error());
        if refused == Some(libc::EINVAL) && sent.route.from.is_some() {
            let route = Route { from: None, ..sent.route };
            self.batches.push_front(Batch { route, data: sent.data, segment_bytes: sent.segment_bytes });
            return false;
        }
        let cutting = matches!(refused, Some(libc::EIO | libc::EMSGSIZE | libc::EINVAL | libc::EOPNOTSUPP));
        if let Some(segment_bytes) = sent.segment_bytes.filter(|_| cutting) {
            self.refused.insert(sent.route.to.ip());
            for datagram in sent.data.chunks(usize::from(segment_bytes)).rev() {
                self.batches.push_front(Batch { route: sent.route, data: datagram.to_vec(), segment_bytes: None });
            }
            return true;
        }
        const SPARES_MAX: usize = 4;
        if self.spares.len() < SPARES_MAX {
            self.spares.push(sent.data);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::SocketAddr;

    fn address(port: u16) -> Route {
        Route::from(SocketAddr::from(([127, 0, 0, 1], port)))
    }

    fn add(outbox: &mut Outbox, port: u16, bytes: usize) {
        let written = outbox.add(address(port), 1500, |space| {
            space[..bytes].fill(bytes as u8);
            Ok::<_, ()>(bytes)
        });
        assert_eq!(written, Ok(bytes));
    }

    fn shapes(outbox: &mut Outbox) -> Vec<(u16, usize, Option<u16>)> {
        std::iter::from_fn(|| outbox.next()).map(|b| (b.route.to.port(), b.data.len(), b.segment_bytes)).collect()
    }

    #[test]
    fn e55_packets_of_one_size_are_joined_and_a_shorter_one_ends_them() {
        let mut outbox = Outbox::new(true);
        for bytes in [40, 1200, 1200, 1200, 100, 1200] {
            add(&mut outbox, 1, bytes);
        }
        add(&mut outbox, 2, 1200);
        assert_eq!(outbox.add(address(2), 1500, |_| Err::<usize, _>("nothing")), Err("nothing"));
        let seen = shapes(&mut outbox);
        assert_eq!(seen, [(1, 40, None), (1, 3700, Some(1200)), (1, 1200, None), (2, 1200, None)]);
        assert!(outbox.is_empty());
        for _ in 0..100 {
            add(&mut outbox, 1, 1452);
        }
        let seen = shapes(&mut outbox);
        assert!(seen.iter().all(|(_, bytes, _)| *bytes <= UDP_SEND_BYTES_MAX), "{seen:?}");
        assert_eq!(seen.iter().map(|(_, bytes, _)| bytes).sum::<usize>(), 145_200);
    }

    #[test]
    fn e48_answers_to_strangers_are_few_and_never_hold_up_what_peers_are_told() {
        let mut outbox = Outbox::new(true);
        for port in 0..1000 {
            outbox.answer(address(port), vec![0; 42]);
        }
        assert!(!outbox.may_answer());
        let mut order = Vec::new();
        for _ in 0..33 {
            add(&mut outbox, 7777, 100);
            let batch = outbox.next_answer(false).or_else(|| outbox.next()).expect("there is always something");
            order.push(batch.route.to.port());
        }
        let answered: Vec<usize> = (0..order.len()).filter(|at| order[*at] != 7777).collect();
        assert_eq!(answered, [16], "one in seventeen");
        let left = std::iter::from_fn(|| outbox.next_answer(true)).count();
        assert_eq!(left, ANSWERS_MAX - 1);
    }

    #[test]
    fn e55_offload_can_be_off_and_goes_off_for_a_peer_whose_path_refuses_it() {
        let mut off = Outbox::new(false);
        add(&mut off, 1, 1200);
        add(&mut off, 1, 1200);
        assert_eq!(shapes(&mut off), [(1, 1200, None), (1, 1200, None)]);
        for code in [libc::EIO, libc::EMSGSIZE] {
            let mut outbox = Outbox::new(true);
            add(&mut outbox, 1, 1200);
            add(&mut outbox, 1, 700);
            let batch = outbox.next().expect("one batch");
            let result = Err(std::io::Error::from_raw_os_error(code));
            let sent = Sent { result, route: batch.route, data: batch.data, segment_bytes: batch.segment_bytes };
            assert!(outbox.sent(sent));
            assert_eq!(shapes(&mut outbox), [(1, 1200, None), (1, 700, None)], "it goes again");
            add(&mut outbox, 1, 1200);
            add(&mut outbox, 1, 1200);
            assert_eq!(shapes(&mut outbox), [(1, 1200, None), (1, 1200, None)], "and never joined again");
        }
    }

    #[test]
    fn e55_what_left_from_an_address_that_is_gone_goes_again_from_any_and_says_nothing_about_offload() {
        let failed = |batch: Batch| Sent {
            result: Err(std::io::Error::from_raw_os_error(libc::EINVAL)),
            route: batch.route,
            data: batch.data,
            segment_bytes: batch.segment_bytes,
        };
        let mut outbox = Outbox::new(true);
        let gone = Route { from: Some(IpAddr::from([10, 0, 0, 9])), ..address(1) };
        for bytes in [1200, 1200, 1300] {
            assert_eq!(outbox.add(gone, 1500, |_| Ok::<_, ()>(bytes)), Ok(bytes));
        }
        for (bytes, segment_bytes) in [(2400, Some(1200)), (1300, None)] {
            let batch = outbox.next().expect("it was added");
            assert!(!outbox.sent(failed(batch)), "nothing is known of offload");
            let again = outbox.next().expect("it goes again");
            assert_eq!((again.route, again.data.len(), again.segment_bytes), (address(1), bytes, segment_bytes));
        }
        assert!(outbox.is_empty());
        // Without one to blame, the kernel does not cut.
        add(&mut outbox, 1, 1200);
        add(&mut outbox, 1, 1200);
        let batch = outbox.next().expect("one batch");
        assert_eq!(batch.segment_bytes, Some(1200), "joined as before");
        assert!(outbox.sent(failed(batch)));
        assert_eq!(shapes(&mut outbox), [(1, 1200, None), (1, 1200, None)]);
    }

    #[test]
    fn what_leaves_from_different_addresses_of_this_machine_is_never_joined() {
        let mut outbox = Outbox::new(true);
        for from in [1, 1, 2, 2, 1] {
            let route = Route { from: Some(IpAddr::from([10, 0, 0, from])), ..address(1) };
            assert_eq!(outbox.add(route, 1500, |_| Ok::<_, ()>(1200)), Ok(1200));
        }
        let seen: Vec<_> = std::iter::from_fn(|| outbox.next()).map(|b| (b.route.from, b.data.len())).collect();
        let of = |from: u8, bytes| (Some(IpAddr::from([10, 0, 0, from])), bytes);
        assert_eq!(seen, [of(1, 2400), of(2, 2400), of(1, 1200)]);
    }
}
