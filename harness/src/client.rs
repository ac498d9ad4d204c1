//! A blocking HTTP/1.1 client over one kept connection. Small on purpose: it must be able to send what no proper
//! client would.

use std::io::{self, BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    pub status: u16,
    /// Names in lower case, in the order received.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Response {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or(serde_json::Value::Null)
    }
}

pub struct Client {
    address: SocketAddr,
    timeout: Duration,
    connection: Option<BufReader<TcpStream>>,
}

impl Client {
    pub fn new(address: SocketAddr) -> Client {
        Client { address, timeout: Duration::from_secs(20), connection: None }
    }

    pub fn with_timeout(mut self, timeout: Duration) -> Client {
        self.timeout = timeout;
        self
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// One request and its answer. A broken connection is dropped; the next request dials again. Never retries: an
    /// error after something was sent means "outcome unknown".
    pub fn request(
        &mut self,
        method: &str,
        target: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> io::Result<Response> {
        let mut head =
            format!("{method} {target} HTTP/1.1\r\nHost: {}\r\nContent-Length: {}\r\n", self.address, body.len());
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        let mut message = head.into_bytes();
        message.extend_from_slice(body);
        self.raw(&message, method == "HEAD")
    }

    /// Sends bytes as they are and reads one response.
    pub fn raw(&mut self, message: &[u8], no_body: bool) -> io::Result<Response> {
        let mut connection = match self.connection.take() {
            Some(open) => open,
            None => {
                let stream = TcpStream::connect_timeout(&self.address, Duration::from_secs(5))?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(self.timeout))?;
                stream.set_write_timeout(Some(self.timeout))?;
                BufReader::new(stream)
            }
        };
        connection.get_mut().write_all(message)?;
        let response = read_response(&mut connection, no_body)?;
        if response.header("connection") != Some("close") {
            self.connection = Some(connection);
        }
        Ok(response)
    }

    pub fn post(&mut self, target: &str, body: &[u8]) -> io::Result<Response> {
        self.request("POST", target, &[("Content-Type", "application/octet-stream")], body)
    }

    /// Each message is an object of the batch form: `payload`, perhaps `key`.
    pub fn produce_batch(&mut self, topic: &str, messages: Vec<serde_json::Value>) -> io::Result<Response> {
        let body = serde_json::json!({ "messages": messages }).to_string();
        let target = format!("/v1/topics/{topic}/produce/batch");
        self.request("POST", &target, &[("Content-Type", "application/json")], body.as_bytes())
    }

    pub fn get(&mut self, target: &str) -> io::Result<Response> {
        self.request("GET", target, &[("X-Narad-Client", "harness")], b"")
    }

    pub fn delete(&mut self, target: &str) -> io::Result<Response> {
        self.request("DELETE", target, &[], b"")
    }
}

fn line(connection: &mut impl BufRead) -> io::Result<String> {
    let mut line = String::new();
    if connection.read_line(&mut line)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(line.trim_end().to_owned())
}

/// One response from a stream; `no_body` for the answer to a HEAD.
pub fn read_response(connection: &mut impl BufRead, no_body: bool) -> io::Result<Response> {
    let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let status_line = line(connection)?;
    let status = status_line.split(' ').nth(1).and_then(|s| s.parse().ok()).ok_or_else(|| invalid(&status_line))?;
    let mut headers = Vec::new();
    loop {
        let header = line(connection)?;
        if header.is_empty() {
            break;
        }
        let (name, value) = header.split_once(':').ok_or_else(|| invalid(&header))?;
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    let mut response = Response { status, headers, body: Vec::new() };
    if no_body || status == 204 || status == 304 {
        return Ok(response);
    }
    if response.header("transfer-encoding") == Some("chunked") {
        loop {
            let size = line(connection)?;
            let size = usize::from_str_radix(&size, 16).map_err(|_| invalid(&size))?;
            let start = response.body.len();
            response.body.resize(start + size, 0);
            connection.read_exact(&mut response.body[start..])?;
            line(connection)?;
            if size == 0 {
                return Ok(response);
            }
        }
    }
    match response.header("content-length").map(str::parse) {
        Some(Ok(length)) => {
            response.body = vec![0; length];
            connection.read_exact(&mut response.body)?;
        }
        Some(Err(_)) => return Err(invalid("content-length")),
        None => {
            connection.read_to_end(&mut response.body)?;
        }
    }
    Ok(response)
}
