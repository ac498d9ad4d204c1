//! A small blocking HTTP/1.1 client: one connection, kept alive, every read with a deadline. It never follows a
//! redirect (lesson N87).

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;

use super::Failure;
use crate::config::format_duration;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Beyond what the request itself asks the server to wait.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// What to do about a server that is not there, or is another one.
const ADVICE: &str = "--server or the environment variable NARAD_ADDR names another address";
const LINE_BYTES_MAX: usize = 64 << 10;
const HEADERS_MAX: usize = 256;
const BODY_BYTES_MAX: u64 = 64 << 20;
const USER_AGENT: &str = concat!("narad-cli/", env!("CARGO_PKG_VERSION"));

pub const DEFAULT_SERVER: &str = "http://127.0.0.1:7942";

/// Where the server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    host: String,
    port: u16,
}

impl Endpoint {
    /// `http://host[:port][/]`; the scheme may be left out.
    pub fn parse(url: &str) -> Result<Endpoint, Failure> {
        let wrong = |why: &str| Failure::Usage(format!("server {url:?} {why}: write http://host:port"));
        if url.starts_with("https://") {
            return Err(wrong("is not plain http, which is all that this client speaks"));
        }
        let authority = url.strip_prefix("http://").unwrap_or(url).trim_end_matches('/');
        if authority.contains("://") || authority.contains(['/', '?', '#', '@', ' ']) {
            return Err(wrong("is more than a host and a port"));
        }
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => {
                (host, port.parse().map_err(|_| wrong("has no usable port"))?)
            }
            _ => (authority, 80),
        };
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        if host.is_empty() {
            return Err(wrong("names no host"));
        }
        Ok(Endpoint { host: host.to_owned(), port })
    }

    fn authority(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }
}

/// One request. A body is always sent with its length.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    pub method: &'static str,
    pub target: String,
    pub content_type: Option<&'static str>,
    pub body: &'a [u8],
    /// How long the server was asked to wait before it answers.
    pub wait: Duration,
}

impl Request<'_> {
    pub fn new(method: &'static str, target: impl Into<String>) -> Request<'static> {
        Request { method, target: target.into(), content_type: None, body: &[], wait: Duration::ZERO }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    /// Who answered, for messages.
    pub server: String,
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Response {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    pub fn json<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        serde_json::from_slice(&self.body).map_err(|error| self.unknown_shape(&error.to_string()))
    }

    /// An answer with a good status that no narad broker gives.
    pub fn unknown_shape(&self, why: &str) -> Failure {
        Failure::Request(format!(
            "{} answers, but not as a narad broker does ({why}): is it one? {ADVICE}",
            self.server
        ))
    }

    /// The error text: of the envelope, else of the body.
    pub fn error_text(&self) -> String {
        self.envelope().unwrap_or_else(|| {
            let body = &self.body[..self.body.len().min(8 << 10)];
            String::from_utf8_lossy(body).trim().to_owned()
        })
    }

    fn envelope(&self) -> Option<String> {
        #[derive(serde::Deserialize)]
        struct Envelope {
            error: String,
        }
        let envelope: Envelope = serde_json::from_slice(&self.body).ok()?;
        (!envelope.error.is_empty()).then_some(envelope.error)
    }

    /// The failure that this answer is.
    pub fn failure(&self) -> Failure {
        if (300..400).contains(&self.status) {
            let to = self.header("location").unwrap_or("somewhere else");
            return Failure::Request(format!(
                "{} answered {}, a redirect to {to:?}, which is not followed: {ADVICE}",
                self.server, self.status
            ));
        }
        if let Some(text) = self.envelope() {
            return Failure::Request(format!("{text} ({})", self.status));
        }
        // A broker's answers of few words (no such page, the owner did not answer) are one short line of plain text.
        let text = self.error_text();
        if self.status < 400 || text.is_empty() || text.len() > 200 || text.contains(['\n', '<', '{']) {
            return self.unknown_shape(&format!("status {} without a reason", self.status));
        }
        Failure::Request(format!("{text} ({}, from {})", self.status, self.server))
    }

    /// `Retry-After` in whole seconds, bounded.
    pub fn retry_after(&self) -> Option<Duration> {
        let seconds: u64 = self.header("retry-after")?.trim().parse().ok()?;
        Some(Duration::from_secs(seconds.min(30)))
    }
}

pub struct Client {
    endpoint: Endpoint,
    connection: Option<BufReader<TcpStream>>,
    interrupted: Option<&'static AtomicBool>,
    /// For connecting and for the answer, beyond what the request asks the server to wait.
    patience: Duration,
}

impl Client {
    pub fn new(endpoint: Endpoint) -> Client {
        Client { endpoint, connection: None, interrupted: None, patience: ANSWER_TIMEOUT }
    }

    /// For requests that a broker answers at once, or not at all.
    pub fn with_patience(self, patience: Duration) -> Client {
        Client { patience, ..self }
    }

    /// From now on an interrupted read ends with [`Failure::Interrupted`] once the flag is set.
    pub fn watch_interrupts(&mut self, flag: &'static AtomicBool) {
        self.interrupted = Some(flag);
    }

    pub fn is_interrupted(&self) -> bool {
        self.interrupted.is_some_and(|flag| flag.load(Ordering::Relaxed))
    }

    /// Waits, in pieces, so that a signal is noticed.
    pub fn pause(&self, duration: Duration) -> Result<(), Failure> {
        let until = Instant::now() + duration;
        loop {
            if self.is_interrupted() {
                return Err(Failure::Interrupted);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(Duration::from_millis(100)));
        }
    }

    pub fn call(&mut self, request: &Request<'_>) -> Result<Response, Failure> {
        let deadline = Instant::now() + request.wait + self.patience;
        let mut connection = match self.connection.take().filter(still_open) {
            Some(connection) => connection,
            None => BufReader::with_capacity(64 << 10, self.connect()?),
        };
        let exchanged = exchange(&mut connection, &self.endpoint, request, deadline, self.interrupted);
        match exchanged {
            Ok((response, reusable)) => {
                if reusable {
                    self.connection = Some(connection);
                }
                Ok(Response { server: self.endpoint.authority(), ..response })
            }
            Err(_) if self.is_interrupted() => Err(Failure::Interrupted),
            Err(error) => {
                let doubt = if request.method == "GET" { "" } else { "it may have been done all the same; " };
                Err(Failure::Unreachable(format!("{}: {doubt}{}", self.what_broke(&error, request), advice(&error))))
            }
        }
    }

    fn what_broke(&self, error: &io::Error, request: &Request<'_>) -> String {
        let server = self.endpoint.authority();
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                let waited = format_duration(request.wait + self.patience);
                format!("{server} accepts connections and does not answer (waited {waited})")
            }
            _ => format!("{server}: {error}"),
        }
    }

    fn connect(&self) -> Result<TcpStream, Failure> {
        let server = self.endpoint.authority();
        let unreachable =
            |why: &str, todo: &str| Failure::Unreachable(format!("cannot reach {server}: {why}: {todo} {ADVICE}"));
        let addresses = (self.endpoint.host.as_str(), self.endpoint.port)
            .to_socket_addrs()
            .map_err(|error| unreachable(&format!("the name cannot be resolved ({error})"), "check its spelling;"))?;
        let mut last = None;
        for address in addresses {
            let connected = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT.min(self.patience));
            match connected.and_then(|stream| stream.set_nodelay(true).map(|()| stream)) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = Some(error),
            }
        }
        Err(match last {
            None => unreachable("the name has no address", "check its spelling;"),
            Some(error) => match error.kind() {
                io::ErrorKind::ConnectionRefused => {
                    unreachable("nothing listens there (connection refused)", "is the broker running?")
                }
                io::ErrorKind::TimedOut => unreachable(
                    "no machine answers there (timed out)",
                    "is the machine up, and does no firewall stand between?",
                ),
                _ => unreachable(&error.to_string(), "check the address and the network;"),
            },
        })
    }
}

/// What to do when a server took the request and its answer did not come.
fn advice(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            "the broker is stopped, stuck or far too busy: look at its process and its log".to_owned()
        }
        io::ErrorKind::InvalidData => format!("is a broker listening there? {ADVICE}"),
        _ => format!("did the broker stop just now? Its log says; {ADVICE}"),
    }
}

/// A kept connection that the server has closed meanwhile, or on which it talks out of turn, is not used again.
fn still_open(connection: &BufReader<TcpStream>) -> bool {
    let stream = connection.get_ref();
    let mut byte = [0u8; 1];
    let silent = stream.set_nonblocking(true).is_ok()
        && matches!(stream.peek(&mut byte), Err(error) if error.kind() == io::ErrorKind::WouldBlock);
    connection.buffer().is_empty() && silent && stream.set_nonblocking(false).is_ok()
}

fn exchange(
    connection: &mut BufReader<TcpStream>,
    endpoint: &Endpoint,
    request: &Request<'_>,
    deadline: Instant,
    interrupted: Option<&AtomicBool>,
) -> io::Result<(Response, bool)> {
    let mut head = format!(
        "{} {} HTTP/1.1\r\nHost: {}\r\nUser-Agent: {USER_AGENT}\r\nX-Narad-Client: {USER_AGENT}\r\nAccept: application/json\r\n",
        request.method,
        request.target,
        endpoint.authority()
    );
    if let Some(content_type) = request.content_type {
        head.push_str(&format!("Content-Type: {content_type}\r\n"));
    }
    if request.method != "GET" {
        head.push_str(&format!("Content-Length: {}\r\n", request.body.len()));
    }
    head.push_str("\r\n");
    let mut message = head.into_bytes();
    message.extend_from_slice(request.body);
    connection.get_ref().set_write_timeout(Some(ANSWER_TIMEOUT))?;
    // A server that refuses a body may answer and stop reading: its answer counts, not our write error.
    let written = connection.get_mut().write_all(&message);
    let mut reader = Reader { connection, deadline, interrupted };
    match read_response(&mut reader, request.method) {
        Err(_) if written.is_err() => Err(written.err().unwrap_or_else(|| io::ErrorKind::Other.into())),
        Ok((response, reusable)) => Ok((response, reusable && written.is_ok())),
        Err(error) => Err(error),
    }
}

/// Where an answer comes from.
trait Wire: Read {
    /// The next read ends after that long at the latest.
    fn wait_at_most(&self, left: Duration) -> io::Result<()>;
}

impl Wire for TcpStream {
    fn wait_at_most(&self, left: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(left))
    }
}

/// An answer that is there as a whole.
impl Wire for &[u8] {
    fn wait_at_most(&self, _left: Duration) -> io::Result<()> {
        Ok(())
    }
}

/// Reads an answer out of memory.
pub(super) fn read_answer(bytes: &[u8], method: &str) -> io::Result<Response> {
    let mut connection = BufReader::new(bytes);
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    let mut reader = Reader { connection: &mut connection, deadline, interrupted: None };
    read_response(&mut reader, method).map(|(response, _)| response)
}

struct Reader<'a, W> {
    connection: &'a mut BufReader<W>,
    deadline: Instant,
    interrupted: Option<&'a AtomicBool>,
}

impl<W: Wire> Reader<'_, W> {
    /// What is buffered, after reading more if nothing is. Empty at the end of the stream.
    fn fill(&mut self) -> io::Result<&[u8]> {
        while self.connection.buffer().is_empty() {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.connection.get_ref().wait_at_most(left)?;
            match self.connection.fill_buf() {
                Ok(_) => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                    if self.interrupted.is_some_and(|flag| flag.load(Ordering::Relaxed)) {
                        return Err(error);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(self.connection.buffer())
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = Vec::new();
        loop {
            let buffered = self.fill()?;
            if buffered.is_empty() {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed the connection"));
            }
            let end = buffered.iter().position(|byte| *byte == b'\n');
            let take = end.map_or(buffered.len(), |at| at + 1);
            line.extend_from_slice(&buffered[..take]);
            self.connection.consume(take);
            if line.len() > LINE_BYTES_MAX {
                return Err(bad_answer("a header line is too long"));
            }
            if end.is_some() {
                while matches!(line.last(), Some(b'\n' | b'\r')) {
                    line.pop();
                }
                return String::from_utf8(line).map_err(|_| bad_answer("a header is not text"));
            }
        }
    }

    fn exactly(&mut self, bytes: u64, body: &mut Vec<u8>) -> io::Result<()> {
        if bytes > BODY_BYTES_MAX - body.len() as u64 {
            return Err(bad_answer("the body is too large"));
        }
        let end = body.len() + bytes as usize;
        while body.len() < end {
            let buffered = self.fill()?;
            if buffered.is_empty() {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the answer broke off"));
            }
            let take = buffered.len().min(end - body.len());
            body.extend_from_slice(&buffered[..take]);
            self.connection.consume(take);
        }
        Ok(())
    }

    fn rest(&mut self, body: &mut Vec<u8>) -> io::Result<()> {
        loop {
            let buffered = self.fill()?;
            let take = buffered.len();
            if take == 0 {
                return Ok(());
            }
            if (body.len() + take) as u64 > BODY_BYTES_MAX {
                return Err(bad_answer("the body is too large"));
            }
            body.extend_from_slice(buffered);
            self.connection.consume(take);
        }
    }

    fn chunks(&mut self, body: &mut Vec<u8>) -> io::Result<()> {
        loop {
            let line = self.line()?;
            let size = line.split(';').next().unwrap_or("").trim();
            let size = u64::from_str_radix(size, 16).map_err(|_| bad_answer("a chunk has no size"))?;
            if size == 0 {
                while !self.line()?.is_empty() {} // trailers
                return Ok(());
            }
            self.exactly(size, body)?;
            if !self.line()?.is_empty() {
                return Err(bad_answer("a chunk is longer than it says"));
            }
        }
    }
}

fn bad_answer(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("this does not look like a Narad server: {why}"))
}

/// The response, and whether the connection can take another request.
fn read_response<W: Wire>(reader: &mut Reader<'_, W>, method: &str) -> io::Result<(Response, bool)> {
    loop {
        let line = reader.line()?;
        let mut words = line.splitn(3, ' ');
        let version = words.next().filter(|version| version.starts_with("HTTP/1."));
        let version = version.ok_or_else(|| bad_answer("no HTTP/1 status line"))?.to_owned();
        let status: u16 = words.next().and_then(|status| status.parse().ok()).ok_or_else(|| bad_answer("no status"))?;
        let mut headers = Vec::new();
        loop {
            let line = reader.line()?;
            if line.is_empty() {
                break;
            }
            let (name, value) = line.split_once(':').ok_or_else(|| bad_answer("a header without a colon"))?;
            headers.push((name.trim().to_ascii_lowercase(), value.trim().to_owned()));
            if headers.len() > HEADERS_MAX {
                return Err(bad_answer("too many headers"));
            }
        }
        if (100..200).contains(&status) {
            continue; // interim answers
        }
        let mut response = Response { server: String::new(), status, headers, body: Vec::new() };
        let close = response.header("connection").is_some_and(|value| value.eq_ignore_ascii_case("close"));
        let mut reusable = version == "HTTP/1.1" && !close;
        let mut body = Vec::new();
        if status == 204 || status == 304 || method == "HEAD" {
        } else if response
            .header("transfer-encoding")
            .is_some_and(|value| value.to_ascii_lowercase().ends_with("chunked"))
        {
            reader.chunks(&mut body)?;
        } else if let Some(length) = response.header("content-length") {
            let length = length.parse().map_err(|_| bad_answer("a content length that is no number"))?;
            reader.exactly(length, &mut body)?;
        } else {
            reader.rest(&mut body)?;
            reusable = false;
        }
        response.body = body;
        return Ok((response, reusable));
    }
}
