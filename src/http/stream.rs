//! What one connection is doing, and the byte stream that keeps track of it beneath hyper.
//!
//! hyper's own timer stays off (E29): its header timeout starts while the connection is idle. So the stream notes the
//! first byte of a request, the service notes that the headers were complete and that an answer was given, and the
//! first flush after that ends the request. `conn` turns the phase into a deadline.

use std::cell::{Cell, OnceCell, RefCell};
use std::io::{self, IoSlice};
use std::net::IpAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{ready, Context, Poll};

use bytes::Bytes;
use hyper::rt::{Read, ReadBufCursor, Write};
use narad_shards::api::Settle;
use narad_shards::rt::{self, Instant, Queue};

use super::config::HttpSettings;
use super::limits::InFlight;
use super::socket::Transport;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Waiting for the first byte of a request.
    Idle,
    /// Some of the header block has come.
    Head,
    /// A handler works; it keeps its own deadlines.
    Busy,
    /// An answer was given and is not yet wholly with the kernel.
    Writing,
}

/// Leases in an answer that has not wholly left. Handed back when it cannot be sent any more (lesson N37).
pub(crate) struct Leases {
    pub topic: String,
    pub settles: Vec<Settle>,
}

/// State of one client connection, shared by the stream, the service and the driver.
pub(crate) struct Conn {
    pub peer: IpAddr,
    /// Where the connection should run.
    pub queue: Rc<Cell<Queue>>,
    phase: Cell<Phase>,
    since: Cell<Instant>,
    /// Bytes that had been read when the first one of the header block came.
    head_from: Cell<u64>,
    request_started: Cell<Instant>,
    answered: Cell<bool>,
    /// The whole answer is with the transport, sent or not.
    handed_over: Cell<bool>,
    refused: Cell<Option<u16>>,
    unread_body: Cell<bool>,
    pub leases: RefCell<Option<Leases>>,
    /// Looked up at the first request that has a cap, then kept: one lock per connection, none per request.
    pub in_flight: OnceCell<Arc<InFlight>>,
}

impl Conn {
    pub fn new(peer: IpAddr, queue: Rc<Cell<Queue>>) -> Conn {
        let now = rt::now();
        Conn {
            // A client has one identity, whichever family its listener speaks.
            peer: peer.to_canonical(),
            queue,
            phase: Cell::new(Phase::Idle),
            since: Cell::new(now),
            head_from: Cell::new(0),
            request_started: Cell::new(now),
            answered: Cell::new(false),
            handed_over: Cell::new(false),
            refused: Cell::new(None),
            unread_body: Cell::new(false),
            leases: RefCell::new(None),
            in_flight: OnceCell::new(),
        }
    }

    fn enter(&self, phase: Phase) {
        self.phase.set(phase);
        self.since.set(rt::now());
    }

    /// hyper has read a whole header block and calls the service.
    pub fn begin_request(&self) {
        // A pipelined request was read ahead: its first byte counts from here.
        let started = if self.phase.get() == Phase::Head { self.since.get() } else { rt::now() };
        self.request_started.set(started);
        self.unread_body.set(false);
        self.answered.set(false);
        self.handed_over.set(false);
        self.phase.set(Phase::Busy);
    }

    /// When the first byte of the current request came.
    pub fn request_started(&self) -> Instant {
        self.request_started.get()
    }

    /// The service returns its answer.
    pub fn begin_answer(&self) {
        self.enter(Phase::Writing);
    }

    /// hyper has taken the last byte of the answer into its buffers.
    pub fn answer_taken(&self) {
        self.answered.set(true);
    }

    pub fn leave_body_unread(&self) {
        self.unread_body.set(true);
    }

    pub fn has_unread_body(&self) -> bool {
        self.unread_body.get()
    }

    /// Status of an answer that hyper made by itself and that was held back.
    pub fn refused(&self) -> Option<u16> {
        self.refused.get()
    }

    /// The request that was refused is read once more, in another way.
    pub fn forget_refusal(&self) {
        self.refused.set(None);
    }

    /// When the connection is to be closed if nothing changes, if ever.
    pub fn deadline(&self, settings: &HttpSettings) -> Option<Instant> {
        let allowed = match self.phase.get() {
            Phase::Idle => settings.idle_timeout,
            Phase::Head => settings.header_timeout,
            Phase::Busy => return None,
            Phase::Writing => settings.write_timeout,
        };
        Some(self.since.get() + allowed)
    }

    /// When the phase began in which the connection is.
    pub fn since(&self) -> Instant {
        self.since.get()
    }

    /// Whether all that was read since the connection was idle is in hyper's buffer yet: then it has taken nothing of the
    /// header block.
    pub fn holds_whole_head(&self, received: u64, unread: usize) -> bool {
        received - self.head_from.get() == unread as u64
    }

    /// Nothing has come since the last answer.
    pub fn is_idle(&self) -> bool {
        self.phase.get() == Phase::Idle
    }

    /// Something was read; the end of the stream counts too, the connection is about to close then.
    /// `before`: bytes that had been read until then.
    fn on_read(&self, before: u64) {
        if self.phase.get() == Phase::Idle {
            self.head_from.set(before);
            self.enter(Phase::Head);
        }
    }

    /// Whether leases are left in an answer that hyper keeps nothing of: what became of it the transport knows.
    pub fn waits_for_transport(&self) -> bool {
        self.handed_over.get() && self.leases.borrow().is_some()
    }

    pub fn on_flushed(&self) {
        if self.phase.get() == Phase::Writing && self.answered.get() {
            self.enter(Phase::Idle);
            let delivered = self.leases.take();
            drop(delivered);
        }
    }

    /// Whether bytes that hyper writes now are an answer of its own: no request is being served, so it refused what
    /// it read (431, 400, 414), without a body. The driver answers in its stead.
    fn holds_back(&self, first: &[u8]) -> bool {
        if !matches!(self.phase.get(), Phase::Idle | Phase::Head) {
            return false;
        }
        if self.refused.get().is_none() {
            let status = first.get(9..12).and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
            self.refused.set(Some(status.unwrap_or(400)));
        }
        true
    }
}

/// A connection's byte stream as hyper sees it.
pub(crate) struct Watched<S> {
    pub stream: S,
    conn: Rc<Conn>,
    /// Read before, and to be read again.
    rewound: Bytes,
}

impl<S> Watched<S> {
    pub fn new(stream: S, conn: Rc<Conn>) -> Watched<S> {
        Watched::rewound(stream, Bytes::new(), conn)
    }

    /// `bytes` come before what the stream has.
    pub fn rewound(stream: S, bytes: Bytes, conn: Rc<Conn>) -> Watched<S> {
        Watched { stream, conn, rewound: bytes }
    }
}

impl<S: Transport> Read for Watched<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, mut buf: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        let before = self.stream.received();
        if self.rewound.is_empty() {
            ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        } else {
            let bytes = self.rewound.len().min(buf.remaining());
            buf.put_slice(&self.rewound.split_to(bytes));
        }
        self.conn.on_read(before);
        Poll::Ready(Ok(()))
    }
}

impl<S: Transport> Write for Watched<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.conn.holds_back(bytes) {
            return Poll::Ready(Ok(bytes.len()));
        }
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.conn.holds_back(parts.first().map_or(&[], |part| &part[..])) {
            return Poll::Ready(Ok(parts.iter().map(|part| part.len()).sum()));
        }
        Pin::new(&mut self.stream).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // hyper flushes once it has written all that it had.
        self.conn.handed_over.set(self.conn.answered.get());
        // An answer without leases is not waited for: a connection that fails now is found out by its next read.
        let leases = self.conn.leases.borrow().is_some();
        let stream = Pin::new(&mut self.stream);
        ready!(if leases { stream.poll_flush(cx) } else { stream.poll_hand_over(cx) })?;
        self.conn.on_flushed();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // A refused connection is shut down by the driver, once it has written the answer.
        if self.conn.refused().is_some() {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
