//! Who belongs to the cluster: heartbeats, the join loop of a node that no leader knows, and the leader's side of a
//! join. The decisions are pure (`admission`, `join`, `gate`); here are the clock and the frames.

mod admission;
pub mod gate;
mod join;
mod shown;
#[cfg(test)]
mod takeover_tests;
#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use narad_shards::api::NodeStatus;
use narad_shards::peer::LocalBoxFuture;
use narad_shards::remote::{CallError, Transport};
use narad_shards::rt::sync::Lock;
use narad_shards::rt::{self, Instant};
use narad_shards::wire::{operation, status, Incoming, Outgoing};

use super::{wire, Applier, Command, Consensus, Log, Outcome, Refusal, Registration, Server, View};
use admission::Step;
pub use admission::{Answer, Join};
pub use join::{start, unequal, Start, Unequal, PROBE_ROUNDS};
use join::{Attempt, JoinTargets, Next};

const HEARTBEAT: Duration = Duration::from_secs(5);
/// Between two tries until the first success.
const FIRST_RETRY: Duration = Duration::from_millis(250);
/// A heartbeat that is not decided by then is tried again.
const HEARTBEAT_BUDGET: Duration = Duration::from_secs(5);
const JOIN_SWEEP: Duration = Duration::from_secs(2);
/// Without a leader that long, a node asks to be let in (5.4).
const LEADERLESS: Duration = Duration::from_secs(15);
const JOIN_BUDGET: Duration = Duration::from_secs(2);
/// Heartbeats that fail are said after so many, over so long.
const FAILURES_SAID: u32 = 3;
const FAILING_SAID: Duration = Duration::from_secs(10);
const FORGET_BUDGET: Duration = Duration::from_secs(5);
const STATUS_BUDGET: Duration = Duration::from_secs(2);
/// The same trouble is logged that often at most.
const SAY_AGAIN: Duration = Duration::from_secs(60);

/// Finds the address of a `host:port`; names may have to be looked up.
pub type Resolve = Rc<dyn Fn(&str) -> LocalBoxFuture<'static, Option<SocketAddr>>>;

/// How this node takes part.
pub struct Settings {
    pub me: Arc<Registration>,
    /// `host:port` of the configured peers, without this node. Empty: a lone node, which never asks anybody.
    pub peers: Vec<String>,
    /// No store id existed at start (E50).
    pub empty_directory: bool,
    pub resolve: Resolve,
}

pub struct Membership {
    settings: Settings,
    log: Rc<dyn Log>,
    applier: Rc<Applier>,
    consensus: Rc<dyn Consensus>,
    transport: Rc<dyn Transport>,
    targets: RefCell<JoinTargets>,
    registered: Cell<bool>,
    /// One change of servers at a time.
    changing: Lock,
    /// What was logged within [`SAY_AGAIN`].
    said: RefCell<BTreeMap<String, Instant>>,
    /// Since when heartbeats fail, and how many have.
    failing: Cell<Option<(Instant, u32)>>,
    /// When a heartbeat last succeeded, ms since the epoch; 0 before the first.
    success_ms: Cell<u64>,
    /// Why this node has not got its vote, as the leader said last.
    deferred: RefCell<String>,
    /// What came of asking to be let in, as long as nothing good has.
    outside: RefCell<Option<String>>,
    /// The heartbeat of each member that was seen last.
    stamps: RefCell<BTreeMap<Arc<str>, u64>>,
}

impl Membership {
    pub fn new(
        settings: Settings,
        log: Rc<dyn Log>,
        applier: Rc<Applier>,
        consensus: Rc<dyn Consensus>,
        transport: Rc<dyn Transport>,
    ) -> Rc<Membership> {
        let targets = RefCell::new(JoinTargets::new(settings.peers.clone()));
        Rc::new(Membership {
            settings,
            log,
            applier,
            consensus,
            transport,
            targets,
            registered: Cell::new(false),
            changing: Lock::default(),
            said: RefCell::default(),
            failing: Cell::new(None),
            success_ms: Cell::new(0),
            deferred: RefCell::default(),
            outside: RefCell::default(),
            stamps: RefCell::default(),
        })
    }

    /// Tells the leader every 5 s that this node lives, as long as metadata can be stored. A lone node whose record
    /// says what it would say again has nobody to tell.
    pub async fn run_heartbeats(self: Rc<Membership>) {
        while self.applier.stopped().is_none() {
            if !self.is_told_alone() && !self.heartbeat().await {
                rt::sleep(if self.registered.get() { JOIN_SWEEP } else { FIRST_RETRY }).await;
                continue;
            }
            rt::sleep(HEARTBEAT).await;
        }
    }

    fn is_told_alone(&self) -> bool {
        let view = self.consensus.view();
        let state = self.applier.state();
        let member = state.members().get(&self.settings.me.node);
        view.leads && view.servers.len() == 1 && member.is_some_and(|m| m.alive && m.registration == self.settings.me)
    }

    async fn heartbeat(&self) -> bool {
        let command = Command::RegisterMember { registration: self.settings.me.clone(), stamp_ms: 0 };
        let error = match rt::timeout(HEARTBEAT_BUDGET, self.log.propose(command)).await {
            Ok(Ok(Outcome::Registered(_))) => {
                self.registered.set(true);
                self.heartbeat_went_well();
                return true;
            }
            Ok(Ok(Outcome::Refused(Refusal::Tombstoned))) => {
                if self.may_say("heartbeat refused") {
                    tracing::error!("member heartbeat refused: this node was removed from the cluster; scale it away, or empty its data directory to let it in as a new node");
                }
                return true; // the cluster's answer, not a failure
            }
            Ok(Ok(other)) => format!("{other:?}"),
            Ok(Err(stopped)) => stopped.why,
            Err(_) => "the leader did not decide it in time".to_owned(),
        };
        self.heartbeat_failed(&error);
        false
    }

    fn heartbeat_failed(&self, error: &str) {
        let now = rt::now();
        let (since, failures) = self.failing.get().unwrap_or((now, 0));
        self.failing.set(Some((since, failures + 1)));
        let failing_for = now.saturating_since(since);
        if failures + 1 >= FAILURES_SAID && failing_for >= FAILING_SAID && self.may_say("heartbeat failing") {
            let member = &*self.settings.me.node;
            tracing::warn!(member, failures = failures + 1, ?failing_for, err = error, "member heartbeat failing");
        }
    }

    /// Heartbeats that failed in a row, and when one last succeeded, ms since the epoch (0: never).
    pub fn heartbeats(&self) -> (u64, u64) {
        (self.failing.get().map_or(0, |(_, failures)| failures.into()), self.success_ms.get())
    }

    fn heartbeat_went_well(&self) {
        self.success_ms.set(rt::wall_clock_ms());
        let Some((since, failures)) = self.failing.take() else { return };
        let failing_for = rt::now().saturating_since(since);
        if failures >= FAILURES_SAID && failing_for >= FAILING_SAID {
            tracing::info!(member = &*self.settings.me.node, failures, ?failing_for, "member heartbeat recovered");
        }
    }

    /// Whether `what` is to be logged: at most once a minute.
    fn may_say(&self, what: &str) -> bool {
        let now = rt::now();
        let mut said = self.said.borrow_mut();
        said.retain(|_, at| now.saturating_since(*at) < SAY_AGAIN);
        let is_new = !said.contains_key(what);
        if is_new {
            said.insert(what.to_owned(), now);
        }
        is_new
    }

    /// Asks to be let in whenever this node has no configuration, has seen no leader for 15 s, is recorded at another
    /// address than its own, or is a learner whose replica `caught_up` says is current: admission is proven by its own consensus alone (K30).
    pub async fn run_join(self: Rc<Membership>, caught_up: impl Fn() -> bool + 'static) {
        self.compare_recorded_address();
        if self.settings.peers.is_empty() {
            return;
        }
        let mut last_leader = rt::now();
        let mut warned = false;
        while self.applier.stopped().is_none() {
            let view = self.consensus.view();
            let now = rt::now();
            self.note_heartbeats(view.leader.is_some());
            if view.leader.is_some() {
                (last_leader, warned) = (now, false);
                self.outside.take();
            }
            let learner = view.server(view.raft_id).is_some_and(|server| !server.voter);
            let leaderless = view.leader.is_none() && now.saturating_since(last_leader) >= LEADERLESS;
            let outside = view.leader.is_none() && view.server(view.raft_id).is_none();
            let own = view.server(view.raft_id).filter(|_| view.leader.is_some() && !view.leads);
            let moved = own.is_some_and(|server| server.address != self.settings.me.peer_address);
            if outside || leaderless || moved || (learner && view.leader.is_some() && caught_up()) {
                if leaderless && !std::mem::replace(&mut warned, true) {
                    match learner {
                        true => tracing::warn!(
                            "raft non-voter has had no leader for a while; running the cluster join loop"
                        ),
                        false => tracing::warn!("no raft leader for a while; running the cluster join loop"),
                    }
                }
                self.sweep(view.raft_id).await;
            }
            rt::sleep(JOIN_SWEEP).await;
        }
    }

    /// Followers say nothing to each other: that a member lives, and where, each knows by the heartbeats that the leader
    /// has committed. Otherwise a copy of its directory that asks for votes would be all that is heard of it. What is
    /// applied while no leader is in view may be old.
    fn note_heartbeats(&self, has_leader: bool) {
        let state = self.applier.state();
        let mut stamps = self.stamps.borrow_mut();
        stamps.retain(|node, _| state.members().contains_key(node));
        for (node, member) in state.members() {
            let last = stamps.insert(node.clone(), member.heartbeat_ms);
            if has_leader && *node != self.settings.me.node && last.is_some_and(|last| last != member.heartbeat_ms) {
                let told = &member.registration;
                self.consensus.heard_at(told.raft_id, &told.peer_address, true);
            }
        }
    }

    /// Peers without a member record of this node dial what it advertised first (5.5).
    fn compare_recorded_address(&self) {
        let (view, me) = (self.consensus.view(), &self.settings.me);
        let Some(recorded) = view.server(view.raft_id).filter(|server| server.address != me.peer_address) else {
            return;
        };
        let (node, recorded_addr, advertise_addr) = (&*me.node, &*recorded.address, &*me.peer_address);
        let other_servers = view.servers.len() - 1;
        // A node that ran alone had nobody to tell an address (E57).
        match other_servers == 0 || recorded_addr.is_empty() {
            true => tracing::info!(node, recorded_addr, advertise_addr, other_servers, "raft configuration records this node at an address other than the one it advertises"),
            false => tracing::error!(node, recorded_addr, advertise_addr, other_servers, "raft configuration records this node at an address other than the one it advertises; set cluster.advertise_addr back, or let the join loop change the record"),
        }
    }

    fn join(&self, raft_id: u64, probe: bool) -> Join {
        let me = &self.settings.me;
        Join {
            node: me.node.to_string(),
            raft_id,
            peer_address: me.peer_address.to_string(),
            empty_directory: self.settings.empty_directory,
            newest_command_type: me.newest_command_type,
            probe,
            initial_members: Vec::new(),
        }
    }

    /// Asks until one leader has taken the node in.
    async fn sweep(&self, raft_id: u64) {
        let join = self.join(raft_id, false);
        let targets = self.targets.borrow().sweep();
        let mut nothing = Vec::new();
        for target in targets {
            let mut attempt = Attempt::at(&target);
            let mut address = target;
            loop {
                let answer = match self.ask(&address, &join).await {
                    Ok(answer) => answer,
                    Err(why) => {
                        nothing.push(format!("{address}: {why}"));
                        break;
                    }
                };
                let reason = answer.reason.clone();
                let next = attempt.follow(&mut self.targets.borrow_mut(), answer);
                match next {
                    Next::Ask(hint) => address = hint,
                    Next::Accepted(answer) => return self.say_accepted(&answer),
                    Next::Refused(answer) => return self.say_refused(&address, &answer),
                    Next::Elsewhere => {
                        nothing.push(format!("{address}: {reason}"));
                        break;
                    }
                }
            }
        }
        self.outside.replace(Some(format!("no leader was found to let this node in ({})", nothing.join("; "))));
    }

    /// Why this node is not in the cluster yet, as far as it has asked.
    pub fn outside(&self) -> Option<String> {
        self.outside.borrow().clone()
    }

    fn say_accepted(&self, answer: &Answer) {
        self.outside.take();
        let reason = match answer.word.as_str() {
            "deferred" => answer.reason.clone(),
            _ => String::new(),
        };
        let before = self.deferred.replace(reason.clone());
        if !reason.is_empty() && reason != before {
            tracing::info!(reason, "cluster join: caught up as a raft non-voter, not promoted yet");
        }
    }

    fn say_refused(&self, via: &str, answer: &Answer) {
        self.outside.replace(Some(format!("{via} does not let this node in ({}): {}", answer.word, answer.reason)));
        if !self.may_say(&answer.word) {
            return;
        }
        let (status, body) = (answer.status, answer.reason.as_str());
        match answer.word.as_str() {
            "decommissioned" => tracing::error!(body, "cluster join refused: this node was decommissioned"),
            "older_release" => {
                let entry_types = self.settings.me.newest_command_type;
                tracing::error!(via, entry_types, body, "cluster join refused: this node runs an older release");
            }
            _ => tracing::warn!(via, status, body, "cluster join rejected"),
        }
    }

    /// `Err`: why there is no answer.
    async fn ask(&self, address: &str, join: &Join) -> Result<Answer, String> {
        let address = (self.settings.resolve)(address).await.ok_or("its name cannot be looked up")?;
        match self.transport.call(address, wire::join_request(join, JOIN_BUDGET)).await {
            Ok(reply) => Ok(wire::read_answer(&reply)),
            Err(error) => {
                // A wrong secret shows here, on the node that has it.
                let err = error.text();
                match self.may_say(&format!("{address}: {err}")) {
                    true => tracing::warn!(%address, err, "cluster join attempt failed"),
                    false => tracing::debug!(%address, err, "cluster join attempt failed"),
                }
                Err(err.to_owned())
            }
        }
    }

    /// Answers a frame of another control endpoint; `None` when the operation is not membership's.
    pub async fn serve(&self, request: &Incoming) -> Option<Outgoing> {
        let operation = request.header.operation;
        let answer = match operation {
            operation::JOIN_CLUSTER if request.header.version == wire::VERSION => match wire::read_join(request) {
                Some(join) => self.admit(&join).await,
                None => refusal(status::BAD_REQUEST, "bad_request", "unreadable join"),
            },
            operation::FORGET_SERVER if request.header.version == wire::VERSION => match wire::read_forget(request) {
                Some(node) => self.forget(&node).await,
                None => refusal(status::BAD_REQUEST, "bad_request", "unreadable node id"),
            },
            operation::SHOWN if request.header.version == wire::VERSION => {
                return Some(self.answer_shown(request).await)
            }
            operation::JOIN_CLUSTER | operation::FORGET_SERVER | operation::SHOWN => {
                refusal(status::BAD_REQUEST, "bad_request", "unsupported version of a membership operation")
            }
            _ => return None,
        };
        Some(wire::answer(operation, &answer))
    }

    /// Lets a node in, or says why not. One at a time, behind a barrier.
    pub async fn admit(&self, join: &Join) -> Answer {
        let decide = |view: &View| admission::admit(join, &self.applier.state(), view, rt::now());
        let view = self.consensus.view();
        if !view.leads || join.probe {
            return decide(&view).1;
        }
        let _held = self.changing.enter().await;
        if let Err(stopped) = self.log.barrier().await {
            return refusal(status::UNAVAILABLE, "unavailable", &stopped.why);
        }
        if self.consensus.view().server(join.raft_id).is_some_and(|server| *server.node == *join.node) {
            self.consensus.heard_at(join.raft_id, &join.peer_address, false);
        }
        let (steps, answer) = decide(&self.consensus.view());
        let is_noteworthy = answer.status == status::CONFLICT || answer.word == "id_in_use";
        if is_noteworthy && self.may_say(&join.node) {
            let (joiner, at, entry_types) = (&*join.node, &*join.peer_address, join.newest_command_type);
            tracing::warn!(joiner, at, entry_types, reason = answer.reason, "cluster: refused a join");
        }
        let known = self.known_of(join);
        for step in steps {
            if let Err(why) = self.take(step.clone()).await {
                return refusal(status::UNAVAILABLE, "unavailable", &why);
            }
            say_taken(&step, join, known.as_ref());
            if matches!(step, Step::AddLearner(_)) {
                self.consensus.heard_at(join.raft_id, &join.peer_address, false);
            }
        }
        answer
    }

    /// The server that a joiner is, or takes the place of, and where that is.
    fn known_of(&self, join: &Join) -> Option<(Server, String)> {
        let view = self.consensus.view();
        let server = view.server(join.raft_id).or(view.server_named(&join.node))?;
        Some((server.clone(), admission::reachable(&self.applier.state(), &view, server)))
    }

    async fn take(&self, step: Step) -> Result<(), String> {
        match step {
            Step::Propose(command) => match self.log.propose(command).await {
                Ok(Outcome::Refused(refusal)) => Err(format!("the metadata refused: {refusal:?}")),
                Ok(_) => Ok(()),
                Err(stopped) => Err(stopped.why),
            },
            Step::Remove(raft_id) => self.consensus.remove(raft_id).await,
            Step::AddLearner(server) => self.consensus.add_learner(&server).await,
            Step::Promote(server) => self.consensus.promote(&server).await,
        }
    }

    /// What another member says of itself, within [`STATUS_BUDGET`].
    pub async fn ask_status(&self, node: &str) -> Result<NodeStatus, String> {
        let member = self.applier.state().members().get(node).cloned().ok_or("it is no member")?;
        let address = member.registration.peer_address.clone();
        let asked = async {
            let to = (self.settings.resolve)(&address).await.ok_or(format!("{address} cannot be resolved"))?;
            let reply = self.transport.call(to, wire::ask_status(STATUS_BUDGET)).await;
            wire::read_status(&reply.map_err(|error| error.text().to_owned())?)
        };
        rt::timeout(STATUS_BUDGET, Box::pin(asked))
            .await
            .unwrap_or_else(|_| Err("it did not answer in time".to_owned()))
    }

    /// The same wherever this node stands: a node that does not lead hands it to the leader.
    pub async fn forget_by_leader(&self, node: &str) -> Answer {
        let view = self.consensus.view();
        if view.leads {
            return self.forget(node).await;
        }
        let leader = view.leader.and_then(|leader| view.server(leader));
        let leader = leader.map(|leader| admission::reachable(&self.applier.state(), &view, leader));
        let address = match leader {
            Some(leader) => (self.settings.resolve)(&leader).await,
            None => None,
        };
        let Some(address) = address else {
            return refusal(status::UNAVAILABLE, "unavailable", "no leader is known that could decide it: try again");
        };
        match self.transport.call(address, wire::forget_request(node, FORGET_BUDGET)).await {
            Ok(reply) => wire::read_answer(&reply),
            Err(CallError::NotSent(why)) => refusal(status::UNAVAILABLE, "unavailable", &format!("the leader: {why}")),
            Err(CallError::Unknown(why)) => refusal(status::UNAVAILABLE, "unknown", &format!("the leader: {why}")),
        }
    }

    /// Removes a consensus server that has no member record (5.6). `200`: the word says voter or learner.
    pub async fn forget(&self, node: &str) -> Answer {
        let _held = self.changing.enter().await;
        if self.consensus.view().leads {
            if let Err(stopped) = self.log.barrier().await {
                return refusal(status::UNAVAILABLE, "unavailable", &stopped.why);
            }
        }
        let decided = admission::forget(node, &self.applier.state(), &self.consensus.view(), rt::now());
        let server = match decided {
            Ok(server) => server,
            Err((status, why)) => return refusal(status, "refused", &why),
        };
        if let Err(why) = self.consensus.remove(server.raft_id).await {
            return refusal(status::UNAVAILABLE, "unavailable", &why);
        }
        tracing::warn!(
            id = node,
            raft_id = server.raft_id,
            voter = server.voter,
            "forgot a raft server with no member record"
        );
        Answer {
            status: status::OK,
            word: if server.voter { "voter" } else { "learner" }.to_owned(),
            ..Answer::default()
        }
    }
}

/// Who takes part in consensus changes: on record whoever asked for it, with both addresses where one takes the place of
/// another.
fn say_taken(step: &Step, join: &Join, known: Option<&(Server, String)>) {
    let (id, address, raft_id) = (&*join.node, &*join.peer_address, join.raft_id);
    let former_address = known.map_or("", |(_, address)| address);
    let former_raft_id = known.map_or(0, |(server, _)| server.raft_id);
    let is_replaced = former_raft_id != 0 && former_raft_id != raft_id;
    match step {
        Step::Propose(_) => {}
        Step::Remove(_) => tracing::warn!(
            component = "audit",
            id,
            former_raft_id,
            former_address,
            address,
            "cluster: removed a server that answers no longer: its id comes with another data directory"
        ),
        Step::AddLearner(_) if is_replaced => tracing::warn!(
            component = "audit",
            id,
            raft_id,
            address,
            former_raft_id,
            former_address,
            "cluster: added the server that takes its place, without a vote yet"
        ),
        Step::AddLearner(_) if former_raft_id == 0 => {
            tracing::info!(id, raft_id, address, "cluster: added a server, without a vote yet");
        }
        Step::Promote(_) if known.is_some_and(|(server, _)| !server.voter) => {
            tracing::info!(id, raft_id, address, "cluster: a server got its vote");
        }
        Step::AddLearner(_) | Step::Promote(_) => {
            let recorded = known.map_or("", |(server, _)| &server.address);
            tracing::warn!(component = "audit", id, raft_id, recorded, address, "cluster: recorded another address");
        }
    }
}

fn refusal(status: u16, word: &str, reason: &str) -> Answer {
    Answer { status, word: word.to_owned(), reason: reason.to_owned(), ..Answer::default() }
}

/// Asks each of `peers` (id to `host:port`) whether it is in a cluster (K29). `Err`: why there is no answer.
pub async fn probe(
    transport: &dyn Transport,
    resolve: &Resolve,
    join: &Join,
    peers: &BTreeMap<String, String>,
) -> BTreeMap<String, Result<Answer, String>> {
    let asked = peers.iter().map(|(node, address)| {
        Box::pin(async move {
            let asked = async {
                let unknown = || format!("{address} cannot be looked up");
                let address = resolve(address).await.ok_or_else(unknown)?;
                let reply = transport.call(address, wire::join_request(join, JOIN_BUDGET)).await;
                reply.map(|reply| wire::read_answer(&reply)).map_err(|error| error.text().to_owned())
            };
            let in_time = rt::timeout(JOIN_BUDGET, Box::pin(asked)).await;
            (node.clone(), in_time.unwrap_or_else(|_| Err(format!("{address} did not answer in time"))))
        })
    });
    rt::all(asked.collect()).await.into_iter().collect()
}

/// What a node answers that has never been in a cluster and does not take part in one yet (K29). `initial_members`: those
/// that may found one, by its configuration.
pub fn answer_unconfigured(request: &Incoming, initial_members: &[String]) -> Option<Outgoing> {
    let operation = request.header.operation;
    let why = "this node is in no cluster";
    match operation {
        operation::JOIN_CLUSTER => {
            let answer = refusal(status::PRECONDITION_FAILED, "unconfigured", why);
            Some(wire::answer(operation, &Answer { initial_members: initial_members.to_vec(), ..answer }))
        }
        operation::CONSENSUS => None,
        _ => Some(wire::answer(operation, &refusal(status::UNAVAILABLE, "unavailable", why))),
    }
}
