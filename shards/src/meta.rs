//! What a shard is told by the control thread: the node's topics and the other nodes, each an immutable snapshot that
//! is replaced as a whole (E23).

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::net::SocketAddr;
use std::sync::Arc;

/// Index of a shard on its node, `0..shards`.
pub type ShardId = u16;

/// Identity of a node as peers see it. This node is always [`NodeId::LOCAL`] to itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u64);

impl NodeId {
    pub const LOCAL: NodeId = NodeId(0);
    /// No owner yet.
    pub const NONE: NodeId = NodeId(u64::MAX);
}

/// Where a partition is served: the carrier (own core, ring, QUIC) follows from it (E44).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address {
    pub node: NodeId,
    pub shard: ShardId,
}

impl Address {
    /// A partition on another node: the carrier knows its shard, or finds out (E43).
    pub const ROUTED: ShardId = ShardId::MAX - 1;

    pub fn local(shard: ShardId) -> Address {
        Address { node: NodeId::LOCAL, shard }
    }

    pub fn remote(node: NodeId) -> Address {
        Address { node, shard: Address::ROUTED }
    }
}

/// One life of a topic name; shown as 16 lowercase hex digits and never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Incarnation(pub u64);

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl Incarnation {
    /// Parses exactly 16 lowercase hex digits.
    pub fn parse(text: &str) -> Option<Incarnation> {
        let well_formed = text.len() == 16 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        well_formed.then(|| u64::from_str_radix(text, 16).ok()).flatten().map(Incarnation)
    }
}

/// What a commit is addressed to (E44): queue, commit in flight, failing, hung, probe and reroute belong to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Destination {
    pub incarnation: Incarnation,
    pub partition: u32,
}

/// A map by destination that is asked for every record. Never iterated where the order shows.
pub type DestinationMap<T> = HashMap<Destination, T, BuildHasherDefault<DestinationHasher>>;

/// Incarnations are random numbers of our own and partitions small ones: nobody outside can make them collide, so a
/// multiplication is hash enough.
#[derive(Default)]
pub struct DestinationHasher(u64);

impl Hasher for DestinationHasher {
    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// The shard, of so many on a node, that holds the shared queue of a topic's waiters there (E53).
pub fn home_shard(incarnation: Incarnation, shards: ShardId) -> ShardId {
    let mixed = incarnation.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    (mixed % u64::from(shards.max(1))) as ShardId
}

/// Where to ask first for a partition of another node, until a reply has named its shard (E43).
pub fn guessed_shard(destination: Destination, shards: ShardId) -> ShardId {
    let first = home_shard(destination.incarnation, shards);
    ((u64::from(first) + u64::from(destination.partition)) % u64::from(shards.max(1))) as ShardId
}

/// One topic, as create made it and alter left it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicMeta {
    pub name: Arc<str>,
    pub incarnation: Incarnation,
    pub partitions: u32,
    /// `0` keeps records for ever.
    pub retention_ms: u64,
    pub visibility_timeout_ms: u64,
    pub max_in_flight_per_partition: u64,
    pub max_acked_ahead_per_partition: u64,
    pub created_at_ms: u64,
    pub owner: Option<Arc<str>>,
}

/// Everything a shard knows of the node's topics at one instant. Never changed after it was built.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Grows with every change; a shard never installs an older one over a newer one.
    pub version: u64,
    /// Shards of this node.
    pub shards: ShardId,
    pub topics: BTreeMap<Arc<str>, Arc<TopicMeta>>,
    pub by_incarnation: HashMap<Incarnation, Arc<TopicMeta>>,
    /// Address of each partition, by partition number (E43). Those of this node are placed by the control thread alone;
    /// one without an owner is at [`NodeId::NONE`]. Empty until ownership may be trusted (K22).
    pub placement: HashMap<Incarnation, Arc<[Address]>>,
}

impl Snapshot {
    pub fn topic(&self, name: &str) -> Option<&Arc<TopicMeta>> {
        self.topics.get(name)
    }

    pub fn topic_of(&self, incarnation: Incarnation) -> Option<&Arc<TopicMeta>> {
        self.by_incarnation.get(&incarnation)
    }

    pub fn address(&self, destination: Destination) -> Option<Address> {
        let addresses = self.placement.get(&destination.incarnation)?;
        addresses.get(destination.partition as usize).copied().filter(|address| address.node != NodeId::NONE)
    }

    /// The shard that holds a topic's shared queue of waiters on this node (E53).
    pub fn home(&self, incarnation: Incarnation) -> ShardId {
        home_shard(incarnation, self.shards)
    }

    /// Other nodes that own partitions of a topic, ascending.
    pub fn remote_owners(&self, incarnation: Incarnation) -> Vec<NodeId> {
        let addresses = self.placement.get(&incarnation).map(|a| &a[..]).unwrap_or(&[]);
        let others = addresses.iter().map(|a| a.node).filter(|node| *node != NodeId::LOCAL && *node != NodeId::NONE);
        let mut nodes: Vec<NodeId> = others.collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    /// Partitions of a topic that one local shard serves, ascending.
    pub fn partitions_on(&self, incarnation: Incarnation, shard: ShardId) -> impl Iterator<Item = u32> + '_ {
        let addresses = self.placement.get(&incarnation).map(|a| &a[..]).unwrap_or(&[]);
        addresses.iter().zip(0u32..).filter(move |(a, _)| **a == Address::local(shard)).map(|(_, p)| p)
    }
}

/// Everything a shard knows of the other nodes at one instant. Replaced as a whole by the control thread.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerBook {
    pub version: u64,
    /// This node's name, as its peers know it.
    pub me: Arc<str>,
    /// This process (E39). A token carries it, so that a restarted node is never called back for its former life.
    pub boot_id: u64,
    /// This node's number in the metadata, beside [`NodeId::LOCAL`]: what peers call it.
    pub number: NodeId,
    pub peers: BTreeMap<NodeId, Peer>,
}

impl PeerBook {
    /// Membership's word. A node that the book lacks is believed to live only while there is no book yet.
    pub fn is_alive(&self, node: NodeId) -> bool {
        node == NodeId::LOCAL || self.peers.get(&node).map_or(self.version == 0, |peer| peer.alive)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    pub name: Arc<str>,
    /// Membership's word; not whether a connection is up.
    pub alive: bool,
    /// Of the process that said hello last; 0 before the first hello. Routes and averages of another one are void (E43).
    pub boot_id: u64,
    pub control_addr: SocketAddr,
    /// One a shard, as the peer told it (E39). Empty before the first hello.
    pub shard_addrs: Arc<[SocketAddr]>,
}
