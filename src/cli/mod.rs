//! The command line: server and client in one binary. Results go to standard output, everything
//! else to standard error. Exit codes: 0 done, 1 the request (or the start) failed, 2 wrong usage, 3 the server cannot
//! be reached.

mod client;
mod cluster;
mod completion;
mod context;
mod cpus;
mod doctor;
pub(crate) mod fuzz;
mod publish;
mod render;
mod replay;
mod report;
mod serve;
mod subscribe;
mod top;
mod topic;
mod usage;
mod whole;

#[cfg(test)]
mod tests;

use std::io::{self, Write};
use std::process::ExitCode;

use argh::{ArgsInfo, FromArgs};

use client::Client;

/// Queue-first message broker on durable partitioned logs.
#[derive(ArgsInfo, FromArgs, Debug)]
struct Narad {
    /// server URL (environment NARAD_ADDR; default the current context's, else http://127.0.0.1:7942)
    #[argh(option, short = 's')]
    server: Option<String>,
    /// context for this command, whatever is current
    #[argh(option)]
    ctx: Option<String>,
    #[argh(subcommand)]
    command: Command,
}

#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand)]
enum Command {
    Serve(serve::Serve),
    Server(serve::Server),
    Cpus(cpus::Cpus),
    Doctor(doctor::Doctor),
    Top(top::Top),
    Topic(topic::Topic),
    Cluster(cluster::Cluster),
    Pub(publish::Pub),
    Sub(subscribe::Sub),
    Replay(replay::Replay),
    Ctx(context::Ctx),
    Completion(completion::Completion),
    Version(Version),
}

/// Print the version.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "version")]
struct Version {}

/// Why a command did not do what it was asked for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The server refused, or failed. Also a broker that does not start.
    Request(String),
    Usage(String),
    /// No connection, or no answer.
    Unreachable(String),
    /// Whoever read our output has gone.
    OutputClosed,
    /// A signal asked us to stop.
    Interrupted,
}

impl From<io::Error> for Failure {
    /// Of writing results.
    fn from(error: io::Error) -> Failure {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Failure::OutputClosed,
            _ => Failure::Request(format!("cannot write the output: {error}")),
        }
    }
}

/// Runs the command line in `args`, the program's name first.
pub fn main(args: Vec<String>) -> ExitCode {
    let program = args.first().cloned().unwrap_or_else(|| "narad".to_owned());
    let program = program.rsplit('/').next().unwrap_or("narad").to_owned();
    let args = normalise(args.into_iter().skip(1).collect());
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let parsed = match Narad::from_args(&[&program], &args) {
        Ok(parsed) => parsed,
        Err(exit) => {
            let text = exit.output.trim_end();
            return match exit.status {
                Ok(()) => finish(writeln!(io::stdout(), "{text}").map_err(Failure::from)),
                Err(()) => finish(Err(Failure::Usage(usage::explain(text, &args)))),
            };
        }
    };
    finish(run(parsed))
}

fn run(narad: Narad) -> Result<(), Failure> {
    let (mut out, mut err) = (io::stdout(), io::stderr());
    let environment = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let server = narad.server.as_deref();
    let client = || context::endpoint(server, narad.ctx.as_deref(), &environment).map(Client::new);
    match narad.command {
        Command::Serve(serve) => serve::serve(serve),
        Command::Server(server) => match server.command {
            serve::ServerCommand::Start(command) => serve::start(command),
            serve::ServerCommand::Report(report::Report {}) => report::run(&mut client()?, &mut out),
        },
        Command::Doctor(command) => doctor::run(command, &mut out),
        Command::Cpus(command) => cpus::run(command, &mut out),
        Command::Top(command) => top::run(command, client()?, &mut out),
        Command::Topic(command) => topic::run(command, &mut client()?, &mut io::stdin().lock(), &mut out, &mut err),
        Command::Cluster(command) => cluster::run(command, &mut client()?, &mut out),
        Command::Pub(command) => publish::run(command, &mut client()?, &mut io::stdin().lock(), &mut err),
        Command::Sub(command) => subscribe::run(command, &mut client()?, &mut out, &mut err),
        Command::Replay(command) => replay::run(command, &mut client()?, &mut out, &mut err),
        Command::Ctx(command) => context::run(command, server, &environment, &mut out, &mut err),
        Command::Completion(command) => completion::run(&command, &mut out),
        Command::Version(Version {}) => Ok(writeln!(out, "narad {}", env!("CARGO_PKG_VERSION"))?),
    }
}

fn finish(result: Result<(), Failure>) -> ExitCode {
    let (text, code) = match result {
        Ok(()) | Err(Failure::OutputClosed | Failure::Interrupted) => return ExitCode::SUCCESS,
        Err(Failure::Request(text)) => (text, 1),
        Err(Failure::Usage(text)) => (text, 2),
        Err(Failure::Unreachable(text)) => (text, 3),
    };
    let text = if text.starts_with("narad: ") { text } else { format!("narad: {text}") };
    let mut last = io::stderr().lock();
    let _ = writeln!(last, "{text}"); // nobody left to tell
                                      // Threads of a node that could not start may still have something to log: kept, the lock makes the cause the last line.
    std::mem::forget(last);
    ExitCode::from(code)
}

/// Flags of the program itself, each with a value; people write them behind the command as well.
const FRONT: [&str; 3] = ["-s", "--server", "--ctx"];

/// What people type and argh does not know: `--name=value`, [`FRONT`] behind the command, `topics` for `topic`, `--version`.
fn normalise(args: Vec<String>) -> Vec<String> {
    let mut front = Vec::new();
    let mut rest = Vec::new();
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        if arg == "--" {
            rest.push(arg);
            rest.extend(args.by_ref());
            break;
        }
        let (name, value) = match arg.split_once('=') {
            Some((name, value)) if is_long_option(name) => (name.to_owned(), Some(value.to_owned())),
            _ => (arg, None),
        };
        if FRONT.contains(&name.as_str()) {
            front.push(name);
            front.extend(value.or_else(|| args.next()));
            continue;
        }
        rest.push(match name.as_str() {
            "topics" if rest.is_empty() => "topic".to_owned(),
            "--version" | "-V" if rest.is_empty() => "version".to_owned(),
            _ => name,
        });
        rest.extend(value);
    }
    front.extend(rest);
    front
}

fn is_long_option(name: &str) -> bool {
    name.strip_prefix("--").is_some_and(|name| {
        name.starts_with(|c: char| c.is_ascii_lowercase()) && name.chars().all(|c| c.is_ascii_lowercase() || c == '-')
    })
}
