//! hyper's view of a connection of the shard's own ring.

use std::io;
use std::pin::Pin;
use std::task::{ready, Context, Poll};

use hyper::rt::{Read, ReadBufCursor, Write};
use narad_shards::io::Stream;

/// Largest piece read at once; hyper asks for as much as its buffer takes.
const PIECE_BYTES: usize = 16 << 10;

pub struct Socket {
    stream: Stream,
    /// Received bytes pass through here, since hyper's buffer is uninitialised and the ring hands out its own.
    piece: Box<[u8]>,
}

impl Socket {
    pub fn new(stream: Stream) -> Socket {
        Socket { stream, piece: Box::default() }
    }
}

impl Read for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, mut buf: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let wanted = buf.remaining().min(PIECE_BYTES);
        if this.piece.len() < wanted {
            this.piece = vec![0; PIECE_BYTES].into_boxed_slice();
        }
        let count = ready!(this.stream.poll_recv(cx, &mut this.piece[..wanted]))?;
        buf.put_slice(&this.piece[..count]);
        Poll::Ready(Ok(()))
    }
}

impl Write for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.stream.poll_send(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.poll_shutdown(cx)
    }
}
