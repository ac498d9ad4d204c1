//! One broker process: start, wait until ready, kill, stop; its log goes to a file beside its data.

use std::fs::{File, OpenOptions};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::client::Client;

pub struct Broker {
    child: Child,
    pub address: SocketAddr,
    pub log: PathBuf,
}

/// A loopback port that was free a moment ago.
pub fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

impl Broker {
    /// Starts `binary serve` on `data`, security off, on a free loopback port, and waits until it is ready.
    /// `arguments` are appended.
    pub fn start(binary: &Path, data: &Path, arguments: &[&str]) -> io::Result<Broker> {
        let mut broker = Broker::spawn(binary, data, arguments)?;
        match broker.wait_ready(Duration::from_secs(60)) {
            Ok(()) => Ok(broker),
            Err(error) => {
                broker.kill()?;
                Err(io::Error::other(format!("{error}; its log:\n{}", broker.log_text())))
            }
        }
    }

    /// As [`Broker::start`], without waiting.
    pub fn spawn(binary: &Path, data: &Path, arguments: &[&str]) -> io::Result<Broker> {
        Broker::spawn_by(Command::new(binary), data, arguments)
    }

    /// As [`Broker::spawn`], by a command that ends in the broker's binary.
    pub fn spawn_by(mut command: Command, data: &Path, arguments: &[&str]) -> io::Result<Broker> {
        let address: SocketAddr = ([127, 0, 0, 1], free_port()?).into();
        let log = data.with_extension("log");
        let output: File = OpenOptions::new().create(true).append(true).open(&log)?;
        let child = command
            .arg("serve")
            .arg("--addr")
            .arg(address.to_string())
            .arg("--data-dir")
            .arg(data)
            .args(arguments)
            .env("NARAD_SECURITY_ENABLED", "false")
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()?;
        Ok(Broker { child, address, log })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn client(&self) -> Client {
        Client::new(self.address)
    }

    pub fn wait_ready(&mut self, patience: Duration) -> io::Result<()> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Err(io::Error::other(format!("the broker exited with {status} before it was ready")));
            }
            let mut probe = self.client().with_timeout(Duration::from_secs(2));
            if probe.get("/readyz").is_ok_and(|answer| answer.status == 200) {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(io::Error::other("the broker did not become ready in time"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// kill -9, and waits until the process is gone.
    pub fn kill(&mut self) -> io::Result<ExitStatus> {
        self.child.kill()?;
        self.child.wait()
    }

    /// SIGTERM, and waits for the exit.
    pub fn stop(&mut self, patience: Duration) -> io::Result<ExitStatus> {
        self.signal(libc::SIGTERM)?;
        self.wait_exit(patience)
    }

    pub fn signal(&self, signal: i32) -> io::Result<()> {
        // The shell's own `kill`: a bare Debian has no program of that name.
        let status = Command::new("sh").arg("-c").arg(format!("kill -{signal} {}", self.pid())).status()?;
        if status.success() {
            Ok(())
        } else {
            Err(io::Error::other(format!("kill -{signal} {}: {status}", self.pid())))
        }
    }

    pub fn wait_exit(&mut self, patience: Duration) -> io::Result<ExitStatus> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                self.kill()?;
                return Err(io::Error::other("the broker did not stop in time and was killed"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn log_text(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        // A test that failed must not leave its broker behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
