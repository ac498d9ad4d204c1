//! The broker as a process: started, asked whether it is ready, killed.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::parts::nanos;
use crate::run::Failure;

const PATIENCE_NANOS: u64 = 300 * 1_000_000_000;
const ASK_EVERY: Duration = Duration::from_millis(1);

/// The broker's program: as asked, or beside this one.
pub fn program(asked: Option<&Path>) -> Result<PathBuf, Failure> {
    let path = match asked {
        Some(path) => path.to_owned(),
        None => std::env::current_exe()?.with_file_name("narad"),
    };
    match path.is_file() {
        true => Ok(path.canonicalize()?),
        false => Err(Failure(format!(
            "there is no broker at {}: build it (cargo build --release), or name it with --narad",
            path.display()
        ))),
    }
}

/// Killed when dropped.
pub struct Broker {
    child: Child,
    address: SocketAddr,
    log: PathBuf,
    ready_seconds: f64,
}

impl Broker {
    /// Starts `narad serve` with one shard on `data`, and waits until it is ready.
    pub fn start(narad: &Path, data: &Path, cpu: usize) -> Result<Broker, Failure> {
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let log = data.with_extension("log");
        let output = File::create(&log)?;
        let started = nanos();
        let child = Command::new(narad)
            .args(["serve", "--addr", &address.to_string(), "--cpus", &cpu.to_string(), "--data-dir"])
            .arg(data)
            .env("NARAD_SECURITY_ENABLED", "false")
            .env("NARAD_TOPIC_MAX_PARTITIONS", super::PARTITIONS_MAX.to_string())
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .map_err(|error| Failure(format!("cannot start {}: {error}", narad.display())))?;
        let mut broker = Broker { child, address, log, ready_seconds: 0.0 };
        while !broker.ask("GET", "/readyz", b"").is_ok_and(|answer| answer.starts_with("HTTP/1.1 200")) {
            if let Some(status) = broker.child.try_wait()? {
                return Err(broker.failure(&format!("the broker ended with {status} before it was ready")));
            }
            if nanos() - started > PATIENCE_NANOS {
                return Err(broker.failure("the broker was not ready within five minutes"));
            }
            std::thread::sleep(ASK_EVERY);
        }
        broker.ready_seconds = (nanos() - started) as f64 / 1e9;
        Ok(broker)
    }

    /// Seconds from the start of the process to its first 200.
    pub fn ready_seconds(&self) -> f64 {
        self.ready_seconds
    }

    /// Seconds that the process has been on a CPU so far; 0 where /proc does not say.
    pub fn cpu_seconds(&self) -> f64 {
        /// Of /proc/<pid>/stat, on every architecture that Linux runs this on.
        const TICKS_PER_SECOND: f64 = 100.0;
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap_or_default();
        // Behind the name, which may hold anything: user and system time are the 12th and 13th word.
        let words = stat.rsplit_once(") ").map_or("", |(_, rest)| rest).split(' ');
        words.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / TICKS_PER_SECOND
    }

    /// One request on a connection of its own; head and body of the answer.
    pub fn ask(&self, method: &str, target: &str, body: &[u8]) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(self.address)?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        let head = format!(
            "{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(&[head.as_bytes(), body].concat())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// [`Broker::ask`] where anything but the status `expected` is a failure.
    pub fn must(&self, method: &str, target: &str, body: &[u8], expected: u16) -> Result<(), Failure> {
        let answer = self.ask(method, target, body)?;
        match answer.starts_with(&format!("HTTP/1.1 {expected}")) {
            true => Ok(()),
            false => Err(self.failure(&format!("the broker answered {method} {target} with {answer:?}"))),
        }
    }

    fn failure(&self, what: &str) -> Failure {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let last: Vec<&str> = log.lines().rev().take(5).collect();
        let last: Vec<&str> = last.into_iter().rev().collect();
        Failure(format!("{what}; the end of its log:\n{}", last.join("\n")))
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        // kill -9: nothing is closed, which is what a recovery is measured after.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
