//! Keeps the house in order: file length, direction of dependencies, doors, leftover markers, unwraps on I/O.

use std::fs;
use std::path::{Path, PathBuf};

struct Source {
    path: String,
    text: String,
}

impl Source {
    /// Lines outside test code, with their number. Test code is a `tests` module at the end of a file, or a file
    /// named for it.
    fn production_lines(&self) -> Vec<(usize, &str)> {
        let whole_file_is_test =
            self.path.starts_with("tests/") || self.path.contains("tests") || self.path.contains("_test");
        if whole_file_is_test {
            return Vec::new();
        }
        let mut lines = Vec::new();
        let mut previous = "";
        for (index, line) in self.text.lines().enumerate() {
            let gate = previous.trim();
            if gate.starts_with("#[cfg(")
                && (gate.contains("test") || gate.contains("loom"))
                && line.trim_start().starts_with("mod ")
                && line.trim_end().ends_with('{')
            {
                break;
            }
            lines.push((index + 1, line));
            previous = line;
        }
        lines
    }

    fn code_lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text.lines().enumerate().map(|(i, l)| (i + 1, l)).filter(|(_, l)| !l.trim_start().starts_with("//"))
    }

    /// Names of its tests.
    fn tests(&self) -> Vec<&str> {
        let mut marked = false;
        let mut names = Vec::new();
        for line in self.text.lines().map(str::trim) {
            if let Some(name) = line.strip_prefix("fn ").filter(|_| marked) {
                names.extend(name.split('(').next());
            }
            marked = line == "#[test]" || (marked && line.starts_with("#["));
        }
        names
    }

    fn within(&self, folder: &str) -> bool {
        self.path.starts_with(folder)
    }
}

fn collect(directory: &Path, root: &Path, into: &mut Vec<Source>) {
    for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        if path.is_dir() {
            if name != "target" && !name.starts_with('.') {
                collect(&path, root, into);
            }
        } else if path.extension().is_some_and(|e| e == "rs") {
            let relative: PathBuf = path.strip_prefix(root).unwrap().to_owned();
            into.push(Source {
                path: relative.to_string_lossy().into_owned(),
                text: fs::read_to_string(&path).unwrap(),
            });
        }
    }
}

fn sources() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut all = Vec::new();
    collect(root, root, &mut all);
    assert!(all.len() > 20, "found only {} sources: the walk is broken", all.len());
    all
}

fn report(rule: &str, findings: Vec<String>) {
    assert!(findings.is_empty(), "{rule}:\n  {}", findings.join("\n  "));
}

/// Places where `word` stands in code (not in comments), outside the folders that may name it.
fn names(word: &str, in_folder: &str, allowed: &[&str]) -> Vec<String> {
    let mut findings = Vec::new();
    for source in sources() {
        if !source.within(in_folder)
            || source.within("tests/tidy.rs")
            || allowed.iter().any(|folder| source.within(folder))
        {
            continue;
        }
        for (number, line) in source.code_lines() {
            if line.contains(word) {
                findings.push(format!("{}:{number}: {}", source.path, line.trim()));
            }
        }
    }
    findings
}

#[test]
fn files_stay_under_600_lines() {
    let long = sources()
        .iter()
        .filter(|s| s.text.lines().count() > 600)
        .map(|s| format!("{}: {} lines", s.path, s.text.lines().count()))
        .collect();
    report("a file holds one concept in at most 600 lines", long);
}

#[test]
fn only_rt_names_glommio() {
    report("glommio is behind shards/src/rt", names("glommio::", "", &["shards/src/rt/"]));
}

#[test]
fn nothing_awaits_glommio_io() {
    let mut findings = Vec::new();
    for word in [
        "glommio::io",
        "glommio::net",
        "glommio::timer",
        "glommio::channels",
        "glommio::sync",
        "spawn_blocking",
        "Timer::new",
    ] {
        findings.extend(names(word, "shards/", &[]));
    }
    report("glommio schedules; its sockets, files, timers and channels live on rings that nobody polls", findings);
}

#[test]
fn only_io_names_io_uring() {
    // The workbench measures the drive with a bare ring: what is to be compared with it cannot measure it.
    let doors = ["shards/src/io/", "bench/src/device/ring.rs"];
    report("io_uring is behind shards/src/io", names("io_uring::", "", &doors));
}

#[test]
fn shards_name_neither_http_nor_quic_nor_raft() {
    let mut findings = Vec::new();
    for word in ["hyper::", "quiche::", "redb::", "raft::"] {
        findings.extend(names(word, "shards/", &[]));
    }
    report("the data plane knows no HTTP, QUIC, Raft or embedded store", findings);
}

#[test]
fn mechanisms_do_not_name_each_others_internals() {
    let mut findings = Vec::new();
    // (folder, modules of the crate that it may not name at all)
    let rules: [(&str, &[&str]); 7] = [
        ("shards/src/rt/", &["wal", "dispatch", "log", "queue", "shard", "peer", "api"]),
        ("shards/src/io/", &["wal", "dispatch", "log", "queue", "shard", "peer", "api"]),
        ("shards/src/spsc/", &["wal", "dispatch", "log", "queue", "shard"]),
        ("shards/src/wal/", &["dispatch", "log", "queue", "shard", "spsc"]),
        ("shards/src/dispatch/", &["log", "queue", "shard", "spsc"]),
        ("shards/src/log/", &["wal", "dispatch", "queue", "shard", "spsc"]),
        ("shards/src/queue/", &["wal", "dispatch", "shard", "spsc"]),
    ];
    for (folder, forbidden) in rules {
        for module in forbidden {
            findings.extend(names(&format!("crate::{module}::"), folder, &[]));
        }
    }
    report("a mechanism never names another's internals", findings);
}

#[test]
fn no_leftover_markers() {
    let markers = [
        "TO".to_owned() + "DO",
        "FIX".to_owned() + "ME",
        "XX".to_owned() + "X",
        "todo".to_owned() + "!(",
        "unimplemented".to_owned() + "!(",
        "dbg".to_owned() + "!(",
    ];
    let mut findings = Vec::new();
    for source in sources() {
        for (number, line) in source.text.lines().enumerate() {
            if markers.iter().any(|m| line.contains(m.as_str())) {
                findings.push(format!("{}:{}: {}", source.path, number + 1, line.trim()));
            }
        }
    }
    report("nothing is left for later in something called done", findings);
}

/// Whoever reads a comment can open what it names. Rules of the specification go by their numbers (S37, E7).
#[test]
fn comments_cite_no_page_that_is_not_here() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut findings = Vec::new();
    for source in sources() {
        for (number, line) in source.text.lines().enumerate() {
            let Some((_, comment)) = line.split_once("//") else { continue };
            let pages = comment.split(|c: char| !(c.is_ascii_alphanumeric() || "-_./".contains(c)));
            let pages = pages.filter(|word| word.ends_with(".md"));
            let beside = root.join(&source.path).parent().map(Path::to_owned).unwrap_or_default();
            let near =
                |page: &str| beside.ancestors().any(|above| above.starts_with(root) && above.join(page).exists());
            let missing = pages.filter(|page| !near(page)).count();
            let section = comment.contains('\u{a7}') && !comment.contains("RFC");
            if missing > 0 || section {
                findings.push(format!("{}:{}: {}", source.path, number + 1, line.trim()));
            }
        }
    }
    report("a page that the repository does not hold is not cited", findings);
}

#[test]
fn no_unwrap_outside_tests_and_no_expect_on_io() {
    let io_words = [
        ".await", " io::", "(io::", "fs::", "File::", ".read", ".write", ".sync_", ".open(", ".rename(", ".send(",
        ".recv(",
    ];
    let mut findings = Vec::new();
    for source in sources() {
        for (number, line) in source.production_lines() {
            let code = line.split("//").next().unwrap_or_default();
            let unwraps = code.contains(".unwrap()");
            let expects_io = code.contains(".expect(") && io_words.iter().any(|word| code.contains(word));
            if unwraps || expects_io {
                findings.push(format!("{}:{number}: {}", source.path, line.trim()));
            }
        }
    }
    report("an I/O result is never unwrapped outside tests", findings);
}

#[test]
fn e34_unsafe_lives_behind_the_doors_and_argues_its_case() {
    let doors = [
        "shards/src/io/",
        "shards/src/rt/",
        "shards/src/spsc/",
        "shards/tests/allocations.rs",
        "bench/src/device/ring.rs",
    ];
    let mut findings = names("unsafe ", "", &doors);
    for source in sources() {
        let lines: Vec<&str> = source.text.lines().collect();
        for (index, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            if !(code.contains("unsafe {") || code.contains("unsafe impl")) || source.within("tests/") {
                continue;
            }
            let argued = lines[index.saturating_sub(6)..index].iter().any(|l| l.contains("SAFETY:"));
            if !argued {
                findings.push(format!("{}:{}: unsafe without its argument", source.path, index + 1));
            }
        }
    }
    report(
        "unsafe lives in io/, rt/ and spsc/ and the bare ring of the workbench, each block with its argument",
        findings,
    );
}

/// Numbers of the specification's faults and decisions, with the parts that one of them has.
fn known_numbers() -> Vec<String> {
    let parts: [(&str, u32); 15] = [
        ("N14", 2),
        ("N19", 2),
        ("N21", 2),
        ("N23", 2),
        ("N28", 2),
        ("N33", 2),
        ("N43", 3),
        ("N44", 2),
        ("N46", 2),
        ("N48", 2),
        ("N50", 2),
        ("N53", 3),
        ("N54", 3),
        ("N68", 3),
        ("N73", 2),
    ];
    let more: [(&str, u32); 10] = [
        ("N75", 3),
        ("N76", 2),
        ("N80", 2),
        ("N86", 2),
        ("D5", 2),
        ("D8", 2),
        ("D10", 2),
        ("C1", 2),
        ("O3", 2),
        ("F1", 3),
    ];
    let families = [
        ("N", 87),
        ("D", 11),
        ("C", 4),
        ("M", 7),
        ("L", 6),
        ("S", 5),
        ("P", 5),
        ("U", 7),
        ("O", 6),
        ("F", 2),
        ("G", 5),
        ("X", 2),
        ("E", 35),
    ];
    let whole = families.iter().flat_map(|(family, last)| (1..=*last).map(move |number| format!("{family}{number}")));
    let numbers = whole.flat_map(|number| match parts.iter().chain(&more).find(|(divided, _)| *divided == number) {
        Some((_, count)) => (1..=*count).map(|part| format!("{number}.{part}")).collect(),
        None => vec![number],
    });
    numbers.collect()
}

#[test]
fn every_lesson_and_decision_has_its_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let table = fs::read_to_string(root.join("tests/lessons.txt")).unwrap();
    let sources = sources();
    let tests: std::collections::BTreeSet<&str> = sources.iter().flat_map(Source::tests).collect();
    assert!(tests.len() > 500, "found only {} tests: the search is broken", tests.len());
    let (mut findings, mut listed) = (Vec::new(), Vec::new());
    for line in table.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let columns: Vec<&str> = line.split('|').map(str::trim).collect();
        let [number, words, proof] = columns[..] else {
            findings.push(format!("three columns, please: {line}"));
            continue;
        };
        listed.push(number.to_owned());
        if words.is_empty() || proof.is_empty() {
            findings.push(format!("{number}: says nothing"));
        } else if let Some(reason) = proof.strip_prefix("later:") {
            if reason.trim().is_empty() {
                findings.push(format!("{number}: later, and no reason"));
            }
        } else if let Some(file) = proof.strip_prefix("code:") {
            let says = sources.iter().find(|source| source.path == file.trim());
            if !says.is_some_and(|source| source.text.contains(&format!("lesson {number}"))) {
                findings.push(format!("{number}: {file} does not name lesson {number}"));
            }
        } else {
            let missing = proof.split_whitespace().filter(|name| !tests.contains(name));
            findings.extend(missing.map(|name| format!("{number}: there is no test {name}")));
        }
    }
    let known = known_numbers();
    findings.extend(known.iter().filter(|n| !listed.contains(n)).map(|n| format!("{n} is not in tests/lessons.txt")));
    let strange = listed.iter().filter(|n| !known.contains(n));
    findings.extend(strange.map(|n| format!("{n} is no number of the specification")));
    let twice = listed.iter().filter(|n| listed.iter().filter(|other| other == n).count() > 1);
    findings.extend(twice.map(|n| format!("{n} stands there twice")));
    report("each fault that others shipped, and each decision, is pinned by a test", findings);
}

/// Numbers in the first column of a row: `K7`, `K49 to K60`, `K62, K63`.
fn numbers(column: &str) -> Vec<String> {
    let number = |text: &str| text.trim().get(1..).and_then(|digits| digits.parse::<u32>().ok());
    let of = |part: &str| {
        let family = part.trim().chars().next().unwrap_or('?');
        let (first, last) = part.split_once(" to ").unwrap_or((part, part));
        let range = number(first).zip(number(last)).map(|(first, last)| first..=last);
        range.into_iter().flatten().map(|number| format!("{family}{number}")).collect::<Vec<_>>()
    };
    column.split(',').flat_map(of).collect()
}

#[test]
fn every_rule_of_the_cluster_is_on_its_page_with_tests_that_exist() {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/rules.md")).unwrap();
    let sources = sources();
    let (mut findings, mut listed) = (Vec::new(), Vec::new());
    for line in page.lines().filter(|line| line.starts_with("| K") || line.starts_with("| E")) {
        let columns: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let [number, words, proof] = columns[..] else {
            findings.push(format!("three columns, please: {line}"));
            continue;
        };
        listed.extend(numbers(number));
        let cited: Vec<&str> = proof.split('`').skip(1).step_by(2).collect();
        let later = proof.strip_prefix("later: ").is_some_and(|why| !why.is_empty());
        if words.is_empty() || (cited.is_empty() && !later) {
            findings.push(format!("{number}: no test, and not later"));
        }
        for test in cited.into_iter().filter(|_| !later) {
            let found = test.split_once("::").is_some_and(|(file, name)| {
                sources.iter().any(|source| source.path == file && source.tests().contains(&name))
            });
            if !found {
                findings.push(format!("{number}: there is no test {test}"));
            }
        }
    }
    let known = (1..=63).map(|number| format!("K{number}")).chain((36..=57).map(|number| format!("E{number}")));
    for number in known {
        match listed.iter().filter(|one| **one == number).count() {
            1 => {}
            times => findings.push(format!("{number} stands there {times} times")),
        }
    }
    report("each rule of the cluster is on docs/rules.md, with what pins it", findings);
}

/// Where the links of a page lead, without those into the network.
fn links(text: &str) -> Vec<&str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')').map(|(target, _)| target));
    let files = targets.map(|target| target.split('#').next().unwrap_or_default());
    files.filter(|target| !target.is_empty() && !target.contains("://")).collect()
}

#[test]
fn every_page_can_be_reached_from_the_readme_and_every_link_leads_somewhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let pages = fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let pages: Vec<String> = pages.filter(|name| name.ends_with(".md")).map(|name| format!("docs/{name}")).collect();
    assert!(pages.len() > 5, "found only {pages:?}: the search is broken");
    let readme = fs::read_to_string(root.join("README.md")).unwrap();
    let linked = links(&readme);
    let missing = pages.iter().filter(|page| !linked.contains(&page.as_str()));
    let mut findings: Vec<String> = missing.map(|page| format!("README.md has no link to {page}")).collect();
    let fixed = ["README.md", "src/README.md", "shards/README.md", "bench/README.md", "kernel-tuning/README.md"];
    for page in fixed.into_iter().chain(pages.iter().map(String::as_str)) {
        let text = fs::read_to_string(root.join(page)).unwrap();
        let folder = root.join(page).parent().unwrap().to_owned();
        let broken = links(&text).into_iter().filter(|target| !folder.join(target).exists());
        findings.extend(broken.map(|target| format!("{page}: {target} is not there")));
    }
    report("the README leads to every page, and no link into nothing", findings);
}
