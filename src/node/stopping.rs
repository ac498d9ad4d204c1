//! The order of a stop: not ready, ports, dispatch, durable ends.

use std::future::Future;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use narad_shards::io::system;
use narad_shards::meta::{Address, ShardId};
use narad_shards::peer::{Carrier, Request};
use narad_shards::rt;

use super::broker::NodeState;
use crate::control::{self, Stopped};

/// Part of the grace in which connections are still accepted; the rest is for requests that come at its end.
const NOTICE: f64 = 0.75;
/// With less than that free, the last writes of a stop may not fit.
const ROOM_BYTES: u64 = 64 << 20;
/// How often is looked whether balancers have seen that the node is not ready.
const LOOK: Duration = Duration::from_millis(20);

/// `timeout(1)` and some shells send one signal to the process and to its group: the same one twice, at once.
const ONE_SIGNAL: Duration = Duration::from_secs(1);

/// What to make of one more signal to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// The first.
    Stop,
    /// The first one once more.
    Again,
    /// Somebody does not want to wait.
    AtOnce,
}

/// The signals to stop that a process has got. Pure.
#[derive(Debug, Default)]
pub struct StopSignals {
    first: Option<(i32, Instant)>,
}

impl StopSignals {
    pub fn hear(&mut self, signal: i32, now: Instant) -> Heard {
        match self.first {
            None => {
                self.first = Some((signal, now));
                Heard::Stop
            }
            Some((first, at)) if first == signal && now.saturating_duration_since(at) < ONE_SIGNAL => Heard::Again,
            Some(_) => Heard::AtOnce,
        }
    }
}

/// Stops all shards. `hand_over` gives the leadership away, if this node has it. `cause` is why the node stops unasked,
/// because it can no longer store metadata (K17): then the same is done as far as the disk still allows, and what it was
/// is the error.
pub async fn stop(
    state: &NodeState,
    grace: Duration,
    links: &Rc<dyn Carrier>,
    hand_over: impl Future<Output = ()>,
    cause: Option<Stopped>,
) -> Result<(), String> {
    stop_serving(state, grace, links, hand_over).await;
    let end = async {
        ask_all(links, state.shards, || Request::Quiesce).await;
        make_room(state).await;
        ask_all(links, state.shards, || Request::Shutdown).await;
    };
    let Some(cause) = cause else {
        end.await;
        return Ok(());
    };
    // What was answered is on the disk; a disk that hangs must not keep the node from ending.
    let ended = rt::timeout(grace, Box::pin(end)).await;
    let hangs = if ended.is_ok() { "" } else { " (the shards could not be stopped in order either)" };
    Err(format!("metadata can no longer be stored: {}{hangs}", cause.why))
}

/// The last positions of consumers are worth more than space kept back for metadata that nobody will change any more:
/// without them a stop on a full disk brings acked records back. The next start takes the space again.
async fn make_room(state: &NodeState) {
    let root = state.figures.data_root.clone();
    let give = move || {
        let facts = system::file_system(&root);
        if facts.is_ok_and(|facts| facts.available_bytes < ROOM_BYTES) {
            control::give_ballast(&root.join("metastore"));
        }
    };
    rt::blocking(give).await;
}

/// Not ready first; then everything is answered as before while somebody has to learn of it: balancers, and clients
/// whose requests are under way. Then the ports close. Without any of these they close at once.
async fn stop_serving(
    state: &NodeState,
    grace: Duration,
    links: &Rc<dyn Carrier>,
    hand_over: impl Future<Output = ()>,
) {
    let began = rt::now();
    state.balancers.begin_stop();
    state.stopping.store(true, Ordering::Relaxed);
    let notice = grace.mul_f64(NOTICE);
    ask_all(links, state.shards, || Request::BeginDrain { within: notice }).await;
    // While clients are still served: nothing that they want has to wait for an election.
    hand_over.await;
    while state.balancers.wait_for(began) && rt::now() < began + notice {
        rt::sleep(LOOK).await;
    }
    let within = grace.saturating_sub(rt::now() - began);
    ask_all(links, state.shards, || Request::StopServing { within }).await;
}

/// Asks every shard and waits for all of them.
async fn ask_all(links: &Rc<dyn Carrier>, shards: ShardId, request: impl Fn() -> Request) {
    let asked: Vec<_> = (0..shards).map(|shard| links.call(Address::local(shard), request())).collect();
    drop(rt::all(asked).await); // a shard that has gone has nothing left to finish
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::Arc;

    use narad_shards::peer::{LocalBoxFuture, Lost, Reply};
    use narad_shards::rt::sim;

    use super::*;

    #[test]
    fn the_same_signal_within_a_second_is_one_and_any_other_ends_at_once() {
        let began = Instant::now();
        let after = |ms| began + Duration::from_millis(ms);
        let (int, term) = (2, 15);
        let mut signals = StopSignals::default();
        let heard = [(term, 0), (term, 0), (term, 999), (term, 1000), (term, 1001)];
        let heard = heard.map(|(signal, ms)| signals.hear(signal, after(ms)));
        assert_eq!(heard, [Heard::Stop, Heard::Again, Heard::Again, Heard::AtOnce, Heard::AtOnce]);
        let mut signals = StopSignals::default();
        assert_eq!([int, term].map(|signal| signals.hear(signal, began)), [Heard::Stop, Heard::AtOnce]);
    }

    /// Notes what is asked of which shard, and how ready the node was then.
    struct Shards {
        state: Arc<NodeState>,
        asked: RefCell<Vec<(ShardId, String, bool)>>,
        shutdown_hangs: bool,
    }

    impl Carrier for Shards {
        fn call(&self, to: Address, request: Request) -> LocalBoxFuture<'static, Result<Reply, Lost>> {
            let stopping = self.state.stopping.load(Ordering::Relaxed);
            let hangs = self.shutdown_hangs && matches!(request, Request::Shutdown);
            self.asked.borrow_mut().push((to.shard, format!("{request:?}"), stopping));
            Box::pin(async move {
                if hangs {
                    std::future::pending::<()>().await;
                }
                Ok(Reply::Done)
            })
        }

        fn send(&self, _to: Address, _request: Request) {}
    }

    const GRACE: Duration = Duration::from_secs(10);

    async fn stopped(shutdown_hangs: bool, cause: Option<Stopped>) -> (Result<(), String>, Vec<String>) {
        let state = Arc::new(NodeState { shards: 1, ..NodeState::default() });
        let shards = Rc::new(Shards { state: state.clone(), asked: RefCell::default(), shutdown_hangs });
        let links: Rc<dyn Carrier> = shards.clone();
        let result = stop(&state, GRACE, &links, std::future::ready(()), cause).await;
        let asked = shards.asked.take();
        assert!(asked.iter().all(|(_, _, stopping)| *stopping), "asked while the node still said that it was ready");
        (result, asked.into_iter().map(|(_, request, _)| request).collect())
    }

    const ORDER: [&str; 4] = ["BeginDrain { within: 7.5s }", "StopServing { within: 10s }", "Quiesce", "Shutdown"];

    #[test]
    fn a_stop_is_not_ready_first_and_durable_last() {
        sim::run(1, async {
            let (result, asked) = stopped(false, None).await;
            assert_eq!((result, asked), (Ok(()), ORDER.map(str::to_owned).to_vec()));
        });
    }

    #[test]
    fn k17_a_node_that_cannot_store_metadata_answers_its_clients_and_then_ends_with_the_cause() {
        sim::run(1, async {
            let cause = || Some(Stopped { why: "state.redb: disk full; free it".to_owned(), underway: false });
            let (result, asked) = stopped(false, cause()).await;
            assert_eq!(asked, ORDER);
            assert_eq!(result.unwrap_err(), "metadata can no longer be stored: state.redb: disk full; free it");
            let (result, asked) = stopped(true, cause()).await;
            assert_eq!(asked, ORDER);
            assert!(result.unwrap_err().contains("disk full; free it (the shards could not"));
        });
    }
}
