//! Zero-filling: blocks that were written once take a durable write without a journal commit.

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use super::{AlignedBuf, File, Slice};
use crate::rt::{self, Instant};

/// What zero-filling beside other work may take of a device, in bytes per second. Unthrottled it triples the p99 of
/// what else the disk does.
const DEVICE_BYTES_PER_SECOND: u64 = 100_000_000;
const REQUEST_BYTES: u64 = 1 << 20;

/// One shard's part of what its device can spare for zero-filling: the WAL and all logs book from it. A cheap handle.
#[derive(Clone)]
pub struct FillBudget {
    bytes_per_second: u64,
    booked_until: Rc<Cell<Instant>>,
}

impl FillBudget {
    /// For one of `shards` that share a device.
    pub fn of_shard(shards: u64) -> FillBudget {
        let bytes_per_second = (DEVICE_BYTES_PER_SECOND / shards.max(1)).max(1);
        FillBudget { bytes_per_second, booked_until: Rc::default() }
    }

    /// Books `bytes`; they may be written once the returned time has come.
    pub fn book(&self, bytes: u64) -> Instant {
        let cost = Duration::from_nanos(bytes.saturating_mul(1_000_000_000) / self.bytes_per_second);
        let start = self.booked_until.get().max(rt::now());
        self.booked_until.set(start + cost);
        start
    }
}

thread_local! {
    /// What is written again and again.
    static ZEROS: Slice = AlignedBuf::zeroed(REQUEST_BYTES as usize).freeze();
}

/// Writes zeros over `offset..offset + bytes` in requests of 1 MiB, not durably. `pause` is awaited after each request
/// with its size: the caller's rate limit.
pub async fn zero_fill<P, F>(file: &File, offset: u64, bytes: u64, mut pause: P) -> io::Result<()>
where
    P: FnMut(u64) -> F,
    F: std::future::Future<Output = ()>,
{
    let zeros = ZEROS.with(Slice::clone);
    let (mut at, end) = (offset, offset + bytes);
    while at < end {
        let step = REQUEST_BYTES.min(end - at);
        file.write_at(at, zeros.slice(0..step as usize)).await?;
        at += step;
        pause(step).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rt::sim::Sim;

    #[test]
    fn whoever_fills_on_a_shard_shares_one_budget_and_all_shards_the_devices() {
        Sim::new(1).run(async {
            let wal = FillBudget::of_shard(4);
            let logs = wal.clone();
            let started = rt::now();
            for _ in 0..10 {
                wal.book(1_000_000);
                logs.book(1_500_000);
            }
            assert_eq!(wal.book(1) - started, Duration::from_secs(1), "25 MB at a quarter of 100 MB/s");
            rt::sleep(Duration::from_secs(60)).await;
            assert_eq!(logs.book(1), rt::now(), "what was not used is not saved up");
        });
    }
}
