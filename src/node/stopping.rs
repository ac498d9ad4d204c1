//! The order of a stop: not ready, ports, dispatch, durable ends.

use std::future::Future;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use narad_shards::api::NotStored;
use narad_shards::io::system;
use narad_shards::meta::{Address, ShardId};
use narad_shards::peer::{Carrier, Lost, Reply, Request};
use narad_shards::rt;

use super::broker::NodeState;
use crate::control::{self, Stopped};

/// Part of the grace in which connections are still accepted; the rest is for requests that come at its end.
const NOTICE: f64 = 0.75;
/// With less than that free, the last writes of a stop may not fit.
const ROOM_BYTES: u64 = 64 << 20;
/// How often is looked whether balancers have seen that the node is not ready.
const LOOK: Duration = Duration::from_millis(20);

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
        let mut failed = NotStored::default();
        for answer in ask_all(links, state.shards, || Request::Shutdown).await {
            if let Ok(Reply::ShutDown(more)) = answer {
                failed.add(more);
            }
        }
        failed
    };
    let Some(cause) = cause else {
        let failed = end.await;
        return if failed.is_nothing() { Ok(()) } else { Err(not_stored(&failed)) };
    };
    // What was answered is on the disk; a disk that hangs must not keep the node from ending.
    let more = match rt::timeout(grace, Box::pin(end)).await {
        Ok(failed) if failed.is_nothing() => String::new(),
        Ok(failed) => format!("; {}", not_stored(&failed)),
        Err(_) => " (the shards could not be stopped in order either)".to_owned(),
    };
    Err(format!("metadata can no longer be stored: {}{more}", cause.why))
}

/// The last line of a stop that was not clean: what may be delivered again, and what to do.
fn not_stored(failed: &NotStored) -> String {
    let NotStored { positions, boundaries, checkpoints, cause } = failed;
    let parts = [
        (*positions, "consumer position(s) (their newest acks come undone: those messages are delivered again)"),
        (*checkpoints, "dispatch checkpoint(s) (messages that are in their partitions may come there a second time)"),
        (*boundaries, "end(s) of partition logs (the next start reads them again; no message comes twice for it)"),
    ];
    let parts = parts.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}"));
    format!(
        "stopped, and no message is lost, but the disk did not take everything: {}; first {}. Free or replace the disk \
         before the next start",
        parts.collect::<Vec<_>>().join(", "),
        cause.as_deref().unwrap_or("cause unknown")
    )
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

/// Asks every shard and waits for all of them. A shard that has gone has nothing left to finish.
async fn ask_all(links: &Rc<dyn Carrier>, shards: ShardId, request: impl Fn() -> Request) -> Vec<Result<Reply, Lost>> {
    let asked: Vec<_> = (0..shards).map(|shard| links.call(Address::local(shard), request())).collect();
    rt::all(asked).await
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::Arc;

    use narad_shards::peer::LocalBoxFuture;
    use narad_shards::rt::sim;

    use super::*;

    /// Notes what is asked of which shard, and how ready the node was then.
    struct Shards {
        state: Arc<NodeState>,
        asked: RefCell<Vec<(ShardId, String, bool)>>,
        shutdown_hangs: bool,
        not_stored: NotStored,
    }

    impl Carrier for Shards {
        fn call(&self, to: Address, request: Request) -> LocalBoxFuture<'static, Result<Reply, Lost>> {
            let stopping = self.state.stopping.load(Ordering::Relaxed);
            let hangs = self.shutdown_hangs && matches!(request, Request::Shutdown);
            let last = matches!(request, Request::Shutdown).then(|| self.not_stored.clone());
            self.asked.borrow_mut().push((to.shard, format!("{request:?}"), stopping));
            Box::pin(async move {
                if hangs {
                    std::future::pending::<()>().await;
                }
                Ok(last.map_or(Reply::Done, Reply::ShutDown))
            })
        }

        fn send(&self, _to: Address, _request: Request) {}
    }

    const GRACE: Duration = Duration::from_secs(10);

    async fn stopped(shutdown_hangs: bool, cause: Option<Stopped>) -> (Result<(), String>, Vec<String>) {
        stopped_with(shutdown_hangs, NotStored::default(), cause).await
    }

    async fn stopped_with(
        shutdown_hangs: bool,
        not_stored: NotStored,
        cause: Option<Stopped>,
    ) -> (Result<(), String>, Vec<String>) {
        let state = Arc::new(NodeState { shards: 1, ..NodeState::default() });
        let shards = Rc::new(Shards { state: state.clone(), asked: RefCell::default(), shutdown_hangs, not_stored });
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
    fn d18_a_stop_that_could_not_store_positions_is_no_clean_one_and_says_what_comes_again() {
        sim::run(1, async {
            let cause = Some("consumer position in /d/topics/t/p00000: no space left".to_owned());
            let failed = NotStored { positions: 3, cause, ..NotStored::default() };
            let text = stopped_with(false, failed.clone(), None).await.0.expect_err("exit status 1");
            assert!(
                text.contains("3 consumer position(s) (their newest acks come undone: those messages are"),
                "{text}"
            );
            assert!(text.contains("/d/topics/t/p00000: no space left. Free or replace the disk"), "{text}");
            assert!(!text.contains("checkpoint") && !text.contains("end(s)"), "{text}");
            let cause = Stopped { why: "state.redb: disk full; free it".to_owned(), underway: false };
            let text = stopped_with(false, failed, Some(cause)).await.0.expect_err("exit status 1");
            assert!(
                text.starts_with("metadata can no longer be stored: state.redb: disk full; free it; stopped"),
                "{text}"
            );
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
