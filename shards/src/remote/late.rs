//! Leases that have left in replies to peers: a cancel that crosses its reply gives them back (C58).

use std::cell::RefCell;
use std::collections::VecDeque;
use std::time::Duration;

use super::ConnectionId;
use crate::api::Delivery;
use crate::io::Slice;
use crate::rt::{self, Instant};

/// How long a reply is remembered.
const REMEMBERED_FOR: Duration = Duration::from_secs(2);

struct Sent {
    until: Instant,
    connection: ConnectionId,
    request_id: u64,
    /// Without their bodies.
    leases: Vec<Delivery>,
}

/// In the order in which they are forgotten.
pub(super) struct LateCancels {
    sent: RefCell<VecDeque<Sent>>,
    no_body: Slice,
}

impl LateCancels {
    pub fn new() -> LateCancels {
        LateCancels { sent: RefCell::default(), no_body: Slice::empty() }
    }

    pub fn remember(&self, connection: ConnectionId, request_id: u64, deliveries: &[Delivery]) {
        self.forget_old();
        if deliveries.is_empty() {
            return;
        }
        let bodiless = |delivery: &Delivery| Delivery { body: self.no_body.clone(), key_bytes: 0, ..delivery.clone() };
        let leases = deliveries.iter().map(bodiless).collect();
        let until = rt::now() + REMEMBERED_FOR;
        self.sent.borrow_mut().push_back(Sent { until, connection, request_id, leases });
    }

    /// What this request's reply carried, if it is still remembered.
    pub fn take(&self, connection: ConnectionId, request_id: u64) -> Vec<Delivery> {
        self.forget_old();
        let mut sent = self.sent.borrow_mut();
        let at = sent.iter().position(|sent| sent.connection == connection && sent.request_id == request_id);
        at.and_then(|at| sent.remove(at)).map_or_else(Vec::new, |sent| sent.leases)
    }

    /// What left on a connection that has ended may have arrived: its leases end by themselves.
    pub fn lost(&self, connection: ConnectionId) {
        self.sent.borrow_mut().retain(|sent| sent.connection != connection);
    }

    fn forget_old(&self) {
        let now = rt::now();
        let mut sent = self.sent.borrow_mut();
        while sent.front().is_some_and(|sent| sent.until <= now) {
            sent.pop_front();
        }
    }
}
