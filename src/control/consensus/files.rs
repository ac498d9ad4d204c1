//! The consensus directory in files: `consensus.redb`, the images, and how a start opens them.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use narad_shards::io::Slice;
use narad_shards::peer::LocalBoxFuture;
use narad_shards::rt;
use prost::Message as _;
use raft::eraftpb::{Entry, HardState};
use redb::{Database, ReadableTable, ReadableTableMetadata, TableDefinition};
use serde::de::DeserializeOwned;
use serde::Serialize;

use super::configuration::{bootstrap_id, Configuration};
use super::disk::{Changes, Disk, Position, Stored};
use super::restart::{decide, Decision, Found, FoundLog, FoundState, Image, Mode, FIRST_START};
use crate::control::store::image;
use crate::control::{Batch, State, Storage, Store};

const FILE_NAME: &str = "consensus.redb";
/// Layout of the tables. A file with a greater number is left alone.
const FORMAT: u64 = 1;
const LOG: TableDefinition<u64, &[u8]> = TableDefinition::new("log");
const META: TableDefinition<&str, &[u8]> = TableDefinition::new("meta");
const CACHE_BYTES: usize = 4 << 20;

/// What a start has opened: state and log, which fit each other.
pub struct Opened {
    pub store: Store,
    pub state: State,
    pub stored: Stored,
    pub files: Files,
}

/// Has this directory taken part in consensus?
pub fn exists(directory: &Path) -> bool {
    directory.join(FILE_NAME).exists()
}

/// Every file that a first start may make.
pub fn all(directory: &Path) -> [PathBuf; 2] {
    let log = directory.join(FILE_NAME);
    [image::unfinished(&log), log]
}

/// Takes the restart decision for `directory` and opens what is left. `drawn`: a random number, for a new raft id.
/// `Err` is one line with cause and remedy; nothing was touched then but leftovers of a start that died.
pub fn open(directory: &Path, mode: &Mode, restored: bool, drawn: u64) -> Result<Opened, String> {
    let log_path = directory.join(FILE_NAME);
    let in_file = |error: String| format!("consensus: {}: {error}", log_path.display());
    for path in [&image::made(directory), &image::received(directory), &log_path] {
        remove(&image::unfinished(path)).map_err(|error| in_file(error.to_string()))?;
    }
    let mut log = match log_path.try_exists().map_err(|error| in_file(error.to_string()))? {
        true => Some(LogFile::open(&log_path).map_err(in_file)?),
        false => None,
    };
    let mut opened = match Store::exists(directory).map_err(|error| in_file(error.to_string()))? {
        true => Some(Store::open(directory)?),
        false => None,
    };
    let found = look(directory, log.as_ref(), opened.as_ref())?;
    let decision = decide(mode, restored, &found);
    if let Some(what) = decision.in_words() {
        tracing::info!(directory = %directory.display(), "consensus: {what}");
    }
    match decision {
        Decision::Refuse(why) => return Err(in_file(why)),
        Decision::Keep => {}
        Decision::Restore(which) => {
            drop(opened.take()); // redb locks the file
            let path = match which {
                Image::Received => image::received(directory),
                Image::Made => image::made(directory),
            };
            let state_file = Store::files(directory)[0].clone();
            image::publish(&path, &state_file).map_err(|error| in_file(error.to_string()))?;
        }
        Decision::Rebuild => {
            drop(opened.take());
            set_aside(&Store::files(directory)[0])?;
            opened = Some(start_empty(directory, FIRST_START)?);
        }
        Decision::JoinEmpty { set_state_aside, set_log_aside } => {
            if set_state_aside {
                drop(opened.take());
                set_aside(&Store::files(directory)[0])?;
            }
            if set_log_aside {
                drop(log.take()); // redb locks the file
                set_aside(&log_path)?;
            }
            let stored = Stored { raft_id: drawn.max(1), ..Stored::default() };
            log = Some(LogFile::create(&log_path, stored).map_err(in_file)?);
        }
        Decision::FoundCluster { start_index } => {
            if restored {
                drop(log.take()); // redb locks the file
                set_aside(&log_path)?;
            }
            if found.state.as_ref().is_none_or(|state| state.applied_index < start_index) {
                drop(opened.take());
                opened = Some(start_empty(directory, start_index)?);
            }
            let stored = founded(mode, start_index, drawn)?;
            log = Some(LogFile::create(&log_path, stored).map_err(in_file)?);
        }
    }
    remove(&image::received(directory)).map_err(|error| in_file(error.to_string()))?;
    let (mut store, state) = match opened {
        Some(opened) => opened,
        None => Store::open(directory)?,
    };
    if !store.is_replicated()? {
        store.mark_replicated()?;
    }
    let Some((file, stored)) = log else { return Err(in_file("was not made".to_owned())) };
    let files = Files { directory: directory.to_owned(), log: Arc::new(Mutex::new(file)) };
    Ok(Opened { store, state, stored, files })
}

fn look(directory: &Path, log: Option<&(LogFile, Stored)>, opened: Option<&(Store, State)>) -> Result<Found, String> {
    let state = match opened {
        Some((store, state)) => Some(FoundState {
            applied_index: state.applied_index(),
            is_replicated: store.is_replicated()?,
            is_empty: state.topics().is_empty() && state.applied_index() <= FIRST_START,
        }),
        None => None,
    };
    let image = |path: PathBuf| -> Result<Option<u64>, String> {
        if !path.exists() {
            return Ok(None);
        }
        match image::inspect(&path) {
            Ok(state) => Ok(Some(state.applied_index())),
            // A newer build had begun to put it in place: only that one can go on.
            Err(error) if image::is_of_newer_release(&error) => Err(format!("metastore: {error}")),
            Err(error) => {
                tracing::warn!(error, "consensus: an image of no use");
                Ok(None)
            }
        }
    };
    let servers = log.iter().flat_map(|(_, stored)| stored.configuration.servers.values());
    let members = opened.iter().flat_map(|(_, state)| state.members().keys());
    let nodes = servers.map(|server| server.name.clone()).chain(members.map(|node| node.to_string())).collect();
    // Read from end to end only where one is needed.
    let needs_image =
        log.is_some_and(|(_, stored)| state.as_ref().is_none_or(|state| state.applied_index < stored.start.index));
    let (received, made) = match needs_image {
        true => (image(image::received(directory))?, image(image::made(directory))?),
        false => (None, None),
    };
    Ok(Found {
        log: log.map(|(_, stored)| FoundLog {
            start_index: stored.start.index,
            last_index: stored.last(),
            is_voter: stored.configuration.is_voter(stored.raft_id),
        }),
        nodes,
        received,
        made,
        state,
    })
}

/// A state that holds nothing and has applied what comes before the log.
fn start_empty(directory: &Path, applied_index: u64) -> Result<(Store, State), String> {
    let (mut store, mut state) = Store::open(directory)?;
    store.commit(&Batch { applied_index, ..Batch::default() })?;
    state.absorb(applied_index, &[]);
    Ok((store, state))
}

fn founded(mode: &Mode, start_index: u64, drawn: u64) -> Result<Stored, String> {
    let (raft_id, configuration) = match mode {
        Mode::Bootstrap { me, voters } => (bootstrap_id(me), Configuration::bootstrap(start_index, voters)?),
        Mode::Lone(server) => {
            let (id, mut server) = (drawn.max(1), server.clone());
            server.voter = true;
            (id, Configuration { index: start_index, servers: [(id, server)].into() })
        }
        Mode::Join => return Err("a node that joins founds no cluster".to_owned()),
    };
    if !configuration.is_voter(raft_id) {
        return Err("cluster.peers: this node's own id is not in the list".to_owned());
    }
    let start = Position { index: start_index, term: 1 };
    let hard_state = HardState { term: 1, vote: 0, commit: start_index };
    Ok(Stored { raft_id, start, hard_state, configuration, entries: Vec::new() })
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Keeps the file under another name, for whoever wants to look at it.
fn set_aside(path: &Path) -> Result<(), String> {
    let mut stale = path.as_os_str().to_owned();
    stale.push(".stale");
    match image::publish(path, Path::new(&stale)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(format!("{}: cannot be set aside: {error}", path.display()))
        }
        _ => Ok(()),
    }
}

/// `consensus.redb`. After an error redb refuses everything until the file is opened anew, hence the `Option`.
struct LogFile {
    path: PathBuf,
    database: Option<Database>,
}

type Fault = Box<dyn std::error::Error + Send + Sync>;

impl LogFile {
    /// A new file appears whole, or not at all.
    fn create(path: &Path, stored: Stored) -> Result<(LogFile, Stored), String> {
        let unfinished = image::unfinished(path);
        let make = || -> Result<(), Fault> {
            remove(&unfinished)?;
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished)?;
            let mut file = LogFile { path: unfinished.clone(), database: None };
            file.transact(|transaction| {
                let mut meta = transaction.open_table(META)?;
                put(&mut meta, "format", &FORMAT)?;
                put(&mut meta, "raft_id", &stored.raft_id)?;
                transaction.open_table(LOG)?;
                Ok(())
            })?;
            file.transact(|transaction| {
                write(
                    transaction,
                    &Changes {
                        clear: true,
                        start: Some(stored.start),
                        entries: stored.entries.clone(),
                        hard_state: Some(stored.hard_state.clone()),
                        configuration: Some(stored.configuration.clone()),
                    },
                )
            })?;
            drop(file);
            image::publish(&unfinished, path)?;
            Ok(())
        };
        make().map_err(|error| format!("cannot be made: {error}"))?;
        LogFile::open(path)
    }

    fn open(path: &Path) -> Result<(LogFile, Stored), String> {
        let mut file = LogFile { path: path.to_owned(), database: None };
        let read = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| file.read()));
        let stored = read.unwrap_or_else(|panic| Err(rt::panic_text(panic.as_ref()).into())).map_err(|error| {
            format!("cannot be read: {error}; restore the whole data directory, or start once with --restored")
        })?;
        Ok((file, stored))
    }

    fn database(&mut self) -> Result<&mut Database, Fault> {
        if self.database.is_none() {
            // Never creates: a log that went away under a running node must not come back empty.
            let file = OpenOptions::new().read(true).write(true).open(&self.path)?;
            self.database = Some(Database::builder().set_cache_size(CACHE_BYTES).create_file(file)?);
        }
        self.database.as_mut().ok_or_else(|| "is not open".into())
    }

    fn transact(&mut self, fill: impl FnOnce(&redb::WriteTransaction) -> Result<(), Fault>) -> Result<(), Fault> {
        let attempt = || -> Result<(), Fault> {
            let transaction = self.database()?.begin_write()?;
            fill(&transaction)?;
            transaction.commit()?;
            Ok(())
        };
        let result = attempt();
        if result.is_err() {
            self.database = None;
        }
        result
    }

    fn read(&mut self) -> Result<Stored, Fault> {
        let database = self.database()?;
        if !database.check_integrity()? {
            tracing::warn!("consensus: the log had to be repaired");
        }
        let transaction = database.begin_read()?;
        let meta = transaction.open_table(META)?;
        let format: u64 = get(&meta, "format")?;
        if format > FORMAT {
            return Err(
                format!("written by a newer Narad release (format {format}, this build reads up to {FORMAT})").into()
            );
        }
        let (term, vote, commit) = get(&meta, "hard_state")?;
        let mut stored = Stored {
            raft_id: get(&meta, "raft_id")?,
            start: get(&meta, "start")?,
            hard_state: HardState { term, vote, commit },
            configuration: get(&meta, "configuration")?,
            entries: Vec::new(),
        };
        let log = transaction.open_table(LOG)?;
        stored.entries.reserve(usize::try_from(log.len()?)?);
        for row in log.iter()? {
            let (index, entry) = row?;
            let entry = Entry::decode(entry.value())?;
            if entry.index != index.value() || entry.index != stored.last() + 1 {
                return Err(format!("entry {} is missing", stored.last() + 1).into());
            }
            stored.entries.push(entry);
        }
        if stored.raft_id == 0 || stored.hard_state.commit > stored.last() {
            return Err("its parts do not fit together".into());
        }
        Ok(stored)
    }
}

fn put<T: Serialize>(
    meta: &mut redb::Table<&'static str, &'static [u8]>,
    key: &'static str,
    value: &T,
) -> Result<(), Fault> {
    meta.insert(key, serde_json::to_vec(value)?.as_slice())?;
    Ok(())
}

fn get<T: DeserializeOwned>(meta: &impl ReadableTable<&'static str, &'static [u8]>, key: &str) -> Result<T, Fault> {
    let row = meta.get(key)?.ok_or_else(|| format!("holds no {key:?}"))?;
    let value = serde_json::from_slice(row.value()).map_err(|error| format!("{key:?}: {error}"))?;
    Ok(value)
}

fn write(transaction: &redb::WriteTransaction, changes: &Changes) -> Result<(), Fault> {
    let mut meta = transaction.open_table(META)?;
    let mut log = transaction.open_table(LOG)?;
    if changes.clear {
        log.retain(|_, _| false)?;
    }
    if let Some(start) = &changes.start {
        log.retain_in(..=start.index, |_, _| false)?;
        put(&mut meta, "start", start)?;
    }
    if let Some(first) = changes.entries.first() {
        log.retain_in(first.index.., |_, _| false)?;
    }
    for entry in &changes.entries {
        log.insert(entry.index, entry.encode_to_vec().as_slice())?;
    }
    if let Some(state) = &changes.hard_state {
        put(&mut meta, "hard_state", &(state.term, state.vote, state.commit))?;
    }
    if let Some(configuration) = &changes.configuration {
        put(&mut meta, "configuration", configuration)?;
    }
    Ok(())
}

/// The directory, open. May be handed to another thread.
#[derive(Clone)]
pub struct Files {
    directory: PathBuf,
    log: Arc<Mutex<LogFile>>,
}

impl Files {
    fn file(log: &Mutex<LogFile>) -> MutexGuard<'_, LogFile> {
        log.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Disk for Files {
    fn write(&self, changes: Arc<Changes>) -> LocalBoxFuture<'static, Result<(), String>> {
        let log = self.log.clone();
        Box::pin(rt::blocking(move || {
            let mut file = Files::file(&log);
            let written = file.transact(|transaction| write(transaction, &changes));
            written.map_err(|error| format!("{}: {error}", file.path.display()))
        }))
    }

    fn read_image(&self, offset: u64, bytes: usize) -> LocalBoxFuture<'static, Result<(Vec<u8>, u64), String>> {
        let path = image::made(&self.directory);
        Box::pin(rt::blocking(move || {
            let read = || -> io::Result<(Vec<u8>, u64)> {
                let mut file = fs::File::open(&path)?;
                let length = file.metadata()?.len();
                file.seek(SeekFrom::Start(offset))?;
                let mut piece = Vec::new();
                file.take(bytes as u64).read_to_end(&mut piece)?;
                Ok((piece, length))
            };
            read().map_err(|error| format!("{}: {error}", path.display()))
        }))
    }

    fn receive(&self, offset: u64, piece: Slice) -> LocalBoxFuture<'static, Result<(), String>> {
        let path = image::unfinished(&image::received(&self.directory));
        Box::pin(rt::blocking(move || {
            let append = || -> io::Result<()> {
                let mut open = OpenOptions::new();
                let mut file = open.write(true).create(true).truncate(offset == 0).mode(0o600).open(&path)?;
                if file.metadata()?.len() != offset {
                    return Err(io::Error::other(format!("is not {offset} bytes long")));
                }
                file.seek(SeekFrom::Start(offset))?;
                file.write_all(&piece)
            };
            append().map_err(|error| format!("{}: {error}", path.display()))
        }))
    }

    fn finish_receiving(&self) -> LocalBoxFuture<'static, Result<u64, String>> {
        let path = image::received(&self.directory);
        Box::pin(rt::blocking(move || {
            let unfinished = image::unfinished(&path);
            let index = image::inspect(&unfinished)?.applied_index();
            let publish = || -> io::Result<()> {
                fs::File::open(&unfinished)?.sync_all()?;
                image::publish(&unfinished, &path)
            };
            publish().map_err(|error| format!("{}: {error}", path.display()))?;
            Ok(index)
        }))
    }
}
