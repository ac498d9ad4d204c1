//! Which server was heard, from where, and when. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use narad_shards::rt::Instant;

/// A server is taken to be somewhere else, or gone, once nothing has come from where it was for so long: the same time
/// after which a member is dead. Before that, whoever speaks in its name may be a copy of its directory.
pub const SILENCE: Duration = Duration::from_secs(30);

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
    pub fn note(&mut self, raft_id: u64, address: &str, word: Word, now: Instant) -> Option<Arc<str>> {
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
        former
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
            let former = heard.note(7, address, word, seconds(at));
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
        heard.note(7, "old:1", Word::Answers, seconds(10));
        heard.note(7, "old:1", Word::Other, seconds(18));
        heard.note(7, "new:1", Word::Answers, seconds(19));
        assert_eq!(heard.unanswered_for(7, leads_since, now), Duration::from_secs(10));
        assert_eq!(heard.silent_for(7, leads_since, now), Duration::from_secs(2));
        // A leader judges by what has happened since it leads.
        assert_eq!(heard.silent_for(7, seconds(19), now), Duration::from_secs(1));
    }
}
