//! What `/metrics` prints, against what is written about it.

use super::*;

/// Of the process, by the names that every exporter gives them.
const COMMON: &str = "process_";

#[test]
fn every_series_that_metrics_prints_is_named_in_docs_metrics_md() {
    const DOCS: &str = include_str!("../../../docs/metrics.md");
    run(|world| async move {
        // One of each kind that is printed only once there is something to tell.
        world.ask("POST", "/v1/topics/t/messages", JSON, b"{}").await;
        let page = world.ask("GET", "/metrics", "", b"").await;
        let text = page.text();
        let mut missing = Vec::new();
        let mut help = "";
        for line in text.lines() {
            help = line.strip_prefix("# HELP ").unwrap_or(help);
            let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) else {
                continue;
            };
            if !name.starts_with(COMMON) && !DOCS.contains(&format!("`{name}`")) {
                let meaning = help.strip_prefix(name).unwrap_or(help).trim();
                missing.push(format!("| `{name}` | {kind} | {meaning} |"));
            }
        }
        assert!(text.contains("# TYPE narad_raft_term gauge"), "a page without its series tests nothing");
        assert!(missing.is_empty(), "not in docs/metrics.md:\n{}", missing.join("\n"));
    });
}
