//! CPU placement and CPU time of the calling thread.

use std::time::Duration;

use nix::sched::{sched_setaffinity, CpuSet};
use nix::time::{clock_gettime, ClockId};
use nix::unistd::Pid;

use crate::run::Failure;

/// CPU time that the calling thread has used.
pub fn thread_cpu() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// Pins the calling thread, and what it starts, to these CPUs.
pub fn pin(cpus: &[usize], flag: &str) -> Result<(), Failure> {
    let mut set = CpuSet::new();
    for cpu in cpus {
        set.set(*cpu).map_err(|_| Failure(format!("{flag}: there is no CPU {cpu}; `lscpu` lists them")))?;
    }
    sched_setaffinity(Pid::from_raw(0), &set).map_err(|error| {
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

/// `0-3,5`, as `taskset -c` reads it.
pub fn parse(text: &str) -> Result<Vec<usize>, String> {
    let wrong = || format!("{text:?} is not a list of CPUs: write it as 0,2-3");
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let first: usize = first.trim().parse().map_err(|_| wrong())?;
        let last: usize = last.trim().parse().map_err(|_| wrong())?;
        if first > last || last > 4096 {
            return Err(wrong());
        }
        cpus.extend(first..=last);
    }
    Ok(cpus)
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
        assert!(parse("3-1").is_err() && parse("").is_err() && parse("a").unwrap_err().contains("0,2-3"));
    }
}
