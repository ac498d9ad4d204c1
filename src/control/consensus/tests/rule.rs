use std::sync::Arc;

use narad_shards::rt::sim;
use raft::eraftpb::{Entry, Message, MessageType};
use raft::ReadState;

use crate::control::consensus::configuration::{bootstrap_id, Configuration, Server};
use crate::control::consensus::core::Core;
use crate::control::consensus::disk::{Changes, Position, Stored};
use crate::control::consensus::settle::{settle, Hands};
use crate::control::Stopped;

/// Writes down what is done, and refuses to store when told to.
#[derive(Default)]
struct Notes {
    lines: Vec<String>,
    durable_last: u64,
    durable_vote: u64,
    refuse: bool,
}

impl Hands for Notes {
    async fn store(&mut self, changes: Arc<Changes>) -> Result<(), Stopped> {
        if self.refuse {
            return Err(Stopped::refused("refused".to_owned()));
        }
        self.durable_last = changes.entries.last().map_or(self.durable_last, |entry| entry.index);
        self.durable_vote = changes.hard_state.as_ref().map_or(self.durable_vote, |state| state.vote);
        self.lines.push("store".to_owned());
        Ok(())
    }

    async fn install(&mut self, _core: &Core, index: u64) -> Result<(), Stopped> {
        self.lines.push(format!("install {index}"));
        Ok(())
    }

    fn send(&mut self, _core: &Core, messages: Vec<Message>) {
        for message in messages {
            match message.get_msg_type() {
                // An acknowledgement reaches no further than the disk; a vote is on it.
                MessageType::MsgAppendResponse if !message.reject => assert!(message.index <= self.durable_last),
                MessageType::MsgRequestVoteResponse if !message.reject => assert_eq!(self.durable_vote, message.to),
                MessageType::MsgAppend => {
                    let last = message.entries.last().map_or(0, |entry| entry.index);
                    assert!(last <= self.durable_last, "sent entry {last}, durable up to {}", self.durable_last);
                }
                _ => {}
            }
            self.lines.push(format!("send {:?}", message.get_msg_type()));
        }
    }

    fn may_read(&mut self, _states: Vec<ReadState>) {}

    async fn apply(&mut self, _core: &mut Core, entries: Vec<Entry>) -> Result<(), Stopped> {
        for entry in entries {
            assert!(entry.index <= self.durable_last, "applied entry {} before it was durable", entry.index);
            self.lines.push(format!("apply {}", entry.index));
        }
        Ok(())
    }
}

pub fn core(me: &str, voters: &[&str]) -> Core {
    let servers: Vec<Server> =
        voters.iter().map(|name| Server { name: (*name).to_owned(), ..Server::default() }).collect();
    let stored = Stored {
        raft_id: bootstrap_id(me),
        start: Position { index: 1, term: 1 },
        hard_state: raft::eraftpb::HardState { term: 1, vote: 0, commit: 1 },
        configuration: Configuration::bootstrap(1, &servers).unwrap(),
        entries: Vec::new(),
    };
    Core::new(stored, 1).unwrap()
}

fn append(from: u64, to: u64, index: u64, commit: u64) -> Message {
    let mut message = Message {
        from,
        to,
        term: 2,
        log_term: if index == 2 { 1 } else { 2 },
        index: index - 1,
        commit,
        ..Message::default()
    };
    message.set_msg_type(MessageType::MsgAppend);
    message.entries = vec![Entry { term: 2, index, data: vec![1], ..Entry::default() }];
    message
}

#[test]
fn nothing_leaves_before_it_is_durable_and_a_refusing_disk_sends_nothing() {
    sim::run(1, async {
        let (a, b) = (bootstrap_id("a"), bootstrap_id("b"));
        let mut follower = core("a", &["a", "b", "c"]);
        let mut notes = Notes::default();
        let mut vote = Message { from: b, to: a, term: 2, log_term: 1, index: 1, ..Message::default() };
        vote.set_msg_type(MessageType::MsgRequestVote);
        follower.step(vote).unwrap();
        settle(&mut follower, &mut notes).await.unwrap();
        assert_eq!(notes.lines, ["store", "send MsgRequestVoteResponse"]);
        notes.lines.clear();
        follower.step(append(b, a, 2, 1)).unwrap();
        settle(&mut follower, &mut notes).await.unwrap();
        assert_eq!(notes.lines, ["store", "send MsgAppendResponse"]);
        notes.lines.clear();
        follower.step(append(b, a, 3, 2)).unwrap();
        settle(&mut follower, &mut notes).await.unwrap();
        assert_eq!(notes.lines, ["store", "send MsgAppendResponse", "apply 2"]);
        notes.lines.clear();
        // Stored, then sent, then applied: and not at all when it could not be stored.
        notes.refuse = true;
        follower.step(append(b, a, 4, 3)).unwrap();
        assert!(settle(&mut follower, &mut notes).await.is_err());
        assert!(notes.lines.is_empty(), "{:?}", notes.lines);
    });
}

#[test]
fn e36_a_node_that_lost_acknowledged_entries_stops_and_names_restored() {
    let (a, b) = (bootstrap_id("a"), bootstrap_id("b"));
    let mut follower = core("a", &["a", "b", "c"]);
    let mut heartbeat = Message { from: b, to: a, term: 2, commit: 1, ..Message::default() };
    heartbeat.set_msg_type(MessageType::MsgHeartbeat);
    follower.step(heartbeat.clone()).unwrap();
    heartbeat.commit = 9;
    // Meant for a directory that this one has replaced, or from a leader of the past: neither says anything of this log.
    follower.step(Message { to: 77, ..heartbeat.clone() }).unwrap();
    follower.step(Message { term: 1, ..heartbeat.clone() }).unwrap();
    let stopped = follower.step(heartbeat).unwrap_err();
    assert!(stopped.why.contains("up to entry 9, and it ends at entry 1"), "{}", stopped.why);
    assert!(stopped.why.contains("--restored"), "{}", stopped.why);
}

#[test]
fn e36_a_node_whose_cluster_has_forgotten_what_was_decided_stops_and_says_so() {
    sim::run(1, async {
        let (a, b) = (bootstrap_id("a"), bootstrap_id("b"));
        let follower = async || {
            let (mut follower, mut notes) = (core("a", &["a", "b", "c"]), Notes::default());
            for index in 2..=5 {
                follower.step(append(b, a, index, index)).unwrap();
            }
            settle(&mut follower, &mut notes).await.unwrap();
            assert_eq!(follower.committed(), 5);
            follower
        };
        // A leader of a later term that was started on a directory that ends at entry 3.
        let mut other = append(b, a, 4, 3);
        (other.term, other.entries[0].term) = (7, 7);
        let stopped = follower().await.step(other.clone()).unwrap_err();
        assert!(
            stopped.why.contains("another entry 4 than the one that this node holds as decided"),
            "{}",
            stopped.why
        );
        assert!(stopped.why.contains("--restored"), "{}", stopped.why);
        // Later it has written on, and what it sends follows on an entry that is another one here.
        let mut later = append(b, a, 6, 5);
        (later.term, later.log_term, later.entries[0].term) = (7, 7, 7);
        let stopped = follower().await.step(later).unwrap_err();
        assert!(stopped.why.contains("another entry 5 than"), "{}", stopped.why);
        // A leader of the past, one that sends again what is known, and what was never decided contradict nobody.
        let mut follower = follower().await;
        (other.term, other.entries[0].term) = (1, 1);
        follower.step(other).unwrap();
        follower.step(append(b, a, 4, 3)).unwrap();
        follower.step(append(b, a, 6, 5)).unwrap();
        let mut notes = Notes { durable_last: 5, ..Notes::default() };
        settle(&mut follower, &mut notes).await.unwrap();
        let mut instead = append(b, a, 6, 5);
        (instead.term, instead.entries[0].term, instead.commit) = (7, 7, 6);
        // The next one may come before the first is on the disk.
        let mut next = append(b, a, 7, 6);
        (next.term, next.log_term, next.entries[0].term) = (7, 7, 7);
        follower.step(instead).unwrap();
        follower.step(next.clone()).unwrap();
        follower.step(Message { commit: 7, ..next }).unwrap();
        settle(&mut follower, &mut notes).await.unwrap();
        assert_eq!((follower.log().term_at(6), follower.committed()), (Some(7), 7));
    });
}

#[test]
fn a_leader_sends_an_entry_after_its_own_sync_and_a_lone_one_applies_it_then() {
    sim::run(1, async {
        let mut lone = core("a", &["a"]);
        let mut notes = Notes::default();
        lone.campaign();
        settle(&mut lone, &mut notes).await.unwrap();
        assert!(lone.is_established());
        assert_eq!(notes.lines, ["store", "apply 2"]);
        assert!(lone.propose(vec![7; 16], vec![1]).is_ok());
        settle(&mut lone, &mut notes).await.unwrap();
        assert_eq!(notes.lines, ["store", "apply 2", "store", "apply 3"]);
    });
}
