//! One file's content: what reads see, and for every sector that no sync has covered, what else a power cut may
//! leave there. No clock, no paths, no faults: those belong to the disk.

use std::collections::BTreeMap;
use std::rc::Rc;

use crate::rt::sim::Rng;

/// How a power cut treats what was not synced. Drawn once per cut, so that extremes come up as well as mixtures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survival {
    /// Only what was synced.
    Nothing,
    /// All that was written, as if the device had just finished.
    Everything,
    /// Each sector and each entry on its own.
    Independent,
    /// The device worked in order up to this serial number, and tore the write that has it.
    InOrder(u64),
}

/// Content of a sector after one unsynced write.
struct Version {
    serial: u64,
    /// Pending shrinks at the time of the write: what was cut off does not come back with a later write.
    shrinks: usize,
    write: Rc<[u8]>,
    at: usize,
}

/// A sector whose durable content differs, or may differ, from the visible one.
struct Dirty {
    /// `None` is zeros, which is what most sectors of a new file are.
    durable: Option<Box<[u8]>>,
    versions: Vec<Version>,
    /// A sync failed and dropped the content: readers still see it, no later sync will write it (fsyncgate).
    dropped: bool,
}

struct LengthChange {
    serial: u64,
    bytes: u64,
    /// Pending shrinks up to and including this change.
    shrinks: usize,
}

pub(super) struct Image {
    sector_bytes: usize,
    visible: Vec<u8>,
    dirty: BTreeMap<u64, Dirty>,
    durable_bytes: u64,
    lengths: Vec<LengthChange>,
    /// First sector that each pending shrink removed.
    shrinks: Vec<u64>,
}

impl Image {
    pub(super) fn new(sector_bytes: usize) -> Image {
        Image {
            sector_bytes,
            visible: Vec::new(),
            dirty: BTreeMap::new(),
            durable_bytes: 0,
            lengths: Vec::new(),
            shrinks: Vec::new(),
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.visible.len() as u64
    }

    pub(super) fn visible(&self) -> &[u8] {
        &self.visible
    }

    /// Number of sectors that `offset..offset + bytes` touches.
    pub(super) fn sectors_in(&self, offset: u64, bytes: usize) -> usize {
        let size = self.sector_bytes as u64;
        ((offset + bytes as u64).div_ceil(size) - offset / size) as usize
    }

    /// Lets those sectors of a write reach the file for which `lands(index)` holds; the index counts from 0.
    pub(super) fn land(&mut self, offset: u64, bytes: &[u8], serial: u64, lands: impl Fn(usize) -> bool) {
        if bytes.is_empty() {
            return;
        }
        let size = self.sector_bytes as u64;
        let (first, end) = (offset / size, offset + bytes.len() as u64);
        let whole = offset.is_multiple_of(size) && end.is_multiple_of(size);
        let shared: Rc<[u8]> = if whole { Rc::from(bytes) } else { Rc::from([]) };
        for index in 0..self.sectors_in(offset, bytes.len()) {
            if !lands(index) {
                continue;
            }
            let sector = first + index as u64;
            let (from, to) = ((sector * size).max(offset), ((sector + 1) * size).min(end));
            self.mark(sector);
            self.grow_to(to, serial);
            let piece = &bytes[(from - offset) as usize..(to - offset) as usize];
            self.visible[from as usize..to as usize].copy_from_slice(piece);
            let version = if whole {
                Version { serial, shrinks: self.shrinks.len(), write: shared.clone(), at: (from - offset) as usize }
            } else {
                let content = Rc::from(self.sector(sector));
                Version { serial, shrinks: self.shrinks.len(), write: content, at: 0 }
            };
            if let Some(dirty) = self.dirty.get_mut(&sector) {
                dirty.versions.push(version);
                dirty.dropped = false;
            }
        }
    }

    pub(super) fn set_bytes(&mut self, bytes: u64, serial: u64) {
        if bytes >= self.bytes() {
            return self.grow_to(bytes, serial);
        }
        let size = self.sector_bytes as u64;
        for sector in bytes / size..self.bytes().div_ceil(size) {
            self.mark(sector);
        }
        self.visible.truncate(bytes as usize);
        self.shrinks.push(bytes.div_ceil(size));
        self.lengths.push(LengthChange { serial, bytes, shrinks: self.shrinks.len() });
        if !bytes.is_multiple_of(size) {
            let content = Rc::from(self.sector(bytes / size));
            let version = Version { serial, shrinks: self.shrinks.len(), write: content, at: 0 };
            if let Some(dirty) = self.dirty.get_mut(&(bytes / size)) {
                dirty.versions.push(version);
            }
        }
    }

    fn grow_to(&mut self, bytes: u64, serial: u64) {
        if bytes > self.bytes() {
            self.visible.resize(bytes as usize, 0);
            match self.lengths.last_mut() {
                Some(last) if last.serial == serial => last.bytes = bytes,
                _ => self.lengths.push(LengthChange { serial, bytes, shrinks: self.shrinks.len() }),
            }
        }
    }

    /// The visible content of a sector, zeros behind the end of the file.
    fn sector(&self, sector: u64) -> Box<[u8]> {
        let mut content = vec![0; self.sector_bytes];
        let from = (sector as usize * self.sector_bytes).min(self.visible.len());
        let to = (from + self.sector_bytes).min(self.visible.len());
        content[..to - from].copy_from_slice(&self.visible[from..to]);
        content.into_boxed_slice()
    }

    /// Remembers what is durable in a sector before its visible content changes for the first time.
    fn mark(&mut self, sector: u64) {
        if !self.dirty.contains_key(&sector) {
            let behind_end = sector * self.sector_bytes as u64 >= self.bytes();
            let durable = if behind_end { None } else { unless_zeros(&self.sector(sector)) };
            self.dirty.insert(sector, Dirty { durable, versions: Vec::new(), dropped: false });
        }
    }

    /// Shows `content` (`None`: zeros) to readers, as far as the file reaches.
    fn show(&mut self, sector: u64, content: Option<&[u8]>) {
        put(&mut self.visible, sector, self.sector_bytes, content);
    }

    /// Makes everything up to `serial` durable, data and length.
    pub(super) fn sync(&mut self, serial: u64) {
        let shrunk = self.sync_length(serial);
        let size = self.sector_bytes;
        for (sector, dirty) in &mut self.dirty {
            dirty.sync(*sector, size, &shrunk, |version| version.serial <= serial);
        }
        self.forget_clean();
    }

    /// Makes the sectors of one write durable, and the length that is needed to read them back.
    pub(super) fn sync_range(&mut self, offset: u64, bytes: usize, serial: u64) {
        let end = offset + bytes as u64;
        let shrunk =
            if end > self.durable_bytes || !self.shrinks.is_empty() { self.sync_length(serial) } else { Vec::new() };
        let size = self.sector_bytes;
        let first = offset / size as u64;
        let range = first..first + self.sectors_in(offset, bytes) as u64;
        if shrunk.is_empty() {
            for (sector, dirty) in self.dirty.range_mut(range.clone()) {
                dirty.sync(*sector, size, &[], |version| version.serial <= serial);
            }
            let clean: Vec<u64> = self.dirty.range(range).filter(|(_, d)| d.is_clean()).map(|(s, _)| *s).collect();
            if self.shrinks.is_empty() {
                clean.iter().for_each(|sector| drop(self.dirty.remove(sector)));
            }
        } else {
            for (sector, dirty) in &mut self.dirty {
                let own = range.contains(sector);
                dirty.sync(*sector, size, &shrunk, |version| own && version.serial <= serial);
            }
            self.forget_clean();
        }
    }

    /// Makes length changes up to `serial` durable; returns the shrinks among them.
    fn sync_length(&mut self, serial: u64) -> Vec<u64> {
        let done = self.lengths.iter().take_while(|change| change.serial <= serial).count();
        let Some(last) = self.lengths[..done].last() else { return Vec::new() };
        self.durable_bytes = last.bytes;
        let shrinks = last.shrinks;
        self.lengths.drain(..done);
        self.lengths.iter_mut().for_each(|change| change.shrinks -= shrinks);
        self.shrinks.drain(..shrinks).collect()
    }

    fn forget_clean(&mut self) {
        let pending = &self.shrinks;
        self.dirty.retain(|sector, dirty| !dirty.is_clean() || pending.iter().any(|from| sector >= from));
    }

    /// A failed sync (fsyncgate): every sector up to `serial` was written or was dropped, and counts as clean.
    pub(super) fn fail_sync(&mut self, serial: u64, cached: bool, rng: &mut Rng) {
        let mut reverted = Vec::new();
        let written_of_2 = rng.below(3);
        let size = self.sector_bytes;
        for (sector, dirty) in &mut self.dirty {
            if !dirty.versions.iter().any(|version| version.serial <= serial) || !self.shrinks.is_empty() {
                continue;
            }
            if rng.chance(written_of_2, 2) {
                dirty.sync(*sector, size, &[], |version| version.serial <= serial);
                continue;
            }
            dirty.versions.retain(|version| version.serial > serial);
            if !dirty.versions.is_empty() {
                continue;
            }
            if cached && rng.chance(1, 2) {
                dirty.dropped = true;
            } else {
                reverted.push((*sector, dirty.durable.clone()));
            }
        }
        for (sector, content) in reverted {
            self.show(sector, content.as_deref());
        }
        self.forget_clean();
    }

    /// The page cache lets go of content that a failed sync had dropped: readers see the device again.
    pub(super) fn evict_dropped(&mut self, rng: &mut Rng) {
        let gone: Vec<u64> = self.dirty.iter().filter(|(_, d)| d.dropped).map(|(sector, _)| *sector).collect();
        for sector in gone {
            if rng.chance(1, 2) {
                if let Some(dirty) = self.dirty.remove(&sector) {
                    self.show(sector, dirty.durable.as_deref());
                }
            }
        }
    }

    /// Leaves what a power cut leaves: one of the contents each unsynced sector ever had since its last sync (E15).
    pub(super) fn power_cut(&mut self, survival: Survival, rng: &mut Rng) {
        let length = survival.pick(&self.lengths, |change| change.serial, rng);
        let (bytes, kept) = length.map_or((self.durable_bytes, 0), |change| (change.bytes, change.shrinks));
        self.visible.resize(bytes as usize, 0);
        for (sector, dirty) in std::mem::take(&mut self.dirty) {
            let covers = |range: std::ops::Range<usize>| range.into_iter().filter(|i| sector >= self.shrinks[*i]);
            let since = covers(0..kept).next_back().map_or(0, |i| i + 1);
            let until = covers(kept..self.shrinks.len()).next().unwrap_or(usize::MAX);
            let possible: Vec<&Version> =
                dirty.versions.iter().filter(|v| v.shrinks >= since && v.shrinks <= until).collect();
            let base = if since == 0 { dirty.durable.as_deref() } else { None };
            match survival.pick(&possible, |version| version.serial, rng) {
                Some(version) => self.show(sector, Some(version.content(self.sector_bytes))),
                None => self.show(sector, base),
            }
        }
        self.durable_bytes = bytes;
        self.lengths.clear();
        self.shrinks.clear();
    }

    /// What would be there if nothing unsynced survived.
    pub(super) fn durable(&self) -> Vec<u8> {
        let mut content = self.visible.clone();
        content.resize(self.durable_bytes as usize, 0);
        for (sector, dirty) in &self.dirty {
            put(&mut content, *sector, self.sector_bytes, dirty.durable.as_deref());
        }
        content
    }

    /// Changes bytes behind everybody's back: bit rot, or a test that prepares damage. The change is durable.
    pub(super) fn alter(&mut self, offset: u64, change: impl Fn(&mut u8)) {
        let Some(byte) = self.visible.get_mut(offset as usize) else { return };
        change(byte);
        let (sector, at) = (offset / self.sector_bytes as u64, offset as usize % self.sector_bytes);
        if let Some(dirty) = self.dirty.get_mut(&sector) {
            let size = self.sector_bytes;
            change(&mut dirty.durable.get_or_insert_with(|| vec![0; size].into_boxed_slice())[at]);
        }
    }
}

/// Copies a sector into the image of a file, as far as that reaches.
fn put(image: &mut [u8], sector: u64, sector_bytes: usize, content: Option<&[u8]>) {
    let from = (sector as usize * sector_bytes).min(image.len());
    let to = (from + sector_bytes).min(image.len());
    match content {
        Some(content) => image[from..to].copy_from_slice(&content[..to - from]),
        None => image[from..to].fill(0),
    }
}

fn unless_zeros(content: &[u8]) -> Option<Box<[u8]>> {
    content.iter().any(|byte| *byte != 0).then(|| Box::from(content))
}

impl Version {
    fn content(&self, sector_bytes: usize) -> &[u8] {
        &self.write[self.at..self.at + sector_bytes]
    }
}

impl Dirty {
    fn sync(&mut self, sector: u64, sector_bytes: usize, shrunk: &[u64], covered: impl Fn(&Version) -> bool) {
        let cut = shrunk.iter().rposition(|from| sector >= *from).map_or(0, |i| i + 1);
        if cut > 0 {
            self.durable = None;
            self.versions.retain(|version| version.shrinks >= cut);
        }
        let done = self.versions.iter().filter(|version| covered(version)).count();
        if let Some(last) = self.versions[..done].last() {
            self.durable = unless_zeros(last.content(sector_bytes));
        }
        self.versions.drain(..done);
        for version in &mut self.versions {
            version.shrinks = version.shrinks.saturating_sub(shrunk.len());
        }
    }

    fn is_clean(&self) -> bool {
        self.versions.is_empty() && !self.dropped
    }
}

impl Survival {
    /// The last of the ordered, unsynced `steps` that survived; `None` when none did.
    fn pick<'a, T>(self, steps: &'a [T], serial: impl Fn(&T) -> u64, rng: &mut Rng) -> Option<&'a T> {
        match self {
            Survival::Nothing => None,
            Survival::Everything => steps.last(),
            Survival::Independent => match rng.below(steps.len() as u64 + 1) {
                0 => None,
                picked => steps.get(picked as usize - 1),
            },
            Survival::InOrder(last) => {
                let torn = rng.chance(1, 2);
                steps.iter().rev().find(|step| serial(step) < last || (serial(step) == last && !torn))
            }
        }
    }

    /// Whether a step of its own survives.
    pub(super) fn keeps(self, serial: u64, rng: &mut Rng) -> bool {
        self.pick(&[serial], |serial| *serial, rng).is_some()
    }
}
