//! What must hold inside the shards at every step, read off the shards and off the disk beneath them.

use narad_shards::io::sim::SimDisk;
use narad_shards::rt;
use narad_shards::shard::inspect::{LogInspection, WalInspection};
use narad_shards::shard::Shard;

use crate::broker::Probe;

/// A record that crosses a bound is taken whole.
const RECORD_BYTES_MAX: u64 = 128 << 10;

pub fn probe(disk: &SimDisk, shards: &[Shard]) -> Probe {
    let mut probe = Probe::default();
    let mut logs = Vec::new();
    for shard in shards {
        shard.queues().check();
        probe.latched |= shard.wal_failed().is_some();
        let inside = shard.inspect();
        inside.wals.iter().for_each(|wal| look_at_wal(disk, wal, &mut probe));
        let cache = format!("the read cache of shard {}", shard.id());
        probe.memory.push((cache, inside.cache_bytes, inside.cache_bytes_max));
        logs.extend(inside.logs);
    }
    // Comparing bytes is dear: one partition at a time.
    let chosen = logs.len().checked_sub(1).map(|last| (rt::random_u64() % (last as u64 + 1)) as usize);
    for (index, log) in logs.iter().enumerate() {
        look_at_log(disk, log, chosen == Some(index), &mut probe);
    }
    probe
}

fn look_at_wal(disk: &SimDisk, inside: &WalInspection, probe: &mut Probe) {
    let WalInspection { number, wal, undone, durable_next, .. } = inside;
    let files = wal.files();
    let written = wal.checkpoint_written();
    // The file may be one write ahead of what the WAL has been told of it.
    let on_disk = files.first().and_then(|file| wal.decode_checkpoint(&disk.peek(file)?));
    probe.checkpoints.push((*number, on_disk.unwrap_or(0).max(written), *undone));
    probe.checkpoints.push((*number, *undone, *durable_next));
    probe.backlogs.push((*number, wal.backlog_records(), durable_next.saturating_sub(written)));
    probe.memory.push((format!("staging of WAL {number}"), inside.staging_bytes, inside.staging_bytes_max));
    let held_max = 2 * inside.held_bytes_max + RECORD_BYTES_MAX;
    probe.memory.push((format!("the dispatcher of WAL {number}"), inside.held_bytes, held_max));
    // E18: a drained directory is on its way out.
    let leaving = inside.adopted && wal.fully_dispatched();
    if wal.failed().is_none() && !leaving {
        let unnamed = files.iter().filter(|file| !disk.is_name_durable(file));
        probe.unnamed.extend(unnamed.map(|file| file.display().to_string()));
    }
}

fn look_at_log(disk: &SimDisk, log: &LogInspection, compare: bool, probe: &mut Probe) {
    let (incarnation, partition) = (log.destination.incarnation, log.destination.partition);
    if let Some(cause) = &log.poisoned {
        probe.poisoned.push(format!("{incarnation}/{partition}: {cause}"));
        return;
    }
    let mut durable = log.next_offset;
    if let Some((path, end)) = log.active.as_ref().filter(|_| log.high_watermark > 0) {
        let topic = path.parent().and_then(|directory| directory.parent());
        let mark = topic.map(|topic| topic.join("incarnation"));
        let unnamed = [Some(path), mark.as_ref()].into_iter().flatten().filter(|file| !disk.is_name_durable(file));
        probe.unnamed.extend(unnamed.map(|file| file.display().to_string()));
        if compare && !is_durable(disk, path, *end as usize) {
            durable = 0;
        }
    }
    probe.watermarks.push((incarnation, partition, log.high_watermark, durable));
}

/// Whether a power cut leaves the first `end` bytes of a file as a reader sees them now.
fn is_durable(disk: &SimDisk, path: &std::path::Path, end: usize) -> bool {
    let (visible, durable) = (disk.peek(path), disk.peek_durable(path));
    match (visible, durable) {
        (Some(visible), Some(durable)) => visible.get(..end).is_some_and(|shown| durable.get(..end) == Some(shown)),
        _ => false,
    }
}
