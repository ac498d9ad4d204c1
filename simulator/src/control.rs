//! What stands behind the shards of a simulated node: who keeps the topics, and who the other nodes are.

use std::rc::Rc;
use std::sync::Arc;

use narad_shards::api::{MetaCommand, MetaReply};
use narad_shards::meta::{ShardId, Snapshot};
use narad_shards::peer::Carrier;
use narad_shards::remote::sim::SimNetwork;
use narad_shards::shard::Shard;

use crate::broker::{Answer, End, Observer};
use crate::ledger::Violation;
use crate::node::Links;

/// Of all nodes of a world. Nodes go by their place from 0.
pub trait ControlPlane {
    /// `None` for a lone node.
    fn network(&self) -> Option<SimNetwork>;

    /// A process begins. Resolves with what its shards see first; an error is a refusal to start.
    fn begins(&self, node: usize, links: Rc<Links>) -> Answer<Result<Arc<Snapshot>, String>>;

    /// What a shard of it talks to others with; `rings` reaches its siblings.
    fn carrier(&self, node: usize, shard: ShardId, rings: Rc<dyn Carrier>) -> Rc<dyn Carrier>;

    /// Its shards are open.
    fn joins(&self, node: usize, links: Rc<Links>, shards: Vec<Shard>) -> Answer<()>;

    /// A process is about to end.
    fn ends(&self, node: usize);

    /// It has ended, and nothing of it is left.
    fn ended(&self, _node: usize, _end: End) {}

    /// Answers one of its shards.
    fn answer(&self, node: usize, command: MetaCommand) -> Answer<MetaReply>;

    /// Answers one of its clients.
    fn change(&self, node: usize, command: MetaCommand) -> Answer<MetaReply>;

    /// Whether it serves clients (E51).
    fn serves(&self, node: usize) -> bool;

    /// First step of its graceful stop: somebody else leads.
    fn hand_over(&self, node: usize) -> Answer<()>;

    /// Membership changes its mind about a node, where that can be had for the asking.
    fn set_alive(&self, _node: usize, _alive: bool) {}

    /// See [`crate::broker::Launcher`].
    fn observe(&self, _observer: Rc<dyn Observer>) {}

    fn broken(&self) -> Vec<Violation> {
        Vec::new()
    }
}
