//! Applies decided commands in order: compute, store, show to every shard, answer.
//!
//! 1. queued: the log has given the command an index
//! 2. computed: [`apply`] and [`State::absorb`], in memory
//! 3. stored: effects and index in one transaction, many entries at once while the last commit ran (K14)
//! 4. shown: a new snapshot, installed by every shard (E23)
//! 5. answered
//!
//! Nothing before step 3 can be seen by anybody. A disk that refuses step 3 is asked again for 30 s, then the applier
//! stops for good (K17): an entry is never skipped.
//!
//! Images of the store (E37) are taken and put in place by the same task, between two batches.

use std::cell::{Cell, Ref, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;
use std::time::Duration;

use narad_shards::meta::Snapshot;
use narad_shards::peer::LocalBoxFuture;
use narad_shards::rt::sync::{oneshot, Notify, Sender};
use narad_shards::rt::{self, Queue};

use super::apply::{apply, Outcome};
use super::command::Command;
use super::placement::Placement;
use super::state::{Change, State};
use super::store::{Batch, Storage};
use super::watch::MetastoreWatch;
use super::Metastore;

/// Brings a snapshot to the shards.
pub trait Install {
    /// Resolves when every shard sees the world as `snapshot`.
    fn install(&self, snapshot: Arc<Snapshot>) -> LocalBoxFuture<'static, ()>;
}

/// Metadata writes have stopped for good.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// Names the file, the error, and what to do.
    pub why: String,
    /// The entry was under way: it may be stored all the same (K11). Otherwise it was never begun.
    pub underway: bool,
}

impl Stopped {
    /// For certain nothing was changed.
    pub fn refused(why: impl Into<String>) -> Stopped {
        Stopped { why: why.into(), underway: false }
    }

    /// It may be changed all the same.
    pub fn unknown(why: impl Into<String>) -> Stopped {
        Stopped { why: why.into(), underway: true }
    }
}

/// Entries that one transaction takes at most.
const BATCH_ENTRIES_MAX: usize = 256;
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_LONGEST: Duration = Duration::from_secs(5);
const RETRY_TOTAL: Duration = Duration::from_secs(30);

struct Entry {
    index: u64,
    /// `None`: an election or a change of servers. It moves the index all the same (K14).
    command: Option<Command>,
    answer: Option<Sender<Outcome>>,
}

enum Work {
    Entry(Entry),
    /// Copies the store into an image of its own; answers with the applied index that the image has.
    TakeImage(Sender<Result<u64, String>>),
    /// Puts the received image in the place of the store; answers with its applied index.
    InstallImage(Sender<u64>),
}

enum Next {
    Entries(Vec<Entry>),
    TakeImage(Sender<Result<u64, String>>),
    InstallImage(Sender<u64>),
}

pub struct Applier {
    queue: RefCell<VecDeque<Work>>,
    queued: Notify,
    /// Holds durable changes only.
    snapshot: RefCell<Arc<Snapshot>>,
    /// What is stored. The task's own is ahead of it while a batch is on its way to the disk.
    state: RefCell<State>,
    trust: Cell<bool>,
    /// Index that every shard has seen the effects of.
    shown_index: Cell<u64>,
    shown: Notify,
    stopped: RefCell<Option<Stopped>>,
    has_stopped: Notify,
    watch: Arc<MetastoreWatch>,
}

impl Applier {
    /// Starts the applier's task on the runtime of the calling thread.
    pub fn start<S: Storage>(metastore: Metastore<S>, install: Rc<dyn Install>) -> Rc<Applier> {
        let Metastore { store, state, placement, watch } = metastore;
        let applier = Rc::new(Applier {
            queue: RefCell::default(),
            queued: Notify::new(),
            snapshot: RefCell::new(Arc::new(placement.snapshot(&state))),
            state: RefCell::new(state.clone()),
            trust: Cell::new(false),
            shown_index: Cell::new(state.applied_index()),
            shown: Notify::new(),
            stopped: RefCell::default(),
            has_stopped: Notify::new(),
            watch,
        });
        applier.tell(&state);
        rt::spawn(Queue::Foreground, run(applier.clone(), store, state, placement, install));
        applier
    }

    /// Queues the command that the log has decided for `index`; indexes come in order. The future may be dropped, the
    /// command is applied all the same.
    pub fn submit(&self, index: u64, command: Command) -> impl Future<Output = Result<Outcome, Stopped>> + 'static {
        let (answer, receiver) = oneshot();
        let queued = self.queue(Work::Entry(Entry { index, command: Some(command), answer: Some(answer) }));
        async move {
            queued?;
            receiver.await.ok_or_else(|| Stopped::unknown("this node can no longer store metadata, and stops"))
        }
    }

    /// Queues an entry without a command: the index moves with a transaction of its own (K14).
    pub fn submit_empty(&self, index: u64) {
        // Stopped: nothing moves any more.
        let _ = self.queue(Work::Entry(Entry { index, command: None, answer: None }));
    }

    /// Copies the store, as it is once everything queued before is applied, into its image file. Resolves with the
    /// applied index of the image.
    pub fn take_image(&self) -> impl Future<Output = Result<u64, String>> + 'static {
        let (answer, receiver) = oneshot();
        let queued = self.queue(Work::TakeImage(answer));
        async move {
            queued.map_err(|stopped| stopped.why)?;
            receiver.await.unwrap_or_else(|| Err("metadata writes have stopped".to_owned()))
        }
    }

    /// Puts the received image in the place of the store, once everything queued before is applied. Resolves with the
    /// applied index when every shard sees what the image holds.
    pub fn install_image(&self) -> impl Future<Output = Result<u64, Stopped>> + 'static {
        let (answer, receiver) = oneshot();
        let queued = self.queue(Work::InstallImage(answer));
        async move {
            queued?;
            receiver.await.ok_or_else(|| Stopped::refused("metadata stopped while a snapshot was being installed"))
        }
    }

    fn queue(&self, work: Work) -> Result<(), Stopped> {
        if let Some(stopped) = self.stopped() {
            return Err(stopped);
        }
        self.queue.borrow_mut().push_back(work);
        self.queued.notify_one();
        Ok(())
    }

    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.snapshot.borrow().clone()
    }

    /// Index of the last entry whose effects are stored.
    pub fn applied_index(&self) -> u64 {
        self.state.borrow().applied_index()
    }

    /// What is stored. Not to be held across an await.
    pub fn state(&self) -> Ref<'_, State> {
        self.state.borrow()
    }

    /// Sets the ownership latch (K22): from the next snapshot on, which follows at once, shards see who owns what.
    pub fn trust_ownership(&self) {
        self.trust.set(true);
        self.queued.notify_one();
    }

    /// Resolves when every shard sees the effects of the entry at `index` (E52).
    pub async fn wait_shown(&self, index: u64) -> Result<(), Stopped> {
        loop {
            let woken = self.shown.notified();
            if self.shown_index.get() >= index {
                return Ok(());
            }
            if let Some(stopped) = self.stopped() {
                return Err(stopped);
            }
            woken.await;
        }
    }

    pub fn stopped(&self) -> Option<Stopped> {
        self.stopped.borrow().clone()
    }

    pub async fn wait_stopped(&self) -> Stopped {
        loop {
            let woken = self.has_stopped.notified();
            if let Some(stopped) = self.stopped() {
                return stopped;
            }
            woken.await;
        }
    }

    fn tell(&self, state: &State) {
        self.watch.topics.store(state.topics().len() as u64, Relaxed);
        self.watch.applied_index.store(state.applied_index(), Relaxed);
    }

    /// Nothing is applied any more (K17).
    pub fn stop(&self, why: Stopped) {
        if self.stopped.borrow().is_some() {
            return;
        }
        self.watch.stopped.store(true, Relaxed);
        *self.stopped.borrow_mut() = Some(why);
        self.queue.borrow_mut().clear(); // their waiters learn that the outcome is unknown
        self.has_stopped.notify_all();
        self.shown.notify_all();
    }

    async fn next(&self) -> Next {
        loop {
            let woken = self.queued.notified();
            if let Some(next) = self.take() {
                return next;
            }
            woken.await;
        }
    }

    fn take(&self) -> Option<Next> {
        let mut queue = self.queue.borrow_mut();
        let mut entries = Vec::new();
        while entries.len() < BATCH_ENTRIES_MAX {
            match queue.pop_front() {
                Some(Work::Entry(entry)) => entries.push(entry),
                Some(other) if !entries.is_empty() => {
                    queue.push_front(other);
                    break;
                }
                Some(Work::TakeImage(answer)) => return Some(Next::TakeImage(answer)),
                Some(Work::InstallImage(answer)) => return Some(Next::InstallImage(answer)),
                None => break,
            }
        }
        // None at all when ownership may be trusted from now on.
        (!entries.is_empty() || self.trust.get()).then_some(Next::Entries(entries))
    }
}

/// What the task owns.
struct Run<S> {
    store: S,
    state: State,
    placement: Placement,
    install: Rc<dyn Install>,
}

async fn run<S: Storage>(applier: Rc<Applier>, store: S, state: State, placement: Placement, install: Rc<dyn Install>) {
    let mut run = Run { store, state, placement, install };
    loop {
        let done = match applier.next().await {
            Next::Entries(entries) => run.apply(&applier, entries).await,
            Next::TakeImage(answer) => Ok(run.take_image(answer).await),
            Next::InstallImage(answer) => run.install_image(&applier, answer).await,
        };
        run = match done {
            Ok(run) => run,
            Err(stopped) => return applier.stop(stopped),
        };
    }
}

impl<S: Storage> Run<S> {
    async fn apply(mut self, applier: &Applier, entries: Vec<Entry>) -> Result<Run<S>, Stopped> {
        let mut batch = Batch::default();
        let mut answers = Vec::with_capacity(entries.len());
        let mut newest_type = 0;
        for entry in entries {
            batch.applied_index = entry.index;
            let Some(command) = entry.command else {
                self.state.absorb(entry.index, &[]);
                continue;
            };
            let mut applied = apply(&self.state, &command);
            newest_type = newest_type.max(command.type_number());
            if command.type_number() > self.state.newest_command_type() {
                applied.changes.push(Change::SetNewestCommandType(command.type_number()));
            }
            self.state.absorb(entry.index, &applied.changes);
            batch.changes.extend(applied.changes);
            answers.push((entry.answer, applied.outcome));
        }
        let mut shows = batch.changes.iter().any(Change::shows_in_snapshot);
        if batch.applied_index > 0 {
            let batch = Arc::new(batch);
            self.store = commit(self.store, batch.clone(), newest_type, &applier.watch).await?;
            applier.state.borrow_mut().absorb(batch.applied_index, &batch.changes);
            applier.tell(&self.state);
        }
        if applier.trust.take() {
            self.placement.trust();
            shows = true;
        }
        if shows {
            self.show(applier).await;
        }
        self.shown(applier);
        for (answer, outcome) in answers {
            if let Some(answer) = answer {
                let _ = answer.send(outcome); // the client may have gone
            }
        }
        Ok(self)
    }

    async fn show(&mut self, applier: &Applier) {
        self.placement.follow(&self.state);
        let snapshot = Arc::new(self.placement.snapshot(&self.state));
        *applier.snapshot.borrow_mut() = snapshot.clone();
        self.install.install(snapshot).await;
    }

    fn shown(&self, applier: &Applier) {
        applier.shown_index.set(self.state.applied_index());
        applier.shown.notify_all();
    }

    async fn take_image(mut self, answer: Sender<Result<u64, String>>) -> Run<S> {
        let mut store = self.store;
        let (returned, begun) = rt::blocking(move || {
            let begun = store.begin_image();
            (store, begun)
        })
        .await;
        self.store = returned;
        let index = self.state.applied_index();
        // The copy is of this instant; entries go on meanwhile.
        rt::spawn(Queue::Background, async move {
            let copied = match begun {
                Ok(copy) => rt::blocking(copy).await,
                Err(error) => Err(error),
            };
            let _ = answer.send(copied.map(|()| index)); // nobody has to wait for it
        });
        self
    }

    async fn install_image(mut self, applier: &Applier, answer: Sender<u64>) -> Result<Run<S>, Stopped> {
        let mut store = self.store;
        let (returned, result) = rt::blocking(move || {
            let result = store.install_image();
            (store, result)
        })
        .await;
        self.store = returned;
        self.state = result.map_err(|error| Stopped::refused(format!("a received metadata snapshot: {error}")))?;
        *applier.state.borrow_mut() = self.state.clone();
        applier.tell(&self.state);
        self.show(applier).await;
        self.shown(applier);
        let _ = answer.send(self.state.applied_index()); // the driver may have stopped
        Ok(self)
    }
}

/// Stores a batch off this thread. A refusing disk is asked again until [`RETRY_TOTAL`] is over (lesson N70).
async fn commit<S: Storage>(
    mut store: S,
    batch: Arc<Batch>,
    newest_type: u64,
    watch: &MetastoreWatch,
) -> Result<S, Stopped> {
    let started = rt::now();
    let mut wait = RETRY_FIRST;
    loop {
        let attempt = batch.clone();
        let (returned, result) = rt::blocking(move || {
            let result = store.commit(&attempt);
            (store, result)
        })
        .await;
        store = returned;
        watch.stalled.store(result.is_err(), Relaxed);
        let Err(error) = result else { return Ok(store) };
        watch.write_errors.fetch_add(1, Relaxed);
        if wait == RETRY_FIRST {
            tracing::warn!(index = batch.applied_index, error, "metastore: could not write raft entry; retrying");
        }
        if rt::now() + wait > started + RETRY_TOTAL {
            let index = batch.applied_index;
            let build = env!("CARGO_PKG_VERSION");
            tracing::error!(index, entry_type = newest_type, build, error, "metastore: stopped applying raft entries");
            let why = format!("{error}; free or replace the disk, then start the node again");
            return Err(Stopped { why, underway: false });
        }
        rt::sleep(wait).await;
        wait = (wait * 2).min(RETRY_LONGEST);
    }
}
