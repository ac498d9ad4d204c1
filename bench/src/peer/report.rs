//! What `narad-bench peer` says of its measurements.

use hdrhistogram::Histogram;

use super::yardsticks::Rate;
use super::{Latencies, Measured, Way, CALL_BYTES, COMMIT_BYTES, RECORDS, RECORD_BYTES};
use crate::report::stats::Spread;
use crate::run::{Better, Run, Table};

const NOTES: [&str; 5] = [
    "Each end is a thread of the broker's runtime with its own endpoint: proof of the secret, TLS, frames and their \
     archives as between two nodes. The commits of 8 MiB are answered and forgotten; the small ones are stored.",
    "`in_memory` is QUIC's own ceiling: two connections of the same settings that hand each other packets, both on one \
     thread. The endpoints have two threads, so what a byte costs is told by `cpu_over_in_memory`: bytes per second \
     of CPU time (of both threads) over the same of the ceiling. `busier_cpu_over_in_memory` counts only the end that \
     needs more: about what they reach when nothing else wants their CPUs.",
    "All rates take turns in five rounds; a ratio is the median of its rounds. Small calls, local and remote commits \
     take turns one by one.",
    "A local commit begins and ends in the owner's own task; a remote one is encoded, sent, decoded, stored by the \
     same log, and answered. Both threads sleep in between, so two wake-ups by the kernel are in it.",
    "Wrong if anything else runs on the two CPUs, and for what a network does: loopback has neither loss nor delay.",
];

fn median(values: impl Iterator<Item = f64>) -> f64 {
    Spread::of(&values.collect::<Vec<_>>()).median
}

fn rate(rates: &[Rate]) -> f64 {
    median(rates.iter().map(|rate| rate.per_second))
}

/// Round by round: what else the machine does in a round concerns both sides of its ratio.
fn ratio(rates: &[Rate], to: &[Rate], of: fn(&Rate) -> f64) -> f64 {
    median(rates.iter().zip(to).map(|(rate, to)| of(rate) / of(to).max(1.0)))
}

fn megabytes(rate: f64) -> String {
    format!("{:.0}", rate / 1e6)
}

fn micros(latency: &Histogram<u64>, quantile: f64) -> String {
    format!("{:.0}", latency.value_at_quantile(quantile) as f64 / 1000.0)
}

/// Adds figures, tables and notes.
pub(super) fn add(run: &mut Run, measured: &Measured, in_flight: usize) {
    let tables = [rates(run, measured, in_flight), latencies(run, &measured.latencies)];
    run.tables.extend(tables);
    run.notes = NOTES.map(String::from).to_vec();
}

fn rates(run: &mut Run, measured: &Measured, in_flight: usize) -> Table {
    let head = [
        "",
        "datagram",
        "MB/s",
        "over in-memory",
        "per CPU",
        "per CPU of busier end",
        "over TCP",
        "lost",
        "p50 µs",
        "p99 µs",
    ];
    let title = format!("Commits of {} MiB, {in_flight} under way", COMMIT_BYTES >> 20);
    let mut table = Table { title, head: head.map(String::from).to_vec(), rows: Vec::new() };
    let mut row = |cells: Vec<String>| {
        let mut cells = cells;
        cells.resize(head.len(), String::new());
        table.rows.push(cells);
    };
    let stream = rate(&measured.streams);
    run.figure("peer.tcp.rate", stream, "B/s", Better::Neither);
    row(vec!["TCP stream".into(), String::new(), megabytes(stream)]);
    for (datagram, ceiling) in &measured.ceilings {
        let of_ceiling = rate(ceiling);
        run.figure(format!("peer.in_memory.d{datagram}.rate"), of_ceiling, "B/s", Better::Neither);
        row(vec!["QUIC in memory".into(), datagram.to_string(), megabytes(of_ceiling)]);
        for way in measured.ways.iter().filter(|way| way.datagram_bytes == *datagram) {
            row(add_way(run, way, ceiling, &measured.streams));
        }
    }
    table
}

fn add_way(run: &mut Run, way: &Way, ceiling: &[Rate], streams: &[Rate]) -> Vec<String> {
    let over = ratio(&way.rates, ceiling, |rate| rate.per_second);
    let over_per_cpu = ratio(&way.rates, ceiling, |rate| rate.per_cpu_second);
    let over_busiest = ratio(&way.rates, ceiling, |rate| rate.per_busiest_cpu_second);
    let over_tcp = ratio(&way.rates, streams, |rate| rate.per_second);
    run.figure(format!("{}.rate", way.name), rate(&way.rates), "B/s", Better::Higher);
    run.figure(format!("{}.over_in_memory", way.name), over, "ratio", Better::Higher);
    run.figure(format!("{}.cpu_over_in_memory", way.name), over_per_cpu, "ratio", Better::Higher);
    run.figure(format!("{}.busier_cpu_over_in_memory", way.name), over_busiest, "ratio", Better::Higher);
    run.figure(format!("{}.over_tcp", way.name), over_tcp, "ratio", Better::Higher);
    run.figure(format!("{}.lost", way.name), way.lost, "ratio", Better::Lower);
    run.latency(&way.name, way.latency.clone(), Vec::new());
    let gso = if way.offload { "GSO" } else { "no GSO" };
    vec![
        format!("{} B records, {gso}", way.record_bytes),
        way.datagram_bytes.to_string(),
        megabytes(rate(&way.rates)),
        format!("{over:.2}"),
        format!("{over_per_cpu:.2}"),
        format!("{over_busiest:.2}"),
        format!("{over_tcp:.2}"),
        format!("{:.4}", way.lost),
        micros(&way.latency, 0.5),
        micros(&way.latency, 0.99),
    ]
}

fn latencies(run: &mut Run, all: &[Latencies]) -> Table {
    let head = ["datagram", "", "p50 µs", "p99 µs", "p50 over local", "p99 over local"];
    let title = "Single calls, one at a time".to_owned();
    let mut table = Table { title, head: head.map(String::from).to_vec(), rows: Vec::new() };
    for Latencies { datagram_bytes, calls, local, remote } in all {
        let name = format!("peer.d{datagram_bytes}");
        let over = [0.5, 0.99].map(|quantile| {
            let at = |latency: &Histogram<u64>| latency.value_at_quantile(quantile) as f64;
            at(remote) / at(local).max(1.0)
        });
        run.figure(format!("{name}.commit64.p50_over_local"), over[0], "ratio", Better::Lower);
        run.figure(format!("{name}.commit64.p99_over_local"), over[1], "ratio", Better::Lower);
        let name_of = |what: &str| format!("{RECORDS} × {RECORD_BYTES} B commit, {what}");
        for (suffix, title, latency, over) in [
            ("call", format!("call of {CALL_BYTES} B"), calls, None),
            ("commit64.local", name_of("local"), local, None),
            ("commit64.remote", name_of("remote"), remote, Some(over)),
        ] {
            run.latency(&format!("{name}.{suffix}"), latency.clone(), Vec::new());
            let mut cells = vec![datagram_bytes.to_string(), title, micros(latency, 0.5), micros(latency, 0.99)];
            cells.extend(over.into_iter().flatten().map(|over| format!("{over:.2}")));
            cells.resize(head.len(), String::new());
            table.rows.push(cells);
        }
    }
    table
}
