//! Topic directories: does what lies under a name belong to the live topic?
//!
//! A directory is served only if its marker carries the incarnation of the topic's record. One of another incarnation
//! is set aside under `<name>.stale-<id>`, never served, and removed only once the caller has had it confirmed that the
//! incarnation is gone (S10). A directory of several shards is one directory: set it aside, stamp or purge it from one
//! task at a time, and in a task that is not dropped half-way.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use super::stored;
use super::stored_proof::StoredProofs;
use crate::io::{is_shortage, Caching, Disk, Entry, Open, Slice};
use crate::meta::Incarnation;
use crate::peer::LocalBoxFuture;

const MARKER: &str = "incarnation";
const MARKER_UNFINISHED: &str = "incarnation.tmp";
/// 16 hex digits, a space, their CRC-32C in 8, and a newline.
const MARKER_BYTES: usize = 26;
/// As releases before the checksum wrote it: the digits and a newline.
const MARKER_BYTES_UNCHECKED: usize = 17;
const NAME_BYTES_MAX: usize = 200;

/// Why a topic's directory cannot be used. Concerns that topic alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DirectoryError {
    /// The name must not become part of a path (lesson N75.3).
    BadName(String),
    Io(String),
    /// No descriptor or memory was left to look with: it works again when there is.
    Short(String),
    /// There are files whose incarnation nobody knows: they are neither served nor overwritten (lesson D5.2).
    InDoubt(String),
    /// The topic had files here, and they are gone, or a deleted topic's lie in their place: it is not begun again at
    /// offset 0 (S27).
    Lost(String),
}

impl fmt::Display for DirectoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DirectoryError::BadName(text)
            | DirectoryError::Io(text)
            | DirectoryError::Short(text)
            | DirectoryError::InDoubt(text)
            | DirectoryError::Lost(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for DirectoryError {}

/// What the marker of a topic's directory says, compared with the topic's record (S5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marker {
    /// Nothing is stored under the name; at most an empty directory that a crash left unstamped.
    Absent,
    Matches,
    /// And the live one has never stored anything here.
    Different(Mark),
}

/// What a marker states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    pub id: Incarnation,
    /// A checksum proves the id. Without one, a single flipped bit may have made it out of another.
    pub checked: bool,
}

impl Mark {
    /// The whole file, as it is written.
    pub fn encode(id: Incarnation) -> String {
        let digits = id.to_string();
        format!("{digits} {:08x}\n", crc32c::crc32c(digits.as_bytes()))
    }

    /// Sixteen lowercase hex digits, their checksum unless an older release wrote it, and a newline. Nothing else.
    pub(super) fn decode(bytes: &[u8]) -> Option<Mark> {
        let line = std::str::from_utf8(bytes).ok()?.strip_suffix('\n')?;
        let (digits, checked) = line.split_once(' ').map_or((line, false), |(digits, _)| (digits, true));
        let id = Incarnation::parse(digits)?;
        (!checked || Mark::encode(id).as_bytes() == bytes).then_some(Mark { id, checked })
    }
}

/// What is read where a directory's marker should be.
enum Found {
    Nothing,
    /// Not what a marker holds.
    Damaged,
    Mark(Mark),
}

impl Found {
    fn mark(self) -> Option<Mark> {
        match self {
            Found::Mark(mark) => Some(mark),
            Found::Nothing | Found::Damaged => None,
        }
    }
}

/// What lies in the topics directory under one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicEntry {
    pub topic: String,
    pub path: PathBuf,
    pub kind: TopicKind,
    /// The id is proven by the marker's checksum ([`Mark::checked`]).
    pub checked: bool,
    /// Partitions that have a directory, or had one by their mark, ascending.
    pub partitions: Vec<u32>,
    /// Partition copies that were set aside, with their size: counted, never touched (S12).
    pub quarantined: Vec<(String, u64)>,
}

impl TopicEntry {
    /// Whose it is, if that is known.
    pub fn incarnation(&self) -> Option<Incarnation> {
        match self.kind {
            TopicKind::Marked(id) | TopicKind::Stale(id) => Some(id),
            TopicKind::Unmarked => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TopicKind {
    Marked(Incarnation),
    /// Set aside; may be removed once its incarnation is confirmed gone (S10).
    Stale(Incarnation),
    /// No readable marker: left in place until a start sweeps it (S13).
    Unmarked,
}

/// What has to happen on the shard while a dead incarnation's directory is set aside.
pub trait Retire {
    /// Closes every open log under the name and drops leases, frontier and everything else that is in memory: before the
    /// directory is renamed (S6), so that no late ack can write a position into a fresh one (S7).
    fn close_logs(&self, old: Incarnation) -> LocalBoxFuture<'_, ()>;
    /// This process has seen the incarnation live, and gone since.
    fn was_live(&self, old: Incarnation) -> bool;
}

/// The `topics` directory of a node.
#[derive(Clone)]
pub struct TopicDirectories {
    disk: Disk,
    root: PathBuf,
    proofs: StoredProofs,
}

fn failed(what: &str, path: &Path, error: &io::Error) -> DirectoryError {
    let text = format!("cannot {what} {}: {error}", path.display());
    if is_shortage(error) {
        DirectoryError::Short(text)
    } else {
        DirectoryError::Io(text)
    }
}

fn check_name(topic: &str) -> Result<(), DirectoryError> {
    let legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    let well_formed = (1..=NAME_BYTES_MAX).contains(&topic.len()) && topic.bytes().all(legal);
    if well_formed && topic != "." && topic != ".." {
        return Ok(());
    }
    Err(DirectoryError::BadName(format!("{topic:?} is no topic name: it must not become part of a path")))
}

fn stale_name(topic: &str, old: Incarnation) -> String {
    format!("{topic}.stale-{old}")
}

pub(super) fn parse_stale_name(name: &str) -> Option<(&str, Incarnation)> {
    let (topic, id) = name.rsplit_once(".stale-")?;
    Some((topic, Incarnation::parse(id)?))
}

pub(super) fn parse_partition_name(name: &str) -> Option<u32> {
    let digits = name.strip_prefix('p')?;
    (digits.len() == 5 && digits.bytes().all(|b| b.is_ascii_digit())).then(|| digits.parse().ok()).flatten()
}

impl TopicDirectories {
    /// `root` is `<data directory>/topics`, which must exist.
    pub fn new(disk: Disk, root: PathBuf) -> TopicDirectories {
        let proofs = StoredProofs::beside(disk.clone(), &root);
        TopicDirectories { disk, root, proofs }
    }

    /// Where a partition's log lives: `topics/<topic>/p<NNNNN>`. Creates nothing (S3).
    pub fn partition_dir(&self, topic: &str, partition: u32) -> Result<PathBuf, DirectoryError> {
        Ok(self.topic_dir(topic)?.join(format!("p{partition:05}")))
    }

    fn topic_dir(&self, topic: &str) -> Result<PathBuf, DirectoryError> {
        check_name(topic)?;
        Ok(self.root.join(topic))
    }

    /// Compares the directory under the name with the live incarnation, without changing anything (S5, S9).
    pub async fn marker(&self, topic: &str, live: Incarnation) -> Result<Marker, DirectoryError> {
        let dir = self.topic_dir(topic)?;
        loop {
            let Some(entries) = self.list(&dir).await? else { return self.absent(topic, live).await };
            if !entries.iter().any(|entry| entry.name == MARKER) {
                if entries.iter().all(|entry| entry.name == MARKER_UNFINISHED) {
                    return self.absent(topic, live).await;
                }
                return Err(DirectoryError::InDoubt(format!(
                    "{} has no incarnation marker but holds files: move them away, or restore the marker",
                    dir.display()
                )));
            }
            match self.read_marker(&dir).await? {
                Found::Mark(found) if found.id == live => return Ok(Marker::Matches),
                Found::Mark(found) => return self.different(topic, live, found).await,
                // Set aside since it was listed, by whoever removes a former incarnation: that is no damage (K46).
                Found::Nothing => continue,
                Found::Damaged => {
                    return Err(DirectoryError::InDoubt(format!(
                        "{} is damaged: it must hold 16 hex digits and their checksum. Restore it (the live incarnation of \
                         the topic is {live}), or move the directory away",
                        dir.join(MARKER).display()
                    )))
                }
            }
        }
    }

    async fn absent(&self, topic: &str, live: Incarnation) -> Result<Marker, DirectoryError> {
        if self.has_stored(topic, live).await? {
            return Err(self.lost(topic, live, "is gone"));
        }
        Ok(Marker::Absent)
    }

    /// Another incarnation's files, in the place of none: or of those that the live one has had, when somebody restored a
    /// backup from before the topic was deleted and made again.
    async fn different(&self, topic: &str, live: Incarnation, found: Mark) -> Result<Marker, DirectoryError> {
        if !self.has_stored(topic, live).await? {
            return Ok(Marker::Different(found));
        }
        if !found.checked {
            return Err(self.unproven(topic, live, found.id));
        }
        let instead = format!("is of the deleted topic of that name ({}, not {live}), and is not served", found.id);
        Err(self.lost(topic, live, &instead))
    }

    async fn has_stored(&self, topic: &str, live: Incarnation) -> Result<bool, DirectoryError> {
        let proven = self.proofs.is_proven(topic, live).await;
        proven.map_err(|e| failed("look for", &self.proofs.path(topic, live), &e))
    }

    /// Why a topic that has stored something must not begin anew.
    fn lost(&self, topic: &str, live: Incarnation, instead: &str) -> DirectoryError {
        let proof = self.proofs.path(topic, live);
        DirectoryError::Lost(format!(
            "{} proves that this node has stored topic {topic}, but {} {instead}: its records here are lost, and their \
             offsets are not given out again. Restore the directory of incarnation {live}; or, to start empty at offset 0, \
             remove {}",
            proof.display(),
            self.root.join(topic).display(),
            proof.display()
        ))
    }

    fn unproven(&self, topic: &str, live: Incarnation, found: Incarnation) -> DirectoryError {
        DirectoryError::InDoubt(format!(
            "{} states incarnation {found}, the live one of topic {topic} is {live}, and no checksum tells whether the file \
             is damaged. If the records are this topic's, write {live} into the file; if not, move the directory away",
            self.root.join(topic).join(MARKER).display()
        ))
    }

    /// Topic and incarnation of everything that has had a directory here.
    pub async fn proven(&self) -> Result<Vec<(String, Incarnation)>, DirectoryError> {
        self.proofs.all().await.map_err(|e| failed("list the proofs of topics beside", &self.root, &e))
    }

    /// Proves that a topic has stored something here, durably; its directory is there.
    pub async fn prove(&self, topic: &str, live: Incarnation) -> Result<(), DirectoryError> {
        self.proofs.prove(topic, live).await.map_err(|e| failed("make", &self.proofs.path(topic, live), &e))
    }

    /// Makes the directory under the name the live incarnation's: as it is, or fresh and stamped durably before it is
    /// used, after an old one was set aside (S5 to S7). An id that neither a checksum nor this process's memory proves may
    /// be the live one with a flipped bit: such a directory is refused, and stays as it is.
    pub async fn prepare(&self, topic: &str, live: Incarnation, retire: &dyn Retire) -> Result<(), DirectoryError> {
        match self.marker(topic, live).await? {
            // Its making may have been interrupted before it was durable (E1).
            Marker::Matches => self.settle(&self.topic_dir(topic)?).await?,
            Marker::Absent => self.stamp(topic, live).await?,
            Marker::Different(Mark { id: old, checked }) if !checked && !retire.was_live(old) => {
                return Err(self.unproven(topic, live, old));
            }
            Marker::Different(Mark { id: old, .. }) => {
                retire.close_logs(old).await;
                tracing::error!(topic, %old, %live,
                    "topic directory belongs to another incarnation; set aside and not served");
                self.set_aside(topic, old).await?;
                self.stamp(topic, live).await?;
            }
        }
        // Before anything is stored in it, and only now: a crash on the way leaves a directory that is still empty.
        self.prove(topic, live).await
    }

    /// Removes the directory of a deleted incarnation, and what was set aside of it. Anything else under the name is
    /// left alone. The caller has it confirmed that the incarnation is gone, and has closed its logs.
    pub async fn purge(&self, topic: &str, gone: Incarnation) -> Result<(), DirectoryError> {
        let dir = self.topic_dir(topic)?;
        if self.list(&dir).await?.is_some() && self.read_marker(&dir).await?.mark().is_some_and(|mark| mark.id == gone)
        {
            // Renamed first, so that a crash in the middle leaves no half of a directory under a live name.
            self.set_aside(topic, gone).await?;
        }
        self.remove_stale(topic, gone).await?;
        self.proofs.remove(topic, gone).await.map_err(|e| failed("remove", &self.proofs.path(topic, gone), &e))
    }

    /// Removes what was set aside of an incarnation that is confirmed gone (S10). One that is absent is no error.
    pub async fn remove_stale(&self, topic: &str, gone: Incarnation) -> Result<(), DirectoryError> {
        check_name(topic)?;
        let path = self.root.join(stale_name(topic, gone));
        if self.list(&path).await?.is_none() {
            return Ok(());
        }
        match self.read_marker(&path).await?.mark() {
            Some(found) if found.id == gone => {}
            _ => {
                return Err(DirectoryError::InDoubt(format!(
                    "{} does not carry the incarnation of its name; left in place",
                    path.display()
                )))
            }
        }
        tracing::info!(topic, incarnation = %gone, dir = %path.display(), "removing the files of a deleted topic");
        self.disk.remove_dir_all(&path).await.map_err(|e| failed("remove", &path, &e))?;
        self.disk.sync_dir(&self.root).await.map_err(|e| failed("sync", &self.root, &e))
    }

    /// Everything under `topics`, in name order: for the sweep and the gauges at start (S10 to S13).
    pub async fn inventory(&self) -> Result<Vec<TopicEntry>, DirectoryError> {
        let mut found = Vec::new();
        for entry in self.list(&self.root).await?.unwrap_or_default() {
            if !entry.directory {
                continue;
            }
            let path = self.root.join(&entry.name);
            let name = entry.name.to_string_lossy().into_owned();
            let marker = self.read_marker(&path).await?.mark();
            let (topic, kind) = match (parse_stale_name(&name), marker) {
                // A live topic may bear such a name; its marker then states another id.
                (Some((topic, old)), Some(marker)) if marker.id == old => (topic.to_owned(), TopicKind::Stale(old)),
                (_, Some(marker)) => (name, TopicKind::Marked(marker.id)),
                (_, None) => (name, TopicKind::Unmarked),
            };
            let checked = marker.is_some_and(|marker| marker.checked);
            let mut entry = TopicEntry { topic, path, kind, checked, partitions: Vec::new(), quarantined: Vec::new() };
            self.take_stock(&mut entry).await?;
            found.push(entry);
        }
        Ok(found)
    }

    async fn take_stock(&self, entry: &mut TopicEntry) -> Result<(), DirectoryError> {
        for inner in self.list(&entry.path).await?.unwrap_or_default() {
            let name = inner.name.to_string_lossy().into_owned();
            if let Some(partition) = parse_partition_name(name.strip_suffix(stored::SUFFIX).unwrap_or(&name)) {
                entry.partitions.push(partition);
            } else if name.contains(".quarantine") {
                let files = self.list(&entry.path.join(&inner.name)).await?.unwrap_or_default();
                entry.quarantined.push((name, files.iter().map(|file| file.bytes).sum()));
            }
        }
        entry.partitions.dedup();
        Ok(())
    }

    async fn set_aside(&self, topic: &str, old: Incarnation) -> Result<(), DirectoryError> {
        let dir = self.topic_dir(topic)?;
        let stale = self.root.join(stale_name(topic, old));
        if self.list(&stale).await?.is_some() {
            return Err(DirectoryError::InDoubt(format!(
                "{} and {} claim the same incarnation; move one of them away",
                dir.display(),
                stale.display()
            )));
        }
        self.disk.rename(&dir, &stale).await.map_err(|e| failed("set aside", &dir, &e))?;
        self.disk.sync_dir(&self.root).await.map_err(|e| failed("sync", &self.root, &e))
    }

    /// Makes the directory and its marker durable, in this order: a directory without a marker is empty.
    async fn stamp(&self, topic: &str, live: Incarnation) -> Result<(), DirectoryError> {
        let dir = self.topic_dir(topic)?;
        let stamped = async {
            self.disk.create_dir(&dir).await?;
            let unfinished = dir.join(MARKER_UNFINISHED);
            let file = self.disk.open(&unfinished, Open::Create, Caching::Buffered).await?;
            file.set_len(0).await?;
            file.write_durable_at(0, Slice::copy_from(Mark::encode(live).as_bytes())).await?;
            drop(file);
            self.disk.rename(&unfinished, &dir.join(MARKER)).await
        };
        stamped.await.map_err(|e| failed("stamp the topic directory", &dir, &e))?;
        self.settle(&dir).await
    }

    /// Makes the marker's name and the directory's durable.
    async fn settle(&self, dir: &Path) -> Result<(), DirectoryError> {
        self.disk.sync_dir(dir).await.map_err(|e| failed("sync", dir, &e))?;
        self.disk.sync_dir(&self.root).await.map_err(|e| failed("sync", &self.root, &e))
    }

    async fn read_marker(&self, dir: &Path) -> Result<Found, DirectoryError> {
        let path = dir.join(MARKER);
        let file = match self.disk.open(&path, Open::Existing, Caching::Buffered).await {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Nothing),
            opened => opened.map_err(|e| failed("open", &path, &e))?,
        };
        let bytes = file.len().await.map_err(|e| failed("measure", &path, &e))?;
        let Some(bytes) = [MARKER_BYTES, MARKER_BYTES_UNCHECKED].into_iter().find(|known| *known as u64 == bytes)
        else {
            return Ok(Found::Damaged);
        };
        let text = file.read_at(0, bytes).await.map_err(|e| failed("read", &path, &e))?;
        Ok(Mark::decode(&text).map_or(Found::Damaged, Found::Mark))
    }

    /// Entries of a directory, `None` when it does not exist.
    async fn list(&self, dir: &Path) -> Result<Option<Vec<Entry>>, DirectoryError> {
        match self.disk.list(dir).await {
            Ok(entries) => Ok(Some(entries)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed("list", dir, &error)),
        }
    }
}
