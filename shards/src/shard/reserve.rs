//! Free space of the data directory, looked at while records come in: below the reserve, produce answers `503`
//! before the disk answers ENOSPC (E22, lesson F1).

use std::cell::{Cell, OnceCell};
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::Arc;
use std::time::Duration;

use crate::io::Disk;
use crate::peer::{LocalBoxFuture, Request};
use crate::rt::sync::Notify;
use crate::rt::{self, Instant, Queue};

/// How old an answer may be that a record is taken or refused by.
const SAMPLE_AGE_MAX: Duration = Duration::from_millis(250);
/// While records come, the next answer is asked for so early that nobody waits for it: it comes from another thread,
/// which takes as long as a sync of a fast drive.
const ASK_EVERY: Duration = Duration::from_millis(125);
/// So long after the last record it goes on. Then a shard asks nothing, and whoever comes next waits for a new answer:
/// others may have filled the disk meanwhile.
const ASK_UNTIL: Duration = Duration::from_secs(10);

/// What the shards of a node have found about the disk that they share.
#[derive(Clone, Debug, Default)]
pub struct NodeDisk(Arc<Found>);

#[derive(Debug, Default)]
struct Found {
    /// The data directory had no room when any shard looked last. The first one to see a change says so, and the log has
    /// one line for it.
    full: AtomicBool,
    wal_failed: AtomicBool,
}

impl NodeDisk {
    /// Whether this look is the first one to find it so.
    fn changes_to(&self, room: bool) -> bool {
        let full = &self.0.full;
        full.load(Relaxed) == room && full.swap(!room, Relaxed) == room
    }

    pub fn note_wal_failed(&self) {
        self.0.wal_failed.store(true, Relaxed);
    }

    /// Every produce of the node is refused until it is restarted (E11).
    pub fn wal_failed(&self) -> bool {
        self.0.wal_failed.load(Relaxed)
    }
}

/// What else is looked at with every sample.
pub type Look = Box<dyn Fn() -> LocalBoxFuture<'static, ()>>;

#[derive(Clone)]
pub struct DiskReserve {
    state: Rc<State>,
}

struct State {
    disk: Disk,
    reserve_bytes: u64,
    node: NodeDisk,
    room: Cell<bool>,
    room_for_peers: Cell<bool>,
    sampled_at: Cell<Instant>,
    /// When somebody wanted to know last.
    wanted_at: Cell<Instant>,
    /// A task is there that asks.
    asking: Cell<bool>,
    sampled: Notify,
    also: OnceCell<Look>,
}

impl DiskReserve {
    /// Call [`DiskReserve::refresh`] before the first record.
    pub fn new(disk: Disk, reserve_bytes: u64, node: NodeDisk) -> DiskReserve {
        let state = State {
            disk,
            reserve_bytes,
            node,
            room: Cell::new(true),
            room_for_peers: Cell::new(true),
            sampled_at: Cell::new(rt::now()),
            wanted_at: Cell::new(rt::now()),
            asking: Cell::new(false),
            sampled: Notify::default(),
            also: OnceCell::new(),
        };
        DiskReserve { state: Rc::new(state) }
    }

    /// Set once, before the first record.
    pub fn look_also(&self, look: Look) {
        let _ = self.state.also.set(look);
    }

    /// Whether a produce may be taken, by a sample that is young enough. A shard that refuses keeps looking as long as
    /// somebody asks, and heals by itself.
    pub async fn has_room(&self) -> bool {
        self.look().await;
        self.state.room.get()
    }

    /// Whether commits of other nodes may be taken: half of the reserve is left to what this node has accepted itself, to
    /// metadata and to positions. Without it, the others would fill a disk whose own node has long refused to, until it
    /// cannot store metadata any more and stops. What they keep goes to sibling partitions.
    pub async fn has_room_for_peers(&self) -> bool {
        self.look().await;
        self.state.room_for_peers.get()
    }

    /// Waits until the sample is young enough.
    async fn look(&self) {
        let state = &self.state;
        loop {
            let now = rt::now();
            state.wanted_at.set(now);
            if !state.asking.replace(true) {
                // A task of its own: a caller that goes away takes no sample with it.
                rt::spawn(Queue::Foreground, keep_asking(Rc::downgrade(state)));
            }
            if now - state.sampled_at.get() < SAMPLE_AGE_MAX {
                return;
            }
            state.sampled.notified().await;
        }
    }

    pub async fn refresh(&self) {
        let state = &self.state;
        if let Some(look) = state.also.get() {
            look().await;
        }
        // A file system that does not say is not refused for it: the WAL says so when it is full.
        let free = state.disk.available_bytes().await;
        let room = free.as_ref().map_or(true, |free| *free >= state.reserve_bytes);
        state.room.set(room);
        // Again only with some more: a disk that retention frees a segment of at a time would otherwise be found full and
        // not full by every peer in turn.
        let enough = if state.room_for_peers.get() { state.reserve_bytes / 2 } else { state.reserve_bytes / 4 * 3 };
        state.room_for_peers.set(free.as_ref().map_or(true, |free| *free >= enough));
        if state.node.changes_to(room) {
            let (free_bytes, reserve_bytes) = (free.unwrap_or_default(), state.reserve_bytes);
            match room {
                true => tracing::info!(
                    free_bytes,
                    reserve_bytes,
                    "free disk space is above the reserve again: produce is taken"
                ),
                false => tracing::warn!(
                    free_bytes,
                    reserve_bytes,
                    "free disk space is under the reserve: produce answers 503. Free space or delete topics"
                ),
            }
        }
        state.sampled_at.set(rt::now());
        state.sampled.notify_all();
    }
}

impl super::Inner {
    /// Refuses every produce once the WAL's file has lost its name: the data directory was removed under a running
    /// node, and what is accepted from then on would not outlive it.
    pub(super) fn watch_for_removal(self: &Rc<Self>) {
        let me = Rc::downgrade(self);
        self.reserve.look_also(Box::new(move || {
            let inner = me.upgrade();
            Box::pin(async move {
                let Some(inner) = inner.filter(|inner| inner.wal.failed().is_none()) else { return };
                let Some(path) = inner.wal.removed_segment().await else { return };
                let cause = format!(
                    "{} was removed while the broker runs: what is written there is lost when it stops",
                    path.display()
                );
                tracing::error!(shard = inner.options.id, cause,
                    "ingress WAL failed: every produce of this node is refused. Let consumers take what they can, stop \
                     the broker, restore the data directory from a backup or begin with an empty one, then start again");
                inner.wal.latch(&cause);
                inner.options.node_disk.note_wal_failed();
                for sibling in inner.siblings() {
                    inner.carrier.send(sibling, Request::Latch { cause: cause.clone() });
                }
            })
        }));
    }
}

async fn keep_asking(state: Weak<State>) {
    while let Some(state) = state.upgrade() {
        if rt::now() - state.wanted_at.get() >= ASK_UNTIL {
            return state.asking.set(false);
        }
        let reserve = DiskReserve { state };
        if rt::now() - reserve.state.sampled_at.get() >= ASK_EVERY {
            reserve.refresh().await;
        }
        drop(reserve);
        rt::sleep(ASK_EVERY).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::sim::{DiskOptions, SimDisk};
    use crate::log_lines::LogLines;
    use crate::rt::sim;

    const BYTES: u64 = 1 << 20;

    #[test]
    fn e22_after_a_pause_no_old_sample_decides() {
        sim::run(1, async {
            let disk = SimDisk::with(1, DiskOptions { capacity_bytes: Some(BYTES), ..DiskOptions::default() });
            let reserve = DiskReserve::new(Disk::Sim(disk.clone()), BYTES / 2, NodeDisk::default());
            reserve.refresh().await;
            assert!(reserve.has_room().await);
            rt::sleep(Duration::from_secs(3600)).await;
            disk.set_capacity(Some(0));
            assert!(!reserve.has_room().await, "accepted by what was free an hour ago");
            disk.set_capacity(Some(BYTES));
            rt::sleep(Duration::from_secs(3600)).await;
            // Whoever goes away while he waits leaves nothing behind that others wait for.
            assert!(rt::timeout(Duration::from_nanos(1), reserve.has_room()).await.is_err());
            assert!(reserve.has_room().await, "it heals by itself");
        });
    }

    #[test]
    fn e22_peers_are_refused_under_half_of_the_reserve() {
        sim::run(4, async {
            let disk = SimDisk::with(4, DiskOptions { capacity_bytes: Some(BYTES), ..DiskOptions::default() });
            let reserve = DiskReserve::new(Disk::Sim(disk.clone()), BYTES / 2, NodeDisk::default());
            for (capacity, produce, peers) in [
                (BYTES, true, true),
                (BYTES / 2 - 1, false, true),
                (BYTES / 4 - 1, false, false),
                (BYTES / 4 + 1, false, false),
                (BYTES / 8 * 3 + 1, false, true),
                (BYTES / 4 + 1, false, true),
                (BYTES, true, true),
            ] {
                disk.set_capacity(Some(capacity));
                rt::sleep(Duration::from_millis(300)).await;
                assert_eq!((reserve.has_room().await, reserve.has_room_for_peers().await), (produce, peers));
            }
        });
    }

    #[test]
    fn e22_while_records_come_nobody_waits_for_a_sample() {
        sim::run(2, async {
            let disk = SimDisk::with(2, DiskOptions { capacity_bytes: Some(BYTES), ..DiskOptions::default() });
            let reserve = DiskReserve::new(Disk::Sim(disk.clone()), BYTES / 2, NodeDisk::default());
            reserve.refresh().await;
            // A flood, and a record every few seconds.
            for pause_ms in [10; 100].into_iter().chain([0, 200, 251, 3_000, 9_000, 1, 9_000]) {
                rt::sleep(Duration::from_millis(pause_ms)).await;
                let asked = rt::now();
                assert!(reserve.has_room().await);
                assert_eq!(rt::now(), asked, "after {pause_ms} ms");
            }
        });
    }

    #[test]
    fn one_line_of_the_log_stands_for_all_shards_of_a_node() {
        let (lines, _guard) = LogLines::of_this_thread();
        sim::run(3, async move {
            let disk = SimDisk::with(3, DiskOptions { capacity_bytes: Some(BYTES), ..DiskOptions::default() });
            let node = NodeDisk::default();
            let shard = || DiskReserve::new(Disk::Sim(disk.clone()), BYTES / 2, node.clone());
            let shards = [shard(), shard(), shard()];
            for (capacity, looking, lines_then) in [
                (BYTES, &shards[..], 0),
                (0, &shards[..], 1),
                // The one that had said so is idle: another one says that it is over.
                (BYTES, &shards[2..], 2),
                (BYTES, &shards[..], 2),
            ] {
                disk.set_capacity(Some(capacity));
                for shard in looking {
                    shard.refresh().await;
                    assert_eq!(shard.state.room.get(), capacity > 0, "each shard goes by its own look");
                }
                assert_eq!(lines.count(), lines_then);
            }
        });
    }
}
