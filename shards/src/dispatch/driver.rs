//! Runs the core: reads for it, commits for it, asks for it, and tells it the time.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use super::core::{Action, CommitId, Core, Limits, TopicLife};
use super::logging::{log, log_line, log_read_error};
use super::notices::Notices;
use super::DispatchMetrics;
use crate::api::{MetaCommand, MetaReply};
use crate::meta::{Address, Destination, NodeId, Snapshot};
use crate::peer::{Carrier, CommitBatch, CommitError, Committed, Reply, Request, Room};
use crate::rt::sync::{Notified, Notify};
use crate::rt::{self, Instant, Queue};
use crate::wal::{ReadBack, ReadLimit, Source};

/// What the dispatcher needs of its shard.
pub trait Environment {
    fn snapshot(&self) -> Arc<Snapshot>;

    /// `notify_all` after a newer snapshot is in place, or after membership changed its mind about a node.
    fn changed(&self) -> Notify;

    /// Carries commits to their owners and questions to the control thread.
    fn carrier(&self) -> Rc<dyn Carrier>;

    /// Address of the control thread.
    fn control(&self) -> Address;

    /// Whether membership reports a node alive.
    fn alive(&self, node: NodeId) -> bool;

    /// The process that a node last said hello with: what was measured of another one is void (E43).
    fn boot_id(&self, _node: NodeId) -> u64 {
        0
    }

    /// What people call a node of the cluster.
    fn name_of(&self, _node: NodeId) -> Option<Arc<str>> {
        None
    }
}

/// Turns before other tasks get the core: each may place one read's worth of records.
const TURNS_AT_ONCE: u32 = 2;

/// Something that a task of the dispatcher has to tell its loop.
enum Event {
    /// The second is the shard that answered, as far as it is known.
    Landed(CommitId, Address, Result<Committed, CommitError>),
    New(io::Result<ReadBack>),
    Skipped(io::Result<ReadBack>),
    Gone(TopicLife, bool),
}

struct Shared {
    source: Rc<dyn Source>,
    environment: Rc<dyn Environment>,
    core: RefCell<Core>,
    notices: RefCell<Notices>,
    events: RefCell<VecDeque<Event>>,
    wake: Notify,
    stopping: Cell<bool>,
    stopped: Cell<bool>,
    progress: Notify,
}

/// The dispatcher of one WAL directory (E18), running as a task of its shard until it is stopped; dropping this
/// handle does not stop it.
pub struct Dispatcher {
    shared: Rc<Shared>,
}

impl Dispatcher {
    /// Starts draining at the source's checkpoint.
    pub fn start(source: Rc<dyn Source>, environment: Rc<dyn Environment>, limits: Limits) -> Dispatcher {
        let core = Core::new(limits, source.recovered_checkpoint(), environment.snapshot(), rt::now());
        let shared = Rc::new(Shared {
            source,
            environment,
            core: RefCell::new(core),
            notices: RefCell::default(),
            events: RefCell::default(),
            wake: Notify::new(),
            stopping: Cell::new(false),
            stopped: Cell::new(false),
            progress: Notify::new(),
        });
        rt::spawn(Queue::Commit, run(shared.clone()));
        Dispatcher { shared }
    }

    /// Sends nothing more and waits for the commits in flight, at most until they count as hung (1 s). What is not
    /// done by then is dispatched after the next start.
    pub async fn stop(&self) {
        self.shared.stopping.set(true);
        self.shared.wake.notify_one();
        self.wait(|shared| shared.stopped.get()).await;
    }

    /// Waits until every record that is durable by then is done: an adopted directory can be removed (E18).
    pub async fn drained(&self) {
        self.wait(|shared| {
            shared.core.borrow().drained() && shared.core.borrow().checkpoint() >= shared.source.durable_next()
        })
        .await;
    }

    async fn wait(&self, reached: impl Fn(&Shared) -> bool) {
        loop {
            let progress = self.shared.progress.notified();
            if reached(&self.shared) {
                return;
            }
            progress.await;
        }
    }

    pub fn metrics(&self) -> DispatchMetrics {
        self.shared.core.borrow().metrics()
    }

    /// First sequence number that is not done.
    pub fn checkpoint(&self) -> u64 {
        self.shared.core.borrow().checkpoint()
    }
}

async fn run(shared: Rc<Shared>) {
    let durable = shared.source.durable_advanced();
    let changed = shared.environment.changed();
    let freed = shared.environment.carrier().room_freed();
    loop {
        // Listening starts before looking: what happens in between wakes the wait below.
        let events = [&durable, &changed, &shared.wake].map(Notify::notified);
        let freed = freed.notified();
        let mut turns = 0;
        while turn(&shared) {
            turns += 1;
            if turns % TURNS_AT_ONCE == 0 {
                rt::yield_now().await;
            }
        }
        shared.say_what_changed();
        shared.progress.notify_all();
        if shared.stopping.get() && !shared.core.borrow().settling() {
            shared.stopped.set(true);
            shared.progress.notify_all();
            return;
        }
        let timers = [shared.core.borrow().next_timer(), shared.notices.borrow().next()];
        let timer = timers.into_iter().flatten().min();
        if wait_for_any(events, freed, timer).await {
            shared.core.borrow_mut().room_freed();
        }
    }
}

/// Whether room came back.
async fn wait_for_any(mut events: [Notified; 3], mut freed: Notified, timer: Option<Instant>) -> bool {
    let mut timer = timer.map(rt::sleep_until);
    std::future::poll_fn(move |cx| {
        let notified = events.each_mut().map(|event| Pin::new(event).poll(cx).is_ready());
        let has_room = Pin::new(&mut freed).poll(cx).is_ready();
        let due = timer.as_mut().is_some_and(|timer| Pin::new(timer).poll(cx).is_ready());
        match due || has_room || notified.contains(&true) {
            true => Poll::Ready(has_room),
            false => Poll::Pending,
        }
    })
    .await
}

/// Tells the core all that happened and carries out what it wants. True when there may be more to do at once.
fn turn(shared: &Rc<Shared>) -> bool {
    tell(shared);
    let mut rooms = pump(shared);
    let mut acted = shared.core.borrow_mut().take_relieved();
    loop {
        let action = shared.core.borrow_mut().next_action();
        let Some(action) = action else { return acted };
        acted = true;
        match action {
            Action::ReadNew { from, until, limit } => read_new(shared, from, until, limit),
            Action::ReadSkipped { from, until, limit } => {
                let shared = shared.clone();
                rt::spawn(Queue::Commit, async move {
                    let wants = |seq| shared.core.borrow().wants(seq);
                    let read = shared.source.read_disk(from, until, limit, &wants).await;
                    shared.happened(Event::Skipped(read));
                });
            }
            Action::Commit { id, to, batch } => {
                let (shared, destination) = (shared.clone(), batch.destination);
                let room = take_room(&mut rooms, destination);
                rt::spawn(Queue::Commit, async move {
                    let result = commit(&*shared.environment, to, batch, room).await;
                    let served = shared.environment.carrier().served_by(to, destination);
                    shared.happened(Event::Landed(id, served, result));
                });
            }
            Action::StoreCheckpoint(seq) => shared.source.store_checkpoint(seq),
            Action::AskGone(life) => {
                let shared = shared.clone();
                rt::spawn(Queue::Commit, async move {
                    let gone = ask_gone(&*shared.environment, &life).await;
                    shared.happened(Event::Gone(life, gone));
                });
            }
            Action::Report(report) => match report.peer() {
                Some(_) => shared.notices.borrow_mut().stir(rt::now()),
                None => log(&report, &*shared.environment),
            },
        }
    }
}

/// The core decides; the rooms that it took are in the order of its commits.
fn pump(shared: &Shared) -> Rooms {
    let (carrier, mut rooms) = (shared.environment.carrier(), Rooms::new());
    let mut take = |to, destination, bytes: usize| match carrier.room(to, destination, bytes as u64) {
        Some(room) => {
            rooms.push_back((destination, room));
            true
        }
        None => false,
    };
    shared.core.borrow_mut().pump(&mut take);
    rooms
}

type Rooms = VecDeque<(Destination, Room)>;

/// The room of the commit that comes next. One that was taken for nothing is given back.
fn take_room(rooms: &mut Rooms, destination: Destination) -> Option<Room> {
    let at = rooms.iter().position(|(of, _)| *of == destination)?;
    rooms.drain(..at);
    rooms.pop_front().map(|(_, room)| room)
}

fn tell(shared: &Rc<Shared>) {
    let mut core = shared.core.borrow_mut();
    core.advance(rt::now());
    core.install(shared.environment.snapshot());
    let environment = &shared.environment;
    let look = |node: &NodeId| (*node, environment.alive(*node), environment.boot_id(*node));
    let nodes: Vec<(NodeId, bool, u64)> = core.nodes().iter().map(look).collect();
    for (node, alive, boot_id) in nodes {
        core.liveness(node, alive);
        core.boot(node, boot_id);
    }
    loop {
        let event = shared.events.borrow_mut().pop_front();
        match event {
            None => break,
            Some(Event::Landed(id, served, result)) => core.landed(id, served, result),
            Some(Event::Gone(life, gone)) => core.gone(life, gone),
            Some(Event::New(Ok(read))) => core.new_records(read, false),
            Some(Event::Skipped(Ok(read))) => core.skipped_records(read),
            Some(Event::New(Err(error))) => {
                log_read_error(&error);
                core.read_failed(true);
            }
            Some(Event::Skipped(Err(error))) => {
                log_read_error(&error);
                core.read_failed(false);
            }
        }
    }
    core.durable(shared.source.durable_next());
    if shared.source.staging_low() {
        core.staging_low();
    }
    if shared.stopping.get() {
        core.stop();
    }
}

impl Shared {
    /// Of other nodes, in their log lines.
    fn say_what_changed(&self) {
        let (now, mut notices) = (rt::now(), self.notices.borrow_mut());
        if notices.is_due(now) {
            let troubles = self.core.borrow().troubles();
            notices.look(&troubles, now).iter().for_each(|line| log_line(line, &*self.environment));
        }
    }

    fn happened(&self, event: Event) {
        self.events.borrow_mut().push_back(event);
        self.wake.notify_one();
    }
}

/// New records come from staging memory while they are still there, else from disk.
fn read_new(shared: &Rc<Shared>, from: u64, until: u64, limit: ReadLimit) {
    if let Some(read) = shared.source.read_memory(from, limit) {
        return shared.core.borrow_mut().new_records(read, true);
    }
    let shared = shared.clone();
    rt::spawn(Queue::Commit, async move {
        let read = shared.source.read_disk(from, until, limit, &|_| true).await;
        shared.happened(Event::New(read));
    });
}

/// Runs to the reply, however late: the batch's buffers are lent to the owner until then (E21).
async fn commit(
    environment: &dyn Environment,
    to: Address,
    batch: CommitBatch,
    room: Option<Room>,
) -> Result<Committed, CommitError> {
    let carrier = environment.carrier();
    let answer = match room {
        Some(room) => carrier.commit(to, batch, room).await,
        None => carrier.call(to, Request::Commit(batch)).await,
    };
    match answer {
        Ok(Reply::Commit(result)) => result,
        Ok(_) => Err(CommitError::Unreachable("the owner answered something else than a commit".into())),
        Err(lost) => Err(CommitError::Unreachable(lost.0)),
    }
}

/// Anything but a plain yes leaves the records where they are (lesson N11).
async fn ask_gone(environment: &dyn Environment, life: &TopicLife) -> bool {
    let carrier = environment.carrier();
    let question = MetaCommand::ConfirmGone { name: life.topic.to_string(), incarnation: life.incarnation };
    matches!(carrier.call(environment.control(), Request::Meta(question)).await, Ok(Reply::Meta(MetaReply::Gone)))
}
