//! Having things decided. Proposals and read barriers are made where this node leads; elsewhere the leader is asked by
//! operations of our own (E47). Each has a deadline, and ends early when the leadership does. A proposal carries an id,
//! so that whoever made it finds it when it comes back in the log: its outcome is the one of the own state machine,
//! and a read right after the answer sees the write (E52).

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use narad_shards::meta::Incarnation;
use narad_shards::peer::LocalBoxFuture;
use narad_shards::remote::CallError;
use narad_shards::rt::sync::{oneshot, Receiver};
use narad_shards::rt::{self, Instant};
use narad_shards::wire::{status, Incoming, Outgoing};

use super::codec::{self, ProposalId};
use super::configuration::Change;
use super::driver::{Request, Verdict};
use super::{Consensus, Stopped, DEADLINE};
use crate::control::{Command, Log, Outcome};

/// Between two attempts while nobody leads.
const RETRY: Duration = Duration::from_millis(50);
/// For a create altogether: a leader may hold it while it starts (6.2), and so may the next one.
const CREATE_BUDGET: Duration = Duration::from_secs(75);
/// So long before the end a held command is given up: whoever waits for it is told that nothing was done.
const HELD_MARGIN: Duration = Duration::from_secs(1);

/// Why something was not done.
enum Failure {
    /// For certain not: it may be tried again.
    NotDone(String),
    Unknown(String),
}

/// A leader, 0 when none is known, and its term.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Reign {
    leader: u64,
    term: u64,
}

/// What was so before a leader was asked.
struct Asked {
    reign: Reign,
    /// Images put in the place of the state by then.
    installs: u64,
}

/// How long a change may take until it is in the log.
fn longest(command: &Command) -> Duration {
    match command {
        Command::CreateTopic { .. } => CREATE_BUDGET,
        _ => DEADLINE,
    }
}

/// Committed, and what it does once it is applied here.
struct Committed {
    index: u64,
    outcome: Option<LocalBoxFuture<'static, Result<Outcome, Stopped>>>,
}

/// What a committed command does, and until when this node waits to see it (E52); without an end where it leads.
type Awaited = (LocalBoxFuture<'static, Result<Outcome, Stopped>>, Option<Instant>);

fn judge(verdict: Option<Verdict>) -> Result<Committed, Failure> {
    match verdict {
        Some(Verdict::Committed { index, outcome }) => Ok(Committed { index, outcome }),
        Some(Verdict::NotProposed(why)) => Err(Failure::NotDone(why)),
        Some(Verdict::Unknown(why)) => Err(Failure::Unknown(why)),
        None => Err(unknown("this node's consensus has stopped")),
    }
}

fn unknown(why: impl std::fmt::Display) -> Failure {
    Failure::Unknown(why.to_string())
}

impl Log for Rc<Consensus> {
    fn propose(&self, command: Command) -> LocalBoxFuture<'static, Result<Outcome, Stopped>> {
        let consensus = self.clone();
        Box::pin(async move { consensus.decide(command).await })
    }

    fn barrier(&self) -> LocalBoxFuture<'static, Result<(), Stopped>> {
        let consensus = self.clone();
        Box::pin(async move { consensus.pass_barrier().await })
    }

    fn live_topic(&self, name: &str) -> LocalBoxFuture<'static, Result<Option<Incarnation>, Stopped>> {
        let (consensus, name) = (self.clone(), name.to_owned());
        Box::pin(async move { consensus.ask_live_topic(&name).await })
    }
}

impl Consensus {
    /// See [`Log::propose`].
    pub async fn decide(&self, command: Command) -> Result<Outcome, Stopped> {
        let until = rt::now() + longest(&command);
        let (outcome, seen_by) = self.until_done(until, || self.try_propose(command.clone(), until)).await?;
        let outcome = match seen_by {
            None => outcome.await,
            Some(at) => rt::timeout(at - rt::now(), outcome).await.unwrap_or_else(|_| {
                Err(Stopped::unknown("the change is decided, but this node does not show it yet".to_owned()))
            }),
        };
        // It is in the log, whatever has become of this node meanwhile.
        outcome.map_err(|stopped| Stopped { underway: true, ..stopped })
    }

    /// See [`Log::barrier`].
    pub async fn pass_barrier(&self) -> Result<(), Stopped> {
        let until = rt::now() + DEADLINE;
        let passed = async {
            let index = self.until_done(until, || self.try_read(until)).await?;
            self.applier.wait_shown(index).await
        };
        rt::timeout(DEADLINE, passed)
            .await
            .unwrap_or_else(|_| Err(Stopped::refused("the barrier was not passed in time".to_owned())))
    }

    /// See [`Log::live_topic`].
    pub async fn ask_live_topic(&self, name: &str) -> Result<Option<Incarnation>, Stopped> {
        let until = rt::now() + DEADLINE;
        let asked = self.until_done(until, || self.try_live_topic(name, until));
        rt::timeout(DEADLINE, asked)
            .await
            .unwrap_or_else(|_| Err(Stopped::refused("no leader has said in time whether the topic exists".to_owned())))
    }

    /// Tries again what was not done for certain, until the deadline; or until nobody has taken over for [`DEADLINE`]:
    /// what one leader refuses, or all do that are known, will not be otherwise in a minute.
    async fn until_done<T>(
        &self,
        until: Instant,
        mut attempt: impl AsyncFnMut() -> Result<T, Failure>,
    ) -> Result<T, Stopped> {
        let (mut asked, mut give_up) = (self.reign(), rt::now() + DEADLINE);
        loop {
            if let Some(stopped) = self.stopped() {
                return Err(stopped);
            }
            let changed = self.changed();
            match attempt().await {
                Ok(value) => return Ok(value),
                Err(Failure::Unknown(why)) => return Err(Stopped::unknown(why)),
                Err(Failure::NotDone(why)) => {
                    let reign = self.reign();
                    if reign != asked {
                        (asked, give_up) = (reign, rt::now() + DEADLINE);
                    }
                    if rt::now() + RETRY >= until.min(give_up) {
                        return Err(Stopped::refused(why));
                    }
                    drop(rt::timeout(RETRY, changed).await);
                }
            }
        }
    }

    /// Who leads, as far as is known here.
    fn reign(&self) -> Reign {
        let status = self.status.borrow();
        Reign { leader: status.leader, term: status.term }
    }

    async fn try_propose(&self, command: Command, until: Instant) -> Result<Awaited, Failure> {
        let id = self.new_id();
        let (committed, seen_by) = if self.leads() {
            (self.propose_here(id, command, None, until).await?, None)
        } else {
            let (committed, seen_by) = self.propose_there(id, &command, until).await?;
            (committed, Some(seen_by))
        };
        let outcome = committed.outcome.ok_or_else(|| unknown("the change came back without an outcome"))?;
        Ok((outcome, seen_by))
    }

    /// `term`: the only one in which it may be proposed.
    async fn propose_here(
        &self,
        id: ProposalId,
        command: Command,
        term: Option<u64>,
        until: Instant,
    ) -> Result<Committed, Failure> {
        if matches!(command, Command::CreateTopic { .. }) {
            self.pass_create_gate(until).await?;
        }
        let prepare = self.prepare.borrow().clone();
        let command = prepare(command).map_err(Failure::NotDone)?;
        let committed = self.wait_for(id, true);
        self.request(Request::Propose { id, data: command.encode(), term });
        self.await_commit(id, committed, until.min(rt::now() + DEADLINE)).await
    }

    /// Waits until this node has started (K35).
    async fn pass_create_gate(&self, until: Instant) -> Result<(), Failure> {
        loop {
            let changed = self.changed();
            if !self.holds_creates.get() {
                return Ok(());
            }
            let wait = (until - rt::now()).saturating_sub(HELD_MARGIN);
            if !self.leads() || rt::timeout(wait, changed).await.is_err() {
                return Err(Failure::NotDone("the leader is still starting and takes no new topics yet".to_owned()));
            }
        }
    }

    async fn await_commit(
        &self,
        id: ProposalId,
        committed: Receiver<Verdict>,
        until: Instant,
    ) -> Result<Committed, Failure> {
        let verdict = rt::timeout(until - rt::now(), committed).await;
        self.forget(id);
        judge(verdict.map_err(|_| unknown("the change was not decided in time"))?)
    }

    fn leader_elsewhere(&self) -> Result<SocketAddr, Failure> {
        let (_, address) = self.leader().ok_or_else(|| Failure::NotDone("no leader is known".to_owned()))?;
        address.ok_or_else(|| Failure::NotDone("the leader's address is not known".to_owned()))
    }

    async fn propose_there(
        &self,
        id: ProposalId,
        command: &Command,
        until: Instant,
    ) -> Result<(Committed, Instant), Failure> {
        let mut committed = self.wait_for(id, false);
        let asked = self.ask_leader(id, command, &mut committed, until).await;
        self.forget(id);
        let (verdict, seen_by) = asked?;
        Ok((judge(verdict)?, seen_by))
    }

    /// Has a change proposed by whoever leads. Returns what has become of it, and until when it is waited for that this
    /// node shows it.
    async fn ask_leader(
        &self,
        id: ProposalId,
        command: &Command,
        committed: &mut Receiver<Verdict>,
        until: Instant,
    ) -> Result<(Option<Verdict>, Instant), Failure> {
        let address = self.leader_elsewhere()?;
        // As of before the call: whatever becomes of the change, it comes after this.
        let asked = Asked { reign: self.reign(), installs: self.installs.get() };
        let frame = codec::propose_frame(until - rt::now(), asked.reign.term, id, &command.encode());
        // It may come back in the log before the leader's reply does.
        let replied = match rt::first_of(&mut *committed, self.transport.call(address, frame)).await {
            Ok(verdict) => return Ok((verdict, rt::now() + DEADLINE)),
            Err(replied) => replied,
        };
        let seen_by = rt::now() + DEADLINE;
        let why = match replied {
            Ok(reply) => match reply.header.status {
                status::OK => {
                    let verdict = rt::timeout(DEADLINE, committed).await;
                    return Ok((verdict.map_err(|_| unknown("the change was not decided in time"))?, seen_by));
                }
                status::MISDIRECTED => return Err(Failure::NotDone(codec::reply_text(&reply))),
                status::UNAVAILABLE => codec::reply_text(&reply),
                _ => return Err(Failure::Unknown(codec::reply_text(&reply))),
            },
            Err(CallError::NotSent(why)) => {
                return Err(Failure::NotDone(format!("the leader at {address} cannot be reached: {why}")));
            }
            Err(CallError::Unknown(why)) => format!("the leader at {address} did not answer: {why}"),
        };
        let verdict = self.learn_fate(committed, &asked, until, why).await?;
        Ok((Some(verdict), rt::now() + DEADLINE))
    }

    /// Whoever was asked does not say what has become of a change. If it is in the log, it comes back in it. And once
    /// another leader, of a later term, has had its word confirmed by a quorum, and all of that is applied here, what has
    /// not come back never will: an entry of an earlier term that this leader lacks is none any more, and a request that
    /// arrives only now is refused, because it names the term that it was for.
    async fn learn_fate(
        &self,
        committed: &mut Receiver<Verdict>,
        asked: &Asked,
        until: Instant,
        why: String,
    ) -> Result<Verdict, Failure> {
        let until = until.min(rt::now() + DEADLINE);
        let passed_by = async {
            loop {
                let changed = self.changed();
                let Reign { leader, term } = self.reign();
                if leader != 0 && leader != asked.reign.leader && term > asked.reign.term {
                    if let Ok(index) = self.try_read(until).await {
                        if self.applier.wait_shown(index).await.is_ok() {
                            return;
                        }
                    }
                }
                let _ = rt::timeout(RETRY, changed).await;
            }
        };
        match rt::timeout(until - rt::now(), rt::first_of(committed, passed_by)).await {
            Ok(Ok(Some(verdict))) => Ok(verdict),
            // An image would hold what it does without having brought it back.
            Ok(Err(())) if self.installs.get() == asked.installs => Err(Failure::NotDone(why)),
            _ => Err(Failure::Unknown(why)),
        }
    }

    /// The index up to which everything reaches that was decided before the call.
    async fn try_read(&self, until: Instant) -> Result<u64, Failure> {
        if self.leads() {
            return self.read_here().await;
        }
        let address = self.leader_elsewhere()?;
        match self.transport.call(address, codec::read_frame(until - rt::now())).await {
            Ok(reply) if reply.header.status == status::OK => {
                let index = codec::reply_number(&reply);
                index.into_iter().for_each(|index| self.heard_commit(index));
                index.ok_or_else(|| Failure::NotDone("the leader's answer is no index".to_owned()))
            }
            Ok(reply) => Err(Failure::NotDone(codec::reply_text(&reply))),
            Err(error) => Err(Failure::NotDone(error.text().to_owned())),
        }
    }

    async fn read_here(&self) -> Result<u64, Failure> {
        let (answer, index) = oneshot();
        self.request(Request::Read(answer));
        let lost = || Failure::NotDone("this node lost the leadership before a quorum confirmed it".to_owned());
        index.await.ok_or_else(lost)
    }

    /// Only the leader's own state, read behind its barrier, is its word; whatever else comes back is none (K21).
    async fn try_live_topic(&self, name: &str, until: Instant) -> Result<Option<Incarnation>, Failure> {
        if self.leads() {
            return self.live_topic_here(name).await;
        }
        let address = self.leader_elsewhere()?;
        match self.transport.call(address, codec::topic_frame(until - rt::now(), name)).await {
            Ok(reply) if reply.header.status == status::OK => match codec::reply_number(&reply) {
                Some(id) => Ok(Some(Incarnation(id))),
                None => Err(Failure::NotDone("the leader's answer is no topic id".to_owned())),
            },
            Ok(reply) if reply.header.status == status::NOT_FOUND => Ok(None),
            Ok(reply) => Err(Failure::NotDone(codec::reply_text(&reply))),
            Err(error) => Err(Failure::NotDone(error.text().to_owned())),
        }
    }

    async fn live_topic_here(&self, name: &str) -> Result<Option<Incarnation>, Failure> {
        let index = self.read_here().await?;
        self.applier.wait_shown(index).await.map_err(|stopped| Failure::NotDone(stopped.why))?;
        Ok(self.applier.state().topics().get(name).map(|topic| topic.incarnation))
    }

    pub(super) async fn take_topic_question(&self, incoming: &Incoming) -> Outgoing {
        let payload = incoming.payload();
        let Ok(name) = std::str::from_utf8(&payload) else {
            return codec::refusal(incoming, status::BAD_REQUEST, "a topic name that is no text");
        };
        let not_here = |why: &str| codec::refusal(incoming, status::MISDIRECTED, why);
        if !self.leads() {
            return not_here("this node does not lead");
        }
        match rt::timeout(incoming.budget().min(DEADLINE), self.live_topic_here(name)).await {
            Ok(Ok(Some(incarnation))) => codec::number_reply(incoming, incarnation.0),
            Ok(Ok(None)) => codec::refusal(incoming, status::NOT_FOUND, "there is no such topic"),
            Ok(Err(Failure::NotDone(why) | Failure::Unknown(why))) => not_here(&why),
            Err(_) => not_here("no quorum confirmed the leader in time"),
        }
    }

    pub(super) async fn take_proposal(&self, incoming: &Incoming) -> Outgoing {
        let payload = incoming.payload();
        let Some((id, command)) = payload.split_at_checked(16).and_then(|(id, rest)| Some((ProposalId::of(id)?, rest)))
        else {
            return codec::refusal(incoming, status::BAD_REQUEST, "a proposal without an id");
        };
        let command = match Command::decode(command) {
            Ok(command) => command,
            Err(error) => return codec::refusal(incoming, status::BAD_REQUEST, &error.to_string()),
        };
        if !self.leads() {
            return codec::refusal(incoming, status::MISDIRECTED, "this node does not lead");
        }
        let until = rt::now() + incoming.budget().min(longest(&command));
        match self.propose_here(id, command, codec::proposal_term(incoming), until).await {
            Ok(Committed { index, .. }) => codec::number_reply(incoming, index),
            Err(Failure::NotDone(why)) => codec::refusal(incoming, status::MISDIRECTED, &why),
            Err(Failure::Unknown(why)) => codec::refusal(incoming, status::UNAVAILABLE, &why),
        }
    }

    pub(super) async fn take_read(&self, incoming: &Incoming) -> Outgoing {
        let not_here = |why: &str| codec::refusal(incoming, status::MISDIRECTED, why);
        if !self.leads() {
            return not_here("this node does not lead");
        }
        match rt::timeout(incoming.budget().min(DEADLINE), self.read_here()).await {
            Ok(Ok(index)) => codec::number_reply(incoming, index),
            Ok(Err(Failure::NotDone(why) | Failure::Unknown(why))) => not_here(&why),
            Err(_) => not_here("no quorum confirmed the leader in time"),
        }
    }

    pub(super) async fn change(&self, change: Change) -> Result<(), Stopped> {
        let until = rt::now() + DEADLINE;
        self.until_done(until, async || {
            if !self.leads() {
                return Err(Failure::NotDone("this node does not lead".to_owned()));
            }
            let id = self.new_id();
            let committed = self.wait_for(id, true);
            self.request(Request::Change { id, change: change.clone() });
            self.await_commit(id, committed, until).await.map(drop)
        })
        .await
    }
}

/// A leader whose recorded address is not the one it advertises puts that right: a lone node that is to be grown, or
/// one that has moved (E57).
pub(super) async fn keep_own_address(consensus: Rc<Consensus>) {
    while consensus.stopped().is_none() {
        let changed = consensus.changed();
        let status = consensus.status();
        let own = status.configuration.servers.get(&status.raft_id).filter(|_| status.is_established);
        if let Some(server) = own.filter(|server| server.address != consensus.settings.address) {
            let (name, address) = (server.name.clone(), consensus.settings.address.clone());
            tracing::info!(recorded = server.address, address, "consensus: recording the address that is advertised");
            if consensus.promote(status.raft_id, &name, &address).await.is_ok() {
                continue;
            }
        }
        changed.await;
    }
}
