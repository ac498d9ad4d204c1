//! `narad doctor`: is this machine, and this data directory, ready for the node that would start with these flags?
//!
//! Exit code 0: it would start (warnings or not); 1: it would not, or with --strict there was a warning; 2: wrong usage.

use std::io::Write;
use std::time::Duration;

use argh::{ArgsInfo, FromArgs};
use serde_json::{json, Value};

use crate::config;
use crate::node::{self, Report, Status};

use super::serve::{environment, with_node_flags};
use super::Failure;

const PROBE: Duration = Duration::from_secs(2);
const COLUMNS: usize = 100;

with_node_flags! {
    /// Check this machine and data directory for the node that the same flags of serve would start.
    #[derive(ArgsInfo, FromArgs, Debug, Default)]
    #[argh(subcommand, name = "doctor")]
    pub struct Doctor {
        /// print JSON
        #[argh(switch)]
        json: bool,
        /// let a warning fail as well
        #[argh(switch)]
        strict: bool,
        /// do not measure the disk
        #[argh(switch)]
        no_probe: bool,
    }
}

pub fn run(mut doctor: Doctor, out: &mut dyn Write) -> Result<(), Failure> {
    let sources = doctor.node_flags().sources(environment())?;
    let report = match config::load(&sources) {
        Ok(config) => node::examine(&config, (!doctor.no_probe).then_some(PROBE)),
        Err(error) => Report::of_bad_settings(&error.to_string()),
    };
    let written = match doctor.json {
        true => writeln!(out, "{:#}", as_json(&report)),
        false => write!(out, "{}", as_text(&report)),
    };
    // A reader that has seen enough does not turn a failure into a success: scripts go by the exit status.
    verdict(&report, doctor.strict)?;
    Ok(written?)
}

fn verdict(report: &Report, strict: bool) -> Result<(), Failure> {
    let (failed, warned) = (report.count(Status::Fail), report.count(Status::Warn));
    let many = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    match (failed, warned) {
        (0, warned) if warned == 0 || !strict => Ok(()),
        (0, warned) => Err(Failure::Request(format!("doctor: {} (--strict)", many(warned, "warning")))),
        (failed, _) => Err(Failure::Request(format!("doctor: {} failed", many(failed, "check")))),
    }
}

fn as_text(report: &Report) -> String {
    let width = report.checks.iter().map(|check| check.id.len()).max().unwrap_or(0);
    let indent = 6 + width + 2;
    let mut text = String::new();
    for check in &report.checks {
        let found = wrapped(&check.found, COLUMNS - indent, indent);
        text.push_str(&format!("{:<4}  {:<width$}  {found}\n", check.status.name(), check.id));
        if let Some(run) = &check.run {
            text.push_str(&format!("{:indent$}-> {}\n", "", wrapped(run, COLUMNS - indent - 3, indent + 3)));
        }
    }
    let count = |status| format!("{} {}", report.count(status), Status::name(status));
    let counts = [Status::Ok, Status::Hint, Status::Warn, Status::Fail, Status::Skip].map(count);
    text.push_str(&format!("\n{}.", counts.join(", ")));
    if report.checks.iter().any(|check| check.status > Status::Ok && is_made_by_kernel_tuning(check.id)) {
        text.push_str(" kernel-tuning/apply makes such settings, and revert takes them back.");
    }
    text.push('\n');
    text
}

/// Limits and boot parameters are shown there as well, but only a person can set them.
fn is_made_by_kernel_tuning(id: &str) -> bool {
    const IDS: [&str; 6] = ["sysctl.", "thp.", "block.scheduler", "irq.", "cpu.governor", "cpu.idle"];
    IDS.iter().any(|made| id.starts_with(made))
}

/// Broken between words into lines of at most `columns`, all but the first behind `indent` blanks.
fn wrapped(text: &str, columns: usize, indent: usize) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines
            .last_mut()
            .filter(|line| line.is_empty() || line.chars().count() + 1 + word.chars().count() <= columns);
        match line {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) => {
                line.push(' ');
                line.push_str(word);
            }
            None => lines.push(word.to_owned()),
        }
    }
    lines.join(&format!("\n{:indent$}", ""))
}

fn as_json(report: &Report) -> Value {
    let checks: Vec<Value> = report
        .checks
        .iter()
        .map(|check| json!({"id": check.id, "status": check.status.name(), "found": check.found, "run": check.run}))
        .collect();
    let probe = report.probe.as_ref().map(|probe| {
        json!({
            "writes": probe.writes, "writes_per_second": probe.writes_per_second.round(),
            "p50_us": probe.p50_us, "p99_us": probe.p99_us, "max_us": probe.max_us,
        })
    });
    json!({"worst": report.worst().name(), "checks": checks, "probe": probe})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::doctor::Check;

    fn report(statuses: &[Status]) -> Report {
        let check = |status: &Status| Check {
            id: "sysctl.vm.swappiness",
            status: *status,
            found: "60: a shard that is paged out waits for the disk twice".to_owned(),
            run: Some("sysctl -w vm.swappiness=1".to_owned()),
        };
        Report { checks: statuses.iter().map(check).collect(), probe: None }
    }

    #[test]
    fn the_exit_status_is_of_the_worst_and_strict_makes_a_warning_one() {
        use Status::*;
        for (statuses, strict, good) in [
            (&[Ok, Skip, Hint, Warn][..], false, true),
            (&[Ok, Skip, Hint], true, true),
            (&[Ok, Warn], true, false),
            (&[Fail, Ok], false, false),
            (&[], true, true),
        ] {
            assert_eq!(verdict(&report(statuses), strict).is_ok(), good, "{statuses:?} {strict}");
        }
        let Err(Failure::Request(text)) = verdict(&report(&[Fail, Fail, Warn]), false) else { panic!("passed") };
        assert_eq!(text, "doctor: 2 checks failed");
    }

    #[test]
    fn each_line_says_what_was_found_and_what_to_run() {
        let text = as_text(&report(&[Status::Warn]));
        let expected = "\
warn  sysctl.vm.swappiness  60: a shard that is paged out waits for the disk twice
                            -> sysctl -w vm.swappiness=1

0 ok, 0 hint, 1 warn, 0 fail, 0 skip. kernel-tuning/apply makes such settings, and revert takes them back.
";
        assert_eq!(text, expected);
        // Where it can do nothing it is not recommended.
        let mut other = report(&[Status::Ok, Status::Skip, Status::Fail]);
        other.checks[2].id = "limit.memlock";
        assert!(as_text(&other).ends_with("\n1 ok, 0 hint, 0 warn, 1 fail, 1 skip.\n"), "{}", as_text(&other));
        assert_eq!(wrapped("aa bb cc d", 5, 2), "aa bb\n  cc d");
        assert_eq!(wrapped("longer-than-that x", 5, 0), "longer-than-that\nx");
        let json = as_json(&report(&[Status::Fail]));
        assert_eq!((&json["worst"], &json["checks"][0]["run"]), (&"fail".into(), &"sysctl -w vm.swappiness=1".into()));
    }

    #[test]
    fn the_doctor_takes_every_flag_of_serve() {
        let flags = |about: &str| -> Vec<String> {
            let words = about.split_whitespace().map(|word| word.trim_matches(&['[', ']', ',', '.'][..]));
            let mut flags: Vec<String> = words.filter(|word| word.starts_with("--")).map(str::to_owned).collect();
            flags.sort();
            flags.dedup();
            flags
        };
        let help = |output: String| flags(&output);
        let serve = help(super::super::serve::Serve::from_args(&["serve"], &["--help"]).unwrap_err().output);
        let doctor = help(Doctor::from_args(&["doctor"], &["--help"]).unwrap_err().output);
        assert!(serve.len() > 10);
        // What is said of one start is nothing to examine.
        let of_one_start = |flag: &String| flag == "--restored";
        let missing: Vec<_> = serve.iter().filter(|flag| !doctor.contains(flag) && !of_one_start(flag)).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
}
