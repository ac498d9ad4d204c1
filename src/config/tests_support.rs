//! Settings from the layers of a test.

use super::*;

/// A file that goes away with the test.
pub(super) struct Temporary(pub PathBuf);

impl Temporary {
    pub fn file(test: &str, text: &str) -> Temporary {
        let path = std::env::temp_dir().join(format!("narad-config-{}-{test}.json", std::process::id()));
        std::fs::write(&path, text).unwrap();
        Temporary(path)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

pub(super) fn from_file(test: &str, text: &str) -> Result<Config, String> {
    let file = Temporary::file(test, text);
    load(&Sources { file: Some(file.0.clone()), ..Sources::default() }).map_err(|error| error.to_string())
}

pub(super) fn from_environment(pairs: &[(&str, &str)]) -> Result<Config, String> {
    let environment = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    load(&Sources { environment, ..Sources::default() }).map_err(|error| error.to_string())
}
