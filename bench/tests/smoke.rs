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
fn versus_kills_counts_and_measures_and_leaves_nothing_behind() {
    let dir = scratch("versus");
    let words = "versus --peers none --connections 2 --batches 3 --rounds 1 --duration 1s";
    let mut command = bench(words);
    command.arg("--binary").arg(broker()).arg("--dir").arg(&dir);
    command.args(["--broker-args", "--shards 1 --no-pin --memory 128MiB"]);
    let output = command.output().unwrap();
    succeeded(&output);
    let text = String::from_utf8(output.stdout).unwrap();
    let figure = |name: &str| text.lines().any(|line| line.contains(name));
    assert!(figure("versus.consume.c2.b3.narad.rate") && figure("versus.kill.narad.missing"), "{text}");
    assert!(!text.contains("LOST"), "{text}");
    assert_nothing_left(&dir);
}

#[test]
fn peers_that_are_missing_or_do_not_start_are_named_and_the_others_are_measured() {
    let (dir, scripts) = (scratch("versus-alone"), scratch("scripts"));
    let real = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers");
    for name in ["lib.sh", "narad"] {
        std::fs::copy(real.join(name), scripts.join(name)).unwrap();
    }
    for name in ["redis", "rabbitmq", "postgres", "nats"] {
        let script = scripts.join(name);
        let may = if name == "nats" { "check" } else { "nothing" };
        let text = format!("#!/bin/sh\n[ \"$1\" = {may} ] || {{ echo {name} is not there >&2; exit 1; }}\n");
        std::fs::write(&script, text).unwrap();
        let runnable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&script, runnable).unwrap();
    }
    let mut command = bench("versus --connections 2 --batches 3 --rounds 1 --duration 1s");
    command.arg("--binary").arg(broker()).arg("--dir").arg(&dir).arg("--scripts").arg(&scripts);
    command.args(["--broker-args", "--shards 1 --no-pin --memory 128MiB"]);
    let output = command.output().unwrap();
    let (text, error) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(text.contains("left out: redis is not there") && text.contains("no cell was judged"), "{text}{error}");
    assert!(text.contains("versus.consume.c2.b3.narad.rate"), "{text}");
    assert!(error.contains("nats: left out: nats is not there") && !error.contains("redis"), "{error}");
    assert_nothing_left(&dir);
    std::fs::remove_dir_all(&scripts).unwrap();
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

/// Whether a running program has made or opened anything in the directory.
fn is_at_work(child: &Child, dir: &Path) -> bool {
    let open = std::fs::read_dir(format!("/proc/{}/fd", child.id())).unwrap();
    let links = open.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
    links.into_iter().any(|link| link.starts_with(dir)) || std::fs::read_dir(dir).unwrap().next().is_some()
}

#[test]
fn whatever_is_told_to_stop_removes_its_data_and_what_it_started() {
    let with_broker = format!(" --binary {}", broker().display());
    let commands = [
        ("wal --callers 1 --seconds 60", "INT"),
        ("log --partitions 1 --batch 1 --seconds 60", "TERM"),
        ("device --quick --seconds 60", "INT"),
        ("suite --only wal", "TERM"),
        ("suite --only recover", "INT"),
        ("recover --rounds 50 --wal 1MiB --partitions 1x1MiB", "TERM"),
        ("versus --peers none --duration 60", "INT"),
    ];
    let running: Vec<(&str, &str, PathBuf, Child)> = commands
        .into_iter()
        .enumerate()
        .map(|(number, (words, signal))| {
            let dir = scratch(&format!("told-{number}"));
            let starts = ["suite", "recover", "versus"].iter().any(|command| words.starts_with(command));
            let words_given = format!("{words} --dir {}{}", dir.display(), if starts { &with_broker } else { "" });
            let child = bench(&words_given).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
            (words, signal, dir, child)
        })
        .collect();
    for (words, signal, dir, mut child) in running {
        wait(&mut child, words, |child| match words.contains("recover") || words.contains("versus") {
            true => !processes_on(&dir).is_empty(),
            false => is_at_work(child, &dir),
        });
        let told = Command::new("sh").arg("-c").arg(format!("kill -{signal} {}", child.id())).status().unwrap();
        assert!(told.success(), "{words} ended by itself");
        wait(&mut child, "the end", |child| child.try_wait().unwrap().is_some());
        assert_nothing_left(&dir);
    }
}

#[test]
fn what_is_not_the_broker_is_answered_by_the_flag_that_names_it() {
    let dir = scratch("other-program");
    for (words, sentence) in [
        ("produce --start", "is it the broker's program? --binary names it"),
        ("recover", "is it the broker's program? --binary names it"),
        ("versus --peers none", "is it the right program?"),
    ] {
        let answer = refused(&format!("{words} --binary /bin/true --dir {}", dir.display()));
        assert!(answer.contains(sentence), "{words}: {answer}");
    }
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
        ("versus --peers kafka", "redis,rabbitmq,postgres,nats"),
        ("versus --broker-cpus 0 --load-cpu 0", "would take time from the brokers"),
        ("versus --peers none --binary /nowhere/narad", "set NARAD_BINARY"),
        ("versus --batches 101", "give 1 to 100"),
        ("http --payload 0", "1 to 1048576 bytes"),
        ("produce --threads 0", "--threads 0: give 1 to 8"),
        ("produce --threads 9999", "--threads 9999: give 1 to 8"),
        ("produce --threads x", "--threads x: write a whole number"),
        ("produce --rounds 0", "--rounds 0: give 1 to 1000"),
        ("fairness --rounds 0", "--rounds 0: give 1 to 1000"),
        ("recover --rounds 0", "--rounds 0: give 1 to 1000"),
        ("flow --consumers 0", "--consumers 0: give 1 to 4096"),
        ("device --quick --repeat 0", "--repeat 0: give 1 to 1000"),
        ("device --quick --compare /nope", "--compare /nope: cannot read it"),
        ("produce --start --dir /nowhere/at/all", "there is no such directory; make it"),
        ("wal --dir /nowhere/at/all", "there is no such directory; make it"),
        ("recover --dir /nowhere/at/all", "there is no such directory; make it"),
        ("idle --dir /nowhere/at/all --binary /bin/true", "there is no such directory; make it"),
        ("http --cpus 4999", "may not run on CPU 4999"),
        ("recover --narad /bin/true", "`narad-bench recover --help` lists"),
    ];
    for (words, sentence) in cases {
        let answer = refused(words);
        assert!(answer.contains(sentence), "{words}: {answer}");
    }
}
