//! What this program makes and starts for the time of a measurement: directories, and processes that run in them. All of
//! it is on one list, and nothing of it is left behind, also when this program is told to stop.

use std::fs::File;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::cpu;
use super::processes::Processes;
use crate::run::Failure;

const STOP: Duration = Duration::from_secs(15);
/// How often a server is asked whether it is ready.
const ASK_EVERY: Duration = Duration::from_millis(1);
/// Lines of a log that an error message shows.
const LAST_WORDS: usize = 5;

/// Something to clear away.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Thing {
    /// A child of this program, with all that descends from it.
    Process(u32),
    /// A directory, in which a script may have noted a process; or a file.
    Path(PathBuf),
}

static THINGS: Mutex<Vec<Thing>> = Mutex::new(Vec::new());

fn things() -> MutexGuard<'static, Vec<Thing>> {
    static WATCH: Once = Once::new();
    WATCH.call_once(watch_signals);
    THINGS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// On the usual signals: kills what was started, removes what was made, and leaves.
fn watch_signals() {
    let signals = [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP];
    let Ok(mut signals) = signal_hook::iterator::Signals::new(signals) else { return };
    std::thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            // Held to the end: nobody starts anything more, or clears away the same at once.
            let things = things();
            for thing in things.iter() {
                match thing {
                    Thing::Process(pid) => Processes::of(*pid).kill(),
                    Thing::Path(path) => noted_process(path).into_iter().for_each(|first| Processes::of(first).kill()),
                }
            }
            for thing in things.iter() {
                if let Thing::Path(path) = thing {
                    remove_for_good(path);
                }
            }
            std::process::exit(128 + signal);
        }
    });
}

/// Removes a directory into which threads of this program may still be writing.
fn remove_for_good(path: &Path) {
    for _ in 0..100 {
        let removed = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
        if removed.is_ok() || !path.exists() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    eprintln!("narad-bench: {} is left behind; remove it", path.display());
}

fn forget(thing: &Thing) {
    things().retain(|known| known != thing);
}

/// The first process of a server that a script has started in `home`: scripts note it there.
pub fn noted_process(home: &Path) -> Option<u32> {
    std::fs::read_to_string(home.join("pid")).ok()?.split_whitespace().next()?.parse().ok()
}

/// A loopback address that was free a moment ago.
pub fn free_address() -> Result<SocketAddr, Failure> {
    TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .map_err(|error| Failure(format!("cannot find a free port on 127.0.0.1: {error}")))
}

/// Refuses a `--dir` that is not there: a typing error must not become a directory.
pub fn require_directory(path: &Path) -> Result<(), Failure> {
    match path.is_dir() {
        true => Ok(()),
        false => Err(Failure(format!(
            "--dir {}: there is no such directory; make it, or name another on the drive to measure",
            path.display()
        ))),
    }
}

/// A fresh directory; dropping it removes it and everything in it.
pub struct Home(PathBuf);

impl Home {
    /// Makes one below `parent`.
    pub fn below(parent: &Path) -> Result<Home, Failure> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        require_directory(parent)?;
        let name = format!("narad-bench-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let failed = |error| {
            let parent = parent.display();
            Failure(format!("--dir {parent}: cannot make a directory there: {error}; choose a writable one"))
        };
        let path = std::fs::canonicalize(parent).map_err(failed)?.join(name);
        let mut things = things();
        std::fs::create_dir(&path).map_err(failed)?;
        things.push(Thing::Path(path.clone()));
        Ok(Home(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        // Removed before it is forgotten: a signal meanwhile finds what is left of it.
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            eprintln!("narad-bench: {} is left behind: {error}; remove it", self.0.display());
        }
        forget(&Thing::Path(self.0.clone()));
    }
}

/// A file that keeps its name while it is used; dropping it removes it.
pub struct NamedFile(PathBuf);

impl NamedFile {
    /// Makes it with `create`.
    pub fn create<T>(path: &Path, create: impl FnOnce(&Path) -> io::Result<T>) -> io::Result<(T, NamedFile)> {
        let mut things = things();
        let made = create(path)?;
        things.push(Thing::Path(path.to_owned()));
        Ok((made, NamedFile(path.to_owned())))
    }
}

impl Drop for NamedFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
        forget(&Thing::Path(self.0.clone()));
    }
}

/// Starts `command`, all its threads on `cpus` if any are given, which `flag` has named.
fn spawn(command: &mut Command, cpus: Option<&[usize]>, flag: &str) -> Result<io::Result<Child>, Failure> {
    // Nothing may run that is not on the list: a signal waits until it is.
    let mut things = things();
    // A child inherits the placement of the thread that starts it.
    let spawned = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            cpus.map_or(Ok(()), |cpus| cpu::pin(cpus, flag))?;
            Ok(command.spawn())
        });
        thread.join().unwrap_or_else(|_| Err(Failure("the thread that starts processes panicked".into())))
    })?;
    if let Ok(child) = &spawned {
        things.push(Thing::Process(child.id()));
    }
    Ok(spawned)
}

/// Runs a script to its end. What it starts and does not wait for goes on, and is not on the list any more.
pub fn run(command: &mut Command, cpus: Option<&[usize]>) -> Result<io::Result<ExitStatus>, Failure> {
    let ended = spawn(command, cpus, "--broker-cpus")?.and_then(|mut child| {
        let ended = child.wait();
        forget(&Thing::Process(child.id()));
        ended
    });
    Ok(ended)
}

/// A running server. Dropping it stops it.
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
    started: Instant,
}

impl Process {
    /// Starts `command`, its output in `log`; all its threads stay on `cpus`, if any are given.
    pub fn start(name: &str, command: &mut Command, log: PathBuf, cpus: Option<&[usize]>) -> Result<Process, Failure> {
        let output = File::options().create(true).append(true).open(&log);
        let output =
            output.map_err(|error| Failure(format!("{}: cannot write a log there: {error}", log.display())))?;
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let started = Instant::now();
        let spawned = spawn(command, cpus, "--broker-cpus")?;
        let program = command.get_program().to_string_lossy();
        let child = spawned.map_err(|error| {
            Failure(format!("{program}: cannot start it: {error}; is it a program for this machine? --binary names it"))
        })?;
        Ok(Process { name: name.to_owned(), child, log, started })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until `is_ready` says so; how long it took since the start. Fails, in the words of its log, when it ends
    /// before, or takes longer than `patience`.
    pub fn wait_ready(&mut self, patience: Duration, mut is_ready: impl FnMut() -> bool) -> Result<Duration, Failure> {
        loop {
            let ended = self.child.try_wait()?;
            if ended.is_none() && is_ready() {
                return Ok(self.started.elapsed());
            }
            if ended.is_some() || self.started.elapsed() > patience {
                let how = match ended {
                    Some(status) => format!("ended before it was ready ({status})"),
                    None => format!("was not ready within {} s", patience.as_secs()),
                };
                return Err(Failure(format!("{}, which was started here, {how}; {}", self.name, self.last_words())));
            }
            std::thread::sleep(ASK_EVERY);
        }
    }

    fn last_words(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        match lines[lines.len().saturating_sub(LAST_WORDS)..].join("\n") {
            last if last.is_empty() => "it said nothing: is it the broker's program? --binary names it".into(),
            last => format!("its last words:\n{last}"),
        }
    }

    /// kill -9: nothing is closed.
    pub fn kill(mut self) {
        self.kill_now();
    }

    fn kill_now(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            Processes::of(self.pid()).signal(Signal::TERM);
        }
        let deadline = Instant::now() + STOP;
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                // Nothing that it holds is wanted any more.
                self.kill_now();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        forget(&Thing::Process(self.pid()));
    }
}
