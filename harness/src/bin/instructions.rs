//! Instructions that the broker executes per operation, by a fixed script, and the check that holds changes to it.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use argh::FromArgs;
use narad_harness::callgrind::Profiled;
use narad_harness::client::{read_response, Response};

/// A count may be that much above the stored one, in percent.
const ALLOWED_PERCENT: f64 = 5.0;
/// Each count is the smallest of so many: a commit split in two or a checkpoint more only ever adds.
const ROUNDS: usize = 5;
/// Consumed in one round, and how many rounds there can be with the one that warms up.
const CONSUMED: usize = 300;
const CONSUME_ROUNDS_MAX: usize = ROUNDS + 1;
const CONNECTIONS: usize = 64;
/// So often is everything measured before a check fails.
const CHECKS_MAX: usize = 3;

/// Count the instructions that the broker executes per operation, under valgrind.
#[derive(FromArgs)]
struct Arguments {
    /// broker binary (default target/release/narad)
    #[argh(option, default = "PathBuf::from(\"target/release/narad\")")]
    binary: PathBuf,
    /// fail when a count is more than 5 % above the one in this file
    #[argh(option)]
    check: Option<PathBuf>,
    /// write the counts to this file
    #[argh(option)]
    write: Option<PathBuf>,
    /// copy the profiles to this folder, for callgrind_annotate
    #[argh(option)]
    profiles: Option<PathBuf>,
}

/// Connections that send requests made before and read the answers; a request's own bytes never change.
struct Load {
    connections: Vec<BufReader<TcpStream>>,
}

fn request(method: &str, target: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes = format!(
        "{method} {target} HTTP/1.1\r\nHost: 127.0.0.1:7942\r\nUser-Agent: narad-instructions\r\n\
         Content-Type: application/octet-stream\r\nContent-Length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

fn expect(response: Response, status: u16) -> io::Result<Response> {
    match response.status == status {
        true => Ok(response),
        false => {
            Err(io::Error::other(format!("answered {} instead of {status}: {}", response.status, response.text())))
        }
    }
}

impl Load {
    fn connect(address: SocketAddr) -> io::Result<Load> {
        let connect = |_| {
            let stream = TcpStream::connect(address)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(Duration::from_secs(60)))?;
            Ok(BufReader::new(stream))
        };
        Ok(Load { connections: (0..CONNECTIONS).map(connect).collect::<io::Result<_>>()? })
    }

    fn one(&mut self, request: &[u8], status: u16) -> io::Result<Response> {
        let connection = &mut self.connections[0];
        connection.get_mut().write_all(request)?;
        expect(read_response(connection, false)?, status)
    }

    /// The request on every connection, then all the answers.
    fn all(&mut self, request: &[u8], status: u16) -> io::Result<()> {
        for connection in &mut self.connections {
            connection.get_mut().write_all(request)?;
        }
        for connection in &mut self.connections {
            expect(read_response(connection, false)?, status)?;
        }
        Ok(())
    }

    /// What will be consumed, in batches: how many single produces share one frame depends on the drive, and with it
    /// what reading them costs.
    fn stock(&mut self) -> io::Result<()> {
        self.one(&request("POST", "/v1/topics", br#"{"name":"stock","partitions":3}"#), 201)?;
        let batches = ((CONSUME_ROUNDS_MAX * CONSUMED).div_ceil(100)) as u64;
        (0..batches).try_for_each(|_| self.one(&batch("stock"), 202).map(drop))
    }

    fn consume_and_ack(&mut self) -> io::Result<()> {
        let delivery = self.one(&request("GET", "/v1/topics/stock/consume", b""), 200)?.json();
        let handle = delivery["receipt_handle"].as_str().unwrap_or_default().to_owned();
        let target = format!("/v1/topics/stock/ack?receipt_handle={handle}");
        self.one(&request("POST", &target, b""), 204).map(drop)
    }
}

/// A line of the table: its name, operations in one round, and the round.
type Line = (&'static str, usize, fn(&mut Load) -> io::Result<()>);

fn single() -> Vec<u8> {
    request("POST", "/v1/topics/orders/produce", &[b'x'; 256])
}

fn batch(topic: &str) -> Vec<u8> {
    let message = format!("{{\"payload\":\"{}\"}}", "x".repeat(254));
    let body = format!("{{\"messages\":[{}]}}", vec![message; 100].join(","));
    request("POST", &format!("/v1/topics/{topic}/produce/batch"), body.as_bytes())
}

const LINES: [Line; 4] = [
    ("produce_256B_1_connection", 300, |load| (0..300).try_for_each(|_| load.one(&single(), 202).map(drop))),
    ("produce_256B_64_connections", 20 * CONNECTIONS, |load| (0..20).try_for_each(|_| load.all(&single(), 202))),
    ("produce_batch_100x256B", 60, |load| (0..60).try_for_each(|_| load.one(&batch("orders"), 202).map(drop))),
    ("consume_and_ack_256B", CONSUMED, |load| (0..CONSUMED).try_for_each(|_| load.consume_and_ack())),
];

fn measure(arguments: &Arguments, folder: &Path) -> io::Result<BTreeMap<String, u64>> {
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    fs::create_dir_all(folder)?;
    let mut profiled = Profiled::start(&arguments.binary, folder)?;
    let mut load = Load::connect(profiled.broker().address)?;
    load.one(&request("POST", "/v1/topics", br#"{"name":"orders","partitions":3}"#), 201)?;
    load.stock()?;
    let mut counts = BTreeMap::new();
    for (name, operations, round) in LINES {
        round(&mut load)?; // buffers grow to size
        let mut least = u64::MAX;
        for _ in 0..ROUNDS {
            least = least.min(profiled.count(|| round(&mut load))? / operations as u64);
        }
        println!("{name:<30} {least:>9}");
        counts.insert(name.to_owned(), least);
        if let Some(profiles) = &arguments.profiles {
            fs::create_dir_all(profiles)?;
            fs::copy(profiled.last_profile(), profiles.join(name))?;
        }
    }
    drop(load);
    profiled.broker().stop(Duration::from_secs(60))?;
    Ok(counts)
}

fn stored(path: &Path) -> io::Result<BTreeMap<String, u64>> {
    let text = fs::read_to_string(path)
        .map_err(|error| io::Error::new(error.kind(), format!("cannot read {}: {error}", path.display())))?;
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    lines
        .map(|line| {
            let mut words = line.split_whitespace();
            let (name, count) = (words.next(), words.next().and_then(|count| count.parse().ok()));
            name.map(str::to_owned)
                .zip(count)
                .ok_or_else(|| io::Error::other(format!("{}: not a name and a count: {line}", path.display())))
        })
        .collect()
}

/// Tells what is above its bound; `false` when anything is.
fn holds(counts: &BTreeMap<String, u64>, stored: &BTreeMap<String, u64>) -> bool {
    let mut holds = counts.keys().eq(stored.keys());
    if !holds {
        eprintln!("the stored table has other lines than the script: write it again");
    }
    for (name, count) in counts {
        let Some(before) = stored.get(name) else { continue };
        let percent = (*count as f64 / *before as f64 - 1.0) * 100.0;
        if percent > ALLOWED_PERCENT {
            eprintln!("{name}: {count} instructions, {percent:+.1} % against the stored {before}");
            holds = false;
        } else if percent < -ALLOWED_PERCENT {
            eprintln!(
                "{name}: {percent:+.1} % against the stored {before}: write the table again, so that it stays so"
            );
        }
    }
    holds
}

fn run(arguments: &Arguments, folder: &Path) -> io::Result<bool> {
    let counts = measure(arguments, folder)?;
    if let Some(path) = &arguments.write {
        let mut text = String::from(
            "# Instructions in user space per operation, one shard, from request to record in its log or ack in memory.\n\
             # Written by scripts/instructions --write. In a change that needs more, say why.\n",
        );
        counts.iter().for_each(|(name, count)| text.push_str(&format!("{name:<30} {count:>9}\n")));
        fs::write(path, text)?;
    }
    let Some(path) = &arguments.check else { return Ok(true) };
    let stored = stored(path)?;
    let mut counts = counts;
    for _ in 1..CHECKS_MAX {
        if holds(&counts, &stored) {
            return Ok(true);
        }
        // A busy machine only ever adds: a timer that is due more often, a commit split in two.
        eprintln!("measured again, in case the machine was busy");
        let again = measure(arguments, folder)?;
        counts.iter_mut().for_each(|(name, count)| *count = (*count).min(again.get(name).copied().unwrap_or(*count)));
    }
    Ok(holds(&counts, &stored))
}

fn main() -> ExitCode {
    let arguments: Arguments = argh::from_env();
    let folder = std::env::temp_dir().join(format!("narad-instructions.{}", std::process::id()));
    let outcome = fs::create_dir_all(&folder).and_then(|()| run(&arguments, &folder));
    let removed = fs::remove_dir_all(&folder);
    match outcome.and_then(|holds| removed.map(|()| holds)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            eprintln!("error: the broker needs more instructions than before; see scripts/instructions --profiles DIR");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: the instructions could not be counted, so nothing was checked: {error}");
            ExitCode::FAILURE
        }
    }
}
