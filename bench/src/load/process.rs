//! A server of our own for the time of a measurement: started in a fresh directory, stopped by its process id, and nothing
//! of it left behind, also when this program is told to stop.

use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;

use super::cpu;
use super::processes::Processes;
use crate::run::Failure;

const READY: Duration = Duration::from_secs(60);
const STOP: Duration = Duration::from_secs(15);
/// Lines of a log that an error message shows.
const LAST_WORDS: usize = 5;

/// Processes and directories to clear away when this program is stopped.
static STARTED: Mutex<Vec<(Option<u32>, PathBuf)>> = Mutex::new(Vec::new());
static WATCH: Once = Once::new();

fn started() -> MutexGuard<'static, Vec<(Option<u32>, PathBuf)>> {
    STARTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// On the usual signals: kills what was started, removes its data, and leaves.
fn watch_signals() {
    WATCH.call_once(|| {
        let signals = [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP];
        let Ok(mut signals) = signal_hook::iterator::Signals::new(signals) else { return };
        std::thread::spawn(move || {
            if let Some(signal) = signals.forever().next() {
                // Held to the end: nobody starts anything more, or clears away the same at once.
                let started = started();
                for pid in started.iter().filter_map(|(pid, _)| *pid) {
                    send(pid, Signal::SIGKILL);
                    wait_gone(pid);
                }
                for (_, path) in started.iter() {
                    noted_process(path).into_iter().for_each(|first| Processes::of(first).kill());
                    let _ = std::fs::remove_dir_all(path);
                }
                std::process::exit(128 + signal);
            }
        });
    });
}

fn send(pid: u32, signal: Signal) {
    if let Ok(pid) = i32::try_from(pid) {
        // It may have ended by itself.
        let _ = kill(Pid::from_raw(pid), signal);
    }
}

/// The first process of a server that a script has started in `home`: scripts note it there.
pub fn noted_process(home: &Path) -> Option<u32> {
    std::fs::read_to_string(home.join("pid")).ok()?.split_whitespace().next()?.parse().ok()
}

/// Waits until a killed child is gone, or somebody else has seen it go.
fn wait_gone(pid: u32) {
    if let Ok(pid) = i32::try_from(pid) {
        let _ = nix::sys::wait::waitpid(Pid::from_raw(pid), None);
    }
}

/// A loopback address that was free a moment ago.
pub fn free_address() -> Result<SocketAddr, Failure> {
    TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .map_err(|error| Failure(format!("cannot find a free port on 127.0.0.1: {error}")))
}

/// A fresh directory; dropping it removes it and everything in it.
pub struct Home(PathBuf);

impl Home {
    /// Makes one below `parent`.
    pub fn below(parent: &Path) -> Result<Home, Failure> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        watch_signals();
        let name = format!("narad-bench-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let failed = |error| {
            let parent = parent.display();
            Failure(format!("--dir {parent}: cannot make a directory there: {error}; choose a writable one"))
        };
        std::fs::create_dir_all(parent).map_err(failed)?;
        let path = std::fs::canonicalize(parent).map_err(failed)?.join(name);
        let mut started = started();
        std::fs::create_dir(&path).map_err(failed)?;
        started.push((None, path.clone()));
        Ok(Home(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        started().retain(|(_, path)| *path != self.0);
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            eprintln!("narad-bench: {}: cannot remove it: {error}", self.0.display());
        }
    }
}

/// A running server. Dropping it stops it.
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `command`, its output in `<home>/<name>.log`; all its threads stay on `cpus`, if any are given.
    pub fn start(name: &str, command: &mut Command, home: &Home, cpus: Option<&[usize]>) -> Result<Process, Failure> {
        let log = home.path().join(format!("{name}.log"));
        let output = File::options().create(true).append(true).open(&log);
        let output =
            output.map_err(|error| Failure(format!("{}: cannot write a log there: {error}", log.display())))?;
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        // Nothing may run that is not on the list: a signal waits until it is.
        let mut started = started();
        // A child inherits the placement of the thread that starts it.
        let spawned = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                cpus.map_or(Ok(()), |cpus| cpu::pin(cpus, "--broker-cpus"))?;
                Ok(command.spawn())
            });
            thread.join().unwrap_or_else(|_| Err(Failure(format!("starting {name} panicked"))))
        })?;
        let program = command.get_program().to_string_lossy();
        let child = spawned.map_err(|error| Failure(format!("{program}: cannot start it: {error}")))?;
        started.push((Some(child.id()), home.path().to_owned()));
        Ok(Process { name: name.to_owned(), child, log })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until `is_ready` says so. Fails, in the words of its log, when it ends before, or takes a minute.
    pub fn wait_ready(&mut self, mut is_ready: impl FnMut() -> bool) -> Result<(), Failure> {
        let deadline = Instant::now() + READY;
        loop {
            let ended = self.child.try_wait()?;
            if ended.is_none() && is_ready() {
                return Ok(());
            }
            if ended.is_some() || Instant::now() > deadline {
                let text = std::fs::read_to_string(&self.log).unwrap_or_default();
                let lines: Vec<&str> = text.lines().collect();
                let last = lines[lines.len().saturating_sub(LAST_WORDS)..].join("\n");
                let how =
                    ended.map_or("was not ready within 60 s".to_owned(), |status| format!("ended at once ({status})"));
                return Err(Failure(format!("{}, which was started here, {how}; its last words:\n{last}", self.name)));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            send(self.pid(), Signal::SIGTERM);
        }
        let deadline = Instant::now() + STOP;
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                // Nothing that it holds is wanted any more.
                let _ = self.child.kill();
                let _ = self.child.wait();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let pid = self.pid();
        started().retain(|(started, _)| *started != Some(pid));
    }
}
