//! The task that runs the core: feeds it ticks, messages and requests, and does what it says by the rule of
//! [`super::settle`]. It owns the core; everybody else leaves a request and waits.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use narad_shards::peer::LocalBoxFuture;
use narad_shards::rt::sync::Sender;
use narad_shards::rt::{self, Instant, Queue};
use raft::eraftpb::{Entry, Message};
use raft::ReadState;

use super::codec::{self, ProposalId};
use super::configuration::{Change, Configuration};
use super::core::{changes_servers, Core};
use super::disk::{Changes, Position};
use super::mirror::Label;
use super::settle::{settle, Hands};
use super::{snapshot, Consensus};
use crate::control::{BadCommand, Command, Outcome, Stopped};

/// A leader's heartbeats.
pub const TICK: Duration = Duration::from_millis(100);
/// A follower's ticks are between these, drawn anew whenever it hears of a leader: about one second to an election,
/// and seldom two at once (E46).
const FOLLOWER_TICK_MS: std::ops::Range<u64> = 80..120;

const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_LONGEST: Duration = Duration::from_secs(5);
const RETRY_TOTAL: Duration = Duration::from_secs(30);
/// Configurations that are remembered to label images with.
const CONFIGURATIONS: usize = 64;

/// What becomes of a proposal.
pub enum Verdict {
    /// It is in the log for good at `index`; what it does, once applied here. `None`: it was no command.
    Committed { index: u64, outcome: Option<LocalBoxFuture<'static, Result<Outcome, Stopped>>> },
    /// For certain nowhere.
    NotProposed(String),
    /// It may still be committed.
    Unknown(String),
}

pub enum Request {
    Step(Message),
    /// A received image is in its file, and this message tells the library.
    Snapshot(Message, Sender<()>),
    Propose {
        id: ProposalId,
        data: Vec<u8>,
        /// In no other term; `None`: in any.
        term: Option<u64>,
    },
    Change {
        id: ProposalId,
        change: Change,
    },
    /// Resolves with the index up to which everything decided so far reaches.
    Read(Sender<u64>),
    /// Hand leadership over to the server that is furthest.
    Transfer,
    SnapshotSent {
        to: u64,
        sent: bool,
    },
    ImageTaken(Result<u64, String>),
}

pub(super) struct Driver {
    consensus: Rc<Consensus>,
    /// Last entry that the state machine was given.
    handed: u64,
    /// By context; answered by a Ready.
    reads: BTreeMap<u64, Vec<Sender<u64>>>,
    /// Until this leader has committed an entry of its term.
    early_reads: Vec<Sender<u64>>,
    read_count: u64,
    configurations: VecDeque<Configuration>,
    is_imaging: bool,
    /// Servers that an image is on its way to.
    sending: BTreeSet<u64>,
    next_image_check: Instant,
    led_term: Option<u64>,
}

pub(super) async fn run(consensus: Rc<Consensus>, mut core: Core) {
    let me = core.raft_id();
    let mut driver = Driver {
        handed: consensus.applier.applied_index(),
        configurations: VecDeque::from([core.configuration().clone()]),
        next_image_check: rt::now() + consensus.image_check_wait(),
        consensus: consensus.clone(),
        reads: BTreeMap::new(),
        early_reads: Vec::new(),
        read_count: 0,
        is_imaging: false,
        sending: BTreeSet::new(),
        led_term: None,
    };
    // Nobody to wait for.
    if core.configuration().voters() == 1 && core.configuration().is_voter(me) {
        core.campaign();
    }
    let stopped = driver.turn_for_ever(&mut core).await;
    consensus.stop(stopped);
}

impl Driver {
    /// Returns when this node can take part no longer.
    async fn turn_for_ever(&mut self, core: &mut Core) -> Stopped {
        let mut tick = TICK;
        let mut next_tick = rt::now() + tick;
        loop {
            if let Some(stopped) = self.consensus.applier.stopped() {
                return stopped; // no vote, no lead, no acknowledgement (K17)
            }
            if let Err(stopped) = settle(core, self).await {
                self.consensus.applier.stop(stopped.clone());
                return stopped;
            }
            self.look_after_leadership(core);
            self.look_after_images(core);
            self.consensus.publish(core);
            let woken = self.consensus.wake.notified();
            let requests = std::mem::take(&mut *self.consensus.requests.borrow_mut());
            let idle = requests.is_empty();
            for request in requests {
                if let Err(stopped) = self.take(core, request).await {
                    self.consensus.applier.stop(stopped.clone());
                    return stopped;
                }
            }
            // The only server has nobody to tell that it leads, and nobody to miss: an idle node is not woken.
            let alone = core.leads() && core.configuration().servers.len() == 1;
            if !alone && rt::now() >= next_tick {
                // One, however late: what stood still must not find itself without a leader for that.
                core.tick();
                if core.leads() {
                    tick = TICK;
                } else if core.is_at_rest() || tick == TICK {
                    tick = Duration::from_micros(draw(FOLLOWER_TICK_MS.start * 1000, FOLLOWER_TICK_MS.end * 1000));
                }
                next_tick = rt::now() + tick;
            } else if idle && !core.has_ready() {
                let until = if alone { self.next_image_check } else { next_tick };
                let _ = rt::first_of(woken, rt::sleep_until(until)).await;
            }
        }
    }

    async fn take(&mut self, core: &mut Core, request: Request) -> Result<(), Stopped> {
        match request {
            Request::Step(message) => core.step(message)?,
            Request::Snapshot(message, done) => {
                core.step(message)?;
                // Before anything else can touch the received file.
                settle(core, self).await?;
                let _ = done.send(()); // the sender may have given up
            }
            Request::Propose { id, data, term } => {
                let may = term.is_none_or(|term| term == core.term());
                self.consensus.proposed(id, may && core.propose(id.to_bytes(), data).is_ok());
            }
            Request::Change { id, change } => {
                let proposed = match change {
                    Change::Remove { raft_id } if raft_id == core.raft_id() => Err(raft::Error::ProposalDropped),
                    change => core.propose_change(id.to_bytes(), &change),
                };
                self.consensus.proposed(id, proposed.is_ok());
            }
            Request::Read(answer) if core.leads() => self.early_reads.push(answer),
            Request::Read(answer) => drop(answer),
            Request::Transfer if core.leads() => {
                if let Some(to) = core.best_successor() {
                    core.transfer_to(to);
                }
            }
            Request::Transfer => {}
            Request::SnapshotSent { to, sent } => {
                self.sending.remove(&to);
                core.report_snapshot(to, sent);
            }
            Request::ImageTaken(taken) => self.image_taken(core, taken).await?,
        }
        Ok(())
    }

    fn look_after_leadership(&mut self, core: &mut Core) {
        let leads = core.leads().then(|| core.term());
        if self.led_term != leads {
            if self.led_term.is_some() {
                self.reads.clear();
                self.early_reads.clear();
                self.consensus.lost_leadership();
            }
            if let Some(term) = leads {
                tracing::info!(term, raft_id = core.raft_id(), "consensus: this node leads");
            }
            self.led_term = leads;
        }
        if core.is_established() && !self.early_reads.is_empty() {
            self.read_count += 1;
            self.reads.insert(self.read_count, std::mem::take(&mut self.early_reads));
            core.read_index(self.read_count.to_le_bytes().to_vec());
        }
    }

    fn look_after_images(&mut self, core: &Core) {
        let settings = &self.consensus.settings;
        let wanted = core.log().take_wanted();
        let mut due = wanted;
        if rt::now() >= self.next_image_check {
            self.next_image_check = rt::now() + self.consensus.image_check_wait();
            let last = core.log().image().map_or(core.log().start().index, |label| label.position.index);
            due |= self.consensus.applier.applied_index() >= last + settings.snapshot_entries;
        }
        // The file that is being sent stays what it is.
        if !due || self.is_imaging || !self.sending.is_empty() {
            return;
        }
        self.is_imaging = true;
        let started = rt::now();
        let (consensus, taking) = (self.consensus.clone(), self.consensus.applier.take_image());
        rt::spawn(Queue::Background, async move {
            let taken = taking.await;
            if taken.is_ok() {
                let took = (rt::now() - started).as_micros() as u64;
                consensus.watch.snapshot_micros.store(took.max(1), std::sync::atomic::Ordering::Relaxed);
            }
            consensus.request(Request::ImageTaken(taken));
        });
    }

    async fn image_taken(&mut self, core: &mut Core, taken: Result<u64, String>) -> Result<(), Stopped> {
        self.is_imaging = false;
        let index = match taken {
            Ok(index) => index,
            Err(error) => {
                self.consensus.watch.snapshot_failures.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                tracing::error!(
                    err = error,
                    "metastore: could not copy the database for a raft snapshot; the log grows until one is made"
                );
                return Ok(());
            }
        };
        let configuration = self.configurations.iter().rev().find(|configuration| configuration.index <= index);
        // Unlabelled it is of no use: an install has overtaken it, or a restart is still replaying.
        let (Some(configuration), Some(term)) = (configuration, core.log().term_at(index)) else { return Ok(()) };
        let label = Label { position: Position { index, term }, configuration: configuration.clone() };
        let changes = Arc::new(core.image_taken(label, self.consensus.settings.trailing_entries));
        if !changes.is_empty() {
            self.store(changes.clone()).await?;
            core.stored(&changes);
        }
        Ok(())
    }

    /// Remembers what applies from an index on.
    fn configured(&mut self, configuration: &Configuration) {
        self.configurations.push_back(configuration.clone());
        if self.configurations.len() > CONFIGURATIONS {
            self.configurations.pop_front();
        }
    }

    async fn apply_one(&mut self, core: &mut Core, entry: Entry) -> Result<(), Stopped> {
        let index = entry.index;
        let waiter = ProposalId::of(&entry.context);
        if changes_servers(&entry) {
            if let Some(configuration) = core.apply_change(&entry) {
                self.configured(&configuration);
                // Durable before the state machine moves past it: a restart never finds an older one than it needs.
                let changes = Arc::new(Changes { configuration: Some(configuration), ..Changes::default() });
                self.store(changes.clone()).await?;
                core.stored(&changes);
            }
        }
        if index <= self.handed {
            return Ok(());
        }
        self.handed = index;
        let applier = &self.consensus.applier;
        let verdict = if changes_servers(&entry) || entry.data.is_empty() {
            applier.submit_empty(index);
            Verdict::Committed { index, outcome: None }
        } else {
            match Command::decode(&entry.data) {
                Ok(command) => {
                    let outcome = applier.submit(index, command);
                    Verdict::Committed { index, outcome: Some(Box::pin(outcome)) }
                }
                Err(BadCommand::UnknownType(entry_type)) => {
                    let build = env!("CARGO_PKG_VERSION");
                    tracing::error!(index, entry_type, build, "metastore: stopped applying raft entries");
                    return Err(Stopped::refused(format!(
                        "log entry {index} is of command type {entry_type}, which this build ({build}) does not know: run the build that the rest of the cluster runs"
                    )));
                }
                Err(BadCommand::Unreadable(error)) => {
                    tracing::error!(index, error, "metastore: a log entry does not decode; skipped, as on every node");
                    applier.submit_empty(index);
                    Verdict::Committed { index, outcome: None }
                }
            }
        };
        if let Some(id) = waiter {
            self.consensus.decided(id, verdict);
        }
        Ok(())
    }
}

impl Hands for Driver {
    async fn store(&mut self, changes: Arc<Changes>) -> Result<(), Stopped> {
        let started = rt::now();
        let mut wait = RETRY_FIRST;
        loop {
            let Err(error) = self.consensus.disk.write(changes.clone()).await else { return Ok(()) };
            if wait == RETRY_FIRST {
                tracing::warn!(error, "consensus: could not write the log; retrying");
            }
            if rt::now() + wait > started + RETRY_TOTAL {
                tracing::error!(error, "consensus: the log cannot be written");
                return Err(Stopped::refused(format!(
                    "the consensus log cannot be written: {error}; free or replace the disk, then restart"
                )));
            }
            rt::sleep(wait).await;
            wait = (wait * 2).min(RETRY_LONGEST);
        }
    }

    async fn install(&mut self, core: &Core, index: u64) -> Result<(), Stopped> {
        // Before anybody can be woken by what it holds.
        self.consensus.installs.set(self.consensus.installs.get() + 1);
        let installed = self.consensus.applier.install_image().await?;
        if installed != index {
            return Err(Stopped::refused(format!(
                "the received metadata snapshot is of entry {installed}, not {index}"
            )));
        }
        tracing::info!(index, "consensus: installed a metadata snapshot of the leader");
        self.handed = index;
        self.configurations = VecDeque::from([core.configuration().clone()]);
        Ok(())
    }

    fn send(&mut self, core: &Core, messages: Vec<Message>) {
        for message in messages {
            let to = message.to;
            let Some(address) = self.consensus.address_of(to, core.configuration()) else {
                tracing::debug!(to, "consensus: no address of this server is known");
                if codec::is_snapshot(&message) {
                    self.consensus.request(Request::SnapshotSent { to, sent: false });
                }
                continue;
            };
            if !codec::is_snapshot(&message) {
                self.consensus
                    .transport
                    .send(address, codec::message_frame(&self.consensus.settings.address, &message));
            } else if self.sending.insert(to) {
                rt::spawn(Queue::Background, snapshot::send(self.consensus.clone(), address, message));
            }
        }
    }

    fn may_read(&mut self, states: Vec<ReadState>) {
        for state in states {
            let context = state.request_ctx.as_slice().try_into().map(u64::from_le_bytes);
            for answer in context.ok().and_then(|context| self.reads.remove(&context)).unwrap_or_default() {
                let _ = answer.send(state.index); // its caller may have given up
            }
        }
    }

    async fn apply(&mut self, core: &mut Core, entries: Vec<Entry>) -> Result<(), Stopped> {
        for entry in entries {
            self.apply_one(core, entry).await?;
        }
        Ok(())
    }
}

fn draw(low: u64, high: u64) -> u64 {
    low + rt::random_u64() % (high - low)
}
