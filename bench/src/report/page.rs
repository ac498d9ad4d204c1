//! One page with everything: no other file, no network, readable without scripts.

use std::fmt::Write;

use super::document::{Document, Table};
use super::picture::Picture;
use super::text::human;

const STYLE: &str =
    "body{font:15px/1.45 system-ui,sans-serif;max-width:1140px;margin:2em auto;padding:0 1em;color:#222}\
h1{font-size:1.6em}h2{font-size:1.25em;margin-top:2em;border-bottom:1px solid #ccc}\
table{border-collapse:collapse;margin:1em 0}caption{text-align:left;font-weight:600;padding:.3em 0}\
th,td{padding:.2em .8em;border-bottom:1px solid #e4e4e4;text-align:left;font-variant-numeric:tabular-nums}\
th{background:#f5f5f5}.n{text-align:right}.pass{background:#e3f4e3}.miss{background:#fbe3e1}.none{color:#888}\
svg{max-width:100%;height:auto;border:1px solid #eee;margin:.6em 0}code{background:#f5f5f5}";

/// Text that stands for itself in HTML, in attributes too.
pub fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            c => safe.push(c),
        }
    }
    safe
}

/// The page of a result; `compared` is the table of `--compare`, if there is one.
pub fn page(document: &Document, pictures: &[Picture], compared: Option<&Table>) -> String {
    let title = format!("narad-bench {}", document.command);
    let mut html = format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>{0}</title><style>{STYLE}</style></head>\
         <body><h1>{0}</h1>",
        escape(&title)
    );
    list(&mut html, "What is wrong with this result", &document.failures);
    section(&mut html, "Machine");
    pairs(&mut html, document.machine.lines().into_iter().map(|(name, text)| (name.to_string(), text)));
    section(&mut html, "Settings");
    let load = ("load".to_string(), super::load_sentence(document));
    let repeats = ("measured".to_string(), format!("{} time(s); figures are medians", document.repeats));
    pairs(&mut html, [load, repeats].into_iter().chain(document.settings.clone()));
    list(&mut html, "To read the numbers rightly", &document.notes);
    if !document.tables.is_empty() {
        section(&mut html, "Results");
    }
    for one in compared.into_iter().chain(&document.tables) {
        table(&mut html, one);
    }
    if !pictures.is_empty() {
        section(&mut html, "Pictures");
    }
    for picture in pictures {
        let _ = write!(html, "<figure aria-label=\"{}\">{}</figure>", escape(&picture.title), picture.svg);
    }
    section(&mut html, "All figures");
    let rows = document.figures.iter().map(|figure| {
        let show = |value: f64| human(value, &figure.unit);
        vec![figure.name.clone(), show(figure.median), show(figure.low), show(figure.high)]
    });
    let head = ["figure", "median", "lowest", "highest"].map(String::from).to_vec();
    table(&mut html, &Table { title: String::new(), head, rows: rows.collect() });
    html.push_str("</body></html>\n");
    html
}

fn section(html: &mut String, title: &str) {
    let _ = write!(html, "<h2>{}</h2>", escape(title));
}

fn list(html: &mut String, title: &str, sentences: &[String]) {
    if sentences.is_empty() {
        return;
    }
    section(html, title);
    html.push_str("<ul>");
    for sentence in sentences {
        let _ = write!(html, "<li>{}</li>", escape(sentence));
    }
    html.push_str("</ul>");
}

fn pairs(html: &mut String, pairs: impl IntoIterator<Item = (String, String)>) {
    html.push_str("<table>");
    for (name, text) in pairs {
        let _ = write!(html, "<tr><th>{}</th><td>{}</td></tr>", escape(&name), escape(&text));
    }
    html.push_str("</table>");
}

fn table(html: &mut String, table: &Table) {
    let _ = write!(html, "<table><caption>{}</caption><tr>", escape(&table.title));
    for head in &table.head {
        let _ = write!(html, "<th>{}</th>", escape(head));
    }
    html.push_str("</tr>");
    for row in &table.rows {
        html.push_str("<tr>");
        for cell in row {
            let _ = write!(html, "<td{}>{}</td>", class(cell), escape(cell));
        }
        html.push_str("</tr>");
    }
    html.push_str("</table>");
}

/// Numbers to the right; verdicts in their colour.
fn class(cell: &str) -> &'static str {
    match cell {
        "pass" | "better" => " class=\"pass\"",
        "miss" | "failed" | "WORSE" => " class=\"miss\"",
        "not measured" | "doubtful" | "within noise" | "noise unknown" => " class=\"none\"",
        _ if cell.starts_with(|c: char| c.is_ascii_digit()) && cell.chars().filter(|c| *c == ' ').count() <= 1 => {
            " class=\"n\""
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::machine::Machine;
    use crate::run::Run;

    #[test]
    fn what_comes_from_outside_cannot_become_markup() {
        assert_eq!(escape("<b a='1'>&\"</b>"), "&lt;b a=&#39;1&#39;&gt;&amp;&quot;&lt;/b&gt;");
        let mut run = Run::new("produce");
        run.set("topic", "<script>alert(1)</script>");
        run.notes.push("a < b".into());
        run.failures.push("<i>no</i>".into());
        run.tables.push(crate::run::Table {
            title: "<u>".into(),
            head: vec!["<".into()],
            rows: vec![vec!["<".into()]],
        });
        let html = page(&Document::of(&[run], Machine::default()), &[], None);
        for markup in ["<script", "a < b", "<i>", "<u>", "<th><<", "<td><<"] {
            assert!(!html.contains(markup), "{markup}");
        }
    }

    #[test]
    fn the_page_needs_no_other_file() {
        let html = page(&Document::of(&[Run::new("device")], Machine::default()), &[], None);
        for reference in ["src=", "href=", "@import", "url("] {
            assert!(!html.contains(reference), "{reference}");
        }
    }
}
