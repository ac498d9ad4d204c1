//! `narad-bench peer`: commits from one node's shard to another's, over the peer plane and loopback.

pub mod elsewhere;
mod owner;
mod report;
mod yardsticks;

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use argh::FromArgs;
use hdrhistogram::Histogram;
use narad::peer::{PeerEndpoint, PeerSettings, DATAGRAM_BYTES_MAX, DATAGRAM_BYTES_MIN};
use narad_shards::io::Slice;
use narad_shards::peer::{LocalBoxFuture, Reply, Request};
use narad_shards::remote::{CallError, ConnectionId, Hello, Service, Transport};
use narad_shards::rt::ring::RingHandle;
use narad_shards::rt::{self, Queue};
use narad_shards::wire::{self, Incoming, Outgoing};

use crate::load::cpu;
use crate::load::process::Home;
use crate::log::batch_of;
use crate::parts::{cores, counts, nanos, require, seconds};
use crate::run::{histogram, Failure, Load, Run};
use crate::Common;

use yardsticks::Rate;

/// commits between two nodes: bytes per second over what QUIC reaches without sockets, and latencies over local ones
#[derive(FromArgs)]
#[argh(subcommand, name = "peer")]
pub struct Options {
    /// directory on the drive of the owner's log (default: the working directory)
    #[argh(option, default = "PathBuf::from(\".\")")]
    dir: PathBuf,
    /// the two CPUs, such as 2,3 (default: the first two that this process may use)
    #[argh(option, from_str_fn(cpu::parse))]
    cpus: Option<Vec<usize>>,
    /// payload bytes of full datagrams (default 1452,16383)
    #[argh(option, default = "\"1452,16383\".into()")]
    datagrams: String,
    /// ways of sending: gso, plain (one datagram at a time), small (gso, records of 256 B) (default gso,plain,small)
    #[argh(option, default = "\"gso,plain,small\".into()")]
    ways: String,
    /// commits of 8 MiB under way at once (default 4)
    #[argh(option, default = "4")]
    in_flight: usize,
    /// bytes of a record in the commits of 8 MiB (default 65536)
    #[argh(option, default = "65536")]
    record: usize,
    /// seconds of each measurement (default 2)
    #[argh(option, default = "2.0")]
    seconds: f64,
}

/// Bodies of a full commit.
const COMMIT_BYTES: usize = 8 << 20;
/// Records of the small commit, and bytes of each.
const RECORDS: usize = 64;
const RECORD_BYTES: usize = 256;
/// Each rate is measured in so many turns, one after the other with all others.
const ROUNDS: u32 = 5;
const COUNT_MIN: u64 = 16;
/// Archive of a small call.
const CALL_BYTES: usize = 64;

const WAYS: [&str; 3] = ["gso", "plain", "small"];

/// One way of sending, and what came of it.
struct Way {
    name: String,
    datagram_bytes: usize,
    offload: bool,
    record_bytes: usize,
    rates: Vec<Rate>,
    latency: Histogram<u64>,
    /// Share of the datagrams sent that were taken for lost.
    lost: f64,
}

/// Small calls, one of each in turn.
struct Latencies {
    datagram_bytes: usize,
    calls: Histogram<u64>,
    local: Histogram<u64>,
    remote: Histogram<u64>,
}

struct Measured {
    streams: Vec<Rate>,
    /// By datagram size.
    ceilings: Vec<(usize, Vec<Rate>)>,
    ways: Vec<Way>,
    latencies: Vec<Latencies>,
}

/// Measures.
pub fn run(_common: &Common, options: &Options) -> Result<Run, Failure> {
    let [there, here] = cores::choose(options.cpus.as_deref(), 2)?[..] else { unreachable!("two were chosen") };
    let each = seconds("--seconds", options.seconds)?;
    let datagrams = counts("--datagrams", &options.datagrams, DATAGRAM_BYTES_MAX)?;
    for datagram in &datagrams {
        require("--datagrams", *datagram, DATAGRAM_BYTES_MIN..=DATAGRAM_BYTES_MAX)?;
    }
    require("--in-flight", options.in_flight, 1..=7)?;
    require("--record", options.record, 64..=COMMIT_BYTES)?;
    let home = Home::below(&options.dir)?;
    let mut run = Run::new("peer");
    run.load = Some(Load::Closed);
    run.set("dir", options.dir.display());
    run.set("cpus", format!("{here},{there}"));
    run.set("datagrams", &options.datagrams);
    run.set("ways", &options.ways);
    run.set("in_flight", options.in_flight);
    run.set("record", options.record);
    run.set("seconds", options.seconds);

    let asked: Vec<&str> = options.ways.split(',').map(str::trim).collect();
    if let Some(unknown) = asked.iter().find(|way| !WAYS.contains(way)) {
        return Err(Failure(format!("--ways {unknown}: give some of {}", WAYS.join(","))));
    }
    let mut ways = Vec::new();
    for datagram_bytes in &datagrams {
        for (offload, suffix, record_bytes) in
            [(true, "gso", options.record), (false, "plain", options.record), (true, "small", RECORD_BYTES)]
        {
            if !asked.contains(&suffix) {
                continue;
            }
            let name = format!("peer.d{datagram_bytes}.{suffix}");
            let (datagram_bytes, rates, latency) = (*datagram_bytes, Vec::new(), histogram());
            ways.push(Way { name, datagram_bytes, offload, record_bytes, rates, latency, lost: 0.0 });
        }
    }
    let settings: Vec<PeerSettings> = ways.iter().map(|way| settings_of(way.datagram_bytes, way.offload)).collect();
    let (addresses, owner) = owner::start(there, home.path().to_owned(), RECORD_BYTES, settings.clone())?;
    let (in_flight, cpus) = (options.in_flight, [here, there]);
    let asker = cores::start("asker", here, Duration::ZERO, move |handle| async move {
        let ends = Ends::start(&handle, &addresses, settings)?;
        let measured = measure(&ends, ways, &datagrams, in_flight, cpus, each).await;
        // However that went, the owner must not wait for ever. It may be gone before its answer is.
        let _ = ends.ask(0, owner::frame(owner::STOP, &[], Vec::new())).await;
        ends.stop().await;
        measured
    });
    let measured = cores::join(asker)?;
    cores::join(owner)?;
    report::add(&mut run, &measured, in_flight);
    Ok(run)
}

fn settings_of(datagram_bytes: usize, offload: bool) -> PeerSettings {
    let secret: Arc<[u8]> = Arc::from(&b"known to both"[..]);
    PeerSettings { secret: Some(secret), datagram_bytes, offload, ..PeerSettings::default() }
}

async fn measure(
    ends: &Ends,
    ways: Vec<Way>,
    datagrams: &[usize],
    in_flight: usize,
    cpus: [usize; 2],
    each: Duration,
) -> Result<Measured, Failure> {
    let turn = each / ROUNDS;
    let body = Slice::copy_from(&vec![0x61; COMMIT_BYTES]);
    let ceilings = datagrams.iter().map(|datagram| (*datagram, Vec::new())).collect();
    let mut measured = Measured { streams: Vec::new(), ceilings, ways, latencies: Vec::new() };
    for _ in 0..ROUNDS {
        measured.streams.push(yardsticks::tcp(cpus, &body, turn)?);
        for (datagram, rates) in &mut measured.ceilings {
            rates.push(yardsticks::in_memory(&settings_of(*datagram, true), &body, turn)?);
        }
        for (index, way) in measured.ways.iter_mut().enumerate() {
            let frame = full_commit(way.record_bytes);
            let rate = commits(ends, index, &frame, in_flight, turn, &mut way.latency).await?;
            way.rates.push(rate);
        }
    }
    for (index, way) in measured.ways.iter_mut().enumerate() {
        let sent = ends.pairs[index].0.metrics();
        way.lost = sent.packets_lost as f64 / sent.datagrams_sent.max(1) as f64;
    }
    for datagram in datagrams {
        let way = measured.ways.iter().position(|way| way.datagram_bytes == *datagram);
        measured.latencies.push(latencies(ends, way.unwrap_or_default(), *datagram, each).await?);
    }
    Ok(measured)
}

/// A commit of 8 MiB that its owner forgets.
fn full_commit(record_bytes: usize) -> Outgoing {
    let body = Slice::copy_from(&vec![0x61; record_bytes]);
    small_commit(&body, COMMIT_BYTES / record_bytes, owner::FORGOTTEN)
}

fn small_commit(body: &Slice, records: usize, partition: usize) -> Outgoing {
    let batch = batch_of(body, records, partition);
    let budget = batch.budget;
    wire::ask(&Request::Commit(batch), budget).expect("a commit is something that nodes ask each other")
}

/// Commits in a closed loop, for about `each`.
async fn commits(
    ends: &Ends,
    way: usize,
    frame: &Outgoing,
    in_flight: usize,
    each: Duration,
    latency: &mut Histogram<u64>,
) -> Result<Rate, Failure> {
    // The connection is up, and its windows have grown.
    committed(&ends.ask(way, frame.clone()).await?)?;
    let (count, measured) = (Rc::new(Cell::new(0_u64)), Rc::new(RefCell::new(histogram())));
    let cpu = || async {
        let there = owner::number(&ends.ask(way, owner::frame(owner::CPU, &[], Vec::new())).await?)?;
        Ok::<_, Failure>([there, cpu::thread_cpu().as_nanos() as u64])
    };
    let (cpu_start, start) = (cpu().await?, nanos());
    let tasks: Vec<_> = (0..in_flight)
        .map(|_| {
            let (count, measured, frame) = (count.clone(), measured.clone(), frame.clone());
            let (end, to) = ends.pairs[way].clone();
            rt::spawn(Queue::Foreground, async move {
                // One at least, however late its turn comes.
                loop {
                    let sent = nanos();
                    committed(&end.call(to, frame.clone()).await.map_err(lost)?)?;
                    measured.borrow_mut().saturating_record(nanos() - sent);
                    count.set(count.get() + 1);
                    if nanos() - start >= each.as_nanos() as u64 {
                        return Ok::<(), Failure>(());
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await?;
    }
    let took = nanos() - start;
    let cpu_end = cpu().await?;
    let cpu_took = [0, 1].map(|end| cpu_end[end].saturating_sub(cpu_start[end]));
    latency.add(&*measured.borrow())?;
    Ok(Rate::of(count.get() * COMMIT_BYTES as u64, took, &cpu_took))
}

/// Small calls, local commits and remote ones, one of each in turn.
async fn latencies(ends: &Ends, way: usize, datagram_bytes: usize, each: Duration) -> Result<Latencies, Failure> {
    let (mut calls, mut local, mut remote) = (histogram(), histogram(), histogram());
    let body = Slice::copy_from(&[0x61; RECORD_BYTES]);
    let locally = owner::frame(owner::COMMIT_LOCALLY, &(RECORDS as u64).to_le_bytes(), Vec::new());
    let start = nanos();
    let mut warm = false;
    while local.len() < COUNT_MIN || nanos() - start < each.as_nanos() as u64 {
        let sent = nanos();
        ends.ask(way, owner::frame(owner::ECHO, &[7; CALL_BYTES], Vec::new())).await?;
        let call = nanos() - sent;
        let at_the_owner = owner::number(&ends.ask(way, locally.clone()).await?)?;
        let sent = nanos();
        committed(&ends.ask(way, small_commit(&body, RECORDS, owner::STORED)).await?)?;
        let from_here = nanos() - sent;
        // The first of each counts for nothing.
        if std::mem::replace(&mut warm, true) {
            calls.saturating_record(call);
            local.saturating_record(at_the_owner);
            remote.saturating_record(from_here);
        }
    }
    Ok(Latencies { datagram_bytes, calls, local, remote })
}

fn lost(error: CallError) -> Failure {
    Failure(format!("a call between the two ends failed: {}", error.text()))
}

fn committed(reply: &Incoming) -> Result<(), Failure> {
    match wire::answered(reply) {
        Ok((_, Reply::Commit(Ok(_)))) => Ok(()),
        other => Err(Failure(format!("a commit was answered by {other:?}"))),
    }
}

/// This side of every way of sending, and where its other side is.
struct Ends {
    pairs: Vec<(Rc<PeerEndpoint>, SocketAddr)>,
}

impl Ends {
    fn start(handle: &RingHandle, to: &[SocketAddr], settings: Vec<PeerSettings>) -> Result<Ends, Failure> {
        let bind = SocketAddr::from(([127, 0, 0, 1], 0));
        let end = |(settings, to): (PeerSettings, &SocketAddr)| {
            Ok((PeerEndpoint::start(handle, bind, Rc::new(Asker), settings)?, *to))
        };
        let pairs = settings.into_iter().zip(to).map(end).collect::<std::io::Result<_>>()?;
        Ok(Ends { pairs })
    }

    async fn ask(&self, way: usize, request: Outgoing) -> Result<Incoming, Failure> {
        let (end, to) = &self.pairs[way];
        end.call(*to, request).await.map_err(lost)
    }

    async fn stop(&self) {
        for (end, _) in &self.pairs {
            end.stop().await;
        }
    }
}

/// Nobody asks the asker.
struct Asker;

impl Service for Asker {
    fn hello(&self) -> Hello {
        Hello { node: "asker".to_owned(), boot_id: 2, shard: Some(0), ..Hello::default() }
    }

    fn met(&self, _: ConnectionId, _: &Hello, _: SocketAddr) -> Result<(), String> {
        Ok(())
    }

    fn serve(&self, _: ConnectionId, _: Incoming) -> LocalBoxFuture<'static, Option<Outgoing>> {
        Box::pin(std::future::ready(None))
    }

    fn cancelled_late(&self, _: ConnectionId, _: u64) {}

    fn lost(&self, _: ConnectionId) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_of_sending_is_held_against_quic_without_sockets() {
        let common = Common { out: None, compare: None, repeat: 1 };
        let options = Options {
            dir: std::env::temp_dir(),
            cpus: None,
            datagrams: "16383".into(),
            ways: "gso,plain,small".into(),
            in_flight: 1,
            record: 65536,
            seconds: 0.01,
        };
        let run = run(&common, &options).expect("measured");
        for name in ["gso.over_in_memory", "plain.cpu_over_in_memory", "small.over_tcp"] {
            assert!(run.value(&format!("peer.d16383.{name}")).is_some_and(|value| value > 0.0), "{name}");
        }
        assert!(run.value("peer.d16383.commit64.p50_over_local").is_some_and(|ratio| ratio > 0.0));
    }

    #[test]
    fn a_datagram_that_quic_cannot_have_is_refused() {
        let common = Common { out: None, compare: None, repeat: 1 };
        let options = Options {
            dir: std::env::temp_dir(),
            cpus: None,
            datagrams: "1000".into(),
            ways: "gso".into(),
            in_flight: 2,
            record: 65536,
            seconds: 0.01,
        };
        let Failure(text) = run(&common, &options).expect_err("too short");
        assert!(text.contains("--datagrams 1000") && text.contains("1200"), "{text}");
    }
}
