//! Numbers and tables as a person reads them.

use crate::run::Table;

/// A value with its unit: `171 µs`, `12,345 /s`, `204 MB/s`, `64 KiB`, `1.35`.
pub fn human(value: f64, unit: &str) -> String {
    if !value.is_finite() {
        return "-".into();
    }
    match unit {
        "ns" => scaled(value, 1000.0, &["ns", "µs", "ms", "s"]),
        "s" => scaled(value * 1e9, 1000.0, &["ns", "µs", "ms", "s"]),
        "B/s" => scaled(value, 1000.0, &["B/s", "kB/s", "MB/s", "GB/s"]),
        "B" => scaled(value, 1024.0, &["B", "KiB", "MiB", "GiB"]),
        "1/s" => format!("{} /s", grouped(value)),
        "ratio" => plain(value),
        "count" => grouped(value),
        other => format!("{} {other}", plain(value)),
    }
}

fn scaled(value: f64, step: f64, units: &[&str]) -> String {
    let (mut value, mut unit) = (value, 0);
    while value.abs() >= step && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    format!("{} {}", plain(value), units[unit])
}

/// Three significant digits, without an exponent.
pub fn plain(value: f64) -> String {
    let digits = match value.abs() {
        v if v == 0.0 || v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        v if v >= 0.1 => 3,
        _ => 4,
    };
    format!("{value:.digits$}")
}

/// Thousands apart; decimals only where the number is small and has some.
pub fn grouped(value: f64) -> String {
    if value.abs() < 100.0 && value.fract() != 0.0 {
        return plain(value);
    }
    let digits = format!("{:.0}", value.abs());
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    if value < 0.0 {
        text.insert(0, '-');
    }
    text
}

/// A table in columns: the first one left-aligned, numbers right-aligned.
pub fn table(table: &Table) -> String {
    let columns = table.rows.iter().map(Vec::len).chain([table.head.len()]).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns)
        .map(|column| {
            let cells = table.rows.iter().chain([&table.head]).filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        })
        .collect();
    let mut text = String::new();
    if !table.title.is_empty() {
        text.push_str(&table.title);
        text.push('\n');
    }
    let mut line = |row: &[String], lefts: &[bool]| {
        let mut line = String::from(" ");
        for (column, cell) in row.iter().enumerate() {
            let gap = " ".repeat(widths[column].saturating_sub(cell.chars().count()));
            line.push(' ');
            if column == 0 || lefts.get(column).copied().unwrap_or(false) {
                line.push_str(cell);
                line.push_str(&gap);
            } else {
                line.push_str(&gap);
                line.push_str(cell);
            }
            line.push(' ');
        }
        text.push_str(line.trim_end());
        text.push('\n');
    };
    let words: Vec<bool> = (0..columns)
        .map(|column| {
            table
                .rows
                .iter()
                .filter_map(|row| row.get(column))
                .any(|cell| cell.chars().filter(|c| *c == ' ').count() > 1)
        })
        .collect();
    line(&table.head, &words);
    let rules: Vec<String> = widths.iter().map(|width| "-".repeat(*width)).collect();
    line(&rules, &words);
    for row in &table.rows {
        line(row, &words);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_carry_the_unit_that_fits_their_size() {
        assert_eq!(human(171_000.0, "ns"), "171 µs");
        assert_eq!(human(2_500_000.0, "ns"), "2.50 ms");
        assert_eq!(human(300.0, "ns"), "300 ns");
        assert_eq!(human(13_014.2, "1/s"), "13,014 /s");
        assert_eq!(human(740e6, "B/s"), "740 MB/s");
        assert_eq!(human(65_536.0, "B"), "64.0 KiB");
        assert_eq!(human(1.3512, "ratio"), "1.35");
        assert_eq!(human(0.04, "ratio"), "0.0400");
        assert_eq!(human(f64::NAN, "ns"), "-");
        assert_eq!(human(1_234_567.0, "count"), "1,234,567");
        assert_eq!(human(3.0, "count"), "3");
    }

    #[test]
    fn columns_line_up_whatever_the_characters() {
        let rows = vec![vec!["a".into(), "171 µs".into()], vec!["bcd".into(), "2 s".into()]];
        let text = table(&Table { title: "T".into(), head: vec!["x".into(), "p50".into()], rows });
        let ends: Vec<usize> = text.lines().skip(1).map(|line| line.chars().count()).collect();
        assert!(ends.iter().all(|end| *end == ends[0]), "{text}");
    }
}
