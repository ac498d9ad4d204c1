//! `narad-bench http`: the product's own HTTP stack on one shard, with a broker behind it that stores nothing. What
//! produce cannot exceed.

use std::cell::Cell;
use std::future::{ready, Future};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{mpsc, Arc};
use std::thread::JoinHandle;
use std::time::Duration;

use argh::FromArgs;
use narad::http::{
    serve_connection, Broker, Health, HttpContext, HttpMetrics, HttpSettings, NodeLimits, Readiness, Socket,
    TopicDefaults, TopicNotFound,
};
use narad::telemetry::{NodeMetrics, ShardReport};
use narad_shards::api::{
    ConsumeError, Delivery, MetaCommand, MetaReply, NewRecord, PartitionReport, ProduceError, ReadAt, Settle,
    SettleStatus,
};
use narad_shards::io::Listener;
use narad_shards::meta::{Incarnation, TopicMeta};
use narad_shards::metrics::ShardMetrics;
use narad_shards::peer::Take;
use narad_shards::rt::ring::{run_shard_thread, Options as ShardOptions};
use narad_shards::rt::{self, Queue, Spin};

use crate::load::narad::{Budget, Client, Produce, Wire};
use crate::load::options::{counts, duration};
use crate::load::payload::Payloads;
use crate::load::target::{Credentials, Target};
use crate::load::threads::{drive, Drive, Edge};
use crate::load::{cpu, Group, Pace, Timing, Until};
use crate::parts::cores;
use crate::run::{Better, Failure, Load, Run};
use crate::Common;

/// How often the server's thread says how much CPU time it used, and looks whether it should end.
const HEARTBEAT: Duration = Duration::from_millis(10);
const GRACE: Duration = Duration::from_secs(10);
/// As the other measurements sweep.
const CONNECTIONS: [usize; 4] = [1, 8, 64, 256];

/// the ceiling of single produces: our HTTP stack on one core, answering 202 without storing
#[derive(FromArgs, Clone, Debug)]
#[argh(subcommand, name = "http")]
pub struct Options {
    /// numbers of connections (default 1,8,64,256)
    #[argh(option, from_str_fn(counts))]
    connections: Option<Vec<usize>>,
    /// bytes of a message (default 256)
    #[argh(option, default = "256")]
    payload: usize,
    /// time before anything counts, for each number of connections (default 1s)
    #[argh(option, default = "Duration::from_secs(1)", from_str_fn(duration))]
    warmup: Duration,
    /// measured time, for each number of connections (default 5s)
    #[argh(option, default = "Duration::from_secs(5)", from_str_fn(duration))]
    duration: Duration,
    /// CPU of the server, one (default: not pinned)
    #[argh(option, from_str_fn(cpu::parse))]
    cpus: Option<Vec<usize>>,
    /// CPUs of the load (default: not pinned)
    #[argh(option, from_str_fn(cpu::parse))]
    load_cpu: Option<Vec<usize>>,
    /// the load polls instead of sleeping
    #[argh(switch)]
    load_spin: bool,
    /// microseconds that the server polls before it sleeps (default 0)
    #[argh(option, default = "0")]
    spin_us: u64,
    /// only serve, until this program is stopped: for a load of your own
    #[argh(switch)]
    serve: bool,
    /// with --serve: where (default 127.0.0.1:7942)
    #[argh(option, default = "SocketAddr::from(([127, 0, 0, 1], 7942))")]
    addr: SocketAddr,
}

/// Measures, or serves.
pub fn run(_common: &Common, options: &Options) -> Result<Run, Failure> {
    if options.serve {
        let server = Server::start(options.addr, options)?;
        eprintln!("serving on http://{} without storing anything; stop with Ctrl-C", server.address);
        return server.wait().map(|()| Run::new("http"));
    }
    measure(options)
}

/// The ceiling at each number of connections.
pub fn measure(options: &Options) -> Result<Run, Failure> {
    if !(1..=1 << 20).contains(&options.payload) {
        return Err(Failure(format!("--payload {}: a message is 1 to 1048576 bytes", options.payload)));
    }
    if options.duration.is_zero() {
        return Err(Failure("--duration: give more than 0".into()));
    }
    let mut run = Run::new("http");
    run.load = Some(Load::Closed);
    run.set("durability", "none: nothing is stored");
    run.set("payload", options.payload);
    run.set("batch", 1);
    let sweep = options.connections.clone().unwrap_or_else(|| CONNECTIONS.to_vec());
    run.set("connections", sweep.iter().map(usize::to_string).collect::<Vec<_>>().join(","));
    run.set("cpus", options.cpus.as_deref().map_or("not pinned".into(), cpu::list));
    run.set("load_cpu", options.load_cpu.as_deref().map_or("not pinned".into(), cpu::list));
    run.set("load_spin", options.load_spin);
    run.set("spin_us", options.spin_us);
    run.set("duration_s", options.duration.as_secs_f64());
    let server = Server::start(SocketAddr::from(([127, 0, 0, 1], 0)), options)?;
    let target = Target::of(server.address, &Credentials::default())?;
    let wire = Wire::new(&target, "ceiling");
    let what = Produce {
        payloads: Arc::new(Payloads::new(0, options.payload)),
        batch: 1,
        keys: 0,
        budget: Budget::new(None),
        ledger: None,
        ahead_max: 0,
    };
    for connections in sweep {
        let group = Group {
            name: format!("http, {connections} connections"),
            addresses: target.addresses.clone(),
            protocols: (0..connections).map(|number| Client::producer(&wire, what.clone(), number as u16)).collect(),
            pace: Pace::Closed,
            until: Until::End,
        };
        let timing = Timing { warmup: options.warmup, duration: Some(options.duration), grace: GRACE };
        let cpus = options.load_cpu.clone();
        let drive_options =
            Drive { timing, threads: 1, apart: false, cpus, spin: options.load_spin, title: group.name.clone() };
        let (mut before, mut after) = (0, 0);
        let driven = drive(&drive_options, vec![group], &mut |edge| {
            match edge {
                Edge::Start => before = server.cpu_nanos(),
                Edge::End => after = server.cpu_nanos(),
            }
            Ok(())
        })?;
        let tally = &driven.tallies[0];
        if tally.messages == 0 {
            let why = tally.troubles().unwrap_or_else(|| "no answer came".into());
            return Err(Failure(format!("not one request was answered: {why}")));
        }
        let name = format!("http.c{connections}");
        let requests = tally.messages as f64;
        let per_request = |nanos: u64| nanos as f64 / requests;
        run.figure(format!("{name}.rate"), tally.rate_per_s(timing.end()), "1/s", Better::Higher);
        run.latency(&name, tally.latency.clone(), tally.rates(timing.end()));
        run.figure(format!("{name}.server_cpu_per_request"), per_request(after - before), "ns", Better::Lower);
        let load = per_request(tally.cpu.as_nanos() as u64);
        run.figure(format!("{name}.load_cpu_per_request"), load, "ns", Better::Neither);
        run.notes.extend(tally.troubles());
    }
    server.stop()?;
    Ok(run)
}

/// The HTTP stack on a thread of its own.
struct Server {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    cpu: Arc<AtomicU64>,
    thread: JoinHandle<Result<(), String>>,
}

impl Server {
    fn start(address: SocketAddr, options: &Options) -> Result<Server, Failure> {
        let cpu = options.cpus.as_deref().map(|asked| cores::choose(Some(asked), 1)).transpose()?.map(|cpus| cpus[0]);
        let (stop, used_nanos): (Arc<AtomicBool>, Arc<AtomicU64>) = Default::default();
        let (say, hear) = mpsc::channel();
        let shard = ShardOptions {
            cpu,
            spin: Spin::always(Duration::from_micros(options.spin_us)),
            ..ShardOptions::new("http ceiling")
        };
        let (stopping, used) = (stop.clone(), used_nanos.clone());
        let thread = std::thread::spawn(move || {
            let serve = move |handle: rt::ring::RingHandle| async move {
                let listener = handle.listen(address).map_err(|error| error.to_string())?;
                let bound = listener.local_addr().map_err(|error| error.to_string())?;
                rt::spawn(Queue::Foreground, accept(listener));
                // Whoever waits for the address has gone if it cannot be told.
                let _ = say.send(bound);
                while !stopping.load(Ordering::Relaxed) {
                    used.store(cpu::thread_cpu().as_nanos() as u64, Ordering::Relaxed);
                    rt::sleep(HEARTBEAT).await;
                }
                Ok(())
            };
            run_shard_thread(shard, serve).map_err(|error| error.to_string())?
        });
        match hear.recv() {
            Ok(address) => Ok(Server { address, stop, cpu: used_nanos, thread }),
            Err(_) => match thread.join() {
                Ok(Err(error)) => Err(Failure(error)),
                _ => Err(Failure("the HTTP server ended before it began".into())),
            },
        }
    }

    fn cpu_nanos(&self) -> u64 {
        self.cpu.load(Ordering::Relaxed)
    }

    fn stop(self) -> Result<(), Failure> {
        self.stop.store(true, Ordering::Relaxed);
        self.wait()
    }

    fn wait(self) -> Result<(), Failure> {
        match self.thread.join() {
            Ok(done) => done.map_err(Failure),
            Err(_) => Err(Failure("the HTTP server panicked".into())),
        }
    }
}

async fn accept(listener: Listener) {
    let metrics: Arc<HttpMetrics> = Arc::default();
    let context = Rc::new(HttpContext::new(
        StoresNothing,
        HttpSettings::default(),
        TopicDefaults::default(),
        "bench".to_owned(),
        Arc::new(NodeLimits::new(0, 0)),
        metrics.clone(),
        Arc::from([metrics]),
    ));
    loop {
        let stream = listener.accept(|error| eprintln!("narad-bench: accepting failed: {error}")).await;
        let Ok(peer) = stream.peer_addr() else { continue };
        let queue = Rc::new(Cell::new(Queue::Foreground));
        let serve = serve_connection(Socket::new(stream), peer.ip(), context.clone(), queue.clone());
        rt::spawn_following(queue, Box::pin(serve));
    }
}

/// Has every topic, accepts everything, keeps nothing.
struct StoresNothing;

impl Broker for StoresNothing {
    fn produce<'a>(&'a self, _: &'a str, _: NewRecord<'a>) -> impl Future<Output = Result<(), ProduceError>> + 'a {
        ready(Ok(()))
    }

    fn produce_batch<'a>(
        &'a self,
        _: &'a str,
        _: &'a [NewRecord<'a>],
    ) -> impl Future<Output = Result<(), ProduceError>> + 'a {
        ready(Ok(()))
    }

    async fn consume<'a>(
        &'a self,
        _: &'a str,
        _: Option<u32>,
        _: Take,
        _: Duration,
    ) -> Result<Vec<Delivery>, ConsumeError> {
        Ok(Vec::new())
    }

    async fn settle<'a>(&'a self, _: &'a str, settles: Vec<Settle>) -> Result<Vec<SettleStatus>, TopicNotFound> {
        Ok(settles.iter().map(|_| SettleStatus::LeaseGone).collect())
    }

    async fn read_at<'a>(&'a self, _: &'a str, _: u32, _: u64) -> Result<ReadAt, ConsumeError> {
        Ok(ReadAt::PastEnd)
    }

    fn topic(&self, name: &str) -> Option<Arc<TopicMeta>> {
        let defaults = TopicDefaults::default();
        Some(Arc::new(TopicMeta {
            name: name.into(),
            incarnation: Incarnation(1),
            partitions: defaults.partitions,
            retention_ms: defaults.retention_ms,
            visibility_timeout_ms: defaults.visibility_timeout_ms,
            max_in_flight_per_partition: defaults.max_in_flight_per_partition,
            max_acked_ahead_per_partition: defaults.max_acked_ahead_per_partition,
            created_at_ms: 0,
            owner: None,
        }))
    }

    fn topics_after(&self, _: &str, _: usize) -> Vec<Arc<TopicMeta>> {
        Vec::new()
    }

    async fn describe<'a>(&'a self, _: &'a TopicMeta, _: Option<u32>) -> Vec<PartitionReport> {
        Vec::new()
    }

    async fn change(&self, _: MetaCommand) -> MetaReply {
        MetaReply::Exists
    }

    fn health(&self) -> Health {
        Health::Ok
    }

    async fn readiness(&self) -> Readiness {
        Readiness::Ready(Vec::new())
    }

    async fn metrics(&self) -> Vec<ShardMetrics> {
        Vec::new()
    }

    async fn node_metrics(&self) -> NodeMetrics {
        NodeMetrics::default()
    }

    async fn vitals(&self) -> Vec<ShardReport> {
        Vec::new()
    }
}
