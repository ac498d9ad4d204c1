//! The mark that a partition has held a log: an empty file beside the partition's directory, made durable once its
//! first segment is, and before its first record is shown. A directory or a segment that went away while nobody looked
//! is then told from a partition that never was: offsets are not given out a second time (S27).

use std::io;
use std::path::{Path, PathBuf};

use crate::io::{Caching, Disk, Open};

/// What it has behind the name of the directory.
pub(super) const SUFFIX: &str = ".stored";

/// `topics/<topic>/p<NNNNN>.stored` for the partition directory `topics/<topic>/p<NNNNN>`.
pub(super) fn path(dir: &Path) -> PathBuf {
    dir.with_extension(&SUFFIX[1..])
}

pub(super) async fn is_marked(disk: &Disk, dir: &Path) -> io::Result<bool> {
    match disk.open(&path(dir), Open::Existing, Caching::Buffered).await {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Makes the mark, durably. The directory's own name, and that of a segment in it, are durable already.
pub(super) async fn mark(disk: &Disk, dir: &Path) -> io::Result<()> {
    disk.open(&path(dir), Open::Create, Caching::Buffered).await?;
    disk.sync_dir(dir.parent().unwrap_or(dir)).await
}
