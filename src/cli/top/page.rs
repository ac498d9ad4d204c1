//! What `narad top` shows, as lines of text: pure, from two looks at the node.

use std::str::FromStr;

use crate::telemetry::{NodeReport, PeerReport, ShardReport};

/// From here on a shard's CPU, or the drive below it, is what limits.
const BUSY_LIMIT: f64 = 0.85;
const SYNCS_LIMIT: f64 = 0.9;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    Plain,
    Heading,
    /// The shard that limits, and why.
    Limit,
    Total,
    Trouble,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    pub text: String,
    pub style: Style,
}

impl Line {
    pub fn plain(text: String) -> Line {
        Line { text, style: Style::Plain }
    }

    pub fn trouble(text: String) -> Line {
        Line { text, style: Style::Trouble }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sort {
    Busy,
    Shard,
    Produce,
    Sync,
    Backlog,
    Connections,
}

const SORTS: [(&str, Sort); 6] = [
    ("busy", Sort::Busy),
    ("shard", Sort::Shard),
    ("produce", Sort::Produce),
    ("sync", Sort::Sync),
    ("backlog", Sort::Backlog),
    ("connections", Sort::Connections),
];

impl Sort {
    fn name(self) -> &'static str {
        SORTS.iter().find(|(_, sort)| *sort == self).map_or("", |(name, _)| name)
    }

    pub fn next(self) -> Sort {
        let at = SORTS.iter().position(|(_, sort)| *sort == self).unwrap_or(0);
        SORTS[(at + 1) % SORTS.len()].1
    }
}

impl FromStr for Sort {
    type Err = String;

    fn from_str(text: &str) -> Result<Sort, String> {
        SORTS.iter().find(|(name, _)| *name == text).map(|(_, sort)| *sort).ok_or_else(|| {
            let names: Vec<&str> = SORTS.iter().map(|(name, _)| *name).collect();
            format!("--sort {text:?} is none of {}", names.join(", "))
        })
    }
}

/// One shard between two looks. `None` where there is nothing to tell.
struct Row<'a> {
    now: &'a ShardReport,
    busy: f64,
    produced: Option<f64>,
    committed: Option<f64>,
    delivered: Option<f64>,
    /// Records of one durable write.
    group: Option<f64>,
}

impl<'a> Row<'a> {
    fn new(now: &'a ShardReport, before: Option<&ShardReport>) -> Row<'a> {
        let mut row = Row { now, busy: now.busy_ratio, produced: None, committed: None, delivered: None, group: None };
        let before = before.filter(|before| before.answered && now.answered && before.time_us < now.time_us);
        let Some(before) = before else { return row };
        let micros = (now.time_us - before.time_us) as f64;
        // A counter that fell is one of a broker that was started anew.
        let gained = |now: u64, before: u64| now.checked_sub(before);
        let rate = |now: u64, before: u64| Some(gained(now, before)? as f64 * 1e6 / micros);
        row.produced = rate(now.produced_records, before.produced_records);
        row.committed = rate(now.committed_records, before.committed_records);
        row.delivered = rate(now.delivered_records, before.delivered_records);
        row.busy = gained(now.busy_us, before.busy_us).map_or(row.busy, |busy| (busy as f64 / micros).min(1.0));
        row.group = match (
            gained(now.produced_records, before.produced_records),
            gained(now.produced_groups, before.produced_groups),
        ) {
            (Some(records), Some(groups)) if groups > 0 => Some(records as f64 / groups as f64),
            _ => None,
        };
        row
    }

    fn key(&self, sort: Sort) -> f64 {
        match sort {
            Sort::Busy => self.busy,
            Sort::Shard => -f64::from(self.now.shard),
            Sort::Produce => self.produced.unwrap_or(0.0),
            Sort::Sync => self.now.sync_p99_us.unwrap_or(0) as f64,
            Sort::Backlog => self.now.backlog_records as f64,
            Sort::Connections => self.now.connections as f64,
        }
    }

    fn text(&self, mark: &str) -> String {
        let now = self.now;
        let cpu = now.cpu.map_or("any".to_owned(), |cpu| cpu.to_string());
        if !now.answered {
            return format!("{mark}{:>3}{cpu:>4}  no answer within a second", now.shard);
        }
        let fine = |rate: Option<f64>| rate.map_or("-".to_owned(), rate_text);
        let time = |us: Option<u64>| us.map_or("-".to_owned(), micros);
        columns(
            mark,
            [
                now.shard.to_string(),
                cpu,
                percent(self.busy),
                fine(self.produced),
                fine(self.committed),
                fine(self.delivered),
                time(now.sync_p50_us),
                time(now.sync_p99_us),
                self.group.map_or("-".to_owned(), count),
                count(now.ring_depth as f64),
                count(now.backlog_records as f64),
                count(now.connections as f64),
                count(now.leases as f64),
                percent(share(now.memory_bytes(), now.memory_budget_bytes)),
            ],
        )
    }
}

const NAMES: [&str; 14] = [
    "SH", "CPU", "BUSY", "PROD/s", "CMT/s", "DLV/s", "SYNC50", "SYNC99", "GROUP", "RING", "BACKLG", "CONN", "LEASE",
    "MEM",
];
const WIDTHS: [usize; 14] = [3, 4, 5, 7, 6, 6, 7, 7, 6, 5, 7, 5, 6, 5];

fn columns<T: AsRef<str>>(mark: &str, cells: [T; 14]) -> String {
    let mut text = mark.to_owned();
    for (cell, width) in cells.iter().zip(WIDTHS) {
        text.push_str(&format!("{:>width$}", cell.as_ref()));
    }
    text
}

/// The page, at most `height` lines of at most `width` columns.
pub fn page(now: &NodeReport, before: Option<&NodeReport>, sort: Sort, width: usize, height: usize) -> Vec<Line> {
    let earlier = |shard: u16| before?.shards.iter().find(|other| other.shard == shard);
    let mut rows: Vec<Row> = now.shards.iter().map(|shard| Row::new(shard, earlier(shard.shard))).collect();
    rows.sort_by(|a, b| b.key(sort).total_cmp(&a.key(sort)).then(a.now.shard.cmp(&b.now.shard)));
    let (limiting, why) = limit(&rows);

    let mut lines = vec![
        Line::plain(format!(
            "narad top  {}  {} shards  memory {} of {}, resident {}  by {}",
            now.node,
            rows.len(),
            bytes(now.shards.iter().map(ShardReport::memory_bytes).sum()),
            bytes(now.memory_budget_bytes),
            now.memory_resident_bytes.map_or("-".to_owned(), bytes),
            sort.name(),
        )),
        Line { text: why, style: if limiting.is_some() { Style::Limit } else { Style::Plain } },
        Line { text: columns(" ", NAMES), style: Style::Heading },
    ];
    let peers = peer_lines(&now.peers, height / 3);
    // One line for the sums, one for what did not fit.
    let room = height.saturating_sub(lines.len() + 2 + peers.len()).max(1);
    for row in rows.iter().take(if rows.len() > room + 1 { room } else { rows.len() }) {
        let limits = limiting == Some(row.now.shard);
        let style = if limits { Style::Limit } else { Style::Plain };
        lines.push(Line { text: row.text(if limits { ">" } else { " " }), style });
    }
    if rows.len() > room + 1 {
        lines.push(Line::plain(format!("    and {} more", rows.len() - room)));
    }
    lines.push(Line { text: total(&rows), style: Style::Total });
    lines.extend(peers);
    for line in &mut lines {
        line.text = line.text.chars().take(width).collect();
    }
    lines
}

/// The other nodes, in at most `height` lines: those in trouble first.
fn peer_lines(peers: &[PeerReport], height: usize) -> Vec<Line> {
    if peers.is_empty() || height < 2 {
        return Vec::new();
    }
    let mut sorted: Vec<&PeerReport> = peers.iter().collect();
    sorted.sort_by_key(|peer| (peer.alive, peer.connections > 0, std::cmp::Reverse(peer.queued_bytes)));
    let heading = format!("  {:<20}{:>10}{:>8}{:>9}  CREDIT", "PEER", "STATE", "RTT", "QUEUED");
    let mut lines = vec![Line { text: heading, style: Style::Heading }];
    let room = if sorted.len() < height { sorted.len() } else { height - 2 };
    for peer in &sorted[..room] {
        let state = match (peer.alive, peer.connections) {
            (false, _) => "dead",
            (true, 0) => "unreached",
            (true, _) => "alive",
        };
        let name: String = peer.node.chars().take(20).collect();
        lines.push(Line::plain(format!(
            "  {name:<20}{state:>10}{:>8}{:>9}  {} of {}",
            peer.rtt_us.map_or("-".to_owned(), micros),
            bytes(peer.queued_bytes),
            bytes(peer.credit_used_bytes),
            bytes(peer.credit_bytes),
        )));
    }
    if room < sorted.len() {
        lines.push(Line::plain(format!("    and {} more", sorted.len() - room)));
    }
    lines
}

/// Rates and counts add up; of times and shares the worst one counts.
fn total(rows: &[Row]) -> String {
    let rate = |of: fn(&Row) -> Option<f64>| match rows.iter().any(|row| of(row).is_some()) {
        true => rate_text(rows.iter().filter_map(of).sum()),
        false => "-".to_owned(),
    };
    let sum = |of: fn(&ShardReport) -> u64| count(rows.iter().map(|row| of(row.now)).sum::<u64>() as f64);
    let worst = |of: fn(&Row) -> Option<u64>| rows.iter().filter_map(of).max().map_or("-".to_owned(), micros);
    let highest = |of: fn(&Row) -> f64| percent(rows.iter().map(of).fold(0.0, f64::max));
    let mut text = columns(
        " ",
        [
            String::new(),
            String::new(),
            highest(|row| row.busy),
            rate(|row| row.produced),
            rate(|row| row.committed),
            rate(|row| row.delivered),
            worst(|row| row.now.sync_p50_us),
            worst(|row| row.now.sync_p99_us),
            String::new(),
            sum(|shard| shard.ring_depth),
            sum(|shard| shard.backlog_records),
            sum(|shard| shard.connections),
            sum(|shard| shard.leases),
            highest(|row| share(row.now.memory_bytes(), row.now.memory_budget_bytes)),
        ],
    );
    text.replace_range(1..8, "  TOTAL");
    text
}

/// The shard that holds the others up, if one does, and a sentence about it.
fn limit(rows: &[Row]) -> (Option<u16>, String) {
    let highest = |of: fn(&Row) -> f64| rows.iter().max_by(|a, b| of(a).total_cmp(&of(b)));
    if let Some(row) = rows.iter().find(|row| row.now.wal_failed) {
        let shard = row.now.shard;
        let text =
            format!("shard {shard}: its log failed, produce answers 500: mend the disk, then restart the broker");
        return (Some(shard), text);
    }
    if let Some(row) = rows.iter().find(|row| !row.now.answered) {
        return (Some(row.now.shard), format!("shard {} does not answer: it is stuck, or far too busy", row.now.shard));
    }
    let (Some(busiest), Some(syncing)) = (highest(|row| row.busy), highest(|row| row.now.syncs_in_flight)) else {
        return (None, "the node has no shards".to_owned());
    };
    if busiest.busy >= BUSY_LIMIT {
        let text = format!(
            "shard {} limits: its CPU is {} busy; spread clients, or add shards",
            busiest.now.shard,
            percent(busiest.busy)
        );
        return (Some(busiest.now.shard), text);
    }
    if syncing.now.syncs_in_flight >= SYNCS_LIMIT {
        let text = format!(
            "shard {} limits: it waits for the drive, {:.1} durable writes under way at a time",
            syncing.now.shard, syncing.now.syncs_in_flight
        );
        return (Some(syncing.now.shard), text);
    }
    let text = format!("no shard is at its limit; the busiest is {} at {}", busiest.now.shard, percent(busiest.busy));
    (None, text)
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        part as f64 / whole as f64
    }
}

fn percent(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}

const THOUSANDS: [&str; 5] = ["", "k", "M", "G", "T"];

/// At most four characters.
fn count(number: f64) -> String {
    scaled(number, 1000.0, &THOUSANDS, 9.95)
}

/// At most five characters.
fn rate_text(number: f64) -> String {
    scaled(number, 1000.0, &THOUSANDS, 99.95)
}

fn bytes(number: u64) -> String {
    scaled(number as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB"], 9.95)
}

fn micros(us: u64) -> String {
    scaled(us as f64, 1000.0, &["us", "ms", "s"], 9.95)
}

/// Two or three digits, and the unit that they are of; below `fine`, with one behind the point.
fn scaled(mut number: f64, step: f64, units: &[&str], fine: f64) -> String {
    let mut unit = 0;
    // What would be written as 1000 belongs to the next unit.
    while number >= step - 0.5 && unit + 1 < units.len() {
        number /= step;
        unit += 1;
    }
    match number {
        small if small < fine && (unit > 0 || small.fract() > 0.0) => format!("{small:.1}{}", units[unit]),
        large => format!("{large:.0}{}", units[unit]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(shard: u16, seconds: u64, produced: u64) -> ShardReport {
        ShardReport {
            shard,
            cpu: Some(u32::from(shard) + 2),
            pinned: true,
            answered: true,
            time_us: seconds * 1_000_000,
            busy_us: seconds * 120_000,
            produced_records: produced,
            produced_groups: produced / 6,
            committed_records: produced,
            delivered_records: produced / 2,
            sync_p50_us: Some(180),
            sync_p99_us: Some(2_140),
            syncs_in_flight: 0.4,
            ring_depth: 37,
            backlog_records: 120,
            connections: 32,
            leases: 1_024,
            memory_budget_bytes: 512 << 20,
            staging_bytes: 40 << 20,
            cache_bytes: 24 << 20,
            ..ShardReport::default()
        }
    }

    fn node(shards: Vec<ShardReport>) -> NodeReport {
        NodeReport {
            node: "node-1".to_owned(),
            memory_budget_bytes: 1 << 30,
            memory_resident_bytes: Some(200 << 20),
            shards,
            ..NodeReport::default()
        }
    }

    fn texts(lines: &[Line]) -> String {
        lines.iter().map(|line| format!("{}\n", line.text.trim_end())).collect()
    }

    #[test]
    fn two_looks_make_a_page_of_80_columns() {
        let before = node(vec![shard(0, 10, 6_000), shard(1, 10, 0)]);
        let mut busy = shard(1, 12, 24_600);
        busy.busy_us = before.shards[1].busy_us + 1_860_000;
        (busy.cpu, busy.pinned) = (None, false);
        let now = node(vec![shard(0, 12, 6_600), busy]);
        let lines = page(&now, Some(&before), Sort::Busy, 80, 24);
        let expected = "\
narad top  node-1  2 shards  memory 128MiB of 1.0GiB, resident 200MiB  by busy
shard 1 limits: its CPU is 93% busy; spread clients, or add shards
  SH CPU BUSY PROD/s CMT/s DLV/s SYNC50 SYNC99 GROUP RING BACKLG CONN LEASE  MEM
>  1 any  93%  12.3k 12.3k  6.2k  180us  2.1ms     6   37    120   32  1.0k  12%
   0   2  12%    300   300   150  180us  2.1ms     6   37    120   32  1.0k  12%
   TOTAL  93%  12.6k 12.6k  6.3k  180us  2.1ms         74    240   64  2.0k  12%
";
        assert_eq!(texts(&lines), expected);
        let styles: Vec<Style> = lines.iter().map(|line| line.style).collect();
        assert_eq!(styles, [Style::Plain, Style::Limit, Style::Heading, Style::Limit, Style::Plain, Style::Total]);
        assert!(lines.iter().all(|line| line.text.chars().count() <= 80));
    }

    #[test]
    fn the_first_look_and_a_restart_have_no_rates() {
        let now = node(vec![shard(0, 12, 600)]);
        for before in [None, Some(node(vec![shard(0, 10, 99_000)])), Some(node(vec![shard(0, 12, 600)]))] {
            let text = texts(&page(&now, before.as_ref(), Sort::Busy, 80, 24));
            let row: Vec<&str> = text.lines().nth(3).unwrap().split_whitespace().collect();
            assert_eq!(row[3..6], ["-", "-", "-"], "{text}");
        }
    }

    #[test]
    fn the_shard_that_limits_is_named_with_the_reason() {
        let said = |change: fn(&mut ShardReport)| {
            let mut second = shard(1, 10, 0);
            change(&mut second);
            let page = page(&node(vec![shard(0, 10, 0), second]), None, Sort::Shard, 200, 24);
            let marked = page.iter().filter(|line| line.text.starts_with('>')).count();
            (page[1].text.clone(), marked)
        };
        assert_eq!(said(|_| {}), ("no shard is at its limit; the busiest is 1 at 0%".to_owned(), 0));
        for (change, part) in [
            ((|s| s.busy_ratio = 0.9) as fn(&mut ShardReport), "shard 1 limits: its CPU is 90% busy"),
            (|s| s.syncs_in_flight = 1.4, "shard 1 limits: it waits for the drive, 1.4 durable writes"),
            (|s| s.wal_failed = true, "shard 1: its log failed, produce answers 500"),
            (|s| s.answered = false, "shard 1 does not answer"),
        ] {
            let (text, marked) = said(change);
            assert!(text.contains(part) && marked == 1, "{text}");
        }
        assert_eq!(page(&node(Vec::new()), None, Sort::Busy, 80, 24)[1].text, "the node has no shards");
    }

    #[test]
    fn rows_are_sorted_and_what_does_not_fit_is_counted() {
        let now = node((0..64).map(|i| ShardReport { backlog_records: i.into(), ..shard(i, 10, 0) }).collect());
        let lines = page(&now, None, Sort::Backlog, 80, 24);
        assert_eq!(lines.len(), 24);
        assert!(
            lines[3].text.starts_with("  63") && lines[22].text.starts_with("    and 45 more"),
            "{}",
            texts(&lines)
        );
        assert_eq!(page(&now, None, Sort::Shard, 80, usize::MAX).len(), 3 + 64 + 1);
        assert!(page(&now, None, Sort::Shard, 80, 0)[3].text.starts_with("   0"));
        assert_eq!("sync".parse(), Ok(Sort::Sync));
        assert!("size".parse::<Sort>().unwrap_err().contains("busy, shard"));
        let mut sort = Sort::Busy;
        (0..SORTS.len()).for_each(|_| sort = sort.next());
        assert_eq!(sort, Sort::Busy);
    }

    #[test]
    fn the_other_nodes_follow_those_in_trouble_first() {
        let peer = |node: &str, alive, connections: u64| PeerReport {
            node: node.to_owned(),
            alive,
            connections,
            rtt_us: (connections > 0).then_some(412),
            queued_bytes: 12 << 10,
            credit_used_bytes: 300 << 10,
            credit_bytes: 8 << 20,
        };
        let peers = vec![peer("b", true, 3), peer("c", false, 0), peer("d", true, 0)];
        let now = NodeReport { peers, ..node(vec![shard(0, 10, 0)]) };
        let text = texts(&page(&now, None, Sort::Busy, 80, 24));
        let expected = [
            "  PEER                     STATE     RTT   QUEUED  CREDIT",
            "  c                         dead       -    12KiB  300KiB of 8.0MiB",
            "  d                    unreached       -    12KiB  300KiB of 8.0MiB",
            "  b                        alive   412us    12KiB  300KiB of 8.0MiB",
        ];
        let last: Vec<&str> = text.lines().rev().take(4).collect();
        assert_eq!(last.into_iter().rev().collect::<Vec<_>>(), expected, "{text}");
        // They take a third of the page at most.
        let peers = (0..60).map(|at| peer(&format!("n{at}"), true, 1)).collect();
        let now = NodeReport { peers, ..node((0..64).map(|i| shard(i, 10, 0)).collect()) };
        let lines = page(&now, None, Sort::Busy, 80, 24);
        assert_eq!(lines.len(), 24);
        assert!(lines[23].text.contains("and 54 more"), "{}", texts(&lines));
    }

    #[test]
    fn figures_stay_narrow() {
        for (number, text) in [
            (0.0, "0"),
            (0.4, "0.4"),
            (7.0, "7"),
            (999.0, "999"),
            (999.6, "1.0k"),
            (1_000.0, "1.0k"),
            (12_345.0, "12k"),
            (999_400.0, "999k"),
            (999_600.0, "1.0M"),
        ] {
            assert_eq!(count(number), text);
        }
        assert_eq!(
            (rate_text(12_345.0), rate_text(123_450.0), rate_text(99_960.0)),
            ("12.3k".into(), "123k".into(), "100k".into())
        );
        assert_eq!(
            (micros(999), micros(1_000), micros(2_140), micros(12_000_000)),
            ("999us".into(), "1.0ms".into(), "2.1ms".into(), "12s".into())
        );
        assert_eq!((bytes(0), bytes(1 << 20), bytes(1536)), ("0B".into(), "1.0MiB".into(), "1.5KiB".into()));
    }
}
