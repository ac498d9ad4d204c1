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

/// Entries that one transaction takes at most.
const BATCH_ENTRIES_MAX: usize = 256;
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_LONGEST: Duration = Duration::from_secs(5);
const RETRY_TOTAL: Duration = Duration::from_secs(30);

struct Entry {
    index: u64,
    command: Command,
    answer: Sender<Outcome>,
}

pub struct Applier {
    queue: RefCell<VecDeque<Entry>>,
    queued: Notify,
    /// Holds durable changes only.
    snapshot: RefCell<Arc<Snapshot>>,
    /// What is stored. The run task is ahead of it while it stores a batch.
    state: RefCell<State>,
    trust: Cell<bool>,
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
        let stopped = self.stopped();
        if stopped.is_none() {
            self.queue.borrow_mut().push_back(Entry { index, command, answer });
            self.queued.notify_one();
        }
        async move {
            match stopped {
                Some(stopped) => Err(stopped),
                None => receiver.await.ok_or_else(|| Stopped {
                    why: "this node can no longer store metadata, and stops".to_owned(),
                    underway: true,
                }),
            }
        }
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

    fn stop(&self, why: Stopped) {
        self.watch.stopped.store(true, Relaxed);
        *self.stopped.borrow_mut() = Some(why);
        self.queue.borrow_mut().clear(); // their waiters learn that the outcome is unknown
        self.has_stopped.notify_all();
    }

    /// At least one, unless ownership may be trusted from now on.
    async fn next_entries(&self) -> Vec<Entry> {
        loop {
            let woken = self.queued.notified();
            let entries: Vec<Entry> = {
                let mut queue = self.queue.borrow_mut();
                let take = queue.len().min(BATCH_ENTRIES_MAX);
                queue.drain(..take).collect()
            };
            if !entries.is_empty() || self.trust.get() {
                return entries;
            }
            woken.await;
        }
    }
}

async fn run<S: Storage>(
    applier: Rc<Applier>,
    mut store: S,
    mut state: State,
    mut placement: Placement,
    install: Rc<dyn Install>,
) {
    loop {
        let entries = applier.next_entries().await;
        let mut batch = Batch::default();
        let mut answers = Vec::with_capacity(entries.len());
        for entry in entries {
            let applied = apply(&state, &entry.command);
            state.absorb(entry.index, &applied.changes);
            batch.applied_index = entry.index;
            batch.newest_command_type = batch.newest_command_type.max(entry.command.type_number());
            batch.changes.extend(applied.changes);
            answers.push((entry.answer, applied.outcome));
        }
        let mut shown = batch.changes.iter().any(Change::shows_in_snapshot);
        if !answers.is_empty() {
            let batch = Arc::new(batch);
            store = match commit(store, batch.clone(), &applier.watch).await {
                Ok(store) => store,
                Err(stopped) => return applier.stop(stopped),
            };
            applier.state.borrow_mut().absorb(batch.applied_index, &batch.changes);
            applier.tell(&state);
        }
        if applier.trust.take() {
            placement.trust();
            shown = true;
        }
        if shown {
            placement.follow(&state);
            let snapshot = Arc::new(placement.snapshot(&state));
            *applier.snapshot.borrow_mut() = snapshot.clone();
            install.install(snapshot).await;
        }
        for (answer, outcome) in answers {
            let _ = answer.send(outcome); // the client may have gone
        }
    }
}

/// Stores a batch off this thread. A refusing disk is asked again until [`RETRY_TOTAL`] is over (lesson N70).
async fn commit<S: Storage>(mut store: S, batch: Arc<Batch>, watch: &MetastoreWatch) -> Result<S, Stopped> {
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
            tracing::error!(
                index,
                entry_type = batch.newest_command_type,
                build,
                error,
                "metastore: stopped applying raft entries"
            );
            let why = format!("{error}; free or replace the disk, then start the node again");
            return Err(Stopped { why, underway: false });
        }
        rt::sleep(wait).await;
        wait = (wait * 2).min(RETRY_LONGEST);
    }
}
