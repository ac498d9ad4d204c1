//! A real broker under valgrind's callgrind: counts the instructions that it executes in user space.
//!
//! The count is not a time: nothing of the kernel is in it, a cache miss is free, and of a long `memset` each byte
//! counts. But it is the same on a busy machine and on an idle one, so a change can be held to it.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::process::Broker;

const ENTER: &str = include_str!("callgrind/enter.c");
const ENTER_OBJECT: &str = "narad-callgrind-enter.so";
/// What is owed from before (commits, checkpoint, positions) is done after that long.
const SETTLE: Duration = Duration::from_millis(1300);

pub struct Profiled {
    broker: Broker,
    folder: PathBuf,
    dumps: u32,
}

fn told(what: &str, command: &mut Command) -> io::Result<()> {
    let output = command.output().map_err(|error| {
        let hint = "the Debian packages valgrind and gcc have what is needed";
        io::Error::new(error.kind(), format!("cannot {what}: {command:?}: {error} ({hint})"))
    })?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("cannot {what}: {command:?} ended with {}: {said}", output.status)))
}

impl Profiled {
    /// Starts `binary` with one shard on `folder`/data. Nothing is counted yet.
    pub fn start(binary: &Path, folder: &Path) -> io::Result<Profiled> {
        let (source, object) = (folder.join("enter.c"), folder.join(ENTER_OBJECT));
        fs::write(&source, ENTER)?;
        let mut compile = Command::new("cc");
        compile.args(["-O2", "-shared", "-fPIC", "-o"]).arg(&object).arg(&source);
        told("compile the part that stands between valgrind and io_uring", &mut compile)?;
        told("run valgrind", Command::new("valgrind").args(["--tool=callgrind", "--version"]))?;
        let mut valgrind = Command::new("valgrind");
        valgrind.args(["--tool=callgrind", "--instr-atstart=no"]);
        valgrind.arg(format!("--callgrind-out-file={}", folder.join("profile").display()));
        valgrind.arg(format!("--vgdb-prefix={}", folder.join("vgdb").display()));
        valgrind.arg(binary).env("LD_PRELOAD", &object).stdin(Stdio::null());
        let mut broker = Broker::spawn_by(valgrind, &folder.join("data"), &["--shards", "1", "--no-pin"])?;
        if let Err(error) = broker.wait_ready(Duration::from_secs(60)) {
            return Err(io::Error::other(format!(
                "the broker does not start under valgrind: {error}; its log:\n{}",
                broker.log_text()
            )));
        }
        let profiled = Profiled { broker, folder: folder.to_owned(), dumps: 0 };
        profiled.tell(&["instrumentation", "on"])?;
        Ok(profiled)
    }

    pub fn broker(&mut self) -> &mut Broker {
        &mut self.broker
    }

    fn tell(&self, words: &[&str]) -> io::Result<()> {
        let mut vgdb = Command::new("vgdb");
        vgdb.arg(format!("--pid={}", self.broker.pid()));
        vgdb.arg(format!("--vgdb-prefix={}", self.folder.join("vgdb").display()));
        told("talk to valgrind", vgdb.args(words))
    }

    /// Instructions that the broker executes from now on until everything that `load` has caused is done.
    pub fn count(&mut self, load: impl FnOnce() -> io::Result<()>) -> io::Result<u64> {
        std::thread::sleep(SETTLE);
        self.tell(&["zero"])?;
        load()?;
        std::thread::sleep(SETTLE);
        self.tell(&["dump"])?;
        self.dumps += 1;
        Ok(read_profile(&fs::read_to_string(self.last_profile())?))
    }

    /// Where the profile of the last count lies, for `callgrind_annotate`.
    pub fn last_profile(&self) -> PathBuf {
        self.folder.join(format!("profile.{}", self.dumps))
    }
}

/// Instructions of a profile, without those of `enter.c`. The format names each object once and refers to it by number
/// from then on; a line of a call is followed by the call's inclusive cost, which its callee has too.
fn read_profile(text: &str) -> u64 {
    let mut names: HashMap<&str, bool> = HashMap::new();
    let (mut counts, mut inclusive, mut total) = (true, false, 0);
    for line in text.lines() {
        let object = line.strip_prefix("ob=").or_else(|| line.strip_prefix("cob="));
        if let Some((number, name)) = object.and_then(|object| object.split_once(')')) {
            if !name.is_empty() {
                names.insert(number, !name.ends_with(ENTER_OBJECT));
            }
            if line.starts_with("ob=") {
                counts = names.get(number).copied().unwrap_or(true);
            }
        } else if line.starts_with("calls=") {
            inclusive = true;
        } else if line.starts_with(|first: char| first.is_ascii_digit() || "+-*".contains(first)) {
            let cost: u64 = line.split(' ').nth(1).and_then(|cost| cost.parse().ok()).unwrap_or(0);
            total += if counts && !inclusive { cost } else { 0 };
            inclusive = false;
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_is_summed_without_calls_and_without_what_stands_in_for_the_kernel() {
        let text = "events: Ir\nob=(1) /bin/narad\nfn=(1) main\n10 100\n+2 20\ncfn=(2) syscall\n\
            cob=(2) /tmp/narad-callgrind-enter.so\ncalls=1 5\n* 999\n-1 3\n\nob=(2)\nfn=(2)\n5 999\n\nob=(1)\nfn=(3) f\n7 4\n\
            totals: 1126\n";
        assert_eq!(read_profile(text), 100 + 20 + 3 + 4);
    }
}
