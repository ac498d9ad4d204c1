//! Free space of the data directory, looked at while records come in: below the reserve, produce answers `503`
//! before the disk answers ENOSPC (E22, lesson F1).

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use crate::io::Disk;
use crate::rt::{self, Instant, Queue};

/// How old an answer may be while records come in. An idle shard asks nothing.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(250);

#[derive(Clone)]
pub struct DiskReserve {
    state: Rc<State>,
}

struct State {
    disk: Disk,
    reserve_bytes: u64,
    room: Cell<bool>,
    sampled: Cell<Instant>,
    sampling: Cell<bool>,
}

impl DiskReserve {
    pub fn new(disk: Disk, reserve_bytes: u64) -> DiskReserve {
        let (room, sampled, sampling) = (Cell::new(true), Cell::new(rt::now()), Cell::new(false));
        DiskReserve { state: Rc::new(State { disk, reserve_bytes, room, sampled, sampling }) }
    }

    /// Whether a produce may be taken, by the last sample; starts the next one when that is old. So a shard that
    /// refuses keeps looking as long as somebody asks, and heals by itself.
    pub fn has_room(&self) -> bool {
        let state = &self.state;
        if rt::now() - state.sampled.get() >= SAMPLE_INTERVAL && !state.sampling.replace(true) {
            let this = self.clone();
            rt::spawn(Queue::Background, async move { this.refresh().await });
        }
        state.room.get()
    }

    pub async fn refresh(&self) {
        let state = &self.state;
        // A file system that does not say is not refused for it: the WAL says so when it is full.
        let room = state.disk.available_bytes().await.map_or(true, |free| free >= state.reserve_bytes);
        if room != state.room.replace(room) {
            match room {
                true => tracing::info!("free disk space is above the reserve again: produce is taken"),
                false => tracing::warn!(
                    reserve_bytes = state.reserve_bytes,
                    "free disk space is under the reserve: produce answers 503. Free space or delete topics"
                ),
            }
        }
        state.sampled.set(rt::now());
        state.sampling.set(false);
    }
}
