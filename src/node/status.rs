//! How this node is, for whoever asks over the peer plane or as an operator (http-api 21.1): what it still owes, and what
//! it has set aside.

use std::fs;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use narad_shards::api::{NodeStatus, Quarantined};
use narad_shards::meta::{Address, Incarnation};
use narad_shards::peer::{Carrier, Reply, Request};
use narad_shards::rt;

use super::figures::used_bytes;
use super::run::Common;
use crate::control::{Applier, OwnStatus};

/// A shard that says nothing for so long has not said that it owes nothing.
const SHARD_WAIT: Duration = Duration::from_secs(1);

/// The node's word on itself, gathered anew for each question.
pub fn own(common: &Arc<Common>, links: &Rc<dyn Carrier>, applier: &Rc<Applier>) -> OwnStatus {
    let (common, links, applier) = (common.clone(), links.clone(), applier.clone());
    Rc::new(move || {
        let (common, links, applier) = (common.clone(), links.clone(), applier.clone());
        Box::pin(async move {
            let draining = applier.state().members().get(common.node_id.as_str()).is_some_and(|me| me.draining);
            let ask = |shard| Box::pin(rt::timeout(SHARD_WAIT, links.call(Address::local(shard), Request::Vitals)));
            let (mut produce_in_flight, mut dispatch_backlog) = (0u64, 0u64);
            for answer in rt::all((0..common.state.shards).map(ask).collect()).await {
                // One that does not answer may owe anything: a zero would say that it may be taken away (K62).
                let (staged, backlog) = match answer {
                    Ok(Ok(Reply::Vitals(vitals))) => (vitals.staged_records, vitals.backlog_records),
                    _ => (1, 1),
                };
                produce_in_flight += staged;
                dispatch_backlog += backlog;
            }
            let root = common.data_root.clone();
            let aside = rt::blocking(move || set_aside(&root)).await;
            NodeStatus {
                node: common.node_id.clone(),
                draining,
                produce_in_flight,
                dispatch_backlog,
                quarantined_copies: aside.len() as u64,
                quarantined_bytes: aside.iter().map(|copy| copy.bytes).sum(),
                quarantined: aside.into_iter().take(NodeStatus::COPIES_MAX).collect(),
            }
        })
    })
}

/// Topic directories of former incarnations, by name.
fn set_aside(root: &Path) -> Vec<Quarantined> {
    let entries = fs::read_dir(root.join("topics")).into_iter().flatten().flatten();
    let mut copies: Vec<Quarantined> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let (topic, id) = name.rsplit_once(".stale-")?;
            Incarnation::parse(id)?;
            let modified = entry.metadata().ok()?.modified().ok()?;
            Some(Quarantined {
                topic: topic.to_owned(),
                directory: format!("topics/{name}"),
                bytes: used_bytes(&entry.path()),
                modified_at: modified.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            })
        })
        .collect();
    copies.sort_by(|a, b| a.directory.cmp(&b.directory));
    copies
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn http_api_21_1_what_was_set_aside_is_listed_and_what_is_served_is_not() {
        let root = std::env::temp_dir().join(format!("narad-aside-{}", std::process::id()));
        for directory in ["t", "t.stale-00000000000000aa", "b.c.stale-00000000000000bb", "x.stale-zz"] {
            fs::create_dir_all(root.join("topics").join(directory)).unwrap();
        }
        fs::write(root.join("topics/t.stale-00000000000000aa/file"), vec![7; 10_000]).unwrap();
        let found = set_aside(&root);
        fs::remove_dir_all(&root).unwrap();
        let topics: Vec<&str> = found.iter().map(|copy| copy.topic.as_str()).collect();
        assert_eq!(topics, ["b.c", "t"]);
        assert_eq!(found[1].directory, "topics/t.stale-00000000000000aa");
        assert!(found[1].bytes >= 10_000 && found[1].modified_at > 0, "{found:?}");
        assert!(set_aside(&root).is_empty(), "no directory is nothing, not an error");
    }
}
