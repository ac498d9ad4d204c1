//! A disk that is neither a ring's nor simulated: the door for measuring instruments, which wrap a real disk or stand
//! in for one. No broker opens one.

use std::future::Future;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::rc::Rc;

use super::{Caching, Entry, File, Open, Slice};

/// What a call of an [`OtherDisk`] or [`OtherFile`] comes back as.
pub type Call<'a, T> = Pin<Box<dyn Future<Output = io::Result<T>> + 'a>>;

/// The calls of [`Disk`](super::Disk), under the same terms.
pub trait OtherDisk {
    fn open<'a>(&'a self, path: &'a Path, how: Open, caching: Caching) -> Call<'a, File>;
    fn create_dir<'a>(&'a self, path: &'a Path) -> Call<'a, ()>;
    fn sync_dir<'a>(&'a self, path: &'a Path) -> Call<'a, ()>;
    fn rename<'a>(&'a self, from: &'a Path, to: &'a Path) -> Call<'a, ()>;
    fn remove_file<'a>(&'a self, path: &'a Path) -> Call<'a, ()>;
    fn remove_dir_all<'a>(&'a self, path: &'a Path) -> Call<'a, ()>;
    fn list<'a>(&'a self, path: &'a Path) -> Call<'a, Vec<Entry>>;
    fn available_bytes(&self) -> Call<'_, u64>;
    fn block_bytes(&self) -> usize;
}

/// The calls of [`File`], under the same terms.
pub trait OtherFile {
    fn read_at(&self, offset: u64, bytes: usize) -> Call<'_, Slice>;
    fn write_at(&self, offset: u64, data: Slice) -> Call<'_, ()>;
    fn write_durable_at(&self, offset: u64, data: Slice) -> Call<'_, ()>;
    fn sync_data(&self) -> Call<'_, ()>;
    fn len_bytes(&self) -> Call<'_, u64>;
    fn allocate(&self, offset: u64, bytes: u64) -> Call<'_, ()>;
    fn set_len(&self, bytes: u64) -> Call<'_, ()>;
    /// Whether the file has a name.
    fn is_named(&self) -> Call<'_, bool> {
        Box::pin(async { Ok(true) })
    }
}

/// Shared, as clones of a [`Disk`](super::Disk) share it.
pub type SharedDisk = Rc<dyn OtherDisk>;
/// Shared, as clones of a [`File`] share it.
pub type SharedFile = Rc<dyn OtherFile>;
