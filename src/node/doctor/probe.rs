//! How long a durable write takes on this disk: one block at a time, through the ring, `O_DIRECT` and `RWF_DSYNC`, over
//! blocks that were written before, as an ingress log does it.

use std::io;
use std::path::Path;
use std::time::Duration;

use narad_shards::histogram::{histogram, record, Histogram};
use narad_shards::io::{zero_fill, AlignedBuf, Caching, Open};
use narad_shards::rt;
use narad_shards::rt::ring::{run_shard_thread, Options, RingHandle};

use super::Check;

pub(super) const ID: &str = "probe.durable_write";

const FILE_BYTES: u64 = 8 << 20;
const BLOCK_BYTES: usize = 4096;
/// One write that takes longer is no latency any more.
const WRITE_MAX: Duration = Duration::from_secs(10);
const SLOW: Duration = Duration::from_millis(2);

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figures {
    pub writes: u64,
    pub p50_us: u64,
    pub p99_us: u64,
    pub max_us: u64,
    pub writes_per_second: f64,
}

/// Writes for `length`. The file has lost its name before the first byte is written: whatever ends this process, nothing
/// is left behind.
pub(super) fn durable_writes(directory: &Path, direct: bool, length: Duration) -> io::Result<Figures> {
    let path = directory.join(format!(".narad-doctor-{}", std::process::id()));
    let directory = directory.to_owned();
    run_shard_thread(Options::new("doctor"), move |handle| async move {
        let measured = measure(&handle, &directory, &path, direct, length).await;
        if measured.is_err() {
            // Of a removal that failed; that there is nothing to remove is the rule.
            let _ = handle.disk(&directory, direct)?.remove_file(&path).await;
        }
        measured
    })?
}

async fn measure(
    handle: &RingHandle,
    directory: &Path,
    path: &Path,
    direct: bool,
    length: Duration,
) -> io::Result<Figures> {
    let disk = handle.disk(directory, direct)?;
    let file = disk.open(path, Open::New, Caching::Direct).await?;
    disk.remove_file(path).await?;
    zero_fill(&file, 0, FILE_BYTES, |_| async {}).await?;
    file.sync_data().await?;
    let mut block = AlignedBuf::zeroed(BLOCK_BYTES);
    block.iter_mut().enumerate().for_each(|(at, byte)| *byte = at as u8);
    let block = block.freeze();
    let mut taken_us: Histogram = histogram();
    let (started, mut offset) = (rt::now(), 0);
    let spent = loop {
        let before = rt::now();
        let written = rt::timeout(WRITE_MAX, file.write_durable_at(offset, block.clone())).await;
        written.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        let now = rt::now();
        record(&mut taken_us, (now - before).as_micros() as u64);
        offset = (offset + BLOCK_BYTES as u64) % FILE_BYTES;
        if now - started >= length {
            break now - started;
        }
    };
    Ok(Figures {
        writes: taken_us.len(),
        p50_us: taken_us.value_at_quantile(0.5),
        p99_us: taken_us.value_at_quantile(0.99),
        max_us: taken_us.max(),
        writes_per_second: taken_us.len() as f64 / spent.as_secs_f64(),
    })
}

pub(super) fn judge(measured: &io::Result<Figures>, beside_a_broker: bool) -> Check {
    let figures = match measured {
        Ok(figures) => figures,
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            let found = format!("a durable write of 4 KiB did not come back in {} s", WRITE_MAX.as_secs());
            return Check::fail(ID, found, "check the disk and the kernel log");
        }
        Err(error) => return Check::fail(ID, format!("{error}"), "check the disk, its free space and the kernel log"),
    };
    let found = format!(
        "4 KiB: p50 {} us, p99 {} us, {:.0} writes/s one at a time{}",
        figures.p50_us,
        figures.p99_us,
        figures.writes_per_second,
        if beside_a_broker { ", beside the running broker" } else { "" }
    );
    match figures.p50_us {
        slow if slow > SLOW.as_micros() as u64 => Check::warn(
            ID,
            format!("{found}: a produce takes at least that long"),
            "use a local NVMe drive, best with power-loss protection",
        ),
        _ => Check::ok(ID, found),
    }
}
