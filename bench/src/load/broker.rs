//! A broker of our own for the time of a measurement: started in a fresh directory, stopped by its process id, and
//! nothing of it left behind, also when this program is told to stop.

use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;

use super::admin::Admin;
use super::cpu;
use super::target::{Credentials, Target};
use crate::run::Failure;

const READY: Duration = Duration::from_secs(60);
const STOP: Duration = Duration::from_secs(15);

/// What to start, and where.
#[derive(Clone, Debug)]
pub struct Plan {
    /// `narad`; `None`: beside this program.
    pub binary: Option<PathBuf>,
    /// Where the fresh data directory is made.
    pub directory: PathBuf,
    /// Given to `--cpus`.
    pub cpus: Option<Vec<usize>>,
    /// All its threads stay on those CPUs, not only its shards.
    pub confine: bool,
    /// More arguments, separated by spaces.
    pub arguments: String,
}

/// A running broker. Dropping it stops it.
pub struct Broker {
    child: Child,
    home: PathBuf,
    pub address: SocketAddr,
}

/// Processes and directories to clear away when this program is stopped.
static STARTED: Mutex<Vec<(u32, PathBuf)>> = Mutex::new(Vec::new());
static WATCH: Once = Once::new();

fn started() -> MutexGuard<'static, Vec<(u32, PathBuf)>> {
    STARTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// On the usual signals: kills what was started, removes its data, and leaves.
fn watch_signals() {
    WATCH.call_once(|| {
        let signals = [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP];
        let Ok(mut signals) = signal_hook::iterator::Signals::new(signals) else { return };
        std::thread::spawn(move || {
            if let Some(signal) = signals.forever().next() {
                for (pid, home) in started().drain(..) {
                    signal_process(pid, Signal::SIGKILL);
                    let _ = std::fs::remove_dir_all(home);
                }
                std::process::exit(128 + signal);
            }
        });
    });
}

fn signal_process(pid: u32, signal: Signal) {
    if let Ok(pid) = i32::try_from(pid) {
        // It may have ended by itself.
        let _ = kill(Pid::from_raw(pid), signal);
    }
}

impl Plan {
    fn find_binary(&self) -> Result<PathBuf, Failure> {
        let path = match &self.binary {
            Some(path) => path.clone(),
            None => std::env::current_exe()?.with_file_name("narad"),
        };
        match path.is_file() {
            true => Ok(path),
            false => Err(Failure(format!(
                "{}: there is no such program; build it (`cargo build --release`) or name it with --binary",
                path.display()
            ))),
        }
    }

    /// Starts the broker and waits until it is ready.
    pub fn start(&self) -> Result<Broker, Failure> {
        watch_signals();
        let binary = self.find_binary()?;
        let home = fresh_directory(&self.directory)?;
        let address: SocketAddr = free_port()?;
        let log = home.join("broker.log");
        let output = File::create(&log).map_err(|error| {
            Failure(format!("{}: cannot write a log there: {error}; choose another --dir", log.display()))
        })?;
        let mut command = Command::new(&binary);
        command.arg("serve").arg("--addr").arg(address.to_string()).arg("--data-dir").arg(home.join("data"));
        command.args(["--log-level", "warn"]);
        if let Some(cpus) = &self.cpus {
            command.arg("--cpus").arg(cpu::list(cpus));
        }
        command.args(self.arguments.split_whitespace());
        command.env("NARAD_SECURITY_ENABLED", "false").stdin(Stdio::null()).stderr(output).stdout(Stdio::null());
        let confined = self.cpus.clone().filter(|_| self.confine);
        // A child inherits the placement of the thread that starts it.
        let spawned = std::thread::scope(|scope| {
            let spawn = || confined.map_or(Ok(()), |cpus| cpu::pin(&cpus, "--broker-cpus")).map(|()| command.spawn());
            scope.spawn(spawn).join().unwrap_or_else(|_| Err(Failure("starting the broker panicked".into())))
        })?;
        let child = spawned.map_err(|error| Failure(format!("{}: cannot start it: {error}", binary.display())))?;
        started().push((child.id(), home.clone()));
        let mut broker = Broker { child, home, address };
        broker.wait_ready(&log)?;
        Ok(broker)
    }
}

/// A loopback address that was free a moment ago.
fn free_port() -> Result<SocketAddr, Failure> {
    TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .map_err(|error| Failure(format!("cannot find a free port on 127.0.0.1: {error}")))
}

fn fresh_directory(parent: &Path) -> Result<PathBuf, Failure> {
    static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let name = format!("narad-bench-{}-{number}", std::process::id());
    let path = std::fs::canonicalize(parent).unwrap_or_else(|_| parent.to_owned()).join(name);
    std::fs::create_dir_all(&path).map_err(|error| {
        Failure(format!(
            "--dir {}: cannot make a data directory there: {error}; choose a writable one",
            parent.display()
        ))
    })?;
    Ok(path)
}

impl Broker {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its data directory.
    pub fn data(&self) -> PathBuf {
        self.home.join("data")
    }

    pub fn target(&self) -> Result<Target, Failure> {
        Target::of(self.address, &Credentials::default())
    }

    fn wait_ready(&mut self, log: &Path) -> Result<(), Failure> {
        let admin = Admin::new(&self.target()?);
        let deadline = Instant::now() + READY;
        loop {
            let ended = self.child.try_wait()?;
            if ended.is_none() && admin.is_ready() {
                return Ok(());
            }
            if ended.is_some() || Instant::now() > deadline {
                let text = std::fs::read_to_string(log).unwrap_or_default();
                let last: Vec<&str> = text.lines().rev().take(5).collect();
                let last: Vec<&str> = last.into_iter().rev().collect();
                let how =
                    ended.map_or("was not ready within 60 s".to_owned(), |status| format!("ended at once ({status})"));
                return Err(Failure(format!(
                    "the broker that was started {how}; its last words:\n{}",
                    last.join("\n")
                )));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        signal_process(self.pid(), Signal::SIGTERM);
        let deadline = Instant::now() + STOP;
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                // Killing what will not stop; nothing that it holds is wanted.
                let _ = self.child.kill();
                let _ = self.child.wait();
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let pid = self.pid();
        started().retain(|(started, _)| *started != pid);
        if let Err(error) = std::fs::remove_dir_all(&self.home) {
            eprintln!("narad-bench: {}: cannot remove it: {error}", self.home.display());
        }
    }
}
