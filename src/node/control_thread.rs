//! The control thread: metadata, the metrics listener, and the stop of the node. It carries no message data.

use std::cell::{Cell, OnceCell};
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc;
use std::sync::Arc;
use std::time::Duration;

use narad_shards::meta::{Address, Snapshot};
use narad_shards::peer::{Carrier, LocalBoxFuture, Reply, Request};
use narad_shards::rt::ring::{run_shard_thread, Options, RingHandle};
use narad_shards::rt::sync::Notify;
use narad_shards::rt::{self, Queue};
use narad_shards::spsc::{Endpoint, Handler};

use super::broker::ProbeBroker;
use super::cluster::{self, Opened};
use super::notify;
use super::run::Common;
use super::serving::Serving;
use super::stopping;
use crate::control::{Control, Install};
use crate::http::{HttpContext, Surface};

pub struct ControlPlan {
    pub opened: Opened,
    /// Gets a message when the node is to stop.
    pub stopping: mpsc::Receiver<()>,
}

/// Requests that come before the control core runs wait for it.
#[derive(Default)]
struct Slot {
    control: OnceCell<Control>,
    started: Notify,
    opened: Cell<u16>,
    all_opened: Notify,
}

impl Slot {
    async fn answer(&self, shards: u16, request: Request) -> Reply {
        match request {
            Request::Meta(command) => loop {
                let started = self.started.notified();
                if let Some(control) = self.control.get() {
                    return Reply::Meta(control.handle(command).await);
                }
                started.await;
            },
            Request::Opened => {
                self.opened.set(self.opened.get() + 1);
                self.all_opened.notify_all();
                loop {
                    let all = self.all_opened.notified();
                    if self.opened.get() >= shards {
                        return Reply::Done;
                    }
                    all.await;
                }
            }
            other => {
                tracing::error!(?other, "a request reached the control thread that it does not answer");
                Reply::Done
            }
        }
    }
}

/// Brings a snapshot to every shard; done when all have it (E23).
struct InstallOnShards {
    carrier: Rc<OnceCell<Rc<dyn Carrier>>>,
    shards: u16,
}

impl Install for InstallOnShards {
    fn install(&self, snapshot: Arc<Snapshot>) -> LocalBoxFuture<'static, ()> {
        let (carrier, shards) = (self.carrier.get().cloned(), self.shards);
        Box::pin(async move {
            let Some(carrier) = carrier else { return };
            // All are told before any answer is awaited: the slowest shard decides, not the sum.
            let told: Vec<_> = (0..shards)
                .map(|shard| carrier.call(Address::local(shard), Request::InstallSnapshot(snapshot.clone())))
                .collect();
            drop(rt::all(told).await); // a shard that is gone takes the process with it (E25)
        })
    }
}

/// Runs until the node has been stopped. `Err` takes the node down.
pub fn run(common: Arc<Common>, plan: ControlPlan, endpoint: Endpoint, options: Options) -> Result<(), String> {
    run_shard_thread(options, move |handle| main(common, plan, endpoint, handle)).map_err(|error| error.to_string())?
}

async fn main(common: Arc<Common>, plan: ControlPlan, endpoint: Endpoint, handle: RingHandle) -> Result<(), String> {
    let shards = common.state.shards;
    let slot: Rc<Slot> = Rc::default();
    let handler: Handler = {
        let slot = slot.clone();
        Rc::new(move |_from, request| {
            let slot = slot.clone();
            Box::pin(async move { slot.answer(shards, request).await })
        })
    };
    let links: Rc<dyn Carrier> = endpoint.attach(handler);
    let carrier: Rc<OnceCell<Rc<dyn Carrier>>> = Rc::default();
    let _ = carrier.set(links.clone());
    let install = Rc::new(InstallOnShards { carrier: carrier.clone(), shards });
    let (control, cluster) = cluster::start(&common, plan.opened, &handle, &links, install)?;
    let _ = slot.control.set(control);
    slot.started.notify_all();
    let probes = start_probes(&common, &handle, carrier)?;
    rt::spawn(Queue::Background, keep_starting(common.clone()));

    // The signal arrives on another thread: a thread of the blocking pool waits for it.
    let stopping = plan.stopping;
    let stop_signal = rt::spawn(Queue::Foreground, rt::blocking(move || stopping.recv().is_ok()));
    let watched = slot.clone();
    let stopped = async move {
        match watched.control.get() {
            Some(control) => control.stopped().await,
            None => std::future::pending().await,
        }
    };
    let cause = rt::first_of(stop_signal, stopped).await.err();
    if cause.is_some() {
        rt::blocking(|| notify::tell(notify::STOPPING)).await;
    }
    let result =
        stopping::stop(&common.state, common.config.http.shutdown_grace, &links, cluster.hand_over(), cause).await;
    if let Some(probes) = probes {
        probes.stop(Duration::from_millis(100)).await;
    }
    cluster.leave().await;
    result
}

/// Tells the service manager that shards are still being opened, for as long as they are.
async fn keep_starting(common: Arc<Common>) {
    while common.state.listening.load(Relaxed) < common.state.shards {
        rt::blocking(|| notify::tell(notify::STILL_STARTING)).await;
        rt::sleep(notify::STILL_STARTING_EVERY).await;
    }
}

fn start_probes(
    common: &Arc<Common>,
    handle: &RingHandle,
    carrier: Rc<OnceCell<Rc<dyn Carrier>>>,
) -> Result<Option<Rc<Serving<ProbeBroker>>>, String> {
    let Some(address) = common.metrics_addr else { return Ok(None) };
    let context = HttpContext::new(
        ProbeBroker { state: common.state.clone(), carrier },
        common.http_settings(Surface::Probes),
        common.topic_defaults(),
        common.node_id.clone(),
        common.limits.clone(),
        common.http_metrics[usize::from(common.state.shards)].clone(),
        common.http_metrics.clone(),
    );
    let listener = handle.listen(address).map_err(|error| error.to_string())?;
    Ok(Some(Serving::start(vec![listener], Rc::new(context))))
}
