//! Leases that have left in replies to peers: a cancel that crosses its reply gives them back (C58).

use std::cell::RefCell;
use std::collections::VecDeque;
use std::time::Duration;

use super::ConnectionId;
use crate::api::{Delivery, Settle, SettleMode};
use crate::meta::Incarnation;
use crate::rt::{self, Instant};

/// How long a reply is remembered.
const REMEMBERED_FOR: Duration = Duration::from_secs(2);

struct Sent {
    until: Instant,
    connection: ConnectionId,
    request_id: u64,
    leases: Vec<Lease>,
}

struct Lease {
    incarnation: Incarnation,
    partition: u32,
    offset: u64,
    nonce: u64,
}

/// In the order in which they are forgotten.
#[derive(Default)]
pub(super) struct LateCancels {
    sent: RefCell<VecDeque<Sent>>,
}

impl LateCancels {
    pub fn remember(&self, connection: ConnectionId, request_id: u64, deliveries: &[Delivery]) {
        self.forget_old();
        if deliveries.is_empty() {
            return;
        }
        let lease = |delivery: &Delivery| Lease {
            incarnation: delivery.incarnation,
            partition: delivery.partition,
            offset: delivery.offset,
            nonce: delivery.nonce,
        };
        let leases = deliveries.iter().map(lease).collect();
        let until = rt::now() + REMEMBERED_FOR;
        self.sent.borrow_mut().push_back(Sent { until, connection, request_id, leases });
    }

    /// What this request's reply carried, if it is still remembered: as settles that give it back.
    pub fn take(&self, connection: ConnectionId, request_id: u64) -> Vec<(Incarnation, Settle)> {
        self.forget_old();
        let mut sent = self.sent.borrow_mut();
        let at = sent.iter().position(|sent| sent.connection == connection && sent.request_id == request_id);
        let leases = at.and_then(|at| sent.remove(at)).map_or_else(Vec::new, |sent| sent.leases);
        let release = |lease: Lease| {
            let Lease { incarnation, partition, offset, nonce } = lease;
            (incarnation, Settle { partition, offset, nonce, mode: SettleMode::Release })
        };
        leases.into_iter().map(release).collect()
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
