//! Images of the state file (E37): a copy made table by table inside one read transaction, and the way back. Never a
//! byte copy of an open file, never the whole of it in memory (K15).

use std::fs;
use std::path::{Path, PathBuf};

use redb::{Database, Key, ReadTransaction, ReadableTable, TableDefinition, TableHandle, Value};

use super::{contain, damaged, CopyImage, Fault, State, Store, NEWER_RELEASE};
use crate::control::ballast::Ballast;

/// The image that this node has made, to be sent to others.
pub fn made(directory: &Path) -> PathBuf {
    directory.join("snapshot.redb")
}

/// An image that the leader has sent, whole and verified, until it is in place.
pub fn received(directory: &Path) -> PathBuf {
    directory.join("received.redb")
}

/// `path` while it is being written.
pub fn unfinished(path: &Path) -> PathBuf {
    path.with_extension("redb.new")
}

/// Gives a written and synced file its name, durably.
pub fn publish(unfinished: &Path, path: &Path) -> std::io::Result<()> {
    fs::rename(unfinished, path)?;
    fs::File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()
}

/// Reads an image from end to end. `Err` says why it is none that this build can run on.
pub fn inspect(path: &Path) -> Result<State, String> {
    let directory = path.parent().unwrap_or(Path::new("."));
    let mut store = Store { path: path.to_owned(), database: None, ballast: Ballast::beside(directory) };
    contain(|| {
        store.reopen()?;
        store.verify()?;
        store.read()
    })
    .map_err(|error| format!("{}: {error}", path.display()))
}

/// Whether an image of no use is one that a newer build can use: then it is not this build's to pass over (K16).
pub fn is_of_newer_release(error: &str) -> bool {
    error.contains(NEWER_RELEASE)
}

impl Store {
    pub(super) fn begin_copy(&mut self) -> Result<CopyImage, String> {
        if self.database.is_none() {
            self.reopen()?;
        }
        let database = self.database.as_ref().ok_or("is not open")?;
        let pinned = database.begin_read().map_err(damaged)?;
        let path = made(self.directory());
        Ok(Box::new(move || {
            contain(|| copy(&pinned, &unfinished(&path)))
                .and_then(|()| publish(&unfinished(&path), &path).map_err(|error| error.to_string()))
                .inspect_err(|_| drop(fs::remove_file(unfinished(&path))))
                .map_err(|error| format!("{}: {error}", path.display()))
        }))
    }

    /// Replaces the file by `image`, which is gone afterwards, and reads it.
    pub(super) fn take_over(&mut self, image: &Path) -> Result<State, String> {
        self.database = None;
        publish(image, &self.path).map_err(|error| format!("{}: {error}", self.path.display()))?;
        contain(|| {
            self.reopen()?;
            self.verify()?;
            self.read()
        })
        .map_err(|error| format!("{}: {error}", self.path.display()))
    }

    /// The state file belongs to a consensus directory from now on: it is never run without one again (K16).
    pub fn mark_replicated(&mut self) -> Result<(), String> {
        self.write(|transaction| {
            transaction.open_table(super::FSM_META)?.insert(META_REPLICATED, 1)?;
            Ok(())
        })
        .map_err(|error| format!("{}: {error}", self.path.display()))
    }

    pub fn is_replicated(&self) -> Result<bool, String> {
        let database = self.database.as_ref().ok_or("is not open")?;
        let meta = database.begin_read().map_err(damaged)?.open_table(super::FSM_META).map_err(damaged)?;
        let marked = meta.get(META_REPLICATED).map_err(damaged)?.is_some();
        Ok(marked)
    }
}

const META_REPLICATED: &str = "replicated";

fn copy(pinned: &ReadTransaction, path: &Path) -> Result<(), String> {
    if let Err(error) = fs::remove_file(path) {
        if error.kind() != std::io::ErrorKind::NotFound {
            return Err(error.to_string());
        }
    }
    let mut into = Database::create(path).map_err(damaged)?;
    let tables: Vec<String> = pinned.list_tables().map_err(damaged)?.map(|table| table.name().to_owned()).collect();
    for name in tables {
        // Rows are copied as the types that they are: redb has no untyped ones.
        let copied = copy_table::<&str, &[u8]>(pinned, &into, &name)?
            || copy_table::<&str, u64>(pinned, &into, &name)?
            || copy_table::<(u64, u32), &[u8]>(pinned, &into, &name)?;
        if !copied {
            return Err(format!(
                "table {name:?} has a type that snapshots do not know: this is a defect of this build"
            ));
        }
    }
    into.compact().map_err(damaged)?;
    drop(into); // closed: everything is in the file
    fs::File::open(path).and_then(|file| file.sync_all()).map_err(|error| error.to_string())
}

/// Whether the table is of these types.
fn copy_table<K: Key + 'static, V: Value + 'static>(
    pinned: &ReadTransaction,
    into: &Database,
    name: &str,
) -> Result<bool, String> {
    /// Rows of one transaction.
    const ROWS: usize = 4096;
    let definition = TableDefinition::<K, V>::new(name);
    let from = match pinned.open_table(definition) {
        Ok(table) => table,
        Err(redb::TableError::TableTypeMismatch { .. }) => return Ok(false),
        Err(error) => return Err(damaged(error)),
    };
    let mut rows = from.iter().map_err(damaged)?.peekable();
    let mut first = true;
    while std::mem::take(&mut first) || rows.peek().is_some() {
        let mut fill = || -> Result<(), Fault> {
            let transaction = into.begin_write()?;
            {
                let mut table = transaction.open_table(definition)?;
                for row in rows.by_ref().take(ROWS) {
                    let (key, value) = row?;
                    table.insert(key.value(), value.value())?;
                }
            }
            transaction.commit()?;
            Ok(())
        };
        fill().map_err(|fault| fault.0)?;
    }
    Ok(true)
}
