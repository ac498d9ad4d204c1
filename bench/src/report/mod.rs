//! From results to what people and programs read: text on the terminal; JSON, percentile files, pictures and a page in
//! `--out`; ratios to an earlier result.

mod block;
mod compare;
mod document;
mod hgrm;
mod machine;
mod page;
mod picture;
mod progress;
pub mod stats;
mod text;

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

pub use block::{counters, Counters};
pub use progress::Progress;
pub use text::human;

use crate::run::{Failure, Run, Table};
use crate::Common;
use document::{Document, Figure};
use machine::Machine;

/// Fails early, before anything is measured, where `--out` cannot be written or `--compare` cannot be read.
pub fn check(common: &Common) -> Result<(), Failure> {
    machine::note_load();
    if let Some(path) = &common.compare {
        Document::read(path)?;
    }
    if let Some(out) = &common.out {
        if out.exists() && !out.is_dir() {
            return Err(Failure(format!("--out {}: that is a file; name a directory", out.display())));
        }
        fs::create_dir_all(out).map_err(|error| {
            Failure(format!("cannot create the directory {} (--out) for the results: {error}", out.display()))
        })?;
        let probe = out.join(format!(".narad-bench-{}", std::process::id()));
        write(&probe, b"probe")?;
        let _ = fs::remove_file(&probe);
    }
    Ok(())
}

/// Prints the results of one command's repeated runs, and writes them to `--out`. Fails, after all that, where a part
/// failed.
pub fn finish(common: &Common, runs: Vec<Run>) -> Result<(), Failure> {
    let (text, failures) = results(common, &runs)?;
    print(&text)?;
    outcome(&failures)
}

fn outcome(failures: &[String]) -> Result<(), Failure> {
    if failures.is_empty() {
        return Ok(());
    }
    Err(Failure(format!("parts of it gave no result:\n  {}", failures.join("\n  "))))
}

/// Writes the files; what to print, and the parts that failed.
fn results(common: &Common, runs: &[Run]) -> Result<(String, Vec<String>), Failure> {
    let Some(last) = runs.last() else { return Ok((String::new(), Vec::new())) };
    // Where the command says which drive it used, that one is described; else the one of the current directory.
    let dir = last.settings.get("dir");
    let document = Document::of(runs, Machine::read(Path::new(dir.map_or(".", String::as_str))));
    let mut notes = Vec::new();
    let mut compared = None;
    if let Some(path) = &common.compare {
        let (table, differences) = compare::table(&Document::read(path)?, &document);
        compared = Some(table);
        notes = differences;
    }
    let mut text = render(&document, last, compared.as_ref(), &notes);
    if let Some(out) = &common.out {
        for name in write_files(out, &document, runs, compared)? {
            text.push_str(&format!("wrote {}\n", name.display()));
        }
    }
    Ok((text, document.failures))
}

fn print(text: &str) -> Result<(), Failure> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure(format!("cannot write to the standard output: {error}")))
        }
        _ => Ok(()),
    }
}

/// How the load was offered, for people.
fn load_sentence(document: &Document) -> String {
    match (document.load.as_str(), document.offered_rate_per_s) {
        ("open", Some(rate)) => format!(
            "open loop, {} offered: latency counts from the intended time of each operation",
            human(rate, "1/s")
        ),
        ("closed", _) => {
            "closed loop: the next operation waits for the last, so a stall hides those not sent meanwhile".into()
        }
        _ => "nothing is sent".into(),
    }
}

fn render(document: &Document, last: &Run, compared: Option<&Table>, differences: &[String]) -> String {
    let mut text = format!("narad-bench {} {}\n", document.version, document.command);
    let mut pair = |label: &str, value: &str| text.push_str(&format!("  {label:<22} {value}\n"));
    for (label, value) in document.machine.lines() {
        pair(label, &value);
    }
    pair("load", &load_sentence(document));
    // The command lines of a suite are for the page.
    for (name, value) in document.settings.iter().filter(|(name, _)| !name.starts_with("line ")) {
        pair(name, value);
    }
    for table in &last.tables {
        text.push_str(&format!("\n{}", text::table(table)));
    }
    // A result of many parts has its figures in tables.
    if last.figures.len() <= 60 || last.tables.is_empty() {
        text.push_str(&format!("\n{}", text::table(&figures(document))));
    }
    if let Some(compared) = compared {
        text.push_str(&format!("\n{}", text::table(compared)));
    }
    text.push('\n');
    for note in document.notes.iter().chain(differences) {
        text.push_str(&format!("note: {note}\n"));
    }
    text
}

fn figures(document: &Document) -> Table {
    let repeated = document.repeats > 1;
    let row = |figure: &Figure| {
        let mut row = vec![figure.name.clone(), human(figure.median, &figure.unit)];
        if repeated {
            row.push(human(figure.low, &figure.unit));
            row.push(human(figure.high, &figure.unit));
            row.push(format!("± {:.0} %", figure.spread().relative() * 100.0));
        }
        row
    };
    let head: &[&str] =
        if repeated { &["figure", "median", "lowest", "highest", "spread"] } else { &["figure", "value"] };
    let title = if repeated { format!("Measured {} times", document.repeats) } else { String::new() };
    let head = head.iter().map(ToString::to_string).collect();
    Table { title, head, rows: document.figures.iter().map(row).collect() }
}

fn write_files(
    out: &Path,
    document: &Document,
    runs: &[Run],
    compared: Option<Table>,
) -> Result<Vec<PathBuf>, Failure> {
    let command = &document.command;
    let series = document::merged(runs);
    let pictures = picture::pictures(command, &series)?;
    let mut written = Vec::new();
    let mut file = |name: String, bytes: &[u8]| {
        let path = out.join(name);
        write(&path, bytes)?;
        written.push(path);
        Ok::<(), Failure>(())
    };
    let mut json = serde_json::to_vec_pretty(document)?;
    json.push(b'\n');
    file(format!("{command}.json"), &json)?;
    for one in &series {
        file(document::percentile_file(command, &one.name), hgrm::percentiles(&one.latency).as_bytes())?;
    }
    for picture in &pictures {
        file(format!("{}.svg", picture.name), picture.svg.as_bytes())?;
        file(format!("{}.png", picture.name), &picture.png)?;
    }
    let compared = compared.map(|table| document::Table { title: table.title, head: table.head, rows: table.rows });
    file(format!("{command}.html"), page::page(document, &pictures, compared.as_ref()).as_bytes())?;
    Ok(written)
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    fs::write(path, bytes).map_err(|error| {
        Failure(format!(
            "cannot write {}: {error}: --out needs a directory that may be written and has space",
            path.display()
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::{histogram, Better};

    fn common(out: &Path) -> Common {
        Common { out: Some(out.to_owned()), compare: None, repeat: 1 }
    }

    fn folder(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("narad-bench-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        dir
    }

    fn run() -> Run {
        let mut run = Run::new("produce");
        run.figure("produce.rate", 1000.0, "1/s", Better::Higher);
        let mut latency = histogram();
        latency.saturating_record(1_000_000);
        run.latency("produce.c1", latency, vec![1000.0, 900.0]);
        run
    }

    #[test]
    fn out_holds_json_percentiles_pictures_and_the_page() {
        let dir = folder("out");
        check(&common(&dir)).unwrap();
        results(&common(&dir), &[run()]).unwrap();
        let mut names: Vec<String> =
            fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        let pictures = ["produce.latency.png", "produce.latency.svg", "produce.rate.png", "produce.rate.svg"];
        let expected = [&["produce.c1.hgrm", "produce.html", "produce.json"][..], &pictures[..]].concat();
        assert_eq!(names, expected);
        let old = Common { compare: Some(dir.join("produce.json")), ..common(&dir) };
        check(&old).unwrap();
        let (text, _) = results(&old, &[run()]).unwrap();
        assert!(text.contains("now / before"), "{text}");
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn what_cannot_be_written_is_named_before_anything_is_measured() {
        let dir = folder("file");
        fs::write(&dir, "a file").unwrap();
        let Failure(text) = check(&common(&dir)).unwrap_err();
        assert!(text.contains(dir.to_str().unwrap()) && text.contains("--out"), "{text}");
        fs::remove_file(&dir).unwrap();
        let old = Common { out: None, compare: Some(dir.clone()), repeat: 1 };
        let Failure(text) = check(&old).unwrap_err();
        assert!(text.contains(dir.to_str().unwrap()), "{text}");
    }

    #[test]
    fn a_failed_part_is_reported_and_fails_the_command_after_everything_was_written() {
        let dir = folder("failed");
        let mut failed = run();
        failed.failures.push("wal: no ring".into());
        check(&common(&dir)).unwrap();
        let (_, failures) = results(&common(&dir), &[failed]).unwrap();
        assert!(outcome(&[]).is_ok());
        let Failure(text) = outcome(&failures).unwrap_err();
        assert!(text.contains("wal: no ring"), "{text}");
        assert!(fs::read_to_string(dir.join("produce.html")).unwrap().contains("wal: no ring"));
        fs::remove_dir_all(&dir).unwrap();
    }
}
