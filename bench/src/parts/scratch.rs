//! A directory of this run, removed at its end.

use std::fs;
use std::path::{Path, PathBuf};

use crate::run::Failure;

/// Removed when dropped.
pub struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// Makes `narad-bench-<process>-<name>` in `parent`.
    pub fn make(parent: &Path, name: &str) -> Result<Scratch, Failure> {
        let path = parent.join(format!("narad-bench-{}-{name}", std::process::id()));
        fs::create_dir(&path).map_err(|error| {
            Failure(format!(
                "cannot make {}: {error}; give a directory that you may write to with --dir",
                path.display()
            ))
        })?;
        let path = path.canonicalize()?;
        Ok(Scratch { path })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            eprintln!("narad-bench: {} is left behind: {error}; remove it", self.path.display());
        }
    }
}
