//! What to do with the files that a start finds, before consensus starts: never a new cluster on top of existing
//! metadata, never metadata rolled back behind what was applied, without an operator (K16).

use std::collections::BTreeSet;

use super::configuration::Server;

/// How the node was told to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    /// No peers: a cluster of one voter, this one.
    Lone(Server),
    /// May found the cluster of these voters, itself among them: nobody has one yet (K29).
    Bootstrap { me: String, voters: Vec<Server> },
    /// Waits to be added to a cluster that exists.
    Join,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundState {
    pub applied_index: u64,
    /// Has been run with a consensus directory.
    pub is_replicated: bool,
    pub is_empty: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundLog {
    pub start_index: u64,
    pub last_index: u64,
    /// This directory's own id is one of the voters.
    pub is_voter: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// `None`: there is no state file.
    pub state: Option<FoundState>,
    /// `None`: there is no consensus file.
    pub log: Option<FoundLog>,
    /// Applied index of the image that the leader sent last, and of the one made here. Only whole ones.
    pub received: Option<u64>,
    pub made: Option<u64>,
    /// Nodes that the configuration of the log and the member records of the state name, this one among them.
    pub nodes: BTreeSet<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Image {
    Received,
    Made,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Make a consensus file whose log begins behind `start_index`, which the state has, with the mode's voters.
    FoundCluster { start_index: u64 },
    /// Begin with an empty log and an empty state; set aside what is there.
    JoinEmpty { set_state_aside: bool, set_log_aside: bool },
    /// State and log fit: entries that the state holds are skipped.
    Keep,
    /// The image takes the place of the state; the rest of the log is applied to it.
    Restore(Image),
    /// The state is made again from the log, which begins at the beginning.
    Rebuild,
    /// Nothing is touched.
    Refuse(String),
}

impl Decision {
    /// What is about to be done, for whoever reads the log. `None`: nothing out of the ordinary.
    pub fn in_words(&self) -> Option<String> {
        let aside = |set_aside: bool| if set_aside { "; what is here is set aside as *.stale" } else { "" };
        Some(match self {
            Decision::Keep | Decision::Refuse(_) => return None,
            Decision::FoundCluster { start_index } => {
                format!("this directory has no consensus log: one is begun behind entry {start_index}")
            }
            Decision::JoinEmpty { set_state_aside, set_log_aside } => {
                format!(
                    "begins empty and waits to be let into its cluster{}",
                    aside(*set_state_aside || *set_log_aside)
                )
            }
            Decision::Restore(Image::Received) => "the snapshot that the leader had sent becomes the state".to_owned(),
            Decision::Restore(Image::Made) => "this node's own snapshot becomes the state again".to_owned(),
            Decision::Rebuild => format!("the state is made again from the log{}", aside(true)),
        })
    }
}

/// The first entry that a founded log may begin behind. A joiner's empty log never reaches it, so it gets a snapshot,
/// and with that the configuration, which no entry carries.
pub const FIRST_START: u64 = 1;

const REMEDY: &str = "start the data directory that belongs together, or, to give up what this node alone holds of the cluster's metadata, start once with --restored";

pub fn decide(mode: &Mode, restored: bool, found: &Found) -> Decision {
    if let Mode::Lone(me) = mode {
        if let Some(why) = belongs_to_a_cluster(&me.name, restored, found) {
            return Decision::Refuse(why);
        }
    }
    // The log of a restored directory is of the past: whoever votes by it votes twice (E36).
    let (log, has_old_log) = match restored {
        true => (None, found.log.is_some()),
        false => (found.log, false),
    };
    match (log, &found.state) {
        (None, state) => without_log(mode, restored, state.as_ref(), has_old_log),
        (Some(log), None) => without_state(mode, log, found),
        (Some(log), Some(state)) if state.applied_index > log.last_index => older_log(mode, log, state),
        (Some(log), Some(state)) if state.applied_index >= log.start_index => Decision::Keep,
        (Some(log), Some(_)) => without_state(mode, log, found),
    }
}

/// A node without peers serves every partition as its own and asks nobody: over the directory of a cluster it would take
/// what nobody can deliver, and with `--restored` found a second cluster of the same name.
fn belongs_to_a_cluster(me: &str, restored: bool, found: &Found) -> Option<String> {
    let remedy = "this node was started without peers: set cluster.peers (NARAD_CLUSTER_PEERS) as on the other nodes";
    if found.nodes.iter().any(|node| node != me) {
        let nodes: Vec<&str> = found.nodes.iter().map(String::as_str).collect();
        return Some(format!("this data directory belongs to the cluster of {}, and {remedy}", nodes.join(", ")));
    }
    match found.log {
        Some(log) if !log.is_voter && !restored => Some(format!(
            "this data directory waits to be let into a cluster, or was removed from one, and {remedy}, or start it once \
             with --restored to make it a cluster of its own"
        )),
        _ => None,
    }
}

fn without_log(mode: &Mode, restored: bool, state: Option<&FoundState>, set_log_aside: bool) -> Decision {
    let has_data = state.is_some_and(|state| !state.is_empty || state.is_replicated);
    let was_replicated = state.is_some_and(|state| state.is_replicated);
    let start_index = state.map_or(0, |state| state.applied_index).max(FIRST_START);
    match mode {
        Mode::Join => Decision::JoinEmpty { set_state_aside: has_data, set_log_aside },
        Mode::Bootstrap { .. } if restored => Decision::JoinEmpty { set_state_aside: has_data, set_log_aside },
        Mode::Bootstrap { .. } if has_data => Decision::Refuse(format!(
            "there is metadata here but no consensus log: this node would found a new cluster on top of it; {REMEDY}"
        )),
        Mode::Bootstrap { .. } => Decision::FoundCluster { start_index: FIRST_START },
        Mode::Lone(_) if was_replicated && !restored => Decision::Refuse(format!(
            "the consensus log of this metadata is missing, without which what was decided last may be lost; {REMEDY}"
        )),
        // Metadata from before there was consensus becomes that of a cluster of one.
        Mode::Lone(_) => Decision::FoundCluster { start_index },
    }
}

/// The state's index is missing, or lies before everything that the log still has.
fn without_state(mode: &Mode, log: FoundLog, found: &Found) -> Decision {
    let fits = |image: &Option<u64>| image.is_some_and(|index| (log.start_index..=log.last_index).contains(&index));
    if fits(&found.received) {
        return Decision::Restore(Image::Received);
    }
    if fits(&found.made) {
        return Decision::Restore(Image::Made);
    }
    match mode {
        _ if log.start_index <= FIRST_START => Decision::Rebuild,
        Mode::Join => Decision::JoinEmpty { set_state_aside: true, set_log_aside: true },
        _ => Decision::Refuse(format!(
            "the metadata lacks what the consensus log no longer has (it begins behind entry {}); {REMEDY}",
            log.start_index
        )),
    }
}

fn older_log(mode: &Mode, log: FoundLog, state: &FoundState) -> Decision {
    match mode {
        Mode::Join => Decision::JoinEmpty { set_state_aside: true, set_log_aside: true },
        _ => Decision::Refuse(format!(
            "the consensus log ends at entry {}, but the metadata has entry {}: the log is of an older copy; {REMEDY}",
            log.last_index, state.applied_index
        )),
    }
}
