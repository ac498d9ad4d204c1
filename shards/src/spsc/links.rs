//! A thread's links in use: the carrier between cores.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use rtrb::Consumer;

use super::bell::{published, Parking};
use super::calls::{Answer, Calls};
use super::outbox::Outbox;
use super::{Bells, Doorbell, Endpoint, Message, Pair};
use crate::meta::{Address, NodeId, ShardId};
use crate::peer::{Carrier, LocalBoxFuture, Lost, Reply, Request};
use crate::rt::sync::{self, Receiver, Sender};
use crate::rt::{self, Inbox, Queue};

/// Answers requests of other threads, and of the own one. For a one-way request the reply is dropped.
pub type Handler = Rc<dyn Fn(Address, Request) -> LocalBoxFuture<'static, Reply>>;

struct Link {
    peer: ShardId,
    /// Position of the peer's bell.
    position: usize,
    outbox: RefCell<Outbox<Message>>,
    inbox: RefCell<Consumer<Message>>,
    peer_hungry: Arc<Parking>,
    calls: RefCell<Calls>,
    gone: Cell<bool>,
}

/// See [`Endpoint::attach`]. Implements [`Carrier`].
pub struct Links {
    me: ShardId,
    position: usize,
    links: Vec<Link>,
    bells: Bells,
    handler: Handler,
    /// Requests to the own shard that have not begun.
    own: RefCell<VecDeque<(Request, Option<Sender<Answer>>)>>,
    /// A task is there that has them begin.
    own_begins: Cell<bool>,
    this: Weak<Links>,
}

impl Endpoint {
    /// Starts to receive on the calling thread's runtime; `handler` answers. Once per endpoint.
    pub fn attach(self, handler: Handler) -> Rc<Links> {
        let links = Rc::new_cyclic(|this: &Weak<Links>| Links {
            me: self.me,
            position: self.position,
            links: self
                .pairs
                .into_iter()
                .map(|Pair { peer, position, to, from, hungry: [our_hungry, peer_hungry] }| Link {
                    peer,
                    position,
                    outbox: RefCell::new(Outbox::new(to, our_hungry)),
                    inbox: RefCell::new(from),
                    peer_hungry,
                    calls: RefCell::default(),
                    gone: Cell::new(false),
                })
                .collect(),
            bells: self.bells,
            handler,
            own: RefCell::default(),
            own_begins: Cell::new(false),
            this: this.clone(),
        });
        let inbox: Rc<dyn Inbox> = Rc::new(WeakInbox(Rc::downgrade(&links)));
        let bell = match rt::add_inbox(inbox) {
            Some(bell) => bell,
            None => {
                let bell = Arc::new(Doorbell::of_task());
                rt::spawn(Queue::Foreground, serve(Rc::downgrade(&links), bell.clone()));
                bell
            }
        };
        let set = links.bells[links.position].set(bell);
        assert!(set.is_ok(), "an endpoint is attached once");
        // What was sent before the bell hung is looked at in the first turn, which has not begun yet.
        links
    }
}

/// The runtime's hold on the links: it must not keep them alive.
struct WeakInbox(Weak<Links>);

impl Inbox for WeakInbox {
    fn drain(&self) -> bool {
        self.0.upgrade().is_some_and(|links| links.drain())
    }

    fn is_empty(&self) -> bool {
        self.0.upgrade().is_none_or(|links| links.nothing_to_take())
    }
}

/// The inbox where no loop polls it: a task that sleeps until the bell is rung.
async fn serve(links: Weak<Links>, bell: Arc<Doorbell>) {
    std::future::poll_fn(|cx| loop {
        let Some(links) = links.upgrade() else { return Poll::Ready(()) };
        bell.parking.unpark();
        links.drain();
        bell.set_task(cx.waker());
        bell.parking.park();
        if links.nothing_to_take() {
            return Poll::Pending;
        }
    })
    .await
}

impl Links {
    pub fn address(&self) -> Address {
        Address::local(self.me)
    }

    /// Calls without an answer yet, and messages that found no room in a ring yet, over all links.
    pub fn depth(&self) -> (usize, usize) {
        let calls = self.links.iter().map(|link| link.calls.borrow().pending()).sum();
        let waiting = self.links.iter().map(|link| link.outbox.borrow().waiting()).sum();
        (calls, waiting)
    }

    fn link(&self, shard: ShardId) -> Option<&Link> {
        // Built in order of position, the own one left out.
        let at = self.links.binary_search_by_key(&shard, |link| link.peer).ok()?;
        Some(&self.links[at])
    }

    fn ring(&self, link: &Link) {
        // Before the bell is looked for: a receiver that hangs it later looks at the rings later still.
        published();
        if let Some(bell) = self.bells[link.position].get() {
            bell.ring_published();
        }
    }

    /// Whether a turn would do nothing: no message to take, no waiting one that fits by now, no peer to mourn.
    fn nothing_to_take(&self) -> bool {
        self.links.iter().all(|link| {
            let inbox = link.inbox.borrow();
            let mourn = inbox.is_abandoned() && !link.gone.get();
            inbox.is_empty() && !mourn && !link.outbox.borrow().has_room()
        })
    }

    /// Takes what the rings hold now, and sends what waited for room.
    fn drain(&self) -> bool {
        let mut any = false;
        for link in &self.links {
            // Abandoned first: what was pushed before is seen after.
            let abandoned = link.inbox.borrow().is_abandoned();
            let count = link.inbox.borrow().slots();
            for _ in 0..count {
                let message = link.inbox.borrow_mut().pop();
                let Ok(message) = message else { break };
                self.take(link, message);
            }
            any |= count > 0;
            let sent = link.outbox.borrow_mut().flush();
            if count > 0 {
                published();
            }
            // Tells the peer of messages, and of room if it waits for some.
            if sent || (count > 0 && link.peer_hungry.must_wake()) {
                self.ring(link);
            }
            if abandoned && !link.gone.replace(true) {
                any = true;
                let waiting = link.calls.borrow_mut().end_all();
                for caller in waiting {
                    let _ = caller.send(Err(lost(link.peer))); // a caller that has gone asks nothing
                }
            }
        }
        any
    }

    fn take(&self, link: &Link, message: Message) {
        match message {
            Message::Reply { id, answer } => {
                let caller = link.calls.borrow_mut().end(id);
                if let Some(caller) = caller {
                    let _ = caller.send(answer); // a late reply to a caller that has gone is discarded
                }
            }
            Message::Send(request) => self.begin(Address::local(link.peer), request, drop),
            Message::Call { id, request } => {
                let (this, peer) = (self.this.clone(), link.peer);
                self.begin(Address::local(link.peer), request, move |reply| {
                    let Some(this) = this.upgrade() else { return };
                    if let Some(link) = this.link(peer) {
                        link.outbox.borrow_mut().push_reply(Message::Reply { id, answer: Ok(reply) });
                        this.ring(link);
                    }
                });
            }
        }
    }

    /// Has the handler begin with a request at once, so that requests of one sender begin in the order in which
    /// they were sent (an `Unpark` behind its `Park`); what is not answered then goes on as a task.
    fn begin(&self, from: Address, request: Request, done: impl FnOnce(Reply) + 'static) {
        let queue = queue_of(&request);
        let mut reply = (self.handler)(from, request);
        // The task polls again with a waker of its own before anything is waited for.
        match reply.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(reply) => done(reply),
            Poll::Pending => drop(rt::spawn(queue, async move { done(reply.await) })),
        }
    }

    /// Requests to the own shard: no ring, but begun by a task, never inside the caller's own borrows.
    fn begin_own(&self, request: Request, caller: Option<Sender<Answer>>) {
        let this = self.this.clone();
        let begin = |this: &Links, request, caller: Option<Sender<Answer>>| {
            this.begin(this.address(), request, move |reply| {
                if let Some(caller) = caller {
                    let _ = caller.send(Ok(reply)); // a caller that has gone asks nothing
                }
            });
        };
        // A commit waits for nothing but its own queue: it keeps its order by itself, one in flight a partition.
        if queue_of(&request) == Queue::Commit {
            rt::spawn(Queue::Commit, async move {
                if let Some(this) = this.upgrade() {
                    begin(&this, request, caller);
                }
            });
            return;
        }
        self.own.borrow_mut().push_back((request, caller));
        if self.own_begins.replace(true) {
            return; // the task that takes the ones before takes this one as well
        }
        rt::spawn(Queue::Foreground, async move {
            let Some(this) = this.upgrade() else { return };
            while let Some((request, caller)) = { this.own.borrow_mut().pop_front() } {
                begin(&this, request, caller);
            }
            this.own_begins.set(false);
        });
    }
}

/// Consume and commit have shares of their own, so that produce cannot starve them.
fn queue_of(request: &Request) -> Queue {
    match request {
        Request::Commit(_) => Queue::Commit,
        Request::Claim { .. }
        | Request::Park { .. }
        | Request::NodeClaim { .. }
        | Request::ReadAt { .. }
        | Request::Settle { .. } => Queue::Consume,
        _ => Queue::Foreground,
    }
}

fn name(shard: ShardId) -> String {
    match shard {
        super::CONTROL => "the control thread".to_owned(),
        shard => format!("shard {shard}"),
    }
}

fn lost(shard: ShardId) -> Lost {
    Lost(format!("{} has stopped", name(shard)))
}

async fn answered(answer: Receiver<Answer>) -> Answer {
    answer.await.unwrap_or_else(|| Err(Lost("this shard stops".to_owned())))
}

impl Carrier for Links {
    fn call(&self, to: Address, request: Request) -> LocalBoxFuture<'static, Result<Reply, Lost>> {
        if to == self.address() {
            let (sender, answer) = sync::oneshot();
            self.begin_own(request, Some(sender));
            return Box::pin(answered(answer));
        }
        let link = match self.link(to.shard) {
            Some(link) if to.node == NodeId::LOCAL => link,
            _ => return Box::pin(std::future::ready(Err(Lost(format!("no link to {to:?}"))))),
        };
        if link.gone.get() || link.outbox.borrow().is_abandoned() {
            return Box::pin(std::future::ready(Err(lost(to.shard))));
        }
        let (id, answer) = link.calls.borrow_mut().begin();
        link.outbox.borrow_mut().push_request(Message::Call { id, request });
        self.ring(link);
        Box::pin(answered(answer))
    }

    fn send(&self, to: Address, request: Request) {
        if to == self.address() {
            self.begin_own(request, None);
            return;
        }
        if let Some(link) = self.link(to.shard).filter(|_| to.node == NodeId::LOCAL) {
            link.outbox.borrow_mut().push_request(Message::Send(request));
            self.ring(link);
        }
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        // The ends of the rings go first, then everybody is told to look.
        let links = std::mem::take(&mut self.links);
        let positions: Vec<usize> = links.iter().map(|link| link.position).collect();
        drop(links);
        for position in positions {
            if let Some(bell) = self.bells[position].get() {
                bell.ring();
            }
        }
    }
}
