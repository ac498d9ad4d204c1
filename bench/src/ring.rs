//! `narad-bench ring`: what a message from one core to another costs, bare and as the broker sends it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

use argh::FromArgs;
use hdrhistogram::Histogram;
use narad_shards::meta::{Address, Incarnation};
use narad_shards::peer::{Carrier, Reply, Request};
use narad_shards::rt::sync::Notify;
use narad_shards::rt::{self, Queue};
use narad_shards::spsc::{self, Endpoint, Handler, Links};
use rtrb::{Consumer, Producer, RingBuffer};

use crate::load::cpu;
use crate::parts::{cores, nanos, seconds};
use crate::run::{histogram, Better, Failure, Run, Table};
use crate::Common;

/// the ring between two cores: latency and rate
#[derive(FromArgs)]
#[argh(subcommand, name = "ring")]
pub struct Options {
    /// the two CPUs, such as 2,3 (default: the first two that this process may use)
    #[argh(option, from_str_fn(cpu::parse))]
    cpus: Option<Vec<usize>>,
    /// seconds of each of the measurements (default 2)
    #[argh(option, default = "2.0")]
    seconds: f64,
}

/// Long enough that a spinning thread never sleeps.
const SPIN: Duration = Duration::from_secs(1);
/// Calls under way at once where the rate is measured: half a ring is for requests.
const CALLERS: usize = 64;
/// Polls of a ring between two looks at the clock.
const POLLS: u32 = 1024;

/// A message of the product's size.
#[repr(align(64))]
struct Bare([u64; spsc::MESSAGE_BYTES / 8]);

/// A number in a cache line of its own, and its neighbour's, which some processors fetch along.
#[derive(Default)]
#[repr(align(128))]
struct Line(AtomicU64);

/// Latencies of one kind of exchange, in nanoseconds.
struct Exchange {
    one_way: Histogram<u64>,
    round_trip: Histogram<u64>,
}

/// Measures.
pub fn run(_common: &Common, options: &Options) -> Result<Run, Failure> {
    let [there, here] = cores::choose(options.cpus.as_deref(), 2)?[..] else { unreachable!("two were chosen") };
    let each = seconds("--seconds", options.seconds)?;
    let mut run = Run::new("ring");
    run.set("cpus", format!("{here},{there}"));
    run.set("seconds", options.seconds);
    run.set("message_bytes", spsc::MESSAGE_BYTES);
    run.set("slots", spsc::RING_SLOTS);
    run.figure("ring.clock", clock_cost(), "ns", Better::Neither);

    run.figure("ring.line", line(here, there, each / 4)?, "ns", Better::Neither);
    let bare = bare_exchange(here, there, each)?;
    let bare_rate = bare_rate(here, there, each)?;
    let spinning = exchange(here, there, SPIN, each)?;
    let parked = exchange(here, there, Duration::ZERO, each)?;
    let (calls, sends) = rates(here, there, each)?;

    let mut table = Table {
        title: "Between two cores, ns".into(),
        head: ["", "p50", "p99", "p99.9", "max"].map(String::from).to_vec(),
        rows: Vec::new(),
    };
    for (name, exchange) in [("bare", bare), ("spin", spinning), ("parked", parked)] {
        for (kind, latency) in [("one_way", exchange.one_way), ("round_trip", exchange.round_trip)] {
            let at = |quantile| latency.value_at_quantile(quantile).to_string();
            table.rows.push(vec![format!("{name} {kind}"), at(0.5), at(0.99), at(0.999), latency.max().to_string()]);
            run.latency(&format!("ring.{kind}.{name}"), latency, Vec::new());
        }
    }
    run.tables.push(table);
    run.figure("ring.rate.bare", bare_rate, "1/s", Better::Higher);
    run.figure("ring.rate.send", sends, "1/s", Better::Higher);
    run.figure("ring.rate.call", calls, "1/s", Better::Higher);
    run.notes = [
        "`ring.line` is a number that two threads pass to and fro in a cache line of their own: one such transfer is what \
         no queue can go below, and a ring that keeps its index apart from its messages takes two.",
        "`bare` is the ring alone: two threads that do nothing else poll it; a message has the broker's size.",
        "`spin` and `parked` go the broker's way: `Carrier::call`, outbox, ring, the other thread's event loop, its \
         handler, and the answer back to the waiting task. One way ends where the handler begins.",
        "One way is the difference of two cores' readings of the monotonic clock: right as far as the cores' time stamp \
         counters agree (same package, clock source tsc). Each latency contains one reading, `ring.clock`.",
        "`parked` contains what the kernel takes to wake a thread (and the processor to leave an idle state).",
        "Wrong if anything else runs on the two CPUs, if they are two threads of one core, or in different packages.",
    ]
    .map(String::from)
    .to_vec();
    Ok(run)
}

/// Nanoseconds that a reading of the clock takes.
fn clock_cost() -> f64 {
    const READINGS: u64 = 100_000;
    let start = nanos();
    for _ in 1..READINGS {
        std::hint::black_box(nanos());
    }
    (nanos() - start) as f64 / READINGS as f64
}

/// Nanoseconds that one cache line takes from core to core and is seen: half of the fastest tenth's round trip of a
/// number that two threads pass to and fro. What no queue can go below.
fn line(here: usize, there: usize, each: Duration) -> Result<f64, Failure> {
    const END: u64 = u64::MAX;
    const PASSES: u64 = 100;
    let lines: Arc<[Line; 2]> = Arc::default();
    let other = lines.clone();
    let echo = cores::start("echo", there, Duration::ZERO, move |_| async move {
        let mut last = 0;
        loop {
            let seen = other[0].0.load(Ordering::Acquire);
            if seen == END {
                return Ok(());
            }
            if seen != last {
                last = seen;
                other[1].0.store(seen, Ordering::Release);
            }
        }
    });
    let asker = cores::start("asker", here, Duration::ZERO, move |_| async move {
        let (mut passes, start, mut number) = (histogram(), nanos(), 0);
        while nanos() - start < each.as_nanos() as u64 {
            let sent = nanos();
            for _ in 0..PASSES {
                number += 1;
                lines[0].0.store(number, Ordering::Release);
                while lines[1].0.load(Ordering::Acquire) != number {}
            }
            passes.saturating_record(nanos() - sent);
        }
        lines[0].0.store(END, Ordering::Release);
        Ok(passes.value_at_quantile(0.1) as f64 / PASSES as f64 / 2.0)
    });
    let nanos = cores::join(asker);
    cores::join(echo)?;
    nanos
}

/// One end of a pair of bare rings.
struct Bares {
    to: Producer<Bare>,
    from: Consumer<Bare>,
}

fn bares() -> [Bares; 2] {
    let (a_to, b_from) = RingBuffer::new(spsc::RING_SLOTS);
    let (b_to, a_from) = RingBuffer::new(spsc::RING_SLOTS);
    [Bares { to: a_to, from: a_from }, Bares { to: b_to, from: b_from }]
}

fn message(stamp: u64) -> Bare {
    let mut words = [0; spsc::MESSAGE_BYTES / 8];
    words[0] = stamp;
    Bare(words)
}

/// The next message, or `None` when the other end has gone.
fn next(from: &mut Consumer<Bare>) -> Option<Bare> {
    loop {
        for _ in 0..POLLS {
            if let Ok(message) = from.pop() {
                return Some(message);
            }
            std::hint::spin_loop();
        }
        if from.is_abandoned() && from.is_empty() {
            return None;
        }
    }
}

fn bare_exchange(here: usize, there: usize, each: Duration) -> Result<Exchange, Failure> {
    let [mut a, mut b] = bares();
    let echo = cores::start("echo", there, Duration::ZERO, move |_| async move {
        let mut one_way = histogram();
        while let Some(message) = next(&mut b.from) {
            one_way.saturating_record(nanos() - message.0[0]);
            if b.to.push(message).is_err() {
                return Err(Failure("the ring back is full although one message is on its way".into()));
            }
        }
        Ok(one_way)
    });
    let asker = cores::start("asker", here, Duration::ZERO, move |_| async move {
        let mut round_trip = histogram();
        let end = nanos() + each.as_nanos() as u64;
        loop {
            let sent = nanos();
            if sent > end && !round_trip.is_empty() {
                return Ok(round_trip);
            }
            let answered = a.to.push(message(sent)).is_ok() && next(&mut a.from).is_some();
            if !answered {
                return Err(Failure("the other thread ended early".into()));
            }
            round_trip.saturating_record(nanos() - sent);
        }
    });
    let round_trip = cores::join(asker);
    let one_way = cores::join(echo)?;
    Ok(Exchange { one_way, round_trip: round_trip? })
}

/// Messages a second through a bare ring whose sender never waits for anything but room.
fn bare_rate(here: usize, there: usize, each: Duration) -> Result<f64, Failure> {
    let [mut a, mut b] = bares();
    let sink = cores::start("sink", there, Duration::ZERO, move |_| async move {
        let mut count = 0u64;
        while let Some(message) = next(&mut b.from) {
            std::hint::black_box(message);
            count += 1;
        }
        Ok(count)
    });
    let source = cores::start("source", here, Duration::ZERO, move |_| async move {
        let (start, length) = (nanos(), each.as_nanos() as u64);
        while nanos() - start < length {
            for _ in 0..POLLS {
                if a.to.push(message(start)).is_err() {
                    std::hint::spin_loop();
                }
            }
        }
        Ok(nanos() - start)
    });
    let took = cores::join(source);
    let count = cores::join(sink)?;
    Ok(count as f64 * 1e9 / took? as f64)
}

/// Two ends of a mesh as two shards have them; the control thread's end goes unused.
fn two_ends() -> [Endpoint; 2] {
    let mut ends = spsc::mesh(2).into_iter();
    let (Some(here), Some(there)) = (ends.next(), ends.next()) else { unreachable!("a mesh of two shards") };
    [here, there]
}

/// A shard that only answers. What a request carries as an incarnation is when it was sent.
struct Answering {
    one_way: RefCell<Histogram<u64>>,
    stop: Notify,
}

fn answering() -> (Rc<Answering>, Handler) {
    let answering = Rc::new(Answering { one_way: RefCell::new(histogram()), stop: Notify::new() });
    let state = answering.clone();
    let handler: Handler = Rc::new(move |_, request| {
        match request {
            Request::Available { incarnation: Incarnation(sent), .. } if sent > 0 => {
                state.one_way.borrow_mut().saturating_record(nanos() - sent);
            }
            Request::Shutdown => state.stop.notify_one(),
            _ => {}
        }
        Box::pin(std::future::ready(Reply::Done))
    });
    (answering, handler)
}

/// Runs `asker` on one core against an answering shard on the other.
fn against_answering<T, F>(
    here: usize,
    there: usize,
    spin: Duration,
    asker: impl FnOnce(Rc<Links>) -> F + Send + 'static,
) -> Result<(T, Histogram<u64>), Failure>
where
    T: Send + 'static,
    F: std::future::Future<Output = Result<T, Failure>> + 'static,
{
    let [a, b] = two_ends();
    let answers = cores::start("answering", there, spin, move |_| async move {
        let (state, handler) = answering();
        let _links = b.attach(handler);
        state.stop.notified().await;
        Ok(state.one_way.replace(histogram()))
    });
    let asks = cores::start("asking", here, spin, move |_| async move {
        let (_, handler) = answering();
        let links = a.attach(handler);
        let result = asker(links.clone()).await;
        links.send(Address::local(1), Request::Shutdown);
        // The doorbell leaves with the next turn of the loop, which the runtime's end would not wait for.
        rt::sleep(Duration::from_millis(1)).await;
        result
    });
    let result = cores::join(asks);
    let one_way = cores::join(answers)?;
    Ok((result?, one_way))
}

fn stamped(sent: u64) -> Request {
    Request::Available { incarnation: Incarnation(sent), shard: 0 }
}

async fn call(links: &Links, request: Request) -> Result<(), Failure> {
    match links.call(Address::local(1), request).await {
        Ok(_) => Ok(()),
        Err(lost) => Err(Failure(format!("the other thread ended early: {}", lost.0))),
    }
}

fn exchange(here: usize, there: usize, spin: Duration, each: Duration) -> Result<Exchange, Failure> {
    let (round_trip, one_way) = against_answering(here, there, spin, move |links| async move {
        let mut round_trip = histogram();
        let end = nanos() + each.as_nanos() as u64;
        loop {
            let sent = nanos();
            if sent > end && !round_trip.is_empty() {
                return Ok(round_trip);
            }
            call(&links, stamped(sent)).await?;
            round_trip.saturating_record(nanos() - sent);
        }
    })?;
    Ok(Exchange { one_way, round_trip })
}

/// Calls a second with many under way, and one-way messages a second, of threads that spin.
fn rates(here: usize, there: usize, each: Duration) -> Result<(f64, f64), Failure> {
    let ((calls, sends), _) = against_answering(here, there, SPIN, move |links| async move {
        let half = each.as_nanos() as u64 / 2;
        let calls: Rc<Cell<u64>> = Rc::default();
        let start = nanos();
        let callers: Vec<_> = (0..CALLERS)
            .map(|_| {
                let (links, calls) = (links.clone(), calls.clone());
                rt::spawn(Queue::Foreground, async move {
                    while nanos() - start < half {
                        call(&links, stamped(0)).await?;
                        calls.set(calls.get() + 1);
                    }
                    Ok::<(), Failure>(())
                })
            })
            .collect();
        for caller in callers {
            caller.await?;
        }
        let calls = calls.get() as f64 * 1e9 / (nanos() - start) as f64;
        let (mut sends, start) = (0u64, nanos());
        while nanos() - start < half {
            for _ in 0..CALLERS {
                links.send(Address::local(1), stamped(0));
            }
            // A sender that never waits would only measure how fast its own queue grows.
            call(&links, stamped(0)).await?;
            sends += CALLERS as u64 + 1;
        }
        Ok((calls, sends as f64 * 1e9 / (nanos() - start) as f64))
    })?;
    Ok((calls, sends))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_exchange_gives_figures() {
        let Ok(cpus) = cores::choose(None, 2) else { return }; // nothing to measure between on one CPU
        let options = Options { cpus: Some(cpus), seconds: 0.02 };
        let common = Common { out: None, compare: None, repeat: 1 };
        let run = run(&common, &options).expect("measured");
        for name in ["ring.one_way.spin.p50", "ring.round_trip.parked.p99"] {
            assert!(run.value(name).is_some_and(|value| value > 0.0), "{name}");
        }
        for name in ["ring.line", "ring.rate.call", "ring.rate.send", "ring.rate.bare"] {
            assert!(run.value(name).is_some(), "{name}");
        }
        // Each round trip holds the way there, by one clock: so do the medians, equal where a thread long had no CPU.
        let median = |name| run.value(name).expect("a figure");
        assert!(median("ring.round_trip.bare.p50") >= median("ring.one_way.bare.p50"));
    }
}
