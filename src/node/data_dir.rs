//! Layout of the data directory, its ids, and what an earlier life left in it.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use narad_shards::meta::ShardId;

use crate::config::{check_node_id, Warning};
use crate::control::{consensus, Store};

use super::Refusal;

/// Paths below `storage.data_dir`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataDir {
    pub root: PathBuf,
}

impl DataDir {
    pub fn topics(&self) -> PathBuf {
        self.root.join("topics")
    }

    /// WAL directories, one a shard, named by number (E31).
    pub fn ingress(&self) -> PathBuf {
        self.root.join("ingress")
    }

    pub fn metastore(&self) -> PathBuf {
        self.root.join("metastore")
    }

    fn store_id(&self) -> PathBuf {
        self.root.join("store-id")
    }

    fn node_id(&self) -> PathBuf {
        self.root.join("node-id")
    }

    /// What [`super::prepare`] makes inside, files before the directories that hold them.
    pub fn made_by_a_start(&self) -> Vec<PathBuf> {
        let ids = [self.node_id(), self.store_id()];
        let unnamed = ids.clone().map(|id| id.with_extension("new"));
        let metadata = Store::files(&self.metastore()).into_iter().chain(consensus::files::all(&self.metastore()));
        ids.into_iter()
            .chain(unnamed)
            .chain(metadata)
            .chain([self.metastore(), self.topics(), self.ingress()])
            .collect()
    }

    /// Makes the directory itself, with mode 0700 (lesson N50.2). An existing one keeps its mode.
    pub fn create(root: &Path) -> Result<DataDir, Refusal> {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(root);
        made.map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory => Refusal::new(
                format!("storage.data_dir ({}) is, or lies below, something that is no directory", root.display()),
                "choose another storage.data_dir",
            ),
            _ => not_writable(root, &error),
        })?;
        let root = root.canonicalize().map_err(|error| not_writable(root, &error))?;
        Ok(DataDir { root })
    }

    /// Makes what every node has inside. Names are durable before anything may depend on them (E1).
    pub fn create_inside(&self) -> Result<(), Refusal> {
        let make = |path: PathBuf| DirBuilder::new().recursive(true).mode(0o700).create(path);
        let all = make(self.topics()).and_then(|()| make(self.ingress())).and_then(|()| make(self.metastore()));
        all.and_then(|()| sync_directory(&self.root)).map_err(|error| not_writable(&self.root, &error))?;
        // The name of the directory itself; who may not open its parent did not make it either.
        if let Some(parent) = self.root.parent() {
            let _ = sync_directory(parent);
        }
        Ok(())
    }
}

pub(super) fn not_writable(directory: &Path, error: &io::Error) -> Refusal {
    let directory = directory.display();
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => {
            let user =
                fs::metadata("/proc/self").map_or_else(|_| "this user".to_owned(), |m| format!("user id {}", m.uid()));
            Refusal::new(
                format!("storage.data_dir ({directory}) is not writable for {user}: {error}"),
                "chown or chmod it, or choose another storage.data_dir",
            )
        }
        Some(libc::EROFS) => Refusal::new(
            format!("storage.data_dir ({directory}) is on a file system that is mounted read-only"),
            "remount it read-write; a disk that failed is often remounted read-only, see the kernel log",
        ),
        Some(libc::ENOSPC) => {
            Refusal::new(format!("storage.data_dir ({directory}) has no space left"), "free space, then start again")
        }
        _ => Refusal::new(
            format!("storage.data_dir ({directory}) cannot be used: {error}"),
            "check the path and the disk",
        ),
    }
}

fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Who this disk is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Random, made at first start; every WAL segment carries it (E2).
    pub store_id: u64,
    pub node_id: String,
    /// No store id existed: nothing has ever been stored here.
    pub first_start: bool,
}

/// What to do about the ids, decided before anything is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentityPlan {
    store_id: Option<u64>,
    stored_node_id: Option<String>,
    node_id: String,
}

/// Reads the ids and refuses a directory that cannot be whole. Writes nothing.
pub fn plan_identity(data: &DataDir, configured: Option<&str>, host_name: &str) -> Result<IdentityPlan, Refusal> {
    let store_id = match read_optional(&data.store_id())? {
        None => None,
        Some(text) => Some(parse_store_id(&text).ok_or_else(|| {
            Refusal::new(
                format!("{} does not hold a store id (16 hex digits)", data.store_id().display()),
                "restore the whole data directory from one backup",
            )
        })?),
    };
    let unreadable =
        |error: io::Error| Refusal::new(format!("cannot look into {}: {error}", data.root.display()), "check the disk");
    let metadata = Store::exists(&data.metastore()).map_err(unreadable)?;
    let messages =
        holds_entries(&data.topics()).map_err(unreadable)? || holds_entries(&data.ingress()).map_err(unreadable)?;
    match store_id {
        // K16: without its metadata every topic would look deleted, and its files would be removed.
        Some(_) if !metadata => {
            return Err(Refusal::new(
                format!("{} has been used before, and its metastore/state.redb is missing", data.root.display()),
                "restore the whole data directory from one backup, or start on an empty one",
            ));
        }
        // A first start makes them before the store id: they were there. Made anew, offsets would begin at 0 again, and
        // what was accepted and not dispatched would be forgotten without a word.
        Some(_) if !data.topics().is_dir() || !data.ingress().is_dir() => {
            let missing = if data.topics().is_dir() { data.ingress() } else { data.topics() };
            return Err(Refusal::new(
                format!("{} has been used before, and {} is missing", data.root.display(), missing.display()),
                "restore the whole data directory from one backup, or start on an empty one; to go on without what it held, \
                 make it again, empty, and of `topics` remove `stored` beside it too",
            ));
        }
        None if messages => {
            return Err(Refusal::new(
                format!("{} holds messages, and its store-id file is missing", data.root.display()),
                "restore the whole data directory from one backup, or start on an empty one",
            ));
        }
        _ => {}
    }
    let stored_node_id = read_optional(&data.node_id())?.map(|text| text.trim().to_owned());
    if let Some(Err(why)) = stored_node_id.as_deref().map(check_node_id) {
        return Err(Refusal::new(
            format!("{} does not hold a node id: it {why}", data.node_id().display()),
            "write the node's id into it again, or remove it to take cluster.node_id or the host name",
        ));
    }
    let node_id = choose_node_id(stored_node_id.as_deref(), configured, host_name, &data.root)?;
    Ok(IdentityPlan { store_id, stored_node_id, node_id })
}

/// E50: the stored id wins over the host name; a configured one must agree with it.
fn choose_node_id(
    stored: Option<&str>,
    configured: Option<&str>,
    host_name: &str,
    root: &Path,
) -> Result<String, Refusal> {
    match (stored, configured) {
        (Some(stored), Some(configured)) if stored != configured => Err(Refusal::setting(
            format!("cluster.node_id ({configured}) is not the id that {} was started with ({stored})", root.display()),
            "drop cluster.node_id or set it back; a second node needs a data directory of its own",
        )),
        (Some(stored), _) => Ok(stored.to_owned()),
        (None, Some(configured)) => Ok(configured.to_owned()),
        (None, None) => match check_node_id(host_name) {
            Ok(()) => Ok(host_name.to_owned()),
            Err(why) => {
                Err(Refusal::setting(format!("the host name cannot be the node's id: it {why}"), "set cluster.node_id"))
            }
        },
    }
}

impl IdentityPlan {
    pub fn node_id(&self) -> &str {
        &self.node_id
    }

    /// Nothing has ever been stored here.
    pub fn first_start(&self) -> bool {
        self.store_id.is_none()
    }

    /// Writes what is missing, durably. Last step of a first start: a store id stands for a directory that is whole.
    pub fn carry_out(self, data: &DataDir) -> Result<Identity, Refusal> {
        let failed = |error: io::Error| not_writable(&data.root, &error);
        if self.stored_node_id.is_none() {
            write_durably(&data.root, "node-id", &format!("{}\n", self.node_id)).map_err(failed)?;
        }
        let first_start = self.store_id.is_none();
        let store_id = match self.store_id {
            Some(id) => id,
            None => {
                let id = random_id().map_err(failed)?;
                write_durably(&data.root, "store-id", &format!("{id:016x}\n")).map_err(failed)?;
                id
            }
        };
        Ok(Identity { store_id, node_id: self.node_id, first_start })
    }
}

pub(super) fn parse_store_id(text: &str) -> Option<u64> {
    let text = text.trim();
    let well_formed = text.len() == 16 && text.bytes().all(|b| b.is_ascii_hexdigit());
    well_formed.then(|| u64::from_str_radix(text, 16).ok()).flatten().filter(|id| *id != 0)
}

pub fn random_id() -> io::Result<u64> {
    let mut source = File::open("/dev/urandom")?;
    loop {
        let mut bytes = [0u8; 8];
        source.read_exact(&mut bytes)?;
        match u64::from_le_bytes(bytes) {
            0 => {} // stands for "none" in headers
            id => return Ok(id),
        }
    }
}

/// Only "not found" means absent (lesson O3.2).
fn read_optional(path: &Path) -> Result<Option<String>, Refusal> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Refusal::new(
            format!("cannot read {}: {error}", path.display()),
            "check its owner, its mode and the disk",
        )),
    }
}

fn holds_entries(directory: &Path) -> io::Result<bool> {
    match fs::read_dir(directory) {
        Ok(mut entries) => Ok(entries.next().is_some()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Written whole under another name, synced, renamed, directory synced.
fn write_durably(directory: &Path, name: &str, text: &str) -> io::Result<()> {
    let unnamed = directory.join(format!("{name}.new"));
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&unnamed)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&unnamed, directory.join(name))?;
    sync_directory(directory)
}

/// WAL directories found at start.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct IngressDirectories {
    /// Ascending. A number at or above the shard count is adopted by shard `n mod shards`.
    pub numbers: Vec<ShardId>,
}

impl IngressDirectories {
    /// Those without a shard of their own that shard `id` of `shards` drains: directory n goes to shard n mod shards (E18).
    pub fn adopted_by(&self, id: ShardId, shards: u16) -> Vec<u32> {
        let orphans = self.numbers.iter().filter(|n| **n >= shards && **n % shards == id);
        orphans.map(|n| u32::from(*n)).collect()
    }
}

pub fn list_ingress(data: &DataDir, warnings: &mut Vec<Warning>) -> Result<IngressDirectories, Refusal> {
    let ingress = data.ingress();
    let failed = |error: io::Error| {
        Refusal::new(format!("cannot list {}: {error}", ingress.display()), "check its owner, its mode and the disk")
    };
    let mut found = IngressDirectories::default();
    for entry in fs::read_dir(&ingress).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        match classify_ingress(&name) {
            IngressEntry::Wal(number) => found.numbers.push(number),
            IngressEntry::Drained => {} // empty of undispatched records: shard 0 removes it (E18)
            IngressEntry::Foreign => {
                let cause = format!("{} is nothing of ours and is left alone", ingress.join(name).display());
                warnings.push(Warning::new(cause, "move it away if nobody needs it there"));
            }
        }
    }
    found.numbers.sort_unstable();
    Ok(found)
}

enum IngressEntry {
    Wal(ShardId),
    Drained,
    Foreign,
}

fn classify_ingress(name: &OsStr) -> IngressEntry {
    let number = |text: &str| text.parse::<ShardId>().ok().filter(|number| number.to_string() == text);
    let Some(text) = name.to_str() else { return IngressEntry::Foreign };
    match (number(text), text.strip_suffix(".drained").and_then(number)) {
        (Some(number), _) => IngressEntry::Wal(number),
        (None, Some(_)) => IngressEntry::Drained,
        (None, None) => IngressEntry::Foreign,
    }
}
