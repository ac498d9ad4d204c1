//! The table of docs/configuration.md against the settings.

use super::settings::{Setting, SETTINGS};
use super::value::Raw;
use super::Config;

/// A row: key, variable, flag, default, range, meaning; marks of code taken off.
fn rows() -> Vec<[String; 6]> {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/configuration.md");
    let page = std::fs::read_to_string(path).unwrap();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.strip_suffix(" |")).map(|line| {
        let cells: Vec<String> = line.split('|').map(|cell| cell.trim().replace('`', "")).collect();
        <[String; 6]>::try_from(cells).unwrap_or_else(|cells| panic!("six columns, please: {cells:?}"))
    });
    rows.collect()
}

/// How the settings look, whatever named the host of an address.
fn shown(config: &Config) -> String {
    format!("{config:?}").replace("host: Some(\"\")", "host: None")
}

/// Whether the defaults have nothing where the setting goes.
fn is_unset(setting: &Setting, defaults: &str) -> bool {
    let name = setting.key.rsplit('.').next().unwrap_or_default().to_lowercase();
    let name = name.trim_start_matches("narad_").trim_start_matches("cluster_").replace("memory", "memory_bytes");
    ["None", "[]"].iter().any(|nothing| defaults.contains(&format!("{name}: {nothing}")))
}

fn whole_number_range(setting: &Setting) -> Option<(String, String)> {
    let error = (setting.apply)(&mut Config::defaults(false), Raw::Text("x")).err()?;
    let (_, range) = error.split_once("whole number from ")?;
    let (from, to) = range.split_once(" to ")?;
    Some((from.to_owned(), to.to_owned()))
}

#[test]
fn every_setting_is_on_its_page_with_its_variable_default_and_range() {
    let (rows, defaults) = (rows(), Config::defaults(false));
    let mut findings: Vec<String> = rows
        .iter()
        .filter(|row| !SETTINGS.iter().any(|setting| setting.key == row[0]))
        .map(|row| format!("{}: there is no such setting", row[0]))
        .collect();
    for setting in SETTINGS {
        let key = setting.key;
        let mut found = rows.iter().filter(|row| row[0] == key);
        let (Some([_, variable, _, default, range, meaning]), None) = (found.next(), found.next()) else {
            findings.push(format!("{key}: must have one row"));
            continue;
        };
        if variable != setting.environment.unwrap_or("") {
            findings.push(format!("{key}: its variable is {:?}", setting.environment));
        }
        if meaning.is_empty() {
            findings.push(format!("{key}: means nothing"));
        }
        if default == "unset" {
            if !is_unset(setting, &shown(&defaults)) {
                findings.push(format!("{key}: has a default"));
            }
        } else {
            let mut config = defaults.clone();
            let applied = (setting.apply)(&mut config, Raw::Text(default));
            if applied.is_err() || shown(&config) != shown(&defaults) {
                findings.push(format!("{key}: {default} is not its default"));
            }
        }
        if let Some((from, to)) = whole_number_range(setting) {
            let open = to.len() > 12;
            if !range.contains(&from) || !(open || range.contains(&to)) {
                findings.push(format!("{key}: goes from {from} to {to}"));
            }
        }
    }
    assert!(findings.is_empty(), "docs/configuration.md:\n{}", findings.join("\n"));
}
