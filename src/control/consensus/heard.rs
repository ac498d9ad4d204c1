//! Which server was heard, from where, and when. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use narad_shards::rt::Instant;

/// A server is taken to be somewhere else, or gone, once nothing has come from where it was for so long: the same time
/// after which a member is dead. Before that, whoever speaks in its name may be a copy of its directory.
pub const SILENCE: Duration = Duration::from_secs(30);

/// Of servers outside the configuration so many are remembered, those heard last: newcomers, and whoever was removed and
/// does not know it. Each restart with an empty directory is another id.
const STRANGERS_MAX: usize = 64;

/// What a message says about its sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// A majority has found it where it is: it leads in this term or a later one, or its heartbeat was committed.
    Certain,
    /// It answers this leader.
    Answers,
    /// Anything else, like asking for a vote.
    Other,
}

#[derive(Clone, Debug)]
struct Heard {
    /// `host:port` that it advertises.
    address: Arc<str>,
    at: Instant,
    answered: Option<Instant>,
}

/// By raft id.
#[derive(Clone, Debug, Default)]
pub struct HeardFrom {
    servers: BTreeMap<u64, Heard>,
}

impl HeardFrom {
    /// Takes note of a message. What comes from another address than before counts only once the server has been
    /// [`SILENCE`] silent at that one, or is certain. Returns the former address when it is another one now.
    pub fn note(
        &mut self,
        raft_id: u64,
        address: &str,
        word: Word,
        now: Instant,
        is_server: impl Fn(u64) -> bool,
    ) -> Option<Arc<str>> {
        let answered = (word == Word::Answers).then_some(now);
        let mut former = None;
        if let Some(heard) = self.servers.get_mut(&raft_id) {
            if &*heard.address == address {
                heard.at = now;
                heard.answered = answered.or(heard.answered);
                return None;
            }
            if word != Word::Certain && now.saturating_since(heard.at) <= SILENCE {
                return None;
            }
            former = Some(heard.address.clone());
        }
        self.servers.insert(raft_id, Heard { address: Arc::from(address), at: now, answered });
        // Counted only when one more is there than before: not with every message.
        if former.is_none() && self.servers.len() > STRANGERS_MAX {
            self.forget_stranger(raft_id, is_server);
        }
        former
    }

    /// Forgets who has been silent longest of too many that the configuration lacks; not the one heard now.
    fn forget_stranger(&mut self, heard_now: u64, is_server: impl Fn(u64) -> bool) {
        let strangers: Vec<u64> = self.servers.keys().copied().filter(|id| !is_server(*id)).collect();
        let others = strangers.iter().filter(|id| **id != heard_now);
        let oldest = others.min_by_key(|id| (self.servers[*id].at, **id)).filter(|_| strangers.len() > STRANGERS_MAX);
        if let Some(oldest) = oldest.copied() {
            self.servers.remove(&oldest);
        }
    }

    pub fn address(&self, raft_id: u64) -> Option<&Arc<str>> {
        self.servers.get(&raft_id).map(|heard| &heard.address)
    }

    pub fn addresses(&self) -> BTreeMap<u64, Arc<str>> {
        self.servers.iter().map(|(raft_id, heard)| (*raft_id, heard.address.clone())).collect()
    }

    /// For how long it has answered nothing; of a leader that leads since `since`.
    pub fn unanswered_for(&self, raft_id: u64, since: Instant, now: Instant) -> Duration {
        let answered = self.servers.get(&raft_id).and_then(|heard| heard.answered);
        now.saturating_since(answered.map_or(since, |at| at.max(since)))
    }

    /// For how long nothing at all has come from where it is.
    pub fn silent_for(&self, raft_id: u64, since: Instant, now: Instant) -> Duration {
        now.saturating_since(self.servers.get(&raft_id).map_or(since, |heard| heard.at.max(since)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Instant {
        Instant(0) + Duration::from_secs(seconds)
    }

    #[test]
    fn a_server_is_where_it_was_until_it_was_silent_there_for_as_long_as_a_dead_member_or_it_is_certain() {
        let mut heard = HeardFrom::default();
        let mut say = |address: &str, word, at| {
            let former = heard.note(7, address, word, seconds(at), |_| false);
            (former.as_deref().map(str::to_owned), heard.address(7).unwrap().to_string())
        };
        assert_eq!(say("old:1", Word::Answers, 10), (None, "old:1".into()));
        for at in [11, 20, 40] {
            assert_eq!(say("new:1", Word::Other, at), (None, "old:1".into()), "a copy, for all that is known");
        }
        assert_eq!(say("new:1", Word::Other, 41), (Some("old:1".into()), "new:1".into()));
        assert_eq!(say("old:1", Word::Answers, 42), (None, "new:1".into()), "and it works both ways");
        assert_eq!(say("old:1", Word::Certain, 43), (Some("new:1".into()), "old:1".into()));
    }

    #[test]
    fn asking_for_votes_is_no_answer_and_a_word_from_elsewhere_is_none_of_that_server() {
        let mut heard = HeardFrom::default();
        let (leads_since, now) = (seconds(5), seconds(20));
        assert_eq!(heard.unanswered_for(7, leads_since, now), Duration::from_secs(15));
        heard.note(7, "old:1", Word::Answers, seconds(10), |_| false);
        heard.note(7, "old:1", Word::Other, seconds(18), |_| false);
        heard.note(7, "new:1", Word::Answers, seconds(19), |_| false);
        assert_eq!(heard.unanswered_for(7, leads_since, now), Duration::from_secs(10));
        assert_eq!(heard.silent_for(7, leads_since, now), Duration::from_secs(2));
        // A leader judges by what has happened since it leads.
        assert_eq!(heard.silent_for(7, seconds(19), now), Duration::from_secs(1));
    }

    #[test]
    fn servers_that_nobody_knows_are_remembered_up_to_a_number_and_those_of_the_configuration_always() {
        let mut heard = HeardFrom::default();
        let is_server = |id: u64| id < 100;
        for id in 0..90 {
            heard.note(id, "server:1", Word::Answers, seconds(id), is_server);
        }
        for id in 0..10_000 {
            heard.note(1000 + id, "stranger:1", Word::Other, seconds(200 + id), is_server);
            // This one goes on talking.
            heard.note(1000, "stranger:1", Word::Other, seconds(200 + id), is_server);
        }
        assert_eq!(heard.addresses().len(), 90 + STRANGERS_MAX);
        assert!((0..90).chain([1000, 10_999]).all(|id| heard.address(id).is_some()));
        assert!(heard.address(1001).is_none());
    }
}
