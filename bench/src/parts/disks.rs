//! Disks for measuring: one that takes no time and keeps nothing, and one that answers a read-back from memory.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use narad_shards::io::{AlignedBuf, Caching, Call, Disk, Entry, File, Open, OtherDisk, OtherFile, Slice, ALIGNMENT};

fn done<'a, T: 'a>(result: io::Result<T>) -> Call<'a, T> {
    Box::pin(std::future::ready(result))
}

/// The last durable write of a file: its own read-back is answered out of it, once, without a copy.
#[derive(Default)]
struct LastWrite(RefCell<Option<(u64, Slice)>>);

impl LastWrite {
    fn note(&self, offset: u64, data: &Slice) {
        *self.0.borrow_mut() = Some((offset, data.clone()));
    }

    /// Lets go of the write: its memory may be written again.
    fn take(&self, offset: u64, bytes: usize) -> Option<Slice> {
        let (_, data) = self.0.borrow_mut().take_if(|(at, data)| *at == offset && data.len() == bytes)?;
        Some(data)
    }
}

/// A disk on which every call is done at once. Names and lengths are kept, contents are not: what is read is zeros, or
/// the write that was just made. What is left of a measurement on it is the processor's part.
#[derive(Default)]
pub struct InstantDisk {
    files: RefCell<BTreeMap<PathBuf, Rc<InstantFile>>>,
}

#[derive(Default)]
struct InstantFile {
    bytes: Cell<u64>,
    last: LastWrite,
    /// A log reads back what it wrote, a WAL does not: only then the write is kept for the read.
    read_back: bool,
}

impl InstantDisk {
    pub fn disk() -> Disk {
        Disk::Other(Rc::new(InstantDisk::default()))
    }
}

impl OtherDisk for InstantDisk {
    fn open<'a>(&'a self, path: &'a Path, how: Open, _caching: Caching) -> Call<'a, File> {
        let mut files = self.files.borrow_mut();
        let there = files.contains_key(path);
        done(match how {
            Open::Existing if !there => Err(io::ErrorKind::NotFound.into()),
            Open::New if there => Err(io::ErrorKind::AlreadyExists.into()),
            _ => {
                let read_back = path.extension().is_some_and(|extension| extension == "log");
                let new = || Rc::new(InstantFile { read_back, ..InstantFile::default() });
                Ok(File::Other(files.entry(path.to_owned()).or_insert_with(new).clone()))
            }
        })
    }

    fn create_dir<'a>(&'a self, _path: &'a Path) -> Call<'a, ()> {
        done(Ok(()))
    }

    fn sync_dir<'a>(&'a self, _path: &'a Path) -> Call<'a, ()> {
        done(Ok(()))
    }

    fn rename<'a>(&'a self, from: &'a Path, to: &'a Path) -> Call<'a, ()> {
        let mut files = self.files.borrow_mut();
        let moved = files.remove(from);
        files.extend(moved.map(|file| (to.to_owned(), file)));
        done(Ok(()))
    }

    fn remove_file<'a>(&'a self, path: &'a Path) -> Call<'a, ()> {
        self.files.borrow_mut().remove(path);
        done(Ok(()))
    }

    fn remove_dir_all<'a>(&'a self, path: &'a Path) -> Call<'a, ()> {
        self.files.borrow_mut().retain(|file, _| !file.starts_with(path));
        done(Ok(()))
    }

    fn list<'a>(&'a self, path: &'a Path) -> Call<'a, Vec<Entry>> {
        let files = self.files.borrow();
        let below = files.iter().filter(|(file, _)| file.parent() == Some(path));
        let entry = |(file, content): (&PathBuf, &Rc<InstantFile>)| {
            Some(Entry { name: file.file_name()?.to_owned(), directory: false, bytes: content.bytes.get() })
        };
        done(Ok(below.filter_map(entry).collect()))
    }

    fn available_bytes(&self) -> Call<'_, u64> {
        done(Ok(1 << 50))
    }

    fn block_bytes(&self) -> usize {
        ALIGNMENT
    }
}

impl InstantFile {
    fn grow(&self, end: u64) {
        self.bytes.set(self.bytes.get().max(end));
    }
}

impl OtherFile for InstantFile {
    fn read_at(&self, offset: u64, bytes: usize) -> Call<'_, Slice> {
        done(Ok(self.last.take(offset, bytes).unwrap_or_else(|| AlignedBuf::zeroed(bytes).freeze().slice(0..bytes))))
    }

    fn write_at(&self, offset: u64, data: Slice) -> Call<'_, ()> {
        self.grow(offset + data.len() as u64);
        done(Ok(()))
    }

    fn write_durable_at(&self, offset: u64, data: Slice) -> Call<'_, ()> {
        if self.read_back {
            self.last.note(offset, &data);
        }
        self.write_at(offset, data)
    }

    fn sync_data(&self) -> Call<'_, ()> {
        done(Ok(()))
    }

    fn len_bytes(&self) -> Call<'_, u64> {
        done(Ok(self.bytes.get()))
    }

    fn allocate(&self, offset: u64, bytes: u64) -> Call<'_, ()> {
        self.grow(offset + bytes);
        done(Ok(()))
    }

    fn set_len(&self, bytes: u64) -> Call<'_, ()> {
        self.bytes.set(bytes);
        done(Ok(()))
    }
}

/// A real disk, except that reading back what a file has just written durably is answered from memory: what is missing
/// from a measurement on it is the device's part of the read-back, not the checks of what came back.
pub struct EchoDisk {
    real: Disk,
}

struct EchoFile {
    real: File,
    last: LastWrite,
}

impl EchoDisk {
    pub fn over(real: Disk) -> Disk {
        Disk::Other(Rc::new(EchoDisk { real }))
    }
}

impl OtherDisk for EchoDisk {
    fn open<'a>(&'a self, path: &'a Path, how: Open, caching: Caching) -> Call<'a, File> {
        Box::pin(async move {
            let real = self.real.open(path, how, caching).await?;
            Ok(File::Other(Rc::new(EchoFile { real, last: LastWrite::default() })))
        })
    }

    fn create_dir<'a>(&'a self, path: &'a Path) -> Call<'a, ()> {
        Box::pin(self.real.create_dir(path))
    }

    fn sync_dir<'a>(&'a self, path: &'a Path) -> Call<'a, ()> {
        Box::pin(self.real.sync_dir(path))
    }

    fn rename<'a>(&'a self, from: &'a Path, to: &'a Path) -> Call<'a, ()> {
        Box::pin(self.real.rename(from, to))
    }

    fn remove_file<'a>(&'a self, path: &'a Path) -> Call<'a, ()> {
        Box::pin(self.real.remove_file(path))
    }

    fn remove_dir_all<'a>(&'a self, path: &'a Path) -> Call<'a, ()> {
        Box::pin(self.real.remove_dir_all(path))
    }

    fn list<'a>(&'a self, path: &'a Path) -> Call<'a, Vec<Entry>> {
        Box::pin(self.real.list(path))
    }

    fn available_bytes(&self) -> Call<'_, u64> {
        Box::pin(self.real.available_bytes())
    }

    fn block_bytes(&self) -> usize {
        self.real.block_bytes()
    }
}

impl OtherFile for EchoFile {
    fn read_at(&self, offset: u64, bytes: usize) -> Call<'_, Slice> {
        match self.last.take(offset, bytes) {
            Some(data) => done(Ok(data)),
            None => Box::pin(self.real.read_at(offset, bytes)),
        }
    }

    fn write_at(&self, offset: u64, data: Slice) -> Call<'_, ()> {
        Box::pin(self.real.write_at(offset, data))
    }

    fn write_durable_at(&self, offset: u64, data: Slice) -> Call<'_, ()> {
        self.last.note(offset, &data);
        Box::pin(self.real.write_durable_at(offset, data))
    }

    fn sync_data(&self) -> Call<'_, ()> {
        Box::pin(self.real.sync_data())
    }

    fn len_bytes(&self) -> Call<'_, u64> {
        Box::pin(self.real.len())
    }

    fn allocate(&self, offset: u64, bytes: u64) -> Call<'_, ()> {
        Box::pin(self.real.allocate(offset, bytes))
    }

    fn set_len(&self, bytes: u64) -> Call<'_, ()> {
        Box::pin(self.real.set_len(bytes))
    }
}
