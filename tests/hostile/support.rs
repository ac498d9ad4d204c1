//! Brokers on scratch directories, and raw connections.

use std::io::{self, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use narad_harness::client::{read_response, Client, Response};
use narad_harness::process::Broker;

/// A bound that only something that hangs reaches.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A directory of its own, removed at the end.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("narad-hostile-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn binary() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_narad"))
}

/// A broker on a directory that goes with it.
pub struct Node {
    pub broker: Broker,
    pub scratch: Scratch,
    arguments: Vec<String>,
}

impl Node {
    pub fn start(name: &str, arguments: &[&str]) -> Node {
        let scratch = Scratch::new(name);
        let mut all = vec!["--no-pin", "--memory", "256MiB"];
        if !arguments.contains(&"--shards") {
            all.extend(["--shards", "2"]);
        }
        all.extend(arguments);
        let broker = Broker::start(binary(), &scratch.path("data"), &all).unwrap();
        Node { broker, scratch, arguments: all.into_iter().map(str::to_owned).collect() }
    }

    pub fn data(&self) -> PathBuf {
        self.scratch.path("data")
    }

    pub fn client(&self) -> Client {
        self.broker.client()
    }

    /// Starts again after the process has ended.
    pub fn restart(&mut self, replace: &[&str]) {
        let arguments: Vec<&str> = match replace {
            [] => self.arguments.iter().map(String::as_str).collect(),
            other => other.to_vec(),
        };
        self.broker = Broker::start(binary(), &self.data(), &arguments).unwrap();
    }

    pub fn stop(&mut self) {
        let status = self.broker.stop(PATIENCE).unwrap();
        assert_eq!(status.code(), Some(0), "{}", self.broker.log_text());
    }

    pub fn create(&self, topic: &str, settings: &str) {
        let body = format!("{{\"name\":\"{topic}\"{settings}}}");
        let answer = self.client().post("/v1/topics", body.as_bytes()).unwrap();
        assert_eq!(answer.status, 201, "{}", answer.text());
    }
}

pub fn refused(data: &Path, arguments: &[&str]) -> (i32, String) {
    // A fresh log, so that the text is this start's alone.
    let _ = std::fs::remove_file(data.with_extension("log"));
    let mut broker = Broker::spawn(binary(), data, arguments).unwrap();
    match broker.wait_exit(PATIENCE) {
        Ok(status) => (status.code().unwrap_or(-1), broker.log_text()),
        Err(error) => panic!("the start was not refused: {error}\n{}", broker.log_text()),
    }
}

/// One connection on which anything may be sent.
pub struct Wire(BufReader<TcpStream>);

impl Wire {
    pub fn open(address: SocketAddr) -> Wire {
        let stream = TcpStream::connect_timeout(&address, Duration::from_secs(5)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Wire(BufReader::new(stream))
    }

    pub fn send(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        self.0.get_mut().write_all(bytes.as_ref())
    }

    pub fn read(&mut self) -> io::Result<Response> {
        read_response(&mut self.0, false)
    }

    pub fn read_head(&mut self) -> io::Result<Response> {
        read_response(&mut self.0, true)
    }

    /// Whether the server closes within the patience, without another byte.
    pub fn is_closed(&mut self) -> bool {
        use std::io::Read;
        let mut byte = [0];
        match self.0.read(&mut byte) {
            Ok(0) => true,
            Ok(_) => false,
            Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
        }
    }

    pub fn stream(&self) -> &TcpStream {
        self.0.get_ref()
    }
}

/// Runs the binary without any of our variables.
pub fn narad(arguments: &[&str], input: &[u8]) -> Output {
    run(arguments, input, &[])
}

pub fn narad_with(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    run(arguments, b"", environment)
}

fn run(arguments: &[&str], input: &[u8], environment: &[(&str, &str)]) -> Output {
    use std::process::Stdio;
    let mut command = Command::new(binary());
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("NARAD_")) {
        command.env_remove(name);
    }
    command.envs(environment.iter().copied()).args(arguments);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // A command that refuses its arguments does not read its input.
    let _ = child.stdin.take().unwrap().write_all(input);
    child.wait_with_output().unwrap()
}

/// Waits until `done`, or fails saying what it waited for.
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "in {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The error text of an answer, if it is the JSON envelope.
pub fn error_of(answer: &Response) -> String {
    answer.json()["error"].as_str().map(str::to_owned).unwrap_or_default()
}
