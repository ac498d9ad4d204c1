//! Links between the shards of one node, and the control thread: every ordered pair has a ring of its own, every
//! receiver one doorbell.
//!
//! [`mesh`] makes all ends at once; each [`Endpoint`] moves to its thread and is attached there, on the ring runtime
//! or in simulation. Messages cross unserialised.
//!
//! There is no cap on calls that wait for their reply, because those who make them are capped already. A parked consume
//! is one call, and one client connection (HTTP/1.1 serves one request of a connection at a time, pipelined ones wait in
//! the socket): `http.max_connections`, or the descriptor limit where that is off. Acks and replays likewise. A
//! dispatcher has 16 commits in flight for each WAL directory. So a client that parks without end runs into the cap on
//! connections, and before that into its own of `http.max_consume_in_flight_per_identity`.

mod bell;
mod calls;
mod links;
mod outbox;
mod parking;
#[cfg(test)]
mod tests;

use std::sync::{Arc, OnceLock};

use rtrb::{Consumer, Producer, RingBuffer};

use crate::meta::{Address, ShardId};
use crate::peer::{Lost, Reply, Request};

pub use bell::Doorbell;
use bell::Parking;
pub use links::{Handler, Links};

/// The control thread's place among the shards of its node.
pub const CONTROL: ShardId = ShardId::MAX;

impl Address {
    /// The control thread of this node.
    pub const CONTROL: Address = Address { node: crate::meta::NodeId::LOCAL, shard: CONTROL };
}

/// Messages that fit one ring; the first half is for requests and replies alike, the rest for replies.
pub const RING_SLOTS: usize = 256;

/// What a message takes in a ring.
pub const MESSAGE_BYTES: usize = std::mem::size_of::<Message>();

/// Whole cache lines: the sender of one message never writes to a line that the receiver of the one before reads.
#[repr(align(64))]
enum Message {
    Call { id: u64, request: Request },
    Send(Request),
    Reply { id: u64, answer: Result<Reply, Lost> },
}

/// Bells by position in the mesh; set when the receiver attaches.
type Bells = Arc<[OnceLock<Arc<Doorbell>>]>;

struct Pair {
    peer: ShardId,
    position: usize,
    to: Producer<Message>,
    from: Consumer<Message>,
    /// Whether we, or the peer, wait for room in the ring.
    hungry: [Arc<Parking>; 2],
}

/// One thread's end of all its links. `Send`: made in one place, attached on its own thread.
pub struct Endpoint {
    me: ShardId,
    position: usize,
    pairs: Vec<Pair>,
    bells: Bells,
}

impl Endpoint {
    /// The shard that this end belongs to, or [`CONTROL`].
    pub fn shard(&self) -> ShardId {
        self.me
    }
}

/// Ends for shards `0..shards`, in order, and last the control thread's.
pub fn mesh(shards: ShardId) -> Vec<Endpoint> {
    mesh_with(shards, RING_SLOTS)
}

fn mesh_with(shards: ShardId, slots: usize) -> Vec<Endpoint> {
    let names: Vec<ShardId> = (0..shards).chain([CONTROL]).collect();
    let bells: Bells = names.iter().map(|_| OnceLock::new()).collect();
    let mut ends: Vec<Endpoint> = names
        .iter()
        .enumerate()
        .map(|(position, me)| Endpoint { me: *me, position, pairs: Vec::new(), bells: bells.clone() })
        .collect();
    for a in 0..names.len() {
        for b in a + 1..names.len() {
            let (a_to, b_from) = RingBuffer::new(slots);
            let (b_to, a_from) = RingBuffer::new(slots);
            let [a_hungry, b_hungry] = [(); 2].map(|()| Arc::new(Parking::new()));
            let hungry = [a_hungry.clone(), b_hungry.clone()];
            ends[a].pairs.push(Pair { peer: names[b], position: b, to: a_to, from: a_from, hungry });
            let hungry = [b_hungry, a_hungry];
            ends[b].pairs.push(Pair { peer: names[a], position: a, to: b_to, from: b_from, hungry });
        }
    }
    ends
}
