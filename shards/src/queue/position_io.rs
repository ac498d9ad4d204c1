//! Position files between the committer and the disk: what is read of them, and what is written.

use std::io;
use std::path::Path;

use super::position::{self, Range, Slots, AHEAD_FILE_BYTES, SLOT_BYTES};
use crate::io::{AlignedBuf, Caching, Disk, File, Open, Slice};
use crate::meta::Incarnation;

/// Learns the roles of the slots, and makes the newest durable before anything is overwritten (C76). What is missing is
/// written, not left as a hole: acks must have their blocks also on a disk that is full by then.
pub(super) async fn prime(file: &File, incarnation: Incarnation) -> io::Result<Slots> {
    let length = file.len().await?;
    if length < AHEAD_FILE_BYTES {
        file.write_at(length, AlignedBuf::zeroed((AHEAD_FILE_BYTES - length) as usize).freeze()).await?;
    }
    let content = file.read_at(0, AHEAD_FILE_BYTES as usize).await?;
    let (slots, _) = Slots::prime(&content, incarnation);
    file.sync_data().await?;
    Ok(slots)
}

/// A slot as it is written: settled values only (C75).
pub(super) fn slot_of(incarnation: Incarnation, sequence: u64, frontier: u64, acked: &[Range]) -> Slice {
    let mut slot = AlignedBuf::zeroed(SLOT_BYTES);
    position::encode_slot(&mut slot, incarnation, sequence, frontier, acked);
    slot.freeze()
}

/// The first bytes of a small file; empty when it does not exist.
pub(super) async fn read_up_to(disk: &Disk, path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let file = match disk.open(path, Open::Existing, Caching::Buffered).await {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let bytes = file.len().await?.min(bytes_max);
    if bytes == 0 {
        return Ok(Vec::new());
    }
    Ok(file.read_at(0, bytes as usize).await?.to_vec())
}
