//! Commits travel on credit (E41): how many bytes of commits each shard of another node takes from this one at a time.
//!
//! The other side grants a window in its hello and may change it with every reply. One commit larger than the window goes
//! alone. A dispatcher asks before it makes a batch, so what does not fit stays on its queue; whoever else commits (the
//! synchronous produce, a batch that went to the wrong shard first) waits here, first come first served. What waits has not left: when its budget ends it is not
//! applied for certain.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use super::ConnectionId;
use crate::rt;
use crate::rt::sync::{oneshot, Notify, Sender};

#[derive(Default)]
struct Window {
    connection: Option<ConnectionId>,
    granted_bytes: u64,
    used_bytes: u64,
    waiting: VecDeque<(u64, Sender<Credit>)>,
}

impl Window {
    /// Those who have given up hold nobody up; and no credit is made for them, whose drop would come back here.
    fn forget_gone(&mut self) {
        while self.waiting.front().is_some_and(|(_, sender)| sender.is_closed()) {
            self.waiting.pop_front();
        }
    }

    fn fits(&self, bytes: u64) -> bool {
        self.used_bytes == 0 || self.used_bytes + bytes <= self.granted_bytes
    }
}

/// The windows of all shards that commits go to.
#[derive(Clone, Default)]
pub(super) struct Credits {
    windows: Rc<RefCell<BTreeMap<SocketAddr, Window>>>,
    freed: Notify,
}

/// Bytes of one commit under way; given back when the call has ended, however.
pub struct Credit {
    credits: Credits,
    to: SocketAddr,
    bytes: u64,
}

impl Credits {
    /// The connection that requests take now, and what its other side has granted. A new one voids the old grant.
    pub fn connected(&self, to: SocketAddr, connection: Option<ConnectionId>, granted_bytes: u64) {
        {
            let mut windows = self.windows.borrow_mut();
            let window = windows.entry(to).or_default();
            if window.connection == connection {
                return;
            }
            window.connection = connection;
            window.granted_bytes = granted_bytes;
        }
        self.go_on(to);
    }

    /// The other side grants so much from now on.
    pub fn granted(&self, to: SocketAddr, granted_bytes: u64) {
        if let Some(window) = self.windows.borrow_mut().get_mut(&to) {
            window.granted_bytes = granted_bytes;
        }
        self.go_on(to);
    }

    /// Bytes in use, and granted.
    pub fn measure(&self, to: SocketAddr) -> (u64, u64) {
        self.windows.borrow().get(&to).map_or((0, 0), |window| (window.used_bytes, window.granted_bytes))
    }

    /// `notify_all` whenever there may be more than before.
    pub fn freed(&self) -> Notify {
        self.freed.clone()
    }

    /// `None`: there is none now, or others wait for it already.
    pub fn take_now(&self, to: SocketAddr, bytes: u64) -> Option<Credit> {
        let mut windows = self.windows.borrow_mut();
        let window = windows.entry(to).or_default();
        window.forget_gone();
        let granted = window.waiting.is_empty() && window.fits(bytes);
        granted.then(|| {
            window.used_bytes += bytes;
            Credit { credits: self.clone(), to, bytes }
        })
    }

    /// `None`: there was none within `patience`.
    pub async fn take(&self, to: SocketAddr, bytes: u64, patience: Duration) -> Option<Credit> {
        if let Some(credit) = self.take_now(to, bytes) {
            return Some(credit);
        }
        let (sender, receiver) = oneshot();
        self.windows.borrow_mut().entry(to).or_default().waiting.push_back((bytes, sender));
        rt::timeout(patience, receiver).await.ok().flatten()
    }

    /// Hands out what there is to those who wait.
    fn go_on(&self, to: SocketAddr) {
        loop {
            let next = {
                let mut windows = self.windows.borrow_mut();
                let Some(window) = windows.get_mut(&to) else { return };
                window.forget_gone();
                match window.waiting.front() {
                    Some((bytes, _)) if window.fits(*bytes) => {
                        let next = window.waiting.pop_front();
                        window.used_bytes += next.as_ref().map_or(0, |(bytes, _)| *bytes);
                        next
                    }
                    _ => None,
                }
            };
            let Some((bytes, sender)) = next else { break };
            drop(sender.send(Credit { credits: self.clone(), to, bytes }));
        }
        self.freed.notify_all();
    }
}

impl Credit {
    pub(super) fn is_for(&self, to: SocketAddr) -> bool {
        self.to == to
    }
}

impl Drop for Credit {
    fn drop(&mut self) {
        if let Some(window) = self.credits.windows.borrow_mut().get_mut(&self.to) {
            window.used_bytes = window.used_bytes.saturating_sub(self.bytes);
        }
        self.credits.go_on(self.to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rt::{sim, Queue};
    use std::cell::Cell;

    fn address() -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], 1))
    }

    #[test]
    fn e41_what_does_not_fit_waits_its_turn_and_a_large_one_goes_alone() {
        sim::run(1, async {
            let credits = Credits::default();
            credits.connected(address(), Some(ConnectionId(1)), 100);
            let patience = Duration::from_secs(1);
            let first = credits.take(address(), 60, patience).await.expect("fits");
            let order: Rc<RefCell<Vec<u64>>> = Rc::default();
            let tasks: Vec<_> = [500, 30]
                .into_iter()
                .map(|bytes| {
                    let (credits, order) = (credits.clone(), order.clone());
                    rt::spawn(Queue::Commit, async move {
                        rt::sleep(Duration::from_millis(if bytes == 30 { 5 } else { 0 })).await;
                        let credit = credits.take(address(), bytes, patience).await.expect("in time");
                        order.borrow_mut().push(bytes);
                        rt::sleep(Duration::from_millis(10)).await;
                        drop(credit);
                    })
                })
                .collect();
            rt::sleep(Duration::from_millis(20)).await;
            assert!(order.borrow().is_empty(), "30 would fit, but came later");
            drop(first);
            for task in tasks {
                task.await;
            }
            assert_eq!(*order.borrow(), [500, 30]);
        });
    }

    #[test]
    fn e41_whoever_gave_up_waiting_holds_nobody_up() {
        sim::run(2, async {
            let credits = Credits::default();
            credits.connected(address(), Some(ConnectionId(1)), 100);
            let first = credits.take_now(address(), 70).expect("fits");
            // So many that a step on the stack for each would be one too many.
            let gone: Vec<_> =
                (0..200_000).map(|_| Box::pin(credits.take(address(), 90, Duration::from_millis(1)))).collect();
            assert!(rt::all(gone).await.iter().all(Option::is_none));
            let second = credits.take_now(address(), 30).expect("nobody waits before it");
            drop((first, second));
            assert_eq!(credits.measure(address()), (0, 100));
        });
    }

    #[test]
    fn e41_room_is_taken_at_once_or_not_at_all_and_whoever_was_refused_hears_when_some_comes_back() {
        sim::run(1, async {
            let credits = Credits::default();
            credits.connected(address(), Some(ConnectionId(1)), 100);
            let first = credits.take_now(address(), 70).expect("fits");
            let elsewhere = SocketAddr::from(([127, 0, 0, 1], 2));
            assert!(!first.is_for(elsewhere) && first.is_for(address()));
            assert!(credits.take_now(address(), 31).is_none());
            let second = credits.take_now(address(), 30).expect("fits beside it");
            let (freed, told) = (credits.freed().notified(), rt::now());
            rt::spawn(Queue::Commit, async move {
                rt::sleep(Duration::from_millis(3)).await;
                drop(first);
            });
            freed.await;
            assert_eq!(rt::now() - told, Duration::from_millis(3));
            // Whoever waits for room goes before those who only ask.
            let (waits, patience) = (credits.clone(), Duration::from_secs(1));
            let waiting = rt::spawn(Queue::Commit, async move { waits.take(address(), 90, patience).await.is_some() });
            rt::sleep(Duration::from_millis(1)).await;
            assert!(credits.take_now(address(), 1).is_none());
            drop(second);
            assert!(waiting.await);
        });
    }

    #[test]
    fn e41_one_that_gave_up_takes_nothing_and_a_grant_lets_others_go() {
        sim::run(1, async {
            let credits = Credits::default();
            let held = credits.take(address(), 10, Duration::ZERO).await.expect("the first goes without a grant");
            assert!(credits.take(address(), 10, Duration::from_millis(1)).await.is_none(), "no connection, no grant");
            let got: Rc<Cell<bool>> = Rc::default();
            let (seen, other) = (got.clone(), credits.clone());
            let task = rt::spawn(Queue::Commit, async move {
                let credit = other.take(address(), 10, Duration::from_secs(1)).await;
                seen.set(credit.is_some());
            });
            rt::sleep(Duration::from_millis(1)).await;
            credits.connected(address(), Some(ConnectionId(2)), 20);
            task.await;
            assert!(got.get());
            drop(held);
            let all = credits.take(address(), 20, Duration::ZERO).await;
            assert!(all.is_some(), "everything came back");
        });
    }
}
