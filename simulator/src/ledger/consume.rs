//! What consumers were given and what became of their leases.

use narad_shards::api::{Delivery, SettleMode, SettleStatus};
use narad_shards::rt::Instant;

use super::{Boots, Copy, CopyId, Lease, Ledger, Outcome, Rule, Settled, UNSURE};
use crate::message::number_of;

impl Ledger {
    /// A consume through `node` that started at `asked`, in processes `boots`, was answered at `told` with this record
    /// under a lease.
    pub fn delivered(
        &mut self,
        (consumer, node): (usize, usize),
        delivery: &Delivery,
        boots: &Boots,
        asked: Instant,
        told: Instant,
    ) {
        self.counts.delivered += 1;
        let Some(id) = self.seen(delivery, node, asked, told, "delivered") else { return };
        let text = format!("consumer {consumer} got {} lease {:x}", self.name(id), delivery.nonce);
        self.note(told, text);
        let Some(visibility) = self.topics.get(&id.0).map(|topic| topic.visibility) else { return };
        let boot = self.boot_of(id, boots);
        let live_boot = boot == self.boot_now(id);
        let Some(copy) = self.copies.get_mut(&id) else { return };
        let mut broken = Vec::new();
        for lease in &copy.leases {
            if lease.nonce == delivery.nonce {
                broken.push((Rule::DoubleLease, format!("nonce {:x} was given out before", delivery.nonce)));
            }
            // Whichever was granted first was still live when the other was granted.
            let old_outlasts = lease.endings == 0 && told < lease.until;
            let new_outlasts = asked >= lease.told || lease.told < asked + visibility;
            if live_boot && lease.boot == boot && old_outlasts && new_outlasts {
                let text = format!("lease {:x} handed out while {:x} was live", delivery.nonce, lease.nonce);
                broken.push((Rule::DoubleLease, text));
            }
        }
        match copy.settled {
            Settled::Acked(when) if asked >= when || told < asked + visibility => {
                broken.push((Rule::AckUndone, format!("handed out again, its ack was confirmed at {when:?}")));
                copy.settled = Settled::No;
            }
            // Handed out, lapsed, handed out to another who acked, and only then told: legal, if it took that long.
            Settled::Acked(_) => {}
            // The same, where the ack was not confirmed (D4: a lease runs from the reserve, however late it is told).
            Settled::Maybe(since, _) if asked < since && told >= asked + visibility => {}
            Settled::Maybe(..) => {
                self.counts.acks_undone += 1;
                copy.settled = Settled::No;
            }
            Settled::No => {}
        }
        let until = asked + visibility;
        copy.leases.push(Lease { nonce: delivery.nonce, asked, told, until, endings: 0, ended: false, boot });
        for (rule, text) in broken {
            let text = format!("{}: {text}", self.name(id));
            self.violate(told, rule, text);
        }
    }

    /// A replay read through `node` returned this record.
    pub fn replayed(&mut self, node: usize, delivery: &Delivery, started: Instant, at: Instant) {
        if let Some(id) = self.seen(delivery, node, started, at, "replayed") {
            let text = format!("replay {}", self.name(id));
            self.note(at, text);
        }
    }

    /// Whether a node has heard of the topic of a copy.
    pub fn is_known(&self, node: usize, id: CopyId) -> bool {
        self.topics.get(&id.0).is_some_and(|topic| topic.known[node])
    }

    /// A record that was delivered before cannot be read.
    pub fn unreadable(&mut self, id: CopyId, at: Instant, now_ms: u64, why: &str) {
        let known = self.copies.contains_key(&id)
            && !self.expired(id, now_ms)
            && self.topics.get(&id.0).is_some_and(|t| t.delete_started.is_none());
        if known && self.allowances.honest {
            let text = format!("{}: {why}", self.name(id));
            self.violate(at, Rule::Unreadable, text);
        }
    }

    /// Checks identity and content of a record; registers its copy. `None` when it makes no sense to go on.
    fn seen(&mut self, delivery: &Delivery, node: usize, started: Instant, at: Instant, how: &str) -> Option<CopyId> {
        let id: CopyId = (delivery.incarnation, delivery.partition, delivery.offset);
        let number = number_of(delivery.key(), delivery.payload());
        let known =
            number.filter(|n| self.messages.get(n).is_some_and(|m| m.content.is(delivery.key(), delivery.payload())));
        let Some(number) = known else {
            let size = delivery.body.len();
            self.violate(at, Rule::WrongBytes, format!("{id:?} {how} {size} bytes that nobody produced (#{number:?})"));
            return None;
        };
        let mut broken = Vec::new();
        let message = &self.messages[&number];
        if message.outcome == Outcome::Refused {
            broken.push((Rule::RefusedDelivered, "its produce was refused".to_owned()));
        }
        match self.topics.get(&id.0) {
            None => broken.push((Rule::OtherIncarnation, "no topic ever had this incarnation".to_owned())),
            Some(topic) => {
                let produced_until = message.answered.unwrap_or(at);
                if topic.name != message.topic || *delivery.topic != *topic.name {
                    broken.push((Rule::OtherIncarnation, format!("it was produced to {}", message.topic)));
                } else if topic.created > produced_until {
                    broken.push((Rule::OtherIncarnation, "it was produced before this incarnation existed".to_owned()));
                } else if topic.gone[message.node].is_some_and(|gone| gone < message.started) {
                    broken.push((Rule::OtherIncarnation, "it was produced after this incarnation had gone".to_owned()));
                } else if topic.gone[node].is_some_and(|gone| gone < started) {
                    broken.push((Rule::OtherIncarnation, "its topic was deleted before it was asked for".to_owned()));
                }
            }
        }
        let explained = self.fault_since(message.started);
        if message.content.partition.is_some_and(|pinned| pinned != id.1) && !explained {
            broken.push((Rule::Misplaced, format!("it was pinned to {:?}", message.content.partition)));
        }
        match self.copies.get(&id) {
            Some(copy) if copy.number != number && self.allowances.honest => {
                broken.push((Rule::OffsetReused, format!("this offset held #{} before", copy.number)));
            }
            // A lie may have taken the commit, and the same record come back to the same offset later.
            Some(copy) if copy.timestamp_ms != delivery.timestamp_ms && self.allowances.honest => {
                broken.push((Rule::WrongBytes, format!("commit time was {} before", copy.timestamp_ms)));
            }
            Some(copy) if copy.number == number => {}
            // Nothing there so far, or what a lie has taken: its offset was given to another record.
            _ => {
                let copy = Copy {
                    number,
                    timestamp_ms: delivery.timestamp_ms,
                    leases: Vec::new(),
                    settled: Settled::No,
                    exposed: false,
                };
                self.copies.insert(id, copy);
                if !message.copies.is_empty() {
                    self.counts.duplicates += 1;
                    if !explained {
                        broken.push((Rule::Duplicate, format!("also stored at {:?}", message.copies)));
                    }
                }
                if let Some(message) = self.messages.get_mut(&number) {
                    message.copies.push(id);
                }
            }
        }
        for (rule, text) in broken {
            let text = format!("#{number} {how} from {id:?}: {text}");
            self.violate(at, rule, text);
        }
        Some(id)
    }

    fn fault_since(&self, started: Instant) -> bool {
        // Where bits rot, what a record was kept by may be gone at any time (E33).
        !self.allowances.honest || self.fault_ends.iter().any(|end| end.is_none_or(|end| end >= started))
    }

    pub(super) fn name(&self, id: CopyId) -> String {
        let topic = self.topics.get(&id.0).map_or("?", |topic| &topic.name);
        let number = self.copies.get(&id).map_or(0, |copy| copy.number);
        format!("{topic}/{}@{} #{number}", id.1, id.2)
    }

    /// A settle is on its way. Returns what `settle_answered` needs to know of the time before it.
    pub fn settle_started(&mut self, id: CopyId, nonce: u64, mode: SettleMode, at: Instant) -> Settled {
        let Some(copy) = self.copies.get_mut(&id) else { return Settled::No };
        let before = copy.settled;
        if mode != SettleMode::Extend {
            copy.leases.iter_mut().filter(|lease| lease.nonce == nonce).for_each(|lease| lease.endings += 1);
        }
        match before {
            Settled::No if mode == SettleMode::Ack => copy.settled = Settled::Maybe(at, nonce),
            // Two leases' acks under way: the answer to neither takes the other one back.
            Settled::Maybe(_, by) if mode == SettleMode::Ack && by != nonce => copy.settled = Settled::Maybe(at, 0),
            _ => {}
        }
        before
    }

    /// The answer to a settle that started at `started` in processes `boots`; `None` when none came.
    pub fn settle_answered(
        &mut self,
        (id, nonce, mode): (CopyId, u64, SettleMode),
        before: Settled,
        boots: &Boots,
        started: Instant,
        (at, now_ms): (Instant, u64),
        status: Option<SettleStatus>,
    ) {
        let text = format!("{mode:?} {} lease {nonce:x}: {status:?}", self.name(id));
        self.note(at, text);
        let deleted = self.topics.get(&id.0).is_none_or(|topic| topic.delete_started.is_some());
        let Some(visibility) = self.topics.get(&id.0).map(|topic| topic.visibility) else { return };
        let boot = boots[self.owners.of(id)];
        let (same_process, expired) = (boot == self.boot_now(id), self.expired(id, now_ms));
        let Some(copy) = self.copies.get_mut(&id) else { return };
        // Another ack that is under way is not taken back by the answer to this one (C20).
        let unanswered = matches!(copy.settled, Settled::Maybe(_, by) if by == nonce);
        let newer = copy.leases.iter().find(|lease| lease.nonce == nonce).and_then(|own| {
            // A nack may itself be why there is a newer lease, unless that one was known before the nack was sent.
            let since = |told| mode == SettleMode::Ack || started >= told;
            let newer = |other: &Lease| {
                other.boot == own.boot && own.boot != UNSURE && other.asked > own.told && since(other.told)
            };
            copy.leases.iter().any(newer).then_some(own.nonce)
        });
        let Some(own) = copy.leases.iter_mut().find(|lease| lease.nonce == nonce) else {
            if status == Some(SettleStatus::Done) {
                let text = format!("{mode:?} {}: nonce {nonce:x} was made up", self.name(id));
                self.violate(at, Rule::LateSettleAccepted, text);
            }
            return;
        };
        let mut broken = None;
        match status {
            Some(SettleStatus::Done) => {
                if own.boot != boot && own.boot != UNSURE {
                    broken = Some((Rule::LateSettleAccepted, "its process had ended"));
                } else if own.ended {
                    broken = Some((Rule::LateSettleAccepted, "it had been acked or nacked before"));
                } else if newer.is_some() {
                    broken = Some((Rule::LateSettleAccepted, "another lease had been handed out since"));
                }
                own.ended |= mode != SettleMode::Extend;
                match mode {
                    // An answer that left just before a crash: the ack may have gone with it.
                    SettleMode::Ack if !same_process => copy.settled = Settled::Maybe(at, nonce),
                    SettleMode::Ack => {
                        self.counts.acked += 1;
                        copy.settled = Settled::Acked(at);
                    }
                    SettleMode::Extend => own.until = own.until.max(started + visibility),
                    _ => {}
                }
            }
            Some(SettleStatus::LeaseGone) => {
                let others = own.endings - u32::from(mode != SettleMode::Extend);
                let live = own.boot == boot && same_process && others == 0 && at < own.until && newer.is_none();
                if live && !deleted && !expired {
                    broken = Some((Rule::LiveLeaseRefused, "answered 410"));
                }
                if mode == SettleMode::Ack && before == Settled::No && unanswered {
                    copy.settled = Settled::No;
                }
            }
            Some(SettleStatus::NotOwner | SettleStatus::OwnerDown) => {
                own.endings -= u32::from(mode != SettleMode::Extend);
                if mode == SettleMode::Ack && before == Settled::No && unanswered {
                    copy.settled = Settled::No;
                }
            }
            Some(SettleStatus::Unanswered) | None => {
                if mode == SettleMode::Ack && copy.settled == Settled::No {
                    copy.settled = Settled::Maybe(at, nonce);
                }
            }
        }
        if let Some((rule, text)) = broken {
            let text = format!("{mode:?} {} lease {nonce:x}: {text}", self.name(id));
            self.violate(at, rule, text);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use narad_shards::meta::{Incarnation, TopicMeta};

    use super::super::Allowances;
    use super::*;

    #[test]
    fn c20_the_answer_to_one_leases_ack_says_nothing_about_anothers() {
        let (id, boots) = ((Incarnation(1), 0, 7), vec![0]);
        let at = |ms: u64| Instant(ms * 1_000_000);
        let patience = Duration::from_secs(1);
        let allowances =
            Allowances { honest: true, disk_errors: false, killed_acks: patience, power_cut_acks: patience };
        let mut ledger = Ledger::new(allowances, 1, false);
        let topic = TopicMeta {
            name: "orders".into(),
            incarnation: id.0,
            partitions: 1,
            retention_ms: 0,
            visibility_timeout_ms: 100,
            max_in_flight_per_partition: 10,
            max_acked_ahead_per_partition: 10,
            created_at_ms: 0,
            owner: None,
        };
        ledger.topic_created(&topic, at(0));
        let lease = |nonce, asked: Instant| {
            let until = asked + Duration::from_millis(100);
            Lease { nonce, asked, told: asked, until, endings: 0, ended: false, boot: 0 }
        };
        let leases = vec![lease(1, at(0)), lease(2, at(200))];
        ledger.copies.insert(id, Copy { number: 1, timestamp_ms: 0, leases, settled: Settled::No, exposed: false });
        let ack = |nonce| (id, nonce, SettleMode::Ack);
        let first = ledger.settle_started(id, 1, SettleMode::Ack, at(210));
        let second = ledger.settle_started(id, 2, SettleMode::Ack, at(220));
        ledger.settle_answered(ack(2), second, &boots, at(220), (at(230), 0), None);
        ledger.settle_answered(ack(1), first, &boots, at(210), (at(240), 0), Some(SettleStatus::LeaseGone));
        assert!(matches!(ledger.copies[&id].settled, Settled::Maybe(..)), "the other one may have been served");
        assert!(ledger.violations.is_empty());
    }
}
