//! PostgreSQL's queue table: an INSERT a message, or of a batch in one statement; consume in a transaction of its own with
//! `FOR UPDATE SKIP LOCKED` and DELETE, whose COMMIT is the ack: a consumer that dies before it gives the messages back.

use bytes::BytesMut;
use postgres_protocol::message::backend::{Header, Message};
use postgres_protocol::message::frontend;
use postgres_protocol::IsNull;

use super::{Batch, Dialect, Reply};

const USER: &str = "bench";
const DATABASE: &str = "postgres";
const BYTEA: u32 = 17;
const BYTEA_ARRAY: u32 = 1001;
const INT4: u32 = 23;
/// The wire's number for values that are not text.
const BINARY: i16 = 1;

/// Prepared statements of each connection: name, text, type of its parameter.
const STATEMENTS: [(&str, &str, Option<u32>); 5] = [
    ("insert", "INSERT INTO queue (payload) VALUES ($1)", Some(BYTEA)),
    ("insert_all", "INSERT INTO queue (payload) SELECT unnest($1)", Some(BYTEA_ARRAY)),
    ("begin", "BEGIN", None),
    (
        "take",
        "DELETE FROM queue WHERE id = ANY (ARRAY (SELECT id FROM queue ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED)) \
         RETURNING payload",
        Some(INT4),
    ),
    ("commit", "COMMIT", None),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Login,
    Preparing,
    Inserting(u32),
    /// Rows that came.
    Taking(u32),
    Committing(u32),
}

/// One connection.
pub struct Postgres {
    batch: u32,
    phase: Phase,
    /// What an ErrorResponse said; the server is ready again after it.
    refused: Option<String>,
    scratch: BytesMut,
    value: Vec<u8>,
}

impl Postgres {
    pub fn new(batch: u32) -> Postgres {
        Postgres { batch, phase: Phase::Login, refused: None, scratch: BytesMut::new(), value: Vec::new() }
    }

    /// Appends Bind and Execute of a prepared statement with `self.value`, if it has a parameter.
    fn execute(&mut self, statement: &str, parameter: bool) -> Result<(), String> {
        let values: &[&[u8]] = if parameter { &[&self.value] } else { &[] };
        let write = |value: &&[u8], out: &mut BytesMut| {
            out.extend_from_slice(value);
            Ok(IsNull::No)
        };
        frontend::bind("", statement, [BINARY], values, write, [BINARY], &mut self.scratch)
            .map_err(|_| format!("cannot encode the statement {statement}"))?;
        frontend::execute("", 0, &mut self.scratch).map_err(|error| error.to_string())
    }

    /// Moves what was encoded to `out`.
    fn flush(&mut self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.scratch);
        self.scratch.clear();
    }

    fn prepare(&mut self, out: &mut Vec<u8>) -> Result<(), String> {
        for (name, text, parameter) in STATEMENTS {
            frontend::parse(name, text, parameter, &mut self.scratch).map_err(|error| error.to_string())?;
        }
        frontend::sync(&mut self.scratch);
        self.flush(out);
        Ok(())
    }

    /// The server has done what it was asked, and waits.
    fn ready(&mut self, out: &mut Vec<u8>) -> Result<Reply, String> {
        if let Some(text) = self.refused.take() {
            // What began a transaction cannot go on; the connection is given up, and with it the transaction.
            return match self.phase {
                Phase::Inserting(_) => Ok(Reply::Refused(text)),
                _ => Err(text),
            };
        }
        Ok(match self.phase {
            Phase::Login => {
                self.prepare(out)?;
                self.phase = Phase::Preparing;
                Reply::More
            }
            Phase::Preparing => Reply::Done(0),
            Phase::Inserting(count) => Reply::Done(count),
            Phase::Taking(count) => {
                self.execute("commit", false)?;
                frontend::sync(&mut self.scratch);
                self.flush(out);
                self.phase = Phase::Committing(count);
                Reply::More
            }
            Phase::Committing(0) => Reply::Empty,
            Phase::Committing(count) => Reply::Done(count),
        })
    }
}

impl Dialect for Postgres {
    fn open(&mut self, out: &mut Vec<u8>) {
        self.phase = Phase::Login;
        self.refused = None;
        self.scratch.clear();
        // Cannot fail: the names have no zero bytes.
        let _ = frontend::startup_message([("user", USER), ("database", DATABASE)], &mut self.scratch);
        self.flush(out);
    }

    fn produce(&mut self, batch: &Batch<'_>, out: &mut Vec<u8>) {
        self.phase = Phase::Inserting(batch.count);
        self.value.clear();
        let statement = match batch.count {
            1 => {
                batch.write(0, &mut self.value);
                "insert"
            }
            count => {
                // An array in binary: dimensions, has nulls, element type, elements, lower bound.
                for number in [1, 0, BYTEA, count, 1] {
                    self.value.extend_from_slice(&number.to_be_bytes());
                }
                for index in 0..count {
                    self.value.extend_from_slice(&(batch.bytes() as u32).to_be_bytes());
                    batch.write(index, &mut self.value);
                }
                "insert_all"
            }
        };
        // What could not be encoded shows as an operation without an answer.
        let _ = self.execute(statement, true);
        frontend::sync(&mut self.scratch);
        self.flush(out);
    }

    fn consume(&mut self, out: &mut Vec<u8>) {
        self.phase = Phase::Taking(0);
        let _ = self.execute("begin", false);
        self.value.clear();
        self.value.extend_from_slice(&self.batch.to_be_bytes());
        let _ = self.execute("take", true);
        frontend::sync(&mut self.scratch);
        self.flush(out);
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
            let header = Header::parse(rest).map_err(|error| format!("an answer that is not PostgreSQL's: {error}"))?;
            let Some(whole) = header.and_then(|header| rest.get(..header.len() as usize + 1)) else {
                return Ok((used, Reply::More));
            };
            used += whole.len();
            let parsed = Message::parse(&mut BytesMut::from(whole)).map_err(|error| error.to_string())?;
            match parsed {
                Some(Message::DataRow(row)) => {
                    use fallible_iterator::FallibleIterator;
                    let first = row.ranges().next().map_err(|error| error.to_string())?.flatten();
                    message(first.and_then(|range| row.buffer().get(range)).unwrap_or_default());
                    if let Phase::Taking(count) = self.phase {
                        self.phase = Phase::Taking(count + 1);
                    }
                }
                Some(Message::ErrorResponse(body)) => {
                    use fallible_iterator::FallibleIterator;
                    const MESSAGE: u8 = b'M';
                    let field = body.fields().find(|field| Ok(field.type_() == MESSAGE));
                    let text =
                        field.ok().flatten().map(|field| String::from_utf8_lossy(field.value_bytes()).into_owned());
                    self.refused = Some(text.unwrap_or_else(|| "an error without a message".into()));
                    if self.phase == Phase::Login {
                        return Err(self.refused.take().unwrap_or_default());
                    }
                }
                Some(Message::AuthenticationCleartextPassword | Message::AuthenticationMd5Password(_)) => {
                    return Err("the server wants a password".into());
                }
                Some(Message::ReadyForQuery(_)) => match self.ready(out)? {
                    Reply::More => {}
                    reply => return Ok((used, reply)),
                },
                _ => {}
            }
        }
    }
}
