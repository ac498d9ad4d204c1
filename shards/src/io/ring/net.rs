//! TCP on the ring: one listener per shard, streams that cost nothing while they are idle.
//!
//! Everything is single-shot, so that each connection has a known number of operations in flight (lesson U6).

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::mem::ManuallyDrop;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::rc::Rc;
use std::task::{ready, Context, Poll};
use std::time::Duration;

use io_uring::{cqueue, opcode, squeue};

use super::address::{bind_to, set_option};
use super::recv_buffers::GROUP;
use super::{Class, Completion, Descriptor, Keep, Memory, OpId, Ring};
use crate::rt;

/// Accepts in flight: so many connections one turn can take.
const ACCEPTS_ARMED: usize = 8;
const BACKLOG: i32 = 4096;
/// Pause after an accept failed for want of descriptors or memory.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);
/// Bytes that a stream takes ahead of the socket.
const SEND_BYTES_MAX: usize = 64 << 10;
/// A send of at most that many bytes is left to the ring, see [`Stream::poll_hand_over`].
const SMALL_SEND_BYTES: usize = 4096;
/// Receive only once the socket has something: no first attempt that is known to fail.
const POLL_FIRST: u16 = 1;

/// A listening socket of one shard. The kernel spreads connections over all shards' listeners on one address.
pub struct Listener {
    ring: Rc<Ring>,
    descriptor: Rc<Descriptor>,
    armed: RefCell<VecDeque<OpId>>,
}

fn listening_socket(address: SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    // SAFETY: plain system call; the result is checked before it is used.
    let fd = unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just made, owned by nobody else.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    set_option(&socket, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
    set_option(&socket, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1)?;
    // Inherited by accepted sockets: no system call per connection.
    set_option(&socket, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)?;
    bind_to(&socket, address)?;
    // SAFETY: plain system call on a socket that we own.
    match unsafe { libc::listen(socket.as_raw_fd(), BACKLOG) } {
        0 => Ok(socket),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Listener {
    pub(crate) fn bind(ring: Rc<Ring>, address: SocketAddr) -> io::Result<Listener> {
        let socket = listening_socket(address)
            .map_err(|error| io::Error::new(error.kind(), format!("cannot listen on {address}: {error}")))?;
        let fd = std::os::fd::IntoRawFd::into_raw_fd(socket);
        let descriptor = Rc::new(Descriptor::new(ring.clone(), fd));
        Ok(Listener { ring, descriptor, armed: RefCell::default() })
    }

    /// The address that it listens on; tells the port when 0 was asked for.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        // SAFETY: the descriptor is open, and not closed by the value that borrows it.
        ManuallyDrop::new(unsafe { TcpListener::from_raw_fd(self.descriptor.get().0) }).local_addr()
    }

    fn arm(&self) {
        let mut armed = self.armed.borrow_mut();
        while armed.len() < ACCEPTS_ARMED {
            let entry = opcode::Accept::new(self.descriptor.get(), std::ptr::null_mut(), std::ptr::null_mut())
                .flags(libc::SOCK_CLOEXEC)
                .build();
            let keep = Keep::accept(&self.descriptor);
            // SAFETY: the entry points to no memory; `keep` holds the listening socket.
            armed.push_back(unsafe { self.ring.start(Class::Socket, entry, keep) });
        }
    }

    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<i32> {
        self.arm();
        let mut armed = self.armed.borrow_mut();
        for index in 0..armed.len() {
            if let Poll::Ready(completion) = self.ring.poll_op(armed[index], cx) {
                armed.remove(index);
                return Poll::Ready(completion.result);
            }
        }
        Poll::Pending
    }

    /// The next connection. No error ends a listener: it is told to `report`, and after one that means exhaustion
    /// (descriptors, memory) the next attempt waits.
    pub async fn accept(&self, mut report: impl FnMut(&io::Error)) -> Stream {
        loop {
            let result = std::future::poll_fn(|cx| self.poll_accept(cx)).await;
            if result >= 0 {
                self.arm();
                return Stream::new(self.ring.clone(), result);
            }
            let error = io::Error::from_raw_os_error(-result);
            report(&error);
            match -result {
                libc::ECONNABORTED | libc::EINTR | libc::EAGAIN | libc::EPROTO => {}
                _ => rt::sleep(ACCEPT_BACKOFF).await,
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        for id in self.armed.take() {
            self.ring.cancel(id);
            self.ring.abandon(id);
        }
    }
}

/// Bytes that the kernel has put into one of the ring's buffers.
struct Received {
    buffer: u16,
    at: usize,
    bytes: usize,
}

/// A connection. Polled by one task; dropping it closes the connection, whatever is under way.
pub struct Stream {
    ring: Rc<Ring>,
    descriptor: Rc<Descriptor>,
    recv: Option<OpId>,
    received: Option<Received>,
    /// The socket had more than fitted the last buffer.
    more: bool,
    ended: bool,
    send: Option<OpId>,
    /// Bytes of the buffer in flight that were sent already, and those that are on their way.
    sent: usize,
    sending: usize,
    /// Taken from the writer, not given to the socket yet.
    queued: Vec<u8>,
    failed: Option<i32>,
    shutdown: Option<OpId>,
}

impl Stream {
    fn new(ring: Rc<Ring>, fd: i32) -> Stream {
        ring.connections.set(ring.connections.get() + 1);
        Stream {
            descriptor: Rc::new(Descriptor::new(ring.clone(), fd)),
            ring,
            recv: None,
            received: None,
            more: false,
            ended: false,
            send: None,
            sent: 0,
            sending: 0,
            queued: Vec::new(),
            failed: None,
            shutdown: None,
        }
    }

    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        // SAFETY: the descriptor is open, and not closed by the value that borrows it.
        ManuallyDrop::new(unsafe { TcpStream::from_raw_fd(self.descriptor.get().0) }).peer_addr()
    }

    #[cfg(test)]
    pub(super) fn fd(&self) -> i32 {
        self.descriptor.get().0
    }

    fn start(&self, entry: squeue::Entry) -> OpId {
        // SAFETY: the entries passed here point to no memory (buffers are the kernel's pick).
        unsafe { self.ring.start(Class::Socket, entry, Keep::on(&self.descriptor, Memory::Nothing)) }
    }

    /// Bytes that have arrived and were not consumed; empty is the peer's end of stream. Pending, it holds no buffer;
    /// and it completes when the peer goes, so a handler that runs meanwhile can be given up.
    pub fn poll_received(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<&[u8]>> {
        while self.received.is_none() && !self.ended {
            ready!(self.poll_arrival(cx))?;
        }
        Poll::Ready(Ok(match &self.received {
            Some(received) => &self.ring.recv.bytes(received.buffer, received.bytes)[received.at..],
            None => &[],
        }))
    }

    /// Gives back the first `count` bytes of what [`Stream::poll_received`] showed.
    pub fn consume(&mut self, count: usize) {
        let Some(received) = &mut self.received else {
            assert_eq!(count, 0, "more is consumed than was received");
            return;
        };
        received.at += count;
        assert!(received.at <= received.bytes, "more is consumed than was received");
        if received.at == received.bytes {
            self.ring.recv.give_back(received.buffer);
            self.received = None;
        }
    }

    /// Reads up to `buf.len()` bytes; 0 is the peer's end of stream.
    pub fn poll_recv(&mut self, cx: &mut Context<'_>, buf: &mut [u8]) -> Poll<io::Result<usize>> {
        let bytes = ready!(self.poll_received(cx))?;
        let count = bytes.len().min(buf.len());
        buf[..count].copy_from_slice(&bytes[..count]);
        self.consume(count);
        Poll::Ready(Ok(count))
    }

    /// One receive: afterwards there are bytes, or the end, or another one is needed.
    fn poll_arrival(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let id = match self.recv {
            Some(id) => id,
            None => {
                let first = if self.more { 0 } else { POLL_FIRST };
                let entry = opcode::Recv::new(self.descriptor.get(), std::ptr::null_mut(), 0)
                    .buf_group(GROUP)
                    .ioprio(first)
                    .build()
                    .flags(squeue::Flags::BUFFER_SELECT);
                *self.recv.insert(self.start(entry))
            }
        };
        let completion = ready!(self.ring.poll_op(id, cx));
        self.recv = None;
        self.more = cqueue::sock_nonempty(completion.flags);
        match (completion.result, cqueue::buffer_select(completion.flags)) {
            (count @ 1.., Some(buffer)) => {
                self.received = Some(Received { buffer, at: 0, bytes: count as usize });
                return Poll::Ready(Ok(()));
            }
            (_, Some(buffer)) => self.ring.recv.give_back(buffer),
            (_, None) => {}
        }
        match -completion.result {
            0 => self.ended = true,
            libc::EINTR | libc::EAGAIN => {}
            // All buffers are in use: at least one comes back when its reader is polled.
            libc::ENOBUFS => {
                self.more = true;
                if self.ring.recv.wait(cx.waker()) {
                    return Poll::Pending;
                }
            }
            code => return Poll::Ready(Err(io::Error::from_raw_os_error(code))),
        }
        Poll::Ready(Ok(()))
    }

    /// Takes up to `buf.len()` bytes for sending; they leave at the next [`Stream::poll_flush`], or when enough has
    /// gathered. An error of an earlier send is told here.
    pub fn poll_send(&mut self, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if let Some(code) = self.failed {
            return Poll::Ready(Err(io::Error::from_raw_os_error(code)));
        }
        if self.queued.len() >= SEND_BYTES_MAX {
            if self.send.is_some() {
                ready!(self.poll_sent(cx))?;
            }
            self.start_send();
        }
        if self.queued.capacity() == 0 {
            self.queued = self.ring.spare_buffer();
        }
        let count = buf.len().min(SEND_BYTES_MAX - self.queued.len());
        self.queued.extend_from_slice(&buf[..count]);
        Poll::Ready(Ok(count))
    }

    /// Completes once everything taken has been given to the socket.
    pub fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            if let Some(code) = self.failed {
                return Poll::Ready(Err(io::Error::from_raw_os_error(code)));
            }
            if self.send.is_some() {
                ready!(self.poll_sent(cx))?;
            } else if self.queued.is_empty() {
                return Poll::Ready(Ok(()));
            } else {
                self.start_send();
            }
        }
    }

    /// As [`Stream::poll_flush`], but a small send counts as done once it was given to the ring. The task is woken again
    /// only when it fails or stops short; at most one send is left behind like that, the next one waits for it.
    pub fn poll_hand_over(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            match self.send {
                Some(id) if self.queued.is_empty() && self.sending <= SMALL_SEND_BYTES => {
                    match self.ring.poll_op_quietly(id, cx, self.sending as i32) {
                        Poll::Ready(completion) => self.take_sent(completion)?,
                        Poll::Pending => return Poll::Ready(Ok(())),
                    }
                }
                Some(_) => ready!(self.poll_sent(cx))?,
                None if self.queued.is_empty() || self.failed.is_some() => return self.poll_flush(cx),
                None => self.start_send(),
            }
        }
    }

    fn start_send(&mut self) {
        assert!(self.send.is_none(), "one send in flight a stream, or bytes overtake each other");
        self.sent = 0;
        let data = std::mem::take(&mut self.queued);
        self.submit_send(data);
    }

    fn submit_send(&mut self, data: Vec<u8>) {
        let rest = &data[self.sent..];
        self.sending = rest.len();
        let entry = opcode::Send::new(self.descriptor.get(), rest.as_ptr(), rest.len() as u32)
            .flags(libc::MSG_NOSIGNAL | libc::MSG_WAITALL)
            .build();
        let keep = Keep::on(&self.descriptor, Memory::Bytes(data));
        // SAFETY: the entry points into the heap memory of the vector that `keep` owns.
        self.send = Some(unsafe { self.ring.start(Class::Socket, entry, keep) });
    }

    fn poll_sent(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while let Some(id) = self.send {
            let completion = ready!(self.ring.poll_op(id, cx));
            self.take_sent(completion)?;
        }
        Poll::Ready(Ok(()))
    }

    /// What has become of the send in flight; the next one starts when it stopped short.
    fn take_sent(&mut self, completion: Completion) -> io::Result<()> {
        self.send = None;
        let Memory::Bytes(data) = completion.keep.memory else { unreachable!("a send keeps its buffer") };
        match completion.result {
            count if count >= 0 => {
                self.sent += count as usize;
                if self.sent < data.len() {
                    self.submit_send(data);
                } else {
                    self.ring.keep_spare(data);
                }
            }
            code if code == -libc::EINTR || code == -libc::EAGAIN => self.submit_send(data),
            code => {
                self.failed = Some(-code);
                return Err(io::Error::from_raw_os_error(-code));
            }
        }
        Ok(())
    }

    /// Sends what was taken, then the end of the stream; reading goes on.
    pub fn poll_shutdown(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.shutdown.is_none() {
            ready!(self.poll_flush(cx))?;
            let entry = opcode::Shutdown::new(self.descriptor.get(), libc::SHUT_WR).build();
            self.shutdown = Some(self.start(entry));
        }
        let Some(id) = self.shutdown else { return Poll::Ready(Ok(())) };
        let completion = ready!(self.ring.poll_op(id, cx));
        self.shutdown = None;
        match -completion.result {
            // The peer has gone already: nothing is left to end.
            code if code <= 0 || code == libc::ENOTCONN => Poll::Ready(Ok(())),
            code => Poll::Ready(Err(io::Error::from_raw_os_error(code))),
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.ring.connections.set(self.ring.connections.get() - 1);
        if let Some(received) = self.received.take() {
            self.ring.recv.give_back(received.buffer);
        }
        // A receive may wait for ever, and a send for a peer that does not read; both hold the socket open.
        for id in [self.recv.take(), self.send.take()].into_iter().flatten() {
            self.ring.cancel(id);
            self.ring.abandon(id);
        }
        if let Some(id) = self.shutdown.take() {
            self.ring.abandon(id);
        }
        if self.queued.capacity() > 0 {
            self.ring.keep_spare(std::mem::take(&mut self.queued));
        }
    }
}
