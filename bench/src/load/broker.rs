//! A `narad` of our own for the time of a measurement.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::admin::Admin;
use super::cpu;
use super::process::{free_address, Home, Process};
use super::target::{Credentials, Target};
use crate::run::Failure;

/// How long a broker on an empty directory may take.
const READY: Duration = Duration::from_secs(60);

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
    /// Of the broker's process, beside ours.
    pub environment: Vec<(&'static str, String)>,
}

/// A running broker. Dropping it stops it and removes its data, if that was made for it.
pub struct Broker {
    /// Goes first: a directory is removed when nobody writes into it.
    process: Process,
    _home: Option<Home>,
    data: PathBuf,
    pub address: SocketAddr,
    /// From the start of the process until it was ready.
    pub ready_after: Duration,
}

/// The broker's program: as asked with `--binary`, or beside this one.
pub fn program(asked: Option<&Path>) -> Result<PathBuf, Failure> {
    let path = match asked {
        Some(path) => path.to_owned(),
        None => std::env::current_exe()?.with_file_name("narad"),
    };
    match path.is_file() {
        true => Ok(path.canonicalize()?),
        false => Err(Failure(format!(
            "{}: there is no such program; build it (`cargo build --release`) or name it with --binary",
            path.display()
        ))),
    }
}

impl Plan {
    /// Starts the broker in a directory of its own and waits until it is ready.
    pub fn start(&self) -> Result<Broker, Failure> {
        // Looked for before anything is made.
        program(self.binary.as_deref())?;
        let home = Home::below(&self.directory)?;
        let broker = self.start_on(&home.path().join("data"), READY)?;
        Ok(Broker { _home: Some(home), ..broker })
    }

    /// Starts it on `data`, which stays; what it says goes to a log beside that. Waits until it is ready, up to
    /// `patience`.
    pub fn start_on(&self, data: &Path, patience: Duration) -> Result<Broker, Failure> {
        let address = free_address()?;
        let mut command = Command::new(program(self.binary.as_deref())?);
        command.arg("serve").arg("--addr").arg(address.to_string()).arg("--data-dir").arg(data);
        command.args(["--log-level", "warn"]);
        if let Some(cpus) = &self.cpus {
            command.arg("--cpus").arg(cpu::list(cpus));
        }
        command.args(self.arguments.split_whitespace()).env("NARAD_SECURITY_ENABLED", "false");
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        let confined = self.cpus.as_deref().filter(|_| self.confine);
        let mut process = Process::start("narad", &mut command, data.with_extension("log"), confined)?;
        let admin = Admin::new(&Target::of(address, &Credentials::default())?);
        let ready_after = process.wait_ready(patience, || admin.is_ready())?;
        Ok(Broker { process, _home: None, data: data.to_owned(), address, ready_after })
    }
}

impl Broker {
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Its data directory.
    pub fn data(&self) -> PathBuf {
        self.data.clone()
    }

    pub fn target(&self) -> Result<Target, Failure> {
        Target::of(self.address, &Credentials::default())
    }

    /// kill -9: nothing is closed.
    pub fn kill(self) {
        self.process.kill();
    }
}
