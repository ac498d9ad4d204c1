//! Consensus: the order of commands in a cluster, by the `raft` library (E38), as the [`Log`] of the control plane. A
//! lone node runs the same with one voter, which elects itself at once.
//!
//! ```text
//! propose, barrier ──> requests ─┐                       ┌─> disk (consensus.redb), then messages
//! frames of peers  ──> requests ─┼─> driver ── Core ─────┼─> applier (state.redb), in log order
//! ticks            ──────────────┘   settle.rs: the rule └─> answers
//! ```
//!
//! [`core`], [`mirror`], [`configuration`] and [`restart`] are pure; [`settle`] is the safety rule; [`driver`] is the
//! one task that owns the core; [`forward`] is how a node that does not lead has things done (E47).

mod codec;
pub mod configuration;
mod core;
pub mod disk;
mod driver;
pub mod files;
mod forward;
pub mod heard;
mod logger;
mod mirror;
pub mod restart;
mod settle;
mod snapshot;
mod view;

#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;
use std::time::Duration;

use narad_shards::remote::Transport;
use narad_shards::rt::sync::{oneshot, Notify, Receiver, Sender};
use narad_shards::rt::{self, Instant, Queue};
use narad_shards::wire::{operation, status, Incoming, Outgoing};
use raft::eraftpb::Message;
use raft::StateRole;

use super::{Applier, Command, ConsensusWatch, Stopped};
#[cfg(test)]
pub use codec::topic_frame as topic_question;
use codec::ProposalId;
use configuration::{Change, Configuration};
use disk::{Disk, Stored};
use driver::{Request, Verdict};
use heard::{HeardFrom, Word};

/// A leader counts as in view for so long after it was last heard (K34).
pub const CONTACT_FRESH: Duration = Duration::from_secs(5);
/// For a proposal to be decided, a barrier to be passed, a forwarded change to arrive here (E47, E52).
pub const DEADLINE: Duration = Duration::from_secs(5);
/// A leader's heartbeats to a server count as failing after so long without a word from it.
const HEARTBEAT_FAILED: Duration = Duration::from_secs(1);
/// A hand-over is over within an election timeout, one way or the other.
const TRANSFER_WAIT: Duration = Duration::from_millis(1500);

/// Longest `host:port` of a peer that is kept.
const ADDRESS_BYTES_MAX: usize = 261;

/// What consensus knows of where a server is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Known<'a> {
    /// Name and `host:port` by the configuration.
    pub node: Option<&'a str>,
    pub recorded: Option<&'a str>,
    /// `host:port` that it advertised on the connection it was heard on last, behind the proof of the secret.
    pub heard: Option<&'a str>,
}

/// Where the server of a raft id is to be dialled.
pub type AddressOf = Rc<dyn Fn(u64, Known) -> Option<SocketAddr>>;

/// The leader's last word on a command before it enters the log: stamps what its clock decides (K4), holds back what
/// not every server applies (K18). `Err` says why it is not proposed.
pub type Prepare = Rc<dyn Fn(Command) -> Result<Command, String>>;

#[derive(Clone)]
pub struct Settings {
    /// `host:port` that peers reach this node's control endpoint at.
    pub address: String,
    pub address_of: AddressOf,
    /// Entries applied since the last snapshot that make another one due.
    pub snapshot_entries: u64,
    /// Entries kept behind a snapshot.
    pub trailing_entries: u64,
    /// Whether one is due is looked at after this time, or up to twice that.
    pub snapshot_check: Duration,
    /// Of a snapshot in one frame: at most half of what a frame may be (K39).
    pub piece_bytes: usize,
    /// Sends snapshots on connections of their own (E54): heartbeats never queue behind one. `None`: on the common ones.
    pub bulk: Option<Rc<dyn Transport>>,
}

impl Settings {
    pub fn new(address: String) -> Settings {
        Settings {
            address,
            address_of: Rc::new(|_, known| known.heard.or(known.recorded)?.parse().ok()),
            snapshot_entries: 8192,
            trailing_entries: 10_240,
            snapshot_check: Duration::from_secs(120),
            piece_bytes: 4 << 20,
            bulk: None,
        }
    }
}

/// What this node knows of the cluster's consensus at one instant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    pub raft_id: u64,
    pub term: u64,
    /// 0: none is known.
    pub leader: u64,
    pub leads: bool,
    /// A leader that has committed an entry of its term.
    pub is_established: bool,
    pub candidate: bool,
    pub last_index: u64,
    pub commit_index: u64,
    pub applied_index: u64,
    pub configuration: Configuration,
    /// Of a leader: id, heard of within the last election timeout, and up to where each other server has the log.
    pub followers: Vec<(u64, bool, u64)>,
    /// Since when this node leads, or has not led.
    pub since: Instant,
}

/// Takes part in consensus. Lives on the control thread.
pub struct Consensus {
    settings: Settings,
    applier: Rc<Applier>,
    transport: Rc<dyn Transport>,
    disk: Rc<dyn Disk>,
    requests: RefCell<Vec<Request>>,
    wake: Notify,
    status: RefCell<Status>,
    /// Leader, term or role have changed.
    changed: Notify,
    /// When a leader of the current term was last heard.
    contact: Cell<Option<Instant>>,
    /// Highest commit index that a leader has told this process (3.1).
    leader_commit: Cell<Option<u64>>,
    heard_from: RefCell<HeardFrom>,
    has_caught_up: Cell<bool>,
    /// The create gate is shut (K35).
    holds_creates: Cell<bool>,
    prepare: RefCell<Prepare>,
    waiters: RefCell<BTreeMap<ProposalId, Waiter>>,
    /// Images put in the place of the state: what they hold did not come in the log.
    installs: Cell<u64>,
    process: u64,
    proposals: Cell<u64>,
    receiving: snapshot::Receiving,
    stopped: RefCell<Option<Stopped>>,
    watch: Arc<ConsensusWatch>,
}

struct Waiter {
    answer: Sender<Verdict>,
    /// Ends with this node's leadership.
    of_leader: bool,
}

impl Consensus {
    /// Starts the driver on the runtime of the calling thread. `stored` and the applier's index fit each other: the
    /// restart decision has seen to it ([`files::open`]).
    pub fn start(
        settings: Settings,
        stored: Stored,
        disk: Rc<dyn Disk>,
        applier: Rc<Applier>,
        transport: Rc<dyn Transport>,
        watch: Arc<ConsensusWatch>,
    ) -> Result<Rc<Consensus>, String> {
        let core = core::Core::new(stored, applier.applied_index())?;
        let consensus = Rc::new(Consensus {
            settings,
            applier,
            transport,
            disk,
            requests: RefCell::default(),
            wake: Notify::new(),
            status: RefCell::default(),
            changed: Notify::new(),
            contact: Cell::new(None),
            leader_commit: Cell::new(None),
            heard_from: RefCell::default(),
            has_caught_up: Cell::new(false),
            holds_creates: Cell::new(false),
            prepare: RefCell::new(Rc::new(Ok)),
            waiters: RefCell::default(),
            installs: Cell::new(0),
            process: rt::random_u64(),
            proposals: Cell::new(0),
            receiving: snapshot::Receiving::default(),
            stopped: RefCell::default(),
            watch,
        });
        consensus.watch.heard(rt::now());
        consensus.publish(&core);
        rt::spawn(Queue::Foreground, driver::run(consensus.clone(), core));
        rt::spawn(Queue::Foreground, forward::keep_own_address(consensus.clone()));
        Ok(consensus)
    }

    /// From now on every command that this node proposes as the leader, its own or a forwarded one, goes through
    /// `prepare` first.
    pub fn prepare_with(&self, prepare: Prepare) {
        *self.prepare.borrow_mut() = prepare;
    }

    /// From now on a new topic waits, whoever asks for it, until this node has started (K35).
    pub fn shut_create_gate(&self) {
        self.holds_creates.set(true);
    }

    pub fn open_create_gate(&self) {
        if self.holds_creates.replace(false) {
            self.changed.notify_all();
        }
    }

    pub fn status(&self) -> Status {
        self.status.borrow().clone()
    }

    pub fn leads(&self) -> bool {
        self.status.borrow().leads
    }

    /// Resolves at the next change of leader, term or role.
    pub fn changed(&self) -> impl std::future::Future<Output = ()> + 'static {
        self.changed.notified()
    }

    /// Resolves when this node can take part no longer (K17); the applier has stopped as well.
    pub fn stopped(&self) -> Option<Stopped> {
        self.stopped.borrow().clone()
    }

    /// Id, recorded address and reachable address of the leader, as far as they are known: what a hint says.
    pub fn leader(&self) -> Option<(u64, Option<SocketAddr>)> {
        let status = self.status.borrow();
        let leader = Some(status.leader).filter(|leader| *leader != 0)?;
        Some((leader, self.address_of(leader, &status.configuration)))
    }

    /// When a leader was last heard; `None` before the first time.
    pub fn last_contact(&self) -> Option<Instant> {
        self.contact.get()
    }

    /// A leader is in view: this node, or one that was heard within [`CONTACT_FRESH`] (K34).
    pub fn sees_leader(&self) -> bool {
        let status = self.status.borrow();
        let is_fresh = |at: Instant| rt::now() - at <= CONTACT_FRESH;
        status.leads || (status.leader != 0 && self.contact.get().is_some_and(is_fresh))
    }

    /// Whether the state here is the cluster's, by what a leader has said to this process and never by local indexes
    /// alone (3.1, K19).
    pub fn caught_up(&self) -> bool {
        let status = self.status.borrow();
        if self.stopped.borrow().is_some() {
            return false;
        }
        let applied = self.applier.applied_index();
        match status.leads {
            true => status.is_established && applied >= status.commit_index,
            false => {
                drop(status);
                self.sees_leader() && self.leader_commit.get().is_some_and(|commit| applied >= commit)
            }
        }
    }

    /// Servers that have not answered this leader's heartbeats lately; empty where this node does not lead.
    pub fn failing(&self) -> BTreeSet<u64> {
        let heard = self.heard_from.borrow();
        self.others_of_leader(|id, since| heard.unanswered_for(id, since, rt::now()) > HEARTBEAT_FAILED)
    }

    /// Servers of whom this leader has heard nothing for so long that they are gone; empty where this node does not lead.
    pub fn gone(&self) -> BTreeSet<u64> {
        let heard = self.heard_from.borrow();
        self.others_of_leader(|id, since| heard.silent_for(id, since, rt::now()) > heard::SILENCE)
    }

    fn others_of_leader(&self, fits: impl Fn(u64, Instant) -> bool) -> BTreeSet<u64> {
        let status = self.status.borrow();
        if !status.leads {
            return BTreeSet::new();
        }
        let ids = status.configuration.servers.keys().copied();
        ids.filter(|id| *id != status.raft_id && fits(*id, status.since)).collect()
    }

    /// Where each server says that it is.
    pub fn addresses(&self) -> BTreeMap<u64, Arc<str>> {
        self.heard_from.borrow().addresses()
    }

    /// Where the server of a raft id is to be dialled, as far as that is known.
    pub fn address(&self, raft_id: u64) -> Option<SocketAddr> {
        self.address_of(raft_id, &self.status.borrow().configuration)
    }

    /// The ownership latch (K22): resolves once this node was caught up once and has passed a barrier; set for the life
    /// of the process, and told to the shards.
    pub async fn latch(&self) -> Result<(), Stopped> {
        while !self.has_caught_up.get() {
            // The barrier also tells a node that was not behind when it started, to whom the leader has nothing to say.
            if self.sees_leader() && self.pass_barrier().await.is_ok() && self.caught_up() {
                self.has_caught_up.set(true);
                self.applier.trust_ownership();
                break;
            }
            if let Some(stopped) = self.stopped() {
                return Err(stopped);
            }
            let _ = rt::timeout(Duration::from_millis(20), self.changed.notified()).await;
            // or time has passed
        }
        Ok(())
    }

    pub fn is_latched(&self) -> bool {
        self.has_caught_up.get()
    }

    /// Hands leadership over to the server that is furthest. `Ok` when this node leads no longer.
    pub async fn transfer(&self) -> Result<(), String> {
        if !self.leads() {
            return Ok(());
        }
        self.request(Request::Transfer);
        let until = rt::now() + TRANSFER_WAIT;
        while self.leads() {
            let changed = self.changed.notified();
            if rt::timeout(until - rt::now(), changed).await.is_err() {
                return Err("no other voter has taken over the leadership in time".to_owned());
            }
        }
        Ok(())
    }

    /// Adds a server that replicates and has no vote (K32), or changes a learner's recorded address.
    pub async fn add_learner(&self, raft_id: u64, name: &str, address: &str) -> Result<(), Stopped> {
        self.change(Change::AddLearner { raft_id, server: server(name, address) }).await
    }

    /// Makes a learner a voter, or changes a voter's recorded address.
    pub async fn promote(&self, raft_id: u64, name: &str, address: &str) -> Result<(), Stopped> {
        self.change(Change::Promote { raft_id, server: server(name, address) }).await
    }

    /// Removes a server. The leader never removes itself: it hands over first (K63).
    pub async fn remove(&self, raft_id: u64) -> Result<(), Stopped> {
        if raft_id == self.status.borrow().raft_id {
            return Err(Stopped::refused("the leader cannot remove itself: transfer the leadership first".to_owned()));
        }
        self.change(Change::Remove { raft_id }).await
    }

    /// Answers a frame of a peer's control endpoint. `None`: there is nothing to answer.
    pub async fn handle(self: &Rc<Consensus>, incoming: &Incoming) -> Option<Outgoing> {
        if incoming.header.version != codec::VERSION {
            return Some(codec::refusal(incoming, status::BAD_REQUEST, "unsupported version of a consensus operation"));
        }
        match incoming.header.operation {
            operation::CONSENSUS => {
                self.take_message(incoming);
                None
            }
            operation::SNAPSHOT => Some(self.receiving.take(self, incoming).await),
            operation::PROPOSE => Some(self.take_proposal(incoming).await),
            operation::APPLIED_INDEX => Some(self.take_read(incoming).await),
            operation::GET_TOPIC => Some(self.take_topic_question(incoming).await),
            other => {
                Some(codec::refusal(incoming, status::BAD_REQUEST, &format!("operation {other} is none of consensus")))
            }
        }
    }

    fn take_message(&self, incoming: &Incoming) {
        let message = match codec::decode_message(&incoming.payload()) {
            Ok(message) if codec::is_between_peers(&message) => message,
            Ok(_) => return,
            Err(error) => {
                tracing::warn!(error, "consensus: a peer's message does not decode; dropped");
                return;
            }
        };
        let address = std::str::from_utf8(incoming.archive()).ok();
        self.note_sender(&message, address.filter(|text| text.len() <= ADDRESS_BYTES_MAX).unwrap_or_default());
        self.heard(&message);
        self.request(Request::Step(message));
    }

    fn note_sender(&self, message: &Message, address: &str) {
        let word = match (codec::is_from_leader(message), codec::is_answer(message)) {
            (true, _) if message.term >= self.status.borrow().term => Word::Certain,
            (_, true) => Word::Answers,
            _ => Word::Other,
        };
        self.note_address(message.from, address, word);
    }

    fn note_address(&self, raft_id: u64, address: &str, word: Word) {
        let status = self.status.borrow();
        if raft_id == status.raft_id {
            return; // a copy of this directory
        }
        let is_server = |id: u64| status.configuration.servers.contains_key(&id);
        if let Some(former) = self.heard_from.borrow_mut().note(raft_id, address, word, rt::now(), is_server) {
            tracing::info!(raft_id, former = &*former, address, "consensus: a server is at another address now");
        }
    }

    /// Takes note of a leader's word when it arrives, not when the driver gets to it.
    fn heard(&self, message: &Message) {
        if !codec::is_from_leader(message) || message.term < self.status.borrow().term {
            return;
        }
        self.contact.set(Some(rt::now()));
        self.watch.heard(rt::now());
        if let Some(commit) = codec::leader_commit(message) {
            self.heard_commit(commit);
        }
    }

    fn heard_commit(&self, commit: u64) {
        let highest = self.leader_commit.get().map_or(commit, |known| known.max(commit));
        self.leader_commit.set(Some(highest));
        self.watch.leader_commit_index.store(highest, Relaxed);
    }

    fn address_of(&self, raft_id: u64, configuration: &Configuration) -> Option<SocketAddr> {
        let server = configuration.servers.get(&raft_id);
        let heard = self.heard_from.borrow().address(raft_id).cloned();
        let known = Known {
            node: server.map(|server| server.name.as_str()),
            recorded: server.map(|server| server.address.as_str()),
            heard: heard.as_deref(),
        };
        (self.settings.address_of)(raft_id, known)
    }

    fn request(&self, request: Request) {
        if self.stopped.borrow().is_none() {
            self.requests.borrow_mut().push(request);
            self.wake.notify_one();
        }
    }

    fn image_check_wait(&self) -> Duration {
        self.settings.snapshot_check + self.settings.snapshot_check.mul_f64(rt::random_u64() as f64 / u64::MAX as f64)
    }

    fn publish(&self, core: &core::Core) {
        let mut status = self.status.borrow_mut();
        let (term, leader, leads) = (core.term(), core.leader(), core.leads());
        let established = core.is_established();
        let has_changed =
            (status.term, status.leader, status.leads, status.is_established) != (term, leader, leads, established);
        let since = if status.leads == leads && status.raft_id != 0 { status.since } else { rt::now() };
        if status.configuration.index != core.configuration().index || status.raft_id == 0 {
            status.configuration = core.configuration().clone();
        }
        status.raft_id = core.raft_id();
        (status.term, status.leader, status.leads, status.is_established) = (term, leader, leads, established);
        status.candidate = matches!(core.role(), StateRole::Candidate | StateRole::PreCandidate);
        (status.last_index, status.commit_index) = (core.last(), core.committed());
        status.applied_index = self.applier.applied_index();
        status.followers = if leads { core.followers() } else { Vec::new() };
        status.since = since;
        self.watch.tell(&status);
        drop(status);
        if has_changed {
            self.changed.notify_all();
        }
    }

    fn stop(&self, stopped: Stopped) {
        tracing::error!(why = stopped.why, "consensus: this node takes part no longer");
        *self.stopped.borrow_mut() = Some(stopped);
        {
            let mut status = self.status.borrow_mut();
            (status.leads, status.is_established, status.candidate, status.leader) = (false, false, false, 0);
            self.watch.tell(&status);
            self.watch.state.store(3, Relaxed);
        }
        self.requests.borrow_mut().clear();
        self.waiters.borrow_mut().clear();
        self.changed.notify_all();
    }

    fn wait_for(&self, id: ProposalId, of_leader: bool) -> Receiver<Verdict> {
        let (answer, receiver) = oneshot();
        self.waiters.borrow_mut().insert(id, Waiter { answer, of_leader });
        receiver
    }

    fn new_id(&self) -> ProposalId {
        self.proposals.set(self.proposals.get() + 1);
        ProposalId::new(self.process, self.proposals.get())
    }

    fn forget(&self, id: ProposalId) {
        self.waiters.borrow_mut().remove(&id);
    }

    fn decided(&self, id: ProposalId, verdict: Verdict) {
        if let Some(waiter) = self.waiters.borrow_mut().remove(&id) {
            let _ = waiter.answer.send(verdict); // it may have given up
        }
    }

    fn proposed(&self, id: ProposalId, is_proposed: bool) {
        if !is_proposed {
            self.decided(id, Verdict::NotProposed("this node does not take proposals now".to_owned()));
        }
    }

    fn lost_leadership(&self) {
        let waiters = std::mem::take(&mut *self.waiters.borrow_mut());
        let (ended, kept): (BTreeMap<_, _>, _) = waiters.into_iter().partition(|(_, waiter)| waiter.of_leader);
        *self.waiters.borrow_mut() = kept;
        for waiter in ended.into_values() {
            let why = "this node lost the leadership before the change was decided";
            let _ = waiter.answer.send(Verdict::Unknown(why.to_owned())); // it may have given up
        }
    }
}

fn server(name: &str, address: &str) -> configuration::Server {
    configuration::Server { name: name.to_owned(), address: address.to_owned(), voter: false }
}
