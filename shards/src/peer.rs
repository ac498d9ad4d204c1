//! The one protocol that shards, the control thread and (later) other nodes speak, and its addresses.
//!
//! Between cores a message travels unserialised over an SPSC ring; within a core it is a function call. Whoever
//! sends names an [`Address`] and does not know the carrier.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::api::{
    ConsumeError, Delivery, MetaCommand, MetaReply, NotStored, PartitionStats, ReadAt, Settle, SettleStatus,
};
use crate::io::{AlignedBuf, Slice};
use crate::meta::{Address, Destination, Incarnation, NodeId, PeerBook, ShardId, Snapshot};
use crate::remote::Credit;
use crate::rt::sync::Notify;

/// One record on its way to a partition: the key's bytes (if any) followed by the payload's, as they lie in the
/// accepting shard's WAL staging buffer. Lent until the reply (E21), never copied by the carrier.
#[derive(Clone, Debug)]
pub struct Record {
    pub body: Slice,
    /// Length of the key at the front of `body`; 0 means that the record has no key.
    pub key_bytes: u32,
}

impl Record {
    pub fn key(&self) -> Option<&[u8]> {
        (self.key_bytes > 0).then(|| &self.body[..self.key_bytes as usize])
    }

    pub fn payload(&self) -> &[u8] {
        &self.body[self.key_bytes as usize..]
    }
}

/// Moves the records' bodies into memory of their own: they no longer keep alive what they lay in (E20).
pub(crate) fn copy_out<'a>(records: impl Iterator<Item = &'a mut Record> + 'a) {
    let records: Vec<&mut Record> = records.collect();
    let mut copy = AlignedBuf::reused(records.iter().map(|record| record.body.len()).sum());
    let mut at = 0;
    for record in &records {
        copy[at..at + record.body.len()].copy_from_slice(&record.body);
        at += record.body.len();
    }
    let copy = copy.freeze();
    at = 0;
    for record in records {
        let bytes = record.body.len();
        record.body = copy.slice(at..at + bytes);
        at += bytes;
    }
}

/// Records of one WAL directory for one partition, in WAL order: at most 8 MiB, or one record (E16).
#[derive(Clone, Debug)]
pub struct CommitBatch {
    pub destination: Destination,
    /// For logs and for records without an incarnation id (format 1), which commit by name.
    pub topic: Arc<str>,
    /// The incarnation that the records were accepted under. `None` only for format 1 records.
    pub accepted_under: Option<Incarnation>,
    pub records: Vec<Record>,
    /// What is left of the caller's patience: a spent batch is left out at the drain (E21).
    pub budget: Duration,
}

/// A commit that is durable, read back, checked and visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed {
    pub base_offset: u64,
    pub count: u64,
}

/// Why nothing of a batch was committed, as far as the owner can tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommitError {
    /// This shard does not (or no longer) serve the partition, or its topic record kept changing: retriable.
    NotOwner,
    /// The partition is frozen for a move: retriable.
    Frozen,
    /// The owner does not know the topic (its snapshot may be older than the sender's): retriable, never "gone".
    UnknownTopic,
    /// The records were accepted under another incarnation: `412` (retriable, the destination is not failing).
    IncarnationMismatch { accepted_under: Incarnation, live: Incarnation },
    /// The caller's budget was spent before the drain; nothing was appended.
    Spent,
    /// The log refuses appends until it is reopened; carries the first cause.
    Poisoned(String),
    /// The commit failed and left nothing behind.
    Failed(String),
    /// `503`: the owner takes nothing at the moment, for it stops, its disk is nearly full, it does not know yet what it
    /// owns, or it has no open file or memory left for the partition's log. Nothing is left behind.
    Unavailable(String),
    /// No answer will come: the carrier or the owner has gone. The batch may have been stored.
    Unreachable(String),
}

/// Why a partition's log cannot be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoLog {
    /// For the moment: in words for whoever asked.
    Busy(String),
    Failed(String),
}

impl std::fmt::Display for NoLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            NoLog::Busy(text) | NoLog::Failed(text) => f.write_str(text),
        }
    }
}

impl std::fmt::Display for CommitError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            CommitError::NotOwner => write!(f, "this shard does not serve the partition"),
            CommitError::Frozen => write!(f, "the partition is frozen for a move"),
            CommitError::UnknownTopic => write!(f, "the owner does not know the topic"),
            CommitError::IncarnationMismatch { accepted_under, live } => {
                write!(f, "records were accepted for incarnation {accepted_under}, the live topic is {live}")
            }
            CommitError::Spent => write!(f, "the commit's budget was spent before it started"),
            CommitError::Poisoned(cause) => write!(f, "partition log is poisoned until reopened: {cause}"),
            CommitError::Failed(cause) | CommitError::Unavailable(cause) => write!(f, "{cause}"),
            CommitError::Unreachable(cause) => write!(f, "no answer from the owner: {cause}"),
        }
    }
}

/// Identifies one parked consume on the shard that the client reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WaiterId {
    pub shard: ShardId,
    pub serial: u64,
}

/// "This node has somebody waiting for the topic" (C43): left with a node that had nothing, spent by one notification.
/// Holds no record, so a lost one costs nothing but time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// Who waits, as its peers know it.
    pub node: NodeId,
    /// The process that left it: a restarted node is never told for its former life.
    pub boot_id: u64,
}

/// What a consume takes: up to `max` records, ended by the record that crosses `bytes_max` (C89, C90).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Take {
    pub max: u32,
    pub bytes_max: usize,
}

/// A message from one shard (or the control thread) to another.
#[derive(Debug)]
pub enum Request {
    /// Append, sync, read back, show. Answer: [`Reply::Commit`].
    Commit(CommitBatch),
    /// Reserve and read what is ready now on the receiving shard, without waiting (C54). With `arm`, a receiver
    /// that had less than was asked for registers the sender as the topic's home and sends one `Available` when
    /// records may have come (the token of C43, spent by its use). Answer: [`Reply::Deliveries`].
    Claim { incarnation: Incarnation, partition: Option<u32>, take: Take, arm: bool },
    /// Join the topic's FIFO on its home shard, or the FIFO of a pinned partition on its own shard. Answered when
    /// served or unparked: [`Reply::Deliveries`], empty when unparked. On another node (pinned only) it unparks by
    /// itself after `wait`, or when the call is dropped.
    Park { waiter: WaiterId, incarnation: Incarnation, partition: Option<u32>, take: Take, wait: Duration },
    /// The waiter has timed out or gone: answer its `Park` now. One way; an unknown waiter is ignored.
    Unpark { waiter: WaiterId, incarnation: Incarnation, partition: Option<u32> },
    /// To the home shard: the sending shard may have records of the topic. Spends the token. One way.
    Available { incarnation: Incarnation, shard: ShardId },
    /// Reserve and read what is ready now on any shard of a node, asked by another one; goes to the topic's home. When
    /// it has less than was asked for, `token` is kept (C43 to C46). Answer: [`Reply::Deliveries`].
    NodeClaim { incarnation: Incarnation, take: Take, token: Option<Token> },
    /// Keep `token`, unless records may be here now. Goes to the topic's home. Answer: [`Reply::Registered`].
    Register { incarnation: Incarnation, token: Token },
    /// To the home shard of a node that left a token: `node` may have records. Spends the token. One way.
    NodeAvailable { incarnation: Incarnation, node: NodeId, boot_id: u64 },
    /// To the home shard that told `node` of records: nobody waits there any more, tell the next one. One way.
    Pass { incarnation: Incarnation, node: NodeId },
    /// Pick the partition, walking past those whose owner is dead, and commit there: no WAL (E56). Answer:
    /// [`Reply::Produced`].
    Produce { topic: Arc<str>, partition: Option<u32>, record: Record },
    /// Ack, extend or nack leases of one topic. Answer: [`Reply::Settled`], one status each, in order.
    Settle { incarnation: Incarnation, settles: Vec<Settle> },
    /// Replay: read one record, no lease. Answer: [`Reply::ReadAt`].
    ReadAt { incarnation: Incarnation, partition: u32, offset: u64 },
    /// Statistics of all partitions of the topic on the receiving shard. Answer: [`Reply::Stats`].
    Stats { incarnation: Incarnation },
    /// Control thread to shard: see the world as this snapshot from now on. Answer: [`Reply::Done`].
    InstallSnapshot(Arc<Snapshot>),
    /// Control thread to shard: the other nodes, from now on. Answer: [`Reply::Done`].
    InstallPeers(Arc<PeerBook>),
    /// Shard to control thread: change or confirm metadata. Answer: [`Reply::Meta`].
    Meta(MetaCommand),
    /// A WAL of this node failed: finish what is staged, then refuse every append (E11). One way.
    Latch { cause: String },
    /// To the shard that looks after a topic's directory (by its name): make it the live incarnation's, stamped
    /// durably (S5 to S7). Answer: [`Reply::Prepared`].
    PrepareTopic { topic: Arc<str>, incarnation: Incarnation },
    /// Close everything of an incarnation that is no longer in the snapshot: its directory is about to be moved.
    /// Waits for the snapshot that says so. Answer: [`Reply::Done`].
    CloseTopic { incarnation: Incarnation },
    /// Counters of the shard, for a scrape. Answer: [`Reply::Metrics`].
    Metrics,
    /// The few figures that an operator watches, at the cost of a memory copy. Answer: [`Reply::Vitals`].
    Vitals,
    /// Shard to control thread: opened and answering. Answered once every shard of the node is. Answer:
    /// [`Reply::Done`].
    Opened,
    /// Begin of a graceful stop: answer as before, each answer being the last on its connection. Answer:
    /// [`Reply::Done`], when the requests that had begun before are answered, or the time is up.
    BeginDrain { within: Duration },
    /// Accept no connection any more, let requests in flight finish, at most until the time is up. Answer:
    /// [`Reply::Done`].
    StopServing { within: Duration },
    /// First half of a graceful stop: take no produce, start no commit; settle what is under way. Answer:
    /// [`Reply::Done`].
    Quiesce,
    /// Second half: make positions, boundaries and the checkpoint durable. Answer: [`Reply::ShutDown`].
    Shutdown,
}

#[derive(Debug)]
pub enum Reply {
    Commit(Result<Committed, CommitError>),
    Deliveries(Result<Vec<Delivery>, ConsumeError>),
    /// Whether records may be there now; then the token was not kept.
    Registered(Result<bool, ConsumeError>),
    /// The partition that was picked.
    Produced(Result<(u32, Committed), CommitError>),
    Settled(Vec<SettleStatus>),
    ReadAt(Result<ReadAt, ConsumeError>),
    Stats(Vec<PartitionStats>),
    Meta(MetaReply),
    Prepared(Result<(), NoLog>),
    Metrics(Box<crate::metrics::ShardMetrics>),
    Vitals(Box<crate::metrics::ShardVitals>),
    /// What could not be stored.
    ShutDown(NotStored),
    Done,
}

/// The answer will not come: the peer has gone, or never was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost(pub String);

/// Room for one commit at its owner; nothing where none has to be taken.
pub struct Room(pub(crate) Option<Credit>);

pub type LocalBoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// Carries messages to other shards. One per shard; the real one runs over SPSC rings.
///
/// A call runs to its end on the receiver even when the returned future is dropped; a late reply is discarded, so
/// whoever can receive a lease keeps the future until it is answered.
pub trait Carrier {
    fn call(&self, to: Address, request: Request) -> LocalBoxFuture<'static, Result<Reply, Lost>>;
    /// One way: no reply, no error; lost only together with the receiver, or with the connection to another node.
    fn send(&self, to: Address, request: Request);
    /// Takes room for a commit of so many bytes at its owner (E41), which is given back when the [`Room`] is dropped.
    /// `None`: there is none now; to be asked again after [`Carrier::room_freed`]. This node's own shards have room.
    fn room(&self, _to: Address, _destination: Destination, _bytes: u64) -> Option<Room> {
        Some(Room(None))
    }

    /// `notify_all` after room came back somewhere.
    fn room_freed(&self) -> Notify {
        Notify::new()
    }

    /// A commit that has its room. Like [`Carrier::call`] otherwise.
    fn commit(&self, to: Address, batch: CommitBatch, _room: Room) -> LocalBoxFuture<'static, Result<Reply, Lost>> {
        self.call(to, Request::Commit(batch))
    }

    /// The shard behind an address, as far as it is known: of a partition on another node, the one that served it last.
    fn served_by(&self, to: Address, _destination: Destination) -> Address {
        to
    }

    /// The other nodes, from now on. A carrier that stays on its node has no use for it.
    fn install_peers(&self, _peers: Arc<PeerBook>) {}
}
