//! A server started by one of the scripts in `bench/peers`, in a fresh directory; killed, and its data removed, when it is
//! dropped or when this program is told to stop.

use std::fs::File;
use std::io::{Read, Seek};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::Signal;

use crate::load::process::{noted_process, run, Home};
use crate::load::processes::Processes;
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
    home: Home,
    pub address: SocketAddr,
    first: u32,
}

impl Recipe {
    /// Fails with what is missing to run the server.
    pub fn check(&self) -> Result<(), Failure> {
        self.script_says(&["check"])
    }

    pub fn start(self) -> Result<Server, Failure> {
        let home = Home::below(&self.directory)?;
        let address = SocketAddr::from(([127, 0, 0, 1], free_ports()?));
        // From here on dropping it cleans up.
        let mut server = Server { recipe: self, home, address, first: 0 };
        server.restart()?;
        Ok(server)
    }

    fn script_says(&self, words_given: &[&str]) -> Result<(), Failure> {
        let script = self.script.display();
        let mut command = Command::new(&self.script);
        command.args(words_given).envs(self.environment.iter().cloned()).stdin(Stdio::null()).stdout(Stdio::null());
        // What a server inherits must not be a pipe that somebody waits for: the script's words go to a file.
        let mut said = unnamed_file()?;
        command.stderr(said.try_clone()?);
        let status = run(&mut command, self.cpus.as_deref())?.map_err(|error| {
            Failure(format!("{script}: cannot run it: {error}; --scripts names the directory of such scripts"))
        })?;
        if status.success() {
            return Ok(());
        }
        let mut words = String::new();
        said.rewind()?;
        said.read_to_string(&mut words)?;
        let words = match words.trim() {
            "" => format!("{script} {}: failed without a word ({status})", words_given.join(" ")),
            words => words.to_owned(),
        };
        Err(Failure(words))
    }
}

/// A file that is gone with this program, however that ends.
fn unnamed_file() -> Result<File, Failure> {
    let path = std::env::temp_dir().join(format!("narad-bench-{}-says", std::process::id()));
    let open = || {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path)?;
        std::fs::remove_file(&path)?;
        Ok(file)
    };
    open().map_err(|error: std::io::Error| {
        Failure(format!("{}: cannot write there: {error}; set TMPDIR to a directory where one can", path.display()))
    })
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
    fn script_does(&self, word: &str) -> Result<(), Failure> {
        let (home, port) = (self.home().display().to_string(), self.address.port().to_string());
        self.recipe.script_says(&[word, &home, &port])
    }

    /// Starts it again on what it has stored.
    pub fn restart(&mut self) -> Result<(), Failure> {
        self.script_does("start")?;
        let home = self.home().display();
        self.first =
            noted_process(self.home()).ok_or_else(|| Failure(format!("{home}/pid: there is no process id in it")))?;
        Ok(())
    }

    /// kill -9 of all its processes; its data stays.
    pub fn kill(&self) -> Result<(), Failure> {
        self.script_does("kill")
    }

    pub fn processes(&self) -> Processes {
        Processes::of(self.first)
    }

    pub fn home(&self) -> &Path {
        self.home.path()
    }

    /// Lets it do nothing at all until it is resumed.
    pub fn pause(&self) {
        self.processes().signal(Signal::STOP);
    }

    pub fn resume(&self) {
        self.processes().signal(Signal::CONT);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Err(Failure(text)) = self.kill() {
            eprintln!("narad-bench: {text}");
        }
    }
}
