//! The tables of `narad-bench device`. Cells are measured in short slices, round after round through all of them: a drive
//! that changes its mood then changes it for all cells alike, and not for those that happened to be measured last.
//! Between groups of cells a reference is sampled (the yardstick's serial durable 4 KiB write), and each cell's ratio to
//! it is taken round by round.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use super::measure::{flushes, reads, writes, Method, Sample};
use super::ring::Ring;
use super::scratch::{require_space, Blocks, Scratch};
use super::yardstick::{ring, Probe};
use crate::report::stats::Spread;
use crate::report::{counters, human, Counters, Progress};
use crate::run::{Better, Failure, Run, Table};

const FILE_BYTES: u64 = 128 << 20;
const SIZES: [usize; 5] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];
const DEPTHS: [usize; 5] = [1, 2, 4, 8, 16];
const BLOCKS: [Blocks; 3] = [Blocks::Unwritten, Blocks::ZeroFilled, Blocks::Recycled];
const ROUNDS: u32 = 4;
/// Cells between two samples of the reference.
const GROUP: usize = 4;
const REFERENCE_TIME: Duration = Duration::from_millis(40);

/// One kind of durable write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Cell {
    method: Method,
    blocks: Blocks,
    bytes: usize,
    depth: usize,
}

#[derive(Clone, Debug)]
struct Measured {
    cell: Cell,
    sample: Sample,
    over_reference: Vec<f64>,
}

impl Cell {
    fn name(&self) -> String {
        let (method, blocks) = (self.method.name(), self.blocks.name());
        format!("device.write.{method}.{blocks}.{}k.qd{}", self.bytes >> 10, self.depth)
    }
}

/// Every cell once; by default those of three cuts through the cube, `full` for all of it.
fn cells(best: Method, full: bool) -> Vec<Cell> {
    let mut cells = Vec::new();
    for method in Method::ALL {
        for blocks in BLOCKS {
            for bytes in SIZES {
                for depth in DEPTHS {
                    let by_size = blocks == Blocks::ZeroFilled && depth == 1;
                    let by_blocks = bytes == SIZES[0] && depth == 1;
                    let by_depth = blocks == Blocks::ZeroFilled && method == best;
                    if full || by_size || by_blocks || by_depth {
                        cells.push(Cell { method, blocks, bytes, depth });
                    }
                }
            }
        }
    }
    cells
}

/// Measures all tables into `run`.
pub fn measure(run: &mut Run, dir: &Path, cell_time: Duration, full: bool) -> Result<(), Failure> {
    require_space(dir, FILE_BYTES * 2 * BLOCKS.len() as u64)?;
    let progress = Progress::new();
    let mut probe = Probe::open(dir)?;
    let mut ring = ring(DEPTHS[DEPTHS.len() - 1], SIZES[SIZES.len() - 1])?;
    let mut files = BTreeMap::new();
    for blocks in BLOCKS {
        for direct in [true, false] {
            progress.show(&format!("filling the scratch files ({} blocks)", blocks.name()));
            files.insert((blocks, direct), Scratch::new(dir, FILE_BYTES, blocks, direct)?);
        }
    }
    let before = counters(dir);
    let cells = cells(probe.method, full);
    let mut measured: Vec<Measured> = cells
        .iter()
        .map(|cell| Measured { cell: *cell, sample: Sample::empty(cell.bytes), over_reference: Vec::new() })
        .collect();
    for round in 0..ROUNDS {
        for (index, group) in measured.chunks_mut(GROUP).enumerate() {
            progress.show(&format!(
                "durable writes: round {} of {ROUNDS}, {} of {}",
                round + 1,
                index * GROUP,
                cells.len()
            ));
            let around = probe.sample(REFERENCE_TIME)?;
            let mut slices = Vec::with_capacity(GROUP);
            for Measured { cell, .. } in group.iter() {
                let Some(file) = files.get_mut(&(cell.blocks, cell.method.direct())) else { continue };
                slices.push(writes(&mut ring, file, cell.method, cell.bytes, cell.depth, cell_time / ROUNDS)?);
            }
            let mut reference = probe.sample(REFERENCE_TIME)?;
            reference.merge(&around);
            for (measured, slice) in group.iter_mut().zip(slices) {
                measured.over_reference.push(slice.quantile_ns(0.5) / reference.quantile_ns(0.5).max(1.0));
                measured.sample.merge(&slice);
            }
        }
    }
    writes_into(run, &measured, probe.method, full);
    let flushes = |counters: Option<Counters>| counters?.flushes;
    if let Some((before, after)) = flushes(before).zip(flushes(counters(dir))) {
        let writes: u64 = measured.iter().map(|one| one.sample.latency.len()).sum();
        run.notes.push(format!(
            "while about {writes} durable writes were measured, the drive counted {} flushes (of all programs together)",
            after.saturating_sub(before)
        ));
    }
    progress.show("reads and flushes");
    let Some(file) = files.get_mut(&(Blocks::Recycled, true)) else { return Ok(()) };
    others(run, &mut ring, file, cell_time)
}

fn writes_into(run: &mut Run, measured: &[Measured], best: Method, full: bool) {
    for Measured { cell, sample, over_reference } in measured {
        let name = cell.name();
        if cell.depth == 1 && cell.bytes == SIZES[0] && cell.blocks == Blocks::ZeroFilled {
            run.latency(&name, sample.latency.clone(), Vec::new());
        } else {
            run.figure(format!("{name}.p50"), sample.quantile_ns(0.5), "ns", Better::Lower);
            run.figure(format!("{name}.p99"), sample.quantile_ns(0.99), "ns", Better::Lower);
        }
        run.figure(format!("{name}.rate"), sample.rate_per_s(), "1/s", Better::Higher);
        let ratio = Spread::of(over_reference).median;
        run.figure(format!("{name}.over_reference"), ratio, "ratio", Better::Lower);
    }
    let find =
        |method, blocks, bytes, depth| measured.iter().find(|one| one.cell == Cell { method, blocks, bytes, depth });
    let kib = |bytes: &usize| format!("{} KiB", bytes >> 10);
    let p50_and_ratio = |one: Option<&Measured>| {
        one.map_or("-".into(), |one| {
            let ratio = Spread::of(&one.over_reference).median;
            format!("{} ({})", human(one.sample.quantile_ns(0.5), "ns"), human(ratio, "ratio"))
        })
    };
    let bandwidth = |one: Option<&Measured>| one.map_or("-".into(), |one| human(one.sample.bytes_per_s(), "B/s"));
    let rate = |one: Option<&Measured>| one.map_or("-".into(), |one| human(one.sample.rate_per_s(), "1/s"));

    let sizes: Vec<String> = SIZES.iter().map(kib).collect();
    let head = |first: &str, columns: Vec<String>| [vec![first.to_string()], columns].concat();
    let mut by_size = Table {
        title: "One durable write at a time, zero-filled blocks: p50 (and over the reference) by method and size"
            .into(),
        head: head("method", sizes.clone()),
        rows: Vec::new(),
    };
    let mut by_size_bandwidth =
        Table { title: "The same, bytes per second".into(), head: head("method", sizes.clone()), rows: Vec::new() };
    let mut by_blocks = Table {
        title: "One durable 4 KiB write at a time: p50 (and over the reference) by method and what stood in the blocks"
            .into(),
        head: head("method", BLOCKS.iter().map(|blocks| blocks.name().to_string()).collect()),
        rows: Vec::new(),
    };
    for method in Method::ALL {
        let title = method.title().to_string();
        let by = |bytes: &usize| find(method, Blocks::ZeroFilled, *bytes, 1);
        by_size.rows.push(head(&title, SIZES.iter().map(|bytes| p50_and_ratio(by(bytes))).collect()));
        by_size_bandwidth.rows.push(head(&title, SIZES.iter().map(|bytes| bandwidth(by(bytes))).collect()));
        let states = BLOCKS.iter().map(|blocks| p50_and_ratio(find(method, *blocks, SIZES[0], 1)));
        by_blocks.rows.push(head(&title, states.collect()));
    }
    run.tables.extend([by_size, by_size_bandwidth, by_blocks]);
    for method in Method::ALL.into_iter().filter(|method| full || *method == best) {
        for blocks in BLOCKS.into_iter().filter(|blocks| full || *blocks == Blocks::ZeroFilled) {
            let mut by_depth = Table {
                title: format!("{}, {} blocks: writes per second by depth and size", method.title(), blocks.name()),
                head: head("in flight", sizes.clone()),
                rows: Vec::new(),
            };
            for depth in DEPTHS {
                let columns = SIZES.iter().map(|bytes| rate(find(method, blocks, *bytes, depth))).collect();
                by_depth.rows.push(head(&depth.to_string(), columns));
            }
            run.tables.push(by_depth);
        }
    }
    run.notes.push(
        "the reference is the serial durable 4 KiB write by the best method on recycled blocks, sampled around each group \
         of cells; the drive moves between rounds, so compare the ratios in brackets, not the times"
            .into(),
    );
}

/// Reads and flushes.
fn others(run: &mut Run, ring: &mut Ring, file: &mut Scratch, time: Duration) -> Result<(), Failure> {
    let mut rows = Vec::new();
    let mut add = |run: &mut Run, name: &str, title: &str, sample: Sample| {
        run.latency(name, sample.latency.clone(), Vec::new());
        run.figure(format!("{name}.rate"), sample.rate_per_s(), "1/s", Better::Higher);
        let bandwidth = if sample.bytes == 0 { "-".into() } else { human(sample.bytes_per_s(), "B/s") };
        let quantile = |quantile| human(sample.quantile_ns(quantile), "ns");
        rows.push(vec![title.to_string(), quantile(0.5), quantile(0.99), human(sample.rate_per_s(), "1/s"), bandwidth]);
    };
    let flush = flushes(ring, file, time)?;
    add(run, "device.flush", "fdatasync, nothing to write", flush);
    for (bytes, depth, random, name, title) in [
        (4 << 10, 1, true, "device.read.random.4k.qd1", "random read, 4 KiB"),
        (4 << 10, 16, true, "device.read.random.4k.qd16", "random read, 4 KiB, 16 in flight"),
        (64 << 10, 1, false, "device.read.sequential.64k.qd1", "sequential read, 64 KiB"),
        (1 << 20, 4, false, "device.read.sequential.1024k.qd4", "sequential read, 1 MiB, 4 in flight"),
    ] {
        let sample = reads(ring, file, bytes, depth, random, time)?;
        add(run, name, title, sample);
    }
    let head = ["operation", "p50", "p99", "rate", "bandwidth"].map(String::from).to_vec();
    run.tables.push(Table { title: "Flushes and reads (direct)".into(), head, rows });
    run.notes.push("reads are of 128 MiB written just before: a drive or host with a cache answers from it".into());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_is_measured_once_and_has_its_own_name() {
        for full in [false, true] {
            let cells = cells(Method::Dsync, full);
            let mut names: Vec<String> = cells.iter().map(Cell::name).collect();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), cells.len());
            assert_eq!(cells.len(), if full { 300 } else { 48 });
        }
    }
}
