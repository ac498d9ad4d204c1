//! What was seen of the inside: statistics and probes.

use narad_shards::api::PartitionStats;
use narad_shards::meta::Incarnation;
use narad_shards::rt::Instant;

use super::{CopyId, Ledger, PartitionSeen, Rule, Settled};
use crate::broker::Probe;

impl Ledger {
    /// Statistics of one topic, asked for and answered in one process. Calls do not overlap.
    pub fn stats(&mut self, incarnation: Incarnation, stats: &[PartitionStats], at: Instant, now_ms: u64) {
        if self.topics.get(&incarnation).is_none_or(|topic| topic.delete_started.is_some()) {
            return;
        }
        for partition in stats {
            let place = (incarnation, partition.index);
            let before = self.partitions.get(&place).copied().unwrap_or_default();
            let boot = self.boot_now((incarnation, partition.index, 0));
            let (watermark, frontier) = (partition.high_watermark, partition.frontier);
            let mut broken = Vec::new();
            if watermark < before.high_watermark && self.allowances.honest {
                broken.push((Rule::Watermark, format!("went back from {} to {watermark}", before.high_watermark)));
            }
            if partition.next_offset < watermark {
                let text = format!("{watermark} lies behind the next offset {}", partition.next_offset);
                broken.push((Rule::Watermark, text));
            }
            if frontier > watermark {
                broken.push((Rule::Frontier, format!("{frontier} lies behind the watermark {watermark}")));
            }
            // A partition that nobody used may be loaded from its files again: where they rot, it is what they say.
            if frontier < before.frontier && before.boot == boot && self.allowances.honest {
                broken.push((Rule::Frontier, format!("went back from {} to {frontier}", before.frontier)));
            }
            if self.allowances.honest {
                let oldest = partition.oldest_offset;
                let place = |offset| (incarnation, partition.index, offset);
                let mut kept = self.copies.range(place(oldest)..place(frontier.max(oldest)));
                if let Some(((_, _, offset), _)) = kept.find(|(_, copy)| copy.settled == Settled::No) {
                    broken.push((Rule::Frontier, format!("{frontier} has passed {offset}, which nobody acked")));
                }
                let newest_removed = self.copies.range(place(0)..place(oldest)).next_back();
                if let Some((id, copy)) = newest_removed.filter(|(id, _)| !self.expired(**id, now_ms)) {
                    let text = format!("{} was removed, it was written at {} ms", id.2, copy.timestamp_ms);
                    broken.push((Rule::TooYoung, text));
                }
            }
            let seen = PartitionSeen { high_watermark: watermark, frontier, boot };
            self.partitions.insert(place, seen);
            for (rule, text) in broken {
                let name = self.topics.get(&incarnation).map_or("?", |topic| &topic.name);
                let text = format!("{name}/{}: {text}", partition.index);
                self.violate(at, rule, text);
            }
        }
    }

    pub fn probed(&mut self, probe: &Probe, at: Instant) {
        let mut broken = Vec::new();
        for (wal, checkpoint, undone) in &probe.checkpoints {
            if checkpoint > undone {
                let text = format!("WAL {wal}: checkpoint {checkpoint} has passed {undone}, which is not done");
                broken.push((Rule::Checkpoint, text));
            }
        }
        for (wal, gauge, owed) in &probe.backlogs {
            if gauge != owed {
                broken.push((Rule::Backlog, format!("WAL {wal}: the gauge says {gauge}, {owed} are owed")));
            }
        }
        for (what, held, allowed) in &probe.memory {
            if held > allowed {
                broken.push((Rule::Memory, format!("{what} holds {held} bytes, {allowed} are allowed")));
            }
        }
        if self.allowances.honest {
            for (incarnation, partition, watermark, durable) in &probe.watermarks {
                if watermark > durable {
                    let text = format!("{incarnation}/{partition}: {watermark} visible, only {durable} durable");
                    broken.push((Rule::Watermark, text));
                }
                let seen = self.partitions.entry((*incarnation, *partition)).or_default();
                if *watermark < seen.high_watermark {
                    let text =
                        format!("{incarnation}/{partition} went back from {} to {watermark}", seen.high_watermark);
                    broken.push((Rule::Watermark, text));
                }
                seen.high_watermark = *watermark;
            }
            for name in &probe.unnamed {
                broken.push((Rule::Unnamed, format!("{name}: a power cut may take the name")));
            }
        }
        // Where the disk fails, it has not failed yet.
        let spared = self.allowances.disk_errors && !self.fault_ends.is_empty();
        if (probe.latched || !probe.poisoned.is_empty()) && self.allowances.honest && !spared {
            let text = format!("WAL latched: {}, logs poisoned: {:?}", probe.latched, probe.poisoned);
            broken.push((Rule::Latched, text));
        }
        for (rule, text) in broken {
            self.violate(at, rule, text);
        }
    }

    /// A copy that was delivered before, for a replay read.
    pub fn pick_copy(&self, draw: u64) -> Option<(String, CopyId)> {
        let live = |id: &CopyId| self.topics.get(&id.0).filter(|topic| topic.delete_started.is_none());
        let copies: Vec<&CopyId> = self.copies.keys().filter(|id| live(id).is_some()).collect();
        let id = **copies.get((draw % copies.len().max(1) as u64) as usize)?;
        live(&id).map(|topic| (topic.name.clone(), id))
    }
}
