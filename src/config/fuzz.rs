//! What fuzzers feed: settings as a person may write them.

use super::{format_bytes, format_duration, parse_bytes, parse_duration, Config, CpuSet, ListenAddress};

/// The configuration file, up to but not including the checks that look at the machine.
pub(crate) fn file(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data) {
        let _ = super::json::parse(text).and_then(|root| super::apply_file(&mut Config::defaults(false), root));
    }
}

/// Single values: CPU lists, durations, sizes, addresses.
pub(crate) fn values(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Ok(cpus) = CpuSet::parse(&text) {
        assert_eq!(CpuSet::parse(&cpus.to_string()), Ok(cpus));
    }
    if let Ok(duration) = parse_duration(&text) {
        assert_eq!(parse_duration(&format_duration(duration)), Ok(duration));
    }
    if let Ok(bytes) = parse_bytes(&text) {
        format_bytes(bytes); // rounds
    }
    if let Ok(address) = ListenAddress::parse(&text) {
        assert_eq!(ListenAddress::parse(&address.to_string()), Ok(address));
    }
}
