//! What a load cost the machine: CPU time and memory of the broker, its entries into the kernel, writes and flushes of
//! the device. All from files that anybody may read; what cannot be read is left out, not guessed.

use std::path::PathBuf;
use std::time::Duration;

use super::admin::Admin;
use super::processes::{stat_fields, TICK};
use crate::report::{counters, Counters};
use crate::run::{Better, Run};

/// Where to look.
#[derive(Clone, Debug, Default)]
pub struct Probe {
    /// The broker's process.
    pub pid: Option<u32>,
    /// The broker's API, for its own counters.
    pub admin: Option<Admin>,
    /// A path on the file system that the broker writes to.
    pub directory: Option<PathBuf>,
}

/// Counters at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    pub cpu: Option<Duration>,
    pub resident_bytes: Option<u64>,
    /// Bytes that the broker had written to storage, as the kernel counts them.
    pub stored_bytes: Option<u64>,
    /// Entries of the broker's event loops into the kernel.
    pub enters: Option<f64>,
    /// Of the drive: everybody's, not only the broker's.
    pub device: Option<Counters>,
}

impl Probe {
    pub fn sample(&self) -> Sample {
        Sample {
            cpu: self.pid.and_then(cpu_time),
            resident_bytes: self.pid.and_then(resident_bytes),
            stored_bytes: self.pid.and_then(stored_bytes),
            enters: self
                .admin
                .as_ref()
                .and_then(Admin::metrics)
                .and_then(|page| sum(&page, "narad_runtime_enters_total")),
            device: self.directory.as_deref().and_then(counters),
        }
    }
}

impl Sample {
    /// What was spent since an earlier sample.
    pub fn since(&self, before: &Sample) -> Cost {
        let device = self.device.zip(before.device);
        let flushes = device.and_then(|(after, before)| Some((after.flushes? - before.flushes?) as f64));
        Cost {
            cpu: self.cpu.zip(before.cpu).map(|(after, before)| after.saturating_sub(before)),
            resident_bytes: self.resident_bytes,
            stored_bytes: self.stored_bytes.zip(before.stored_bytes).map(|(after, before)| (after - before) as f64),
            enters: self.enters.zip(before.enters).map(|(after, before)| after - before),
            flushes,
            written_bytes: device.map(|(after, before)| (after.written_bytes - before.written_bytes) as f64),
        }
    }
}

/// What one or several loads cost; what could not be read is absent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cost {
    /// CPU time of the broker.
    pub cpu: Option<Duration>,
    /// Its memory at the end.
    pub resident_bytes: Option<u64>,
    /// Bytes that it wrote to storage.
    pub stored_bytes: Option<f64>,
    /// Its entries into the kernel.
    pub enters: Option<f64>,
    /// Flushes and bytes of the device, everybody's.
    pub flushes: Option<f64>,
    pub written_bytes: Option<f64>,
}

impl Cost {
    /// Adds a later load's costs.
    pub fn merge(&mut self, later: &Cost) {
        let sum = |one: &mut Option<f64>, other: Option<f64>| *one = one.zip(other).map(|(one, other)| one + other);
        self.cpu = self.cpu.zip(later.cpu).map(|(one, other)| one + other);
        self.resident_bytes = later.resident_bytes;
        sum(&mut self.stored_bytes, later.stored_bytes);
        sum(&mut self.enters, later.enters);
        sum(&mut self.flushes, later.flushes);
        sum(&mut self.written_bytes, later.written_bytes);
    }

    /// Adds the costs of each of `messages` of `payload_bytes` to `run`, under `name`.
    pub fn add_to(&self, run: &mut Run, name: &str, messages: f64, payload_bytes: usize) {
        if messages < 1.0 {
            return;
        }
        if let Some(cpu) = self.cpu.map(|cpu| cpu.as_secs_f64()).filter(|cpu| *cpu > 0.0) {
            run.figure(format!("{name}.broker_cpu_per_message"), cpu * 1e9 / messages, "ns", Better::Lower);
            run.figure(format!("{name}.rate_per_broker_core"), messages / cpu, "1/s", Better::Higher);
        }
        if let Some(bytes) = self.resident_bytes {
            run.figure(format!("{name}.broker_resident"), bytes as f64, "B", Better::Lower);
        }
        if let Some(enters) = self.enters {
            run.figure(format!("{name}.syscalls_per_message"), enters / messages, "ratio", Better::Lower);
        }
        if let Some(flushes) = self.flushes {
            run.figure(format!("{name}.flushes_per_message"), flushes / messages, "ratio", Better::Lower);
        }
        let accepted = messages * payload_bytes as f64;
        if let Some(bytes) = self.stored_bytes {
            run.figure(format!("{name}.broker_bytes_per_byte"), bytes / accepted, "ratio", Better::Lower);
        }
        if let Some(bytes) = self.written_bytes {
            run.figure(format!("{name}.device_bytes_per_byte"), bytes / accepted, "ratio", Better::Lower);
        }
    }
}

/// CPU time of all threads of a process: in nanoseconds where the kernel counts them, else in ticks.
fn cpu_time(pid: u32) -> Option<Duration> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let by_thread: Option<Vec<u64>> = threads
        .map(|thread| {
            let text = std::fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
            text.split_whitespace().next()?.parse().ok()
        })
        .collect();
    if let Some(nanos) = by_thread.map(|all| all.iter().sum::<u64>()).filter(|nanos| *nanos > 0) {
        return Some(Duration::from_nanos(nanos));
    }
    ticks(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// User and system time of `/proc/<pid>/stat`.
fn ticks(stat: &str) -> Option<Duration> {
    let fields = stat_fields(stat)?;
    let ticks: u32 = fields.get(11)?.parse::<u32>().ok()? + fields.get(12)?.parse::<u32>().ok()?;
    Some(TICK * ticks)
}

fn resident_bytes(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

/// Bytes sent to storage by a process: direct writes, and pages that it made dirty.
fn stored_bytes(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/io")).ok()?;
    text.lines().find_map(|line| line.strip_prefix("write_bytes:"))?.trim().parse().ok()
}

/// Sum of all samples of a counter on a metrics page.
fn sum(page: &str, name: &str) -> Option<f64> {
    let values = page.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        rest.starts_with(['{', ' ']).then(|| rest.rsplit_once(' ')?.1.parse::<f64>().ok()).flatten()
    });
    values.fold(None, |sum, value| Some(sum.unwrap_or(0.0) + value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read_from_what_linux_and_the_broker_print() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194304 1 2 3 4 150 50 0 0 20 0 1 0 5 6 7";
        assert_eq!(ticks(stat), Some(Duration::from_secs(2)));
        let page = "# HELP x_total X.\nx_total{shard=\"0\"} 3\nx_total{shard=\"1\"} 4.5\nx_total_more 9\n";
        assert_eq!((sum(page, "x_total"), sum(page, "y")), (Some(7.5), None));
    }

    #[test]
    fn costs_add_up_and_what_is_unknown_stays_unknown() {
        let sample = |seconds, flushes| Sample {
            cpu: Some(Duration::from_secs(seconds)),
            device: Some(Counters { written_bytes: 100 * seconds, flushes }),
            ..Sample::default()
        };
        let mut cost = sample(3, Some(7)).since(&sample(1, Some(2)));
        assert_eq!((cost.cpu, cost.flushes, cost.enters), (Some(Duration::from_secs(2)), Some(5.0), None));
        cost.merge(&sample(2, None).since(&sample(1, Some(7))));
        assert_eq!((cost.cpu, cost.flushes, cost.written_bytes), (Some(Duration::from_secs(3)), None, Some(300.0)));
    }

    #[test]
    fn this_process_has_used_cpu_and_memory() {
        let pid = std::process::id();
        assert!(cpu_time(pid).unwrap() > Duration::ZERO && resident_bytes(pid).unwrap() > 1 << 20);
    }
}
