//! Limits of the node as a whole: relaxed atomics shared by all shards, off the path of a single produce (E24).

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};

/// The budget of large batches is taken in steps of this many bytes; a body up to one step never touches it.
const LARGE_STEP_BYTES: u64 = 1 << 20;
/// The same of the budget in memory, which is for bodies of every kind.
const MEMORY_STEP_BYTES: u64 = 64 << 10;

/// Who a limit is counted for: the client's address, until requests are authenticated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Identity {
    Ip(IpAddr),
}

/// Requests in flight of one identity on this node.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    consumes: AtomicU32,
    produces: AtomicU32,
}

/// Shared by all shards of a node.
pub struct NodeLimits {
    connections_max: u32,
    connections: AtomicU32,
    large_bodies: Budget,
    body_memory: Budget,
    /// Locked when a connection asks for its identity the first time, never per request.
    identities: Mutex<HashMap<Identity, Weak<InFlight>>>,
}

impl NodeLimits {
    /// `connections_max`: open client connections, 0 is no cap. `large_body_bytes_max`: batch bodies over 1 MiB that
    /// may be held at once, in bytes, 0 is no budget (`http.max_batch_body_bytes_in_flight`).
    pub fn new(connections_max: u32, large_body_bytes_max: u64) -> NodeLimits {
        NodeLimits {
            connections_max,
            connections: AtomicU32::new(0),
            large_bodies: Budget { bytes_max: large_body_bytes_max, ..Budget::default() },
            body_memory: Budget::default(),
            identities: Mutex::default(),
        }
    }

    /// Bytes that request bodies may take together, those up to 64 KiB aside; 0 is no limit.
    pub fn with_body_memory(mut self, bytes_max: u64) -> NodeLimits {
        self.body_memory.bytes_max = bytes_max;
        self
    }

    /// A place for one more client connection, or `None`: leave it in the accept backlog.
    pub fn connection(self: &Arc<Self>) -> Option<ConnectionSlot> {
        let max = if self.connections_max == 0 { u32::MAX } else { self.connections_max };
        take(&self.connections, 1, max).then(|| ConnectionSlot { node: self.clone() })
    }

    /// `0`: no cap.
    pub fn connections_max(&self) -> u32 {
        self.connections_max
    }

    pub fn connections_open(&self) -> u32 {
        self.connections.load(Relaxed)
    }

    /// Bytes of large bodies held now.
    pub fn large_body_bytes_held(&self) -> u64 {
        self.large_bodies.bytes.load(Relaxed)
    }

    /// Bytes held now of [`NodeLimits::with_body_memory`].
    pub fn body_memory_bytes_held(&self) -> u64 {
        self.body_memory.bytes.load(Relaxed)
    }

    pub(crate) fn in_flight(&self, identity: Identity) -> Arc<InFlight> {
        let mut identities = self.identities.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(known) = identities.get(&identity).and_then(Weak::upgrade) {
            return known;
        }
        // Entries of identities without a connection are swept before the table would grow for a new one.
        if identities.len() == identities.capacity() {
            identities.retain(|_, weak| weak.strong_count() > 0);
        }
        let fresh = Arc::new(InFlight::default());
        identities.insert(identity, Arc::downgrade(&fresh));
        fresh
    }
}

/// An open connection, counted until dropped.
pub struct ConnectionSlot {
    node: Arc<NodeLimits>,
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.node.connections.fetch_sub(1, Relaxed);
    }
}

/// Which of an identity's requests are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Consume,
    Produce,
}

/// A request's share of its identity's cap, given back on drop.
pub(crate) struct InFlightSlot {
    identity: Arc<InFlight>,
    kind: Kind,
    weight: u32,
    max: u32,
}

/// The identity has as many requests in flight as it may.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Full;

impl InFlightSlot {
    /// Takes `weight` of `max` (not 0); a weight above the cap counts as the cap, so it can pass alone.
    pub(crate) fn take(identity: Arc<InFlight>, kind: Kind, weight: u32, max: u32) -> Result<InFlightSlot, Full> {
        let weight = weight.min(max);
        if !take(counter(&identity, kind), weight, max) {
            return Err(Full);
        }
        Ok(InFlightSlot { identity, kind, weight, max })
    }

    /// Counts the request as `weight` from here on.
    pub(crate) fn grow_to(&mut self, weight: u32) -> Result<(), Full> {
        let more = weight.min(self.max).saturating_sub(self.weight);
        if !take(counter(&self.identity, self.kind), more, self.max) {
            return Err(Full);
        }
        self.weight += more;
        Ok(())
    }
}

impl Drop for InFlightSlot {
    fn drop(&mut self) {
        counter(&self.identity, self.kind).fetch_sub(self.weight, Relaxed);
    }
}

fn counter(identity: &InFlight, kind: Kind) -> &AtomicU32 {
    match kind {
        Kind::Consume => &identity.consumes,
        Kind::Produce => &identity.produces,
    }
}

fn take(counter: &AtomicU32, weight: u32, max: u32) -> bool {
    let taken = counter.fetch_update(Relaxed, Relaxed, |now| now.checked_add(weight).filter(|sum| *sum <= max));
    taken.is_ok()
}

/// Bytes of which so many may be held at once; 0 is no limit.
#[derive(Debug, Default)]
struct Budget {
    bytes_max: u64,
    bytes: AtomicU64,
}

/// What one body holds of a budget, given back on drop.
pub(crate) struct BodyReservation {
    node: Arc<NodeLimits>,
    budget: fn(&NodeLimits) -> &Budget,
    step_bytes: u64,
    bytes: u64,
}

impl BodyReservation {
    /// Nothing yet of the budget of large batch bodies.
    pub(crate) fn of_large_bodies(node: &Arc<NodeLimits>) -> BodyReservation {
        BodyReservation {
            node: node.clone(),
            budget: |node| &node.large_bodies,
            step_bytes: LARGE_STEP_BYTES,
            bytes: 0,
        }
    }

    /// Nothing yet of the memory for request bodies.
    pub(crate) fn of_memory(node: &Arc<NodeLimits>) -> BodyReservation {
        BodyReservation {
            node: node.clone(),
            budget: |node| &node.body_memory,
            step_bytes: MEMORY_STEP_BYTES,
            bytes: 0,
        }
    }

    /// Whether a body of that size is charged to the memory for bodies: smaller ones are many, and off its path (E24).
    pub(crate) fn memory_counts(body_bytes: usize) -> bool {
        body_bytes as u64 > MEMORY_STEP_BYTES
    }

    /// Gives back what is beyond a body of `body_bytes`.
    pub(crate) fn shrink_to(&mut self, body_bytes: usize) {
        let wanted = (body_bytes as u64).next_multiple_of(self.step_bytes).min(self.bytes);
        (self.budget)(&self.node).bytes.fetch_sub(self.bytes - wanted, Relaxed);
        self.bytes = wanted;
    }

    /// Covers a body of `body_bytes`; takes nothing for one step or less.
    pub(crate) fn cover(&mut self, body_bytes: usize) -> Result<(), Full> {
        let budget = (self.budget)(&self.node);
        let body_bytes = body_bytes as u64;
        if body_bytes <= self.bytes.max(self.step_bytes) || budget.bytes_max == 0 {
            return Ok(());
        }
        let wanted = body_bytes.next_multiple_of(self.step_bytes);
        let more = wanted - self.bytes;
        let fits = |held: u64| Some(held + more).filter(|sum| *sum <= budget.bytes_max);
        budget.bytes.fetch_update(Relaxed, Relaxed, fits).map_err(|_| Full)?;
        self.bytes = wanted;
        Ok(())
    }
}

impl Drop for BodyReservation {
    fn drop(&mut self) {
        (self.budget)(&self.node).bytes.fetch_sub(self.bytes, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e24_a_reservation_grows_in_steps_and_comes_back_whole() {
        let node = Arc::new(NodeLimits::new(0, 4 << 20));
        let mut first = BodyReservation::of_large_bodies(&node);
        assert_eq!(first.cover(1 << 20), Ok(()));
        assert_eq!(node.large_body_bytes_held(), 0, "a body of one step never touches the budget");
        assert_eq!(first.cover((1 << 20) + 1), Ok(()));
        assert_eq!(node.large_body_bytes_held(), 2 << 20);
        assert_eq!(first.cover(3 << 20), Ok(()));
        let mut second = BodyReservation::of_large_bodies(&node);
        assert_eq!(second.cover((1 << 20) + 1), Err(Full));
        assert_eq!(node.large_body_bytes_held(), 3 << 20, "a refused step leaves nothing behind");
        drop((first, second));
        assert_eq!(node.large_body_bytes_held(), 0);
    }

    #[test]
    fn a_weight_above_the_cap_passes_alone() {
        let node = Arc::new(NodeLimits::new(0, 0));
        let identity = Identity::Ip(IpAddr::from([10, 0, 0, 1]));
        let batch = InFlightSlot::take(node.in_flight(identity), Kind::Consume, 100, 10).expect("clamped to the cap");
        assert!(InFlightSlot::take(node.in_flight(identity), Kind::Consume, 1, 10).is_err());
        drop(batch);
        let mut single = InFlightSlot::take(node.in_flight(identity), Kind::Consume, 1, 10).expect("free again");
        let _other = InFlightSlot::take(node.in_flight(identity), Kind::Consume, 1, 10).expect("two of ten");
        assert_eq!(single.grow_to(10), Err(Full));
        assert_eq!(single.grow_to(9), Ok(()));
    }

    #[test]
    fn identities_without_connections_are_forgotten() {
        let node = NodeLimits::new(0, 0);
        for host in 0..10_000u32 {
            drop(node.in_flight(Identity::Ip(IpAddr::from(host.to_be_bytes()))));
        }
        let known = node.identities.lock().expect("nobody panicked under the lock").len();
        assert!(known < 64, "{known} identities are remembered");
    }

    #[test]
    fn connections_are_capped_and_returned() {
        let node = Arc::new(NodeLimits::new(2, 0));
        let held = (node.connection(), node.connection());
        assert!(node.connection().is_none());
        drop(held);
        assert_eq!(node.connections_open(), 0);
        assert!(node.connection().is_some());
    }
}
