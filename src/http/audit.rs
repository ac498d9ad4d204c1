//! Audit lines: who asked for which change, and what came of it. Written on the node that the client called, here and
//! nowhere else.
//!
//! A change begins when its body has been understood; what falls earlier leaves no line. From then on every way out
//! does, the client's going away too: a change that possibly happened is found as `ok` or `unknown`.

use hyper::StatusCode;
use narad_shards::meta::Incarnation;

use super::reply::{ApiError, Reply, CLIENT_LEFT};

/// What is audited, of the operations that exist.
pub(crate) const TOPIC_CREATE: &str = "topic.create";
pub(crate) const TOPIC_ALTER: &str = "topic.alter";
pub(crate) const TOPIC_DELETE: &str = "topic.delete";
pub(crate) const CLUSTER_FORGET: &str = "cluster.forget";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Ok,
    /// `403`
    Denied,
    /// Any other 4xx: nothing changed.
    Rejected,
    /// A 5xx that was decided: nothing changed.
    Failed,
    /// Nobody knows.
    Unknown,
}

impl Outcome {
    fn of(error: &ApiError) -> Outcome {
        match error.status {
            _ if error.is_outcome_unknown() => Outcome::Unknown,
            StatusCode::FORBIDDEN => Outcome::Denied,
            status if status.is_client_error() => Outcome::Rejected,
            _ => Outcome::Failed,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Outcome::Ok => "ok",
            Outcome::Denied => "denied",
            Outcome::Rejected => "rejected",
            Outcome::Failed => "failed",
            Outcome::Unknown => "unknown",
        }
    }
}

/// One change under way. Dropped unfinished it is on record all the same: its client has left, or its handler panicked.
pub(crate) struct Audit<'a> {
    event: &'static str,
    target: &'a str,
    /// Of an alter: what is changed already, whatever becomes of the rest, and what is being changed.
    changed: Vec<&'static str>,
    changing: Vec<&'static str>,
    /// Of a delete that this node runs.
    incarnation: Option<Incarnation>,
    finished: bool,
}

impl<'a> Audit<'a> {
    pub fn begin(event: &'static str, target: &'a str) -> Audit<'a> {
        Audit { event, target, changed: Vec::new(), changing: Vec::new(), incarnation: None, finished: false }
    }

    pub fn of_incarnation(&mut self, incarnation: Incarnation) {
        self.incarnation = Some(incarnation);
    }

    /// The next fields of an alter; those before are changed.
    pub fn fields(&mut self, fields: Vec<&'static str>) {
        self.changed.append(&mut self.changing);
        self.changing = fields;
    }

    /// `result` is what the client gets.
    pub fn finish(mut self, result: Result<Reply, ApiError>) -> Result<Reply, ApiError> {
        self.finished = true;
        match &result {
            Ok(reply) => {
                self.fields(Vec::new());
                self.write(reply.status(), Outcome::Ok, &self.changed);
            }
            Err(error) => self.write_apart(error.status, Outcome::of(error)),
        }
        result
    }

    /// Fields that differ in their outcome have lines of their own.
    fn write_apart(&self, status: StatusCode, outcome: Outcome) {
        if !self.changed.is_empty() {
            self.write(StatusCode::OK, Outcome::Ok, &self.changed);
        }
        self.write(status, outcome, &self.changing);
    }

    fn write(&self, status: StatusCode, outcome: Outcome, fields: &[&str]) {
        let fields = (!fields.is_empty()).then(|| fields.join(","));
        macro_rules! line {
            ($level:ident) => {
                tracing::$level!(
                    component = "audit",
                    event = self.event,
                    actor = "", // requests are not authenticated yet
                    target = self.target,
                    status = status.as_u16(),
                    outcome = outcome.name(),
                    fields,
                    incarnation = self.incarnation.map(tracing::field::display),
                    "audit"
                )
            };
        }
        match outcome {
            Outcome::Denied => line!(warn),
            _ => line!(info),
        }
    }
}

impl Drop for Audit<'_> {
    fn drop(&mut self) {
        if !self.finished {
            let panics = std::thread::panicking();
            let left = StatusCode::from_u16(CLIENT_LEFT).unwrap_or_default();
            let status = if panics { StatusCode::INTERNAL_SERVER_ERROR } else { left };
            self.write_apart(status, Outcome::Unknown);
        }
    }
}
