//! UDP on the ring (E55): receives that complete in the order of arrival, and one send in flight, because sends that
//! wait for buffer space can overtake each other, which QUIC reads as loss.
//!
//! The kernel cuts what is sent into datagrams (GSO) and joins what arrived (GRO): one operation moves up to 64 KiB.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::mem::ManuallyDrop;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::rc::Rc;
use std::task::{ready, Context, Poll};

use io_uring::opcode;

use super::address::{bind_to, decode, encode, option, set_option};
use super::{Class, Descriptor, Keep, Memory, OpId, Ring};

/// Bytes that one send may carry: the longest payload of a UDP datagram over IPv4, which a joined one shares.
pub const UDP_SEND_BYTES_MAX: usize = 65_507;
/// Datagrams that one send is cut into at most.
pub const UDP_SEGMENTS_MAX: usize = 64;
/// Room for the longest payload that the kernel joins.
const RECEIVE_BYTES: usize = 64 << 10;
/// Receives in flight at most, see [`Udp::arm`].
const RECEIVES_MAX: usize = 16;
/// What is asked for the socket's buffers, each way; the kernel may give less.
const SOCKET_BUFFER_BYTES: libc::c_int = 4 << 20;

/// Eight bytes each; twice as many as the longest two control messages take.
const CONTROL_WORDS: usize = 16;

/// Where datagrams go, and which address of this machine they come from. `None`: the kernel chooses one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    pub to: SocketAddr,
    pub from: Option<IpAddr>,
}

impl From<SocketAddr> for Route {
    fn from(to: SocketAddr) -> Route {
        Route { to, from: None }
    }
}

/// What one `recvmsg` or `sendmsg` points to. It is boxed by its slot, so that nothing of it moves meanwhile.
pub(crate) struct Message {
    header: libc::msghdr,
    vector: libc::iovec,
    name: libc::sockaddr_storage,
    /// Aligned as control messages are. Room for two: how datagrams are cut or joined, and an address of this machine.
    control: [u64; CONTROL_WORDS],
    data: Vec<u8>,
}

impl Message {
    fn new(data: Vec<u8>) -> Box<Message> {
        // SAFETY: zeroed is a valid value of these plain C structs.
        let (header, vector, name) = unsafe { (std::mem::zeroed(), std::mem::zeroed(), std::mem::zeroed()) };
        Box::new(Message { header, vector, name, control: [0; CONTROL_WORDS], data })
    }

    /// Points the header at the parts of this message.
    fn link(&mut self, name_bytes: u32, control_bytes: usize) -> *mut libc::msghdr {
        self.vector = libc::iovec { iov_base: self.data.as_mut_ptr().cast(), iov_len: self.data.len() };
        self.header.msg_name = (&raw mut self.name).cast();
        self.header.msg_namelen = name_bytes;
        self.header.msg_iov = &raw mut self.vector;
        self.header.msg_iovlen = 1;
        self.header.msg_control =
            if control_bytes == 0 { std::ptr::null_mut() } else { (&raw mut self.control).cast() };
        self.header.msg_controllen = control_bytes as _;
        self.header.msg_flags = 0;
        &raw mut self.header
    }

    fn for_receive(&mut self) -> *mut libc::msghdr {
        self.link(std::mem::size_of::<libc::sockaddr_storage>() as u32, std::mem::size_of_val(&self.control))
    }

    /// Appends a control message to those that end at byte `at`. Returns where it ends.
    fn put<T>(&mut self, at: usize, level: libc::c_int, kind: libc::c_int, value: T) -> usize {
        let bytes = std::mem::size_of::<T>() as u32;
        // SAFETY: pure arithmetic.
        let (length, space) = unsafe { (libc::CMSG_LEN(bytes), libc::CMSG_SPACE(bytes) as usize) };
        assert!(at + space <= std::mem::size_of_val(&self.control), "there is room for two");
        // SAFETY: within `control`, as just asserted; `at` is a sum of spaces, which keep the alignment of a header, and
        // `control` has it to begin with. The data behind the header is written unaligned.
        unsafe {
            let header = (&raw mut self.control).cast::<u8>().add(at).cast::<libc::cmsghdr>();
            (*header).cmsg_level = level;
            (*header).cmsg_type = kind;
            (*header).cmsg_len = length as _;
            libc::CMSG_DATA(header).cast::<T>().write_unaligned(value);
        }
        at + space
    }

    /// `segment_bytes`: the kernel cuts the data into datagrams of that size.
    fn for_send(&mut self, route: Route, segment_bytes: Option<u16>) -> *mut libc::msghdr {
        let (name, name_bytes) = encode(route.to);
        self.name = name;
        let mut end = 0;
        if let Some(segment_bytes) = segment_bytes {
            end = self.put(end, libc::SOL_UDP, libc::UDP_SEGMENT, segment_bytes);
        }
        match route.from {
            None => {}
            Some(IpAddr::V4(from)) => {
                let ipi_spec_dst = libc::in_addr { s_addr: u32::from_ne_bytes(from.octets()) };
                let info = libc::in_pktinfo { ipi_ifindex: 0, ipi_spec_dst, ipi_addr: libc::in_addr { s_addr: 0 } };
                end = self.put(end, libc::IPPROTO_IP, libc::IP_PKTINFO, info);
            }
            Some(IpAddr::V6(from)) => {
                let ipi6_addr = libc::in6_addr { s6_addr: from.octets() };
                let info = libc::in6_pktinfo { ipi6_addr, ipi6_ifindex: 0 };
                end = self.put(end, libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, info);
            }
        }
        self.link(name_bytes, end)
    }

    /// Of a control message that the kernel has put beside what arrived.
    fn find<T>(&self, level: libc::c_int, kind: libc::c_int) -> Option<T> {
        // SAFETY: the kernel has filled `control` up to `msg_controllen`, and the macros stay within that. Whoever asks
        // for a message of this kind knows that it holds a plain `T`; one that is shorter is passed over.
        unsafe {
            let mut control = libc::CMSG_FIRSTHDR(&self.header);
            while !control.is_null() {
                let whole = (*control).cmsg_len as usize >= libc::CMSG_LEN(std::mem::size_of::<T>() as u32) as usize;
                if (*control).cmsg_level == level && (*control).cmsg_type == kind && whole {
                    return Some(libc::CMSG_DATA(control).cast::<T>().read_unaligned());
                }
                control = libc::CMSG_NXTHDR(&self.header, control);
            }
        }
        None
    }

    /// Bytes of each datagram that the kernel has joined; `None` when it has joined nothing.
    fn joined_segment_bytes(&self) -> Option<usize> {
        let bytes = self.find::<libc::c_int>(libc::SOL_UDP, libc::UDP_GRO)?;
        usize::try_from(bytes).ok().filter(|bytes| *bytes > 0)
    }

    /// The address of this machine that it came to, where the socket is asked to tell.
    fn came_to(&self) -> Option<IpAddr> {
        let v4 = || self.find::<libc::in_pktinfo>(libc::IPPROTO_IP, libc::IP_PKTINFO);
        if let Some(info) = v4() {
            return Some(IpAddr::V4(Ipv4Addr::from(info.ipi_spec_dst.s_addr.to_ne_bytes())));
        }
        let info = self.find::<libc::in6_pktinfo>(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO)?;
        Some(IpAddr::V6(Ipv6Addr::from(info.ipi6_addr.s6_addr)))
    }
}

type Spares = Rc<RefCell<Vec<Box<Message>>>>;

/// One or more datagrams of one sender, in order.
pub struct Received {
    pub from: SocketAddr,
    /// The address of this machine that they came to. Told where the socket is bound to all of them.
    pub to: Option<IpAddr>,
    segment_bytes: usize,
    bytes: usize,
    message: Option<Box<Message>>,
    spares: Spares,
}

impl Received {
    /// Each datagram by itself.
    pub fn datagrams(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let data = self.message.as_mut().map_or(&mut [][..], |message| &mut message.data[..self.bytes]);
        data.chunks_mut(self.segment_bytes)
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        self.spares.borrow_mut().extend(self.message.take());
    }
}

/// What became of a send. That it has arrived is not said.
pub struct Sent {
    pub result: io::Result<()>,
    pub route: Route,
    pub data: Vec<u8>,
    /// Bytes of each datagram but the last, when the kernel was to cut it.
    pub segment_bytes: Option<u16>,
}

struct Sending {
    id: OpId,
    route: Route,
    segment_bytes: Option<u16>,
}

/// A bound socket. Polled by one task.
pub struct Udp {
    ring: Rc<Ring>,
    descriptor: Rc<Descriptor>,
    receives: RefCell<VecDeque<OpId>>,
    /// Of the receives that were started together last: how many, and how many of them brought something.
    batch: Cell<(usize, usize)>,
    spares: Spares,
    sending: RefCell<Option<Sending>>,
    send_spare: RefCell<Option<Box<Message>>>,
    buffer_bytes: (usize, usize),
    /// Bound to an IPv6 address: the kernel wants IPv4 addresses in its form.
    v6: bool,
}

fn bound_socket(address: SocketAddr, offload: bool) -> io::Result<(OwnedFd, (usize, usize))> {
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    // SAFETY: plain system call; the result is checked before it is used.
    let fd = unsafe { libc::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just made, owned by nobody else.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    for (forced, bounded) in [(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF), (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF)] {
        // Past the system's bound where the process may; what was obtained is told.
        if set_option(&socket, libc::SOL_SOCKET, forced, SOCKET_BUFFER_BYTES).is_err() {
            set_option(&socket, libc::SOL_SOCKET, bounded, SOCKET_BUFFER_BYTES)?;
        }
    }
    // QUIC forbids that a datagram is cut on its way.
    let (level, name, probe) = match address {
        SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE),
        SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_PROBE),
    };
    set_option(&socket, level, name, probe)?;
    if offload {
        // A kernel that cannot join datagrams hands them over one by one.
        let _ = set_option(&socket, libc::SOL_UDP, libc::UDP_GRO, 1);
    }
    if address.ip().is_unspecified() {
        // Whoever asked at one address takes an answer from another for a stranger's.
        let (level, name) = match address {
            SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_PKTINFO),
            SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO),
        };
        set_option(&socket, level, name, 1)?;
    }
    bind_to(&socket, address)?;
    // The kernel doubles what it was asked for, to cover its own bookkeeping.
    let obtained = |name| option(&socket, libc::SOL_SOCKET, name).map(|bytes| bytes.max(0) as usize / 2);
    let buffer_bytes = (obtained(libc::SO_RCVBUF)?, obtained(libc::SO_SNDBUF)?);
    Ok((socket, buffer_bytes))
}

impl Udp {
    pub(crate) fn bind(ring: Rc<Ring>, address: SocketAddr, offload: bool) -> io::Result<Udp> {
        let (socket, buffer_bytes) = bound_socket(address, offload)
            .map_err(|error| io::Error::new(error.kind(), format!("cannot bind UDP {address}: {error}")))?;
        Ok(Udp {
            descriptor: Rc::new(Descriptor::new(ring.clone(), socket.into_raw_fd())),
            ring,
            receives: RefCell::default(),
            batch: Cell::new((1, 0)),
            spares: Spares::default(),
            sending: RefCell::default(),
            send_spare: RefCell::default(),
            buffer_bytes,
            v6: address.is_ipv6(),
        })
    }

    /// The address that it is bound to; tells the port when 0 was asked for.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        // SAFETY: the descriptor is open, and not closed by the value that borrows it.
        ManuallyDrop::new(unsafe { UdpSocket::from_raw_fd(self.descriptor.get().0) }).local_addr()
    }

    /// Bytes that the kernel buffers for receiving and for sending.
    pub fn buffer_bytes(&self) -> (usize, usize) {
        self.buffer_bytes
    }

    /// Starts receives: some that take what is there now or fail at once, and behind them one that waits. Executed in
    /// the order of submission, so they complete in it. As many as the last ones were of use.
    fn arm(&self) {
        let (started, useful) = self.batch.get();
        let count = if useful == started { (2 * started).min(RECEIVES_MAX) } else { useful.max(1) };
        self.batch.set((count, 0));
        for index in 1..=count {
            let flags = if index < count { libc::MSG_DONTWAIT } else { 0 };
            let spare = self.spares.borrow_mut().pop();
            let mut message = spare.unwrap_or_else(|| Message::new(vec![0; RECEIVE_BYTES]));
            let header = message.for_receive();
            let entry = opcode::RecvMsg::new(self.descriptor.get(), header).flags(flags as u32).build();
            let keep = Keep::on(&self.descriptor, Memory::Message(message));
            // SAFETY: the entry points to the header, and that to the other parts, of the boxed message of `keep`.
            self.receives.borrow_mut().push_back(unsafe { self.ring.start(Class::Socket, entry, keep) });
        }
    }

    /// The next datagrams, in the order of arrival. An error is not the end of the socket.
    pub fn poll_receive(&self, cx: &mut Context<'_>) -> Poll<io::Result<Received>> {
        loop {
            let front = self.receives.borrow().front().copied();
            let Some(id) = front else {
                self.arm();
                continue;
            };
            let completion = ready!(self.ring.poll_op(id, cx));
            self.receives.borrow_mut().pop_front();
            let Memory::Message(message) = completion.keep.memory else { unreachable!("a receive keeps its message") };
            let received = decode(&message.name).filter(|_| completion.result > 0);
            if let Some(from) = received {
                let from = match from {
                    SocketAddr::V6(v6) => v6.ip().to_ipv4_mapped().map_or(from, |v4| SocketAddr::from((v4, v6.port()))),
                    SocketAddr::V4(_) => from,
                };
                let (started, useful) = self.batch.get();
                self.batch.set((started, useful + 1));
                let bytes = completion.result as usize;
                let whole = message.header.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) == 0;
                let segment_bytes = message.joined_segment_bytes().unwrap_or(bytes);
                let spares = self.spares.clone();
                let to = message.came_to();
                let received = Received { from, to, segment_bytes, bytes, message: Some(message), spares };
                if whole {
                    return Poll::Ready(Ok(received));
                }
                continue;
            }
            self.spares.borrow_mut().push(message);
            match -completion.result {
                // An empty datagram, or nothing there.
                code if code <= 0 || code == libc::EAGAIN || code == libc::EINTR => {}
                code => return Poll::Ready(Err(io::Error::from_raw_os_error(code))),
            }
        }
    }

    pub fn is_sending(&self) -> bool {
        self.sending.borrow().is_some()
    }

    /// Sends `data` as one datagram, or as datagrams of `segment_bytes` with a shorter one at the end. Only while nothing
    /// is being sent.
    pub fn send(&self, route: impl Into<Route>, data: Vec<u8>, segment_bytes: Option<u16>) {
        assert!(!self.is_sending(), "one send in flight a socket, or datagrams overtake each other");
        let mut message = self.send_spare.take().unwrap_or_else(|| Message::new(Vec::new()));
        message.data = data;
        let route = route.into();
        let to = match route.to {
            SocketAddr::V4(v4) if self.v6 => SocketAddr::from((v4.ip().to_ipv6_mapped(), v4.port())),
            to => to,
        };
        let header = message.for_send(Route { to, ..route }, segment_bytes);
        let entry = opcode::SendMsg::new(self.descriptor.get(), header).flags(libc::MSG_NOSIGNAL as u32).build();
        let keep = Keep::on(&self.descriptor, Memory::Message(message));
        // SAFETY: the entry points to the header, and that to the other parts, of the boxed message of `keep`.
        let id = unsafe { self.ring.start(Class::Socket, entry, keep) };
        *self.sending.borrow_mut() = Some(Sending { id, route, segment_bytes });
    }

    /// Completes with the send in flight, once; with `None` when there is none.
    pub fn poll_sent(&self, cx: &mut Context<'_>) -> Poll<Option<Sent>> {
        let Some(id) = self.sending.borrow().as_ref().map(|sending| sending.id) else { return Poll::Ready(None) };
        let completion = ready!(self.ring.poll_op(id, cx));
        let Memory::Message(mut message) = completion.keep.memory else { unreachable!("a send keeps its message") };
        let data = std::mem::take(&mut message.data);
        *self.send_spare.borrow_mut() = Some(message);
        let result = match completion.result {
            count if count >= 0 => Ok(()),
            code => Err(io::Error::from_raw_os_error(-code)),
        };
        let sending = self.sending.borrow_mut().take();
        Poll::Ready(sending.map(|Sending { route, segment_bytes, .. }| Sent { result, route, data, segment_bytes }))
    }
}

impl Drop for Udp {
    fn drop(&mut self) {
        let sending = self.sending.take().map(|sending| sending.id);
        for id in self.receives.take().into_iter().chain(sending) {
            self.ring.cancel(id);
            self.ring.abandon(id);
        }
    }
}
