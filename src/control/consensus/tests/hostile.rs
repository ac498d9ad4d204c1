//! What a peer that is wrong in the head may say: each message is refused, or the library takes it without a panic.

use std::sync::Arc;

use narad_shards::rt::sim::{self, Rng};
use prost::Message as _;
use raft::eraftpb::{ConfState, Entry, Message, MessageType, Snapshot, SnapshotMetadata};
use raft::ReadState;

use super::rule::core;
use crate::control::consensus::codec::{decode_message, is_between_peers};
use crate::control::consensus::configuration::{bootstrap_id, Configuration, Server};
use crate::control::consensus::core::{changes_servers, Core};
use crate::control::consensus::disk::Changes;
use crate::control::consensus::settle::{settle, Hands};
use crate::control::Stopped;

fn message(kind: MessageType) -> Message {
    let mut message = Message { from: bootstrap_id("b"), to: bootstrap_id("a"), term: 7, ..Message::default() };
    message.set_msg_type(kind);
    message
}

fn refused(message: &Message) -> String {
    decode_message(&message.encode_to_vec()).err().unwrap_or_else(|| "taken".to_owned())
}

#[test]
fn terms_and_positions_that_nobody_has_counted_up_to_are_refused() {
    use MessageType::*;
    for kind in [MsgAppend, MsgRequestVote, MsgRequestPreVote, MsgHeartbeat, MsgAppendResponse, MsgTimeoutNow] {
        let sane = message(kind);
        assert_eq!(refused(&sane), "taken");
        for huge in [u64::MAX, u64::MAX - 1, 1 << 63] {
            for insane in [
                Message { term: huge, ..sane.clone() },
                Message { log_term: huge, ..sane.clone() },
                Message { index: huge, ..sane.clone() },
                Message { commit: huge, ..sane.clone() },
                Message { reject_hint: huge, ..sane.clone() },
                Message { request_snapshot: huge, ..sane.clone() },
                Message { commit_term: huge, ..sane.clone() },
            ] {
                assert!(refused(&insane).contains("nobody has counted up to"), "{insane:?}");
            }
        }
        for insane in [
            Message { term: 0, ..sane.clone() },
            Message { from: 0, ..sane.clone() },
            Message { to: 0, ..sane.clone() },
            Message { msg_type: 99, ..sane.clone() },
        ] {
            assert_ne!(refused(&insane), "taken", "{insane:?}");
        }
    }
}

#[test]
fn entries_that_are_no_sequence_are_refused() {
    let with = |entries: &[(u64, u64)]| {
        let mut append = message(MessageType::MsgAppend);
        (append.index, append.log_term) = (5, 3);
        append.entries =
            entries.iter().map(|(index, term)| Entry { index: *index, term: *term, ..Entry::default() }).collect();
        refused(&append)
    };
    assert_eq!(with(&[]), "taken");
    assert_eq!(with(&[(6, 3), (7, 7)]), "taken");
    for (index, log_term) in [(5, 0), (0, 3)] {
        let on_nothing = Message { index, log_term, ..message(MessageType::MsgAppend) };
        assert!(refused(&on_nothing).starts_with("what follows on"), "{index} {log_term}");
    }
    for wrong in [
        &[(5, 3)][..],
        &[(7, 3)],
        &[(1, 3)],
        &[(6, 3), (6, 3)],
        &[(6, 3), (8, 3)],
        &[(6, 2)],
        &[(6, 5), (7, 4)],
        &[(6, 8)],
        &[(u64::MAX, 3)],
    ] {
        assert!(with(wrong).starts_with("entry "), "{wrong:?}");
    }
}

fn servers(voters: &[&str], learners: &[&str]) -> Configuration {
    let server =
        |name: &&str, voter| (bootstrap_id(name), Server { name: (*name).to_owned(), voter, ..Server::default() });
    let all = voters.iter().map(|name| server(name, true)).chain(learners.iter().map(|name| server(name, false)));
    Configuration { index: 9, servers: all.collect() }
}

fn snapshot(index: u64, term: u64, told: ConfState, data: Vec<u8>) -> Message {
    let metadata = Some(SnapshotMetadata { conf_state: Some(told), index, term });
    Message { snapshot: Some(Snapshot { data, metadata }), ..message(MessageType::MsgSnapshot) }
}

#[test]
fn a_snapshot_that_contradicts_itself_is_refused() {
    let kept = servers(&["a", "b"], &["c"]);
    let data = |kept: &Configuration| serde_json::to_vec(kept).unwrap();
    assert_eq!(refused(&snapshot(9, 3, kept.conf_state(), data(&kept))), "taken");
    let mut outgoing = kept.conf_state();
    outgoing.voters_outgoing = vec![1];
    let nobody = Configuration::default();
    let without_us = servers(&["b", "c"], &[]);
    let all_learn = servers(&[], &["a", "b"]);
    for (what, wrong) in [
        ("no index", snapshot(0, 3, kept.conf_state(), data(&kept))),
        ("no term", snapshot(9, 0, kept.conf_state(), data(&kept))),
        ("a term of the future", snapshot(9, 8, kept.conf_state(), data(&kept))),
        ("an index beyond all", snapshot(u64::MAX, 3, kept.conf_state(), data(&kept))),
        ("garbage", snapshot(9, 3, kept.conf_state(), b"garbage".to_vec())),
        ("nothing", snapshot(9, 3, kept.conf_state(), Vec::new())),
        ("other servers", snapshot(9, 3, servers(&["a", "b", "c"], &[]).conf_state(), data(&kept))),
        ("a change half done", snapshot(9, 3, outgoing, data(&kept))),
        ("no servers", snapshot(9, 3, nobody.conf_state(), data(&nobody))),
        ("without the receiver", snapshot(9, 3, without_us.conf_state(), data(&without_us))),
        ("no voter", snapshot(9, 3, all_learn.conf_state(), data(&all_learn))),
        ("no snapshot at all", message(MessageType::MsgSnapshot)),
    ] {
        assert_ne!(refused(&wrong), "taken", "{what}");
    }
}

/// Has no opinion on what is right: half of what it is told comes from nowhere.
struct Quiet;

impl Hands for Quiet {
    async fn store(&mut self, _changes: Arc<Changes>) -> Result<(), Stopped> {
        Ok(())
    }

    async fn install(&mut self, _core: &Core, _index: u64) -> Result<(), Stopped> {
        Ok(())
    }

    fn send(&mut self, _core: &Core, _messages: Vec<Message>) {}

    fn may_read(&mut self, _states: Vec<ReadState>) {}

    async fn apply(&mut self, core: &mut Core, entries: Vec<Entry>) -> Result<(), Stopped> {
        for entry in entries.iter().filter(|entry| changes_servers(entry)) {
            core.apply_change(entry);
        }
        Ok(())
    }
}

/// Numbers as they occur, and some that do not.
fn number(rng: &mut Rng) -> u64 {
    match rng.next_u64() % 16 {
        0 => rng.next_u64(),
        1 => u64::MAX - rng.next_u64() % 3,
        2 => (u64::MAX / 2).wrapping_add(rng.next_u64() % 3).wrapping_sub(1),
        _ => rng.next_u64() % 12,
    }
}

fn anything(rng: &mut Rng) -> Message {
    let ids = ["a", "b", "c", "stranger"].map(bootstrap_id);
    let id = |rng: &mut Rng| ids[(rng.next_u64() % 4) as usize];
    let mut message = Message {
        msg_type: (rng.next_u64() % 20) as i32,
        to: if rng.chance(1, 8) { id(rng) } else { ids[0] },
        from: id(rng),
        term: number(rng),
        log_term: number(rng),
        index: number(rng),
        commit: number(rng),
        reject: rng.chance(1, 2),
        reject_hint: number(rng),
        request_snapshot: if rng.chance(1, 4) { number(rng) } else { 0 },
        context: vec![1; (rng.next_u64() % 3) as usize * 8],
        ..Message::default()
    };
    let (mut index, mut term) = (message.index, message.log_term);
    for _ in 0..rng.next_u64() % 3 {
        let is_sane = rng.chance(7, 8);
        (index, term) =
            if is_sane { (index.wrapping_add(1), term.max(rng.next_u64() % 12)) } else { (number(rng), number(rng)) };
        message.entries.push(Entry { index, term, entry_type: (rng.next_u64() % 4) as i32, ..Entry::default() });
    }
    message
}

#[test]
fn nothing_that_a_peer_says_makes_the_library_panic() {
    sim::run(1, async {
        let (mut rng, mut taken) = (Rng::new(1), 0);
        for round in 0..400 {
            let mut core = core("a", &["a", "b", "c"]);
            if round % 2 == 1 {
                core.campaign();
                settle(&mut core, &mut Quiet).await.unwrap();
                // The others vote for it: first that they would, then that they do.
                for kind in [MessageType::MsgRequestPreVoteResponse, MessageType::MsgRequestVoteResponse] {
                    core.step(Message { term: 2, ..message(kind) }).unwrap();
                    settle(&mut core, &mut Quiet).await.unwrap();
                }
                assert!(core.leads());
            }
            for _ in 0..60 {
                let Ok(message) = decode_message(&anything(&mut rng).encode_to_vec()) else { continue };
                if !is_between_peers(&message) {
                    continue;
                }
                taken += 1;
                if core.step(message).is_err() {
                    break; // this node would stop, with the reason
                }
                core.tick();
                settle(&mut core, &mut Quiet).await.unwrap();
            }
        }
        assert!(taken > 2000, "{taken}");
    });
}
