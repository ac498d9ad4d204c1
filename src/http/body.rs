//! Reading request bodies: bounded, on a deadline, never by the declared length (lesson N41).

use std::future::{poll_fn, Future};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use bytes::Bytes;
use hyper::body::{Body, Incoming};
use narad_shards::rt::{self, Instant, Sleep};

use super::decode::{Coding, Decoder, STEP_BYTES};
use super::limits::{BodyReservation, NodeLimits};
use super::stream::Conn;

/// What is allocated before more than this has arrived, whatever length was declared.
const FIRST_BYTES: usize = 64 << 10;
/// What is read of a body that nobody wants, to keep its connection.
const SKIPPED_BYTES_MAX: usize = 64 << 10;
/// Decoded bytes after which others have a turn; about a quarter of a millisecond of zstd.
const SLICE_BYTES: usize = 256 << 10;

/// Why a body could not be had.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum BodyFailure {
    TooLarge,
    /// The client stopped sending, or closed, before the end.
    Left,
    /// Not within `http.read_timeout`.
    Slow,
    /// Broken chunked framing.
    Malformed,
    /// Broken or cut compressed data.
    Undecodable,
    /// No room in the node's budget for large bodies.
    NoBudget,
    /// No room in the memory for request bodies.
    NoMemory,
}

/// A request body on its way in. Dropped before its end, it marks the connection as not fully read.
pub(crate) struct BodyReader<'a> {
    incoming: Incoming,
    ended: bool,
    deadline: Instant,
    sleep: Option<Sleep>,
    conn: Rc<Conn>,
    node: &'a Arc<NodeLimits>,
    /// Of the memory for bodies, from the size on where that is counted. Held until the request is answered: the body
    /// lives as long as its request.
    memory: Option<BodyReservation>,
    refused_for_memory: bool,
}

impl<'a> BodyReader<'a> {
    pub fn new(incoming: Incoming, deadline: Instant, conn: Rc<Conn>, node: &'a Arc<NodeLimits>) -> BodyReader<'a> {
        BodyReader {
            incoming,
            ended: false,
            deadline,
            sleep: None,
            conn,
            node,
            memory: None,
            refused_for_memory: false,
        }
    }

    /// Makes room for `more` bytes in a buffer that never holds more than `bytes_max`, and `beside` bytes besides it.
    /// What counts is what is allocated, before it is.
    fn grow(&mut self, all: &mut Vec<u8>, more: usize, bytes_max: usize, beside: usize) -> Result<(), BodyFailure> {
        let needed = all.len() + more;
        if needed > all.capacity() {
            let doubled = (2 * all.capacity()).min(bytes_max).max(needed);
            self.hold(doubled + beside)?;
            all.reserve_exact(doubled - all.len());
        }
        Ok(())
    }

    /// As much again as the body has, for what is decoded from it.
    pub fn hold_twice(&mut self, body: &Bytes) -> Result<(), BodyFailure> {
        self.let_go(body.len()); // whatever unpacked it has gone
        self.hold(2 * body.len())
    }

    /// No more than so many bytes are held any longer.
    pub fn let_go(&mut self, bytes: usize) {
        if let Some(memory) = &mut self.memory {
            memory.shrink_to(bytes);
        }
    }

    /// So many bytes of the body are held.
    fn hold(&mut self, bytes: usize) -> Result<(), BodyFailure> {
        if !BodyReservation::memory_counts(bytes) {
            return Ok(());
        }
        let memory = self.memory.get_or_insert_with(|| BodyReservation::of_memory(self.node));
        memory.cover(bytes).map_err(|_| {
            self.refused_for_memory = true;
            BodyFailure::NoMemory
        })
    }

    /// For the metrics, whatever became of the request.
    pub fn was_refused_for_memory(&self) -> bool {
        self.refused_for_memory
    }

    fn declared_bytes(&self) -> Option<u64> {
        self.incoming.size_hint().exact()
    }

    /// Whether no more data can follow.
    fn at_end(&self) -> bool {
        self.ended || self.incoming.is_end_stream()
    }

    /// Reads and forgets what an answer did not need, if that is little; `false` when the connection cannot be used
    /// after the answer. A client that waits for `100 Continue` must not be invited now.
    pub async fn skip_rest(&mut self, waits_for_continue: bool) -> bool {
        let mut left = SKIPPED_BYTES_MAX;
        while !self.at_end() {
            if waits_for_continue || self.declared_bytes().is_none_or(|bytes| bytes > left as u64) {
                return false;
            }
            match self.next().await {
                Ok(Some(piece)) => left = left.saturating_sub(piece.len()),
                Ok(None) => break,
                Err(_) => return false,
            }
        }
        true
    }

    /// The next piece, or `None` at the end.
    async fn next(&mut self) -> Result<Option<Bytes>, BodyFailure> {
        poll_fn(|cx| loop {
            let woken = rt::is_woken();
            match Pin::new(&mut self.incoming).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) if data.is_empty() => {}
                    Ok(data) => {
                        // hyper wakes its task for each piece that is taken, to pass on the next one. Behind the last
                        // there is none: without this, each produce would poll its whole connection once for nothing.
                        if !woken && self.incoming.is_end_stream() {
                            rt::forget_wake();
                        }
                        return Poll::Ready(Ok(Some(data)));
                    }
                    Err(_trailers) => {}
                },
                Poll::Ready(Some(Err(cause))) => {
                    self.ended = true;
                    return Poll::Ready(Err(classify(&cause)));
                }
                Poll::Ready(None) => {
                    self.ended = true;
                    return Poll::Ready(Ok(None));
                }
                Poll::Pending => {
                    let sleep = self.sleep.get_or_insert_with(|| rt::sleep_until(self.deadline));
                    return Pin::new(sleep).poll(cx).map(|()| Err(BodyFailure::Slow));
                }
            }
        })
        .await
    }

    /// All of the body, at most `bytes_max`. A body that came in one piece is not copied.
    pub async fn read_all(&mut self, bytes_max: usize) -> Result<Bytes, BodyFailure> {
        self.read_plain(bytes_max, |_| Ok(())).await
    }

    /// All of the body with its compression undone, at most `bytes_max` both as sent and decoded. `reservation`
    /// grows with what is held.
    pub async fn read_decoded(
        &mut self,
        coding: Coding,
        bytes_max: usize,
        reservation: &mut BodyReservation,
    ) -> Result<Bytes, BodyFailure> {
        let mut cover = |bytes| reservation.cover(bytes).map_err(|_| BodyFailure::NoBudget);
        if coding == Coding::Identity {
            return self.read_plain(bytes_max, cover).await;
        }
        if self.declared_bytes().is_some_and(|bytes| bytes > bytes_max as u64) {
            return Err(BodyFailure::TooLarge);
        }
        // Nothing is set up for a client that has sent nothing.
        let mut next = self.next().await?;
        let mut decoder = Decoder::new(coding).unwrap_or(Decoder::Broken);
        let (mut sent, mut decoded, mut slice) = (0, Vec::new(), 0);
        self.grow(&mut decoded, FIRST_BYTES + STEP_BYTES, bytes_max, decoder.memory_bytes(0))?;
        while let Some(piece) = next {
            sent += piece.len();
            if sent > bytes_max {
                return Err(BodyFailure::TooLarge);
            }
            let mut rest = &piece[..];
            let mut more = !rest.is_empty();
            while more {
                let before = decoded.len();
                let beside = decoder.memory_bytes(decoded.len());
                self.grow(&mut decoded, STEP_BYTES, bytes_max, beside)?;
                more = decoder.step(&mut rest, &mut decoded).map_err(|_| BodyFailure::Undecodable)?;
                if decoded.len() > bytes_max {
                    return Err(BodyFailure::TooLarge);
                }
                cover(decoded.len())?;
                self.hold(decoded.capacity() + decoder.memory_bytes(decoded.len()))?;
                slice += decoded.len() - before;
                if slice >= SLICE_BYTES {
                    slice = 0;
                    rt::yield_now().await;
                }
            }
            next = self.next().await?;
        }
        decoder.finish(&mut decoded).map_err(|_| BodyFailure::Undecodable)?;
        if decoded.len() > bytes_max {
            return Err(BodyFailure::TooLarge);
        }
        decoded.shrink_to_fit(); // what is charged from here on is its length
        Ok(Bytes::from(decoded))
    }

    async fn read_plain(
        &mut self,
        bytes_max: usize,
        mut cover: impl FnMut(usize) -> Result<(), BodyFailure>,
    ) -> Result<Bytes, BodyFailure> {
        let declared = self.declared_bytes();
        if declared.is_some_and(|bytes| bytes > bytes_max as u64) {
            return Err(BodyFailure::TooLarge);
        }
        let Some(first) = self.next().await? else { return Ok(Bytes::new()) };
        if first.len() > bytes_max {
            return Err(BodyFailure::TooLarge);
        }
        cover(first.len())?;
        self.hold(first.len())?;
        if self.at_end() {
            return Ok(first);
        }
        let whole = declared.map_or(bytes_max, |bytes| bytes as usize);
        let mut all = Vec::new();
        self.grow(&mut all, FIRST_BYTES.min(whole).max(first.len()), whole, 0)?;
        all.extend_from_slice(&first);
        drop(first);
        while !self.at_end() {
            let Some(piece) = self.next().await? else { break };
            if all.len() + piece.len() > bytes_max {
                return Err(BodyFailure::TooLarge);
            }
            cover(all.len() + piece.len())?;
            self.grow(&mut all, piece.len(), whole, 0)?;
            all.extend_from_slice(&piece);
        }
        all.shrink_to_fit();
        Ok(Bytes::from(all))
    }
}

impl Drop for BodyReader<'_> {
    fn drop(&mut self) {
        if !self.at_end() {
            self.conn.leave_body_unread();
        }
    }
}

/// Broken framing is the client's fault and worth an answer; everything else means that nobody is there to read it.
fn classify(cause: &hyper::Error) -> BodyFailure {
    let mut source = std::error::Error::source(cause);
    while let Some(inner) = source {
        if let Some(io) = inner.downcast_ref::<std::io::Error>() {
            let broken = matches!(io.kind(), std::io::ErrorKind::InvalidInput | std::io::ErrorKind::InvalidData);
            return if broken { BodyFailure::Malformed } else { BodyFailure::Left };
        }
        source = inner.source();
    }
    BodyFailure::Left
}
