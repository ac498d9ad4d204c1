//! A connection in memory, with the traits that hyper wants on the server's side.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::{poll_fn, Future};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{ready, Context, Poll, Waker};
use std::time::Duration;

use hyper::rt::{Read, ReadBufCursor, Write};
use narad_shards::rt::{self, Sleep};

#[derive(Default)]
struct Lane {
    bytes: VecDeque<u8>,
    room_bytes: usize,
    /// No more will come.
    ended: bool,
    /// Nobody will read.
    reader_gone: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl Lane {
    fn wake(&mut self) {
        self.reader.take().into_iter().chain(self.writer.take()).for_each(Waker::wake);
    }
}

pub(super) struct End {
    incoming: Rc<RefCell<Lane>>,
    outgoing: Rc<RefCell<Lane>>,
    received: u64,
    /// How long it takes until a flush is done; the bytes are with the reader before.
    flush_takes: Duration,
    flush: Option<Sleep>,
}

pub(super) fn pipe(room_bytes: usize) -> (End, End) {
    let lane = || Rc::new(RefCell::new(Lane { room_bytes, ..Lane::default() }));
    let (one, other) = (lane(), lane());
    (
        End { incoming: one.clone(), outgoing: other.clone(), received: 0, flush_takes: Duration::ZERO, flush: None },
        End { incoming: other, outgoing: one, received: 0, flush_takes: Duration::ZERO, flush: None },
    )
}

impl End {
    pub fn with_slow_flush(mut self, flush_takes: Duration) -> End {
        self.flush_takes = flush_takes;
        self
    }

    fn poll_take(&mut self, cx: &mut Context<'_>, bytes_max: usize) -> Poll<Vec<u8>> {
        let mut lane = self.incoming.borrow_mut();
        if lane.bytes.is_empty() && !lane.ended {
            lane.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let count = lane.bytes.len().min(bytes_max);
        let taken = lane.bytes.drain(..count).collect();
        lane.wake();
        self.received += count as u64;
        Poll::Ready(taken)
    }

    fn poll_put(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut lane = self.outgoing.borrow_mut();
        if lane.reader_gone || lane.ended {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let count = (lane.room_bytes - lane.bytes.len()).min(bytes.len());
        if count == 0 {
            lane.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        lane.bytes.extend(&bytes[..count]);
        lane.wake();
        Poll::Ready(Ok(count))
    }

    pub fn shut_down_sending(&mut self) {
        let mut lane = self.outgoing.borrow_mut();
        lane.ended = true;
        lane.wake();
    }

    pub async fn write_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let count = poll_fn(|cx| self.poll_put(cx, bytes)).await?;
            bytes = &bytes[count..];
        }
        Ok(())
    }

    /// What has come, at least one byte; empty at the end.
    pub async fn read_some(&mut self) -> Vec<u8> {
        poll_fn(|cx| self.poll_take(cx, usize::MAX)).await
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.shut_down_sending();
        let mut lane = self.incoming.borrow_mut();
        lane.reader_gone = true;
        lane.wake();
    }
}

impl Read for End {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, mut buf: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        let room = buf.remaining();
        self.poll_take(cx, room).map(|bytes| {
            buf.put_slice(&bytes);
            Ok(())
        })
    }
}

impl crate::http::Transport for End {
    fn received(&self) -> u64 {
        self.received
    }
}

impl Write for End {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_put(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.flush_takes > Duration::ZERO {
            let takes = self.flush_takes;
            ready!(Pin::new(self.flush.get_or_insert_with(|| rt::sleep(takes))).poll(cx));
            self.flush = None;
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.shut_down_sending();
        Poll::Ready(Ok(()))
    }
}
