//! What frames on their way in may take of this node's memory: a peer that begins many long ones and ends none must not
//! use it up. Pure.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

/// So short a frame always passes: heartbeats, votes, acks and tokens wait for nobody's bulk.
pub(super) const SHORT_BYTES: usize = 64 << 10;

/// The room of one endpoint. Every node has room for one frame, however long, whatever others hold: so no frame is refused
/// for ever, and `bytes_max` is passed by one frame for each of them at most.
#[derive(Clone)]
pub(super) struct Intake(Rc<RefCell<Taken>>);

struct Taken {
    bytes_max: usize,
    bytes: usize,
    /// Of long frames, by the node that sends them.
    by_node: BTreeMap<Arc<str>, usize>,
}

/// Held for one frame until it is whole, or its connection has ended.
#[derive(Default)]
pub(super) struct Room(Option<(Intake, Arc<str>, usize)>);

impl Intake {
    pub fn new(bytes_max: usize) -> Intake {
        Intake(Rc::new(RefCell::new(Taken { bytes_max, bytes: 0, by_node: BTreeMap::new() })))
    }

    /// Room for a frame of `bytes` from `node`, or `None`: too much is on its way already.
    pub fn take(&self, node: &Arc<str>, bytes: usize) -> Option<Room> {
        if bytes <= SHORT_BYTES {
            return Some(Room::default());
        }
        let mut taken = self.0.borrow_mut();
        if taken.bytes + bytes > taken.bytes_max && taken.by_node.contains_key(node) {
            return None;
        }
        taken.bytes += bytes;
        *taken.by_node.entry(node.clone()).or_default() += bytes;
        Some(Room(Some((self.clone(), node.clone(), bytes))))
    }

    /// Bytes of long frames that are not whole yet.
    pub fn bytes(&self) -> usize {
        self.0.borrow().bytes
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let Some((intake, node, bytes)) = self.0.take() else { return };
        let mut taken = intake.0.borrow_mut();
        taken.bytes -= bytes;
        let left = taken.by_node.get_mut(&node).map(|held| {
            *held -= bytes;
            *held
        });
        if left == Some(0) {
            taken.by_node.remove(&node);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e48_frames_on_their_way_are_bounded_and_every_node_has_room_for_one() {
        let intake = Intake::new(1_000_000);
        let (one, other): (Arc<str>, Arc<str>) = ("one".into(), "other".into());
        let first = intake.take(&one, 16 << 20).expect("alone it may be as long as a frame can be");
        assert!(intake.take(&one, SHORT_BYTES + 1).is_none());
        let short: Vec<_> = (0..1000).map(|_| intake.take(&one, SHORT_BYTES).expect("short ones pass")).collect();
        let second = intake.take(&other, 16 << 20).expect("what others hold keeps nobody from its one");
        assert!(intake.take(&other, SHORT_BYTES + 1).is_none());
        assert_eq!(intake.bytes(), 32 << 20);
        drop((first, short));
        assert!(intake.take(&other, SHORT_BYTES + 1).is_none(), "still too much");
        drop(second);
        assert_eq!(intake.bytes(), 0);
        let many: Vec<_> = (0..12).map_while(|_| intake.take(&one, 100_000)).collect();
        assert_eq!((many.len(), intake.bytes()), (10, 1_000_000), "several at a time while there is room");
    }
}
