//! docs/http-api.md against the route table.

use std::collections::{BTreeMap, BTreeSet};

use hyper::Method;

use crate::http::route::{find, Found, Route};
use crate::http::Surface;

const API: Surface = Surface::Api { metrics: true };

/// `GET /v1/topics`, from headings and from the table of what is not built.
fn documented(page: &str) -> Vec<&str> {
    let marked = page.lines().filter_map(|line| {
        let line = line.strip_prefix("### `").or_else(|| line.strip_prefix("| `"))?;
        line.split('`').next()
    });
    marked.filter(|text| text.contains(" /")).collect()
}

/// Everything in braces is some name or number.
fn concrete(path: &str) -> String {
    let filled = path.split('/').map(|part| if part.starts_with('{') { "7" } else { part });
    filled.collect::<Vec<_>>().join("/")
}

#[test]
fn every_route_is_on_its_page_and_nothing_else_is() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/http-api.md");
    let page = std::fs::read_to_string(path).unwrap();
    let (mut findings, mut missing) = (Vec::new(), Route::LABELS.to_vec());
    let mut methods: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for line in documented(&page) {
        let (method, path) = line.split_once(' ').unwrap();
        let wanted = Method::from_bytes(method.as_bytes()).unwrap();
        match find(&wanted, &concrete(path), API) {
            Found::Route { route, .. } => missing.retain(|label| *label != Route::LABELS[route as usize]),
            other => findings.push(format!("{line}: {other:?}")),
        }
        if !methods.entry(path).or_default().insert(method) {
            findings.push(format!("{line}: stands there twice"));
        }
    }
    for (path, documented) in methods {
        let Found::OtherMethods { allow } = find(&Method::OPTIONS, &concrete(path), API) else { continue };
        let served: BTreeSet<&str> = allow.split(", ").filter(|method| *method != "HEAD").collect();
        if served != documented {
            findings.push(format!("{path}: serves {served:?}, and the page has {documented:?}"));
        }
    }
    findings.extend(missing.iter().map(|label| format!("{label}: is not there")));
    assert!(findings.is_empty(), "docs/http-api.md:\n{}", findings.join("\n"));
}
