//! Directories of a simulated disk: the visible tree, the durable one, and the changes in between.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Component, Path};

use super::image::Survival;
use crate::rt::sim::Rng;

pub(super) type Inode = u64;
pub(super) const ROOT: Inode = 1;

#[derive(Default)]
struct Directory {
    visible: BTreeMap<OsString, Inode>,
    durable: BTreeMap<OsString, Inode>,
}

/// One change that the journal keeps or loses as a whole.
struct Change {
    serial: u64,
    /// Directory, name, and what the name stands for afterwards.
    entries: Vec<(Inode, OsString, Option<Inode>)>,
    /// A change without which this one is never kept: the arrival of an entry that this one takes away elsewhere.
    needs: Option<u64>,
}

pub(super) struct Tree {
    directories: BTreeMap<Inode, Directory>,
    pending: Vec<Change>,
}

impl Tree {
    pub(super) fn new() -> Tree {
        Tree { directories: BTreeMap::from([(ROOT, Directory::default())]), pending: Vec::new() }
    }

    pub(super) fn is_directory(&self, inode: Inode) -> bool {
        self.directories.contains_key(&inode)
    }

    pub(super) fn find(&self, path: &Path) -> Option<Inode> {
        let names = path.components().filter(|part| !matches!(part, Component::RootDir | Component::CurDir));
        names.into_iter().try_fold(ROOT, |at, name| self.directories.get(&at)?.visible.get(name.as_os_str()).copied())
    }

    /// Whether every name on the path would survive any power cut as it stands.
    pub(super) fn is_durable(&self, path: &Path) -> bool {
        let names = path.components().filter(|part| !matches!(part, Component::RootDir | Component::CurDir));
        let mut at = ROOT;
        for name in names {
            let Some(directory) = self.directories.get(&at) else { return false };
            let (visible, durable) = (directory.visible.get(name.as_os_str()), directory.durable.get(name.as_os_str()));
            let pending = self.pending.iter().flat_map(|change| &change.entries);
            let touched = pending.into_iter().any(|(dir, changed, _)| *dir == at && changed == name.as_os_str());
            match visible {
                Some(inode) if visible == durable && !touched => at = *inode,
                _ => return false,
            }
        }
        true
    }

    pub(super) fn directory(&self, path: &Path) -> io::Result<Inode> {
        match self.find(path) {
            Some(inode) if self.is_directory(inode) => Ok(inode),
            Some(_) => Err(io::ErrorKind::NotADirectory.into()),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn parent<'a>(&self, path: &'a Path) -> io::Result<(Inode, &'a OsStr)> {
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        Ok((self.directory(path.parent().unwrap_or(Path::new("/")))?, name))
    }

    pub(super) fn entries(&self, directory: Inode) -> impl Iterator<Item = (&OsString, Inode)> {
        self.directories.get(&directory).into_iter().flat_map(|d| d.visible.iter().map(|(name, inode)| (name, *inode)))
    }

    fn change(&mut self, serial: u64, entries: Vec<(Inode, OsString, Option<Inode>)>, needs: Option<u64>) {
        for (directory, name, inode) in &entries {
            if let Some(directory) = self.directories.get_mut(directory) {
                set(&mut directory.visible, name, *inode);
            }
        }
        self.pending.push(Change { serial, entries, needs });
    }

    /// Adds an entry for a new file.
    pub(super) fn link(&mut self, path: &Path, inode: Inode, serial: u64) -> io::Result<()> {
        let (parent, name) = self.parent(path)?;
        self.change(serial, vec![(parent, name.to_owned(), Some(inode))], None);
        Ok(())
    }

    pub(super) fn make_directory(&mut self, path: &Path, inode: Inode, serial: u64) -> io::Result<()> {
        self.link(path, inode, serial)?;
        self.directories.insert(inode, Directory::default());
        Ok(())
    }

    /// Removes the entry of a file or of an empty directory.
    pub(super) fn unlink(&mut self, path: &Path, serial: u64) -> io::Result<Inode> {
        let inode = self.find(path).ok_or(io::ErrorKind::NotFound)?;
        if self.entries(inode).next().is_some() {
            return Err(io::ErrorKind::DirectoryNotEmpty.into());
        }
        let (parent, name) = self.parent(path)?;
        self.change(serial, vec![(parent, name.to_owned(), None)], None);
        Ok(inode)
    }

    /// Returns what the target stood for before, if anything.
    pub(super) fn rename(&mut self, from: &Path, to: &Path, serial: u64) -> io::Result<Option<Inode>> {
        let inode = self.find(from).ok_or(io::ErrorKind::NotFound)?;
        if from == to {
            return Ok(None);
        }
        let replaced = self.find(to);
        if replaced.is_some_and(|target| self.entries(target).next().is_some()) {
            return Err(io::ErrorKind::DirectoryNotEmpty.into());
        }
        if to.starts_with(from) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (source, source_name) = self.parent(from)?;
        let (target, target_name) = self.parent(to)?;
        let arrival = (target, target_name.to_owned(), Some(inode));
        let departure = (source, source_name.to_owned(), None);
        if source == target {
            self.change(serial, vec![departure, arrival], None);
        } else {
            // Two directories, two syncs: until both, the entry may be in both, but is never in neither.
            self.change(serial, vec![arrival], None);
            self.change(serial, vec![departure], Some(serial));
        }
        Ok(replaced)
    }

    /// Makes the entries of one directory durable, up to `serial`.
    pub(super) fn sync(&mut self, directory: Inode, serial: u64) {
        let wanted =
            |change: &Change| change.serial <= serial && change.entries.iter().any(|(inode, _, _)| *inode == directory);
        for arrival in self.pending.iter().filter(|c| wanted(c)).filter_map(|c| c.needs).collect::<Vec<_>>() {
            let of = |c: &&Change| c.serial == arrival && c.needs.is_none();
            if let Some(target) = self.pending.iter().find(of).map(|change| change.entries[0].0) {
                self.sync(target, arrival);
            }
        }
        let (done, rest): (Vec<Change>, Vec<Change>) =
            std::mem::take(&mut self.pending).into_iter().partition(|change| wanted(change));
        self.pending = rest;
        done.into_iter().for_each(|change| self.keep(change));
    }

    fn keep(&mut self, change: Change) {
        for (directory, name, inode) in change.entries {
            if let Some(directory) = self.directories.get_mut(&directory) {
                set(&mut directory.durable, &name, inode);
            }
        }
    }

    /// Keeps any subset of the pending changes that respects their order per entry.
    pub(super) fn power_cut(&mut self, survival: Survival, rng: &mut Rng) {
        let mut broken: BTreeSet<(Inode, OsString)> = BTreeSet::new();
        let mut lost: BTreeSet<u64> = BTreeSet::new();
        for change in std::mem::take(&mut self.pending) {
            let ordered = !change.entries.iter().any(|(dir, name, _)| broken.contains(&(*dir, name.clone())));
            let complete = change.needs.is_none_or(|serial| !lost.contains(&serial));
            if ordered && complete && survival.keeps(change.serial, rng) {
                self.keep(change);
            } else {
                lost.insert(change.serial);
                broken.extend(change.entries.into_iter().map(|(dir, name, _)| (dir, name)));
            }
        }
        for directory in self.directories.values_mut() {
            directory.visible = directory.durable.clone();
        }
    }

    /// Inodes that somebody can still reach, now or after a power cut; forgets all other directories.
    pub(super) fn collect(&mut self) -> BTreeSet<Inode> {
        let mut reached = BTreeSet::new();
        let mut open = vec![ROOT];
        while let Some(inode) = open.pop() {
            if !reached.insert(inode) {
                continue;
            }
            if let Some(directory) = self.directories.get(&inode) {
                open.extend(directory.visible.values().chain(directory.durable.values()));
            }
            let added = self.pending.iter().flat_map(|c| &c.entries).filter(|(dir, _, _)| *dir == inode);
            open.extend(added.filter_map(|(_, _, target)| *target));
        }
        self.directories.retain(|inode, _| reached.contains(inode));
        reached
    }
}

fn set(entries: &mut BTreeMap<OsString, Inode>, name: &OsStr, inode: Option<Inode>) {
    match inode {
        Some(inode) => drop(entries.insert(name.to_owned(), inode)),
        None => drop(entries.remove(name)),
    }
}
