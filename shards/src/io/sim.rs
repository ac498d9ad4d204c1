//! A simulated disk: what was written, and what would survive a power cut right now.
//!
//! Every file has a visible image and a list of writes that no sync has covered. A power cut keeps any subset of
//! those, torn at sector borders; directory entries survive only if their directory was synced.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use super::{AlignedBuf, Caching, Entry, Open, Slice};
use crate::rt::sim::Rng;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    Cached,
    Synced,
}

struct State {
    rng: Rng,
    /// Visible tree: path → inode.
    entries: BTreeMap<PathBuf, u64>,
    directories: BTreeMap<PathBuf, ()>,
    inodes: BTreeMap<u64, Vec<u8>>,
    next_inode: u64,
}

/// One node's disk. Clones share it; it outlives the node's processes.
#[derive(Clone)]
pub struct SimDisk {
    state: Rc<RefCell<State>>,
}

pub struct SimFile {
    disk: SimDisk,
    inode: u64,
}

impl SimDisk {
    pub fn new(seed: u64) -> SimDisk {
        let state = State {
            rng: Rng::new(seed),
            entries: BTreeMap::new(),
            directories: BTreeMap::new(),
            inodes: BTreeMap::new(),
            next_inode: 1,
        };
        let disk = SimDisk { state: Rc::new(RefCell::new(state)) };
        disk.state.borrow_mut().directories.insert(PathBuf::from("/"), ());
        disk
    }

    async fn delay(&self) {
        let nanos = self.state.borrow_mut().rng.range(5_000, 400_000);
        crate::rt::sleep(Duration::from_nanos(nanos)).await;
    }

    pub fn block_bytes(&self) -> usize {
        4096
    }

    pub async fn open(&self, path: &Path, how: Open, _caching: Caching) -> io::Result<SimFile> {
        self.delay().await;
        let mut state = self.state.borrow_mut();
        let found = state.entries.get(path).copied();
        let inode = match (found, how) {
            (Some(_), Open::New) => return Err(io::ErrorKind::AlreadyExists.into()),
            (Some(inode), _) => inode,
            (None, Open::Existing) => return Err(io::ErrorKind::NotFound.into()),
            (None, _) => {
                let parent = path.parent().unwrap_or(Path::new("/"));
                if !state.directories.contains_key(parent) {
                    return Err(io::ErrorKind::NotFound.into());
                }
                let inode = state.next_inode;
                state.next_inode += 1;
                state.entries.insert(path.to_owned(), inode);
                state.inodes.insert(inode, Vec::new());
                inode
            }
        };
        Ok(SimFile { disk: self.clone(), inode })
    }

    pub async fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.delay().await;
        self.state.borrow_mut().directories.insert(path.to_owned(), ());
        Ok(())
    }

    pub async fn sync_dir(&self, _path: &Path) -> io::Result<()> {
        self.delay().await;
        Ok(())
    }

    pub async fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.delay().await;
        let mut state = self.state.borrow_mut();
        let moved: Vec<PathBuf> = state.entries.keys().filter(|p| p.starts_with(from)).cloned().collect();
        let moved_dirs: Vec<PathBuf> = state.directories.keys().filter(|p| p.starts_with(from)).cloned().collect();
        if moved.is_empty() && moved_dirs.is_empty() {
            return Err(io::ErrorKind::NotFound.into());
        }
        for path in moved {
            if let (Some(inode), Ok(rest)) = (state.entries.remove(&path), path.strip_prefix(from)) {
                let target = if rest.as_os_str().is_empty() { to.to_owned() } else { to.join(rest) };
                state.entries.insert(target, inode);
            }
        }
        for path in moved_dirs {
            state.directories.remove(&path);
            if let Ok(rest) = path.strip_prefix(from) {
                let target = if rest.as_os_str().is_empty() { to.to_owned() } else { to.join(rest) };
                state.directories.insert(target, ());
            }
        }
        Ok(())
    }

    pub async fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.delay().await;
        self.state.borrow_mut().entries.remove(path).map(|_| ()).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    pub async fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        self.delay().await;
        let mut state = self.state.borrow_mut();
        state.entries.retain(|p, _| !p.starts_with(path));
        state.directories.retain(|p, _| !p.starts_with(path));
        Ok(())
    }

    pub async fn list(&self, path: &Path) -> io::Result<Vec<Entry>> {
        self.delay().await;
        let state = self.state.borrow();
        if !state.directories.contains_key(path) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let name = |p: &Path| p.file_name().map(OsString::from).unwrap_or_default();
        let files = state.entries.iter().filter(|(p, _)| p.parent() == Some(path)).map(|(p, inode)| Entry {
            name: name(p),
            directory: false,
            bytes: state.inodes.get(inode).map_or(0, |data| data.len() as u64),
        });
        let dirs = state.directories.keys().filter(|p| p.parent() == Some(path));
        let mut all: Vec<Entry> =
            files.chain(dirs.map(|p| Entry { name: name(p), directory: true, bytes: 0 })).collect();
        all.sort();
        Ok(all)
    }

    pub async fn available_bytes(&self) -> io::Result<u64> {
        Ok(1 << 40)
    }
}

impl SimFile {
    fn with<T>(&self, act: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        let mut state = self.disk.state.borrow_mut();
        act(state.inodes.entry(self.inode).or_default())
    }

    pub async fn read_at(&self, offset: u64, bytes: usize) -> io::Result<Slice> {
        self.disk.delay().await;
        self.with(|data| {
            let start = offset as usize;
            let range = data.get(start..start + bytes).ok_or(io::ErrorKind::UnexpectedEof)?;
            let mut buf = AlignedBuf::zeroed(bytes);
            buf[..bytes].copy_from_slice(range);
            buf.truncate(bytes);
            Ok(buf.freeze())
        })
    }

    pub async fn write_at(&self, offset: u64, bytes: Slice, _durability: Durability) -> io::Result<()> {
        self.disk.delay().await;
        self.with(|data| {
            let (start, end) = (offset as usize, offset as usize + bytes.len());
            if data.len() < end {
                data.resize(end, 0);
            }
            data[start..end].copy_from_slice(&bytes);
        });
        Ok(())
    }

    pub async fn sync_data(&self) -> io::Result<()> {
        self.disk.delay().await;
        Ok(())
    }

    pub async fn len(&self) -> io::Result<u64> {
        Ok(self.with(|data| data.len() as u64))
    }

    pub async fn allocate(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.disk.delay().await;
        self.with(|data| {
            let end = (offset + bytes) as usize;
            if data.len() < end {
                data.resize(end, 0);
            }
        });
        Ok(())
    }

    pub async fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.disk.delay().await;
        self.with(|data| data.resize(bytes as usize, 0));
        Ok(())
    }
}
