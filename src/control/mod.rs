//! The metadata of a node: which topics there are, which nodes there are, and which of them owns which partition.
//!
//! A change is a [`Command`] whose random and timed parts its proposer has already chosen. A [`Log`] puts commands in
//! an order (Raft, on a lone node with one voter), the applier computes what each does to the [`State`] with a pure
//! function, stores effects and index in one transaction, builds a new immutable `Snapshot`, has every shard install
//! it, and only then answers (E23). Nothing here knows threads: commits run through `rt::blocking` (E27), and the
//! node's wiring hands in how a snapshot reaches the shards.

mod applier;
mod apply;
mod ballast;
mod command;
pub mod consensus;
mod controller;
pub(crate) mod fuzz;
mod members;
mod membership;
mod names;
mod peers;
mod placement;
pub mod plane;
mod rows;
mod servers;
mod state;
pub(crate) mod store;
mod watch;
mod wire;

#[cfg(test)]
mod cluster_tests;
#[cfg(test)]
mod moved_tests;
#[cfg(test)]
mod state_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_support;

use std::rc::Rc;
use std::sync::Arc;

use narad_shards::api::{MemberStatus, MetaCommand, MetaReply, NewTopic, NodeStatus, TopicChange};
use narad_shards::meta::{Incarnation, ShardId, Snapshot, TopicMeta};
use narad_shards::peer::LocalBoxFuture;
use narad_shards::rt;
use narad_shards::wire::status;

pub use applier::{Applier, Install, Stopped};
pub use apply::{apply, Applied, Outcome, Refusal};
pub use command::{Command, Owners, Registration};
pub use controller::Controller;
pub use membership::{
    answer_unconfigured, probe, start, unequal, Answer, Join, Membership, Resolve, Settings, Start, Unequal,
    PROBE_ROUNDS,
};
pub use names::check_topic_name;
pub use peers::{find_server, peer_book, Met};
pub use placement::Placement;
pub use rows::BadCommand;
pub use servers::{Consensus, Server, View};
pub use state::{Assignment, Change, Member, State};
pub use store::{Batch, CopyImage, Storage, Store, FORMAT};
pub use watch::{ConsensusWatch, MetastoreWatch};
pub use wire::{answer_status, ask_status, read_join};

/// Lets go of the space kept back beside the metadata in `directory`: nothing will be changed there any more.
pub fn give_ballast(directory: &std::path::Path) {
    ballast::Ballast::beside(directory).give();
}

/// Decides the order of commands and brings them to the applier. Raft does, and in tests whoever wants to.
pub trait Log {
    /// Resolves once the command is decided, applied here and visible on every shard.
    fn propose(&self, command: Command) -> LocalBoxFuture<'static, Result<Outcome, Stopped>>;
    /// Resolves once everything that was decided before the call is applied here: what is read from the snapshot
    /// afterwards is the leader's word.
    fn barrier(&self) -> LocalBoxFuture<'static, Result<(), Stopped>>;
    /// The live topic of that name by the leader's own state, read behind its barrier (K20). `None`: there is none, for
    /// certain; whatever is less than certain is an `Err`.
    fn live_topic(&self, name: &str) -> LocalBoxFuture<'static, Result<Option<Incarnation>, Stopped>>;
}

/// Metadata as opened at start, before any thread runs: what [`Applier::start`] takes over.
pub struct Metastore<S> {
    pub store: S,
    pub state: State,
    pub placement: Placement,
    pub watch: Arc<MetastoreWatch>,
}

impl<S: Storage> Metastore<S> {
    pub fn new(store: S, state: State, shards: ShardId) -> Metastore<S> {
        Metastore::over(store, state, Placement::new(shards))
    }

    /// The same under another placement: [`Placement::in_cluster`].
    pub fn over(store: S, state: State, mut placement: Placement) -> Metastore<S> {
        placement.follow(&state);
        Metastore { store, state, placement, watch: Arc::default() }
    }

    /// The snapshot that every shard starts with.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        Arc::new(self.placement.snapshot(&self.state))
    }
}

/// What shards talk to. Lives on the control thread; cheap to share there by `Rc`.
pub struct Control {
    log: Rc<dyn Log>,
    applier: Rc<Applier>,
    /// Of a node in a cluster.
    controller: Option<Rc<Controller>>,
    membership: Option<Rc<Membership>>,
    /// Id and API address of this node.
    me: (String, String),
    own_status: Option<OwnStatus>,
}

/// What this node says of itself.
pub type OwnStatus = Rc<dyn Fn() -> LocalBoxFuture<'static, NodeStatus>>;

impl Control {
    /// Over a log that brings what it decides to `applier`.
    pub fn over(log: Rc<dyn Log>, applier: Rc<Applier>) -> Control {
        Control { log, applier, controller: None, membership: None, me: Default::default(), own_status: None }
    }

    /// The same in a cluster: new partitions wait a moment for one that is forming.
    pub fn with_controller(self, controller: Rc<Controller>) -> Control {
        Control { controller: Some(controller), ..self }
    }

    /// The same with somebody to ask who belongs to the cluster.
    pub fn with_membership(self, membership: Rc<Membership>) -> Control {
        Control { membership: Some(membership), ..self }
    }

    /// The same under a name: what a node without peers lists as its only member.
    pub fn named(self, node: &str, address: String) -> Control {
        Control { me: (node.to_owned(), address), ..self }
    }

    /// The same with a word to say about itself.
    pub fn with_status(self, own_status: OwnStatus) -> Control {
        Control { own_status: Some(own_status), ..self }
    }

    async fn wait_formed(&self) {
        if let Some(controller) = &self.controller {
            controller.wait_formed().await;
        }
    }

    /// The snapshot that every shard has, or is about to get. Only durable changes are in it.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.applier.snapshot()
    }

    /// Resolves when metadata can no longer be stored (K17): the node logs the reason and exits non-zero.
    pub async fn stopped(&self) -> Stopped {
        self.applier.wait_stopped().await
    }

    /// Answers a shard. A change is answered after every shard has installed the snapshot that holds it (E23).
    pub async fn handle(&self, command: MetaCommand) -> MetaReply {
        let reply = match command {
            MetaCommand::CreateTopic(topic) => self.create(topic).await,
            MetaCommand::DeleteTopic { name, incarnation } => self.delete(name, incarnation).await,
            MetaCommand::AlterTopic { name, incarnation, change } => self.alter(name, incarnation, change).await,
            MetaCommand::ConfirmGone { name, incarnation } => self.confirm_gone(&name, incarnation).await,
            MetaCommand::ListMembers { detail } => Ok(MetaReply::Members(self.members(detail).await)),
            MetaCommand::ForgetServer { node } => Ok(self.forget(&node).await),
        };
        reply.unwrap_or_else(|stopped| match stopped.underway {
            true => MetaReply::Unknown(stopped.why),
            false => MetaReply::Unavailable(stopped.why),
        })
    }

    async fn create(&self, topic: NewTopic) -> Result<MetaReply, Stopped> {
        self.wait_formed().await;
        loop {
            let proposed = Arc::new(TopicMeta {
                name: Arc::from(topic.name.as_str()),
                incarnation: Incarnation(rt::random_u64()),
                partitions: topic.partitions,
                retention_ms: topic.retention_ms,
                visibility_timeout_ms: topic.visibility_timeout_ms,
                max_in_flight_per_partition: topic.max_in_flight_per_partition,
                max_acked_ahead_per_partition: topic.max_acked_ahead_per_partition,
                created_at_ms: rt::wall_clock_ms(),
                owner: topic.owner.as_deref().map(Arc::from),
            });
            match self.change(Command::CreateTopic { topic: proposed, owners: Owners::default() }).await? {
                Outcome::Refused(Refusal::IdTaken) => {} // draw again
                outcome => return Ok(reply_to(outcome)),
            }
        }
    }

    async fn delete(&self, name: String, incarnation: Incarnation) -> Result<MetaReply, Stopped> {
        Ok(reply_to(self.change(Command::DeleteTopic { name: Arc::from(name), incarnation }).await?))
    }

    async fn alter(&self, name: String, incarnation: Incarnation, change: TopicChange) -> Result<MetaReply, Stopped> {
        if change.partitions.is_some() {
            self.wait_formed().await;
        }
        let command = Command::AlterTopic { name: Arc::from(name), incarnation, change, owners: Owners::default() };
        Ok(reply_to(self.change(command).await?))
    }

    /// Also waits for the other nodes, if they are quick: a refusal too may rest on what they do not show yet.
    async fn change(&self, command: Command) -> Result<Outcome, Stopped> {
        let outcome = self.log.propose(command).await?;
        if let Some(membership) = &self.membership {
            let index = self.applier.applied_index();
            membership.wait_shown_elsewhere(index).await;
        }
        Ok(outcome)
    }

    async fn members(&self, detail: bool) -> Vec<MemberStatus> {
        let mut members = {
            let state = self.applier.state();
            match &self.controller {
                Some(controller) => members::members(&state, &controller.view(), rt::wall_clock_ms()),
                None => vec![members::alone(&self.me.0, &self.me.1, &state)],
            }
        };
        if detail {
            let asked = members.iter().map(|member| Box::pin(self.status_of(&member.id))).collect();
            let answers = rt::all(asked).await;
            members.iter_mut().zip(answers).for_each(|(member, answer)| member.node_status = Some(answer));
        }
        members
    }

    async fn status_of(&self, node: &str) -> Result<NodeStatus, String> {
        match (&self.own_status, &self.membership) {
            (Some(own), _) if node == self.me.0 => Ok(own().await),
            (_, Some(membership)) if node != self.me.0 => membership.ask_status(node).await,
            _ => Err("nobody here can say".to_owned()),
        }
    }

    async fn forget(&self, node: &str) -> MetaReply {
        let refused = |status, why: String| MetaReply::Refused { status, why };
        let Some(membership) = &self.membership else {
            return match node == self.me.0 {
                true => refused(status::BAD_REQUEST, format!("{node:?} leads: it cannot forget itself")),
                false => refused(status::NOT_FOUND, format!("there is no server {node:?} in consensus")),
            };
        };
        let answer = membership.forget_by_leader(node).await;
        match answer.status {
            status::OK => MetaReply::Forgotten { voter: answer.word == "voter" },
            status::UNAVAILABLE if answer.word == "unknown" => MetaReply::Unknown(answer.reason),
            // The leader has changed while it was asked.
            status::UNAVAILABLE | status::MISDIRECTED => MetaReply::Unavailable(answer.reason),
            status => refused(status, answer.reason),
        }
    }

    /// On this answer records are discarded and directories removed. It takes a replica that is current and does not
    /// have the topic, and the leader's own word that it does not either (K21): a state file that came back from the
    /// past, or that went another way than the others, destroys nothing.
    async fn confirm_gone(&self, name: &str, incarnation: Option<Incarnation>) -> Result<MetaReply, Stopped> {
        let is_gone = |live: Option<Incarnation>| match (live, incarnation) {
            (None, _) => true,
            (Some(live), Some(asked)) => live != asked,
            (Some(_), None) => false,
        };
        self.log.barrier().await?;
        // What is stored, never a change that is still on its way to the disk.
        let here = self.snapshot().topic(name).map(|topic| topic.incarnation);
        let gone = is_gone(here) && is_gone(self.log.live_topic(name).await?);
        Ok(if gone { MetaReply::Gone } else { MetaReply::NotGone })
    }
}

fn reply_to(outcome: Outcome) -> MetaReply {
    match outcome {
        Outcome::Created(topic) => MetaReply::Created(topic),
        Outcome::Deleted(_) => MetaReply::Deleted,
        Outcome::Altered(topic) => MetaReply::Altered(topic),
        Outcome::Refused(Refusal::Exists) => MetaReply::Exists,
        Outcome::Refused(Refusal::CaseCollision { existing }) => {
            MetaReply::CaseCollision { existing: existing.to_string() }
        }
        Outcome::Refused(Refusal::NotFound) => MetaReply::NotFound,
        Outcome::Refused(Refusal::Changed) => MetaReply::Changed,
        Outcome::Refused(Refusal::NotMore { partitions }) => MetaReply::NotMore { partitions },
        // The HTTP layer has checked; this is the second lock on the door (lesson N75.3).
        Outcome::Refused(Refusal::Invalid(why)) => MetaReply::Unavailable(format!("refused: {why}")),
        Outcome::Refused(Refusal::IdTaken) => MetaReply::Unavailable("the drawn topic id is in use, retry".to_owned()),
        other => MetaReply::Unavailable(format!("the metadata answered a topic change with {other:?}")),
    }
}
