//! Which command types may be proposed: only those that every server and every member has said it applies (K18).

use crate::control::{Command, State, View};

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

/// Whether a newcomer's build is too old for this cluster: it applies fewer types than every member.
pub fn is_older_release(state: &State, newest_command_type: u64) -> bool {
    let least = state.members().values().map(|member| member.registration.newest_command_type).min();
    least.unwrap_or(Command::FIRST_RELEASE_TYPE) > newest_command_type
}
