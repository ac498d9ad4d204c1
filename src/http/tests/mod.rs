//! The whole HTTP layer over an in-memory connection and a fake shard, in virtual time.

mod ack;
mod audit;
mod connection;
mod consume;
mod docs;
mod fake;
mod figures;
mod hostile;
mod pipe;
mod pipeline;
mod produce;
mod socket;
mod topics;

use std::cell::Cell;
use std::future::Future;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;

use narad_shards::rt::sync::oneshot;
use narad_shards::rt::{self, Queue, Task};

use super::{serve_connection, HttpContext, HttpMetrics, HttpSettings, NodeLimits, TopicDefaults};
use fake::FakeBroker;
use pipe::{pipe, End};

const PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 1, 2, 3));
const JSON: &str = "Content-Type: application/json\r\n";

/// Where a connection starts.
fn foreground() -> Rc<Cell<Queue>> {
    Rc::new(Cell::new(Queue::Foreground))
}

/// A node of one shard, without a network.
#[derive(Clone)]
struct World {
    ctx: Rc<HttpContext<FakeBroker>>,
}

impl World {
    fn new(settings: HttpSettings, node: NodeLimits) -> World {
        let metrics = Arc::new(HttpMetrics::default());
        let ctx = HttpContext::new(
            FakeBroker::default(),
            settings,
            TopicDefaults::default(),
            "node-1".to_owned(),
            Arc::new(node),
            metrics.clone(),
            Arc::from([metrics]),
        );
        World { ctx: Rc::new(ctx) }
    }

    fn broker(&self) -> &FakeBroker {
        &self.ctx.broker
    }

    fn connect(&self) -> Client {
        self.connect_through(usize::MAX)
    }

    /// `room_bytes`: how much either side may send before the other reads.
    fn connect_through(&self, room_bytes: usize) -> Client {
        let (client, server) = pipe(room_bytes);
        self.serve(client, server)
    }

    fn serve(&self, client: End, server: End) -> Client {
        let (queue, ctx, (ended, end)) = (foreground(), self.ctx.clone(), oneshot());
        let wanted = queue.clone();
        let serve = async move {
            serve_connection(server, PEER, ctx, wanted).await;
            let _ = ended.send(());
        };
        rt::spawn_following(queue, Box::pin(serve));
        let served = rt::spawn(Queue::Foreground, async move { end.await.unwrap_or_default() });
        Client { end: client, read: Vec::new(), served }
    }

    /// One request on a connection of its own.
    async fn ask(&self, method: &str, target: &str, headers: &str, body: &[u8]) -> Answer {
        self.connect().ask(method, target, headers, body).await
    }

    /// The value of a series without labels, or with exactly those given.
    async fn metric(&self, series: &str) -> Option<f64> {
        let page = self.ask("GET", "/metrics", "", b"").await;
        assert_eq!(page.status, 200);
        let page = String::from_utf8(page.body).expect("text");
        let value = page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.map(|number| number.parse().expect("a number"))
    }
}

/// Runs `test` in a fresh simulation, with default settings and a topic `t` of three partitions.
fn run<F: Future<Output = ()> + 'static>(test: impl FnOnce(World) -> F + 'static) {
    run_with(HttpSettings::default(), NodeLimits::new(0, 4 << 20), test);
}

fn run_with<F: Future<Output = ()> + 'static>(
    settings: HttpSettings,
    node: NodeLimits,
    test: impl FnOnce(World) -> F + 'static,
) {
    rt::sim::run(1, async move {
        let world = World::new(settings, node);
        world.broker().add_topic("t", 3);
        test(world).await;
    });
}

struct Client {
    end: End,
    read: Vec<u8>,
    served: Task<()>,
}

#[derive(Debug)]
struct Answer {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl Answer {
    fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("the body is text")
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    #[track_caller]
    fn expect(&self, status: u16, body: &str) {
        assert_eq!((self.status, self.text()), (status, body), "{}", self.head);
        if body.starts_with(['{', '[']) {
            assert_eq!(self.header("content-type"), Some("application/json"));
            serde_json::from_str::<serde_json::Value>(body).expect("valid JSON");
        }
        if status != 204 {
            assert_eq!(self.header("content-length"), Some(body.len().to_string().as_str()), "{}", self.head);
        } else {
            assert_eq!((self.header("content-length"), self.header("content-type")), (None, None));
        }
    }
}

fn request(method: &str, target: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let length =
        if body.is_empty() && method != "POST" { String::new() } else { format!("Content-Length: {}\r\n", body.len()) };
    let mut bytes = format!("{method} {target} HTTP/1.1\r\nHost: x\r\n{headers}{length}\r\n").into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

impl Client {
    async fn ask(&mut self, method: &str, target: &str, headers: &str, body: &[u8]) -> Answer {
        self.send(&request(method, target, headers, body)).await;
        self.answer_to(method).await.expect("the server closed without an answer")
    }

    async fn send(&mut self, bytes: &[u8]) {
        self.end.write_all(bytes).await.expect("the server closed");
    }

    /// The next answer; `None` when the server closes before one.
    async fn answer(&mut self) -> Option<Answer> {
        self.answer_to("GET").await
    }

    async fn answer_to(&mut self, method: &str) -> Option<Answer> {
        let end = loop {
            match self.read.windows(4).position(|four| four == b"\r\n\r\n") {
                Some(at) => break at + 4,
                None => self.fill().await?,
            }
        };
        let head = String::from_utf8(self.read.drain(..end).collect()).expect("headers are ASCII");
        let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status line");
        let mut answer = Answer { status, head, body: Vec::new() };
        let length = answer.header("content-length").map_or(0, |digits| digits.parse().expect("a number"));
        if method != "HEAD" {
            while self.read.len() < length {
                self.fill().await?;
            }
            answer.body = self.read.drain(..length).collect();
        }
        Some(answer)
    }

    async fn fill(&mut self) -> Option<()> {
        let bytes = self.end.read_some().await;
        self.read.extend_from_slice(&bytes);
        (!bytes.is_empty()).then_some(())
    }

    /// Waits until the server closes, and says what it still sent.
    async fn closed(mut self) -> Vec<u8> {
        while self.fill().await.is_some() {}
        self.read
    }
}
