//! The peer plane's certificates while the node runs: read again when they change or a SIGHUP asks for it, and spoken
//! of before they expire (E49). A set that cannot be used changes nothing.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use narad_shards::rt;

use super::run::Common;
use crate::config::format_time;
use crate::peer::{check_files, wall_clock, PeerEndpoint, TlsFiles, Validity};

/// How often the files' times are looked at.
const LOOK: Duration = Duration::from_secs(60);
/// How soon a signal is seen, and a new set is in use on every endpoint.
const TURN: Duration = Duration::from_secs(1);
const DAY: i64 = 86_400;

/// What every thread may look at.
#[derive(Debug, Default)]
pub struct Certificates {
    validity: Mutex<Option<Validity>>,
    /// Counts sets that were found good while the node runs; endpoints follow.
    generation: AtomicU64,
    asked: AtomicBool,
}

impl Certificates {
    pub fn new(validity: Option<Validity>) -> Certificates {
        Certificates { validity: Mutex::new(validity), ..Certificates::default() }
    }

    /// `None`: the node has no certificates but those that it makes for itself.
    pub fn validity(&self) -> Option<Validity> {
        *self.validity.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// What a SIGHUP asks for; `false` when there is nothing to read.
    pub fn read_again(&self) -> bool {
        self.asked.store(true, Relaxed);
        self.validity().is_some()
    }

    /// What `/readyz` says of them.
    pub fn degraded(&self, now: i64) -> Vec<&'static str> {
        let Some(validity) = self.validity() else { return Vec::new() };
        let kinds = [(validity.leaf, "raft_tls_certificate_expired"), (validity.authorities, "raft_tls_ca_expired")];
        kinds.into_iter().filter(|(ends, _)| *ends <= now).map(|(_, reason)| reason).collect()
    }

    fn replace(&self, validity: Validity) {
        *self.validity.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(validity);
        self.generation.fetch_add(1, Relaxed);
    }
}

/// Runs on the control thread of a node that was given files.
pub async fn watch(common: Arc<Common>, files: TlsFiles) {
    let certificates = &common.state.certificates;
    let files = Arc::new(files);
    let (mut written, mut looked, mut expiry) = (times_of(&files).await, rt::now(), Expiry::default());
    loop {
        if let Some(validity) = certificates.validity() {
            expiry.say(validity, wall_clock());
        }
        rt::sleep(TURN).await;
        let asked = certificates.asked.swap(false, Relaxed);
        if !asked && rt::now() - looked < LOOK {
            continue;
        }
        looked = rt::now();
        let now = times_of(&files).await;
        if !asked && now == written {
            continue;
        }
        written = now;
        let read = files.clone();
        match rt::blocking(move || check_files(&read)).await {
            Ok(validity) => {
                certificates.replace(validity);
                let not_after = shown(validity.leaf);
                tracing::info!(not_after, "peer certificates were read again; new connections use them");
            }
            Err(err) => tracing::error!(err, "peer certificates cannot be used; the former ones stay in use"),
        }
    }
}

/// Has one endpoint use what [`watch`] found good.
pub async fn follow(common: Arc<Common>, endpoint: Rc<PeerEndpoint>) {
    let mut used = 0;
    loop {
        let generation = common.state.certificates.generation.load(Relaxed);
        if generation != used {
            used = generation;
            if let Err(err) = endpoint.reload() {
                tracing::error!(err, "peer certificates cannot be used; the former ones stay in use");
            }
        }
        rt::sleep(TURN).await;
    }
}

async fn times_of(files: &Arc<TlsFiles>) -> [Option<SystemTime>; 3] {
    let files = files.clone();
    rt::blocking(move || {
        [&files.certificate, &files.key, &files.authorities].map(|path| std::fs::metadata(path).ok()?.modified().ok())
    })
    .await
}

fn shown(seconds: i64) -> String {
    format!("{}Z", format_time(u64::try_from(seconds).unwrap_or(0)))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Month,
    Week,
    Day,
    Expired,
}

impl Stage {
    fn of(ends: i64, now: i64) -> Option<Stage> {
        match ends - now {
            ..=0 => Some(Stage::Expired),
            left if left < DAY => Some(Stage::Day),
            left if left < 7 * DAY => Some(Stage::Week),
            left if left < 30 * DAY => Some(Stage::Month),
            _ => None,
        }
    }
}

/// Each stage is said once; what has expired, once a day.
#[derive(Default)]
struct Expiry {
    said: BTreeMap<&'static str, (Option<Stage>, i64)>,
}

impl Expiry {
    fn say(&mut self, validity: Validity, now: i64) {
        let kinds = [("leaf", "certificate", validity.leaf), ("ca", "CA certificate", validity.authorities)];
        for (kind, what, ends) in kinds {
            let stage = Stage::of(ends, now);
            let (before, at) = self.said.get(kind).copied().unwrap_or_default();
            let is_due = stage != before || (stage == Some(Stage::Expired) && now - at >= DAY);
            if !is_due {
                continue;
            }
            self.said.insert(kind, (stage, now));
            let not_after = shown(ends);
            match stage {
                None => {}
                Some(Stage::Month) => {
                    tracing::warn!(kind, not_after, "raft TLS {what} expires in less than 30 days: renew it");
                }
                Some(Stage::Week) => {
                    tracing::warn!(kind, not_after, "raft TLS {what} expires in less than 7 days: renew it");
                }
                Some(Stage::Day) => {
                    tracing::error!(kind, not_after, "raft TLS {what} expires in less than 1 day: renew it now");
                }
                Some(Stage::Expired) => {
                    let expired_for = crate::config::format_duration(Duration::from_secs((now - ends) as u64));
                    tracing::error!(
                        kind,
                        not_after,
                        expired_for,
                        "raft TLS {what} has expired: peers refuse new connections; replace the files and send SIGHUP"
                    );
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{LogFormat, LogLevel};
    use crate::telemetry::logged;

    #[test]
    fn operations_6_an_end_in_sight_is_said_at_each_stage_and_daily_once_it_has_come() {
        let ends = 100 * DAY;
        let mut expiry = Expiry::default();
        let validity = Validity { leaf: ends, authorities: 1_000 * DAY };
        let mut at = |now| {
            let lines = logged(LogLevel::Info, LogFormat::Text, || expiry.say(validity, now));
            lines.iter().map(|line| line.split_once("level=").unwrap().1.to_owned()).collect::<Vec<_>>()
        };
        assert!(at(0).is_empty());
        let month = at(ends - 29 * DAY);
        assert!(month[0].starts_with("WARN msg=\"raft TLS certificate expires in less than 30 days"), "{month:?}");
        assert!(month[0].contains(" kind=leaf not_after="), "{month:?}");
        assert!(at(ends - 28 * DAY).is_empty(), "said once");
        assert!(at(ends - 6 * DAY)[0].starts_with("WARN"));
        assert!(at(ends - DAY / 2)[0].starts_with("ERROR msg=\"raft TLS certificate expires in less than 1 day"));
        assert!(at(ends)[0].starts_with("ERROR msg=\"raft TLS certificate has expired"));
        assert!(at(ends + DAY - 1).is_empty());
        assert!(at(ends + DAY)[0].contains("has expired"), "and again every day");
    }

    #[test]
    fn operations_7_expired_certificates_degrade_the_node_and_keep_it_ready() {
        let certificates = Certificates::new(Some(Validity { leaf: 10, authorities: 20 }));
        assert!(certificates.degraded(9).is_empty());
        assert_eq!(certificates.degraded(10), ["raft_tls_certificate_expired"]);
        assert_eq!(certificates.degraded(20), ["raft_tls_certificate_expired", "raft_tls_ca_expired"]);
        assert!(Certificates::default().degraded(99).is_empty(), "its own have no end");
        assert!(!Certificates::default().read_again());
        certificates.replace(Validity { leaf: 100, authorities: 200 });
        assert!(certificates.degraded(20).is_empty() && certificates.read_again());
    }
}
