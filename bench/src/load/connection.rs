//! One connection: its socket, what is to be sent, what was received.

use std::io::{self, Read, Write};
use std::net::SocketAddr;

use mio::net::TcpStream;
use mio::{Interest, Registry, Token};

use super::protocol::{Protocol, Step};
use super::Nanos;

const INPUT_BYTES: usize = 16 << 10;

/// Where a connection stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Connecting,
    /// The protocol's opening is under way.
    Opening,
    Idle,
    Busy,
    /// The server asked for it.
    Paused,
    /// Made again at `until`.
    Lost {
        until: Nanos,
    },
    /// Nothing left to do.
    Finished,
}

pub struct Connection<P> {
    pub group: usize,
    pub address: SocketAddr,
    pub protocol: P,
    pub state: State,
    /// When its operation should have started.
    pub intended: Nanos,
    /// Failed attempts to connect since the last success.
    pub failures: u32,
    /// To be sent, from `sent` on.
    pub output: Vec<u8>,
    sent: usize,
    input: Vec<u8>,
    /// Received and not consumed: `input[taken..filled]`.
    taken: usize,
    filled: usize,
    socket: Option<TcpStream>,
}

impl<P: Protocol> Connection<P> {
    pub fn new(group: usize, address: SocketAddr, protocol: P) -> Connection<P> {
        Connection {
            group,
            address,
            protocol,
            state: State::Lost { until: 0 },
            intended: 0,
            failures: 0,
            output: Vec::new(),
            sent: 0,
            input: vec![0; INPUT_BYTES],
            taken: 0,
            filled: 0,
            socket: None,
        }
    }

    /// Begins to connect; the socket becomes writable when that has ended.
    pub fn connect(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        self.close(registry);
        self.state = State::Connecting;
        let mut socket = TcpStream::connect(self.address)?;
        registry.register(&mut socket, token, Interest::READABLE | Interest::WRITABLE)?;
        self.socket = Some(socket);
        Ok(())
    }

    /// Whether the connection stands; `false` if it is not decided yet.
    pub fn connected(&mut self) -> io::Result<bool> {
        let Some(socket) = &self.socket else { return Ok(false) };
        if let Some(error) = socket.take_error()? {
            return Err(error);
        }
        match socket.peer_addr() {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotConnected => return Ok(false),
            Err(error) => return Err(error),
        }
        socket.set_nodelay(true)?;
        Ok(true)
    }

    pub fn close(&mut self, registry: &Registry) {
        if let Some(mut socket) = self.socket.take() {
            // Closing the descriptor takes it out of the epoll set in any case.
            let _ = registry.deregister(&mut socket);
        }
        self.output.clear();
        (self.sent, self.taken, self.filled) = (0, 0, 0);
    }

    /// Sends what the socket takes.
    pub fn flush(&mut self) -> io::Result<()> {
        let Some(socket) = &mut self.socket else { return Ok(()) };
        while self.sent < self.output.len() {
            match socket.write(&self.output[self.sent..]) {
                Ok(bytes) => self.sent += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.output.clear();
        self.sent = 0;
        Ok(())
    }

    /// Takes what the socket has. `ending`: up to the end of the stream, or the error, that epoll told of. Returns whether
    /// the server has closed its side.
    pub fn fill(&mut self, ending: bool) -> io::Result<bool> {
        let Some(socket) = &mut self.socket else { return Ok(false) };
        loop {
            if self.taken > 0 && self.taken == self.filled {
                (self.taken, self.filled) = (0, 0);
            }
            if self.filled == self.input.len() {
                if self.taken > 0 {
                    self.input.copy_within(self.taken..self.filled, 0);
                    self.filled -= self.taken;
                    self.taken = 0;
                } else {
                    self.input.resize(self.input.len() * 2, 0);
                }
            }
            match socket.read(&mut self.input[self.filled..]) {
                Ok(0) => return Ok(true),
                Ok(bytes) => {
                    self.filled += bytes;
                    // Less than there was room for: the socket is empty, and epoll will tell of what comes next.
                    if !ending && self.filled < self.input.len() {
                        return Ok(false);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    pub fn received(&self) -> &[u8] {
        &self.input[self.taken..self.filled]
    }

    /// Shows the protocol what was received.
    pub fn receive(&mut self, now: Nanos) -> Result<Step, String> {
        let step = self.protocol.receive(now, &self.input[self.taken..self.filled], &mut self.output)?;
        self.taken += step.consumed;
        debug_assert!(self.taken <= self.filled, "a protocol consumes at most what it was shown");
        Ok(step)
    }
}
