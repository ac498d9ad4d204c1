//! A shard's own table of topics: looked up by borrowed name, with what only this shard knows of each topic.
//!
//! Built from the snapshot, so that a produce touches no reference count that another core touches.

use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use crate::meta::{Incarnation, Snapshot, TopicMeta};

/// One topic as this shard's requests see it.
pub struct Topic {
    pub name: Rc<str>,
    pub incarnation: Incarnation,
    pub partitions: u32,
    pub meta: Arc<TopicMeta>,
    /// Next partition of a keyless record; starts at a random one (E24: the rotation is per shard).
    rotation: Cell<u32>,
}

impl Topic {
    /// The partition of a record: a pin wins, then the key's hash, then the rotation. `None` when a pin is out of
    /// range.
    pub fn pick(&self, key: &[u8], pinned: Option<u32>) -> Option<u32> {
        match pinned {
            Some(partition) => (partition < self.partitions).then_some(partition),
            None if key.is_empty() => {
                let partition = self.rotation.get() % self.partitions;
                self.rotation.set((partition + 1) % self.partitions);
                Some(partition)
            }
            None => Some(hash_key(key, self.partitions)),
        }
    }
}

/// FNV-1a, 64 bit, finished by two rounds of multiply and fold (FNV's high bits hardly move for short keys), then
/// scaled onto the partitions. Stable for ever: a key must stay on its partition across restarts and versions.
fn hash_key(key: &[u8], partitions: u32) -> u32 {
    const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0000_0100_0000_01b3;
    let mut hash = key.iter().fold(OFFSET, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(PRIME));
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^= hash >> 33;
    ((u128::from(hash) * u128::from(partitions)) >> 64) as u32
}

#[derive(Default)]
pub struct TopicTable {
    by_name: HashMap<Rc<str>, Rc<Topic>>,
}

impl TopicTable {
    pub fn get(&self, name: &str) -> Option<&Rc<Topic>> {
        self.by_name.get(name)
    }

    /// Follows a new snapshot; topics that live on keep their rotation. `random` seeds the rotation of new ones.
    pub fn install(&mut self, snapshot: &Snapshot, mut random: impl FnMut() -> u64) {
        let mut next = HashMap::with_capacity(snapshot.topics.len());
        for (name, meta) in &snapshot.topics {
            let kept = self.by_name.get(&**name).filter(|topic| Arc::ptr_eq(&topic.meta, meta)).cloned();
            let topic = kept.unwrap_or_else(|| {
                let partitions = meta.partitions.max(1);
                let rotation = Cell::new((random() % u64::from(partitions)) as u32);
                Rc::new(Topic {
                    name: Rc::from(&**name),
                    incarnation: meta.incarnation,
                    partitions,
                    meta: meta.clone(),
                    rotation,
                })
            });
            next.insert(topic.name.clone(), topic);
        }
        self.by_name = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topic(partitions: u32) -> Rc<Topic> {
        let meta = Arc::new(TopicMeta {
            name: Arc::from("orders"),
            incarnation: Incarnation(7),
            partitions,
            retention_ms: 0,
            visibility_timeout_ms: 30_000,
            max_in_flight_per_partition: 1024,
            max_acked_ahead_per_partition: 1024,
            created_at_ms: 0,
            owner: None,
        });
        let mut snapshot = Snapshot { shards: 1, ..Snapshot::default() };
        snapshot.topics.insert(meta.name.clone(), meta);
        let mut table = TopicTable::default();
        table.install(&snapshot, || 5);
        table.get("orders").expect("just installed").clone()
    }

    #[test]
    fn a_pin_wins_over_the_key_and_is_checked() {
        let topic = topic(3);
        assert_eq!(topic.pick(b"key", Some(2)), Some(2));
        assert_eq!(topic.pick(b"key", Some(3)), None);
    }

    #[test]
    fn keyless_records_rotate_from_a_random_start() {
        let topic = topic(3);
        let picks: Vec<_> = (0..5).map(|_| topic.pick(b"", None)).collect();
        assert_eq!(picks, [Some(2), Some(0), Some(1), Some(2), Some(0)]);
    }

    #[test]
    fn a_key_stays_on_its_partition_for_ever() {
        // Frozen values: changing the hash would move every key of every user.
        assert_eq!([hash_key(b"a", 108), hash_key(b"user-1", 108), hash_key(b"user-2", 108)], [55, 27, 71]);
    }

    #[test]
    fn keys_spread_over_all_partitions() {
        let mut counts = [0_u32; 12];
        for i in 0..12_000 {
            counts[hash_key(format!("key-{i}").as_bytes(), 12) as usize] += 1;
        }
        assert!(counts.iter().all(|c| (800..1200).contains(c)), "{counts:?}");
    }
}
