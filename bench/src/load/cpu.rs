//! CPU placement and CPU time of the calling thread.

use std::time::Duration;

use narad::config;
use rustix::thread::{sched_setaffinity, CpuSet};
use rustix::time::{clock_gettime, ClockId};

use crate::run::Failure;

/// CPU time that the calling thread has used.
pub fn thread_cpu() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

/// Pins the calling thread, and what it starts, to these CPUs.
pub fn pin(cpus: &[usize], flag: &str) -> Result<(), Failure> {
    let mut set = CpuSet::new();
    for cpu in cpus {
        if *cpu >= CpuSet::MAX_CPU {
            return Err(Failure(format!("{flag}: there is no CPU {cpu}; `lscpu` lists them")));
        }
        set.set(*cpu);
    }
    sched_setaffinity(None, &set).map_err(|error| {
        let cpus = list(cpus);
        Failure(format!(
            "{flag} {cpus}: cannot run there: {error}; `nproc` and `taskset -p $$` show which CPUs may be used"
        ))
    })
}

/// Lets the other threads of this program go first. Where that is forbidden, nothing changes.
pub fn lower_priority() {
    let _unchanged = rustix::process::setpriority_process(None, 5);
}

/// The value of a flag: `0-3,5`, as `taskset -c` reads it, and as the broker's own `--cpus`.
pub fn parse(text: &str) -> Result<Vec<usize>, String> {
    let cpus = config::CpuSet::parse(text)?;
    if cpus.is_empty() {
        return Err("there is no CPU in it: write numbers and ranges, such as \"2-5,8\"".into());
    }
    Ok(cpus.iter().map(|cpu| cpu as usize).collect())
}

/// The reverse of [`parse`], without ranges.
pub fn list(cpus: &[usize]) -> String {
    cpus.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_are_read_or_explained() {
        assert_eq!(parse("0"), Ok(vec![0]));
        assert_eq!(parse("0,2-4"), Ok(vec![0, 2, 3, 4]));
        assert!(parse("3-1").is_err() && parse("").is_err() && parse("a").unwrap_err().contains("2-5,8"));
    }
}
