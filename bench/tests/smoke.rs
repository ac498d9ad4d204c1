//! The program as a person types it, against a real broker that it starts itself.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

/// The broker's program, of the same profile as this test. It belongs to another package, so cargo is asked for it.
fn broker() -> PathBuf {
    let bench = Path::new(env!("CARGO_BIN_EXE_narad-bench"));
    let folder = bench.parent().expect("a program has a folder");
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "-p", "narad", "--bin", "narad", "--target-dir"]);
    build.arg(folder.parent().expect("a profile has a target folder"));
    if folder.ends_with("release") {
        build.arg("--release");
    }
    assert!(build.status().unwrap().success(), "cargo could not build the broker");
    folder.join("narad")
}

/// An empty directory on a real file system: the broker wants O_DIRECT.
fn scratch(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

fn bench(words: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_narad-bench"));
    command.args(words.split_whitespace()).stdin(Stdio::null());
    command
}

fn on_own_broker(words: &str, dir: &Path) -> Command {
    let mut command = bench(words);
    command.arg("--start").arg("--binary").arg(broker()).arg("--dir").arg(dir);
    command.args(["--broker-args", "--shards 1 --no-pin --memory 128MiB"]);
    command
}

fn refused(words: &str) -> String {
    let output = bench(words).output().unwrap();
    assert!(!output.status.success(), "{words}");
    String::from_utf8(output.stderr).unwrap()
}

fn assert_nothing_left(dir: &Path) {
    let left: Vec<_> = std::fs::read_dir(dir).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(processes_on(dir).is_empty(), "a broker is still running");
    std::fs::remove_dir(dir).unwrap();
}

/// Processes that name the directory in their arguments.
fn processes_on(dir: &Path) -> Vec<String> {
    let text = dir.to_str().unwrap();
    let processes = std::fs::read_dir("/proc").unwrap().map_while(Result::ok);
    let lines = processes.filter_map(|process| std::fs::read_to_string(process.path().join("cmdline")).ok());
    lines.filter(|line| line.contains("serve") && line.contains(text)).collect()
}

fn wait(child: &mut Child, what: &str, mut done: impl FnMut(&mut Child) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done(child) {
        assert!(Instant::now() < deadline, "{what} did not happen in time");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn succeeded(output: &Output) {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
}

#[test]
fn flow_verifies_a_broker_of_its_own_and_leaves_nothing_behind() {
    let dir = scratch("flow");
    for batch in [1, 10] {
        let words = format!("flow --warmup 0 --messages 400 --connections 3 --keys 7 --batch {batch}");
        succeeded(&on_own_broker(&words, &dir).output().unwrap());
    }
    assert_nothing_left(&dir);
}

#[test]
fn a_run_that_is_told_to_stop_takes_its_broker_along() {
    let dir = scratch("stopped");
    let mut child = on_own_broker("consume --duration 60", &dir).stderr(Stdio::null()).spawn().unwrap();
    wait(&mut child, "the start of the broker", |_| !processes_on(&dir).is_empty());
    let killed = Command::new("sh").arg("-c").arg(format!("kill -TERM {}", child.id())).status().unwrap();
    assert!(killed.success());
    wait(&mut child, "the end", |child| child.try_wait().unwrap().is_some());
    assert_nothing_left(&dir);
}

#[test]
fn what_cannot_be_is_answered_by_a_sentence_that_says_what_to_do() {
    let cases = [
        ("produce --url http://127.0.0.1:1", "no broker listens there; start one (`narad serve`)"),
        ("produce --url https://127.0.0.1", "speaks plain HTTP"),
        ("produce --start --binary /nowhere/narad", "there is no such program"),
        ("produce --start --url http://127.0.0.1:1", "leave out --url"),
        ("produce --sweep 1,none", "write it as 1,8,64,256"),
        ("produce --duration soon", "write 10, 10s, 500ms or 2m"),
        ("flow --payload 10", "who sent it"),
        ("consume --batch 101", "give 1 to 100"),
        ("http --payload 0", "1 to 1048576 bytes"),
    ];
    for (words, sentence) in cases {
        let answer = refused(words);
        assert!(answer.contains(sentence), "{words}: {answer}");
    }
}
