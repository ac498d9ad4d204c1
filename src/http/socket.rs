//! hyper's view of a connection of the shard's own ring. It owns no buffer: an idle connection costs none.

use std::io;
use std::pin::Pin;
use std::task::{ready, Context, Poll};

use hyper::rt::{Read, ReadBufCursor, Write};
use narad_shards::io::Stream;

/// What carries a connection's bytes.
pub trait Transport: Read + Write + Unpin {
    /// As `poll_flush`, for bytes that nobody has to know the end of: the transport may still be sending the last few
    /// when it says that it is done. An error comes with a later call.
    fn poll_hand_over(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_flush(cx)
    }

    /// Bytes that were read so far.
    fn received(&self) -> u64;
}

pub struct Socket {
    stream: Stream,
    received: u64,
}

impl Socket {
    pub fn new(stream: Stream) -> Socket {
        Socket { stream, received: 0 }
    }
}

impl Read for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, mut buf: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        // Copied once, from the ring's buffer to hyper's.
        let bytes = ready!(self.stream.poll_received(cx))?;
        let count = bytes.len().min(buf.remaining());
        buf.put_slice(&bytes[..count]);
        self.stream.consume(count);
        self.received += count as u64;
        Poll::Ready(Ok(()))
    }
}

impl Write for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.stream.poll_send(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut total = 0;
        for buf in bufs.iter().filter(|buf| !buf.is_empty()) {
            match self.stream.poll_send(cx, buf) {
                Poll::Ready(Ok(count)) => {
                    total += count;
                    if count < buf.len() {
                        break;
                    }
                }
                // What was taken before counts; the error, or the wait, comes again at the next call.
                Poll::Ready(Err(_)) | Poll::Pending if total > 0 => break,
                other => return other,
            }
        }
        Poll::Ready(Ok(total))
    }

    /// The stream gathers what it is given: one send for a head and its body, and hyper need not join them first.
    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.poll_shutdown(cx)
    }
}

impl Transport for Socket {
    fn poll_hand_over(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.poll_hand_over(cx)
    }

    fn received(&self) -> u64 {
        self.received
    }
}
