//! The state on disk: `metastore/state.redb`. One transaction stores the effects of a batch of entries together with
//! the index of the last one (K14), so an entry is never applied twice and never half. The consensus log gets a file
//! of its own (E37).
//!
//! Rows are JSON, read once at start.

pub mod image;

use std::cell::Cell;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Once};

use narad_shards::meta::{Incarnation, NodeId};
use redb::backends::InMemoryBackend;
use redb::{Database, Key, ReadOnlyTable, ReadTransaction, ReadableTable, StorageBackend, TableDefinition, TableError};

use super::ballast::Ballast;
use super::command::Command;
use super::rows::{AssignmentRow, MemberRow, TopicRow};
use super::state::{Change, State};

/// Layout of the tables and rows. A file with a greater number is left alone; one of format 1 holds topics alone, and
/// is of this format from its first change on.
pub const FORMAT: u64 = 2;

const FILE_NAME: &str = "state.redb";
const TOPICS: TableDefinition<&str, &[u8]> = TableDefinition::new("topics");
const MEMBERS: TableDefinition<&str, &[u8]> = TableDefinition::new("members");
/// Name to the number that the member had.
const REMOVED_MEMBERS: TableDefinition<&str, u64> = TableDefinition::new("removed_members");
/// (topic id, partition) to owner.
const ASSIGNMENTS: TableDefinition<(u64, u32), &[u8]> = TableDefinition::new("assignments");
const FSM_META: TableDefinition<&str, u64> = TableDefinition::new("fsm_meta");
const META_FORMAT: &str = "format";
const META_APPLIED_INDEX: &str = "applied_index";
const META_NEWEST_COMMAND_TYPE: &str = "newest_command_type";
/// Begins why a file of a newer release is refused.
const NEWER_RELEASE: &str = "written by a newer Narad release";
const META_CLUSTER_ID: &str = "cluster_id";
const META_NEWEST_NUMBER: &str = "newest_member_number";

/// How every file of redb begins, and the least that one holds.
const MAGIC: &[u8] = b"redb\x1a\x0a\xa9\x0d\x0a";
const HEADER_BYTES: usize = 4096;

/// redb would take 1 GiB; the whole of the metadata is in memory anyway.
const CACHE_BYTES: usize = 8 << 20;

/// Effects of consecutive entries, stored together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Index of the last entry; refused ones count.
    pub applied_index: u64,
    pub changes: Vec<Change>,
}

/// Where batches are stored. Called from one thread at a time, off the control thread (E27).
pub trait Storage: Send + 'static {
    /// `Ok` means durable. After an error the same batch may be tried again.
    fn commit(&mut self, batch: &Batch) -> Result<(), String>;

    /// Pins what is stored now. The returned work, which may run beside later commits, copies it into the image file
    /// and makes that durable under its name (E37).
    fn begin_image(&mut self) -> Result<CopyImage, String>;

    /// Puts the received image in the place of the store and reads it.
    fn install_image(&mut self) -> Result<State, String>;
}

pub type CopyImage = Box<dyn FnOnce() -> Result<(), String> + Send>;

/// The open file. After an error redb refuses everything until it is opened anew, hence the `Option`.
pub struct Store {
    path: PathBuf,
    database: Option<Database>,
    ballast: Ballast,
}

impl Store {
    /// Every file that opening may make.
    pub fn files(directory: &Path) -> [PathBuf; 3] {
        [directory.join(FILE_NAME), directory.join(format!("{FILE_NAME}.new")), Ballast::beside(directory).path()]
    }

    /// Is there a state file in this directory?
    pub fn exists(directory: &Path) -> std::io::Result<bool> {
        directory.join(FILE_NAME).try_exists()
    }

    /// Opens the file, or makes it, and reads everything. `Err` is one line with cause and remedy.
    pub fn open(directory: &Path) -> Result<(Store, State), String> {
        let (path, ballast) = (directory.join(FILE_NAME), Ballast::beside(directory));
        let mut store = Store { path, database: None, ballast };
        let mut open = || {
            store.database = None;
            contain(|| {
                if !store.path.try_exists().map_err(|error| error.to_string())? {
                    store.create(directory)?;
                }
                // redb writes while it opens: what is refused must stay as it was found.
                let state = Store::judge(&store.path)?;
                store.reopen()?;
                Ok(state)
            })
        };
        let mut opened = open();
        // Opening writes.
        if opened.is_err() && Ballast::beside(directory).give() {
            opened = open();
        }
        match opened {
            Ok(state) => {
                store.ballast.take();
                Ok((store, state))
            }
            Err(error) => Err(format!("metastore: {}: {error}", store.path.display())),
        }
    }

    /// Reads everything, out of a copy in memory.
    fn judge(path: &Path) -> Result<State, String> {
        let bytes = fs::read(path).map_err(|error| error.to_string())?;
        if bytes.len() < HEADER_BYTES || !bytes.starts_with(MAGIC) {
            let what = format!("has {} bytes and does not begin as a metadata file does", bytes.len());
            return Err(damaged_text(&what));
        }
        let copy = InMemoryBackend::new();
        let filled = copy.set_len(bytes.len() as u64).and_then(|()| copy.write(0, &bytes));
        filled.map_err(|error| error.to_string())?;
        let database = Store::builder().create_with_backend(copy).map_err(not_opened)?;
        let mut judged = Store { path: path.to_owned(), database: Some(database), ballast: Ballast::beside(path) };
        judged.verify()?;
        judged.read()
    }

    fn builder() -> redb::Builder {
        let mut builder = Database::builder();
        builder.set_cache_size(CACHE_BYTES);
        builder
    }

    /// Makes the file under another name first: one that has its name is always whole.
    fn create(&mut self, directory: &Path) -> Result<(), String> {
        let name = std::mem::replace(&mut self.path, directory.join(format!("{FILE_NAME}.new")));
        let made = fs::remove_file(&self.path)
            .or_else(|error| if error.kind() == std::io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
            .and_then(|()| OpenOptions::new().write(true).create_new(true).mode(0o600).open(&self.path))
            .map_err(|error| error.to_string())
            .and_then(|_| self.reopen())
            .and_then(|()| self.initialise());
        self.database = None;
        let unnamed = std::mem::replace(&mut self.path, name);
        made?;
        fs::rename(&unnamed, &self.path)
            // The name is there only once its directory says so durably (E1).
            .and_then(|()| fs::File::open(directory)?.sync_all())
            .map_err(|error| error.to_string())
    }

    fn reopen(&mut self) -> Result<(), String> {
        self.database = None; // redb locks the file: close before opening again
                              // Never creates: metadata that went away under a running node must not come back empty (lesson D8.2).
        let file = OpenOptions::new().read(true).write(true).open(&self.path).map_err(|error| error.to_string())?;
        self.database = Some(Store::builder().create_file(file).map_err(not_opened)?);
        Ok(())
    }

    fn directory(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("."))
    }

    #[cfg(test)]
    pub(super) fn forget_database(&mut self) {
        self.database = None;
    }

    fn initialise(&mut self) -> Result<(), String> {
        self.write(|transaction| {
            transaction.open_table(TOPICS)?;
            let mut meta = transaction.open_table(FSM_META)?;
            meta.insert(META_FORMAT, FORMAT)?;
            meta.insert(META_APPLIED_INDEX, 0)?;
            meta.insert(META_NEWEST_COMMAND_TYPE, 0)?;
            Ok(())
        })
    }

    fn write(&self, fill: impl FnOnce(&redb::WriteTransaction) -> Result<(), Fault>) -> Result<(), String> {
        let database = self.database.as_ref().ok_or("is not open")?;
        let transact = || -> Result<(), Fault> {
            let transaction = database.begin_write()?;
            fill(&transaction)?;
            transaction.commit()?;
            Ok(())
        };
        transact().map_err(|fault| fault.0)
    }

    /// redb checks a page's sum only after a crash; a bit that rotted in the meantime must not become a topic.
    fn verify(&mut self) -> Result<(), String> {
        let database = self.database.as_mut().ok_or("is not open")?;
        database.check_integrity().map(|_| ()).map_err(damaged)
    }

    fn read(&self) -> Result<State, String> {
        let database = self.database.as_ref().ok_or("is not open")?;
        let transaction = database.begin_read().map_err(damaged)?;
        let meta = transaction.open_table(FSM_META).map_err(damaged)?;
        let number = |key: &str| -> Result<u64, String> {
            let value = meta.get(key).map_err(damaged)?;
            Ok(value.ok_or_else(|| format!("holds no {key:?}: it is not a metadata file of this broker"))?.value())
        };
        let newer = |what: String| {
            format!("{NEWER_RELEASE} ({what}); run that release, or restore the whole data directory from a backup that this one wrote")
        };
        let format = number(META_FORMAT)?;
        if format > FORMAT {
            return Err(newer(format!("format {format}, this build reads up to {FORMAT}")));
        }
        let newest = number(META_NEWEST_COMMAND_TYPE)?;
        if newest > Command::NEWEST_TYPE {
            return Err(newer(format!("command type {newest}, this build applies up to {}", Command::NEWEST_TYPE)));
        }
        let mut rows = Vec::new();
        each(&transaction, TOPICS, |name, row| {
            let topic = TopicRow::decode(name, row).map_err(|error| unreadable("topic", name, &error))?;
            rows.push(Change::PutTopic(Arc::new(topic)));
            Ok(())
        })?;
        each(&transaction, MEMBERS, |node, row| {
            let member = MemberRow::decode(node, row).map_err(|error| unreadable("member", node, &error))?;
            rows.push(Change::PutMember(Arc::new(member)));
            Ok(())
        })?;
        each(&transaction, REMOVED_MEMBERS, |node, number| {
            rows.push(Change::PutTombstone { node: Arc::from(node), number: NodeId(number) });
            Ok(())
        })?;
        each(&transaction, ASSIGNMENTS, |(id, partition), row| {
            let incarnation = Incarnation(id);
            let owner = AssignmentRow::decode(row)
                .map_err(|error| unreadable("assignment", &format!("{incarnation}/{partition}"), &error))?;
            rows.push(Change::PutOwners { incarnation, owners: vec![(partition, owner)] });
            Ok(())
        })?;
        let later = |key: &str| -> Result<u64, String> { Ok(meta.get(key).map_err(damaged)?.map_or(0, |v| v.value())) };
        rows.push(Change::SetClusterId(later(META_CLUSTER_ID)?));
        rows.push(Change::SetNewestNumber(later(META_NEWEST_NUMBER)?));
        rows.push(Change::SetNewestCommandType(newest));
        Ok(State::from_rows(rows, number(META_APPLIED_INDEX)?))
    }
}

fn unreadable(what: &str, key: &str, error: &str) -> String {
    format!("the row of {what} {key:?} is unreadable: {error}")
}

/// Every row of a table; one that the file's format has not got yet is empty.
fn each<K: Key + 'static, V: redb::Value + 'static>(
    transaction: &ReadTransaction,
    table: TableDefinition<K, V>,
    mut row: impl FnMut(K::SelfType<'_>, V::SelfType<'_>) -> Result<(), String>,
) -> Result<(), String> {
    let table: ReadOnlyTable<K, V> = match transaction.open_table(table) {
        Ok(table) => table,
        Err(TableError::TableDoesNotExist(_)) => return Ok(()),
        Err(error) => return Err(damaged(error)),
    };
    for entry in table.iter().map_err(damaged)? {
        let (key, value) = entry.map_err(damaged)?;
        row(key.value(), value.value())?;
    }
    Ok(())
}

/// Writes what consecutive entries changed, in their order.
fn write_changes(transaction: &redb::WriteTransaction, changes: &[Change]) -> Result<(), Fault> {
    let mut meta = transaction.open_table(FSM_META)?;
    let mut topics = transaction.open_table(TOPICS)?;
    let mut members = transaction.open_table(MEMBERS)?;
    let mut removed = transaction.open_table(REMOVED_MEMBERS)?;
    let mut assignments = transaction.open_table(ASSIGNMENTS)?;
    for change in changes {
        match change {
            Change::PutTopic(topic) => {
                let row = TopicRow::encode(topic).map_err(std::io::Error::other)?;
                topics.insert(&*topic.name, row.as_slice())?;
            }
            Change::RemoveTopic(name) => drop(topics.remove(&**name)?),
            Change::PutMember(member) => {
                let row = MemberRow::encode(member).map_err(std::io::Error::other)?;
                members.insert(&**member.node(), row.as_slice())?;
            }
            Change::RemoveMember(node) => drop(members.remove(&**node)?),
            Change::PutTombstone { node, number } => drop(removed.insert(&**node, number.0)?),
            Change::RemoveTombstone(node) => drop(removed.remove(&**node)?),
            Change::PutOwners { incarnation, owners } => {
                for (partition, owner) in owners {
                    let row = AssignmentRow::encode(*owner).map_err(std::io::Error::other)?;
                    assignments.insert((incarnation.0, *partition), row.as_slice())?;
                }
            }
            Change::RemoveOwners(incarnation) => {
                assignments.retain_in((incarnation.0, 0)..=(incarnation.0, u32::MAX), |_, _| false)?;
            }
            Change::RemoveOwner { incarnation, partition } => drop(assignments.remove((incarnation.0, *partition))?),
            Change::SetClusterId(id) => drop(meta.insert(META_CLUSTER_ID, *id)?),
            Change::SetNewestNumber(number) => drop(meta.insert(META_NEWEST_NUMBER, *number)?),
            Change::SetNewestCommandType(number) => drop(meta.insert(META_NEWEST_COMMAND_TYPE, *number)?),
        }
    }
    Ok(())
}

impl Store {
    fn transact(&mut self, batch: &Batch) -> Result<(), String> {
        let result = contain(|| {
            if self.database.is_none() {
                self.reopen()?;
            }
            self.write(|transaction| {
                let mut meta = transaction.open_table(FSM_META)?;
                meta.insert(META_FORMAT, FORMAT)?;
                meta.insert(META_APPLIED_INDEX, batch.applied_index)?;
                drop(meta);
                write_changes(transaction, &batch.changes)
            })
        });
        if result.is_err() {
            self.database = None;
        }
        result.map_err(|error| format!("{}: {error}", self.path.display()))
    }
}

impl Storage for Store {
    fn commit(&mut self, batch: &Batch) -> Result<(), String> {
        let mut result = self.transact(batch);
        if result.is_err() && self.ballast.give() {
            result = self.transact(batch);
        }
        if result.is_ok() {
            self.ballast.take();
        }
        result
    }

    fn begin_image(&mut self) -> Result<CopyImage, String> {
        self.begin_copy()
    }

    fn install_image(&mut self) -> Result<State, String> {
        self.take_over(&image::received(self.directory()))
    }
}

fn not_opened(error: redb::DatabaseError) -> String {
    match error {
        redb::DatabaseError::UpgradeRequired(_) => {
            "is in a file format of another release: run the build that wrote it".to_owned()
        }
        redb::DatabaseError::Storage(redb::StorageError::Io(error))
            if error.kind() == std::io::ErrorKind::StorageFull =>
        {
            format!("cannot be opened: {error}: free space on this file system, then start again")
        }
        other => format!("cannot be opened: {other}; restore the whole data directory from one backup"),
    }
}

fn damaged(error: impl Into<redb::Error>) -> String {
    damaged_text(&error.into().to_string())
}

fn damaged_text(why: &str) -> String {
    format!("cannot be read: {why}; restore the whole data directory from one backup")
}

/// What redb said. Its own error type is too large to hand about.
struct Fault(String);

impl<E: Into<redb::Error>> From<E> for Fault {
    fn from(error: E) -> Fault {
        Fault(error.into().to_string())
    }
}

thread_local! {
    static CONTAINED: Cell<bool> = const { Cell::new(false) };
}

/// redb panics on some damage; a person should read one line instead, and nothing else.
fn contain<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !CONTAINED.get() {
                usual(panic);
            }
        }));
    });
    struct Outer(bool);
    impl Drop for Outer {
        fn drop(&mut self) {
            CONTAINED.set(self.0);
        }
    }
    let _outer = Outer(CONTAINED.replace(true));
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(damaged_text(&narad_shards::rt::panic_text(panic.as_ref()))))
}
