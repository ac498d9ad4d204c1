//! What is wrong with other nodes, summed up over their partitions.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Core;
use crate::meta::NodeId;

/// Partitions of another node that cannot be committed to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trouble {
    /// Whose commits have not been answered for a second.
    pub hung: usize,
    pub failing: usize,
    /// Of those that fail: whose records go to siblings.
    pub rerouting: usize,
    /// Of one that fails.
    pub error: Option<Arc<str>>,
    /// Records wait for one of them. Without any nothing is sent, and nobody learns whether it is better.
    pub owed: bool,
}

impl Core {
    /// Other nodes to which commits fail or hang, and what of.
    pub fn troubles(&self) -> BTreeMap<NodeId, Trouble> {
        let mut troubles: BTreeMap<NodeId, Trouble> = BTreeMap::new();
        for lane in self.lanes.iter().filter(|lane| lane.live && (lane.failing.is_some() || lane.hung())) {
            let Some(address) = lane.address.filter(|address| address.node != NodeId::LOCAL) else { continue };
            let trouble = troubles.entry(address.node).or_default();
            trouble.owed |= !lane.is_empty();
            match &lane.failing {
                Some(failing) => {
                    trouble.failing += 1;
                    trouble.rerouting += usize::from(failing.announced);
                    trouble.error = lane.last_error.clone().or(trouble.error.take());
                }
                None => trouble.hung += 1,
            }
        }
        troubles
    }
}
