//! A server's processes: the first one and all that descend from it, from `/proc`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::{kill_process, Pid, Signal};

/// Clock ticks of `/proc/<pid>/stat`: 100 a second on every Linux architecture in use.
pub const TICK: Duration = Duration::from_millis(10);
/// How often memory is looked at.
const LOOK: Duration = Duration::from_millis(100);

/// Fields of `/proc/<pid>/stat` that matter here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stat {
    parent: u32,
    /// Of the process, and of its children that have ended and were collected.
    cpu: Duration,
}

/// What stands behind the name in `/proc/<pid>/stat`; that may hold anything, parentheses included.
pub fn stat_fields(line: &str) -> Option<Vec<&str>> {
    Some(line.rsplit_once(')')?.1.split_whitespace().collect())
}

fn parse_stat(line: &str) -> Option<Stat> {
    let fields = stat_fields(line)?;
    let ticks = fields.get(11..15)?.iter().map(|field| field.parse::<u32>().ok()).sum::<Option<u32>>()?;
    Some(Stat { parent: fields.get(1)?.parse().ok()?, cpu: TICK * ticks })
}

/// A server's processes.
#[derive(Clone, Copy, Debug)]
pub struct Processes {
    first: u32,
}

impl Processes {
    pub fn of(first: u32) -> Processes {
        Processes { first }
    }

    fn stats(self) -> BTreeMap<u32, Stat> {
        let mut all = BTreeMap::new();
        for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
            let line = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
            if let Some(stat) = parse_stat(&line) {
                all.insert(pid, stat);
            }
        }
        descendants(self.first, &all)
    }

    /// CPU time since the server started, to 10 ms for each process; that of ended children counts once their parent has
    /// collected them.
    pub fn cpu(self) -> Duration {
        self.stats().values().map(|stat| stat.cpu).sum()
    }

    /// Memory now. What is shared (PostgreSQL's buffers, a program's code) counts once: as much as the process that
    /// touches most of it.
    pub fn memory_bytes(self) -> u64 {
        self.memory_of(self.stats().into_keys())
    }

    fn memory_of(self, pids: impl Iterator<Item = u32>) -> u64 {
        let all: Vec<Memory> = pids
            .filter_map(|pid| std::fs::read_to_string(format!("/proc/{pid}/status")).ok())
            .map(|status| Memory::parse(&status))
            .collect();
        let most = |of: fn(&Memory) -> u64| all.iter().map(of).max().unwrap_or(0);
        all.iter().map(|memory| memory.own).sum::<u64>() + most(|memory| memory.shared) + most(|memory| memory.files)
    }

    /// Sends a signal to all of them.
    pub fn signal(self, signal: Signal) {
        for pid in self.stats().into_keys() {
            if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
                // It may have ended meanwhile.
                let _ = kill_process(pid, signal);
            }
        }
    }

    /// Kills all of them, and waits a little until they are gone: what they write is about to be removed.
    pub fn kill(self) {
        // Stopped, none of them starts another one while they are looked up.
        self.signal(Signal::STOP);
        let all: Vec<u32> = self.stats().into_keys().collect();
        self.signal(Signal::KILL);
        for _ in 0..100 {
            let lives =
                |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| !s.contains(") Z "));
            if !all.iter().any(lives) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Runs `work`, and says how much memory the processes had at most meanwhile.
    pub fn peak_memory<T>(self, work: impl FnOnce() -> T) -> (T, u64) {
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let watch = scope.spawn(|| {
                let mut peak = self.memory_bytes();
                while !over.load(Ordering::Relaxed) {
                    std::thread::park_timeout(LOOK);
                    peak = peak.max(self.memory_bytes());
                }
                peak
            });
            let done = work();
            over.store(true, Ordering::Relaxed);
            watch.thread().unpark();
            (done, watch.join().unwrap_or(0))
        })
    }
}

/// `first` and what descends from it.
fn descendants(first: u32, all: &BTreeMap<u32, Stat>) -> BTreeMap<u32, Stat> {
    let belongs = |pid: u32| {
        let mut at = Some(pid);
        // A chain of parents is short; a wrong one must not go round for ever.
        for _ in 0..64 {
            match at {
                Some(pid) if pid == first => return true,
                Some(pid) => at = all.get(&pid).map(|stat| stat.parent),
                None => return false,
            }
        }
        false
    };
    all.iter().filter(|(pid, _)| belongs(**pid)).map(|(pid, stat)| (*pid, *stat)).collect()
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Memory {
    own: u64,
    shared: u64,
    files: u64,
}

impl Memory {
    fn parse(status: &str) -> Memory {
        let bytes = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) << 10
        };
        Memory { own: bytes("RssAnon:"), shared: bytes("RssShmem:"), files: bytes("RssFile:") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_read_whatever_its_name() {
        let line = "7 (a) b) S 3 7 7 0 -1 4194304 1 2 3 4 150 50 20 5 20 0 1 0 5 6 7";
        assert_eq!(parse_stat(line), Some(Stat { parent: 3, cpu: Duration::from_millis(2250) }));
        assert_eq!(parse_stat("7 (x) S 3"), None);
    }

    #[test]
    fn descendants_are_found_over_several_generations_and_circles_end() {
        let stat = |parent| Stat { parent, cpu: Duration::ZERO };
        let all = [(5, 1), (6, 5), (7, 6), (8, 1), (9, 10), (10, 9)].map(|(pid, parent)| (pid, stat(parent)));
        assert_eq!(descendants(5, &all.into()).into_keys().collect::<Vec<_>>(), [5, 6, 7]);
    }

    #[test]
    fn this_process_uses_memory_and_its_child_belongs_to_it() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let me = Processes::of(std::process::id());
        let (found, peak) = me.peak_memory(|| me.stats().contains_key(&child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(found && peak > 1 << 20, "{found} {peak}");
    }
}
