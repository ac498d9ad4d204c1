//! `narad-bench`: what the drive can do, what the broker makes of it, and the ratio of the two from one run.

mod consume;
mod device;
mod fairness;
mod flow;
mod http;
mod idle;
mod load;
mod log;
mod parts;
mod peer;
mod produce;
mod recover;
mod report;
mod ring;
mod run;
mod suite;
mod versus;
mod wal;

use std::path::PathBuf;
use std::process::ExitCode;

use argh::FromArgs;

use parts::require;
use run::{Failure, Run};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Measure the drive, the parts of the broker, and running brokers. Options of this level may stand anywhere.
#[derive(FromArgs)]
struct Arguments {
    /// directory for JSON, percentile files and pictures (nothing is written without it)
    #[argh(option)]
    out: Option<PathBuf>,
    /// result of an earlier run (JSON) to print ratios against
    #[argh(option)]
    compare: Option<PathBuf>,
    /// measure this often, up to 1000 times, and report medians and the spread (default 1)
    #[argh(option, default = "1")]
    repeat: usize,
    #[argh(subcommand)]
    command: Command,
}

/// Options that every subcommand shares.
#[derive(Clone, Debug)]
pub struct Common {
    /// Where results go.
    pub out: Option<PathBuf>,
    /// Earlier result.
    pub compare: Option<PathBuf>,
    /// Times to measure.
    pub repeat: usize,
}

#[derive(FromArgs)]
#[argh(subcommand)]
enum Command {
    Device(device::Options),
    Ring(ring::Options),
    Wal(wal::Options),
    Log(log::Options),
    Peer(peer::Options),
    Elsewhere(peer::elsewhere::Options),
    Http(http::Options),
    Idle(idle::Options),
    Produce(produce::Options),
    Consume(consume::Options),
    Flow(flow::Options),
    Versus(versus::Options),
    Fairness(fairness::Options),
    Recover(recover::Options),
    Suite(suite::Options),
}

impl Command {
    fn run(&self, common: &Common) -> Result<Run, Failure> {
        match self {
            Command::Device(options) => device::run(common, options),
            Command::Ring(options) => ring::run(common, options),
            Command::Wal(options) => wal::run(common, options),
            Command::Log(options) => log::run(common, options),
            Command::Peer(options) => peer::run(common, options),
            Command::Elsewhere(options) => peer::elsewhere::run(common, options),
            Command::Http(options) => http::run(common, options),
            Command::Idle(options) => idle::run(common, options),
            Command::Produce(options) => produce::run(common, options),
            Command::Consume(options) => consume::run(common, options),
            Command::Flow(options) => flow::run(common, options),
            Command::Versus(options) => versus::run(common, options),
            Command::Fairness(options) => fairness::run(common, options),
            Command::Recover(options) => recover::run(common, options),
            Command::Suite(options) => suite::run(common, options),
        }
    }
}

/// Options of the first level, which may stand after the subcommand too.
const SHARED: [&str; 3] = ["--out", "--compare", "--repeat"];
const REPEAT_MAX: usize = 1000;

/// Moves the shared options to the front, where the parser expects them: `device --out x` is `--out x device`.
fn hoist(words: Vec<String>) -> Vec<String> {
    let (mut front, mut rest) = (Vec::new(), Vec::new());
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        if SHARED.contains(&word.as_str()) {
            front.push(word);
            front.extend(words.next());
        } else {
            rest.push(word);
        }
    }
    front.extend(rest);
    front
}

fn parse(words: &[String]) -> Result<Arguments, argh::EarlyExit> {
    let words = hoist(words.to_vec());
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    Arguments::from_args(&["narad-bench"], &words)
}

/// What the parser says about a wrong command line, in words for whoever typed it.
fn plain(said: &str, words: &[String]) -> String {
    const WHOLE: &str = "write a whole number, such as 8";
    /// What the standard library says of texts that are no value, and what to write instead.
    const CAUSES: [(&str, &str); 7] = [
        ("invalid digit found in string", WHOLE),
        ("cannot parse integer from empty string", WHOLE),
        ("number too large to fit in target type", "that is far too large; write a smaller whole number"),
        ("number too small to fit in target type", "that is far too small; write a whole number of 0 or more"),
        ("invalid float literal", "write a number, such as 2 or 0.5"),
        ("cannot parse float from empty string", "write a number, such as 2 or 0.5"),
        ("invalid socket address syntax", "write an address and a port, such as 127.0.0.1:7942"),
    ];
    for (cause, advice) in CAUSES {
        let wrong = said.strip_suffix(cause).and_then(|said| said.trim_end().strip_suffix(':'));
        if let Some(wrong) = wrong {
            let wrong = wrong.trim_start_matches("Error parsing option ").replace("' with value '", " ");
            return format!("{}: {advice}", wrong.replace('\'', ""));
        }
    }
    if said.starts_with("Unrecognized argument") {
        let command = words.iter().find(|word| !word.starts_with('-')).map_or("", String::as_str);
        return format!("{said}\n`narad-bench {command} --help` lists the options of this command");
    }
    said.to_owned()
}

/// Measures what a command line says, as a part of something larger: nothing is printed or written.
fn measure(words: &[String], common: &Common) -> Result<Run, Failure> {
    let arguments = parse(words).map_err(|exit| Failure(plain(exit.output.trim_end(), words)))?;
    arguments.command.run(common)
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let arguments = match parse(&words) {
        Ok(arguments) => arguments,
        Err(exit) => {
            let asked = exit.status.is_ok();
            if asked {
                print!("{}", exit.output);
            } else {
                eprintln!("narad-bench: {}", plain(exit.output.trim_end(), &words));
            }
            return if asked { ExitCode::SUCCESS } else { ExitCode::from(2) };
        }
    };
    let common = Common { out: arguments.out, compare: arguments.compare, repeat: arguments.repeat };
    let done = require("--repeat", common.repeat, 1..=REPEAT_MAX)
        .and_then(|()| report::check(&common))
        .and_then(|()| (0..common.repeat).map(|_| arguments.command.run(&common)).collect::<Result<Vec<Run>, _>>())
        .and_then(|runs| report::finish(&common, runs));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure(reason)) => {
            eprintln!("narad-bench: {reason}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_is_no_number_is_answered_by_its_flag_and_what_to_write() {
        let said = |line: &str| {
            let words: Vec<String> = line.split(' ').map(String::from).collect();
            plain(parse(&words).err().expect("refused").output.trim_end(), &words)
        };
        assert_eq!(said("produce --threads x"), "--threads x: write a whole number, such as 8");
        assert_eq!(said("produce --payload -1"), "--payload -1: write a whole number, such as 8");
        assert_eq!(said("produce --rate soon"), "--rate soon: write a number, such as 2 or 0.5");
        assert!(said("produce --keys 99999999999").starts_with("--keys 99999999999: that is far too large"));
        assert!(said("http --addr here").starts_with("--addr here: write an address and a port"));
        assert!(said("produce --narad x").contains("`narad-bench produce --help` lists"));
    }
}
