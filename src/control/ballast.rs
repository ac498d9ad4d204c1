//! Space kept back beside the metadata: on a disk that others have filled, deleting a topic must still work, for it is
//! the way out (lesson F1). The state file grows, and fills holes of its own, with every change.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Many times what one transaction writes.
const BYTES: usize = 4 << 20;

pub struct Ballast {
    path: PathBuf,
}

impl Ballast {
    pub fn beside(directory: &Path) -> Ballast {
        Ballast { path: directory.join("ballast") }
    }

    pub fn path(&self) -> PathBuf {
        self.path.clone()
    }

    /// Takes the space, if it is not taken yet and there is as much. Without it the node runs all the same.
    pub fn take(&self) {
        if fs::metadata(&self.path).is_ok_and(|file| file.len() == BYTES as u64) {
            return;
        }
        if let Err(error) = self.write() {
            tracing::debug!(path = %self.path.display(), %error, "no space to keep back for the metadata");
            self.give();
        }
    }

    /// Zeros that are written, not a hole.
    fn write(&self) -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&self.path)?;
        file.write_all(&vec![0; BYTES])?;
        file.sync_all()
    }

    /// Whether there was any to give.
    pub fn give(&self) -> bool {
        fs::remove_file(&self.path).is_ok()
    }
}
