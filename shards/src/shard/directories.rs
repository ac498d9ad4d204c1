//! Topic directories, which the partitions of several shards share. One shard looks after each, chosen by the
//! topic's name, so that two shards never prepare, set aside or remove it at the same time.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;

use super::{Inner, KeyedLocks};
use crate::api::{MetaCommand, MetaReply};
use crate::log::{DirectoryError, Retire, TopicDirectories, TopicEntry, TopicKind};
use crate::meta::{Address, Destination, Incarnation, ShardId, Snapshot};
use crate::metrics::SetAside;
use crate::peer::{LocalBoxFuture, NoLog, Reply, Request};
use crate::rt::{self, Queue};

/// Set-aside copies that the start names one by one.
const QUARANTINED_LOGGED_MAX: u64 = 20;

pub struct DirectoryKeeper {
    topics: TopicDirectories,
    /// Incarnations whose directory is known to be there and theirs.
    prepared: RefCell<BTreeSet<Incarnation>>,
    by_name: KeyedLocks<Arc<str>>,
    /// Incarnations that were live in this process, until their files are gone.
    former: RefCell<BTreeSet<Incarnation>>,
    /// What the sweep at start has left.
    set_aside: Cell<Option<SetAside>>,
}

impl DirectoryKeeper {
    pub fn new(topics: TopicDirectories) -> DirectoryKeeper {
        let by_name = KeyedLocks { locks: RefCell::default() };
        DirectoryKeeper {
            topics,
            prepared: RefCell::default(),
            by_name,
            former: RefCell::default(),
            set_aside: Cell::new(None),
        }
    }

    pub fn set_aside(&self) -> Option<SetAside> {
        self.set_aside.get()
    }

    pub fn topics(&self) -> &TopicDirectories {
        &self.topics
    }
}

/// The shard that looks after the directory of a topic name, whatever its incarnation.
fn keeper_of(name: &str, shards: ShardId) -> ShardId {
    let hash =
        name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3));
    ((hash >> 32) % u64::from(shards.max(1))) as ShardId
}

impl Inner {
    fn keeps(&self, name: &str) -> bool {
        keeper_of(name, self.snapshot.borrow().shards) == self.options.id
    }

    /// Makes sure, once per incarnation, that the topic's directory exists durably and carries its mark.
    pub(super) async fn ensure_directory(
        self: &Rc<Self>,
        topic: &Arc<str>,
        incarnation: Incarnation,
    ) -> Result<(), NoLog> {
        if self.directories.prepared.borrow().contains(&incarnation) {
            return Ok(());
        }
        if self.keeps(topic) {
            self.prepare_directory(topic, incarnation).await?;
        } else {
            let keeper = Address::local(keeper_of(topic, self.snapshot.borrow().shards));
            let request = Request::PrepareTopic { topic: topic.clone(), incarnation };
            match self.carrier.call(keeper, request).await {
                Ok(Reply::Prepared(prepared)) => prepared?,
                Ok(_) | Err(_) => {
                    let text = format!("shard {} did not prepare the topic's directory", keeper.shard);
                    return Err(NoLog::Failed(text));
                }
            }
        }
        if self.snapshot.borrow().topic_of(incarnation).is_some() {
            self.directories.prepared.borrow_mut().insert(incarnation);
        }
        Ok(())
    }

    /// On the keeper. Only the incarnation that is live by this shard's own snapshot is ever prepared: snapshots
    /// only go forward here, so an older one can never push a newer one's directory aside.
    pub(super) async fn prepare_directory(
        self: &Rc<Self>,
        topic: &Arc<str>,
        incarnation: Incarnation,
    ) -> Result<(), NoLog> {
        let _name = self.directories.by_name.of(topic).enter().await;
        if self.snapshot.borrow().topic(topic).map(|live| live.incarnation) != Some(incarnation) {
            let shard = self.options.id;
            let text = format!("incarnation {incarnation} of topic {topic} is not the live one on shard {shard}");
            return Err(NoLog::Failed(text));
        }
        let retire = RetireEverywhere(self.clone());
        Ok(self.directories.topics.prepare(topic, incarnation, &retire).await?)
    }

    /// Waits until the snapshot has lost the incarnation, and nothing of it is written here any more.
    pub(super) async fn close_topic(&self, incarnation: Incarnation) {
        loop {
            let changed = self.changed.notified();
            if self.snapshot.borrow().topic_of(incarnation).is_none() {
                break;
            }
            changed.await;
        }
        self.directories.prepared.borrow_mut().remove(&incarnation);
        self.queues().topic_removed(incarnation).await;
        self.partitions.left(incarnation).await;
    }

    /// Removes the directories of topics that the new snapshot has lost, as their keeper.
    pub(super) fn purge_deleted(&self, previous: &Snapshot, now: &Snapshot) {
        for (incarnation, topic) in &previous.by_incarnation {
            if now.topic_of(*incarnation).is_some() {
                continue;
            }
            self.directories.prepared.borrow_mut().remove(incarnation);
            if !self.keeps(&topic.name) {
                continue;
            }
            self.directories.former.borrow_mut().insert(*incarnation);
            self.purge_in_background(topic.name.clone(), *incarnation);
        }
    }

    fn purge_in_background(&self, name: Arc<str>, incarnation: Incarnation) {
        let inner = self.strong();
        rt::spawn(Queue::Background, async move { inner.purge(&name, incarnation).await });
    }

    /// Removes what is left of a deleted incarnation, once the control thread has confirmed that it is gone: the
    /// local view alone never destroys data (S10, lesson N12). Returns whether nothing is left.
    async fn purge(self: &Rc<Self>, name: &Arc<str>, incarnation: Incarnation) -> bool {
        let question = MetaCommand::ConfirmGone { name: name.to_string(), incarnation: Some(incarnation) };
        match self.carrier.call(Address::CONTROL, Request::Meta(question)).await {
            Ok(Reply::Meta(MetaReply::Gone)) => {}
            answer => {
                tracing::warn!(topic = %name, %incarnation, ?answer,
                    "purge deferred: the topic incarnation is not confirmed gone; its files go at the next start");
                return false;
            }
        }
        let _name = self.directories.by_name.of(name).enter().await;
        close_everywhere(self, incarnation).await;
        let purged = self.directories.topics.purge(name, incarnation).await;
        match &purged {
            Ok(()) => drop(self.directories.former.borrow_mut().remove(&incarnation)),
            Err(error) => tracing::warn!(topic = %name, %incarnation, %error,
                "the files of a deleted topic could not be removed; the next start tries again"),
        }
        if self.snapshot.borrow().topic(name).is_none() {
            self.directories.by_name.forget(name);
        }
        purged.is_ok()
    }

    /// At start: directories of incarnations that the snapshot does not know are removed once confirmed gone; those
    /// without a mark are left for a person (S10 to S13).
    pub(super) fn sweep_directories(&self) {
        let inner = self.strong();
        rt::spawn(Queue::Background, async move {
            let entries = match inner.directories.topics.inventory().await {
                Ok(entries) => entries,
                Err(error) => return tracing::warn!(%error, "the topic directories could not be swept"),
            };
            inner.sweep_proofs(&entries).await;
            let mut found = SetAside::default();
            for entry in entries {
                if !inner.keeps(&entry.topic) {
                    continue;
                }
                for (name, bytes) in &entry.quarantined {
                    (found.copies, found.bytes) = (found.copies + 1, found.bytes + bytes);
                    if found.copies <= QUARANTINED_LOGGED_MAX {
                        tracing::error!(kind = "partition", topic = %entry.topic, dir = %entry.path.join(name).display(),
                            bytes, "quarantined partition copy on this node");
                    }
                }
                let (incarnation, live) = match entry.kind {
                    TopicKind::Marked(incarnation) => {
                        (incarnation, inner.snapshot.borrow().topic_of(incarnation).is_some())
                    }
                    TopicKind::Stale(incarnation) => (incarnation, false),
                    TopicKind::Unmarked => {
                        let live = inner.snapshot.borrow().topic(&entry.topic).map(|topic| topic.incarnation);
                        match live {
                            Some(live) => tracing::error!(topic = %entry.topic, dir = %entry.path.display(), %live,
                                "the directory of a topic has no readable incarnation mark; it is neither served nor \
                                 changed. If its records are this topic's, write the live incarnation into its marker"),
                            None => tracing::warn!(topic = %entry.topic, dir = %entry.path.display(),
                                "a topic directory without a readable incarnation mark was left in place"),
                        }
                        found.orphans += 1;
                        continue;
                    }
                };
                if !live && !entry.checked && inner.may_be_the_live_one(&entry, incarnation) {
                    match entry.kind {
                        TopicKind::Stale(_) => found.copies += 1,
                        TopicKind::Marked(_) | TopicKind::Unmarked => found.orphans += 1,
                    }
                } else if !live {
                    let gone = inner.purge(&Arc::from(entry.topic.as_str()), incarnation).await;
                    match entry.kind {
                        _ if gone => {}
                        TopicKind::Stale(_) => found.copies += 1,
                        TopicKind::Marked(_) | TopicKind::Unmarked => found.orphans += 1,
                    }
                }
            }
            if found.copies > 0 {
                tracing::error!(
                    copies = found.copies,
                    bytes = found.bytes,
                    "copies were set aside on this node: look at them, keep what matters, remove them by hand"
                );
            }
            inner.directories.set_aside.set(Some(found));
        });
    }
}

impl Inner {
    /// At start: topics that have files here get their proof, those of an older release too; proofs without a topic and
    /// without files go.
    async fn sweep_proofs(self: &Rc<Self>, entries: &[TopicEntry]) {
        let proven = match self.directories.topics.proven().await {
            Ok(proven) => proven,
            Err(error) => return tracing::warn!(%error, "the proofs below stored could not be swept"),
        };
        let live = |incarnation| self.snapshot.borrow().topic_of(incarnation).is_some();
        let known: BTreeSet<Incarnation> = proven.iter().map(|(_, incarnation)| *incarnation).collect();
        for entry in entries.iter().filter(|entry| self.keeps(&entry.topic)) {
            let TopicKind::Marked(incarnation) = entry.kind else { continue };
            if live(incarnation) && !known.contains(&incarnation) {
                if let Err(error) = self.directories.topics.prove(&entry.topic, incarnation).await {
                    tracing::warn!(topic = %entry.topic, %error,
                        "no proof could be made that a topic is in use; its loss while the broker is down would not be noticed");
                }
            }
        }
        // What has files goes together with them.
        let has_files: BTreeSet<Incarnation> = entries.iter().filter_map(TopicEntry::incarnation).collect();
        for (topic, incarnation) in proven {
            if self.keeps(&topic) && !has_files.contains(&incarnation) && !live(incarnation) {
                self.purge(&Arc::from(topic), incarnation).await;
            }
        }
    }

    /// Topics that have had files on this node and have none any more: they are not served, and a person is told.
    pub(super) async fn notice_lost_topics(self: &Rc<Self>, snapshot: &Snapshot, entries: &[TopicEntry]) {
        let proven = match self.directories.topics.proven().await {
            Ok(proven) => proven,
            Err(error) => return tracing::warn!(%error, "whether the files of a topic are gone could not be looked up"),
        };
        let present: BTreeSet<(&str, TopicKind)> = entries.iter().map(|entry| (&*entry.topic, entry.kind)).collect();
        for (topic, incarnation) in proven {
            if present.contains(&(&*topic, TopicKind::Marked(incarnation))) || snapshot.topic_of(incarnation).is_none()
            {
                continue;
            }
            let mine: Vec<u32> = snapshot.partitions_on(incarnation, self.options.id).collect();
            if mine.is_empty() {
                continue;
            }
            match self.directories.topics.marker(&topic, incarnation).await {
                // What is in doubt, the sweep names.
                Ok(_) | Err(DirectoryError::InDoubt(_)) => {}
                Err(DirectoryError::Lost(error)) => {
                    for &partition in &mine {
                        if let Some(partition) = self.partition(Destination { incarnation, partition }) {
                            partition.unusable.set(true);
                        }
                    }
                    tracing::error!(topic, partitions = mine.len(), %error, "the files of a topic are gone: it is not served");
                }
                Err(error) => {
                    tracing::warn!(topic, %error, "whether the files of a topic are gone could not be looked up")
                }
            }
        }
    }

    /// Whether a directory under a live name, whose marker states `found` without a checksum, may be the live
    /// incarnation's own: one flipped bit would look like this. Then it is kept, and a person is told.
    fn may_be_the_live_one(&self, entry: &TopicEntry, found: Incarnation) -> bool {
        let live = self.snapshot.borrow().topic(&entry.topic).map(|topic| topic.incarnation);
        let Some(live) = live.filter(|_| !self.directories.former.borrow().contains(&found)) else { return false };
        tracing::error!(topic = %entry.topic, dir = %entry.path.display(), %found, %live,
            "a topic directory states another incarnation than the live one, and no checksum proves it; it is neither \
             served nor removed. If its records are this topic's, write the live incarnation into its marker");
        true
    }
}

async fn close_everywhere(inner: &Rc<Inner>, incarnation: Incarnation) {
    inner.close_topic(incarnation).await;
    for sibling in inner.siblings() {
        if inner.carrier.call(sibling, Request::CloseTopic { incarnation }).await.is_err() {
            tracing::warn!(shard = sibling.shard, %incarnation, "a shard did not confirm that it closed a deleted topic");
        }
    }
}

/// Before a dead incarnation's directory is set aside, every shard has closed it and dropped its state (S6, S7).
struct RetireEverywhere(Rc<Inner>);

impl Retire for RetireEverywhere {
    fn close_logs(&self, old: Incarnation) -> LocalBoxFuture<'_, ()> {
        let inner = self.0.clone();
        Box::pin(async move { close_everywhere(&inner, old).await })
    }

    fn was_live(&self, old: Incarnation) -> bool {
        self.0.directories.former.borrow().contains(&old)
    }
}
