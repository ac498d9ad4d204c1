//! The table of the specification's series against what a real broker exports, in both directions.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use narad_harness::client::Client;
use narad_harness::process::Broker;

const TABLE: &str = include_str!("metrics.txt");

#[derive(PartialEq, Eq)]
enum Standing {
    /// Exported by every node that has served a message.
    Have,
    /// Exported once what it counts has happened.
    Rare,
    Later,
}

fn table() -> BTreeMap<&'static str, Standing> {
    let lines = TABLE.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let rows = lines.map(|line| {
        let mut columns = line.split('|').map(str::trim);
        let (name, standing) = (columns.next().unwrap(), columns.next().unwrap());
        let standing = match standing.split(':').next() {
            Some("have") => Standing::Have,
            Some("rare") => Standing::Rare,
            Some("later") => Standing::Later,
            other => panic!("{name}: {other:?} is no standing"),
        };
        (name, standing)
    });
    let table: BTreeMap<_, _> = rows.collect();
    assert!(table.len() > 100, "the table is broken");
    table
}

/// Names of the families on a page, with whether they hold a sample.
fn families(page: &str) -> BTreeMap<&str, bool> {
    let mut families: BTreeMap<&str, bool> = BTreeMap::new();
    let mut current = "";
    for line in page.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            current = rest.split(' ').next().unwrap();
            families.entry(current).or_default();
        } else if !line.starts_with('#') {
            assert!(line.starts_with(current), "{line} does not belong to {current}");
            families.insert(current, true);
        }
    }
    families
}

fn a_little_traffic(client: &mut Client) {
    let created = client.post("/v1/topics", b"{\"name\":\"t\"}").unwrap();
    assert_eq!(created.status, 201, "{}", created.text());
    assert_eq!(client.post("/v1/topics/t/produce", b"{}").unwrap().status, 202);
    let deadline = Instant::now() + Duration::from_secs(20);
    let taken = loop {
        let taken = client.get("/v1/topics/t/consume?wait=5s").unwrap();
        if taken.status == 200 {
            break taken.json();
        }
        assert!(Instant::now() < deadline, "the record did not arrive");
    };
    let handle = taken["receipt_handle"].as_str().unwrap();
    assert_eq!(client.post(&format!("/v1/topics/t/ack?receipt_handle={handle}"), b"").unwrap().status, 204);
    assert_eq!(client.post("/v1/topics/t/ack?receipt_handle=0:0:1", b"").unwrap().status, 410);
}

#[test]
fn every_metric_of_one_node_is_exported() {
    let scratch = std::env::temp_dir().join(format!("narad-metrics-{}", std::process::id()));
    std::fs::create_dir_all(&scratch).unwrap();
    let arguments = ["--shards", "2", "--no-pin", "--memory", "256MiB"];
    let mut broker = Broker::start(Path::new(env!("CARGO_BIN_EXE_narad")), &scratch.join("data"), &arguments).unwrap();
    let mut client = broker.client();
    a_little_traffic(&mut client);
    // What the start finds in the directories is counted a moment after it.
    let deadline = Instant::now() + Duration::from_secs(20);
    let page = loop {
        let page = client.get("/metrics").unwrap().text();
        if page.contains("narad_quarantined_copies") || Instant::now() > deadline {
            break page;
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    broker.stop(Duration::from_secs(20)).unwrap();
    std::fs::remove_dir_all(&scratch).unwrap();

    let (table, exported) = (table(), families(&page));
    let mut findings = Vec::new();
    for (name, standing) in &table {
        match (standing, exported.get(name)) {
            (Standing::Have, None) => findings.push(format!("{name} is not exported")),
            (Standing::Have, Some(false)) => findings.push(format!("{name} has no sample")),
            (Standing::Rare, None) => findings.push(format!("{name} is not announced")),
            (Standing::Later, Some(_)) => findings.push(format!("{name} is exported, and the table says later")),
            _ => {}
        }
    }
    findings.extend(
        exported.keys().filter(|name| !table.contains_key(*name)).map(|name| format!("{name} is not in the table")),
    );
    assert!(findings.is_empty(), "{}\n{page}", findings.join("\n"));
    let held = page.lines().find_map(|line| line.strip_prefix("narad_runtime_allocator_bytes ")).unwrap();
    assert!(held.parse::<u64>().unwrap() > 1 << 20, "the allocator of the program holds {held} bytes");
    for value in [
        "narad_topics_total 1\n",
        "narad_ingress_wal_failed 0\n",
        "narad_quarantined_copies 0\n",
        "narad_errors_total{component=\"metrics\",kind=\"shard_timeout\"} 0\n",
    ] {
        assert!(page.contains(value), "{value}\n{page}");
    }
}

const PAGES: [&str; 9] = [
    "README.md",
    "shards/README.md",
    "docs/metrics.md",
    "docs/operating.md",
    "docs/cluster.md",
    "docs/sizing.md",
    "docs/recovery.md",
    "docs/configuration.md",
    "docs/http-api.md",
];

fn page(name: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(name)).unwrap()
}

#[test]
fn documents_name_no_series_that_is_not_exported() {
    let table = table();
    for document in PAGES {
        let text = page(document);
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let series: BTreeSet<&str> = words.filter(|word| word.starts_with("narad_")).collect();
        for name in series.into_iter().filter(|name| !["narad_shards"].contains(name)) {
            assert!(table.get(name).is_some_and(|standing| *standing != Standing::Later), "{document}: {name}");
        }
    }
}

#[test]
fn the_page_of_metrics_has_a_row_for_each_series_and_no_other() {
    let text = page("docs/metrics.md");
    let rows = text
        .lines()
        .filter_map(|line| line.strip_prefix("| `narad_")?.split_once("` | "))
        .filter(|(_, rest)| ["counter |", "gauge |", "histogram |"].iter().any(|kind| rest.starts_with(kind)));
    let mut rows: Vec<String> = rows.map(|(name, _)| format!("narad_{name}")).collect();
    rows.sort();
    let table = table();
    let exported = table.iter().filter(|(name, standing)| **standing != Standing::Later && name.starts_with("narad_"));
    let exported: Vec<String> = exported.map(|(name, _)| (*name).to_owned()).collect();
    let missing: Vec<_> = exported.iter().filter(|name| !rows.contains(name)).collect();
    let strange: Vec<_> = rows.iter().filter(|name| !exported.contains(name)).collect();
    assert!(missing.is_empty() && strange.is_empty(), "missing: {missing:?}; strange: {strange:?}");
    assert_eq!(rows.len(), exported.len(), "a series stands there twice");
}
