//! RabbitMQ over AMQP 0-9-1: a durable quorum queue; publishes with confirms; consumes by push with a prefetch of one
//! operation.
//!
//! An AMQP ack has no answer. So an operation of a pushing consumer is: ack what the last one brought, and wait for as many
//! messages again; with the prefetch they come only once the ack was applied. That is one ack and one delivery for each
//! message, as with the others.

use super::{Batch, Dialect, Reply};

const QUEUE: &str = "bench";
const CHANNEL: u16 = 1;
const FRAME_BYTES_MAX: u32 = 131_072;
const FRAME_END: u8 = 0xce;
const FRAME_OVERHEAD: usize = 8;

const METHOD: u8 = 1;
const HEADER: u8 = 2;
const BODY: u8 = 3;
const HEARTBEAT: u8 = 8;

/// (class, method) numbers of the specification.
mod method {
    pub const START: (u16, u16) = (10, 10);
    pub const START_OK: (u16, u16) = (10, 11);
    pub const TUNE: (u16, u16) = (10, 30);
    pub const TUNE_OK: (u16, u16) = (10, 31);
    pub const OPEN: (u16, u16) = (10, 40);
    pub const OPEN_OK: (u16, u16) = (10, 41);
    pub const CONNECTION_CLOSE: (u16, u16) = (10, 50);
    pub const CHANNEL_OPEN: (u16, u16) = (20, 10);
    pub const CHANNEL_OPEN_OK: (u16, u16) = (20, 11);
    pub const CHANNEL_CLOSE: (u16, u16) = (20, 40);
    pub const DECLARE: (u16, u16) = (50, 10);
    pub const DECLARE_OK: (u16, u16) = (50, 11);
    pub const QOS: (u16, u16) = (60, 10);
    pub const QOS_OK: (u16, u16) = (60, 11);
    pub const CONSUME: (u16, u16) = (60, 20);
    pub const CONSUME_OK: (u16, u16) = (60, 21);
    pub const PUBLISH: (u16, u16) = (60, 40);
    pub const DELIVER: (u16, u16) = (60, 60);
    pub const GET: (u16, u16) = (60, 70);
    pub const GET_OK: (u16, u16) = (60, 71);
    pub const GET_EMPTY: (u16, u16) = (60, 72);
    pub const ACK: (u16, u16) = (60, 80);
    pub const NACK: (u16, u16) = (60, 120);
    pub const SELECT: (u16, u16) = (85, 10);
    pub const SELECT_OK: (u16, u16) = (85, 11);
}

/// How messages come to a consumer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feed {
    /// The server sends them; it says nothing when there are none.
    Push,
    /// Asked for one by one; the server says when there are none.
    Pull,
}

/// One connection.
pub struct Amqp {
    batch: u32,
    feed: Feed,
    /// The consumer was announced.
    consuming: bool,
    /// Delivery tag of the last publish, or of the last message that came.
    tag: u64,
    /// Publishes of the operation that were not confirmed yet.
    unconfirmed: Vec<u64>,
    of: u32,
    nacked: bool,
    /// Messages that came in this operation.
    came: u32,
    /// Came and not acked.
    to_ack: bool,
    /// Bytes of the message that is arriving: missing, and there.
    missing: usize,
    body: Vec<u8>,
}

impl Amqp {
    pub fn new(batch: u32, feed: Feed) -> Amqp {
        Amqp {
            batch: if feed == Feed::Pull { 1 } else { batch },
            feed,
            consuming: false,
            tag: 0,
            unconfirmed: Vec::new(),
            of: 0,
            nacked: false,
            came: 0,
            to_ack: false,
            missing: 0,
            body: Vec::new(),
        }
    }

    fn ack(&mut self, out: &mut Vec<u8>) {
        if std::mem::take(&mut self.to_ack) {
            let tag = self.tag;
            // Multiple: this one and all before it.
            send(out, CHANNEL, method::ACK, |out| out.u64(tag).u8(1));
        }
    }

    fn confirmed(&mut self, tag: u64, multiple: bool) -> Reply {
        self.unconfirmed.retain(|waiting| if multiple { *waiting > tag } else { *waiting != tag });
        if !self.unconfirmed.is_empty() || self.of == 0 {
            return Reply::More;
        }
        let of = std::mem::take(&mut self.of);
        match std::mem::take(&mut self.nacked) {
            false => Reply::Done(of),
            true => Reply::Refused("the queue did not take a message (basic.nack)".into()),
        }
    }

    /// A whole message has come.
    fn arrived(&mut self, out: &mut Vec<u8>, message: &mut dyn FnMut(&[u8])) -> Reply {
        message(&self.body);
        self.came += 1;
        self.to_ack = true;
        if self.came < self.batch {
            return Reply::More;
        }
        if self.feed == Feed::Pull {
            self.ack(out);
        }
        Reply::Done(self.came)
    }

    fn method(&mut self, id: (u16, u16), mut fields: Fields<'_>, out: &mut Vec<u8>) -> Result<Reply, String> {
        match id {
            method::START => send(out, 0, method::START_OK, |out| {
                out.table(|_| {}).short("PLAIN").long(b"\0guest\0guest").short("en_US")
            }),
            method::TUNE => {
                send(out, 0, method::TUNE_OK, |out| out.u16(8).u32(FRAME_BYTES_MAX).u16(0));
                send(out, 0, method::OPEN, |out| out.short("/").short("").u8(0));
            }
            method::OPEN_OK => send(out, CHANNEL, method::CHANNEL_OPEN, |out| out.short("")),
            method::CHANNEL_OPEN_OK => send(out, CHANNEL, method::DECLARE, |out| {
                const DURABLE: u8 = 2;
                out.u16(0).short(QUEUE).u8(DURABLE).table(|table| {
                    table.short("x-queue-type").u8(b'S').long(b"quorum");
                })
            }),
            method::DECLARE_OK => send(out, CHANNEL, method::SELECT, |out| out.u8(0)),
            method::SELECT_OK => {
                let prefetch = self.batch as u16;
                send(out, CHANNEL, method::QOS, |out| out.u32(0).u16(prefetch).u8(0));
            }
            method::QOS_OK => return Ok(Reply::Done(0)),
            method::ACK | method::NACK => {
                self.nacked |= id == method::NACK;
                let (tag, multiple) = (fields.u64()?, fields.u8()? & 1 == 1);
                return Ok(self.confirmed(tag, multiple));
            }
            method::DELIVER => {
                fields.short()?;
                self.tag = fields.u64()?;
            }
            method::GET_OK => self.tag = fields.u64()?,
            method::GET_EMPTY => return Ok(Reply::Empty),
            method::CONSUME_OK => {}
            method::CONNECTION_CLOSE | method::CHANNEL_CLOSE => {
                let (code, text) = (fields.u16()?, fields.short()?);
                return Err(format!("the server closed the conversation: {code} {}", String::from_utf8_lossy(text)));
            }
            (class, method) => return Err(format!("method {class}.{method} of the server is not expected here")),
        }
        Ok(Reply::More)
    }
}

impl Dialect for Amqp {
    fn open(&mut self, out: &mut Vec<u8>) {
        *self = Amqp::new(self.batch, self.feed);
        out.extend_from_slice(b"AMQP\x00\x00\x09\x01");
    }

    fn produce(&mut self, batch: &Batch<'_>, out: &mut Vec<u8>) {
        self.of = batch.count;
        for index in 0..batch.count {
            self.tag += 1;
            self.unconfirmed.push(self.tag);
            send(out, CHANNEL, method::PUBLISH, |out| out.u16(0).short("").short(QUEUE).u8(0));
            frame(out, HEADER, CHANNEL, |out| {
                const HAS_DELIVERY_MODE: u16 = 1 << 12;
                const PERSISTENT: u8 = 2;
                let out = &mut Writer(out);
                out.u16(method::PUBLISH.0).u16(0).u64(batch.bytes() as u64).u16(HAS_DELIVERY_MODE).u8(PERSISTENT);
            });
            frame(out, BODY, CHANNEL, |out| batch.write(index, out));
        }
    }

    fn consume(&mut self, out: &mut Vec<u8>) {
        self.came = 0;
        match self.feed {
            Feed::Pull => send(out, CHANNEL, method::GET, |out| out.u16(0).short(QUEUE).u8(0)),
            // Announced with the first operation: before that nobody would read what comes.
            Feed::Push if !self.consuming => {
                self.consuming = true;
                send(out, CHANNEL, method::CONSUME, |out| out.u16(0).short(QUEUE).short("").u8(0).table(|_| {}));
            }
            Feed::Push => self.ack(out),
        }
    }

    fn receive(
        &mut self,
        input: &[u8],
        out: &mut Vec<u8>,
        message: &mut dyn FnMut(&[u8]),
    ) -> Result<(usize, Reply), String> {
        let mut used = 0;
        loop {
            let rest = &input[used..];
            if rest.starts_with(b"AMQP") {
                return Err("the server speaks another version of AMQP".into());
            }
            let Some(head) = rest.get(..7) else { return Ok((used, Reply::More)) };
            let bytes = u32::from_be_bytes([head[3], head[4], head[5], head[6]]) as usize;
            let Some(whole) = rest.get(..bytes + FRAME_OVERHEAD) else { return Ok((used, Reply::More)) };
            if whole[bytes + 7] != FRAME_END {
                return Err("a frame of the server has no end: this is not AMQP".into());
            }
            used += whole.len();
            let mut fields = Fields(&whole[7..bytes + 7]);
            let reply = match head[0] {
                METHOD => {
                    let id = (fields.u16()?, fields.u16()?);
                    self.method(id, fields, out)?
                }
                HEADER => {
                    fields.u32()?;
                    self.missing = fields.u64()? as usize;
                    self.body.clear();
                    if self.missing == 0 {
                        self.arrived(out, message)
                    } else {
                        Reply::More
                    }
                }
                BODY => {
                    self.body.extend_from_slice(fields.0);
                    self.missing = self.missing.saturating_sub(bytes);
                    if self.missing == 0 {
                        self.arrived(out, message)
                    } else {
                        Reply::More
                    }
                }
                HEARTBEAT => Reply::More,
                other => return Err(format!("a frame of type {other}, which AMQP does not have")),
            };
            if reply != Reply::More {
                return Ok((used, reply));
            }
        }
    }
}

/// Appends a frame around what `payload` writes.
fn frame(out: &mut Vec<u8>, kind: u8, channel: u16, payload: impl FnOnce(&mut Vec<u8>)) {
    out.push(kind);
    out.extend_from_slice(&channel.to_be_bytes());
    sized(out, payload);
    out.push(FRAME_END);
}

/// Appends what `payload` writes, behind its length.
fn sized(out: &mut Vec<u8>, payload: impl FnOnce(&mut Vec<u8>)) {
    let at = out.len();
    out.extend_from_slice(&[0; 4]);
    payload(out);
    let bytes = (out.len() - at - 4) as u32;
    out[at..at + 4].copy_from_slice(&bytes.to_be_bytes());
}

/// Appends a method.
fn send(
    out: &mut Vec<u8>,
    channel: u16,
    (class, method): (u16, u16),
    fields: impl for<'a, 'b> FnOnce(&'a mut Writer<'b>) -> &'a mut Writer<'b>,
) {
    frame(out, METHOD, channel, |out| {
        let out = &mut Writer(out);
        out.u16(class).u16(method);
        fields(out);
    });
}

/// Writes AMQP's field types.
struct Writer<'a>(&'a mut Vec<u8>);

impl Writer<'_> {
    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    fn u8(&mut self, value: u8) -> &mut Self {
        self.bytes(&[value])
    }

    fn u16(&mut self, value: u16) -> &mut Self {
        self.bytes(&value.to_be_bytes())
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_be_bytes())
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_be_bytes())
    }

    /// Up to 255 bytes.
    fn short(&mut self, text: &str) -> &mut Self {
        self.u8(text.len() as u8).bytes(text.as_bytes())
    }

    fn long(&mut self, bytes: &[u8]) -> &mut Self {
        self.u32(bytes.len() as u32).bytes(bytes)
    }

    fn table(&mut self, entries: impl FnOnce(&mut Writer<'_>)) -> &mut Self {
        sized(self.0, |out| entries(&mut Writer(out)));
        self
    }
}

/// Reads AMQP's field types.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, bytes: usize) -> Result<&'a [u8], String> {
        let (taken, rest) = self.0.split_at_checked(bytes).ok_or("a frame of the server is cut off")?;
        self.0 = rest;
        Ok(taken)
    }

    fn number(&mut self, bytes: usize) -> Result<u64, String> {
        Ok(self.take(bytes)?.iter().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }

    fn u8(&mut self) -> Result<u8, String> {
        Ok(self.number(1)? as u8)
    }

    fn u16(&mut self) -> Result<u16, String> {
        Ok(self.number(2)? as u16)
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(self.number(4)? as u32)
    }

    fn u64(&mut self) -> Result<u64, String> {
        self.number(8)
    }

    fn short(&mut self) -> Result<&'a [u8], String> {
        let bytes = usize::from(self.u8()?);
        self.take(bytes)
    }
}
