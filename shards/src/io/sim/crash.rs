//! Crashes, damage at rest, and looking at a disk from outside.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use super::disk::{Action, Incident, State, CLAIM_BYTES};
use super::faults::Op;
use super::image::{Image, Survival};
use super::tree::ROOT;
use crate::rt::sim::now_in_simulation;
use crate::rt::Instant;

impl State {
    pub(super) fn process_crash(&mut self, now: Option<Instant>) {
        if let Some(now) = now {
            self.settle(now);
        }
        for ((_, call), mut flight) in std::mem::take(&mut self.flights) {
            flight.abandoned = true;
            match (self.rng.below(4), now) {
                (0, _) => {}
                (1, _) => self.land_some(&mut flight),
                (2, Some(now)) => {
                    let late = now + Duration::from_micros(self.rng.range(1, 5_000));
                    self.flights.insert((late, call), flight);
                }
                _ => drop(self.apply(&mut flight)),
            }
        }
        for file in self.files.values_mut() {
            file.image.evict_dropped(&mut self.rng);
        }
        self.crashed("process crash");
    }

    pub(super) fn power_cut(&mut self, survival: Option<Survival>) {
        if let Some(now) = now_in_simulation() {
            self.settle(now);
        }
        for (_, mut flight) in std::mem::take(&mut self.flights) {
            match &flight.action {
                Action::Write { .. } => self.land_some(&mut flight),
                Action::Read { .. } | Action::SyncData { .. } | Action::SyncDir | Action::List => {}
                _ => {
                    if self.rng.chance(1, 2) {
                        drop(self.apply(&mut flight));
                    }
                }
            }
        }
        let drawn = match self.rng.below(6) {
            0 => Survival::Nothing,
            1 => Survival::Everything,
            2 | 3 => Survival::Independent,
            _ => Survival::InOrder(self.serial.saturating_sub(self.rng.below(64))),
        };
        let survival = survival.unwrap_or(drawn);
        self.tree.power_cut(survival, &mut self.rng);
        for file in self.files.values_mut() {
            file.image.power_cut(survival, &mut self.rng);
        }
        self.crashed(&format!("power cut, {survival:?}"));
    }

    fn crashed(&mut self, what: &str) {
        self.boot += 1;
        self.answers.clear();
        self.due.retain(|call, _| self.flights.keys().any(|(_, other)| other == call));
        for file in self.files.values_mut() {
            file.opens = 0;
        }
        self.collect();
        for file in self.files.values_mut().filter(|file| file.unlinked) {
            // A removed file whose entry came back has its blocks again.
            file.unlinked = false;
            file.claimed.extend(0..file.image.bytes().div_ceil(CLAIM_BYTES));
        }
        self.claimed_blocks = self.files.values().map(|file| file.claimed.len() as u64).sum();
        self.say(self.now, Op::SyncData, Rc::from(Path::new("/")), format!("=== {what} ==="));
    }

    pub(super) fn flip_bit(&mut self, path: &Path, offset: u64, bit: u8) -> bool {
        let Some(file) = self.tree.find(path).and_then(|inode| self.files.get_mut(&inode)) else { return false };
        if offset >= file.image.bytes() {
            return false;
        }
        file.image.alter(offset, |byte| *byte ^= 1 << (bit % 8));
        self.incident(Incident::Rotted { path: path.to_owned(), offset, bit: bit % 8 });
        true
    }

    pub(super) fn rot(&mut self, part: &str) -> Option<(PathBuf, u64)> {
        let mut paths = self.files();
        paths.retain(|path| path.to_str().is_some_and(|text| text.contains(part)));
        paths.retain(|path| self.tree.find(path).and_then(|i| self.files.get(&i)).is_some_and(|f| f.image.bytes() > 0));
        if paths.is_empty() {
            return None;
        }
        let path = paths.swap_remove(self.rng.below(paths.len() as u64) as usize);
        let bytes = self.peek(&path, |image| image.bytes())?;
        let (offset, bit) = (self.rng.below(bytes), self.rng.below(8) as u8);
        self.flip_bit(&path, offset, bit).then_some((path, offset))
    }

    pub(super) fn peek<T>(&mut self, path: &Path, look: impl FnOnce(&Image) -> T) -> Option<T> {
        if let Some(now) = now_in_simulation() {
            self.settle(now);
        }
        self.tree.find(path).and_then(|inode| self.files.get(&inode)).map(|file| look(&file.image))
    }

    pub(super) fn is_name_durable(&mut self, path: &Path) -> bool {
        if let Some(now) = now_in_simulation() {
            self.settle(now);
        }
        self.tree.is_durable(path)
    }

    pub(super) fn poke(&mut self, path: &Path, offset: u64, bytes: &[u8]) {
        if let Some(file) = self.tree.find(path).and_then(|inode| self.files.get_mut(&inode)) {
            for (at, byte) in (offset..).zip(bytes) {
                file.image.alter(at, |old| *old = *byte);
            }
        }
    }

    pub(super) fn files(&mut self) -> Vec<PathBuf> {
        if let Some(now) = now_in_simulation() {
            self.settle(now);
        }
        let (mut found, mut open) = (Vec::new(), vec![(PathBuf::from("/"), ROOT)]);
        while let Some((path, directory)) = open.pop() {
            for (name, inode) in self.tree.entries(directory) {
                let path = path.join(name);
                if self.tree.is_directory(inode) {
                    open.push((path, inode));
                } else {
                    found.push(path);
                }
            }
        }
        found.sort();
        found
    }

    pub(super) fn calls(&self) -> u64 {
        self.next_call - 1
    }

    pub(super) fn in_flight(&self) -> usize {
        self.flights.len()
    }
}
