//! What a start has made on disk before it is sure to go on: a start that is refused leaves nothing new.

use std::fs;
use std::path::{Path, PathBuf};

/// Files and directories that were not there before, in the order in which they can go. Those that exist when this is
/// dropped are removed, unless they are kept; a directory goes only if nobody has put anything into it.
pub struct Traces(Vec<PathBuf>);

impl Traces {
    /// Those of `paths` that do not exist.
    pub fn of(paths: impl IntoIterator<Item = PathBuf>) -> Traces {
        Traces(paths.into_iter().filter(|path| fs::symlink_metadata(path).is_err_and(is_absent)).collect())
    }

    /// What is known to be new.
    pub fn given(paths: impl IntoIterator<Item = PathBuf>) -> Traces {
        Traces(paths.into_iter().collect())
    }

    /// The directory, and those above it that would have to be made for it.
    pub fn of_directory(root: &Path) -> Traces {
        Traces::of(root.ancestors().filter(|path| !path.as_os_str().is_empty()).map(Path::to_owned))
    }

    /// The start goes on: all of it stays.
    pub fn keep(mut self) {
        self.0.clear();
    }
}

fn is_absent(error: std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory)
}

impl Drop for Traces {
    fn drop(&mut self) {
        for path in &self.0 {
            // What was never made, or is in use by somebody else by now, is not ours to take away.
            let _ = fs::remove_file(path).or_else(|_| fs::remove_dir(path));
        }
    }
}
