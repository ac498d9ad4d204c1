//! What fuzzers feed: small files of the data directory and of the kernel.

use super::cgroup::{parse_cpu_max, parse_machine_memory, parse_memory_limit, Cgroups};
use super::data_dir::parse_store_id;
use crate::config::check_node_id;

/// Store id and node id.
pub(crate) fn ids(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Some(id) = parse_store_id(&text) {
        assert_eq!(parse_store_id(&format!("{id:016x}\n")), Some(id));
    }
    let _ = check_node_id(&text);
}

/// `/proc/self/cgroup` and, behind the first zero byte, `/proc/self/mountinfo`; each also as a control file.
pub(crate) fn cgroup(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (membership, mountinfo) = text.split_once('\0').unwrap_or((&text, ""));
    Cgroups::parse(membership, mountinfo);
    for text in [membership, mountinfo] {
        parse_machine_memory(text);
        assert_ne!(parse_memory_limit(text), Some(0));
        assert!(parse_cpu_max(text).is_none_or(|quota| quota > 0.0 && quota.is_finite()));
    }
}
