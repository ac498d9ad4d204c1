//! The ring's TCP stream with the traits that hyper reads and writes through.

use std::cell::RefCell;
use std::io;
use std::pin::Pin;
use std::task::{ready, Context, Poll};

use hyper::rt::{Read, ReadBufCursor, Write};
use narad_shards::io::ring::Stream;

/// The most that one read takes: a buffer of the ring.
const READ_BYTES: usize = 64 << 10;

thread_local! {
    /// Lies between the ring's buffers and hyper's. hyper's memory is uninitialised, and clearing all of it at every
    /// poll, most of which read nothing, costs more than copying what did come.
    static LANDING: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// A client's connection.
pub struct Socket(Stream);

impl Socket {
    pub fn new(stream: Stream) -> Socket {
        Socket(stream)
    }
}

impl Read for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, mut buf: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        LANDING.with_borrow_mut(|landing| {
            landing.resize(READ_BYTES, 0);
            let room = buf.remaining().min(READ_BYTES);
            let count = ready!(self.0.poll_recv(cx, &mut landing[..room]))?;
            buf.put_slice(&landing[..count]);
            Poll::Ready(Ok(()))
        })
    }
}

impl Write for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.0.poll_send(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.poll_shutdown(cx)
    }
}
