//! A `narad` of our own for the time of a measurement.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;

use super::admin::Admin;
use super::cpu;
use super::process::{free_address, Home, Process};
use super::target::{Credentials, Target};
use crate::run::Failure;

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

/// A running broker. Dropping it stops it and removes its data.
pub struct Broker {
    /// Goes first: a directory is removed when nobody writes into it.
    process: Process,
    home: Home,
    pub address: SocketAddr,
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
        let binary = self.find_binary()?;
        let home = Home::below(&self.directory)?;
        let address = free_address()?;
        let mut command = Command::new(&binary);
        command.arg("serve").arg("--addr").arg(address.to_string()).arg("--data-dir").arg(home.path().join("data"));
        command.args(["--log-level", "warn"]);
        if let Some(cpus) = &self.cpus {
            command.arg("--cpus").arg(cpu::list(cpus));
        }
        command.args(self.arguments.split_whitespace()).env("NARAD_SECURITY_ENABLED", "false");
        let confined = self.cpus.as_deref().filter(|_| self.confine);
        let mut process = Process::start("narad", &mut command, &home, confined)?;
        let admin = Admin::new(&Target::of(address, &Credentials::default())?);
        process.wait_ready(|| admin.is_ready())?;
        Ok(Broker { process, home, address })
    }
}

impl Broker {
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Its data directory.
    pub fn data(&self) -> PathBuf {
        self.home.path().join("data")
    }

    pub fn target(&self) -> Result<Target, Failure> {
        Target::of(self.address, &Credentials::default())
    }
}
