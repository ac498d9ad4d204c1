//! The proof that a topic has had a directory on this node: an empty file, `stored/<topic>.<incarnation>` beside `topics`,
//! made durable before the topic's first record is. A topic directory that went away while nobody looked is then told
//! from a topic that never stored anything here: its offsets are not given out a second time (S27).

use std::io;
use std::path::{Path, PathBuf};

use crate::io::{Caching, Disk, Open};
use crate::meta::Incarnation;

#[derive(Clone)]
pub(super) struct StoredProofs {
    disk: Disk,
    root: PathBuf,
}

impl StoredProofs {
    /// Of the topic directories below `topics`. Outside of it, so that they outlive whatever befalls it.
    pub fn beside(disk: Disk, topics: &Path) -> StoredProofs {
        StoredProofs { disk, root: topics.with_file_name("stored") }
    }

    pub fn path(&self, topic: &str, incarnation: Incarnation) -> PathBuf {
        self.root.join(format!("{topic}.{incarnation}"))
    }

    pub async fn is_proven(&self, topic: &str, incarnation: Incarnation) -> io::Result<bool> {
        match self.disk.open(&self.path(topic, incarnation), Open::Existing, Caching::Buffered).await {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Makes the proof, durably. The directory's own name too, each time: whoever made it may have been killed before that
    /// was durable, or be about to sync it (E1).
    pub async fn prove(&self, topic: &str, incarnation: Incarnation) -> io::Result<()> {
        let path = self.path(topic, incarnation);
        match self.disk.open(&path, Open::Create, Caching::Buffered).await {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.disk.create_dir(&self.root).await?;
                self.disk.open(&path, Open::Create, Caching::Buffered).await?;
            }
            opened => drop(opened?),
        }
        self.disk.sync_dir(&self.root).await?;
        self.disk.sync_dir(self.root.parent().unwrap_or(&self.root)).await
    }

    /// One that is absent is no error.
    pub async fn remove(&self, topic: &str, incarnation: Incarnation) -> io::Result<()> {
        match self.disk.remove_file(&self.path(topic, incarnation)).await {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
            Ok(()) => self.disk.sync_dir(&self.root).await,
        }
    }

    /// Topic and incarnation of every proof.
    pub async fn all(&self) -> io::Result<Vec<(String, Incarnation)>> {
        let entries = match self.disk.list(&self.root).await {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            listed => listed?,
        };
        let parse = |name: &str| {
            let (topic, id) = name.rsplit_once('.')?;
            Some((topic.to_owned(), Incarnation::parse(id)?))
        };
        Ok(entries.iter().filter_map(|entry| parse(&entry.name.to_string_lossy())).collect())
    }
}
