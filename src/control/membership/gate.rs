//! Which command types may be proposed: only those that every server and every member has said it applies (K18).

use std::collections::BTreeMap;
use std::time::Duration;

use narad_shards::rt::Instant;

use crate::control::{Command, State, View};

/// A type that is held back is said that often.
const SAY_AGAIN: Duration = Duration::from_secs(60);

/// What holds `command_type` back, in words; `None` when everybody applies it. Types of the first release are applied
/// by every build there is.
pub fn held_back_by(state: &State, view: &View, command_type: u64) -> Option<String> {
    if command_type <= Command::FIRST_RELEASE_TYPE {
        return None;
    }
    // A dead or draining member counts like any other: its last report stands until it is removed.
    let old = state.members().values().find(|member| member.registration.newest_command_type < command_type);
    if let Some(member) = old {
        let told = &member.registration;
        return Some(format!(
            "member {:?} (build {}) applies command types up to {}, not {command_type}",
            &*told.node, told.build, told.newest_command_type
        ));
    }
    let silent = view.servers.iter().find(|server| !state.members().contains_key(&server.node))?;
    Some(format!("server {:?} has not reported which command types it applies", &*silent.node))
}

/// The type that a newcomer must apply: what every member applies, and what the metadata here has applied already. One
/// that applies less would stop at its first newer entry, or at the snapshot that holds one (K17).
pub fn least_command_type(state: &State) -> u64 {
    let least = state.members().values().map(|member| member.registration.newest_command_type).min();
    least.unwrap_or(Command::FIRST_RELEASE_TYPE).max(state.newest_command_type())
}

/// What an operator is told of command types while a cluster is upgraded.
#[derive(Default)]
pub struct GateLog {
    held_back: BTreeMap<u64, Instant>,
    used: u64,
}

impl GateLog {
    /// Once a minute for each type.
    pub fn held_back(&mut self, command_type: u64, reason: &str, now: Instant) {
        let last = self.held_back.get(&command_type);
        if last.is_none_or(|last| now.saturating_since(*last) >= SAY_AGAIN) {
            self.held_back.insert(command_type, now);
            tracing::info!(reason, "metastore: not using a new raft entry type yet");
        }
    }

    /// Once for each type that nothing in the log was of before: from here on an older build cannot come back.
    pub fn used(&mut self, state: &State, command_type: u64, name: &str) {
        if command_type > state.newest_command_type().max(self.used) {
            self.used = command_type;
            tracing::info!(r#type = command_type, name, "metastore: every member applies raft entry type");
        }
    }
}
