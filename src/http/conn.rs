//! Drives one connection: hyper, the deadlines around it, and what has to happen at its end.

use std::cell::Cell;
use std::convert::Infallible;
use std::future::{poll_fn, Future};
use std::net::IpAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::rt::{Read, ReadBuf, Write};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::Request;
use narad_shards::rt::{self, Instant, Queue, Sleep};

use super::pipeline;
use super::reply;
use super::socket::Transport;
use super::stream::{Conn, Watched};
use super::{Broker, HttpContext};

/// hyper refuses anything smaller; also the largest piece of a body that it hands over at once.
const BUFFER_BYTES: usize = 64 << 10;
/// hyper has places for so many header lines in a request. More are memory that every request has to ask for, so a
/// connection gets them when it first needs them: what was read goes to a new hyper, which may take more.
const LINES_USUAL: usize = 100;
/// The limit of a header block is its bytes; so many lines are 64 KiB of the shortest, and fit into hyper's header map.
const LINES_MAX: usize = 16 << 10;
/// How long, and for how many bytes, a client may go on sending into a connection that was answered early. Closing
/// at once would reset it and destroy the answer on its way.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_BYTES_MAX: usize = 4 << 20;
/// How long a connection has to be quiet before a stop closes it. Who sends one request after the other sends the next one
/// within that time, and is told with its answer that it was the last: closed at once, the two would miss each other.
const QUIET: Duration = Duration::from_millis(100);

/// Serves one client connection to its end. `peer` is the client's address, the identity that caps count for. `queue`
/// is set to the one that the connection should run in, by the kind of its last request.
///
/// Dropping the future drops the handler that is running; leases of an answer that did not leave then wait for their
/// visibility timeout, so let it run to its end when the node goes on.
pub async fn serve_connection<S, B>(stream: S, peer: IpAddr, ctx: Rc<HttpContext<B>>, queue: Rc<Cell<Queue>>)
where
    S: Transport,
    B: Broker,
{
    let state = Rc::new(Conn::new(peer, queue));
    let mut timer = LazyTimer::default();
    let mut closes = std::pin::pin!(ctx.stop.closes());
    let mut close_waker: Option<Waker> = None;
    let mut told = false;
    let mut watched = Watched::new(stream, state.clone());
    let mut many_lines = false;
    let (finished, mut stream, large_body) = loop {
        let service = service_fn(|request: Request<Incoming>| {
            state.begin_request();
            let (ctx, state) = (ctx.clone(), state.clone());
            async move { Ok::<_, Infallible>(pipeline::answer(ctx, state, request).await) }
        });
        let mut http = http1::Builder::new();
        http.header_read_timeout(None)
            .half_close(false)
            .max_header_size(ctx.settings.header_bytes_max)
            .max_buf_size(ctx.settings.header_bytes_max.max(BUFFER_BYTES));
        if many_lines {
            http.max_headers(LINES_MAX);
        }
        let mut connection = http.serve_connection(watched, service);
        let finished = poll_fn(|cx| {
            // Registering is not free, so once per waker.
            if !told && !close_waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
                let _ = closes.as_mut().poll(cx);
                close_waker = Some(cx.waker().clone());
            }
            if let Poll::Ready(result) = Pin::new(&mut connection).poll(cx) {
                return Poll::Ready(Some(result));
            }
            // Only now, when all that has come is read: a request that has begun is answered, and its answer says that
            // it is the last (`pipeline`). hyper would also close on half a header block.
            if !told && ctx.stop.is_closing() && state.is_idle() && timer.reached(cx, state.since() + QUIET) {
                told = true;
                Pin::new(&mut connection).graceful_shutdown();
                if let Poll::Ready(result) = Pin::new(&mut connection).poll(cx) {
                    return Poll::Ready(Some(result));
                }
            }
            match state.deadline(&ctx.settings) {
                Some(at) if timer.reached(cx, at) => Poll::Ready(None),
                _ => Poll::Pending,
            }
        })
        .await;

        // The handler, if one was running, is dropped here: its client has left, or was too slow.
        let parts = connection.into_parts();
        let unread = parts.read_buf;
        // hyper refuses a Content-Length that it cannot count to after it has taken the header block. What is left then is the
        // body, and nobody may read that as a request.
        let is_head = state.holds_whole_head(parts.io.stream.received(), unread.len());
        if many_lines || !is_head || state.refused() != Some(431) || lines(&unread) <= LINES_USUAL {
            // A header block that is too large is still in the buffer; of a body that is too large it is gone.
            let large_body = !is_head
                && state.refused() == Some(431)
                && unread.len() < ctx.settings.header_bytes_max
                && lines(&unread) <= LINES_USUAL;
            break (finished, parts.io.stream, large_body);
        }
        many_lines = true;
        state.forget_refusal();
        watched = Watched::rewound(parts.io.stream, unread, state.clone());
    };
    match (&finished, state.refused()) {
        (Some(result), Some(status)) => {
            let (status, why) = match result {
                _ if large_body => (413, Some(reply::BODY_TOO_LARGE)),
                // hyper has no other word for it, and keeps the block.
                Err(cause) if cause.to_string().contains("content-length") => (status, Some(reply::CONTENT_LENGTH)),
                _ => (status, None),
            };
            ctx.metrics.count_refused(status);
            let answer = reply::refusal(status, why);
            let sent = rt::timeout(LINGER, async {
                write_all(&mut stream, &answer).await?;
                poll_fn(|cx| Pin::new(&mut stream).poll_shutdown(cx)).await
            });
            if matches!(sent.await, Ok(Ok(()))) {
                linger(&mut stream).await;
            }
        }
        (Some(Ok(())), None) if state.has_unread_body() => linger(&mut stream).await,
        (Some(Ok(())), None) => {}
        (Some(Err(cause)), None) => tracing::debug!(%peer, err = %cause, "client connection ended"),
        (None, _) => tracing::debug!(%peer, "client connection timed out"),
    }
    // A client that has all of its answer may be gone before anybody has looked whether it was sent: to hand its leases back
    // would deliver twice, and refuse its acks.
    if finished.is_some() && state.waits_for_transport() {
        let sent = rt::timeout(LINGER, poll_fn(|cx| Pin::new(&mut stream).poll_flush(cx)));
        if matches!(sent.await, Ok(Ok(()))) {
            state.on_flushed();
        }
    }
    drop(stream);

    let undelivered = state.leases.take();
    if let Some(leases) = undelivered {
        // Best effort: a lease that cannot be handed back expires.
        let _ = ctx.broker.settle(&leases.topic, leases.settles).await;
    }
}

fn lines(block: &[u8]) -> usize {
    block.iter().filter(|byte| **byte == b'\n').count()
}

async fn write_all<S: Write + Unpin>(stream: &mut S, mut bytes: &[u8]) -> std::io::Result<()> {
    while !bytes.is_empty() {
        let written = poll_fn(|cx| Pin::new(&mut *stream).poll_write(cx, bytes)).await?;
        if written == 0 {
            return Err(std::io::ErrorKind::WriteZero.into());
        }
        bytes = &bytes[written..];
    }
    poll_fn(|cx| Pin::new(&mut *stream).poll_flush(cx)).await
}

/// Reads and forgets what the client still sends, until it stops, closes, or has had enough time.
async fn linger<S: Read + Unpin>(stream: &mut S) {
    let drain = async {
        // On the heap: an array would be part of every connection's future.
        let mut scratch = vec![0u8; 4096];
        let mut total = 0;
        while total < LINGER_BYTES_MAX {
            let mut buf = ReadBuf::new(&mut scratch);
            let read = poll_fn(|cx| Pin::new(&mut *stream).poll_read(cx, buf.unfilled())).await;
            let bytes = buf.filled().len();
            if read.is_err() || bytes == 0 {
                return;
            }
            total += bytes;
        }
    };
    let _ = rt::timeout(LINGER, drain).await;
}

/// A deadline that moves with every request and is hardly ever reached: the timer is armed again only when it would
/// ring too late, or has rung too early.
struct LazyTimer {
    sleep: Option<Sleep>,
    armed_at: Instant,
    waker: Option<Waker>,
}

impl Default for LazyTimer {
    fn default() -> LazyTimer {
        LazyTimer { sleep: None, armed_at: Instant(u64::MAX), waker: None }
    }
}

impl LazyTimer {
    /// Whether `at` has passed; if not, the task is woken then, or earlier.
    fn reached(&mut self, cx: &mut Context<'_>, at: Instant) -> bool {
        let now = rt::now();
        if now >= at {
            return true;
        }
        let same_task = self.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker()));
        if same_task && now < self.armed_at && self.armed_at <= at {
            return false;
        }
        self.waker = Some(cx.waker().clone());
        self.armed_at = at;
        let sleep = self.sleep.insert(rt::sleep_until(at));
        Pin::new(sleep).poll(cx).is_ready()
    }
}
