//! A server started by one of the scripts in `bench/peers`, in a fresh directory; killed, and its data removed, when it is
//! dropped or when this program is told to stop.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use nix::sys::signal::Signal;

use super::processes::Processes;
use crate::load::cpu;
use crate::run::Failure;

/// Ports in a row that a script may use.
const PORTS: u16 = 3;

/// How a server is started.
#[derive(Clone, Debug)]
pub struct Recipe {
    pub script: PathBuf,
    /// Where the fresh directory is made.
    pub directory: PathBuf,
    /// CPUs of all its processes.
    pub cpus: Option<Vec<usize>>,
    pub environment: Vec<(&'static str, String)>,
}

/// A running server.
pub struct Server {
    recipe: Recipe,
    home: PathBuf,
    pub address: SocketAddr,
    first: u32,
}

/// Script, directory, port of everything that must not outlive this program.
static STARTED: Mutex<Vec<(PathBuf, PathBuf, u16)>> = Mutex::new(Vec::new());
static WATCH: Once = Once::new();

fn started() -> MutexGuard<'static, Vec<(PathBuf, PathBuf, u16)>> {
    STARTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// On the usual signals: kills what was started, removes its data, and leaves.
fn watch_signals() {
    WATCH.call_once(|| {
        let signals = [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP];
        let Ok(mut signals) = signal_hook::iterator::Signals::new(signals) else { return };
        std::thread::spawn(move || {
            if let Some(signal) = signals.forever().next() {
                // Held to the end: nothing more is started.
                let started = started();
                for (script, home, port) in started.iter() {
                    remove(script, home, *port);
                }
                std::process::exit(128 + signal);
            }
        });
    });
}

fn remove(script: &Path, home: &Path, port: u16) {
    let killed = Command::new(script).arg("kill").arg(home).arg(port.to_string()).stdin(Stdio::null()).status();
    if !killed.is_ok_and(|status| status.success()) {
        eprintln!("narad-bench: {}: could not be stopped; see {}", script.display(), home.display());
    }
    if let Err(error) = std::fs::remove_dir_all(home) {
        eprintln!("narad-bench: {}: cannot remove it: {error}", home.display());
    }
}

impl Recipe {
    /// Fails with what is missing to run the server.
    pub fn check(&self) -> Result<(), Failure> {
        self.script_says(&["check"])
    }

    pub fn start(self) -> Result<Server, Failure> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        watch_signals();
        let peer = self.script.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("narad-bench-{}-{peer}-{number}", std::process::id());
        let parent = std::fs::canonicalize(&self.directory).unwrap_or_else(|_| self.directory.clone());
        let home = parent.join(name);
        std::fs::create_dir_all(&home).map_err(|error| {
            let directory = self.directory.display();
            Failure(format!("--dir {directory}: cannot make a data directory there: {error}; choose a writable one"))
        })?;
        let port = free_ports()?;
        started().push((self.script.clone(), home.clone(), port));
        // From here on dropping it cleans up.
        let mut server = Server { recipe: self, home, address: SocketAddr::from(([127, 0, 0, 1], port)), first: 0 };
        server.restart()?;
        Ok(server)
    }

    fn script_says(&self, words: &[&str]) -> Result<(), Failure> {
        let script = self.script.display();
        let mut command = Command::new(&self.script);
        command.args(words).envs(self.environment.iter().cloned()).stdin(Stdio::null()).stdout(Stdio::null());
        // What a server inherits must not be a pipe that somebody waits for: the script's words go to a file.
        let path = std::env::temp_dir().join(format!("narad-bench-{}-says", std::process::id()));
        let unwritable = |error| Failure(format!("{}: cannot write there: {error}; set TMPDIR", path.display()));
        command.stderr(std::fs::File::create(&path).map_err(unwritable)?);
        // A child inherits the placement of the thread that starts it.
        let status = std::thread::scope(|scope| {
            let run = || {
                self.cpus.as_ref().map_or(Ok(()), |cpus| cpu::pin(cpus, "--server-cpus"))?;
                command.status().map_err(|error| {
                    Failure(format!("{script}: cannot run it: {error}; --scripts names the directory of such scripts"))
                })
            };
            scope.spawn(run).join().unwrap_or_else(|_| Err(Failure(format!("starting {script} panicked"))))
        });
        let said = std::fs::read_to_string(&path).unwrap_or_default();
        let _ = std::fs::remove_file(&path);
        match status?.success() {
            true => Ok(()),
            false => Err(Failure(said.trim().to_owned())),
        }
    }
}

/// The first of [`PORTS`] loopback ports in a row that were free a moment ago.
fn free_ports() -> Result<u16, Failure> {
    let mut last = None;
    for _ in 0..64 {
        let first = TcpListener::bind("127.0.0.1:0").and_then(|listener| Ok((listener.local_addr()?.port(), listener)));
        match first {
            Ok((port, _held)) if port < u16::MAX - PORTS => {
                if (port + 1..port + PORTS).all(|port| TcpListener::bind(("127.0.0.1", port)).is_ok()) {
                    return Ok(port);
                }
            }
            Ok(_) => {}
            Err(error) => last = Some(error),
        }
    }
    let why = last.map_or_else(|| "all that were tried are taken".to_owned(), |error| error.to_string());
    Err(Failure(format!("cannot find {PORTS} free ports in a row on 127.0.0.1: {why}")))
}

impl Server {
    /// Starts it again on what it has stored.
    pub fn restart(&mut self) -> Result<(), Failure> {
        let (home, port) = (self.home.display().to_string(), self.address.port().to_string());
        self.recipe.script_says(&["start", &home, &port])?;
        let file = self.home.join("pid");
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        let first = text.split_whitespace().next().and_then(|word| word.parse().ok());
        self.first = first.ok_or_else(|| Failure(format!("{}: there is no process id in it", file.display())))?;
        Ok(())
    }

    /// kill -9 of all its processes; its data stays.
    pub fn kill(&self) -> Result<(), Failure> {
        let (home, port) = (self.home.display().to_string(), self.address.port().to_string());
        self.recipe.script_says(&["kill", &home, &port])
    }

    pub fn processes(&self) -> Processes {
        Processes::of(self.first)
    }

    pub fn home(&self) -> &Path {
        &self.home
    }

    /// Lets it do nothing at all until it is resumed.
    pub fn pause(&self) {
        self.processes().signal(Signal::SIGSTOP);
    }

    pub fn resume(&self) {
        self.processes().signal(Signal::SIGCONT);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Held meanwhile: a signal does not do the same at the same time.
        let mut started = started();
        remove(&self.recipe.script, &self.home, self.address.port());
        started.retain(|(_, home, _)| *home != self.home);
    }
}
