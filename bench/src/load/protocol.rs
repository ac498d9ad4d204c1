//! What the engine asks of a protocol: bytes in, bytes out, no socket and no clock of its own.

use std::time::Duration;

use super::Nanos;

/// One connection's conversation. The engine calls it on one thread, and starts an operation only when the last one is
/// done: a protocol that wants several in flight opens several connections.
pub trait Protocol {
    /// A connection was made. What is put into `out` opens the conversation; `true`: operations wait until `receive` has
    /// said [`Progress::Done`] once (a login, for example).
    fn open(&mut self, _out: &mut Vec<u8>) -> bool {
        false
    }

    /// Starts an operation: appends its request to `out`.
    fn begin(&mut self, now: Nanos, out: &mut Vec<u8>) -> Begin;

    /// Looks at everything received and not yet consumed. May append a follow-up to `out` (an ack, for example): the
    /// operation goes on until `Done`. An error gives the connection up; its text is for a person.
    fn receive(&mut self, now: Nanos, input: &[u8], out: &mut Vec<u8>) -> Result<Step, String>;

    /// The connection is gone, with the operation if there was one. A new one follows, with `open`.
    fn lost(&mut self) {}

    /// Its group has stopped: nothing is in flight and nothing will be started.
    fn over(&mut self) {}
}

/// Whether an operation was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    Started,
    /// Something else must happen first; asked again within a millisecond.
    NotYet,
    /// This connection has nothing left to do.
    Finished,
}

/// What `receive` made of the input.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Bytes that need not be shown again.
    pub consumed: usize,
    pub progress: Progress,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Progress {
    /// The operation goes on: more bytes must come.
    More,
    /// The operation, or the opening, has ended.
    Done(Answer),
}

/// How an operation ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    pub result: Outcome,
    /// The server closes after this answer.
    pub close: bool,
    /// The server asked for a pause.
    pub pause: Option<Duration>,
}

/// What came of an operation.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    Ok {
        /// Messages that it moved, at least 1.
        messages: u32,
    },
    /// Nothing was there, as after a long poll.
    Empty,
    /// The server said no.
    Refused {
        /// Groups like with like in the report: a status.
        kind: String,
        /// What it said.
        text: String,
    },
}
