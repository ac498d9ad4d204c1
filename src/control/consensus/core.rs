//! The library's state machine and its log: no I/O, no clock, no randomness of its own.

use prost::Message as _;
use raft::eraftpb::{ConfChange, Entry, EntryType, Message, MessageType};
use raft::{RawNode, Ready, StateRole};

use super::configuration::{Change, Configuration};
use super::disk::{Changes, Position, Stored};
use super::logger;
use super::mirror::{Label, Mirror};
use crate::control::Stopped;

/// A leader sends heartbeats each tick; a follower that hears nothing for so many calls an election. Its ticks have a
/// length drawn by the driver, which is all the randomness there is (E46).
pub const ELECTION_TICKS: usize = 10;

/// Bytes of entries in one message. One entry may be longer.
const MESSAGE_BYTES: u64 = 1 << 20;
/// Proposals beyond this are refused until some are committed.
const UNCOMMITTED_BYTES: u64 = 64 << 20;
const APPENDS_IN_FLIGHT: usize = 64;

pub struct Core {
    node: RawNode<Mirror>,
}

impl Core {
    /// `applied`: what the state machine holds; within the log (the restart decision has seen to it).
    pub fn new(mut stored: Stored, applied: u64) -> Result<Core, String> {
        let id = stored.raft_id;
        // What the state machine holds was committed; the file may have missed the last word of that.
        stored.hard_state.commit = stored.hard_state.commit.max(applied);
        let config = raft::Config {
            id,
            election_tick: ELECTION_TICKS,
            min_election_tick: ELECTION_TICKS,
            max_election_tick: ELECTION_TICKS + 1,
            heartbeat_tick: 1,
            applied,
            max_size_per_msg: MESSAGE_BYTES,
            max_inflight_msgs: APPENDS_IN_FLIGHT,
            max_uncommitted_size: UNCOMMITTED_BYTES,
            check_quorum: true,
            pre_vote: true,
            ..raft::Config::default()
        };
        let node = RawNode::new(&config, Mirror::new(stored), &logger::logger());
        Ok(Core { node: node.map_err(|error| format!("the consensus log cannot be run: {error}"))? })
    }

    pub fn raft_id(&self) -> u64 {
        self.node.raft.id
    }

    pub fn term(&self) -> u64 {
        self.node.raft.term
    }

    pub fn role(&self) -> StateRole {
        self.node.raft.state
    }

    pub fn leads(&self) -> bool {
        self.role() == StateRole::Leader
    }

    /// 0: none is known.
    pub fn leader(&self) -> u64 {
        self.node.raft.leader_id
    }

    pub fn committed(&self) -> u64 {
        self.node.raft.raft_log.committed
    }

    pub fn last(&self) -> u64 {
        self.node.raft.raft_log.last_index()
    }

    pub fn log(&self) -> &Mirror {
        self.node.store()
    }

    pub fn configuration(&self) -> &Configuration {
        self.log().configuration()
    }

    /// This leader has committed an entry of its own term: its commit index is the cluster's (3.1).
    pub fn is_established(&self) -> bool {
        self.leads() && self.node.raft.commit_to_current_term()
    }

    /// Whether the time without a leader begins now: the driver draws the next ticks' length then.
    pub fn is_at_rest(&self) -> bool {
        self.node.raft.election_elapsed == 0
    }

    pub fn tick(&mut self) {
        self.node.tick();
    }

    pub fn campaign(&mut self) {
        let _ = self.node.campaign(); // not promotable: nothing happens
    }

    /// A peer's message. Proposals and read requests of peers have no business here (E47), nor has what was meant for
    /// a directory that this one has replaced.
    ///
    /// `Stopped`: this node has lost entries that it acknowledged. A heartbeat's commit index is cut to what the follower
    /// has acknowledged, so one beyond the log's end says that the log was longer; the library would panic on it.
    pub fn step(&mut self, message: Message) -> Result<(), Stopped> {
        if message.to != self.raft_id() {
            return Ok(());
        }
        let (last, lost) = (self.last(), message.commit);
        if message.msg_type == MessageType::MsgHeartbeat as i32 && message.term >= self.term() && lost > last {
            return Err(Stopped::refused(format!(
                "the leader knows that this node had the cluster's log up to entry {lost}, and it ends at entry {last}: \
                 the data directory is an older copy, or the drive has lost what it said was written; start this node \
                 once with --restored, then it joins as a new server"
            )));
        }
        if let Some(index) = self.contradicted(&message) {
            return Err(Stopped::refused(format!(
                "the cluster's log has another entry {index} than the one that this node holds as decided: one of them has \
                 forgotten what was decided (most nodes, or this one, were started on older copies of their data \
                 directories); to take the cluster's word, start this node once with --restored, then it joins as a new \
                 server and gives up what it alone knew of the metadata"
            )));
        }
        let _ = self.node.step(message); // refused messages are the library's business
        Ok(())
    }

    /// The first entry that is decided here, and another one where this message's leader has it. No leader of this term
    /// or a later one lacks what was ever decided; the library takes such a log for a slow one, and waits for ever.
    fn contradicted(&self, message: &Message) -> Option<u64> {
        if message.msg_type != MessageType::MsgAppend as i32 || message.term < self.term() {
            return None;
        }
        let told = message.entries.iter().map(|entry| (entry.index, entry.term));
        let mut told = std::iter::once((message.index, message.log_term)).chain(told);
        // As the library has it, with what this round of messages has brought; 0: it has no such entry.
        let own = |index| self.node.raft.raft_log.term(index).unwrap_or(0);
        let is_other = |index, term| ![0, term].contains(&own(index));
        told.find(|(index, term)| *index <= self.committed() && is_other(*index, *term)).map(|(index, _)| index)
    }

    /// `Ok`: in the log, at this position, on its way. `Err`: it is not and will not be.
    pub fn propose(&mut self, context: Vec<u8>, data: Vec<u8>) -> Result<Position, raft::Error> {
        if !self.leads() {
            return Err(raft::Error::ProposalDropped);
        }
        self.node.propose(context, data)?;
        Ok(Position { index: self.last(), term: self.term() })
    }

    /// As [`Core::propose`], for a change of servers. One at a time: the library would turn a second one into nothing.
    pub fn propose_change(&mut self, context: Vec<u8>, change: &Change) -> Result<Position, raft::Error> {
        if !self.leads() || self.node.raft.has_pending_conf() {
            return Err(raft::Error::ProposalDropped);
        }
        self.node.propose_conf_change(context, change.to_entry())?;
        Ok(Position { index: self.last(), term: self.term() })
    }

    /// Only on an established leader; the answer comes with a Ready, under the same context.
    pub fn read_index(&mut self, context: Vec<u8>) {
        debug_assert!(self.is_established());
        self.node.read_index(context);
    }

    pub fn transfer_to(&mut self, raft_id: u64) {
        self.node.transfer_leader(raft_id);
    }

    /// The voter that would have to catch up least, by what this leader has heard.
    pub fn best_successor(&self) -> Option<u64> {
        let (me, configuration) = (self.raft_id(), self.configuration());
        let voters = self.node.raft.prs().iter().filter(|(id, _)| **id != me && configuration.is_voter(**id));
        voters.filter(|(_, progress)| progress.recent_active).max_by_key(|(id, p)| (p.matched, **id)).map(|(id, _)| *id)
    }

    /// Of each other server: whether it was heard of in the current election timeout, and up to where it has the log.
    pub fn followers(&self) -> Vec<(u64, bool, u64)> {
        let me = self.raft_id();
        let mut followers: Vec<_> = self
            .node
            .raft
            .prs()
            .iter()
            .filter(|(id, _)| **id != me)
            .map(|(id, p)| (*id, p.recent_active, p.matched))
            .collect();
        followers.sort_unstable();
        followers
    }

    pub fn report_snapshot(&mut self, to: u64, sent: bool) {
        let status = if sent { raft::SnapshotStatus::Finish } else { raft::SnapshotStatus::Failure };
        self.node.report_snapshot(to, status);
    }

    pub fn has_ready(&self) -> bool {
        self.node.has_ready()
    }

    pub fn ready(&mut self) -> Ready {
        self.node.ready()
    }

    pub fn advance(&mut self, ready: Ready) -> raft::LightReady {
        self.node.advance_append(ready)
    }

    pub fn advance_apply(&mut self) {
        self.node.advance_apply();
    }

    /// What has to be durable before any message of this Ready may leave.
    pub fn changes(&self, ready: &Ready) -> Changes {
        let mut changes =
            Changes { entries: ready.entries().clone(), hard_state: ready.hs().cloned(), ..Changes::default() };
        let snapshot = ready.snapshot();
        if !snapshot.is_empty() {
            let metadata = snapshot.get_metadata();
            changes.clear = true;
            changes.start = Some(Position { index: metadata.index, term: metadata.term });
            // The sender wrote it; its conf state, which the library has taken over, is what counts.
            let mut configuration = serde_json::from_slice::<Configuration>(&snapshot.data).unwrap_or_default();
            configuration.index = metadata.index;
            changes.configuration = Some(configuration);
        }
        changes
    }

    /// Has become durable.
    pub fn stored(&mut self, changes: &Changes) {
        self.node.mut_store().follow(changes);
    }

    /// Applies a committed change of servers. `None`: it changes nothing, now or because a restart hands it out again.
    pub fn apply_change(&mut self, entry: &Entry) -> Option<Configuration> {
        if entry.index <= self.configuration().index {
            return None;
        }
        let change = match ConfChange::decode(entry.data.as_slice()) {
            Ok(change) => change,
            Err(error) => {
                tracing::error!(index = entry.index, %error, "consensus: a change of servers does not decode; skipped");
                return None;
            }
        };
        match self.node.apply_conf_change(&change) {
            Ok(conf_state) => {
                let mut configuration = self.configuration().clone();
                configuration.follow(entry.index, &change, &conf_state);
                Some(configuration)
            }
            Err(error) => {
                tracing::error!(index = entry.index, %error, "consensus: a change of servers is impossible; skipped");
                None
            }
        }
    }

    /// Another image can be sent. Returns what drops the entries that it makes dispensable, `trailing` of them kept for
    /// followers that lag a little.
    pub fn image_taken(&mut self, label: Label, trailing: u64) -> Changes {
        let upto = label.position.index.saturating_sub(trailing);
        self.node.mut_store().set_image(label);
        let log = self.log();
        let start = log.term_at(upto).filter(|_| upto > log.start().index).map(|term| Position { index: upto, term });
        Changes { start, ..Changes::default() }
    }
}

/// Whether the entry carries a change of servers.
pub fn changes_servers(entry: &Entry) -> bool {
    entry.entry_type != EntryType::EntryNormal as i32
}
