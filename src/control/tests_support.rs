//! A consensus that does as it is told, and small clusters, for the tests of controller and membership.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use narad_shards::peer::LocalBoxFuture;
use narad_shards::rt::{self, Instant};
use narad_shards::wire::{Incoming, Kind, Outgoing};

use super::tests::{Shards, Shelf};
use super::*;

/// A frame as the other side gets it.
pub fn arrived(frame: &Outgoing, kind: Kind) -> Incoming {
    frame.arrived(kind, 1).expect("within the limit")
}

/// A log without consensus: the next command is decided by being asked for.
pub struct Alone {
    applier: Rc<Applier>,
    next_index: Cell<u64>,
}

impl Alone {
    pub fn new(applier: Rc<Applier>) -> Alone {
        let next_index = Cell::new(applier.applied_index() + 1);
        Alone { applier, next_index }
    }
}

impl Log for Alone {
    fn propose(&self, command: Command) -> LocalBoxFuture<'static, Result<Outcome, Stopped>> {
        let index = self.next_index.replace(self.next_index.get() + 1);
        let decided = self.applier.submit(index, command);
        Box::pin(decided)
    }

    fn barrier(&self) -> LocalBoxFuture<'static, Result<(), Stopped>> {
        // Whatever was answered is in the snapshot already; what was not answered is decided by nobody else.
        let stopped = self.applier.stopped();
        Box::pin(async move { stopped.map_or(Ok(()), Err) })
    }

    fn live_topic(&self, name: &str) -> LocalBoxFuture<'static, Result<Option<Incarnation>, Stopped>> {
        let live = self.applier.state().topics().get(name).map(|topic| topic.incarnation);
        Box::pin(async move { Ok(live) })
    }
}

pub fn raft_id(node: &str) -> u64 {
    1000 + u64::from(node.as_bytes()[0])
}

pub fn told(node: &str) -> Arc<Registration> {
    Arc::new(Registration {
        node: Arc::from(node),
        raft_id: raft_id(node),
        peer_address: Arc::from(format!("{node}:7943")),
        client_address: Arc::from(format!("{node}:7942")),
        build: Arc::from("0.1.0"),
        newest_command_type: Command::NEWEST_TYPE,
    })
}

pub fn register(node: &str, stamp_ms: u64) -> Command {
    Command::RegisterMember { registration: told(node), stamp_ms }
}

pub fn do_one(state: &mut State, command: &Command) -> Outcome {
    let applied = apply(state, command);
    state.absorb(state.applied_index() + 1, &applied.changes);
    applied.outcome
}

/// A founded cluster whose members are `nodes`, with numbers from 1.
pub fn cluster(nodes: &[&str]) -> State {
    let mut state = State::default();
    do_one(&mut state, &Command::SetClusterId(5));
    for node in nodes {
        do_one(&mut state, &register(node, 1));
    }
    state
}

pub fn server(node: &str, voter: bool) -> Server {
    Server { raft_id: raft_id(node), node: Arc::from(node), address: Arc::from(format!("{node}:7943")), voter }
}

/// As the first of `voters` sees it, which leads since the start of time.
pub fn led(voters: &[&str], learners: &[&str]) -> View {
    let servers = voters.iter().map(|node| server(node, true)).chain(learners.iter().map(|node| server(node, false)));
    let me = raft_id(voters[0]);
    View { raft_id: me, term: 1, leads: true, leader: Some(me), servers: servers.collect(), ..View::default() }
}

pub fn seconds(seconds: u64) -> Instant {
    Instant(0) + Duration::from_secs(seconds)
}

#[derive(Default)]
pub struct Told {
    pub view: RefCell<View>,
}

impl Told {
    fn put(&self, server: &Server) -> LocalBoxFuture<'static, Result<(), String>> {
        let mut view = self.view.borrow_mut();
        view.servers.retain(|known| known.raft_id != server.raft_id);
        view.servers.push(server.clone());
        Box::pin(async { Ok(()) })
    }
}

impl Consensus for Told {
    fn view(&self) -> View {
        self.view.borrow().clone()
    }

    fn add_learner(&self, server: &Server) -> LocalBoxFuture<'static, Result<(), String>> {
        self.put(&Server { voter: false, ..server.clone() })
    }

    fn promote(&self, server: &Server) -> LocalBoxFuture<'static, Result<(), String>> {
        self.put(&Server { voter: true, ..server.clone() })
    }

    fn remove(&self, raft_id: u64) -> LocalBoxFuture<'static, Result<(), String>> {
        self.view.borrow_mut().servers.retain(|known| known.raft_id != raft_id);
        Box::pin(async { Ok(()) })
    }
}

/// The log of a leader: asks its controller for the last word, and keeps what was proposed.
pub struct LeaderLog {
    alone: Alone,
    pub controller: RefCell<Weak<Controller>>,
    pub proposed: RefCell<Vec<Command>>,
    /// Lets a barrier pass only after this time.
    pub barrier_wait: Cell<Duration>,
    pub barriers: Cell<u32>,
    /// What the leader says of any topic; its own state's word when that is `None`.
    pub leader_says: RefCell<Option<Result<Option<Incarnation>, Stopped>>>,
    /// What happens right before a proposal enters.
    pub before_propose: RefCell<Option<Box<dyn Fn()>>>,
}

impl Log for LeaderLog {
    fn propose(&self, command: Command) -> LocalBoxFuture<'static, Result<Outcome, Stopped>> {
        let controller = self.controller.borrow().upgrade();
        let prepared = controller.map_or(Ok(command.clone()), |controller| controller.prepare(command));
        let decided = match prepared {
            Ok(command) => {
                self.proposed.borrow_mut().push(command.clone());
                self.alone.propose(command)
            }
            Err(why) => Box::pin(async move { Err(Stopped::refused(why)) }),
        };
        if let Some(before) = &*self.before_propose.borrow() {
            before();
        }
        decided
    }

    fn barrier(&self) -> LocalBoxFuture<'static, Result<(), Stopped>> {
        self.barriers.set(self.barriers.get() + 1);
        let wait = self.barrier_wait.get();
        Box::pin(async move {
            rt::sleep(wait).await;
            Ok(())
        })
    }

    fn live_topic(&self, name: &str) -> LocalBoxFuture<'static, Result<Option<Incarnation>, Stopped>> {
        match self.leader_says.borrow().clone() {
            Some(said) => Box::pin(async move { said }),
            None => self.alone.live_topic(name),
        }
    }
}

pub struct Node {
    pub applier: Rc<Applier>,
    pub log: Rc<LeaderLog>,
    pub consensus: Rc<Told>,
    pub controller: Rc<Controller>,
}

/// The node `me` over `state`, with nothing running but its applier.
pub fn node(me: &str, state: State, view: View) -> Node {
    let shelf = Shelf::default();
    let stored = Batch { applied_index: state.applied_index(), changes: state.rows() };
    shelf.clone().commit(&stored).unwrap();
    let install = Rc::new(Shards { shelf: shelf.clone(), installed: Rc::default() });
    let applier = Applier::start(Metastore::over(shelf, state, Placement::in_cluster(2, me)), install);
    let log = Rc::new(LeaderLog {
        alone: Alone::new(applier.clone()),
        controller: RefCell::default(),
        proposed: RefCell::default(),
        barrier_wait: Cell::new(Duration::from_millis(1)),
        barriers: Cell::new(0),
        leader_says: RefCell::default(),
        before_propose: RefCell::default(),
    });
    let consensus = Rc::new(Told { view: RefCell::new(view) });
    let controller = Controller::new(log.clone(), applier.clone(), consensus.clone(), told(me));
    *log.controller.borrow_mut() = Rc::downgrade(&controller);
    Node { applier, log, consensus, controller }
}
