//! The metadata files of simulated nodes, older copies of them, and what every state machine held at every index.

use std::cell::RefCell;
use std::collections::hash_map::DefaultHasher;
use std::collections::BTreeMap;
use std::fs;
use std::hash::{Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use narad::control::{Batch, CopyImage, State, Storage, Store};
use narad_shards::rt::sim::Rng;

use crate::ledger::{Rule, Violation};

const STATE: &str = "state.redb";
const LOG: &str = "consensus.redb";
const COPY: &str = "copy";
const NEWER: &str = "newer.redb";

/// One directory a node, in memory where the machine has such a place, removed with this.
pub struct MetadataFiles {
    root: PathBuf,
    copies: RefCell<BTreeMap<usize, Copied>>,
}

#[derive(Clone, Copy)]
struct Copied {
    applied_index: u64,
    last_index: u64,
}

impl MetadataFiles {
    pub fn new(nodes: usize) -> MetadataFiles {
        let in_memory = Path::new("/dev/shm");
        let base = if in_memory.is_dir() { in_memory.to_owned() } else { std::env::temp_dir() };
        // One world a thread at a time; the name is logged, and two runs of a seed log the same.
        let thread = std::thread::current().id();
        let root = base.join(format!("narad-simulate-{}-{thread:?}", std::process::id()));
        let _ = fs::remove_dir_all(&root); // of a world that has leaked
        for node in 0..nodes {
            let directory = root.join(node.to_string()).join(COPY);
            if let Err(error) = fs::create_dir_all(&directory) {
                panic!("{}: {error}", directory.display());
            }
        }
        MetadataFiles { root, copies: RefCell::default() }
    }

    pub fn of(&self, node: usize) -> PathBuf {
        self.root.join(node.to_string())
    }

    /// As they are at this instant: what redb has synced, for it writes nothing between two transactions.
    pub fn copy(&self, node: usize, applied_index: u64, last_index: u64) {
        let directory = self.of(node);
        let copied = [STATE, LOG].map(|file| fs::copy(directory.join(file), directory.join(COPY).join(file)));
        if copied.iter().all(Result::is_ok) {
            self.copies.borrow_mut().insert(node, Copied { applied_index, last_index });
        }
    }

    /// Right before a process ends: what a kill leaves behind. redb closes its files in order when the process is dropped.
    pub fn before_end(&self, node: usize) {
        let directory = self.of(node);
        for file in [STATE, LOG] {
            let kept = directory.join(COPY).join(format!("killed-{file}"));
            // A first start may have made none yet.
            if fs::copy(directory.join(file), &kept).is_err() {
                let _ = fs::remove_file(&kept);
            }
        }
    }

    /// The process was killed, not closed.
    pub fn after_kill(&self, node: usize) {
        let directory = self.of(node);
        for file in [STATE, LOG] {
            // There is none where there was none.
            let _ = fs::rename(directory.join(COPY).join(format!("killed-{file}")), directory.join(file));
        }
    }

    fn restore(&self, node: usize, file: &str) -> io::Result<u64> {
        let directory = self.of(node);
        fs::copy(directory.join(COPY).join(file), directory.join(file))
    }

    pub fn put_back_state(&self, node: usize) -> Option<String> {
        let copied = *self.copies.borrow().get(&node)?;
        let directory = self.of(node);
        fs::copy(directory.join(STATE), directory.join(COPY).join(NEWER)).ok()?;
        self.restore(node, STATE).ok()?;
        Some(format!("the state of entry {}", copied.applied_index))
    }

    /// What was there before [`MetadataFiles::put_back_state`].
    pub fn take_state_back(&self, node: usize) {
        let directory = self.of(node);
        if let Err(error) = fs::rename(directory.join(COPY).join(NEWER), directory.join(STATE)) {
            panic!("{}: {error}", directory.display());
        }
    }

    /// Only one that the state is ahead of.
    pub fn put_back_log(&self, node: usize) -> Option<String> {
        let copied = *self.copies.borrow().get(&node)?;
        let (store, state) = Store::open(&self.of(node)).ok()?;
        drop(store);
        let applied_index = state.applied_index();
        if applied_index <= copied.last_index {
            return None;
        }
        self.restore(node, LOG).ok()?;
        Some(format!("a log that ends at {} under the state of {applied_index}", copied.last_index))
    }

    pub fn put_back_all(&self, node: usize) -> Option<String> {
        let copied = *self.copies.borrow().get(&node)?;
        [STATE, LOG].iter().try_for_each(|file| self.restore(node, file).map(drop)).ok()?;
        Some(format!("everything, as of entry {}", copied.applied_index))
    }
}

impl Drop for MetadataFiles {
    fn drop(&mut self) {
        // Nothing of it is needed any more.
        let _ = fs::remove_dir_all(&self.root);
    }
}

/// What the state machines of all nodes have held, by index: the same, whoever applied it.
#[derive(Clone, Default)]
pub struct History {
    inner: Arc<Mutex<Seen>>,
}

#[derive(Default)]
struct Seen {
    digests: BTreeMap<u64, u64>,
    broken: Vec<Violation>,
}

impl History {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn broke(&self, rule: Rule, text: String) {
        self.seen().broken.push(Violation { rule, text });
    }

    pub fn take_broken(&self) -> Vec<Violation> {
        std::mem::take(&mut self.seen().broken)
    }

    fn holds(&self, state: &State) {
        let mut hasher = DefaultHasher::new();
        format!("{state:?}").hash(&mut hasher);
        let (index, digest) = (state.applied_index(), hasher.finish());
        let other = *self.seen().digests.entry(index).or_insert(digest);
        if other != digest {
            self.broke(Rule::Diverged, format!("two nodes differ at entry {index}; one of them has {state:?}"));
        }
    }
}

/// A store whose content is compared with that of the others.
pub struct Checked {
    store: Store,
    state: State,
    history: History,
    /// Planted: leaves changes out.
    skips: Option<Rng>,
}

impl Checked {
    pub fn new(store: Store, state: State, history: History, skips: Option<Rng>) -> Checked {
        history.holds(&state);
        Checked { store, state, history, skips }
    }
}

impl Storage for Checked {
    fn commit(&mut self, batch: &Batch) -> Result<(), String> {
        self.store.commit(batch)?;
        let skip = self.skips.as_mut().is_some_and(|rng| rng.chance(1, 20));
        self.state.absorb(batch.applied_index, if skip { &[] } else { &batch.changes });
        self.history.holds(&self.state);
        Ok(())
    }

    fn begin_image(&mut self) -> Result<CopyImage, String> {
        self.store.begin_image()
    }

    fn install_image(&mut self) -> Result<State, String> {
        let state = self.store.install_image()?;
        self.state = state.clone();
        self.history.holds(&state);
        Ok(state)
    }
}
